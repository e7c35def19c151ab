"""Adding elements at given indices on the CPU: the recipe around
``kernels/cpu/scatter_add.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from deuteron.codegen import openmp
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu.product import BUILD_S, roof
from deuteron.engines.index_checks import Lookup, checked
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

if TYPE_CHECKING:
    from deuteron.kernels.cpu.scatter_add import Places

ENTRY_S, ELEMENT_S = 3e-9, 0.5e-9  # seconds of one thread to find a row, and to add a number to it


def _step(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The stride of several dimensions taken as one; refuses if they cannot be."""
    seen = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    if not seen:
        return 0
    for (_, outer), (n, inner) in pairwise(seen):
        refuse_if(outer != n * inner, "an operand does not lie in one piece", "make it contiguous")
    return seen[-1][1]


def _around(t: TensorType, axis: int, count: int = 1) -> tuple[int, int, int]:
    """The strides before, along and behind ``count`` dimensions from ``axis`` on."""
    parts = slice(axis), slice(axis, axis + count), slice(axis + count, None)
    before, along, behind = (_step(t.shape[p], t.strides[p]) for p in parts)
    return before, along, behind


def _operands(region: Region) -> tuple[Node, str, str]:
    """The node, the name of the value that is added, and that of the index."""
    node = only_node(region, {"scatter_add": None, "embedding_grad": None})
    first, second = node.uses[:2]
    return (node, second, first) if node.op == "scatter_add" else (node, first, second)


def _places(region: Region) -> Places:
    from deuteron.kernels.cpu.scatter_add import Places

    node, added, named = _operands(region)
    src, index = region.graph.types[added], region.graph.types[named]
    if node.op == "embedding_grad":
        strides = _around(src, 0, index.rank), (0, _around(index, 0, index.rank)[1], 0)
        rows, zero = node.attrs["rows"], node.attrs["padding_idx"]
        return Places(1, index.numel, src.shape[-1], rows, *strides, zero)
    axis, shape = node.attrs["axis"], node.attrs["shape"]
    beside = [d for d in range(src.rank) if d != axis]
    smaller = any(src.shape[d] != shape[d] for d in beside)
    refuse_if(smaller, "src is smaller than the result beside the axis")
    outer, inner = prod(src.shape[:axis]), prod(src.shape[axis + 1 :])
    strides = _around(src, axis), _around(index, axis)
    return Places(outer, src.shape[axis], inner, shape[axis], *strides)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    node, added, _ = _operands(region)
    refuse_if(target.is_cuda, "generates code for the CPU", quiet=True)
    refuse_if(not openmp.available(), "llvmlite is not installed", "pip install llvmlite")
    types = region.graph.types
    kind = types[added].dtype.short
    refuse_if(kind != "f32", f"element type {kind}, not f32", "cast to float32")
    refuse_if(set(node.uses) != set(region.inputs), "an operand is one number", quiet=True)
    empty = any(types[v].numel == 0 for v in (added, node.output))
    refuse_if(empty, "a tensor is empty", "nothing to do: torch's own operators run it")
    tables = (*node.uses[2:], node.output)
    whole = all(types[v].is_layout("contiguous") for v in tables)
    refuse_if(not whole, "the result, or what it is added to, is not row-major")
    _places(region)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    p = _places(region)
    entries = p.outer * p.entries
    mine = ELEMENT_S * entries * p.inner / target.units
    return roof(region, target, ENTRY_S * entries + mine)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.scatter_add import prepare_scatter_add

    node, added, named = _operands(region)
    p, bits = _places(region), region.graph.types[named].dtype.bits
    onto = [region.inputs.index(v) for v in node.uses[2:]]
    kernel = Kernel.generated([prepare_scatter_add(p, bits, bool(onto))])
    order = [region.inputs.index(v) for v in (added, named)]
    run = kernel.fn

    def add(*t: Any) -> None:
        for place in onto:
            if t[place].data_ptr() != t[-1].data_ptr():
                t[-1].copy_(t[place])
        run(*(t[i] for i in order), t[-1])

    look = [Lookup(node.op, named, p.rows)]
    over = tuple((0, place) for place in onto if region.inputs[place] != added)
    return replace(kernel, fn=checked(add, look, region.inputs), calls=(), over=over)


SCATTER_ADD = Recipe(
    "scatter_add", ("scatter_add", "embedding_grad"), _refuse, _build, one_way, _seconds, BUILD_S
)
