"""Memory for large results on the CPU, which is used again once nobody holds them.

Fresh memory costs a page fault for every 4 KB, and allocators give large pieces back to the system
soon after they are freed. A training step allocates its gradients and what it keeps for backward
anew each time: page faults took a tenth of its time.
"""

from __future__ import annotations

from sys import getrefcount

import torch

from deuteron.ir.types import TensorType

LARGE = 1 << 18  # from this many bytes on, page faults cost more than checking who holds a result
PIECES = 2  # kept at most: a caller who still holds the last result needs two in turns


class Piece:
    """A tensor that shares its memory with results."""

    def __init__(self, type_: TensorType) -> None:
        with torch.inference_mode(False):
            kind = type_.dtype.torch
            self.tensor = torch.empty_strided(type_.shape, type_.strides, dtype=kind)
        self.storage = self.tensor.untyped_storage()
        self.alone = self._holders()

    def _holders(self) -> tuple[int, int, int]:
        """How many tensors and arrays hold the memory, how many references there are to the one
        Python object of the storage, and the address of the memory: a storage can be resized, or
        moved to shared memory, which other processes may hold."""
        tensors = torch._C._storage_Use_Count(self.storage._cdata)
        return tensors, getrefcount(self.storage), self.tensor.data_ptr()

    @property
    def is_idle(self) -> bool:
        """Whether nobody else holds the memory."""
        return self._holders() == self.alone


class Recycled:
    """Makes tensors of one type, in the memory of an earlier one if that is gone, with all views of
    it."""

    def __init__(self, type_: TensorType) -> None:
        self.type = type_
        self.pieces: list[Piece] = []

    def __call__(self) -> torch.Tensor:
        pieces, self.pieces = self.pieces, []  # so that two threads do not see the same pieces
        found = next((piece for piece in pieces if piece.is_idle), None) or Piece(self.type)
        made = found.tensor.detach()
        self.pieces = [found, *(piece for piece in pieces if piece is not found)][:PIECES]
        return made
