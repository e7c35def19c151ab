"""Small graphs that generated code once got wrong, or that are easily got wrong: kept as cases.

Each runs in torch's interpreter of scalar programs, on the CPU engine and in Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deuteron.ops.emit import Ops, Sym
from deuteron.ops.evaluate import evaluate
from tests.codegen_cases import Case, graph_of

INF, NAN = float("inf"), float("nan")


def kept_cases() -> Iterator[Case]:
    """All of them."""
    torch.manual_seed(0)
    yield from _functions()
    yield from _of_two()
    yield from _whole_numbers()
    yield from _places()
    yield from _rows()
    yield from _huge()
    yield from _equal()


def _functions() -> Iterator[Case]:
    whole = torch.arange(-120, 120)
    yield graph_of("exp2 of whole numbers", lambda g, x: g.exp2(x), x=whole)
    near = torch.tensor([-1.0, -0.999, -0.5, -1e-8, 0.0, 1e-8, 3.0, INF, -INF, NAN, -2.0] * 3)
    yield graph_of("log1p down to -1", lambda g, x: g.log1p(x), x=near)
    parts = torch.tensor([-0.3, -0.0, 0.0, 0.3, -0.5, 0.5, -0.7, 1.5, -2.5, INF, -INF, NAN])
    for x in (parts, parts.double()):
        for name in ("round", "trunc", "ceil", "floor"):  # infinities show the sign of 0
            what = f"{name} to a zero with a sign in {x.dtype}"
            case = graph_of(what, lambda g, x, f=name: g.reciprocal(g.call(f, x)), x=x)
            yield replace(case, strict=True)
    yield graph_of("isinf of whole numbers", lambda g, x: g.isinf(x), x=whole)
    yield graph_of("isnan of bools", lambda g, x: g.isnan(x), x=whole > 0)
    base = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, INF, -INF, NAN, 1e-3])
    powers = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, -3.0, 0.5, -0.5, 2.5, INF, -INF, NAN])
    x, y = (t.contiguous() for t in torch.broadcast_tensors(base[:, None], powers[None, :]))
    yield graph_of("pow of every kind", lambda g, x, y: g.pow(x, y), x=x, y=y)
    for number in powers[:9].tolist():
        yield graph_of(f"pow {number}", lambda g, x, n=number: g.pow(x, n), x=base)
    near = torch.tensor([0.0, -0.0, 1e-9, -1e-3, 0.1, -0.3, 0.7, 0.999, 1.0, -2.0, INF, -INF, NAN])
    for x in (near, near.double()):
        yield graph_of(f"tanhshrink near 0 in {x.dtype}", lambda g, x: g.tanhshrink(x), x=x[3:10])
        yield graph_of(f"tanhshrink in {x.dtype}", lambda g, x: g.tanhshrink(x), x=x)
    small = torch.full((4,), 0.0123, dtype=torch.float64)
    yield graph_of("tanhshrink that cancels", lambda g, x: g.sin(g.tanhshrink(x)), x=small)
    for number in (-4.5, -7.0, -20.0, -37.0):  # of which 1 + erf keeps few digits or none
        far = torch.tensor([number], dtype=torch.float64)
        yield graph_of(f"gelu of {number} in f64", lambda g, x: (g.gelu(x), g.ndtr(x)), x=far)
    half = torch.randn(1542) * 1e-4  # around ½ the roundings of ndtr are all that cancels leaves
    yield graph_of(
        "the variance of ndtr near 0",
        lambda g, x: g.var(g.ndtr(x), axes=(0,), keepdim=True, correction=0),
        x=half,
    )
    odd = torch.tensor([NAN, INF, -INF, 0.0, -0.0, -2.0, 1.0] * 11)
    yield graph_of(
        "clamp_nan", lambda g, x: (g.clamp_nan(x, min=-1.0), g.clamp_nan(x, max=0.5)), x=odd
    )
    numbers = odd[:72].reshape(1, 2, 6, 6)
    yield graph_of(
        "the largest number of a window",
        lambda g, x: g.max_pool(g.where(g.isnan(x), -INF, x), kernel=(3, 3), stride=(2, 2)),
        x=numbers,
    )
    yield graph_of(
        "what ptxas takes for true of nan",
        lambda g, x: (
            g.ge(g.abs(x * 3.0), -1.0),
            g.gt(g.exp2(x), -1.0),
            g.ge(g.abs(x * 3.0) + 1.0, 0.0),
            g.le(-1.0, g.abs(x * 3.0)),
            g.where(g.ge(g.abs(x * 3.0), 0.0), 5.0, x),
        ),
        x=odd,
    )
    yield graph_of("pow of a constant", lambda g, x: g.pow(2.0, x), x=torch.randn(33))


def _of_two() -> Iterator[Case]:
    """Functions of two numbers, signs of zeros included: quotients of up to 2¹¹⁰, which take many
    steps of a division; every kind of operand against every other."""
    some = [0.0, -0.0, 1.0, -1.0, 3.0, -2.5, 0.1, -0.3, 1e-3, 7e5, -1e10, 3e15, -1e20, 2.5e-13]
    for dtype in (torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        given = torch.tensor([*some, 1 + eps, INF, -INF, NAN], dtype=dtype)
        x, y = (t.contiguous() for t in torch.broadcast_tensors(given[:, None], given[None, :]))
        for op in ("remainder", "floor_div"):
            want = evaluate(
                graph_of(op, lambda g, x, y, o=op: getattr(g, o)(x, y), x=x, y=y).graph,
                {"x": x, "y": y},
            )["y0"]
            yield graph_of(
                f"{op} of every kind of {dtype}",
                lambda g, x, y, e, o=op: (
                    (z := getattr(g, o)(x, y)),
                    g.eq(z, e),
                    g.isnan(z),
                    g.lt(g.reciprocal(z), 0.0),
                ),
                x=x,
                y=y,
                e=want,
            )
            for number in (3.0, -0.7):
                yield graph_of(
                    f"{op} of {dtype} by {number}",
                    lambda g, x, o=op, n=number: getattr(g, o)(x, n),
                    x=given,
                )
        for op, close in (("atan2", 4 * eps), ("pow", 4 * eps)):
            want = getattr(torch, op)(x, y)
            yield graph_of(
                f"{op} of every kind of {dtype}",
                lambda g, x, y, e, o=op, c=close: (
                    (z := getattr(g, o)(x, y)),
                    g.logical_or(g.eq(z, e), g.le(g.abs(g.sub(g.div(z, e), 1.0)), c)),
                    g.lt(g.reciprocal(z), 0.0),
                ),
                x=x,
                y=y,
                e=want,
            )
    rows = torch.randn(5, 33) * 10
    yield graph_of(
        "remainder of rows by one number of each",
        lambda g, x: g.remainder(x, g.max(x, axes=(1,), keepdim=True)),
        x=rows,
    )


def _whole_numbers() -> Iterator[Case]:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        ends = torch.tensor([info.min, info.min + 1, -1 % info.max, 0, 1, info.max - 1, info.max])
        x = ends.to(dtype).repeat(5)

        def wrap(g, x):
            total = g.add(g.mul(x, x), x)
            return g.neg(x), g.gt(total, g.abs(x)), g.cast(g.square(x), dtype="f32")

        yield graph_of(f"{dtype} wraps around", wrap, x=x)
    small = torch.arange(0, 250, 7).to(torch.uint8)
    yield graph_of("clamp of bytes", lambda g, x: g.clamp(x, min=5.0, max=90.0), x=small)
    yield graph_of(
        "casts wrap",
        lambda g, x: g.cast(g.cast(x, dtype="i8"), dtype="i32"),
        x=torch.arange(-600, 600, 37, dtype=torch.int32),
    )
    yield from _whole_divisions()
    flags = torch.arange(40) % 3 == 0
    yield graph_of(
        "bools add up to or", lambda g, x, y: (g.add(x, y), g.mul(x, y)), x=flags, y=~flags.roll(1)
    )
    yield graph_of(
        "sum of bytes",
        lambda g, x: g.sum(x, axes=(1,), keepdim=False),
        x=torch.full((5, 70), 255, dtype=torch.uint8),
    )


def _whole_divisions() -> Iterator[Case]:
    """Remainders, quotients and powers of integers: by numbers, and by tensors without a 0."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        some = [info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, 10, info.max - 1, info.max]
        some = torch.tensor([n for n in some if info.min <= n]).to(dtype)
        for by in (7, 1, 2, -1, -3, 100):
            if by < 0 and dtype == torch.uint8:
                continue
            yield graph_of(
                f"{dtype} divided by {by}",
                lambda g, x, n=by: (g.remainder(x, n), g.floor_div(x, n)),
                x=some.repeat(3),
            )
        for n in (0, 1, 5, 13, min(1000, info.max)):
            yield graph_of(f"{dtype} to the {n}", lambda g, x, n=n: g.pow(x, n), x=some.repeat(3))
        yield graph_of(f"a number to the {dtype}", lambda g, x: g.pow(-3, x), x=some.repeat(3))
        x, y = (t.contiguous() for t in torch.broadcast_tensors(some[:, None], some[None, :]))
        yield graph_of(f"{dtype} to the tensor", lambda g, x, y: g.pow(x, y), x=x, y=y)
        y = torch.where((y == 0) | (y == -1), y + 3, y)
        yield graph_of(
            f"{dtype} divided by a tensor",
            lambda g, x, y: (g.remainder(x, y), g.floor_div(x, y), g.remainder(100, y)),
            x=x,
            y=y,
        )


