"""Steps on a GPU: Triton kernels, one launch for every formula of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from deuteron.errors import EngineError
from deuteron.kernels.optim import MATRICES
from deuteron.kernels.optim_rules import SQUARES
from deuteron.kernels.triton import adafactor
from deuteron.kernels.triton import optim as kernels
from deuteron.optim.batch import TensorBatch, capturing
from deuteron.optim.runners import Control, Given, Limits, Runner


class OnGpu(Runner):
    """Runs steps with Triton. Numbers that depend on a skip or a step count on the GPU are computed
    there, so the host does not wait for them."""

    name, block = "Triton", kernels.BLOCK

    def squares(self, batches: Sequence[TensorBatch]) -> torch.Tensor:
        programs = [-(-b.chunks // kernels.SPAN) for b in batches]
        starts = [sum(n + n % 2 for n in programs[:i]) for i in range(len(programs) + 1)]
        out = torch.zeros(starts[-1], dtype=torch.float64, device=batches[0].device)
        for batch, count, start in zip(batches, programs, starts[:-1], strict=True):
            given = (batch.table, batch.grads, batch.where, batch.chunks, out[start:])
            kernels.squares(batch.grad_dtype)((count,), *given)
            batch.ran.append(("norm", SQUARES.steps[0], 1))
        return out

    def control(self, limits: Limits) -> Control:
        squares, scale, found, top, skips = limits
        there = next(x for x in (squares, scale, found) if x is not None).device
        pair = torch.empty(2, dtype=torch.float64, device=there)
        norm = torch.empty((), dtype=torch.float32, device=there)
        count, most = 0 if squares is None else len(squares), inf if top is None else float(top)
        kernels.control()((1,), squares, count, scale, found, most, float(skips), norm, pair)
        return Control(pair, None if squares is None else norm, found is not None or skips)

    def step(self, batch: TensorBatch, given: Given) -> None:
        rule, control = batch.rule, given.control
        remote = isinstance(given.lr, torch.Tensor) and not given.lr.is_cpu
        stays = rule.counts and not batch.steps.is_cpu
        skips = control is not None and control.may_skip
        exact = batch.wide == torch.float64
        rows, numbers = None, list[Any]()
        if rule.on_device or given.capturable or remote or stays or skips or exact:
            rows, numbers = self._numbers(batch, given), [None] * len(rule.numbers)
        elif rule.counts and capturing(batch.device):
            wrong = "the step count is on the host, so a CUDA Graph would repeat one step for ever"
            asked = "step() while a CUDA Graph is captured"
            raise EngineError(wrong, asked=asked, remedy="pass capturable=True")
        else:
            numbers += rule.numbers_of(given.constants, float(given.lr), batch.advance())
        at: Any = batch
        if rule.walk == MATRICES:
            if rule not in batch.prepared:
                shapes = [tuple(p.shape) for p in batch.params]
                batch.prepared[rule] = adafactor.Tiles(shapes, batch.table, batch.wide)
            at = batch.prepared[rule]
        size, pair = len(rule.sums) * at.chunks, None if control is None else control.pair
        sums = torch.empty(size, dtype=torch.float64, device=batch.device) if rule.sums else None
        table = (at.table, batch.grads, at.where, batch.count, at.chunks)
        warps = kernels.WARPS[rule.walk]
        for step in rule.steps:
            if step.kind == "finish":
                run = kernels.finish(step)
                run((batch.count,), sums, at.firsts, at.chunks, at.table, rows)
            elif step.kind == "moments":
                at.move(step, rows, pair, batch.kinds)
            else:
                run = kernels.update(step, batch.kinds, getattr(at, "tile", None))
                run((at.chunks,), *table, rows, pair, sums, *numbers, warps=warps)
            batch.ran.append((step.name, step, 2 if step.kind == "moments" else 1))

    def _numbers(self, batch: TensorBatch, given: Given) -> torch.Tensor:
        """Compute on the device the numbers that the rule uses for every tensor."""
        rule, lr = batch.rule, given.lr
        batch.count_on_device()
        there = isinstance(lr, torch.Tensor) and lr.device == batch.device
        values = batch.constants_on_device([*given.constants, 0.0 if there else float(lr)])
        if batch.rows is None:
            shape = (batch.count, len(rule.numbers))
            batch.rows = torch.empty(shape, dtype=batch.wide, device=batch.device)
        pair = None if given.control is None else given.control.pair
        steps, rate = batch.steps if rule.counts else None, lr if there else values[-1:]
        run = kernels.numbers(rule)
        run((-(-batch.count // 128),), values, rate, steps, pair, batch.rows, batch.count)
        batch.ran.append(("numbers", None, 1))
        return batch.rows

    def tile(self, p: torch.Tensor) -> Any:
        return adafactor.tile_for(p.shape) if p.dim() > 1 else None
