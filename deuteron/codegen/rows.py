"""Operators with a rule of their own in scalar programs: casts, norms, softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deuteron.codegen.index import Index
from deuteron.codegen.scalar import Arg, CannotLower, Compute
from deuteron.ir.graph import Node

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering


def _cast(low: Lowering, node: Node, args: list[Any]) -> Arg:
    out, x = low.graph.types[node.output].dtype, args[0]
    if out.is_float:
        x = low.as_float(x)
        if out.is_low:  # an explicit cast rounds; fused intermediates otherwise stay wide
            return _rounded(low, x, out.short)
        return x
    if out.kind == "bool":
        return low.op("to_bool", x, kind="bool")
    if out.bits < 32:
        raise CannotLower(f"a cast to {out.short} wraps around")
    return x if low.kind(x) == "int" else low.op("to_int", x, kind="int")


def _rounded(low: Lowering, x: Arg, dtype: str) -> Arg:
    name = low.name("v", "float")
    low.statements.append(Compute(name, "rounded", (x,), "float", (("dtype", dtype),)))
    return name


SPECIAL: dict[str, Callable[[Lowering, Node, list[Any]], Arg]] = {"cast": _cast}


def _normalised(low: Lowering, node: Node, centred: bool) -> Arg:
    """(x − mean) · rstd, the variance from centred values so that nothing cancels."""
    value = node.inputs[0]
    assert value is not None
    cell = low.cell_index(node)
    x = low.as_float(low.at(value, cell, ()))
    key = f"{node.output} statistics"
    n = float(low.columns)
    if key not in low.reduced:
        mean = low.op("div", low.reduce("sum", x), n) if centred else None
        d = x if mean is None else low.op("sub", x, mean)
        var = low.op("div", low.reduce("sum", low.op("mul", d, d)), n)
        eps = low.op("add", var, node.attrs["eps"])
        low.reduced[key] = (d, low.op("div", 1.0, low.op("sqrt", eps)))
    d, rstd = low.reduced[key]
    return low.op("mul", d, rstd)


def _affine(low: Lowering, node: Node, y: Arg, index: Index) -> Arg:
    """y · weight + bias, either of which may be absent."""
    for slot, op in ((1, "mul"), (2, "add")):
        value = node.inputs[slot] if len(node.inputs) > slot else None
        if value is not None:
            y = low.op(op, y, low.as_float(low.at(value, index, ())))
    return y


def _layer_norm(low: Lowering, node: Node) -> Arg:
    y = _normalised(low, node, centred=node.op == "layer_norm")
    cell = low.cell_index(node)
    return _affine(low, node, y, cell[len(cell) - node.attrs["dims"] :])


def _group_norm(low: Lowering, node: Node) -> Arg:
    y = _normalised(low, node, centred=True)
    return _affine(low, node, y, (low.cell_index(node)[1],))


def _softmax(low: Lowering, node: Node) -> Arg:
    """e^(x − max) / Σ e^(x − max), and its logarithm as x − max − ln Σ."""
    value = node.inputs[0]
    assert value is not None
    x = low.as_float(low.at(value, low.cell_index(node), ()))
    key = f"{node.output} parts"
    if key not in low.reduced:
        shifted = low.op("sub", x, low.reduce("max", x))
        power = low.op("exp", shifted)
        low.reduced[key] = (shifted, power, low.reduce("sum", power))
    shifted, power, total = low.reduced[key]
    if node.op == "log_softmax":
        return low.op("sub", shifted, low.op("log", total))
    return low.op("div", power, total)


ROWS_RULES: dict[str, Callable[[Lowering, Node], Arg]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
    "softmax": _softmax,
    "log_softmax": _softmax,
}
