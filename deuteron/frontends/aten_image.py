"""ATen → ours: pooling, resampling and sampling of images."""

from __future__ import annotations

from typing import Any

from deuteron.frontends.aten_site import Entry, Site
from deuteron.ops.emit import Sym

# ---- pooling ---------------------------------------------------------------------------------


def _pool(op: str, spatial: int, adaptive: bool = False) -> Entry:
    """An adaptive pool takes its size from the result: torch has filled in what was left open."""

    def entry(b: Site, x: Sym, *_: Any) -> Any:
        how = {"size": b.out.shape[-spatial:]} if adaptive else b.window()
        made = b.call(op, b.batched(x, spatial), **how)
        return tuple(map(b.shaped, made)) if isinstance(made, tuple) else b.shaped(made)

    return entry


def _max_pool(op: str, spatial: int, adaptive: bool = False) -> Entry:
    """Two results, of which the second, indices, is made where somebody reads it."""
    plain, both = _pool(op, spatial, adaptive), _pool(f"{op}_with_indices", spatial, adaptive)
    return lambda b, *given: both(b, *given) if 1 in b.used else (plain(b, *given), None)


# ---- resampling ------------------------------------------------------------------------------

# ATen's name → our mode
_UPSAMPLE = {
    **{f"upsample_nearest{n}d": "nearest" for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": "nearest-exact" for n in (1, 2, 3)},
    "upsample_linear1d": "linear",
    "upsample_trilinear3d": "trilinear",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
    "_upsample_bilinear2d_aa": "bilinear",
    "_upsample_bicubic2d_aa": "bicubic",
}


def _upsample(name: str, mode: str) -> Entry:
    def entry(b: Site, x: Sym, *_: Any) -> Any:
        # one argument with all factors, or one for each dimension
        each = [v for k, v in b.given.items() if k.startswith("scale")]
        scales = b.given.get("scale_factors", each)
        given = tuple(s for s in scales or () if s is not None)
        b.need(len(given) in (0, x.rank - 2), "a scale for some dimensions only")
        how = {"align_corners": bool(b.given.get("align_corners")), "scale": given or None}
        return b.resize(x, size=b.out.shape[2:], mode=mode, antialias=name.endswith("_aa"), **how)

    return entry


_GRID_MODES = ("bilinear", "nearest", "bicubic")
_GRID_PADDING = ("zeros", "border", "reflection")


def _grid(b: Site, x: Sym, grid: Sym, mode: int, padding: int, corners: bool) -> Any:
    return b.grid_sample(
        x, grid, mode=_GRID_MODES[mode], padding_mode=_GRID_PADDING[padding], align_corners=corners
    )


_DIMS = (1, 2, 3)
TABLE: dict[str, Entry] = {
    **{f"max_pool{n}d.default": _pool("max_pool", n) for n in _DIMS},
    **{f"max_pool{n}d_with_indices.default": _max_pool("max_pool", n) for n in _DIMS[1:]},
    **{f"avg_pool{n}d.default": _pool("avg_pool", n) for n in _DIMS},
    **{f"adaptive_avg_pool{n}d.default": _pool("adaptive_avg_pool", n, True) for n in _DIMS},
    **{f"_adaptive_avg_pool{n}d.default": _pool("adaptive_avg_pool", n, True) for n in _DIMS[1:]},
    **{f"adaptive_max_pool{n}d.default": _max_pool("adaptive_max_pool", n, True) for n in _DIMS},
    **{f"{name}.default {name}.vec": _upsample(name, mode) for name, mode in _UPSAMPLE.items()},
    "pixel_shuffle.default": lambda b, x, factor: b.pixel_shuffle(x, factor=factor),
    "pixel_unshuffle.default": lambda b, x, factor: b.pixel_unshuffle(x, factor=factor),
    "grid_sampler.default grid_sampler_2d.default grid_sampler_3d.default": _grid,
}
