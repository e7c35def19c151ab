"""``torch.compile(model, backend="deuteron")``: plans for the graphs that torch.compile captures.

torch.compile cuts a program into graphs, and AOTAutograd turns each into a graph of ATen calls
without side effects: running statistics and other state come back as results, and are then copied
to where they belong. Where gradients are needed, one graph holds forward and backward. It is
imported and goes through the passes as a whole, so that norms and losses are recognised together
with their gradients; then it is cut in two (passes/split.py), and each half becomes a plan.

Weights are inputs of these graphs, not constants: a step of an optimiser changes them in place, and
the next call sees their new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.frontends.aten import TABLE
from deuteron.frontends.torch_fx import Importer
from deuteron.frontends.torch_fx_facts import is_token, is_too_little
from deuteron.functional.core import entries
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType
from deuteron.ops.emit import Sym
from deuteron.passes.collective import Means, means_over_ranks
from deuteron.plan import Cache, Plan, compile_graph, halves
from deuteron.plan.builders import builders
from deuteron.plan.cuda_graph import Settled
from deuteron.plan.tensors import copy_all, duplicate, overlaps, restrided
from deuteron.policy import Policy
from deuteron.target import target as find_target
from deuteron.torch_captured import written_anew

# default seconds of a search for each graph; one of fewer nodes than SMALL gets a quarter of that
BUDGET_S, SMALL = 4.0, 24
LITTLE = 4096  # bytes of a gradient that is copied to where a graph reads it, wherever it lies
Results = list[torch.Tensor | Any]


class SecondGraph(GraphError):
    """What had to be one graph turned out to be several, or a different one than before."""


@dataclass
class Seed:
    """The gradient of a loss, where it is a number known in advance: the forward half can then
    compute the gradient of the logits together with the loss. This is only for a step that is one
    graph: with several, the result of the first may look like a loss without being one."""

    value: float
    graphs: int = 0

    def taken(self) -> None:
        self.graphs += 1
        if self.graphs > 1:
            raise SecondGraph(f"graph {self.graphs} of a step whose loss has a known gradient")


def backend(
    graph: fx.GraphModule,
    example: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Turn a graph of torch.compile into plans, forward and backward.

    >>> fast = torch.compile(model, backend="deuteron")
    >>> fast = torch.compile(model, backend="deuteron", options={"find": True, "budget_s": 5.0})

    ``options``: ``find`` to choose by measurement, for about ``budget_s`` seconds a graph;
    ``policy``, a :class:`Policy`; ``cache``, a :class:`Cache`; ``plans``, a list, to which all
    plans are added; ``means``, which gradients are to become means over ranks; ``seed``, the
    :class:`Seed` of a loss; ``rest``, whether graphs are what was left of a larger one, so that
    very small ones run as they are. Where sizes vary, each size is planned when it first occurs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    if mode not in (None, "default"):
        wrong = f"mode={mode!r} is one of torch's own compiler"
        raise DeuteronError(wrong, asked="torch.compile(…)", remedy="leave it out, or use options=")
    search = _settings(options or {})
    if search.pop("rest", False) and is_too_little(graph.graph, _device_of(example)):
        return graph.forward
    if (seed := search.get("seed")) is not None:
        seed.taken()
    builders()  # start them now: they are ready when there is something to build
    seeded = search.get("policy", Policy()).random == "seeded"
    written_anew(graph.graph, _device_of(example) if seeded else None)
    known: Any = {name: search.pop(name, None) for name in ("means", "seed")}
    cut = partial(partition, policy=search.get("policy"), traced=tuple(example), **known)
    make = partial(compiled, search=search)
    how: dict[str, Any] = {"fw_compiler": make, "bw_compiler": make, "inference_compiler": make}
    how |= {"partition_fn": cut, "keep_inference_input_mutations": True}
    with config.patch(donated_buffer=False), _whole():  # not donated: a gradient can be taken twice
        made: Callable[..., Any] = aot_autograd(**how)(graph, example)
    return made


@contextmanager
def _whole() -> Iterator[None]:
    """Inside this context torch's tracer keeps a call that resizes images as it is, instead of
    writing it as a gather of each neighbour, whose gradient scatters."""
    from torch._export import utils

    asked = getattr(utils, "_collect_all_valid_cia_ops_for_aten_namespace", None)
    aten, keys = torch.ops.aten, torch._C.DispatchKey
    packets = (getattr(aten, name) for name in dir(aten) if "upsample" in name)
    calls = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    removed = [
        (call, key, call.py_kernels.pop(key))
        for call in calls
        for key in (keys.Autograd, keys.CompositeImplicitAutograd)
        if key in call.py_kernels
    ]
    try:
        for call in calls:
            call._dispatch_cache.clear()
        yield
    finally:
        for call, key, kernel in removed:
            call.py_kernels[key] = kernel
            call._dispatch_cache.clear()
        if asked is not None:  # torch lists composite calls once, perhaps inside this context
            asked.cache_clear()


KINDS: dict[str, Any] = {"find": bool, "budget_s": int | float, "policy": Policy, "cache": Cache}
KINDS |= {"plans": list, "means": Means, "seed": Seed, "rest": bool}


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name not in KINDS:
            wrong = f"there is no option {name!r}"
            remedy = f"use {', '.join(KINDS)}"
            raise DeuteronError(wrong, asked="torch.compile(…, options=…)", remedy=remedy)
        if not isinstance(value, KINDS[name]):
            wrong = f"{name} is {value!r}"
            raise DeuteronError(wrong, asked=f"options={{{name!r}: …}}", remedy="see help(backend)")
    return {"find": False, **options}


def compiled(graph: fx.GraphModule, example: Sequence[Any], search: Any) -> Callable[..., Any]:
    """The compiler that AOTAutograd calls. Returns a function that takes a list of arguments, which
    it empties, and returns a list of results."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if any(map(_varies, example)):
        run: Any = Sizes(graph, search)
    else:
        with unset_fake_temporarily():  # constants are computed here, and kernels measured
            run = Step(graph, example, search)

    def boxed(args: list[Any]) -> Results:
        results: Results = run(args)
        return results

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class Half(NamedTuple):
    """A graph that stands for an fx module. ``places``: the module's placeholders in order, some of
    which are the graph's inputs. ``results``: what the module returns, each as the name of an
    output of the graph (:class:`Made`) or of a placeholder, or itself if it is not a tensor."""

    graph: Graph
    places: tuple[str, ...]
    results: tuple[Any, ...]
    writes: tuple[tuple[str, str], ...] = ()  # placeholder, and the output that is written over it
    shown: int | None = None  # how many of the first results the user sees; None: all
    prepared: bool = False  # whether the passes have run already
    notes: tuple[str, ...] = ()  # for the explanation of the plan
    moving: frozenset[str] = frozenset()  # placeholders whose address differs from call to call
    # inputs whose memory nobody needs after a run; None: this is a whole graph, not half of a step
    dying: frozenset[str] | None = None


