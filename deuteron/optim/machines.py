"""Who runs an update: Triton on a GPU, generated code on the CPU, torch's operators elsewhere."""

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
from deuteron.kernels.optim import ON_TENSORS, SQUARES, Numbers, Program, Rule, evaluate
from deuteron.optim import eight_bits, factored
from deuteron.optim.batch import Batch, capturing, moved

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


class Machine(ABC):
    """What the optimisers ask of a device. ``block`` is the length of a chunk."""

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

    @abstractmethod
    def step_by_ratio(
        self,
        batch: Batch,
        apply: Rule,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        adapt: bool,
    ) -> None:
        """The batch's rule for its sums, then ``apply`` with the ratio of their roots."""

    @abstractmethod
    def step_8bit(
        self, batch: Batch, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        """AdamW over tensors whose state has 8 bits."""

    @abstractmethod
    def step_factored(
        self, batch: Batch, apply: Rule, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        """Adafactor; ``apply`` is the second pass over vectors."""

    def form(self, p: torch.Tensor) -> Any:
        """Parameters whose second moment is factored step together if this is equal."""
        return None


# ---- on the host


class Host(Machine):
    """Numbers are Python's; a subclass runs a program over tensors."""

    @abstractmethod
    def run(
        self, program: Program, batch: Batch, rows: list[list[float]], sums: torch.Tensor | None
    ) -> None:
        """One row of numbers for all tensors, or one each. Sums are (sum, chunk)."""

    def squares(self, batches: Sequence[Batch]) -> torch.Tensor:
        made = []
        for batch in batches:
            sums = torch.zeros(1, batch.chunks, dtype=torch.float64)
            self.run(SQUARES, batch, [[]], sums)
            made.append(sums.flatten())
        return torch.cat(made)

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

    def _numbers(
        self, batch: Batch, of: Numbers, constants: list[float], lr: Rate, control: Control | None
    ) -> list[float] | None:
        """The numbers of this step, or None where it is to be skipped."""
        if control is not None:
            factor, skip = control.pair.tolist()
            if skip:
                return None
            constants = [constants[0] * factor, *constants[1:]]
        return of.on_host(constants, float(lr), batch.advance())

    def step(
        self,
        batch: Batch,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        capturable: bool,
    ) -> None:
        found = self._numbers(batch, batch.rule.numbers, constants, lr, control)
        if found is not None:
            self.run(batch.rule.program, batch, [found], None)

    def step_by_ratio(
        self,
        batch: Batch,
        apply: Rule,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        adapt: bool,
    ) -> None:
        found = self._numbers(batch, batch.rule.numbers, constants, lr, control)
        if found is None:
            return
        sums = torch.zeros(2, batch.chunks, dtype=torch.float64)
        self.run(batch.rule.program, batch, [found], sums)
        rows = [found]
        if adapt:
            ratios = [math.sqrt(p / u) if p > 0 and u > 0 else 1.0 for p, u in _totals(batch, sums)]
            rows = _with_number(apply, found, "ratio", ratios)
        self.run(apply.program, batch, rows, None)

    def step_8bit(
        self, batch: Batch, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        found = self._numbers(batch, batch.rule.numbers, constants, lr, control)
        if found is not None:
            eight_bits.step(batch, found, int(batch.step))

    def step_factored(
        self, batch: Batch, apply: Rule, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        found = self._numbers(batch, batch.rule.numbers, constants, lr, control)
        if found is not None:
            factored.step(batch, found)


def _totals(batch: Batch, sums: torch.Tensor) -> list[list[float]]:
    """The sums of each tensor, from those of its chunks."""
    owner = batch.where[: batch.chunks]
    totals = torch.zeros(len(sums), batch.count, dtype=torch.float64).index_add_(1, owner, sums)
    found: list[list[float]] = totals.t().tolist()
    return found


def _with_number(
    rule: Rule, numbers: list[float], name: str, values: Sequence[float]
) -> list[list[float]]:
    """Numbers for each tensor, which has a value of its own for one of them."""
    at = rule.program.numbers.index(name)
    return [[*numbers[:at], value, *numbers[at + 1 :]] for value in values]


class Generated(Host):
    """Vector code through LLVM, all tensors in one call."""

    def __init__(self) -> None:
        from deuteron.kernels.cpu import optim

        self.kernels, self.block = optim, optim.BLOCK

    def run(
        self, program: Program, batch: Batch, rows: list[list[float]], sums: torch.Tensor | None
    ) -> None:
        threaded = sum(batch.sizes) > self.kernels.SERIAL
        types = batch.role_dtypes(program.roles, batch.grad_dtype)
        numbers = torch.tensor(rows, dtype=torch.float64)
        self.kernels.update(program, types, threaded)(
            batch.table.data_ptr(),
            batch.grads.data_ptr(),
            batch.where.data_ptr(),
            numbers.data_ptr(),
            sums.data_ptr() if sums is not None else 0,
            batch.count,
            batch.chunks,
            len(rows[0]) if len(rows) > 1 else 0,
        )

    def step_8bit(
        self, batch: Batch, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        from deuteron.kernels.cpu import optim8

        found = self._numbers(batch, batch.rule.numbers, constants, lr, control)
        if found is None:
            return
        p, m, v, _, _, *extras = batch.dtypes
        types = (p, batch.grad_dtype, m, v, *extras)
        numbers = torch.tensor(found, dtype=torch.float64)
        optim8.update(batch.rule.program, types, sum(batch.sizes) > self.kernels.SERIAL)(
            batch.table.data_ptr(),
            batch.grads.data_ptr(),
            batch.where.data_ptr(),
            numbers.data_ptr(),
            batch.count,
            batch.chunks,
            eight_bits.seed(int(batch.step)),
        )

    def step_factored(
        self, batch: Batch, apply: Rule, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        from deuteron.kernels.cpu import adafactor

        found = self._numbers(batch, batch.rule.numbers, constants, lr, control)
        if found is None:
            return
        if batch.keys[0] == "variance":
            sums = torch.zeros(2, batch.chunks, dtype=torch.float64)
            self.run(batch.rule.program, batch, [found], sums)
            paces = factored.paces(_totals(batch, sums), batch.sizes, found)
            self.run(apply.program, batch, _with_number(apply, found, "pace", paces), None)
            return
        if batch.layout is None:
            p, row, _, *ema = batch.dtypes
            shapes = [tuple(x.shape) for x in batch.params]
            types = (p, batch.grad_dtype, row, *ema)
            batch.layout = adafactor.Layout(batch.rule.program, types, shapes, batch.table)
        batch.layout.step(batch.grads, found)


class Plain(Host):
    """torch's operators, tensor by tensor: for devices and machines without the others."""

    block = 2**62

    def run(
        self, program: Program, batch: Batch, rows: list[list[float]], sums: torch.Tensor | None
    ) -> None:
        wide = torch.float64 if torch.float64 in batch.dtypes else torch.float32
        chunk = 0
        for i, home in enumerate(batch.homes):
            if not home.numel():
                continue
            own = iter([home, *(row[i] for row in batch.tensors)])
            tensors = {
                role: _real(batch.held[i] if role == "g" else next(own)) for role in program.roles
            }
            values: dict[str, Any] = dict(zip(program.numbers, rows[i % len(rows)], strict=True))
            values |= {role: tensors[role].to(wide) for role in program.reads}
            made = evaluate(program.body, values, ON_TENSORS)
            for role, name in program.writes:
                tensors[role].copy_(made[name])
            for k, name in enumerate(program.sums):
                assert sums is not None
                sums[k, chunk] = made[name].double().sum()
            chunk += 1


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


# ---- on a GPU


class OnGpu(Machine):
    """Triton: one launch per batch. Whatever depends on a skip or a count there stays there."""

    def __init__(self) -> None:
        from deuteron.kernels.triton import optim

        self.kernels, self.block = optim, optim.BLOCK

    def squares(self, batches: Sequence[Batch]) -> torch.Tensor:
        k = self.kernels
        programs = [-(-b.chunks // k.SPAN) for b in batches]
        starts = [sum(n + n % 2 for n in programs[:i]) for i in range(len(programs) + 1)]
        out = torch.zeros(starts[-1], dtype=torch.float64, device=batches[0].device)
        for batch, count, start in zip(batches, programs, starts[:-1], strict=True):
            wide = torch.float64 if batch.grad_dtype == torch.float64 else torch.float32
            k.squares(
                (count,),
                batch.table,
                batch.grads,
                batch.where,
                batch.chunks,
                out[start:],
                TYPE=k.FLOATS[batch.grad_dtype],
                WIDE=k.FLOATS[wide],
                SPAN=k.SPAN,
                BLOCK=k.BLOCK,
            )
        return out

    def control(
        self,
        squares: torch.Tensor | None,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        limits: Limits,
    ) -> Control:
        given = next(x for x in (squares, scale, found_inf) if x is not None)
        pair = torch.empty(2, dtype=torch.float64, device=given.device)
        norm = torch.empty((), dtype=torch.float32, device=given.device)
        count = len(squares) if squares is not None else 0
        top = None if limits.max_norm is None else float(limits.max_norm)
        self.kernels.control(
            (1,),
            squares,
            count,
            scale,
            found_inf,
            top,
            norm,
            pair,
            SKIP=limits.skip_nonfinite,
            BLOCK=1024,
        )
        may_skip = found_inf is not None or limits.skip_nonfinite
        return Control(pair, norm if squares is not None else None, may_skip)

    def _rows(
        self, batch: Batch, constants: list[float], lr: Rate, control: Control | None
    ) -> torch.Tensor:
        """The numbers of every tensor, made on the device."""
        k, rule = self.kernels, batch.rule
        batch.count_on_device()
        there = isinstance(lr, torch.Tensor) and lr.device == batch.device
        values = batch.constants_on_device([*constants, 0.0 if there else float(lr)])
        rate = lr if there else values[-1:]
        if batch.rows is None:
            shape = (batch.count, len(rule.numbers.results))
            kind = torch.float64 if torch.float64 in batch.dtypes else torch.float32
            batch.rows = torch.empty(shape, dtype=kind, device=batch.device)
        k.numbers(rule.numbers, rule.counts)(
            (-(-batch.count // 128),),
            values,
            rate,
            batch.steps if rule.counts else None,
            control.pair if control is not None else None,
            batch.rows,
            batch.count,
            BLOCK=128,
        )
        return batch.rows

    def _launch(
        self,
        program: Program,
        batch: Batch,
        rows: torch.Tensor | None,
        values: list[float],
        control: Control | None,
        sums: torch.Tensor | None,
    ) -> None:
        k = self.kernels
        numbers = [None] * len(program.numbers) if rows is not None else values
        k.update(program, batch.role_dtypes(program.roles, batch.grad_dtype))(
            (batch.chunks,),
            batch.table,
            batch.grads,
            batch.where,
            batch.count,
            batch.chunks,
            rows,
            control.pair if control is not None else None,
            sums,
            *numbers,
            BLOCK=k.BLOCK,
            warps=k.WARPS,
        )

    def step(
        self,
        batch: Batch,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        capturable: bool,
    ) -> None:
        remote = isinstance(lr, torch.Tensor) and not lr.is_cpu
        stays = batch.rule.counts and not batch.steps.is_cpu
        exact = torch.float64 in batch.dtypes
        if capturable or remote or stays or exact or (control is not None and control.may_skip):
            rows = self._rows(batch, constants, lr, control)
            self._launch(batch.rule.program, batch, rows, [], control, None)
            return
        if batch.rule.counts and capturing(batch.device):
            raise EngineError(
                "the step count is on the host, so a CUDA Graph would repeat one step for ever",
                asked="step() while a CUDA Graph is captured",
                remedy="pass capturable=True",
            )
        values = batch.rule.numbers.on_host(constants, float(lr), batch.advance())
        self._launch(batch.rule.program, batch, None, values, control, None)

    def step_by_ratio(
        self,
        batch: Batch,
        apply: Rule,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        adapt: bool,
    ) -> None:
        rows = self._rows(batch, constants, lr, control)
        sums = torch.empty(2 * batch.chunks, dtype=torch.float64, device=batch.device)
        self._launch(batch.rule.program, batch, rows, [], control, sums)
        if adapt:
            column = apply.program.numbers.index("ratio")
            self.kernels.ratios(
                (batch.count,),
                sums,
                batch.firsts,
                batch.chunks,
                rows,
                rows.shape[1],
                column,
                BLOCK=1024,
            )
        self._launch(apply.program, batch, rows, [], control, None)

    def step_8bit(
        self, batch: Batch, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        from deuteron.kernels.triton import optim8

        rows = self._rows(batch, constants, lr, control)
        floats = self.kernels.FLOATS
        optim8.adamw8(
            (batch.chunks,),
            batch.table,
            batch.grads,
            batch.where,
            batch.count,
            batch.chunks,
            rows,
            batch.steps,
            control.pair if control is not None else None,
            P=floats[batch.dtypes[0]],
            G=floats[batch.grad_dtype],
            MASTER="master" in batch.keys,
            EMA="ema" in batch.keys,
            ROWS=optim8.ROWS,
            GROUP=optim8.GROUP,
        )

    def form(self, p: torch.Tensor) -> Any:
        from deuteron.kernels.triton import adafactor

        return adafactor.tile_for(p.shape) if p.dim() > 1 else None

    def step_factored(
        self, batch: Batch, apply: Rule, constants: list[float], lr: Rate, control: Control | None
    ) -> None:
        from deuteron.kernels.triton import adafactor

        rows = self._rows(batch, constants, lr, control)
        if batch.keys[0] == "variance":
            squares = torch.empty(2 * batch.chunks, dtype=torch.float64, device=batch.device)
            self._launch(batch.rule.program, batch, rows, [], control, squares)
            adafactor.make_rates(squares, batch.firsts, batch.table, rows)
            self._launch(apply.program, batch, rows, [], control, None)
            return
        if batch.layout is None:
            shapes = [tuple(p.shape) for p in batch.params]
            batch.layout = adafactor.Layout(shapes, rows.dtype, batch.device)
        types = [self.kernels.FLOATS[d] for d in (batch.grad_dtype, *batch.dtypes)]
        pair = control.pair if control is not None else None
        adafactor.step(batch.layout, batch.table, batch.grads, rows, pair, types)


@lru_cache
def machine(kind: str) -> Machine:
    """The machine for devices of this kind."""
    if kind == "cuda":
        if find_spec("triton") is None:
            raise EngineError(
                "Triton is not installed",
                asked="a step of an optimiser for tensors on a GPU",
                remedy="pip install triton, or use torch.optim",
            )
        return OnGpu()
    if kind == "cpu" and openmp.available():
        return Generated()
    return Plain()
