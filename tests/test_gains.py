"""Who answers on a GPU after ``dt.nn.replace``: what is left alone, which calls are torch's, and
what a report says of it. Tensors on a GPU are made up: only their size is asked."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.functional import linear_cross_entropy_chunks as chunks
from deuteron.nn import authors, blocks, logits, parts
from deuteron.nn.norm import BatchNorm2d
from tests import replace_cases as cases
from tests.test_blocks import Residual, images
from tests.test_replace import as_good, exactly, learned, shaken


def test_on_a_gpu_what_gains_nothing_stays():
    model = nn.Sequential(nn.GELU(), nn.Dropout(), nn.LayerNorm(8), cases.Language())
    rows = {row.kind: row for row in dt.nn.report(model, target="h200")}
    assert "gains nothing" in rows["GELU"].why and "gains nothing" in rows["Dropout"].why
    assert rows["LayerNorm"].by and rows["Embedding"].why
    named = {row.kind: row for row in dt.nn.report(model, include="GELU", target="h200")}
    assert named["GELU"].by  # who names it gets it
    here = {row.kind: row for row in dt.nn.report(model)}
    assert here["GELU"].by and here["Dropout"].by


def test_what_nobody_has_seen_gain_stays_on_a_gpu():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.SyncBatchNorm(8))
    assert {row.kind for row in dt.nn.report(model, target="h200").kept} >= {
        "MultiheadAttention",
        "SyncBatchNorm",
    }
    assert len(dt.nn.report(model, include="MultiheadAttention", target="h200").replaced) == 1


class Plain(nn.Module):
    """One call of torch's already."""

    def forward(self, x):
        return F.gelu(x)


def test_what_is_written_out_saves_calls_of_any_size(monkeypatch):
    model = nn.Sequential(cases.NewGelu(), Plain(), cases.RootNorm(8), cases.BareNorm(8))
    rows = {row.kind: row for row in dt.nn.report(model, target="h200")}
    gelu, root, bare = (rows[name].gain for name in ("NewGelu", "RootNorm", "BareNorm"))
    assert gelu.fewer > 10 and root.fewer > 10 and bare.fewer == 0
    told = str(dt.nn.report(model, target="h200"))
    assert f"{gelu.fewer} calls of torch's fewer at any size" in told
    assert "costs the host less" in rows["Plain"].why
    # whoever writes that many calls is never asked whether one of ours is too small
    asked = []
    monkeypatch.setattr(parts, "authors", lambda module, *_: asked.append(module))
    dt.nn.replace(model)(torch.randn(2, 8))
    assert asked == [model[1], model[3]]


def test_modules_with_nothing_but_small_calls_on_a_gpu_get_their_class_back(monkeypatch):
    """A tensor on a GPU is made up, of which only the size is asked."""
    monkeypatch.setattr(authors, "ours_from", lambda function, device: 1000)
    monkeypatch.setattr(authors, "is_captured", lambda x: False)
    dt.functional.delegation(True)
    small, large = (
        SimpleNamespace(is_cuda=True, nbytes=n, requires_grad=True) for n in (999, 1001)
    )
    small.get_device = large.get_device = lambda: 0
    model = dt.nn.replace(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)))
    first, second = model
    assert authors.authors(second, None, large) is None
    for _ in range(authors.ENOUGH):
        assert type(first) is dt.nn.LayerNorm
        assert authors.authors(first, None, small) is nn.LayerNorm
        assert authors.authors(second, None, small) is nn.LayerNorm
    assert type(first) is nn.LayerNorm and type(second) is dt.nn.LayerNorm
    dt.nn.replace(model)
    assert type(first) is dt.nn.LayerNorm


