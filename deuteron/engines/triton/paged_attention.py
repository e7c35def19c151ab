"""Attention over pages on a GPU: the recipe around ``kernels/triton/paged_attention.py``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import WIDEST, modelled_seconds
from deuteron.engines.recipes import Knobs
from deuteron.engines.roofline import main_dtype, region_cost
from deuteron.engines.triton.attention_tiles import features_are_adjacent
from deuteron.engines.triton.common import one_operator
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.target import Target

REACHED = 0.75  # part of the bandwidth of a copy
KINDS = ("f16", "bf16", "f32")
MOST_ROWS = {16: 64, 32: 16}  # most rows of a block, by the bits of a number
MOST_KEYS = {16: 64, 32: 32}  # most keys at a time, by the bits of a number
HELD = 8192 * 16  # most bits of keys that are multiplied at a time
FOUR = 4096 * 16  # bits of queries for which four warps are enough; of float32 half as many
MOST_BLOCKS = 2**16 - 1  # most blocks of one key head
LEAST_KEYS = 256  # fewest keys in a part of a sequence
BUSY = 3  # programs for each multiprocessor that we want


def _refuse(region: Region, node: Node, target: Target) -> None:
    types = region.graph.types
    q, keys, values = (types[v] for v in node.uses[:3])
    odd = q.dtype.short not in KINDS
    refuse_if(odd, f"q is of {q.dtype.short}, not of 16 or 32 bits", "cast it to float32")
    refuse_if(max(q.shape[3], values.shape[3]) > WIDEST, "heads of more than 256 features")
    many = _sides(region).blocks > MOST_BLOCKS
    refuse_if(many, f"{q.shape[2]} queries are too many to count", "give fewer at a time")
    for name, t in (("q", q), ("keys", keys), ("values", values)):
        refuse_if(
            not features_are_adjacent(t), f"features of {name} do not lie side by side", "copy it"
        )
    for name, value in zip(("table", "lengths"), node.uses[3:], strict=True):
        refuse_if(not types[value].is_layout("contiguous"), f"the {name} has gaps", "copy it")


class Sides(NamedTuple):
    """Rows of a block, how many blocks share a key head, and lanes of keys and of values."""

    rows: int
    blocks: int
    features: int
    wide: int


def _sides(region: Region) -> Sides:
    q, keys, values = (region.graph.types[v] for v in region.nodes[0].uses[:3])
    features, wide = (power_of_two(max(16, t.shape[3])) for t in (q, values))
    together = q.shape[1] // keys.shape[2] * q.shape[2]
    rows = power_of_two(max(16, min(together, MOST_ROWS[q.dtype.bits])))
    return Sides(rows, -(-together // rows), features, wide)


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    """As many keys at a time as fit in registers, and in shared memory while the next are
    loaded."""
    types, sides = region.graph.types, _sides(region)
    q, keys, _, table = (types[v] for v in region.nodes[0].uses[:4])
    programs, most = sides.blocks * q.shape[0] * keys.shape[2], table.shape[1] * keys.shape[1]
    wanted = min(BUSY * target.units // programs, most // LEAST_KEYS, 64)
    parts, bits = power_of_two(max(wanted, 1)), q.dtype.bits
    line = max(sides.features, sides.wide) * bits
    offered = [n for n in (64, 32, 16) if n <= MOST_KEYS[bits] and n * line <= HELD][:2]
    warps = 4 if sides.rows * line <= FOUR // (bits // 16) else 8
    room = target.shared_bytes - sides.rows * (line // 8 + 512)
    stages = [max(1, min(3, room // (n * line // 4))) for n in offered]
    several = zip(offered, stages, strict=True)
    return [{"parts": parts, "keys": n, "warps": warps, "stages": s} for n, s in several]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds to read once all pages that the table can name."""
    cost, types = region_cost(region), region.graph.types
    _, keys, values, table = (types[v] for v in region.nodes[0].uses[:4])
    named = min(table.numel / keys.shape[0], 1.0)
    unread = int((keys.nbytes + values.nbytes) * (1.0 - named))
    moved = replace(cost, reads=cost.reads - unread)
    return modelled_seconds(moved, main_dtype(region), REACHED, False, target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.attention import Numbers
    from deuteron.kernels.triton.paged_attention import Block, Sizes, Steps, paged_attention

    node, types = region.nodes[0], region.graph.types
    q, keys, values, table = (types[v] for v in node.uses[:4])
    out, attrs = types[node.output], node.attrs
    batch, heads, queries, features = q.shape
    pages, positions, of_keys, _ = keys.shape
    wide = values.shape[3]
    size = Sizes(queries, heads, of_keys, features, wide, pages, positions, table.shape[1])
    steps = Steps(*(t.strides[:3] for t in (q, out, keys, values)))
    sides, limits = _sides(region), (attrs["window"] >= 0, attrs["softcap"] > 0)
    lanes = sides.features, sides.wide
    how = *limits, ctx.policy.float32
    block = Block(sides.rows, knobs["keys"], *lanes, knobs["parts"], *how)
    numbers = Numbers(attrs["scale"], attrs["softcap"], 0, 1.0)
    shared = block, batch, knobs["warps"], knobs["stages"]
    call = paged_attention(size, steps, attrs["window"], numbers, *shared)
    places = [region.inputs.index(u) for u in node.uses]

    def run(*t: Any) -> None:
        call(*(t[i] for i in places), t[-1])

    note = f"sequences in {knobs['parts']} parts, {knobs['keys']} keys at a time"
    return Kernel(run, writes=True, note=note)


PAGED = one_operator("paged_attention", ("paged_attention",), _refuse, _knobs, _seconds, _build)
