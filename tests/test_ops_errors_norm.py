"""Norms, softmax, attention and losses: what they refuse, and how they compare with PyTorch."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tolerances import allowed, error

from deuteron.errors import GraphError
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.types import same_strides
from deuteron.ops import get, infer
from deuteron.ops.evaluate import evaluate, run_node
from deuteron.passes.differentiate import differentiate


def types(*texts: str | None) -> list[TensorType | None]:
    """ "f32 2 3" → the contiguous type f32[2,3]; None stays None."""
    found: list[TensorType | None] = []
    for text in texts:
        name, *sizes = text.split() if text else [""]
        found.append(TensorType.of([int(s) for s in sizes], name) if text else None)
    return found


# ---- refusals ----------------------------------------------------------------------------------

X, C = "f32 2 4 3", "f32 4"
QKV = ("f32 1 2 3 4", "f32 1 2 5 4", "f32 1 2 5 6")

REFUSED = [
    # operator, inputs, attributes, a word that must be in the message
    ("batch_norm", ("f32 4", C, C), {}, "rank 2"),
    ("batch_norm", ("i32 2 4", C, C), {}, "int32"),
    ("batch_norm", (X, "f32 3", C), {}, "mean"),
    ("batch_norm", (X, C, C, "f32 1 4"), {}, "weight"),
    ("batch_norm", (X, C, C, C, "f64 4"), {}, "bias of batch_norm is float64"),
    ("batch_norm", (X, C, C), {"eps": -1.0}, "eps"),
    ("batch_norm", (X, C), {}, "takes inputs"),
    ("batch_norm_train", ("f32 4",), {}, "rank 2"),
    ("batch_norm_train", (X, "f32 3"), {}, "weight"),
    ("batch_norm_train", (X, None, None, C), {}, "one running statistic"),
    ("batch_norm_train", (X, None, None, C, "f32 5"), {}, "running_var"),
    ("batch_norm_train", ("f32 1 4",), {}, "one value per channel"),
    ("batch_norm_train", (X,), {"momentum": "fast"}, "momentum"),
    ("layer_norm", ("bool 2 3",), {}, "bool"),
    ("layer_norm", ("f32",), {}, "rank 1"),
    ("layer_norm", ("f32 2 3",), {"dims": 3}, "last 3 dimensions"),
    ("layer_norm", ("f32 2 3",), {"dims": 0}, "last 0 dimensions"),
    ("layer_norm", ("f32 2 3", "f32 2"), {}, "weight"),
    ("layer_norm", ("f32 2 3", "f32 3", "f16 3"), {}, "bias of layer_norm is float16"),
    ("layer_norm", ("f32 2 3",), {"eps": math.nan}, "eps"),
    ("rms_norm", ("i64 2 3",), {}, "int64"),
    ("rms_norm", ("f32 2 3", "f32 2"), {}, "weight"),
    ("rms_norm", ("f32 2 3",), {"dims": -1}, "last -1 dimensions"),
    ("rms_norm", ("f32 2 3",), {"axis": 1}, "no attribute 'axis'"),
    ("group_norm", (X,), {}, "'groups'"),
    ("group_norm", (X,), {"groups": 3}, "3 groups"),
    ("group_norm", (X,), {"groups": 0}, "0 groups"),
    ("group_norm", ("f32 4",), {"groups": 2}, "rank 2"),
    ("group_norm", (X, "f32 2"), {"groups": 2}, "weight"),
    ("instance_norm", ("f32 2 4",), {}, "rank 3"),
    ("instance_norm", ("f32 2 4 1",), {}, "one value per channel"),
    ("instance_norm", (X, "f32 3"), {}, "weight"),
    ("softmax", ("f32 2 3",), {"axis": 2}, "axis 2"),
    ("softmax", ("i32 2 3",), {}, "int32"),
    ("softmax", ("f32",), {"axis": 1}, "axis 1"),
    ("log_softmax", ("f32 2 3",), {"axis": -3}, "axis -3"),
    ("log_softmax", ("bool 2 3",), {}, "bool"),
    ("attention", ("f32 3 4", "f32 5 4", "f32 5 6"), {}, "rank 4"),
    ("attention", ("i32 1 2 3 4", "i32 1 2 5 4", "i32 1 2 5 6"), {}, "int32"),
    ("attention", (QKV[0], "f16 1 2 5 4", QKV[2]), {}, "float16"),
    ("attention", (QKV[0], "f32 1 2 5 3", QKV[2]), {}, "4 features"),
    ("attention", (*QKV[:2], "f32 1 2 4 6"), {}, "heads or length"),
    ("attention", (QKV[0], "f32 2 2 5 4", "f32 2 2 5 6"), {}, "batches of 1, 2 and 2"),
    ("attention", (QKV[0], "f32 1 3 5 4", "f32 1 3 5 6"), {}, "share 3 key heads"),
    ("attention", (*QKV, "f32 3 4"), {}, "broadcast"),
    ("attention", (*QKV, "f32 2 2 3 5"), {}, "broadcast"),
    ("attention", (*QKV, "i64 3 5"), {}, "int64"),
    ("attention", QKV, {"scale": "big"}, "scale"),
    ("attention_grad", (QKV[0], *QKV, "f32 1 2 3 6", "f32 1 2 3"), {}, "grad"),
    (
        "attention_grad",
        ("f32 1 2 3 6", QKV[0], "f32 1 2 5 3", QKV[2], "f32 1 2 3 6", "f32 1 2 3"),
        {},
        "features",
    ),
    ("attention_grad", ("f32 1 2 3 6", *QKV, "f32 1 2 3 6", "f32 1 2 5"), {}, "sums of the"),
    ("nll_loss", ("f32", "i64"), {}, "scalar"),
    ("nll_loss", ("f32 2 3", "f32 2 3"), {}, "float32, not integer classes"),
    ("nll_loss", ("f32 2 3", "i64 3"), {}, "target"),
    ("nll_loss", ("f32 2 3", "i64 2", "f32 2"), {}, "weight"),
    ("nll_loss", ("f32 2 3", "i64 2"), {"reduction": "max"}, "reduction"),
    ("cross_entropy", ("i64 2 3", "i64 2"), {}, "int64"),
    ("cross_entropy", ("f32 2 3", "i64 2 1"), {}, "target"),
    ("cross_entropy", ("f32 2 3", "bool 2"), {}, "bool, not integer classes"),
    ("cross_entropy", ("f32 2 3", "f32 2"), {}, "probabilities"),
    ("cross_entropy", ("f32 2 3", "f16 2 3"), {}, "probabilities"),
    ("cross_entropy", ("f32 2 3", "f32 2 3"), {"ignore_index": 1}, "ignore_index=1"),
    ("cross_entropy", ("f32 2 3", "i64 2", "f64 3"), {}, "weight"),
    ("cross_entropy", ("f32 2 3", "i64 2"), {"label_smoothing": 1.5}, "label_smoothing=1.5"),
]


@pytest.mark.parametrize(("name", "inputs", "attrs", "word"), REFUSED)
def test_bad_input_is_refused_by_name(name, inputs, attrs, word):
    with pytest.raises(GraphError) as caught:
        infer(name, types(*inputs), attrs)
    assert word in caught.value.wrong
    assert caught.value.remedy


# ---- how results and gradients are compared ------------------------------------------------------


def answer(name, tensors, **attrs):
    """The reference's results for one operator."""
    build, ins = GraphBuilder(infer, name), []
    for i, t in enumerate(tensors):
        ins.append(None if t is None else build.input(f"x{i}", TensorType.from_tensor(t)))
    build.emit(name, ins, attrs)
    return run_node(build.nodes[0], list(tensors))


