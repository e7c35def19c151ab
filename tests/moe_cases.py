"""Products of rows grouped by expert, for the hand-written kernels: in Triton's interpreter, and on
a GPU.

``python -m tests.interpreted tests.moe_cases`` runs them in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from tests.interpreted import tell
from tests.product_cases import Case, compare


def grouped(counts: Sequence[int], index: torch.dtype = torch.int32) -> torch.Tensor:
    """Where groups of so many rows start."""
    return torch.tensor([0, *counts]).cumsum(0).to(index)


def cases(dtype: torch.dtype, large: bool = False) -> Iterator[Case]:
    """Groups that are empty, of one row, of many and of all; rows in any order; matrices in both
    memory orders; sizes that fill no tile; and what may follow."""
    gen = torch.Generator().manual_seed(0)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    def order(count: int, index: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randperm(count, generator=gen).to(index)

    def linear(g: Any, x: Any, w: Any, s: Any, o: Any = None, share: int = 1) -> Any:
        return g.grouped_linear(x, w, s, o, share=share)

    uneven = (3, 0, 70, 1, 0)
    rows = sum(uneven)
    yield Case("uneven groups", {"x": t(rows, 40), "w": t(5, 72, 40), "s": grouped(uneven)}, linear)
    yield Case(
        "all in one group, odd sizes",
        {"x": t(5, 37), "w": t(3, 19, 37), "s": grouped((0, 5, 0), torch.int64)},
        linear,
    )
    yield Case(
        "two pairs of each row, matrices turned",
        {"x": t(20, 48), "w": t(6, 48, 33).mT, "s": grouped((9, 0, 20, 1, 0, 10)), "o": order(40)},
        lambda g, **given: linear(g, **given, share=2),
    )
    gate = {
        "x": t(9, 64),
        "w": t(7, 48, 64),
        "u": t(7, 48, 64),
        "s": grouped((4, 1, 0, 6, 9, 7, 0)),
    }
    gate |= {"o": order(27, torch.int64), "r": t(27, 1)}

    def gated(g: Any, x: Any, w: Any, u: Any, s: Any, o: Any, r: Any) -> Any:
        one, two = (g.grouped_linear(x, m, s, o, share=3) for m in (w, u))
        return g.silu(one) * two * r

    yield Case("a gate, with a number for each row", gate, gated)
    both = t(7, 96, 64)
    yield Case("a gate that lies beside", gate | {"w": both[:, :48], "u": both[:, 48:]}, gated)
    yield Case(
        "one row of many", {"x": t(1, 64), "w": t(9, 16, 64), "s": grouped((0,) * 8 + (1,))}, linear
    )

    def outer(g: Any, d: Any, x: Any, s: Any, o: Any = None, share: int = 1) -> Any:
        return g.grouped_outer(d, x, s, o, share=share)

    yield Case("gradient", {"d": t(rows, 40), "x": t(rows, 72), "s": grouped(uneven)}, outer)
    yield Case(
        "gradient, two pairs of each row",
        {"d": t(20, 19), "x": t(10, 37), "s": grouped((9, 0, 11), torch.int64), "o": order(20)},
        lambda g, **given: outer(g, **given, share=2),
    )
    for count, groups, index in ((27, 3, torch.int64), (1, 5, torch.int32), (1500, 6, torch.int32)):
        pairs = torch.randint(0, groups, (count,), generator=gen).to(index)
        yield Case(
            f"{count} pairs in {groups} groups",
            {"i": pairs},
            lambda g, i, groups=groups: g.group_rows(i, groups=groups),
        )
    if large:
        counts = torch.randint(0, 600, (60,), generator=gen).tolist()
        rows = sum(counts)
        rows, counts = rows + rows % 2, [*counts, rows % 2]
        given = {"x": t(rows // 2, 512), "w": t(61, 768, 512), "s": grouped(counts)}
        given |= {"o": order(rows), "u": t(61, 768, 512), "r": t(rows, 1)}

        def many(g: Any, x: Any, w: Any, u: Any, s: Any, o: Any, r: Any) -> Any:
            one, two = (g.grouped_linear(x, m, s, o, share=2) for m in (w, u))
            return g.silu(one) * two * r

        yield Case("many groups", given, many)
        back = {"d": t(rows, 768), "x": given["x"], "s": given["s"], "o": given["o"]}
        yield Case("gradient, many groups", back, lambda g, **given: outer(g, **given, share=2))


def _cleared() -> bool:
    from deuteron.kernels.triton.moe import clear_empty

    made = torch.ones(5, 70, 80)
    clear_empty(made, grouped((3, 0, 2, 0, 1)))
    return [float(each.mean()) for each in made] == [1.0, 0.0, 1.0, 0.0, 1.0]


def main() -> None:
    few = islice(cases(torch.float32), 4)
    every = (*cases(torch.float16), *few)  # the interpreter multiplies no bfloat16
    left = [] if _cleared() else ["groups without rows are not cleared, or others are"]
    tell([*(compare(case, "cpu", most=1) for case in every), (0, left)])


if __name__ == "__main__":
    main()
