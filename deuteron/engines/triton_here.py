"""What every kernel in Triton needs of the machine."""

from __future__ import annotations

from deuteron.engines.base import Refusal
from deuteron.target import Target, has_triton


def refuse_anywhere(target: Target) -> Refusal | None:
    """Why nothing in Triton can run there, if so."""
    if not target.is_cuda:
        return Refusal("Triton runs on a GPU", "plan for a CUDA device", quiet=True)
    if not has_triton():
        return Refusal("Triton is not installed", "pip install triton")
    return None
