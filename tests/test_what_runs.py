"""The modules of docs/what-runs.md do what that page says: run as in eager torch, or are refused in
words that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import what_runs
from bench.module_cases import CASES, RANDOM
from tests.sweeps import one_in

# Refusals that come from a line of forward's, and name it.
OF_A_LINE = ("branches on", "a number that", "depends on the values", "torch.cond", "numpy")
NAMED = [(title, name) for title, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("title", "name"), one_in(12, NAMED))
def test_a_module_runs_or_is_refused_in_words_that_fit(title, name, repo: Path):
    case = CASES[title][name]
    came = what_runs.outcome(case)
    assert what_runs.as_expected(case, came), came
    page = (repo / "docs" / "what-runs.md").read_text(encoding="utf-8")
    if case.says.startswith(OF_A_LINE):
        assert "module_cases.py:" in came.where, came
    if case.says not in ("", RANDOM):
        assert what_runs.row(name, came) in page, "run: python -m bench.what_runs"


@pytest.mark.parametrize("name", ["a branch", "item", "mask as index", "its own error"])
def test_a_refusal_names_the_users_line(name):
    came = what_runs.outcome(CASES["control flow and values"][name])
    assert came.what == "refused" and "bench/module_cases.py:" in came.where


def test_the_page_lists_every_module(repo: Path):
    page = (repo / "docs" / "what-runs.md").read_text(encoding="utf-8")
    assert len(NAMED) >= 200
    assert not [name for _, name in NAMED if name not in page], "run: python -m bench.what_runs"
