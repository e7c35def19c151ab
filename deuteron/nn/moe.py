"""Layers of experts: a module of our own, and a stand-in for those of models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.functional.operators import TORCHS
from deuteron.kinds import checked
from deuteron.nn import listed_experts
from deuteron.nn.listed_experts import ListedHow
from deuteron.nn.parts import RESULT_TYPES, Gated, Part, as_found, asked_for_authors
from deuteron.nn.probe import ANYTHING_WRONG, FLOATS, Changes, is_close, random, run, twin

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
# What checkpoints that keep each expert by itself call its gate, up and down.
SPELLINGS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


class Router(nn.Module):
    """The layer that scores experts: x · weightᵀ."""

    weight: nn.Parameter

    def __init__(self, features: int, experts: int, **how: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, features, **how))
        nn.init.normal_(self.weight, std=features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != self.weight.shape[1:]:
            wrong = f"x has rows of {x.shape[-1] if x.ndim else 'one number'}"
            asked = f"MoE of {self.weight.shape[1]} features (x {list(x.shape)})"
            raise BindError(wrong, asked=asked, remedy=f"give [..., {self.weight.shape[1]}]")
        return nn.functional.linear(x, self.weight)


class Experts(nn.Module):
    """The matrices of all experts, with the rows of gate before those of up in one parameter."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, features: int, inside: int, experts: int, **how: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inside, features, **how))
        self.down_proj = nn.Parameter(torch.empty(experts, features, inside, **how))
        nn.init.normal_(self.gate_up_proj, std=features**-0.5)
        nn.init.normal_(self.down_proj, std=inside**-0.5)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        """Load the matrices, joining those of a state dict that has the experts one by one."""
        count = self.gate_up_proj.shape[0]
        for names in SPELLINGS:
            keys = [[f"{prefix}{e}.{n}.weight" for e in range(count)] for n in names]
            if all(key in state for several in keys for key in several):
                gate, up, down = ([state.pop(key) for key in several] for several in keys)
                both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
                state[f"{prefix}gate_up_proj"] = torch.stack(both)
                state[f"{prefix}down_proj"] = torch.stack(down)
        super()._load_from_state_dict(state, prefix, *rest)