def _places() -> Iterator[Case]:
    three = {n: torch.randn(2, 3, 5, 4) for n in "qkv"}

    def heads(g: Ops, q: Sym, k: Sym, v: Sym) -> Sym:
        rows = [g.reshape(g.permute(t, dims=(0, 2, 1, 3)), shape=(2, 5, 12)) for t in (q, k, v)]
        return g.concat(*rows, axis=2)

    yield graph_of("heads side by side", heads, **three)
    around = {"low": (2, 1), "high": (1, 3), "value": 7.0}
    yield graph_of(
        "a reshape in a frame",
        lambda g, x: g.pad(g.reshape(x, shape=(12, 5)), **around),
        x=torch.randn(3, 4, 5),
    )
    x = torch.randn(5, 37)
    yield graph_of(
        "flip of a pad",
        lambda g, x: g.flip(g.pad(x, low=(0, 3), high=(0, 2), value=1.5), axes=(1,)),
        x=x,
    )
    for mode in ("reflect", "replicate"):
        yield graph_of(
            f"{mode} around a sum of two",
            lambda g, x, y, m=mode: g.pad(g.add(x, y), low=(1, 4), high=(2, 5), mode=m),
            x=x,
            y=torch.randn(37),
        )
    index = torch.randint(0, 37, (5, 50))
    yield graph_of(
        "gather of a product", lambda g, x, i: g.gather(g.mul(x, x), i, axis=1), x=x, i=index
    )
    yield graph_of(
        "gather of a pad",
        lambda g, x, i: g.gather(g.pad(x, low=(0, 1), high=(0, 0)), i, axis=1),
        x=x,
        i=index,
    )
    yield graph_of(
        "pad of an embedding",
        lambda g, w, i: g.pad(g.embedding(w, i), low=(1, 2), high=(0, 1)),
        w=torch.randn(6, 19),
        i=torch.randint(0, 6, (7,), dtype=torch.int32),
    )
    yield graph_of(
        "embedding, reshaped, then its rows normalised",
        lambda g, w, i: g.layer_norm(g.embedding(w, i), None, None, dims=1),
        w=torch.randn(6, 70),
        i=torch.randint(0, 6, (4,)),
    )
    yield graph_of(
        "bytes repeated, in another order",
        lambda g, x: _repeated(g, g.expand(x, shape=(3, 257, 6))),
        x=torch.randint(-128, 128, (257, 6), dtype=torch.int8),
    )
    for shape in ((3, 70), (2, 3, 4, 18)):
        seed = torch.tensor(-(2**40) + 7)
        yield graph_of(
            f"dropout of {shape}, turned round",
            lambda g, x, s: g.permute(g.dropout(x, s, p=0.3), dims=tuple(range(x.rank))[::-1]),
            x=torch.randn(shape),
            s=seed,
        )


