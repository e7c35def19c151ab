"""Attention of sequences of different lengths, by tables of blocks, and by functions of scores:
against plain torch in float64, gradients by finite differences, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.errors import DeuteronError
from deuteron.ops import attention_math
from tests.test_attention import checked, qkv, tensors, written_out
from tests.tolerances import allowed, error

attention, block_mask = dt.functional.attention, dt.functional.block_mask
masks = dt.functional.masks


def starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def one_by_one(q, k, v, of_queries, of_keys, causal=False, end=False):
    """Each sequence by itself, and zeros behind the last one."""
    outs, last = [], int(of_queries[-1])
    bounds = zip(of_queries, of_queries[1:], of_keys, of_keys[1:], strict=False)
    for a, b, c, d in (tuple(map(int, each)) for each in bounds):
        offset = (d - c) - (b - a) if end else 0
        part = q[None, :, a:b], k[None, :, c:d], v[None, :, c:d]
        if d == c:
            outs.append(torch.zeros_like(part[0])[0] + 0 * v.sum())
        else:
            outs.append(written_out(*part, causal=causal, offset=offset)[0])
    return torch.cat([*outs, torch.zeros_like(q[:, last:])], 1)


# ---- sequences of different lengths --------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_packed_sequences(causal, end, batched):
    of_queries, of_keys = starts(3, 0, 5, 1, 4), starts(6, 2, 5, 0, 1)
    q, k, v = tensors((4, 15, 8), (2, 15, 8), (2, 15, 8))  # some belong to no sequence
    how = {"starts": (of_queries, of_keys), "causal": causal, "align": "end" if end else "start"}
    given = (q[None], k[None], v[None]) if batched else (q, k, v)
    y = attention(*given, **how)
    y = y[0] if batched else y
    want = one_by_one(q, k, v, of_queries, of_keys, causal, end)
    torch.testing.assert_close(y, want)
    assert (y[:, 13:] == 0).all()
    grad = tensors(y.shape, grad=False)[0]
    pairs = zip(*(torch.autograd.grad(t, (q, k, v), grad) for t in (y, want)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


def test_packed_with_all_the_rest_is_padded_with_the_rest():
    """One set of sequences, packed and padded: window, slopes, soft cap, and lengths of 0 and 1."""
    lengths = [4, 0, 1, 6]
    slopes = torch.tensor([0.3, 0.1])
    padded = qkv(4, 2, 6, 4)
    rows = [t[:, :, :, None] for t in padded]
    packed = [
        torch.cat([t[n, :, :m, 0] for n, m in enumerate(lengths)], 1)
        for t in (r.transpose(3, 4).flatten(3, 4)[..., None, :] for r in rows)
    ]
    how = {"window": (2, 1), "slopes": slopes, "softcap": 1.7}
    of = torch.tensor(lengths)
    y = attention(*padded, lengths=of, **how)
    z = attention(*packed, starts=starts(*lengths), **how)
    for n, m in enumerate(lengths):
        torch.testing.assert_close(y[n, :, :m], z[:, sum(lengths[:n]) :][:, :m])
        assert (y[n, :, m:] == 0).all()
    both = [torch.autograd.grad(t.sin().sum(), padded) for t in (y, z)]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_is_not_read():
    q, k, v = qkv(2, 2, 5, 4, grad=False)
    lengths = torch.tensor([3, 0])
    dirty = [t.clone() for t in (q, k, v)]
    for t in dirty:
        t[0, :, 3:] = t[1] = math.nan
    leaves = [t.requires_grad_() for t in dirty]
    y, lse = attention(*leaves, lengths=lengths, return_lse=True)
    want = written_out(*(t[:1, :, :3] for t in (q, k, v)))
    torch.testing.assert_close(y[0, :, :3], want[0])
    assert (y[0, :, 3:] == 0).all() and (y[1] == 0).all() and (lse[1] == -math.inf).all()
    grads = torch.autograd.grad(y.sum(), leaves)
    assert not any(g.isnan().any() for g in grads)


def test_lengths_of_keys_alone_are_a_mask_of_padding():
    given = qkv(3, 2, 5, 4, keys=7)
    lengths = torch.tensor([7, 0, 2])
    seen = torch.arange(7) < lengths[:, None, None, None]
    y, want = attention(*given, lengths=(None, lengths)), written_out(*given, seen)
    torch.testing.assert_close(y, want)
    bias = tensors((2, 5, 7))[0]
    call = lambda *t: attention(*t, lengths=(None, lengths))  # noqa: E731
    assert checked(call, (*given, bias))


def test_packed_gradients_by_differences():
    q, k, v = tensors((2, 6, 4), (2, 6, 4), (2, 6, 4))
    how = {"starts": starts(2, 0, 4), "dropout": 0.3, "seed": 3, "return_lse": False}
    assert checked(lambda *t: attention(*t, **how), (q, k, v))


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ({"starts": torch.tensor([0, 4, 3, 9])}, "start 2 is 3"),
        ({"starts": torch.tensor([1, 4])}, "start 0 is 1"),
        ({"starts": torch.tensor([0, 10])}, "start 1 is 10"),
        ({"starts": torch.tensor([0.0, 9.0])}, "index"),
        ({"starts": starts(9), "bias": torch.ones(9, 9)}, "with a bias"),
        ({"starts": (starts(9), starts(4, 5))}, "of packed sequences"),
        ({"lengths": torch.tensor([10])}, "length 0 is 10"),
        ({"lengths": torch.tensor([9, 9])}, "got lengths"),
        ({"lengths": torch.tensor([9]), "starts": starts(9)}, "at once"),
    ],
)
def test_lengths_that_do_not_fit(how, wrong):
    given = qkv(1, 2, 9, 4, grad=False)
    with pytest.raises(DeuteronError) as told:
        attention(*given, how.pop("bias", None), **how)
    assert wrong in str(told.value) and "remedy" in str(told.value)


def test_a_start_that_changes_is_looked_at_again():
    given, of = qkv(1, 2, 9, 4, grad=False), starts(4, 5)
    attention(*given, starts=of)
    of[1] = 30
    with pytest.raises(DeuteronError, match="start 1 is 30"):
        attention(*given, starts=of)


# ---- functions of scores -------------------------------------------------------------------------

SLOPES = torch.tensor([0.4, 0.1, 0.3, 0.02])
TABLE = torch.randn(4, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2, 2, 2, 3]])
SCORES = {
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "soft cap": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0),
    "relative": lambda s, b, h, i, j: s + TABLE[h, i - j + 10],
    "from the end": lambda s, b, h, i, j: s + TABLE[h, -1 - i],
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "by head": lambda s, b, h, i, j: torch.where((h % 2 == 0) & (b == 1), s * s, s / (1 + h)),
    "clamped": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + torch.maximum(i, j).float() ** 0.5,
    "whole numbers": lambda s, b, h, i, j: s * ((i // 3 == j // 3) | ((i - j) % 4 == 1)),
    "power": lambda s, b, h, i, j: 2.0 ** (s / 4),
    "none": lambda s, b, h, i, j: i * 0.1 - j / 7,
}


def by_torch(q, k, v, score=None, mask=None):
    """As flex_attention has it: on all places at once."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    b, h, i, j = (torch.arange(n) for n in s.shape)
    at = b[:, None, None, None], h[:, None, None], i[:, None], j
    s = s if score is None else score(s, *at) + torch.zeros_like(s)
    s = s if mask is None else s.masked_fill(~(mask(*at) | torch.zeros_like(s).bool()), -math.inf)
    return s.softmax(-1).nan_to_num() @ v


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_a_function_of_scores_is_what_torch_makes_of_it(score):
    given = qkv()
    mine, theirs = attention(*given, score=score), by_torch(*given, score)
    torch.testing.assert_close(mine, theirs)
    pairs = (torch.autograd.grad(y.sin().sum(), given, allow_unused=True) for y in (mine, theirs))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_a_score_and_a_mask_beside_causal_and_a_bias_that_learns():
    given, (bias,) = qkv(), tensors((4, 9, 9))
    how = {"score": SCORES["alibi"], "mask": masks.documents(IDS), "causal": True}
    y = attention(*given, bias, **how)
    both = masks.both(masks.causal(), masks.documents(IDS))
    want = by_torch(*given, lambda s, b, h, i, j: SCORES["alibi"](s, b, h, i, j) + bias, both)
    torch.testing.assert_close(y, want)
    pairs = (torch.autograd.grad(t.sin().sum(), (*given, bias)) for t in (y, want))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_function_in_packed_sequences_counts_from_their_starts():
    q, k, v = tensors((2, 9, 4), (2, 9, 4), (2, 9, 4))
    table = torch.randn(3, 9, dtype=torch.float64)
    y = attention(q, k, v, starts=starts(4, 5), score=lambda s, b, h, i, j: s + table[b, j])
    parts = [slice(0, 4), slice(4, 9)]
    for n, at in enumerate(parts):
        one = [t[None, :, at] for t in (q, k, v)]
        want = by_torch(*one, lambda s, b, h, i, j, n=n: s + table[n, j])
        torch.testing.assert_close(y[:, at], want[0])


