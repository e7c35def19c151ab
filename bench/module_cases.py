"""Small modules of every kind that people write: what is called, and what should come of it.

A case runs and gives what eager torch gives, or is refused in words that fit. The first 200 or so
lines of any tracer's list of issues are here: odd signatures, containers, element types, writing in
place, random numbers, control flow, state. ``bench/what_runs.py`` runs them and writes the table.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

RANDOM = "random"  # runs, and gives other numbers each time


@dataclass(frozen=True)
class Case:
    """``make`` gives the module, ``call`` the arguments of a call, new ones each time. ``says`` is
    a piece of the expected reason, "" where the module should run, RANDOM where it draws."""

    make: Callable[[], nn.Module]
    call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    says: str = ""


CASES: dict[str, dict[str, Case]] = {}


def group(title: str, **cases: Case) -> None:
    CASES[title] = {name.replace("_", " ").strip(): case for name, case in cases.items()}


def r(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def ids(end: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, end, shape, dtype=dtype)


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with this forward; tensors among the parts are buffers."""
    made = type("Case", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


def of(forward: Callable[..., Any], *args: Any, says: str = "", **parts: Any) -> Case:
    """A module of ``forward``, called with tensors of these shapes; what is no tuple is the value
    itself, and a function is called for it."""
    return net(lambda: module(forward, **_own(parts)), *args, says=says)


def net(make: Callable[[], nn.Module], *args: Any, says: str = "", train: bool = False) -> Case:
    """A module in eval mode, or in training mode."""
    return Case(lambda: make().train(train), lambda: (tuple(map(_value, args)), {}), says)


trained = functools.partial(net, train=True)


def _own(parts: dict[str, Any]) -> dict[str, Any]:
    """Parts are given as functions, so that every module has its own."""
    return {name: part() if callable(part) else part for name, part in parts.items()}


def _value(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return r(*arg)
    return arg() if callable(arg) else arg


def keyword(forward: Callable[..., Any], says: str = "", **kwargs: Any) -> Case:
    """A module called by keywords only."""
    call = lambda: ((), {name: _value(arg) for name, arg in kwargs.items()})  # noqa: E731
    return Case(lambda: module(forward).eval(), call, says)


Point = namedtuple("Point", "x y")


@dataclass
class Unregistered:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Registered:
    x: torch.Tensor
    y: torch.Tensor


pytree.register_dataclass(Registered)


class Custom:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def typed(dtype: torch.dtype, *shape: int) -> Callable[[], torch.Tensor]:
    if dtype.is_floating_point or dtype.is_complex:
        return lambda: torch.randn(*shape, dtype=dtype)
    if dtype is torch.bool:
        return lambda: torch.rand(*shape) > 0.5
    return lambda: torch.randint(0, 100, shape).to(dtype)


S = (3, 4)

# ---- how a module is called ----------------------------------------------------------------------

group(
    "signatures",
    two_arguments=of(lambda self, x, y: x + y, S, S),
    keyword_only=keyword(lambda self, x, *, scale: x * scale, x=S, scale=2.0),
    positional_and_by_keyword=Case(
        lambda: module(lambda self, x, *, scale: x * scale).eval(),
        lambda: ((r(*S),), {"scale": r(4)}),
    ),
    all_by_keyword=keyword(lambda self, x, y: x - y, x=S, y=S),
    keywords_in_another_order=keyword(lambda self, x, y: x - y, y=S, x=S),
    a_default=of(lambda self, x, scale=3.0: x * scale, S),
    a_default_given=of(lambda self, x, scale=3.0: x * scale, S, 0.5),
    positional_only=of(lambda self, x, /, y: x * y, S, S),
    more_arguments=of(lambda self, *xs: sum(xs), S, S, S),
    more_arguments_but_none=of(lambda self, x, *xs: x + len(xs), S),
    more_keywords=keyword(lambda self, **named: named["b"] - named["a"], a=S, b=S),
    an_argument_called_self_and_input=keyword(lambda self, input: input * 2, input=S),
    none_as_input=of(lambda self, x, mask: x if mask is None else x * mask, S, None),
    none_as_default=of(lambda self, x, mask=None: x if mask is None else x * mask, S, S),
    a_flag=of(lambda self, x, negate: -x if negate else x, S, True),
    a_whole_number=of(lambda self, x, times: x * times, S, 3),
    a_number=of(lambda self, x, factor: x * factor, S, 2.5),
    a_word=of(lambda self, x, mode: getattr(torch, mode)(x), S, "relu"),
    an_element_type=of(lambda self, x, dtype: x.to(dtype), S, lambda: torch.float64),
    a_function=of(lambda self, x, f: f(x), S, lambda: torch.relu),
    a_device=of(lambda self, x, device: x.to(device), S, lambda: torch.device("cpu")),
    a_list_of_numbers=of(lambda self, x, size: x.reshape(size), S, [4, 3]),
    a_slice=of(lambda self, x, at: x[at], S, lambda: slice(1, 3)),
    no_arguments=of(lambda self: self.w * 2, w=lambda: r(*S)),
    forward_is_a_partial=net(
        lambda: _with(nn.Linear(4, 4), "forward", lambda m: functools.partial(_scaled, m)), S
    ),
    forward_set_on_the_object=net(
        lambda: _with(nn.Linear(4, 4), "forward", lambda m: lambda x: x * 2), S
    ),
    a_decorated_forward=of(functools.wraps(torch.relu)(lambda self, *a, **k: a[0] * 2), S),
    too_many_arguments=of(lambda self, x: x, S, S, says="too many positional arguments"),
    too_few_arguments=of(lambda self, x, y: x, S, says="'y'"),
    a_wrong_keyword=keyword(lambda self, x: x, x=S, mask=S, says="'mask'"),
)


def _with(target: nn.Module, name: str, value: Callable[[nn.Module], Any]) -> nn.Module:
    setattr(target, name, value(target))
    return target


def _scaled(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight) * 2


group(
    "containers",
    a_dict_in=of(lambda self, d: d["a"] - d["b"], lambda: {"b": r(*S), "a": r(*S)}),
    a_list_in=of(lambda self, xs: xs[0] - xs[1], lambda: [r(*S), r(*S)]),
    nested_in=of(lambda self, d: d["a"][1] - d["b"], lambda: {"a": (1, r(*S)), "b": r(*S)}),
    a_named_tuple_in=of(lambda self, p: p.x - p.y, lambda: Point(r(*S), r(*S))),
    an_ordered_dict_in=of(lambda self, d: d["a"] - d["b"], lambda: OrderedDict(a=r(*S), b=r(*S))),
    a_registered_dataclass_in=of(lambda self, d: d.x - d.y, lambda: Registered(r(*S), r(*S))),
    an_unregistered_dataclass_in=of(lambda self, d: d.x - d.y, lambda: Unregistered(r(*S), r(*S))),
    an_object_in=of(lambda self, c: c.x * 2, lambda: Custom(r(*S))),
    a_dict_out=of(lambda self, x: {"double": x * 2, "half": x / 2}, S),
    a_list_out=of(lambda self, x: [x + 1, x - 1], S),
    a_tuple_of_one_out=of(lambda self, x: (x + 1,), S),
    an_empty_tuple_out=of(lambda self, x: (), S),
    nested_out=of(lambda self, x: {"a": [x, (x * 2, None)], "b": 3}, S),
    a_named_tuple_out=of(lambda self, x: Point(x + 1, x - 1), S),
    an_ordered_dict_out=of(lambda self, x: OrderedDict(a=x + 1, b=x - 1), S),
    a_registered_dataclass_out=of(lambda self, x: Registered(x + 1, x - 1), S),
    an_unregistered_dataclass_out=of(lambda self, x: Unregistered(x, x + 1), S),
    an_object_out=of(lambda self, x: Custom(x), S),
    a_set_out=of(lambda self, x: {1, 2}, S, says="class set"),
    an_array_out=of(lambda self, x: numpy.ones(3), S, says="class ndarray"),
    a_generator_out=of(lambda self, x: (x + i for i in range(2)), S, says="class generator"),
    none_out=of(lambda self, x: None, S),
    none_beside_a_tensor_out=of(lambda self, x: (x + 1, None), S),
    numbers_and_words_out=of(lambda self, x: (x * 2, 3, 2.5, True, "name"), S),
    a_shape_out=of(lambda self, x: (x * 2, x.shape[0], x.numel()), S),
    a_size_out=of(lambda self, x: (x * 2, x.shape), S),
    an_element_type_out=of(lambda self, x: (x * 2, x.dtype), S),
    the_same_tensor_twice_out=of(lambda self, x: [x * 2] * 2, S),
    constants_out=of(lambda self, x: torch.ones(3), S),
    the_input_itself_out=of(lambda self, x: x, S),
    a_view_of_the_input_out=of(lambda self, x: (x.t(), x[1:], x.reshape(-1)), S),
    a_weight_out=of(lambda self, x: (self.w, x + self.w), S, w=lambda: nn.Parameter(r(*S))),
    many_results=of(lambda self, x: x.unbind(0), (12, 4)),
)

# ---- element types, ranks and memory -------------------------------------------------------------

FLOATS = (torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
WIDE = (torch.uint16, torch.uint32, torch.uint64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


group(
    "element types",
    **{
        f"linear_in_{_name(d)}": net(
            lambda d=d: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to(d),
            typed(d, 4, 8),
        )
        for d in FLOATS
    },
    **{
        f"arithmetic_in_{_name(d)}": of(
            lambda self, x: (x + x, x * 3, x // 7, x % 5, x.sum(), x.float() / 2, x > 4, -x),
            typed(d, 3, 4),
        )
        for d in WHOLE
    },
    **{f"{_name(d)}_to_float": of(lambda self, x: x.float() * 2, typed(d, 3, 4)) for d in WIDE},
    division_of_whole_numbers=of(
        lambda self, x: (x / 2, x // 2, torch.div(x, 3, rounding_mode="trunc")),
        typed(torch.int64, 6),
    ),
    overflow_of_int8=of(lambda self, x: (x * 3, x + 100, x.sum(), x << 1), typed(torch.int8, 8)),
    bits=of(lambda self, x: (x & 7, x | 8, x ^ 3, ~x, x >> 1), typed(torch.int32, 8)),
    booleans=of(
        lambda self, x: (x & ~x, x.sum(), x.any(), x * 2, x.float().mean()), typed(torch.bool, 9)
    ),
    mixed_types=of(
        lambda self, x, n, b: (x + n, n * 2.5, x * b, n + b, x.double() + x),
        S,
        typed(torch.int32, 4),
        typed(torch.bool, 4),
    ),
    half_and_single=of(lambda self, x: x.half() * x + x.bfloat16(), S),
    a_scalar_tensor=of(lambda self, x: (x * 2, x.exp(), x + torch.ones(3)), lambda: r()),
    a_scalar_beside_a_half=of(
        lambda self, x, s: x * s, lambda: r(3, dtype=torch.float16), lambda: r()
    ),
    an_empty_tensor=of(lambda self, x: (x * 2, x.sum(0), torch.cat([x, x])), (0, 4)),
    an_empty_batch=net(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (0, 4)),
    rank_seven=of(lambda self, x: (x * 2).sum((1, 3)), (2, 1, 2, 3, 1, 2, 2)),
    complex_arithmetic=of(
        lambda self, x: (x * x.conj() + 2j, x.abs()), typed(torch.complex64, 3, 4)
    ),
    complex_weights=of(
        lambda self, x: (x @ self.w).abs(),
        typed(torch.complex64, 3, 4),
        w=lambda: nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)),
    ),
    complex_in_double=of(lambda self, x: torch.view_as_real(x * 1j), typed(torch.complex128, 3)),
    complex_from_parts=of(lambda self, x, y: torch.complex(x, y).angle(), S, S),
    complex_out=of(lambda self, x: torch.fft.fft(x), S),
    complex_imaginary_part=of(lambda self, x: (x.imag * 2, x.real + 1), typed(torch.complex64, 5)),
    polar_and_back=of(lambda self, x, y: torch.view_as_real(torch.polar(x.abs(), y)), S, S),
    rotary_by_complex_numbers=of(
        lambda self, x: torch.view_as_real(
            torch.view_as_complex(x.view(3, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
        ).flatten(1),
        (3, 8),
    ),
    a_transposed_input=of(lambda self, x: F.relu(x) + 1, lambda: r(4, 3).t()),
    an_expanded_input=of(lambda self, x: x * 2, lambda: r(1, 4).expand(3, 4)),
    a_channels_last_input=net(
        lambda: nn.Conv2d(3, 4, 3), lambda: r(1, 3, 8, 8).to(memory_format=torch.channels_last)
    ),
    double_as_default=net(lambda: _in_double(), typed(torch.float64, 3, 4)),
    eight_bit_floats=of(lambda self, x: x.to(torch.float8_e4m3fn).float(), S),
)


def _in_double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    finally:
        torch.set_default_dtype(torch.float32)


group(
    "devices and kinds of tensors",
    a_model_on_meta=net(lambda: nn.Linear(4, 4, device="meta"), S, says="meta"),
    an_input_on_meta=net(
        lambda: nn.Linear(4, 4), lambda: torch.empty(3, 4, device="meta"), says="example input 0"
    ),
    a_buffer_elsewhere=of(
        lambda self, x: x + self.b, S, b=lambda: torch.ones(4, device="meta"), says="b of the model"
    ),
    a_sparse_input=of(
        lambda self, x: x @ torch.ones(4, 2), lambda: r(*S).to_sparse(), says="sparse"
    ),
    a_sparse_weight=of(
        lambda self, x: torch.sparse.mm(self.w, x), (4, 3), w=lambda: r(4, 4).to_sparse()
    ),
    a_sparse_linear=of(
        lambda self, x: F.linear(x, self.w), (3, 4), w=lambda: r(5, 4).to_sparse_csr()
    ),
    sparse_inside=of(lambda self, x: torch.sparse.mm(torch.eye(3).to_sparse(), x), S),
    a_sparse_weight_that_is_added=of(
        lambda self, x: self.w + x, (4, 4), w=lambda: r(4, 4).to_sparse_csr(), says="no product"
    ),
    an_input_made_sparse=of(
        lambda self, x: torch.sparse.mm(x.to_sparse(), torch.ones(4, 2)), S, says="sparse"
    ),
    a_quantised_input=of(
        lambda self, x: x.dequantize(),
        lambda: torch.quantize_per_tensor(r(*S), 0.1, 0, torch.qint8),
        says="quantised",
    ),
    a_nested_input=of(
        lambda self, x: x * 2,
        lambda: torch.nested.nested_tensor([r(2, 4), r(3, 4)], layout=torch.jagged),
        says="a nested tensor",
    ),
    an_input_that_requires_a_gradient=of(
        lambda self, x: x * 2, lambda: r(*S).requires_grad_(), says="requires a gradient"
    ),
    a_parameter_as_input=of(
        lambda self, x: x * 2, lambda: nn.Parameter(r(*S), requires_grad=False)
    ),
    moved_to_where_it_is=of(lambda self, x: x.cpu().to("cpu") + 1, S),
    weights_without_gradients=net(lambda: nn.Linear(4, 4).requires_grad_(False), S),
)

# ---- the modules of torch ------------------------------------------------------------------------


def _lstm(self: Any, x: torch.Tensor) -> Any:
    y, (h, c) = self.net(x)
    return y, h, c


Z = (2, 3, 8, 8)

group(
    "layers",
    linear=net(lambda: nn.Linear(4, 5), S),
    bilinear=net(lambda: nn.Bilinear(4, 4, 3), S, S),
    embedding=net(lambda: nn.Embedding(10, 4), lambda: ids(10, 2, 5)),
    embedding_bag=net(lambda: nn.EmbeddingBag(10, 4), lambda: ids(10, 2, 5)),
    embedding_bag_of_sums=net(
        lambda: nn.EmbeddingBag(10, 4, mode="sum"), lambda: ids(10, 6), lambda: torch.tensor([0, 3])
    ),
    conv1d=net(lambda: nn.Conv1d(3, 4, 3, stride=2), (2, 3, 9)),
    conv2d_of_groups=net(lambda: nn.Conv2d(4, 8, 3, groups=2, padding="same"), (1, 4, 7, 7)),
    conv3d=net(lambda: nn.Conv3d(2, 3, 2, dilation=2), (1, 2, 5, 5, 5)),
    conv_of_one_image=net(lambda: nn.Conv2d(3, 4, 3), (3, 8, 8)),
    conv_transpose1d=net(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (2, 3, 5)),
    conv_transpose2d=net(
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (1, 3, 5, 5)
    ),
    conv_transpose3d=net(lambda: nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3)),
    **{
        f"conv_with_padding_{mode}": net(
            lambda mode=mode: nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), Z
        )
        for mode in ("reflect", "replicate", "circular")
    },
    **{
        f"pad_{mode}": of(lambda self, x, mode=mode: F.pad(x, (1, 2), mode=mode), (2, 3, 5))
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    batch_norm=net(lambda: nn.BatchNorm2d(3), Z),
    batch_norm_without_statistics=net(lambda: nn.BatchNorm1d(4, track_running_stats=False), S),
    instance_norm=net(lambda: nn.InstanceNorm2d(3, affine=True), Z),
    group_norm=net(lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    layer_norm_over_two=net(lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    rms_norm=net(lambda: nn.RMSNorm(4), S),
    local_response_norm=net(lambda: nn.LocalResponseNorm(2), Z),
    cross_map_norm=net(lambda: nn.CrossMapLRN2d(3), Z),
    prelu=net(lambda: nn.PReLU(3), Z),
    gated=net(lambda: nn.GLU(), S),
    softmaxes=of(lambda self, x: (x.softmax(0), x.log_softmax(-1), F.softmin(x, 1)), S),
    soft_activations=of(
        lambda self, x: (F.mish(x), F.softplus(x), F.softsign(x), F.tanhshrink(x)), S
    ),
    random_leaky_relu=net(lambda: nn.RReLU(), S),
    max_pool_with_indices=net(lambda: nn.MaxPool2d(2, return_indices=True), Z),
    pool_and_unpool=of(
        lambda self, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), Z
    ),
    lp_pool=net(lambda: nn.LPPool2d(2, 3), Z),
    fractional_pool=net(
        lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5), (4, 8, 9, 9), says=RANDOM
    ),
    adaptive_pools=of(
        lambda self, x: (F.adaptive_avg_pool2d(x, (3, None)), F.adaptive_max_pool2d(x, 2)), Z
    ),
    average_pool3d=net(lambda: nn.AvgPool3d(2, ceil_mode=True), (1, 2, 5, 5, 5)),
    **{
        f"interpolate_{mode}": of(
            lambda self, x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode), Z
        )
        for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
    },
    interpolate_linear=of(lambda self, x: F.interpolate(x, 9, mode="linear"), (2, 3, 5)),
    upsample_trilinear=net(lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 3, 3, 3)),
    grid_sample=of(lambda self, x, t: F.grid_sample(x, F.affine_grid(t, x.shape)), Z, (2, 2, 3)),
    pixel_shuffle=net(lambda: nn.PixelShuffle(2), (1, 4, 3, 3)),
    unfold_and_fold=of(lambda self, x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2), Z),
    cosine_similarity=net(lambda: nn.CosineSimilarity(), S, S),
    pairwise_distance=of(lambda self, x, y: (torch.cdist(x, y), F.pairwise_distance(x, y)), S, S),
    losses=of(
        lambda self, x, t: (F.cross_entropy(x, t), F.nll_loss(x, t), F.multi_margin_loss(x, t)),
        S,
        lambda: ids(4, 3),
    ),
    losses_of_pairs=of(
        lambda self, x, y: (
            F.smooth_l1_loss(x, y),
            F.huber_loss(x, y),
            F.kl_div(x, y.softmax(-1), reduction="batchmean"),
            F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        ),
        S,
        S,
    ),
    ctc_loss=of(
        lambda self, x, t: F.ctc_loss(
            x.log_softmax(-1), t, torch.full((2,), 9), torch.full((2,), 3)
        ),
        (9, 2, 5),
        lambda: ids(4, 2, 3) + 1,
        says="depends on the values",
    ),
    flatten_and_unflatten=net(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Unflatten(1, (2, 3))), (2, 3, 4)
    ),
    identity=net(lambda: nn.Identity(), S),
    an_empty_sequence=net(lambda: nn.Sequential(), S),
)

group(
    "recurrence and attention",
    rnn=net(lambda: nn.RNN(4, 5), (6, 2, 4)),
    lstm=of(_lstm, (6, 2, 4), net=lambda: nn.LSTM(4, 5, num_layers=2)),
    lstm_both_ways=net(lambda: nn.LSTM(4, 5, bidirectional=True, batch_first=True), (2, 6, 4)),
    lstm_with_projection=net(lambda: nn.LSTM(4, 5, proj_size=3), (6, 2, 4)),
    lstm_with_a_state=net(lambda: nn.LSTM(4, 5), (6, 2, 4), lambda: (r(1, 2, 5), r(1, 2, 5))),
    gru=net(lambda: nn.GRU(4, 5, batch_first=True), (2, 6, 4)),
    packed_sequences=of(
        lambda self, x: self.net(
            nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 3]), batch_first=True)
        )[1],
        (2, 6, 4),
        net=lambda: nn.GRU(4, 5, batch_first=True),
    ),
    lstm_cell_in_a_loop=of(
        lambda self, x: functools.reduce(lambda s, t: self.cell(t, s), x, (x.new_zeros(2, 5),) * 2),
        (6, 2, 4),
        cell=lambda: nn.LSTMCell(4, 5),
    ),
    attention=of(
        lambda self, x: self.net(x, x, x),
        (2, 5, 8),
        net=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    attention_with_masks=of(
        lambda self, x, pad: self.net(
            x,
            x,
            x,
            key_padding_mask=pad,
            need_weights=False,
            attn_mask=torch.ones(5, 5).triu(1).bool(),
        )[0],
        (2, 5, 8),
        lambda: torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
        net=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    attention_of_other_keys=of(
        lambda self, x, y: self.net(x, y, y)[0],
        (5, 2, 8),
        (4, 2, 6),
        net=lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=6),
    ),
    encoder_layer=net(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    encoder=net(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (2, 5, 8),
    ),
    encoder_with_padding=of(
        lambda self, x, pad: self.net(x, src_key_padding_mask=pad),
        (2, 5, 8),
        lambda: torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
        net=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
        ),
    ),
    decoder_layer=net(lambda: nn.TransformerDecoderLayer(8, 2, 16), (5, 2, 8), (4, 2, 8)),
    transformer=net(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (2, 5, 8), (2, 4, 8)),
    scaled_dot_product=of(
        lambda self, q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        (2, 2, 5, 8),
        (2, 2, 5, 8),
    ),
)

