# ruff: noqa: F401
"""Functions for eager code, made of the graph's operators: fused, with gradients, for
``torch.compile`` too.

>>> import deuteron as dt
>>> y, stream = dt.functional.rms_norm(x, (4096,), w, residual=stream)   # one kernel
>>> y = dt.functional.swiglu(gate, up)
>>> print(dt.functional.explain(dt.functional.swiglu, gate, up))          # what ran, and why

A function that ``torch.nn.functional`` has, too, takes the same arguments. The first call with a
shape plans it, and later calls reuse the plan; small calls run torch's own functions instead
(:class:`delegation`). Every other operator of the table is here as well, under its own name, and so
is an operator that was added with ``dt.register_op``.
"""

from collections.abc import Callable
from sys import modules as _modules
from typing import Any

from deuteron.functional.operators import from_table as _from_table
from deuteron.ops import TABLE

from . import activation, masks, pool, reduce, resample
from .activation import bias_act, bias_dropout_residual, dropout, geglu, reglu, swiglu
from .attention import attention, paged_attention
from .attention_quantized import attention_quantized
from .batch_norm import batch_norm
from .block_mask import BlockMask, block_mask
from .conv_batch_norm import conv_bn_act
from .cross_entropy import cross_entropy
from .delegate import delegation
from .embedding import embedding, sinusoidal
from .explain import explain
from .fp8 import dequantize_fp8, linear_fp8, quantize_fp8
from .linear_cross_entropy import linear_cross_entropy
from .moe import experts, moe, route
from .norm import group_norm, instance_norm, layer_norm, rms_norm
from .pool import global_avg_pool, global_max_pool, pyramid_pool2d, weighted_pool2d
from .quantized import dequantize_weight, linear_quantized, quantize_weight
from .reduce import histogram, norm, var, where
from .resample import interpolate
from .rope import rope
from .softmax import log_softmax, softmax
from .sparse import diagonals, sparse_linear, spmm, to_2_4

# functions that are generated from an operator of the table, under torch's names
for _home in (activation, pool, reduce, resample):
    globals().update(_home.MADE)

__all__ = sorted(
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", "").startswith("deuteron.functional")
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the operator ``name`` of the table as an eager function with gradients."""
    if name not in TABLE:
        wrong = f"deuteron.functional has no function {name!r}, nor the table"
        raise AttributeError(wrong, name=name, obj=_modules[__name__])
    found = globals()[name] = _from_table(name, returns="Any")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *TABLE})
