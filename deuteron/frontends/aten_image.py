"""ATen → ours: pooling, resampling and sampling of images."""

from __future__ import annotations

from typing import Any

from deuteron.frontends.aten_site import Entry, Site
from deuteron.ops.emit import Sym

# ---- pooling ---------------------------------------------------------------------------------


def _max_pool(spatial: int) -> Entry:
    def entry(
        b: Site, x: Sym, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
    ) -> Any:
        x = b.batched(x, spatial)
        y = b.max_pool(
            x,
            kernel=kernel,
            stride=stride or None,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil,
        )
        return b.shaped(y)

    return entry


def _max_pool_indices(spatial: int) -> Entry:
    plain = _max_pool(spatial)

    def entry(
        b: Site, x: Sym, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
    ) -> Any:
        if 1 not in b.used:
            return plain(b, x, kernel, stride, padding, dilation, ceil), None
        x = b.batched(x, spatial)
        found = b.max_pool_with_indices(
            x,
            kernel=kernel,
            stride=stride or None,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil,
        )
        return tuple(b.shaped(t) for t in found)

    return entry


def _avg_pool(spatial: int) -> Entry:
    def entry(
        b: Site,
        x: Sym,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil: bool,
        include: bool,
        divisor: int | None = None,
    ) -> Any:
        x = b.batched(x, spatial)
        y = b.avg_pool(
            x,
            kernel=kernel,
            stride=stride or None,
            padding=padding,
            ceil_mode=ceil,
            count_include_pad=include,
            divisor=divisor,
        )
        return b.shaped(y)

    return entry


def _adaptive(op: str, spatial: int) -> Entry:
    """The size comes from the result: torch has filled in what was left open."""

    def entry(b: Site, x: Sym, size: Any) -> Any:
        x = b.batched(x, spatial)
        return b.shaped(b.call(op, x, size=b.out.shape[-spatial:]))

    return entry


def _adaptive_max(spatial: int) -> Entry:
    plain = _adaptive("adaptive_max_pool", spatial)

    def entry(b: Site, x: Sym, size: Any) -> Any:
        if 1 not in b.used:
            return plain(b, x, size), None
        x = b.batched(x, spatial)
        found = b.adaptive_max_pool_with_indices(x, size=b.out.shape[-spatial:])
        return tuple(b.shaped(t) for t in found)

    return entry


# ---- resampling ------------------------------------------------------------------------------

# ATen's name → our mode, and whether the call says how corners are aligned.
_UPSAMPLE: dict[str, tuple[str, bool]] = {
    **{f"upsample_nearest{n}d": ("nearest", False) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": ("nearest-exact", False) for n in (1, 2, 3)},
    "upsample_linear1d": ("linear", True),
    "upsample_bilinear2d": ("bilinear", True),
    "upsample_trilinear3d": ("trilinear", True),
    "upsample_bicubic2d": ("bicubic", True),
    "_upsample_bilinear2d_aa": ("bilinear", True),
    "_upsample_bicubic2d_aa": ("bicubic", True),
}


def _upsample(name: str, mode: str, has_corners: bool) -> Entry:
    def entry(b: Site, x: Sym, size: Any, *rest: Any) -> Any:
        corners = bool(rest[0]) if has_corners else False
        scales = rest[has_corners:]
        if len(scales) == 1 and isinstance(scales[0], list | tuple):  # the .vec overload
            scales = tuple(scales[0])
        given = [s for s in scales if s is not None]
        b.need(len(given) in (0, x.rank - 2), "a scale for some dimensions only")
        return b.resize(
            x,
            size=b.out.shape[2:],
            mode=mode,
            align_corners=corners,
            antialias=name.endswith("_aa"),
            scale=tuple(given) or None,
        )

    return entry


_GRID_MODES = ("bilinear", "nearest", "bicubic")
_GRID_PADDING = ("zeros", "border", "reflection")


def _grid(b: Site, x: Sym, grid: Sym, mode: int, padding: int, corners: bool) -> Any:
    return b.grid_sample(
        x, grid, mode=_GRID_MODES[mode], padding_mode=_GRID_PADDING[padding], align_corners=corners
    )


TABLE: dict[str, Entry] = {
    **{f"max_pool{n}d.default": _max_pool(n) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices.default": _max_pool_indices(n) for n in (2, 3)},
    **{f"avg_pool{n}d.default": _avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d.default": _adaptive("adaptive_avg_pool", n) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d.default": _adaptive("adaptive_avg_pool", n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d.default": _adaptive_max(n) for n in (1, 2, 3)},
    **{
        f"{name}.{overload}": _upsample(name, mode, corners)
        for name, (mode, corners) in _UPSAMPLE.items()
        for overload in ("default", "vec")
    },
    "pixel_shuffle.default": lambda b, x, factor: b.pixel_shuffle(x, factor=factor),
    "pixel_unshuffle.default": lambda b, x, factor: b.pixel_unshuffle(x, factor=factor),
    "grid_sampler.default": _grid,
    "grid_sampler_2d.default": _grid,
    "grid_sampler_3d.default": _grid,
}
