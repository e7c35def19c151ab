"""The classic U-Net for semantic segmentation, with batch norm and padded convolutions.

Parameter names follow the widely used public PyTorch U-Net checkpoints (``inc.double_conv.0``,
``down1.maxpool_conv.1.double_conv.0``, ``up1.up``, ``outc.conv``).
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .resnet import conv_bn_relu


class DoubleConv(nn.Sequential):
    """Twice a 3x3 convolution, batch norm and ReLU."""

    def __init__(self, c_in: int, c_out: int, c_mid: int | None = None) -> None:
        c_mid = c_out if c_mid is None else c_mid
        layers = [*conv_bn_relu(c_in, c_mid, 3), *conv_bn_relu(c_mid, c_out, 3)]
        super().__init__(OrderedDict(double_conv=nn.Sequential(*layers)))


class Down(nn.Sequential):
    """Halve the resolution by max pooling, then a double convolution."""

    def __init__(self, c_in: int, c_out: int) -> None:
        both = nn.Sequential(nn.MaxPool2d(2), DoubleConv(c_in, c_out))
        super().__init__(OrderedDict(maxpool_conv=both))


class Up(nn.Module):
    """Double the resolution, concatenate the skip, then a double convolution.

    An input whose size is odd loses a row or column on the way down; the upsampled map is padded
    with zeros to the size of the skip.
    """

    def __init__(self, c_in: int, c_out: int, bilinear: bool) -> None:
        super().__init__()
        self.up: nn.Module
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(c_in, c_out, c_in // 2)
        else:
            self.up = nn.ConvTranspose2d(c_in, c_in // 2, 2, stride=2)
            self.conv = DoubleConv(c_in, c_out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        dh = skip.shape[-2] - x.shape[-2]
        dw = skip.shape[-1] - x.shape[-1]
        if dh or dw:  # shapes only: no padding is recorded where the sizes already agree
            x = F.pad(x, (dw // 2, dw - dw // 2, dh // 2, dh - dh // 2))
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    """Four levels down, four up: images to logits (batch, num_classes, height, width).

    31 M parameters at width 64 with transposed convolutions.

    ``width`` is the number of channels at full resolution; each level down doubles it.
    ``bilinear`` upsamples by interpolation instead of by transposed convolution.  Height and
    width must be at least 16.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 2, bilinear: bool = False, width: int = 64
    ) -> None:
        super().__init__()
        # Interpolation keeps the channels, so the decoder above it works with half as many.
        half = 2 if bilinear else 1
        self.inc = DoubleConv(in_channels, width)
        self.down1 = Down(width, 2 * width)
        self.down2 = Down(2 * width, 4 * width)
        self.down3 = Down(4 * width, 8 * width)
        self.down4 = Down(8 * width, 16 * width // half)
        self.up1 = Up(16 * width, 8 * width // half, bilinear)
        self.up2 = Up(8 * width, 4 * width // half, bilinear)
        self.up3 = Up(4 * width, 2 * width // half, bilinear)
        self.up4 = Up(2 * width, width, bilinear)
        self.outc = nn.Sequential(OrderedDict(conv=nn.Conv2d(width, num_classes, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x = self.up1(self.down4(x4), x4)
        x = self.up2(x, x3)
        x = self.up3(x, x2)
        return self.outc(self.up4(x, x1))
