"""Optimise a network, check it, time it, read the plan, keep it.

python examples/quickstart.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import deuteron as dt


def network() -> nn.Module:
    """A small image classifier in plain PyTorch."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()


def milliseconds(call: Callable[[], object], device: str, repeat: int = 20) -> float:
    """The best of a few calls, after one to warm up."""
    times = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:]) * 1e3


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, image = network().to(device), torch.randn(1, 3, 64, 64, device=device)

    fast = dt.optimize(model, image, budget_s=2.0)
    with torch.no_grad():
        want, got = model(image), fast(image)
        print(f"largest difference from eager: {float((got - want).abs().max()):.1e}")
        print(f"eager    {milliseconds(lambda: model(image), device):.3f} ms")
        print(f"deuteron {milliseconds(lambda: fast(image), device):.3f} ms")
    print(fast.explain())

    # What is saved is readable JSON with the weights beside it, for this or another process.
    with tempfile.TemporaryDirectory() as folder:
        again = dt.load(fast.save(Path(folder) / "classifier.json"), device=device)
        logits = again(image)
    assert torch.equal(logits, got), "a loaded model runs the same kernels"
    print(f"saved, loaded, run again: {again!r}")


if __name__ == "__main__":
    main()
