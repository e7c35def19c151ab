"""Who runs a step: generated code on the CPU, Triton on a GPU (gpu.py), torch's operators elsewhere.

All of them run the formulas of :mod:`deuteron.kernels.optim`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from deuteron.codegen import openmp
from deuteron.errors import EngineError
from deuteron.kernels.optim import GROUP, GROUPS, SQUARES, OnTensors, Rule, Step
from deuteron.optim.batch import Batch, moved

Rate = float | torch.Tensor


@dataclass(frozen=True)
class Limits:
    """What is decided about all gradients together, before the step."""

    max_norm: float | None = None
    skip_nonfinite: bool = False

    @property
    def needs_norm(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite


@dataclass(frozen=True)
class Control:
    """(factor of the gradients, whether to skip) on a device, and the norm that led to it."""

    pair: torch.Tensor
    norm: torch.Tensor | None
    may_skip: bool

    def on(self, device: torch.device) -> Control:
        return Control(moved(self.pair, device), self.norm, self.may_skip)


class Runner(ABC):
    """What the optimisers ask of a device. ``block`` is the length of a chunk."""

    name: str
    block: int

    @abstractmethod
    def squares(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Sums of the squares of the gradients, some per chunk, in float64."""

    @abstractmethod
    def control(
        self,
        squares: torch.Tensor | None,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        limits: Limits,
    ) -> Control:
        """Unscale, clip and skip in two numbers."""

    @abstractmethod
    def step(
        self,
        batch: Batch,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        capturable: bool,
    ) -> None:
        """Run the batch's rule over its tensors."""

    def tile(self, p: torch.Tensor) -> Any:
        """Matrices step together if this is equal."""
        return None


class Host(Runner):
    """Numbers are Python's; a subclass runs a rule over tensors."""

    @abstractmethod
    def run(self, rule: Rule, batch: Batch, numbers: list[float]) -> torch.Tensor:
        """All steps of a rule; answers the sums over chunks."""

    def squares(self, batches: Sequence[Batch]) -> torch.Tensor:
        return torch.cat([self.run(SQUARES, batch, [1.0]).flatten() for batch in batches])

    def control(
        self,
        squares: torch.Tensor | None,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        limits: Limits,
    ) -> Control:
        factor = 1.0 / float(scale) if scale is not None else 1.0
        skip = found_inf is not None and float(found_inf) != 0.0
        norm = None
        if squares is not None:
            length = math.sqrt(total) * factor if (total := float(squares.sum())) >= 0 else math.nan
            norm = torch.tensor(length, dtype=torch.float32)
            skip = skip or (limits.skip_nonfinite and not math.isfinite(length))
            if limits.max_norm is not None:
                ratio = limits.max_norm / (length + 1e-6)
                factor *= 1.0 if ratio >= 1.0 else ratio  # nan stays nan
        return Control(torch.tensor([factor, float(skip)], dtype=torch.float64), norm, True)

    def step(
        self,
        batch: Batch,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        capturable: bool,
    ) -> None:
        if control is not None:
            factor, skip = control.pair.tolist()
            if skip:
                return
            constants = [constants[0] * factor, *constants[1:]]
        numbers = batch.rule.numbers(constants, float(lr), batch.advance())
        self.run(batch.rule, batch, numbers)


class Generated(Host):
    """Vector code through LLVM, all steps of all tensors in one call."""

    name = "LLVM"

    def __init__(self) -> None:
        from deuteron.kernels.cpu import optim

        self.kernels, self.block = optim, optim.BLOCK

    def run(self, rule: Rule, batch: Batch, numbers: list[float]) -> torch.Tensor:
        call = batch.prepared.get(rule)
        if call is None:
            kinds = batch.kinds[: len(rule.names.tensors)]
            chunks = self.kernels.Chunks(batch.table, batch.where, batch.firsts)
            shapes = [tuple(p.shape) for p in batch.params]
            call = self.kernels.Steps(rule, kinds, chunks, shapes, batch.sizes)
            batch.prepared[rule] = call
        call.run(batch.grads, numbers)
        sums: torch.Tensor = call.sums
        return sums


