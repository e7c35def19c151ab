"""The house is in order: its papers exist, their links lead somewhere, its files stay small."""

import re
import time
from itertools import combinations, product
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from tests.sweeps import left_out

PAPERS = ("README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md")
DOCS = ("docs/pipeline.md", "docs/adding-an-operator.md", "docs/adding-an-engine.md")
MOST_LINES = 500

_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
_DEFINITION = re.compile(r"^ {0,3}\[[^\]^]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=[\"']([^\"']+)[\"']")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def links(text: str) -> list[tuple[int, str]]:
    """Line and destination of every relative link in a Markdown text, code left out."""
    prose = _CODE.sub(lambda code: "\n" * code.group().count("\n"), text)
    found = [
        (prose.count("\n", 0, match.start()) + 1, unquote(match.group(1)).partition("#")[0])
        for pattern in (_LINK, _DEFINITION, _HTML)
        for match in pattern.finditer(prose)
    ]
    return [(line, to) for line, to in sorted(found) if to and not _ELSEWHERE.match(to)]


@pytest.mark.parametrize("name", PAPERS + DOCS)
def test_the_papers_are_there(repo: Path, name: str) -> None:
    path = repo / name
    assert path.is_file(), f"{name} is missing"
    assert path.read_text(encoding="utf-8").strip(), f"{name} is empty"


def test_the_changelog_has_an_unreleased_section(repo: Path) -> None:
    text = (repo / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[?Unreleased\]?\s*$", text, re.MULTILINE)


def test_links_are_found_where_they_are() -> None:
    text = (
        "[a](docs/a.md#part) and ![b](b.png 'title')\n```\n[no](code.md)\n```\n`[no](code.md)`\n"
        "[web](https://example.com) [here](#top) <img src='c.svg'>\n\n[ref]: d.md\n"
    )
    assert links(text) == [(1, "b.png"), (1, "docs/a.md"), (6, "c.svg"), (8, "d.md")]


def test_relative_links_resolve(repo: Path, repo_files: list[Path]) -> None:
    broken = [
        f"{path.relative_to(repo)}:{line} links to {to}"
        for path in repo_files
        if path.suffix == ".md"
        for line, to in links(path.read_text(encoding="utf-8"))
        if not (repo / to.lstrip("/") if to.startswith("/") else path.parent / to).exists()
    ]
    assert not broken, "links that lead nowhere:\n" + "\n".join(broken)


def test_files_stay_small(repo: Path) -> None:
    long = [
        f"{path.relative_to(repo)}: {lines} lines"
        for path in sorted((repo / "deuteron").rglob("*.py"))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) >= MOST_LINES
    ]
    assert not long, f"files of {MOST_LINES} lines or more hold two ideas:\n" + "\n".join(long)


def test_the_readme_quotes_the_records(repo: Path) -> None:
    from bench.readme import FIGURE, figure, updated

    text = (repo / "README.md").read_text(encoding="utf-8")
    assert updated(text) == text, "run: python -m bench.readme"
    assert FIGURE.read_text(encoding="utf-8") == figure(), "run: python -m bench.readme"


@pytest.mark.parametrize(("pairs", "most"), [(False, 5), (True, 20)])
def test_no_value_and_no_pair_is_left_out(pairs, most):
    """Of the markers each_value and each_pair: all of them, in as few cases as there can be."""
    sizes = {"a": "vwxyz", "b": "klmn", "c": "pq"}
    cases = [dict(zip(sizes, case, strict=True)) for case in product(*sizes.values())]
    gone = set(left_out(cases, pairs))
    kept = [case for k, case in enumerate(cases) if k not in gone]
    for name, values in sizes.items():
        assert {case[name] for case in kept} == set(values)
    if pairs:
        for one, other in combinations(sizes, 2):
            found = {(case[one], case[other]) for case in kept}
            assert found == set(product(sizes[one], sizes[other]))
    assert len(kept) <= most


def test_benchmarks_may_go_by_the_time_that_a_thread_was_running(monkeypatch):
    """On a machine that others compute on too; of several threads there is no such time."""
    from bench.harness import cpu_clock, describe

    assert cpu_clock() is time.perf_counter and "clock" not in describe("cpu")
    monkeypatch.setenv("BENCH_CLOCK", "thread")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu_clock() is time.thread_time and "clock" in describe("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(SystemExit, match="OMP_NUM_THREADS=1"):
        cpu_clock()


@torch.no_grad()
def test_onnx_runtime_runs_what_the_older_exporter_cannot_write(capfd):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    from bench.harness import onnx_runtime

    class Steps(torch.nn.Module):
        def forward(self, x, y):
            return torch.diff(x, dim=-1) * y

    x, y = torch.arange(12.0).reshape(3, 4) ** 2, torch.tensor(2.0)
    run = onnx_runtime(Steps().eval(), x, y)
    assert torch.equal(run(), Steps()(x, y))
