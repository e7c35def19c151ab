"""Position encodings: rotary embedding of queries and keys, and sines of several wavelengths.

A rotary embedding rotates each pair (a, b) of a head's features by an angle that grows with the
token's position p, for each pair i at its own pace:

    a' = a·cos θ − b·sin θ     b' = b·cos θ + a·sin θ     θ = p · base^(−2i / dims)

Pairs are (i, i + dims/2), or neighbours (2i, 2i + 1) where ``interleaved``. The gradient is the
same rotation by −θ. Angles are multiplied out in float64, because p·θ in float32 is off by
thousandths of a radian at the lengths that models are run at today.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError, GraphError
from deuteron.ir.dtype import dtype as dtype_of
from deuteron.ir.dtype import float32, int32, int64
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_index, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.formula import TENSORS
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, Vjp, operator
from deuteron.ops.reference import lay

# ---- rope: what may be asked -------------------------------------------------------------------

_ROPE = {
    "axis": Attr("int", 1, "the axis of positions: 1 for [B, S, H, D], 2 for [B, H, S, D]"),
    "interleaved": Attr("bool", False, "pairs are (2i, 2i + 1) instead of (i, i + dims/2)"),
    "dims": Attr("int", None, "how many features are rotated, the first ones; None for all"),
    "base": Attr("float", 10000.0, "θ of pair i is position · base^(−2i / dims)"),
    "offset": Attr("int", 0, "added to every position: how many tokens came before"),
    "inverse": Attr("bool", False, "rotate by −θ, as the gradient does"),
}


def frequencies(dims: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each pair, fastest first, in float64."""
    return base ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims)


def _rope_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    """Count axis from 0; take missing dims from the tables, or rotate all the features."""
    q, table = types[0], types[2]
    if q.rank != 4:
        remedy = "reshape it to [batch, length, heads, features], a batch of 1 included"
        raise GraphError(f"rope takes q of rank 4, not {list(q.shape)}", remedy=remedy)
    axis = attrs["axis"] + 4 if attrs["axis"] < 0 else attrs["axis"]
    if axis not in (1, 2):
        wrong = f"rope with axis={attrs['axis']}"
        raise GraphError(wrong, remedy="use axis=1 for [B, S, H, D] and axis=2 for [B, H, S, D]")
    dims = attrs["dims"]
    if dims is None:
        dims = q.shape[3] if table is None or table.rank != 2 else 2 * table.shape[1]
    return attrs | {"axis": axis, "dims": dims}


