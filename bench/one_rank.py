"""What collectives cost where nobody is on the other side: one GPU, an NCCL group of one rank.

Products in chunks beside a collective, against the product alone, and training steps as one CUDA
Graph in DDP, FSDP2 and sequence parallelism, against the plain step.
``python -m bench.run --device cuda --only one_rank``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import deuteron as dt
from bench.harness import (
    Record,
    captured,
    medians,
    over,
    relative_error,
    replay_samples,
    wall_samples,
)
from deuteron.ops.collective import BESIDE, chunked
from tests import ranks

NOTE = (
    "One GPU, an NCCL group of one rank. `product …`: GPU microseconds of `x @ w.T` alone, "
    "replayed as a CUDA Graph, and of the product in chunks beside a collective over that (a "
    "collective of one rank copies, but for an `all_reduce`, which does nothing). `step …`: wall "
    "microseconds of a captured step of a GPT of two blocks, and of the same step in a layout over "
    "it. `off`: 2-norm of what differs, relative."
)
SHAPES = ((8192, 4096, 4096), (16384, 4096, 4096), (16384, 8192, 8192), (8192, 1376, 4096))
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
    if device != "cuda":
        return record
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        for size in SIZES:
            for layout in list(LAYOUTS)[1:]:
                if record.wants(f"step {size} {layout}"):
                    _steps(record, size, layout)
        for shape in SHAPES:
            name = "product " + "×".join(map(str, shape))
            if record.wants(name):
                _product(record, name, *shape)
    finally:
        dist.destroy_process_group()
    return record


def _product(record: Record, name: str, rows: int, deep: int, wide: int) -> None:
    x = torch.randn(rows, deep, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(wide, deep, device="cuda", dtype=torch.bfloat16) / deep**0.5
    group = dist.group.WORLD.group_name
    calls: dict[str, Callable[[], Any]] = {"alone": partial(F.linear, x, w)}
    for way in BESIDE:
        for chunks in CHUNKS:
            calls[f"{way} {chunks}"] = partial(chunked, x, w, None, way, chunks, group, 1)
    want = calls["alone"]().double()
    off = max(relative_error(call(), want) for call in calls.values())
    samples = replay_samples({n: captured(call) for n, call in calls.items()}, 15)
    found = {n: round(1 / over(samples, "alone", n), 3) for n in calls if n != "alone"}
    record.add(case=name, alone_us=medians(samples)["alone"] * 1e3, **found, off=off)


def _laid_out(model: ranks.GPT, layout: str) -> torch.nn.Module:
    """The model as it is called."""
    mesh = init_device_mesh("cuda", (1,))
    if layout.startswith("ddp"):
        return DistributedDataParallel(model)
    if layout == "fsdp":
        ranks._shard(model, mesh)
    elif layout == "sp":
        ranks._sequence(model, mesh)
    return model


def _steps(record: Record, size: str, layout: str) -> None:
    """The step in a layout beside the plain one."""
    vars(ranks).update(SIZES[size])
    steps, ends = {}, {}
    data = [(x.cuda(), y.cuda()) for x, y in ranks.batches(ranks.Case(steps=2))]
    for name in ("alone", layout):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ranks.GPT(2).cuda()
        called = _laid_out(model, name)
        optimizer = dt.optim.AdamW(model.parameters(), lr=1e-3)
        how: Any = {"reduction": LAYOUTS[name], "max_norm": 1.0}
        how["autocast"] = torch.bfloat16 if size == "large" else None
        step = dt.train_step(called, ranks.loss_of, optimizer, data[0], **how)
        for x, y in data * 4:
            step(x, y)
        steps[name] = step
        ends[name] = torch.cat([ranks.whole(p).flatten() for p in model.parameters()])
    thunks = {n: partial(_both, step, data) for n, step in steps.items()}
    samples = wall_samples(thunks, 25, 1)
    each = {name: ms * 1e3 / len(data) for name, ms in medians(samples).items()}
    record.add(
        case=f"step {size} {layout}",
        alone_us=each["alone"],
        us=each[layout],
        over_alone=round(1 / over(samples, "alone", layout), 3),
        off=relative_error(ends[layout], ends["alone"]),
        how=steps[layout].note or "captured",
    )


def _both(step: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in data:
        step(x, y)
