"""An explanation as HTML: a page, or a fragment for a notebook. No scripts, nothing to load.

Text takes the colour of its surroundings and lines are drawn in it at part opacity, so the same
fragment is readable on light and on dark. Everything that came from a model is escaped.
"""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import NamedTuple

from deuteron.explain import digest
from deuteron.explain import units as u
from deuteron.explain.report import RegionReport, Report
from deuteron.target import Target, names, target

COLOURS = {"memory": "#3d85c6", "compute": "#dd7e2b", "launch": "#9a6fd0", "links": "#4a9a5b"}
PASSES = ("pass", "nodes", "time", "rules")
BARS = 8  # this many kinds of region have a bar of their own; the rest share one

HERE = resources.files(__package__)
STYLE, PAGE = ((HERE / name).read_text("utf-8") for name in ("plan.css", "page.html"))


def render_page(report: Report, limit: int | None) -> str:
    """A whole page."""
    title = _e(f"Plan of {report.name or 'a graph'}")
    return Template(PAGE).substitute(title=title, body=render_fragment(report, limit))


def render_fragment(report: Report, limit: int | None = None) -> str:
    """The explanation without a page around it, as notebooks want it."""
    parts = [
        f"<style>{STYLE}</style>",
        f"<h1>Plan of {_e(u.shorten(report.name or 'a graph', 120))}</h1>",
        _facts(digest.header(report)),
        *(f'<p class="dim">note: {_e(note)}</p>' for note in report.notes),
        _against_eager(report),
        _kinds(report),
        f"<p>{_e(' '.join(digest.summary(report)))}</p>",
        _roofline(report),
        _regions(report, len(report.regions) if limit is None else limit),
        _vetoes(report),
        _refusals(report),
        _alternatives(report),
        _details(
            "Whole plans to choose from", _table(digest.WHOLE, digest.wholes(report), "knnnw")
        ),
        _details("The search", _lines(digest.search(report))),
        _details("Memory order", _lines(digest.orders(report))),
        _details("Memory", _facts(digest.memory(report))),
        _details("Passes", _table(PASSES, digest.passes(report), "knnw")),
    ]
    return '<div class="deuteron-plan">\n' + "\n".join(filter(None, parts)) + "\n</div>"


# ---- tables ---------------------------------------------------------------------------------


def _e(words: str) -> str:
    """Untrusted text, made harmless: one printable line, its markup shown and not obeyed."""
    return escape(u.clean(words), quote=True)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], how: str) -> str:
    """Plain strings as a table; ``how`` is a class per column: name (k), words (w), number (n)."""
    body = [[_e(cell) for cell in row] for row in rows]
    return _raw_table(titles, body, how) if body else ""


