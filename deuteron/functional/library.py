"""Small calls go to torch: where launching is all there is to pay, its own function is quicker.

A call of ours finds its plan by shapes, strides and types, in Python, and its gradient is a node
written in Python. torch does the same in C++. That is no matter once a kernel runs longer than its
launch takes; below, ``@delegates(call)`` hands the arguments to torch's function, or to a few of
them, with torch's gradient. The numbers are torch's then.

One call of torch's was quicker to launch than one of ours wherever that was measured. Several are
not on a GPU, unless a gradient follows: a node in Python costs more than launching them. (On a CPU
some would be, and are not handed on.)

On a CPU a few functions are torch's at any size: those that it has as one call, with one more for
the gradient, whose kernels were the quicker ones in bench/results/cpu_operators-cpu-aarch64.md.
There is nothing to fuse in a call that is one operator. Others are where no gradient follows: their
kernel is as quick as ours, and finding ours is not for nothing.

``explain`` says when a call was handed on, and :class:`delegation` forbids it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import compiler, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _get_deterministic_algorithms as must_be_ordered
from torch._C import _is_any_autocast_enabled as autocasting
from torch._C import _is_tracing as jit_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.cuda import is_current_stream_capturing
from torch.fx.proxy import TraceError

from deuteron.errors import DeuteronError
from deuteron.functional.given import a_tensor
from deuteron.functional.wrapper import (
    MISSING,
    SCOPES,
    Plain,
    any_symbol,
    recorded,
    sorted_out,
    wrapper,
)
from deuteron.target import Target
from deuteron.target import target as find_target

Tensor = torch.Tensor
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # where there is CUDA
P = ParamSpec("P")
R = TypeVar("R")

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
# Element types whose calls torch answers on a CPU, however large
ANY: frozenset[torch.dtype] = frozenset(
    t for t in vars(torch).values() if isinstance(t, torch.dtype) and not t.is_complex
)
WIDE = frozenset({torch.float32, torch.float64})
LOW = frozenset({torch.float16, torch.bfloat16})
NEVER: frozenset[torch.dtype] = frozenset()
# From so many bytes on a kernel of ours for simple work on 16-bit numbers, for which torch's are
# slow, makes up for what finding it costs; and one to train, for the node of its gradient.
SHORT_BYTES, SHORT_TO_TRAIN = 128 * 1024, 256 * 1024
# With these torch refuses, and plans of ours may know better or say what is wrong.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


class Limits(dict[int, int]):
    """By the index of a device (-1 is the CPU), the bytes of a tensor up to which a call is
    launch-bound: torch reads and writes it while the host would still look for our plan. Fewer
    than none where calls may not be handed on, so that one look answers both. ``least``: that of
    any device."""

    least = CPU_BYTES

    def __missing__(self, index: int) -> int:
        target = find_target("cpu" if index < 0 else f"cuda:{index}")
        found = self[index] = limit_of(target) if delegation.allowed else -1
        return found

    def forget(self) -> None:
        """Whether calls may be handed on has changed."""
        self.clear()
        self.least = CPU_BYTES if delegation.allowed else -1
        _settle()


LIMITS = Limits()


def limit_of(target: Target) -> int:
    return int(OURS_S * target.stream * REACHED / 2) if target.is_cuda else CPU_BYTES


class Heard:
    """What ran while ``explain`` listens, in its thread."""

    listeners = 0  # looked at in every call: a thread's own memory takes ten times as long
    _here = threading.local()

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def __enter__(self) -> list[Any]:
        Heard.listeners += 1
        _settle()
        self.before, Heard._here.parts = getattr(Heard._here, "parts", None), self.parts
        return self.parts

    def __exit__(self, *error: object) -> None:
        Heard._here.parts = self.before
        Heard.listeners -= 1
        _settle()

    @staticmethod
    def add(part: Any) -> None:
        """Something with ``explain()`` ran."""
        parts = getattr(Heard._here, "parts", None)
        if parts is not None:
            parts.append(part)


@dataclass(frozen=True)
class Handed:
    """A call that torch's own function answered, as ``explain`` shows it."""

    name: str
    shown: str
    nbytes: int
    limit: int
    target: Target
    refusal: str = ""

    def explain(self) -> str:
        return (
            f"{self.name}({self.shown}): torch's own function, not a plan of ours\n"
            f"  why: {self._because()}\n"
            "  forbid it: with dt.functional.delegation(False): …"
        )

    def _because(self) -> str:
        if self.refusal:
            return f"no plan of ours can be made: {self.refusal}"
        if self.nbytes > self.limit and not self.target.is_cuda:
            return (
                "one operator, so nothing to fuse, and torch's kernels for it were the quicker "
                f"ones on a {self.target.name} where it was measured"
            )
        because = (
            f"torch's kernels read and write them within the {OURS_S * 1e6:.0f} µs that finding a "
            "plan costs, by estimate"
            if self.target.is_cuda
            else "torch's calls were the quicker ones where it was measured"
        )
        if self.nbytes > self.limit:
            because += f", and {WITH_GRADIENT} times as many where a gradient follows"
        return (
            f"launch-bound on {self.target.name}: x has {self.nbytes:,} bytes, and up to "
            f"{self.limit:,} {because}"
        )


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
        self._set(allowed)

    @staticmethod
    def _set(allowed: bool) -> None:
        delegation.allowed = allowed
        LIMITS.forget()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._set(self.before)


