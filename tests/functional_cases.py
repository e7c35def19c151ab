"""Calls of ``dt.functional`` with what they stand for in plain torch, for every test of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """``ours(dt.functional, *tensors)`` should be ``theirs(*tensors)``; without these the same call
    of ``torch.nn.functional``."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., Any]
    theirs: Any = None
    frozen: bool = False  # part of its gradient is set to zero, as for a padding row
    margin: float = 0.0  # how far from the kinks of the function its inputs stay

    def __post_init__(self) -> None:
        object.__setattr__(self, "theirs", self.theirs or partial(self.ours, F))

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        gen = torch.Generator().manual_seed(seed)
        found = []
        for shape in self.shapes:
            t = torch.randn(shape, generator=gen, dtype=torch.float64)
            found.append((t + self.margin * t.sign()).to(dtype))
        return found


ACTIVATIONS = """relu relu6 leaky_relu sigmoid tanh gelu silu mish hardswish hardsigmoid hardtanh
    elu selu celu softplus softsign logsigmoid tanhshrink softshrink hardshrink""".split()


def _activations() -> Iterator[Call]:
    x = ((4, 9),)
    for name in ACTIVATIONS:
        yield Call(name, x, lambda f, x, n=name: getattr(f, n)(x), margin=0.02)
    yield Call("gelu tanh", x, lambda f, x: f.gelu(x, approximate="tanh"))
    yield Call("threshold", x, lambda f, x: f.threshold(x, 0.1, -2.0), margin=0.2)
    yield Call("prelu", ((2, 3, 5), (3,)), lambda f, x, w: f.prelu(x, w), margin=0.02)
    yield Call("glu", ((3, 8, 2),), lambda f, x: f.glu(x, 1))
    yield Call(
        "bias_act",
        ((5, 7), (7,)),
        lambda f, x, b: f.bias_act(x, b, "gelu"),
        lambda x, b: F.gelu(x + b),
    )
    yield Call(
        "swiglu", ((5, 7), (5, 7)), lambda f, g, u: f.swiglu(g, u), lambda g, u: F.silu(g) * u
    )
    yield Call(
        "swiglu halves", ((5, 14),), lambda f, x: f.swiglu(x), lambda x: F.silu(x[:, :7]) * x[:, 7:]
    )
    yield Call("geglu", ((5, 7), (5, 7)), lambda f, g, u: f.geglu(g, u), lambda g, u: F.gelu(g) * u)
    yield Call(
        "reglu",
        ((5, 7), (5, 7)),
        lambda f, g, u: f.reglu(g, u),
        lambda g, u: F.relu(g) * u,
        margin=0.02,
    )


