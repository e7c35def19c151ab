"""Optimisers that update all tensors at once.

>>> opt = dt.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)   # in place of torch.optim's

SGD, Adam, AdamW and Adafactor take the arguments of torch.optim and read and write its state dicts;
Lion, LAMB and AdamW8bit are made in the same style.
Clipping, unscaling, weight decay and a moving average of the parameters happen in the pass over
memory that updates (:class:`Ours`); ``.grad`` is read, never written. On a GPU a step is one Triton
launch per group and combination of element types (LAMB: three, Adafactor: four or seven). On the
CPU it is code generated through LLVM or, where llvmlite is not installed, torch's operators.
"""

from deuteron.optim.base import Ours
from deuteron.optim.optimisers import LAMB, SGD, Adafactor, Adam, AdamW, AdamW8bit, Lion

__all__ = ["LAMB", "SGD", "Adafactor", "Adam", "AdamW", "AdamW8bit", "Lion", "Ours"]
