"""Resampling layers: those of ``torch.nn``."""

from torch import nn

from deuteron import functional as F
from deuteron.nn.forward import runs


@runs(F.interpolate)
class Upsample(nn.Upsample):
    """Images [N, C, …] at another size, as ``torch.nn.Upsample``."""


@runs(F.pixel_shuffle)
class PixelShuffle(nn.PixelShuffle):
    """[…, C·r², H, W] to […, C, H·r, W·r], as ``torch.nn.PixelShuffle``."""


@runs(F.pixel_unshuffle)
class PixelUnshuffle(nn.PixelUnshuffle):
    """[…, C, H·r, W·r] to […, C·r², H, W], as ``torch.nn.PixelUnshuffle``."""
