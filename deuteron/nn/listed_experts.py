"""Layers that keep each expert as a module of its own, as models wrote them first. Here the experts
run together, and every parameter stays where the model has it.

A loop over experts waits for the number of tokens of each, and multiplies few rows at a time. Run
together, they are grouped products with matrices that lie one after the other in memory. So the
weights of the experts are moved there when the layer is first called: parameters stay the same
objects, under the same names, and become views of one block of memory for the way in and one for
the way out. An optimiser that writes into them writes there. Where parameters cannot move, such as
those that share their memory with others, a copy is made in every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.functional.context import is_captured, is_eager
from deuteron.functional.moe import SCORES
from deuteron.nn.authors import BEFORE, is_bare
from deuteron.nn.parts import Gated, GatedHow, Part, asked_for_authors
from deuteron.nn.probe import ANYTHING_WRONG, Child, is_close, random, run, takes_one, twin


class ListedHow(NamedTuple):
    """How a layer uses its experts: the names of the router and of the list of experts; ``top_k``,
    how many experts a token goes to, or the attribute in which the layer keeps that; how shares are
    made (``score``, ``normalise``); ``logits``: "" if they are not returned, "flat" if they are
    with one row for each token, "as x" if they are in the shape of x; and of an expert its class,
    the names of its ``layers`` gate, up and down, its activation, and names and classes of the
    activation modules that it holds."""

    router: str
    listed: str
    top_k: str | int
    score: str
    normalise: bool
    logits: str
    expert: type[nn.Module]
    layers: tuple[str, str, str]
    activation: str
    held: tuple[tuple[str, type], ...]


class ListedExperts(Part, nn.Module):
    """A router, the best experts of each token, and the sum of what they make of it."""

    _how: ClassVar[ListedHow]

    @staticmethod
    def words(how: ListedHow) -> str:
        return f"dt.functional.experts of all that are in {how.listed}, {how.activation}"

    def forward(self, *args: Any, **named: Any) -> Any:
        (x,) = (*args, *named.values())
        how = self._how
        several = getattr(self, how.listed)
        if asked_for_authors(x) or not all(_is_plain(expert, how) for expert in several):
            return super().forward(*args, **named)
        rows = x.reshape(-1, x.shape[-1])
        logits = getattr(self, how.router)(rows if how.logits == "flat" else x)
        top_k = getattr(self, how.top_k) if isinstance(how.top_k, str) else how.top_k
        flat = logits.reshape(rows.shape[0], len(several))
        shares, numbers = F.route(flat, top_k, score=how.score, normalise=how.normalise)
        gate, up, down = ([getattr(e, name).weight for e in several] for name in how.layers)
        pairs = [w for pair in zip(gate, up, strict=True) for w in pair]
        w_in, w_out = together(pairs), together(down)
        w_in = w_in.view(len(several), -1, w_in.shape[-1])
        y = F.experts(rows, numbers, shares, w_in, w_out, activation=how.activation)
        y = y.reshape(x.shape).to(x.dtype)
        return (y, logits) if how.logits else y


def _is_plain(expert: nn.Module, how: ListedHow) -> bool:
    """Whether an expert is still what was found, and neither it nor what it holds has hooks."""
    layers = [getattr(expert, name) for name in how.layers]
    acts = [(getattr(expert, name), kind) for name, kind in how.held]
    for module, kind in ((expert, how.expert), *acts, *((layer, nn.Linear) for layer in layers)):
        if not is_bare(module):
            return False
        if vars(module).get(BEFORE, type(module)) is not kind:
            return False
    return all(layer.bias is None for layer in layers)


# ---- weights that lie one after the other


def together(several: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape as one tensor [how many, …], with gradients for each of them."""
    if not is_eager(*several):
        return torch.stack([*several])
    if not _in_a_row(several) and _may_move(several):
        with torch.no_grad():
            whole = torch.stack([*several])
            for one, place in zip(several, whole.unbind(0), strict=True):
                one.data = place
    if not _in_a_row(several):
        return torch.stack([*several])
    found: Tensor = _Together.apply(*several)  # type: ignore[no-untyped-call]
    return found


def _in_a_row(several: Sequence[Tensor]) -> bool:
    """Whether matrices lie one after the other in one piece of memory."""
    first = several[0]
    start, step = first.data_ptr(), first.numel() * first.element_size()
    whole = first.untyped_storage()
    return (
        all(
            t.data_ptr() == start + i * step and t.is_contiguous() and t.dtype == first.dtype
            for i, t in enumerate(several)
        )
        and start - whole.data_ptr() + step * len(several) <= whole.nbytes()
    )


