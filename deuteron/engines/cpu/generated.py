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

# seconds per element on one core with vectors of four, beyond what hides behind the loads
SECONDS = {"exp": 1.2e-9, "exp2": 1.2e-9, "erf": 2.6e-9, "tanh": 1.5e-9, "ndtr": 1.6e-9}
SECONDS |= {"log": 2.0e-9, "quotient": 2.0e-9, "sin": 2.5e-9, "cos": 2.5e-9}
SECONDS |= {"div": 0.6e-9, "sqrt": 0.6e-9}
CALL_SECONDS = 1e-6
SCALAR_SECONDS = 0.5e-9  # more for each statement and element where nothing can be a vector
SERIAL_ELEMENTS = 16384  # fewer are done sooner than a second thread wakes up
ACROSS_SECONDS = 0.3e-9  # a number of an element that lies apart from its neighbours in lanes
SHORT_SECONDS = 2.5e-9  # an element of a short run, in every pass
AGAIN_SECONDS = 0.5e-9  # an element of columns side by side that no cache holds, in every pass
LINE, HELD = 128, 2**20  # bytes that are read of each row of such columns; what a cache holds
SHORT_RUN = 64  # elements side by side, with others between those and the next of the same row
LIBRARY = frozenset({"exp", "exp2", "log", "erf", "tanh", "sin", "cos", "expm1", "log1p", "ndtr"})
LIBRARY_SECONDS = 20e-9  # a call of the C library: all of the above in float64, and pow


@lru_cache(maxsize=4096)
def phased(program: ScalarProgram) -> ScalarProgram:
    """The program with as few divided axes as can be: no vector runs along one."""
    return undivided(in_phases(program))


def program_of(region: Region) -> ScalarProgram:
    """The region's scalar program, which this machine can render."""
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
    """Seconds of arithmetic on one core. What is the same along the innermost loop (all reduced
    axes, or the last axis of pointwise work) is computed once before it, and what hangs on loads
    under a guard only where the guard holds."""
    along = set(program.inner or program.outer[-1:])
    length = program.columns if program.inner else prod(v.size for v in along)
    cells = program.rows * program.columns
    shares: dict[str, float] = {}  # of the elements, those for which a value is computed
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
    """Whether the largest tensor of a reduction is read a few elements here and a few there, as the
    groups of channels that lie innermost are."""
    loads = [s for s in program.statements if isinstance(s, Load)]
    main = max(loads, key=lambda s: s.offset.high - s.offset.low, default=None)
    if main is None:
        return False
    runs = [v.size for v in program.inner if main.offset.factor(v) == 1]
    return any(1 < run < min(SHORT_RUN, program.columns) for run in runs)


def _is_read_again(program: ScalarProgram) -> bool:
    """Whether every pass over columns that stand side by side reads them from memory: together they
    are too long to stay in a cache."""
    from deuteron.codegen.llvm_plan import plan

    shape = plan(program)
    columns = bool(program.inner) and shape.vector is not None and not shape.inner_vector
    return columns and not shape.in_order and program.columns * LINE > HELD


@lru_cache(maxsize=4096)
def _one_by_one(program: ScalarProgram) -> tuple[bool, int]:
    """Whether no axis can be a vector; and how many numbers of an element are put into lanes, or
    taken out of them, by themselves."""
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
        rooms = {part: Room(part, 2 * programs[0].rows) for part in parts}  # of 8 bytes at most
        kernel = kernel_of(programs, (*region.inputs, *region.outputs), rooms)
        if len(programs) == 1:
            kernel = replace(kernel, over=places_of(overwritable(found), region))
        if indices := lookups(region):  # then it is no mere call of native code
            return replace(kernel, fn=checked(kernel.fn, indices, region.inputs), calls=())
        return kernel


def kernel_of(
    programs: Iterable[ScalarProgram], tensors: Sequence[str], rooms: Mapping[str, Room]
) -> Kernel:
    """Programs one after the other, over tensors in the order of the call and values that lie in
    scratch memory between them."""
    words: dict[str, Word] = {v: Argument(i) for i, v in enumerate(tensors)}
    made = [_call_of(program, {**words, **rooms}) for program in programs]
    room = max(floats for _, floats in made)
    return Kernel.generated([c for c, _ in made], workspace=4 * room * torch.get_num_threads())


def _call_of(program: ScalarProgram, words: Mapping[str, Word]) -> tuple[Call, int]:
    """The call of a program whose tensors are where ``words`` say, and the floats that it keeps for
    each thread."""
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
