"""The order of a search: equal regions are measured once, those that may gain most come first, and
this process does not wait for compilers.

Builders compile the first candidates of all regions. Meanwhile this process measures regions that
need no building, then whatever is built, as long as enough time remains for regions that are worth
more and still being built. The rest of the budget goes to the heaviest regions: more of their
candidates are built and race against the best so far.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deuteron.engines.roofline import is_product
from deuteron.ir.region import Region
from deuteron.log import log
from deuteron.plan.builders import BUILT
from deuteron.plan.choose import OWN, Choice, Pick, choose, each_product, heaviest, is_one
from deuteron.plan.find import FIRST, IDLE, NOT_REACHED, SET_ASIDE, Finder
from deuteron.plan.in_place import hoped

Progress = Callable[[str, int, int], None]
WORTH = 0.01  # more candidates are tried of regions with at least this share of all time
RAISE, RETURN = "raise", "return"  # what Ctrl-C does to a search
SMALL = 0.003  # of regions below this share, only one candidate is built to begin with
UNSURE = 0.1  # share of a region's time that measuring it may save, whatever is predicted
UNLIKELY = 0.01  # factor on the worth of a region that will probably be replaced
MOST = 6  # at most this many candidates of a region are built


def search(
    regions: Sequence[Region],
    guess: Pick,
    finder: Finder,
    progress: Progress | None,
    interrupt: str = RAISE,
    others: Sequence[Region] = (),
) -> list[str]:
    """Measure while the budget lasts. Returns notes for the explanation. Ctrl-C ends the search;
    with ``interrupt="return"`` choices for what was not measured are then made by prediction.
    ``others``: regions that might run instead of some of ``regions``; they are measured last."""
    try:
        with _heard():
            _measured(regions, others, guess, finder, progress)
    except KeyboardInterrupt:
        if interrupt == RAISE:
            raise
        finder.stopped = "stopped by the user; what was measured so far is kept"
        finder.known = {k: c for k, c in finder.known.items() if c.option.measured_s is not None}
        for region in (*regions, *others):
            choose(region, finder.pick, finder.survey)
    return _notes(finder)


class _Heard(threading.local):
    """Whether Ctrl-C was pressed while this thread searches."""

    pressed = False

    def check(self) -> None:
        if self.pressed:
            raise KeyboardInterrupt


_stop = _Heard()


@contextmanager
def _heard() -> Iterator[None]:
    """Inside this context Ctrl-C is also recorded in ``_stop``, since Python drops the exception if
    it comes in the middle of a destructor."""
    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def handler(number: int, frame: Any) -> None:
        _stop.pressed = True
        usual(number, frame)

    _stop.pressed = False
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _measured(
    regions: Sequence[Region],
    others: Sequence[Region],
    guess: Pick,
    finder: Finder,
    progress: Progress | None,
) -> None:
    first = {region.text for region in regions}
    others = [region for region in others if region.text not in first]
    asked = begin(regions, guess, finder, others)
    order = list(asked)
    finder.begin_to_build([region for regions in asked.values() for region in regions])
    left = list(order)

    def ready() -> str | None:
        """The region worth most among those that are built, if enough time would be left for those
        that are worth more; else None."""
        for better, text in enumerate(left):
            if all(map(finder.is_ready, asked[text])):
                return text if finder.has_time_for(better) else None
        return None

    while left:
        finder.waiting = len(left)
        finder.wait(lambda: ready() is not None, finder.left_s)
        _stop.check()
        text = ready() or left[0]
        left.remove(text)
        choose(asked[text][0], finder.pick, finder.survey)
        if progress is not None:
            progress("measuring regions", len(order) - len(left), len(order))
        log.debug("region %d of %d: %s", len(order) - len(left), len(order), asked[text][0].ops)
    _more((*regions, *others), finder)


def _seconds(region: Region, pick: Pick, finder: Finder) -> float:
    """Seconds of a region by what ``pick`` chooses; of one that was joined from several regions,
    the seconds of its parts."""
    parts = each_product(region) if is_one(region) else []
    return sum(c.best_s for r in parts or [region] for c in choose(r, pick, finder.survey))


def begin(
    regions: Sequence[Region],
    guess: Pick,
    finder: Finder,
    others: Sequence[Region] = (),
    most: int | None = None,
) -> dict[str, list[Region]]:
    """Order candidates of ``regions`` from the builders, then those of ``others``; if ``most`` is
    given, only that many, those that are worth most. Returns what is to be measured: for the text
    of each region the region and parts of it, with the regions that are worth most first."""
    first, every = {region.text for region in regions}, (*regions, *others)
    weight, worth, built = _worths(every, guess, finder)
    key = {text: (text not in first, -worth[text], -weight[text]) for text in worth}
    ordered = sorted({r.text: r for r in every}.values(), key=lambda region: key[region.text])
    asked = {region.text: _asked(region, guess, finder) for region in ordered}
    least = SMALL * sum(weight.values())
    finder.few |= {text: 1 for text in asked if weight[text] < least}
    for parts in asked.values():
        finder.few |= {t: n for t, n in _beside(parts, finder).items() if t not in asked}
    places = [(built[text, place], text, place) for text in asked for place in range(FIRST)]
    places.sort(key=lambda p: (p[1] not in first, -p[0]))
    for _, text, place in places[:most]:
        for region in asked[text]:
            if place < finder.first(region):
                finder.order(region, place)
    return asked


def _worths(
    regions: Sequence[Region], guess: Pick, finder: Finder
) -> tuple[dict[str, float], dict[str, float], dict[tuple[str, int], float]]:
    """Return three dictionaries of seconds. ``weight``: what all regions of this text take
    together. ``worth``: what measuring them may save, which is the time of what would run
    unmeasured minus the quickest prediction, plus a share (``UNSURE``), since predictions are off;
    0 where there is nothing to choose between. ``built``, by text and number of the candidate: what
    building it may save. For the first candidate that is how much longer the quickest option takes
    that need not be built, plus that share; for the second the share alone."""
    count, survey = Counter(region.text for region in regions), finder.survey
    weight, worth, built = dict[str, float](), dict[str, float](), dict[tuple[str, int], float]()
    for region in {r.text: r for r in regions}.values():
        n, text = count[region.text], region.text
        weight[text] = n * _seconds(region, guess, finder)
        best = choose(region, hoped(survey), survey)
        least = n * sum(c.best_s for c in best)
        offered = [o for o in survey.ask(region)[0] if not o.rejected]
        there = (n * o.predicted_s for o in offered if o.candidate.engine not in BUILT)
        open_ = any(sum(not o.rejected for o in survey.ask(c.region)[0]) > 1 for c in best)
        likely = UNLIKELY if text in finder.unlikely else 1.0
        saved = likely * (max(0.0, weight[text] - least) + UNSURE * weight[text])
        worth[text] = saved if open_ or len(best) > 1 else 0.0
        built[text, 1] = likely * UNSURE * least
        built[text, 0] = likely * max(0.0, min(there, default=least) - least) + built[text, 1]
    return weight, worth, built


def _asked(region: Region, guess: Pick, finder: Finder) -> list[Region]:
    """The region, and the parts of it that :func:`choose` may cut it into: they are measured
    too."""
    found: dict[str, Region] = {}

    def pick(region: Region) -> Choice:
        found[region.text] = region
        return guess(region)

    choose(region, pick, finder.survey)
    return list(found.values())


def _beside(asked: Sequence[Region], finder: Finder) -> dict[str, int]:
    """By text, how many candidates to build for the parts of a region that our kernels run whole.
    These parts are measured because a library may multiply faster. Our own kernels gain nothing by
    being cut, as they run the epilogue at no extra cost, unless that has a norm, whose statistics
    do cost time."""
    whole, *parts = asked
    ours = any(o.candidate.engine in OWN for o in finder.survey.ask(whole)[0] if not o.rejected)
    least = 0 if heaviest(whole.nodes[1:]) is None else 1
    return {p.text: least if is_product(p.nodes) else 1 for p in parts} if ours else {}


def _more(regions: Sequence[Region], finder: Finder) -> None:
    """Try candidates that were built too late, then more candidates of the regions that take
    longest."""
    late = (c for c in finder.known.values() if any(o.rejected == NOT_REACHED for o in c.options))
    for choice in sorted(late, key=lambda choice: -choice.best_s):
        _stop.check()
        finder.again(choice.region, NOT_REACHED)
    took: dict[str, float] = {}
    sample: dict[str, Region] = {}
    for region in regions:
        for choice in choose(region, finder.pick, finder.survey):
            sample[choice.region.text] = choice.region
            took[choice.region.text] = took.get(choice.region.text, 0.0) + choice.best_s
    least = WORTH * sum(took.values())
    heavy = sorted((t for t in took if took[t] >= least), key=lambda t: -took[t])
    for place in range(MOST):
        going_on = not finder.stopped and finder.left_s > 0
        for text in [t for t in heavy if going_on and finder.order(sample[t], place)]:
            _stop.check()
            finder.again(sample[text], SET_ASIDE, NOT_REACHED)
    for text in heavy:  # last, candidates that libraries take long to set up
        _stop.check()
        finder.again(sample[text], IDLE)
    _stop.check()


def _notes(finder: Finder) -> list[str]:
    notes, counts, left = [], finder.counts, len(finder.left)
    if finder.stopped:
        notes.append(f"{finder.stopped}; {left} regions or parts were not measured")
    elif left:
        notes.append(
            f"{left} regions or parts were not measured: the budget of "
            f"{finder.budget_s:g} s does not allow it; another search goes on, or raise budget_s"
        )
    guessed = [finder.known[text] for text in finder.left]
    if n := sum(bool(finder.learned.told(c.region, c.option)) for c in guessed):
        notes.append(f"estimates of {n} of these are put right by what was measured of their kinds")
    notes.append(f"regions measured: {counts['measured']}, remembered: {counts['remembered']}")
    return notes
