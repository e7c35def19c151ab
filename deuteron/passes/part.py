"""Elementwise work that is no single loop, parted by the sizes of what it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deuteron.ops import table
from deuteron.ops.opdef import Fusion

if TYPE_CHECKING:
    from deuteron.passes.fuse import Fuser


def part_sizes(f: Fuser) -> None:
    """Of elementwise work whose results are of several sizes, such as the result of a gate and the
    gradient of its two halves side by side, the larger ones, where elements move there and nothing
    smaller is made of them, are a group of their own."""
    nodes, places, users = f.graph.nodes, f.graph.places, f.graph.users
    for g, group in list(f.groups.items()):
        if group.kind is not Fusion.ELEMENTWISE or len(group.nodes) == 1:
            continue
        sizes = {i: f.graph.types[nodes[i].outputs[0]].numel for i in group.nodes}
        written = [
            sizes[i]
            for i in group.nodes
            if any(f.is_written(v, users.get(v, ())) for v in nodes[i].outputs)
        ]
        large = [i for i, size in sizes.items() if size == max(written, default=-1)]
        small = [i for i in group.nodes if i not in large]
        back = {places[v] for i in small for v in nodes[i].uses if v in places}
        moved = any(table.get(nodes[i].op).fusion is Fusion.INJECTIVE for i in large)
        if len({*written}) < 2 or not moved or not back.isdisjoint(large):
            continue
        first = len(nodes) + large[0]  # a number that no group has had
        group.nodes = small
        preds = {f.find(p) for p in group.preds} | {g}
        f.groups[first] = type(group)(large, group.kind, None, high=group.high, preds=preds)
        f.of.update(dict.fromkeys(large, first))
        for user in (u for i in large for v in nodes[i].outputs for u in users.get(v, ())):
            reader = f.group_of(user.outputs[0])
            if reader != first:
                f.groups[reader].preds.add(first)
