"""Facts about machines, how the one at hand is measured, and what a policy allows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from deuteron.errors import GraphError
from deuteron.policy import Policy, parse_bytes
from deuteron.target import GPUS, Target, coarse, measure_cpu, names, target

target_module = sys.modules["deuteron.target"]  # deuteron.target itself is the function

MEASURED = {"f32": 8e10, "f64": 4e10, "memory": 1e10, "cache": 5e10, "call": 1e-6}
MEASURED |= {"by_columns": 2e-4, "f16": 2e10, "bf16": 4e11}
KEPT = {name: coarse(value) for name, value in MEASURED.items()}


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """A cache of this test's own, and a measurement that is counted and takes no time."""
    counted = SimpleNamespace(calls=0, path=tmp_path / f"cpu-{torch.get_num_threads()}.json")

    def measure() -> dict[str, float]:
        counted.calls += 1
        return dict(MEASURED)

    monkeypatch.setenv("DEUTERON_CACHE", str(tmp_path))
    monkeypatch.setattr(target_module, "measure_cpu", measure)
    target_module._cpu.cache_clear()
    yield counted
    target_module._cpu.cache_clear()


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_the_tables_numbers_are_plausible(name):
    t = target(name)
    assert t.name == name and t.is_cuda and t.has_tensor_cores
    assert 10 < t.units < 500
    assert 1e11 < t.bandwidth < 2e13 and t.bandwidth < t.cache_bandwidth
    assert 1e6 < t.cache_bytes < t.memory_bytes
    assert 0 < t.launch < t.call < 1e-3
    assert all(0.5 < part <= 1.0 for part in t.reach.values())
    assert t.stream < t.bandwidth
    assert t.peak["f64"] <= t.peak["f32"] <= t.peak["tf32"] <= t.peak["f16"] <= t.peak["i8"]
    assert t.has_fp8 == ("f8e4m3" in t.peak)


def test_products_use_the_matrix_units_and_the_rest_does_not():
    t = target("h200")
    assert t.rate("f16") > 10 * t.rate("f16", product=False)
    assert t.rate("f16", product=False) == t.rate("f32", product=False)
    assert t.rate("f32", allow_tf32=True) > t.rate("f32")
    assert t.rate("i32") == t.rate("f32"), "what is not listed counts as float32"


def test_elementwise_work_in_16_bits_is_float32_arithmetic_on_a_cpu_too():
    t = target("cpu")
    assert t.rate("bf16", product=False) == t.rate("f32", product=False) > t.rate("bf16")


def test_a_target_is_plain_data():
    t = target("h200")
    assert dataclasses.asdict(t)["name"] == "h200"
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.units = 1
    assert target(t) is t and target("H200") is t


