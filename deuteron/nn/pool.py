"""Pooling layers: those of ``torch.nn``."""

from torch import nn

from deuteron import functional as F
from deuteron.nn.forward import runs


@runs(F.max_pool1d)
class MaxPool1d(nn.MaxPool1d):
    """The largest value in each window, as ``torch.nn.MaxPool1d``."""


@runs(F.max_pool2d)
class MaxPool2d(nn.MaxPool2d):
    """The largest value in each window, as ``torch.nn.MaxPool2d``."""


@runs(F.max_pool3d)
class MaxPool3d(nn.MaxPool3d):
    """The largest value in each window, as ``torch.nn.MaxPool3d``."""


@runs(F.avg_pool1d)
class AvgPool1d(nn.AvgPool1d):
    """The mean of each window, as ``torch.nn.AvgPool1d``."""


@runs(F.avg_pool2d)
class AvgPool2d(nn.AvgPool2d):
    """The mean of each window, as ``torch.nn.AvgPool2d``."""


@runs(F.avg_pool3d)
class AvgPool3d(nn.AvgPool3d):
    """The mean of each window, as ``torch.nn.AvgPool3d``."""


@runs(F.adaptive_avg_pool1d)
class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """The mean of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveAvgPool1d``."""


@runs(F.adaptive_avg_pool2d)
class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """The mean of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveAvgPool2d``."""


@runs(F.adaptive_avg_pool3d)
class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """The mean of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveAvgPool3d``."""


@runs(F.adaptive_max_pool1d)
class AdaptiveMaxPool1d(nn.AdaptiveMaxPool1d):
    """The largest of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveMaxPool1d``."""


@runs(F.adaptive_max_pool2d)
class AdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """The largest of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveMaxPool2d``."""


@runs(F.adaptive_max_pool3d)
class AdaptiveMaxPool3d(nn.AdaptiveMaxPool3d):
    """The largest of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveMaxPool3d``."""
