"""Launches of a plan as one native call, without a GPU: the driver's launch function is one of
ours, which looks at what it is handed, or does on the CPU what a kernel would."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeEngine, bit_equal, registered

import deuteron as dt
from deuteron.codegen import launches, triton_load
from deuteron.codegen.calls import Argument
from deuteron.codegen.cuda_driver import Loaded
from deuteron.codegen.launches import UNALIGNED, Launch, LaunchTape, Unrecorded, rehearsed
from deuteron.ir import TensorType

pytest.importorskip("llvmlite")

DRIVERS = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)
STREAM, CPU = 77, torch.device("cpu")


class Driver:
    """Stands for the driver: notes every launch, and does what was said for its function.
    ``refuses``: the function that it answers with an error."""

    def __init__(
        self, does: dict[int, Callable[..., None]] | None = None, refuses: int = 0
    ) -> None:
        self.does, self.refuses, self.seen = does or {}, refuses, []
        self.callback = DRIVERS(self._launch)
        self.address = ctypes.cast(self.callback, ctypes.c_void_p).value or 0

    def _launch(self, config: int, function: int, params: int, extra: int | None) -> int:
        *sizes, _, stream, attributes, count, _ = struct.unpack(
            "<7IIQQII", ctypes.string_at(config, 56)
        )
        words = self.counts[function]
        at = (ctypes.c_void_p * words).from_address(params)
        values = [ctypes.c_uint64.from_address(p).value for p in at]
        early = struct.unpack("<ii16i", ctypes.string_at(attributes, 72))[:3] if count else None
        self.seen.append((function, sizes, stream, early, values, extra))
        if function == self.refuses:
            return 5
        self.does.get(function, lambda *_: None)(*values)
        return 0

    def tape(self, *every: Launch, tensors: int) -> LaunchTape:
        self.counts = {each.function: len(each.parameters) for each in every}
        return LaunchTape(every, tensors, self.address)


def test_every_number_of_a_launch_arrives():
    driver = Driver()
    wide = Launch(11, (5, 6, 7), 256, 4096, True, (Argument(1, 24), 2**64 - 3, Argument(0)))
    plain = Launch(12, (2**31 - 1, 1, 1), 32, 0, False, (Argument(1),))
    tape = driver.tape(wide, plain, tensors=2)
    assert tape.run(tape.pack(160, 2**47), STREAM) == 0
    first = 11, [5, 6, 7, 256, 1, 1, 4096], STREAM, (6, 0, 1), [2**47 + 24, 2**64 - 3, 160], None
    second = 12, [2**31 - 1, 1, 1, 32, 1, 1, 0], STREAM, None, [2**47], None
    assert driver.seen == [first, second]


def test_unaligned_addresses_and_errors_are_answered():
    driver = Driver(refuses=12)
    every = [Launch(n, (1, 1, 1), 32, 0, False, (Argument(0),)) for n in (11, 12, 13)]
    tape = driver.tape(*every, tensors=1)
    assert tape.run(tape.pack(168), 0) == UNALIGNED and not driver.seen
    LaunchTape.failed(UNALIGNED)
    status = tape.run(tape.pack(160), 0)
    assert [each[0] for each in driver.seen] == [11, 12]  # none after the one that was refused
    with pytest.raises(dt.DeuteronError, match="refused launch 2 of a plan: error 5"):
        LaunchTape.failed(status)
    tape = driver.tape(every[1], tensors=1)
    LaunchTape.failed(tape.run(tape.pack(160), 0))  # nothing is done yet: by other means, then


def test_threads_do_not_meet():
    driver = Driver()
    tape = driver.tape(Launch(11, (1, 1, 1), 32, 0, False, (Argument(0), Argument(1))), tensors=2)

    def many(base: int) -> None:
        for i in range(500):
            tape.run(tape.pack(base + 16 * i, base + 16 * i), base)

    threads = [threading.Thread(target=many, args=(base << 20,)) for base in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = [(values, stream) for _, _, stream, _, values, _ in driver.seen]
    assert len(pairs) == 1000
    assert all(a == b and a >> 20 == stream >> 20 for (a, b), stream in pairs)


# ---- one launch, by the driver


class Library:
    """The driver's library: launches go to a Driver, unless there is a ``status`` to answer."""

    def __init__(self, driver: Driver, status: int = 0) -> None:
        self.driver, self.status, self.contexts = driver, status, []

    def used(self, monkeypatch) -> None:
        monkeypatch.setattr("deuteron.codegen.cuda_driver.library", lambda: self)
        monkeypatch.setattr("deuteron.codegen.cuda_driver.launch_function", lambda: self._launch)

    def _launch(self, config: int, function: int, params: int, extra: None) -> int:
        return self.status or self.driver._launch(config, function, params, extra)

    def cuLaunchKernelEx(self, *given: Any) -> int:
        return self._launch(*(each.value for each in given))

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:
        self.contexts.append(index)
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.status = 0
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"misaligned"
        return 0


