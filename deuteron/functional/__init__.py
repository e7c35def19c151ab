"""Eager functions over the graph's operators: fused, with gradients, for ``torch.compile`` too.

>>> import deuteron as dt
>>> y, stream = dt.functional.rms_norm(x, (4096,), w, residual=stream)   # one kernel
>>> y = dt.functional.swiglu(gate, up)
>>> print(dt.functional.explain(dt.functional.swiglu, gate, up))          # what ran, and why

Arguments are those of ``torch.nn.functional`` where it has the function. Each shape is planned
once, at its first call, and kept; small calls go to torch's own functions (:class:`delegation`).
Every other operator of the table is here as well, under its own name, and so is one that was added
with ``dt.register_op``.
"""

from collections.abc import Callable
from typing import Any

from deuteron.functional import activation, order, pool, reduce, resample
from deuteron.functional.activation import bias_act as bias_act
from deuteron.functional.activation import bias_dropout_residual as bias_dropout_residual
from deuteron.functional.activation import dropout as dropout
from deuteron.functional.activation import geglu as geglu
from deuteron.functional.activation import reglu as reglu
from deuteron.functional.activation import swiglu as swiglu
from deuteron.functional.batch_norm import batch_norm as batch_norm
from deuteron.functional.cross_entropy import cross_entropy as cross_entropy
from deuteron.functional.delegate import delegation as delegation
from deuteron.functional.embedding import embedding as embedding
from deuteron.functional.embedding import sinusoidal as sinusoidal
from deuteron.functional.explain import explain as explain
from deuteron.functional.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from deuteron.functional.norm import group_norm as group_norm
from deuteron.functional.norm import instance_norm as instance_norm
from deuteron.functional.norm import layer_norm as layer_norm
from deuteron.functional.norm import rms_norm as rms_norm
from deuteron.functional.operators import from_table as _from_table
from deuteron.functional.order import histogram as histogram
from deuteron.functional.pool import global_avg_pool as global_avg_pool
from deuteron.functional.pool import global_max_pool as global_max_pool
from deuteron.functional.pool import pyramid_pool2d as pyramid_pool2d
from deuteron.functional.pool import weighted_pool2d as weighted_pool2d
from deuteron.functional.reduce import norm as norm
from deuteron.functional.reduce import var as var
from deuteron.functional.reduce import where as where
from deuteron.functional.resample import interpolate as interpolate
from deuteron.functional.rope import rope as rope
from deuteron.functional.softmax import log_softmax as log_softmax
from deuteron.functional.softmax import softmax as softmax
from deuteron.ops import TABLE

# those that are made from an operator of the table, under torch's names
for _home in (activation, order, pool, reduce, resample):
    globals().update(_home.MADE)

__all__ = sorted(
    name
    for name, value in globals().items()
    if not name.startswith("_")
    and getattr(value, "__module__", "").startswith("deuteron.functional")
)


def __getattr__(name: str) -> Callable[..., Any]:
    """The operator ``name`` of the table as an eager function with gradients."""
    if name not in TABLE:
        raise AttributeError(f"deuteron.functional has no function {name!r}, nor the table")
    found = globals()[name] = _from_table(name, returns="Any")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *TABLE})
