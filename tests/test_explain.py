"""Explanations: the figures are the right ones, and they survive whatever a report contains."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deuteron.errors import DeuteronError
from deuteron.explain import Explanation, digest, render, text, units
from deuteron.explain.report import (
    MemoryReport,
    OptionReport,
    OrderReport,
    RefusalReport,
    RegionReport,
    Report,
    VetoReport,
)
from deuteron.passes import PassRecord

NAN = math.nan
HOSTILE = "<script>alert('x')</script>\"&\x1b[31m\n\u202e"


def region(name: str = "r0", **changes: Any) -> RegionReport:
    """Two GFLOP over 4 MB, 10 µs at best, predicted 16 and measured 20."""
    plain = RegionReport(
        name,
        ("conv", "relu"),
        f"net.{name}",
        "f16[32,64,56,56]@nhwc",
        "vendor_fused",
        "vendor_fused[recipe=cudnn, benchmark=True]",
        flops=2e9,
        bytes=4_000_000,
        bound="compute",
        roofline_s=10e-6,
        predicted_s=16e-6,
        measured_s=20e-6,
    )
    return replace(plain, **changes)


def report(*regions: RegionReport, **changes: Any) -> Report:
    plain = Report(
        "net",
        "h200",
        "cuda:0",
        "found",
        "yes",
        regions,
        vetoes=(),
        passes=(),
        memory=MemoryReport(0, 0, 0, 0),
        nodes_before=9,
        nodes_after=4,
        plan_s=0.25,
    )
    return replace(plain, **changes)


def illustration() -> Report:
    """The hand-made report in docs/reading-an-explanation.md. No run stands behind it."""

    def timed(work: tuple[float, int, str], *figures: float, **rest: Any) -> RegionReport:
        roof, predicted, measured, error, torch_error = figures
        return region(
            flops=work[0],
            bytes=work[1],
            bound=work[2],
            roofline_s=roof,
            predicted_s=predicted,
            measured_s=measured,
            error=error,
            torch_error=torch_error,
            reference="float64",
            **rest,
        )

    triton = RefusalReport("inductor", "Triton is not installed", "pip install triton")
    gelu = RefusalReport("vendor_fused", "cudnn: cuDNN's fused call ends in ReLU, not in gelu")
    rough = "its error 3.1e-02 is more than twice PyTorch's own"
    by_torch = {"engine": "torch", "candidate": "torch"}
    small = (3.288e9, 64_257_000, "memory")
    squeeze = timed(small, 17.3e-6, 23.1e-6, 22.4e-6, 3.1e-4, 3.2e-4, refusals=(triton,))
    spatial = timed(
        (7.399e9, 25_764_000, "compute"),
        12.4e-6,
        20.0e-6,
        27.9e-6,
        4.0e-4,
        4.4e-4,
        refusals=(triton,),
        options=(
            OptionReport("vendor_fused[recipe=cudnn, benchmark=True]", 20.0e-6, 27.9e-6, 4.0e-4),
            OptionReport("torch", 31.7e-6, 50.8e-6, 4.4e-4),
            OptionReport("triton_conv[block=128x64, stages=4]", 19.2e-6, 24.9e-6, 3.1e-2, rough),
        ),
    )
    widen = timed(
        (3.314e9, 115_639_000, "memory"),
        29.4e-6,
        39.2e-6,
        37.6e-6,
        3.3e-4,
        5.0e-4,
        refusals=(triton,),
        ops=("conv", "add", "relu"),
        shape="f16[32,256,56,56]@nhwc",
        options=(OptionReport("torch", 66.0e-6, 92.3e-6, 5.0e-4),),
    )
    head = timed(
        (2.57e7, 51_400_000, "memory"),
        14.3e-6,
        24.2e-6,
        21.8e-6,
        2.4e-4,
        2.4e-4,
        name="r6",
        ops=("mean",),
        shape="f16[32,256]",
        source="pool",
        **by_torch,
        refusals=(triton, RefusalReport("vendor_fused", "is not a product")),
    )
    last = timed(
        (1.64e7, 592_000, "launch"),
        2.3e-6,
        6.6e-6,
        7.1e-6,
        4.9e-4,
        4.9e-4,
        name="r7",
        ops=("linear", "gelu"),
        shape="f16[32,1000]",
        source="fc",
        **by_torch,
        refusals=(triton, gelu),
    )
    layers = [(squeeze, "conv1"), (spatial, "conv2"), (widen, "conv3")] * 2
    body = [
        replace(r, name=f"r{i}", source=f"layer1.{i // 3}.{layer}")
        for i, (r, layer) in enumerate(layers)
    ]
    product = "a product starts a region of its own: its operands must be in memory"
    between = (
        VetoReport(
            f"relu_{i}",
            f"relu (layer1.{i // 3}.relu{i % 3 + 1})",
            f"conv (layer1.{(i + 1) // 3}.conv{(i + 1) % 3 + 1})",
            product,
            n,
            n / 4.25e12,
        )
        for i, n in enumerate((25_690_000, 25_690_000, 102_760_000, 25_690_000, 25_690_000))
    )
    shared, wide = "%relu_2 is read by conv as well, so it is written anyway", 102_760_000
    rows = "a reduction after a product needs whole rows, the product makes tiles"
    return report(
        *body,
        head,
        last,
        name="resnet_stage",
        vetoes=(
            *between,
            VetoReport("relu_2", "relu (layer1.0.relu3)", "add (layer1.1)", shared, wide, 24.2e-6),
            VetoReport("relu_5", "relu (layer1.1.relu3)", "mean (pool)", rows, wide, 24.1e-6),
        ),
        passes=(
            PassRecord("dead code", {}, 26, 26, 0.0002),
            PassRecord("fold batch norm", {"conv+batch_norm": 6}, 26, 20, 0.0051),
            PassRecord("layout", {"conv to nhwc": 6, "conversion at the edge": 1}, 20, 21, 0.0012),
            PassRecord("common subexpressions", {}, 21, 21, 0.0003),
        ),
        memory=MemoryReport(1_050_000, 154_140_000, 51_380_000, 411_040_000),
        nodes_before=26,
        nodes_after=21,
        plan_s=1.31,
        total_measured_s=189e-6,
        eager_s=433e-6,
        eager="both as CUDA Graphs",
        inputs=("x f16[32,64,56,56]",),
        machine="NVIDIA H200",
        orders=(OrderReport("x", "nhwc", "convolutions read channels side by side", 12_845_056),),
        versions={"deuteron": "0.1.0", "torch": "2.11.0", "cuda": "13.0"},
    )


def broken() -> Report:
    """Nothing in it is known."""
    r = region(
        flops=NAN,
        roofline_s=NAN,
        predicted_s=NAN,
        measured_s=None,
        bound="",
        shape="",
        options=(OptionReport("a", NAN), OptionReport("b", NAN, NAN, NAN)),
        refusals=(RefusalReport("", ""),),
    )
    infinite = region("r1", predicted_s=math.inf, measured_s=math.inf, error=NAN, torch_error=NAN)
    vetoes = (VetoReport("v", "", "", "", 0, NAN),)
    return report(
        r,
        infinite,
        name="",
        target="",
        device="",
        mode="",
        cuda_graph="",
        vetoes=vetoes,
        passes=(PassRecord("", {}, 0, 0, NAN),),
        plan_s=NAN,
        total_measured_s=NAN,
    )


def hostile() -> Report:
    """Every piece of text tries to escape."""
    r = region(
        HOSTILE * 9,
        ops=(HOSTILE,) * 40,
        source=HOSTILE,
        shape=HOSTILE,
        engine=HOSTILE,
        candidate=HOSTILE,
        bound=HOSTILE,
        reference=HOSTILE,
        note=HOSTILE,
        options=(OptionReport(HOSTILE * 9, 1.0, rejected=HOSTILE),),
        refusals=(RefusalReport(HOSTILE, HOSTILE * 9, HOSTILE),),
    )
    return report(
        r,
        name=HOSTILE * 9,
        target=HOSTILE,
        device=HOSTILE,
        mode=HOSTILE,
        cuda_graph=HOSTILE,
        vetoes=(VetoReport(HOSTILE, HOSTILE * 9, HOSTILE, HOSTILE, 1, 1e-6),),
        passes=(PassRecord(HOSTILE, {HOSTILE * 9: 1}, 1, 2, 0.1),),
        versions={HOSTILE: HOSTILE},
        inputs=(HOSTILE,) * 9,
        machine=HOSTILE,
        eager=HOSTILE,
        orders=(OrderReport(HOSTILE * 9, HOSTILE, HOSTILE, 1),),
        notes=(HOSTILE * 9,),
    )


def many(n: int = 200) -> Report:
    """Regions that take 1, 2, … n µs: none looks like another."""
    return report(*(region(f"r{i}", measured_s=(i + 1) * 1e-6) for i in range(n)))


def short(given: Report, width: int = 100) -> str:
    return text.render_text(given, width=width)


def whole(given: Report, limit: int | None = None, width: int = 110) -> str:
    return text.render_text(given, limit, full=True, width=width)


REPORTS: dict[str, Callable[[], Report]] = {
    "empty": report,
    "one": lambda: report(region()),
    "illustration": illustration,
    "many": many,
    "broken": broken,
    "hostile": hostile,
}
every = pytest.mark.parametrize("made", REPORTS.values(), ids=REPORTS)


class Page(HTMLParser):
    """A strict reader: every tag is closed by its own, and is one that we write."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(source)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") or name in ("href", "src") for name, _ in attrs)
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@every
def test_text_fits_a_terminal(made: Callable[[], Report], monkeypatch) -> None:
    for columns in (80, 110):
        monkeypatch.setenv("COLUMNS", str(columns))
        for out in (render(made()), render(made(), full=True)):
            assert max(map(len, out.splitlines())) <= columns
            assert all(c == "\n" or c.isprintable() for c in out)
            assert "nan" not in out and "inf " not in out


