"""Optimisers: one launch for all tensors, against PyTorch's for-loop, foreach and fused steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times

NOTE = (
    "One step. On the GPU `us` is GPU time by CUDA Graph replay (capturable), in turns; "
    "`wall_us` is a plain step() with the queue kept full, host work included. `of_a_copy` is the "
    "time of a copy of as many bytes over ours; `ratio` the best of PyTorch's over ours; `error` "
    "and `torch_error` are relative (2-norm) to float64 of the change that three steps make to "
    "the first tensor (Lion's are signs that rounding turned; the 8-bit state's is held against "
    "AdamW). torch's Adafactor reads norms on the host, so it has a wall time only."
)
# of fp32 parameters; Adafactor's are matrices of 256 columns
BYTES = {"AdamW": 28, "SGD": 20, "Lion": 20, "LAMB": 40, "Adafactor": 24, "AdamW8bit": 16}
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}
Step = Callable[[], Any]

# name of the case, number of tensors, elements of each
GPU_SIZES = (
    ("100 M in 300", 300, 333_333),
    ("16 M in 4", 4, 1 << 22),
    ("tiny 10×64", 10, 64),
    ("tiny 300×1000", 300, 1000),
)
CPU_SIZES = (
    ("10 M in 100", 100, 100_003),
    ("12 M in 3", 3, 4_000_000),
    ("300 K in 300", 300, 1000),
    ("tiny 10×64", 10, 64),
)


def _sizes(count: int, each: int) -> list[int]:
    """Every third is a multiple of 16, as in a network; the others divide by nothing."""
    return [each if i % 3 or each < 1000 else each // 16 * 16 for i in range(count)]


def _params(
    name: str, count: int, each: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    made = [torch.randn(n, device=device).to(dtype) for n in _sizes(count, each)]
    if name == "Adafactor":
        made = [p[: p.numel() // 256 * 256].view(-1, 256) if len(p) >= 256 else p for p in made]
    for p in made:
        p.requires_grad_()
        p.grad = torch.randn_like(p)
    return made


def _change(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, device: str) -> Any:
    """What three steps do to a tensor; start and gradients are values of float32."""
    gen = torch.Generator().manual_seed(0)
    p = torch.randn(10_007, generator=gen).to(device, dtype).requires_grad_()
    before, optimizer = p.detach().clone(), make([p])
    for _ in range(3):
        p.grad = torch.randn(10_007, generator=gen).to(device, dtype)
        optimizer.step()
    return p.detach() - before


def _peers(name: str) -> dict[str, dict[str, Any]]:
    if name == "Adafactor":
        return {"loop": {"foreach": False}, "foreach": {"foreach": True}}
    if name not in ("AdamW", "SGD"):
        return {}
    return {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _errors(name: str, device: str) -> dict[str, float]:
    given = OPTIONS.get(name, {})

    def ours(params: Any) -> torch.optim.Optimizer:
        return getattr(dt.optim, name)(params, **given)  # type: ignore[no-any-return]

    if name in ("AdamW", "SGD", "Adafactor"):
        theirs = getattr(torch.optim, name)
        exact = _change(lambda params: theirs(params, **given), torch.float64, "cpu")
        plain = _change(lambda params: theirs(params, **given), torch.float32, device)
        torch_error = relative_error(plain.cpu(), exact)
    else:  # the 8-bit state is compared with AdamW's, the others with themselves in float64
        reference = "AdamW" if name == "AdamW8bit" else name
        make = getattr(dt.optim, reference)
        exact = _change(lambda params: make(params, **given), torch.float64, "cpu")
        torch_error = float("nan")
    off = relative_error(_change(ours, torch.float32, device).cpu(), exact)
    return {"error": off, "torch_error": torch_error}


def _steps(name: str, count: int, each: int, device: str, extra: dict[str, Any]) -> dict[str, Step]:
    """A step of ours, and of each peer, on tensors of their own."""
    given = OPTIONS.get(name, {})
    made: dict[str, Step] = {}
    for way, more in {"ours": {}, **_peers(name)}.items():
        if way == "loop" and device == "cuda":
            continue
        home = dt.optim if way == "ours" else torch.optim
        params = _params(name, count, each, device, torch.float32)
        kept = {k: v for k, v in extra.items() if name not in ("SGD", "Adafactor")}
        made[way] = getattr(home, name)(params, **given, **more, **kept).step
    return made


def _gpu_times(name: str, count: int, each: int, moved: int) -> dict[str, float]:
    """GPU milliseconds of a copy, of ours and of the peers; their tensors are gone afterwards."""
    source = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    steps = _steps(name, count, each, "cuda", {"capturable": True})
    if name == "Adafactor":  # torch's own reads norms on the host, so it cannot be captured
        steps = {"ours": steps["ours"]}
    graphs = {way: captured(step) for way, step in steps.items()}
    return replay_times({"copy": captured(lambda: target.copy_(source)), **graphs})


def _on_gpu(record: Record, name: str, label: str, count: int, each: int) -> None:
    moved = BYTES[name] * sum(_sizes(count, each))
    times = _gpu_times(name, count, each, moved)
    torch.cuda.empty_cache()
    wall = wall_times(_steps(name, count, each, "cuda", {}), calls=20)
    torch.cuda.empty_cache()
    peers = [times[k] for k in ("foreach", "fused") if k in times]
    record.add(
        optimizer=name,
        case=label,
        us=times["ours"] * 1e3,
        **{f"{k}_us": times[k] * 1e3 for k in ("foreach", "fused") if k in times},
        copy_us=times["copy"] * 1e3,
        tb_per_s=moved / times["ours"] / 1e9,
        of_a_copy=times["copy"] / times["ours"],
        ratio=min(peers) / times["ours"] if peers else float("nan"),
        wall_us=wall["ours"] * 1e3,
        **{f"{k}_wall_us": wall[k] * 1e3 for k in ("foreach", "fused") if k in wall},
        **_errors(name, "cuda"),
    )


def _on_cpu(record: Record, name: str, label: str, count: int, each: int) -> None:
    moved = BYTES[name] * sum(_sizes(count, each))
    source, target = (torch.zeros(max(moved // 2, 1), dtype=torch.uint8) for _ in range(2))
    steps = _steps(name, count, each, "cpu", {})
    times = cpu_times({"copy": lambda: target.copy_(source), **steps})
    peers = [times[k] for k in ("loop", "foreach", "fused") if k in times]
    record.add(
        optimizer=name,
        case=label,
        ms=times["ours"],
        **{f"{k}_ms": times[k] for k in ("loop", "foreach", "fused") if k in times},
        copy_ms=times["copy"],
        gb_per_s=moved / times["ours"] / 1e6,
        of_a_copy=times["copy"] / times["ours"],
        ratio=min(peers) / times["ours"] if peers else float("nan"),
        **_errors(name, "cpu"),
    )


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("optim", device, NOTE)
    names = ("AdamW", "SGD", "Lion", "LAMB", "Adafactor", "AdamW8bit")
    for label, count, each in GPU_SIZES if device == "cuda" else CPU_SIZES:
        for name in names:
            (_on_gpu if device == "cuda" else _on_cpu)(record, name, label, count, each)
    return record
