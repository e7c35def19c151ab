"""The gradients of a 1×1 convolution and of the batch norm in training after it: the recipe around
``kernels/triton/conv_batch_norm_grad.py``, which multiplies the gradient that comes out of batch
norm right where it is computed. A plan offers it as an alternative to the three regions that it
combines (``plan/region_borders.py``), and measures both."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.triton import batch_norm, conv_grad, multiplied
from deuteron.engines.triton.batch_norm import NARROW, TILE, Step, backward_step, picker
from deuteron.engines.triton.common import ADDED_S, MOST, settings
from deuteron.engines.triton.conv_grad import FilterGradWork
from deuteron.engines.triton.multiplied import KINDS, Product, follows
from deuteron.engines.triton.norm import REACHED
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.kernels.triton.batch_norm_tiles import divide
from deuteron.policy import Policy
from deuteron.target import Target

OP = "batch_norm_act_grad"
GRADIENTS = ("conv_dx", "conv_dw")
HELD = 1 << 14  # most sums of a weight's gradient that a program holds
BUSY = {4: 2, 8: 1}  # programs of a multiprocessor, by their warps
# pixels at a time, warps and stages; first the ways that read most ahead
WAYS = ((128, 8, 3), (64, 8, 4), (64, 8, 3), (128, 4, 3), (64, 4, 3), (64, 8, 2))
LIVE = 150  # most numbers of a thread: sums, both results of a tile, and their operands
LEAST = 16  # fewest channels of x of a program
# Most programs that divide the channels of the same pixels; four were slower than separate kernels
# on an H200.
SHARED = 2
OFFERED = 2


class Parts(NamedTuple):
    """The region as the gradient of a norm, and the two products that read it."""

    norm: Region
    step: Step
    image: Region
    weight: Region
    dx: Product
    dw: FilterGradWork


@lru_cache(maxsize=1024)
def parts(region: Region) -> Parts:
    """The region as :class:`Parts`; refuses any other."""
    starts = region.ops[:1] == (OP,) and all(region.ops.count(op) == 1 for op in GRADIENTS)
    refuse_if(not starts, "is no batch norm's gradient with those of a convolution", quiet=True)
    first, *rest = region.nodes
    between, home = first.outputs[0], dict[str, str]()
    for node in rest:
        reads = {home[v] for v in node.uses if v in home}
        here = {node.op} if node.op in GRADIENTS else reads
        apart = len(here) != 1 or not reads <= here or bool({*first.outputs[1:]} & {*node.uses})
        refuse_if(apart, "what follows the gradients reads more than one of them", quiet=True)
        home |= dict.fromkeys(node.outputs, *here)
    whole = between in region.outputs or sum(between in n.uses for n in rest) > 2
    refuse_if(whole, "what batch norm hands back is read elsewhere", quiet=True)
    image, weight = (_of(region, rest, home, op) for op in GRADIENTS)
    norm = region.part("norm", [first], 0)
    return Parts(norm, backward_step(norm), image, weight, *_read(image, weight, between))


def _of(region: Region, nodes: Sequence[Node], home: dict[str, str], op: str) -> Region:
    return region.part(op, [n for n in nodes if home[n.outputs[0]] == op], 0)


def _read(image: Region, weight: Region, between: str) -> tuple[Product, FilterGradWork]:
    """Both gradients of the convolution as products with ``between``, the gradient that comes out
    of batch norm."""
    turned = any(r.nodes[0].attrs["transposed"] for r in (image, weight))
    refuse_if(turned, "the convolution is transposed")
    dx, dw = multiplied.as_product(image), conv_grad.as_filter_grad(weight, alone=False)
    multiplied.as_product(weight)  # refuses windows of more than a pixel
    apart = dx.x != between or dw.uses[0] != between or dx.w2 is not None or dx.count > 1
    refuse_if(apart, "the convolution's gradients are of other values", quiet=True)
    return dx, dw


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    found = parts(region)
    refusal = batch_norm.BATCH_NORM[1].refuse(found.norm, target, policy)
    refuse_if(refusal, refusal.reason if refusal else "", refusal.remedy if refusal else "")
    image, x, weight = found.step.image, found.dw.x, found.dx.right
    kinds = {t.dtype.short for t in (image, x)}
    refuse_if(len(kinds) > 1 or not kinds <= {*KINDS}, f"multiplies {' and '.join(KINDS)}")
    in_order = image.is_layout("nhwc") and not weight.turned and weight.line == x.shape[1]
    refuse_if(not in_order, "is not in nhwc", "use Policy(layout='auto')")
    several = len(found.image.outputs) > 1 or len(found.weight.outputs) > 1
    refuse_if(several, "what follows a gradient has several results")
    refuse_if(max(image.numel, x.numel) > MOST, "has more numbers than 32 bits count", "split it")
    across = _across(found)
    slow = f"{across} programs would make what batch norm hands back, each for some channels of x"
    refuse_if(across > SHARED, slow)
    many = f"tiles of {image.shape[1]} channels, or sums of them, find no room in a multiprocessor"
    refuse_if(not _ways(found, target), many)


def _room(channels: int) -> int:
    """The size of a tile of matrix units that has room for so many channels."""
    return max(16, int(power_of_two(channels)))


def _columns(found: Parts) -> int:
    """Channels of x of a program: all of them, if their sums fit in registers."""
    return min(_room(found.dw.x.shape[1]), HELD // _room(found.step.image.shape[1]))


def _across(found: Parts) -> int:
    """How many programs divide the channels of the same pixels."""
    return -(-found.dw.x.shape[1] // _columns(found))


def _ways(found: Parts, target: Target) -> list[Knobs]:
    """The ways whose tiles of grad, z and x, with the weight, fit in shared memory, and whose sums
    fit in registers."""
    wide, deep = _room(found.step.image.shape[1]), _columns(found)
    image = found.dw.x.numel
    added = sum(found.image.graph.types[v].numel == image for v, _ in found.dx.others)
    ways: list[Knobs] = []
    for rows, warps, stages in WAYS:
        # values that are added to dx are read ahead too, and move between threads as float32
        ahead = 2 * (stages - 1) * wide + stages * deep + 2 * added * (stages + 1) * deep
        room = 2 * (rows * (ahead + max(wide, deep)) + wide * deep)
        live = (wide * deep + rows * (wide + deep)) // (32 * warps)
        if deep >= LEAST and BUSY[warps] * room <= target.shared_bytes and live <= LIVE:
            ways.append({"rows": rows, "warps": warps, "stages": stages})
    return ways


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    return _ways(parts(region), target)[:OFFERED]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of what both passes read and write: the one for the sums, and the one for the
    rest."""
    found, types = parts(region), region.graph.types
    step = found.step

    def moved(values: Iterable[str]) -> int:
        return sum(types[v].nbytes for v in values)

    read = [v for n, v in step.read.items() if types[v].shape == step.image.shape or n == "signs"]
    dz = [step.made["dz"]] if "dz" in step.made else []
    y = [step.made["again"]] if "again" in step.made else []
    again = [*dz, step.read["x"]] if dz else read
    others = [v for r in (found.image, found.weight) for v in r.inputs if v != found.dx.x]
    size = moved(read) + moved(dz) + moved(y) + moved(again)
    size += moved(others) + moved((*found.image.outputs, *found.weight.outputs))
    across = _across(found)
    cached = (across - 1) * moved(again) / target.cache_bandwidth
    left = (
        8.0
        * BUSY[knobs["warps"]]
        * target.units
        * found.dw.numel
        / (across * target.cache_bandwidth)
    )
    return size / (target.stream * REACHED) + cached + left + ADDED_S + 4 * target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.conv_batch_norm_grad import Way, pull

    found, how = parts(region), settings(knobs)
    step, units = found.step, ctx.target.units
    image, attrs = step.image, step.attrs
    tile = TILE * 8 // image.dtype.bits
    d = divide(image.shape, True, units, tile=tile, width=NARROW, once=False)
    after = follows(found.image, found.dx), follows(found.weight, found.dw)
    way = Way(how["rows"], _columns(found), BUSY[how["warps"]] * units, how["warps"], how["stages"])
    pixels = image.numel // (image.shape[0] * image.shape[1])
    activated, by_result = attrs["activation"], "y" in step.read
    call = pull(d, found.dw.x.shape[1], pixels, activated, by_result, after, way)
    picked, copies = picker(region, step)
    there = (*region.inputs, *region.outputs)
    values = (found.dw.uses[1], found.dx.w, found.image.outputs[0], found.weight.outputs[0])
    places = [there.index(v) for v in values]
    others = [[there.index(v) for v, _ in work.others] for work in (found.dx, found.dw)]

    def run(*t: Any) -> None:
        given = (t[i] for i in places)
        call(picked(t), *given, *([t[i] for i in each] for each in others))

    room = copies + d.workspace + 4 * way.programs * found.dw.numel
    note = f"sums, a merge, and {way.rows} pixels at a time: the norm's gradient and both products"
    return Kernel(run, writes=True, workspace=room, note=note)


# A kernel takes seconds to build for each size: plans by estimate leave products to libraries.
CONV_BATCH_NORM_GRAD = Recipe(
    "conv_batch_norm_grad", (OP,), _refuse, _build, _knobs, _seconds, 2.0, by_estimate=False
)
