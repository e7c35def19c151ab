"""Operators of the table as eager functions: names, defaults and help come from their OpDef."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, Signature
from textwrap import fill
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.frontends.builder import parameters
from deuteron.functional.autocast import FLOAT32, Cast
from deuteron.functional.core import Function, Schema
from deuteron.functional.delegate import delegates
from deuteron.ops import REQUIRED, TABLE, Attr, Fusion, OpDef, Ops, Sym, table

KINDS = {kind: kind for kind in ("int", "float", "bool", "str")}
KINDS |= {"dtype": "str", "ints": "tuple[int, ...]"}
ANY = {"size": "tuple[int, ...]", "scale": "tuple[float, ...]"}  # attributes of kind any, by name
# Inductor gives attributes by their names, beside an argument of its own that is called ``kernel``
INDUCTORS = {"kernel": "kernel_size"}
OPERATORS: dict[str, Function] = {}


def _kind(key: str, attr: Attr) -> str:
    """The annotation of an attribute."""
    kind = KINDS.get(attr.kind) or ANY.get(key)
    if kind is None:
        raise AttributeError(f"{key!r} is not a plain value, so there is no eager function")
    return kind + (" | None" if attr.default is None else "")


def schema(op: OpDef, count: int = 0) -> Schema:
    """Return the tensors and attributes of ``op``, with their annotations; if it is variadic, it
    takes ``count`` tensors."""
    slots = [f"x{i}" for i in range(count)] if op.variadic else op.inputs
    tensors = {s.rstrip("?"): "Sym | None" if s.endswith("?") else "Sym" for s in slots}
    return tensors, {INDUCTORS.get(key, key): _kind(key, attr) for key, attr in op.attrs.items()}


def operator(name: str, count: int = 0) -> Function:
    """Return the operator ``name`` as a function of tensors; attributes that are left out take
    their defaults. ``count``: how many tensors it takes if it is variadic."""
    op, own = table.get(name), f"op_{name}{count or ''}"
    if own not in OPERATORS:
        names = {INDUCTORS.get(key, key): key for key in op.attrs}

        def build(b: Ops, *tensors: Sym | None, **attrs: Any) -> Any:
            return b.call(name, *tensors, **{names[key]: value for key, value in attrs.items()})

        defaults = {new: op.attrs[key].default for new, key in names.items()}
        kind = Cast if own in FLOAT32 else Function
        OPERATORS[own] = kind(own, build, schema(op, count), defaults)
    return OPERATORS[own]


def _variadic(name: str) -> Callable[..., Any]:
    for count in range(1, 9):  # made in advance, because torch.compile cannot make one
        operator(name, count)
    return lambda *tensors, **attrs: operator(name, len(tensors))(*tensors, **attrs)


def from_table(
    name: str,
    called: str = "",
    *,
    home: Any = None,
    rename: Mapping[str, str] | None = None,
    more: Mapping[str, bool] | None = None,
    casts: bool = False,
    run: Callable[..., Any] | None = None,
    see: str = "",
    returns: str = "Tensor",
    **rule: Any,
) -> Callable[..., Any]:
    """Return a public function of the operator ``name``, with a signature and a help text of its
    own.

    called  the function's name, if that is another one
    home    the module of torch's that has a function of that name, for small calls
    rename  attributes that torch has under other names
    more    further arguments and their defaults, such as ``inplace``
    casts   whether there is an argument ``dtype``, the type that x is cast to first
    run     is called in place of the operator: with positional tensors, with attributes by the
            operator's names, and with further arguments by theirs
    see     a sentence for the help text
    returns what its signature says
    rule    which small calls go to torch's function, as for :func:`delegates`
    """
    op, called, more = table.get(name), called or name, more or {}
    names = INDUCTORS | dict(rename or {})
    own = {names.get(key, key): (key, attr) for key, attr in op.attrs.items()}
    shown = _signature(op, own, more, casts).replace(return_annotation=returns)
    places, slots = list(shown.parameters), [slot.strip("*?") for slot in op.inputs]
    required = [p.name for p in shown.parameters.values() if p.default is p.empty]
    call = run or (_variadic(name) if op.variadic else operator(name))

    def function(*args: Any, **named: Any) -> Any:
        given, tensors = named, args
        if not op.variadic:
            given = dict(zip(places, args, strict=False)) | named
            if not all(key in given for key in required):
                shown.bind(*args, **named)  # says what is missing
            tensors = tuple([given.get(slot) for slot in slots])
        attrs = {
            INDUCTORS.get(key, key): _coerced(called, new, attr, given.get(new, attr.default))
            for new, (key, attr) in own.items()
        }
        for key, default in more.items():
            attrs[key] = given.get(key, default)
        dtype = given.get("dtype") if casts else None
        if dtype is None:
            return call(*tensors, **attrs)
        return call(tensors[0].to(dtype), *tensors[1:], **attrs).to(dtype)

    if home is not None:
        see = f"As ``{home.__name__}.{called}``. {see}".strip()
        rule = {"autocast": True, "call": getattr(home, called)} | rule
    lines = [f"    {new}: {attr.doc}" for new, (_, attr) in own.items() if attr.doc]
    lines += ["    dtype: the type that x is cast to first"] if casts else []
    text = [fill(f"{op.doc} {see}".strip(), 96), *([""] if lines else []), *lines]
    function.__name__ = function.__qualname__ = called
    function.__module__, function.__doc__ = "deuteron.functional", "\n".join(text)
    function.__signature__ = shown  # type: ignore[attr-defined]
    return delegates(**rule)(function)


def _coerced(called: str, key: str, attr: Attr, value: Any) -> Any:
    """Return an attribute in its one form, because 1.0 and True must not find the plan that is kept
    for 1. None for a bool means the default, as in torch."""
    if value is attr.default or (value is None and attr.kind == "bool"):
        return attr.default
    several = value if attr.kind == "ints" and isinstance(value, list | tuple) else ()
    if several and all(each.__class__ is int for each in several):
        return tuple(several)  # torch.compile cannot look into what follows
    try:
        return attr.coerce(key, value)
    except GraphError as error:
        error.asked = f"{called}(…, {key}={value!r})"
        raise


def _signature(
    op: OpDef, own: Mapping[str, tuple[str, Attr]], more: Mapping[str, bool], casts: bool
) -> Signature:
    place, only = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    given, count = list(parameters(op)), len(op.inputs)
    kinds = ("Tensor" if p.default is p.empty else "Tensor | None" for p in given[:count])
    found = [p.replace(annotation=kind) for p, kind in zip(given[:count], kinds, strict=True)]
    needed = [attr.default is REQUIRED for attr in op.attrs.values()]
    # attributes are given by name only, where an argument before them may be left out
    named = op.required < count or needed != sorted(needed, reverse=True)
    for p, (new, (key, attr)) in zip(given[count:], own.items(), strict=True):
        kind = _kind(key, attr)
        for one in ("int", "float"):  # one number may stand for all of several
            kind = kind.replace(f"tuple[{one}, ...]", f"{one} | Sequence[{one}]")
        found.append(p.replace(name=new, kind=only if named else place, annotation=kind))
    found += [Parameter(k, place, default=usual, annotation="bool") for k, usual in more.items()]
    if casts:
        found.append(Parameter("dtype", only, default=None, annotation="torch.dtype | None"))
    return Signature(found)


def _is_activation(op: OpDef) -> bool:
    """Whether an operator needs nothing but a tensor, and maps each of its elements."""
    plain = all(attr.default is not REQUIRED for attr in op.attrs.values())
    return op.fusion is Fusion.ELEMENTWISE and op.inputs == ("x",) and plain


# activations that are a function of torch's, too: the one in C++ if there is one, which is cheaper
# to call
TORCHS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name, None) or getattr(torch._C._nn, name, getattr(F, name))
    for name in TABLE
    if _is_activation(TABLE[name]) and hasattr(F, name)
}
TORCHS |= {"log_sigmoid": F.logsigmoid, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def activated(b: Ops, x: Sym, activation: str | None) -> Sym:
    """``x`` after the named activation; ``gelu_tanh`` is the approximation of gelu."""
    if activation is None:
        return x
    if activation == "gelu_tanh":
        return b.one("gelu", x, approximate="tanh")
    if activation not in TABLE or not _is_activation(TABLE[activation]):
        known = f"one of {', '.join(TORCHS)}, or another elementwise operator by its name"
        raise GraphError(f"there is no activation {activation!r}", remedy=f"use {known}")
    return b.one(activation, x)
