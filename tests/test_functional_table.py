"""Every operator of the table is an eager function: numbers and gradients from its samples, a
signature, ``torch.compile``, ``torch.fx``, and one that a user registers."""

from __future__ import annotations

import inspect
from itertools import compress

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.ops import TABLE, OpDef, Sample
from deuteron.ops.samples import unary_samples
from tests.tolerances import DOUBLE, DOUBLE_GRADIENT, error

f = dt.functional
PLAIN = [op for op in TABLE.values() if op.name != "aten"]
# functions of those names that take other arguments than the operator
OTHERS = {name for name in f.__all__ if name in TABLE}


def _usual(op: OpDef) -> Sample:
    """A sample with something in every tensor and nothing extreme."""
    for sample in op.samples():
        tensors = [t for t in sample.tensors("f64") if t is not None]
        if tensors and all(t.numel() and torch.isfinite(t.double()).all() for t in tensors):
            return sample
    raise AssertionError(f"{op.name} has no sample with elements that are all finite: add one")


@pytest.mark.parametrize("op", [o for o in PLAIN if o.name not in OTHERS], ids=lambda op: op.name)
def test_an_operator_is_a_function(op):
    function = getattr(f, op.name)
    assert getattr(f, op.name) is function  # made once
    assert op.doc.split(",")[0].split()[0] in function.__doc__
    shown = inspect.signature(function).parameters
    assert len(shown) == len(op.inputs) + len(op.attrs)
    sample = _usual(op)
    tensors = sample.tensors("f64")
    if not op.variadic:
        tensors += [None] * (len(op.inputs) - len(tensors))
    attrs = {"kernel_size" if k == "kernel" else k: v for k, v in sample.attrs.items()}
    learn = op.vjp is not None and "grad" not in op.name
    # which of them torch takes a gradient of: of running statistics it does not
    learned = [
        _is_float(t) and "running" not in (*op.inputs, *"x" * 9)[i] for i, t in enumerate(tensors)
    ]

    def leaves() -> list[torch.Tensor | None]:
        pairs = zip(tensors, learned, strict=True)
        return [t.clone().requires_grad_() if yes and learn else t for t, yes in pairs]

    mine = leaves()
    found, want = (
        r if isinstance(r, tuple) else (r,)
        for r in (function(*mine, **attrs), op.reference(*tensors, **_full(op, sample, tensors)))
    )
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert error(a.double(), b.double()) <= DOUBLE
    if learn and found[0].requires_grad and op.name != "floor_div":  # torch has no gradient of that
        seed, theirs = torch.randn_like(found[0]), leaves()
        exact = op.reference(*theirs, **_full(op, sample, tensors))
        exact = exact[0] if isinstance(exact, tuple) else exact
        ours, torchs = (
            torch.autograd.grad(y, list(compress(given, learned)), seed, allow_unused=True)
            for y, given in ((found[0], mine), (exact, theirs))
        )
        for a, b in zip(ours, torchs, strict=True):
            if a is not None and b is not None:
                # of two values a channel, normalised, next to nothing is left of a gradient
                cancels = (a - b).abs().max() <= 1e-2 * DOUBLE_GRADIENT
                assert cancels or error(a, b) <= DOUBLE_GRADIENT


def _is_float(t: torch.Tensor | None) -> bool:
    return t is not None and t.is_floating_point()


def _full(op: OpDef, sample: Sample, tensors: list[torch.Tensor | None]) -> dict:
    types = [None if t is None else dt.TensorType.from_tensor(t) for t in tensors]
    attrs = op.normalise(sample.attrs)
    return attrs if op.complete is None else op.complete(types, attrs)


def test_what_is_no_function_says_why():
    with pytest.raises(AttributeError, match="'args' is not a plain value"):
        _ = f.aten
    with pytest.raises(AttributeError, match="no function 'softcup'"):
        _ = f.softcup
    assert {"exp", "conv", "relu"} <= set(dir(f))


@pytest.mark.parametrize("count", [1, 3, 11])
def test_any_number_of_tensors(count):
    xs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    y = f.concat(*xs, axis=1)
    assert torch.equal(y, torch.cat(xs, 1))
    y.sin().sum().backward()
    assert error(xs[-1].grad, xs[-1].cos()) <= DOUBLE_GRADIENT
    with pytest.raises(TypeError, match="missing"):
        f.concat(axis=1)


def _slope(x: torch.Tensor, cap: float) -> torch.Tensor:
    return 1.0 - torch.tanh(x / cap).square()


@pytest.fixture(scope="module")
def softcap():
    """An operator of a user's, as docs/adding-an-operator.md has it."""
    made = dt.OpDef(
        name="softcap_of_a_user",
        doc="cap · tanh(x / cap), elementwise.",
        inputs=("x",),
        attrs={"cap": dt.Attr("float", 30.0, "the bound, above 0")},
        infer=lambda x, cap: x.dense_like(),
        reference=lambda x, cap: torch.tanh(x / cap) * cap,
        fusion=dt.Fusion.ELEMENTWISE,
        vjp=lambda ops, v: [v.grad * (1.0 - ops.square(v.outs[0] * (1.0 / v.attrs["cap"])))],
        samples=lambda: unary_samples(),
    )
    if made.name not in TABLE:
        dt.register_op(made)
    return f.softcap_of_a_user


