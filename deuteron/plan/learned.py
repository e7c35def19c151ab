"""What a search learns about its own estimates: by how much those of a kind have been off."""

import statistics
from dataclasses import dataclass, field

from deuteron.ir.region import Region
from deuteron.plan.choose import Option

LEAST = 3  # from this many measurements of a kind on, its estimates are corrected

Kind = tuple[object, ...]  # from the coarse to the fine


@dataclass
class Learned:
    """Ratios of measured to predicted time, by kind of candidate: by the engine alone, by engine
    and recipe, and by these with what is computed."""

    ratios: dict[Kind, list[float]] = field(default_factory=dict)

    def add(self, region: Region, option: Option) -> None:
        """Keep by how much the prediction was off, if the option was measured."""
        if option.measured_s and option.predicted_s:
            ratio, kind = option.measured_s / option.predicted_s, kind_of(region, option)
            for known in {kind, kind[:2], kind[:1]}:
                self.ratios.setdefault(known, []).append(ratio)

    def of(self, region: Region, option: Option, alike: bool = False) -> list[float]:
        """Return the ratios of its kind, if enough were measured to rely on. With ``alike``, if
        they were not, those of its recipe or engine, or else the few that there are, which say more
        than nothing."""
        kind = kind_of(region, option)
        kinds = (kind, kind[:2], kind[:1]) if alike else (kind,)
        known = [self.ratios.get(k, []) for k in kinds]
        enough = [ratios for ratios in known if len(ratios) >= LEAST]
        return next(iter(enough or [r for r in known if alike and r]), [])

    def expected(self, region: Region, option: Option, alike: bool = False) -> float:
        """The prediction, times the median of those ratios."""
        return option.predicted_s * statistics.median(self.of(region, option, alike) or [1.0])

    def told(self, region: Region, option: Option) -> str:
        """Say in words how the estimate of an option that was not measured was corrected."""
        seen = self.of(region, option, alike=True)
        if not seen:
            return ""
        factor = f"{statistics.median(seen):.2g}"
        return f"; its estimate is taken {factor} times, as {len(seen)} of its kind took that"


def kind_of(region: Region, option: Option) -> Kind:
    """The kind of an option. Predictions of one kind tend to be off alike: it is the engine, its
    recipe, and what is computed. Convolutions with groups are a kind of their own: each group has
    only a few channels, and runs at another speed."""
    groups = {node.attrs["groups"] > 1 for node in region.nodes if node.op == "conv"}
    what = region.nodes[region.anchor].op if region.anchor is not None else ""
    return option.candidate.engine, option.candidate.knobs.get("recipe"), what, *groups
