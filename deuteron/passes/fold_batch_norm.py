"""Batch normalisation with known statistics disappears into the product before it.

    bn(conv(x, w, b)) = conv(x, w·s, (b − mean)·s + β)   with s = γ / √(var + ε)

The factors are computed in float64 and rounded once. A batch norm that follows nothing it can
fold into becomes one multiply and one add per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deuteron.ir.graph import Node
from deuteron.ir.rewrite import Rewriter, Rule
from deuteron.passes.context import by_rules


def _factors(rw: Rewriter, node: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(scale, shift) per channel in float64, if all statistics are constants."""
    _, mean, var, *affine = node.inputs
    weight, bias = [*affine, None, None][:2]
    if not all(v is None or rw.is_constant(v) for v in (mean, var, weight, bias)):
        return None

    def data(value: str | None, default: float) -> torch.Tensor:
        if value is None:
            assert mean is not None
            return torch.full_like(rw.build.constants[mean].data, default, dtype=torch.float64)
        return rw.build.constants[value].data.double()

    scale = data(weight, 1.0) / torch.sqrt(data(var, 1.0) + node.attrs["eps"])
    return scale, data(bias, 0.0) - data(mean, 0.0) * scale


def _into_product(rw: Rewriter, node: Node) -> Sequence[str] | None:
    made = rw.made_by(node.inputs[0], "conv", "linear")
    if made is None or not rw.only_use(made.output) or not rw.is_constant(made.inputs[1]):
        return None
    old_bias = made.inputs[2] if len(made.inputs) > 2 else None
    if old_bias is not None and not rw.is_constant(old_bias):
        return None
    if made.op == "linear" and rw.build.types[made.output].rank != 2:
        return None  # the channel of batch norm is dimension 1, not the last
    factors = _factors(rw, node)
    if factors is None or rw.build.types[made.output].dtype != rw.old.types[node.outputs[0]].dtype:
        return None
    scale, shift = factors
    assert made.inputs[1] is not None
    weight = rw.build.constants[made.inputs[1]].data
    if made.op == "conv" and made.attrs["transposed"]:
        groups = made.attrs["groups"]  # weight [in, out/groups, …]: output channels by group
        per_group = scale.reshape(groups, 1, -1)
        wide = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        scaled = (wide * per_group[..., None]).reshape(weight.shape)
    else:
        scaled = weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    if old_bias is not None:
        shift = shift + rw.build.constants[old_bias].data.double() * scale
    folded, moved = scaled.to(weight.dtype), shift.to(weight.dtype)
    if not bool(folded.isfinite().all() and moved.isfinite().all()):
        return None  # a tiny variance: the product would overflow its element type
    w = rw.build.constant(folded, f"{made.inputs[1]}_bn")
    b = rw.build.constant(moved, f"{made.inputs[1]}_shift")
    return [rw.emit(made.op, [made.inputs[0], w, b], dict(made.attrs))]


def _into_affine(rw: Rewriter, node: Node) -> Sequence[str] | None:
    factors = _factors(rw, node)
    x = node.inputs[0]
    if factors is None or x is None:
        return None
    kind = rw.build.types[x]
    if not kind.dtype.is_float or kind.dtype.is_low:
        return None  # two roundings in 16 bits would cost accuracy; the operator rounds once
    shape = (-1, *[1] * (kind.rank - 2))
    scale, shift = (f.to(kind.dtype.torch).reshape(shape) for f in factors)
    scaled = rw.emit("mul", [x, rw.build.constant(scale, "bn_scale")])
    return [rw.emit("add", [scaled, rw.build.constant(shift, "bn_shift")])]


fold_batch_norm = by_rules(
    (
        Rule("batch norm into product", ("batch_norm",), _into_product),
        Rule("batch norm as multiply and add", ("batch_norm",), _into_affine),
    )
)
