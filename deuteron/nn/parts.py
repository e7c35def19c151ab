"""Modules of models that run functions of ours: each is of a subclass of its author's class, with
another ``forward``. Parameters, children, attributes and hooks stay those of the module, and the
author's forward is still there for all calls that ours does not take."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from deuteron import functional as F
from deuteron.functional.context import for_onnx
from deuteron.functional.operators import TORCHS
from deuteron.functional.rope import rotate
from deuteron.nn.authors import authors, is_bare
from deuteron.nn.logits import Logits, is_worth_it

SHORT = (torch.bfloat16, torch.float16)


def _weights_type(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """Return a result's type by the rule of T5's norms: they compute in float32, and cast the
    result to the type of the weight if that has 16 bits."""
    wide = torch.promote_types(torch.promote_types(x, torch.float32), weight)
    return weight if weight in SHORT else wide


# rules for the type of a result, from the types of x and of what it is multiplied with
RESULT_TYPES: dict[str, Callable[[torch.dtype, torch.dtype], torch.dtype]] = {
    "that of x": lambda x, weight: x,
    "the wider one": torch.promote_types,
    "that of the weight": _weights_type,
}


class Part:
    """What all parts share: how they are copied and written to files. Their classes are made at run
    time from ``_recipe``: the kind of part, the author's class, and what was found out about the
    module."""

    _recipe: ClassVar[tuple[Any, ...]]
    _how: ClassVar[Any]

    @classmethod
    def members(cls, original: type[nn.Module], how: Any) -> dict[str, Any]:
        """Return what a class of this kind has besides ``forward``."""
        return {}

    @staticmethod
    def words(how: Any) -> str:
        """Return what it runs, in words, for a report."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        usual: Any = super().__reduce_ex__(max(2, int(protocol)))
        return (_blank, self._recipe, *usual[2:])

    def __prepare_scriptable__(self) -> Any:
        twin = copy.copy(self)
        twin.__class__ = self._recipe[1]
        return twin


def _blank(*recipe: Any) -> nn.Module:
    made = part_class(*recipe)
    return made.__new__(made)


@cache
def part_class(kind: type[Any], original: type[nn.Module], how: Any) -> type[nn.Module]:
    """Return the class of modules of class ``original`` that run as a part of this kind."""
    own = {"_recipe": (kind, original, how), "_how": how, "__doc__": original.__doc__}
    own |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (kind, original), own | kind.members(original, how))


def asked_for_authors(x: Any) -> bool:
    """Whether the author's own forward is needed: for ONNX, which knows its operators, and for
    ``torch.fx``, which passes symbols through it."""
    return isinstance(x, Proxy) or for_onnx()


