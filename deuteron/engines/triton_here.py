"""What every kernel in Triton needs of the machine."""

from __future__ import annotations

import importlib.util

from deuteron.engines.base import Refusal
from deuteron.target import Target


def refuse_anywhere(target: Target) -> Refusal | None:
    """Why nothing in Triton can run there, if so."""
    if not target.is_cuda:
        return Refusal("Triton runs on a GPU", "plan for a CUDA device")
    if importlib.util.find_spec("triton") is None:
        return Refusal("Triton is not installed", "pip install triton")
    return None
