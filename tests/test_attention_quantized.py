"""Attention with products of 8 bits: its error beside exact attention, and what is refused. The
kernel is held against the operator's reference in ``attention_cases.py``."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.errors import DeuteronError
from tests.sweeps import one_in
from tests.tolerances import SINGLE_LAYERS

attend = dt.functional.attention_quantized
# what is promised, in root mean squares of the result, of normal random numbers
PROMISED = {
    ("int8", "wide"): 0.01,
    ("int8", "same"): 0.03,
    ("float8_e4m3fn", "wide"): 0.04,
    ("float8_e4m3fn", "same"): 0.055,
}


@pytest.mark.parametrize(("kind", "values"), one_in(2, [*PROMISED]))
def test_error_beside_exact_attention(kind, values):
    """With keys far from 0, of which the mean is taken away first."""
    causal = kind == "int8"
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 64) for heads in (4, 2, 2))
    k = (k + 3 * torch.randn(2, 2, 1, 64)).bfloat16()
    q, v = q.bfloat16(), v.bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    wide = [t.double() for t in (q, k, v)]
    want = dt.functional.attention(*wide, causal=causal)
    found = attend(q, k, v, kind=kind, values=values, causal=causal)
    off = (found.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert found.dtype == torch.bfloat16
    assert PROMISED[kind, values] / 6 < off <= PROMISED[kind, values]


def test_zeros_large_numbers_and_nothing():
    q, k, v = (torch.zeros(1, 1, 4, 8) for _ in "qkv")
    assert torch.equal(attend(q, k, v), v)
    v[0, 0, 2] = 1e30
    assert torch.allclose(attend(q, k, v, values="same"), v.mean(2, keepdim=True).expand_as(v))
    assert attend(q[:0], k[:0], v[:0]).shape == (0, 1, 4, 8)
    q[0, 0, 1, 3] = torch.nan
    y = attend(q, k, v)
    assert y[0, 0, 1].isnan().all() and y[0, 0, 2].isfinite().all()


@pytest.mark.sweep
def test_torch_knows_it():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in "qkv")
    how = {"kind": "i8", "wide": False, "causal": True, "offset": 0, "scale": None}
    torch.library.opcheck(torch.ops.deuteron.attention_quantized, (q, k, v), how)
    made = torch.compile(lambda *t: attend(*t, causal=True), fullgraph=True)
    assert torch.allclose(made(q, k, v), attend(q, k, v, causal=True), atol=SINGLE_LAYERS)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"kind": "int4"}, "there is no kind 'int4'"),
        ({"values": "short"}, "with values 'short'"),
        ({"q": torch.zeros(2, 4, 8)}, "q has rank 3"),
        ({"k": torch.zeros(1, 3, 4, 8), "v": torch.zeros(1, 3, 4, 8)}, "cannot share"),
        ({"v": torch.zeros(1, 2, 5, 8)}, "do not fit"),
        ({"offset": -1}, "offset=-1"),
        ({"q": torch.zeros(1, 2, 4, 8, requires_grad=True)}, "has no gradient"),
    ],
)
def test_what_is_refused(change, wrong):
    given = {name: torch.zeros(1, 2, 4, 8) for name in "qkv"} | change
    with pytest.raises(DeuteronError, match=wrong):
        attend(**given).sum().backward()
