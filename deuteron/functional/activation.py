"""Activations, gates and dropout: one read, one write, nothing stored for the backward pass but
what the next operator keeps anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import compiler
from torch._C import _nn

from deuteron.errors import BindError
from deuteron.functional.autocast import lower
from deuteron.functional.core import Function
from deuteron.functional.library import (
    LOW,
    NEVER,
    SHORT_BYTES,
    all_but,
    delegates,
    in_transform,
    is_captured,
    is_differentiated,
    is_watched,
    raw_stream,
    several_calls_win,
)
from deuteron.functional.operators import TORCHS, activated, one
from deuteron.functional.wrapper import CAPTURED, Plain
from deuteron.ops import Ops, Sym, table

Tensor = torch.Tensor
# No exponential to do better: on a CPU torch's, but for 16-bit numbers where its kernels are slow
BF16 = frozenset({torch.bfloat16})
CHEAP = {"relu": LOW, "relu6": LOW, "hardswish": BF16, "hardsigmoid": BF16}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
IN_PLACE = ("inplace",)  # torch has functions of their own for that


def _plain(name: str) -> Callable[[Tensor], Tensor]:
    """An activation without parameters, under torch's name."""

    def function(x: Tensor) -> Tensor:
        return one(name, x)

    return _named(name, function, without=())


def _of_numbers(name: str) -> Callable[[Tensor], Tensor]:
    """One that torch writes with several operators, which make floats of integers."""

    def function(x: Tensor) -> Tensor:
        whole = isinstance(x, Tensor) and x.dtype in INTEGERS
        return one(name, x.to(torch.get_default_dtype()) if whole else x)

    return _named(name, function, without=())


def _in_place(name: str) -> Callable[..., Tensor]:
    """An activation without parameters that torch may also write over its input; it does so
    itself, for nothing is saved by planning that."""
    over: Callable[..., Tensor] = getattr(F, name)

    def function(x: Tensor, inplace: bool = False) -> Tensor:
        return over(x, inplace=True) if inplace else one(name, x)

    return _named(name, function, without=IN_PLACE)


def _named(
    name: str, function: Callable[..., Tensor], without: Sequence[str]
) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{table.get(name).doc} As ``torch.nn.functional``'s, with its gradient."
    on_cpu = all_but(CHEAP[name]) if name in CHEAP else NEVER
    torchs = TORCHS.get(name) or SEVERAL[name]
    handed = delegates(
        torchs,
        plain=PLAIN.get(name, ()),
        without=without,
        several=name in SEVERAL,
        single=str(name not in SEVERAL),
        keeps_type=True,
        on_cpu=on_cpu,
    )
    return handed(function)


def _torch_tanhshrink(x: Tensor) -> Any:
    return x - x.tanh() if several_calls_win(x) else NotImplemented


def _never(x: Tensor) -> Any:
    return NotImplemented


SEVERAL = {"softsign": _never, "tanhshrink": _torch_tanhshrink}  # calls in torch, many or two
PLAIN = {"tanhshrink": Plain(Tensor.tanh, "x - plain(x)", learns=("x",))}


relu, relu6, sigmoid, tanh = (
    _in_place("relu"),
    _in_place("relu6"),
    _plain("sigmoid"),
    _plain("tanh"),
)
silu, mish, selu = _in_place("silu"), _in_place("mish"), _in_place("selu")
hardswish, hardsigmoid = _in_place("hardswish"), _in_place("hardsigmoid")
softsign, tanhshrink = _of_numbers("softsign"), _of_numbers("tanhshrink")
logsigmoid = log_sigmoid = _plain("log_sigmoid")


