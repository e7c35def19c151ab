"""From source text to something that launches.

Triton reads a kernel's source through :mod:`inspect`, so the text is entered into
:mod:`linecache` under a name of its own: nothing is written to disk and nothing is run from it.
"""

import hashlib
import linecache
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch

from deuteron.codegen import triton_compile
from deuteron.codegen.cuda_driver import Loaded
from deuteron.codegen.launches import rehearsal
from deuteron.codegen.triton_compile import compile_triton
from deuteron.codegen.triton_math import Arithmetic
from deuteron.codegen.triton_render import HEAD, Launch, Rendered
from deuteron.errors import EngineError
from deuteron.ops.formula import Traced

DTYPES = {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "i32": torch.int32}


@lru_cache(maxsize=512)
def functions(source: str) -> dict[str, Any]:
    """The kernels that ``source`` defines, by name."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<deuteron triton {digest}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)
    names: dict[str, Any] = {"__name__": f"deuteron_triton_{digest}"}
    exec(compile(source, file, "exec"), names)
    return names


@lru_cache(maxsize=512)
def jitted(formula: Traced, exact: bool, divides: bool = True, wide: bool = False) -> Any:
    """A formula as a Triton function of its inputs, for kernels written by hand: they take it as a
    constant and call it. How: see :func:`formula_source`."""
    return functions(formula_source(formula, exact, divides, wide))["formula"]


def formula_source(formula: Traced, exact: bool, divides: bool = True, wide: bool = False) -> str:
    """The source of a Triton function ``formula`` of its inputs. ``exact`` where a float32 is
    stored, not a number of 16 bits; ``wide`` where numbers are float64. Without ``divides`` a
    quotient is a product with the reciprocal: an exact division is a call for rare cases, for which
    a kernel that holds a lot in registers spills them."""
    divisors = frozenset(() if divides else (s.name for s in formula.statements))
    math = Arithmetic(wide, exact, totals=divisors)
    lines = [f"    {s.name} = {math.compute(s, str)}\n" for s in formula.statements]
    found = (formula.result, *formula.others)
    result = ", ".join(r if isinstance(r, str) else math.literal(r) for r in found)
    head = f"@triton.jit\ndef formula({', '.join(formula.inputs)}):\n"
    body = f"{head}{''.join(lines)}    return {result}\n"
    return "\n\n".join((HEAD, *math.helpers(), body))


def compiled(rendered: Rendered, launch: Launch, aligned: bool = True, target: Any = None) -> Any:
    """One kernel, compiled; ``aligned`` promises that every pointer is a multiple of 16."""
    from triton.compiler import ASTSource

    fn = functions(rendered.source)[launch.function]
    kinds = [rendered.pointers[a] for a in launch.arguments]
    signature = dict(zip(fn.arg_names, kinds, strict=True))
    attrs = {(k,): [["tt.divisibility", 16]] for k in range(len(kinds))} if aligned else {}
    options = {"num_warps": rendered.warps, "num_stages": 1, "enable_fp_fusion": False}
    if "tl.device_assert(" in rendered.source:
        options |= {"debug": True, "sanitize_overflow": False}
    return compile_triton(ASTSource(fn, signature, attrs=attrs), options, target)


class Launcher:
    """Calls a rendered program with the least that a launch needs: addresses and a stream.

    Triton's own call binds, classifies and looks up its arguments every time, 15 µs and more;
    here all that was settled when it was built. Addresses that are no multiple of 16 take a
    second compilation, made when they first occur.
    """

    def __init__(self, rendered: Rendered, given: Sequence[str], device: torch.device) -> None:
        self.rendered, self.device = rendered, device
        here = 0 if triton_compile.elsewhere else torch.cuda.current_device()
        self.index = device.index if device.index is not None else here
        self.scratch, offset = {}, 0
        for p in rendered.partials:
            self.scratch[f"#{p.name}"] = offset
            offset += -(-p.count * DTYPES[p.dtype].itemsize // 256) * 256
        self.workspace = offset
        calls = [launch.arguments for launch in rendered.launches]
        self.slots = [[given.index(a) if a in given else a for a in names] for names in calls]
        self.used = sorted({s for slots in self.slots for s in slots if isinstance(s, int)})
        self.aligned = self._bind(True)
        self.unaligned: list[Callable[..., None]] | None = None
        self.plain = len(self.slots) == 1 and self.slots[0] == list(range(len(given)))

    def _bind(self, aligned: bool) -> list[Callable[..., None]]:
        with on(self.index):
            return [
                partial(bound(compiled(self.rendered, launch, aligned)), launch.grid, 1, 1)
                for launch in self.rendered.launches
            ]

    def __call__(self, *tensors: torch.Tensor) -> None:
        if triton_compile.elsewhere:
            return
        addresses = [t.data_ptr() for t in tensors]
        bits = 0
        for k in self.used:
            bits |= addresses[k]
        kernels = self.aligned
        if bits & 15:
            if self.unaligned is None:
                self.unaligned = self._bind(False)
            kernels = self.unaligned
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if self.plain:
            kernels[0](stream, *addresses)
            return
        base = 0
        if self.workspace:
            memory = torch.empty(self.workspace, dtype=torch.uint8, device=self.device)
            base = memory.data_ptr()
        for kernel, slots in zip(kernels, self.slots, strict=True):
            at = [addresses[s] if isinstance(s, int) else base + self.scratch[s] for s in slots]
            kernel(stream, *at)


def on(index: int) -> AbstractContextManager[Any]:
    """The context in which kernels are compiled for the device with this number, and loaded."""
    return nullcontext() if triton_compile.elsewhere else torch.cuda.device(index)


def bound(kernel: Any) -> Callable[..., None]:
    """A compiled kernel as a function of its grid (three numbers), a stream and its arguments,
    loaded on the current device."""
    if triton_compile.elsewhere:
        need, most = int(kernel.metadata.shared), triton_compile.most_shared
        if 0 < most < need:
            raise EngineError(
                f"kernel {kernel.name} needs {need} bytes of shared memory, of {most}"
            )
        return lambda *_: None
    loaded = Loaded(kernel, torch.cuda.current_device())
    device, scratch = torch.device("cuda", loaded.index), loaded.scratch

    def launch(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        noted, room = rehearsal(), 0
        if scratch:  # such as for descriptors of tensors, which blocks write for themselves
            where = device if noted is None else noted.device
            memory = torch.empty(x * y * z * scratch, dtype=torch.uint8, device=where)
            room = memory.data_ptr()
        if noted is None:
            loaded.launch((x, y, z), stream, (*args, room, 0))
        else:
            noted.note(loaded, (x, y, z), (*args, room, 0))

    return launch
