"""Products with what follows them, for the hand-written kernel: in the interpreter, and on a GPU.

``python -m tests.interpreted tests.product_cases`` runs them in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region
from deuteron.policy import Policy
from deuteron.target import target
from tests import by_hand
from tests.interpreted import tell


class Case(NamedTuple):
    """Tensors by name, and what a graph makes of them: one value, or a tuple."""

    name: str
    feed: dict[str, torch.Tensor]
    write: Callable[..., Any]

    def region(self) -> Region:
        graph = by_hand.graph_of(self.name, self.feed, self.write)
        return Region(graph, frozenset(), 0)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Both factors in both memory orders, sizes that fill no tile, all that may follow."""
    t = by_hand.drawn(0, dtype)
    x, w, bias, res = t(70, 72), t(136, 72), t(136), t(70, 136)
    yield Case("linear", {"x": x, "w": w}, lambda g, x, w: g.linear(x, w))
    yield Case(
        "bias, exact gelu",
        {"x": x, "w": w, "b": bias},
        lambda g, x, w, b: g.gelu(g.linear(x, w, b)),
    )
    yield Case(
        "residual of three dimensions",
        {"x": t(2, 35, 72), "w": w, "b": bias, "r": t(2, 35, 136)},
        lambda g, x, w, b, r: g.linear(x, w, b) + r,
    )
    yield Case(
        "scale before the bias, silu, a gate, a number for each row",
        {"x": x, "w": w, "s": t(136), "b": bias, "r": res, "n": t(70, 1)},
        lambda g, x, w, s, b, r, n: g.silu(g.linear(x, w) * s + b) * r * n,
    )
    yield Case(
        "a product of matrices, and casts",
        {"x": x, "w": t(72, 136), "r": t(70, 136, of=torch.float32)},
        lambda g, x, w, r: g.cast(g.matmul(x, w), dtype="f32") * 0.5 + r,
    )
    gate = {"x": t(2, 35, 72), "w": w, "u": t(136, 72)}
    yield Case("a gate", gate, lambda g, x, w, u: g.silu(g.linear(x, w)) * g.linear(x, u))
    yield Case(
        "a gate with biases and a residual",
        gate | {"b": bias, "c": t(136), "r": t(2, 35, 136)},
        lambda g, x, w, u, b, c, r: g.gelu(g.linear(x, w, b)) * g.linear(x, u, c) + r,
    )
    yield Case(
        "two residuals, one in float32",
        {"x": x, "w": w, "r": t(70, 136, of=torch.float32), "s": res},
        lambda g, x, w, r, s: g.linear(x, w) + g.cast(r, dtype=dtype) + s,
    )
    turned = {"x": t(72, 64).T, "w": t(136, 72).T}
    yield Case("both turned", turned, lambda g, x, w: g.relu(g.matmul(x, w)))
    parts = {"x": t(33, 160)[:, 16:88], "w": t(136, 80)[:, :72]}
    yield Case("lines with gaps", parts, lambda g, x, w: g.linear(x, w))
    few = {"x": t(1, 256), "w": t(40, 256), "b": t(40)}
    yield Case("one row", few, lambda g, x, w, b: g.tanh(g.linear(x, w, b)))
    many = {"x": t(300, 24), "w": t(520, 24), "one": t(1)}
    yield Case("many tiles", many, lambda g, x, w, one: g.linear(x, w) - one)


