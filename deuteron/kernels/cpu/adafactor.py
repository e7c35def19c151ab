"""Adafactor of matrices, one call over all tensors: the passes of ``adafactor_passes`` in order,
bundle after bundle, so that a tensor is in L2 from its first pass to its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from math import prod

import torch

from deuteron.codegen.calls import Call, Tape
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu.adafactor_passes import PASSES, POINTERS, Cut, compiled, cut
from deuteron.kernels.cpu.optim import SERIAL
from deuteron.kernels.optim import Program

BUNDLE = 1 << 17  # elements


def _list(counts: Sequence[int]) -> torch.Tensor:
    """(owner, number within the owner) for so many things of each owner, as int32."""
    sizes = torch.tensor(counts)
    owner = torch.repeat_interleave(torch.arange(len(counts)), sizes)
    place = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    return torch.stack((owner, place)).to(torch.int32)


class Layout:
    """The step of some tensors with all its tables; only gradients and numbers are still open."""

    def __init__(
        self,
        program: Program,
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        table: torch.Tensor,
    ) -> None:
        """``dtypes`` are of p, g, the moments, and the average where there is one."""
        kinds = [dtype(d) for d in dtypes]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        loaded = {name: compiled(name, program, kinds) for name in PASSES}
        cuts, bundles, room = self._bundles(shapes)
        self.numbers = torch.empty(len(program.numbers), dtype=torch.float64)
        chunks, spans = _list([x.last - x.first for x in cuts]), _list([x.spans for x in cuts])
        sums = torch.empty(3, max(chunks.shape[1], len(cuts)), dtype=torch.float64)
        scratch = [torch.empty(n, dtype=wide) for n in room]
        cut_table = torch.tensor([astuple(x) for x in cuts]).t().contiguous()
        self.held = (table, self.numbers, cut_table, chunks, spans, *scratch, sums)
        known = [table, table, self.numbers, cut_table, chunks, spans, *scratch, *sums]
        counts = [len(cuts), chunks.shape[1], spans.shape[1]]
        header = torch.tensor([*(x.data_ptr() for x in known), *counts])
        self.header = header.numpy()
        calls = []
        for first, last in bundles:
            mine = cuts[first:last]
            before = sum(x.spans for x in cuts[:first])
            ranges = {
                "chunk": (mine[0].first, mine[-1].last),
                "span": (before, before + sum(x.spans for x in mine)),
                "tensor": (first, last),
            }
            threaded = sum(prod(shape) for shape in shapes[first:last]) > SERIAL
            for name, of in PASSES.items():
                calls.append(Call(loaded[name], (header, *ranges[of]), threaded))
        self.tape = Tape(calls)

    def _bundles(
        self, shapes: Sequence[Sequence[int]]
    ) -> tuple[list[Cut], list[tuple[int, int]], list[int]]:
        """How every tensor is cut, which go through the passes together, memory for the largest."""
        cuts: list[Cut] = []
        bundles: list[tuple[int, int]] = []
        room = at = (0, 0, 0)
        size = begin = 0
        for i, shape in enumerate(shapes):
            cuts.append(cut(shape, at, cuts[-1].last if cuts else 0))
            at = cuts[-1].ends
            room = tuple(map(max, room, at))  # type: ignore[assignment]
            size += prod(shape)
            if size >= BUNDLE or i == len(shapes) - 1:
                bundles.append((begin, i + 1))
                begin, size, at = i + 1, 0, (0, 0, 0)
        return cuts, bundles, list(room)

    def step(self, grads: torch.Tensor, numbers: Sequence[float]) -> None:
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.header[POINTERS.index("grads")] = grads.data_ptr()
        self.tape.run(self.tape.words())
