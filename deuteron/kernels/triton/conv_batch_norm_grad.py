"""The gradient of a 1 × 1 convolution with batch norm in training behind it: the gradient dz that
batch norm passes to the convolution is multiplied where it is computed, and is never in memory.

    z = x · w        y = act(batch norm of z)
    dz = what ``batch_norm_passes`` calls dx        dx = f(dz · wᵀ, …)        dw = f(dzᵀ · x, …)

Separate kernels are a pass that reads grad and z and writes dz, and two products that read it: five
tensors of the size of z, x and dx. Here a program takes some pixels at a time, computes dz for them
in all channels, multiplies it by the weight, which stays on the chip, and by these pixels of x; the
sums of the latter product stay in registers until the last pixel: two tensors of the size of z, x
and dx. Where x has many channels, each program has some of them, and only the first read of grad
and z comes from memory, the others from L2.

``batch_norm_passes`` takes the sums of the norm before. Programs split the pixels among them and
store parts of dw in float32, which ``product.add_up`` adds up in a fixed order: the same bits every
time. dz is rounded as if it were in memory.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import jitted
from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.batch_norm import _size, _tile, backward
from deuteron.kernels.triton.batch_norm_passes import (
    Affine,
    Operands,
    _affine,
    _channel,
    known_means,
    pulled,
)
from deuteron.kernels.triton.batch_norm_passes import _tile as _places
from deuteron.kernels.triton.batch_norm_tiles import Division
from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.kernels.triton.product import EpilogueFormula, add_up, finish
from deuteron.ops.activated import activation

# Rows and columns of a result as a matrix; pixels: of an image, if rows are pixels.
Sizes = namedtuple("Sizes", "rows columns pixels")
# rows: pixels of x at a time; columns: channels of x at a time; channels: of x in all; parts: of
# the split sums over pixels; outs: 1, the results of each kernel.
Tile = namedtuple("Tile", "rows columns channels parts outs CHAIN")


@triton.jit
def _once(v, zero):
    """Return numbers of channels, which were read for several equal rows, as a single row. Because
    of the equal rows a thread holds two neighbours, and what is computed with them has the layout
    of matrix units. Of a single row it would hold one number, and every result would go through
    shared memory by itself."""
    return tl.max(v + zero, 0, keep_dims=True)


@triton.jit
def _pull(
    t, x, w, dx, parts, others, size, made, C: tl.constexpr, T: tl.constexpr, SLOPE: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    enter(C.CHAIN, False)
    ACROSS: tl.constexpr = (T.channels + T.columns - 1) // T.columns
    part, n = tl.program_id(0) // ACROSS, tl.program_id(0) % ACROSS * T.columns
    lane, c = tl.arange(0, C.B)[:, None], n + tl.arange(0, T.columns)[None, :]
    whole = (lane < size.channels) & (c < T.channels)
    weight = tl.load(w + lane * T.channels + c, mask=whole, other=0.0)
    zero = tl.zeros((max(1, 512 // C.B), C.B), tl.float32)
    k = _channel(0, size, C) + zero.to(tl.int32)
    f, means = _affine(t, k, size), known_means(t, k, size)
    f = Affine(_once(f.mean, zero), _once(f.scale, zero), _once(f.shift, zero))
    means = _once(means[0], zero), _once(means[1], zero)
    sums = tl.zeros((C.B, T.columns), tl.float32)
    for step in tl.range(part, size.tiles, T.parts, num_stages=C.STAGES):
        i = size.tiles - 1 - step  # the pass before read these last: they are still in L2
        at, inside = _places(i, 0, size, C)
        g = pulled(t, i, 0, at, inside, f, means, size, C, SLOPE)
        row = i * C.A + tl.arange(0, C.A)[:, None]
        g = tl.where(row < size.rows, g, 0.0).to(x.dtype.element_ty)
        here = (row < size.rows) & (c < T.channels)
        image = tl.load(x + row * T.channels + c, mask=here, other=0.0)
        back = tl.dot(g, weight)
        sums = tl.dot(tl.trans(g), image, sums)
        found = FINISH(back, back, others, 0, i * C.A, n, made, T, 0)
        tl.store(dx + row * T.channels + c, found.to(dx.dtype.element_ty), mask=here)
    to = parts + (part * size.channels + lane) * T.channels + c
    tl.store(to, sums, mask=whole)


_run = Launchable(_pull, follows=True)


class Way(NamedTuple):
    """Pixels and channels of x that a program takes at a time, the number of programs, and their
    warps and stages."""

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int


def pull(
    d: Division,
    channels: int,
    pixels: int,
    activated: str,
    by_result: bool,
    after: Sequence[EpilogueFormula],
    way: Way,
) -> Callable[..., None]:
    """Return a function (t, x, w, dx, dw, *others): t are the operands of batch norm's gradient
    (without its dx), x has ``channels`` and images of ``pixels``, w is [out, in]; others: operands
    of the two epilogues ``after``, of dx and of dw. ``d``: how the sums of the norm are taken."""
    act = activation(activated)
    f = None if act is None else jitted(act.slope(by_result), False, divides=False)
    sums, of_x, of_w = backward(d, activated, by_result, False), *map(finish, after)
    own = replace(d, a=way.rows, b=max(16, power_of_two(d.channels)), splits=1)
    across = -(-channels // way.columns)
    parts = min(max(1, way.programs // across), own.tiles)
    room, size, made = parts * d.channels * channels, _size(own), Sizes(d.rows, channels, pixels)

    def run(t: Operands, x: torch.Tensor, w: Any, dx: Any, dw: Any, *others: Sequence[Any]) -> None:
        scratch = torch.empty(room + 2 * d.channels, dtype=torch.float32, device=x.device)
        t, chain = t._replace(means=scratch[room:]), chained(x.device)
        sums(t)
        slope = f if t.signs is None else None
        known = t._replace(dweight=None, dbias=None, again=None)
        if t.dz is not None:
            known = known._replace(grad=None, y=None, residual=None, signs=None)
        tile = Tile(way.rows, way.columns, channels, parts, 1, chain)
        how = {"C": _tile(own, way.stages, chain), "T": tile, "SLOPE": slope, "FINISH": of_x}
        given = known, x, w, dx, scratch, tuple(others[0]), size, made
        _run((parts * across,), *given, **how, warps=way.warps, stages=way.stages)
        left = scratch[:room].view(parts, 1, d.channels, channels)
        add_up(left, (dw,), others[1], Sizes(d.channels, channels, 1), tile, of_w)

    return run
