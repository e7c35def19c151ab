"""Modules that stand in for those of ``torch.nn``: the same arguments and state dicts, fused.

>>> import deuteron as dt
>>> norm = dt.nn.RMSNorm(4096)                  # load_state_dict of torch.nn.RMSNorm's fits
>>> y, stream = norm(x, residual=stream)        # what torch's does not do
>>> dt.nn.replace(model)                        # every module that has a stand-in, in place
"""

from deuteron.nn.activation import CELU as CELU
from deuteron.nn.activation import ELU as ELU
from deuteron.nn.activation import GELU as GELU
from deuteron.nn.activation import GLU as GLU
from deuteron.nn.activation import SELU as SELU
from deuteron.nn.activation import BiasAct as BiasAct
from deuteron.nn.activation import Dropout as Dropout
from deuteron.nn.activation import GeGLU as GeGLU
from deuteron.nn.activation import Hardshrink as Hardshrink
from deuteron.nn.activation import Hardsigmoid as Hardsigmoid
from deuteron.nn.activation import Hardswish as Hardswish
from deuteron.nn.activation import Hardtanh as Hardtanh
from deuteron.nn.activation import LeakyReLU as LeakyReLU
from deuteron.nn.activation import LogSigmoid as LogSigmoid
from deuteron.nn.activation import LogSoftmax as LogSoftmax
from deuteron.nn.activation import Mish as Mish
from deuteron.nn.activation import PReLU as PReLU
from deuteron.nn.activation import ReGLU as ReGLU
from deuteron.nn.activation import ReLU as ReLU
from deuteron.nn.activation import ReLU6 as ReLU6
from deuteron.nn.activation import Sigmoid as Sigmoid
from deuteron.nn.activation import SiLU as SiLU
from deuteron.nn.activation import Softmax as Softmax
from deuteron.nn.activation import Softplus as Softplus
from deuteron.nn.activation import Softshrink as Softshrink
from deuteron.nn.activation import Softsign as Softsign
from deuteron.nn.activation import SwiGLU as SwiGLU
from deuteron.nn.activation import Tanh as Tanh
from deuteron.nn.activation import Tanhshrink as Tanhshrink
from deuteron.nn.activation import Threshold as Threshold
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
from deuteron.nn.pool import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from deuteron.nn.pool import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from deuteron.nn.pool import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from deuteron.nn.pool import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from deuteron.nn.pool import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from deuteron.nn.pool import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from deuteron.nn.pool import AvgPool1d as AvgPool1d
from deuteron.nn.pool import AvgPool2d as AvgPool2d
from deuteron.nn.pool import AvgPool3d as AvgPool3d
from deuteron.nn.pool import MaxPool1d as MaxPool1d
from deuteron.nn.pool import MaxPool2d as MaxPool2d
from deuteron.nn.pool import MaxPool3d as MaxPool3d
from deuteron.nn.resample import PixelShuffle as PixelShuffle
from deuteron.nn.resample import PixelUnshuffle as PixelUnshuffle
from deuteron.nn.resample import Upsample as Upsample
from deuteron.nn.script import scriptable as _scriptable
from deuteron.nn.swap import replace as replace

__all__ = sorted(
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", "").startswith("deuteron.nn")
)
_scriptable(globals()[name] for name in __all__)
