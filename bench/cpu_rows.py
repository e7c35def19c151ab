"""Generated row kernels on the CPU against eager, torch.compile and ONNX Runtime, one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, cpu_times, onnx_runtime, relative_error
from deuteron.codegen import llvm

NOTE = (
    "Milliseconds, medians in turns with pauses of 20 ms and 50 ms of calls that are not counted; "
    "`cold_s` is the time to a heuristic plan with nothing cached, `cached_s` to the same plan "
    "with its object code on disk and the process warm. `over_best` is the better of eager and "
    "ONNX Runtime over ours. Errors are relative (2-norm) to float64."
)


class _Chain(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(n))
        self.norm = torch.nn.LayerNorm(n)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(F.gelu(x + self.bias) + r)
        return out


def _chain_graph(module: _Chain, x: torch.Tensor) -> dt.Graph:
    g = dt.Graph("chain")
    xs, rs = g.tensor("x0", tuple(x.shape)), g.tensor("x1", tuple(x.shape))
    bias, w, b = (g.constant(p.detach()) for p in (module.bias, *module.norm.parameters()))
    g.layer_norm(g.gelu(xs + bias) + rs, w, b, dims=1).output("y")
    return g


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("cpu_rows", "cpu", NOTE)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    chain = _Chain(1024)
    x, r = torch.randn(4096, 1024), torch.randn(4096, 1024)
    _row(
        record,
        "bias+GELU+residual+LayerNorm 4096×1024",
        chain,
        (x, r),
        lambda: _chain_graph(chain, x),
        compile_peer,
    )
    s = torch.randn(1536, 128)

    def softmax_graph() -> dt.Graph:
        g = dt.Graph("softmax")
        g.softmax(g.tensor("x0", (1536, 128))).output("y")
        return g

    _row(record, "softmax 1536×128", torch.nn.Softmax(-1), (s,), softmax_graph, compile_peer)
    return record


def _row(
    record: Record,
    name: str,
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    graph: Callable[[], dt.Graph],
    compile_peer: bool,
) -> None:
    dt.target("cpu")  # the machine is measured before the clock starts
    begin = time.perf_counter()
    plan = graph().compile(device="cpu")
    cold = time.perf_counter() - begin
    llvm.forget()
    begin = time.perf_counter()
    plan = graph().compile(device="cpu")
    cached = time.perf_counter() - begin
    named = {f"x{i}": a for i, a in enumerate(args)}
    calls: dict[str, Callable[[], Any]] = {
        "eager": lambda: module(*args),
        "ours": lambda: plan.run(named),
    }
    if compile_peer:
        torch._dynamo.reset()
        compiled = torch.compile(module)
        calls["compile"] = lambda: compiled(*args)
    session = onnx_runtime(module, *args)
    if session is not None:
        calls["onnx"] = session
    times = cpu_times(calls, seconds=6.0)
    exact = module.double()(*(a.double() for a in args))
    module.float()
    nan = float("nan")
    record.add(
        case=name,
        eager_ms=times["eager"],
        compile_ms=times.get("compile", nan),
        onnx_runtime_ms=times.get("onnx", nan),
        ours_ms=times["ours"],
        over_eager=times["eager"] / times["ours"],
        over_compile=times.get("compile", nan) / times["ours"],
        over_best=min(times["eager"], times.get("onnx", nan)) / times["ours"],
        cold_s=cold,
        cached_s=cached,
        error=relative_error(plan.run(named)["y"], exact),
        eager_error=relative_error(module(*args), exact),
        plan=str(plan.decision.choices[0].candidate),
    )
