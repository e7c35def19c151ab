"""Estimates for library calls: the part of the roofline that they tend to reach, and what they cost
beyond it, as measured on an H200 and a 2-core CPU."""

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

# The part of the arithmetic rate that cuDNN reaches for depthwise convolutions and their gradients.
# For gradients of the weight it has a legacy kernel for some sizes: the 15 depthwise layers of a
# MobileNetV3-Large took 1.5 ms on an H200, two of them half of that.
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


# Tiles of the result (rows, columns) that a library's kernels for 16-bit products compute, and the
# part of the arithmetic rate that each size reaches.
LIBRARY_TILES = (
    (128, 256, 1.0),
    (128, 192, 0.98),
    (128, 128, 0.93),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.5),
)
# Seconds to begin and end a tile, to store one number of it, and to add up partial sums where the
# terms are split into several parts; the fewest terms of such a part.
BEGUN_S, STORED_S, ADDED_UP_S, LEAST_PART = 0.4e-6, 0.06e-9, 2e-6, 256


def library_seconds(cost: Cost, sizes: tuple[int, int, int, int], target: Target) -> float:
    """Seconds that a library takes for 16-bit products of these ``sizes`` (rows, columns, terms,
    number of products). It computes rounds of tiles, one tile per multiprocessor, with the tile
    size and the split of the terms that are fastest; memory traffic is a lower limit."""
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
    """Rows, columns and terms of a 16-bit product on a GPU, and how many such products the node
    computes. None for any other node, and if rows of x or of the result are not whole multiples of
    16 bytes."""
    x, y, out = (graph.types[v] for v in (*node.uses[:2], node.outputs[0]))
    known = node.op in ("linear", "matmul") and target.is_cuda and min(x.rank, y.rank) >= 2
    if not known or any(t.dtype.bits != 16 or t.shape[-1] % 8 or not t.numel for t in (x, out)):
        return None
    terms, columns = x.shape[-1], out.shape[-1]
    rows = out.shape[-2] if node.op == "matmul" and y.rank > 2 else out.numel // columns
    return rows, columns, terms, out.numel // (rows * columns)


def copy_seconds(t: TensorType, target: Target) -> float:
    """Seconds that a library takes to copy a tensor."""
    return modelled_seconds(Cost(0.0, t.nbytes, t.nbytes), t.dtype.short, 0.75, False, target)


# Turning a weight of 8 or 4 bits into floats moves as many bytes as this many float32 copies of it.
WRITTEN_OUT = 8
DRAW_S = 1e-8  # seconds for a random number, by one thread of the CPU


SPARSE = ("spmm_csr", "sddmm_csr")
PAGED_CALLS = 20  # torch calls for each sequence of paged attention
# torch calls for each step of a recurrent layer; cuDNN does all steps in a few kernels
STEP_CALLS = {("rnn", "cpu"): 10, ("rnn", "cuda"): 1}
STEP_CALLS |= {(f"recurrence{kind}", on): 20 for kind in ("", "_grad") for on in ("cpu", "cuda")}


def gathered_bytes(graph: Graph, node: Node) -> int:
    """The bytes that a product with a sparse matrix reads of dense ones: for every entry of the
    sparse matrix a row, or the rows of a block."""
    columns, dense = (graph.types[node.uses[i]] for i in (1, 3))
    block = node.attrs["block"] if node.op == "sddmm_csr" else graph.types[node.uses[2]].shape[1:]
    lines = sum(block) if node.op == "sddmm_csr" and block else (block or (1, 1))[1]
    return columns.shape[0] * lines * dense.shape[1] * dense.dtype.bits // 8


# What Python takes to call torch for a node that is the whole region, and for one of several nodes,
# view or not. The unit is one torch call that writes to a given result (target.launch on a CPU). On
# a GPU this time hides behind its work; on a CPU two views and a copy of 3 KB were measured at
# 45 µs where such a call takes 2.
HOST_CALLS, HOST_CALLS_AMONG = 3, 7

