"""Rotary positions on queries and keys, in place of ten passes over them: one launch.

    a' = a·cos θ − b·sin θ     b' = b·cos θ + a·sin θ     for each pair (a, b) of a head

Bytes: q and k are read once and written once. A program turns a tile of tokens × heads and reads
the angles of its tokens once for all its heads: with eight heads of 16-bit features a table in
float32 adds an eighth to the traffic, and that comes from L2.

Without a table an angle is counted in turns, as a 64-bit fixed-point number: position × (turns per
position · 2⁶⁴) wraps round exactly where the circle does. So it is right at any position, what is
left is an eighth of a turn and a quadrant, and two short polynomials stand for sin and cos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.ir.types import TensorType
from deuteron.kernels.triton.launch import Launchable
from deuteron.ops.position import frequencies, rotation_tables

RADIANS: tl.constexpr = tl.constexpr(math.pi / 2**31)  # in 2⁻³² of a turn


@triton.jit
def _circle(phase):
    """cos and sin of a turn in units of 2⁻⁶⁴, to float32. The upper half of the number places it
    to 2e-9 radians: a quadrant, and what is left of it in −π/4 … π/4, where Taylor's series needs
    few terms (the first left out is below 2e-9)."""
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


@triton.jit
def _angles(
    cos,
    sin,
    turns,
    positions,
    token,
    batch,
    offset,
    rows,
    position_stride,
    features,
    live,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """cos θ and sin θ for a tile of tokens × heads. Table rows are read for each head anew: that
    finds them in L1, where sharing them among threads would take barriers."""
    place = token.to(tl.int64)
    if positions is not None:
        at = batch.to(tl.int64) * position_stride + token
        place = tl.load(positions + at, mask=live, other=0).to(tl.int64)
    place += offset
    if cos is not None:
        row = (place * HALF)[:, None, None] + features
        # a row that is not there reads as nan, as near to an error as a kernel comes
        inside = (live & (place >= 0) & (place < rows))[:, None, None] & (features < HALF)
        shape: tl.constexpr = (row.shape[0], HEADS, row.shape[2])
        row, inside = tl.broadcast_to(row, shape), tl.broadcast_to(inside, shape)
        c = tl.load(cos + row, mask=inside, other=float("nan")).to(WIDE)
        s = tl.load(sin + row, mask=inside, other=float("nan")).to(WIDE)
    else:
        pace = tl.load(turns + features, mask=features < HALF, other=0)
        if WIDE == tl.float64:  # in radians, as the reference counts them
            angle = place[:, None, None].to(WIDE) * pace
            c, s = tl.cos(angle), tl.sin(angle)
        else:
            c, s = _circle(place[:, None, None] * pace)
    if INVERSE:
        s = -s
    return c, s


@triton.jit
def _turn(
    x,
    y,
    first,
    heads,
    x_batch,
    x_token,
    x_head,
    y_batch,
    y_token,
    y_head,
    cos,
    sin,
    turns,
    positions,
    token,
    batch,
    offset,
    rows,
    position_stride,
    live,
    rest,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """A tile of ``HEADS`` heads from ``first`` on, turned. What is turned is asked for first, so
    that the angles come while it is under way."""
    kind = y.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    head = first + tl.arange(0, HEADS)
    b, t, h = batch.to(tl.int64)[:, None], token.to(tl.int64)[:, None], head.to(tl.int64)[None, :]
    source = x + (b * x_batch + t * x_token + h * x_head)[:, :, None]
    target = y + (b * y_batch + t * y_token + h * y_head)[:, :, None]
    here = (live[:, None] & (head < heads)[None, :])[:, :, None]
    features = tl.arange(0, PAIRS)[None, None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, None, :]
        inside = here & (both < 2 * HALF)
        loaded = tl.load(source + both, mask=inside).to(WIDE)
        p, q = tl.split(tl.reshape(loaded, (loaded.shape[0], HEADS, PAIRS, 2)))
    else:
        inside = here & (features < HALF)
        p = tl.load(source + features, mask=inside).to(WIDE)
        q = tl.load(source + features + HALF, mask=inside).to(WIDE)
    if TAIL:
        more = tl.arange(0, TAIL)[None, None, :]
        kept = tl.load(source + 2 * HALF + more, mask=here & (more < rest))
        tl.store(target + 2 * HALF + more, kept, mask=here & (more < rest))
    c, s = _angles(
        cos,
        sin,
        turns,
        positions,
        token,
        batch,
        offset,
        rows,
        position_stride,
        features,
        live,
        HEADS,
        HALF,
        INVERSE,
        WIDE,
    )
    if INTERLEAVED:
        turned = tl.join(p * c - q * s, q * c + p * s)
        turned = tl.reshape(turned, (p.shape[0], HEADS, 2 * PAIRS))
        tl.store(target + both, turned.to(kind), mask=inside)
    else:
        tl.store(target + features, (p * c - q * s).to(kind), mask=inside)
        tl.store(target + features + HALF, (q * c + p * s).to(kind), mask=inside)


@triton.jit
def _rope(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    turns,
    positions,
    tokens,
    length,
    q_heads,
    k_heads,
    q_blocks,
    blocks,
    offset,
    rows,
    position_stride,
    rest,
    q_batch,
    q_token,
    q_head,
    qo_batch,
    qo_token,
    qo_head,
    k_batch,
    k_token,
    k_head,
    ko_batch,
    ko_token,
    ko_head,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Program: TOKENS tokens × HEADS heads; heads of q and then of k vary fastest."""
    block = tl.program_id(0) % blocks
    number = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    live = number < tokens
    batch, token = number // length, number % length
    if block < q_blocks:
        _turn(
            q,
            q_out,
            block * HEADS,
            q_heads,
            q_batch,
            q_token,
            q_head,
            qo_batch,
            qo_token,
            qo_head,
            cos,
            sin,
            turns,
            positions,
            token,
            batch,
            offset,
            rows,
            position_stride,
            live,
            rest,
            HEADS,
            HALF,
            PAIRS,
            TAIL,
            INTERLEAVED,
            INVERSE,
        )
    elif k is not None:
        _turn(
            k,
            k_out,
            (block - q_blocks) * HEADS,
            k_heads,
            k_batch,
            k_token,
            k_head,
            ko_batch,
            ko_token,
            ko_head,
            cos,
            sin,
            turns,
            positions,
            token,
            batch,
            offset,
            rows,
            position_stride,
            live,
            rest,
            HEADS,
            HALF,
            PAIRS,
            TAIL,
            INTERLEAVED,
            INVERSE,
        )


