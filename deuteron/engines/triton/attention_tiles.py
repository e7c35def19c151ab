"""Attention on a GPU: which blocks of queries and keys we offer, and how long they should take."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs
from deuteron.engines.roofline import node_cost, region_cost, times
from deuteron.engines.triton import attention_rope as rope
from deuteron.engines.triton.common import LINE, knobs_of, tiling_of
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target


class Tiling(NamedTuple):
    """Queries and keys of a block, warps and stages. ``reached``: the part of the speed of
    products; ``divided``: the kernel for Hopper with specialised warps; ``short``: all keys are in
    one block, and a program computes several sequences."""

    queries: int
    keys: int
    warps: int
    stages: int
    reached: float
    divided: bool = False
    short: bool = False


TILINGS = (
    Tiling(64, 64, 4, 3, 0.62, short=True),
    Tiling(128, 128, 8, 2, 0.45, short=True),
    Tiling(32, 32, 4, 3, 0.30, short=True),
    Tiling(16, 16, 2, 3, 0.10, short=True),
    Tiling(128, 128, 4, 2, 0.97, divided=True),
    Tiling(64, 64, 4, 3, 0.62),
    Tiling(128, 64, 8, 3, 0.58),
    Tiling(128, 128, 8, 2, 0.45),
    Tiling(64, 32, 4, 2, 0.50),
    Tiling(16, 64, 4, 3, 0.22),
)
BACK_TILINGS = (
    Tiling(64, 128, 4, 3, 0.62, divided=True),
    Tiling(64, 64, 4, 2, 0.38),
    Tiling(32, 64, 4, 2, 0.30),
    Tiling(64, 128, 8, 2, 0.28),
    Tiling(32, 32, 4, 1, 0.16),
)
OFFERED = 2
FORWARD, BACK = ("attention", "attention_lse"), ("attention_grad", "attention_full_grad")
EVEN = 8  # numbers that a thread reads at a time; the copy engine needs multiples of it
# seconds until the copy engine knows the tensors; seconds to begin and end a tile
START_S, TILE_S = 3e-6, 1e-6
# For sequences of one block of keys: the seconds of one by 64 queries and keys; the factor with a
# bias; how many programs run on a multiprocessor at once; how many sequences a program computes at
# most; and how many rounds of programs are enough.
SHORT_S, BIASED, SHORT_AT_ONCE, MOST_SHORT, SHORT_ROUNDS = 1.5e-6, 1.7, 4, 8, 2
TOLD_S = 1.2e-6  # seconds of a program to describe its tensors to the copy engine; others compute
# the gradient on Hopper: lines of the tile that is held, and of the blocks that pass by it
HELD, BACK_SIDE = 128, 64


class Work(NamedTuple):
    """The tensors of a region by their roles, all with four dimensions."""

    q: TensorType
    k: TensorType
    v: TensorType
    bias: TensorType | None
    out: TensorType
    grad: TensorType | None


def _whole(t: TensorType, rank: int = 4) -> TensorType:
    """A tensor with sizes of 1 in front, for the batch and heads that it lacks."""
    front = rank - t.rank
    shape, strides = (1,) * front + t.shape, (0,) * front + t.strides
    return TensorType(shape, t.dtype, strides)


def as_attention(region: Region, way: str = "") -> Work:
    """The region's tensors. ``way``: what the kernel rotates by its rotary position as it loads it,
    see ``attention_rope.py``."""
    types, node = region.graph.types, region.nodes[-1]
    given = {n: _whole(types[v]) for n, v in rope.read(region, way).items() if n in Work._fields}
    given.setdefault("out", _whole(types[node.outputs[0]]))
    return Work(*(given.get(name) for name in Work._fields))  # type: ignore[arg-type]


def features_are_adjacent(t: TensorType) -> bool:
    """Whether the features of each position are adjacent in memory."""
    return t.strides[3] == 1 or t.shape[3] == 1


def tiling_fits(region: Region, tiling: Tiling, way: str, target: Target) -> bool:
    """Whether the kernel of a tiling can compute this region, and whether a block (queries, keys
    and values in stages, and the result) fits in shared memory."""
    work = as_attention(region, way)
    wide, deep = (power_of_two(max(16, t.shape[3])) for t in (work.v, work.q))
    regular = target.has_warpgroups and _is_regular(work, max(deep, wide))
    if tiling.divided and not (regular and way != "qk"):
        return False
    if tiling.short and not _is_short(region, work, tiling, way):
        return False
    if tiling.divided and work.grad is not None:
        bias = BACK_SIDE * HELD * bias_stages(work, deep + wide)
        return 2 * ((HELD + tiling.stages * BACK_SIDE) * (deep + wide) + bias) + 8192 <= (
            target.shared_bytes
        )
    moved = tiling.queries * (deep + wide) + tiling.stages * tiling.keys * (deep + wide)
    moved += tiling.keys * deep if way == "qk" else 0  # rotated keys
    moved += tiling.queries * tiling.keys if tiling.divided and work.bias else 0
    return 2 * moved + 4096 <= target.shared_bytes


def _is_short(region: Region, work: Work, tiling: Tiling, way: str) -> bool:
    """Whether all keys of a sequence fit in this block and in no smaller one, and all sequences
    have the same length."""
    given = operands(region.nodes[-1])
    uneven = region.nodes[-1].attrs["side"] or any(n in given for n in ("q_lengths", "k_lengths"))
    holding = [t.keys for t in TILINGS if t.short and t.keys >= work.k.shape[2]]
    return not uneven and not way and tiling.keys == min(holding, default=0)


def _is_regular(work: Work, lanes: int) -> bool:
    """Whether the kernel with specialised warps can run: sums of a block fit in registers, tensors
    are not expanded (stride 0), and the copy engine can load all of them."""
    moved = (work.q, work.k, work.v, work.grad or work.out)
    sides = [side for t in moved for side in zip(t.shape, t.strides, strict=True)]
    whole = all(step > 0 for n, step in sides if n > 1) and lanes <= 128
    whole = whole and all(
        s * t.dtype.bits // 8 % LINE == 0 for t in moved for s in strides_of(t)[:3]
    )
    bias = work.bias
    brought = bias is None or (bias.dtype == work.q.dtype and is_tiled(work))
    return whole and brought


def seconds_of(region: Region, tiling: Tiling, way: str, target: Target) -> float:
    work, cost = as_attention(region, way), region_cost(region)
    # rotary positions are priced below
    cost = replace(cost, flops=node_cost(region.graph, region.nodes[-1]).flops)
    blocks = work.q.shape[0] * work.q.shape[1] * -(-work.q.shape[2] // tiling.queries)
    waste = tiling.queries * -(-work.q.shape[2] // tiling.queries) / work.q.shape[2]
    rounds = -(-blocks // target.units) * target.units / blocks
    memory, compute = times(cost, work.q.dtype.short, True, target)
    slow = 2.5 if work.bias is not None and not is_tiled(work) else 1.0  # loaded number by number
    slow *= 1.6 if region.nodes[-1].attrs["dropout"] else 1.0
    if tiling.short:
        several = several_of(work, tiling, target)
        turns = several * -(-blocks // (several * target.units * SHORT_AT_ONCE))
        each = SHORT_S * tiling.queries * tiling.keys / 64**2 * (BIASED if work.bias else 1.0)
        return max(turns * each, memory / 0.8) + target.launch
    # with few features the work between the two products weighs more
    few = min(1.0, (work.q.shape[3] + work.v.shape[3]) / 256)
    if tiling.divided:
        few, waste = max(few, 0.2) ** 0.75, waste * (1 + tiling.keys / work.k.shape[2])
    reached = tiling.reached * max(few, 0.1)
    begun = START_S + TILE_S * -(-blocks // target.units) if tiling.divided else 0.0
    if not tiling.divided and even_of(work) == EVEN:
        begun = TOLD_S * blocks / target.units
    turning, before = rope.seconds(region, way, tiling.queries, tiling.keys, target)
    multiplying = slow * compute * waste * rounds / reached + begun + turning * rounds
    return max(multiplying, memory / 0.8) + target.launch + before


def knobs_for(
    tilings: Sequence[Tiling], region: Region, target: Target, policy: Policy
) -> Sequence[Knobs]:
    side, ways = region.nodes[-1].attrs["side"], rope.ways(region)
    even = [t for t in tilings if side % t.queries == 0 == side % t.keys]
    offered = []
    for way in ways:
        fitting = [t for t in even if tiling_fits(region, t, way, target)]
        fitting.sort(key=lambda t: seconds_of(region, t, way, target))
        turned = {"rope": way} if way else {}
        for t in fitting[: OFFERED // len(ways)]:
            offered.append(knobs_of(t, "queries", "keys", "warps", "divided", "short") | turned)
    return offered


def seconds(tilings: Sequence[Tiling], region: Region, target: Target, knobs: Knobs) -> float:
    return seconds_of(region, tiling_of(knobs, tilings), knobs.get("rope", ""), target)


def strides_of(t: TensorType) -> tuple[int, ...]:
    """The strides, with 0 for sizes of 1."""
    return tuple(0 if n == 1 else step for n, step in zip(t.shape, t.strides, strict=True))


def even_of(work: Work) -> int:
    """How many numbers of a line threads may read at a time: all lines begin at multiples of it."""
    of = [t for t in (work.q, work.k, work.v, work.out, work.grad) if t is not None]
    return gcd(EVEN, *(n for t in of for n in (*strides_of(t)[:3], t.shape[3])))


def is_tiled(work: Work) -> bool:
    """Whether the copy engine can load blocks of the bias."""
    bias = work.bias
    whole = (work.q.shape[2], work.k.shape[2])
    if bias is None or not bias.dtype.is_float or bias.shape[2:] != whole:
        return False
    steps = strides_of(bias)
    lines = all(step * bias.dtype.bits // 8 % LINE == 0 for step in steps[:3])
    return steps[3] == 1 and steps[2] > 0 and lines


def several_of(work: Work, tiling: Tiling, target: Target) -> int:
    """How many sequences a program computes one after the other: as many as possible while there
    are still enough programs for all multiprocessors."""
    blocks = work.q.shape[0] * work.q.shape[1] * -(-work.q.shape[2] // tiling.queries)
    return max(1, min(MOST_SHORT, blocks // (target.units * SHORT_ROUNDS)))


def bias_stages(work: Work, lanes: int) -> int:
    """How many blocks of a bias the copy engine loads ahead."""
    return 0 if work.bias is None else 2 if lanes <= 128 else 1
