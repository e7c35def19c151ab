"""Whole plans to choose from, combined from what a search measured, each under another wish.

A search keeps the quickest candidate of each region, and the times, errors and scratch memory of
all others. So it can offer other plans as well: for each wish, the quickest plan that grants it in
every region. Regions stay cut as they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deuteron.errors import DeuteronError
from deuteron.plan.acceptance import LIBRARIES
from deuteron.plan.choose import MARGIN, Choice, Option

ABOUT = 1.5  # errors up to this many times the least count as equal: inputs were random numbers


@dataclass(frozen=True)
class Alternative:
    """One way to run all regions. ``names``: the wishes that it grants. ``seconds``: the sum over
    its regions; ``workspace``: the most scratch memory of a region in bytes; ``error``: the largest
    error of a region, as far as errors were measured; ``changed``: how many regions the quickest
    plan runs differently."""

    names: tuple[str, ...]
    choices: tuple[Choice, ...]
    changed: int = 0

    @property
    def seconds(self) -> float:
        return sum(c.best_s for c in self.choices)

    @property
    def workspace(self) -> int:
        return max((c.option.workspace for c in self.choices), default=0)

    @property
    def error(self) -> float | None:
        return max(
            (c.option.error for c in self.choices if c.option.error is not None), default=None
        )

    def __str__(self) -> str:
        error = "" if self.error is None else f", error {self.error:.1e}"
        what = f"{self.seconds * 1e3:.3g} ms, {self.workspace / 1e6:.3g} MB of workspace{error}"
        return f"{', '.join(self.names)}: {what}"


Wish = Callable[[Sequence[Option]], Sequence[Option]]  # a region's options → those that grant it


def _least_workspace(options: Sequence[Option]) -> Sequence[Option]:
    least = min(o.workspace for o in options)
    return [o for o in options if o.workspace == least]


def _most_exact(options: Sequence[Option]) -> Sequence[Option]:
    least = min(map(_error, options))
    return [o for o in options if _error(o) <= ABOUT * least]


def _error(option: Option) -> float:
    """The error of an option; 0 for torch where it has none because it was the reference itself."""
    unknown = 0.0 if option.candidate.engine == "torch" else math.inf
    return unknown if option.error is None else option.error


WISHES: dict[str, Wish] = {
    "quickest": lambda options: options,
    "deterministic": lambda options: [o for o in options if o.candidate.deterministic],
    "least workspace": _least_workspace,
    "most exact": _most_exact,
    "libraries alone": lambda options: [o for o in options if o.candidate.engine in LIBRARIES],
}


def wholes(choices: Sequence[Choice]) -> tuple[Alternative, ...]:
    """Return the plans, the quickest first; plans that are equal are one, with all their names."""
    if not any(map(_raced, choices)):
        return ()
    made: dict[tuple[Option, ...], Alternative] = {}
    for name, wish in WISHES.items():
        chosen = [_chosen(choice, wish) for choice in choices]
        options = tuple(c.option for c in chosen if c is not None)
        if len(options) < len(choices):
            continue  # a region has no such candidate
        same = made.get(options, Alternative((), tuple(c for c in chosen if c is not None)))
        made[options] = replace(same, names=(*same.names, name))
    first = next(iter(made))
    for options, whole in made.items():
        changed = sum(a.candidate != b.candidate for a, b in zip(options, first, strict=True))
        made[options] = replace(whole, changed=changed)
    return tuple(sorted(made.values(), key=lambda w: (w.changed > 0, w.seconds)))


def _raced(choice: Choice) -> list[Option]:
    return [o for o in choice.options if o.measured_s is not None and not o.rejected]


def _chosen(choice: Choice, wish: Wish) -> Choice | None:
    """Choose the quickest option that the wish allows; what runs now, if that is as quick."""
    now = choice.option
    others = [o for o in _raced(choice) if o.candidate != now.candidate]
    # a region that the search did not reach has predictions only
    allowed = wish([now, *others]) or wish([o for o in choice.options if not o.rejected])
    if not allowed:
        return None
    best = min(allowed, key=lambda o: o.best_s)
    keep = now in allowed and best.best_s >= now.best_s * MARGIN
    return choice if keep else replace(choice, option=best)


def named(found: Sequence[Alternative], name: str) -> Alternative:
    """The plan of that name."""
    for whole in found:
        if name in whole.names:
            return whole
    asked, known = f"pick({name!r})", [n for whole in found for n in whole.names]
    if not found:
        remedy = "compile with find=True; what was loaded from a file is not measured, either"
        raise DeuteronError("no candidate was measured", asked=asked, remedy=remedy)
    wrong = f"there is no plan {name!r}"
    if name in WISHES:
        wrong = f"no plan is {name!r}: some region has no such candidate that was measured"
    raise DeuteronError(wrong, asked=asked, remedy=f"pick one of {', '.join(map(repr, known))}")
