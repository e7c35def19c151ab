"""Element types. Each is one frozen object; ``dtype("f16")`` finds it by any of its names."""

from dataclasses import dataclass
from typing import Any

import torch

from deuteron.errors import GraphError


@dataclass(frozen=True, slots=True, repr=False)
class DType:
    """An element type: its short name in graph text, width, kind and torch counterpart."""

    name: str
    short: str
    bits: int
    kind: str  # "float", "int", "uint", "bool" or "complex"
    torch: torch.dtype

    def __repr__(self) -> str:
        return f"deuteron.{self.name}"

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_low(self) -> bool:
        """Narrower than 32 bits: arithmetic on it accumulates in float32."""
        return self.kind == "float" and self.bits < 32

    @property
    def is_foreign(self) -> bool:
        """Whether none of our operators computes with it: only torch's own calls, kept as nodes,
        and collectives pass it on."""
        return self.kind == "complex" or (self.kind == "uint" and self.bits > 8)

    def nbytes(self, count: int) -> int:
        """Bytes that ``count`` elements take; sub-byte types are packed."""
        return (count * self.bits + 7) // 8


float64 = DType("float64", "f64", 64, "float", torch.float64)
float32 = DType("float32", "f32", 32, "float", torch.float32)
float16 = DType("float16", "f16", 16, "float", torch.float16)
bfloat16 = DType("bfloat16", "bf16", 16, "float", torch.bfloat16)
float8_e4m3 = DType("float8_e4m3", "f8e4m3", 8, "float", torch.float8_e4m3fn)
float8_e5m2 = DType("float8_e5m2", "f8e5m2", 8, "float", torch.float8_e5m2)
int64 = DType("int64", "i64", 64, "int", torch.int64)
int32 = DType("int32", "i32", 32, "int", torch.int32)
int16 = DType("int16", "i16", 16, "int", torch.int16)
int8 = DType("int8", "i8", 8, "int", torch.int8)
uint8 = DType("uint8", "u8", 8, "uint", torch.uint8)
int4 = DType("int4", "i4", 4, "int", torch.int4)  # type: ignore[attr-defined]
uint16 = DType("uint16", "u16", 16, "uint", torch.uint16)
uint32 = DType("uint32", "u32", 32, "uint", torch.uint32)
uint64 = DType("uint64", "u64", 64, "uint", torch.uint64)
complex64 = DType("complex64", "c64", 64, "complex", torch.complex64)
complex128 = DType("complex128", "c128", 128, "complex", torch.complex128)
bool_ = DType("bool", "bool", 8, "bool", torch.bool)

ALL = tuple(found for found in vars().values() if isinstance(found, DType))

_BY_NAME: dict[Any, DType] = {name: d for d in ALL for name in (d, d.name, d.short, d.torch)}
_BY_NAME |= {"fp64": float64, "fp32": float32, "fp16": float16, float: float32, int: int64}
_BY_NAME |= {"double": float64, "float": float32, "half": float16, bool: bool_}


def dtype(of: DType | torch.dtype | str | type) -> DType:
    """The element type called ``of``: a DType, a torch dtype, or a name such as ``"bf16"``."""
    try:
        return _BY_NAME[of]
    except (KeyError, TypeError):
        wrong, known = f"unknown element type {of!r}", ", ".join(d.short for d in ALL)
        raise GraphError(wrong, asked=f"dtype({of!r})", remedy=f"use one of {known}") from None


_CATEGORY = {"bool": 0, "int": 1, "uint": 1, "float": 2}


def promote(*operands: tuple[DType, int]) -> DType:
    """The type of an elementwise result over operands given as (dtype, rank).

    PyTorch's rule: a rank-0 operand does not widen the others within one category
    (bool < integer < float); one of a higher category does.
    """
    full = _join([dt for dt, rank in operands if rank > 0])
    scalar = _join([dt for dt, rank in operands if rank == 0])
    if full is not None and (scalar is None or _CATEGORY[scalar.kind] <= _CATEGORY[full.kind]):
        return full
    joined = _join([dt for dt in (full, scalar) if dt is not None])
    assert joined is not None, "promote() needs at least one operand"
    return joined


def _join(types: list[DType]) -> DType | None:
    if not types:
        return None
    joined = types[0].torch
    for dt in types[1:]:
        try:
            joined = torch.promote_types(joined, dt.torch)
        except RuntimeError:  # 8-bit floats do not promote
            names = " and ".join(dict.fromkeys(t.name for t in types))
            raise GraphError(f"{names} have no common type", remedy="cast one of them") from None
    return dtype(joined)
