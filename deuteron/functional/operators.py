"""Operators of the table as eager functions, and what several functions have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _nn

from deuteron.errors import GraphError
from deuteron.functional.autocast import FLOAT32, Cast
from deuteron.functional.core import Function
from deuteron.ops import Ops, Sym, table

KINDS = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "dtype": "str",
    "ints": "tuple[int, ...]",
}

# activations that need nothing but the tensor, by the name that an argument may give
ACTIVATIONS = (
    "relu",
    "relu6",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "gelu",
    "silu",
    "mish",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "elu",
    "selu",
    "celu",
    "softplus",
    "softsign",
    "log_sigmoid",
    "tanhshrink",
    "softshrink",
    "hardshrink",
)


# those that are one call in torch: methods, whose arguments are read soonest, or the functions in
# C++ that torch.nn.functional's call in turn
TORCHS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": Tensor.relu,
    "relu6": _nn.relu6,
    "leaky_relu": _nn.leaky_relu,
    "sigmoid": Tensor.sigmoid,
    "tanh": Tensor.tanh,
    "gelu": _nn.gelu,
    "gelu_tanh": partial(_nn.gelu, approximate="tanh"),
    "silu": _nn.silu,
    "mish": _nn.mish,
    "hardswish": _nn.hardswish,
    "hardsigmoid": _nn.hardsigmoid,
    "hardtanh": _nn.hardtanh,
    "elu": _nn.elu,
    "selu": torch.selu,
    "celu": torch.celu,
    "softplus": _nn.softplus,
    "log_sigmoid": _nn.log_sigmoid,
    "softshrink": _nn.softshrink,
    "hardshrink": torch.hardshrink,
}

SIMPLE = (  # operators that are functions as they stand
    *ACTIVATIONS,
    "threshold",
    "prelu",
    "glu",
    "sum",
    "mean",
    "prod",
    "var",
    "max",
    "min",
    "argmax",
    "argmin",
    "where",
    "max_pool",
    "max_pool_with_indices",
    "max_pool_with_winners",
    "avg_pool",
    "grid_sample",
    "pixel_shuffle",
    "pixel_unshuffle",
    "rope",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "sort",
    "topk",
    "histogram",
    "weighted_pool",
    "pyramid_pool",
)


# attributes by the name that they have in a function: Inductor calls an operator that it passes
# through ``kernel``, and hands its attributes on by name
RENAMED = {"kernel": "kernel_size"}


def operator(name: str) -> Function:
    """The operator ``name`` of the table as a function of tensors and attributes."""
    op = table.get(name)
    names = {RENAMED.get(key, key): key for key in op.attrs}

    def build(b: Ops, *tensors: Sym | None, **attrs: Any) -> Any:
        return b.call(name, *tensors, **{names[key]: value for key, value in attrs.items()})

    kind = inspect.Parameter
    parameters = [kind("b", kind.POSITIONAL_ONLY)]
    for slot in op.inputs:
        annotation = "Sym | None" if slot.endswith("?") else "Sym"
        parameters.append(kind(slot.rstrip("?"), kind.POSITIONAL_OR_KEYWORD, annotation=annotation))
    for key, attr in zip(names, op.attrs.values(), strict=True):
        optional = " | None" if attr.default is None else ""
        annotation = KINDS[attr.kind] + optional
        parameters.append(kind(key, kind.KEYWORD_ONLY, annotation=annotation))
    build.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return (Cast if f"op_{name}" in FLOAT32 else Function)(f"op_{name}", build)


OPERATORS = {name: operator(name) for name in SIMPLE}
DEFAULTS = {
    name: {RENAMED.get(key, key): attr.default for key, attr in table.get(name).attrs.items()}
    for name in SIMPLE
}


def call(name: str, *tensors: torch.Tensor, **attrs: Any) -> Any:
    """The operator on tensors; attributes that are left out take their defaults."""
    return OPERATORS[name](*tensors, **(DEFAULTS[name] | attrs))


def one(name: str, *tensors: torch.Tensor, **attrs: Any) -> torch.Tensor:
    """:func:`call` for an operator with a single result."""
    result: torch.Tensor = OPERATORS[name](*tensors, **(DEFAULTS[name] | attrs))
    return result


def activated(b: Ops, x: Sym, activation: str | None) -> Sym:
    """``x`` after the named activation; ``gelu_tanh`` is the approximation of gelu."""
    if activation is None:
        return x
    if activation == "gelu_tanh":
        return b.one("gelu", x, approximate="tanh")
    if activation not in ACTIVATIONS:
        known = ", ".join((*ACTIVATIONS, "gelu_tanh"))
        raise GraphError(f"there is no activation {activation!r}", remedy=f"use one of {known}")
    return b.one(activation, x)
