"""DeepLabV3 semantic segmentation on a dilated ResNet-50.

Parameter names are those of torchvision's public checkpoints.  Those checkpoints also hold an
auxiliary head: build with ``aux=True`` to load one strictly.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .resnet import Bottleneck, ResNetBackbone, conv_bn_relu


class ImagePooling(nn.Sequential):
    """The image-level branch of ASPP: global mean, 1x1 convolution, broadcast back to size."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), *conv_bn_relu(c_in, c_out))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        for stage in self:
            x = stage(x)
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: parallel dilated branches, concatenated and projected."""

    def __init__(self, c_in: int, rates: Sequence[int], c_out: int = 256) -> None:
        super().__init__()
        branches: list[nn.Module] = [nn.Sequential(*conv_bn_relu(c_in, c_out))]
        branches += [nn.Sequential(*conv_bn_relu(c_in, c_out, 3, rate)) for rate in rates]
        branches.append(ImagePooling(c_in, c_out))
        self.convs = nn.ModuleList(branches)
        self.project = nn.Sequential(*conv_bn_relu(len(branches) * c_out, c_out), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([branch(x) for branch in self.convs], dim=1))


class DeepLabHead(nn.Sequential):
    """ASPP, a 3x3 convolution and the per-pixel classifier."""

    def __init__(self, c_in: int, num_classes: int, rates: Sequence[int] = (12, 24, 36)) -> None:
        super().__init__(
            ASPP(c_in, rates), *conv_bn_relu(256, 256, 3), nn.Conv2d(256, num_classes, 1)
        )


class FCNHead(nn.Sequential):
    """The auxiliary head: a 3x3 convolution to a quarter of the channels, then the classifier."""

    def __init__(self, c_in: int, num_classes: int) -> None:
        narrow = c_in // 4
        classify = nn.Conv2d(narrow, num_classes, 1)
        super().__init__(*conv_bn_relu(c_in, narrow, 3), nn.Dropout(0.1), classify)


class DeepLabV3(nn.Module):
    """Backbone plus heads.

    ``forward`` returns a dictionary: ``"out"`` holds logits (batch, num_classes, height, width)
    at the size of the input, and ``"aux"`` the auxiliary head's where there is one.
    """

    def __init__(
        self,
        backbone: ResNetBackbone,
        classifier: nn.Module,
        aux_classifier: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, classifier
        self.aux_classifier = aux_classifier

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = x.shape[-2:]
        _, _, c4, c5 = self.backbone.stages(x)
        logits = {"out": self.classifier(c5)}
        if self.aux_classifier is not None:
            logits["aux"] = self.aux_classifier(c4)
        return {
            head: F.interpolate(value, size=size, mode="bilinear", align_corners=False)
            for head, value in logits.items()
        }


def deeplabv3_resnet50(num_classes: int = 21, aux: bool = False) -> DeepLabV3:
    """DeepLabV3 on ResNet-50 at output stride 8, ASPP rates 12, 24 and 36."""
    backbone = ResNetBackbone(Bottleneck, (3, 4, 6, 3), (False, True, True))
    c5 = backbone.out_channels
    aux_head = FCNHead(c5 // 2, num_classes) if aux else None
    return DeepLabV3(backbone, DeepLabHead(c5, num_classes), aux_head)
