"""Our modules under the older ways to take a model apart: ``torch.fx`` and ``torch.jit``."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

import deuteron as dt

f = dt.functional
X, IMAGE = torch.linspace(-2, 2, 32).reshape(4, 8), torch.linspace(-1, 1, 288).reshape(2, 4, 6, 6)
VOLUME, CLASSES = (
    IMAGE[:, :, :4, :4].unsqueeze(-1).repeat(1, 1, 1, 1, 4),
    torch.tensor([1, 2, 3, 4]),
)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "LayerNorm": (8,),
    "RMSNorm": (8,),
    "GroupNorm": (2, 4),
    "Embedding": (10, 8),
    "Threshold": (0.1, 2.0),
    "Softmax": (-1,),
    "LogSoftmax": (-1,),
    "PixelShuffle": (2,),
    "PixelUnshuffle": (2,),
    "Upsample": (None, 2.0),
    **{f"{kind}Norm{n}d": (4,) for kind in ("Batch", "Instance") for n in (1, 2, 3)},
    **{name: (2,) for name in dt.nn.__all__ if "Pool" in name},
}
# of one tensor each: those that take three, or talk to other ranks, have tests of their own
DROP_IN = [n for n in dt.nn.__all__ if hasattr(nn, n)]
DROP_IN = [n for n in DROP_IN if n not in ("MultiheadAttention", "SyncBatchNorm")]
OTHERS = {
    "SwiGLU": (),
    "GeGLU": (),
    "ReGLU": (),
    "BiasAct": (8,),
    "SinusoidalEmbedding": (8,),
    "RotaryEmbedding": (6,),
}


def given(name: str) -> tuple[torch.Tensor, ...]:
    if name in ("Embedding", "CrossEntropyLoss"):
        return (CLASSES,) if name == "Embedding" else (X, CLASSES)
    if name.endswith("3d"):
        return (VOLUME,)
    if name.endswith("1d"):
        return (IMAGE[:, :, 0],)
    of_images = ("GroupNorm", "Upsample", "RotaryEmbedding")
    return (
        (IMAGE,) if name.endswith("2d") or name in of_images or (name.startswith("Pixel")) else (X,)
    )


class One(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Two(One):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.inner(x, y)


def model_of(name: str) -> nn.Module:
    inner = getattr(dt.nn, name)(*(ARGUMENTS | OTHERS).get(name, ()))
    return (One, Two)[len(given(name)) - 1](inner).eval()


@pytest.mark.parametrize("name", [*DROP_IN, *OTHERS])
def test_modules_are_traced_by_fx(name):
    model = model_of(name)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(*given(name)), model(*given(name)))
    ours = [n for n in traced.graph.nodes if n.op in ("call_function", "call_module")]
    assert len(ours) == 1  # and nothing of what is inside


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "softmax": ((X,), {}),
    "log_softmax": ((X, -1), {"mask": X > 0}),
    "sum": ((X, 1), {}),
    "layer_norm": ((X, (8,)), {"activation": "gelu"}),
    "cross_entropy": ((X, CLASSES), {}),
    "embedding": ((CLASSES, X[:, :3].new_ones(9, 3)), {}),
    "swiglu": ((X, X), {}),
    "relu": ((X,), {}),
    "topk": ((X, 2), {}),
    "pyramid_pool2d": ((IMAGE, (1, 2)), {}),
    "rope": ((IMAGE,), {"offset": 3}),
    "linear_cross_entropy": ((X, X, CLASSES - 1), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_traced_by_itself(name):
    args, named = CALLS[name]
    function = getattr(f, name)
    traced = torch.fx.symbolic_trace(function)
    torch.testing.assert_close(traced(*args, **named), function(*args, **named))
    inside = [n.op for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
    assert inside == ["call_function"]


@pytest.mark.parametrize("name", ["swiglu", "embedding", "layer_norm", "rope"])
def test_a_symbol_may_be_any_argument(name):
    """And what was unused when it was asked about is still there."""
    calls = {
        "swiglu": lambda x: f.swiglu(X, x),
        "embedding": lambda x: f.embedding(CLASSES, x),
        "layer_norm": lambda x: f.layer_norm(X, (8,), residual=x),
        "rope": lambda x: f.rope(IMAGE, None, x[:, :3], x[:, :3]),
    }
    x = torch.linspace(-1, 1, 72).reshape(9, 8)[: 4 if name in ("swiglu", "layer_norm") else 9]

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        twice = x * 2
        return calls[name](x), twice, y

    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x, X), model(x, X))
    targets = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    assert targets.count(getattr(f, name)) == 1
    assert set(targets) <= {getattr(f, name), operator.mul, operator.getitem}


def test_a_module_that_asks_is_not_traced_by_itself():
    with pytest.raises(dt.DeuteronError, match="SinusoidalEmbedding asks") as caught:
        torch.fx.symbolic_trace(dt.nn.SinusoidalEmbedding(8))
    assert "Sequential" in caught.value.remedy


def test_batch_norm_is_a_leaf_that_counts_its_batches():
    model = One(dt.nn.BatchNorm2d(4))
    traced = torch.fx.symbolic_trace(model)
    assert int(model.inner.num_batches_tracked) == 0
    traced(IMAGE)
    assert int(traced.inner.num_batches_tracked) == 1


def test_functions_are_recorded_with_all_their_arguments():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8,), 2.0))

        def forward(self, x, stream):
            y, stream = f.rms_norm(x, (8,), self.weight, residual=stream)
            return f.gelu(y, approximate="tanh") + f.sum(stream, dim=1, keepdim=True)

    model = Block()
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(X, X), model(X, X))
    targets = {n.target for n in traced.graph.nodes if n.op == "call_function"}
    assert targets == {f.rms_norm, f.gelu, f.sum, operator.add, operator.getitem}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", DROP_IN)
def test_scripts_have_torchs_modules(name, tmp_path):
    model = nn.Sequential(model_of(name).inner) if len(given(name)) == 1 else model_of(name).inner
    want = model(*given(name))
    script = torch.jit.script(model)
    script.save(str(tmp_path / "script.pt"))
    torch.testing.assert_close(script(*given(name)), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "module",
    [
        dt.nn.SwiGLU(),
        dt.nn.LayerNorm(8, activation="gelu"),
        dt.nn.CrossEntropyLoss(z_loss=1e-4),
        dt.nn.LinearCrossEntropy(),
        type("Mine", (dt.nn.GELU,), {})(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_torch_does_not_have_is_refused_by_name(module):
    with pytest.raises(dt.DeuteronError, match=f"{type(module).__name__}.* TorchScript") as caught:
        torch.jit.script(nn.Sequential(module))
    assert "torch.compile" in caught.value.remedy
