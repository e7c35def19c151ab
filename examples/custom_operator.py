"""An operator of your own, without touching Deuteron: ``softcap(x) = cap · tanh(x / cap)``.

It holds attention logits between −cap and cap. docs/adding-an-operator.md walks through it.

    python examples/custom_operator.py
"""

from __future__ import annotations

from typing import Any

import torch

import deuteron as dt


@dt.elementwise(rules={"use cap above 0": lambda cap: cap > 0}, tried=({}, {"cap": 2.0}))
def softcap(b: Any, x: Any, cap: float = 30.0) -> Any:
    """x held between −cap and cap without a corner"""
    return b.tanh(x / cap) * cap


def largest_gradient_error(graph: dt.Graph, x: torch.Tensor, step: float = 1e-6) -> float:
    """The gradient of y for x against central differences, element by element, in float64."""
    forward = graph.compile(device="cpu")
    backward = graph.grad("y", wrt=["x"]).compile(device="cpu")
    seed = torch.randn(forward.outputs["y"].shape, dtype=torch.float64)
    got = backward.run(x=x, grad_y=seed)["grad_x"]
    worst = 0.0
    for i in range(x.numel()):
        move = torch.zeros_like(x)
        move.view(-1)[i] = step
        up, down = (forward.run(x=x + s * move)["y"] for s in (1, -1))
        slope = float(((up - down) * seed).sum()) / (2 * step)
        worst = max(worst, abs(slope - float(got.view(-1)[i])))
    return worst


def main() -> None:
    torch.manual_seed(0)
    dt.register_op(softcap)  # from here on it is everywhere

    g = dt.Graph("logits")
    x = g.tensor("x", (4, 6), dt.float64)
    weight = g.constant(torch.randn(5, 6, dtype=torch.float64), "weight")
    g.softcap(g.linear(x, weight), cap=2.0).output("y")
    print(g)

    error = largest_gradient_error(g, torch.randn(4, 6, dtype=torch.float64))
    print(f"gradient against finite differences: {error:.1e}")
    assert error < 1e-7

    h = dt.Graph("layer")  # in float32 it is part of the product's kernel on a CPU
    h.softcap(h.linear(h.tensor("x", (64, 64)), h.constant(torch.randn(64, 64), "w"))).output("y")
    for choice in h.compile(device="cpu").decision.choices:
        print(" + ".join(choice.region.ops), "by", choice.candidate.engine)

    logits = torch.randn(8, 16, requires_grad=True)
    dt.functional.softcap(logits, cap=5.0).sum().backward()  # eager, with its gradient
    print("largest slope:", float(logits.grad.max()))


if __name__ == "__main__":
    main()
