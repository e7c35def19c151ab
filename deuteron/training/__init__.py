"""``dt.train_step``: everything between two batches as one call."""

from deuteron.training.step import TrainStep, train_step

__all__ = ["TrainStep", "train_step"]