def _may_move(several: Sequence[Tensor]) -> bool:
    """Whether parameters can be given other memory, because nothing else looks into theirs."""
    first = several[0]
    return not is_captured(first) and all(
        type(t) is nn.Parameter
        and t.untyped_storage().nbytes() == t.nbytes
        and not (t.device.type == "cpu" and t.is_shared())
        and (t.dtype, t.device, t.shape) == (first.dtype, first.device, first.shape)
        for t in several
    )


class _Together(torch.autograd.Function):
    """Shows matrices that lie one after the other as one tensor; nothing is moved."""

    @staticmethod
    def forward(ctx: Any, *several: Tensor) -> Tensor:
        ctx.save_for_backward(*several)  # so torch notices if they change before backward
        first = several[0].detach()
        shape = (len(several), *first.shape)
        return first.as_strided(shape, (first.numel(), *first.stride()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert len(ctx.saved_tensors) == len(grads[0])
        return grads[0].unbind(0)


# ---- how such a layer is found


def listed_experts_of(module: nn.Module, router: str, listed: str) -> ListedHow | None:
    """Return how a layer uses this router and this list; None if no formula of ours fits."""
    from deuteron.nn.recognise import Found, facts, recognise

    several: Any = getattr(module, listed)
    known: dict[Any, Any] = {}
    for expert in several:
        key = facts(expert) or id(expert)
        known[key] = known[key] if key in known else recognise(expert)
    first, *others = {*known.values()}
    if others or not isinstance(first, Found) or first.kind is not Gated or not takes_one(module):
        return None
    how: GatedHow = first.how
    if how.up is None or how.dropout:
        return None
    layers, count, features = (how.gate, how.up, how.down), len(several), 6
    route = nn.Linear(features, count, dtype=torch.float64)
    matrices = [random(features, features) for _ in several]
    calls: list[Any] = []
    asked = [Child(partial(_answer, m), e, calls) for m, e in zip(matrices, several, strict=True)]
    children = {router: Child(route, getattr(module, router), calls), listed: nn.ModuleList(asked)}
    x = random(2, 9, features)
    try:
        result = run(twin(module, {}, children), x)
    except ANYTHING_WRONG:
        return None
    y, *rest = result if isinstance(result, tuple) else (result,)
    logits = route(x)
    every = torch.stack([_answer(m, x) for m in matrices], -1)
    back = _logits(rest, logits)
    if back is None:
        return None
    for top_k, score, normalise in _ways(module, count):
        k = getattr(module, top_k) if isinstance(top_k, str) else top_k
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        shares, numbers = scores.topk(k)
        shares = shares / shares.sum(-1, keepdim=True) if normalise else shares
        weights = torch.zeros_like(scores).scatter(-1, numbers, shares)
        if is_close(y, (every * weights[..., None, :]).sum(-1)):
            ways, inner = (top_k, score, normalise, back), (layers, how.activation, how.inside)
            made = ListedHow(router, listed, *ways, type(several[0]), *inner)
            plain = all(_is_plain(expert, made) for expert in several)
            return made if plain and _keeps_type(module, router, listed, features) else None
    return None


def _keeps_type(module: nn.Module, router: str, listed: str, features: int) -> bool:
    """Whether the result has the type of the input where that has 16 bits."""
    several: Any = getattr(module, listed)
    children = {
        router: nn.Linear(features, len(several), dtype=torch.bfloat16),
        listed: nn.ModuleList(Child(torch.tanh, expert, []) for expert in several),
    }
    x = torch.ones(2, 9, features, dtype=torch.bfloat16)
    try:
        y = run(twin(module, {}, children), x, double=False)
    except ANYTHING_WRONG:
        return True  # then it is not called with that type
    return bool((y[0] if isinstance(y, tuple) else y).dtype == x.dtype)


def _answer(matrix: Tensor, x: Tensor) -> Tensor:
    """What stands for an expert in a probe: a function of a row that no other expert has."""
    return torch.tanh(x @ matrix)


def _logits(rest: Sequence[Any], logits: Tensor) -> str | None:
    """Say how logits are returned besides the result: "" if they are not, None if something else
    is."""
    if not rest:
        return ""
    flat = logits.reshape(-1, logits.shape[-1])
    for name, want in (("flat", flat), ("as x", logits)):
        if len(rest) == 1 and is_close(rest[0], want):
            return name
    return None


def _ways(module: nn.Module, count: int) -> Iterator[tuple[str | int, str, bool]]:
    """Yield ways in which a layer may choose experts: how many for a token (first the names of
    attributes that may say so), and how shares are made."""
    kept = [name for name, n in vars(module).items() if n.__class__ is int and 1 <= n <= count]
    every: list[str | int] = [*kept, *range(1, min(count, 8) + 1)]
    for top_k in every:
        for score in SCORES:
            for normalise in (True, False):
                yield top_k, score, normalise
