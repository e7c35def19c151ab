"""The plan: decided, built, ready to run as often as you like."""

import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deuteron.engines import BuildContext, Kernel, build
from deuteron.engines.roofline import region_cost
from deuteron.errors import BindError, EngineError
from deuteron.explain import Explanation, Report, check_format
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kinds import checked
from deuteron.log import log, logged_to_console
from deuteron.ops.evaluate import evaluate
from deuteron.plan.alternatives import Alternative, named, wholes
from deuteron.plan.binding import Binder
from deuteron.plan.builders import BUILT, arch_of, builders
from deuteron.plan.cache import Cache
from deuteron.plan.choose import Choice, Survey, at_once
from deuteron.plan.cuda_graph import CapturedProgram
from deuteron.plan.decide import Decision, constants_on, decide
from deuteron.plan.find import Finder
from deuteron.plan.pricing import make_report
from deuteron.plan.program import Program
from deuteron.plan.search import RAISE, RETURN
from deuteron.plan.serialize import save_decision
from deuteron.plan.tensors import errors_of, random_tensor
from deuteron.plan.timing import Thunk, by_events, interleaved
from deuteron.plan.weights import Weights
from deuteron.policy import Policy
from deuteron.target import Target
from deuteron.target import target as find_target

OURS = ("cpu_", "triton_")  # engines that never call torch's operators: autocast does not matter
HOST_LAUNCH_S = 5e-6  # what the host needs to launch a kernel or a copy
RACES = 6  # runs of the plan and of eager in turns; the first of each does not count
WARM = 12  # calls of both to warm up before that, on a CPU
SEVERAL = 8  # from this many kernels on, it is quicker to have them built by other processes


