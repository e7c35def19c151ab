"""What the pages and the examples say is what the code does: all of it is run, on the CPU.

The ``python`` blocks of a page are one program, run from top to bottom. A ``text`` block right
below a ``python`` block is what that block prints; ``<!-- varies -->`` above it says that times or
engines depend on the machine, so that it is only checked that something was printed. A ``py`` block
is no program by itself; a test of its own puts it where it belongs.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_ops
import torch

import deuteron as dt
from deuteron.ops import TABLE, OpDef, table

ENGINES = importlib.import_module("deuteron.engines")  # dt.engines is the function of that name
REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
EXAMPLES = sorted((REPO / "examples").glob("*.py"))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A piece of Python on a page, the line it stands on, and what it is said to print."""

    line: int
    code: str
    printed: str | None = None
    varies: bool = False


def blocks(text: str) -> list[Block]:
    """The Python of a page, each piece with the text block that stands right below it."""
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(text):
        between, line = text[end : match.start()], text.count("\n", 0, match.start()) + 1
        if match[1] == "python":
            found.append(Block(line + 1, match[2]))
        elif match[1] == "text" and found and between.strip() in ("", "<!-- varies -->"):
            last = found[-1]
            if last.printed is None:
                found[-1] = Block(last.line, last.code, match[2], bool(between.strip()))
        end = match.end()
    return found


def prints(block: Block, page: str, space: dict[str, Any]) -> str:
    """Run a block in ``space``; what it printed."""
    out = io.StringIO()
    padded = "\n" * (block.line - 1) + block.code  # a traceback names the line of the page
    with contextlib.redirect_stdout(out):
        exec(compile(padded, page, "exec", dont_inherit=True), space)
    return out.getvalue()


@pytest.fixture(autouse=True)
def as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, no GPU, and afterwards no trace of what was registered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    operators, added = dict(TABLE), list(ENGINES._added)
    yield
    for name in set(TABLE) - set(operators):
        del TABLE[name]
        delattr(dt.Graph, name)
    table.infer.cache_clear()
    ENGINES._added[:] = added
    ENGINES._from_entry_points.cache_clear()


def program() -> dict[str, Any]:
    """What a page starts from: nothing. Classes defined on it need a module to live in."""
    module = types.ModuleType("page")
    return module.__dict__


def for_explanation() -> dict[str, Any]:
    """That page speaks of a model without making one."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    given = {"dt": dt, "Path": Path, "model": model, "example": torch.randn(2, 8)}
    return program() | given


START = {"reading-an-explanation.md": for_explanation}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_do_what_they_say(page: Path) -> None:
    space = START.get(page.name, program)()
    found = blocks(page.read_text(encoding="utf-8"))
    assert found, f"{page.name} shows no code"
    dt.functional.delegation(True)  # as it is for a reader
    for block in found:
        printed = prints(block, page.name, space)
        where = f"{page.name}, line {block.line}"
        if block.varies:
            assert printed.strip(), where
        elif block.printed is not None:
            got = [line.rstrip() for line in printed.rstrip().splitlines()]
            assert got == block.printed.rstrip().splitlines(), where


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_training_reduces_the_loss() -> None:
    main = runpy.run_path(str(REPO / "examples/training_graph.py"))["main"]
    before, after = main(steps=60)
    assert after < before / 2


def test_faster_gpus_are_predicted_to_be_faster() -> None:
    main = runpy.run_path(str(REPO / "examples/plan_for_a_gpu_you_do_not_have.py"))["main"]
    seconds = main()
    assert seconds["l4"] > seconds["a100"] > seconds["h100"] >= seconds["h200"] > seconds["b200"]


# ---- the worked examples of the two guides ----------------------------------------------------


def definitions(source: str) -> dict[str, str]:
    """Functions, classes and constants of a file by name, as normalised source."""
    return {
        getattr(node, "name", None) or ast.unparse(node.targets[0]): ast.unparse(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
    }


@pytest.mark.parametrize(
    ("page", "example", "names"),
    [
        ("adding-an-operator.md", "custom_operator.py", {"softcap"}),
        ("adding-an-engine.md", "custom_engine.py", {"LinearRelu"}),
    ],
)
def test_page_and_example_show_the_same(page: str, example: str, names: set[str]) -> None:
    shown: dict[str, str] = {}
    for block in blocks((REPO / "docs" / page).read_text(encoding="utf-8")):
        for name, text in definitions(block.code).items():
            shown.setdefault(name, text)
    kept = definitions((REPO / "examples" / example).read_text(encoding="utf-8"))
    for name in names:
        assert shown[name] == kept[name], f"{name} differs between {page} and {example}"


def check_like_ours(op: OpDef) -> None:
    """The tests that every operator of the table goes through, over its samples."""
    assert op.samples() and len(op.doc) > 8
    for sample in op.samples():
        test_ops.test_inference_says_what_the_reference_returns(op, sample, in_all=True)
        if sample.grad:
            test_ops.test_gradients_match_finite_differences(op, sample, directions=3)


def test_the_operator_of_the_guide_passes_our_own_tests() -> None:
    op = runpy.run_path(str(REPO / "examples/custom_operator.py"))["softcap"]
    dt.register_op(op)
    check_like_ours(op)


def test_the_formula_of_the_guide_is_all_that_an_activation_needs() -> None:
    """The operator as the guide adds it inside the library: its function, in the family's file."""
    page = (REPO / "docs/adding-an-operator.md").read_text(encoding="utf-8")
    shown = definitions(blocks(page)[0].code)["softcap"].replace("dt.elementwise", "elementwise")
    path = REPO / "deuteron/ops/activation.py"
    text = path.read_text(encoding="utf-8")
    family = types.ModuleType("family")
    exec(compile(f"{text}\n\n{shown}\n", str(path), "exec"), family.__dict__)
    dt.register_op(family.softcap)
    check_like_ours(family.softcap)


def test_an_engine_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (REPO / "examples/custom_engine.py").read_text(encoding="utf-8")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/engine.py").write_text(source, encoding="utf-8")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    page = (REPO / "docs/adding-an-engine.md").read_text(encoding="utf-8")
    line = re.search(r"^linear_relu = .*$", page, re.MULTILINE)
    assert line is not None, "the page no longer shows the entry point"
    entry = line[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[deuteron.engines]\n{entry}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ENGINES._from_entry_points.cache_clear()
    try:
        assert "linear_relu" in [engine.name for engine in dt.engines()]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
            del sys.modules[name]
