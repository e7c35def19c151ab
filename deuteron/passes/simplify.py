"""Local rules: canonical forms, algebra that keeps every number (nan and inf included), and batch
normalisation with known statistics, which disappears into the product before it:

    bn(conv(x, w, b)) = conv(x, w·s, (b − mean)·s + β)   with s = γ / √(var + ε)

The factors are computed in float64 and rounded once. A batch norm that follows nothing it can
fold into becomes one multiply and one add per element.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deuteron.ir.dtype import DType
from deuteron.ir.graph import Constant, Graph, Node
from deuteron.ir.rewrite import Rewriter, Rule
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.passes.context import by_rules
from deuteron.passes.spellings import MOVEMENT

Result = Sequence[str] | None


def _drop(rw: Rewriter, node: Node) -> Result:
    """Drop an operation that returns its input unchanged (same shape, dtype and memory order). For
    a concatenation this means that all other parts are empty."""
    x = node.uses[0]
    return [x] if rw.build.types[x] == rw.old.types[node.outputs[0]] else None


def _as_it_was(rw: Rewriter, node: Node) -> Result:
    """Adjacent slices of one tensor, as chunk and split give them, are concatenated as one slice of
    it: concat(x[:, :8], x[:, 8:], y) is concat(x, y)."""
    axis, parts = node.attrs["axis"], list[str]()
    for value in node.uses:
        last, this = (rw.made_by(v, "slice") for v in (parts[-1] if parts else None, value))
        if last is not None and this is not None and _meet(last, this, axis):
            x, attrs = last.uses[0], dict(last.attrs) | {"stop": this.attrs["stop"]}
            whole = attrs["start"] == 0 and attrs["stop"] == rw.build.types[x].shape[axis]
            parts[-1] = x if whole else rw.emit("slice", [x], attrs)
        else:
            parts.append(value)
    if len(parts) == len(node.uses):
        return None
    same = len(parts) == 1 and rw.build.types[parts[0]] == rw.old.types[node.output]
    return parts if same else [rw.emit("concat", parts, dict(node.attrs))]


def _meet(a: Node, b: Node, axis: int) -> bool:
    """Whether the second slice begins where the first one of the same tensor ends."""
    same = a.uses[0] == b.uses[0] and a.attrs["axis"] == b.attrs["axis"] == axis
    return same and a.attrs["step"] == b.attrs["step"] == 1 and a.attrs["stop"] == b.attrs["start"]


def _layout_chain(rw: Rewriter, node: Node) -> Result:
    """Converting twice is converting once."""
    inner = rw.made_by(node.uses[0], "to_layout")
    return None if inner is None else [rw.emit("to_layout", [inner.uses[0]], dict(node.attrs))]


def _layout_before_resize(rw: Rewriter, node: Node) -> Result:
    """Converting before enlarging touches fewer bytes than converting after."""
    x = node.uses[0]
    inner = rw.made_by(x, "resize")
    if inner is None or not rw.only_use(x):
        return None
    small = inner.uses[0]
    if rw.build.types[small].numel >= rw.build.types[x].numel:
        return None
    _, turned = table.infer("to_layout", [rw.build.types[small]], node.attrs)
    _, (result,) = table.infer("resize", turned, inner.attrs)
    if result != rw.old.types[node.outputs[0]]:
        return None
    converted = rw.emit("to_layout", [small], dict(node.attrs))
    return [rw.emit("resize", [converted], dict(inner.attrs))]


def _neutral(rw: Rewriter, node: Node) -> Result:
    """x + 0, x − 0, x · 1, x / 1 and x¹ are x. (x · 0 is not 0: nan and inf stay.)

    x + 0 turns −0 into +0 in IEEE arithmetic; x − 0 does not, so only −0 is neutral for add.
    """
    x, y = node.uses
    neutral = {"add": -0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}[node.op]
    for keep, other in ((x, y), (y, x)) if node.op in ("add", "mul") else ((x, y),):
        number = rw.scalar(other)
        if number is None or isinstance(number, bool) or number != neutral:
            continue
        signed = neutral == 0.0 and rw.build.types[keep].dtype.is_float
        if signed and math.copysign(1.0, number) != math.copysign(1.0, neutral):
            continue  # the integer 0 counts as +0
        if rw.build.types[keep] == rw.old.types[node.outputs[0]]:
            return [keep]
    return None


def _involution(rw: Rewriter, node: Node) -> Result:
    """−(−x) and not(not x) are x; relu(relu(x)) is relu(x)."""
    inner = rw.made_by(node.uses[0], node.op)
    if inner is None:
        return None
    same = node.uses[0] if node.op in ("relu", "abs") else inner.uses[0]
    # the types differ where x is a number (not not x is a bool) or a strided view (the result would
    # be dense)
    return [same] if rw.build.types[same] == rw.old.types[node.outputs[0]] else None


def _before_repeating(rw: Rewriter, node: Node) -> Result:
    """What is repeated and then combined with a number is combined first, once for each element;
    the repeated result, a view, then fits the memory order of whatever it joins."""
    made, types = rw.made_by(node.uses[0], "expand"), rw.build.types
    result, numbers = rw.old.types[node.outputs[0]], node.uses[1:]
    if (
        made is None
        or node.outputs[0] in rw.old.output_values
        or any(types[v].rank for v in numbers)
    ):
        return None
    if types[made.output].shape != result.shape or types[made.uses[0]].numel == result.numel:
        return None
    given = [made.uses[0], *numbers]
    if table.infer(node.op, [types[v] for v in given], node.attrs)[1][0].dtype != result.dtype:
        # beside a tensor a number has no say in the result type, beside another number it has
        return None
    return [rw.emit("expand", [rw.emit(node.op, given, dict(node.attrs))], dict(made.attrs))]


def _power(rw: Rewriter, node: Node) -> Result:
    """x² and 1/x have operators of their own, which are exact where pow is not."""
    x = node.uses[0]
    named = {2.0: "square", -1.0: "reciprocal"}  # not √x: pow(−0, 0.5) is +0 but sqrt(−0) is −0
    number, kind = rw.scalar(node.inputs[1]), rw.build.types[x].dtype
    op = None if number is None else named.get(float(number))
    if op is None or not kind.is_float or kind != rw.old.types[node.outputs[0]].dtype:
        return None
    return [rw.emit(op, [x])]


def _divide(rw: Rewriter, node: Node) -> Result:
    """Division by a power of two is multiplication by its exact inverse."""
    x, y = node.uses
    number = rw.scalar(y)
    if number is None or isinstance(number, bool) or number == 0:
        return None
    out = rw.old.types[node.outputs[0]]
    if rw.build.types[x].dtype != out.dtype or not math.isfinite(number):
        return None
    mantissa, exponent = math.frexp(abs(float(number)))
    if mantissa != 0.5 or abs(exponent) > 8:
        return None
    kind = torch.float64 if out.rank else out.dtype.torch  # beside a scalar, float64 would win
    inverse = rw.build.constant(torch.tensor(1.0 / float(number), dtype=kind))
    return [rw.emit("mul", [x, inverse])]


def _global_mean(rw: Rewriter, node: Node) -> Result:
    """Adaptive average pooling to one pixel is a mean over the spatial axes."""
    kind = rw.build.types[node.uses[0]]
    if any(s != 1 for s in node.attrs["size"]) or not kind.dtype.is_float or not kind.numel:
        return None
    return [rw.emit("mean", node.uses, {"axes": tuple(range(2, kind.rank)), "keepdim": True})]


def _linear(rw: Rewriter, node: Node) -> Result:
    """matmul(x, permute(w)) with w a matrix [out, in] is linear(x, w)."""
    x, y = node.uses
    swap, kind = rw.made_by(y, "permute"), rw.build.types[x]
    if swap is None or tuple(swap.attrs["dims"]) != (1, 0):
        return None
    if kind.rank < 2 or not kind.dtype.is_float:
        return None
    return [rw.emit("linear", [x, swap.uses[0]])]


def _linear_bias(rw: Rewriter, node: Node) -> Result:
    """linear(x, w) + b with b a vector of the output size is linear(x, w, b), and so is a product
    with a matrix [in, out]."""
    for product, bias in (node.uses, node.uses[::-1]):
        made = rw.made_by(product, "linear", "matmul")
        if made is None or len(made.uses) != 2:
            continue
        out, b = rw.build.types[product], rw.build.types[bias]
        if b.shape != out.shape[-1:] or b.dtype != out.dtype or not rw.only_use(product):
            continue
        x, weight = made.uses
        if made.op == "matmul":
            kinds = rw.build.types[x], rw.build.types[weight]
            if kinds[0].rank < 2 or kinds[1].rank != 2 or not out.dtype.is_float:
                continue
            weight = rw.emit("permute", [weight], {"dims": (1, 0)})
        return [rw.emit("linear", [x, weight, bias])]
    return None


def _there_and_back(rw: Rewriter, node: Node) -> Result:
    """Widening a number of few bits and narrowing it again, perhaps with a reshape in between,
    changes nothing."""
    seen = rw.made_by(node.uses[0], "reshape")
    wider = rw.made_by(node.uses[0] if seen is None else seen.uses[0], "cast")
    if wider is None:
        return None
    x, out = wider.uses[0], rw.old.types[node.outputs[0]]
    kind, between = rw.build.types[x].dtype, rw.build.types[wider.output].dtype
    if not kind.is_low or between.short not in ("f32", "f64") or kind != out.dtype:
        return None
    if seen is not None:
        x = rw.emit("reshape", [x], dict(seen.attrs))
    return [x] if rw.build.types[x] == out else None


def _summed_as_it_was(rw: Rewriter, node: Node) -> Result:
    """A sum of 16-bit numbers that were widened first is the sum of the numbers themselves: both
    are computed in float32 and rounded once. A reshape may lie between the sum and the rounding."""
    seen = rw.made_by(node.uses[0], "reshape")
    total = rw.made_by(node.uses[0] if seen is None else seen.uses[0], "sum", "mean")
    wider = None if total is None else rw.made_by(total.uses[0], "cast")
    if total is None or wider is None or not rw.only_use(node.uses[0]):
        return None
    x, out = wider.uses[0], rw.old.types[node.outputs[0]]
    kind, between = rw.build.types[x].dtype, rw.build.types[wider.output].dtype
    if (kind.is_low, kind.bits, between.short) != (True, 16, "f32") or kind != out.dtype:
        return None
    found = rw.emit(total.op, [x], dict(total.attrs))
    return [found if seen is None else rw.emit("reshape", [found], dict(seen.attrs))]


def _handed_back(rw: Rewriter, node: Node) -> Result:
    """The gradient that batch norm in training gives its input sums to 0 for each channel, which is
    what the gradient of a bias before it computes: that would only add up rounding errors. nan and
    inf stay, because the zero is made from the gradients of the norm's own parameters."""
    wider = rw.made_by(node.uses[0], "cast")
    value = node.uses[0] if wider is None else wider.uses[0]
    norm = rw.made_by(value, "batch_norm_act_grad")
    if norm is None or value != norm.outputs[0]:
        return None
    _, x, *statistics = norm.inputs[:4]
    made = [rw.made_by(v, "batch_norm_train", "batch_norm_act") for v in statistics]
    own = made[0] is not None and made[0] is made[1] and made[0].uses[0] == x
    rank, out = rw.build.types[value].rank, rw.old.types[node.outputs[0]]
    if not own or tuple(node.attrs["axes"]) != (0, *range(2, rank)):
        return None
    zero = rw.build.constant(torch.tensor(0.0, dtype=torch.float64))
    found = rw.emit("mul", [rw.emit("add", norm.outputs[1:3]), zero])
    if rw.build.types[found].shape != out.shape:
        found = rw.emit("reshape", [found], {"shape": out.shape})
    same = rw.build.types[found].dtype == out.dtype
    return [found if same else rw.emit("cast", [found], {"dtype": out.dtype.short})]


