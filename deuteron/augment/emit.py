"""A pipeline as nodes of a graph: one grid_sample, and arithmetic that fuses around it.

This graph defines what a pipeline computes. The CPU runs its plan, the gradient is the gradient of
these nodes on every device, and the GPU's kernel computes the same from the same formulas: those of
the colours, and those here for what comes before and after them.
"""

from typing import Any

import torch

from deuteron.augment.colours import WIDTH, Pixel, grey
from deuteron.augment.spec import MATRIX, Spec
from deuteron.errors import GraphError
from deuteron.ir import TensorType
from deuteron.ir import dtype as element_type
from deuteron.ops import Ops, Sym


def begun(b: Any, x: Any, given: torch.dtype) -> Any:
    """A channel as a number from 0 to 1."""
    return x * (1 / 255) if given == torch.uint8 else x


def finished(b: Any, x: Any, normal: tuple[Any, Any] | None, result: torch.dtype) -> Any:
    """A channel as it is stored: normalised by a scale and a shift, and rounded for uint8."""
    x = x if normal is None else x * normal[0] + normal[1]
    return b.clamp(b.round(x * 255.0), min=0.0, max=255.0) if result == torch.uint8 else x


def emit(g: Ops, spec: Spec, x: Sym, table: Sym) -> Sym:
    """Add the nodes for images ``x`` [N, C, H, W] and a table [N, columns] of parameters."""
    given = x.dtype.torch
    spec.check_image(x.shape, given)
    compute = element_type(spec.compute_dtype(given))
    expected = (x.shape[0], spec.columns)
    if (table.shape, table.dtype) != (expected, compute):
        wrong = f"the table of parameters is {table.type}, not {compute.short}{list(expected)}"
        remedy = "leave the table out: emit declares it; fill it from pipeline.table(…)"
        raise GraphError(wrong, asked="emit", remedy=remedy)
    nhwc = x.type.is_layout("nhwc") and not x.type.is_layout("contiguous")
    values = g.to(x, compute)
    if spec.geometric:
        mode, outside = spec.interpolation, spec.padding
        at = _places(g, spec, x.shape, table)
        values = g.grid_sample(values, at, mode=mode, padding_mode=outside, align_corners=False)
    values = begun(g, values, given)
    return finish(g, spec, values, table, spec.result_dtype(given), nhwc)


def finish(g: Ops, spec: Spec, values: Sym, table: Sym, result: torch.dtype, nhwc: bool) -> Sym:
    """Add what comes after the gather: colours, Normalize, element type and memory order."""
    channels, kind = values.shape[1], values.dtype.torch
    if spec.colours:
        slices = (g.one("slice", values, axis=1, start=c, stop=c + 1) for c in range(channels))
        planes: Pixel = tuple(slices)
        for position, (_, step) in enumerate(spec.colours):
            first, mean = MATRIX + WIDTH * position, None
            if step.needs_mean:
                mean = g.mean(grey(planes), axes=(1, 2, 3), keepdim=True)
            numbers = [_columns(g, table, first + i, first + i + 1) for i in range(step.draws)]
            planes = step.formula(g, planes, mean, *numbers)
        values = g.one("concat", planes, axis=1)
    normal = spec.scale_and_shift(channels, kind)
    scale_and_shift = None
    if normal is not None:
        scale, shift = normal.reshape(2, 1, channels, 1, 1)
        scale_and_shift = g.constant(scale, "scale"), g.constant(shift, "shift")
    values = finished(g, values, scale_and_shift, result)
    values, layout = g.to(values, element_type(result)), spec.layout(nhwc)
    wanted = TensorType.of(values.shape, values.dtype, layout)
    return values if values.type == wanted else g.one("to_layout", values, layout=layout)


def _places(g: Ops, spec: Spec, shape: tuple[int, ...], table: Sym) -> Sym:
    """[N, h, w, 2]: where each pixel of the result lies in the image, from −1 to 1."""
    height, width = spec.result_size((shape[2], shape[3]))
    kind = table.dtype.torch
    across = g.constant(_centres(width, kind).reshape(1, 1, width, 1), "across")
    down = g.constant(_centres(height, kind).reshape(1, height, 1, 1), "down")

    def rows(first: int, last: int) -> Sym:
        a, b, c = (_columns(g, table, k + first, k + last) for k in (0, 3, 6))
        return a * across + b * down + c

    places = rows(0, 2)
    return places / rows(2, 3) if spec.projective else places


def _centres(count: int, kind: torch.dtype) -> torch.Tensor:
    return ((2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1).to(kind)


def _columns(g: Ops, table: Sym, first: int, last: int) -> Sym:
    """[N, 1, 1, columns]"""
    some = g.one("slice", table, axis=1, start=first, stop=last)
    return g.one("reshape", some, shape=(table.shape[0], 1, 1, last - first))
