"""Handing calls back to the author of a module's class, where they are so small that torch is as
quick.

``dt.nn.replace`` changes a module's class to a stand-in. A stand-in that hands every call on to
torch costs the host a few microseconds each time, and in a loop in which the GPU waits for the host
all of them count. So for small calls it runs the forward of the module's own class (its author's)
at once, and a module that has had no other calls gets its own class back. ``dt.nn.replace`` may be
called again once there is more to do.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from deuteron.functional.context import is_captured, is_differentiated
from deuteron.functional.delegate import LIMITS, may_delegate
from deuteron.target import target

BEFORE = "_stands_for"  # the attribute with the class that a module had before it was replaced
COUNT = "_calls_of_its_author"  # the attribute with the number of small calls it has had
ENOUGH = 16  # after so many small calls, and no others, a module gets its own class back


def authors(module: Any, function: Any, x: Any) -> type[nn.Module] | None:
    """Return the module's own class if its forward is to be called, because ``function`` would hand
    the call on to torch; None where ``function`` is to run. It always is on a CPU, and when
    compiled."""
    before: type[nn.Module] | None = module.__dict__.get(BEFORE)
    if before is None or isinstance(x, Proxy) or not x.is_cuda or not may_delegate():
        return None
    if torch.compiler.is_compiling():
        return None
    device = x.get_device()
    least = ours_from(function, device) if is_differentiated(x) else LIMITS[device]
    small = x.nbytes <= least and not is_captured(x)
    if counted(module, small) >= ENOUGH:
        own_class_back(module)
    return before if small else None


def is_bare(module: Any) -> bool:
    """Whether a call of a module is its class's forward and nothing else: nobody watches it, and
    it has no forward of its own."""
    heard = module._forward_hooks or module._forward_pre_hooks
    heard = heard or module._backward_hooks or module._backward_pre_hooks
    return not heard and "forward" not in vars(module)


def counted(module: nn.Module, small: bool) -> float:
    """Count a call, and return how many small calls a module has had; −∞ once it has had one that
    was not small."""
    own = module.__dict__
    own[COUNT] = found = own.get(COUNT, 0) + 1 if small else -math.inf
    return found


def own_class_back(module: nn.Module) -> None:
    """Give a module the class back that it had before it was replaced, unless something else, such
    as a parametrization, has changed its class since."""
    vars(module).pop(COUNT, None)
    ours = type(module).__module__.startswith("deuteron.") or "_recipe" in vars(type(module))
    if ours and BEFORE in vars(module):
        module.__class__ = vars(module).pop(BEFORE)


@cache
def ours_from(function: Any, device: int, *how: Any) -> int:
    """Return the bytes beyond which our function answers on a GPU where a gradient follows."""
    found: int = function.ours_from(target(f"cuda:{device}"), *how)
    return found
