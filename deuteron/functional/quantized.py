"""Linear layers with weights of 8 and 4 bits, and the conversions to and from such weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError, GraphError
from deuteron.functional.arguments import check_tensor, one_device, types_of
from deuteron.functional.autocast import lower
from deuteron.functional.delegate import delegates
from deuteron.functional.operators import operator
from deuteron.kinds import checked
from deuteron.ops.quantized import MIDDLE, check_bits, check_group, check_stored, dequantized
from deuteron.ops.reference import wide_type

LINEAR = operator("linear_quantized")


@delegates()
def linear_quantized(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    group: int = 128,
) -> Tensor:
    """Return x · wᵀ + bias with w = (q − zero) · scale, where the numbers q are stored in 8 or 4
    bits. For one row of x this takes as long as reading the weight, which has half or a quarter of
    the bytes of 16 bits.

    x       […, K] in float16, bfloat16 or float32; sums are float32, the result is of x's type
    weight  the numbers q: int8 [N, K], or for 4 bits uint8 [N, K / 2], with two numbers of 0 to 15
            in a byte, that of the even k in its low half
    scale   [N, K / group], of x's type or float32
    zero    [N, K / group] of scale's type, subtracted from q before it is scaled; it need not be
            whole. Without it, zero is 0 for 8 bits, and 8 for 4 bits
    bias    [N], of x's type
    bits    of a stored number: 4 or 8
    group   how many neighbours along K share a scale; it divides K. GPU kernels read multiples of
            32

    >>> packed = dt.functional.quantize_weight(linear.weight, bits=4)
    >>> y = dt.functional.linear_quantized(x, *packed, linear.bias)

    x, bias, scale and zero have gradients; the integers have none. Under autocast x and bias are
    cast, as those of ``linear`` are.
    """
    check_tensor("linear_quantized", scale)
    (x,) = lower(x)
    bias = None if bias is None else lower(bias)[0]
    if x.dtype != scale.dtype and x.dtype.itemsize == scale.dtype.itemsize == 2:
        scale, zero = scale.float(), None if zero is None else zero.float()
    return LINEAR.one(x, weight, scale, zero, bias, bits=bits, group=group)


@checked()
def quantize_weight(
    weight: Tensor, bits: int = 4, group: int = 128, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``weight`` [N, K] as (packed, scale, zero) for :func:`linear_quantized`; zero is None
    where ``symmetric``.

    bits, group  as for :func:`linear_quantized`
    symmetric    scale = max |w| of a group / 7 (for 8 bits: 127), rounded to the type of the
                 weight, and q = w / scale, rounded to the nearest, halves to the even one, and held
                 within ±7 (±127). If not symmetric, the range from the least to the largest w of a
                 group, 0 included, is cut into 15 (255) steps, and zero is the whole number that
                 stands for 0

    >>> packed, scale, zero = dt.functional.quantize_weight(w, bits=4, group=64, symmetric=False)
    >>> error = (dt.functional.dequantize_weight(packed, scale, zero, group=64) - w).abs().max()

    The scale of a group of zeros is 1. All is computed in float32 (float64 if the weight is). A
    weight that holds nan or infinities is refused.
    """
    _check(weight, bits, group)
    wide = wide_type(weight)
    each = weight.detach().to(wide).unflatten(1, (weight.shape[1] // group, group))
    middle, half = MIDDLE[bits], 2 ** (bits - 1)
    # stored numbers are −128 to 127 with 8 bits, 0 to 15 with 4 bits
    least, most = middle - half, middle + half - 1
    if symmetric:
        span, steps, least = each.abs().amax(-1), half - 1, middle - half + 1
    else:
        low, high = each.amin(-1).clamp(max=0), each.amax(-1).clamp(min=0)
        span, steps = high - low, 2 * half - 1
    scale = (span / steps).to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    by = scale.to(wide)
    zero = None if symmetric else (least - low / by).round().clamp(least, most)
    shift = middle if zero is None else zero.unsqueeze(-1)
    numbers = ((each / by.unsqueeze(-1)).round() + shift).clamp(least, most).flatten(1)
    packed = numbers.to(torch.int8)
    if bits == 4:
        packed = packed.to(torch.uint8)
        packed = packed[:, ::2] | packed[:, 1::2] << 4
    return packed.contiguous(), scale, None if zero is None else zero.to(weight.dtype)


@checked()
def dequantize_weight(
    packed: Tensor, scale: Tensor, zero: Tensor | None = None, bits: int = 4, group: int = 128
) -> Tensor:
    """Return (q − zero) · scale as [N, K] in the type of ``scale``: the weight that
    :func:`linear_quantized` multiplies by. It is the inverse of :func:`quantize_weight` up to half
    a step.

    packed, scale, zero, bits, group  as :func:`quantize_weight` returns and takes them

    >>> w = dt.functional.dequantize_weight(*dt.functional.quantize_weight(w))
    """
    given = (packed, scale, *(() if zero is None else (zero,)))
    for t in given:
        check_tensor("dequantize_weight", t)
    one_device("dequantize_weight", given)
    stored: Any = types_of((packed, scale, zero))
    try:
        check_stored("dequantize_weight", stored[0], stored[1], stored[2], bits, group)
    except GraphError as error:
        error.asked = f"dequantize_weight(…, bits={bits}, group={group})"
        raise
    return dequantized(packed, scale, zero, bits, group, wide_type(scale)).to(scale.dtype)


def _check(weight: Tensor, bits: int, group: int) -> None:
    check_tensor("quantize_weight", weight)
    asked = f"quantize_weight(weight, bits={bits}, group={group})"
    kind = str(weight.dtype).removeprefix("torch.")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        wrong = f"weight is {kind}{list(weight.shape)}, not a matrix [out, in] of floats"
        raise BindError(wrong, asked=asked, remedy="reshape it to [out, in], of float16 or wider")
    inner = weight.shape[1]
    try:
        check_bits("quantize_weight", bits)
        check_group("quantize_weight", inner, group)
    except GraphError as error:
        error.asked = asked
        raise
    if bits == 4 and inner % 2:
        wrong = f"rows of {inner} numbers do not fill bytes of two"
        raise BindError(wrong, asked=asked, remedy="use bits=8, or pad the rows by a zero")
    if not weight.is_meta and not bool(weight.isfinite().all()):
        wrong = "the weight holds nan or inf, which no number stands for"
        raise BindError(wrong, asked=asked, remedy="see where they are: weight.isfinite()")