def _cast_where_made(rw: Rewriter, node: Node) -> Result:
    """A norm or sum whose result is reshaped and then cast is cast before the reshape, because the
    kernel that makes it can do so. This does not apply where the result would be written in a wider
    type than it is read in, unless it is small, as sums of rows are."""
    seen = rw.made_by(node.uses[0], "reshape")
    made = None if seen is None else rw.made_by(seen.uses[0])
    if seen is None or made is None or table.get(made.op).fusion is not Fusion.REDUCTION:
        return None
    x, out = rw.build.types[seen.uses[0]], rw.old.types[node.outputs[0]]
    smaller = out.dtype.bits < x.dtype.bits or 2 * x.numel <= rw.build.types[made.uses[0]].numel
    if not smaller or not x.is_layout("contiguous") or not rw.only_use(seen.output):
        return None
    return [
        rw.emit("reshape", [rw.emit("cast", [seen.uses[0]], dict(node.attrs))], dict(seen.attrs))
    ]


def _logits(rw: Rewriter, node: Node) -> Result:
    """A loss of logits that were cast to float32 reads them as they were before, because it
    computes in float32 anyway. Their gradient is then rounded once by the loss, which is allowed
    where all its readers round it first."""
    seen, types = rw.made_by(node.uses[0], "reshape"), rw.build.types
    wider = rw.made_by(node.uses[0] if seen is None else seen.uses[0], "cast")
    if wider is None or not types[wider.uses[0]].dtype.is_low:
        return None
    kind, grad = types[wider.uses[0]].dtype, node.outputs[2]
    if types[wider.output].dtype.short != "f32" or not _all_round(rw.old, grad, kind):
        return None
    x = wider.uses[0] if seen is None else rw.emit("reshape", wider.uses, dict(seen.attrs))
    given = [x, *node.inputs[1:]]
    each, lse, low = rw.build.emit(node.op, given, dict(node.attrs), source=node.source)
    return [each, lse, rw.emit("cast", [low], {"dtype": "f32"})]


