"""The cache file: damage costs the damaged entry and nothing else, and nothing is ever lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes import check_right

import deuteron as dt
from deuteron import files
from deuteron.codegen import llvm
from deuteron.files import locked, replacing, source_digest, write_atomic
from deuteron.plan import cache as cache_module
from deuteron.plan import records
from deuteron.plan.cache import FORMAT, Cache, checksum, environment
from deuteron.target import remember_cpu
from tests.test_layering import imports

CPU = torch.device("cpu")
ROW = {
    "engine": "torch",
    "version": "1",
    "knobs": {},
    "seconds": 1e-5,
    "error": 1e-8,
    "rejected": "",
    "torch_error": 1e-8,
    "reference": "float64",
}


def filled(path: Path, *regions: str) -> Cache:
    cache = Cache.open(path)
    for region in regions:
        cache.put(region, f"text of {region}", CPU, dt.Policy(), [dict(ROW, seconds=len(region))])
    cache.save()
    return cache


def known(path: Path, *regions: str) -> list[str]:
    cache = Cache.open(path)
    return [r for r in regions if cache.get(r, CPU, dt.Policy()) is not None]


def sign(entry: dict) -> dict:
    entry["sum"] = checksum(entry)
    return entry


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "measured.jsonl"


def test_what_is_put_is_got_back(path):
    filled(path, "a", "bb")
    again = Cache.open(path)
    assert again.problems == [] and len(again.entries) == 2
    assert again.get("bb", CPU, dt.Policy())[0]["seconds"] == 2
    assert again.get("bb", CPU, dt.Policy(deterministic=True)) is None
    assert again.get("c", CPU, dt.Policy()) is None


def test_a_path_may_be_a_string(path):
    cache = Cache(str(path))
    cache.put("a", "text of a", CPU, dt.Policy(), [ROW])
    cache.save()
    assert known(path, "a") == ["a"]
    assert len(Cache(str(path)).entries) == 1  # read at once


def test_a_missing_file_is_an_empty_cache(tmp_path):
    cache = Cache.open(tmp_path / "nowhere" / "x.jsonl")
    assert cache.entries == {} and cache.problems == []
    cache.save()
    assert not (tmp_path / "nowhere").exists(), "nothing to say, nothing written"


def test_the_file_is_text_in_a_fixed_order(path):
    filled(path, "b", "a")
    other = path.with_name("other.jsonl")
    filled(other, "a", "b")
    assert path.read_bytes() == other.read_bytes()
    lines = path.read_text().splitlines()
    assert lines == sorted(lines) and all(json.loads(line)["format"] == FORMAT for line in lines)
    assert json.loads(lines[0])["environment"]["torch"] == torch.__version__


def test_a_last_line_cut_anywhere_costs_that_line_only(path):
    filled(path, "a", "b")
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    lost = json.loads(whole[start:])["region"]
    kept = "a" if lost == "b" else "b"
    for end in range(start, len(whole) - 1):  # the last is the newline, which nobody misses
        path.write_bytes(whole[:end])
        cache = Cache.open(path)
        assert len(cache.entries) == 1 and cache.get(kept, CPU, dt.Policy()), end
        assert len(cache.problems) == (end > start), end
    path.write_bytes(whole[:-1])
    assert known(path, "a", "b") == ["a", "b"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda e: e["options"][0].update(seconds=1e-9),
        lambda e: e.update(region="other"),
        lambda e: e["policy"].update(deterministic=True),
        lambda e: e["environment"].update(torch="0"),
        lambda e: e.update(sum="0" * 16),
        lambda e: e.pop("sum"),
        lambda e: e.pop("options"),
        lambda e: e.update(extra="__import__('os').system('true')"),
    ],
)
def test_an_edited_entry_is_not_used(path, edit):
    filled(path, "a", "b")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    edit(entries[1])
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    cache = Cache.open(path)
    assert len(cache.entries) == 1 and len(cache.problems) == 1 and "line 2" in cache.problems[0]


@pytest.mark.parametrize(
    "row",
    [
        {},
        dict(ROW, seconds="fast"),
        dict(ROW, seconds=-1.0),
        dict(ROW, seconds=True),
        dict(ROW, error=[1]),
        dict(ROW, knobs=[]),
        dict(ROW, engine=None),
        dict(ROW, rejected=0),
        {k: v for k, v in ROW.items() if k != "torch_error"},
        "text",
        None,
        7,
    ],
)
def test_a_signed_entry_with_odd_contents_is_not_used(path, row):
    cache = filled(path, "a")
    entry = dict(next(iter(cache.entries.values())), region="odd", options=[row])
    with path.open("a") as file:
        file.write(json.dumps(sign(entry)) + "\n")
    again = Cache.open(path)
    assert len(again.entries) == 1 and len(again.problems) == 1


def test_another_environment_is_kept_and_not_used(path):
    cache = filled(path, "a")
    entry = dict(next(iter(cache.entries.values())))
    entry["environment"] = {**environment(CPU), "torch": "1.0"}
    with path.open("a") as file:
        file.write(json.dumps(sign(entry)) + "\n")
    filled(path, "b")
    assert len(Cache.open(path).entries) == 3
    path.write_text(json.dumps(entry) + "\n")
    assert known(path, "a") == [] and Cache.open(path).problems == []


def test_another_format_is_kept_for_the_version_that_wrote_it(path):
    filled(path, "a")
    future = [{"format": 99, "what": "ever"}, {"format": 99, "how": ["so"]}]
    with path.open("a") as file:
        file.writelines(json.dumps(f) + "\n" for f in future)
    cache = filled(path, "b")
    assert sum("format 99" in p for p in cache.problems) == 2
    left = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(f in left for f in future) and len(left) == 4
    other = path.with_name("other.jsonl")
    filled(other, "c").merge(path)
    assert all(f in map(json.loads, other.read_text().splitlines()) for f in future)


GARBAGE = {
    "binary": bytes(range(256)) * 3,
    "no text": b"\xff\xfe\x00\x00",
    "deep": b"[" * 100_000,
    "long number": b"9" * 10_000,
    "a list": b"[1, 2, 3]",
    "a number": b"7",
    "null": b"null",
    "code": b"__import__('os').system('touch hacked')",
    "separators": "one\u2028two\x0bthree\x85four".encode(),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_set_aside_to_the_last_byte(path, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(GARBAGE[name] + b"\n" + whole)
    assert known(path, "a", "b") == ["a", "b"]
    cache = filled(path, "c")
    assert cache.problems == [] or all("line" in p for p in cache.problems)
    assert known(path, "a", "b", "c") == ["a", "b", "c"] and Cache.open(path).problems == []
    aside = path.with_name("measured.damaged.jsonl")
    once = b"".join(line + b"\n" for line in GARBAGE[name].split(b"\n") if line.strip())
    assert aside.read_bytes() == once
    path.write_bytes(GARBAGE[name] + b"\n" + whole)  # it happens again: both are kept
    filled(path, "d")
    assert aside.read_bytes() == once * 2
    assert not (tmp_path / "hacked").exists()


def test_a_damaged_cache_still_gives_a_plan(path):
    path.parent.mkdir()
    path.write_bytes(GARBAGE["binary"])
    g = dt.Graph()
    g.softmax(g.tensor("x", (3, 4)), axis=1).output("y")
    plan = g.compile(device="cpu", find=True, cache=Cache.open(path))
    feed = {"x": torch.randn(3, 4)}
    check_right(plan.run(feed), g.ir(), feed)
    assert any(note.startswith("cache: measured.jsonl line") for note in plan.decision.notes)
    assert len(Cache.open(path).entries) == 1 and Cache.open(path).problems == []


def test_an_unreadable_file_is_not_replaced(path, monkeypatch):
    filled(path, "a")
    whole, real = path.read_bytes(), Path.read_bytes

    def denied(self):
        if self == path:
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", denied)
    cache = filled(path, "b")
    assert any("Permission denied" in p for p in cache.problems)
    assert any("not written" in p for p in cache.problems)
    assert cache.get("b", CPU, dt.Policy()), "this process still knows"
    monkeypatch.undo()
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_not_fatal(path, tmp_path):
    folder = tmp_path / "is_a_folder.jsonl"
    folder.mkdir()
    cache = filled(folder, "a")
    assert len(cache.problems) >= 1
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert any("not written" in p for p in filled(blocked / "x.jsonl", "a").problems)


def test_writers_do_not_lose_each_others_lines(path):
    caches = [Cache.open(path) for _ in range(8)]  # all opened while there is nothing

    def write(i: int) -> None:
        for j in range(5):
            caches[i].put(f"r{i}.{j}", "", CPU, dt.Policy(), [ROW])
            caches[i].save()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(Cache.open(path).entries) == 40
    assert {p.name for p in path.parent.iterdir()} == {path.name, path.name + ".lock"}


def _write(path: Path, name: str) -> None:
    for j in range(10):
        cache = Cache.open(path)
        cache.put(f"{name}.{j}", "", CPU, dt.Policy(), [])
        cache.save()


def test_writing_processes_do_not_lose_each_others_lines(path):
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=_write, args=(path, name)) for name in "pq"]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=60)
    assert [process.exitcode for process in running] == [0, 0]
    assert len(Cache.open(path).entries) == 20


def test_two_files_are_merged(path):
    filled(path, "a", "b")
    other = path.with_name("other.jsonl")
    filled(other, "b", "c", "d")
    cache = Cache.open(path)
    assert cache.merge(other) == 2
    assert known(path, "a", "b", "c", "d") == ["a", "b", "c", "d"]
    assert cache.merge(other) == 0
    with pytest.raises(dt.FileError, match="no cache file"):
        cache.merge(path.with_name("nowhere.jsonl"))


def test_files_are_replaced_whole_and_belong_to_the_user(tmp_path):
    path = tmp_path / "f.txt"
    write_atomic(path, "old")
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"f.txt", "plain"}
    with locked(path):
        write_atomic(path, b"new")
    assert path.read_text() == "new"


# ---- what is kept was made by source that may change ---------------------------------------------


def test_a_folder_where_a_file_should_be_is_told_and_in_nobodys_way(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEUTERON_CACHE", str(tmp_path))
    llvm.forget()
    for path in (llvm.object_path("a"), llvm.object_path("b"), tmp_path / "cpu-1.json"):
        path.mkdir(parents=True)
    for name in ("a", "b"):
        llvm.load(name, lambda module: llvm.entry(module, "run", lambda *_: None))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    remember_cpu({"f32": 1.0})
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, "once for each folder"
    for text, path in zip(said, ("objects", "cpu-1.json"), strict=True):
        assert path in text and "it is a folder" in text and "DEUTERON_CACHE" in text
    llvm.forget()


@pytest.mark.parametrize("folder", llvm.SOURCES)
def test_machine_code_is_of_the_source_that_wrote_it(folder, tmp_path, monkeypatch):
    """A coefficient that is put right is compiled anew: any file of a folder that kernels are made
    from is part of the name that their code is kept under."""
    copy = tmp_path / "deuteron"
    for name in llvm.SOURCES:
        shutil.copytree(files.PACKAGE / name, copy / name)
    monkeypatch.setattr(llvm, "source_digest", partial(source_digest.__wrapped__, package=copy))
    whole = llvm.object_path("gelu")
    assert llvm.object_path("gelu") == whole and whole.name != llvm.object_path("relu").name
    damaged = sorted((copy / folder).rglob("*.py"))[-1]
    text = damaged.read_text()
    damaged.write_text(text + "\nHALF = 0.4999\n")
    assert llvm.object_path("gelu") != whole
    damaged.write_text(text)
    assert llvm.object_path("gelu") == whole
    damaged.rename(damaged.with_name("moved.py"))
    assert llvm.object_path("gelu") != whole


def test_kernels_are_made_from_no_other_source(repo):
    """Whatever the writers of machine code import lies in the folders that its name depends on."""
    known = {".".join(path.with_suffix("").parts): path for path in package_files(repo)}
    todo = [m for m in known if m.startswith(("deuteron.codegen.", "deuteron.kernels."))]
    seen = set(todo)
    while todo:
        path = known[todo.pop()]
        for found in imports((repo / path).read_text(), str(path)):
            names = {found.module, found.module.rpartition(".")[0], f"{found.module}.__init__"}
            new = {name for name in names if name in known} - seen
            seen |= new
            todo += new
    rooms = {name.split(".")[1] for name in seen}
    assert {"codegen", "kernels"} < rooms
    assert rooms <= {*llvm.SOURCES, "errors", "files", "log"}, "add the folder to SOURCES"


def package_files(repo: Path) -> list[Path]:
    return [path.relative_to(repo) for path in (repo / "deuteron").rglob("*.py")]


@pytest.mark.parametrize("what", ["source", "llvmlite"])
def test_what_was_measured_with_other_code_is_measured_again(path, what, monkeypatch):
    """Times and errors are of our source and of the compiler below it."""

    def measured() -> list[str]:
        g = dt.Graph()
        g.softmax(g.tensor("x", (3, 4))).output("y")
        plan = g.compile(device="cpu", find=True, budget_s=5.0, cache=Cache.open(path))
        return [note for note in plan.decision.notes if note.startswith("regions measured")]

    once, again = "regions measured: 1, remembered: 0", "regions measured: 0, remembered: 1"
    assert measured() == [once] and measured() == [again]
    if what == "source":
        monkeypatch.setattr(records, "source_digest", lambda: "mended")
    else:
        monkeypatch.setattr(cache_module, "installed", lambda package: "99")
        cache_module._environment.cache_clear()
    assert measured() == [once] and measured() == [again]
    cache_module._environment.cache_clear()


GELU = """
import torch, deuteron as dt
x = torch.linspace(-4, 4, 10001)
g = dt.Graph()
g.gelu(g.tensor("x", x.shape)).output("y")
plan = g.compile(device="cpu", policy=dt.Policy(engines=("cpu_gen",)))
off = plan.run(x=x)["y"].double() - torch.nn.functional.gelu(x.double())
print(float(off.abs().max()))
"""


@pytest.mark.sweep
def test_a_repaired_coefficient_is_believed(tmp_path, repo):
    copy = tmp_path / "copy" / "deuteron"
    shutil.copytree(repo / "deuteron", copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "codegen" / "tables.py"
    good = file.read_text()
    number = re.search(r"1\.\d{6,}", good)
    assert number is not None
    bad = good.replace(number[0], f"{float(number[0]) * 1.01}", 1)
    env = {**os.environ, "PYTHONPATH": str(copy.parent), "DEUTERON_CACHE": str(tmp_path / "cache")}
    errors = []
    for text in (good, bad, good):
        file.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", GELU], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        errors.append(float(done.stdout))
    assert errors[0] == errors[2] < 1e-6 < errors[1], errors
