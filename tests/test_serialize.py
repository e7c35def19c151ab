"""Plans as files: what comes back is the same, or a FileError; never something else."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from fakes import FakeEngine, check_right, registered, torch_alone
from safetensors.torch import load_file, save_file

import deuteron as dt
from deuteron.plan.cache import checksum


def build(seed: int = 0) -> dt.Graph:
    gen = torch.Generator().manual_seed(seed)
    g = dt.Graph("block, saved")
    x = g.tensor("x", (2, 8, 6, 6))
    w = g.constant(torch.randn(8, 8, 3, 3, generator=gen), "weight")
    h = g.relu(g.conv(x, w, g.constant(torch.randn(8, generator=gen)), padding=1) + x)
    pooled = g.mean(h, axes=(2, 3))
    g.softmax(g.linear(pooled, g.constant(torch.randn(5, 8, generator=gen))), axis=1).output("p")
    g.reshape(pooled, shape=(16,)).output("pooled")
    return g


@pytest.fixture
def feed() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 8, 6, 6)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return build().compile(device="cpu").save(tmp_path / "block.plan.json")


def load(path: Path) -> dt.Plan:
    return dt.load_plan(path, device="cpu")


def rewrite(path: Path, edit) -> None:
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def resign(record: dict) -> None:
    """Give an edited graph the checksum that belongs to it: what somebody hostile would do."""
    text = "\n".join(record["graph"])
    record["graph_sha256"] = hashlib.sha256(text.encode()).hexdigest()


def chosen(plan: dt.Plan) -> list[tuple[tuple[str, ...], str]]:
    return [(c.region.ops, str(c.candidate)) for c in plan.decision.choices]


def right(plan: dt.Plan, feed: dict[str, torch.Tensor]) -> None:
    for _ in range(2):
        check_right(plan.run(feed), build().ir(), feed)


@pytest.mark.parametrize("find", [False, True], ids=["heuristic", "find"])
def test_a_plan_comes_back_the_same(tmp_path, feed, find):
    plan = build().compile(device="cpu", find=find, budget_s=2.0)
    path = plan.save(tmp_path / "sub" / "block.plan.json")
    again = load(path)
    assert chosen(again) == chosen(plan) and again.decision.notes == ()
    assert (again.inputs, again.outputs) == (plan.inputs, plan.outputs)
    assert again.decision.policy == plan.decision.policy and again.decision.mode == "loaded"
    assert [c.option.measured_s for c in again.decision.choices] == [
        c.option.measured_s for c in plan.decision.choices
    ]
    for name, out in plan.run(feed).items():
        assert torch.equal(again.run(feed)[name], out), name
    second = again.save(tmp_path / "second.plan.json")
    rewrite(second, lambda r: r.update(weights=json.loads(path.read_text())["weights"]))
    one, two = (json.loads(p.read_text()) for p in (path, second))
    assert one | {"mode": ""} == two | {"mode": ""}


def test_the_policy_comes_along(tmp_path):
    policy = dt.Policy(deterministic=True, max_error=0.5, max_workspace="1MB", layout="keep")
    path = build().compile(device="cpu", policy=policy).save(tmp_path / "p.plan.json")
    assert load(path).decision.policy == policy


def test_types_names_and_strange_text_survive(tmp_path):
    g = dt.Graph('na"me\n\u2028')
    h = g.tensor("x.0", (3, 4), "bf16", strides=(1, 3))
    n = g.tensor("n", (), "i64")
    g.source = "layer 1 # not a comment\u2028"
    (g.cast(h, dtype="f32") * float("inf") + n).output("out put")
    g.constant(torch.tensor([float("nan"), -0.0, 1e-45])).output('a"b')
    plan = g.compile(device="cpu")
    again = load(plan.save(tmp_path / "odd.plan.json"))
    feed = {"x.0": torch.randn(4, 3).bfloat16().t(), "n": torch.tensor(2)}
    one, two = plan.run(feed), again.run(feed)
    assert list(one) == list(two) == ["out put", 'a"b']
    assert all(torch.equal(one[k].nan_to_num(7.0), two[k].nan_to_num(7.0)) for k in one)
    assert torch.signbit(two['a"b'][1]), "minus zero"


# ---- damaged files


def test_a_file_cut_short_is_refused(saved):
    whole = saved.read_bytes()
    for end in [*range(0, len(whole) - 2, 97), len(whole) - 3]:
        saved.write_bytes(whole[:end])
        with pytest.raises(dt.FileError):
            load(saved)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a plan file"),
        (b"null", "not a plan file"),
        (b"{}", "not a plan file"),
        (b"import os; os.abort()", "not JSON"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(dt.FileError, match=says) as caught:
        load(path)
    assert str(path) in caught.value.asked


def test_a_path_that_cannot_be_read(tmp_path):
    with pytest.raises(dt.FileError, match="no such plan file"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(dt.FileError, match="cannot be read"):
        load(tmp_path)


ODD = [None, 7, "text", [], {}, [None], {"a": 1}]
HARMLESS = {"target", "mode", "device"}  # for people, not read back


@pytest.mark.parametrize("value", ["removed", *ODD], ids=repr)
def test_each_field_edited_or_removed(saved, feed, value):
    """The answer is right, or the file is refused: nothing in between."""
    original = saved.read_text()
    for field in json.loads(original):
        record = json.loads(original)
        if value == "removed":
            del record[field]
        else:
            record[field] = value
        saved.write_text(json.dumps(record))
        if field in ("format", "version", "graph", "graph_sha256", "policy"):
            with pytest.raises(dt.FileError):
                load(saved)
        elif field == "weights" and not record.get("weights"):
            with pytest.raises(dt.FileError, match="not at hand"):
                load(saved)
        else:
            plan = load(saved)
            right(plan, feed)
            if field in ("regions", "environment"):
                assert plan.decision.notes, field
            elif field in HARMLESS:
                assert plan.decision.notes == (), field


@pytest.mark.parametrize("version", [0, 1, "2", 2.5, None])
def test_another_version_is_refused_by_name(saved, version):
    rewrite(saved, lambda r: r.update(version=version))
    with pytest.raises(dt.FileError, match="version") as caught:
        load(saved)
    assert "save it again" in caught.value.remedy


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.pop("deterministic"),
        lambda p: p.update(deterministic="yes"),
        lambda p: p.update(max_error=-1.0),
        lambda p: p.update(max_error="small"),
        lambda p: p.update(max_workspace="lots"),
        lambda p: p.update(layout="upside down"),
        lambda p: p.update(unheard_of=True),
        lambda p: p.update(cuda_graph=1),
    ],
)
def test_a_limit_that_is_damaged_is_not_ignored(saved, edit):
    rewrite(saved, lambda r: edit(r["policy"]))
    with pytest.raises(dt.FileError, match="policy"):
        load(saved)


def test_an_edited_graph_is_refused(saved):
    original = saved.read_text()
    for i, line in enumerate(json.loads(original)["graph"]):
        for changed in (line + " ", line.replace("relu", "tanh").replace("1", "2"), ""):
            record = json.loads(original)
            record["graph"][i] = changed
            if changed != line:
                saved.write_text(json.dumps(record))
                with pytest.raises(dt.FileError, match="checksum"):
                    load(saved)


def test_weights_missing_damaged_or_swapped(saved, feed):
    weights = saved.with_name("block.safetensors")
    whole = weights.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"\xff" * 64, whole[8:]):
        weights.write_bytes(content)
        with pytest.raises(dt.FileError, match="damaged"):
            load(saved)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    weights.write_bytes(bytes(flipped))
    with pytest.raises(dt.FileError, match="not the one"):
        load(saved)
    tensors = load_file(saved.with_name("block.safetensors"))
    for change in (
        lambda t: {**t, "weight": t["weight"] + 1},
        lambda t: {**t, "weight": t["weight"][:4]},
        lambda t: {**t, "weight": t["weight"].double()},
        lambda t: {k: v for k, v in t.items() if k != "weight"},
    ):
        key = next(k for k, t in tensors.items() if t.ndim == 4)
        named = {("weight" if k == key else k): v for k, v in tensors.items()}
        changed = {(key if k == "weight" else k): v for k, v in change(named).items()}
        save_file({k: v.contiguous() for k, v in changed.items()}, weights)
        with pytest.raises(dt.FileError):
            load(saved)
    build(seed=1).compile(device="cpu").save(saved.with_name("other.plan.json"))
    os.replace(saved.with_name("other.safetensors"), weights)
    with pytest.raises(dt.FileError, match="not the one"):
        load(saved)
    weights.unlink()
    with pytest.raises(dt.FileError, match="missing"):
        load(saved)
    weights.write_bytes(whole)
    right(load(saved), feed)


# ---- regions and engines


def swap(record: dict, i: int, j: int) -> None:
    regions = record["regions"]
    regions[i], regions[j] = regions[j], regions[i]


def turn(record: dict) -> None:
    """Two nodes of one region change places, and the entry is signed again."""
    entry = next(e for e in record["regions"] if len(e["nodes"]) > 1)
    entry["nodes"].reverse()
    entry["sum"] = checksum(entry)


REGIONS = {
    "order": lambda r: swap(r, 0, -1),
    "nodes turned round": turn,
    "one missing": lambda r: r["regions"].pop(),
    "one twice": lambda r: r["regions"].append(dict(r["regions"][0])),
    "a node twice": lambda r: r["regions"][0]["nodes"].append(r["regions"][0]["nodes"][0]),
    "one empty": lambda r: r["regions"].insert(0, dict(r["regions"][0], nodes=[])),
    "unknown node": lambda r: r["regions"][0].update(nodes=["nobody"]),
    "an input as node": lambda r: r["regions"][0].update(nodes=["x"]),
    "merged": lambda r: r["regions"][0]["nodes"].extend(r["regions"].pop(1)["nodes"]),
    "entry is text": lambda r: r["regions"].__setitem__(0, "text"),
    "nodes are numbers": lambda r: r["regions"][0].update(nodes=[1, 2]),
    "nodes nested": lambda r: r["regions"][0].update(nodes=[["a"]]),
    "engine edited": lambda r: r["regions"][0].update(engine="torch2"),
    "knobs edited": lambda r: r["regions"][0].update(knobs={"recipe": "os.system"}),
    "no checksum": lambda r: r["regions"][0].pop("sum"),
    "no engine": lambda r: r["regions"][0].pop("engine"),
}


@pytest.mark.parametrize("name", REGIONS)
def test_damaged_regions_are_chosen_anew(saved, feed, name):
    rewrite(saved, REGIONS[name])
    plan = load(saved)
    assert plan.decision.notes, "nothing was said"
    right(plan, feed)


def test_an_engine_that_is_gone_or_newer_is_replaced_with_a_note(tmp_path, feed, monkeypatch):
    torch_alone(monkeypatch)
    path = tmp_path / "p.plan.json"
    knobs = {"block": (16, 8)}
    with registered(FakeEngine(wants=["softmax"], knobs=knobs)):
        plan = build().compile(device="cpu")
        assert "fake" in [c.candidate.engine for c in plan.decision.choices]
        plan.save(path)
        assert chosen(load(path)) == chosen(plan) and load(path).decision.notes == ()
    gone = load(path)
    (note,) = gone.decision.notes
    assert "fake (version 1)" in note and "chosen anew: torch" in note
    assert note in " ".join(str(gone.explain()).split())
    right(gone, feed)
    with registered(FakeEngine(wants=["softmax"], knobs=knobs, version="2")):
        newer = load(path)
        assert len(newer.decision.notes) == 1
        right(newer, feed)


@pytest.mark.parametrize("damage", [None, b"", b"\xff" * 99], ids=["gone", "empty", "garbage"])
def test_weights_that_cannot_be_read_are_named_with_what_helps(tmp_path, damage):
    model = dt.optimize(torch.nn.Linear(300, 300).eval(), torch.ones(1, 300), find=False)
    for path, read in (
        (model.save(tmp_path / "model.json"), dt.load),
        (model.plan.save(tmp_path / "plan.json"), dt.load_plan),
    ):
        weights = path.with_suffix(".safetensors")
        weights.unlink() if damage is None else weights.write_bytes(damage)
        with pytest.raises(dt.FileError, match=f"the weights '{weights.name}' are ") as caught:
            read(path)
        assert str(path) in caught.value.asked and "restore both files" in caught.value.remedy


# ---- hostile files


HOSTILE = {
    "reads a file": ("aten.from_file.default", (("list", "/etc/hostname"),)),
    "not torch's": ("os.system.default", ("true",)),
    "private attribute": ("aten.__class__.default", ()),
    "writes": ("aten.add_.Tensor", (("in", 0), ("in", 0))),
    "writes to out": ("aten.add.out", (("in", 0), ("in", 0))),
    "no operator": ("aten.nothing_of_the_kind.default", ()),
    "odd target": ("aten", ()),
    "no argument": ("aten.roll.default", ((), ("list", 1), ("list", 1))),
    "no such input": ("aten.roll.default", (("in", 7), ("list", 1), ("list", 1))),
    "an input that is no number": ("aten.roll.default", (("in", "x"), ("list", 1), ("list", 1))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_calls_that_reach_outside_are_refused(tmp_path, name):
    g = dt.Graph()
    x = g.tensor("x", (2, 3))
    args = (("in", 0), ("list", 1), ("list", 1))
    g.aten(x, target="aten.roll.default", args=args, out=("f32[2,3]",)).output("y")
    path = g.compile(device="cpu").save(tmp_path / "p.plan.json")
    target, call = HOSTILE[name]

    def edit(record: dict) -> None:
        text = "\n".join(record["graph"]).replace("aten.roll.default", target)
        plain = dt.ir.text.literal(args)
        assert plain in text
        record["graph"] = text.replace(plain, dt.ir.text.literal(call)).split("\n")
        resign(record)

    rewrite(path, edit)
    with pytest.raises(dt.DeuteronError):
        load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("axis=1", "axis=__import__('os').getpid()"),
        ("axis=1", "axis=(lambda: 1)()"),
        ("axis=1", "axis=99"),
        ("axis=1", 'axis="1"'),
        ("axis=1", "axis=1, extra=2"),
        ("= softmax(", "= exec("),
        ("= softmax(", "= no_such_operator("),
        ("f32[2,8,6,6]", "f32[2,8,6]"),
        ("return ", 'return "q"=%nobody, '),
    ],
)
def test_a_graph_signed_by_somebody_else_is_still_checked(saved, old, new):
    def edit(record: dict) -> None:
        text = "\n".join(record["graph"])
        assert old in text
        record["graph"] = text.replace(old, new).split("\n")
        resign(record)

    rewrite(saved, edit)
    with pytest.raises(dt.DeuteronError):
        load(saved)


# ---- saving


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    plan = build().compile(device="cpu")
    with pytest.raises(dt.FileError, match=r"file/block.json' cannot be written: ") as caught:
        plan.save(tmp_path / "file" / "block.json")
    assert "folder that you may write to" in caught.value.remedy


@pytest.mark.parametrize("crash", [1, 2], ids=["before the weights", "before the plan"])
def test_a_crash_while_saving_leaves_the_old_file(tmp_path, feed, monkeypatch, crash):
    path = tmp_path / "block.plan.json"
    plan = build().compile(device="cpu")
    plan.save(path)
    before, names = path.read_bytes(), sorted(os.listdir(tmp_path))
    calls, real = [], os.replace

    def failing(*args):
        calls.append(args)
        if len(calls) == crash:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(dt.FileError, match="No space"):
        build().compile(device="cpu", policy=dt.Policy(deterministic=True)).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == names
    right(load(path), feed)


def test_a_plan_without_large_constants_needs_no_second_file(tmp_path):
    g = dt.Graph()
    (g.tensor("x", (3,)) * 2.0 + g.constant(torch.arange(3.0))).output("y")
    path = g.compile(device="cpu").save(tmp_path / "small.json")
    assert os.listdir(tmp_path) == ["small.json"]
    check_right(load(path).run(x=torch.ones(3)), g.ir(), {"x": torch.ones(3)})
