"""Attention with 8-bit products: softmax(scale · q·kᵀ) · v of bytes with scales.

q, k and v are int8 or float8_e4m3fn, each with float32 scales by which its numbers have to be
multiplied: one for every query, one for every key, and for v one for every feature. v may also be a
16-bit float, and then needs no scales. The products q·kᵀ are exact: int32, or float32 for 8-bit
floats.

If v has 8 bits, the weights exp(s − max s) of a query, which are at most 1, are rounded to 127ths,
or to 8-bit floats, so that the second product is an 8-bit one, too; the result is divided by the
sum of the rounded weights. A kernel takes for max s the largest score seen so far, so what is
rounded depends on the order in which it reads the keys. In float64 nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import dtype, float32
from deuteron.ir.types import TensorType
from deuteron.ops.attention import completed
from deuteron.ops.checks import check_shape
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, operator

MOST = {"i8": 127.0, "f8e4m3": 448.0}  # the largest number of each kind
_dtype = dtype


def rounded(p: Tensor, kind: torch.dtype) -> Tensor:
    """Return weights from 0 to 1 rounded to numbers of v's type: times 127 for int8, times 448 for
    float8_e4m3fn, as they are for 16-bit floats."""
    if kind == torch.int8:
        return (p * 127.0).round()
    return (p * (448.0 if kind == torch.float8_e4m3fn else 1.0)).to(kind).to(p.dtype)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None = None,
    *,
    causal: bool,
    offset: int,
    scale: float,
    dtype: str,
) -> Tensor:
    exact = q_scale.dtype == torch.float64
    wide = torch.float64 if exact else torch.float32
    shared = q.shape[1] // max(k.shape[1], 1)
    left = q.to(wide) * q_scale.to(wide)[..., None]
    right = (k.to(wide) * k_scale.to(wide)[..., None]).repeat_interleave(shared, 1)
    s = left @ right.mT * scale
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in s.shape[2:])
        s = s.masked_fill(j > i[:, None] + offset, -torch.inf)
    high = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:3], 1))
    p = torch.exp(s - high.masked_fill(high == -torch.inf, 0.0))
    p = p if exact else rounded(p, v.dtype)
    total = p.sum(-1, keepdim=True)
    found = p @ v.to(wide).repeat_interleave(shared, 1) / total.masked_fill(total == 0, 1.0)
    if v_scale is not None:
        found = found * v_scale.to(wide).repeat_interleave(shared, 1)[:, :, None, :]
    return found if exact else found.to(_dtype(dtype).torch)


def _flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    q, k, v = ins[:3]
    pairs = q.numel / max(q.shape[3], 1) * k.shape[2]
    return float(2.0 * pairs * (q.shape[3] + v.shape[3]) * (0.5 if attrs["causal"] else 1.0))


@operator(
    Fusion.OPAQUE,
    _reference,
    attrs={
        "causal": Attr("bool", False, "query i sees keys 0 … i + offset only"),
        "offset": Attr("int", 0, "the position of the first query among the keys"),
        "scale": Attr("float", None, "the factor on q·kᵀ; None is 1/√D"),
        "dtype": Attr("dtype", "bf16", "the element type of the result: f32, f16 or bf16"),
    },
    complete=partial(completed, 0),
    flops=_flops,
    samples="""2x4x5x8:i8 2x2x7x8:i8 2x2x7x6:f32 2x4x5:positive:f32 2x2x7:positive:f32 _
            scale=0.001 dtype=f32 nograd
        | 1x2x6x8@sliced:i8 1x2x6x8:i8 1x2x6x8:f16 1x2x6:f32 1x2x6:f32 _
            scale=0.001 causal=True nograd
        | 1x2x3x8:f8e4m3 1x1x9x8:f8e4m3 1x1x9x4:f16 1x2x3:f32 1x1x9:f32 1x1x4:f32
            causal=True offset=6 scale=0.1 dtype=f16 nograd
        | 0x2x3x8:i8 0x1x9x8:i8 0x1x9x4:f16 0x2x3:f32 0x1x9:f32 _ nograd [empty]""",
)
def attention_bytes(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    q_scale: TensorType,
    k_scale: TensorType,
    v_scale: Given,
    offset: int,
    dtype: str,
    **_: Any,
) -> TensorType:
    """softmax(scale · q·kᵀ) · v where q [batch, heads, Sq, D] and k [batch, kv heads, Sk, D] are
    int8 or float8_e4m3fn with float32 scales [batch, heads, Sq] and [batch, kv heads, Sk], and v
    [batch, kv heads, Sk, Dv] is of the same type with scales [batch, kv heads, Dv], or of a larger
    one. Weights are rounded to the type of v. There is no gradient."""
    asked, out = "attention_bytes", _dtype(dtype)
    if q.dtype.short not in MOST or k.dtype != q.dtype:
        wrong = f"{asked} multiplies two int8 or two float8_e4m3fn, not {q.dtype.name} and "
        wrong += k.dtype.name
        raise GraphError(wrong, remedy="dt.functional.attention_quantized makes them")
    if v.dtype.short in MOST and v.dtype != q.dtype:
        wrong = f"v is {v.dtype.name}, q and k are {q.dtype.name}"
        raise GraphError(wrong, remedy="let all be of one type, or v of 16 bits")
    if not v.dtype.is_float and v.dtype.short not in MOST:
        raise GraphError(f"v is {v.dtype.name}", remedy="give floats, or int8 with q and k in int8")
    if out.short not in ("f32", "f16", "bf16"):
        raise GraphError(f"{asked} gives no {out.name}", remedy="use dtype='bf16'")
    if not q.rank == k.rank == v.rank == 4:
        remedy = "q [batch, heads, Sq, D], k [batch, kv heads, Sk, D], v [batch, kv heads, Sk, Dv]"
        raise GraphError(f"{asked} got ranks that do not fit", remedy=remedy)
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        wrong = f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit"
        raise GraphError(wrong, remedy="k and v of one length and as many heads, k as wide as q")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        wrong = f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads"
        raise GraphError(wrong, remedy="the query heads must be a multiple of the key heads")
    if offset < 0:
        raise GraphError(f"offset={offset}", remedy="use an offset from 0 on")
    for name, t in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if t is not None and t.dtype != float32:
            wrong = f"{name} of {asked} is {t.dtype.name}"
            raise GraphError(wrong, remedy=f'cast it: cast({name}, dtype="f32")')
    check_shape(f"q_scale of {asked}", q_scale, q.shape[:3], "give one for each query")
    check_shape(f"k_scale of {asked}", k_scale, k.shape[:3], "give one for each key")
    wide = (*v.shape[:2], v.shape[3])
    check_shape(f"v_scale of {asked}", v_scale, wide, "give one for each feature of a head")
    return TensorType.of((*q.shape[:3], v.shape[3]), out)
