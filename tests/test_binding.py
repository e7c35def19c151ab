"""Binding: whatever does not fit is named, with what was expected and what to do; nothing runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fakes import FakeEngine, registered

import deuteron as dt


class Bench:
    """A plan whose every region runs on an engine that counts calls."""

    def __init__(self) -> None:
        g = self.graph = dt.Graph()
        self.x = g.tensor("x", (2, 3, 4, 5), layout="nhwc")
        self.w = g.tensor("w", (6, 3, 1, 1))
        self.n = g.tensor("n", (2,), "i64")
        self.turned = g.tensor("turned", (4, 6), strides=(1, 4))
        g.relu(g.conv(self.x, self.w)).output("y")
        (self.n + 1).output("m")
        g.sum(self.turned, axes=0).output("s")
        self.engine = FakeEngine(wants=lambda region: True)
        with registered(self.engine):
            self.plan = g.compile(device="cpu")

    def feed(self) -> dict[str, torch.Tensor]:
        return {
            "x": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "w": torch.randn(6, 3, 1, 1),
            "n": torch.tensor([4, 5]),
            "turned": torch.randn(6, 4).t(),
        }


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    yield Bench()


def refused(bench: Bench, *args, **named) -> dt.BindError:
    """The error of a run that must not have started."""
    before = bench.engine.calls
    with pytest.raises(dt.BindError) as caught:
        bench.plan.run(*args, **named)
    assert bench.engine.calls == before, "something ran"
    assert caught.value.remedy, "no remedy"
    return caught.value


def test_what_fits_runs(bench):
    before = bench.engine.calls
    assert set(bench.plan.run(bench.feed())) == {"y", "m", "s"}
    assert bench.engine.calls > before


WRONG = {
    "shape": ("x", lambda t: t[:1], ["[1, 3, 4, 5]", "[2, 3, 4, 5]", "compile a plan"]),
    "rank": ("n", lambda t: t[0], ["[]", "[2]", "shape"]),
    "more dimensions": ("n", lambda t: t[None], ["[1, 2]", "[2]", "shape"]),
    "empty": ("w", lambda t: t[:0], ["[0, 3, 1, 1]", "[6, 3, 1, 1]", "shape"]),
    "wider": ("x", torch.Tensor.double, ["torch.float64", "torch.float32", "x.to(torch.float32)"]),
    "narrower": ("w", torch.Tensor.half, ["torch.float16", "w.to(torch.float32)"]),
    "int for float": ("w", torch.Tensor.int, ["torch.int32", "w.to(torch.float32)"]),
    "float for int": ("n", torch.Tensor.float, ["torch.float32", "n.to(torch.int64)"]),
    "bool for int": ("n", torch.Tensor.bool, ["torch.bool", "n.to(torch.int64)"]),
    "complex": ("w", lambda t: t + 0j, ["torch.complex64", "w.to(torch.float32)"]),
    "device": ("x", lambda t: t.to("meta"), ["meta", "cpu", "x.to('cpu')"]),
    "contiguous for nhwc": (
        "x",
        torch.Tensor.contiguous,
        ["(60, 20, 5, 1)", "(60, 1, 15, 3)", "channels_last"],
    ),
    "nhwc for contiguous": (
        "w",
        lambda t: torch.randn(6, 1, 1, 6).permute(0, 3, 1, 2)[:, ::2],
        ["strides", "w.contiguous()"],
    ),
    "contiguous for turned": ("turned", torch.Tensor.contiguous, ["(6, 1)", "(1, 4)", "compile"]),
    "expanded": ("turned", lambda t: t[:1].expand(4, 6), ["(0, 4)", "(1, 4)", "compile"]),
    "sparse": ("turned", torch.Tensor.to_sparse, ["sparse_coo", "strided", "to_dense()"]),
    "sparse rows": ("turned", torch.Tensor.to_sparse_csr, ["sparse_csr", "to_dense()"]),
    "mkldnn": ("w", torch.Tensor.to_mkldnn, ["mkldnn", "to_dense()"]),
    "sign pending": ("w", torch._neg_view, ["signs", "resolve_neg()"]),
    "a number": ("n", lambda t: 3, ["a int", "not a tensor", "torch.Tensor"]),
    "None": ("w", lambda t: None, ["a NoneType", "not a tensor"]),
    "a list": ("n", lambda t: t.tolist(), ["a list", "not a tensor"]),
    "an array": ("w", lambda t: t.numpy(), ["a ndarray", "not a tensor"]),
    "a handle": ("w", lambda t: dt.Graph().tensor("w", (6, 3, 1, 1)), ["a Sym", "not a tensor"]),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", WRONG)
def test_a_tensor_that_does_not_fit_is_named(bench, name):
    which, change, says = WRONG[name]
    feed = bench.feed()
    feed[which] = change(feed[which])
    error = refused(bench, feed)
    assert f"input {which!r}" in error.wrong
    assert str(bench.plan.inputs[which]) in error.where
    for part in says:
        assert part in str(error), part


def test_single_elements_may_have_any_stride(bench):
    feed = bench.feed()
    feed["w"] = feed["w"].as_strided((6, 3, 1, 1), (3, 1, 77, 1))
    want = bench.plan.run({**feed, "w": feed["w"].contiguous()})
    assert torch.equal(bench.plan.run(feed)["y"], want["y"])


def test_names_that_are_missing_or_unknown(bench):
    feed = bench.feed()
    less = {k: t for k, t in feed.items() if k != "w"}
    assert "missing: w" in refused(bench, less).wrong
    error = refused(bench, {**less, "W": feed["w"]})
    assert "missing: w" in error.wrong and "unknown: W" in error.wrong
    error = refused(bench, **feed, turnd=feed["turned"])
    assert "unknown: turnd (did you mean 'turned'?)" in error.wrong
    assert "missing: x, w, n, turned" in refused(bench).wrong
    for name, type_ in bench.plan.inputs.items():
        assert f"{name}: {type_}" in refused(bench, {}).remedy
    assert "unknown: 7" in refused(bench, {**less, 7: feed["w"]}).wrong


def test_tensors_by_position_are_refused(bench):
    error = refused(bench, bench.feed()["x"])
    assert "by name" in error.wrong and "run(x=…, w=…, n=…, turned=…)" in error.remedy
    assert "a list" in refused(bench, list(bench.feed().values())).wrong
    with pytest.raises(dt.BindError, match="run by name"):
        bench.plan(*bench.feed().values())


def test_binding_twice_is_refused(bench):
    feed = bench.feed()
    error = refused(bench, feed, x=feed["x"])
    assert "'x' is bound twice" in error.wrong
    assert "bound twice" in refused(bench, {**feed, bench.x: feed["x"]}).wrong


def test_tensors_in_order_are_counted(bench):
    with pytest.raises(dt.BindError, match="3 tensors for 4 inputs"):
        bench.plan.binder.check(list(bench.feed().values())[:3])


def test_a_parameter_and_a_subclass_are_tensors(bench):
    feed = bench.feed()
    want = bench.plan.run(feed)["y"]
    feed["w"] = torch.nn.Parameter(feed["w"])
    assert torch.equal(bench.plan.run(feed)["y"], want)
    feed["x"] = feed["x"].as_subclass(type("Mine", (torch.Tensor,), {}))
    assert torch.equal(bench.plan.run(feed)["y"].as_subclass(torch.Tensor), want)


def test_array_memory_can_be_bound_without_a_copy(bench):
    feed = bench.feed()
    feed["n"] = torch.from_numpy(np.array([4, 5]))
    assert bench.plan.run(feed)["m"].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("device", "says"),
    [("meta", "not supported"), ("tpu", "not a device"), (object(), "not a device")],
)
def test_devices_that_cannot_be_planned_for(device, says):
    g = dt.Graph()
    g.relu(g.tensor("x", (2,))).output("y")
    with pytest.raises(dt.BindError, match=says) as caught:
        g.compile(device=device)
    assert "'cpu' or 'cuda'" in caught.value.remedy
    if not torch.cuda.is_available():
        with pytest.raises(dt.BindError, match="no CUDA device"):
            g.compile(device="cuda")
    x = torch.randn(2)
    assert torch.equal(g.compile(device="cpu:0").run(x=x)["y"], x.relu())


def test_a_graph_without_outputs_is_refused():
    g = dt.Graph()
    g.relu(g.tensor("x", (2,)))
    with pytest.raises(dt.GraphError, match="no outputs") as caught:
        g.compile(device="cpu")
    assert "output('y')" in caught.value.remedy
