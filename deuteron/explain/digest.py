"""What is worth saying about a report: equal regions folded, vetoes and refusals added up by
reason, the facts of the header and a summary. ``text.py`` and ``html.py`` lay it out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deuteron.errors import DeuteronError
from deuteron.explain import units as u
from deuteron.explain.report import OptionReport, RegionReport, Report, VetoReport

LONG, SHOWN = 60, 40  # a plan of more than LONG rows shows the SHOWN most expensive
DETAILED = 5  # regions whose alternatives are listed

# What a user can do about a veto: part of the reason given in passes/fusion_rules.py → advice.
REMEDIES = {
    "is an output of the graph": "do not return this value if nobody needs it",
    "so it is written anyway": "let one operator read it, or compute it again for the other",
    "that the product is tiled over": "reshape or broadcast after the elementwise work, not before",
    "moves elements out of the tile": "move (transpose, slice) after the elementwise work",
    "moves elements before the reduction": "reduce over the original axes, then move",
    "a second reduction needs the first": "use one operator for both (softmax, layer_norm, …)",
    "an opaque operator runs alone": "write it with known operators, or define it as one",
}
# the same for a veto about to_layout
CONVERSION = "at the edge of the graph, hand over and take channels_last tensors"

# A remedy that a user can follow without changing what is computed: install, allow, or cast.
ACTIONABLE = re.compile(r"install |Policy\(|^cast to|^use (f16|bfloat16|float)")


class Row(NamedTuple):
    """A region, or several for which the same is shown. ``seconds`` is the sum over all of them."""

    regions: tuple[RegionReport, ...]
    cells: tuple[str, ...]
    seconds: float

    @property
    def first(self) -> RegionReport:
        return self.regions[0]

    def label(self, width: int = 40) -> str:
        """The name of the first and, of several, their number."""
        tail = f" ×{len(self.regions)}" if len(self.regions) > 1 else ""
        return u.shorten(self.first.name, width - len(tail)) + tail

    @property
    def source(self) -> str:
        names = list(dict.fromkeys(u.clean(r.source) for r in self.regions if r.source))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return u.shorten(names[0], 40) + more if names else ""


def fold(report: Report) -> list[Row]:
    """The regions in plan order; those that look alike stand where the first of them does."""
    groups: dict[tuple[Any, ...], list[RegionReport]] = {}
    for r in report.regions:
        cells = tuple(column.show(r) for column in u.COLUMNS)
        groups.setdefault((cells, r.ops, r.shape, u.engine(r), r.note), []).append(r)
    alike = [(cells, tuple(same)) for (cells, *_), same in groups.items()]
    return [Row(same, cells, u.total(r.best_s for r in same)) for cells, same in alike]


def checked(limit: int) -> int:
    """A number of rows that can be shown."""
    if limit < 0:
        raise DeuteronError(f"limit={limit} is negative", remedy="give a number of rows, or None")
    return limit


def expensive(rows: Sequence[Row], limit: int | None) -> tuple[list[Row], list[Row]]:
    """The rows to show, in plan order, and those left out. None: all, unless they are many."""
    limit = (len(rows) if len(rows) <= LONG else SHOWN) if limit is None else checked(limit)
    kept = set(sorted(range(len(rows)), key=lambda i: -rows[i].seconds)[:limit])
    return [rows[i] for i in sorted(kept)], [row for i, row in enumerate(rows) if i not in kept]


class Kind(NamedTuple):
    """Regions of the same operators that the same engine runs. ``seconds`` is the sum over them."""

    regions: tuple[RegionReport, ...]
    seconds: float

    @property
    def first(self) -> RegionReport:
        return max(self.regions, key=lambda r: u.total([r.best_s]))

    @property
    def reached(self) -> float | None:
        """The part of the roofline that they reach together, where all of them have one."""
        roof = u.total(r.roofline_s for r in self.regions)
        bounded = all(u.known(r.fraction) for r in self.regions)
        return roof / self.seconds if bounded and self.seconds else None

    @property
    def shapes(self) -> str:
        """The type of the costliest one's first output, and how many others there are."""
        others = len({r.shape for r in self.regions}) - 1
        return u.clean(self.first.shape) + (f" and {others} more" if others else "")


