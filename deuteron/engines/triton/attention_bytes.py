"""Attention of 8-bit numbers on a GPU: the recipe around ``kernels/triton/attention_bytes.py``."""

from collections.abc import Sequence
from typing import NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import WIDEST
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs
from deuteron.engines.roofline import region_cost, times
from deuteron.engines.triton.attention_tiles import features_are_adjacent
from deuteron.engines.triton.common import knobs_of, one_operator, tensors_of, tiling_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops.attention_bytes import MOST
from deuteron.target import Target

NAMES = ("q", "k", "v", "q_scale", "k_scale", "v_scale")
MOST_HEADS = 2**16 - 1  # most heads, over all batches
LEAST = 32  # 8-bit numbers that matrix units add up at a time


class Tiling(NamedTuple):
    """Queries and keys of a block, warps, stages, and the part of the speed of products, which is a
    guess: it was not measured."""

    queries: int
    keys: int
    warps: int
    stages: int
    reached: float


TILINGS = (
    Tiling(128, 64, 8, 3, 0.3),
    Tiling(64, 64, 4, 3, 0.28),
    Tiling(64, 32, 4, 2, 0.2),
    Tiling(64, 32, 8, 2, 0.18),
    Tiling(32, 32, 4, 2, 0.1),
)


def _refuse(region: Region, node: Node, target: Target) -> None:
    types, given = region.graph.types, operands(node)
    q, v = types[given["q"]], types[given["v"]]
    # it compiles, but on an H200 results of 8-bit floats were wrong: refused until that is fixed
    refuse_if(q.dtype.is_float, "floats of 8 bits are not multiplied here yet", "use int8")
    odd = v.dtype.short not in ("f16", "bf16", *MOST)
    refuse_if(odd, f"v is of {v.dtype.short}, not of 16 or 8 bits", "cast it to bfloat16")
    refuse_if(max(q.shape[3], v.shape[3]) > WIDEST, "heads of more than 256 features")
    many = q.shape[0] * q.shape[1] > MOST_HEADS
    refuse_if(many, "more than 65535 heads of all batches", "give fewer batches at a time")
    for name in NAMES[:3]:
        refuse_if(
            not features_are_adjacent(types[given[name]]),
            f"features of {name} do not lie side by side",
            "copy it",
        )


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    given, types = operands(region.nodes[0]), region.graph.types
    q, v = types[given["q"]], types[given["v"]]
    deep, wide = _lanes(q.shape[3]), _lanes(v.shape[3])
    fitting = [
        t
        for t in TILINGS
        if t.queries * deep + t.stages * t.keys * (deep + wide * v.dtype.bits // 8) + 4096
        <= target.shared_bytes
        and t.queries * max(deep, wide) <= t.warps * 2048
    ]
    fitting.sort(key=lambda t: _seconds_of(region, t, target))
    return [knobs_of(t, "queries", "keys", "warps") for t in fitting[:2]]


def _lanes(features: int) -> int:
    return power_of_two(max(LEAST, features))


def _seconds_of(region: Region, tiling: Tiling, target: Target) -> float:
    """Priced as products of 16 bits, since the products wait for the softmax anyway."""
    q = region.graph.types[operands(region.nodes[0])["q"]]
    memory, compute = times(region_cost(region), "bf16", True, target)
    blocks = q.shape[0] * q.shape[1] * -(-q.shape[2] // tiling.queries)
    waste = tiling.queries * -(-q.shape[2] // tiling.queries) / q.shape[2]
    rounds = -(-blocks // target.units) * target.units / blocks
    return max(compute * waste * rounds / tiling.reached, memory / 0.8) + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, tiling_of(knobs, TILINGS), target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.attention_bytes import Block, Sizes, Steps, attention_bytes

    node, types, t = region.nodes[0], region.graph.types, tiling_of(knobs, TILINGS)
    given, attrs, out = operands(node), node.attrs, types[node.output]
    q, k, v, *scales = (types[given[n]] if n in given else None for n in NAMES)
    assert q is not None and k is not None and v is not None
    heads = q.shape[1]
    shared = heads // k.shape[1]
    size = Sizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3], heads, shared, attrs["offset"])
    steps = Steps(
        *(one.strides[:3] for one in (q, k, v, out)),
        *((0, 0, 0) if one is None else one.strides for one in scales),
    )
    lanes = _lanes(q.shape[3]), _lanes(v.shape[3])
    how = attrs["causal"], not q.dtype.is_float, int(MOST.get(v.dtype.short, 1))
    block = Block(t.queries, t.keys, *lanes, *how)
    call = attention_bytes(size, steps, attrs["scale"], block, q.shape[0], t.warps, t.stages)
    tensors = tensors_of(region, (*(given.get(n) for n in NAMES), *region.outputs))
    note = f"blocks of {t.queries} queries × {t.keys} keys"
    return Kernel(lambda *t: call(*tensors(t)), writes=True, note=note)


BYTES = one_operator("attention_bytes", ("attention_bytes",), _refuse, _knobs, _seconds, _build)
