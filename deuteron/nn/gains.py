"""What a stand-in gains in training, by estimate: from which size on it runs a function of ours,
and by how much less that moves through memory than torch's calls do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deuteron import functional as F
from deuteron.functional.delegate import PASSES, small_bytes
from deuteron.nn.authors import BEFORE
from deuteron.nn.blocks import Block, Site
from deuteron.nn.parts import Activation, Gated, Norm, Residual
from deuteron.target import Target

SUM = 3.0  # passes over memory of a sum: two reads and a write; backward it hands a gradient on
OURS = {"batch_norm": 8.0, "layer_norm": 7.0, "rms_norm": 7.0, "group_norm": 8.0}


# modules of one call, forward and backward, whose kernels are as quick as ours
ALONE = ("Dropout", "Embedding")


class _Calls(TorchDispatchMode):
    """Counts torch's calls."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self.count += not getattr(call, "is_view", False)
        return call(*args, **(named or {}))


def calls_of(module: nn.Module) -> int:
    """How many calls of torch's the author's forward is, of a function of each element."""
    before = vars(module).get(BEFORE, type(module))
    calls: Any = _Calls()  # type: ignore[no-untyped-call]
    x = torch.zeros(4)
    with calls, torch.no_grad():
        before.forward(module, x)
    return int(calls.count)


class Gain(NamedTuple):
    """``least``: the bytes of an input from which on ours answers; ``times``: how often what ours
    moves through memory goes into what torch's calls move, forward and backward."""

    least: int
    times: float

    def __str__(self) -> str:
        return f"by estimate {self.times:.1f}×, from {self.least / 1e6:.0f} MB on"


def gain(cls: Any, module: nn.Module, machine: Target) -> Gain | None:
    """That of a class of stand-ins for a module; None where nobody knows."""
    if not machine.is_cuda:
        return None
    how: Any = getattr(cls, "_how", None)
    children = dict(module.named_children())
    if cls.__name__ in ALONE and issubclass(cls, getattr(nn, cls.__name__)):
        return Gain(small_bytes(machine), 1.0)
    if issubclass(cls, Block):
        every = [_of_site(site, children, machine) for site in how.sites]
        return Gain(min(g.least for g in every), sum(g.times for g in every) / len(every))
    if issubclass(cls, Norm):
        return _of(getattr(F, how.function), machine)
    if issubclass(cls, Gated):
        function: Any = F.swiglu
        return Gain(function.ours_from(machine), (function.passes + PASSES) / 8.0)
    if issubclass(cls, Residual):
        added: Any = F.bias_dropout_residual
        return Gain(added.ours_from(machine), (PASSES + SUM) / 6.0)
    if issubclass(cls, Activation):
        found = _of(getattr(F, how.removesuffix("_tanh")), machine)
        return found._replace(times=found.times * max(1, calls_of(module)))
    runs = getattr(cls, "_runs", None)
    return None if runs is None else _of(runs, machine)


def _of(function: Any, machine: Target) -> Gain:
    ours = OURS.get(function.__name__, PASSES)
    return Gain(function.ours_from(machine), max(1.0, function.passes / ours))


def _of_site(site: Site, children: dict[str, nn.Module], machine: Target) -> Gain:
    """A norm, a sum and an activation by one call."""
    function: Any = getattr(type(children[site.norm]), "_runs", None)
    if function is None:  # not replaced yet
        kind = type(children[site.norm]).__name__
        function = getattr(F, "batch_norm" if "Batch" in kind else f"{kind[:-4].lower()}_norm")
    ours = OURS[function.__name__] + (2.0 if site.adds else 0.0)
    torchs = function.passes + (SUM if site.adds else 0.0) + (PASSES if site.activation else 0.0)
    more = site.adds + bool(site.activation)
    return Gain(function.ours_from(machine, more, in_a_model=True), torchs / ours)
