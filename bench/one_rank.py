"""What collectives cost where nobody is on the other side: one GPU, an NCCL group of one rank.

Training steps as one CUDA Graph in DDP, FSDP2 and sequence parallelism, against the plain step, and
products in chunks beside a collective, against the product alone; then the step in DDP by two
processes that share the GPU, where NCCL takes them.
``python -m bench.run --device cuda --only one_rank`` ends within two minutes: what the row of the
issue asks for comes first, a case that fails has the reason in its row, and none is begun after
:data:`LIMIT_S`. On a CPU the smallest cases run through gloo, uncaptured, which shows that they do,
and says nothing about the bars.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import deuteron as dt
from bench.harness import (
    Record,
    Samples,
    captured,
    medians,
    over,
    relative_error,
    replay_samples,
    wall_samples,
)
from deuteron.distributed.reduction import Agreement
from deuteron.files import write_atomic
from deuteron.ops.collective import BESIDE, chunked
from tests import ranks

NOTE = (
    "One GPU, an NCCL group of one rank. `product …`: GPU microseconds of `x @ w.T` alone, "
    "replayed as a CUDA Graph, and of the product in chunks beside a collective over that, which "
    "one rank does in place, so that nothing is copied. `step …`: wall "
    "microseconds of a captured step of a GPT of two blocks, and of the same step in a layout over "
    "it. `ddp` and `ddp_bfloat16` have their sums over ranks in the plan, as with several ranks. "
    "`bar`: what issue 20 asks `over_alone`, and every product in 2 or more chunks, to stay below. "
    "`off`: 2-norm of what differs, relative. `two processes …`: each a rank, on the same GPU. "
    "`failed`: why a case has no figures."
)
STEP_BAR, CHUNK_BAR = 1.03, 1.02  # over the step, and the product, without collectives
LIMIT_S = 90  # after which no case is begun; half as much again ends the process
PAIR_S = 40  # for the two processes, from their start to their end
CHUNKS = (1, 2, 4)
SIZES = {
    "large": {"WIDTH": 1024, "HEADS": 16, "WORDS": 8192, "LENGTH": 512, "BATCH": 16},
    "tiny": {"WIDTH": 16, "HEADS": 4, "WORDS": 32, "LENGTH": 8, "BATCH": 8},
}
LAYOUTS: dict[str, Any] = {
    "alone": None,
    "ddp": None,
    "ddp_bfloat16": dt.distributed.Reduction("bfloat16"),
    "fsdp": None,
    "sp": None,
}
TWO = "two processes"
# the most important first: steps by their layout, products by rows, depth and width
CASES: dict[str, tuple[Any, ...]] = {
    "cuda": ("ddp", (16384, 8192, 8192), (8192, 4096, 4096), "sp", "fsdp", TWO, "ddp_bfloat16"),
    "cpu": ("ddp", (512, 256, 256), "sp", "fsdp", TWO, "ddp_bfloat16"),
}


def run(device: str, compile_peer: bool = True) -> Record:
    """All cases, each by itself: what one of them fails of is written down."""
    record, end = Record("one_rank", device, NOTE), time.monotonic() + LIMIT_S
    if device == "cuda":
        faulthandler.dump_traceback_later(1.5 * LIMIT_S, exit=True)  # of what hangs
    with tempfile.TemporaryDirectory() as folder:
        _join(device, 0, 1, f"{folder}/one")
        steps = Steps(device)
        for each in CASES[device]:
            at = "×".join(map(str, each)) if isinstance(each, tuple) else each
            case = f"product {at}" if isinstance(each, tuple) else f"step {steps.size} {each}"
            case = f"{TWO}: step {steps.size} ddp" if each == TWO else case
            if not record.wants(case):
                continue
            try:
                if time.monotonic() > end:
                    raise TimeoutError(f"not begun, because {LIMIT_S} seconds were over")
                if isinstance(each, tuple):
                    row = _product(device, *each)
                else:
                    row = _by_two(device, f"{folder}/two") if each == TWO else steps.row(each)
            except Exception as error:
                row = {"failed": _first_words(error)}
            record.add(case=case, **row)
        del steps
        gc.collect()  # a group does not end as long as graphs have its collectives
        if device == "cuda":
            faulthandler.dump_traceback_later(15, exit=True)
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return record


def _join(device: str, rank: int, world: int, file: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    how: Any = {"init_method": f"file://{file}", "rank": rank, "world_size": world}
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=PAIR_S), **how)


def _first_words(error: BaseException) -> str:
    """The kind and the lines of an error that say something, on one line."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(said)}"[:300].replace("|", "/")


