"""What a module computes, found out by running it.

The classes of models have no names that can be trusted, and no attributes in common. So a module is
recognised by its numbers: we call its twin, which has random parameters and children that note what
they were given, and compare the results with a formula. A module that looks like a formula's but
does not fit is refused with a reason; for one that is something else altogether the answer is None.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from deuteron.functional.operators import TORCHS
from deuteron.nn import blocks, listed_experts, moe, parts
from deuteron.nn.probe import (
    ANYTHING_WRONG,
    FLOATS,
    GENERATOR,
    Changes,
    Child,
    InDouble,
    fewer_calls,
    is_close,
    is_leaf,
    random,
    run,
    takes_one,
    twin,
    twin_of,
)

EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # tried for norms that keep eps in no attribute
GATES = ("silu", "gelu", "gelu_tanh", "relu")
MODULES_OWN = frozenset({*vars(nn.Module())} - {"training"})
# the scales of examples: some models clamp numbers, which only large ones show
SCALES = torch.tensor([[0.1], [3.0], [12.0], [1e3], [1e6]], dtype=torch.float64)


class Found(NamedTuple):
    """What may stand in for a module: a kind of part, and what it must know of the module."""

    kind: type[parts.Part]
    how: Any


Answer = Found | str | None  # a stand-in; the reason why there is none; or not of this kind


# ---- norms ---------------------------------------------------------------------------------------


def norm(module: nn.Module) -> Answer:
    """Recognise an RMS or layer norm over the last dimension: a leaf with at most two parameters,
    of one dimension."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    shapes = {tuple(p.shape) for p in own.values()}
    fits = is_leaf(module) and len(own) <= 2 and len(shapes) <= 1 and takes_one(module)
    if not fits or any(len(shape) != 1 or shape[0] < 2 for shape in shapes):
        return None
    for size in next(iter(shapes)) if shapes else _numbers(module):
        given = {name: random(size) for name in own}
        probe = twin(module, given, {})
        examples = [_rows(size), _rows(size).view(2, 2, size)]
        try:
            results = [run(probe, x) for x in examples]
            break
        except Changes as changes:
            return str(changes)
        except ANYTHING_WRONG:
            continue
    else:
        return "its forward cannot be called with rows alone" if own else None
    for name, eps, weight, bias, offset in _norms(module, list(own)):
        how = partial(_normalised, name, _number(module, eps), given.get(weight), given.get(bias))
        if all(is_close(y, how(offset, x)) for x, y in zip(examples, results, strict=True)):
            kind = _result_type(module, weight, size)
            if kind is None:
                return "the type of its results follows no rule that is known here"
            short = twin(module, {name: t.float() for name, t in given.items()}, {})
            fewer = fewer_calls(short, _rows(size))
            return Found(parts.Norm, parts.NormHow(name, eps, weight, bias, offset, kind, fewer))
    return "its results are those of no RMS or layer norm of the last dimension" if own else None


def _numbers(module: nn.Module) -> Iterator[int]:
    """Yield the numbers that a module without parameters keeps, one of which may be the length of
    its rows."""
    for value in vars(module).values():
        for number in value if isinstance(value, tuple) and len(value) == 1 else (value,):
            if number.__class__ is int and 2 <= number <= 2**16:
                yield number
    yield 24


def _rows(size: int) -> Tensor:
    """Return a row so small that eps matters, a usual one, a large one, and one far from 0."""
    scale, mean = torch.tensor([[[1e-3], [1.0], [30.0], [1.0]], [[0.0], [0.0], [0.0], [3.0]]])
    rows: Tensor = random(4, size) * scale + mean
    return rows


