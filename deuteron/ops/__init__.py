"""What operators mean: one OpDef each, in files by family.

``TABLE`` maps name → OpDef. Nothing here says how an operator is computed fast.
"""

from collections.abc import Iterator
from importlib import import_module

from deuteron.ops import table
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import REQUIRED, Attr, Cost, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.table import TABLE, get, infer

_FILES = """arithmetic activation movement reduce embedding random norm batch_norm softmax
    cross_entropy matmul quantized fp8 conv conv_integer conv_quantized pool pool_winners
    pyramid_pool weighted_pool resample attention attention_grad attention_bytes
    paged_attention recurrent rope scan histogram sparse moe collective opaque""".split()


def _operators(file: str) -> Iterator[OpDef]:
    """Add every OpDef that a file defines, alone or in a tuple, to the table, and yield it."""
    for value in vars(import_module(f"deuteron.ops.{file}")).values():
        listed = value if isinstance(value, tuple) else (value,)
        yield from (table.add(op) for op in listed if isinstance(op, OpDef))


FAMILIES = {file: tuple(_operators(file)) for file in _FILES}

__all__ = ["FAMILIES", "REQUIRED", "TABLE", "Arg", "Attr", "Cost", "Fusion", "OpDef", "Ops"]
__all__ += ["Sample", "Sym", "Vjp", "get", "infer"]