def _all_round(graph: Graph, value: str, kind: DType) -> bool:
    """Whether all readers of a value round it to this type first, perhaps after a reshape."""
    readers = graph.users.get(value, ())
    return value not in graph.output_values and all(
        _all_round(graph, n.output, kind)
        if n.op == "reshape"
        else n.op == "cast" and graph.types[n.output].dtype == kind
        for n in readers
    )


def _shared_bias(rw: Rewriter, node: Node) -> Result:
    """conv(x, w, b) + conv(y, v, c) keeps one bias, b + c: the second convolution runs without
    one."""
    first, second = (rw.made_by(v, "conv") for v in node.uses)
    if first is None or second is None or first is second:
        return None
    biases = [v for made in (first, second) for v in made.uses[2:] if rw.is_constant(v)]
    if len(biases) != 2 or not all(map(rw.only_use, node.uses)):
        return None
    one, other = (rw.build.types[made.output] for made in (first, second))
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return None
    left, right = (rw.build.constants[v].data for v in biases)
    total = rw.build.constant((left.double() + right.double()).to(left.dtype), "bias")
    bare = rw.emit("conv", second.inputs[:2], dict(second.attrs))
    full = rw.emit("conv", [*first.inputs[:2], total], dict(first.attrs))
    return [rw.emit("add", [full, bare])]


