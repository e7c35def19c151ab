"""Where the seconds of a search went, for users who wait for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

BUILDERS, LIBRARIES, MEASURING = "waiting for builders", "setting up libraries", "measuring"
DECIDING = "deciding"  # all that is none of these: passes, what engines offer, choices


class SearchClock:
    """A clock for each of these kinds of work; only one of them runs at a time."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((BUILDERS, LIBRARIES, MEASURING), 0.0)
        self._within: list[str] = []  # the kinds of work that are nested now; the last one counts
        self._since = 0.0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Inside this context time counts for ``what``, and not for the work around it."""
        self._turn()
        self._within.append(what)
        try:
            yield
        finally:
            self._turn()
            self._within.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now

    def told(self, whole: float) -> str:
        """The ``whole`` seconds of a search, by what they were spent on."""
        parts = {DECIDING: whole - sum(self.seconds.values()), **self.seconds}
        said = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in parts.items())
        return f"the search took {whole:.1f} s: {said}"
