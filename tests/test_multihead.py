"""``dt.nn.MultiheadAttention`` against torch's."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.errors import DeuteronError
from tests.tolerances import DOUBLE, DOUBLE_GRADIENT, error

ASKED = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other features": {"kdim": 6, "vdim": 10},
    "learned key": {"add_bias_kv": True, "batch_first": True},
    "zero key": {"add_zero_attn": True},
    "all": {"add_zero_attn": True, "add_bias_kv": True, "kdim": 6, "vdim": 10},
}
BATCH, QUERIES, KEYS, WIDE, HEADS = 2, 5, 7, 12, 3


def pair(**how):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDE, HEADS, **how).double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    ours = dt.nn.MultiheadAttention(WIDE, HEADS, **how).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(module, alike=False, batched=True):
    sizes = (QUERIES, WIDE), (KEYS, module.kdim), (KEYS, module.vdim)
    made = [torch.randn(BATCH, *size, dtype=torch.float64) for size in sizes]
    made = made if batched else [t[0] for t in made]
    made = made if module.batch_first or not batched else [t.transpose(0, 1) for t in made]
    made = made[:1] * 3 if alike else made
    return [t.requires_grad_() for t in made] if not alike else [made[0].requires_grad_()] * 3


def masks(keys=KEYS):
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[0, -2:] = True
    banned = torch.rand(QUERIES, keys) < 0.3
    banned[:, 0] = False
    each = torch.randn(BATCH * HEADS, QUERIES, keys, dtype=torch.float64)
    added = torch.where(padding, -torch.inf, 0.0).double()
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "mask": {"attn_mask": banned},
        "both": {"key_padding_mask": padding, "attn_mask": banned},
        "numbers": {"attn_mask": each},
        "numbers and padding": {"attn_mask": each, "key_padding_mask": padding},
        "numbers both": {"attn_mask": each, "key_padding_mask": added},
    }


def same(ours, theirs, given, **how):
    results = [module(*given, need_weights=False, **how) for module in (ours, theirs)]
    assert results[0][1] is None
    assert error(results[0][0], results[1][0]) <= DOUBLE
    leaves = list(dict.fromkeys(given))
    grads = []
    for module, (y, _) in zip((ours, theirs), results, strict=True):
        wrt = (*leaves, *module.parameters())
        grads.append(torch.autograd.grad(y.sin().sum(), wrt))
    for a, b in zip(*grads, strict=True):
        assert error(a, b) <= DOUBLE_GRADIENT


@pytest.mark.parametrize("how", ASKED.values(), ids=ASKED)
def test_all_ways_to_make_it(how):
    ours, theirs = pair(**how)
    for name, each in masks().items():
        if name in ("none", "both", "numbers and padding") or how in ({}, ASKED["all"]):
            same(ours, theirs, inputs(ours), **each)


@pytest.mark.parametrize("first", [True, False])
def test_of_one_tensor_and_without_a_batch(first):
    ours, theirs = pair(batch_first=first)
    same(ours, theirs, inputs(ours, alike=True))
    later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    same(ours, theirs, inputs(ours, alike=True), attn_mask=later, is_causal=True)
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[1, -1] = True
    how = {"attn_mask": later, "is_causal": True, "key_padding_mask": padding}
    same(ours, theirs, inputs(ours, alike=True), **how)
    one = masks()["numbers"]["attn_mask"][:HEADS]
    same(ours, theirs, inputs(ours, batched=False), attn_mask=one)
    padding = masks()["padding"]["key_padding_mask"][0]
    same(ours, theirs, inputs(ours, batched=False), key_padding_mask=padding)


def test_weights_are_torchs_own_answer():
    ours, theirs = pair()
    given = inputs(ours)
    for average in (True, False):
        mine, wanted = (m(*given, average_attn_weights=average) for m in (ours, theirs))
        for a, b in zip(mine, wanted, strict=True):
            assert a.equal(b)


def test_a_query_that_sees_nothing_gives_the_last_bias():
    ours, _ = pair(batch_first=True)
    given = inputs(ours)
    nothing = torch.ones(BATCH, KEYS, dtype=torch.bool)
    y, _ = ours(*given, key_padding_mask=nothing, need_weights=False)
    torch.testing.assert_close(y, ours.out_proj.bias.expand_as(y))
    assert not any(g.isnan().any() for g in torch.autograd.grad(y.sum(), given))


def test_arguments_are_torchs():
    ours, theirs = dt.nn.MultiheadAttention, nn.MultiheadAttention
    assert inspect.signature(ours) == inspect.signature(theirs)
    mine, their = (inspect.signature(c.forward).parameters for c in (ours, theirs))
    assert [(p.name, p.default) for p in mine.values()] == [
        (p.name, p.default) for p in their.values()
    ]


def test_dropout_is_for_training():
    ours, theirs = pair(dropout=0.5)
    given = inputs(ours)
    assert not ours(*given, need_weights=False)[0].equal(ours(*given, need_weights=False)[0])
    same(ours.eval(), theirs.eval(), given)


def test_replace_knows_it():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDE, HEADS, 8, batch_first=True), 2)
    x = torch.randn(BATCH, QUERIES, WIDE)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    want = model(x)
    dt.nn.replace(model, include="MultiheadAttention")
    found = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert [type(m) for m in found] == [dt.nn.MultiheadAttention] * 2
    torch.testing.assert_close(model(x), want)
    dt.nn.restore(model)
    assert {type(m) for m in found} == {nn.MultiheadAttention}


def test_what_is_wrong_is_said():
    ours, _ = pair()
    q, k, v = inputs(ours)
    with pytest.raises(DeuteronError, match="there is none"):
        ours(q, k, v, need_weights=False, is_causal=True)
    with pytest.raises(DeuteronError, match="dimensions"):
        ours(q[0], k, v, need_weights=False)
    with pytest.raises(AssertionError):
        dt.nn.MultiheadAttention(10, 3)  # torch says it: heads that do not divide
