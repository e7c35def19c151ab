"""Unusual and wrong arguments of every function: what is accepted, and what it gives, does not
depend on the size of a tensor, which decides whether torch answers or a plan of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.errors import DeuteronError
from deuteron.functional import delegate
from tests.functional_cases import ACTIVATIONS
from tests.tolerances import DOUBLE, SINGLE, SINGLE_LAYERS, allowed, error

f = dt.functional
INF, NAN = float("inf"), float("nan")
gen = torch.Generator().manual_seed(0)
X = torch.randn(4, 8, generator=gen)
I = torch.randint(-3, 4, (4, 8), generator=gen)  # noqa: E741
B, U, H, S = X > 0, I.abs().to(torch.uint8), X.half(), torch.tensor(1.5)
C, NONE = torch.complex(X, X.flip(0)), torch.empty(0, 8)
IMAGE, GRID = torch.randn(2, 6, 8, 8, generator=gen), torch.rand(2, 4, 4, 2, generator=gen) * 2 - 1
W, SIX, TABLE = torch.ones(8), torch.ones(6), torch.randn(10, 4, generator=gen)
LOGITS, TARGET = torch.randn(4, 5, generator=gen), torch.tensor([0, 4, 2, -100])
ROWS = {"float": X, "int": I, "bool": B, "complex": C, "scalar": S, "empty": NONE, "uint8": U}
IMAGES = {
    "int": IMAGE.long(),
    "bool": IMAGE > 0,
    "complex": IMAGE.to(torch.complex64),
    "matrix": X,
    "no batch": IMAGE[0],
    "rank 5": IMAGE[None],
    "no image": IMAGE[:0],
    "no channel": IMAGE[:, :0],
    "no row": IMAGE[:, :, :0],
    "uint8": IMAGE.to(torch.uint8),
    "half": IMAGE.half(),
}

Cases = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
CALLS: dict[str, Cases] = {}


def add(function: str, *given: tuple[Any, ...] | dict[str, Any], first: Any = ()) -> None:
    """Calls by position, ``(x, …)``, or by name after the ``first`` arguments."""
    cases = CALLS.setdefault(function, {})
    for each in given:
        args, named = (each, {}) if isinstance(each, tuple) else (first, each)
        shown = [*(_shown(a) for a in args), *(f"{k}={_shown(v)}" for k, v in named.items())]
        cases[f"{len(cases)}: {', '.join(shown)}"[:60]] = args, named


def _shown(a: Any) -> str:
    return f"{a.dtype}{list(a.shape)}"[6:] if isinstance(a, torch.Tensor) else repr(a)


for name in ACTIVATIONS:
    add(name, *((x,) for x in (*ROWS.values(), H, None, [1.0], 2.0)))
add("leaky_relu", (X, -0.5), (X, "a"), (X, NAN), (X, None), (X, True))
add("elu", (X, -1.0), (X, 0.0), (X, INF))
add("celu", (X, 0.0), (X, -1.0))
add("softplus", (X, 0.0), (X, -1.0), (X, 1.0, -5.0))
add("softshrink", (X, -0.5), (X, 0.0))
add("hardshrink", (X, -0.5))
add("hardtanh", (X, 1.0, -1.0), (X, 1.0, 1.0), (X, NAN, 1.0))
add("gelu", (X, "x"), (X, None), (X, "tanh"))
add("threshold", (I, 0, 5), (X, NAN, 1.0), (C, 0, 1), (B, 0, 1), (X, 0.1, -2.0))
add(
    "prelu",
    *((X, w) for w in (SIX, W, W[:1], W[0], W.half(), W[None])),
    (I, W),
    (S, W[:1]),
    (NONE, W),
    (W, W),
)
add("glu", *((X, d) for d in (5, -3, 0, -2, 1.0)), (X[:, :7],), (I,), (S,), (NONE, 0))
add(
    "dropout",
    *((X, p, False) for p in (2.0, -0.1, NAN, "a", None, 0.5)),
    (X, 2.0),
    (X, 1.0),
    (X, 0.0),
    (I, 0.0),
    (I, 0.5, False),
    (C, 0.5, False),
    (NONE, 0.5),
)

add(
    "layer_norm",
    *((X, s) for s in ((), (4, 8, 1), [8], (7,), (-1,), (8.0,))),
    (S, ()),
    (X, (8,), SIX),
    (X, (8,), W[:, None]),
    (X, (8,), W, SIX),
    (X, (8,), W.double()),
    (X, (8,), W.half()),
    (X, (8,), I[0]),
    (H, (8,), W),
    (X, (8,), None, W),
    (H, (8,), None, W),
    (torch.empty(4, 0), (0,)),
    *((x, (8,)) for x in (I, B, C, NONE)),
)
add(
    "rms_norm",
    *((X, s) for s in ((), (4, 8, 1), [8], (7,), (-1,))),
    (X, (8,), W[:1]),
    (X, (8,), W[None]),
    (X, (8,), W.double()),
    (H, (8,), W),
    (X, (8,), W.bfloat16()),
    (X.double(), (8,), W),
    (X, (8,), W.long()),
    (H, (8,), W.bfloat16()),
    (torch.empty(4, 0), (0,)),
    *((x, (8,)) for x in (I, B, C, NONE, H)),
)
for name in ("layer_norm", "rms_norm"):
    add(name, *({"eps": e} for e in (-1.0, 0.0, NAN, None)), first=(X, (8,)))
add(
    "group_norm",
    *((IMAGE, n) for n in (4, 0, -2, 2, 6)),
    (IMAGE, 2, W),
    (IMAGE.long(), 2),
    (IMAGE.half(), 2, SIX),
    (IMAGE, 2, SIX.double()),
    (X[:, :6], 2),
    (SIX, 2),
    (S, 1),
    (IMAGE[:0], 2),
    (IMAGE[:, :, :0], 2),
    (IMAGE[:, :0], 2),
    {"eps": -1.0},
    first=(IMAGE, 2),
)
add(
    "instance_norm",
    (X,),
    (X[:, :, None],),
    (SIX,),
    (IMAGE.long(),),
    (IMAGE[:0],),
    (IMAGE[:, :0],),
    {"eps": -1.0},
    {"weight": W},
    {"use_input_stats": False},
    {"eps": 0.0},
    first=(IMAGE,),
)
zero = torch.zeros(6)
add(
    "batch_norm",
    (IMAGE, None, None),
    (IMAGE, zero[:5], SIX[:5]),
    (IMAGE, zero, SIX, W),
    (IMAGE.long(), zero, SIX),
    (SIX, zero, SIX),
    (IMAGE[:0], zero, SIX),
    (IMAGE, zero, None),
    (IMAGE, zero.double(), SIX.double()),
    (IMAGE.half(), zero, SIX),
    {"eps": -2.0},
    {"weight": SIX.half()},
    {"eps": 0.0},
    first=(IMAGE, zero, SIX),
)
for name in ("softmax", "log_softmax"):
    add(
        name,
        *((X, d) for d in (2, -3, "a", (0, 1), 1.0)),
        (I, 1),
        (B, 1),
        (C, 1),
        (NONE, 0),
        (NONE, 1),
        (S, 0),
        (S, -1),
        (S, 1),
    )
    types = (torch.float64, torch.float16, torch.int64, torch.complex64)
    add(name, *({"dtype": d} for d in types), first=(X, 1))

for name in ("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "var", "norm"):
    for x in ROWS.values():
        dims = (2, -3, (0, 1), (), (0, 0), [1], -1, None, "a", 1.0)
        add(name, *({"dim": d} for d in dims), {"dim": 1, "keepdim": True}, {}, first=(x,))
for name in ("sum", "mean", "prod", "norm", "cumsum", "cumprod"):
    for x in (X, I, B):
        types = (torch.float64, torch.int32, torch.float16, torch.bool, torch.complex64)
        add(name, *({"dim": 1, "dtype": d} for d in types), first=(x,))
add(
    "var",
    (X, False),
    (X, True),
    *({"dim": 1, "correction": n} for n in (0, 100, -1, None, 0.5)),
    first=(X,),
)
add("norm", *((X, p) for p in (0, INF, -INF, -1, 1, 3, 0.5, "fro", "nuc", None, NAN)))
for name in ("cumsum", "cumprod", "cummax", "cummin", "sort"):
    for x in ROWS.values():
        add(name, *((x, d) for d in (0, -1, 2, -3, "a", None, 1.0)))
add(
    "topk",
    *((X, k) for k in (0, -1, 9, 2.0, 2)),
    (X, 2, 2),
    (X, 2, -3),
    (I, 2),
    (B, 2),
    (C, 2),
    (S, 1),
    (S, 2),
    (X, 3, 0, False),
    (NONE, 0, 0),
)
add(
    "permute",
    *((X, d) for d in ((0, 1), (-1, 0), (0, 0), (0,), (0, 1, 2), (2, 0), ())),
    (S, ()),
    (C, (1, 0)),
)
add(
    "where",
    *((c, X, X) for c in (B, I, U, X, True)),
    (B, X, 1.0),
    (B, 1, 2),
    (B, I, 1.0),
    (B, I, X),
    (B, X, X.double()),
    (B, X, SIX),
    (B, C, X),
    (B, X, None),
    (B, H, 2.0),
)

windows: tuple[Any, ...] = (0, -1, 9, (2, 3, 4), (2,), 2.0, "a", None, (2, 2), [3, 3])
for name in ("max_pool2d", "avg_pool2d"):
    add(name, *((IMAGE, k) for k in windows), *((x, 2) for x in IMAGES.values()))
    add(
        name,
        (IMAGE, 3, 0),
        (IMAGE, 3, -1),
        (IMAGE, 3, 1, 2),
        (IMAGE, 3, 1, -1),
        (IMAGE, 3, 1, 1),
        (IMAGE, (2, 2), (1,)),
        (IMAGE, [2, 2], []),
        (IMAGE, 3, 5, 1, True),
    )
add(
    "max_pool2d",
    *({"dilation": d} for d in (0, -1, 8, 2)),
    {"return_indices": True},
    first=(IMAGE, 2),
)
add(
    "avg_pool2d",
    *({"divisor_override": d} for d in (0, -3, 3)),
    {"count_include_pad": False},
    first=(IMAGE, 2),
)
sizes: tuple[Any, ...] = (0, -1, (0, 3), (3,), (2, 3, 4), None, (None, 4), 20, 2.0, "a", 1, [2, 5])
for name in ("adaptive_avg_pool2d", "adaptive_max_pool2d"):
    add(name, *((IMAGE, s) for s in sizes), *((x, 2) for x in IMAGES.values()))
for mode in ("nearest", "bilinear", "bicubic", "area"):
    for x in IMAGES.values():
        add("interpolate", {"scale_factor": 2, "mode": mode}, first=(x,))
add(
    "interpolate",
    {},
    {"size": 3, "scale_factor": 2},
    *({"size": s} for s in sizes),
    *({"scale_factor": s} for s in (0, -1.0, (2.0,), (2.0, 3.0), 0.01, NAN, INF)),
    *({"scale_factor": 2, "mode": m} for m in ("linear", "trilinear", "nearest-exact", "x")),
    {"scale_factor": 2, "align_corners": False},
    {"size": 4, "recompute_scale_factor": True},
    {"scale_factor": 2, "mode": "area", "align_corners": True},
    {"scale_factor": 2, "antialias": True},
    {"scale_factor": 1.5, "recompute_scale_factor": True},
    first=(IMAGE,),
)
add(
    "grid_sample",
    (IMAGE, GRID[:1]),
    (IMAGE, GRID[..., :1]),
    (IMAGE, GRID.double()),
    (IMAGE.long(), GRID.long()),
    (IMAGE, GRID * NAN),
    (IMAGE[0], GRID),
    (IMAGE[:, :, :0], GRID),
    (IMAGE, GRID[:, :0]),
    (IMAGE[:, :0], GRID),
    (IMAGE[:0], GRID[:0]),
    {"mode": "x"},
    {"padding_mode": "x"},
    {"mode": "bicubic"},
    {"align_corners": None},
    first=(IMAGE, GRID),
)
for name, x in (("pixel_shuffle", IMAGE[:, :4]), ("pixel_unshuffle", IMAGE)):
    add(
        name,
        *((x, n) for n in (0, -1, 3, 1, 2, 2.0, None)),
        (x.long(), 2),
        (X, 2),
        (x[0], 2),
        (x.to(torch.complex64), 2),
        (x[:0], 2),
        (x > 0, 2),
    )
one = torch.tensor([1])
add(
    "embedding",
    *((torch.tensor(i), TABLE) for i in ([10], [-1], [1.0], [True], 3, [[1], [2]])),
    *((one.to(d), TABLE) for d in (torch.int32, torch.int8, torch.uint8)),
    (one[:0], TABLE),
    (one, TABLE[0]),
    (one, TABLE[None]),
    (one, TABLE.long()),
    (one, TABLE[:0]),
    *({"padding_idx": p} for p in (10, -11, -1, 0)),
    {"scale_grad_by_freq": True},
    {"sparse": True},
    *({"max_norm": n} for n in (1.0, 0.0, -1.0, NAN)),
    {"max_norm": 1, "norm_type": 1},
    first=(one, TABLE),
)
soft = LOGITS.softmax(1)
add(
    "cross_entropy",
    *(
        (LOGITS, t)
        for t in (
            TARGET[:3],
            TARGET.float(),
            TARGET.int(),
            TARGET.to(torch.uint8),
            TARGET.bool(),
            soft,
            soft.double(),
            soft[:, :4],
            torch.tensor([0, 5, 1, 1]),
            torch.tensor([0, -1, 1, 1]),
        )
    ),
    *((LOGITS, TARGET, w) for w in (W[:4], W[:5].double(), torch.zeros(5), W[:5].long())),
    (LOGITS.long(), TARGET),
    (LOGITS.to(torch.complex64), TARGET),
    (LOGITS[:0], TARGET[:0]),
    (LOGITS[0], torch.tensor(2)),
    (LOGITS[0], torch.tensor([2])),
    (S, torch.tensor(0)),
    (torch.empty(4, 0), TARGET),
    *({"reduction": r} for r in ("x", None, "sum")),
    *({"label_smoothing": s} for s in (-0.1, 1.1, 1.0, NAN)),
    {"ignore_index": 2},
    first=(LOGITS, TARGET),
)


Outcome = DeuteronError | Exception | tuple[torch.Tensor, ...]


def outcome(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Outcome:
    """What a call gives: tensors, or the error that it ends with."""
    try:
        found = function(*args, **named)
    except Exception as wrong:
        return wrong
    return tuple(found) if isinstance(found, tuple) else (found,)


@contextmanager
def as_if_large() -> Iterator[None]:
    """Calls are planned first, as those of large tensors are."""
    usual = delegate.LIMITS[-1]
    with f.delegation(True):
        delegate.LIMITS[-1] = delegate.LIMITS.least = -1
        try:
            yield
        finally:
            delegate.LIMITS[-1] = delegate.LIMITS.least = usual


def same(a: Outcome, b: Outcome) -> bool:
    if isinstance(a, Exception) or isinstance(b, Exception):
        return isinstance(a, Exception) and isinstance(b, Exception)
    return len(a) == len(b) and all(map(_equal, a, b))


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.is_complex():
        return _equal(x.real, y.real) and _equal(x.imag, y.imag)
    if not x.is_floating_point():
        return torch.equal(x, y)
    return error(x, y.double()) <= max(SINGLE_LAYERS, allowed(0.0, x.dtype, 8))


def torchs(name: str) -> Callable[..., Any]:
    if name == "norm":
        return torch.linalg.vector_norm
    found: Callable[..., Any] = getattr(F, name, None) or getattr(torch, name)
    return found


# where torch's answer is not one to repeat, and no argument is wrong
OURS = {"pixel_unshuffle": "of no image torch answers with its input, in the wrong shape"}


@pytest.mark.parametrize("name", CALLS)
def test_size_does_not_decide_what_is_accepted(name):
    function, wrong = getattr(f, name), []
    for case, (args, named) in CALLS[name].items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with f.delegation(True):
                small = outcome(function, args, named)
            with as_if_large():
                large = outcome(function, args, named)
            with f.delegation(False):
                planned = outcome(function, args, named)
            theirs = outcome(torchs(name), args, named)
        if not same(small, large):
            wrong.append(f"{case}: small {small}, large {large}")
        if not same(small, planned) and not isinstance(planned, DeuteronError):
            wrong.append(f"{case}: small {small}, planned {planned}")
        both = not isinstance(small, Exception) and not isinstance(theirs, Exception)
        if both and not same(small, theirs) and name not in OURS:
            wrong.append(f"{case}: ours {small}, torch's {theirs}")
    assert not wrong, "\n".join(wrong)


TOO_MANY: dict[str, Callable[[], Any]] = {
    "relu": lambda: f.relu(X, False, None),
    "sigmoid": lambda: f.sigmoid(X, None),
    "layer_norm": lambda: f.layer_norm(X, (8,), None, None, 1e-5, None, X),
    "cross_entropy": lambda: f.cross_entropy(LOGITS, TARGET, None, None, "sum"),
    "softmax": lambda: f.softmax(X, 1, None, None),
    "rope": lambda: f.rope(IMAGE, None, None, None, None),
}


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("name", TOO_MANY)
def test_what_has_a_name_only_has_no_place(name, allowed):
    with (
        f.delegation(allowed),
        pytest.raises(TypeError, match=rf"{name}\(\): too many positional arguments"),
    ):
        TOO_MANY[name]()


SCALARS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda m, name=name: getattr(m, name)(S, -1)
        for name in "cumsum cumprod cummax cummin sort sum prod mean amax argmax".split()
    },
    "topk": lambda m: m.topk(S, 1),
    "sort by name": lambda m: m.sort(S, dim=0, descending=True),
    "norm": lambda m: (f.norm if m is f else torch.linalg.vector_norm)(S, 2.0, -1),
}
PAIRS: dict[str, Callable[[Any], Any]] = {
    "topk": lambda m: m.topk(X, 3),
    "sort": lambda m: m.sort(X, dim=0, stable=True),
    "cummax": lambda m: m.cummax(X, 1),
    "cummin": lambda m: m.cummin(X, 0),
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    f"where {shown}": lambda m, x=x, y=y: m.where(B, x, y)
    for shown, x, y in (
        ("of floats", X, 0.0),
        ("of halves", 1, H),
        ("of integers", I, 1.5),
        ("of bytes", U, 2),
        ("of bools", B, 2),
        ("of bools and a bool", B, True),
        ("of numbers", 1, 2.5),
    )
}
ALIKE = {f"{name} of a scalar": call for name, call in SCALARS.items()} | PAIRS | NUMBERS


@pytest.mark.parametrize("way", ["planned", "compiled"])
@pytest.mark.parametrize("name", ALIKE)
def test_plans_answer_as_torch_does(name, way):
    """Where no call is handed on: numbers, shapes, types, and the names of a pair's parts."""
    call = ALIKE[name]
    if way == "compiled":
        torch._dynamo.reset()
        found = torch.compile(lambda: call(f), fullgraph=True, backend="aot_eager")()
    else:
        with f.delegation(False):
            found = call(f)
    want = call(torch)
    assert type(found) is type(want)
    if name in PAIRS:
        assert torch.equal(found.values, want.values)
        assert torch.equal(found.indices, want.indices)
    pair = isinstance(found, tuple)
    assert same(*((tuple(t) if pair else (t,)) for t in (found, want)))


