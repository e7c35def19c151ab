"""8-bit floats with a scale for each block: how to convert numbers to them, and products of them.

    y[m, n] = Σ_b  x_scale[m, b] · weight_scale[n / block, b] · Σ_{k in b}  x[m, k] · weight[n, k]

Rows of x have a scale for every ``block`` neighbours, a weight has one for every square of
``block`` × ``block`` numbers, so that one large number costs only its own block precision. The last
block of a line may be shorter. Scales that are the same for a whole row or tensor need no operator
of their own: multiply the sums by them, as in ``linear(x, weight) * row * column``.

Numbers are divided by the scale, clamped to ±448 (±57344 for e5m2) and rounded to nearest, ties to
even. Nothing else is rounded on the way to the sums, which are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, dtype, float32
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_float, check_shape, one_dtype
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.matmul import product_flops
from deuteron.ops.opdef import Attr, Fusion, Given, Vjp, operator

MOST = {"f8e4m3": 448.0, "f8e5m2": 57344.0}  # the largest number of each kind
BLOCK = 128
_dtype = dtype


def blocks(size: int, block: int) -> int:
    """How many blocks there are; the last may be shorter."""
    return -(-size // block)


def overflows(graph: Graph, value: str) -> str:
    """Return a remedy if ``value`` is an 8-bit float cast from numbers that may be too large for
    it, or "" if they were clamped before. What is too large, machines clamp to the largest number;
    PyTorch, depending on its version, makes nan or infinity of it, or clamps it, too."""
    node, most = graph.producer.get(value), MOST.get(graph.types[value].dtype.short)
    if node is None or node.op != "cast" or most is None:
        return ""
    held = graph.producer.get(node.uses[0])
    limits = dict(held.attrs) if held is not None and held.op == "clamp" else {}
    inside = all(end is not None and abs(end) <= most for end in map(limits.get, ("min", "max")))
    return "" if inside else f"clamp to ±{most:g} before the cast"


def spread(scale: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    """Repeat the scales of blocks, to have one for each number of a tensor of that shape."""
    rows, columns = block
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return scale.repeat_interleave(columns, -1)[..., : shape[-1]]


# ---- products


def _product_reference(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    block: int,
    dtype: str,
) -> Tensor:
    exact = x.dtype == torch.float64
    wide = torch.float64 if exact else torch.float32
    left = x.to(wide) * spread(x_scale.to(wide), x.shape, (1, block))
    right = weight.to(wide) * spread(weight_scale.to(wide), weight.shape, (block, block))
    found = F.linear(left, right, None if bias is None else bias.to(wide))
    return found if exact else found.to(_dtype(dtype).torch)


def _product_vjp(b: Ops, v: Vjp) -> Grads:
    remedy = "multiply in bfloat16 where a gradient is wanted"
    raise GraphError("a product of floats of 8 bits has no gradient", remedy=remedy)


@operator(
    Fusion.COMPLEX,
    _product_reference,
    attrs={
        "block": Attr("int", BLOCK, "numbers along K that share a scale, and rows of a weight"),
        "dtype": Attr("dtype", "bf16", "the element type of the result: f32, f16 or bf16"),
    },
    vjp=_product_vjp,
    flops=product_flops,
    samples="""3x8:f8e4m3 5x8:f8e4m3 3x2:positive:f32 2x2:f32 5:f32 block=4 dtype=f32 nograd
        | 2x3x10:f8e4m3 9x10:f8e4m3 2x3x3:positive:f32 3x3:f32 _ block=4 dtype=f32 nograd
        | 6@sliced:f8e5m2 4x6@transposed:f8e5m2 1:f32 1x1:f32 _ nograd
        | 3x8:f8e4m3 5x8:f8e4m3 3x1@transposed:f32 1x1:f32 5:f32 dtype=f16 nograd
        | 0x8:f8e4m3 5x8:f8e4m3 0x1:f32 1x1:f32 5:f32 nograd [empty]
        | 3x0:f8e4m3 5x0:f8e4m3 3x0:f32 1x0:f32 5:f32 nograd [nothing to add up]""",
)
def linear_fp8(
    x: TensorType,
    weight: TensorType,
    x_scale: TensorType,
    weight_scale: TensorType,
    bias: Given,
    block: int,
    dtype: str,
) -> TensorType:
    """x · weightᵀ + bias of 8-bit floats, x […, K] and weight [out, K], summed in float32. Each
    number of x_scale […, K / block] scales ``block`` neighbours of a row of x, each number of
    weight_scale [out / block, K / block] a square of the weight, both float32; the last block may
    be shorter. There is no gradient."""
    out = _dtype(dtype)
    one_dtype("linear_fp8", least=8, x=x, weight=weight)
    if x.dtype.short not in MOST:
        wrong = f"linear_fp8 multiplies floats of 8 bits, not {x.dtype.name}"
        raise GraphError(wrong, remedy="quantize_fp8 makes them; or use linear")
    if out.short not in ("f32", "f16", "bf16"):
        wrong = f"linear_fp8 gives no {out.name}"
        raise GraphError(wrong, remedy="use dtype='f32', and quantize_fp8 after it")
    if x.rank == 0 or weight.rank != 2 or x.shape[-1] != weight.shape[1]:
        wrong = f"linear_fp8: x is {list(x.shape)}, the weight {list(weight.shape)}"
        raise GraphError(wrong, remedy="the weight is [out, in], and x ends in as many numbers")
    (columns, steps), many = weight.shape, _check_block("linear_fp8", (block, block))[0]
    for name, t in (("x_scale", x_scale), ("weight_scale", weight_scale), ("bias", bias)):
        if t is not None and t.dtype != float32:
            wrong = f"{name} of linear_fp8 is {t.dtype.name}, the sums are float32"
            raise GraphError(wrong, remedy=f'cast it: cast({name}, dtype="f32")')
    across = blocks(steps, many)
    each = f"give a scale for each block of {many}; or set block"
    check_shape("x_scale of linear_fp8", x_scale, (*x.shape[:-1], across), each)
    squares = (blocks(columns, many), across)
    check_shape("weight_scale of linear_fp8", weight_scale, squares, each)
    check_shape("bias of linear_fp8", bias, (columns,), "give one number per output")
    return TensorType.of((*x.shape[:-1], columns), out)


# ---- conversion to 8-bit floats


def _quantize_reference(x: Tensor, *, block: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
    kind, (rows, columns), x = _dtype(dtype), block, x.float()
    (high, long), most = x.shape[-2:] if x.dim() > 1 else (1, *x.shape), MOST[kind.short]
    whole = F.pad(x, (0, -long % columns, *((0, -high % rows) if rows > 1 else ())))
    parts = whole.abs().unflatten(-1, (blocks(long, columns), columns)).amax(-1)
    if rows > 1:
        parts = parts.unflatten(-2, (blocks(high, rows), rows)).amax(-2)
    scale = parts / most
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    numbers = x / spread(scale, x.shape, (rows, columns))
    return numbers.clamp(-most, most).to(kind.torch).contiguous(), scale.contiguous()


@operator(
    Fusion.OPAQUE,
    _quantize_reference,
    attrs={
        "block": Attr("ints", (1, BLOCK), "rows and columns of a block that shares a scale"),
        "dtype": Attr("dtype", "f8e4m3", "f8e4m3, up to ±448, or f8e5m2, up to ±57344"),
    },
    flops=lambda ins, outs, attrs: 4.0 * ins[0].numel,
    samples="""3x8 block=(1,4) nograd | 2x3x10 block=(1,4) dtype=f8e5m2 nograd
        | 10 block=(1,3) nograd | 5x7@transposed block=(2,3) nograd
        | 2x4x6@sliced block=(2,2) nograd | 0x8 block=(1,4) nograd [empty]""",
)
def quantize_fp8(x: TensorType, block: tuple[int, ...], dtype: str) -> tuple[TensorType, ...]:
    """x as 8-bit floats, and the float32 scales by which they have to be multiplied: the largest
    |x| of a block / 448 (57344 for e5m2), or 1 where that is 0. x / scale is rounded to nearest,
    ties to even. x is a float of 16 bits or more."""
    check_float("quantize_fp8", x=x)
    kind, (rows, columns) = _kind(dtype), _check_block("quantize_fp8", block)
    if x.rank == 0 or (rows > 1 and x.rank < 2):
        wrong = f"quantize_fp8 cuts {list(x.shape)} into blocks of {rows} × {columns}"
        raise GraphError(wrong, remedy="use block=(1, columns), or reshape x to a matrix")
    high = () if x.rank == 1 else (blocks(x.shape[-2], rows),)
    scale = (*x.shape[:-2], *high, blocks(x.shape[-1], columns))
    return TensorType.of(x.shape, kind), TensorType.of(scale, float32)


def _kind(name: Any) -> DType:
    kind = _dtype(name)
    if kind.short not in MOST:
        wrong = f"quantize_fp8 makes no {kind.name}"
        raise GraphError(wrong, remedy="use dtype='f8e4m3' or 'f8e5m2'")
    return kind


def _check_block(what: str, block: tuple[int, ...]) -> tuple[int, int]:
    if len(block) != 2 or min(block) < 1:
        wrong = f"{what} with blocks of {block}"
        raise GraphError(wrong, remedy="use positive sizes, such as 128, or (1, 128)")
    rows, columns = block
    return rows, columns
