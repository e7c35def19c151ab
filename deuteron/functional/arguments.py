"""The arguments of a call: whether they fit its signature, which facts about its tensors a plan
depends on, and whether a kernel can read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.ir.types import TensorType

Tensors = Sequence[Tensor | None]
Types = tuple[TensorType | None, ...]
Attributes = dict[str, Any]

Given = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

NO_PLAN = "no plan is kept under this"
OWN_MEMORY = frozenset((Tensor, torch.nn.Parameter))


def signature(tensors: Tensors, attrs: Attributes) -> Any:
    """Return the key under which the plan of a call is kept: all that the plan depends on. No plan
    is ever kept under the key of a tensor that is not strided, that torch negates lazily
    (``is_neg``), or whose class may have no memory."""
    try:
        return (
            *[
                None
                if t is None
                else NO_PLAN
                if t.is_neg() or t.__class__ not in OWN_MEMORY
                else (t.shape, t.stride(), t.dtype, t.device)
                for t in tensors
            ],
            *attrs.values(),
        )
    except (AttributeError, RuntimeError):
        return NO_PLAN


def has_memory(t: Any) -> bool:
    """Whether a kernel can read ``t``: it is neither a meta tensor nor of a class that may stand
    for other tensors."""
    return not t.is_meta and t.__class__ in OWN_MEMORY


class Parameters:
    """The signature of a function, against which the arguments of a call are checked."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, self.signature = function.__name__, inspect.signature(function)
        known = list(self.signature.parameters.values())
        self.first = known[0].name
        self.variadic = known[0].kind is inspect.Parameter.VAR_POSITIONAL
        self.places = sum(p.kind is not p.KEYWORD_ONLY for p in known)
        # known[n]: names that may be keywords after n positional arguments; has_place[n]: those of
        # them that could have been positional
        names, counts = [p.name for p in known], range(self.places + 1)
        self.known = [frozenset(names[n:]) for n in counts]
        self.has_place = [frozenset(names[n : self.places]) for n in counts]

    def fit(self, args: tuple[Any, ...], named: dict[str, Any]) -> Given:
        """Return the arguments with the first one positional, even if the call gave it as a keyword
        (its own name, or ``input`` as torch calls it). Raise TypeError if they do not fit."""
        first, count = self.first, len(args)
        if not count:
            key = "input" if "input" in named and first not in named else first
            if key not in named:
                raise TypeError(f"{self.name}() missing 1 required positional argument: {first!r}")
            args, count = (named[key],), 1
            named = {k: v for k, v in named.items() if k != key}
        if self.variadic:
            count = 1
        if count > self.places or not self.known[count].issuperset(named):
            if "input" in named:
                raise TypeError(f"{self.name}() was given both {first!r} and 'input'")
            try:
                self.signature.bind(*args, **named)
            except TypeError as misfit:
                raise TypeError(f"{self.name}(): {misfit}") from None
        return args, named


def strided(name: str, t: Tensor | None) -> Tensor | None:
    """Return ``t``, a strided tensor or None; refuse anything else."""
    if t is not None and (not isinstance(t, Tensor) or t.layout is not torch.strided):
        kind = str(t.layout) if isinstance(t, Tensor) else type(t).__name__
        wrong = f"a {kind} was given where a strided tensor is needed"
        remedy = "pass a Tensor; to_dense() makes a sparse one strided"
        raise BindError(wrong, asked=f"{name}(…)", remedy=remedy)
    return t


def check_tensor(name: str, t: Any) -> None:
    """Raise unless ``t`` is a strided tensor."""
    if strided(name, t) is None:
        raise _nothing(name)


def _nothing(name: str) -> BindError:
    return BindError("no tensor was given", asked=f"{name}(…)", remedy="pass one")


def readable(name: str, t: Tensor | None) -> Tensor | None:
    """Return ``t`` as a plain tensor whose memory holds its values: kernels read nothing else."""
    t = strided(name, t)
    if t is None:
        return None
    if t.__class__ not in OWN_MEMORY:
        t = t.as_subclass(Tensor)
    return t.resolve_neg() if t.is_neg() else t


def types_of(tensors: Iterable[Tensor | None]) -> Types:
    return tuple(
        None
        if t is None
        else TensorType.of(tuple(map(int, t.shape)), t.dtype, strides=tuple(map(int, t.stride())))
        for t in tensors
    )


def one_device(name: str, tensors: Tensors) -> torch.device:
    """Return the device that all tensors are on; refuse several."""
    found = {t.device for t in tensors if t is not None}
    if not found:
        raise _nothing(name)
    if len(found) != 1:
        wrong = f"tensors are on several devices: {', '.join(sorted(map(str, found)))}"
        raise BindError(wrong, asked=f"{name}(…)", remedy="move them to one")
    return found.pop()