group(
    "how modules are put together",
    module_list=of(
        lambda self, x: functools.reduce(lambda y, m: m(y), self.parts, x),
        S,
        parts=lambda: nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]),
    ),
    module_dict=of(
        lambda self, x, key: self.parts[key](x),
        S,
        "b",
        parts=lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()}),
    ),
    parameter_list=of(
        lambda self, x: sum(x * p for p in self.ps),
        S,
        ps=lambda: nn.ParameterList([nn.Parameter(r(4)) for _ in range(3)]),
    ),
    parameter_dict=of(
        lambda self, x: x * self.ps["a"], S, ps=lambda: nn.ParameterDict({"a": nn.Parameter(r(4))})
    ),
    no_parameters=of(lambda self, x: x * 2, S),
    a_frozen_list_of_tensors=of(
        lambda self, x: x + self.held[0] + self.held[1], S, held=lambda: [r(4), r(4)]
    ),
    a_tensor_that_is_no_buffer=net(
        lambda: _with(
            module(lambda self, x: x + self.t), "__dict__", lambda m: {**vars(m), "t": r(4)}
        ),
        S,
    ),
    tied_weights=net(lambda: _tied(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), S),
    one_module_used_twice=of(lambda self, x: self.a(self.a(x)), S, a=lambda: nn.Linear(4, 4)),
    a_module_under_two_names=net(lambda: _shared(nn.Linear(4, 4)), S),
    recursion=of(lambda self, x: _tree(self.a, x, 3), S, a=lambda: nn.Linear(4, 4)),
    a_loop_over_a_shape=of(lambda self, x: sum(x[i] * i for i in range(x.shape[0])), S),
    weight_norm=net(lambda: parametrizations.weight_norm(nn.Linear(4, 4)), S),
    spectral_norm=net(lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), S),
    old_weight_norm=net(lambda: nn.utils.weight_norm(nn.Linear(4, 4)), S),
    old_spectral_norm=net(lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), S),
    orthogonal=net(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), S),
    a_parametrisation_of_ones_own=net(lambda: _symmetric(nn.Linear(4, 4)), S),
    pruned=net(lambda: _pruned(nn.Linear(4, 4)), S),
    data_parallel=net(lambda: nn.DataParallel(nn.Linear(4, 4)), S),
    fx_graph=net(lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), S),
    lazy=net(lambda: nn.LazyLinear(5), S, says="lazy"),
    lazy_after_a_call=net(lambda: _called(nn.LazyLinear(5)), S),
    scripted=net(lambda: torch.jit.script(nn.Linear(4, 4)), S, says="ScriptModule"),
    a_scripted_part=net(
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU()), S, says="ScriptModule"
    ),
    traced_by_torch=net(lambda: torch.jit.trace(nn.Linear(4, 4), r(*S)), S, says="ScriptModule"),
    compiled=net(lambda: torch.compile(nn.Linear(4, 4)), S, says="torch.compile"),
)


