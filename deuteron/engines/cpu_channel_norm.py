"""Norms of channels in ``cpu_gemm``: the recipes around ``kernels/cpu/channel_norm.py``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.3  # of the arithmetic: every pass waits for the cache
GROUPS = ("group_norm_grad", "instance_norm_grad")
OPS = ("batch_norm_act", "batch_norm_act_grad", *GROUPS)
# what the kernel calls the results of each, in their order
RESULTS = {
    "batch_norm_act": ("y", "new_mean", "new_var", "mean", "rstd", "signs"),
    "batch_norm_act_grad": ("dx", "dweight", "dbias", "dz"),
}
WIDE = ("mean", "rstd")  # statistics of the batch, which are float32
PAIRS = (("weight", "bias"), ("running_mean", "running_var"))


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if len(region.nodes) != 1 or region.ops[0] not in OPS:
        return Refusal("is not batch norm in training or the gradient of a norm of channels")
    if region.ops[0] in GROUPS and region.nodes[0].attrs["activation"] != "none":
        return Refusal("takes an activation along after batch norm alone", "leave it outside")
    tensors = _read(region) | _made(region)
    if "signs" in tensors:
        return Refusal("keeps no signs", "leave packed out: y tells them")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    types = region.graph.types
    x = types[tensors["x"]]
    wrong = _out_of_order({name: types[value] for name, value in tensors.items()})
    if wrong is not None:
        return wrong
    for name, value in tensors.items():
        t = types[value]
        if t.shape == x.shape and t.dtype != x.dtype:
            return Refusal(f"{name} is {t.dtype.short}, x is {x.dtype.short}", "cast it")
        if name in WIDE and t.dtype.short != "f32":
            return Refusal(f"{name} is {t.dtype.short}, not f32", "keep statistics in float32")
    for pair in PAIRS:
        if len({types[tensors[p]].dtype for p in pair if p in tensors}) > 1:
            return Refusal(f"{' and '.join(pair)} differ in type", "cast one of them")
    return None


def _out_of_order(types: Mapping[str, TensorType]) -> Refusal | None:
    """Whether images are not all in row-major order and not all in nhwc, or vectors have gaps."""
    x = types["x"]
    for name, t in types.items():
        if t.shape != x.shape and not t.is_layout("contiguous"):
            return Refusal(f"{name} has gaps", "call .contiguous()")
    images = {name: t for name, t in types.items() if t.shape == x.shape}
    if any(all(t.is_layout(order) for t in images.values()) for order in ("contiguous", "nhwc")):
        return None
    odd = next((n for n, t in images.items() if t.layout not in ("contiguous", "nhwc")), None)
    if odd is not None:
        return Refusal(f"{odd} is not in row-major order and not in nhwc", "call .contiguous()")
    return Refusal(
        f"of {', '.join(images)} some are in row-major order and some in nhwc",
        "lay all of them in one order",
    )


def _channels_last(x: TensorType, grouped: bool) -> bool:
    """Whether channels lie innermost. Where there are no positions they do in any order."""
    if grouped or prod(x.shape[2:]) > 1:
        return not x.is_layout("contiguous")
    return True


def _read(region: Region) -> dict[str, str]:
    """The operands by the kernel's names for them."""
    node = region.nodes[0]
    slots = [slot.rstrip("?") for slot in table.get(node.op).inputs]
    given = zip(slots, node.inputs, strict=False)
    return {slot: value for slot, value in given if value is not None}


def _made(region: Region) -> dict[str, str]:
    """The results that somebody reads."""
    node = region.nodes[0]
    if node.op in GROUPS:
        weight = "weight" in _read(region)
        names = ("dx", *(("dweight",) if weight else ()), "dbias")
    else:
        names = RESULTS[node.op]
    found = zip(names, node.outputs, strict=False)
    return {name: value for name, value in found if value in region.outputs}


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import channel_norm, channels_last_norm
    from deuteron.kernels.cpu.channel_terms import Form

    node, types = region.nodes[0], region.graph.types
    read, made = _read(region), _made(region)
    x, attrs = types[read["x"]], node.attrs
    n, channels, length = x.shape[0], x.shape[1], prod(x.shape[2:])
    grouped = node.op in GROUPS
    groups = attrs.get("groups", channels)
    param, running = (
        next((types[read[p]].dtype.short for p in pair if p in read), "f32") for pair in PAIRS
    )
    given = {name: types[made[name]].dtype.short for name in ("dweight", "dbias") if name in made}
    form = Form(
        x.dtype.short,
        param,
        running,
        grouped,
        attrs.get("activation", "none"),
        frozenset((*read, *made)),
        given.get("dweight", "f32"),
        given.get("dbias", "f32"),
        attrs.get("slope", 0.0),
    )
    first = len(region.inputs)
    where: dict[str, Word] = {
        **{name: Argument(region.inputs.index(value)) for name, value in read.items()},
        **{name: Argument(first + region.outputs.index(value)) for name, value in made.items()},
    }
    numbers = (attrs.get("eps", 0.0), attrs.get("momentum", 0.0))
    way = "backward" if node.op.endswith("grad") else "forward"
    if _channels_last(x, grouped):
        image = (n, length) if grouped else (1, n * length)
        last = channels_last_norm.Sizes(*image, channels, channels // groups if grouped else 1)
        calls, _ = channels_last_norm.prepare(way, form, last, *numbers, where)
        return Kernel.generated(calls)
    if grouped:
        sizes = channel_norm.group_sizes(n, channels, length, groups)
    else:
        sizes = channel_norm.batch_sizes(n, channels, length)
    return Kernel.generated(channel_norm.prepare(way, form, sizes, *numbers, where))


CHANNEL_NORM = generated("channel_norm", _refuse, one_way, _seconds, _build)
