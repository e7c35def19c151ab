"""Kernels that follow each other closely (programmatic dependent launch, from Hopper on).

A kernel that ends with a small one, a merge or a sum over its programs, spends more on launching
that than the merge takes. Launched early, it waits on the multiprocessors for its turn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter(CHAIN: tl.constexpr, FIRST: tl.constexpr):
    """Comes before all reading and writing: let the next kernel of the chain be launched, and wait
    until the one before has ended, unless this is the first."""
    if CHAIN:
        gdc_launch_dependents()
        if not FIRST:
            gdc_wait()
