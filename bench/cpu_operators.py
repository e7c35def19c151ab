"""Every memory-bound operator on the CPU, about a million elements of float32 and of bfloat16,
forward and with its gradient, against eager.

``python -m bench.run --device cpu --only cpu_operators``
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench import functional
from bench.functional import Case, Fn, both
from bench.harness import Record, Thunk
from deuteron.functional.explain import RanInstead, Recording
from deuteron.functional.operators import TORCHS

NOTE = (
    "Wall time in microseconds, medians of calls in turns within a sixth of a second; "
    "`over_eager` is eager's time over ours. Where `way` is torch, our function handed the call to "
    "torch's own, and `explain` says so: the ratio is then what handing it on costs; where it "
    "depends on whether a gradient follows, both are named. Errors are "
    "relative (2-norm), results and gradients together, to float64. Measured in several "
    "processes, one after another (`BENCH_PART=1/4` and so on), each row in one of them; where the "
    "code of a few cases changed, these alone were measured again (`BENCH_CASES`, column `again`)."
)
f = dt.functional
Tensor = torch.Tensor


def norms(rows: int, n: int) -> Iterator[Case]:
    x, w = (rows, n), (n,)
    yield Case(
        "bias+residual+layer_norm",
        (x, w, w, w, x),
        lambda x, w, b, p, r: f.layer_norm(x, n, w, b, bias_before=p, residual=r),
        lambda x, w, b, p, r: _with_sum(x + p + r, lambda s: F.layer_norm(s, (n,), w, b)),
        2,
    )
    yield Case(
        "residual+rms_norm+silu",
        (x, w, x),
        lambda x, w, r: f.rms_norm(x, n, w, 1e-6, residual=r, activation="silu"),
        lambda x, w, r: _with_sum(x + r, lambda s: F.silu(F.rms_norm(s, (n,), w, 1e-6))),
        2,
    )


def _with_sum(total: Tensor, norm: Fn) -> tuple[Tensor, Tensor]:
    return norm(total), total


def image_norms(batch: int, size: int) -> Iterator[Case]:
    x, c = (batch, 64, size, size), (64,)
    yield Case(
        "residual+group_norm+silu",
        (x, c, c, x),
        lambda x, w, b, r: f.group_norm(x, 8, w, b, residual=r, activation="silu"),
        lambda x, w, b, r: _with_sum(x + r, lambda s: F.silu(F.group_norm(s, 8, w, b))),
        2,
    )
    yield Case(
        "batch_norm+relu, training",
        (x, c, c),
        lambda x, w, b: f.batch_norm(x, None, None, w, b, True, activation="relu"),
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)),
    )
    yield both(
        "batch_norm, given statistics",
        (x, c, c),
        lambda m, x, w, b: m.batch_norm(x, _zeros(64, x), _ones(64, x), w, b),
    )
    yield Case(
        "batch_norm+residual+relu, given statistics",
        (x, c, c, x),
        lambda x, w, b, r: f.batch_norm(
            x, _zeros(64, x), _ones(64, x), w, b, residual=r, activation="relu"
        ),
        lambda x, w, b, r: F.relu(F.batch_norm(x, _zeros(64, x), _ones(64, x), w, b) + r),
    )


def channels_last(batch: int, size: int) -> Iterator[Case]:
    x, c = (batch, 64, size, size), (64,)
    for case in (
        both(
            "batch_norm, training, nhwc",
            (x, c, c),
            lambda m, x, w, b: m.batch_norm(x, None, None, w, b, True),
        ),
        Case(
            "batch_norm+residual+relu, training, nhwc",
            (x, c, c, x),
            lambda x, w, b, r: f.batch_norm(
                x, None, None, w, b, True, residual=r, activation="relu"
            ),
            lambda x, w, b, r: F.relu(F.batch_norm(x, None, None, w, b, True) + r),
        ),
        both("group_norm, nhwc", (x, c, c), lambda m, x, w, b: m.group_norm(x, 32, w, b)),
        Case(
            "residual+group_norm+silu, nhwc",
            (x, c, c, x),
            lambda x, w, b, r: f.group_norm(x, 32, w, b, residual=r, activation="silu"),
            lambda x, w, b, r: _with_sum(x + r, lambda s: F.silu(F.group_norm(s, 32, w, b))),
            2,
        ),
        both(
            "instance_norm, nhwc",
            (x, c, c),
            lambda m, x, w, b: m.instance_norm(x, None, None, w, b),
        ),
    ):
        yield replace(case, nhwc=True)


def softmaxes(rows: int, n: int) -> Iterator[Case]:
    x = (rows, n)
    yield Case(
        "masked softmax",
        (x,),
        lambda x: f.softmax(x, mask=_causal(x), scale=0.125),
        lambda x: F.softmax((x * 0.125).masked_fill(~_causal(x), -torch.inf), -1),
    )
    yield Case(
        "scaled, masked log_softmax",
        (x, (n,)),
        lambda x, m: f.log_softmax(x, mask=m, scale=0.125),
        lambda x, m: F.log_softmax(x * 0.125 + m, -1),
    )
    yield both("softmax of columns", (x,), lambda m, x: m.softmax(x, 0))
    yield Case(
        "softmax, long rows",
        ((4, rows * n // 4),),
        lambda x: f.softmax(x),
        lambda x: F.softmax(x, -1),
    )


def losses(rows: int, n: int) -> Iterator[Case]:
    x = (rows, n)
    yield both(
        "cross_entropy, smoothed",
        (x,),
        lambda m, x: m.cross_entropy(x, _classes(x), label_smoothing=0.1),
    )
    yield both(
        "cross_entropy, weighted, ignoring",
        (x, (n,)),
        lambda m, x, w: (
            m.cross_entropy(x, _classes(x), w.detach().abs(), ignore_index=3) + 0 * w.sum()
        ),
    )
    yield Case(
        "cross_entropy+z_loss",
        (x,),
        lambda x: f.cross_entropy(x, _classes(x), z_loss=1e-4),
        lambda x: F.cross_entropy(x, _classes(x)) + 1e-4 * x.logsumexp(-1).square().mean(),
    )
    yield both("cross_entropy, soft targets", (x,), lambda m, x: m.cross_entropy(x, _soft(x)))
    yield Case(
        "linear+cross_entropy",
        ((rows // 4, n // 4), (n * 4, n // 4)),
        lambda h, w: f.linear_cross_entropy(h, w, _classes(h)),
        lambda h, w: F.cross_entropy(F.linear(h, w), _classes(h)),
    )


def gates(rows: int, n: int) -> Iterator[Case]:
    x, w = (rows, n), (n,)
    done = ("relu", "gelu", "silu", "softplus")
    for name in TORCHS:
        if hasattr(f, name) and name not in done:
            yield Case(name, (x,), getattr(f, name), TORCHS[name])
    yield Case("softsign", (x,), f.softsign, F.softsign)
    yield Case("tanhshrink", (x,), f.tanhshrink, F.tanhshrink)
    yield Case(
        "bias+relu", (x, w), lambda x, b: f.bias_act(x, b, "relu"), lambda x, b: F.relu(x + b)
    )
    yield Case(
        "bias+silu", (x, w), lambda x, b: f.bias_act(x, b, "silu"), lambda x, b: F.silu(x + b)
    )
    yield Case("reglu", (x, x), lambda g, u: f.reglu(g, u), lambda g, u: F.relu(g) * u)
    yield Case(
        "swiglu of halves",
        (x,),
        lambda x: f.swiglu(x),
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    )


def positions(rows: int, n: int) -> Iterator[Case]:
    q, k = (2, rows // 8, 16, n // 8), (2, rows // 8, 4, n // 8)
    yield Case(
        "rope of q and k",
        (q, k),
        lambda q, k: f.rope(q, k, *_angles(q)),
        lambda q, k: (_rope(q, *_angles(q)), _rope(k, *_angles(q))),
    )
    yield Case(
        "rope of q and k, interleaved",
        (q, k),
        lambda q, k: f.rope(q, k, *_angles(q), interleaved=True),
        lambda q, k: (_rope_pairs(q, *_angles(q)), _rope_pairs(k, *_angles(q))),
    )
    table = (rows, n)
    yield Case(
        "embedding+position",
        (table, (256, n)),
        lambda w, p: f.embedding(_tokens(rows), w, position=p),
        lambda w, p: F.embedding(_tokens(rows), w) + p,
    )
    yield both("embedding of 1024 tokens", (table,), lambda m, w: m.embedding(_tokens(rows), w))


def pools(batch: int, size: int) -> Iterator[Case]:
    x = (batch, 64, size, size)
    yield both("max_pool2d 2", (x,), lambda m, x: m.max_pool2d(x, 2))
    yield both(
        "max_pool2d 3/2 with indices",
        (x,),
        lambda m, x: m.max_pool2d(x, 3, 2, 1, return_indices=True)[0],
    )
    yield both("max_pool2d 3/2, nhwc", (x,), lambda m, x: m.max_pool2d(_nhwc(x), 3, 2, 1))
    yield both("avg_pool2d 3/2", (x,), lambda m, x: m.avg_pool2d(x, 3, 2, 1))
    yield both("adaptive_avg_pool2d 7", (x,), lambda m, x: m.adaptive_avg_pool2d(x, 7))
    yield both("adaptive_max_pool2d 7", (x,), lambda m, x: m.adaptive_max_pool2d(x, 7))
    yield Case("global_avg_pool", (x,), f.global_avg_pool, lambda x: x.mean((2, 3), True))
    yield Case("global_max_pool", (x,), f.global_max_pool, lambda x: x.amax((2, 3), True))
    yield Case(
        "weighted_pool2d 3/2",
        (x, (64, 3, 3)),
        lambda x, w: f.weighted_pool2d(x, w, 2, 1),
        lambda x, w: F.conv2d(x, w[:, None], None, 2, 1, groups=64),
    )
    for kind in ("avg", "max"):
        yield Case(
            f"pyramid_pool2d {kind}",
            (x,),
            lambda x, kind=kind: f.pyramid_pool2d(x, (1, 2, 3, 6), kind),
            lambda x, kind=kind: _pyramid(x, kind),
        )


def resampling(batch: int, size: int) -> Iterator[Case]:
    x = (batch, 64, size, size)
    ways: dict[str, dict[str, Any]] = {
        "bilinear ×2, aligned": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
        "bilinear ÷2": {"scale_factor": 0.5, "mode": "bilinear"},
        "bilinear ÷2, antialiased": {"scale_factor": 0.5, "mode": "bilinear", "antialias": True},
        "bicubic ×2": {"scale_factor": 2, "mode": "bicubic"},
        "bicubic ÷2, antialiased": {"scale_factor": 0.5, "mode": "bicubic", "antialias": True},
        "area ÷2": {"scale_factor": 0.5, "mode": "area"},
        "nearest-exact ×2": {"scale_factor": 2, "mode": "nearest-exact"},
    }
    for name, given in ways.items():
        yield both(
            name, (x,), lambda m, x, given=given: m.interpolate(x, **given), 4 if "×" in name else 1
        )
    yield both("pixel_unshuffle 2", (x,), lambda m, x: m.pixel_unshuffle(x, 2))
    for mode in ("nearest", "bicubic"):
        yield Case(
            f"grid_sample {mode}",
            (x, (batch, size, size, 2)),
            lambda x, g, mode=mode: f.grid_sample(x, g, mode),
            lambda x, g, mode=mode: F.grid_sample(x, g, mode, align_corners=False),
        )


def reductions(rows: int, n: int) -> Iterator[Case]:
    x = (rows, n)
    for name in ("sum", "mean", "amax"):
        ours, theirs = getattr(f, name), getattr(torch, name)
        yield Case(
            f"{name} of columns", (x,), lambda x, o=ours: o(x, 0), lambda x, t=theirs: t(x, 0)
        )
    yield Case("sum of all", (x,), lambda x: f.sum(x), lambda x: x.sum())
    yield Case("var of columns", (x,), lambda x: f.var(x, 0), lambda x: x.var(0))
    yield Case("norm of all", (x,), lambda x: f.norm(x), lambda x: torch.linalg.vector_norm(x))
    yield Case(
        "norm 1 of all", (x,), lambda x: f.norm(x, 1.0), lambda x: torch.linalg.vector_norm(x, 1.0)
    )
    yield Case("prod", (x,), lambda x: f.prod(x, -1), lambda x: x.prod(-1))
    yield Case("argmax", (x,), lambda x: f.argmax(x, -1), lambda x: x.argmax(-1), trains=False)
    yield Case("cumsum of columns", (x,), lambda x: f.cumsum(x, 0), lambda x: x.cumsum(0))
    yield Case("cumprod", (x,), lambda x: f.cumprod(x, -1), lambda x: x.cumprod(-1))
    yield Case("cummax", (x,), lambda x: f.cummax(x, -1)[0], lambda x: x.cummax(-1)[0])
    yield Case("sort", (x,), lambda x: f.sort(x)[0], lambda x: torch.sort(x, stable=True)[0])
    yield Case(
        "histogram",
        (x,),
        lambda x: f.histogram(x, 100, -3, 3),
        lambda x: torch.histc(x, 100, -3, 3),
        trains=False,
    )
    yield Case(
        "permute",
        ((rows // 8, 8, n),),
        lambda x: f.permute(x, (1, 2, 0)),
        lambda x: x.permute(1, 2, 0).contiguous(),
    )


# ---- what the cases are given besides random tensors


@lru_cache
def _filled(value: float, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((n,), value, dtype=dtype)


def _zeros(n: int, like: Tensor) -> Tensor:
    return _filled(0.0, n, like.dtype)


def _ones(n: int, like: Tensor) -> Tensor:
    return _filled(1.0, n, like.dtype)


@lru_cache
def _triangle(rows: int, n: int) -> Tensor:
    return torch.ones(rows, n, dtype=torch.bool).tril()


def _causal(x: Tensor) -> Tensor:
    return _triangle(*x.shape)


@lru_cache
def _numbers(n: int) -> Tensor:
    return torch.arange(n) % 8


def _classes(x: Tensor) -> Tensor:
    return _numbers(x.shape[0])


@lru_cache
def _shares(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    gen = torch.Generator().manual_seed(5)
    return torch.rand(shape, generator=gen, dtype=torch.float64).softmax(-1).to(dtype)


def _soft(x: Tensor) -> Tensor:
    return _shares(x.shape, x.dtype)


@lru_cache
def _tokens(rows: int) -> Tensor:
    gen = torch.Generator().manual_seed(6)
    return torch.randint(0, rows // 2, (rows // 256, 256), generator=gen)


@lru_cache
def _angle_tables(length: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pace = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * pace
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _angles(q: Tensor) -> tuple[Tensor, Tensor]:
    return _angle_tables(q.shape[1], q.shape[3] // 2, q.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models write it: x · cos + rotate_half(x) · sin."""
    a, b = x.chunk(2, -1)
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (cos, sin))
    return x * cos + torch.cat((-b, a), -1) * sin