class MoE(nn.Module):
    """A layer of experts: every token goes to the ``top_k`` experts that score best, and comes back
    as the sum of their results times their shares. An expert computes down(silu(gate · x) · (up ·
    x)).

    features    of a token
    inside      features between the two products of an expert
    experts     how many there are
    top_k       how many of them a token goes to
    score, normalise, activation  as for :func:`deuteron.functional.moe`
    device, dtype                 as torch's

    >>> layer = dt.nn.MoE(4096, 14336, experts=8, top_k=2)
    >>> layer.load_state_dict(model.model.layers[0].mlp.state_dict())    # a block of Mixtral's

    Parameters have the names that transformers gives them: ``gate.weight`` [experts, features],
    ``experts.gate_up_proj`` [experts, 2 · inside, features] and ``experts.down_proj`` [experts,
    features, inside]. State dicts in which each expert is kept by itself (``experts.0.w1.weight``,
    ``experts.0.gate_proj.weight``, …) load as well.
    """

    @checked(name="MoE")
    def __init__(
        self,
        features: int,
        inside: int,
        experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalise: bool = True,
        activation: str = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            wrong = f"a token cannot go to {top_k} of {experts} experts"
            remedy = f"use a top_k from 1 to {max(experts, 1)}"
            raise BindError(wrong, asked=f"MoE(…, {experts}, {top_k})", remedy=remedy)
        how = {"device": device, "dtype": dtype}
        self.gate = Router(features, experts, **how)
        self.experts = Experts(features, inside, experts, **how)
        self.top_k, self.score, self.normalise = top_k, score, normalise
        self.activation = activation

    @classmethod
    def from_experts(
        cls, router: nn.Linear, experts: Sequence[nn.Module], top_k: int, **how: Any
    ) -> Self:
        """Make a layer from copies of the weights of a router and of experts that are modules of
        their own: gated MLPs without biases and dropout, whoever wrote them. ``how``: further
        arguments of :class:`MoE`."""
        from deuteron.nn.recognise import recognise

        asked = f"MoE.from_experts({type(experts[0]).__name__}, …)" if experts else "no experts"
        parts = list[tuple[Tensor, ...]]()
        names = set[str]()
        for expert in experts:
            found: Any = recognise(expert)
            layers = [m for m in expert.modules() if hasattr(m, "in_features")]
            plain = all(getattr(m, "bias", None) is None for m in (router, *layers))
            gated = getattr(found, "kind", None) is Gated and found.how.up is not None
            gated = gated and found.how.dropout is None
            if not gated or not plain:
                why = f": {found}" if isinstance(found, str) else ""
                wrong = f"{type(expert).__name__} is no gated MLP without biases and dropout{why}"
                remedy = "write the layer with dt.functional.experts"
                raise BindError(wrong, asked=asked, remedy=remedy)
            weights = (
                getattr(expert, getattr(found.how, n)).weight for n in ("gate", "up", "down")
            )
            parts.append(tuple(w.detach() for w in weights))
            names.add(found.how.activation)
        if len(names) != 1:
            raise BindError("experts have different activations, or there are none", asked=asked)
        gates, ups, downs = (torch.stack(several) for several in zip(*parts, strict=True))
        (count, inside, features), first = gates.shape, parts[0][0]
        how |= {"activation": names.pop(), "device": first.device, "dtype": first.dtype}
        made = cls(features, inside, count, top_k, **how)
        with torch.no_grad():
            made.gate.weight.copy_(router.weight)
            made.experts.gate_up_proj.copy_(torch.cat((gates, ups), 1))
            made.experts.down_proj.copy_(downs)
        return made.train(router.training)

    def forward(self, x: Tensor) -> Tensor:
        how: Any = {"score": self.score, "normalise": self.normalise}
        shares, numbers = F.route(self.gate(x), self.top_k, **how)
        weights = self.experts.gate_up_proj, self.experts.down_proj
        return F.experts(x, numbers, shares, *weights, activation=self.activation)

    def extra_repr(self) -> str:
        experts, features, inside = self.experts.down_proj.shape
        sizes = f"{features}, {inside}, experts={experts}, top_k={self.top_k}"
        return f"{sizes}, score={self.score!r}, normalise={self.normalise}"


# ---- what stands in for modules of models


class ExpertsHow(NamedTuple):
    """How a module of experts is called: the names of the arguments of its forward, in the order of
    tokens, experts and shares; the names of both parameters; whether their matrices are [in, out]
    (``turned``); the activation; ``inside`` as in :class:`~deuteron.nn.parts.GatedHow`; and by
    which rule the type of the ``result`` follows from those of tokens and shares."""

    arguments: tuple[str, ...]
    w_in: str
    w_out: str
    turned: bool
    activation: str
    inside: tuple[tuple[str, type], ...]
    result: str = "that of x"


class ExpertsPart(Part, nn.Module):
    """All experts of a layer, called with tokens, the numbers of their experts, and shares."""

    _how: ClassVar[ExpertsHow]

    @staticmethod
    def words(how: ExpertsHow) -> str:
        return f"dt.functional.experts, {how.activation}"

    def forward(self, *args: Any, **named: Any) -> Any:
        how = self._how
        given = dict(zip(how.arguments, args, strict=False)) | named
        split = getattr(self, "_is_expert_parallel", False)  # then some experts are elsewhere
        if split or asked_for_authors(given[how.arguments[0]]) or not as_found(self, how.inside):
            return super().forward(*args, **named)
        x, numbers, shares = (given[name] for name in how.arguments)
        w_in, w_out = getattr(self, how.w_in), getattr(self, how.w_out)
        if how.turned:
            w_in, w_out = w_in.mT, w_out.mT
        if RESULT_TYPES[how.result](x.dtype, shares.dtype) != x.dtype:
            return super().forward(*args, **named)
        return F.experts(x, numbers, shares, w_in, w_out, activation=how.activation)


def _one_by_one(module: nn.Module) -> ListedHow | str | None:
    """Return how a layer uses experts that are modules of a list, with a linear layer beside it as
    the router; or what to do about a layer that uses them in a way we do not know."""
    lists = [(n, m) for n, m in module.named_children() if isinstance(m, nn.ModuleList)]
    for name, several in lists:
        alike = len(several) > 1 and len({type(m) for m in several}) == 1
        gates = [n for n, m in module.named_children() if _scores(m, len(several))]
        if alike and gates:
            how = listed_experts.listed_experts_of(module, gates[0], name)
            given = f"layer.{gates[0]}, layer.{name}, top_k"
            remedy = f"dt.nn.MoE.from_experts({given}) makes one layer of them"
            return how or f"its experts are called one by one, by no rule that is known: {remedy}"
    return None


def _scores(module: nn.Module, experts: int) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == experts


def experts_of(module: nn.Module) -> ExpertsHow | ListedHow | str | None:
    """Return how a module is called that has two parameters, the matrices of all experts, and whose
    forward takes tokens, the numbers of their experts, and shares. A string says why it only looks
    like one; None: it does not even look like one."""
    if any(isinstance(m, nn.ModuleList) for m in module.children()):
        return _one_by_one(module)
    own = {name: p for name, p in module._parameters.items() if p is not None}
    theirs = inspect.unwrap(type(module).forward)  # below decorators that may swap it for another
    known = list(inspect.signature(theirs).parameters.values())[1:]
    plain = len(known) == 3 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in known)
    if not plain or len(own) != 2 or any(p.ndim != 3 for p in own.values()):
        return None
    if any(m._parameters or m._buffers or m._modules for m in module.children()):
        return "its children have parameters or buffers of their own"
    count = next(iter(own.values())).shape[0]
    experts = torch.stack([torch.randperm(count)[: min(2, count)] for _ in range(9)])
    scales = torch.logspace(-1, 7, 9, dtype=torch.float64)[:, None]  # some clamp large numbers
    x, shares = random(9, 6) * scales, random(*experts.shape)
    inside = tuple((name, type(m)) for name, m in module.named_children())
    for w_in, w_out, turned in _layouts(own):
        given = random(count, 2 * 10, 6), random(count, 6, 10)
        laid = [t.mT.contiguous() if turned else t for t in given]
        matrices = dict(zip((w_in, w_out), laid, strict=True))
        probe = twin(module, matrices, {})
        try:
            result = run(probe, x.clone(), experts, shares, forward=theirs)
        except Changes as changes:
            return str(changes)
        except ANYTHING_WRONG:
            continue
        for name in ACTIVATIONS:
            if is_close(result, _by_a_loop(x, experts, shares, *given, name)):
                rule = _result_type(module, matrices, theirs)
                if rule is None:
                    return "the type of its results follows no rule that is known here"
                arguments = tuple(p.name for p in known)
                return ExpertsHow(arguments, w_in, w_out, turned, name, inside, rule)
    return "its results are not Σ share · down(activation(gate) · up), with silu, gelu or relu"


