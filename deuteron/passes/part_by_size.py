"""Elementwise groups whose results have several sizes are split, so that each part is a single
loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deuteron.ops.opdef import Fusion

if TYPE_CHECKING:
    from deuteron.passes.fuse import Fuser


def part_sizes(f: Fuser) -> None:
    """Split each elementwise group that writes results of several sizes: nodes of one size move to
    a group of their own. If the results of one size share no unwritten intermediate with the
    others, all nodes that lead to them move, such as queries and fewer keys that are rotated by the
    same angles. Otherwise only the nodes of the largest size move, provided that no smaller node
    reads them, such as the gradient of both halves of a gate side by side."""
    left = list(f.groups)
    while left:
        g = left.pop()
        group = f.groups[g]
        if group.kind is not Fusion.ELEMENTWISE or len(group.nodes) == 1:
            continue
        sizes = {i: f.graph.types[f.graph.nodes[i].outputs[0]].numel for i in group.nodes}
        written = [i for i in group.nodes if _is_written(f, i)]
        if len({sizes[i] for i in written}) < 2:
            continue
        apart = _by_result(f, sizes, written)
        if not apart:
            most = max(sizes[i] for i in written)
            apart = [i for i in group.nodes if sizes[i] == most]
            if _reads(f, [i for i in group.nodes if sizes[i] != most], apart):
                continue
        _part(f, g, apart)
        left.append(g)


def _is_written(f: Fuser, i: int) -> bool:
    outputs = f.graph.nodes[i].outputs
    return any(f.is_written(v, f.graph.users.get(v, ())) for v in outputs)


def _reads(f: Fuser, nodes: list[int], others: list[int]) -> bool:
    """Whether any of these nodes reads a result of one of ``others``."""
    read = {f.graph.places.get(v) for i in nodes for v in f.graph.nodes[i].uses}
    return not read.isdisjoint(others)


def _by_result(f: Fuser, sizes: dict[int, int], written: list[int]) -> list[int]:
    """Return the nodes that lead to the results of one size and to nothing else in the group, if
    the rest of the group does not read them; an empty list if no size has such nodes."""
    needed: dict[int, set[int]] = {}
    for size in {sizes[i] for i in written}:
        stack = [i for i in written if sizes[i] == size]
        found = needed[size] = set(stack)
        while stack:
            places = (f.graph.places.get(v) for v in f.graph.nodes[stack.pop()].uses)
            new = {p for p in places if p in sizes and p not in found}
            new -= {p for p in new if p in written and sizes[p] != size}
            found |= new
            stack += new
    for size, own in sorted(needed.items(), reverse=True):
        others = set().union(*(nodes for other, nodes in needed.items() if other != size))
        rest = [i for i in sizes if i not in own]
        if rest and own.isdisjoint(others) and not _reads(f, rest, list(own)):
            return sorted(own)
    return []


def _part(f: Fuser, g: int, apart: list[int]) -> None:
    """Move the nodes ``apart`` to a new group that runs after the rest of group ``g``."""
    group, nodes = f.groups[g], f.graph.nodes
    first = len(nodes) + apart[0]  # an id that no group has used
    group.nodes = [i for i in group.nodes if i not in apart]
    preds = {f.find(p) for p in group.preds} | {g}
    f.groups[first] = type(group)(apart, group.kind, None, high=group.high, preds=preds)
    f.of.update(dict.fromkeys(apart, first))
    for user in (u for i in apart for v in nodes[i].outputs for u in f.graph.users.get(v, ())):
        reader = f.group_of(user.outputs[0])
        if reader != first:
            f.groups[reader].preds.add(first)
