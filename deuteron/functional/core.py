"""How a small graph becomes an eager function.

A function is written once, as a graph: ``build(b, x, weight, *, eps)`` emits operators on handles.
Called with tensors it is planned for their shapes, strides and device like any graph, and the plan
is kept. Its gradient is the pullback of the same graph, planned the same way. Under
``torch.compile`` the call is an operator ``deuteron::<name>`` that the compiler passes through.

For the backward pass the fewest bytes are saved: inputs, or results that stand for them. Whatever
else it needs it computes again inside its fused kernel, which reads those anyway. Only what takes a
kernel of its own, such as a product or attention, is saved instead, if it is a result.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from deuteron.errors import DeuteronError
from deuteron.functional import arguments
from deuteron.functional.arguments import Attributes, Tensors, Types, readable, signature, types_of
from deuteron.functional.backward import EAGER, KEPT, Backward, ReadyPlan, keep, spread, strides_of
from deuteron.functional.context import (
    any_requires_grad,
    are_batched,
    for_onnx,
    in_transform,
    is_seen,
    without_memory,
)
from deuteron.functional.explain import Recording
from deuteron.functional.shortcuts import OTHER, Noted, of_gradients
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.ops.evaluate import evaluate
from deuteron.plan import Plan, compile_graph

Build = Callable[..., "Sym | tuple[Sym, ...]"]
Schema = tuple[dict[str, str], dict[str, str]]  # tensors and attributes: name → annotation

LIBRARY = torch.library.Library("deuteron", "FRAGMENT")
FUNCTIONS: dict[str, Function] = {}


class Function:
    """A graph as an eager function with gradients.

    The parameters of ``build`` after the first are its signature: positional ones are tensors
    (``Sym``, or ``Sym | None`` where the tensor may be left out), keyword-only ones are attributes.
    A call gives all of them, except attributes that have ``defaults``.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        schema: Schema | None = None,
        defaults: Attributes | None = None,
        silent: Sequence[int] = (),
        overwritten: Sequence[str] = (),
        eager: bool = False,
        into: Mapping[int, str] | None = None,
        handed: int | None = None,
    ) -> None:
        """``schema``: the signature, if that of ``build`` does not show it. ``silent``: indices of
        results that no gradient comes back from. ``overwritten``: tensors that the caller writes to
        afterwards, so that the backward pass cannot read them. ``eager``: it is only run eagerly,
        so torch need not know it as an operator. ``into``: results that are written over the memory
        of a tensor, where a kernel can do that. ``handed``: the caller gets only so many results,
        the first ones; those in ``into`` are copied into their tensors where no kernel can write
        there."""
        self.name, self.build, self.silent = name, build, frozenset(silent)
        self.overwritten = frozenset(overwritten)
        self.schema = schema or schema_of(build)
        self.tensors, self.attributes = map(list, self.schema)
        self.defaults = defaults or {}
        self.planned: dict[Any, Planned] = {}
        self.into = {str(place): tensor for place, tensor in (into or {}).items()}
        self.handed = handed
        if not eager:
            FUNCTIONS[name] = self
            self.op = _register(self)

    def __call__(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """Return one tensor, or a tuple where the graph has several results."""
        if self.defaults:
            attrs = self.defaults | attrs
        if is_seen():
            shown = for_onnx() or (in_transform() and not is_compiling())  # torch's operators
            found = self.by_references(tensors, attrs) if shown else self.op(*tensors, **attrs)
            found = found[: self.handed]
        else:
            planned = self.planned.get(signature(tensors, attrs))
            if planned is None or Recording.active:
                if without_memory(*tensors):
                    arguments.one_device(self.name, tensors)
                    found = self.op(*tensors, **attrs)[: self.handed]
                    return found[0] if len(found) == 1 else tuple(found)
                tensors = tuple(readable(self.name, t) for t in tensors)
                planned = self.plan(tensors, attrs)
            needed = torch.is_grad_enabled() and any_requires_grad(tensors)
            found = differentiably(planned, *tensors) if needed else planned.results(tensors)
            if Noted.active:
                found = found[0] if len(found) == 1 else tuple(found)
                Noted.add((planned, tensors, differentiably if needed else None, found))
                return found
        return found[0] if len(found) == 1 else tuple(found)

    def one(self, *tensors: Tensor | None, **attrs: Any) -> Tensor:
        """Call a function that has a single result."""
        result: Tensor = self(*tensors, **attrs)
        return result

    def plan(self, tensors: Tensors, attrs: Attributes) -> Planned:
        """Return what was worked out for tensors like these, now or before. Their memory must hold
        their values (:func:`readable`)."""
        key = signature(tensors, attrs)
        found = self.planned.get(key)
        if found is None:
            arguments.one_device(self.name, tensors)
            found = keep(self.planned, key, Planned(self, types_of(tensors), attrs))
        return found

    def by_references(self, tensors: Tensors, attrs: Attributes) -> Sequence[Tensor]:
        """Return the results of torch's operators, run one by one, for transforms that must see
        them."""
        given = [arguments.strided(self.name, t) for t in tensors]
        arguments.one_device(self.name, given)
        graph = self.graph(types_of(given), attrs)
        named = {n: t for n, t in zip(self.tensors, given, strict=True) if t is not None}
        return list(evaluate(graph, named, differentiable=True).values())

    def write(self, b: Ops, *given: Any) -> tuple[Sym, ...]:
        """Write a call into the graph of a module; ``given``: arguments in the torch operator's
        order."""
        count = len(self.tensors)
        attrs = _frozen(dict(zip(self.attributes, given[count:], strict=True)))
        found = self.build(b, *given[:count], **attrs)
        return found if isinstance(found, tuple) else (found,)

    def graph(self, types: Types, attrs: Attributes) -> Graph:
        """Return the graph of the function for tensors of these types; results are called 0, 1,
        …"""
        builder = GraphBuilder(table.infer, self.name)
        ops = Ops(builder)
        named = zip(self.tensors, types, strict=True)
        given = [None if t is None else ops.sym(builder.input(name, t)) for name, t in named]
        try:
            with _disable_current_modes():  # constants hold real data even if the call is traced
                found = self.build(ops, *given, **attrs)
        except DeuteronError as error:
            error.asked = f"{self.name.removeprefix('op_')}({_shown(self.tensors, types, attrs)})"
            raise error
        for i, result in enumerate(found if isinstance(found, tuple) else (found,)):
            result.output(str(i))
        return builder.finish()


class Planned:
    """A function for tensors of given types: its plan, and a backward pass for each set of tensors
    that need a gradient. A later call with the same types finds all of it ready."""

    def __init__(self, function: Function, types: Types, attrs: Attributes) -> None:
        self.function, self.types, self.attrs = function, types, attrs
        self.graph: Graph | None = function.graph(types, attrs)  # raises if something is wrong
        self.all_given = None not in types
        self.ready: ReadyPlan | None = None
        # Of results that belong into a given tensor: pairs (result, tensor) to copy there after a
        # run, and the tensors that a kernel writes to itself.
        self.copied: list[tuple[int, int]] = []
        self.written: list[int] = []
        self.backwards: dict[tuple[bool, ...], Backward] = {}

    def run(self, tensors: Tensors) -> Sequence[Tensor]:
        """Return all results, without thought of gradients."""
        given = tensors if self.all_given else [t for t in tensors if t is not None]
        if self.ready is None:
            assert self.graph is not None and given[0] is not None
            device, into = given[0].device, self.function.into
            plan = compile_graph(self.graph, device=device, policy=EAGER, into=into)
            self.ready, self.graph = ReadyPlan(plan), None
            self._note_written(plan)
        return self.ready(*given)  # type: ignore[arg-type]  # none of them is None

    def _note_written(self, plan: Plan) -> None:
        values = dict(plan.graph.outputs)
        for place, name in self.function.into.items() if self.function.handed else ():
            index = self.function.tensors.index(name)
            if values[place] in plan.program.into:
                self.written.append(index)
            elif self.types[index] is not None:
                self.copied.append((int(place), index))

    def results(self, tensors: Tensors) -> Sequence[Tensor]:
        """Return the results that the caller gets; all others have been put where they belong."""
        found = self.run(tensors)
        if self.function.handed is None:
            return found
        self.settle(tensors, found)
        return found[: self.function.handed]

    def settle(self, tensors: Any, found: Sequence[Tensor]) -> None:
        """Put results into the tensors that they belong into, and tell autograd which changed."""
        if self.written:
            torch._C._increment_version([tensors[i] for i in self.written])
        if self.copied:
            new = [found[place] for place, _ in self.copied]
            torch._foreach_copy_([tensors[i] for _, i in self.copied], new)

    def backward(self, needs: tuple[bool, ...]) -> Backward:
        """Return the backward pass for the case that these of the tensors need a gradient."""
        found = self.backwards.get(needs)
        if found is None:
            found = self.backwards[needs] = Backward(self.function, self.types, self.attrs, needs)
        return found


class _Differentiable(torch.autograd.Function):
    """The autograd node of eager calls, with less overhead than the dispatcher's."""

    @staticmethod
    def forward(ctx: Any, planned: Planned, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[1:]
        back = ctx.back = planned.backwards.get(needs) or planned.backward(needs)
        results = planned.run(tensors)
        everything = (*tensors, *results)
        ctx.save_for_backward(*[everything[i] for i in back.saved])
        ctx.set_materialize_grads(False)
        if back.constant:
            ctx.mark_non_differentiable(*[results[i] for i in back.constant])
        if back.count < len(results):
            planned.settle(tensors, results)
            return tuple(results[: back.count])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        back: Backward = ctx.back
        saved = ctx.saved_tensors
        if not (torch.is_grad_enabled() or Recording.active):
            for known in back.known:
                found = known(*saved, *grads)
                if found is not OTHER:
                    return found  # type: ignore[no-any-return]
        given = [*saved, *grads, *back.unseen]
        plan = back.plans.get(strides_of(given))
        # create_graph: the gradients will be differentiated, too
        seen = torch.is_grad_enabled() or are_batched(grads)
        if plan is not None and not seen:
            if back.known.is_due():
                back.known.keep(of_gradients((*saved, *grads), plan))
            return None, *plan.gradients(given)
        of = [i for i, g in enumerate(grads) if g is not None]
        if not of:
            return (None,) * len(ctx.needs_input_grad)
        given = [t.resolve_neg() if t.is_neg() else t for t in given if t is not None]
        if seen:
            return None, *back.by_references(of, given)
        return None, *back.plan(of, given).gradients(back.in_places(of, given))


# Function.apply without its check for transforms, which was made before
_apply: Any = super(torch.autograd.Function, _Differentiable).apply
differentiably: Callable[..., tuple[Tensor, ...]] = _apply
# and the node's own apply without looking up which function this is
_Differentiable._backward_cls.apply = _Differentiable.backward  # type: ignore[attr-defined]

# ---- for torch.compile

_WORDS = {"Sym": "Tensor", "tuple[int, ...]": "int[]", "tuple[float, ...]": "float[]"}


def schema_of(build: Build) -> Schema:
    """Return the tensors and attributes of a function that writes a graph, with annotations."""
    known = list(inspect.signature(build).parameters.values())[1:]
    attrs = {p.name: p.annotation for p in known if p.kind is p.KEYWORD_ONLY}
    return {p.name: p.annotation for p in known if p.name not in attrs}, attrs


def _word(name: str, annotation: str) -> str:
    """Return a parameter in the language of torch's dispatcher. It has no default, because an
    argument that equals the default would be left out of the call."""
    kind = annotation.removesuffix(" | None")
    return f"{_WORDS.get(kind, kind)}{'?' if kind != annotation else ''} {name}"


def _register(function: Function) -> Any:
    """Register the function as an operator that torch.compile calls and does not look into."""
    tensors, attrs = function.schema
    words = [_word(*each) for each in tensors.items()]
    words += ["*", *(_word(*each) for each in attrs.items())] if attrs else []
    LIBRARY.define(f"{function.name}({', '.join(words)}) -> Tensor[]")

    def run(*tensors: Tensor | None, **attrs: Any) -> list[Tensor]:
        given = [readable(function.name, t) for t in tensors]
        return list(function.plan(given, _frozen(attrs)).run(given))

    def fake(*tensors: Tensor | None, **attrs: Any) -> list[Tensor]:
        return _empty(function.graph(types_of(tensors), _frozen(attrs)), tensors)

    def keep(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        asked = zip(ctx.needs_input_grad, inputs, strict=False)
        needs = tuple(bool(need) and t is not None for need, t in asked)
        ctx.back = Backward(function, types_of(inputs), _frozen(keyword_only_inputs or {}), needs)
        everything = (*inputs, *output)
        ctx.save_for_backward(*(everything[i] for i in ctx.back.saved))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        back: Backward = ctx.back
        of = [i for i, g in enumerate(grads) if g is not None and i in back.of]
        if not of:
            return (None,) * len(back.needs)
        given = [*ctx.saved_tensors, *(grads[i] for i in of)]
        found = torch.ops.deuteron.pullback(back.spec, of, given)
        _, places = back.graph(of, types_of(given)[len(back.saved) :])
        return spread(found, places, given[len(back.saved) :])

    name = f"deuteron::{function.name}"
    LIBRARY.impl(function.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=keep, lib=LIBRARY)
    return getattr(torch.ops.deuteron, function.name).default


def entries() -> dict[str, Callable[..., tuple[Sym, ...]]]:
    """Return what writes each of the operators above into a graph, by torch's name for the
    operator. With that, a module that calls our functions is planned as if it were written in our
    operators."""
    ours = {f"deuteron.{name}.default": function.write for name, function in FUNCTIONS.items()}
    return ours | {"deuteron.pullback.default": _write_pullback}


def _write_pullback(b: Ops, spec: str, of: Sequence[int], tensors: Sequence[Sym]) -> Any:
    """Write a backward pass into the graph of a training step."""
    back = _backward_of(spec, torch.device("cpu"))
    graph, _ = back.graph(of, [t.type for t in tensors[len(back.saved) :]])
    found = dict(zip(back.given(of), tensors, strict=True))
    found |= {name: b.constant(constant.data) for name, constant in graph.constants.items()}
    for node in graph.nodes:
        made = b.call(node.op, *(v and found[v] for v in node.inputs), **node.attrs)
        found |= zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True)
    return tuple(found[value] for _, value in graph.outputs)


@lru_cache(maxsize=KEPT)
def _backward_of(spec: str, device: torch.device) -> Backward:
    """Return the backward pass that ``spec`` describes, for one device, because its plans are for
    that device."""
    name, types, attrs, needs = json.loads(spec)
    read = tuple(None if t is None else TensorType.of(t[0], t[1], strides=t[2]) for t in types)
    return Backward(FUNCTIONS[name], read, _frozen(attrs), tuple(needs))


def _pullback(spec: str, of: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(_backward_of(spec, tensors[0].device).run(of, tensors))


def _fake_pullback(spec: str, of: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    back = _backward_of(spec, tensors[0].device)
    return _empty(back.graph(of, types_of(tensors)[len(back.saved) :])[0], tensors)


LIBRARY.define("pullback(str spec, int[] of, Tensor[] tensors) -> Tensor[]")
LIBRARY.impl("pullback", _pullback, "CompositeExplicitAutograd")
torch.library.register_fake("deuteron::pullback", _fake_pullback, lib=LIBRARY)


def _frozen(attrs: Attributes) -> Attributes:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in attrs.items()}


def _empty(graph: Graph, tensors: Tensors) -> list[Tensor]:
    on = next(t.device for t in tensors if t is not None)
    types = [graph.types[value] for _, value in graph.outputs]
    return [torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device=on) for t in types]


def _shown(names: Sequence[str], types: Types, attrs: Attributes) -> str:
    tensors = [f"{n}: {t}" for n, t in zip(names, types, strict=True) if t is not None]
    return ", ".join([*tensors, *(f"{k}={v!r}" for k, v in attrs.items())])
