"""Housekeeping: dead code, common subexpressions, constants computed ahead of time."""

from collections.abc import Mapping

import torch

from deuteron.ir.graph import Constant, Graph, Node, place_of
from deuteron.ir.rewrite import finish, start
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.ops.evaluate import run_node
from deuteron.ops.opaque import is_random
from deuteron.passes.context import Context

# in elements; larger folded constants cost more memory than they save, unless they replace a
# constant at least as large
FOLD_LIMIT = 1 << 26


def dead_code(graph: Graph, ctx: Context | None = None) -> Graph:
    """Drop nodes and constants that no output needs. Inputs stay: they are the signature."""
    kept, live = graph.needed()
    constants = {v: c for v, c in graph.constants.items() if v in live}
    if ctx is not None:
        ctx.fired["unused node"] += len(graph.nodes) - len(kept)
        ctx.fired["unused constant"] += len(graph.constants) - len(constants)
    return graph.only(kept, graph.inputs, graph.outputs, constants)


def common_subexpressions(graph: Graph, ctx: Context) -> Graph:
    """Compute equal things once. Constants are equal if they share storage or a small value."""
    names = {v: v for v in graph.inputs}
    seen: dict[object, str] = {}
    constants: dict[str, Constant] = {}
    for value, const in graph.constants.items():
        key: object = (place_of(const.data), const.type)
        if const.type.numel <= 16 and not const.data.is_meta:
            key = ("value", const.type, repr(const.data.tolist()))
        first = seen.setdefault(key, value)
        names[value] = first
        constants[first] = graph.constants[first]
    nodes: list[Node] = []
    known: dict[object, Node] = {}
    for node in graph.nodes:
        inputs = tuple(None if v is None else names[v] for v in node.inputs)
        key = (node.op, inputs, node.attrs)
        same = None if _is_its_own(node) else known.get(key)
        if same is not None:
            ctx.fired["common subexpression"] += 1
            names.update(zip(node.outputs, same.outputs, strict=True))
            continue
        moved = Node(node.op, inputs, node.outputs, node.attrs, node.source)
        known[key] = moved
        nodes.append(moved)
        names.update((o, o) for o in node.outputs)
    outputs = tuple((name, names[value]) for name, value in graph.outputs)
    return graph.only(nodes, graph.inputs, outputs, constants)


def fold_constants(graph: Graph, ctx: Context) -> Graph:
    """Evaluate, once, every node whose inputs are all constants. An expanded constant counts as a
    constant where the result is no larger than another constant that the node reads."""
    build, names = start(graph, table.infer)

    def expanded(value: str) -> torch.Tensor | None:
        made = build.producer.get(value)
        small = made is not None and made.op == "expand" and made.uses[0] in build.constants
        if made is None or not small:
            return None
        return build.constants[made.uses[0]].data.expand(build.types[value].shape)

    for node in graph.nodes:
        inputs = tuple(None if v is None else names[v] for v in node.inputs)
        present = [v for v in inputs if v is not None]
        known = {v: build.constants[v].data for v in present if v in build.constants}
        held, made = [build.types[v] for v in known], graph.out_types(node)
        no_more = sum(t.nbytes for t in made) <= max((t.nbytes for t in held), default=0)
        size = sum(t.numel for t in made)
        if len(known) < len(set(present)) and size <= max((t.numel for t in held), default=0):
            known |= {v: data for v in present if (data := expanded(v)) is not None}
        if (
            present
            and node.op != "expand"  # storing what can be broadcast wastes memory
            and len(known) == len(set(present))
            and (no_more or size <= FOLD_LIMIT)
            and not _is_its_own(node)
        ):
            here = _on_one_device(known)
            with torch.no_grad():
                results = run_node(node, [None if v is None else here[v] for v in inputs])
            ctx.fired["constant folded"] += 1
            for old, result in zip(node.outputs, results, strict=True):
                names[old] = build.constant(Constant(result), old)
            continue
        names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))
    return finish(build, names, graph)


def _on_one_device(known: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the constants on one device: those that a pass made on the CPU move to where a model's
    constants are. If one of them is on the meta device, without numbers, all go there."""
    devices = {t.device for t in known.values() if t.dim()}
    away = [d for d in devices if d.type != "cpu"]
    if len(devices) < 2 or not away:
        return known
    at = next((d for d in away if d.type == "meta"), away[0])
    return {v: t.to(at) if t.dim() else t for v, t in known.items()}


def _is_its_own(node: Node) -> bool:
    """Whether each call must stay a call of its own, because it draws random numbers or because all
    ranks take part in it."""
    if node.op in COLLECTIVES:
        return True
    return node.op == "aten" and is_random(node.attrs["target"])
