"""``dt.optimize``: a module goes in, a planned module comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deuteron.errors import BindError, DeuteronError
from deuteron.ir.types import TensorType
from deuteron.kinds import checked
from deuteron.log import log, logged_to_console
from deuteron.model.follow import Follower
from deuteron.model.optimized import Optimized
from deuteron.model.plans import Planned, Plans, is_extra, private
from deuteron.model.vary import Vary
from deuteron.plan import Cache, Plan
from deuteron.plan.builders import builders
from deuteron.plan.cuda_graph import captured_or_none
from deuteron.plan.search import Progress
from deuteron.plan.tensors import overlaps
from deuteron.policy import Policy

# Default seconds of a search. On a GPU they include the import of the module before it, but the
# search itself never gets less than LEAST_S.
BUDGET_S, LEAST_S = {"cpu": 3.0, "cuda": 6.0}, 3.0
LOSS = 1.02  # only a plan slower than this times eager makes us try eager's own calls instead
OWN = "no plan that was found is as quick as the module, which is called instead"

# types of leaves of an example with which calls can be repeated: no objects that a call changes
PLAIN = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device)

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@checked("model", "example")
def optimize(
    model: nn.Module,
    example: torch.Tensor | tuple[Any, ...] | list[Any],
    kwargs: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
    *,
    vary: Mapping[str, Mapping[int, str]] | None = None,
    follow: bool = False,
    find: bool = True,
    budget_s: float | None = None,
    policy: Policy | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
    interrupt: str = "raise",
    verbose: bool = False,
    name: str = "",
) -> Optimized | OverRanks:
    """Optimise ``model`` for inference on inputs like ``example``.

    ``example`` is one tensor or the tuple of positional arguments; ``kwargs`` the keyword
    arguments. A list is several examples, one for each size to be planned now; ``kwargs`` is
    then one mapping for all of them, or a list as well.

    The example fixes dtypes, the device and every argument that is not a tensor. The first call
    with another size makes a plan for it by estimate; ``fast.find()`` measures. ``vary`` names the
    axes that may vary, by argument and axis, and any other change of size is refused:
    ``{"x": {0: "batch", 1: "tokens"}}``; axes with the same name vary together.
    ``Policy(shapes="fixed")`` refuses every size but those of the examples.

    The weights are copied. With ``follow``, every call checks whether the weights of ``model`` have
    changed since, and if so takes over the new ones. The check takes some tenths of a microsecond
    for each weight.

    With ``find`` the engines compete on this machine for about ``budget_s`` seconds, and the
    measurements are remembered. The default is 3 seconds on a CPU; on a GPU everything together
    takes about 6. Then the plan is timed against the model, on a GPU both as CUDA Graphs. If the
    plan is slower, the search goes on twice as long; if that does not help, the plan makes the same
    calls as the model; and on a CPU, where nothing else is as quick, a copy of the module itself is
    called. ``name`` appears in explanations; by default it is the name of the model's class.

    ``progress`` is called with the name of a stage, the number of steps done and the number of all
    steps; ``verbose`` prints what goes to the logger "deuteron". Ctrl-C raises KeyboardInterrupt,
    and the measurements so far are kept for the next search; with ``interrupt="return"`` you get a
    plan based on these measurements instead, unless the model was still being imported.

    Of a model wrapped in DistributedDataParallel, the model inside is optimised. A model whose
    parameters are sharded over ranks (FSDP2, tensor parallelism) is not copied but compiled where
    it is, with its collectives, and all ranks have to call it together: see :class:`OverRanks`.

    >>> fast = dt.optimize(model.eval(), torch.randn(1, 3, 224, 224))
    >>> y = fast(x)
    >>> print(fast.explain())
    """
    if isinstance(model, str | Path):
        wrong = "a model file cannot be optimised yet"
        raise DeuteronError(wrong, asked=f"optimize({str(model)!r})", remedy="pass an nn.Module")
    if not isinstance(model, nn.Module):
        raise BindError(
            f"model is a {type(model).__name__}, not an nn.Module",
            asked="optimize(model, example)",
            remedy="pass an nn.Module; for hand-built graphs use dt.Graph",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    calls = _calls(example, kwargs)
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        refused = {"vary": vary is not None, "follow": follow}
        for argument, given in refused.items():
            if given:
                wrong = f"{argument}=… of a model that is spread over ranks, which is not copied"
                raise BindError(wrong, asked="optimize(…)", remedy="leave it out")
        options = {"find": find, "policy": policy, "budget_s": budget_s, "cache": cache}
        with logged_to_console(verbose):
            return OverRanks(model, calls, {k: v for k, v in options.items() if v is not None})
    device = _device_of(model, calls)
    if device.type in BUDGET_S and torch.is_autocast_enabled(device.type):
        wrong = "autocast is on, and a module is imported without what is around it"
        remedy = "write 'with torch.autocast(…):' inside forward, or cast model and example"
        raise BindError(wrong, asked="optimize(…) under torch.autocast", remedy=remedy)
    follower = Follower(model) if follow else None
    plans = _empty_plans(model, device, policy or Policy())
    plans.cache, plans.name = cache, name or type(model).__name__
    if follow and plans.module is model:
        raise BindError(plans.missing[0], asked="optimize(…, follow=True)", remedy="call refit")
    search: Any = {"find": find, "cache": cache, "progress": progress, "interrupt": interrupt}
    search |= {"verbose": verbose, "budget_s": budget_s}
    seconds: dict[str, float] = {}
    for call in calls:
        spent = _plan(plans, model, call, search, vary)
        seconds |= {stage: seconds.get(stage, 0.0) + s for stage, s in spent.items()}
    if plans.module is model:
        plans.module = None
    fast = Optimized(plans, seconds, follower)
    if find and device.type == "cpu":
        search["budget_s"] = BUDGET_S["cpu"] if budget_s is None else budget_s
        _race(fast, plans, model, calls[0], search)
    return fast


class OverRanks(nn.Module):
    """What :func:`optimize` returns for a model whose parameters are sharded over ranks: a module
    that runs the model, which is not copied, through its plans, without gradients. All ranks have
    to call it together.

    ``plans`` lists the plans of all sizes so far; under FSDP2 there are several for each size,
    since every module that was sharded is called by itself.
    """

    def __init__(self, module: nn.Module, calls: list[Call], options: dict[str, Any]) -> None:
        super().__init__()
        from deuteron.torch_compile import backend

        self.module, self.plans, self.training = module, list[Plan](), module.training
        how: Any = {"backend": backend, "options": {**options, "plans": self.plans}}
        self._run = torch.compile(module, dynamic=False, **how)
        for args, named in calls:
            self(*args, **named)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._run(*args, **kwargs)

    def explain(self, full: bool = False) -> str:
        """What every plan runs, what it costs and why; ``full`` for every region."""
        return "\n\n".join(str(plan.explain(full=full)) for plan in self.plans)


def _calls(example: Any, kwargs: Any) -> list[Call]:
    """Return the calls, as positional and keyword arguments, of one example or several."""
    several = example if isinstance(example, list) else [example]
    named = kwargs if isinstance(kwargs, list) else [kwargs or {}] * len(several)
    if not several or len(named) != len(several):
        wrong = f"there are {len(several)} examples and {len(named)} times keyword arguments"
        raise BindError(wrong, asked="optimize(model, […], […])", remedy="give one for each size")
    given = [each if isinstance(each, tuple) else (each,) for each in several]
    return [
        pytree.tree_map(_dense, (args, dict(more))) for args, more in zip(given, named, strict=True)
    ]


def _empty_plans(model: nn.Module, device: torch.device, policy: Policy) -> Plans:
    """Return a :class:`Plans` that has no plans yet, and a private copy of the module to make them
    from. A module that cannot be copied is used itself, and let go once the examples are planned.
    """
    module = private(model)
    if isinstance(module, nn.Module):
        return Plans(module, device, policy, training=model.training)
    remedy = "give a list of examples, one for each size"
    missing = f"the module cannot be copied ({module})", remedy
    own = model.state_dict().items()
    state = {name: t.detach().clone() for name, t in own if not is_extra(name, t)}
    plans = Plans(None, device, policy, training=model.training, state=state, missing=missing)
    plans.module = model
    return plans


def _plan(
    plans: Plans, model: nn.Module, call: Call, search: Mapping[str, Any], vary: Any
) -> dict[str, float]:
    """Import and plan one call. Returns the seconds that each stage took."""
    if plans.decided_otherwise(*call):
        begin = time.perf_counter()
        plans.written_otherwise(*call)
        return {"plan": time.perf_counter() - begin}
    args, named = call if plans.call is None else plans.written(*call)
    device, find, seconds = plans.device, search["find"], dict[str, float]()
    if find and device.type == "cuda":
        builders()  # start them now: they are ready when there is something to build
    begin = time.perf_counter()
    report = search["progress"] or (lambda stage, done, total: None)
    with logged_to_console(search["verbose"]):
        log.info("%s: importing", plans.name)
        report("importing", 0, 1)
        imported = plans.imported(args, named)
        report("importing", 1, 1)
        seconds["import"] = time.perf_counter() - begin
        log.info("%s: %d operators", plans.name, len(imported.graph.nodes))
    if vary is not None and plans.vary is None:
        plans.vary = Vary.of(vary, plans.paths, plans.types)
    begin = time.perf_counter()
    eager: torch.cuda.CUDAGraph | None = None

    def run_eager() -> None:  # slow: libraries first set up what they need for this thread
        nonlocal eager
        begin = time.perf_counter()
        eager = captured_or_none(lambda: model(*args, **named))
        seconds["eager"] = time.perf_counter() - begin

    search = dict(search)
    if search["budget_s"] is None:
        spent = seconds["import"] if device.type == "cuda" else 0.0
        search["budget_s"] = max(LEAST_S, BUDGET_S.get(device.type, 6.0) - spent)
    meanwhile = run_eager if find and device.type == "cuda" and not imported.stateful else None
    planned = plans.planned(imported, meanwhile=meanwhile, **search)
    seconds["plan"] = time.perf_counter() - begin - seconds.get("eager", 0.0)
    begin = time.perf_counter()
    if device.type == "cuda":
        planned.plan.capture()
    seconds["capture"] = time.perf_counter() - begin
    if eager is not None and planned.plan.captured is not None:
        begin = time.perf_counter()
        graph = eager
        planned = _not_slower(
            planned, plans, search, lambda p: p.plan.against(graph) if p.plan.capture() else None
        )
        seconds["eager"] += time.perf_counter() - begin
    plans.add(planned)
    return seconds


Race = Callable[[Planned], tuple[float, float] | None]  # seconds of a plan and of the model


def _not_slower(
    planned: Planned, plans: Plans, search: Mapping[str, Any], race: Race, own: bool = False
) -> Planned:
    """Return a plan that is faster than the model, or else the fastest that we find. While a plan
    is slower than the model, three others are tried: one from a longer search, one that makes the
    same calls as eager, and, with ``own``, calling the module itself."""
    times = race(planned)
    if times is None:
        return planned
    longer = times[0] / times[1]

    def again(**how: Any) -> Planned:
        return plans.planned(planned.imported, **how)

    # measurements are remembered: a longer search goes on where the first one stopped
    more = dict(search, budget_s=2 * search["budget_s"])
    ways: list[tuple[float, Callable[[], Planned]]] = [(1.0, lambda: again(**more))]
    if plans.policy.engines is None:
        policy = replace(plans.policy, engines=("torch",))
        ways.append((LOSS, lambda: again(find=False, prepared=True, policy=policy)))
    if own and plans.module is not None:
        ways.append((LOSS, lambda: replace(planned, own=True)))
    for least, way in ways:
        if longer > least:
            other = way()
            times = race(other)
            if times is not None and times[0] / times[1] < longer:
                planned, longer = other, times[0] / times[1]
    if planned.own:
        planned.plan.note(OWN)
    return planned


def _race(
    fast: Optimized, plans: Plans, model: nn.Module, example: Call, search: Mapping[str, Any]
) -> None:
    """Time the plan against the model, and look for another if it is slower. Only done where
    repeated calls have no side effects: every call gets new containers, and the tensors in them are
    clones that nobody else holds."""
    leaves, spec = pytree.tree_flatten(example)
    if not all(leaf is None or isinstance(leaf, PLAIN) for leaf in leaves):
        return
    own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def called(what: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            positional, keywords = pytree.tree_unflatten(own, spec)
            with torch.no_grad():
                return what(*positional, **keywords)

        return call

    def race(planned: Planned) -> tuple[float, float] | None:
        plans.add(planned)
        return planned.plan.against_calls(called(fast), called(model), search["budget_s"])

    begin = time.perf_counter()
    try:
        called(model)()
    except RuntimeError:  # forward takes a gradient, and has to be called where it can
        return
    plans.add(_not_slower(plans.first, plans, search, race, own=True))
    fast.seconds["eager"] = time.perf_counter() - begin


def _dense(leaf: Any) -> Any:
    """Return an expanded example as a tensor with memory for every element: later calls may bring
    tensors whose elements all differ."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    leaf = leaf.resolve_conj().resolve_neg()  # apply pending conjugation and negation
    return leaf.contiguous() if overlaps(TensorType.from_tensor(leaf)) else leaf


def _device_of(model: nn.Module, calls: list[Call]) -> torch.device:
    """Return the one device of parameters and example. If there are several, raise an error that
    names a tensor on each."""
    found: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(tensor.device, f"{name} of the model")
    leaves = enumerate(pytree.tree_leaves(calls))
    given = [(i, leaf) for i, leaf in leaves if isinstance(leaf, torch.Tensor)]
    for i, leaf in sorted(given, key=lambda each: not each[1].ndim):
        if leaf.ndim or not found:  # a rank-0 tensor may be on the host
            found.setdefault(leaf.device, f"example input {i}")
    if len(found) > 1:
        listed = "; ".join(f"{where} is on {device}" for device, where in found.items())
        raise BindError(f"tensors are on several devices: {listed}", remedy="move them to one")
    return next(iter(found), torch.device("cpu"))
