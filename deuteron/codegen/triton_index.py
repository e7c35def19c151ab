"""Index arithmetic as Triton text: flat positions taken apart by constant sizes.

A kernel walks one or two flat spaces (the rows and the columns, or all elements). Sizes and
strides are literals, so that Triton can prove which offsets are contiguous and aligned and
loads 16 bytes at once. Neighbouring axes an access walks through as one are not taken apart:
``x[n*20 + j*5 + k]`` over the flat ``i`` is ``x + i``, without a division.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from deuteron.codegen.index import Affine, Var
from deuteron.codegen.scalar import ScalarProgram, merge_axes


@dataclass(frozen=True)
class Space:
    """Axes walked by one index variable called ``name``; a scalar one spans no tile axis. A
    ``narrow`` one has 32 bits: it is never negative, and division is cheaper without a sign."""

    name: str
    axes: tuple[Var, ...]
    scalar: bool = False
    narrow: bool = False

    @property
    def size(self) -> int:
        return prod(v.size for v in self.axes)


def times(text: str, factor: int) -> str:
    return text if factor == 1 else f"{text} * {factor}" if factor > 0 else f"-{text} * {-factor}"


def runs(
    space: Space, factors: dict[Var, int], name: str, named: Callable[[str], str]
) -> list[str]:
    """Return the terms of an offset that lie in one space. Axes that walk as one are taken
    together; ``named`` gives a name to a part that takes a division."""
    found: list[str] = []
    after, at = 1, len(space.axes) - 1
    while at >= 0:
        last = at
        f = factors.get(space.axes[at], 0)
        size = space.axes[at].size
        while f and at > 0 and factors.get(space.axes[at - 1], 0) == f * size:
            at -= 1
            size *= space.axes[at].size
        if f:
            part = _part(space, name, after, size if at > 0 else None)
            found.append(times(part if part == name else named(part), f))
        for v in space.axes[at : last + 1]:
            after *= v.size
        at -= 1
    return found[::-1]


def _part(space: Space, name: str, after: int, size: int | None) -> str:
    """``name`` // ``after`` % ``size`` as text; no remainder if ``size`` is None."""
    text = f"{name}.to(tl.uint32)" if space.narrow else name
    if after > 1:
        text += f" // {after}"
    if size is not None:
        text = f"({text}) % {size}" if after > 1 else f"{text} % {size}"
    if after == 1 and size is None:
        return name
    return f"({text}).to(tl.int32)" if space.narrow else text


# ---- the order in which axes are walked


@lru_cache(maxsize=4096)
def arranged(program: ScalarProgram) -> ScalarProgram:
    """The same program with its axes in the order of memory, neighbours merged.

    Elementwise work follows its output; a reduction's rows and columns follow the largest
    tensor it reads, so that the last axis of each is the one that lies closest together.
    """
    several = [s.offset for s in (program.transfers if program.inner else program.stores)]
    guide = max(several, key=lambda e: (len(e.variables), e.high - e.low), default=None)
    if guide is None:
        return program
    outer, inner = _ordered(program.outer, guide), _ordered(program.inner, guide)
    return merge_axes(replace(program, outer=outer, inner=inner))


def _ordered(axes: tuple[Var, ...], guide: Affine) -> tuple[Var, ...]:
    factors = [guide.factor(v) for v in axes]
    if any(f is None for f in factors):
        return axes
    order = sorted(range(len(axes)), key=lambda k: -abs(factors[k] or 1 << 62))
    return tuple(axes[k] for k in order)


def transposed_axis(program: ScalarProgram) -> Var | None:
    """For elementwise work: the axis along which the largest input that is read across the
    output's order lies contiguous, or None if all are read along it."""
    if len(program.outer) < 2:
        return None
    last, found, most = program.outer[-1], None, 0
    for s in program.loads:
        if s.offset.factor(last) in (None, 0, 1, -1):
            continue
        for v in program.outer[:-1]:
            span = s.offset.high - s.offset.low
            if s.offset.factor(v) in (1, -1) and v.size >= 4 and span > most:
                found, most = v, span
    return found


def rows_contiguous(program: ScalarProgram) -> bool:
    """For a reduction: whether the largest tensor read lies contiguous along the rows."""
    main = max(program.loads, key=lambda s: s.offset.high - s.offset.low, default=None)
    if main is None or not program.outer:
        return False
    along = [abs(main.offset.factor(v) or 0) for v in program.inner]
    return abs(main.offset.factor(program.outer[-1]) or 0) == 1 and 1 not in along


def needs_int64(program: ScalarProgram) -> bool:
    """Whether any offset, or the count of elements, passes 2³¹."""
    reach = max((max(abs(e.high), abs(e.low)) for e in program.accesses()), default=0)
    return max(reach, program.rows * max(program.columns, 1)) >= 2**31 - 2**20
