"""Attention over keys and values that are stored in pages, for sequences that grow independently.

Pages are [pages, positions, kv heads, features]; a table [batch, most pages] says which pages a
sequence has, in order, and ``lengths`` [batch] how many keys it has by now. The queries are the
last positions of their sequences: of S queries the i-th stands at length − S + i, and sees all keys
up to its own position. A query before the first key gives zeros.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import int32, int64
from deuteron.ir.types import TensorType
from deuteron.ops.attention import completed
from deuteron.ops.checks import check_index, one_dtype
from deuteron.ops.opdef import Attr, Attributes, Fusion, Types, operator


def gathered(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Keys or values [kv heads, length, features] of a sequence with this table."""
    count = -(-length // pages.shape[1])
    rows = pages[table[:count].long()].flatten(0, 1)[:length]
    return rows.transpose(0, 1)


def _reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    heads, queries = q.shape[1:3]
    outs = []
    for one, row, length in zip(q, table, lengths.tolist(), strict=True):
        wide = (gathered(t, row, length) for t in (keys, values))
        k, v = (t.float() if t.dtype.itemsize < 4 else t for t in wide)
        k, v = (t.repeat_interleave(heads // t.shape[0], 0) for t in (k, v))
        s = one.to(k.dtype) @ k.mT * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        own = torch.arange(length - queries, length, device=q.device)[:, None]
        j = torch.arange(length, device=q.device)
        seen = (j <= own) & ((j >= own - window) | (window < 0))
        s = s.masked_fill(~seen, -torch.inf)
        blind = ~seen.any(-1, keepdim=True)
        outs.append((s.softmax(-1).masked_fill(blind, 0.0) @ v).to(q.dtype))
    shape = (*q.shape[:3], values.shape[3])
    return torch.stack(outs) if outs else q.new_empty(shape)


def _flops(ins: Types, outs: Any, attrs: Attributes) -> float:
    q, keys, values, table = ins[:4]
    most = table.shape[1] * keys.shape[1]
    most = min(most, attrs["window"] + q.shape[2]) if attrs["window"] >= 0 else most
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * most
    return float(2.0 * pairs * (q.shape[3] + values.shape[3]))


@operator(
    Fusion.OPAQUE,
    _reference,
    attrs={
        "scale": Attr("float", None, "the factor on q·kᵀ; None is 1/√D"),
        "window": Attr("int", -1, "how many keys before its own a query sees; -1 is all"),
        "softcap": Attr("float", 0.0, "scores stay within ± this; 0 is no limit"),
    },
    complete=partial(completed, 0),
    flops=_flops,
    samples="""2x4x1x8 5x4x2x8 5x4x2x6 2x3:index<5:i32 2:index<12:i32 nograd
        | 1x2x3x8 4x2x2x8 4x2x2x8 1x4:index<4 1:index<8 window=2 nograd
        | 2x4x1x8 5x4x1x8 5x4x1x8 2x3:index<5:i32 2:index<12:i32 softcap=2.0 scale=0.3 nograd
        | 0x4x1x8 5x4x2x8 5x4x2x8 0x3:index<5:i32 0:index<12:i32 nograd""",
)
def paged_attention(
    q: TensorType,
    keys: TensorType,
    values: TensorType,
    table: TensorType,
    lengths: TensorType,
    window: int,
    softcap: float,
    **_: Any,
) -> TensorType:
    """Attention of the last queries q [batch, heads, S, D] of sequences whose keys and values are
    stored in pages [pages, positions, kv heads, D], by a table of pages and the lengths of the
    sequences. It has no gradient: it is meant for generation."""
    asked = "paged_attention"
    one_dtype(asked, q=q, keys=keys, values=values)
    if (q.rank, keys.rank, values.rank, table.rank, lengths.rank) != (4, 4, 4, 2, 1):
        remedy = "q [batch, heads, S, D], pages [pages, positions, kv heads, D], table, lengths"
        raise GraphError(f"{asked} got ranks that do not fit", remedy=remedy)
    if keys.shape[:3] != values.shape[:3] or keys.shape[3] != q.shape[3]:
        wrong = f"keys {list(keys.shape)}, values {list(values.shape)} and q {list(q.shape)} differ"
        raise GraphError(wrong, remedy="pages of one number and size, heads of q's features")
    if not q.shape[0] == table.shape[0] == lengths.shape[0]:
        wrong = f"{q.shape[0]} queries, {table.shape[0]} tables and {lengths.shape[0]} lengths"
        raise GraphError(wrong, remedy="give one of each for every sequence")
    if not keys.shape[2] or q.shape[1] % keys.shape[2]:
        wrong = f"{q.shape[1]} query heads cannot share {keys.shape[2]} key heads"
        raise GraphError(wrong, remedy="the query heads must be a multiple of the key heads")
    for t in (table, lengths):
        check_index(t, int64, int32)
    if window < -1 or not 0.0 <= softcap < math.inf:
        raise GraphError(f"window={window}, softcap={softcap}", remedy="-1 and 0 are no limit")
    return TensorType.of((*q.shape[:3], values.shape[3]), q.dtype)
