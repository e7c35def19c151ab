"""Memory for large results on the CPU, which is used again once nobody holds them.

Fresh memory costs a page fault for every 4 KB, and allocators give large pieces back to the system
soon after they are freed. A training step makes its gradients and what it keeps for backward anew
each time: faults were a tenth of it.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from deuteron.ir.types import TensorType

LARGE = 1 << 18  # bytes of a result for which faults cost more than asking who holds it


class Recycled:
    """Makes tensors of one type. The memory of one that is gone, with all views of it, is kept for
    the next; never more than one piece."""

    def __init__(self, type_: TensorType) -> None:
        self.type = type_
        self.size = type_.dtype.nbytes(type_.storage_numel)
        self.idle: list[np.ndarray] = []

    def __call__(self) -> torch.Tensor:
        try:
            block = self.idle.pop()
        except IndexError:
            with torch.inference_mode(False):
                block = torch.empty(self.size, dtype=torch.uint8).numpy()
        held = block[:]  # an object that torch holds exactly as long as the tensor's memory
        weakref.finalize(held, self._back, block).atexit = False
        memory = torch.from_numpy(held).untyped_storage()
        made = torch.empty(0, dtype=self.type.dtype.torch)
        return made.set_(memory, 0, self.type.shape, self.type.strides)

    def _back(self, block: np.ndarray) -> None:
        if not self.idle:
            self.idle.append(block)
