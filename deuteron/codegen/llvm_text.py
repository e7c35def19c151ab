"""LLVM IR as text: the types, constants and instructions that kernels are made of.

An instruction is written as a line of text at once, and a value is its type and its name in that
text; nothing else is kept. llvmlite has an object model of the IR, but to build and print that
takes as long as LLVM takes to compile; so all that we use of llvmlite is LLVM.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

Flags = tuple[str, ...]


class Type:
    """A type; there is one object for each, and calling it with a number gives a constant. A vector
    or array has ``count`` elements, any other type counts as one element, itself."""

    def __init__(self, text: str, element: Type | None = None, count: int = 1) -> None:
        self.text, self.element, self.count = text, element or self, count

    def __str__(self) -> str:
        return self.text

    def __call__(self, number: Any) -> Constant:
        return Constant(self, number)


F16, F32, F64 = Type("half"), Type("float"), Type("double")
I1, I8, I16, I32, I64 = INTEGERS = [Type(f"i{bits}") for bits in (1, 8, 16, 32, 64)]
PTR, VOID = Type("ptr"), Type("void")
_PACKED = {F16: "<e", F32: "<f", F64: "<d"}


def integer(bits: int) -> Type:
    """The type of integers with ``bits`` bits."""
    return next(kind for kind in INTEGERS if kind.text == f"i{bits}")


@cache
def vector(of: Type, count: int) -> Type:
    """The type of elements side by side in a register."""
    return Type(f"<{count} x {of}>", of, count)


@cache
def array(of: Type, count: int) -> Type:
    """The type of elements one after the other in memory."""
    return Type(f"[{count} x {of}]", of, count)


class Value:
    """The result of an instruction: its type, and its name in the text."""

    __slots__ = ("text", "type")

    def __init__(self, kind: Type, text: str) -> None:
        self.type, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.type.text} {self.text}"


class Constant(Value):
    """A known value: a number, a list of numbers or constants, None for zeros, or
    :data:`UNDEFINED`."""

    __slots__ = ("constant",)

    def __init__(self, kind: Type, constant: Any) -> None:
        self.type, self.constant = kind, constant
        if isinstance(constant, list):
            self.constant = [
                x if isinstance(x, Constant) else Constant(kind.element, x) for x in constant
            ]
            self.text = f"{kind.text[0]}{', '.join(map(str, self.constant))}{kind.text[-1]}"
        elif constant is None:
            self.text = "null" if kind is PTR else "zeroinitializer"
        else:
            self.text = constant if constant is UNDEFINED else _digits(kind, constant)


UNDEFINED = "undef"


def _digits(kind: Type, number: float) -> str:
    packed = _PACKED.get(kind)
    if packed is None:
        return str(int(number))
    # LLVM reads the bits of a double, which has to be a number of the narrower type
    (rounded,) = struct.unpack(packed, _pack(packed, float(number)))
    return f"0x{int.from_bytes(struct.pack('>d', rounded)):016x}"


def _pack(packed: str, number: float) -> bytes:
    try:
        return struct.pack(packed, number)
    except OverflowError:  # beyond the range of the narrower type
        return struct.pack(packed, float("inf") if number > 0 else float("-inf"))


class Module:
    """What is compiled at once: functions and numbers in memory, by name."""

    def __init__(self, triple: str) -> None:
        self.triple = triple
        self.names: dict[str, Any] = {}  # a Function or Global each

    def __str__(self) -> str:
        parts = (entry.definition() for entry in self.names.values())
        return "\n".join((f'target triple = "{self.triple}"', *parts))

    def declared(self, name: str, returns: Type, args: Sequence[Type]) -> Function:
        """A function that is written elsewhere."""
        found: Function | None = self.names.get(name)
        return found or Function(self, name, returns, args)


class Global(Value):
    """A constant in memory. It is declared weak, so that LLVM does not assume its value."""

    __slots__ = ("align", "initial")

    def __init__(self, module: Module, name: str, initial: Constant, align: int) -> None:
        super().__init__(PTR, f'@"{name}"')
        self.initial, self.align = initial, align
        module.names[name] = self

    def definition(self) -> str:
        return f"{self.text} = weak global {self.initial}, align {self.align}"


class Block:
    """A basic block; ``ended`` once it has its final branch or return."""

    def __init__(self, label: str) -> None:
        self.label, self.lines, self.ended = label, list[str](), False


class Function(Value):
    """A function; without blocks, one that is written elsewhere."""

    __slots__ = ("args", "blocks", "internal", "made", "returns")

    def __init__(
        self, module: Module, name: str, returns: Type, args: Sequence[Type], internal: bool = False
    ) -> None:
        super().__init__(PTR, f'@"{name}"')
        self.returns, self.internal, self.made = returns, internal, len(args)
        self.args = [Value(of, f"%v{k}") for k, of in enumerate(args)]
        self.blocks: list[Block] = []
        module.names[name] = self

    def append_block(self) -> Block:
        self.blocks.append(Block(f"b{len(self.blocks)}"))
        return self.blocks[-1]

    def definition(self) -> str:
        if not self.blocks:
            taken = ", ".join(arg.type.text for arg in self.args)
            return f"declare {self.returns} {self.text}({taken})"
        taken = ", ".join(map(str, self.args))
        linkage, attributes = ("internal ", " noinline") if self.internal else ("", "")
        lines = [f"define {linkage}{self.returns} {self.text}({taken}){attributes} {{"]
        for block in self.blocks:
            lines += (f"{block.label}:", *block.lines)
        return "\n".join((*lines, "}"))


ORDERS = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


def _binary(name: str) -> Callable[..., Value]:
    def write(self: Builder, x: Value, y: Value, flags: Flags = ()) -> Value:
        return self.value(x.type, f"{' '.join((name, *flags))} {x}, {y.text}")

    return write


def _cast(name: str) -> Callable[[Builder, Value, Type], Value]:
    def write(self: Builder, x: Value, to: Type) -> Value:
        return x if x.type is to else self.value(to, f"{name} {x} to {to}")

    return write


def _compare(how: str) -> Callable[[Builder, str, Value, Value], Value]:
    def write(self: Builder, order: str, x: Value, y: Value) -> Value:
        of = I1 if x.type.element is x.type else vector(I1, x.type.count)
        sign = "" if order in ("==", "!=") and how.startswith("icmp") else how[-1]
        name = ORDERS.get(order, order)
        return self.value(of, f"{how[:4]} {sign if order in ORDERS else ''}{name} {x}, {y.text}")

    return write


class Builder:
    """Writes instructions at the end of a block."""

    def __init__(self, function: Function) -> None:
        self.function, self.block = function, function.append_block()

    def value(self, kind: Type, text: str) -> Value:
        """Write an instruction, and return its result."""
        function = self.function
        made = Value(kind, f"%v{function.made}")
        function.made += 1
        self.block.lines.append(f"{made.text} = {text}")
        return made

    def position_at_end(self, block: Block) -> None:
        self.block = block

    @contextmanager
    def goto_entry_block(self) -> Iterator[None]:
        """Write into the entry block, before its final branch: what is always done first."""
        here, self.block = self.block, self.function.blocks[0]
        last = [self.block.lines.pop()] if self.block.ended else []
        yield
        self.block.lines += last
        self.block = here

    add, sub, mul = _binary("add"), _binary("sub"), _binary("mul")
    sdiv, srem = _binary("sdiv"), _binary("srem")
    fadd, fsub, fmul, fdiv = _binary("fadd"), _binary("fsub"), _binary("fmul"), _binary("fdiv")
    and_, or_, xor = _binary("and"), _binary("or"), _binary("xor")
    shl, lshr, ashr = _binary("shl"), _binary("lshr"), _binary("ashr")
    sext, zext, trunc, bitcast = _cast("sext"), _cast("zext"), _cast("trunc"), _cast("bitcast")
    fpext, fptrunc, fptosi = _cast("fpext"), _cast("fptrunc"), _cast("fptosi")
    sitofp, uitofp = _cast("sitofp"), _cast("uitofp")
    icmp_signed, icmp_unsigned = _compare("icmp s"), _compare("icmp u")
    fcmp_ordered, fcmp_unordered = _compare("fcmp o"), _compare("fcmp u")

    def neg(self, x: Value) -> Value:
        return self.sub(x.type(None), x)

    def not_(self, x: Value) -> Value:
        return self.xor(x, x.type([-1] * x.type.count if x.type.count > 1 else -1))

    def fneg(self, x: Value) -> Value:
        return self.value(x.type, f"fneg {x}")

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return self.value(yes.type, f"select {condition}, {yes}, {no}")

    def insert_element(self, x: Value, element: Value, at: Value) -> Value:
        return self.value(x.type, f"insertelement {x}, {element}, {at}")

    def extract_element(self, x: Value, at: Value) -> Value:
        return self.value(x.type.element, f"extractelement {x}, {at}")

    def shuffle_vector(self, x: Value, y: Value, order: Constant) -> Value:
        kind = vector(x.type.element, order.type.count)
        return self.value(kind, f"shufflevector {x}, {y}, {order}")

    def alloca(self, kind: Type, size: int = 1, align: int = 0) -> Value:
        return self.value(PTR, f"alloca {kind}, i32 {size}{_aligned(align)}")

    def gep(self, base: Value, offset: Value, of: Type) -> Value:
        return self.value(PTR, f"getelementptr {of}, {base}, {offset}")

    def load(self, where: Value, typ: Type, align: int = 0) -> Value:
        return self.value(typ, f"load {typ}, {where}{_aligned(align)}")

    def store(self, x: Value, where: Value, align: int = 0) -> None:
        self.block.lines.append(f"store {x}, {where}{_aligned(align)}")

    def load_atomic(self, where: Value, ordering: str, align: int, typ: Type) -> Value:
        return self.value(typ, f"load atomic {typ}, {where} {ordering}, align {align}")

    def atomic_rmw(self, how: str, where: Value, x: Value, ordering: str) -> Value:
        return self.value(x.type, f"atomicrmw {how} {where}, {x} {ordering}")

    def call(self, fn: Function, args: Sequence[Value]) -> Value:
        return self.call_address(fn, fn.returns, args)

    def call_address(self, fn: Value, returns: Type, args: Sequence[Value]) -> Value:
        """Call the function at an address that is known when the code runs."""
        text = f"call {returns} {fn.text}({', '.join(map(str, args))})"
        if returns is not VOID:
            return self.value(returns, text)
        self.block.lines.append(text)
        return Value(VOID, "")

    def branch(self, to: Block) -> None:
        self._end(f"br label %{to.label}")

    def cbranch(self, condition: Value, yes: Block, no: Block) -> None:
        self._end(f"br {condition}, label %{yes.label}, label %{no.label}")

    def ret_void(self) -> None:
        self._end("ret void")

    def ret(self, x: Value) -> None:
        self._end(f"ret {x}")

    def _end(self, text: str) -> None:
        self.block.lines.append(text)
        self.block.ended = True


def _aligned(align: int) -> str:
    return f", align {align}" if align else ""
