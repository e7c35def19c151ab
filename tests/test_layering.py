"""Imports point one way: each layer knows itself and the layers below it, and nothing above.

The sources are parsed, never imported, so an import inside a function counts like any other. Only
what stands under ``if TYPE_CHECKING`` is free, because it does not exist at run time.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "deuteron"

# From the bottom up. Rooms on one line are neighbours and do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "log"),
    ("files", "kinds"),
    ("ir",),
    ("ops",),
    ("policy", "target"),
    ("passes",),
    ("codegen",),
    ("kernels",),
    ("engines",),
    ("explain",),  # the vocabulary of an explanation and its renderers; plan/ fills it in
    ("plan",),
    ("frontends",),
    ("functional",),
    ("model", "torch_captured"),
    ("nn", "optim", "augment", "quant", "distributed", "zoo", "torch_compile"),
    ("training", "api"),
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}

# The front door sees every room; only the command line comes in through it.
FRONT_DOOR = {"__init__", "__main__"}
USES_FRONT_DOOR = {"cli"}

# Rooms that stand alone: models in the zoo are what a user would bring, plain PyTorch.
ALONE = {"zoo"}

# What a room may never import, wherever the import stands.
BANNED = {"ir": {"triton"}, "ops": {"triton"}, "passes": {"triton"}}

# What `import deuteron` must not load: slow to import, or not there on every machine.
LAZY = ("triton", "onnx", "matplotlib")


@dataclass(frozen=True)
class Import:
    line: int
    module: str


@dataclass(frozen=True)
class Violation:
    file: str
    line: int
    module: str
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}: {self.rule}"


parsed = cache(ast.parse)


def imports(source: str, file: str) -> Iterator[Import]:
    """Every module that a source file names in an import, relative ones made absolute."""
    package = list(Path(file).parent.parts)  # also right for __init__.py
    for node in _runtime_nodes(parsed(source, file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from deuteron import ir` names a room; `from deuteron.ir import Node` does not.
                if base == PACKAGE and alias.name in RANK:
                    yield Import(node.lineno, f"{base}.{alias.name}")
                else:
                    yield Import(node.lineno, base)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                level = len(name.value) - len(name.value.lstrip("."))
                parents = package[: len(package) - level + 1] if level else []
                tail = name.value.lstrip(".")
                yield Import(node.lineno, ".".join([*parents, *([tail] if tail else [])]))


def violations(source: str, file: str) -> list[Violation]:
    """The imports of one file (its path as from the root, ``deuteron/...``) that break a rule."""
    room = Path(file).parts[1].removesuffix(".py")
    if room in FRONT_DOOR:
        return []
    if room not in RANK:
        rule = f"{room!r} has no place in LAYERS of tests/test_layering.py; give it one"
        return [Violation(file, 1, "(anything)", rule)]
    found = {(imp, rule) for imp in imports(source, file) if (rule := _broken(room, imp.module))}
    ordered = sorted(found, key=lambda pair: (pair[0].line, pair[0].module))
    return [Violation(file, imp.line, imp.module, rule) for imp, rule in ordered]


def _broken(room: str, module: str) -> str | None:
    top, *rest = module.split(".")
    if top in BANNED.get(room, ()):
        return f"{room} never imports {top}"
    if top != PACKAGE or (rest and rest[0] == room):
        return None
    if room in ALONE:
        return f"{room} imports nothing else from {PACKAGE}"
    if not rest:
        return None if room in USES_FRONT_DOOR else f"{room} lies below the package's __init__"
    if rest[0] in RANK and RANK[rest[0]] < RANK[room]:
        return None
    below = ", ".join(name for rooms in LAYERS[: RANK[room]] for name in rooms)
    return f"{room} may import only itself and what lies below it ({below or 'nothing'})"


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _is_import_call(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in {"import_module", "__import__"} and bool(call.args)


@pytest.fixture(scope="module")
def sources(repo: Path) -> list[tuple[str, str]]:
    """What every file of the package says, and its path as from the root."""
    files = sorted((repo / PACKAGE).rglob("*.py"))
    assert files, f"no sources under {repo / PACKAGE}"
    return [(p.read_text(encoding="utf-8"), p.relative_to(repo).as_posix()) for p in files]


def test_imports_point_one_way(sources: list[tuple[str, str]]) -> None:
    found = [violation for source in sources for violation in violations(*source)]
    assert not found, "imports against the grain:\n" + "\n".join(map(str, found))


def test_what_is_installed_is_what_is_imported(repo: Path, sources: list[tuple[str, str]]) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    nodes = [node for source in sources for node in ast.walk(parsed(*source))]
    plain = (alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names)
    others = (n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level)
    found = {name.partition(".")[0] for name in (*plain, *others)}
    found -= {*sys.stdlib_module_names, PACKAGE}

    def names(wanted: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", each)[0] for each in wanted}

    assert names(project["dependencies"]) == found - {"triton"}
    assert names(project["optional-dependencies"]["gpu"]) == {"triton"}
    assert (repo / PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    ("file", "source", "culprit"),
    [
        (
            "ops/norm.py",
            "import torch\nfrom deuteron.plan import Plan\n",
            ":2 imports deuteron.plan:",
        ),
        ("ops/norm.py", "from ..plan.cache import load\n", ":1 imports deuteron.plan.cache:"),
        ("ops/norm.py", "from .. import engines\n", ":1 imports deuteron.engines:"),
        ("ops/__init__.py", "from ..kernels import norm\n", ":1 imports deuteron.kernels:"),
        ("ops/norm.py", "def f():\n    import triton.language as tl\n", "ops never imports triton"),
        ("ir/node.py", "from importlib import import_module\nimport_module('triton')\n", ":2 "),
        ("engines/torch.py", "import deuteron as dt\n", "below the package's __init__"),
        ("errors.py", "from deuteron import ir\n", "(nothing)"),
        ("nn/conv.py", "from deuteron.optim import AdamW\n", "nn may import only itself"),
        ("zoo/resnet.py", "from deuteron.errors import DeuteronError\n", "imports nothing else"),
        ("helpers.py", "", "'helpers' has no place in LAYERS"),
    ],
)
def test_a_planted_violation_is_caught(file: str, source: str, culprit: str) -> None:
    found = violations(source, f"{PACKAGE}/{file}")
    assert len(found) == 1
    assert str(found[0]).startswith(f"{PACKAGE}/{file}:")
    assert culprit in str(found[0])


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from deuteron.cli import main\nfrom .plan import Plan\n"),
        ("ops/norm.py", "from . import base\nfrom ..ir import Node\nimport deuteron.errors\n"),
        (
            "ops/norm.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from deuteron.plan import P\n",
        ),
        ("engines/triton/generated.py", "def build():\n    import triton\n"),
        ("zoo/__init__.py", "from .resnet import resnet50\n"),
        ("cli.py", "import deuteron as dt\n"),
    ],
)
def test_what_is_allowed_passes(file: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}/{file}") == []


def test_type_checking_spares_only_its_own_branch() -> None:
    source = "if TYPE_CHECKING:\n    import deuteron.plan\nelse:\n    import deuteron.cli\n"
    assert [found.line for found in violations(source, f"{PACKAGE}/ops/norm.py")] == [4]


def _python(repo: Path, program: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(repo)}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=repo, env=env, capture_output=True, text=True
    )


def test_importing_the_package_and_planning_a_network_stay_light(repo: Path) -> None:
    # torch first: what torch itself loads is not ours to judge.
    done = _python(
        repo,
        f"import sys, torch; before = set(sys.modules); import {PACKAGE} as dt, {PACKAGE}.nn\n"
        f"heavy = {(*LAZY, 'torch._dynamo')}\n"
        "print([name for name in heavy if name in sys.modules and name not in before])\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()\n"
        "dt.optimize(model, torch.ones(1, 3, 8, 8), find=False)\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])\n",
    )
    assert done.returncode == 0, done.stderr
    by_import, by_planning = done.stdout.splitlines()
    assert by_import == "[]", f"`import {PACKAGE}` loads {by_import}"
    assert by_planning == "[]", f"planning a network loads {by_planning}"


def test_the_package_imports_without_its_optional_parts(repo: Path) -> None:
    # Every finder goes blind to them, so `find_spec` too answers as if they were absent.
    program = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {LAZY} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
try:
    import triton
except ModuleNotFoundError:
    import {PACKAGE}
else:
    sys.exit("the blocker does not block")
"""
    done = _python(repo, program)
    assert done.returncode == 0, done.stderr


# In pieces, or this file would report itself.
_REGISTRIES = ("py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org")
_FOLDERS = ("work", "root", "home")
_OF_ONE_MACHINE = re.compile(
    "|".join(
        [*map(re.escape, _REGISTRIES), *(rf"(?<![\w.~\-/}}])/{folder}/" for folder in _FOLDERS)]
    ).encode()
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see " + "/wo" + "rk/main", True),
        ('"' + "/ro" + "ot/.cache" + '"', True),
        ("https://py" + "pi.org/simple", True),
        ("docs/work/notes and frame" + "work/", False),
        ("https://example.com/home/page", False),
    ],
)
def test_machine_words_are_recognised(text: str, found: bool) -> None:
    assert bool(_OF_ONE_MACHINE.search(text.encode())) is found


def test_nothing_names_one_machine(repo: Path, repo_files: list[Path]) -> None:
    found = []
    for path in repo_files:
        content = path.read_bytes()
        if b"\0" in content[:8192]:  # binary
            continue
        for match in _OF_ONE_MACHINE.finditer(content):
            line = content.count(b"\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(repo)}:{line} says {match.group().decode()!r}")
    assert not found, "these belong to one machine, not to the repository:\n" + "\n".join(found)
