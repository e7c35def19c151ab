"""``cpu_gen``: any chain of elementwise, movement and reduction operators as one kernel, written
in LLVM IR for the machine it runs on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch

from deuteron.codegen import openmp
from deuteron.codegen.calls import Argument, Call, Room, Word
from deuteron.codegen.parts import in_parts
from deuteron.codegen.phases import in_phases, undivided
from deuteron.codegen.scalar import Load, ScalarProgram, overwritable, reads
from deuteron.codegen.triton_passes import Passes
from deuteron.engines.base import BuildContext, Candidate, Kernel, as_answer, refuse_if
from deuteron.engines.index_checks import checked, lookups
from deuteron.engines.match import places_of, scalar_program
from deuteron.engines.roofline import refuse_product, region_bound, shows
from deuteron.ir.region import Region
from deuteron.ops.formula import Compute, Const
from deuteron.policy import Policy
from deuteron.target import Target

# Seconds per element on one core with vectors of four, beyond what hides behind the loads. A
# "quotient" is an integer division.
SECONDS = {"exp": 1.2e-9, "exp2": 1.2e-9, "erf": 2.6e-9, "tanh": 1.5e-9, "ndtr": 1.6e-9}
SECONDS |= {"log": 2.0e-9, "quotient": 2.0e-9, "sin": 2.5e-9, "cos": 2.5e-9}
SECONDS |= {"div": 0.6e-9, "sqrt": 0.6e-9}
CALL_SECONDS = 1e-6
SCALAR_SECONDS = 0.5e-9  # added per statement and element where no axis can be vectorised
SERIAL_ELEMENTS = 16384  # fewer elements are finished before a second thread wakes up
# for each access per element whose vector lanes lie apart in memory, so that they move one by one
ACROSS_SECONDS = 0.3e-9
SHORT_SECONDS = 2.5e-9  # per element and reduction, where rows are read in short runs
AGAIN_SECONDS = 0.5e-9  # per element and pass, where _is_read_again says so
LINE, HELD = 128, 2**20  # for _is_read_again: bytes read of each row, and bytes that a cache holds
SHORT_RUN = 64  # fewer adjacent elements of a reduced row than this are a short run
LIBRARY = frozenset({"exp", "exp2", "log", "erf", "tanh", "sin", "cos", "expm1", "log1p", "ndtr"})
LIBRARY_SECONDS = 20e-9  # a call of the C library: for all of LIBRARY in float64, and for pow


@lru_cache(maxsize=4096)
def phased(program: ScalarProgram) -> ScalarProgram:
    """The program with as few divided axes (such as i // 2) as possible: no vector can run along a
    divided axis."""
    return undivided(in_phases(program))


def program_of(region: Region) -> ScalarProgram:
    """The region's scalar program, in a form that this machine can render; refuses if it cannot."""
    short = any(t.dtype.is_float and t.dtype.bits < 16 for t in region.graph.types.values())
    refuse_if(short, "floats of 8 bits are left to torch", "cast to f16 or wider")
    found = phased(scalar_program(region))
    divisions = (s for s in found.statements if isinstance(s, Compute) and s.op == "quotient")
    by_tensor = any(not isinstance(s.args[1], Const) for s in divisions)
    wrong = "integers are divided by a tensor, which may hold a 0, and torch raises for it"
    refuse_if(by_tensor, wrong, "divide by a number, or cast to a float")
    return found


def _lanes() -> int:
    from deuteron.codegen import llvm

    return llvm.width()


def _seconds(s: Compute, wide: bool) -> float:
    if s.op in ("pow", "power") or (wide and s.op in LIBRARY):
        return LIBRARY_SECONDS
    return SECONDS.get(s.op, 0.045e-9) * 4 / _lanes()


def _work(program: ScalarProgram) -> float:
    """Seconds of arithmetic on one core. Values that stay the same along the innermost loop (all
    reduced axes, or the last axis of pointwise work) are computed once before it; values that
    depend on guarded loads only where the guard holds."""
    along = set(program.inner or program.outer[-1:])
    length = program.columns if program.inner else prod(v.size for v in along)
    cells = program.rows * program.columns
    shares: dict[str, float] = {}  # by value, the share of elements for which it is computed
    total = 0.0
    for s in program.statements:
        if isinstance(s, Load):
            parts = ((g.high - g.low) / (g.index.high - g.index.low + 1) for g in s.guards)
            shares[s.name] = prod(min(1.0, part) for part in parts)
        elif isinstance(s, Compute):
            shares[s.name] = min((shares.get(a, 1.0) for a in reads(s)), default=1.0)
            times = cells if program.varies[s.name] & along else cells // length
            total += _seconds(s, program.wide) * times * shares[s.name]
    return total


def _in_short_runs(program: ScalarProgram) -> bool:
    """Whether the largest tensor of a reduction is read in runs of a few adjacent elements, like
    the channels of a group in an image with channels last."""
    loads = [s for s in program.statements if isinstance(s, Load)]
    main = max(loads, key=lambda s: s.offset.high - s.offset.low, default=None)
    if main is None:
        return False
    runs = [v.size for v in program.inner if main.offset.factor(v) == 1]
    return any(1 < run < min(SHORT_RUN, program.columns) for run in runs)


def _is_read_again(program: ScalarProgram) -> bool:
    """Whether a reduction down several columns at once reads them from memory in every pass,
    because the lines of all their rows do not fit in a cache."""
    from deuteron.codegen.llvm_plan import plan

    shape = plan(program)
    columns = bool(program.inner) and shape.vector is not None and not shape.inner_vector
    return columns and not shape.in_order and program.columns * LINE > HELD


@lru_cache(maxsize=4096)
def _one_by_one(program: ScalarProgram) -> tuple[bool, int]:
    """Whether no axis can be vectorised; and how many accesses per element move vector lanes one by
    one, as they lie apart in memory."""
    from deuteron.codegen.llvm_plan import plan, scattered

    return plan(program).vector is None, scattered(program)


class CpuGen:
    """Generated row and pointwise kernels on the CPU."""

    name = "cpu_gen"
    version = "4"
    strided = True

    @as_answer
    def refuse(self, region: Region, target: Target, policy: Policy) -> None:
        refuse_if(target.is_cuda, "is a CPU engine", quiet=True)
        refuse_if(not openmp.available(), "llvmlite is not installed", "pip install llvmlite")
        views = all(shows(region.graph, node) for node in region.nodes)
        refuse_if(views, "only views: torch answers without touching memory", quiet=True)
        refuse_product(region)
        lookups(region)
        program_of(region)

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        return [Candidate(self.name, self.version, build_s=0.1)]

    def estimate(self, region: Region, target: Target, candidate: Candidate) -> float:
        found = program_of(region)
        work = _work(found)
        single, apart = _one_by_one(found)
        each = SCALAR_SECONDS * len(found.statements) if single else ACROSS_SECONDS * apart
        work += each * found.rows * found.columns
        if _in_short_runs(found):
            work += SHORT_SECONDS * found.rows * found.columns * len(found.reductions)
        elif _is_read_again(found):
            work += AGAIN_SECONDS * found.rows * found.columns * Passes(found).count
        return region_bound(region, target).seconds / 0.9 + work / target.units + CALL_SECONDS

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        found = program_of(region)
        programs = in_parts(found) or (found,)
        parts = programs[0].outputs if len(programs) > 1 else ()
        # partial results have 8 bytes at most: two floats of scratch memory each
        rooms = {part: Room(part, 2 * programs[0].rows) for part in parts}
        kernel = kernel_of(programs, (*region.inputs, *region.outputs), rooms)
        if len(programs) == 1:
            kernel = replace(kernel, over=places_of(overwritable(found), region))
        if indices := lookups(region):  # Python checks indices: native calls alone are not enough
            return replace(kernel, fn=checked(kernel.fn, indices, region.inputs), calls=())
        return kernel


def kernel_of(
    programs: Iterable[ScalarProgram], tensors: Sequence[str], rooms: Mapping[str, Room]
) -> Kernel:
    """A kernel that runs the programs one after the other. ``tensors`` are its arguments in order;
    ``rooms`` are values in scratch memory that one program writes and a later one reads."""
    words: dict[str, Word] = {v: Argument(i) for i, v in enumerate(tensors)}
    made = [_call_of(program, {**words, **rooms}) for program in programs]
    room = max(floats for _, floats in made)
    return Kernel.generated([c for c, _ in made], workspace=4 * room * torch.get_num_threads())


def _call_of(program: ScalarProgram, words: Mapping[str, Word]) -> tuple[Call, int]:
    """The call of a program whose tensors are where ``words`` say, and how many floats of scratch
    memory it needs for each thread."""
    from deuteron.codegen import llvm
    from deuteron.codegen.llvm_columns import renderer as renderer_of
    from deuteron.codegen.llvm_render import signature

    named = program.anonymous()
    renderer = renderer_of(named)
    loaded = llvm.load(signature(named), renderer)
    given = [words[v] for v in (*program.inputs, *program.outputs)]
    kept, room = len(renderer.shape.kept), 0
    if kept:
        width = program.columns * (1 if renderer.shape.inner_vector else renderer.shape.lanes)
        room = width * kept * (2 if program.wide else 1)
        given.append(Room("rows", 0, room))
    threaded = program.rows * program.columns >= SERIAL_ELEMENTS
    return Call(loaded, (*given, *loaded.numbers), threaded), room
