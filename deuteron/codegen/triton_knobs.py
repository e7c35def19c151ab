"""Which sizes are worth trying: tables of plain tuples, the best guess first.

The numbers are per program: 8 to 16 elements a thread keep enough loads in flight to cover the
latency of memory, more cost registers. At most six ways per region, so that measuring is cheap.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from deuteron.codegen.phases import divided_by, in_copies, shared_axis
from deuteron.codegen.scalar import ScalarProgram
from deuteron.codegen.triton_index import arranged, rows_contiguous, transposed_axis
from deuteron.codegen.triton_passes import Passes, dependent_reductions
from deuteron.codegen.triton_render import Knobs, power_of_two
from deuteron.ops.formula import Compute

MOST = 6
FLAT = ((1024, 4), (2048, 4), (2048, 8), (512, 4), (4096, 8))  # block, warps
SLOW = frozenset({"exp", "exp2", "log", "log1p", "expm1", "erf", "ndtr", "tanh", "sin", "cos"})
FEW = ((256, 4), (512, 4), (128, 2), (1024, 4))  # flat, when there is less than a wave of work
TILE = ((64, 64, 8), (32, 64, 4), (32, 32, 4), (64, 32, 4), (32, 128, 8))  # rows, block, warps
PER_THREAD = (16, 8, 32, 4)  # elements of a row that a thread holds
FEWER_WARPS = (32, 16, 8)  # the same for long rows, where waiting for other warps costs more
LOOP = (  # block, warps, unroll: 32 warps leave 64 registers a thread, so fewer copies
    *((2048, 8, 8), (8192, 32, 4), (4096, 16, 4)),
    *((2048, 8, 4), (1024, 4, 4), (1024, 4, 1)),
)
# For rows of which L2 holds few: one program each, and as many copies as registers hold
LONG_LOOP = {
    65536: ((2048, 8, 16), (8192, 32, 8), (4096, 16, 8), (2048, 8, 8)),
    131072: ((8192, 32, 8), (4096, 16, 16), (8192, 32, 4), (4096, 16, 8)),
}
COLUMN = ((64, 32, 4), (32, 16, 4), (128, 16, 8), (32, 64, 8))  # rows, block, warps
# The same where programs share columns: four warps each, SHARING programs on a multiprocessor. Rows
# of 16-bit numbers that do not begin at a multiple of 16 bytes are better read in long stretches
# (ODD).
SHARED_COLUMN, SHARED_ODD, SHARING = (64, 32), (512, 4), 8
HELD = 48  # numbers of a column that a thread holds, of two rows, or half as many of four
LEAST_SHARED = 256  # numbers of the shortest column that several programs share
MOST_SHARES, MOST_AGAIN = 1024, 128  # most programs of a column; and if later kernels read it again
WAITING = ((4096, 16, 2), (2048, 8, 8), (4096, 16, 4))  # loops for sums that wait for sums
LONGEST_ROW = 32768  # that registers of one program can hold
LONG_ROW = 16384  # where a program in registers is alone on a multiprocessor


def choices(program: ScalarProgram, units: int = 132) -> list[Knobs]:
    """Ways to run ``program`` on a machine with ``units`` multiprocessors."""
    program = arranged(program)
    if not program.inner:
        found = _elementwise(program, units)
    elif rows_contiguous(program) and program.rows >= 8:
        found = _columns(program, units)
    else:
        found = _rows(program, units)
    return list(dict.fromkeys(_in_short_loops(program, knobs) for knobs in found))[:MOST]


COPIES = (7, 8, 4, 5, 6, 3, 2)  # neighbours whose windows overlap; only those that divide the axis
LONGEST_CODE = 25_000  # loads × statements, of 8 elements a thread
ENOUGH = 2048  # groups of neighbouring results that each multiprocessor should have at least


def _is_short(program: ScalarProgram, copies: int) -> bool:
    """Whether so many copies compile within a second: Triton looks at all statements for every
    load. A copy never has more of both than the program; copies are written out only if that bound
    is too large."""
    most = len(program.loads) * len(program.statements) * copies**2
    if most <= LONGEST_CODE:
        return True
    written = in_copies(program, copies)
    return len(written.loads) * len(written.statements) <= LONGEST_CODE


def _in_short_loops(program: ScalarProgram, knobs: Knobs) -> Knobs:
    """The same with fewer copies of a loop's body where that is long, as that of windows is."""
    unroll, each = knobs.unroll, max(1, knobs.rows * knobs.block // (256 * knobs.warps))
    body = len(program.loads) * len(program.statements) * each
    while unroll > 1 and body * unroll**2 > LONGEST_CODE:
        unroll //= 2
    return replace(knobs, unroll=unroll)


def _short(program: ScalarProgram, counts: Iterable[int], most: int) -> list[int]:
    """The first of these numbers of copies that are short. More copies are never shorter: where
    some are too long, larger numbers are not written out."""
    found, long = list[int](), inf
    for n in counts:
        if len(found) < most and n < long and _is_short(program, n):
            found.append(n)
        elif len(found) < most:
            long = min(long, n)
    return found


def _copied(program: ScalarProgram, units: int) -> list[Knobs]:
    """Knobs that make neighbours together, if their windows overlap and enough work is left for all
    multiprocessors."""
    axis = shared_axis(program)
    even = [n for n in COPIES if axis is not None and axis.size % n == 0]
    even = [n for n in even if axis is not None and n % divided_by(program, axis) == 0]
    busy = _short(program, (n for n in even if program.rows // n >= units * ENOUGH), 2)
    table = ((1024, 4), (512, 4)) if busy else ((256, 4),)
    each = busy or _short(program, sorted(even)[:1], 1)
    return [Knobs("flat", block, warps, copies=n) for block, warps in table for n in each]


def _elementwise(program: ScalarProgram, units: int) -> list[Knobs]:
    copied = _copied(program, units)
    return [*copied, *_one_by_one(program, units)[: 2 if copied else MOST]]


def _one_by_one(program: ScalarProgram, units: int) -> list[Knobs]:
    total = program.rows
    table = _flat(program) if total >= units * 1024 else FEW
    flat = [Knobs("flat", min(block, power_of_two(total)), warps) for block, warps in table]
    other = transposed_axis(program)
    if other is None:
        return flat
    last = program.outer[-1]
    tiles = []
    for rows, block, warps in TILE:
        r, b = min(rows, power_of_two(other.size)), min(block, power_of_two(last.size))
        tiles.append(Knobs("tile", b, max(1, warps * r * b // (rows * block)), r))
    return tiles + flat[:1]


def _flat(program: ScalarProgram) -> tuple[tuple[int, int], ...]:
    """16 bytes a thread at a time, of the smaller where a cast has two sizes; twice as many where
    16 bits go through slow functions, so that there is work while they wait."""
    slow = any(isinstance(s, Compute) and s.op in SLOW for s in program.statements)
    halves = any(s.dtype.bits == 16 for s in program.transfers)
    first = (512, 4) if not halves and _widest(program) > 16 else (2048, 4) if slow else (1024, 4)
    return tuple(dict.fromkeys((first, *FLAT)))


def _widest(program: ScalarProgram) -> int:
    """Bits of the largest elements that are read or written."""
    return max(s.dtype.bits for s in program.transfers)


def _rows(program: ScalarProgram, units: int) -> list[Knobs]:
    columns, rows = program.columns, program.rows
    width = power_of_two(columns)
    waits = dependent_reductions(program) > 1
    found = []
    if width <= LONGEST_ROW:
        spread = max(rows // (2 * units), 1)  # rows a program may take with all units busy
        few = width >= LONG_ROW or (waits and width >= LONG_ROW // 2)
        for each in FEWER_WARPS if few else PER_THREAD:
            together = max(1, min(2048 // width, power_of_two(spread + 1) // 2))
            short = min(4, 1024 // width) if width <= 256 else 1
            for count in dict.fromkeys((together, max(1, together // 2), max(1, short))):
                warps = max(1, min(32, count * width // (32 * each)))
                if count * width // (32 * warps) <= 64:
                    found.append(Knobs("rows", width, warps, count))
    loops = [
        Knobs("loop", block, warps, unroll=unroll)
        for block, warps, unroll in _loops(program, width, waits)
        if block * unroll <= width or (block, unroll) == (1024, 1)
    ]
    if columns >= 8192 and rows < units:
        parts = max(2, min(256, power_of_two(2 * units // rows), width // 2048))
        split = [
            Knobs("split", 2048, 8, splits=parts),
            Knobs("split", 1024, 4, unroll=2, splits=parts),
            Knobs("split", 2048, 8, splits=max(2, parts // 2)),
        ]
        return split + found[:1] + loops[:2]
    if crowded(program):
        return loops[:4] + found[:2]
    return found[:5] + loops[:1] if width >= 4096 else found


def _loops(program: ScalarProgram, width: int, waits: bool) -> list[tuple[int, int, int]]:
    """Wide blocks where rows are very long or several tensors are read; else the usual order."""
    outer, inner = set(program.outer), set(program.inner)
    used = ((s.tensor, program.axes_of(s.offset)) for s in program.loads)
    if len({tensor for tensor, axes in used if axes & outer and axes & inner}) > 1:
        return sorted(LOOP, reverse=True)
    if width >= 65536:
        halves = 2 if _widest(program) > 16 else 1  # of the copies, where they are twice as large
        table = LONG_LOOP[min(width, 131072)]
        return [(block, warps, unroll // halves) for block, warps, unroll in table]
    return list(WAITING if waits and width == LONG_ROW else LOOP)


def crowded(program: ScalarProgram) -> bool:
    """Whether a row in registers fills a multiprocessor, so that loads and sums take turns."""
    width = power_of_two(program.columns)
    return width >= LONGEST_ROW or (width == LONG_ROW and dependent_reductions(program) > 1)


def _columns(program: ScalarProgram, units: int) -> list[Knobs]:
    """Rows lie contiguous: the tile's long side runs along them, the loop down the columns."""
    shared, alone = _shared_columns(program, units), _stretches(program, units)
    columns = program.columns
    size = max((s.dtype.bits for s in program.loads), default=32)
    for rows, block, warps in COLUMN:
        count = min(rows * (2 if size <= 16 else 1), power_of_two(program.rows))
        depth = min(block, power_of_two(columns))
        warps = max(1, min(warps, count * depth // 32))
        kind = "rows" if depth >= columns else "loop"
        alone.append(Knobs(kind, depth, warps, count))
    return shared + alone[:1] if shared else alone


def _stretches(program: ScalarProgram, units: int) -> list[Knobs]:
    """Columns that one program each adds up, if there are enough of them for stretches of 16 bytes
    a thread: then threads need not exchange anything. A later pass finds the columns in a cache, if
    all of a column is read at once."""
    size = max((s.dtype.bits for s in program.loads), default=32)
    rows, block, columns = (1024, 1, 8) if size <= 16 else (512, 2, 8)
    if Passes(program).count > 1:
        rows, block, columns = 512 if program.columns <= HELD // 2 else 256, 1, program.columns
    if columns > HELD or program.rows < units * rows:
        return []
    unroll = max(1, min(columns, power_of_two(program.columns)) // block)
    return [Knobs("loop", block, 4, rows, unroll)]


def _shared_columns(program: ScalarProgram, units: int) -> list[Knobs]:
    """Columns cut into shares, if there are too few of them for all multiprocessors: shares enough
    for one wave, and loads enough in each to hide the latency."""
    size = max((s.dtype.bits for s in program.loads), default=32)
    odd = program.rows * size // 8 % 16 != 0
    several = len({s.tensor for s in program.loads}) > 1  # whose sums take registers
    most = MOST_SHARES if Passes(program).count == 1 else MOST_AGAIN
    found = []
    for rows, depth in (SHARED_ODD, SHARED_COLUMN) if odd else (SHARED_COLUMN, SHARED_ODD):
        count = min(rows, power_of_two(program.rows))
        blocks = -(-program.rows // count)
        if blocks >= 4 * units or program.columns < LEAST_SHARED:
            continue
        wanted = SHARING * units // (2 if several else 1)
        shares = max(2, min(wanted // blocks, most))
        unroll = max(1, min(4, power_of_two(program.columns // (shares * depth) + 1) // 2))
        step = depth * unroll
        each = -(-program.columns // (shares * step)) * step
        shares = -(-program.columns // each)
        if shares > 1:
            found.append(Knobs("split", depth, 4, count, unroll, shares))
    return found
