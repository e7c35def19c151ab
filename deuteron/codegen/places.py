"""Operators whose elements depend on where they are: movement, channels, halves, classes, random
places.

Movement computes nothing: an element at one index is found at another one of the input. Pad and
concat read under guards, so that nothing outside is read; a gather reads at an index that is itself
a value.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from deuteron.codegen.index import Affine, Index, flatten, unflatten
from deuteron.codegen.scalar import Guard, Guards, guards_of, number
from deuteron.ir.graph import Node
from deuteron.ops.cross_entropy import class_axis
from deuteron.ops.formula import Arg
from deuteron.ops.random import cutoff

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering

Placed = Callable[["Lowering", Node, Index, Guards], Arg]


# ---- elements that are moved


def _reshape(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    given, made = low.type(node).shape, low.graph.types[node.output].shape
    if [n for n in given if n != 1] == [n for n in made if n != 1]:  # only sizes of 1 come or go
        kept = iter([i for i, n in zip(index, made, strict=True) if n != 1])
        place = tuple(Affine() if n == 1 else next(kept) for n in given)
        return low.at(low.input(node), place, guards)
    position = flatten(index, made)
    inner = prod(given[1:])
    ahead = max(0, -(position.low // max(inner, 1)))  # rows before the first, in a pad
    place = unflatten(position + ahead * inner, given)
    if ahead:
        place = (place[0] + -ahead, *place[1:])
    return low.at(low.input(node), place, guards)


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
    sides = enumerate(zip(index, low.type(node).shape, strict=True))
    turned = [i * -1 + (n - 1) if d in node.attrs["axes"] else i for d, (i, n) in sides]
    return low.at(low.input(node), tuple(turned), guards)


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
        if result is not None:
            part = low.op("select", low.inside((inside,)), part, result)
        result = part
    assert result is not None
    return result


def _pad(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    shape = low.type(node).shape
    moved = tuple(i + -before for i, before in zip(index, node.attrs["low"], strict=True))
    if node.attrs["mode"] != "constant":
        back = EDGES[node.attrs["mode"]]
        sides = zip(moved, shape, strict=True)
        held = [i if i.low >= 0 and i.high < n else back(low, i, n) for i, n in sides]
        return low.at(low.input(node), tuple(held), guards)
    inside = guards_of(moved, shape)
    part = low.at(low.input(node), moved, (*guards, *inside))
    if not inside:
        return part
    filling = number(node.attrs["value"], low.type(node).dtype.kind)
    return low.op("select", low.inside(inside), part, filling)


def _reflected(low: Lowering, i: Affine, size: int) -> Affine:
    """Reflect the index at both ends: |i|, then n−1 − |n−1 − i|."""
    place = low.op("abs", low.position(i))
    if i.high >= size:
        place = low.op("sub", size - 1, low.op("abs", low.op("sub", size - 1, place)))
    return low.dynamic(place, size, given=False)


def _repeated(low: Lowering, i: Affine, size: int) -> Affine:
    place = low.op("minimum", low.op("maximum", low.position(i), 0), size - 1)
    return low.dynamic(place, size, given=False)


EDGES = {"reflect": _reflected, "replicate": _repeated}


def _picked(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    """By index: the address of one load is the value of another."""
    axis = node.attrs.get("axis", 0)
    named = {"gather": index, "index_select": (index[axis],), "embedding": index[:-1]}[node.op]
    found = low.dynamic(low.at(low.input(node, 1), named, guards), low.type(node).shape[axis])
    row = node.op == "embedding"
    place = (found, index[-1]) if row else replaced(index, axis, found)
    return low.at(low.input(node), place, guards)


# ---- elements that are computed


def _cast(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    """An explicit cast rounds; fused intermediates otherwise stay wide."""
    x, given = low.at(low.input(node), index, guards), low.type(node).dtype
    out = low.graph.types[node.output].dtype
    if out.is_float and out.bits < (64 if low.wide else 32):
        return low.rounded(low.as_float(x), out)
    return low.converted(x, given, out)


def _prelu(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    x, weight = low.float_at(low.input(node), index, guards), low.type(node, 1)
    channel = index[1] if len(index) > 1 and weight.numel > 1 else Affine()
    slope = low.float_at(low.input(node, 1), (channel,)[: weight.rank], guards)
    return low.op("select", low.op("gt", x, 0.0), x, low.op("mul", x, slope))


def _glu(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    axis = node.attrs["axis"]
    half = low.type(node).shape[axis] // 2
    value = low.float_at(low.input(node), index, guards)
    gate = low.float_at(low.input(node), replaced(index, axis, index[axis] + half), guards)
    return low.op("mul", value, low.formula("sigmoid", gate))


def _batch_norm(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    """(x − mean) / √(var + eps) · weight + bias with one number of each per channel."""
    x = low.float_at(low.input(node), index, guards)
    channel = (index[1],)
    mean = low.float_at(low.input(node, 1), channel, guards)
    var = low.float_at(low.input(node, 2), channel, guards)
    rstd = low.op("div", 1.0, low.op("sqrt", low.op("add", var, node.attrs["eps"])))
    y = low.op("mul", low.op("sub", x, mean), rstd)
    return low.affine(node, 3, y, channel, guards)


def _dropout(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    """Zero where the random word of this place is below the cutoff; its bits are those of
    :mod:`ops.random`."""
    p = node.attrs["p"]
    x = low.float_at(low.input(node), index, guards)
    kept = low.op("mul", x, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
    place = flatten(index, low.type(node).shape)
    far = low.type(node).numel > 1 << 32
    seed = low.at(low.input(node, 1), (), ())
    word = low.op("random", seed, low.position(place), kind="int", attrs=(("far", far),))
    return low.op("select", low.op("ge", word, cutoff(p)), kept, 0.0)


def nll_terms(low: Lowering, node: Node, index: Index, guards: Guards) -> tuple[Arg, Arg]:
    """Return what the position ``index`` adds to the loss, −weight · x at its class, and the
    weight.

    A target that is ignored may lie outside, so it is replaced before it is used as an index."""
    shape, axis = low.type(node).shape, class_axis(low.type(node).shape)
    target = low.at(low.input(node, 1), index, guards)
    valid = low.op("ne", target, node.attrs["ignore_index"])
    at = low.dynamic(low.op("select", valid, target, 0), shape[axis])
    place = (*index[:axis], at, *index[axis:])
    x = low.float_at(low.input(node), place, guards)
    weight: Arg = number(1.0)
    if has_input(node, 2):
        weight = low.float_at(low.input(node, 2), (at,), guards)
    loss = low.op("neg", low.op("mul", weight, x))
    return low.op("select", valid, loss, 0.0), low.op("select", valid, weight, 0.0)


def replaced(index: Index, axis: int, by: Affine) -> Index:
    return (*index[:axis], by, *index[axis + 1 :])


def has_input(node: Node, slot: int) -> bool:
    return len(node.inputs) > slot and node.inputs[slot] is not None


_MOVED = (_reshape, _permute, _expand, _slice, _flip, _concat, _pad)
_COMPUTED = (_cast, _prelu, _glu, _batch_norm, _dropout)
PLACES: dict[str, Placed] = {rule.__name__[1:]: rule for rule in (*_MOVED, *_COMPUTED)}
PLACES |= dict.fromkeys(("gather", "index_select", "embedding"), _picked)
PLACES["to_layout"] = lambda low, node, index, guards: low.at(low.input(node), index, guards)
# with reduction="none"; otherwise it is a reduction, see reductions.py
PLACES["nll_loss"] = lambda *given: nll_terms(*given)[0]
