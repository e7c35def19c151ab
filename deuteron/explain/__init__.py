"""Plans that say why: a :class:`Report` is the data, an :class:`Explanation` shows it.

``report.py`` holds the figures, ``text.py`` and ``html.py`` show them, ``units.py`` writes the
numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deuteron.errors import DeuteronError
from deuteron.explain.html import render_fragment, render_page
from deuteron.explain.report import Report
from deuteron.explain.text import render_text

FORMATS: dict[str, Callable[[Report, int | None], str]] = {
    "text": render_text,
    "json": lambda report, limit: report.to_json(),  # data is never cut
    "html": render_page,
}


def render(report: Report, format: str = "text", limit: int | None = None) -> str:
    """A report as "text", "json" or "html" (a page that needs nothing else).

    ``limit`` is how many rows of regions to show at most, the most expensive; without it text
    shortens long plans, and HTML shows everything. JSON always holds all of it.
    """
    if format not in FORMATS:
        wrong = f"an explanation has no format {format!r}"
        remedy = f"use one of {', '.join(map(repr, FORMATS))}"
        raise DeuteronError(wrong, asked=f"explain(format={format!r})", remedy=remedy)
    return FORMATS[format](report, limit)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What ``plan.explain()`` returns: prints as text, shows itself in a notebook.

    >>> e = plan.explain()
    >>> print(e)                               # the text form
    >>> print(e.to_text(limit=10))             # only the ten most expensive rows
    >>> Path("plan.html").write_text(e.to_html())
    >>> e.report.regions[0].measured_s         # the data itself, in seconds and bytes
    """

    report: Report

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render_fragment(self.report)

    def render(self, format: str = "text", limit: int | None = None) -> str:
        """The explanation as "text", "json" or "html"; see :func:`deuteron.explain.render`."""
        return render(self.report, format, limit)

    def to_text(self, limit: int | None = None) -> str:
        """For a terminal or a log, at most 110 columns; ``limit`` rows of regions."""
        return render(self.report, "text", limit)

    def to_json(self) -> str:
        """Everything as strict JSON: seconds, bytes, and null for what is not known."""
        return render(self.report, "json")

    def to_html(self, limit: int | None = None) -> str:
        """A page of its own, with a roofline chart; it loads nothing from elsewhere."""
        return render(self.report, "html", limit)


__all__ = ["FORMATS", "Explanation", "Report", "render"]
