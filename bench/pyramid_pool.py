"""Spatial-pyramid pooling with its gradient, written out as pools of pools, against adaptive pools
and a concatenation, eager and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times

NOTE = (
    "Grids of 1, 2, 3 and 6 cells per side over [N, C, H, W]; `contiguous` is NCHW in memory. fp16 "
    "on a GPU, float32 on a CPU. GPU microseconds by CUDA Graph replay, CPU microseconds of the "
    "wall, medians of interleaved samples; `copy_us` reads and writes as many bytes as the pool "
    "must. Plans by measurement (`find`). Errors are relative (2-norm) to float64."
)
SIZES = (1, 2, 3, 6)
SHAPES = {
    "cuda": (
        ((8, 2048, 60, 60), "contiguous"),
        ((8, 2048, 60, 60), "nhwc"),
        ((64, 512, 14, 14), "contiguous"),
    ),
    "cpu": (
        ((1, 512, 60, 60), "contiguous"),
        ((1, 512, 60, 60), "nhwc"),
        ((4, 256, 14, 14), "contiguous"),
        ((4, 256, 14, 14), "nhwc"),
    ),
}


def eager(x: torch.Tensor, kind: str) -> torch.Tensor:
    pool: Any = {"avg": F.adaptive_avg_pool2d, "max": F.adaptive_max_pool2d}[kind]
    return torch.cat([pool(x, size).flatten(2) for size in SIZES], 2)


def eager_grad(x: torch.Tensor, grad: torch.Tensor, kind: str) -> torch.Tensor:
    y = eager(x, kind)
    return torch.autograd.grad(y, x, grad)[0]


def plans(x: torch.Tensor, kind: str, device: str) -> tuple[dt.Plan, dt.Plan]:
    """The pool, and the pool with its gradient."""
    g = dt.Graph("pool")
    given = g.tensor("x", x.shape, x.dtype, strides=x.stride())
    y = g.pyramid_pool(given, sizes=SIZES, kind=kind).output("y")
    both = g.grad(y, wrt=given)
    forward, backward = (p.compile(find=True, device=device, budget_s=8) for p in (g, both))
    return forward, backward


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("pyramid_pool", device, NOTE)
    for shape, order in SHAPES[device]:
        for kind in ("avg", "max"):
            _measure(record, device, shape, order, kind, compile_peer)
    return record


def _measure(
    record: Record, device: str, shape: tuple[int, ...], order: str, kind: str, compile_peer: bool
) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    x = torch.randn(shape, device=device).to(dtype)
    if order == "nhwc":
        x = x.to(memory_format=torch.channels_last)
    forward, backward = plans(x, kind, device)
    grad = torch.randn(forward.run(x=x)["y"].shape, device=device).to(dtype)
    feed = {"grad_y": grad}
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    wide = x.double().requires_grad_()
    y = eager(wide, kind)
    (dx,) = torch.autograd.grad(y, wide, grad.double())
    both: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {"eager": lambda: eager(x, kind)},
        "forward+backward": {"eager": lambda: eager_grad(leaf, grad, kind)},
    }
    given = {p: [feed.get(n, x) for n in p.graph.inputs] for p in (forward, backward)}

    both["forward"]["ours"] = lambda: forward.program.run(given[forward])
    both["forward+backward"]["ours"] = lambda: backward.program.run(given[backward])
    if compile_peer:
        torch._dynamo.reset()
        fast, fast_grad = torch.compile(eager), torch.compile(eager)
        both["forward"]["compile"] = lambda: fast(x, kind)
        both["forward+backward"]["compile"] = lambda: torch.autograd.grad(
            fast_grad(leaf, kind), leaf, grad
        )
    moved = {"forward": (x.nbytes + grad.nbytes) // 2}
    moved["forward+backward"] = (2 if kind == "avg" else 3) * moved["forward"]
    for direction, contenders in both.items():
        source = torch.empty(moved[direction], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        contenders["copy"] = lambda target=target, source=source: target.copy_(source)
        if device == "cuda":
            times = replay_times({name: captured(fn) for name, fn in contenders.items()})
        else:
            times = cpu_times(contenders, seconds=2.0)
        row: dict[str, Any] = {
            "case": "x".join(map(str, shape)),
            "order": order,
            "kind": kind,
            "direction": direction,
        }
        row |= {f"{name}_us": ms * 1e3 for name, ms in times.items()}
        row["speedup_eager"] = times["eager"] / times["ours"]
        if compile_peer:
            row["speedup_compile"] = times["compile"] / times["ours"]
        made = backward if direction != "forward" else forward
        out = made.run(**{n: feed.get(n, x) for n in made.graph.inputs})
        name, want = ("grad_x", dx) if made is backward else ("y", y)
        row["error"] = relative_error(out[name], want)
        row["plan"] = " + ".join(str(c.candidate) for c in made.decision.choices)
        record.add(**row)