class Made(str):
    """The name of an output that a plan makes, to tell it from the name of a placeholder."""


def imported(
    graph: fx.GraphModule, example: Sequence[Any], known: Mapping[str, float] | None = None
) -> Half:
    """Import a module of ATen calls. ``known``: the numbers that fill some inputs, by their names;
    these become constants."""
    importer = Importer("step", {**TABLE, **entries()})
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, given in zip(places, example, strict=True):
        if known and node.name in known:
            number = torch.full(given.shape, known[node.name], dtype=given.dtype)
            importer.weight(node, node.name, number)
        elif isinstance(given, torch.Tensor) and not is_token(node):
            importer.input(node, node.name, _dense(given))
        else:
            importer.bind(node, None if is_token(node) else given)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            held = getattr(graph, str(node.target))
            if not isinstance(held, torch.Tensor):
                wrong = "torch.cond and torch.while_loop hold graphs of their own, chosen by values"
                remedy = "call them outside of what is compiled, or write torch.where"
                raise GraphError(wrong, asked='torch.compile(backend="deuteron")', remedy=remedy)
            importer.weight(node, node.name, held)
    copies = [node for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default]
    importer.run(n for n in graph.graph.nodes if n.op != "get_attr" and n not in copies)
    (last,) = (node for node in graph.graph.nodes if node.op == "output")
    writes = []
    for i, (to, value) in enumerate(node.args[:2] for node in copies):
        importer.build.output(f"write_{i}", importer.entered(importer.value(value)).name)
        writes.append((to.name, f"write_{i}"))
    results: list[Any] = []
    for i, result in enumerate(last.args[0]):
        value = importer.output(f"result_{i}", result) if isinstance(result, fx.Node) else result
        # torch hands over a stand-in for an object such as a device mesh; results hold the object
        given = getattr(value, "real_obj", value)
        results.append(Made(f"result_{i}") if isinstance(value, Sym) else given)
    names = tuple(node.name for node in places)
    return Half(importer.finish(), names, tuple(results), tuple(writes))