class Seen(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("least", [0, 10**9], ids=["large", "small"])
def test_a_block_whose_norms_are_all_small_is_trained_by_its_author(monkeypatch, least):
    monkeypatch.setattr(blocks, "ours_from", lambda *_: least)
    monkeypatch.setattr(blocks, "is_captured", lambda x: False)
    dt.functional.delegation(True)
    taken = []
    fused = BatchNorm2d.fused.__func__

    def noted(cls, norm, x, activation, **around):
        taken.append(norm)
        around = {name: t.as_subclass(torch.Tensor) for name, t in around.items()}
        return fused(cls, norm, x.as_subclass(torch.Tensor), activation, **around).as_subclass(Seen)

    monkeypatch.setattr(BatchNorm2d, "fused", classmethod(noted))
    block = dt.nn.replace(Residual(False).train(), include="Residual")
    assert type(block.bn1) is nn.BatchNorm2d  # as on a GPU, where it gains nothing alone
    theirs = dt.nn.restore(copy.deepcopy(block))
    for _ in range(authors.ENOUGH + 1):
        x = images()
        found = block(x.as_subclass(Seen)).as_subclass(torch.Tensor)
        torch.testing.assert_close(found, theirs(x))
    assert len(taken) == (0 if least else 2 * (authors.ENOUGH + 1))
    kept = vars(block)[authors.COUNT] >= authors.ENOUGH
    assert kept is bool(least)
    monkeypatch.setattr(type(block), "_read", None)  # what would run ours
    if least:
        block(x.as_subclass(Seen))
        dt.nn.replace(block)
        assert authors.COUNT not in vars(block)


def test_a_block_takes_norms_of_torchs_along(monkeypatch):
    taken, fused = [], BatchNorm2d.fused.__func__
    noted = classmethod(lambda cls, norm, *a, **k: taken.append(norm) or fused(cls, norm, *a, **k))
    monkeypatch.setattr(BatchNorm2d, "fused", noted)
    block, x = shaken(Residual(True)).train(), images()
    exact, plain = exactly(block, x), learned(copy.deepcopy(block), x)
    dt.nn.replace(block, include="Residual")
    assert type(block.bn1) is type(block.bn2) is nn.BatchNorm2d
    with dt.functional.delegation(False):
        as_good(learned(block, x), plain, exact, torch.float32, 100)
    assert taken == [block.bn1, block.bn2]
    whole = dt.nn.report(nn.Sequential(Residual(True)), exclude="BatchNorm2d")
    assert [row.why for row in whole if row.kind == "Residual"] == ["in exclude"]
    on_gpu = dt.nn.report(Residual(True), target="h200")
    assert [row.why for row in on_gpu if row.kind == "BatchNorm2d"] == [
        "the block that it is in takes it along"
    ] * 2


# ---- logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_counted_in_the_type_they_will_have(monkeypatch, autocast):
    """Under autocast hidden states may be float32, and logits are not."""
    h200 = dt.target("h200")
    monkeypatch.setattr(logits, "target", lambda _: h200)
    monkeypatch.setattr(logits, "under_autocast", lambda _: autocast)
    monkeypatch.setattr(logits, "is_eager", lambda *_: True)
    monkeypatch.setattr(logits, "is_ours", lambda *_: True)
    dt.functional.delegation(True)
    weight = torch.empty(50000, 8, device="meta")
    rows = logits.least_bytes(h200) // (50000 * 4) + 1  # enough of 4 bytes
    for rows, right in ((rows, not autocast), (2 * rows, True)):  # noqa: B020
        hidden = SimpleNamespace(is_cuda=True, requires_grad=True, shape=(rows, 8), device="cuda:0")
        hidden.numel, hidden.element_size = (lambda n=rows: n * 8), lambda: 4
        assert logits.is_worth_it(hidden, weight, None) is right


def test_logits_that_are_no_burden_are_made_at_once(monkeypatch):
    monkeypatch.setattr(chunks, "SMALL", 100)
    small = chunks.Given(torch.randn(10, 4), torch.randn(10, 4), None, torch.zeros(10).long(), None)
    large = small._replace(hidden=torch.randn(11, 4))
    assert chunks._all_at_once(small, None) and not chunks._all_at_once(large, None)
    assert chunks._all_at_once(small, 10) and not chunks._all_at_once(small, 9)
    monkeypatch.setattr(chunks, "_room", lambda device: 4 * 110)
    on_gpu = SimpleNamespace(is_cuda=True, shape=(11, 4), element_size=lambda: 4)
    on_gpu.get_device = lambda: 0
    assert chunks._all_at_once(large._replace(hidden=on_gpu), None)
    assert not chunks._all_at_once(large._replace(hidden=on_gpu), 10)
