"""Targets: facts about machines. Code asks a target what it has, never which one it is.

``peak`` is dense arithmetic by element type, in operations per second, and ``bandwidth`` is memory
traffic, in bytes per second, both as published; ``reach`` is the fraction of each that well-written
code attains. The H200's reach was measured (copy 4.25 TB/s, bf16 products 690–790 TF/s); the others
are given about the same fractions until somebody measures them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.files import cache_dir, remember

STEP = 2.0**0.5  # the ratio between neighbouring values to which coarse() rounds a CPU's rates
T = 1e12
G = 1e9


@dataclass(frozen=True)
class Target:
    """What a plan needs to know about a machine.

    ``launch`` is the time one kernel costs however little it does, inside a CUDA Graph on a
    GPU and per call on a CPU; ``call`` is the same from Python without a graph.
    """

    name: str
    kind: str  # "cuda" or "cpu"
    units: int  # multiprocessors or cores
    bandwidth: float
    peak: Mapping[str, float]
    cache_bytes: int
    cache_bandwidth: float
    memory_bytes: int
    launch: float
    call: float
    reach: Mapping[str, float] = field(default_factory=lambda: {"memory": 0.88, "compute": 0.72})
    features: frozenset[str] = frozenset()
    largest_cache: int = 0  # bytes, where it is shared and larger than ``cache_bytes``
    shared_bytes: int = 0  # shared memory of a multiprocessor that one block of threads may use
    link: float = 2e9  # bytes per second, each way, to others in the same node; see _LINKS
    network: float = 1e9  # the same to other nodes
    per_node: int = 1  # how many of these machines are a node
    link_latency: float = 5e-5  # seconds that a message takes within a node, however small
    network_latency: float = 1e-4  # the same to another node
    host: float = 8e9  # bytes per second, each way, to the memory of the host
    handed: float = 1e10  # bytes per second that a CPU thread reads from another core's cache
    # seconds more that torch needs to multiply by a small matrix that is stored column by column
    by_columns: float = 0.0

    @property
    def has_fp8(self) -> bool:
        return "fp8" in self.features

    @property
    def has_tensor_cores(self) -> bool:
        return "tensor_cores" in self.features

    @property
    def has_warpgroups(self) -> bool:
        """Whether groups of four warps multiply matrices from shared memory, as on Hopper."""
        return "warpgroups" in self.features

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def rate(self, dtype: str, product: bool = True, allow_tf32: bool = False) -> float:
        """Attainable operations per second on ``dtype``; products may use the matrix units."""
        if product and dtype == "f32" and allow_tf32 and "tf32" in self.peak:
            dtype = "tf32"
        if not product:
            dtype = "f64" if dtype == "f64" else "f32"  # vector units, whatever the storage type
        return self.peak.get(dtype, self.peak["f32"]) * self.reach["compute"]

    @property
    def stream(self) -> float:
        """Attainable memory bandwidth."""
        return self.bandwidth * self.reach["memory"]

    @property
    def at_best(self) -> Target:
        """The same machine under the most favourable assumptions: whatever fits into its largest
        cache is in there, and a CPU's rates, which are rounded to steps, are half a step higher."""
        more = 1.0 if self.is_cuda else STEP**0.5
        peak = {kind: more * rate for kind, rate in self.peak.items()}
        memory, cache = more * self.bandwidth, more * self.cache_bandwidth
        room = 2 * max(self.largest_cache, self.cache_bytes)
        return replace(self, peak=peak, bandwidth=memory, cache_bandwidth=cache, cache_bytes=room)


