"""A linear layer whose weight is stored as integers of 8 or 4 bits.

    y = x · wᵀ + bias        w[n, k] = (q[n, k] − zero[n, k / group]) · scale[n, k / group]

8-bit weights are int8 [N, K]; if no zeros are given, zero is 0. 4-bit weights are uint8 [N, K / 2],
two numbers from 0 to 15 in a byte, that of the even k in its low half; if no zeros are given, zero
is 8. Groups of ``group`` neighbours along K share a scale and a zero, which need not be whole.

Sums are those of ``linear``. x, bias, scale and zero have gradients, the integers have none. The
cost counts the bytes of the weight as it is stored, which is the point: with one row of x, the
layer takes as long as it takes to read the weight. That is why the operator has no ``expand``: the
dequantised weight would be a constant like any other, and would be kept in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32, float64, int8, int32, uint8
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_float, check_params, check_shape
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.matmul import linear, product_flops
from deuteron.ops.opdef import Attr, Fusion, Given, Vjp, operator
from deuteron.ops.reference import wide_type

MIDDLE = {8: 0, 4: 8}  # what stands for 0 where no zeros are given
STORED = {8: int8, 4: uint8}

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
    return torch.flatten((each - shift) * scale.to(wide).unsqueeze(-1), 1)


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


def _vjp(b: Ops, v: Vjp) -> Grads:
    """The gradient of ``linear`` with the dequantised weight; from dw, the gradient of that weight,
    follow those of the scales, Σ dw · (q − zero), and of the zeros, −scale · Σ dw, per group."""
    x, weight, scale = v.arg(0), v.arg(1), v.arg(2)
    zero, bias = (*v.ins, None, None)[3:5]
    (n, groups), bits, kind = scale.shape, v.attrs["bits"], float32
    kind = float64 if x.dtype == float64 else kind
    shape = (n, groups, v.attrs["group"])

    def beside(t: Sym) -> Sym:
        return b.one("reshape", b.to(t, kind), (n, groups, 1))

    numbers = b.to(weight, int32)
    if bits == 4:
        numbers = b.reshape(numbers, (*weight.shape, 1))
        numbers = b.concat([b.remainder(numbers, 16), b.floor_div(numbers, 16)], axis=2)
    numbers = b.reshape(b.to(numbers, kind), shape)
    moved = numbers - (float(MIDDLE[bits]) if zero is None else beside(zero))
    whole = b.reshape(b.to(moved * beside(scale), x.dtype), (n, x.shape[-1]))
    needs = (*v.needs, False, False)[:5]
    ins, asked = (x, whole, bias), (needs[0], needs[2] or needs[3], needs[4])
    dx, dw, dbias = linear.vjp(b, Vjp(ins, v.outs, v.grads, {}, asked))  # type: ignore[misc]
    dscale = dzero = None
    if dw is not None:
        dw = b.reshape(b.to(dw, kind), shape)
        dscale = b.to(b.sum(dw * moved, axes=2), scale.dtype)
        dzero = b.to(-(b.sum(dw, axes=2) * b.to(scale, kind)), scale.dtype)
    return [dx, None, dscale, dzero if zero is not None else None, dbias]


@operator(
    Fusion.COMPLEX,
    _reference,
    attrs=_ATTRS,
    vjp=_vjp,
    flops=product_flops,
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
    the weight holds q: int8 [out, in], or for 4 bits uint8 [out, in / 2], even columns in the low
    halves of bytes, where 8 stands for 0 unless zero is given. scale and zero are [out, in /
    group]. q has no gradient."""
    check_float("linear_quantized", x=x)
    out, inner = check_stored("linear_quantized", weight, scale, zero, bits, group)
    if x.rank == 0 or x.shape[-1] != inner:
        takes = f"weight {list(weight.shape)} of {bits} bits takes {inner}"
        wrong = f"linear_quantized: x is {list(x.shape)}, {takes} numbers in its last dimension"
        raise GraphError(wrong, remedy="the weight is stored [out, in]; or set bits")
    check_params("linear_quantized", x, scale.shape, {"scale": scale})
    check_params("linear_quantized", x, (out,), {"bias": bias})
    if bias is not None and bias.dtype != x.dtype:
        wrong = f"bias is {bias.dtype.name}, x is {x.dtype.name}"
        raise GraphError(wrong, remedy=f'cast it: cast(bias, dtype="{x.dtype.short}")')
    return TensorType.of((*x.shape[:-1], out), x.dtype)


# ---- what is stored


def check_stored(
    what: str, weight: TensorType, scale: TensorType, zero: Given, bits: int, group: int
) -> tuple[int, int]:
    """Return the sizes (out, in) of a weight stored in ``bits`` bits; raise if it, its scales or
    its zeros do not fit."""
    check_bits(what, bits)
    if weight.dtype != (kind := STORED[bits]) or weight.rank != 2:
        shape = "[out, in]" if bits == 8 else "[out, in / 2]"
        wrong = f"weight is {weight}; numbers of {bits} bits are stored as {kind.name} {shape}"
        remedy = f"quantize_weight(w, bits={bits}) makes such a weight; or set bits"
        raise GraphError(wrong, remedy=remedy)
    out, inner = weight.shape[0], weight.shape[1] * 8 // bits
    check_group(what, inner, group)
    check_float(what, scale=scale, zero=zero)
    each = "one for each group of each row"
    for slot, t in (("scale", scale), ("zero", zero)):
        check_shape(f"{slot} of {what}", t, (out, inner // group), f"give {each}; or set group")
    if zero is not None and zero.dtype != scale.dtype:
        wrong = f"zero is {zero.dtype.name}, scale is {scale.dtype.name}"
        raise GraphError(wrong, remedy=f'cast it: cast(zero, dtype="{scale.dtype.short}")')
    return out, inner


def check_bits(what: str, bits: int) -> None:
    if bits not in STORED:
        raise GraphError(f"{what} with bits={bits}", remedy="use bits=4 or bits=8")


def check_group(what: str, inner: int, group: int) -> None:
    """Raise unless a row of ``inner`` numbers divides into groups of ``group`` without a rest."""
    if group < 1 or inner % group:
        wrong = f"{what} cannot cut {inner} numbers of a row into groups of {group}"
        fits = max((g for g in range(1, min(group, inner) + 1) if inner % g == 0), default=1)
        raise GraphError(wrong, remedy=f"use group={fits}, or pad the rows with zeros")
