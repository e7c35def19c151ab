"""out = x · mask / (1 − p) with the very mask that torch would draw, its generator left as torch
would leave it.

torch's generator is a Mersenne Twister with a state of 624 words. Each draw takes two of them; when
all are taken, the next 624 are made from them. torch makes and takes words one by one; here all
words of a call are made first, by vectors, and then compared and multiplied by all threads:

    bytes = 16 · x for the words, written and read, and 9 · x
"""

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from math import ceil

import numpy as np
import torch

from deuteron.codegen.calls import Argument, Call, Room, runner
from deuteron.codegen.llvm import I8, I32, I64, Code, Value, constant, load_run, vec, width
from deuteron.kernels.cpu.sweep import SERIAL, steps

WORDS, FAR = 624, 397  # of the state; a word's second parent comes this far after it
UPPER, LOWER, TWIST = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
# tempering of a word before it is used: whether to shift left, by how many bits, and the mask
STIRRED = (False, 11, 0xFFFFFFFF), (True, 7, 0x9D2C5680), (True, 15, 0xEFC60000)
STIRRED = *STIRRED, (False, 18, 0xFFFFFFFF)
DRAWN = 53  # bits of two words that are compared with a probability
# torch's copy of its state, as 64-bit words: how many are left, which is next, and all of them
LEFT, NEXT, ALL = 1, 2, slice(3, 3 + WORDS)

_one_at_a_time = threading.Lock()


def _make(c: Code, words: Value, *thread: Value) -> None:
    """Write ``count`` words in order. Behind the state lies the number of its words that are
    taken."""
    state, to = c.pointers(words, 2)
    (count,) = c.words(words, 2, 1)
    b, number, taken = c.b, partial(constant, I32), c.index(state, WORDS)

    def load(at: int | Value, lanes: int) -> Value:
        return b.load(c.at(state, at, of=I32), typ=vec(lanes, I32), align=4)

    def renew(far: int, at: Value, lanes: int, after: Value | None = None) -> None:
        after = load(c.add(at, 1), lanes) if after is None else after
        upper = b.and_(load(at, lanes), number(UPPER, lanes))
        joined = b.or_(upper, b.and_(after, number(LOWER, lanes)))
        odd = b.sub(number(0, lanes), b.and_(after, number(1, lanes)))  # all bits, or none
        twisted = b.xor(b.lshr(joined, number(1, lanes)), b.and_(odd, number(TWIST, lanes)))
        made = b.xor(load(c.add(at, far), lanes), twisted)
        b.store(made, c.at(state, at, of=I32), align=4)

    def hand_out(base: Value, at: Value, lanes: int) -> None:
        word = load(at, lanes)
        for left, bits, some in STIRRED:
            moved = (b.shl if left else b.lshr)(word, number(bits, lanes))
            word = b.xor(word, b.and_(moved, number(some, lanes)))
        b.store(word, c.at(to, base, at, of=I32), align=4)

    rest = c.sub(WORDS, taken)
    steps(c, rest, partial(hand_out, c.sub(0, taken)), first=taken, vectors=1)
    with c.loop(rest, count, WORDS) as base:
        steps(c, c.i(WORDS - FAR), partial(renew, FAR), vectors=1)
        near = partial(renew, FAR - WORDS)
        steps(c, c.i(FAR - 1), near, first=WORDS - FAR, vectors=1)
        near(c.i(WORDS - 1), 1, load(0, 1))
        steps(c, c.i(WORDS), partial(hand_out, base), vectors=1)


def _drop(c: Code, words: Value, *thread: Value) -> None:
    x, drawn, out, mask, scale = c.pointers(words, 5)
    count, below = c.words(words, 5, 2)
    b, factor = c.b, c.load(scale)
    with c.loop(*c.share(count, *thread)) as i:
        pair = (c.load(c.at(drawn, c.mul(i, 2), k, of=I32), of=I32) for k in (0, 1))
        upper, lower = (b.zext(word, I64) for word in pair)
        both = b.and_(b.or_(b.shl(upper, c.i(32)), lower), c.i((1 << DRAWN) - 1))
        kept = c.cmp("<", both, below)
        c.store(b.zext(kept, I8), c.at(mask, i, of=I8))
        times = b.select(kept, c.f(1.0), c.f(0.0))
        c.store(b.fmul(b.fmul(c.load(c.at(x, i)), times), factor), c.at(out, i))


def prepare_dropout(count: int, p: float) -> tuple[Callable[..., None], int]:
    """Return ``run(generator, x, out, mask)`` for ``count`` elements, each zero with probability
    ``p``, and the floats of scratch memory it needs."""
    drawn = Room("drawn", 2 * count + 2 * WORDS)
    scale = torch.tensor(1.0 / (1.0 - p))
    below = ceil((1.0 - p) * 2.0**DRAWN)
    make = Call(load_run(f"twister of {width()}", _make), (Argument(3), drawn, 2 * count), False)
    given = (Argument(0), drawn, Argument(1), Argument(2), scale, count, below)
    run = runner([make, Call(load_run("dropout", _drop), given, count > SERIAL)])

    def draw(generator: torch.Generator, *tensors: torch.Tensor) -> None:
        with _one_at_a_time:
            kept = generator.get_state()
            whole = kept.numpy().view(np.int64)
            left = int(whole[LEFT]) & 0xFFFFFFFF
            taken = WORDS if left == 1 else int(whole[NEXT])
            state = np.append(whole[ALL], taken).astype(np.uint32)
            run(*tensors, torch.from_numpy(state.view(np.int32)))
            over = 2 * count - (WORDS - taken)  # words that are not of the state it began with
            taken = taken + 2 * count if over <= 0 else (over - 1) % WORDS + 1
            whole[ALL], whole[NEXT] = state[:WORDS], taken
            whole[LEFT] += WORDS + 1 - taken - left
            generator.set_state(kept)

    return draw, drawn.floats


@lru_cache
def draws_like_torch() -> bool:
    """Whether torch draws as this file does, which depends on how it was built."""
    for count, before in ((1, 0), (311, 1), (312, 3), (1500, 0)):
        ours, theirs = (torch.Generator().manual_seed(count) for _ in range(2))
        for generator in (ours, theirs):
            torch.empty(before).uniform_(generator=generator)
        want = torch.empty(count, dtype=torch.bool).bernoulli_(0.7, generator=theirs)
        x, mask = torch.ones(count), torch.empty(count, dtype=torch.bool)
        out = torch.empty(count)
        prepare_dropout(count, 0.3)[0](ours, x, out, mask)
        if not torch.equal(mask, want) or not torch.equal(ours.get_state(), theirs.get_state()):
            return False
    return True
