"""Threads: torch's own OpenMP runtime, entered directly.

torch keeps a team of threads that spins for a moment between calls. Using the same team costs
about 2 µs per call; a second pool would fight it for the cores. Where no runtime with GCC's
interface is loaded, kernels run on the calling thread.
"""

import ctypes
from functools import lru_cache
from importlib.util import find_spec
from typing import Any


@lru_cache
def available() -> bool:
    """Whether kernels can be generated at all; does not import llvmlite."""
    return find_spec("llvmlite") is not None


def _loaded_libraries() -> list[str]:
    """Paths of the libraries in this process that may hold an OpenMP runtime."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if line.count("/")}
    except OSError:
        return []
    marks = ("libgomp", "libomp", "libiomp")
    return sorted(p for p in paths if any(mark in p.rsplit("/", 1)[-1] for mark in marks))


class Runtime:
    """The functions of one OpenMP library, and the system's ``sched_yield``."""

    def __init__(self, library: Any) -> None:
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        self.number, self.count, self.barrier = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        )
        self.pause = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@lru_cache
def runtime() -> Runtime | None:
    """torch's OpenMP runtime, or None, as on systems that do not say what is loaded."""
    for path in _loaded_libraries():
        try:
            return Runtime(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
    return None
