"""PyTorch's scaled product of 8-bit floats on Hopper, by cuBLASLt or CUTLASS. The scales are either
one for each row and column, applied to a plain product, or one for each block of 128, as in
``linear_fp8``."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import operands
from deuteron.engines.recipes import Recipe, place
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

LINE, BLOCK = 16, 128  # bytes that sizes must be multiples of, and numbers of a block
RESULT = "bf16"


class Scaled(NamedTuple):
    """The factors of a product, and the scales of its rows and columns."""

    x: str
    w: str
    rows: str
    columns: str


def _refuse_sizes(region: Region, target: Target, x: str, w: str, out: str) -> None:
    types = region.graph.types
    refuse_if(not target.has_warpgroups, "PyTorch scales rows and blocks on Hopper only")
    kind = types[x].dtype
    floats = kind.is_float and kind.bits == 8
    refuse_if(not floats, f"the factors are of {kind.short}, not floats of 8 bits", quiet=True)
    refuse_if(kind.short != "f8e4m3", "cuBLASLt multiplies no two factors of e5m2")
    result = types[out].dtype.short
    refuse_if(result != RESULT, f"the result is of {result}, not of {RESULT}", "cast it")
    flat = types[x].rank == types[w].rank == 2
    refuse_if(not flat, "is not a product of two matrices", "reshape x to [rows, features]")
    lying = types[x].is_layout("contiguous") and types[w].is_layout("contiguous")
    refuse_if(not lying, "a factor is not in row-major order", "make it contiguous")
    odd = any(n % LINE for n in types[w].shape) or not types[out].numel or not types[x].numel
    refuse_if(odd, f"sizes are no multiples of {LINE}", "pad them with zeros")


def _scaled(region: Region) -> Scaled:
    """``cast(linear(x, w) * rows * columns)``, in either order of the scales."""
    node, *rest = region.nodes
    refuse_if(node.op != "linear" or len(node.uses) > 2, "starts with no linear without a bias")
    types, value = region.graph.types, node.output
    rows, columns = types[value].shape if types[value].rank == 2 else (0, 0)
    found: dict[str, str] = {}
    for n in rest:
        if n.op == "cast":
            value = n.output
            continue
        refuse_if(n.op != "mul" or value not in n.uses, f"{n.op} follows, not a scale")
        by = next(v for v in (*n.uses, "") if v != value)
        t = types.get(by)
        plain = t is not None and t.dtype.short == "f32" and t.is_layout("contiguous")
        shape = t.shape if t is not None else ()
        slot = {(rows, 1): "rows", (columns,): "columns", (1, columns): "columns"}.get(shape)
        fits = plain and slot is not None and slot not in found and by in region.inputs
        refuse_if(not fits, "what it is multiplied by is no scale of rows or columns")
        found[slot or ""] = by
        value = n.output
    refuse_if(len(found) < 2, "has no scales of both rows and columns")
    alone = region.outputs == (value,)
    refuse_if(not alone, "gives more than the scaled product")
    x, w = node.uses
    return Scaled(x, w, found["rows"], found["columns"])


def _refuse_rows(region: Region, target: Target, policy: Policy) -> None:
    s = _scaled(region)
    _refuse_sizes(region, target, s.x, s.w, region.outputs[0])


def _build_rows(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    x, w, rows, columns = (place(region, v) for v in _scaled(region))

    def run(*t: Any) -> torch.Tensor:
        across = t[columns].reshape(1, -1)
        return torch._scaled_mm(t[x], t[w].t(), t[rows], across, out_dtype=torch.bfloat16)

    return Kernel(run)


def _refuse_blocks(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("linear_fp8",), "is more than linear_fp8")
    node = region.nodes[0]
    values = operands(node)
    refuse_if("bias" in values, "the call has no bias", "add it later")
    block = node.attrs["block"]
    refuse_if(block != BLOCK, f"blocks of {block}, not of {BLOCK}")
    w = region.graph.types[values["weight"]]
    _refuse_sizes(region, target, values["x"], values["weight"], node.output)
    whole = not any(n % BLOCK for n in w.shape)
    refuse_if(not whole, f"the weight has blocks of fewer than {BLOCK} numbers")


def _build_blocks(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    values = operands(region.nodes[0])
    names = ("x", "weight", "x_scale", "weight_scale")
    x, w, rows, squares = (place(region, values[name]) for name in names)

    def run(*t: Any) -> torch.Tensor:
        by_row = t[rows].t().contiguous().t()  # the call wants column-major scales
        by_square = t[squares].contiguous().t()
        return torch._scaled_mm(t[x], t[w].t(), by_row, by_square, out_dtype=torch.bfloat16)

    return Kernel(run)


# Blocks came with CUDA 12.9, and PyTorch may have been built with an older one; only a search,
# which runs the call, can tell. Hence by_estimate=False.
_gpu = partial(Recipe, kind="cuda", by_estimate=False)
SCALED = (
    _gpu("scaled", ("linear",), _refuse_rows, _build_rows),
    _gpu("scaled_blocks", ("linear_fp8",), _refuse_blocks, _build_blocks),
)
