"""``dt.optimize``: a module goes in, a planned callable comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deuteron.errors import BindError, DeuteronError
from deuteron.explain import Explanation
from deuteron.frontends.torch_export import Imported, import_module
from deuteron.functional.core import entries
from deuteron.ir.types import TensorType
from deuteron.log import log, told
from deuteron.plan import Cache, Plan, compile_graph
from deuteron.plan.builders import builders
from deuteron.plan.cuda_graph import captured_or_none
from deuteron.plan.search import Progress
from deuteron.plan.tensors import overlaps, restrided
from deuteron.policy import Policy
from deuteron.target import Target

# for a search that nobody set a budget for; on a GPU with all that comes before it, but never less
BUDGET_S, LEAST_S = {"cpu": 2.5, "cuda": 7.5}, 3.0

PLAIN = (
    torch.Tensor,
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
)  # nothing a call can change


class Optimized:
    """What :func:`optimize` returns: call it like the module it came from.

    The weights are copies of those the module had when it was optimised: what happens to the
    module later does not reach them. ``plan`` is the plan behind it, ``seconds``
    says how long each stage took, ``opaque`` which torch operators have no definition of ours and
    run as they are.
    """

    def __init__(self, imported: Imported, plan: Plan, seconds: Mapping[str, float]) -> None:
        self.imported, self.plan, self.seconds = imported, plan, dict(seconds)
        self._single = imported.single_tensor_call()

    @property
    def opaque(self) -> tuple[str, ...]:
        return self.imported.opaque

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._single and len(args) == 1 and not kwargs:
            tensors = [args[0]]
        else:
            tensors = self.imported.flatten_call(args, kwargs)
        return self.imported.unflatten_result(self.plan.run_checked(self._fitted(tensors)))

    def _fitted(self, tensors: list[Any]) -> list[torch.Tensor]:
        """Checked against the plan; another memory order is converted, nothing else is."""
        try:
            self.plan.binder.check(tensors)
        except BindError:
            for i, tensor in enumerate(tensors):
                if self.plan.binder.fits_but_for_strides(tensor, i):
                    tensors[i] = restrided(tensor, self.plan.binder.types[i])
            self.plan.binder.check(tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            wrong = "an input requires a gradient, but this plan computes none"
            remedy = "call it under torch.no_grad(), or build the graph with dt.Graph and grad()"
            raise BindError(wrong, asked="a call inside autograd", remedy=remedy)
        return tensors

    def explain(
        self,
        format: str | None = None,
        *,
        target: str | Target | None = None,
        errors: bool = False,
        full: bool = False,
    ) -> Explanation | str:
        """What runs where, what it costs and why; see :meth:`deuteron.Plan.explain`."""
        return self.plan.explain(format, target=target, errors=errors, full=full)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON and its weights beside it; ``dt.load_plan`` reads the plan."""
        return self.plan.save(path)

    def __repr__(self) -> str:
        spent = ", ".join(f"{k} {v:.2f} s" for k, v in self.seconds.items())
        return f"<Optimized {self.plan!r}; {spent}>"


