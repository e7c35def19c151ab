"""The driver: walks the calls of a tape (``calls``), each on the whole team or on its first member,
with a barrier where the next call must wait for all of them."""

from functools import partial

from llvmlite import ir

from deuteron.codegen.calls import FRONT, HEAD
from deuteron.codegen.llvm import I32, I64, PTR, VOID, Code, Loaded, Value, load

KERNEL = ir.FunctionType(VOID, [PTR, I64, I64]).as_pointer()  # words, thread, threads
NUMBER = ir.FunctionType(I32, []).as_pointer()
BARRIER = ir.FunctionType(VOID, []).as_pointer()


def _function(c: Code, words: Value, index: int, kind: ir.Type) -> Value:
    """The function whose address is word ``index``; llvmlite calls only what has a type."""
    return c.b.load(c.at(words, index, of=I64), typ=kind)


def _write(module: ir.Module) -> None:
    c = Code(module, "run", [PTR, I64, I64])
    tape, thread, threads = c.args
    here = c.variable(PTR, c.at(tape, FRONT, of=I64))
    several = c.cmp(">", threads, 1)
    with c.loop(0, c.word(tape, 3)):
        call = c.get(here, PTR)
        kernel, words = _function(c, call, 0, KERNEL), c.at(call, HEAD, of=I64)
        size, threaded, wait = (c.word(call, i) for i in range(1, HEAD))

        def first_member() -> None:
            with c.when(c.cmp("==", thread, 0)):
                c.b.call(kernel, [words, c.i(0), c.i(1)])

        everyone = partial(c.b.call, kernel, [words, thread, threads])
        c.either(c.cmp("!=", threaded, 0), everyone, first_member)
        with c.when(c.b.and_(several, c.cmp("!=", wait, 0))):
            c.b.call(_function(c, tape, 2, BARRIER), [])
        c.put(here, c.at(call, size, of=I64))
    c.ret()
    team = Code(module, "team", [PTR])
    numbers = [team.b.call(_function(team, team.args[0], i, NUMBER), []) for i in (0, 1)]
    team.call(c, team.args[0], *(team.b.sext(number, I64) for number in numbers))
    team.ret()


def driver() -> Loaded:
    """``run(tape, thread, threads)``, and ``team(tape)`` for a member of an OpenMP team."""
    return load("driver", _write)
