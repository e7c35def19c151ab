"""Elementwise operators that look at where they are: channels, halves, classes, random places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deuteron.codegen.index import Affine, Index, flatten
from deuteron.codegen.moves import Guards, replaced
from deuteron.ir.graph import Node
from deuteron.ops.formula import Arg
from deuteron.ops.random import cutoff

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering

Placed = Callable[["Lowering", Node, Index, Guards], Arg]


def _cast(low: Lowering, node: Node, index: Index, guards: Guards) -> Arg:
    """An explicit cast rounds; fused intermediates otherwise stay wide."""
    x, given = low.at(low.input(node), index, guards), low.type(node).dtype
    out = low.graph.types[node.output].dtype
    x = low.converted(x, given, out)
    if out.is_float and out.bits < (64 if low.wide else 32):
        return low.op("rounded", x, kind="float", attrs=(("dtype", out.short),))
    return x


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
    """Zero where the word of this place is below the cutoff; bits as :mod:`ops.random` has them."""
    p = node.attrs["p"]
    x = low.float_at(low.input(node), index, guards)
    kept = low.op("mul", x, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
    place = flatten(index, low.type(node).shape)
    far = low.type(node).numel > 1 << 32
    seed = low.at(low.input(node, 1), (), ())
    word = low.op("random", seed, low.position(place), kind="int", attrs=(("far", far),))
    return low.op("select", low.op("ge", word, cutoff(p)), kept, 0.0)


def nll_terms(low: Lowering, node: Node, index: Index, guards: Guards) -> tuple[Arg, Arg]:
    """What the position ``index`` adds to the loss and to the weights: −weight · x at its class.

    A target that is ignored may lie outside, so it is replaced before it is used as an index."""
    axis, classes = class_axis(low, node)
    target = low.at(low.input(node, 1), index, guards)
    valid = low.op("ne", target, node.attrs["ignore_index"])
    at = low.dynamic(low.op("select", valid, target, 0), classes)
    place = (*index[:axis], at, *index[axis:])
    x = low.float_at(low.input(node), place, guards)
    weight: Arg = low.constant(1.0)
    if has_input(node, 2):
        weight = low.float_at(low.input(node, 2), (at,), guards)
    loss = low.op("neg", low.op("mul", weight, x))
    return low.op("select", valid, loss, 0.0), low.op("select", valid, weight, 0.0)


def class_axis(low: Lowering, node: Node) -> tuple[int, int]:
    """The axis of the classes and how many there are."""
    shape = low.type(node).shape
    axis = min(1, len(shape) - 1)
    return axis, shape[axis]


def has_input(node: Node, slot: int) -> bool:
    return len(node.inputs) > slot and node.inputs[slot] is not None


PLACED: dict[str, Placed] = {
    "cast": _cast,
    "prelu": _prelu,
    "glu": _glu,
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    # without joining positions; with it, it is a reduction
    "nll_loss": lambda *given: nll_terms(*given)[0],
}
