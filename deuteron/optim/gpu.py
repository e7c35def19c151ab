"""Steps on a GPU: Triton kernels, one launch for every formula of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from deuteron.errors import EngineError
from deuteron.kernels.optim import MATRICES, SQUARES, Step
from deuteron.kernels.triton import adafactor
from deuteron.kernels.triton import optim as kernels
from deuteron.optim.batch import Batch, capturing
from deuteron.optim.runners import Control, Limits, Rate, Runner


class OnGpu(Runner):
    """Whatever depends on a skip or a count there stays there."""

    name, block = "Triton", kernels.BLOCK

    def squares(self, batches: Sequence[Batch]) -> torch.Tensor:
        programs = [-(-b.chunks // kernels.SPAN) for b in batches]
        starts = [sum(n + n % 2 for n in programs[:i]) for i in range(len(programs) + 1)]
        out = torch.zeros(starts[-1], dtype=torch.float64, device=batches[0].device)
        for batch, count, start in zip(batches, programs, starts[:-1], strict=True):
            constants = {"SPAN": kernels.SPAN, "BLOCK": kernels.BLOCK}
            kinds = {"TYPE": batch.grad_dtype, "WIDE": batch.wide}
            kinds = {name: getattr(tl, str(d).removeprefix("torch.")) for name, d in kinds.items()}
            given = (batch.table, batch.grads, batch.where, batch.chunks, out[start:])
            kernels.squares((count,), *given, **kinds, **constants)
            batch.ran.append(SQUARES.steps[0])
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
        constants = {"SKIP": limits.skip_nonfinite, "BLOCK": 1024}
        kernels.control((1,), squares, count, scale, found_inf, top, norm, pair, **constants)
        may_skip = found_inf is not None or limits.skip_nonfinite
        return Control(pair, norm if squares is not None else None, may_skip)

    def step(
        self,
        batch: Batch,
        constants: list[float],
        lr: Rate,
        control: Control | None,
        capturable: bool,
    ) -> None:
        rule = batch.rule
        remote = isinstance(lr, torch.Tensor) and not lr.is_cpu
        stays = rule.counts and not batch.steps.is_cpu
        exact = batch.wide == torch.float64
        skips = control is not None and control.may_skip
        rows, values = None, [None] * len(rule.names.numbers)
        if rule.on_device or capturable or remote or stays or exact or skips:
            rows = self._numbers(batch, constants, lr, control)
        elif rule.counts and capturing(batch.device):
            raise EngineError(
                "the step count is on the host, so a CUDA Graph would repeat one step for ever",
                asked="step() while a CUDA Graph is captured",
                remedy="pass capturable=True",
            )
        else:
            values = rule.numbers(constants, float(lr), batch.advance())
        at = batch
        if rule.walk == MATRICES:
            at = batch.prepared.get(rule)
            if at is None:
                shapes = [tuple(p.shape) for p in batch.params]
                at = batch.prepared[rule] = adafactor.Layout(shapes, batch.table, batch.wide)
        size = len(rule.names.sums) * at.chunks
        sums = torch.empty(size, dtype=torch.float64, device=batch.device) if size else None
        pair = control.pair if control is not None else None
        for step in rule.steps:
            if step.kind == "finish":
                given = (sums, at.firsts, at.chunks, at.table, rows)
                kernels.finish(step)((batch.count,), *given)
            elif step.kind == "moments":
                adafactor.move(at, step, rows, pair, batch.dtypes[1])
            else:
                kernels.update(step, batch.kinds, getattr(at, "tile", None))(
                    (at.chunks,),
                    at.table,
                    batch.grads,
                    at.where,
                    batch.count,
                    at.chunks,
                    rows,
                    pair,
                    sums,
                    *values,
                    warps=kernels.WARPS[rule.walk],
                )
        batch.ran += rule.steps

    def _numbers(
        self, batch: Batch, constants: list[float], lr: Rate, control: Control | None
    ) -> torch.Tensor:
        """The numbers of every tensor, made on the device."""
        rule = batch.rule
        batch.count_on_device()
        there = isinstance(lr, torch.Tensor) and lr.device == batch.device
        values = batch.constants_on_device([*constants, 0.0 if there else float(lr)])
        if batch.rows is None:
            shape = (batch.count, len(rule.names.numbers))
            batch.rows = torch.empty(shape, dtype=batch.wide, device=batch.device)
        steps = batch.steps if rule.counts else None
        pair = control.pair if control is not None else None
        given = (values, lr if there else values[-1:], steps, pair, batch.rows, batch.count)
        kernels.numbers(rule)((-(-batch.count // 128),), *given)
        return batch.rows

    def tile(self, p: torch.Tensor) -> Any:
        return adafactor.tile_for(p.shape) if p.dim() > 1 else None
