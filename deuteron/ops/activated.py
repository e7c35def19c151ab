"""An activation as an attribute of the operator that it follows, whose kernel then applies it.

The attribute is a string: "none", the name of an elementwise operator of one input, or such a name
with attributes: "relu", "leaky_relu(negative_slope=0.2)", "gelu(approximate='tanh')". Kernels take
the formula from the named operator, so an operator that a user registered can follow, too.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.graph import Attrs
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.formula import TENSORS, CannotLower, Traced, is_scalar, trace, trace_gradient
from deuteron.ops.opdef import Attr, CostFn, Fusion

ACTIVATION = Attr("str", "none", 'what follows, e.g. "relu" or "leaky_relu(negative_slope=0.2)"')
REMEDY = 'use an elementwise operator of one input: "relu", "leaky_relu(negative_slope=0.2)"'


class Activation:
    """An elementwise operator of one input, with its attributes."""

    def __init__(self, name: str, attrs: Mapping[str, Any]) -> None:
        self.op = table.get(name)
        self.attrs = Attrs(self.op.normalise(attrs))

    @property
    def text(self) -> str:
        """The activation as the attribute spells it, without attributes that have their default."""
        usual = {name: attr.default for name, attr in self.op.attrs.items()}
        own = [f"{name}={value!r}" for name, value in self.attrs.items() if value != usual[name]]
        return f"{self.op.name}({', '.join(own)})" if own else self.op.name

    @cached_property
    def traced(self) -> Traced:
        """The activation as statements on scalars, a function of z."""
        return trace(self, self.op.inputs, {})

    @cached_property
    def told_by_result(self) -> bool:
        """Whether the slope can be computed from the result alone, without the input."""
        return not trace_gradient(self.op.name, self.attrs).reads("x")

    def slope(self, by_result: bool = False) -> Traced:
        """The gradient of the input, as statements: a function of ``g``, the gradient of the
        result, and of ``z``, which is the input, or the result if ``by_result``."""

        def formula(b: Any, g: Any, z: Any) -> Any:
            return self.pulled(b, g, z, z if by_result else self(b, z))

        return trace(formula, ("g", "z"), {})

    @cached_property
    def jumps(self) -> bool:
        """Whether the slope jumps somewhere, as relu's does at 0: near such a place the rounding of
        z decides which slope applies."""
        z = torch.arange(-8.0, 8.0, 1e-3, dtype=torch.float64) + 3e-4
        slope = self.pulled(TENSORS, torch.ones_like(z), z, self(TENSORS, z))
        steps = slope.diff().abs() / slope[1:].abs().clamp(min=1.0)
        return bool((steps > 0.01).any())

    def __call__(self, b: Any, z: Any) -> Any:
        """Return the result for z, as values of ``b``: nodes, tensors or scalars."""
        return getattr(b, self.op.name)(z, **self.attrs)

    def pulled(self, b: Any, grad: Any, z: Any, y: Any) -> Any:
        """Return the gradient of the input z, given ``grad``, the gradient of the result y."""
        return self.op.pulled(b, 0, grad, (z,), y, self.attrs)


@lru_cache(maxsize=1024)
def activation(text: str) -> Activation | None:
    """The activation that an attribute names; None for "none"."""
    if text == "none":
        return None
    try:
        call = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        name, attrs = call.func.id, {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        name, attrs = "", {}
    if not can_follow(name, attrs):
        raise GraphError(f"activation={text!r} is not known", remedy=REMEDY)
    return Activation(name, attrs)


def activation_text(name: str, attrs: Mapping[str, Any]) -> str | None:
    """The attribute text that names this operator as an activation, or None if it cannot be one."""
    return Activation(name, attrs).text if can_follow(name, attrs) else None


def can_follow(name: str, attrs: Mapping[str, Any] | None = None) -> bool:
    """Whether ``name`` is an elementwise operator of one input whose gradient is a formula."""
    return name in table.TABLE and _can_follow(name, Attrs(attrs or {}))


@lru_cache(maxsize=1024)
def _can_follow(name: str, attrs: Attrs) -> bool:
    op = table.get(name)
    if op.fusion is not Fusion.ELEMENTWISE or len(op.inputs) > 1 or not is_scalar(op):
        return False
    try:
        return trace_gradient(name, attrs).reads("g")
    except (CannotLower, GraphError):
        return False


def canonical(types: Any, attrs: dict[str, Any]) -> dict[str, Any]:
    """``OpDef.complete`` for operators with this attribute: leave out of its text what has the
    default value."""
    found = activation(attrs["activation"])
    return attrs if found is None else {**attrs, "activation": found.text}


def with_activation(per_element: float) -> CostFn:
    """Return a cost rule: ``per_element`` operations for each element of the first result, plus
    those of the activation."""

    def count(ins: Any, outs: Sequence[TensorType], attrs: Mapping[str, Any]) -> float:
        act = activation(attrs["activation"])
        return outs[0].numel * (per_element + (0.0 if act is None else act.traced.flops))

    return count
