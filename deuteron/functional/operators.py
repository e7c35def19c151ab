"""Operators of the table as eager functions: names, defaults and help come from their OpDef."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from textwrap import fill
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.functional.autocast import FLOAT32, Cast
from deuteron.functional.core import Function, Schema
from deuteron.functional.delegate import traceable
from deuteron.ops import REQUIRED, TABLE, Attr, Fusion, OpDef, Ops, Sym, table

KINDS = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "dtype": "str",
    "ints": "tuple[int, ...]",
}
# Inductor calls an operator that it passes through ``kernel``, beside attributes by their names
INDUCTORS = {"kernel": "kernel_size"}
OPERATORS: dict[str, Function] = {}
R = TypeVar("R")


def schema(op: OpDef, count: int = 0) -> Schema:
    """Tensors and attributes of ``op``, of which a variadic one is given ``count`` tensors."""
    slots = [f"x{i}" for i in range(count)] if op.variadic else op.inputs
    tensors = {s.rstrip("?"): "Sym | None" if s.endswith("?") else "Sym" for s in slots}
    return tensors, {INDUCTORS.get(key, key): _kind(attr) for key, attr in op.attrs.items()}


def _kind(attr: Attr) -> str:
    return KINDS[attr.kind] + (" | None" if attr.default is None else "")


def operator(name: str, count: int = 0) -> Function:
    """The operator ``name`` as a function of tensors; attributes left out take their defaults.
    ``count``: how many tensors a variadic one is given."""
    op, own = table.get(name), f"op_{name}{count or ''}"
    if own not in OPERATORS:
        names = {INDUCTORS.get(key, key): key for key in op.attrs}

        def build(b: Ops, *tensors: Sym | None, **attrs: Any) -> Any:
            return b.call(name, *tensors, **{names[key]: value for key, value in attrs.items()})

        defaults = {new: op.attrs[key].default for new, key in names.items()}
        kind = Cast if own in FLOAT32 else Function
        OPERATORS[own] = kind(own, build, schema(op, count), defaults)
    return OPERATORS[own]


def named(function: Callable[..., R], name: str, doc: str) -> Callable[..., R]:
    """``function`` as the public one of that name, with a text for ``help``."""
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = "deuteron.functional", doc
    return function


def from_table(
    name: str,
    called: str = "",
    *,
    rename: Mapping[str, str] | None = None,
    prepare: Callable[..., Sequence[Any]] | None = None,
    inplace: Callable[..., Any] | None = None,
    see: str = "",
) -> Callable[..., Any]:
    """A public function of the operator ``name``, with its own signature and help.

    called   its name, if that is another one
    rename   attributes that torch has under other names
    prepare  what is done to the tensors first
    inplace  torch's function for a further argument ``inplace``, which it answers if that is True
    see      a sentence at the end of the help
    """
    op = table.get(name)
    odd = [key for key, attr in op.attrs.items() if attr.kind not in KINDS]
    if odd:
        raise AttributeError(f"{name} is no eager function: its {odd[0]!r} is not a plain value")
    rename = rename or {}
    slots = [slot.strip("*?") for slot in op.inputs]
    attrs = {rename.get(key, key): (key, attr) for key, attr in op.attrs.items()}
    shown = _signature(op, rename, inplace is not None)
    names, required = list(shown.parameters), _required(shown)
    run = None if op.variadic else operator(name)

    def function(*args: Any, **named: Any) -> Any:
        given = named if run is None else dict(zip(names, args, strict=False)) | named
        if not required.issubset(given):
            shown.bind(*args, **named)  # says what is missing
        if inplace is not None and given.get("inplace"):
            return inplace(*args, **named)
        tensors: Sequence[Any] = args if run is None else [given.get(slot) for slot in slots]
        chosen = {
            INDUCTORS.get(key, key): attr.coerce(key, given[own])
            for own, (key, attr) in attrs.items()
            if own in given and given[own] is not attr.default
        }
        if prepare is not None:
            tensors = prepare(*tensors)
        return (run or operator(name, len(tensors)))(*tensors, **chosen)

    function.__signature__ = shown  # type: ignore[attr-defined]
    lines = [f"    {own}: {attr.doc}" for own, (_, attr) in attrs.items() if attr.doc]
    text = "\n".join([fill(f"{op.doc} {see}".strip(), 96), *([""] if lines else []), *lines])
    return named(function, called or name, text)


def _signature(op: OpDef, rename: Mapping[str, str], inplace: bool) -> Signature:
    place = Parameter.KEYWORD_ONLY if op.variadic else Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for slot in op.inputs:
        if slot.startswith("*"):
            each = Parameter(slot[1:], Parameter.VAR_POSITIONAL, annotation="Tensor")
        elif slot.endswith("?"):
            each = Parameter(slot[:-1], place, default=None, annotation="Tensor | None")
        else:
            each = Parameter(slot, place, annotation="Tensor")
        parameters.append(each)
    for key, attr in op.attrs.items():
        default = Parameter.empty if attr.default is REQUIRED else attr.default
        own = rename.get(key, key)
        parameters.append(Parameter(own, place, default=default, annotation=_kind(attr)))
    if inplace:
        parameters.append(Parameter("inplace", place, default=False, annotation="bool"))
    return Signature(parameters, return_annotation="Tensor")


def _required(shown: Signature) -> frozenset[str]:
    variadic = Parameter.VAR_POSITIONAL
    found = shown.parameters.values()
    return frozenset(p.name for p in found if p.default is p.empty and p.kind is not variadic)


def public(name: str) -> Callable[..., Any]:
    """The operator ``name``, which has no function of its own here, as one."""
    return traceable(from_table(name))


# ---- activations by name


def _is_activation(op: OpDef) -> bool:
    """Whether an operator needs nothing but a tensor, of which it changes each element."""
    plain = all(attr.default is not REQUIRED for attr in op.attrs.values())
    return op.fusion is Fusion.ELEMENTWISE and op.inputs == ("x",) and plain


# those that are a function of torch's, too
TORCHS: dict[str, Callable[..., Tensor]] = {
    name: getattr(F, name.replace("log_sigmoid", "logsigmoid"))
    for name, op in TABLE.items()
    if _is_activation(op) and hasattr(F, name.replace("log_sigmoid", "logsigmoid"))
} | {"gelu_tanh": partial(F.gelu, approximate="tanh")}


def activated(b: Ops, x: Sym, activation: str | None) -> Sym:
    """``x`` after the named activation; ``gelu_tanh`` is the approximation of gelu."""
    if activation is None:
        return x
    if activation == "gelu_tanh":
        return b.one("gelu", x, approximate="tanh")
    if activation not in TABLE or not _is_activation(TABLE[activation]):
        raise GraphError(
            f"there is no activation {activation!r}",
            remedy=f"use one of {', '.join(TORCHS)}, or another elementwise operator by its name",
        )
    return b.one(activation, x)
