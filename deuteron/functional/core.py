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
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
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
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops import Ops, Sym, table
from deuteron.ops.evaluate import evaluate
from deuteron.passes import pullback
from deuteron.plan import Plan, compile_graph
from deuteron.plan.tensors import restrided
from deuteron.policy import Policy

Build = Callable[..., "Sym | tuple[Sym, ...]"]

LIBRARY = torch.library.Library("deuteron", "FRAGMENT")
FUNCTIONS: dict[str, Function] = {}
KEPT = 1024  # plans of one function; beyond, the oldest makes room
EAGER = Policy(cuda_graph=False)  # a caller may capture the call in a graph of its own


class Function:
    """A graph as an eager function with gradients.

    The parameters of ``build`` after the first are its signature: positional ones are tensors
    (``Sym``, or ``Sym | None`` where the tensor may be left out), keyword-only ones attributes.
    A call gives all of them; defaults are a matter of the public function around it.
    """

    def __init__(
        self, name: str, build: Build, silent: Sequence[int] = (), overwritten: Sequence[str] = ()
    ) -> None:
        """``silent``: places of results that no gradient comes back from. ``overwritten``: tensors
        that the caller writes to afterwards, so that the backward pass has to do without."""
        self.name, self.build, self.silent = name, build, frozenset(silent)
        self.overwritten = frozenset(overwritten)
        parameters = list(inspect.signature(build).parameters.values())[1:]
        self.tensors = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.attributes = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.known: dict[Any, Known] = {}
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
            found = _keep(self.known, key, Known(self, types_of(tensors), attrs))
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
            self.plan = compile_graph(self.graph, device=tensors[0].device, policy=EAGER)
            self.graph = None
        found = _run(self.plan, tensors)
        self.ready = self.plan.ready()
        return found

    def pull(self, needs: tuple[bool, ...]) -> Pull:
        """The way back, where these of the tensors need a gradient."""
        found = self.pulls.get(needs)
        if found is None:
            found = self.pulls[needs] = Pull(self.function, self.types, self.attrs, needs)
        return found