def _result_type(module: nn.Module, own: dict[str, Tensor], forward: Any) -> str | None:
    """Return the rule by which the type of the result follows from those of tokens and shares."""
    left, experts = ["that of x", "the wider one"], torch.zeros(1, 1, dtype=torch.int64)
    for kind, beside in product(FLOATS, FLOATS):
        probe = twin(module, {name: t.detach().to(kind) for name, t in own.items()}, {})
        given = torch.ones(1, 6, dtype=kind), experts, torch.ones(1, 1, dtype=beside)
        try:
            y = run(probe, *given, double=False, forward=forward)
        except ANYTHING_WRONG:
            continue  # then our function need not take these types either
        left = [rule for rule in left if RESULT_TYPES[rule](kind, beside) == y.dtype]
    return left[0] if left else None


def _layouts(own: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield how two parameters may be the matrices of gated experts, judging by their sizes."""
    for first, second in ([*own], [*own][::-1]):
        a, b = own[first].shape, own[second].shape
        if a[0] == b[0] and a[1] == 2 * b[2] and a[2] == b[1]:
            yield first, second, False
        if a[0] == b[0] and a[2] == 2 * b[1] and a[1] == b[2]:
            yield first, second, True


def _by_a_loop(
    x: Tensor, experts: Tensor, shares: Tensor, w_in: Tensor, w_out: Tensor, activation: str
) -> Tensor:
    gate, up = torch.einsum("tk,tshk->tsh", x, w_in[experts]).chunk(2, -1)
    made = torch.einsum("tsh,tskh->tsk", TORCHS[activation](gate) * up, w_out[experts])
    return (made * shares[..., None]).sum(1)
