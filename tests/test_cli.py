"""The command line: it works, it says what it did, and its errors are sentences."""

from __future__ import annotations

import json
import subprocess
import sys
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
    code, out, err = run("demo", "mobilenet_v2", "--budget", "1")
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
    plan = dt.load_plan(path, device="cpu")
    (name,) = plan.inputs
    assert plan.run({name: torch.randn(2, 8)})


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
        (["explain", f"{Path(__file__).stem}:not_a_pair"], ["returned a Linear", "remedy"], 1),
        (["explain", f"{Path(__file__).stem}:not_a_module"], ["returned (int, …)", "remedy"], 1),
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
        (["juggle"], ["juggle"], 2),
    ],
)
def test_errors_are_sentences(run, args, says, expected):
    code, out, err = run(*args)
    assert code == expected
    for part in says:
        assert part in err, part
    assert "error: " in err and "Traceback" not in err + out


def test_help_lists_the_commands(run):
    code, out, err = run()
    assert code in (0, 2) and "error" not in err
    for command in ("demo", "optimize", "explain", "bench", "doctor"):
        assert command in out + err
    assert run("--help")[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(run):
    code, _, err = run("explain", SMALL, "--device", "cuda")
    assert code == 1 and "no CUDA device is present" in err and "h200" in err


def test_the_command_in_a_process_of_its_own(repo):
    code = "from deuteron.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", "resnet19"],
        cwd=repo,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no model named 'resnet19'")
    assert "Traceback" not in done.stderr and done.stdout == ""
