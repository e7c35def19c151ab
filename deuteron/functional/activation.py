"""Activations, gates and dropout. Each reads its input once and writes its result once, and stores
nothing for the backward pass except what the next operator keeps anyway."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.autocast import lower
from deuteron.functional.context import is_captured, is_differentiated, is_eager, raw_stream
from deuteron.functional.core import Function
from deuteron.functional.delegate import LOW, TRAINED, delegates, is_small
from deuteron.functional.operators import TORCHS, activated, from_table, operator
from deuteron.ops import Ops, Sym

BF16 = frozenset({torch.bfloat16})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
# Functions that turn integers into floats of torch's default type: the first two are composed of
# operators that do, which do not take bools
TO_FLOATS = {
    **dict.fromkeys(("softsign", "tanhshrink"), INTEGERS),
    **dict.fromkeys(("sigmoid", "tanh"), INTEGERS | {torch.bool}),
}
# On a CPU torch's kernels for simple work on 16-bit numbers are slow. From SHORT_BYTES on ours
# saves more time than finding it costs; with a gradient, whose node is Python, from SHORT_TO_TRAIN
# on.
SHORT_BYTES, SHORT_TO_TRAIN = 128 * 1024, 256 * 1024
# Functions without an exponential: on a CPU we cannot do better than torch, except for large
# tensors of the types listed here, for which its kernels are slow
CHEAP = {
    **dict.fromkeys("relu relu6 hardtanh softshrink hardshrink threshold".split(), LOW),
    **dict.fromkeys("hardswish hardsigmoid leaky_relu".split(), BF16),
}
IN_PLACE = """relu relu6 leaky_relu elu selu celu silu mish hardswish hardsigmoid hardtanh
    threshold""".split()


def _cheap_is_torchs(slow: Collection[torch.dtype], x: Tensor, *_: Any, **__: Any) -> bool:
    most = SHORT_TO_TRAIN if is_differentiated(x) else SHORT_BYTES
    return x.dtype not in slow or x.nbytes < most


def _activation(name: str, called: str = "", **rule: Any) -> Callable[..., Tensor]:
    """Return an activation of the table under torch's name; with ``inplace=True`` it calls torch's
    own function, which writes over its input."""
    torchs, planned = getattr(F, called or name), operator(name)

    def run(*tensors: Any, inplace: bool = False, **attrs: Any) -> Any:
        if inplace:
            return torchs(*tensors, *attrs.values(), True)
        if name == "prelu":
            tensors = lower(*tensors)
        elif name in TO_FLOATS and tensors[0].dtype in TO_FLOATS[name]:
            tensors = (tensors[0].to(torch.get_default_dtype()),)
        return planned(*tensors, **attrs)

    more = {"inplace": False} if name in IN_PLACE else None
    if name in CHEAP:
        rule["on_cpu"] = partial(_cheap_is_torchs, CHEAP[name])
    return from_table(name, called, home=F, more=more, run=run, **rule)


def _prelu_is_torchs(x: Tensor, weight: Tensor) -> bool:
    """Whether torch answers on a CPU. Its gradient takes several calls, so large tensors that need
    one are ours, and so are large 16-bit tensors."""
    return x.nbytes < SHORT_BYTES or (x.dtype not in LOW and not is_differentiated(x))


NAMES = """relu relu6 leaky_relu hardtanh hardswish hardsigmoid softshrink hardshrink threshold
    sigmoid tanh silu mish elu selu celu softplus glu log_sigmoid gelu prelu softsign tanhshrink"""
RULES: dict[str, dict[str, Any]] = {
    "hardtanh": {"rename": {"min": "min_val", "max": "max_val"}},
    "glu": {"rename": {"axis": "dim"}},
    "log_sigmoid": {"called": "logsigmoid"},
    "gelu": {
        "takes": 1,
        "joined": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    },
    "prelu": {"on_cpu": _prelu_is_torchs},
    **{name: {"trained": TRAINED} for name in ("sigmoid", "silu", "tanh")},
    "softsign": {"call": None},  # torch needs too many calls for it
    "tanhshrink": {"several": 1},
}
MADE = {name: _activation(name, **RULES.get(name, {})) for name in NAMES.split()}
MADE["logsigmoid"] = MADE["log_sigmoid"]


# ---- bias, gates


def _bias_act(b: Ops, x: Sym, bias: Sym | None, *, activation: str) -> Sym:
    return activated(b, x if bias is None else x + bias, activation)


def _gate(b: Ops, gate: Sym, up: Sym | None, *, activation: str) -> Sym:
    if up is None:
        half = gate.shape[-1] // 2
        gate, up = b.slice(gate, axis=-1, stop=half), b.slice(gate, axis=-1, start=half)
    return b.one("mul", activated(b, gate, activation), up)


BIAS_ACT = Function("bias_act", _bias_act)
GATE = Function("gate", _gate)


def _torch_bias_act(x: Tensor, bias: Tensor | None, activation: str = "gelu") -> Tensor:
    return TORCHS[activation](x if bias is None else x + bias)


@delegates(_torch_bias_act, takes=1, several=lambda x, bias, *_, **__: int(bias is not None))
def bias_act(x: Tensor, bias: Tensor | None, activation: str = "gelu") -> Tensor:
    """Return activation(x + bias), computed in one pass over memory.

    bias        a tensor that broadcasts with x, or None. Its gradient is summed in float32
    activation  "relu", "gelu", "gelu_tanh", "silu" or the name of another elementwise operator that
                needs nothing but x; any other name is refused

    >>> y = dt.functional.bias_act(x @ w.T, b, "silu")
    """
    return BIAS_ACT.one(x, bias, activation=activation)


def _gated(activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None and not (gate.ndim and gate.shape[-1] % 2 == 0):
        wrong = f"x {list(gate.shape)} cannot be halved along its last dimension"
        remedy = "give gate and up as two tensors, or an even last dimension"
        raise BindError(wrong, asked="a gate of one tensor", remedy=remedy)
    return GATE.one(gate, up, activation=activation)


def _torch_gated(activation: str, gate: Tensor, up: Tensor | None = None) -> Any:
    """The gate by two calls of torch's. The halves of a single tensor are views, so splitting it
    costs no copy."""
    if up is None:
        if gate.shape[-1] % 2:
            return NotImplemented
        gate, up = gate.chunk(2, -1)
    return TORCHS[activation](gate) * up


_gating = partial(delegates, several=1, autocast=True, passes=7.0)
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


@_gating(partial(_torch_gated, "silu"))
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) · up, computed in one pass over memory.

    gate  the tensor that silu is applied to
    up    the tensor to multiply by. Without it, the first half of ``gate`` along its last dimension
          is the gate and the second half is up; a last dimension of odd length is refused

    >>> y = dt.functional.swiglu(x @ w_gate.T, x @ w_up.T)
    """
    return _gated("silu", gate, up)


