"""Batch norm in training with what follows it, forward and backward: eager, torch.compile, ours.

Each step is the forward of act(batch_norm(x) + residual) with new running statistics, and the
gradients for x, weight, bias and residual. Every contender is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import (
    Record,
    captured,
    copying,
    cpu_times,
    relative_error,
    replay_times,
    wall_times,
)

NOTE = (
    "One step is forward and backward of relu(batch_norm(x) + residual). GPU microseconds by CUDA "
    "Graph replay (`*_us`), medians of interleaved samples, inputs rotating through 256 MB where "
    "they fit; on the CPU wall microseconds. `wall` is Python and GPU together, for shapes that "
    "are launch-bound: eager through autograd, `plan` as plan.run. `plan` was made by estimate, "
    "`found` with find=True. `passes` is the number of tensors of the size of x that ours must "
    "move, `of_copy` what it moves per second relative to a copy in the same turns. Errors are "
    "relative (2-norm) to float64, the worst of all results."
)
ROTATE = 256 << 20
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    nhwc: bool = True
    residual: bool = False
    wall: bool = False

    def __str__(self) -> str:
        kind = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[self.dtype]
        order, more = ("nhwc" if self.nhwc else "nchw"), ("+residual" if self.residual else "")
        return f"BatchNorm{more}+ReLU {kind} {order} {'x'.join(map(str, self.shape))}"

    @property
    def passes(self) -> float:
        """Forward reads x, x (and the residual) and writes y; backward as in its kernels. With a
        residual the signs of y are written and read, a bit for an element."""
        bits = 8 * self.dtype.itemsize
        return 4 + 6 + 2 / bits if self.residual else 3 + 5

    def tensors(self, device: str) -> Tensors:
        def image() -> torch.Tensor:
            t = torch.randn(self.shape, device=device).to(self.dtype)
            return t.to(memory_format=torch.channels_last) if self.nhwc else t

        def each(low: float = -1.0) -> torch.Tensor:
            return torch.rand(self.shape[1], device=device) * 2.0 + low

        found = {"x": image(), "w": each(), "b": each(), "m": each(), "v": each(0.5)}
        if self.residual:
            found["r"] = image()
        return found | {"grad_y": image()}


def gpu_cases() -> Iterator[Case]:
    big, f32, bf16 = (64, 256, 56, 56), torch.float32, torch.bfloat16
    for residual in (False, True):
        yield Case(big, residual=residual)
    for residual in (False, True):
        yield Case(big, nhwc=False, residual=residual)
        yield Case(big, f32, residual=residual)
    yield Case(big, f32, nhwc=False, residual=True)
    yield Case(big, bf16, residual=True)
    for shape in (
        (64, 64, 56, 56),
        (64, 512, 28, 28),
        (64, 1024, 14, 14),
        (64, 2048, 7, 7),
        (256, 64, 112, 112),
        (8, 32, 512, 512),
    ):
        yield Case(shape, residual=shape[1] > 64)
    for shape in ((2, 16, 8, 8), (8, 64, 14, 14), (32, 256, 7, 7)):
        yield Case(shape, residual=True, wall=True)
        yield Case(shape, nhwc=False, wall=True)


def cpu_cases() -> Iterator[Case]:
    f32 = torch.float32
    for shape in ((8, 64, 56, 56), (8, 256, 28, 28)):
        for nhwc in (True, False):
            yield Case(shape, f32, nhwc, residual=True)
    yield Case((8, 64, 56, 56), f32, residual=False)


def asked(t: Tensors) -> list[str]:
    """What gradients are for: also of a kernel of a convolution ahead (``conv_batch_norm``)."""
    return [n for n in ("x", "k", "w", "b", "r") if n in t]


def _module(x: Any, w: Any, b: Any, m: Any, v: Any, r: Any = None) -> Any:
    y = F.batch_norm(x, m, v, w, b, True, 0.1, 1e-5)
    return torch.relu(y if r is None else y + r)


def step_of(fn: Callable[..., Any], t: Tensors) -> Callable[[], Tensors]:
    """Forward and backward by autograd. Running statistics change in place, as they do there."""
    leaves = asked(t)
    own = {n: v.detach().clone() for n, v in t.items() if n != "grad_y"}
    for n in leaves:
        own[n] = t[n].detach().requires_grad_()

    def step() -> Tensors:
        y = fn(**own)
        grads = torch.autograd.grad(y, [own[n] for n in leaves], t["grad_y"])
        return {"y": y.detach(), **{f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}}

    return step


def _plan(case: Case, t: Tensors, device: str, find: bool) -> Any:
    g = dt.Graph(str(case))
    h = {
        n: g.tensor(n, v.shape, v.dtype, strides=v.stride()) for n, v in t.items() if n != "grad_y"
    }
    y, mean, var, *_ = g.batch_norm_act(
        h["x"], h["w"], h["b"], h["m"], h["v"], h.get("r"), activation="relu"
    )
    y.output("y")
    mean.output("mean")
    var.output("var")
    return g.grad("y", wrt=asked(t)).compile(device=device, find=find, budget_s=12)


def _ordered(plan: Any, t: Tensors) -> list[torch.Tensor]:
    return [t[name] for name in plan.graph.inputs]


def worst(got: Tensors, exact: Tensors) -> float:
    return max(relative_error(got[n], want) for n, want in exact.items())


def run(device: str, compile_peer: bool = True) -> Record:
    """Every case on one device."""
    record = Record("batch_norm", device, NOTE)
    for case in gpu_cases() if device == "cuda" else cpu_cases():
        if record.wants(str(case)):
            (_measure_gpu if device == "cuda" else _measure_cpu)(record, case, compile_peer)
    return record


def _exact(t: Tensors) -> Tensors:
    return step_of(_module, {n: v.double() for n, v in t.items()})()


def _contenders(compile_peer: bool) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"eager": _module}
    if compile_peer:
        torch._dynamo.reset()
        found["compile"] = torch.compile(_module, dynamic=False)
    return found


def _measure_gpu(record: Record, case: Case, compile_peer: bool) -> None:
    first = case.tensors("cuda")
    image = first["x"].nbytes
    sets = [first, *(case.tensors("cuda") for _ in range(min(7, ROTATE // (4 * image))))]
    exact = _exact(first)
    row: dict[str, Any] = {"case": str(case), "passes": case.passes}
    timed: dict[str, Callable[[], Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, fn in _contenders(compile_peer).items():
        steps = [step_of(fn, t) for t in sets]
        row[f"{name}_error"] = worst(steps[0](), exact)
        timed[name] = captured(lambda steps=steps: [step() for step in steps])
        calls[name] = steps[0]
    plans = {"plan": _plan(case, first, "cuda", False), "found": _plan(case, first, "cuda", True)}
    for name, plan in plans.items():
        row[f"{name}_error"] = worst(plan.run(**first), exact)
        feeds = [_ordered(plan, t) for t in sets]
        timed[name] = captured(lambda p=plan, feeds=feeds: [p.program.run(f) for f in feeds])
        calls[name] = lambda p=plan: p.run(**first)
    del exact
    timed["copy"] = copying(int(case.passes * image))
    times = {k: v * 1e3 for k, v in replay_times(timed, rounds=9).items()}
    for name in timed:
        row[f"{name}_us"] = times[name] / (1 if name == "copy" else len(sets))
    row["of_copy"] = row["copy_us"] / row["plan_us"]
    if compile_peer:
        row["vs_compile"] = row["compile_us"] / min(row["plan_us"], row["found_us"])
    row["vs_eager"] = row["eager_us"] / min(row["plan_us"], row["found_us"])
    if case.wall:
        wall = wall_times(calls, calls=50)
        row |= {f"{k}_wall_us": v * 1e3 for k, v in wall.items()}
    for name, plan in plans.items():
        row[f"{name}_by"] = " + ".join(str(c.candidate) for c in plan.decision.choices)
    record.add(**row)


def _measure_cpu(record: Record, case: Case, compile_peer: bool) -> None:
    first = case.tensors("cpu")
    exact = _exact(first)
    row: dict[str, Any] = {"case": str(case)}
    calls: dict[str, Callable[[], Any]] = {}
    for name, fn in _contenders(compile_peer).items():
        calls[name] = step_of(fn, first)
        row[f"{name}_error"] = worst(calls[name](), exact)
    plan = _plan(case, first, "cpu", find=True)
    row["plan_error"] = worst(plan.run(**first), exact)
    calls["plan"] = lambda: plan.run(**first)
    times = cpu_times(calls)
    row |= {f"{name}_us": ms * 1e3 for name, ms in times.items()}
    row["vs_eager"] = times["eager"] / times["plan"]
    row["plan_by"] = " + ".join(str(c.candidate) for c in plan.decision.choices)
    record.add(**row)
