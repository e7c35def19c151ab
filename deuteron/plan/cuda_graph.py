"""Work captured as CUDA Graphs, and a whole plan replayed as one: one launch, however many kernels
it has."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from deuteron.ir.types import TensorType
from deuteron.plan.program import Program
from deuteron.plan.tensors import duplicate, overlaps

T = TypeVar("T")


def warm_up(fn: Callable[[], object], times: int = 2) -> None:
    """Runs ``fn`` beside the work of others: it searches for algorithms, loads modules, fills
    caches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(
    fn: Callable[[], T], warmups: int = 2, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """``fn`` captured, and what it returned while it was. Its memory is its own, or that of other
    graphs with the same ``pool``, which must not run at the same time.

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
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = fn()
    except RuntimeError:
        # a capture that breaks off leaves the generator believing it goes on: give it a new state
        fresh = torch.Generator(device=random.device).manual_seed(seed)
        fresh.set_offset(offset)
        random.graphsafe_set_state(fresh)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph, result


def captured_or_none(fn: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """``fn`` captured, without gradients, or None where that is not possible."""
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
        # runs may come from inside and outside inference mode, so what they write to is plain
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
    """Copies a tensor whose elements share memory: the memory once, not the elements."""

    def copy(given: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        span = given.as_strided((type_.storage_numel,), (1,))
        return block.copy_(span, non_blocking=non_blocking)

    return copy