def _repeated(g: Ops, x: Sym) -> tuple[Sym, ...]:
    """Indices that LLVM packs in pairs of 16 bits, whose constants ptxas drops on Hopper
    (codegen/triton_compile.py)."""
    y = g.one("reshape", x, shape=(6, 257, 3))
    most = g.one("max", g.one("gt", y, y), axes=(0, 1, 2), keepdim=True)
    return y, g.one("to_layout", y, layout="nhwc"), most, g.one("exp", x)


SHAPE = (4, 8)  # of the channels and the positions of each
NORMS = {
    "layer norm": lambda g, x, b: g.layer_norm(x, None, b, dims=1),
    "rms norm": lambda g, x, b: g.rms_norm(x, b, dims=1),
    "rms norm of columns": lambda g, x, b: g.rms_norm(g.permute(x, dims=(1, 0)), None, dims=1),
    "group norm": lambda g, x, b: g.group_norm(
        g.reshape(x, shape=(5, *SHAPE)), None, None, groups=2
    ),
    "instance norm": lambda g, x, b: g.instance_norm(g.reshape(x, shape=(5, *SHAPE)), None, None),
    "batch norm": lambda g, x, b: g.batch_norm_train(x, None, b, None, None),
    "variance": lambda g, x, b: g.var(x, axes=(1,), keepdim=True, correction=1),
}


