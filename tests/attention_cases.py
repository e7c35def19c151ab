"""Attention for the hand-written kernel: in the interpreter, and on a GPU.

``python -m tests.attention_cases`` runs them in Triton's interpreter, in a process of its own
because that is chosen when triton is imported, and prints what went wrong as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import deuteron as dt
from deuteron.ops.evaluate import evaluate
from tests.product_cases import Case, compare


class Asked(NamedTuple):
    """Tensors by name, and attributes."""

    name: str
    feed: dict[str, torch.Tensor]
    how: dict[str, Any]


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Attention, and with the sums of each query."""
    for name, feed, how in asked(dtype):
        yield Case(name, feed, lambda g, how=how, **given: g.attention(**given, **how))
    yield Case(f"{name}, sums", feed, lambda g, **given: g.attention_lse(**given, **how))


def windows(dtype: torch.dtype) -> Iterator[Case]:
    """Many short sequences, of which a program computes several, and lines that begin anywhere."""
    gen = torch.Generator().manual_seed(6)

    def case(
        name: str, shape: tuple[int, ...], bias: tuple[int, ...] = (), keys: int = 0, **how: Any
    ) -> Case:
        b, h, s, d = shape
        joined = torch.randn(b, max(s, keys), 3, h, d, generator=gen).to(dtype)
        q, k, v = joined.permute(2, 0, 3, 1, 4)
        feed = {"q": q[:, :, :s], "k": k[:, :, : keys or s], "v": v[:, :, : keys or s]}
        if bias:
            feed["bias"] = torch.randn(bias, generator=gen).to(dtype)
        if "dropout" in how:
            feed["seed"] = torch.tensor(5)
        return Case(name, feed, lambda g, **given: g.attention_lse(**given, **how))

    yield case("windows", (7, 2, 49, 32), (2, 49, 49))
    yield case("windows, a bias of their own", (5, 2, 20, 16), (5, 1, 20, 20))
    yield case("windows, causal, dropout", (4, 3, 30, 16), causal=True, dropout=0.3)
    yield case("windows, more queries", (4, 1, 150, 32), (1, 1, 1, 40), keys=40, softcap=2.0)
    yield case("windows, one key", (5, 2, 3, 8), keys=1)
    yield case("lines of 36", (2, 3, 150, 36), causal=True)
    yield case("lines of 7", (2, 2, 140, 7), (2, 140, 140))
    yield case("windows, lines of 10", (6, 2, 12, 10), window=(3, 2))


