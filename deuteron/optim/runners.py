"""Runners, which compute a step: generated code on the CPU, Triton on a GPU (gpu.py), torch's
operators elsewhere; and a description of what they ran.

All of them run the formulas of :mod:`deuteron.kernels.optim_rules`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from math import inf
from typing import Any, NamedTuple

import torch

from deuteron.codegen import openmp
from deuteron.engines.roofline import bound
from deuteron.errors import EngineError
from deuteron.explain import units as u
from deuteron.kernels.optim import GROUP, GROUPS, LEVELS, ON_NUMBERS, OnTensors, Rule, Step
from deuteron.kernels.optim_rules import SQUARES, limited
from deuteron.ops.opdef import Cost
from deuteron.optim.batch import TensorBatch, moved
from deuteron.target import target


class Limits(NamedTuple):
    """What decides, over all gradients together, how they are scaled and whether a step is skipped:
    sums of their squares, a loss scale, an inf flag, a largest norm, and ``skip_nonfinite``."""

    squares: torch.Tensor | None
    scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    max_norm: float | None
    skip_nonfinite: bool


class Control(NamedTuple):
    """What was decided: ``pair`` is (factor of the gradients, whether to skip the step) on a
    device, ``norm`` the norm of all gradients."""

    pair: torch.Tensor
    norm: torch.Tensor | None
    may_skip: bool

    def on(self, device: torch.device) -> Control:
        return self._replace(pair=moved(self.pair, device))


class Given(NamedTuple):
    """What a runner gets for a step besides the batch: constants of the group, its learning rate,
    and what was decided over all gradients."""

    constants: list[float]
    lr: float | torch.Tensor
    capturable: bool
    control: Control | None


class Runner(ABC):
    """What computes steps on one kind of device. ``block`` is the length of a chunk."""

    name: str
    block: int

    @abstractmethod
    def squares(self, batches: Sequence[TensorBatch]) -> torch.Tensor:
        """Partial sums of the squares of all gradients, in float64."""

    @abstractmethod
    def control(self, limits: Limits) -> Control:
        """Reduce unscaling, clipping and skipping to two numbers: a factor and a flag."""

    @abstractmethod
    def step(self, batch: TensorBatch, given: Given) -> None:
        """Run the batch's rule over its tensors."""

    def tile(self, p: torch.Tensor) -> Any:
        """A key of a matrix: matrices with equal keys can be in one batch."""
        return None


class Host(Runner):
    """A runner that computes a step's numbers in Python; a subclass runs the rule over tensors."""

    @abstractmethod
    def run(self, rule: Rule, batch: TensorBatch, numbers: list[float]) -> torch.Tensor:
        """Run all steps of a rule, and return its sums over chunks."""

    def squares(self, batches: Sequence[TensorBatch]) -> torch.Tensor:
        return torch.cat([self.run(SQUARES, batch, [1.0]).flatten() for batch in batches])

    def control(self, limits: Limits) -> Control:
        squares, scale, found, top, skips = limits
        total = 0.0 if squares is None else float(squares.sum())
        given = {"squares": total, "scale": 1.0 if scale is None else float(scale)}
        given |= {"found": 0.0 if found is None else float(found), "skips": float(skips)}
        made = limited(ON_NUMBERS, **given, most=inf if top is None else top)
        pair = torch.tensor([made["factor"], made["skip"]], dtype=torch.float64)
        norm = None if squares is None else torch.tensor(made["norm"], dtype=torch.float32)
        return Control(pair, norm, True)

    def step(self, batch: TensorBatch, given: Given) -> None:
        factor = 1.0
        if given.control is not None:
            factor, skip = given.control.pair.tolist()
            if skip:
                return
        sign, *constants = given.constants
        rule = batch.rule
        numbers = rule.numbers_of([sign * factor, *constants], float(given.lr), batch.advance())
        self.run(rule, batch, numbers)


class Generated(Host):
    """Vector code generated through LLVM: one call runs all steps of a rule over all tensors."""

    name = "LLVM"

    def __init__(self) -> None:
        from deuteron.kernels.cpu import optim

        self.kernels, self.block = optim, optim.BLOCK

    def run(self, rule: Rule, batch: TensorBatch, numbers: list[float]) -> torch.Tensor:
        call = batch.prepared.get(rule)
        if call is None:
            chunks = self.kernels.Chunks(batch.table, batch.where, batch.firsts)
            shapes = [tuple(p.shape) for p in batch.params]
            kinds = batch.kinds[: len(rule.tensors)]
            call = self.kernels.Steps(rule, kinds, chunks, shapes, batch.sizes)
            batch.prepared[rule] = call
        call.run(batch.grads, numbers)
        batch.ran += [(step.name, step, int(not k)) for k, step in enumerate(rule.steps)]
        sums: torch.Tensor = call.sums
        return sums


class Plain(Host):
    """torch's operators, tensor by tensor, for devices and machines that have no other runner."""

    name = "torch"
    block = 2**62

    def run(self, rule: Rule, batch: TensorBatch, numbers: list[float]) -> torch.Tensor:
        sums = torch.zeros(len(rule.sums), batch.count, dtype=torch.float64)
        for i, home in enumerate(batch.homes):
            if home.numel():
                kept = [home, batch.held[i], *(row[i] for row in batch.tensors)]
                tensors = dict(zip(rule.tensors, kept, strict=False))
                _Tensor(rule, i, tensors, batch.wide).run(numbers, sums[:, i])
        batch.ran += [(step.name, step, batch.count) for step in rule.steps]
        return sums


