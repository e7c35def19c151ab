"""What libraries take: the part of the roofline that their calls tend to reach, and what they cost
beyond it, as it was measured on an H200 and a 2-core CPU."""

import math
from dataclasses import replace

from deuteron.engines.roofline import (
    CONVOLUTIONS,
    bound,
    is_depthwise,
    is_product,
    main_dtype,
    node_cost,
    region_cost,
    shows,
    times,
)
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.ops.conv import is_uneven
from deuteron.ops.moe import GROUPED, ROWS
from deuteron.ops.opaque import is_random
from deuteron.ops.opdef import Cost, Fusion
from deuteron.passes.communication import together_seconds
from deuteron.target import Target

# What cuDNN reaches where no channel sees another. For weights it has a legacy kernel for some
# sizes: the 15 such layers of a MobileNetV3-Large took 1.5 ms on an H200, two of them half of that.
ALONE = {"conv": 0.012, "conv_dx": 0.006, "conv_dw": 0.0046}


def modelled_seconds(cost: Cost, kind: str, reached: float, product: bool, target: Target) -> float:
    """The roofline with the part of each roof that library code reaches.

    A product reaches ``reached`` of the arithmetic and most of the bandwidth; everything else
    reaches ``reached`` of the bandwidth.
    """
    ideal = bound(cost, kind, product, target)
    if ideal.kind == "free":
        return 0.0
    if product:
        memory, compute = times(cost, kind, product, target)
        return max(memory / 0.85, compute / reached) + target.launch
    return (ideal.seconds - target.launch) / reached + target.launch


# Tiles of a result that a library's kernels for 16 bits compute, and the part of the rate that each
# reaches; what begins and ends a tile, what storing a number of it takes, what several parts of
# a sum take to be added up, and how long a part is at least.
LIBRARY_TILES = (
    (128, 256, 1.0),
    (128, 192, 0.98),
    (128, 128, 0.93),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.5),
)
BEGUN_S, STORED_S, ADDED_UP_S, LEAST_PART = 0.4e-6, 0.06e-9, 2e-6, 256