def batched(dtype: torch.dtype) -> Iterator[Case]:
    """Many products at once, batches that share a factor, lines that begin anywhere."""
    t = by_hand.drawn(1, dtype)
    q, k = t(2, 49, 3, 32).transpose(1, 2), t(2, 49, 3, 32).permute(0, 2, 3, 1)
    yield Case(
        "windows: heads side by side, a bias for each head, a mask for each image",
        {"q": q, "k": k, "b": t(3, 49, 49), "m": t(2, 1, 1, 49)},
        lambda g, q, k, b, m: g.matmul(q, k) * 0.25 + b + m,
    )
    yield Case(
        "odd lines, turned", {"x": t(5, 49, 49).mT, "w": t(5, 49, 32)},
        lambda g, x, w: g.matmul(x, w),
    )  # fmt: skip
    even = {"x": t(3, 70, 72), "w": t(3, 72, 136), "r": t(3, 70, 136), "n": t(3, 70, 1)}
    yield Case(
        "a residual, a number for each row",
        even,
        lambda g, x, w, r, n: g.gelu(g.matmul(x, w) * n) + r,
    )
    yield Case(
        "one second factor for all heads, one first factor for all images",
        {"x": t(2, 1, 40, 72), "w": t(3, 72, 64)},
        lambda g, x, w: g.tanh(g.matmul(x, w)),
    )
    yield Case(
        "rows that lie apart, by one weight",
        {"x": t(2, 24, 5, 40).transpose(1, 2), "w": t(72, 40), "b": t(72)},
        lambda g, x, w, b: g.relu(g.linear(x, w, b)),
    )
    yield Case(
        "a gate of odd lines",
        {"x": t(20, 37), "w": t(37, 50), "u": t(37, 50)},
        lambda g, x, w, u: g.silu(g.matmul(x, w)) * g.matmul(x, u),
    )


def shared_out(dtype: torch.dtype) -> Iterator[Case]:
    """Few tiles of long sums."""
    t = by_hand.drawn(2, dtype)
    yield Case(
        "few rows, bias, gelu",
        {"x": t(9, 1080), "w": t(72, 1080, scale=0.03), "b": t(72)},
        lambda g, x, w, b: g.gelu(g.linear(x, w, b)),
    )
    yield Case(
        "a gradient of a weight, and a residual",
        {"x": t(1200, 40).T, "dy": t(1200, 72, scale=0.03), "r": t(40, 72)},
        lambda g, x, dy, r: g.matmul(x, dy) + r,
    )
    yield Case(
        "batches of them",
        {"x": t(2, 16, 1030), "w": t(2, 1030, 24, scale=0.03)},
        lambda g, x, w: g.matmul(x, w),
    )


def several(dtype: torch.dtype) -> Iterator[Case]:
    """Products of which more than one result is kept, as training does."""
    t = partial(by_hand.drawn(5, dtype), scale=0.3)
    x, w, u = t(150, 72), t(200, 72), t(200, 72)

    def kept(g: Any, x: Any, w: Any, b: Any) -> Any:
        z = g.linear(x, w, b)
        return z, g.gelu(z)

    def gate(g: Any, x: Any, w: Any, u: Any) -> Any:
        one, two = g.linear(x, w), g.linear(x, u)
        return one, two, g.silu(one) * two

    def back(g: Any, dy: Any, w: Any, a: Any, b: Any) -> Any:
        dh, s = g.matmul(dy, w), g.sigmoid(a)
        return dh * s * a, dh * b * s * (a * (1.0 - s) + 1.0), a * s * b

    yield Case("an activation and what it is of", {"x": x, "w": w, "b": t(200)}, kept)
    yield Case("a gate, and both of its products", {"x": x, "w": w, "u": u}, gate)
    z = {"a": t(150, 200), "b": t(150, 200)}
    yield Case("back through a gate", {"dy": t(150, 72), "w": t(72, 200)} | z, back)


def of_bytes(kind: torch.dtype) -> Iterator[Case]:
    """Products of bytes with the scales that stand around them."""
    gen = torch.Generator().manual_seed(3)

    def t(*shape: int) -> torch.Tensor:
        if kind is torch.int8:
            return torch.randint(-128, 128, shape, generator=gen, dtype=kind)
        return torch.randn(shape, generator=gen).to(kind)

    x, w = t(70, 144), t(136, 144)
    rows, columns = torch.rand(70, 1, generator=gen), torch.rand(136, generator=gen)
    bias, res = torch.randn(136, generator=gen), torch.randn(70, 136, generator=gen)
    yield Case("alone", {"x": x, "w": w}, lambda g, x, w: g.linear(x, w))
    scaled = {"x": x, "w": w, "r": rows, "c": columns, "b": bias}
    yield Case(
        "scales, bias and gelu, to 16 bits",
        scaled,
        lambda g, x, w, r, c, b: g.cast(
            g.gelu(g.cast(g.linear(x, w), dtype="f32") * r * c + b), dtype="bf16"
        ),
    )
    yield Case(
        "a matrix that lies turned, and a residual",
        {"x": x, "w": w.T, "r": res},
        lambda g, x, w, r: g.cast(g.matmul(x, w), dtype="f32") * 0.01 + r,
    )


