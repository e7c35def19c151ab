"""Resampling of images and signals, with the arguments of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import _get_deterministic_algorithms as must_be_ordered
from torch._C import _nn

from deuteron.errors import BindError
from deuteron.functional.autocast import Cast, in_float32, widest
from deuteron.functional.core import Function
from deuteron.functional.library import ANY, delegates, is_differentiated
from deuteron.functional.operators import one
from deuteron.functional.wrapper import Plain
from deuteron.ops import Ops, Sym
from deuteron.ops.resample import gradient_faults

Tensor = torch.Tensor
MODES = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic", "area")


def _resize(
    b: Ops,
    x: Sym,
    *,
    size: tuple[int, ...],
    scale: tuple[float, ...] | None,
    mode: str,
    align_corners: bool,
    antialias: bool,
) -> Sym:
    return b.one(
        "resize",
        x,
        size=size,
        scale=scale,
        mode=mode,
        align_corners=align_corners,
        antialias=antialias,
    )


RESIZE = Cast("interpolate", _resize)
AREA = Function("area", _resize)  # a pooling, which autocast leaves alone


# torch's functions by mode, rank and antialias: those that know no corners, those that do, means
_NEAREST: dict[tuple[str, int, bool], Callable[..., Tensor]] = {
    ("nearest", 3, False): _nn.upsample_nearest1d,
    ("nearest", 4, False): _nn.upsample_nearest2d,
    ("nearest", 5, False): _nn.upsample_nearest3d,
    ("nearest-exact", 3, False): _nn._upsample_nearest_exact1d,
    ("nearest-exact", 4, False): _nn._upsample_nearest_exact2d,
    ("nearest-exact", 5, False): _nn._upsample_nearest_exact3d,
}
_LINEAR: dict[tuple[str, int, bool], Callable[..., Tensor]] = {
    ("linear", 3, False): _nn.upsample_linear1d,
    ("bilinear", 4, False): _nn.upsample_bilinear2d,
    ("trilinear", 5, False): _nn.upsample_trilinear3d,
    ("bicubic", 4, False): _nn.upsample_bicubic2d,
    ("bilinear", 4, True): _nn._upsample_bilinear2d_aa,
    ("bicubic", 4, True): _nn._upsample_bicubic2d_aa,
}

_AREA: dict[tuple[str, int, bool], Callable[..., Tensor]] = {
    ("area", 3, False): torch.adaptive_avg_pool1d,
    ("area", 4, False): _nn.adaptive_avg_pool2d,
    ("area", 5, False): _nn.adaptive_avg_pool3d,
}


def _torch_interpolate(
    x: Tensor,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    antialias: bool,
) -> Any:
    """What ``torch.nn.functional.interpolate`` calls after many questions, if it is plain."""
    rank = x.ndim
    if rank == 5 and gradient_faults(x, mode) and is_differentiated(x):
        return NotImplemented
    kind = mode, rank, antialias
    given = size if scale_factor is None else scale_factor
    if isinstance(given, (int, float)):
        given = (given,) * (rank - 2)
    full, by = (given, None) if scale_factor is None else (None, given)
    plain = not recompute_scale_factor and (size is None) != (scale_factor is None)
    if plain and align_corners is None and kind in _NEAREST:
        return _NEAREST[kind](x, full, by)
    if must_be_ordered():  # the gradients of the others are added up in any order
        return NotImplemented
    if plain and kind in _LINEAR:
        return _LINEAR[kind](x, full, bool(align_corners), by)
    if plain and by is None and align_corners is None and kind in _AREA:
        return _AREA[kind](x, full)
    return F.interpolate(
        x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    )


@delegates(_torch_interpolate, on_cpu=ANY)
def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """x [N, C, …] at another size, as ``torch.nn.functional.interpolate``: modes nearest,
    nearest-exact, linear, bilinear, trilinear, bicubic and area, with ``antialias`` for bilinear
    and bicubic."""
    if mode not in MODES:
        raise BindError(
            f"there is no mode {mode!r}", asked="interpolate(…)", remedy=f"use {', '.join(MODES)}"
        )
    dims = x.ndim - 2
    if (size is None) == (scale_factor is None):
        raise BindError(
            "one of size and scale_factor is needed, and one only",
            asked="interpolate(…)",
            remedy="size=(h, w), or scale_factor=2.0",
        )
    if align_corners is not None and mode in ("nearest", "nearest-exact", "area"):
        raise BindError(
            f"corners have no meaning in mode {mode!r}",
            asked=f"interpolate(…, {align_corners=})",
            remedy="leave out align_corners",
        )
    if recompute_scale_factor and size is not None:
        raise BindError(
            "there is no scale to compute again where a size is given",
            asked="interpolate(…)",
            remedy="leave out recompute_scale_factor, or give scale_factor",
        )
    scale: tuple[float, ...] | None = None
    if scale_factor is not None:
        factors = scale_factor if isinstance(scale_factor, Sequence) else (scale_factor,) * dims
        full = tuple(int(n * f) for n, f in zip(x.shape[2:], factors, strict=True))
        if not recompute_scale_factor and mode != "area":
            scale = tuple(map(float, factors))
    else:
        assert size is not None
        full = tuple(size) if isinstance(size, Sequence) else (size,) * dims
        if len(full) != dims:
            raise BindError(
                f"{len(full)} numbers for {dims} dimensions of x {list(x.shape)}",
                asked=f"interpolate(…, size={size})",
                remedy=f"give {dims}, or one for all of them",
            )
    if mode == "area" and 0 in full and x.numel() and dims <= 3:
        # means of no window at all, as torch has them
        return x.flatten()[:0].reshape(*x.shape[:2], *(max(n, 0) for n in full))
    if mode == "area" and dims == 3:
        x = in_float32(x, ("cpu",))
    return (AREA if mode == "area" else RESIZE).one(
        x, size=full, scale=scale, mode=mode, align_corners=bool(align_corners), antialias=antialias
    )


def _torch_grid_sample(
    x: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool | None
) -> Any:
    if mode not in _SAMPLINGS or padding_mode not in _PADDINGS:
        return NotImplemented
    return torch.grid_sampler(
        x, grid, _SAMPLINGS[mode], _PADDINGS[padding_mode], bool(align_corners)
    )


_SAMPLINGS = {"bilinear": 0, "nearest": 1, "bicubic": 2}  # torch's numbers for them
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}


def _torch_shuffle(call: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Any]:
    """With a factor of 1 torch answers with x itself, and so it does of nothing."""
    return lambda x, factor: call(x, factor) if factor != 1 and x.numel() else NotImplemented


@delegates(
    _torch_grid_sample,
    plain=Plain(torch.grid_sampler, "plain(x, grid, 0, 0, False)"),
    ordered=False,
    on_cpu=ANY,
)
def grid_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = False,
) -> Tensor:
    """x at the places that ``grid`` names, as ``torch.nn.functional.grid_sample``, with gradients
    for both."""
    x, grid = widest(x, grid)
    return one(
        "grid_sample",
        x,
        grid,
        mode=mode,
        padding_mode=padding_mode,
        align_corners=bool(align_corners),
    )


@delegates(
    _torch_shuffle(torch.pixel_shuffle),
    plain=Plain(
        torch.pixel_shuffle, "plain(x, upscale_factor)", where="upscale_factor != 1 and nbytes"
    ),
    keeps_type=True,
    on_cpu=ANY,
)
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """[…, C·r², H, W] to […, C, H·r, W·r] with r = ``upscale_factor``, as
    ``torch.nn.functional.pixel_shuffle``."""
    return one("pixel_shuffle", x, factor=index(upscale_factor))


@delegates(
    _torch_shuffle(torch.pixel_unshuffle),
    plain=Plain(
        torch.pixel_unshuffle,
        "plain(x, downscale_factor)",
        where="downscale_factor != 1 and nbytes",
    ),
    keeps_type=True,
    on_cpu=ANY,
)
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """[…, C, H·r, W·r] to […, C·r², H, W] with r = ``downscale_factor``, as
    ``torch.nn.functional.pixel_unshuffle``."""
    return one("pixel_unshuffle", x, factor=index(downscale_factor))
