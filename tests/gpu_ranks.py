"""One rank on a GPU, with NCCL: DDP, FSDP2 and tensor parallelism of a process group of one train
as the plain model does, and how long a step takes. ``python -m tests.gpu_ranks``; needs a GPU."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import deuteron as dt
from tests.ranks import GPT, OPTIMIZERS, Case, _sequence, _shard, batches, loss_of, whole


def laid_out(model: GPT, layout: str) -> torch.nn.Module:
    """The model as it is called, on one rank."""
    mesh = init_device_mesh("cuda", (1,))
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp":
        _shard(model, mesh)
    elif layout == "sp":
        _sequence(model, mesh)
    return model


def trained(layout: str, optimizer: str) -> tuple[list[torch.Tensor], float, str]:
    torch.manual_seed(0)
    model = GPT(2).cuda()
    called = laid_out(model, layout)
    data = [(x.cuda(), y.cuda()) for x, y in batches(Case(steps=20))]
    params = OPTIMIZERS[optimizer](model.parameters())
    step = dt.train_step(called, loss_of, params, data[0], max_norm=0.5)
    for x, y in data:
        step(x, y)
    found = [whole(p) for p in model.parameters()]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for x, y in data:
        step(x, y)
    torch.cuda.synchronize()
    return found, (time.perf_counter() - begin) / len(data), step.note or "captured"


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("nccl", rank=0, world_size=1)
    for optimizer in ("sgd", "ours"):
        plain, seconds, note = trained("alone", optimizer)
        print(f"{optimizer} alone: {seconds * 1e6:.0f} µs, {note}", flush=True)
        for layout in ("ddp", "fsdp", "sp"):
            try:
                found, seconds, note = trained(layout, optimizer)
            except Exception as error:
                print(
                    f"{optimizer} {layout}: {type(error).__name__} {str(error)[-600:]}", flush=True
                )
                continue
            pairs = zip(found, plain, strict=True)
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            print(
                f"{optimizer} {layout}: off {off:.1e}, {seconds * 1e6:.0f} µs, {note}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
