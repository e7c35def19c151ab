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
from torch import nn
from torch.fx import Proxy

from deuteron.functional.context import is_captured, is_differentiated
from deuteron.functional.delegate import LIMITS, delegation
from deuteron.target import target

BEFORE = "_stands_for"  # where a module keeps the class that it had
COUNT = "_calls_of_its_author"  # how many there were
ENOUGH = 16  # such calls, and no others, after which a module stands for nobody any more


def authors(module: Any, function: Any, x: Any) -> type[nn.Module] | None:
    """The class of which the author's ``forward`` is to be called, because ``function`` would hand
    the call on to torch; None where ours is. On a CPU, and when compiled, it always is."""
    before: type[nn.Module] | None = module.__dict__.get(BEFORE)
    if before is None or isinstance(x, Proxy) or not x.is_cuda or not delegation.allowed:
        return None
    if torch.compiler.is_compiling():
        return None
    device = x.get_device()
    least = ours_from(function, device) if is_differentiated(x) else LIMITS[device]
    small = x.nbytes <= least and not is_captured(x)
    if counted(module, small) >= ENOUGH:
        own_class_back(module)
    return before if small else None


def counted(module: nn.Module, small: bool) -> float:
    """How many small calls a module has had, with this one; less than none once it has had one that
    was not."""
    own = module.__dict__
    own[COUNT] = found = own.get(COUNT, 0) + 1 if small else -math.inf
    return found


def own_class_back(module: nn.Module) -> None:
    """Let a module be what it was before something stood in for it."""
    before = vars(module).pop(BEFORE, None)
    vars(module).pop(COUNT, None)
    if before is not None:
        module.__class__ = before


@cache
def ours_from(function: Any, device: int, *how: Any) -> int:
    """The bytes beyond which a function of ours answers on a GPU where a gradient follows."""
    found: int = function.ours_from(target(f"cuda:{device}"), *how)
    return found
