"""Pooling of equal windows of ``cpu_gemm``: the recipe around ``kernels/cpu/window_pool.py``."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import Kernel, Refusal
from deuteron.engines.cpu_product import one_operator
from deuteron.engines.recipes import place
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType

MOST = 64  # elements of a window: all of them are written out
# operator → what it does with the elements of a window
OPS = {
    "weighted_pool": "weighted",
    "weighted_pool_grad": "weighted",
    "max_pool": "max",
    "avg_pool": "mean",
    "avg_pool_grad": "mean",
}


def _refuse(region: Region, node: Node) -> Refusal | None:
    images, weight = _operands(region, node)
    for t in images:
        if t.rank == 5:
            return Refusal("pools rows and images, not volumes", "pool slice by slice")
        if t.shape[-1] > 1 and t.strides[-1] != 1:
            return Refusal(f"the rows of {t} are not adjacent", "call .contiguous()")
    if not region.graph.types[region.outputs[0]].is_layout("contiguous"):
        return Refusal("the result is in nhwc", "call .contiguous()")
    if weight is not None and not weight.is_layout("contiguous"):
        return Refusal("the weight is not in row-major order", "call .contiguous()")
    elements = prod(_window(region, node))
    if elements > MOST:
        return Refusal(f"a window of {elements} elements", f"up to {MOST} are generated")
    return _uneven(region, node)


def _uneven(region: Region, node: Node) -> Refusal | None:
    """Windows that differ from each other."""
    attrs = node.attrs
    if set(attrs.get("dilation", ())) - {1}:
        return Refusal("the windows have gaps", "pool without dilation")
    shape = (attrs["shape"] if "shape" in attrs else _operands(region, node)[0][-1].shape)[2:]
    sides = zip(shape, _window(region, node), attrs["stride"], attrs["padding"], strict=True)
    if attrs.get("ceil_mode") and any((n + 2 * p - k) % s for n, k, s, p in sides):
        return Refusal("the last windows hang over the end", "use ceil_mode=False")
    counted = attrs.get("count_include_pad", True) or attrs["divisor"] is not None
    if OPS[node.op] == "mean" and not counted and any(attrs["padding"]):
        return Refusal("windows at the border count fewer", "use count_include_pad=True")
    return None


def _operands(region: Region, node: Node) -> tuple[list[TensorType], TensorType | None]:
    """The images that are read, x last if it is one, and the weight."""
    types = [region.graph.types[v] for v in node.uses]
    return (types[:-1], types[-1]) if OPS[node.op] == "weighted" else (types, None)


def _window(region: Region, node: Node) -> tuple[int, ...]:
    """Its sides."""
    images, weight = _operands(region, node)
    if weight is None:
        return tuple(node.attrs["kernel"])
    return weight.shape[weight.rank - (images[-1].rank - 2) :]


def _build(region: Region, node: Node) -> Kernel:
    from deuteron.kernels.cpu.window_pool import Image, Windows, prepare_windows

    types, kind, back = region.graph.types, OPS[node.op], node.op.endswith("grad")
    images, weight = _operands(region, node)
    x, y = (types[node.outputs[0]], images[0]) if back else (images[0], types[node.output])

    def flat(numbers: Any, one: int) -> Any:
        """A row is an image of height 1."""
        *front, last = numbers
        return (*front, last) if x.rank == 4 else (*front, one, last)

    names = dict(zip(node.outputs, ("dx", "dw") if back else ("y",), strict=False))
    window = _window(region, node)
    sides = flat(window, 1), flat(node.attrs["stride"], 1), flat(node.attrs["padding"], 0)
    divisor = node.attrs["divisor"] or prod(window) if kind == "mean" else 1
    makes = frozenset(names[v] for v in region.outputs)
    windows = Windows(*sides, makes, x.dtype.short, kind, float(divisor))
    # x is not looked at where it is not given
    of_x = Image(flat(x.shape, 1), flat(images[-1].strides, 0)[:3])
    of_y = Image(flat(y.shape, 1), flat(y.strides, 0)[:3])
    shared = weight is None or weight.rank < x.rank - 1
    call, each = prepare_windows(windows, of_x, of_y, shared)
    made: dict[str, Word] = {
        names[v]: Argument(len(region.inputs) + i) for i, v in enumerate(region.outputs)
    }
    given = [Argument(place(region, v)) for v in node.uses]
    to = made.get("y", made.get("dx", 0))
    words = call(given[len(images) - 1], given[-1], given[0], to, made.get("dw", 0))
    return Kernel.generated([words], workspace=4 * each * torch.get_num_threads())


WINDOWS = one_operator("windows", OPS, _refuse, _build)
