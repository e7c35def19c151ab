"""Layouts of a training step over many machines: what it would cost there, without having them.

>>> import deuteron as dt
>>> print(dt.distributed.predict(model, F.cross_entropy, (x, y), "h200", "dp4×tp2"))
>>> for found in dt.distributed.ranked(model, F.cross_entropy, (x, y), "h200", gpus=8):
...     print(found.line)

Training itself needs little from here: wrap the model with DDP, ``fully_shard`` or
``parallelize_module`` of torch.distributed and give it to ``dt.train_step``. :class:`Reduction`
says how to sum gradients in DDP in fewer bytes, and :func:`pipeline` cuts a model into stages for
torch's pipeline schedules. For inference, :func:`spread` divides a model that is too large for a
GPU between the GPU and its host.
"""

from deuteron.distributed.layout import Layout, layouts
from deuteron.distributed.pipeline import Cut, pipeline
from deuteron.distributed.predict import Prediction, predict, ranked
from deuteron.distributed.reduction import Reduction
from deuteron.distributed.spread import Placement, placement, spread
from deuteron.distributed.traffic import Traffic

__all__ = ["Cut", "Layout", "Placement", "Prediction", "Reduction", "Traffic", "layouts"]
__all__ += ["pipeline", "placement", "predict", "ranked", "spread"]
