"""Builders: processes beside this one that build kernels while it measures.

What they build goes into the caches on disk, where this process finds it. A builder compiles Triton
kernels for a GPU without using one: it builds a region for tensors that have no memory, and
compiles the region's kernels instead of launching them. What a builder cannot build, such as an
operator that only the user's script defines, this process builds itself.

The first builder is forked from this process, which has already loaded all that building takes: a
new process would need longer for that than for building. It never runs the user's script, keeps
none of its files, and, like a data loader's worker, makes no use of a GPU. It forks one process for
each task. Tasks often share a kernel, because sizes are arguments of kernels: the second process
that needs the kernel waits for it, and another task begins meanwhile.

The first builder ends those processes and itself as soon as this process is gone, however that
ended, and when it had nothing to do for a while: until then memory that this process writes to is
there twice. If another thread was in the middle of something when this process forked, the fork
lacks that thread and might never get ready; then this process builds by itself.
"""

import gc
import itertools
import json
import os
import queue
import selectors
import signal
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from deuteron.engines import BuildContext, Candidate, build, engine
from deuteron.errors import EngineError
from deuteron.ir.region import Region
from deuteron.ir.text import parse_graph, print_graph
from deuteron.plan.cache import knobs_key, plain_knobs
from deuteron.policy import Policy
from deuteron.target import Target, target

SAMPLE = """graph "sample"(%x: f16[64,64]) {
  %y: f16[64,64] = layer_norm(%x, dims=1, eps=1e-05)
  return "y"=%y
}"""
CROWD = 4  # processes for each that may work at a time, those that wait for a kernel included
NO_FIT = 2  # exit code of a process whose kernels cannot be compiled, or need more than a GPU has
IDLE_S = 30.0  # builders end after this many seconds without anything to do
BUILT = ("triton_gen", "triton_kernels")  # engines whose kernels are built by builders