def _tied(net: nn.Sequential) -> nn.Module:
    net[2].weight = net[0].weight
    return net


def _shared(part: nn.Module) -> nn.Module:
    return module(lambda self, x: self.a(x) + self.b(x), a=part, b=part)


def _tree(part: nn.Module, x: torch.Tensor, depth: int) -> torch.Tensor:
    return x if depth == 0 else _tree(part, part(x), depth - 1) + _tree(part, x * 2, depth - 1)


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).t()


def _symmetric(linear: nn.Module) -> nn.Module:
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def _pruned(linear: nn.Module) -> nn.Module:
    prune.random_unstructured(linear, "weight", 0.5)
    return linear


def _called(lazy: nn.Module) -> nn.Module:
    lazy(r(*S))
    return lazy


# ---- what forward computes -----------------------------------------------------------------------

group(
    "functions",
    einsum=of(lambda self, x, y: torch.einsum("bij,bkj->bik", x, y), (2, 3, 4), (2, 5, 4)),
    products=of(lambda self, x: (x @ x.t(), torch.outer(x[0], x[1]), torch.kron(x, x)), S),
    scans=of(lambda self, x: (x.cumsum(0), x.cumprod(1), x.cummax(0), x.logcumsumexp(1)), S),
    order=of(lambda self, x: (x.sort(-1), x.topk(2), x.argsort(0), x.kthvalue(2), x.median(1)), S),
    searchsorted=of(lambda self, x: torch.searchsorted(torch.linspace(-1, 1, 5), x), S),
    where_and_masks=of(
        lambda self, x: (torch.where(x > 0, x, 0), x.masked_fill(x < 0, -1.0), x.clamp(-1, 1)), S
    ),
    index_by_tensors=of(
        lambda self, x, i: (x[i], x[:, i], x[i, i], x[..., i.view(2, 1)]), (5, 5), lambda: ids(5, 2)
    ),
    index_put=of(
        lambda self, x, i: (x.index_put((i,), r0(x)), x.index_add(0, i, x[:2])),
        (5, 4),
        lambda: torch.randperm(5)[:2],
    ),
    scatter=of(
        lambda self, x, i: (
            x.scatter(1, i, 0.5),
            x.scatter_add(1, i, x),
            x.scatter_reduce(1, i, x, "amax"),
        ),
        (3, 4),
        lambda: ids(4, 3, 4),
    ),
    gather_and_take=of(
        lambda self, x, i: (x.gather(1, i), x.take(i), torch.take_along_dim(x, i, 1)),
        (3, 4),
        lambda: ids(4, 3, 4),
    ),
    pieces=of(lambda self, x: (*x.split(2, 1), *x.chunk(2), *x.tensor_split(3, 1)), (4, 6)),
    moves=of(
        lambda self, x: (
            x.flip(0),
            x.roll(1, 1),
            torch.rot90(x),
            x.diagonal(),
            x.repeat(2, 1),
            x.repeat_interleave(2, 0),
            x.unfold(1, 2, 1),
            x.movedim(0, 1),
        ),
        S,
    ),
    spread=of(lambda self, x: (x.std(), x.var(0), x.norm(), x.quantile(0.5), x.logsumexp(1)), S),
    linear_algebra=of(
        lambda self, x: (
            torch.linalg.inv(x + 9 * torch.eye(4)),
            torch.linalg.det(x),
            torch.linalg.cholesky(x @ x.t() + torch.eye(4)),
            torch.trace(x),
        ),
        (4, 4),
    ),
    special=of(
        lambda self, x: (torch.special.i0(x), torch.lgamma(x), torch.special.erfinv(x.tanh())), S
    ),
    fourier=of(lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=8), (3, 8)),
    fourier_in_two_dimensions=of(lambda self, x: torch.fft.fft2(x).real, (2, 4, 4)),
    short_time_fourier=of(
        lambda self, x: torch.stft(x, 8, window=torch.hann_window(8), return_complex=True).abs(),
        (2, 32),
    ),
    fourier_layer=of(
        lambda self, x: torch.fft.irfft2(
            torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x)[..., :3], self.w), s=(8, 8)
        ),
        (2, 3, 8, 8),
        w=lambda: nn.Parameter(torch.randn(3, 4, 8, 3, dtype=torch.complex64)),
    ),
    fourier_mixing=of(
        lambda self, x: self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real),
        (2, 5, 8),
        norm=lambda: nn.LayerNorm(8),
    ),
    bucketize_and_histogram=of(
        lambda self, x: (torch.bucketize(x, torch.linspace(-1, 1, 5)), torch.histc(x, 5, -1, 1)), S
    ),
    one_hot=of(lambda self, i: F.one_hot(i, 5).float(), lambda: ids(5, 7)),
    one_hot_of_unknown_classes=of(lambda self, i: F.one_hot(i), lambda: torch.randperm(5)),
    combinations=of(lambda self, x: (torch.cartesian_prod(x, x), torch.combinations(x)), (4,)),
    nan_and_infinity=of(lambda self, x: (x.log().nan_to_num(), (x / 0).isinf(), x.sqrt()), S),
    vmap=of(lambda self, x: torch.vmap(lambda row: row * row.sum())(x), S),
    gradient_inside=of(lambda self, x: _gradient(x), S),
    jacobian_inside=of(lambda self, x: torch.func.jacrev(torch.sin)(x), (3,)),
    own_autograd_function=of(lambda self, x: Doubled.apply(x) + 1, S),
    checkpointed=of(
        lambda self, x: checkpoint(self.a, x, use_reentrant=False), S, a=lambda: nn.Linear(4, 4)
    ),
    custom_operator=of(lambda self, x: double_of(x) + 1, S),
    custom_operator_without_fake=of(lambda self, x: triple_of(x) + 1, S),
    autocast_inside=of(lambda self, x: _autocast(self.a, x), S, a=lambda: nn.Linear(4, 4)),
    inference_mode_inside=of(lambda self, x: _inference(x), S),
    no_grad_inside=of(lambda self, x: torch.no_grad()(lambda: x * 2)(), S),
    no_grad_decorator=of(torch.no_grad()(lambda self, x: x * 2), S),
)


