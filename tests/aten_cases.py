"""Small calls for every entry of the ATen table, for test_frontend_torch.py.

``CASES`` are calls that must become our operators, ``KEPT`` calls that must stay ATen's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

_random = torch.Generator().manual_seed(7)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers between 0.1 and 0.9 with signs, so that every function is smooth and defined."""
    values = 0.1 + 0.8 * torch.rand(shape, generator=_random)
    signs = torch.randint(0, 2, shape, generator=_random) * 2 - 1
    return (values * signs).to(dtype)


def pos(*shape: int) -> torch.Tensor:
    return t(*shape).abs()


def whole(*shape: int, high: int = 5) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_random)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_random) > 0.5


@dataclass(frozen=True, eq=False)
class Case:
    """``aten.<key>(*args, **kwargs)``; ``take`` says which results of several are read."""

    key: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    take: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        shown = [_short(a) for a in (*self.args, *self.kwargs.values())]
        return f"{self.key}({','.join(shown)})".replace(" ", "")


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, list):
        return f"[{','.join(map(_short, value))}]"
    return str(value).removeprefix("torch.")


def case(key: str, *args: Any, take: tuple[int, ...] = (0,), **kwargs: Any) -> Case:
    return Case(key, args, kwargs, take)


X, Y, ROW, S = t(2, 3, 4), t(2, 3, 4), t(4), torch.tensor(0.7)
IMG, SEQ, VOL = t(2, 4, 6, 6), t(2, 4, 9), t(1, 2, 5, 6, 4)
INT, B = whole(2, 3, 4), flags(2, 3, 4)
BYTES = whole(2, 3, 4, high=255).to(torch.uint8)
ODD = torch.tensor([1.0, math.nan, math.inf, -math.inf, -0.0])
Q, K3 = t(2, 4, 5, 8), t(2, 2, 5, 8)
NHWC = t(2, 4, 6, 6).to(memory_format=torch.channels_last)
f16, f64, i32 = torch.float16, torch.float64, torch.int32
BF16, F8 = torch.bfloat16, [t(n, 48).to(torch.float8_e4m3fn) for n in (32, 16)]

_SIGNED = """neg abs sign sgn square exp exp2 expm1 sin cos tan erf floor ceil round trunc isnan
    isinf isfinite logical_not relu relu6 sigmoid tanh silu mish hardswish hardsigmoid selu
    log_sigmoid reciprocal atan frac leaky_relu gelu hardtanh celu softplus softshrink hardshrink
    elu special_ndtr""".split()

