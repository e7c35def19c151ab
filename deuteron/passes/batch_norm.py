"""Batch norm in training takes along the sum and the activation that follow it, and has one
gradient then:

    act(batch_norm_train(x) + residual) → batch_norm_act(x, residual, activation=act)

**Before differentiation** that is all there is to do. **A graph that already contains its
gradient**, from torch's autograd, has gradients of the separate parts, each of which passes over
memory once:

    dz = slope of act at z · grad;  dx, … = batch_norm_act_grad(dz, x, …)
    → dx, …, dz = batch_norm_act_grad(grad, x, …, activation=act)

The slope is recognised by comparing it with what the gradient rule of the activation writes.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Attrs, Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, table
from deuteron.ops.activated import activation_text
from deuteron.ops.batch_norm import told_by_result
from deuteron.ops.opdef import Vjp
from deuteron.passes.combine import activation_after, can_wait, only_reader
from deuteron.passes.context import Context


class _Chain(NamedTuple):
    """A norm with what follows it: ``total`` is the sum that reads its result, if there is one;
    ``last`` is the last node of the chain, and ``activation`` what that computes, or "none"."""

    norm: Node
    total: Node | None
    last: Node
    activation: str = "none"

    @property
    def residual(self) -> str | None:
        if self.total is None:
            return None
        return next(v for v in self.total.uses if v != self.norm.outputs[0])

    @property
    def inputs(self) -> list[str | None]:
        """What batch_norm_act reads in place of the norm."""
        return [*self.norm.inputs, *[None] * (5 - len(self.norm.inputs)), self.residual]

    def write(self, b: Ops, names: dict[str, str]) -> None:
        given = (None if v is None else b.sym(names[v]) for v in self.inputs)
        made = b.batch_norm_act(*given, activation=self.activation, **self.norm.attrs)
        outputs = (self.last.outputs[0], *self.norm.outputs[1:])
        names.update(zip(outputs, (s.name for s in made), strict=True))


def join_batch_norm(graph: Graph) -> Graph:
    """``graph`` with every ``batch_norm_train`` joined with what follows it."""
    ends: dict[int, _Chain] = {}
    for node in graph.nodes:
        if node.op != "batch_norm_train":
            continue
        chain = _chain(graph, node)
        if id(chain.last) in ends:  # the sum of two norms: it goes with the first
            chain = _Chain(node, None, node)
        # the statistics are now made at the end of the chain
        if can_wait(graph, node.outputs[1:], chain.last):
            ends[id(chain.last)] = chain
    if not ends:
        return graph
    inside = {id(n) for c in ends.values() for n in (c.norm, c.total) if n is not None} - set(ends)
    build, names = start(graph, table.infer)
    for node in graph.nodes:
        if id(node) in inside:
            continue
        found = ends.get(id(node))
        if found is None:
            carry(build, names, node, graph)
            continue
        found.write(Ops(build, node.source or found.norm.source), names)
    return finish(build, names, graph)


def _chain(graph: Graph, norm: Node) -> _Chain:
    total = only_reader(graph, norm)
    if total is not None:
        values = (*total.uses, *total.outputs)
        kinds = {(graph.types[v].shape, graph.types[v].dtype) for v in values}
        if total.op != "add" or len(kinds) > 1 or total.uses[0] == total.uses[1]:
            total = None
    after = activation_after(graph, total or norm)
    return _Chain(norm, total, total or norm) if after is None else _Chain(norm, total, *after)


# ---- with a gradient that came along -------------------------------------------------------------


class _Pair(NamedTuple):
    """A norm with what follows it, and its gradient: ``back`` reads ``slope``, which the nodes
    ``inside`` make of ``grad``, the gradient of the chain's result."""

    chain: _Chain
    back: Node
    slope: str
    grad: str
    inside: frozenset[int]

    @property
    def inputs(self) -> list[str | None]:
        """grad, x, mean, rstd, weight, bias, y, residual, as far as the activation asks for
        them."""
        norm, chain = self.chain.norm, self.chain
        params = (*norm.inputs[1:3], None, None)[:2]
        y, residual = None, chain.residual
        if residual is not None and told_by_result(chain.activation):
            y, residual = chain.last.output, None
        return [self.grad, norm.inputs[0], *norm.outputs[3:5], *params, y, residual]

    def write(self, b: Ops, names: dict[str, str]) -> None:
        given = (None if v is None else b.sym(names[v]) for v in self.inputs)
        made = b.batch_norm_act_grad(*given, activation=self.chain.activation)
        outputs = (*self.back.outputs[:3], self.slope)
        names.update(zip(outputs, (s.name for s in made), strict=True))