def test_a_pyramid_of_one_image():
    """It is an image, not rows of a batch; and a volume is none."""
    assert torch.equal(f.pyramid_pool2d(IMAGE[0]), f.pyramid_pool2d(IMAGE)[0])
    for wrong in (X, IMAGE[None]):
        with pytest.raises(DeuteronError, match="pooling in 2 dimensions needs 4"):
            f.pyramid_pool2d(wrong)


def test_one_size_of_a_pyramid_may_be_a_number():
    assert torch.equal(f.pyramid_pool2d(IMAGE, 2), f.pyramid_pool2d(IMAGE, (2,)))


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("of", FLOATS, ids=str)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_rms_norm_takes_a_weight_of_any_type(kind, of):
    """And answers in the type of x, no less exactly than torch does."""
    x, weight = X.to(of), torch.linspace(0.5, 2, 8).to(kind).requires_grad_()
    exact = F.rms_norm(x.double(), (8,), weight.double(), 1e-6)
    theirs = F.rms_norm(x, (8,), weight, 1e-6)
    for allow in (True, False):
        with f.delegation(allow):
            ours = f.rms_norm(x, (8,), weight, 1e-6)
            (grad,) = torch.autograd.grad(ours.sum(), weight)
        assert ours.dtype == theirs.dtype == of
        assert error(ours, exact) <= allowed(error(theirs, exact), of, 8)
        assert grad.dtype == kind


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_without_an_eps_takes_torchs(dtype):
    """Which is float32's for 16 bits, whatever torch's pages say; small rows tell."""
    x = (torch.randn(5, 33) * 1e-3).to(dtype)
    exact = torch.rms_norm(x.double(), (33,), None, torch.finfo(torch.float32).eps)
    theirs = F.rms_norm(x, (33,))
    for handed_on in (True, False):
        with f.delegation(handed_on):
            found = f.rms_norm(x, (33,))
        if dtype is torch.float64:
            assert error(found, theirs) <= DOUBLE
        else:
            assert error(found, exact) <= allowed(error(theirs, exact), dtype)