# WIDEST: libraries have attention kernels for heads of up to this many features. COPIED: where they
# have none, torch moves the bytes of q, k and v this many times more.
WIDEST, COPIED = 256, 6

# Seconds that a thread of torch's batch norm takes for a pixel: 281 µs were measured for 128 images
# of 112² pixels with 16 channels on an H200, two thirds of it for the statistics.
PIXEL_S = 0.7e-6


def separate_seconds(region: Region, target: Target) -> float:
    """Estimate the time of the region if torch runs each of its nodes by a call of its own."""
    total = 0.0
    if not target.is_cuda and not all(shows(region.graph, node) for node in region.nodes):
        each = HOST_CALLS if len(region.nodes) == 1 else HOST_CALLS_AMONG
        total += each * target.launch * len(region.nodes)
    for node in region.nodes:
        first = (*node.inputs[:1], None)[0] or node.outputs[0]
        kind, cost = region.graph.types[first].dtype, node_cost(region.graph, node)
        reached, product = efficiency(region, node, target), is_product([node])
        short = kind.short
        if product and kind.bits == 8 and target.is_cuda:  # torch has no byte products on a GPU
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
        if node.op.startswith("attention"):  # the reference writes the scores to memory repeatedly
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
        if node.op == "paged_attention":  # the reference reads lengths and loops over sequences
            total += PAGED_CALLS * region.graph.types[node.uses[0]].shape[0] * target.launch
        if node.op in ("linear_quantized", "linear_fp8"):  # the reference makes a float32 weight
            wide = 4 * region.graph.types[node.output].shape[-1]
            wide *= region.graph.types[node.inputs[0] or ""].shape[-1]
            total += WRITTEN_OUT * wide / target.stream + 6 * target.launch
        if node.op in SPARSE:  # the reference writes the rows it gathers, and reads them again
            total += 4 * gathered_bytes(region.graph, node) / target.stream
        if node.op in GROUPED and target.is_cuda:  # the reference: all rows by every matrix
            groups = region.graph.types[node.uses[2]].shape[0] - 1
            total += (groups - 1) * once + 3 * groups * target.launch
        if node.op in ROWS:  # it copies a row for every pair, in float32 where it adds pairs up
            x, pairs = (region.graph.types[v] for v in node.uses[:2])
            total += 10 * x.shape[1] * pairs.numel / target.stream + 2 * target.launch
        if (node.op, target.kind) in STEP_CALLS:  # calls for each step, layer and direction
            steps = region.graph.types[node.uses[0]].shape[0] * len(node.uses) / 4
            total += STEP_CALLS[node.op, target.kind] * steps * target.launch
        if node.op == "aten" and not target.is_cuda and is_random(node.attrs["target"]):
            total += DRAW_S * region.graph.types[node.outputs[0]].numel
        if node.op in ADDED_S:
            total += _added_seconds(region.graph, node, target)
        total += _without_gaps_seconds(region.graph, node, target)
        if node.op == "conv_dw" and target.is_cuda:
            total += _padded_seconds(region.graph, node, target)
        if node.op in CONVOLUTIONS and not target.is_cuda:  # weight to or from oneDNN's own order
            weight = region.graph.types[node.output if node.op == "conv_dw" else node.uses[1]]
            total += 3 * weight.nbytes / target.stream
        if node.op == "conv" and is_uneven(node.attrs):
            copied = 2 * region.graph.types[node.inputs[0] or ""].nbytes  # x is padded first
            total += copied / (0.75 * target.stream) + target.launch
        if node.op == "conv" and target.is_cuda and len(node.uses) > 2:
            # torch adds the bias in a pass of its own
            total += 2 * region.graph.types[node.output].nbytes / target.stream
    return total


# Seconds that torch takes on a CPU for each element (scatter_add) or row (embedding_grad) that it
# adds at an index.
ADDED_S = {"scatter_add": 3e-9, "embedding_grad": 8e-8}
# On a GPU torch goes through up to WALKED rows of an embedding's gradient one by one, in WALKED_S
# seconds each. It sorts more rows first, in SORTED_S, and then takes as long as for reading the
# gradient SORTED_READS times.
WALKED, WALKED_S, SORTED_S, SORTED_READS = 3072, 2.2e-8, 5e-5, 16


