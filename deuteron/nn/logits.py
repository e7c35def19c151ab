"""Logits that are not computed until something needs them.

The layer that makes the logits of a language model returns a tensor that only knows what it would
be computed from. If its cross-entropy is taken, in the model (which was given labels) or in a
training loop, that becomes ``linear_cross_entropy``, for which the logits never exist as a whole.
Casts, views and slices of positions on the way there are followed. Any other use computes the
logits as the layer would have, once, and goes on with those. Once the weight has changed, as by a
step of an optimiser, that cannot be done any more and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as torchs
from torch.utils._pytree import tree_map_only

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.functional.autocast import lower
from deuteron.functional.context import is_eager, under_autocast
from deuteron.functional.delegate import IN_A_MODEL_S, REACHED, may_delegate
from deuteron.functional.linear_cross_entropy import is_ours
from deuteron.target import Target, target

# How often 16-bit logits are read or written. PASSES, by torch's calls: made, widened (to twice the
# size), turned into logarithms, and all the way back. OURS: made, turned into their gradient, read
# by two products.
PASSES, OURS = 13.0, 5.0


def is_worth_it(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a loss may follow, with so many logits that making them in parts is quicker."""
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        return False
    if hidden.is_cuda and may_delegate():
        rows, classes = hidden.numel() // max(hidden.shape[-1], 1), weight.shape[0]
        size = 2 if under_autocast(hidden) else hidden.element_size()
        if rows * classes * size <= least_bytes(target(hidden.device)):
            return False
    return hidden.numel() > 0 and is_eager(hidden, weight, bias) and is_ours(hidden, weight)


def least_bytes(machine: Target) -> int:
    """Return the bytes of logits beyond which torch's kernels take longer than the host does."""
    return int(IN_A_MODEL_S * machine.stream * REACHED / PASSES)