def _turned(dtype: torch.dtype, seed: int) -> Any:
    """What makes cases of attention whose queries and keys have rotary positions."""
    gen = torch.Generator().manual_seed(seed)

    def case(
        name: str,
        shape: tuple[int, ...],
        keys: int = 0,
        of: int = 0,
        tables: torch.dtype | None = torch.float32,
        more: tuple[str, ...] = (),
        interleaved: bool = False,
        **how: Any,
    ) -> Case:
        b, h, s, d = shape
        like = b, of or h, keys or s, d
        made = {"q": shape, "k": like, "v": (*like[:3], d + 8)}
        feed = {n: torch.randn(sizes, generator=gen).to(dtype) for n, sizes in made.items()}
        if "side by side" in more:  # as they come out of one projection
            whole = torch.randn(b, s, 2 * like[1] + h, d, generator=gen).to(dtype).transpose(1, 2)
            feed = dict(zip("qkv", whole.split((h, like[1], like[1]), 1), strict=True))
        if tables is not None:
            angles = torch.randn(max(s, like[2]) + how.get("offset", 0), d // 2, generator=gen)
            feed |= {"cos": angles.cos().to(tables), "sin": angles.sin().to(tables)}
        if "lengths" in more:
            feed["k_lengths"] = torch.tensor([like[2] // 2] * b)
        pairs = {"axis": 2, "interleaved": interleaved}

        def write(g: Any, q: Any, k: Any, v: Any, **t: Any) -> Any:
            angles, offset = (t.pop("cos", None), t.pop("sin", None)), how.get("offset", 0)
            if "q alone" in more:
                q = g.rope(q, None, *angles, **pairs)
            elif s == like[2]:
                q, k = g.rope(q, k, *angles, **pairs)
            else:
                q = g.rope(q, None, *angles, **pairs, offset=offset)
                k = g.rope(k, None, *angles, **pairs)
            if "sums" in more:
                return g.attention_lse(q, k, v, **t, **how)
            y = g.attention(q, k, v, **t, **how)
            return (y, k) if "keys" in more else y

        return Case(name, feed, write)

    return case


def turned(dtype: torch.dtype) -> Iterator[Case]:
    """Queries and keys turned by their rotary positions, as they are loaded and ahead: heads that
    share keys, both kinds of pairs, angles from tables and not, positions of their own, keys that
    others read, too, and padding."""
    case = _turned(dtype, 4)
    yield case("turned", (2, 4, 70, 32), of=2, causal=True)
    yield case("neighbours turned, sums", (1, 2, 70, 64), more=("sums",), interleaved=True)
    yield case("turned, no tables", (1, 2, 130, 16), tables=None, window=(40, 9))
    yield case("turned, later", (1, 2, 5, 64), keys=90, of=1, causal=True, offset=85)
    yield case("q alone turned", (1, 2, 9, 32), keys=70, more=("q alone",), tables=dtype)
    yield case("turned keys are read elsewhere", (1, 2, 20, 32), more=("keys",), tables=dtype)
    yield case("turned, padded", (2, 2, 70, 32), more=("lengths",), softcap=2.0, interleaved=True)
    yield case("turned, side by side", (2, 4, 66, 128), of=2, more=("side by side",), causal=True)


def turned_long(dtype: torch.dtype) -> Iterator[Case]:
    """So many that on Hopper warps divide the work."""
    case = _turned(dtype, 5)
    yield case("long", (2, 32, 2000, 64), of=8, causal=True, more=("side by side",))
    both = ("side by side", "sums")
    yield case("long, neighbours", (1, 32, 1030, 128), of=8, interleaved=True, more=both)
    yield case("long, a window", (2, 16, 3001, 64), tables=None, window=(500, 0))


def gradients(dtype: torch.dtype) -> Iterator[Case]:
    """The gradients for q, k, v and a bias that is added."""
    return _gradients(asked(dtype))


def _gradients(asked: Iterator[Asked]) -> Iterator[Case]:
    gen = torch.Generator().manual_seed(1)
    for name, feed, how in asked:
        g = dt.Graph()
        syms = {n: g.tensor(n, x.shape, x.dtype, strides=x.stride()) for n, x in feed.items()}
        for value, y in zip(("out", "lse"), g.attention_lse(**syms, **how), strict=True):
            y.output(value)
        found = evaluate(g.ir(), feed, float64=True)
        out, lse = found["out"], found["lse"]
        grad = torch.randn(out.shape, generator=gen).to(feed["q"].dtype)
        back = {"grad": grad, "out": out.to(feed["q"].dtype), "lse": lse.float(), **feed}
        yield Case(name, back, lambda g, how=how, **t: g.attention_grad(**t, **how))
        if "bias" in feed and feed["bias"].is_floating_point():
            yield Case(name, back, lambda g, how=how, **t: g.attention_full_grad(**t, **how))


def uneven(dtype: torch.dtype) -> Iterator[Case]:
    """Lines of different lengths, so many that on Hopper programs take one after the other, and
    their gradients."""
    for name, feed, how in _uneven(dtype):
        yield Case(name, feed, lambda g, how=how, **given: g.attention_lse(**given, **how))
    yield from _gradients(_uneven(dtype))


def pages(dtype: torch.dtype) -> Iterator[Case]:
    """Sequences in pages: of different lengths, divided, several queries, whole prompts, a window,
    and float32."""
    gen = torch.Generator().manual_seed(2)

    def case(
        name: str, b: int, h: int, of: int, s: int, d: int, most: int, kind: Any = dtype, **how: Any
    ) -> Case:
        positions, each = 16, -(-most // 16)
        made = (torch.randn(b * each + 1, positions, of, d, generator=gen) for _ in "kv")
        feed = {"q": torch.randn(b, h, s, d, generator=gen).to(kind)}
        feed |= dict(zip(("keys", "values"), (t.to(kind) for t in made), strict=True))
        feed["table"] = torch.randperm(b * each, generator=gen).reshape(b, each).int()
        feed["lengths"] = torch.randint(s, most + 1, (b,), generator=gen).int()
        return Case(name, feed, lambda g, **t: g.paged_attention(**t, **how))

    yield case("one token, shared keys", 3, 4, 2, 1, 32, 100)
    yield case("several tokens", 2, 4, 4, 5, 64, 200, softcap=3.0)
    yield case("divided", 1, 2, 1, 1, 32, 1100, scale=0.2)
    yield case("a window", 2, 2, 2, 3, 24, 300, window=50)
    yield case("a prompt, small heads", 2, 6, 2, 45, 8, 100)
    yield case("a prompt and a window", 1, 3, 1, 70, 16, 200, window=30)
    yield case("float32", 2, 9, 3, 2, 40, 70, kind=torch.float32)


def of_bytes(dtype: torch.dtype) -> Iterator[Case]:
    """Numbers of 8 bits with scales; values of the same kind, and of 16 bits."""
    gen = torch.Generator().manual_seed(3)

    def case(
        name: str, b: int, h: int, of: int, s: int, keys: int, d: int, wide: bool, **how: Any
    ) -> Case:
        shapes = {"q": (b, h, s, d), "k": (b, of, keys, d), "v": (b, of, keys, d + 8)}
        made = {n: torch.randn(shape, generator=gen) for n, shape in shapes.items()}
        most = 127.0 if dtype == torch.int8 else 448.0
        feed = {}
        for n, x in made.items():
            top = x.abs().amax(2 if n == "v" else 3, keepdim=True) / most
            if n == "v" and wide:
                feed[n] = x.half()
                continue
            feed[n] = (x / top).round().to(dtype) if dtype == torch.int8 else (x / top).to(dtype)
            feed[f"{n}_scale"] = top.flatten(2)
        return Case(name, feed, lambda g, **t: g.attention_bytes(**t, **how))

    yield case("bytes", 1, 2, 2, 70, 90, 24, False, dtype="f32")
    yield case("bytes, causal, shared keys", 2, 4, 2, 100, 100, 32, False, causal=True, dtype="f16")
    yield case("bytes, values of 16 bits", 1, 2, 1, 40, 130, 40, True, dtype="f16", scale=0.2)
    yield case("bytes, an offset", 1, 1, 1, 5, 70, 8, True, causal=True, offset=65, dtype="f32")


def asked(dtype: torch.dtype) -> Iterator[Asked]:
    """Lengths that fill no block, heads that share keys, every kind of bias, memory orders."""
    gen = torch.Generator().manual_seed(0)

    def t(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(of)

    def case(name: str, feed: dict[str, torch.Tensor], **how: Any) -> Asked:
        return Asked(name, feed, how)

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
    even = qkv(2, 2, 72, 32, keys=88)
    yield case("bias by blocks", even | {"bias": t(2, 72, 88)}, window=(20, 30))
    yield case("bias by blocks, in float32", even | {"bias": t(2, 1, 72, 88, of=torch.float32)})
    mask = torch.rand(1, 1, 60, 60, generator=gen) < 0.5
    mask[..., 5, :] = False  # a query that sees no key
    yield case("a mask, and causal", qkv(2, 2, 60, 32) | {"bias": mask}, causal=True)
    nothing = t(70, 70)
    nothing[:20] = -torch.inf
    yield case("queries that see no key", qkv(1, 2, 70, 16) | {"bias": nothing})
    joined = t(2, 65, 3, 2, 32)  # as it comes out of one projection
    yield case("parts of one tensor", dict(zip("qkv", joined.permute(2, 0, 3, 1, 4), strict=True)))
    yield case("without a batch", {name: x[0] for name, x in qkv(1, 2, 70, 32).items()})
    yield case("a window", qkv(1, 2, 300, 32), window=(40, 20))
    yield case(
        "a window before, and causal", qkv(1, 4, 200, 32, heads=2), window=(30, -1), causal=True
    )
    yield case(
        "later positions", qkv(1, 2, 5, 32, keys=150), causal=True, offset=145, window=(70, -1)
    )
    yield case("before all keys", qkv(1, 1, 100, 16, keys=90), causal=True, offset=-60)
    yield case("a soft cap", qkv(1, 2, 70, 32), softcap=1.5, scale=0.4)
    slopes, seed = torch.tensor([0.5, 0.06]), torch.tensor(12345)
    more = {"slopes": slopes}
    yield case("slopes", qkv(2, 2, 70, 32) | more, causal=True)
    yield case("slopes both ways, and a bias", qkv(1, 2, 70, 32) | more | {"bias": t(70, 70)})
    yield case("dropout", qkv(2, 2, 70, 32) | {"seed": seed}, dropout=0.3)
    every = more | {"seed": seed, "bias": t(1, 2, 90, 90)}
    how = {"dropout": 0.2, "window": (50, -1), "softcap": 3.0, "causal": True}
    yield case("all of it", qkv(2, 2, 90, 32) | every, **how)
    yield from _of_different_lengths(qkv, case)
    yield from _by_functions(qkv, case, gen)


def _of_different_lengths(qkv: Any, case: Any) -> Iterator[Asked]:
    """Packed and padded: none, one, more than a block; behind the last one there is room."""

    def starts(*lengths: int) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    def packed(*lengths: int, keys: tuple[int, ...] = (), room: int = 0, **shape: Any) -> dict:
        of_keys = starts(*(keys or lengths))
        total, own = int(starts(*lengths)[-1]) + room, int(of_keys[-1]) + room
        made = qkv(1, 2, total, 32, keys=own, **shape)
        return made | {"q_lengths": starts(*lengths), "k_lengths": of_keys}

    how: Any = {"packed": True}
    yield case("packed", packed(0, 70, 1, 0, 5, room=9), **how)
    end = how | {"causal": True, "align": "end"}
    yield case("packed, other keys", packed(3, 0, 70, 9, keys=(66, 7, 20, 0), heads=1), **end)
    seed = {"seed": torch.tensor(7)}
    yield case("packed, all", packed(70, 30) | seed, dropout=0.2, window=(40, 9), **how)
    few = {"k_lengths": torch.tensor([70, 0, 1])}
    yield case("padded keys", qkv(3, 2, 20, 32, keys=80) | few)
    both = {
        "q_lengths": torch.tensor([66, 3], dtype=torch.int32),
        "k_lengths": torch.tensor([9, 80]),
    }
    wide = torch.linspace(-1, 1, 70 * 80).reshape(70, 80)
    padded = qkv(2, 2, 70, 32, keys=80) | both
    yield case("padded", padded | {"bias": wide}, align="end", window=(30, 3))


def _by_functions(qkv: Any, case: Any, gen: torch.Generator) -> Iterator[Asked]:
    """Functions of scores and masks, with what they capture, and tables of blocks."""
    bend = "f0=read0(h); n1=sub(i,j); f2=float(n1); f3=mul(f0,f2); f4=tanh(s); f5=sub(f4,f3); f5"
    slopes = torch.tensor([0.1, 0.02])
    yield case("a score", qkv(2, 2, 70, 32) | {"t0": slopes}, score=bend, causal=True)
    ids = torch.randint(0, 3, (2, 70), generator=gen).sort().values.int()
    same = "n0=read1(b,i); n1=read1(b,j); c2=eq(n0,n1); c2"
    given = {"t0": slopes, "t1": ids}
    yield case("a score and a mask", qkv(2, 2, 70, 32) | given, score=bend, mask=same)
    masks = dt.functional.masks
    near = dt.functional.block_mask(masks.longformer(30, 5), None, None, 150, 130, block=64)
    table = {"blocks": near.blocks, "turned": near.turned}
    how = {"mask": near.text, "side": 64}
    yield case("window and first ones", qkv(1, 2, 150, 32, keys=130, heads=1) | table, **how)
    ids = torch.arange(150)[None].expand(2, -1) // torch.tensor([[60], [110]])
    own = masks.both(masks.causal(), masks.documents(ids))  # of which the last line is the longest
    far = dt.functional.block_mask(own, 2, None, 150, 150, block=128)
    table = {"blocks": far.blocks, "turned": far.turned, "t0": far.captured[0]}
    yield case("documents", qkv(2, 1, 150, 32) | table, mask=far.text, side=128)
    big = dt.functional.block_mask(masks.bigbird(256, 64, 0, 1, 1), 1, 1, 256, 256, block=64)
    assert not big.blocks[..., 0].any()  # all of them whole
    table = {"blocks": big.blocks, "turned": big.turned, "t0": big.captured[0]}
    yield case("random blocks", qkv(1, 1, 256, 16) | table, mask=big.text, side=64)


def _uneven(dtype: torch.dtype) -> Iterator[Asked]:
    gen = torch.Generator().manual_seed(7)
    masks = dt.functional.masks

    def qkv(b: int, h: int, s: int, d: int, keys: int = 0, heads: int = 0) -> dict:
        shapes = (b, h, s, d), (b, heads or h, keys or s, d), (b, heads or h, keys or s, d + 8)
        made = (torch.randn(shape, generator=gen).to(dtype) for shape in shapes)
        return dict(zip("qkv", made, strict=True))

    def starts(*lengths: int) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    def table(mask: Any, *sizes: Any, **how: Any) -> tuple[dict, dict]:
        made = dt.functional.block_mask(mask, *sizes, **how)
        captured = {f"t{i}": t for i, t in enumerate(made.captured)}
        given = {"blocks": made.blocks, "turned": made.turned} | captured
        return given, {"mask": made.text, "side": made.side}

    of = {"q_lengths": starts(0, 200, 1, 0, 129, 128, 300, 5, 0)}
    of["k_lengths"] = starts(7, 190, 0, 3, 260, 128, 140, 66, 0)
    ends: Any = {"packed": True, "causal": True, "align": "end"}
    yield Asked("packed, long", qkv(1, 48, 800, 64, keys=830, heads=16) | of, ends)
    of = {"q_lengths": starts(*[70, 1, 128] * 7), "k_lengths": starts(*[70, 1, 128] * 7)}
    how: Any = {"packed": True, "window": (40, 9), "softcap": 3.0}
    yield Asked("packed, a window", qkv(1, 20, 1393, 32) | of, how)
    given, how = table(masks.longformer(130, 70), None, None, 900, 1030, block=128)
    yield Asked("a table, shared keys", qkv(1, 24, 900, 64, keys=1030, heads=8) | given, how)
    some = masks.both(masks.causal(), lambda b, h, i, j: (i < 256) | (i >= 512 + 128 * h))
    given, how = table(some, None, 3, 1000, 1000, block=128)  # lines that see nothing
    yield Asked("a table for each head", qkv(9, 3, 1000, 32) | given, how)
    given, how = table(masks.bigbird(1024, 128, 1, 1, 2), None, None, 1024, 1024, block=128)
    yield Asked("a table, wide", qkv(2, 24, 1024, 120) | given, how)
    lengths = torch.randint(0, 301, (20,), generator=gen)
    padded = {"q_lengths": lengths, "k_lengths": torch.randint(0, 261, (20,), generator=gen)}
    padded["slopes"] = torch.rand(8, generator=gen)
    yield Asked("padded, long", qkv(20, 8, 300, 64, keys=260) | padded, {"causal": True})
    seed = {"seed": torch.tensor(9)}
    yield Asked(
        "padded, dropped", qkv(20, 8, 300, 32) | {"k_lengths": lengths} | seed, {"dropout": 0.2}
    )


def main() -> None:
    from deuteron.engines.triton import attention
    from tests.triton_interpreter import install

    attention.several_of = lambda *sizes: 3  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    install()
    count, failed = 0, []
    kind = torch.float16  # the interpreter multiplies no bfloat16
    every = [*cases(kind), *gradients(kind), *pages(kind), *of_bytes(torch.int8)]
    some = every[::2] if sys.argv[1:] == ["some"] else every
    both = (*turned(kind), *windows(kind))
    for each, most in (*((case, 1) for case in some), *((case, 2) for case in both)):
        ran, wrong = compare(each, "cpu", most)
        count, failed = count + ran, [*failed, *wrong]
    print(json.dumps({"count": count, "failed": failed}))


if __name__ == "__main__":
    main()
