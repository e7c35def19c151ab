"""Shortcuts for calls like an earlier one: recognised by a single comparison, and answered at once.

Who answers a call, torch's function or which plan of ours, follows from the types, shapes and
strides of its tensors, from its other arguments, and from little else. Finding that out in Python
takes several microseconds, as long as a kernel. So the second call of a kind is *noted*: which of
its tensors reached which plan. From then on torch's own native comparison of tensors (of class,
type, device, shape, strides, dispatch keys and ``requires_grad``), and a few comparisons of other
arguments, lead straight to the plan or to torch's function.

A call is not noted if its function does more than hand the call's own tensors to one plan and
return the results; nor under autocast, whose type is not among what is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Size, Tensor
from torch._C import _is_any_autocast_enabled as autocasting
from torch.cuda import is_current_stream_capturing

from deuteron.functional.context import raw_stream
from deuteron.plan.tensors import comparison

if TYPE_CHECKING:
    from deuteron.functional.backward import BackwardPlan
    from deuteron.functional.core import Planned

SHAPES, TRIES = 256, 6  # shapes kept for a function; unknown calls of a shape until we give up
OTHER = object()  # what a shortcut returns for a call of another kind
NONE = object()  # stands for an argument that was not given
PLAIN = (int, float, bool, str, torch.dtype, torch.device)
Answer = Callable[..., Any]


class Noted:
    """Collects, in its own thread, what reaches plans while a call is noted: the plan, its tensors,
    what makes the autograd node if a gradient is needed, and what was returned; None for a call
    inside the call."""

    active = 0  # read in every call: thread-local memory would take ten times as long
    _thread = threading.local()

    def __enter__(self) -> list[Any]:
        Noted.active += 1
        self.before = getattr(Noted._thread, "calls", None)
        Noted._thread.calls = calls = list[Any]()
        return calls

    def __exit__(self, *error: object) -> None:
        Noted._thread.calls = self.before
        Noted.active -= 1

    @staticmethod
    def add(call: tuple[Planned, Sequence[Tensor | None], Any, Any] | None) -> None:
        calls = getattr(Noted._thread, "calls", None)
        if calls is not None:
            calls.append(call)


class Calls(list[Answer]):
    """The shortcuts for calls whose first tensor has one shape. ``missed``: how many calls none of
    them knew. The first of these is not noted, because it may stay the only one; after TRIES we
    give up, because some calls can never be noted."""

    missed = 0

    def is_due(self) -> bool:
        """Count a call that no shortcut knew, and say whether it is to be noted."""
        self.missed += 1
        return 1 < self.missed <= TRIES

    def keep(self, known: Answer | None) -> None:
        if known is not None:
            self.append(known)


class Shapes(dict[Any, Calls]):
    """The shortcuts of a function by the shape of the first tensor."""

    every: ClassVar[list[Shapes]] = []

    def __init__(self) -> None:
        super().__init__()
        Shapes.every.append(self)

    def __missing__(self, shape: Any) -> Calls:
        if len(self) >= SHAPES:
            self.pop(next(iter(self)), None)
        found = self[shape] = Calls()
        return found


def forget() -> None:
    """Drop the shortcuts of all functions."""
    for shapes in Shapes.every:
        shapes.clear()


# ---- the code that recognises a call


def of_torch(
    args: tuple[Any, ...], named: Mapping[str, Any], call: Callable[..., Any]
) -> Answer | None:
    """Return a shortcut by which torch's ``call`` answers calls like this one, or None if they
    cannot be recognised."""
    return _written(args, named, "call(*args, **named)", {"call": call})


def of_plan(
    args: tuple[Any, ...], named: Mapping[str, Any], calls: Sequence[Any], found: Any
) -> Answer | None:
    """Return a shortcut by which the plan that was noted answers calls like this one, or None if
    running it was not all there was to do."""
    if len(calls) != 1 or calls[0] is None or calls[0][-1] is not found:
        return None
    planned, tensors, node, _ = calls[0]
    places = {id(t): f"a{i}" for i, t in enumerate((*args, *named.values()))}
    if not all(t is None or id(t) in places for t in tensors):
        return None
    names = ["None" if t is None else places[id(t)] for t in tensors]
    given = ", ".join(names)
    ready = None if planned.ready is None or planned.function.handed else planned.ready.ready
    if node is not None:
        space, answer = {"call": node, "planned": planned}, f"call(planned, {given})"
    elif ready is not None:
        space, answer = {"call": ready}, f"call({', '.join(n for n in names if n != 'None')})"
    else:
        space, answer = {"call": planned.results}, f"call(({given},))"
    whole = f"tuple({answer})" if isinstance(found, tuple) else f"{answer}[0]"
    return _written(args, named, whole, space)


def _written(
    args: tuple[Any, ...], named: Mapping[str, Any], answer: str, space: dict[str, Any]
) -> Answer | None:
    """Return a function of a call's arguments: ``answer`` if they are like these, else OTHER."""
    values = (*args, *named.values())
    names = [f"a{i}" for i in range(len(values))]
    tensors = {n: v for n, v in zip(names, values, strict=True) if isinstance(v, Tensor)}
    if autocasting() or len({id(t) for t in tensors.values()}) < len(tensors):
        return None
    same = comparison(list(tensors.values()))
    if same is None:
        return None
    space |= {"NONE": NONE, "OTHER": OTHER, "int": int}
    tests = [f"same({', '.join(tensors)})"]
    for n, value in zip(names, values, strict=True):
        if n not in tensors:
            alike = _same(n, value, space)
            if not alike:
                return None
            tests += alike
    first = next(iter(tensors.values()))
    if first.is_cuda and raw_stream is not None:  # a call that is captured may go another way
        space |= {"stream": raw_stream, "capturing": is_current_stream_capturing}
        tests.append(f"not (stream({first.get_device()}) and capturing())")
    space["same"] = same
    lines = [
        "def run(args, named):",
        f" if len(args) != {len(args)} or len(named) != {len(named)}: return OTHER",
        f" {', '.join(names[: len(args)])}, = args",
        *(f" {a} = named.get({n!r}, NONE)" for a, n in zip(names[len(args) :], named, strict=True)),
        f" return {answer} if {' and '.join(tests)} else OTHER",
    ]
    return _made(lines, space)


