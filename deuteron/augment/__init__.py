"""Image augmentation in one kernel: per-image random parameters, seeded, differentiable.

>>> from deuteron.augment import Pipeline, RandomAffine, ColorJitter, Normalize
>>> aug = Pipeline([RandomAffine(10), ColorJitter(0.4, 0.4, 0.4, 0.1)], seed=0)
>>> y = aug(x)          # help(Pipeline) has the rest

Read in this order: step, places, colours (what each step draws and means), spec (a list of
them, checked), draw (random numbers), emit (the meaning as a graph), run (who computes it) and
pipeline (what users call).
"""

from deuteron.augment.colours import Brightness as Brightness
from deuteron.augment.colours import ColorJitter as ColorJitter
from deuteron.augment.colours import Contrast as Contrast
from deuteron.augment.colours import Grayscale as Grayscale
from deuteron.augment.colours import HSVShift as HSVShift
from deuteron.augment.colours import Hue as Hue
from deuteron.augment.colours import Saturation as Saturation
from deuteron.augment.pipeline import Pipeline as Pipeline
from deuteron.augment.places import HorizontalFlip as HorizontalFlip
from deuteron.augment.places import Perspective as Perspective
from deuteron.augment.places import RandomAffine as RandomAffine
from deuteron.augment.places import RandomResizedCrop as RandomResizedCrop
from deuteron.augment.places import Rotate as Rotate
from deuteron.augment.places import VerticalFlip as VerticalFlip
from deuteron.augment.step import Normalize as Normalize
from deuteron.augment.step import ToDtype as ToDtype
from deuteron.augment.step import ToLayout as ToLayout

__all__ = sorted(
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", "").startswith("deuteron.augment")
)