@pytest.mark.parametrize("usual", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["softsign", "tanhshrink", "sigmoid", "tanh"])
def test_activations_make_floats_of_integers(name, usual):
    torch.set_default_dtype(usual)
    try:
        for x in (I, U, I.int()):
            want = getattr(F, name)(x)
            for allow in (True, False):
                with f.delegation(allow):
                    found = getattr(f, name)(x)
                assert found.dtype is usual and error(found, want.double()) <= SINGLE
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_area_of_nothing_is_empty():
    x = IMAGE[:, :, :, :1].clone().requires_grad_()
    with f.delegation(False):
        y = f.interpolate(x, scale_factor=0.6, mode="area")
    assert y.shape == F.interpolate(x, scale_factor=0.6, mode="area").shape == (2, 6, 4, 0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not grad.any()


def test_scalars_have_gradients_along_an_axis():
    x = S.clone().requires_grad_()
    with f.delegation(False):
        values = [f.sort(x).values, f.topk(x, 1).values, f.cummax(x, 0).values]
        total = f.cumsum(x, -1) + f.sum(x, -1) + f.norm(x, 2.0, -1) + sum(values)
        (grad,) = torch.autograd.grad(total, x)
    assert grad.item() == 6.0


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: f.dropout(X, 2.0, training=False), r"p=2\.0 is not a probability"),
    "norm of integers": (lambda: f.norm(I), "norm of int64 is not defined"),
    "a shape for rms_norm": (lambda: f.rms_norm(X, (7,)), r"\[7\] is not how x \[4, 8\] ends"),
    "a weight for rms_norm": (lambda: f.rms_norm(X, (8,), W[:1]), r"rms_norm .* \[1\], not \[8\]"),
    "padding": (lambda: f.embedding(one, TABLE, 10), "padding_idx=10 is not one of 10 rows"),
    "corners": (lambda: f.interpolate(IMAGE, 3, align_corners=True), "corners have no meaning"),
    "a scalar's axis": (lambda: f.sum(S, dim=-2), "-2 is out of range for rank 0"),
    "a window": (lambda: f.max_pool2d(IMAGE, 2.0), "kernel_size is 2.0, not a whole number"),
    "windows": (lambda: f.avg_pool2d(IMAGE, (2, "a")), r"kernel_size=\(2, 'a'\) is not of kind"),
    "an output": (lambda: f.adaptive_avg_pool2d(IMAGE, 2.0), "output_size is 2.0, not a whole"),
    "a pyramid": (lambda: f.pyramid_pool2d(IMAGE, 2.0), "sizes is 2.0, not a whole number"),
    "an image": (lambda: f.weighted_pool2d(IMAGE[0], W[:4].reshape(2, 2)), "rank 3, .* needs 4"),
    "a norm": (lambda: f.norm(X, "fro"), "p is a str, 'fro', not a number"),
    "sizes": (lambda: f.interpolate(IMAGE, (3,)), "1 numbers for 2 dimensions"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong(name):
    call, words = ERRORS[name]
    with pytest.raises(DeuteronError, match=words) as caught:
        call()
    assert caught.value.asked and caught.value.remedy


def test_a_class_of_bytes_is_not_taken_for_one_to_ignore():
    """156 is −100 in eight bits."""
    logits = torch.randn(3, 200, generator=gen)
    target = torch.tensor([3, 156, 199], dtype=torch.uint8)
    with f.delegation(False):
        assert _equal(f.cross_entropy(logits, target), F.cross_entropy(logits, target.long()))


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "sort"])
def test_scans_of_complex_numbers_are_never_planned(name):
    z = torch.randn(5, dtype=torch.complex64)
    with dt.functional.delegation(False), pytest.raises(dt.GraphError, match="does not compute"):
        getattr(dt.functional, name)(z, 0)


def test_explain_says_that_no_plan_could_be_made():
    with as_if_large():
        said = f.explain(f.sigmoid, C)
    assert "no plan of ours can be made: sigmoid does not compute with complex64" in said
