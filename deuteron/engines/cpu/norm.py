"""Norms on the CPU: gradients in row-major order by ``kernels/cpu/norm.py``; batch norm in training
and, where channels lie innermost, group norm and all gradients in stages of generated code."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Candidate, Kernel, refuse_if
from deuteron.engines.cpu import norm_stages
from deuteron.engines.cpu.generated import CpuGen, program_of
from deuteron.engines.cpu.product import BUILD_S, refuse_elsewhere, roof
from deuteron.engines.match import only_node, operands, results
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.engines.roofline import region_cost, times
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ir.rewrite import carry, start
from deuteron.ir.types import TensorType
from deuteron.ops import Cost, table
from deuteron.policy import Policy
from deuteron.target import Target

# operator → which elements share statistics ("rows", "groups" or "channels"), and the part of the
# arithmetic rate that its kernels reach: every pass waits for a cache
NORMS = dict.fromkeys(("layer_norm_grad", "rms_norm_grad"), ("rows", 0.25))
NORMS |= dict.fromkeys(("group_norm_grad", "instance_norm_grad"), ("groups", 0.3))
NORMS |= dict.fromkeys(("batch_norm_act", "batch_norm_act_grad"), ("channels", 0.3))


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    node = only_node(region, NORMS)
    sets, _ = NORMS[node.op]
    apart = sets != "channels" and node.attrs["activation"] != "none"
    refuse_if(apart, "takes an activation along after batch norm alone", "leave it outside")
    refuse_if(node.attrs.get("again"), "does not make y again", "make it by itself")
    tensors = {**operands(node), **results(region, node)}
    refuse_if("signs" in tensors, "keeps no signs", "leave packed out: y tells them")
    refuse_elsewhere(region, target)
    types = {name: region.graph.types[value] for name, value in tensors.items()}
    _refuse_order(types, sets == "rows")
    for stage in norm_stages.staged(region)[1] if _is_generated(types["x"], sets) else ():
        program_of(stage)


def _is_generated(x: TensorType, sets: str) -> bool:
    return sets == "channels" or (sets == "groups" and not x.is_layout("contiguous"))


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


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    _, reached = NORMS[region.ops[0]]
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * reached))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import norm

    node, types = region.nodes[0], region.graph.types
    named, attrs = {**operands(node), **results(region, node)}, node.attrs
    x, sets = types[named["x"]], NORMS[node.op][0]
    if _is_generated(x, sets):
        return norm_stages.kernel(region, *norm_stages.staged(region))
    if sets == "rows":
        columns = prod(x.shape[x.rank - attrs["dims"] :])
        sizes = norm.Sizes(x.numel // columns, 1, columns, columns, columns, 1)
    else:
        groups, length = attrs.get("groups", x.shape[1]), prod(x.shape[2:])
        each = x.shape[1] // groups
        sizes = norm.Sizes(x.shape[0] * groups, each, length, each * length, length, groups)

    def kind_of(name: str) -> str:
        return types[named[name]].dtype.short if name in named else "f32"

    kind = norm.Kind(
        sets,
        tuple(sorted(named)),
        x.dtype.short,
        *(kind_of("weight"), kind_of("dweight"), kind_of("dbias")),
        centred=node.op != "rms_norm_grad",
        short=sizes.segments * sizes.length < norm.SHORT,
        long=sets != "rows" or sizes.length >= norm.LONG,
    )
    tensors = (*region.inputs, *region.outputs)
    where: dict[str, Word] = {name: Argument(tensors.index(v)) for name, v in named.items()}
    return Kernel.generated(norm.prepare(kind, sizes, attrs["eps"], where))


NORM = Recipe("norm", NORMS, _refuse, _build, one_way, _seconds, BUILD_S)

# ---- group norm and instance norm of channels last, in stages

# ``cpu_gen`` reads every group by itself, which jumps through memory where channels lie innermost.
# Here the first stage sums each channel of each image. With these sums the norm is elementwise,
# (x − mean) · scale + shift, and one stage computes it with all other nodes of the region.
GROUPED = ("group_norm", "instance_norm")  # in instance norm every channel is a group
REACHED = 0.2  # part of the arithmetic rate: the sums wait for memory


def _refuse_groups(region: Region, target: Target, policy: Policy) -> None:
    found = sum(op in GROUPED for op in region.ops)
    refuse_if(found != 1, "is not one group_norm or instance_norm and what is around it")
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
    for stage in _in_stages(region)[1]:
        program_of(stage)


def _norm(region: Region) -> Node:
    return next(node for node in region.nodes if node.op in GROUPED)


@lru_cache(maxsize=1024)
def _in_stages(region: Region) -> tuple[Graph, list[Region]]:
    """The region in stages: the nodes that compute the norm's input, if any, its statistics, and
    the norm with all remaining nodes."""
    graph, norm = region.graph, _norm(region)
    needed: set[str | None] = {norm.inputs[0]}
    before: list[Node] = []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs) and node is not norm:
            needed |= set(node.uses)
            before.insert(0, node)
    build, names = start(graph, table.infer)
    for node in before:
        carry(build, names, node, graph)
    x, kind = names[norm.uses[0]], graph.types[norm.output].dtype
    s = norm_stages.Stages(build, graph.types[norm.uses[0]], norm.source)
    of = norm_stages.Operands(s.b, {k: names[v] for k, v in operands(norm).items()})
    s.cut()
    pivot = s.pivots(of("x"), batch=False)
    means, squares = s.spread(of("x") - s.beside(pivot))
    s.cut()
    groups = norm.attrs.get("groups", graph.types[norm.uses[0]].shape[1])
    off, rest, rstd = s.of_groups(pivot, means, squares, groups, norm.attrs["eps"])
    mean = pivot + off
    scale = of.scaled(rstd, "weight")
    shift = of.plus(rest * scale * -1.0, "bias")
    s.cut()
    mean, scale, shift = map(s.beside, (mean, scale, shift))
    for node in graph.nodes:
        if node is norm:
            y = (s.b.upcast(s.b.sym(x)) - mean) * scale + shift
            names[norm.output] = s.b.to(y, kind).name
        elif node not in before:
            carry(build, names, node, graph)
    for name, value in graph.outputs:
        build.output(name, names[value])
    return s.finish()


def _groups_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, engine = region.graph.types[_norm(region).uses[0]], CpuGen()
    *before, _, _, rest = _in_stages(region)[1]
    others = sum(engine.estimate(s, target, Candidate("", "")) for s in (*before, rest))
    memory, compute = times(Cost(5.0 * x.numel, x.nbytes, 0), "f32", False, target)
    return others + max(memory, compute / REACHED)


def _build_groups(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    return norm_stages.kernel(region, *_in_stages(region))


_GROUPS = (_refuse_groups, _build_groups, one_way, _groups_seconds)
GROUP_NORM = Recipe("group_norm", GROUPED, *_GROUPS, BUILD_S)
