"""Convolutions of bytes on the CPU: the recipe around ``kernels/cpu/conv_quantized.py``."""

from typing import Any

import torch

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu.int8_matmul import TOGETHER, instruction, refuse_without_instruction
from deuteron.engines.cpu.product import BUILD_S, MOST, image, roof
from deuteron.engines.match import only_node, operands
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.engines.roofline import region_cost
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops.conv import sides
from deuteron.policy import Policy
from deuteron.target import Target

OP = "conv_quantized"
DEPTHWISE = 0.2  # part of the rate of torch's largest products that depthwise kernels reach


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    node, types = only_node(region, {OP: None}), region.graph.types
    refuse_without_instruction()
    values = operands(node)
    kinds = {types[v].dtype.short for v in (values["x"], node.output)}
    odd = not kinds <= {"u8", "i8", "f32"}
    refuse_if(odd, "multiplies whole numbers, not floats of 8 bits", quiet=True)
    packed = "weights of 4 bits are inputs of the plan"
    refuse_if(node.attrs["bits"] != 8, packed, "make them constants")
    known = {values[name] for name in ("weight", "scale", "bias") if name in values}
    open_ = not known <= region.constants
    refuse_if(open_, "weight, scale or bias are inputs of the plan", "make them constants")
    ends = types[values["x"]], types[node.output]
    for what, t in zip(("input", "result"), ends, strict=True):
        apart = t.shape[1] > 1 and t.strides[1] != 1
        refuse_if(apart, f"the {what} is not in nhwc", "use Policy(layout='auto')")
    empty = any(t.numel == 0 for t in ends)
    refuse_if(empty, "a tensor is empty", "nothing to do: torch's own operators run it")
    large = max(t.storage_numel for t in ends) > MOST
    refuse_if(large, "a tensor has more elements than a 32-bit offset reaches", "split the batch")


def _window(region: Region, node: Node) -> Any:
    from deuteron.kernels.cpu.conv import Window

    a, kernel = node.attrs, region.graph.types[operands(node)["weight"]].shape[2:]
    before, behind = sides(a["padding"], len(kernel))
    return Window(kernel, a["stride"], before, behind, a["dilation"], a["groups"])


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the products, with what pads panels and words of four bytes, and of the few
    operations per result that follow."""
    node, types = region.nodes[0], region.graph.types
    weight, out = types[operands(node)["weight"]], types[node.output]
    columns, each = weight.shape[0] // node.attrs["groups"], weight.shape[1]
    if columns == each == 1 and node.attrs["groups"] > 1:
        work = region_cost(region).flops / DEPTHWISE + 10.0 * out.numel
        return roof(region, target, work / target.rate("f32"))
    dots, lanes = instruction().fitted(out.numel // out.shape[1], columns), instruction().lanes
    filled = -(-columns // dots.columns) * dots.vectors * lanes / columns
    filled *= -(-each // TOGETHER) * TOGETHER / each
    work = region_cost(region).flops * filled / dots.faster + 10.0 * out.numel
    return roof(region, target, work / target.rate("f32"))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import conv_quantized as kernel

    node, types, a = region.nodes[0], region.graph.types, region.nodes[0].attrs
    values, groups = operands(node), region.nodes[0].attrs["groups"]
    x, out = types[values["x"]], types[node.output]
    weight = ctx.constants[values["weight"]]
    form = kernel.Form(x.dtype.short, out.dtype.short, "bias" in values, a["act"])
    dots = instruction().fitted(out.numel // out.shape[1], out.shape[1] // groups)
    wide = dots.columns
    ends = a["out_scale"], a["out_zero"]
    images = image(x), image(out), _window(region, node)
    calls, length = kernel.prepare(dots, form, *images, a["zero"], ends)
    panels = ctx.form(
        values["weight"],
        ("quantized conv", groups, length, wide),
        lambda w: kernel.panels_of(w, groups, length, wide),
    )
    zero = a["zero"] + kernel.moved(dots, form, weight, groups)  # as the kernel reads x
    start = kernel.starts_of(weight, groups, zero, wide)
    scale = kernel.numbers_of(ctx.constants[values["scale"]], weight, groups, wide)
    bias = ctx.constants[values["bias"]] if form.bias else torch.zeros(out.shape[1])
    given, to = Argument(region.inputs.index(values["x"])), Argument(len(region.inputs))
    beside = kernel.numbers_of(bias, weight, groups, wide)
    return Kernel.generated(calls(given, panels, start, scale, beside, to))


CONV_QUANTIZED = Recipe(OP, (OP,), _refuse, _build, one_way, _seconds, BUILD_S)
