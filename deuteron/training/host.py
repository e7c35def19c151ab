"""State of the host that a CUDA Graph would freeze: settings of the optimiser, flags, addresses.

Learning rates and step counts are kept on the device, where graphs read them. The optimiser's
groups stay as the user sets them: only while the optimiser steps inside a graph, each rate is
replaced by a tensor, and the flags that torch wants for graphs (``capturable``, ``fused``) are on.
When anything else has changed, the step is captured anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from deuteron.optim.base import Fused, Group
from deuteron.optim.sharded import is_spread
from deuteron.plan.program import LOOSE

TORCHS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
PLAIN = (bool, int, float, str, type(None))
ATTRIBUTES = "attributes of modules"


class HostSide:
    """All state of the host that a captured step depends on: a graph is replayed as long as none of
    it changes. Every call checks that, for hundreds of tensors and attributes, so it must be quick.

    ``params``: the parameters of all ``parts``.
    """

    def __init__(self, parts: list[nn.Module], settings: Settings, scaler: Any) -> None:
        self.parts, self.settings, self.scaler = parts, settings, scaler
        self.look()

    def look(self) -> None:
        """List the modules, parameters, buffers and attributes that there are now."""
        self.modules = list(dict.fromkeys(m for part in self.parts for m in part.modules()))
        self.params = list(dict.fromkeys(p for part in self.parts for p in part.parameters()))
        hooks = "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks".split()
        self._hooks = [vars(m).get(name) for m in self.modules for name in hooks]
        self._whole = self._consists()
        both = (held for m in self.modules for held in (m._parameters, m._buffers))
        self.tensors = [held for held in both if held]
        watched = (*PLAIN, torch.Tensor)
        self.attributes = [
            (held, [key for key, value in held.items() if isinstance(value, watched)])
            for held in (module.__dict__ for module in self.modules)
        ]

    def is_another(self) -> bool:
        """Whether layers, parameters or hooks were replaced since the last :meth:`look`."""
        now = self._consists()
        return len(now) != len(self._whole) or not all(map(is_, now, self._whole))

    def _consists(self) -> list[Any]:
        both = (held for m in self.modules for held in (m._modules, m._parameters))
        return [*(each for held in both if held for each in held.values()), *self._hooked()]

    def _hooked(self) -> list[Any]:
        """The hooks of modules, which torch.compile does not look at again."""
        return [hook for held in filter(None, self._hooks) for hook in held.values()]

    def now(self) -> dict[str, list[Any]]:
        """The present values that graphs depend on, by the name that ``note`` gives them."""
        held = [t for kept in self.tensors for t in kept.values() if t is not None]
        states = self.settings.optimizer.state.values()
        state = [x for kept in states for x in kept.values() if isinstance(x, torch.Tensor)]
        scaling = []
        if (scaler := self.scaler) is not None:
            factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
            scaling = [*factors, scaler.get_growth_interval(), scaler.is_enabled()]
        return {
            ATTRIBUTES: [x for kept, keys in self.attributes for x in map(kept.get, keys)],
            "places of tensors": [tuple(map(torch.Tensor.data_ptr, held + state))],
            "hooks of modules": self._hooked(),
            "requires_grad": [tensor.requires_grad for tensor in held],
            "settings of the optimiser": self.settings.key(),
            "settings of the scaler": scaling,
        }


def changes(before: dict[str, list[Any]], now: dict[str, list[Any]]) -> list[str]:
    """The names of values that differ; none if ``before`` is empty, as it is at first."""
    return [what for what, values in now.items() if before and not _same(before[what], values)]


def _same(before: list[Any], now: list[Any]) -> bool:
    """Whether all values are equal. Most are even the same objects, so that is checked first."""
    if len(before) != len(now):
        return False
    return all(map(is_, before, now)) or all(map(_equal, before, now))


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; two tensors only count as equal if they are one object."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(one == other)


class Settings:
    """The settings of an optimiser, with its rates on the device. ``note``: why its steps cannot be
    captured; "" if they can."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, scaled: bool
    ) -> None:
        self.optimizer, self.device, self.scaled = optimizer, device, scaled
        self.rates: list[torch.Tensor] = []
        self.values: list[float] = []  # what ``rates`` hold
        self.note = "the model is on the CPU"
        if device.type == "cuda":
            self.note = next(filter(None, map(self._why_not, optimizer.param_groups)), "")

    def _why_not(self, group: Group) -> str:
        optimizer = self.optimizer
        name = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "the optimiser has hooks, which a CUDA Graph would not call"
        if any(p.device.type != self.device.type for p in group["params"]):
            return "a table on the host is read, and updated, by the host"
        if isinstance(optimizer, Fused):
            return ""
        if type(optimizer) not in TORCHS:
            known = "Adam, AdamW and SGD of torch.optim and those of dt.optim do not"
            return f"{name} reads its learning rate on the host; {known}"
        if any(map(is_spread, group["params"])):
            return f"{name} has no fused step for DTensors; those of dt.optim have"
        left_out = "foreach, differentiable and fused=False are left out"
        return "" if self._switches(group) else f"{name} is captured if {left_out}"

    def _switches(self, group: Group) -> dict[str, bool]:
        """The flags to set in a group while its step runs. If one of torch's optimisers gets none,
        its step cannot be captured."""
        if isinstance(self.optimizer, Fused):
            return {"capturable": True} if "capturable" in group else {}
        if group["differentiable"]:
            return {}
        flags = {"capturable": True} if "capturable" in group else {}
        real = all(p.is_floating_point() for p in group["params"])
        if group["fused"] is not False and not group["foreach"] and real:
            return flags | {"fused": True}
        return {} if self.scaled else flags

    def key(self) -> list[Any]:
        """All settings that a CUDA Graph freezes, which are all but the rates; tensors as their
        addresses."""
        found: list[Any] = []
        for group in self.optimizer.param_groups:
            there = _is_there(group["lr"], self.device)
            given = {**group, "params": len(group["params"]), "lr": group["lr"] if there else None}
            found += [
                (name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
                for name, value in given.items()
            ]
        return found

    def upload(self) -> None:
        """Write rates that have changed to the device, without waiting for it."""
        if self.note:
            return
        for i, group in enumerate(self.optimizer.param_groups):
            if i == len(self.rates):
                self.rates.append(torch.zeros((), device=self.device))
                self.values.append(0.0)
            if not _is_there(group["lr"], self.device) and float(group["lr"]) != self.values[i]:
                self.values[i] = float(group["lr"])
                self.rates[i].fill_(self.values[i])

    def settle(self) -> None:
        """Move large tensors of the optimiser's state to new memory. The first step allocated them
        between its own tensors, which are free by now. Once these pieces of memory hold nothing
        else, a graph can have them."""
        for state in self.optimizer.state.values():
            large = {k: t for k, t in state.items() if type(t) is torch.Tensor and t.nbytes > LOOSE}
            state.update({k: t.clone() for k, t in large.items() if t.device == self.device})

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """While it is open, the optimiser's step reads rates and step counts on the device."""
        if self.note:
            yield
            return
        optimizer: Any = self.optimizer
        before = [dict(group) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            switches = self._switches(group)
            group |= switches | ({} if _is_there(group["lr"], self.device) else {"lr": rate})
        if not isinstance(optimizer, Fused):
            for state in optimizer.state.values():
                if "step" in state and state["step"].is_cpu:
                    state["step"] = state["step"].to(self.device, torch.float32)
        scaling = optimizer.__dict__.get("_step_supports_amp_scaling")
        if self.scaled:  # torch's step is fused here: if it were not, self.note would say so
            optimizer._step_supports_amp_scaling = True
        try:
            yield
        finally:
            for group, old in zip(optimizer.param_groups, before, strict=True):
                group.update(old)
            if self.scaled:
                del optimizer._step_supports_amp_scaling
                if scaling is not None:
                    optimizer._step_supports_amp_scaling = scaling


def _is_there(rate: Any, device: torch.device) -> bool:
    return isinstance(rate, torch.Tensor) and rate.device == device
