"""Attention that computes part of the scores, or makes something else of them: ours against
FlexAttention compiled, and against our own kernels on all scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deuteron as dt
from bench.harness import Record, relative_error, wall_times

NOTE = (
    "Wall microseconds of one call with the queue kept full, medians of interleaved samples, "
    "bfloat16. `flex` is torch's flex_attention under torch.compile with the mask or score that "
    "the row names, `dense` dt.functional.attention on all scores of the same lengths, which may "
    "be a library's. `over_flex` is flex over ours; `rate` the scores that ours computes in a "
    "second (whole blocks counted) over those of `dense`. Errors are relative (2-norm) to float32 "
    "by plain operators, of the first heads."
)
masks = dt.functional.masks
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """Sizes, calls of the three, which part of the scores of a dense call ours computes, and the
    mask that a check uses."""

    name: str
    shape: tuple[int, int, int, int]
    ours: Call
    dense: Call
    part: float
    flex: Callable[[], Call]
    exact: Call | None = None
    learned: tuple[Tensor, ...] = ()


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("attention", device, NOTE)
    if device != "cuda":
        return record
    torch.manual_seed(0)
    for make in (_window, _bigbird, _longformer, _alibi, _packed):
        for case in make():
            for back in (False, True):
                name = case.name + (", and backward" if back else "")
                if record.wants(name):
                    record.add(case=name, **_measured(case, back, compile_peer))
    return record


def _measured(case: Case, back: bool, compile_peer: bool) -> dict[str, Any]:
    given = [torch.randn(case.shape, device="cuda").bfloat16() for _ in range(4)]
    q, k, v = (t.requires_grad_(back) for t in given[:3])
    calls = {"ours": case.ours, "dense": case.dense}
    if compile_peer:
        torch._dynamo.reset()
        calls["flex"] = case.flex()

    def way(call: Call) -> Callable[[], Any]:
        if not back:
            return lambda: call(q, k, v)
        return lambda: torch.autograd.grad(
            call(q, k, v), (q, k, v, *case.learned), given[3], allow_unused=True
        )

    ways = {name: way(call) for name, call in calls.items()}
    for each in ways.values():
        each()
    row: dict[str, Any] = {}
    if case.exact is not None and not back:
        few = [t[:, :1].float().detach() for t in (q, k, v)]
        exact = case.exact(*few)
        for name in {"ours", "flex"} & set(calls):
            row[f"{name}_error"] = relative_error(calls[name](q, k, v)[:, :1].detach(), exact)
    wall = {name: 1e3 * t for name, t in wall_times(ways, 7, 3).items()}
    row = {**wall, "rate": wall["dense"] * case.part / wall["ours"], **row}
    return row if "flex" not in wall else {"over_flex": wall["flex"] / wall["ours"], **row}


def _dense(causal: bool) -> Call:
    return lambda q, k, v: dt.functional.attention(q, k, v, causal=causal, return_lse=True)[0]


def _flex(n: int, mask: Any = None, score: Any = None) -> Callable[[], Call]:
    """torch's, compiled; made when it is asked for."""

    def make() -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled: Any = torch.compile(flex_attention)
        seen = None if mask is None else create_block_mask(mask, None, None, n, n, device="cuda")
        return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=seen)

    return make


def _exact(mask: dt.functional.BlockMask, rows: int = 1024) -> Call:
    """Some queries at a time, by plain operators."""
    seen = mask.dense()[0, 0]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for first in range(0, q.shape[2], rows):
            some = slice(first, first + rows)
            scores = q[:, :, some] @ k.mT * q.shape[-1] ** -0.5
            found.append(scores.masked_fill(~seen[some], -torch.inf).softmax(-1) @ v)
        return torch.cat(found, 2)

    return call


def _of_mask(name: str, mask: Any, shape: tuple[int, int, int, int]) -> Case:
    n = shape[2]
    made = dt.functional.block_mask(mask, None, None, n, n, device="cuda")
    return Case(
        name,
        shape,
        lambda q, k, v: dt.functional.attention(q, k, v, mask=made),
        _dense(False),
        made.density,
        _flex(n, mask),
        _exact(made) if n <= 1 << 14 else None,
    )


def _window() -> Iterator[Case]:
    shape, reach = (1, 16, 32768, 64), 1024
    sliding = masks.both(masks.causal(), masks.window(reach))
    pairs = shape[2] * (reach + 128) / (shape[2] * shape[2] / 2)  # with blocks at both edges
    yield Case(
        f"causal window {reach} of {shape[2]}",
        shape,
        lambda q, k, v: dt.functional.attention(q, k, v, causal=True, window=(reach, 0)),
        _dense(True),
        pairs,
        _flex(shape[2], sliding),
    )


def _bigbird() -> Iterator[Case]:
    mask = masks.bigbird(16384, 128, near=1, first=2, random=3, device="cuda")
    yield _of_mask("bigbird 16384: 3 near, 2 first, 3 random", mask, (1, 16, 16384, 64))


def _longformer() -> Iterator[Case]:
    yield _of_mask("longformer 16384: 256, 64 first", masks.longformer(256, 64), (1, 16, 16384, 64))


def _alibi() -> Iterator[Case]:
    heads, n = 16, 4096
    slope = 2.0 ** -torch.arange(1.0, heads + 1, device="cuda")

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slope[h] * (i - j).abs()

    yield Case(
        "alibi as a function, 4×16×4096×64",
        (4, heads, n, 64),
        lambda q, k, v: dt.functional.attention(q, k, v, score=score),
        _dense(False),
        1.0,
        _flex(n, None, score),
    )
    bias = torch.randn(heads, n, n, device="cuda").bfloat16().requires_grad_()

    def biased(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slope[h] * (i - j).abs() + bias[h, i, j]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = dt.functional.attention(q, k, v, bias, slopes=slope)
        return found

    yield Case(
        "alibi and a bias that is learned, 1×16×4096×64",
        (1, heads, n, 64),
        ours,
        _dense(False),
        1.0,
        _flex(n, None, biased),
        learned=(bias,),
    )


def _packed() -> Iterator[Case]:
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 1024, (32,), generator=gen)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().cuda()
    n = -(-int(lengths.sum()) // 128) * 128  # the rest is of no sequence
    ids = torch.repeat_interleave(torch.arange(33), torch.cat([lengths, n - lengths.sum()[None]]))
    mask = masks.both(masks.causal(), masks.documents(ids.cuda()))
    pairs = float((lengths.double() ** 2).sum() / 2 + 64 * lengths.sum())
    yield Case(
        f"32 packed sequences, {n} tokens, causal",
        (1, 16, n, 64),
        lambda q, k, v: dt.functional.attention(q, k, v, starts=starts, causal=True),
        _dense(True),
        pairs / (n * n / 2),
        _flex(n, mask),
    )
