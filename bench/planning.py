"""Time to a heuristic plan as graphs grow."""

from __future__ import annotations

import time

import deuteron as dt
from bench.harness import Record

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


def run(device: str, quick: bool = False, compile_peer: bool = True) -> Record:
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
