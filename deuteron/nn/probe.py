"""Running a module's ``forward`` on small examples in float64, with parameters and children of our
own in the place of its own, and seeing what it does with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CLOSE = 1e-9  # in float64, relative to the largest result of a row: a formula or not
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# everything that a forward may raise when it is given an example that is not for it
ANYTHING_WRONG = Exception
GENERATOR = torch.Generator()


class InDouble(TorchDispatchMode):
    """Casts to a shorter float type are left out: models compute norms in float32 by saying so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in FLOATS:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


class Child(nn.Module):
    """Stands for a child of a twin: answers by ``call``, and writes down what it took and gave."""

    def __init__(self, call: Callable[[Tensor], Tensor], like: nn.Module, calls: list[Any]) -> None:
        super().__init__()
        self.call, self.calls = call, calls
        for name in ("weight", "bias", "p", "in_features", "out_features"):
            if hasattr(call, name) or hasattr(like, name):
                vars(self)[name] = getattr(call, name, getattr(like, name, None))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self, x, y := self.call(x)))
        return y


def twin(module: nn.Module, parameters: dict[str, Any], children: dict[str, Any]) -> nn.Module:
    """Another module with the same attributes, but these parameters and children. What its forward
    sets stays with it."""
    own = dict.fromkeys(module._parameters) | parameters
    made = alike(module)
    vars(made).update(_parameters={}, _modules=dict(module._modules) | children, **own)
    return made


def alike(module: nn.Module, **attributes: Any) -> nn.Module:
    """Another module that shares all but these attributes."""
    made = object.__new__(type(module))
    vars(made).update(vars(module), **attributes)
    return made


def run(module: nn.Module, *given: Tensor, double: bool = True) -> Any:
    """What its class computes, without hooks; in float64 whatever it casts to."""
    with InDouble() if double else nullcontext():  # type: ignore[no-untyped-call]
        return type(module).forward(module, *given)


def is_close(found: Any, want: Tensor) -> bool:
    """Whether every row is what it should be."""
    if not isinstance(found, Tensor) or found.shape != want.shape or found.dtype != want.dtype:
        return False
    apart = (found - want).abs().amax(-1)
    return bool((apart <= CLOSE * want.abs().amax(-1)).all())


def takes_one(module: nn.Module) -> bool:
    """Whether its forward takes one argument."""
    known = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(known) == 1 and known[0].kind is known[0].POSITIONAL_OR_KEYWORD


def is_leaf(module: nn.Module) -> bool:
    return not module._modules and not any(True for _ in module.buffers())


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)
