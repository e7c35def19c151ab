"""``dt.functional`` against eager torch and torch.compile: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
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
    "Forward, and forward with backward, of calls that fuse two or more operators and of some "
    "that are one. On a GPU: microseconds by CUDA Graph replay, medians of interleaved samples, "
    "and `of_a_copy`, the bytes that must move (inputs, results, gradients, each once) over the "
    "time, as a share of what a copy reaches in the same run; rows marked small are wall time "
    "with launch overhead. On a CPU: wall time, medians in turns with pauses. Errors are relative "
    "(2-norm), results and gradients together, to float64 on the first rows."
)
f = dt.functional
Tensors = list[torch.Tensor]
Fn = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Fn
    theirs: Fn
    results: float = 1  # how many tensors like the first come out
    dtype: torch.dtype = torch.bfloat16
    trains: bool = True  # whether there is a gradient to ask for
    nhwc: bool = False  # whether images have their channels last
    linear: bool = False  # whether the gradient needs no input again


def both(name: str, shapes: tuple[tuple[int, ...], ...], call: Fn, *more: Any, **how: Any) -> Case:
    """A call of a function of one name in both modules."""
    return Case(name, shapes, lambda *t: call(f, *t), lambda *t: call(F, *t), *more, **how)


def cases(rows: int, n: int) -> Iterator[Case]:
    """Transformer-like calls on a matrix [rows, n]."""
    x, w = (rows, n), (n,)
    yield both("rms_norm", (x, w), lambda m, x, w: m.rms_norm(x, (n,), w, 1e-6))
    yield Case(
        "residual+rms_norm",
        (x, w, x),
        lambda x, w, r: f.rms_norm(x, (n,), w, 1e-6, residual=r),
        lambda x, w, r: (F.rms_norm(x + r, (n,), w, 1e-6), x + r),
        2,
    )
    yield both("layer_norm", (x, w, w), lambda m, x, w, b: m.layer_norm(x, (n,), w, b))
    yield Case(
        "residual+layer_norm",
        (x, w, w, x),
        lambda x, w, b, r: f.layer_norm(x, (n,), w, b, residual=r),
        lambda x, w, b, r: (F.layer_norm(x + r, (n,), w, b), x + r),
        2,
    )
    yield Case(
        "layer_norm+gelu",
        (x, w, w),
        lambda x, w, b: f.layer_norm(x, (n,), w, b, activation="gelu"),
        lambda x, w, b: F.gelu(F.layer_norm(x, (n,), w, b)),
    )
    yield Case("softmax", (x,), lambda x: f.softmax(x), lambda x: F.softmax(x, -1))
    yield Case(
        "scaled, masked softmax",
        (x, w),
        lambda x, m: f.softmax(x, mask=m, scale=0.125),
        lambda x, m: F.softmax(x * 0.125 + m, -1),
    )
    yield Case(
        "bias+gelu", (x, w), lambda x, b: f.bias_act(x, b, "gelu"), lambda x, b: F.gelu(x + b)
    )
    yield Case("swiglu", (x, x), lambda g, u: f.swiglu(g, u), lambda g, u: F.silu(g) * u)
    yield Case("geglu", (x, x), lambda g, u: f.geglu(g, u), lambda g, u: F.gelu(g) * u)
    yield Case(
        "bias+dropout+residual",
        (x, w, x),
        lambda x, b, r: f.bias_dropout_residual(x, b, r, 0.1, seed=1),
        lambda x, b, r: r + F.dropout(x + b, 0.1),
    )


def images(batch: int, size: int) -> Iterator[Case]:
    x = (batch, 64, size, size)
    yield Case(
        "group_norm+silu",
        (x, (64,), (64,)),
        lambda x, w, b: f.group_norm(x, 8, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.group_norm(x, 8, w, b)),
    )
    yield Case(
        "instance_norm+relu",
        (x,),
        lambda x: f.instance_norm(x, activation="relu"),
        lambda x: F.relu(F.instance_norm(x)),
    )
    for nhwc in (False, True):
        order = ", nhwc" if nhwc else ""
        yield both(
            f"max_pool2d 3/2{order}",
            (x,),
            lambda m, x: m.max_pool2d(x, 3, 2, 1),
            0.25,
            nhwc=nhwc,
            linear=True,
        )
        yield both(
            f"max_pool2d 2/2{order}",
            (x,),
            lambda m, x: m.max_pool2d(x, 2),
            0.25,
            nhwc=nhwc,
            linear=True,
        )
    yield both(
        "bilinear ×2",
        (x,),
        lambda m, x: m.interpolate(x, scale_factor=2, mode="bilinear"),
        4,
        linear=True,
    )


def resampled(batch: int, size: int) -> Iterator[Case]:
    """Images at another size and means of windows, in both memory orders."""
    x = (batch, 64, size, size)
    ways: tuple[tuple[str, float, dict[str, Any]], ...] = (
        ("bilinear ×2", 2, {"mode": "bilinear"}),
        ("bicubic ×2", 2, {"mode": "bicubic"}),
        ("nearest ×2", 2, {"mode": "nearest"}),
        ("bilinear ×0.5, antialias", 0.5, {"mode": "bilinear", "antialias": True}),
        ("area ×0.5", 0.5, {"mode": "area"}),
    )
    for last in (False, True):
        order = ", channels last" if last else ""
        for name, factor, how in ways[:1] if last else ways[1:]:  # images() has the first
            how = {"scale_factor": factor, **how}
            yield both(
                name + order,
                (x,),
                lambda m, x, how=how: m.interpolate(x, **how),
                factor**2,
                nhwc=last,
                linear=True,
            )
        for window in ((2, 2, 0), (3, 2, 1)):
            name = f"avg_pool2d {window[0]}/{window[1]}{order}"
            yield both(
                name,
                (x,),
                lambda m, x, window=window: m.avg_pool2d(x, *window),
                0.25,
                nhwc=last,
                linear=True,
            )


def singles(rows: int, n: int) -> Iterator[Case]:
    """Functions that torch has as one call, on a matrix [rows, n]."""
    x, w = (rows, n), (n,)
    for name in ("relu", "gelu", "silu", "softplus"):
        yield Case(name, (x,), getattr(f, name), getattr(F, name))
    yield Case("glu", (x,), f.glu, F.glu)
    yield Case("prelu", (x, w), f.prelu, F.prelu)
    yield both("dropout", (x,), lambda m, x: m.dropout(x, 0.1))
    yield Case("log_softmax", (x,), f.log_softmax, lambda x: F.log_softmax(x, -1))
    yield both("embedding", (x,), lambda m, w: m.embedding(_classes(rows, w), w))
    yield Case("sum", (x,), lambda x: f.sum(x, -1), lambda x: x.sum(-1))
    yield Case("mean", (x,), lambda x: f.mean(x, -1), lambda x: x.mean(-1))
    yield Case("var", (x,), lambda x: f.var(x, -1), lambda x: x.var(-1))
    yield Case("amax", (x,), lambda x: f.amax(x, -1), lambda x: x.amax(-1))
    yield Case(
        "norm", (x,), lambda x: f.norm(x, 2.0, -1), lambda x: torch.linalg.vector_norm(x, 2.0, -1)
    )
    yield Case("cumsum", (x,), lambda x: f.cumsum(x, -1), lambda x: x.cumsum(-1))
    yield Case("topk", (x,), lambda x: f.topk(x, 2)[0], lambda x: x.topk(2)[0])
    yield Case(
        "where",
        (x, x),
        lambda x, y: f.where(_even(x), x, y),
        lambda x, y: torch.where(_even(x), x, y),
    )
    yield both("cross_entropy", (x,), lambda m, x: m.cross_entropy(x, _classes(rows, x)))
    yield Case(
        "linear_cross_entropy",
        (x, (10, n)),
        lambda h, w: f.linear_cross_entropy(h, w, _classes(rows, h)),
        lambda h, w: F.cross_entropy(F.linear(h, w), _classes(rows, h)),
    )


def single_images(batch: int, size: int) -> Iterator[Case]:
    """Functions that torch has as one call, on images."""
    x, c = (batch, 64, size, size), (64,)
    yield both("group_norm", (x, c, c), lambda m, x, w, b: m.group_norm(x, 8, w, b))
    yield Case("instance_norm", (x,), f.instance_norm, F.instance_norm)
    yield both(
        "batch_norm, training",
        (x, c, c),
        lambda m, x, w, b: m.batch_norm(x, None, None, w, b, True),
    )
    yield Case(
        "batch_norm+residual+relu, training",
        (x, c, c, x),
        lambda x, w, b, r: f.batch_norm(x, None, None, w, b, True, residual=r, activation="relu"),
        lambda x, w, b, r: F.relu(F.batch_norm(x, None, None, w, b, True) + r),
    )
    yield both("avg_pool2d 2", (x,), lambda m, x: m.avg_pool2d(x, 2))
    yield both("adaptive_avg_pool2d 1", (x,), lambda m, x: m.adaptive_avg_pool2d(x, 1))
    yield both("nearest ×2", (x,), lambda m, x: m.interpolate(x, scale_factor=2))
    yield Case(
        "grid_sample",
        (x, (batch, size, size, 2)),
        f.grid_sample,
        lambda x, g: F.grid_sample(x, g, align_corners=False),
    )
    yield both("pixel_shuffle 2", (x,), lambda m, x: m.pixel_shuffle(x, 2))


@lru_cache
def _classes_on(device: torch.device, rows: int) -> torch.Tensor:
    return torch.arange(rows, device=device) % 8


def _classes(rows: int, like: torch.Tensor) -> torch.Tensor:
    return _classes_on(like.device, rows)


@lru_cache
def _even_on(device: torch.device, shape: torch.Size) -> torch.Tensor:
    return torch.arange(shape.numel(), device=device).reshape(shape) % 2 == 0


def _even(like: torch.Tensor) -> torch.Tensor:
    return _even_on(like.device, like.shape)


def small_cases() -> tuple[Case, ...]:
    """Every call where launches are all there is to pay."""
    return (*cases(8, 64), *singles(8, 64), *images(1, 8), *single_images(1, 8))


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("functional", device, NOTE)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    gpu = device == "cuda"
    big = (
        (*cases(8192, 4096), *cases(8192, 14336), *images(32, 112), *resampled(32, 112))
        if gpu
        else (*cases(1024, 1024), *images(2, 56))
    )
    for case, tiny in ((c, t) for t, group in ((False, big), (True, small_cases())) for c in group):
        if "14336" in str(case.shapes) and case.name not in ("swiglu", "bias+gelu"):
            continue
        if not record.wants(_title(case, tiny)):
            continue
        try:
            (_gpu if gpu else _cpu)(record, case, tiny, compile_peer)
        except Exception as error:
            record.add(
                case=_title(case, tiny), failed=f"{type(error).__name__}: {str(error)[:300]}"
            )
        if gpu:
            torch.cuda.empty_cache()
    return record


def _title(case: Case, tiny: bool) -> str:
    return f"{case.name} {list(case.shapes[0])}" + (" small" if tiny else "")


def tensors_of(case: Case, device: str, dtype: torch.dtype) -> Tensors:
    gen = torch.Generator(device=device).manual_seed(0)
    found = [torch.randn(s, device=device, generator=gen).to(dtype) for s in case.shapes]
    if case.nhwc:
        found = [
            t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in found
        ]
    return [t.requires_grad_() for t in found]


def both_ways(fn: Fn, tensors: Tensors) -> tuple[Fn, Fn]:
    """Forward alone, and forward with backward, as calls without arguments."""
    with torch.no_grad():
        outs = fn(*tensors)
    many = outs if isinstance(outs, tuple) else (outs,)
    grads = [torch.randn_like(o) for o in many if o.is_floating_point()]

    def forward() -> Any:
        with torch.no_grad():
            return fn(*tensors)

    def backward() -> Any:
        found = fn(*tensors)
        return torch.autograd.grad(found if isinstance(found, tuple) else (found,), tensors, grads)

    return forward, backward


def errors(
    case: Case, device: str, dtype: torch.dtype, tiny: bool, rows: int | None = 64
) -> dict[str, float]:
    """Ours and torch's, of results and gradients together; a random mask has no reference."""
    if "dropout" in case.name:
        return {}
    found: dict[str, float] = {}
    exact: list[torch.Tensor] = []
    for name, fn, kind in (
        ("exact", case.theirs, torch.float64),
        ("error", case.ours, dtype),
        ("eager_error", case.theirs, dtype),
    ):
        few = [
            t.detach()[:rows] if t.ndim == 2 else t.detach()
            for t in tensors_of(case, device, dtype)
        ]
        if name == "exact":  # torch's gradient of padded means, channels last, is wrong: #188344
            few = [t.contiguous() for t in few]
        xs = [t.to(kind).requires_grad_() for t in few]
        with f.delegation(tiny):  # the first rows alone might be small enough for torch's call
            out = fn(*xs)
        outs = list(out) if isinstance(out, tuple) else [out]
        gen = torch.Generator(device=device).manual_seed(1)
        seeds = [
            torch.empty_like(o).copy_(torch.randn(o.shape, device=device, generator=gen).to(dtype))
            for o in outs
        ]
        every = [*outs, *(torch.autograd.grad(outs, xs, seeds) if case.trains else ())]
        if name == "exact":
            exact = every
        else:
            found[name] = max(
                relative_error(a.detach(), e.detach()) for a, e in zip(every, exact, strict=True)
            )
    return found


