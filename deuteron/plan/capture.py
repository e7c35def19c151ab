"""Capturing work as a CUDA Graph so that it stays valid for as long as the graph lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


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
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):  # searches for algorithms, loads modules, fills caches
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
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