def test_the_short_form_is_short(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for made in (illustration, many):
        lines = render(made()).splitlines()
        assert len(lines) <= 30
        assert lines[-1].startswith("full=True")
    out = short(illustration())
    for part in (
        "input       x f16[32,64,56,56]",
        "machine     h200 (cuda:0): NVIDIA H200",
        "versions    deuteron 0.1.0, torch 2.11.0",
        "time        189 µs a run, eager PyTorch 433 µs: 2.29× as fast (both as CUDA Graphs)",
        "75.2 µs    37 %  conv+add+relu  ×2  vendor_fused/cudnn  memory 78 %",
        "7 values did not fuse (96.7 µs at most); the costliest with a remedy:",
        "remedy: let one operator read it",
        "inductor refused 8 regions: Triton is not installed; remedy: pip install triton",
    ):
        assert part in out, part
    assert "is not a product" not in out and "cuDNN's fused call" not in out  # nobody's business
    assert "a product starts a region" not in out  # nothing can be done about that
    assert "5 costliest of" not in out and "5 costliest of 8 kinds" in short(
        report(*(region(ops=(f"op{i}",)) for i in range(8)))
    )


def test_kinds_add_up_what_runs_alike() -> None:
    given = [region(f"r{i}", shape=f"f16[{i}]") for i in range(3)]
    other = region("r3", measured_s=10e-6, engine="torch", candidate="torch")
    first, second = digest.kinds(report(*given, other))
    assert (len(first.regions), first.seconds, first.reached) == (3, pytest.approx(60e-6), 0.5)
    assert first.shapes == "f16[0] and 2 more" and second.first is other
    assert "[f16[0]" not in short(report(*given, other))


def test_eager_stands_beside_the_plan() -> None:
    for changes, says in (
        (
            {"total_measured_s": 2e-3, "eager_s": 3e-3},
            "2.00 ms a run, eager PyTorch 3.00 ms: 1.50× as fast",
        ),
        ({"total_measured_s": 3e-3, "eager_s": 2e-3}, "eager PyTorch 2.00 ms: 1.50× as long"),
        (
            {"eager": "a run is long"},
            "20.0 µs a run, its regions measured one by one; eager PyTorch not measured: a run is",
        ),
        ({"eager_s": 2e-3}, "one by one; eager PyTorch 2.00 ms"),
    ):
        assert says in digest.times(report(region(), **changes)), says
    page = Page(render(report(region(), total_measured_s=2e-3, eager_s=3e-3), "html"))
    bars = [a["style"] for _, a in page.seen if a.get("class") == "bar"]
    assert (
        bars[0] and bars[0].startswith("width:100.0%") and (bars[1] or "").startswith("width:66.7%")
    )


def test_only_what_was_measured_is_said_to_be() -> None:
    found = report(region(), region("r1", measured_s=None), region("r2", bound="free"))
    assert digest.chosen(found) == "for 1 of 2 regions by measurement, for the rest by prediction"
    assert digest.chosen(report(region())) == "for every region by measurement"
    assert "by prediction" in digest.chosen(report(region(), mode="heuristic"))


def test_a_bound_that_was_passed_is_none() -> None:
    fast = region("r1", measured_s=5e-6)  # in half the time that its roofline allows
    assert math.isnan(fast.fraction)
    out = whole(report(region(), fast))
    assert line_of(out, "r1 ")[-2] == "–" and "faster than the rates" in out
    assert "for regions that make 80 % of the time: 50 % of that is reached" in " ".join(
        out.split()
    )
    assert "at least" not in whole(report(region(), total_measured_s=8e-6))
    assert "compute –" in short(report(fast))


def test_the_search_says_what_was_not_reached() -> None:
    options = (
        OptionReport("a", 1e-6, 1e-6),
        OptionReport("b", 1e-6, rejected="not reached within the budget"),
        OptionReport("c", 1e-6, error=0.5, rejected="error 5.0e-01 is over twice PyTorch's own"),
        OptionReport("d", 1e-6, error=0.2, rejected="error 2.0e-01 is over twice PyTorch's own"),
        OptionReport("e", 1e-6),
    )
    out = whole(report(region(options=options)))
    for part in (
        "5 candidates offered for 1 different region: 1 built and measured.",
        "×1 not reached within the budget",
        "×2 error … is over twice PyTorch's own",
        "×1 of regions that were not reached",
    ):
        assert part in out, part


def test_memory_orders_have_a_reason() -> None:
    given = [OrderReport(v, "nhwc", "convolutions want it", 1000) for v in "xyzw"]
    (said,) = digest.orders(report(orders=tuple(given)))
    assert (
        said == "nhwc: %x (1.00 KB), %y (1.00 KB), %z (1.00 KB) and …, because convolutions want it"
    )


@every
def test_json_is_strict_and_whole(made: Callable[[], Report]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    given = made()
    data = json.loads(render(given, "json", limit=1), parse_constant=refuse)
    assert len(data["regions"]) == len(given.regions) and data["name"] == given.name


@every
def test_html_parses_and_loads_nothing(made: Callable[[], Report]) -> None:
    given = made()
    page = Explanation(given).to_html()
    found = Page(page)
    assert "<script" not in page and "http:" not in page and "https:" not in page
    dots = [attrs for tag, attrs in found.seen if tag == "circle"]
    assert len(dots) == len(given.regions)
    for dot in dots:
        assert 0 <= float(dot["cx"] or "nan") <= 640 and 0 <= float(dot["cy"] or "nan") <= 400
    assert ">nan<" not in page and '"nan' not in page and "inf%" not in page
    ours = Page(render(illustration(), "html"))
    assert {tag for tag, _ in found.seen} <= {tag for tag, _ in ours.seen}
    assert given.name != HOSTILE * 9 or "<script>alert('x')</script>" in found.words  # as text
    fragment = Explanation(given)._repr_html_()
    assert Page(fragment).seen and "<html" not in fragment and fragment in page
    page.encode("utf-8")


def test_an_explanation_shows_itself() -> None:
    e = Explanation(illustration())
    assert str(e) == repr(e) == e.render() == e.render("text") == e.to_text()
    assert e.to_html() == render(e.report, "html")
    assert json.loads(e.to_json())["totals"]["flops"] == e.report.flops
    with pytest.raises(DeuteronError, match="pdf") as caught:
        e.render("pdf")
    assert all(repr(name) in caught.value.remedy for name in ("text", "json", "html"))


def line_of(out: str, start: str) -> list[str]:
    return next(line.split() for line in out.splitlines() if line.startswith(start))


def test_the_header_says_what_was_planned() -> None:
    for out in (whole(illustration()), short(illustration())):
        for fact in (
            "resnet_stage",
            "26 operators, 21 after passes, in 8 regions; made in 1.31 s",
            "for every region by measurement",
            "CUDA Graph  yes",
        ):
            assert fact in out, fact
    for reason in ("it reads the clock", "no: it reads the clock"):
        assert "CUDA Graph  no: it reads the clock" in render(report(cuda_graph=reason))
    assert "CUDA Graph" not in render(report(device="cpu", target="cpu"))
    assert "h200: not this machine" in render(report(device=""))


def test_the_summary_gives_time_roofline_and_bounds() -> None:
    out = " ".join(digest.summary(report(region(), region("r1", bound="memory", measured_s=60e-6))))
    assert "need 20.0 µs on h200 at least (the roofline): 25 % of that is reached" in out
    assert "memory traffic for 75 % of the time and arithmetic for 25 %" in out
    assert "the most time goes to r1 (conv+relu), 75 %" in out


def test_the_summary_knows_what_was_measured() -> None:
    for given, says in (
        (report(region(), total_measured_s=15e-6), "15.0 µs a run"),
        (report(region(measured_s=None)), "16.0 µs a run, predicted"),
        (report(region(), region("r1", measured_s=None)), "36.0 µs a run, 1 of 2 regions measured"),
        (report(), "no regions"),
        (broken(), "No region of this plan has a known time"),
        (report(region(), region("r1", measured_s=NAN)), "1 region without a known time"),
    ):
        assert says in " ".join((digest.times(given), *digest.summary(given)))


def test_a_region_shows_its_figures() -> None:
    out = whole(report(region(error=1.5e-4, torch_error=2e-4, note="packed")))
    head = re.split(r"\s{2,}", next(x for x in out.splitlines() if x.startswith("region ")))
    cells = dict(zip(head, line_of(out, "r0 "), strict=True))
    assert cells == {
        "region": "r0",
        "GFLOP": "2.00",
        "MB": "4.00",
        "FLOP/B": "500",
        "bound": "compute",
        "roof µs": "10.0",
        "pred. µs": "16.0",
        "meas. µs": "20.0",
        "% roof": "50",
        "error": "1.5e-04",
        "torch": "2.0e-04",
        "% time": "100",
    }
    assert (
        "    conv+relu · f16[32,64,56,56]@nhwc · vendor_fused/cudnn · from net.r0 · packed" in out
    )
    out = whole(report(region(measured_s=None)))  # columns that nothing fills are left out
    assert "meas. µs" not in out and "torch  " not in out and "pred. µs" in out
    assert math.isnan(region(measured_s=NAN).fraction)  # not known is not a hundred per cent


def test_equal_regions_are_folded() -> None:
    given = [region(f"r{i}") for i in range(6)]
    given[2] = replace(given[2], shape="f16[1]")
    given[4] = replace(given[4], measured_s=40e-6)
    rows = digest.fold(report(*given))
    assert [(row.label(), len(row.regions)) for row in rows] == [("r0 ×4", 4), ("r2", 1), ("r4", 1)]
    out = whole(report(*given))
    assert line_of(out, "r0 ×4")[-1] == "57"  # 80 of 140 µs
    assert "net.r0 and 3 more" in out
    assert sum(len(row.regions) for row in digest.fold(many())) == 200


def test_long_plans_show_the_expensive_rows() -> None:
    def shown(given: Report, limit: int | None = None) -> list[int]:
        return [int(i) for i in re.findall(r"^r(\d+) ", whole(given, limit), re.MULTILINE)]

    assert shown(many()) == list(range(160, 200))  # in plan order
    part = sum(range(1, 161)) / sum(range(1, 201))
    assert f"160 rows left out: 160 regions, {100 * part:.0f} % of the time" in whole(many())
    assert len(shown(many(60))) == 60 and len(shown(many(), limit=200)) == 200
    assert shown(many(), limit=2) == [198, 199] and shown(many(), limit=0) == []
    assert "left out" in render(many(), "html", limit=3)
    assert "left out" not in render(many(), "html")
    for shown_whole in (False, True):
        with pytest.raises(DeuteronError, match="negative"):
            render(many(), limit=-1, full=shown_whole)


def test_vetoes_add_up_by_reason() -> None:
    found = digest.vetoes(illustration())
    assert [(t.count, t.bytes) for t in found][:2] == [(5, 205_520_000), (1, 102_760_000)]
    assert found[0].examples[0].startswith("%relu_2")  # the dearest first
    out = whole(illustration())
    assert "7 values through memory, 411 MB, 96.7 µs" in out
    assert "48.4 µs    206 MB     ×5  a product starts" in out
    assert "remedy: let one operator read it" in out


def test_reasons_that_differ_only_in_shape_meet() -> None:
    reasons = [f"works on [{n}, 4], its producer on [{n}, 8]" for n in (2, 3)]
    given = [VetoReport(f"v{i}", "a", "b", r, 8, 1e-6) for i, r in enumerate(reasons)]
    (met,) = digest.vetoes(report(vetoes=tuple(given)))
    moved = VetoReport("v", "relu", "to_layout", "moves elements out of the tile", 8, 1e-6)
    assert digest.vetoes(report(vetoes=(moved,)))[0].remedy == digest.CONVERSION
    assert (met.reason, met.count) == ("works on […], its producer on […]", 2)
    assert digest.vetoes(report(vetoes=tuple(given[:1])))[0].reason == reasons[0]


def test_the_advice_matches_reasons_that_fusion_gives(repo: Path) -> None:
    files = [repo / "deuteron" / "passes" / name for name in ("fuse.py", "fusion_rules.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    unknown = [part for part in digest.REMEDIES if part not in source]
    assert not unknown, f"fusion does not say {unknown}"


def test_refusals_add_up_and_alternatives_are_ranked() -> None:
    found = digest.refusals(illustration())
    assert [(t.reason, t.count) for t in found["inductor"]] == [("Triton is not installed", 8)]
    assert {t.count for t in found["vendor_fused"]} == {1}
    (_, _, widen), (_, _, spatial) = digest.alternatives(illustration())
    assert [(o.candidate, o.slower) for o in widen] == [("torch", "2.45×")]
    assert [o.candidate.split("[")[0] for o in spatial] == ["torch", "triton_conv"]  # rejected last
    assert spatial[0].slower == "1.82×" and "twice PyTorch's own" in spatial[1].verdict
    out = whole(illustration())
    for part in ("inductor: 8 of 8 regions", "remedy: pip install triton", "50.8 µs measured"):
        assert part in out, part


def test_workspace_and_error_stand_beside_the_time() -> None:
    padded = OptionReport("vendor_fused[recipe=cudnn_padded]", 2e-5, 3e-5, 1.2e-4)
    padded = replace(padded, workspace=25_700_000)
    ours = region(options=(padded, OptionReport("torch", 3e-5, 5e-5)), measured_s=2e-5)
    ((_, _, losers),) = digest.alternatives(report(ours))
    assert losers[0][1:4] == ("30.0 µs measured", "25.7 MB", "1.2e-04")
    assert losers[1][1:4] == ("50.0 µs measured", "", "")


def test_memory_and_passes() -> None:
    out = whole(illustration())
    assert "weights     1.05 MB" in out and "arena       154 MB" in out
    assert "411 MB if every value had memory of its own: the plan needs 50 % of that" in out
    assert digest.passes(illustration()) == [
        ("fold batch norm", "26 → 20", "5.10 ms", "conv+batch_norm ×6"),
        ("layout", "20 → 21", "1.20 ms", "conv to nhwc ×6, conversion at the edge ×1"),
        ("2 idle passes", "", "500 µs", "changed nothing"),
    ]


def test_the_roofs_are_those_of_the_target() -> None:
    words = Page(render(illustration(), "html")).words
    assert "memory 4.25 TB/s" in words and "f16 products 722 TFLOP/s" in words
    nowhere = Page(render(report(region(), target="abacus"), "html")).words
    assert "limits of abacus are not known" in nowhere and "TB/s" not in nowhere


WRITTEN = (
    (units.seconds(1.234e-9), "1.23 ns"),
    (units.seconds(999.9e-6), "1.00 ms"),
    (units.seconds(0), "0 ns"),
    (units.seconds(90), "90.0 s"),
    (units.size(64), "64 B"),
    (units.size(999_999), "1.00 MB"),
    (units.size(12.9e6), "12.9 MB"),
    (units.bandwidth(4.248e12), "4.25 TB/s"),
    (units.flop_rate(7.22e14), "722 TFLOP/s"),
    (units.number(0.01234), "0.0123"),
    (units.number(12345.6), "12346"),
    (units.number(1.24e-7), "1.2e-07"),
    (units.per(27.9e-6, 1e-6), "27.9"),
    (units.percent(0.314), "31 %"),
    (units.percent(0.001), "<1 %"),
    (units.percent(0.9999), "99 %"),
    (units.percent(1 - 1e-15), "100 %"),
    (units.error(0.0), "0"),
    (units.times(1.8), "1.80×"),
    (units.count(1, "region"), "1 region"),
    (units.listed(["a", "b", "c"]), "a, b and c"),
    (units.shorten("abcdefghij", 5), "ab…ij"),
    (units.clean("a\nb\x1b[0m"), "a b\ufffd[0m"),
)


def test_units() -> None:
    assert [written for written, _ in WRITTEN] == [expected for _, expected in WRITTEN]
    ways = "number seconds size flop_rate bandwidth percent error times".split()
    for x in (None, NAN, math.inf):
        assert {getattr(units, way)(x) for way in ways} == {units.MISSING} == {units.per(x, 1e6)}


def test_the_documentation_shows_what_is_printed(repo: Path) -> None:
    page = (repo / "docs" / "reading-an-explanation.md").read_text(encoding="utf-8")
    for shown in (short, whole):
        assert shown(illustration()).strip() in page, f"print({shown.__name__}(illustration()))"