def _rope_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _nhwc(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _pyramid(x: Tensor, kind: str) -> Tensor:
    pool: Any = {"avg": F.adaptive_avg_pool2d, "max": F.adaptive_max_pool2d}[kind]
    return torch.cat([pool(x, size).flatten(2) for size in (1, 2, 3, 6)], 2)


# ---- the measurement


def all_cases() -> Iterator[Case]:
    rows, n, batch, size = 1024, 1024, 4, 64
    for made in (
        functional.cases,
        norms,
        softmaxes,
        losses,
        gates,
        positions,
        functional.singles,
        reductions,
    ):
        yield from made(rows, n)
    for made in (
        functional.images,
        functional.single_images,
        image_norms,
        channels_last,
        pools,
        resampling,
    ):
        yield from made(batch, size)


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("cpu_operators", device, NOTE)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    part, parts = map(int, os.environ.get("BENCH_PART", "1/1").split("/"))
    cases = [replace(c, dtype=t) for c in all_cases() for t in (torch.float32, torch.bfloat16)]
    cases = [c for c in cases if c.dtype != torch.bfloat16 or not _without_eager(c.name)]
    if part > 1:  # the rows of the parts before are on file
        record.read()
    cases = [c for c in cases if record.wants(c.name)]
    for case in cases[(part - 1) * len(cases) // parts : part * len(cases) // parts]:
        _measure(record, case)
    return record


def _without_eager(name: str) -> bool:
    """What torch 2.13 has no bfloat16 kernel for on a CPU, or one whose gradient dies of an illegal
    instruction on a Neoverse-N1 (nearest-exact)."""
    return name == "nearest-exact ×2" or "antialias" in name


def _measure(record: Record, case: Case) -> None:
    kind = {torch.float32: "f32", torch.bfloat16: "bf16"}[case.dtype]
    row: dict[str, Any] = {"case": case.name, "dtype": kind}
    try:
        tensors = functional.tensors_of(case, "cpu", case.dtype)
        ways = {
            "eager": functional.both_ways(case.theirs, tensors),
            "ours": functional.both_ways(case.ours, tensors),
        }
        taken = [_taken(call) for call in ways["ours"][: 1 + case.trains]]
        row["way"] = taken[0] if len(set(taken)) == 1 else f"{taken[0]}, to train {taken[1]}"
        for k, part in enumerate(("fwd", "fwd_bwd") if case.trains else ("fwd",)):
            times = medians({name: way[k] for name, way in ways.items()})
            row |= {f"{name}_{part}_us": t * 1e6 for name, t in times.items()}
            row[f"over_eager_{part}"] = times["eager"] / times["ours"]
        row |= functional.errors(case, "cpu", case.dtype, tiny=True, rows=None)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:100]}"
    record.add(**row)


def _taken(call: Thunk) -> str:
    """Whose function answers: any of torch's is torch."""
    with Recording() as heard:
        call()
    return "torch" if any(isinstance(part, RanInstead) for part in heard) else "ours"


def medians(calls: dict[str, Thunk], seconds: float = 0.15) -> dict[str, float]:
    """Seconds of a call, in turns; the first three are not counted."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while len(samples["ours"]) < 8 or time.perf_counter() < end:
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - begin)
        if sum(map(sum, samples.values())) > 4.0:
            break
    return {name: statistics.median(times[3:] or times) for name, times in samples.items()}