def _asks(s, b, h, i, j):
    return s if i > j else -s


@pytest.mark.parametrize(
    ("score", "wrong"),
    [
        (_asks, "is true"),
        (lambda s, b, h, i, j: s.softmax(-1), "softmax"),
        (lambda s, b, h, i, j: s + SLOPES, "a whole tensor [4]"),
        (lambda s, b, h, i, j: s + TABLE[h], "1 places"),
        (lambda s, b, h, i, j: s + SLOPES.clone().requires_grad_()[h], "needs a gradient"),
        (lambda s, b, h, i, j: s + SLOPES[s], "no whole number"),
        (lambda s, b, h, i, j: s + (i & j), "joins bits"),
        (lambda s, b, h, i, j: s + sum(torch.ones(9)[i] for _ in range(4)), "more than 3"),
        (lambda s, b, h, i, j: "s", "uses 's'"),
        (3, "score is 3, not a function"),
        ("f0=softmax(s); f0", "no program"),
    ],
)
def test_functions_that_cannot_be_compiled(score, wrong):
    with pytest.raises(DeuteronError) as told:
        attention(*qkv(grad=False), score=score)
    assert wrong in str(told.value) and "remedy" in str(told.value)


def test_a_score_beside_a_soft_cap_is_refused():
    with pytest.raises(DeuteronError, match="beside a soft cap"):
        attention(*qkv(grad=False), score=SCORES["alibi"], softcap=2.0)


