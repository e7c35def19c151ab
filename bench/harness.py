"""What every benchmark shares: fair timing, a record of the machine, tables on disk."""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import io
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

import deuteron
from deuteron.files import write_atomic
from deuteron.plan.cuda_graph import capture
from deuteron.plan.timing import by_events
from deuteron.target import cpu_identity

Thunk = Callable[[], Any]
TURN = "BENCH_TURN"  # a file that one process at a time has locked, the one that measures
PREPARE = "BENCH_PREPARE"  # set where a process makes torch.compile's kernels and measures nothing
Samples = dict[str, list[float]]  # by contender, milliseconds of its turn in every round


@dataclass
class Record:
    """Rows of one benchmark with what is needed to judge and repeat them.

    ``BENCH_CASES="gelu;bias+relu"`` measures these cases alone: their rows take the places of those
    on file, marked with the day and hour."""

    name: str
    device: str
    note: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)  # of what other processes measured by
    folder: ClassVar[str | None] = None  # where every row is saved at once, lest a cut lose them
    listed: ClassVar[list[str] | None] = None  # where one asks what would be measured: the answer

    def __post_init__(self) -> None:
        named = os.environ.get("BENCH_CASES")
        self.only = frozenset(named.split(";")) if named else None
        self.kept = self.read() if self.only else {}

    def read(self) -> dict[str, Any]:
        """Take the rows on file. Returns what else a run of a few cases leaves as it is."""
        file = Path(self.folder or ".") / f"{self.name}-{machine_name(self.device)}.json"
        if not file.exists():
            return {}
        data = json.loads(file.read_text())
        self.rows = data["rows"]
        return {key: data[key] for key in ("note", "date", "command")}

    def wants(self, case: str) -> bool:
        """Whether a case is to be measured."""
        wanted = self.only is None or case in self.only
        if self.listed is None:
            return wanted
        self.listed.extend([case] * wanted)
        return False

    def _put(self, row: dict[str, Any]) -> None:
        names = [(old["case"], old.get("dtype")) for old in self.rows] if self.only else []
        if self.only:
            now = datetime.datetime.now(datetime.UTC)
            row["again"] = now.strftime("%Y-%m-%d %H:%M UTC")
        if (row.get("case"), row.get("dtype")) in names:
            self.rows[names.index((row["case"], row.get("dtype")))] = row
        else:
            self.rows.append(row)

    def add(self, **row: Any) -> None:
        self._put(row)
        if self.folder is not None:
            self.save(self.folder)
        shown = "  ".join(f"{k} {_cell(v)}" for k, v in row.items())
        print(f"  {shown}", flush=True)

    def save(self, folder: str | Path) -> None:
        """``<name>-<machine>.json`` and a readable ``.md`` beside it."""
        machine = machine_name(self.device)
        stem = Path(folder) / f"{self.name}-{machine}"
        data = {
            "name": self.name,
            "note": self.note,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": "python -m " + shlex.join([_module(), *_asked()]),
            "machine": describe(self.device) | self.versions,
            "rows": self.rows,
            **self.kept,
        }
        write_atomic(stem.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
        write_atomic(stem.with_suffix(".md"), markdown(data))


def _module() -> str:
    """The module of this folder that is run; others run all through ``bench.run``."""
    file = Path(sys.argv[0])
    return f"bench.{file.stem}" if file.resolve().parent == Path(__file__).parent else "bench.run"


def _asked() -> list[str]:
    """The arguments of this run, less the folder that its records went to."""
    args = sys.argv[1:]
    if "--out" in args:
        at = args.index("--out")
        args = args[:at] + args[at + 2 :]
    return args


def markdown(data: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in data["machine"].items())
    lines = [
        f"# {data['name']}",
        "",
        data["note"],
        "",
        f"{facts}; {data['date']}; `{data['command']}`",
        "",
    ]
    columns = list(dict.fromkeys(key for row in data["rows"] for key in row))
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|" + "---|" * len(columns))
    for row in data["rows"]:
        lines.append("| " + " | ".join(_cell(row.get(c, "")) for c in columns) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e4 else f"{value:.3f}"
    return str(value)


def machine_name(device: str) -> str:
    if device == "cuda":
        return deuteron.target("cuda").name
    return f"cpu-{platform.machine()}-{torch.get_num_threads()}-threads"


def describe(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "deuteron": deuteron.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if device == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": torch.backends.cudnn.version(),
        }
        try:
            import triton

            facts["triton"] = triton.__version__
        except ImportError:
            pass
    else:
        facts |= cpu_identity()
        if cpu_clock() is time.thread_time:
            facts["clock"] = "time that the thread was running"
    peers = (sys.modules.get(n) for n in ("torchvision", "transformers", "onnxruntime"))
    return facts | {peer.__name__: peer.__version__ for peer in peers if peer is not None}


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """While nobody else measures: processes of :mod:`bench.apart` do so one after another."""
    if (file := os.environ.get(TURN)) is None:
        yield
        return
    import fcntl

    with open(file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cpu_clock() -> Callable[[], float]:
    """What CPUs are timed by: the clock, or with ``BENCH_CLOCK=thread`` the time that one thread
    was really running, on a machine that others compute on as well."""
    if os.environ.get("BENCH_CLOCK") != "thread":
        return time.perf_counter
    if torch.get_num_threads() > 1:
        sys.exit("BENCH_CLOCK=thread counts the work of one thread: set OMP_NUM_THREADS=1")
    return time.thread_time


WARM_S = 0.05  # a core that slept needs tens of milliseconds to be at speed again


def medians(samples: Samples) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def over(samples: Samples, peer: str, name: str) -> float:
    """The peer's time over that of ``name``, turns of the same round compared: a machine that
    becomes slower or quicker meanwhile does so for both, and the median of their ratios strays half
    as far as the ratio of their medians."""
    return statistics.median(a / b for a, b in zip(samples[peer], samples[name], strict=True))


def cpu_times(contenders: Mapping[str, Thunk], seconds: float = 6.0, gap: float = 0.02) -> dict:
    """Median milliseconds of :func:`cpu_samples`."""
    return medians(cpu_samples(contenders, seconds, gap))


def cpu_samples(contenders: Mapping[str, Thunk], seconds: float, gap: float) -> Samples:
    """Contenders in turns with a pause between them, so that thread pools that spin after a call
    do not charge their neighbour. Calls that are not counted come first, until cores are awake, and
    the turns begin with another contender each time: who follows a spinning pool finds them
    awake."""
    samples: Samples = {name: [] for name in contenders}
    clock = cpu_clock()
    for fn in contenders.values():
        fn()
        fn()
    end = time.perf_counter() + seconds
    rounds, order = 0, list(contenders.items())
    while rounds < 5 or (time.perf_counter() < end and rounds < 60):
        for name, fn in order:
            time.sleep(gap)
            awake = time.perf_counter() + WARM_S
            while is_short(samples[name]) and time.perf_counter() < awake:
                fn()
            begin = clock()
            fn()
            samples[name].append((clock() - begin) * 1e3)
        order.append(order.pop(0))
        rounds += 1
        if rounds >= 3 and time.perf_counter() > end:
            break
    return samples


def is_short(samples: list[float]) -> bool:
    """Whether a call is short enough to be made once more for nothing."""
    return not samples or samples[-1] < 1000.0


def onnx_runtime(module: torch.nn.Module, *args: torch.Tensor) -> Thunk | None:
    """The module in ONNX Runtime with as many threads as torch has, or None where that is not
    installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(_as_onnx(module, args), options)
    names = [each.name for each in session.get_inputs()]
    feed = {name: x.contiguous().numpy() for name, x in zip(names, args, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _as_onnx(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> bytes:
    """The module by torch's exporter for TorchScript, or by the newer one if that lacks an
    operator, such as aten::diff in the masks of transformers."""
    quiet = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
    ):
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        try:
            torch.onnx.export(module, args, file, dynamo=False)
            return file.getvalue()
        except torch.onnx.errors.OnnxExporterError:
            program = torch.onnx.export(module, args, dynamo=True, verbose=False)
            made = program.model_proto.SerializeToString()
            return bytes(made)


WARM_COMPILE = "BENCH_WARM_COMPILE"  # set where torch.compile finds its kernels on disk


def compiled(
    model: torch.nn.Module, x: torch.Tensor, mode: str, calls: int, reset: bool = True
) -> tuple[Thunk, float]:
    """The module by torch.compile, and the seconds of its first calls if its cache was empty."""
    if reset:  # or one that was compiled before is compiled again at its next call
        torch._dynamo.reset()
    begin = time.perf_counter()
    made = torch.compile(model, mode=mode)
    for _ in range(calls):
        made(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return lambda: made(x), float("nan") if WARM_COMPILE in os.environ else seconds


def in_float64(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """What the module gives for the first image or text, exactly."""
    wide = copy.deepcopy(model).double()
    return wide(x[:1].double() if x.is_floating_point() else x[:1])


def replay_times(graphs: Mapping[str, Thunk], rounds: int = 15) -> dict:
    """Median milliseconds of :func:`replay_samples`."""
    return medians(replay_samples(graphs, rounds))


def replay_samples(graphs: Mapping[str, Thunk], rounds: int) -> Samples:
    """GPU milliseconds per call of things that only replay, by events, in turns of random order:
    who follows whom made up to one per cent."""
    samples: Samples = {name: [] for name in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for fn in graphs.values():
        fn()
    torch.cuda.synchronize()
    order, shuffle = list(graphs.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name, fn in order:
            replays, calls = (1, fn.calls) if isinstance(fn, Captured) else (4, 4)
            fn()  # not counted: the caches hold what another contender left there
            begin.record()
            for _ in range(replays):
                fn()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / calls)
    return samples


def wall_times(contenders: Mapping[str, Thunk], rounds: int = 15, calls: int = 10) -> dict:
    """Median milliseconds of :func:`wall_samples`."""
    return medians(wall_samples(contenders, rounds, calls))


def wall_samples(contenders: Mapping[str, Thunk], rounds: int, calls: int) -> Samples:
    """Wall time per call with the queue kept full, launch overhead included. The contenders of a
    round come in random order, and Python collects no garbage meanwhile."""
    samples: Samples = {name: [] for name in contenders}
    for fn in contenders.values():
        fn()
    order, shuffle = list(contenders.items()), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name, fn in order:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    fn()
                torch.cuda.synchronize()
                samples[name].append((time.perf_counter() - begin) / calls * 1e3)
    finally:
        gc.enable()
    return samples


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    out, exact = out.double(), exact.double()
    return float((out - exact).norm() / exact.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Captured:
    """``calls`` calls of ``fn`` as one CUDA Graph, which calling this replays."""

    graph: torch.cuda.CUDAGraph
    calls: int
    fn: Thunk  # keeps alive what the graph reads

    def __call__(self) -> None:
        self.graph.replay()


GRAPH_MS = 2.0  # a graph of one short call would measure the launching of graphs


def captured(fn: Thunk) -> Captured:
    """Calls of ``fn`` as a CUDA Graph of a few milliseconds. What they return is dropped, and all
    graphs of a process share their memory: contenders that allocate alike write to the same
    addresses, on which the speed of memory depends by one or two per cent."""
    fn()
    fn()
    calls = max(1, min(50, round(GRAPH_MS / (by_events(fn) * 1e3))))

    def several() -> None:
        for _ in range(calls):
            fn()

    graph, _ = capture(several, warmups=1, pool=_pool())
    return Captured(graph, calls, fn)


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


def copying(moved: int, sets: int = 1) -> Thunk:
    """Half of ``moved`` bytes read and half written, ``sets`` times, by a kernel that does nothing
    else. The driver's own copy is as quick for most sizes, but not for all: 2.7 instead of 4.2 TB/s
    where a size is no multiple of 8 KB, and above 512 MB."""
    sources = [
        torch.empty(moved // 8, dtype=torch.int32, device="cuda").random_() for _ in range(sets)
    ]
    target = torch.empty_like(sources[0])
    return captured(lambda: [torch.neg(source, out=target) for source in sources])
