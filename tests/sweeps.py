"""Long lists of cases, of which a few are in every run and all in ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
