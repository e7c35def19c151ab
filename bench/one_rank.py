"""What collectives cost where nobody is on the other side: one GPU, an NCCL group of one rank.

Products in chunks beside a collective, against the product alone, and training steps as one CUDA
Graph in DDP, FSDP2 and sequence parallelism, against the plain step.
``python -m bench.run --device cuda --only one_rank``. On a CPU the smallest cases run through gloo,
uncaptured, which shows that they do, and says nothing about the bars.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from deuteron.ops.collective import BESIDE, chunked
from tests import ranks

NOTE = (
    "One GPU, an NCCL group of one rank. `product …`: GPU microseconds of `x @ w.T` alone, "
    "replayed as a CUDA Graph, and of the product in chunks beside a collective over that (a "
    "collective of one rank copies, but for an `all_reduce`, which does nothing). `step …`: wall "
    "microseconds of a captured step of a GPT of two blocks, and of the same step in a layout over "
    "it. `ddp` and `ddp_bfloat16` have their sums over ranks in the plan, as with several ranks. "
    "`bar`: what issue 20 asks `over_alone`, and every product in 2 or more chunks, to stay below. "
    "`off`: 2-norm of what differs, relative."
)
STEP_BAR, CHUNK_BAR = 1.03, 1.02  # over the step, and the product, without collectives
SHAPES = {
    "cuda": ((8192, 4096, 4096), (16384, 4096, 4096), (16384, 8192, 8192), (8192, 1376, 4096)),
    "cpu": ((512, 256, 256),),
}
CHUNKS = (1, 2, 4)
SIZES = {
    "large": {"WIDTH": 1024, "HEADS": 16, "WORDS": 8192, "LENGTH": 512, "BATCH": 16},
    "tiny": {"WIDTH": 16, "HEADS": 4, "WORDS": 32, "LENGTH": 8, "BATCH": 8},
}
LAYOUTS: dict[str, Any] = {
    "alone": None,
    "ddp": None,
    "ddp_bfloat16": dt.distributed.Reduction("bfloat16"),
    "ddp_int8": dt.distributed.Reduction("int8"),
    "fsdp": None,
    "sp": None,
}


def run(device: str, compile_peer: bool = True) -> Record:
    """Steps, then products."""
    record = Record("one_rank", device, NOTE)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1)
    try:
        for size in SIZES if device == "cuda" else ("tiny",):
            for layout in list(LAYOUTS)[1:]:
                if record.wants(f"step {size} {layout}"):
                    _steps(record, device, size, layout)
        for shape in SHAPES[device]:
            name = "product " + "×".join(map(str, shape))
            if record.wants(name):
                _product(record, device, name, *shape)
    finally:
        dist.destroy_process_group()
    return record


def _product(record: Record, device: str, name: str, rows: int, deep: int, wide: int) -> None:
    kind: Any = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else None}
    x, w = torch.randn(rows, deep, **kind), torch.randn(wide, deep, **kind) / deep**0.5
    group = dist.group.WORLD.group_name
    calls: dict[str, Callable[[], Any]] = {"alone": partial(F.linear, x, w)}
    for way in BESIDE:
        for chunks in CHUNKS:
            calls[f"{way} {chunks}"] = partial(chunked, x, w, None, way, chunks, group, 1)
    want = calls["alone"]().double()
    off = max(relative_error(call(), want) for call in calls.values())
    if device == "cuda":
        samples = replay_samples({n: captured(call) for n, call in calls.items()}, 15)
    else:
        samples = _turns(device, calls)
    found = {n: round(1 / over(samples, "alone", n), 3) for n in calls if n != "alone"}
    worst = max(ratio for n, ratio in found.items() if not n.endswith(" 1"))
    how = {"bar": CHUNK_BAR, "holds": worst <= CHUNK_BAR}
    record.add(case=name, alone_us=medians(samples)["alone"] * 1e3, **found, **how, off=off)


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
    mesh = init_device_mesh(device, (1,))
    if layout.startswith("ddp"):
        return DistributedDataParallel(model)
    if layout == "fsdp":
        ranks._shard(model, mesh)
    elif layout == "sp":
        ranks._sequence(model, mesh)
    return model


def _as_of_two(self: Agreement, inside: Callable[[Agreement], Any] = Agreement.inside) -> Any:
    """Sums over ranks in the plan, which leaves those of one rank out. NCCL makes the mean itself,
    of as many as there are; gloo's sum would be halved."""
    several = dist.get_backend() == "nccl"
    self.ranks += several
    try:
        return inside(self)
    finally:
        self.ranks -= several


def _steps(record: Record, device: str, size: str, layout: str) -> None:
    """The step in a layout beside the plain one."""
    vars(ranks).update(SIZES[size])
    steps, ends = {}, {}
    data = [(x.to(device), y.to(device)) for x, y in ranks.batches(ranks.Case(steps=2))]
    for name in ("alone", layout):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ranks.GPT(2).to(device)
        called = _laid_out(model, device, name)
        optimizer = dt.optim.AdamW(model.parameters(), lr=1e-3)
        how: Any = {"reduction": LAYOUTS[name], "max_norm": 1.0}
        how["autocast"] = torch.bfloat16 if size == "large" else None
        step = dt.train_step(called, ranks.loss_of, optimizer, data[0], **how)
        with mock.patch.object(Agreement, "inside", _as_of_two):
            for x, y in data * 4:
                step(x, y)
        steps[name] = step
        ends[name] = torch.cat([ranks.whole(p).flatten() for p in model.parameters()])
    thunks = {n: partial(_both, step, data) for n, step in steps.items()}
    samples = _turns(device, thunks)
    each = {name: ms * 1e3 / len(data) for name, ms in medians(samples).items()}
    ratio = round(1 / over(samples, "alone", layout), 3)
    record.add(
        case=f"step {size} {layout}",
        alone_us=each["alone"],
        us=each[layout],
        over_alone=ratio,
        bar=STEP_BAR,
        holds=ratio <= STEP_BAR,
        sums_in_plan=sum(node.op == "all_reduce" for node in _nodes(steps[layout])),
        off=relative_error(ends[layout], ends["alone"]),
        how=steps[layout].note or "captured",
    )


def _nodes(step: Any) -> Iterator[Any]:
    for plan in step.plans:
        yield from plan.decision.graph.nodes


def _both(step: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in data:
        step(x, y)
