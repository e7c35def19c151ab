"""Processes that train together through torch.distributed: the same parameters as one process.

The ranks are processes of their own (tests/ranks.py) that talk through gloo, in float64.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import deuteron as dt
from tests import ranks
from tests.ranks import Case
from tests.tolerances import DOUBLE_TRAINED, EIGHT_BIT_UPDATE, EPS, NETWORK, SIGNS_TURNED

WAIT_S = 600


def start(folder: Path, count: int, names: list[str]) -> subprocess.Popen:
    script = [sys.executable, "-m", "tests.ranks", str(count), str(folder)]
    return subprocess.Popen([*script, *names], cwd=Path(ranks.__file__).parent.parent)


def run(
    folder: Path,
    count: int,
    cases: list[Case],
    counted: Sequence[Case] = (),
    more: Sequence[str] = (),
) -> None:
    """Run cases in ``count`` processes, and compare the first and last rank with one process; of
    those to be ``counted``, the bytes that were sent with those that were predicted."""
    names = [case.name for case in cases] + [f"{ranks.VOLUMES}{case.name}" for case in counted]
    running = start(folder, count, [*more, *names])
    alone = {case: ranks.trained(case._replace(layout="alone", way="eager")) for case in set(cases)}
    told = {case: predicted(case, count) for case in counted}
    try:
        assert running.wait(WAIT_S) == 0
    finally:
        running.kill()
    for case in counted:
        assert torch.load(folder / f"{ranks.VOLUMES}{case.name}.pt") == told[case].volumes(), case
    for case in cases:
        for end in ("pt", "last.pt"):
            found = torch.load(folder / f"{case.name}.{end}")
            for name, want in alone[case].items():
                torch.testing.assert_close(
                    found[name],
                    want,
                    rtol=DOUBLE_TRAINED,
                    atol=DOUBLE_TRAINED,
                    msg=lambda m, case=case, name=name: f"{case}: {name}: {m}",
                )


LAYOUTS = {"ddp": "dp{n}", "fsdp": "fsdp{n}", "tp": "tp{n}"}
BOTH = {"dp_tp": "dp{h}×tp2", "fsdp_tp": "fsdp{h}×tp2"}


def predicted(case: Case, count: int, **more: Any) -> dt.distributed.Prediction:
    """The step of a case on so many ranks."""
    model = ranks.built(case)
    if case.model == "resnet":
        model = dt.nn.SyncBatchNorm.convert(model)
    x, y = ranks.batches(case)[0]
    written = BOTH.get(case.layout) or LAYOUTS[case.layout.partition("_")[0]]
    layout = dt.distributed.Layout.of(written.format(n=count, h=count // 2))
    batch = x.chunk(layout.batches)[0], y.chunk(layout.batches)[0]
    more["accumulate"] = case.accumulate
    return dt.distributed.predict(model, ranks.loss_of, batch, "h200", layout, **more)


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 4])
def test_volumes_are_those_predicted_to_the_byte(count, tmp_path):
    cases = [Case("gpt", layout, "step", "ours", n, 3) for layout in LAYOUTS for n in (1, 2)]
    cases += [
        Case("resnet", layout, "step", "sgd", n, 3) for layout, n in (("ddp", 2), ("fsdp", 1))
    ]
    cases += [Case("gpt", layout, "step", "ours", 2, 3) for layout in BOTH if count == 4]
    run(tmp_path, count, [], cases)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt_small", "ddp", "step", "sgd", accumulate=2, steps=2),
        pytest.param(Case("gpt_small", "sp", "step", "ours", steps=2), marks=pytest.mark.sweep),
    ],
    ids=lambda case: case.layout,
)
def test_two_ranks_train_as_one(case, tmp_path):
    """A short one of each: what is sharded, what is summed, what is accumulated and clipped. And
    collectives of plans run beside other work, with the same result, and parts of different models
    are refused."""
    run(tmp_path, 2, [case], more=[ranks.BESIDE])
    for rank in range(2):
        ways, refused = torch.load(tmp_path / f"{ranks.BESIDE}{rank}.pt")
        for way, (beside, off) in ways.items():
            assert beside and off < DOUBLE_TRAINED, way
        assert "rank 0 has 1.weight [8, 8]" in refused and "rank 1 1.weight [9, 8]" in refused


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 4])
def test_optimisers_of_ours_step_on_parts(count, tmp_path):
    """Of parameters of FSDP2 whose first axis the ranks do not divide; all clip."""
    assert start(tmp_path, count, [ranks.OPTIMISERS]).wait(WAIT_S) == 0
    for name, found in torch.load(tmp_path / f"{ranks.OPTIMISERS}.pt").items():
        alone = ranks.stepped(name, 1)
        pairs = zip(found["params"], alone["params"], strict=True)
        off = sum((got - want).square().sum() for got, want in pairs).sqrt()
        near = EIGHT_BIT_UPDATE if "8bit" in name else SIGNS_TURNED if name == "Lion" else NETWORK
        assert off <= near * alone["moved"], name
        torch.testing.assert_close(found["norm"], alone["norm"], rtol=near, atol=0.0)


# How far parameters are off after 8 steps, as part of the way they went: for 16 bits some
# roundings, for 8 bits one of 127 parts of the largest number of a block, whose rest comes later.
# Ranks that step alone take other ways.
REDUCED = {
    "ddp_own": DOUBLE_TRAINED,
    "ddp_float16": 4 * EPS[torch.float16],
    "ddp_bfloat16": 4 * EPS[torch.bfloat16],
    "ddp_int8": 1 / 127,
    "ddp_every2": 0.5,
}


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 4])
def test_gradients_in_fewer_bytes(count, tmp_path):
    """All ranks end with the same parameters, near those of one process, and send what was said."""
    cases = [Case("gpt_small", layout, "step", "sgd", 1, 8) for layout in REDUCED]
    names = [case.name for case in cases] + [f"{ranks.VOLUMES}{case.name}" for case in cases]
    assert start(tmp_path, count, names).wait(WAIT_S) == 0
    before = {name: p.detach() for name, p in ranks.built(cases[0]).named_parameters()}
    alone = ranks.trained(cases[0]._replace(layout="alone", way="eager"))
    moved = sum((alone[name] - before[name]).square().sum() for name in before).sqrt()
    for case in cases:
        found, last = (torch.load(tmp_path / f"{case.name}.{end}") for end in ("pt", "last.pt"))
        assert all(torch.equal(found[name], last[name]) for name in before), case
        off = sum((found[name] - alone[name]).square().sum() for name in before).sqrt()
        assert 0 < off < REDUCED[case.layout] * moved, case
        told = predicted(case, count, reduction=ranks.REDUCTIONS[case.layout])
        assert torch.load(tmp_path / f"{ranks.VOLUMES}{case.name}.pt") == told.volumes(), case


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 4])
def test_a_vocabulary_that_is_spread_and_inference(count, tmp_path):
    """Embedding, logits and cross-entropy in parts, and ``dt.optimize`` of models in parts."""
    running = start(tmp_path, count, [ranks.VOCABULARY])
    case = Case("gpt_small", "alone", "eager", "sgd", 1, 3)
    want = ranks.trained(case)
    x, _ = ranks.batches(case)[-1]
    model, fresh = ranks.built(case), ranks.built(case)
    model.load_state_dict(want)
    results = {"tp": model(x), "fsdp": fresh(x), "ddp": fresh(x)}
    want |= {f"optimised {name}": result.detach() for name, result in results.items()}
    assert running.wait(WAIT_S) == 0
    for rank in range(count):
        for name, got in torch.load(tmp_path / f"{ranks.VOCABULARY}{rank}.pt").items():
            near = {"rtol": DOUBLE_TRAINED, "atol": DOUBLE_TRAINED}
            expected = want[name.removeprefix("in fsdp ")]
            torch.testing.assert_close(got, expected, **near, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.sweep
def test_pipelines_train_as_one_process(tmp_path):
    """1F1B on two ranks, and interleaved with two stages on each; what is sent is what was said.
    A parameter that both ranks read is the same on both."""
    running = start(tmp_path, 2, [ranks.PIPELINE])
    alone = {}
    for kind in ranks.PIPELINES:
        case = Case(kind.split(",")[1], "alone", "eager", "sgd", 1, ranks.PIPELINE_STEPS)
        model = ranks.built(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in ranks.batches(case):
            for part in zip(x.chunk(ranks.MICRO), y.chunk(ranks.MICRO), strict=True):
                (ranks.loss_of(model(part[0]), part[1]) / ranks.MICRO).backward()
            optimizer.step()
            optimizer.zero_grad()
        alone[kind] = dict(model.named_parameters(remove_duplicate=False))
    assert running.wait(WAIT_S) == 0
    ends = [torch.load(tmp_path / f"{ranks.PIPELINE}{rank}.pt") for rank in range(2)]
    for kind in ranks.PIPELINES:
        found = ends[0][kind]["params"] | ends[1][kind]["params"]
        near = {"rtol": DOUBLE_TRAINED, "atol": DOUBLE_TRAINED}
        for name, p in alone[kind].items():
            torch.testing.assert_close(found[name], p.detach(), **near)
        for end in ends:
            assert end[kind]["sent"] == end[kind]["told"] > 0, kind


# a loop around the backend clips by torch's own function, which takes no mixture of plain tensors
# and DTensors, as tp has them
WAYS = [(layout, "step") for layout in ("ddp", "fsdp", "tp", "sp")]
WAYS += [(layout, "backend") for layout in ("ddp", "fsdp", "sp")]


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_gpt_20_steps_on_two_ranks(layout, way, tmp_path):
    cases = [Case("gpt", layout, way, "sgd", 1, 20), Case("gpt", layout, way, "ours", 1, 20)]
    cases += [Case("gpt", layout, way, "adamw", 2, 20)] if way == "step" else []
    run(tmp_path, 2, cases)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "sp", *BOTH])
def test_gpt_20_steps_on_four_ranks(layout, tmp_path):
    cases = [Case("gpt", layout, "step", "ours", 1, 20), Case("gpt", layout, "step", "sgd", 2, 20)]
    run(tmp_path, 4, cases)


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_resnet_with_batch_norm_over_all_ranks(layout, count, tmp_path):
    cases = [Case("resnet", layout, "step", name, 1, 20) for name in ("sgd", "ours")]
    cases += [Case("resnet", layout, "backend", "sgd", 1, 20)]
    run(tmp_path, count, cases)


def test_a_benchmark_on_one_rank_goes_on_behind_a_case_that_fails(monkeypatch):
    """What failed is in the row, and what comes behind it is measured."""
    from bench import one_rank

    def fails(self, layout):
        raise RuntimeError(f"\n{layout} breaks\n  off")

    monkeypatch.setitem(one_rank.CASES, "cpu", ("ddp", (8, 4, 4), "sp"))
    monkeypatch.setattr(one_rank.Steps, "ready", fails)
    first, second, third = one_rank.run("cpu").rows
    assert first == {"case": "step tiny ddp", "failed": "RuntimeError: alone breaks off"}
    assert second["alone_us"] > 0 and "all_reduce 4" in second
    assert third["failed"] == first["failed"]
    monkeypatch.setattr(one_rank, "LIMIT_S", -1)
    assert all("were over" in row["failed"] for row in one_rank.run("cpu").rows)
