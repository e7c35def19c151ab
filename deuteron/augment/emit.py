"""A pipeline as nodes of a graph: one grid_sample, and arithmetic that fuses around it.

This is the description that everything else is held to. The CPU runs it as it is planned, the
gradient is the gradient of these nodes on every device, and the GPU's kernel computes the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deuteron.augment.colours import WIDTH
from deuteron.augment.recipe import MATRIX, Recipe, torch_type
from deuteron.errors import GraphError
from deuteron.ir import TensorType
from deuteron.ir import dtype as element_type
from deuteron.ops import Ops, Sym

GREY = (0.2989, 0.587, 0.114)  # how bright the eye finds red, green and blue

Planes = list[Sym]  # [N, 1, h, w], one per channel
Column = Callable[[int], Sym]  # the numbers of a colour step, [N, 1, 1, 1] each


def emit(g: Ops, recipe: Recipe, x: Sym, table: Sym) -> Sym:
    """The nodes for images ``x`` [N, C, H, W] and a table [N, columns] of parameters."""
    given = torch_type(x.dtype)
    recipe.check_image(x.shape, given)
    compute = element_type(recipe.compute_dtype(given))
    expected = (x.shape[0], recipe.columns)
    if (table.shape, table.dtype) != (expected, compute):
        raise GraphError(
            f"the table of parameters is {table.type}, not {compute.short}{list(expected)}",
            asked="emit",
            remedy="declare it with pipeline.table_type(x.type), fill it from pipeline.table(…)",
        )
    nhwc = x.type.is_layout("nhwc") and not x.type.is_layout("contiguous")
    values = g.to(x, compute)
    if recipe.geometric:
        places = _places(g, recipe, x.shape, table)
        values = g.grid_sample(
            values,
            places,
            mode=recipe.interpolation,
            padding_mode=recipe.padding,
            align_corners=False,
        )
    if given == torch.uint8:
        values = values * (1 / 255)
    return finish(g, recipe, values, table, recipe.result_dtype(given), nhwc)


def finish(g: Ops, recipe: Recipe, values: Sym, table: Sym, result: torch.dtype, nhwc: bool) -> Sym:
    """What comes after the gather: colours, Normalize, the element type and the memory order."""
    if recipe.colours:
        values = _coloured(g, recipe, values, table)
    if recipe.normalize:
        values = _normalized(g, recipe, values)
    if result == torch.uint8:
        values = g.clamp(g.round(values * 255.0), min=0.0, max=255.0)
    values, layout = g.to(values, element_type(result)), recipe.layout(nhwc)
    wanted = TensorType.of(values.shape, values.dtype, layout)
    return values if values.type == wanted else g.one("to_layout", values, layout=layout)


def _places(g: Ops, recipe: Recipe, shape: tuple[int, ...], table: Sym) -> Sym:
    """[N, h, w, 2]: where each pixel of the result lies in the image, from −1 to 1."""
    height, width = recipe.result_size((shape[2], shape[3]))
    kind = torch_type(table.dtype)
    across = g.constant(_centres(width, kind).reshape(1, 1, width, 1), "across")
    down = g.constant(_centres(height, kind).reshape(1, height, 1, 1), "down")

    def rows(first: int, last: int) -> Sym:
        a, b, c = (_columns(g, table, k + first, k + last) for k in (0, 3, 6))
        return a * across + b * down + c

    places = rows(0, 2)
    return places / rows(2, 3) if recipe.projective else places


def _centres(count: int, kind: torch.dtype) -> torch.Tensor:
    return ((2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1).to(kind)


def _columns(g: Ops, table: Sym, first: int, last: int) -> Sym:
    """[N, 1, 1, columns]"""
    some = g.one("slice", table, axis=1, start=first, stop=last)
    return g.one("reshape", some, shape=(table.shape[0], 1, 1, last - first))


def _normalized(g: Ops, recipe: Recipe, values: Sym) -> Sym:
    channels, kind = values.shape[1], torch_type(values.dtype)
    scale, shift = (
        g.constant(torch.tensor(v, dtype=torch.float64).to(kind).reshape(1, channels, 1, 1), name)
        for v, name in zip(recipe.scale_and_shift(channels), ("scale", "shift"), strict=True)
    )
    return values * scale + shift


# ---- colours ---------------------------------------------------------------------------------


def _coloured(g: Ops, recipe: Recipe, values: Sym, table: Sym) -> Sym:
    planes: Planes = [
        g.one("slice", values, axis=1, start=c, stop=c + 1) for c in range(values.shape[1])
    ]
    for position, kind in enumerate(recipe.kinds):
        first = MATRIX + WIDTH * position

        def column(i: int, first: int = first) -> Sym:
            return _columns(g, table, first + i, first + i + 1)

        planes = COLOURS[kind](g, planes, column)
    return g.one("concat", planes, axis=1)


def _unit(g: Ops, x: Sym) -> Sym:
    return g.one("clamp", x, min=0.0, max=1.0)


def _grey(planes: Planes) -> Sym:
    if len(planes) == 1:
        return planes[0]
    r, green, b = planes
    return r * GREY[0] + green * GREY[1] + b * GREY[2]


def _brightness(g: Ops, planes: Planes, column: Column) -> Planes:
    return [_unit(g, x * column(0)) for x in planes]


def _contrast(g: Ops, planes: Planes, column: Column) -> Planes:
    mean = g.one("mean", _grey(planes), axes=(1, 2, 3), keepdim=True)
    return [_unit(g, (x - mean) * column(0) + mean) for x in planes]


def _saturation(g: Ops, planes: Planes, column: Column) -> Planes:
    return [_unit(g, x) for x in _greyed(g, planes, column)]


def _greyed(g: Ops, planes: Planes, column: Column) -> Planes:
    factor, grey = column(0), _grey(planes)
    return [x * factor + (1.0 - factor) * grey for x in planes]


def _hue_and_range(g: Ops, planes: Planes) -> tuple[Sym, Sym, Sym]:
    """Hue in sixths of the circle, the largest channel, and its distance from the smallest."""
    r, green, b = planes
    top = g.one("maximum", g.one("maximum", r, green), b)
    spread = top - g.one("minimum", g.one("minimum", r, green), b)
    whole = g.one("where", g.one("eq", spread, 0.0), 1.0, spread)
    hue = g.one(
        "where",
        g.one("eq", top, r),
        (green - b) / whole,
        g.one("where", g.one("eq", top, green), (b - r) / whole + 2.0, (r - green) / whole + 4.0),
    )
    return hue, top, spread


def _from_hue(g: Ops, hue: Sym, top: Sym, spread: Sym) -> Planes:
    """Each channel falls below the largest by a trapezoid of the hue, a third of a turn apart."""

    def channel(offset: float) -> Sym:
        at = hue + offset
        at = at - g.one("floor", at * (1 / 6)) * 6.0
        return top - spread * _unit(g, g.one("minimum", at, 4.0 - at))

    return [channel(offset) for offset in (5.0, 3.0, 1.0)]


def _hue(g: Ops, planes: Planes, column: Column) -> Planes:
    hue, top, spread = _hue_and_range(g, planes)
    return _from_hue(g, hue + column(0) * 6.0, top, spread)


def _hsv(g: Ops, planes: Planes, column: Column) -> Planes:
    hue, top, spread = _hue_and_range(g, planes)
    saturation = spread / g.one("where", g.one("eq", top, 0.0), 1.0, top)
    value = _unit(g, top * column(2))
    spread = _unit(g, saturation * column(1)) * value
    return _from_hue(g, hue + column(0) * 6.0, value, spread)


COLOURS: dict[str, Callable[[Ops, Planes, Column], Planes]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "hue": _hue,
    "hsv": _hsv,
    "grey": _greyed,
}
