"""Checks the arguments of a call against the annotations of the function, before it runs.

So no function has to check the kinds of its arguments itself: ``attention(q, k, v, window=3)``
raises an error that names the argument and says what it is, what it should be and what to write.
Only classes are compared, once for each combination of them, so a later call with the same classes
costs one lookup in a set. Elements of sequences and the size of numbers are looked at only after a
call has failed (:meth:`Kinds.reason`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from deuteron.errors import BindError, DeuteronError

P = ParamSpec("P")
R = TypeVar("R")

WORDS = {
    Tensor: "a Tensor",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a word",
    torch.dtype: "a torch.dtype",
    torch.device: "a device",
    type(None): "None",
    torch.nn.Module: "an nn.Module",
    torch.optim.Optimizer: "an optimiser",
    Path: "a path",
}
ROOMS = ("augment", "distributed", "functional", "nn", "optim")
PLAIN = (int, float, bool)
MOST = 2**63 - 1  # the largest size, index or offset that torch can take


class Kinds:
    """The kinds of a function's arguments. ``unseen``: names of arguments that the function checks
    itself."""

    def __init__(
        self, function: Callable[..., Any], name: str = "", unseen: Sequence[str] = ()
    ) -> None:
        self.function, self.unseen = function, unseen
        self.name = name or function.__name__
        self.signature = inspect.signature(function)
        self.allowed: dict[str, tuple[Any, ...]] | None = None
        self.fine: set[tuple[Any, ...]] = set()

    def check(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raise a BindError that names the first argument of a wrong kind. Arguments that do not
        fit the signature at all are left to the call itself."""
        key: tuple[Any, ...] = tuple(map(type, args))
        if named:
            key += (*named, *map(type, named.values()))
        if key not in self.fine:
            for name, value, allowed in self._given(args, named):
                if not any(value_fits(value, kind) for kind in allowed):
                    raise self._misfit(name, value, allowed)
            self.fine.add(key)

    def reason(
        self, error: Exception, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Exception:
        """Return what to raise after a call failed with ``error``: a BindError if an element of a
        sequence is of the wrong kind or a number is too large, else ``error`` itself, with a note
        that shows the call."""
        if isinstance(error, DeuteronError):
            error.asked = error.asked or self.asked(args, named)
            return error
        for name, value, allowed in self._given(args, named):
            if isinstance(value, int) and abs(value) > MOST:
                remedy = f"write {float(value):g}" if float in allowed else "use a smaller number"
                asked = f"{self.name}(…, {name}={value})"
                return BindError(f"{name} does not fit into 64 bits", asked=asked, remedy=remedy)
            if not any(value_fits(value, kind) and elements_fit(value, kind) for kind in allowed):
                return self._misfit(name, value, allowed)
        if not getattr(error, "__notes__", None):
            error.add_note(f"  asked: {self.asked(args, named)}")
        return error

    def asked(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> str:
        """Return the call as short text, for an error message."""
        names = [p.name for p in self.signature.parameters.values()]
        given = [*zip(names, args, strict=False), *named.items()]
        given = [(n, v) for n, v in given if n != "self"]
        return f"{self.name}({', '.join(f'{n}={shown(v)}' for n, v in given)})"

    def _given(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """Yield each argument to be checked: its name, its value and the kinds that are allowed."""
        if self.allowed is None:
            self.allowed = dict(self._annotated())
        try:
            bound = self.signature.bind_partial(*args, **named).arguments
        except TypeError:
            return
        for name, value in bound.items():
            if name in self.allowed:
                yield name, value, self.allowed[name]

    def _annotated(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        known = {"Tensor": Tensor, "torch": torch, "Sequence": Sequence, "Any": Any}
        known |= getattr(self.function, "__globals__", {})
        for p in self.signature.parameters.values():
            if p.name in self.unseen or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                continue
            text = p.annotation
            found = eval(text, known) if isinstance(text, str) else text
            kinds = tuple(_alternatives(found))
            if p.default is False and bool in kinds:
                kinds = (*kinds, type(None))  # torch, too, takes None for a default of False
            if Any not in kinds and p.annotation is not p.empty:
                yield p.name, kinds

    def _misfit(self, name: str, value: Any, allowed: tuple[Any, ...]) -> BindError:
        words = list(dict.fromkeys(word(kind) for kind in allowed))
        what = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
        given = f"{name} is {shown(value)}"
        if not isinstance(value, PLAIN) and value is not None:
            given = f"{name} is a {type(value).__name__}, {shown(value)}"
        default = self.signature.parameters[name].default
        remedy = _remedy(name, value, allowed) or f"pass {what}"
        if default is not inspect.Parameter.empty:
            remedy += f", or leave {name} out"
        asked = f"{self.name}(…, {name}={shown(value)})"
        return BindError(f"{given}, not {what}", asked=asked, remedy=remedy)


def checked(*unseen: str, name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that its arguments are checked against its annotations before it runs.
    ``unseen``: names of arguments that it checks itself; ``name``: its name in errors."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = Kinds(function, name, unseen)

        def wrapper(*args: P.args, **named: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                kinds.check(args, named)
            try:
                return function(*args, **named)
            except Exception as error:
                raise kinds.reason(error, args, named) from error.__cause__

        update_wrapper(wrapper, function)
        return wrapper

    return decorate


def value_fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` may be passed where ``kind`` is annotated; elements are not checked."""
    home, number = get_origin(kind) or kind, isinstance(value, int | float)
    if kind is bool:
        return isinstance(value, bool | torch.SymBool) or type(value).__name__ in ("bool_", "bool")
    if kind is int:
        number = not isinstance(value, bool) and hasattr(value, "__index__")
        return number and not _is_array(value)
    if kind is float:
        return number or (hasattr(value, "__float__") and not _is_array(value))
    if kind is torch.device:
        return isinstance(value, torch.device | str | int)
    if home in (tuple, list, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str)
    return callable(value) if home is Callable else isinstance(value, home)


def elements_fit(value: Any, kind: Any) -> bool:
    """Whether the elements of a sequence that :func:`fits` are of the right kinds and, for a tuple
    of fixed length, of the right number."""
    if get_origin(kind) not in (tuple, list, Sequence):
        return True
    of = get_args(kind)
    if not of:
        return True
    fixed = get_origin(kind) is tuple and of[-1] is not Ellipsis
    if fixed and len(value) != len(of):
        return False
    each = of if fixed else (of[0],) * len(value)
    return all(
        any(value_fits(v, one) and elements_fit(v, one) for one in _alternatives(k))
        for v, k in zip(value, each, strict=True)
    )


def word(kind: Any) -> str:
    """A kind in words."""
    home, of = get_origin(kind), get_args(kind)
    if home in (tuple, list, Sequence) and of:
        if home is tuple and of[-1] is not Ellipsis:
            return f"a tuple ({', '.join(map(_short, of))})"
        return f"a sequence of {_short(of[0])}s"
    if home is Callable:
        return "a function"
    return WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def _short(kind: Any) -> str:
    return " or ".join(getattr(k, "__name__", str(k)) for k in _alternatives(kind))


def shown(value: Any) -> str:
    """Return a value as short text; a tensor by its type and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__}()"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"


def _remedy(name: str, value: Any, allowed: tuple[Any, ...]) -> str:
    """Return the smallest change that turns ``value`` into something of an allowed kind, or ""."""
    for kind in allowed:
        of = get_args(kind)
        if get_origin(kind) is tuple and set(of) == {int} and isinstance(value, int):
            return f"write {name}=({', '.join([str(value)] * len(of))})"
    for kind in allowed:
        if getattr(kind, "__module__", "").startswith("deuteron."):
            room = kind.__module__.split(".")[1]
            made = f"dt.{f'{room}.' * (room in ROOMS)}{kind.__name__}"
            if isinstance(value, str | Path) and hasattr(kind, "open"):
                return f"write {name}={made}.open({str(value)!r})"
            return f"write {name}={made}(…)"
    if Tensor in allowed and (isinstance(value, list | tuple | int | float) or _is_array(value)):
        return f"write torch.as_tensor({name})"
    if _is_array(value) and not {int, float}.isdisjoint(allowed):
        return f"write {name}.item() if it is one number"
    return ""


def _is_array(value: Any) -> bool:
    """Whether it is a tensor, or a numpy array that has dimensions."""
    return isinstance(value, Tensor) or bool(getattr(value, "shape", ()))


def _alternatives(kind: Any) -> Iterator[Any]:
    if kind is None:
        yield type(None)
    elif get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _alternatives(each)
    else:
        yield kind
