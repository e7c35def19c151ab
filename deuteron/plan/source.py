"""Writes a program down as Python: one line for each region, or one native call for several regions
of generated code that follow each other.

Python spends about as long on a call as a small kernel runs, and each kernel that is called by
itself wakes the team of threads and waits for all of them to be done. A :class:`NativeRun` has the
calls of several regions as data (``codegen/calls``): what changes from run to run is a handful of
addresses. On a GPU the launches of several regions become one native call in the same way
(``codegen/launches``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from deuteron.codegen import launches
from deuteron.codegen.calls import Argument, Call, Tape, Word
from deuteron.codegen.launches import SCRATCH, LaunchTape, Rehearsal
from deuteron.engines import Kernel
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.ops.opaque import may_show
from deuteron.passes.in_place import Spot
from deuteron.plan.tensors import duplicate, restrided

if TYPE_CHECKING:
    from deuteron.plan.program import Program


@dataclass(eq=False)
class Arena:
    """What one run at a time uses: a tensor for each value that lives in the block of memory, and
    the arguments of the native runs as words, which hold the addresses of these tensors."""

    parts: tuple[torch.Tensor, ...] = ()
    words: dict[NativeRun, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Block:
    """A block of memory for one run at a time, of any program that fits into it, and an arena in it
    for each program that has used it."""

    memory: torch.Tensor
    arenas: WeakKeyDictionary[Program, Arena] = field(default_factory=WeakKeyDictionary)


# Blocks that no run has taken now, by CUDA stream: work that is queued there may still use them.
Idle = dict[int, list[Block]]


class NativeRun:
    """Several native calls as one. Arguments with an index below ``parts`` are tensors of an arena,
    the others are tensors given at each run."""

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
    """A value that begins ``offset`` bytes into the memory of the value ``of``. ``show`` makes this
    view by one call, instead of one for each node; ``known``: the view itself, if it is one of a
    constant."""

    of: str
    offset: int
    show: Callable[[torch.Tensor], torch.Tensor]
    known: torch.Tensor | None = None


def waits(regions: Sequence[Region], kernels: Sequence[Kernel]) -> dict[int, int]:
    """For every region whose kernel only begins its work, as collectives do: the place of the first
    region that reads its result and does not only take a view of it. Before that one the program
    waits for the result. If there is none, the place is the number of regions."""
    roots = roots_of(regions)
    made = {r.outputs[0]: i for i, r in enumerate(regions) if kernels[i].wait is not None}
    found: dict[int, int] = {i: len(regions) for i in made.values()}
    for place in reversed(range(len(regions))):
        region = regions[place]
        if all(node.op != "aten" and table.get(node.op).view for node in region.nodes):
            continue
        # the last input of a collective only says which one comes before it: that is not read,
        # unless it is sent as well
        together = [node.inputs for node in region.nodes if node.op in COLLECTIVES]
        last = {last for *sent, last in together if last not in sent}
        for value in (v for v in region.inputs if v not in last):
            for root in roots.get(value, (value,)):
                if root in made:
                    found[made[root]] = place
    return found


Spots = Mapping[str, Spot]  # for values that lie in the memory of another, and for that other


def roots_of(regions: Sequence[Region], spots: Spots | None = None) -> dict[str, tuple[str, ...]]:
    """For every value that may be a view, or lies in the memory of another: the values whose memory
    it may lie in. A view of a value that is internal to a region counts as a value of its own."""
    roots: dict[str, tuple[str, ...]] = {}
    for value, spot in (spots or {}).items():  # a value comes after the one it is written over
        if value != spot.buffer:
            roots[value] = roots.get(spot.buffer, (spot.buffer,))
    for region in regions:
        for node in region.nodes:
            if spots and node.outputs[0] in spots:
                continue
            opaque = node.op == "aten"
            if may_show(node.attrs["target"]) if opaque else table.get(node.op).view:
                seen = node.uses if opaque else node.uses[:1]
                found = dict.fromkeys(r for v in seen for r in roots.get(v, (v,)))
                if found:
                    roots.update((out, tuple(found)) for out in node.outputs)
        own: dict[str, str] = {}
        inside = {v for node in region.nodes for v in node.outputs} - set(region.outputs)
        for value in region.outputs:
            held = roots.get(value, ())
            if held and inside.issuperset(held) and value not in (spots or {}):
                first = own.setdefault(held[0], value)
                roots[value] = (first,)
                if first == value:
                    del roots[value]
    return roots


TOGETHER = ("native", "launched")


def stretches(kinds: Sequence[str], starts: Collection[int] = ()) -> list[range]:
    """Group regions, of which the kinds are given in order, into stretches. "native" regions that
    follow each other, or "launched" ones, with any "view" between them, are one stretch; every
    other region is a stretch by itself. ``starts``: places where a new stretch begins in any
    case."""
    found: list[range] = []
    at = 0
    while at < len(kinds):
        end, kind = at, kinds[at]
        while end < len(kinds) and kind in TOGETHER and kinds[end] in (kind, "view"):
            end += 1
            if end in starts:
                break
        same = [i for i in range(at, end) if kinds[i] == kind]
        found.append(range(at, same[-1] + 1 if same else at + 1))
        at = found[-1].stop
    return found


@dataclass(eq=False)
class Step:
    """A region of a program. ``told``: its kernel is told where to write; ``dead``: values that
    nobody reads after it; ``joins``: it is a concatenation of parts that already lie side by side.
    The first run finds out the rest. ``wrapped``: the kernel returns a tuple of one; ``view``: the
    result is a view, and there is nothing to compute; ``noted``: the kernel's launches as data, or
    else ``apart``: why the kernel has to launch them itself."""

    region: Region
    kernel: Kernel
    told: bool
    dead: Sequence[str]
    joins: bool = False
    wrapped: bool = False
    view: View | None = None
    noted: Rehearsal | None = None
    apart: str = ""

    @property
    def kind(self) -> str:
        """How it can take part in a native call, for :func:`stretches`; "other": not at all."""
        if self.joins:
            return "view"
        if self.kernel.calls:
            return "native"
        if self.noted is not None:
            return "launched"
        return "other" if self.view is None else "view"


Place = Callable[[Region, Argument], tuple[str, int]]


class Writer:
    """Writes the source of a program, after its first run. Every name in it is made here, from a
    letter and a number; no text of the graph itself becomes code."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph, self.steps = program, program.graph, program.steps
        self.parts = tuple(program.memory.offsets)  # values in the arena
        self.space: dict[str, Any] = {"restrided": restrided, "duplicate": duplicate}
        self.natives = 0
        self.pooled = bool(self.parts)  # whether a run needs an arena, which no other may use then
        self._local: dict[str, str] = {}
        self.ends = waits(program.regions, [step.kernel for step in self.steps])
        self.begun: dict[int, int] = {}  # steps that were begun → where the program waits for them

    def write(self) -> str:
        """The source of ``run(arena, *inputs)``; what it names is in ``space``."""
        inputs = [self._name("x", v) for v in self.graph.inputs]
        for value, tensor in self.program.constants.items():
            self.space[self._name("c", value)] = tensor
        parts = [self._name("a", v) for v in self.parts]
        lines = [f"def run({', '.join(['arena', *inputs])}, /):"]
        if self.program.takes:
            every = "".join(f"{name}, " for name in inputs)
            lines = ["def run(arena, given, /):", f"    {every}= given", "    given.clear()"]
            lines = lines if inputs else lines[:1]
        if parts:
            lines.append(f"    {', '.join(parts)}, = arena.parts")
        # kernels that are launched together rely on addresses that are multiples of 16
        odd = {i for i, s in enumerate(self.steps) if s.view is not None and s.view.offset % 16}
        launched = any(step.noted is not None for step in self.steps)
        kinds = [
            "other" if launched and i in odd else step.kind for i, step in enumerate(self.steps)
        ]
        for stretch in stretches(kinds, self.ends.values()):
            lines += self._waited(stretch.stop)
            alone = len(stretch) == 1 and self.steps[stretch[0]].noted is None
            lines += self._alone(stretch[0]) if alone else self._together(stretch)
        lines += self._waited(len(self.steps) + 1)
        results = [
            f"duplicate({self._local[v]})" if v in self.program.shared else self._local[v]
            for _, v in self.graph.outputs
        ]
        lines.append(f"    return [{', '.join(results)}]")
        return "\n".join(lines)

    def _waited(self, stop: int) -> list[str]:
        """Lines that wait for results of begun steps that a step before ``stop`` reads."""
        due = [i for i, place in self.begun.items() if place < stop]
        for i in due:
            del self.begun[i]
        return [f"    w{i}(h{i}); del h{i}" for i in due]

    def _name(self, letter: str, value: str) -> str:
        self._local[value] = f"{letter}{len(self._local)}"
        return self._local[value]

    def _alone(self, i: int) -> list[str]:
        step = self.steps[i]
        lines = [*self._memory(step), *self._call(i)]
        gone = [self._local[v] for v in step.dead]
        return [*lines, f"    del {', '.join(gone)}"] if gone else lines

    def _memory(self, step: Step) -> list[str]:
        """Lines that make memory for results that are not in the arena."""
        lines: list[str] = []
        for value in step.region.outputs:
            if not step.told and value not in self.program.spots:
                continue
            if value in self.program.spots and value not in self.parts:
                lines += self._inside(value)
            elif value in self.program.into:
                given = self._local[self.program.into[value]]
                lines.append(f"    {self._name('v', value)} = {given}")
            elif value not in self.parts:
                out = self._name("v", value)
                self.space[f"e{out}"] = self.program.empty(value)
                lines.append(f"    {out} = e{out}()")
        return lines

    def _inside(self, value: str) -> list[str]:
        """Lines that give a value its place in a buffer that is not in the arena, and make that
        buffer first if it is not there yet."""
        spot, lines = self.program.spots[value], list[str]()
        if spot.buffer not in self._local:
            whole = self._name("v", spot.buffer)
            self.space[f"e{whole}"] = self.program.empty(spot.buffer)
            lines.append(f"    {whole} = e{whole}()")
        if value not in self._local:
            out = self._name("v", value)
            self.space[f"p{out}"] = self.program.inside(value)
            lines.append(f"    {out} = p{out}({self._local[spot.buffer]})")
        return lines

    def _call(self, i: int) -> list[str]:
        step = self.steps[i]
        region, kernel = step.region, step.kernel
        if step.joins:
            return [
                f"    # {region.name}: {' + '.join(region.ops)}, {self._local[region.outputs[0]]}"
            ]
        self.space[f"k{i}"] = kernel.fn if step.view is None else step.view.show
        args = [self._local[v] for v in region.inputs]
        note = f"  # {region.name}: {' + '.join(region.ops)}"
        if step.view is not None and step.view.known is not None:
            self.space[f"k{i}"] = step.view.known
            return [f"    {self._name('v', region.outputs[0])} = k{i}{note}"]
        note += f"; launched apart, {step.apart}" if step.apart else ""
        if step.told:
            outs = [self._local[v] for v in region.outputs]
            args += [f"out={outs[0]}"] if kernel.out_keyword else outs
            return [f"    k{i}({', '.join(args)}){note}", *self._begun(i, outs[0])]
        held = {v: self._local[v] for v in region.outputs if v in self.program.spots}
        outs = [f"t{held[v]}" if v in held else self._name("v", v) for v in region.outputs]
        left = ", ".join(outs) + ("," if step.wrapped else "")
        lines = [f"    {left} = k{i}({', '.join(args)}){note}"]
        for out, value in zip(outs, region.outputs, strict=True):
            if value in held:  # the library answers with memory of its own
                lines.append(f"    {held[value]}.copy_({out}); del {out}")
            elif value in self.program.conversions:
                self.space[f"t{out}"] = self.graph.types[value]
                lines.append(f"    {out} = restrided({out}, t{out})")
        return [*lines, *self._begun(i, outs[0])]

    def _begun(self, i: int, out: str) -> list[str]:
        """A line that keeps the result of a begun step until the program waits for it."""
        wait = self.steps[i].kernel.wait
        if wait is None:
            return []
        self.space[f"w{i}"], self.begun[i] = wait, self.ends[i]
        return [f"    h{i} = {out}  # on its way"]

    def _together(self, stretch: range) -> list[str]:
        """Lines for one native call that runs several regions. Below it follow the lines of these
        regions: as comments or, for launches on a GPU, as code that runs if the native call
        refuses. A view among them is only an address, unless a region outside of the stretch reads
        it or a view of it."""
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

        def place(region: Region, argument: Argument) -> tuple[str, int]:
            """The value with memory of its own that a kernel reads or writes, and the offset."""
            value = (*region.inputs, *region.outputs)[argument.index]
            offset = argument.offset
            while value in views:
                value, offset = views[value].of, offset + views[value].offset
            return value, offset

        def word(region: Region, argument: Argument) -> Word:
            value, offset = place(region, argument)
            if value in self.program.constants:
                return self.program.constants[value].data_ptr() + offset
            if value in self.parts:
                return Argument(self.parts.index(value), offset)
            return Argument(len(self.parts) + given.setdefault(value, len(given)), offset)

        number = self.natives
        self.natives += 1
        if steps[0].noted is not None:
            lines += self._launched(number, steps, place)
            lines += [f"    {line}" for line in written]
        else:
            calls = [
                call.placed(lambda argument, region=step.region: word(region, argument))  # type: ignore[misc]
                for step in steps
                for call in step.kernel.calls
            ]
            self.space[f"n{number}"], self.pooled = NativeRun(calls, len(self.parts)), True
            args = ", ".join(["arena", *(self._local[v] for v in given)])
            lines.append(f"    n{number}({args})  # one native call for:")
            lines += [f"    #{line[3:]}" for line in written]
        lines += after
        only_inside = views.keys() - seen
        gone = [self._local[v] for step in steps for v in step.dead if v not in only_inside]
        return [*lines, f"    del {', '.join(gone)}"] if gone else lines

    def _launched(self, number: int, steps: Sequence[Step], place: Place) -> list[str]:
        """Lines for one native call that makes all launches. If it refuses, the kernels launch by
        themselves: the caller puts the lines for that after these."""
        given: dict[str, int] = {}
        scratch = f"#{number}"  # no value of a graph is called that
        room = 0

        def word(step: Step, rooms: Sequence[int], argument: Argument) -> int | Argument:
            inside = argument.index - len(step.region.inputs) - len(step.region.outputs)
            if inside >= 0:
                at = given.setdefault(scratch, len(given))
                return Argument(at, rooms[inside] + argument.offset)
            value, offset = place(step.region, argument)
            if value in self.program.constants:
                address = self.program.constants[value].data_ptr()
                if address % 16 == 0:
                    return address + offset
            return Argument(given.setdefault(value, len(given)), offset)

        found = []
        for step in steps:
            rooms = []
            for size in () if step.noted is None else step.noted.rooms:
                rooms.append(room)
                room += -(-size // SCRATCH) * SCRATCH
            for launch in () if step.noted is None else step.noted.launches:
                found.append(launch.placed(partial(word, step, rooms)))
        tape = LaunchTape(found, len(given), launches.driver_launch())
        stream = partial(torch._C._cuda_getCurrentRawStream, self.program.device.index)
        self.space |= {f"n{number}": tape.run, f"p{number}": tape.pack, "failed": tape.failed}
        self.space["stream"] = stream
        lines = []
        if scratch in given:
            empty = partial(torch.empty, room, dtype=torch.uint8, device=self.program.device)
            self.space[f"e{self._name('s', scratch)}"] = empty
            lines.append(f"    {self._local[scratch]} = e{self._local[scratch]}()")
        args = ", ".join(f"{self._local[v]}.data_ptr()" for v in given)
        lines.append(f"    if status := n{number}(p{number}({args}), stream()):")
        return [*lines, "        failed(status)"]

    def _read_after(self, value: str, stretch: range) -> bool:
        later = self.steps[stretch.stop :]
        leaves = any(value == v for _, v in self.graph.outputs)
        return leaves or any(value in step.region.inputs for step in later)
