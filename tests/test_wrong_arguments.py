"""Arguments as they are mistyped: every call ends in an error that names what is wrong, never in a
number. What torch checks at the same place may answer in torch's words."""

from __future__ import annotations

import inspect

import pytest
import torch

import deuteron as dt
from deuteron.errors import DeuteronError
from tests.tolerances import SINGLE, error

f, nn = dt.functional, dt.nn
X, IMAGE = torch.ones(4, 8), torch.ones(2, 3, 6, 6)
CLASSES = torch.tensor([0, 1, 2, 3])
HEADS, TABLE = torch.ones(1, 2, 3, 8), torch.ones(3, 4)
NHWC, TRAINED = IMAGE.to(memory_format=torch.channels_last), torch.ones(3, requires_grad=True)

WRONG = {
    "no tensor": (lambda: f.gelu(None), "x is None, not a Tensor"),
    "a shape that x does not end with": (lambda: f.rms_norm(X, (7,)), "is not how x"),
    "a weight of another length": (lambda: f.layer_norm(X, (8,), torch.ones(7)), r"\[7\]"),
    "integers": (lambda: f.layer_norm(X.long(), (8,)), "int64|Long"),
    "a weight of another type": (
        lambda: f.layer_norm(X.half(), (8,), torch.ones(8, dtype=torch.float64)),
        "float64|mixed",
    ),
    "groups that do not divide": (lambda: f.group_norm(IMAGE, 2), "3 channels"),
    "no statistics": (lambda: f.batch_norm(IMAGE, None, None), "running_mean"),
    "statistics that train": (
        lambda: f.batch_norm(NHWC, TABLE[:, 0], TRAINED, training=True),
        "have no gradient",
    ),
    "an activation that is none": (
        lambda: f.layer_norm(X, (8,), activation="rulu"),
        "no activation 'rulu'",
    ),
    "an axis out of range": (lambda: f.softmax(X, 5), "out of range|range of"),
    "softmax of integers": (lambda: f.softmax(X.long(), 1), "int64|Long"),
    "an axis of a sum": (lambda: f.sum(X, dim=7), "out of range"),
    "an axis of argmax": (lambda: f.argmax(X, dim=4), "out of range"),
    "an axis of a scan": (lambda: f.cumsum(X, 9), "out of range"),
    "more than there are": (lambda: f.topk(X, 99), "k=99"),
    "an unknown reduction": (lambda: f.cross_entropy(X, CLASSES, reduction="avg"), "'avg'"),
    "a class out of range": (lambda: f.cross_entropy(X, torch.tensor([0, 1, 2, 9])), "class 9"),
    "a class below 0": (lambda: f.cross_entropy(X, torch.tensor([0, 1, 2, -5])), "class -5"),
    "labels of another length": (lambda: f.cross_entropy(X, CLASSES[:3]), r"shape \[3\]"),
    "smoothing above 1": (
        lambda: f.cross_entropy(X, CLASSES, label_smoothing=1.5),
        "label_smoothing=1.5",
    ),
    "a class of a product": (
        lambda: f.linear_cross_entropy(X, torch.ones(5, 8), torch.tensor([0, 1, 2, 9])),
        "class 9 is not one of 5",
    ),
    "a product that does not fit": (
        lambda: f.linear_cross_entropy(X, torch.ones(5, 7), CLASSES),
        "cannot multiply",
    ),
    "a row that is not there": (
        lambda: f.embedding(torch.tensor([0, 9]), torch.ones(5, 4)),
        "out of range",
    ),
    "a row below 0": (lambda: f.embedding(torch.tensor([-1]), torch.ones(5, 4)), "out of range"),
    "rows as floats": (lambda: f.embedding(torch.rand(3), torch.ones(5, 4)), "float32|Float"),
    "a probability above 1": (lambda: f.dropout(X, 1.5), "1.5"),
    "a probability below 0": (lambda: f.dropout(X, -0.1), "-0.1"),
    "no probability": (lambda: f.dropout(X, float("nan")), "nan"),
    "a window of nothing": (lambda: f.max_pool2d(IMAGE, 0), "kernel|greater than zero"),
    "three sizes for two": (
        lambda: f.adaptive_avg_pool2d(IMAGE, (2, 2, 2)),
        r"output_size=\(2, 2, 2\) is not",
    ),
    "a kind of pool": (lambda: f.pyramid_pool2d(IMAGE, kind="median"), "'median'"),
    "a grid of nothing": (lambda: f.pyramid_pool2d(IMAGE, (0,)), r"sizes=\(0,\)"),
    "a mode": (lambda: f.interpolate(IMAGE, scale_factor=2, mode="cube"), "'cube'|cube"),
    "an image of nothing": (lambda: f.interpolate(IMAGE, size=(0, 3)), "0, 3|greater than 0"),
    "channels that do not divide": (lambda: f.pixel_shuffle(IMAGE, 2), "3 channels|divisible"),
    "a grid of three": (lambda: f.grid_sample(IMAGE, torch.zeros(2, 4, 4, 3)), "grid"),
    "an approximation": (lambda: f.gelu(X, approximate="fast"), "fast|approximate"),
    "two devices": (lambda: f.layer_norm(X, (8,), torch.ones(8, device="meta")), "cpu, meta|meta"),
    "a list": (lambda: f.relu([1.0]), "list"),
    "rank 2 for rope": (lambda: f.rope(X), "rank 4"),
    "odd features": (lambda: f.rope(torch.ones(1, 2, 3, 7)), "7 of 7 features"),
    "positions as floats": (lambda: f.rope(HEADS, positions=torch.rand(1, 2)), "float32"),
    "a position beyond the tables": (
        lambda: f.rope(HEADS, cos=TABLE, sin=TABLE, positions=torch.tensor([[0, 7]])),
        "out of range",
    ),
    "a condition of floats": (lambda: f.where(X, X, X), "not bool|boolean"),
    "half of an odd number": (lambda: f.swiglu(torch.ones(4, 7)), "halved"),
    "Dropout": (lambda: nn.Dropout(2.0), "between 0 and 1"),
    "Embedding": (lambda: nn.Embedding(5, 4)(torch.tensor([9])), "out of range"),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(reduction="x")(X, CLASSES), "'x'"),
    "GroupNorm": (lambda: nn.GroupNorm(3, 8), "divisible"),
    "BatchNorm2d of a matrix": (lambda: nn.BatchNorm2d(3)(X), "4D"),
    "BatchNorm2d of one value": (
        lambda: nn.BatchNorm2d(3)(torch.ones(1, 3, 1, 1)),
        "one value|more than 1 value",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_is_refused(what):
    call, says = WRONG[what]
    kinds = (DeuteronError, IndexError, ValueError, RuntimeError, TypeError, NotImplementedError)
    with pytest.raises(kinds, match=says):
        call()


def test_an_ignored_class_counts_for_nothing():
    given = torch.tensor([0, 1, 2, -100])
    want = torch.nn.functional.cross_entropy(X, given)
    assert error(f.cross_entropy(X, given), want) <= SINGLE


FUNCTIONS = [n for n in f.__all__ if inspect.isfunction(getattr(f, n)) and n != "explain"]


STAND_INS = {"Tensor": IMAGE, "int": 2, "float": 1.0, "Sequence": [2], "Callable": lambda *at: True}
STAND_INS |= {"tuple": (2, 2), "Size": 2, "Any": 2, "int | None": 2}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_the_wrong_kind_is_named(name):
    """Whatever the others are: an object that is nothing, and None where there must be a tensor."""
    call = getattr(f, name)
    known = inspect.signature(call).parameters
    words = {key: str(p.annotation).split("[")[0] for key, p in known.items()}
    fine = {
        k: STAND_INS[words[k].split(" | ")[0]] for k, p in known.items() if p.default is p.empty
    }
    for key, p in known.items():
        for given in (object(), *[None] * (p.annotation == "Tensor")):
            if words[key] == "Any":
                continue
            with pytest.raises((DeuteronError, TypeError), match=rf"\b{key}\b|no tensor") as caught:
                call(**{**fine, key: given})
            assert getattr(caught.value, "asked", "…") and getattr(caught.value, "remedy", "…")


KINDS = {
    "one number for two": (lambda: f.attention(HEADS, HEADS, HEADS, window=3), r"window=\(3, 3\)"),
    "a list for a tensor": (lambda: f.cross_entropy(X, [0, 1, 2, 3]), "torch.as_tensor"),
    "a word for a number": (lambda: f.softmax(X, scale="a"), "scale is a str, 'a', not a number"),
    "a word for a flag": (lambda: f.dropout(X, training="no"), "not True or False"),
    "a number of another kind": (lambda: f.rope(HEADS, offset=1.0), "offset is 1.0, not a whole"),
    "a flag for a number": (lambda: f.rope(HEADS, offset=True), "offset is True, not a whole"),
    "more than 64 bits": (lambda: f.var(X, correction=10**30), "does not fit into 64 bits"),
    "a word for a size of a layer": (
        lambda: nn.RotaryEmbedding("a"),
        r"RotaryEmbedding\(…, dim='a'",
    ),
    "half a pair": (lambda: nn.RotaryEmbedding(5), "5 features are no pairs"),
    "no model": (lambda: nn.replace(3), "model is 3, not an nn.Module"),
    "a class for a model": (lambda: nn.quantize(torch.nn.Linear), "model is a type, "),
    "a word for yes or no": (lambda: f.delegation("no"), "not True or False"),
    "a table of nothing": (lambda: f.sinusoidal(4, 8, base=0.0), "base 0.0"),
    "weights of some classes": (
        lambda: f.linear_cross_entropy(X, TABLE.new_ones(5, 8), CLASSES, class_weight=X[0, :4]),
        r"class_weight is \[4\], and there are 5",
    ),
    "a smoothing that is none": (lambda: f.cross_entropy(X, CLASSES, label_smoothing=-1.0), "-1.0"),
    "statistics of one channel": (
        lambda: f.conv_bn_act(IMAGE, torch.ones(3, 3, 1, 1), torch.ones(1), torch.ones(3)),
        r"running_mean of conv_bn_act .* \[1\], not \[3\]",
    ),
}


@pytest.mark.parametrize("what", KINDS)
def test_kinds(what):
    call, says = KINDS[what]
    with pytest.raises(DeuteronError, match=says) as caught:
        call()
    assert caught.value.asked and caught.value.remedy


def test_what_torch_refuses_comes_with_what_was_asked():
    with f.delegation(True), pytest.raises(RuntimeError) as caught:
        f.embedding(CLASSES, X.long(), max_norm=1.0)
    asked = "embedding(index=int64[4], weight=int64[4, 8], max_norm=1.0)"
    assert caught.value.__notes__ == [f"  asked: {asked}"]


@pytest.mark.parametrize(("home", "name"), [(dt, "optimise"), (f, "layernorm")])
def test_python_can_say_what_was_meant(home, name):
    """It looks for names like that among those of the object: "Did you mean: 'optimize'?"."""
    with pytest.raises(AttributeError) as caught:
        getattr(home, name)
    assert (caught.value.obj, caught.value.name) == (home, name)
