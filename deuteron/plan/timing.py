"""Timing contenders fairly: they take turns, so that drift of clocks and load hits all alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from types import ModuleType

import torch

from deuteron.plan.cuda_graph import capture, warm_up

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

Thunk = Callable[[], object]


def interleaved(
    contenders: Mapping[str, Thunk],
    device: torch.device,
    *,
    rounds: int = 5,
    seconds: float = 0.25,
    before: Thunk | None = None,
    warm: int = 0,
) -> dict[str, float]:
    """Median seconds per call of each contender, within about ``seconds`` in total. ``before`` is
    called before every call on a CPU, untimed. ``warm``: calls of each contender to warm up on a
    CPU, for at most ``seconds`` more: the hundreds of calls in a row that plans and models make
    take twice as long until memory has been touched and the interpreter has seen them before.

    On a GPU a call is timed by replaying a CUDA Graph of several calls, so that what is
    measured is the device and not Python; contenders that cannot be captured are timed with
    events around plain calls.
    """
    if device.type == "cuda":
        return _cuda(contenders, rounds, seconds)
    for fn in contenders.values() if warm else ():
        end = time.perf_counter() + seconds / len(contenders)
        for _ in range(warm):
            fn()
            if time.perf_counter() > end:
                break
    return _cpu(contenders, rounds, seconds, before)


def timed(
    contenders: Mapping[int, Thunk],
    device: torch.device,
    seconds: float,
    before: Thunk | None = None,
) -> dict[int, float | Exception]:
    """:func:`interleaved`; for a contender that raises, its exception stands in place of a time."""
    try:
        named = {str(i): fn for i, fn in contenders.items()}
        times = interleaved(named, device, seconds=seconds, before=before)
        return {i: times[str(i)] for i in contenders}
    except Exception as error:
        if len(contenders) == 1:
            return dict.fromkeys(contenders, error)
    share = seconds / len(contenders)  # one of them fails: each alone, to know which
    return {i: timed({i: fn}, device, share, before)[i] for i, fn in contenders.items()}


CLOSE = 1.02  # those this close to the best are timed for longer, on a GPU
DROP = 1.5  # a contender this much slower than the best in two samples is not timed again


MOST = 15  # calls of a contender that are timed one by one


def _cpu(
    contenders: Mapping[str, Thunk], rounds: int, seconds: float, before: Thunk | None
) -> dict[str, float]:
    def once(fn: Thunk, calls: int = 1) -> float:
        if before is not None:
            before()
        return _by_clock(fn, calls)

    samples: dict[str, list[float]] = {}
    for name, fn in contenders.items():
        first = _by_clock(fn)  # warms up: allocation, thread pools, lazily built primitives
        # a contender that is too slow to repeat has to make do with one run
        samples[name] = [first if first > seconds else once(fn)]
    best = min((s[0] for s in samples.values()), default=0.0)
    for name, fn in contenders.items():  # a second chance: another program may have been in the way
        if DROP * best < samples[name][0] < seconds:
            samples[name][0] = min(samples[name][0], once(fn))
    best = min((s[0] for s in samples.values()), default=0.0)
    racing = {n: f for n, f in contenders.items() if samples[n][0] <= DROP * best}
    share = seconds / rounds / max(len(racing), 1)
    calls = {n: max(1, min(100, int(share / max(samples[n][0], 1e-7)))) for n in racing}
    end = time.perf_counter() + seconds
    many = MOST if before is not None else rounds
    for _ in range(many if len(racing) > 1 else 2):
        for name, fn in racing.items():
            samples[name].append(once(fn, calls[name] if before is None else 1))
        if time.perf_counter() > end:
            break
    return {name: undisturbed(s[1:] or s) for name, s in samples.items()}


def undisturbed(samples: list[float]) -> float:
    """The middle of the quicker half: other programs only ever add to the time of a call."""
    return sorted(samples)[len(samples) // 4]


def _by_clock(fn: Thunk, calls: int = 1) -> float:
    """Seconds that a call takes. If one thread alone works and never waits, this is its CPU time,
    in which other programs on the same core do not count."""
    waits, begin, computed = _waits(), time.perf_counter(), time.process_time()
    for _ in range(calls):
        fn()
    taken, computed = time.perf_counter() - begin, time.process_time() - computed
    busy = torch.get_num_threads() == 1 and resource is not None and _waits() == waits
    return (computed if busy else taken) / calls


def _waits() -> int:
    """How often this process has waited for something so far."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _cuda(contenders: Mapping[str, Thunk], rounds: int, seconds: float) -> dict[str, float]:
    share = seconds / max(len(contenders), 1) / rounds
    runs: dict[str, tuple[Thunk, int]] = {}
    for name, fn in contenders.items():
        warm_up(fn)
        count = max(1, min(50, int(share / max(by_events(fn), 1e-6))))
        runs[name] = _graph(fn, count)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)  # the order makes a per cent of difference, so it is shuffled

    def turns(names: list[str], rounds: int) -> dict[str, float]:
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                replay, count = runs[name]
                samples[name].append(by_events(replay) / count)
        return {name: statistics.median(s) for name, s in samples.items()}

    found = turns(list(runs), rounds)
    best = min(found.values(), default=0.0)
    close = [name for name, t in found.items() if t <= CLOSE * best]
    return turns(close, 2 * rounds) if len(close) > 1 else found


def by_events(fn: Thunk) -> float:
    """Seconds that a call takes on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _graph(fn: Thunk, count: int) -> tuple[Thunk, int]:
    def many() -> None:
        for _ in range(count):
            fn()

    try:
        graph, _ = capture(many, warmups=0)
    except RuntimeError:
        torch.cuda.synchronize()
        return fn, 1
    graph.replay()
    return graph.replay, count
