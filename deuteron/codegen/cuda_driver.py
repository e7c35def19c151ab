"""Kernels that Triton compiled, loaded and launched by the CUDA driver itself.

Triton has a C compiler make code that loads kernels, and for every list of parameters code that
launches them: that takes seconds at a first call, and a compiler on the user's machine. The driver
takes both as plain data.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from deuteron.errors import EngineError

PACKED = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B"}
PACKED |= {"u16": "H", "u32": "I", "u64": "Q", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}
CONFIG = "7I4xQQI4x"  # the driver's structure for a launch: sizes, stream, attributes, their number
SERIALIZATION = 6  # the driver's number for programmatic dependent launch
EARLY = struct.pack("<iiii56x", SERIALIZATION, 0, 1, 0)  # the attribute that asks for it
NO_CONTEXT = 201  # the driver's error where a thread has not used the GPU yet
MAX_THREADS, OWN_SHARED, MAX_SHARED = 0, 1, 8  # attributes of a function
LARGEST_SHARED = 97  # an attribute of a device
USUAL_SHARED = 48 << 10  # bytes that a block may have without asking


@cache
def library() -> Any:
    """The driver; CUDA has to be in use."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        wrong = f"the CUDA driver cannot be loaded: {error}"
        raise EngineError(wrong, remedy="install NVIDIA's driver, or plan for the CPU") from None


@cache
def launch_function() -> Any:
    """The driver's launch function, which takes addresses."""
    given = (ctypes.c_void_p,) * 4
    found = ctypes.cast(library().cuLaunchKernelEx, ctypes.c_void_p).value or 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *given)(found)


class Loaded:
    """A kernel on the current device, of number ``index``. ``kinds``: what its parameters are, as
    Triton names them; tuples of those, and constants, which are compiled in."""

    def __init__(self, kernel: Any, index: int) -> None:
        about = kernel.metadata
        self.name, self.index = str(about.name), index
        self.kinds: tuple[Any, ...] = tuple(kernel.src.signature.values())
        flat = list(_flat(self.kinds, self.kinds))
        self.threads, self.shared = 32 * about.num_warps, int(about.shared)
        self.early = bool(about.launch_pdl)
        self.scratch = int(about.global_scratch_size)  # bytes for each block
        if about.profile_scratch_size or about.launch_cooperative_grid or about.num_ctas != 1:
            raise self._wrong("is profiled by Triton, or has blocks that work together")
        if unknown := [k for k in flat if k not in PACKED and not k.startswith("*")]:
            raise self._wrong(f"takes a parameter of type {unknown[0]}")
        self.pointers = [*(k.startswith("*") for k in flat), True, True]  # two for scratch memory
        each = [_padded("Q" if k.startswith("*") else PACKED[k]) for k in flat]
        self.words = struct.Struct(f"<{''.join(each)}QQ")
        self._call = struct.Struct(f"<{CONFIG}{''.join(each)}QQ")
        self._rooms = threading.local()  # what the driver reads, for each thread
        self._plain = flat == list(self.kinds)
        self._early = ctypes.create_string_buffer(EARLY, len(EARLY))
        self._attributes = (ctypes.addressof(self._early), 1) if self.early else (0, 0)
        self.function = self._load(kernel.asm["cubin"])

    def _load(self, binary: bytes) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._ask("cuModuleLoadData", ctypes.byref(module), binary)
        name = self.name.encode()
        self._ask("cuModuleGetFunction", ctypes.byref(function), module, name)
        threads, own, most = (ctypes.c_int() for _ in range(3))
        self._ask("cuFuncGetAttribute", ctypes.byref(threads), MAX_THREADS, function)
        self._ask("cuFuncGetAttribute", ctypes.byref(own), OWN_SHARED, function)
        self._ask("cuDeviceGetAttribute", ctypes.byref(most), LARGEST_SHARED, self.index)
        if self.shared + own.value > most.value:
            raise self._wrong(f"needs {self.shared} bytes of shared memory, of {most.value}")
        if self.threads > threads.value:
            raise self._wrong(f"needs {self.threads} threads, of {threads.value}")
        if self.shared > USUAL_SHARED:
            largest = most.value - own.value
            self._ask("cuFuncSetAttribute", function, MAX_SHARED, ctypes.c_int(largest))
        return function.value or 0

    def flat(self, args: Sequence[Any]) -> Sequence[Any]:
        """The parameters among what the kernel is called with, scratch memory included."""
        return args if self._plain else [*_flat(self.kinds, args[:-2]), *args[-2:]]

    def launch(self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]) -> None:
        """Launch it; the last two arguments are the addresses of scratch memory, and 0."""
        try:
            room, at, params = self._rooms.mine
        except AttributeError:
            room, at, params = self._rooms.mine = self._room()
        values = [0 if value is None else value for value in self.flat(args)]
        sizes = self.threads, 1, 1, self.shared, stream, *self._attributes
        self._call.pack_into(room, 0, *grid, *sizes, *values)
        status = launch_function()(at, self.function, params, None)
        if status:
            self._ask("cuLaunchKernelEx", *map(ctypes.c_void_p, (at, self.function, params, None)))

    def _room(self) -> tuple[Any, int, int]:
        """Return memory for a launch, its address, and that of the table of parameters' addresses
        in it."""
        size = self._call.size
        first, count = struct.calcsize(f"<{CONFIG}"), len(self.pointers)
        room = (ctypes.c_char * (size + 8 * count))()
        at = ctypes.addressof(room)
        struct.pack_into(f"<{count}Q", room, size, *range(at + first, at + size, 8))
        return room, at, at + size

    def _ask(self, what: str, *args: Any) -> None:
        """Call the driver. A thread that has not used the GPU yet has no context: it gets the
        device's, which torch uses."""
        call = getattr(library(), what)
        status = call(*args)
        if status == NO_CONTEXT:
            context = ctypes.c_void_p()
            library().cuDevicePrimaryCtxRetain(ctypes.byref(context), self.index)
            library().cuCtxSetCurrent(context)
            status = call(*args)
        if status:
            text = ctypes.c_char_p()
            library().cuGetErrorString(status, ctypes.byref(text))
            said = (text.value or b"unknown").decode()
            remedy = "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1"
            raise self._wrong(f"was refused by {what}: {said} (error {status})", remedy)

    def _wrong(self, what: str, remedy: str = "report it; other sizes may do") -> EngineError:
        return EngineError(f"kernel {self.name} {what}", remedy=remedy)


def _flat(kinds: Sequence[Any], values: Sequence[Any]) -> Iterator[Any]:
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield value


def _padded(code: str) -> str:
    """The format of a parameter that has a word of its own."""
    return f"{code}{8 - struct.calcsize(code)}x"
