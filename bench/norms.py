"""Norms and softmax on the GPU, forward and training: LayerNorm, RMSNorm, both after a residual
sum, GroupNorm, softmax of short and long rows, and the smallest shapes.

A step of training is the forward and the gradients of x and of the parameters. After a residual
sum the gradient of the sum comes in as well, as in a transformer: the forward hands out the sum
and the norm, the backward is a graph of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, copying, relative_error, replay_times, wall_times

NOTE = (
    "GPU microseconds by CUDA Graph replay, medians of interleaved samples; tensors are larger "
    "than L2 except in the smallest cases. `guess` is dt.Graph compiled without measuring, `plan` "
    "with find=True, `wall` is time per call from Python without a CUDA Graph (plans run as their "
    "list of calls). TB/s counts what has to move: every input once, every result once. Errors "
    "are relative (2-norm) to float64, the worst of all results."
)
PATIENCE_S = 300  # after that the remaining cases go without torch.compile
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table. ``graph`` and ``torch`` take the tensors by name and return y, or y
    and the sum; ``wrt`` have gradients."""

    name: str
    tensors: Callable[[], Tensors]
    graph: Callable[..., Any]
    torch: Callable[..., Any]
    wrt: tuple[str, ...]
    backward: str = ""  # the gradient operator, where the sum has a gradient as well
    wall: bool = False


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def norm_cases() -> Iterator[Case]:
    for rows, n in ((16384, 4096), (32768, 768), (8192, 8192), (4096, 16384), (8, 64)):
        small = rows == 8
        size = f"bf16 {rows}x{n}"

        def two(rows: int = rows, n: int = n) -> Tensors:
            return {"x": t(rows, n), "w": t(n)}

        def three(rows: int = rows, n: int = n) -> Tensors:
            return {"x": t(rows, n), "w": t(n), "b": t(n)}

        yield Case(
            f"RMSNorm {size}",
            two,
            lambda g, x, w: g.rms_norm(x, w),
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
            ("x", "w"),
            wall=small,
        )
        yield Case(
            f"LayerNorm {size}",
            three,
            lambda g, x, w, b: g.layer_norm(x, w, b),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            ("x", "w", "b"),
            wall=small,
        )
        if n > 8192:
            continue
        yield Case(
            f"residual+RMSNorm {size}",
            lambda two=two: two() | {"r": two()["x"]},
            _summed("rms_norm"),
            _summed_torch(lambda s, w: F.rms_norm(s, w.shape, w, 1e-6)),
            ("x", "w"),
            "rms_norm_grad",
            wall=small,
        )
        yield Case(
            f"residual+LayerNorm {size}",
            lambda three=three: three() | {"r": three()["x"]},
            _summed("layer_norm"),
            _summed_torch(lambda s, w, b: F.layer_norm(s, w.shape, w, b)),
            ("x", "w", "b"),
            "layer_norm_grad",
            wall=small,
        )


def _summed(norm: str) -> Callable[..., Any]:
    def write(g: Any, x: Any, r: Any, **params: Any) -> Any:
        s = x + r
        return getattr(g, norm)(s, *params.values()), s

    return write


