# ruff: noqa: F401
"""Modules that stand in for those of ``torch.nn``: the same arguments and state dicts, fused.

>>> import deuteron as dt
>>> norm = dt.nn.RMSNorm(4096)                  # load_state_dict of torch.nn.RMSNorm's fits
>>> y, stream = norm(x, residual=stream)        # what torch's does not do
>>> dt.nn.replace(model)                        # every module that has a stand-in, in place
>>> print(dt.nn.report(model))                  # which those are, and why others are not
>>> dt.nn.restore(model)                        # all as it was

Modules that only call one function are generated from a table, ``stand_in.RUNS``.
"""

from typing import TYPE_CHECKING, Any

from .activation import BiasAct, Dropout, GeGLU, LogSoftmax, ReGLU, Softmax, SwiGLU
from .attention import MultiheadAttention
from .conv import ConvBNAct, SeparableConv
from .cross_entropy import CrossEntropyLoss, LinearCrossEntropy
from .embedding import Embedding, RotaryEmbedding, SinusoidalEmbedding
from .host_embedding import HostEmbedding
from .moe import MoE
from .norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm, RMSNorm
from .norm import InstanceNorm1d as InstanceNorm1d
from .norm import InstanceNorm2d as InstanceNorm2d
from .norm import InstanceNorm3d as InstanceNorm3d
from .paged import PagedCache
from .quantized import QuantizedLinear, quantize
from .replace import Report, replace, report, restore
from .stand_in import scriptable as _scriptable
from .stand_in import stand_in_classes
from .sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:  # type checkers do not see the modules that are generated below

    def __getattr__(name: str) -> Any: ...


globals().update(stand_in_classes())
__all__ = sorted(
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", "").startswith("deuteron.nn")
)
for _name in __all__:
    _scriptable(globals()[_name])
