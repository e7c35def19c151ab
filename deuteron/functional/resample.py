"""Resampling of images and signals, with the arguments of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C import _get_deterministic_algorithms as must_be_ordered

from deuteron.errors import BindError
from deuteron.functional.autocast import in_float32, widest
from deuteron.functional.context import is_differentiated
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, delegates
from deuteron.functional.operators import from_table, operator
from deuteron.ops.resample import MODES, gradient_faults

RESIZE, GRID_SAMPLE = operator("resize"), operator("grid_sample")
AREA = Function("area", RESIZE.build, RESIZE.schema)  # a pooling, which autocast leaves alone


def _torch_is_wrong(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
) -> bool:
    """Whether torch's gradient is wrong, or is added up in another order at every run although
    deterministic algorithms are demanded."""
    if must_be_ordered() and not mode.startswith("nearest"):
        return True
    return x.ndim == 5 and gradient_faults(x, mode) and is_differentiated(x)


@delegates(F.interpolate, unless=_torch_is_wrong, on_cpu=ANY, passes=25.0)
def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Resize x [N, C, …] to another size, as ``torch.nn.functional.interpolate``. Modes are
    nearest, nearest-exact, linear, bilinear, trilinear, bicubic and area, with ``antialias`` for
    bilinear and bicubic."""
    if mode not in MODES:
        wrong = f"there is no mode {mode!r}"
        raise BindError(wrong, asked="interpolate(…)", remedy=f"use {', '.join(MODES)}")
    dims = x.ndim - 2
    if (size is None) == (scale_factor is None):
        wrong = "one of size and scale_factor is needed, and one only"
        raise BindError(wrong, asked="interpolate(…)", remedy="size=(h, w), or scale_factor=2.0")
    if align_corners is not None and mode in ("nearest", "nearest-exact", "area"):
        asked = f"interpolate(…, {align_corners=})"
        remedy = "leave out align_corners"
        raise BindError(f"corners have no meaning in mode {mode!r}", asked=asked, remedy=remedy)
    if recompute_scale_factor and size is not None:
        wrong = "there is no scale to compute again where a size is given"
        remedy = "leave out recompute_scale_factor, or give scale_factor"
        raise BindError(wrong, asked="interpolate(…)", remedy=remedy)
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
            wrong = f"{len(full)} numbers for {dims} dimensions of x {list(x.shape)}"
            asked = f"interpolate(…, size={size})"
            raise BindError(wrong, asked=asked, remedy=f"give {dims}, or one for all of them")
    if mode == "area" and 0 in full and x.numel() and dims <= 3:
        # an empty result, as torch's: there is no window to take the mean of
        return x.flatten()[:0].reshape(*x.shape[:2], *(max(n, 0) for n in full))
    x = in_float32(x, ("cpu",)) if mode == "area" and dims == 3 else x
    how = {"mode": mode, "align_corners": bool(align_corners), "antialias": antialias}
    return (AREA if mode == "area" else RESIZE).one(x, size=full, **how, scale=scale)


def _torch_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: Any = False,
) -> Tensor:
    return F.grid_sample(x, grid, mode, padding_mode, bool(align_corners))


def _shuffle(name: str, factor: str) -> Callable[..., Tensor]:
    def is_itself(x: Tensor, by: Any = None, **named: Any) -> bool:
        """Whether torch returns x itself: with a factor of 1, or if x is empty."""
        return named.get(factor, by) == 1 or not x.numel()

    return from_table(name, home=F, rename={"factor": factor}, unless=is_itself, on_cpu=ANY)


_rule: Any = {"call": _torch_sample, "on_cpu": ANY, "ordered": False, "autocast": False}
_rule["run"] = lambda x, grid, **how: GRID_SAMPLE(*widest(x, grid), **how)
MADE = {
    "pixel_shuffle": _shuffle("pixel_shuffle", "upscale_factor"),
    "pixel_unshuffle": _shuffle("pixel_unshuffle", "downscale_factor"),
    "grid_sample": from_table("grid_sample", home=F, **_rule),
}
