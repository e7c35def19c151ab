"""Image augmentation in one kernel: per-image random parameters, seeded, differentiable.

>>> from deuteron.augment import Pipeline, RandomAffine, ColorJitter, Normalize
>>> aug = Pipeline([RandomAffine(10), ColorJitter(0.4, 0.4, 0.4, 0.1)], seed=0)
>>> y = aug(x)          # help(Pipeline) has the rest

Read in this order: step, places, colours, steps (what each step draws and means), recipe (a list of
them, checked), draw (random numbers), emit (the meaning as a graph), run (who computes it) and
pipeline (what users call).
"""

from deuteron.augment.colours import (
    Brightness,
    ColorJitter,
    Contrast,
    Grayscale,
    HSVShift,
    Hue,
    Saturation,
)
from deuteron.augment.pipeline import Pipeline
from deuteron.augment.places import (
    HorizontalFlip,
    Perspective,
    RandomAffine,
    RandomResizedCrop,
    Rotate,
    VerticalFlip,
)
from deuteron.augment.steps import Normalize, ToDtype, ToLayout

__all__ = [
    "Brightness",
    "ColorJitter",
    "Contrast",
    "Grayscale",
    "HSVShift",
    "HorizontalFlip",
    "Hue",
    "Normalize",
    "Perspective",
    "Pipeline",
    "RandomAffine",
    "RandomResizedCrop",
    "Rotate",
    "Saturation",
    "ToDtype",
    "ToLayout",
    "VerticalFlip",
]
