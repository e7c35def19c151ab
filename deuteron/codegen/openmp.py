"""Threads: torch's own OpenMP runtime, entered directly.

torch keeps a team of threads that spins for a moment between calls. Using the same team costs
about 2 µs per call; a second pool would fight it for the cores. Where no runtime with GCC's
interface is loaded, kernels run on the calling thread.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

HEAD = 2  # words at the front of every kernel's arguments that belong to this file


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
    """The functions of one OpenMP library."""

    def __init__(self, library: Any) -> None:
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        self.number, self.count = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for name in ("omp_get_thread_num", "omp_get_num_threads")
        )


@lru_cache
def runtime() -> Runtime | None:
    """torch's OpenMP runtime, or None."""
    if sys.platform == "win32":
        return None
    for path in _loaded_libraries():
        try:
            return Runtime(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
    return None


_SERIAL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def launcher(loaded: Any, name: str, threaded: bool = True) -> Callable[..., None]:
    """``run(*words)``: call the kernel with these words, on as many threads as torch uses now.

    Every call has its own array of words, so that calls from several Python threads do not
    meet; ctypes lets go of the interpreter while the kernel runs. A kernel asks its team how
    large it is, so a runtime that grants fewer threads than asked loses nothing but speed.
    """
    serial = _SERIAL(loaded[name])
    omp = runtime() if threaded else None
    if omp is None:

        def alone(*words: int) -> None:
            serial((ctypes.c_int64 * (HEAD + len(words)))(0, 0, *words), 0, 1)

        return alone
    team, parallel, head = loaded[f"{name}.team"], omp.parallel, (omp.number, omp.count)
    threads_now = torch.get_num_threads
    kinds: dict[int, Any] = {}

    def together(*words: int) -> None:
        kind = kinds.get(len(words))
        if kind is None:
            kind = kinds[len(words)] = ctypes.c_int64 * (HEAD + len(words))
        threads = threads_now()
        if threads == 1:
            serial(kind(*head, *words), 0, 1)
        else:
            parallel(team, kind(*head, *words), threads, 0)

    together.keep = (loaded, serial)  # type: ignore[attr-defined]
    return together
