"""``dt.nn.replace``: what it takes, what it refuses, and that a model stays the model it was."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.nn.logits import Logits
from deuteron.nn.probe import InDouble
from tests import replace_cases as cases
from tests.sweeps import one_in
from tests.tolerances import DOUBLE, SAME_CODE, SINGLE, SINGLE_LAYERS, allowed, error

SIZE = 32
TAKEN = {
    "RootNorm": (lambda: cases.RootNorm(SIZE), "rms_norm, eps=small"),
    "ShiftedNorm": (lambda: cases.ShiftedNorm(SIZE), "rms_norm, eps=small, weight + 1"),
    "WideNorm": (lambda: cases.WideNorm(SIZE), "rms_norm, eps=small"),
    "BareNorm": (lambda: cases.BareNorm(SIZE), "layer_norm, eps=1e-05"),
    "CentredNorm": (lambda: cases.CentredNorm(SIZE), "layer_norm, eps=eps"),
    "NewGelu": (cases.NewGelu, "gelu_tanh"),
    "ThreeLayers": (lambda: cases.ThreeLayers(SIZE, 48), "swiglu"),
    "JoinedLayers": (lambda: cases.JoinedLayers(SIZE, 48), "geglu, tanh"),
    "CastingLayers": (lambda: cases.CastingLayers(SIZE, 48), "geglu"),
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def shaken(module: nn.Module) -> nn.Module:
    """Parameters that are no ones and zeros."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    return module


def learned(module: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of inputs and parameters."""
    given = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in given)
    module.zero_grad(set_to_none=True)
    y = module(*given)
    y = y[0] if isinstance(y, tuple) else y
    (y if y.dim() == 0 else y.sin().sum()).backward()
    grads = [x.grad for x in given if x.requires_grad]
    return [y.detach(), *grads, *[p.grad.clone() for p in module.parameters()]]


def exactly(module: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, casts to float32 left out."""
    wide = [x.double() if x.is_floating_point() else x for x in given]
    with InDouble():
        return learned(copy.deepcopy(module).double(), *wide)


def as_good(found, theirs, exact, dtype, reduced=1):
    for a, b, c in zip(found, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        assert error(a, c) <= allowed(error(b, c), dtype, reduced)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_a_module_is_known_by_what_it_computes(name, dtype):
    made, by = TAKEN[name]
    module, x = shaken(made()).to(dtype), torch.randn(3, 5, SIZE, dtype=dtype)
    exact, theirs = exactly(module, x), learned(module, x)
    (row, *_) = dt.nn.report(module)
    assert row.by == f"dt.functional.{by}" and not dt.nn.report(module).kept
    assert dt.nn.replace(module) is module
    assert dt.nn.report(module).replaced[0] == row
    as_good(learned(module, x), theirs, exact, dtype, SIZE)
    assert type(module).__name__ == name and isinstance(module, type(made()))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["RootNorm", "ShiftedNorm", "WideNorm"])
def test_types_are_the_authors(name, given, weights):
    """Which of x and the weight decides is found out, and nothing is rounded that was not."""
    module = shaken(TAKEN[name][0]()).to(weights)
    x = torch.randn(4, SIZE, dtype=given)
    exact, theirs = exactly(module, x), learned(module, x)
    as_good(learned(dt.nn.replace(module), x), theirs, exact, given, SIZE)


def test_a_layer_that_is_kept_in_float32_gets_that():
    module = cases.CastingLayers(SIZE, 48).bfloat16()
    module.wo.float()
    x = torch.randn(4, SIZE, dtype=torch.bfloat16)
    want = module(x)
    found = dt.nn.replace(module)(x)
    assert found.dtype == torch.float32 == want.dtype
    assert error(found, want) <= allowed(0.0, torch.bfloat16, 4)


def test_a_gated_mlp_that_casts_may_be_quantised():
    module, x = cases.CastingLayers(SIZE, 64), torch.randn(4, SIZE)
    layers = dt.nn.quantize(copy.deepcopy(module), bits=8, group=SIZE)
    want = layers.wo(layers.act(layers.wi_0(x)) * layers.wi_1(x))
    assert error(dt.nn.replace(layers)(x), want) <= SINGLE_LAYERS


def test_an_activation_of_other_numbers_is_the_authors():
    class Gate(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    module = dt.nn.replace(Gate())
    assert "silu" in str(dt.nn.report(module))
    for x in (torch.arange(-3, 4), torch.randn(5, dtype=torch.complex64)):
        torch.testing.assert_close(module(x), Gate()(x))


# ---- what is refused


class Halved(cases.RootNorm):
    def forward(self, x):
        x = x.view(*x.shape[:-1], 2, -1)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small)
        return self.weight * y.flatten(-2)


class Squared(cases.RootNorm):
    def forward(self, x):
        return super().forward(x) * self.weight


class OutsideEps(cases.RootNorm):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.small)


