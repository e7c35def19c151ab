"""Sparse matrices for tests, and the dense products they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import deuteron as dt
from deuteron.ir import Region
from tests.by_hand import compare as compared


@dataclass(frozen=True)
class Case:
    """The lengths of rows; columns (of blocks), columns of x, and the block of an entry."""

    name: str
    lengths: tuple[int, ...]
    size: int
    n: int
    block: tuple[int, ...] = ()
    index: torch.dtype = torch.int64
    line: int = 0  # further numbers between lines of x

    def structure(self) -> tuple[torch.Tensor, torch.Tensor]:
        gen = torch.Generator().manual_seed(0)
        starts = torch.tensor((0, *self.lengths)).cumsum(0)
        columns = torch.randint(0, self.size, (sum(self.lengths),), generator=gen)
        return starts.to(self.index), columns.to(self.index)

    def feed(self, op: str, kind: torch.dtype) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(1)
        h, w = self.block or (1, 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen, dtype=torch.float64).to(kind)

        starts, columns = self.structure()
        x = normal(self.size * w, self.n + self.line)[:, : self.n]
        first = normal(len(columns), *self.block)
        if op == "sddmm_csr":
            first = normal(len(self.lengths) * h, self.n)
        return {"starts": starts, "columns": columns, "first": first, "x": x}

    def region(self, op: str, feed: dict[str, torch.Tensor]) -> Region:
        g = dt.Graph(op)
        given = [g.tensor(n, t.shape, t.dtype, strides=t.stride()) for n, t in feed.items()]
        how = {"block": self.block} if op == "sddmm_csr" else {}
        getattr(g, op)(*given, **how).output("y")
        return Region(g.ir(), frozenset(), 0)


I32 = torch.int32
CASES = (
    Case("plain", (3, 0, 9, 1, 17), 12, 33),
    Case("one number", (1,), 1, 1),
    Case("a vector", (5, 0, 40), 30, 1, index=I32),
    Case("long rows", (3, 1300, 0, 1024, 1023, 2), 40, 20, index=I32, line=3),
    Case("wide", (4, 5), 6, 300),
    Case("empty ends", (0, 0, 7, 0), 5, 64, index=I32),
)
BLOCKS = (
    Case("blocks", (2, 0, 3), 4, 40, (16, 16)),
    Case("flat blocks", (1, 4), 3, 16, (16, 32), I32),
    Case("tall blocks", (3,), 2, 70, (64, 16)),
    Case("long rows of blocks", (2, 70), 3, 17, (16, 16), line=5),
)
OPS = ("spmm_csr", "sddmm_csr")


def cases(kind: torch.dtype, device: str) -> Iterator[tuple[str, Case]]:
    low = kind == torch.bfloat16 and device == "cpu"  # the interpreter multiplies no bfloat16
    for case in CASES + (() if low or kind == torch.float64 else BLOCKS):
        yield from ((op, case) for op in OPS)


def compare(op: str, case: Case, kind: torch.dtype, device: str, most: int) -> tuple[int, list]:
    feed = case.feed(op, kind)
    name = f"{op} {case.name} {kind}"
    longest = max(case.lengths) if op == "spmm_csr" else case.n
    return compared(name, case.region(op, feed), feed, device, most, longest)


def wrong_on(device: str, kinds: tuple[torch.dtype, ...], most: int) -> tuple[int, list[str]]:
    """How many kernels ran on all cases, and what is wrong with them."""
    found = [compare(*case, kind, device, most) for kind in kinds for case in cases(kind, device)]
    return sum(count for count, _ in found), [bad for _, several in found for bad in several]
