"""What every test can rely on: a cache of its own, a fixed seed, and no GPU needed.

Nothing here imports torch before it is needed: the process that only hands out tests to those of
pytest-xdist, which wait for it, does without.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    import torch

REPO = Path(__file__).resolve().parent.parent
# Each process has a cache of its own; compiled code, whose name says what it is made of, is shared.
RUN_FOLDER = "DEUTERON_TESTS_RUN"
# What plans by estimate go by, in place of a measurement on whatever else this machine does now.
CPU = {"f32": 6.9e10, "f64": 3.4e10, "memory": 2.4e10, "cache": 6.9e10, "call": 1.4e-6}
CPU |= {"by_columns": 1e-12, "f16": 1.7e10, "bf16": 1.7e10}
# Tests of kernels that share out their work are for teams of two threads. All others have one: that
# of another worker is on the other core, and whoever waits for a thread there waits long.
IN_TEAMS = {"test_cpu_kernels", "test_cpu_recipes", "test_codegen", "test_conv_training"}
# For all but these LLVM chooses instructions with the least effort, a fifth of the time: what is
# wrong with a kernel as users get it, these and ``make test-all`` find.
ALL_EFFORT = IN_TEAMS - {"test_cpu_kernels"}
SKIPPED_FOLDERS = {"build", "dist", "scratch", "venv", "node_modules", "__pycache__"}

# Compiling takes longest: how many cases of a test are compiled for a generation in every run.
COMPILED = {80: 1, 90: 1}
# Tests of many cases alike: of how many one is in every run, and all in ``make test-all``.
ONE_IN = {
    "test_codegen.py::test_what_claims_to_be_generated_is_on_every_sample_and_right": 8,
    "test_codegen.py::test_kept_cases": 4,
    "test_engines.py::test_every_engine_on_every_sample": 7,
    "test_ops.py::test_gradients_match_finite_differences": 5,
    "test_ops.py::test_inference_says_what_the_reference_returns": 5,
    "test_cpu_recipes.py::test_every_sample": 3,
    "test_cpu_kernels.py::test_every_activation": 3,
    "test_memory.py::test_random_graphs_run_as_their_reference_says": 6,
    "test_channels_last_norm.py::test_group_norm": 2,
    "test_frontend_torch.py::test_a_call_becomes_our_operators": 5,
    "test_functional.py::test_under_torch_compile": 6,
    "test_functional.py::test_any_memory_order": 2,
    "test_functional.py::test_errors_are_at_most_twice_torchs": 3,
    "test_functional.py::test_a_module_that_calls_ours_is_planned_whole": 2,
    "test_functional_small.py::test_torchs_answers_are_ours": 4,
    "test_functional_table.py::test_an_operator_is_a_function": 3,
    "test_functional_exact.py::test_norms_of_channels_last_with_a_large_mean": 4,
    "test_cpu_kernels.py::test_every_activation_of_16_bits": 3,
    "test_channels_last_norm.py::test_batch_norm_in_training": 2,
    "test_channels_last_norm.py::test_batch_norm_with_other_activations": 2,
    "test_padding.py::test_more_zeros_behind_than_before": 2,
    "test_ops_positions.py::test_rope_written_out_is_the_same": 4,
    "test_replace.py::test_a_module_is_known_by_what_it_computes": 2,
    "test_nn.py::test_a_module_is_torchs": 2,
    "test_optim.py::test_without_generated_code": 2,
    "test_functional_arguments.py::test_size_does_not_decide_what_is_accepted": 5,
    "test_functional_arguments.py::test_plans_answer_as_torch_does": 3,
    "test_functional_samples.py::test_gradients_of_samples": 3,
    "test_loss.py::test_combinations_against_torch": 3,
    "test_weighted_pool.py::test_planes": 3,
    "test_augment.py::test_gradients": 2,
    "test_functional_samples.py::test_every_sample": 4,
    "test_torch_trace.py::test_what_only_computes_is_recorded": 2,
    "test_volumes.py::test_parts_of_any_model": 2,
    "test_augment.py::test_agrees_with_plain_torch": 2,
    "test_augment_compile.py::test_the_most_code_does_not_spill": 3,
    "test_augment_compile.py::test_it_compiles": 2,
    "test_optim.py::test_updates_compile_without_spills": 3,
    "test_padding.py::test_pools": 3,
    "test_api.py::test_models_of_the_zoo": 2,
    "test_frontend_torch.py::test_models_of_the_zoo_have_no_opaque_nodes": 2,
    "test_torch_trace.py::test_the_graph_is_the_one_torch_export_gives": 3,
    "test_native.py::test_sizes_are_numbers_of_the_call": 2,
    "test_told.py::test_the_page_in_a_browser": 2,
    "test_functional_transforms.py::test_tensors_without_memory": 3,
    "test_functional_transforms.py::test_second_derivatives": 4,
    "test_memory.py::test_only_operators_that_say_so_answer_with_their_input": 2,
    "test_zoo.py::test_activations_keep_their_size": 2,
    "test_zoo.py::test_parameter_count_is_the_published_one": 2,
    "test_volumes.py::test_mixed_precision": 2,
    "test_embedding.py::test_compiled_as_torch_compiles_its_own": 2,
    "test_functional.py::test_opcheck": 2,
    "test_functional_small.py::test_types_under_autocast_are_torchs": 4,
    "test_functional_small.py::test_torchs_arguments_mean_the_same": 2,
}

try:
    from hypothesis import settings
except ImportError:  # a GPU machine without the development tools can still run -m gpu
    pass
else:
    # No deadline: a loaded machine is not a bug. Derandomised: a red test is red again tomorrow.
    settings.register_profile("house", deadline=None, derandomize=True, database=None)
    settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    # Here and not in a fixture: test modules may reach for the cache while they are collected.
    run = os.environ.get(RUN_FOLDER)  # in the processes that pytest-xdist starts
    folders = [Path(tempfile.mkdtemp(prefix="deuteron-tests-"))]
    if run is None:
        run = tempfile.mkdtemp(prefix="deuteron-tests-run-")
        folders.append(Path(run))
    own, shared = folders[0], Path(run)
    for name in ("objects", "ptx"):
        (shared / name).mkdir(exist_ok=True)
        (own / name).symlink_to(shared / name)
    # Threads of torch that wait for each other sleep: those of the other worker have work.
    new = {RUN_FOLDER: run, "DEUTERON_CACHE": str(own), "OMP_WAIT_POLICY": "passive"}
    new["OMP_NUM_THREADS"] = "1"  # in processes that tests start
    # torch.compile would search for garbage each time, hundreds of times; Python does it anyway.
    new["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
    before = {name: os.environ.get(name) for name in (*new, "TRITON_CACHE_DIR")}
    os.environ.update(new)
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out:
        _prepare(config, shared)

    def restore() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    config.add_cleanup(restore)


def _prepare(config: pytest.Config, shared: Path) -> None:
    """For a process that runs tests, not only hands them out."""
    import torch

    from deuteron.target import remember_cpu

    if not torch.cuda.is_available() and find_spec("triton"):
        from tests.ptx import stop_at_ptx

        os.environ["TRITON_CACHE_DIR"] = str(shared / "triton")
        stop_at_ptx()
    if config.option.markexpr == "not sweep" and find_spec("llvmlite"):
        from deuteron.codegen import llvm

        llvm.EFFORT = 0
    for threads in (2, 1):
        torch.set_num_threads(threads)
        remember_cpu(CPU)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """To rewrite the assertions of all modules takes long. Workers begin at the two ends of the
    list, and in the second half each finds what another has kept."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    whole = all(Path(argument).is_dir() for argument in collector.config.args)
    if isinstance(collector, pytest.Dir) and whole and worker.endswith(tuple("13579")):
        sys.path.insert(0, str(collector.path))
        for path in sorted(collector.path.glob("test_*.py"), reverse=True):
            with suppress(Exception, pytest.skip.Exception):  # which are told when it is collected
                importlib.import_module(path.stem)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from tests.sweeps import left_out

    # Whole groups of cases in one test take longest: first, so that no worker ends alone with one.
    items.sort(key=lambda item: "interpreter" not in item.name)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    compiled: Counter[tuple[str, int]] = Counter()
    seen: Counter[str] = Counter()
    thinned: dict[str, list[pytest.Item]] = {}
    for item in items:
        test, arch = item.nodeid.partition("[")[0], _parameters(item).get("arch")
        if arch is not None and not item.get_closest_marker("sweep"):
            compiled[test, arch] += 1
            if compiled[test, arch] > COMPILED[arch]:
                item.add_marker(pytest.mark.sweep)
        every = ONE_IN.get(test.rpartition("/")[2], 1)
        if seen[test] % every:
            item.add_marker(pytest.mark.sweep)
        seen[test] += 1
        if any(map(item.get_closest_marker, ("each_value", "each_pair"))):
            thinned.setdefault(test, []).append(item)
    for group in thinned.values():
        group = [item for item in group if not item.get_closest_marker("sweep")]
        pairs = bool(group) and group[0].get_closest_marker("each_pair") is not None
        for k in left_out([_parameters(item) for item in group], pairs):
            group[k].add_marker(pytest.mark.sweep)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Of a test that passes, a worker of pytest-xdist sends one report in place of five messages:
    thousands of tests take less time than what is said about them."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_collection_finish() -> None:
    # torch.compile flushes the processor's caches to time its guards, for a log that nobody reads.
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0
    # Thousands of tests and all of torch stay until the end: not to be searched for garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    spec = getattr(item, "callspec", None)
    return {} if spec is None else spec.params


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random tensors are the same in every run, and do not depend on which tests ran before."""
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the line above notes what to seed on devices to come, with the whole stack each time
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, or two for what is in :data:`IN_TEAMS`, and LLVM's effort."""
    if request.module.__name__ not in IN_TEAMS:
        yield
        return
    import torch

    from deuteron.codegen import llvm

    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patched:
        if request.module.__name__ in ALL_EFFORT:
            patched.setattr(llvm, "EFFORT", 3)
        llvm.forget()
        yield
        llvm.forget()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def planned() -> Iterator[None]:
    """Small calls of ``dt.functional`` are planned like large ones: tests are about our code.
    Those about what torch answers in its place allow it themselves. No call is known from before:
    a test may have put something else in the place of what answers."""
    from deuteron.functional import delegation, shortcuts

    shortcuts.forget()
    with delegation(False):
        yield


