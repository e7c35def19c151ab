"""Composite operators, such as the gradients of a norm, are written out in simpler operators
wherever that is cheaper.

Kept whole, one kernel makes all their results in one pass over memory; written out, generated code
does the work and fuses it with the neighbours. This file does not know which is cheaper: the
context's ``price`` asks the engines of the target. Images may also be converted to one memory order
first, or to row-major order, where that lets a kernel take the operator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.emit import Ops, Sym
from deuteron.passes.cleanup import fold_constants
from deuteron.passes.context import Context

Types = Sequence[TensorType | None]
Form = Callable[[Ops, Sequence[Sym | None], str, Mapping[str, Any]], Sequence[Sym]]
# another form must cost less than this share of the whole form: estimates of different engines are
# off by as much
CLEARLY = 0.8
EXTRA = "extra?"  # a slot for a tensor that is added to the first result


def _whole(b: Ops, ins: Sequence[Sym | None], op: str, attrs: Mapping[str, Any]) -> Sequence[Sym]:
    made = b.call(op, *ins, **attrs)
    return made if isinstance(made, tuple) else (made,)


def _laid(b: Ops, ins: Sequence[Sym | None], op: str, attrs: Mapping[str, Any], order: str) -> Any:
    """Emit the whole operator, with all images converted to one memory order first and its results
    converted to the orders that they were to have."""
    wanted = table.infer(op, [None if s is None else s.type for s in ins], attrs)[1]
    if any(t.layout == "strided" for t in wanted):
        return _whole(b, ins, op, attrs)

    def laid(s: Sym, order: str) -> Sym:
        return s if s.rank < 3 or s.type.is_layout(order) else b.to_layout(s, order)

    order = order or wanted[0].layout
    made = _whole(b, [None if s is None else laid(s, order) for s in ins], op, attrs)
    return [laid(y, t.layout) for y, t in zip(made, wanted, strict=True)]


def _written_out(
    b: Ops, ins: Sequence[Sym | None], op: str, attrs: Mapping[str, Any]
) -> Sequence[Sym]:
    rule = table.get(op).expand
    assert rule is not None
    return rule(b, ins, attrs)


FORMS: dict[str, Form] = {"whole": _whole, "laid in one order": partial(_laid, order="")}
FORMS |= {"laid in rows": partial(_laid, order="contiguous"), "written out": _written_out}


def cheapest(
    op: str, types: Types, known: tuple[int, ...], attrs: Mapping[str, Any], ctx: Context
) -> str:
    """Return the name of the cheapest of :data:`FORMS` for operands of these types. ``known`` are
    the places of constant operands, which matter because kernels may want a weight ahead of
    time."""
    if ctx.price is None:
        return "whole"
    key = (op, tuple(types), known, table.infer(op, types, attrs)[0])
    if key not in ctx.forms:
        ctx.forms[key] = "whole"  # for the recursion, if the written-out form holds the same node
        best, least = "whole", math.inf
        for name, form in FORMS.items():
            price = ctx.price(_alone(form, *key, ctx), least)
            if price < least:
                best, least = name, CLEARLY * price if name == "whole" else price
        ctx.forms[key] = best
    return ctx.forms[key]


def _alone(
    form: Form,
    op: str,
    types: Types,
    known: tuple[int, ...],
    attrs: Mapping[str, Any],
    ctx: Context,
) -> Graph:
    """Return one operator in one form as a graph of its own, to be priced. Its constants are meta
    tensors, without numbers."""
    build = GraphBuilder(table.infer, op)
    b = Ops(build)

    def given(i: int, t: TensorType) -> Sym:
        if i not in known:
            return b.sym(build.input(f"x{i}", t))
        kind = t.dtype.torch
        empty = torch.empty_strided(t.shape, t.strides, dtype=kind, device="meta")
        return b.sym(build.constant(empty, f"x{i}"))

    ins = [None if t is None else given(i, t) for i, t in enumerate(_padded(op, types))]
    for i, s in enumerate(form(b, ins, op, attrs)):
        s.output(str(i))
    made = expand(build.finish(), ctx) if form is _written_out else build.finish()
    # as it will be in the real graph
    folded = fold_constants(made, Context(ctx.target, ctx.policy))
    # the text of a region spells out scalar constants, and a meta scalar has no number to spell out
    nameless = any(c.data.is_meta and not c.type.rank for c in folded.constants.values())
    return made if nameless else folded


def _padded(op: str, values: Sequence[Any]) -> list[Any]:
    """Append None for optional inputs that are left out at the end."""
    return [*values, *[None] * (len(table.get(op).inputs) - len(values))]


def expand(graph: Graph, ctx: Context) -> Graph:
    """Return ``graph`` with every composite operator in its cheapest form. An operator that stays
    whole takes along the sum of its first result with another gradient."""
    if not any(table.get(node.op).expand for node in graph.nodes):
        return graph
    build, names = start(graph, table.infer)
    again = False
    for node in graph.nodes:
        if node.outputs[0] in names:
            continue  # this sum joined the operator before it
        if table.get(node.op).expand is None:
            carry(build, names, node, graph)
            continue
        inputs = [None if v is None else names[v] for v in node.inputs]
        types = [None if v is None else build.types[v] for v in inputs]
        pairs = enumerate(zip(types, inputs, strict=True))
        known = tuple(i for i, (t, v) in pairs if t and t.rank and v in build.constants)
        form = cheapest(node.op, types, known, node.attrs, ctx)
        total = _joining_sum(graph, node, names) if form == "whole" else None
        if total is not None:
            inputs = _with_extra(node, inputs, names[_other(total, node.outputs[0])])
            ctx.fired["sum of gradients joined"] += 1
        elif form == "whole":
            carry(build, names, node, graph)
            continue
        else:
            ctx.fired[form] += 1
            again = again or form == "written out"
        names.update(_emitted(build, node, FORMS[form], inputs))
        if total is not None:
            names[total.output] = names[node.outputs[0]]
    done = finish(build, names, graph)
    return expand(done, ctx) if again else done  # what is written out may hold such operators, too


def _emitted(
    build: GraphBuilder, node: Node, form: Form, inputs: Sequence[str | None]
) -> dict[str, str]:
    """Emit a node in one form over new inputs; return old → new names of its results."""
    b = Ops(build, node.source)
    syms = [None if v is None else b.sym(v) for v in _padded(node.op, inputs)]
    made = form(b, syms, node.op, node.attrs)
    return dict(zip(node.outputs, (s.name for s in made), strict=True))


def written_out(graph: Graph) -> Graph:
    """Return ``graph`` with every operator written out that only :attr:`OpDef.expand` can
    differentiate."""

    def is_written(op: str) -> bool:
        return table.get(op).expand is not None and table.get(op).vjp is None

    while any(is_written(node.op) for node in graph.nodes):
        build, names = start(graph, table.infer)
        for node in graph.nodes:
            if not is_written(node.op):
                carry(build, names, node, graph)
                continue
            inputs = [None if v is None else names[v] for v in node.inputs]
            names.update(_emitted(build, node, _written_out, inputs))
        graph = finish(build, names, graph)
    return graph


# ---- a sum of gradients that joins the operator before it --------------------------------------


def _joining_sum(graph: Graph, node: Node, names: Mapping[str, str]) -> Node | None:
    """Return the sum that is the only reader of ``node``'s first result, if all its types agree,
    the operator has a slot for an addend, and the other operand has been made by then; else
    None."""
    slots = table.get(node.op).inputs
    at = slots.index(EXTRA) if EXTRA in slots else -1
    if at < 0 or (at < len(node.inputs) and node.inputs[at] is not None):
        return None
    value = node.outputs[0]
    readers = graph.users.get(value, ())
    if len(readers) != 1 or value in graph.output_values or readers[0].op != "add":
        return None
    total = readers[0]
    other = _other(total, value)
    kinds = {graph.types[v] for v in (value, other, total.output)}
    return total if other != value and other in names and len(kinds) == 1 else None


def _with_extra(node: Node, inputs: Sequence[str | None], extra: str) -> list[str | None]:
    given = _padded(node.op, inputs)
    given[table.get(node.op).inputs.index(EXTRA)] = extra
    return given


def _other(total: Node, value: str) -> str:
    """The operand of a sum that is not ``value``."""
    first, second = total.uses
    return second if first == value else first
