"""The graph of a training step, cut in two: what runs before the gradient is known, and what after.

The second half reads what the first saves, and computes the rest again. What to save is a minimum
cut: of all sets of values from which the second half can compute what it needs by elementwise work
and movement alone, the set of the fewest bytes. Each value counts once for reading it, and once
more if the first half would not write it otherwise. Norms, products, sums and random numbers are
not computed again, and neither is a value that products read in both halves: it is in memory
anyway. Of a view the base is saved, because it would have to be kept for the view. Nor is a value
computed again that both halves would write, if both compute from it further values that they write,
such as the sums of residuals, one after the other: all of such a chain would be in memory at once
when its end is read.

A limit on the saved bytes lets more be computed again, starting with what costs the least time for
its bytes: activation checkpointing, by price.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deuteron.ir.graph import Graph, Node
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.ops.opaque import may_show
from deuteron.ops.opdef import Fusion
from deuteron.passes.fuse import fuse

CHEAP = (Fusion.ELEMENTWISE, Fusion.BROADCAST, Fusion.INJECTIVE)
ALONE = (Fusion.COMPLEX, Fusion.OPAQUE)  # read their operands from memory
ONCE = COLLECTIVES | {"aten"}  # other ranks take part, or it may draw random numbers
Price = Callable[[Node], float]


@dataclass(frozen=True)
class Halves:
    """``saved``: values that ``forward`` makes, or is given, and ``backward`` reads; ``kept``: the
    bytes of those that it makes; ``again``: the nodes that both halves compute; ``dying``: values
    that ``forward`` makes only for ``backward``, each in memory of its own."""

    forward: Graph
    backward: Graph
    saved: tuple[str, ...]
    kept: int
    again: tuple[Node, ...]
    dying: frozenset[str]


class Split:
    """A graph to be cut. ``first``: the names of the outputs that the first half makes; ``later``:
    the inputs that only the second half has. If there are none, the second half is whatever those
    outputs do not need, and the gradient of a loss that is computed together with the loss belongs
    to the first half. ``behind``: values that belong to the second half in any case."""

    def __init__(
        self,
        graph: Graph,
        first: Collection[str],
        later: Collection[str],
        behind: Collection[str] = (),
    ) -> None:
        self.graph, self.later = graph, set(later)
        self.late = {*later, *behind}  # these, and all values that depend on them
        for node in graph.nodes:
            if not self.late.isdisjoint(node.uses):
                self.late.update(node.outputs)
        self.ahead = tuple((n, v) for n, v in graph.outputs if n in first)
        self.behind = tuple((n, v) for n, v in graph.outputs if n not in first)
        self.once = set[str]()  # values that are not computed again
        if not later:
            self._begin_behind_losses()
        self._usual = self._cut(frozenset())
        while links := self._links(self._usual):
            self.once |= links
            self._usual = self._cut(frozenset())

    def _begin_behind_losses(self) -> None:
        """Decide what is late where no input is: everything that the first results do not need.
        Only cheap work on a further result of a reduction that they need stays in the first half,
        because the reduction can do it on the way to memory."""
        needed = {id(node) for node in self._only(self.ahead).needed()[0]}
        for node in (n for n in self.graph.nodes if id(n) not in needed):
            made = self.graph.producer.get((*node.uses, "")[0])
            of = made is not None and id(made) in needed and _kind(made) is Fusion.REDUCTION
            alone = of and len(self.graph.users[node.uses[0]]) == 1 and _kind(node) in CHEAP
            (self.once if alone else self.late).update(node.outputs)

    def halves(self, limit: float | None = None, price: Price | None = None) -> Halves:
        """Return the cut. With a ``limit`` on the bytes that the first half keeps for the second,
        return a cut within the limit if there is one, else the one that keeps the least."""
        found = self._usual
        if limit is None or price is None or found.kept <= limit:
            return found
        order = self.by_price(price)
        low, high = 0, len(order)
        while low < high:  # the fewest that suffice
            some = (low + high) // 2
            if self._cut(frozenset(order[:some])).kept <= limit:
                high = some
            else:
                low = some + 1
        return self._cut(frozenset(order[:low]))

    def curve(self, price: Price) -> list[tuple[int, float]]:
        """Pairs of the bytes kept and the seconds it takes to compute the rest again, in five steps
        from the most bytes to the least."""
        order, found = self.by_price(price), list[tuple[int, float]]()
        for i in range(5):
            cut = self._cut(frozenset(order[: len(order) * i // 4]))
            found.append((cut.kept, sum(map(price, cut.again))))
        return found

    def by_price(self, price: Price) -> list[str]:
        """Values that could also be computed again, those that cost least time for their bytes
        first."""
        nodes = [n for n in self.graph.nodes if n.op not in ONCE and n.outputs[0] not in self.late]
        nodes.sort(key=lambda n: price(n) / max(sum(map(self._bytes, n.outputs)), 1))
        return [out for node in nodes for out in node.outputs]

    # ---- the cut

    def _cut(self, allowed: frozenset[str]) -> Halves:
        """``allowed``: values that may be computed again, besides those that always may."""
        saved = self._minimum(allowed)
        graph = self.graph
        nodes, read = self._only(self.behind).needed(saved)
        values = {v for v in read | {v for _, v in self.behind} if v in saved}
        order = (*graph.inputs, *(out for node in graph.nodes for out in node.outputs))
        kept = tuple(v for v in order if v in values)
        made = tuple(v for v in kept if v not in graph.inputs)
        ahead = (*self.ahead, *((f"saved_{v}", v) for v in made))
        first, reads = self._only(ahead).needed()
        reads |= {v for _, v in ahead}
        early = tuple(v for v in graph.inputs if v in reads)
        late = (*kept, *(v for v in graph.inputs if v in self.later and v in read))
        twice = {id(n) for n in first}
        return Halves(
            graph.only(first, early, ahead, self._constants(reads)),
            graph.only(nodes, late, self.behind, self._constants(read | values)),
            kept,
            sum(map(self._bytes, made)),
            tuple(n for n in nodes if id(n) in twice),
            _alone(graph, made, [v for _, v in ahead], set(early)),
        )

    def _only(self, outputs: tuple[tuple[str, str], ...]) -> Graph:
        graph = self.graph
        return Graph(graph.name, graph.inputs, outputs, graph.nodes, graph.types, graph.constants)

    def _constants(self, read: Collection[str]) -> dict[str, Any]:
        return {v: c for v, c in self.graph.constants.items() if v in read}

    def _minimum(self, allowed: frozenset[str]) -> set[str]:
        """The values to save."""
        import networkx

        flow, seen = networkx.DiGraph(), set[str]()
        flow.add_nodes_from(("source", "sink"))
        wanted = list(self._wanted)
        for value in wanted:
            # an edge without a capacity has infinite capacity
            flow.add_edge(f"{value} out", "sink")
        while wanted:
            value = wanted.pop()
            if value in seen:
                continue
            seen.add(value)
            node = self.graph.producer.get(value)
            of: dict[str, Any] = {} if self._is_view(node) else {"capacity": self._cost(value)}
            flow.add_edge(f"{value} in", f"{value} out", **of)
            if node is None or not self._again(node, value, allowed):
                flow.add_edge("source", f"{value} in")
                continue
            needs = [v for v in node.uses if v not in self.graph.constants]
            for read in needs:
                flow.add_edge(f"{read} out", f"{value} in")
            wanted += needs
        if not seen:
            return set()
        _, (reached, _) = networkx.minimum_cut(flow, "source", "sink")
        return {v for v in seen if f"{v} in" in reached and f"{v} out" not in reached}

    @cached_property
    def _wanted(self) -> list[str]:
        """The values outside the late part that the second half reads."""
        nodes, _ = self._only(self.behind).needed()
        late = (n for n in nodes if n.outputs[0] in self.late)
        read = dict.fromkeys(v for node in late for v in node.uses)
        read.update(dict.fromkeys(v for _, v in self.behind))
        return [v for v in read if v not in self.late and v not in self.graph.constants]

    def _again(self, node: Node, value: str, allowed: frozenset[str]) -> bool:
        """Whether a value may be computed a second time."""
        if node.op in ONCE:
            return False
        if value in allowed or self._is_view(node):
            return True
        if table.get(node.op).fusion not in CHEAP or value in self.once:
            return False
        readers = self.graph.users.get(value, ())
        alone = [self.is_late(n) for n in readers if _kind(n) in ALONE]
        return not (True in alone and False in alone)

    def _links(self, cut: Halves) -> set[str]:
        """Values that both halves write, and from which both compute further values that they
        write."""
        twice = {v: node for node in cut.again for v in node.outputs if not self._is_view(node)}
        for half in (cut.forward, cut.backward):
            written = {v for region in fuse(half)[0] for v in region.outputs}
            twice = {v: node for v, node in twice.items() if v in written}
        made = {v: node for node in cut.again for v in node.outputs}
        found, asked, seen = set[str](), [v for n in twice.values() for v in n.uses], set[str]()
        while asked:
            value = asked.pop()
            if value in twice:
                found.add(value)
            elif value in made and value not in seen:
                asked += made[value].uses
            seen.add(value)
        return found

    def _is_view(self, node: Node | None) -> bool:
        """Whether a node only shows, as a view or a chain of views, a value that is in memory in
        any case."""
        while node is not None and node.op not in ONCE:
            shown = table.get(node.op).shows(self.graph.in_types(node), self.graph.out_types(node))
            if not shown:
                return False
            base = self.graph.producer.get(node.uses[0])
            if base is None or _kind(base) not in CHEAP:
                return True
            node = base
        return False

    def is_late(self, node: Node) -> bool:
        """Whether a node belongs to the second half alone."""
        return node.outputs[0] in self.late

    def _cost(self, value: str) -> int:
        node = self.graph.producer.get(value)
        written = node is None or _kind(node) not in CHEAP or value in self._results
        readers = (n for n in self.graph.users.get(value, ()) if not self.is_late(n))
        written = written or any(_kind(n) not in CHEAP for n in readers)
        return self._bytes(value) * (1 if written else 2) + 1

    @cached_property
    def _results(self) -> set[str]:
        return {v for _, v in self.ahead}

    def _bytes(self, value: str) -> int:
        return self.graph.types[value].nbytes


def _alone(
    graph: Graph, made: Collection[str], leaving: Collection[str], given: Collection[str]
) -> frozenset[str]:
    """Of the values ``made``, return those that share their memory neither with an input ``given``
    nor with another value that is ``leaving``."""

    def bases(value: str) -> set[str]:
        found, asked = set[str](), [value]
        while asked:
            node = graph.producer.get(v := asked.pop())
            if node is not None and node.op == "aten" and may_show(node.attrs["target"]):
                asked += node.uses
            elif node is not None and node.op != "aten" and table.get(node.op).view:
                asked.append(node.uses[0])
            found.add(v)
        return found

    of = {value: bases(value) for value in leaving}
    sharing = Counter(v for value in leaving for v in of[value])
    shared = {v for v, count in sharing.items() if count > 1} | set(given)
    return frozenset(v for v in made if of[v].isdisjoint(shared))


def _kind(node: Node) -> Fusion:
    return Fusion.OPAQUE if node.op == "aten" else table.get(node.op).fusion
