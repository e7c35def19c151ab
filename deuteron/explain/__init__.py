"""Plans that say why: a :class:`Report` is the data, an :class:`Explanation` shows it.

``report.py`` holds the figures, ``digest.py`` sorts and adds up, ``text.py`` and ``html.py`` lay
it out, ``units.py`` writes the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deuteron.errors import DeuteronError
from deuteron.explain.html import render_fragment, render_page
from deuteron.explain.report import Report
from deuteron.explain.text import render_text

FORMATS: dict[str, Callable[[Report, int | None, bool], str]] = {
    "text": render_text,
    "json": lambda report, limit, full: report.to_json(),  # data is never cut
    "html": lambda report, limit, full: render_page(report, limit),  # which folds the details away
}


def check_format(format: str) -> None:
    """Raise an error if ``format`` is not one of :data:`FORMATS`."""
    if format not in FORMATS:
        wrong = f"an explanation has no format {format!r}"
        remedy = f"use one of {', '.join(map(repr, FORMATS))}"
        raise DeuteronError(wrong, asked=f"explain(format={format!r})", remedy=remedy)


def render(
    report: Report, format: str = "text", limit: int | None = None, full: bool = False
) -> str:
    """A report as "text", "json" or "html" (a page that needs nothing else).

    Text is about 25 lines at the terminal's width; with ``full`` it is everything. ``limit`` is how
    many rows of regions to show at most; those shown are the most expensive. HTML and JSON hold all
    of it.
    """
    check_format(format)
    return FORMATS[format](report, limit, full)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What ``plan.explain()`` returns: prints as text, shows itself in a notebook.

    >>> e = plan.explain()
    >>> print(e)                               # about 25 lines; plan.explain(full=True) has all
    >>> print(e.to_text(limit=10))             # the ten most expensive kinds of region
    >>> Path("plan.html").write_text(e.to_html())
    >>> e.report.regions[0].measured_s         # the data itself, in seconds and bytes
    """

    report: Report
    full: bool = False

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render_fragment(self.report)

    def render(self, format: str = "text", limit: int | None = None) -> str:
        """The explanation as "text", "json" or "html"; see :func:`deuteron.explain.render`."""
        return render(self.report, format, limit, self.full)

    def to_text(self, limit: int | None = None, width: int | None = None) -> str:
        """For a terminal or a log: at most ``limit`` rows of regions, in ``width`` columns."""
        return render_text(self.report, limit, self.full, width)

    def to_json(self) -> str:
        """Everything as strict JSON: seconds, bytes, and null for what is not known."""
        return render(self.report, "json")

    def to_html(self, limit: int | None = None) -> str:
        """A page of its own, with a roofline chart; it loads nothing from elsewhere."""
        return render(self.report, "html", limit)


__all__ = ["FORMATS", "Explanation", "Report", "check_format", "render"]
