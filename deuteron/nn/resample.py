"""Resampling layers: those of ``torch.nn``."""

from __future__ import annotations

from torch import Tensor, nn

from deuteron import functional as F


class Upsample(nn.Upsample):
    """Images [N, C, …] at another size, as ``torch.nn.Upsample``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.interpolate(
            input,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            self.recompute_scale_factor,
        )


class PixelShuffle(nn.PixelShuffle):
    """[…, C·r², H, W] to […, C, H·r, W·r], as ``torch.nn.PixelShuffle``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.pixel_shuffle(input, self.upscale_factor)


class PixelUnshuffle(nn.PixelUnshuffle):
    """[…, C, H·r, W·r] to […, C·r², H, W], as ``torch.nn.PixelUnshuffle``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.pixel_unshuffle(input, self.downscale_factor)
