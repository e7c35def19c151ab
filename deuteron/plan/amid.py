"""What the caches hold when a plan on a CPU comes to a region.

Measured by itself again and again, a region finds its weights, its code and that of the libraries
it calls in a cache. In a run of the whole plan the other regions come between: what was written
last, its inputs, is there, and the rest comes from afar. That takes up to three times as long, and
another candidate may be the best: a library takes tens of microseconds to find its way from Python
to what it multiplies with, and what asks for weights ahead of time does not wait for them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

from deuteron.codegen import openmp
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.target import core_cache

# Calls of torch's in a row that take as long as one amid native code, or less: an addition of 240
# numbers took 2 µs, and 24 (two threads) to 44 (one) with other memory read before, on a Xeon.
LEAVES = 30
TWICE = 2  # times what a cache holds has to be read until nothing else is in it


def moved(regions: Iterable[Region]) -> int:
    """Bytes that these regions read and write."""
    return sum(r.graph.types[v].nbytes for r in regions for v in (*r.inputs, *r.outputs))


def room() -> int:
    """Bytes that the caches of all cores hold that compute."""
    return core_cache() * torch.get_num_threads()


def amid(others: int, near: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Leaves the caches as others do that move so many bytes, with what is ``near`` in them if it
    fits."""
    if not openmp.available():
        return None
    from deuteron.kernels.cpu.touch import touching

    small = (t for t in near if t.nbytes <= room() and TensorType.from_tensor(t).is_dense)
    tape = touching([_elsewhere(min(others, TWICE * room())), *small])
    words = tape.words()
    return lambda: tape.run(words)


@cache
def _elsewhere(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)