def _rows_onto(rw: Rewriter, node: Node) -> Result:
    """x + the gradient of an embedding table: that gradient has few nonzero rows, which are added
    to x where it lies. Such sums arise where a table is also a weight, or is looked up twice."""
    x, y = node.uses
    for onto, value in ((x, y), (y, x)):
        made = rw.made_by(value, "embedding_grad")
        same = rw.build.types[onto] == rw.build.types[value] == rw.old.types[node.output]
        if made is not None and len(made.uses) == 2 and same and rw.only_use(value):
            return [rw.emit("embedding_grad", [*made.uses, onto], dict(made.attrs))]
    return None


def _resize_pixel(rw: Rewriter, node: Node) -> Result:
    """Resizing an image of one pixel repeats it, in every mode."""
    x = node.uses[0]
    if any(s != 1 for s in rw.build.types[x].shape[2:]) or node.attrs["antialias"]:
        return None
    out = rw.old.types[node.outputs[0]].shape
    if node.attrs["mode"] not in ("nearest", "nearest-exact", "area"):
        # blending multiplies neighbours by 0, which makes nan of an infinite pixel
        zero = rw.build.constant(torch.tensor(0.0, dtype=torch.float64))
        x = rw.emit("add", [x, rw.emit("mul", [x, zero])])
    return [rw.emit("expand", [x], {"shape": out})]


