"""Vendor calls on a GPU, on odd shapes, against float64. Needs torch, pytest and the checkout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tolerances import allowed, error

import deuteron as dt
from deuteron.engines.vendor.fused import VendorFused
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Context, fuse, run_passes
from deuteron.plan.cache import Cache
from deuteron.plan.choose import Option, Survey
from deuteron.plan.decide import constants_on
from deuteron.plan.find import Finder

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def conv(n, c, h, w, k, size, *, relu=True, bias=True, residual=False, kind="f16", **attrs):
    """A convolution with constant weights, then what may follow it."""
    g = dt.Graph()
    dtype = dt.ir.dtype(kind).torch
    x = g.tensor("x", (n, c, h, w), kind, layout="nhwc")
    weight = g.constant(torch.randn(k, c // attrs.get("groups", 1), size, size).to(dtype) / size)
    out = g.conv(x, weight, g.constant(torch.randn(k).to(dtype)) if bias else None, **attrs)
    if residual:
        out = out + g.tensor("r", out.shape, kind, layout="nhwc")
    (g.relu(out) if relu else out).output("y")
    return g


def linear(rows, k, n, act=None, bias=True, kind="f16"):
    g = dt.Graph()
    dtype = dt.ir.dtype(kind).torch
    w, b = torch.randn(n, k).to(dtype) / k**0.5, torch.randn(n).to(dtype)
    y = g.linear(g.tensor("x", (*rows, k), kind), g.constant(w), g.constant(b) if bias else None)
    y = y if act is None else g.gelu(y, approximate="tanh") if act == "gelu" else g.relu(y)
    y.output("y")
    return g


def attention(heads=6, kv=6, queries=77, keys=77, dim=64, causal=False, mask=False, kind="f16"):
    g = dt.Graph()
    q = g.tensor("q", (2, heads, queries, dim), kind)
    k, v = (g.tensor(name, (2, kv, keys, dim), kind) for name in "kv")
    bias = g.tensor("bias", (2, 1, queries, keys), kind) if mask else None
    g.attention(q, k, v, bias, causal=causal).output("y")
    return g


def widened(m=37, k=72, n=40, kind="bf16"):
    """The gradient of a weight under autocast."""
    g = dt.Graph()
    a, b = g.tensor("a", (k, m), kind), g.tensor("b", (k, n), kind)
    g.cast(g.matmul(g.permute(a, dims=(1, 0)), b), dtype="f32").output("y")
    return g


def resize(mode="bilinear", size=(23, 31), kind="f16"):
    g = dt.Graph()
    x = g.tensor("x", (2, 5, 7, 9), kind, layout="nhwc")
    g.resize(x, size=size, mode=mode).output("y")
    return g


VENDOR: dict[str, tuple[str, Callable[[], dt.Graph]]] = {
    "cudnn": ("cudnn", lambda: conv(2, 24, 13, 11, 40, 3, padding=1)),
    "cudnn bare of bias": ("cudnn", lambda: conv(1, 16, 9, 9, 24, 3, bias=False, stride=2)),
    "cudnn residual": ("cudnn", lambda: conv(3, 32, 7, 5, 48, 1, residual=True)),
    "cudnn residual bf16": ("cudnn", lambda: conv(1, 8, 6, 6, 8, 3, residual=True, kind="bf16")),
    "cudnn groups": ("cudnn", lambda: conv(2, 32, 9, 8, 32, 3, groups=4, padding=1)),
    "cudnn f32": ("cudnn", lambda: conv(2, 12, 9, 8, 20, 3, dilation=2, kind="f32")),
    "cudnn searched": ("cudnn_search", lambda: conv(2, 24, 13, 11, 40, 5, relu=False)),
    "padded": ("cudnn_padded", lambda: conv(2, 3, 33, 29, 24, 7, stride=2, padding=3)),
    "padded, five channels": ("cudnn_padded", lambda: conv(1, 5, 12, 10, 8, 3, bias=False)),
    "taps": ("taps", lambda: conv(2, 16, 17, 19, 24, 3, padding=12, dilation=12)),
    "taps residual": (
        "taps",
        lambda: conv(1, 8, 9, 9, 16, 3, padding=8, dilation=8, residual=True, bias=False),
    ),
    "taps, no middle": ("taps", lambda: conv(1, 8, 20, 21, 8, 2, padding=9, dilation=18)),
    "cublaslt": ("cublaslt", lambda: linear((5, 7), 72, 40)),
    "cublaslt relu": ("cublaslt", lambda: linear((37,), 64, 56, "relu")),
    "cublaslt gelu": ("cublaslt", lambda: linear((3, 11), 128, 96, "gelu", kind="bf16")),
    "cublaslt no bias": ("cublaslt", lambda: linear((9,), 48, 24, bias=False)),
    "cublaslt 1x1": ("cublaslt", lambda: conv(2, 24, 7, 5, 32, 1)),
    "cublaslt f32": ("cublaslt", lambda: linear((13,), 33, 17, kind="f32")),
    "wide": ("wide", widened),
    "wide f16": ("wide", lambda: widened(64, 200, 24, "f16")),
    "sdpa": ("sdpa", lambda: attention()),
    "sdpa causal": ("sdpa", lambda: attention(causal=True, queries=64, keys=64)),
    "sdpa grouped heads": ("sdpa", lambda: attention(heads=8, kv=2, dim=128, kind="bf16")),
    "sdpa mask": ("sdpa", lambda: attention(mask=True, keys=40)),
    "sdpa f32": ("sdpa", lambda: attention(kind="f32", queries=33, keys=65)),
    "planar": ("planar", resize),
    "planar nearest": ("planar", lambda: resize("nearest", (14, 18))),
}


@pytest.mark.parametrize("name", VENDOR)
def test_vendor_calls_against_float64(name):
    recipe, build = VENDOR[name]
    policy, target, engine = dt.Policy(), dt.target(GPU), VendorFused()
    optimised, _ = run_passes(build().ir(), Context(target, policy))
    *_, region = fuse(optimised)[0]  # views may come before it
    constants = constants_on(optimised, GPU)
    finder = Finder(Survey(target, policy), GPU, constants, Cache(Path()), 0.0)
    feed = finder.inputs(region)
    ctx = dt.BuildContext(target, GPU, policy, {v: constants[v] for v in region.constants})
    exact, plain = (evaluate(region.graph, feed, float64=wide) for wide in (True, False))
    assert engine.refuse(region, target, policy) is None
    offered = engine.candidates(region, target, policy)
    mine = [c for c in offered if c.knobs["recipe"] == recipe]
    assert mine, f"{recipe} is not offered, only {[str(c) for c in offered]}"
    worked, refused = [], {}
    for candidate in mine:
        args = [feed[v] for v in region.inputs]
        try:
            thunk, outs, _ = finder._ready(region, Option(candidate, 0.0), ctx, args)
        except RuntimeError as reason:  # an attention backend may not know the shape
            refused[str(candidate)] = reason
            continue
        thunk()
        torch.cuda.synchronize()
        worked.append(candidate)
        for out, value in zip(outs, region.outputs, strict=True):
            limit = allowed(error(plain[value], exact[value]), plain[value].dtype, 4)
            assert error(out, exact[value]) <= limit, str(candidate)
    least = 2 if recipe == "sdpa" else len(mine)
    assert len(worked) >= least, refused
