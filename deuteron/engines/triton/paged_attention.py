"""Attention over pages on a GPU: the recipe around ``kernels/triton/paged_attention.py``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton.attention import KINDS, WIDEST, beside
from deuteron.engines.triton.common import one_operator
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.target import Target

REACHED = 0.75  # of the bandwidth of a copy
MOST_ROWS = 64  # queries of the heads that share a key head, in one block
LEAST_KEYS = 256  # of a part of a sequence
BUSY = 3  # programs for each multiprocessor


def _refuse(region: Region, node: Node, target: Target) -> None:
    types = region.graph.types
    q, keys, values = (types[v] for v in node.uses[:3])
    odd = q.dtype.short not in KINDS
    refuse_if(odd, f"q is of {q.dtype.short}, not of 16 bits", "cast it to bfloat16")
    refuse_if(max(q.shape[3], values.shape[3]) > WIDEST, "heads of more than 256 features")
    rows = q.shape[1] // keys.shape[2] * q.shape[2]
    few = "give fewer queries at a time, or attend to what was gathered"
    refuse_if(rows > MOST_ROWS, f"{rows} queries share a key head, more than {MOST_ROWS}", few)
    for name, t in (("q", q), ("keys", keys), ("values", values)):
        refuse_if(not beside(t), f"features of {name} do not lie side by side", "copy it")
    for name, value in zip(("table", "lengths"), node.uses[3:], strict=True):
        refuse_if(not types[value].is_layout("contiguous"), f"the {name} has gaps", "copy it")


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    types = region.graph.types
    q, keys, _, table = (types[v] for v in region.nodes[0].uses[:4])
    programs, most = q.shape[0] * keys.shape[2], table.shape[1] * keys.shape[1]
    wanted = min(BUSY * target.units // programs, most // LEAST_KEYS, 64)
    parts = power_of_two(max(wanted, 1))
    return [{"parts": parts, "keys": keys} for keys in (64, 32)]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """The pages that the table can name are read once."""
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
    rows = power_of_two(max(16, heads // of_keys * queries))
    lanes = power_of_two(max(16, features)), power_of_two(max(16, wide))
    limits = attrs["window"] >= 0, attrs["softcap"] > 0
    block = Block(rows, knobs["keys"], *lanes, knobs["parts"], *limits)
    numbers = Numbers(attrs["scale"], attrs["softcap"], 0, 1.0)
    call = paged_attention(size, steps, attrs["window"], numbers, block, batch, 4, 3)
    places = [region.inputs.index(u) for u in node.uses]

    def run(*t: Any) -> None:
        call(*(t[i] for i in places), t[-1])

    note = f"sequences in {knobs['parts']} parts, {knobs['keys']} keys at a time"
    return Kernel(run, writes=True, note=note)


PAGED = one_operator("paged_attention", ("paged_attention",), _refuse, _knobs, _seconds, _build)
