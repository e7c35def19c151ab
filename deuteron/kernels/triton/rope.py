"""Rotary positions on queries and keys, in place of ten passes over them: one launch.

    a' = a·cos θ − b·sin θ     b' = b·cos θ + a·sin θ     for each pair (a, b) of a head

Bytes: q and k are read once and written once. A program turns a tile of tokens × heads and reads
the angles of its tokens once for all its heads: with eight heads of 16-bit features a table in
float32 adds an eighth to the traffic, and that comes from L2.

Without a table an angle is counted in turns, as a 64-bit fixed-point number: position × (turns per
position · 2⁶⁴) wraps round exactly where the circle does. So it is right at any position. It splits
into a quadrant and at most an eighth of a turn, for which two short polynomials give sin and cos.

Written with tensor operators, rope is generated code with a concatenation for q and one for k. What
torch.compile makes of that takes 93 µs for [4, 4096, 32 + 8, 128] in bf16 on an H200 and 4.9 µs for
512 tokens, this kernel 84 and 3.1, at 0.96 and 0.86 of a copy's speed (bench/results/rope-h200.md).
"""

import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.ir.types import TensorType
from deuteron.kernels.triton.launch import Launchable
from deuteron.ops.rope import frequencies, known_tables

RADIANS: tl.constexpr = tl.constexpr(math.pi / 2**31)  # radians in 2⁻³² of a turn


@triton.jit
def _circle(phase):
    """Return cos and sin, in float32, of an angle in units of 2⁻⁶⁴ turns. The upper half of the
    number gives the angle to 2e-9 radians: a quadrant, and a rest in −π/4 … π/4, where Taylor's
    series needs few terms (the first left out is below 2e-9)."""
    top = (phase >> 32).to(tl.int32)
    quadrant = (top + 2**29) >> 30
    r = (top - (quadrant << 30)).to(tl.float32) * RADIANS
    z = r * r
    sin = r * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880)))))
    high = 1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800)))
    cos = 1 + z * (-1 / 2 + z * high)
    odd = (quadrant & 1) != 0
    c, s = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return c * (1 - ((quadrant + 1) & 2)).to(tl.float32), s * (1 - (quadrant & 2)).to(tl.float32)


# count: tokens, in sequences of a length; offset: token s has the position offset + s, or offset +
# its entry in positions, where step is from one sequence to the next; rows: of the tables of
# angles; rest: features that are not rotated; q_blocks, blocks: blocks of heads, of q and in all, q
# first.
Tokens = namedtuple("Tokens", "count length offset rows step rest q_blocks blocks")

# How many heads q or k has, and the strides of what is read and of what is written.
Heads = namedtuple("Heads", "count batch token head to_batch to_token to_head")


# tokens, heads: of one program; half: pairs of features of a head that are rotated (half of those
# features); pairs: lanes for these; tail: lanes that copy the rest.
Tile = namedtuple("Tile", "tokens heads half pairs tail interleaved inverse")


@triton.jit
def _angles(tables, token, batch, live, features, at, T: tl.constexpr, WIDE: tl.constexpr):
    """Return cos θ and sin θ for a tile of tokens × heads. Rows of tables are loaded for each head
    anew: they come from L1, while sharing them among threads would take barriers."""
    cos, sin, turns, positions = tables
    place = token.to(tl.int64)
    if positions is not None:
        here = batch.to(tl.int64) * at.step + token
        place = tl.load(positions + here, mask=live, other=0).to(tl.int64)
    place += at.offset
    if cos is not None:
        row = (place * T.half)[:, None, None] + features
        # a row that does not exist reads as nan: a kernel cannot raise an error
        inside = (live & (place >= 0) & (place < at.rows))[:, None, None] & (features < T.half)
        shape: tl.constexpr = (row.shape[0], T.heads, row.shape[2])
        row, inside = tl.broadcast_to(row, shape), tl.broadcast_to(inside, shape)
        c = tl.load(cos + row, mask=inside, other=float("nan")).to(WIDE)
        s = tl.load(sin + row, mask=inside, other=float("nan")).to(WIDE)
    else:
        pace = tl.load(turns + features, mask=features < T.half, other=0)
        if WIDE == tl.float64:  # in radians, as the reference counts them
            angle = place[:, None, None].to(WIDE) * pace
            c, s = tl.cos(angle), tl.sin(angle)
        else:
            c, s = _circle(place[:, None, None] * pace)
    if T.inverse:
        s = -s
    return c, s


