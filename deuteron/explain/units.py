"""Numbers as people read them: three digits, a unit that fits, a dash for what is not known.

Sizes are decimal (1 MB is 10**6 bytes), as bandwidths are. Every function takes None, NaN and
infinity and answers :data:`MISSING`, so a half-filled report still prints.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

from deuteron.explain.report import RegionReport

MISSING = "–"

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZE = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B"))
_COUNT = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def known(x: float | None) -> TypeGuard[float]:
    """True for a number one can calculate with: neither None, nor NaN, nor infinite."""
    return x is not None and math.isfinite(x)


def total(values: Iterable[float | None]) -> float:
    """The sum of those values that are known."""
    return math.fsum(v for v in values if known(v))


def number(x: float | None) -> str:
    """Three significant digits, at most eight characters: 0.0123, 1.23, 123, 12345, 1.2e+08."""
    if not known(x):
        return MISSING
    if x == 0:
        return "0"
    x = float(f"{x:.3g}") if abs(x) < 1000 else float(round(x))
    if not 1e-3 <= abs(x) < 1e7:
        return f"{x:.1e}"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    return f"{x:.{min(digits, 4)}f}"


def _scaled(x: float | None, steps: tuple[tuple[float, str], ...], unit: str = "") -> str:
    if not known(x):
        return MISSING
    if x == 0:
        return f"0 {steps[-1][1]}{unit}".rstrip()
    rounded = abs(float(f"{x:.3g}"))  # 999.9 µs must not print as 1000 µs
    step, prefix = next((s for s in steps if rounded >= s[0] * (1 - 1e-9)), steps[-1])
    return f"{number(x / step)} {prefix}{unit}".rstrip()


seconds = partial(_scaled, steps=_TIME)  # 0.00123 → "1.23 ms"
flop_rate = partial(_scaled, steps=_COUNT, unit="FLOP/s")  # 7.22e14 → "722 TFLOP/s"


def size(x: float | None) -> str:
    """12900000 → "12.9 MB"; below a kilobyte the exact number."""
    return f"{x:.0f} B" if known(x) and abs(x) < 999.5 else _scaled(x, _SIZE)


def bandwidth(x: float | None) -> str:
    """4.25e12 → "4.25 TB/s"."""
    return MISSING if not known(x) else size(x) + "/s"


def per(x: float | None, unit: float) -> str:
    """``x`` in multiples of ``unit`` as a bare number, for a column with the unit in its title."""
    return number(x / unit) if known(x) else MISSING


def percent(x: float | None, unit: str = " %") -> str:
    """0.314 → "31 %"; what is small but not nothing is "<1 %", and 99.6 is not called 100."""
    if not known(x):
        return MISSING
    if 0 < x < 0.005:
        return f"<1{unit}"
    return f"99{unit}" if 0.995 <= x < 1 - 1e-9 else f"{100 * x:.0f}{unit}"


def error(x: float | None) -> str:
    """A relative error: "2.1e-04", and "0" where it is exact."""
    if not known(x):
        return MISSING
    return f"{x:.1e}" if x else "0"


def times(x: float | None) -> str:
    """1.27 → "1.27×"."""
    return f"{number(x)}×" if known(x) else MISSING


def count(n: int, noun: str, plural: str = "") -> str:
    """count(1, "region") → "1 region"; count(3, "region") → "3 regions"."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def clean(text: str) -> str:
    """One printable line: names come from models, and a log must survive what they contain."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters, the middle left out: both ends of a path say something."""
    text = clean(text)
    if len(text) <= width:
        return text
    tail = max(width - 1, 0) // 2
    return text[: max(width - 1 - tail, 0)] + "…" + (text[-tail:] if tail else "")


def mask(reason: str) -> str:
    """A reason without shapes and value names, so that equal causes are counted together."""
    return re.sub(r"%\S+", "%…", re.sub(r"\[[\d, ]+\]", "[…]", clean(reason)))


def listed(words: Sequence[str]) -> str:
    """["a", "b", "c"] → "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def few(words: Sequence[str], most: int) -> list[str]:
    """At most ``most`` of the words, and an ellipsis if there are more."""
    return [*words[:most], *(["…"] if len(words) > most else [])]


def wrap(text: str, width: int, first: str = "") -> list[str]:
    """Lines of at most ``width``; the first begins with ``first``, the others are indented by as
    much."""
    text = clean(text)
    filler = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )
    return filler.wrap(text)


def align(rows: Sequence[Sequence[str]], how: str, width: int) -> list[str]:
    """Lay rows out in columns, each aligned to the left ("<") or right (">"); long lines are
    cut."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    laid = (zip(row, how, widths, strict=True) for row in rows)
    lines = ("  ".join(f"{cell:{a}{w}}" for cell, a, w in cells).rstrip() for cells in laid)
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


# ---- the figures of a region ----------------------------------------------------------------

BOUNDS = {"memory": "memory traffic", "compute": "arithmetic", "free": "nothing"}
BOUNDS |= {"launch": "the cost of launching kernels", "links": "talking to other ranks"}


def operators(region: RegionReport, width: int = 48) -> str:
    """The operators joined by '+'; if they do not fit, shortened, with their number."""
    joined = clean("+".join(region.ops)) or MISSING
    if len(joined) <= width:
        return joined
    tail = f" ({len(region.ops)} operators)"
    return shorten(joined, width - len(tail)) + tail


def engine(region: RegionReport) -> str:
    """The engine, and the recipe where it has several: "vendor_fused/cudnn"."""
    recipe = re.search(r"\brecipe=([^,\]]+)", region.candidate)
    return clean(region.engine + (f"/{recipe[1]}" if recipe else "")) or MISSING


class Column(NamedTuple):
    """A figure of a region. An optional column is left out when no region has it."""

    title: str
    hint: str
    show: Callable[[RegionReport], str]
    optional: bool = False


COLUMNS = (
    Column("GFLOP", "billions of operations", lambda r: per(r.flops, 1e9)),
    Column("MB", "bytes read and written, in millions", lambda r: per(r.bytes, 1e6)),
    Column("FLOP/B", "intensity: operations per byte", lambda r: number(r.intensity)),
    Column("bound", "what limits it on this target", lambda r: shorten(r.bound, 7) or MISSING),
    Column("roof µs", "least time the target allows", lambda r: per(r.roofline_s, 1e-6)),
    Column("pred. µs", "time the engine should take", lambda r: per(r.predicted_s, 1e-6)),
    Column("meas. µs", "time it took, run alone", lambda r: per(r.measured_s, 1e-6), True),
    Column("% roof", "part of the roofline reached", lambda r: percent(r.fraction, "")),
    Column(
        "error", "against float64, relative to the largest value", lambda r: error(r.error), True
    ),
    Column("torch", "PyTorch's own error", lambda r: error(r.torch_error), True),
)
