"""The backward pass of an eager function: what is saved for it, and its plans."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from deuteron.functional.arguments import NO_PLAN, Attributes, Types, types_of
from deuteron.functional.explain import Recording
from deuteron.functional.shortcuts import Calls
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops import table
from deuteron.ops.evaluate import evaluate
from deuteron.passes import pullback
from deuteron.passes.split import ALONE
from deuteron.plan import Plan, compile_graph
from deuteron.plan.tensors import restrided
from deuteron.policy import Policy

if TYPE_CHECKING:
    from deuteron.functional.core import Function

KEPT = 1024  # plans kept for one function; after that, a new one replaces the oldest
EAGER = Policy(cuda_graph=False)  # the caller may capture the call in a CUDA Graph itself
Grads = tuple[Tensor | None, ...]
Places = list[int | None]


class Backward:
    """The backward pass of a function for inputs of given types: what to save for it, and its
    plans. ``saved`` holds indices into the inputs followed by the results of the function."""

    def __init__(self, function: Function, types: Types, attrs: Attributes, needs: Sequence[bool]):
        self.function, self.types, self.attrs, self.needs = function, types, attrs, needs
        pairs = zip(function.tensors, types, strict=True)
        there = tuple(None if name in function.overwritten else t for name, t in pairs)
        self.forward = function.graph(there, attrs)
        self.wrt = [n for n, need in zip(function.tensors, needs, strict=True) if need]
        self.results = [self.forward.types[v] for _, v in self.forward.outputs]
        floats = [i for i, t in enumerate(self.results) if t.dtype.is_float]
        self.of = tuple(i for i in floats if i not in function.silent)
        self.count = function.handed or len(self.results)  # how many results the caller gets
        self.unseen = (None,) * (len(self.results) - self.count)  # gradients of all other results
        self.constant = tuple(i for i in range(self.count) if i not in self.of)
        self.kept = min(_choices(self.results), key=self._price)
        used = set(self.usual_graph().inputs)
        self.names = (*function.tensors, *(v for _, v in self.forward.outputs))
        self.saved = tuple(i for i, name in enumerate(self.names) if name in used)
        self.plans: dict[Any, BackwardPlan] = {}
        self.known = Calls()  # shortcuts to the plans (shortcuts.py)

    def _price(self, kept: Sequence[int]) -> tuple[int, int, int]:
        """The cost of a backward pass that may read the results ``kept``, less being better: how
        many operators of the forward pass it repeats that no elementwise kernel takes along, such
        as attention; the bytes that it reads, without small results; how many operators it has."""
        self.kept = tuple(kept)
        graph = self.usual_graph()
        ours = {out for node in self.forward.nodes for out in node.outputs}
        twice = [table.get(n.op) for n in graph.nodes if not ours.isdisjoint(n.outputs)]
        again = sum(op.fusion in ALONE for op in twice)
        free = {self.forward.outputs[i][1] for i in _small(self.results)}
        read = sum(graph.types[v].nbytes for v in graph.inputs if v not in free)
        return again, read, len(graph.nodes)

    def usual_graph(self) -> Graph:
        """The backward pass with a gradient for every result."""
        return self.graph(self.of, [self.results[i].dense_like() for i in self.of])[0]

    def graph(self, of: Sequence[int], grads: Sequence[TensorType | None]) -> tuple[Graph, Places]:
        """Return the backward graph, which leads from what is saved and the gradients of the
        results ``of`` to the gradients of the inputs; and for each input the place of its gradient,
        or None if it needs none.

        Inputs that share a gradient share an output. A gradient that is passed on unchanged, as
        that of a residual is, is no output unless all of them are: its place is ~0, ~1, …, which
        counts through ``of``.
        """
        given = {str(i): t for i, t in zip(of, grads, strict=True) if t is not None}
        with _disable_current_modes():
            whole = pullback(self.forward, given, self.wrt, [str(i) for i in self.kept])
        values = list(dict.fromkeys(value for _, value in whole.outputs))
        came = [f"grad_{i}" for i in of]
        made = [value for value in values if value not in came] or values
        outputs = tuple((str(i), value) for i, value in enumerate(made))
        each = iter(made.index(v) if v in made else ~came.index(v) for _, v in whole.outputs)
        places = [next(each) if need else None for need in self.needs]
        inputs, nodes, types = whole.inputs, whole.nodes, whole.types
        return Graph(whole.name, inputs, outputs, nodes, types, whole.constants), places

    def plan(self, of: Sequence[int], tensors: Sequence[Tensor]) -> BackwardPlan:
        """Return the plan for ``tensors``: what was saved, then the gradients of the results
        ``of``."""
        key = strides_of(self.in_places(of, tensors))
        found = self.plans.get(key)
        if found is None:
            graph, places = self.graph(of, types_of(tensors)[len(self.saved) :])
            plan = compile_graph(graph, device=tensors[0].device, policy=EAGER)
            given = self.in_places(of, self.given(of))
            order = [given.index(name) for name in plan.inputs]
            grads = [len(self.saved) + i for i in of]
            places = [p if p is None or p >= 0 else ~grads[~p] for p in places]
            found = keep(self.plans, key, BackwardPlan(plan, order, places, self._moved(tensors)))
        return found

    def in_places(self, of: Sequence[int], given: Sequence[Any]) -> list[Any]:
        """Return what was saved, then a gradient for each result: None for results not in
        ``of``."""
        count = len(self.saved)
        came = dict(zip(of, given[count:], strict=True))
        return [*given[:count], *map(came.get, range(len(self.results)))]

    def _moved(self, tensors: Sequence[Tensor]) -> dict[int, TensorType]:
        """Return which of the saved tensors came back with other strides than they were saved with,
        and the types that they were saved with."""
        types = [(*self.types, *self.results)[i] for i in self.saved]
        return {
            i: saved
            for i, (t, saved) in enumerate(zip(tensors, types, strict=False))
            if saved is not None and not same_strides(saved.shape, t.stride(), saved.strides)
        }

    def given(self, of: Sequence[int]) -> list[str]:
        """Return the names in a backward graph of what was saved and of the gradients of ``of``."""
        return [*(self.names[i] for i in self.saved), *(f"grad_{i}" for i in of)]

    def run(self, of: Sequence[int], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of the backward graph; :func:`spread` hands them to the inputs."""
        tensors = [t.resolve_neg() if t.is_neg() else t for t in tensors]
        return self.plan(of, tensors).run(self.in_places(of, tensors))

    def by_references(self, of: Sequence[int], tensors: Sequence[Tensor]) -> Grads:
        """Return the gradients, computed by torch's operators one by one, so that autograd can
        differentiate them again."""
        graph, places = self.graph(of, types_of(tensors)[len(self.saved) :])
        named = dict(zip(self.given(of), tensors, strict=True))
        named = {name: named[name] for name in graph.inputs}
        found = list(evaluate(graph, named, differentiable=True).values())
        return spread(found, places, tensors[len(self.saved) :])

    @property
    def spec(self) -> str:
        """All that defines this backward pass, as text, because a torch operator only takes tensors
        and plain values."""
        types = [None if t is None else (t.shape, t.dtype.short, t.strides) for t in self.types]
        return json.dumps([self.function.name, types, self.attrs, self.needs])