class Builders:
    """Processes that build, ``count`` at a time."""

    def __init__(self, count: int | None = None) -> None:
        tasks, tell = os.pipe()
        listen, news = os.pipe()
        with warnings.catch_warnings():  # Python warns of forking with threads: see the top
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            _begin(tasks, news, count or min(os.cpu_count() or 1, 32))
        os.close(tasks)
        os.close(news)
        self._pipes = open(tell, "w"), open(listen)  # noqa: SIM115
        self._asked: dict[tuple[str, Candidate], int] = {}
        self._numbers = itertools.count()
        self._built: set[int] = set()  # tasks that are done; −1: the first builder is ready
        self._failed: set[int] = set()  # tasks whose kernels cannot be compiled, or fit on no GPU
        self._news = threading.Condition()
        self._gone = False
        self._tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._tell, daemon=True).start()

    def _listen(self) -> None:
        with self._pipes[1] as pipe:
            for line in pipe:
                task, code = map(int, line.split())
                with self._news:
                    self._built.add(task)
                    if code == NO_FIT:
                        self._failed.add(task)
                    self._news.notify_all()
        self._ended()
        with suppress(OSError):
            os.waitpid(self.pid, 0)

    def _ended(self) -> None:
        """Note that the builders are gone: this process builds what is still needed."""
        with self._news:
            self._gone = True
            self._news.notify_all()
        self._tasks.put("")

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
        """Write tasks to the pipe, in a thread of its own: :meth:`ask` must not wait for a pipe
        that is full."""
        pipe = self._pipes[0]
        with suppress(OSError), pipe:  # broken, if they are gone
            while not self._gone:
                pipe.write(self._tasks.get())
                pipe.flush()

    def forget(self, but: Collection[tuple[str, Candidate]] = ()) -> None:
        """Drop all tasks that are not built yet, except those in ``but``, which are still needed:
        pairs of a region's text and a candidate."""
        with self._news:
            done, asked = self._built, self._asked.items()
            self._asked = {key: task for key, task in asked if key in but or task in done}
            waiting = [task for task in self._asked.values() if task not in done]
        self._tasks.put(json.dumps(waiting) + "\n")

    @property
    def is_gone(self) -> bool:
        """Whether they have ended, as they do when nobody asks for anything for a while."""
        return self._gone

    @property
    def is_ready(self) -> bool:
        """Whether they have started, or never will."""
        return -1 in self._built or self._gone

    def is_asked(self, region: Region, candidate: Candidate) -> bool:
        """Whether a candidate was ordered, by :meth:`ask`."""
        return (region.text, candidate) in self._asked

    def is_built(self, region: Region, candidate: Candidate) -> bool:
        """Whether a candidate is built by now, or was never ordered, or no builder will build
        it."""
        task = self._asked.get((region.text, candidate))
        return task is None or task in self._built or self._gone

    def has_failed(self, region: Region, candidate: Candidate) -> bool:
        """Whether it was built, and cannot be compiled or does not fit on the GPU."""
        return self._asked.get((region.text, candidate)) in self._failed

    def wait(self, enough: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until ``enough()``, for at most ``seconds``. Returns whether it is enough."""
        with self._news:
            return self._news.wait_for(enough, seconds)

    def close(self) -> None:
        """End all of them."""
        self._ended()


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


_ours: Builders | None = None
_starting = threading.Lock()


def builders() -> Builders | None:
    """The builders of this process, which are started if need be; None where there can be none."""
    global _ours
    with _starting:
        if _ours is None or _ours.is_gone:
            _ours = None
            possible = hasattr(os, "fork") and find_spec("triton") is not None
            with suppress(OSError):
                if possible and torch.cuda.is_available():
                    _ours = Builders()
                    threading.Thread(target=_load_compiler, daemon=True).start()
        return _ours


def _load_compiler() -> None:
    """Load what this process needs of Triton to find kernels that others built. Triton reads all of
    its own source once, to know whether a kernel was made by the same version; that need not wait
    until a kernel is there."""
    with suppress(Exception):
        from triton.compiler import ASTSource  # noqa: F401
        from triton.runtime.cache import triton_key

        triton_key()


def arch_of(device: torch.device) -> int:
    """The architecture of a GPU: 90 for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# ---- in the first of the processes


def _begin(tasks: int, news: int, count: int) -> NoReturn:
    """What the first builder does once it was forked: it lets go of the script's files, output and
    objects, and then works."""
    with suppress(BaseException):
        gc.disable()  # tensors on a GPU are none of its business, and must not be freed here
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream, of in enumerate((tasks, news, os.open(os.devnull, os.O_WRONLY))):
            os.dup2(of, stream)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                with suppress(OSError):
                    os.close(number)
        _work(count)
    os._exit(0)


def _tell(number: int, code: int = 0) -> None:
    os.write(1, f"{number} {code}\n".encode())


def _work(count: int) -> None:
    """Fork a process for each task that comes in, ``count`` at a time, until the process that asks
    is gone or has asked for nothing for a while. Processes that wait for a kernel of another do not
    count."""
    from deuteron.codegen import triton_compile

    parent = os.getppid()
    _warm_up()
    _tell(-1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(woken, selectors.EVENT_READ)
    heard, say = os.pipe()
    waiting.register(heard, selectors.EVENT_READ)
    kernels = tempfile.TemporaryFile()  # noqa: SIM115
    triton_compile.alone = partial(_alone, kernels.fileno(), say)
    idle: set[int] = set()  # processes that wait for another
    tasks: list[dict[str, Any]] = []
    running: dict[int, int] = {}  # process → task
    rest, asked = b"", time.monotonic()
    going_on = True
    while going_on:
        for ready, _ in waiting.select(1.0):
            data = os.read(ready.fd, 1 << 16)
            if ready.fd == woken:
                continue
            if ready.fd == heard:
                for pid in array("i", data):
                    idle ^= {pid}
                continue
            going_on = bool(data)
            *lines, rest = (rest + data).split(b"\n")
            for told in map(json.loads, lines):
                if isinstance(told, dict):
                    tasks.append(told)
                    continue
                tasks = [task for task in tasks if task["task"] in told]  # others are forgotten
                for pid in [pid for pid, number in running.items() if number not in told]:
                    os.kill(pid, signal.SIGKILL)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(running.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))
        idle &= running.keys()
        while tasks and len(running) < min(count + len(idle), CROWD * count):
            task = tasks.pop(0)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                os._exit(_built(task))
            running[pid] = task["task"]
        asked = time.monotonic() if running else asked
        going_on = going_on and os.getppid() == parent and time.monotonic() - asked < IDLE_S
    for pid in running:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def _alone(kernels: int, say: int, digest: str) -> Iterator[None]:
    """Inside this context no other process builds this kernel: a lock on one byte of the file
    ``kernels`` stands for it. A process that has to wait writes its number to ``say``, and once
    more when the wait is over."""
    import fcntl

    place = int(digest[:15], 16)
    me = array("i", [os.getpid()]).tobytes()
    try:
        fcntl.lockf(kernels, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        os.write(say, me)
        fcntl.lockf(kernels, fcntl.LOCK_EX, 1, place)
        os.write(say, me)
    try:
        yield
    finally:
        fcntl.lockf(kernels, fcntl.LOCK_UN, 1, place)


def _warm_up() -> None:
    """Build a sample that nobody needs. Loading and setting up the compiler takes longer than most
    kernels do, and for every process forked from now on that is done."""
    region, machine = Region(parse_graph(SAMPLE), anchor=0), target("h200")
    options = engine("triton_gen").candidates(region, machine, Policy())
    with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, TRITON_CACHE_DIR=empty):
        build_elsewhere(task_of(region, options[0], machine, Policy(), 90))


def _built(task: Mapping[str, Any]) -> int:
    """Build a task in a process of its own. Returns its exit code, 0 if it worked."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        build_elsewhere(task)
    except EngineError:
        return NO_FIT
    except Exception:  # the process that asked then builds it itself, and meets the error
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
    triton_compile.most_shared = machine.shared_bytes
    kernel = build(region, candidate, BuildContext(machine, device, policy, constants))
    kernel.fill([tensors[v] for v in region.inputs], [tensors[v] for v in region.outputs])
