"""Plan one transformer layer for GPUs that are not here, and compare what limits it on each.

Nothing is run and no weight exists: a graph holds shapes, and a target holds the facts about a
machine (bandwidth, rates, launch cost). The times are predictions, good for finding what to fuse
and which machine to rent, not for quoting.

    python examples/plan_for_a_gpu_you_do_not_have.py
"""

from __future__ import annotations

import deuteron as dt

GPUS = ("l4", "rtx4090", "a100", "h100", "h200", "b200")


def layer(tokens: int = 2048, width: int = 4096, heads: int = 32) -> dt.Graph:
    """Attention and a feed-forward part, both with a residual, in bfloat16."""
    g = dt.Graph("layer")

    def weight(name: str, *shape: int) -> dt.Sym:
        return g.tensor(name, shape, dt.bfloat16)

    def split(x: dt.Sym) -> dt.Sym:
        """[tokens, width] as [1, heads, tokens, width of one head]."""
        return g.permute(g.reshape(x, (1, tokens, heads, width // heads)), (0, 2, 1, 3))

    x = g.tensor("x", (tokens, width), dt.bfloat16)
    seen = g.rms_norm(x, weight("norm1", width))
    q, k, v = (split(g.linear(seen, weight(n, width, width))) for n in ("wq", "wk", "wv"))
    mixed = g.permute(g.attention(q, k, v, causal=True), (0, 2, 1, 3))
    x = x + g.linear(g.reshape(mixed, (tokens, width)), weight("wo", width, width))
    seen = g.rms_norm(x, weight("norm2", width))
    gate = g.silu(g.linear(seen, weight("w1", 4 * width, width)))
    up = g.linear(seen, weight("w3", 4 * width, width))
    (x + g.linear(gate * up, weight("w2", width, 4 * width))).output("y")
    return g


def main() -> dict[str, float]:
    """Print a line per GPU; predicted seconds by name."""
    plan = layer().compile(device="cpu")  # planned here, run nowhere
    predicted = {}
    print(f"{'gpu':8} {'predicted':>10} {'roofline':>10} {'reached':>8}  slowest region")
    for name in GPUS:
        report = plan.explain(target=name).report
        slowest = max(report.regions, key=lambda r: r.predicted_s)
        predicted[name] = report.predicted_s
        print(
            f"{name:8} {report.predicted_s * 1e3:7.2f} ms {report.roofline_s * 1e3:7.2f} ms "
            f"{report.roofline_s / report.predicted_s:8.0%}  "
            f"{'+'.join(slowest.ops)} by {slowest.candidate}"
        )
    print()
    print(plan.explain(target="h200").to_text(limit=5))
    return predicted


if __name__ == "__main__":
    main()
