"""Pages of keys and values: the cache against attention over all that was appended, and what is
refused."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.errors import BindError, DeuteronError

attention = dt.functional.attention


def test_sequences_that_grow_apart_attend_to_all_of_their_own():
    torch.manual_seed(0)
    cache = dt.nn.PagedCache(40, 4, kv_heads=2, features=8, dtype=torch.float32)
    whole: dict[int, list[torch.Tensor]] = {}
    one, two, three = (cache.add() for _ in range(3))
    steps = [([one, two], 5), ([two], 3), ([one, three], 1), ([three, two, one], 4), ([two], 1)]
    for sequences, count in steps:
        k, v = (torch.randn(len(sequences), 2, count, 8) for _ in "kv")
        cache.append(sequences, k, v)
        for s, *pair in zip(sequences, k, v, strict=True):
            before = whole.get(s)
            parts = (
                pair
                if before is None
                else [torch.cat(p, 1) for p in zip(before, pair, strict=True)]
            )
            whole[s] = parts
        q = torch.randn(len(sequences), 4, count, 8)
        found = cache(sequences, q)
        for s, asked, y in zip(sequences, q, found, strict=True):
            keys, values = whole[s]
            offset = keys.shape[1] - count
            want = attention(asked[None], keys[None], values[None], causal=True, offset=offset)
            torch.testing.assert_close(y, want[0])
    assert cache.length(two) == 13 and "of 40 pages" in repr(cache)
    cache.remove(two)
    cache.append([cache.add()], *(torch.zeros(1, 2, 4 * 34, 8) for _ in "kv"))
    again = cache([one], torch.randn(1, 4, 1, 8))  # what others do leaves it as it was
    assert again.shape == (1, 4, 1, 8)


def test_a_window_and_a_cap():
    torch.manual_seed(0)
    cache = dt.nn.PagedCache(8, 4, kv_heads=2, features=8, dtype=torch.float64)
    one = cache.add()
    k, v = (torch.randn(1, 2, 11, 8, dtype=torch.float64) for _ in "kv")
    cache.append([one], k, v)
    q = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    how = {"causal": True, "offset": 8, "softcap": 2.0}
    want = attention(q, k, v, window=(4, 0), **how)
    torch.testing.assert_close(cache([one], q, window=4, softcap=2.0), want)


def test_nothing_is_written_where_pages_are_lacking():
    cache = dt.nn.PagedCache(2, 4, kv_heads=1, features=8)
    one = cache.add()
    cache.append([one], *(torch.ones(1, 1, 3, 8) for _ in "kv"))
    before = cache.keys.clone()
    with pytest.raises(BindError, match="2 more pages are needed, 1 are free"):
        cache.append([one], *(torch.ones(1, 1, 6, 8) for _ in "kv"))
    assert torch.equal(cache.keys, before) and cache.length(one) == 3
    with pytest.raises(BindError, match="no sequence 7"):
        cache([7], torch.ones(1, 1, 1, 8))
    with pytest.raises(BindError, match=r"give \[1, 1, new positions, 8\]"):
        cache.append([one], torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))


@pytest.mark.parametrize(
    ("table", "lengths", "wrong"),
    [
        ([[0, 5]], [6], "entry 1 of sequence 0 is page 5 of 5"),
        ([[0, 1], [-1, 0]], [3, 2], "entry 0 of sequence 1 is page -1"),
        ([[0, 1]], [9], "sequence 0 has 9 keys, and its table room for 0 to 8"),
        ([[0, 1]], [-1], "has -1 keys"),
    ],
)
def test_tables_are_looked_at_before_a_launch(table, lengths, wrong):
    pages = torch.zeros(5, 4, 2, 8)
    q = torch.zeros(len(table), 4, 1, 8)
    with pytest.raises(BindError) as told:
        dt.functional.paged_attention(q, pages, pages, torch.tensor(table), torch.tensor(lengths))
    assert wrong in str(told.value)


def test_entries_that_are_not_in_use_may_be_anything():
    pages = torch.randn(5, 4, 2, 8)
    table, lengths = torch.tensor([[1, 99]]), torch.tensor([3])
    y = dt.functional.paged_attention(torch.randn(1, 4, 1, 8), pages, pages, table, lengths)
    assert y.isfinite().all()
    table[0, 0] = 7  # in place: looked at again
    with pytest.raises(BindError, match="page 7"):
        dt.functional.paged_attention(torch.randn(1, 4, 1, 8), pages, pages, table, lengths)


def test_shapes_that_do_not_fit_are_refused():
    pages, table = torch.zeros(5, 4, 2, 8), torch.zeros(1, 2, dtype=torch.int32)
    lengths = torch.ones(1, dtype=torch.int32)
    call = dt.functional.paged_attention
    with pytest.raises(DeuteronError, match="cannot share"):
        call(torch.zeros(1, 3, 1, 8), pages, pages, table, lengths)
    with pytest.raises(DeuteronError, match="differ"):
        call(torch.zeros(1, 4, 1, 16), pages, pages, table, lengths)
    with pytest.raises(DeuteronError, match="tables"):
        call(torch.zeros(2, 4, 1, 8), pages, pages, table, lengths)


def test_other_lengths_are_looked_at_whatever_came_before():
    pages, table = torch.zeros(5, 4, 2, 8), torch.tensor([[0, 1]])
    q, call = torch.zeros(1, 4, 1, 8), dt.functional.paged_attention
    for _ in range(20):  # memory of the first is taken by the second
        call(q, pages, pages, table, torch.tensor([3]))
        with pytest.raises(BindError, match="has 9 keys"):
            call(q, pages, pages, table, torch.tensor([9]))


def test_in_inference_mode():
    with torch.inference_mode():
        cache = dt.nn.PagedCache(8, 4, kv_heads=2, features=8, dtype=torch.float32)
        one = cache.add()
        for _ in range(3):
            cache.append([one], torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
            assert cache([one], torch.randn(1, 4, 1, 8)).isfinite().all()
        table = torch.tensor([[9]])
        with pytest.raises(BindError, match="page 9"):
            pages = torch.zeros(5, 4, 2, 8)
            dt.functional.paged_attention(
                torch.zeros(1, 4, 1, 8), pages, pages, table, torch.ones(1).long()
            )


def test_nothing_may_be_appended_and_tables_move_along():
    cache = dt.nn.PagedCache(4, 4, kv_heads=2, features=8, dtype=torch.float32)
    one = cache.add()
    cache.append([one], *torch.randn(2, 1, 2, 3, 8))
    cache.append([one], *torch.randn(2, 1, 2, 0, 8))
    cache.append([], *torch.randn(2, 0, 2, 3, 8))
    assert cache.length(one) == 3 and cache.tables([one])[0].is_cpu
    assert all(table.is_meta for table in cache.to("meta").tables([one]))