class Held(cases.ThreeLayers):
    def forward(self, x):
        return self.down(self.b(x).clamp(-100.0, 100.0) * self.act(self.a(x)))


class Scaled(cases.ThreeLayers):
    def forward(self, x):
        return self.down(self.b(x) * self.act(self.a(x))) * 0.5


class Dropping(cases.ThreeLayers):
    def forward(self, x):
        return self.down(F.dropout(self.b(x) * self.act(self.a(x)), 0.5, self.training))


class Sharp(cases.ThreeLayers):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.act = nn.Softplus()


class Counting(cases.RootNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Widening(cases.NewGelu):
    def forward(self, x):
        return super().forward(x.float())


class Mending(nn.Module):
    """Where x is nan it is 0."""

    def forward(self, x):
        return torch.where(x > 0.0, x, 0.0)


class Weighted(cases.ThreeLayers):
    """With a factor that training or a checkpoint may change."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        return self.down(self.b(x) * self.act(self.a(x)) * self.factor)


class Watching(cases.ThreeLayers):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("peak", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.peak.copy_(torch.maximum(self.peak, x.detach().abs().max()))
        self.seen.append(x.shape)
        return super().forward(x)


REFUSED = {
    "Halved": "no RMS or layer norm",
    "Squared": "no RMS or layer norm",
    "OutsideEps": "no RMS or layer norm",
    "Held": "is not what its last layer takes",
    "Scaled": "not its result",
    "Dropping": "in training it computes something else",
    "Sharp": "with silu, gelu or relu",
    "Counting": "changes what the module keeps",
    "Widening": "it is gelu_tanh, but for the type",
    "Mending": "it is relu, but for the type of its results or for nan",
    "Weighted": "is not what its last layer takes",
    "Watching": "changes what the module keeps",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_something_else_is_refused_with_the_reason(name):
    made = globals()[name]
    sizes = {cases.RootNorm: [SIZE], cases.ThreeLayers: [SIZE, 48]}
    module = made(*sizes.get(made.__bases__[0], []))
    row = dt.nn.report(module)[0]
    assert not row.by and REFUSED[name] in row.why
    assert type(dt.nn.replace(module)) is made
    # nor has looking at it left anything behind
    assert getattr(module, "calls", 0) == getattr(module, "peak", 0) == 0
    assert not getattr(module, "seen", ())


def test_a_function_that_turns_other_pairs_is_refused(monkeypatch):
    def neighbours(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(1) + q.flip(-1) * sin.unsqueeze(1), k

    monkeypatch.setattr(cases, "apply_rotary", neighbours)
    module = cases.Attention(SIZE, 4)
    assert "apply_rotary: it is not" in dt.nn.report(module)[0].why


def test_a_forward_that_was_put_on_the_module_stays():
    module = cases.RootNorm(SIZE)
    module.forward = lambda x: x + 1
    assert type(dt.nn.replace(module)) is cases.RootNorm
    assert torch.equal(module(torch.zeros(2, SIZE)), torch.ones(2, SIZE))


def test_an_activation_that_is_changed_or_watched_is_still_heard():
    module, x = dt.nn.replace(cases.ThreeLayers(SIZE, 48)), torch.randn(2, SIZE)
    heard = []
    handle = module.act.register_forward_hook(lambda *_: heard.append(1))
    module(x)
    handle.remove()
    handle = module.act.register_full_backward_hook(lambda *_: heard.append(2))
    module(x).sum().backward()
    assert heard == [1, 2]
    handle.remove()
    module.act.forward = torch.sin
    assert torch.equal(module(x), dt.nn.restore(copy.deepcopy(module))(x))
    module.act = nn.ReLU()
    want = dt.nn.restore(copy.deepcopy(module))(x)
    assert error(module(x), want) <= SINGLE


# ---- a whole model


def ids(count: int = 240, words: int = 3000) -> torch.Tensor:
    return torch.randint(0, words, (2, count), generator=torch.Generator().manual_seed(1))


WRITTEN = [
    (cases.RootNorm, cases.ThreeLayers),
    (cases.ShiftedNorm, cases.JoinedLayers),
    (cases.WideNorm, cases.CastingLayers),
]


@pytest.mark.parametrize("tied", one_in(2, [False, True]), ids=["", "tied"])
@pytest.mark.parametrize(("norm", "mlp"), WRITTEN, ids=lambda c: c.__name__)
def test_a_language_model_trains_as_before(norm, mlp, tied):
    model = shaken(cases.Language(norm, mlp, tied=tied))
    x = ids()
    exact, theirs = exactly(model, x, x), learned(model, x, x)
    dt.nn.replace(model)
    as_good(learned(model, x, x), theirs, exact, torch.float32, SIZE)
    assert (model.head.weight is model.words.weight) == tied
    with torch.no_grad():
        loss, logits = model.eval()(x, x)
    assert type(logits) is torch.Tensor and error(loss, exact[0]) <= SINGLE_LAYERS


def test_its_logits_are_made_only_if_somebody_asks():
    model = dt.nn.replace(shaken(cases.Language()))
    loss, logits = model(ids(), ids())
    assert isinstance(logits, Logits) and logits.made is None and logits.shape == (2, 240, 3000)
    loss.backward()
    want = dt.nn.restore(copy.deepcopy(model))(ids())
    assert torch.equal(logits.argmax(-1), want.argmax(-1)) and logits.made is not None
    with dt.functional.delegation(True):
        few = dt.nn.replace(cases.Language(words=50))(ids(8, 50))
        assert type(few) is torch.Tensor  # torch's own calls are quicker there


class Doubled(torch.autograd.Function):
    """A function that looks at no methods of Python's."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


USES = {
    "arithmetic": lambda y: (y / 30.0).tanh() * 30.0,
    "log_softmax": lambda y: y.log_softmax(-1),
    "a slice, then a loss": lambda y: F.cross_entropy(y[0, :-1, :], ids()[0, 1:]),
    "classes in the middle": lambda y: F.cross_entropy(y.transpose(1, 2), ids()),
    "smoothing": lambda y: F.cross_entropy(y.view(-1, 3000), ids().view(-1), label_smoothing=0.1),
    "ours": lambda y: dt.functional.cross_entropy(y.reshape(-1, 3000), ids().view(-1)),
    "a module": lambda y: nn.CrossEntropyLoss(reduction="sum")(y[..., 0, :], ids()[:, 0]),
    "in place": lambda y: F.cross_entropy(y.mul_(0.5).view(-1, 3000), ids().view(-1)),
    "a function of autograd": Doubled.apply,
    "names of arguments": lambda y: y.contiguous(memory_format=torch.contiguous_format).sin(),
    "the names of others": lambda y: y.float(memory_format=torch.preserve_format).double().sin(),
    "a shape by name": lambda y: y.reshape(shape=(-1, 3000)).sin(),
    "as another type": lambda y: y * y.view(torch.int64).sign(),
    "some words": lambda y: y[..., [3, 5]],
    "half of the words": lambda y: y[..., :1500],
    "some positions": lambda y: y[torch.arange(480).view(2, 240) % 3 == 0],
    "the last position": lambda y: y[:, -1],
    "pickled": lambda y: pickle.loads(pickle.dumps(y.detach())) + y,
    "twice": lambda y: F.cross_entropy(y.view(-1, 3000), ids().view(-1)) + y.square().mean(),
}


@pytest.mark.parametrize("use", one_in(2, USES))
def test_logits_are_what_they_would_be(use):
    head = nn.Linear(SIZE, 3000).double()
    model = nn.ModuleDict({"words": nn.Embedding(3000, SIZE), "head": head})
    x = torch.randn(2, 240, SIZE, dtype=torch.float64)

    def call(y):
        return USES[use](y)

    want = learned(nn.Sequential(head, _Call(call)), x)
    dt.nn.replace(model)
    assert isinstance(head(x), Logits)
    for a, b in zip(learned(nn.Sequential(head, _Call(call)), x), want, strict=True):
        assert error(a, b) <= DOUBLE


def test_a_layer_without_a_bias_gets_gradients_that_reach_its_logits_directly():
    model = nn.ModuleDict({"words": nn.Embedding(3000, 8), "head": nn.Linear(8, 3000, bias=False)})
    x = torch.randn(2, 240, 8)
    want = learned(nn.Sequential(model.head, _Call(Doubled.apply)), x)
    dt.nn.replace(model)
    found = learned(nn.Sequential(model.head, _Call(Doubled.apply)), x)
    assert all(error(a, b) <= SINGLE for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("use", [lambda y, t: y.argmax(-1), F.cross_entropy], ids=["", "loss"])
def test_logits_that_are_used_behind_a_step_are_refused(use):
    model = nn.ModuleDict({"words": nn.Embedding(3000, 8), "head": nn.Linear(8, 3000)})
    logits, target = dt.nn.replace(model).head(torch.randn(480, 8)), ids().view(-1)
    F.cross_entropy(logits, target).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(dt.BindError, match="written to since"):
        use(logits, target)


class _Call(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, y):
        return self.call(y)


def test_restored_it_is_what_it_was():
    model = cases.Language(tied=True)
    before = [(m, type(m), dict(vars(m))) for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    dt.nn.replace(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    model.load_state_dict(cases.Language(tied=True).state_dict())
    assert dt.nn.restore(model) is model
    for module, (same, kind, own) in zip(model.modules(), before, strict=True):
        assert module is same and type(module) is kind and vars(module) == own
    made = nn.Sequential(dt.nn.LayerNorm(4))
    assert type(dt.nn.restore(made)[0]) is dt.nn.LayerNorm  # nobody had replaced anything


def test_a_class_that_something_else_has_changed_since_stays():
    class Twice(nn.Module):
        def forward(self, weight):
            return weight * 2.0

    model, x = dt.nn.replace(nn.Sequential(nn.LayerNorm(8))), torch.randn(2, 8)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Twice())
    want = model(x)
    assert torch.equal(dt.nn.restore(model)(x), want)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(dt.nn.restore(model)[0]) is nn.LayerNorm


CHOSEN = [
    ({"include": "RootNorm"}, 5),
    ({"include": cases.RootNorm}, 5),
    ({"include": "blocks.0"}, 4),
    ({"include": ["*.mlp"]}, 2),
    ({"include": lambda path, module: path.endswith("before")}, 2),
    ({"exclude": ["head", "Embedding", "blocks.1", "norm"]}, 4),
    ({"include": "blocks", "exclude": (nn.SiLU, "ThreeLayers")}, 6),
    ({"exclude": "*"}, 0),
]


@pytest.mark.parametrize(("how", "count"), CHOSEN)
def test_include_and_exclude(how, count):
    model = cases.Language()
    would = dt.nn.report(model, **how)
    dt.nn.replace(model, **how)
    assert len(would.replaced) == count == sum("_stands_for" in vars(m) for m in model.modules())
    assert {row.why for row in would.kept} <= {"not in include", "in exclude"}


def test_a_name_that_means_nothing_is_refused_with_what_is_near():
    for call in (dt.nn.replace, dt.nn.report, dt.nn.quantize):
        for how in ({"include": "RotNorm"}, {"exclude": ["head", "RotNorm"]}):
            with pytest.raises(dt.BindError, match="class 'RotNorm'") as caught:
                call(cases.Language(), **how)
            assert "'RootNorm'" in caught.value.remedy and "clude=" in caught.value.asked
    model = dt.nn.replace(cases.Language(), include="RootNorm")
    dt.nn.replace(model, include="RootNorm")  # which still means what has been replaced


def test_a_report_says_what_became_of_what():
    text = str(dt.nn.report(dt.nn.replace(cases.Language()), exclude="head"))
    assert "RootNorm  →  dt.functional.rms_norm, eps=small  [norm and 4 more]" in text
    assert text.endswith("kept: nothing")
    with pytest.raises(dt.BindError, match="chooses no modules"):
        dt.nn.replace(cases.Language(), exclude=[3])


# ---- how models are used


def test_under_autocast():
    model, x = shaken(cases.Language(words=400)), ids(24, 400)
    exact = exactly(model, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = learned(model, x, x)
        found = learned(dt.nn.replace(model), x, x)
    as_good(found, theirs, exact, torch.bfloat16, SIZE)


def test_with_checkpoints():
    model, x = dt.nn.replace(cases.Language()), ids()
    want = learned(model, x, x)
    model.again = True
    for a, b in zip(learned(model, x, x), want, strict=True):
        assert error(a, b) <= SAME_CODE


def test_copies_and_files():
    model, x = dt.nn.replace(cases.Language(tied=True)), ids()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in (*others, torch.load(file, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert other.head.weight is other.words.weight
        assert torch.equal(other(x, x)[0], model(x, x)[0])
        assert not any("_stands_for" in vars(m) for m in dt.nn.restore(other).modules())


def test_dropout_before_a_residual_drops_in_training_alone():
    module, x, stream = cases.AddAndNorm(SIZE), *torch.randn(2, 400, SIZE)
    want = module.eval()(x, stream)
    dt.nn.replace(module)
    assert dt.nn.report(module)[0].by == "dt.functional.bias_dropout_residual"
    assert error(module(x, stream), want) <= SINGLE
    module.train()
    module.dense.bias.data.fill_(100.0)  # so that what is dropped shows
    module.norm = nn.Identity()
    dropped = ((module(x, stream) - stream).abs() < 1.0).double().mean()
    assert 0.08 < float(dropped) < 0.12


def test_compiled_in_one_graph():
    model, x = dt.nn.replace(cases.Language()), ids(60)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    want = learned(model, x, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for a, b in zip(learned(compiled, x, x), want, strict=True):
        assert error(a, b) <= SINGLE_LAYERS
    for name, count in {"rms_norm": 5, "rotate": 2, "gate": 2}.items():
        assert seen.count(f"deuteron.{name}.default") == count


def test_traced_by_symbols():
    model = nn.Sequential(cases.RootNorm(SIZE), cases.JoinedLayers(SIZE, 48), cases.NewGelu())
    x = torch.randn(4, SIZE)
    want = model(x)
    traced = torch.fx.symbolic_trace(dt.nn.replace(model))
    assert error(traced(x), want) <= SINGLE


def test_exported_and_optimised():
    model, x = cases.Language().eval(), ids(20)
    want = model(x).detach()
    dt.nn.replace(model)
    exported = torch.export.export(model, (x,))
    assert any("deuteron.rotate" in str(node.target) for node in exported.graph.nodes)
    assert error(exported.module()(x), want) <= SINGLE_LAYERS
    fast = dt.optimize(model, x, find=False)
    assert not fast.opaque and error(fast(x), want) <= SINGLE_LAYERS


def test_onnx_has_operators_of_its_own_alone():
    """Without the packages of ONNX, by what the file names."""
    model, x = dt.nn.replace(cases.Language().eval()), ids(20)
    file = io.BytesIO()
    with torch.no_grad():
        torch.onnx.export(model, (x,), file, dynamo=False, dynamic_axes={"ids": [0, 1]})
    assert b"deuteron" not in file.getvalue() and b"aten" not in file.getvalue()


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("norm", "mlp"), WRITTEN, ids=lambda c: c.__name__)
def test_onnx_runs_elsewhere(norm, mlp, dynamo, tmp_path):
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    model, x = shaken(cases.Language(norm, mlp)).eval(), ids(20)
    want, path = model(x).detach(), str(tmp_path / "model.onnx")
    dt.nn.replace(model)
    with torch.no_grad():
        torch.onnx.export(model, (x,), path, dynamo=dynamo, input_names=["ids"])
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    (found,) = runtime.InferenceSession(path).run(None, {"ids": x.numpy()})
    assert error(torch.from_numpy(found), want) <= SINGLE_LAYERS


# ---- models of transformers, where it is installed

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 3000,
    "head_dim": 16,
    "pad_token_id": 0,
}
MODELS = {  # how many modules of the author's classes are replaced
    "Llama": 9,
    "Mistral": 9,
    "Qwen2": 9,
    "Qwen3": 13,
    "Gemma": 9,
    "Gemma2": 13,
    "Phi3": 9,
    "Mixtral": 9,
    "Granite": 9,
    "Olmo": 9,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = shaken(getattr(transformers, f"{name}ForCausalLM")(config)).eval()
    x = ids(100)

    def step():
        model.zero_grad(set_to_none=True)
        found = model(input_ids=x, labels=x)
        found.loss.backward()
        return [found.loss, found.logits, *[p.grad for p in model.parameters()]]

    want = step()
    dt.nn.replace(model)
    rows = [row for row in dt.nn.report(model).replaced if name in row.kind or "Act" in row.kind]
    assert len(rows) == MODELS[name]
    for a, b in zip(step(), want, strict=True):
        assert error(a, b) <= SINGLE_LAYERS
    start = x[:, :5]
    tokens = model.generate(start, max_new_tokens=5, do_sample=False)
    assert torch.equal(
        tokens, dt.nn.restore(model).generate(start, max_new_tokens=5, do_sample=False)
    )


def test_a_gradient_that_the_author_means_otherwise_stays():
    class Through(nn.Module):
        """ReLU, whose gradient goes straight through."""

        def forward(self, x):
            return x + (x.relu() - x).detach()

    class Frozen(nn.Module):
        """An RMS norm whose statistics have no gradient."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6) * self.weight

    assert not dt.nn.report(nn.Sequential(Through(), Frozen())).replaced