def _added_seconds(graph: Graph, node: Node, target: Target) -> float:
    src = graph.types[node.uses[node.op == "scatter_add"]]
    rows = src.numel // max(src.shape[-1], 1) if src.rank else 1
    if node.op == "embedding_grad" and len(node.uses) > 2:  # one more pass adds the third input
        more = 2 * graph.types[node.output].nbytes / target.stream + target.launch
        return more + _added_seconds(graph, replace(node, inputs=node.inputs[:2]), target)
    if not target.is_cuda:
        return ADDED_S[node.op] * (src.numel if node.op == "scatter_add" else rows)
    if node.op == "scatter_add":
        return 0.0
    if rows <= WALKED:
        return WALKED_S * rows
    return SORTED_S + SORTED_READS * src.nbytes / target.stream


FEW_BY_COLUMNS = 8  # up to so many rows, columns or terms torch multiplies without oneDNN


def _by_columns(graph: Graph, node: Node) -> int:
    """How many products of a row-major by a column-major matrix a node computes by oneDNN. A linear
    layer is one: all its rows are one matrix, and its transposed weight is column-major."""
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
    """The time of the region as one library call, if the call is ``penalty`` times as far from the
    roofline as library calls usually are."""
    node = region.nodes[region.anchor or 0]
    reached = efficiency(region, node, target) / penalty
    product = is_product(region.nodes)
    whole = modelled_seconds(region_cost(region), main_dtype(region), reached, product, target)
    if product and (sizes := matrices(region.graph, node, target)):
        whole = penalty * library_seconds(region_cost(region), sizes, target)
    return whole + _without_gaps_seconds(region.graph, node, target)


def _without_gaps_seconds(graph: Graph, node: Node, target: Target) -> float:
    """Seconds that libraries take, before they convolve, to copy images that are parts of larger
    buffers."""
    images = [graph.types[v] for v in node.uses[:2]] if node.op in CONVOLUTIONS else []
    return sum(copy_seconds(t, target) for t in images if not t.is_dense)