def _check_tables(cos: Given, sin: Given, dims: int, needed: int) -> None:
    """Raise unless there are two tables of one type, with at least ``needed`` rows, or none."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise GraphError("rope got one table of cos and sin", remedy="give both, or neither")
    if cos.shape != sin.shape or cos.dtype != sin.dtype or not cos.dtype.is_float:
        wrong = f"cos is {cos}, sin is {sin}"
        raise GraphError(wrong, remedy="give two tables of one shape and float type")
    if cos.rank != 2 or 2 * cos.shape[1] != dims:
        wrong = f"cos {list(cos.shape)} does not hold one column for each of {dims // 2} pairs"
        twice = "of a table with each angle twice, the first half; or set dims"
        raise GraphError(wrong, remedy=f"use [positions, {dims // 2}]; {twice}")
    if cos.shape[0] < needed:
        wrong = f"positions up to {needed - 1} are asked for, the tables have {cos.shape[0]} rows"
        raise GraphError(wrong, remedy=f"make tables of {needed} rows, or leave them out")


# ---- rope: what it is --------------------------------------------------------------------------


def known_tables(length: int, dims: int, base: float, offset: int) -> tuple[Tensor, Tensor]:
    """cos θ and sin θ of ``length`` tokens from ``offset`` on, in float64: [length, dims/2]."""
    angles = torch.arange(offset, offset + length)[:, None] * frequencies(dims, base)
    return angles.cos(), angles.sin()


def _tables(
    q: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, a: Attributes
) -> tuple[Tensor, Tensor]:
    """cos θ and sin θ of every token: [S, dims/2], or [B, S, dims/2] where positions differ."""
    if positions is None:
        positions = torch.arange(q.shape[a["axis"]], device=q.device)
    rows = positions.long() + a["offset"]
    if cos is not None and sin is not None:
        if rows.numel() and not rows.is_cuda and not 0 <= rows.min() <= rows.max() < len(cos):
            wrong = f"a position from {rows.min()} to {rows.max()} is out of range"
            remedy = f"use positions from 0 to {len(cos) - 1}, or longer tables"
            raise BindError(wrong, asked=f"rope with tables of {len(cos)} rows", remedy=remedy)
        return cos[rows], sin[rows]
    angles = rows.double()[..., None] * frequencies(a["dims"], a["base"], q.device)
    return angles.cos(), angles.sin()


def _pairs(b: Any, x: Any, dims: int, interleaved: bool) -> Iterator[Any]:
    """The first elements of all pairs, and the second ones: views of a tensor, or graph values."""
    half = dims // 2
    spans = ((0, dims - 1, 2), (1, dims, 2)) if interleaved else ((0, half, 1), (half, dims, 1))
    return (b.slice(x, axis=-1, start=start, stop=stop, step=step) for start, stop, step in spans)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dims: int, interleaved: bool) -> Tensor:
    t = TensorType.from_tensor(x).dense_like()
    a, b = (part.to(cos.dtype) for part in _pairs(TENSORS, x, dims, interleaved))
    both = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return lay(torch.cat((turned.to(x.dtype), x[..., dims:]), -1), t)


def _rope_reference(q: Tensor, k: Tensor | None, *rest: Tensor | None, **a: Any) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    cos, sin, positions = rest
    tables = _tables(q, cos, sin, positions, a)
    c, s = (t.unsqueeze(-2 if a["axis"] == 1 else -3).to(wide) for t in tables)
    s = -s if a["inverse"] else s
    outs = tuple(_rotated(x, c, s, a["dims"], a["interleaved"]) for x in (q, k) if x is not None)
    return outs if k is not None else outs[0]


# ---- rope: its gradient, and the same in simpler operators -------------------------------------


def _table_grads(b: Ops, v: Vjp) -> Grads:
    """dcos = Σ (a'·a + b'·b), dsin = Σ (b'·a − a'·b) over heads, and over tokens that read the
    same row; here a' and b' are the gradients of the results."""
    attrs, table = v.attrs, v.arg(2)
    heads, dims = 3 - attrs["axis"], attrs["dims"]
    sums: list[Any] = [None, None]
    for i, grad in enumerate(v.grads):
        if grad is None:
            continue
        x1, x2 = map(b.upcast, _pairs(b, v.arg(i), dims, attrs["interleaved"]))
        g1, g2 = map(b.upcast, _pairs(b, grad, dims, attrs["interleaved"]))
        for which, terms in enumerate((g1 * x1 + g2 * x2, g2 * x1 - g1 * x2)):
            part = b.sum(terms, axes=heads)
            sums[which] = part if sums[which] is None else sums[which] + part
    if attrs["inverse"]:
        sums[1] = -sums[1]
    return [b.to(_into_rows(b, v, each), table.dtype) for each in sums]


def _into_rows(b: Ops, v: Vjp, each: Sym) -> Sym:
    """Contributions [B, S, dims/2] of tokens, summed into the rows that the tokens read."""
    offset, rows = v.attrs["offset"], v.arg(2).shape[0]
    if v.has(4):
        index = b.expand(b.to(v.arg(4), int64) + offset, shape=each.shape[:2])
        return b.one("embedding_grad", each, index, rows=rows)
    total = b.one("sum", each, axes=0)
    return b.one("pad", total, low=(offset, 0), high=(rows - offset - total.shape[0], 0))


def _rope_vjp(b: Ops, v: Vjp) -> Grads:
    """Rotate the gradients back, those of q and k in one node if there are both."""
    attrs = dict(v.attrs) | {"inverse": not v.attrs["inverse"]}
    present = [g for g in v.grads if g is not None]
    turned = b.call("rope", *present, *[None] * (2 - len(present)), *v.ins[2:], **attrs)
    backs = iter(turned if isinstance(turned, tuple) else (turned,))
    grads = [next(backs) if g is not None else None for g in (*v.grads, None)[:2]]
    return [*grads, *(_table_grads(b, v) if any(v.needs[2:4]) else [None, None]), None]


def _table_syms(b: Ops, ins: Syms, attrs: Attributes) -> tuple[Sym, Sym]:
    """cos θ and sin θ as values of the graph; constants where the positions are known."""
    q, _, cos, sin, positions = ins
    offset, length = attrs["offset"], q.shape[attrs["axis"]]
    if cos is not None and sin is not None:
        if positions is None:
            how = {"axis": 0, "start": offset, "stop": offset + length}
            return b.slice(cos, **how), b.slice(sin, **how)
        rows = b.to(positions, int64) + offset
        return b.embedding(cos, rows), b.embedding(sin, rows)
    if positions is None:
        found = known_tables(length, attrs["dims"], attrs["base"], offset)
        wide = torch.float64 if q.dtype.short == "f64" else torch.float32
        return b.constant(found[0].to(wide), "cos"), b.constant(found[1].to(wide), "sin")
    steps = b.reshape(b.cast(positions, dtype="f64") + float(offset), (*positions.shape, 1))
    angles = steps * b.constant(frequencies(attrs["dims"], attrs["base"]), "frequencies")
    return b.cos(angles), b.sin(angles)


def _rope_expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    q = ins[0]
    wide = q.dtype if q.dtype.short == "f64" else float32
    tables = []
    for t in _table_syms(b, ins, attrs):
        lead, (length, half) = t.shape[:-2], t.shape[-2:]
        beside = (length, 1, half) if attrs["axis"] == 1 else (1, length, half)
        tables.append(b.reshape(b.to(t, wide), (*lead, *beside)))
    return [_turned(b, x, tables[0], tables[1], attrs) for x in ins[:2] if x is not None]


def _turned(b: Ops, x: Sym, cos: Sym, sin: Sym, attrs: Attributes) -> Sym:
    dims, apart, features = attrs["dims"], attrs["interleaved"], x.shape[3]
    done, axis = (dims // 2, 4) if apart else (dims, 3)
    if apart and features % 2:  # all but the last are pairs
        even = _turned(b, b.slice(x, axis=3, stop=features - 1), cos, sin, attrs)
        return b.one("concat", [even, b.slice(x, axis=3, start=features - 1)], axis=3)
    if apart:
        x = b.reshape(x, (*x.shape[:3], features // 2, 2))
        cos, sin = (b.reshape(t, (*t.shape, 1)) for t in (cos, sin))
    part = b.slice(x, axis=3, stop=done)
    middle = part.shape[axis] // 2
    x1 = b.upcast(b.slice(part, axis=axis, stop=middle))
    x2 = b.upcast(b.slice(part, axis=axis, start=middle))
    if attrs["inverse"]:
        halves = [x1 * cos + x2 * sin, x2 * cos - x1 * sin]
    else:
        halves = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    whole = b.to(b.concat(halves, axis=axis), x.dtype)
    if dims < features:
        whole = b.concat([whole, b.slice(x, axis=3, start=done)], axis=3)
    return b.one("reshape", whole, (*x.shape[:3], features)) if apart else whole


@operator(
    Fusion.OPAQUE,
    _rope_reference,
    attrs=_ROPE,
    complete=_rope_complete,
    vjp=_rope_vjp,
    expand=_rope_expand,
    # four multiplications and two additions for a pair
    flops=lambda ins, outs, a: 3.0 * a["dims"] * sum(t.numel // max(t.shape[3], 1) for t in outs),
    samples="""2x5x3x8 2x5x1x8 | 2x5x3x8 | 2x5x3x8 2x5x1x8 9x4:unit 9x4:unit offset=3
        | 2x5x3x8 2x5x1x8 9x4:unit 9x4:unit 2x5:index<9 interleaved=True
        | 1x3x5x6 1x2x5x6 axis=2 interleaved=True
        | 2x3x5x7 2x1x5x7 _ _ 2x5:index<9 axis=2 dims=4
        | 2x5x3x8 _ 9x4:unit 9x4:unit 5:index<8:i32 offset=1
        | 2x5x3x8@transposed 2x5x1x8 inverse=True offset=7 | 2x5x3x8@sliced 2x5x1x8@expanded
        | 2x5x3x8@nhwc 2x5x3x8@nhwc axis=2 | 1x1x4x10 1x1x2x10 dims=6 base=500.0 offset=11
        | 0x5x3x8 0x5x1x8 [empty] | 2x0x3x8 _ 9x4:unit 9x4:unit interleaved=True [empty]
        | 1x4x2x8:extreme _ nograd [extreme]""",
)
def rope(
    q: TensorType, k: Given, cos: Given, sin: Given, positions: Given, **a: Any
) -> tuple[TensorType, ...]:
    """Rotary positions on q [B, S, H, D], and on k with its own number of heads, in one node. cos
    and sin are tables [positions, dims/2]; without them the angles come from base. Token s is at
    offset + s, or at offset + positions[b, s]."""
    dims, offset, base, heads = a["dims"], a["offset"], a["base"], 3 - a["axis"]
    one_dtype("rope", q=q, k=k)
    others = [d for d in range(4) if d != heads]
    if k is not None and (k.rank != 4 or any(k.shape[d] != q.shape[d] for d in others)):
        wrong = f"k {list(k.shape)} does not fit q {list(q.shape)}"
        raise GraphError(wrong, remedy=f"only the number of heads, axis {heads}, may differ")
    batch, length, features = q.shape[0], q.shape[a["axis"]], q.shape[3]
    if dims < 2 or dims % 2 or dims > features:
        wrong = f"rope cannot rotate {dims} of {features} features"
        raise GraphError(wrong, remedy=f"dims is an even number from 2 to {features}")
    if offset < 0 or not base > 0:
        wrong = f"rope with offset={offset}, base={base}"
        raise GraphError(wrong, remedy="use offset ≥ 0 and base > 0")
    _check_tables(cos, sin, dims, offset + length if positions is None else 0)
    if positions is not None:
        check_index(positions, int64, int32)
        if positions.shape not in ((length,), (1, length), (batch, length)):
            wrong = f"positions {list(positions.shape)} do not fit {batch} rows of {length} tokens"
            raise GraphError(wrong, remedy=f"use [{length}] or [{batch}, {length}]")
    return tuple(t.dense_like() for t in (q, k) if t is not None)


# ---- sinusoidal --------------------------------------------------------------------------------


def _sine_reference(positions: Tensor, **a: Any) -> Tensor:
    made: Any = sinusoidal.infer(TensorType.from_tensor(positions), **a)
    angles = positions.double()[..., None] * frequencies(a["dim"], a["base"], positions.device)
    out = torch.empty(made.shape, dtype=made.dtype.torch, device=positions.device)
    sines, cosines = _pairs(TENSORS, out, a["dim"], a["interleaved"])
    sines.copy_(angles.sin())
    cosines.copy_(angles.cos())
    return out


def _sine_vjp(b: Ops, v: Vjp) -> Grads:
    """Σ over pairs of f·(g_sin·cos − g_cos·sin): sinusoidal itself holds both."""
    positions, dim = v.arg(0), v.attrs["dim"]
    if not v.needs[0]:
        return [None]
    wide = torch.float64 if v.grad.dtype.short == "f64" else torch.float32
    pace = b.constant(frequencies(dim, v.attrs["base"]).to(wide), "frequencies")
    (g_sin, g_cos), (sin, cos) = (
        map(b.upcast, _pairs(b, t, dim, v.attrs["interleaved"])) for t in (v.grad, v.outs[0])
    )
    return [b.to(b.sum(pace * (g_sin * cos - g_cos * sin), axes=-1), positions.dtype)]


@operator(
    Fusion.OPAQUE,
    _sine_reference,
    attrs={
        "dim": Attr("int", doc="features per position, an even number"),
        "base": Attr("float", 10000.0, "wavelengths grow from 2π to almost 2π · base"),
        "interleaved": Attr("bool", False, "sin, cos, sin, cos, … instead of all sines first"),
        "dtype": Attr("dtype", None, "of the result; None: that of positions, f32 for integers"),
    },
    vjp=_sine_vjp,
    flops=lambda ins, outs, attrs: 20.0 * outs[0].numel,
    samples="""7:index<99 dim=6 | 2x3 dim=4 interleaved=True | 3x5@transposed dim=8 base=100.0
        | 3:index<9:i32 dim=2 dtype=f16 nograd | scalar dim=4 [scalar] | 0x2 dim=4 [empty]
        | 9:extreme dim=4 nograd [extreme]""",
)
def sinusoidal(
    positions: TensorType, dim: int, base: float, dtype: str | None, **how: Any
) -> TensorType:
    """sin and cos of position · base^(−2i / dim): [...] becomes [..., dim], all sines then all
    cosines, or in turns where interleaved. The table of a model is sinusoidal of a constant arange,
    and is folded into a constant."""
    if dim < 2 or dim % 2 or not base > 0:
        wrong = f"sinusoidal with dim={dim}, base={base}"
        raise GraphError(wrong, remedy="use an even dim and base > 0")
    kind = positions.dtype if positions.dtype.is_float else float32
    kind = kind if dtype is None else dtype_of(dtype)
    if positions.dtype.kind == "bool" or not kind.is_float:
        wrong = f"sinusoidal of {positions.dtype.name} positions as {kind.name}"
        raise GraphError(wrong, remedy="positions are numbers, the result is of a float type")
    return TensorType.of((*positions.shape, dim), kind)
