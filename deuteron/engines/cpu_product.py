"""What the recipes of ``cpu_gemm`` share, and the first of them: the packed product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen import openmp
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import Chain
from deuteron.engines.recipes import Knobs, Recipe, fits, maybe, must_chain, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import EPILOGUES, ONE_ROW, TILES, lanes
from deuteron.policy import Policy
from deuteron.target import Target

ANCHORS = ("conv", "linear", "matmul")
REACHED = 0.97  # part of the rate of torch's largest products that these kernels reach
CALL_S = 5e-6  # Python, arguments and waking the team
MOST = 2**31 - 1  # offsets are 32-bit


def generated(
    name: str,
    refuse: Callable[[Region, Target, Policy], Refusal | None],
    knobs: Callable[[Region, Target, Policy], Sequence[Knobs]],
    seconds: Callable[[Region, Target, Knobs], float],
    build: Callable[[Region, Knobs, BuildContext], Kernel],
) -> Recipe:
    """A recipe whose kernel is compiled on this machine."""
    return Recipe(name, refuse, build, knobs, seconds, build_s=0.15)


def on_this_cpu(region: Region, target: Target) -> Refusal | None:
    """What every way needs."""
    if target.is_cuda:
        return Refusal("generates code for the CPU")
    if not openmp.available():
        return Refusal("llvmlite is not installed", "pip install llvmlite")
    types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
    for t in types:
        if t.dtype.short not in ("f32", "bool"):
            return Refusal(f"element type {t.dtype.short}, not f32", "cast to float32")
        if t.numel == 0:
            return Refusal("the tensors are empty")
        if t.storage_numel > MOST:
            return Refusal("a tensor has more elements than a 32-bit offset reaches")
    return None


def chain_here(region: Region, target: Target, anchors: tuple[str, ...]) -> Chain | Refusal:
    """The region as a product with an epilogue that can be generated."""
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    c = fits(region, anchors)
    if isinstance(c, Refusal):
        return c
    if c.act is not None and c.act_name not in EPILOGUES:
        return Refusal(f"has no epilogue for {c.act_name}")
    if c.anchor.op == "conv" and c.anchor.attrs["transposed"]:
        return Refusal("the convolution is transposed")
    inner = 1 if c.anchor.op == "conv" else -1
    named = [("input", c.x), ("result", c.out)]
    if c.residual is not None:
        named.append(("residual", region.graph.types[c.residual]))
    for what, t in named:
        if t.rank and t.shape[inner] > 1 and t.strides[inner] != 1:
            if inner == 1:
                return Refusal(f"the {what} is not in nhwc", "use Policy(layout='auto')")
            return Refusal(f"the rows of the {what} are not contiguous", "make it contiguous")
    return c


def epilogue_of(c: Chain) -> Any:
    from deuteron.kernels.cpu.epilogue import Epilogue

    attrs = {} if c.act is None else dict(c.act.attrs)
    return Epilogue.of(c.residual is not None, c.act_name, attrs)


def image(t: TensorType) -> Any:
    """A tensor's geometry for the kernels; a single channel may have any stride."""
    from deuteron.kernels.cpu.conv import Image

    strides = list(t.strides)
    strides[1] = 1
    for d in (0, *range(2, t.rank)):
        if t.shape[d] == 1:
            strides[d] = t.shape[1] * math.prod(t.shape[d + 1 :]) if d else t.storage_numel
    return Image(t.shape, tuple(strides))


def window_of(c: Chain) -> Any:
    from deuteron.kernels.cpu.conv import Window

    a = c.anchor.attrs
    return Window(c.weight.shape[2:], a["stride"], a["padding"], a["dilation"], a["groups"])


def operands(region: Region, c: Chain) -> tuple[int, int]:
    """Where the input and the residual stand among the arguments; without a residual the input
    stands in, and is not read as one."""
    x, z = place(region, c.anchor.inputs[0]), maybe(region, c.residual)
    return x, x if z is None else z


def images(region: Region, c: Chain) -> tuple[Any, Any, Any]:
    """Input, result and residual of a convolution."""
    other = None if c.residual is None else image(region.graph.types[c.residual])
    return image(c.x), image(c.out), other


def roof(region: Region, target: Target, seconds: float) -> float:
    """``seconds`` of arithmetic, or what the memory takes if that is longer, and the call."""
    cost = region_cost(region)
    speed = target.cache_bandwidth if cost.bytes < target.cache_bytes / 2 else target.stream
    return max(seconds, cost.bytes / max(speed, target.stream) / 0.85) + CALL_S


# ---- the packed product ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A chain as ``groups`` products of [rows, segments · length] and [.., columns]."""

    rows: int
    columns: int
    groups: int
    segments: int
    length: int


