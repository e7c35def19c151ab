"""Whole networks from the zoo: ours against eager PyTorch and torch.compile, one run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import deuteron as dt
from bench.harness import (
    Record,
    captured,
    compiled,
    cpu_times,
    in_float64,
    onnx_runtime,
    relative_error,
    replay_times,
    wall_times,
)

NOTE = (
    "Milliseconds per run, medians of interleaved samples; `plan s` is the time from module to a "
    "found plan with nothing remembered (export, passes, search, capture), on the CPU in a fresh "
    "process with an empty cache. Errors are relative "
    "(2-norm) to the same network in float64."
)
GPU_CASES = (
    ("resnet50", 1),
    ("resnet50", 32),
    ("deeplabv3_resnet50", 1),
    ("deeplabv3_resnet50", 32),
)
CPU_CASES = (("resnet50", 1), ("mobilenet_v2", 1), ("bert_4l", 1), ("deeplabv3_resnet50", 1))


def tensor_of(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        return result["out"]
    return result[0] if isinstance(result, tuple) else result


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("models", device, NOTE)
    torch.set_grad_enabled(False)
    for name, batch in GPU_CASES if device == "cuda" else CPU_CASES:
        torch.manual_seed(0)
        (_gpu if device == "cuda" else _cpu)(record, name, batch, compile_peer)
    return record


def _gpu(record: Record, name: str, batch: int, compile_peer: bool) -> None:
    model = dt.zoo.build(name).cuda().half().to(memory_format=torch.channels_last)
    (x,) = dt.zoo.example(name, batch, "cuda", torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    exact = tensor_of(in_float64(model, x))
    begin = time.perf_counter()
    fast = dt.optimize(model, x)
    torch.cuda.synchronize()
    plan_s = time.perf_counter() - begin
    ours, eager = tensor_of(fast(x))[:1], tensor_of(model(x))[:1]
    graphs = {"eager graph": captured(lambda: model(x)), "deuteron": fast.plan.captured.replay}
    calls = {"eager": lambda: model(x), "deuteron": lambda: fast(x)}
    compile_s = float("nan")
    if compile_peer:
        calls["compile"], compile_s = compiled(model, x, "reduce-overhead", 4)
    gpu, wall = replay_times(graphs), wall_times(calls)
    record.add(
        case=f"{name} fp16 b{batch}",
        eager_ms=wall["eager"],
        eager_graph_ms=gpu["eager graph"],
        compile_reduce_overhead_ms=wall.get("compile", float("nan")),
        deuteron_graph_ms=gpu["deuteron"],
        deuteron_wall_ms=wall["deuteron"],
        plan_s=plan_s,
        of_which_export_s=fast.seconds["import"],
        compile_s=compile_s,
        error=relative_error(ours, exact),
        eager_error=relative_error(eager, exact),
    )


_READY = """
import sys, time, torch, deuteron as dt
torch.set_grad_enabled(False)
name, batch = sys.argv[1], int(sys.argv[2])
model, (x,) = dt.zoo.build(name), dt.zoo.example(name, batch)
begin = time.perf_counter()
fast = dt.optimize(model, x)
print(time.perf_counter() - begin, fast.seconds["import"])
"""


def _ready_s(name: str, batch: int) -> tuple[float, float]:
    """Seconds from the module to a found plan, and those of the import, in a fresh process with
    nothing remembered."""
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-c", _READY, name, str(batch)]
        own = {**os.environ, "DEUTERON_CACHE": empty}
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    plan_s, export_s = map(float, done.stdout.split())
    return plan_s, export_s


def _cpu(record: Record, name: str, batch: int, compile_peer: bool) -> None:
    model = dt.zoo.build(name)
    (x,) = dt.zoo.example(name, batch)
    plan_s, export_s = _ready_s(name, batch)
    fast = dt.optimize(model, x)
    calls = {"eager": lambda: model(x), "deuteron": lambda: fast(x)}
    compile_s = float("nan")
    if compile_peer:
        calls["compile"], compile_s = compiled(model, x, "default", 1)
    session = onnx_runtime(model, x)
    if session is not None:
        calls["onnx"] = session
    times = cpu_times(calls, seconds=20.0, gap=0.3)
    exact = tensor_of(in_float64(model, x))
    nan = float("nan")
    record.add(
        case=f"{name} fp32 b{batch}",
        eager_ms=times["eager"],
        compile_ms=times.get("compile", nan),
        onnx_runtime_ms=times.get("onnx", nan),
        deuteron_ms=times["deuteron"],
        over_eager=times["eager"] / times["deuteron"],
        over_compile=times.get("compile", nan) / times["deuteron"],
        over_onnx_runtime=times.get("onnx", nan) / times["deuteron"],
        plan_s=plan_s,
        of_which_export_s=export_s,
        compile_s=compile_s,
        error=relative_error(tensor_of(fast(x)), exact),
        eager_error=relative_error(tensor_of(model(x)), exact),
    )
