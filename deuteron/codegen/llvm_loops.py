"""The loops of a kernel on the CPU: rows shared out to threads, columns in vectors, long sums in
stretches. A loop is a Python generator that yields the place it is at: what its user writes then is
the body of the loop.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from deuteron.codegen import llvm
from deuteron.codegen import llvm_text as ir
from deuteron.codegen.index import Affine, Dynamic, Var
from deuteron.codegen.llvm import I32, I64, Code, Value, vec
from deuteron.codegen.llvm_compute import I1, Arithmetic
from deuteron.codegen.llvm_plan import Shape, opens
from deuteron.codegen.scalar import Guard, ScalarProgram

Pause = Callable[[], None] | None
Axes = tuple[Var, ...]
Where = dict[Var, Value]
Env = dict[str, Value]
CHUNK = 4096  # elements of one long axis that a thread takes at a time, at most
PIECES = 16  # pieces of work wanted, so that threads share them evenly
STRETCH = 32  # numbers that an accumulator takes in float32 before they are added up in float64
FEW = 4  # sizes and strides up to this are constants of the code
LONG_ROW = 512  # in rows this long a division by a number that LLVM does not know costs nothing


@dataclass
class Place:
    """Where the loops are: a scalar index for every axis; the vector axis at its first lane."""

    at: Where
    lanes: int
    known: dict[Guard, bool] = field(default_factory=dict)
    env: Env = field(default_factory=dict)  # scalars that serve as indices


class Numbers:
    """Numbers that a kernel reads from the words of its call, in place of constants: kernels for
    other sizes then have the same code. A number has one word for every use it is put to."""

    def __init__(self, c: Code, words: Value, first: int) -> None:
        self.c, self.words, self.first = c, words, first
        self.known: dict[tuple[str, int], Value] = {}

    def __call__(self, use: str, number: int) -> Value:
        if (use, number) not in self.known:
            with self.c.b.goto_entry_block():
                word = self.c.word(self.words, self.first + len(self.known))
            self.known[use, number] = word
        return self.known[use, number]

    @property
    def values(self) -> list[int]:
        return [number for _, number in self.known]


class Loops(Arithmetic):
    """Nested loops over the axes of a program, laid out as its shape says.

    Sizes and strides are :class:`Numbers` of the call, except where the code depends on them: under
    guards, in divisions for every few elements, and if they are very small."""

    p: ScalarProgram
    shape: Shape
    numbers: Numbers

    def given(self, use: str, number: int) -> Value:
        """A number of the call, or a constant where the code is for these sizes alone."""
        if self.p.guards or abs(number) <= FEW:
            return self.c.i(number)
        return self.numbers(use, number)

    def size(self, v: Var) -> Value:
        return self.given(f"size of {v.name}", v.size)

    def _rows(self, thread: Value, threads: Value) -> Iterator[Place]:
        """Loop over the share of this thread: rows, or pieces of the one long axis there is."""
        c, shape = self.c, self.shape
        total = prod(v.size for v in shape.rows)
        axis = shape.vector
        if axis is None or shape.inner_vector:
            begin, end = c.share(self.given("rows", total), thread, threads)
            with c.loop(begin, end) as row:
                yield Place(self._decode(row), shape.lanes)
            return
        v, chunk = axis, CHUNK
        while chunk > 2 * shape.lanes and total * -(-v.size // chunk) < PIECES:
            chunk //= 2
        pieces = -(-v.size // chunk)
        begin, end = c.share(self.given("pieces", total * pieces), thread, threads)
        with c.loop(begin, end) as piece:
            row, start, stop = piece, c.i(0), self.size(v)
            if pieces > 1:
                count, step = self.given("pieces of a row", pieces), self.given("chunk", chunk)
                row, start = c.div(piece, count), c.mul(c.rem(piece, count), step)
                stop = c.least(c.add(start, step), stop)
            at, usual = self._decode(row), self._usual_guards(v)
            if not usual:
                yield from self._vectors(at, start, stop, pieces == 1)
                return
            within = self._inside(usual, Place(at, 1))
            with c.when(within):
                yield from self._vectors(at, start, stop, pieces == 1, usual)
            with c.when(c.b.not_(within)):
                yield from self._vectors(at, start, stop, pieces == 1)

    def _usual_guards(self, v: Var) -> tuple[Guard, ...]:
        """Guards of whole rows that hold for most of them, such as those of windows which may hang
        over the edge of an image: rows for which all hold get a loop without them."""
        if self.p.inner:
            return ()
        rows = (g for g in self.p.guards if v not in g.index.variables and not g.index.dynamic)
        spans = ((g, g.index.high - g.index.low + 1) for g in rows)
        return tuple(g for g, span in spans if 4 * (g.high - g.low) >= 3 * span)

    def _decode(self, row: Value) -> Where:
        at: Where = {}
        axis = self.shape.vector
        elements = self.p.columns if axis is None or self.shape.inner_vector else axis.size
        for v in reversed(self.shape.rows[1:]):
            size = self.size(v) if elements >= LONG_ROW else self.c.i(v.size)
            at[v] = self.c.rem(row, size)
            row = self.c.div(row, size)
        if self.shape.rows:
            at[self.shape.rows[0]] = row
        return at

    def _vectors(
        self, at: Where, start: Value, stop: Value, whole: bool, held: Sequence[Guard] = ()
    ) -> Iterator[Place]:
        """Loop over the vector axis from ``start`` to ``stop``, where all of ``held`` hold: by
        whole vectors, then by narrower ones for what is left. Unless it is the ``whole`` axis, both
        ends are multiples of the widest step, or ends of the axis. The axis is cut where guards
        change that depend on it alone, so that these are known in every part."""
        v, c = self.shape.vector, self.c
        assert v is not None
        for low, high in zip(self.shape.breaks, self.shape.breaks[1:], strict=False):
            settled = {**dict.fromkeys(held, True), **self._settled(v, low, high)}
            last = self.size(v) if high == v.size else c.i(high)
            begin = c.i(low) if whole else c.most(start, low)
            end = last if whole else c.least(stop, last)
            left = high - low  # elements that no wider step has done
            cut = len(self.shape.breaks) > 2 and not whole  # then anything may be left
            for lanes in self.shape.steps:
                count, left = divmod(left, lanes)
                if whole and count == 1:
                    yield Place({**at, v: begin}, lanes, settled)
                    begin = c.add(begin, lanes)
                elif cut or count:
                    over = c.rem(c.most(c.sub(end, begin), 0), lanes) if cut or left else 0
                    full = c.sub(end, over) if cut or left else end
                    with c.loop(begin, full, lanes) as i:
                        yield Place({**at, v: i}, lanes, settled)
                    begin = c.most(begin, full)

    def _settled(self, v: Var, low: int, high: int) -> dict[Guard, bool]:
        known = {}
        for g in self.p.guards:
            begin, end = opens(g, v) or (high, low)
            if begin <= low and high <= end:
                known[g] = True
            elif begin < end and (high <= begin or end <= low):
                known[g] = False
        return known

    def _cells(self, place: Place, axes: Axes, pause: Pause = None) -> Iterator[Place]:
        """Loop over every element of the row: nested loops over the reduced axes. The code that
        ``pause`` writes is run after every :data:`STRETCH` steps."""
        c = self.c
        if not axes and not self.shape.inner_vector:
            yield place
            return
        v = axes[0] if axes else self.shape.vector
        assert v is not None
        each = self._steps(axes[1:]) if axes else 1 / self.shape.lanes  # for one index of v
        if pause is None or each >= STRETCH:
            yield from self._along(place, axes, (c.i(0), self.size(v)), True, pause)
        else:
            stretch = self.given("stretch", max(1, int(STRETCH / each)))
            with c.loop(0, self.size(v), stretch) as begin:
                end = c.least(c.add(begin, stretch), self.size(v))
                yield from self._along(place, axes, (begin, end), False, None)
                pause()

    def _steps(self, axes: Axes) -> float:
        """How often an accumulator is added to in these axes and the vector axis."""
        v = self.shape.vector
        inner = v.size / self.shape.lanes if self.shape.inner_vector and v is not None else 1.0
        return inner * prod(a.size for a in axes)

    def _along(
        self, place: Place, axes: Axes, span: tuple[Value, Value], whole: bool, pause: Pause
    ) -> Iterator[Place]:
        """Loop over a ``span`` of the outermost of the axes, with all the others inside."""
        begin, end = span
        if axes:
            with self.c.loop(begin, end) as i:
                inside = Place({**place.at, axes[0]: i}, place.lanes, place.known)
                yield from self._cells(inside, axes[1:], pause)
            return
        for p in self._vectors(place.at, begin, end, whole):
            yield Place(p.at, p.lanes, {**place.known, **p.known})

    # ---- indices at a place

    def _index(self, e: Affine, place: Place, lane: int = 0) -> Value:
        """Return an index at this place: along the vector axis for the first lane, except that what
        is looked up is that of ``lane``."""
        c = self.c
        total = self.given("start", e.const)
        for atom, f in e.terms:
            if isinstance(atom, Var):
                value = place.at[atom]
            elif isinstance(atom, Dynamic):
                value = c.item(place.env[atom.name], lane)
            else:
                inner = self._index(atom.of, place, lane)
                value = c.rem(inner, atom.by) if atom.rest else c.div(inner, atom.by)
            total = c.add(total, c.mul(value, self.given("stride", f)) if f != 1 else value)
        return total

    def _step(self, e: Affine, place: Place) -> int:
        """How far apart the elements of neighbouring lanes are in memory."""
        v = self.shape.vector
        step = e.factor(v) if v is not None and place.lanes > 1 else 0
        assert step is not None, "vectors run along no axis that is divided"
        return step

    def _scattered(self, e: Affine, place: Place) -> bool:
        """Whether what an index looks up differs from lane to lane."""
        return any(llvm.lanes_of(place.env[name]) > 1 for name in e.dynamic)

    def _position(self, e: Affine, place: Place) -> Value:
        """An index as a number in every lane."""
        lanes, first = place.lanes, self._index(e, place)
        step, scattered = self._step(e, place), self._scattered(e, place)
        if lanes == 1 or not (step or scattered):
            return first
        found = self.splat(first, lanes)
        if scattered:
            for lane in range(1, lanes):
                one = self._index(e, place, lane)
                found = self.c.b.insert_element(found, one, ir.Constant(I32, lane))
        return self.c.b.add(found, ir.Constant(vec(lanes, I64), [k * step for k in range(lanes)]))

    def _inside(self, guards: tuple[Guard, ...], place: Place) -> Value:
        c = self.c
        ok: Value = ir.Constant(I1, 1)
        for g in guards:
            if g in place.known:
                if not place.known[g]:
                    return ir.Constant(I1, 0)
                continue
            i = self._index(g.index, place)
            ok = c.b.and_(ok, c.cmp(">=", i, g.low))
            ok = c.b.and_(ok, c.cmp("<", i, g.high))
        return ok