def _same_size(rw: Rewriter, node: Node) -> Result:
    """Resizing to the size that an image has changes nothing."""
    x, attrs = node.uses[0], node.attrs
    scaled = attrs["scale"] is not None and any(s != 1 for s in attrs["scale"])
    same = rw.build.types[x] == rw.old.types[node.outputs[0]]
    return [x] if same and not scaled and not attrs["antialias"] else None


def _hardtanh(rw: Rewriter, node: Node) -> Result:
    """relu6 and hardtanh are clamps."""
    low, high = (0.0, 6.0) if node.op == "relu6" else (node.attrs["min"], node.attrs["max"])
    return [rw.emit("clamp", [node.uses[0]], {"min": low, "max": high})]


def factors(
    node: Node, constants: Mapping[str, Constant]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(scale, shift) per channel in float64, if all statistics are constants."""
    slots = zip(("mean", "var", "weight", "bias"), node.inputs[1:], strict=False)
    given = {slot: value for slot, value in slots if value is not None}
    if not all(value in constants for value in given.values()):
        return None
    data: Any = {slot: constants[value].data.double() for slot, value in given.items()}
    scale = data.get("weight", 1.0) / torch.sqrt(data["var"] + node.attrs["eps"])
    return scale, data.get("bias", 0.0) - data["mean"] * scale


def _into_product(rw: Rewriter, node: Node) -> Result:
    as_rows = rw.made_by(node.uses[0], "reshape")  # a linear's result with its batch axes merged
    made = rw.made_by(node.uses[0] if as_rows is None else as_rows.uses[0], "conv", "linear")
    if made is None or not rw.only_use(made.output) or not all(map(rw.is_constant, made.uses[1:])):
        return None
    if made.op == "linear" and rw.build.types[node.uses[0]].rank != 2:
        return None  # the channel of batch norm is dimension 1, not the last
    if as_rows is not None and not _keeps_rows(rw, as_rows, made):
        return None
    known, kinds = factors(node, rw.build.constants), {rw.build.types[v].dtype for v in made.uses}
    if known is None or kinds != {rw.old.types[node.outputs[0]].dtype}:
        return None  # a weight of 8 bits would be rounded once more
    scale, shift = known
    x, name, *bias = made.uses
    weight = rw.build.constants[name].data
    if made.op == "conv" and made.attrs["transposed"]:
        groups = made.attrs["groups"]  # weight [in, out/groups, …]: output channels by group
        per_group = scale.reshape(groups, 1, -1)
        wide = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        scaled = (wide * per_group[..., None]).reshape(weight.shape)
    else:
        scaled = weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    shift = shift + rw.build.constants[bias[0]].data.double() * scale if bias else shift
    folded, moved = scaled.to(weight.dtype), shift.to(weight.dtype)
    if not bool(folded.isfinite().all() and moved.isfinite().all()):
        return None  # a tiny variance: the product would overflow its element type
    w, b = rw.build.constant(folded, f"{name}_bn"), rw.build.constant(moved, f"{name}_shift")
    out = rw.emit(made.op, [x, w, b], dict(made.attrs))
    return [out if as_rows is None else rw.emit("reshape", [out], dict(as_rows.attrs))]


def _keeps_rows(rw: Rewriter, reshape: Node, made: Node) -> bool:
    """Whether a reshape keeps the rows of a linear layer's result as rows, and nothing else reads
    it."""
    same = rw.build.types[reshape.output].shape[-1] == rw.build.types[made.output].shape[-1]
    return made.op == "linear" and same and rw.only_use(reshape.output)


def _into_affine(rw: Rewriter, node: Node) -> Result:
    known, x = factors(node, rw.build.constants), node.uses[0]
    kind = rw.build.types[x]
    if known is None or not kind.dtype.is_float or kind.dtype.is_low:
        return None  # two roundings in 16 bits would cost accuracy; the operator rounds once
    shape = (-1, *[1] * (kind.rank - 2))
    scale, shift = (f.to(kind.dtype.torch).reshape(shape) for f in known)
    scaled = rw.emit("mul", [x, rw.build.constant(scale, "bn_scale")])
    return [rw.emit("add", [scaled, rw.build.constant(shift, "bn_shift")])]


HEADS_FIRST = (0, 2, 1, 3)


def _heads_first(rw: Rewriter, node: Node) -> Result:
    """Tokens that are rotated and then put behind heads are put behind heads first and rotated
    there: attention reads them in that order, and may rotate them itself."""
    readers = [u for v in node.outputs for u in rw.old.users.get(v, ())]
    moved = all(u.op == "permute" and tuple(u.attrs["dims"]) == HEADS_FIRST for u in readers)
    read = any(v in rw.old.output_values for v in node.outputs)
    if node.attrs["axis"] != 1 or not readers or not moved or read:
        return None

    def behind(value: str) -> str:
        return rw.emit("permute", [value], {"dims": HEADS_FIRST})

    inputs = [None if v is None else behind(v) for v in node.inputs[:2]] + [*node.inputs[2:]]
    made = rw.build.emit("rope", inputs, {**node.attrs, "axis": 2}, source=rw.where)
    return [behind(v) for v in made]


MOVES = ("reshape", "permute", "expand", "slice")
CANONICAL = (
    Rule("no-op dropped", (*MOVES, "concat", "cast", "to_layout"), _drop),
    MOVEMENT,
    Rule("layout chain merged", ("to_layout",), _layout_chain),
    Rule("layout changed before enlarging", ("to_layout",), _layout_before_resize),
    Rule("what was cut is joined as it was", ("concat",), _as_it_was),
    Rule("global pooling is a mean", ("adaptive_avg_pool",), _global_mean),
    Rule("one pixel resized is repeated", ("resize",), _resize_pixel),
    Rule("resized to its own size", ("resize",), _same_size),
    Rule("clamp by its own name", ("relu6", "hardtanh"), _hardtanh),
    Rule("product with transposed matrix is linear", ("matmul",), _linear),
    Rule("bias joins linear", ("add",), _linear_bias),
    Rule("widened and narrowed", ("cast",), _there_and_back),
    Rule("summed as it was", ("cast",), _summed_as_it_was),
    Rule("logits as they were", ("cross_entropy_with_grad",), _logits),
    Rule("turned where heads come first", ("rope",), _heads_first),
)

ALGEBRA = (
    Rule("nothing in all from a batch norm", ("sum",), _handed_back),
    Rule("neutral element dropped", ("add", "sub", "mul", "div", "pow"), _neutral),
    Rule("undone or repeated", ("neg", "logical_not", "relu", "abs"), _involution),
    Rule("computed before it is repeated", ("add", "sub", "mul", "div", "cast"), _before_repeating),
    Rule("rounded where it is made", ("cast",), _cast_where_made),
    Rule("power by its own name", ("pow",), _power),
    Rule("division by a power of two", ("div",), _divide),
    Rule("one bias for two added convolutions", ("add",), _shared_bias),
    Rule("rows added where they belong", ("add",), _rows_onto),
)

BATCH_NORM = (
    Rule("batch norm into product", ("batch_norm",), _into_product),
    Rule("batch norm as multiply and add", ("batch_norm",), _into_affine),
)

# one form for equal things, so that later rules need to know only that form
canonicalise = by_rules(CANONICAL)
# Rules that hold for every number, nan and infinities included. All but two keep every bit: sharing
# one bias between two added convolutions adds in another order, as any fusion may, and so do rows
# that are added to a table.
algebra = by_rules(ALGEBRA)
fold_batch_norm = by_rules(BATCH_NORM)