def gradients(name, tensors, seed, wrt, **attrs):
    """Gradients of ⟨seed, first result⟩ for the inputs numbered in ``wrt``."""
    build, ins = GraphBuilder(infer, name), []
    for i, t in enumerate(tensors):
        ins.append(None if t is None else build.input(f"x{i}", TensorType.from_tensor(t)))
    build.output("y", build.emit(name, ins, attrs)[0])
    graph = differentiate(build.finish(), "y", [f"x{i}" for i in wrt])
    feed = {f"x{i}": t for i, t in enumerate(tensors) if t is not None}
    if "grad_y" in graph.inputs:
        feed["grad_y"] = seed
    out = evaluate(graph, feed)
    return [out[f"grad_x{i}"] for i in wrt]


def torch_gradients(fn, tensors, seed, wrt):
    """The same by autograd."""
    leaves = [t.clone().requires_grad_() if i in wrt else t for i, t in enumerate(tensors)]
    (fn(*leaves) * seed).sum().backward()
    return [leaves[i].grad for i in wrt]


def assert_close(got, exact, reduced=1, torch_error=0.0):
    assert error(got, exact) <= allowed(torch_error, got.dtype, reduced)


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


# ---- norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_train_updates_as_the_module_does_and_mutates_nothing(tracked):
    x = randn(3, 4, 5)
    module = torch.nn.BatchNorm1d(4, momentum=0.3, dtype=torch.float64)
    old = (randn(4), torch.rand(4, dtype=torch.float64)) if tracked else (None, None)
    kept = [None if t is None else t.clone() for t in old]
    y, mean, var, batch_mean, batch_rstd = answer(
        "batch_norm_train", [x, None, None, *old], momentum=0.3
    )
    if tracked:
        module.running_mean.copy_(old[0])
        module.running_var.copy_(old[1])
        assert all(torch.equal(a, b) for a, b in zip(old, kept, strict=True))
    else:
        module.momentum = 1.0
    assert_close(y, module(x).detach(), 15)
    assert_close(mean, module.running_mean, 15)
    assert_close(var, module.running_var, 15)
    assert_close(batch_mean, x.mean((0, 2)), 15)
    assert_close(batch_rstd, (x.var((0, 2), correction=0) + 1e-5).rsqrt(), 15)


