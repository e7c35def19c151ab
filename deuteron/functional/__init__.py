"""Eager functions over the graph's operators: fused, with gradients, for ``torch.compile`` too.

>>> import deuteron as dt
>>> y, stream = dt.functional.rms_norm(x, (4096,), w, residual=stream)   # one kernel
>>> y = dt.functional.swiglu(gate, up)
>>> print(dt.functional.explain(dt.functional.swiglu, gate, up))          # what ran, and why

Arguments are those of ``torch.nn.functional`` where it has the function. Each shape is planned
once, at its first call, and kept. Second derivatives are refused.
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
from deuteron.functional.core import explain
from deuteron.functional.embedding import embedding, sinusoidal
from deuteron.functional.norm import group_norm, instance_norm, layer_norm, rms_norm
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
)
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
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "bias_act", "bias_dropout_residual", "celu",
    "dropout", "elu", "embedding", "explain", "geglu", "gelu", "global_avg_pool",
    "global_max_pool", "glu", "grid_sample", "group_norm", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "instance_norm", "interpolate", "layer_norm", "leaky_relu",
    "log_sigmoid", "log_softmax", "logsigmoid", "max_pool1d", "max_pool2d", "max_pool3d", "mean",
    "mish", "norm", "permute", "pixel_shuffle", "pixel_unshuffle", "prelu", "prod", "reglu",
    "relu", "relu6", "rms_norm", "selu", "sigmoid", "silu", "sinusoidal", "softmax", "softplus",
    "softshrink", "softsign", "sum", "swiglu", "tanh", "tanhshrink", "threshold", "var", "where",
]  # fmt: skip