@_gating(lambda gate, up=None, approximate="none": _torch_gated(GELUS[approximate], gate, up))
def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return gelu(gate) · up, computed in one pass over memory; ``gate`` and ``up`` as for
    :func:`swiglu`.

    approximate  "none", or "tanh" for gelu's approximation by tanh

    >>> y = dt.functional.geglu(x @ w_gate.T, x @ w_up.T)
    """
    return _gated(GELUS.get(approximate, f"gelu_{approximate}"), gate, up)


@_gating(partial(_torch_gated, "relu"))
def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return relu(gate) · up, computed in one pass over memory; ``gate`` and ``up`` as for
    :func:`swiglu`.

    >>> y = dt.functional.reglu(x @ w_gate.T, x @ w_up.T)
    """
    return _gated("relu", gate, up)


# ---- dropout


def _dropout(b: Ops, x: Sym, bias: Sym | None, residual: Sym | None, seed: Sym, *, p: float) -> Sym:
    y = b.one("dropout", x if bias is None else x + bias, seed, p=p)
    return y if residual is None else y + residual


DROPOUT = Function("dropout", _dropout)


SEEDS = 2**16  # seeds below this one are kept in a table on the GPU


def seed_of(seed: int | Tensor | None, x: Tensor) -> Tensor:
    """Return ``seed`` as a tensor beside ``x``; for None draw one from torch's generator."""
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        return torch.randint(0, 2**62, (), device=x.device)
    # Reading the seed from a table that outlives the call saves a launch. The table is not used
    # while the call is traced or transformed, nor while a CUDA Graph, which would note its address,
    # is captured.
    known = seed.__class__ is int and 0 <= seed < SEEDS and x.is_cuda
    if known and is_eager() and not is_captured(x):
        return _seeds(x.device, raw_stream(x.get_device()))[seed]
    return torch.full((), seed, dtype=torch.int64, device=x.device)