class Pull:
    """The backward pass of a function for inputs of given types: what to save for it, and its
    plans. ``saved`` counts through the inputs and then the results of the function."""

    def __init__(
        self, function: Function, types: Types, attrs: Attributes, needs: tuple[bool, ...]
    ):
        self.function, self.types, self.attrs, self.needs = function, types, attrs, needs
        there = [
            None if name in function.overwritten else t
            for name, t in zip(function.tensors, types, strict=True)
        ]
        self.forward = function.graph(tuple(there), attrs)
        self.wrt = [n for n, need in zip(function.tensors, needs, strict=True) if need]
        self.results = [self.forward.types[v] for _, v in self.forward.outputs]
        self.of = tuple(
            i for i, t in enumerate(self.results) if t.dtype.is_float and i not in function.silent
        )
        self.kept = min(_subsets(self.results), key=self._bytes_saved)
        used = set(self._usual().inputs)
        self.names = (*function.tensors, *(v for _, v in self.forward.outputs))
        self.saved = tuple(i for i, name in enumerate(self.names) if name in used)
        self.ways: dict[Any, Way] = {}

    def _bytes_saved(self, kept: Sequence[int]) -> tuple[int, int]:
        """What the backward pass reads besides gradients and small results; of equals, the one
        that computes less."""
        self.kept = tuple(kept)
        graph = self._usual()
        free = {self.forward.outputs[i][1] for i in _small(self.results)}
        read = sum(graph.types[v].nbytes for v in graph.inputs if v not in free)
        return read, len(graph.nodes)

    def _usual(self) -> Graph:
        """The backward pass with a gradient for every result."""
        return self.graph(self.of, [self.results[i].dense_like() for i in self.of])[0]

    def graph(
        self, of: Sequence[int], grads: Sequence[TensorType | None]
    ) -> tuple[Graph, list[int]]:
        """From what is saved and the gradients of the results ``of`` to those of the inputs. A
        gradient that several inputs share is one output, and one that is a result's as it came is
        none, beside others: the list says which is whose, the latter counted ~0, ~1, … of ``of``.
        """
        given = {str(i): t for i, t in zip(of, grads, strict=True) if t is not None}
        with _disable_current_modes():
            whole = pullback(self.forward, given, self.wrt, [str(i) for i in self.kept])
        values = list(dict.fromkeys(value for _, value in whole.outputs))
        came = [f"grad_{i}" for i in of]
        made = [value for value in values if value not in came] or values
        outputs = tuple((str(i), value) for i, value in enumerate(made))
        places = [made.index(v) if v in made else ~came.index(v) for _, v in whole.outputs]
        inputs, nodes, types = whole.inputs, whole.nodes, whole.types
        return Graph(whole.name, inputs, outputs, nodes, types, whole.constants), places

    def way(self, of: Sequence[int], tensors: Sequence[torch.Tensor]) -> Way:
        """The plan from what was saved and the gradients of ``of`` to those of the inputs."""
        # sizes and types are those of the results; of what was saved a hook may have changed the
        # strides, too
        key = (*of, *[t.stride() for t in tensors])
        found = self.ways.get(key)
        if found is None:
            graph, places = self.graph(of, types_of(tensors)[len(self.saved) :])
            plan = compile_graph(graph, device=tensors[0].device, policy=EAGER)
            given = self.given(of)
            order = [given.index(name) for name in plan.inputs]
            way = Way(plan, order, self._slots(places), self._moved(tensors))
            found = _keep(self.ways, key, way)
        return found

    def _moved(self, tensors: Sequence[torch.Tensor]) -> dict[int, TensorType]:
        """Which of the saved tensors came back in another memory order than they were saved in."""
        types = [(*self.types, *self.results)[i] for i in self.saved]
        return {
            i: saved
            for i, (t, saved) in enumerate(zip(tensors, types, strict=False))
            if saved is not None and not same_strides(saved.shape, t.stride(), saved.strides)
        }

    def given(self, of: Sequence[int]) -> list[str]:
        """The names that a backward graph has for what was saved and the gradients of ``of``."""
        return [*(self.names[i] for i in self.saved), *(f"grad_{i}" for i in of)]

    def run(self, of: Sequence[int], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Different gradients from what was saved and the gradients of ``of``; :meth:`spread`
        gives every input its own."""
        tensors = [t.resolve_neg() if t.is_neg() else t for t in tensors]
        return self.way(of, tensors).run(tensors)

    def by_references(
        self, of: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients by torch's operators, one by one, so that they have gradients as well."""
        graph, places = self.graph(of, types_of(tensors)[len(self.saved) :])
        named = dict(zip(self.given(of), tensors, strict=True))
        named = {name: named[name] for name in graph.inputs}
        found = list(evaluate(graph, named, differentiable=True).values())
        return self.spread(found, places, tensors[len(self.saved) :])

    def spread(
        self, found: Sequence[torch.Tensor], places: Sequence[int], grads: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients for every input of the function: those that were found, or those of its
        results."""
        return _spread(found, self._slots(places), grads)

    def _slots(self, places: Sequence[int]) -> list[int | None]:
        """For every input of the function the place of its gradient, if it needs one."""
        each = iter(places)
        return [next(each) if need else None for need in self.needs]

    @property
    def spec(self) -> str:
        """All of it as text: an operator's arguments are tensors and plain values."""
        types = [None if t is None else (t.shape, t.dtype.short, t.strides) for t in self.types]
        return json.dumps([self.function.name, types, self.attrs, self.needs])


class Way:
    """A plan of a backward pass. ``order``: which of the given tensors are its inputs; ``slots``:
    for each input of the function the place of its gradient, counted as in :meth:`Pull.graph`, or
    None; ``moved``: given tensors that have to be put back into a memory order."""

    def __init__(
        self, plan: Plan, order: list[int], slots: list[int | None], moved: dict[int, TensorType]
    ) -> None:
        self.plan, self.order, self.slots, self.moved = plan, order, slots, moved
        self.ready: Callable[..., list[torch.Tensor]] | None = None

    def run(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.moved:
            tensors = [
                restrided(t, self.moved[i]) if i in self.moved else t for i, t in enumerate(tensors)
            ]
        given = [tensors[i] for i in self.order]
        if self.ready is None or Heard.listeners:
            found = _run(self.plan, given)
            self.ready = self.plan.ready()
            return found
        return self.ready(*given)


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
        return None, *_spread(way.run(given), way.slots, came)


# Function.apply, less its look at transforms, which is behind us already
record: Callable[..., tuple[torch.Tensor, ...]] = super(
    torch.autograd.Function, _Differentiable
).apply

# ---- for torch.compile

_SCHEMA = {
    "Sym": "Tensor", "Sym | None": "Tensor?", "float": "float", "int": "int", "bool": "bool",
    "str": "str", "float | None": "float?", "int | None": "int?", "str | None": "str?",
    "tuple[int, ...]": "int[]", "tuple[int, ...] | None": "int[]?",
    "tuple[float, ...] | None": "float[]?",
}  # fmt: skip


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


def _spread(
    found: Sequence[torch.Tensor], slots: Sequence[int | None], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    return tuple([None if s is None else found[s] if s >= 0 else grads[~s] for s in slots])


def _keep(where: dict[Any, Any], key: Any, value: Any) -> Any:
    while len(where) >= KEPT:
        where.pop(next(iter(where)))
    where[key] = value
    return value


def _subsets(results: Sequence[TensorType]) -> Iterable[Sequence[int]]:
    """Choices of results that might be kept: any of the first large ones, and all small ones."""
    small = _small(results)
    large = [i for i in range(len(results)) if i not in small][:3]
    for n in range(len(large) + 1):
        yield from (sorted((*some, *small)) for some in itertools.combinations(large, n))


def _small(results: Sequence[TensorType]) -> list[int]:
    """Results that cost next to nothing, such as statistics and the signs of a larger one."""
    most = max(t.nbytes for t in results)
    return [i for i, t in enumerate(results) if t.nbytes * 16 <= most]


def _run(plan: Plan, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if Heard.listeners:
        Heard.add(plan)
    return plan.run_checked(tensors)


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
