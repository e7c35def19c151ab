"""Resampling of images and signals, with the arguments of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C import _get_deterministic_algorithms as must_be_ordered

from deuteron.errors import BindError
from deuteron.functional.autocast import Cast, in_float32, widest
from deuteron.functional.context import is_differentiated
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, delegates
from deuteron.functional.operators import from_table, operator
from deuteron.ops import Ops, Sym
from deuteron.ops.resample import gradient_faults

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
GRID_SAMPLE = operator("grid_sample")


def _torch_is_wrong(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
) -> bool:
    """Or adds up the gradient in another order at every run, where that is forbidden."""
    if must_be_ordered() and not mode.startswith("nearest"):
        return True
    return x.ndim == 5 and gradient_faults(x, mode) and is_differentiated(x)


@delegates(F.interpolate, unless=_torch_is_wrong, on_cpu=ANY)
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
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = False,
) -> Tensor:
    return F.grid_sample(x, grid, mode, padding_mode, bool(align_corners))


@delegates(_torch_grid_sample, on_cpu=ANY, ordered=False)
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
    how = {"mode": mode, "padding_mode": padding_mode, "align_corners": bool(align_corners)}
    return GRID_SAMPLE.one(x, grid, **how)


def _shuffle(name: str, factor: str) -> Callable[..., Tensor]:
    def is_itself(x: Tensor, by: int | None = None, **given: int) -> bool:
        """With a factor of 1 torch answers with x itself, and so it does of nothing."""
        return given.get(factor, by) == 1 or not x.numel()

    function = from_table(
        name,
        rename={"factor": factor},
        see=f"r is ``{factor}``. As ``torch.nn.functional.{name}``.",
    )
    handed = delegates(getattr(F, name), unless=is_itself, on_cpu=ANY, autocast=True)
    return handed(function)


pixel_shuffle = _shuffle("pixel_shuffle", "upscale_factor")
pixel_unshuffle = _shuffle("pixel_unshuffle", "downscale_factor")
