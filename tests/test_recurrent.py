"""Recurrent layers: modules through a plan beside torch in float64, and what becomes of them."""

from __future__ import annotations

import pytest
import torch
from tolerances import allowed, error
from torch import nn

import deuteron as dt
from deuteron.errors import GraphError
from deuteron.ir.text import parse_type
from deuteron.ops import TABLE, infer
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from deuteron.target import target

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOTH, FRONT = {"bidirectional": True}, {"batch_first": True}
# kind of layer, features, units, settings, steps, rows
CASES = {
    "lstm": (nn.LSTM, 5, 8, {}, 7, 3),
    "lstm, stacked both ways": (nn.LSTM, 5, 13, {"num_layers": 2, **BOTH, **FRONT}, 6, 5),
    "lstm, projected": (nn.LSTM, 5, 11, {"proj_size": 3, "num_layers": 2, **BOTH}, 5, 2),
    "lstm without bias": (nn.LSTM, 3, 1, {"bias": False}, 4, 1),
    "lstm of one step": (nn.LSTM, 5, 33, {}, 1, 1),
    "long sums": (nn.LSTM, 3, 300, {}, 3, 2),
    "gru": (nn.GRU, 5, 9, {"num_layers": 2, **FRONT}, 7, 6),
    "gru both ways": (nn.GRU, 4, 17, {"bias": False, **BOTH}, 5, 1),
    "tanh": (nn.RNN, 5, 19, BOTH, 7, 9),
    "relu": (nn.RNN, 5, 6, {"nonlinearity": "relu"}, 7, 2),
}


def _engines(plan):
    return {op: str(c.candidate) for c in plan.decision.choices for op in c.region.ops}


def _states(module, rows, dtype):
    ways = module.num_layers * (1 + module.bidirectional)
    h = torch.randn(ways, rows, module.proj_size or module.hidden_size).to(dtype)
    lstm = isinstance(module, nn.LSTM)
    return (h, torch.randn(ways, rows, module.hidden_size).to(dtype)) if lstm else h


def _flat(results):
    y, last = results
    return [y, *(last if isinstance(last, tuple) else (last,))]


@torch.no_grad()
def _compare(module, x, states=None):
    given = (x,) if states is None else (x, states)
    fast = dt.optimize(module, given, find=False)
    got, theirs = _flat(fast(*given)), _flat(module(*given))
    wide = torch.utils._pytree.tree_map(torch.Tensor.double, given)
    exact = _flat(module.double()(*wide))
    for mine, torchs, want in zip(got, theirs, exact, strict=True):
        reduced = module.hidden_size * x.shape[0]
        assert error(mine, want) <= allowed(error(torchs, want), x.dtype, reduced)
    return _engines(fast.plan)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_beside_torch_in_float64(name, dtype):
    torch.manual_seed(0)
    kind, features, units, how, steps, rows = CASES[name]
    module = kind(features, units, **how).eval().to(dtype)
    size = (rows, steps) if module.batch_first else (steps, rows)
    x = torch.randn(*size, features).to(dtype)
    states = _states(module, rows, dtype) if dtype is F32 else None
    assert "recipe=recurrence" in _compare(module, x, states)["recurrence"]


