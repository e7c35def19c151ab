"""Small calls go to torch: where launching is all there is to pay, its own function is quicker.

A call of ours finds its plan by shapes, strides and types, in Python, and its gradient is a node
written in Python. torch does the same in C++. That does not matter once a kernel runs longer than
its launch takes. Below, ``@delegates(call)`` hands the arguments to torch's function, with torch's
numbers and torch's gradient.

One call of torch's was quicker to launch than one of ours wherever that was measured. Several are
not on a GPU, unless a gradient follows: a node in Python costs more than launching them.

On a CPU some functions are torch's at any size: those that it has as one call, with one more for
the gradient, whose kernels were the quicker ones in bench/results/cpu_operators-cpu-aarch64.md.

``explain`` says when a call was handed on, and :class:`delegation` forbids it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms as must_be_ordered
from torch._C import _is_any_autocast_enabled as autocasting
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.overrides import handle_torch_function, has_torch_function

from deuteron.errors import DeuteronError
from deuteron.functional.arguments import Arguments, Parameters, check_tensor
from deuteron.functional.context import any_requires_grad, is_captured, is_differentiated
from deuteron.functional.explain import HandedOn, Recording
from deuteron.functional.small import LIMITS, WITH_GRADIENT, delegation, why_torch

P = ParamSpec("P")
R = TypeVar("R")
Question = Callable[[Any], bool]  # of the arguments of a call, as ``a.x``, ``a.dim``, …

# Element types, for ``on_cpu``
ANY = frozenset(t for t in vars(torch).values() if isinstance(t, torch.dtype) and not t.is_complex)
WIDE = frozenset({torch.float32, torch.float64})
LOW = frozenset({torch.float16, torch.bfloat16})
# With these torch refuses; a plan of ours may know better, or say what is wrong.
REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Rule:
    """Which calls of a function of ours torch's own answers; :func:`delegates` says what the fields
    mean. Its methods take the arguments of a call."""

    by: Callable[[Any], Any]
    several: bool | Question
    unless: Question | None
    on_cpu: Collection[torch.dtype] | Question
    cpu_bytes: float
    ordered: bool
    autocast: bool

    def answer(self, a: Arguments, at_any_size: bool = False) -> Any:
        """torch's result, or NotImplemented where the call is not for it or it refuses."""
        try:
            if self._may(a) and (at_any_size or self._should(a)):
                return self.by(a)
        except REFUSALS:
            pass
        return NotImplemented

    def _may(self, a: Arguments) -> bool:
        """Whether torch's function is allowed and right, and one call or better than ours."""
        if not delegation.allowed or (not self.autocast and autocasting()):
            return False
        if not self.ordered and must_be_ordered():
            return False
        if self.unless is not None and self.unless(a):
            return False
        if not self._is_several(a):
            return True
        # launches in a CUDA Graph, which is replayed, cost next to nothing
        needed = torch.is_grad_enabled() and any_requires_grad((*a.args, *a.named.values()))
        return needed and not is_captured(a.args[0])

    def _should(self, a: Arguments) -> bool:
        """Whether a call of this size is better off with torch."""
        x: Tensor = a.args[0]
        nbytes, device = x.nbytes, x.get_device()
        limit = LIMITS[device]
        if nbytes <= limit:
            return True
        if device >= 0:
            needed = nbytes <= WITH_GRADIENT * limit and is_differentiated(x)
            return needed and not self._is_several(a) and not is_captured(x)
        if callable(self.on_cpu):
            return self.on_cpu(a)
        return nbytes <= self.cpu_bytes and x.dtype in self.on_cpu

    def _is_several(self, a: Arguments) -> bool:
        return self.several(a) if callable(self.several) else self.several


def delegates(
    call: Callable[..., Any] | None = None,
    *,
    by: Callable[[Any], Any] | None = None,
    several: bool | Question = False,
    unless: Question | None = None,
    on_cpu: Collection[torch.dtype] | Question = frozenset(),
    cpu_bytes: float = math.inf,
    ordered: bool = True,
    autocast: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose small calls ``call`` answers, torch's own, which takes the same arguments by
    place and by name; or ``by``, which is given all of them as one object, ``a.x``, ``a.dim``, …,
    and may return NotImplemented. With neither it is one node under ``torch.fx``, as all are.

    several    whether it is several calls of torch's, which are made only where a gradient follows
    unless     calls that are never handed on: torch's answer, or its gradient, would be wrong
    on_cpu     which calls that are not small it answers on a CPU: element types, or a question
    cpu_bytes  up to which size it answers those types
    ordered    whether its gradient has the same bits in every run on a GPU
    autocast   whether autocast leaves it alone, or has a rule for it that gives the type ours has

    What no plan can be made for is torch's at any size: how large a tensor is must not decide what
    is accepted. The first argument may be given by torch's name for it, ``input``.
    """
    if call is not None:
        by = lambda a: call(*a.args, **a.named)  # noqa: E731
    rule = by and Rule(by, several, unless, on_cpu, cpu_bytes, ordered, autocast)
    return lambda function: _wrapped(function, rule)


def _wrapped(function: Callable[P, R], rule: Rule | None) -> Callable[P, R]:
    run, name, parameters = (
        cast(Callable[..., Any], function),
        function.__name__,
        Parameters(function),
    )

    def wrapper(*args: Any, **named: Any) -> Any:
        symbol: Any = args
        if symbol.__class__ is Proxy:  # torch.fx traces this very function: all of args is a symbol
            return symbol.tracer.create_proxy("call_function", spread, (args, named), {})
        args, named = parameters.fit(args, named)
        if is_compiling():
            return run(*args, **named)
        values = (*args, *named.values())
        if has_torch_function(values):  # symbols of torch.fx, tensor subclasses
            return handle_torch_function(wrapper, values, *args, **named)
        a = Arguments(parameters, args, named)
        if rule is not None:
            found = rule.answer(a)
            if found is not NotImplemented:
                return told(found, name, args[0]) if Recording.active else found
        check_tensor(name, args[0])
        try:
            return run(*args, **named)
        except DeuteronError as refusal:
            found = NotImplemented if rule is None else rule.answer(a, at_any_size=True)
            if found is NotImplemented:
                raise
            return told(found, name, args[0], f"no plan of ours can be made: {refusal.wrong}")

    def spread(args: Any, named: Any) -> Any:
        return wrapper(*args, **named)

    update_wrapper(wrapper, function)
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # torch.fx would trace that instead
    wrapper.__signature__ = parameters.signature  # type: ignore[attr-defined]
    return cast(Callable[P, R], wrapper)


def told(found: R, name: str, x: Tensor, why: str = "") -> R:
    """What torch's function found, after ``explain`` was told about it."""
    if Recording.active:
        kind = str(x.dtype).removeprefix("torch.")
        Recording.add(HandedOn(f"{name}(x: {kind}{list(x.shape)})", why or why_torch(x)))
    return found
