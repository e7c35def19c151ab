"""Errors that teach: what was asked, what is wrong, where, and the smallest change that works."""

from __future__ import annotations


class DeuteronError(Exception):
    """Base of every error Deuteron raises on purpose.

    The four parts are kept as attributes so that tools can show them apart:
    ``asked`` (what was requested), ``wrong`` (what is the matter), ``where`` (node, input,
    file or line) and ``remedy`` (the smallest change that works).
    """

    def __init__(self, wrong: str, *, asked: str = "", where: str = "", remedy: str = "") -> None:
        # We do not call Exception.__init__: torch.compile cannot trace it, and Python puts `wrong`
        # into args without it. So torch.compile can name an error that it meets, and its text.
        self.wrong, self.asked, self.where, self.remedy = wrong, asked, where, remedy

    def __str__(self) -> str:
        lines = [self.wrong]
        for label, text in (("asked", self.asked), ("where", self.where), ("remedy", self.remedy)):
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)

    def at(self, where: str) -> DeuteronError:
        """Return this error with ``where`` filled in, unless code closer to the fault did that."""
        self.where = self.where or where
        return self


class GraphError(DeuteronError, ValueError):
    """A graph, node, type or attribute is not valid."""


class BindError(DeuteronError, TypeError):
    """A tensor handed to a plan does not fit the input it is bound to."""


class EngineError(DeuteronError, RuntimeError):
    """An engine cannot run what it was asked to run, or broke its contract."""


class FileError(DeuteronError, ValueError):
    """A plan, cache or model file cannot be used."""
