"""The smallest shapes of everything: what a call costs when there is nothing to compute.

``python -m bench.run --device cuda --only small``
"""

from __future__ import annotations

import torch

from bench import augment, functional, optim
from bench.harness import Record, Thunk, cpu_times, wall_times
from deuteron.augment import Pipeline

NOTE = (
    "Wall time per call in microseconds, launches and Python included, queue kept full: functions "
    "of [8, 64] and [1, 64, 8, 8] (bfloat16 on a GPU, float32 on a CPU), a step of an optimiser "
    "over ten tensors of 64 against torch's fused and foreach steps, and augmentation of one 8×8 "
    "image (ours draws its parameters, eager has them at hand). `over_eager` is eager's time over "
    "ours, for an optimiser that of the better of torch's steps."
)


def run(device: str, quick: bool = False, compile_peer: bool = True) -> Record:
    record = Record("small", device, NOTE)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    for case in functional.small_cases():
        try:
            _function(record, case, device)
        except Exception as error:
            record.add(case=case.name, failed=f"{type(error).__name__}: {str(error)[:300]}")
    for name in ("AdamW", "SGD", "Lion"):
        steps = optim._steps(name, 10, 64, device, {})
        times = _times(steps, device)
        peers = [t for way, t in times.items() if way != "ours"]
        row = {f"{way}_us": t for way, t in times.items()}
        if peers:
            row["over_eager"] = min(peers) / times["ours"]
        record.add(case=f"{name} 10×64", **row)
    with torch.no_grad():
        _augmentation(record, device)
    return record


def _times(ways: dict[str, Thunk], device: str) -> dict[str, float]:
    if device == "cuda":
        found = wall_times(ways, rounds=9, calls=40)
    else:
        found = cpu_times({k: _many(fn) for k, fn in ways.items()}, seconds=0.4, gap=0.005)
        found = {k: t / CALLS for k, t in found.items()}
    return {k: t * 1e3 for k, t in found.items()}


CALLS = 50


def _many(fn: Thunk) -> Thunk:
    def calls() -> None:
        for _ in range(CALLS):
            fn()

    return calls


def _function(record: Record, case: functional.Case, device: str) -> None:
    tensors = functional.tensors_of(case, device, case.dtype if device == "cuda" else torch.float32)
    ways = {
        name: functional.both_ways(fn, tensors)
        for name, fn in (("eager", case.theirs), ("ours", case.ours))
    }
    row = {}
    for k, part in enumerate(("fwd", "fwd_bwd")):
        times = _times({name: way[k] for name, way in ways.items()}, device)
        row |= {f"{name}_{part}_us": t for name, t in times.items()}
        row[f"over_eager_{part}"] = times["eager"] / times["ours"]
    record.add(case=case.name, **row)


def _augmentation(record: Record, device: str) -> None:
    aug = Pipeline(augment.PIPELINES["affine+normalise"])
    x = torch.zeros((1, 3, 8, 8), dtype=torch.uint8, device=device)
    eager = augment.composed(aug, x, torch.float32, True)
    times = _times({"eager": lambda: eager(x), "ours": lambda: aug(x)}, device)
    row = {f"{way}_us": t for way, t in times.items()}
    record.add(case="augmentation 1×3×8×8", **row, over_eager=times["eager"] / times["ours"])