def join_batch_norm_gradients(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with each norm, and its gradient, joined with what follows the norm."""
    pairs = list(_pairs(graph))
    if not pairs:
        return graph
    forward = {id(p.chain.last): p.chain for p in pairs}
    backward = {id(p.back): p for p in pairs}
    made_at = dict(graph.producer)  # value → the node with which it is made from now on
    for pair in pairs:
        made_at.update(dict.fromkeys(pair.chain.norm.outputs[1:], pair.chain.last))
        made_at[pair.slope] = pair.back
    build, names = start(graph, table.infer)

    def write(node: Node) -> None:
        """Emit a node after what it reads: a gradient may be read before its old place in the
        graph."""
        if node.outputs[0] in names:
            return
        chain, back = forward.get(id(node)), backward.get(id(node))
        reads = chain.inputs if chain else back.inputs if back else node.inputs
        for value in reads:
            if value is not None and value not in names:
                write(made_at[value])
        b = Ops(build, node.source)
        if chain is not None:
            chain.write(b, names)
        elif back is not None:
            back.write(b, names)
            ctx.fired["gradient of a norm with what follows it"] += 1
        else:
            carry(build, names, node, graph)

    gone = {id(n) for p in pairs for n in (p.chain.norm, p.chain.total) if n is not None}
    gone = gone.union(*(p.inside for p in pairs))
    for node in graph.nodes:
        if id(node) not in gone:
            write(node)
    return finish(build, names, graph)


def _pairs(graph: Graph) -> Iterator[_Pair]:
    taken: set[int] = set()  # a sum of two norms goes with one of them
    for back in graph.nodes:
        if back.op != "batch_norm_act_grad" or back.attrs["activation"] != "none":
            continue
        norm = graph.producer.get(back.uses[2])
        given = None if norm is None else (norm.op, norm.inputs[0], *norm.outputs[3:5])
        if norm is None or given != ("batch_norm_train", *back.uses[1:4]):
            continue
        for chain in _chains(graph, norm):
            found = _pulled_from(graph, back.uses[0], chain)
            if found is None or {id(chain.last), id(norm)} & taken:
                continue
            if back.outputs[3] in graph.users or not can_wait(graph, norm.outputs[1:], chain.last):
                continue
            taken |= {id(chain.last), id(norm)}
            yield _Pair(chain, back, back.uses[0], *found)
            break


def _chains(graph: Graph, norm: Node) -> Iterator[_Chain]:
    """Yield what may follow a norm, even if others read the values in between."""
    y, types = norm.outputs[0], graph.types
    for reader in graph.users.get(y, ()):
        text = activation_text(reader.op, reader.attrs)
        if text is not None:
            yield _Chain(norm, None, reader, text)
        if reader.op != "add" or len({(types[v].shape, types[v].dtype) for v in reader.uses}) > 1:
            continue
        if reader.uses[0] != reader.uses[1]:
            for last in graph.users.get(reader.output, ()):
                text = activation_text(last.op, last.attrs)
                if text is not None:
                    yield _Chain(norm, reader, last, text)


def _pulled_from(graph: Graph, value: str, chain: _Chain) -> tuple[str, frozenset[int]] | None:
    """If ``value`` is the gradient of the activation's result times the slope of the activation,
    return that gradient and the nodes that compute ``value`` from it. Nothing else may read what
    these nodes make, nor what lies before the activation."""
    z, y = chain.last.uses[0], chain.last.output
    rule = _slope(chain.last.op, chain.last.attrs, graph.types[z], graph.types[value])
    found, inside = {"z": z, "y": y}, dict[int, Node]()
    if not _matches(rule, rule.outputs[0][1], graph, value, found, inside) or "g" not in found:
        return None
    between = {z, chain.norm.outputs[0], *(v for n in inside.values() for v in n.outputs)} - {value}
    known = inside.keys() | {id(n) for n in (chain.total, chain.last) if n is not None}
    readers = (reader for v in between for reader in graph.users.get(v, ()))
    if between & graph.output_values or any(id(reader) not in known for reader in readers):
        return None
    return found["g"], frozenset(inside)


@lru_cache(maxsize=256)
def _slope(op: str, attrs: Attrs, z: TensorType, grad: TensorType) -> Graph:
    """What the gradient rule of an activation writes, as a graph."""
    build = GraphBuilder(table.infer, op)
    b, rule = Ops(build), table.get(op).vjp
    g, given, result = (b.sym(build.input(n, t)) for n, t in (("g", grad), ("z", z), ("y", z)))
    assert rule is not None
    (found,) = rule(b, Vjp((given,), (result,), (g,), attrs, (True,)))
    assert found is not None
    found.output("slope")
    return build.finish()


def _matches(
    rule: Graph, at: str, graph: Graph, value: str, found: dict[str, str], inside: dict[int, Node]
) -> bool:
    """Whether ``value`` is computed the way ``at`` is in ``rule``. ``found`` collects what stands
    for the rule's inputs, ``inside`` the nodes."""
    if at in rule.inputs:
        return found.setdefault(at, value) == value
    if at in rule.constants or value in graph.constants:
        return rule.constants.get(at) == graph.constants.get(value)
    wanted, made = rule.producer[at], graph.producer.get(value)
    if made is None or (made.op, made.attrs) != (wanted.op, wanted.attrs):
        return False
    inside[id(made)] = made
    pairs = zip(wanted.uses, made.uses, strict=False)
    alike = len(wanted.uses) == len(made.uses)
    return alike and all(_matches(rule, a, graph, v, found, inside) for a, v in pairs)
