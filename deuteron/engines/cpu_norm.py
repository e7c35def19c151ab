"""Gradients of norms, and batch norm in training with its gradient, on the CPU: the recipe around
``kernels/cpu/norm.py`` and, where channels lie innermost, ``kernels/cpu/channels_last_norm.py``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu_product import BUILD_S, refuse_elsewhere, roof
from deuteron.engines.match import only_node, operands, results
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

# operator → who shares statistics, and the part of the arithmetic that its kernels reach: every
# pass waits for a cache
NORMS = {
    "layer_norm_grad": ("rows", 0.25),
    "rms_norm_grad": ("rows", 0.25),
    "group_norm_grad": ("groups", 0.3),
    "instance_norm_grad": ("groups", 0.3),
    "batch_norm_act": ("channels", 0.3),
    "batch_norm_act_grad": ("channels", 0.3),
}
PARAMETERS = ("weight", "dweight", "dbias")
WIDE = ("mean", "rstd")  # statistics of the batch, which are float32
PAIRS = (("weight", "bias"), ("running_mean", "running_var"))


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    node = only_node(region, NORMS)
    sets, _ = NORMS[node.op]
    apart = sets != "channels" and node.attrs["activation"] != "none"
    refuse_if(apart, "takes an activation along after batch norm alone", "leave it outside")
    tensors = {**operands(node), **results(region, node)}
    refuse_if("signs" in tensors, "keeps no signs", "leave packed out: y tells them")
    refuse_elsewhere(region, target)
    types = {name: region.graph.types[value] for name, value in tensors.items()}
    _refuse_order(types, sets == "rows")
    _refuse_types(types)


def _refuse_order(types: Mapping[str, TensorType], rows: bool) -> None:
    """Tensors must be in row-major order, and images all in that or all in nhwc."""
    images = {n: t for n, t in types.items() if t.shape == types["x"].shape and not rows}
    for name, t in types.items():
        wrong = name not in images and not t.is_layout("contiguous")
        how = "has gaps" if t.rank == 1 else "is not in row-major order"
        refuse_if(wrong, f"{name} {how}", "call .contiguous()")
    orders = ("contiguous", "nhwc")
    if any(all(t.is_layout(order) for t in images.values()) for order in orders):
        return
    for name, t in images.items():
        neither = f"{name} is not in row-major order and not in nhwc"
        refuse_if(t.layout not in orders, neither, "call .contiguous()")
    mixed = f"of {', '.join(images)} some are in row-major order and some in nhwc"
    refuse_if(True, mixed, "lay all of them in one order")


def _refuse_types(types: Mapping[str, TensorType]) -> None:
    x = types["x"]
    for name, t in types.items():
        kind, image = t.dtype.short, t.shape == x.shape and name not in PARAMETERS
        odd = f"{name} is {kind}, x is {x.dtype.short}"
        refuse_if(image and t.dtype != x.dtype, odd, "cast it")
        narrow = name in WIDE and kind != "f32"
        refuse_if(narrow, f"{name} is {kind}, not f32", "keep statistics in float32")
    for pair in PAIRS:
        differ = len({types[p].dtype for p in pair if p in types}) > 1
        refuse_if(differ, f"{' and '.join(pair)} differ in type", "cast one of them")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    _, reached = NORMS[region.ops[0]]
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * reached))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import channels_last_norm, norm

    node, types = region.nodes[0], region.graph.types
    read, made, attrs = operands(node), results(region, node), node.attrs
    x, sets = types[read["x"]], NORMS[node.op][0]
    shape = _shape(x, attrs, sets)

    def kind_of(*names: str) -> str:
        there = (types[{**read, **made}[name]] for name in names if name in read or name in made)
        return next((t.dtype.short for t in there), "f32")

    kind = norm.Kind(
        sets,
        tuple(sorted((*read, *made))),
        x.dtype.short,
        *(kind_of("weight", "bias"), kind_of("running_mean", "running_var")),
        *(kind_of("dweight"), kind_of("dbias"), attrs["activation"]),
        centred=node.op != "rms_norm_grad",
        short=sets != "channels" and prod(shape[1:]) < norm.SHORT,
        long=sets != "rows" or shape[1] >= norm.LONG,
    )
    first = len(region.inputs)
    where: dict[str, Word] = {
        **{name: Argument(region.inputs.index(value)) for name, value in read.items()},
        **{name: Argument(first + region.outputs.index(value)) for name, value in made.items()},
    }
    way = "backward" if node.op.endswith("grad") else "forward"
    floats = (attrs.get("eps", 0.0), attrs.get("momentum", 0.0))
    if sets == "rows":
        sizes = norm.Sizes.of_rows(*shape)
    elif _channels_last(x, sets):
        n, channels, length = x.shape[0], x.shape[1], prod(x.shape[2:])
        last = (n, length, channels, shape[1]) if sets == "groups" else (1, n * length, channels, 1)
        calls, _ = channels_last_norm.prepare(
            way, kind, channels_last_norm.Sizes(*last), *floats, where
        )
        return Kernel.generated(calls)
    elif sets == "groups":
        sizes = norm.Sizes.of_groups(x.shape[0], x.shape[1], shape[2], x.shape[1] // shape[1])
    else:
        sizes = norm.Sizes.of_channels(x.shape[0], x.shape[1], prod(x.shape[2:]))
    return Kernel.generated(norm.prepare(way, kind, sizes, *floats, where))


def _shape(x: TensorType, attrs: Mapping[str, object], sets: str) -> tuple[int, ...]:
    """Rows and columns; or groups, channels of each and positions of a channel."""
    if sets == "rows":
        columns = prod(x.shape[x.rank - int(str(attrs["dims"])) :])
        return x.numel // columns, columns
    groups = int(str(attrs.get("groups", x.shape[1])))
    return x.shape[0] * groups, x.shape[1] // groups, prod(x.shape[2:])


def _channels_last(x: TensorType, sets: str) -> bool:
    """Whether channels lie innermost. Where there are no positions they do in any order."""
    if sets == "groups" or prod(x.shape[2:]) > 1:
        return not x.is_layout("contiguous")
    return True


NORM = Recipe("norm", NORMS, _refuse, _build, one_way, _seconds, BUILD_S)
