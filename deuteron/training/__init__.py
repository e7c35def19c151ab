"""``dt.train_step``: everything between two batches as one call; checkpoints of it."""

from deuteron.training.checkpoint import Checkpoints
from deuteron.training.step import TrainStep, train_step

__all__ = ["Checkpoints", "TrainStep", "train_step"]
