"""An engine of your own, registered with one call: ``linear + relu`` through one library call.

``torch._addmm_activation`` multiplies, adds the bias and applies ReLU; on an NVIDIA GPU all three
are one kernel. docs/adding-an-engine.md walks through it.

    python examples/custom_engine.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import deuteron as dt
from deuteron.engines.libraries import fused_seconds
from deuteron.ir import Attrs


class LinearRelu:
    """Runs relu(linear(x, weight, bias)) where weight and bias never change."""

    name = "linear_relu"
    version = "1"

    def refuse(self, region: dt.Region, target: dt.Target, policy: dt.Policy) -> dt.Refusal | None:
        """None, or why not. The cheap questions come first."""
        if region.ops != ("linear", "relu"):
            return dt.Refusal(f"runs linear + relu, not {' + '.join(region.ops)}")
        linear, types = region.nodes[0], region.graph.types
        x = types[linear.inputs[0]]
        if region.outputs != region.nodes[1].outputs:
            return dt.Refusal("the product is read by others", "let only relu read it")
        if len(linear.inputs) < 3:
            return dt.Refusal("the call wants a bias", "give linear a bias")
        if not {linear.inputs[1], linear.inputs[2]} <= region.constants:
            return dt.Refusal("weight or bias is an input of the plan", "use g.constant(…)")
        if x.rank != 2 or not x.is_layout("contiguous"):
            return dt.Refusal(f"x is {x}, not a row-major matrix", "reshape it to [rows, features]")
        return None

    def candidates(
        self, region: dt.Region, target: dt.Target, policy: dt.Policy
    ) -> Sequence[dt.Candidate]:
        """Two ways that differ in speed and in nothing else."""
        return [
            dt.Candidate(self.name, self.version, Attrs({"turned": turned}))
            for turned in (True, False)
        ]

    def estimate(self, region: dt.Region, target: dt.Target, candidate: dt.Candidate) -> float:
        """Seconds by bytes and operations; reading the weight across its rows costs a tenth."""
        penalty = 1.0 if candidate.knobs["turned"] else 1.1
        return fused_seconds(region, target, penalty) + target.call

    def build(self, region: dt.Region, candidate: dt.Candidate, ctx: dt.BuildContext) -> dt.Kernel:
        """All that can be done once is done here, not in run."""
        linear = region.nodes[0]
        x = region.inputs.index(linear.inputs[0])
        weight, bias = (ctx.constants[value] for value in linear.inputs[1:3])
        matrix = weight.t().contiguous() if candidate.knobs["turned"] else weight.t()

        def run(*tensors: Any) -> None:
            torch._addmm_activation(bias, tensors[x], matrix, out=tensors[-1])

        return dt.Kernel(run, writes=True)


def block(device: str) -> tuple[dt.Graph, torch.Tensor]:
    """A graph that the engine takes part of, and an input for it."""
    gen = torch.Generator().manual_seed(0)
    g = dt.Graph("mlp")
    x = g.tensor("x", (64, 256))
    w1, w2 = (torch.randn(256, 256, generator=gen) / 16 for _ in range(2))
    b1, b2 = (torch.randn(256, generator=gen) for _ in range(2))
    hidden = g.relu(g.linear(x, g.constant(w1, "w1"), g.constant(b1, "b1")))
    g.gelu(g.linear(hidden, g.constant(w2, "w2"), g.constant(b2, "b2"))).output("y")
    return g, torch.randn(64, 256, generator=gen).to(device)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dt.register_engine(LinearRelu())  # from here on it competes in every plan
    g, x = block(device)
    plan = g.compile(device=device, find=True, budget_s=2.0)
    for choice in plan.decision.choices:
        print(f"{choice.region.name}: {' + '.join(choice.region.ops)} runs on {choice.candidate}")
        for option in choice.options:
            took = "not timed" if option.measured_s is None else f"{option.measured_s * 1e6:.1f} µs"
            print(f"    {option.candidate!s:40} {took:>10}  {option.rejected}")
        for name, refusal in choice.refusals:
            if name == LinearRelu.name:
                print(f"    {name} refused: {refusal.reason}")
    print({name: tuple(t.shape) for name, t in plan.run(x=x).items()})


if __name__ == "__main__":
    main()
