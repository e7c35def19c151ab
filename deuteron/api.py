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
from deuteron.log import log, told
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

# for a search that nobody set a budget for; on a GPU with all that comes before it, but never less
BUDGET_S, LEAST_S = {"cpu": 2.5, "cuda": 6.0}, 3.0
LOSS = 1.02  # times eager's that a plan may take before the calls of eager are taken instead
OWN = "no plan that was found is as quick as the module, which is called instead"

PLAIN = (
    torch.Tensor,
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
)  # nothing a call can change

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

    Dtypes, device and all that is no tensor are fixed by the example. A call of another size is
    planned when it first comes, by estimate; ``fast.find()`` measures. ``vary`` names the axes that
    may vary, by argument and axis, and refuses all others: ``{"x": {0: "batch", 1: "tokens"}}``;
    axes of one name vary together. ``Policy(shapes="fixed")`` refuses every size but those of the
    examples.

    The weights are copied. With ``follow``, a call looks whether those of ``model`` have changed
    since, which takes some tenths of a microsecond for each, and takes them over.

    With ``find`` the engines compete on this machine for about ``budget_s`` seconds (unless you
    say, 2.5 on a CPU, and on a GPU until all together has taken about 6), and what was measured
    is remembered. Then the plan is timed against the model, on a GPU both as CUDA Graphs; if it is
    slower, the search goes on twice as long, and if that does not help, the model's own calls are
    the plan; on a CPU a copy of the module is called itself where nothing else is as quick.
    ``name`` is what explanations call it, unless you say
    its class.

    ``progress`` is called with a stage, a number of steps done and a number of steps; ``verbose``
    prints what the logger "deuteron" says. Ctrl-C raises KeyboardInterrupt, and what was measured
    is kept for the next search; with ``interrupt="return"`` you get a plan by what was measured
    until then, unless the model was still being imported.

    A model in DistributedDataParallel is optimised as the model inside. One whose parameters are
    spread over ranks (FSDP2, tensor parallelism) is compiled where it is, with its collectives, and
    all ranks call it together: see :class:`OverRanks`.

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
        with told(verbose):
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
        seconds = {stage: seconds.get(stage, 0.0) + s for stage, s in spent.items()}
    if plans.module is model:
        plans.module = None
    fast = Optimized(plans, seconds, follower)
    if find and device.type == "cpu":
        search["budget_s"] = BUDGET_S["cpu"] if budget_s is None else budget_s
        _race(fast, plans, model, calls[0], search)
    return fast


class OverRanks(nn.Module):
    """What :func:`optimize` returns for a model whose parameters are spread over ranks: it runs the
    model's plans where that is, without gradients. All ranks call it together.

    ``plans`` are those of all sizes so far; under FSDP2 there are several for each, since every
    module that was sharded is called by itself.
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
    """The calls of an example, or of several."""
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
    """No plans yet, and a copy of the module to make them of; or the module itself where it cannot
    be copied, and is then gone once the examples are planned."""
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
    """Import and plan one call; the seconds that each stage took."""
    if plans.decided_otherwise(*call):
        begin = time.perf_counter()
        plans.written_otherwise(*call)
        return {"plan": time.perf_counter() - begin}
    args, named = call if plans.call is None else plans.written(*call)
    device, find, seconds = plans.device, search["find"], dict[str, float]()
    if find and device.type == "cuda":
        builders()  # they are ready by the time that there is something to build
    begin = time.perf_counter()
    report = search["progress"] or (lambda stage, done, total: None)
    with told(search["verbose"]):
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

    def run_eager() -> None:  # libraries set up what they need, for this thread: it takes a while
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
    """A plan that wins against the model; or the best there is. Where a longer search does not
    help, the calls that eager makes are a plan as well, and if that loses too, the module is called
    (``own``: if it can be)."""
    times = race(planned)
    if times is None:
        return planned
    longer = times[0] / times[1]

    def again(**how: Any) -> Planned:
        return plans.planned(planned.imported, **how)

    # what was measured is remembered: a longer search goes on from there
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
    """Time the plan against the model, and find another if it is slower, where calls leave nothing
    behind: each has containers of its own, and tensors that nobody else holds."""
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
    plans.add(_not_slower(plans.first, plans, search, race, own=True))
    fast.seconds["eager"] = time.perf_counter() - begin


def _dense(leaf: Any) -> Any:
    """An expanded example made whole: calls may bring tensors whose elements all differ."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    leaf = leaf.resolve_conj().resolve_neg()  # and with signs that are in memory
    return leaf.contiguous() if overlaps(TensorType.from_tensor(leaf)) else leaf


def _device_of(model: nn.Module, calls: list[Call]) -> torch.device:
    """The one device of parameters and example, or an error that names the odd one out."""
    found: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(tensor.device, f"{name} of the model")
    leaves = enumerate(pytree.tree_leaves(calls))
    given = [(i, leaf) for i, leaf in leaves if isinstance(leaf, torch.Tensor)]
    for i, leaf in sorted(given, key=lambda each: not each[1].ndim):
        if leaf.ndim or not found:  # a number may be on the host
            found.setdefault(leaf.device, f"example input {i}")
    if len(found) > 1:
        listed = "; ".join(f"{where} is on {device}" for device, where in found.items())
        raise BindError(f"tensors are on several devices: {listed}", remedy="move them to one")
    return next(iter(found), torch.device("cpu"))