def library_seconds(cost: Cost, sizes: tuple[int, int, int, int], target: Target) -> float:
    """What a library takes for some products of 16 bits of these rows, columns and terms: rounds of
    tiles, of the size and with as many parts of the sums as suit them, or what memory takes."""
    rows, columns, terms, count = sizes
    rate = target.rate("f16", True) / target.units
    memory, _ = times(cost, "f16", True, target)

    def seconds(high: int, wide: int, reached: float, parts: int) -> float:
        rounds = -(-parts * count * -(-rows // high) * -(-columns // wide) // target.units)
        each = 2.0 * high * wide * terms / parts / (reached * rate) + BEGUN_S
        return rounds * (each + high * wide * STORED_S) + (ADDED_UP_S if parts > 1 else 0.0)

    some = [n for n in (1, 2, 4, 8) if n == 1 or terms >= n * LEAST_PART]
    quickest = min(seconds(*tile, parts) for tile in LIBRARY_TILES for parts in some)
    return max(quickest, memory / 0.85) + target.launch


def matrices(graph: Graph, node: Node, target: Target) -> tuple[int, int, int, int] | None:
    """Rows, columns and terms of a product of 16 bits on a GPU, and how many of them there are;
    None for what is none, or has lines that begin anywhere."""
    x, y, out = (graph.types[v] for v in (*node.uses[:2], node.outputs[0]))
    known = node.op in ("linear", "matmul") and target.is_cuda and min(x.rank, y.rank) >= 2
    if not known or any(t.dtype.bits != 16 or t.shape[-1] % 8 or not t.numel for t in (x, out)):
        return None
    terms, columns = x.shape[-1], out.shape[-1]
    rows = out.shape[-2] if node.op == "matmul" and y.rank > 2 else out.numel // columns
    return rows, columns, terms, out.numel // (rows * columns)


def copy_seconds(t: TensorType, target: Target) -> float:
    """The time of a copy by a library."""
    return modelled_seconds(Cost(0.0, t.nbytes, t.nbytes), t.dtype.short, 0.75, False, target)


WRITTEN_OUT = 8  # times that a weight of 8 or 4 bits is moved in float32 until it is one of floats
DRAW_S = 1e-8  # a random number, by one thread of the CPU


SPARSE = ("spmm_csr", "sddmm_csr")
PAGED_CALLS = 20  # of torch's for each sequence
# of torch's for each step of a recurrent layer; cuDNN has all steps in a few kernels
STEP_CALLS = {("rnn", "cpu"): 10, ("rnn", "cuda"): 1}
STEP_CALLS |= {(f"recurrence{kind}", on): 20 for kind in ("", "_grad") for on in ("cpu", "cuda")}


def gathered_bytes(graph: Graph, node: Node) -> int:
    """What a product with a sparse matrix reads of dense ones: a row, or the rows of a block, for
    every entry."""
    columns, dense = (graph.types[node.uses[i]] for i in (1, 3))
    block = node.attrs["block"] if node.op == "sddmm_csr" else graph.types[node.uses[2]].shape[1:]
    lines = sum(block) if node.op == "sddmm_csr" and block else (block or (1, 1))[1]
    return columns.shape[0] * lines * dense.shape[1] * dense.dtype.bits // 8


# What Python takes to call torch for a node alone, and for one among others, view or not, in calls
# of torch with a result that is there already. It hides behind the work of a GPU; on a CPU two
# views and a copy of 3 KB were measured at 45 µs where a call takes 2.
HOST_CALLS, HOST_CALLS_AMONG = 3, 7

# Features of a head up to which libraries have kernels for attention; how often torch moves q, k
# and v where there is none.
WIDEST, COPIED = 256, 6

# What a thread of torch's batch norm takes for a pixel: 281 µs were measured for 128 × 112² of 16
# channels on an H200, two thirds of it for statistics.
PIXEL_S = 0.7e-6


def separate_seconds(region: Region, target: Target) -> float:
    """The time of the region's nodes run one kernel each."""
    total = 0.0
    if not target.is_cuda and not all(shows(region.graph, node) for node in region.nodes):
        each = HOST_CALLS if len(region.nodes) == 1 else HOST_CALLS_AMONG
        total += each * target.launch * len(region.nodes)
    for node in region.nodes:
        first = (*node.inputs[:1], None)[0] or node.outputs[0]
        kind, cost = region.graph.types[first].dtype, node_cost(region.graph, node)
        reached, product = efficiency(region, node, target), is_product([node])
        short = kind.short
        if product and kind.bits == 8 and target.is_cuda:  # torch multiplies no bytes there
            short = "f32" if kind.is_float else "f64"
        once = modelled_seconds(cost, short, reached, product, target)
        if product and (sizes := matrices(region.graph, node, target)):
            once = library_seconds(cost, sizes, target)
        total += max(once, _in_turn_seconds(region.graph, node, target))
        total += OVERHEAD.get((node.op, target.kind), 0.0)
        if node.op in ("matmul", "linear") and target.by_columns:
            total += target.by_columns * _by_columns(region.graph, node)
        if node.op in COLLECTIVES:
            total += together_seconds(region.graph, node, target)
        if node.op.startswith("attention"):  # the reference writes scores out, several times
            back = node.op.endswith("_grad")
            q, keys = (region.graph.types[v or ""] for v in node.inputs[back : back + 2])
            scores = q.numel // max(q.shape[-1], 1) * keys.shape[-2]
            total += (12 if back else 6) * 4 * scores / target.stream
            if target.is_cuda and q.shape[-1] > WIDEST:
                total += (
                    COPIED
                    * sum(t.nbytes for t in region.graph.in_types(node)[:3] if t)
                    / (target.stream)
                )
        if node.op == "paged_attention":  # the reference asks for lengths, and takes one by one
            total += PAGED_CALLS * region.graph.types[node.uses[0]].shape[0] * target.launch
        if node.op in ("linear_quantized", "linear_fp8"):  # the weight is written out, in float32
            wide = 4 * region.graph.types[node.output].shape[-1]
            wide *= region.graph.types[node.inputs[0] or ""].shape[-1]
            total += WRITTEN_OUT * wide / target.stream + 6 * target.launch
        if node.op in SPARSE:  # the reference writes all that it gathers, and reads it again
            total += 4 * gathered_bytes(region.graph, node) / target.stream
        if node.op in GROUPED and target.is_cuda:  # the reference multiplies all by all matrices
            groups = region.graph.types[node.uses[2]].shape[0] - 1
            total += (groups - 1) * once + 3 * groups * target.launch
        if node.op in ROWS:  # a row is copied for every pair, in float32 where pairs are added up
            x, pairs = (region.graph.types[v] for v in node.uses[:2])
            total += 10 * x.shape[1] * pairs.numel / target.stream + 2 * target.launch
        if (node.op, target.kind) in STEP_CALLS:  # a few for each step, layer and direction
            steps = region.graph.types[node.uses[0]].shape[0] * len(node.uses) / 4
            total += STEP_CALLS[node.op, target.kind] * steps * target.launch
        if node.op == "aten" and not target.is_cuda and is_random(node.attrs["target"]):
            total += DRAW_S * region.graph.types[node.outputs[0]].numel
        if node.op in ADDED_S:
            total += _added_seconds(region.graph, node, target)
        total += _without_gaps_seconds(region.graph, node, target)
        if node.op == "conv_dw" and target.is_cuda:
            total += _padded_seconds(region.graph, node, target)
        if node.op in CONVOLUTIONS and not target.is_cuda:  # to oneDNN's own order, or from it
            weight = region.graph.types[node.output if node.op == "conv_dw" else node.uses[1]]
            total += 3 * weight.nbytes / target.stream
        if node.op == "conv" and is_uneven(node.attrs):
            copied = 2 * region.graph.types[node.inputs[0] or ""].nbytes  # x, padded first
            total += copied / (0.75 * target.stream) + target.launch
        if node.op == "conv" and target.is_cuda and len(node.uses) > 2:
            total += 2 * region.graph.types[node.output].nbytes / target.stream  # bias apart
    return total


# what torch takes on a CPU for each element, or each row, that it adds where an index says
ADDED_S = {"scatter_add": 3e-9, "embedding_grad": 8e-8}
# on a GPU it walks through few rows one by one, and sorts many, which are read slowly then
WALKED, WALKED_S, SORTED_S, SORTED_READS = 3072, 2.2e-8, 5e-5, 16


def _added_seconds(graph: Graph, node: Node, target: Target) -> float:
    src = graph.types[node.uses[node.op == "scatter_add"]]
    rows = src.numel // max(src.shape[-1], 1) if src.rank else 1
    if node.op == "embedding_grad" and len(node.uses) > 2:  # added in a pass of its own
        more = 2 * graph.types[node.output].nbytes / target.stream + target.launch
        return more + _added_seconds(graph, replace(node, inputs=node.inputs[:2]), target)
    if not target.is_cuda:
        return ADDED_S[node.op] * (src.numel if node.op == "scatter_add" else rows)
    if node.op == "scatter_add":
        return 0.0
    if rows <= WALKED:
        return WALKED_S * rows
    return SORTED_S + SORTED_READS * src.nbytes / target.stream


FEW_BY_COLUMNS = 8  # rows, columns or terms: such matrices torch multiplies without oneDNN


def _by_columns(graph: Graph, node: Node) -> int:
    """How many matrices that lie row by row are multiplied by one that lies column by column, as
    the weight of a linear layer does for one matrix of all rows."""
    x, y = (graph.types[v] for v in node.uses[:2])
    if min(x.rank, y.rank) < 2:
        return 0
    linear = node.op == "linear"
    rows = x.numel // max(x.shape[-1], 1) if linear else x.shape[-2]
    columns = y.shape[-2 if linear else -1]
    turned = x.strides[-1] == 1 and y.strides[-1 if linear else -2] == 1
    if not turned or min(rows, x.shape[-1], columns) <= FEW_BY_COLUMNS:
        return 0
    return 1 if linear else math.prod(graph.types[node.output].shape[:-2])


def fused_seconds(region: Region, target: Target, penalty: float = 1.0) -> float:
    """The time of the region as one library call, ``penalty`` times the usual distance."""
    node = region.nodes[region.anchor or 0]
    reached = efficiency(region, node, target) / penalty
    product = is_product(region.nodes)
    whole = modelled_seconds(region_cost(region), main_dtype(region), reached, product, target)
    if product and (sizes := matrices(region.graph, node, target)):
        whole = penalty * library_seconds(region_cost(region), sizes, target)
    return whole + _without_gaps_seconds(region.graph, node, target)


def _without_gaps_seconds(graph: Graph, node: Node, target: Target) -> float:
    """What libraries take to copy images that are parts of larger ones, before they convolve."""
    images = [graph.types[v] for v in node.uses[:2]] if node.op in CONVOLUTIONS else []
    return sum(copy_seconds(t, target) for t in images if not t.is_dense)


def _in_turn_seconds(graph: Graph, node: Node, target: Target) -> float:
    """The least that torch takes for batch norm in training, of bfloat16 with channels last, which
    is not cuDNN's: 128 programs of 512 threads for each 32 channels, in which a thread reads one
    pixel after another."""
    if node.op not in ("batch_norm_train", "batch_norm_act") or not target.is_cuda:
        return 0.0
    x = graph.types[node.uses[0]]
    if x.dtype.short != "bf16" or x.rank < 4 or x.is_layout("contiguous"):
        return 0.0
    channels = x.shape[1]
    beside = min(32, 1 << (channels.bit_length() - 1))
    return PIXEL_S * x.numel / channels / (128 * 512 // beside)


def _padded_seconds(graph: Graph, node: Node, target: Target) -> float:
    """What cuDNN takes to put zeros beside channels that do not come by eights, as its matrix units
    read them."""
    few = [t for v in node.uses[:2] if (t := graph.types[v]).shape[1] % 8 and t.dtype.bits == 16]
    if node.attrs["groups"] > 1:
        return 0.0
    return sum(t.nbytes * (1 + 8 / min(t.shape[1], 8)) / target.stream for t in few)


def efficiency(region: Region, node: Node, target: Target) -> float:
    """The part of the roofline that library code of this kind tends to reach.

    Measured on an H200 and a 2-core CPU; a coarse table on purpose. Small products leave
    multiprocessors idle: 64×128 output tiles are counted against the units.
    """
    op = table.get(node.op)
    if op.fusion is not Fusion.COMPLEX or not target.is_cuda:
        reached = SLOW.get((node.op, target.kind), 0.75)
        if not target.is_cuda and node.op in CONVOLUTIONS:
            reached *= _of_groups(region.graph, node)
        simple = op.fusion in (Fusion.ELEMENTWISE, Fusion.BROADCAST)
        short = region.graph.types[node.outputs[0]].dtype.bits == 16
        return reached * 0.3 if simple and short and not target.is_cuda else reached
    out = region.graph.types[node.outputs[0]]
    if node.op.startswith("attention"):
        return 0.5
    image = node.op.startswith("conv") and out.rank > 2
    columns = out.shape[1] if image else out.shape[-1] if out.rank else 1
    rows = out.numel / max(columns, 1)
    tiles = -(-rows // 64) * -(-columns // 128)
    reached = 0.9 * min(1.0, max(tiles / target.units, 0.05)) * min(1.0, columns / 128)
    x = region.graph.types[node.inputs[0] or ""]
    if is_depthwise(region.graph, node):
        spread: float = math.prod(node.attrs["stride"]) ** 0.7 if node.op == "conv_dx" else 1.0
        return ALONE[node.op] / spread  # on vector units
    if node.op in ("conv_dx", "conv_dw") and node.attrs["groups"] > 1:
        return _of_grouped_gradient(x, node)
    far = max(node.attrs["dilation"]) >= 8 if node.op in CONVOLUTIONS else False
    if node.op == "conv_dw":  # a sum over all pixels, which is shared out among multiprocessors
        reached = 0.6 * min(1.0, columns / 128) ** 0.5 * min(1.0, out.shape[0] / 64)
        return float(max(reached * (0.8 if far else 1.0), 1e-3))
    if node.op == "conv_dx" and far:  # no kernel of cuDNN's for Hopper takes these
        reached *= 0.65
    if node.op == "conv" and x.rank > 2:
        if x.shape[1] // node.attrs["groups"] < 8:  # matrix units read channels by 8 and more
            reached *= 0.6 * x.shape[1] / node.attrs["groups"] / 8
        if node.attrs["transposed"]:
            reached *= 0.35
        if far:  # far taps are read again and again
            reached *= 0.4
    return float(max(reached * evenness(region, node), 1e-3))


def _of_grouped_gradient(grad: TensorType, node: Node) -> float:
    """What cuDNN's gradients reach with few channels in a group: kernels for matrix units take 64,
    and there are few for channels that are no power of two, and for windows that step."""
    each = grad.shape[1] // node.attrs["groups"]
    reached: float = (0.3 if node.op == "conv_dw" else 0.4) * min(1.0, each / 64)
    if each & (each - 1):
        reached /= 8
    if node.op == "conv_dw" and each < 8:
        reached /= 8
    stepping = node.op == "conv_dx" and max(node.attrs["stride"]) > 1
    return reached / 4 if stepping else reached


def _of_groups(graph: Graph, node: Node) -> float:
    """What is left of the speed of torch's convolutions on a CPU with few channels in a group,
    which it takes one group after another; only plain depthwise ones have a kernel there."""
    each = graph.types[node.inputs[0] or ""].shape[1] / node.attrs["groups"]
    filters = graph.types[node.inputs[1] or ""].shape[0] / node.attrs["groups"]
    flat = graph.types[node.output].rank < 5
    own = node.op == "conv" and flat and filters == 1 and is_depthwise(graph, node)
    if node.attrs["groups"] == 1:
        return 1.0
    return 0.4 if own else min(1.0, each / 40)


def evenness(region: Region, node: Node) -> float:
    """What is left of the speed of a 16-bit product of matrices on a GPU whose rows do not begin at
    multiples of 16 bytes."""
    if node.op not in ("linear", "matmul"):
        return 1.0
    types = [region.graph.types[v] for v in (*node.uses[:2], node.output)]
    if any(t.dtype.bits != 16 or t.rank < 2 or not t.numel for t in types):
        return 1.0
    steps = (max(t.strides[-2:]) for t in types)
    return EVEN[math.gcd(8, *steps)]


EVEN = {1: 0.2, 2: 0.35, 4: 0.7, 8: 1.0}


def _by_machine(text: str, unit: str = "") -> dict[tuple[str, str], float]:
    """A table of operators with a number for the CPU and one for GPUs; "-" for none."""
    words, found = iter(text.split()), {}
    for op, *numbers in zip(words, words, words, strict=True):
        for kind, number in zip(("cpu", "cuda"), numbers, strict=True):
            if number != "-":
                found[op, kind] = float(number + unit)
    return found


# Microseconds that a call costs beyond its work. oneDNN looks up its primitive and packs the weight
# at every call; instance_norm changes shapes; gradients of norms take a dozen calls, batch norm a
# few, cross_entropy_with_grad a few dozen.
OVERHEAD = _by_machine(
    """
    conv 120 -                   linear 8 -                matmul 6 -
    conv_dx 120 -                conv_dw 120 -             conv_quantized 150 150
    group_norm 15 -              instance_norm 15 -        histogram - 25
    group_rows 40 60             take_rows 5 -             sum_rows 10 -
    batch_norm_train 30 4        batch_norm_act 30 6       batch_norm_act_grad 15 10
    layer_norm_grad 50 25        rms_norm_grad 40 20       group_norm_grad 50 25
    instance_norm_grad 50 25     cross_entropy_with_grad 150 40  conv_integer 150 150
    """,
    "e-6",
)

# Operators whose library kernels stay well under the roofline, and the part of it that they reach.
# cross_entropy writes the logarithms of all probabilities, dropout makes a call for each step of
# its random bits, norms of groups read x twice on a GPU, gradients of norms are a dozen calls on
# float32 copies of all operands, max_pool with winners and quantize_fp8 a dozen, pyramid_pool one
# for each grid.
SLOW = _by_machine(
    """
    conv 0.6 -                   linear 0.85 -             matmul 0.85 -
    conv_dx 0.5 -                conv_dw 0.9 -             conv_quantized 0.05 0.02
    conv_integer 0.05 0.02
    attention 0.4 -              to_layout 0.4 0.55        concat - 0.7
    gelu 0.18 -                  silu 0.1 -                sigmoid 0.12 -
    tanh 0.1 -                   mish 0.05 -               exp 0.2 -
    erf 0.2 -                    elu 0.15 -                softplus 0.08 -
    selu 0.035 -                 celu 0.035 -              log_sigmoid 0.025 -
    tanhshrink 0.03 -            softsign 0.25 -           glu 0.12 -
    hardswish 0.45 -             hardsigmoid 0.45 -        softshrink 0.35 -
    leaky_relu 0.5 -             prelu 0.55 -              hardshrink 0.45 -
    where 0.3 -                  le 0.3 -                  gt 0.3 -
    mean 0.4 0.8                 var 0.02 0.4              dropout 0.005 -
    argmax 0.03 -                argmin 0.03 -             histogram - 0.05
    cumsum - 0.4                 cumprod - 0.4             rope 0.08 0.15
    softmax 0.08 0.6             log_softmax 0.08 -        cross_entropy 0.07 0.35
    layer_norm 0.2 -             rms_norm 0.2 -            cross_entropy_with_grad 0.02 0.06
    layer_norm_grad 0.04 0.06    rms_norm_grad 0.04 0.08   instance_norm_grad 0.02 0.06
    group_norm 0.2 0.5           instance_norm 0.2 0.5     group_norm_grad 0.02 0.06
    batch_norm_train 0.1 0.45    batch_norm_act 0.1 0.3    batch_norm_act_grad 0.15 0.15
    resize 0.2 0.06              resize_grad - 0.03        adaptive_avg_pool_grad 0.03 0.11
    max_pool 0.05 0.15           max_pool_grad - 0.07      max_pool_with_indices - 0.25
    avg_pool 0.05 0.2            avg_pool_grad 0.05 0.03   max_pool_with_winners 0.01 0.05
    adaptive_avg_pool 0.08 0.17  adaptive_max_pool 0.05 0.15  adaptive_max_pool_grad 0.03 0.07
    reshape 0.4 0.35             weighted_pool 0.04 -      max_pool_winners_grad 0.01 0.05
    weighted_pool_dx 0.02 -      weighted_pool_dw 0.02 -   pyramid_pool 0.03 0.15
    quantize_fp8 0.05 0.06       rnn 0.2 -
    """
)
