"""An operator of your own, without touching Deuteron: ``softcap(x) = cap · tanh(x / cap)``.

It holds attention logits between −cap and cap. docs/adding-an-operator.md walks through it.

    python examples/custom_operator.py
"""

from __future__ import annotations

import torch

import deuteron as dt
from deuteron.ops import Ops, Vjp
from deuteron.ops.opdef import elementwise_flops
from deuteron.ops.samples import unary_samples


def infer(x: dt.TensorType, cap: float) -> dt.TensorType:
    """The type of the result, or an error that names the smallest change that works."""
    if not x.dtype.is_float:
        raise dt.GraphError(
            f"softcap of {x.dtype.name} is not defined", remedy='cast(x, dtype="f32") first'
        )
    if not cap > 0:
        raise dt.GraphError(f"softcap with cap={cap} is not defined", remedy="use cap above 0")
    return x.dense_like()


def reference(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Plain torch. In float64 this is the truth that every engine is held against."""
    return torch.tanh(x / cap) * cap


def vjp(ops: Ops, v: Vjp) -> list[dt.Sym | None]:
    """dx = g · (1 − (y / cap)²), emitted as nodes; in float32 where x has 16 bits."""
    grad, y = ops.upcast(v.grad), ops.upcast(v.outs[0])
    slope = 1.0 - ops.square(y * (1.0 / v.attrs["cap"]))
    return [ops.to(grad * slope, v.arg(0).dtype)]


SOFTCAP = dt.OpDef(
    name="softcap",
    doc="cap · tanh(x / cap), elementwise: x, held between −cap and cap without a corner.",
    inputs=("x",),
    attrs={"cap": dt.Attr("float", 30.0, "the bound, above 0")},
    infer=infer,
    reference=reference,
    fusion=dt.Fusion.ELEMENTWISE,
    vjp=vjp,
    flops=elementwise_flops(14),
    samples=lambda: (*unary_samples("normal", {"cap": 2.0}), *unary_samples()[:2]),
)


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
    dt.register_op(SOFTCAP)  # from here on it is a method of every dt.Graph

    g = dt.Graph("logits")
    x = g.tensor("x", (4, 6), dt.float64)
    weight = g.constant(torch.randn(5, 6, dtype=torch.float64), "weight")
    g.softcap(g.linear(x, weight), cap=2.0).output("y")
    print(g)

    error = largest_gradient_error(g, torch.randn(4, 6, dtype=torch.float64))
    print(f"gradient against finite differences: {error:.1e}")
    assert error < 1e-7

    plan = g.compile(device="cpu")  # its class says that it may join the product before it
    print([" + ".join(region.ops) for region in plan.decision.regions])


if __name__ == "__main__":
    main()