def _only(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The one argument of a call, whatever the author calls it."""
    (x,) = (*args, *named.values())
    return x


class NormHow(NamedTuple):
    """Which norm it is, and the names of the attributes in which the module keeps what it needs (or
    the number). ``fewer``: how many of the author's calls of torch's, forward and backward, one
    function saves."""

    function: str
    eps: str | float
    weight: str | None
    bias: str | None
    offset: float
    result: str
    fewer: int


class Norm(Part, nn.Module):
    """An RMS or layer norm over the last dimension."""

    _how: ClassVar[NormHow]

    @staticmethod
    def words(how: NormHow) -> str:
        eps = how.eps if isinstance(how.eps, str) else f"{how.eps:g}"
        return f"dt.functional.{how.function}, eps={eps}" + (", weight + 1" if how.offset else "")

    def forward(self, *args: Any, **named: Any) -> Any:
        x, how = _only(args, named), self._how
        if asked_for_authors(x) or not x.is_floating_point():
            return super().forward(*args, **named)  # the author's
        if not how.fewer and (theirs := authors(self, getattr(F, how.function), x)) is not None:
            return theirs.forward(self, *args, **named)
        eps = getattr(self, how.eps) if isinstance(how.eps, str) else how.eps
        weight = None if how.weight is None else getattr(self, how.weight)
        bias = None if how.bias is None else getattr(self, how.bias)
        beside = x.dtype if weight is None else weight.dtype
        result = RESULT_TYPES[how.result](x.dtype, beside)
        if not result == beside == x.dtype:  # computed in the widest of them
            wide = torch.promote_types(result, torch.promote_types(x.dtype, beside))
            x, weight, bias = (t if t is None else t.to(wide) for t in (x, weight, bias))
        if how.function == "layer_norm":
            y: Tensor = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        elif how.offset:
            y = F.rms_norm(x, x.shape[-1:], weight, eps, offset=how.offset)
        else:
            y = F.rms_norm(x, x.shape[-1:], weight, eps)
        return y.to(result)


class ActivationHow(NamedTuple):
    """Which function it is; ``fewer`` as in :class:`NormHow`."""

    function: str
    fewer: int


class Activation(Part, nn.Module):
    """A function of each element."""

    _how: ClassVar[ActivationHow]

    @staticmethod
    def words(how: ActivationHow) -> str:
        return f"dt.functional.{how.function}"

    def forward(self, *args: Any, **named: Any) -> Any:
        x, (name, fewer) = _only(args, named), self._how
        function = getattr(F, name.removesuffix("_tanh"))
        if asked_for_authors(x) or not x.is_floating_point():
            return super().forward(*args, **named)
        if not fewer and (theirs := authors(self, function, x)) is not None:
            return theirs.forward(self, *args, **named)
        return F.gelu(x, "tanh") if name == "gelu_tanh" else function(x)


class GatedHow(NamedTuple):
    """The activation of a gated MLP and the names of its layers. Without ``up``, the layer ``gate``
    makes both halves, and ``swapped`` says that the second one is the gate. ``casts``: the input of
    ``down`` is cast to the type of its weight. ``inside``: names and classes of the activation
    modules that it holds."""

    activation: str
    gate: str
    up: str | None
    down: str
    dropout: str | None
    swapped: bool
    casts: bool
    inside: tuple[tuple[str, type], ...]


def as_found(module: nn.Module, inside: tuple[tuple[str, type], ...]) -> bool:
    """Whether the activation modules are still those that were found, and nobody watches them."""
    for name, kind in inside:
        child: Any = getattr(module, name)
        if type(child) is not kind or not is_bare(child):
            return False
    return True


class Gated(Part, nn.Module):
    """down(activation(gate(x)) · up(x))."""

    _how: ClassVar[GatedHow]

    @staticmethod
    def words(how: GatedHow) -> str:
        known = {"silu": "swiglu", "relu": "reglu", "gelu": "geglu"}
        return "dt.functional." + known.get(how.activation, "geglu, tanh")

    def forward(self, *args: Any, **named: Any) -> Any:
        x, how = _only(args, named), self._how
        if asked_for_authors(x) or not as_found(self, how.inside):
            return super().forward(*args, **named)
        gate = getattr(self, how.gate)(x)
        up = None if how.up is None else getattr(self, how.up)(x)
        if how.swapped:
            up, gate = gate.chunk(2, -1)
        if authors(self, F.swiglu, gate) is not None:
            gate, up = gate.chunk(2, -1) if up is None else (gate, up)
            y = TORCHS[how.activation](gate) * up
        elif how.activation == "silu":
            y = F.swiglu(gate, up)
        elif how.activation == "relu":
            y = F.reglu(gate, up)
        else:
            y = F.geglu(gate, up, "tanh" if how.activation == "gelu_tanh" else "none")
        down = getattr(self, how.down)
        y = y if how.dropout is None else getattr(self, how.dropout)(y)
        casts = how.casts and down.weight.is_floating_point()  # a quantised one has whole numbers
        return down(y.to(down.weight.dtype) if casts else y)


class ResidualHow(NamedTuple):
    """The names of the children that are called one after the other, of the dropout after them, and
    of the child that takes the sum, if there is one. ``inside`` as in :class:`GatedHow`."""

    chain: tuple[str, ...]
    dropout: str
    after: str | None
    inside: tuple[tuple[str, type], ...]


class Residual(Part, nn.Module):
    """dropout(chain(x)) + residual, where the residual is the second argument, or x itself. Where
    there is no dropout to do, the author's forward runs."""

    _how: ClassVar[ResidualHow]

    @staticmethod
    def words(how: ResidualHow) -> str:
        return "dt.functional.bias_dropout_residual"

    def forward(self, *args: Any, **named: Any) -> Any:
        how = self._how
        drop = getattr(self, how.dropout)
        drops = drop.training and drop.p > 0.0 and not drop.inplace
        if named or not drops or asked_for_authors(args[0]) or not as_found(self, how.inside):
            return super().forward(*args, **named)
        y, residual = args[0], args[-1]
        if (theirs := authors(self, F.bias_dropout_residual, residual)) is not None:
            return theirs.forward(self, *args)
        for name in how.chain:
            y = getattr(self, name)(y)
        if y.shape == residual.shape and y.dtype == residual.dtype:
            y = F.bias_dropout_residual(y, None, residual, drop.p)
        else:
            y = drop(y) + residual
        return y if how.after is None else getattr(self, how.after)(y)


class Rotating(Part, nn.Module):
    """A module that runs its author's forward, which finds our function for rotary positions in
    place of the author's."""

    @staticmethod
    def words(how: Any) -> str:
        return f"{', '.join(name for name, *_ in how)} in one kernel"

    @classmethod
    def members(cls, original: type[nn.Module], how: Any) -> dict[str, Any]:
        theirs: Any = original.forward
        names = {*_names(theirs.__code__)}
        scope = {name: theirs.__globals__[name] for name in names & theirs.__globals__.keys()}
        # __name__ is left out: by it torch.compile would look up the author's function again.
        scope["__builtins__"] = theirs.__globals__["__builtins__"]
        for name, partial, result in how:
            scope[name] = _rotary(scope[name], partial, RESULT_TYPES[result])
        code = theirs.__code__, scope, theirs.__name__, theirs.__defaults__, theirs.__closure__
        made = types.FunctionType(*code)
        made.__kwdefaults__, made.__qualname__ = theirs.__kwdefaults__, theirs.__qualname__
        made.__annotations__, made.__module__ = theirs.__annotations__, theirs.__module__
        return {"forward": made}


def _names(code: types.CodeType) -> list[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return [*code.co_names, *(name for c in inner for name in _names(c))]


def _rotary(theirs: Callable[..., Any], partial: bool, result: Any) -> Callable[..., Any]:
    """Return ``theirs`` as one kernel, for calls like those by which it was recognised."""

    @wraps(theirs)
    def apply(q: Any, k: Any, cos: Any, sin: Any, *axis: int, **named: int) -> Any:
        if asked_for_authors(q):
            return theirs(q, k, cos, sin, *axis, **named)
        heads = axis[0] if axis else named.get("unsqueeze_dim", 1)
        fits = q.dim() == 4 and cos.dim() == 3 and heads in (1, 2) and q.dtype == k.dtype
        fits = fits and cos.dtype == sin.dtype and (partial or cos.shape[-1] == q.shape[-1])
        if not fits:
            return theirs(q, k, cos, sin, *axis, **named)
        return rotate(q, k, cos, sin, heads, result(q.dtype, cos.dtype))

    return apply


class Head(Part, nn.Linear):
    """The layer that makes the logits. If only their cross-entropy is needed, they are not
    computed."""

    @staticmethod
    def words(how: Any) -> str:
        return "dt.functional.linear_cross_entropy of its logits"

    def forward(self, input: Tensor) -> Tensor:
        if is_worth_it(input, self.weight, self.bias):
            return Logits.of(input, self.weight, self.bias)
        return nn.Linear.forward(self, input)
