"""What operators mean: one OpDef each, in files by family.

``TABLE`` maps name → OpDef. Nothing here says how an operator is computed fast.
"""

from importlib import import_module

from deuteron.ops import table
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import REQUIRED, Attr, Cost, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.table import TABLE, get, infer

FAMILIES = """arithmetic activation movement reduce embedding random norm batch_norm softmax
    cross_entropy matmul conv pool pool_winners pyramid_pool weighted_pool resample attention rope
    scan sort histogram opaque""".split()

for _family in FAMILIES:
    for _op in import_module(f"deuteron.ops.{_family}").OPS:
        table.add(_op)

__all__ = ["REQUIRED", "TABLE", "Arg", "Attr", "Cost", "Fusion", "OpDef", "Ops", "Sample", "Sym"]
__all__ += ["Vjp", "get", "infer"]
