"""Linear layers of 8- and 4-bit weights on the CPU: the recipe around
``kernels/cpu/quantized.py``."""

from math import prod

from deuteron.codegen import openmp
from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu.product import BUILD_S, MOST, roof
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.ir.region import Region
from deuteron.kernels.cpu import converts_half
from deuteron.policy import Policy
from deuteron.target import Target

OP, STEP = "linear_quantized", 16
KINDS = ("f32", "f16", "bf16")
REACHED = 0.7  # part of the rate of torch's largest products that these kernels reach
WIDENED = 6.0  # making a float of a weight's number costs as much as multiplying it by 6 rows
TOGETHER = 4  # rows that share one such conversion


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(len(region.nodes) != 1, f"takes {OP} by itself", quiet=True)
    refuse_if(not openmp.available(), "llvmlite is not installed", "pip install llvmlite")
    node, types = region.nodes[0], region.graph.types
    values = operands(node)
    for t in (types[values[name]] for name in ("x", "scale")):
        kind = t.dtype.short
        refuse_if(kind not in KINDS, f"element type {kind}, not f32, f16 or bf16", "cast it")
        half = kind == "f16" and not converts_half()
        refuse_if(half, "this CPU has no conversion from f16", "use bfloat16 or float32")
    group = node.attrs["group"]
    odd = group % STEP > 0
    refuse_if(odd, f"groups of {group} numbers", f"use groups of a multiple of {STEP}")
    tensors = [types[v] for v in (*values.values(), node.output)]
    refuse_if(not all(t.numel for t in tensors), "a tensor is empty: torch's operators run it")
    apart = not all(t.is_layout("contiguous") for t in tensors)
    refuse_if(apart, "a tensor is not in row-major order", "make it contiguous")
    large = max(t.numel for t in tensors) > MOST
    refuse_if(large, "a tensor has 2³¹ elements or more", "split the batch")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, out = (region.graph.types[v] for v in (region.inputs[0], region.outputs[0]))
    rows = prod(out.shape[:-1])
    each = rows + WIDENED * -(-rows // TOGETHER)
    flops = 2.0 * each * out.shape[-1] * x.shape[-1]
    return roof(region, target, flops / (REACHED * target.rate("f32")))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.quantized import Form, prepare, tile_of

    node, types = region.nodes[0], region.graph.types
    values, out = operands(node), types[node.output]
    rows, columns = prod(out.shape[:-1]), out.shape[-1]
    x, scale = (types[values[name]] for name in ("x", "scale"))
    has = ("zero" in values, "bias" in values)
    form = Form(node.attrs["bits"], x.dtype.short, scale.dtype.short, *has, *tile_of(rows))
    call = prepare(form, rows, columns, scale.shape[1], node.attrs["group"])
    names = ("x", "weight", "scale", "zero", "bias")
    given = [Argument(region.inputs.index(values.get(name, values["x"]))) for name in names]
    return Kernel.generated([call(*given, Argument(len(region.inputs)))])


QUANTIZED = Recipe(OP, (OP,), _refuse, _build, one_way, _seconds, BUILD_S)
