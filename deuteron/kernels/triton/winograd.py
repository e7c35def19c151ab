"""y = f(conv(x, w), …) of 3 × 3 windows at stride 1, by Winograd's algorithm:

    y = f(Aᵀ [ Σ_c U ⊙ (Bᵀ d B) ] A, …)      d: t × t pixels under m × m windows, t = m + 2

There are three kernels: one transforms tiles of x and stores each of their t² numbers in a matrix
of its own [tiles, channels], a library multiplies these by the weights U = G g Gᵀ, t² products at
once, and the last one transforms the sums back and applies f. ``winograd_points.py`` has the
matrices.

Bytes: x and y once, and t² / m² times as much of both written and read between the kernels, four
times (m = 2) or 2.25 times (m = 4) their size. So it pays where arithmetic is slow: float32 without
tf32, or many channels.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import functions
from deuteron.codegen.triton_render import HEAD
from deuteron.kernels.triton.depthwise import finish
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula
from deuteron.kernels.winograd_points import matrices

# images; height, width: of one of x; down, across: of one of the result; high, wide: tiles down and
# across; ph, pw: zeros before x.
Sizes = namedtuple("Sizes", "images height width down across high wide ph pw")
# Pixels of a tile along each dimension; tiles and channels of a program.
Tile = namedtuple("Tile", "m tiles channels")
Channels = namedtuple("Channels", "channels")
BLOCK = 512  # tiles times channels of a program: numbers for each of the t² places of a tile
WARPS = 4


@triton.jit
def _tile(size, T: tl.constexpr):
    """Return a program's tiles, which of them exist, their images, and where each begins there."""
    tile = tl.program_id(0) * T.tiles + tl.arange(0, T.tiles)
    live = tile < size.images * size.high * size.wide
    image = tile // (size.high * size.wide)
    return tile, live, image, tile // size.wide % size.high * T.m, tile % size.wide * T.m


@triton.jit
def _spread(x, to, size, W: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr):
    t: tl.constexpr = T.m + 2
    tile, live, image, down, across = _tile(size, T)
    channel = tl.program_id(1) * T.channels + tl.arange(0, T.channels)
    known = (channel < W.channels)[None, :]
    lines = x + image.to(tl.int64) * (size.height * size.width * W.channels)
    lines = lines[:, None] + channel[None, :]
    seen = ()
    for i in tl.static_range(t):
        row = ()
        for j in tl.static_range(t):
            y, z = down - size.ph + i, across - size.pw + j
            inside = live & (y >= 0) & (y < size.height) & (z >= 0) & (z < size.width)
            at = ((y * size.width + z) * W.channels)[:, None]
            found = tl.load(lines + at, mask=inside[:, None] & known, other=0.0)
            row = row + (found.to(tl.float32),)
        seen = seen + SIDE(row)
    count = size.images.to(tl.int64) * size.high * size.wide * W.channels
    to += tile.to(tl.int64)[:, None] * W.channels + channel[None, :]
    for j in tl.static_range(t):
        column = ()
        for i in tl.static_range(t):
            column = column + (seen[i * t + j],)
        column = SIDE(column)
        for i in tl.static_range(t):
            found = column[i].to(to.dtype.element_ty)
            tl.store(to + (i * t + j) * count, found, mask=live[:, None] & known)


@triton.jit
def _gather(
    sums, y, others, size, W: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    t: tl.constexpr = T.m + 2
    tile, live, image, down, across = _tile(size, T)
    channel = tl.program_id(1) * T.channels + tl.arange(0, T.channels)
    known = (channel < W.channels)[None, :]
    count = size.images.to(tl.int64) * size.high * size.wide * W.channels
    sums += tile.to(tl.int64)[:, None] * W.channels + channel[None, :]
    seen = ()
    for i in tl.static_range(t):
        row = ()
        for j in tl.static_range(t):
            found = tl.load(sums + (i * t + j) * count, mask=live[:, None] & known, other=0.0)
            row = row + (found.to(tl.float32),)
        seen = seen + SIDE(row)
    for j in tl.static_range(T.m):
        column = ()
        for i in tl.static_range(t):
            column = column + (seen[i * T.m + j],)
        column = SIDE(column)
        for i in tl.static_range(T.m):
            inside = live & (down + i < size.down) & (across + j < size.across)
            mask = inside[:, None] & known
            pixel = (image * size.down + down + i) * size.across + across + j
            found = FINISH(column[i], others, pixel, image, channel, mask, W)
            to = y + pixel.to(tl.int64)[:, None] * W.channels + channel[None, :]
            tl.store(to, found.to(y.dtype.element_ty), mask=mask)


_spread_out, _gathered = Launchable(_spread), Launchable(_gather)


@lru_cache
def _side(m: int, which: int) -> Any:
    """Return the product of a matrix, Aᵀ (0) or Bᵀ (2), with numbers along one dimension of a tile,
    as a Triton function of a tuple."""
    rows = matrices(m)[which]
    sums = [" + ".join(f"{k!r} * x[{i}]" for i, k in enumerate(row) if k) for row in rows]
    body = f"@triton.jit\ndef side(x):\n    return ({', '.join(sums)},)\n"
    return functions(f"{HEAD}\n\n{body}")["side"]


def transformed(weight: torch.Tensor, m: int) -> torch.Tensor:
    """Return the transform U of a weight [K, C, 3, 3] as [t², C, K], computed in float64."""
    g = torch.tensor(matrices(m)[1], dtype=torch.float64, device=weight.device)
    made = torch.einsum("ij,kcjl,ml->imck", g, weight.double(), g)
    return made.flatten(0, 1).to(weight.dtype).contiguous()


def conv(
    size: Sizes,
    m: int,
    channels: int,
    columns: int,
    after: EpilogueFormula,
    multiply: Callable[..., Any],
) -> Callable[..., None]:
    """Return a function (x, weight, y, others); weight is as :func:`transformed` returns it, and
    all lie channels last. ``multiply`` is ``torch.bmm``, or does the same."""
    last = finish(after)
    tiles = size.images * size.high * size.wide

    def tile(channels: int) -> Tile:
        beside = min(64, triton.next_power_of_2(channels))
        return Tile(m, BLOCK // beside, beside)

    def programs(t: Tile, channels: int) -> tuple[int, int]:
        return -(-tiles // t.tiles), -(-channels // t.channels)

    def run(x: torch.Tensor, weight: Any, y: Any, others: Sequence[Any]) -> None:
        spread = x.new_empty(((m + 2) ** 2, tiles, channels))
        t = tile(channels)
        how = {"W": Channels(channels), "T": t, "SIDE": _side(m, 2), "warps": WARPS, "stages": 1}
        _spread_out(programs(t, channels), x, spread, size, **how)
        sums = multiply(spread, weight)
        t = tile(columns)
        how |= {"W": Channels(columns), "T": t, "SIDE": _side(m, 0), "FINISH": last}
        _gathered(programs(t, columns), sums, y, tuple(others), size, **how)

    return run
