"""Group norm of channels last on the CPU: statistics by hand, the rest generated.

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

import torch

from deuteron.codegen.calls import Argument, Call, Room, Word
from deuteron.engines.base import BuildContext, Candidate, Kernel, refuse_if
from deuteron.engines.cpu_gen import CpuGen, call_of, program_of
from deuteron.engines.cpu_product import BUILD_S, refuse_elsewhere
from deuteron.engines.recipes import Knobs, Recipe, one_way
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


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops.count(NORM) != 1, "is not one group_norm and what is around it")
    refuse_elsewhere(region, target)
    types, norm = region.graph.types, _norm(region)
    x, params = types[norm.uses[0]], norm.uses[1:]
    last = all(t.is_layout("nhwc") for t in (x, types[norm.output]))
    plain = x.is_layout("contiguous") or not last
    refuse_if(plain, f"x is {x}, not in nhwc", "cpu_gen takes row-major order")
    made = any(p in node.outputs for p in params for node in region.nodes)
    refuse_if(made, "the weight or the bias is made in the region", "make it before")
    gaps = any(not types[p].is_layout("contiguous") for p in params)
    refuse_if(gaps, "the weight or the bias has gaps", "call .contiguous()")
    differ = len({types[p].dtype for p in params}) > 1
    refuse_if(differ, "weight and bias differ in type", "cast one of them")
    for piece in _pieces(region):
        program_of(piece)


def _norm(region: Region) -> Node:
    return next(node for node in region.nodes if node.op == NORM)


@lru_cache(maxsize=1024)
def _pieces(region: Region) -> list[Region]:
    """What is made before the norm, if anything, and all the rest with the norm written out."""
    graph, norm = region.graph, _norm(region)
    needed: set[str | None] = {norm.inputs[0]}
    before: list[Node] = []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs) and node is not norm:
            needed |= set(node.uses)
            before.insert(0, node)
    after = [node for node in graph.nodes if node not in before]
    rest = Region(_written_out(graph.subgraph("after", after), norm))
    return [*([region.part(f"{region.name} before", before, None)] if before else []), rest]


def _written_out(graph: Graph, norm: Node) -> Graph:
    """``graph`` with the norm as an expression of three more inputs."""
    x = graph.types[norm.uses[0]]
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
        y = (ops.upcast(ops.sym(names[norm.uses[0]])) - mean) * scale + shift
        names[norm.output] = ops.to(y, x.dtype).name
    for name, value in graph.outputs:
        build.output(name, names[value])
    return build.finish()


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, engine = region.graph.types[_norm(region).uses[0]], CpuGen()
    others = sum(engine.estimate(piece, target, Candidate("", "")) for piece in _pieces(region))
    memory, compute = times(Cost(5.0 * x.numel, x.nbytes, 0), "f32", False, target)
    return others + max(memory, compute / REACHED)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import channels_last_norm
    from deuteron.kernels.cpu.norm import Kind

    *before, after = _pieces(region)
    norm, types = _norm(region), region.graph.types
    words: dict[str, Word] = {v: Argument(i) for i, v in enumerate(region.inputs)}
    words |= {v: Argument(len(region.inputs) + i) for i, v in enumerate(region.outputs)}
    calls: list[Call] = []
    workspace = 0
    for piece in before:
        for value in set(piece.outputs) - set(words):
            words[value] = Room(f"before a norm {value}", -(-types[value].nbytes // 4))
        workspace = _add(piece, words, calls)
    slots = zip(("x", "weight", "bias"), norm.inputs, strict=False)
    there = {slot: value for slot, value in slots if value is not None}
    x, *params = (types[value] for value in there.values())
    param = params[0].dtype.short if params else "f32"
    kind = Kind("groups", tuple(sorted(there)), x.dtype.short, param)
    each = x.shape[1] // norm.attrs["groups"]
    sizes = channels_last_norm.Sizes(x.shape[0], prod(x.shape[2:]), x.shape[1], each)
    where = {slot: words[value] for slot, value in there.items()}
    found, rooms = channels_last_norm.prepare("affine", kind, sizes, norm.attrs["eps"], 0.0, where)
    calls += found
    words |= dict(zip(FOUND, rooms.values(), strict=True))
    workspace = max(workspace, _add(after, words, calls))
    return Kernel.generated(calls, workspace=workspace)


def _add(piece: Region, words: dict[str, Word], calls: list[Call]) -> int:
    """The call of a piece, whose results are called what they are in the region; the bytes that it
    keeps meanwhile."""
    named = {value: words[name] for name, value in piece.graph.outputs}
    call, floats = call_of(program_of(piece), {**words, **named})
    calls.append(call)
    return 4 * floats * torch.get_num_threads()


GROUP_NORM = Recipe("group_norm", (NORM,), _refuse, _build, one_way, _seconds, BUILD_S)