def kinds(report: Report) -> list[Kind]:
    """What runs, the costliest first; what takes no time is left out."""
    groups: dict[tuple[Any, ...], list[RegionReport]] = {}
    for r in report.regions:
        groups.setdefault((r.ops, u.engine(r)), []).append(r)
    found = [Kind(tuple(same), u.total(r.best_s for r in same)) for same in groups.values()]
    return sorted((k for k in found if k.seconds > 0), key=lambda k: -k.seconds)


class RegionTable(NamedTuple):
    """What the table of regions shows: rows, columns of :data:`units.COLUMNS`, the time of all
    regions, and a sentence on what was left out."""

    shown: list[Row]
    columns: list[int]
    seconds: float
    left: str


def regions(report: Report, limit: int | None) -> RegionTable | None:
    """None for a plan that has no regions."""
    rows = fold(report)
    whole = u.total(row.seconds for row in rows) or float("nan")
    shown, left = expensive(rows, limit)
    known = [any(row.cells[i] != u.MISSING for row in shown) for i in range(len(u.COLUMNS))]
    used = [i for i, c in enumerate(u.COLUMNS) if not c.optional or known[i]]
    n, part = sum(len(row.regions) for row in left), u.total(row.seconds for row in left)
    out = f"{u.count(len(left), 'row')} left out: {u.count(n, 'region')}"
    said = f"{out}, {u.percent(part / whole)} of the time (limit={len(rows)} shows all)"
    return RegionTable(shown, used, whole, said if left else "") if rows else None


@dataclass(frozen=True)
class Tally:
    """Vetoes or refusals that give the same reason, added up; or a single one of them."""

    reason: str
    remedy: str
    bytes: float
    seconds: float
    examples: tuple[str, ...]
    count: int = 1


def _added_up(items: Iterable[Tally]) -> list[Tally]:
    """By reason, the costliest first."""
    groups: dict[tuple[str, str], list[Tally]] = {}
    for item in items:
        groups.setdefault((u.mask(item.reason), item.remedy), []).append(item)
    tallies = []
    for (masked, remedy), same in groups.items():
        said = {u.clean(item.reason) for item in same}
        reason = (said.pop() if len(said) == 1 else masked) or "no reason given"
        moved, cost = u.total(t.bytes for t in same), u.total(t.seconds for t in same)
        examples = tuple(dict.fromkeys(e for t in same for e in t.examples))
        tallies.append(Tally(reason, u.clean(remedy), moved, cost, examples, len(same)))
    return sorted(tallies, key=lambda t: (-t.seconds, -t.bytes, -t.count))


def _veto(v: VetoReport) -> Tally:
    advice = next((advice for part, advice in REMEDIES.items() if part in v.reason), "")
    if v.consumer.startswith("to_layout") or v.producer.startswith("to_layout"):
        advice = CONVERSION
    example = u.clean(f"%{v.value}: {v.producer} → {v.consumer}")
    return Tally(v.reason, advice, v.bytes, v.seconds, (example,))


def _by_cost(report: Report) -> list[VetoReport]:
    return sorted(report.vetoes, key=lambda v: -u.total([v.seconds]))


def vetoes(report: Report) -> list[Tally]:
    """What did not fuse, by reason."""
    return _added_up(map(_veto, _by_cost(report)))


def avoidable(report: Report) -> list[Tally]:
    """Values that did not fuse, but could if the user changed something: those with a remedy, each
    once, the costliest first."""
    found = {v.value: item for v in reversed(_by_cost(report)) if (item := _veto(v)).remedy}
    costly = [item for item in found.values() if u.total([item.seconds]) > 0]
    return sorted(costly, key=lambda t: -t.seconds)


