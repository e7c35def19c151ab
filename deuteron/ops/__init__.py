"""What operators mean: one OpDef each, in files by family.

``TABLE`` maps name → OpDef. Nothing here says how an operator is computed fast.
"""

from deuteron.ops import (
    activation,
    attention,
    batch_norm,
    conv,
    cross_entropy,
    elementwise,
    matmul,
    movement,
    norm,
    norm_grad,
    opaque,
    order,
    pool,
    pool_taps,
    position,
    pyramid_pool,
    random,
    reduce,
    resample,
    scan,
    softmax,
    table,
    weighted_pool,
)
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import REQUIRED, Attr, Cost, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.table import TABLE, get, infer

FAMILIES = (
    elementwise,
    activation,
    movement,
    reduce,
    random,
    norm,
    norm_grad,
    batch_norm,
    softmax,
    cross_entropy,
    matmul,
    conv,
    pool,
    pool_taps,
    pyramid_pool,
    weighted_pool,
    resample,
    attention,
    position,
    scan,
    order,
    opaque,
)

for _family in FAMILIES:
    for _op in _family.OPS:
        table.add(_op)

__all__ = [
    "REQUIRED",
    "TABLE",
    "Arg",
    "Attr",
    "Cost",
    "Fusion",
    "OpDef",
    "Ops",
    "Sample",
    "Sym",
    "Vjp",
    "get",
    "infer",
]
