"""Modules that stand in for those of ``torch.nn``: the same arguments and state dicts, fused.

>>> import deuteron as dt
>>> norm = dt.nn.RMSNorm(4096)                  # load_state_dict of torch.nn.RMSNorm's fits
>>> y, stream = norm(x, residual=stream)        # what torch's does not do
>>> dt.nn.replace(model)                        # every module that has a stand-in, in place

Those that one function is all of are made from a table, ``stand_in.FORMULAS``.
"""

from typing import TYPE_CHECKING, Any

from deuteron.nn.activation import BiasAct as BiasAct
from deuteron.nn.activation import Dropout as Dropout
from deuteron.nn.activation import GeGLU as GeGLU
from deuteron.nn.activation import LogSoftmax as LogSoftmax
from deuteron.nn.activation import ReGLU as ReGLU
from deuteron.nn.activation import Softmax as Softmax
from deuteron.nn.activation import SwiGLU as SwiGLU
from deuteron.nn.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from deuteron.nn.cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from deuteron.nn.embedding import Embedding as Embedding
from deuteron.nn.embedding import RotaryEmbedding as RotaryEmbedding
from deuteron.nn.embedding import SinusoidalEmbedding as SinusoidalEmbedding
from deuteron.nn.norm import BatchNorm1d as BatchNorm1d
from deuteron.nn.norm import BatchNorm2d as BatchNorm2d
from deuteron.nn.norm import BatchNorm3d as BatchNorm3d
from deuteron.nn.norm import GroupNorm as GroupNorm
from deuteron.nn.norm import InstanceNorm1d as InstanceNorm1d
from deuteron.nn.norm import InstanceNorm2d as InstanceNorm2d
from deuteron.nn.norm import InstanceNorm3d as InstanceNorm3d
from deuteron.nn.norm import LayerNorm as LayerNorm
from deuteron.nn.norm import RMSNorm as RMSNorm
from deuteron.nn.stand_in import made as _made
from deuteron.nn.stand_in import replace as replace
from deuteron.nn.stand_in import scriptable as _scriptable

if TYPE_CHECKING:  # made below, where no reader of source sees them

    def __getattr__(name: str) -> Any: ...


globals().update(_made())
__all__ = sorted(
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", "").startswith("deuteron.nn")
)
for _name in __all__:
    _scriptable(globals()[_name])