def refusals(report: Report) -> dict[str, list[Tally]]:
    """Engine → why it refused, and for how many regions (their time as the cost)."""
    found: dict[str, list[Tally]] = {}
    for region in report.regions:
        for r in region.refusals:
            item = Tally(r.reason, r.remedy, 0, region.best_s, (u.shorten(region.name, 24),))
            found.setdefault(u.clean(r.engine) or u.MISSING, []).append(item)
    return {name: _added_up(items) for name, items in found.items()}


def to_act_on(report: Report) -> list[tuple[str, Tally]]:
    """Refusals that end when something is installed, allowed or cast, with the engine's name."""
    every = ((by, t) for by, found in refusals(report).items() for t in found)
    found = [(by, t) for by, t in every if ACTIONABLE.search(t.remedy)]
    return sorted(found, key=lambda pair: -pair[1].seconds)


class Option(NamedTuple):
    """A way to run a region: its time, the scratch memory that it needs, its error, how many times
    slower than the chosen one it is, and why it was out of the race."""

    candidate: str
    time: str
    workspace: str
    error: str
    slower: str
    verdict: str = ""


OPTION = ("candidate", "time", "workspace", "error", "against")  # above the columns of a table


def _timed(measured: float | None, predicted: float | None) -> tuple[float | None, str]:
    """The time that counts (measured, else predicted), as a number and as text."""
    time, kind = (measured, "measured") if u.known(measured) else (predicted, "predicted")
    return time, f"{u.seconds(time)} {kind}"


def _needs(workspace: int, error: float | None) -> tuple[str, str]:
    """Scratch memory and error as text; an error is known once it was measured."""
    wrong = "" if not u.known(error) else f"{error:.1e}" if error else "0"
    return u.size(workspace) if workspace else "", wrong


def alternatives(report: Report) -> list[tuple[Row, Option, list[Option]]]:
    """For the most expensive regions, what was chosen and what lost, the best of them first."""
    found = []
    for row in sorted(fold(report), key=lambda row: -row.seconds):
        if losers := _losers(row.first):
            r = row.first
            room = next((o.workspace for o in r.options if o.candidate == r.candidate), 0)
            time = _timed(r.measured_s, r.best_s)[1]
            chosen = Option(r.candidate, time, *_needs(room, r.error), "chosen")
            found.append((row, chosen, losers))
    return found[:DETAILED]


WHOLE = ("pick", "time", "workspace", "error", "regions that it runs otherwise")


def wholes(report: Report) -> list[tuple[str, ...]]:
    """Whole plans that the same search found, the quickest first."""
    rows: list[tuple[str, ...]] = []
    for w in report.wholes:
        other = f"{w.changed} of {len(report.regions)}" if w.changed else "none"
        needs = _needs(w.workspace, w.error)
        rows.append((", ".join(w.names), u.seconds(w.seconds), *needs, other))
    return rows


def _losers(region: RegionReport) -> list[Option]:
    def rank(o: OptionReport) -> tuple[bool, float]:
        time, _ = _timed(o.measured_s, o.predicted_s)
        return bool(o.rejected), time if u.known(time) else float("inf")

    options = []
    for o in sorted((o for o in region.options if o.candidate != region.candidate), key=rank):
        time, label = _timed(o.measured_s, o.predicted_s)
        own = region.measured_s if u.known(o.measured_s) else region.predicted_s
        slower = u.times(time / own if u.known(time) and u.known(own) and own > 0 else None)
        needs = _needs(o.workspace, o.error)
        options.append(Option(u.clean(o.candidate), label, *needs, slower, u.clean(o.rejected)))
    return options


def header(report: Report) -> list[tuple[str, str]]:
    """The facts a reader wants before any table."""
    here = report.target or u.MISSING
    where = "" if report.device in (here, "") else f" ({report.device})"
    machine = report.machine or ("" if report.device else "not this machine")
    plain = report.cuda_graph.startswith(("yes", "no", "at "))  # "at the first run"
    graph = report.cuda_graph if plain else f"no: {report.cuda_graph}"
    passed = f"{u.count(report.nodes_before, 'operator')}, {report.nodes_after} after passes"
    regions = u.count(len(report.regions), "region")
    facts = [
        ("input", ", ".join(report.inputs) or "none"),
        ("machine", f"{here}{where}" + (f": {machine}" if machine else "")),
        ("versions", ", ".join(f"{k} {v}" for k, v in report.versions.items()) or u.MISSING),
        ("time", times(report)),
        ("plan", f"{passed}, in {regions}; made in {u.seconds(report.plan_s)}"),
        ("chosen", chosen(report)),
        ("CUDA Graph", graph if "cuda" in report.device else ""),
    ]
    return [(name, u.clean(fact)) for name, fact in facts if fact]