def _in_turn_seconds(graph: Graph, node: Node, target: Target) -> float:
    """The least time that torch takes for batch norm in training of bfloat16 with channels last. It
    runs its own kernel there, not cuDNN's: 128 blocks of 512 threads for each 32 channels, in which
    a thread reads one pixel after another."""
    if node.op not in ("batch_norm_train", "batch_norm_act") or not target.is_cuda:
        return 0.0
    x = graph.types[node.uses[0]]
    if x.dtype.short != "bf16" or x.rank < 4 or x.is_layout("contiguous"):
        return 0.0
    channels = x.shape[1]
    beside = min(32, 1 << (channels.bit_length() - 1))
    return PIXEL_S * x.numel / channels / (128 * 512 // beside)


def _padded_seconds(graph: Graph, node: Node, target: Target) -> float:
    """Seconds that cuDNN takes to pad the channels of 16-bit images with zeros to a multiple of
    eight, which its matrix units need."""
    few = [t for v in node.uses[:2] if (t := graph.types[v]).shape[1] % 8 and t.dtype.bits == 16]
    if node.attrs["groups"] > 1:
        return 0.0
    return sum(t.nbytes * (1 + 8 / min(t.shape[1], 8)) / target.stream for t in few)


def efficiency(region: Region, node: Node, target: Target) -> float:
    """The part of the roofline that library code tends to reach for a node.

    Measured on an H200 and a 2-core CPU; a coarse table on purpose. Small products leave
    multiprocessors idle, so the number of 64×128 output tiles is compared with that of the units.
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
        return ALONE[node.op] / spread  # these run on vector units, not on matrix units
    if node.op in ("conv_dx", "conv_dw") and node.attrs["groups"] > 1:
        return _of_grouped_gradient(x, node)
    far = max(node.attrs["dilation"]) >= 8 if node.op in CONVOLUTIONS else False
    if node.op == "conv_dw":  # multiprocessors share the sum over all pixels: few tiles do no harm
        reached = 0.6 * min(1.0, columns / 128) ** 0.5 * min(1.0, out.shape[0] / 64)
        return float(max(reached * (0.8 if far else 1.0), 1e-3))
    if node.op == "conv_dx" and far:  # none of cuDNN's kernels for Hopper takes these
        reached *= 0.65
    if node.op == "conv" and x.rank > 2:
        if x.shape[1] // node.attrs["groups"] < 8:  # matrix units read 8 channels at least
            reached *= 0.6 * x.shape[1] / node.attrs["groups"] / 8
        if node.attrs["transposed"]:
            reached *= 0.35
        if far:  # pixels that taps far apart share are read again and again
            reached *= 0.4
    return float(max(reached * evenness(region, node), 1e-3))


def _of_grouped_gradient(grad: TensorType, node: Node) -> float:
    """The part of the roofline that cuDNN's gradients of grouped convolutions reach. Kernels for
    matrix units take 64 channels of a group, and few kernels exist for numbers of channels that are
    no power of two, and for strides above 1."""
    each = grad.shape[1] // node.attrs["groups"]
    reached: float = (0.3 if node.op == "conv_dw" else 0.4) * min(1.0, each / 64)
    if each & (each - 1):
        reached /= 8
    if node.op == "conv_dw" and each < 8:
        reached /= 8
    stepping = node.op == "conv_dx" and max(node.attrs["stride"]) > 1
    return reached / 4 if stepping else reached


def _of_groups(graph: Graph, node: Node) -> float:
    """The factor by which groups slow down torch's convolutions on a CPU. With few channels in a
    group it computes one group after another; only plain depthwise ones have a kernel there."""
    each = graph.types[node.inputs[0] or ""].shape[1] / node.attrs["groups"]
    filters = graph.types[node.inputs[1] or ""].shape[0] / node.attrs["groups"]
    flat = graph.types[node.output].rank < 5
    own = node.op == "conv" and flat and filters == 1 and is_depthwise(graph, node)
    if node.attrs["groups"] == 1:
        return 1.0
    return 0.4 if own else min(1.0, each / 40)


def evenness(region: Region, node: Node) -> float:
    """The factor by which a 16-bit product of matrices on a GPU slows down if rows do not begin at
    multiples of 16 bytes."""
    if node.op not in ("linear", "matmul"):
        return 1.0
    types = [region.graph.types[v] for v in (*node.uses[:2], node.output)]
    if any(t.dtype.bits != 16 or t.rank < 2 or not t.numel for t in types):
        return 1.0
    steps = (max(t.strides[-2:]) for t in types)
    return EVEN[math.gcd(8, *steps)]


EVEN = {1: 0.2, 2: 0.35, 4: 0.7, 8: 1.0}  # by the power of two that divides all row strides


def _by_machine(text: str, unit: str = "") -> dict[tuple[str, str], float]:
    """Parse a table of operators, each with a number for the CPU and one for GPUs; "-" for none."""
    words, found = iter(text.split()), {}
    for op, *numbers in zip(words, words, words, strict=True):
        for kind, number in zip(("cpu", "cuda"), numbers, strict=True):
            if number != "-":
                found[op, kind] = float(number + unit)
    return found


# Microseconds that a call costs beyond its work (CPU, GPU). oneDNN looks up its primitive and packs
# the weight at every call; instance_norm changes shapes; gradients of norms take a dozen calls,
# batch norm a few, cross_entropy_with_grad a few dozen.
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

# Operators whose library kernels stay well under the roofline, and the part of it that they reach
# (CPU, GPU). cross_entropy writes the logarithms of all probabilities, dropout makes a call for
# each step of computing its random bits, group norms read x twice on a GPU, gradients of norms are
# a dozen calls on float32 copies of all operands, max_pool with winners and quantize_fp8 a dozen
# calls, pyramid_pool one for each grid.
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