def delegates(
    call: Callable[..., Any],
    *,
    plain: Plain | Sequence[Plain] = (),
    by_name: Collection[str] = (),
    without: Collection[str] = (),
    ordered: bool = True,
    several: bool = False,
    single: str = "True",
    keeps_type: bool = False,
    on_cpu: Collection[torch.dtype] | Callable[[Tensor, Any], bool] = NEVER,
    cpu_bytes: float = math.inf,
    asks: str = "{second}",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose small calls ``call`` answers, which takes the same arguments, each in its
    place; one in Python may return NotImplemented. ``plain``: calls in C++ for the smallest ones
    without anything special, the first of several that fits. ``by_name``: arguments that ``call``
    takes by name alone. ``without``: those that it does not have; a call that gives one is not
    handed on. ``ordered``: whether its gradient has the same bits in every run on a GPU.
    ``several``: whether it is several calls in any case. ``single``: an expression of the
    arguments for whether it is one; several are only made where a gradient follows, and where none
    is recorded that is all that is asked.
    ``keeps_type``: whether autocast leaves its type alone, or knows it by name and gives it the
    type that ours would have, so that nobody need ask. ``on_cpu``: element types of which it
    answers calls up to ``cpu_bytes`` there, or a question to the first two arguments, or the one
    called ``asks`` for the second, whether it answers a call that is not of the smallest.

    Arguments that ``function`` does not have are not handed on: what is right must not depend on
    the size. The first one may be given by torch's name for it, ``input``.

    A call of torch's takes 8 µs, every question before it up to a tenth of one: what can be known
    beforehand is not asked again."""
    larger = "is_torchs({x}, several, on_cpu, cpu_bytes)"
    if callable(on_cpu):
        larger = f"on_cpu({{x}}, {asks}) if {{x}}.is_cpu and delegation.allowed else "
        larger = f"({larger}is_torchs({{x}}, several, NEVER, 0))"
    asked = [] if keeps_type else ["not autocasting()"]
    asked += [] if ordered else ["not must_be_ordered()"]
    given = {"several": several, "on_cpu": on_cpu, "cpu_bytes": cpu_bytes}
    ways = (plain,) if isinstance(plain, Plain) else plain

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return wrapper(function, call, ways, larger, asked, single, by_name, without, given, SCOPE)

    return decorate


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """A function that no call of torch's answers; under ``torch.fx`` it is one node, as the others
    are."""
    return wrapper(function, function, (), "False", ["False"], "True", (), (), {}, SCOPE)


def is_launch_bound(x: Tensor) -> bool:
    """Whether torch would have read and written ``x`` before we had found our plan."""
    nbytes = x.nbytes
    return nbytes <= LIMITS.least or nbytes <= LIMITS[x.get_device()]


def _is_torchs(x: Tensor, several: bool, on_cpu: Collection[torch.dtype], cpu_bytes: float) -> bool:
    """Whether torch's function should have a call that is not of the smallest."""
    nbytes, device = x.nbytes, x.get_device()
    if nbytes <= LIMITS[device]:
        return True
    if device < 0:
        return nbytes <= cpu_bytes and x.dtype in on_cpu and delegation.allowed
    return (
        nbytes <= WITH_GRADIENT * LIMITS[device]
        and not several
        and x.requires_grad
        and is_grad_enabled()
        and not is_captured(x)
    )


def all_but(types: Collection[torch.dtype]) -> Callable[[Tensor, Any], bool]:
    """For ``on_cpu``: torch answers all calls, except large ones of these 16-bit types."""

    def is_torchs(x: Tensor, second: Any) -> bool:
        if x.dtype not in types:
            return True
        return x.nbytes < (SHORT_TO_TRAIN if is_differentiated(x) else SHORT_BYTES)

    return is_torchs


def is_differentiated(x: Tensor) -> bool:
    """Whether a gradient of ``x`` may follow."""
    return x.requires_grad and is_grad_enabled()


def in_transform() -> bool:
    """Whether vmap, jvp, torch.func.grad or dual numbers are at work, which must see torch's
    operators: to them a kernel of ours is a constant."""
    return transforms_active() or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether somebody records operators, or runs them on tensors that are not real: a mode of the
    dispatcher (FakeTensorMode, make_fx) or ``torch.jit.trace``. To them a kernel of ours is a
    constant, so the call has to be an operator."""
    return dispatch_modes() > 0 or jit_tracing()


def without_memory(*tensors: Tensor | None) -> bool:
    """Whether a tensor has no memory that a kernel could read: a meta one, a fake one, or one that
    stands for others, as distributed tensors do. The dispatcher knows what to do with it."""
    return any(
        isinstance(t, Tensor)
        and (t.is_meta or torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Python))
        for t in tensors
    )


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    return autocasting() and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def several_calls_win(*tensors: Tensor | None) -> bool:
    """Whether a few calls of torch's are quicker than one of ours: where a gradient follows, and
    nobody records a CUDA Graph, in which launching costs nothing."""
    if is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return not is_captured(t)
    return False


def is_captured(x: Tensor) -> bool:
    """Whether a CUDA Graph records what is done with ``x``; see ``CAPTURED``."""
    return bool(x.is_cuda and raw_stream(x.get_device()) and is_current_stream_capturing())


def heard(found: R, name: str, x: Tensor, refusal: str = "") -> R:
    """What torch's function found, after ``explain`` was told about it."""
    kind = str(x.dtype).removeprefix("torch.")
    limit, target = LIMITS[x.get_device()], find_target(x.device)
    Heard.add(Handed(name, f"x: {kind}{list(x.shape)}", x.nbytes, limit, target, refusal))
    return found


def _instead(
    call: Callable[..., Any], given: dict[str, Any], refusal: DeuteronError, name: str, x: Tensor
) -> Any:
    """What torch makes of a call that no plan can be made for (complex numbers, a pool of
    integers), so that large tensors are answered as small ones are; else the refusal. Small ones
    that are not strided are not answered either."""
    try:
        found = call(**given) if x.layout is torch.strided else NotImplemented
    except REFUSALS:
        found = NotImplemented
    if found is NotImplemented:
        raise refusal
    return found if not Heard.listeners else heard(found, name, x, refusal.wrong)


# what all wrappers name: a global is read sooner than an attribute
SCOPE = {
    "is_dynamo_compiling": is_dynamo_compiling,
    "compiler": compiler,
    "LEAST": LIMITS.least,
    "is_torchs": _is_torchs,
    "autocasting": autocasting,
    "must_be_ordered": must_be_ordered,
    "Heard": Heard,
    "heard": heard,
    "REFUSALS": REFUSALS,
    "NEVER": NEVER,
    "delegation": delegation,
    "instead": _instead,
    "DeuteronError": DeuteronError,
    "MISSING": MISSING,
    "sorted_out": sorted_out,
    "TraceError": TraceError,
    "any_symbol": any_symbol,
    "recorded": recorded,
    "a_tensor": a_tensor,
    "is_grad_enabled": is_grad_enabled,
    "is_current_stream_capturing": is_current_stream_capturing,
    "raw_stream": raw_stream,
}


def _settle() -> None:
    """What wrappers need not ask one by one: while somebody listens, or calls may not be handed on,
    no tensor is small enough to go to torch at once."""
    least = -1 if Heard.listeners else LIMITS.least
    for scope in (SCOPE, *SCOPES):
        scope["LEAST"] = least
