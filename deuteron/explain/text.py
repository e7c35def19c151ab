"""An explanation as text: what is worth saying about a report, and how it looks in a log.

The first half sorts and adds up (equal regions folded, vetoes and refusals by reason) and is
shared with the HTML page; the second half lays it out in at most :data:`WIDTH` columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deuteron.errors import DeuteronError
from deuteron.explain import units as u
from deuteron.explain.report import OptionReport, RegionReport, Report, VetoReport

WIDTH = 110
LONG, SHOWN = 60, 40  # a plan of more than LONG rows prints the SHOWN most expensive
DETAILED = 5  # regions whose alternatives are listed
RUNNERS_UP = 3
NAME = 11  # columns for a region's name; a longer one is repeated below it

MODES = {
    "heuristic": "heuristic (chosen by prediction; find=True measures)",
    "found": "found (each region runs what measured fastest)",
    "loaded": "loaded (chosen earlier, read from a file)",
}

# What a user can do about a veto: part of the reason given in passes/fuse.py → advice.
REMEDIES = {
    "is an output of the graph": "do not return this value if nobody needs it",
    "so it is written anyway": "let one operator read it, or compute it again for the other",
    "that the product is tiled over": "reshape or broadcast after the elementwise work, not before",
    "moves elements out of the tile": "move (transpose, slice) after the elementwise work",
    "moves elements before the reduction": "reduce over the original axes, then move",
    "a second reduction needs the first": "use one operator for both (softmax, layer_norm, …)",
    "an opaque operator runs alone": "write it with known operators, or define it as one",
}
CONVERSION = "at the edge of the graph, hand over and take channels_last tensors"  # of to_layout


# ---- what is worth saying -------------------------------------------------------------------


class Row(NamedTuple):
    """A region, or several that differ in nothing that is shown. ``seconds`` is for all."""

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


def expensive(rows: Sequence[Row], limit: int | None) -> tuple[list[Row], list[Row]]:
    """The rows to show, in plan order, and those left out. None: all, unless they are many."""
    if limit is None:
        limit = len(rows) if len(rows) <= LONG else SHOWN
    elif limit < 0:
        raise DeuteronError(f"limit={limit} is negative", remedy="give a number of rows, or None")
    kept = set(sorted(range(len(rows)), key=lambda i: -rows[i].seconds)[:limit])
    return [rows[i] for i in sorted(kept)], [row for i, row in enumerate(rows) if i not in kept]


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
    """Vetoes or refusals that give the same reason, or one of them."""

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


def vetoes(report: Report) -> list[Tally]:
    """What did not fuse, by reason."""

    def item(v: VetoReport) -> Tally:
        advice = next((advice for part, advice in REMEDIES.items() if part in v.reason), "")
        if v.consumer.startswith("to_layout") or v.producer.startswith("to_layout"):
            advice = CONVERSION
        example = u.clean(f"%{v.value}: {v.producer} → {v.consumer}")
        return Tally(v.reason, advice, v.bytes, v.seconds, (example,))

    return _added_up(map(item, sorted(report.vetoes, key=lambda v: -u.total([v.seconds]))))


def refusals(report: Report) -> dict[str, list[Tally]]:
    """Engine → why it refused, and for how many regions (their time as the cost)."""
    found: dict[str, list[Tally]] = {}
    for region in report.regions:
        for r in region.refusals:
            item = Tally(r.reason, r.remedy, 0, region.best_s, (u.shorten(region.name, 24),))
            found.setdefault(u.clean(r.engine) or u.MISSING, []).append(item)
    return {name: _added_up(items) for name, items in found.items()}


class Option(NamedTuple):
    """A way to run a region: its time, how many times slower than the chosen one it is, and why
    it was out of the race."""

    candidate: str
    time: str
    slower: str
    verdict: str = ""


def _timed(measured: float | None, predicted: float | None) -> tuple[float | None, str]:
    """The time that counts, and as text."""
    time, kind = (measured, "measured") if u.known(measured) else (predicted, "predicted")
    return time, f"{u.seconds(time)} {kind}"


def alternatives(report: Report) -> list[tuple[Row, Option, list[Option]]]:
    """For the most expensive regions, what was chosen and what lost, the best of them first."""
    found = []
    for row in sorted(fold(report), key=lambda row: -row.seconds):
        if losers := _losers(row.first):
            r = row.first
            chosen = Option(r.candidate, _timed(r.measured_s, r.best_s)[1], "chosen")
            found.append((row, chosen, losers))
    return found[:DETAILED]


def _losers(region: RegionReport) -> list[Option]:
    def rank(o: OptionReport) -> tuple[bool, float]:
        time, _ = _timed(o.measured_s, o.predicted_s)
        return bool(o.rejected), time if u.known(time) else float("inf")

    options = []
    for o in sorted((o for o in region.options if o.candidate != region.candidate), key=rank):
        time, label = _timed(o.measured_s, o.predicted_s)
        own = region.measured_s if u.known(o.measured_s) else region.predicted_s
        slower = u.times(time / own if u.known(time) and u.known(own) and own > 0 else None)
        options.append(Option(u.clean(o.candidate), label, slower, u.clean(o.rejected)))
    return options


def header(report: Report) -> list[tuple[str, str]]:
    """The facts a reader wants before any number."""
    where = report.device or "planned for a machine that is not here"
    plain = report.cuda_graph.startswith(("yes", "no", "at "))  # "at the first run"
    graph = report.cuda_graph if plain else f"no: {report.cuda_graph}"
    here = report.target or u.MISSING
    passed = f"{u.count(report.nodes_before, 'node')} → {report.nodes_after} after passes"
    facts = [
        ("graph", f"{passed}, in {u.count(len(report.regions), 'region')}"),
        ("target", here if where == here else f"{here} ({where})"),
        ("mode", MODES.get(report.mode, report.mode) or u.MISSING),
        ("CUDA Graph", graph if report.cuda_graph else u.MISSING),
        ("planned in", u.seconds(report.plan_s)),
        ("versions", ", ".join(f"{k} {v}" for k, v in report.versions.items()) or u.MISSING),
    ]
    return [(name, u.clean(fact)) for name, fact in facts]


def summary(report: Report) -> list[str]:
    """Two or three sentences for somebody who has never seen a plan."""
    if not report.regions:
        return ["The plan has no regions: its outputs are inputs or constants, and nothing runs."]
    priced = [r for r in report.regions if u.known(r.best_s) and u.known(r.roofline_s)]
    apart = u.total(r.best_s for r in priced)
    roof = u.total(r.roofline_s for r in priced)
    whole = report.total_measured_s
    time = whole if u.known(whole) else apart
    if not (priced and time > 0):
        return ["No region of this plan has a known time."]
    sentences = [_how_long(priced, whole, apart), _how_far(report.target, time, roof)]
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
    if left := len(report.regions) - len(priced):
        sentences.append(f"Left out of these sums: {u.count(left, 'region')} without a known time.")
    return sentences


def _how_long(priced: Sequence[RegionReport], whole: float | None, apart: float) -> str:
    work = [r for r in priced if r.bound != "free"]
    timed = sum(u.known(r.measured_s) for r in work)
    if u.known(whole):
        alone = f"its regions one by one add up to {u.seconds(apart)}."
        return f"One run takes {u.seconds(whole)}, measured as a whole; {alone}"
    if timed == 0:
        return f"One run should take {u.seconds(apart)}: predicted, nothing was measured."
    if timed == len(work):
        return f"One run takes {u.seconds(apart)}, the sum of its regions, each measured alone."
    part = f"{timed} of {u.count(len(work), 'region')} measured alone, the rest predicted."
    return f"One run should take {u.seconds(apart)}: {part}"


def _how_far(target: str, time: float, roof: float) -> str:
    least = f"the least that its bytes and operations allow on {u.clean(target) or 'the target'}"
    if roof > time:
        why = "values were still in a cache, or an algorithm does less arithmetic than the plain"
        below = f"That is below the roofline, {u.seconds(roof)}, {least}"
        return f"{below}: {why} one (Winograd, taps in the padding left out)."
    slower = f"takes {u.times(time / roof if roof else None)} as long."
    reached = f"the plan reaches {u.percent(roof / time)} of it and {slower}"
    return f"The roofline, {least}, is {u.seconds(roof)}: {reached}"


def memory(report: Report) -> list[tuple[str, str]]:
    """Where memory goes, and what sharing one block saves."""
    m = report.memory
    needed = u.total([m.arena, m.unplanned])
    part = u.percent(needed / m.separate) if u.known(m.separate) and m.separate else ""
    saved = f": the plan needs {part} of that" if part else ""
    return [
        ("weights", u.size(m.weights)),
        ("arena", f"{u.size(m.arena)}, one block that values share as others die"),
        ("unplanned", f"{u.size(m.unplanned)} at most, allocated by library calls as they run"),
        ("separate", f"{u.size(m.separate)} if every value had memory of its own{saved}"),
    ]


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
    if len(fold(report)) < len(report.regions):
        alike = "×N: N regions that look alike; figures are for one of them, % time for all."
        parts.insert(0, alike)
    if against:
        held = u.listed(list(against))
        parts.append(f"error: the largest, relative to the largest value, against {held}.")
    return " ".join(parts)


# ---- how it looks ---------------------------------------------------------------------------


def render_text(report: Report, limit: int | None = None) -> str:
    """The whole explanation. ``limit`` is how many rows of regions to show at most."""
    sections = [
        _section(f"Plan of {u.shorten(report.name or 'a graph', 90)}", _facts(header(report)), "="),
        u.wrap(" ".join(summary(report)), WIDTH),
        [line for note in report.notes for line in u.wrap(note, WIDTH, "note: ")],
        _section("Regions, in the order they run", _regions(report, limit)),
        _section("What did not fuse", _vetoes(report)),
        _section("Who refused", _refusals(report)),
        _section("Alternatives to the most expensive regions", _alternatives(report)),
        _section("Memory", _facts(memory(report))),
        _section("Passes", u.align(passes(report), "<>><", WIDTH)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _section(title: str, body: list[str], rule: str = "-") -> list[str]:
    return [title, rule * len(title), *body] if body else []


def _facts(facts: Iterable[tuple[str, str]]) -> list[str]:
    return [line for name, fact in facts for line in u.wrap(fact, WIDTH, f"{name:<11} ")]


def _regions(report: Report, limit: int | None) -> list[str]:
    found = regions(report, limit)
    if found is None:
        return []
    table = [("region", *(u.COLUMNS[i].title for i in found.columns), "% time")]
    for row in found.shown:
        share = u.percent(row.seconds / found.seconds, "")
        table.append((row.label(NAME), *(row.cells[i] for i in found.columns), share))
    lines = u.align(table, "<" + ">" * (len(found.columns) + 1), WIDTH)
    body = lines[:1] if found.shown else []
    for row, line in zip(found.shown, lines[1:], strict=True):
        r, name = row.first, "" if row.label() == row.label(NAME) else row.label()
        where = f"from {row.source}" if row.source else ""
        what = [name, u.operators(r), u.shorten(r.shape, 40), u.engine(r), where, r.note]
        body += [line, "    " + u.shorten(" · ".join(filter(None, what)), WIDTH - 4)]
    return body + u.wrap(found.left, WIDTH, "… ") + u.wrap(legend(report), WIDTH)


def _vetoes(report: Report) -> list[str]:
    found = vetoes(report)
    if not found:
        return []
    n, cost = sum(t.count for t in found), u.seconds(u.total(t.seconds for t in found))
    moved = u.size(u.total(t.bytes for t in found))
    lines = [f"{u.count(n, 'value')} through memory, {moved}, {cost}. The costliest reason first:"]
    for t in found:
        figures = f"{u.seconds(t.seconds):>9}  {u.size(t.bytes):>8}  {f'×{t.count}':>5}  "
        lines += u.wrap(t.reason, WIDTH, figures)
        lines += [" " * 8 + "e.g. " + u.shorten(e, WIDTH - 13) for e in t.examples[:2]]
        lines += u.wrap(t.remedy, WIDTH, " " * 8 + "remedy: ")
    return lines


def _refusals(report: Report) -> list[str]:
    lines = []
    for name, found in refusals(report).items():
        n = sum(t.count for t in found)
        lines.append(f"{u.shorten(name, 40)}: {n} of {u.count(len(report.regions), 'region')}")
        for t in found:
            names = ", ".join(t.examples[:3]) + (", …" if len(t.examples) > 3 else "")
            lines += u.wrap(f"{t.reason} ({names})", WIDTH, f"{f'×{t.count}':>7}  ")
            lines += u.wrap(t.remedy, WIDTH, " " * 9 + "remedy: ")
    return lines


def _alternatives(report: Report) -> list[str]:
    lines = []
    for row, chosen, losers in alternatives(report):
        r, options = row.first, [chosen, *losers[:RUNNERS_UP]]
        lines.append(u.shorten(f"{row.label()}: {u.operators(r)} · {r.shape}", WIDTH))
        shown = [(o, "out" if o.verdict else o.slower) for o in options]
        table = [(u.shorten(o.candidate, 60), o.time, against) for o, against in shown]
        for line, o in zip(u.align(table, "<><", WIDTH - 4), options, strict=True):
            lines += ["    " + line, *u.wrap(o.verdict, WIDTH, " " * 8 + "out: ")]
        if len(losers) > RUNNERS_UP:
            lines.append(f"    and {len(losers) - RUNNERS_UP} more")
        lines += u.wrap(u.clean(r.off), WIDTH, "    ")
    return lines
