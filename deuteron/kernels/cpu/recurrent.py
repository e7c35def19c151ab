"""h ← cell(x[t] + b + W h), step by step, for each row of a batch and each direction.

W is packed in panels: each has a number of units, and for each unit the rows of all its gates, side
by side. So a tile of rows and units has all its gates in registers, and the cell is applied to them
there. States are kept in float32 beside each other; if tensors have 16-bit numbers, only what is
read from them and written to them is narrow.

    bytes = T · W for each thread, from L2 where its share fits, + size · (x + y)

Threads split the rows and the directions, and then never wait for each other. If there are fewer of
these than threads, they split the units, and begin the next step when the whole state is computed.
Units are claimed: if a thread does not run, because other processes have its core, the others do
its part and do not wait for it. With a barrier after every step calls took three to ten times as
long on a busy machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from deuteron.codegen import openmp
from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I32, I64, PTR, Code, Value, lanes_of, load_run, vec, width
from deuteron.codegen.llvm_math import exp2_parts
from deuteron.kernels.cpu.matmul import FOLD, SERIAL_FLOPS, multiply, prefetch
from deuteron.kernels.cpu.stored import Stored
from deuteron.ops.recurrent import GATES

LOG2_E = math.log2(math.e)
SUMS = {4: 16, 8: 12, 16: 24}  # floats in a vector → vectors of sums that registers hold
LOOKS = 2000  # checks whether the others are done, before a thread offers its core to others
EVEN = 4  # with fewer tiles of rows per thread, threads split rows only if all get equally many


@dataclass(frozen=True)
class Recurrence:
    """What a kernel is compiled for; ``rows`` of the batch are computed together."""

    cell: str
    rows: int
    projected: bool
    stored: str = "f32"


def side(gates: int) -> tuple[int, int]:
    """Return the vectors of units in a tile, and how many of them are multiplied at once, with all
    gates: as many as registers hold. A cell is applied to a whole tile: its operations wait for
    each other, and those of a second vector can be done meanwhile."""
    return (4, 4) if gates == 1 else (2, 1)


def rows_together(batch: int, gates: int) -> int:
    """Return the rows of a tile: as many as registers hold, if all tiles have the same size."""
    most = SUMS[width()] // (gates * side(gates)[1])
    return -(-batch // -(-batch // most))


def panels(weight: torch.Tensor, gates: int) -> torch.Tensor:
    """Return a weight [directions, gates · units, K] as [directions, tiles, parts, K, gates, units
    at once], with zeros beyond the last unit. A bias [directions, gates · units] has a single part
    and a single k."""
    (vectors, once), is_bias = side(gates), weight.ndim == 2
    weight = weight.unsqueeze(2) if is_bias else weight
    ways, rows, depth = weight.shape
    wide, units, parts = vectors * width(), rows // gates, 1 if is_bias else vectors // once
    tiles = -(-units // wide)
    full = weight.new_zeros(ways, gates, tiles * wide, depth)
    full[:, :, :units] = weight.unflatten(1, (gates, units))
    apart = full.view(ways, gates, tiles, parts, wide // parts, depth)
    return apart.permute(0, 2, 3, 5, 1, 4).contiguous()


# ---- the kernel ----------------------------------------------------------------------------------


def _cell(c: Code, cell: str, x: list[Value], held: list[Value], state: Value) -> list[Value]:
    """Return what a cell makes of x, of the product with the old h (``held``), both by gate, and of
    the ``state``: the new h, and c of an lstm. ``state`` is the old c of an lstm, otherwise the old
    h. Divisions cost most here, so σ(a) tanh(b) takes only one."""

    def below(gate: int) -> Value:
        """1 / σ(x + held), where less than 2⁻⁶⁰ stands for 0."""
        total = c.b.fadd(x[gate], held[gate])
        scale, less = exp2_parts(c, c.b.fmul(total, c.f(-LOG2_E, state)), 60.0)
        return c.b.fadd(c.fma(scale, less, scale), c.f(1.0, state))

    def tanh(a: Value, over: Value | None = None) -> Value:
        """(e²ᵃ − 1) / (e²ᵃ + 1), which is ±1 from ±10 on, divided by ``over``."""
        scale, less = exp2_parts(c, c.b.fmul(a, c.f(2.0 * LOG2_E, a)), 30.0)
        e = c.fma(scale, less, c.b.fsub(scale, c.f(1.0, a)))
        more = c.b.fadd(e, c.f(2.0, a))
        return c.b.fdiv(e, more if over is None else c.b.fmul(more, over))

    def sigmoid(gate: int) -> Value:
        return c.b.fdiv(c.f(1.0, state), below(gate))

    if cell == "lstm":
        new = tanh(c.b.fadd(x[2], held[2]), below(0))
        memory = c.fma(sigmoid(1), state, new)
        return [tanh(memory, below(3)), memory]
    if cell == "gru":
        new = tanh(c.fma(sigmoid(0), held[2], x[2]))
        return [c.fma(sigmoid(1), c.b.fsub(state, new), new)]
    total = c.b.fadd(x[0], held[0])
    return [tanh(total) if cell == "tanh" else c.fmax(total, c.f(0.0, total))]


WORDS = """steps batch ways units features tiles projected_tiles h_row c_row
    xt xb yt yb hd hb hk cd cb ck""".split()
POINTERS = "x panels bias projection y h0 c0 h c states claims pause".split()
LINE = 8  # words of a cache line: each claim has a line of its own
Finish = Callable[[Value, Value, Value], None]  # of a row, a unit, and where its sums are


class _Steps:
    """The function of one kernel under construction. Units (or features) of a tile and rows of a
    block are taken together; ``apart``: whether threads have rows and directions of their own."""

    def __init__(self, form: Recurrence, c: Code, words: Value, *thread: Value) -> None:
        self.form, self.c, self.words, self.thread = form, c, words, thread
        self.gates, self.n, self.of = GATES[form.cell], width(), Stored(c, form.stored)
        self.p = dict(zip(POINTERS, c.pointers(words, len(POINTERS)), strict=True))
        self.w = dict(zip(WORDS, c.words(words, len(POINTERS), len(WORDS)), strict=True))
        self.blocks = c.div(c.add(self.w["batch"], form.rows - 1), form.rows)
        self.jobs, threads = c.mul(self.w["ways"], self.blocks), thread[1]
        alike = c.cmp("==", c.rem(self.jobs, threads), 0)
        self.apart = c.b.or_(alike, c.cmp(">=", self.jobs, c.mul(threads, EVEN)))
        self.together = c.b.not_(self.apart)
        self.turn = c.variable(I64, 0)
        self.wide = side(self.gates)[0] * self.n
        most = max(self.gates * self.wide, side(1)[0] * self.n)
        self.sums = c.variable(F32, count=form.rows * most)
        self.edge = c.variable(self.of.kind, count=self.gates * self.wide)

    def asked(self, name: str) -> Value:
        """Whether the caller wants a result: its address is not 0."""
        return self.c.cmp("!=", self.c.word(self.words, POINTERS.index(name)), 0)

    def turn_of_all(self, work: Callable[[Value, Value], None]) -> None:
        """Do ``work(part, parts)`` in one part if threads work apart, otherwise in as many as there
        are threads: each claims its own first, then those that nobody has begun, and goes on when
        all are done. The mark of a part that was claimed in a turn is the number of the next
        turn."""
        c, (thread, threads), now = self.c, self.thread, self.c.get(self.turn)
        parts, after = c.b.select(self.apart, c.i(1), threads), c.add(now, 1)
        done = self.p["claims"]
        with c.loop(0, parts) as i:
            part, free = c.rem(c.add(thread, i), parts), c.variable(I64, 1)
            with c.when(self.together):
                mark = c.at(done, c.mul(c.add(part, 1), LINE), of=I64)
                before = c.b.atomic_rmw("max", mark, after, "acq_rel")
                c.put(free, c.b.zext(c.cmp("==", before, now), I64))
            with c.when(c.cmp("!=", c.get(free), 0)):
                work(part, parts)
                with c.when(self.together):
                    c.b.atomic_rmw("add", done, c.i(1), "acq_rel")
        with c.when(self.together):
            self.wait(done, c.mul(after, parts))
        c.put(self.turn, after)

    def wait(self, where: Value, least: Value) -> None:
        """Wait until a number in memory is at least ``least``; after a while offer the core to
        others before each look."""
        c, looks = self.c, self.c.variable(I64, 0)
        again, pause, more, done = (c.fn.append_block() for _ in range(4))
        c.b.branch(again)
        c.b.position_at_end(again)
        seen = c.b.load_atomic(where, "acquire", 8, typ=I64)
        c.put(looks, c.add(c.get(looks), 1))
        c.b.cbranch(c.cmp("<", seen, least), more, done)
        c.b.position_at_end(more)
        c.b.cbranch(c.cmp(">", c.get(looks), LOOKS), pause, again)
        c.b.position_at_end(pause)
        c.b.call_address(c.pointer(self.words, POINTERS.index("pause")), I32, [])
        c.b.branch(again)
        c.b.position_at_end(done)

    def all_of(self) -> None:
        c, w, rows = self.c, self.w, self.form.rows
        begin, end = c.share(self.jobs, *self.thread)
        first = c.b.select(self.apart, begin, c.i(0))
        last = c.b.select(self.apart, end, self.jobs)
        h_room, c_room = c.mul(w["batch"], w["h_row"]), c.mul(w["batch"], w["c_row"])
        with c.loop(0, w["ways"]) as d:
            inside = (c.sub(job, c.mul(d, self.blocks)) for job in (first, last))
            blocks = [c.least(c.most(job, 0), self.blocks) for job in inside]
            own = c.mul(blocks[0], rows), c.least(c.mul(blocks[1], rows), w["batch"])
            both = c.at(self.p["states"], c.mul(d, 2, c.add(h_room, c_room)))  # old and new h
            memory = c.at(both, c.mul(h_room, 2))  # c, and h before it is projected
            self.move({"h": both, "c": memory}, d, own, False)
            with c.loop(0, w["steps"]) as s:
                back = c.sub(c.sub(w["steps"], 1), s)
                t, odd = c.b.select(c.cmp("==", d, 0), s, back), c.rem(s, 2)
                h = [c.at(both, c.mul(h_room, now)) for now in (odd, c.sub(1, odd))]
                self.step(d, t, h, [memory, c.at(memory, c_room)], blocks)
            ends = c.at(both, c.mul(h_room, c.rem(w["steps"], 2)))
            self.move({"h": ends, "c": memory}, d, own, True)

    def move(self, rooms: dict[str, Value], d: Value, rows: tuple[Value, Value], end: bool) -> None:
        """Copy states from where they are given to where they are kept, or, at the ``end``, from
        there to the results, if the caller wants these."""
        c, of, w = self.c, self.of, self.w

        def one(name: str, part: Value, parts: Value) -> None:
            size, row_step = w["features" if name == "h" else "units"], w[f"{name}_row"]
            steps = [w[f"{name}{axis}"] for axis in "dbk"]
            if end:
                steps = [c.mul(w["batch"], size), size, c.i(1)]
            outside = of.at(self.p[name if end else f"{name}0"], c.mul(d, steps[0]))
            with c.loop(*rows) as row, c.loop(*c.share(size, part, parts)) as k:
                kept = c.at(rooms[name], c.mul(row, row_step), k)
                there = of.at(outside, c.mul(row, steps[1]), c.mul(k, steps[2]))
                if end:
                    of.store(c.load(kept), there)
                else:
                    c.store(of.load(there), kept)

        def work(part: Value, parts: Value) -> None:
            for name in ("h", "c") if self.form.cell == "lstm" else ("h",):
                if not end:
                    one(name, part, parts)
                    continue
                with c.when(self.asked(name)):
                    one(name, part, parts)

        self.turn_of_all(work)

    def step(
        self, d: Value, t: Value, h: list[Value], memory: list[Value], blocks: list[Value]
    ) -> None:
        """Write one step of a direction: the old h becomes the new one."""
        c, of, w, n, form, gates = self.c, self.of, self.w, self.wide, self.form, self.gates
        (old, new), (cells, whole), lstm = h, memory, form.cell == "lstm"
        y = of.at(self.p["y"], c.mul(t, w["yt"]), c.mul(d, w["features"]))
        x = of.at(self.p["x"], c.mul(t, w["xt"]), c.mul(d, w["units"], gates))

        def give(value: Value, row: Value, unit: Value) -> None:
            c.store(value, c.at(new, c.mul(row, w["h_row"]), unit))
            with c.when(self.asked("y")):
                self.write(value, of.at(y, c.mul(row, w["yb"]), unit), c.sub(w["features"], unit))

        def through_the_cell(row: Value, unit: Value, sums: Value) -> None:
            xs = self.read(of.at(x, c.mul(row, w["xb"]), unit), c.sub(w["units"], unit))
            held = [c.load(c.at(sums, g * n), n) for g in range(gates)]
            here = c.at(cells, c.mul(row, w["c_row"]), unit)
            state = c.load(here if lstm else c.at(old, c.mul(row, w["h_row"]), unit), n)
            made, *kept = _cell(c, form.cell, xs, held, state)
            for value in kept:
                c.store(value, here)
            if form.projected:
                c.store(made, c.at(whole, c.mul(row, w["c_row"]), unit))
            else:
                give(made, row, unit)

        def asked_for(row: Value, unit: Value) -> None:
            """Prefetch the gates of x: they come from memory, and do not lie side by side."""
            for g in range(gates):
                prefetch(c, of.at(x, c.mul(row, w["xb"]), unit, c.mul(w["units"], g)))

        def as_it_is(row: Value, unit: Value, sums: Value) -> None:
            give(c.load(sums, side(1)[0] * self.n), row, unit)

        def of_state(*part: Value) -> None:
            tiles, rows = c.share(w["tiles"], *part), (old, w["h_row"], w["features"])
            which = c.mul(d, w["tiles"])
            self.product(rows, "panels", which, tiles, gates, blocks, through_the_cell, asked_for)

        def projected(*part: Value) -> None:
            tiles, rows = c.share(w["projected_tiles"], *part), (whole, w["c_row"], w["units"])
            which = c.mul(d, w["projected_tiles"])
            self.product(rows, "projection", which, tiles, 1, blocks, as_it_is)

        self.turn_of_all(of_state)
        if form.projected:
            self.turn_of_all(projected)

    def product(
        self,
        rows: tuple[Value, Value, Value],
        panels: str,
        before: Value,
        tiles: tuple[Value, Value],
        gates: int,
        blocks: list[Value],
        finish: Finish,
        soon: Callable[[Value, Value], None] | None = None,
    ) -> None:
        """Multiply ``rows`` (where they are, how far apart, how long) by some ``tiles`` of a
        direction, whose panels come after the ``before`` tiles of other directions. ``finish`` does
        the rest for each row of a tile, and ``soon`` prefetches what that will read."""
        c, of, n, count, batch = self.c, self.of, self.n, self.form.rows, self.w["batch"]
        (source, step, depth), (vectors, once) = rows, side(gates)
        wide, at_once = vectors * n, range(gates * once)
        acc = [[c.variable(vec(n)) for _ in at_once] for _ in range(count)]
        with c.loop(*tiles) as tile, c.loop(*blocks) as block:
            which, first = c.add(before, tile), c.mul(block, count)
            panel = c.variable(PTR, of.at(self.p[panels], c.mul(which, depth, gates * wide)))
            bias = of.at(self.p["bias"], c.mul(which, gates * wide))
            for g in range(gates):
                start = c.f(0.0, wide)
                if panels == "panels":
                    start = of.load(of.at(bias, g * wide), wide)
                for i in range(count):
                    c.store(start, c.at(self.sums, (i * gates + g) * wide))
            # rows that fill up the tile repeat the last one
            starts = [c.least(c.add(first, i), c.sub(batch, 1)) for i in range(count)]
            if soon is not None:
                for row in starts:
                    soon(row, c.mul(tile, wide))
            with c.loop(0, vectors, once) as v, c.loop(0, depth, FOLD) as k:
                for own in acc:
                    for one in own:
                        c.b.store(c.f(0.0, n), one)
                runs = [c.at(source, c.mul(start, step), k) for start in starts]
                multiply(Stored(c, "f32"), of, acc, runs, panel, c.least(FOLD, c.sub(depth, k)))
                for i, j in product(range(count), at_once):
                    gate, beside = divmod(j, once)
                    to = c.at(self.sums, (i * gates + gate) * wide + beside * n, c.mul(v, n))
                    c.store(c.b.fadd(c.load(to, n), c.get(acc[i][j], vec(n))), to)
            unit = c.mul(tile, wide)
            with c.loop(0, c.least(c.sub(batch, first), count)) as i:
                finish(c.add(first, i), unit, c.at(self.sums, c.mul(i, gates * wide)))

    def read(self, where: Value, left: Value) -> list[Value]:
        """Load a vector of each gate; if fewer elements are left, read only those."""
        c, of, n, units = self.c, self.of, self.wide, self.w["units"]
        base, step = c.variable(PTR, where), c.variable(I64, units)
        with c.when(c.cmp("<", left, n)):
            with c.loop(0, self.gates) as g, c.loop(0, left) as lane:
                one = of.load(of.at(where, c.mul(g, units), lane))
                of.store(one, of.at(self.edge, c.mul(g, n), lane))
            c.put(base, self.edge)
            c.put(step, n)
        here = c.get(base, PTR)
        return [of.load(of.at(here, c.mul(c.get(step), g)), n) for g in range(self.gates)]

    def write(self, value: Value, to: Value, left: Value) -> None:
        """Store a vector, or only as many of its elements as are left."""
        c, of, n = self.c, self.of, lanes_of(value)

        def some() -> None:
            kept = c.variable(F32, count=n)
            c.store(value, kept)
            with c.loop(0, left) as lane:
                of.store(c.load(c.at(kept, lane)), of.at(to, lane))

        c.either(c.cmp(">=", left, n), lambda: of.store(value, to), some)


def _write(form: Recurrence, c: Code, words: Value, *thread: Value) -> None:
    _Steps(form, c, words, *thread).all_of()


def _no_claims(c: Code, words: Value, thread: Value, threads: Value) -> None:
    """Clear the claims: before the first turn no part is claimed, and none is done."""
    claims = c.pointer(words, 0)
    c.b.store(c.i(0), c.at(claims, c.mul(c.add(thread, 1), LINE), of=I64))
    with c.when(c.cmp("==", thread, 0)):
        c.b.store(c.i(0), claims)


def prepare_recurrence(
    form: Recurrence,
    sizes: Sequence[int],
    strides: Sequence[int],
    given: Sequence[torch.Tensor | None],
) -> Callable[..., list[Call]]:
    """Return ``calls(x, y, h0, c0, h, c)``, which takes their addresses, or 0 for what is absent.
    ``sizes`` are steps, rows, directions, units and features of a state; ``strides`` those of x and
    y over time and rows, and of h0 and c0; ``given`` the panels of the state, their bias and the
    panels of the projection."""
    steps, batch, ways, *_ = sizes
    gates = GATES[form.cell]
    state, bias, projection = given
    assert state is not None
    tiles, out_tiles = state.shape[1], 0 if projection is None else projection.shape[1]
    c_row, h_row = (n * side(g)[0] * width() for n, g in ((tiles, gates), (out_tiles, 1)))
    h_row = h_row or c_row
    room = Room("recurrence", room_floats(batch, ways, h_row, c_row))
    none = torch.zeros(ways * c_row * gates, dtype=state.dtype)
    weights = state, none if bias is None else bias, 0 if projection is None else projection
    claims = Room("claims", 2 * LINE, 2 * LINE)
    omp = openmp.runtime()
    pause = 0 if omp is None else omp.pause
    code = load_run(f"recurrence {form} of {width()}", partial(_write, form))
    threaded = 2.0 * steps * batch * state.numel() > SERIAL_FLOPS
    clear = Call(load_run("no claims", _no_claims), (claims,))

    def calls(x: Word, y: Word, h0: Word, c0: Word, h: Word, c: Word) -> list[Call]:
        places = x, *weights, y, h0, c0, h, c, room, claims, pause
        words = (*places, *sizes, tiles, out_tiles, h_row, c_row, *strides)
        made = Call(code, words, threaded)
        return [clear, made] if threaded else [made]

    return calls


def room_floats(batch: int, ways: int, h_row: int, c_row: int) -> int:
    """Return the floats of scratch memory: h twice, c, and h before it is projected."""
    return 2 * ways * batch * (h_row + c_row)