KINDS = "*fp32", ("i32", "constexpr", ("fp32", "*fp16")), "i64", "i1", "fp64", "constexpr"
VALUES = 4096, (-2, "left out", (0.5, None)), 2**40, True, 0.25, None, 0, 0
WORDS = [4096, 2**32 - 2, 0x3F000000, 0, 2**40, 1, 0x3FD0000000000000, 0, 0]


@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_hands_over_every_kind_of_parameter(monkeypatch, pdl):
    library = Library(Driver())
    library.driver.counts = {11: len(WORDS)}
    library.used(monkeypatch)
    Loaded(kernel_of(11, *KINDS, pdl=pdl), 0).launch((5, 6, 7), STREAM, VALUES)
    early = (6, 0, 1) if pdl else None
    assert library.driver.seen == [(11, [5, 6, 7, 128, 1, 1, 64], STREAM, early, WORDS, None)]


def test_a_thread_gets_the_context_that_it_lacks(monkeypatch):
    library = Library(Driver(), status=201)
    library.driver.counts = {11: 3}
    library.used(monkeypatch)
    Loaded(kernel_of(11, "*fp32"), 3).launch((1, 1, 1), 0, [16, 0, 0])
    assert library.contexts == [3] and len(library.driver.seen) == 1
    library.status = 716
    with pytest.raises(dt.EngineError, match=r"kernel k was refused .* misaligned \(error 716\)"):
        Loaded(kernel_of(11, "*fp32"), 3).launch((1, 1, 1), 0, [16, 0, 0])


@pytest.mark.parametrize(
    ("kinds", "others", "wrong"),
    [
        (("bf16",), {}, "takes a parameter of type bf16"),
        (("*fp32",), {"num_ctas": 2}, "blocks that work together"),
        (("*fp32",), {"profile_scratch_size": 128}, "is profiled"),
    ],
)
def test_what_the_driver_is_not_told_is_refused(kinds, others, wrong):
    with pytest.raises(dt.EngineError, match=wrong):
        Loaded(kernel_of(11, *kinds, **others), 0)


# ---- rehearsals


def kernel_of(function: int, *kinds: Any, pdl: bool = False, **others: Any) -> Any:
    """What Triton would have compiled, as far as a launch is concerned; its binary is a number."""
    about: dict[str, Any] = {"name": "k", "num_warps": 4, "shared": 64, "launch_pdl": pdl}
    about |= dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    about |= {"num_ctas": 1, "launch_cooperative_grid": False} | others
    source = SimpleNamespace(signature=dict(enumerate(kinds)))
    asm = {"cubin": function}
    return SimpleNamespace(metadata=SimpleNamespace(**about), src=source, asm=asm)


@pytest.fixture(autouse=True)
def loading(monkeypatch) -> None:
    """A kernel's number stands for its function, on the only device."""
    monkeypatch.setattr(Loaded, "_load", lambda self, binary: binary)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def launcher(function: int, *kinds: Any, pdl: bool = False) -> Callable[..., None]:
    launch = triton_load.bound(kernel_of(function, *kinds, pdl=pdl))
    return lambda grid, *args: launch(grid, 1, 1, STREAM, *args)


def types(*shapes: tuple[int, ...]) -> list[TensorType]:
    return [TensorType.of(shape, "f32") for shape in shapes]


