"""Correcting estimates by measurements: how far estimates for similar work have been off.

An estimate counts bytes and operations. How much longer kernels really take depends on their kind
and on sizes, in ways that no formula here knows. So every engine was timed over random shapes that
belong to no network (``python -m bench.calibrate``). For each target, ``measured/`` says by kind of
work how to correct an estimate: leave it, multiply it by the median ratio of measured to estimated
time, or by the ratios of its nearest neighbours, whichever best predicted measurements that were
held out.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from deuteron.engines.base import Candidate
from deuteron.engines.roofline import CONVOLUTIONS, is_depthwise, main_dtype, region_cost
from deuteron.files import PACKAGE
from deuteron.ir.dtype import dtype
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.target import Target

FOLDER = PACKAGE / "engines" / "measured"

LEAST = 3  # parts of the coarsest kind that may have a correction: engine, way, what is computed
HELD = 3  # times the bytes of the cache: work that moved more was never faster than a plain copy

Kind = tuple[str, ...]  # what kind of work it is, from coarse to fine: see kind_of
Place = tuple[float, ...]  # logarithms of sizes: see place_of
Points = Sequence[tuple[Place, float]]  # measured cases, each with log₂(measured / estimated time)


def _nearest(place: Place, points: Points, median: float, count: int, reach: float) -> float:
    """The mean ratio of the ``count`` nearest points, weighted by 1 / (reach + distance²), and of
    the median of all points with weight 0.3."""
    apart = sorted((math.dist(place, where) ** 2, ratio) for where, ratio in points)[:count]
    weights = [1.0 / (reach + square) for square, _ in apart]
    total = sum(w * ratio for w, (_, ratio) in zip(weights, apart, strict=True))
    return (total + 0.3 * median) / (sum(weights) + 0.3)


# ways to predict log₂ of measured over estimated time from the measured points and their median
WAYS: Mapping[str, Callable[[Place, Points, float], float]] = {
    "as it is": lambda place, points, median: 0.0,
    "median": lambda place, points, median: median,
    "many": lambda place, points, median: _nearest(place, points, median, 12, 2.0),
    "few": lambda place, points, median: _nearest(place, points, median, 6, 0.3),
}


class Correction(NamedTuple):
    """How estimates of a kind are corrected. Of ``cases`` that were held out, seven in ten lay
    within a ``factor`` of the corrected estimate."""

    way: str
    median: float
    factor: float
    cases: int
    points: Points


def kind_of(region: Region, candidate: Candidate) -> Kind:
    """The kind of a piece of work, such that errors of estimates within a kind are alike: the
    engine, its recipe, what is computed, and details such as element type, window and memory
    order."""
    knobs, graph = candidate.knobs, region.graph
    way = str(knobs.get("recipe") or knobs.get("kind") or "")
    anchor = region.nodes[region.anchor] if region.anchor is not None else None
    out = max((graph.types[v] for v in region.outputs), key=lambda t: t.numel, default=None)
    fine = [f"{_bits(region)}"]
    if anchor is not None and anchor.op in (*CONVOLUTIONS, "linear", "matmul"):
        fine += ["odd"] if _is_odd(region, anchor) else []
    if anchor is None:
        moves = any(table.get(op).fusion is Fusion.INJECTIVE for op in region.ops)
        alone = len(region.nodes) == 1 and candidate.engine == "torch"
        what = region.ops[0] if alone else "moves" if moves else "chain"
    else:
        what = anchor.op
    if anchor is not None and anchor.op in CONVOLUTIONS:
        of_weight = anchor.op == "conv_dw"
        sides = graph.types[anchor.output if of_weight else anchor.inputs[1] or ""].shape[2:]
        alone, groups = is_depthwise(graph, anchor), anchor.attrs["groups"]
        each = graph.types[anchor.inputs[0] or ""].shape[1] // groups
        # cuDNN has matrix-unit kernels for groups whose number of channels is a power of two
        shared = "-groups" if each & (each - 1) else "-even groups"
        what += "-alone" if alone else shared if groups > 1 else ""
        what += "-transposed" if anchor.attrs["transposed"] else ""
        fine.append("window" if max(sides, default=1) > 1 else "pixel")
    if anchor is not None and anchor.op == "attention":
        fine += [str(knobs.get("backend", "")), "masked" if len(anchor.uses) > 3 else "whole"]
        fine += ["causal"] if anchor.attrs.get("causal") else []
    if out is not None and out.rank > 3:
        fine.append("rows" if out.is_layout("contiguous") else "apart")
    return candidate.engine, way, what, *fine


def _bits(region: Region) -> int:
    return dtype(main_dtype(region)).bits


def _is_odd(region: Region, anchor: Node) -> bool:
    """Whether a product has sizes that are no multiple of the 16 bytes that matrix units read."""
    types = [t for t in region.graph.in_types(anchor)[:2] if t is not None]
    out = region.graph.types[anchor.output]
    if anchor.op in CONVOLUTIONS:
        images = types if anchor.op == "conv_dw" else (types[0], out)
        return any(t.shape[1] % 8 for t in images)
    return any(t.shape[-1] % 8 for t in (*types, out) if t.rank)


def place_of(region: Region) -> Place:
    """log₂ of bytes, of the number of results, of operations per result, and of the extent of the
    result's innermost axis."""
    cost = region_cost(region)
    out = max((region.graph.types[v] for v in region.outputs), key=lambda t: t.numel, default=None)
    count = out.numel if out is not None else 1
    steps = zip(out.strides, out.shape, strict=True) if out is not None else ()
    beside = min(((step, size) for step, size in steps if size > 1), default=(1, 1))[1]
    sizes = cost.bytes, count, cost.flops / max(count, 1), beside
    return tuple(round(math.log2(max(size, 1.0)), 2) for size in sizes)


