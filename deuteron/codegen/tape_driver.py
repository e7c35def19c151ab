"""The driver: walks the calls of a tape (``calls``), each on the whole team or on its first member,
with a barrier where the next call must wait for all of them."""

from functools import partial

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.calls import FRONT, HEAD
from deuteron.codegen.llvm import I32, I64, PTR, VOID, Code, Loaded, load


def _write(module: ir.Module) -> None:
    c = Code(module, "run", [PTR, I64, I64])
    tape, thread, threads = c.args
    here = c.variable(PTR, c.at(tape, FRONT, of=I64))
    several = c.cmp(">", threads, 1)
    with c.loop(0, c.word(tape, 3)):
        call = c.get(here, PTR)
        kernel, words = c.pointer(call, 0), c.at(call, HEAD, of=I64)
        size, threaded, wait = (c.word(call, i) for i in range(1, HEAD))

        def first_member() -> None:
            with c.when(c.cmp("==", thread, 0)):
                c.b.call_address(kernel, VOID, [words, c.i(0), c.i(1)])

        everyone = partial(c.b.call_address, kernel, VOID, [words, thread, threads])
        c.either(c.cmp("!=", threaded, 0), everyone, first_member)
        with c.when(c.b.and_(several, c.cmp("!=", wait, 0))):
            c.b.call_address(c.pointer(tape, 2), VOID, [])
        c.put(here, c.at(call, size, of=I64))
    c.ret()
    team = Code(module, "team", [PTR])
    asked = team.pointers(team.args[0], 2)
    numbers = [team.b.call_address(function, I32, []) for function in asked]
    team.call(c, team.args[0], *(team.b.sext(number, I64) for number in numbers))
    team.ret()


def driver() -> Loaded:
    """``run(tape, thread, threads)``, and ``team(tape)`` for a member of an OpenMP team."""
    return load("driver", _write)