def test_an_empty_batch_leaves_running_statistics_alone():
    old = (randn(4), randn(4))
    y, mean, var, batch_mean, _ = answer("batch_norm_train", [randn(0, 4, 3), None, None, *old])
    assert y.shape == (0, 4, 3) and batch_mean.isnan().all()
    assert torch.equal(mean, old[0]) and torch.equal(var, old[1])
    assert mean is not old[0]


NORMS = [
    ("layer_norm", (5, 6), (6,), 2, {}, lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    ("rms_norm", (5, 6), (6,), 1, {}, lambda x, w: F.rms_norm(x, (6,), w, 1e-6)),
    ("group_norm", (2, 4, 3), (4,), 2, {"groups": 2}, lambda x, w, b: F.group_norm(x, 2, w, b)),
    ("instance_norm", (2, 4, 3), (4,), 2, {}, lambda x, w, b: F.instance_norm(x, None, None, w, b)),
    (
        "batch_norm_train",
        (5, 4, 3),
        (4,),
        2,
        {},
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    ),
]


@pytest.mark.parametrize(("name", "shape", "param", "count", "attrs", "fn"), NORMS)
@pytest.mark.parametrize(
    ("dtype", "offset"),  # bfloat16 cannot tell 1000 from 1001
    [
        (torch.float64, 0.0),
        (torch.float64, 1000.0),
        (torch.float32, 0.0),
        (torch.float32, 1000.0),
        (torch.bfloat16, 0.0),
    ],
)
def test_norms_and_their_gradients_match_torch(name, shape, param, count, attrs, fn, dtype, offset):
    x = (randn(*shape) + offset).to(dtype)
    tensors = [x, *(randn(*param, dtype=dtype) for _ in range(count))]
    seed, wrt = randn(*shape, dtype=dtype), list(range(count + 1))
    wide = [t.double() for t in tensors]
    exact = fn(*wide)
    y = answer(name, tensors, **attrs)[0]
    # a mean of 1000 rounds away this much of a deviation of 1
    rounding = torch.finfo(dtype).eps * offset
    assert_close(y, exact, x.numel(), max(error(fn(*tensors), exact), rounding))
    exact_grads = torch_gradients(fn, wide, seed.double(), wrt)
    torch_grads = torch_gradients(fn, tensors, seed, wrt)
    for ours, theirs, want in zip(
        gradients(name, tensors, seed, wrt, **attrs), torch_grads, exact_grads, strict=True
    ):
        assert_close(ours, want, x.numel(), max(error(theirs, want), rounding))


def test_weights_may_stay_in_float32_under_16_bit_inputs():
    x, w, b = randn(3, 8, dtype=torch.float16), *(randn(8, dtype=torch.float32) for _ in "wb")
    y = answer("layer_norm", [x, w, b])[0]
    assert y.dtype == torch.float16
    assert_close(y, F.layer_norm(x.double(), (8,), w.double(), b.double()), 8)
    dx, dw, db = gradients("layer_norm", [x, w, b], randn(3, 8, dtype=torch.float16), [0, 1, 2])
    assert (dx.dtype, dw.dtype, db.dtype) == (torch.float16, torch.float32, torch.float32)


def test_statistics_alone_have_no_gradient():
    build = GraphBuilder(infer)
    x = build.input("x", TensorType.of((3, 4), "f64"))
    build.output("mean", build.emit("batch_norm_train", [x])[1])
    graph = differentiate(build.finish(), "mean", ["x"])
    out = evaluate(graph, {"x": randn(3, 4), "grad_mean": randn(4)})
    assert not out["grad_x"].any()


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_train", "group_norm"])
def test_results_lie_in_memory_as_torch_puts_them(name):
    c = torch.ones(4)
    fns = {
        "batch_norm": (lambda x: F.batch_norm(x, c, c), [c, c], {}),
        "batch_norm_train": (lambda x: F.batch_norm(x, None, None, training=True), [], {}),
        "group_norm": (lambda x: F.group_norm(x, 2), [], {"groups": 2}),
    }
    fn, params, attrs = fns[name]
    wide = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    for x in (
        wide[:, :4],  # channels last, with gaps between the pixels
        wide[:, 2:6, :, :1],
        wide[:, :4].transpose(2, 3),
        wide[:1, :4, :1, :1].expand(2, 4, 3, 5),
        torch.randn(3, 2, 4, 5).transpose(0, 1)[:, :, :, ::2].permute(0, 2, 1, 3),
    ):
        said = infer(name, [TensorType.from_tensor(t) for t in (x, *params)], attrs)[1][0]
        assert same_strides(x.shape, said.strides, fn(x).stride()), x.stride()


# ---- softmax -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_hard_rows_is_what_torch_says(name):
    inf = math.inf
    x = torch.tensor([[1e4, -1e4, 0.0], [-inf, 0.0, 1.0], [-inf] * 3, [inf, 0.0, 1.0]])
    (y,) = answer(name, [x])
    assert torch.equal(y.isnan(), getattr(F, name)(x, -1).isnan())
    assert y[2:].isnan().all() and not y[:2].isnan().any()


# ---- attention -----------------------------------------------------------------------------------

LENGTHS = [(5, 7), (7, 5), (6, 6), (1, 4)]
HEADS = [(4, 4), (4, 2), (3, 1)]


def masks(kind, batch, heads, rows, columns):
    if kind == "none":
        return None
    bias = randn(batch, heads, rows, columns)
    if kind == "bool":
        seen = bias > 0
        seen[0, 0, 0] = False  # a query that sees no key
        return seen
    if kind == "-inf":
        return bias[:1, :, :1].masked_fill(bias[:1, :, :1] > 0.5, -math.inf)
    return {"full": bias, "keys": bias[0, 0, :1], "heads": bias[0, :, :1]}[kind]


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", ["none", "bool", "full", "keys", "heads", "-inf"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_and_its_gradient_match_torch(kind, causal, scale):
    for (rows, columns), (heads, shared) in product(LENGTHS, HEADS):
        q, k, v = (
            randn(2, heads, rows, 3),
            randn(2, shared, columns, 3),
            randn(2, shared, columns, 4),
        )
        bias = masks(kind, 2, heads, rows, columns)

        def sdpa(q, k, v, bias):
            mask = bias
            if causal and bias is not None:  # torch takes one of the two
                seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
                bools = bias.dtype == torch.bool
                mask = bias & seen if bools else bias.masked_fill(~seen, -math.inf)
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal and bias is None, scale=scale, enable_gqa=True
            )

        tensors = [q, k, v, bias]
        attrs = {"causal": causal, "scale": scale}
        (y,) = answer("attention", tensors, **attrs)
        assert y.is_contiguous()
        exact = sdpa(*tensors)
        assert_close(y, exact, columns * 4)
        wrt = [0, 1, 2, 3] if kind in ("full", "keys", "heads") else [0, 1, 2]
        seed = randn(*y.shape)
        want = torch_gradients(sdpa, tensors, seed, wrt)
        for ours, theirs in zip(
            gradients("attention", tensors, seed, wrt, **attrs), want, strict=True
        ):
            if theirs.abs().max() < 1e-12:  # one key alone: what should cancel is rounded
                assert ours.abs().max() < 1e-12
            else:
                assert_close(ours, theirs, rows * columns * heads)


