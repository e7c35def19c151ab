"""Pieces of the batch norm kernels: places of tiles, activations, and signs kept as bits.

What tiles, rows and lanes are is told in ``batch_norm_passes.py``, which has the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---- places ------------------------------------------------------------------------------------


@triton.jit
def tile_at(
    t,
    block,
    rows,
    channels,
    units,
    across,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
):
    """Offsets of tile t of a block, and which of its rows and lanes exist. The number of lanes is
    given as units · V, so that the compiler sees how many elements may travel together."""
    lanes = units * V
    row = t * A + tl.arange(0, A)[:, None]
    if LAST:
        lane = block * B + tl.arange(0, B)[None, :]
        at = row * lanes + lane
    else:
        lane = block % across * B + tl.arange(0, B)[None, :]
        at = (row * channels + block // across) * lanes + lane
    return at, row < rows, lane < lanes


@triton.jit
def bytes_at(
    t,
    block,
    rows,
    channels,
    units,
    across,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
):
    """Offsets of the signs of a tile, eight lanes to a byte, and which of them exist. A row of
    lanes begins with a byte of its own."""
    if V >= 8:
        at, row, byte = tile_at(t, block, rows, channels, units, across, LAST, A, B // 8, V // 8)
    else:
        groups = (units * V + 7) // 8
        at, row, byte = tile_at(t, block, rows, channels, groups, across, LAST, A, B // 8, 1)
    return at, row & byte


@triton.jit
def channel_of(block, across, LAST: tl.constexpr, B: tl.constexpr):
    """The channels of a block: one for each lane, or a single one."""
    if LAST:
        return block * B + tl.arange(0, B)[None, :]
    else:
        return block // across


@triton.jit
def number(of, c, channels, default: tl.constexpr):
    """A number for each channel, or a default where the tensor is left out."""
    if of is None:
        return default
    else:
        return tl.load(of + c, mask=c < channels, other=0.0).to(tl.float32)


@triton.jit
def total(v, LAST: tl.constexpr):
    """The sum over a tile for each channel."""
    if LAST:
        return tl.sum(v, 0, keep_dims=True)
    else:
        return tl.sum(tl.sum(v, 1), 0)


@triton.jit
def start(blocks, WIDE: tl.constexpr):
    """Which part of the rows and which block this program has; 64 bits where offsets need them."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    return program // blocks, program % blocks


# ---- activations -------------------------------------------------------------------------------


@triton.jit
def act(z, slope, ACT: tl.constexpr):
    """The activation of z; nan stays nan."""
    if ACT == "relu":
        z = tl.where(z <= 0.0, 0.0, z)
    if ACT == "relu6":
        z = tl.where(z <= 0.0, 0.0, tl.where(z >= 6.0, 6.0, z))
    if ACT == "leaky_relu":
        z = tl.where(z > 0.0, z, z * slope)
    if ACT == "silu":
        z = z / (1.0 + tl.exp(-z))
    if ACT == "hardswish":
        gate = tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 6.0, z + 3.0))
        z = z * gate * (1.0 / 6.0)
    return z


@triton.jit
def act_grad(g, z, slope, ACT: tl.constexpr):
    """The gradient before the activation; z may be y where that shows the slope as well."""
    if ACT == "relu":
        g = tl.where(z <= 0.0, 0.0, g)
    if ACT == "relu6":
        g = tl.where((z <= 0.0) | (z >= 6.0), 0.0, g)
    if ACT == "leaky_relu":
        g = tl.where(z > 0.0, g, g * slope)
    if ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        g = g * s * (1.0 + z * (1.0 - s))
    if ACT == "hardswish":
        g = tl.where(z >= 3.0, g, tl.where(z <= -3.0, 0.0, g * (z * (1.0 / 3.0) + 0.5)))
    return g


# ---- signs: where the gradient of relu passes, one bit for each element -------------------------


@triton.jit
def write_signs(
    signs,
    y,
    inside,
    t,
    block,
    rows,
    channels,
    units,
    across,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
):
    """Eight lanes side by side make a byte that nobody else writes; those beyond the end are 0."""
    if signs is not None:
        at, there = bytes_at(t, block, rows, channels, units, across, LAST, A, B, V)
        kept = tl.where(inside & ~(y <= 0.0), 1, 0)
        bits = tl.reshape(kept, (A, B // 8, 8)) << tl.arange(0, 8)[None, None, :]
        tl.store(signs + at, tl.sum(bits, 2).to(tl.uint8), mask=there)


@triton.jit
def read_signs(
    signs,
    t,
    block,
    rows,
    channels,
    units,
    across,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
):
    """1 where the gradient passes, 0 elsewhere; without signs 1, and the compiler drops it."""
    if signs is None:
        return 1
    else:
        at, there = bytes_at(t, block, rows, channels, units, across, LAST, A, B, V)
        byte = tl.load(signs + at, mask=there, other=0).to(tl.int32)
        bits = (byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        return tl.reshape(bits, (A, B))
