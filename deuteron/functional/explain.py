"""What a call ran, for ``dt.functional.explain``: plans of ours, and calls handed on to torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Recording:
    """Collects what runs in its thread while ``explain`` records: plans, and calls torch
    answered."""

    active = 0  # read in every call: thread-local memory would take ten times as long
    _thread = threading.local()

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def __enter__(self) -> list[Any]:
        Recording.active += 1
        self.before = getattr(Recording._thread, "parts", None)
        Recording._thread.parts = self.parts
        return self.parts

    def __exit__(self, *error: object) -> None:
        Recording._thread.parts = self.before
        Recording.active -= 1

    @staticmethod
    def add(part: Any) -> None:
        """Note that ``part`` ran, which has a method ``explain()``."""
        parts = getattr(Recording._thread, "parts", None)
        if parts is not None:
            parts.append(part)


@dataclass(frozen=True)
class RanInstead:
    """What ran instead of a plan, in words."""

    what: str

    def explain(self) -> str:
        return self.what


def handed_on(call: str, why: str) -> RanInstead:
    """The record of a call that torch's own function answered."""
    forbid = "  forbid it: with dt.functional.delegation(False): …"
    return RanInstead(f"{call}: torch's own function, not a plan of ours\n  why: {why}\n{forbid}")


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Say what ``function(*args, **kwargs)`` runs, where and why, as text. It makes the call once,
    forward only.

    >>> print(dt.functional.explain(dt.functional.rms_norm, x, (4096,), w))
    """
    with Recording() as parts:
        function(*args, **kwargs)
    return "\n".join(str(part.explain()) for part in parts)
