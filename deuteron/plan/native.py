"""Regions of generated code that follow each other, run by one native call.

Python spends about as long on a call as a small kernel runs, and each kernel alone wakes the team
of threads and waits for all of them to be done. A :class:`NativeRun` knows the calls of several
regions as data (``codegen/calls``): what changes from run to run is a handful of addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deuteron.codegen.calls import Call, Tape


@dataclass(eq=False)
class Arena:
    """What one run at a time uses: a tensor for each value that lives in one block of memory,
    and the words of the native runs, into which the addresses of these tensors are written."""

    parts: tuple[torch.Tensor, ...] = ()
    words: dict[NativeRun, Any] = field(default_factory=dict)


class NativeRun:
    """Calls whose arguments are the ``parts`` of an arena, then tensors given at each run."""

    def __init__(self, calls: Sequence[Call], parts: int) -> None:
        self.tape = Tape(calls)
        places = self.tape.arguments
        self._parts = [(at, a) for at, a in places if a.index < parts]
        self._given = [(at, a.index - parts, a.offset) for at, a in places if a.index >= parts]

    def __call__(self, arena: Arena, *given: torch.Tensor) -> None:
        words = arena.words.get(self)
        if words is None:
            words = arena.words[self] = self.tape.words()
            for at, argument in self._parts:
                words[at] = arena.parts[argument.index].data_ptr() + argument.offset
        for at, index, offset in self._given:
            words[at] = given[index].data_ptr() + offset
        self.tape.run(words)


@dataclass(frozen=True)
class View:
    """A value that is so many bytes into the memory of another."""

    of: str
    offset: int


def stretches(kinds: Sequence[str]) -> list[range]:
    """Regions in order, by their kind: "native" ones that follow each other, with any "view"
    between them, are a stretch; every other region is one alone."""
    found: list[range] = []
    at = 0
    while at < len(kinds):
        end = at
        while end < len(kinds) and kinds[at] == "native" and kinds[end] != "other":
            end += 1
        native = [i for i in range(at, end) if kinds[i] == "native"]
        found.append(range(at, native[-1] + 1 if native else at + 1))
        at = found[-1].stop
    return found


def resolved(value: str, views: Mapping[str, View], offset: int = 0) -> tuple[str, int]:
    """The value in whose memory ``value`` lies, and how many bytes into it."""
    while value in views:
        value, offset = views[value].of, offset + views[value].offset
    return value, offset
