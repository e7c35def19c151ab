"""Choosing by measurement: candidates of a region are built, verified and timed in turns.

A region that the budget does not reach runs the candidate with the best prediction of those that
are built. Every result goes to the cache at once, so a search that was stopped goes on where it
was. search.py decides which regions are measured, and in which order.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from deuteron.codegen.calls import placed
from deuteron.engines import BuildContext, Candidate, build
from deuteron.engines.roofline import is_product
from deuteron.errors import EngineError
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops.collective import COLLECTIVES
from deuteron.plan.acceptance import LIBRARIES, Feed, verified
from deuteron.plan.builders import BUILT, Builders, arch_of
from deuteron.plan.cache import Cache
from deuteron.plan.cache_state import LEAVES, amid, moved
from deuteron.plan.choose import PATIENCE_S, Choice, Option, Survey, at_once
from deuteron.plan.learned import Learned, kind_of
from deuteron.plan.records import Measured, measured_in, rows_of
from deuteron.plan.sample_inputs import made_up
from deuteron.plan.search_clock import BUILDERS, MEASURING, SearchClock
from deuteron.plan.search_clock import LIBRARIES as SETTING_UP
from deuteron.plan.tensors import is_kept_between, poisoned, restrided, same_draws
from deuteron.plan.timing import timed

# The estimate's choice stays unless another takes less than this share of its time. The margin is
# twice the scatter of measurements.
MARGIN = {"cpu": 0.98, "cuda": 0.997}
FIRST = 2  # candidates that are tried whatever is predicted
FAR, FAR_PRODUCT = 3.0, 2.0  # candidates beyond this many times the first prediction are not tried
ALIKE = 1.5  # up to this many times the best prediction, one kernel of each kind is built first
FAR_LEARNED = 1.1  # as FAR, among kinds whose predictions were corrected by measurements
TIMING_S = {"cpu": 0.04, "cuda": 0.1}  # the most that timing one region's candidates may take
LONE_S = 0.01  # the same for a candidate that is alone
WAIT_S, SLOWER = 0.015, 1.2  # a candidate this slow to set up and predicted this much slower waits
START_S = 10.0  # the longest wait for builders to start
LEAST_S = 2.0  # seconds of the budget that are kept for measuring
SOON_S = 0.1  # the longest wait for the kernel of a part: other regions could be measured meanwhile
AHEAD = 16  # time is kept for at most this many regions that are still being built
RUNS = 4  # calls of a candidate that a measurement takes: verify, warm up, time
TOO_SLOW, NOT_REACHED = "too slow to build within the budget", "not reached within the budget"
HOPED = 1.3  # a candidate predicted this many times faster is taken although it was not measured
DARED = 3.5  # the same if only measurements may choose it: estimates are off, but by less than this
UNFIT = "cannot be compiled for this GPU, or needs more of its shared memory than there is"
IDLE, SET_ASIDE = "predicted slower, and slow to set up", "not built: others are predicted as good"


@dataclass
class Finder:
    """Picks by measurement."""

    survey: Survey
    device: torch.device
    constants: Mapping[str, torch.Tensor]
    cache: Cache
    budget_s: float
    begin: float = field(default_factory=time.perf_counter)
    meanwhile: Callable[[], object] | None = None  # called once, while builders begin to work
    waited_s: float = 0.0  # for builders
    measuring_s: float = 0.0
    waiting: int = 0  # regions that are still to be measured
    stopped: str = ""
    known: dict[str, Choice] = field(default_factory=dict)
    learned: Learned = field(default_factory=Learned)
    counts: Counter[str] = field(default_factory=Counter)  # measured and remembered
    left: dict[str, str] = field(default_factory=dict)  # regions not measured, by text, and why
    pool: Builders | None = None  # processes that build what this one then measures
    unlikely: frozenset[str] = frozenset()  # texts of regions that will probably be replaced
    second: bool = False  # whether this is a second round, in which nothing is too slow to set up
    few: dict[str, int] = field(default_factory=dict)  # candidates to build, where not FIRST
    firsts: dict[str, list[Candidate]] = field(default_factory=dict)  # the first of each region
    pending: list[tuple[Region, Option]] = field(default_factory=list)  # the last is set up first
    spent: SearchClock = field(default_factory=SearchClock)
    beside: int = 0  # bytes that all regions of the plan move; 0 if they fit into the caches

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.begin + self.budget_s - time.perf_counter()

    def order(self, region: Region, place: int) -> bool:
        """Order the ``place``-th candidate from the builders; returns whether there is one. Those
        predicted far slower than others do not count. If predictions are close, the best of each
        kind come first: the tiles of one kernel differ less."""
        if self.pool is None:
            return False
        ordered = self._in_order(region)[place : place + 1]
        for option in ordered:
            how = self.survey.target, self.survey.policy, arch_of(self.device)
            self.pool.ask(region, option.candidate, *how)
        return bool(ordered)

    def _in_order(self, region: Region) -> list[Option]:
        """Candidates for the builders, in the order in which they are to be built."""
        offered = (o for o in self.survey.ask(region)[0] if not o.rejected)
        usable = [o for o in offered if self._takes_s(o) <= PATIENCE_S]
        near = [o for o in usable if o.predicted_s <= FAR * usable[0].predicted_s]
        built = [o for o in near if o.candidate.engine in BUILT]
        most = ALIKE * min((o.predicted_s for o in built), default=0.0)
        kinds = {kind_of(region, o): o for o in reversed(built) if o.predicted_s <= most}
        return sorted(built, key=lambda o: o not in kinds.values())

    def first(self, region: Region) -> int:
        """How many candidates of a region are built before any is measured: two, but one if the
        second is the same kernel with other tiles, which is only built if time is left."""
        most, two = self.few.get(region.text, FIRST), self._in_order(region)[:2]
        return min(most, len({kind_of(region, o) for o in two}))

    def is_ready(self, region: Region) -> bool:
        """Whether the first candidate that was ordered of a region is built."""
        if self.pool is None:
            return True
        if region.text not in self.firsts:  # kept: this is called whenever something is built
            self.firsts[region.text] = [o.candidate for o in self._in_order(region)[:1]]
        return all(self.pool.is_built(region, c) for c in self.firsts[region.text])

    def has_time_for(self, others: int) -> bool:
        """Whether there is time to measure one region and then ``others`` more."""
        taken = self.measuring_s / max(self.counts["measured"], 1) or TIMING_S[self.device.type]
        return self.left_s > (1 + min(others, AHEAD)) * taken

    def is_built(self, region: Region) -> bool:
        """Whether all candidates that were ordered of a region are built."""
        options = self.survey.ask(region)[0] if self.pool is not None else ()
        return all(self.pool is None or self.pool.is_built(region, o.candidate) for o in options)

    def begin_to_build(self, regions: Sequence[Region]) -> None:
        """Called when all first candidates are ordered. Do ``meanwhile`` now, and note what takes
        libraries long to set up for a shape, which is done whenever this process waits."""
        if self.meanwhile is not None:
            self.meanwhile()
            self._leave_time()
        for region in reversed(regions if self.pool is not None else ()):
            for option in reversed(self.survey.ask(region)[0]):
                if _is_slow(option) and not option.rejected:
                    self.pending.append((region, option))

    def _set_up(self) -> bool:
        """Let a library set up one thing that takes it long, for a region that is still to be
        measured. Returns whether there was such a thing."""
        while self.pending:
            region, option = self.pending.pop()
            if region.text in self.known or self._is_idle(region, option):
                continue
            with suppress(Exception), self.spent.on(SETTING_UP):  # measuring it meets the error
                feed = self.inputs(region)
                args = [feed[v] for v in region.inputs]
                self._ready(region, option, self._context(region, feed), args)
            return True
        return False

    def wait(self, enough: Callable[[], bool], most: float | None = None) -> None:
        """Let builders work until ``enough()``, for at most ``most`` seconds, by default for
        half of the budget in all waits together. The first wait also lasts until they have
        started."""
        pool = self.pool
        if pool is None or enough():
            return
        if not pool.is_ready:
            with self.spent.on(BUILDERS):
                started = pool.wait(lambda: pool.is_ready, START_S)
            self.pool = pool if started else None  # None: this process builds
            self._leave_time()
        while not enough() and self.left_s > 0 and self._set_up():
            pass
        begin = time.perf_counter()
        most = self.budget_s / 2 - self.waited_s if most is None else most
        with self.spent.on(BUILDERS):
            pool.wait(enough, max(0.0, min(self.left_s, most)))
        self.waited_s += time.perf_counter() - begin

    def _leave_time(self) -> None:
        """Keep some of the budget for measuring, however long something else took."""
        least = time.perf_counter() + min(LEAST_S, self.budget_s / 2)
        self.begin = max(self.begin, least - self.budget_s)

    def pick(self, region: Region) -> Choice:
        """Choose for a region: by measurement if the budget allows, from memory if it was measured
        before, else by prediction, with what is known of its kind by now."""
        if region.text not in self.known:
            self.known[region.text] = self._pick(region)
        choice = replace(self.known[region.text], region=region)
        return self._priced(choice, why) if (why := self.left.get(region.text)) else choice

    def _priced(self, choice: Choice, why: str) -> Choice:
        """Return a choice that was not measured with a price corrected by measurements of its kind.
        The choice stays the same: else it would depend on what happened to be measured."""
        region, note = choice.region, self.learned.told(choice.region, choice.option)

        def priced(option: Option) -> Option:
            return replace(option, predicted_s=self.learned.expected(region, option, alike=True))

        options, note = tuple(map(priced, choice.options)), f"not measured: {why}{note}"
        return replace(choice, option=priced(choice.option), options=options, note=note)

    def _amid_others(self, region: Region, option: Option) -> float:
        """Seconds that an option is expected to take between regions that are native code: one that
        is called from Python then finds nothing of what it needs in a cache."""
        away = self.beside > 0 and not option.candidate.engine.startswith("cpu_")
        return self.learned.expected(region, option) + away * LEAVES * self.survey.target.call

    def _pick(self, region: Region) -> Choice:
        options, refusals = self.survey.ask(region)
        usable = [o for o in options if not o.rejected]
        there = [o for o in options if not self._state(region, o)]
        expected = partial(self._amid_others, region)
        there.sort(key=expected)
        elsewhere = BUILT if self.pool is not None else ()
        base = Choice(region, at_once(region, there or options, elsewhere), options, refusals)
        if not COLLECTIVES.isdisjoint(region.ops):
            return replace(base, note="not measured: other ranks would have to take part")
        remembered = self._remembered(region, options)
        if remembered is not None:
            self.counts["remembered"] += 1
            for option in remembered.options:
                self.learned.add(region, option)
            return self._decide(base, remembered)
        known = (o for o in there if not o.rejected and self.learned.of(region, o))
        hope = at_once(region, options, elsewhere)
        far = (o for o in usable if o.candidate.engine in elsewhere)
        dared = (o for o in far if expected(o) * DARED < expected(hope))
        dared = (o for o in dared if self._state(region, o) != UNFIT)
        hope = min((hope, *known, *dared), key=expected)
        if expected(hope) * HOPED < expected(base.option):
            base = replace(base, option=hope)  # it is built, or will be
        times = [expected(o) for o in usable]
        runs = sum(min(seconds, 3 * min(times)) for seconds in times) * RUNS
        if self.stopped or self.left_s <= 2 * runs:
            why = "the search was stopped" if self.stopped else "the budget does not allow it"
            self.left[region.text] = why
            return base
        try:
            for place in range(self.first(region)):  # parts of a cut region were not ordered yet
                self.order(region, place)
            self.wait(lambda: self.is_ready(region), SOON_S)  # what is late races later
            begin = time.perf_counter()
            measured = self._measure(region, usable)
            self.measuring_s += time.perf_counter() - begin
        except Exception as error:  # the reference itself cannot run on made-up inputs
            return _fall_back(base, f"not measured: {_short(error)}")
        self.counts["measured"] += 1
        self._remember(region, measured)
        return self._decide(base, measured)

    def again(self, region: Region, *waiting: str) -> None:
        """Let candidates that were rejected for one of the reasons ``waiting``, and are built by
        now, race against the best. The earlier choice stays if that fails."""
        before = self.known[region.text]
        if self.stopped or self.left_s <= 0:
            return
        try:
            self.wait(lambda: self.is_built(region))
            aside = [o for o in before.options if o.rejected in waiting]
            aside = [replace(o, rejected="") for o in aside if not self._state(region, o)]
            plain = [o for o in before.options if o.candidate.engine == "torch" and not o.rejected]
            racing = {o.candidate: o for o in (before.option, *aside, *plain)}
            if not aside:
                return
            self.second = True
            found = self._measure(region, list(racing.values()))
        except Exception:
            return
        finally:
            self.second = False
        now = {o.candidate: o for o in found.options}
        found = found._replace(options=[now.get(o.candidate, o) for o in before.options])
        self._remember(region, found)
        self.known[region.text] = self._decide(before, found)

    def _state(self, region: Region, option: Option) -> str:
        """Why a candidate cannot be measured now, or ""."""
        if self.pool is None or option.candidate.engine not in BUILT:
            return ""
        if not self.pool.is_asked(region, option.candidate):
            return SET_ASIDE
        if self.pool.has_failed(region, option.candidate):
            return UNFIT
        return "" if self.pool.is_built(region, option.candidate) else NOT_REACHED

    # ---- measuring

    def _measure(self, region: Region, options: list[Option]) -> Measured:
        with self.spent.on(MEASURING):
            return self._race(region, list(options), self.left_s)

    def _race(self, region: Region, options: list[Option], left: float) -> Measured:
        patience = max(0.3, left / 4)
        hopeless = self._hopeless(region, [o for o in options if self._takes_s(o) <= patience])
        feed = self.inputs(region)
        ctx, args = self._context(region, feed), [feed[v] for v in region.inputs]
        # all write to the same place when timed: addresses make a per cent of a GPU's memory speed
        room = [poisoned(region.graph.types[v], self.device) for v in region.outputs]
        thunks: dict[int, Callable[[], object]] = {}
        results: dict[int, list[torch.Tensor]] = {}
        done: dict[int, Option] = {}
        for i, option in enumerate(options):
            ours = option.candidate.engine == "torch"  # the reference for the others
            rejected = ""
            if self._takes_s(option) > patience:
                rejected = TOO_SLOW
            elif results and not ours and self.left_s < 0:
                rejected = NOT_REACHED
            elif i >= FIRST and not ours and option.candidate in hopeless:
                rejected = "predicted far slower"
            elif results and self._is_idle(region, option):
                rejected = IDLE
            elif missing := self._state(region, option):
                rejected = missing
            else:
                try:
                    with self.spent.on(SETTING_UP if _is_slow(option) else MEASURING):
                        thunk, outs, workspace = self._ready(region, option, ctx, args, room)
                    option = options[i] = replace(option, workspace=workspace)
                    if workspace > self.survey.policy.workspace_limit:
                        rejected = f"needs {workspace} bytes of workspace"
                except Exception as error:
                    rejected = f"failed: {_short(error)}"
            if rejected:
                done[i] = replace(option, rejected=rejected)
            else:
                thunks[i], results[i] = thunk, outs
        errors, wrong, torch_error, reference = verified(
            region, feed, results, options, self.device, self.survey.policy
        )
        for i, reason in wrong.items():
            done[i] = replace(options[i], error=errors[i], rejected=reason)
            del thunks[i]
        seconds = min(TIMING_S[self.device.type], max(0.02, left / max(16, self.waiting)))
        seconds = seconds if len(thunks) > 1 else LONE_S
        others, before = self._others(region), None
        if others and thunks:
            near = (feed[v] for v in region.inputs if v not in region.constants)
            before = amid(others, [*room, *near])
        for i, found in timed(thunks, self.device, seconds, before).items():
            if isinstance(found, float):
                done[i] = replace(options[i], measured_s=found, error=errors[i])
                self.learned.add(region, done[i])
            else:
                done[i] = replace(options[i], error=errors[i], rejected=f"failed: {_short(found)}")
        return Measured([done[i] for i in sorted(done)], torch_error, reference)

    def _context(self, region: Region, feed: Feed) -> BuildContext:
        constants = {v: feed[v] for v in region.constants}
        return BuildContext(self.survey.target, self.device, self.survey.policy, constants)

    def _others(self, region: Region) -> int:
        """Bytes that other regions move between two runs of this one, on a CPU whose caches cannot
        hold them; else 0."""
        return max(0, self.beside - moved([region]))

    def _is_idle(self, region: Region, option: Option) -> bool:
        """Whether to leave out a candidate that a library takes long to set up, because by all that
        is known there is a better one. That goes for torch's too, which else is always measured."""
        if self.device.type != "cuda" or self.second or not _is_slow(option):
            return False
        usable = (o for o in self.survey.ask(region)[0] if not o.rejected)
        best = min(self.learned.expected(region, o) for o in usable)
        return self.learned.expected(region, option) > SLOWER * best

    def _takes_s(self, option: Option) -> float:
        """Seconds that this process would take to build a candidate."""
        elsewhere = self.pool is not None and option.candidate.engine in BUILT
        return 0.0 if elsewhere else option.candidate.build_s

    def _hopeless(self, region: Region, options: list[Option]) -> set[Candidate]:
        """Candidates that are not worth building: predicted far slower than the first. Among kinds
        whose predictions have been corrected by measurements, less is far enough."""
        learned = [o for o in options if self.learned.of(region, o)]
        best = min((self.learned.expected(region, o) for o in learned), default=math.inf)
        far = FAR_PRODUCT if is_product(region.nodes) else FAR
        beyond = far * next((o.predicted_s for o in options), math.inf)
        return {o.candidate for o in options if o.predicted_s > beyond} | {
            o.candidate for o in learned if self.learned.expected(region, o) > FAR_LEARNED * best
        }

    def _ready(
        self,
        region: Region,
        option: Option,
        ctx: BuildContext,
        args: list[torch.Tensor],
        room: list[torch.Tensor] | None = None,
    ) -> tuple[Callable[[], object], list[torch.Tensor], int]:
        """Build an option and run it once. Returns what to time, the results of that run, and its
        workspace. A kernel that writes where it is told writes to ``room`` when timed."""
        kernel = build(region, option.candidate, ctx)
        before = _versions(args)
        types = [region.graph.types[v] for v in region.outputs]
        if kernel.writes:
            outs = [poisoned(t, self.device) for t in types]
            with same_draws():
                kernel.fill(args, outs)
            _check_unwritten(before, args)
            if not all(map(is_kept_between, outs, types)):
                raise EngineError("wrote beside the part of a buffer that is its result")
            if kernel.calls and self._others(region):  # a plan makes these calls without Python
                return placed(kernel.calls, (*args, *(room or outs))), outs, kernel.workspace
            return (lambda: kernel.fill(args, room or outs)), outs, kernel.workspace
        with same_draws():
            result = kernel.fn(*args)
        _check_unwritten(before, args)
        outs = list(result) if isinstance(result, tuple) else [result]
        for out, type_ in zip(outs, types, strict=True):
            if tuple(out.shape) != type_.shape or out.dtype != type_.dtype.torch:
                raise EngineError(f"returned {TensorType.from_tensor(out)}, not {type_}")
            if out.device != self.device:
                raise EngineError(f"returned a result on {out.device}, not on {self.device}")
        both = enumerate(zip(outs, types, strict=True))
        fixed = [i for i, (o, t) in both if not same_strides(t.shape, o.stride(), t.strides)]
        if not fixed:
            return (lambda: kernel.fn(*args)), outs, kernel.workspace

        def with_copies() -> None:  # the plan would convert, so the time of that counts
            again = kernel.fn(*args)
            for i in fixed:
                restrided(again[i] if isinstance(again, tuple) else again, types[i])

        return with_copies, outs, kernel.workspace

    def inputs(self, region: Region) -> dict[str, torch.Tensor]:
        """Random inputs of the right types; constants are the real ones."""
        return made_up(region, self.constants, self.device)

    # ---- deciding and remembering

    def _decide(self, base: Choice, found: Measured) -> Choice:
        measured, torch_error, reference = found
        raced = [o for o in measured if o.measured_s is not None and not o.rejected]
        if not raced:
            limit = self.survey.policy.max_error
            if limit is not None and any("max_error" in o.rejected for o in measured):
                least = min((o.error for o in measured if o.error is not None), default=math.inf)
                wrong = f"no candidate keeps max_error {limit:.1e}; the best reaches {least:.1e}"
                remedy = "raise Policy(max_error=…) or compute this part in a wider type"
                raise EngineError(wrong, where=base.region.text, remedy=remedy)
            kept = replace(base, options=tuple(measured) or base.options)
            return _fall_back(kept, "no candidate passed; torch's own operators run it")
        first = raced[0]  # options are sorted by estimate: this is the heuristic's choice
        best = min(raced, key=lambda o: o.best_s)
        keep = best.best_s >= first.best_s * MARGIN[self.device.type]
        made = replace(base, option=first if keep else best, options=tuple(measured))
        # NOT_REACHED could not race; SET_ASIDE was predicted no better than what was to be built
        others = all(o.candidate.engine not in BUILT for o in raced)
        reasons = (NOT_REACHED, SET_ASIDE) if others else (NOT_REACHED,)
        late = [o for o in measured if o.rejected in reasons]
        sure = {o: HOPED if o.candidate.by_estimate else DARED for o in late}
        late = [o for o in late if o.predicted_s * sure[o] < made.best_s]
        if hope := min(late, key=lambda o: o.predicted_s, default=None):
            note = "not measured within the budget, but predicted much faster than what was"
            made = replace(made, option=replace(hope, rejected=""), note=note)
        return replace(made, torch_error=torch_error, reference=reference)

    def _key(self, region: Region) -> str:
        return f"{region.key} amid others" if self._others(region) else region.key

    def _remember(self, region: Region, found: Measured) -> None:
        rows = rows_of(found, but=(TOO_SLOW, NOT_REACHED))
        self.cache.put(self._key(region), region.text, self.device, self.survey.policy, rows)

    def _remembered(self, region: Region, options: tuple[Option, ...]) -> Measured | None:
        rows = self.cache.get(self._key(region), self.device, self.survey.policy)
        return None if rows is None else measured_in(rows, options)


def _is_slow(option: Option) -> bool:
    """Whether a library takes long to set the option up for a shape."""
    return option.candidate.engine in LIBRARIES and option.candidate.build_s >= WAIT_S


def _fall_back(choice: Choice, note: str) -> Choice:
    """The choice with torch's own operators, which are the reference and cannot be wrong."""
    plain = next((o for o in choice.options if o.candidate.engine == "torch"), None)
    option = choice.option if plain is None else replace(plain, measured_s=None)
    return replace(choice, option=option, note=note)


def _versions(args: list[torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in args]


def _check_unwritten(before: list[int], args: list[torch.Tensor]) -> None:
    if _versions(args) != before:
        raise EngineError("wrote to its inputs")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]
