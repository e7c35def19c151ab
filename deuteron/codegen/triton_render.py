"""A scalar program as Triton kernels, in one of five kinds.

======  =================================================================================
flat    elementwise: one flat index over everything the output holds
tile    elementwise with an input that lies contiguous along another axis than the output:
        2-D tiles, transposed in shared memory, so that both sides move whole lines
rows    reductions with the whole row in registers: every byte is read once
loop    longer rows in passes over blocks; later passes read through L2
split   few and long rows: each pass is a kernel whose programs share a row and leave
        partial results, which the next kernel combines in a fixed order (no atomics)
======  =================================================================================

Column and mixed reductions are the last three with many rows per program: where the rows lie
contiguous the tile's long side runs along them, and Triton vectorises over rows.
Knobs choose the kind and sizes; they change the order of additions, never the mathematics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from deuteron.codegen.index import Var
from deuteron.codegen.phases import in_copies, in_phases
from deuteron.codegen.scalar import ScalarProgram, Store, overwritable
from deuteron.codegen.triton_body import Body, arithmetic, side_by_side, woven
from deuteron.codegen.triton_index import Space, arranged, needs_int64, transposed_axis
from deuteron.codegen.triton_math import POINTERS, Arithmetic
from deuteron.codegen.triton_passes import Partial, Passes


@dataclass(frozen=True)
class Knobs:
    """How to run a program: ``rows`` × ``block`` elements per program (in a tile: the other axis ×
    the output's), how often the loop body is written out, programs per row. ``copies``: of
    elementwise work, how many neighbours whose windows overlap one thread makes."""

    kind: str
    block: int
    warps: int = 4
    rows: int = 1
    unroll: int = 1
    splits: int = 1
    copies: int = 1


@dataclass(frozen=True)
class Launch:
    """One kernel of a rendered program: its function, its grid, and its arguments."""

    function: str
    grid: int
    arguments: tuple[str, ...]  # a partial result is marked "#"


@dataclass(frozen=True)
class Rendered:
    """Source text, what to launch in order, and scratch memory between the launches."""

    source: str
    launches: tuple[Launch, ...]
    partials: tuple[Partial, ...]
    pointers: dict[str, str]  # value or partial → Triton's pointer type
    warps: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=4096)
def prepared(program: ScalarProgram) -> ScalarProgram:
    """Return the program as it is best rendered: in phases, except where tiles are transposed."""
    found = in_phases(program)
    return found if transposed_axis(found) is None else program


def render(program: ScalarProgram, knobs: Knobs, name: str = "kernel") -> Rendered:
    """Return the kernels of ``program``, called ``name`` and their kind, as profilers show them."""
    return Renderer(program, knobs).run(f"{name}_{knobs.kind}")


class Renderer:
    def __init__(self, program: ScalarProgram, knobs: Knobs) -> None:
        self.program, self.knobs = in_copies(arranged(program), knobs.copies), knobs
        self.math: Arithmetic = arithmetic(self.program)
        self.wide_index = needs_int64(self.program)
        self.names = {v: f"x{k}" for k, v in enumerate(program.inputs)}
        self.outs = {v: f"y{k}" for k, v in enumerate(dict.fromkeys(program.outputs))}
        self.pointers: dict[str, str] = {}
        for s in self.program.transfers:
            self.pointers[s.tensor] = POINTERS[s.dtype.short]

    def run(self, name: str) -> Rendered:
        knobs, program = self.knobs, self.program
        at_once = {"flat": self._flat, "tile": self._tile, "rows": self._rows}.get(knobs.kind)
        partials: tuple[Partial, ...] = ()
        if at_once is not None:
            bodies = [at_once()]
        else:
            passes = Passes(program, knobs.unroll, knobs.splits)
            bodies, partials = passes.kernels(self._row_body, knobs.block, knobs.kind == "split")
        launches, texts = [], []
        for k, (body, grid, extra) in enumerate(bodies):
            called = name if len(bodies) == 1 else f"{name}_{k}"
            arguments = (*self.names, *self.outs, *(f"#{w}" for w in extra))
            args = ", ".join((*self.names.values(), *self.outs.values(), *extra))
            head = f"@triton.jit\ndef {called}({args}):\n"
            texts.append(head + "\n".join(body.lines) + "\n")
            launches.append(Launch(called, grid, arguments))
        pointers = self.pointers | {f"#{p.name}": POINTERS[p.dtype] for p in partials}
        source = "\n\n".join([HEAD, *self.math.helpers(), *texts])
        return Rendered(source, tuple(launches), partials, pointers, knobs.warps)

    # ---- elementwise

    def _body(self, spaces: Sequence[Space], shape: tuple[int, ...]) -> Body:
        return Body(self.program, self.math, self.names | self.outs, tuple(spaces), shape)

    def _space(self, name: str, axes: tuple[Var, ...]) -> Space:
        return Space(name, axes, narrow=not self.wide_index)

    def _program_id(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.wide_index else "tl.program_id(0)"

    def _flat(self) -> tuple[Body, int, tuple[str, ...]]:
        space = self._space("i", self.program.outer)
        block = min(self.knobs.block, power_of_two(space.size))
        body = self._body([space], (block,))
        body.program_id = self._program_id()
        body.line(f"i = {body.program_id} * {block} + tl.arange(0, {block})")
        body.mask("i", space.size, block, "inside")
        body.pairs, body.woven = side_by_side(self.program), woven(self.program)
        body.emit(self.program.statements)
        return body, -(-space.size // block), ()

    def _tile(self) -> tuple[Body, int, tuple[str, ...]]:
        """The output's last axis × the axis along which the input is contiguous."""
        other = transposed_axis(self.program) or self.program.outer[-2]
        last = self.program.outer[-1]
        rest = Space("q", tuple(v for v in self.program.outer if v not in (other, last)), True)
        rows = min(self.knobs.rows, power_of_two(other.size))
        block = min(self.knobs.block, power_of_two(last.size))
        spaces = [rest, self._space("r", (other,)), self._space("c", (last,))]
        body = self._body(spaces, (rows, block))
        across, down = -(-last.size // block), -(-other.size // rows)
        body.line(f"q = {self._program_id()}")
        body.line(f"c = (q % {across}) * {block} + tl.arange(0, {block})[None, :]")
        body.line(f"r = (q // {across} % {down}) * {rows} + tl.arange(0, {rows})[:, None]")
        body.line(f"q = q // {across * down}")
        body.mask("r", other.size, rows)
        body.mask("c", last.size, block)
        body.emit(self.program.statements)
        return body, rest.size * across * down, ()

    # ---- rows

    def _row_body(self, block: int, programs: int = 1, most: int = 4096) -> tuple[Body, int]:
        """The start of every reduction kernel: which rows, ``most`` at once, and where in them.

        ``programs`` programs share a row; the number of the current one is called ``part``."""
        rows = min(self.knobs.rows, power_of_two(self.program.rows), most)
        row_space = self._space("r", self.program.outer)
        if rows == 1:
            row_space = Space("r", self.program.outer, scalar=True)
        shape = (block,) if rows == 1 else (rows, block)
        body = self._body([row_space, self._space("c", self.program.inner)], shape)
        first = self._program_id()
        if programs > 1:
            # neighbours take neighbouring rows: what lies side by side is read at the same time
            blocks = -(-self.program.rows // rows)
            body.line(f"part = tl.program_id(0) // {blocks}")
            first = f"({first} % {blocks})"
        if rows == 1:
            body.line(f"r = {first}")
        else:
            body.line(f"r = {first} * {rows} + tl.arange(0, {rows})[:, None]")
            body.mask("r", self.program.rows, rows)
        return body, -(-self.program.rows // rows) * programs

    def _rows(self) -> tuple[Body, int, tuple[str, ...]]:
        block = power_of_two(self.program.columns)
        body, grid = self._row_body(block)
        lift = "" if body.flat_row else "[None, :]"
        wide = ".to(tl.int64)" if self.wide_index else ""
        body.line(f"c = tl.arange(0, {block}){lift}{wide}")
        body.mask("c", self.program.columns, block)
        for s in self.program.loads:
            axes = self.program.axes_of(s.offset)
            if axes and axes.isdisjoint(self.program.outer):  # every row reads it again
                body.hints[s.tensor] = "evict_last"
        body.emit(s for s in self.program.statements if not isinstance(s, Store))
        over = {tensor for _, tensor in overwritable(self.program, at_once=True)}
        loads = (s for s in self.program.loads if s.tensor in over)
        if any(self.program.level[s.name] == "row" for s in loads):
            body.line("tl.debug_barrier()")  # a row is read by all before any of it is overwritten
        body.emit(self.program.stores)
        return body, grid, ()


HEAD = """import triton
import triton.language as tl
"""
