"""The smallest shapes of everything: what a call costs when there is nothing to compute.

``python -m bench.run --device cuda --only small``
"""

from __future__ import annotations

from typing import Any

import torch

import deuteron as dt
from bench import augment, functional, optim
from bench.functional import Fn
from bench.harness import Record, Samples, Thunk, cpu_samples, medians, over, wall_samples
from bench.small_cases import every_case, modules
from deuteron.augment import Pipeline

NOTE = (
    "Wall time per call in microseconds, launches and Python included, queue kept full, medians of "
    "samples in turns of random order, 20 calls each: functions and modules of "
    "[8, 64] and [1, 64, 8, 8] (bfloat16 on a GPU, float32 on a CPU), a step of an optimiser over "
    "ten tensors of 64 against torch's fused and foreach steps, and augmentation of one 8×8 image "
    "(ours draws its parameters, eager has them at hand). Modules are called nn.…, eager's is "
    "torch's of the same name. `over_eager` is eager's time over ours, for an optimiser that of "
    "the better of torch's steps, the median of the rounds; `eager_again` is the same for "
    "eager's own call, measured a second time among the others: as far as it strays from 1 nothing "
    "can be said."
)
OPTIMISERS = ("AdamW", "SGD", "Lion", "LAMB", "Adafactor", "AdamW8bit")
CALLS = 50  # of a turn on a CPU, where each is followed by a pause


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("small", device, NOTE)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    for case in every_case():
        _attempt(record, case.name, _function, case, device)
    for name, make, shape in modules():
        _attempt(record, f"nn.{name}", _module, make, shape, device)
    for name in OPTIMISERS:
        _attempt(record, f"{name} 10×64", _optimiser, name, device)
    with torch.no_grad():
        _attempt(record, "augmentation 1×3×8×8", _augmentation, device)
    return record


def _attempt(record: Record, name: str, measure: Fn, *args: Any) -> None:
    if not record.wants(name):
        return
    try:
        record.add(case=name, **measure(*args))
    except Exception as error:
        record.add(case=name, failed=f"{type(error).__name__}: {str(error)[:300]}")


def _samples(ways: dict[str, Thunk], device: str, rounds: int = 100) -> Samples:
    """Microseconds. Turns on a GPU are short and many, half a millisecond each and a few with
    backward: a host is slow now and then, for longer than that. A turn of 5 calls would measure how
    long Python takes that nobody has run for a while: swiglu, 1.02 to 1.13 times as quick as eager
    in turns of 20 on an H200's host, was 1.01 to 1.06 times as quick in those. It would be unfair
    as well, since eager has two turns of three."""
    if device == "cuda":
        return _scaled(wall_samples(ways, rounds=rounds, calls=20), 1e3)
    many = {k: _many(fn) for k, fn in ways.items()}
    return _scaled(cpu_samples(many, seconds=0.5, gap=0.005), 1e3 / CALLS)


def _scaled(samples: Samples, by: float) -> Samples:
    return {name: [t * by for t in times] for name, times in samples.items()}


def _many(fn: Thunk) -> Thunk:
    def calls() -> None:
        for _ in range(CALLS):
            fn()

    return calls


def _function(case: functional.Case, device: str) -> dict[str, float]:
    tensors = functional.tensors_of(case, device, case.dtype if device == "cuda" else torch.float32)
    ways = {
        name: functional.both_ways(fn, tensors)
        for name, fn in (("eager", case.theirs), ("ours", case.ours), ("again", case.theirs))
    }
    return _parts(ways, case.ours(*tensors), device)


def _module(make: Fn, shape: tuple[int, ...], device: str) -> dict[str, float]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = {name: make(home).to(device, dtype) for name, home in HOMES.items()}
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=bool(shape))
    tensors = {name: [*([x] if shape else []), *m.parameters()] for name, m in made.items()}
    ways = {
        name: functional.both_ways(lambda *_, m=m: m(x), tensors[name]) for name, m in made.items()
    }
    return _parts(ways, made["ours"](x), device)


HOMES = {"eager": torch.nn, "ours": dt.nn, "again": torch.nn}


def _parts(ways: dict[str, tuple[Thunk, Thunk]], result: Any, device: str) -> dict[str, float]:
    """Forward alone, and with backward where there is a gradient."""
    many = result if isinstance(result, tuple) else (result,)
    parts = ("fwd", "fwd_bwd") if all(t.requires_grad for t in many) else ("fwd",)
    row = {}
    for k, part in enumerate(parts):
        each = {name: way[k] for name, way in ways.items()}
        row |= _against_eager(each, device, f"_{part}", rounds=40 if part == "fwd_bwd" else 100)
    return row


def _against_eager(
    ways: dict[str, Thunk], device: str, part: str = "", rounds: int = 100
) -> dict[str, float]:
    samples = _samples(ways, device, rounds)
    times = medians(samples)
    return {
        f"eager{part}_us": times["eager"],
        f"ours{part}_us": times["ours"],
        f"over_eager{part}": over(samples, "eager", "ours"),
        f"eager_again{part}": over(samples, "eager", "again"),
    }


def _optimiser(name: str, device: str) -> dict[str, float]:
    samples = _samples(optim._steps(name, 10, 64, device, {}), device)
    times = medians(samples)
    row = {f"{way}_us": t for way, t in times.items()}
    best = min((way for way in times if way != "ours"), key=times.__getitem__, default=None)
    return row if best is None else {**row, "over_eager": over(samples, best, "ours")}


def _augmentation(device: str) -> dict[str, float]:
    aug = Pipeline(augment.PIPELINES["affine+normalise"])
    x = torch.zeros((1, 3, 8, 8), dtype=torch.uint8, device=device)
    eager = augment.composed(aug, x, torch.float32, True)
    ways = {"eager": lambda: eager(x), "ours": lambda: aug(x), "again": lambda: eager(x)}
    return _against_eager(ways, device)
