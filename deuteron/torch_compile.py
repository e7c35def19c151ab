"""``torch.compile(model, backend="deuteron")``: what torch.compile captures, as plans.

torch.compile cuts a program into graphs, and AOTAutograd makes of each a forward graph and, where
gradients are asked for, a backward graph of ATen calls that write to nothing: it hands running
statistics and other things that change back as results, and copies them. Both graphs become plans
like any other. What forward keeps for backward is chosen by AOTAutograd's partitioner.

Weights are inputs of these graphs, not constants: a step of an optimiser changes them in place, and
the next call sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.frontends.aten import TABLE
from deuteron.frontends.torch_fx import Importer
from deuteron.functional.core import entries
from deuteron.ir.types import TensorType
from deuteron.plan import Cache, Plan, compile_graph
from deuteron.plan.tensors import overlaps, restrided
from deuteron.policy import Policy

BUDGET_S = 2.5  # for each graph, where nothing else is said
Results = list[torch.Tensor | Any]


def backend(
    graph: fx.GraphModule,
    example: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A graph of torch.compile's as plans, forward and backward.

    >>> fast = torch.compile(model, backend="deuteron")
    >>> fast = torch.compile(model, backend="deuteron", options={"find": True, "budget_s": 5.0})

    ``options``: ``find`` to choose by measurement, for about ``budget_s`` seconds a graph;
    ``policy``, a :class:`Policy`; ``cache``, a :class:`Cache`. Where sizes vary, each is planned
    when it first comes.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if mode not in (None, "default"):
        wrong = f"mode={mode!r} is one of torch's own compiler"
        raise DeuteronError(wrong, asked="torch.compile(…)", remedy="leave it out, or use options=")
    make = partial(compiled, search=_settings(options or {}))
    compilers = {"fw_compiler": make, "bw_compiler": make, "inference_compiler": make}
    whole = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    made: Callable[..., Any] = whole(graph, example)
    return made


KINDS: dict[str, Any] = {"find": bool, "budget_s": int | float, "policy": Policy, "cache": Cache}


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name not in KINDS:
            wrong = f"there is no option {name!r}"
            remedy = f"use {', '.join(KINDS)}"
            raise DeuteronError(wrong, asked="torch.compile(…, options=…)", remedy=remedy)
        if not isinstance(value, KINDS[name]):
            wrong = f"{name} is {value!r}"
            raise DeuteronError(wrong, asked=f"options={{{name!r}: …}}", remedy="see help(backend)")
    return {"find": False, "budget_s": BUDGET_S, **options}


def compiled(graph: fx.GraphModule, example: Sequence[Any], search: Any) -> Callable[..., Any]:
    """What AOTAutograd calls: takes a list of arguments, which it empties, and gives a list."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if any(isinstance(given, torch.SymInt) for given in example):
        run: Any = Sizes(graph, search)
    else:
        with unset_fake_temporarily():  # constants are computed here, and kernels measured
            run = Step(graph, example, search)

    def boxed(args: list[Any]) -> Results:
        given = args.copy()
        args.clear()
        results: Results = run(*given)
        return results

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class Step:
    """One graph as a plan, for arguments like those of an example."""

    def __init__(self, graph: fx.GraphModule, example: Sequence[Any], search: Any) -> None:
        importer = Importer("step", {**TABLE, **entries()})
        self.device = _device_of(example)
        self.used: list[int] = []  # places of arguments that are tensors
        places = (node for node in graph.graph.nodes if node.op == "placeholder")
        for i, (node, given) in enumerate(zip(places, example, strict=True)):
            if isinstance(given, torch.Tensor):
                importer.input(node, node.name, _dense(given))
                self.used.append(i)
            else:
                importer.bind(node, given)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                importer.weight(node, node.name, getattr(graph, str(node.target)))
        importer.run(n for n in graph.graph.nodes if n.op != "get_attr")
        (last,) = (node for node in graph.graph.nodes if node.op == "output")
        self.results: list[Any] = []  # those that are no tensors, and None
        self.made: list[int] = []  # places of results that the plan makes
        for i, result in enumerate(last.args[0]):
            value = importer.entered(importer.value(result))
            is_made = isinstance(result, fx.Node) and hasattr(value, "name")
            if is_made:
                importer.build.output(f"result_{i}", value.name)
                self.made.append(i)
            self.results.append(None if is_made else value)
        self.plan: Plan = compile_graph(importer.finish(), device=self.device, **search)

    def __call__(self, *args: Any) -> Results:
        given, binder = [args[i] for i in self.used], self.plan.binder
        try:
            binder.check(given)
        except BindError:  # another memory order, or a number that is on the host
            pairs = zip(given, binder.types, strict=True)
            given = [restrided(t.detach().to(self.device), type_) for t, type_ in pairs]
            binder.check(given)
        results = self.results.copy()
        for place, made in zip(self.made, self.plan.run_checked(given), strict=True):
            results[place] = made
        return results


class Sizes:
    """A graph whose sizes vary: each is written out and planned when it first comes."""

    def __init__(self, graph: fx.GraphModule, search: Any) -> None:
        self.graph, self.search = graph, search
        self.made: dict[tuple[Any, ...], Step] = {}

    def __call__(self, *args: Any) -> Results:
        key = tuple(a.shape if isinstance(a, torch.Tensor) else a for a in args)
        if key not in self.made:
            self.made[key] = Step(_at_these_sizes(self.graph, args), args, self.search)
        return self.made[key](*args)


def _at_these_sizes(graph: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(graph, tracing_mode="fake")(*args)


def _device_of(example: Sequence[Any]) -> torch.device:
    tensors = [x for x in example if isinstance(x, torch.Tensor)]
    found = {t.device for t in tensors if t.ndim or t.device.type != "cpu"}
    if len(found) > 1:
        wrong = f"the graph has tensors on {', '.join(sorted(map(str, found)))}"
        raise GraphError(wrong, remedy="compile what runs on one device")
    return next(iter(found), torch.device("cpu"))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """An input that is expanded comes whole."""
    return tensor.contiguous() if overlaps(TensorType.from_tensor(tensor)) else tensor
