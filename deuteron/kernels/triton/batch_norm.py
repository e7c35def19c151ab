"""Batch normalisation for training on a GPU: which kernels are launched, and with what.

The kernels, their equations and their bytes are in ``batch_norm_passes.py``; how x is cut into
tiles is in ``batch_norm_tiles.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from deuteron.kernels.triton import batch_norm_passes as passes
from deuteron.kernels.triton.batch_norm_tiles import Division, merge_tile
from deuteron.kernels.triton.launch import Launchable, chained

forward_once, backward_once = Launchable(passes.forward_once), Launchable(passes.backward_once)
forward_statistics = Launchable(passes.forward_statistics)
forward_merge = Launchable(passes.forward_merge, follows=True)
forward_apply = Launchable(passes.forward_apply, follows=True)
backward_sums = Launchable(passes.backward_sums)
backward_merge = Launchable(passes.backward_merge, follows=True)
backward_apply = Launchable(passes.backward_apply, follows=True)

Maybe = torch.Tensor | None


def forward(
    d: Division,
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    residual: Maybe,
    y: torch.Tensor,
    new_mean: Maybe,
    new_var: Maybe,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    signs: Maybe,
    *,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
) -> None:
    """Fill y and the statistics. Tensors of the size of x lie in one memory order."""
    share = 1.0 if running_mean is None else momentum
    unbiased = d.count / (d.count - 1)
    learned = (running_mean, running_var, new_mean, new_var, mean, rstd)
    size = (d.rows, d.tiles, d.channels, d.units)
    if d.once:
        forward_once(
            (d.blocks,),
            x,
            residual,
            y,
            signs,
            weight,
            bias,
            *learned,
            share,
            unbiased,
            eps,
            slope,
            *size,
            ACT=activation,
            **d.constants,
            warps=d.warps,
        )
        return
    pieces, channels = d.pieces, d.channels
    scratch = torch.empty(d.workspace // 4, dtype=torch.float32, device=x.device)
    counts = scratch[2 * pieces * channels :]
    chain = chained(x.device)
    first, second = _more(d, d.deep, chain), _more(d, d.stages, chain)
    forward_statistics(
        (d.splits * d.blocks,),
        x,
        scratch,
        counts,
        d.blocks,
        d.splits,
        *size,
        d.across,
        **d.constants,
        **first,
    )
    p, b = merge_tile(d)
    forward_merge(
        (-(-channels // b),),
        x,
        scratch,
        counts,
        *learned,
        float(d.count),
        share,
        unbiased,
        eps,
        pieces,
        d.rows,
        channels,
        d.units,
        LAST=d.last,
        V=d.constants["V"],
        P=p,
        B=b,
        CHAIN=chain,
    )
    groups = -(-d.tiles // d.each)
    forward_apply(
        (groups * d.blocks,),
        x,
        residual,
        y,
        signs,
        weight,
        bias,
        mean,
        rstd,
        slope,
        d.blocks,
        groups - 1,
        d.each,
        *size,
        d.across,
        ACT=activation,
        **d.constants,
        **second,
    )


def _more(d: Division, stages: int, chain: bool) -> dict[str, Any]:
    return {"STAGES": stages, "WIDE": d.wide, "CHAIN": chain, "warps": d.warps, "stages": stages}


def backward(
    d: Division,
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    y: Maybe,
    residual: Maybe,
    signs: Maybe,
    dx: Maybe,
    dweight: Maybe,
    dbias: Maybe,
    dz: Maybe,
    *,
    activation: str,
    slope: float,
) -> None:
    """Fill the gradients that are not None."""
    size = (d.rows, d.tiles, d.channels, d.units)
    part = 1.0 / d.count
    read = (grad, x, y, residual, signs)
    activation = activation if signs is None else "none"  # they tell all that is to know of it
    if d.once:
        backward_once(
            (d.blocks,),
            *read,
            dz,
            dx,
            weight,
            bias,
            mean,
            rstd,
            dweight,
            dbias,
            part,
            slope,
            *size,
            ACT=activation,
            **d.constants,
            warps=d.warps,
        )
        return
    pieces, channels = d.pieces, d.channels
    scratch = torch.empty(2 * (pieces + 1) * channels, dtype=torch.float32, device=x.device)
    means = scratch[2 * pieces * channels :]
    chain = chained(x.device)
    first, second = _more(d, d.deep, chain), _more(d, d.stages, chain)
    backward_sums(
        (d.splits * d.blocks,),
        *read,
        dz,
        weight,
        bias,
        mean,
        rstd,
        scratch,
        slope,
        d.blocks,
        d.splits,
        *size,
        d.across,
        ACT=activation,
        **d.constants,
        **first,
    )
    p, b = merge_tile(d)
    backward_merge(
        (-(-channels // b),),
        scratch,
        rstd,
        dweight,
        dbias,
        means,
        part,
        pieces,
        channels,
        P=p,
        B=b,
        CHAIN=chain,
    )
    if dx is None:
        return
    if dz is not None:
        read = (None, x, None, None, None)
    groups = -(-d.tiles // d.each)
    backward_apply(
        (groups * d.blocks,),
        *read,
        dz,
        dx,
        weight,
        bias,
        mean,
        rstd,
        means,
        slope,
        d.blocks,
        groups - 1,
        d.each,
        *size,
        d.across,
        ACT=activation,
        **d.constants,
        **second,
    )
