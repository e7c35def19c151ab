"""Change of layout of ``cpu_gemm``: the recipe around ``kernels/cpu/to_layout.py``."""

from __future__ import annotations

import math

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import WOVEN
from deuteron.policy import Policy
from deuteron.target import Target

BLOCKS = 1.6  # times the memory's own time where blocks are turned: lines are touched out of order


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if region.ops != ("to_layout",):
        return Refusal("is not a to_layout alone")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    if {t.layout for t in _ends(region)} != {"contiguous", "nhwc"}:
        return Refusal("moves between row-major order and nhwc only", "make it contiguous first")
    return None


def _ends(region: Region) -> tuple[TensorType, TensorType]:
    types = region.graph.types
    return types[region.inputs[0]], types[region.outputs[0]]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, y = _ends(region)
    woven = y.layout == "nhwc" and x.shape[1] <= WOVEN
    return roof(region, target, 0.0) * (1.0 if woven else BLOCKS)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.to_layout import prepare_to_layout

    x, y = _ends(region)
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    rows, columns = (channels, pixels) if y.layout == "nhwc" else (pixels, channels)
    call = prepare_to_layout(x.shape[0], rows, columns, x.dtype.bits)
    return Kernel.generated([call(Argument(0), Argument(1))])


TO_LAYOUT = generated("to_layout", _refuse, one_way, _seconds, _build, ("to_layout",))
