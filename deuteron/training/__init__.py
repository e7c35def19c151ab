"""``dt.train_step``, a whole training step as one call, and ``dt.Checkpoints`` of such a step."""

from deuteron.training.checkpoint import Checkpoints
from deuteron.training.step import TrainStep, train_step

__all__ = ["Checkpoints", "TrainStep", "train_step"]
