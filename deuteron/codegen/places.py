"""Movement in scalar programs: an element asked for at one index is found at another.

Nothing is computed here. Pad and concat ask under guards, so that nothing outside is read; a
gather asks at an index that is itself a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deuteron.codegen.index import Affine, Index, flatten, unflatten
from deuteron.codegen.scalar import Guard
from deuteron.ir.graph import Node
from deuteron.ops.formula import Arg, CannotLower

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering

Guards = tuple[Guard, ...]
Move = Callable[["Lowering", Node, Index, Guards], Arg]


def _reshape(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    given, made = low.type(node).shape, low.graph.types[node.output].shape
    if [n for n in given if n != 1] == [n for n in made if n != 1]:  # only sizes of 1 come or go
        kept = iter([i for i, n in zip(index, made, strict=True) if n != 1])
        return low.at(
            low.input(node), tuple(Affine() if n == 1 else next(kept) for n in given), guards
        )
    position = flatten(index, made)
    if position.low < 0:  # outside a pad or concat, which a division cannot tell apart
        raise CannotLower("a reshape is read at indices shifted by pad or concat")
    return low.at(low.input(node), unflatten(position, given), guards)


def _permute(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    back = [0] * len(index)
    for out, source in enumerate(node.attrs["dims"]):
        back[source] = out
    return low.at(low.input(node), tuple(index[b] for b in back), guards)


def _expand(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    return low.at(low.input(node), low.broadcast(index, low.type(node).shape), guards)


def _slice(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    axis = node.attrs["axis"]
    moved = index[axis] * node.attrs["step"] + node.attrs["start"]
    return low.at(low.input(node), replaced(index, axis, moved), guards)


def _flip(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    turned = tuple(
        i * -1 + (n - 1) if d in node.attrs["axes"] else i
        for d, (i, n) in enumerate(zip(index, low.type(node).shape, strict=True))
    )
    return low.at(low.input(node), turned, guards)


def _concat(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    axis, start, result = node.attrs["axis"], 0, None
    out = low.graph.types[node.output].dtype
    for value in node.uses:
        size = low.graph.types[value].shape[axis]
        moved = index[axis] + -start
        inside = Guard(moved, 0, size)
        start += size
        if moved.high < 0 or moved.low >= size:
            continue
        part = low.at(value, replaced(index, axis, moved), (*guards, inside))
        part = low.converted(part, low.graph.types[value].dtype, out)
        if result is None:
            result = part
        else:
            result = low.op("select", low.inside((inside,)), part, result)
    assert result is not None
    return result


def _pad(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    shape = low.type(node).shape
    moved = tuple(i + -before for i, before in zip(index, node.attrs["low"], strict=True))
    if node.attrs["mode"] != "constant":
        back = EDGES[node.attrs["mode"]]
        held = tuple(
            i if i.low >= 0 and i.high < n else back(low, i, n)
            for i, n in zip(moved, shape, strict=True)
        )
        return low.at(low.input(node), held, guards)
    inside = tuple(
        Guard(i, 0, n) for i, n in zip(moved, shape, strict=True) if i.low < 0 or i.high >= n
    )
    part = low.at(low.input(node), moved, (*guards, *inside))
    if not inside:
        return part
    filling = low.constant(node.attrs["value"], low.type(node).dtype)
    return low.op("select", low.inside(inside), part, filling)


def _reflected(low: Lowering, i: Affine, size: int) -> Affine:
    """At both ends the walk turns round: |i|, then n−1 − |n−1 − i|."""
    place = low.op("abs", low.position(i))
    if i.high >= size:
        place = low.op("sub", size - 1, low.op("abs", low.op("sub", size - 1, place)))
    return low.dynamic(place, size, given=False)


def _repeated(low: Lowering, i: Affine, size: int) -> Affine:
    place = low.op("minimum", low.op("maximum", low.position(i), 0), size - 1)
    return low.dynamic(place, size, given=False)


EDGES: dict[str, Callable[[Lowering, Affine, int], Affine]] = {
    "reflect": _reflected,
    "replicate": _repeated,
}


def _picked(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    """By index: the address of one load is the value of another."""
    axis = node.attrs.get("axis", 0)
    named = {"gather": index, "index_select": (index[axis],), "embedding": index[:-1]}[node.op]
    found = low.dynamic(low.at(low.input(node, 1), named, guards), low.type(node).shape[axis])
    row = node.op == "embedding"
    place = (found, index[-1]) if row else replaced(index, axis, found)
    return low.at(low.input(node), place, guards)


def replaced(index: Index, axis: int, by: Affine) -> Index:
    return (*index[:axis], by, *index[axis + 1 :])


_NAMED = (_reshape, _permute, _expand, _slice, _flip, _concat, _pad)
MOVES: dict[str, Move] = {move.__name__[1:]: move for move in _NAMED}
MOVES |= dict.fromkeys(("gather", "index_select", "embedding"), _picked)
MOVES["to_layout"] = lambda low, node, index, guards: low.at(low.input(node), index, guards)