@lru_cache(maxsize=8)
def _seeds(device: torch.device, stream: int) -> Tensor:
    """Return the whole numbers below SEEDS as a table on ``device``. Writing a single seed takes a
    launch, as long as that of the dropout itself; reading one from a table takes none. The seeds
    are 16 bytes apart, which kernels like best. Every ``stream`` has a table of its own, so that no
    stream has to wait for the one that wrote it."""
    with torch.inference_mode(False):  # a later call may need gradients
        return torch.arange(2 * SEEDS, device=device).div_(2, rounding_mode="floor")[::2]


def _torch_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Any = None
) -> Any:
    """torch's dropout, but not without ``training``, where it would return x itself (as it does
    for p = 0, too), nor with a seed, which it does not take."""
    if not training or seed is not None:
        return NotImplemented
    y = F.dropout(x, p, True, inplace)
    return y.clone() if y is x and not inplace else y


@delegates(_torch_dropout, autocast=True)
def dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Set each element of x to 0 with probability ``p``, and divide the others by 1 − p.

    p         from 0 to 1; anything else is refused
    training  if False, nothing is dropped and the values of x come back unchanged
    inplace   let torch's own dropout write over x; refused together with ``seed``
    seed      a whole number, or an int64 tensor of rank 0. It decides together with an element's
              place, and nothing else, whether the element is dropped: the mask is the same on every
              device, and the backward pass computes it again instead of reading a stored one.
              Without a seed, one is drawn from torch's generator, or torch's own dropout draws the
              mask
    """
    if inplace and seed is None:
        return F.dropout(x, p, training, inplace=True)
    if inplace:
        wrong = "a mask with a seed is not written over its input"
        asked = "dropout(…, inplace=True, seed=…)"
        raise BindError(wrong, asked=asked, remedy="leave out inplace, or seed")
    return bias_dropout_residual(x, None, None, p, training, seed=seed)


def _torch_bias_dropout_residual(
    x: Tensor, bias: Any, residual: Any, p: float = 0.5, training: bool = True, *, seed: Any = None
) -> Any:
    """torch's three calls. Ours are two launches, one of which draws a seed, and would reach the
    GPU no sooner."""
    if not training or seed is not None or is_captured(x) or (x.is_cuda and not is_small(x)):
        return NotImplemented
    y = F.dropout(x if bias is None else x + bias, p)
    y = y.clone() if y is x else y
    return y if residual is None else residual + y


@delegates(_torch_bias_dropout_residual, autocast=True)
def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float = 0.5,
    training: bool = True,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Return residual + dropout(x + bias), computed in one pass over memory.

    bias, residual     tensors that broadcast with x; either may be None
    p, training, seed  those of :func:`dropout`

    >>> y = dt.functional.bias_dropout_residual(x @ w.T, b, stream, p=0.1, training=model.training)
    """
    if not 0.0 <= p <= 1.0:
        wrong = f"p={p} is not a probability"
        raise BindError(wrong, asked=f"dropout(…, p={p})", remedy="use 0 <= p <= 1")
    chance = p if training else 0.0
    if seed is None and chance == 0.0:
        seed = 0  # as in torch, nothing is drawn where nothing is dropped
    return DROPOUT.one(x, bias, residual, seed_of(seed, x), p=chance)