def _raw_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    how: Sequence[str],
    hints: Sequence[str] = (),
) -> str:
    hints = hints or [""] * len(titles)
    head = "".join(
        f'<th class="{c}" title="{_e(hint)}">{_e(title)}</th>'
        for title, c, hint in zip(titles, how, hints, strict=True)
    )
    cells = ((f'<td class="{c}">{v}</td>' for v, c in zip(row, how, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    top = f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
    return f"{top}\n<tbody>{body}</tbody></table></div>"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    lines = (f'<tr><th class="k">{_e(k)}</th><td class="w">{_e(v)}</td></tr>' for k, v in facts)
    return "<table><tbody>" + "\n".join(lines) + "</tbody></table>"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{_e(line)}</p>" for line in lines)


def _details(title: str, body: str, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{_e(title)}</summary>\n{body}\n</details>" if body else ""


def _regions(report: Report, limit: int | None) -> str:
    found = digest.regions(report, limit)
    if found is None:
        return ""
    body = []
    most = max((row.seconds for row in found.shown), default=0.0) or math.nan
    for row in found.shown:
        r, share = row.first, row.seconds / found.seconds
        bar = _e(u.percent(share, "")) + _bar(row.seconds / most, _colour(r.bound))
        where = f"from {row.source}" if row.source else ""
        below = " · ".join(filter(None, (r.shape, u.engine(r), where, r.note)))
        what = f'{_e(u.operators(r, 90))}<div class="dim">{_e(below)}</div>'
        body.append([_e(row.label(24)), bar, what, *(_e(row.cells[i]) for i in found.columns)])
    titles = ["region", "% time", "operators", *(u.COLUMNS[i].title for i in found.columns)]
    where = "with the type of the first output, who runs it, and where it stands in the model"
    hints = ["", "share of the plan's time", where, *(u.COLUMNS[i].hint for i in found.columns)]
    how = ["k", "n share", "o", *("n" if i in NARROW else "n wide" for i in found.columns)]
    table = _raw_table(titles, body, how, hints) if body else ""
    if found.left:
        table += f"<p>{_e(found.left)}.</p>"
    legend = f'<p class="dim">{_e(digest.legend(report))}</p>'
    return _details("Regions, in the order they run", table + legend, is_open=True)


def _vetoes(report: Report) -> str:
    found = digest.vetoes(report)
    figures = ((u.seconds(t.seconds), u.size(t.bytes), f"×{t.count}", t) for t in found)
    rows = [(*row, t.reason, "; ".join(t.examples[:2]), t.remedy) for *row, t in figures]
    cost = u.seconds(u.total(t.seconds for t in found))
    title = f"What did not fuse: {u.count(sum(t.count for t in found), 'value')}, {cost}"
    heads = ("time", "bytes", "count", "reason", "for example", "remedy")
    return _details(title, _table(heads, rows, "nnnwww"))


def _refusals(report: Report) -> str:
    every = ((by, t) for by, found in digest.refusals(report).items() for t in found)
    rows = [(by, f"×{t.count}", t.reason, ", ".join(t.examples[:3]), t.remedy) for by, t in every]
    heads = ("engine", "regions", "reason", "for example", "remedy")
    return _details("Who refused", _table(heads, rows, "knwww"))


def _alternatives(report: Report) -> str:
    rows = []
    for row, chosen, losers in digest.alternatives(report):
        rows.append((row.label(), *chosen))
        rows += [("", *option) for option in losers]
    heads = ("region", *digest.OPTION, "out of the race because")
    return _details("Alternatives to the most expensive regions", _table(heads, rows, "kwnnnnw"))


# ---- pictures -------------------------------------------------------------------------------

WIDE, HIGH = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 34, 56  # margins of the chart


def _bar(share: float, colour: str) -> str:
    """A bar as long as its share of the room, and never too short to be seen."""
    long = f"{100 * min(share, 1.0):.1f}" if u.known(share) else "0"
    return f'<span class="bar" style="width:{long}%;background:{colour}"></span>'


def _bars(rows: Iterable[tuple[str, str, float, str]]) -> str:
    """A bar chart. Each row: the words before a bar, a figure, the bar's length as a share of the
    longest, and its colour."""
    made = (
        f'<div class="row"><div>{_e(what)}</div><div class="n">{_e(figure)}</div>'
        f"<div>{_bar(share, colour)}</div></div>"
        for what, figure, share, colour in rows
    )
    return f'<div class="bars">{"".join(made)}</div>'


def _against_eager(report: Report) -> str:
    ours, eager = report.total_measured_s, report.eager_s
    if not u.known(ours) or not u.known(eager) or max(ours, eager) <= 0:
        return ""
    longest = max(ours, eager)
    rows = (("eager PyTorch", eager, "#8a8f98"), ("this plan", ours, "#2f9e63"))
    bars = _bars((who, u.seconds(s), s / longest, colour) for who, s, colour in rows)
    return f"<h2>One run</h2>{bars}"


def _kinds(report: Report) -> str:
    """What runs, by kind of region, as bars."""
    found, whole = digest.kinds(report), u.total(r.best_s for r in report.regions)
    if not found:
        return ""
    first = found[0].seconds
    rows = [
        (
            f"{u.operators(k.first, 60)} ×{len(k.regions)} by {u.engine(k.first)}",
            f"{u.seconds(k.seconds)}, {u.percent(k.seconds / whole)}",
            k.seconds / first,
            _colour(k.first.bound),
        )
        for k in found[:BARS]
    ]
    if rest := found[BARS:]:
        cost, many = u.total(k.seconds for k in rest), u.count(len(rest), "other kind")
        figure = f"{u.seconds(cost)}, {u.percent(cost / whole)}"
        rows.append((many, figure, cost / first, "#8a8f98"))
    key = '<span class="key" style="background:{}"></span>{}'
    bounds = dict.fromkeys(r.bound for r in report.regions)
    below = "bound by" + "".join(key.format(_colour(b), _e(b)) for b in bounds)
    return f'<h2>Where the time goes</h2>{_bars(rows)}<p class="dim">{below}</p>'


def _tip(region: RegionReport) -> str:
    """What a dot says when the mouse rests on it."""
    kind = "measured" if u.known(region.measured_s) else "predicted"
    lines = (
        f"{region.name}: {u.operators(region)}",
        f"{region.shape} by {u.engine(region)}",
        f"{u.seconds(region.best_s)} {kind}, {u.percent(region.fraction)} of the roofline",
        f"{u.flop_rate(_attained(region))} at {u.number(region.intensity)} FLOP/B, "
        f"bound: {region.bound}",
        *filter(None, [region.off]),
    )
    return "<title>" + "\n".join(map(_e, lines)) + "</title>"


def _point(region: RegionReport) -> tuple[float, float] | None:
    """Its place in the chart, if it has one."""
    x, y = region.intensity, _attained(region)
    return (x, y) if u.known(x) and x > 0 and u.known(y) and y > 0 else None


def _attained(region: RegionReport) -> float | None:
    time = region.best_s
    return region.flops / time if u.known(time) and time > 0 and u.known(region.flops) else None


def _colour(bound: str) -> str:
    return COLOURS.get(bound, "#8a8f98")


NARROW = {i for i, c in enumerate(u.COLUMNS) if c.title in ("meas. µs", "% roof")}


class Roof(NamedTuple):
    """A limit of the target: bytes per second (slanted), or operations per second (flat)."""

    label: str
    rate: float


def _roofs(report: Report) -> tuple[list[Roof], list[Roof]]:
    """Bandwidths and peaks of the target, if it is one we know by name."""
    if report.target.lower() not in names():
        return [], []
    t: Target = target(report.target).at_best
    slanted = [Roof(f"memory {u.bandwidth(t.stream)}", t.stream)]
    if t.cache_bandwidth > t.stream:
        slanted.append(Roof(f"cache {u.bandwidth(t.cache_bandwidth)}", t.cache_bandwidth))
    heads = (re.match(r"\w+", r.shape) for r in report.regions)
    dtypes = {head[0] for head in heads if head and head[0] in t.peak} or {"f32"}
    flat = {t.rate(d): f"{d} products {u.flop_rate(t.rate(d))}" for d in sorted(dtypes)}
    if t.has_tensor_cores:
        vector = t.rate("f32", product=False)
        flat.setdefault(vector, f"other arithmetic {u.flop_rate(vector)}")
    return slanted, [Roof(label, rate) for rate, label in flat.items()]


class Scale(NamedTuple):
    """A logarithmic axis: values from ``low`` to ``high`` on pixels from ``a`` to ``b``."""

    low: float
    high: float
    a: float
    b: float

    def __call__(self, value: float) -> float:
        span = math.log(self.high / self.low)
        part = math.log(min(max(value, self.low), self.high) / self.low) / span
        return self.a + part * (self.b - self.a)

    def decades(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        step = max(1, -(-(last - first) // 8))
        return [10.0**k for k in range(first, last + 1, step)]


def _scales(
    points: Sequence[tuple[float, float]], slanted: list[Roof], flat: list[Roof]
) -> tuple[Scale, Scale]:
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    if slanted and flat:
        xs += [top.rate / slanted[0].rate for top in flat]
        ys += [top.rate for top in flat]
    low, high = min(xs, default=0.1), max(xs, default=100.0)
    x = Scale(max(low / 4, high * 1e-8), high * 6, LEFT, WIDE - RIGHT)
    bottom, top = min(ys, default=1e9), max(ys, default=1e12)
    bottom = max(min(bottom / 3, top / 50), top * 1e-8)  # two decades at least
    return x, Scale(bottom, top * 3, HIGH - BOTTOM, TOP)


def _roofline(report: Report) -> str:
    if not report.regions:
        return ""
    slanted, flat = _roofs(report)
    points = [_point(r) for r in report.regions]
    x, y = _scales([p for p in points if p], slanted, flat)
    shapes = [*_axes(x, y), *_roof_lines(x, y, slanted, flat)]
    whole = u.total(r.best_s for r in report.regions) or math.nan
    for r, point in zip(report.regions, points, strict=True):
        colour, share = _colour(r.bound), r.best_s / whole
        radius = 3.5 + 14 * math.sqrt(share) if u.known(share) and share > 0 else 3.5
        at = (x(point[0]), y(point[1])) if point else (LEFT, HIGH - BOTTOM)
        fill = f'fill="{colour}" fill-opacity=".55"' if point else 'fill="none"'
        shapes.append(
            f'<circle class="dot" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:.1f}" {fill} '
            f'stroke="{colour}" pointer-events="all">{_tip(r)}</circle>'
        )
    unplaced = sum(p is None for p in points)
    hollow = f"{u.count(unplaced, 'region')} that only move data or have no known time."
    missing = f"Hollow, in the corner: {hollow}" if unplaced else ""
    roofs = "" if slanted else f"The limits of {report.target or 'the target'} are not known here."
    how = "One dot per region, its area by time; the closer to a line, the less there is to gain."
    image = f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="roofline chart">'
    chart = "\n".join((f'<div class="scroll">{image}', *shapes, "</svg></div>"))
    return _details("Roofline", f'{chart}<p class="dim">{how} {_e(missing)} {_e(roofs)}</p>', True)


def _words(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_e(words)}</text>'


def _axes(x: Scale, y: Scale) -> list[str]:
    shapes, grid = [], 'stroke="currentColor" stroke-opacity=".15"'
    for v in x.decades():
        shapes.append(f'<path d="M{x(v):.1f} {TOP}V{HIGH - BOTTOM}" {grid}/>')
        shapes.append(_words(x(v), HIGH - BOTTOM + 20, f"{v:g}"))
    for v in y.decades():
        label = u.flop_rate(v).replace(".00 ", " ").replace(".0 ", " ").removesuffix("FLOP/s")
        shapes.append(f'<path d="M{LEFT} {y(v):.1f}H{WIDE - RIGHT}" {grid}/>')
        shapes.append(_words(LEFT - 5, y(v) + 4, label, "end"))
    below = _words((LEFT + WIDE - RIGHT) / 2, HIGH - 10, "operations per byte moved")
    return [*shapes, below, _words(4, 18, "operations per second", "start")]


def _roof_lines(x: Scale, y: Scale, slanted: list[Roof], flat: list[Roof]) -> list[str]:
    shapes = []
    line = 'fill="none" stroke="currentColor" stroke-opacity=".75" stroke-width="1.5"'
    for i, roof in enumerate(slanted):
        top = max(f.rate for f in flat)
        first = max(x.low, y.low / roof.rate)
        a, b = (x(first), y(first * roof.rate)), (x(top / roof.rate), y(top))
        dash = ' stroke-dasharray="5 4"' if i else ""
        tilt = math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
        at = (a[0] + 0.3 * (b[0] - a[0]), a[1] + 0.3 * (b[1] - a[1]))
        side = -6 if i else 20  # the label of the cache above its line, that of memory below
        shapes.append(f'<path d="M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" {line}{dash}/>')
        shapes.append(
            f'<text transform="translate({at[0]:.1f} {at[1]:.1f}) rotate({tilt:.1f})" '
            f'y="{side}">{_e(roof.label)}</text>'
        )
    for roof in flat:
        start = x(roof.rate / slanted[-1].rate)
        shapes.append(f'<path d="M{start:.1f} {y(roof.rate):.1f}H{WIDE - RIGHT}" {line}/>')
        shapes.append(_words(WIDE - RIGHT, y(roof.rate) - 5, roof.label, "end"))
    return shapes