def test_a_query_that_sees_no_key_gives_zeros_and_takes_no_gradient():
    q, k, v = randn(1, 2, 3, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 4)
    for bias in (torch.ones(3, 5, dtype=torch.bool), torch.zeros(3, 5, dtype=torch.float64)):
        bias[1] = False if bias.dtype == torch.bool else -math.inf
        (y,) = answer("attention", [q, k, v, bias])
        assert not y[:, :, 1].any() and y[:, :, 0].all()
        wrt = [0, 1, 2] + ([3] if bias.is_floating_point() else [])
        grads = gradients("attention", [q, k, v, bias], randn(*y.shape), wrt)
        assert not grads[0][:, :, 1].any()
        assert all(g.isfinite().all() for g in grads)
        assert len(grads) == 3 or not grads[3][1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_16_bits_errs_no_more_than_torchs(dtype):
    q, k, v = (randn(2, 2, 9, 8, dtype=dtype) for _ in "qkv")
    bias = randn(9, 9, dtype=torch.float32)
    wide = [t.double() for t in (q, k, v, bias)]
    (exact,) = answer("attention", wide)
    (y,) = answer("attention", [q, k, v, bias])
    assert y.dtype == dtype
    assert_close(y, exact)
    seed, wrt = randn(*y.shape, dtype=dtype), [0, 1, 2, 3]
    want = gradients("attention", wide, seed.double(), wrt)
    narrow = [q, k, v, bias.to(dtype)]
    theirs = torch_gradients(F.scaled_dot_product_attention, narrow, seed, wrt)
    ours = gradients("attention", [q, k, v, bias], seed, wrt)
    for mine, other, exact in zip(ours, theirs, want, strict=True):
        assert error(mine, exact) <= allowed(error(other, exact), dtype)


def test_attention_counts_its_products():
    t = types("f32 2 4 6 8", "f32 2 2 6 8", "f32 2 2 6 16")
    for causal, share in ((False, 1.0), (True, 21 / 36)):
        attrs, outs = infer("attention", t, {"causal": causal})
        cost = get("attention").cost(t, outs, attrs)
        assert cost.flops == share * 2 * 2 * 4 * 6 * 6 * (8 + 16)
    assert infer("attention", t, {})[0]["scale"] == 1 / math.sqrt(8)


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.each_pair
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smooth", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3), (2, 4, 3, 2), (4,)])
def test_losses_match_torch(shape, ignored, smooth, reduction):
    x, axis = randn(*shape), min(1, len(shape) - 1)
    target = torch.randint(0, 4, shape[:axis] + shape[axis + 1 :])
    if target.ndim:
        target.view(-1)[0] = ignored
    how = {"ignore_index": ignored, "reduction": reduction}
    if smooth == 0.0:
        compare_loss("nll_loss", F.nll_loss, x, target, how)
    compare_loss("cross_entropy", F.cross_entropy, x, target, {**how, "label_smoothing": smooth})
    if ignored < 0:
        shares = torch.rand(shape, dtype=torch.float64)
        how["label_smoothing"] = smooth
        compare_loss("cross_entropy", F.cross_entropy, x, shares, how)


def compare_loss(name, fn, x, target, how):
    for weight in (None, torch.rand(4, dtype=torch.float64) + 0.1):
        tensors = [x, target, weight]
        wrt = [0, 1] if target.is_floating_point() else [0]
        (y,) = answer(name, tensors, **how)
        exact = fn(*tensors, **how)
        assert_close(y, exact, x.numel())
        seed = randn(*y.shape) if y.numel() > 1 else torch.ones_like(y)
        want = torch_gradients(lambda *t: fn(*t, **how), tensors, seed, wrt)
        for ours, theirs in zip(gradients(name, tensors, seed, wrt, **how), want, strict=True):
            assert_close(ours, theirs, x.numel())


@pytest.mark.parametrize("name", ["nll_loss", "cross_entropy"])
def test_a_mean_over_no_target_is_nan_and_sends_back_zeros(name):
    tensors = [randn(3, 4), torch.full((3,), -100), None]
    assert answer(name, tensors)[0].isnan()
    (dx,) = gradients(name, tensors, None, [0])
    assert not dx.any()
    assert answer(name, [randn(0, 4), torch.zeros(0, dtype=torch.int64)])[0].isnan()


@pytest.mark.parametrize("name", ["nll_loss", "cross_entropy"])
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_class_that_does_not_exist_raises_as_in_torch(name, wrong):
    with pytest.raises(IndexError, match="out of bounds"):
        answer(name, [randn(3, 4), torch.tensor([0, wrong, 1])])


def test_a_byte_target_is_not_mistaken_for_the_ignored_one():
    x, target = randn(2, 200), torch.tensor([156, 3], dtype=torch.uint8)  # 156 is −100 in a byte
    (dx,) = gradients("cross_entropy", [x, target], None, [0])
    (want,) = torch_gradients(F.cross_entropy, [x, target.long()], 1.0, [0])
    assert_close(dx, want, 200)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_16_bit_loss_is_rounded_once(dtype):
    x, target = randn(8, 50, dtype=dtype), torch.randint(0, 50, (8,))
    (dx,) = gradients("cross_entropy", [x, target], None, [0])
    (want,) = torch_gradients(F.cross_entropy, [x.double(), target], 1.0, [0])
    assert dx.dtype == dtype
    assert_close(dx, want)