def _norms(module: nn.Module, own: list[str]) -> Iterator[tuple[str, Any, Any, Any, float]]:
    """Yield the formulas that a norm with these parameters may have, with every possible eps."""
    kept = [key for key, value in vars(module).items() if value.__class__ is float and value < 0.1]
    pairs: list[tuple[str | None, str | None]] = [(None, None)]
    if own:
        pairs = [(own[0], None)] if len(own) == 1 else [(own[0], own[1]), (own[1], own[0])]
    for eps in (*kept, *EPS):
        for weight, bias in pairs:
            for offset in (0.0, 1.0) if weight else (0.0,):
                if bias is None:
                    yield "rms_norm", eps, weight, bias, offset
                if not offset:
                    yield "layer_norm", eps, weight, bias, offset


def _number(module: nn.Module, eps: str | float) -> float:
    return float(getattr(module, eps)) if isinstance(eps, str) else eps


def _normalised(
    name: str, eps: float, weight: Tensor | None, bias: Tensor | None, offset: float, x: Tensor
) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if name == "layer_norm" else x
    y: Tensor = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias


def _result_type(module: nn.Module, weight: str | None, size: int) -> str | None:
    """Return the rule by which the type of the result follows from those of x and of the weight."""
    left = {*parts.RESULT_TYPES}
    for x in FLOATS:
        for w in FLOATS if weight else (x,):
            kept = [name for name, p in module._parameters.items() if p is not None]
            own = {name: torch.ones(size, dtype=w) for name in kept}
            try:
                y = run(twin(module, own, {}), torch.ones(2, size, dtype=x), double=False)
            except ANYTHING_WRONG:
                continue  # then our function need not take these types either
            left = {rule for rule in left if parts.RESULT_TYPES[rule](x, w) == y.dtype}
    return next((rule for rule in parts.RESULT_TYPES if rule in left), None)


# ---- activations ---------------------------------------------------------------------------------


def activation(module: nn.Module) -> Answer:
    """Recognise a function of each element that is one of ours: a leaf without parameters."""
    if not is_leaf(module) or module._parameters or not takes_one(module):
        return None
    # none of these numbers is where a function has a corner
    x = (torch.linspace(-0.998, 0.999, 97, dtype=torch.float64) * SCALES).requires_grad_()
    try:
        found = run(module, x)
    except ANYTHING_WRONG:
        return None
    name = next((name for name in TORCHS if is_close(found, TORCHS[name](x))), None)
    if name is None:
        return None
    for kind in FLOATS:  # of a number that is none, too, which some make 0
        try:
            y = run(module, torch.tensor([[torch.nan, 1.0]], dtype=kind), double=False)
        except ANYTHING_WRONG:
            continue  # then our function need not take this type either
        if y.dtype != kind or y.isnan().tolist() != [[True, False]]:
            return f"it is {name}, but for the type of its results or for nan"
    return Found(parts.Activation, parts.ActivationHow(name, fewer_calls(module, x)))


# ---- gated MLPs ----------------------------------------------------------------------------------


def mlp(module: nn.Module) -> Answer:
    """Recognise down(activation(gate(x)) · up(x)), with gate and up in one layer or in two, and
    perhaps a dropout before down."""
    layers = {name: m for name, m in module.named_children() if _is_linear(m)}
    if len(layers) not in (2, 3) or module._parameters or not takes_one(module):
        return None
    others = {name: m for name, m in module.named_children() if name not in layers}
    if any(m._parameters or m._buffers or m._modules for m in others.values()):
        return None
    try:
        return _gated(module, layers, others)
    except Changes as changes:
        return str(changes)
    except ANYTHING_WRONG:
        return "its forward cannot be called with smaller layers in the place of its own"


def _sizes(layers: list[Any]) -> tuple[int, dict[int, int]] | None:
    """Return the features of x, and a small number for each size of the layers; None where the
    layers are not those of a gated MLP."""
    sizes = {size for m in layers for size in (m.in_features, m.out_features)}
    small = {size: 6 + 4 * k for k, size in enumerate(sorted(sizes))}
    if len(layers) == 3:
        ins = [m.in_features for m in layers]
        return max(ins, key=ins.count), small
    for first, last in (layers, layers[::-1]):
        if first.out_features == 2 * last.in_features and first.in_features == last.out_features:
            small[first.out_features] = 2 * small[last.in_features]
            return first.in_features, small
    return None