def _summed_torch(norm: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(x: torch.Tensor, r: torch.Tensor, **params: torch.Tensor) -> Any:
        s = x + r
        return norm(s, *params.values()), s

    return call


def other_cases() -> Iterator[Case]:
    for columns in (1024, 32768, 131072):
        rows = 2**27 // columns
        yield Case(
            f"softmax bf16 {rows}x{columns}",
            lambda r=rows, c=columns: {"x": t(r, c)},
            lambda g, x: g.softmax(x, axis=-1),
            lambda x: torch.softmax(x, -1),
            ("x",),
        )
    yield Case(
        "softmax bf16 8x64",
        lambda: {"x": t(8, 64)},
        lambda g, x: g.softmax(x, axis=-1),
        lambda x: torch.softmax(x, -1),
        ("x",),
        wall=True,
    )
    half = torch.float16
    yield Case(
        "GroupNorm f16 64x256x56x56, 32 groups",
        lambda: {"x": t(64, 256, 56, 56, dtype=half)} | {k: t(256, dtype=half) for k in "wb"},
        lambda g, x, w, b: g.group_norm(x, w, b, groups=32),
        lambda x, w, b: F.group_norm(x, 32, w, b),
        ("x", "w", "b"),
    )


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("norms", device, NOTE)
    if device != "cuda":
        return record
    begin = time.perf_counter()
    for case in (*norm_cases(), *other_cases()):
        if not record.wants(case.name):
            continue
        for measure in (_forward, _training):
            torch.manual_seed(0)
            peer = compile_peer and time.perf_counter() - begin < PATIENCE_S
            try:
                measure(record, case, peer)
            except Exception as error:
                failed = f"{type(error).__name__}: {str(error)[:300]}"
                record.add(case=f"{case.name}, {measure.__name__[1:]}", failed=failed)
            torch.cuda.empty_cache()
    return record


# ---- forward


def _forward(record: Record, case: Case, compile_peer: bool) -> None:
    tensors = case.tensors()
    graph = dt.Graph(case.name)
    for name, out in zip(
        "ys", _several(case.graph(graph, **_handles(graph, tensors))), strict=False
    ):
        out.output(name)

    def call(fn: Callable[..., Any], given: Tensors) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return _several(fn(**given))

    _measure(record, f"{case.name}, forward", case, [graph], tensors, call, compile_peer)


# ---- forward and backward


def _training(record: Record, case: Case, compile_peer: bool) -> None:
    tensors = case.tensors()
    outs = _several(case.torch(**tensors))
    seeds = {f"grad_{n}": torch.randn_like(o) for n, o in zip("ys", outs, strict=False)}
    graphs = _with_sum(case, tensors) if case.backward else [_one_graph(case, tensors)]

    def call(fn: Callable[..., Any], given: Tensors) -> tuple[torch.Tensor, ...]:
        leaves = {
            n: x.detach().requires_grad_(n in case.wrt) for n, x in given.items() if n not in seeds
        }
        out = _several(fn(**leaves))
        grads = [given[n] for n in seeds]
        found = torch.autograd.grad(out, [leaves[n] for n in case.wrt], grads)
        return *(o.detach() for o in out), *found

    _measure(record, f"{case.name}, training", case, graphs, tensors | seeds, call, compile_peer)


def _one_graph(case: Case, tensors: Tensors) -> dt.Graph:
    graph = dt.Graph(case.name)
    case.graph(graph, **_handles(graph, tensors)).output("y")
    return graph.grad("y", wrt=case.wrt)


def _with_sum(case: Case, tensors: Tensors) -> list[dt.Graph]:
    """The forward, which hands out the sum, and the backward, which takes it and its gradient."""
    forward, back = dt.Graph(case.name), dt.Graph(f"{case.name} backward")
    y, s = case.graph(forward, **_handles(forward, tensors))
    y.output("y")
    s.output("s")
    x = tensors["x"]
    s, grad, extra = (back.tensor(n, x.shape, x.dtype) for n in ("s", "grad_y", "grad_s"))
    w = back.tensor("w", tensors["w"].shape, x.dtype)
    bias = "same" if "b" in case.wrt else "none"
    found = getattr(back, case.backward)(s, grad, w, extra, bias=bias)
    for name, out in zip(case.wrt, found, strict=True):
        out.output(f"grad_{name}")
    return [forward, back]


# ---- measuring


def _measure(
    record: Record,
    name: str,
    case: Case,
    graphs: list[dt.Graph],
    tensors: Tensors,
    call: Callable[..., tuple[torch.Tensor, ...]],
    compile_peer: bool,
) -> None:
    guess = [g.compile(device="cuda") for g in graphs]
    plans = [g.compile(device="cuda", find=True, budget_s=4) for g in graphs]
    contenders: dict[str, Callable[[], Any]] = {
        "eager": lambda: call(case.torch, tensors),
        "guess": lambda: _run(guess, tensors),
        "plan": lambda: _run(plans, tensors),
    }
    if compile_peer:
        torch._dynamo.reset()
        fast = torch.compile(case.torch, dynamic=False)
        contenders["compile"] = lambda: call(fast, tensors)
    want = call(case.torch, tensors)
    moved = _bytes(graphs)
    graphed = {k: captured(fn) for k, fn in contenders.items()}
    graphed["copy"] = copying(moved)
    times = {k: v * 1e3 for k, v in replay_times(graphed, rounds=11).items()}
    wall = wall_times(contenders, calls=50) if case.wall else {}
    exact = call(case.torch, {k: x.double() for k, x in tensors.items()})
    ours = _run(guess, tensors), _run(plans, tensors)
    record.add(
        case=name,
        **{
            f"{k}_us": times.get(k, float("nan"))
            for k in ("copy", "eager", "compile", "guess", "plan")
        },
        tb_per_s=moved / times["plan"] / 1e6,
        of_a_copy=times["copy"] / times["plan"],
        error=max(_worst(o, exact) for o in ours),
        torch_error=_worst(want, exact),
        plan=" + ".join(_shown(c) for p in plans for c in p.decision.choices),
        guessed=" + ".join(str(c.candidate) for p in guess for c in p.decision.choices),
        **{f"{k}_wall_us": v * 1e3 for k, v in wall.items()},
    )


def _run(plans: list[Any], tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Every result in order: y, perhaps the sum, then the gradients."""
    found: list[torch.Tensor] = []
    known = dict(tensors)
    for plan in plans:
        outs = plan.program.run([known[name] for name in plan.graph.inputs])
        known |= dict(zip((name for name, _ in plan.graph.outputs), outs, strict=True))
        found += outs
    return tuple(found)


def _bytes(graphs: list[dt.Graph]) -> int:
    """What has to move at least. Training reads x again in the backward: it was written off
    chip long ago."""
    total = 0
    for graph in graphs:
        ir = graph.ir()
        total += sum(ir.types[v].nbytes for v in (*ir.inputs, *(v for _, v in ir.outputs)))
        if "grad_x" in dict(ir.outputs) and "x" in ir.inputs:
            total += ir.types["x"].nbytes
    return total


def _shown(choice: Any) -> str:
    """The candidate, and every way that was measured, in microseconds."""
    tried = [
        f"{o.candidate}: {o.measured_s * 1e6:.1f}"
        for o in choice.options
        if o.measured_s is not None
    ]
    return f"{choice.candidate} (of {'; '.join(tried)})" if tried else str(choice.candidate)


def _worst(found: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> float:
    return max(relative_error(o, e) for o, e in zip(found, exact, strict=True))


def _handles(graph: dt.Graph, tensors: Tensors) -> dict[str, Any]:
    return {k: graph.tensor(k, x.shape, x.dtype, strides=x.stride()) for k, x in tensors.items()}


def _several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
