"""Kernels written by hand, held against the references: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Graph, Region
from deuteron.ops.evaluate import evaluate, implied
from deuteron.plan.acceptance import OF_BYTES, multiplies_bytes
from deuteron.plan.tensors import is_kept_between, poisoned
from deuteron.policy import Policy
from deuteron.target import Target, target
from tests.tolerances import allowed, error


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """On the device with its strides and its place in memory, which ``to`` keeps only for tensors
    without gaps."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def graph_of(name: str, feed: Mapping[str, torch.Tensor], write: Callable[..., Any]) -> Graph:
    """What ``write`` makes of a graph's inputs for these tensors: results y0, y1, …"""
    g = dt.Graph(name)
    items = feed.items()
    made = write(g, **{n: g.tensor(n, t.shape, t.dtype, strides=t.stride()) for n, t in items})
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        y.output(f"y{i}")
    return g.ir()


def drawn(seed: int, kind: torch.dtype, last: bool = False) -> Callable[..., torch.Tensor]:
    """A function that draws tensors of normal numbers; with ``last`` images lie channels last."""
    gen = torch.Generator().manual_seed(seed)

    def t(*shape: int, scale: float = 1.0, of: torch.dtype = kind) -> torch.Tensor:
        made = (torch.randn(shape, generator=gen) * scale).to(of)
        there = last and len(shape) == 4
        return made.contiguous(memory_format=torch.channels_last) if there else made

    return t


def compare(
    name: str,
    region: Region,
    feed: Mapping[str, torch.Tensor],
    device: str,
    most: int,
    reduced: int = 1,
    policy: Policy | None = None,
    gpus: Sequence[Target] = (),
    engine: TritonKernels | None = None,
) -> tuple[int, list[str]]:
    """How many candidates ran, and what is wrong with them. ``reduced``: how many numbers a sum
    has, which in float64 is as exact in one order as in another. ``gpus``: those whose candidates
    are taken, where not all that run here are; ``engine``: one of fewer recipes."""
    graph, engine, policy = region.graph, engine or TritonKernels(), policy or Policy()
    older = target("l4" if multiplies_bytes(region) else "a100")
    gpus = gpus or (target("h200"), older)[device == "cpu" :]  # nobody interprets Hopper's warps
    exact, plain = evaluate(graph, feed, float64=True), evaluate(graph, feed)
    given = [moved(feed[v], device) for v in region.inputs]
    pairs = {c: gpu for gpu in gpus for c in engine.candidates(region, gpu, policy)[:most]}
    bad = []
    for candidate, gpu in pairs.items():
        known = {v: t for v, t in zip(region.inputs, given, strict=True) if v in region.constants}
        ctx = BuildContext(gpu, torch.device(device), policy, known)
        outs = [poisoned(graph.types[v], torch.device(device)) for v in region.outputs]
        engine.build(region, candidate, ctx).fill(given, outs)
        kept = map(is_kept_between, outs, (graph.types[v] for v in region.outputs))
        bad += [] if all(kept) else [f"{name} {candidate}: wrote between the pixels of its result"]
        # such as signs: those of the kernel's own results, which next to 0 another rounding turns
        follow = implied(graph, {v: t.cpu() for v, t in zip(region.outputs, outs, strict=True)})
        for (output, v), out in zip(graph.outputs, outs, strict=True):
            if v in follow:
                if not torch.equal(out.cpu(), follow[v]):
                    bad.append(f"{name} {candidate} {output}: does not follow from other results")
                continue
            off = error(out, exact[output])
            bound = allowed(error(plain[output], exact[output]), out.dtype, reduced)
            bound += OF_BYTES if multiplies_bytes(region) else 0.0
            if not off <= bound:
                bad.append(f"{name} {candidate} {output}: off by {off:.3g}, allowed {bound:.3g}")
    return len(pairs), bad