def sizes(c: Chain, padded: bool = False) -> Sizes:
    if c.anchor.op != "conv":
        return Sizes(c.out.numel // c.out.shape[-1], c.out.shape[-1], 1, 1, c.x.shape[-1])
    a, kernel = c.anchor.attrs, c.weight.shape[2:]
    taps, each = math.prod(kernel), c.weight.shape[1]
    joined = a["groups"] == 1 and a["dilation"][-1] == 1 and (padded or a["padding"][-1] == 0)
    run = kernel[-1] if joined else 1
    groups = a["groups"]
    return Sizes(
        c.out.numel // c.out.shape[1], c.out.shape[1] // groups, groups, taps // run, each * run
    )


def _refuse_product(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = chain_here(region, target, ANCHORS)
    if isinstance(c, Refusal):
        return c
    if c.anchor.op == "matmul" and c.weight.rank != 2:
        return Refusal(
            f"the second factor has rank {c.weight.rank}", "multiply by a matrix of rank 2"
        )
    if is_depthwise(c) is None:
        return Refusal("is depthwise: there is no product in it")
    return None


def is_depthwise(c: Chain) -> Refusal | None:
    """Whether the convolution has one filter per channel."""
    if c.anchor.op != "conv" or c.anchor.attrs["groups"] != c.x.shape[1] or c.x.shape[1] == 1:
        return Refusal("is not a depthwise convolution")
    if c.weight.shape[0] != c.x.shape[1]:
        return Refusal("has several filters per channel")
    if c.x.rank == 5 or c.weight.shape[-1] > 15:
        return Refusal("only one and two dimensions, and windows up to 15 wide")
    return None


def _product_seconds(c: Chain, target: Target, knobs: Knobs) -> float:
    """Arithmetic, rows and columns that fill up tiles included, by the cycles of the kernel:
    a step along k takes rows · vectors / 2, a run and a tile take a little each."""
    s = sizes(c, bool(knobs["padded"]))
    rows, vectors = knobs["rows"], knobs["vectors"]
    wide = vectors * lanes()
    down, across = -(-s.rows // rows), s.groups * -(-s.columns // wide)
    step = rows * vectors / 2
    tail = s.length % 4
    run = (s.length - tail) * step + tail * (step + rows) + 2 + rows
    tile = s.segments * run + 10 + 2 * rows * vectors
    share = across if knobs["split"] == "n" else down
    uneven = -(-share // target.units) * target.units / share
    flops = 2 * rows * wide * down * across * tile / step * uneven
    small = 1.0 if rows > 1 else 1.6  # one row reads the weight faster than it can multiply
    return float(small * flops) / (target.rate("f32") * REACHED)


def _product_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    c = must_chain(region, ANCHORS)
    s = sizes(c)
    shapes = [ONE_ROW] if s.rows == 1 else list(TILES[lanes()])
    frames: tuple[bool, ...] = (False,)
    if c.anchor.op == "conv" and s.segments > 1 and s.length < 16 and s.groups == 1:
        frames = (True, False)
    offers = [
        {"rows": r, "vectors": v, "split": split, "padded": padded}
        for r, v in shapes
        for split in ("m", "n")
        for padded in frames
    ]
    offers.sort(key=lambda knobs: _product_seconds(c, target, knobs))
    best, found = offers[0], [offers[0]]
    for change in ("split", "rows"):  # the best, and the best that differs in one thing
        found += [o for o in offers if o[change] != best[change]][:1]
    return found


def _build_product(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import conv, matmul

    c = must_chain(region, ANCHORS)
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    bias = None if c.bias is None else ctx.constants[c.bias]
    tile = matmul.Tile(knobs["rows"], knobs["vectors"])
    how = (epilogue_of(c), tile, knobs["split"] == "n")
    x, z = operands(region, c)
    if c.anchor.op == "conv":
        call = conv.prepare_conv(
            *images(region, c), window_of(c), weight, bias, *how, padded=knobs["padded"]
        )
        frame = conv.frame(image(c.x), window_of(c)).shape if knobs["padded"] else (0,)
        return Kernel(
            lambda *t: call(t[x], t[-1], t[z]), writes=True, workspace=4 * math.prod(frame)
        )
    matrix = weight if c.anchor.op == "linear" else weight.t()

    def rows(t: TensorType) -> Any:
        return matmul.row_offsets(t.shape[:-1], t.strides[:-1])

    other = None if c.residual is None else rows(region.graph.types[c.residual])
    where = matmul.Rows(rows(c.x), rows(c.out), other, c.x.shape[-1])
    run = matmul.prepare(where, matrix.unsqueeze(0), bias, *how)
    return Kernel(lambda *t: run(t[x].data_ptr(), t[-1].data_ptr(), t[z].data_ptr()), writes=True)


def product_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """The price of the packed product."""
    c = must_chain(region, ANCHORS)
    frame = 8 * c.x.numel / target.stream + 1e-5 if knobs["padded"] else 0.0
    return roof(region, target, _product_seconds(c, target, knobs)) + frame


PRODUCT = generated("product", _refuse_product, _product_knobs, product_seconds, _build_product)