# Per machine: multiprocessors, and KB of shared memory for a block; TB/s of memory and of the
# cache; MB of cache, GB of memory; and dense 10¹² operations per second by element type, 8-bit
# floats last, 0 where there are none.
_GPUS = """
         units  KB   TB/s  cache    MB   GB    f64   f32  tf32   f16    i8   f8
a100      108  163  2.039    4.0    40   80   19.5  19.5   156   312   624    0
h100      132  227  3.35     5.5    50   80   67    67     494   989  1979 1979
h200      132  227  4.8      5.5    60  141   67    67     494   989  1979 1979
b200      148  227  8.0     10.0   126  180   37    75    1100  2250  4500 4500
l4         58   99  0.3      1.5    48   24   0.47  30.3    60   121   242  242
rtx4090   128   99  1.008    5.0    72   24   1.29  82.6  82.6   165   330  330
"""
# How these machines are connected. As published: GB/s each way to others in the same node (NVLink
# where there is one, else PCIe 4 with 16 lanes), GB/s each way of the network card of each machine,
# and machines in a node. Not published, but usual for NCCL: µs for a message within a node and to
# another node. Last: GB/s each way to the memory of the host (PCIe 4 or 5 with 16 lanes).
_LINKS = """
         GB/s  network  node  near  far  host
a100      300       25     8     3    8    32
h100      450       50     8     3    8    64
h200      450       50     8     3    8    64
b200      900       50     8     3    8    64
l4         32     12.5     8     6   15    32
rtx4090    32     12.5     8     6   15    32
"""
_LINKED = {words[0]: words[1:] for words in map(str.split, _LINKS.strip().splitlines()[1:])}
HOPPER = ("h100", "h200")
_REACH = {"h200": {"memory": 0.885, "compute": 0.73}}  # where it was measured


def _gpu(name: str, *row: str) -> Target:
    units, shared, memory, cache, cache_mb, memory_gb, *rated = map(float, row)
    f64, f32, tf32, f16, i8, fp8 = rated
    peak = {"f64": f64, "f32": f32, "tf32": tf32, "f16": f16, "bf16": f16, "i8": i8}
    peak |= {"f8e4m3": fp8, "f8e5m2": fp8} if fp8 else {}
    rates = {kind: rate * T for kind, rate in peak.items()}
    features = {"tensor_cores", "bf16", "tf32", "int8"} | ({"fp8"} if fp8 else set())
    features |= {"warpgroups"} if name in HOPPER else set()
    rest = int(cache_mb * 2**20), cache * T, int(memory_gb * G), 2.2e-6, 6e-6
    reach = _REACH.get(name, {"memory": 0.88, "compute": 0.72})
    own: Any = {"features": frozenset(features), "shared_bytes": int(shared) << 10}
    link, network, node, near, far, host = map(float, _LINKED[name])
    own |= {"link": link * G, "network": network * G, "per_node": int(node), "host": host * G}
    own |= {"link_latency": near * 1e-6, "network_latency": far * 1e-6}
    return Target(name, "cuda", int(units), memory * T, rates, *rest, reach, **own)


GPUS = {words[0]: _gpu(*words) for words in map(str.split, _GPUS.strip().splitlines()[1:])}

# a word in the driver's name for the GPU → our name
_GPU_NAMES = {name.upper(): name for name in ("h200", "h100", "a100", "b200", "l4")}
_GPU_NAMES |= {"GH200": "h200", "GB200": "b200", "4090": "rtx4090"}


def names() -> list[str]:
    """The targets that can be asked for by name."""
    return [*GPUS, "cpu"]


def target(name: str | Target | torch.device | None = None) -> Target:
    """A target by name ("h200", "cpu"), by torch device, or the best machine present."""
    if isinstance(name, Target):
        return name
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    text = str(name).lower()
    if text in GPUS:
        return GPUS[text]
    if text.split(":")[0] == "cpu":
        return _cpu(torch.get_num_threads())
    if text.split(":")[0] == "cuda":
        if not torch.cuda.is_available():
            remedy = f"name a machine to plan for: {', '.join(GPUS)}"
            raise GraphError("no CUDA device is present", asked=f"target {text!r}", remedy=remedy)
        index = int(text.split(":")[1]) if ":" in text else torch.cuda.current_device()
        return _present_gpu(index)
    remedy = f"use {', '.join(names())}"
    raise GraphError(f"unknown target {name!r}", asked=f"target({name!r})", remedy=remedy)


