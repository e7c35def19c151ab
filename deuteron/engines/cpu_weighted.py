"""Pooling of equal windows in ``cpu_gemm``: the recipe around ``kernels/cpu/weighted_pool.py``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.2  # of the arithmetic: planes are copied into frames first
MOST_TAPS = 64  # all of them are written out


OPS = ("weighted_pool", "weighted_pool_grad", "max_pool", "avg_pool", "avg_pool_grad")


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if len(region.nodes) != 1 or region.ops[0] not in OPS:
        return Refusal("is not a pool of equal windows or the gradient of a mean or weighted one")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    images, weight = _operands(region)
    for t in images:
        if t.rank == 5:
            return Refusal("pools rows and images, not volumes", "pool slice by slice")
        if t.shape[-1] > 1 and t.strides[-1] != 1:
            return Refusal(f"the rows of {t} are not adjacent", "call .contiguous()")
    if not region.graph.types[region.outputs[0]].is_layout("contiguous"):
        return Refusal("the result is in nhwc", "call .contiguous()")
    if weight is not None and not weight.is_layout("contiguous"):
        return Refusal("the weight is not in row-major order", "call .contiguous()")
    taps = prod(_window(region))
    if taps > MOST_TAPS:
        return Refusal(f"a window of {taps} taps", f"up to {MOST_TAPS} are generated")
    return _uneven(region)


def _uneven(region: Region) -> Refusal | None:
    """Windows that differ from each other."""
    node, attrs = region.nodes[0], region.nodes[0].attrs
    if set(attrs.get("dilation", ())) - {1}:
        return Refusal("the windows have gaps", "pool without dilation")
    shapes = (attrs["shape"] if "shape" in attrs else _operands(region)[0][-1].shape)[2:]
    sides = zip(shapes, _window(region), attrs["stride"], attrs["padding"], strict=True)
    if attrs.get("ceil_mode") and any((n + 2 * p - k) % s for n, k, s, p in sides):
        return Refusal("the last windows hang over the end", "use ceil_mode=False")
    counted = attrs.get("count_include_pad", True) or attrs["divisor"] is not None
    if node.op.startswith("avg") and not counted and any(attrs["padding"]):
        return Refusal("windows at the border count fewer", "use count_include_pad=True")
    return None


def _operands(region: Region) -> tuple[list[TensorType], TensorType | None]:
    """The images that are read, x last if it is one, and the weight."""
    types = [region.graph.types[v] for v in region.nodes[0].uses]
    return (types[:-1], types[-1]) if region.ops[0].startswith("weighted") else (types, None)


def _window(region: Region) -> tuple[int, ...]:
    """Its sides."""
    images, weight = _operands(region)
    if weight is None:
        kernel: tuple[int, ...] = region.nodes[0].attrs["kernel"]
        return kernel
    return weight.shape[weight.rank - (images[-1].rank - 2) :]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.weighted_pool import Form, Sizes, prepare_weighted

    node, types = region.nodes[0], region.graph.types
    images, weight = _operands(region)
    back = node.op.endswith("grad")
    x, y = (types[node.outputs[0]], images[0]) if back else (images[0], types[node.output])
    names = dict(zip(node.outputs, ("dx", "dw") if back else ("y",), strict=False))
    window = _window(region)
    kind = {"max_pool": "max", "avg_pool": "mean", "avg_pool_grad": "mean"}.get(node.op, "weighted")
    divisor = node.attrs["divisor"] or prod(window) if kind == "mean" else 1
    form = Form(
        _two(window),
        _two(node.attrs["stride"]),
        _two(node.attrs["padding"], 0),
        frozenset(names[v] for v in region.outputs),
        x.dtype.short,
        kind,
        float(divisor),
    )
    sizes = Sizes(x.shape[0], x.shape[1], _two(x.shape[2:]), _two(y.shape[2:]))
    shared = weight is None or weight.rank < x.rank - 1
    steps = [_steps(t) for t in (images[-1], y)]  # x is not looked at where it is not given
    call, each = prepare_weighted(form, sizes, shared, *steps)
    made: dict[str, Word] = {
        names[v]: Argument(len(region.inputs) + i) for i, v in enumerate(region.outputs)
    }
    given = [Argument(place(region, v)) for v in node.uses]
    source, taps = given[len(images) - 1], given[-1]
    to = made.get("y", made.get("dx", 0))
    words = call(source, taps, given[0], to, made.get("dw", 0))
    return Kernel.generated([words], workspace=4 * each * torch.get_num_threads())


def _two(numbers: Sequence[int], first: int = 1) -> tuple[int, int]:
    """One for rows and one for columns: a row is an image of a single one."""
    return (first, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _steps(t: TensorType) -> tuple[int, int, int]:
    """From image to image, channel to channel and row to row."""
    return t.strides[0], t.strides[1], t.strides[2] if t.rank == 4 else 0


WEIGHTED = generated("windows", _refuse, one_way, _seconds, _build)
