"""Attention on a GPU and its gradients: the recipes around ``kernels/triton/attention.py``, where
the GPU is a Hopper ``attention_hopper.py``, and ``attention_grad.py``.

Libraries have kernels of their own for plain attention. A bias they read through slower kernels, or
write all scores to memory; windows, soft caps, slopes and seeds they do not have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import WIDEST, node_cost, region_cost, times
from deuteron.engines.triton import attention_rope as rope
from deuteron.engines.triton.common import LINE, knobs_of, room_for, tensors_of, tiling_of
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.attention import is_plain
from deuteron.ops.attention_math import Besides
from deuteron.ops.random import HALF, cutoff
from deuteron.policy import Policy
from deuteron.target import Target

KINDS = ("f16", "bf16")


class Tiling(NamedTuple):
    """Queries and keys of a block, warps, stages, the part of what products reach, whether
    warps divide the work, as Hopper's do, and whether all keys are in one block and a program
    computes several sequences."""

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


class Work(NamedTuple):
    """The tensors of a region by what they are, with a batch."""

    q: TensorType
    k: TensorType
    v: TensorType
    bias: TensorType | None
    out: TensorType
    grad: TensorType | None


FORWARD, BACK = ("attention", "attention_lse"), ("attention_grad", "attention_full_grad")


def _whole(t: TensorType, rank: int = 4) -> TensorType:
    """With a batch, and heads: sizes of 1 in front."""
    front = rank - t.rank
    shape, strides = (1,) * front + t.shape, (0,) * front + t.strides
    return TensorType(shape, t.dtype, strides)


def found(region: Region, way: str = "") -> Work:
    """``way``: what is turned by its rotary position as it is loaded, see ``attention_rope.py``."""
    types, node = region.graph.types, region.nodes[-1]
    given = {n: _whole(types[v]) for n, v in rope.read(region, way).items() if n in Work._fields}
    given.setdefault("out", _whole(types[node.outputs[0]]))
    return Work(*(given.get(name) for name in Work._fields))  # type: ignore[arg-type]


def _refuse(
    ops: Sequence[str], plain: bool, region: Region, target: Target, policy: Policy
) -> None:
    refuse_if(region.ops[-1] not in ops, "is not attention alone", quiet=True)
    node = region.nodes[-1]
    other = plain != (node.op == "attention" and is_plain(node))
    refuse_if(other, "is a matter of the other recipe", quiet=True)
    rope.refuse(region)
    for way in rope.ways(region):
        _refuse_way(region, way)


def _refuse_way(region: Region, way: str) -> None:
    work = found(region, way)
    odd = work.q.dtype.short not in KINDS
    refuse_if(odd, f"q is of {work.q.dtype.short}, not of 16 bits", "cast it to bfloat16")
    refuse_if(max(work.q.shape[3], work.v.shape[3]) > WIDEST, "heads of more than 256 features")
    several = {"q": work.q, "k": work.k, "v": work.v, "the result": work.out}
    _refuse_besides(region)
    for name, t in (several | ({} if work.grad is None else {"the gradient": work.grad})).items():
        refuse_if(not beside(t), f"features of {name} do not lie side by side", "copy it")


def _refuse_besides(region: Region) -> None:
    """What kernels cannot do with lengths, tables of blocks and what functions capture."""
    node = region.nodes[-1]
    given = {name: region.graph.types[v] for name, v in operands(node).items()}
    for name in [n for n in Besides._fields[3:] if n in given]:
        known = given[name].is_layout("contiguous") or name[0] == "t"
        refuse_if(not known, f"{name} is not in row-major order", "copy it")
        kind = given[name].dtype
        refuse_if(
            kind.bits > 32 and kind.is_float, f"{name} is of {kind.short}", "cast it to float32"
        )
    side = node.attrs["side"]
    refuse_if(side % 64 != 0, f"blocks of {side} are no multiple of 64", "use blocks of 64 or 128")
    table = side > 0 and node.op == BACK[1]
    refuse_if(table, "the gradient of a bias does not go by a table of blocks", "give no table")


def beside(t: TensorType) -> bool:
    """Whether the features of each position lie side by side."""
    return t.strides[3] == 1 or t.shape[3] == 1


def _fits(region: Region, tiling: Tiling, way: str, target: Target) -> bool:
    """Whether a block is in shared memory: queries, keys and values in stages, and the result."""
    work = found(region, way)
    wide, deep = (power_of_two(max(16, t.shape[3])) for t in (work.v, work.q))
    regular = target.has_warpgroups and _is_regular(region, work, max(deep, wide))
    if tiling.divided and not (regular and way != "qk"):
        return False
    if tiling.short and not _is_short(region, work, tiling, way):
        return False
    if tiling.divided and work.grad is not None:
        bias = BACK_SIDE * HELD * _bias_stages(work, deep + wide)
        return 2 * ((HELD + tiling.stages * BACK_SIDE) * (deep + wide) + bias) + 8192 <= (
            target.shared_bytes
        )
    moved = tiling.queries * (deep + wide) + tiling.stages * tiling.keys * (deep + wide)
    moved += tiling.keys * deep if way == "qk" else 0  # keys that are turned
    moved += tiling.queries * tiling.keys if tiling.divided and work.bias else 0
    return 2 * moved + 4096 <= target.shared_bytes


def _is_short(region: Region, work: Work, tiling: Tiling, way: str) -> bool:
    """Whether all keys of each sequence are one block, that no smaller one holds, and all sequences
    have the same length."""
    given = operands(region.nodes[-1])
    uneven = region.nodes[-1].attrs["side"] or any(n in given for n in ("q_lengths", "k_lengths"))
    holding = [t.keys for t in TILINGS if t.short and t.keys >= work.k.shape[2]]
    return not uneven and not way and tiling.keys == min(holding, default=0)


def _is_regular(region: Region, work: Work, lanes: int) -> bool:
    """Whether warps can divide the work: sums of a block are in registers, tensors are no
    expansions of smaller ones, the copy engine brings all of them, and on the way there all blocks
    have one length."""
    node = region.nodes[-1]
    given = operands(node)
    uneven = node.attrs["side"] or any(n in given for n in ("q_lengths", "k_lengths"))
    if uneven and work.grad is None:
        return False
    moved = (work.q, work.k, work.v, work.grad or work.out)
    sides = [side for t in moved for side in zip(t.shape, t.strides, strict=True)]
    whole = all(step > 0 for n, step in sides if n > 1) and lanes <= 128
    whole = whole and all(s * t.dtype.bits // 8 % LINE == 0 for t in moved for s in _strides(t)[:3])
    bias = work.bias
    brought = bias is None or (bias.dtype == work.q.dtype and _is_tiled(work))
    return whole and brought


EVEN = 8  # numbers that a thread reads at a time, and multiples of which the copy engine reads
START_S, TILE_S = 3e-6, 1e-6  # until the copy engine knows the tensors; what begins and ends a tile


# Sequences of one block of keys: what one takes by 64 queries and keys, and times that with a bias,
# how many programs a multiprocessor has at once, how many sequences a program computes at most, and
# how many rounds of programs are enough.
SHORT_S, BIASED, SHORT_AT_ONCE, MOST_SHORT, SHORT_ROUNDS = 1.5e-6, 1.7, 4, 8, 2
TOLD_S = 1.2e-6  # a program that tells the copy engine of its tensors, while others compute


def _seconds_of(region: Region, tiling: Tiling, way: str, target: Target) -> float:
    work, cost = found(region, way), region_cost(region)
    cost = replace(cost, flops=node_cost(region.graph, region.nodes[-1]).flops)  # turning: below
    blocks = work.q.shape[0] * work.q.shape[1] * -(-work.q.shape[2] // tiling.queries)
    waste = tiling.queries * -(-work.q.shape[2] // tiling.queries) / work.q.shape[2]
    rounds = -(-blocks // target.units) * target.units / blocks
    memory, compute = times(cost, work.q.dtype.short, True, target)
    slow = 2.5 if work.bias is not None and not _is_tiled(work) else 1.0  # number by number
    slow *= 1.6 if region.nodes[-1].attrs["dropout"] else 1.0
    if tiling.short:
        several = _several(work, tiling, target)
        turns = several * -(-blocks // (several * target.units * SHORT_AT_ONCE))
        each = SHORT_S * tiling.queries * tiling.keys / 64**2 * (BIASED if work.bias else 1.0)
        return max(turns * each, memory / 0.8) + target.launch
    few = min(1.0, (work.q.shape[3] + work.v.shape[3]) / 256)  # between them others are computed
    if tiling.divided:
        few, waste = max(few, 0.2) ** 0.75, waste * (1 + tiling.keys / work.k.shape[2])
    reached = tiling.reached * max(few, 0.1)
    begun = START_S + TILE_S * -(-blocks // target.units) if tiling.divided else 0.0
    if not tiling.divided and _even(work) == EVEN:
        begun = TOLD_S * blocks / target.units
    turning, before = rope.seconds(region, way, tiling.queries, tiling.keys, target)
    multiplying = slow * compute * waste * rounds / reached + begun + turning * rounds
    return max(multiplying, memory / 0.8) + target.launch + before


def _knobs(
    tilings: Sequence[Tiling], region: Region, target: Target, policy: Policy
) -> Sequence[Knobs]:
    side, ways = region.nodes[-1].attrs["side"], rope.ways(region)
    even = [t for t in tilings if side % t.queries == 0 == side % t.keys]
    offered = []
    for way in ways:
        fitting = [t for t in even if _fits(region, t, way, target)]
        fitting.sort(key=lambda t: _seconds_of(region, t, way, target))
        turned = {"rope": way} if way else {}
        for t in fitting[: OFFERED // len(ways)]:
            offered.append(knobs_of(t, "queries", "keys", "warps", "divided", "short") | turned)
    return offered


def _seconds(tilings: Sequence[Tiling], region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, tiling_of(knobs, tilings), knobs.get("rope", ""), target)


def _strides(t: TensorType) -> tuple[int, ...]:
    """From one to the next; 0 along sizes of 1."""
    return tuple(0 if n == 1 else step for n, step in zip(t.shape, t.strides, strict=True))


def _steps(t: TensorType) -> tuple[int, ...]:
    """From one batch, head and position to the next; a single position has a step, too, which must
    be even."""
    batch, head, line, _ = _strides(t)
    return batch or 8, head or 8, line or -(-t.shape[3] // 8) * 8


UNSEEN = 1 << 30  # further than any window


def _even(work: Work) -> int:
    """How many numbers of a line threads may read at a time: lines begin at multiples of them."""
    of = [t for t in (work.q, work.k, work.v, work.out, work.grad) if t is not None]
    return gcd(EVEN, *(n for t in of for n in (*_strides(t)[:3], t.shape[3])))


def _is_tiled(work: Work) -> bool:
    """Whether the copy engine can bring blocks of the bias."""
    bias = work.bias
    whole = (work.q.shape[2], work.k.shape[2])
    if bias is None or not bias.dtype.is_float or bias.shape[2:] != whole:
        return False
    steps = _strides(bias)
    lines = all(step * bias.dtype.bits // 8 % LINE == 0 for step in steps[:3])
    return steps[3] == 1 and steps[2] > 0 and lines


def _settings(
    work: Work,
    region: Region,
    tiling: Tiling,
    turned: tuple[int, int, str, bool] = (0, 0, "", False),
) -> tuple[Any, Any]:
    """What is asked for, and the block, as all kernels take them. ``turned``: the rows of tables of
    angles that q and k begin with, what is turned, and whether by neighbours."""
    from deuteron.codegen.triton_scores import score_functions
    from deuteron.kernels.triton import attention_grad
    from deuteron.kernels.triton.attention import Asked, Block, Lengths, Numbers, Sight, Steps

    node, types = region.nodes[-1], region.graph.types
    q, k, v, bias = work.q, work.k, work.v, work.bias
    given, attrs = operands(node), node.attrs
    heads, keys = q.shape[1], k.shape[2]
    packed = attrs["packed"]
    several = types[given["q_lengths"]].shape[0] - 1 if packed else 0
    shared = heads // k.shape[1]
    size = Lengths(q.shape[2], keys, q.shape[3], v.shape[3], heads, shared, several)
    left, right = attrs["window"] or (-1, -1)
    right = 0 if attrs["causal"] and right else right
    ends = left >= 0, right >= 0
    reach = left if ends[0] else UNSEEN, right if ends[1] else UNSEEN
    sight = Sight(*reach, attrs["offset"], *turned[:2])
    p = attrs["dropout"]
    numbers = Numbers(attrs["scale"], attrs["softcap"], cutoff(p, HALF), 1.0 / (1.0 - p))
    kind = "none" if bias is None else "allowed" if bias.dtype.short == "bool" else "added"
    deep, wide = (power_of_two(max(16, t.shape[3])) for t in (q, v))
    cap = attrs["softcap"] > 0
    sides = tiling.queries, tiling.keys, deep, wide
    some = "q_lengths" in given or "k_lengths" in given
    spans = "packed" if packed else "lengths" if some else "none"
    captured = [types[given[n]] if n in given else None for n in Besides._fields[-3:]]
    functions = score_functions(attrs["score"], attrs["mask"], captured, work.grad is not None)
    even = _even(work)
    brought = "tiled" if _is_tiled(work) else ""
    if tiling.short:
        brought = "held" if bias is not None and not _strides(bias)[0] else ""
    by_threads = 0 if even == EVEN and not tiling.short else even
    usual = kind, brought, by_threads, cap, "slopes" in given, p > 0
    more = spans, attrs["align"] == "end", attrs["side"], *functions, *turned[2:]
    of_bias = (0, 0, 0, 0) if bias is None else _strides(bias)
    of = [*(_steps(t) for t in (q, k, v, work.out)), of_bias, *_table_steps(region)]
    of += [] if work.grad is None else [_steps(work.grad)]
    steps = Steps(*of) if work.grad is None else attention_grad.Steps(*of)
    return Asked(size, steps, sight, numbers), Block(*sides, *ends, *usual, *more)


def _table_steps(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """From one batch, head and line of the tables of blocks to the next."""
    given, types = operands(region.nodes[-1]), region.graph.types
    one, other = (
        _strides(types[given[n]])[:2] + types[given[n]].strides[2:3] if n in given else (0, 0, 0)
        for n in ("blocks", "turned")
    )
    return one, other


ANGLES = 4  # tables of cosines and sines for q and k, the last of what there may be also


def _also(region: Region, tables: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """What finds lengths, tables and what functions captured among the tensors of a call."""
    from deuteron.kernels.triton.attention_parts import Also

    get = _getter(region, Also._fields[:-ANGLES])
    return lambda t: Also(*get(t), *([None] * ANGLES if tables is None else tables(t)))


def _getter(region: Region, names: Sequence[str], way: str = "") -> Callable[..., list[Any]]:
    """How operands are found among the tensors of a call; None where there is none."""
    return tensors_of(region, map(rope.read(region, way).get, names))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.attention import attention

    way = knobs.get("rope", "")
    work, tiling, node = found(region, way), tiling_of(knobs, TILINGS), region.nodes[-1]
    angles, keys = rope.angles(region, way, ctx.device), rope.ahead(region, way, ctx)
    turned = angles.q_row, angles.k_row, way, angles.neighbours
    asked, block = _settings(work, region, tiling, turned)
    if tiling.divided:
        call = _divided(asked, block, work, tiling, ctx.target)
    else:
        how = work.q.shape[0], tiling.warps, tiling.stages
        several = _several(work, tiling, ctx.target) if tiling.short else 0
        call = attention(asked, block, *how, several)
    get = _getter(region, ("q", "k", "v", "bias", "slopes", "seed"), way)
    also, first = _also(region, angles.tables), len(region.inputs)
    places = [
        first + region.outputs.index(v) if v in region.outputs else None for v in node.outputs
    ]
    out, lse = (*places, None)[:2]

    def run(*t: Any) -> None:
        result = room_for(work.out, t[0]) if out is None else t[out]
        q, k, *rest = get(t)
        k = k if keys is None else keys(t)
        call(q, k, *rest, also(t), result, None if lse is None else t[lse])

    note = f"blocks of {tiling.queries} queries × {tiling.keys} keys"
    note += ", warps divide the work" if tiling.divided else ""
    note += ", several sequences by a program" if tiling.short else ""
    note += f", {TURNED[way, keys is not None]} turned as loaded" if way else ""
    return Kernel(run, writes=True, workspace=0 if keys is None else work.k.nbytes, note=note)


def _several(work: Work, tiling: Tiling, target: Target) -> int:
    """How many sequences a program computes one after the other: as many as leave enough programs
    for all multiprocessors to have some at the same time."""
    blocks = work.q.shape[0] * work.q.shape[1] * -(-work.q.shape[2] // tiling.queries)
    return max(1, min(MOST_SHORT, blocks // (target.units * SHORT_ROUNDS)))


TURNED = {("qk", False): "q and k", ("q", False): "q", ("q", True): "k turned ahead, q"}


NEAR = 24 << 20  # bytes of keys and values that stay in the cache while tiles read them


def _divided(asked: Any, block: Any, work: Work, t: Tiling, target: Target) -> Any:
    from deuteron.kernels.triton.attention_hopper import Tile, attention

    (batch, heads), size = work.q.shape[:2], asked.size
    section = _section(size.keys, size, work, batch * heads, size.shared)
    stages = t.stages, _bias_stages(work, block.features + block.wide)
    tile = Tile(*stages, section, size.keys % t.keys > 0, _is_folded(work, asked.numbers, block))
    if block.end:
        offset = asked.sight.offset + size.keys - size.queries
        asked = asked._replace(sight=asked.sight._replace(offset=offset))
    block = block._replace(bias="none", brought="", end=False)
    return attention(asked, block, tile, batch, target.units)


def _bias_stages(work: Work, lanes: int) -> int:
    """Blocks of a bias that the copy engine brings ahead."""
    return 0 if work.bias is None else 2 if lanes <= 128 else 1


def _is_folded(work: Work, numbers: Any, block: Any) -> bool:
    """Whether nothing but the scale changes the scores: it is applied within the exponential."""
    changed = work.bias is not None or block.cap or block.slopes or block.score is not None
    return not changed and numbers.scale > 0


def _section(lines: int, size: Any, work: Work, heads: int, shared: int) -> int:
    """How many heads are walked together: what so many lines each of them pass by stays in the
    cache; ``shared`` of them pass by the same."""
    bytes_ = lines * (size.features + size.wide) * work.k.dtype.bits // 8
    near = max(1, NEAR // max(bytes_, 1)) * shared
    return max(n for n in range(1, min(near, heads) + 1) if heads % n == 0)


HELD, BACK_SIDE = 128, 64  # lines of a tile that is held, and of what passes by it


def _divided_back(
    asked: Any, block: Any, work: Work, t: Tiling, shape: tuple[int, ...] | None, target: Target
) -> Any:
    """Keys that are held while queries pass, then queries while keys pass."""
    from deuteron.kernels.triton.attention_grad import bias_grad
    from deuteron.kernels.triton.attention_grad_hopper import Tile, attention_grad

    (batch, heads), size, for_bias = work.q.shape[:2], asked.size, None
    each = batch, heads, size.queries, size.keys
    if shape is not None and (shape != each or size.keys % 8):  # sums, or lines that are not even
        least = next(t for t in BACK_TILINGS if not t.divided)
        smaller = block._replace(queries=least.queries, keys=least.keys)
        its = smaller, batch, least.warps, least.stages, shape
        for_bias = bias_grad(asked, *its)
    block = block._replace(bias="none", brought="")
    lanes = max(block.features, block.wide)
    stages = t.stages, _bias_stages(work, block.features + block.wide)
    every = batch * heads // size.shared, batch * heads
    sections = every
    if not block.side:
        sections = (
            _section(size.queries * size.shared, size, work, every[0], 1),
            _section(size.keys, size, work, every[1], size.shared),
        )
    folded, ragged = _is_folded(work, asked.numbers, block), size.keys % BACK_SIDE > 0
    early = lanes <= 64 and not block.dropout, True  # else registers do not suffice
    one, other = (Tile(*stages, ragged, folded, soon) for soon in early)
    of_keys = block._replace(queries=BACK_SIDE, keys=HELD)
    of_queries = block._replace(queries=HELD, keys=BACK_SIDE)
    how = (of_keys, of_queries), (one, other), batch, sections, target.units, for_bias
    return attention_grad(asked, *how)


def _build_back(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton import attention_grad as kernels

    work, tiling, node = found(region), tiling_of(knobs, BACK_TILINGS), region.nodes[-1]
    asked, block = _settings(work, region, tiling)
    get, more = (_getter(region, n) for n in (kernels.Given._fields[:-1], ("grad_lse",)))
    also = _also(region)
    first = len(region.inputs)

    def read(t: Any) -> Any:
        found = get(t)
        there = [found[1] if each is None else each for each in found]
        return kernels.Given(*[*there, also(t)])

    shape = work.bias.shape if work.bias is not None and node.op == BACK[1] else None
    how = work.q.shape[0], tiling.warps, tiling.stages, shape
    if tiling.divided:
        call = _divided_back(asked, block, work, tiling, shape, ctx.target)
    else:
        call = kernels.attention_grad(asked, block, *how)
    places = [
        first + region.outputs.index(v) if v in region.outputs else None for v in node.outputs
    ]

    def run(*t: Any) -> None:
        call(read(t), *more(t), *(None if at is None else t[at] for at in places))

    divided = ", warps divide the work" if tiling.divided else ""
    return Kernel(run, writes=True, note=f"blocks of {tiling.queries} × {tiling.keys}{divided}")


def _recipe(
    name: str, ops: Sequence[str], tilings: Sequence[Tiling], plain: bool = False, **how: Any
) -> Recipe:
    build = _build_back if ops is BACK else _build
    parts = partial(_knobs, tilings), partial(_seconds, tilings)
    return Recipe(name, tuple(ops), partial(_refuse, ops, plain), build, *parts, 0.9, **how)


def _by(divided: bool, tilings: Sequence[Tiling]) -> list[Tiling]:
    return [t for t in tilings if t.divided == divided]


# Plain attention is the libraries' unless a search finds otherwise; all else they do not have.
# Gradients by warps that divide the work are taken where a search has measured them.
ATTENTION = (
    _recipe("plain_attention", FORWARD[:1], TILINGS, plain=True, by_estimate=False),
    _recipe("attention", FORWARD, TILINGS),
    _recipe("attention_grad_hopper", BACK, _by(True, BACK_TILINGS), by_estimate=False),
    _recipe("attention_grad", BACK, _by(False, BACK_TILINGS)),
)
