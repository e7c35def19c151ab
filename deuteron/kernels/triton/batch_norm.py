"""Batch normalisation for training on a GPU: which kernels are launched, and with what.

The kernels, their equations and their bytes are in ``batch_norm_passes.py``; how x is cut into
tiles is in ``batch_norm_tiles.py``.
"""

from collections.abc import Callable
from typing import Any

import torch

from deuteron.codegen.triton_load import jitted
from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton import batch_norm_passes as passes
from deuteron.kernels.triton.batch_norm_passes import Numbers, Operands, Size, Tile
from deuteron.kernels.triton.batch_norm_tiles import PIECES, Division
from deuteron.kernels.triton.launch import Launchable, chained
from deuteron.ops.activated import activation

forward_once, backward_once = Launchable(passes.forward_once), Launchable(passes.backward_once)
forward_statistics = Launchable(passes.forward_statistics)
forward_merge = Launchable(passes.forward_merge, follows=True)
forward_apply = Launchable(passes.forward_apply, follows=True)
backward_sums = Launchable(passes.backward_sums)
backward_merge = Launchable(passes.backward_merge, follows=True)
backward_apply = Launchable(passes.backward_apply, follows=True)

Call = Callable[[Operands], None]


def forward(
    d: Division, momentum: float, eps: float, following: str, exact: bool, pieces: int = 0
) -> Call:
    """Return a function that fills y, signs and the statistics; mean and rstd must not be None.
    Tensors of the size of x have one memory order; ``exact`` if they are float32. ``pieces``: the
    kernel that made x left so many parts of its statistics, in parts and counts."""
    act = activation(following)
    f = None if act is None else jitted(act.traced, exact, divides=False)
    size, once, found = _size(d), _tile(d, 2, False), pieces or d.pieces
    first, second = ({"warps": d.warps, "stages": stages} for stages in (d.deep, d.stages))

    def run(t: Operands) -> None:
        share = 1.0 if t.running_mean is None else momentum
        n = Numbers(share, d.count / (d.count - 1), eps, float(d.count))
        if d.once and not pieces:
            forward_once((d.blocks,), t, n, size, C=once, ACT=f, warps=d.warps)
            return
        chain = chained(t.x.device)
        merge, flat = _merge(d, chain, found), _tile(d, d.stages, chain)
        learned = t._replace(y=None, residual=None, signs=None)
        if pieces:
            learned = learned._replace(x=None)
        else:
            room = d.workspace // 4
            parts = torch.empty(room, dtype=torch.float32, device=t.x.device)
            counts, deep = parts[2 * d.pieces * d.channels :], _tile(d, d.deep, chain)
            taken = Operands(t.x, parts=parts, counts=counts)
            forward_statistics((d.splits * d.blocks,), taken, size, C=deep, **first)
            learned = learned._replace(parts=parts, counts=counts)
        merged = size._replace(pieces=found)
        forward_merge((-(-d.channels // merge.B),), learned, n, merged, C=merge)
        known = Operands(t.x, t.y, t.residual, t.signs, t.weight, t.bias, t.mean, t.rstd)
        forward_apply((size.groups * d.blocks,), known, size, C=flat, ACT=f, **second)

    return run


def backward(d: Division, following: str, by_result: bool, exact: bool) -> Call:
    """Return a function that fills dx, dz, dweight, dbias and again (y once more), those that are
    there, and means, if another kernel computes dx from them. ``by_result``: the slope of the
    activation is computed from y, or from its signs."""
    act = activation(following)
    f = None if act is None else jitted(act.slope(by_result), exact, divides=False)
    y = None if act is None else jitted(act.traced, exact, divides=False)
    size, once, room = _size(d), _tile(d, 2, False), 2 * d.pieces * d.channels
    first, second = ({"warps": d.warps, "stages": stages} for stages in (d.deep, d.stages))
    n = Numbers(0.0, 0.0, 0.0, 1.0 / d.count)

    def run(t: Operands) -> None:
        slope = f if t.signs is None else None  # signs say all about the slope
        how: Any = {"SLOPE": slope, "ACT": None if t.again is None else y}
        if d.once:
            backward_once((d.blocks,), t, n, size, C=once, **how, warps=d.warps)
            return
        chain, device = chained(t.x.device), t.x.device
        parts = torch.empty(room + 2 * d.channels, dtype=torch.float32, device=device)
        means = parts[room:] if t.means is None else t.means
        merge = _merge(d, chain, d.pieces)
        deep, flat = _tile(d, d.deep, chain), _tile(d, d.stages, chain)
        read = t._replace(dx=None, dweight=None, dbias=None, parts=parts)
        backward_sums((d.splits * d.blocks,), read, size, C=deep, **how, **first)
        sums = Operands(None, rstd=t.rstd, dweight=t.dweight, dbias=t.dbias)
        sums = sums._replace(parts=parts, means=means)
        backward_merge((-(-d.channels // merge.B),), sums, n, size, C=merge)
        if t.dx is None:
            return
        known = t._replace(dweight=None, dbias=None, means=means, again=None)
        if t.dz is not None:
            known = known._replace(grad=None, y=None, residual=None, signs=None)
        backward_apply((size.groups * d.blocks,), known, size, C=flat, SLOPE=slope, **second)

    return run


def _size(d: Division) -> Size:
    of_x = (d.rows, d.tiles, d.channels, d.units)
    dealt = (d.across, d.blocks, d.splits, d.pieces, d.each, -(-d.tiles // d.each))
    return Size(*of_x) if d.once else Size(*of_x, *dealt)


def _tile(d: Division, stages: int, chain: bool) -> Tile:
    return Tile(d.last, d.a, d.b, d.together, stages, d.wide, chain)


def _merge(d: Division, chain: bool, pieces: int) -> Tile:
    """Return the tile of a merge: parts and channels that a program takes at a time."""
    parts = min(power_of_two(pieces), PIECES)
    channels = max(1, min(4096 // parts, 16, power_of_two(d.channels)))
    return Tile(d.last, parts, channels, d.together, 1, False, chain)
