"""How a module of ``torch.nn`` comes to run a function of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.fx import Proxy

from deuteron.errors import BindError

M = TypeVar("M", bound=nn.Module)


def runs(function: Callable[..., Any]) -> Callable[[type[M]], type[M]]:
    """A stand-in for a class of ``torch.nn``, whose ``forward`` is ``function``: of the input, and
    of what the module keeps under the names that the function has for its further arguments."""

    def decorate(cls: type[M]) -> type[M]:
        if cls.__init__ is nn.Module.__init__:  # it takes no arguments, and should say so
            cls.__init__ = _without_arguments  # type: ignore[method-assign]
        kept = {*inspect.signature(cls).parameters, "weight"}
        names = list(takewhile(kept.__contains__, list(inspect.signature(function).parameters)[1:]))

        def forward(self: nn.Module, input: Tensor) -> Any:
            return function(input, *[getattr(self, name) for name in names])

        forward.__qualname__ = f"{cls.__name__}.forward"
        cls.forward = forward
        return cls

    return decorate


def _without_arguments(self: nn.Module) -> None:
    nn.Module.__init__(self)


def as_leaf(module: nn.Module, *given: Any) -> Any:
    """The call of a module that asks its input questions, as one node of the graph that
    ``torch.fx`` traces: so are torch's own. None where nothing is traced."""
    symbol = next((each for each in given if isinstance(each, Proxy)), None)
    if symbol is None:
        return None
    tracer: Any = symbol.tracer
    if module is tracer.root:
        raise BindError(
            f"{type(module).__name__} asks its input questions, which a symbol cannot answer",
            asked=f"torch.fx.symbolic_trace({type(module).__name__}(…))",
            remedy="trace a model that it is a part of, such as torch.nn.Sequential(module)",
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), given, {})
