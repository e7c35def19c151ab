"""Dropout's numbers: even, independent between seeds and places, and the same for all strides."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import EPS

from deuteron.ops import TABLE
from deuteron.ops.random import BITS, FIRST, GOLDEN, SECOND, cutoff, keep_mask, words

COUNT = 1 << 16
FIRST_WORDS = [0x75134B49, 0x42F314F5, 0x9590A5BA, 0xDAFF015F]
SIGMAS = 5.0  # the numbers are fixed: a bound that holds today holds tomorrow


def seed(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


def dropout(x: torch.Tensor, key: int, p: float) -> torch.Tensor:
    return TABLE["dropout"].reference(x, seed(key), p=p)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())


def in_plain_integers(key: int, place: int) -> int:
    """The definition once more, in Python's integers: what an engine has to reproduce."""
    word = 0xFFFFFFFF

    def mix(h: int) -> int:
        h = ((h ^ h >> 16) * FIRST) & word
        h = ((h ^ h >> 15) * SECOND) & word
        return h ^ h >> 16

    a = mix((key + GOLDEN) & word)
    b = mix(a ^ (key >> 32 & word))
    c = mix(b ^ (place >> 32 & word))
    return mix((mix((place & word) ^ c) + b) & word)


def test_words_are_the_ones_the_definition_gives():
    places = [0, 1, 2, 3, 1000, 2**31, 2**32 - 1, 2**32, 2**40 + 7]
    for key in (0, 1, -1, 42, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)):
        got = words(seed(key), torch.tensor(places)).tolist()
        assert got == [in_plain_integers(key, place) for place in places], key


def test_the_first_words_never_change():
    first = words(seed(0), torch.arange(4)).tolist()
    assert first == FIRST_WORDS, "saved plans and other engines rely on these numbers"


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, 2, 12345, -7, 2**40])
def test_the_share_that_survives_is_1_minus_p(p, key):
    kept = float(keep_mask((COUNT,), seed(key), p).double().mean())
    assert abs(kept - (1 - p)) <= SIGMAS * math.sqrt(p * (1 - p) / COUNT)


def test_every_bit_is_even():
    for key in (0, 1, 99):
        bits = words(seed(key), torch.arange(COUNT))[:, None] >> torch.arange(32) & 1
        worst = float((bits.double().mean(0) - 0.5).abs().max())
        assert worst <= SIGMAS * 0.5 / math.sqrt(COUNT)


def test_values_fill_their_range_evenly():
    counts = torch.bincount(words(seed(3), torch.arange(COUNT)) >> 24, minlength=256).double()
    mean = COUNT / 256
    chi2 = float(((counts - mean) ** 2 / mean).sum())
    assert abs(chi2 - 255) <= SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    ("a", "b"), [(0, 1), (1, 2), (41, 42), (7, 7 + 2**32), (3, -3), (0, 2**31)]
)
def test_neighbouring_seeds_are_uncorrelated(a, b):
    one, two = (words(seed(key), torch.arange(COUNT)) for key in (a, b))
    assert not torch.equal(one, two)
    for shift in (0, 1, 2, 64):
        assert abs(correlation(one, two.roll(shift))) <= SIGMAS / math.sqrt(COUNT)
    # nor is one mask the other with its places exchanged by an exclusive or
    assert torch.isin(one, two).double().mean() < 0.001


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64, 256, 1024])
def test_neighbouring_places_are_uncorrelated(lag):
    one = words(seed(11), torch.arange(COUNT))
    assert abs(correlation(one[:-lag], one[lag:])) <= SIGMAS / math.sqrt(COUNT - lag)


def test_places_beyond_32_bits_have_words_of_their_own():
    near = words(seed(5), torch.arange(COUNT))
    far = words(seed(5), torch.arange(COUNT) + 2**32)
    assert abs(correlation(near, far)) <= SIGMAS / math.sqrt(COUNT)


def test_the_mask_does_not_depend_on_strides():
    x = torch.randn(2, 3, 4, 5)
    want = dropout(x, 8, 0.4)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    wide = torch.zeros(2, 3, 4, 10)
    wide[..., ::2] = x
    for same in (nhwc, wide[..., ::2], x.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(dropout(same, 8, 0.4), want)
    assert torch.equal(dropout(x.reshape(-1), 8, 0.4).reshape(x.shape), want)


def test_the_mask_does_not_depend_on_the_element_type():
    x = torch.rand(1000) + 1.0
    for dt in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(dropout(x.to(dt), 1, 0.3) != 0, dropout(x, 1, 0.3) != 0)


def test_kept_elements_are_scaled_and_the_ends_are_exact():
    x = torch.randn(1000)
    out = dropout(x, 2, 0.2)
    kept = out != 0
    assert float((out[kept] / x[kept] - 1.25).abs().max()) <= 2 * EPS[torch.float32]
    assert torch.equal(dropout(x, 2, 0.0), x)
    assert torch.equal(dropout(x, 2, 1.0), torch.zeros_like(x))
    assert cutoff(0.0) == 0
    assert cutoff(1.0) == 1 << BITS


def test_a_dropped_element_is_zero_whatever_it_was():
    x = torch.full((1000,), math.nan)
    out = dropout(x, 0, 0.5)
    assert torch.equal(out.isnan(), keep_mask((1000,), seed(0), 0.5))
    assert not dropout(torch.full((9,), math.inf), 0, 1.0).isnan().any()
