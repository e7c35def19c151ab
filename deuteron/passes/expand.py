"""Operators that stand for several, such as the gradients of a norm, written out in simpler ones
wherever no kernel takes them whole.

Whole they are kept on GPUs, for tensors in row-major order, and on the CPU those of norms, too (of
group norm with channels last as well) and those of pools:
hand-written kernels make all their results in one pass over memory. Everywhere else the generated
code of the simpler operators is as good, and fuses with its neighbours. A cross-entropy that joins
positions becomes one that does not and their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import start
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.emit import Ops
from deuteron.passes.context import Context
from deuteron.target import Target

Whole = Callable[[str, Sequence[TensorType | None], Mapping[str, Any]], bool]
ANY_ROWS = frozenset({"rope"})  # whose kernels take any strides but that of the last dimension
# Our kernels take nhwc as well as row-major, and where they do not PyTorch's own, on a CPU, are
# quicker than the parts.
ANY_ORDER = frozenset({"batch_norm_act", "batch_norm_act_grad"})
NORM_GRADS = frozenset({f"{name}_norm_grad" for name in ("layer", "rms", "group", "instance")})
BENT_ON_GPU = frozenset({"group_norm_grad", "instance_norm_grad"})
EXTRA = "extra?"  # an input that is added to the first result


# whose kernels on a CPU take either order if all images have it
CHANNELS = ANY_ORDER | {"group_norm_grad", "instance_norm_grad"}


def _channels_last(given: Sequence[TensorType]) -> bool:
    """Whether images lie with their channels innermost, and vectors without gaps."""
    return all(t.is_layout("nhwc" if t.rank > 1 else "contiguous") for t in given)


def _stored(given: Sequence[TensorType]) -> bool:
    """Whether the CPU's kernels know the element types, and there is something to do."""
    return all(t.numel and t.dtype.short in ("f32", "f16", "bf16") for t in given)


def _rows(given: Sequence[TensorType]) -> bool:
    """Whether images lie row by row."""
    return all(t.rank < 5 and t.is_layout("contiguous") for t in given)


POOLS: dict[tuple[str, str], Callable[[Sequence[TensorType]], bool]] = {
    ("pyramid_pool_grad", "cpu"): lambda given: (
        _stored(given) and all(1 in (t.strides[1], t.strides[-1]) for t in given[1:])
    ),
    # with channels innermost it is a depthwise convolution, for which there are kernels
    ("weighted_pool", "cpu"): lambda given: (
        not (_stored(given) and given[0].rank == 4 and given[0].is_layout("nhwc"))
    ),
    ("weighted_pool", "cuda"): lambda given: True,
    ("weighted_pool_grad", "cpu"): lambda given: _stored(given) and _rows(given),
    ("weighted_pool_grad", "cuda"): lambda given: False,
}


def taken_whole(
    op: str, types: Sequence[TensorType | None], target: Target, bent: bool = False
) -> bool:
    """Whether a hand-written kernel takes operands of these types on ``target``; ``bent``: with an
    activation that follows a norm."""
    if bent and op in NORM_GRADS and not (target.is_cuda and op in BENT_ON_GPU):
        return False
    given = [t for t in types if t is not None]
    if op in ANY_ROWS:
        known = target.is_cuda or all(t.dtype.short in ("f32", "f16", "bf16") for t in given)
        return known and all(t.numel and t.strides[-1] == 1 for t in given)
    if op in ANY_ORDER:
        return all(t.numel for t in given)
    if (op, target.kind) in POOLS:
        return POOLS[op, target.kind](given)
    plain = all(t.numel and t.is_layout("contiguous") for t in given)
    if target.is_cuda:
        return plain and not (op in BENT_ON_GPU and given[0].dtype.bits > 32)
    known = op in NORM_GRADS and _stored(given) and all(t.numel < 2**31 for t in given)
    return known and (plain or (op in CHANNELS and _channels_last(given)))