class Step:
    """One graph as a plan, for arguments like those of an example. A call empties the list of its
    arguments, so that tensors left by the other half are freed as soon as they have been read."""

    def __init__(self, graph: fx.GraphModule, example: Sequence[Any], search: Any) -> None:
        self.device, half = _device_of(example), _half_of(graph) or imported(graph, example)
        places = half.places
        self.used = [places.index(name) for name in half.graph.inputs]
        made = [name for name, _ in half.graph.outputs]
        # Results are outputs of the plan, arguments, or plain values. ``order``: where each is in a
        # list of all outputs, then these arguments, then these values.
        given = [r for r in half.results if isinstance(r, str) and not isinstance(r, Made)]
        self.passed = [places.index(r) for r in given]
        self.plain = [r for r in half.results if not isinstance(r, str)]
        behind = iter(range(len(made), len(made) + len(given)))
        last = iter(range(len(made) + len(given), len(made) + len(given) + len(self.plain)))
        self.order = [
            made.index(r) if isinstance(r, Made) else next(behind if isinstance(r, str) else last)
            for r in half.results
        ]
        written = [half.graph.inputs.index(to) for to, _ in half.writes]
        self.writes = written, [made.index(value) for _, value in half.writes]
        policy = search.get("policy") or Policy()
        self.dying = [i for i, v in enumerate(half.graph.inputs) if v in (half.dying or ())]
        search = {**search, "device": self.device, "prepared": half.prepared, "dying": half.dying}
        search["policy"] = replace(policy, cuda_graph=False)  # instead, Settled captures it below
        search["into"] = {value: to for to, value in half.writes}  # state is updated in place
        plans = search.pop("plans", [])
        search.setdefault("budget_s", BUDGET_S / (4 if len(half.graph.nodes) < SMALL else 1))
        self.plan: Plan = compile_graph(half.graph, **search)
        known = self.plan.decision
        self.plan.decision = replace(known, notes=(*half.notes, *known.notes))
        plans.append(self.plan)
        shown = half.results if half.shown is None else half.results[: half.shown]
        self.run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = self._work
        if self.device.type == "cuda" and policy.cuda_graph is not False:
            moving = [i for i, name in enumerate(half.graph.inputs) if name in half.moving]
            visible = [made.index(r) for r in shown if isinstance(r, Made)]
            self.run = Settled(self._work, visible, moving, self.plan.program.release, written)

    def __call__(self, args: list[Any]) -> Results:
        given, binder = [args[i] for i in self.used], self.plan.binder
        others = [*(args[i] for i in self.passed), *self.plain]
        args.clear()
        try:
            binder.check(given)
        except BindError:  # another memory order, or a number that is on the host
            pairs = zip(given, binder.types, strict=True)
            given = [restrided(t.detach().to(self.device), type_) for t, type_ in pairs]
            binder.check(given)
        if self.dying and torch._C._autograd._get_current_graph_task_keep_graph():
            for i in self.dying:  # retain_graph: the gradient may be taken once more
                given[i] = duplicate(given[i])
        found = [*self.run(given), *others]
        return [found[i] for i in self.order]

    def _work(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        to, of = self.writes
        written = [given[i] for i in to]
        made = self.plan.run_checked(given)
        if to:
            torch._C._increment_version(written)  # autograd did not see these writes
            pairs = zip(written, (made[i] for i in of), strict=True)
            with torch.no_grad():
                copy_all((old, new) for old, new in pairs if old is not new)
        # autograd forbids writing to views that a function returns, and to users these are no views
        return [t.data if t._is_view() else t for t in made]


# ---- forward and backward


def partition(
    joint: fx.GraphModule,
    example: Any,
    *,
    policy: Policy | None,
    means: Means | None,
    seed: Seed | None,
    traced: Sequence[Any],
    num_fwd_outputs: int,
    **how: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The partitioner that AOTAutograd calls to cut a step in two. Returns two modules of one call
    each, which holds a :class:`Half`. ``traced``: the tensors that the step was traced with; some
    may be parameters whose gradients are to become ``means`` over ranks. ``seed``: the gradient of
    the step's one result, where it is known."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition as as_torch_does
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    places = [node for node in joint.graph.nodes if node.op == "placeholder"]
    values = {node.name: node.meta["val"] for node in places}
    if any(_varies(value) for value in values.values()):
        return as_torch_does(joint, example, num_fwd_outputs=num_fwd_outputs, **how)
    later = [node.name for node in places if "tangents" in str(node.target)]
    single = len(later) == 1 and values[later[0]].numel() == 1
    known = {} if seed is None or not single else {later[0]: seed.value}
    with unset_fake_temporarily():
        graph, _, results, writes, *_ = imported(joint, list(values.values()), known)
        target = find_target(_device_of(list(values.values())))
        first: set[str] = {r for r in results[:num_fwd_outputs] if isinstance(r, Made)}
        first |= {value for _, value in writes}
        if means is not None:
            alike = len(traced) + len(later) == len(places)  # else torch has added other inputs
            grads, begins = results[num_fwd_outputs:], next(iter(known), None)
            graph = _with_means(graph, grads, traced if alike else (), means, begins)
        asked = graph, first, set(later) - set(known), target, policy or Policy()
        cut, notes = halves(*asked, written={to for to, _ in writes})
    if {to for to, _ in writes} & set(cut.saved):  # forward would overwrite what backward reads
        return as_torch_does(joint, example, num_fwd_outputs=num_fwd_outputs, **how)
    ahead = cut.forward
    unread = {to: graph.types[to] for to, _ in writes if to not in ahead.inputs}
    ahead = replace(ahead, inputs=(*ahead.inputs, *unread), types={**ahead.types, **unread})
    early = [node.name for node in places if node.name not in later]
    saved = [v if v in early else Made(f"saved_{v}") for v in cut.saved]
    types = dict(zip(saved, (cut.forward.types[v] for v in cut.saved), strict=True))
    returned = (*results[:num_fwd_outputs], *saved)
    shown = num_fwd_outputs
    stay = {places[i].name for i in how.get("static_lifetime_input_indices") or ()}
    moving = frozenset(set(early) - stay if stay else ())
    given_to = ahead, tuple(early), returned, writes, shown, True, notes, moving
    forward = Half(*given_to, dying=frozenset())
    names = (*cut.saved, *later)
    loose = frozenset(name for name in later if values[name].nbytes <= LITTLE)
    how_back: Any = {"shown": 0, "prepared": True, "dying": cut.dying, "moving": loose}
    backward = Half(cut.backward, names, results[num_fwd_outputs:], **how_back)
    fake = next(v.fake_mode for v in values.values() if hasattr(v, "fake_mode"))
    device = _device_of(list(values.values()))

    def empty(t: TensorType) -> torch.Tensor:
        with fake:
            return torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device=device)

    (last,) = (node for node in joint.graph.nodes if node.op == "output")
    nodes = [(i, r) for i, r in enumerate(last.args[0]) if isinstance(r, fx.Node)]
    seen = {f"result_{i}": node.meta["val"] for i, node in nodes}
    seen |= {str(name): empty(t) for name, t in types.items() if isinstance(name, Made)}
    given = {str(v): values.get(v, seen.get(str(s))) for v, s in zip(cut.saved, saved, strict=True)}
    given |= {name: values[name] for name in later}
    first_half = _module(forward, {name: values[name] for name in early}, seen)
    return first_half, _module(backward, given, seen)


def _with_means(
    graph: Graph, grads: Sequence[Any], given: Sequence[Any], means: Means, begins: str | None
) -> Graph:
    """Return the graph with the gradients of the given parameters replaced by their means over
    ranks. ``begins``: the input with the gradient of the loss, where that is known in advance."""
    pairs = zip(given, grads, strict=False)
    found = {id(p): g for p, g in pairs if id(p) in means.params and isinstance(g, Made)}
    means.done.update(found)
    return means_over_ranks(graph, set(found.values()), means, begins)


def _varies(value: Any) -> bool:
    """Whether a size or a stride is known only when the graph runs."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _module(half: Half, given: Mapping[str, Any], seen: Mapping[str, Any]) -> fx.GraphModule:
    """Return an fx module that stands for a half: placeholders, one call, and the results."""
    graph, root = fx.Graph(), torch.nn.Module()
    places = {}
    for name, value in given.items():
        places[name] = graph.placeholder(name)
        places[name].meta["val"] = value

    def planned(*tensors: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("a half of a step is run by its plan")

    planned.half = half  # type: ignore[attr-defined]
    call = graph.call_function(planned, tuple(places.values()))
    call.meta["val"] = [seen[r] for r in half.results if isinstance(r, Made)]
    results: list[Any] = []
    for r in half.results:
        if isinstance(r, Made):
            node = graph.call_function(getitem, (call, len(results)))
            node.meta["val"] = seen[r]
            results.append(node)
        else:
            results.append(places[r] if isinstance(r, str) else _told_in(root, graph, r))
    graph.output(tuple(results))
    return fx.GraphModule(root, graph)


def _told_in(root: torch.nn.Module, graph: fx.Graph, value: Any) -> Any:
    """Return a result that is not a tensor in a form that an fx graph can return: plain values as
    they are, and for an object such as a device mesh a node that reads an attribute of ``root``."""
    if value is None or isinstance(value, bool | int | float):
        return value
    name = f"kept_{len(graph.nodes)}"
    setattr(root, name, value)
    node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def _half_of(graph: fx.GraphModule) -> Half | None:
    found = (getattr(node.target, "half", None) for node in graph.graph.nodes)
    return next((half for half in found if half is not None), None)


class Sizes:
    """A graph whose sizes vary: it is traced and planned anew when a size first occurs."""

    def __init__(self, graph: fx.GraphModule, search: Any) -> None:
        self.graph, self.search = graph, search
        self.made: dict[tuple[Any, ...], Step] = {}

    def __call__(self, args: list[Any]) -> Results:
        key = tuple((a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args)
        if key not in self.made:
            self.made[key] = Step(_at_these_sizes(self.graph, args), args, self.search)
        return self.made[key](args)


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
    """Return an expanded input with memory for every element, any other as it is."""
    return tensor.contiguous() if overlaps(TensorType.from_tensor(tensor)) else tensor
