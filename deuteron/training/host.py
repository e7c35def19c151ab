"""What a CUDA Graph would freeze of the host: settings of the optimiser, flags, addresses.

Learning rates and counts of steps are kept on the device. The optimiser's groups stay what the user
sets: only while its step runs for a graph, a tensor stands in the place of each rate, and the flags
that torch wants for graphs are on. Of everything else a graph is made anew when it has changed.
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
    """All that a graph of a step keeps: it is replayed as long as none of it changes.

    That is asked at every call, of hundreds of tensors and attributes. ``params``: those of all
    ``parts``.
    """

    def __init__(self, parts: list[nn.Module], settings: Settings, scaler: Any) -> None:
        self.parts, self.settings, self.scaler = parts, settings, scaler
        self.look()

    def look(self) -> None:
        """Find out what the modules consist of."""
        self.modules = list(dict.fromkeys(m for part in self.parts for m in part.modules()))
        self.params = list(dict.fromkeys(p for part in self.parts for p in part.parameters()))
        self._whole = self._consists()
        both = (held for m in self.modules for held in (m._parameters, m._buffers))
        self.tensors = [held for held in both if held]
        watched = (*PLAIN, torch.Tensor)
        self.attributes = [
            (held, [key for key, value in held.items() if isinstance(value, watched)])
            for held in (module.__dict__ for module in self.modules)
        ]

    def is_another(self) -> bool:
        """Whether layers or parameters are other ones than when somebody looked."""
        now = self._consists()
        return len(now) != len(self._whole) or not all(map(is_, now, self._whole))

    def _consists(self) -> list[Any]:
        both = (held for m in self.modules for held in (m._modules, m._parameters))
        return [each for held in both if held for each in held.values()]

    def now(self) -> dict[str, list[Any]]:
        """What graphs depend on, by what it is called in a note."""
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
            "requires_grad": [tensor.requires_grad for tensor in held],
            "settings of the optimiser": self.settings.key(),
            "settings of the scaler": scaling,
        }


def changes(before: dict[str, list[Any]], now: dict[str, list[Any]]) -> list[str]:
    """What is not as it was; at first, when nothing is known, nothing."""
    return [what for what, values in now.items() if before and not _same(before[what], values)]


def _same(before: list[Any], now: list[Any]) -> bool:
    """Most are the same objects, which is quick to see."""
    if len(before) != len(now):
        return False
    return all(map(is_, before, now)) or all(map(_equal, before, now))


def _equal(one: Any, other: Any) -> bool:
    """Tensors are equal if they are the same."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(one == other)


class Settings:
    """The numbers of an optimiser. ``note`` says why its steps are not captured, if so."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, scaled: bool
    ) -> None:
        self.optimizer, self.device, self.scaled = optimizer, device, scaled
        self.rates: list[torch.Tensor] = []
        self.values: list[float] = []  # of the rates on the device
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
        """Flags of a group that are on while its step is captured."""
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
        """What a CUDA Graph freezes: all but the rates. Tensors count by their address."""
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
        """Bring rates that were changed to the device, without waiting for it."""
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
        """Move large tensors of the state, which was made amid what a step takes and gives back, so
        that pieces of memory in which nothing else is left can go to a graph."""
        for state in self.optimizer.state.values():
            large = {k: t for k, t in state.items() if type(t) is torch.Tensor and t.nbytes > LOOSE}
            state.update({k: t.clone() for k, t in large.items() if t.device == self.device})

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it, a step of the optimiser reads rates and counts on the device."""
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
        if self.scaled:  # where it is not fused, self.note has said so
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
