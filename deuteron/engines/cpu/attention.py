"""Attention on the CPU: the recipe around ``kernels/cpu/attention.py``."""

from typing import Any

import torch

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu import product as cpu
from deuteron.engines.cpu.product import BUILD_S, roof
from deuteron.engines.recipes import Knobs, Recipe, one_way, place, place_or_none
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import lanes
from deuteron.ops.attention import is_plain
from deuteron.policy import Policy
from deuteron.target import Target

LONGEST = 8192  # most keys: their scores for four queries stay in L1 or L2


def _refuse_attention(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("attention",), "is not an attention alone")
    cpu.refuse_elsewhere(region, target)
    refuse_if(not is_plain(region.nodes[0]), "has a window, a soft cap, slopes or a seed")
    (q, k, v, out), bias = _attended(region)
    for name, t in (("q", q), ("k", k), ("v", v), ("result", out)):
        apart = t.shape[-1] > 1 and t.strides[-1] != 1
        refuse_if(apart, f"the features of {name} are not side by side", "make it contiguous")
    keys = k.shape[-2]
    refuse_if(keys > LONGEST, f"{keys} keys are too many", "use a FlashAttention engine")
    if bias is not None:
        held = bias.shape[-1] if bias.rank else 1
        apart = held != keys or (held > 1 and bias.strides[-1] != 1)
        refuse_if(apart, "the bias is not stored key by key", "expand it and make it contiguous")


def _attended(region: Region) -> tuple[list[TensorType], TensorType | None]:
    """The types of q, k, v and the result, and that of the bias."""
    node, types = region.nodes[0], region.graph.types
    (*values, bias), found = (*node.inputs, None)[:4], node.output
    return [types[v or ""] for v in (*values, found)], None if bias is None else types[bias]


def _attention_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    (q, k, v, _), _ = _attended(region)
    scores = q.numel // q.shape[-1] * k.shape[-2]
    products = region_cost(region).flops / (target.rate("f32") * 0.85)
    powers = 20.0 * scores / target.rate("f32")
    packing = 3.0 * (k.nbytes + v.nbytes) / target.stream
    return roof(region, target, products + powers + packing)


def _build_attention(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import attention

    (q, k, v, out), bias = _attended(region)
    node = region.nodes[0]
    heads, queries, depth = q.shape[-3:]
    kind, none = "none" if bias is None else bias.dtype.short, (0, 0, 0)

    def outer(t: TensorType) -> Any:
        """Strides of batch, head and row; 0 for a dimension that is missing or of size 1."""
        moves = [s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
        return tuple([0] * (4 - t.rank) + moves)[:3]

    of_keys = (k.shape[-2], depth, v.shape[-1])
    sizes = (q.shape[0] if q.rank == 4 else 1, heads, heads // k.shape[-3], queries, *of_keys)
    strides = (*map(outer, (q, k, v, out)), none if bias is None else outer(bias))
    how = node.attrs["causal"], (kind, q.dtype.short), node.attrs["scale"]
    call = attention.prepare_attention(sizes, strides, *how)
    query, key, value = (Argument(place(region, name)) for name in node.inputs[:3])
    beside = place_or_none(region, (*node.inputs, None)[3])
    added = 0 if beside is None else Argument(beside)
    room = 4 * attention.room_per_thread(*of_keys, lanes()) * torch.get_num_threads()
    calls = [call(query, key, value, Argument(len(region.inputs)), added)]
    return Kernel.generated(calls, workspace=room)


_ATTENTION = (_refuse_attention, _build_attention, one_way, _attention_seconds)
ATTENTION = Recipe("attention", ("attention",), *_ATTENTION, BUILD_S)
