"""A training loop with a data loader, a schedule, checkpoints and resuming: ``dt.train_step``.

A run that is stopped after two epochs and resumed ends with the same bits as one that is not.

    python examples/training_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import deuteron as dt

EPOCHS, BATCH = 4, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pictures() -> TensorDataset:
    """Noise in which one half is brighter than the other; which half is to be learnt."""
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 1, 12, 12, generator=gen), torch.randint(0, 2, (256,), generator=gen)
    x[y == 0, :, :6] += 0.3
    x[y == 1, :, 6:] += 0.3
    return TensorDataset(x, y)


class Run:
    """Everything that a checkpoint holds, and the loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data = pictures()
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(128, 2),
        ).to(DEVICE)
        self.optimizer = dt.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS)
        self.step = dt.train_step(
            self.model,
            F.cross_entropy,
            self.optimizer,
            self.data[:BATCH],
            max_norm=1.0,
            policy=dt.Policy(deterministic=True),  # the same bits in every run, on a GPU as well
        )
        self.epoch = 0

    def train(self, until: int) -> None:
        """Epochs up to this one. Nothing in them waits for the device."""
        while self.epoch < until:
            order = torch.Generator().manual_seed(self.epoch)
            loader = DataLoader(
                self.data, BATCH, shuffle=True, generator=order, pin_memory=DEVICE == "cuda"
            )
            losses = [self.step(x, y) for x, y in loader]
            self.schedule.step()
            self.epoch += 1
            print(f"epoch {self.epoch}: loss {torch.stack(losses).mean():.4f}")

    def save(self, path: Path) -> None:
        parts = ("model", "optimizer", "schedule", "step")
        state = {name: getattr(self, name).state_dict() for name in parts} | {"epoch": self.epoch}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # whoever reads it finds a whole file

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=DEVICE)
        self.epoch = state.pop("epoch")
        for name, value in state.items():
            getattr(self, name).load_state_dict(value)


def main() -> None:
    whole = Run()
    whole.train(EPOCHS)
    print(f"captured: {whole.step.captured}; {whole.step.note or 'one CUDA Graph'}")

    stopped = Run()
    stopped.train(2)
    with tempfile.TemporaryDirectory() as folder:
        stopped.save(Path(folder) / "last.pt")
        resumed = Run()
        resumed.resume(Path(folder) / "last.pt")
    resumed.train(EPOCHS)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    print("resumed after two epochs: the same bits")


if __name__ == "__main__":
    main()