@triton.jit
def _turn(x, y, first, of, tables, token, batch, live, at, T: tl.constexpr):
    """Rotate a tile of heads from ``first`` on. Its features are loaded first, so that the angles
    are computed or loaded while they are under way."""
    kind = y.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    head = first + tl.arange(0, T.heads)
    b, t, h = batch.to(tl.int64)[:, None], token.to(tl.int64)[:, None], head.to(tl.int64)[None, :]
    source = x + (b * of.batch + t * of.token + h * of.head)[:, :, None]
    target = y + (b * of.to_batch + t * of.to_token + h * of.to_head)[:, :, None]
    here = (live[:, None] & (head < of.count)[None, :])[:, :, None]
    features = tl.arange(0, T.pairs)[None, None, :]
    if T.interleaved:
        both = tl.arange(0, 2 * T.pairs)[None, None, :]
        inside = here & (both < 2 * T.half)
        loaded = tl.load(source + both, mask=inside).to(WIDE)
        p, q = tl.split(tl.reshape(loaded, (loaded.shape[0], T.heads, T.pairs, 2)))
    else:
        inside = here & (features < T.half)
        p = tl.load(source + features, mask=inside).to(WIDE)
        q = tl.load(source + features + T.half, mask=inside).to(WIDE)
    if T.tail:
        more = tl.arange(0, T.tail)[None, None, :]
        kept = tl.load(source + 2 * T.half + more, mask=here & (more < at.rest))
        tl.store(target + 2 * T.half + more, kept, mask=here & (more < at.rest))
    c, s = _angles(tables, token, batch, live, features, at, T, WIDE)
    if T.interleaved:
        turned = tl.join(p * c - q * s, q * c + p * s)
        turned = tl.reshape(turned, (p.shape[0], T.heads, 2 * T.pairs))
        tl.store(target + both, turned.to(kind), mask=inside)
    else:
        tl.store(target + features, (p * c - q * s).to(kind), mask=inside)
        tl.store(target + features + T.half, (q * c + p * s).to(kind), mask=inside)


@triton.jit
def _rope(q, k, q_out, k_out, cos, sin, turns, positions, at, of_q, of_k, T: tl.constexpr):
    """A program has some tokens × some heads; blocks of heads, of q and then of k, vary fastest."""
    block = tl.program_id(0) % at.blocks
    number = tl.program_id(0) // at.blocks * T.tokens + tl.arange(0, T.tokens)
    live = number < at.count
    batch, token = number // at.length, number % at.length
    tables = (cos, sin, turns, positions)
    if block < at.q_blocks:
        _turn(q, q_out, block * T.heads, of_q, tables, token, batch, live, at, T)
    elif k is not None:
        first = (block - at.q_blocks) * T.heads
        _turn(k, k_out, first, of_k, tables, token, batch, live, at, T)


rope = Launchable(_rope)


def turns_per_position(dims: int, base: float) -> torch.Tensor:
    """Return how far each pair turns per position: turns · 2⁶⁴, modulo 2⁶⁴, as int64."""
    turns = [float(f) / (2 * math.pi) for f in frequencies(dims, base)]
    units = [round(math.ldexp(t % 1.0, 64)) % 2**64 for t in turns]
    return torch.tensor([u - 2**64 if u >= 2**63 else u for u in units], dtype=torch.int64)


def prepare_rope(
    parts: Sequence[tuple[TensorType, TensorType]],
    cos: TensorType | None,
    positions: TensorType | None,
    attrs: Mapping[str, Any],
    cut: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., None]:
    """Return ``run(q, k, q_out, k_out, cos, sin, positions)``; ``parts``: (input, result) of q and
    of k. k, the tables and the positions may be None. ``cut`` says which tokens and heads a program
    takes, with how many warps, and whether angles that are known ahead come from a table or are
    computed."""
    axis, dims, offset, q = attrs["axis"], attrs["dims"], attrs["offset"], parts[0][0]
    batch, length, rest = q.shape[0], q.shape[axis], q.shape[3] - dims
    rows = 0 if cos is None else cos.shape[0]
    known: tuple[torch.Tensor | None, ...] = (None, None, None)
    if cos is None and positions is None and cut["table"]:
        wide = torch.float64 if q.dtype.short == "f64" else torch.float32
        made = known_tables(length, dims, attrs["base"], offset)
        known = (made[0].to(device, wide), made[1].to(device, wide), None)
        offset, rows = 0, length
    elif cos is None:
        pace = frequencies if q.dtype.short == "f64" else turns_per_position
        known = (None, None, pace(dims, attrs["base"]).to(device))

    def heads(source: TensorType, result: TensorType) -> Heads:
        steps = (t.strides[d] for t in (source, result) for d in (0, axis, 3 - axis))
        return Heads(source.shape[3 - axis], *steps)

    of_q, of_k = (*(heads(*part) for part in parts), Heads(0, 0, 0, 0, 0, 0, 0))[:2]
    q_blocks, k_blocks = (-(-of.count // cut["heads"]) for of in (of_q, of_k))
    own = positions is not None and positions.rank == 2 and positions.shape[0] > 1
    step, blocks = length if own else 0, q_blocks + k_blocks
    at = Tokens(batch * length, length, offset, rows, step, rest, q_blocks, blocks)
    pairs, tail = triton.next_power_of_2(dims // 2), triton.next_power_of_2(rest) if rest else 0
    how = attrs["interleaved"], attrs["inverse"]
    tile = Tile(cut["tokens"], cut["heads"], dims // 2, pairs, tail, *how)
    grid = (-(-at.count // tile.tokens) * blocks,)

    def run(q: Any, k: Any, q_out: Any, k_out: Any, cos: Any, sin: Any, positions: Any) -> None:
        tables = known if cos is None else (cos, sin, None)
        given = (q, k, q_out, k_out, *tables, positions, at, of_q, of_k)
        rope(grid, *given, T=tile, warps=cut["warps"])

    return run
