"""Train with several processes, each of which keeps a part of the parameters (FSDP2 of torch).

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed_training.py

On a machine with GPUs each process takes one and talks through NCCL, on any other through gloo. A
process that dies is started again with all others, and they go on from the last checkpoint. Without
torchrun, one process trains alone.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import deuteron as dt

STEPS, BATCH, WIDTH, CLASSES = 12, 16, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batch(i: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank has batches of its own."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * i + rank))
    return x, x[:, :CLASSES].argmax(1)


def main() -> None:
    several = "LOCAL_RANK" in os.environ
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if several:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank() if several else 0

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, CLASSES)).to(device)
    if several:
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        for block in (model[0], model[1], model):
            fully_shard(block, mesh=mesh)
    optimizer = dt.optim.AdamW(model.parameters(), lr=1e-2)
    step = dt.train_step(model, F.cross_entropy, optimizer, batch(0, rank), max_norm=1.0)

    folder = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as unnamed:
        kept = dt.Checkpoints(folder, step) if folder else None
        if kept is None and not several:
            kept = dt.Checkpoints(unnamed, step)
        begin = kept.load() if kept is not None else 0
        for i in range(begin, STEPS):
            loss = step(*batch(i, rank))
            if kept is not None and (i + 1) % 4 == 0:
                kept.save(i + 1)
            if rank == 0:
                print(f"batch {i + 1}: loss {float(loss):.4f}")
        if kept is not None:
            kept.wait()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
