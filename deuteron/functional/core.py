"""How a small graph becomes an eager function.

A function is written once, as a graph: ``build(b, x, weight, *, eps)`` emits operators on handles.
Called with tensors it is planned for their shapes, strides and device like any graph, and the plan
is kept; its gradient is the pullback of the same graph, planned the same way. Under
``torch.compile`` the call is an operator ``deuteron::<name>`` that the compiler passes through.

For the backward pass the fewest bytes are saved: inputs, or results that stand for them. What else
it needs it computes again inside the fused kernel, which reads those anyway.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import compiler
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes

from deuteron.errors import DeuteronError
from deuteron.functional.given import (
    Attributes,
    Tensors,
    Types,
    one_device,
    plain,
    signature,
    strided,
    types_of,
)
from deuteron.functional.library import Heard, in_transform, is_watched, without_memory
from deuteron.functional.pull import EAGER, KEPT, Pull, keep, run_plan, spread
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.ops.evaluate import evaluate
from deuteron.plan import Plan, compile_graph

Build = Callable[..., "Sym | tuple[Sym, ...]"]

LIBRARY = torch.library.Library("deuteron", "FRAGMENT")
FUNCTIONS: dict[str, Function] = {}


class Function:
    """A graph as an eager function with gradients.

    The parameters of ``build`` after the first are its signature: positional ones are tensors
    (``Sym``, or ``Sym | None`` where the tensor may be left out), keyword-only ones attributes.
    A call gives all of them; defaults are a matter of the public function around it.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        silent: Sequence[int] = (),
        overwritten: Sequence[str] = (),
        eager: bool = False,
        into: Mapping[int, str] | None = None,
    ) -> None:
        """``silent``: places of results that no gradient comes back from. ``overwritten``: tensors
        that the caller writes to afterwards, so that the backward pass has to do without.
        ``eager``: it is run with :meth:`run` or :meth:`knowing` alone, and torch need not know it.
        ``into``: results that take the memory of a tensor, where a kernel can."""
        self.name, self.build, self.silent = name, build, frozenset(silent)
        self.overwritten = frozenset(overwritten)
        self.into = {str(place): tensor for place, tensor in (into or {}).items()}
        parameters = list(inspect.signature(build).parameters.values())[1:]
        self.tensors = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.attributes = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.known: dict[Any, Known] = {}
        if not eager:
            FUNCTIONS[name] = self
            self.op = _register(self, parameters)

    def __call__(self, *tensors: torch.Tensor | None, **attrs: Any) -> Any:
        """One tensor, or a tuple where the graph has several results."""
        if is_dynamo_compiling() or compiler._is_compiling_flag:  # is_compiling(), sooner
            found = self.op(*tensors, **attrs)
        elif in_transform():
            found = self.by_references(tensors, attrs)
        elif is_watched():
            found = self.op(*tensors, **attrs)
        else:
            known = self.known.get(signature(tensors, attrs))
            if known is None or Heard.listeners:
                if without_memory(*tensors):
                    one_device(self.name, tensors)
                    found = self.op(*tensors, **attrs)
                    return found[0] if len(found) == 1 else tuple(found)
                tensors = tuple(plain(self.name, t) for t in tensors)
                known = self.knowing(tensors, attrs)
            if torch.is_grad_enabled() and any_requires_grad(tensors):
                found = record(known, *tensors)
            else:
                found = known.run(tensors)
        return found[0] if len(found) == 1 else tuple(found)

    def one(self, *tensors: torch.Tensor | None, **attrs: Any) -> torch.Tensor:
        """The call of a function with a single result."""
        result: torch.Tensor = self(*tensors, **attrs)
        return result

    def run(self, tensors: Tensors, attrs: Attributes) -> Sequence[torch.Tensor]:
        """The results for tensors whose memory holds their values, without a thought of
        gradients."""
        return self.knowing(tensors, attrs).run(tensors)

    def knowing(self, tensors: Tensors, attrs: Attributes) -> Known:
        """What was worked out for such tensors, now or before."""
        key = signature(tensors, attrs)
        found = self.known.get(key)
        if found is None:
            one_device(self.name, tensors)
            found = keep(self.known, key, Known(self, types_of(tensors), attrs))
        return found

    def by_references(self, tensors: Tensors, attrs: Attributes) -> Sequence[torch.Tensor]:
        """The results by torch's operators, one by one: for transforms that must see them."""
        given = [strided(self.name, t) for t in tensors]
        one_device(self.name, given)
        graph = self.graph(types_of(given), attrs)
        named = {n: t for n, t in zip(self.tensors, given, strict=True) if t is not None}
        return list(evaluate(graph, named, differentiable=True).values())

    def write(self, b: Ops, *given: Any) -> tuple[Sym, ...]:
        """A call, with its arguments in the order of the operator's, into a graph that is being
        made of a whole module."""
        count = len(self.tensors)
        attrs = _frozen(dict(zip(self.attributes, given[count:], strict=True)))
        found = self.build(b, *given[:count], **attrs)
        return found if isinstance(found, tuple) else (found,)

    def graph(self, types: Types, attrs: Attributes) -> Graph:
        """The function for tensors of these types; its results are called 0, 1, …"""
        builder = GraphBuilder(table.infer, self.name)
        ops = Ops(builder)
        given = [
            None if t is None else ops.sym(builder.input(name, t))
            for name, t in zip(self.tensors, types, strict=True)
        ]
        try:
            with _disable_current_modes():  # numbers in a graph are real, whoever traces the call
                found = self.build(ops, *given, **attrs)
        except DeuteronError as error:
            called = self.name.removeprefix("op_")
            error.asked = f"{called}({_shown(self.tensors, types, attrs)})"
            raise error
        for i, result in enumerate(found if isinstance(found, tuple) else (found,)):
            result.output(str(i))
        return builder.finish()