class Logits(Tensor):
    """``linear(hidden, weight, bias)`` as type ``dtype``, computed only when ``source`` is
    called."""

    hidden: Tensor
    layer: tuple[Tensor, Tensor | None]
    source: Callable[[], Tensor]
    made: Tensor | None
    seen: tuple[tuple[Tensor, int], ...]  # what they are made from, and how often it was written to

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Logits:
        """Return what a linear layer would return, in autocast's type under autocast."""
        hidden, weight, *rest = lower(hidden, weight, *(() if bias is None else (bias,)))
        bias = rest[0] if rest else None
        seen = tuple((t, t._version) for t in (hidden, weight, *rest))

        def source() -> Tensor:
            _check_unwritten(seen)
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                return torchs.linear(hidden, weight, bias)

        return _logits(hidden, (weight, bias), hidden.dtype, source, seen)

    def whole(self) -> Tensor:
        """Return the logits as a tensor like any other; the first call computes them."""
        if self.made is None:
            self.made = self.source()
        return self.made

    def then(self, func: Any, *args: Any, rows: Tensor | None = None, dtype: Any = None) -> Logits:
        """Return ``func(self, *args)``, which is not computed yet either. ``rows``: the hidden rows
        that it is made from, if not the same."""
        hidden = self.hidden if rows is None else rows

        def source() -> Tensor:
            with torch.enable_grad():
                found: Tensor = func(self.whole(), *args)
                return found

        dtype = dtype or _plain(self, "dtype")
        made = _logits(hidden, self.layer, dtype, source, self.seen)
        vars(made)["before"] = self
        return made

    @property
    def is_made(self) -> bool:
        """Whether these logits, or those that they are a part of, have been computed."""
        before: Logits | None = vars(self).get("before")
        return self.made is not None or (before is not None and before.is_made)

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in FOLLOWED and args and isinstance(args[0], Logits) and not args[0].is_made:
            found = FOLLOWED[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits for what sees them below Python's functions, such as a
        ``torch.autograd.Function``."""
        args, kwargs = tree_map_only(Logits, _values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _check_unwritten(seen: tuple[tuple[Tensor, int], ...]) -> None:
    """Refuse to make logits from numbers that are no longer those the layer was called with."""
    if any(t._version != before for t, before in seen):
        wrong = "its weight or input was written to since it was called, such as by an optimiser"
        remedy = "use logits before that, or leave the layer out: dt.nn.replace(…, exclude=…)"
        asked = "logits of a layer that makes them when they are used"
        raise BindError(wrong, asked=asked, remedy=remedy)


def _values(logits: Logits) -> Tensor:
    return logits.whole().detach()


def _plain(logits: Tensor, name: str) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(logits, name)


class _Later(torch.autograd.Function):
    """Makes the tensor of uncomputed logits, and takes gradients that reach it directly to hidden,
    weight and bias."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, dtype: torch.dtype) -> Any:
        ctx.save_for_backward(hidden, weight)
        shape = (*hidden.shape[:-1], weight.shape[0])
        make: Any = Tensor._make_wrapper_subclass
        return make(Logits, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        rows = grad.flatten(0, -2)
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, rows.t() @ hidden.flatten(0, -2), bias, None


# Function.apply without its check for transforms: under those the logits are computed at once
_later: Any = super(torch.autograd.Function, _Later).apply


def _logits(hidden: Tensor, layer: Any, dtype: torch.dtype, source: Any, seen: Any) -> Logits:
    made: Any = _later(hidden, *layer, dtype)
    vars(made).update(hidden=hidden, layer=layer, source=source, seen=seen, made=None)
    return made  # type: ignore[no-any-return]


# ---- operations that leave the logits uncomputed -------------------------------------------------


def _float(logits: Logits, **named: Any) -> Any:
    return NotImplemented if named else logits.then(Tensor.float, dtype=torch.float32)


def _to(logits: Logits, *args: Any, **named: Any) -> Any:
    given = [*args, *named.values()]
    if given == [torch.float32]:
        return _float(logits)
    same = len(given) == 1 and given[0] in (logits.dtype, logits.device, str(logits.device))
    return logits if same else NotImplemented


def _view(logits: Logits, *shape: Any, **named: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    plain = not named and len(sizes) > 1 and all(type(n) is int for n in sizes)
    if not plain or sizes[-1] != logits.shape[-1]:
        return NotImplemented
    rows = logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1])
    return logits.then(Tensor.reshape, *sizes, rows=rows)


def _contiguous(logits: Logits, **named: Any) -> Any:
    return NotImplemented if named else logits


def _part(logits: Logits, index: Any) -> Any:
    """Take some of the positions, each with all its classes."""
    index = index if isinstance(index, tuple) else (index,)
    if not index or not all(i is Ellipsis or isinstance(i, slice) for i in index):
        return NotImplemented
    to_the_end = Ellipsis in index or len(index) == logits.dim()
    if to_the_end and index[-1] != slice(None):
        return NotImplemented
    return logits.then(Tensor.__getitem__, index, rows=logits.hidden[index])


def _cross_entropy(
    input: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    flat = input.dim() == 2 and size_average is None and reduce is None
    if not flat or target.is_floating_point() or isinstance(target, Logits):
        return NotImplemented
    _check_unwritten(input.seen)
    hidden, (matrix, bias) = input.hidden, input.layer
    terms: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    terms |= {"reduction": reduction, "class_weight": weight}
    if input.dtype != hidden.dtype:  # they were cast on their way
        terms["dtype"] = input.dtype
    return F.linear_cross_entropy(hidden, matrix, target, bias, **terms)


def _ours(logits: Logits, target: Tensor, weight: Tensor | None = None, **terms: Any) -> Any:
    if any(terms.pop(name, None) for name in ("z_loss", "inplace_backward", "return_lse")):
        return NotImplemented
    return _cross_entropy(logits, target, weight, **terms)


FOLLOWED: dict[Any, Callable[..., Any]] = {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _part,
    torchs.cross_entropy: _cross_entropy,
    F.cross_entropy: _ours,
}
_FACTS = "shape dtype device ndim requires_grad is_cuda is_cpu layout"
_ASKED = "size dim numel is_floating_point get_device __len__ nelement"
PLAIN = {getattr(Tensor, name).__get__ for name in _FACTS.split()}
PLAIN |= {getattr(Tensor, name) for name in _ASKED.split()}
