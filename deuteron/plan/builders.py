"""Kernels are built by processes beside this one, while it measures.

What is built goes into the caches on disk, where this process finds it. A Triton kernel is compiled
for a GPU without having one: the region is built for tensors that have no memory, and instead of
being launched its kernels are compiled. What a builder cannot do, such as an operator that only the
user's script knows, this process does itself.

The first of these processes is started from this file, never from the user's script, loads what
building takes, and forks one process for each task. It ends them and itself as soon as nobody
holds the other end of its pipe any more, however this process ended.
"""

import itertools
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from deuteron.engines import BuildContext, Candidate, build, engine
from deuteron.files import PACKAGE
from deuteron.ir.region import Region
from deuteron.ir.text import parse_graph, print_graph
from deuteron.plan.cache import knobs_key, plain_knobs
from deuteron.policy import Policy
from deuteron.target import Target, target

SAMPLE = """graph "sample"(%x: f16[64,64]) {
  %y: f16[64,64] = layer_norm(%x, dims=1, eps=1e-05)
  return "y"=%y
}"""
BUILT = ("triton_gen", "triton_kernels")  # engines whose kernels are built elsewhere


class Builders:
    """Processes that build, ``count`` at a time."""

    def __init__(self, count: int | None = None) -> None:
        path = os.pathsep.join((str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")))
        here = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        start = "from deuteron.plan.builders import main; main()"
        command = [sys.executable, "-c", start, str(count or min(os.cpu_count() or 1, 32))]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        pipes["stderr"] = subprocess.DEVNULL  # what fails there is built here, and fails in words
        self._process = subprocess.Popen(command, env=here, **pipes)
        self._asked: dict[tuple[str, Candidate], int] = {}
        self._numbers = itertools.count()
        self._built: set[int] = set()  # tasks; −1 stands for having started
        self._news = threading.Condition()
        self._gone = False
        self._tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._tell, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:  # a library may have something to say, too
                self._built |= {int(line)} if line.strip().lstrip("-").isdigit() else set()
                self._news.notify_all()
        self._ended()

    def _ended(self) -> None:
        """They are gone: whatever is still asked for is built here."""
        with self._news:
            self._gone = True
            self._news.notify_all()

    def ask(
        self, region: Region, candidate: Candidate, machine: Target, policy: Policy, arch: int
    ) -> None:
        """Begin to build a candidate for a GPU of this architecture (90 for compute capability
        9.0), unless that was asked before."""
        key = region.text, candidate
        if candidate.engine not in BUILT or key in self._asked:
            return
        self._asked[key] = next(self._numbers)
        task = {"task": self._asked[key], **task_of(region, candidate, machine, policy, arch)}
        self._tasks.put(json.dumps(task) + "\n")

    def _tell(self) -> None:
        """Hand tasks on. Whoever asks does not wait for a pipe that is full."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while True:
                pipe.write(self._tasks.get())
                pipe.flush()
        except (OSError, ValueError):  # broken, or closed
            self._ended()

    def forget(self) -> None:
        """Drop what is not begun yet: whoever asked waits for it no longer."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        self._tasks.put("\n")
        with self._news:
            self._asked = {key: task for key, task in self._asked.items() if task in self._built}

    @property
    def is_ready(self) -> bool:
        """Whether they have started, or never will."""
        return -1 in self._built or self._gone

    def is_asked(self, region: Region, candidate: Candidate) -> bool:
        """Whether somebody had it built."""
        return (region.text, candidate) in self._asked

    def is_built(self, region: Region, candidate: Candidate) -> bool:
        """Whether a candidate is there by now, or was never asked for, or nobody is there yet to
        build it: until they have started, whoever needs it builds it at once."""
        task = self._asked.get((region.text, candidate))
        return task is None or task in self._built or -1 not in self._built or self._gone

    def wait(self, enough: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for ``enough`` to be built, at most so many seconds; whether it is."""
        with self._news:
            return self._news.wait_for(enough, seconds)

    def close(self) -> None:
        """End all of them."""
        self._process.kill()
        self._process.communicate()


def task_of(
    region: Region, candidate: Candidate, machine: Target, policy: Policy, arch: int
) -> dict[str, Any]:
    """What has to be known to build a candidate in another process, as plain data."""
    return {
        "graph": print_graph(region.graph),
        "constants": sorted(region.constants),
        "anchor": region.anchor,
        "engine": candidate.engine,
        "knobs": plain_knobs(candidate.knobs),
        "target": asdict(machine) | {"features": sorted(machine.features)},
        "policy": policy.as_dict(),
        "arch": arch,
    }


@cache
def builders() -> Builders | None:
    """Those of this process, where building elsewhere is possible."""
    possible = hasattr(os, "fork") and find_spec("triton") is not None and bool(sys.executable)
    with suppress(OSError):
        return Builders() if possible and torch.cuda.is_available() else None
    return None


def arch_of(device: torch.device) -> int:
    """The architecture of a GPU: 90 for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# ---- in the first of the processes


def main() -> None:
    """Fork a process for each task that comes in, as many at a time as the command says."""
    _warm_up()
    print(-1, flush=True)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(woken, selectors.EVENT_READ)
    count = int(sys.argv[1])
    tasks: list[dict[str, Any]] = []
    running: dict[int, int] = {}  # process → task
    rest = b""
    while True:
        for ready, _ in waiting.select():
            data = os.read(ready.fd, 1 << 16)
            if ready.fd == woken:
                continue
            if not data:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                tasks = [*tasks, json.loads(line)] if line else []  # an empty one: forget
        while running and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            print(running.pop(pid), flush=True)
        while tasks and len(running) < count:
            task = tasks.pop(0)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                os._exit(_built(task))
            running[pid] = task["task"]


def _warm_up() -> None:
    """Build something for nothing. Loading and setting up the compiler takes longer than most
    kernels do, and every process forked from now on has that behind it."""
    region, machine = Region(parse_graph(SAMPLE), anchor=0), target("h200")
    options = engine("triton_gen").candidates(region, machine, Policy())
    with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, TRITON_CACHE_DIR=empty):
        build_elsewhere(task_of(region, options[0], machine, Policy(), 90))


def _built(task: Mapping[str, Any]) -> int:
    """Build in a process of its own; 0 if it worked."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        build_elsewhere(task)
    except Exception:  # whoever asked builds it then, and meets the error
        return 1
    return 0


def build_elsewhere(task: Mapping[str, Any]) -> None:
    """Compile the kernels of a candidate for a GPU that is not here."""
    from triton.backends.compiler import GPUTarget

    from deuteron.codegen import triton_compile

    machine = Target(**task["target"])
    machine = replace(machine, features=frozenset(machine.features))
    policy, device = Policy.from_dict(task["policy"]), torch.device("meta")
    region = Region(parse_graph(task["graph"]), frozenset(task["constants"]), task["anchor"])
    offered = engine(task["engine"]).candidates(region, machine, policy)
    (candidate,) = [c for c in offered if knobs_key(c.knobs) == knobs_key(task["knobs"])]
    tensors = {
        v: torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device=device)
        for v, t in region.graph.types.items()
    }
    constants = {v: tensors[v] for v in region.constants}
    triton_compile.elsewhere = GPUTarget("cuda", task["arch"], 32)
    kernel = build(region, candidate, BuildContext(machine, device, policy, constants))
    kernel.fill([tensors[v] for v in region.inputs], [tensors[v] for v in region.outputs])