class _Tensor:
    """Runs a rule on one tensor with torch's operators."""

    def __init__(self, rule: Rule, index: int, tensors: dict[str, torch.Tensor], wide: torch.dtype):
        self.rule, self.wide = rule, wide
        real = {k: torch.view_as_real(x) if x.is_complex() else x for k, x in tensors.items()}
        self.tensors, self.scratch = real, dict[str, Any]()
        self.b = OnTensors(index, self.load("p"))

    def load(self, name: str) -> torch.Tensor:
        x = self.tensors[name].to(self.wide)
        if self.rule.walk != GROUPS:
            return x
        if name in LEVELS:
            return x[:, None]
        flat = x.as_strided((x.numel(),), (1,))
        return torch.nn.functional.pad(flat, (0, -x.numel() % GROUP)).view(-1, GROUP)

    def store(self, name: str, value: torch.Tensor) -> None:
        x = self.tensors[name]
        if self.rule.walk == GROUPS:
            x, value = x.as_strided((x.numel(),), (1,)), value.flatten()[: x.numel()]
        x.copy_(value)

    def run(self, numbers: list[float], sums: torch.Tensor) -> None:
        """Run all steps of the rule; write what they add up over the tensor to ``sums``."""
        rule, size = self.rule, float(self.tensors["p"].numel())
        known: dict[str, Any] = dict(zip(rule.numbers, numbers, strict=True))
        totals = dict(zip(rule.sums, sums, strict=True))
        for step in rule.steps:
            if step.kind == "finish":
                known |= step.formula(self.b, size=size, **totals, **known)
            elif step.kind == "moments":
                self.move(step, known)
            else:
                for name, value in step.formula(self.b, **self.given(step), **known).items():
                    if name in totals:
                        totals[name].copy_(value.double().sum())
                    elif name in self.tensors:
                        self.store(name, value)
                    else:
                        self.scratch[name] = value

    def given(self, step: Step) -> dict[str, Any]:
        """All tensors by name: those that the step reads in the type of the arithmetic, the others
        as they are, because their values are not used."""
        read = {name: self.load(name) for name in step.reads if name in self.tensors}
        return dict.fromkeys(self.rule.tensors) | self.tensors | self.scratch | read

    def move(self, step: Step, known: dict[str, Any]) -> None:
        """Update the moments of rows and columns, and make from them what later passes need."""
        for name, key, dim in (("row", "row_var", -1), ("column", "col_var", -2)):
            mean = self.scratch[f"{name}_total"] / self.tensors["p"].shape[dim]
            new = step.formula(self.b, old=self.load(key), mean=mean, **known)["new"]
            self.store(key, new)
            self.scratch[name] = new.rsqrt()
            if name == "row":
                self.scratch["mean"] = new.mean(-2, keepdim=True)


@lru_cache
def runner(kind: str) -> Runner:
    """The runner for devices of this kind."""
    if kind == "cuda":
        if find_spec("triton") is None:
            wrong = "Triton is not installed"
            asked = "a step of an optimiser for tensors on a GPU"
            raise EngineError(wrong, asked=asked, remedy="pip install triton, or use torch.optim")
        from deuteron.optim.gpu import OnGpu

        return OnGpu()
    return Generated() if kind == "cpu" and openmp.available() else Plain()


# ---- what was run


def _cost(step: Step | None, batch: TensorBatch) -> Cost:
    """The bytes that a kernel moves, without those of sums and numbers."""
    kept = [sum(t.nbytes for t in row) for row in (batch.homes, *batch.tensors)]
    grads = sum(batch.sizes) * batch.grad_dtype.itemsize
    sizes = dict(zip(batch.rule.tensors, (kept[0], grads, *kept[1:]), strict=False))
    moved = [] if step is None else [step.reads, tuple(step.writes)]
    if step is not None and step.kind == "moments":
        moved = [("row_var", "col_var")] * 2
    return Cost(0.0, sum(sizes.get(name, 0) for some in moved for name in some), 0)


def explained(name: str, batches: Sequence[TensorBatch]) -> str:
    """Describe the last step: its totals, and below them its kernels as a table."""
    rows = [("kernel", "by", "device", "tensors", "launches", "MB", "least µs")]
    total = [0.0, 0.0, 0.0]
    for batch in batches:
        machine, by = target(batch.device), runner(batch.device.type).name
        for kernel, step, launches in batch.ran:
            cost = _cost(step, batch)
            moving = bound(cost, "f32", False, machine, launches).seconds
            least = moving or launches * machine.launch
            total = [x + y for x, y in zip(total, (launches, cost.bytes, least), strict=True)]
            figures = (str(batch.count), str(launches), u.per(cost.bytes, 1e6), u.per(least, 1e-6))
            rows.append((kernel, by, str(batch.device), *figures))
    if len(rows) == 1:
        return f"{name}: no step has been made yet, or no parameter had a gradient"
    launched, moved = u.count(int(total[0]), "launch", "launches"), u.size(total[1])
    head = f"{name}: {launched}, {moved}, at least {u.seconds(total[2])} at full bandwidth"
    return "\n".join((head, *(f"  {line}" for line in u.align(rows, "<<<>>>>", 100))))
