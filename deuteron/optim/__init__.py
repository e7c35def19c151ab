"""Optimisers over all tensors at once.

>>> opt = dt.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)   # in place of torch.optim's

SGD, Adam, AdamW and Adafactor take the arguments of torch.optim and read and write its state dicts;
Lion, LAMB and AdamW8bit are made in the same style.
Clipping, unscaling, decay and an average of the parameters happen in the same pass over memory
(:class:`Ours`); ``.grad`` is read, never written. On a GPU a step is one Triton launch per group
and combination of element types (LAMB three, Adafactor four or seven). On the CPU it is
code generated through LLVM; torch's operators where llvmlite is not installed.
"""

from deuteron.optim.base import Ours
from deuteron.optim.optimisers import LAMB, SGD, Adafactor, Adam, AdamW, AdamW8bit, Lion

__all__ = ["LAMB", "SGD", "Adafactor", "Adam", "AdamW", "AdamW8bit", "Lion", "Ours"]
