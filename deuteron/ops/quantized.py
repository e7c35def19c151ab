"""A linear layer whose weight is stored as whole numbers of 8 or 4 bits.

    y = x · wᵀ + bias        w[n, k] = (q[n, k] − zero[n, k / group]) · scale[n, k / group]

8 bits are int8 [N, K]; without zeros they stand for themselves. 4 bits are uint8 [N, K / 2], two
numbers of 0 to 15 in a byte, that of the even k in its low half; without zeros 8 stands for 0.
Groups of ``group`` neighbours along K share a scale and a zero, which need not be whole.

Sums are those of ``linear``. What it stands for, a weight that is written out and a product, is
what gradients are taken of: of x, bias, scale and zero, never of the integers. Bytes count the
weight as it is stored, which is the point: one row of x takes as long as its weight takes to read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import int8, uint8
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_float, check_params
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, operator
from deuteron.ops.reference import wide_type

MIDDLE = {8: 0, 4: 8}  # what stands for 0 where no zeros are given
_STORED = {8: int8, 4: uint8}

_ATTRS = {
    "bits": Attr("int", 4, "of a stored number: 4, two in each uint8, or 8, one in each int8"),
    "group": Attr("int", 128, "neighbours along K that share a scale and a zero; it divides K"),
}


def unpacked(weight: Tensor, bits: int) -> Tensor:
    """The stored numbers [N, K], one in each element."""
    return weight if bits == 8 else torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def dequantized(
    weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, wide: torch.dtype
) -> Tensor:
    """(q − zero) · scale as [N, K], computed in the type ``wide``."""
    numbers = unpacked(weight, bits).to(wide)
    each = numbers.unflatten(1, (numbers.shape[1] // group, group))
    shift = MIDDLE[bits] if zero is None else zero.to(wide).unsqueeze(-1)
    return ((each - shift) * scale.to(wide).unsqueeze(-1)).flatten(1)


def _reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    group: int,
) -> Tensor:
    whole = dequantized(weight, scale, zero, bits, group, wide_type(x))
    return F.linear(x, whole.to(x.dtype), bias)


def _written_out(b: Ops, ins: Sequence[Sym | None], attrs: Attributes) -> list[Sym]:
    """The weight in memory, in the type of x, and a product."""
    x, weight, scale, zero, bias = (*ins, None, None)[:5]
    assert x is not None and weight is not None and scale is not None
    bits, (n, groups) = attrs["bits"], scale.shape
    numbers = weight
    if bits == 4:
        each = b.reshape(b.cast(weight, dtype="i32"), (*weight.shape, 1))
        numbers = b.concat([b.remainder(each, 16), b.floor_div(each, 16)], axis=2)
    wide = "f64" if x.dtype.short == "f64" else "f32"
    numbers = b.reshape(b.cast(numbers, dtype=wide), (n, groups, attrs["group"]))

    def beside(t: Sym) -> Sym:
        return b.reshape(b.cast(t, dtype=wide), (n, groups, 1))

    moved = numbers - (float(MIDDLE[bits]) if zero is None else beside(zero))
    whole = b.reshape(b.to(moved * beside(scale), x.dtype), (n, x.shape[-1]))
    return [b.one("linear", x, whole, bias)]


def _flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    return 2.0 * outs[0].numel * float(ins[0].shape[-1])


@operator(
    Fusion.COMPLEX,
    _reference,
    attrs=_ATTRS,
    expand=_written_out,
    flops=_flops,
    samples="""3x8 5x4:index<256:u8 5x2:positive 5x2 5 group=4
        | 3x8 5x8:i8 5x2:positive 5x2 5 bits=8 group=4
        | 2x3x8 5x4:index<256:u8 5x1:positive _ _ group=8 | 8 5x8:i8 5x4 _ 5 bits=8 group=2
        | 2x3x6@transposed 4x3:index<256:u8 4x3@sliced 4x3 _ group=2
        | 3x6@sliced 4x6@transposed:i8 4x2@transposed _ 4 bits=8 group=3
        | 3x6@expanded 1x3@sliced:index<256:u8 1x1 _ _ group=6
        | 0x8 5x4:u8 5x2 _ 5 group=4 [empty] | 3x0 2x0:i8 2x0 _ 2 bits=8 group=3 [nothing to add up]
        | 3x8 0x8:i8 0x1 _ 0 bits=8 group=8 [no columns]
        | 3x8:bf16 5x4:index<256:u8 5x2:f32 5x2:f32 _ group=4 nograd
        | 3x8:extreme 5x8:i8 5x2 _ 5 bits=8 group=4 nograd [extreme]""",
)
def linear_quantized(
    x: TensorType,
    weight: TensorType,
    scale: TensorType,
    zero: Given,
    bias: Given,
    bits: int,
    group: int,
) -> TensorType:
    """x · wᵀ + bias along the last dimension of x, with w = (q − zero) · scale in groups along it;
    q is int8 [out, in], or for 4 bits uint8 [out, in / 2] with the even ones in the low halves, of
    which 8 stands for 0 unless there are zeros. scale and zero are [out, in / group]. Integers have
    no gradient."""
    check_float("linear_quantized", x=x)
    if bits not in _STORED:
        raise GraphError(f"linear_quantized with bits={bits}", remedy="use bits=4 or bits=8")
    kind = _STORED[bits]
    if weight.dtype != kind:
        wrong = f"weight is {weight.dtype.name}, numbers of {bits} bits are stored as {kind.name}"
        remedy = f"quantize_weight(w, bits={bits}) makes such a weight; or set bits"
        raise GraphError(wrong, remedy=remedy)
    if x.rank == 0 or weight.rank != 2:
        given = f"x {list(x.shape)} and weight {list(weight.shape)}"
        wrong = f"linear_quantized takes x of rank 1 or more and a weight of rank 2, not {given}"
        raise GraphError(wrong, remedy="reshape them")
    out, inner = weight.shape[0], weight.shape[1] * 8 // bits
    if x.shape[-1] != inner:
        holds = f"weight {list(weight.shape)} of {bits} bits takes {inner}"
        wrong = f"linear_quantized: x {list(x.shape)} ends in {x.shape[-1]}, {holds}"
        raise GraphError(wrong, remedy="the weight is stored [out, in]; see quantize_weight")
    check_group("linear_quantized", inner, group)
    params = {"scale": scale, "zero": zero}
    check_params("linear_quantized", x, (out, inner // group), params)
    if zero is not None and zero.dtype != scale.dtype:
        wrong = f"zero is {zero.dtype.name}, scale is {scale.dtype.name}"
        raise GraphError(wrong, remedy=f'cast it: cast(zero, dtype="{scale.dtype.short}")')
    check_params("linear_quantized", x, (out,), {"bias": bias})
    if bias is not None and bias.dtype != x.dtype:
        wrong = f"bias is {bias.dtype.name}, x is {x.dtype.name}"
        raise GraphError(wrong, remedy=f'cast it: cast(bias, dtype="{x.dtype.short}")')
    return TensorType.of((*x.shape[:-1], out), x.dtype)


def check_group(what: str, inner: int, group: int) -> None:
    """Groups of at least one number, without a rest."""
    if group < 1 or inner % group:
        wrong = f"{what} cannot cut {inner} numbers of a row into groups of {group}"
        fits = max((g for g in range(1, min(group, inner) + 1) if inner % g == 0), default=1)
        raise GraphError(wrong, remedy=f"use group={fits}, or pad the rows with zeros")
