"""From a graph to decisions: passes, fusion, a choice for every region. Nothing is built yet,
so this works for a machine that is not here."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch

from deuteron.engines import Candidate
from deuteron.engines.roofline import region_bound
from deuteron.errors import EngineError
from deuteron.explain.units import size
from deuteron.files import VERSION
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.log import log
from deuteron.passes import Context, PassRecord, Veto, fuse, in_order, run_passes
from deuteron.passes.cleanup import dead_code
from deuteron.passes.in_place import Placed
from deuteron.passes.recompute import made_again
from deuteron.passes.split import Halves, Split
from deuteron.plan.builders import builders
from deuteron.plan.cache import Cache, installed
from deuteron.plan.cache_state import moved, room
from deuteron.plan.choose import Choice, Survey, choose, heuristic, unmatched
from deuteron.plan.find import Finder
from deuteron.plan.in_place import form_of, hoped, in_place, pass_record, timed, untouched
from deuteron.plan.merged_casts import together
from deuteron.plan.region_borders import chosen, unlikely
from deuteron.plan.schedule import scheduled, when_read
from deuteron.plan.search import RAISE, Progress, search
from deuteron.plan.search import begin as begin_to_build
from deuteron.plan.weights import Weights
from deuteron.policy import Policy
from deuteron.target import Target, cpu_identity

# How many candidates of regions are built while the form of the graph is still being decided:
# enough to keep the builders busy, and no more, since regions that come later may be worth more.
MEANWHILE = 16


@dataclass(frozen=True)
class Decision:
    """All that was decided about a graph, and why."""

    source: Graph  # as it came in
    graph: Graph  # after the passes
    target: Target
    policy: Policy
    choices: tuple[Choice, ...]
    vetoes: tuple[Veto, ...]
    passes: tuple[PassRecord, ...]
    mode: str
    seconds: float
    notes: tuple[str, ...] = ()
    placed: Placed | None = None  # where parts of concatenations lie; placed.graph is ``graph``

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(choice.region for choice in self.choices)


def decide(
    graph: Graph,
    target: Target,
    policy: Policy,
    *,
    find: bool = False,
    budget_s: float = 10.0,
    device: torch.device | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
    interrupt: str = RAISE,
    weights: Weights | None = None,
    prepared: bool = False,
    meanwhile: Callable[[], object] | None = None,
    dying: Collection[str] = (),
) -> Decision:
    """Run the passes, fuse, and choose for every region: by estimate, or by measurement.

    An error can only be promised after it was measured, so ``policy.max_error`` turns ``find`` on
    wherever there is a device to measure on. ``interrupt`` is what Ctrl-C does: "raise", or
    "return" a decision based on what was measured until then. ``weights`` are weights that plans of
    one model share. ``prepared``: the passes have already run, on a larger graph that this one is a
    part of. ``meanwhile`` is called once while kernels are built, before anything is measured.
    ``dying``: inputs that nobody needs after a run.
    """
    find = find or (policy.max_error is not None and device is not None)
    begin = time.perf_counter()
    survey = Survey(target, policy)
    guess, notes = heuristic(survey), list[str]()
    optimised, records = (graph, ()) if prepared else run_passes(graph, context(survey))
    optimised = in_order(optimised)
    if weights is not None:
        optimised = weights.planned(optimised, graph)
    plain = form = form_of(optimised, target, policy)
    missing = unmatched(optimised, policy)
    record = pass_record(plain.placed, 0.0)
    took = time.perf_counter() - begin
    log.info("%s: %d regions after %.2f s of passes", graph.name, len(plain.regions), took)
    if not find:
        form, record = timed(lambda: in_place(plain, guess, survey))
        choices = chosen(form.regions, form.others, guess, survey)
    else:
        assert device is not None
        opened = cache or Cache.open()
        log.info("%s: measuring for about %.1f s", graph.name, budget_s)
        pool = builders() if device.type == "cuda" else None
        held = constants_on(optimised, device)
        since = begin if pool is not None else time.perf_counter()
        given = survey, device, held, opened, budget_s, since, meanwhile
        finder = Finder(*given, pool=pool)
        if device.type == "cpu" and (beside := moved(plain.regions)) > room():
            finder.beside = beside
        wanted = set[tuple[str, Candidate]]()
        try:
            begin_to_build(untouched(plain), guess, finder, most=MEANWHILE)
            hope = in_place(plain, hoped(survey), survey)
            finder.unlikely = unlikely(hope.regions, hope.others, hoped(survey), survey)
            other = () if hope is plain else plain.all
            notes = search(hope.all, guess, finder, progress, interrupt, other)
            if hope is not plain:
                form, record = timed(lambda: in_place(plain, finder.pick, survey, like=hope))
            choices = chosen(form.regions, form.others, finder.pick, survey)
            wanted = {(c.region.text, c.candidate) for c in choices}
            notes.insert(0, finder.spent.told(time.perf_counter() - begin))
        finally:  # measurements are kept, whatever stops the search
            opened.save()
            if pool is not None:
                pool.forget(but=wanted)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # give back the memory that measuring used
        notes += [f"cache: {problem}" for problem in opened.problems]
    if policy.nan != "propagate":
        notes.append("nan ends at ReLU, clamp and max pooling: Policy(nan='drop')")
    notes += [f"Policy(engines=…): no node is, or comes from, {p!r}" for p in missing]
    choices = when_read(choices, form.graph, dying)
    if target.is_cuda:
        choices = together(choices, form.graph, dying, survey)
    choices = scheduled(choices, target)
    numbered = tuple(replace(c, region=c.region.named(f"r{i}")) for i, c in enumerate(choices))
    inside = {v for c in choices for n in c.region.nodes for v in n.outputs}
    inside -= {v for c in choices for v in c.region.outputs}
    # a veto about a value inside a region no longer holds: the regions on both sides were joined
    vetoes = tuple(veto for veto in form.vetoes if veto.value not in inside)
    made = (graph, form.graph, target, policy, numbered, vetoes, (*records, record))
    seconds, mode = time.perf_counter() - begin, "found" if find else "heuristic"
    for note in notes:
        log.info("%s: %s", graph.name, note)
    return Decision(*made, mode, seconds, tuple(notes), form.placed)


def halves(
    graph: Graph,
    first: Collection[str],
    later: Collection[str],
    target: Target,
    policy: Policy,
    written: Collection[str] = (),
) -> tuple[Halves, tuple[str, ...]]:
    """Run the passes over a whole training step and cut it in two. Returns the halves, and notes
    for the explanation. ``first``: names of the outputs that are computed before the inputs
    ``later`` are known; ``written``: inputs that the first half writes over."""
    ctx = context(Survey(target, policy))
    ctx.later = frozenset(later)
    optimised, _ = run_passes(graph, ctx)

    def seconds(node: Node) -> float:
        return region_bound(Region(split.graph.subgraph(node.op, [node])), target).seconds

    split, told, limit = Split(optimised, first, later), "", policy.memory_limit
    if target.is_cuda and (limit is None or split.halves().kept > limit):
        step = sum(region_bound(r, target).seconds for r in fuse(optimised, gates=True)[0])

        def moving(count: int, kernels: int) -> float:
            return count / target.stream + kernels * target.launch

        again = made_again(split, moving, step, written)
        if again.bytes:
            split = Split(again.graph, first, later, again.values)
            told = f" and makes {size(again.bytes)} again, in {again.seconds * 1e3:.2g} ms"
            told += f" of {step * 1e3:.3g} by estimate"
    cut = split.halves(limit, seconds)
    told = f"keeps {size(cut.kept)} for its gradient{told}"
    if limit is not None:
        curve = split.curve(seconds)
        points = dict.fromkeys(f"{size(least)} for {s * 1e3:.3g} ms more" for least, s in curve)
        told += f"; it could keep, by estimate, {', '.join(points)}"
    return cut, (told,)


def context(survey: Survey) -> Context:
    """The context of the passes, with which they can price a graph: by the engines' cheapest
    offers."""
    guess = heuristic(survey)

    def price(graph: Graph, most: float) -> float:
        """Seconds of a graph. Infinite if its roofline alone reaches ``most``, so that engines need
        not be asked, and if the policy lets no engine run some part of it."""
        regions, _ = fuse(dead_code(graph), gates=survey.target.is_cuda)
        if sum(region_bound(region, survey.target).seconds for region in regions) >= most:
            return math.inf
        try:
            return sum(c.best_s for region in regions for c in choose(region, guess, survey))
        except EngineError:
            return math.inf

    return Context(survey.target, survey.policy, price=price)


def constants_on(graph: Graph, device: torch.device, copy: bool = False) -> dict[str, torch.Tensor]:
    """The graph's constants on the device; rank-0 ones stay on the CPU, as literals. A plan asks
    for copies: changing a weight in place later must not change one half of the plan."""
    return {
        name: const.data if const.is_scalar else const.data.to(device, copy=copy)
        for name, const in graph.constants.items()
    }


def versions(device: torch.device | None) -> Mapping[str, str]:
    """Versions of Deuteron and of the libraries that belong on every record."""
    found = {"deuteron": VERSION, "torch": str(torch.__version__)}
    if device is not None and device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    compiler = "triton" if device is not None and device.type == "cuda" else "llvmlite"
    return found | {compiler: installed(compiler) or "not installed"}


def machine(device: torch.device) -> str:
    """The name of a device; for a CPU also its threads and architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    known = cpu_identity()
    return f"{known['threads']} threads, {known['machine']}, model {known['model']}"
