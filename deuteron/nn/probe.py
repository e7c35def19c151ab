"""Runs a module's ``forward`` on small examples in float64, with parameters and children of our own
in place of the module's, and watches what it does with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CLOSE = 1e-9  # in float64, relative to the largest result of a row: closer than that is a match
SLOPES = 1e-6  # the same of gradients
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# everything that a forward may raise when it is given an example that does not suit it
ANYTHING_WRONG = Exception
GENERATOR = torch.Generator()


class InDouble(TorchDispatchMode):
    """Leaves out casts to a shorter float type, because models say explicitly that norms are
    computed in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in FLOATS:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


class Calls(TorchDispatchMode):
    """Counts the calls of torch's that do something, which views do not."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))


class Child(nn.Module):
    """Stands for a child of a twin: it answers by ``call``, and notes what it took and gave."""

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
    """Return another module with the same attributes, but with these parameters and children, and
    with random numbers in its buffers, because training or a checkpoint may change them. What its
    forward sets stays with it."""
    own = dict.fromkeys(module._parameters) | parameters
    kept = {k: b if b is None else _another(b) for k, b in module._buffers.items()}
    made = twin_of(module, _parameters={}, _buffers=kept)
    vars(made).update(own, _modules=dict(module._modules) | children)
    return made


def _another(buffer: Tensor) -> Tensor:
    return random(*buffer.shape) if buffer.is_floating_point() else buffer.clone()


def twin_of(module: nn.Module, **attributes: Any) -> nn.Module:
    """Return another module that shares all attributes but these."""
    made = object.__new__(type(module))
    vars(made).update(vars(module), **attributes)
    return made


class Changes(Exception):
    """Raised when a forward changes what its module keeps, as no function of ours would."""

    def __init__(self) -> None:
        super().__init__("its forward changes what the module keeps")


def run(module: nn.Module, *given: Tensor, double: bool = True, forward: Any = None) -> Any:
    """Return what the module's class computes, without hooks, in float64 whatever it casts to
    (unless ``double`` is False), by its forward or by another one. It works on copies of the
    containers and buffers that the module keeps, so that nothing of the module changes."""
    held = {k: copy(v) for k, v in vars(module).items() if type(v) in (list, dict, set)}
    buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    lent = twin_of(module, **held | {"_buffers": buffers})
    before = _kept(lent)
    with InDouble() if double else nullcontext():  # type: ignore[no-untyped-call]
        result = (forward or type(module).forward)(lent, *given)
    if _kept(lent) != before:
        raise Changes
    return result


def _kept(module: nn.Module) -> Any:
    """Return what a module keeps, to compare it later: numbers by value, everything else by which
    object it is, and tensors also by how often they were written to."""

    def seen(value: Any) -> Any:
        if isinstance(value, str | int | float | None):
            return value
        return id(value), value._version if isinstance(value, Tensor) else 0

    def inside(value: Any) -> Any:
        every = [*value, *value.values()] if isinstance(value, dict) else value
        return [*map(seen, every)] if isinstance(value, list | dict | set) else seen(value)

    return {name: inside(value) for name, value in vars(module).items()}


def fewer_calls(module: nn.Module, x: Tensor) -> int:
    """Return how many calls of torch's its ``forward`` and the gradient make in float32, beyond the
    two that one function of torch's would make."""
    x = x.detach().float().requires_grad_()
    learned = [t for t in vars(module).values() if isinstance(t, Tensor) and t.requires_grad]
    calls: Any = Calls()  # type: ignore[no-untyped-call]
    with calls:
        y = run(module, x, double=False)
        torch.autograd.grad(y, [x, *learned], y.detach(), allow_unused=True)
    return max(0, int(calls.count) - 2)


def is_close(found: Any, want: Tensor) -> bool:
    """Whether every row is what it should be, and so are the gradients of all that it was made of,
    because an author may have meant another gradient than the formula has."""
    if not isinstance(found, Tensor) or found.shape != want.shape or found.dtype != want.dtype:
        return False
    with torch.no_grad():
        apart = (found - want).abs().amax(-1)
        same = bool((apart <= CLOSE * want.abs().amax(-1)).all())
    return same and _slopes_alike(found, want)


def _slopes_alike(found: Tensor, want: Tensor) -> bool:
    """Whether two results have the same gradients with respect to everything that either was made
    of. Where the author's gradient is no finite number, any will do."""
    made_of = _made_of(want) | _made_of(found)
    if not made_of:
        return True
    if not found.requires_grad or not want.requires_grad:
        return False
    weights = random(*want.shape).detach()
    both = (
        torch.autograd.grad(y, [*made_of], weights, retain_graph=True, allow_unused=True)
        for y in (found, want)
    )
    for theirs, ours, of in zip(*both, made_of, strict=True):
        a, b = (torch.zeros_like(of) if g is None else g for g in (theirs, ours))
        apart = (a - b).abs()[a.isfinite()]
        if not bool((apart <= SLOPES * max(float(b.abs().max()), 1e-300)).all()):
            return False
    return True


def _made_of(y: Tensor) -> set[Tensor]:
    """Return the tensors that a result was computed from, as autograd knows them."""
    left, seen, leaves = [y.grad_fn], set[Any](), set[Tensor]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
            if hasattr(node, "variable"):
                leaves.add(node.variable)
    return leaves


def takes_one(module: nn.Module) -> bool:
    """Whether its forward takes one argument."""
    known = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(known) == 1 and known[0].kind is known[0].POSITIONAL_OR_KEYWORD


def is_leaf(module: nn.Module) -> bool:
    return not module._modules and not any(True for _ in module.buffers())


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR).requires_grad_()
