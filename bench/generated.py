"""Generated Triton kernels on the GPU: rows, long rows, pointwise chains and broadcasts.

Each case moves a known number of bytes; a copy of as many is timed in the same turns, so that
"of a copy" is a fraction of what this machine does at this moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, copying, relative_error, replay_times, wall_times
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.generated import TritonGen
from deuteron.ir.region import Region
from deuteron.policy import Policy

NOTE = (
    "GPU microseconds per run by CUDA Graph replay, medians of interleaved samples, inputs "
    "rotating through 256 MB where they fit (more than L2). `plan` is dt.Graph compiled with "
    "find=True, `generated` the best candidate of triton_gen alone. Errors are relative "
    "(2-norm) to float64 on a part of the case."
)
ROTATE = 256 << 20
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table: tensors, the graph and the same in PyTorch."""

    name: str
    tensors: Callable[[], Tensors]
    graph: Callable[..., Any]
    torch: Callable[..., torch.Tensor]
    wall: bool = False


def t(*shape: int, dtype: torch.dtype = torch.float16, nhwc: bool = False) -> torch.Tensor:
    x = torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)
    return x.to(memory_format=torch.channels_last) if nhwc else x


def row_cases() -> Iterator[Case]:
    f32, bf16 = torch.float32, torch.bfloat16

    def norm(g: Any, x: Any, b: Any, w: Any, s: Any) -> Any:
        return g.layer_norm(g.relu(x + b), w, s, dims=1)

    def norm_torch(x: Any, b: Any, w: Any, s: Any) -> torch.Tensor:
        return F.layer_norm(torch.relu(x + b), (x.shape[-1],), w, s)

    for rows, n in ((16384, 1024), (16384, 8192), (128, 64)):
        yield Case(
            f"bias+ReLU+LayerNorm f32 {rows}x{n}",
            lambda rows=rows, n=n: (
                {"x": t(rows, n, dtype=f32)} | {k: t(n, dtype=f32) for k in "bws"}
            ),
            norm,
            norm_torch,
            wall=rows == 128,
        )
    yield Case(
        "residual+LayerNorm f16 64x512x768",
        lambda: {"x": t(64, 512, 768), "r": t(64, 512, 768), "w": t(768), "s": t(768)},
        lambda g, x, r, w, s: g.layer_norm(x + r, w, s, dims=1),
        lambda x, r, w, s: F.layer_norm(x + r, (768,), w, s),
    )
    for rows, n in ((4096, 32768), (1024, 131072)):
        yield Case(
            f"softmax bf16 {rows}x{n}",
            lambda rows=rows, n=n: {"x": t(rows, n, dtype=bf16)},
            lambda g, x: g.softmax(x, axis=-1),
            lambda x: torch.softmax(x, -1),
        )


