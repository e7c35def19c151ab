"""A convolution, batch norm in training and an activation, forward and backward: eager,
torch.compile, and a plan without and with the kernels that take statistics while they convolve, and
those that multiply a norm's gradient where it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.batch_norm import Tensors, asked, step_of, worst
from bench.harness import Record, captured, cpu_times, replay_times
from deuteron.policy import Policy

NOTE = (
    "One step is forward and backward of relu(batch_norm(conv(x)) + residual) with new running "
    "statistics and gradients for x, both weights, the bias and the residual. GPU microseconds by "
    "CUDA Graph replay, float16, channels last, medians of interleaved samples, inputs rotating "
    "through 256 MB where they fit; on the CPU wall microseconds, float32. `plan` was made by "
    "estimate, `found` with find=True, `apart` likewise, but without our kernels that convolve and "
    "leave statistics, or that multiply a norm's gradient where it is made. `forward_by` is who "
    "runs the convolution and the norm in `found`. Errors "
    "are relative (2-norm) to float64, the worst of all results."
)
ROTATE = 256 << 20
APART = ("-triton_kernels/conv_batch_norm", "-triton_kernels/conv_batch_norm_grad")


class Case(NamedTuple):
    """One row of the table."""

    images: int
    channels: int
    outs: int
    size: int
    window: int
    residual: bool = False

    def __str__(self) -> str:
        more = "+residual" if self.residual else ""
        window = f"{self.window}x{self.window}"
        return f"ConvBN{more}+ReLU {window} {self.channels}->{self.outs} {self.images}x{self.size}²"

    def tensors(self, device: str) -> Tensors:
        dtype = torch.float16 if device == "cuda" else torch.float32

        def image(n: int, c: int, size: int, scale: float = 1.0) -> torch.Tensor:
            t = (torch.randn(n, c, size, size, device=device) * scale).to(dtype)
            return t.to(memory_format=torch.channels_last)

        def each(low: float) -> torch.Tensor:
            return torch.rand(self.outs, device=device) + low

        scale = (2 / (self.channels * self.window**2)) ** 0.5
        found = {"x": image(self.images, self.channels, self.size)}
        found["k"] = image(self.outs, self.channels, self.window, scale)
        found |= {"w": each(0.5), "b": each(-0.5), "m": each(-0.5), "v": each(0.5)}
        if self.residual:
            found["r"] = image(self.images, self.outs, self.size)
        return found | {"grad_y": image(self.images, self.outs, self.size)}


def cases(device: str) -> Iterator[Case]:
    if device != "cuda":
        yield Case(4, 64, 64, 28, 3)
        yield Case(4, 64, 128, 28, 1, residual=True)
        return
    yield Case(64, 64, 64, 56, 3)
    yield Case(64, 64, 256, 56, 1)
    yield Case(64, 256, 64, 56, 1)
    yield Case(64, 256, 256, 14, 3)
    yield Case(64, 64, 256, 56, 1, residual=True)
    yield Case(64, 128, 128, 28, 3)
    yield Case(64, 512, 512, 7, 3)


def _module(x: Any, k: Any, w: Any, b: Any, m: Any, v: Any, r: Any = None) -> Any:
    y = F.conv2d(x, k, padding=k.shape[-1] // 2)
    y = F.batch_norm(y, m, v, w, b, True, 0.1, 1e-5)
    return torch.relu(y if r is None else y + r)


def plan(
    case: Case, t: Tensors, device: str, find: bool, budget_s: float = 12.0, **policy: Any
) -> Any:
    """Forward and backward as one graph."""
    g = dt.Graph(str(case))
    h = {
        n: g.tensor(n, v.shape, v.dtype, strides=v.stride()) for n, v in t.items() if n != "grad_y"
    }
    z = g.conv(h["x"], h["k"], padding=case.window // 2)
    params = (h["w"], h["b"], h["m"], h["v"], h.get("r"))
    y, mean, var, *_ = g.batch_norm_act(z, *params, activation="relu")
    for name, value in (("y", y), ("mean", mean), ("var", var)):
        value.output(name)
    both = g.grad("y", wrt=asked(t))
    return both.compile(device=device, find=find, budget_s=budget_s, policy=Policy(**policy))


def run(device: str, compile_peer: bool = True) -> Record:
    """Every case on one device."""
    record = Record("conv_batch_norm", device, NOTE)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
    for case in cases(device):
        if record.wants(str(case)):
            torch.manual_seed(0)
            record.add(case=str(case), **_measured(case, device, compile_peer))
    return record


def _measured(case: Case, device: str, compile_peer: bool) -> dict[str, Any]:
    first = case.tensors(device)
    size = sum(t.nbytes for t in first.values())
    sets = [first, *(case.tensors(device) for _ in range(min(5, ROTATE // (2 * size))))]
    sets = sets if device == "cuda" else sets[:1]
    exact = step_of(_module, {n: v.double() for n, v in first.items()})()
    row: dict[str, Any] = {}
    timed: dict[str, Callable[[], Any]] = {}
    ready = captured if device == "cuda" else (lambda fn: fn)
    contenders: dict[str, Callable[..., Any]] = {"eager": _module}
    if compile_peer:
        torch._dynamo.reset()
        contenders["compile"] = torch.compile(_module, dynamic=False)
    for name, fn in contenders.items():
        steps = [step_of(fn, t) for t in sets]
        row[f"{name}_error"] = worst(steps[0](), exact)
        timed[name] = ready(lambda steps=steps: [step() for step in steps])
    make = partial(plan, case, first, device)
    plans = {"plan": make(False), "found": make(True), "apart": make(True, engines=APART)}
    for name, each in plans.items():
        row[f"{name}_error"] = worst(each.run(**first), exact)
        feeds = [[t[n] for n in each.graph.inputs] for t in sets]
        timed[name] = ready(lambda p=each, feeds=feeds: [p.program.run(f) for f in feeds])
    del exact
    times = replay_times(timed, rounds=9) if device == "cuda" else cpu_times(timed)
    row |= {f"{name}_us": ms * 1e3 / len(sets) for name, ms in times.items()}
    peers = [row[f"{name}_us"] for name in contenders]
    row["over_best"] = min(peers) / row["found_us"]
    chosen = [c for c in plans["found"].decision.choices if "grad" not in "".join(c.region.ops)]
    row["forward_by"] = " + ".join(str(c.candidate) for c in chosen)
    return row
