"""Launches of GPU kernels as data, so that all those of a plan are one native call.

From Python a launch costs several microseconds: its arguments are inspected, its kernel is looked
up, and Triton reads all of it once more. So a kernel of ours is *rehearsed*: called once with
stand-ins for its tensors, while every launch is recorded instead of made. Its launches are then
known: functions of the driver, grids, and parameters, of which only addresses change from run to
run. A :class:`LaunchTape` hands them to the driver by one call of code that we generate
(``llvm_launch``); it refuses addresses that are no multiple of 16, for which the recorded kernels
were not compiled.

A kernel that does anything but allocate scratch memory, take views of tensors and launch cannot be
recorded: what else it does would be left out.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from deuteron.codegen.calls import Argument
from deuteron.codegen.cuda_driver import SERIALIZATION, Loaded, library
from deuteron.errors import EngineError
from deuteron.ir.types import TensorType

BASE = 1 << 50  # stand-in number i lies at (i + 1) · BASE, beyond every real address
MOST = 128  # parameters of a kernel, for which the native code has room
UNALIGNED = -1  # what the native code answers where an address is no multiple of 16
SCRATCH = 256  # sizes of blocks of scratch memory are rounded up to a multiple of this

aten = torch.ops.aten
ALLOCATING = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)


class Unrecorded(Exception):
    """A kernel cannot be recorded as launches. ``args``: why."""


@dataclass(frozen=True)
class Launch:
    """A function of the driver, its grid, threads of a block, bytes of shared memory, whether it
    may begin ``early``, before the kernel ahead of it has ended, and its parameters: words, and the
    addresses of tensors."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    early: bool
    parameters: tuple[int | Argument, ...]

    def placed(self, where: Callable[[Argument], int | Argument]) -> Launch:
        """The same launch with other words for its arguments."""
        words = (where(p) if isinstance(p, Argument) else p for p in self.parameters)
        return replace(self, parameters=tuple(words))


# ---- rehearsing a kernel

_stage = threading.local()


def rehearsal() -> Rehearsal | None:
    """Return the rehearsal that is going on in this thread, if there is one."""
    return getattr(_stage, "now", None)


class StandIn(torch.Tensor):
    """A tensor without memory that says it is on a GPU, at an address of its own."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _stage.now.device  # type: ignore[no-any-return]

    def get_device(self) -> int:
        return self.device.index or 0

    def data_ptr(self) -> int:
        place: int = _stage.now.places[self.untyped_storage()._cdata]
        return (place + 1) * BASE + int(self.storage_offset()) * self.element_size()


class Rehearsal(TorchDispatchMode):
    """Records what a kernel launches. In ``launches`` a parameter that is an address is an
    :class:`Argument`, whose index counts the tensors of the kernel and then its blocks of scratch
    memory; ``rooms``: the bytes of each of these blocks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.launches: list[Launch] = []
        self.tensors: list[torch.Tensor] = []  # alive, so that each has a storage of its own
        self.places: dict[int, int] = {}  # the numbers of storages
        self.given = 0

    @property
    def rooms(self) -> list[int]:
        return [t.untyped_storage().nbytes() for t in self.tensors[self.given :]]

    def stand_in(self, t: torch.Tensor) -> torch.Tensor:
        """Return a stand-in for ``t``: with a place of its own, unless ``t`` is part of a known
        one."""
        found = torch.Tensor._make_subclass(StandIn, t)
        storage = t.untyped_storage()._cdata
        if storage not in self.places:
            self.places[storage] = len(self.tensors)
            self.tensors.append(found)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in ALLOCATING:
            named["device"] = "meta"
        elif not func.is_view:
            raise Unrecorded(f"it calls {func}")
        return tree_map_only(torch.Tensor, self.stand_in, func(*args, **named))

    def note(self, kernel: Loaded, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        """Record a launch of a kernel, and what it is called with."""
        values = [0 if value is None else value for value in kernel.flat(args)]
        numbers = [0 if far else v for far, v in zip(kernel.pointers, values, strict=True)]
        packed = kernel.words.pack(*numbers)
        words: list[int | Argument] = list(struct.unpack(f"<{len(values)}Q", packed))
        for i, value in enumerate(values):
            if kernel.pointers[i]:
                place, offset = divmod(value, BASE)
                words[i] = Argument(place - 1, offset) if place else offset
        if len(words) > MOST:
            raise Unrecorded(f"it has more than {MOST} parameters")
        how = kernel.threads, kernel.shared, kernel.early
        self.launches.append(Launch(kernel.function, grid, *how, tuple(words)))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        _stage.now = self
        try:
            with self:
                yield
        finally:
            _stage.now = None


def rehearsed(
    run: Callable[..., Any], types: Sequence[TensorType], device: torch.device
) -> Rehearsal:
    """Return what ``run`` launches for tensors of these types; raises :class:`Unrecorded` if that
    is not all it does."""
    noted = Rehearsal(device)
    meta: Any = {"device": "meta"}
    given = [
        noted.stand_in(torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, **meta))
        for t in types
    ]
    noted.given = len(given)
    with _disable_current_modes(), noted.going_on():  # other dispatch modes do not see it
        run(*given)
    if not noted.launches:
        raise Unrecorded("it launches nothing")
    return noted


