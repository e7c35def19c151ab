"""Attention for the hand-written kernel: in the interpreter, and on a GPU.

``python -m tests.attention_cases`` runs them in Triton's interpreter, in a process of its own
because that is chosen when triton is imported, and prints what went wrong as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import torch

from tests.product_cases import Case, compare


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Lengths that fill no block, heads that share keys, every kind of bias, memory orders."""
    gen = torch.Generator().manual_seed(0)

    def t(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(of)

    def case(name: str, feed: dict[str, torch.Tensor], **how: object) -> Case:
        return Case(name, feed, lambda g, **given: g.attention(*given.values(), **how))

    def qkv(b: int, h: int, s: int, d: int, keys: int = 0, heads: int = 0, values: int = 0) -> dict:
        k = b, heads or h, keys or s
        return {"q": t(b, h, s, d), "k": t(*k, d), "v": t(*k, values or d)}

    yield case("plain", qkv(2, 2, 70, 64))
    yield case("causal, shared keys, a scale", qkv(1, 4, 130, 32, heads=2), causal=True, scale=0.3)
    yield case("more keys than queries", qkv(1, 2, 3, 64, keys=200), causal=True)
    yield case("fewer keys than queries", qkv(1, 1, 150, 16, keys=40), causal=True)
    yield case("features that fill no lanes", qkv(1, 2, 49, 24, values=40))
    yield case("one query", qkv(2, 3, 1, 64, keys=77))
    yield case("bias for each head", qkv(2, 2, 49, 32) | {"bias": t(2, 49, 49)})
    wide = t(2, 1, 1, 90, of=torch.float32)
    yield case("bias for each key, in float32", qkv(2, 2, 33, 32, keys=90) | {"bias": wide})
    mask = torch.rand(1, 1, 60, 60, generator=gen) < 0.5
    mask[..., 5, :] = False  # a query that sees no key
    yield case("a mask, and causal", qkv(2, 2, 60, 32) | {"bias": mask}, causal=True)
    nothing = t(70, 70)
    nothing[:20] = -torch.inf
    yield case("queries that see no key", qkv(1, 2, 70, 16) | {"bias": nothing})
    joined = t(2, 65, 3, 2, 32)  # as it comes out of one projection
    yield case("parts of one tensor", dict(zip("qkv", joined.permute(2, 0, 3, 1, 4), strict=True)))
    yield case("without a batch", {name: x[0] for name, x in qkv(1, 2, 70, 32).items()})


def main() -> None:
    from tests.triton_interpreter import install

    warnings.simplefilter("ignore")
    install()
    count, failed = 0, []
    for each in cases(torch.float16):  # the interpreter multiplies no bfloat16
        ran, wrong = compare(each, "cpu", most=1)
        count, failed = count + ran, [*failed, *wrong]
    print(json.dumps({"count": count, "failed": failed}))


if __name__ == "__main__":
    main()