def _norms() -> Iterator[Call]:
    row = ((6, 10), (10,), (10,))
    yield Call("layer_norm", row, lambda f, x, w, b: f.layer_norm(x, (10,), w, b))
    yield Call("layer_norm two dims", ((3, 4, 5),), lambda f, x: f.layer_norm(x, (4, 5)))
    yield Call("rms_norm", row[:2], lambda f, x, w: f.rms_norm(x, (10,), w, 1e-6))

    def with_all(x: Tensor, w: Tensor, b: Tensor, r: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        s = x + p + r
        return F.silu(F.layer_norm(s, (10,), w, b)), s

    yield Call(
        "layer_norm with all",
        (*row, (6, 10), (10,)),
        lambda f, x, w, b, r, p: f.layer_norm(
            x, (10,), w, b, residual=r, bias_before=p, activation="silu"
        ),
        with_all,
    )

    def residual(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(x + r, (10,), w, 1e-6), x + r

    yield Call(
        "rms_norm residual",
        ((6, 10), (10,), (6, 10)),
        lambda f, x, w, r: f.rms_norm(x, 10, w, 1e-6, residual=r),
        residual,
    )
    yield Call("group_norm", ((2, 6, 5), (6,), (6,)), lambda f, x, w, b: f.group_norm(x, 3, w, b))
    yield Call("instance_norm", ((2, 3, 4, 5),), lambda f, x: f.instance_norm(x))
    yield Call(
        "instance_norm given",
        ((2, 3, 4, 5),),
        lambda f, x: f.instance_norm(
            x, x.new_full((3,), 0.3), x.new_full((3,), 1.5), use_input_stats=False
        ),
        lambda x: F.batch_norm(x, x.new_full((3,), 0.3), x.new_full((3,), 1.5)),
    )


def _softmaxes() -> Iterator[Call]:
    yield Call("softmax", ((3, 11),), lambda f, x: f.softmax(x), lambda x: F.softmax(x, -1))
    yield Call("softmax dim", ((3, 5, 4),), lambda f, x: f.softmax(x, 1))
    yield Call(
        "log_softmax", ((3, 11),), lambda f, x: f.log_softmax(x), lambda x: F.log_softmax(x, -1)
    )
    yield Call(
        "softmax scaled, bias",
        ((3, 11), (11,)),
        lambda f, x, m: f.softmax(x, mask=m, scale=0.5),
        lambda x, m: F.softmax(x * 0.5 + m, -1),
    )
    mask = torch.arange(33).reshape(3, 11) % 3 != 1
    yield Call(
        "softmax masked",
        ((3, 11),),
        lambda f, x: f.softmax(x, mask=mask),
        lambda x: F.softmax(x.masked_fill(~mask, -torch.inf), -1),
    )


def _images() -> Iterator[Call]:
    x = ((2, 4, 7, 9),)
    table: dict[str, Callable[..., Any]] = {
        "max_pool2d": lambda m, x: m.max_pool2d(x, 3, 2, 1),
        "max_pool2d no batch": lambda m, x: m.max_pool2d(x[0], (3, 2), ceil_mode=True),
        "max_pool1d": lambda m, x: m.max_pool1d(x[0], 3, 1),
        "avg_pool2d": lambda m, x: m.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "avg_pool3d": lambda m, x: m.avg_pool3d(x.unsqueeze(1), 2),
        "adaptive_avg_pool2d": lambda m, x: m.adaptive_avg_pool2d(x, (3, None)),
        "adaptive_max_pool2d": lambda m, x: m.adaptive_max_pool2d(x, 4),
        "nearest": lambda m, x: m.interpolate(x, scale_factor=2),
        "bilinear": lambda m, x: m.interpolate(x, scale_factor=1.7, mode="bilinear"),
        "corners": lambda m, x: m.interpolate(x, (5, 12), mode="bilinear", align_corners=True),
        "bicubic antialias": lambda m, x: m.interpolate(x, (5, 4), mode="bicubic", antialias=True),
        "area": lambda m, x: m.interpolate(x, (4, 5), mode="area"),
        "pixel_shuffle": lambda m, x: m.pixel_shuffle(x, 2),
        "pixel_unshuffle": lambda m, x: m.pixel_unshuffle(x[:, :, :6, :6], 3),
    }
    for name, call in table.items():
        yield Call(name, x, call)
    yield Call(
        "grid_sample",
        ((2, 3, 5, 6), (2, 4, 4, 2)),
        lambda f, x, g: f.grid_sample(x, g * 0.4),
        lambda x, g: F.grid_sample(x, g * 0.4, align_corners=False),
    )
    yield Call(
        "global_avg_pool",
        x,
        lambda f, x: f.global_avg_pool(x),
        lambda x: x.mean((2, 3), keepdim=True),
    )


def _reductions() -> Iterator[Call]:
    x = ((3, 4, 5),)
    yield Call("sum", x, lambda f, x: f.sum(x, (0, 2)), lambda x: x.sum((0, 2)))
    yield Call("mean", x, lambda f, x: f.mean(x, 1, True), lambda x: x.mean(1, True))
    yield Call("prod", x, lambda f, x: f.prod(x, 1), lambda x: x.prod(1))
    yield Call("var", x, lambda f, x: f.var(x, -1, correction=0), lambda x: x.var(-1, correction=0))
    yield Call("amax", x, lambda f, x: f.amax(x, (0, 1)), lambda x: x.amax((0, 1)))
    yield Call("amin", x, lambda f, x: f.amin(x), lambda x: x.amin())
    for p in (1.0, 2.0, 3.0, float("inf")):
        yield Call(
            f"norm {p}",
            x,
            lambda f, x, p=p: f.norm(x, p, (1, 2)),
            lambda x, p=p: torch.linalg.vector_norm(x, p, (1, 2)),
        )
    yield Call(
        "permute",
        x,
        lambda f, x: f.permute(x, (2, 0, 1)),
        lambda x: x.permute(2, 0, 1).contiguous(),
    )
    yield Call(
        "where",
        ((4, 5), (4, 5)),
        lambda f, x, y: f.where(x.detach() > 0, x, y),
        lambda x, y: torch.where(x > 0, x, y),
    )


def _lookups() -> Iterator[Call]:
    index = torch.tensor([[1, 3, 1], [0, 4, 2]])
    yield Call("embedding", ((5, 6),), lambda f, w: f.embedding(index, w))
    yield Call(
        "embedding by frequency",
        ((5, 6),),
        lambda f, w: f.embedding(index, w, scale_grad_by_freq=True),
        frozen=True,
    )
    yield Call(
        "embedding with positions",
        ((5, 6), (3, 6)),
        lambda f, w, p: f.embedding(index, w, 1, position=p),
        lambda w, p: F.embedding(index, w, 1) + p,
        frozen=True,
    )


def _scans() -> Iterator[Call]:
    x = ((3, 4, 5),)
    yield Call("cumsum", x, lambda f, x: f.cumsum(x, 1), lambda x: x.cumsum(1))
    yield Call("cumprod", x, lambda f, x: f.cumprod(x, -1), lambda x: x.cumprod(-1))
    yield Call("cummax", x, lambda f, x: f.cummax(x, 2)[0], lambda x: x.cummax(2)[0])
    yield Call("sort", x, lambda f, x: f.sort(x, 1, True)[0], lambda x: x.sort(1, True)[0])
    yield Call("topk", x, lambda f, x: f.topk(x, 2)[0], lambda x: x.topk(2)[0])


def _batch_norms() -> Iterator[Call]:
    shapes = ((4, 3, 2, 5), (3,), (3,))
    yield Call("batch_norm", shapes, lambda f, x, w, b: f.batch_norm(x, None, None, w, b, True))
    yield Call(
        "batch_norm residual",
        (*shapes, shapes[0]),
        lambda f, x, w, b, r: f.batch_norm(
            x, None, None, w, b, True, residual=r, activation="relu"
        ),
        lambda x, w, b, r: F.relu(F.batch_norm(x, None, None, w, b, True) + r),
    )
    yield Call(
        "batch_norm gelu",
        shapes,
        lambda f, x, w, b: f.batch_norm(x, None, None, w, b, True, activation="gelu"),
        lambda x, w, b: F.gelu(F.batch_norm(x, None, None, w, b, True)),
    )
    mean, var = torch.tensor([0.1, -0.3, 0.0]), torch.tensor([1.0, 0.5, 2.0])

    def given(fn: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fn(x, mean.to(x.dtype), var.to(x.dtype), w, b)

    yield Call("batch_norm eval", shapes, lambda f, x, w, b: given(f.batch_norm, x, w, b))
    yield Call(
        "conv_bn_act",
        ((2, 2, 5, 4), (3, 2, 3, 3), (3,), (3,), (2, 3, 5, 4)),
        lambda f, x, k, w, b, r: f.conv_bn_act(
            x, k, None, None, w, b, padding=1, training=True, residual=r, activation="relu"
        ),
        lambda x, k, w, b, r: F.relu(
            F.batch_norm(F.conv2d(x, k, padding=1), None, None, w, b, True) + r
        ),
    )


def turned(x: Tensor, offset: int = 0) -> Tensor:
    """Rotary positions on [B, S, H, D], halves paired, as papers write them."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(0, 2 * half, 2, dtype=torch.float64) / (2 * half))
    angle = torch.arange(offset, offset + x.shape[1], dtype=torch.float64)[:, None] * rate
    cos, sin = (t.to(x.dtype)[:, None, :] for t in (angle.cos(), angle.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _positions() -> Iterator[Call]:
    yield Call(
        "rope",
        ((2, 5, 3, 8), (2, 5, 1, 8)),
        lambda f, q, k: f.rope(q, k, offset=3),
        lambda q, k: (turned(q, 3), turned(k, 3)),
    )
    yield Call("rope of q", ((2, 5, 3, 8),), lambda f, q: f.rope(q), turned)


def _pyramids() -> Iterator[Call]:
    x = (2, 3, 6, 6)
    yield Call(
        "pyramid_pool2d",
        (x,),
        lambda f, x: f.pyramid_pool2d(x, (1, 3)),
        lambda x: torch.cat(
            (F.adaptive_avg_pool2d(x, 1).flatten(2), F.adaptive_avg_pool2d(x, 3).flatten(2)), 2
        ),
    )
    yield Call(
        "weighted_pool2d",
        (x, (2, 2)),
        lambda f, x, w: f.weighted_pool2d(x, w),
        lambda x, w: F.conv2d(x, w.expand(3, 1, 2, 2), stride=2, groups=3),
    )
    yield Call(
        "weighted_pool2d of channels",
        (x, (3, 2, 3)),
        lambda f, x, w: f.weighted_pool2d(x, w, (2, 1), 1),
        lambda x, w: F.conv2d(x, w[:, None], None, (2, 1), 1, 1, 3),
    )


def _losses() -> Iterator[Call]:
    target = torch.tensor([1, 4, 0, -100, 6])
    yield Call("cross_entropy", ((5, 7),), lambda f, x: f.cross_entropy(x, target))
    yield Call(
        "linear_cross_entropy",
        ((5, 4), (7, 4)),
        lambda f, h, w: f.linear_cross_entropy(h, w, target),
        lambda h, w: F.cross_entropy(F.linear(h, w), target),
    )


EVERY = (
    _activations,
    _norms,
    _softmaxes,
    _images,
    _reductions,
    _lookups,
    _scans,
    _batch_norms,
    _positions,
    _pyramids,
    _losses,
)
CALLS = {c.name: c for each in EVERY for c in each()}


def results(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def gradients(found: Any, tensors: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Of a random linear combination of all results, for all tensors."""
    gen = torch.Generator().manual_seed(seed)
    outs = results(found)
    weights = [torch.randn(o.shape, generator=gen, dtype=torch.float64).to(o) for o in outs]
    return list(torch.autograd.grad(outs, tensors, weights))