@delegates(_nn.gelu, by_name=("approximate",), keeps_type=True)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x · Φ(x), with Φ the normal distribution, or with ``approximate="tanh"`` its approximation by
    tanh, as ``torch.nn.functional.gelu``."""
    return one("gelu", x, approximate=approximate)


@delegates(_nn.leaky_relu, without=IN_PLACE, keeps_type=True, on_cpu=all_but(BF16))
def leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x, times ``negative_slope`` below 0, as ``torch.nn.functional.leaky_relu``."""
    if inplace:
        return F.leaky_relu(x, negative_slope, inplace=True)
    return one("leaky_relu", x, negative_slope=negative_slope)


@delegates(_nn.elu, without=IN_PLACE, keeps_type=True)
def elu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x, or alpha · (eˣ − 1) below 0, as ``torch.nn.functional.elu``."""
    return F.elu(x, alpha, inplace=True) if inplace else one("elu", x, alpha=alpha)


@delegates(torch.celu, without=IN_PLACE, keeps_type=True)
def celu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x, or alpha · (e^(x/alpha) − 1) below 0, as ``torch.nn.functional.celu``."""
    return F.celu(x, alpha, inplace=True) if inplace else one("celu", x, alpha=alpha)


@delegates(_nn.softplus, keeps_type=True)
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """ln(1 + e^(beta·x)) / beta, and x itself where beta·x is over ``threshold``, as
    ``torch.nn.functional.softplus``."""
    return one("softplus", x, beta=beta, threshold=threshold)


def _torch_hardtanh(x: Tensor, min_val: float, max_val: float) -> Any:
    return _nn.hardtanh(x, min_val, max_val) if min_val <= max_val else NotImplemented


