"""Group norm of channels last in ``cpu_gemm``: statistics by hand, the rest generated.

``cpu_gen`` reads every group by itself, which is across the order of memory where channels lie
innermost. Here ``kernels/cpu/channels_last_norm.py`` walks over the rows and finds a mean, a scale
and a shift for each channel of each image. With these the norm is elementwise,

    y = (x − mean) · scale + shift

and generated code makes it together with whatever stands around it in the region: a sum before, an
activation or its gradient after.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from deuteron.codegen.calls import Argument, Call, Room, Word
from deuteron.codegen.scalar import ScalarProgram
from deuteron.engines.base import BuildContext, Candidate, Kernel, Refusal
from deuteron.engines.cpu_gen import CpuGen, call_of, program_of
from deuteron.engines.cpu_product import generated, on_this_cpu
from deuteron.engines.recipes import Knobs, one_way
from deuteron.engines.roofline import times
from deuteron.ir.dtype import float32
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ir.rewrite import carry, start
from deuteron.ir.types import TensorType
from deuteron.ops import Cost, Ops, table
from deuteron.policy import Policy
from deuteron.target import Target

NORM = "group_norm"
FOUND = ("channel mean", "channel scale", "channel shift")  # names that no graph has
REACHED = 0.2  # of the arithmetic: the sums wait for memory


class Pieces(NamedTuple):
    """A region around a norm: what is made before it, if anything, and all the rest with the norm
    written out."""

    before: Region | None
    norm: Node
    after: Region


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    norms = [node for node in region.nodes if node.op == NORM]
    if len(norms) != 1:
        return Refusal("is not one group_norm and what is around it")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    (norm,) = norms
    types, made = region.graph.types, {v for node in region.nodes for v in node.outputs}
    x, *params = norm.inputs
    assert x is not None
    ends = types[x], types[norm.output]
    if types[x].is_layout("contiguous") or not all(t.is_layout("nhwc") for t in ends):
        return Refusal(f"x is {types[x]}, not in nhwc", "cpu_gen takes row-major order")
    given = [p for p in params if p is not None]
    if made & set(given):
        return Refusal("the weight or the bias is made in the region", "make it before")
    if any(not types[p].is_layout("contiguous") for p in given):
        return Refusal("the weight or the bias has gaps", "call .contiguous()")
    if len({types[p].dtype for p in given}) > 1:
        return Refusal("weight and bias differ in type", "cast one of them")
    for piece in _pieces(region)[::2]:
        found = None if piece is None else program_of(piece)
        if isinstance(found, Refusal):
            return found
    return None


@lru_cache(maxsize=1024)
def _pieces(region: Region) -> Pieces:
    graph = region.graph
    (norm,) = (node for node in graph.nodes if node.op == NORM)
    needed: set[str | None] = {norm.inputs[0]}
    before: list[Node] = []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs) and node is not norm:
            needed |= set(node.uses)
            before.insert(0, node)
    after = [node for node in graph.nodes if node not in before]
    first = region.part(f"{region.name} before", before, None) if before else None
    return Pieces(first, norm, Region(_written_out(graph.subgraph("after", after), norm)))


def _written_out(graph: Graph, norm: Node) -> Graph:
    """``graph`` with the norm as an expression of three more inputs."""
    x = graph.types[norm.inputs[0] or ""]
    lies = TensorType.of((*x.shape[:2], *(1 for _ in x.shape[2:])), float32)
    build, names = start(graph, table.infer)
    for name in FOUND:
        build.input(name, lies)
    ops = Ops(build, norm.source)
    for node in graph.nodes:
        if node is not norm:
            carry(build, names, node, graph)
            continue
        mean, scale, shift = map(ops.sym, FOUND)
        y = (ops.upcast(ops.sym(names[norm.inputs[0] or ""])) - mean) * scale + shift
        names[norm.output] = ops.to(y, x.dtype).name
    for name, value in graph.outputs:
        build.output(name, names[value])
    return build.finish()


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    before, norm, after = _pieces(region)
    x = region.graph.types[norm.inputs[0] or ""]
    engine = CpuGen()
    parts = [piece for piece in (before, after) if piece is not None]
    others = sum(engine.estimate(piece, target, Candidate("", "")) for piece in parts)
    memory, compute = times(Cost(5.0 * x.numel, x.nbytes, 0), "f32", False, target)
    return others + max(memory, compute / REACHED)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import channels_last_norm
    from deuteron.kernels.cpu.norm import Kind

    before, norm, after = _pieces(region)
    types = region.graph.types
    words: dict[str, Word] = {v: Argument(i) for i, v in enumerate(region.inputs)}
    words |= {v: Argument(len(region.inputs) + i) for i, v in enumerate(region.outputs)}
    calls: list[Call] = []
    workspace = 0
    if before is not None:
        for value in set(before.outputs) - set(words):
            words[value] = Room(f"before a norm {value}", -(-types[value].nbytes // 4))
        workspace = _add(before, words, calls)
    slots = dict(zip(("x", "weight", "bias"), norm.inputs, strict=False))
    given = {slot: value for slot, value in slots.items() if value is not None}
    x = types[given["x"]]
    param = next((types[given[p]].dtype.short for p in ("weight", "bias") if p in given), "f32")
    kind = Kind("groups", tuple(sorted(given)), x.dtype.short, param)
    each = x.shape[1] // norm.attrs["groups"]
    sizes = channels_last_norm.Sizes(x.shape[0], prod(x.shape[2:]), x.shape[1], each)
    found, rooms = channels_last_norm.prepare(
        "affine", kind, sizes, norm.attrs["eps"], 0.0, {s: words[v] for s, v in given.items()}
    )
    calls += found
    words |= {name: rooms[kept] for name, kept in zip(FOUND, rooms, strict=True)}
    workspace = max(workspace, _add(after, words, calls))
    return Kernel.generated(calls, workspace=workspace)


def _add(piece: Region, words: dict[str, Word], calls: list[Call]) -> int:
    """The call of a piece, whose results are called what they are in the region; the bytes that it
    keeps meanwhile."""
    program = program_of(piece)
    assert isinstance(program, ScalarProgram)
    named = {value: words[name] for name, value in piece.graph.outputs}
    call, floats = call_of(program, {**words, **named})
    calls.append(call)
    return 4 * floats * torch.get_num_threads()


GROUP_NORM = generated("group_norm", _refuse, one_way, _seconds, _build)
