"""Which calls are small enough for torch's own functions, and whether they may go there."""

from __future__ import annotations

from torch import Tensor

from deuteron.target import Target
from deuteron.target import target as find_target

# On a GPU: what a call of ours costs the host more than one of torch's, in seconds. Differences of
# 3 to 8 µs were measured on an H200's host; the least is taken, because beyond it torch's kernels
# take the GPU longer, even where the host still waits less. The part of the memory's speed that
# they reach is assumed, the planner's usual number.
OURS_S, REACHED = 3e-6, 0.75
# Where a gradient follows one call of torch's, so many times as much: our node in Python costs the
# host 30 to 110 µs more, and torch's kernels cost the GPU 6 to 15 µs more at not quite twice the
# limit (8 MB in bench/results/delegation-h200.md), 7 to 45 at twice as much again.
WITH_GRADIENT = 2
# On a CPU a number that was measured, on two Neoverse-N1 cores with nobody else on them: there
# torch's gelu, softmax and layer_norm are overtaken between 16 and 32 KB, relu and sum far beyond.
# A formula with the CPU's bandwidth, which is measured anew by each process, strayed threefold.
CPU_BYTES = 16 * 1024


class delegation:
    """Whether small calls may go to torch's own functions: at once, or within ``with``.
    ``allowed``: at first they may.

    >>> dt.functional.delegation(False)          # from now on every call is planned
    >>> with dt.functional.delegation(False):    # only in here
    ...     y = dt.functional.gelu(x)
    """

    allowed = True

    def __init__(self, allowed: bool) -> None:
        self.before = delegation.allowed
        delegation.allowed = allowed

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        delegation.allowed = self.before


def small_bytes(target: Target) -> int:
    """The bytes of a tensor up to which a call is small: torch reads and writes it while the host
    would still look for our plan."""
    return int(OURS_S * target.stream * REACHED / 2) if target.is_cuda else CPU_BYTES


class Limits(dict[int, int]):
    """:func:`small_bytes` by the index of a device; -1 is the CPU. ``least``: of any device."""

    least = CPU_BYTES

    def __missing__(self, index: int) -> int:
        target = find_target("cpu" if index < 0 else f"cuda:{index}")
        found = self[index] = small_bytes(target)
        return found


LIMITS = Limits()


def is_small(x: Tensor, nbytes: int | None = None) -> bool:
    """Whether ``x``, or something of ``nbytes`` on its device, is small, and may be handed on."""
    most = x.nbytes if nbytes is None else nbytes
    return delegation.allowed and most <= LIMITS[x.get_device()]


def why_torch(x: Tensor) -> str:
    """Why torch's function answered a call whose first tensor is ``x``."""
    limit, target = LIMITS[x.get_device()], find_target(x.device)
    if x.nbytes > limit and not target.is_cuda:
        because = (
            "one operator, so nothing to fuse, and torch's kernels for it were the quicker ones"
        )
        return f"{because} on a {target.name} where it was measured"
    because = f"torch's calls take less than finding a plan, {OURS_S * 1e6:.0f} µs, by estimate"
    if not target.is_cuda:
        because = "torch's calls were the quicker ones where it was measured"
    if x.nbytes > limit:
        because += f", and {WITH_GRADIENT} times as many where a gradient follows"
    return f"launch-bound on {target.name}: x has {x.nbytes:,} bytes, and up to {limit:,} {because}"
