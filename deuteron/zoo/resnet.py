"""Residual networks for image classification (ResNet-18 and -50).

Parameter names are those of torchvision's public checkpoints (``layer1.0.conv1.weight`` and so
on), so ``resnet50().load_state_dict(checkpoint)`` works on them unchanged.  The stride of a
bottleneck sits on its 3x3 convolution, as it does there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def _conv(c_in: int, c_out: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A bias-free convolution padded so that only the stride changes the size."""
    return nn.Conv2d(c_in, c_out, kernel, stride, dilation * (kernel // 2), dilation, bias=False)


def conv_bn_relu(c_in: int, c_out: int, kernel: int = 1, dilation: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size, batch norm and ReLU: parts of a sequence."""
    return [_conv(c_in, c_out, kernel, dilation=dilation), nn.BatchNorm2d(c_out), nn.ReLU()]


def _shortcut(c_in: int, c_out: int, stride: int) -> nn.Sequential | None:
    """The projection a skip connection needs when its two ends differ in shape, else None."""
    if stride == 1 and c_in == c_out:
        return None
    return nn.Sequential(_conv(c_in, c_out, 1, stride), nn.BatchNorm2d(c_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip connection (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, c_in: int, width: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(c_in, width, 3, stride, dilation)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = _conv(width, width, 3, 1, dilation)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(c_in, width * self.expansion, stride)

    def branch_end(self) -> tuple[Tensor, float]:
        return self.bn2.weight, 0.25

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + skip)


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand by four, and a skip connection (ResNet-50 and -101)."""

    expansion = 4

    def __init__(self, c_in: int, width: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        c_out = width * self.expansion
        self.conv1 = _conv(c_in, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride, dilation)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, c_out, 1)
        self.bn3 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(c_in, c_out, stride)

    def branch_end(self) -> tuple[Tensor, float]:
        return self.bn3.weight, 0.25

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + skip)


Block = type[BasicBlock] | type[Bottleneck]
Flags = Sequence[bool]
_NEVER = (False, False, False)


class ResNetBackbone(nn.Module):
    """The stem and the four stages of a ResNet, without pooling and classifier.

    ``replace_stride_with_dilation`` says, for stages two, three and four, whether to keep the
    resolution and dilate the 3x3 convolutions instead of halving it.  Leaving all three False
    gives output stride 32; ``(False, True, True)`` gives 8.
    """

    def __init__(
        self, block: Block, depths: Sequence[int], replace_stride_with_dilation: Flags = _NEVER
    ) -> None:
        super().__init__()
        if len(depths) != 4:
            raise ValueError(f"depths must hold one number per stage (4), got {list(depths)}")
        if len(replace_stride_with_dilation) != 3:
            held = "must hold one flag for each of stages 2, 3 and 4"
            got = list(replace_stride_with_dilation)
            raise ValueError(f"replace_stride_with_dilation {held}, got {got}")
        self._channels = 64
        self._dilation = 1
        self.conv1 = _conv(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        dilate2, dilate3, dilate4 = replace_stride_with_dilation
        self.layer1 = self._stage(block, 64, depths[0], 1, False)
        self.layer2 = self._stage(block, 128, depths[1], 2, dilate2)
        self.layer3 = self._stage(block, 256, depths[2], 2, dilate3)
        self.layer4 = self._stage(block, 512, depths[3], 2, dilate4)
        self.out_channels = self._channels

    def _stage(
        self, block: Block, width: int, depth: int, stride: int, dilate: bool
    ) -> nn.Sequential:
        # The first block of a dilated stage still runs at the dilation of the stage before it.
        first_dilation = self._dilation
        if dilate:
            self._dilation, stride = self._dilation * stride, 1
        blocks = [block(self._channels, width, stride, first_dilation)]
        self._channels = width * block.expansion
        blocks += [block(self._channels, width, 1, self._dilation) for _ in range(depth - 1)]
        return nn.Sequential(*blocks)

    def stages(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The feature maps after each of the four stages, finest first."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        c2 = self.layer1(x)
        c3 = self.layer2(c2)
        c4 = self.layer3(c3)
        return c2, c3, c4, self.layer4(c4)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)[-1]


class ResNet(ResNetBackbone):
    """A ResNet classifier: (batch, 3, height, width) images to (batch, num_classes) logits."""

    def __init__(
        self,
        block: Block,
        depths: Sequence[int],
        num_classes: int = 1000,
        replace_stride_with_dilation: Flags = _NEVER,
    ) -> None:
        super().__init__(block, depths, replace_stride_with_dilation)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self.out_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.avgpool(super().forward(x)), 1))


def resnet18(num_classes: int = 1000, replace_stride_with_dilation: Flags = _NEVER) -> ResNet:
    """ResNet-18, 11.7 M parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, replace_stride_with_dilation)


def resnet50(num_classes: int = 1000, replace_stride_with_dilation: Flags = _NEVER) -> ResNet:
    """ResNet-50, 25.6 M parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, replace_stride_with_dilation)
