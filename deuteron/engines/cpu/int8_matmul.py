"""Products of bytes on the CPU: the recipe around ``kernels/cpu/int8_matmul.py``."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from deuteron.codegen import openmp
from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu.product import BUILD_S, MOST, roof
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

PRODUCTS = ("linear", "matmul")
KINDS = {"i8": True, "u8": False}  # whether the type is signed
TOGETHER = 4  # products of bytes that the instruction adds up at a time


def instruction() -> Any:
    """The :class:`deuteron.codegen.dots.Dots` of this machine, which must have one."""
    from deuteron.codegen.dots import dots

    return dots()


def refuse_without_instruction() -> None:
    refuse_if(not openmp.available(), "llvmlite is not installed", "pip install llvmlite")
    refuse_if(not instruction(), "this CPU has no instruction that adds products of bytes")


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    alone = len(region.ops) == 1 and region.ops[0] in PRODUCTS
    refuse_if(not alone, "is no product alone", quiet=True)
    types, node = region.graph.types, region.nodes[0]
    x, w = (types[v] for v in node.uses[:2])
    refuse_if(x.dtype.short not in KINDS, f"of {x.dtype.short}, not of bytes", quiet=True)
    refuse_without_instruction()
    unable = instruction().moved(x.dtype.short, w.dtype.short) is None
    refuse_if(unable, "this CPU's instruction takes weights with a sign", "use an int8 weight")
    constant = node.uses[1] in region.constants
    refuse_if(not constant, "the weight is an input of the plan, so it cannot be packed ahead")
    read = (x, *(types[v] for v in node.uses[2:]))
    plain = w.rank == 2 and all(t.is_layout("contiguous") for t in read) and x.numel and w.numel
    refuse_if(not plain, "only rows that lie side by side, by one matrix", "make it contiguous")
    large = max(t.numel for t in types.values()) > MOST
    refuse_if(large, "a tensor has more elements than a 32-bit offset reaches")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(
        region, target, region_cost(region).flops / (instruction().faster * target.rate("f32"))
    )


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.int8_matmul import Form, panels_of, prepare_bytes, starts_of

    types, node = region.graph.types, region.nodes[0]
    x, out = types[node.uses[0]], types[node.output]
    rows, columns = prod(out.shape[:-1]), out.shape[-1]
    linear = node.op == "linear"
    dots, kind = instruction().fitted(rows, columns), x.dtype.short
    wide, moved = dots.columns, dots.moved(kind, kind)

    def formed(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        form = ("bytes", name, linear, wide)
        return ctx.form(node.uses[1], form, lambda w: make(w if linear else w.T.contiguous()))

    panels = formed("panels", lambda w: panels_of(w, wide))
    start = formed("start", lambda w: starts_of(w, wide, moved))
    bias: Word = torch.zeros(columns, dtype=torch.int32)
    if len(node.uses) > 2:
        bias = Argument(region.inputs.index(node.uses[2]))
    form = Form(dots, KINDS[kind])
    calls = prepare_bytes(form, bool(moved), rows, x.shape[-1], columns)
    given = Argument(region.inputs.index(node.uses[0]))
    return Kernel.generated(calls(given, panels, start, bias, Argument(len(region.inputs))))


BYTES = Recipe("bytes", PRODUCTS, _refuse, _build, one_way, _seconds, BUILD_S)