def expand(graph: Graph, ctx: Context) -> Graph:
    """Write out what no kernel of the target takes whole; what stays takes a sum of gradients
    along."""

    def whole(op: str, types: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> bool:
        if op == "cross_entropy":
            return attrs["reduction"] == "none" or not types[0] or types[0].numel == 0
        return taken_whole(op, types, ctx.target, _is_bent(attrs))

    while True:  # what is written out may hold what is to be written out, too
        before = ctx.fired["written out"]
        graph = _rewritten(graph if ctx.target.is_cuda else _in_one_order(graph, ctx), whole, ctx)
        if ctx.fired["written out"] == before:
            return graph


def _is_bent(attrs: Mapping[str, Any]) -> bool:
    """Whether an activation follows."""
    return str(attrs.get("activation", "none")) != "none"


def _in_one_order(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with all images of a norm of channels in the order of its result, where a kernel
    takes it whole then: to move one is less work than to do without the kernel."""
    if not any(node.op in CHANNELS for node in graph.nodes):
        return graph
    build, names = start(graph, table.infer)
    for node in graph.nodes:
        inputs = [None if v is None else names[v] for v in node.inputs]
        order = graph.types[node.outputs[0]].layout
        if node.op in CHANNELS and order != "strided":
            types = [None if v is None else graph.types[v] for v in node.inputs]
            laid = [_laid(t, order) for t in types]
            if laid != types and taken_whole(node.op, laid, ctx.target, _is_bent(node.attrs)):
                inputs = [
                    v if before == after else build.emit("to_layout", (v,), {"layout": order})[0]
                    for v, before, after in zip(inputs, types, laid, strict=True)
                ]
                ctx.fired["laid in one order"] += 1
        names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))
    for name, value in graph.outputs:
        build.output(name, names[value])
    return build.finish()


def written_out(graph: Graph) -> Graph:
    """``graph`` without operators that only :attr:`OpDef.expand` can differentiate."""
    while any(table.get(n.op).expand and not table.get(n.op).vjp for n in graph.nodes):
        graph = _rewritten(graph, lambda op, types, attrs: bool(table.get(op).vjp), None)
    return graph


def _rewritten(graph: Graph, whole: Whole, ctx: Context | None) -> Graph:
    build, names = start(graph, table.infer)
    fired = {"written out": 0, "sum of gradients joined": 0}
    for node in graph.nodes:
        op = table.get(node.op)
        inputs = [None if v is None else names.get(v) for v in node.inputs]
        if node.outputs[0] in names:
            continue  # a sum that joined the operator before it
        if op.expand is None:
            names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))
            continue
        types = [None if v is None else build.types[v] for v in inputs]
        if not whole(node.op, types, node.attrs):
            ops = Ops(build, node.source)
            padded = [*inputs, *[None] * (len(op.inputs) - len(inputs))]
            syms = [None if v is None else ops.sym(v) for v in padded]
            found = op.expand(ops, syms, node.attrs)
            names.update(zip(node.outputs, (s.name for s in found), strict=True))
            fired["written out"] += 1
            continue
        slot = op.inputs.index(EXTRA) if EXTRA in op.inputs else -1
        free = slot >= 0 and (slot >= len(inputs) or inputs[slot] is None)
        total = _sum_of_first(graph, node) if free else None
        other = None if total is None else _other(total, node.outputs[0])
        added = names.get(other) if other is not None else None
        if total is not None and added and whole(node.op, [build.types[added]], node.attrs):
            inputs = [*inputs[:slot], *[None] * (slot - len(inputs)), added, *inputs[slot + 1 :]]
            outs = build.emit(node.op, inputs, node.attrs, source=node.source)
            names.update(zip(node.outputs, outs, strict=True))
            names[total.output] = outs[0]
            fired["sum of gradients joined"] += 1
        else:
            names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))
    for name, value in graph.outputs:
        build.output(name, names[value])
    if ctx is not None:
        ctx.fired.update(fired)
    return build.finish()


def _laid(t: TensorType | None, order: str) -> TensorType | None:
    """An image in ``order``; all else as it is."""
    return t if t is None or t.rank < 3 or t.is_layout(order) else t.with_layout(order)


def _sum_of_first(graph: Graph, node: Node) -> Node | None:
    """The sum that alone reads the first result of ``node``, if both are of one type."""
    value = node.outputs[0]
    readers = graph.users.get(value, ())
    if len(readers) != 1 or value in graph.output_values or readers[0].op != "add":
        return None
    total = readers[0]
    other = _other(total, value)
    kinds = {graph.types[v] for v in (value, other, total.output)}
    return total if other != value and len(kinds) == 1 else None


def _other(total: Node, value: str) -> str:
    """The operand of a sum that is not ``value``."""
    first, second = total.uses
    return second if first == value else first