def test_a_rehearsal_finds_tensors_parts_scratch_and_numbers():
    call = launcher(3, "*fp32", ("*fp32", "constexpr"), "i32", "fp32", "*fp32", "*fp32", pdl=True)

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        room = torch.empty(10, dtype=torch.float64, device=x.device)
        more = x.new_empty((3, 2))
        call(9, x[2:].data_ptr(), (y.data_ptr(), None), -1, 0.5, room[4:].data_ptr(), 4096)
        call(8, more.data_ptr(), (y.data_ptr(), None), 1, 1.0, x.data_ptr(), None)

    found = rehearsed(run, types((4, 5), (7,)), CPU)
    assert found.rooms == [80, 24]
    first = Argument(0, 40), Argument(1), 2**32 - 1, 0x3F000000, Argument(2, 32), 4096, 0, 0
    second = Argument(3), Argument(1), 1, 0x3F800000, Argument(0), 0, 0, 0
    assert [(each.grid[0], each.parameters) for each in found.launches] == [(9, first), (8, second)]
    assert all(
        (each.threads, each.shared, each.early) == (128, 64, True) for each in found.launches
    )
    assert launches.rehearsal() is None


def test_memory_that_triton_wants_for_each_block_is_scratch_of_the_plan():
    made = triton_load.bound(kernel_of(3, "*fp32", global_scratch_size=384))

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        made(5, 2, 1, STREAM, x.data_ptr())

    found = rehearsed(run, types((4,), (4,)), CPU)
    assert found.rooms == [10 * 384]
    assert [each.parameters for each in found.launches] == [(Argument(0), Argument(2), 0)]


@pytest.mark.parametrize(
    "what", [lambda x, y: y.copy_(x), lambda x, y: y.zero_(), lambda x, y: x + y, lambda x, y: None]
)
def test_a_kernel_that_does_more_is_not_recorded(what):
    call = launcher(3, "*fp32", "*fp32")

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        if what(x, y) is not None:
            call(1, x.data_ptr(), y.data_ptr())

    with pytest.raises(Unrecorded):
        rehearsed(run, types((4,), (4,)), CPU)
    assert launches.rehearsal() is None


