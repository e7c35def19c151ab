"""What a stand-in gains in training on a GPU, by estimate: from which size on it runs a function of
ours, how much less that moves through memory than torch's calls do, and how many calls of torch's
it saves at any size.

In a training loop that calls module by module the GPU often waits for the host: of ResNet-50, BERT
and GPT-2 with small batches on an H200 each call of torch's, forward or backward, took 20 to 30 µs
of a step, whatever its size. There only calls that are not made are a gain: one node of ours took
the host 2 to 16 µs more than torch's call for the same, forward and backward
(bench/results/eager-h200.md). So a module that is one call of torch's, and moves no less by ours,
stays torch's. What an author wrote out in many calls becomes one call at any size: torch's own
where it has one and the tensor is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from deuteron import functional as F
from deuteron.functional.delegate import PASSES
from deuteron.nn import logits
from deuteron.nn.blocks import Block, Site
from deuteron.nn.parts import Activation, Gated, Head, Norm, Part, Residual
from deuteron.target import Target

WORTH = 1.1  # a stand-in that moves so many times less through memory is felt
SUM = 3.0  # passes over memory of a sum: two reads and a write; backward passes the gradient on
OURS = {"batch_norm": 8.0, "layer_norm": 7.0, "rms_norm": 7.0, "group_norm": 8.0}


class Gain(NamedTuple):
    """``least``: the bytes of an input from which on ours answers. ``times``: what torch's calls
    move through memory, forward and backward, divided by what ours moves. ``fewer``: calls of
    torch's that are saved at any size."""

    least: int
    times: float
    fewer: int = 0

    @property
    def is_one(self) -> bool:
        """Whether there is a gain: so much less memory traffic that it is felt, or fewer calls."""
        return self.times >= WORTH or self.fewer > 0

    def __str__(self) -> str:
        told = f"by estimate {self.times:.1f}×, from {self.least / 1e6:.0f} MB on"
        return told + (f"; {self.fewer} calls of torch's fewer at any size" if self.fewer else "")


def gain(cls: Any, module: nn.Module, machine: Target) -> Gain | None:
    """Return the gain of a class of stand-ins for a module; None where nothing is known."""
    if not machine.is_cuda:
        return None
    how: Any = getattr(cls, "_how", None)
    children = dict(module.named_children())
    if issubclass(cls, Block):
        every = [_of_site(site, children, machine) for site in how.sites]
        return Gain(min(g.least for g in every), sum(g.times for g in every) / len(every))
    if issubclass(cls, Norm):
        return _of(getattr(F, how.function), machine)._replace(fewer=how.fewer)
    if issubclass(cls, Gated):
        function: Any = F.swiglu
        return Gain(function.ours_from(machine), (function.passes + PASSES) / 8.0)
    if issubclass(cls, Residual):
        added: Any = F.bias_dropout_residual
        return Gain(added.ours_from(machine), (PASSES + SUM) / 6.0)
    if issubclass(cls, Head):
        classes, features = module.weight.shape  # type: ignore[misc]
        least = logits.least_bytes(machine) * int(features) // int(classes)
        return Gain(least, logits.PASSES / logits.OURS)
    if issubclass(cls, Activation):
        found = _of(getattr(F, how.function.removesuffix("_tanh")), machine)
        return found._replace(times=found.times * (1.0 + how.fewer / 2.0), fewer=how.fewer)
    runs = getattr(cls, "_runs", None)
    if runs is None and issubclass(cls, Part):
        return None
    return Gain(0, 1.0) if runs is None else _of(runs, machine)  # the first: no gain was measured


def _of(function: Any, machine: Target) -> Gain:
    ours = OURS.get(function.__name__, PASSES)
    return Gain(function.ours_from(machine), max(1.0, function.passes / ours))


def _of_site(site: Site, children: dict[str, nn.Module], machine: Target) -> Gain:
    """Return the gain of a norm, a sum and an activation by one call."""
    function: Any = getattr(type(children[site.norm]), "_runs", None)
    if function is None:  # the norm has not been replaced yet
        kind = type(children[site.norm]).__name__
        function = getattr(F, "batch_norm" if "Batch" in kind else f"{kind[:-4].lower()}_norm")
    ours = OURS[function.__name__] + (2.0 if site.adds else 0.0)
    torchs = function.passes + (SUM if site.adds else 0.0) + (PASSES if site.activation else 0.0)
    more = site.adds + bool(site.activation)
    return Gain(function.ours_from(machine, more, in_a_model=True), torchs / ours)
