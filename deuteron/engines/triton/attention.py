"""Attention on a GPU and its gradients: the recipes around ``kernels/triton/attention.py``,
``attention_hopper.py`` on Hopper, and ``attention_grad.py``.

Libraries have kernels of their own for plain attention. With a bias they use slower kernels, or
write all scores to memory; windows, soft caps, slopes and seeds they do not have.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import WIDEST
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.triton import attention_rope as rope
from deuteron.engines.triton.attention_tiles import (
    BACK,
    BACK_SIDE,
    BACK_TILINGS,
    EVEN,
    FORWARD,
    HELD,
    TILINGS,
    Tiling,
    Work,
    as_attention,
    bias_stages,
    even_of,
    features_are_adjacent,
    is_tiled,
    knobs_for,
    seconds,
    several_of,
    strides_of,
)
from deuteron.engines.triton.common import room_for, tensors_of, tiling_of
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.attention import is_plain
from deuteron.ops.attention_math import OtherInputs
from deuteron.ops.random import HALF, cutoff
from deuteron.policy import Policy
from deuteron.target import Target

KINDS = ("f16", "bf16")


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
    work = as_attention(region, way)
    odd = work.q.dtype.short not in KINDS
    refuse_if(odd, f"q is of {work.q.dtype.short}, not of 16 bits", "cast it to bfloat16")
    refuse_if(max(work.q.shape[3], work.v.shape[3]) > WIDEST, "heads of more than 256 features")
    several = {"q": work.q, "k": work.k, "v": work.v, "the result": work.out}
    _refuse_besides(region)
    for name, t in (several | ({} if work.grad is None else {"the gradient": work.grad})).items():
        refuse_if(
            not features_are_adjacent(t), f"features of {name} do not lie side by side", "copy it"
        )


def _refuse_besides(region: Region) -> None:
    """Refuse lengths, tables of blocks and captured values of score functions that our kernels
    cannot read."""
    node = region.nodes[-1]
    given = {name: region.graph.types[v] for name, v in operands(node).items()}
    for name in [n for n in OtherInputs._fields[3:] if n in given]:
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


def _steps(t: TensorType) -> tuple[int, ...]:
    """Strides of batches, heads and positions. Sizes of 1 get a stride, too, as all must be
    multiples of 8."""
    batch, head, line, _ = strides_of(t)
    return batch or 8, head or 8, line or -(-t.shape[3] // 8) * 8


UNSEEN = 1 << 30  # a distance beyond any window


def _settings(
    work: Work,
    region: Region,
    tiling: Tiling,
    turned: tuple[int, int, str, bool] = (0, 0, "", False),
) -> tuple[Any, Any]:
    """The ``Description`` and ``Block`` that all attention kernels take. ``turned``: the first rows
    of q and k in the tables of rotary angles, which of both the kernel rotates, and whether pairs
    of features are neighbours."""
    from deuteron.codegen.triton_scores import score_functions
    from deuteron.kernels.triton import attention_grad
    from deuteron.kernels.triton.attention import Block, Description, Lengths, Numbers, Sight, Steps

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
    captured = [types[given[n]] if n in given else None for n in OtherInputs._fields[-3:]]
    longest = max(q.shape[2], keys) + max(sides[:2])
    of_scores = attrs["score"], attrs["mask"], captured
    functions = score_functions(*of_scores, work.grad is not None, longest)
    even = even_of(work)
    brought = "tiled" if is_tiled(work) else ""
    if tiling.short:
        brought = "held" if bias is not None and not strides_of(bias)[0] else ""
    by_threads = 0 if even == EVEN and not tiling.short else even
    usual = kind, brought, by_threads, cap, "slopes" in given, p > 0
    more = spans, attrs["align"] == "end", attrs["side"], *functions, *turned[2:]
    of_bias = (0, 0, 0, 0) if bias is None else strides_of(bias)
    of = [*(_steps(t) for t in (q, k, v, work.out)), of_bias, *_table_steps(region)]
    of += [] if work.grad is None else [_steps(work.grad)]
    steps = Steps(*of) if work.grad is None else attention_grad.Steps(*of)
    return Description(size, steps, sight, numbers), Block(*sides, *ends, *usual, *more)


def _table_steps(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of batches, heads and rows of both tables of blocks."""
    given, types = operands(region.nodes[-1]), region.graph.types
    one, other = (
        strides_of(types[given[n]])[:2] + types[given[n]].strides[2:3] if n in given else (0, 0, 0)
        for n in ("blocks", "turned")
    )
    return one, other


ANGLES = 4  # the last fields of ``Also``: tables of cosines and sines for q and k


