"""How resampling is spread over a GPU. Nothing here needs Triton, so that engines can use it while
they choose a kernel."""

from dataclasses import dataclass

from deuteron.codegen.triton_render import power_of_two
from deuteron.ir.types import TensorType
from deuteron.kernels.resample_map import AxisMap

UNROLLED = 8  # the most reads along an axis that are unrolled
FEW = 2**21  # results: with fewer, large programs would leave multiprocessors idle


@dataclass(frozen=True)
class ResampleTile:
    """A program's planes, rows and columns, its warps, and whether it walks down the rows."""

    planes: int
    rows: int
    columns: int
    warps: int
    walks: bool = False


def cuts(y: TensorType, down: AxisMap, across: AxisMap) -> list[ResampleTile]:
    """Return the tiles worth trying, most promising first."""
    return [*walks(y, down, across), *tiles(y, down, across)]


def walks(y: TensorType, down: AxisMap, across: AxisMap) -> list[ResampleTile]:
    """Return tiles of programs that walk down the rows, if some rows of x are read again, most
    promising first."""
    height, most = (1, *y.shape[2:])[-2], max(down.most, across.most)
    if down.has_gaps or most > UNROLLED or down.most * height <= down.length:
        return []
    each = 8 if most == 1 or is_last(y) else 16 if most == 2 else 8 if most <= 4 else 4
    planes, columns = _sides(y, _held(y, each) * 128)
    lengths = (32, 16) if most > 2 and height > down.length else (16, 8)
    if y.numel < FEW:
        lengths = (8, 4)
    return [ResampleTile(planes, rows, columns, 4, True) for rows in lengths]


def tiles(y: TensorType, down: AxisMap, across: AxisMap) -> list[ResampleTile]:
    """Return tiles of programs that load all that their results need, most promising first. The
    more a result reads, the fewer results a thread has registers for."""
    height, most = (1, *y.shape[2:])[-2], max(down.most, across.most)
    each = _held(y, 16 if most <= 2 else 8 if most <= 4 else 4)
    found = []
    for rows in (4, 2) if each > 4 else (2, 1):
        rows = min(rows, power_of_two(height))
        planes, columns = _sides(y, each * 128 // rows * (2 if is_last(y) else 1))
        found.append(ResampleTile(planes, rows, columns, 4))
    return list(dict.fromkeys(found))


def _held(y: TensorType, each: int) -> int:
    """Return the results of a thread: fewer for float64, or where there are few results."""
    return max(each >> (y.dtype.short == "f64") >> 2 * (y.numel < FEW), 1)


def _sides(y: TensorType, room: int) -> tuple[int, int]:
    """Return planes and columns: as many as fit of what is adjacent in memory."""
    channels, width = y.shape[1], y.shape[-1]
    if is_last(y):
        planes = _evenly(channels, 64, 8)
        return planes, max(min(room // planes, 1024 // planes, power_of_two(width)), 1)
    columns = _evenly(width, 256, 32)
    return max(min(room // columns, power_of_two(channels)), 1), columns


def is_last(y: TensorType) -> bool:
    """Whether channels are adjacent."""
    return y.strides[1] == 1 and y.shape[1] > 1


def _evenly(length: int, most: int, least: int) -> int:
    """Return the largest power of two, up to ``most``, in whose multiples little is left over."""
    size = min(power_of_two(length), most)
    while size > least and -(-length // size) * size > 1.25 * length:
        size //= 2
    return size
