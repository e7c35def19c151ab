"""Operators of the table as eager functions: names, defaults and help come from their OpDef."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, Signature
from textwrap import fill
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.functional.autocast import FLOAT32, Cast
from deuteron.functional.core import Build, Function, Schema
from deuteron.functional.delegate import delegates
from deuteron.ops import REQUIRED, TABLE, Attr, Fusion, OpDef, Ops, Sym, table

KINDS = {
    **{kind: kind for kind in ("int", "float", "bool", "str")},
    "dtype": "str",
    "ints": "tuple[int, ...]",
}
ANY = {"size": "tuple[int, ...]", "scale": "tuple[float, ...]"}  # of kind any, by name
# Inductor calls an operator that it passes through ``kernel``, beside attributes by their names
INDUCTORS = {"kernel": "kernel_size"}
OPERATORS: dict[str, Function] = {}
R = TypeVar("R")


def _kind(key: str, attr: Attr) -> str:
    """The annotation of an attribute."""
    kind = KINDS.get(attr.kind) or ANY.get(key)
    if kind is None:
        raise AttributeError(f"{key!r} is not a plain value, so there is no eager function")
    return kind + (" | None" if attr.default is None else "")


def schema(op: OpDef, count: int = 0) -> Schema:
    """Tensors and attributes of ``op``, of which a variadic one is given ``count`` tensors."""
    slots = [f"x{i}" for i in range(count)] if op.variadic else op.inputs
    tensors = {s.rstrip("?"): "Sym | None" if s.endswith("?") else "Sym" for s in slots}
    return tensors, {INDUCTORS.get(key, key): _kind(key, attr) for key, attr in op.attrs.items()}


def _writing(op: OpDef) -> Build:
    names = {INDUCTORS.get(key, key): key for key in op.attrs}

    def build(b: Ops, *tensors: Sym | None, **attrs: Any) -> Any:
        return b.call(op.name, *tensors, **{names[key]: value for key, value in attrs.items()})

    return build


def operator(name: str, count: int = 0) -> Function:
    """The operator ``name`` as a function of tensors; attributes left out take their defaults.
    ``count``: how many tensors a variadic one is given."""
    op, own = table.get(name), f"op_{name}{count or ''}"
    if own not in OPERATORS:
        defaults = {INDUCTORS.get(key, key): attr.default for key, attr in op.attrs.items()}
        kind = Cast if own in FLOAT32 else Function
        OPERATORS[own] = kind(own, _writing(op), schema(op, count), defaults)
    return OPERATORS[own]


def from_table(
    name: str,
    called: str = "",
    *,
    rename: Mapping[str, str] | None = None,
    more: Mapping[str, bool] | None = None,
    casts: bool = False,
    run: Callable[..., Any] | None = None,
    see: str = "",
) -> Callable[..., Any]:
    """A public function of the operator ``name``, with its own signature and help.

    called  its name, if that is another one
    rename  attributes that torch has under other names
    more    further arguments and their defaults, such as ``inplace``
    casts   whether there is an argument ``dtype``, a type that x is cast to first
    run     what is called in the place of the operator: with the tensors by place, and attributes
            by the operator's names and further arguments by theirs
    see     sentences for the help
    """
    op = table.get(name)
    called, new_names = called or name, INDUCTORS | dict(rename or {})
    own = {new_names.get(key, key): (key, attr) for key, attr in op.attrs.items()}
    shown = _signature(op, own, more or {}, casts)
    names, slots = list(shown.parameters), [slot.strip("*?") for slot in op.inputs]
    required = [p.name for p in shown.parameters.values() if p.default is p.empty]
    call = run or (_variadic(name) if op.variadic else operator(name))

    def function(*args: Any, **named: Any) -> Any:
        given = named if op.variadic else dict(zip(names, args, strict=False)) | named
        if not op.variadic and not all(key in given for key in required):
            shown.bind(*args, **named)  # says what is missing
        tensors: tuple[Any, ...] = args
        if not op.variadic:
            tensors = tuple([given.get(slot) for slot in slots])
        attrs = {
            INDUCTORS.get(key, key): _coerced(called, new, attr, given.get(new, attr.default))
            for new, (key, attr) in own.items()
        }
        for key, default in (more or {}).items():
            attrs[key] = given.get(key, default)
        dtype = given.get("dtype") if casts else None
        if dtype is None:
            return call(*tensors, **attrs)
        return call(tensors[0].to(dtype), *tensors[1:], **attrs).to(dtype)

    function.__signature__ = shown  # type: ignore[attr-defined]
    lines = [f"    {new}: {attr.doc}" for new, (_, attr) in own.items() if attr.doc]
    lines += ["    dtype: the type that x is cast to first"] if casts else []
    text = "\n".join([fill(f"{op.doc} {see}".strip(), 96), *([""] if lines else []), *lines])
    return named(function, called, text)


def _variadic(name: str) -> Callable[..., Any]:
    for count in range(1, 9):  # so many tensors torch.compile, too, finds ready; it makes nothing
        operator(name, count)
    return lambda *tensors, **attrs: operator(name, len(tensors))(*tensors, **attrs)


def _coerced(called: str, key: str, attr: Attr, value: Any) -> Any:
    """An attribute in its one form: 1.0 and True must not find the plan that is kept for 1. Of a
    bool None is the default, as torch has it."""
    if value is attr.default or (value is None and attr.kind == "bool"):
        return attr.default
    try:
        return attr.coerce(key, value)
    except GraphError as error:
        error.asked = f"{called}(…, {key}={value!r})"
        raise


def _signature(
    op: OpDef, own: Mapping[str, tuple[str, Attr]], more: Mapping[str, bool], casts: bool
) -> Signature:
    place: Any = Parameter.POSITIONAL_OR_KEYWORD
    only, found = Parameter.KEYWORD_ONLY, []
    for slot in op.inputs:
        if slot.startswith("*"):
            found.append(Parameter(slot[1:], Parameter.VAR_POSITIONAL, annotation="Tensor"))
        elif slot.endswith("?"):
            found.append(Parameter(slot[:-1], place, default=None, annotation="Tensor | None"))
        else:
            found.append(Parameter(slot, place, annotation="Tensor"))
    needed = [attr.default is REQUIRED for attr in op.attrs.values()]
    if op.required < len(op.inputs) or needed != sorted(needed, reverse=True):
        place = only  # by name, where something before them may be left out
    for new, (key, attr) in own.items():
        default = Parameter.empty if attr.default is REQUIRED else attr.default
        kind = _kind(key, attr).replace("tuple[int, ...]", "int | Sequence[int]")
        found.append(Parameter(new, place, default=default, annotation=kind))
    found += [
        Parameter(key, place, default=value, annotation="bool") for key, value in more.items()
    ]
    if casts:
        found.append(Parameter("dtype", only, default=None, annotation="torch.dtype | None"))
    return Signature(found, return_annotation="Tensor")


def named(function: Callable[..., R], name: str, doc: str) -> Callable[..., R]:
    """``function`` as the public one of that name, with a text for ``help``."""
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = "deuteron.functional", doc
    return function


def public(name: str) -> Callable[..., Any]:
    """The operator ``name``, which has no function of its own here, as one."""
    return delegates()(from_table(name))


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
