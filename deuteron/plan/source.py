"""A program as Python: one line for each region, under one native call where several regions of
generated code follow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deuteron.codegen.calls import Argument, Word
from deuteron.engines import Kernel
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.plan.native import NativeRun, View, resolved, stretches
from deuteron.plan.tensors import duplicate, restrided


@dataclass(frozen=True)
class Step:
    """A region as the first run found it. ``told``: its kernel is told where to write;
    ``wrapped``: it returns a tuple of one; ``dead``: values nobody reads afterwards."""

    region: Region
    kernel: Kernel
    told: bool
    wrapped: bool
    dead: Sequence[str]
    view: View | None = None

    @property
    def kind(self) -> str:
        """How it can be part of a native run."""
        if self.kernel.calls:
            return "native"
        return "other" if self.view is None else "view"


@dataclass
class Writer:
    """Writes the steps down. Every name in the text is made here, from a letter and a number;
    nothing of the graph's own text becomes code."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    parts: Sequence[str]  # values in the arena, in order
    steps: Sequence[Step]
    converted: Sequence[str]
    shared: set[str]
    empty: Callable[[str], Callable[[], torch.Tensor]]
    into: Mapping[str, str]  # results that take the memory of an input
    space: dict[str, Any] = field(default_factory=dict)
    natives: int = 0

    def write(self) -> str:
        """The source of ``run(arena, *inputs)``; what it names is in ``space``."""
        self.space |= {"restrided": restrided, "duplicate": duplicate}
        self._local: dict[str, str] = {}
        inputs = [self._name("x", v) for v in self.graph.inputs]
        for value, tensor in self.constants.items():
            self.space[self._name("c", value)] = tensor
        parts = [self._name("a", v) for v in self.parts]
        lines = [f"def run({', '.join(['arena', *inputs])}, /):"]
        if parts:
            lines.append(f"    {', '.join(parts)}, = arena.parts")
        for stretch in stretches([step.kind for step in self.steps]):
            one = len(stretch) == 1
            lines += self._alone(stretch[0]) if one else self._together(stretch)
        results = [
            f"duplicate({self._local[v]})" if v in self.shared else self._local[v]
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
            if value in self.into:
                given = self._local[self.into[value]]
                lines.append(f"    {self._name('v', value)} = {given}")
            elif value not in self.parts:
                out = self._name("v", value)
                self.space[f"e{out}"] = self.empty(value)
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
            if value in self.converted:
                self.space[f"t{out}"] = self.graph.types[value]
                lines.append(f"    {out} = restrided({out}, t{out})")
        return lines

    def _together(self, stretch: range) -> list[str]:
        """One native call for several regions, which stand below it as comments. A view among
        them is only an address, unless somebody else reads it."""
        steps = [self.steps[i] for i in stretch]
        views = {step.region.outputs[0]: step.view for step in steps if step.view is not None}
        lines = [line for step in steps for line in self._memory(step)]
        written, after = [], []
        for i, step in zip(stretch, steps, strict=True):
            text = self._call(i)
            written += text
            if step.view is not None and self._read_after(step.region.outputs[0], stretch):
                after += text
        given: dict[str, int] = {}

        def word(region: Region, argument: Argument) -> Word:
            value = (*region.inputs, *region.outputs)[argument.index]
            value, offset = resolved(value, views, argument.offset)
            if value in self.constants:
                return self.constants[value].data_ptr() + offset
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
        only_inside = {v for v in views if not self._read_after(v, stretch)}
        gone = [self._local[v] for step in steps for v in step.dead if v not in only_inside]
        return [*lines, f"    del {', '.join(gone)}"] if gone else lines

    def _read_after(self, value: str, stretch: range) -> bool:
        later = self.steps[stretch.stop :]
        leaves = any(value == v for _, v in self.graph.outputs)
        return leaves or any(value in step.region.inputs for step in later)
