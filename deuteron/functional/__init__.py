"""Eager functions over the graph's operators: fused, with gradients, for ``torch.compile`` too.

>>> import deuteron as dt
>>> y, stream = dt.functional.rms_norm(x, (4096,), w, residual=stream)   # one kernel
>>> y = dt.functional.swiglu(gate, up)
>>> print(dt.functional.explain(dt.functional.swiglu, gate, up))          # what ran, and why

Arguments are those of ``torch.nn.functional`` where it has the function. Each shape is planned
once, at its first call, and kept; small calls go to torch's own functions (:class:`delegation`).
"""

from deuteron.functional.activation import (
    bias_act,
    bias_dropout_residual,
    celu,
    dropout,
    elu,
    geglu,
    gelu,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    log_sigmoid,
    logsigmoid,
    mish,
    prelu,
    reglu,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    softplus,
    softshrink,
    softsign,
    swiglu,
    tanh,
    tanhshrink,
    threshold,
)
from deuteron.functional.batch_norm import batch_norm
from deuteron.functional.core import explain
from deuteron.functional.embedding import embedding, sinusoidal
from deuteron.functional.library import delegation
from deuteron.functional.linear_loss import linear_cross_entropy
from deuteron.functional.loss import cross_entropy
from deuteron.functional.norm import group_norm, instance_norm, layer_norm, rms_norm
from deuteron.functional.order import cummax, cummin, cumprod, cumsum, histogram, sort, topk
from deuteron.functional.pool import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    global_avg_pool,
    global_max_pool,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    pyramid_pool2d,
    weighted_pool2d,
)
from deuteron.functional.position import rope
from deuteron.functional.reduce import (
    amax,
    amin,
    argmax,
    argmin,
    mean,
    norm,
    permute,
    prod,
    sum,
    var,
    where,
)
from deuteron.functional.resample import grid_sample, interpolate, pixel_shuffle, pixel_unshuffle
from deuteron.functional.softmax import log_softmax, softmax

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "argmax", "argmin",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "batch_norm", "bias_act", "bias_dropout_residual",
    "celu", "cross_entropy", "cummax", "cummin", "cumprod", "cumsum", "delegation", "dropout",
    "elu", "embedding", "explain", "geglu", "gelu", "global_avg_pool", "global_max_pool", "glu",
    "grid_sample", "group_norm", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "histogram", "instance_norm", "interpolate", "layer_norm", "leaky_relu",
    "linear_cross_entropy", "log_sigmoid", "log_softmax", "logsigmoid", "max_pool1d",
    "max_pool2d", "max_pool3d", "mean", "mish", "norm", "permute", "pixel_shuffle",
    "pixel_unshuffle", "prelu", "prod", "pyramid_pool2d", "reglu", "relu", "relu6", "rms_norm",
    "rope", "selu", "sigmoid", "silu", "sinusoidal", "softmax", "softplus", "softshrink",
    "softsign", "sort", "sum", "swiglu", "tanh", "tanhshrink", "threshold", "topk", "var",
    "weighted_pool2d", "where",
]  # fmt: skip