def test_a_batch_norm_is_three_launches(monkeypatch):
    """A kernel written by hand, compiled for a GPU that is not there: what it reads and writes, in
    which order, and that the second and third may begin early."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from deuteron.engines.base import BuildContext
    from deuteron.engines.triton.kernels import TritonKernels
    from deuteron.kernels.triton import batch_norm, launch
    from tests.launched import GPUS, region_of

    compiled, handles = launch.compile_triton, iter(range(1, 99))

    def compile_for(source: Any, options: Any, target: Any) -> Any:
        kernel = compiled(source, options, GPUTarget("cuda", 90, 32))
        about = kernel.metadata._asdict()
        kinds = source.signature.values()
        return kernel_of(next(handles), *kinds, **about)

    monkeypatch.setattr(launch, "compile_triton", compile_for)
    monkeypatch.setattr(launch, "on", lambda index: nullcontext())
    monkeypatch.setattr(launch, "stream_of", lambda index: STREAM)
    monkeypatch.setattr(batch_norm, "chained", lambda device: True)
    x = TensorType.of((64, 256, 56, 56), "bf16", layout="nhwc")
    c = TensorType.of((256,), "f32")
    how = {"activation": "relu", "packed": "channels"}
    region = region_of("batch_norm_act", x, c, c, c, c, x, **how)
    engine = TritonKernels()
    candidate = engine.candidates(region, GPUS[90], dt.Policy())[0]
    kernel = engine.build(region, candidate, BuildContext(GPUS[90], CPU, dt.Policy(), {}))
    every = (*region.inputs, *region.outputs)
    found = rehearsed(kernel.fn, [region.graph.types[v] for v in every], CPU)
    assert [each.early for each in found.launches] == [False, True, True]
    assert all(each.shared > 0 and each.threads == 128 for each in found.launches)
    places = [
        {p.index for p in each.parameters if isinstance(p, Argument)} for each in found.launches
    ]
    x, weight, bias, mean, var, residual = range(6)
    y, new_mean, new_var, own_mean, rstd, signs, room = range(6, 13)
    assert places[0] == {x, room} and len(found.rooms) == 1
    assert places[1] >= {mean, var, new_mean, new_var, own_mean, rstd, room}
    assert places[2] == {x, y, residual, signs, weight, bias, own_mean, rstd}
    assert {(new_mean - 6, mean), (new_var - 6, var)} == set(kernel.over)


# ---- plans


FUNCTIONS = {"copy": 21, 0: 22, 1: 23}  # by what they do: a copy, sums along an axis


def _matrix(address: int) -> torch.Tensor:
    floats = (ctypes.c_float * 32).from_address(address)
    return torch.frombuffer(floats, dtype=torch.float32).reshape(4, 8)


def _does(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda x, y, *_: _matrix(y).copy_(change(_matrix(x)))


DOES = {21: _does(torch.clone), 22: _does(lambda t: t.cumsum(0)), 23: _does(lambda t: t.cumsum(1))}


class Launching(FakeEngine):
    """Sums along an axis of a matrix by two launches: a copy into scratch memory, and the sums of
    that. By itself the kernel does at once what it launches. With ``odd`` its scratch memory is
    made in a way that no rehearsal knows."""

    odd = False

    def build(self, region: dt.Region, candidate: dt.Candidate, ctx: Any) -> dt.Kernel:
        first, second = self.launch("copy"), self.launch(region.nodes[0].attrs["axis"])

        def run(x: torch.Tensor, y: torch.Tensor) -> None:
            room = torch.empty_like(x) if self.odd else x.new_empty(x.shape)
            first(x, room)
            second(room, y)

        return dt.Kernel(run, writes=True, launches=True)

    def launch(self, what: Any) -> Callable[..., None]:
        noting = launcher(FUNCTIONS[what], "*fp32", "*fp32")

        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            if launches.rehearsal() is not None:
                noting(1, x.data_ptr(), y.data_ptr())
            else:
                self.calls += 1
                DOES[FUNCTIONS[what]](x.data_ptr(), y.data_ptr())

        return call


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    """CUDA as far as a program is concerned, on a CPU."""
    found = Driver(DOES)
    found.counts = dict.fromkeys(DOES, 4)
    monkeypatch.setattr(launches, "driver_launch", lambda: found.address)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr("deuteron.plan.program.launches_from", lambda device: True)
    yield found


def sums() -> dt.Plan:
    """Two regions, with a value between them in the arena."""
    g = dt.Graph("sums")
    g.cumsum(g.cumsum(g.tensor("x", (4, 8)), axis=0), axis=1).output("y")
    return g.compile(device="cpu")


def test_a_plan_hands_its_launches_over_at_once(driver):
    engine, x = Launching("launching", ("cumsum",)), torch.randn(4, 8)
    with registered(engine):
        plan = sums()
        first = plan.run(x=x)["y"]
        assert engine.calls == 4 and not driver.seen  # each by itself, and checked
        again = plan.run(x=x)["y"]
        assert engine.calls == 4 and "n0(p0(" in plan.program.source
        order = [(function, stream) for function, _, stream, *_ in driver.seen]
        assert order == [(n, STREAM) for n in (21, 22, 21, 23)]
        shifted = torch.cat((torch.zeros(1), x.flatten()))[1:].reshape(4, 8)  # not aligned to 16
        third = plan.run(x=shifted)["y"]
        assert engine.calls == 8 and len(driver.seen) == 4
    for found in (first, again, third):
        assert bit_equal(found, x.cumsum(0).cumsum(1))


def test_a_kernel_that_cannot_be_rehearsed_is_launched_apart(driver):
    engine, x = Launching("launching", ("cumsum",)), torch.randn(4, 8)
    engine.odd = True
    with registered(engine):
        plan = sums()
        found = [plan.run(x=x)["y"] for _ in range(2)]
    assert engine.calls == 8 and not driver.seen
    assert "launched apart, it calls aten.empty_like" in plan.program.source
    assert all(bit_equal(y, x.cumsum(0).cumsum(1)) for y in found)
