"""Attention on a GPU with any bias or mask: the recipe around ``kernels/triton/attention.py``.

Libraries have kernels of their own for attention without a bias. With one they read it through
slower kernels, or write all scores to memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import region_cost, times
from deuteron.engines.triton.common import refuse_elsewhere, refuse_empty, refuse_uneven, tiling_of
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

KINDS = ("f16", "bf16")
WIDEST = 256  # features of a head


class Tiling(NamedTuple):
    """Queries and keys of a block, warps, stages, and the part of what products reach."""

    queries: int
    keys: int
    warps: int
    stages: int
    reached: float


TILINGS = (
    Tiling(128, 128, 8, 2, 0.55),
    Tiling(128, 64, 8, 3, 0.50),
    Tiling(64, 64, 4, 3, 0.40),
    Tiling(64, 32, 4, 2, 0.30),
    Tiling(16, 64, 4, 3, 0.12),
)
OFFERED = 2


class Work(NamedTuple):
    """The tensors of a region by what they are, with a batch."""

    q: TensorType
    k: TensorType
    v: TensorType
    bias: TensorType | None
    out: TensorType


def _whole(t: TensorType, rank: int = 4) -> TensorType:
    """With a batch, and heads: sizes of 1 in front."""
    front = rank - t.rank
    shape, strides = (1,) * front + t.shape, (0,) * front + t.strides
    return TensorType(shape, t.dtype, strides)


def found(region: Region) -> Work:
    types, node = region.graph.types, region.nodes[0]
    given = [None if v is None else _whole(types[v]) for v in (*node.inputs, None)[:4]]
    q, k, v, bias = given
    assert q is not None and k is not None and v is not None
    return Work(q, k, v, bias, _whole(types[node.output]))


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("attention",), "is not attention alone", quiet=True)
    refuse_elsewhere(target)
    refuse_empty(region)
    work = found(region)
    odd = work.q.dtype.short not in KINDS
    refuse_if(odd, f"q is of {work.q.dtype.short}, not of 16 bits", "cast it to bfloat16")
    refuse_if(max(work.q.shape[3], work.v.shape[3]) > WIDEST, "heads of more than 256 features")
    for name, t in (("q", work.q), ("k", work.k), ("v", work.v), ("the result", work.out)):
        beside = t.strides[3] == 1 or t.shape[3] == 1
        refuse_if(not beside, f"features of {name} do not lie side by side", "copy it")
        for step in _strides(t)[:3]:
            refuse_uneven(name, step, t.dtype.bits)


def _fits(region: Region, tiling: Tiling, target: Target) -> bool:
    """Whether a block is in shared memory: queries, keys and values in stages, and the result."""
    work = found(region)
    wide, deep = (power_of_two(max(16, t.shape[3])) for t in (work.v, work.q))
    moved = tiling.queries * (deep + wide) + tiling.stages * tiling.keys * (deep + wide)
    return 2 * moved + 4096 <= target.shared_bytes


def _seconds_of(region: Region, tiling: Tiling, target: Target) -> float:
    work, cost = found(region), region_cost(region)
    blocks = work.q.shape[0] * work.q.shape[1] * -(-work.q.shape[2] // tiling.queries)
    waste = tiling.queries * -(-work.q.shape[2] // tiling.queries) / work.q.shape[2]
    rounds = -(-blocks // target.units) * target.units / blocks
    memory, compute = times(cost, work.q.dtype.short, True, target)
    bias = 2.0 if work.bias is not None else 1.0  # it is read number by number
    return max(bias * compute * waste * rounds / tiling.reached, memory / 0.8) + target.launch


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    fitting = [t for t in TILINGS if _fits(region, t, target)]
    fitting.sort(key=lambda t: _seconds_of(region, t, target))
    return [{"queries": t.queries, "keys": t.keys} for t in fitting[:OFFERED]]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, tiling_of(knobs, TILINGS), target)


def _strides(t: TensorType) -> tuple[int, ...]:
    """From one to the next; 0 along sizes of 1."""
    return tuple(0 if n == 1 else step for n, step in zip(t.shape, t.strides, strict=True))


def _steps(t: TensorType) -> tuple[int, ...]:
    """From one batch, head and position to the next; a single position has a step, too, which must
    be even."""
    batch, head, line, _ = _strides(t)
    return batch, head, line or -(-t.shape[3] // 8) * 8


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.attention import Block, Lengths, Steps, attention

    work, tiling, node = found(region), tiling_of(knobs, TILINGS), region.nodes[0]
    q, k, v, bias, out = work
    batch, heads, queries, features = q.shape
    lengths = queries, k.shape[2], features, v.shape[3]
    size = Lengths(*lengths, heads, heads // k.shape[1])
    given = (0, 0, 0, 0) if bias is None else _strides(bias)
    steps = Steps(_steps(q), _steps(k), _steps(v), _steps(out), given)
    kind = "none" if bias is None else "allowed" if bias.dtype.short == "bool" else "added"
    deep, wide = (power_of_two(max(16, t.shape[3])) for t in (q, v))
    block = Block(tiling.queries, tiling.keys, deep, wide, node.attrs["causal"], kind)
    how = tiling.warps, tiling.stages
    call = attention(size, steps, block, node.attrs["scale"], batch, *how)
    places = [region.inputs.index(u) for u in node.uses]

    def run(*t: object) -> None:
        one, two, three, *rest = (t[i] for i in places)
        call(one, two, three, rest[0] if rest else None, t[-1])

    sizes = f"{tiling.queries} queries × {tiling.keys} keys"
    return Kernel(run, writes=True, note=f"blocks of {sizes}")


# how good the estimate is, nobody has measured yet: plans by estimate leave it to libraries
_ATTENTION = (_refuse, _build, _knobs, _seconds, 0.9)
ATTENTION = Recipe("attention", ("attention",), *_ATTENTION, by_estimate=False)