def test_unknown_names_are_answered_with_the_known_ones():
    for odd in ("h300", "", torch.device("meta")):
        with pytest.raises(GraphError, match="a100, h100, h200") as caught:
            target(odd)
        assert all(name in caught.value.remedy for name in names())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named_instead():
    with pytest.raises(GraphError, match="no CUDA device") as caught:
        target("cuda:0")
    assert "h200" in caught.value.remedy
    assert not target().is_cuda


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("NVIDIA A10G", "nvidia-a10g"),
    ],
)
def test_the_driver_s_name_finds_the_target(monkeypatch, called, name):
    props = SimpleNamespace(
        name=called, major=8, multi_processor_count=54, total_memory=2**34, L2_cache_size=2**22
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    found = target_module._present_gpu.__wrapped__(0)
    assert found.name == name
    if name not in GPUS:  # half the multiprocessors of the nearest one
        assert found.bandwidth == GPUS["a100"].bandwidth / 2 and found.units == 54


# ---- the CPU -------------------------------------------------------------------------------------


def test_the_cpu_is_measured_once_and_remembered(own_cache):
    first = target("cpu")
    assert target(torch.device("cpu", 0)) is first and target("cpu") is first
    assert own_cache.calls == 1
    target_module._cpu.cache_clear()  # as in another process
    assert target("cpu") == first and own_cache.calls == 1
    saved = json.loads(own_cache.path.read_text())
    assert saved["measured"] == KEPT and saved["identity"]["torch"] == torch.__version__
    assert first.peak["f32"] == KEPT["f32"] and not first.is_cuda and not first.has_fp8
    assert first.peak["bf16"] == KEPT["bf16"] and first.rate("bf16", product=False) == KEPT["f32"]


DAMAGE = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not text": lambda text: "\xff\x00",
    "a list": lambda text: "[1, 2]",
    "no numbers": lambda text: text.replace(str(KEPT["f32"]), '"fast"'),
    "zero": lambda text: text.replace(str(KEPT["f32"]), "0"),
    "nan": lambda text: text.replace(str(KEPT["f32"]), "NaN"),
    "infinite": lambda text: text.replace(str(KEPT["f32"]), "1e999"),
    "a missing field": lambda text: text.replace('"f64"', '"f65"'),
    "another machine": lambda text: text.replace('"machine": "', '"machine": "other'),
    "measured is a list": lambda text: json.dumps(json.loads(text) | {"measured": [1, 2]}),
    "measured is a number": lambda text: json.dumps(json.loads(text) | {"measured": 1}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_measured_again(own_cache, damage):
    good = target("cpu")
    text = own_cache.path.read_text()
    own_cache.path.write_text(DAMAGE[damage](text), encoding="latin-1")
    target_module._cpu.cache_clear()
    assert target("cpu") == good
    assert own_cache.calls == 2
    assert own_cache.path.read_text() == text, "and put right"


def test_another_number_of_threads_is_another_machine(own_cache):
    threads = torch.get_num_threads()
    before = target("cpu")
    try:
        torch.set_num_threads(threads + 1)
        after = target("cpu")
        assert after.units == threads + 1 and own_cache.calls == 2
    finally:
        torch.set_num_threads(threads)
    assert target("cpu") is before
    target_module._cpu.cache_clear()
    assert target("cpu") == before and own_cache.calls == 2, "one record for each"


@pytest.mark.parametrize("off", [0.87, 0.95, 1.05, 1.15])
def test_a_measurement_that_strays_is_the_same_rate(off):
    for rate in (1e-6, 0.75, 6e10):
        assert coarse(coarse(rate) * off) == coarse(rate)
        assert 0.83 < coarse(rate) / rate < 1.2


def test_threads_that_others_keep_waiting_are_no_slower_than_one(monkeypatch):
    """By the clock they are: here every sample of all threads takes an hour."""
    clock = itertools.count(step=3600)
    monkeypatch.setattr(target_module, "SAMPLES", 2)
    monkeypatch.setattr(target_module.time, "perf_counter", lambda: float(next(clock)))
    threads = torch.get_num_threads()
    assert all(measure_cpu()[name] > 1e7 for name in ("f32", "f64", "memory", "cache"))
    assert torch.get_num_threads() == threads


def test_a_cache_that_cannot_be_written_does_no_harm(own_cache, monkeypatch):
    own_cache.path.parent.joinpath("file").write_text("")
    monkeypatch.setenv("DEUTERON_CACHE", str(own_cache.path.parent / "file" / "below"))
    assert isinstance(target("cpu"), Target) and own_cache.calls == 1


def test_the_measurement_gives_finite_rates():
    found = measure_cpu()
    assert set(found) == set(MEASURED)
    assert all(0 < value < math.inf for value in found.values())


# ---- policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (4096, 4096),
        ("17", 17),
        ("256MB", 256_000_000),
        ("1GiB", 2**30),
        ("3B", 3),
        (" 2 GB ", 2 * 10**9),
        ("1.5 kib", 1536),
    ],
)
def test_sizes_are_read(size, count):
    assert parse_bytes(size) == count
    assert Policy(max_workspace=size).max_workspace == count
    assert Policy(max_workspace=size).workspace_limit == count


@pytest.mark.parametrize("size", [-1, "-1MB", "MB", "1XB", "1e3", "", "1 M B", 1.5, True, [1]])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(GraphError):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", "nchw"),
        ("max_error", 0.0),
        ("max_error", -1.0),
        ("max_error", math.nan),
        ("max_error", "1e-3"),
        ("max_workspace", "lots"),
        ("deterministic", "no"),
        ("cuda_graph", 1),
        ("float32", "tf16"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(GraphError, match=field if field != "max_workspace" else "'lots'"):
        Policy(**{field: value})


def test_a_policy_goes_to_a_file_and_back():
    policy = Policy(deterministic=True, max_error=1e-3, max_workspace="1MiB", layout="keep")
    assert Policy.from_dict(json.loads(json.dumps(policy.as_dict()))) == policy
    assert Policy().workspace_limit == math.inf
    for wrong in ({"speed": 11}, {"layout": "up"}):
        with pytest.raises(GraphError):
            Policy.from_dict(wrong)
