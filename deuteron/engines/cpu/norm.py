"""Norms on the CPU: the recipes around ``kernels/cpu/norm.py`` and, where channels lie innermost,
``kernels/cpu/channels_last_norm.py``. Gradients of all norms, batch norm in training, and group
norm of channels last."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

import torch

from deuteron.codegen.calls import Argument, Call, Room, Word
from deuteron.engines.base import BuildContext, Candidate, Kernel, refuse_if
from deuteron.engines.cpu.generated import CpuGen, call_of, program_of
from deuteron.engines.cpu.product import BUILD_S, refuse_elsewhere, roof
from deuteron.engines.match import only_node, operands, results
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.engines.roofline import region_cost, times
from deuteron.ir.dtype import float32
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ir.rewrite import carry, start
from deuteron.ir.types import TensorType
from deuteron.ops import Cost, Ops, table
from deuteron.policy import Policy
from deuteron.target import Target

# operator → who shares statistics, and the part of the arithmetic that its kernels reach: every
# pass waits for a cache
NORMS = {
    "layer_norm_grad": ("rows", 0.25),
    "rms_norm_grad": ("rows", 0.25),
    "group_norm_grad": ("groups", 0.3),
    "instance_norm_grad": ("groups", 0.3),
    "batch_norm_act": ("channels", 0.3),
    "batch_norm_act_grad": ("channels", 0.3),
}
PARAMETERS = ("weight", "dweight", "dbias")
WIDE = ("mean", "rstd")  # statistics of the batch, which are float32
PAIRS = (("weight", "bias"), ("running_mean", "running_var"))


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    node = only_node(region, NORMS)
    sets, _ = NORMS[node.op]
    apart = sets != "channels" and node.attrs["activation"] != "none"
    refuse_if(apart, "takes an activation along after batch norm alone", "leave it outside")
    tensors = {**operands(node), **results(region, node)}
    refuse_if("signs" in tensors, "keeps no signs", "leave packed out: y tells them")
    refuse_elsewhere(region, target)
    types = {name: region.graph.types[value] for name, value in tensors.items()}
    _refuse_order(types, sets == "rows")
    _refuse_types(types)


def _refuse_order(types: Mapping[str, TensorType], rows: bool) -> None:
    """Tensors must be in row-major order, and images all in that or all in nhwc."""
    images = {n: t for n, t in types.items() if t.shape == types["x"].shape and not rows}
    for name, t in types.items():
        wrong = name not in images and not t.is_layout("contiguous")
        how = "has gaps" if t.rank == 1 else "is not in row-major order"
        refuse_if(wrong, f"{name} {how}", "call .contiguous()")
    orders = ("contiguous", "nhwc")
    if any(all(t.is_layout(order) for t in images.values()) for order in orders):
        return
    for name, t in images.items():
        neither = f"{name} is not in row-major order and not in nhwc"
        refuse_if(t.layout not in orders, neither, "call .contiguous()")
    mixed = f"of {', '.join(images)} some are in row-major order and some in nhwc"
    refuse_if(True, mixed, "lay all of them in one order")


def _refuse_types(types: Mapping[str, TensorType]) -> None:
    x = types["x"]
    for name, t in types.items():
        kind, image = t.dtype.short, t.shape == x.shape and name not in PARAMETERS
        odd = f"{name} is {kind}, x is {x.dtype.short}"
        refuse_if(image and t.dtype != x.dtype, odd, "cast it")
        narrow = name in WIDE and kind != "f32"
        refuse_if(narrow, f"{name} is {kind}, not f32", "keep statistics in float32")
    for pair in PAIRS:
        differ = len({types[p].dtype for p in pair if p in types}) > 1
        refuse_if(differ, f"{' and '.join(pair)} differ in type", "cast one of them")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    _, reached = NORMS[region.ops[0]]
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * reached))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import channels_last_norm, norm

    node, types = region.nodes[0], region.graph.types
    read, made, attrs = operands(node), results(region, node), node.attrs
    x, sets = types[read["x"]], NORMS[node.op][0]
    shape = _shape(x, attrs, sets)

    def kind_of(*names: str) -> str:
        there = (types[{**read, **made}[name]] for name in names if name in read or name in made)
        return next((t.dtype.short for t in there), "f32")

    kind = norm.Kind(
        sets,
        tuple(sorted((*read, *made))),
        x.dtype.short,
        *(kind_of("weight", "bias"), kind_of("running_mean", "running_var")),
        *(kind_of("dweight"), kind_of("dbias"), attrs["activation"]),
        centred=node.op != "rms_norm_grad",
        short=sets != "channels" and prod(shape[1:]) < norm.SHORT,
        long=sets != "rows" or shape[1] >= norm.LONG,
    )
    first = len(region.inputs)
    where: dict[str, Word] = {
        **{name: Argument(region.inputs.index(value)) for name, value in read.items()},
        **{name: Argument(first + region.outputs.index(value)) for name, value in made.items()},
    }
    way = "backward" if node.op.endswith("grad") else "forward"
    floats = (attrs.get("eps", 0.0), attrs.get("momentum", 0.0))
    if sets == "rows":
        sizes = norm.Sizes.of_rows(*shape)
    elif _channels_last(x, sets):
        n, channels, length = x.shape[0], x.shape[1], prod(x.shape[2:])
        last = (n, length, channels, shape[1]) if sets == "groups" else (1, n * length, channels, 1)
        calls, _ = channels_last_norm.prepare(
            way, kind, channels_last_norm.Sizes(*last), *floats, where
        )
        return Kernel.generated(calls)
    elif sets == "groups":
        sizes = norm.Sizes.of_groups(x.shape[0], x.shape[1], shape[2], x.shape[1] // shape[1])
    else:
        sizes = norm.Sizes.of_channels(x.shape[0], x.shape[1], prod(x.shape[2:]))
    return Kernel.generated(norm.prepare(way, kind, sizes, *floats, where))


def _shape(x: TensorType, attrs: Mapping[str, object], sets: str) -> tuple[int, ...]:
    """Rows and columns; or groups, channels of each and positions of a channel."""
    if sets == "rows":
        columns = prod(x.shape[x.rank - int(str(attrs["dims"])) :])
        return x.numel // columns, columns
    groups = int(str(attrs.get("groups", x.shape[1])))
    return x.shape[0] * groups, x.shape[1] // groups, prod(x.shape[2:])


def _channels_last(x: TensorType, sets: str) -> bool:
    """Whether channels lie innermost. Where there are no positions they do in any order."""
    if sets == "groups" or prod(x.shape[2:]) > 1:
        return not x.is_layout("contiguous")
    return True


NORM = Recipe("norm", NORMS, _refuse, _build, one_way, _seconds, BUILD_S)

# ---- group norm of channels last: statistics by hand, the rest generated

# ``cpu_gen`` reads every group by itself, which is across the order of memory where channels lie
# innermost. ``kernels/cpu/channels_last_norm.py`` walks over the rows and finds a mean, a scale and
# a shift for each channel of each image. With these the norm is elementwise, (x − mean) · scale +
# shift, and generated code makes it together with whatever stands around it in the region.
GROUPED = "group_norm"
FOUND = ("channel mean", "channel scale", "channel shift")  # names that no graph has
REACHED = 0.2  # of the arithmetic: the sums wait for memory


def _refuse_groups(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops.count(GROUPED) != 1, "is not one group_norm and what is around it")
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
    return next(node for node in region.nodes if node.op == GROUPED)


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


def _groups_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, engine = region.graph.types[_norm(region).uses[0]], CpuGen()
    others = sum(engine.estimate(piece, target, Candidate("", "")) for piece in _pieces(region))
    memory, compute = times(Cost(5.0 * x.numel, x.nbytes, 0), "f32", False, target)
    return others + max(memory, compute / REACHED)


def _build_groups(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import channels_last_norm
    from deuteron.kernels.cpu import norm as rows

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
    kind = rows.Kind("groups", tuple(sorted(there)), x.dtype.short, param)
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


_GROUPS = (_refuse_groups, _build_groups, one_way, _groups_seconds)
GROUP_NORM = Recipe("group_norm", (GROUPED,), *_GROUPS, BUILD_S)