# ---- making the launches


@cache
def driver_launch() -> int:
    """The address of the driver's launch function, or 0 where it has none that takes attributes;
    CUDA has to be in use."""
    try:
        found = library().cuLaunchKernelEx
    except (EngineError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


EARLY = object()  # stands for the address of the structure that lets a kernel begin early
_NATIVE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class LaunchTape:
    """Launches in order as one native call, ``run(addresses, stream)``: the bytes of as many
    addresses as there are tensors, and a stream. It answers 0, or what :meth:`failed` explains.
    Runs may overlap: all that changes is on the stack."""

    def __init__(self, launches: Sequence[Launch], tensors: int, function: int) -> None:
        """``function``: the address of the driver's, or of one like it."""
        from deuteron.codegen.llvm_launch import code

        words = [function, tensors, len(launches)]
        for each in launches:
            words += self._described(each)
        early = len(words)  # where the driver's structure begins that says so
        words += [SERIALIZATION, 1, *[0] * 7]
        self._words = (ctypes.c_int64 * len(words))()
        for i, word in enumerate(words):
            if word is EARLY:
                word = ctypes.addressof(self._words) + 8 * early
            self._words[i] = word - (word >> 63 << 64)  # with a sign, as the array has it
        native = _NATIVE(code()["launch"])
        self.pack = struct.Struct(f"<{tensors}Q").pack
        self.run: Callable[[bytes, int], int] = partial(native, self._words)

    def _described(self, launch: Launch) -> list[Any]:
        """The function, the driver's structure for a launch, and for each parameter the place of a
        tensor, or -1, and a number that is added."""
        x, y, z = launch.grid
        config = [x | y << 32, z | launch.threads << 32, 1 | 1 << 32, launch.shared, 0]
        attributes = (EARLY, 1) if launch.early else (0, 0)
        words = [launch.function, *config, *attributes, len(launch.parameters)]
        for p in launch.parameters:
            words += (p.index, p.offset) if isinstance(p, Argument) else (-1, p)
        return words

    @staticmethod
    def failed(status: int) -> None:
        """Raise if the driver refused a launch after it had taken others. Before, nothing has been
        done, and the kernels may be launched one by one, which says what is wrong."""
        if status != UNALIGNED and status >> 32 > 1:
            wrong = (
                f"the driver refused launch {status >> 32} of a plan: error {status & 0xFFFFFFFF}"
            )
            remedy = "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1"
            raise EngineError(wrong, remedy=remedy)
