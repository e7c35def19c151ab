"""What all Triton kernels need of the machine, and helpers to write their recipes."""

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

MOST = 2**31 - 2**20  # most lines, places or programs: kernels count them in 32 bits
ADDED_S = 1.5e-6  # seconds that a second kernel adds if it is launched early, seen on an H200


def refuse_elsewhere(target: Target) -> None:
    """Refuse targets on which nothing in Triton can run."""
    off = not target.is_cuda
    refuse_if(off, "Triton runs on a GPU", "plan for a CUDA device", quiet=True)
    refuse_if(not has_triton(), "Triton is not installed", "pip install triton")


def taken_by(found: Callable[[Region], Any]) -> Refuse:
    """A ``check`` for a recipe that takes every region that ``found`` does not refuse."""

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
    """A recipe for regions of a single node, which is one of ``ops``. Without ``knobs`` there is
    one way to run it."""

    def wrong(region: Region, target: Target, policy: Policy) -> None:
        refuse_if(len(region.nodes) > 1, "takes its operator by itself", quiet=True)
        refuse(region, region.nodes[0], target)

    def ways(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
        return ({},) if knobs is None else knobs(region, target)

    return Recipe(name, ops, wrong, build, ways, seconds, build_s)


def streamed(reached: float) -> Callable[[Region, Target, Knobs], float]:
    """An estimate for kernels that move every tensor once, at ``reached`` of a copy's bandwidth."""

    def seconds(region: Region, target: Target, knobs: Knobs) -> float:
        return modelled_seconds(region_cost(region), main_dtype(region), reached, False, target)

    return seconds


def tensors_of(region: Region, values: Iterable[str | None]) -> Callable[..., list[Any]]:
    """A function that picks the tensors of these ``values`` from the arguments of a call. It gives
    None for a value that is None, or that is neither an input nor an output of the region."""
    there = (*region.inputs, *region.outputs)
    places = [there.index(v) if v in there else None for v in values]
    return lambda tensors: [None if at is None else tensors[at] for at in places]


def picker(region: Region, structure: Any, **named: str) -> Callable[..., Any]:
    """A function that makes, from the arguments of a call, the ``structure`` of operands that a
    kernel takes: operands and results of the first node, and the values ``named``."""
    node = region.nodes[0]
    values = {**operands(node), **results(region, node), **named}
    given = tensors_of(region, map(values.get, structure._fields))
    return lambda tensors: structure(*given(tensors))


def room_for(t: TensorType, like: Any) -> Any:
    """Memory for a result that the kernel writes but that nothing reads."""
    return like.new_empty(t.shape, dtype=t.dtype.torch)


class Statistics(NamedTuple):
    """A kernel that computes a convolution and also partial statistics of each channel. ``run``
    takes the tensors of its region and where the statistics go (the parts, the counts, and how many
    parts there are); ``pieces`` is that number of parts."""

    run: Callable[..., None]
    pieces: int
    note: str


LINE = 16  # bytes: Hopper's copy engine needs lines of a matrix to begin at multiples of this


def refuse_uneven(what: str, line: int, bits: int) -> None:
    """Refuse lines that begin ``line`` numbers of ``bits`` bits apart if the copy engine cannot
    read them. ``what`` names the operand."""
    why = f"lines of {what} do not begin at multiples of {LINE} bytes"
    refuse_if(line * bits // 8 % LINE > 0, why, "pad the last size to a multiple of 8")


def from_lines(run: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """``run`` with copies of all tensors that do not begin at a multiple of 16 bytes, as the copy
    engine needs. The first ``inputs`` arguments are inputs, which are copied before ``run``; the
    others are results, which are copied back after it."""

    def placed(*tensors: Any) -> None:
        if not any(t.data_ptr() & (LINE - 1) for t in tensors):
            run(*tensors)
            return
        given = [
            t if not t.data_ptr() & (LINE - 1) else _copied(t) if i < inputs else _like(t)
            for i, t in enumerate(tensors)
        ]
        run(*given)
        for new, t in zip(given[inputs:], tensors[inputs:], strict=True):
            if new is not t:
                t.copy_(new)

    return placed


def _copied(t: Any) -> Any:
    """A copy with the same strides. What is expanded is copied once and stays expanded."""
    once = t[tuple(slice(1) if step == 0 else slice(None) for step in t.stride())]
    return _like(once).copy_(once).expand(t.shape)


def _like(t: Any) -> Any:
    """Memory for a tensor of the same shape and strides."""
    return t.new_empty_strided(t.shape, t.stride())


class Tiling(NamedTuple):
    """How a product's result is cut into tiles. ``reached``: the speed that this tile reaches per
    multiprocessor, as a part of what libraries reach. ``divided``: warps are specialised, as Hopper
    allows: one loads while others multiply. ``steps``: how many 16-bit numbers along the sum are
    taken at a time, where that does not follow from the sizes."""

    rows: int
    columns: int
    warps: int
    stages: int
    reached: float
    divided: bool = False
    steps: int = 0


Tiles = TypeVar("Tiles", bound=tuple[Any, ...])


def tiling_of(knobs: Knobs, tilings: Sequence[Tiles]) -> Tiles:
    """The first of these tilings whose fields agree with all knobs of the same names."""
    said = [(n, value) for n, value in knobs.items() if hasattr(tilings[0], n)]
    return next(t for t in tilings if all(getattr(t, name) == value for name, value in said))


def knobs_of(tiling: Any, *names: str) -> dict[str, Any]:
    """The fields ``names`` of a tiling, as knobs."""
    return {name: getattr(tiling, name) for name in names}


def settings(knobs: Knobs) -> dict[str, Any]:
    """The knobs without the name of the recipe."""
    return {name: value for name, value in knobs.items() if name != "recipe"}
