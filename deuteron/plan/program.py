"""A plan, flattened for running: straight-line Python over local variables.

The first run goes region by region and is checked: every tensor a library returns is compared
with the type the plan promised, and where a library answers in another memory order a
conversion is added. Then the calls are written down as one Python function, which is what
later runs execute; ``print(plan.program.source)`` shows it::

    def run(arena, x, /):
        a3, = arena.parts
        v2 = k0(x, c1)  # r0: conv + relu (layer1.0.conv1)
        k1(v2, out=a3)  # r1: linear
        …
"""

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deuteron.codegen import openmp
from deuteron.codegen.launches import Rehearsal, Unrecorded, driver_launch, rehearsed
from deuteron.engines import Kernel
from deuteron.errors import EngineError
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops import table
from deuteron.passes.in_place import IN_PLACE
from deuteron.plan.memory import Buffer, aligned, pack, peak
from deuteron.plan.overwrite import overwritten
from deuteron.plan.result_memory import LARGE, Recycled
from deuteron.plan.source import Arena, Block, Idle, Spots, Step, View, Writer, roots_of, waits
from deuteron.plan.tensors import duplicate, restrided, shown_at

LOOSE = 1 << 20  # from this many bytes on, torch's allocator gives a value a block of its own


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets of the values that live in the arena, and the totals worth reporting."""

    offsets: Mapping[str, int]
    arena: int
    unplanned: int
    separate: int
    peak: int  # bytes in use at once: arena, the rest, results, and inputs that die


def plan_memory(
    graph: Graph,
    regions: Sequence[Region],
    kernels: Sequence[Kernel],
    spots: Spots | None = None,
    dying: Collection[str] = (),
    most: float = math.inf,
) -> MemoryPlan:
    """Plan memory by the lifetimes of values over the steps. A value goes into the arena if a
    kernel can write it there and it is not larger than ``most`` bytes. ``dying``: inputs that are
    in memory until the last region has read them.

    A value that may be a view of another, or lies in its memory (``spots``), keeps the other alive;
    a buffer for several parts exists from the first of them on. Outputs, and whatever they may be
    views of, get fresh memory in every run, so that earlier results stay valid. If a kernel only
    begins its work, its inputs live until the program waits for its result.
    """
    spots = spots or {}
    roots, ends = roots_of(regions, spots), waits(regions, kernels)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    writable: dict[str, bool] = {}
    for i, (region, kernel) in enumerate(zip(regions, kernels, strict=True)):
        for value in region.outputs:
            if value in spots:
                (whole,) = roots.get(value, (value,))
                if whole not in graph.inputs:
                    first.setdefault(whole, i)
                    writable[whole] = writable.get(whole, True) and kernel.wait is None
            elif value not in roots:
                first[value], writable[value] = i, kernel.writes and kernel.wait is None
        for value in (*region.inputs, *region.outputs):
            for root in roots.get(value, (value,)):
                last[root] = max(last.get(root, 0), ends.get(i, i))
    escaping = {root for _, value in graph.outputs for root in roots.get(value, (value,))}
    planned: list[Buffer] = []
    loose: list[Buffer] = []
    for value in first:
        size = graph.types[value].dtype.nbytes(graph.types[value].storage_numel)
        buffer = Buffer(value, size, first[value], last[value])
        inside = writable[value] and value not in escaping and graph.types[value].is_dense
        inside = inside and size <= most
        (planned if inside else loose).append(buffer)
    planned.sort(key=lambda b: (b.first, b.name))
    offsets, arena = pack(planned)
    for value, spot in spots.items():
        if spot.buffer in offsets:
            offsets[value] = offsets[spot.buffer] + graph.types[value].dtype.nbytes(spot.offset)
    separate = sum(aligned(b.size) for b in (*planned, *loose))
    end = len(regions)
    there = [Buffer("", arena, 0, end), *loose]
    there += [Buffer(v, graph.types[v].nbytes, -1, last.get(v, -1)) for v in dying]
    there = [replace(b, last=end) if b.name in escaping else b for b in there]
    return MemoryPlan(offsets, arena, peak(loose), separate, peak(there))


class Program:
    """The runnable form of a plan on one device. Safe to run from several threads at once:
    each run in flight has an arena of its own."""

    def __init__(
        self,
        graph: Graph,
        regions: Sequence[Region],
        kernels: Sequence[Kernel],
        constants: Mapping[str, torch.Tensor],
        device: torch.device,
        into: Mapping[str, str] | None = None,
        blocks: Idle | None = None,
        spots: Spots | None = None,
        dying: Collection[str] | None = None,
        instead: Callable[[Region, Exception], Kernel | None] | None = None,
    ) -> None:
        """``into``: names of outputs that take the memory of an input, and which, where the kernel
        that makes them allows it. ``blocks``: memory that this program shares with others.
        ``spots``: where values lie that are parts of others. ``dying``: inputs whose memory nobody
        else needs any more; unless it is None, a run empties the list of its inputs, so that each
        is freed once the last region has read it, and on a GPU large values come from torch's
        allocator, which can use that memory again. ``instead``: a function that returns another
        kernel for a region, or None, called if the first run cannot compile or load its own."""
        self.graph, self.regions, self.device = graph, tuple(regions), device
        self._instead = instead
        leaving = {value for _, value in graph.outputs}  # constants of rank 0 are still on the CPU
        self.constants = {v: t.to(device) if v in leaving else t for v, t in constants.items()}
        self.takes = dying is not None
        placed = spots or {}
        wanted = {value: (into or {}).get(name) for name, value in graph.outputs}
        given = {v: x for v, x in wanted.items() if x is not None}
        free = leaving - given.keys() if self.takes else ()
        over = overwritten(graph, regions, kernels, placed, dying or (), free)
        self.spots: Spots = {**placed, **over}
        most = LOOSE if self.takes and device.type == "cuda" else math.inf
        self.memory = plan_memory(graph, regions, kernels, self.spots, dying or (), most)
        self.steps = [
            Step(region, kernel, self._told(region, kernel), dead, self._joins(region))
            for region, kernel, dead in zip(regions, kernels, self._dead(), strict=True)
        ]
        roots = roots_of(regions, self.spots) if given else {}
        self.into = {v: x for v, x in given.items() if self._fits_over(v, x, roots)}
        for step in self.steps:
            step.told = step.told or not self.into.keys().isdisjoint(step.region.outputs)
        self.conversions: list[str] = []  # values that a library returns in another memory order
        self.shared: set[str] = set()  # outputs that are copied before they are handed out
        self.source = ""
        self._lock = threading.Lock()
        self._cuda = device.type == "cuda"
        self._idle: Idle = {0: []} if blocks is None else blocks
        self._pooled = True  # whether a run needs an arena, which no other may use meanwhile
        self._fast: Callable[..., list[torch.Tensor]] | None = None

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for inputs that are already known to fit."""
        if self._fast is None:
            with self._lock:
                if self._fast is None:
                    return self._first_run(tensors)
        if not self._pooled:
            return self._fast(None, tensors) if self.takes else self._fast(None, *tensors)
        idle = self._idle_here()
        block, arena = self._taken(idle)
        results = self._fast(arena, tensors) if self.takes else self._fast(arena, *tensors)
        idle.append(block)
        return results

    @property
    def direct(self) -> Callable[..., list[torch.Tensor]] | None:
        """A function of the inputs that makes the calls of the program and nothing else. None until
        a first run has checked these calls."""
        if self._fast is None:
            return None
        if self._pooled or self.takes:
            return lambda *tensors: self.run(list(tensors))
        return partial(self._fast, None)

    def _taken(self, idle: list[Block]) -> tuple[Block, Arena]:
        """Take one of the idle blocks, if there are any, else a new one, and return it with this
        program's arena in it. A block that is too small is replaced by a larger one."""
        try:
            block = idle.pop()
            arena = block.arenas.get(self)
            if arena is not None:
                return block, arena
        except IndexError:
            block = None
        with torch.inference_mode(False):  # later runs may write to it outside that mode
            if block is None or block.memory.numel() < self.memory.arena:
                size = self.memory.arena
                block = Block(torch.empty(size, dtype=torch.uint8, device=self.device))
            parts = (
                _part(block.memory, offset, self.graph.types[value])
                for value, offset in self.memory.offsets.items()
            )
            arena = block.arenas[self] = Arena(tuple(parts))
        return block, arena

    def release(self) -> None:
        """Give back the memory of earlier runs on a GPU, once a CUDA Graph has memory of its
        own."""
        if self._cuda:
            self._idle.clear()

    def _idle_here(self) -> list[Block]:
        """Blocks that a run may take now, and gives back when it has queued its work."""
        if not self._cuda:
            return self._idle[0]
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream and torch.cuda.is_current_stream_capturing():  # stream 0 cannot be captured
            return []  # the block belongs to the graph that is captured, and to no other run
        return self._idle.setdefault(stream, [])

    # ---- the checked first run

    def _first_run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        idle = self._idle_here()
        block, arena = self._taken(idle)
        env: dict[str, Any] = dict(self.constants)
        env.update(zip(self.memory.offsets, arena.parts, strict=True))
        env.update(zip(self.graph.inputs, tensors, strict=True))
        if self.takes:
            tensors.clear()  # type: ignore[attr-defined]
        for step in self.steps:
            region, kernel = step.region, step.kernel
            args = [env[v] for v in region.inputs]
            for value in region.outputs:
                if value in self.spots and value not in self.memory.offsets:
                    self._placed(value, env)
            if step.joins:
                pass
            elif step.told:
                for value in region.outputs:
                    if value in self.spots:
                        continue
                    if value in self.into:
                        env[value] = env[self.into[value]]
                    elif value not in self.memory.offsets:
                        env[value] = self.empty(value)()
                outs = [env[v] for v in region.outputs]
                self._fill(step, args, outs)
                if step.kernel.wait is not None:
                    step.kernel.wait(outs[0])
            else:
                result = kernel.fn(*args)
                result = result if kernel.wait is None else kernel.wait(result)
                results = result if isinstance(result, tuple) else (result,)
                step.wrapped = isinstance(result, tuple) and len(result) == 1
                if len(results) != len(region.outputs):
                    wanted = len(region.outputs)
                    raise self._fault(region, f"{len(results)} results where {wanted} are due")
                for value, got in zip(region.outputs, results, strict=True):
                    if value in self.spots:
                        env[value].copy_(self._fitting(region, value, got))
                    else:
                        env[value] = self._promised(region, value, got)
                step.view = self._view(region, env)
            for value in step.dead:
                del env[value]
        names = [v for _, v in self.graph.outputs]
        twice = {v for v in names if names.count(v) > 1}
        # an output that passes made the same value as an input or another output is copied
        self.shared = self._of_constants(env) | twice | (set(names) & set(self.graph.inputs))
        self._write()
        idle.append(block)
        return [duplicate(env[v]) if v in self.shared else env[v] for _, v in self.graph.outputs]

    def _fill(self, step: Step, args: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
        """Call a kernel that writes to ``outs``. If it cannot be compiled or loaded, another takes
        its place, and results are copied: memory was planned for the kernel that failed."""
        try:
            step.kernel.fill(args, outs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            found = None if self._instead is None else self._instead(step.region, error)
            if found is None:
                raise
            step.kernel = self._copied(step.region, found)
            step.kernel.fill(args, outs)

    def _copied(self, region: Region, kernel: Kernel) -> Kernel:
        """Return ``kernel`` so that it writes to no output before it has read all inputs: it
        computes into fresh memory, from which the results are copied."""
        count, makes = len(region.inputs), [self.empty(v) for v in region.outputs]

        def run(*given: torch.Tensor) -> None:
            if kernel.writes:
                made = [make() for make in makes]
                kernel.fill(given[:count], made)
            else:
                result = kernel.fn(*given[:count])
                result = result if kernel.wait is None else kernel.wait(result)
                made = list(result) if isinstance(result, tuple) else [result]
            for value, out, one in zip(region.outputs, given[count:], made, strict=True):
                out.copy_(self._fitting(region, value, one))

        return Kernel(run, writes=True, workspace=kernel.workspace, note=kernel.note)

    def _fits_over(self, value: str, given: str, roots: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether a value may be written over an input: they are of one type, the kernel allows it,
        no later region reads the input or a view of it, and no other output is a view of either."""

        def shows(v: str, memory: str) -> bool:
            return memory in roots.get(v, (v,))

        makers = [step for step in self.steps if value in step.region.outputs]
        readers = [s for s in self.steps if any(shows(v, given) for v in s.region.inputs)]
        if len(makers) != 1 or readers[-1:] != makers or value in self.spots:
            return False
        if any(step.kernel.wait is not None for step in readers):
            return False
        leaving = self.graph.output_values - {value}
        if any(shows(v, memory) for v in leaving for memory in (value, given)):
            return False
        (maker,) = makers
        held = [v for v in maker.region.inputs if shows(v, given)]
        if held != [given] or self.graph.types[value] != self.graph.types[given]:
            return False
        pair = maker.region.outputs.index(value), maker.region.inputs.index(given)
        return maker.kernel.writes and pair in maker.kernel.over

    def _view(self, region: Region, env: Mapping[str, torch.Tensor]) -> View | None:
        """The region's result as a :class:`View` of its one input, if it is one."""
        one = len(region.inputs) == len(region.outputs) == 1
        if not one or any(n.op == "aten" or not table.get(n.op).view for n in region.nodes):
            return None
        given, got = env[region.inputs[0]], env[region.outputs[0]]
        if given.untyped_storage().data_ptr() != got.untyped_storage().data_ptr():
            return None
        if given.dtype != got.dtype:
            return None
        known = got if region.inputs[0] in self.constants else None
        where = region.inputs[0], got.data_ptr() - given.data_ptr()
        return View(*where, shown_at(given, got), known)

    def _of_constants(self, env: Mapping[str, torch.Tensor]) -> set[str]:
        """Outputs in the memory of a constant. These are copied: a caller may write to them."""
        roots, constants = roots_of(self.regions, self.spots), self.graph.constants
        held = {c.untyped_storage().data_ptr() for c in self.constants.values() if c.numel()}
        return {
            value
            for _, value in self.graph.outputs
            if all(root in constants for root in roots.get(value, (value,)))
            or (env[value].numel() and env[value].untyped_storage().data_ptr() in held)
        }

    def _told(self, region: Region, kernel: Kernel) -> bool:
        """Whether the kernel is told where to write. A kernel that can do without (``out_keyword``)
        allocates a result outside the arena by itself: that is quicker, unless it is large."""
        first = region.outputs[0]
        kept = first in self.memory.offsets or first in self.spots or self._recycles(first)
        return kernel.writes and not (kernel.out_keyword and not kept)

    def _recycles(self, value: str) -> bool:
        return self.device.type == "cpu" and self.graph.types[value].nbytes >= LARGE

    def _joins(self, region: Region) -> bool:
        """Whether the region is a concatenation of parts that already lie side by side."""
        return region.ops == (IN_PLACE,) and region.outputs[0] in self.spots

    def inside(self, value: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from the tensor of a buffer to that of a value that lies in it."""
        t, spot = self.graph.types[value], self.spots[value]
        return lambda whole: whole.as_strided(
            t.shape, t.strides, whole.storage_offset() + spot.offset
        )

    def _placed(self, value: str, env: dict[str, Any]) -> None:
        """Give a value its place in a buffer outside the arena, and make that if need be."""
        buffer = self.spots[value].buffer
        if buffer not in env:
            env[buffer] = self.empty(buffer)()
        if value != buffer:
            env[value] = self.inside(value)(env[buffer])

    def _promised(self, region: Region, value: str, got: Any) -> torch.Tensor:
        """Return ``got`` in the type and memory order that the plan promised; raise if that is
        impossible."""
        want, found = self.graph.types[value], self._fitting(region, value, got)
        if same_strides(want.shape, found.stride(), want.strides):
            return found
        if value not in self.conversions:
            self.conversions.append(value)
        return restrided(found, want)

    def _fitting(self, region: Region, value: str, got: Any) -> torch.Tensor:
        """Return ``got`` if it has the shape and element type that the plan promised and is on the
        plan's device; else raise."""
        want = self.graph.types[value]
        if not isinstance(got, torch.Tensor):
            raise self._fault(region, f"a {type(got).__name__} for {value!r}, not {want}")
        if tuple(got.shape) != want.shape or got.dtype != want.dtype.torch:
            raise self._fault(region, f"{TensorType.from_tensor(got)} for {value!r}, not {want}")
        if got.device != self.device:
            raise self._fault(region, f"{value!r} on {got.device}, not on {self.device}")
        return got

    def _fault(self, region: Region, returned: str) -> EngineError:
        where = f"region {region.name} ({' + '.join(region.ops)})"
        remedy = "this is a fault in the engine; leave it out or report it"
        return EngineError(f"the engine returned {returned}", where=where, remedy=remedy)

    def empty(self, value: str) -> Callable[[], torch.Tensor]:
        t = self.graph.types[value]
        if self._recycles(value):
            return Recycled(t)
        return partial(
            torch.empty_strided, t.shape, t.strides, dtype=t.dtype.torch, device=self.device
        )

    def _dead(self) -> list[list[str]]:
        """For every region, the values that no later region reads or writes over. Outputs, values
        in the arena and constants are never among them."""
        keep = {v for _, v in self.graph.outputs} | set(self.memory.offsets) | set(self.constants)
        seen = (
            (v, i)
            for i, r in enumerate(self.regions)
            for v in (*r.inputs, *r.outputs, *self._buffers(r))
        )
        dead: list[list[str]] = [[] for _ in self.regions]
        for value, i in dict(seen).items():  # the last time of each
            if value not in keep:
                dead[i].append(value)
        return dead

    def _buffers(self, region: Region) -> list[str]:
        """Values in whose memory the region writes."""
        return [self.spots[v].buffer for v in region.outputs if v in self.spots]

    # ---- the fast form

    def _rehearsed(self, step: Step) -> tuple[Rehearsal | None, str]:
        """Return the launches of a kernel as data, or None and why they cannot be recorded."""
        region = step.region
        types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
        try:
            return rehearsed(step.kernel.fn, types, self.device), ""
        except Unrecorded as why:
            return None, str(why)

    def _write(self) -> None:
        """Write the calls down as one function."""
        for step in self.steps:
            if step.told and step.kernel.launches and launches_from(self.device):
                step.noted, step.apart = self._rehearsed(step)
        writer = Writer(self)
        self.source = writer.write()
        exec(compile(self.source, f"<plan {id(self):x}>", "exec"), writer.space)
        self._pooled = writer.pooled
        self._fast = writer.space["run"]


def launches_from(device: torch.device) -> bool:
    """Whether native code can launch kernels there."""
    return device.type == "cuda" and openmp.available() and driver_launch() != 0


def _part(block: torch.Tensor, offset: int, type_: TensorType) -> torch.Tensor:
    """A tensor over part of the block. It is not a view for autograd, which would otherwise keep
    track of every write to it."""
    part = torch.empty(0, dtype=type_.dtype.torch, device=block.device)
    start = offset * 8 // type_.dtype.bits
    return part.set_(block.untyped_storage(), start, type_.shape, type_.strides)