@lru_cache
def corrections(name: str) -> Mapping[Kind, Correction]:
    """The corrections for a target, by kind."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return {}
    data, points = json.loads(path.read_text()), dict[Kind, list[tuple[Place, float]]]()
    for text, rows in data["points"].items():
        kind = tuple(text.split("/"))
        for length in range(LEAST, len(kind) + 1):
            these = points.setdefault(kind[:length], [])
            these += ((tuple(place), ratio) for *place, ratio in rows)
    known = ((tuple(text.split("/")), facts) for text, facts in data["kinds"].items())
    return {kind: Correction(*(*facts, points[kind])) for kind, facts in known}


def _for(region: Region, candidate: Candidate, target: Target) -> Correction | None:
    """The correction of the finest kind that has one, or None."""
    known = corrections(target.name)
    kind = kind_of(region, candidate) if known else ()
    lengths = range(len(kind), LEAST - 1, -1)
    return next((known[kind[:n]] for n in lengths if kind[:n] in known), None)


def corrected(region: Region, candidate: Candidate, target: Target, seconds: float) -> float:
    """The estimate ``seconds``, corrected by how far estimates for similar work were off. If the
    work is too large for the cache, its measured neighbours may have fit, so the correction does
    not take the time below what memory takes."""
    found = _for(region, candidate, target) if 0 < seconds < math.inf else None
    if found is None:
        return seconds
    moved = region_cost(region).bytes
    least = moved / target.stream if moved > HELD * target.cache_bytes else 0.0
    factor = 2 ** WAYS[found.way](place_of(region), found.points, found.median)
    return float(max(seconds * factor, min(seconds, least)))


def how_far_off(region: Region, candidate: Candidate, target: Target) -> str:
    """How far estimates of this kind are off, in words; empty if no such work was measured."""
    found = _for(region, candidate, target)
    if found is None:
        return ""
    part = f"{100 * (found.factor - 1):.0f} % in 7 of 10 cases, {found.cases} measured"
    return f"estimates of this kind: within {part}"
