"""y[n, b, a] = x[n, a, b]: channels moved innermost, or back to be outermost.

    bytes = 2 · size · x

Few rows (the three colours of an image) are loaded as vectors and interleaved; otherwise blocks of
4×4 are transposed in registers, in tiles whose cache lines stay in L1 from the first block to the
last. Numbers are moved as they are, whatever they mean.
"""

from collections.abc import Callable, Sequence
from functools import partial

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import Code, Value, load_run, vec
from deuteron.kernels.cpu import WOVEN

TILE, STRIP = 16, 512  # sides of a tile of 4×4 blocks; columns of a tile of interleaved rows
SERIAL = 16384  # moving fewer numbers takes less time than waking up a second thread


def turned(c: Code, lines: Sequence[Value]) -> list[Value]:
    """Transpose 4×4 numbers in registers."""
    low = [c.shuffle(lines[i], lines[i + 1], (0, 4, 1, 5)) for i in (0, 2)]
    high = [c.shuffle(lines[i], lines[i + 1], (2, 6, 3, 7)) for i in (0, 2)]
    halves, orders = (low, high), ((0, 1, 4, 5), (2, 3, 6, 7))
    return [c.shuffle(*half, order) for half in halves for order in orders]


def _move(bits: int, few: int, c: Code, words: Value, *thread: Value) -> None:
    x, y = c.pointers(words, 2)
    batch, rows, columns = c.words(words, 2, 3)
    kind, align = ir.integer(bits), bits // 8

    def get(*offset: Value | int, lanes: int = 1) -> Value:
        return c.b.load(c.at(source, *offset, of=kind), typ=vec(lanes, kind), align=align)

    def put(value: Value, *offset: Value | int) -> None:
        c.b.store(value, c.at(to, *offset, of=kind), align=align)

    def one(a: Value, b: Value) -> None:
        put(get(c.mul(a, columns), b), c.mul(b, rows), a)

    def block(a: Value, b: Value) -> None:
        """Transpose 4×4 numbers from (a, b) on."""
        lines = [get(c.mul(c.add(a, i), columns), b, lanes=4) for i in range(4)]
        for i, line in enumerate(turned(c, lines)):
            put(line, c.mul(c.add(b, i), rows), a)

    def woven(b: Value) -> None:
        """Interleave all rows, four columns of each from ``b`` on."""
        lines = [get(c.mul(columns, i), b, lanes=4) for i in range(few)]
        lines += [lines[-1]] * (WOVEN - few)
        pairs = [c.shuffle(lines[i], lines[i + 1], range(8)) for i in (0, 2)]
        order = [4 * row + column for column in range(4) for row in range(few)]
        put(c.shuffle(*pairs, order), c.mul(b, few))

    high, wide = (WOVEN, STRIP) if few else (TILE, TILE)
    down, across = (c.div(c.add(n, t - 1), t) for n, t in ((rows, high), (columns, wide)))
    with c.loop(*c.share(c.mul(batch, down, across), *thread)) as tile:
        line, column = c.split(tile, across)
        n, row = c.split(line, down)
        a0, b0 = c.mul(row, high), c.mul(column, wide)
        a1, b1 = c.least(c.add(a0, high), rows), c.least(c.add(b0, wide), columns)
        start = c.mul(n, rows, columns)
        source, to = (c.at(base, start, of=kind) for base in (x, y))
        whole_a, whole_b = (c.sub(e, c.rem(c.sub(e, s), 4)) for s, e in ((a0, a1), (b0, b1)))
        if few:
            with c.loop(b0, whole_b, 4) as b:
                woven(b)
            whole_a = rows
        else:
            with c.loop(b0, whole_b, 4) as b, c.loop(a0, whole_a, 4) as a:
                block(a, b)
        with c.loop(whole_a, a1) as a, c.loop(b0, whole_b) as b:
            one(a, b)
        with c.loop(whole_b, b1) as b, c.loop(a0, a1) as a:
            one(a, b)


def prepare_to_layout(n: int, rows: int, columns: int, bits: int) -> Callable[[Word, Word], Call]:
    """Return ``call(x, y)`` for the addresses of x [n, rows, columns] and y [n, columns, rows]."""
    few = rows if rows <= WOVEN else 0
    code = load_run(f"to_layout {bits} bits {few} rows", partial(_move, bits, few))
    threaded = n * rows * columns > SERIAL
    return lambda x, y: Call(code, (x, y, n, rows, columns), threaded)