def test_an_operator_of_a_user(softcap):
    assert str(inspect.signature(softcap)).startswith("(x: 'Tensor', cap: 'float' = 30.0)")
    assert "cap: the bound, above 0" in softcap.__doc__
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert error(softcap(x, 2.0), torch.tanh(x / 2.0) * 2.0) <= DOUBLE
    assert torch.equal(softcap(x, cap=2), softcap(x, 2.0))
    (grad,) = torch.autograd.grad(softcap(x, 2.0).sum(), x)
    assert error(grad, _slope(x, 2.0)) <= DOUBLE_GRADIENT
    with pytest.raises(TypeError, match="unexpected keyword argument 'cop'"):
        softcap(x, cop=1.0)
    with pytest.raises(dt.DeuteronError, match="cap is a str, 'high', not a number") as caught:
        softcap(x, "high")
    assert "softcap_of_a_user(…, cap='high')" in caught.value.asked


def test_an_operator_of_a_user_elsewhere(softcap):
    """Compiled, traced, transformed, and as the activation after a norm."""
    x = torch.randn(4, 8, dtype=torch.float64)
    want = torch.tanh(x / 30.0) * 30.0
    fast = torch.compile(lambda x: f.softcap_of_a_user(x), fullgraph=True, backend="aot_eager")
    assert error(fast(x), want) <= DOUBLE
    traced = torch.fx.symbolic_trace(lambda x: softcap(x, cap=30.0))
    assert error(traced(x), want) <= DOUBLE
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [softcap]
    assert error(torch.func.vmap(softcap)(x), want) <= DOUBLE
    y = f.layer_norm(x, (8,), activation="softcap_of_a_user")
    norm = F.layer_norm(x, (8,))
    assert error(y, torch.tanh(norm / 30.0) * 30.0) <= DOUBLE


class Mine(torch.Tensor):
    """A tensor of a class of one's own."""


class Loud(torch.Tensor):
    """One that answers calls itself."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (f.gelu, f.layer_norm, f.rope):
            return func.__name__
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("delegated", [True, False])
def test_subclasses_of_tensors(delegated):
    """By torch's protocol: the class stays, and a class may answer in our place."""
    x = torch.randn(3, 8)
    with f.delegation(delegated):
        y = f.gelu(x.as_subclass(Mine))
        assert type(y) is Mine and torch.equal(y.as_subclass(torch.Tensor), f.gelu(x))
        assert f.gelu(x.as_subclass(Loud)) == "gelu"
        assert f.layer_norm(x, (8,), residual=x.as_subclass(Loud)) == "layer_norm"
        assert type(f.relu(torch.nn.Parameter(x))) is torch.Tensor
        with torch.device("cpu"):  # a mode that sees every function
            assert torch.equal(f.gelu(x), y.as_subclass(torch.Tensor))


NAMED = {  # all arguments by name, which is how torch's function has them, too
    "layer_norm": {"normalized_shape": (8,), "weight": torch.ones(8), "bias": None, "eps": 1e-3},
    "softmax": {"dim": 1},
    "sum": {"dim": 1, "keepdim": True},
    "leaky_relu": {"negative_slope": 0.1},
    "hardtanh": {"min_val": -0.5, "max_val": 0.5},
    "gelu": {"approximate": "tanh"},
    "topk": {"k": 2, "dim": 0},
    "cumsum": {"dim": 1},
    "batch_norm": {"running_mean": torch.zeros(8), "running_var": torch.ones(8)},
}


@pytest.mark.parametrize("name", NAMED)
def test_small_calls_by_name_are_torchs_too(name):
    x = torch.randn(4, 8)
    function, torchs = getattr(f, name), getattr(F, name, None) or getattr(torch, name)
    with f.delegation(True):
        said = f.explain(function, x, **NAMED[name])
        found, again = function(x, **NAMED[name]), function(input=x, **NAMED[name])
    assert "torch's own function" in said
    want = torchs(x, **NAMED[name])
    for got in (found, again):
        first, right = (r[0] if isinstance(r, tuple) else r for r in (got, want))
        assert torch.equal(first, right)


def test_a_formula_with_an_operator_that_is_not_there_names_the_nearest():
    @dt.elementwise()
    def mistyped(b, x):
        """a slip of the pen"""
        return b.tanhh(x)

    dt.register_op(mistyped)
    try:
        with pytest.raises(dt.GraphError, match="no operator 'tanhh'") as caught:
            f.mistyped(torch.ones(3))
        assert "tanh" in str(caught.value)
    finally:
        del TABLE["mistyped"]
        delattr(dt.Graph, "mistyped")
