"""Where torch's call ends and a plan of ours begins: both, by size, around the limit.

``python -m bench.run --device cuda --only delegation``; on a CPU reductions and prelu, each of them
one call of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.cpu_operators import medians
from bench.functional import Case, both_ways, cases, f, singles, tensors_of
from bench.harness import Record, captured, replay_times, wall_times

NOTE = (
    "Functions of bfloat16 [rows, 1024] by torch's calls and by a plan of ours (delegation off), "
    "microseconds, medians in turns: `wall` with launches and Python, queue kept full, and `gpu` "
    "by CUDA Graph replay. `kb` is the size of the first tensor. Small calls go to torch's own "
    "functions up to a limit that weighs the two: deuteron/functional/delegate.py."
)
NOTE_CPU = (
    "Functions of [rows, 1024] by torch's call and by a plan of ours (delegation off), wall time "
    "in microseconds, medians in turns, and torch's time over ours, forward and with a gradient. "
    "`mb` is the size of the tensor. Who answers a call follows from this: "
    "deuteron/functional/reduce.py."
)
ROWS = (64, 1024, 2048, 4096, 8192)
CPU_ROWS = (256, 512, 1024, 2048, 4096)
NAMES = ("gelu", "layer_norm", "softmax", "residual+layer_norm", "swiglu")


def run(device: str, quick: bool = False, compile_peer: bool = True) -> Record:
    record = Record("delegation", device, NOTE if device == "cuda" else NOTE_CPU)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    if device != "cuda":
        for case in on_cpu():
            for dtype in (torch.float32, torch.bfloat16):
                for rows in CPU_ROWS:
                    shapes = ((rows, 1024), *case.shapes[1:])
                    _measure_on_cpu(record, replace(case, shapes=shapes, dtype=dtype))
        return record
    for rows in ROWS:
        for case in (*singles(rows, 1024), *cases(rows, 1024)):
            if case.name in NAMES:
                _measure(record, case)
    return record


def _measure(record: Record, case: Case) -> None:
    tensors = tensors_of(case, "cuda", case.dtype)
    row: dict[str, float] = {"kb": tensors[0].nbytes / 1024}
    with f.delegation(False):
        ways = {"torch": both_ways(case.theirs, tensors), "plan": both_ways(case.ours, tensors)}
        for k, part in enumerate(("fwd", "fwd_bwd")):
            calls = {name: way[k] for name, way in ways.items()}
            wall = wall_times(calls, rounds=11, calls=20)
            gpu = replay_times({name: captured(fn) for name, fn in calls.items()}, 7, 8)
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