def _huge() -> Iterator[Case]:
    """Rows whose squares overflow, of which 1 / √inf makes the bias or 0."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        most = torch.finfo(dtype).max
        x = torch.randn(5, 32, dtype=torch.float64)
        x[0, 3], x[1], x[2, ::2] = most**0.5 * 2, x[1] * most**0.55, -(most**0.9)
        x[3, 7], x[4, 5] = most, -INF
        for name, write in NORMS.items():
            bias = torch.full((32,), 3.0, dtype=dtype)
            case = graph_of(f"{name} of huge {dtype}", write, x=x.to(dtype), b=bias)
            yield replace(case, strict=name.startswith("rms"))
        for columns in (3, 40):  # sums overflow, and differences from the mean
            x = most * torch.rand(6, columns, dtype=torch.float64).mul_(0.1).add_(0.85)
            x[0], x[1], x[2, 1:] = most * 0.9, -most, -most
            x[3, 1], x[4, 2] = INF, -most
            case = graph_of(f"variance of the largest {dtype}, {columns}",
                            lambda g, x: g.var(x, axes=(1,)), x=x.to(dtype))  # fmt: skip
            yield replace(case, strict=True)


def _equal() -> Iterator[Case]:
    """Norms of equal numbers are exactly their bias, also where what is equal is computed, where
    it comes from another norm, and where the row is long."""

    def whether_bias(g: Ops, y: Sym) -> tuple[Sym, ...]:
        return y, g.eq(y, 3.0)

    rows = torch.tensor([0.731, -1e-3, 1e4, 3e-30, 0.0])[:, None].repeat(1, 777)
    for dtype in (torch.float32, torch.bfloat16):
        x, b = rows.to(dtype), torch.full((777,), 3.0, dtype=dtype)
        yield graph_of(
            f"layer norm of equal {dtype}",
            lambda g, x, b: whether_bias(g, g.layer_norm(x, None, b, dims=1)),
            x=x,
            b=b,
        )
    norm = NORMS["layer norm"]
    x, b = rows[:, :700], torch.full((700,), 3.0)
    yield graph_of(
        "norm of equal gelu", lambda g, x, b: whether_bias(g, norm(g, g.gelu(x), b)), x=x, b=b
    )
    yield graph_of(
        "norm of a norm", lambda g, x, b: whether_bias(g, norm(g, norm(g, x, b), b)), x=x, b=b
    )
    yield graph_of(
        "norm of equal columns",
        lambda g, x, b: whether_bias(g, norm(g, g.permute(x, dims=(1, 0)), b)),
        x=x.mT.contiguous(),
        b=b,
    )
    yield graph_of(
        "norms of equal channels",
        lambda g, x: (
            g.group_norm(x, None, None, groups=2),
            g.eq(g.group_norm(x, None, None, groups=2), 0.0),
        ),
        x=rows[0, :700].reshape(1, 4, 25, 7),
    )
    yield graph_of(
        "batch norm of equals",
        lambda g, x, b: g.batch_norm_train(x, None, b, None, None)[0],
        x=rows[0].reshape(1, 1, 777).repeat(3, 2, 1),
        b=torch.full((2,), 3.0),
    )
    long = torch.full((2, 70001), 0.731)
    yield graph_of(
        "a long norm of equals",
        lambda g, x, b: whether_bias(g, norm(g, x, b)),
        x=long,
        b=torch.full((70001,), 3.0),
    )
    far = torch.randn(3, 5000) + 1000.0
    yield graph_of("norm of a large mean", lambda g, x: g.layer_norm(x, dims=1), x=far)


def _left_over(g, rest, x):
    """Rows as whole parts of their largest, and what that leaves, which may take the memory of what
    was left before."""
    x = rest + x
    largest = g.max(g.abs(x), axes=(-1,), keepdim=True)
    near = g.round(x / largest)
    return g.cast(near, dtype="i8"), x - near * largest


def _rows() -> Iterator[Case]:
    yield graph_of("rounded rows", _left_over, rest=torch.randn(9, 40), x=torch.randn(9, 40))
    last = torch.randn(2, 9, 4).transpose(1, 2)
    last[0, 1, 2], last[1, 2, 3] = INF, NAN
    yield graph_of(
        "statistics of channels last with an infinity",
        lambda g, x: g.batch_norm_train(x, momentum=0.3, eps=0.001),
        x=last,
    )
    alone = torch.tensor([0.6, -0.14, -0.13, 0.8], dtype=torch.float64).reshape(4, 1, 1, 1)
    yield graph_of(
        "group norm of single elements",
        lambda g, x, w: g.group_norm(x, w, None, groups=1, eps=0.001),
        x=alone,
        w=torch.tensor([1.767], dtype=torch.float64),
    )
    huge = torch.tensor([[1.7e20], [-3.3e19], [5.0], [1.1]])
    yield graph_of(
        "softmax of a product in one column", lambda g, x: g.softmax(g.silu(x), axis=1), x=huge
    )
    yield graph_of(
        "variance of one product",
        lambda g, x: g.var(g.silu(x), axes=(1,), keepdim=False, correction=1),
        x=huge,
    )
    tenths = torch.full((3, 9000), 0.1)
    yield graph_of("a long row of equals", lambda g, x: g.sum(x, axes=(1,)), x=tenths)
    yield graph_of("long columns of equals", lambda g, x: g.sum(x, axes=(0,)), x=tenths.mT)
    yield graph_of(
        "equals in many short rows",
        lambda g, x: g.mean(g.exp(x), axes=(0, 2)),
        x=torch.full((700, 2, 21), 0.1),
    )
    tail = torch.linspace(-7.0, -3.0, 70)
    yield graph_of("the tail of gelu by tanh", lambda g, x: g.gelu(x, approximate="tanh"), x=tail)
    odd = torch.randn(6, 70)
    odd[1, 40], odd[2, 3], odd[2, 60], odd[3, 69], odd[4] = NAN, INF, INF, -INF, 0.5
    for op in ("argmax", "argmin"):
        yield graph_of(
            f"{op}: nan wins, the first of equals",
            lambda g, x, o=op: getattr(g, o)(x, axis=1, keepdim=False),
            x=odd,
        )
        yield graph_of(
            f"{op} down the columns",
            lambda g, x, o=op: getattr(g, o)(x, axis=0, keepdim=True),
            x=odd,
        )
        yield graph_of(f"{op} of all", lambda g, x, o=op: getattr(g, o)(x, axis=None), x=odd[4:])
    scores = torch.randn(5, 70)
    target = torch.tensor([0, 69, -100, 7, 7])
    for smooth in (0.0, 0.2):
        yield graph_of(
            f"cross entropy, smoothed by {smooth}",
            lambda g, x, t, w, s=smooth: g.cross_entropy(
                x, t, w, label_smoothing=s, reduction="none"
            ),
            x=scores,
            t=target,
            w=torch.rand(70) + 0.5,
        )
    yield graph_of(
        "bytes as classes, of which there are more than 255",
        lambda g, x, t: (
            g.nll_loss(x, t, reduction="none"),
            g.nll_loss(x, t, reduction="none", ignore_index=170),
        ),
        x=torch.randn(3, 300),
        t=torch.tensor([0, 170, 255], dtype=torch.uint8),
    )
    yield graph_of("nll, averaged", lambda g, x, t: g.nll_loss(x, t), x=scores, t=target)
    yield graph_of(
        "the score of the best class",
        lambda g, x: g.gather(x, g.argmax(x, axis=1, keepdim=True), axis=1),
        x=scores,
    )
