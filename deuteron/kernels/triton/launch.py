"""How a kernel written by hand is compiled and launched.

>>> scale = Launchable(_scale)  # a @triton.jit function
>>> scale((programs,), x, y, n, 0.5, BLOCK=1024, warps=4)

Triton's own call binds, classifies and looks up its arguments every time, 15 µs and more. Here a
launch is a key made of what changes the code (element types, alignment to 16, the width of
integers, the constants) and a dictionary; after that only addresses and numbers are handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from deuteron.codegen.triton_compile import compile_triton
from deuteron.codegen.triton_load import bound

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
INT32 = 2**31


class Launchable:
    """A Triton function of tensors and numbers, then of constants given by name.

    Tensors become pointers: strides and sizes are arguments of their own. A None among the
    arguments is a constant: the kernel tests ``if bias is not None``. Python floats arrive as
    float32, integers as int32 where they fit, else as int64. Arguments that belong together may be
    a NamedTuple, whose fields the kernel reads by name.

    One that ``follows`` another kernel of ours, with the constant CHAIN, is launched while that
    still runs, and must wait for it by ``gdc_wait()`` before it reads or writes anything.
    """

    def __init__(self, fn: Any, follows: bool = False) -> None:
        self.fn, self.follows = fn, follows
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
        raw, kinds, device = _described(args, -1)
        key = (device, warps, stages, *kinds, *constants.items())
        found = self.ready.get(key)
        if found is None:
            found = self.ready[key] = self._bound(device, kinds, constants, warps, stages)
        call, rest = found
        x, y, z = (*grid, 1, 1)[:3]
        call(x, y, z, torch._C._cuda_getCurrentRawStream(device), *raw, *rest)

    def _bound(
        self,
        device: int,
        kinds: Sequence[Any],
        constants: Mapping[str, Any],
        warps: int,
        stages: int,
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What launches the kernel, and its last arguments: a launcher wants constants in their
        places too, though it does not pass them on."""
        with torch.cuda.device(device):
            call = bound(self.compile(kinds, constants, warps, stages))
        return call, tuple(constants.get(n) for n in self.fn.arg_names[len(kinds) :])

    def settled(
        self,
        grid: tuple[int, ...],
        *numbers: Any,
        warps: int = 4,
        stages: int = 2,
        **constants: Any,
    ) -> Callable[..., None]:
        """The call as a function of its tensors alone, which come before the numbers and are of the
        same types and on the same device every time. Where their addresses are multiples of 16,
        as those of new tensors are, nothing is looked up: half of the time of a call."""
        x, y, z = (*grid, 1, 1)[:3]
        ready: tuple[Callable[..., None], int, tuple[Any, ...]] | None = None

        def run(*tensors: torch.Tensor) -> None:
            nonlocal ready
            raw = [t.data_ptr() for t in tensors]
            bits = 0
            for address in raw:
                bits |= address
            if bits & 15 or self.interpreted or not all(grid):
                self(grid, *tensors, *numbers, warps=warps, stages=stages, **constants)
                return
            if ready is None:
                device = tensors[0].get_device()
                kinds = [*((t.dtype, True) for t in tensors), *map(_kind, numbers)]
                call, rest = self._bound(device, kinds, constants, warps, stages)
                ready = call, device, (*numbers, *rest)
            call, device, rest = ready
            call(x, y, z, torch._C._cuda_getCurrentRawStream(device), *raw, *rest)

        return run

    def compile(
        self,
        kinds: Sequence[Any],
        constants: Mapping[str, Any],
        warps: int = 4,
        stages: int = 2,
        target: Any = None,
    ) -> Any:
        """Compiled for ``target``, a GPU that need not be there, or for the current one.

        ``kinds`` has, for every argument, (torch dtype, aligned) for a pointer, (name, aligned)
        for a number, None, or a NamedTuple of these.
        """
        from triton.compiler import ASTSource

        names = self.fn.arg_names
        fixed: dict[tuple[int, ...], Any] = {(names.index(n),): v for n, v in constants.items()}
        attrs: dict[tuple[int, ...], Any] = {}

        def typed(kind: Any, place: tuple[int, ...]) -> Any:
            if kind is None:
                fixed[place] = None
                return "constexpr"
            if not isinstance(kind[-1], bool):
                return kind._make(typed(k, (*place, j)) for j, k in enumerate(kind))
            first, aligned = kind
            if aligned:
                attrs[place] = [["tt.divisibility", 16]]
            return first if isinstance(first, str) else POINTERS[first]

        signature = dict.fromkeys(names, "constexpr")
        signature |= {names[i]: typed(kind, (i,)) for i, kind in enumerate(kinds)}
        source = ASTSource(self.fn, signature, constexprs=fixed, attrs=attrs)
        early = self.follows and bool(constants.get("CHAIN"))
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
        return compile_triton(source, options, target)


@cache
def chained(device: torch.device) -> bool:
    """Whether a kernel may be launched there before the one it follows has ended."""
    if device.type != "cuda" or _interpreting():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _described(args: Sequence[Any], device: int) -> tuple[list[Any], list[Any], int]:
    """Arguments as a launch takes them, addresses in the place of tensors; their kinds; and the
    device of the tensors."""
    raw, kinds = [], []
    for a in args:
        if isinstance(a, torch.Tensor):
            address, device = a.data_ptr(), a.get_device()
            raw.append(address)
            kinds.append((a.dtype, not address & 15))
        elif isinstance(a, tuple):
            inside, of, device = _described(a, device)
            raw.append(a._make(inside))  # type: ignore[attr-defined]  # a NamedTuple
            kinds.append(a._make(of))  # type: ignore[attr-defined]
        else:
            raw.append(a)
            kinds.append(_kind(a))
    return raw, kinds, device


def _kind(value: Any) -> tuple[str, bool] | None:
    if value is None:
        return None
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -INT32 <= value < INT32 else "i64"), value % 16 == 0


def _interpreting() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
