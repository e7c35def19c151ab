"""out[o, index[o, e, f], f] = Σ src[o, e, f] over all e that name that place, else 0.

    bytes = 4 · src + 8 · index + 8 · out

Each thread owns some rows of the result. It sets them to zero, unless it adds to what they hold;
then it walks through the whole index and adds what falls on its rows. So nothing is written by two
threads, and elements that share a place are added in the order of the index, however many threads
there are.
"""

from dataclasses import astuple, dataclass
from functools import partial

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.calls import Argument, Call
from deuteron.codegen.llvm import I64, Code, Value, load_run, width
from deuteron.kernels.cpu.sweep import SERIAL, steps


@dataclass(frozen=True)
class Places:
    """Sizes [outer, entries, inner] of src and index with the strides of both, how many rows the
    result has in place of the entries, and the row that stays zero, or -1."""

    outer: int
    entries: int
    inner: int
    rows: int
    src: tuple[int, int, int]
    index: tuple[int, int, int]
    zero: int = -1


def _add(bits: int, whole_rows: bool, onto: bool, c: Code, words: Value, *thread: Value) -> None:
    """``whole_rows``: all of an entry has one index, and its elements lie side by side; ``onto``:
    add to what the result holds."""
    src, index, out = c.pointers(words, 3)
    outer, entries, inner, rows, *strides, zero = c.words(words, 3, 11)
    from_src, from_index = strides[:3], strides[3:]
    kind = ir.integer(bits)
    first, end = c.share(rows, *thread)

    def clear(at: Value, lanes: int) -> None:
        c.store(c.splat(c.f(0.0), lanes), c.at(out, at))

    def add(to: Value, of: Value, at: Value, lanes: int) -> None:
        here, there = c.at(out, to, at), c.at(src, of, c.mul(at, from_src[2]))
        c.store(c.b.fadd(c.load(here, lanes), c.load(there, lanes)), here)

    def row_of(*at: Value) -> Value:
        found = c.b.load(c.at(index, *at, of=kind), typ=kind, align=bits // 8)
        return found if bits == 64 else c.b.sext(found, I64)

    with c.loop(0, outer) as o:
        base = c.mul(o, rows, inner)
        if not onto:
            steps(c, c.mul(c.sub(end, first), inner), clear, c.add(base, c.mul(first, inner)))
        with c.loop(0, entries) as e:
            of, at = (c.add(c.mul(o, s[0]), c.mul(e, s[1])) for s in (from_src, from_index))

            def place(row: Value) -> tuple[Value, Value]:
                """Whether the row is this thread's to add to, and where it begins."""
                own = c.b.and_(c.cmp(">=", row, first), c.cmp("<", row, end))
                wanted = c.b.and_(own, c.cmp("!=", row, zero))
                return wanted, c.add(base, c.mul(row, inner))

            if whole_rows:
                wanted, to = place(row_of(at))
                with c.when(wanted):
                    steps(c, inner, partial(add, to, of), vectors=1)
            else:
                with c.loop(0, inner) as f:
                    wanted, to = place(row_of(at, c.mul(f, from_index[2])))
                    with c.when(wanted):
                        add(to, of, f, 1)


def prepare_scatter_add(p: Places, bits: int, onto: bool) -> Call:
    """Return the call over src, an index of ``bits`` bits, and out, which is row-major; with
    ``onto`` it adds to what out holds."""
    whole_rows = p.inner > 1 and p.index[2] == 0 and p.src[2] == 1
    name = f"scatter_add {bits} {whole_rows} {onto} {width()}"
    code = load_run(name, partial(_add, bits, whole_rows, onto))
    outer, entries, inner, rows, src, index, zero = astuple(p)
    sizes = (outer, entries, inner, rows, *src, *index, zero)
    threaded = outer * entries * inner > SERIAL
    return Call(code, (*map(Argument, range(3)), *sizes), threaded)