MATH = [
    *(case(f"{name}.default", X) for name in _SIGNED),
    *(case(f"{n}.default", pos(3, 5)) for n in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")),
    *(case(f"{n}.default", INT) for n in ("neg", "floor", "sqrt", "exp", "abs")),
    *(
        case(f"{op}.{kind}", X, y)
        for op in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind, y in (("Tensor", Y), ("Tensor", ROW), ("Scalar", 0.25))
    ),
    *(case(f"{op}.Scalar", v, 1) for op in ("gt", "eq") for v in (INT, S, B)),
    *(
        case(f"{op}.Tensor", X, y)
        for op in ("add", "sub", "rsub", "mul", "div", "true_divide")
        for y in (Y, ROW, S)
    ),
    *(
        case(f"{op}.{kind}", v, y)
        for op in ("add", "sub", "mul", "div")
        for kind in ("Tensor", "Scalar")
        for v in (X, S, INT)
        for y in (2, 0.3)
    ),
    *(case(f"{op}.Tensor", X, Y, alpha=a) for op in ("add", "sub", "rsub") for a in (2, 0.5)),
    *(case(f"{op}.Scalar", v, 2, 3) for op in ("add", "sub", "rsub") for v in (X, S, INT)),
    case("add.Tensor", X.half(), S),
    case("add.Tensor", INT, S),
    case("mul.Tensor", B, X),
    case("add.Tensor", X.to(f64), X),
    case("mul.Tensor", torch.tensor(2), torch.tensor(0.5)),
    case("mul.Tensor", torch.tensor(3, dtype=f16), 0.1),
    *(case("div.Tensor_mode", X, Y, rounding_mode=m) for m in (None, "floor", "trunc")),
    case("div.Tensor_mode", INT, INT + 1, rounding_mode="floor"),
    case("div.Scalar_mode", X, 0.3, rounding_mode="floor"),
    case("pow.Tensor_Tensor", pos(3, 4), t(3, 4)),
    case("pow.Tensor_Scalar", X, 2),
    case("pow.Tensor_Scalar", X, 3.0),
    case("pow.Tensor_Scalar", INT, 0.5),
    case("pow.Tensor_Scalar", INT, 2),
    case("pow.Scalar", 2.0, X),
    case("remainder.Tensor", X, pos(4)),
    case("remainder.Scalar", X, 0.3),
    case("remainder.Scalar", INT, 3),
    case("remainder.Scalar_Tensor", 0.7, pos(3, 4)),
    case("floor_divide.default", X, pos(4)),
    case("floor_divide.Scalar", INT, 2),
    case("maximum.default", X, Y),
    case("minimum.default", X, Y),
    case("max.other", X, ROW),
    case("min.other", X, ROW),
    case("atan2.default", X, Y),
    *(case(f"logical_{op}.default", B, flags(3, 4)) for op in ("and", "or", "xor")),
    *(
        case(f"{n}.Tensor", B, flags(4))
        for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
    ),
    case("bitwise_not.default", B),
    case("addcmul.default", X, Y, ROW),
    case("addcmul.default", X, Y, ROW, value=0.5),
    case("addcdiv.default", X, Y, pos(4), value=2),
    case("div.Tensor", BYTES[0, 0, 0], -1),
    case("div.Scalar", BYTES[0, 0, 0], 300),
    *(case(f"{op}.Tensor", X.to(f64), y, alpha=0.1) for op in ("add", "sub") for y in (X, INT)),
    case("add.Tensor", INT.to(i32), BYTES, alpha=300),
    case("rsub.Tensor", BYTES, INT.to(i32), alpha=300),
    case("addcmul.default", X.to(f64), Y, ROW, value=0.1),
    case("addcmul.default", INT, BYTES, BYTES, value=3),
    case("addcdiv.default", X.to(f64), Y, pos(4), value=0.1),
    case("lerp.Scalar", X, Y, 0.3),
    case("lerp.Tensor", X, Y, ROW),
    *(case("lerp.Scalar", 1e10 * X, Y, weight) for weight in (1.0, -1.0, 0.5)),
    case("lerp.Tensor", 1e10 * X, Y, torch.ones(4)),
    case("nan_to_num.default", ODD),
    case("nan_to_num.default", ODD.half(), 1.0, 2.0, -3.0),
    case("nan_to_num.default", ODD, 1.0, math.nan, math.inf),
    case("nan_to_num.default", ODD, math.inf, -math.inf, 3.0),
    case("where.self", B, X, ROW),
    case("where.self", B, X, INT),
    case("where.ScalarOther", B, X, 0.0),
    case("where.ScalarSelf", B, -math.inf, X),
    case("where.Scalar", B, 1.0, 0.0),
    case("where.Scalar", B, 1, 0),
    case("masked_fill.Scalar", X, flags(4), -math.inf),
    case("masked_fill.Scalar", INT, B, 7),
    case("masked_fill.Tensor", X, B, S),
    case("masked_fill.Tensor", X.half(), B, S),
    case("clamp.default", X, -0.3, 0.4),
    case("clamp.default", X, None, 0.4),
    case("clamp.default", INT, 1, 3),
    case("clamp.default", INT, 0.5),
    case("clip.default", X, 0.0),
    case("clamp.Tensor", X, ROW, pos(4)),
    case("clamp.Tensor", X, None, ROW),
    case("clip.Tensor", X, ROW),
    case("clamp_min.default", X, 0),
    case("clamp_min.Tensor", X, ROW),
    case("clamp_max.default", X, 0.2),
    case("clamp_max.Tensor", X, ROW),
    case("leaky_relu.default", X, 0.2),
    case("gelu.default", X, approximate="tanh"),
    case("hardtanh.default", X, -0.4, 0.6),
    case("elu.default", X, 0.7),
    case("celu.default", X, 0.7),
    case("softplus.default", X, 2.0, 1.0),
    case("softshrink.default", X, 0.3),
    case("hardshrink.default", X, 0.3),
    case("threshold.default", X, 0.1, -2.0),
    case("glu.default", X, -1),
    case("glu.default", IMG, 1),
    case("prelu.default", IMG, t(4)),
    case("prelu.default", X, t(1)),
    case("_prelu_kernel.default", IMG, t(1, 4, 1, 1)),
    case("log_sigmoid_forward.default", X),
    case("sum.default", X),
    case("sum.default", INT),
    case("sum.default", X, dtype=f64),
    case("sum.dim_IntList", X, [1]),
    case("sum.dim_IntList", X, [-1, 0], True),
    case("sum.dim_IntList", X, None),
    case("sum.dim_IntList", X, []),
    case("sum.dim_IntList", B, [1]),
    case("sum.dim_IntList", INT, [0], dtype=torch.float32),
    case("mean.default", X),
    case("mean.dim", X, [1], True),
    case("mean.dim", INT, [1], dtype=f64),
    case("prod.default", X),
    case("prod.dim_int", X, 1),
    case("prod.dim_int", X, -1, True),
    case("amax.default", X, [1]),
    case("amin.default", X, [0, 2], True),
    case("amax.default", X),
    case("max.default", X),
    case("min.default", INT),
    *(
        case(f"{op}.dim", v, d, k, take=(0, 1))
        for op in ("max", "min")
        for v, d, k in ((X, 1, False), (INT, -1, True))
    ),
    case("max.dim", B, 1),
    case("max.dim", S, 0, take=(0, 1)),
    case("aminmax.default", X, dim=1, take=(0, 1)),
    case("aminmax.default", X, take=(0, 1)),
    *(
        case(f"arg{op}.default", X, *how)
        for op in ("max", "min")
        for how in ((), (1,), (-1, True), (None, True))
    ),
    *(case(f"{op}.default", v) for op in ("any", "all") for v in (B, X, INT.to(torch.uint8))),
    *(case(f"{op}.dim", B, 1, True) for op in ("any", "all")),
    *(case(f"{op}.dims", B, [0, 2]) for op in ("any", "all")),
    *(case(f"{op}.default", X, take=(0, 1)) for op in ("var", "std", "var_mean", "std_mean")),
    *(
        case(f"{op}.dim", X, [1], False, True, take=(0, 1))
        for op in ("var", "std", "var_mean", "std_mean")
    ),
    *(
        case(f"{op}.correction", X, [2], correction=c, take=(0, 1))
        for op in ("var", "std", "var_mean", "std_mean")
        for c in (None, 0, 2)
    ),
    case("logsumexp.default", X, [1]),
    case("logsumexp.default", X, [0, 1], True),
    case("logsumexp.default", torch.full((2, 3), -math.inf), [1]),
    *(
        case("linalg_vector_norm.default", X, o, d)
        for o in (2, 1, 0, 3, -0.5, math.inf, -math.inf)
        for d in (None, [1])
    ),
    case("linalg_vector_norm.default", X.half() * 400, 2, [-1], True),
    *(case(f"{n}.default", X, Y, r) for n in ("mse_loss", "l1_loss") for r in (0, 1, 2)),
    *(case(f"{n}.default", X, Y, r, 0.6) for n in ("smooth_l1_loss", "huber_loss") for r in (0, 1)),
    *(
        case("binary_cross_entropy_with_logits.default", X, Y, None, p, r)
        for p, r in ((None, 2), (Y, 1))
    ),
    case("binary_cross_entropy_with_logits.default", X, Y, Y, None, 0),
    *(case(f"{n}.default", v, d) for n in ("cumsum", "cumprod") for v, d in ((X, 1), (INT, -1))),
    case("cumsum.default", X, 0, dtype=f64),
    case("cumsum.default", S, 0),
    *(case(f"{n}.default", X, d, take=(0, 1)) for n in ("cummax", "cummin") for d in (0, -1)),
    case("sort.default", X, take=(0, 1)),
    case("sort.default", X, 0, True, take=(0, 1)),
    case("sort.stable", X, stable=True, dim=1, take=(0, 1)),
    case("argsort.default", X, 1),
    case("argsort.stable", INT, stable=True, dim=1),
    case("topk.default", X, 2, take=(0, 1)),
    case("topk.default", X, 1, 0, False, take=(0, 1)),
    case("histc.default", X, 5, -1, 1),
]

SHAPE = [
    case("view.default", X, [6, -1]),
    case("_unsafe_view.default", X, [2, 12]),
    case("reshape.default", X.permute(2, 0, 1), [4, 6]),
    case("flatten.using_ints", X, 1),
    case("squeeze.default", t(1, 3, 1)),
    case("squeeze.dim", t(1, 3, 1), 0),
    case("squeeze.dim", X, 0),
    case("squeeze.dims", t(1, 3, 1), [0, 2]),
    case("unsqueeze.default", X, -1),
    case("unflatten.int", X, 2, [2, 2]),
    case("view_as.default", X, t(6, 4)),
    case("expand.default", t(2, 1, 4), [5, -1, 3, 4]),
    case("expand_as.default", ROW, X),
    case("broadcast_to.default", ROW, [3, 4]),
    case("permute.default", X, [2, 0, -2]),
    case("transpose.int", X, 1, -1),
    case("t.default", t(3, 4)),
    case("t.default", ROW),
    case("alias.default", X),
    case("detach.default", X),
    case("lift_fresh_copy.default", X),
    case("clone.default", X),
    case("contiguous.default", X.transpose(0, 1)),
    case("clone.default", X.transpose(0, 1), memory_format=torch.contiguous_format),
    case("clone.default", IMG, memory_format=torch.channels_last),
    case("_to_copy.default", X, dtype=f16),
    case("_to_copy.default", INT, dtype=torch.float32),
    case("_to_copy.default", IMG, memory_format=torch.channels_last),
    case("_to_copy.default", X, dtype=i32),
    case("to.dtype", X, f64),
    case("to.dtype_layout", X, dtype=f16),
    case("to.device", X, torch.device("cpu"), f64),
    case("to.other", X, INT),
    case("type_as.default", X, INT),
    case("dropout.default", X, 0.5, False),
    case("dropout.default", X, 0.0, True),
    case("feature_dropout.default", X, 0.5, False),
    case("native_dropout.default", X, 0.5, False),
    case("slice.Tensor", X, 1, 1),
    case("slice.Tensor", X, 2, -3, 9223372036854775807, 2),
    case("slice.Tensor", X, 0, 1, 1),
    case("slice.Tensor", X),
    case("slice.Tensor", X, 1, 5, 2),
    case("narrow.default", X, 1, 1, 2),
    case("select.int", X, 1, -1),
    case("select.int", X, 0, 0),
    case("split.Tensor", SEQ, 4, 2, take=(0, 1, 2)),
    case("split.Tensor", SEQ, 4, 2, take=(2,)),
    case("split_with_sizes.default", SEQ, [2, 3, 4], -1, take=(0, 2)),
    case("unsafe_split.Tensor", SEQ, 4, 2, take=(0, 2)),
    case("unsafe_split_with_sizes.default", SEQ, [2, 3, 4], -1, take=(0, 2)),
    case("chunk.default", SEQ, 2, 2, take=(0, 1)),
    case("unbind.int", X, 1, take=(0, 2)),
    case("unbind.int", X, -1, take=(3,)),
    case("cat.default", [X, Y, t(2, 1, 4)], 1),
    case("cat.default", [X, INT], -1),
    case("cat.default", [torch.empty(0), X, Y]),
    case("cat.default", [t(2, 0, 4), X], 1),
    case("stack.default", [X, Y], 1),
    case("stack.default", [S, S]),
    case("stack.default", [X], -1),
    case("repeat.default", X, [2, 1, 3]),
    case("repeat.default", ROW, [2, 3, 1]),
    case("repeat.default", ROW, [3]),
    case("repeat.default", X, [1, 0, 1]),
    case("repeat_interleave.self_int", X, 2, 1),
    case("repeat_interleave.self_int", X, 3),
    case("meshgrid.default", [t(3), t(4)], take=(0, 1)),
    case("meshgrid.indexing", [t(3), t(4)], indexing="ij", take=(0, 1)),
    case("broadcast_tensors.default", [X, ROW], take=(0, 1)),
    case("channel_shuffle.default", IMG, 2),
    case("flip.default", X, [0, -1]),
    case("roll.default", X, [1], [1]),
    case("roll.default", X, [-5, 0, 2], [0, 1, -1]),
    case("roll.default", X, [5]),
    case("as_strided.default", X, [6, 4, 1], [4, 1, 7]),
    case("as_strided_scatter.default", X, t(4, 6), [4, 6], [6, 1]),
    case("slice_scatter.default", X, t(2, 2, 4), 1, 0, 2),
    case("slice_scatter.default", X, Y, 0, 0, 9223372036854775807),
    case("slice_scatter.default", X, t(2, 3, 2), 2, 1, 9223372036854775807, 2),
    case("select_scatter.default", X, t(2, 4), 1, -1),
    case("copy.default", X, ROW),
    case("copy.default", X, INT),
    case("fill.Tensor", X, S),
    case("pad.default", IMG, [1, 2]),
    case("pad.default", IMG, [1, 0, 0, 2], "constant", 3.0),
    case("pad.default", IMG, [-1, 1]),
    case("pad.default", IMG, [0, 0]),
    case("pad.default", IMG, [1, 2, 2, 0], "reflect"),
    case("pad.default", SEQ, [1, 2], "reflect"),
    case("pad.default", IMG, [1, 2, 2, 0], "replicate"),
    case("constant_pad_nd.default", X, [1, 1, 0, 2], -math.inf),
    *(
        case(f"{mode}_pad{n}d.default", v, [1, 2, 0, 1, 1, 1][: 2 * n])
        for mode in ("reflection", "replication")
        for n, v in ((1, SEQ), (2, IMG), (3, VOL))
    ),
    case("index.Tensor", X, [None, whole(5, high=3)]),
    case("index.Tensor", X, [whole(2, 2, high=2)]),
    case("index.Tensor", X, [None, None, torch.tensor([-1, 0, 2])]),
    case("index.Tensor", X, [whole(3, high=2), whole(3, high=3)]),
    case("index.Tensor", X, [whole(3, 1, high=2), None, whole(4, high=4)]),
    case("index_select.default", X, -1, whole(5, high=4)),
    case("gather.default", X, 1, whole(2, 2, 4, high=3)),
    case("scatter_add.default", X, 1, whole(2, 5, 4, high=3), t(2, 5, 4)),
    case("index_add.default", X, -1, whole(5, high=4), t(2, 3, 5)),
    *(
        case(f"{name}.default", X, [whole(5, high=2)], t(5, 3, 4), True)
        for name in ("index_put", "_unsafe_index_put")
    ),
    case("embedding.default", t(5, 6), whole(3, 4)),
    case("embedding.default", t(5, 6), whole(3, 4), -1, True),
    case("embedding.default", t(5, 6), whole(3, 4), 2),
    case("one_hot.default", INT, 5),
    case("tril.default", X),
    case("triu.default", X, 1),
    case("tril.default", INT, -1),
]

W2, W1, W3 = t(6, 2, 3, 3), t(6, 4, 3), t(4, 2, 2, 3, 1)
_BN = (t(4), t(4), t(4), pos(4))
_MASK, _BIAS = flags(2, 1, 5, 5) | torch.eye(5, dtype=torch.bool), t(5, 5)


def _recurrent(cell: str, gates: int) -> Case:
    weights = [t(4 * gates, 4), t(4 * gates, 4), t(4 * gates), t(4 * gates)]
    start = t(1, 2, 4)
    state = [start, t(1, 2, 4)] if cell == "lstm" else start
    take = (0, 1, 2)[: 3 if cell == "lstm" else 2]
    return case(f"{cell}.input", X, state, weights, True, 1, 0.0, False, False, True, take=take)


NN = [
    *map(_recurrent, ("lstm", "gru", "rnn_tanh", "rnn_relu"), (4, 3, 1, 1)),
    case("lstm_cell.default", t(2, 5), [t(2, 4), t(2, 4)], t(16, 5), t(16, 4), t(16), t(16)),
    case("lstm_cell.default", t(2, 5), [t(2, 4), t(2, 4)], t(16, 5), t(16, 4), take=(0, 1)),
    case("gru_cell.default", t(2, 5), t(2, 4), t(12, 5), t(12, 4), t(12), t(12)),
    case("mm.default", t(3, 4), t(4, 5)),
    case("mm.default", whole(3, 40).to(torch.int8), whole(40, 5).to(torch.int8)),
    case("linear.default", *(whole(*s).to(torch.int8) for s in ((3, 40), (5, 40), (5,)))),
    case("_int_mm.default", whole(32, 40).to(torch.int8), whole(40, 8).to(torch.int8)),
    case("_scaled_mm.default", F8[0], F8[1].T, pos(1), pos(1), out_dtype=torch.bfloat16),
    case(
        "_scaled_mm.default", F8[0], F8[1].T, pos(32, 1), pos(1, 16), t(16).bfloat16(), None, BF16
    ),
    case("bmm.default", t(2, 3, 4), t(2, 4, 5)),
    case("matmul.default", IMG, t(6, 3)),
    case("matmul.default", t(3, 4), t(4)),
    case("matmul.default", t(4), t(2, 4, 3)),
    case("mv.default", t(3, 4), t(4)),
    case("dot.default", t(4), t(4)),
    case("vdot.default", t(4), t(4)),
    case("outer.default", t(3), t(4)),
    *(
        case("addmm.default", e, t(3, 4), t(4, 5), **how)
        for e in (t(5), t(3, 5))
        for how in ({}, {"beta": 0.5, "alpha": 2}, {"beta": 0})
    ),
    case("addmv.default", t(3), t(3, 4), t(4)),
    case("baddbmm.default", t(2, 3, 5), t(2, 3, 4), t(2, 4, 5), beta=2),
    case("linear.default", X, t(5, 4), t(5)),
    case("linear.default", X, t(5, 4)),
    case("conv1d.default", SEQ, W1, t(6), [2], [1]),
    case("conv3d.default", VOL, W3),
    case("conv2d.default", IMG, W2, t(6), [2, 1], [1, 0], [1, 2], 2),
    case("conv2d.default", IMG[0], W2, None, [1], [1], [1], 2),
    case("conv2d.default", NHWC, W2, t(6), [1, 1], [1, 1], [1, 1], 2),
    case("conv1d.padding", SEQ, W1, t(6), [1], "same"),
    case("conv2d.padding", IMG, W2, None, [1, 1], "valid", [1, 1], 2),
    case("conv2d.padding", IMG, t(3, 4, 2, 4), None, [1, 1], "same"),
    case("conv2d.padding", IMG, t(3, 4, 2, 3), None, [1, 1], "same", [3, 2]),
    case("conv3d.padding", VOL, W3, None, [1, 1, 1], "same"),
    case("convolution.default", IMG, W2, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    case("convolution.default", IMG, t(4, 3, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [1, 0], 1),
    case("conv_transpose1d.default", SEQ, t(4, 3, 3), t(3), [2], [1], [1]),
    case("conv_transpose2d.input", IMG, t(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 0], 2, [1, 1]),
    case("conv_transpose3d.input", VOL, t(2, 3, 2, 2, 2)),
    case("batch_norm.default", IMG, *_BN, False, 0.1, 1e-3, True),
    case("batch_norm.default", IMG, t(4), None, None, None, True, 0.1, 1e-3, True),
    case("native_batch_norm.default", IMG, *_BN, False, 0.1, 1e-3),
    case("_native_batch_norm_legit_no_training.default", IMG, None, None, *_BN[2:], 0.1, 1e-3),
    case("_native_batch_norm_legit.no_stats", IMG, *_BN[:2], True, 0.1, 1e-3),
    case("layer_norm.default", X, [4], t(4), t(4)),
    case("layer_norm.default", X, [3, 4]),
    case("native_layer_norm.default", X, [3, 4], t(3, 4), None, 1e-3),
    case("rms_norm.default", X, [4], t(4), 1e-3),
    case("rms_norm.default", X * 1e-4, [3, 4]),
    case("rms_norm.default", (X * 1e-2).half(), [4]),
    case("_fused_rms_norm.default", X, [4], ROW, None),
    case("rms_norm.default", (X * 1e-2).bfloat16(), [4]),
    case("group_norm.default", IMG, 2, t(4), t(4)),
    case("group_norm.default", NHWC, 4),
    case("native_group_norm.default", IMG, t(4), t(4), 2, 4, 36, 2, 1e-3),
    case("instance_norm.default", IMG, t(4), t(4), None, None, True, 0.1, 1e-3, True),
    case("instance_norm.default", IMG, None, None, t(4), pos(4), False, 0.1, 1e-3, True),
    *(
        case(f"{n}.int", X, d, dt)
        for n in ("softmax", "log_softmax")
        for d, dt in ((1, None), (-1, f64))
    ),
    *(case(f"_{n}.default", X, -1, False) for n in ("softmax", "log_softmax")),
    case("_safe_softmax.default", X, -1),
    case("_safe_softmax.default", X.masked_fill(flags(2, 3, 1), -math.inf), 2),
    case("_safe_softmax.default", torch.stack([ODD[[0, 1]], ODD[[0, 2]], ODD[[0, 3]]]), 1),
    case("cross_entropy_loss.default", t(5, 7), whole(5)),
    case("cross_entropy_loss.default", t(5, 7, 2), whole(5, 2), pos(7), 2, 3, 0.1),
    case("cross_entropy_loss.default", t(5, 7), pos(5, 7)),
    *(case(f"{n}.default", t(5, 7), whole(5), pos(7), 1, 2) for n in ("nll_loss", "nll_loss_nd")),
    case("nll_loss_forward.default", t(5, 7), whole(5), None, 0, -100),
    case("nll_loss_nd.default", t(5, 7, 2), whole(5, 2), None, 1, 3),
    case("nll_loss2d.default", t(2, 7, 3, 3), whole(2, 3, 3)),
    case("nll_loss2d_forward.default", t(2, 7, 3, 3), whole(2, 3, 3), None, 2, -100),
]

_SDPA = "scaled_dot_product_attention.default"
ATTENTION = [
    *(case(_SDPA, Q, t(2, 4, 6, 8), t(2, 4, 6, 3), **how) for how in ({}, {"scale": 0.3})),
    case(_SDPA, Q, Q, Q, is_causal=True),
    case(_SDPA, Q, Q, Q, _MASK),
    case(_SDPA, Q, Q, Q, _BIAS),
    case(_SDPA, Q, K3, K3, enable_gqa=True),
    case(_SDPA, Q, K3, K3, _BIAS, enable_gqa=True),
    case(_SDPA, Q, t(2, 1, 5, 8), t(2, 1, 5, 8)),
    case(_SDPA, Q, t(1, 4, 5, 8), t(1, 4, 5, 8)),
    case(_SDPA, Q[0], Q[0], Q[0]),
    case(_SDPA, Q[0], Q[0], Q[0], t(4, 5, 5)),
    case(_SDPA, Q[0], Q[0], Q[0], _BIAS),
    case(_SDPA, Q[0, 0], Q[0, 0], Q[0, 0], _BIAS),
    case(_SDPA, t(2, 3, 4, 5, 8), t(2, 3, 4, 5, 8), t(2, 3, 4, 5, 8), is_causal=True),
    case(_SDPA, t(2, 3, 4, 5, 8), t(2, 3, 4, 5, 8), t(2, 3, 4, 5, 8), _BIAS),
    case("_scaled_dot_product_flash_attention_for_cpu.default", Q, Q, Q, 0.0, True),
    case("_scaled_dot_product_flash_attention_for_cpu.default", Q, Q, Q, attn_mask=_BIAS),
]

# These run on CUDA alone; here only the graph they become is looked at.
RMS_BACK = case(
    "_fused_rms_norm_backward.default",
    t(2, 3, 4),
    X,
    [4],
    pos(2, 3, 1),
    t(4),
    [True, True],
    take=(0, 1),
)
CUDA_ONLY = [
    case("_scaled_dot_product_flash_attention.default", Q, Q, Q, 0.0, True),
    case("_scaled_dot_product_efficient_attention.default", Q, Q, Q, None, False),
    case("_scaled_dot_product_cudnn_attention.default", Q, Q, Q, None, False),
]

_UP = (
    ("upsample_nearest{}d", (1, 2, 3), False),
    ("_upsample_nearest_exact{}d", (1, 2, 3), False),
    ("upsample_linear{}d", (1,), True),
    ("upsample_bilinear{}d", (2,), True),
    ("upsample_trilinear{}d", (3,), True),
    ("upsample_bicubic{}d", (2,), True),
    ("_upsample_bilinear{}d_aa", (2,), True),
    ("_upsample_bicubic{}d_aa", (2,), True),
)
_BY_DIMS = {1: SEQ, 2: IMG, 3: VOL}
GRID = t(2, 3, 5, 2)

IMAGE = [
    *(case(f"max_pool{n}d.default", v, [2] * n) for n, v in _BY_DIMS.items()),
    case("max_pool2d.default", IMG, [3, 2], [2, 1], [1, 1], [1, 2], True),
    case("max_pool2d.default", IMG[0], [2, 2]),
    *(case("max_pool2d_with_indices.default", IMG, [2, 2], [1, 1], take=k) for k in ((0,), (0, 1))),
    case("max_pool3d_with_indices.default", VOL, [2, 2, 2], take=(0, 1)),
    *(case(f"avg_pool{n}d.default", v, [2] * n) for n, v in _BY_DIMS.items()),
    case("avg_pool2d.default", IMG, [3, 3], [2, 2], [1, 1], True, False),
    case("avg_pool2d.default", IMG, [3, 3], [2, 2], [1, 1], False, True, 5),
    *(case(f"adaptive_avg_pool{n}d.default", v, [2] * n) for n, v in _BY_DIMS.items()),
    case("adaptive_avg_pool2d.default", NHWC, [1, 1]),
    case("adaptive_avg_pool2d.default", IMG[0], [4, 1]),
    case("_adaptive_avg_pool2d.default", IMG, [4, 3]),
    case("_adaptive_avg_pool3d.default", VOL, [2, 1, 2]),
    *(
        case(f"adaptive_max_pool{n}d.default", v, [2] * n, take=k)
        for n, v in _BY_DIMS.items()
        for k in ((0,), (0, 1))
    ),
    *(
        case(f"{name.format(n)}.default", _BY_DIMS[n], [7] * n, *[c] * corners)
        for name, dims, corners in _UP
        for n in dims
        for c in ((True, False) if corners else (None,))
    ),
    *(
        case(f"{name.format(n)}.vec", _BY_DIMS[n], None, *[False] * corners, [1.7] * n)
        for name, dims, corners in _UP
        for n in dims
    ),
    *(
        case(
            f"{name.format(n)}_backward.default",
            t(2, 3, *[7] * n),
            [7] * n,
            [2, 3, *[5] * n],
            *[c] * corners,
        )
        for name, dims, corners in _UP
        for n in dims
        for c in ((True, False) if corners else (None,))
    ),
    case(
        "upsample_bilinear2d_backward.default", t(2, 3, 9, 9), [9, 9], [2, 3, 6, 6], False, 1.5, 1.5
    ),
    case("upsample_bilinear2d.default", IMG, [9, 9], False, 1.5, 1.5),
    case("upsample_nearest2d.vec", IMG, [3, 8], None),
    case("pixel_shuffle.default", IMG, 2),
    case("pixel_unshuffle.default", IMG, 2),
    *(
        case("grid_sampler.default", IMG, GRID, m, p, c)
        for m in (0, 1, 2)
        for p in (0, 1, 2)
        for c in (False, True)
    ),
    case("grid_sampler_2d.default", IMG, GRID, 0, 0, False),
    case("grid_sampler_3d.default", VOL, t(1, 2, 3, 4, 3), 0, 1, True),
]

FILLED = [
    case("full.default", [2, 3], 0.5),
    case("full.default", [2], 3),
    case("scalar_tensor.default", 2.0),
    case("zeros.default", [2, 3]),
    case("ones.default", [2], dtype=i32),
    case("full_like.default", X, 2),
    case("zeros_like.default", X),
    case("ones_like.default", INT),
    case("new_full.default", X, [2], 3),
    case("new_zeros.default", X, [2]),
    case("_efficientzerotensor.default", [2, 3]),
    case("new_ones.default", X, [2, 2]),
    case("fill.Scalar", X, 0.25),
]

# Memory that nobody has written to yet: any content will do.
UNWRITTEN = [
    case("empty.memory_format", [2, 3]),
    case("empty_like.default", X),
    case("new_empty.default", X, [2]),
]

_G, _P = t(2, 3, 4), t(2, 4, 3, 3)
_STATS = (t(2, 3, 1), pos(2, 3, 1))
_C4 = (t(4), t(4))
GRAD = [
    case("gelu_backward.default", _G, X),
    case("gelu_backward.default", _G, X, approximate="tanh"),
    *(
        case(f"{n}_backward.default", _G, X)
        for n in ("silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh")
    ),
    case("hardtanh_backward.default", _G, X, -0.5, 0.4),
    case("softplus_backward.default", _G, X, 2.0, 1.0),
    case("softshrink_backward.default", _G, X, 0.3),
    case("hardshrink_backward.default", _G, X, 0.3),
    case("glu_backward.default", t(2, 3, 2), X, 2),
    case("log_sigmoid_backward.default", _G, X, torch.exp(-X.abs())),
    case("threshold_backward.default", _G, X, 0),
    case("threshold_backward.default", ODD, ODD, 0.5),
    case("leaky_relu_backward.default", _G, X, 0.1, False),
    case("leaky_relu_backward.default", _G, X, 0.1, True),
    case("_prelu_kernel_backward.default", 2 * IMG, IMG, t(1, 4, 1, 1)),
    case("elu_backward.default", _G, 0.5, 1, 1, False, X),
    case("_softmax_backward_data.default", _G, X.softmax(1), 1, torch.float32),
    case("_log_softmax_backward_data.default", _G, X.log_softmax(-1), -1, torch.float32),
    case("native_dropout_backward.default", _G, B, 2.0),
    case(
        "convolution_backward.default",
        t(2, 8, 6, 6),
        IMG,
        t(8, 2, 3, 3),
        [8],
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        2,
        [True, True, True],
        take=(0, 1, 2),
    ),
    case(
        "convolution_backward.default",
        t(2, 3, 11, 11),
        IMG,
        t(4, 3, 3, 3),
        None,
        [2, 2],
        [1, 1],
        [1, 1],
        True,
        [0, 0],
        1,
        [True, True, False],
        take=(0, 1),
    ),
    case(
        "max_pool2d_with_indices_backward.default",
        _P,
        IMG,
        [2, 2],
        [],
        [0, 0],
        [1, 1],
        False,
        torch.nn.functional.max_pool2d(IMG, 2, return_indices=True)[1],
    ),
    case(
        "max_pool3d_with_indices_backward.default",
        t(1, 2, 2, 3, 2),
        VOL,
        [2, 2, 2],
        [],
        [0, 0, 0],
        [1, 1, 1],
        False,
        torch.nn.functional.max_pool3d(VOL, 2, return_indices=True)[1],
    ),
    case("avg_pool2d_backward.default", _P, IMG, [2, 2], [2, 2], [0, 0], False, True, None),
    case(
        "avg_pool3d_backward.default",
        t(1, 2, 2, 3, 2),
        VOL,
        [2, 2, 2],
        [],
        [0, 0, 0],
        False,
        False,
        None,
    ),
    case("_adaptive_avg_pool2d_backward.default", t(2, 4, 3, 2), IMG),
    case("_adaptive_avg_pool3d_backward.default", t(1, 2, 2, 3, 2), VOL),
    case("slice_backward.default", t(2, 3), [2, 8], 1, 4, 7, 1),
    case("slice_backward.default", t(3, 8), [5, 8], -2, -3, 2**63 - 1, 1),
    case("select_backward.default", t(2, 3), [2, 4, 3], 1, -1),
    *(case("mse_loss_backward.default", t(), t(2, 3), t(2, 3), r) for r in (1, 2)),
    case("mse_loss_backward.default", t(2, 3), t(2, 3), t(2, 3), 0),
    *(
        case(f"{n}_backward.default", t(), t(2, 3), t(2, 3), 1, 0.6)
        for n in ("smooth_l1_loss", "huber_loss")
    ),
    case("embedding_dense_backward.default", t(2, 3, 4), whole(2, 3), 5, -1, False),
    case("embedding_dense_backward.default", t(6, 4), whole(6), 5, 2, False),
    case("embedding_dense_backward.default", t(6, 4), whole(6), 5, 2, True),
    case("nll_loss_backward.default", t(), t(6, 5), whole(6), None, 1, -100, torch.tensor(6.0)),
    case("nll_loss_backward.default", t(6), t(6, 5), whole(6), pos(5), 0, 2, torch.tensor(0.0)),
    case(
        "nll_loss2d_backward.default",
        t(2, 3, 3),
        t(2, 5, 3, 3),
        whole(2, 3, 3),
        None,
        0,
        -100,
        torch.tensor(0.0),
    ),
    case(
        "native_layer_norm_backward.default",
        _G,
        X,
        [4],
        *_STATS,
        t(4),
        t(4),
        [True] * 3,
        take=(0, 1, 2),
    ),
    case(
        "native_layer_norm_backward.default", _G, X, [4], *_STATS, None, None, [True, False, False]
    ),
    case(
        "native_group_norm_backward.default",
        t(2, 4, 6, 6),
        IMG,
        t(2, 2),
        pos(2, 2),
        t(4),
        2,
        4,
        36,
        2,
        [True] * 3,
        take=(0, 1, 2),
    ),
    case(
        "native_batch_norm_backward.default",
        t(2, 4, 6, 6),
        IMG,
        t(4),
        None,
        None,
        t(4),
        pos(4),
        True,
        1e-5,
        [True] * 3,
        take=(0, 1, 2),
    ),
    case(
        "_native_batch_norm_legit_functional.default",
        IMG,
        *_C4,
        t(4),
        pos(4),
        True,
        0.1,
        1e-5,
        take=(0, 1, 2, 3, 4),
    ),
    case("_native_batch_norm_legit_functional.default", IMG, *_C4, t(4), pos(4), False, 0.1, 1e-5),
    case("native_layer_norm.default", X, [4], t(4), t(4), 1e-5, take=(0, 1, 2)),
    case("native_group_norm.default", IMG, *_C4, 2, 4, 36, 2, 1e-5, take=(0, 1, 2)),
    case("_fused_rms_norm.default", X, [4], t(4), None, take=(0, 1)),
]

CASES = [*MATH, *SHAPE, *NN, *ATTENTION, *IMAGE, *GRAD]

KEPT = [
    case("add.Tensor", BYTES[0, 0, 0], 300),  # which wraps around
    case("div.Tensor_mode", INT, INT + 1, rounding_mode="trunc"),
    case("bitwise_and.Tensor", INT, INT),
    case("var.correction", X, [1], correction=0.5),
    case("elu.default", X, 1.0, 2.0, 1.0),
    case("max_pool2d.default", IMG.to(torch.int64), [2, 2]),
    case("pad.default", IMG, [1, 1, 1, 1], "circular"),
    case("index.Tensor", t(9, 9, 9), [whole(1, high=2), None, whole(1, high=3)]),
    case("index_add.default", t(), 0, whole(1, high=1), t()),
    case("slice_scatter.default", X, t(2, 2, 4), 1, 0, 3, 2),
    case("meshgrid.indexing", [t(3), t(4)], indexing="xy"),
    case("instance_norm.default", IMG, None, None, t(4), pos(4), True, 0.1, 1e-3, True),
    case("upsample_bilinear2d.default", IMG, [9, 9], False, 1.5, None),
    case("histc.default", X, 5),
    case("renorm.default", X, 2, 1, 1.0),
    case("einsum.default", "bij,bkj->bik", [X, Y]),
    case("erfc.default", X),
    case("as_strided.default", X, [2, 2], [1, 2]),
    case("as_strided_scatter.default", X, t(2, 2), [2, 2], [1, 2]),
    case("diagonal.default", t(3, 4)),
]
