"""``Policy(nan=…)``: whether ReLU, clamp and max pooling pass nan on, as torch does, or end it.

Generated code for both machines has the formulas among ``tests/codegen_kept.py``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.errors import GraphError
from deuteron.passes import Context, run_passes
from deuteron.passes.nan import ACTIVATED, POOLS
from deuteron.policy import Policy

NAN, INF = float("nan"), float("inf")
DROP = Policy(nan="drop")
BOTH = pytest.mark.parametrize("nan", ["propagate", "drop"])


def written(x: torch.Tensor, shape: tuple[int, ...] = (2, 3, 6, 6)) -> dt.Graph:
    g = dt.Graph("numbers")
    v = g.tensor("x", shape, {torch.float32: "f32", torch.bfloat16: "bf16"}[x.dtype])
    (g.relu(v) + 1.0).output("relu")
    g.relu6(v).output("relu6")
    g.hardtanh(v).output("hardtanh")
    g.clamp(v, min=-0.5).output("low")
    g.clamp(v, max=0.5).output("high")
    g.max_pool(v, kernel=3, stride=2, padding=1).output("pool")
    g.adaptive_max_pool(v, size=(2, 2)).output("adaptive")
    return g


def expected(x: torch.Tensor, drop: bool) -> dict[str, torch.Tensor]:
    def numbers(value: float) -> torch.Tensor:
        return x.nan_to_num(nan=value, posinf=INF, neginf=-INF) if drop else x

    low, least = numbers(-INF), numbers(-INF)
    return {
        "relu": F.relu(low) + 1.0,
        "relu6": F.relu6(low),
        "hardtanh": F.hardtanh(low),
        "low": low.clamp(min=-0.5),
        "high": numbers(INF).clamp(max=0.5),
        "pool": F.max_pool2d(least, 3, 2, 1),
        "adaptive": F.adaptive_max_pool2d(least, 2),
    }


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["torch", None])
def test_clamps_and_pools(nan, dtype, engine):
    x = torch.randn(2, 3, 6, 6, dtype=dtype)
    x[torch.rand(x.shape) < 0.2], x[1, 1] = NAN, NAN  # one channel has no number at all
    policy = Policy(nan=nan, engines=engine)
    out = written(x).compile(device="cpu", policy=policy).run(x=x)
    for name, want in expected(x, nan == "drop").items():
        torch.testing.assert_close(out[name], want, rtol=0, atol=0, equal_nan=True, msg=name)


@BOTH
def test_behind_a_convolution(nan):
    g = dt.Graph("block")
    x, w = g.tensor("x", (1, 8, 7, 7)), g.tensor("w", (8, 8, 3, 3))
    g.relu(g.conv(x, w, padding=1)).output("y")
    feed = {"x": torch.randn(1, 8, 7, 7), "w": torch.randn(8, 8, 3, 3)}
    feed["x"][0, 3, 3, 3] = NAN
    plan = g.compile(device="cpu", policy=Policy(nan=nan))
    full = F.conv2d(feed["x"], feed["w"], padding=1)
    want = F.relu(full.nan_to_num(nan=0.0) if nan == "drop" else full)
    torch.testing.assert_close(plan.run(**feed)["y"], want, equal_nan=True)
    assert len(plan.decision.choices[-2].region.nodes) == 2, "one kernel, as without the policy"
    assert ("Policy(nan='drop')" in str(plan.explain())) == (nan == "drop")


def test_gradients_of_what_was_dropped_are_zero():
    g = dt.Graph("step")
    x = g.tensor("x", (1, 2, 4, 4))
    (g.max_pool(g.relu(x), kernel=2) + g.max_pool(x, kernel=2)).output("y")
    joint = g.grad("y", wrt=["x"])
    t = torch.randn(1, 2, 4, 4)
    t[0, :, ::2, ::2] = NAN
    feed = dict(zip(joint.ir().inputs, (t, torch.ones(1, 2, 2, 2)), strict=True))
    out = joint.compile(device="cpu", policy=DROP).run(**feed)
    free = t.nan_to_num(nan=-INF).requires_grad_()
    y = F.max_pool2d(F.relu(free), 2) + F.max_pool2d(free, 2)
    y.sum().backward()
    by_shape = {tuple(v.shape): v for v in out.values()}
    torch.testing.assert_close(by_shape[1, 2, 4, 4], free.grad)
    torch.testing.assert_close(by_shape[1, 2, 2, 2], y.detach())


def test_an_activation_that_a_norm_took_along():
    g = dt.Graph("norm")
    x = g.tensor("x", (2, 3, 4, 4))
    g.relu(g.batch_norm_train(x)[0]).output("y")
    joint = g.grad("y", wrt=["x"])
    t, ones = torch.randn(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
    t[:, 1, 0, 0] = NAN  # which makes all of the channel nan
    plan = joint.compile(device="cpu", policy=DROP)
    assert "batch_norm_act_grad" in {n.op for n in plan.graph.nodes}
    y = plan.run(**dict(zip(joint.ir().inputs, (t, ones), strict=True)))["y"]
    assert not y.isnan().any() and not y[:, 1].any() and y[:, 0].any()


def test_every_pool_and_activation_is_known():
    """The lists come from the table of operators."""
    assert {"max_pool", "max_pool_grad", "adaptive_max_pool", "max_pool_with_winners"} <= {*POOLS}
    assert {"batch_norm_act", "batch_norm_act_grad", "layer_norm_grad"} <= {*ACTIVATED}
    g = dt.Graph()
    x = g.tensor("x", (2, 3, 4, 4))
    g.batch_norm_act(x, activation="hardtanh(max=2.0)")[0].output("y")
    after, _ = run_passes(g.ir(), Context(dt.target("h200"), DROP))
    assert 'activation="clamp_nan(min=-1.0, max=2.0)"' in str(after)


def test_a_saved_plan_keeps_it(tmp_path):
    x = torch.full((2, 3, 6, 6), NAN)
    path = written(x).compile(device="cpu", policy=DROP).save(tmp_path / "a.json")
    assert not dt.load_plan(path, device="cpu").run(x=x)["relu"].isnan().any()


def test_other_values_are_refused():
    with pytest.raises(
        GraphError, match=r"nan='ignore' is not known(.*\n)*.*'propagate' or 'drop'"
    ):
        Policy(nan="ignore")