def pointwise_cases() -> Iterator[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    big, many = (8192, 4096), (32, 256, 56, 56)

    def two(dtype: torch.dtype) -> Callable[[], Tensors]:
        return lambda: {"x": t(*big, dtype=dtype), "y": t(*big, dtype=dtype)}

    def image(nhwc: bool, **more: tuple[int, ...]) -> Callable[[], Tensors]:
        return lambda: {"x": t(*many, nhwc=nhwc)} | {k: t(*s) for k, s in more.items()}

    yield Case("add f32", two(f32), lambda g, x, y: x + y, lambda x, y: x + y)
    yield Case("add f16", two(torch.float16), lambda g, x, y: x + y, lambda x, y: x + y)
    yield Case(
        "x*y+x, relu bf16",
        two(bf16),
        lambda g, x, y: g.relu(x * y + x),
        lambda x, y: torch.relu(x * y + x),
    )
    yield Case(
        "silu(x)*y bf16", two(bf16), lambda g, x, y: g.silu(x) * y, lambda x, y: F.silu(x) * y
    )
    yield Case("gelu(x)*y f32", two(f32), lambda g, x, y: g.gelu(x) * y, lambda x, y: F.gelu(x) * y)
    yield Case(
        "gelu tanh f16",
        lambda: {"x": t(*big)},
        lambda g, x: g.gelu(x, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    )
    yield Case(
        "sigmoid f32", lambda: {"x": t(*big, dtype=f32)}, lambda g, x: g.sigmoid(x), torch.sigmoid
    )
    yield Case(
        "tanh(x+1)*2 f32",
        lambda: {"x": t(*big, dtype=f32)},
        lambda g, x: g.tanh(x + 1.0) * 2.0,
        lambda x: torch.tanh(x + 1.0) * 2.0,
    )
    yield Case(
        "bias gelu f16 8192x3072",
        lambda: {"x": t(8192, 3072), "b": t(3072)},
        lambda g, x, b: g.gelu(x + b),
        lambda x, b: F.gelu(x + b),
    )
    yield Case(
        "row and column broadcast f32",
        lambda: {"x": t(*big, dtype=f32), "r": t(8192, 1, dtype=f32), "c": t(4096, dtype=f32)},
        lambda g, x, r, c: x * r + c,
        lambda x, r, c: x * r + c,
    )
    yield Case(
        "cast f32 to bf16",
        lambda: {"x": t(*big, dtype=f32)},
        lambda g, x: g.cast(x, dtype="bf16"),
        lambda x: x.to(bf16),
    )
    yield Case(
        "cast f16 to f32, scaled",
        lambda: {"x": t(*big)},
        lambda g, x: g.cast(x, dtype="f32") * 0.5,
        lambda x: x.float() * 0.5,
    )
    yield Case(
        "NCHW scale shift relu f16",
        image(False, s=(256, 1, 1), b=(256, 1, 1)),
        lambda g, x, s, b: g.relu(x * s + b),
        lambda x, s, b: torch.relu(x * s + b),
    )
    yield Case(
        "NHWC bias silu f16",
        image(True, b=(256, 1, 1)),
        lambda g, x, b: g.silu(x + b),
        lambda x, b: F.silu(x + b),
    )
    yield Case(
        "NHWC bias relu residual f16",
        lambda: {"x": t(*many, nhwc=True), "y": t(*many, nhwc=True), "b": t(256, 1, 1)},
        lambda g, x, y, b: g.relu(x + b + y),
        lambda x, y, b: torch.relu(x + b + y),
    )
    yield Case(
        "transpose + add f32",
        lambda: {"x": t(4096, 8192, dtype=f32), "y": t(*big, dtype=f32)},
        lambda g, x, y: g.permute(x, dims=(1, 0)) + y,
        lambda x, y: x.t() + y,
    )
    yield Case(
        "transpose + add f16 64x512x768",
        lambda: {"x": t(64, 512, 768), "y": t(64, 768, 512)},
        lambda g, x, y: g.permute(x, dims=(0, 2, 1)) + y,
        lambda x, y: x.transpose(1, 2) + y,
    )
    yield Case(
        "heads together f16",
        lambda: {"x": t(32, 16, 1024, 64), "b": t(32, 1024, 16, 64)},
        lambda g, x, b: g.permute(x, dims=(0, 2, 1, 3)) + b,
        lambda x, b: x.permute(0, 2, 1, 3) + b,
    )
    yield Case(
        "pad relu f16",
        image(False),
        lambda g, x: g.relu(g.pad(x, low=(0, 0, 1, 1), high=(0, 0, 1, 1))),
        lambda x: torch.relu(F.pad(x, (1, 1, 1, 1))),
    )
    yield Case(
        "concat channels relu f16",
        lambda: {"x": t(*many), "y": t(32, 128, 56, 56)},
        lambda g, x, y: g.relu(g.concat(x, y, axis=1)),
        lambda x, y: torch.relu(torch.cat([x, y], 1)),
    )


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("generated", device, NOTE)
    if device != "cuda":
        return record
    torch.set_grad_enabled(False)
    begin = time.perf_counter()
    for case in (*row_cases(), *pointwise_cases()):
        if not record.wants(case.name):
            continue
        torch.manual_seed(0)
        peer = compile_peer and time.perf_counter() - begin < 150  # the rest without it
        try:
            _measure(record, case, peer)
        except Exception as error:
            record.add(case=case.name, failed=f"{type(error).__name__}: {str(error)[:300]}")
        torch.cuda.empty_cache()
    return record


def _measure(record: Record, case: Case, compile_peer: bool) -> None:
    first = case.tensors()
    want = case.torch(**first)
    moved = sum(x.nbytes for x in first.values()) + want.nbytes
    sets = [first, *(case.tensors() for _ in range(min(7, ROTATE // moved)))]
    graph = dt.Graph(case.name)
    handles = {k: graph.tensor(k, x.shape, x.dtype, strides=x.stride()) for k, x in first.items()}
    case.graph(graph, **handles).output("y")
    plan = graph.compile(find=True, device="cuda", budget_s=6)
    exact = case.torch(**{k: x.double() for k, x in _part(case, first).items()})

    def all_sets(fn: Callable[[Tensors], Any]) -> Callable[[], Any]:
        return captured(lambda: [fn(x) for x in sets])

    contenders: dict[str, Callable[[], Any]] = {
        "copy": copying(moved, len(sets)),
        "eager": all_sets(lambda x: case.torch(**x)),
        "plan": all_sets(lambda x: plan.program.run(_ordered(plan.graph, x))),
    }
    torch_fn: Callable[..., Any] = case.torch
    if compile_peer:
        torch._dynamo.reset()
        torch_fn = torch.compile(case.torch, dynamic=False)
        contenders["compile"] = all_sets(lambda x: torch_fn(**x))
    ways = _candidates(plan.graph, want, sets)
    contenders |= ways
    times = {k: v * 1e3 / len(sets) for k, v in replay_times(contenders, rounds=9).items()}
    best = min(ways, key=times.__getitem__, default="")
    ours = plan.run(**first)["y"]
    row: dict[str, Any] = {
        "case": case.name,
        "copy_us": times["copy"],
        "eager_us": times["eager"],
        "compile_us": times.get("compile", float("nan")),
        "plan_us": times["plan"],
        "generated_us": times.get(best, float("nan")),
        "tb_per_s": moved / min(times["plan"], times.get(best, 1e9)) / 1e6,
        "of_a_copy": times["copy"] / min(times["plan"], times.get(best, 1e9)),
        "error": relative_error(ours[: exact.shape[0]], exact),
        "torch_error": relative_error(want[: exact.shape[0]], exact),
        "knobs": best,
        "plan": " + ".join(str(c.candidate) for c in plan.decision.choices),
    }
    if case.wall:
        calls = {"eager": lambda: case.torch(**first), "plan": lambda: plan.run(**first)}
        for name, fn in _bare_calls(plan.graph, want, first).items():
            calls[name] = fn
        wall = wall_times(calls, calls=50)
        row |= {f"{k}_wall_us": v * 1e3 for k, v in wall.items()}
    record.add(**row)


def _part(case: Case, tensors: Tensors) -> Tensors:
    """The first rows of what has rows: float64 of all would take longer than the rest."""
    rows = max(tensors.values(), key=lambda x: x.numel()).shape[0]
    few = min(rows, 64) if "transpose + add f32" not in case.name else rows
    return {k: x[:few] if x.shape[0] == rows and x.dim() > 1 else x for k, x in tensors.items()}


def _built(graph: Any) -> dict[str, Any]:
    """Every candidate of triton_gen for the graph as one region."""
    engine, region, machine = TritonGen(), Region(graph), dt.target("cuda")
    refusal = engine.refuse(region, machine, Policy())
    if refusal is not None:
        print(f"    triton_gen refuses: {refusal.reason}", flush=True)
        return {}
    ctx = BuildContext(machine, torch.device("cuda", torch.cuda.current_device()), Policy(), {})
    return {
        str(c): engine.build(region, c, ctx) for c in engine.candidates(region, machine, Policy())
    }


def _candidates(graph: Any, want: torch.Tensor, sets: list[Tensors]) -> dict[str, Any]:
    """Candidates that give the right answer, captured over all sets."""
    found = {}
    for name, kernel in _built(graph).items():
        out = torch.empty_like(want)
        kernel.fn(*_ordered(graph, sets[0]), out)
        off = relative_error(out, want)
        if not off < 2e-2:
            print(f"    wrong by {off:.3g}: {name}", flush=True)
            continue

        def over(kernel: Any = kernel) -> list[Any]:
            outs = [torch.empty_like(want) for _ in sets]
            for x, out in zip(sets, outs, strict=True):
                kernel.fn(*_ordered(graph, x), out)
            return outs

        found[name] = captured(over)
    return found


def _bare_calls(graph: Any, want: torch.Tensor, first: Tensors) -> dict[str, Any]:
    """The first guess, called as a plan calls it, without a CUDA Graph."""
    out, given = torch.empty_like(want), _ordered(graph, first)
    kernels = list(_built(graph).values())
    return {"generated": partial(kernels[0].fn, *given, out)} if kernels else {}


def _ordered(graph: Any, tensors: Tensors) -> list[torch.Tensor]:
    return [tensors[name] for name in graph.inputs]
