"""What a user is told of a real plan: the explanation, the log, the progress, the page."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from unittest import TestCase

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.explain import render
from tests.test_explain import illustration, many

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Net(nn.Module):
    """A 3×3 convolution that Winograd's algorithm takes, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(torch.relu(self.conv(x)).mean((2, 3))) * scale


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dt.Optimized:
    cache = dt.Cache.open(tmp_path_factory.mktemp("cache") / "measured.jsonl")
    return dt.optimize(
        Net().eval(), torch.randn(1, 16, 28, 28), budget_s=2.0, cache=cache, name="net of mine"
    )


def test_a_search_ends_with_a_race_against_eager(found):
    report = found.explain().report
    assert report.total_measured_s > 0 and report.eager_s > 0
    assert {"deuteron", "torch"} <= set(report.versions)
    text = str(found.explain())
    assert "Plan of net of mine" in text and "x f32[1,16,28,28]" in text
    assert re.search(r"time  .* a run, eager PyTorch .* as (fast|long)", text)
    assert len(text.splitlines()) <= 30 < len(str(found.explain(full=True)).splitlines())


def test_what_was_not_raced_is_not_measured():
    fast = dt.optimize(Net().eval(), torch.randn(1, 16, 28, 28), find=False)
    assert fast.explain().report.eager_s is None and "PyTorch not measured" in " ".join(
        str(fast.explain()).split()
    )
    slow = dt.optimize(Net().eval(), torch.randn(1, 16, 28, 28), budget_s=1e-6)
    assert "not measured: a run takes too long" in " ".join(str(slow.explain()).split())


def test_the_race_leaves_nothing_behind():
    class Keeps(nn.Module):
        def forward(self, x, seen):
            seen.append(x)
            return x * 2.0 + seen[0]

    def grown(find: bool) -> int:
        seen = [torch.zeros(4)]
        dt.optimize(Keeps().eval(), (torch.ones(4), seen), find=find, budget_s=0.2)
        return len(seen)

    assert grown(find=True) == grown(find=False)


def test_refusals_by_engines_for_another_machine_are_never_shown(found):
    engines = {r.engine for region in found.explain().report.regions for r in region.refusals}
    assert not engines & {"triton_gen", "triton_kernels"}
    for text in (str(found.explain(full=True)), found.explain("html")):
        assert "another kind of machine" not in text and "runs on a GPU" not in text


def test_no_bound_is_claimed_that_was_passed(found):
    for region in found.explain().report.regions:
        assert not region.fraction > 1.0
    (conv,) = (r for r in found.explain().report.regions if "conv" in r.ops)
    plain = 2 * 9 * 16 * 16 * 28 * 28
    if "winograd" in conv.candidate:
        assert conv.flops < 0.6 * plain
    else:
        assert 0.9 * plain < conv.flops  # taps in the padding left out


def test_a_memory_order_that_was_chosen_is_explained(found):
    (order, *_) = found.explain().report.orders
    assert (order.value, order.order) == ("x", "nhwc") and "convolutions" in order.reason
    assert "nhwc: %x (50.2 KB)" in str(found.explain(full=True))
    keep = dt.optimize(
        Net().eval(), torch.randn(1, 16, 28, 28), find=False, policy=dt.Policy(layout="keep")
    )
    assert not keep.explain().report.orders


def test_notebooks_show_what_was_optimised(found):
    for shown in (found, found.plan, found.explain()):
        assert "Plan of net of mine" in shown._repr_html_()
        assert "eager PyTorch" in shown._repr_html_()


def test_stages_are_logged():
    stages = []
    with TestCase().assertLogs("deuteron", logging.DEBUG) as logged:
        dt.optimize(
            Net().eval(),
            torch.randn(1, 16, 28, 28),
            budget_s=0.3,
            progress=lambda stage, done, total: stages.append((stage, done, total)),
        )
    said = "\n".join(logged.output)
    for part in ("Net: importing", "operators", "measuring for about 0.3 s", "kernels is built"):
        assert part in said, part
    assert stages[:2] == [("importing", 0, 1), ("importing", 1, 1)]
    assert stages[-1][0] == "measuring regions" and stages[-1][1] == stages[-1][2]


def test_verbose_prints_what_is_logged(capsys):
    for verbose in (False, True):
        dt.optimize(Net().eval(), torch.randn(1, 16, 28, 28), find=False, verbose=verbose)
        assert ("deuteron: Net: importing" in capsys.readouterr().err) == verbose
    g = dt.Graph("mine")
    g.relu(g.tensor("x", (4,))).output("y")
    g.compile(device="cpu", verbose=True)
    assert "deuteron: mine: 1 regions" in capsys.readouterr().err
    assert not logging.getLogger("deuteron").handlers


WRAPPER = """<!DOCTYPE html><iframe id=f width=WIDTH height=900 style="border:0"></iframe>
<script>
const frame = document.getElementById("f");
frame.onload = () => {
  const page = frame.contentDocument;
  const sizes = [...page.querySelectorAll(".bar")].map(b => b.getBoundingClientRect());
  const small = [...page.querySelectorAll("svg text, td, p")].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && e.tagName === "text" && box.height < 9;
  });
  document.title = JSON.stringify({
    wide: page.documentElement.scrollWidth,
    bars: sizes.length,
    thin: sizes.filter(b => b.width < 2 || b.height < 6).length,
    small: small.length,
  });
};
frame.srcdoc = PAGE;
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_in_a_browser(width, tmp_path):
    pages = {"illustration": illustration(), "many": many(30)}
    for name, report in pages.items():
        page = json.dumps(render(report, "html")).replace("</", "<\\/")
        file = tmp_path / f"{name}.html"
        file.write_text(WRAPPER.replace("WIDTH", str(width)).replace("PAGE", page))
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path}", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
        seen = json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1])
        assert seen["wide"] <= width and seen["bars"] > 3, seen
        assert seen["thin"] == 0 and seen["small"] == 0, seen
