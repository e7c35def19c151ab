"""A tensor that is written piece by piece, as loops over time fill a buffer, is joined once.

Graph values are never written to, so ``x[:, i] = y`` arrives as a concatenation of what is before
i, y, and what is behind it: a copy of all of x for each step of a loop, and work that grows with
the square of its length. Here, a reader of a part of x reads what was written there instead:

    concat(concat(a, x[1:])[:1], b, concat(a, x[1:])[2:])  =  concat(a, b, x[2:])

A :class:`Piece` is a box of a value. It is followed through slices, through reshapes that only add
or drop dimensions of one element, and into the part of a concatenation that it lies in. If it lies
in several parts, these are joined along one axis, unless the whole concatenation is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, prod

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ir.types import Shape
from deuteron.ops import table
from deuteron.passes.cleanup import dead_code
from deuteron.passes.context import Context

Box = tuple[tuple[int, int], ...]  # where it begins and ends, along each axis
STEPS = 1 << 14  # the most steps that one value is followed through


@dataclass(frozen=True)
class Piece:
    """A box of a value, and the axis along which other pieces may lie beside it; None where that
    axis was dropped because it has a single element."""

    value: str
    box: Box
    axis: int | None

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)

    def moved(self, value: str, axis: int, by: int) -> Piece:
        """The same box in a value that begins elsewhere along one axis."""
        box = tuple((a + by, b + by) if i == axis else (a, b) for i, (a, b) in enumerate(self.box))
        return replace(self, value=value, box=box)


def joined_once(graph: Graph, ctx: Context) -> Graph:
    """``graph`` in which what was written piece by piece is joined once, where somebody reads
    it."""
    if not any(node.op == "concat" for node in graph.nodes):
        return graph
    return _Writing(graph, ctx).run()


class _Writing:
    def __init__(self, graph: Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        concats = [node for node in graph.nodes if node.op == "concat"]
        sizes = ([graph.types[v].shape[n.attrs["axis"]] for v in n.uses] for n in concats)
        self.begins = {  # where the parts of every concatenation begin, and its end
            node.output: [0, *accumulate(parts)] for node, parts in zip(concats, sizes, strict=True)
        }
        self.whole = {n.output for n in concats if self._is_asked_for(n)}
        self.past = False  # whether what was followed led into a concatenation

    def run(self) -> Graph:
        live, found = set(self.graph.output_values), dict[str, list[Piece]]()
        for node in reversed(self.graph.nodes):  # skip nodes whose readers all read elsewhere now
            if live.isdisjoint(node.outputs):
                continue
            pieces = self._found(node)
            if pieces is not None:
                found[node.output] = pieces
            live.update(node.uses if pieces is None else (piece.value for piece in pieces))
        if not found:
            return self.graph
        self.ctx.fired["written piece by piece"] += len(found)
        build, names = start(self.graph, table.infer)
        for node in self.graph.nodes:
            if node.outputs[0] in found:
                pieces = found[node.output]
                names[node.output] = _emitted(build, names, node, pieces, self.graph)
            elif not live.isdisjoint(node.outputs):
                carry(build, names, node, self.graph)
        return dead_code(finish(build, names, self.graph))

    # ---- who reads what

    def _is_asked_for(self, concat: Node) -> bool:
        """Whether somebody needs the whole concatenation, or so much of it that it is better made
        at once."""
        cost = self._read(concat.output, concat.attrs["axis"], concat.output)
        return cost >= self.graph.types[concat.output].numel

    def _read(self, value: str, axis: int, concat: str) -> float:
        """The elements that would have to be joined just for the readers of a concatenation.
        ``value`` is the concatenation itself, or a reshape of it."""
        if value in self.graph.output_values:
            return inf
        cost = 0.0
        for user in self.graph.users.get(value, ()):
            if user.op == "concat" and user.attrs["axis"] == axis:
                continue  # that concatenation joins the parts as they are
            if user.op == "reshape":
                there = _through(self.graph.types[value].shape, user.attrs["shape"])
                seen = None if there is None else there.get(axis)
                cost += inf if seen is None else self._read(user.output, seen, concat)
            elif user.op == "slice" and user.attrs["step"] == 1:
                cost += self._cut(user, axis, concat)
            else:
                cost = inf
        return cost

    def _cut(self, cut: Node, axis: int, concat: str) -> float:
        low, high = cut.attrs["start"], cut.attrs["stop"]
        ends, along = self.begins[concat], cut.attrs["axis"] == axis
        if along and (low == high or bisect_right(ends, low) == bisect_right(ends, high - 1)):
            return 0  # within one part
        readers = self.graph.users.get(cut.output, ())
        joined = all(n.op == "concat" and n.attrs["axis"] == axis for n in readers)
        joined = joined and cut.output not in self.graph.output_values
        return 0 if joined else self.graph.types[cut.output].numel

    # ---- what was written there

    def _found(self, node: Node) -> list[Piece] | None:
        """The pieces that a slice or a concatenation consists of, if they lead into an earlier
        concatenation; else None."""
        kind = self.graph.types[node.outputs[0]]
        if not kind.numel:
            return None
        if node.op == "concat":
            axis, asked = node.attrs["axis"], [self._all(v, node.attrs["axis"]) for v in node.uses]
            asked = [piece for piece in asked if all(piece.shape)]
        elif node.op == "slice" and node.attrs["step"] == 1:
            axis, low = node.attrs["axis"], node.attrs["start"]
            asked = [self._all(node.output, axis).moved(node.uses[0], axis, low)]
        else:
            return None
        self.past = False
        found = _merged([piece for one in asked for piece in self._followed(one)])
        alike = all(self.graph.types[piece.value].dtype == kind.dtype for piece in found)
        return found if alike and self.past else None

    def _all(self, value: str, axis: int) -> Piece:
        return Piece(value, tuple((0, n) for n in self.graph.types[value].shape), axis)

    def _followed(self, piece: Piece) -> Iterator[Piece]:
        """Yield, in order, the pieces of earlier values that this one consists of."""
        left, steps = [piece], 0
        while left:
            piece, steps = left.pop(), steps + 1
            node = self.graph.producer.get(piece.value) if steps < STEPS else None
            inner = None if node is None else self._into(piece, node)
            if inner is None:
                yield piece
            else:
                left += reversed(inner)

    def _into(self, piece: Piece, node: Node) -> list[Piece] | None:
        """The same piece as pieces of what a node reads; None if the node computes something
        new."""
        if node.op == "slice" and node.attrs["step"] == 1:
            return [piece.moved(node.uses[0], node.attrs["axis"], node.attrs["start"])]
        if node.op == "reshape":
            made, there = node.attrs["shape"], None
            inner: Node | None = node
            while inner is not None and inner.op == "reshape" and there is None:
                source = inner.uses[0]  # or what that is a reshape of, in turn
                there = _through(made, self.graph.types[source].shape)
                inner = self.graph.producer.get(source)
            if there is None:
                return None
            box = [(0, 1)] * self.graph.types[source].rank
            for i, at in there.items():
                box[at] = piece.box[i]
            axis = None if piece.axis is None else there.get(piece.axis)
            return [Piece(source, tuple(box), axis)]
        if node.op != "concat":
            return None
        axis, begins = node.attrs["axis"], self.begins[node.output]
        low, high = piece.box[axis]
        parts: list[Piece] = []
        for i in range(bisect_right(begins, low) - 1, len(node.uses)):
            begin, end = begins[i], begins[i + 1]
            if begin >= high:
                break
            if begin < end:
                cut = (max(low, begin), min(high, end))
                here = (*piece.box[:axis], cut, *piece.box[axis + 1 :])
                parts.append(replace(piece, box=here).moved(node.uses[i], axis, -begin))
        alike = {self.graph.types[p.value].dtype for p in parts}
        if alike != {self.graph.types[node.output].dtype}:
            return None
        if len(parts) > 1 and (piece.axis != axis or node.output in self.whole):
            return None
        self.past = True
        return parts


def _through(shape: Shape, new: Shape) -> dict[int, int] | None:
    """Where the axes of more than one element are after a reshape that only adds or drops others;
    None if it does more."""
    have, want = ([i for i, n in enumerate(s) if n != 1] for s in (shape, new))
    same = [shape[i] for i in have] == [new[j] for j in want]
    return dict(zip(have, want, strict=True)) if same else None


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge pieces that are neighbours in one value."""
    found: list[Piece] = []
    for piece in pieces:
        last, axis = found[-1] if found else None, piece.axis
        if last is not None and axis is not None and (last.value, last.axis) == (piece.value, axis):
            (low, middle), (begin, high) = last.box[axis], piece.box[axis]
            box = (*last.box[:axis], (low, high), *last.box[axis + 1 :])
            there = (*piece.box[:axis], (low, high), *piece.box[axis + 1 :])
            if middle == begin and box == there:
                found[-1] = replace(last, box=box)
                continue
        found.append(piece)
    return found


def _emitted(
    build: GraphBuilder, names: dict[str, str], node: Node, found: Sequence[Piece], graph: Graph
) -> str:
    """Emit the pieces one after another, in the shape of the node's result."""

    def emit(op: str, given: Sequence[str], attrs: dict[str, object]) -> str:
        (out,) = build.emit(op, given, attrs, source=node.source)
        return out

    axis, shape, parts = node.attrs["axis"], graph.types[node.output].shape, list[str]()
    rest = prod(n for i, n in enumerate(shape) if i != axis)
    for piece in found:
        value = names[piece.value]
        for i, (low, high) in enumerate(piece.box):
            if (low, high) != (0, build.types[value].shape[i]):
                value = emit("slice", [value], {"axis": i, "start": low, "stop": high, "step": 1})
        long = prod(piece.shape) // rest
        wanted = (*shape[:axis], long, *shape[axis + 1 :])
        if build.types[value].shape != wanted:
            value = emit("reshape", [value], {"shape": wanted})
        parts.append(value)
    view = node.op == "slice" or parts == [names[found[0].value]]
    # a concatenation must have memory of its own, even if it is just one part of something
    return parts[0] if view and len(parts) == 1 else emit("concat", parts, {"axis": axis})
