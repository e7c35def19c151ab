"""Where torch's call ends and a plan of ours begins: both, by size, around the limit.

``python -m bench.run --device cuda --only delegation``
"""

from __future__ import annotations

import torch

from bench.functional import Case, both_ways, cases, f, singles, tensors_of
from bench.harness import Record, captured, replay_times, wall_times

NOTE = (
    "Functions of bfloat16 [rows, 1024] by torch's calls and by a plan of ours (delegation off), "
    "microseconds, medians in turns: `wall` with launches and Python, queue kept full, and `gpu` "
    "by CUDA Graph replay. `kb` is the size of the first tensor. Small calls go to torch's own "
    "functions up to a limit that weighs the two: deuteron/functional/library.py."
)
ROWS = (64, 1024, 2048, 4096, 8192)
NAMES = ("gelu", "layer_norm", "softmax", "residual+layer_norm", "swiglu")


def run(device: str, quick: bool = False, compile_peer: bool = True) -> Record:
    record = Record("delegation", device, NOTE)
    if device != "cuda":
        return record
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
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
