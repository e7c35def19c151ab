"""What operators mean: one OpDef each, in files by family.

``TABLE`` maps name → OpDef. Nothing here says how an operator is computed fast.
"""

from deuteron.ops import (
    activation,
    arithmetic,
    attention,
    batch_norm,
    conv,
    cross_entropy,
    embedding,
    histogram,
    matmul,
    movement,
    norm,
    opaque,
    pool,
    pool_winners,
    pyramid_pool,
    random,
    reduce,
    resample,
    rope,
    scan,
    softmax,
    sort,
    table,
    weighted_pool,
)
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import REQUIRED, Attr, Cost, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.table import TABLE, get, infer

FAMILIES = (
    arithmetic,
    activation,
    movement,
    reduce,
    embedding,
    random,
    norm,
    batch_norm,
    softmax,
    cross_entropy,
    matmul,
    conv,
    pool,
    pool_winners,
    pyramid_pool,
    weighted_pool,
    resample,
    attention,
    rope,
    scan,
    sort,
    histogram,
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
