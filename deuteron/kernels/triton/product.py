"""y = f(x · w, …): a matrix product and the elementwise work after it, its epilogue, in one kernel.

A program takes one tile of the result after another. It loads both factors by descriptors, which
Hopper's copy engine (TMA) executes and which other GPUs turn into loads by pointers; each factor
may lie transposed in memory. The epilogue, a :class:`~deuteron.ops.formula.Traced`, is applied to
the sums while they are in registers, so that they are rounded only once, when they are stored.

With ``gate`` there are two second factors, as in a gated linear unit: y = f(x · w, x · w₂, …).

Tiles are walked in groups of a few rows of tiles: programs that run at the same time share columns
of w and a few rows of x, which then come from L2.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import formula_source, functions
from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.ops.formula import Traced

# Rows and columns of the result, steps of the sum (its inner dimension), row strides of x, w and y.
Sizes = namedtuple("Sizes", "rows columns steps x_line w_line y_line")
# rows, columns: of a tile of the result; steps: of the sum at a time; group: rows of tiles that are
# walked together; x_turned, w_turned: x lies as [steps, rows], w as [columns, steps]; gate: there
# are two second factors; precision: how float32 is multiplied, see ``Policy.float32``.
Tile = namedtuple("Tile", "rows columns steps group x_turned w_turned gate precision")


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Return the row and column of a tile; GROUP rows of tiles are walked together."""
    first = tile // (GROUP * across) * GROUP
    high = min(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % high, within // high


@triton.jit
def _second(w, size, T: tl.constexpr):
    """Return a descriptor that loads blocks of a second factor."""
    if T.w_turned:
        shape = [size.columns, size.steps]
        found = tl.make_tensor_descriptor(w, shape, [size.w_line, 1], [T.columns, T.steps])
    else:
        shape = [size.steps, size.columns]
        found = tl.make_tensor_descriptor(w, shape, [size.w_line, 1], [T.steps, T.columns])
    return found


@triton.jit
def _block(right, k, n, T: tl.constexpr):
    """Load the block of a second factor that a tile needs next."""
    if T.w_turned:
        found = right.load([n, k]).T
    else:
        found = right.load([k, n])
    return found


@triton.jit
def _added(sums, a, b, KIND: tl.constexpr, T: tl.constexpr):
    """sums + a · b. The matrix units keep few bits of sums of 8-bit floats, so that their sums go
    to float32 after every block."""
    some: tl.constexpr = a.shape[1] if a.dtype.primitive_bitwidth == 8 else 0
    return tl.dot(a, b, sums, T.precision, max_num_imprecise_acc=some, out_dtype=KIND)


@triton.jit
def _product(x, w, w2, y, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    M, N, K = size.rows, size.columns, size.steps
    if T.x_turned:
        left = tl.make_tensor_descriptor(x, [K, M], [size.x_line, 1], [T.steps, T.rows])
    else:
        left = tl.make_tensor_descriptor(x, [M, K], [size.x_line, 1], [T.rows, T.steps])
    right, right2 = _second(w, size, T), _second(w2, size, T)
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    out = tl.make_tensor_descriptor(y, [M, N], [size.y_line, 1], [T.rows, T.columns])
    down, across = tl.cdiv(M, T.rows), tl.cdiv(N, T.columns)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, column = _place(tile, down, across, T.group)
        m, n = row * T.rows, column * T.columns
        sums = tl.zeros((T.rows, T.columns), kind)
        more = sums
        for k in range(0, K, T.steps):
            if T.x_turned:
                a = left.load([k, m]).T
            else:
                a = left.load([m, k])
            sums = _added(sums, a, _block(right, k, n, T), kind, T)
            if T.gate:
                more = _added(more, a, _block(right2, k, n, T), kind, T)
        found = FINISH(sums, more, others, 0, m, n, size, T, 0)
        out.store([m, n], found.to(y.dtype.element_ty))


_run = Launchable(_product)


# ---- split sums (split-K): programs store partial sums of a tile, which a second kernel adds up


AT_ONCE = tl.constexpr(16)  # parts that one thread adds up one after the other
PARTS = tl.constexpr(64)  # where there are more, so many are added up side by side


@triton.jit
def _add_up(parts, ys, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    enter(T.CHAIN, False)
    b, m, n = tl.program_id(2), tl.program_id(1) * T.rows, tl.program_id(0) * T.columns
    row, column = m + tl.arange(0, T.rows), n + tl.arange(0, T.columns)
    there = (row < size.rows)[:, None] & (column < size.columns)[None, :]
    whole = tl.num_programs(2).to(tl.int64) * size.rows * size.columns
    to = (b.to(tl.int64) * size.rows + row)[:, None] * size.columns + column[None, :]
    if T.parts > AT_ONCE:  # in a fixed order either way: the same bits every time
        some = tl.zeros((PARTS, T.columns), tl.float32)
        for first in range(0, T.parts, PARTS):
            part = first + tl.arange(0, PARTS)[:, None]
            known = there & (part < T.parts)
            some += tl.load(parts + part.to(tl.int64) * whole + to, mask=known, other=0.0)
        sums = tl.sum(some, 0)[None, :]
    else:
        sums = tl.zeros((T.rows, T.columns), tl.float32)
        for part in tl.static_range(T.parts):
            sums += tl.load(parts + part * whole + to, mask=there, other=0.0)
    for i in tl.static_range(T.outs):
        found = FINISH(sums, sums, others, b, m, n, size, T, i)
        tl.store(ys[i] + to, found.to(ys[i].dtype.element_ty), mask=there)


_ADD_UP = Launchable(_add_up, follows=True)
SUMMED = 32, 32  # the largest tile of a program that adds up


def add_up(
    parts: Any, ys: Sequence[Any], others: Sequence[Any], size: Any, tile: Any, last: Any
) -> None:
    """Add up ``parts`` [tile.parts, batches, rows, columns] in float32, apply the epilogue
    ``last``, made by :func:`finish`, and store the results in ``ys``. ``size`` and ``tile`` are
    those of the kernel that stored the parts."""
    many = tile.parts > AT_ONCE.value
    rows, columns = 1 if many else min(SUMMED[0], power_of_two(size.rows)), SUMMED[1]
    grid = (-(-size.columns // columns), -(-size.rows // rows), parts.shape[1])
    warps = 4 if many else min(4, max(1, rows // 4))
    small = tile._replace(rows=rows, columns=columns)
    _ADD_UP(grid, parts, tuple(ys), tuple(others), size, T=small, FINISH=last, warps=warps)


def in_parts(
    leave: Callable[[Any, Any], None],
    x: Any,
    ys: Sequence[Any],
    others: Sequence[Any],
    size: Any,
    tile: Any,
    last: Any,
) -> None:
    """Compute a product whose sum is split: ``leave(parts, tile)`` launches the kernel that stores
    partial sums in ``parts``, and then they are added up. ``x``: any operand, for its device."""
    here = tile._replace(CHAIN=chained(x.device))
    room = (tile.parts, getattr(size, "batches", 1), size.rows, size.columns)
    parts = torch.empty(room, dtype=torch.float32, device=x.device)
    leave(parts, here)
    add_up(parts, ys, others, size, here, last)


# ---- epilogues: what follows the sums

# Which dimensions of the result an operand of the epilogue has: the outer and the inner batch (o,
# i), the rows (m) and the columns (n). For products without batches these have names.
LIES = {"one": "", "columns": "n", "rows": "m", "all": "oimn"}
BATCH = {"oi": "b", "o": "b // size.inner", "i": "b % size.inner"}


def reading(kind: str, pointer: str, row: str, column: str, language: str = "tl") -> str:
    """Return the code that loads an operand of the epilogue for a tile, by pointers; ``row`` and
    ``column``: the code of the tile's row and column numbers."""
    if kind == "images":  # one row for each image, which is size.pixels rows of the result
        at = f"({row} // size.pixels) * size.columns + {column}"
        inside = f"({row} < size.rows) & ({column} < size.columns)"
        return f"{language}.load({pointer} + {at}, mask={inside}, other=0.0)"
    has = LIES.get(kind, kind)
    if not has:
        return f"{language}.load({pointer})"
    batch = BATCH.get("".join(d for d in has if d in "oi"))
    at = f"{row}.to({language}.int64)" if "m" in has else ""
    if batch is not None:
        start = f"{language}.cast({batch}, {language}.int64)"
        at = f"({start} * size.rows + {at})" if at else start
    if "n" in has:
        at = f"{at} * size.columns + {column}" if at else column
    inside = [f"({row} < size.rows)"] if "m" in has else []
    inside += [f"({column} < size.columns)"] if "n" in has else []
    rest = f", mask={' & '.join(inside)}, other=0.0" if inside else ""
    return f"{language}.load({pointer} + {at}{rest})"


ROW = "(m + tl.arange(0, T.rows))[:, None]"
COLUMN = "(n + tl.arange(0, T.columns))[None, :]"
TILE = (  # by a descriptor, where there is much to read
    "tl.make_tensor_descriptor({p}, [size.rows, size.columns], [size.columns, 1], "
    "[T.rows, T.columns]).load([m, n])"
)


class EpilogueFormula(NamedTuple):
    """An epilogue: a formula of sums and of other operands; for each operand a name in
    :data:`LIES`, or its letters, for the dimensions it has; and whether results are float32."""

    formula: Traced
    operands: tuple[str, ...]
    exact: bool


def finishing(
    after: EpilogueFormula,
    given: str,
    read: Callable[[str, str], str],
    gate: bool = False,
    language: str = "tl",
) -> Any:
    """Return an epilogue as a function in Triton, or in Gluon, with the parameters ``given``: from
    the sums of a tile, both if there is a ``gate``, it computes the result, or, of several, number
    I. ``read(pointer, kind)`` returns the code that loads an operand."""
    names = [f"o{i}" for i in range(len(after.operands))]
    lines = [
        f"    {name} = {read(f'others[{i}]', kind)}.to({language}.float32)\n"
        for i, (name, kind) in enumerate(zip(names, after.operands, strict=True))
    ]
    args = ", ".join(("sums", *(("more",) if gate else ()), *names))
    which = "[I]" if after.formula.others else ""
    body = f"@triton.jit\ndef finish({given}):\n{''.join(lines)}    return formula({args}){which}\n"
    text = f"{formula_source(after.formula, after.exact, divides=False)}\n\n{body}"
    if language == "gl":
        text = f"{GLUON}\n{text.replace('@triton.jit', '@gluon.jit')}"
    return functions(text)["finish"]


GLUON = (
    "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl"
)


@lru_cache(maxsize=512)
def finish(after: EpilogueFormula, gate: bool = False, plain: bool = True) -> Any:
    """Return the epilogue of a tile's sums. ``plain``: it reads all operands by pointers."""

    def read(pointer: str, kind: str) -> str:
        if kind == "all" and not plain:
            return TILE.format(p=pointer)
        return reading(kind, pointer, ROW, COLUMN)

    given = "sums, more, others, b, m, n, size, T: tl.constexpr, I: tl.constexpr"
    return finishing(after, given, read, gate)


def product(
    size: Sizes, tile: Tile, after: EpilogueFormula, programs: int, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (x, w, w2, y, others); without a gate w2 is w again."""
    last = finish(after, tile.gate, plain=False)
    tiles = -(-size.rows // tile.rows) * -(-size.columns // tile.columns)
    grid = (min(programs, tiles),)

    def run(x: torch.Tensor, w: Any, w2: Any, y: Any, others: Sequence[Any]) -> None:
        given = (x, w, w2, y, tuple(others), size)
        _run(grid, *given, warps=warps, stages=stages, T=tile, FINISH=last)

    return run
