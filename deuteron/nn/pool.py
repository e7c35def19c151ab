"""Pooling layers: those of ``torch.nn``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deuteron import functional as F


class _MaxPool:
    pool: Any

    def forward(self: Any, input: Tensor) -> Any:
        return self.pool(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


class MaxPool1d(_MaxPool, nn.MaxPool1d):
    """The largest value in each window, as ``torch.nn.MaxPool1d``."""

    pool = staticmethod(F.max_pool1d)


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    """The largest value in each window, as ``torch.nn.MaxPool2d``."""

    pool = staticmethod(F.max_pool2d)


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    """The largest value in each window, as ``torch.nn.MaxPool3d``."""

    pool = staticmethod(F.max_pool3d)


class AvgPool1d(nn.AvgPool1d):
    """The mean of each window, as ``torch.nn.AvgPool1d``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.avg_pool1d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
        )


class AvgPool2d(nn.AvgPool2d):
    """The mean of each window, as ``torch.nn.AvgPool2d``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class AvgPool3d(nn.AvgPool3d):
    """The mean of each window, as ``torch.nn.AvgPool3d``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.avg_pool3d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """The mean of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveAvgPool1d``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(input, self.output_size)


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """The mean of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveAvgPool2d``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(input, self.output_size)


class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """The mean of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveAvgPool3d``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.adaptive_avg_pool3d(input, self.output_size)


class AdaptiveMaxPool1d(nn.AdaptiveMaxPool1d):
    """The largest of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveMaxPool1d``."""

    def forward(self, input: Tensor) -> Any:
        return F.adaptive_max_pool1d(input, self.output_size, self.return_indices)


class AdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """The largest of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveMaxPool2d``."""

    def forward(self, input: Tensor) -> Any:
        return F.adaptive_max_pool2d(input, self.output_size, self.return_indices)


class AdaptiveMaxPool3d(nn.AdaptiveMaxPool3d):
    """The largest of windows of which ``output_size`` remain, as ``torch.nn.AdaptiveMaxPool3d``."""

    def forward(self, input: Tensor) -> Any:
        return F.adaptive_max_pool3d(input, self.output_size, self.return_indices)
