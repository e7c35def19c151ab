"""y = f(x · w, …): a matrix product with whatever follows it element by element, in one kernel.

A program takes tiles of the result in turn. Both factors come by descriptors, which Hopper's copy
engine follows by itself and other GPUs read as pointers; each may lie transposed in memory. What
follows the product, a :class:`~deuteron.ops.formula.Traced`, is applied to the sums while they are
in registers, so that they are rounded once, when they are stored.

Tiles are walked in groups of rows: programs that run at the same time share columns of w and a few
rows of x, which then come from L2.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import formula_source, functions
from deuteron.kernels.triton.launch import Launchable
from deuteron.ops.formula import Traced

# Rows and columns of the result, steps of the sum, and from one line to the next of x, w and y.
Sizes = namedtuple("Sizes", "rows columns steps x_line w_line y_line")
# A tile of the result and how much of the sum it takes at a time, how many tiles of rows are walked
# together, and which factors lie transposed: x as [steps, rows], w as [columns, steps].
Tile = namedtuple("Tile", "rows columns steps group x_turned w_turned")


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Row and column of a tile, in groups of GROUP rows."""
    first = tile // (GROUP * across) * GROUP
    high = min(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % high, within // high


@triton.jit
def _product(x, w, y, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    M, N, K = size.rows, size.columns, size.steps
    if T.x_turned:
        left = tl.make_tensor_descriptor(x, [K, M], [size.x_line, 1], [T.steps, T.rows])
    else:
        left = tl.make_tensor_descriptor(x, [M, K], [size.x_line, 1], [T.rows, T.steps])
    if T.w_turned:
        right = tl.make_tensor_descriptor(w, [N, K], [size.w_line, 1], [T.columns, T.steps])
    else:
        right = tl.make_tensor_descriptor(w, [K, N], [size.w_line, 1], [T.steps, T.columns])
    out = tl.make_tensor_descriptor(y, [M, N], [size.y_line, 1], [T.rows, T.columns])
    down, across = tl.cdiv(M, T.rows), tl.cdiv(N, T.columns)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, column = _place(tile, down, across, T.group)
        m, n = row * T.rows, column * T.columns
        sums = tl.zeros((T.rows, T.columns), tl.float32)
        for k in range(0, K, T.steps):
            if T.x_turned:
                a = left.load([k, m]).T
            else:
                a = left.load([m, k])
            if T.w_turned:
                b = right.load([n, k]).T
            else:
                b = right.load([k, n])
            sums = tl.dot(a, b, sums)
        found = FINISH(sums, others, m, n, size, T)
        out.store([m, n], found.to(y.dtype.element_ty))


_run = Launchable(_product)

# How another operand of what follows lies against the result, and what reads it for a tile.
READS = {
    "columns": "tl.load({p} + n + tl.arange(0, T.columns), "
    "mask=n + tl.arange(0, T.columns) < size.columns, other=0.0)[None, :]",
    "rows": "tl.load({p} + m + tl.arange(0, T.rows), "
    "mask=m + tl.arange(0, T.rows) < size.rows, other=0.0)[:, None]",
    "all": "tl.make_tensor_descriptor({p}, [size.rows, size.columns], [size.columns, 1], "
    "[T.rows, T.columns]).load([m, n])",
    "one": "tl.load({p})",
}


@lru_cache(maxsize=512)
def finish(formula: Traced, operands: tuple[str, ...], exact: bool) -> Any:
    """What is made of the sums of a tile, as a Triton function: ``formula`` of the sums and of the
    other operands, each of a kind of :data:`READS`."""
    names = [f"o{i}" for i in range(len(operands))]
    lines = [
        f"    {name} = {READS[kind].format(p=f'others[{i}]')}.to(tl.float32)\n"
        for i, (name, kind) in enumerate(zip(names, operands, strict=True))
    ]
    head = "@triton.jit\ndef finish(sums, others, m, n, size, T: tl.constexpr):\n"
    given = ", ".join(("sums", *names))
    body = f"{head}{''.join(lines)}    return formula({given})\n"
    return functions(f"{formula_source(formula, exact, divides=False)}\n\n{body}")["finish"]


def product(
    size: Sizes,
    tile: Tile,
    formula: Traced,
    operands: Sequence[str],
    programs: int,
    warps: int,
    stages: int,
    exact: bool,
) -> Callable[..., None]:
    """A function of x, w, y and the other operands."""
    last = finish(formula, tuple(operands), exact)
    tiles = -(-size.rows // tile.rows) * -(-size.columns // tile.columns)
    grid = (min(programs, tiles),)

    def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, others: Sequence[Any]) -> None:
        given = (x, w, y, tuple(others), size)
        _run(grid, *given, warps=warps, stages=stages, T=tile, FINISH=last)

    return run
