"""How the backward of a norm is spread over a GPU. No Triton here: engines ask while deciding."""

from __future__ import annotations

from dataclasses import dataclass

from deuteron.codegen.triton_render import power_of_two

LONGEST = {2: 8192, 4: 8192, 8: 2048}  # columns that registers hold, by the bytes of an element
LONGEST_PLAIN = 16384  # without a mean and in 16 bits, which takes fewer registers
SHARED = 96 << 10  # bytes of shared memory that every GPU since sm_80 has
IN_FLIGHT = 72 << 10  # and those of loads that keep one busy: more take turns with the stores
MOST_STAGES = 5
COLUMNS = 512  # of a program in the long variant
TALLEST = 8192  # positions of a tile of a group that is read again and again
EACH = 8  # elements of a tile that a thread has, which are a load of 16 bytes in 16 bits
FEW, MOST = 7, 14  # tiles of a group that registers hold: for two programs on a unit, for one
LEAST_PART, MOST_PARTS = 1024, 4096  # elements of a part of a group, parts of one
WAVES = 4  # programs of the long variant per multiprocessor


@dataclass(frozen=True)
class Work:
    """What is to be differentiated: ``rows`` of ``columns`` elements that share statistics.

    With ``groups`` the weight has one element for each of ``each`` channels of a group, else one
    for each column, and an ``activation`` may follow whose gradient is taken along.
    """

    rows: int
    columns: int
    eps: float
    centred: bool
    size: int  # bytes of an element
    reads: int  # tensors of the size of x that are read: x, grad and perhaps extra
    groups: int = 0
    each: int = 0
    activation: str = "none"
    slope: float = 0.0

    @property
    def kind(self) -> str:
        if self.groups:
            return "groups"
        plain = self.size == 2 and not self.centred
        longest = LONGEST_PLAIN if plain else LONGEST[self.size]
        return "rows" if power_of_two(self.columns) <= longest else "long"


@dataclass(frozen=True)
class Way:
    """How it is run: ``rows`` at a time by each of ``programs``, with loads in ``stages``; or
    groups, ``tile`` elements at a time, or all at once in tiles of so many ``channels``; or in
    parts of ``each`` channels by ``positions``, each of them all at once."""

    rows: int = 1
    programs: int = 1
    warps: int = 4
    stages: int = 1
    tile: int = 0
    channels: int = 0
    each: int = 0
    positions: int = 0


