"""The calls of bench/small.py that bench/functional.py does not have, and pairs of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron as dt
from bench.functional import Case, both, small_cases

f = dt.functional
ROWS, COLUMNS, CHANNELS, SIZE = 8, 64, 64, 8
X, W, C = (ROWS, COLUMNS), (COLUMNS,), (CHANNELS,)
IMAGE = (1, CHANNELS, SIZE, SIZE)
HEADS = (1, 8, 2, 64)  # queries and keys, [batch, tokens, heads, features]


def every_case() -> Iterator[Case]:
    yield from small_cases()
    yield from _rows()
    yield from _activations()
    yield from _reductions()
    yield from _images()


def _rows() -> Iterator[Case]:
    yield Case(
        "softmax, bool mask",
        (X,),
        lambda x: f.softmax(x, mask=_mask(x.device)),
        lambda x: F.softmax(x.masked_fill(~_mask(x.device), float("-inf")), -1),
    )
    yield both(
        "cross_entropy, smoothed",
        (X,),
        lambda m, x: m.cross_entropy(x, _index(x.device), label_smoothing=0.1),
    )
    yield Case(
        "bias+dropout+residual, no seed",
        (X, W, X),
        lambda x, b, r: f.bias_dropout_residual(x, b, r, 0.1),
        lambda x, b, r: r + F.dropout(x + b, 0.1),
    )
    yield Case("reglu", (X, X), f.reglu, lambda g, u: F.relu(g) * u)
    yield Case(
        "rope", (HEADS, HEADS), lambda q, k: f.rope(q, k, *_angles(q.device, q.dtype)), _rotated
    )
    yield Case(
        "embedding+position",
        (X, X),
        lambda w, p: f.embedding(_index(w.device), w, position=p),
        lambda w, p: F.embedding(_index(w.device), w) + p,
    )


def _activations() -> Iterator[Case]:
    for name in """relu6 leaky_relu sigmoid tanh mish hardswish hardsigmoid hardtanh elu selu celu
        softsign logsigmoid tanhshrink softshrink hardshrink""".split():
        yield Case(name, (X,), getattr(f, name), getattr(F, name, None) or getattr(torch, name))
    yield both("threshold", (X,), lambda m, x: m.threshold(x, 0.1, 0.0))


def _reductions() -> Iterator[Case]:
    yield Case("prod", (X,), lambda x: f.prod(x, -1), lambda x: x.prod(-1))
    yield Case("amin", (X,), lambda x: f.amin(x, -1), lambda x: x.amin(-1))
    yield Case("argmax", (X,), lambda x: f.argmax(x, -1), lambda x: x.argmax(-1))
    yield Case("cumprod", (X,), lambda x: f.cumprod(x, -1), lambda x: x.cumprod(-1))
    yield Case("cummax", (X,), lambda x: f.cummax(x, -1)[0], lambda x: x.cummax(-1)[0])
    yield Case("sort", (X,), lambda x: f.sort(x)[0], lambda x: x.sort(stable=True)[0])
    yield Case(
        "histogram",
        (X,),
        lambda x: f.histogram(x, 16, -2.0, 2.0),
        lambda x: torch.histc(x, 16, -2.0, 2.0),
        dtype=torch.float32,
    )
    yield Case(
        "permute", (X,), lambda x: f.permute(x, (1, 0)), lambda x: x.permute(1, 0).contiguous()
    )


def _images() -> Iterator[Case]:
    yield both(
        "batch_norm", (IMAGE, C, C), lambda m, x, w, b: m.batch_norm(x, *_statistics(x), w, b)
    )
    yield Case(
        "batch_norm+relu",
        (IMAGE, C, C),
        lambda x, w, b: f.batch_norm(x, *_statistics(x), w, b, activation="relu"),
        lambda x, w, b: F.relu(F.batch_norm(x, *_statistics(x), w, b)),
    )
    yield both("adaptive_max_pool2d 2", (IMAGE,), lambda m, x: m.adaptive_max_pool2d(x, 2))
    yield Case("global_avg_pool", (IMAGE,), f.global_avg_pool, lambda x: x.mean((2, 3), True))
    yield Case(
        "weighted_pool2d",
        (IMAGE, (2, 2)),
        lambda x, w: f.weighted_pool2d(x, w, 2),
        lambda x, w: F.conv2d(x, w.expand(CHANNELS, 1, 2, 2), stride=2, groups=CHANNELS),
    )
    yield Case(
        "pyramid_pool2d",
        (IMAGE,),
        lambda x: f.pyramid_pool2d(x, (1, 2, 4)),
        lambda x: torch.cat([F.adaptive_avg_pool2d(x, n).flatten(2) for n in (1, 2, 4)], -1),
    )
    for mode, more in (("bicubic", {}), ("area", {}), ("bilinear", {"antialias": True})):
        given: dict[str, Any] = {"size": (5, 5), "mode": mode, **more}
        yield both(
            f"{mode} 5×5{', antialias' if more else ''}",
            (IMAGE,),
            lambda m, x, given=given: m.interpolate(x, **given),
            dtype=torch.float32,
        )
    yield both("pixel_unshuffle 2", (IMAGE,), lambda m, x: m.pixel_unshuffle(x, 2))


def modules() -> Iterator[tuple[str, Callable[[Any], nn.Module], tuple[int, ...]]]:
    """Modules that ``dt.nn`` and ``torch.nn`` both have, and the shape of what they take."""
    yield "LayerNorm", lambda nn: nn.LayerNorm(COLUMNS), X
    yield "RMSNorm", lambda nn: nn.RMSNorm(COLUMNS), X
    yield "GroupNorm", lambda nn: nn.GroupNorm(8, CHANNELS), IMAGE
    yield "InstanceNorm2d", lambda nn: nn.InstanceNorm2d(CHANNELS), IMAGE
    yield "BatchNorm2d, training", lambda nn: nn.BatchNorm2d(CHANNELS), IMAGE
    yield "BatchNorm2d", lambda nn: nn.BatchNorm2d(CHANNELS).eval(), IMAGE
    for name in "ReLU LeakyReLU PReLU GELU SiLU Sigmoid Tanh Hardswish Softplus GLU".split():
        yield name, lambda nn, name=name: getattr(nn, name)(), X
    yield "Softmax", lambda nn: nn.Softmax(-1), X
    yield "LogSoftmax", lambda nn: nn.LogSoftmax(-1), X
    yield "Dropout", lambda nn: nn.Dropout(0.1), X
    yield "MaxPool2d", lambda nn: nn.MaxPool2d(3, 2, 1), IMAGE
    yield "AvgPool2d", lambda nn: nn.AvgPool2d(2), IMAGE
    yield "AdaptiveAvgPool2d", lambda nn: nn.AdaptiveAvgPool2d(1), IMAGE
    yield "Upsample, nearest", lambda nn: nn.Upsample(scale_factor=2), IMAGE
    yield "Upsample, bilinear", lambda nn: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE
    yield "PixelShuffle", lambda nn: nn.PixelShuffle(2), IMAGE
    yield "Embedding", lambda nn: _Looked(nn.Embedding(ROWS, COLUMNS)), ()
    yield "CrossEntropyLoss", lambda nn: _Judged(nn.CrossEntropyLoss()), X


class _Looked(nn.Module):
    """A table looked up at indices that are at hand."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Any:
        return self.table(_index(x.device))


class _Judged(_Looked):
    """A loss whose targets are at hand."""

    def forward(self, x: Tensor) -> Any:
        return self.table(x, _index(x.device))


@lru_cache
def _index(device: torch.device) -> Tensor:
    return torch.arange(ROWS, device=device)


@lru_cache
def _mask(device: torch.device) -> Tensor:
    return torch.arange(ROWS * COLUMNS, device=device).reshape(X) % 3 > 0


def _statistics(like: Tensor) -> tuple[Tensor, Tensor]:
    return _statistics_on(like.device, like.dtype)


@lru_cache
def _statistics_on(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = torch.zeros(2, CHANNELS, device=device, dtype=dtype)
    return made[0], made[1] + 1


@lru_cache
def _angles(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = HEADS[-1] // 2
    angle = torch.arange(HEADS[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


@lru_cache
def _whole_angles(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """As models keep them: [tokens, 1, features], both halves alike."""
    return [torch.cat((t, t), -1)[:, None] for t in _angles(device, dtype)]


def _rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _whole_angles(q.device, q.dtype)
    return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
