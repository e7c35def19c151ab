"""Concatenation without a copy: whatever makes a part writes it where the whole will lie.

A value may lie in the memory of another; :class:`Spot` says in which, at what offset, and with
which strides. From the last concatenation to the first, each whole is given memory, its own or a
place in a larger whole, and each part its place in that. So the layers of a dense block, each of
which reads all that came before it, share one buffer: what one of them reads is the beginning of
what the next one reads.

A part is copied to its place where it cannot be written there: an input of the graph, a constant, a
view of something else, a value that leaves the graph, that lies in another order or in another
whole, or that comes twice. What is left of the concatenation, ``concat_in_place``, moves nothing.

Whether that is cheaper depends on which kernels can write with gaps, and which can read so;
``plan/in_place.py`` asks the engines.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from deuteron.ir.graph import Graph, Node
from deuteron.ir.types import Shape, TensorType
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.passes.cleanup import dead_code

CONCAT, IN_PLACE = "concat", "concat_in_place"
SIDE_BY_SIDE = "parts of a whole are written side by side, and read from there"


@dataclass(frozen=True)
class Spot:
    """Where a value lies: ``offset`` elements into the memory of ``buffer``, with these strides."""

    buffer: str
    offset: int
    strides: Shape


@dataclass
class Placed:
    """A graph in which parts of concatenations lie in the memory of the whole.

    ``plain``: the graph as it was; ``spots``: where the parts and the wholes lie; ``wholes``:
    buffer → the concatenations that move nothing; ``copies``: a copy of a part → the buffer that it
    goes to; ``apart``: values that the caller wanted to be copied."""

    plain: Graph
    graph: Graph
    spots: dict[str, Spot] = field(default_factory=dict)
    wholes: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()

    @property
    def concats(self) -> list[str]:
        """All concatenations that move nothing."""
        return [v for wholes in self.wholes.values() for v in wholes]

    def parts(self, buffer: str) -> list[str]:
        """The values that are written into a buffer by whatever makes them."""
        known = {*self.wholes[buffer], *self.copies}
        return [v for v, spot in self.spots.items() if spot.buffer == buffer and v not in known]


def concats_in_place(
    graph: Graph, line: int = 1, only: Collection[str] | None = None, apart: Collection[str] = ()
) -> Placed:
    """Return ``graph`` with every concatenation in place that allows it. ``line``: parts begin at
    multiples of so many bytes; ``only``: the concatenations to look at, by what they make;
    ``apart``: values that are copied, though they could be written in place."""
    return _Placing(graph, line, only, apart).run()


class _Placing:
    def __init__(
        self, graph: Graph, line: int, only: Collection[str] | None, apart: Collection[str]
    ) -> None:
        self.graph, self.line, self.only, self.apart = graph, line, only, apart
        self.spots: dict[str, Spot] = {}
        self.copied: dict[tuple[str, Spot], str] = {}  # a value and where it goes → its copy
        self.joined: dict[str, list[tuple[str, Spot]]] = {}  # whole → its parts, where they go

    def run(self) -> Placed:
        for node in reversed(self.graph.nodes):
            if node.op == CONCAT and (self.only is None or node.output in self.only):
                self._place(node)
        return self._written()

    def _place(self, node: Node) -> None:
        """Give a whole memory, and its parts their places in it."""
        types, axis, whole = self.graph.types, node.attrs["axis"], node.output
        parts = [v for v in node.uses if types[v].numel]
        if len(parts) < 2:
            return
        spot = self.spots.get(whole) or self._among_others(parts, axis, whole)
        own = spot is None
        spot = spot or Spot(whole, 0, types[whole].strides)
        goals, offset = [], spot.offset
        for v in parts:
            goals.append((v, replace(spot, offset=offset)))
            offset += types[v].shape[axis] * spot.strides[axis]
        free = [(v, goal) for v, goal in goals if not self._lies(v, goal)]
        kind = types[whole]
        written = {v: goal for v, goal in free if self._may_lie(v, goal, kind)}
        if not written and free:
            return  # all would be copied, as they are now
        self.spots |= {whole: spot} if own or whole not in self.spots else {}
        self.spots |= {v: written[v] for v in written if v not in self.spots}
        for v, goal in goals:
            if not self._lies(v, goal):
                self.copied[v, goal] = f"{v}.in.{whole}.{len(self.copied)}"
        self.joined[whole] = goals

    def _lies(self, value: str, goal: Spot) -> bool:
        """Whether a value, or a copy of it, is there already."""
        return self.spots.get(value) == goal or (value, goal) in self.copied

    def _among_others(self, parts: list[str], axis: int, whole: str) -> Spot | None:
        """Where a whole lies if its parts lie side by side in a larger one."""
        first, types = parts[0], self.graph.types
        begins = [self.spots[first]] if first in self.spots else []
        begins += [goal for v, goal in self.copied if v == first]
        for begin in begins:
            offset, there = begin.offset, True
            for v in parts:
                there = there and self._lies(v, replace(begin, offset=offset))
                offset += types[v].shape[axis] * begin.strides[axis]
            if there and self._may_lie(whole, begin, types[whole]):
                return begin
        return None

    def _may_lie(self, value: str, goal: Spot, whole: TensorType) -> bool:
        """Whether a value can be written in the memory of a whole."""
        graph, kind = self.graph, self.graph.types[value]
        node = graph.producer.get(value)
        if node is None or value in self.spots or value in self.apart:
            return False
        if node.op in ("aten", *COLLECTIVES) or table.get(node.op).view:
            return False
        if kind.dtype != whole.dtype or not kind.is_dense or not kind.is_layout(whole.layout):
            return False
        steps = [s for s, n in zip(goal.strides, kind.shape, strict=True) if n > 1 and s != 1]
        if any(s * kind.dtype.bits % (8 * self.line) for s in (goal.offset, *steps)):
            return False
        return self._stays_inside(value)

    def _stays_inside(self, value: str) -> bool:
        """Whether nothing needs a value, or a view of it, in memory of its own."""
        if value in self.graph.output_values:
            return False
        for user in self.graph.users.get(value, ()):
            if user.op in ("aten", *COLLECTIVES):
                return False
            if table.get(user.op).view and not all(map(self._stays_inside, user.outputs)):
                return False
        return True

    # ---- the graph that comes of it

    def _written(self) -> Placed:
        graph = self.graph
        wholes: dict[str, list[str]] = {}
        for whole in self.joined:
            wholes.setdefault(self.spots[whole].buffer, []).append(whole)
        types, nodes, spots = dict(graph.types), list[Node](), dict(self.spots)
        copies: dict[str, str] = {}
        for v, spot in self.spots.items():
            types[v] = replace(types[v], strides=spot.strides)
        moved = {v for v in self.spots if types[v] != graph.types[v]}
        for node in graph.nodes:
            goals = self.joined.get(node.outputs[0])
            if goals is not None:
                for v, goal in goals:
                    name = self.copied.get((v, goal))
                    if name is not None and name not in copies:
                        copies[name], spots[name] = goal.buffer, goal
                        kind = graph.types[node.output].dtype
                        types[name] = TensorType(graph.types[v].shape, kind, goal.strides)
                        nodes.append(_copy(graph, node, v, name))
                inputs = tuple(self.copied.get((v, goal), v) for v, goal in goals)
                node = replace(node, op=IN_PLACE, inputs=inputs)
            elif table.get(node.op).view and not moved.isdisjoint(node.uses):
                given = [None if v is None else types[v] for v in node.inputs]
                shown = table.infer(node.op, given, node.attrs)[1]
                moved.update(v for v, t in zip(node.outputs, shown, strict=True) if t != types[v])
                types.update(zip(node.outputs, shown, strict=True))
            nodes.append(node)
        # leaves out parts that are empty
        made = dead_code(replace(graph, nodes=tuple(nodes), types=types))
        return Placed(graph, made, spots, wholes, copies, frozenset(self.apart))


def _copy(graph: Graph, concat: Node, value: str, name: str) -> Node:
    """A node that copies a part to its place: a cast if it has another element type."""
    whole = graph.types[concat.output]
    if graph.types[value].dtype != whole.dtype:
        attrs, _ = table.infer("cast", [graph.types[value]], {"dtype": whole.dtype.short})
        return Node("cast", (value,), (name,), attrs, concat.source)
    layout = "nhwc" if whole.layout == "nhwc" else "contiguous"
    attrs, _ = table.infer("to_layout", [graph.types[value]], {"layout": layout})
    return Node("to_layout", (value,), (name,), attrs, concat.source)
