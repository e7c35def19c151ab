"""Which rows of x the taps of a column of a window share, in ``conv_hopper.py``.

Where windows lie ``sh`` rows apart, these are the taps whose rows are of one phase. A window has
``kh`` taps, ``dh`` rows apart, and ``ph`` rows of zeros before x.
"""

import math

from triton.experimental import gluon


@gluon.constexpr_function
def phase(kh, dh, ph, sh, p):  # type: ignore[no-untyped-def]
    """Return the taps of a column whose rows are of phase p: for each its number, and the row that
    it begins at, counted from the tile's first row in x in steps of sh rows."""
    rows = [(r, r * dh + ph * (sh - 1)) for r in range(kh)]  # counted from sh · ph before x
    return [(r, row // sh - ph) for r, row in rows if row % sh == p]


@gluon.constexpr_function
def count_of(kh, dh, ph, sh, p):  # type: ignore[no-untyped-def]
    return len(phase(kh, dh, ph, sh, p))


@gluon.constexpr_function
def tap_of(kh, dh, ph, sh, p, n):  # type: ignore[no-untyped-def]
    """The n-th tap of a phase."""
    return phase(kh, dh, ph, sh, p)[n][0]


@gluon.constexpr_function
def row_of(kh, dh, ph, sh, p, n):  # type: ignore[no-untyped-def]
    """The row at which the n-th tap of a phase begins."""
    return phase(kh, dh, ph, sh, p)[n][1]


@gluon.constexpr_function
def span_of(kh, dh, ph, sh, p):  # type: ignore[no-untyped-def]
    """Return how many rows a tile needs beyond its own for the taps of a phase."""
    rows = [row for _, row in phase(kh, dh, ph, sh, p)]
    return max(rows) - min(rows) if rows else 0


@gluon.constexpr_function
def rows_of(kh, dh, ph, sh, p, high):  # type: ignore[no-untyped-def]
    """Return how many rows are loaded for a tile and the taps of a phase."""
    return high + span_of(kh, dh, ph, sh, p)


@gluon.constexpr_function
def phases_of(kh, dh, ph, sh):  # type: ignore[no-untyped-def]
    """How many phases have taps."""
    return sum(len(phase(kh, dh, ph, sh, p)) > 0 for p in range(sh))


@gluon.constexpr_function
def most_below(kh, dh, ph, sh, halo):  # type: ignore[no-untyped-def]
    return max(span_of(kh, dh, ph, sh, p) for p in range(sh)) if halo else 0


@gluon.constexpr_function
def chunk_of(kh, dh, ph, sh, high):  # type: ignore[no-untyped-def]
    """Return how many rows one copy loads: it divides the rows of a tile, and those needed
    beyond."""
    return math.gcd(high, *(span_of(kh, dh, ph, sh, p) for p in range(sh)))