def ways(work: Work, units: int) -> list[Way]:
    """Ways worth trying on a GPU of ``units`` multiprocessors, the best guess first.

    A tile of 4096 elements is 8 for each thread of 16 warps. Smaller programs on a multiprocessor
    cover each other's waiting for sums along rows: the better where rows are short, and for a norm
    with a mean.
    """
    if work.kind == "groups":
        most = power_of_two(work.columns)
        tiles = dict.fromkeys(min(most, tile) for tile in (8192, 16384, 2048))
        again = [Way(warps=max(1, min(16, tile // 512)), tile=tile) for tile in tiles]
        return [*_held(work), *_split(work), *again]
    if work.kind == "long":
        across = -(-work.columns // COLUMNS)
        return [Way(4, max(1, min(work.rows // 16, WAVES * units // across)), 4, 3)]
    width = power_of_two(work.columns)
    shares = [(1, 16), (2, 8), (4, 4)]  # programs per unit, warps
    if width <= 1024:
        shares = [(4, 4), (8, 2), (2, 8)]
    elif work.centred:
        shares = [(2, 8), (1, 16)]
    fitting = [(p, w) for p, w in shares if p == 1 or width <= 512 * w]
    return list(dict.fromkeys(_shared_out(work, units, p, w) for p, w in fitting))


def forward_ways(work: Work) -> list[Way]:
    """Ways of the norm itself; groups whose parts are no fair size have none."""
    return [*_held(work), *_split(work)]


def _held(work: Work) -> list[Way]:
    """The fewest warps whose registers hold a group, if there are any: more programs on a unit then
    cover each other's waiting for sums."""
    if work.size > 4:
        return []
    positions = work.columns // work.each
    for most, choices in ((FEW, (1, 2, 4, 8)), (MOST, (8,))):
        for warps in choices:
            channels, tiles = _cut(work.each, positions, warps)
            if tiles <= most:
                return [Way(warps=warps, tile=warps * 32 * EACH, channels=channels)]
    return []


def _split(work: Work) -> list[Way]:
    """Equal parts of a group that the registers of 4 warps hold: whole channels, or equal pieces
    of one."""
    positions, warps = work.columns // work.each, 4
    most = FEW * warps * 32 * EACH
    if positions <= most:
        fair = max(1, most * 6 // 7 // positions)  # several channels take more registers
        each = max(d for d in range(1, fair + 1) if work.each % d == 0)
    else:
        each = 1
        pieces = range(-(-positions // most), positions // LEAST_PART + 1)
        positions = next((positions // q for q in pieces if positions % q == 0), 0)
    size = each * positions
    if work.size > 4 or size < LEAST_PART or not 1 < work.columns // size <= MOST_PARTS:
        return []
    channels, tiles = _cut(each, positions, warps)
    if tiles > MOST:
        return []
    return [
        Way(warps=warps, tile=warps * 32 * EACH, channels=channels, each=each, positions=positions)
    ]


def _cut(each: int, positions: int, warps: int) -> tuple[int, int]:
    """How many channels a tile has that leaves least over, and how many tiles there are then."""
    tile = warps * 32 * EACH
    wide = [1 << k for k in range(power_of_two(each).bit_length()) if 1 << k <= tile]
    counts = {c: -(-each // c) * -(-positions // (tile // c)) for c in wide}
    channels = min(wide, key=lambda c: counts[c])
    return channels, counts[channels]


def tile_of(work: Work, way: Way) -> tuple[int, int]:
    """Channels and positions of a tile of a group."""
    if way.channels:
        return way.channels, way.tile // way.channels
    tall = min(power_of_two(work.columns // work.each), TALLEST, way.tile)
    return min(power_of_two(work.each), way.tile // tall), tall


def is_held(work: Work, way: Way) -> bool:
    """Whether what is read stays in registers, with room for other programs beside."""
    positions = work.columns // work.each
    return bool(way.channels and not way.each) and _cut(work.each, positions, way.warps)[1] <= FEW


def _shared_out(work: Work, units: int, per_unit: int, warps: int) -> Way:
    """Rows in tiles, as many in flight as shared memory holds."""
    width = power_of_two(work.columns)
    tile = warps * 32 * (8 if work.size < 8 else 4)  # elements that suit the registers
    most = per_unit * units
    together = max(1, min(tile // width, work.rows // most))
    if work.rows * width <= tile:
        together = work.rows  # one program takes all, and there are no partial results
    rows = power_of_two(together)
    tiles = -(-work.rows // rows)
    stages = 1
    if tiles > most and width <= LONGEST[work.size]:
        each = per_unit * rows * width * work.size * work.reads
        stages += min(MOST_STAGES - 1, max(min(2, SHARED // each), IN_FLIGHT // each))
    return Way(rows, min(tiles, most), max(1, min(warps, rows * width // 256)), stages)


def samples(work: Work, way: Way) -> int:
    """How many partial results there are for a channel."""
    pieces = work.columns // work.each // way.positions if way.positions else 1
    return work.rows // work.groups * pieces


def scratch(work: Work, way: Way, sums: int) -> int:
    """Bytes of partial results for ``sums`` parameters, and of the sums of long rows."""
    wide = max(work.size, 4)
    if work.kind == "groups":
        count, size = samples(work, way), way.each * way.positions
        of_parts = 4 * work.rows * (work.columns // size) * wide if size else 0
        return of_parts + (0 if count == 1 else sums * count * work.groups * work.each * wide)
    partials = 0 if way.programs == 1 else sums * way.programs * work.columns * wide
    return partials + (5 * work.rows * wide if work.kind == "long" else 0)
