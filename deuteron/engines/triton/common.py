"""What every kernel in Triton needs of the machine, and recipes for one operator at a time."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import modelled_seconds
from deuteron.engines.match import operands, results
from deuteron.engines.recipes import Knobs, Recipe, Refuse
from deuteron.engines.roofline import main_dtype, region_cost
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target, has_triton

MOST = 2**31 - 2**20  # lines, places and programs, which kernels count in 32 bits
ADDED_S = 1.5e-6  # a second kernel, which was launched early, as it was seen on an H200


def refuse_elsewhere(target: Target) -> None:
    """Why nothing in Triton can run there, if so."""
    off = not target.is_cuda
    refuse_if(off, "Triton runs on a GPU", "plan for a CUDA device", quiet=True)
    refuse_if(not has_triton(), "Triton is not installed", "pip install triton")


def taken_by(found: Callable[[Region], Any]) -> Refuse:
    """The check of a recipe that takes all that ``found`` does not refuse."""

    def check(region: Region, target: Target, policy: Policy) -> None:
        found(region)

    return check


def one_operator(
    name: str,
    ops: Collection[str],
    refuse: Callable[[Region, Node, Target], None],
    knobs: Callable[[Region, Target], Sequence[Knobs]] | None,
    seconds: Callable[[Region, Target, Knobs], float],
    build: Callable[[Region, Knobs, BuildContext], Kernel],
    build_s: float = 0.4,
) -> Recipe:
    """A recipe for each of ``ops`` by itself; without ``knobs`` there is one way to run it."""

    def wrong(region: Region, target: Target, policy: Policy) -> None:
        refuse_if(len(region.nodes) > 1, "takes its operator by itself", quiet=True)
        refuse(region, region.nodes[0], target)

    def ways(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
        return ({},) if knobs is None else knobs(region, target)

    return Recipe(name, ops, wrong, build, ways, seconds, build_s)


def streamed(reached: float) -> Callable[[Region, Target, Knobs], float]:
    """An estimate: every tensor moved once, at a part of the bandwidth of a copy."""

    def seconds(region: Region, target: Target, knobs: Knobs) -> float:
        return modelled_seconds(region_cost(region), main_dtype(region), reached, False, target)

    return seconds


def tensors_of(region: Region, values: Iterable[str | None]) -> Callable[..., list[Any]]:
    """A function from the tensors of a call to those that are these values; None for a value that
    is None, or that nobody reads."""
    there = (*region.inputs, *region.outputs)
    places = [there.index(v) if v in there else None for v in values]
    return lambda tensors: [None if at is None else tensors[at] for at in places]


def picker(region: Region, structure: Any, **named: str) -> Callable[..., Any]:
    """A function from the tensors of a call to the structure of operands that a kernel takes: those
    of the first node, and others by name."""
    node = region.nodes[0]
    values = {**operands(node), **results(region, node), **named}
    given = tensors_of(region, map(values.get, structure._fields))
    return lambda tensors: structure(*given(tensors))


def room_for(t: TensorType, like: Any) -> Any:
    """Memory for a result that nobody asked for."""
    return like.new_empty(t.shape, dtype=t.dtype.torch)


class Statistics(NamedTuple):
    """A kernel that makes a convolution and leaves statistics of each channel on the way: a
    function of the tensors of its region and of where they go (the parts, the counts, and how many
    parts there are), that number, and a note."""

    run: Callable[..., None]
    pieces: int
    note: str


LINE = 16  # bytes to a multiple of which lines of a matrix begin, for Hopper's copy engine


def refuse_uneven(what: str, line: int, bits: int) -> None:
    """Why the copy engine cannot read lines that begin so many numbers apart, if so."""
    why = f"lines of {what} do not begin at multiples of {LINE} bytes"
    refuse_if(line * bits // 8 % LINE > 0, why, "pad the last size to a multiple of 8")


def from_lines(run: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """``run``, a function of so many inputs and then of results, in which the copy engine reads and
    writes from multiples of 16 bytes on: tensors that begin elsewhere are copied, there or back."""

    def placed(*tensors: Any) -> None:
        if not any(t.data_ptr() & (LINE - 1) for t in tensors):
            run(*tensors)
            return
        given = [t if not t.data_ptr() & (LINE - 1) else _like(t) for t in tensors]
        for new, t in zip(given[:inputs], tensors, strict=False):
            if new is not t:
                new.copy_(t)
        run(*given)
        for new, t in zip(given[inputs:], tensors[inputs:], strict=True):
            if new is not t:
                t.copy_(new)

    return placed


def _like(t: Any) -> Any:
    """Memory for a tensor with the same steps from one element to the next."""
    return t.new_empty_strided(t.shape, t.stride())


class Tiling(NamedTuple):
    """A tile of a product's result, warps, stages, the part of what libraries get out of a
    multiprocessor that it reaches, whether warps divide the work, as Hopper's do, and how many
    steps of the sum are taken at a time, of 16 bits, where that does not follow from the sizes."""

    rows: int
    columns: int
    warps: int
    stages: int
    reached: float
    divided: bool = False
    steps: int = 0


Tiles = TypeVar("Tiles", bound=tuple[Any, ...])


def tiling_of(knobs: Knobs, tilings: Sequence[Tiles]) -> Tiles:
    """The first of these tilings with all that the knobs say of one."""
    said = [(n, value) for n, value in knobs.items() if hasattr(tilings[0], n)]
    return next(t for t in tilings if all(getattr(t, name) == value for name, value in said))


def knobs_of(tiling: Any, *names: str) -> dict[str, Any]:
    """The fields of a tiling by which it is known."""
    return {name: getattr(tiling, name) for name in names}


def settings(knobs: Knobs) -> dict[str, Any]:
    """The knobs without the name of the recipe."""
    return {name: value for name, value in knobs.items() if name != "recipe"}
