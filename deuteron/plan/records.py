"""A region's measurements as rows of the cache: how they are written, and read back later."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deuteron.engines import BUILT_IN, Candidate
from deuteron.files import source_digest
from deuteron.plan.cache import knobs_key, plain_knobs
from deuteron.plan.choose import PATIENCE_S, Option


class Measured(NamedTuple):
    """A region's options with what was measured, torch's own error, and the name of the reference
    that errors were measured against."""

    options: list[Option]
    torch_error: float | None
    reference: str


def rows_of(found: Measured, but: Collection[str]) -> list[dict[str, Any]]:
    """Return a row for each candidate with its measurements, except those that were rejected for a
    reason in ``but``: they are to be tried again."""
    return [
        {
            "engine": o.candidate.engine,
            "version": _measured_version(o.candidate),
            "knobs": plain_knobs(o.candidate.knobs),
            "seconds": o.measured_s,
            "error": o.error if o.error is None or math.isfinite(o.error) else None,
            "rejected": o.rejected,
            "workspace": o.workspace,
            "torch_error": found.torch_error,
            "reference": found.reference,
        }
        for o in found.options
        if o.rejected not in but
    ]


def measured_in(rows: Sequence[Mapping[str, Any]], options: Sequence[Option]) -> Measured | None:
    """Return earlier measurements, if they cover the candidates that the engines offer now."""
    by_candidate = {(r["engine"], r["version"], knobs_key(r["knobs"])): r for r in rows}
    found, torch_error, reference = [], None, ""
    for option in options:
        c = option.candidate
        row = by_candidate.get((c.engine, _measured_version(c), knobs_key(c.knobs)))
        if row is None:
            if c.build_s > PATIENCE_S or option.rejected:
                continue  # was too slow to build then, and is not worth measuring again
            return None
        torch_error, reference = row["torch_error"], row["reference"]
        seconds, error, rejected = row["seconds"], row["error"], row["rejected"]
        option = replace(option, workspace=row.get("workspace", 0))
        found.append(replace(option, measured_s=seconds, error=error, rejected=rejected))
    return Measured(found, torch_error, reference) if found else None


def _measured_version(candidate: Candidate) -> str:
    """The version that a measurement is valid for: that of the engine and, if the engine is ours,
    of all our source. A kernel that was too slow or wrong and was then mended has to be measured
    again."""
    if any(candidate.engine == ours.name for ours in BUILT_IN):
        return f"{candidate.version} of {source_digest()[:12]}"
    return candidate.version