def of_gradients(given: Sequence[Tensor | None], plan: BackwardPlan) -> Answer | None:
    """Return a shortcut for the backward pass, a function of saved tensors and incoming gradients:
    what ``plan`` makes of them if they are like ``given``, else OTHER. None if there can be
    none."""
    tensors = [t for t in given if t is not None]
    few = len(tensors) < len(given) or len({id(t) for t in given}) < len(given)
    if few or autocasting() or plan.moved or plan.ready.ready is None:
        return None
    same = comparison(tensors)
    if same is None:
        return None
    names = [f"a{i}" for i in range(len(given))]
    made = ("None" if p is None else f"f[{p}]" if p >= 0 else names[~p] for p in plan.places)
    lines = [
        f"def run({', '.join(names)}):",
        f" if not same({', '.join(names)}): return OTHER",
        f" f = call({', '.join(names[i] for i in plan.order)})",
        f" return None, {', '.join(made)}",
    ]
    space = {"call": plan.ready.ready, "OTHER": OTHER, "same": same}
    return _made(lines, space)


def _made(lines: Sequence[str], space: dict[str, Any]) -> Answer:
    exec(_code("\n".join(lines)), space)  # its names are generated here, or parameters' names
    made: Answer = space["run"]
    return made


@lru_cache(maxsize=1024)
def _code(text: str) -> Any:
    return compile(text, "<known call>", "exec")


def _same(name: str, value: Any, space: dict[str, Any]) -> list[str]:
    """Return tests that the argument ``name`` is what ``value`` is; none where that cannot be
    tested. 1, 1.0 and True are three different values, and so are 0.0 and -0.0."""
    if value is None:
        return [f"{name} is None"]
    kind = value.__class__
    several = kind in (tuple, list, Size)
    if several and any(each.__class__ is not int for each in value):
        return []
    if not several and (kind not in PLAIN or (kind is float and not value)):
        return []
    space |= {f"k{name}": kind, f"c{name}": kind(value) if several else value}
    tests = [f"{name}.__class__ is k{name}", f"{name} == c{name}"]
    return tests + [f"{name}[{i}].__class__ is int" for i in range(len(value) if several else 0)]