@lru_cache
def has_triton() -> bool:
    """Whether Triton is installed, so that its kernels can be compiled here. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@lru_cache
def _present_gpu(index: int) -> Target:
    props = torch.cuda.get_device_properties(index)
    for word in re.split(r"[^A-Z0-9]+", props.name.upper()):  # an L40 is no L4
        if word in _GPU_NAMES:
            return GPUS[_GPU_NAMES[word]]
    # an unknown GPU: scale the nearest generation by its multiprocessors
    base = GPUS["h100"] if props.major >= 9 else GPUS["a100"] if props.major == 8 else GPUS["l4"]
    scale = props.multi_processor_count / base.units
    later = {"warpgroups"} if props.major > 9 else set[str]()
    return replace(
        base,
        features=base.features - later,
        name=props.name.lower().replace(" ", "-"),
        units=props.multi_processor_count,
        bandwidth=base.bandwidth * scale,
        peak={k: v * scale for k, v in base.peak.items()},
        cache_bytes=getattr(props, "L2_cache_size", base.cache_bytes),
        cache_bandwidth=base.cache_bandwidth * scale,
        memory_bytes=props.total_memory,
        shared_bytes=getattr(props, "shared_memory_per_block_optin", 99 << 10),
    )


# ---- the CPU it runs on: measured once, remembered ------------------------------------------


def cpu_identity() -> dict[str, Any]:
    """What two CPU measurements must have in common to be comparable."""
    model = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo") as info:
        named = (line for line in info if line.startswith(("model name", "CPU part")))
        model = next(named, f":{model}").split(":", 1)[1].strip()
    known = {"model": model, "machine": platform.machine()}
    return known | {"threads": torch.get_num_threads(), "torch": torch.__version__}


@lru_cache
def _cpu(threads: int) -> Target:
    """The target of this CPU with this many threads, which torch.set_num_threads may change."""
    path, identity = _record_of_cpu(threads)
    try:
        saved = json.loads(path.read_text())
        measured = {k: float(v) for k, v in dict(saved["measured"]).items()}
        if saved["identity"] == identity and all(0 < v < math.inf for v in measured.values()):
            return _cpu_target(**measured)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, damaged or of another machine: measure again
    measured = {k: coarse(v) for k, v in measure_cpu().items()}
    remember_cpu(measured)
    return _cpu_target(**measured)


def _record_of_cpu(threads: int) -> tuple[Path, dict[str, Any]]:
    """The file that keeps the rates of this CPU, and the identity that they are valid for."""
    return cache_dir() / f"cpu-{threads}.json", cpu_identity() | {"measured by": MEASURED_BY}


def remember_cpu(measured: Mapping[str, float]) -> None:
    """Keep these rates, for plans for this CPU with the present number of threads."""
    path, identity = _record_of_cpu(torch.get_num_threads())
    record = {"identity": identity, "measured": dict(measured)}
    remember(path, json.dumps(record, indent=1) + "\n")


def coarse(rate: float) -> float:
    """Round to the nearest of 1, 1.41, 2, 2.83, … Which candidate is the cheapest must not depend
    on what else ran while the machine was measured: measuring again should give the same number."""
    return float(2.0 ** (round(2 * math.log2(rate)) / 2))


def _cpu_target(
    f32: float,
    f64: float,
    f16: float,
    bf16: float,
    memory: float,
    cache: float,
    call: float,
    by_columns: float,
) -> Target:
    threads = torch.get_num_threads()
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        total = 8 * 2**30
    rates = {"f32": f32, "f64": f64, "f16": f16, "bf16": bf16, "i8": f32 / 2}
    sizes, reach = (2**20 * threads, cache, total), {"memory": 1.0, "compute": 1.0}
    cpu = Target("cpu", "cpu", threads, memory, rates, *sizes, call, call, reach)
    return replace(cpu, largest_cache=_largest_cache(), by_columns=by_columns)


def _caches() -> dict[int, int]:
    """Bytes of the CPU's caches by level, as far as the system reports them."""
    found = {0: 0}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with suppress(OSError, ValueError):
            size = int((path / "size").read_text().strip().removesuffix("K")) * 2**10
            found[int((path / "level").read_text())] = size
    return found