def _is_linear(module: Any) -> bool:
    """Whether a module multiplies the last dimension by a matrix, whoever wrote it."""
    return all(isinstance(getattr(module, f"{end}_features", None), int) for end in ("in", "out"))


def _gated(module: nn.Module, layers: dict[str, Any], others: dict[str, Any]) -> Answer:
    sizes = _sizes([*layers.values()])
    if sizes is None:
        return None
    features, small = sizes
    calls: list[Any] = []
    children: dict[str, Any] = {}
    for name, m in layers.items():
        children[name] = Child(_layer(m, small), m, calls)
    for name, m in others.items():
        if isinstance(m, nn.Dropout):
            children[name] = Child(_Mask(), m, calls)
    probe, names = twin(module, {}, children), {id(c): name for name, c in children.items()}
    x = random(3, 5, small[features]) * SCALES
    result = run(probe, x)
    called = [names[id(child)] for child, _, _ in calls]
    if len(calls) != len(children) or len({*called}) != len(called):
        return "its layers are not called once each"
    down, into, out = calls[-1]
    if out is not result:
        return "what its last layer gives is not its result"
    made = [(names[id(c)], y) for c, given, y in calls[:-1] if given is x]
    masked = [(names[id(c)], given, y) for c, given, y in calls[:-1] if given is not x]
    if len(made) + 1 != len(layers) or len(masked) != len(children) - len(layers):
        return "its layers do not follow each other as gate, up and down do"
    if masked and masked[0][2] is not into:
        return "something is done between its dropout and its last layer"
    inner = masked[0][1] if masked else into
    halves = list(made[0][1].chunk(2, -1)) if len(made) == 1 else [y for _, y in made]
    for k, (gate, up) in enumerate((halves, halves[::-1])):
        act = next((a for a in GATES if is_close(inner, TORCHS[a](gate) * up)), None)
        if act is not None:
            ordered = [name for name, _ in made][:: -1 if k else 1]
            last = names[id(down)]
            how = parts.GatedHow(
                act,
                gate=ordered[0],
                up=ordered[1] if len(ordered) == 2 else None,
                down=last,
                dropout=masked[0][0] if masked else None,
                swapped=bool(k) and len(ordered) == 1,
                casts=_casts(module, children, last, x),
                inside=_inside(others),
            )
            return Found(parts.Gated, how)
    return "activation(gate) · up is not what its last layer takes, with silu, gelu or relu"


def _inside(others: Any) -> tuple[Any, ...]:
    """Return the activation modules that it holds, by name and class: with others it would compute
    something else."""
    return tuple((name, type(m)) for name, m in others.items() if not isinstance(m, nn.Dropout))


