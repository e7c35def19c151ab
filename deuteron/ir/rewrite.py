"""Rewriting by named rules: one walk emits a new graph and offers each node to the rules first."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deuteron.errors import GraphError
from deuteron.ir.builder import GraphBuilder, Infer
from deuteron.ir.graph import Graph, Node, number_of

Apply = Callable[["Rewriter", Node], "Sequence[str] | None"]


@dataclass(frozen=True)
class Rule:
    """A named local change.

    ``apply(rw, node)`` sees ``node`` with its inputs already rewritten. It returns the values
    that stand for the node's outputs (emitting what it needs through ``rw``), or None when the
    rule does not fit. It must not emit anything before it is sure.
    """

    name: str
    ops: tuple[str, ...]  # the operators it looks at; ("*",) for all
    apply: Apply


@dataclass
class Rewriter:
    """What a rule works with: the graph so far, and how often values will be read."""

    build: GraphBuilder
    old: Graph
    reads: dict[str, int]  # new value → readers in the old graph (outputs count as readers)
    where: str = ""
    applied: Counter[str] = field(default_factory=Counter)

    def emit(
        self, op: str, inputs: Sequence[str | None], attrs: dict[str, object] | None = None
    ) -> str:
        """Emit a one-result operation, marked with the source of the node being rewritten."""
        (out,) = self.build.emit(op, inputs, attrs, source=self.where)
        return out

    def made_by(self, value: str | None, *ops: str) -> Node | None:
        """The node behind ``value`` if it is one of ``ops`` (any, if none are given)."""
        node = self.build.producer.get(value) if value is not None else None
        return node if node is not None and (not ops or node.op in ops) else None

    def only_use(self, value: str) -> bool:
        """Whether the node being rewritten is the only reader of ``value``."""
        return self.reads.get(value, 0) <= 1

    def is_constant(self, value: str | None) -> bool:
        return value is not None and value in self.build.constants

    def scalar(self, value: str | None) -> float | int | bool | None:
        return number_of(self.build.constants, value)


def rewrite(
    graph: Graph, rules: Sequence[Rule], infer: Infer, rounds: int = 8
) -> tuple[Graph, Counter[str]]:
    """Apply ``rules`` until none fits (or ``rounds`` walks); also return how often each fired."""
    table: dict[str, list[Rule]] = {}
    everywhere = [rule for rule in rules if "*" in rule.ops]
    for rule in rules:
        for op in rule.ops:
            table.setdefault(op, []).append(rule)
    total: Counter[str] = Counter()
    for _ in range(rounds):
        walked, applied = _walk(graph, table, everywhere, infer)
        if not applied:
            break  # return the same object, so that the caller can tell that nothing changed
        graph = walked
        total += applied
    return graph, total


def start(graph: Graph, infer: Infer) -> tuple[GraphBuilder, dict[str, str]]:
    """A builder that already holds the inputs and constants of ``graph``, and the name map."""
    build = GraphBuilder(infer, graph.name)
    for value in graph.inputs:
        build.input(value, graph.types[value])
    for value, constant in graph.constants.items():
        build.constant(constant, value)
    return build, {v: v for v in (*graph.inputs, *graph.constants)}


def continued(graph: Graph, infer: Infer) -> GraphBuilder:
    """A builder that holds the inputs, constants and nodes of ``graph``."""
    build, _ = start(graph, infer)
    for node in graph.nodes:
        build.copy(node, node.inputs, graph.out_types(node))
    return build


def carry(build: GraphBuilder, names: dict[str, str], node: Node, graph: Graph) -> None:
    """Append ``node`` of ``graph`` unchanged: it reads the values that stand for its inputs in
    ``names``, which then also gets the names of its results."""
    inputs = [None if v is None else names[v] for v in node.inputs]
    names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))


def finish(build: GraphBuilder, names: dict[str, str], graph: Graph) -> Graph:
    """Finish ``build`` with the outputs of ``graph``."""
    for name, value in graph.outputs:
        build.output(name, names[value])
    return build.finish()


def _walk(
    graph: Graph, table: dict[str, list[Rule]], everywhere: list[Rule], infer: Infer
) -> tuple[Graph, Counter[str]]:
    build, names = start(graph, infer)
    reads = {v: len(nodes) for v, nodes in graph.users.items()}
    for _, value in graph.outputs:
        reads[value] = reads.get(value, 0) + 1
    rw = Rewriter(build, graph, {v: reads.get(v, 0) for v in names})
    for node in graph.nodes:
        inputs = tuple(None if v is None else names[v] for v in node.inputs)
        moved = node
        if inputs != node.inputs:
            moved = Node(node.op, inputs, node.outputs, node.attrs, node.source)
        rw.where = node.source
        results: Sequence[str] | None = None
        for rule in (*table.get(node.op, ()), *everywhere):
            results = rule.apply(rw, moved)
            if results is not None:
                rw.applied[rule.name] += 1
                _same_meaning(rule, graph, node, build, results)
                break
        if results is None:
            results = build.follow(node, inputs, graph)
        for old, new in zip(node.outputs, results, strict=True):
            names[old] = new
            # a value that stands for several is read by the readers of all
            rw.reads[new] = rw.reads.get(new, 0) + reads.get(old, 0)
    return finish(build, names, graph), rw.applied


def _same_meaning(
    rule: Rule, graph: Graph, node: Node, build: GraphBuilder, results: Sequence[str]
) -> None:
    """A rule may change the memory order of a value, never its shape or element type."""
    for old, new in zip(node.outputs, results, strict=True):
        before, after = graph.types[old], build.types[new]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            wrong = f"the rule {rule.name!r} turned {before} into {after}"
            remedy = "this is a fault in the rule: it must return None there"
            raise GraphError(wrong, where=node.source or f"{node.op} → {old}", remedy=remedy)
