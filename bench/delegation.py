"""Where torch's call ends and a plan of ours begins: both, by size, around the limit.

``python -m bench.run --device cuda --only delegation``; on a CPU reductions and prelu, each of them
one call of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench.cpu_operators import medians
from bench.functional import Case, both_ways, cases, f, images, single_images, singles, tensors_of
from bench.harness import Record, captured, replay_times, wall_times

NOTE = (
    "Functions of bfloat16 [rows, 1024] and of images by torch's calls, as they are called "
    "(`ours`) and by a plan of ours (delegation off), microseconds, medians in turns: `wall` with "
    "launches and Python, queue kept full, and `gpu` by CUDA Graph replay. `kb` is the size of "
    "the first tensor. Small calls go to torch's own functions up to a limit that weighs the two: "
    "deuteron/functional/delegate.py."
)
NOTE_CPU = (
    "Functions of [rows, 1024] by torch's call and by a plan of ours (delegation off), wall time "
    "in microseconds, medians in turns, and torch's time over ours, forward and with a gradient. "
    "`mb` is the size of the tensor. Who answers a call follows from this: "
    "deuteron/functional/reduce.py."
)
SIZES = (128, 2048, 16384)  # KB
CPU_ROWS = (256, 512, 1024, 2048, 4096)
SINGLES = ("gelu", "silu", "dropout", "log_softmax", "cross_entropy")
IMAGES = ("group_norm+silu", "max_pool2d 3/2", "bilinear ×2", "avg_pool2d 2")
TRAINING = ("batch_norm, training", "batch_norm+residual+relu, training")


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("delegation", device, NOTE if device == "cuda" else NOTE_CPU)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    if device != "cuda":
        for case in on_cpu():
            for dtype in (torch.float32, torch.bfloat16):
                for rows in CPU_ROWS:
                    shapes = ((rows, 1024), *case.shapes[1:])
                    _measure_on_cpu(record, replace(case, shapes=shapes, dtype=dtype))
        return record
    for kb in SIZES:
        for case in on_gpu(kb):
            _measure(record, case)
    return record


def on_gpu(kb: int) -> Iterator[Case]:
    """22 functions, the first tensor of each about as large as that."""
    rows, batch = kb // 2, max(1, kb // 128)
    yield from cases(rows, 1024)
    yield from (case for case in singles(rows, 1024) if case.name in SINGLES)
    every = (*images(batch, 32), *single_images(batch, 32))
    yield from (case for case in every if case.name in (*IMAGES, *TRAINING))


def _measure(record: Record, case: Case) -> None:
    tensors = tensors_of(case, "cuda", case.dtype)
    row: dict[str, float] = {"kb": tensors[0].nbytes / 1024}

    def planned(*given: torch.Tensor) -> Any:
        with f.delegation(False):
            return case.ours(*given)

    ways = {"torch": case.theirs, "ours": case.ours, "plan": planned}
    thunks = {name: both_ways(call, tensors) for name, call in ways.items()}
    for k, part in enumerate(("fwd", "fwd_bwd")):
        calls = {name: way[k] for name, way in thunks.items()}
        wall = wall_times(calls, rounds=11, calls=20)
        graphs = {name: captured(fn) for name, fn in calls.items() if name != "ours"}
        gpu = replay_times(graphs, 7, 8)
        row |= {f"{name}_{part}_wall_us": t * 1e3 for name, t in wall.items()}
        row |= {f"{name}_{part}_gpu_us": t * 1e3 for name, t in gpu.items()}
    record.add(case=f"{case.name} {list(case.shapes[0])}", **row)


def on_cpu() -> Iterator[Case]:
    x = (1024, 1024)
    for name in ("sum", "mean", "amax"):
        ours, theirs = getattr(f, name), getattr(torch, name)
        for of, dim in (("rows", -1), ("columns", 0), ("all", ())):
            yield Case(
                f"{name} of {of}",
                (x,),
                lambda x, call=ours, dim=dim: call(x, dim),
                lambda x, call=theirs, dim=dim: call(x, dim),
            )
    yield Case("prelu", (x, (1024,)), f.prelu, torch.prelu)


def _measure_on_cpu(record: Record, case: Case) -> None:
    tensors = tensors_of(case, "cpu", case.dtype)
    row: dict[str, float] = {"mb": tensors[0].nbytes / 2**20}
    with f.delegation(False):
        ways = {"torch": both_ways(case.theirs, tensors), "ours": both_ways(case.ours, tensors)}
        for k, part in enumerate(("fwd", "fwd_bwd")):
            times = medians({name: way[k] for name, way in ways.items()}, 0.1)
            row |= {f"{name}_{part}_us": t * 1e6 for name, t in times.items()}
            row[f"over_torch_{part}"] = times["torch"] / times["ours"]
    record.add(case=case.name, dtype=str(case.dtype).removeprefix("torch."), **row)