def of_blocks(kind: torch.dtype) -> Iterator[Case]:
    """Products of 8-bit floats with scales for blocks, and results of 8 bits."""
    gen = torch.Generator().manual_seed(4)
    most = torch.finfo(kind).max

    def case(name: str, rows: int, n: int, k: int, block: int, then: Any = None, **more: Any):
        across = -(-k // block)
        given = {"x": torch.randn(rows, k, generator=gen).to(kind)}
        given |= {"w": torch.randn(n, k, generator=gen).to(kind)}
        given |= {"r": torch.rand(rows, across, generator=gen) + 0.5}
        given |= {"c": torch.rand(-(-n // block), across, generator=gen) + 0.5}
        how = {"block": block, "dtype": more.pop("dtype", "f32")}

        def write(g: Any, x: Any, w: Any, r: Any, c: Any, b: Any = None, **rest: Any) -> Any:
            y = g.linear_fp8(x, w, r, c, b, **how)
            return y if then is None else then(g, y, **rest)

        return Case(name, given | more, write)

    def held(g: Any, y: Any) -> Any:
        return g.cast(g.clamp(y * 0.1, min=-most, max=most), dtype=kind)

    bias, res = torch.randn(72, generator=gen), torch.randn(5, 72, generator=gen).bfloat16()
    yield case("few rows", 5, 72, 192, 64, b=bias, dtype="bf16")
    yield case("ragged blocks", 20, 70, 80, 32)
    yield case("one block", 70, 40, 48, 128, dtype="f16")
    yield case("silu and a residual", 5, 72, 128, 128, lambda g, y, z: g.silu(y) + z, z=res)
    yield case("back to 8 bits", 40, 136, 160, 32, held)


def singles() -> Iterator[Case]:
    """Products of float32, which are taken where the policy lets tensor cores multiply them."""
    gen = torch.Generator().manual_seed(5)
    x, w, b = (torch.randn(n, generator=gen) for n in ((70, 72), (136, 72), (136,)))
    yield Case("float32", {"x": x, "w": w, "b": b}, lambda g, x, w, b: g.gelu(g.linear(x, w, b)))
    odd, turned = torch.randn(3, 37, 51, generator=gen), torch.randn(3, 51, 20, generator=gen)
    yield Case("batches", {"x": odd, "w": turned}, lambda g, x, w: g.matmul(x, w))


THREE = Policy(float32="tf32x3")


def compare(
    case: Any, device: str, most: int = 2, policy: Policy | None = None
) -> tuple[int, list[str]]:
    """How many candidates for a region with a name and a feed ran, and what is wrong with them; all
    are taken."""
    region, policy = case.region(), policy or Policy()
    refusal = TritonKernels().refuse(region, target("h200"), policy)
    if refusal is not None:
        return 0, [f"{case.name}: refused, {refusal.reason}"]
    return by_hand.compare(case.name, region, case.feed, device, most, policy=policy)


def main() -> None:
    kind = torch.float16  # the interpreter multiplies no bfloat16
    groups = (cases(kind), batched(kind), shared_out(kind), several(kind), of_bytes(torch.int8))
    groups = (*groups, of_blocks(torch.float8_e4m3fn))
    under: list[tuple[Case, Policy | None]] = [(case, None) for group in groups for case in group]
    under += [(case, THREE) for case in singles()]
    tell(compare(case, "cpu", policy=policy) for case, policy in under)


if __name__ == "__main__":
    main()