class Plain(Host):
    """torch's operators, tensor by tensor: for devices and machines without the others."""

    name = "torch"
    block = 2**62

    def run(self, rule: Rule, batch: Batch, numbers: list[float]) -> torch.Tensor:
        sums = torch.zeros(len(rule.names.sums), batch.count, dtype=torch.float64)
        for i, home in enumerate(batch.homes):
            if home.numel():
                kept = [home, batch.held[i], *(row[i] for row in batch.tensors)]
                tensors = dict(zip(rule.names.tensors, kept, strict=False))
                _Tensor(rule, i, tensors, batch.wide).run(numbers, sums[:, i])
        return sums


class _Tensor:
    """The step of one tensor."""

    def __init__(
        self, rule: Rule, index: int, tensors: dict[str, torch.Tensor], wide: torch.dtype
    ) -> None:
        self.rule, self.wide = rule, wide
        self.tensors = {
            k: torch.view_as_real(x) if x.is_complex() else x for k, x in tensors.items()
        }
        self.scratch: dict[str, Any] = {}
        self.b = OnTensors(index, self.load("p"))

    def load(self, name: str) -> torch.Tensor:
        x = self.tensors[name].to(self.wide)
        if self.rule.walk != GROUPS:
            return x
        if name in self.rule.levels:
            return x[:, None]
        flat = x.as_strided((x.numel(),), (1,))
        return torch.nn.functional.pad(flat, (0, -x.numel() % GROUP)).view(-1, GROUP)

    def store(self, name: str, value: torch.Tensor) -> None:
        x = self.tensors[name]
        if self.rule.walk == GROUPS:
            x, value = x.as_strided((x.numel(),), (1,)), value.flatten()[: x.numel()]
        x.copy_(value)

    def run(self, numbers: list[float], sums: torch.Tensor) -> None:
        """All steps; what is added up goes to ``sums``."""
        names, size = self.rule.names, float(self.tensors["p"].numel())
        known: dict[str, Any] = dict(zip(names.numbers, numbers, strict=True))
        totals = dict(zip(names.sums, sums, strict=True))
        for step in self.rule.steps:
            if step.kind == "finish":
                known |= step.formula(self.b, size=size, **totals, **known)
            elif step.kind == "moments":
                self.move(step, known)
            else:
                for name, value in step.formula(self.b, **self.given(step), **known).items():
                    if name in names.sums:
                        totals[name].copy_(value.double().sum())
                    elif name in self.tensors:
                        self.store(name, value)
                    else:
                        self.scratch[name] = value

    def given(self, step: Step) -> dict[str, Any]:
        """Tensors by name; those whose values do not count as they are."""
        return {
            name: self.load(name)
            if name in step.reads and name in self.tensors
            else self.scratch.get(name, self.tensors.get(name))
            for name in step.names.tensors
        }

    def move(self, step: Step, known: dict[str, Any]) -> None:
        """The moments of rows and columns, and what the passes after them need of those."""
        for name, key, dim in (("row", "row_var", -1), ("column", "col_var", -2)):
            mean = self.scratch[f"{name}_total"] / self.tensors["p"].shape[dim]
            new = step.formula(self.b, old=self.load(key), mean=mean, **known)["new"]
            self.store(key, new)
            self.scratch[name] = new.rsqrt()
            if name == "row":
                self.scratch["mean"] = new.mean(-2, keepdim=True)


@lru_cache
def runner(kind: str) -> Runner:
    """Who runs steps on devices of this kind."""
    if kind == "cuda":
        if find_spec("triton") is None:
            raise EngineError(
                "Triton is not installed",
                asked="a step of an optimiser for tensors on a GPU",
                remedy="pip install triton, or use torch.optim",
            )
        from deuteron.optim.gpu import OnGpu

        return OnGpu()
    return Generated() if kind == "cpu" and openmp.available() else Plain()