class Known:
    """A function for tensors of given types: its plan, and the ways back. A second call finds
    this, and nothing is looked at any more."""

    def __init__(self, function: Function, types: Types, attrs: Attributes) -> None:
        self.function, self.types, self.attrs = function, types, attrs
        self.graph: Graph | None = function.graph(types, attrs)  # what is wrong is not kept
        self.all_given = None not in types
        self.plan: Plan | None = None
        self.ready: Callable[..., list[torch.Tensor]] | None = None
        self.pulls: dict[tuple[bool, ...], Pull] = {}

    def run(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        """The results; a gradient is none of its business."""
        given = tensors if self.all_given else [t for t in tensors if t is not None]
        if self.ready is None or Heard.listeners:
            return self._first_run([t for t in given if t is not None])
        return self.ready(*given)

    def _first_run(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.plan is None:
            assert self.graph is not None
            self.plan = compile_graph(
                self.graph, device=tensors[0].device, policy=EAGER, into=self.function.into
            )
            self.graph = None
        found = run_plan(self.plan, tensors)
        self.ready = self.plan.ready()
        return found

    def pull(self, needs: tuple[bool, ...]) -> Pull:
        """The way back, where these of the tensors need a gradient."""
        found = self.pulls.get(needs)
        if found is None:
            found = self.pulls[needs] = Pull(self.function, self.types, self.attrs, needs)
        return found


@lru_cache(maxsize=KEPT)
def _pull_of(spec: str, device: torch.device) -> Pull:
    """The pull that a text stands for, on one device: plans are kept for it alone."""
    name, types, attrs, needs = json.loads(spec)
    read = tuple(None if t is None else TensorType.of(t[0], t[1], strides=t[2]) for t in types)
    return Pull(FUNCTIONS[name], read, _frozen(attrs), tuple(needs))


class _Differentiable(torch.autograd.Function):
    """The eager path with gradients: less overhead than the dispatcher's."""

    @staticmethod
    def forward(ctx: Any, known: Known, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        pull = known.pull(ctx.needs_input_grad[1:])
        results = known.run(tensors)
        everything = (*tensors, *results)
        ctx.pull = pull
        ctx.save_for_backward(*[everything[i] for i in pull.saved])
        ctx.set_materialize_grads(False)
        if len(pull.of) < len(results):
            ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in pull.of))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        of = [i for i, g in enumerate(grads) if g is not None]
        if not of:
            return (None,) * len(ctx.needs_input_grad)
        pull: Pull = ctx.pull
        came = [g.resolve_neg() if g.is_neg() else g for g in grads if g is not None]
        given = [*ctx.saved_tensors, *came]
        if torch.is_grad_enabled():  # somebody means to differentiate what comes out
            return None, *pull.by_references(of, given)
        way = pull.way(of, given)
        return None, *spread(way.run(given), way.slots, came)


# Function.apply, less its look at transforms, which is behind us already
record: Callable[..., tuple[torch.Tensor, ...]] = super(
    torch.autograd.Function, _Differentiable
).apply

# ---- for torch.compile

_SCHEMA = {
    "Sym": "Tensor",
    "Sym | None": "Tensor?",
    "float": "float",
    "int": "int",
    "bool": "bool",
    "str": "str",
    "float | None": "float?",
    "int | None": "int?",
    "str | None": "str?",
    "tuple[int, ...]": "int[]",
    "tuple[int, ...] | None": "int[]?",
    "tuple[float, ...] | None": "float[]?",
}


def _register(function: Function, parameters: Sequence[inspect.Parameter]) -> Any:
    """The function as an operator that torch.compile sees and does not look into."""
    # without defaults: the dispatcher would leave out what equals them
    words = [f"{_SCHEMA[p.annotation]} {p.name}" for p in parameters]
    if len(function.tensors) < len(words):
        words.insert(len(function.tensors), "*")
    LIBRARY.define(f"{function.name}({', '.join(words)}) -> Tensor[]")

    def run(*tensors: torch.Tensor | None, **attrs: Any) -> list[torch.Tensor]:
        given = [plain(function.name, t) for t in tensors]
        return list(function.run(given, _frozen(attrs)))

    def fake(*tensors: torch.Tensor | None, **attrs: Any) -> list[torch.Tensor]:
        return _empty(function.graph(types_of(tensors), _frozen(attrs)), tensors)

    def keep(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: Any,
        keyword_only_inputs: Attributes | None = None,
    ) -> None:
        needs = [
            bool(n) and t is not None for n, t in zip(ctx.needs_input_grad, inputs, strict=False)
        ]
        ctx.pull = Pull(
            function, types_of(inputs), _frozen(keyword_only_inputs or {}), tuple(needs)
        )
        everything = (*inputs, *output)
        ctx.save_for_backward(*(everything[i] for i in ctx.pull.saved))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
        of = [i for i, g in enumerate(grads) if g is not None and i in ctx.pull.of]
        pull: Pull = ctx.pull
        if not of:
            return (None,) * len(pull.needs)
        given = [*ctx.saved_tensors, *(grads[i] for i in of)]
        found = torch.ops.deuteron.pullback(pull.spec, of, given)
        _, places = pull.graph(of, types_of(given)[len(pull.saved) :])
        return pull.spread(found, places, given[len(pull.saved) :])

    name = f"deuteron::{function.name}"
    LIBRARY.impl(function.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=keep, lib=LIBRARY)
    return getattr(torch.ops.deuteron, function.name).default


def entries() -> dict[str, Callable[..., tuple[Sym, ...]]]:
    """How to write the operators above into a graph, by the names that torch has for them: a module
    that calls our functions is planned as if it were written in our operators."""
    return {f"deuteron.{name}.default": function.write for name, function in FUNCTIONS.items()}


def _pullback(spec: str, of: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(_pull_of(spec, tensors[0].device).run(of, tensors))


def _fake_pullback(
    spec: str, of: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    pull = _pull_of(spec, tensors[0].device)
    return _empty(pull.graph(of, types_of(tensors)[len(pull.saved) :])[0], tensors)


LIBRARY.define("pullback(str spec, int[] of, Tensor[] tensors) -> Tensor[]")
LIBRARY.impl("pullback", _pullback, "CompositeExplicitAutograd")
torch.library.register_fake("deuteron::pullback", _fake_pullback, lib=LIBRARY)


# ---- small things


def any_requires_grad(tensors: Tensors) -> bool:
    for t in tensors:  # noqa: SIM110  any() with a generator takes twice as long
        if t is not None and t.requires_grad:
            return True
    return False


def _frozen(attrs: Attributes) -> Attributes:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in attrs.items()}


def _empty(graph: Graph, tensors: Tensors) -> list[torch.Tensor]:
    device = next(t.device for t in tensors if t is not None)
    types = [graph.types[value] for _, value in graph.outputs]
    return [
        torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device=device) for t in types
    ]


def _shown(names: Sequence[str], types: Types, attrs: Attributes) -> str:
    tensors = [f"{n}: {t}" for n, t in zip(names, types, strict=True) if t is not None]
    return ", ".join([*tensors, *(f"{k}={v!r}" for k, v in attrs.items())])


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What ``function(*args, **kwargs)`` runs, where and why, forward only.

    >>> print(dt.functional.explain(dt.functional.rms_norm, x, (4096,), w))
    """
    with Heard() as parts:
        function(*args, **kwargs)
    return "\n".join(str(part.explain()) for part in parts)
