"""Small calls go to torch: where the launch is most of the cost, its own function is quicker.

A call of ours finds its plan by shapes, strides and types, in Python, and its gradient is a node
written in Python. torch does the same in C++. That does not matter once a kernel runs longer than
its launch takes. For smaller calls ``@delegates(call)`` hands the arguments to torch's function,
and numbers and gradient are torch's.

One call of torch's was quicker to launch than one of ours wherever that was measured. Several calls
of torch's are not, on a GPU, unless a gradient follows: our node in Python costs more than
launching them.

On a CPU some functions are torch's at any size: those that are one call in torch, with one more for
the gradient, and whose kernels were the quicker ones on two Neoverse-N1 cores (cpu_operators in
bench/results).

``explain`` says when a call was handed on, and :class:`delegation` forbids it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import update_wrapper
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, compiler, is_grad_enabled
from torch._C import _get_deterministic_algorithms as must_be_ordered
from torch._C import _is_any_autocast_enabled as autocasting
from torch._C import _is_tracing as jit_tracing
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy
from torch.fx.proxy import TraceError
from torch.overrides import handle_torch_function, has_torch_function

from deuteron.errors import DeuteronError
from deuteron.functional.arguments import Parameters, check_tensor
from deuteron.functional.context import (
    for_onnx,
    gradient_follows,
    is_captured,
    is_differentiated,
    is_special,
)
from deuteron.functional.explain import Recording, handed_on
from deuteron.functional.shortcuts import OTHER, Calls, Noted, Shapes, of_plan, of_torch
from deuteron.kinds import Kinds, checked
from deuteron.target import Target, target

P = ParamSpec("P")
R = TypeVar("R")
Question = Callable[..., bool]  # a predicate of the arguments of a call

# Element types, for ``on_cpu``
ANY = frozenset(t for t in vars(torch).values() if isinstance(t, torch.dtype) and not t.is_complex)
WIDE = frozenset({torch.float32, torch.float64})
LOW = frozenset({torch.float16, torch.bfloat16})
# With these torch refuses a call. A plan of ours may do it, or say better what is wrong.
REFUSALS = (
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError),
    OverflowError,
)

# ---- which calls are small

# OURS_S: how many seconds more the host spends on a call of ours than on one of torch's, on a GPU.
# On the host of an H200, 3 to 8 µs were measured. We take the least of these, because beyond it
# torch's kernels take the GPU longer, even where the host still waits less. REACHED: the part of
# the memory's speed that torch's kernels reach. It is assumed, the planner's usual number.
OURS_S, REACHED = 3e-6, 0.75
# TRAINED_S: where a gradient follows, the seconds that a call of ours costs the host, forward and
# backward. That is as much as MANY = three calls of torch's (347 and 343 µs on a slow host, batch
# norm, sum and relu). In place of one or two calls ours gains nothing while torch's kernels take
# less time than that, because the GPU then waits for the host.
TRAINED_S, MANY = 150e-6, 3
# In a training loop over a whole model the GPU waits for the host in all of its calls: on the host
# of an H200 a convolution, a norm and an activation of ResNet-50 with their gradients took 550 µs
# to launch, and one call of ours in place of the last two took 100 µs more. While torch's kernels
# take less time than IN_A_MODEL_S, ours gains nothing.
IN_A_MODEL_S = 600e-6
# How long torch's kernels take, forward and backward, in times of reading a tensor as large as x:
# an elementwise function moves two tensors forward and three backward. Other functions give a
# larger number.
PASSES = 5.0
# On a CPU the limit was measured, on two Neoverse-N1 cores with nothing else running: there ours
# overtakes torch's gelu, softmax and layer_norm between 16 and 32 KB, relu and sum far beyond. A
# formula with the CPU's bandwidth, which each process measures anew, varied threefold.
CPU_BYTES = 16 * 1024
# Up to so many numbers torch answers on a CPU where a gradient follows: our node in Python competes
# with two calls of torch's. On a core of a Xeon of 2023 sigmoid, silu and softmax with their
# gradients took ours 1.1 to 1.5 times as long from 16,000 numbers to 130,000, of 16 as of 32 bits,
# and about as long from there on.
TRAINED = 128 * 1024


class _OfThread(threading.local):
    """What a thread has said about delegation."""

    allowed = True


_HERE = _OfThread()


class delegation:
    """Allow or forbid that small calls run torch's own functions instead of plans of ours. It takes
    effect at once, in the thread that says so; as a ``with`` block it ends with the block.

    allowed  whether they may. At first they may

    >>> dt.functional.delegation(False)          # from now on every call is planned
    >>> with dt.functional.delegation(False):    # only in here
    ...     y = dt.functional.gelu(x)
    """

    unused = True  # nobody has said anything, which spares calls a look at what their thread said

    @checked(name="delegation")
    def __init__(self, allowed: bool) -> None:
        self.before = _HERE.allowed
        delegation.unused, _HERE.allowed = False, allowed

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        _HERE.allowed = self.before


def may_delegate() -> bool:
    """Whether calls in this thread may be handed on to torch."""
    return delegation.unused or _HERE.allowed


def small_bytes(machine: Target) -> int:
    """Return the bytes of a tensor up to which a call is small: torch reads and writes such a
    tensor while the host would still be looking for our plan."""
    return int(OURS_S * machine.stream * REACHED / 2) if machine.is_cuda else CPU_BYTES


class Limits(dict[int, int]):
    """:func:`small_bytes` by the index of a device; -1 is the CPU. ``least``: what is small on
    every device."""

    least = CPU_BYTES

    def __missing__(self, index: int) -> int:
        found = self[index] = small_bytes(target("cpu" if index < 0 else f"cuda:{index}"))
        return found


LIMITS = Limits()


def is_small(x: Tensor, nbytes: int | None = None) -> bool:
    """Whether a call with ``x``, or with something of ``nbytes`` on its device, is small and may be
    handed on to torch."""
    most = x.nbytes if nbytes is None else nbytes
    return may_delegate() and most <= LIMITS[x.get_device()]


# ---- handing them on


def delegates(
    call: Callable[..., Any] | None = None,
    *,
    joined: Callable[..., Any] | None = None,
    takes: int | None = None,
    several: int | Callable[..., int] = 0,
    unless: Question | None = None,
    on_cpu: Collection[torch.dtype] | Question | None = frozenset(),
    cpu_bytes: float = math.inf,
    trained: int = 0,
    ordered: bool = True,
    autocast: bool = False,
    passes: float = PASSES,
    again: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that ``call`` answers its small calls: torch's own function, or one in
    Python that may return NotImplemented. ``call`` and all predicates below take the arguments of
    the function, positional and by name. Without a ``call`` the function still is one node under
    ``torch.fx``, as all decorated functions are.

    joined     answers in place of ``call`` where a call has a keyword-only argument, which torch's
               function does not have, or more positional arguments than ``takes``
    takes      how many positional arguments ``call`` takes, if not all
    several    how many calls of torch's it makes besides the first; if any, it answers only where a
               gradient follows
    unless     which calls are never handed on, because torch's answer or its gradient would be
               wrong
    on_cpu     which calls that are not small it answers on a CPU, too: a set of element types, or a
               predicate. None: not even small ones
    cpu_bytes  up to which size it answers calls of those element types
    trained    up to how many numbers it answers on a CPU where a gradient follows
    ordered    whether its gradient has the same bits in every run on a GPU
    autocast   whether it may answer under autocast: because autocast leaves it alone, or has a rule
               for it that gives the type ours has
    passes     how long its kernels take with those of its gradient: see PASSES
    again      whether calls of one kind are all answered alike. False where values of tensors count

    If no plan can be made for a call, torch answers it at any size: how large a tensor is must not
    decide what is accepted. The first argument may be given by torch's name for it, ``input``.
    """
    torchs, with_ours = cast(Any, call), cast(Any, joined or call)
    plain = unless is None and (callable(several) or not several) and ordered
    quick = on_cpu is not None  # the smallest calls are torch's on any device

    def more_calls(args: Any, named: Any) -> int:
        return several(*args, **named) if callable(several) else several

    def with_gradient(more: int) -> float:
        """How many times as large a call may be if a gradient follows."""
        if more + 1 >= MANY:
            return 1.0
        return max(1.0, 2 * TRAINED_S / ((passes + more * PASSES) * OURS_S))

    times = {more: with_gradient(more) for more in range(MANY)}

    def asked(args: Any, named: Any) -> Any:
        """torch's answer, or NotImplemented where it would be wrong or slower than ours."""
        if (unless is not None and unless(*args, **named)) or (not ordered and must_be_ordered()):
            return NotImplemented
        if more_calls(args, named) and not gradient_follows(*args, *named.values()):
            return NotImplemented
        return with_ours(*args, **named)

    def is_torchs(x: Tensor, args: Any, named: Any) -> bool:
        """Whether torch is to answer a call, by the size of its first tensor."""
        nbytes, device = x.nbytes, x.get_device()
        limit = LIMITS[device]
        if nbytes <= limit:
            return device >= 0 or on_cpu is not None
        if device >= 0:
            if nbytes > times[0] * limit or not is_differentiated(x):
                return False
            most = times.get(more_calls(args, named), 1.0) * limit
            return nbytes <= most and not is_captured(x)
        if trained and x.numel() <= trained and is_differentiated(x):
            return not more_calls(args, named)
        if callable(on_cpu):
            return on_cpu(*args, **named)
        return on_cpu is not None and nbytes <= cpu_bytes and x.dtype in on_cpu

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        run: Any = function
        name, parameters = function.__name__, Parameters(function)
        places, known, has_place = parameters.places, parameters.known, parameters.has_place
        most = places if takes is None else takes
        kinds = Kinds(function)
        check = kinds.check
        # shortcuts to earlier answers, by whether torch may answer and gradients are recorded
        before = (Shapes(), Shapes()), (Shapes(), Shapes())

        def wrapper(*args: Any, **named: Any) -> Any:  # in few steps: each microsecond counts
            try:
                unusual = (
                    is_dynamo_compiling()
                    or compiler._is_compiling_flag
                    or (jit_tracing() and for_onnx())
                    or has_torch_function((*args, *named.values()) if named else args)
                    or not 0 < len(args) <= places
                    or (named and not known[len(args)].issuperset(named))
                )
            except TraceError:  # torch.fx traces this very function, and args is a symbol
                unusual = True
            if unusual:
                return sorted_out(args, named)
            x, count = args[0], len(args)
            may = delegation.unused or _HERE.allowed
            if call is not None and may and (autocast or not autocasting()):
                try:
                    bare = plain and count <= most and (not named or has_place[count] >= {*named})
                    if bare and ((x.nbytes <= LIMITS.least and quick) or is_torchs(x, args, named)):
                        found = torchs(*args, **named)
                        if found is not NotImplemented:
                            return recorded(found, name, x) if Recording.active else found
                except REFUSALS:
                    pass
            calls = None
            if again and not (Recording.active or is_special()):
                try:
                    calls = before[may][is_grad_enabled()][x.shape]
                    for answer in calls:
                        found = answer(args, named)
                        if found is not OTHER and found is not NotImplemented:
                            return found
                except Exception:  # the code below says what is wrong
                    pass
            return answered(args, named, calls)

        def answered(args: Any, named: Any, calls: Calls | None) -> Any:
            """Let torch or a plan answer, and keep in ``calls`` how such calls are answered."""
            x = args[0]
            if Noted.active:
                Noted.add(None)
            if call is not None and may_delegate() and (autocast or not autocasting()):
                try:
                    if is_torchs(x, args, named):
                        found = asked(args, named)
                        if found is not NotImplemented:
                            if calls is not None and calls.is_due():
                                calls.keep(of_torch(args, named, with_ours))
                            return recorded(found, name, x) if Recording.active else found
                except REFUSALS:
                    pass
            try:
                check(args, named)
                if calls is None or not calls.is_due():
                    return run(*args, **named)
                with Noted() as noted:
                    found = run(*args, **named)
                calls.keep(of_plan(args, named, noted, found))
                return found
            except Exception as wrong:
                return instead(wrong, args, named)

        def sorted_out(args: Any, named: Any) -> Any:
            """Answer an unusual call: compiled, traced, of tensor subclasses, with odd
            arguments."""
            if args.__class__ is Proxy:
                return args.tracer.create_proxy("call_function", spread, (args, named), {})
            args, named = parameters.fit(args, named)
            if call is not None and for_onnx():
                found = with_ours(*args, **named)
                return run(*args, **named) if found is NotImplemented else found
            if is_compiling() or for_onnx():
                return run(*args, **named)
            values = (*args, *named.values())
            if has_torch_function(values):
                return handle_torch_function(wrapper, values, *args, **named)
            return run(*args, **named) if parameters.variadic else wrapper(*args, **named)

        def spread(args: Any, named: Any) -> Any:
            return wrapper(*args, **named)

        def instead(wrong: Exception, args: Any, named: Any) -> Any:
            """Let torch answer a call that no plan can be made for; else raise what is wrong."""
            if isinstance(args[0], Tensor):
                check_tensor(name, args[0])  # refuses a sparse one
            wrong = kinds.reason(wrong, args, named)
            if not isinstance(wrong, DeuteronError):
                raise wrong
            allowed = call is not None and may_delegate() and (autocast or not autocasting())
            if allowed:
                why = f"no plan of ours can be made: {wrong.wrong}"
                found: Any = NotImplemented
                with suppress(*REFUSALS):
                    found = asked(args, named)
                if found is not NotImplemented:
                    return recorded(found, name, args[0], why)
            raise wrong from wrong.__cause__

        def ours_from(machine: Target, more: int = 0, in_a_model: bool = False) -> int:
            """Return the bytes of the first tensor beyond which a plan of ours answers on a GPU
            where a gradient follows. ``more``: how many calls of torch's it replaces besides the
            first. ``in_a_model``: among all calls of a model (see IN_A_MODEL_S)."""
            if call is None:
                return 0
            if in_a_model:
                reads = passes + more * PASSES
                return int(IN_A_MODEL_S * machine.stream * REACHED / reads)
            known = 0 if callable(several) else several
            return int(with_gradient(max(more, known)) * small_bytes(machine))

        update_wrapper(wrapper, function)
        wrapper.ours_from, wrapper.passes = ours_from, passes  # type: ignore[attr-defined]
        del wrapper.__wrapped__  # type: ignore[attr-defined]  # torch.fx would trace that instead
        wrapper.__signature__ = parameters.signature  # type: ignore[attr-defined]
        return cast(Callable[P, R], wrapper)

    return decorate


def recorded(found: R, name: str, x: Tensor, why: str = "") -> R:
    """Return ``found``, the answer of torch's function, and tell ``explain`` about the call."""
    if Recording.active:
        kind = str(x.dtype).removeprefix("torch.")
        Recording.add(handed_on(f"{name}(x: {kind}{list(x.shape)})", why or why_torch(x)))
    return found


def why_torch(x: Tensor) -> str:
    """Why torch's function answered a call whose first tensor is ``x``."""
    limit, here = LIMITS[x.get_device()], target(x.device)
    if x.nbytes > limit and not here.is_cuda:
        fact = "one operator, so nothing to fuse, and torch's kernels for it were the quicker ones"
        return f"{fact} on a {here.name} where it was measured"
    because = f"torch's calls take less than finding a plan, {OURS_S * 1e6:.0f} µs, by estimate"
    if not here.is_cuda:
        because = "torch's calls were the quicker ones where it was measured"
    if x.nbytes > limit:
        because += f", and {TRAINED_S * 1e6:.0f} µs where a gradient follows"
    return f"launch-bound on {here.name}: x has {x.nbytes:,} bytes, and up to {limit:,} {because}"
