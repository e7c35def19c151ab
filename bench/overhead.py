"""Host overhead of ``plan.run`` beyond its launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import deuteron as dt
from bench.harness import Record

NOTE = (
    "Microseconds of host time: `run` is plan.run, `launches` the same library calls (CPU: the "
    "kernels of the plan in a bare loop; GPU: copy in, graph replay, copy out, with the device "
    "idle before each) with nothing around them. Medians of 1000 calls in turns, five times over: "
    "`overhead` is the median of the five, `least` and `most` their range."
)


REPEATS, COUNT = 5, 1000


def _median_us(
    fns: dict[str, Callable[[], object]], sync: Callable[[], object]
) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(COUNT):
        for name, fn in fns.items():
            sync()
            begin = time.perf_counter()
            fn()
            samples[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(values[COUNT // 10 :]) for name, values in samples.items()}


def chain_graph(length: int) -> dt.Graph:
    """A chain of small products that cannot fuse: one region, one library call each."""
    g = dt.Graph(f"chain{length}")
    x = g.tensor("x", (4, 8))
    w = g.tensor("w", (8, 8))
    for _ in range(length):
        x = g.matmul(x, w)
    x.output("y")
    return g


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("overhead", device, NOTE)
    for length in (1, 10, 60):
        plan = chain_graph(length).compile(device=device, policy=dt.Policy(cuda_graph=True))
        x, w = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
        plan.run(x=x, w=w)
        sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        calls = {"run": partial(plan.run, x=x, w=w), "bare": _bare(plan, x, w, device)}
        series = [_median_us(calls, sync) for _ in range(REPEATS)]
        extra = sorted(times["run"] - times["bare"] for times in series)
        record.add(
            regions=length,
            run_us=statistics.median(times["run"] for times in series),
            launches_us=statistics.median(times["bare"] for times in series),
            overhead_us=statistics.median(extra),
            least_us=extra[0],
            most_us=extra[-1],
        )
    return record


def _bare(plan: dt.Plan, x: torch.Tensor, w: torch.Tensor, device: str) -> Callable[[], object]:
    if device == "cuda":
        captured = plan.captured
        a, b = captured.static_in

        def gpu() -> list[torch.Tensor]:
            a.copy_(x, non_blocking=True)
            b.copy_(w, non_blocking=True)
            captured.graph.replay()
            return [t.clone() for t in captured.static_out]

        return gpu
    count = len(plan.decision.choices)
    buffers = [torch.empty(4, 8) for _ in range(2)]  # the last result is fresh, as in the plan
    mm = torch.matmul

    def cpu() -> torch.Tensor:
        t = x
        for i in range(count - 1):
            t = mm(t, w, out=buffers[i % 2])
        return mm(t, w)

    return cpu