def _layer(like: Any, small: dict[int, int]) -> nn.Linear:
    sizes = small[like.in_features], small[like.out_features]
    made = nn.Linear(*sizes, dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(random(*made.weight.shape))
        made.bias.copy_(random(*made.bias.shape))
    return made


class _Mask:
    """A dropout with a known mask: if it were left out, or done twice, the result would show it."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 2.0, x.shape[-1], dtype=torch.float64)


def _casts(module: nn.Module, children: dict[str, Any], down: str, x: Tensor) -> bool:
    """Whether the input of the last layer is first cast to the type of its weight, where that is
    another one."""
    short = nn.Linear(1, 1)
    last = Child(lambda y: y if y.dtype == torch.float32 else y[0, 0, 0, 0], short, [])
    vars(last)["weight"] = short.weight
    try:
        run(twin(module, {}, children | {down: last}), x, double=False)
    except ANYTHING_WRONG:
        return False
    return True


# ---- dropout and residual ------------------------------------------------------------------------


def residual(module: nn.Module) -> Answer:
    """Recognise a chain of children that ends in a dropout, whose result is added to the input or
    to a second one; perhaps one more child, such as a norm, follows."""
    known = list(inspect.signature(type(module).forward).parameters.values())[1:]
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in known)
    drops = [name for name, m in module.named_children() if type(m) is nn.Dropout]
    if not plain or len(known) not in (1, 2) or len(drops) != 1 or module._parameters:
        return None
    try:
        calls, inputs, result = _chain(module, len(known), 1.0)
        chain = [name for name, *_ in calls]
        at = chain.index(drops[0])
        follows = [y is given for (_, _, y), (_, given, _) in pairwise(calls[: at + 1])]
        total = calls[at][2] + inputs[-1]
        last = result if at + 1 == len(calls) else calls[-1][1]
        right = calls[0][1] is inputs[0] and all(follows) and is_close(last, total)
        right = right and len({*chain}) == len(chain) == len(module._modules) <= at + 2
        right = right and (at + 1 == len(calls) or calls[-1][2] is result)
        # some models clamp results to what float16 can hold, where others give inf
        *_, large = _chain(module, len(known), 6e4)
    except ANYTHING_WRONG:
        return None
    if not right or at == 0 or bool(large.isfinite().all()):
        return None
    after = chain[at + 1] if at + 1 < len(chain) else None
    inside = ((drops[0], nn.Dropout),)
    return Found(parts.Residual, parts.ResidualHow(tuple(chain[:at]), drops[0], after, inside))


def _chain(module: nn.Module, count: int, scale: float) -> tuple[list[Any], list[Tensor], Any]:
    """Return the calls of all children in order, each of which multiplies by some numbers; the
    inputs; and the result. In float16 where ``scale`` is near the largest number it can hold."""
    dtype = torch.float64 if scale == 1.0 else torch.float16
    calls: list[Any] = []
    children = {}
    for name, m in module.named_children():
        factor = random(8).to(dtype) if scale == 1.0 else torch.ones(8, dtype=dtype)
        children[name] = Child(factor.mul, m, calls)
    names = {id(child): name for name, child in children.items()}
    given = [(random(3, 5, 8) if scale == 1.0 else torch.ones(3, 5, 8)) * scale for _ in "ab"]
    given = [x.to(dtype) for x in given[:count]]
    result = run(twin(module, {}, children), *given, double=scale == 1.0)
    return [(names[id(child)], x, y) for child, x, y in calls], given, result


# ---- rotary positions ----------------------------------------------------------------------------


def attention(module: nn.Module) -> Answer:
    """Recognise a module whose forward calls a function of its file, (q, k, cos, sin, …), that
    rotates pairs of features by angles."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or not module._modules:
        return None
    known = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    turns = {name: f for name, f in known.items() if _looks_rotary(f)}
    if not turns:
        return None
    found, why = [], ""
    for name, function in turns.items():
        answer = _rotary(function)
        if isinstance(answer, str):
            why = f"{name}: {answer}"
        else:
            found.append((name, *answer))
    if not found:
        return why
    if hasattr(forward, "__wrapped__"):
        return "its forward is wrapped, so that the function it calls cannot be reached"
    return Found(parts.Rotating, tuple(found))


def _looks_rotary(function: Any) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    return [*inspect.signature(function).parameters][:4] == ["q", "k", "cos", "sin"]


@cache
def _rotary(function: Any) -> tuple[bool, str] | str:
    """Return whether it takes tables of fewer features than q has, and the rule for its results'
    type; a string says why it is not a rotation that we know."""
    more = {p.name: p.default for p in [*inspect.signature(function).parameters.values()][4:]}
    if more not in ({}, {"unsqueeze_dim": 1}):
        return f"it takes {', '.join(more)} besides q, k, cos and sin"
    part = []
    for features in (8, 4):
        q, k = random(2, 3, 5, 8), random(2, 1, 5, 8)
        cos, sin = random(2, 5, features), random(2, 5, features)
        for axis in (1, 2) if more else (1,):
            given = [q.transpose(1, axis), k.transpose(1, axis), cos, sin]
            try:
                with InDouble():  # type: ignore[no-untyped-call]
                    found = function(*given, *((axis,) if more else ()))
                right = all(map(is_close, found, (_turned(x, cos, sin, axis) for x in given[:2])))
            except ANYTHING_WRONG:
                right = False
            part.append(right)
    half = len(part) // 2
    if not all(part[:half]):
        return "it is not x · cos + (−x₂, x₁) · sin of the halves of the features"
    rules = {*parts.RESULT_TYPES}
    for x in FLOATS:
        for t in FLOATS:
            q, cos = torch.ones(1, 1, 1, 2, dtype=x), torch.ones(1, 1, 2, dtype=t)
            kind = function(q, q, cos, cos)[0].dtype
            rules = {rule for rule in rules if parts.RESULT_TYPES[rule](x, t) == kind}
    if not rules:
        return "the type of its results follows no rule that is known here"
    return all(part[half:]), next(rule for rule in parts.RESULT_TYPES if rule in rules)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, axis: int) -> Tensor:
    features = cos.shape[-1]
    a, b = x[..., :features].chunk(2, -1)
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    y = torch.cat((a, b), -1) * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((y, x[..., features:]), -1)


