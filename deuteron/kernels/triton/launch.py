"""How a kernel written by hand is compiled and launched.

>>> scale = Launchable(_scale)  # a @triton.jit function
>>> scale((programs,), x, y, n, 0.5, BLOCK=1024, warps=4)

Triton's own call binds, classifies and looks up its arguments every time, 15 µs and more. Here a
launch makes a key of what changes the compiled code (element types, alignment to 16, the width of
integers, the constants) and finds the kernel in a dictionary; then it passes addresses and numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deuteron.codegen import triton_compile, triton_math
from deuteron.codegen.triton_compile import compile_triton
from deuteron.codegen.triton_load import bound, on
from deuteron.ir.dtype import dtype

POINTERS = {dtype(short).torch: pointer for short, pointer in triton_math.POINTERS.items()}
INT32 = 2**31
Kinds, Constants = Sequence[Any], Mapping[str, Any]


class Launchable:
    """A Triton function, called with tensors and numbers by position and with constants by name.

    Tensors are passed as pointers: strides and sizes are arguments of their own. A None among the
    arguments is a compile-time constant, so a kernel may test ``if bias is not None``. Python
    floats arrive as float32, integers as int32 where they fit, else as int64. Values that belong
    together may be one argument, a tuple or a NamedTuple, and constants may be a NamedTuple, too:
    the kernel reads ``size.height``.

    ``follows``: if the constant CHAIN, or a field CHAIN of a NamedTuple of constants, is true, the
    kernel is launched while the kernel before it still runs, and must call ``gdc_wait()`` before it
    reads or writes memory. ``apart``: products and sums are rounded one by one, never fused, as in
    an interpreter. ``registers``: the most that a thread gets, so that more programs share a
    multiprocessor.
    """

    def __init__(
        self, fn: Any, follows: bool = False, apart: bool = False, registers: int | None = None
    ) -> None:
        self.fn, self.follows, self.apart, self.registers = fn, follows, apart, registers
        self.interpreted = _interpreting()
        self.ready: dict[Any, Any] = {}

    def __call__(
        self, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, **constants: Any
    ) -> None:
        if not all(grid):
            return  # nothing to compute
        if self.interpreted:
            self.fn[grid](*args, **constants)
            return
        raw, kinds, device = described(args)
        key = (device, warps, stages, *kinds, *constants.items())
        found = self.ready.get(key)
        if found is None:
            found = self.ready[key] = self._bound(device, kinds, constants, warps, stages)
        call, rest = found
        x, y, z = (*grid, 1, 1)[:3]
        call(x, y, z, stream_of(device), *raw, *rest)

    def _bound(
        self, device: int, kinds: Kinds, constants: Constants, *how: int
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Return what launches the compiled kernel, and its trailing arguments: a launcher expects
        the constants in their positions, although it does not pass them to the kernel."""
        with on(device):
            call = bound(self.compile(kinds, constants, *how))
        return call, tuple(constants.get(n) for n in self.fn.arg_names[len(kinds) :])

    def over(self, grid: tuple[int, ...], *numbers: Any, **how: Any) -> Callable[..., None]:
        """Return the call as a function of the tensors alone; they come before the numbers."""
        return lambda *tensors: self(grid, *tensors, *numbers, **how)

    def settled(
        self, grid: tuple[int, ...], *numbers: Any, warps: int = 4, **constants: Any
    ) -> Callable[..., None]:
        """Like :meth:`over`, for tensors whose types and device are the same in every call. If all
        addresses are multiples of 16, as those of new tensors are, a call skips the dictionary,
        which halves its time."""
        x, y, z = (*grid, 1, 1)[:3]
        ready: tuple[Callable[..., None], int, tuple[Any, ...]] | None = None

        def run(*tensors: torch.Tensor) -> None:
            nonlocal ready
            raw = [t.data_ptr() for t in tensors]
            bits = 0
            for address in raw:
                bits |= address
            if bits & 15 or self.interpreted or not all(grid):
                self(grid, *tensors, *numbers, warps=warps, **constants)
                return
            if ready is None:
                device = tensors[0].get_device()
                kinds = [*((t.dtype, True) for t in tensors), *described(numbers)[1]]
                call, rest = self._bound(device, kinds, constants, warps, 2)  # the usual stages
                ready = call, device, (*numbers, *rest)
            call, device, rest = ready
            call(x, y, z, stream_of(device), *raw, *rest)

        return run

    def compile(self, kinds: Kinds, constants: Constants, warps=4, stages=2, target: Any = None):
        """Compile the kernel for ``target``, a GPU that need not be present, or the current one.

        ``kinds`` describes every argument, as :func:`described` does: (torch dtype, aligned) for a
        pointer, (name, aligned) for a number, None, or a tuple of these. For a number ``aligned``
        says whether it is a multiple of 16, or is itself a number that divides it.
        """
        fixed: dict[tuple[int, ...], Any] = {}
        attrs: dict[tuple[int, ...], Any] = {}

        def given(kind: Any, *place: int) -> Any:
            if kind is None:
                fixed[place] = None
                return "constexpr"
            if not kind or not isinstance(kind[-1], int):  # a tuple of arguments, maybe empty
                return _alike(kind, [given(k, *place, i) for i, k in enumerate(kind)])
            if kind[1] > 1 or kind[1] is True:
                attrs[place] = [["tt.divisibility", 16 if kind[1] is True else kind[1]]]
            return kind[0] if isinstance(kind[0], str) else POINTERS[kind[0]]

        def constant(value: Any, *place: int) -> Any:
            if hasattr(value, "_fields") or (isinstance(value, tuple) and len(place) > 1):
                return _alike(value, [constant(v, *place, i) for i, v in enumerate(value)])
            fixed[place] = value
            return "constexpr"

        signature: dict[str, Any] = dict.fromkeys(self.fn.arg_names, "constexpr")
        for i, name in enumerate(self.fn.arg_names):
            if i < len(kinds):
                signature[name] = given(kinds[i], i)
            elif name in constants:
                signature[name] = constant(constants[name], i)
        source = _source(self.fn)(self.fn, signature, constexprs=fixed, attrs=attrs)
        given = [constants, *(c._asdict() for c in constants.values() if hasattr(c, "_fields"))]
        early = self.follows and any(each.get("CHAIN") for each in given)
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
        options |= {"enable_fp_fusion": False} if self.apart else {}
        options |= {"maxnreg": self.registers} if self.registers else {}
        return compile_triton(source, options, target)


