# ruff: noqa: F401
"""Image augmentation in one kernel: per-image random parameters, seeded, differentiable.

>>> from deuteron.augment import Pipeline, RandomAffine, ColorJitter, Normalize
>>> aug = Pipeline([RandomAffine(10), ColorJitter(0.4, 0.4, 0.4, 0.1)], seed=0)
>>> y = aug(x)          # help(Pipeline) has the rest

Read the modules in this order: step, places, colours (what each step draws and does), spec (a
checked list of steps), draw (random numbers), emit (a pipeline as a graph), run (how it is computed
on each device) and pipeline (what users call).
"""

from .colours import Brightness, ColorJitter, Contrast, Grayscale, HSVShift, Hue, Saturation
from .pipeline import Pipeline
from .places import HorizontalFlip, Perspective, RandomAffine, Rotate, VerticalFlip
from .places import RandomResizedCrop as RandomResizedCrop
from .step import Normalize, ToDtype, ToLayout

__all__ = sorted(
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", "").startswith("deuteron.augment")
)
