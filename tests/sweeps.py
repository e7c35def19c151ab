"""Long lists of cases, of which a few are in every run and all in ``make test-all``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch


def sweep_unless(needed: bool) -> Any:
    """The marks of a case that every run needs, or of one that few do."""
    return () if needed else pytest.mark.sweep


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases to parametrise a test with: every so-manieth, the first included, is in every run."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=sweep_unless(not k % count)
        )
        for k, case in enumerate(cases)
    ]


def ways(most: int) -> list[Any]:
    """Types of 16 bits, which the same code is for, and how many ways of running it to try: in one
    of them many, in the other the first few unless it is a sweep."""
    many = pytest.param(torch.float16, most, marks=pytest.mark.sweep)
    return [(torch.bfloat16, most), (torch.float16, 2), many]


def every_pair(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """As few of the cases as have each pair of values of two places."""
    found = list(cases)
    missed = set(left_out([dict(enumerate(case)) for case in found], pairs=True))
    return [case for k, case in enumerate(found) if k not in missed]


def left_out(cases: Sequence[dict[str, Any]], pairs: bool) -> list[int]:
    """Which of the cases, each a value for every parameter, nobody misses if each value, or each
    pair of values of two parameters, is to occur. Of cases that bring as many new values, the one
    with most new pairs is taken; of those the one whose values occurred least, so that they take
    turns."""
    values = [[(name, id(value)) for name, value in case.items()] for case in cases]
    rest = {k: ({(v,) for v in vs}, set(combinations(vs, 2))) for k, vs in enumerate(values)}
    needed = set().union(*(part for both in rest.values() for part in both[: 1 + pairs]))
    kept: set[Any] = set()
    uses: Counter[Any] = Counter()
    while needed - kept:
        best = max(
            rest,
            key=lambda k: (*(len(s - kept) for s in rest[k]), -sum(uses[v] for v in values[k])),
        )
        kept.update(*rest.pop(best))
        uses.update(values[best])
    return sorted(rest)
