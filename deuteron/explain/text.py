"""An explanation as text: about 25 lines for a terminal, or all there is to say."""

import shutil
from collections.abc import Iterable

from deuteron.explain import digest as d
from deuteron.explain import units as u
from deuteron.explain.report import Report

LEAST, MOST = 60, 120  # columns, whatever the terminal has
RUNNERS_UP = 3
NAME = 11  # columns for a region's name; a longer one is repeated below it
KINDS, VALUES, REFUSALS = 5, 3, 3  # rows of the short form


def terminal() -> int:
    """The columns of the terminal, within limits; 100 where there is no terminal."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, LEAST), MOST)


def render_text(
    report: Report, limit: int | None = None, full: bool = False, width: int | None = None
) -> str:
    """The explanation in at most ``width`` columns, those of the terminal unless it is given.
    ``limit`` is how many rows of regions to show at most, or of kinds of region."""
    width = terminal() if width is None else max(width, LEAST)
    title = f"Plan of {u.shorten(report.name or 'a graph', width - 10)}"
    facts = _facts(d.header(report), width)
    if full:
        sections = [
            _section(title, facts, "="),
            u.wrap(" ".join(d.summary(report)), width),
            [line for note in report.notes for line in u.wrap(note, width, "note: ")],
            *_everything(report, limit, width),
        ]
    else:
        sections = [
            [*_section(title, facts, "="), *_facts([("notes", "; ".join(report.notes))], width)],
            _kinds(report, KINDS if limit is None else limit, width),
            _avoidable(report, width),
            _to_act_on(report, width),
            u.wrap(
                "full=True, or --full, shows every region, alternatives, memory, passes.", width
            ),
        ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _section(title: str, body: list[str], rule: str = "-") -> list[str]:
    return [title, rule * len(title), *body] if body else []


def _facts(facts: Iterable[tuple[str, str]], width: int) -> list[str]:
    return [line for name, fact in facts for line in u.wrap(fact, width, f"{name:<11} ")]


# ---- the short form


def _kinds(report: Report, limit: int, width: int) -> list[str]:
    found, whole = d.kinds(report), u.total(r.best_s for r in report.regions)
    if not found:
        return d.summary(report)
    shown = found[: d.checked(limit)]
    rows = []
    for kind in shown:
        roof = u.percent(kind.reached) if u.known(kind.reached) else u.MISSING
        bound = f"{u.clean(kind.first.bound)} {roof}"
        figures = (u.seconds(kind.seconds), u.percent(kind.seconds / whole))
        what, by = u.operators(kind.first, 32), u.shorten(u.engine(kind.first), 28)
        rows.append((*figures, what, f"×{len(kind.regions)}", by, bound, kind.shapes))
    heading = ("time", "of all", "region", "", "run by", "bound, % roof", "gives")
    left = f", {len(shown)} costliest of {len(found)} kinds" if len(shown) < len(found) else ""
    return [f"Where the time goes{left}", *u.align([heading, *rows], ">><><<<", width)]


def _avoidable(report: Report, width: int) -> list[str]:
    found, every = d.avoidable(report), d.vetoes(report)
    if not every:
        return []
    cost = u.seconds(u.total(t.seconds for t in every))
    n = u.count(sum(t.count for t in every), "value")
    if not found:
        return u.wrap(
            f"{n} did not fuse ({cost} at most), and nothing can be done about it.", width
        )
    lines = u.wrap(f"{n} did not fuse ({cost} at most); the costliest with a remedy:", width)
    for t in found[:VALUES]:
        said = f"{t.examples[0].partition(': ')[2]}; remedy: {t.remedy}"
        lines += u.wrap(said, width, f"{u.seconds(t.seconds):>9}  ")
    return lines


def _to_act_on(report: Report, width: int) -> list[str]:
    lines = []
    for by, t in d.to_act_on(report)[:REFUSALS]:
        said = f"{by} refused {u.count(t.count, 'region')}: {t.reason}; remedy: {t.remedy}"
        lines += u.wrap(said, width)
    return lines


# ---- the long form


def _everything(report: Report, limit: int | None, width: int) -> list[list[str]]:
    return [
        _section("Regions, in the order they run", _regions(report, limit, width)),
        _section("What did not fuse", _vetoes(report, width)),
        _section("Who refused", _refusals(report, width)),
        _section("Alternatives to the most expensive regions", _alternatives(report, width)),
        _section("Whole plans to choose from", _wholes(report, width)),
        _section("The search", [x for s in d.search(report) for x in u.wrap(s, width)]),
        _section("Memory order", [x for s in d.orders(report) for x in u.wrap(s, width)]),
        _section("Memory", _facts(d.memory(report), width)),
        _section("Passes", u.align(d.passes(report), "<>><", width)),
    ]


def _regions(report: Report, limit: int | None, width: int) -> list[str]:
    found = d.regions(report, limit)
    if found is None:
        return []
    table = [("region", *(u.COLUMNS[i].title for i in found.columns), "% time")]
    for row in found.shown:
        share = u.percent(row.seconds / found.seconds, "")
        table.append((row.label(NAME), *(row.cells[i] for i in found.columns), share))
    lines = u.align(table, "<" + ">" * (len(found.columns) + 1), width)
    body = lines[:1] if found.shown else []
    for row, line in zip(found.shown, lines[1:], strict=True):
        r, name = row.first, "" if row.label() == row.label(NAME) else row.label()
        where = f"from {row.source}" if row.source else ""
        what = [name, u.operators(r), u.shorten(r.shape, 40), u.engine(r), where, r.note]
        body += [line, "    " + u.shorten(" · ".join(filter(None, what)), width - 4)]
    return body + u.wrap(found.left, width, "… ") + u.wrap(d.legend(report), width)


def _vetoes(report: Report, width: int) -> list[str]:
    found = d.vetoes(report)
    if not found:
        return []
    n, cost = sum(t.count for t in found), u.seconds(u.total(t.seconds for t in found))
    moved = u.size(u.total(t.bytes for t in found))
    lines = [f"{u.count(n, 'value')} through memory, {moved}, {cost}. The costliest reason first:"]
    for t in found:
        figures = f"{u.seconds(t.seconds):>9}  {u.size(t.bytes):>8}  {f'×{t.count}':>5}  "
        lines += u.wrap(t.reason, width, figures)
        lines += [" " * 8 + "e.g. " + u.shorten(e, width - 13) for e in t.examples[:2]]
        lines += u.wrap(t.remedy, width, " " * 8 + "remedy: ")
    return lines


def _refusals(report: Report, width: int) -> list[str]:
    lines = []
    for name, found in d.refusals(report).items():
        n = sum(t.count for t in found)
        lines.append(f"{u.shorten(name, 40)}: {n} of {u.count(len(report.regions), 'region')}")
        for t in found:
            names = ", ".join(u.few(t.examples, 3))
            lines += u.wrap(f"{t.reason} ({names})", width, f"{f'×{t.count}':>7}  ")
            lines += u.wrap(t.remedy, width, " " * 9 + "remedy: ")
    return lines


def _wholes(report: Report, width: int) -> list[str]:
    found = d.wholes(report)
    return u.align([d.WHOLE, *found], "<>>><", width) if found else []


def _alternatives(report: Report, width: int) -> list[str]:
    lines = []
    for row, chosen, losers in d.alternatives(report):
        r, options = row.first, [chosen, *losers[:RUNNERS_UP]]
        lines.append(u.shorten(f"{row.label()}: {u.operators(r)} · {r.shape}", width))
        table: list[tuple[str, ...]] = [d.OPTION]
        for o in options:
            against = "out" if o.verdict else o.slower
            table.append((u.shorten(o.candidate, width - 56), *o[1:4], against))
        head, *rest = u.align(table, "<>>><", width - 4)
        lines.append("    " + head)
        for line, o in zip(rest, options, strict=True):
            lines += ["    " + line, *u.wrap(o.verdict, width, " " * 8 + "out: ")]
        if len(losers) > RUNNERS_UP:
            lines.append(f"    and {len(losers) - RUNNERS_UP} more")
        lines += u.wrap(u.clean(r.off), width, "    ")
    return lines