def _also(region: Region, tables: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that picks lengths, tables and captured values from the arguments of a call."""
    from deuteron.kernels.triton.attention_parts import Also

    get = _getter(region, Also._fields[:-ANGLES])
    return lambda t: Also(*get(t), *([None] * ANGLES if tables is None else tables(t)))


def _getter(region: Region, names: Sequence[str], way: str = "") -> Callable[..., list[Any]]:
    """A function that picks operands by name from the arguments of a call; None where there is
    none."""
    return tensors_of(region, map(rope.read(region, way).get, names))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.attention import attention

    way = knobs.get("rope", "")
    work, tiling, node = as_attention(region, way), tiling_of(knobs, TILINGS), region.nodes[-1]
    angles, keys = rope.angles(region, way, ctx.device), rope.keys_rotated_ahead(region, way, ctx)
    turned = angles.q_row, angles.k_row, way, angles.neighbours
    asked, block = _settings(work, region, tiling, turned)
    if tiling.divided:
        call = _divided(asked, block, work, tiling, ctx.target)
    else:
        how = work.q.shape[0], tiling.warps, tiling.stages
        several = several_of(work, tiling, ctx.target) if tiling.short else 0
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


TURNED = {("qk", False): "q and k", ("q", False): "q", ("q", True): "k turned ahead, q"}
KEPT = 64  # up to so many features, the lines of the tile that is held stay in registers
NEAR = 24 << 20  # bytes of keys and values that stay in L2 while tiles read them


def _divided(asked: Any, block: Any, work: Work, t: Tiling, target: Target) -> Any:
    from deuteron.kernels.triton.attention_hopper import Tile, attention

    (batch, heads), size = work.q.shape[:2], asked.size
    section = _section(size.keys, size, work, batch * heads, size.shared)
    if block.side:  # all heads together, so that the longest lines come first
        section = batch * heads
    stages = t.stages, bias_stages(work, block.features + block.wide)
    ragged, folded = size.keys % t.keys > 0, _is_folded(work, asked.numbers, block)
    # with both a bias and dropout there are too few registers
    kept = block.features <= KEPT and not (stages[1] and block.dropout)
    tile = Tile(*stages, ragged, folded, kept)
    block = block._replace(bias="none", brought="")
    return attention(asked, block, tile, batch, section, target.units)


def _is_folded(work: Work, numbers: Any, block: Any) -> bool:
    """Whether only the scale changes the scores: then it is part of the exponential."""
    changed = work.bias is not None or block.cap or block.slopes or block.score is not None
    return not changed and numbers.scale > 0


def _section(lines: int, size: Any, work: Work, heads: int, shared: int) -> int:
    """How many heads are walked together, such that the ``lines`` that tiles of these heads read
    stay in the cache; ``shared`` heads read the same lines."""
    bytes_ = lines * (size.features + size.wide) * work.k.dtype.bits // 8
    near = max(1, NEAR // max(bytes_, 1)) * shared
    return max(n for n in range(1, min(near, heads) + 1) if heads % n == 0)


def _divided_back(
    asked: Any, block: Any, work: Work, t: Tiling, shape: tuple[int, ...] | None, target: Target
) -> Any:
    """The gradient by specialised warps: one kernel holds keys while queries pass by, another holds
    queries while keys pass by."""
    from deuteron.kernels.triton.attention_grad import bias_grad
    from deuteron.kernels.triton.attention_grad_hopper import Tile, attention_grad

    (batch, heads), size, for_bias = work.q.shape[:2], asked.size, None
    each = batch, heads, size.queries, size.keys
    if shape is not None and (shape != each or size.keys % 8):  # a sum, or rows that are unaligned
        least = next(t for t in BACK_TILINGS if not t.divided)
        smaller = block._replace(queries=least.queries, keys=least.keys)
        its = smaller, batch, least.warps, least.stages, shape
        for_bias = bias_grad(asked, *its)
    block = block._replace(bias="none", brought="")
    lanes = max(block.features, block.wide)
    stages = t.stages, bias_stages(work, block.features + block.wide)
    every = batch * heads // size.shared, batch * heads
    sections = every
    if not block.side:
        sections = (
            _section(size.queries * size.shared, size, work, every[0], 1),
            _section(size.keys, size, work, every[1], size.shared),
        )
    folded, ragged = _is_folded(work, asked.numbers, block), size.keys % BACK_SIDE > 0
    bent = block.cap or block.score is not None
    early = lanes <= 64 and not block.dropout, True  # otherwise there are too few registers
    kept = lanes <= KEPT and not bent, lanes <= KEPT  # likewise
    one, other = (Tile(*stages, ragged, folded, *how) for how in zip(early, kept, strict=True))
    of_keys = block._replace(queries=BACK_SIDE, keys=HELD)
    of_queries = block._replace(queries=HELD, keys=BACK_SIDE)
    how = (of_keys, of_queries), (one, other), batch, sections, target.units, for_bias
    return attention_grad(asked, *how)


def _build_back(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton import attention_grad as kernels

    work, tiling, node = as_attention(region), tiling_of(knobs, BACK_TILINGS), region.nodes[-1]
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
    parts = partial(knobs_for, tilings), partial(seconds, tilings)
    return Recipe(name, tuple(ops), partial(_refuse, ops, plain), build, *parts, 0.9, **how)


# Plain attention is left to libraries unless a search finds otherwise; the rest they do not have.
ATTENTION = (
    _recipe("plain_attention", FORWARD[:1], TILINGS, plain=True, by_estimate=False),
    _recipe("attention", FORWARD, TILINGS),
    _recipe("attention_grad", BACK, BACK_TILINGS),
)
