"""Calls of generated code as data, so that one native call can make many of them.

A :class:`Call` is a function and its words; where a word is the address of a tensor that is not
known yet, an :class:`Argument` stands for it. A :class:`Tape` is a list of calls as one array of
words, which the driver (``llvm_driver``) walks on all threads of one OpenMP team with a barrier
after each call. So a call inside a tape costs well under a microsecond, where one from Python
with a team of its own costs ten microseconds.

Importing this module does not import llvmlite; making a :class:`Tape` does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deuteron.codegen import openmp

HEAD = 4  # words before the arguments of a call: function, words in all, threaded, barrier after
FRONT = 4  # words before the calls of a tape: number and size of the team, barrier, calls


@dataclass(frozen=True)
class Argument:
    """The address of the tensor at ``index`` among a kernel's arguments, plus ``offset`` bytes."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Room:
    """An address in scratch memory: ``offset`` bytes into the block called ``name``, which has
    ``floats`` and ``per_thread`` more for each thread."""

    name: str
    floats: int
    per_thread: int = 0
    offset: int = 0


Word = int | torch.Tensor | Argument | Room  # a tensor: its address; the call keeps it alive


@dataclass(frozen=True, eq=False)
class Call:
    """The function ``run`` of compiled code, and its words. One that is not ``threaded`` has too
    little to do for two threads."""

    loaded: Any
    words: tuple[Word, ...]
    threaded: bool = True

    def placed(self, where: Callable[[Argument], Word]) -> Call:
        """The same call with other words for its arguments."""
        words = (where(w) if isinstance(w, Argument) else w for w in self.words)
        return replace(self, words=tuple(words))


# Fresh memory costs a page fault per 4 KB, more than many kernels take. Each Python thread has its
# own blocks, so that two of them may run one kernel at once.
_mine = threading.local()


def scratch(floats: int, name: str = "") -> torch.Tensor:
    """Return at least ``floats`` floats, with anything in them; they are valid until this thread
    asks for the same ``name`` again."""
    blocks: dict[str, torch.Tensor] = _mine.__dict__.setdefault("blocks", {})
    block = blocks.get(name)
    if block is None or block.numel() < floats:
        with torch.inference_mode(False):
            block = blocks[name] = torch.empty(floats)
    return block


class Tape:
    """Calls in order as an array of words. The caller of :meth:`words` fills its array in at the
    places in ``arguments``; :meth:`run` does the rest. An array is for one run at a time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        from deuteron.codegen.tape_driver import driver

        self._calls = tuple(calls)  # what the words point to lives as long as the tape
        self.arguments: list[tuple[int, Argument]] = []  # by position in the array
        self._rooms: dict[str, list[tuple[int, Room]]] = {}
        omp = openmp.runtime() if any(call.threaded for call in calls) else None
        team = (0, 0, 0) if omp is None else (omp.number, omp.count, omp.barrier)
        words = [*team, len(calls)]
        for call, after in zip(calls, (*calls[1:], None), strict=True):
            wait = after is not None and (call.threaded or after.threaded)
            size = HEAD + len(call.words)
            words += (call.loaded["run"], size, int(call.threaded), int(wait))
            for word in call.words:
                words.append(self._known(word, len(words)))
        self._kind: Any = ctypes.c_int64 * len(words)
        self._template = self._kind(*words)
        code = driver()
        self._alone = _ALONE(code["run"])
        self._team, self._parallel = code["team"], None if omp is None else omp.parallel

    def _known(self, word: Word, at: int) -> int:
        """Return the word itself, or 0 and note that it is to be filled in."""
        if isinstance(word, Argument):
            self.arguments.append((at, word))
        elif isinstance(word, Room):
            self._rooms.setdefault(word.name, []).append((at, word))
        else:
            return word.data_ptr() if isinstance(word, torch.Tensor) else word
        return 0

    def words(self) -> Any:
        """Return a new array, for one run after another."""
        return self._kind.from_buffer_copy(self._template)

    def run(self, words: Any) -> None:
        """Make the calls. ctypes releases the interpreter's lock meanwhile. Kernels ask their team
        how large it is: a runtime that grants fewer threads than requested costs nothing but
        speed."""
        threads = torch.get_num_threads() if self._parallel is not None else 1
        for name, places in self._rooms.items():
            most = max(room.floats + room.per_thread * threads for _, room in places)
            base = scratch(most, name).data_ptr()
            for at, room in places:
                words[at] = base + room.offset
        if self._parallel is None or threads == 1:
            self._alone(words, 0, 1)
        else:
            self._parallel(self._team, words, threads, 0)


_ALONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def runner(calls: Sequence[Call]) -> Callable[..., None]:
    """Return ``run(*tensors)``, which makes these calls alone. Every run has its own array of
    words, so that runs in several Python threads do not disturb each other."""
    tape = Tape(calls)
    places = [(at, argument.index, argument.offset) for at, argument in tape.arguments]

    def run(*tensors: torch.Tensor) -> None:
        words = tape.words()
        for at, index, offset in places:
            words[at] = tensors[index].data_ptr() + offset
        tape.run(words)

    return run


def placed(calls: Sequence[Call], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that makes these calls with the same tensors every time."""
    tape = Tape(calls)
    words = tape.words()
    for at, argument in tape.arguments:
        words[at] = tensors[argument.index].data_ptr() + argument.offset
    return lambda: tape.run(words)
