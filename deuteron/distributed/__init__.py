"""Layouts of many machines: what a training step would cost on them, without any of them.

>>> import deuteron as dt
>>> print(dt.distributed.predict(model, F.cross_entropy, (x, y), "h200", "dp4×tp2"))
>>> for found in dt.distributed.ranked(model, F.cross_entropy, (x, y), "h200", gpus=8):
...     print(found.line)

Training itself needs nothing from here: wrap the model with DDP, ``fully_shard`` or
``parallelize_module`` of torch.distributed and give it to ``dt.train_step``.
"""

from deuteron.distributed.layout import Layout, layouts
from deuteron.distributed.predict import Prediction, predict, ranked
from deuteron.distributed.reduction import Reduction
from deuteron.distributed.traffic import Traffic

__all__ = ["Layout", "Prediction", "Reduction", "Traffic", "layouts", "predict", "ranked"]
