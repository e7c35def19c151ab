"""Pooling over 1, 2 or 3 spatial dimensions: windows given by size, or by how many are wanted.

Four poolings from one table, each with its gradient, and the maxima also with the places they
come from. The gradient of an average needs only shapes; that of a maximum looks at x again to
find the winners. One spatial dimension is computed as an image of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, prod
from operator import lt
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import at_least, check_grad, one_dtype, per_dim, spatial_dims
from deuteron.ops.conv import memory_order, ordered
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.movement import ROW
from deuteron.ops.opdef import REQUIRED, Attr, Attributes, Fusion, OpDef, Types, Vjp
from deuteron.ops.samples import Arg, Sample, samples

_WINDOW = {
    "kernel": Attr("ints", REQUIRED, "the window, one int or one per dimension"),
    "stride": Attr("ints", None, "steps between windows; None means the kernel"),
    "padding": Attr("ints", (0,), "positions added on both sides, at most half the kernel"),
}
_DILATION = Attr("ints", (1,), "distance between the elements of a window")
_CEIL = Attr("bool", False, "also use a last window that hangs over the end")
_SIZE = Attr("any", REQUIRED, "how many windows, one int or one per dimension; None keeps x's")
SHAPE_OF_X = Attr("ints", REQUIRED, "the shape of x, whose gradient this is")
ORDER_OF_X = Attr("str", "contiguous", "memory order of the result", ("contiguous", "nhwc"))

_ATTRS: dict[str, dict[str, Attr]] = {
    "max_pool": {**_WINDOW, "dilation": _DILATION, "ceil_mode": _CEIL},
    "avg_pool": {
        **_WINDOW,
        "ceil_mode": _CEIL,
        "count_include_pad": Attr("bool", True, "whether padding counts in the average"),
        "divisor": Attr("int", None, "divide by this instead of the count"),
    },
    "adaptive_max_pool": {"size": _SIZE},
    "adaptive_avg_pool": {"size": _SIZE},
}

# ---- attributes and shapes -------------------------------------------------------------------

# Numbers of spatial dimensions for which nhwc in gives nhwc out, as in PyTorch; (1, 2) for others.
_KEEPS = {"max_pool": (2, 3), "max_pool_with_indices": (1, 2, 3), "max_pool_grad": (1, 2, 3)}


def result_order(op: str, t: TensorType) -> str:
    """The memory order of what ``op`` makes of a tensor."""
    return memory_order(t) if t.rank - 2 in _KEEPS.get(op, (1, 2)) else "contiguous"


def _complete(op: str, types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x = types[-1]
    dims, full = spatial_dims(op, x), dict(attrs)
    if "stride" in full:
        full["stride"] = full["stride"] or full["kernel"]
    for name in ("kernel", "stride", "padding", "dilation"):
        if name in full:
            full[name] = per_dim(op, name, full[name], dims)
    if "size" in full:
        size = full["size"]
        entries = tuple(size) if isinstance(size, list | tuple) else (size,) * dims
        if len(entries) != dims or any(type(n) not in (int, type(None)) for n in entries):
            wrong = f"{op}: size={size!r} does not fit {dims} spatial dimensions"
            remedy = "give an int, or one per dimension, None where x keeps its own"
            raise GraphError(wrong, remedy=remedy)
        sizes = zip(entries, x.shape[2:], strict=True)
        full["size"] = tuple(have if n is None else n for n, have in sizes)
    return full


def _pooled(op: str, shape: Shape, attrs: Attributes) -> Shape:
    """The shape after pooling, or a GraphError that says which window does not fit."""
    if 0 in shape[1:]:
        wrong = f"{op}: x {list(shape)} is empty beside the batch"
        raise GraphError(wrong, remedy="only dimension 0 may have size 0")
    if "size" in attrs:
        at_least(op, 1, size=attrs["size"])
        return (*shape[:2], *attrs["size"])
    kernel, stride, padding = attrs["kernel"], attrs["stride"], attrs["padding"]
    dilation = attrs.get("dilation", (1,) * len(kernel))
    at_least(op, 1, kernel=kernel, stride=stride, dilation=dilation)
    at_least(op, 0, padding=padding)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        wrong = f"{op}: padding={padding} is more than half of kernel={kernel}"
        raise GraphError(wrong, remedy="use less, or pad x before pooling")
    if "avg" in op and len(kernel) == 3 and any(map(lt, shape[2:], kernel)):
        wrong = f"{op}: kernel={kernel} is larger than x {list(shape)}"  # torch has no such kernel
        raise GraphError(wrong, remedy="pad x before pooling")
    if attrs.get("divisor") == 0:
        raise GraphError(f"{op}: divisor=0", remedy="leave it out to divide by the count")
    ceil, sizes = attrs["ceil_mode"], []
    for n, k, s, p, d in zip(shape[2:], kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        out = (room + (s - 1 if ceil else 0)) // s + 1
        # the last window must begin inside x or its left padding
        sizes.append(out - 1 if ceil and (out - 1) * s >= n + p else out)
    if min(sizes) < 1:
        remedy = "use a smaller kernel or dilation, more padding, or ceil_mode=True"
        raise GraphError(f"{op}: kernel={kernel} does not fit into x {list(shape)}", remedy=remedy)
    if _misses(shape[2:], tuple(sizes), stride, padding, dilation):
        how = f"{op}: with dilation={dilation} and padding={padding} the elements of a window"
        wrong = f"{how} step over all of x {list(shape)}, and there is no largest of none"
        raise GraphError(wrong, remedy="use a dilation no larger than x, or no padding")
    return (*shape[:2], *sizes)


def _misses(space: Shape, windows: Shape, stride: Shape, padding: Shape, dilation: Shape) -> bool:
    """Whether a window has all its elements in the padding. A window that begins in the padding
    reaches beyond it, since the padding is at most half of the window; but a dilation larger than x
    may step from the padding before x to the padding after it. (For such a window torch returns
    places outside of x, and on a CPU its gradient writes to them.)"""
    return any(
        d > n and any(start % d >= n for start in range(-p, min(0, count * s - p), s))
        for n, count, s, p, d in zip(space, windows, stride, padding, dilation, strict=True)
    )


def _infer(op: str, x: TensorType, **attrs: Any) -> TensorType | tuple[TensorType, ...]:
    one_dtype(op, x=x)
    y = TensorType.of(_pooled(op, x.shape, attrs), x.dtype, result_order(op, x))
    return (y, y.with_dtype(int64)) if op.endswith("indices") else y


def _infer_max_grad(op: str, grad: TensorType, x: TensorType, **attrs: Any) -> TensorType:
    one_dtype(op, grad=grad, x=x)
    check_grad(op, grad, _pooled(op, x.shape, attrs))
    return TensorType.of(x.shape, x.dtype, result_order(op, x))


def _infer_avg_grad(op: str, grad: TensorType, shape: Shape, **attrs: Any) -> TensorType:
    one_dtype(op, grad=grad)
    if len(shape) != grad.rank:
        wrong = f"{op}: shape {list(shape)} and the gradient {list(grad.shape)} differ in rank"
        raise GraphError(wrong, remedy="give the shape of the forward input")
    check_grad(op, grad, _pooled(op, shape, attrs or {"size": grad.shape[2:]}))
    return TensorType.of(shape, grad.dtype, result_order(op, grad))


def _flops(op: str, ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """One operation per element of each window, for a pool as for its gradient. Adaptive windows
    overlap where the sizes do not divide, and shared elements are counted in each."""
    x, y = ins[0].shape, outs[0].shape
    if op.endswith("grad"):
        x, y = y, x
    if "kernel" in attrs:
        return float(prod(y) * prod(attrs["kernel"]))
    elements = prod(x[:2])
    for n, count in zip(x[2:], y[2:], strict=True):
        # where a border between two windows cuts an element of x, the element is in both
        elements *= n + count - gcd(n, count)
    return float(elements)


# ---- references ------------------------------------------------------------------------------

_KERNELS = {
    "max_pool": ("max_pool{}d_with_indices", "max_pool{}d_with_indices_backward"),
    "avg_pool": ("avg_pool{}d", "avg_pool{}d_backward"),
    "adaptive_max_pool": ("adaptive_max_pool{}d", "adaptive_max_pool{}d_backward"),
    "adaptive_avg_pool": ("adaptive_avg_pool{}d", "_adaptive_avg_pool{}d_backward"),
}


def _kernel(base: str, t: Tensor, back: bool = False) -> Callable[..., Any]:
    name = _KERNELS[base][back].format(max(t.ndim - 2, 2))
    found: Callable[..., Any] = getattr(torch.ops.aten, name)
    return found


def _image(t: Tensor) -> Tensor:
    """Turn a row [N, C, W] into an image of height 1; return others as they are."""
    return t.unsqueeze(2) if t.ndim == 3 else t


def _args(base: str, attrs: Attributes) -> list[Any]:
    """The attributes as the kernels take them, for an image where x is a row."""
    args = []
    for name in _ATTRS[base]:
        value = attrs[name]
        if isinstance(value, tuple) and len(value) == 1:
            value = (0 if name == "padding" else 1, *value)
        args.append(value)
    return args


def _back(op: str, like: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
    """Results as rows again where ``like`` is, in the memory order that inference promises."""
    order = result_order(op, TensorType.from_tensor(like))
    return tuple(ordered(r.squeeze(2) if like.ndim == 3 else r, order) for r in results)


def mean_gradient_faults(x: Tensor) -> bool:
    """Whether PyTorch's gradient of the means of padded windows must not be used: on a GPU, for
    channels last, it forgets the padding (2.11; fixed by pytorch/pytorch#188345)."""
    return x.is_cuda and x.ndim == 4 and not x.is_contiguous()


def _reference(op: str, x: Tensor, **attrs: Any) -> Any:
    base, given = _base(op), x
    if base == "avg_pool" and x.requires_grad and mean_gradient_faults(x):
        x = x.contiguous()
    found = _kernel(base, x)(_image(x), *_args(base, attrs))
    if op.endswith("indices"):
        return _back(op, given, *found)
    return _back(op, given, found[0] if isinstance(found, tuple) else found)[0]


def _reference_max_grad(op: str, grad: Tensor, x: Tensor, **attrs: Any) -> Tensor:
    base = _base(op)
    args = _args(base, attrs)
    _, where = _kernel(base, x)(_image(x), *args)
    rest = [where] if "size" in attrs else [*args, where]
    return _back(op, x, _kernel(base, x, back=True)(_image(grad), _image(x), *rest))[0]


def _reference_avg_grad(op: str, grad: Tensor, shape: Shape, **attrs: Any) -> Tensor:
    x = _image(grad.new_empty(shape))  # torch looks only at its shape
    rest = _args(_base(op), attrs) if attrs else []
    return _back(op, grad, _kernel(_base(op), grad, back=True)(_image(grad), x, *rest))[0]


# ---- gradients -------------------------------------------------------------------------------


def _max_vjp(base: str, b: Ops, v: Vjp) -> Grads:
    return [b.call(f"{base}_grad", v.grad, v.arg(0), **v.attrs)]


def _max_grad_vjp(base: str, b: Ops, v: Vjp) -> Grads:
    """The operator is linear in ``grad``, so its gradient picks, for each window, the element at
    the place of the winner. In x it is constant almost everywhere, so x receives 0."""
    grad, x, back = v.arg(0), v.arg(1), None
    if v.needs[0]:
        _, where = b.call(f"{base}_with_indices", x, **v.attrs)
        flat = b.reshape(v.grad, shape=(*x.shape[:2], prod(x.shape[2:])))
        places = b.reshape(where, shape=(*x.shape[:2], prod(grad.shape[2:])))
        back = b.reshape(b.gather(flat, places, axis=2), shape=grad.shape)
    return [back, b.zeros(x.type) if v.needs[1] else None]


def _avg_vjp(base: str, b: Ops, v: Vjp) -> Grads:
    shape, attrs = v.arg(0).shape, dict(v.attrs)
    size = attrs.pop("size", None)
    if size is not None and prod(size) == 1:  # a mean: all elements get the same share
        return [b.expand(v.grad * (1.0 / prod(shape[2:])), shape=shape)]
    return [b.call(f"{base}_grad", v.grad, shape=shape, **attrs)]


def _avg_grad_vjp(base: str, b: Ops, v: Vjp) -> Grads:
    attrs = {"size": v.arg(0).shape[2:], **v.attrs}
    return [b.call(base, v.grad, **{name: attrs[name] for name in _ATTRS[base]})]


# ---- adaptive pools in simpler operators -----------------------------------------------------


def _adaptive_expand(op: str, b: Ops, ins: Syms, attrs: Any) -> list[Sym]:
    """Pool one dimension after another: k · k elements are k windows of k, and then one of k."""
    (x,), size = ins, attrs["size"]
    if prod(size) == 1:
        kind, axes = "max" if "max" in op else "mean", tuple(range(2, x.rank))
        y = b.one(kind, x, axes=axes, keepdim=True)
    else:
        y = x if "max" in op else b.upcast(x)
        for d, n in enumerate(size):
            if n != y.shape[2 + d]:
                y = b.one(op, y, size=(*size[: d + 1], *y.shape[3 + d :]))
    return [b.to_layout(b.to(y, x.dtype), result_order(op, x.type))]


def _adaptive_grad_expand(op: str, b: Ops, ins: Syms, attrs: Any) -> list[Sym]:
    """One dimension after another, the first one last. If its cells all have the same length, all
    elements of a cell get the same share: that is an ``expand``, so the large result need not be
    written to memory before it is read."""
    (grad,), shape = ins, attrs["shape"]
    y, n = b.upcast(grad), shape[2]
    for d in reversed(range(2, grad.rank)):
        if y.shape[d] != shape[d] and (d > 2 or n % y.shape[d]):
            y = b.one(op, y, shape=(*y.shape[:d], *shape[d:]))
    if y.shape != shape:
        cells = (*shape[:2], y.shape[2], n // y.shape[2], *shape[3:])
        share = b.reshape(y * (y.shape[2] / n), (*cells[:3], 1, *cells[4:]))
        y = b.reshape(b.expand(share, shape=cells), shape)
    return [b.to_layout(b.to(y, grad.dtype), result_order(op, grad.type))]


_EXPAND = {
    "adaptive_max_pool": _adaptive_expand,
    "adaptive_avg_pool": _adaptive_expand,
    "adaptive_avg_pool_grad": _adaptive_grad_expand,
}

# ---- samples and the table -------------------------------------------------------------------

_CASES = samples(
    """2x3x6x5 kernel=2 | 1x2x7x6@sliced kernel=(3,2) stride=(2,3) padding=(1,0)
    | 1x2x6x5@transposed kernel=3 stride=2 padding=1 ceil_mode=True
    | 2x3x5x5@nhwc kernel=3 stride=2 padding=1 | 2x3x8 kernel=3 stride=2 padding=1
    | 2x3x5@nhwc kernel=2 ceil_mode=True | 1x2x4x3x4@nhwc kernel=2 stride=1
    | 2x2x1x1 kernel=1 | 0x3x4x4 kernel=2 | 1x2x6x6@nhwc kernel=2 dilation=3 stride=1
    | 1x2x5x5@nhwc kernel=3 stride=2 padding=1 count_include_pad=False | 2x2x5 kernel=2 divisor=3
    | 2x3x6x5 size=2 | 2x3x5x4@nhwc size=(3,None) | 2x3x4x5@nhwc size=1
    | 1x2x3x4@transposed size=(5,3) | 2x3x7 size=(3,) | 2x3x7@nhwc size=2
    | 1x2x4x3x5@nhwc size=(2,2,3) | 0x3x4x4 size=2
    | 1x3x5x5:extreme kernel=2 nograd [extreme] | 1x3x5x5:extreme size=2 nograd [extreme]"""
)


def _samples(op: str, base: str) -> list[Sample]:
    """Those cases whose attributes the pool has, as samples of the pool or of its gradient."""
    known, is_max = _ATTRS[base], "max" in base
    found = []
    for s in (s for s in _CASES() if s.attrs.keys() <= known.keys()):
        (x,), attrs = s.args, s.attrs
        x = replace(x, kind="distinct") if is_max and not s.note else x
        if not op.endswith("grad"):
            found.append(replace(s, inputs=(x,)))
        elif not s.note:
            given = {n: known[n].coerce(n, attrs.get(n, known[n].default)) for n in known}
            like = _complete(base, [TensorType.of(x.shape, "f32")], given)
            grad = Arg(_pooled(base, x.shape, like), layout=ROW if is_max else x.layout)
            rest = {name: value for name, value in attrs.items() if name != "size"}
            of_mean = Sample((grad,), {"shape": x.shape, **rest})
            found.append(Sample((grad, x), attrs) if is_max else of_mean)
    return found


def _base(op: str) -> str:
    return op.removesuffix("_grad").removesuffix("_with_indices")


# (kind of pool, whether it is the gradient) → inputs, inference, reference and gradient rule
_RULES: dict[tuple[str, bool], tuple[Any, ...]] = {
    ("max", False): (("x",), _infer, _reference, _max_vjp),
    ("max", True): (("grad", "x"), _infer_max_grad, _reference_max_grad, _max_grad_vjp),
    ("avg", False): (("x",), _infer, _reference, _avg_vjp),
    ("avg", True): (("grad",), _infer_avg_grad, _reference_avg_grad, _avg_grad_vjp),
}


def _define(op: str, doc: str) -> OpDef:
    base, kind, grad = _base(op), "max" if "max" in op else "avg", op.endswith("grad")
    attrs, (inputs, infer, reference, vjp) = _ATTRS[base], _RULES[kind, grad]
    if grad and kind == "avg":
        attrs = {"shape": SHAPE_OF_X, **{name: a for name, a in attrs.items() if name != "size"}}
    return OpDef(
        op,
        doc,
        inputs,
        partial(infer, op),
        partial(reference, op),
        Fusion.OPAQUE if grad else Fusion.REDUCTION,
        attrs,
        complete=partial(_complete, op),
        vjp=partial(vjp, base),
        expand=partial(_EXPAND[op], op) if op in _EXPAND else None,
        flops=partial(_flops, op),
        samples=partial(_samples, op, base),
    )


_LARGEST = "The largest elements of ``size`` windows that cover x"
_DOCS = {
    "max_pool": "The largest element of each window of x [N, C, ...]; nan wins.",
    "max_pool_with_indices": "The largest element of each window, and its place in the flattened "
    "image as int64.",
    "max_pool_grad": "The gradient of max_pool: each window's goes to its winner in x.",
    "avg_pool": "The mean of each window of x [N, C, ...].",
    "avg_pool_grad": "The gradient of avg_pool: each window's is shared out evenly.",
    "adaptive_max_pool": f"{_LARGEST}.",
    "adaptive_max_pool_with_indices": f"{_LARGEST}, and their places as int64.",
    "adaptive_max_pool_grad": "The gradient of adaptive_max_pool: each window's goes to its winner "
    "in x.",
    "adaptive_avg_pool": "The means of ``size`` windows that cover x [N, C, ...].",
    "adaptive_avg_pool_grad": "The gradient of adaptive_avg_pool: each window's is shared out "
    "evenly.",
}
OPS = tuple(_define(op, doc) for op, doc in _DOCS.items())
