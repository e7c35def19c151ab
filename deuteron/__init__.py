# ruff: noqa: F401
"""Deuteron: fused operators for PyTorch and the graph engine that decides how to run them.

>>> import deuteron as dt
>>> fast = dt.optimize(model.eval(), example)   # planned, fused, one CUDA Graph on a GPU
>>> print(fast.explain())                       # what runs where, what it costs, and why
>>> g = dt.Graph()                              # or say it yourself: help(dt.Graph)
"""

import importlib
import sys
from typing import Any

from deuteron import zoo
from deuteron.api import OverRanks, optimize
from deuteron.engines import (
    BuildContext,
    Candidate,
    Engine,
    Kernel,
    Refusal,
    engines,
    register_engine,
    unregister_engine,
)
from deuteron.errors import BindError, DeuteronError, EngineError, FileError, GraphError
from deuteron.explain import Explanation
from deuteron.files import VERSION as __version__
from deuteron.frontends.builder import Graph, register_op
from deuteron.ir import DType, Region, TensorType
from deuteron.ir.dtype import (
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    float64,
    int4,
    int8,
    int16,
    int32,
    int64,
    uint8,
)
from deuteron.model import Optimized, load
from deuteron.ops import Arg, Attr, Fusion, OpDef, Sample, Sym
from deuteron.ops.elementwise import elementwise
from deuteron.plan import Cache, Plan, load_plan
from deuteron.policy import Policy
from deuteron.target import Target, target

# subpackages that are imported when they are first accessed: dt.functional, dt.nn, dt.optim, …
_LAZY = ("augment", "distributed", "functional", "nn", "optim")
# names whose modules import all of torch.compile; they, too, are imported when first accessed
_COMPILED = {"backend": "torch_compile", "train_step": "training", "Checkpoints": "training"}


def __getattr__(name: str) -> Any:
    if name in _COMPILED:
        return getattr(importlib.import_module(f"deuteron.{_COMPILED[name]}"), name)
    if name in _LAZY:
        return importlib.import_module(f"deuteron.{name}")
    wrong = f"module 'deuteron' has no attribute {name!r}"
    raise AttributeError(wrong, name=name, obj=sys.modules[__name__])  # "Did you mean: 'optimize'?"


def __dir__() -> list[str]:
    return sorted((*__all__, *_LAZY, *_COMPILED))


__all__ = sorted(  # the names imported above; of the subpackages only the zoo
    name
    for name, value in globals().items()
    if name[0] != "_" and name != "Any" and (name == "zoo" or type(value) is not type(zoo))
)
