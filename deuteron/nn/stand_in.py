"""How a module of ``torch.nn`` is made to run a function of ours, and what it needs besides that
for ``torch.fx``, for ``torch.jit.script``, and to go back to the module that it stands in for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from itertools import product, takewhile
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import Proxy

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.nn.authors import authors

# Classes of torch.nn that only call one function, and its name, which is mostly theirs in lower
# case.
RUNS = {
    name: name.lower()
    for name in """ReLU ReLU6 PReLU ELU CELU SELU GELU SiLU Mish Sigmoid Tanh Hardswish Hardsigmoid
        Hardtanh Softplus Softsign Softshrink Hardshrink Tanhshrink Threshold GLU""".split()
}
RUNS |= {"LeakyReLU": "leaky_relu", "LogSigmoid": "log_sigmoid", "Upsample": "interpolate"}
RUNS |= {"PixelShuffle": "pixel_shuffle", "PixelUnshuffle": "pixel_unshuffle"}
for _kind, _n in product(("Max", "Avg"), (1, 2, 3)):
    RUNS[f"{_kind}Pool{_n}d"] = _pool = f"{_kind.lower()}_pool{_n}d"
    RUNS[f"Adaptive{_kind}Pool{_n}d"] = f"adaptive_{_pool}"


def stand_in_classes() -> dict[str, type[nn.Module]]:
    """Return the classes of :data:`RUNS`, by name."""
    return {name: _stand_in(name, function) for name, function in RUNS.items()}


def _stand_in(name: str, function: str) -> type[nn.Module]:
    """Return a class whose ``forward`` calls the function with the input and with the module's
    attributes that have the names of the function's further arguments."""
    torchs, call = getattr(nn, name), getattr(F, function)
    members: dict[str, Any] = {"__doc__": f"``torch.nn.{name}``: {call.__doc__}"}
    members["_runs"] = staticmethod(call)
    if torchs.__init__ is nn.Module.__init__:  # it takes no arguments, and its help should say so
        members["__init__"] = _without_arguments
    cls = type(name, (torchs,), members | {"__module__": __package__})
    kept = {*inspect.signature(cls).parameters, "weight"}
    names = list(takewhile(kept.__contains__, list(inspect.signature(call).parameters)[1:]))

    def forward(self: nn.Module, input: Tensor) -> Any:
        if (theirs := authors(self, call, input)) is not None:
            return theirs.forward(self, input)
        return call(input, *[getattr(self, name) for name in names])

    forward.__qualname__ = f"{name}.forward"
    cls.forward = forward  # type: ignore[attr-defined]
    return cls


def _without_arguments(self: nn.Module) -> None:
    nn.Module.__init__(self)


class Extended:
    """A class of torch's that takes more arguments: ``_extras`` names arguments of the function
    that it runs, which have the function's defaults."""

    _runs: ClassVar[Callable[..., Any]]
    _extras: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any, **given: Any) -> None:
        own = {name: given.pop(name) for name in self._extras if name in given}
        super().__init__(*args, **given)
        vars(self).update(own)

    def __init_subclass__(cls) -> None:
        """Give the class a signature: the arguments of torch's class, as the installed version has
        them, and the extras. A module that ``dt.nn.replace`` turned into this class has the extras'
        defaults."""
        super().__init_subclass__()
        torchs: Any = next(
            (c for c in cls.__mro__ if c.__module__.startswith("torch.nn.modules.")), None
        )
        if torchs is None or inspect.unwrap(cls.__init__) is not Extended.__init__:
            return

        @wraps(Extended.__init__)
        def init(self: Any, *args: Any, **given: Any) -> None:
            if unknown := given.keys() - shown.parameters:
                raise TypeError(f"{cls.__name__} has no argument {unknown.pop()!r}")
            Extended.__init__(self, *args, **given)

        own = [inspect.signature(cls._runs).parameters[name] for name in cls._extras]
        for extra in own:
            setattr(cls, extra.name, extra.default)
        theirs = inspect.signature(torchs.__init__)
        shown = theirs.replace(parameters=[*theirs.parameters.values(), *own])
        init.__signature__ = shown  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[method-assign]


def as_leaf(module: nn.Module, *given: Any) -> Any:
    """Return the call of a module as one node of the graph that ``torch.fx`` traces, as the calls
    of torch's own modules are: for modules whose forward asks its input questions, which a symbol
    cannot answer. None where nothing is traced."""
    symbol = next((each for each in given if isinstance(each, Proxy)), None)
    if symbol is None:
        return None
    tracer: Any = symbol.tracer
    if module is tracer.root:
        name = type(module).__name__
        wrong = f"{name} asks its input questions, which a symbol cannot answer"
        remedy = "trace a model that it is a part of, such as torch.nn.Sequential(module)"
        raise BindError(wrong, asked=f"torch.fx.symbolic_trace({name}(…))", remedy=remedy)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), given, {})


def as_torchs(module: nn.Module) -> nn.Module:
    """Return the module of ``torch.nn`` that this one stands in for, with the same parameters, for
    ``torch.jit.script``, which reads Python and cannot read ours."""
    kind = type(module)
    base = getattr(nn, kind.__name__, None) if kind.__module__.startswith(__package__) else None
    more = [name for name in getattr(kind, "_extras", ()) if getattr(module, name)]
    if base is None or more:
        what = f"{kind.__name__} with {more[0]}" if more else kind.__name__
        wrong = f"{what} cannot be read by TorchScript, and torch.nn has none to stand in for it"
        remedy = "use torch.compile, or torch.jit.trace"
        raise BindError(wrong, asked="torch.jit.script(…)", remedy=remedy)
    twin = copy.copy(module)
    twin.__class__ = base
    return twin


def scriptable(module: Any) -> None:
    """Make ``torch.jit.script`` take torch's module in place of one of this class."""
    if isinstance(module, type) and issubclass(module, nn.Module):
        module.__prepare_scriptable__ = as_torchs  # type: ignore[attr-defined]