rope = Launchable(_rope)


@dataclass(frozen=True)
class Way:
    """What one program turns and with how many warps, and whether angles that are known ahead
    are read from a table or computed."""

    tokens: int
    heads: int
    warps: int
    table: bool


def turns_per_position(dims: int, base: float) -> torch.Tensor:
    """How far each pair turns from one position to the next: turns · 2⁶⁴, modulo 2⁶⁴, as int64."""
    turns = [float(f) / (2 * math.pi) for f in frequencies(dims, base)]
    units = [round(math.ldexp(t % 1.0, 64)) % 2**64 for t in turns]
    return torch.tensor([u - 2**64 if u >= 2**63 else u for u in units], dtype=torch.int64)


class Rotation:
    """Rope for tensors of known types; all that a launch needs is worked out here.

    ``k`` and ``k_out`` may be None, and so may ``cos`` and ``positions``. Features are adjacent
    in memory, tables and positions contiguous.
    """

    def __init__(
        self,
        q: TensorType,
        q_out: TensorType,
        k: TensorType | None,
        k_out: TensorType | None,
        cos: TensorType | None,
        positions: TensorType | None,
        attrs: Mapping[str, Any],
        way: Way,
        device: torch.device,
    ) -> None:
        axis, dims, offset = attrs["axis"], attrs["dims"], attrs["offset"]
        batch, length, heads = q.shape[0], q.shape[axis], q.shape[3 - axis]
        others = 0 if k is None else k.shape[3 - axis]
        q_blocks, k_blocks = -(-heads // way.heads), -(-others // way.heads)
        rest, rows = q.shape[3] - dims, 0 if cos is None else cos.shape[0]
        own = positions is not None and positions.rank == 2 and positions.shape[0] > 1
        self.known: tuple[torch.Tensor | None, ...] = (None, None, None)
        if cos is None and positions is None and way.table:
            wide = torch.float64 if q.dtype.short == "f64" else torch.float32
            made = rotation_tables(
                None, None, None, length, dims, attrs["base"], offset, torch.device("cpu")
            )
            self.known = (made[0].to(device, wide), made[1].to(device, wide), None)
            offset, rows = 0, length
        elif cos is None:
            pace = frequencies if q.dtype.short == "f64" else turns_per_position
            self.known = (None, None, pace(dims, attrs["base"]).to(device))
        self.grid = (-(-batch * length // way.tokens) * (q_blocks + k_blocks),)
        self.warps = way.warps
        self.numbers = [
            batch * length,
            length,
            heads,
            others,
            q_blocks,
            q_blocks + k_blocks,
            offset,
            rows,
            length if own else 0,
            rest,
        ]
        for x in (q, q_out, k, k_out):
            strides = (0, 0, 0, 0) if x is None else x.strides
            self.numbers += (strides[0], strides[axis], strides[3 - axis])
        self.constants = {
            "TOKENS": way.tokens,
            "HEADS": way.heads,
            "HALF": dims // 2,
            "PAIRS": triton.next_power_of_2(dims // 2),
            "TAIL": triton.next_power_of_2(rest) if rest else 0,
            "INTERLEAVED": attrs["interleaved"],
            "INVERSE": attrs["inverse"],
        }

    def __call__(
        self,
        q: torch.Tensor,
        q_out: torch.Tensor,
        k: torch.Tensor | None,
        k_out: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        tables = self.known if cos is None else (cos, sin, None)
        rope(
            self.grid,
            q,
            k,
            q_out,
            k_out,
            *tables,
            positions,
            *self.numbers,
            warps=self.warps,
            **self.constants,
        )
