"""Reads memory line by line and drops what it read, so that caches hold this and nothing else.

bytes = all of what is read
"""

from collections.abc import Sequence

import torch

from deuteron.codegen.calls import Call, Tape
from deuteron.codegen.llvm import I64, Code, Value, load_run

LINE = 64
MOST = 1024  # threads that there is room for


def _touch(c: Code, words: Value, *thread: Value) -> None:
    start, kept = c.pointers(words, 2)
    (lines,) = c.words(words, 2, 1)
    total = c.variable(I64, 0)
    with c.loop(*c.share(lines, *thread)) as line:
        here = c.word(start, c.mul(line, LINE // 8))
        c.put(total, c.add(c.get(total), here))
    c.b.store(c.get(total), c.at(kept, thread[0], of=I64))


def touching(tensors: Sequence[torch.Tensor]) -> Tape:
    """Return the calls that read these tensors one after another. They have to be dense."""
    code, kept = load_run("touch", _touch), torch.zeros(MOST, dtype=torch.int64)
    return Tape([Call(code, (t, kept, t.numel() * t.element_size() // LINE)) for t in tensors])
