"""The native code of a :class:`~deuteron.codegen.launches.LaunchTape`: it walks the launches, and
for each builds on its stack what the CUDA driver reads, with the addresses of this run."""

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.launches import MOST, UNALIGNED
from deuteron.codegen.llvm import I32, I64, PTR, Code, Loaded, load

FRONT = 3  # words before the launches: the driver's function, tensors, launches
CONFIG = 7  # words of the driver's structure for a launch; the stream is the fifth
HEAD = CONFIG + 2  # words before the parameters: the function, the structure, how many there are


def _write(module: ir.Module) -> None:
    c = Code(module, "launch", [PTR, PTR, PTR], returns=I64)
    tape, addresses, stream = c.args
    status, bits = c.variable(I64, 0), c.variable(I64, 0)
    config, values, room = (c.variable(I64, count=n) for n in (CONFIG, MOST, MOST))
    function = c.pointer(tape, 0)
    with c.loop(0, c.word(tape, 1)) as i:
        c.put(bits, c.b.or_(c.get(bits), c.word(addresses, i)))
    with c.when(c.cmp("!=", c.b.and_(c.get(bits), c.i(15)), 0)):
        c.put(status, UNALIGNED)
    here = c.variable(PTR, c.at(tape, FRONT, of=I64))
    with c.loop(0, c.word(tape, 2)) as k, c.when(c.cmp("==", c.get(status), 0)):
        call = c.get(here, PTR)
        for word in range(CONFIG):
            c.store(c.word(call, 1 + word), c.at(config, word, of=I64))
        c.store(stream, c.at(config, 4, of=I64))
        count, first = c.word(call, HEAD - 1), c.at(call, HEAD, of=I64)
        with c.loop(0, count) as p:
            place, added = (c.word(first, c.add(c.mul(p, 2), i)) for i in (0, 1))
            known = c.cmp("<", place, 0)
            base = c.word(addresses, c.b.select(known, c.i(0), place))
            value = c.b.add(added, c.b.select(known, c.i(0), base))
            at = c.at(values, p, of=I64)
            c.store(value, at)
            c.store(at, c.at(room, p, of=PTR))
        null = ir.Constant(PTR, None)
        wrong = c.b.call_address(function, I32, [config, c.pointer(call, 0), room, null])
        with c.when(c.b.icmp_signed("!=", wrong, ir.Constant(I32, 0))):
            number = c.b.shl(c.add(k, 1), c.i(32))
            c.put(status, c.b.or_(number, c.b.zext(wrong, I64)))
        c.put(here, c.at(first, c.mul(count, 2), of=I64))
    c.ret(c.get(status))


def code() -> Loaded:
    """``launch(tape, addresses, stream)``: 0, :data:`UNALIGNED`, or the number of the launch that
    the driver refused, from 1, above 32 bits with its error."""
    return load("launch", _write)