class Plan:
    """A graph planned for one device.

    ``plan.run(x=tx, w=tw)`` gives the outputs by name, again and again, from any thread.
    ``plan.explain()`` says what runs where and why; ``plan.save(path)`` writes it to a file.
    """

    def __init__(
        self,
        decision: Decision,
        device: torch.device,
        into: Mapping[str, str] | None = None,
        weights: Weights | None = None,
        dying: Collection[str] | None = None,
    ) -> None:
        """``into``: outputs that take the memory of an input, and which; ``weights``: weights that
        this plan shares with others (without them it makes copies of its own). ``dying``: inputs
        that nobody needs after a run; unless it is None, a run empties its list of inputs."""
        self.decision, self.device = decision, device
        self._made = into, weights, dying
        graph = decision.graph
        self.inputs: dict[str, TensorType] = {n: graph.types[n] for n in graph.inputs}
        self.outputs: dict[str, TensorType] = {n: graph.types[v] for n, v in graph.outputs}
        self._names = tuple(name for name, _ in graph.outputs)
        self._only = self._names[0] if len(self._names) == 1 else None
        self.binder = Binder(list(self.inputs), list(self.inputs.values()), device)
        self._constants = constants_on(graph, device, copy=weights is None)
        self._shared = weights or Weights()
        self.forms: list[torch.Tensor] = []  # packed constants etc. that kernels read instead
        built = [self._built(choice) for choice in decision.choices]
        self.decision = replace(decision, choices=tuple(choice for choice, _ in built))
        kernels = [kernel for _, kernel in built]
        blocks = self._shared.blocks if device.type == "cpu" else None
        spots = None if decision.placed is None else decision.placed.spots
        given = self._constants, device, into, blocks, spots, dying
        self.program = Program(graph, decision.regions, kernels, *given, instead=self._instead)
        self.captured: CapturedProgram | None = None  # the CUDA Graph, once it exists
        self._capture_note = self._why_not_captured()
        self._capture_lock = threading.Lock()
        self._total_s: float | None = None
        # eager's seconds, and how they were measured or why they were not
        self._eager: tuple[float | None, str] = None, ""

    def _built(self, choice: Choice) -> tuple[Choice, Kernel]:
        """Build the chosen kernel or, if it cannot be built or needs more scratch memory than the
        policy allows, the next best that can. Returns the choice, with a note on what failed, and
        the kernel."""
        try:
            kernel = self._build(choice)
            option = replace(choice.option, workspace=kernel.workspace)
            return replace(choice, option=option), kernel
        except EngineError as failure:
            return self._built(_without(choice, failure))

    def _instead(self, region: Region, error: Exception) -> Kernel | None:
        """Return the next best kernel for a region whose own the first run could not compile or
        load; None if that was not one of our Triton kernels."""
        choices = list(self.decision.choices)
        place = next(i for i, choice in enumerate(choices) if choice.region is region)
        failed = choices[place].candidate
        if failed.engine not in BUILT:
            return None
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        failure = EngineError(f"{failed} could not be loaded: {why}")
        failure.__cause__ = error
        choices[place], kernel = self._built(_without(choices[place], failure))
        self.decision = replace(self.decision, choices=tuple(choices))
        log.warning("%s: %s", region.name, choices[place].note)
        return kernel

    def _build(self, choice: Choice) -> Kernel:
        where = f"region {choice.region.name} ({' + '.join(choice.region.ops)})"
        ctx, limit = self._context_of(choice), self.decision.policy.workspace_limit
        try:
            kernel = build(choice.region, choice.candidate, ctx)
        except Exception as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            wrong = f"{choice.candidate} could not be built: {why[0]}"
            remedy = "this candidate was offered by its engine; report it"
            raise EngineError(wrong, where=where, remedy=remedy) from error
        if kernel.workspace > limit:
            wrong = f"{choice.candidate} needs {kernel.workspace} bytes of workspace"
            raise EngineError(wrong, where=where, remedy="raise Policy(max_workspace=…)")
        self.forms += ctx.taken
        return kernel

    # ---- running

    def run(
        self, bindings: Mapping[Any, torch.Tensor] | None = None, /, **named: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Outputs by name. Bind inputs by name (``run(x=t)``) or handle (``run({x: t})``).

        Every tensor must fit its input in shape, dtype, device and strides; nothing runs
        before all of them have been checked.
        """
        named = named if bindings is None else self.binder.named(bindings, named)
        results = self.run_checked(self.binder.by_name(named))
        if self._only is not None:
            return {self._only: results[0]}
        return dict(zip(self._names, results, strict=True))

    def run_checked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on inputs, in order, that ``binder.check`` has accepted. Returns outputs in order."""
        if torch._C._is_any_autocast_enabled():  # the plan has decided about types already
            with torch.autocast(self.device.type, enabled=False), torch.no_grad():
                return self._run(tensors)
        if not torch.is_grad_enabled():
            return self._run(tensors)
        torch._C._set_grad_enabled(False)  # what no_grad() does, at a tenth of its cost
        try:
            return self._run(tensors)
        finally:
            torch._C._set_grad_enabled(True)

    def ready(self) -> Callable[..., list[torch.Tensor]]:
        """Return the quickest way to run the plan again: a function of inputs that were checked and
        need no gradient. After a first run, if all kernels are our own, it makes their calls and
        checks nothing any more; if some are torch's, it still checks for autocast."""
        direct = self.program.direct if self._capture_note else None
        if direct is None:
            return lambda *tensors: self.run_checked(tensors)
        if all(c.candidate.engine.startswith(OURS) for c in self.decision.choices):
            return direct
        autocasting = torch._C._is_any_autocast_enabled
        return lambda *tensors: self.run_checked(tensors) if autocasting() else direct(*tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._capture_note or torch.cuda.is_current_stream_capturing():
            return self.program.run(tensors)  # also as part of a graph that the caller captures
        if self.captured is None and not self.capture():
            return self.program.run(tensors)
        assert self.captured is not None
        return self.captured.run(tensors)

    def against(self, eager: torch.cuda.CUDAGraph) -> tuple[float, float]:
        """Time the captured plan against the module it was made of, captured as well. Returns the
        seconds of both, and keeps them for the explanation."""
        assert self.captured is not None
        runs = {"plan": self.captured.replay, "eager": eager.replay}
        samples = [{who: by_events(run) for who, run in runs.items()} for _ in range(RACES)]
        ours, theirs = (statistics.median(each[who] for each in samples[1:]) for who in runs)
        self._total_s, self._eager = ours, (theirs, "both as CUDA Graphs")
        return ours, theirs

    def against_calls(
        self, ours: Thunk, eager: Thunk, seconds: float
    ) -> tuple[float, float] | None:
        """The same on a CPU, for calls of the plan and of the module, timed by the clock for about
        ``seconds``. None if a run of the plan alone takes longer than that."""
        if sum(choice.best_s for choice in self.decision.choices) > seconds:
            self._eager = None, "a run takes too long to repeat it in this budget"
            return None
        # a contender that takes longer than its share is timed once, after a run to warm up
        racing, share = {"plan": ours, "eager": eager}, seconds / RACES
        times = interleaved(racing, self.device, rounds=2 * RACES, seconds=share, warm=WARM)
        self._total_s, self._eager = times["plan"], (times["eager"], "")
        return times["plan"], times["eager"]

    def capture(self) -> bool:
        """Capture the plan as one CUDA Graph now rather than at the first run."""
        with self._capture_lock:
            if self.captured is None and self._capture_note == "":
                try:
                    self.captured = CapturedProgram(self.program)
                except RuntimeError as error:
                    torch.cuda.synchronize()
                    self._capture_note = f"no: {str(error).splitlines()[0]}"
        return self.captured is not None

    def _why_not_captured(self) -> str:
        """Empty if the plan can be captured, else why not."""
        if self.device.type != "cuda":
            return "no: the plan runs on the CPU"
        wanted = self.decision.policy.cuda_graph
        if wanted is False:
            return "no: Policy(cuda_graph=False)"
        if not self.decision.choices:
            return "no: there is nothing to run"
        return "" if wanted else self._why_launching_is_quicker()

    def _why_launching_is_quicker(self) -> str:
        """Empty if a CUDA Graph saves more on launches than it costs in copies, else a reason."""
        launches = sum(region_cost(r).bytes > 0 for r in self.decision.regions)
        types = [*self.inputs.values(), *self.outputs.values()]
        copied = sum(2 * t.nbytes for t in types) / self.decision.target.stream
        if (launches - 1) * HOST_LAUNCH_S > len(types) * HOST_LAUNCH_S + copied:
            return ""
        sooner = f"its {launches} kernels are launched sooner than {len(types)} inputs and results"
        return f"no: {sooner} are copied; Policy(cuda_graph=True) insists"

    # ---- explaining

    def explain(
        self,
        format: str | None = None,
        *,
        target: str | Target | None = None,
        errors: bool = False,
        full: bool = False,
    ) -> Explanation | str:
        """What runs where, what it costs and why.

        Prints as text and shows itself in a notebook; ``format`` "text", "json" or "html"
        gives a string instead. The text is about 25 lines, and with ``full`` everything: each
        region, its alternatives, memory, passes. ``target`` plans the same graph for another
        machine, present or not ("h200", "a100", "cpu"). ``errors=True`` measures the error of every
        region against float64 first, on random data.
        """
        if format is not None:
            check_format(format)
        explanation = Explanation(self._report(target, errors), full)
        return explanation if format is None else explanation.render(format)

    def _repr_html_(self) -> str:
        return Explanation(self._report(None, errors=False))._repr_html_()

    def _report(self, target: str | Target | None, errors: bool) -> Report:
        other = self.decision.target if target is None else find_target(target)
        if other.name != self.decision.target.name:
            elsewhere = decide(self.decision.source, other, self.decision.policy)
            note = f"planned for {other.name} by estimate; nothing was run"
            return make_report(elsewhere, notes=(note,), eager=(None, "it is not here"))
        if errors:
            self.measure_errors()
        note = "yes" if self.captured is not None else self._capture_note or "at the first run"
        converted = tuple(
            f"{v}: its library answers in another memory order, so it is copied"
            for v in self.program.conversions
        )
        packed = sum(form.nbytes for form in {id(f): f for f in self.forms}.values())
        whole = self.program.memory.peak if self.program.takes else 0
        took = self._total_s, self._eager, packed, whole
        return make_report(self.decision, self.device, self.program.memory, note, converted, *took)

    def measure_errors(self) -> dict[str, float]:
        """Measure the error of every region against float64 on random data. Returns the errors by
        region name."""
        survey = Survey(self.decision.target, self.decision.policy)
        finder = Finder(survey, self.device, self._constants, Cache(Path()), 0.0)
        choices = []
        for choice in self.decision.choices:
            region = choice.region
            feed = finder.inputs(region)
            exact = evaluate(region.graph, feed, float64=True)
            plain = evaluate(region.graph, feed)
            given, ctx = [feed[v] for v in region.inputs], self._context_of(choice)
            _, outs, _ = finder._ready(region, choice.option, ctx, given)
            wanted = [exact[v] for v in region.outputs]
            both = (outs, [plain[v] for v in region.outputs])
            ours, theirs = (max(errors_of(region, o, wanted), default=0.0) for o in both)
            option = replace(choice.option, error=ours)
            choices.append(replace(choice, option=option, torch_error=theirs, reference="float64"))
        self.decision = replace(self.decision, choices=tuple(choices))
        return {c.region.name: c.option.error or 0.0 for c in choices}

    def note(self, text: str) -> None:
        """Put ``text`` before all other notes of the explanation."""
        if text not in self.decision.notes:
            self.decision = replace(self.decision, notes=(text, *self.decision.notes))

    def _context_of(self, choice: Choice) -> BuildContext:
        constants = {v: self._constants[v] for v in choice.region.constants}
        target, policy = self.decision.target, self.decision.policy
        return BuildContext(target, self.device, policy, constants, self._shared.forms)

    def measure(self, tensors: Sequence[torch.Tensor] | None = None, seconds: float = 1.0) -> float:
        """Seconds one run takes: by graph replay on a GPU, by the clock on a CPU."""
        if tensors is None:
            gen = torch.Generator(device=self.device).manual_seed(0)
            tensors = [random_tensor(t, self.device, gen, 2) for t in self.inputs.values()]
        given = list(tensors)
        self.binder.check(given)
        self.run_checked(list(given))
        if self.captured is not None:
            samples = sorted(by_events(self.captured.replay) for _ in range(20))
            self._total_s = samples[len(samples) // 2]
        else:
            racing = {"plan": lambda: self.run_checked(list(given))}
            self._total_s = interleaved(racing, self.device, seconds=seconds)["plan"]
        return self._total_s

    # ---- choosing another one

    def alternatives(self) -> tuple[Alternative, ...]:
        """Whole plans to choose from, the quickest first, combined from what the search measured:
        the quickest that is deterministic, say, or the most exact, each with its time, scratch
        memory and error. Empty if nothing was measured."""
        return wholes(self.decision.choices)

    @checked(name="Plan.pick")
    def pick(self, name: str) -> "Plan":
        """One of the plans that :meth:`alternatives` lists, ready to run: "deterministic", say.
        Nothing is measured for it."""
        whole = named(self.alternatives(), name)
        notes = (*self.decision.notes, f"picked from several: {', '.join(whole.names)}")
        decision = replace(self.decision, choices=whole.choices, notes=notes)
        return Plan(decision, self.device, *self._made)

    # ---- keeping

    @checked(name="Plan.save")
    def save(self, path: str | Path) -> Path:
        """Write the plan as readable JSON, and its weights beside it as safetensors."""
        return save_decision(self.decision, self.device, Path(path))

    @property
    def graph(self) -> Graph:
        """The graph after all passes."""
        return self.decision.graph

    def __repr__(self) -> str:
        d = self.decision
        size = f"{len(d.graph.nodes)} nodes in {len(d.choices)} regions"
        return f"<Plan {d.graph.name!r}: {size}, {d.mode}, on {self.device}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        remedy = f"plan.run({', '.join(f'{n}=…' for n in self.inputs)})"
        raise BindError("a plan is run by name", asked="plan(…)", remedy=remedy)


# ---- making a plan


def compile_graph(
    graph: Graph,
    *,
    device: str | torch.device | None = None,
    policy: Policy | None = None,
    into: Mapping[str, str] | None = None,
    verbose: bool = False,
    weights: Weights | None = None,
    dying: Collection[str] | None = None,
    **search: Any,
) -> Plan:
    """Decide and build: ``Graph.compile`` and ``optimize`` both call this. ``into``: outputs that
    take the memory of an input where a kernel can do that, and which; the input's values are lost
    then. ``verbose`` prints what is logged. ``weights``: weights that plans of one model share.
    ``dying``: inputs that nobody needs after a run; unless it is None, a run empties its list of
    inputs. ``search``: further arguments of :func:`decide`."""
    where = resolve_device(device)
    if policy is not None and not isinstance(policy, Policy):
        raise BindError(
            f"policy is {policy!r}, not a Policy", remedy="write dt.Policy(deterministic=True), say"
        )
    seconds = search.get("budget_s", 0.0)
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise BindError(
            f"budget_s is {seconds!r}, not a number of seconds", remedy="give seconds: 2.0, say"
        )
    on_stop = search.get("interrupt", RAISE)
    if on_stop not in (RAISE, RETURN):
        wrong = f"interrupt={on_stop!r} is not known"
        raise BindError(wrong, remedy=f"use {RAISE!r} or {RETURN!r}")
    with logged_to_console(verbose):
        search |= {"device": where, "weights": weights, "dying": dying or ()}
        decision = decide(graph, find_target(where), policy or Policy(), **search)
        begin = time.perf_counter()
        decision, late = _build_elsewhere(decision, where)
        plan = Plan(decision, where, into, weights, dying)
        if late and decision.mode == "found":
            took = time.perf_counter() - begin
            note = f"{late} kernels that were chosen came later: {took:.1f} s"
            plan.decision = replace(decision, notes=(note, *decision.notes))
            log.info("%s: %s", graph.name, note)
        log.info("%s: a plan of %d kernels is built", graph.name, len(decision.choices))
    return plan


def _without(choice: Choice, failure: EngineError) -> Choice:
    """Return the choice of the next best option that can be built, with ``failure`` in its note.
    Raises ``failure`` if no option is left."""
    options = tuple(
        replace(o, rejected=failure.wrong) if o.candidate == choice.candidate else o
        for o in choice.options
    )
    usable = [o for o in options if not o.rejected]
    if not usable:
        raise failure
    note = "; ".join(filter(None, (choice.note, failure.wrong)))
    return replace(choice, option=at_once(choice.region, usable), options=options, note=note)


def _build_elsewhere(decision: Decision, device: torch.device) -> tuple[Decision, int]:
    """Have builder processes build the kernels of a plan in parallel, if it has several. Returns
    the decision, with kernels replaced that do not fit on the GPU, and how many kernels had not
    been built before."""
    ours = [c for c in decision.choices if c.candidate.engine in BUILT]
    wanted = {(c.region.text, c.candidate): c.region for c in ours}
    if device.type != "cuda" or len(wanted) < SEVERAL or (pool := builders()) is None:
        return decision, 0
    for (_, candidate), region in wanted.items():
        pool.ask(region, candidate, decision.target, decision.policy, arch_of(device))
    late = sum(not pool.is_built(region, c) for (_, c), region in wanted.items())
    pool.wait(lambda: all(pool.is_built(region, c) for (_, c), region in wanted.items()), 60.0)
    choices = []
    for choice in decision.choices:
        if pool.has_failed(choice.region, choice.candidate):
            choice = _without(choice, EngineError(f"{choice.candidate} does not fit on this GPU"))
        choices.append(choice)
    return replace(decision, choices=tuple(choices)), late


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device with its index; the GPU if there is one and no device was named."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise BindError(f"{device!r} is not a device", remedy="use 'cpu' or 'cuda'") from None
    if where.type not in ("cpu", "cuda"):
        raise BindError(f"device {where} is not supported", remedy="use 'cpu' or 'cuda'")
    if where.type == "cpu":
        where = torch.device("cpu")  # tensors never say cpu:0
    if where.type == "cuda":
        if not torch.cuda.is_available():
            remedy = "device='cpu', or explain(target='h200') to plan without one"
            raise BindError("no CUDA device is present", asked=f"device={device!r}", remedy=remedy)
        index: int | None = where.index
        if index is not None and index >= (count := torch.cuda.device_count()):
            raise BindError(f"there is no device {where}", remedy=f"use one of {count}")
        where = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return where
