"""O = softmax(scale · Q Kᵀ + bias) V for each head, without the matrix of scores.

A thread packs the keys (transposed) and the values of a head into panels, once for all the
query heads that share them, and takes four or six queries at a time: their scores are rows in L1,
turned into eˢ⁻ᵐᵃˣ in place, multiplied by the values and divided by their sum at the end. Panels
are as wide as a tile, and narrower where there are few keys or values.

    bytes = size · (Q + O) + (size + 4) · (K + V) per thread on the head; scores stay in L1

Scratch per thread: Sk · (D + Dv + queries) floats. A query that sees no key gives zeros; nan and
infinity come out as in the reference.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I8, I32, I64, PTR, Code, Value, load_run, vec, width
from deuteron.codegen.llvm_compute import STORED
from deuteron.codegen.llvm_math import exp_nonpositive
from deuteron.kernels.cpu import TILES
from deuteron.kernels.cpu.matmul import Tile, multiply
from deuteron.kernels.cpu.packing import Panels
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import Gathered, steps


@dataclass(frozen=True)
class AttentionKernel:
    """What a kernel is compiled for. ``bias`` is "none", "bool" or an element type, ``stored`` the
    element type of everything else; ``of_keys`` and ``of_values`` are the vectors of a tile of
    scores and of one of results."""

    causal: bool
    bias: str
    stored: str
    of_keys: int
    of_values: int


def vectors_for(columns: int, lanes: int) -> int:
    """Return the vectors of a tile, or half or a quarter of them if columns fill no more."""
    most = TILES[lanes][0][1]
    return next((v for v in (1, 2) if v < most and columns <= v * lanes), most)


def _tile(module: object, tile: Tile) -> Code:
    """Write the function of (A, row step of A, length, panel, C, row step of C) that computes C = A
    · panel, in whole vectors."""
    n = width()
    c = Code(module, f"tile of {tile.vectors}", [PTR, I64, I64, PTR, PTR, I64], internal=True)
    a, a_step, length, panel, out, out_step = c.args
    acc = [[c.variable(vec(n), c.f(0.0, n)) for _ in range(tile.vectors)] for _ in range(tile.rows)]
    runs = [c.at(a, c.mul(a_step, i)) for i in range(tile.rows)]
    plain = Stored(c, "f32")
    multiply(plain, plain, acc, runs, c.variable(PTR, panel), length)
    for i in range(tile.rows):
        for j in range(tile.vectors):
            c.store(c.get(acc[i][j], vec(n)), c.at(out, c.mul(out_step, i), j * n))
    c.ret()
    return c


def _softmax_row(c: Code, row: Value, seen: Value, bias: Value, form: AttentionKernel) -> Value:
    """Replace the scores of one query by eˢ⁻ᵐᵃˣ; return 1 / Σ, or 0 if the query sees no key."""
    best, total = Gathered(c, c.fmax, -math.inf), Gathered(c, c.b.fadd, 0.0)

    def scan(j: Value, lanes: int) -> None:
        s = c.load(c.at(row, j), lanes)
        if form.bias == "bool":
            flags = c.load(c.at(bias, j, of=I8), lanes, of=I8)
            zero = c.b.zext(flags, vec(lanes, I32))
            allowed = c.b.icmp_signed("!=", zero, c.b.sub(zero, zero))
            s = c.b.select(allowed, s, c.f(-math.inf, lanes))
        elif form.bias != "none":
            beside = Stored(c, form.bias)
            s = c.b.fadd(s, beside.load(beside.at(bias, j), lanes))
        if form.bias != "none":
            c.store(s, c.at(row, j))
        best.take(s, lanes)

    def powers(j: Value, lanes: int) -> None:
        e = exp_nonpositive(c, c.b.fsub(c.load(c.at(row, j), lanes), c.f(largest, lanes)))
        c.store(e, c.at(row, j))
        total.take(e, lanes)

    best.clear()
    steps(c, seen, scan)
    largest = best.total()
    blind = c.b.fcmp_ordered("==", largest, c.f(-math.inf))
    largest = c.b.select(blind, c.f(0.0), largest)
    total.clear()
    steps(c, seen, powers)
    weight = total.total()
    none = c.b.fcmp_ordered("==", weight, c.f(0.0))
    return c.b.select(none, c.f(0.0), c.b.fdiv(c.f(1.0), weight))


def _attend(form: AttentionKernel, c: Code, words: Value, thread: Value, threads: Value) -> None:
    rows = TILES[width()][0][0]
    of_keys, of_values = (Tile(rows, vectors) for vectors in (form.of_keys, form.of_values))
    wide, wide_values = of_keys.columns, of_values.columns
    score = _tile(c.module, of_keys)
    answer_all = score if of_values == of_keys else _tile(c.module, of_values)
    q, k, v, out, bias, room = c.pointers(words, 6)
    names = (
        "batch heads sharing queries keys depth values scale per_thread "
        "qb qh qs kb kh ks vb vh vs ob oh os bb bh bs"
    ).split()
    w = {name: c.word(words, 6 + i) for i, name in enumerate(names)}
    of = Stored(c, form.stored)
    scale = c.b.bitcast(c.b.trunc(w["scale"], I32), F32)
    keys, depth, values = w["keys"], w["depth"], w["values"]

    # rounded up to whole panels
    columns, results = (
        c.mul(c.div(c.add(x, by - 1), by), by) for x, by in ((keys, wide), (values, wide_values))
    )
    k_panels = c.at(room, c.mul(thread, w["per_thread"]))
    v_panels = c.at(k_panels, c.mul(columns, depth))
    scores = c.at(v_panels, c.mul(results, keys))
    asked = c.at(scores, c.mul(columns, rows))
    answers = c.at(asked, c.mul(depth, rows))
    inverse = c.variable(F32, count=rows)
    tiles = c.div(c.add(w["queries"], rows - 1), rows)
    packed = c.variable(I64, -1)
    jobs = c.mul(w["batch"], w["heads"], tiles)
    with c.loop(*c.share(jobs, thread, threads)) as job:
        which, tile_of_rows = c.split(job, tiles)
        first = c.mul(tile_of_rows, rows)
        b, h = c.split(which, w["heads"])
        shared = c.div(h, w["sharing"])
        source = c.add(c.mul(b, w["heads"]), shared)
        with c.when(c.cmp("!=", source, c.get(packed))):
            here = of.at(k, c.mul(b, w["kb"]), c.mul(shared, w["kh"]))
            Panels(of, k_panels, wide).across(here, w["ks"], keys, depth)
            here = of.at(v, c.mul(b, w["vb"]), c.mul(shared, w["vh"]))
            value_panels = Panels(of, v_panels, wide_values)
            value_panels.along(lambda k: of.at(here, c.mul(k, w["vs"])), keys, values)
            c.put(packed, source)
        count = c.least(c.sub(w["queries"], first), rows)
        with c.loop(0, rows) as i:  # rows that fill up the tile repeat the last one
            row = c.add(first, c.least(i, c.sub(count, 1)))
            here = of.at(q, c.mul(b, w["qb"]), c.mul(h, w["qh"]), c.mul(row, w["qs"]))

            def ask(d: Value, lanes: int) -> None:
                one = c.b.fmul(of.load(of.at(here, d), lanes), c.f(scale, lanes))
                c.store(one, c.at(asked, c.mul(i, depth), d))

            steps(c, depth, ask, vectors=1)
        limit = c.least(keys, c.add(first, rows)) if form.causal else keys
        with c.loop(0, limit, wide) as j:
            panel, to = c.at(k_panels, c.mul(j, depth)), c.at(scores, j)
            c.call(score, asked, depth, depth, panel, to, columns)
        with c.loop(0, rows) as i:
            row = c.add(first, c.least(i, c.sub(count, 1)))
            seen = c.least(limit, c.add(row, 1)) if form.causal else limit
            line, beside = c.at(scores, c.mul(i, columns)), None
            if form.bias != "none":
                shift = c.add(c.mul(b, w["bb"]), c.mul(h, w["bh"]), c.mul(row, w["bs"]))
                beside = c.at(bias, shift, of=STORED[form.bias])
            c.store(_softmax_row(c, line, seen, beside, form), c.at(inverse, i))
            with c.loop(seen, limit) as j:
                c.store(c.f(0.0), c.at(line, j))
        with c.loop(0, values, wide_values) as j:
            panel, to = c.at(v_panels, c.mul(j, keys)), c.at(answers, j)
            c.call(answer_all, scores, columns, limit, panel, to, results)
        with c.loop(0, count) as i:
            part, line = c.load(c.at(inverse, i)), c.at(answers, c.mul(i, results))
            query = c.mul(b, w["ob"]), c.mul(h, w["oh"]), c.mul(c.add(first, i), w["os"])
            to = of.at(out, *query)

            def answer(d: Value, lanes: int) -> None:
                x = c.b.fmul(c.load(c.at(line, d), lanes), c.f(part, lanes))
                of.store(x, of.at(to, d))

            steps(c, values, answer, vectors=1)


Strides = tuple[int, int, int]  # of batch, head and row; elements of a row are side by side


def room_per_thread(keys: int, depth: int, values: int, lanes: int) -> int:
    """Return the floats of scratch memory of a thread, rounded up to whole cache lines."""
    each = (lanes * vectors_for(x, lanes) for x in (keys, values))
    columns, results = (-(-x // wide) * wide for x, wide in zip((keys, values), each, strict=True))
    rows = TILES[lanes][0][0]
    total = columns * depth + results * keys + rows * (columns + depth + results)
    return -(-total // 16) * 16


def prepare_attention(
    sizes: Sequence[int],
    strides: Sequence[Strides],
    causal: bool,
    kinds: tuple[str, str],
    scale: float,
) -> Callable[[Word, Word, Word, Word, Word], Call]:
    """Return ``call(q, k, v, out, bias)``, which takes their addresses. ``sizes`` are batch, query
    heads, query heads per key head, queries, keys, D and Dv; ``strides`` those of q, k, v, out and
    bias; ``kinds`` the element types of the bias and of all others."""
    form = AttentionKernel(causal, *kinds, *(vectors_for(sizes[i], width()) for i in (4, 6)))
    room = Room("attention", 0, room_per_thread(*sizes[4:], width()))
    bits = struct.unpack("<i", struct.pack("<f", scale))[0]
    words = (*sizes, bits, room.per_thread, *(s for part in strides for s in part))
    code = load_run(f"attention {form} of {width()}", partial(_attend, form))
    return lambda q, k, v, out, bias: Call(code, (q, k, v, out, bias, room, *words))
