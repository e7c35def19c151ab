"""Operators that stand for several, such as the gradients of a norm, written out in simpler ones
wherever that is cheaper.

Whole, a kernel makes all their results in one pass over memory; written out, generated code does,
and fuses with the neighbours. Which of them is cheaper is not known here: the context's ``price``
asks the engines of the target, whoever they are. Images may also be laid in one memory order first,
or in rows, where that lets a kernel in.
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
CLEARLY = 0.8  # of the price as a whole: estimates of different engines stray by so much
EXTRA = "extra?"  # an input that is added to the first result


def _whole(b: Ops, ins: Sequence[Sym | None], op: str, attrs: Mapping[str, Any]) -> Sequence[Sym]:
    made = b.call(op, *ins, **attrs)
    return made if isinstance(made, tuple) else (made,)


def _laid(b: Ops, ins: Sequence[Sym | None], op: str, attrs: Mapping[str, Any], order: str) -> Any:
    """Whole, with all images in one memory order first, and its results as they were to be."""
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
    """The name of the cheapest of :data:`FORMS` for operands of these types, of which some are
    ``known``: kernels may want a weight ahead."""
    if ctx.price is None:
        return "whole"
    key = (op, tuple(types), known, table.infer(op, types, attrs)[0])
    if key not in ctx.forms:
        ctx.forms[key] = "whole"  # for what it is written out with, if that is of its kind
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
    """One operator in one form, as a graph of its own. What is known has no numbers there."""
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
    folded = fold_constants(made, Context(ctx.target, ctx.policy))  # as it will be
    # a number of its own would be part of a region's text
    nameless = any(c.data.is_meta and not c.type.rank for c in folded.constants.values())
    return made if nameless else folded


def _padded(op: str, values: Sequence[Any]) -> list[Any]:
    """With None for optional inputs that are left out at the end."""
    return [*values, *[None] * (len(table.get(op).inputs) - len(values))]


def expand(graph: Graph, ctx: Context) -> Graph:
    """Every operator that stands for several in its cheapest form; one that stays whole takes the
    sum of its first result with another gradient along."""
    if not any(table.get(node.op).expand for node in graph.nodes):
        return graph
    build, names = start(graph, table.infer)
    again = False
    for node in graph.nodes:
        if node.outputs[0] in names:
            continue  # a sum that joined the operator before it
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
    """A node in one form over new inputs: what stands for its results."""
    b = Ops(build, node.source)
    syms = [None if v is None else b.sym(v) for v in _padded(node.op, inputs)]
    made = form(b, syms, node.op, node.attrs)
    return dict(zip(node.outputs, (s.name for s in made), strict=True))


def written_out(graph: Graph) -> Graph:
    """``graph`` without operators that only :attr:`OpDef.expand` can differentiate."""

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
    """The sum that alone reads the first result of ``node``, if both are of one type, the operator
    can add it, and the other operand is there by then."""
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