def _source(fn: Any) -> Any:
    """Return the class that Triton compiles a function from: it differs for Gluon and Triton."""
    if fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def stream_of(device: int) -> int:
    """Return the current stream of a device."""
    return 0 if triton_compile.elsewhere else int(torch._C._cuda_getCurrentRawStream(device))


# ---- early launches (programmatic dependent launch, from Hopper on). Many operators end with a
# small kernel, which merges or adds up what programs of the first one stored. Launching that kernel
# takes longer than running it. Launched early, it waits on the multiprocessors for its turn.


@triton.jit
def enter(CHAIN: tl.constexpr, FIRST: tl.constexpr):
    """Called before a kernel reads or writes memory: let the next kernel of the chain be launched,
    and wait until the kernel before has ended, unless this one is the FIRST."""
    if CHAIN:
        gdc_launch_dependents()
        if not FIRST:
            gdc_wait()


@cache
def chained(device: torch.device) -> bool:
    """Whether a kernel may be launched on this device before the kernel it follows has ended."""
    if triton_compile.elsewhere:
        return bool(triton_compile.elsewhere.arch >= 90)
    if device.type != "cuda" or _interpreting():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Size(int):
    """A number that the compiler assumes nothing about, so that all sizes share one kernel."""

    told = 1


class Line(Size):
    """The row stride or the row length of a matrix, in elements. The compiler learns the largest
    power of two up to 8 that divides it: 8 numbers of 16 bits are moved at once."""

    told = 8


def described(args: Sequence[Any]) -> tuple[list[Any], list[Any], int]:
    """Return the raw values that a kernel gets for its arguments, the kind of each argument, and
    the device of the tensors. A kind is (torch dtype, aligned) for a pointer, (name of its type,
    aligned) for a number, or None; a tuple has a kind for each of its values."""
    raw: list[Any] = []
    kinds: list[Any] = []
    device = NOWHERE
    for a in args:
        value, kind = a, None
        if isinstance(a, torch.Tensor):
            value = a.data_ptr()
            kind = a.dtype, not value & 15
            device = a.get_device()
        elif isinstance(a, tuple):
            known = _NUMBERS.get(id(a))
            if known is not None and known[0] is a:
                value, kind = known[1:]
            else:
                inside, of, there = described(a)
                value, kind, device = tuple(inside), _alike(a, of), max(device, there)
                if there == NOWHERE:
                    if len(_NUMBERS) >= MOST_NUMBERS:
                        _NUMBERS.clear()
                    _NUMBERS[id(a)] = a, value, kind
        elif isinstance(a, float):
            kind = "fp32", False
        elif isinstance(a, Size):
            kind = "i32", gcd(a, a.told)
        elif a is not None:
            kind = "i32" if -INT32 <= a < INT32 else "i64", a % 16 == 0
        raw.append(value)
        kinds.append(kind)
    return raw, kinds, device


NOWHERE = -2  # the device of arguments without a tensor
# What ``described`` found for tuples of numbers, such as the sizes of a kernel, which are the same
# object in every call. The key is the id, because equal numbers (an int, a Size) differ in kind.
_NUMBERS: dict[int, tuple[Any, Any, Any]] = {}
MOST_NUMBERS = 4096


def _alike(given: Any, values: Sequence[Any]) -> Any:
    """``values`` as a tuple, or as the NamedTuple that ``given`` is."""
    return type(given)(*values) if hasattr(given, "_fields") else tuple(values)


def _interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)
