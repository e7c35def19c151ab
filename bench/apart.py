"""Every case of a benchmark in a process of its own, as a user's first plan is made in one. Several
get ready at the same time; one at a time measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.harness import PREPARE, TURN, Record, machine_name

LIMIT_S = 300  # for one process, its waiting included


def run(module: ModuleType, device: str, compile_peer: bool, processes: int) -> None:
    """``module.run`` case by case. Where torch.compile is a peer, its kernels are made first, for
    all cases side by side, and the processes that measure find them on disk."""
    name = module.__name__.removeprefix("bench.")
    cases = _cases(module, device, compile_peer)
    folder = Path(tempfile.mkdtemp(prefix="deuteron-bench-apart-"))
    command = [sys.executable, "-m", "bench.run", "--device", device, "--only", name]
    command += ["--compile-cache", str(folder / "inductor")]
    own = dict(os.environ)
    own[TURN] = str(folder / "turn")
    own["TORCHINDUCTOR_COMPILE_THREADS"] = "4"

    def one(case: str, more: dict[str, str], *args: str) -> str:
        env = own | more | {"BENCH_CASES": case}
        try:
            done = subprocess.run(
                [*command, *args], env=env, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {LIMIT_S} s"
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no word"])[-1]

    with ThreadPoolExecutor(processes) as pool:
        if compile_peer:
            for case, failed in zip(
                cases, pool.map(lambda case: one(case, {PREPARE: "1"}), cases), strict=True
            ):
                if failed:
                    print(f"  {case}, compiling: {failed}", flush=True)
    more = [] if compile_peer else ["--no-compile"]
    record = Record(name, device, module.NOTE)
    if record.only is None:
        record.read()  # for what rows keep, below; all of them are measured again
    before = {row["case"]: row for row in record.rows}
    record.rows = record.rows if record.only else []

    def measured(case: str) -> tuple[str, list[dict[str, Any]]]:
        out = folder / case.replace(" ", "_").replace("/", "_")
        failed = one(case, {}, "--out", str(out), *more)
        file = out / f"{name}-{machine_name(device)}.json"
        if not file.exists():
            return failed, []
        data = json.loads(file.read_text())
        record.versions |= data["machine"]
        return failed, data["rows"]

    with ThreadPoolExecutor(min(processes, 4)) as pool:
        for case, (failed, rows) in zip(cases, pool.map(measured, cases), strict=True):
            if failed:
                print(f"  {case}: {failed}", flush=True)
            for row in rows:
                kept = before.get(case, {}).get("compile_s")
                if kept is not None and row.get("compile_s") != row.get("compile_s"):
                    row["compile_s"] = kept
                record.add(**row)


def _cases(module: ModuleType, device: str, compile_peer: bool) -> list[str]:
    """The names of those that a run would measure, found by a run that measures none."""
    Record.listed = []
    try:
        module.run(device, compile_peer=compile_peer)
        return Record.listed
    finally:
        Record.listed = None
