"""MobileNetV2 and MobileNetV3 (large) for image classification.

Parameter names are those of torchvision's public checkpoints (``features.0.0.weight``,
``features.4.block.2.fc1.weight`` and so on).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

_Norm = Callable[[int], nn.BatchNorm2d]

_v3_norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)


def _round8(channels: float) -> int:
    """The multiple of eight nearest to ``channels``, never more than a tenth below it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _unit(
    c_in: int,
    c_out: int,
    kernel: int = 1,
    stride: int = 1,
    *,
    groups: int = 1,
    norm: _Norm = nn.BatchNorm2d,
    act: type[nn.Module] | None = nn.ReLU6,
) -> nn.Sequential:
    """Convolution, batch norm and, unless ``act`` is None, an activation."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    unit = nn.Sequential(conv, norm(c_out))
    if act is not None:
        unit.append(act())
    return unit


class _Inverted(nn.Module):
    """What both versions of the block share: a skip connection, where the shapes allow it, around
    all layers."""

    def __init__(self, residual: bool, hardswish: int = 0, squeeze: int = 0) -> None:
        super().__init__()
        self.use_res_connect = residual
        # The scale that keeps the signal's size in a random model, whose other weights are drawn to
        # suit rectifiers. No rectifier follows the projection, hence 1/sqrt(2); less where it adds
        # to a skip. Hardswishes pass less than rectifiers do, and the gates about half of that.
        scale = 0.4 if residual else 0.7
        self.closing_scale = scale * (1.3 if hardswish else 1.0) * (1.8 if squeeze else 1.0)

    def branch_end(self) -> tuple[Tensor, float]:
        *_, norm = (m for m in self.modules() if isinstance(m, nn.BatchNorm2d))
        return norm.weight, self.closing_scale

    def forward(self, x: Tensor) -> Tensor:
        (layers,) = self.children()
        return x + layers(x) if self.use_res_connect else layers(x)


class InvertedResidualV2(_Inverted):
    """Expand, depthwise 3x3, project; with a skip connection where the shapes allow it."""

    def __init__(self, c_in: int, c_out: int, stride: int, expand: int) -> None:
        super().__init__(stride == 1 and c_in == c_out)
        hidden = c_in * expand
        self.conv = nn.Sequential(
            *([] if expand == 1 else [_unit(c_in, hidden)]),
            _unit(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, c_out, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )


class MobileNetV2(nn.Module):
    """MobileNetV2: (batch, 3, height, width) images to (batch, num_classes) logits."""

    # expansion, channels, blocks, stride of the first block
    STAGES: Sequence[tuple[int, int, int, int]] = (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )

    def __init__(self, num_classes: int = 1000, width: float = 1.0) -> None:
        super().__init__()
        channels = _round8(32 * width)
        last = _round8(1280 * max(1.0, width))
        features: list[nn.Module] = [_unit(3, channels, 3, 2)]
        for expand, base, depth, stride in self.STAGES:
            c_out = _round8(base * width)
            for index in range(depth):
                step = stride if index == 0 else 1
                features.append(InvertedResidualV2(channels, c_out, step, expand))
                channels = c_out
        features.append(_unit(channels, last))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate that is computed from the means of all channels."""

    def __init__(self, channels: int, squeeze: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeeze, 1)
        self.fc2 = nn.Conv2d(squeeze, channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.fc1(self.avgpool(x)))
        gate: Tensor = self.scale_activation(self.fc2(hidden))
        return gate * x


class BlockV3(NamedTuple):
    """One row of the MobileNetV3 tables."""

    c_in: int
    kernel: int
    hidden: int
    c_out: int
    squeeze: int  # 1 with squeeze-excite
    hardswish: int  # 1 for hardswish, 0 for ReLU
    stride: int


class InvertedResidualV3(_Inverted):
    """Expand, depthwise, squeeze-excite, project; with a skip where the shapes allow it."""

    def __init__(self, row: BlockV3) -> None:
        super().__init__(row.stride == 1 and row.c_in == row.c_out, row.hardswish, row.squeeze)
        act: type[nn.Module] = nn.Hardswish if row.hardswish else nn.ReLU
        hidden = row.hidden
        unit = partial(_unit, norm=_v3_norm, act=act)
        layers: list[nn.Module] = [] if hidden == row.c_in else [unit(row.c_in, hidden)]
        layers.append(unit(hidden, hidden, row.kernel, row.stride, groups=hidden))
        if row.squeeze:
            layers.append(SqueezeExcitation(hidden, _round8(hidden // 4)))
        self.block = nn.Sequential(*layers, unit(hidden, row.c_out, act=None))


class MobileNetV3(nn.Module):
    """MobileNetV3: (batch, 3, height, width) images to (batch, num_classes) logits."""

    def __init__(self, rows: Sequence[BlockV3], last: int, num_classes: int = 1000) -> None:
        super().__init__()
        top = 6 * rows[-1].c_out
        self.features = nn.Sequential(
            _unit(3, rows[0].c_in, 3, 2, norm=_v3_norm, act=nn.Hardswish),
            *(InvertedResidualV3(row) for row in rows),
            _unit(rows[-1].c_out, top, norm=_v3_norm, act=nn.Hardswish),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(top, last), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(last, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _rows(table: str) -> list[BlockV3]:
    return [BlockV3(*map(int, row.split())) for row in table.split("|")]


_LARGE = """16 3 16 16 0 0 1 | 16 3 64 24 0 0 2 | 24 3 72 24 0 0 1 | 24 5 72 40 1 0 2
    | 40 5 120 40 1 0 1 | 40 5 120 40 1 0 1 | 40 3 240 80 0 1 2 | 80 3 200 80 0 1 1
    | 80 3 184 80 0 1 1 | 80 3 184 80 0 1 1 | 80 3 480 112 1 1 1 | 112 3 672 112 1 1 1
    | 112 5 672 160 1 1 2 | 160 5 960 160 1 1 1 | 160 5 960 160 1 1 1"""


def mobilenet_v2(num_classes: int = 1000, width: float = 1.0) -> MobileNetV2:
    """MobileNetV2, 3.5 M parameters at width 1."""
    return MobileNetV2(num_classes, width)


def mobilenet_v3_large(num_classes: int = 1000) -> MobileNetV3:
    """MobileNetV3 large, 5.5 M parameters."""
    return MobileNetV3(_rows(_LARGE), 1280, num_classes)