def r0(x: torch.Tensor) -> torch.Tensor:
    return x[:2] * 0 + 5


def _gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((x**3).sum(), x)
    return found


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


@torch.library.custom_op("what_runs::double", mutates_args=())
def double_of(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double_of.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("what_runs::triple", mutates_args=())
def triple_of(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def _autocast(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x)


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


# ---- numbers at the edge -------------------------------------------------------------------------


def odd(*shape: int) -> Callable[[], torch.Tensor]:
    """Numbers among which are nan, infinities, both zeros and halves."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0.5, 1.5, -2.5])
    return lambda: torch.where(torch.rand(shape) < 0.5, special[ids(8, *shape)], r(*shape))


def signed(dtype: torch.dtype, *shape: int) -> Callable[[], torch.Tensor]:
    """Whole numbers of both signs, without 0."""
    return lambda: (ids(100, *shape) + 1).to(dtype) * (2 * ids(2, *shape) - 1).to(dtype)


def _seen_through_a_view(self: Any, x: torch.Tensor) -> Any:
    y = x * 1
    row, column = y[0], y[:, 1]
    y.mul_(2)
    row.add_(1)
    return y, row, column


def _aliases(self: Any, x: torch.Tensor) -> Any:
    y = x.clone()
    z = y
    z += 1
    y = y.view(-1)
    y[::3] = -1.0
    return z, y


def _steps(self: Any, x: torch.Tensor) -> Any:
    y = x.clone()
    y[1::2, ::3] = 0
    y[-1] += y[0]
    y[:, -2:] *= x[:, :2]
    y[[0, 2]] = y[[2, 0]]
    return y


group(
    "numbers at the edge",
    nan_in_extremes=of(
        lambda self, x: (x.amax(1), x.argmax(1), x.max(0), x.clamp(-1, 1), x.relu(), x.cummax(0)),
        odd(5, 6),
    ),
    nan_in_order=of(lambda self, x: (x.sort(-1).values, x.topk(3).values, x.nanmean()), odd(5, 6)),
    signs_of_zero=of(
        lambda self, x: (1 / (x * 0), torch.copysign(torch.ones(6), x), x.sign(), -x), odd(5, 6)
    ),
    halves=of(lambda self, x: (x.round(), x.floor(), x.trunc(), x.round(decimals=1)), odd(5, 6)),
    remainders=of(
        lambda self, x, y: (
            x % y,
            torch.fmod(x, y),
            x // y,
            torch.div(x, y, rounding_mode="trunc"),
        ),
        (4, 5),
        (4, 5),
    ),
    remainders_of_whole_numbers=of(
        lambda self, x, y: (
            x % y,
            torch.fmod(x, y),
            x // y,
            torch.div(x, y, rounding_mode="trunc"),
        ),
        signed(torch.int64, 4, 5),
        signed(torch.int64, 4, 5),
    ),
    powers=of(lambda self, x: (x**2, x**3, x**0.5, x**-1, 2**x, x**0, abs(x) ** x), odd(4, 5)),
    powers_of_whole_numbers=of(lambda self, x: (x**2, x**3, 2.0**x), signed(torch.int32, 9)),
    large_whole_numbers=of(
        lambda self, x: (x + 1, x * 3, x // 7, x % 7, x > 2**60, x.float(), x.double() + 1),
        lambda: ids(2**62, 9),
    ),
    sums_of_narrow_types=of(
        lambda self, x, b: (x.sum(), x.cumsum(0), x.prod(), b.sum(), b.cumsum(0), b.float().mean()),
        signed(torch.int8, 9),
        typed(torch.bool, 9),
    ),
    unsigned_below_zero=of(lambda self, x: (x - 200, -x, x.float() - 200), typed(torch.uint8, 9)),
    whole_numbers_and_bounds=of(
        lambda self, x: (x.clamp(-3, 3), x.clamp(min=0.5), x.abs(), x.sign(), x.bitwise_not()),
        signed(torch.int32, 9),
    ),
    half_that_overflows=of(
        lambda self, x: (x * 6e4, (x * 300).square(), x.sum(), x.exp()), typed(torch.float16, 64)
    ),
    long_sums_in_half=of(
        lambda self, x: (x.abs().sum(), x.abs().mean(), x.softmax(0)), typed(torch.float16, 5000)
    ),
    softmax_of_hidden_rows=of(
        lambda self, x: torch.where(x > 9, x, -torch.inf).softmax(-1), (3, 4)
    ),
    attention_of_hidden_rows=of(
        lambda self, q, hide: F.scaled_dot_product_attention(q, q, q, attn_mask=hide),
        (1, 2, 4, 8),
        lambda: torch.ones(4, 4).tril(-1).bool(),
    ),
    attention_of_groups=of(
        lambda self, q, k: F.scaled_dot_product_attention(q, k, k, scale=0.3, enable_gqa=True),
        (1, 4, 5, 8),
        (1, 2, 5, 8),
    ),
    spread_of_one=of(lambda self, x: (x.std(0), x.var(0, correction=0), x.mean()), (1, 4)),
    nothing_at_all=of(lambda self, x: (x.sum(), x.prod(), x.mean(), x.any(), x.all()), (0, 4)),
    norm_of_equal_numbers=net(lambda: nn.LayerNorm(4), lambda: torch.full((3, 4), 2.5)),
    indices_from_the_end=of(
        lambda self, x, i: (x[i], x[:, i], x.index_select(0, i + 5), x[-1], x[..., -2:]),
        (5, 5),
        lambda: -1 - ids(5, 3),
    ),
    scatter_twice_to_one_place=of(
        lambda self, x, i: x.index_add(0, i, x[:3]), (5, 4), lambda: ids(2, 3)
    ),
    diagonal_of_a_product=of(
        lambda self, x: (torch.einsum("ii->i", x), torch.einsum("...ij->...ji", x)), (4, 4)
    ),
    an_embedding_that_renorms=net(
        lambda: nn.Embedding(10, 4, max_norm=0.5), lambda: ids(10, 5), says="writes to its"
    ),
    an_embedding_with_padding=net(lambda: nn.Embedding(10, 4, padding_idx=3), lambda: ids(10, 9)),
    written_and_seen_through_a_view=of(_seen_through_a_view, (3, 4)),
    two_names_for_one_tensor=of(_aliases, (3, 4)),
    written_in_steps=of(_steps, (4, 6)),
    imaginary_part_of_a_conjugate=of(
        lambda self, x: F.relu(x.conj().imag) + x.conj().real, typed(torch.complex64, 4, 5)
    ),
    complex_view_written=of(
        lambda self, x: torch.view_as_real(x * 2).mul(torch.tensor([1.0, -1.0])).relu(),
        typed(torch.complex64, 4, 5),
    ),
    attention_with_extra_keys=net(
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True), *[(5, 2, 8)] * 3
    ),
    batch_norm_without_weights=net(lambda: nn.BatchNorm2d(3, affine=False, momentum=None), Z),
    even_kernel_of_same_size=net(lambda: nn.Conv1d(3, 4, 4, padding="same", dilation=2), (2, 3, 9)),
)

# ---- what a graph cannot hold --------------------------------------------------------------------


def _branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def _until(self: Any, x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 0.1:
        x = x / 2
    return x


def _refuses(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] != 5:
        raise ValueError("five features are needed")
    return x


def _asserts(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert x.ndim == 3, "a batch of rows"
    return x


def _experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    out, which = torch.zeros_like(x), x.argmax(-1)
    for k, expert in enumerate(self.experts):
        rows = torch.where(which == k)[0]
        out[rows] = expert(x[rows])
    return out


def _catches(self: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.sum().item()
    except Exception:
        return x


BRANCH = "branches on"
group(
    "control flow and values",
    a_branch=of(_branch, S, says=BRANCH),
    a_loop_until=of(_until, S, says=BRANCH),
    a_condition_of_any=of(lambda self, x: x if (x > 0).any() else -x, S, says=BRANCH),
    allclose=of(lambda self, x: x if torch.allclose(x, x * 2) else -x, S, says=BRANCH),
    a_branch_on_a_weight=of(lambda self, x: x if self.w.sum() > 0 else -x, S, w=lambda: r(4)),
    a_branch_on_a_shape=of(lambda self, x: x if x.shape[0] > 2 else -x, S),
    a_branch_on_a_type=of(lambda self, x: x if x.dtype == torch.float32 else -x, S),
    item=of(lambda self, x: x * x.sum().item(), S, says="a number that"),
    item_out=of(lambda self, x: x.sum().item(), S, says="a number that"),
    item_of_an_input=of(lambda self, x, n: x[: n.item()], S, lambda: torch.tensor(2)),
    tolist=of(lambda self, x: x * x[0].tolist()[0], S, says="a number that"),
    to_numpy=of(lambda self, x: torch.from_numpy(x.numpy() * 2), S, says="numpy"),
    from_numpy=of(lambda self, x: x + torch.from_numpy(numpy.ones(4, numpy.float32)), S),
    an_error_caught=of(_catches, S, says="a number that"),
    mask_as_index=of(lambda self, x: x[x > 0], S, says="depends on the values"),
    mask_assigned=of(
        lambda self, x: torch.where(x > 0, x, x).index_put((x > 0,), x.new_tensor(7.0)), S
    ),
    nonzero=of(lambda self, x: x.nonzero(), S, says="depends on the values"),
    unique=of(lambda self, x: x.unique(), lambda: ids(4, 9)),
    masked_select=of(lambda self, x: x.masked_select(x > 0), S, says="depends on the values"),
    bincount=of(lambda self, x: x.bincount(), lambda: ids(4, 9)),
    repeat_by_a_tensor=of(lambda self, x, n: x.repeat_interleave(n, 0), S, lambda: ids(3, 3)),
    arange_to_a_value=of(lambda self, n: torch.arange(n.max()) * 2, lambda: ids(9, 3) + 1),
    experts=of(
        _experts,
        S,
        experts=lambda: nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]),
        says="depends on the values",
    ),
    torch_cond=of(
        lambda self, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        S,
        says="torch.cond",
    ),
    wrong_features=net(lambda: nn.Linear(5, 4), S, says="refuses this example"),
    wrong_type=net(
        lambda: nn.Linear(4, 4), typed(torch.float64, 3, 4), says="refuses this example"
    ),
    wrong_rank=net(lambda: nn.Conv2d(3, 4, 3), (3, 4), says="refuses this example"),
    wrong_index=net(lambda: nn.Embedding(4, 4), lambda: ids(1, 3) + 9, says="refuses this example"),
    its_own_error=of(_refuses, S, says="five features are needed"),
    its_own_assertion=of(_asserts, S, says="a batch of rows"),
    a_fault_in_forward=of(lambda self, x: self.missing(x), S, says="missing"),
    no_tensor=net(lambda: nn.Linear(4, 4), 3.0, says="refuses this example"),
    no_forward=net(lambda: nn.ModuleList([nn.Linear(4, 4)]), S, says="forward"),
)


# ---- writing, state and chance -------------------------------------------------------------------


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return x * self.count


def _keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = x * 2
    return self.last + 1


def _appends(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen.append(x * 2)
    return x


def _counts_in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.counts[0] += 1
    return x * self.counts[0]


def _keeps_in_a_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state["h"] = self.state["h"] + x
    return self.state["h"]


def _caches(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] not in self.tables:
        self.tables[x.shape[-1]] = torch.arange(x.shape[-1], dtype=x.dtype)
    return x * self.tables[x.shape[-1]]


def _averages(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
    return x - self.mean


def _replaces(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean = self.mean * 0.9 + x.mean(0)
    return x - self.mean


def _writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 4)
    y[1:, :2] = x[:, :2]
    y[0] = 5.0
    y += 1
    return y.t().relu_()


def _writes_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.view(-1)[::2].mul_(3)
    return y


WRITES = "writes to its"
group(
    "writing and state",
    in_place_on_ones_own=of(_writes, S),
    in_place_on_a_view=of(_writes_a_view, S),
    in_place_relu=net(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), S),
    in_place_relu_on_the_input=net(lambda: nn.ReLU(inplace=True), S, says=WRITES),
    an_input_written=of(lambda self, x: x.add_(1), S, says=WRITES),
    a_view_of_an_input_written=of(lambda self, x: (x[0].zero_(), x * 2)[1], S, says=WRITES),
    a_buffer_written=of(_averages, S, mean=lambda: torch.zeros(4), says=WRITES),
    a_buffer_replaced=of(_replaces, S, mean=lambda: torch.zeros(4), says="'mean'"),
    a_parameter_written=of(
        lambda self, x: x * self.w.data.mul_(0.9), S, w=lambda: nn.Parameter(r(4)), says="'w'"
    ),
    a_counter=of(_counts, S, count=0, says="'count'"),
    a_tensor_kept=of(_keeps, S, says="'last'"),
    a_list_that_grows=of(_appends, S, seen=list, says="'seen'"),
    a_counter_in_a_list=of(_counts_in_a_list, S, counts=lambda: [0], says="'counts'"),
    a_tensor_in_a_dict=of(_keeps_in_a_dict, S, state=lambda: {"h": 0.0}, says="'state'"),
    a_table_made_once=of(_caches, S, tables=dict),
    batch_norm_that_learns=of(
        lambda self, x: F.batch_norm(x, self.mean, self.var, training=True),
        S,
        mean=lambda: torch.zeros(4),
        var=lambda: torch.ones(4),
        says=WRITES,
    ),
    printing=of(lambda self, x: (print("x", end=""), x * 2)[1], S),
    out_argument=of(lambda self, x: torch.add(x, 1, out=torch.empty(3, 4)), S),
    set_item_by_mask=of(lambda self, x: _set_by_mask(x), S),
    detached=of(lambda self, x: x.detach() + x.data, S),
)


def _set_by_mask(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y < 0] = 0.5
    return y


def _hooked(hook: Callable[..., Any], pre: bool = False) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    (net[0].register_forward_pre_hook if pre else net[0].register_forward_hook)(hook)
    return net


def records(module: nn.Module, args: Any, result: Any) -> None:
    module.__dict__.setdefault("_seen", []).append(result)


def doubles(module: nn.Module, args: Any, result: Any) -> Any:
    return result * 2


def halves_inputs(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2,)


def looks(module: nn.Module, args: Any) -> None:
    assert args


EVAL = "training mode"
group(
    "hooks, training and chance",
    a_hook_that_records=net(lambda: _hooked(records), S, says="records"),
    a_hook_that_looks=net(lambda: _hooked(looks, pre=True), S, says="looks"),
    a_hook_that_computes=net(lambda: _hooked(doubles), S),
    a_hook_that_computes_inputs=net(lambda: _hooked(halves_inputs, pre=True), S),
    a_backward_hook=net(
        lambda: _with(
            nn.Linear(4, 4), "_", lambda m: m.register_full_backward_hook(lambda *_: None)
        ),
        S,
    ),
    training_without_dropout=trained(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), S),
    training_with_dropout=trained(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), S, says=EVAL
    ),
    training_with_dropout_of_0=trained(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), S),
    training_with_dropout2d=trained(lambda: nn.Dropout2d(), Z, says=EVAL),
    training_with_alpha_dropout=trained(lambda: nn.AlphaDropout(), S, says=EVAL),
    training_with_batch_norm=trained(lambda: nn.BatchNorm2d(3), Z, says="running_mean"),
    training_an_encoder_layer=trained(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8), says=EVAL
    ),
    training_an_lstm_with_dropout=trained(
        lambda: nn.LSTM(4, 5, 2, dropout=0.5), (6, 2, 4), says=EVAL
    ),
    training_spectral_norm=trained(
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), S, says="writes to its buffer"
    ),
    training_random_leaky_relu=trained(lambda: nn.RReLU(), S, says=EVAL),
    dropout_that_stays_on=of(lambda self, x: F.dropout(x, 0.5), (8, 8), says=RANDOM),
    noise=of(lambda self, x: x + torch.randn_like(x), S, says=RANDOM),
    random_numbers=of(lambda self, x: x * torch.rand(3, 4), S, says=RANDOM),
    filled_with_noise=of(lambda self, x: x + torch.empty(3, 4).normal_(), S, says=RANDOM),
    zeros_filled_with_noise=of(lambda self, x: x * torch.zeros(3, 4).uniform_(), S, says=RANDOM),
    a_branch_on_noise=of(lambda self, x: x if torch.rand(()) < 0.5 else -x, S, says=BRANCH),
    a_generator_of_its_own=of(
        lambda self, x: x + torch.rand(4, generator=self.g),
        S,
        g=lambda: torch.Generator(),
        says="Generator",
    ),
    random_whole_numbers=of(lambda self, x: x + torch.randint(0, 99, (8, 8)), (8, 8), says=RANDOM),
    a_permutation=of(lambda self, x: x[torch.randperm(64)], (64,), says=RANDOM),
    bernoulli=of(lambda self, x: torch.bernoulli(x.sigmoid()), (8, 8), says=RANDOM),
    gumbel_softmax=of(lambda self, x: F.gumbel_softmax(x), S, says=RANDOM),
    multinomial=of(lambda self, x: x.softmax(-1).multinomial(16, True), (8, 8), says=RANDOM),
    chance_of_python=of(lambda self, x: x * random.random(), S, says="draws from Python's"),
    chance_of_numpy=of(
        lambda self, x: x * float(numpy.random.rand()), S, says="draws from Python's"
    ),
    a_distribution=of(
        lambda self, x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
        S,
        says=RANDOM,
    ),
    a_distribution_that_checks=of(
        lambda self, x: torch.distributions.Normal(x, 1.0).log_prob(x), S
    ),
    a_seed_set_inside=of(
        lambda self, x: (torch.manual_seed(0), x + torch.rand(4))[1], S, says="seed"
    ),
)
