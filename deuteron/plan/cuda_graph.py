"""Work captured as CUDA Graphs, and a whole plan replayed as one: one launch, however many kernels
it has."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C import _storage_Use_Count as holders

from deuteron.ir.types import TensorType
from deuteron.plan.program import Program
from deuteron.plan.tensors import duplicate, overlaps

T = TypeVar("T")


def warm_up(fn: Callable[[], object], times: int = 2) -> None:
    """Run ``fn`` on a stream of its own, so that it searches for algorithms, loads modules and
    fills caches before it is captured or timed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(
    fn: Callable[[], T], warmups: int = 2, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture ``fn``. Returns the graph, and what ``fn`` returned meanwhile. The graph has memory
    of its own, or shares that of other graphs with the same ``pool``, which must not run at the
    same time. ``stream``: the stream to capture on, if that matters to ``fn``.

    cuBLAS keeps its scratch memory per stream, wherever it was first allocated: possibly in the
    pool of another graph, which may be gone when this one is replayed. Clearing that memory
    before makes this capture allocate its own, in its own pool; clearing it after keeps others
    from using it.
    """
    warm_up(fn, warmups)
    torch._C._cuda_clearCublasWorkspaces()
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    seed, offset = random.initial_seed(), random.get_offset()
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # garbage may hold what must not be freed in a capture: memory, graphs, events
    # other threads of the process may go on allocating, and destroying what they are done with
    how: Any = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    here = torch.cuda.stream(torch.cuda.current_stream())  # torch by itself does not go back to it
    try:
        with here, torch.cuda.graph(graph, **how):
            result = fn()
    except RuntimeError as error:
        # after a capture that broke off, the generator believes it goes on: give it a new state
        fresh = torch.Generator(device=random.device).manual_seed(seed)
        fresh.set_offset(offset)
        random.graphsafe_set_state(fresh)
        if isinstance(error.__context__, RuntimeError):  # the end of a broken capture fails as well
            raise error.__context__ from None
        raise
    finally:
        if collects:
            gc.enable()
        torch._C._cuda_clearCublasWorkspaces()
    return graph, result


def captured_or_none(fn: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Capture ``fn`` without gradients. None if that is not possible."""
    try:
        with torch.no_grad():
            return capture(fn)[0]
    except RuntimeError:
        torch.cuda.synchronize()
        return None


class CapturedProgram:
    """A program captured once. Inputs are copied to where the graph reads them, and results
    copied out, so that what a caller holds is never overwritten by the next run.

    Runs are serialised: a second thread waits for the first to have queued its work, and a
    second stream waits for the first on the device.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._lock = threading.Lock()
        types = [program.graph.types[v] for v in program.graph.inputs]
        device = program.device
        # runs may come from inside and outside inference mode, so they write to plain tensors
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            blocks = [
                torch.zeros(t.storage_numel, dtype=t.dtype.torch, device=device) for t in types
            ]
            self.static_in = [
                block.as_strided(t.shape, t.strides) for block, t in zip(blocks, types, strict=True)
            ]
            self._copies = [
                (_block_copy(block, t) if overlaps(t) else static.copy_)
                for block, static, t in zip(blocks, self.static_in, types, strict=True)
            ]
            self.graph, self.static_out = capture(lambda: program.run(self.static_in))
            self._results = [
                out.clone if TensorType.from_tensor(out).is_dense else partial(duplicate, out)
                for out in self.static_out
            ]
        self._index = program.device.index or 0
        self._stream = torch.cuda.current_stream(program.device)
        self._raw = self._stream.cuda_stream

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._lock:
            raw = torch._C._cuda_getCurrentRawStream(self._index)
            if raw != self._raw:
                stream = torch.cuda.current_stream(self.program.device)
                stream.wait_stream(self._stream)
                self._stream, self._raw = stream, raw
            for copy, given in zip(self._copies, tensors, strict=True):
                copy(given, non_blocking=True)
            self.graph.replay()
            return [copy_out() for copy_out in self._results]

    def replay(self) -> None:
        """The graph alone, on whatever its inputs hold: what a benchmark times."""
        self.graph.replay()


def _block_copy(block: torch.Tensor, type_: TensorType) -> Callable[..., torch.Tensor]:
    """Return a function that copies a tensor whose elements share memory: it copies the memory
    once, not each element."""

    def copy(given: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        span = given.as_strided((type_.storage_numel,), (1,))
        return block.copy_(span, non_blocking=non_blocking)

    return copy


# ---- captured with the tensors where they are


class Settled:
    """Work on tensors whose addresses are the same in call after call, once they have settled. In a
    loop of training steps that is so for the parameters, and for what the forward half leaves for
    the backward half. After a few calls the work is captured with these tensors where they are;
    only inputs that move are copied. Inputs whose index is in ``moving`` are known to move. Inputs
    in ``written`` are overwritten by the work, so nothing is captured unless these stay.

    Results stay in the graph's memory, except for those ``shown`` to the user, which are copied. A
    graph is not replayed while anybody still holds results of its last run: then a second one is
    captured, and if the results of both are held, the work is launched without a graph. The memory
    of one that has not been replayed for IDLE calls is given back.
    """

    CALLS, MOVING, COPIES, MISSES, IDLE = 3, 0.05, 2, 8, 20

    def __init__(
        self,
        work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        shown: Sequence[int],
        moving: Sequence[int] = (),
        captured: Callable[[], None] = lambda: None,
        written: Sequence[int] = (),
    ) -> None:
        """``captured`` is called when a graph has been made."""
        self._written = tuple(written)
        self.work, self.shown, self.moving = work, frozenset(shown), frozenset(moving)
        self._after = captured
        self.captured: list[_Captured] = []
        self.note = ""  # why nothing is captured
        self._seen: list[int] = []
        self._calls = self._missed = 0
        self._lock = threading.Lock()

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.note or torch.cuda.is_current_stream_capturing():
            return self.work(tensors)
        with self._lock:
            places = list(map(torch.Tensor.data_ptr, tensors))
            for graph in self.captured:
                if graph.lies(places) and not graph.is_held():
                    self._missed = 0
                    self._drop_idle(graph)
                    return graph.run(tensors)
            before, self._seen = self._seen, places
            self._calls += 1
            self._missed += 1
            same = [a == b for a, b in zip(before, places, strict=False)]
            stays = [s and i not in self.moving for i, s in enumerate(same)]
            if not self._may_capture(tensors, stays):
                return self.work(tensors)
            try:
                graph = _Captured(self.work, tensors, stays, self.shown)
            except RuntimeError as error:
                torch.cuda.synchronize()
                self.note = str(error).splitlines()[0]
                return self.work(tensors)
            del self.captured[: len(self.captured) - self.COPIES + 1]
            self.captured.append(graph)
            self._after()
            return graph.run(tensors)

    def _drop_idle(self, used: _Captured) -> None:
        if len(self.captured) > 1:
            for graph in self.captured:
                graph.idle = 0 if graph is used else graph.idle + 1
            self.captured = [graph for graph in self.captured if graph.idle < self.IDLE]

    def _may_capture(self, tensors: Sequence[torch.Tensor], stays: Sequence[bool]) -> bool:
        if len(stays) < len(tensors) or self._calls < self.CALLS:
            return False
        if not all(stays[i] for i in self._written):
            return False
        if len(self.captured) == self.COPIES and self._missed < self.MISSES:
            return False
        others = [(t.nbytes, stays[i]) for i, t in enumerate(tensors) if i not in self.moving]
        moved = sum(size for size, stay in others if not stay)
        little = moved <= self.MOVING * sum(size for size, _ in others)
        return little or self._missed >= self.MISSES


class _Captured:
    """A CUDA Graph that reads some tensors where they were when it was captured; the others are
    copied in."""

    def __init__(
        self,
        work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        stays: Sequence[bool],
        shown: frozenset[int],
    ) -> None:
        pairs = list(zip(tensors, stays, strict=True))
        self._stay = [i for i, (_, stay) in enumerate(pairs) if stay]
        self._places = [tensors[i].data_ptr() for i in self._stay]
        with torch.inference_mode(False), torch.no_grad():
            inside = [t.detach() if stay else duplicate(t) for t, stay in pairs]
            self._moved = [(i, inside[i]) for i, (_, stay) in enumerate(pairs) if not stay]
            self.graph, self._out = capture(lambda: work(inside), warmups=0)
        self._shown = shown
        # the graph's memory in which results lie, and how many hold each piece if no caller does
        theirs = {t.untyped_storage().data_ptr() for t, stay in pairs if stay}
        handed = (t.untyped_storage() for i, t in enumerate(self._out) if i not in shown)
        self._memory = [memory for memory in handed if memory.data_ptr() not in theirs]
        self._free: list[int] = []
        self._stream: torch.cuda.Stream | None = None
        self.idle = 0  # calls since it was replayed last

    def lies(self, places: Sequence[int]) -> bool:
        return [places[i] for i in self._stay] == self._places

    def is_held(self) -> bool:
        """Whether anybody still holds results of the last run."""
        return self._holders() != self._free

    def _holders(self) -> list[int]:
        return [holders(memory._cdata) for memory in self._memory]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        for i, to in self._moved:
            to.copy_(tensors[i], non_blocking=True)
        self.graph.replay()
        if not self._free:
            self._free = self._holders()
        # new tensors over the same memory, which a caller may write to
        return [duplicate(t) if i in self._shown else t.data for i, t in enumerate(self._out)]