class ReadyPlan:
    """A plan that is called with its tensors in order. The first call runs it the usual way; later
    calls take the plan's fastest way, which looks at nothing any more."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ready: Callable[..., list[Tensor]] | None = None

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        if self.ready is not None and not Recording.active:
            return self.ready(*tensors)
        if Recording.active:
            Recording.add(self.plan)
        found = self.plan.run_checked(list(tensors))
        self.ready = self.plan.ready()
        return found


class BackwardPlan:
    """A plan of a backward pass. It is run with what was saved, followed by a gradient (or None)
    for each result. ``order``: which of these are the plan's inputs. ``places``: where the gradient
    of each input is: an index into the plan's outputs, or ~0, ~1, … for what was given. ``moved``:
    given tensors that have to be put back into the memory order of the forward pass."""

    def __init__(self, plan: Plan, order: list[int], places: Places, moved: dict[int, TensorType]):
        self.ready, self.order, self.places, self.moved = ReadyPlan(plan), order, places, moved

    def run(self, given: Sequence[Any]) -> Sequence[Tensor]:
        if moved := self.moved:
            given = [restrided(t, moved[i]) if i in moved else t for i, t in enumerate(given)]
        return self.ready(*[given[i] for i in self.order])

    def gradients(self, given: Sequence[Any]) -> Grads:
        """Return a gradient for every input that needs one."""
        return spread(self.run(given), self.places, given)


def strides_of(given: Sequence[Tensor | None]) -> Any:
    """Return what a backward plan depends on besides sizes and types, which the forward pass has
    fixed: which tensors are there, and their strides. (A hook may have changed even those of what
    was saved.) No plan is kept under the key of a tensor that torch negates lazily."""
    return tuple([None if t is None else NO_PLAN if t.is_neg() else t.stride() for t in given])


def spread(found: Sequence[Tensor], places: Sequence[int | None], given: Sequence[Tensor]) -> Grads:
    """Return a gradient for every input that needs one, by its place in ``found`` or ``given``."""
    return tuple([None if p is None else found[p] if p >= 0 else given[~p] for p in places])


def keep(where: dict[Any, Any], key: Any, value: Any) -> Any:
    while len(where) >= KEPT:
        where.pop(next(iter(where)))
    where[key] = value
    return value


def _choices(results: Sequence[TensorType]) -> Iterable[Sequence[int]]:
    """Yield the sets of results that the backward pass might keep: all small ones, and any of the
    first three large ones."""
    small = _small(results)
    large = [i for i in range(len(results)) if i not in small][:3]
    for n in range(len(large) + 1):
        yield from (sorted((*some, *small)) for some in itertools.combinations(large, n))


def _small(results: Sequence[TensorType]) -> list[int]:
    """Return the results that cost next to nothing to keep, such as statistics and the signs of a
    larger result."""
    most = max(t.nbytes for t in results)
    return [i for i, t in enumerate(results) if t.nbytes * 16 <= most]