@pytest.mark.parametrize("rows, ways", [(1, 1), (1, 2), (3, 1), (9, 2)])
def test_threads_share_units_or_rows(rows, ways):
    """Of one row the units are shared, and all wait for each other after each step."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for how in ({}, {"proj_size": 10}):
            module = nn.LSTM(8, 40, bidirectional=ways == 2, **how).eval()
            assert "recurrence" in _compare(module, torch.randn(20, rows, 8))["recurrence"]
    finally:
        torch.set_num_threads(before)


def test_views_and_float64():
    torch.manual_seed(0)
    module = nn.GRU(4, 6).eval()
    x = torch.randn(4, 3, 10).permute(2, 1, 0)
    assert "recurrence" in _compare(module, x)["recurrence"]
    assert _compare(module.double(), x.double())["rnn"] == "torch"  # generated code is for float32


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_results_that_nobody_reads_are_not_written(wanted):
    torch.manual_seed(0)
    g = dt.Graph("layer")
    given = [torch.randn(*size) for size in ((5, 2, 12), (1, 12, 3), (1, 2, 3), (1, 2, 3))]
    x = g.tensor("x", (5, 2, 12))
    made = g.recurrence(x, *map(g.constant, given[1:]), cell="lstm")
    for i in wanted:
        made[i].output(str(i))
    plan = g.compile(device="cpu")
    assert "recurrence" in _engines(plan)["recurrence"]
    want = TABLE["recurrence"].reference(*given, None, None, cell="lstm")
    for i, found in plan.run(x=given[0]).items():
        assert error(found, want[int(i)]) <= allowed(0.0, F32, 15)


def test_weights_that_change_are_torchs_and_so_is_a_gpu():
    module = nn.LSTM(8, 8)
    g = dt.Graph("layer")
    x, h = g.tensor("x", (4, 2, 8)), g.tensor("h", (1, 2, 8))
    weights = [g.tensor(f"w{i}", tuple(p.shape)) for i, p in enumerate(module.parameters())]
    g.rnn(x, h, h, *weights, cell="lstm")[0].output("y")
    assert _engines(g.compile(device="cpu")) == {"rnn": "torch"}
    known = dt.Graph("layer")
    x, h = known.tensor("x", (4, 2, 8)), known.tensor("h", (1, 2, 8))
    weights = [known.constant(p.detach()) for p in module.parameters()]
    known.rnn(x, h, h, *weights, cell="lstm")[0].output("y")
    for machine, ops in (("h200", {"rnn"}), ("cpu", {"linear", "recurrence"})):
        found = decide(known.ir(), target(machine), Policy())
        assert {op for region in found.regions for op in region.ops} == ops


def test_dropout_between_layers_is_none_in_eval_mode():
    module = nn.LSTM(4, 5, 2, dropout=0.5).eval()
    assert "recurrence" in _compare(module, torch.randn(6, 2, 4))


BAD = [
    ("f32[5,2,12] f32[1,12,3] f32[1,2,3]", "recurrence", {"cell": "lstm"}, "without a second"),
    ("f32[5,2,9] f32[1,9,3] f32[1,2,3] f32[1,2,3]", "recurrence", {"cell": "gru"}, "with a second"),
    ("f32[5,2,9] f32[3,3,3] f32[3,2,3]", "recurrence", {"cell": "gru"}, "1 or 2 directions"),
    ("f32[5,2,8] f32[1,9,3] f32[1,2,3]", "recurrence", {"cell": "gru"}, "not [5, 2, 9]"),
    ("f32[5,2,9] f32[1,9,4] f32[1,2,4]", "recurrence", {"cell": "gru"}, "4 features of 3 units"),
    ("f32[5,2,9] f32[9,3] f32[1,2,3]", "recurrence", {"cell": "gru"}, "weight has rank 2"),
    ("f32[5,2,9] f32[1,9,3] f32[1,2,3]", "recurrence", {"cell": "mgu"}, "lstm, gru, tanh, relu"),
    ("f32[5,2,4] f32[1,2,3] f32[9,4]", "rnn", {"cell": "gru"}, "3 inputs for 1 layers"),
    ("f32[5,2,4] f32[2,2,3] f32[9,4] f32[9,3]", "rnn", {"cell": "gru"}, "a state [2, 2, 3]"),
    ("f32[5,2,4] f32[1,2,3] f32[9,5] f32[9,3]", "rnn", {"cell": "gru"}, "not [9, 4]"),
    ("f32[5,2,4] f32[1,2,3] f32[9,4] f16[9,3]", "rnn", {"cell": "gru"}, "input 3 is float16"),
]


@pytest.mark.parametrize("types, op, attrs, says", BAD)
def test_what_is_wrong_is_named(types, op, attrs, says):
    with pytest.raises(GraphError) as caught:
        infer(op, [parse_type(t) for t in types.split()], attrs)
    assert says in str(caught.value)