def times(report: Report) -> str:
    """How long a run takes, beside eager PyTorch."""
    whole, eager = report.total_measured_s, report.eager_s
    apart = u.total(r.best_s for r in report.regions)
    ours = f"{u.seconds(whole if u.known(whole) else apart)} a run"
    ours += "" if u.known(whole) else f", {_how(report)}"
    if not u.known(eager):
        return f"{ours}; eager PyTorch not measured" + (f": {report.eager}" if report.eager else "")
    how = f" ({report.eager})" if report.eager else ""
    if not u.known(whole) or not whole:
        return f"{ours}; eager PyTorch {u.seconds(eager)}{how}"
    faster = eager / whole
    said = f"{u.times(faster)} as fast" if faster >= 1 else f"{u.times(whole / eager)} as long"
    return f"{ours}, eager PyTorch {u.seconds(eager)}: {said}{how}"


def _working(report: Report) -> tuple[int, int]:
    """How many regions do something, and how many of them were measured."""
    work = [r for r in report.regions if r.bound != "free"]
    return len(work), sum(u.known(r.measured_s) for r in work)


def _how(report: Report) -> str:
    work, timed = _working(report)
    if not timed:
        return "predicted"
    if timed == work:
        return "its regions measured one by one"
    return f"{timed} of {u.count(work, 'region')} measured, the rest predicted"


def chosen(report: Report) -> str:
    """How engines were chosen."""
    work, timed = _working(report)
    if report.mode == "heuristic":
        return "by prediction; find=True measures"
    if report.mode != "found":
        return {"loaded": "earlier, read from a file"}.get(report.mode, report.mode) or u.MISSING
    if timed == work:
        return "for every region by measurement"
    return f"for {timed} of {u.count(work, 'region')} by measurement, for the rest by prediction"


def summary(report: Report) -> list[str]:
    """How far the plan is from what the target allows, and what limits it."""
    if not report.regions:
        return ["The plan has no regions: its outputs are inputs or constants, and nothing runs."]
    priced = [r for r in report.regions if u.known(r.best_s) and u.known(r.roofline_s)]
    apart = u.total(r.best_s for r in priced)
    if not (priced and apart > 0):
        return ["No region of this plan has a known time."]
    sentences = list(filter(None, [_how_far(report, priced, apart)]))
    by_bound: dict[str, float] = {}
    for r in priced:
        by_bound[r.bound] = by_bound.get(r.bound, 0.0) + r.best_s
    shares = sorted(((t / apart, b) for b, t in by_bound.items() if t > 0), reverse=True)
    if shares:
        said = [f"{u.BOUNDS.get(b, u.clean(b))} for {u.percent(share)}" for share, b in shares]
        said[0] += " of the time"
        top = max(fold(report), key=lambda row: row.seconds)
        part = u.percent(top.seconds / u.total(r.best_s for r in report.regions))
        most = f"the most time goes to {top.label()} ({u.operators(top.first)}), {part}."
        sentences.append(f"What limits it: {u.listed(said)}; {most}")
    if u.known(report.total_measured_s):
        sentences.append(f"Its regions one by one add up to {u.seconds(apart)}.")
    if left := len(report.regions) - len(priced):
        sentences.append(f"Left out of these sums: {u.count(left, 'region')} without a known time.")
    return sentences


