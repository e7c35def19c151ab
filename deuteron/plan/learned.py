"""What a search learns about its own estimates: by how much those of a kind have been off."""

import statistics
from dataclasses import dataclass, field

from deuteron.ir.region import Region
from deuteron.plan.choose import Option

LEAST = 3  # measurements of a kind from which estimates of it are put right

Kind = tuple[object, ...]  # from the coarse to the fine


@dataclass
class Learned:
    """Measured over predicted time, by kind of candidate: the engine alone, with its recipe, and
    with what is computed."""

    ratios: dict[Kind, list[float]] = field(default_factory=dict)

    def add(self, region: Region, option: Option) -> None:
        """Keep by how much the prediction was off, if the option was measured."""
        if option.measured_s and option.predicted_s:
            ratio, kind = option.measured_s / option.predicted_s, kind_of(region, option)
            for known in {kind, kind[:2], kind[:1]}:
                self.ratios.setdefault(known, []).append(ratio)

    def of(self, region: Region, option: Option, alike: bool = False) -> list[float]:
        """The ratios of its kind, where enough was measured to go by them. With ``alike`` else
        those of its recipe or engine, or the few that there are, which say more than nothing."""
        kind = kind_of(region, option)
        kinds = (kind, kind[:2], kind[:1]) if alike else (kind,)
        known = [self.ratios.get(k, []) for k in kinds]
        enough = [ratios for ratios in known if len(ratios) >= LEAST]
        return next(iter(enough or [r for r in known if alike and r]), [])

    def expected(self, region: Region, option: Option, alike: bool = False) -> float:
        """The prediction, times the median of those ratios."""
        return option.predicted_s * statistics.median(self.of(region, option, alike) or [1.0])

    def told(self, region: Region, option: Option) -> str:
        """What was done with the estimate of an option that was not measured, in words."""
        seen = self.of(region, option, alike=True)
        if not seen:
            return ""
        factor = f"{statistics.median(seen):.2g}"
        return f"; its estimate is taken {factor} times, as {len(seen)} of its kind took that"


def kind_of(region: Region, option: Option) -> Kind:
    """What makes predictions alike: the engine, which of its recipes, and what is computed; each
    group of a convolution has a few channels only, and runs at another speed."""
    groups = {node.attrs["groups"] > 1 for node in region.nodes if node.op == "conv"}
    what = region.nodes[region.anchor].op if region.anchor is not None else ""
    return option.candidate.engine, option.candidate.knobs.get("recipe"), what, *groups