def _product(device: str, rows: int, deep: int, wide: int) -> dict[str, Any]:
    kind: Any = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else None}
    x, w = torch.randn(rows, deep, **kind), torch.randn(wide, deep, **kind) / deep**0.5
    group = dist.group.WORLD.group_name
    calls: dict[str, Callable[[], Any]] = {"alone": partial(F.linear, x, w)}
    for way in BESIDE:
        for chunks in CHUNKS:
            calls[f"{way} {chunks}"] = partial(chunked, x, w, None, way, chunks, group, 1)
    want = calls["alone"]()
    off = max(relative_error(call(), want) for call in calls.values())
    if device == "cuda":
        samples = replay_samples({n: captured(call) for n, call in calls.items()}, 15)
    else:
        samples = _turns(device, calls)
    found = {n: round(1 / over(samples, "alone", n), 3) for n in calls if n != "alone"}
    worst = max(ratio for n, ratio in found.items() if not n.endswith(" 1"))
    how = {"bar": CHUNK_BAR, "holds": worst <= CHUNK_BAR}
    return {"alone_us": medians(samples)["alone"] * 1e3, **found, **how, "off": off}


def _turns(device: str, calls: Mapping[str, Callable[[], Any]]) -> Samples:
    """Wall milliseconds of a call, contenders in turns."""
    if device == "cuda":
        return wall_samples(calls, 25, 1)
    samples: Samples = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - begin) * 1e3)
    return samples


def _laid_out(model: ranks.GPT, device: str, layout: str) -> torch.nn.Module:
    """The model as it is called."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    if layout.startswith("ddp"):
        return DistributedDataParallel(model)
    if layout == "fsdp":
        ranks._shard(model, mesh)
    elif layout == "sp":
        ranks._sequence(model, mesh)
    return model


def _as_of_two(self: Agreement, inside: Callable[[Agreement], Any] = Agreement.inside) -> Any:
    """Sums over ranks in the plan, which leaves those of one rank out; nothing is halved."""
    if self.ranks > 1:
        return inside(self)
    self.ranks = 2
    try:
        return replace(inside(self), share=1.0)
    finally:
        self.ranks = 1


class Steps:
    """Steps in a layout beside the plain one, which is made once."""

    def __init__(self, device: str) -> None:
        self.device, self.size = device, "large" if device == "cuda" else "tiny"
        vars(ranks).update(SIZES[self.size])
        data = ranks.batches(ranks.Case(steps=2))
        self.data = [(x.to(device), y.to(device)) for x, y in data]
        self.made: dict[str, Any] = {}

    def ready(self, layout: str) -> tuple[Any, torch.Tensor]:
        """A step that has been made several times, and the parameters that it has ended with."""
        if layout not in self.made:
            torch.manual_seed(0)
            model = ranks.GPT(2).to(self.device)
            called = _laid_out(model, self.device, layout)
            optimizer = dt.optim.AdamW(model.parameters(), lr=1e-3)
            how: Any = {"reduction": LAYOUTS[layout], "max_norm": 1.0}
            how["autocast"] = torch.bfloat16 if self.size == "large" else None
            how["policy"] = dt.Policy(cuda_graph=True) if self.device == "cuda" else None
            step = dt.train_step(called, ranks.loss_of, optimizer, self.data[0], **how)
            with mock.patch.object(Agreement, "inside", _as_of_two):
                for x, y in self.data * 4:
                    step(x, y)
            ends = torch.cat([ranks.whole(p).flatten() for p in model.parameters()])
            self.made[layout] = step, ends
        return self.made[layout]  # type: ignore[no-any-return]

    def row(self, layout: str) -> dict[str, Any]:
        made = {name: self.ready(name) for name in ("alone", layout)}
        samples = _turns(self.device, {n: partial(self.run, step) for n, (step, _) in made.items()})
        each = {name: ms * 1e3 / len(self.data) for name, ms in medians(samples).items()}
        ratio = round(1 / over(samples, "alone", layout), 3)
        step, ends = made[layout]
        sums = sum(n.op == "all_reduce" for n in _nodes(step))
        return {
            "alone_us": each["alone"],
            "us": each[layout],
            "over_alone": ratio,
            "bar": STEP_BAR,
            "holds": ratio <= STEP_BAR,
            "sums_in_plan": sums,
            "off": relative_error(ends, made["alone"][1]),
            "how": step.note or "captured",
        }

    def run(self, step: Any) -> None:
        for x, y in self.data:
            step(x, y)


def _nodes(step: Any) -> Iterator[Any]:
    for plan in step.plans:
        yield from plan.decision.graph.nodes


# ---- two processes


def _by_two(device: str, file: str) -> dict[str, Any]:
    """What the first of two ranks on the same GPU has found."""
    command = [sys.executable, "-m", "bench.one_rank", device, file]
    pair = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    try:
        pair[0].wait(PAIR_S)
    finally:
        for process in pair:
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads(Path(f"{file}.json").read_text())
    return found


def _one_of_two(device: str, file: str, rank: str) -> None:
    """One of them. Both train on the same batches, and end as one process does."""
    try:
        _join(device, int(rank), 2, file)
        dist.all_reduce(torch.ones(1, device=device))  # for which NCCL makes the group
        row = Steps(device).row("ddp")
    except Exception as error:
        row = {"failed": _first_words(error)}
    if rank == "0":
        write_atomic(Path(f"{file}.json"), json.dumps(row))
    os._exit(0)  # graphs that have collectives of a group keep it from ending


if __name__ == "__main__":
    _one_of_two(*sys.argv[1:])