def _how_far(report: Report, priced: Sequence[RegionReport], apart: float) -> str:
    """How much of the roofline is reached. Regions that ran faster than the target's rates allow
    are left out."""
    bounded = [r for r in priced if u.known(r.fraction)]
    time, roof = u.total(r.best_s for r in bounded), u.total(r.roofline_s for r in bounded)
    whole = report.total_measured_s
    if not time or (u.known(whole) and whole < roof):
        return ""
    named = u.clean(report.target) or "the target"
    least = f"Bytes and operations need {u.seconds(roof)} on {named} at least (the roofline)"
    part = f" for regions that make {u.percent(time / apart)} of the time" * (time < apart)
    return f"{least}{part}: {u.percent(roof / time)} of that is reached."


def search(report: Report) -> list[str]:
    """Sentences about what was built and measured, and what was not reached."""
    options = [o for row in fold(report) for o in row.first.options]
    if report.mode != "found" or not options:
        return []
    timed = sum(u.known(o.measured_s) for o in options)
    number = re.compile(r"[\d.]+(e-?\d+)?")
    why = Counter(number.sub("…", u.clean(o.rejected)) for o in options if o.rejected)
    silent = sum(not o.rejected and not u.known(o.measured_s) for o in options)
    different = u.count(len(fold(report)), "different region")
    offered = f"{u.count(len(options), 'candidate')} offered for {different}"
    said = [f"{offered}: {timed} built and measured."]
    said += [f"×{n} {reason}" for reason, n in why.most_common()]
    return said + ([f"×{silent} of regions that were not reached"] if silent else [])


def orders(report: Report) -> list[str]:
    """Sentences about the values that were given another memory order, and why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for o in report.orders:
        said = f"%{u.shorten(o.value, 24)} ({u.size(o.bytes)})"
        groups.setdefault((u.clean(o.order), u.clean(o.reason)), []).append(said)
    return [
        f"{order}: {u.listed(u.few(values, 3))}, because {reason}"
        for (order, reason), values in groups.items()
    ]


def memory(report: Report) -> list[tuple[str, str]]:
    """Where memory goes, and what sharing one block saves."""
    m = report.memory
    needed = u.total([m.arena, m.unplanned])
    part = u.percent(needed / m.separate) if u.known(m.separate) and m.separate else ""
    saved = f": the plan needs {part} of that" if part else ""
    forms = f", and {u.size(m.packed)} of them folded or packed" if m.packed else ""
    rows = [
        ("weights", f"{u.size(m.weights)}{forms}"),
        ("arena", f"{u.size(m.arena)}, one block that values share as others die"),
        ("unplanned", f"{u.size(m.unplanned)} at most, allocated as regions run"),
        ("separate", f"{u.size(m.separate)} if every value had memory of its own{saved}"),
    ]
    if m.peak:
        rows.append(("peak", f"{u.size(m.peak)} at once, with what the other half has left"))
    return rows


def passes(report: Report) -> list[tuple[str, str, str, str]]:
    """Name, nodes, time and rules of each pass that did something; the idle ones in one line."""
    busy = [p for p in report.passes if p.fired or p.before != p.after]
    rows = []
    for p in busy:
        rules = ", ".join(f"{u.clean(rule)} ×{n}" for rule, n in p.fired.items())
        rows.append((u.clean(p.name), f"{p.before} → {p.after}", u.seconds(p.seconds), rules))
    if idle := [p for p in report.passes if p not in busy]:
        spent = u.seconds(u.total(p.seconds for p in idle))
        rows.append((u.count(len(idle), "idle pass", "idle passes"), "", spent, "changed nothing"))
    return rows


def legend(report: Report) -> str:
    """How to read the table of regions."""
    against = dict.fromkeys(u.clean(r.reference) for r in report.regions if r.reference)
    parts = ["% roof: roofline over measured time, over predicted where nothing was measured."]
    if any(not u.known(r.fraction) and u.known(r.best_s) for r in report.regions):
        parts.append(f"{u.MISSING}: faster than the rates by which the target is described.")
    if len(fold(report)) < len(report.regions):
        alike = "×N: N regions that look alike; figures are for one of them, % time for all."
        parts.insert(0, alike)
    if against:
        held = u.listed(list(against))
        parts.append(f"error: the largest, relative to the largest value, against {held}.")
    return " ".join(parts)
