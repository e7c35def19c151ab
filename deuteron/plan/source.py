"""A program as Python: one line for each region, under one native call where several regions of
generated code follow each other.

Python spends about as long on a call as a small kernel runs, and each kernel alone wakes the team
of threads and waits for all of them to be done. A :class:`NativeRun` knows the calls of several
regions as data (``codegen/calls``): what changes from run to run is a handful of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from deuteron.codegen.calls import Argument, Call, Tape, Word
from deuteron.engines import Kernel
from deuteron.ir.region import Region
from deuteron.plan.tensors import duplicate, restrided

if TYPE_CHECKING:
    from deuteron.plan.program import Program


@dataclass(eq=False)
class Arena:
    """What one run at a time uses: a tensor for each value that lives in one block of memory,
    and the words of the native runs, into which the addresses of these tensors are written."""

    parts: tuple[torch.Tensor, ...] = ()
    words: dict[NativeRun, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Block:
    """Memory for one run at a time of any program that fits, as an arena for each of them."""

    memory: torch.Tensor
    arenas: WeakKeyDictionary[Program, Arena] = field(default_factory=WeakKeyDictionary)


Idle = dict[int, list[Block]]  # that no run uses now, by stream: its queue may still use them


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


@dataclass(eq=False)
class Step:
    """A region of a program. ``told``: its kernel is told where to write; ``dead``: values nobody
    reads afterwards. The first run finds out the rest. ``wrapped``: the kernel returns a tuple of
    one; ``view``: the region only says where to look."""

    region: Region
    kernel: Kernel
    told: bool
    dead: Sequence[str]
    wrapped: bool = False
    view: View | None = None

    @property
    def kind(self) -> str:
        """How it can be part of a native run."""
        if self.kernel.calls:
            return "native"
        return "other" if self.view is None else "view"


class Writer:
    """Writes the steps of a program down, after its first run. Every name in the text is made here,
    from a letter and a number; nothing of the graph's own text becomes code."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph, self.steps = program, program.graph, program.steps
        self.parts = tuple(program.memory.offsets)  # values in the arena
        self.space: dict[str, Any] = {"restrided": restrided, "duplicate": duplicate}
        self.natives = 0
        self._local: dict[str, str] = {}

    def write(self) -> str:
        """The source of ``run(arena, *inputs)``; what it names is in ``space``."""
        inputs = [self._name("x", v) for v in self.graph.inputs]
        for value, tensor in self.program.constants.items():
            self.space[self._name("c", value)] = tensor
        parts = [self._name("a", v) for v in self.parts]
        lines = [f"def run({', '.join(['arena', *inputs])}, /):"]
        if parts:
            lines.append(f"    {', '.join(parts)}, = arena.parts")
        for stretch in stretches([step.kind for step in self.steps]):
            lines += self._alone(stretch[0]) if len(stretch) == 1 else self._together(stretch)
        results = [
            f"duplicate({self._local[v]})" if v in self.program.shared else self._local[v]
            for _, v in self.graph.outputs
        ]
        lines.append(f"    return [{', '.join(results)}]")
        return "\n".join(lines)

    def _name(self, letter: str, value: str) -> str:
        self._local[value] = f"{letter}{len(self._local)}"
        return self._local[value]

    def _alone(self, i: int) -> list[str]:
        step = self.steps[i]
        lines = [*self._memory(step), *self._call(i)]
        gone = [self._local[v] for v in step.dead]
        return [*lines, f"    del {', '.join(gone)}"] if gone else lines

    def _memory(self, step: Step) -> list[str]:
        """Fresh memory for what leaves the plan."""
        lines = []
        for value in step.region.outputs if step.told else ():
            if value in self.program.into:
                given = self._local[self.program.into[value]]
                lines.append(f"    {self._name('v', value)} = {given}")
            elif value not in self.parts:
                out = self._name("v", value)
                self.space[f"e{out}"] = self.program.empty(value)
                lines.append(f"    {out} = e{out}()")
        return lines

    def _call(self, i: int) -> list[str]:
        step = self.steps[i]
        region, kernel = step.region, step.kernel
        self.space[f"k{i}"] = kernel.fn
        args = [self._local[v] for v in region.inputs]
        note = f"  # {region.name}: {' + '.join(region.ops)}"
        if step.told:
            outs = [self._local[v] for v in region.outputs]
            args += [f"out={outs[0]}"] if kernel.out_keyword else outs
            return [f"    k{i}({', '.join(args)}){note}"]
        outs = [self._name("v", v) for v in region.outputs]
        left = ", ".join(outs) + ("," if step.wrapped else "")
        lines = [f"    {left} = k{i}({', '.join(args)}){note}"]
        for out, value in zip(outs, region.outputs, strict=True):
            if value in self.program.conversions:
                self.space[f"t{out}"] = self.graph.types[value]
                lines.append(f"    {out} = restrided({out}, t{out})")
        return lines

    def _together(self, stretch: range) -> list[str]:
        """One native call for several regions, which stand below it as comments. A view among
        them is only an address, unless somebody else reads it, or a view of it."""
        steps = [self.steps[i] for i in stretch]
        views = {step.region.outputs[0]: step.view for step in steps if step.view is not None}
        seen = {v for v in views if self._read_after(v, stretch)}
        for step in reversed(steps):
            if step.region.outputs[0] in seen:
                seen.update(v for v in step.region.inputs if v in views)
        lines = [line for step in steps for line in self._memory(step)]
        written, after = [], []
        for i, step in zip(stretch, steps, strict=True):
            text = self._call(i)
            written += text
            if step.region.outputs[0] in seen:
                after += text
        given: dict[str, int] = {}

        def word(region: Region, argument: Argument) -> Word:
            value = (*region.inputs, *region.outputs)[argument.index]
            offset = argument.offset
            while value in views:
                value, offset = views[value].of, offset + views[value].offset
            if value in self.program.constants:
                return self.program.constants[value].data_ptr() + offset
            if value in self.parts:
                return Argument(self.parts.index(value), offset)
            return Argument(len(self.parts) + given.setdefault(value, len(given)), offset)

        calls = [
            call.placed(lambda argument, region=step.region: word(region, argument))  # type: ignore[misc]
            for step in steps
            for call in step.kernel.calls
        ]
        name = f"n{self.natives}"
        self.natives += 1
        self.space[name] = NativeRun(calls, len(self.parts))
        args = ", ".join(["arena", *(self._local[v] for v in given)])
        lines.append(f"    {name}({args})  # one native call for:")
        lines += [f"    #{line[3:]}" for line in written]
        lines += after
        only_inside = views.keys() - seen
        gone = [self._local[v] for step in steps for v in step.dead if v not in only_inside]
        return [*lines, f"    del {', '.join(gone)}"] if gone else lines

    def _read_after(self, value: str, stretch: range) -> bool:
        later = self.steps[stretch.stop :]
        leaves = any(value == v for _, v in self.graph.outputs)
        return leaves or any(value in step.region.inputs for step in later)
