"""An optimised model is a model: part of others, copied, pickled, saved, refitted, followed."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple

import pytest
import saved_classes as classes
import torch
from fakes import bit_equal
from tolerances import allowed, error
from torch import nn
from torch.utils import _pytree as pytree

import deuteron as dt
from deuteron.model.plans import Plans
from deuteron.plan.cache import checksum


def network() -> nn.Module:
    """With batch norms, which are folded, and products, which are packed."""
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    made.append(nn.Linear(8 * 6 * 6, 10))
    nn.init.uniform_(made[1].running_mean)
    nn.init.uniform_(made[1].running_var, 0.5, 2.0)
    return made.eval()


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8)


def agrees(fast: nn.Module, module: nn.Module, *args, **kwargs) -> bool:
    """The same structure, and the same numbers up to roundings."""
    with torch.no_grad():
        want, got = module(*args, **kwargs), fast(*args, **kwargs)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    return all(
        error(a, b) <= allowed(0.0, b.dtype, 512) if isinstance(b, torch.Tensor) else a == b
        for a, b in pairs
    )


# ---- a module among modules


def test_it_is_part_of_other_modules():
    model = network()
    fast = dt.optimize(model, images(), find=False)
    whole = nn.Sequential(fast, nn.Softmax(1))
    assert isinstance(fast, nn.Module) and agrees(
        whole, nn.Sequential(model, nn.Softmax(1)), images()
    )
    assert list(whole.parameters()) == []  # nothing in it is trained
    assert whole.eval() is whole and whole.to("cpu").float() is whole


def test_hooks_see_every_call():
    seen = []
    fast = dt.optimize(network(), images(), find=False)
    before = fast.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    after = fast.register_forward_hook(lambda module, args, result: result * 0 + 7)
    assert (fast(images(3)) == 7).all() and seen == [(3, 3, 8, 8)]
    before.remove()
    after.remove()
    assert not (fast(images(3)) == 7).all() and len(seen) == 1


def test_who_must_see_torchs_operators_sees_them(tmp_path):
    model = network()
    fast = dt.optimize(model, images(), find=False)
    around = dt.optimize(nn.Sequential(fast, nn.Softmax(1)), images(), find=False)
    assert agrees(around, nn.Sequential(model, nn.Softmax(1)), images())
    x = images(3)
    with torch.no_grad():
        assert error(torch.vmap(fast)(x.unsqueeze(1))[:, 0], model(x)) <= allowed(
            0.0, torch.float32, 512
        )
    loaded = dt.load(fast.save(tmp_path / "model.json"))
    with pytest.raises(dt.BindError, match="torch's operators"):
        torch.vmap(loaded)(x.unsqueeze(1))


@pytest.mark.parametrize(
    ("convert", "says"),
    [
        (lambda m: m.half(), "torch.float32 on cpu"),
        (lambda m: m.to(torch.float64), "torch.float32 on cpu"),
        (lambda m: m.to("meta"), "torch.float32 on cpu"),
        (lambda m: m.train(), "eval mode"),
    ],
)
def test_what_plans_cannot_follow_is_refused(convert, says):
    fast = dt.optimize(network(), images(), find=False)
    for module in (fast, nn.Sequential(fast)):
        with pytest.raises(dt.DeuteronError, match=says) as caught:
            convert(module)
        assert caught.value.remedy and caught.value.asked


def test_state_dict_is_that_of_the_module():
    model = network()
    fast = dt.optimize(model, images(), find=False)
    inside = nn.Sequential(fast).state_dict()
    assert list(inside) == [f"0.{name}" for name in model.state_dict()]
    for name, tensor in model.state_dict().items():
        assert bit_equal(inside[f"0.{name}"], tensor)
        inside[f"0.{name}"].zero_()  # a copy: the plans have others
    assert agrees(fast, model, images())
    model.load_state_dict(fast.state_dict())
    stream = io.BytesIO()
    torch.save(fast.state_dict(), stream)
    stream.seek(0)
    model.load_state_dict(torch.load(stream, weights_only=True))


class Scaled(nn.Module):
    """With a state that is no tensor."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        return self.linear(x) * self.factor

    def get_extra_state(self):
        return {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = state["factor"]


def test_extra_state_goes_with_the_weights(tmp_path):
    model, other = nn.Sequential(Scaled()).eval(), nn.Sequential(Scaled(3.0)).eval()
    x = torch.randn(2, 4)
    fast = dt.optimize(model, x, find=False)
    assert fast.state_dict().keys() == model.state_dict().keys()
    model.load_state_dict(fast.state_dict())
    fast.refit(other.state_dict())
    assert agrees(fast, other, x)
    weights = {k: v for k, v in model.state_dict().items() if "extra" not in k}
    fast.load_state_dict(weights, strict=False)
    assert torch.allclose(fast(x), model(x) * 1.5)  # the weights of one, the factor of the other
    fast.refit(other.state_dict())
    again = dt.load(fast.save(tmp_path / "model.json"), other)
    assert agrees(again, other, x) and agrees(again, other, x[:1])
    assert agrees(pickle.loads(pickle.dumps(fast)), other, x[:1])


# ---- copies


def test_a_copy_goes_its_own_way():
    model, other = network(), network()
    fast = dt.optimize(model, images(), find=False)
    again = copy.deepcopy(nn.Sequential(fast))[0]
    again.refit(other.state_dict())
    again(images(5))
    assert agrees(fast, model, images()) and agrees(again, other, images())
    assert len(fast.plans) == 1 and len(again.plans) == 2
    assert agrees(copy.copy(fast), model, images())


def test_pickles_bring_back_all_of_it():
    model = network()
    fast = dt.optimize(model, [images(2), images(4)], find=False)
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    for again in (pickle.loads(pickle.dumps(fast)), torch.load(stream, weights_only=False)):
        for count in (2, 4, 3):
            assert agrees(again, model, images(count))
        again.refit(network().state_dict())
    small, weights = pickle.dumps(fast), sum(t.nbytes for t in fast.state_dict().values())
    assert len(small) < 2 * weights + 50_000


# ---- files


LOADED = """
import sys, torch, deuteron as dt
path, results = sys.argv[1:]
fast = dt.load(path)
import saved_classes as classes
answers = []
for size in ((2, 6), (3, 7)):
    args, kwargs = classes.call(*size)
    out = fast(*args, **kwargs)
    assert type(out) is classes.Output and type(out["answer"]) is classes.Answer
    assert out["name"] == "all" and out["parts"][0][1:] == (None, 3)
    answers += [out["answer"].logits, out["answer"].hidden, out["parts"][0][0]]
torch.save(answers, results)
"""


def test_another_process_loads_the_call_as_it_was(tmp_path):
    model = classes.model()
    args, kwargs = classes.call(2, 6)
    fast = dt.optimize(model, args, kwargs, find=False)
    calls = [classes.call(2, 6), classes.call(3, 7)]
    outs = [fast(*args, **kwargs) for args, kwargs in calls]
    assert all(agrees(fast, model, *args, **kwargs) for args, kwargs in calls)
    path, results = fast.save(tmp_path / "model.json"), tmp_path / "results"
    here = os.pathsep.join((os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", LOADED, str(path), str(results)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": here}
    )
    assert done.returncode == 0, done.stderr
    leaves = [t for out in outs for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    for ours, theirs in zip(torch.load(results), leaves, strict=True):
        assert bit_equal(ours, theirs)  # the same kernels


@pytest.fixture
def saved(tmp_path):
    fast = dt.optimize(network(), images(), find=False)
    fast(images(3))
    return fast, fast.save(tmp_path / "model.json")


def test_a_loaded_model_is_one(saved):
    fast, path = saved
    again = dt.load(path)
    for count in (2, 3):
        x = images(count)
        assert bit_equal(again(x), fast(x))
    for name, tensor in fast.state_dict().items():
        assert bit_equal(again.state_dict()[name], tensor)
    for wrong in (lambda: again(images(4)), lambda: again.refit(fast.state_dict())):
        with pytest.raises(dt.BindError, match="a file holds no module") as caught:
            wrong()
        assert "dt.load(path, model)" in caught.value.remedy
    third = dt.load(again.save(path.with_name("again.json")))
    assert bit_equal(third(images(2) * 0), fast(images(2) * 0)) and "2 for" not in repr(third)


def test_a_module_makes_a_loaded_model_whole(saved):
    fast, path = saved
    plain, other = network(), network()
    again = dt.load(path, plain)
    plain.load_state_dict(fast.state_dict())
    for count in (2, 3, 5):
        assert agrees(again, plain, images(count))
    again.refit(other.state_dict())
    for count in (2, 3, 5):
        assert agrees(again, other, images(count))
    with pytest.raises(dt.BindError, match="not like the one that was saved") as caught:
        dt.load(path, nn.Linear(3, 3))
    assert caught.value.remedy


def test_complex_weights_are_saved(tmp_path):
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.randn(24, dtype=torch.complex64))

        def forward(self, x):
            return torch.view_as_real(torch.view_as_complex(x) * self.turn)

    model, x = Turns().eval(), torch.randn(3, 24, 2)
    fast = dt.optimize(model, x, find=False)
    again = dt.load(fast.save(tmp_path / "model.json"))
    assert agrees(again, model, x) and bit_equal(again(x), fast(x))
    assert torch.equal(again.state_dict()["turn"], model.turn)
    fast.refit({"turn": torch.zeros(24, dtype=torch.complex64)})
    assert not fast(x).any()


def test_files_have_ordinary_permissions(saved, tmp_path):
    before = os.umask(0o027)
    try:
        saved[0].save(tmp_path / "other" / "model.json")
        saved[0].plan.save(tmp_path / "other" / "one.plan.json")
    finally:
        os.umask(before)
    for path in (tmp_path / "other").iterdir():
        assert path.stat().st_mode & 0o777 == 0o640, path


def edited(path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    record["sum"] = checksum(record)
    path.write_text(json.dumps(record))


def container(name):
    kind = {"of": "class", "class": name, "context": None, "inside": [None]}
    return lambda r: r["sizes"][0].update(structure=kind)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (container("os:system"), "not a dataclass"),
        (container("builtins:eval"), "not a dataclass"),
        (container("saved_classes:Sneaky"), "not a dataclass"),
        (container("no_such_package:Output"), "is not here"),
        (container("saved_classes:Missing"), "is not here"),
        (container("os; print(1):x"), "not the name of a class"),
        (lambda r: r["sizes"][0].update(outputs=[]), "does not fit the graph"),
        (lambda r: r["sizes"][0].update(chosen=[]), "what was chosen"),
        (lambda r: r["sizes"][0]["constants"].clear(), "not at hand"),
        (lambda r: r["call"].update(inputs=[{"fixed": "print(1)"}]), "not a literal"),
        (lambda r: r.update(sizes=[]), "no plan"),
        (lambda r: r.update(state={"x": "state none"}), "weights is damaged"),
        (lambda r: r.pop("call"), "damaged"),
        (lambda r: r.update(version=9), "version 9"),
        (lambda r: r.update(format="deuteron-plan"), "not a model file"),
    ],
)
def test_files_that_are_not_as_they_were_written(saved, change, says):
    _, path = saved
    edited(path, change)
    with pytest.raises(dt.FileError, match=says) as caught:
        dt.load(path)
    assert str(path.name) in caught.value.asked


