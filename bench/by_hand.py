"""What kernels written by hand win: every operator that has one, planned with it and without.

Both plans are chosen by estimate. ``generated`` is planned as if the hand-written kernels were not
there: the operator is then written out, generated, or left to a library, whatever is cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times
from deuteron.engines.cpu.kernels import CpuKernels
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ops.evaluate import evaluate
from deuteron.policy import Policy

NOTE = (
    "Microseconds, medians in turns: on a GPU of CUDA Graph replays, on a CPU of calls. `by_hand` "
    "is the plan with hand-written kernels, `generated` the one without, `ran` who ran the latter; "
    "`wins` is generated over by_hand. `eager` evaluates the operator's reference in torch. Errors "
    "are relative (2-norm) to float64 on the first output."
)
Write = Callable[[dt.Graph, str], Any]


def _norm(op: str, *shape: int, layout: str = "contiguous", **attrs: Any) -> Write:
    def write(g: dt.Graph, kind: str) -> Any:
        x, grad = (g.tensor(n, shape, kind, layout=layout) for n in ("x", "grad"))
        size = shape[-1:] if op in ("layer_norm", "rms_norm") else shape[1:2]
        return getattr(g, f"{op}_grad")(x, grad, g.tensor("w", size, kind), **attrs)

    return write


def _batch_norm(*shape: int, layout: str, back: bool = False) -> Write:
    def write(g: dt.Graph, kind: str) -> Any:
        x, grad = (g.tensor(n, shape, kind, layout=layout) for n in ("x", "grad"))
        params = [g.tensor(n, shape[1:2]) for n in ("weight", "bias", "mean", "rstd")]
        if back:
            return g.batch_norm_act_grad(grad, x, *params[2:], *params[:2], activation="relu")[:3]
        return g.batch_norm_act(x, *params[:2], activation="relu")[0]

    return write


def _pool(
    op: str, *shape: int, layout: str = "contiguous", kernel: int = 3, stride: int = 2
) -> Write:
    def write(g: dt.Graph, kind: str) -> Any:
        x = g.tensor("x", shape, kind, layout=layout)
        return getattr(g, op)(x, kernel=kernel, stride=stride, padding=kernel // 3)

    return write


def _one(op: str, *shape: int, more: int = 0, **attrs: Any) -> Write:
    def write(g: dt.Graph, kind: str) -> Any:
        tensors = [g.tensor(f"x{i}", shape, kind) for i in range(1 + more)]
        return getattr(g, op)(*tensors, **attrs)

    return write


def _loss(rows: int, classes: int) -> Write:
    def write(g: dt.Graph, kind: str) -> Any:
        x, y = g.tensor("x", (rows, classes), kind), g.tensor("y", (rows,), "i64")
        return g.cross_entropy_with_grad(x, y)

    return write


def cases(device: str) -> Iterator[tuple[str, Write]]:
    on_gpu = device == "cuda"
    k = 4 if on_gpu else 1
    rows, image = (4096 * k, 1024 * k), (8 * k, 64, 56, 56)
    for op in ("layer_norm", "rms_norm"):
        yield f"{op}_grad {list(rows)}", _norm(op, *rows)
    for layout in ("contiguous", "nhwc"):
        for op, attrs in (("group_norm", {"groups": 32}), ("instance_norm", {})):
            yield f"{op}_grad {list(image)} {layout}", _norm(op, *image, layout=layout, **attrs)
        for back in (False, True):
            name = f"batch_norm_act{'_grad' * back} {list(image)} {layout}"
            yield name, _batch_norm(*image, layout=layout, back=back)
    if not on_gpu:
        return
    for many in ((8192, 32000), (8192, 128256), (8192, 50257), (256, 32000)):
        yield f"cross_entropy_with_grad {list(many)}", _loss(*many)
    heads = (8, 32, 2048, 128)
    for woven in (False, True):
        yield (
            f"rope {list(heads)} interleaved={woven}",
            _one("rope", *heads, more=1, axis=2, interleaved=woven),
        )
    yield "cumsum [4096, 8192]", _one("cumsum", 4096, 8192, axis=1)
    for layout in ("contiguous", "nhwc"):
        for op in ("max_pool", "max_pool_with_winners", "avg_pool"):
            for kernel, stride in ((3, 2), (2, 2), (3, 1)):
                name = f"{op} [32, 64, 112, 112] {kernel}/{stride} {layout}"
                yield name, _pool(op, 32, 64, 112, 112, layout=layout, kernel=kernel, stride=stride)
    for mode in ("bilinear", "bicubic"):
        yield (
            f"resize {mode} [16, 64, 64, 64] ×2",
            _one("resize", 16, 64, 64, 64, size=(128, 128), mode=mode),
        )


@contextmanager
def without_kernels() -> Iterator[None]:
    with (
        patch.object(CpuKernels, "recipes", lambda *_: ()),
        patch.object(TritonKernels, "recipes", lambda *_: ()),
    ):
        yield


def _feed(graph: Any, device: str) -> dict[str, torch.Tensor]:
    found = {}
    for name in graph.inputs:
        t = graph.types[name]
        x = torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device=device)
        found[name] = x.normal_() if t.dtype.is_float else x.random_(0, 1000)
    for name in ("rstd", "weight"):
        if name in found:
            found[name].abs_().add_(0.5)
    return found


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("by_hand", device, NOTE)
    torch.manual_seed(0)
    for name, write in cases(device):
        for kind in ("bf16", "f32"):
            if record.wants(name):
                _row(record, name, write, kind, device)
    return record


def _row(record: Record, name: str, write: Write, kind: str, device: str) -> None:
    g = dt.Graph("case")
    made = write(g, kind)
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        y.output(str(i))
    graph, policy = g.ir(), Policy(cuda_graph=False)
    feed = _feed(graph, device)
    plan = g.compile(device=device, policy=policy)
    with without_kernels():
        other = g.compile(device=device, policy=policy)
    exact = evaluate(graph, feed, float64=True)["0"]
    errors = {
        who: relative_error(p.run(**feed)["0"], exact)
        for who, p in (("by_hand", plan), ("generated", other))
    }
    contenders: dict[str, Any] = {
        "by_hand": lambda: plan.run(**feed),
        "generated": lambda: other.run(**feed),
        "eager": lambda: evaluate(graph, feed),
    }
    if device == "cuda":
        times = replay_times({who: captured(fn) for who, fn in contenders.items()})
    else:
        times = cpu_times(contenders, seconds=1.5)
    ran = "+".join(dict.fromkeys(c.candidate.engine for c in other.decision.choices))
    shown = {who: round(1e3 * ms, 1) for who, ms in times.items()}
    wins = round(times["generated"] / times["by_hand"], 2)
    record.add(
        case=name,
        dtype=kind,
        **shown,
        wins=wins,
        ran=ran,
        error=errors["by_hand"],
        error_generated=errors["generated"],
    )