@delegates(
    _torch_hardtanh,
    plain=Plain(_nn.hardtanh, "plain(x)"),
    without=IN_PLACE,
    keeps_type=True,
    on_cpu=all_but(LOW),
)
def hardtanh(
    x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    """x held between ``min_val`` and ``max_val``, as ``torch.nn.functional.hardtanh``."""
    if inplace:
        return F.hardtanh(x, min_val, max_val, inplace=True)
    return one("hardtanh", x, min=min_val, max=max_val)


@delegates(_nn.softshrink, keeps_type=True, on_cpu=all_but(LOW))
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """x moved towards 0 by ``lambd``, and 0 within it, as ``torch.nn.functional.softshrink``."""
    return one("softshrink", x, lambd=lambd)


@delegates(torch.hardshrink, keeps_type=True, on_cpu=all_but(LOW))
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """x, but 0 where |x| ≤ ``lambd``, as ``torch.nn.functional.hardshrink``."""
    return one("hardshrink", x, lambd=lambd)


@delegates(torch.threshold, without=IN_PLACE, keeps_type=True, on_cpu=all_but(LOW))
def threshold(x: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x, but ``value`` where x ≤ ``threshold``, as ``torch.nn.functional.threshold``."""
    if inplace:
        return F.threshold(x, threshold, value, inplace=True)
    return one("threshold", x, threshold=threshold, value=value)


def _prelu_is_torchs(x: Tensor, weight: Tensor) -> bool:
    """torch has several calls for the gradient."""
    return x.nbytes < SHORT_BYTES or (x.dtype not in LOW and not is_differentiated(x))


@delegates(torch.prelu, keeps_type=True, on_cpu=_prelu_is_torchs)
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x, times ``weight`` below 0: one slope for all or one for each channel (dimension 1), as
    ``torch.nn.functional.prelu``."""
    return one("prelu", *lower(x, weight))


@delegates(_nn.glu, keeps_type=True)
def glu(x: Tensor, dim: int = -1) -> Tensor:
    """a · sigmoid(b) of a and b, the halves of x along ``dim``, as ``torch.nn.functional.glu``."""
    return one("glu", x, axis=dim)


# ---- bias, gates


def _bias_act(b: Ops, x: Sym, bias: Sym | None, *, activation: str) -> Sym:
    return activated(b, x if bias is None else x + bias, activation)


def _gate(b: Ops, gate: Sym, up: Sym, *, activation: str) -> Sym:
    return activated(b, gate, activation) * up


def _gate_halves(b: Ops, x: Sym, *, activation: str) -> Sym:
    half = x.shape[-1] // 2
    gate = b.slice(x, axis=-1, stop=half)
    up = b.slice(x, axis=-1, start=half)
    return b.one("mul", activated(b, gate, activation), up)


BIAS_ACT = Function("bias_act", _bias_act)
GATE = Function("gate", _gate)
GATE_HALVES = Function("gate_halves", _gate_halves)


def _torch_bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Any:
    if bias is None:
        return TORCHS[activation](x) if activation in TORCHS else NotImplemented
    if activation in TORCHS and several_calls_win(x, bias):
        return TORCHS[activation](x + bias)
    return NotImplemented


@delegates(
    _torch_bias_act,
    plain=Plain(
        TORCHS,
        "plain[activation](x + bias)",
        where="bias is not None and activation in plain",
        learns=("x", "bias"),
    ),
    single="bias is None",
)
def bias_act(x: Tensor, bias: Tensor | None, activation: str = "gelu") -> Tensor:
    """activation(x + bias) in one pass; the gradient of bias is a sum in float32.

    ``bias`` must broadcast with x; ``activation`` is "relu", "gelu", "gelu_tanh", "silu" or another
    elementwise activation.

    >>> y = dt.functional.bias_act(x @ w.T, b, "silu")
    """
    return BIAS_ACT.one(x, bias, activation=activation)


def _gated(activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if up is not None:
        return GATE.one(gate, up, activation=activation)
    if gate.ndim and gate.shape[-1] % 2 == 0:
        return GATE_HALVES.one(gate, activation=activation)
    raise BindError(
        f"x {list(gate.shape)} cannot be halved along its last dimension",
        asked="a gate of one tensor",
        remedy="give gate and up as two tensors, or an even last dimension",
    )


def _torch_gated(activation: str) -> Callable[..., Any]:
    """The gate in two calls, torch's halves being views."""
    activate = TORCHS[activation]

    def call(gate: Tensor, up: Tensor | None) -> Any:
        if not several_calls_win(gate, up):
            return NotImplemented
        if up is None:
            if gate.shape[-1] % 2:
                return NotImplemented
            gate, up = gate.chunk(2, -1)
        return activate(gate) * up

    return call


def _plain_gate(activation: str) -> Plain:
    two = "up is not None"
    return Plain(TORCHS[activation], "plain(gate) * up", where=two, learns=("gate", "up"))


GATED: dict[str, Any] = {"several": True, "single": "False", "keeps_type": True}
_GEGLUS = {"none": _torch_gated("gelu"), "tanh": _torch_gated("gelu_tanh")}


def _torch_geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Any:
    return _GEGLUS[approximate](gate, up) if approximate in _GEGLUS else NotImplemented


@delegates(_torch_gated("silu"), plain=_plain_gate("silu"), **GATED)
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up in one pass. With one tensor, its halves along the last dimension are gate
    and up.

    >>> y = dt.functional.swiglu(x @ w_gate.T, x @ w_up.T)
    """
    return _gated("silu", gate, up)


@delegates(_torch_geglu, plain=_plain_gate("gelu"), **GATED)
def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(gate) · up in one pass. With one tensor, its halves along the last dimension are gate
    and up. ``approximate="tanh"`` takes that of :func:`gelu`.

    >>> y = dt.functional.geglu(x @ w_gate.T, x @ w_up.T)
    """
    return _gated("gelu" if approximate == "none" else "gelu_tanh", gate, up)


@delegates(_torch_gated("relu"), plain=_plain_gate("relu"), **GATED)
def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """relu(gate) · up in one pass. With one tensor, its halves along the last dimension are gate
    and up.

    >>> y = dt.functional.reglu(x @ w_gate.T, x @ w_up.T)
    """
    return _gated("relu", gate, up)


# ---- dropout


def _dropout(b: Ops, x: Sym, bias: Sym | None, residual: Sym | None, seed: Sym, *, p: float) -> Sym:
    y = b.one("dropout", x if bias is None else x + bias, seed, p=p)
    return y if residual is None else y + residual


DROPOUT = Function("dropout", _dropout)


SEEDS = 2**16  # so many are at hand on a GPU, from 0 on


def _seed(seed: int | Tensor | None, x: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        return torch.randint(0, 2**62, (), device=x.device)
    if seed.__class__ is int and 0 <= seed < SEEDS and _may_read_table(x):
        return _seeds(x.device, raw_stream(x.get_device()))[seed]
    return torch.full((), seed, dtype=torch.int64, device=x.device)


def _may_read_table(x: Tensor) -> bool:
    """Whether a launch is saved by a tensor that outlives the call: none that somebody records or
    replaces, and none of which a CUDA Graph would note the address."""
    if not x.is_cuda or compiler.is_compiling():
        return False
    return not (in_transform() or is_watched() or is_captured(x))


@lru_cache(maxsize=8)
def _seeds(device: torch.device, stream: int) -> Tensor:
    """The first whole numbers. Writing one is a launch, as long as that of the dropout itself;
    taking one out of a table is none. Each is 16 bytes from the next, which kernels like best, and
    every ``stream`` reads its own: nobody else has to wait for what wrote it."""
    with torch.inference_mode(False):  # gradients may be asked for later
        return torch.arange(2 * SEEDS, device=device).div_(2, rounding_mode="floor")[::2]


def _torch_dropout(x: Tensor, p: float, training: bool) -> Any:
    return torch.dropout(x, p, True) if training else NotImplemented


@delegates(
    _torch_dropout,
    plain=Plain(torch.dropout, "plain(x, p, True)"),
    without=("inplace", "seed"),
    keeps_type=True,
)
def dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Each element is 0 with probability ``p``, else x / (1 − p); x itself unless ``training``.

    Which ones depends on ``seed`` and on their place alone, so the mask is computed again in the
    backward pass instead of being stored, and the same on every device. Without a seed one is drawn
    from torch's generator, or torch's dropout draws the mask, as it does ``inplace``.
    """
    if inplace and seed is None:
        return F.dropout(x, p, training, inplace=True)
    if inplace:
        raise BindError(
            "a mask with a seed is not written over its input",
            asked="dropout(…, inplace=True, seed=…)",
            remedy="leave out inplace, or seed",
        )
    return bias_dropout_residual(x, None, None, p, training, seed=seed)


def _torch_bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool
) -> Any:
    """Three calls; one of ours is two, with that which draws a seed, and no sooner launched."""
    if not training or is_captured(x):
        return NotImplemented
    y = torch.dropout(x if bias is None else x + bias, p, True)
    return y if residual is None else y + residual


@delegates(
    _torch_bias_dropout_residual,
    plain=Plain(
        torch.dropout,
        "residual + plain(x + bias, p, True)",
        where=f"bias is not None and residual is not None and not ({CAPTURED.format(x='x')})",
    ),
    without=("seed",),
    several=True,
    keeps_type=True,
)
def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float = 0.5,
    training: bool = True,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """residual + dropout(x + bias) in one pass; ``p``, ``training`` and ``seed`` are those of
    :func:`dropout`. Either of bias and residual may be None.

    >>> y = dt.functional.bias_dropout_residual(x @ w.T, b, stream, p=0.1, training=model.training)
    """
    if not 0.0 <= p <= 1.0:
        raise BindError(
            f"p={p} is not a probability", asked=f"dropout(…, p={p})", remedy="use 0 <= p <= 1"
        )
    chance = p if training else 0.0
    if seed is None and chance == 0.0:
        seed = 0  # as in torch, nothing is drawn where nothing is dropped
    return DROPOUT.one(x, bias, residual, _seed(seed, x), p=chance)
