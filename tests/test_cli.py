"""The command line: it works, it says what it did, and its errors are sentences."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron import cli

SMALL = f"{Path(__file__).stem}:small"  # loaded by name, as a user's own model would be


def small():
    """What ``module:callable`` should return."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(2, 8),)


def single():
    """A lone tensor in place of the tuple."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)


def not_a_pair():
    return nn.Linear(2, 2)


def not_a_module():
    return 3, torch.randn(2)


def breaks():
    raise ValueError("no weights")


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, bias=None):
        y = torch.relu(self.linear(x))
        return y if bias is None else y + bias


KEYWORDS = f"{Path(__file__).stem}:Keywords"  # a class that needs no arguments


class Silent(nn.Module):
    def forward(self):
        return ()


def silent():
    return Silent(), ()


SILENT = f"{Path(__file__).stem}:silent"


def by_name():
    return Keywords(), {"x": torch.randn(2, 8), "bias": torch.ones(8)}


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.capsys, self.patch = capsys, patch

    def __call__(self, *args: str | Path) -> tuple[int, str, str]:
        """Exit code, output and errors of ``deuteron args``."""
        self.patch.setattr(sys, "argv", ["deuteron", *map(str, args)])
        self.capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 1
        out = self.capsys.readouterr()
        return code, out.out, out.err


@pytest.fixture
def run(capsys, monkeypatch) -> Cli:
    monkeypatch.setattr(cli, "console", cli.Console(width=300))
    monkeypatch.setattr(cli, "errors", cli.Console(stderr=True, width=300))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Cli(capsys, monkeypatch)


def test_a_model_of_ones_own_takes_the_type_that_was_asked_for(run):
    for name, short in (("f16", "f16"), ("bf16", "bf16"), ("", "f32")):
        code, out, _ = run("explain", SMALL, *(("--dtype", name) if name else ()))
        assert code == 0 and f"{short}[2,8]" in out


def test_demo_optimises_checks_and_explains(run, monkeypatch):
    patient = cli._seconds
    monkeypatch.setattr(cli, "_seconds", lambda calls, device, limit: patient(calls, device, 0.2))
    code, out, err = run("demo", "mobilenet_v2", "--budget", "0.3")
    assert code == 0, err
    for part in (
        "mobilenet_v2: 3.5 M parameters",
        "eager",
        "deuteron",
        "plan ready in",
        "largest difference from eager",
        "conv",
        "planned for an H200",
    ):
        assert part in out, part


def test_optimize_saves_a_plan_that_loads(run, tmp_path):
    path = tmp_path / "[bold]" / "small.plan.json"
    code, out, _ = run("optimize", SMALL, "--budget", "0.5", "--save", path, "--device", "cpu")
    assert code == 0 and f"saved {path}" in out
    assert dt.load(path, device="cpu")(torch.randn(2, 8)).shape == (2, 8)


@pytest.mark.parametrize("target", ["h200", "cpu"])
def test_explain_as_json(run, target):
    args = ("explain", SMALL, "--target", target, "--format", "json", "--device", "cpu")
    code, out, _ = run(*args)
    assert code == 0
    report = json.loads(out)
    assert report["target"] == target and report["regions"]
    assert [op for r in report["regions"] for op in r["ops"]] == ["linear", "relu"]


def test_explain_to_a_file(run, tmp_path):
    path = tmp_path / "plan.html"
    code, out, _ = run("explain", SMALL, "--format", "html", "--out", path, "--errors")
    assert code == 0 and f"wrote {path}" in out and "<html" in path.read_text()
    code, out, _ = run("explain", f"{Path(__file__).stem}:single")
    assert code == 0 and "linear" in out


def test_bench_times_in_one_run(run):
    code, out, _ = run("bench", SMALL, "--budget", "0", "--device", "cpu")
    assert code == 0 and "eager" in out and "deuteron" in out and "ms per run" in out


def test_doctor_names_machine_engines_and_cache(run, monkeypatch, tmp_path):
    odd = tmp_path / "[red]cache"
    monkeypatch.setenv("DEUTERON_CACHE", str(odd))
    odd.mkdir()
    (odd / "measurements.jsonl").write_text("{cut short\n")
    code, out, _ = run("doctor")
    assert code == 0
    for part in (
        dt.__version__,
        torch.__version__,
        "vendor_fused 1",
        "resnet50",
        str(odd),
        "a node of autograd",
        "cache problem: measurements.jsonl line 1",
    ):
        assert part in out, part


@pytest.mark.parametrize(
    ("args", "says", "expected"),
    [
        (["explain", "resnet19"], ["no model named 'resnet19'", "resnet18"], 1),
        (["optimize", "nothing"], ["no model named 'nothing'"], 1),
        (["bench", "nothing"], ["no model named 'nothing'"], 1),
        (["demo", "nothing"], ["no model named 'nothing'"], 1),
        (["explain", "no.such.module:thing"], ["cannot be loaded", "remedy"], 1),
        (["explain", f"{Path(__file__).stem}:nothing"], ["cannot be loaded", "remedy"], 1),
        (
            ["explain", f"{Path(__file__).stem}:not_a_pair"],
            ["is a Linear without example inputs", "--input"],
            1,
        ),
        (
            ["explain", f"{Path(__file__).stem}:not_a_module"],
            ["is (int, …), not a module", "remedy"],
            1,
        ),
        (["explain", SMALL, "--batch", "8"], ["has a batch size already", "remedy"], 1),
        (["explain", SMALL, "--device", "tpu"], ["'tpu' is not a device"], 1),
        (["explain", SMALL, "--device", "meta"], ["not supported"], 1),
        (["explain", SMALL, "--dtype", "f99"], ["f99", "remedy"], 1),
        (["explain", SMALL, "--dtype", "i8"], ["cannot be int8", "f16"], 1),
        (["explain", SMALL, "--dtype", "i4"], ["cannot be int4"], 1),
        (["explain", SMALL, "--target", "mars"], ["unknown target 'mars'", "h200"], 1),
        (["explain", SMALL, "--format", "rtf"], ["rtf", "html"], 1),
        (["explain", SMALL, "--batch", "0"], ["--batch"], 2),
        (["explain", SMALL, "--nonsense"], ["--nonsense"], 2),
        (["explain"], ["Missing argument"], 2),
        (["explain", ""], ["'' names no model", "my.py:make"], 1),
        (["explain", "my.py:"], ["'my.py:' names no model"], 1),
        (["explain", ":make"], ["':make' names no model"], 1),
        (["explain", "nowhere.py:make"], ["cannot be loaded", "nowhere.py"], 1),
        (["explain", f"{Path(__file__).stem}:breaks"], ["ValueError: no weights", ", line "], 1),
        (["explain", KEYWORDS, "--input", "x=2xy"], ["'x=2xy' is not an input", "x=1x3"], 1),
        (["explain", KEYWORDS, "--input", "z=2x8"], ["cannot be called", "--input x=2x8"], 1),
        (
            ["explain", KEYWORDS, "--input", "2x8:f16", "--input", "y=8"],
            ["x=2x8:f16 --input bias=8"],
            1,
        ),
        (["explain", KEYWORDS, "--input", "x=2x8:i4"], ["no tensors of int4"], 1),
        (["explain", KEYWORDS, "--input", "x=9999999999999999x8"], ["these sizes", "x=9999"], 1),
        (["explain", KEYWORDS, "--input", f"x={10**30}x8:i64"], ["tensor of int64 and these"], 1),
        (["optimize", SILENT, "--budget", "0"], ["returns no tensor, but tuple"], 1),
        (["plan-parallel", SMALL, "--dtype", "i8"], ["a model cannot be int8", "--dtype i8"], 1),
        (["explain", "resnet18", "--input", "2x8"], ["brings its own inputs"], 1),
        (["explain", SMALL, "--out", ""], ["cannot be written", "folder"], 1),
        (["explain", SMALL, "--out", "/dev/null/x"], ["cannot be written"], 1),
        (["optimize", SMALL, "--save", "/"], ["cannot be written"], 1),
        (["optimize", SMALL, "--budget", "nan"], ["--budget"], 2),
        (["optimize", SMALL, "--budget=-1"], ["--budget"], 2),
        (["bench", "resnet18", "resnet19"], ["no model named 'resnet19'"], 1),
        (["cache", "merge", "nowhere.jsonl"], ["no cache file 'nowhere.jsonl'"], 1),
        (["cache", "merge", __file__], ["no measurement can be read", "measurements.jsonl"], 1),
        (["explain", "a.plan.json"], ["dt.load_plan('a.plan.json').explain()"], 1),
        (["juggle"], ["juggle"], 2),
    ],
)
def test_errors_are_sentences(run, args, says, expected):
    code, out, err = run(*args)
    assert code == expected
    for part in says:
        assert part in err, part
    assert "error: " in err and "Traceback" not in err + out


def test_errors_come_before_the_work(run, monkeypatch):
    monkeypatch.setattr(dt, "optimize", None)  # which would fail in another way
    monkeypatch.setattr(dt.zoo, "build", lambda name: 1 / 0)
    for args in (
        ["explain", "resnet18", "--format", "rtf"],
        ["explain", "resnet18", "--out", "/"],
        ["optimize", "resnet18", "--save", ""],
        ["explain", "resnet18", "--device", "tpu"],
    ):
        assert run(*args)[0] == 1, args


def test_keywords_and_types_of_ones_own_inputs(run):
    for model, given in (
        (KEYWORDS, ("--input", "x=2x8", "--input", "bias=8:f64")),
        (KEYWORDS, ("--input", "2x8", "--input", "bias=scalar:f64")),
        (f"{Path(__file__).stem}:by_name", ()),
    ):
        code, out, err = run("explain", model, *given)
        assert code == 0, err
        assert "Plan of Keywords" in out and "x f32[2,8], bias f" in out


def test_a_file_of_ones_own_may_import_its_neighbours(run, tmp_path):
    (tmp_path / "sizes_of_mine.py").write_text("WIDE = 8\n")
    source = "import torch\nfrom sizes_of_mine import WIDE\nnet = torch.nn.Linear(WIDE, WIDE)\n"
    (tmp_path / "mine_in_a_file.py").write_text(source)
    code, out, err = run(
        "explain", f"{tmp_path}/mine_in_a_file.py:net", "--input", "3x8:bf16", "--dtype", "bf16"
    )
    assert code == 0 and "input bf16[3,8]" in out, err


def test_the_version(run):
    assert run("--version") == (0, f"deuteron {dt.__version__}\n", "")


def test_the_cache_is_shown_merged_and_cleared(run, monkeypatch, tmp_path):
    for name in ("here", "there"):
        monkeypatch.setenv("DEUTERON_CACHE", str(tmp_path / name))
        if name == "there":
            assert run("optimize", SMALL, "--budget", "0.5", "--device", "cpu")[0] == 0
    n = len(dt.Cache.open().entries)
    monkeypatch.setenv("DEUTERON_CACHE", str(tmp_path / "here"))
    code, out, _ = run("cache", "merge", tmp_path / "there", tmp_path / "there")
    assert code == 0 and n > 0
    assert f"{n} new measurements" in out and "0 new measurements" in out
    code, out, _ = run("cache", "show")
    assert code == 0 and str(tmp_path / "here") in out and f"{n} measurements: device cpu" in out
    mine = tmp_path / "here" / "notes.txt"
    mine.write_text("not Deuteron's")
    assert run("cache", "clear", "--yes")[0] == 0
    assert not dt.Cache.open().entries and mine.exists()
    assert (tmp_path / "there" / "measurements.jsonl").exists()


@pytest.mark.sweep
def test_completion_is_there(repo):
    env = {**os.environ, "_DEUTERON_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    env |= {"COMP_WORDS": "deuteron explain resn"}
    done = in_a_process(repo, env=env)
    assert done.stdout.split() == ["resnet18", "resnet50"], done.stderr


def in_a_process(repo, *args, **how):
    command = [sys.executable, "-m", "deuteron", *args]
    text = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, cwd=repo, **{**text, **how})


@pytest.mark.sweep
def test_a_full_disk_is_no_traceback(repo, tmp_path):
    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    path = tmp_path / "plan.html"
    where = {**os.environ, "DEUTERON_CACHE": str(tmp_path / "cache"), "PYTHONPATH": "tests"}
    args = ("explain", SMALL, "--format", "html", "--out", str(path))
    done = in_a_process(repo, *args, preexec_fn=little_room, env=where)
    assert done.returncode == 1 and "could not be read or written" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("*plan*"))


@pytest.mark.sweep
def test_ctrl_c_says_what_was_kept_and_writes_nothing(repo, tmp_path):
    where = {**os.environ, "DEUTERON_CACHE": str(tmp_path / "cache")}
    path = tmp_path / "net.plan.json"
    args = ["-v", "optimize", "mobilenet_v2", "--budget", "60", "--save", str(path)]
    command = [sys.executable, "-m", "deuteron", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=repo, env=where, **pipes) as running:
        said = ""
        for line in running.stderr:
            said += line
            if "measuring for about" in line:
                time.sleep(1.0)
                running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130, said
    assert said.endswith("stopped\n") and "Traceback" not in said
    kept = len(dt.Cache.open(tmp_path / "cache" / "measurements.jsonl").entries)
    assert f"{kept} new measurements are kept in" in said or "nothing was measured" in said
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_help_lists_the_commands(run):
    code, out, err = run()
    assert code in (0, 2) and "error" not in err
    for command in ("demo", "optimize", "explain", "bench", "cache", "doctor"):
        assert command in out + err
    assert run("--help")[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(run):
    code, _, err = run("explain", SMALL, "--device", "cuda")
    assert code == 1 and "no CUDA device is present" in err and "h200" in err


def test_the_command_in_a_process_of_its_own(repo):
    done = in_a_process(repo, "explain", "resnet19")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no model named 'resnet19'")
    assert "Traceback" not in done.stderr and done.stdout == ""
