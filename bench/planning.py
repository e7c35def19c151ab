"""Time to a heuristic plan as graphs grow; and, by ``python -m bench.planning mobilenet_v2 …``,
what deciding about networks for an H200 takes, which needs none."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import deuteron as dt
from bench.harness import Record
from bench.networks import NETWORKS, First
from deuteron.engines import engine
from deuteron.frontends.torch_export import import_module
from deuteron.plan.decide import decide

NOTE = (
    "Seconds from a finished graph to a runnable heuristic plan. `mixed` is a residual chain of "
    "products, normalisation, activations and sums; `wide` is many independent branches that "
    "meet; `pointwise` is one long elementwise chain."
)


def mixed(nodes: int) -> dt.Graph:
    g = dt.Graph("mixed")
    x = g.tensor("x", (8, 32))
    w = g.tensor("w", (32, 32))
    while len(g.build.nodes) < nodes:
        x = x + g.gelu(g.linear(g.layer_norm(x), w))
    x.output("y")
    return g


def wide(nodes: int) -> dt.Graph:
    g = dt.Graph("wide")
    x = g.tensor("x", (8, 32))
    w = g.tensor("w", (32, 32))
    total = None
    while len(g.build.nodes) < nodes:
        branch = g.relu(g.linear(x, w) * float(len(g.build.nodes)))
        total = branch if total is None else total + branch
    assert total is not None
    total.output("y")
    return g


def pointwise(nodes: int) -> dt.Graph:
    g = dt.Graph("pointwise")
    x = g.tensor("x", (8, 32))
    y = x
    while len(g.build.nodes) < nodes:
        y = g.tanh(y) + x
    y.output("y")
    return g


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("planning", device, NOTE)
    policy = dt.Policy(cuda_graph=False)
    mixed(20).compile(device=device, policy=policy)
    for make in (mixed, wide, pointwise):
        for nodes in (50, 500, 5000):
            graph = make(nodes)
            begin = time.perf_counter()
            plan = graph.compile(device=device, policy=policy)
            seconds = time.perf_counter() - begin
            record.add(
                graph=make.__name__,
                nodes=len(graph.build.nodes),
                regions=len(plan.decision.choices),
                seconds=seconds,
                us_per_node=seconds / nodes * 1e6,
            )
    return record


def for_h200(name: str) -> str:
    """A network of :mod:`bench.networks`, batch 1 in float16, planned by estimate: seconds of this
    processor, and what its generated kernels are."""
    make, example, _ = NETWORKS[name]
    x = example(1)
    x = x.half() if x.is_floating_point() else x
    with torch.no_grad():
        graph = import_module(First(make()).eval().half(), (x,), {}).graph
    begin = time.process_time()
    made = decide(graph, dt.target("h200"), dt.Policy())
    seconds = time.process_time() - begin
    generated = [c for c in made.choices if c.candidate.engine == "triton_gen"]
    writer: Any = engine("triton_gen")
    sources = {writer.render(c.region, c.candidate).source for c in generated}
    kinds = {(c.region.text, c.candidate) for c in made.choices}
    return (
        f"{name}: {seconds:.2f} s, {len(graph.nodes)} operators, {len(made.choices)} regions, "
        f"{len(kinds)} of them different; {len(sources)} generated kernels, "
        f"{sum(map(len, sources))} bytes of source"
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or NETWORKS:
        print(for_h200(name), flush=True)
