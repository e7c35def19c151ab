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
from contextlib import suppress
from functools import update_wrapper
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, compiler
from torch._C import _get_deterministic_algorithms as must_be_ordered
from torch._C import _is_any_autocast_enabled as autocasting
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy
from torch.overrides import handle_torch_function, has_torch_function

from deuteron.errors import DeuteronError
from deuteron.functional.arguments import Parameters, check_tensor
from deuteron.functional.context import gradient_follows, is_captured, is_differentiated
from deuteron.functional.explain import HandedOn, Recording
from deuteron.functional.small import LIMITS, WITH_GRADIENT, delegation, why_torch

P = ParamSpec("P")
R = TypeVar("R")
Question = Callable[..., bool]  # of the arguments of a call

# Element types, for ``on_cpu``
ANY = frozenset(t for t in vars(torch).values() if isinstance(t, torch.dtype) and not t.is_complex)
WIDE = frozenset({torch.float32, torch.float64})
LOW = frozenset({torch.float16, torch.bfloat16})
# With these torch refuses; a plan of ours may know better, or say what is wrong.
REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


def delegates(
    call: Callable[..., Any] | None = None,
    *,
    joined: Callable[..., Any] | None = None,
    several: bool | Question = False,
    unless: Question | None = None,
    on_cpu: Collection[torch.dtype] | Question = frozenset(),
    cpu_bytes: float = math.inf,
    ordered: bool = True,
    autocast: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose small calls ``call`` answers: torch's own, or one in Python that may return
    NotImplemented. That, and all questions, take the same arguments, by place and by name. Without
    a ``call`` a function is one node under ``torch.fx``, as all are.

    joined     what answers in its place where an argument is given that has a name only: those are
               ours, and torch's function does not have them
    several    whether it is several calls of torch's, which are made only where a gradient follows
    unless     calls that are never handed on: torch's answer, or its gradient, would be wrong
    on_cpu     which calls that are not small it answers on a CPU: element types, or a question
    cpu_bytes  up to which size it answers those types
    ordered    whether its gradient has the same bits in every run on a GPU
    autocast   whether autocast leaves it alone, or has a rule for it that gives the type ours has

    What no plan can be made for is torch's at any size: how large a tensor is must not decide what
    is accepted. The first argument may be given by torch's name for it, ``input``.
    """
    torchs, with_ours = cast(Any, call), cast(Any, joined or call)
    plain = unless is None and several is not True and ordered

    def is_several(args: Any, named: Any) -> bool:
        return several(*args, **named) if callable(several) else several

    def may(args: Any, named: Any) -> bool:
        """Whether torch's function is right, and one call or better than ours."""
        if (unless is not None and unless(*args, **named)) or (not ordered and must_be_ordered()):
            return False
        if several is False or not is_several(args, named):
            return True
        return gradient_follows(*args, *named.values())

    def should(x: Tensor, args: Any, named: Any) -> bool:
        """Whether a call that is not of the smallest is better off with torch."""
        nbytes, device = x.nbytes, x.get_device()
        limit = LIMITS[device]
        if nbytes <= limit:
            return True
        if device >= 0:
            needed = nbytes <= WITH_GRADIENT * limit and is_differentiated(x)
            return needed and not is_several(args, named) and not is_captured(x)
        if callable(on_cpu):
            return on_cpu(*args, **named)
        return nbytes <= cpu_bytes and x.dtype in on_cpu

    def answer(args: Any, named: Any, at_any_size: bool = False) -> Any:
        """torch's result, or NotImplemented where the call is not for it or it refuses."""
        if call is not None and delegation.allowed and (autocast or not autocasting()):
            with suppress(*REFUSALS):
                if may(args, named) and (at_any_size or should(args[0], args, named)):
                    return with_ours(*args, **named)
        return NotImplemented

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        run: Any = function
        name, parameters = function.__name__, Parameters(function)
        places, known, has_place = parameters.places, parameters.known, parameters.has_place

        def wrapper(*args: Any, **named: Any) -> Any:
            try:  # the smallest calls, in the fewest steps: a microsecond is felt
                if (
                    call is not None
                    and not (is_dynamo_compiling() or compiler._is_compiling_flag)
                    and not has_torch_function((*args, *named.values()) if named else args)
                    and args[0].nbytes <= LIMITS.least
                    and delegation.allowed
                    and not Recording.active
                    and (autocast or not autocasting())
                    and len(args) <= places
                    and (not named or known[len(args)].issuperset(named))
                ):
                    if plain and (not named or has_place[len(args)].issuperset(named)):
                        found = torchs(*args, **named)
                    else:
                        found = with_ours(*args, **named) if may(args, named) else NotImplemented
                    if found is not NotImplemented:
                        return found
            except REFUSALS:
                pass
            return slowly(args, named)

        def slowly(args: Any, named: Any) -> Any:
            if args.__class__ is Proxy:  # torch.fx traces this very function: a symbol for all args
                return args.tracer.create_proxy("call_function", spread, (args, named), {})
            args, named = parameters.fit(args, named)
            if is_compiling():
                return run(*args, **named)
            values = (*args, *named.values())
            if has_torch_function(values):  # symbols of torch.fx, tensor subclasses
                return handle_torch_function(wrapper, values, *args, **named)
            found = answer(args, named)
            if found is not NotImplemented:
                return told(found, name, args[0])
            check_tensor(name, args[0])
            try:
                return run(*args, **named)
            except DeuteronError as refusal:
                found = answer(args, named, at_any_size=True)
                if found is NotImplemented:
                    raise
                return told(found, name, args[0], f"no plan of ours can be made: {refusal.wrong}")

        def spread(args: Any, named: Any) -> Any:
            return wrapper(*args, **named)

        update_wrapper(wrapper, function)
        del wrapper.__wrapped__  # type: ignore[attr-defined]  # torch.fx would trace that instead
        wrapper.__signature__ = parameters.signature  # type: ignore[attr-defined]
        return cast(Callable[P, R], wrapper)

    return decorate


def told(found: R, name: str, x: Tensor, why: str = "") -> R:
    """What torch's function found, after ``explain`` was told about it."""
    if Recording.active:
        kind = str(x.dtype).removeprefix("torch.")
        Recording.add(HandedOn(f"{name}(x: {kind}{list(x.shape)})", why or why_torch(x)))
    return found
