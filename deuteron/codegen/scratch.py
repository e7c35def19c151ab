"""Memory that a kernel needs only while it runs, kept for the next call on the same thread.

Fresh memory costs a page fault per 4 KB, more than many kernels take. Each Python thread has its
own blocks, so that two of them may run one kernel at once.
"""

from __future__ import annotations

import threading

import torch

_mine = threading.local()


def scratch(floats: int, name: str = "") -> torch.Tensor:
    """At least so many floats, with anything in them; valid until this thread asks for the same
    ``name`` again."""
    blocks: dict[str, torch.Tensor] = _mine.__dict__.setdefault("blocks", {})
    block = blocks.get(name)
    if block is None or block.numel() < floats:
        with torch.inference_mode(False):
            block = blocks[name] = torch.empty(floats)
    return block
