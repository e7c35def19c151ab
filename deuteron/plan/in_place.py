"""Decides by price whether parts of a concatenation are written straight into the whole.

Two forms of a graph are fused and priced, or measured: the graph as it is, and with every
concatenation in place that allows it (``passes/in_place.py``). A kernel that writes or reads with
gaps may be slower, and the results of libraries that cannot write there have to be copied. A part
that costs more in place than a copy of it is copied. If a buffer, with all its parts and all
regions that read them, gains nothing, it is left as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deuteron.engines import engine
from deuteron.engines.libraries import copy_seconds
from deuteron.engines.recipes import RecipeEngine
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.passes import PassRecord, Veto, fuse
from deuteron.passes.in_place import CONCAT, Placed, concats_in_place
from deuteron.plan.choose import Choice, Pick, Survey, marked
from deuteron.plan.region_borders import Join, chosen, joins
from deuteron.policy import Policy
from deuteron.target import Target

NAME = "concat in place"
enabled = True  # for comparing plans with and without it
REJOINED = ("cuda",)  # where joins are looked for; on a CPU our products run their epilogues anyway
LINE = {"cuda": 16, "cpu": 1}  # kernels want parts to begin at a multiple of this many bytes
WORTH = 0.995  # share of the time without it that a form in place must stay below


@dataclass(frozen=True)
class Form:
    """A graph as regions, and the joins that may replace some of them (``region_borders.py``)."""

    placed: Placed
    regions: tuple[Region, ...]
    vetoes: tuple[Veto, ...]
    others: tuple[Join, ...]

    @property
    def graph(self) -> Graph:
        return self.placed.graph

    @property
    def all(self) -> tuple[Region, ...]:
        """All regions that might be run."""
        return (*self.regions, *(part for join in self.others for part in join.parts))


def form_of(placed: Placed | Graph, target: Target, policy: Policy) -> Form:
    """Fuse a graph for a target."""
    placed = placed if isinstance(placed, Placed) else Placed(placed, placed)
    placed = replace(placed, graph=marked(placed.graph, policy))
    regions, vetoes = fuse(placed.graph, gates=target.is_cuda)
    others = joins(placed.graph, regions) if target.kind in REJOINED else []
    return Form(placed, regions, vetoes, tuple(others))


def in_place(plain: Form, pick: Pick, survey: Survey, like: Form | None = None) -> Form:
    """Return the graph with those concatenations in place that are cheaper that way, by the prices
    of ``pick``. ``like``: consider only the concatenations that this form has in place."""
    if not enabled or all(node.op != CONCAT for node in plain.graph.nodes):
        return plain
    target, graph = survey.target, plain.graph

    def placed(only: Collection[str] | None, apart: Collection[str]) -> Form:
        made = concats_in_place(graph, LINE[target.kind], only, apart)
        return form_of(made, target, survey.policy)

    def choices(form: Form) -> list[Choice]:
        return chosen(form.regions, form.others, pick, survey)

    only = None if like is None else like.placed.concats
    form = placed(None, ()) if like is None else like
    if not form.placed.wholes:
        return plain
    before, after = choices(plain), choices(form)
    if dear := _dearer(form.placed, before, after, target):
        form = placed(only, {*form.placed.apart, *dear})
        after = choices(form)
    won = _won(form.placed, before, after, target)
    if not won:
        return plain
    kept = [whole for buffer in won for whole in form.placed.wholes[buffer]]
    return form if len(won) == len(form.placed.wholes) else placed(kept, form.placed.apart)


def untouched(plain: Form) -> list[Region]:
    """Regions that are the same whichever concatenations are in place; none if there are no
    concatenations."""
    concats = [node for node in plain.graph.nodes if node.op == CONCAT]
    if not concats:
        return []
    moved = {value for node in concats for value in (*node.uses, *node.outputs)}
    return [r for r in plain.regions if moved.isdisjoint((*r.inputs, *r.outputs))]


def as_recorded(graph: Graph, record: object, target: Target) -> Placed:
    """Put those concatenations in place that a file lists (:func:`record_of`); none if the record
    is damaged."""
    try:
        assert isinstance(record, Mapping)
        only, apart = ([str(v) for v in record[key]] for key in ("concats", "copied"))
    except (AssertionError, KeyError, TypeError):
        return Placed(graph, graph)
    return concats_in_place(graph, LINE[target.kind], only, apart) if only else Placed(graph, graph)


def record_of(placed: Placed) -> dict[str, list[str]]:
    """Which concatenations are in place, as plain data for a file."""
    return {"concats": sorted(placed.concats), "copied": sorted(placed.apart)}


def pass_record(placed: Placed, seconds: float) -> PassRecord:
    """What an explanation says about concatenations in place."""
    parts = sum(len(placed.parts(buffer)) for buffer in placed.wholes)
    fired = {"concat that moves nothing": len(placed.concats), "part written in place": parts}
    fired["part copied to its place"] = len(placed.copies)
    fired = {rule: n for rule, n in fired.items() if n}
    return PassRecord(NAME, fired, len(placed.plain.nodes), len(placed.graph.nodes), seconds)


def _dearer(
    placed: Placed, before: Sequence[Choice], after: Sequence[Choice], target: Target
) -> list[str]:
    """Parts for which the regions that make or read them take longer, by more than a copy takes."""
    readers: dict[str, list[Choice]] = {}
    for choice in after:
        for value in (*choice.region.inputs, *choice.region.outputs):
            readers.setdefault(value, []).append(choice)
    plain = {_made(c): c for c in before}
    found = []
    for value in (v for buffer in placed.wholes for v in placed.parts(buffer)):
        both = [(c, plain[_made(c)]) for c in readers.get(value, ()) if _made(c) in plain]
        more = sum(_seconds(now, placed, target) - then.best_s for now, then in both)
        if more > copy_seconds(placed.graph.types[value], target):
            found.append(value)
    return found


def _won(
    placed: Placed, before: Sequence[Choice], after: Sequence[Choice], target: Target
) -> list[str]:
    """The buffers with which the choices that differ between the forms take less time."""
    same = {_named(c) for c in before} & {_named(c) for c in after}
    sides = [[c for c in choices if _named(c) not in same] for choices in (before, after)]
    groups = _Groups()
    for choice in (*sides[0], *sides[1]):
        groups.join(_made(choice))
    for buffer, wholes in placed.wholes.items():
        copies = (v for v, where in placed.copies.items() if where == buffer)
        groups.join((buffer, *wholes, *placed.parts(buffer), *copies))
    totals: dict[str, list[float]] = {}
    for side, choices in enumerate(sides):
        for choice in choices:
            total = totals.setdefault(groups.of(next(iter(_made(choice)))), [0.0, 0.0])
            total[side] += _seconds(choice, placed, target) if side else choice.best_s
    won = []
    for buffer in placed.wholes:
        without, within = totals.get(groups.of(buffer), [0.0, 0.0])
        if within < WORTH * without:
            won.append(buffer)
    return won


def _made(choice: Choice) -> frozenset[str]:
    """The values that are computed in a region, by which it is recognised in either form."""
    return frozenset(v for node in choice.region.nodes for v in node.outputs)


def _named(choice: Choice) -> tuple[frozenset[str], str]:
    return _made(choice), choice.region.text


def _seconds(choice: Choice, placed: Placed, target: Target) -> float:
    """The time of a region, with copies of the parts that its kernel cannot write in place. A part
    with gaps needs no such copy here: its price has it already, or engines that cannot write gaps
    were not asked."""
    total, by = choice.best_s, engine(choice.candidate.engine)
    known = getattr(by, "strided", False)
    if isinstance(by, RecipeEngine):
        known = by.writes_gaps(choice.candidate, target)
    for value in choice.region.outputs:
        kind = placed.graph.types[value]
        joined = value in placed.spots and value not in placed.concats
        if joined and kind.is_dense and not known:
            total += copy_seconds(kind, target)
    return total


class _Groups:
    """Sets of values that belong together (union-find)."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def of(self, value: str) -> str:
        while (above := self._above.get(value, value)) != value:
            self._above[value] = self._above.get(above, above)
            value = above
        return value

    def join(self, values: Iterable[str]) -> None:
        first, *rest = values
        for value in rest:
            self._above[self.of(value)] = self.of(first)


def hoped(survey: Survey) -> Pick:
    """Return a function that picks what is predicted to be quickest, even if only a measurement may
    choose it. That tells whether a form is worth measuring."""

    def pick(region: Region) -> Choice:
        options, refusals = survey.ask(region)
        usable = [o for o in options if not o.rejected] or options
        return Choice(region, usable[0], options, refusals)

    return pick


def timed(run: Callable[[], Form]) -> tuple[Form, PassRecord]:
    """Return what ``run`` returns, and a record of it for the explanation."""
    begin = time.perf_counter()
    form = run()
    return form, pass_record(form.placed, time.perf_counter() - begin)