@pytest.fixture(scope="session")
def cache_dir() -> Iterator[Path]:
    """The folder that stands in for the user's cache during the tests."""
    yield Path(os.environ["DEUTERON_CACHE"])


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def repo_files() -> list[Path]:
    """Every file that belongs to the repository: what git tracks, or all there is without git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    tracked = [REPO / name for name in listed.split("\0") if name]
    return [path for path in tracked or sorted(_walk(REPO)) if path.is_file()]


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in {".ci", ".github"}
            if not (hidden or path.name in SKIPPED_FOLDERS or path.name.endswith(".egg-info")):
                yield from _walk(path)
        else:
            yield path


@pytest.fixture
def huge_images() -> torch.Tensor:
    """Zeros [1, planes, 8, 8] on the GPU, more than 2³¹ of them."""
    import torch

    planes = 2**25 + 3
    if torch.cuda.mem_get_info()[0] < 6 * planes * 64:
        pytest.skip("needs a GPU with 12 GiB free")
    return torch.zeros(1, planes, 8, 8, dtype=torch.float16, device="cuda")


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile knows nothing before and after, and eager convolutions compute in float32."""
    import torch

    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch._dynamo.reset()


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that the backend for torch.compile plans, as it comes."""
    found: list[Any] = []
    from deuteron import torch_compile

    plan = torch_compile.Step.__init__

    def noted(self: Any, *how: Any) -> None:
        plan(self, *how)
        found.append(self)

    monkeypatch.setattr(torch_compile.Step, "__init__", noted)
    return found