# ---- norms and what follows them -----------------------------------------------------------------


def followed(module: nn.Module) -> Answer:
    """Recognise a block in which norms, sums and activations follow each other."""
    how = blocks.block(module)
    return None if how is None else Found(blocks.Block, how)


# ---- experts -------------------------------------------------------------------------------------


def experts(module: nn.Module) -> Answer:
    """Recognise all experts of a layer: their matrices are parameters of one module, or each expert
    is a module of its own."""
    how = moe.experts_of(module)
    if isinstance(how, listed_experts.ListedHow):
        return Found(listed_experts.ListedExperts, how)
    return Found(moe.ExpertsPart, how) if isinstance(how, moe.ExpertsHow) else how


RECOGNISED: tuple[Callable[[nn.Module], Answer], ...] = (
    activation,
    norm,
    mlp,
    experts,
    attention,
    residual,
    followed,
)


def facts(module: nn.Module) -> Any:
    """Return all that an answer depends on, so that of equal ones only one has to be looked at.
    None for a module with grandchildren, which depends on too much."""
    if any(child._modules for child in module.children()):
        return None
    own = [(k, v) for k, v in vars(module).items() if k not in MODULES_OWN]
    shapes = tuple((k, getattr(p, "shape", None)) for k, p in module._parameters.items())
    inner = tuple((name, facts(child)) for name, child in module.named_children())
    kept = tuple((k, v if isinstance(v, str | int | float | None) else id(v)) for k, v in own)
    return type(module), kept, shapes, tuple(module._buffers), inner


def recognise(module: nn.Module) -> Answer:
    """Return what may stand in for a module that is not one of torch's."""
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return None  # its class does not say what it does
    if any(isinstance(p, UninitializedParameter) for p in module._parameters.values()):
        return None
    GENERATOR.manual_seed(0)
    with ExitStack() as around:  # the caller's settings do not matter here, and are not changed
        plain = torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False)
        for each in (torch.random.fork_rng(devices=[]), *plain):
            around.enter_context(each)
        learning, at_work = (_answer(twin_of(module, training=mode)) for mode in (True, False))
    if learning == at_work:
        return learning
    return "in training it computes something else"


def _answer(module: nn.Module) -> Answer:
    answers = [each(module) for each in RECOGNISED]
    found = next((answer for answer in answers if isinstance(answer, Found)), None)
    why = next((why for why in answers if why is not None), None)
    if any(p is not None for p in module._parameters.values()):
        why = why or "it has parameters of its own, and there is no formula for it here"
    return found or why