# ---- tables of blocks ----------------------------------------------------------------------------

MASKS = {
    "longformer": masks.longformer(3, 2),
    "bigbird": masks.bigbird(26, 4, 1, 1, 1),
    "prefix": masks.prefix(7),
    "prefixes": masks.prefix(torch.tensor([7, 0])),
    "documents": masks.documents(torch.arange(26).expand(2, 26) // torch.tensor([[5], [9]])),
    "window or first": masks.either(masks.window(2, 1), lambda b, h, i, j: (j < 3) & (h == 1)),
    "all": lambda b, h, i, j: True,
    "nothing": lambda b, h, i, j: (i < 9) & (i > 12),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("block", [4, 8])
def test_a_table_of_blocks_is_its_mask(mask, block):
    given = qkv(2, 2, 26, 4)
    table = block_mask(mask, 2, 2, 26, 26, block=block)
    y, want = attention(*given, mask=table), by_torch(*given, mask=mask)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(attention(*given, mask=mask), want)
    grads = [torch.autograd.grad(t.sin().sum(), given, retain_graph=True) for t in (y, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_table_says_what_is_computed():
    table = block_mask(masks.window(3, 3), None, None, 16, 13, block=4)
    seen = table.dense()[0, 0]
    for line in range(4):
        some, every, _, *entries = table.blocks[0, 0, line].tolist()
        found = {}
        for column in range(4):
            tile = seen[4 * line : 4 * line + 4, 4 * column : 4 * column + 4]
            whole = bool(tile.all()) and 4 * column + 4 <= 13
            found[column] = 2 if whole else int(tile.any())
        assert set(entries[:some]) == {c for c, kind in found.items() if kind == 1}
        assert set(entries[some:every]) == {c for c, kind in found.items() if kind == 2}
    assert int(table.blocks[..., 1].sum()) == int(table.turned[..., 1].sum())
    assert table.density == int(table.blocks[..., 1].sum()) / 16
    assert table.to("cpu").blocks.equal(table.blocks)
    big = block_mask(masks.bigbird(32, 4, 1, 1, 2), None, None, 32, 32, block=4)
    assert not big.blocks[..., 0].any()  # no block in part
    assert big.blocks[0, 0, 4, 1] == 3 + 1 + 2


@pytest.mark.sweep
def test_a_table_of_torchs():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(masks.window(20, 3), None, None, 300, 260, device="cpu")
    given = qkv(1, 2, 300, 16, keys=260, dtype=torch.float32, grad=False)
    mine = attention(*given, mask=dt.functional.BlockMask.from_torch(mask))
    theirs = flex_attention(*given, block_mask=mask)
    seen = masks.window(20, 3)(0, 0, torch.arange(300)[:, None], torch.arange(260)).any(-1)
    torch.testing.assert_close(mine[:, :, seen], theirs[:, :, seen])


def test_keys_that_no_query_sees_are_not_computed(monkeypatch):
    """On the CPU, too, time is in the number of blocks."""
    counted = 0
    real = attention_math.scores_of

    def counting(q, k, *rest):
        nonlocal counted
        counted += q.shape[-2] * k.shape[-2]
        return real(q, k, *rest)

    monkeypatch.setattr("deuteron.ops.attention.scores_of", counting)
    given = qkv(1, 1, 2048, 4, dtype=torch.float32, grad=False)
    table = block_mask(masks.longformer(64, 64), None, None, 2048, 2048)
    attention(*given, mask=table)
    assert 0 < counted < 0.6 * 2048**2  # the first ones see all
    counted = 0
    attention(*given, window=(64, 64))
    assert 0 < counted < 0.4 * 2048**2


def test_tables_that_do_not_fit():
    table = block_mask(masks.causal(), None, None, 16, 16, block=4)
    with pytest.raises(DeuteronError, match="is not one for q"):
        attention(*qkv(s=24, grad=False), mask=table)
    with pytest.raises(DeuteronError, match="beside causal"):
        attention(*qkv(s=16, grad=False), mask=table, causal=True)
    with pytest.raises(DeuteronError, match="blocks of 0"):
        block_mask(masks.causal(), None, None, 16, 16, block=0)


# ---- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_no_larger_than_torchs(dtype):
    given = qkv(s=40, d=16, dtype=dtype, grad=False)
    seen = torch.ones(40, 40, dtype=torch.bool).tril().triu(-9)
    exact = by_torch(*(t.double() for t in given), mask=masks.both(masks.causal(), masks.window(9)))
    theirs = error(F.scaled_dot_product_attention(*given, attn_mask=seen), exact)
    table = block_mask(masks.both(masks.causal(), masks.window(9)), None, None, 40, 40, block=8)
    mine = error(attention(*given, mask=table), exact)
    assert mine <= allowed(theirs, dtype)


@pytest.mark.sweep
def test_under_torch_compile():
    given = qkv(1, 2, 9, 4, dtype=torch.float32)
    table = block_mask(masks.window(3), None, None, 9, 9, block=4)
    of = starts(4, 5)

    def run(q, k, v):
        y = attention(q, k, v, mask=table) + attention(q, k, v, starts=of, causal=True)
        return (y * attention(q, k, v, score=SCORES["alibi"], mask=masks.causal())).sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    want = torch.autograd.grad(run(*given), given)
    for a, b in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        torch.testing.assert_close(a, b)


def test_operators_of_torchs():
    q, k, v = qkv(1, 2, 9, 4, dtype=torch.float32)
    how = dict.fromkeys(("causal", "packed"), True) | {"scale": 0.5, "window": None}
    how |= {"softcap": 0.0, "offset": 0, "dropout": 0.0, "align": "end", "side": 0}
    how |= {"score": "f0=tanh(s); f0", "mask": "", "interleaved": False}
    args = (q, k, v, None, None, None, starts(4, 5), starts(5, 4), *[None] * 7)
    torch.library.opcheck(torch.ops.deuteron.attention_lse.default, args, how)


def test_kernels_on_a_gpu_take_all_of_it():
    """By estimate: a plan for an H200 has kernels of ours in it, forward and backward."""
    from deuteron.ir import Region, TensorType
    from deuteron.plan.choose import Survey
    from tests.launched import region_of

    q, lse = TensorType.of((1, 8, 512, 64), "bf16"), TensorType.of((1, 8, 512), "f32")
    of, table = TensorType.of((5,), "i32"), TensorType.of((1, 1, 4, 7), "i32")
    ways = [
        ((None, None, None, of, of), {"packed": True}),
        ((*[None] * 5, table, table), {"side": 128, "mask": "c0=le(j,i); c0"}),
        ((), {"score": "f0=tanh(s); f0"}),
    ]
    for more, how in ways:
        for op, first in (("attention", (q, q, q)), ("attention_grad", (q, q, q, q, q, lse))):
            region: Region = region_of(op, *first, *more, **how)
            options, _ = Survey(dt.target("h200"), dt.Policy()).ask(region)
            assert "triton_kernels" in {o.candidate.engine for o in options}
