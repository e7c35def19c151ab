"""Train a small classifier with gradients from ``Graph.grad`` and plain SGD.

Forward and backward are one graph: planned once, run at every step. The weights are inputs of the
plan, so they may change from step to step without planning again.

    python examples/training_graph.py
"""

from __future__ import annotations

import math

import torch

import deuteron as dt

POINTS, HIDDEN, CLASSES = 192, 32, 3


def spirals(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three arms of a spiral, and which arm each is on."""
    arm = torch.arange(POINTS) % CLASSES
    along = torch.rand(POINTS, generator=generator)
    angle = 4.0 * along + arm * (2 * math.pi / CLASSES)
    wobble = 0.05 * torch.randn(POINTS, 2, generator=generator)
    return along[:, None] * torch.stack([angle.cos(), angle.sin()], 1) + wobble, arm


def loss_graph() -> dt.Graph:
    """Two layers and a cross-entropy."""
    g = dt.Graph("classifier")
    x, arm = g.tensor("x", (POINTS, 2)), g.tensor("arm", (POINTS,), dt.int64)
    w1, b1 = g.tensor("w1", (HIDDEN, 2)), g.tensor("b1", (HIDDEN,))
    w2, b2 = g.tensor("w2", (CLASSES, HIDDEN)), g.tensor("b2", (CLASSES,))
    logits = g.linear(g.tanh(g.linear(x, w1, b1)), w2, b2).output("logits")
    g.cross_entropy(logits, arm).output("loss")
    return g


def main(steps: int = 400, rate: float = 1.0) -> tuple[float, float]:
    """Train; the first and the last loss."""
    gen = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, arm = (t.to(device) for t in spirals(gen))
    weights = {
        "w1": 2.0 * torch.randn(HIDDEN, 2, generator=gen),
        "b1": torch.zeros(HIDDEN),
        "w2": torch.randn(CLASSES, HIDDEN, generator=gen) / math.sqrt(HIDDEN),
        "b2": torch.zeros(CLASSES),
    }
    weights = {name: w.to(device) for name, w in weights.items()}

    plan = loss_graph().grad("loss", wrt=list(weights)).compile(device=device)
    print(plan)
    first = out = plan.run(x=x, arm=arm, **weights)
    for step in range(steps):
        out = plan.run(x=x, arm=arm, **weights)
        for name, weight in weights.items():
            weight -= rate * out[f"grad_{name}"]
        if step % 100 == 0:
            print(f"step {step:4}  loss {float(out['loss']):.4f}")
    right = (out["logits"].argmax(1) == arm).float().mean()
    print(f"step {steps:4}  loss {float(out['loss']):.4f}, {100 * float(right):.0f} % right")
    return float(first["loss"]), float(out["loss"])


if __name__ == "__main__":
    before, after = main()
    assert after < before / 2, "the loss did not fall"
