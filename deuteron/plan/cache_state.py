"""Measuring a region on a CPU with the caches as the other regions of a plan leave them.

Measured by itself again and again, a region finds its weights, its code and that of the libraries
it calls in a cache. In a run of the whole plan the other regions run in between: only the region's
inputs, which were written last, are still in a near cache, and all else has to come from a more
distant one or from memory. That takes up to three times as long, and another candidate may then be
the best: a library takes tens of microseconds from the call in Python to its multiplication, and a
kernel that prefetches its weights does not wait for them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

from deuteron.codegen import openmp
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.target import core_cache

# A call of torch's between native code takes as long as this many calls in a row, or less: on a
# Xeon an addition of 240 numbers took 2 µs in a row, and after other memory was read 24 µs (two
# threads) to 44 µs (one).
LEAVES = 30
TWICE = 2  # to be sure that nothing else is in a cache, read this many times its size


def moved(regions: Iterable[Region]) -> int:
    """Bytes that these regions read and write."""
    return sum(r.graph.types[v].nbytes for r in regions for v in (*r.inputs, *r.outputs))


def room() -> int:
    """Bytes in the caches of all cores that compute."""
    return core_cache() * torch.get_num_threads()


def amid(others: int, near: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Return a function that puts the caches into the state that other regions leave behind: it
    reads ``others`` bytes of unrelated memory (no more than it takes to fill the caches), then the
    tensors in ``near`` that fit. None where the native code for that cannot run."""
    if not openmp.available():
        return None
    from deuteron.kernels.cpu.touch import touching

    small = (t for t in near if t.nbytes <= room() and TensorType.from_tensor(t).is_dense)
    tape = touching([_elsewhere(TWICE * room())[:others], *small])
    words = tape.words()
    return lambda: tape.run(words)


@cache
def _elsewhere(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)