def _moved(case: Case, tensors: Tensors) -> tuple[int, int]:
    """Bytes that must move forward, and forward and backward together."""
    read = sum(t.nbytes for t in tensors)
    made = int(case.results * tensors[0].nbytes)
    again = 0 if case.linear else read
    return read + made, 2 * read + 2 * made + again  # gradients in and out, the inputs again


def _gpu(record: Record, case: Case, tiny: bool, compile_peer: bool) -> None:
    tensors = tensors_of(case, "cuda", case.dtype)
    ways = {"eager": both_ways(case.theirs, tensors), "ours": both_ways(case.ours, tensors)}
    if compile_peer and not tiny:
        torch._dynamo.reset()
        ways["compile"] = both_ways(torch.compile(case.theirs, dynamic=False), tensors)
    row: dict[str, Any] = {"case": _title(case, tiny)}
    if tiny:
        for k, part in enumerate(("fwd", "fwd_bwd")):
            wall = wall_times({name: way[k] for name, way in ways.items()}, calls=50)
            row |= {f"{name}_{part}_us": t * 1e3 for name, t in wall.items()}
            row[f"over_eager_{part}"] = wall["eager"] / wall["ours"]
    else:
        copied = 1 << 29
        moved = _moved(case, tensors)
        for k, part in enumerate(("fwd", "fwd_bwd")):
            graphs = {name: captured(way[k]) for name, way in ways.items()}
            graphs["copy"] = copying(copied)
            times = replay_times(graphs, rounds=7)
            rate = copied / times.pop("copy")
            row |= {f"{name}_{part}_us": t * 1e3 for name, t in times.items()}
            row[f"of_a_copy_{part}"] = moved[k] / times["ours"] / rate
            if "compile" in times:
                row[f"over_compile_{part}"] = times["compile"] / times["ours"]
    record.add(**row, **errors(case, "cuda", case.dtype, tiny))


def _cpu(record: Record, case: Case, tiny: bool, compile_peer: bool) -> None:
    tensors = tensors_of(case, "cpu", torch.float32)
    ways = {"eager": both_ways(case.theirs, tensors), "ours": both_ways(case.ours, tensors)}
    row: dict[str, Any] = {"case": _title(case, tiny)}
    for k, part in enumerate(("fwd", "fwd_bwd")):
        times = cpu_times({name: way[k] for name, way in ways.items()}, seconds=1.5, gap=0.005)
        row |= {f"{name}_{part}_us": t * 1e3 for name, t in times.items()}
        row[f"over_eager_{part}"] = times["eager"] / times["ours"]
    record.add(**row, **errors(case, "cpu", torch.float32, tiny))
