"""The body of a step as CUDA Graphs, one for each size of a batch.

The first calls of a size run the body uncaptured, on a stream of its own: kernels are compiled,
libraries choose algorithms, and the optimiser makes its state. Then the body is captured, which
runs nothing, and replayed. Batches are copied to the tensors that the graph reads. Those on the
host are first copied to staging tensors, on another stream, while the last step still runs.

A graph's memory is one piece. Left alone, torch's allocator asks for a separate piece for every
large tensor that fits in none it has, and pieces are never joined: what the small tensors at a
network's end leave free would be of no use to the large gradients of its beginning. So a capture
first takes one piece as large as the last uncaptured call had in use at once, and gives it back.
All tensors of the step then lie in that piece, where free neighbours are merged.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from deuteron.plan import Plan
from deuteron.plan.cuda_graph import capture
from deuteron.training.batch import Key, placed

WARM_UPS = 2  # calls of a size that run uncaptured
MOST = 8  # graphs that are kept
# GAPS: the piece of memory as a multiple of the bytes in use at once, to allow for gaps between
# tensors. LIBRARIES: bytes of a second piece, for the 32 MiB of scratch memory that cuBLAS takes in
# the graph and does not give back; otherwise they would lie between the step's tensors.
GAPS, LIBRARIES = 1.02, 34 << 20
OUT_OF_MEMORY = r"Tried to allocate ([\d.]+ \w+).*?of which ([\d.]+ \w+) is free"  # torch's words
DEFAULT_STREAM = "legacy stream"  # CUDA's words for it
T = TypeVar("T")
Body = Callable[[list[Any]], T]


class Captures(Generic[T]):
    """Graphs by batch size. They share their memory, as never two of them run at once.

    ``captured``: whether the last run was a graph; ``note``: if it was not, why.
    """

    def __init__(self, device: torch.device, plans: Sequence[Plan] = ()) -> None:
        """``plans``: those that run in the body; once it is captured they release their memory."""
        self.device, self.plans = device, plans
        self.captured, self.note = False, ""
        self.side, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.seen: Counter[Key] = Counter()  # calls that ran uncaptured
        self.used: dict[Key, int] = {}  # bytes that the last of them had in use at once
        self.failed: dict[Key, str] = {}
        self.drop()

    def drop(self) -> None:
        """Forget the graphs, because something that they have frozen has changed."""
        self.graphs: dict[Key, Captured[T]] = {}
        self.pool = torch.cuda.graph_pool_handle()  # no graph may join the pool of dead ones

    def begin_anew(self) -> None:
        """Forget the graphs and all that is known of each size: the next calls run uncaptured."""
        self.drop()
        self.seen.clear()
        self.failed.clear()

    def run(self, key: Key, leaves: list[Any], body: Body[T], ready: bool) -> T:
        """Run the body for a batch, as a graph if there is one or this call can capture it.
        ``ready``: whether it may be captured yet."""
        with torch.cuda.device(self.device):
            if key not in self.graphs and self._is_due(key, ready):
                # what earlier calls left may still hold nodes of autograd of the default stream
                gc.collect()
                try:
                    used = self.used[key]
                    room = 0 if self.graphs else int(GAPS * used)
                    self.graphs[key] = Captured(leaves, body, self, room)
                    for plan in self.plans:
                        plan.program.release()
                    for other in self.seen:  # dt.optim must step uncaptured between captures
                        self.seen[other] = min(self.seen[other], WARM_UPS - 1)
                except RuntimeError as error:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    self.failed[key] = self.note = _why(error)
            self.captured = key in self.graphs
            if self.captured:
                self.note = ""
                return self.graphs[key].run(leaves)
            self.seen[key] += 1
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                return self._as_it_is(leaves, body)
            finally:
                self.used[key] = torch.cuda.max_memory_allocated() - before

    def _is_due(self, key: Key, ready: bool) -> bool:
        self.note = self.failed.get(key, "")
        if not self.note and len(self.graphs) == MOST:
            self.note = f"{MOST} sizes are captured already"
        if not self.note and (self.seen[key] < WARM_UPS or not ready):
            self.note = f"the first {WARM_UPS} calls with batches of a size run as they are"
        return not self.note

    def _as_it_is(self, leaves: list[Any], body: Body[T]) -> T:
        here = torch.cuda.current_stream(self.device)
        self.side.wait_stream(here)
        try:
            with torch.cuda.stream(self.side):
                return body(placed(leaves, self.device))
        finally:
            here.wait_stream(self.side)


class Captured(Generic[T]):
    """One graph, the tensors that it reads batches from, and those that it writes."""

    def __init__(self, leaves: list[Any], body: Body[T], home: Captures[T], room: int) -> None:
        """``room``: bytes that the graph takes as one piece; 0 if earlier graphs have taken it."""
        self.device, self.copies = home.device, home.copies
        self.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.inputs = list(leaves)
        for i in self.tensors:
            self.inputs[i] = leaves[i].detach().to(self.device, copy=True)
        self.staged: dict[int, torch.Tensor] = {}
        self.taken = torch.cuda.Event()  # recorded once the staged batch has been read
        taken: Any = {"dtype": torch.uint8, "device": self.device}

        def whole() -> T:
            # both are freed at once, and then the body's tensors lie in their memory
            (torch.empty(room, **taken), torch.empty(LIBRARIES if room else 0, **taken))
            return _told(body, self.inputs)

        self.graph, self.result = capture(whole, 0, home.pool, home.side)

    def run(self, leaves: list[Any]) -> T:
        here = torch.cuda.current_stream(self.device)
        away = [i for i in self.tensors if leaves[i].device != self.device]
        if away:
            for i in away:
                if i not in self.staged:
                    self.staged[i] = torch.empty_like(self.inputs[i])
                    self.taken.record(here)  # work here may still use the new tensor's memory
            self.copies.wait_event(self.taken)
            with torch.cuda.stream(self.copies):
                for i in away:
                    self.staged[i].copy_(leaves[i], non_blocking=True)
            here.wait_stream(self.copies)
        for i in self.tensors:
            self.inputs[i].copy_(self.staged[i] if i in away else leaves[i], non_blocking=True)
        self.taken.record(here)
        self.graph.replay()
        return self.result


def _told(body: Body[T], given: list[Any]) -> T:
    """Run the body. Whatever it raises becomes a RuntimeError, after which ``capture`` cleans
    up."""
    try:
        return body(given)
    except Exception as error:
        if isinstance(error, RuntimeError):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _why(error: RuntimeError) -> str:
    said = str(error) or type(error).__name__
    if missing := re.search(OUT_OF_MEMORY, said, re.DOTALL):
        wanted, free = missing.groups()
        return f"out of memory in capture: {wanted} more were wanted, and {free} were free"
    if DEFAULT_STREAM in said:
        return (
            "it could not be captured: gradients are added to parameters on the default stream, "
            "where an earlier loss or hook was made that is still held; let go of it"
        )
    return f"it could not be captured: {said.splitlines()[0]}"
