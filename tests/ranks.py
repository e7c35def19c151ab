"""What the processes of test_distributed.py run: two ranks that train together, on half of each
batch, and write down the parameters they end with."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import deuteron as dt

STEPS, BATCH = 4, 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 10),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(BATCH, 3, 8, 8), torch.randint(0, 10, (BATCH,))) for _ in range(STEPS)]


def trained(way: str, rank: int = 0, ranks: int = 1) -> list[torch.Tensor]:
    """Parameters after some steps; ``way`` is eager, backend or step."""
    model = network()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shares = [(x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in batches()]
    if way == "step":
        step = dt.train_step(wrapped, F.cross_entropy, optimizer, shares[0], max_norm=1.0)
        for x, y in shares:
            step(x, y)
        return [p.detach() for p in model.parameters()]
    called = torch.compile(wrapped, backend=dt.backend) if way == "backend" else wrapped
    for x, y in shares:
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    found = {way: trained(way, rank, ranks) for way in ("eager", "backend", "step")}
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