def test_damage_is_noticed(saved):
    _, path = saved
    whole = path.read_text()
    path.write_text(whole.replace('"training": false', '"training": true'))
    with pytest.raises(dt.FileError, match="checksum"):
        dt.load(path)
    path.write_text(whole[:-40])
    with pytest.raises(dt.FileError, match="cut short"):
        dt.load(path)
    path.write_text(whole)
    weights = path.with_name("model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(dt.FileError, match="not the one the graph was made with"):
        dt.load(path)
    weights.unlink()
    with pytest.raises(dt.FileError, match="missing"):
        dt.load(path)


@pytest.mark.parametrize("made", [lambda x: classes.Sneaky([x.sin()]), lambda x: {(1, 2): x.sin()}])
def test_what_cannot_be_saved_says_so(made, tmp_path):
    class Wraps(nn.Module):
        def forward(self, x):
            return made(x)

    fast = dt.optimize(Wraps().eval(), torch.randn(3), find=False)
    with pytest.raises(dt.DeuteronError, match=r"container|keys"):
        fast.save(tmp_path / "model.json")
    assert list(tmp_path.iterdir()) == []


# ---- other weights


def test_other_weights_in_the_same_plans(monkeypatch):
    model, other = network(), network()
    fast = dt.optimize(model, images(), find=False)
    fast(images(3))
    chosen = [[c.candidate for c in plan.decision.choices] for plan in fast.plans.values()]
    fast.refit(other.state_dict())
    for count in (2, 3, 4):
        assert agrees(fast, other, images(count))
    now = [[c.candidate for c in plan.decision.choices] for plan in fast.plans.values()]
    assert now[:2] == chosen
    nn.Sequential(fast).load_state_dict(nn.Sequential(model).state_dict())
    assert agrees(fast, model, images(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("0.bias"), "'0.bias' is missing|Missing.*0.bias"),
        (lambda s: s.update(more=torch.zeros(1)), "'more' is no weight|Unexpected.*more"),
        (lambda s: s.update({"0.bias": torch.zeros(9)}), r"shape \[9\]"),
        (lambda s: s.update({"0.bias": torch.zeros(8).double()}), "torch.float64"),
        (lambda s: s.update({"0.bias": [0.0] * 8}), "is a list"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, says):
    model = network()
    fast = dt.optimize(model, images(), find=False)
    state = network().state_dict()
    change(state)
    with pytest.raises(dt.BindError, match=says) as caught:
        fast.refit(state)
    assert caught.value.remedy and agrees(fast, model, images())
    with pytest.raises(RuntimeError, match=says):
        fast.load_state_dict(state)


def test_what_is_left_out_stays_where_loading_is_not_strict():
    model, other = network(), network()
    fast = dt.optimize(model, images(), find=False)
    whole, plain = nn.Sequential(fast, nn.Linear(10, 2)), nn.Sequential(model, nn.Linear(10, 2))
    state = {"0.0.bias": other[0].bias.detach(), "0.0.more": torch.ones(1), "1.bias": torch.ones(2)}
    found, wanted = (m.load_state_dict(state, strict=False) for m in (whole, plain))
    assert [sorted(keys) for keys in found] == [sorted(keys) for keys in wanted]
    assert agrees(fast, model, images())
    before = fast.plan
    whole.load_state_dict({"1.bias": torch.ones(2)}, strict=False)
    assert fast.plan is before  # nothing to do
    state = {k: v for k, v in other.state_dict().items() if "num_batches" not in k}
    fast.refit(state)  # which torch lets old files lack
    assert agrees(fast, other, images())
    with pytest.raises(RuntimeError, match=r"shape \[9\]"):
        fast.load_state_dict({"0.bias": torch.zeros(9)}, strict=False)


def test_one_weight_of_two_names_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids):
            return self.out(self.table(ids))

    model, other, ids = Tied().eval(), Tied().eval(), torch.randint(0, 20, (2, 5))
    fast = dt.optimize(model, ids, find=False)
    state = other.state_dict()
    state["out.weight"] = state["out.weight"] + 1
    with pytest.raises(dt.BindError, match="are one weight here"):
        fast.refit(state)
    fast.refit(other.state_dict())
    assert agrees(fast, other, ids)


def doubled(model):
    with torch.no_grad():
        model[0].weight.mul_(2.0)


def trained(model):
    model[4].weight.grad = torch.ones_like(model[4].weight)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def trained_by_ours(model):
    model[4].weight.grad = torch.ones_like(model[4].weight)
    dt.optim.AdamW(model.parameters(), lr=0.1).step()


def replaced(model):
    model[4].bias = nn.Parameter(torch.randn(10))


def other_layer(model):
    model[4] = nn.Linear(8 * 6 * 6, 10)


CHANGES = {f.__name__: f for f in (doubled, trained, trained_by_ours, replaced, other_layer)}
CHANGES["loaded"] = lambda model: model.load_state_dict(network().state_dict())
CHANGES["another memory"] = lambda model: setattr(model[4].bias, "data", torch.randn(10))
CHANGES["statistics"] = lambda model: model[1].running_mean.add_(1.0)


@pytest.mark.parametrize("change", CHANGES)
def test_following_the_module(change, monkeypatch):
    model = network()
    fast = dt.optimize(model, [images(2), images(3)], find=False, follow=True)
    assert agrees(fast, model, images(2)) and agrees(fast, model, images(3))
    CHANGES[change](model)
    assert agrees(fast, model, images(3)) and agrees(fast, model, images(2))
    again = dt.optimize(model, images(), find=False)  # which does not follow
    monkeypatch.setattr(Plans, "remade", None)  # nothing changed: nothing is made
    assert agrees(fast, model, images(2)) and agrees(again, model, images(2))


def test_following_a_tensor_that_is_a_plain_attribute():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.rand(4)

        def forward(self, x):
            return x * self.scale

    model, x = nn.Sequential(Scales()).eval(), torch.randn(2, 4)
    fast = dt.optimize(model, x, find=False, follow=True)
    model[0].scale.mul_(3.0)
    assert agrees(fast, model, x)
    model[0].scale = torch.rand(4)
    assert agrees(fast, model, x)


def test_following_tensors_that_were_not_there():
    class Shifts(nn.Linear):
        def forward(self, x):
            further = getattr(self, "further", None)
            return super().forward(x) if further is None else super().forward(x) + further

    model, x = Shifts(4, 4, bias=False).eval(), torch.randn(2, 4)
    fast = dt.optimize(model, x, find=False, follow=True)
    model.bias = nn.Parameter(torch.rand(4))
    assert agrees(fast, model, x)
    model.register_buffer("further", torch.rand(4))
    assert agrees(fast, model, x)


def test_a_choice_that_is_not_to_be_had_is_made_anew(saved):
    fast, path = saved
    edited(path, lambda r: r["sizes"][0]["chosen"]["regions"][0].update(engine="gone"))
    again = dt.load(path)
    assert any("chosen anew" in note for note in again.plan.decision.notes)
    x = images()
    assert error(again(x), fast(x)) <= allowed(0.0, torch.float32, 512)
    edited(path, lambda r: r["sizes"][0]["chosen"].update(structure="another"))
    assert any("another graph" in note for note in dt.load(path).plan.decision.notes)


Row = namedtuple("Row", "a b")


class Answers(nn.Module):
    """Answers in all kinds of containers."""

    def forward(self, x, y=None):
        row, both = Row(x + 1.0, "said"), OrderedDict(b=x * 2.0, a=[x.sum(), None])
        return {"row": row, "both": both, 3: (x.tanh(), 7), "y": () if y is None else (y.exp(),)}


def test_answers_come_in_the_containers_of_the_module():
    model, x, y = Answers(), torch.randn(3, 4), torch.randn(5)
    fast = dt.optimize(model, (x, y), find=False)
    for _ in range(4):
        got, want = fast(x, y), model(x, y)
        assert list(got) == list(want) and type(got["row"]) is Row
        assert got["row"].b == "said" and isinstance(got["both"], OrderedDict)
        assert list(got["both"]) == ["b", "a"] and got[3][1] == 7 and got["both"]["a"][1] is None
        torch.testing.assert_close(got["y"], want["y"])
        torch.testing.assert_close(got["both"]["b"], want["both"]["b"])
        torch.testing.assert_close(got["row"].a, want["row"].a)


def test_calls_that_are_known_by_their_tensors_are_still_told_apart():
    """From the third call on nothing but one native comparison is between a call and its plan."""
    model = nn.Linear(4, 3).eval()
    x, fast = torch.randn(2, 4), dt.optimize(model, torch.randn(2, 4), find=False)

    def right(given):
        with torch.no_grad():
            torch.testing.assert_close(fast(given), model(given))

    for _ in range(4):
        right(x)
    assert fast._plans.known[1] is fast._plans.first
    right(torch.randn(5, 4))  # of another size, of another memory order, of another class
    right(torch.randn(4, 2).t())
    right(nn.Parameter(x))
    right(torch.randn(2, 8)[:, ::2])
    with pytest.raises(dt.BindError, match="float64"):
        fast(x.double())
    with pytest.raises(dt.BindError, match="not a tensor"):
        fast("x")
    with pytest.raises(dt.BindError, match="requires a gradient"):
        fast(x.clone().requires_grad_())
    with torch.inference_mode():
        right(torch.randn(2, 4))
    assert torch.func.vmap(fast)(torch.stack([x, x])).shape == (2, 2, 3)
    before = fast(x)
    fast.refit({name: t + 1.0 for name, t in model.state_dict().items()})
    assert not torch.allclose(fast(x), before)
    for _ in range(3):
        fast.find(budget_s=0.05)
        right_now = fast._plans.module(x).detach()
        torch.testing.assert_close(fast(x), right_now)
