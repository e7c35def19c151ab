"""Back to the module's author: where calls are so small that torch answers them as quickly.

A stand-in that hands every call on costs the host a few microseconds each time, and in a loop in
which the host is late all of them are felt. So it calls its author's forward at once, and a module
that has had nothing but such calls gets its own class back: ``dt.nn.replace`` may be called again
once there is more to do.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from deuteron.functional.context import is_captured, is_differentiated
from deuteron.functional.delegate import LIMITS, delegation
from deuteron.target import target

BEFORE = "_stands_for"  # where a module keeps the class that it had
COUNT = "_calls_of_its_author"  # how many there were
ENOUGH = 16  # such calls, and no others, after which a module stands for nobody any more


def authors(module: Any, function: Any, x: Tensor) -> type[nn.Module] | None:
    """The class of which the author's ``forward`` is to be called, because ``function`` would hand
    the call on to torch; None where ours is. On a CPU, and when compiled, it always is."""
    own = module.__dict__
    before: type[nn.Module] | None = own.get(BEFORE)
    if before is None or not x.is_cuda or not delegation.allowed or torch.compiler.is_compiling():
        return None
    device = x.get_device()
    least = _ours_from(function, device) if is_differentiated(x) else LIMITS[device]
    if x.nbytes > least or is_captured(x):
        own[COUNT] = -math.inf
        return None
    own[COUNT] = count = own.get(COUNT, 0) + 1
    if count >= ENOUGH:
        module.__class__ = own.pop(BEFORE)
        del own[COUNT]
    return before


@cache
def _ours_from(function: Any, device: int) -> int:
    found: int = function.ours_from(target(f"cuda:{device}"))
    return found