def _largest_cache() -> int:
    """Bytes of the CPU's largest cache, or 0 where the system does not report any."""
    return max(_caches().values())


@lru_cache
def core_cache() -> int:
    """Bytes of a core's second-level cache, which holds data and code."""
    return _caches().get(2, 2**20)


MEASURED_BY = 4  # increase it when measure_cpu changes how it measures
SAMPLES, SAMPLED_S = 50, 0.1  # samples and seconds per quantity, whichever limit is reached first
NOTICED_S = 2e-5  # a by_columns below this counts as none: noise would change it every time


def measure_cpu() -> dict[str, float]:
    """Measure product rates, copy bandwidth (from memory and from cache), the cost of one call, and
    how much longer a product takes if a small matrix is stored column by column: on some machines
    oneDNN then needs 0.2 ms more.

    Other programs may run meanwhile, and then threads that wait for each other take many times as
    long by the clock. So one thread alone is measured as well, by its CPU time: all threads
    together are taken to be no slower than that, and no faster than that times their number.
    """
    n = 512 if torch.get_num_threads() <= 8 else 1024
    big, small = torch.ones(2, 32, 2**19), torch.ones(2, 2**16)  # 128 MB, copied part by part
    part = itertools.cycle(range(32))
    one, one_out = torch.ones(8), torch.empty(8)

    def copy_next() -> None:
        k = next(part)
        big[1, k].copy_(big[0, k])

    def product(size: int, dt: torch.dtype) -> Callable[[], object]:
        a, b = torch.randn(2, size, size, dtype=dt)
        out = torch.empty(size, size, dtype=dt)
        return lambda: torch.mm(a, b, out=out)

    work: dict[str, tuple[float, Callable[[], object]]] = {
        "f32": (2 * n**3, product(n, torch.float32)),
        "f64": (2 * (n // 2) ** 3, product(n // 2, torch.float64)),
        # from a fifth of float32's rate to, where a CPU has matrix tiles, seven times that rate
        "f16": (2 * (n // 2) ** 3, product(n // 2, torch.float16)),
        "bf16": (2 * (n // 2) ** 3, product(n // 2, torch.bfloat16)),
        "memory": (8 * 2**19, copy_next),
        "cache": (8 * 2**16, lambda: small[1].copy_(small[0])),
    }
    threads = torch.get_num_threads()

    def rates_by(clock: Callable[[], float]) -> dict[str, float]:
        return {name: amount / _best(run, clock) for name, (amount, run) in work.items()}

    rows, columns = torch.randn(2, 4, 32, 32)

    def ten_calls() -> None:
        for _ in range(10):
            torch.add(one, one, out=one_out)

    together = rates_by(time.perf_counter)
    torch.set_num_threads(1)
    try:
        alone = rates_by(time.thread_time)
        calls = _best(ten_calls, time.thread_time)
        plain = _best(lambda: torch.bmm(rows, columns), time.thread_time)
        turned = _best(lambda: torch.bmm(rows, columns.mT), time.thread_time)
    finally:
        torch.set_num_threads(threads)
    rates = {k: min(max(together[k], alone[k]), threads * alone[k]) for k in work}
    longer = (turned - plain) / len(rows)
    once = {"call": calls / 10, "by_columns": longer if longer > NOTICED_S else 1e-12}
    return rates | {"cache": max(rates["cache"], rates["memory"])} | once


def _best(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """The shortest time that a call takes, by this clock."""
    run()
    best, end = math.inf, time.perf_counter() + SAMPLED_S
    for _ in range(SAMPLES):
        begin = clock()
        run()
        best = min(best, clock() - begin)
        if time.perf_counter() > end:
            break
    return max(best, 1e-9)
