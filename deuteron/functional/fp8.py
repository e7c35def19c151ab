"""Linear layers of 8-bit floats with a scale for each block, and the conversions to and from
them."""

from __future__ import annotations

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.arguments import check_tensor, one_device
from deuteron.functional.delegate import delegates
from deuteron.functional.operators import operator
from deuteron.ir.dtype import dtype as named
from deuteron.kinds import checked
from deuteron.ops.fp8 import BLOCK, spread

LINEAR, QUANTIZE = operator("linear_fp8"), operator("quantize_fp8")


@delegates()
def linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    block: int = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return x · weightᵀ + bias of 8-bit floats with a scale for each block, as DeepSeek-V3 was
    trained: a block has 1 × ``block`` numbers of x, and ``block`` × ``block`` of the weight.

    x             […, K], float8_e4m3fn or float8_e5m2
    weight        [N, K] of the same type
    x_scale       […, K / block], float32; the last block may be shorter
    weight_scale  [N / block, K / block], float32
    bias          [N], float32
    dtype         of the result: bfloat16, float16 or float32. Sums are float32, and rounded once

    >>> w8, w_scale = dt.functional.quantize_fp8(weight, block=(128, 128))  # once
    >>> x8, x_scale = dt.functional.quantize_fp8(x)                         # at every call
    >>> y = dt.functional.linear_fp8(x8, w8, x_scale, w_scale)

    There is no gradient. With one scale for a whole row or tensor, multiply afterwards:
    ``linear(x8, w8) * row * column``, which graphs run as one kernel.
    """
    kind = named(dtype).short
    return LINEAR.one(x, weight, x_scale, weight_scale, bias, block=block, dtype=kind)


@delegates()
def quantize_fp8(
    x: Tensor, *, block: tuple[int, int] = (1, BLOCK), dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Return x as 8-bit floats, and the float32 scales to multiply them by, one for each block.

    x      […, K] or […, N, K], float16 or wider; computed in float32
    block  how many rows and columns share a scale: (1, 128) for the input of a layer, (128, 128)
           for its weight. The last blocks may be smaller
    dtype  float8_e4m3fn, up to ±448 with 3 bits of fraction, or float8_e5m2, up to ±57344 with 2

    scale = max |x| of the block / 448 (57344), and 1 where that is 0; x / scale is rounded to the
    nearest number, and to the even one of two that are equally near. A block that holds nan or an
    infinity is nan.

    >>> q, scale = dt.functional.quantize_fp8(x)
    >>> error = dt.functional.dequantize_fp8(q, scale) - x
    """
    q, scale = QUANTIZE(x, block=tuple(block), dtype=named(dtype).short)
    return q, scale


@checked()
def dequantize_fp8(q: Tensor, scale: Tensor, *, block: tuple[int, int] = (1, BLOCK)) -> Tensor:
    """Return q · scale in float32: the numbers that :func:`linear_fp8` multiplies by.

    q, scale, block  as :func:`quantize_fp8` returns and takes them; other sizes are refused

    >>> w = dt.functional.dequantize_fp8(w8, w_scale, block=(128, 128))
    """
    for t in (q, scale):
        check_tensor("dequantize_fp8", t)
    one_device("dequantize_fp8", (q, scale))
    kinds = " and ".join(str(t.dtype).removeprefix("torch.") for t in (q, scale))
    if not (q.is_floating_point() and scale.is_floating_point()):
        remedy = "give both as quantize_fp8 does: float8_e4m3fn or float8_e5m2, and float32"
        raise BindError(f"q and scale are {kinds}", asked="dequantize_fp8(q, scale)", remedy=remedy)
    rows, columns = block
    if min(rows, columns) < 1:
        raise BindError(f"block={block} has no numbers", asked="dequantize_fp8", remedy="use 1 up")
    high = () if q.dim() < 2 else (-(-q.shape[-2] // rows),)
    want = (*q.shape[:-2], *high, -(-q.shape[-1] // columns)) if q.dim() else ()
    if not q.dim() or tuple(scale.shape) != want:
        wrong = f"scale is {list(scale.shape)}, blocks of {rows} × {columns} of {list(q.shape)}"
        remedy = f"give {list(want)}, as quantize_fp8 does; or set block"
        raise BindError(f"{wrong} have other sizes", asked="dequantize_fp8", remedy=remedy)
    return q.float() * spread(scale.float(), q.shape, (rows, columns))