def optimize(
    model: nn.Module,
    example: torch.Tensor | tuple[Any, ...] | list[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    find: bool = True,
    budget_s: float | None = None,
    policy: Policy | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
    interrupt: str = "raise",
    verbose: bool = False,
    name: str = "",
) -> Optimized:
    """Optimise ``model`` for inference on inputs like ``example``.

    ``example`` is one tensor or the tuple of positional arguments; ``kwargs`` the keyword
    arguments. Shapes, dtypes and device are fixed by it. With ``find`` the engines compete on
    this machine for about ``budget_s`` seconds (unless you say, 2.5 on a CPU, and on a GPU until
    all together has taken about 7.5), and what was measured is remembered. On a GPU the plan is
    timed against the model, both as CUDA Graphs; if it is slower, the search goes on twice as long.
    ``name`` is what explanations call it, unless you say its class.

    ``progress`` is called with a stage, a number of steps done and a number of steps; ``verbose``
    prints what the logger "deuteron" says. Ctrl-C raises KeyboardInterrupt, and what was measured
    is kept for the next search; with ``interrupt="return"`` you get a plan by what was measured
    until then, unless the model was still being imported.

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
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    device = _device_of(model, args, kwargs or {})
    if device.type in BUDGET_S and torch.is_autocast_enabled(device.type):
        wrong = "autocast is on, and a module is imported without what is around it"
        remedy = "write 'with torch.autocast(…):' inside forward, or cast model and example"
        raise BindError(wrong, asked="optimize(…) under torch.autocast", remedy=remedy)
    args, named = pytree.tree_map(_dense, (args, dict(kwargs or {})))
    if find and device.type == "cuda":
        builders()  # they are ready by the time that there is something to build
    seconds = {}
    begin = time.perf_counter()
    name = name or type(model).__name__
    report = progress or (lambda stage, done, total: None)
    with told(verbose):
        log.info("%s: importing", name)
        report("importing", 0, 1)
        imported = import_module(model, args, named, name, ours=entries())
        report("importing", 1, 1)
        seconds["import"] = time.perf_counter() - begin
        log.info("%s: %d operators", name, len(imported.graph.nodes))
    begin = time.perf_counter()
    eager = None
    if find and device.type == "cuda":  # while those who build get ready
        eager = captured_or_none(lambda: model(*args, **named))
        seconds["eager"] = time.perf_counter() - begin
    begin = time.perf_counter()
    search: Any = {"find": find, "cache": cache, "progress": progress, "interrupt": interrupt}
    search["verbose"] = verbose
    search["budget_s"] = budget_s
    if budget_s is None:
        spent = sum(seconds.values()) if device.type == "cuda" else 0.0
        search["budget_s"] = max(LEAST_S, BUDGET_S.get(device.type, 6.0) - spent)
    plan = compile_graph(imported.graph, device=device, policy=policy, **search)
    seconds["plan"] = time.perf_counter() - begin
    begin = time.perf_counter()
    if device.type == "cuda":
        plan.capture()
    seconds["capture"] = time.perf_counter() - begin
    if eager is not None and plan.captured is not None:
        begin = time.perf_counter()
        ours, theirs = plan.against(eager)
        if ours > theirs:
            search["budget_s"] *= 2  # what was measured is remembered: this goes on from there
            other = compile_graph(imported.graph, device=device, policy=policy, **search)
            plan = other if other.capture() and other.against(eager)[0] < ours else plan
        seconds["eager"] += time.perf_counter() - begin
    fast = Optimized(imported, plan, seconds)
    if find and device.type == "cpu":
        _race(fast, model, args, named, search["budget_s"])
    return fast


def _race(
    fast: Optimized, model: nn.Module, args: Any, named: dict[str, Any], budget_s: float
) -> None:
    """Time the plan against the model, for the explanation, where calls leave nothing behind: each
    has containers of its own, and tensors that nobody else holds."""
    leaves, spec = pytree.tree_flatten((args, named))
    if not all(leaf is None or isinstance(leaf, PLAIN) for leaf in leaves):
        return
    own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def called(what: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            positional, keywords = pytree.tree_unflatten(own, spec)
            with torch.no_grad():
                return what(*positional, **keywords)

        return call

    begin = time.perf_counter()
    fast.plan.against_calls(called(fast), called(model), budget_s)
    fast.seconds["eager"] = time.perf_counter() - begin


def _dense(leaf: Any) -> Any:
    """An expanded example made whole: calls may bring tensors whose elements all differ."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    leaf = leaf.resolve_conj().resolve_neg()  # and with signs that are in memory
    return leaf.contiguous() if overlaps(TensorType.from_tensor(leaf)) else leaf


def _device_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """The one device of parameters and example, or an error that names the odd one out."""
    found: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(tensor.device, f"{name} of the model")
    for i, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs)))):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(leaf.device, f"example input {i}")
    if len(found) > 1:
        listed = "; ".join(f"{where} is on {device}" for device, where in found.items())
        raise BindError(f"tensors are on several devices: {listed}", remedy="move them to one")
    return next(iter(found), torch.device("cpu"))
