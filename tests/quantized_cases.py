"""Linear layers of 8- and 4-bit weights: in Triton's interpreter, and on a GPU.

``python -m tests.quantized_cases`` runs them in the interpreter, in a process of its own because
that is chosen when triton is imported, and prints what went wrong as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch

from deuteron.policy import Policy
from deuteron.target import target
from tests import by_hand
from tests.product_cases import Case, compare


def stored(
    bits: int, columns: int, steps: int, group: int, of: torch.dtype, gen: torch.Generator
) -> dict[str, torch.Tensor]:
    """A weight of all numbers there are, scales, and zeros that are not whole."""
    low, high, kind = (-128, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    weight = torch.randint(low, high, (columns, steps * bits // 8), generator=gen).to(kind)
    scale = (torch.rand(columns, steps // group, generator=gen) + 0.5) * 2.0**-bits
    zero = torch.randn(columns, steps // group, generator=gen) * 2 + (8 if bits == 4 else 0)
    return {"w": weight, "s": scale.to(of), "z": zero.to(of)}


def cases(dtype: torch.dtype, large: bool = False) -> Iterator[Case]:
    """Both widths, with and without zeros, rows that fill no tile, groups of all kinds, and what
    may follow. ``large``: sizes that share out the sum on a whole GPU."""
    gen = torch.Generator().manual_seed(0)

    def t(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(of)

    def case(name: str, x: torch.Tensor, columns: int, bits: int, group: int, **more: Any) -> Case:
        kind = more.pop("of", dtype)
        given = stored(bits, columns, x.shape[-1], group, kind, gen)
        if not more.pop("zeros", True):
            del given["z"]
        how = {"bits": bits, "group": group}
        then = more.pop("then", lambda g, y, **_: y)

        def write(g: Any, x: Any, w: Any, s: Any, z: Any = None, b: Any = None, **rest: Any) -> Any:
            return then(g, g.linear_quantized(x, w, s, z, b, **how), **rest)

        return Case(f"{name}, {bits} bits", {"x": x, **given, **more}, write)

    for bits in (4, 8):
        yield case("one row", t(1, 256), 71, bits, 128, zeros=False, b=t(71))
        yield case("few rows", t(3, 192), 130, bits, 64, b=t(130))
        yield case("means far from 0", t(2, 256) + 10, 40, bits, 32, of=torch.float32)
        yield case("many rows", t(2, 35, 96), 136, bits, 96, b=t(136))
        yield case("rows in two halves", t(11, 640), 40, bits, 128, b=t(40), of=torch.float32)
        yield case("turns that not all warps take", t(3, 1408), 24, bits, 1408, zeros=bits == 4)
        yield case("tiles of 32", t(20, 128), 40, bits, 128, zeros=False)
    yield case(
        "gelu and a residual",
        t(5, 256),
        72,
        4,
        128,
        b=t(72),
        r=t(5, 72),
        then=lambda g, y, r: g.gelu(y) + r,
    )
    if large:
        for bits in (4, 8):
            for rows in (1, 7, 16, 17, 64, 300):
                yield case(f"{rows} rows", t(rows, 4096), 1000, bits, 128, b=t(1000))
            yield case("a group to a row", t(4, 11008), 512, bits, 11008, zeros=False)


def straight() -> Iterator[tuple[int, list[str]]]:
    """Few rows, whose numbers go straight to registers, by every tiling."""
    from deuteron.engines.triton.kernels import TritonKernels
    from deuteron.engines.triton.quantized import QUANTIZED

    gpu, engine, kinds = target("h200"), TritonKernels(), cycle((torch.float16, torch.bfloat16))
    engine.every = QUANTIZED[1:]
    for some in zip(*(cases(dtype) for dtype in (torch.float16, torch.bfloat16)), strict=True):
        if engine.refuse(some[0].region(), gpu, Policy()) is None:
            case = some[next(kinds) == torch.bfloat16]
            yield by_hand.compare(
                case.name, case.region(), case.feed, "cpu", 3, gpus=(gpu,), engine=engine
            )


def main() -> None:
    from tests.gluon_interpreter import install

    warnings.simplefilter("ignore")
    install()
    several = (compare(case, "cpu", most=2) for case in cases(torch.float16))  # no bfloat16 there
    found = [*several, *straight()]
    failed = [wrong for _, each in found for wrong in each]
    print(json.dumps({"count": sum(count for count, _ in found), "failed": failed}))


if __name__ == "__main__":
    main()
