"""Augmentation in one kernel against the same steps composed from PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times
from deuteron.augment import (
    ColorJitter,
    HorizontalFlip,
    Normalize,
    Pipeline,
    RandomAffine,
    RandomResizedCrop,
    ToDtype,
    ToLayout,
)

NOTE = (
    "uint8 images to float16 NHWC (forward+backward: float32). `eager` and `compile` are the same "
    "steps composed from torch operators (affine_grid, grid_sample, torchvision's colours), "
    "with parameters drawn beforehand and on the device; `ours` is one pipeline. GPU: µs by CUDA "
    "Graph replay, and `wall` per call with launches, for ours with drawing. CPU: µs per call, for "
    "ours with drawing. `error` is relative to float64 (norm), `torch_error` that of eager."
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JITTER, NORMAL = ColorJitter(0.4, 0.4, 0.4, 0.1), Normalize(MEAN, STD)
LAST = (NORMAL, ToDtype(torch.float16), ToLayout("nhwc"))
AFFINE = RandomAffine(10, (0.1, 0.1), (0.9, 1.1), 5)

PIPELINES: dict[str, tuple[Any, ...]] = {
    "affine+jitter+normalise": (AFFINE, JITTER, *LAST),
    "affine+normalise": (AFFINE, *LAST),
    "crop+flip+jitter+normalise": (RandomResizedCrop(224), HorizontalFlip(), JITTER, *LAST),
}
GPU_CASES = (
    ("affine+jitter+normalise", (256, 3, 224, 224)),
    ("affine+jitter+normalise", (32, 3, 224, 224)),
    ("affine+jitter+normalise", (4, 3, 1024, 1024)),
    ("affine+normalise", (256, 3, 224, 224)),
    ("crop+flip+jitter+normalise", (256, 3, 256, 256)),
    ("affine+jitter+normalise", (1, 3, 32, 32)),
    ("affine+normalise", (1, 3, 8, 8)),
)
CPU_CASES = (
    ("affine+jitter+normalise", (16, 3, 224, 224)),
    ("affine+normalise", (16, 3, 224, 224)),
    ("crop+flip+jitter+normalise", (16, 3, 256, 256)),
    ("affine+jitter+normalise", (1, 3, 32, 32)),
)


# ---- the peer: plain torch


def _grey(x: torch.Tensor) -> torch.Tensor:
    r, g, b = x.unbind(1)
    return (0.2989 * r + 0.587 * g + 0.114 * b).unsqueeze(1)


def _turn_hue(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    r, g, b = x.unbind(1)
    top, low = x.amax(1), x.amin(1)
    spread = top - low
    whole = torch.where(spread == 0, 1.0, spread)
    sixths = torch.where(
        top == r, (g - b) / whole, torch.where(top == g, 2 + (b - r) / whole, 4 + (r - g) / whole)
    )
    hue = (sixths / 6 + turn) % 1
    saturation = spread / torch.where(top == 0, 1.0, top)
    sector = torch.floor(hue * 6)
    f = hue * 6 - sector
    p, q, t = (top * (1 - saturation), top * (1 - saturation * f), top * (1 - saturation * (1 - f)))
    sector = sector.long() % 6
    rows = ((top, t, p), (q, top, p), (p, top, t), (p, q, top), (t, p, top), (top, p, q))
    out = torch.stack(rows[0], 1)
    for k in range(1, 6):
        out = torch.where((sector == k).unsqueeze(1), torch.stack(rows[k], 1), out)
    return out


def composed(aug: Pipeline, x: torch.Tensor, kind: torch.dtype, half: bool) -> Callable[..., Any]:
    """The pipeline in torch operators, its parameters of step 0 at hand on the device."""
    size = (x.shape[2], x.shape[3])
    drawn = {
        k.split(".", 1)[-1]: v.to(x.device, kind)
        for k, v in aug.parameters_for(x.shape[0], 0, size).items()
    }
    shape = [x.shape[0], 3, *aug.spec.result_size(size)]
    matrix = drawn["matrix"][:, :2].contiguous()
    numbers = [drawn[k][:, None, None, None] for k in drawn if k.endswith(".factor")]
    turn = next((v[:, None, None] for k, v in drawn.items() if k.endswith(".turn")), None)
    mean, std = (torch.tensor(v, dtype=kind, device=x.device)[:, None, None] for v in (MEAN, STD))
    padding = aug.spec.padding

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.to(kind) / 255 if x.dtype == torch.uint8 else x.to(kind)
        grid = F.affine_grid(matrix, shape, align_corners=False)
        y = F.grid_sample(y, grid, padding_mode=padding, align_corners=False)
        if numbers:
            brightness, contrast, saturation = numbers
            y = (y * brightness).clamp(0, 1)
            middle = _grey(y).mean((1, 2, 3), keepdim=True)
            y = (y * contrast + (1 - contrast) * middle).clamp(0, 1)
            y = (y * saturation + (1 - saturation) * _grey(y)).clamp(0, 1)
            y = _turn_hue(y, turn)
        y = (y - mean) / std
        return y.to(torch.float16, memory_format=torch.channels_last) if half else y

    return call


# ---- the measurement


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("augment", device, NOTE)
    for name, shape in GPU_CASES if device == "cuda" else CPU_CASES:
        torch.manual_seed(0)
        with torch.no_grad():
            try:
                _measure(record, name, shape, device, compile_peer)
            except Exception as error:
                record.add(case=name, failed=f"{type(error).__name__}: {str(error)[:300]}")
    _measure_training(record, (64 if device == "cuda" else 4, 3, 224, 224), device)
    return record


def _row(name: str, shape: tuple[int, ...], got: Any, eager: Any, exact: Any) -> dict[str, Any]:
    error, torch_error = relative_error(got, exact), relative_error(eager, exact)
    if error > 2 * torch_error + 1e-5:
        raise AssertionError(f"{name}: error {error:.3g}, torch's own {torch_error:.3g}")
    return {
        "case": name,
        "images": "×".join(map(str, shape)),
        "error": error,
        "torch_error": torch_error,
    }


def _measure(
    record: Record, name: str, shape: tuple[int, ...], device: str, compile_peer: bool
) -> None:
    aug = Pipeline(PIPELINES[name])
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    eager = composed(aug, x, torch.float32, True)
    few = x[:4]
    exact = composed(aug, few, torch.float64, False)(few)
    table = aug.table(x, step=0).clone()
    row = _row(name, shape, aug.with_table(x, table)[:4], eager(x)[:4], exact)
    peers: dict[str, Callable[[], Any]] = {"eager": lambda: eager(x)}
    if compile_peer:
        torch._dynamo.reset()
        made = torch.compile(eager, dynamic=False)
        made(x)
        peers["compile"] = lambda: made(x)
    if device == "cpu":
        times = cpu_times({**peers, "ours": lambda: aug(x)}, seconds=3.0)
        row |= {f"{k}_us": v * 1e3 for k, v in times.items()}
    else:
        graphs = {k: captured(fn) for k, fn in peers.items()}
        graphs["ours"] = captured(lambda: aug.with_table(x, table))
        row |= {f"{k}_us": v * 1e3 for k, v in replay_times(graphs).items()}
        walls = wall_times({**peers, "ours": lambda: aug(x)})
        row |= {f"{k}_wall_us": v * 1e3 for k, v in walls.items()}
        moved = x.nbytes * (eager(x).numel() / x.numel() * 2 + 1)
        row["tb_per_s"] = moved / row["ours_us"] / 1e6
    record.add(**row, speedup=row["eager_us"] / row["ours_us"])


def _measure_training(record: Record, shape: tuple[int, ...], device: str) -> None:
    name = "affine+jitter+normalise, float32, forward+backward"
    aug = Pipeline([AFFINE, JITTER, NORMAL])
    x = torch.rand(shape, device=device, requires_grad=True)
    table, eager = aug.table(x, step=0), composed(aug, x, torch.float32, False)
    seed = torch.randn_like(x)

    def grad(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: torch.autograd.grad(fn(x), x, seed)[0]

    calls = {"eager": grad(eager), "ours": grad(lambda v: aug.with_table(v, table))}
    exact = grad(composed(aug, x, torch.float64, False))()
    # clamp and hue have corners, where the slope of the other side is right as well
    off = {
        k: float(((fn() - exact).abs() > 1e-2 * exact.abs().max()).double().mean())
        for k, fn in calls.items()
    }
    if off["ours"] > 2 * off["eager"] + 1e-4:
        raise AssertionError(f"{name}: {off} of the elements are off")
    times = cpu_times(calls, seconds=3.0) if device == "cpu" else wall_times(calls)
    suffix = "us" if device == "cpu" else "wall_us"
    row = {f"{k}_{suffix}": v * 1e3 for k, v in times.items()}
    ratio = times["eager"] / times["ours"]
    record.add(case=name, images="×".join(map(str, shape)), **row, speedup=ratio)
