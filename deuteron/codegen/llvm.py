"""LLVM IR for the CPU: a small structured builder, and the compilation of it by llvmlite.

A kernel is a function of one array of 64-bit words (pointers and sizes), so that shapes are
arguments and a network needs few kernels. :class:`Code` writes one function; :func:`load` turns
what it wrote into an address, from the process, from the disk, or from LLVM, in this order::

    def make(module):                 # runs only if nobody compiled this kernel before
        code = Code(module, "run", [PTR, I64, I64])
        …
    address = load("scale by two", make)["run"]

Importing this module imports llvmlite: ask :func:`deuteron.codegen.openmp.available` first.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as binding

from deuteron.codegen import llvm_text as ir
from deuteron.files import cache_dir, remember, source_digest

Value = ir.Value
F32, F64, I8, I32, I64, PTR, VOID = ir.F32, ir.F64, ir.I8, ir.I32, ir.I64, ir.PTR, ir.VOID


def vec(lanes: int, of: Any = F32) -> Any:
    """The type of ``lanes`` elements side by side; one lane is the element itself."""
    return ir.vector(of, lanes) if lanes > 1 else of


def lanes_of(value: int | Value) -> int:
    """How many elements a value has side by side; a number of lanes is itself."""
    return value if isinstance(value, int) else value.type.count


def many(value: Value) -> str:
    """The lanes of a value, as they stand in the names of LLVM's functions."""
    return f"v{lanes_of(value)}" if lanes_of(value) > 1 else ""


def element_of(value: Value) -> Any:
    """The type of one lane."""
    return value.type.element


def constant(kind: Any, number: float, lanes: int | Value = 1) -> Value:
    """A number in every lane; ``lanes``: how many, or a value that has as many."""
    one, lanes = ir.Constant(kind, number), lanes_of(lanes)
    return one if lanes == 1 else ir.Constant(vec(lanes, kind), [one] * lanes)


def _is_number(value: Value) -> bool:
    """Whether a value is a constant, the same in all lanes, and no nan."""
    known = value.constant if isinstance(value, ir.Constant) else None
    number = known[0].constant if isinstance(known, list) else known
    return isinstance(number, float) and not math.isnan(number)


# ---- writing a function ------------------------------------------------------------------------


class Code:
    """One function under construction. Python ints and floats stand for constants."""

    def __init__(
        self,
        module: Any,
        name: str,
        args: Sequence[Any],
        internal: bool = False,
        returns: Any = VOID,
    ) -> None:
        self.module = module
        self.fn = ir.Function(module, name, returns, args, internal)
        self.b = ir.Builder(self.fn)
        self.args = self.fn.args

    # numbers

    def i(self, x: int | Value) -> Value:
        """A 64-bit integer."""
        return ir.Constant(I64, x) if isinstance(x, int) else x

    def f(self, x: float | Value, lanes: int | Value = 1) -> Value:
        """A float in every lane; ``lanes``: how many, or a value that has as many."""
        if isinstance(x, float | int):
            return constant(F32, float(x), lanes)
        return self.splat(x, lanes_of(lanes))

    def addend(self, x: float, lanes: int | Value) -> Value:
        """A float in every lane, to which a product will be added. ARM's multiply-add overwrites
        its addend: a constant in a register has to be copied first, by the very units that
        multiply, and a polynomial costs twice its multiply-adds. So there it is read from memory,
        by units that have little else to do; if arithmetic can take operands from memory, LLVM
        decides best."""
        lanes = lanes_of(lanes)
        alone = lanes == 1 or not by_lane()
        return self.f(x, lanes) if alone else self.kept(F32, x, lanes)

    def kept(self, of: Any, x: float, lanes: int) -> Value:
        """A number in every lane, read from memory, so that LLVM does not treat it as a
        constant."""
        name = f"kept.{of}.{float(x).hex()}.{lanes}"
        found = self.module.names.get(name)
        if found is None:
            many = ir.Constant(ir.array(of, lanes), [ir.Constant(of, x)] * lanes)
            found = ir.Global(self.module, name, many, align=16)
        return self.b.load(found, typ=vec(lanes, of), align=16)

    def splat(self, x: Value, lanes: int) -> Value:
        if lanes == 1:
            return x
        kind = vec(lanes, x.type)
        first = self.b.insert_element(ir.Constant(kind, ir.UNDEFINED), x, ir.Constant(I32, 0))
        return self.lane(first, 0)

    def lane(self, v: Value, index: int) -> Value:
        """Lane ``index`` of ``v`` in every lane."""
        return self.shuffle(v, v, [index] * lanes_of(v))

    def shuffle(self, a: Value, b: Value, order: Sequence[int]) -> Value:
        mask = ir.Constant(ir.vector(I32, len(order)), list(order))
        return self.b.shuffle_vector(a, b, mask)

    # integer arithmetic

    def add(self, *xs: int | Value) -> Value:
        return reduce(partial(self.b.add, flags=("nsw",)), map(self.i, xs))

    def sub(self, x: int | Value, y: int | Value) -> Value:
        return self.b.sub(self.i(x), self.i(y), flags=("nsw",))

    def mul(self, *xs: int | Value) -> Value:
        return reduce(partial(self.b.mul, flags=("nsw",)), map(self.i, xs))

    def div(self, x: int | Value, y: int | Value) -> Value:
        return self.b.sdiv(self.i(x), self.i(y))

    def rem(self, x: int | Value, y: int | Value) -> Value:
        return self.b.srem(self.i(x), self.i(y))

    def split(self, x: Value, by: int | Value) -> tuple[Value, Value]:
        """How often ``by`` goes into ``x``, and what is left over."""
        whole = self.div(x, by)
        return whole, self.sub(x, self.mul(whole, by))

    def cmp(self, op: str, x: int | Value, y: int | Value) -> Value:
        return self.b.icmp_signed(op, self.i(x), self.i(y))

    def least(self, x: int | Value, y: int | Value) -> Value:
        return self.b.select(self.cmp("<", x, y), self.i(x), self.i(y))

    def most(self, x: int | Value, y: int | Value) -> Value:
        return self.b.select(self.cmp(">", x, y), self.i(x), self.i(y))

    def share(self, total: Value, part: Value, parts: Value) -> tuple[Value, Value]:
        """Return the range of ``total`` that belongs to ``part`` of ``parts``: one thread of
        several."""
        begin = self.div(self.mul(total, part), parts)
        return begin, self.div(self.mul(total, self.add(part, 1)), parts)

    # float arithmetic: no reassociation, so that nan and infinity mean what they mean in torch

    def intrinsic(self, name: str, *args: Value) -> Value:
        """A function of floats that LLVM knows."""
        short = {F32: "f32", F64: "f64"}[element_of(args[0])]
        return self.outside(f"llvm.{name}.{many(args[0])}{short}", args[0].type, *args)

    def outside(self, name: str, kind: Any, *args: Value) -> Value:
        """Call a function that is written elsewhere and returns a ``kind``."""
        return self.b.call(self.module.declared(name, kind, [a.type for a in args]), args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.intrinsic("fma", a, b, c)

    def fmax(self, a: Value, b: Value) -> Value:
        """The larger; nan if either is nan."""
        return self._bounded("maximum", ">", a, b)

    def fmin(self, a: Value, b: Value) -> Value:
        return self._bounded("minimum", "<", a, b)

    def _bounded(self, name: str, than: str, a: Value, b: Value) -> Value:
        """For a constant bound x86-64 takes one instruction: the bound if it is beyond x, else x,
        even if x is nan or −0. Elsewhere one instruction does what IEEE 754 says."""
        if by_lane() or not (_is_number(a) or _is_number(b)):
            return self.intrinsic(name, a, b)
        bound, x = (a, b) if _is_number(a) else (b, a)
        return self.b.select(self.b.fcmp_ordered(than, bound, x), bound, x)

    def reduce(self, v: Value, op: Callable[[Value, Value], Value]) -> Value:
        """Combine all lanes: one half with the other, until one lane is left."""
        n = lanes_of(v)
        while n > 2:
            n //= 2
            v = op(self.shuffle(v, v, range(n)), self.shuffle(v, v, range(n, 2 * n)))
        return op(self.item(v, 0), self.item(v, 1)) if n == 2 else v

    def joined(self, lanes: int, of: Any, one: Callable[[int], Value]) -> Value:
        """A vector whose lanes are ``one(lane)``."""
        out: Value = ir.Constant(vec(lanes, of), ir.UNDEFINED)
        for lane in range(lanes):
            out = self.b.insert_element(out, one(lane), ir.Constant(I32, lane))
        return out

    def item(self, v: Value, index: int) -> Value:
        return v if lanes_of(v) == 1 else self.b.extract_element(v, ir.Constant(I32, index))

    # memory

    def at(self, base: Value, *offset: int | Value, of: Any = F32) -> Value:
        """The address ``offset`` elements after ``base``."""
        return self.b.gep(base, self.add(*offset), of)

    def load(self, where: Value, lanes: int = 1, of: Any = F32) -> Value:
        size = {F32: 4, I32: 4, I64: 8, PTR: 8, I8: 1, F64: 8}[of]
        return self.b.load(where, typ=vec(lanes, of), align=size)

    def store(self, value: Value, where: Value) -> None:
        self.b.store(value, where, align=1 if value.type == I8 else 8 if value.type == PTR else 4)

    def word(self, base: Value, index: int | Value) -> Value:
        return self.load(self.at(base, index, of=I64), of=I64)

    def words(self, base: Value, first: int, count: int) -> list[Value]:
        """Load ``count`` words of a call, from number ``first`` on: its sizes."""
        return [self.word(base, first + i) for i in range(count)]

    def pointers(self, base: Value, count: int) -> list[Value]:
        """Load the first words of a call, which are addresses."""
        return [self.pointer(base, i) for i in range(count)]

    def pointer(self, base: Value, index: int | Value) -> Value:
        return self.load(self.at(base, index, of=PTR), of=PTR)

    def index(self, base: Value, index: int | Value) -> Value:
        """Entry ``index`` of a table of 32-bit integers, widened."""
        return self.b.sext(self.load(self.at(base, index, of=I32), of=I32), I64)

    def variable(self, kind: Any, value: Value | int | None = None, count: int = 1) -> Value:
        """Room on the stack; LLVM keeps it in registers where it can."""
        with self.b.goto_entry_block():
            room = self.b.alloca(kind, count, align=64 if count > 1 else 0)
        if value is not None:
            self.b.store(self.i(value), room)
        return room

    def get(self, variable: Value, kind: Any = I64) -> Value:
        return self.b.load(variable, typ=kind)

    def put(self, variable: Value, value: int | Value) -> None:
        self.b.store(self.i(value), variable)

    # control

    @contextmanager
    def loop(self, begin: int | Value, end: int | Value, step: int | Value = 1) -> Iterator[Value]:
        """``for i in range(begin, end, step)``."""
        i, end = self.variable(I64, begin), self.i(end)
        head, body, done = (self.fn.append_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(self.cmp("<", self.get(i), end), body, done)
        self.b.position_at_end(body)
        now = self.get(i)
        yield now
        self.put(i, self.add(now, step))
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        then, done = (self.fn.append_block() for _ in range(2))
        self.b.cbranch(condition, then, done)
        self.b.position_at_end(then)
        yield
        self.b.branch(done)
        self.b.position_at_end(done)

    def either(self, condition: Value, yes: Callable[[], Any], no: Callable[[], Any]) -> None:
        then, other, done = (self.fn.append_block() for _ in range(3))
        self.b.cbranch(condition, then, other)
        for block, write in ((then, yes), (other, no)):
            self.b.position_at_end(block)
            write()
            self.b.branch(done)
        self.b.position_at_end(done)

    def call(self, other: Code, *args: int | Value) -> Value:
        return self.b.call(other.fn, [self.i(a) for a in args])

    def ret(self, value: Value | None = None) -> None:
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value)


Body = Callable[[Code, Value, Value, Value], None]  # of (code, words, thread, threads)


def entry(module: Any, name: str, body: Body) -> None:
    """Write the function ``name(words, thread, threads)``: one thread's part of a call."""
    code = Code(module, name, [PTR, I64, I64])
    body(code, *code.args)
    code.ret()


# ---- the machine -------------------------------------------------------------------------------


@lru_cache
def _machine(effort: int) -> Any:
    with suppress(RuntimeError):  # newer versions initialise themselves
        binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=_features(), opt=effort, jit=True
    )


@lru_cache
def _features() -> str:
    known = str(binding.get_host_cpu_features().flatten())
    return f"{known},+dotprod" if adds_products() else known


@lru_cache
def adds_products() -> bool:
    """Whether one instruction of the machine adds up four products of bytes: on an aarch64 whose
    Linux says so. (LLVM does not ask Linux for that.)"""
    if not by_lane():
        return False
    with suppress(OSError):
        return "asimddp" in Path("/proc/cpuinfo").read_text().split()
    return sys.platform == "darwin"


@lru_cache
def width() -> int:
    """Floats in a vector register of this machine: 4 (NEON, SSE), 8 (AVX2) or 16 (AVX-512)."""
    have = binding.get_host_cpu_features()
    return 16 if have.get("avx512f") else 8 if have.get("avx2") else 4


def halves(lanes: int) -> list[int]:
    """Return half a vector, half of that, down to four elements: steps for the rest of a row where
    vectors are wide."""
    return [lanes >> k for k in range(1, lanes.bit_length()) if lanes >> k >= 4]


@lru_cache
def by_lane() -> bool:
    """Whether a product by one lane of a vector is as cheap as one by a whole vector."""
    return "aarch64" in binding.get_default_triple() or "arm64" in binding.get_default_triple()


@lru_cache
def has_masks() -> bool:
    """Whether every instruction can leave out lanes by a mask, and one instruction multiplies by
    powers of two: AVX-512 as all servers have it."""
    have = binding.get_host_cpu_features()
    return all(have.get(f"avx512{part}") for part in ("f", "bw", "dq", "vl"))


# ---- machine code, and where it is kept --------------------------------------------------------


SOURCES = ("codegen", "ir", "kernels", "ops")  # the folders whose source kernels depend on


def _key(name: str) -> str:
    machine = (binding.get_host_cpu_name(), _features(), binding.get_default_triple(), str(EFFORT))
    made_by = (llvmlite.__version__, str(binding.llvm_version_info), source_digest(*SOURCES))
    return hashlib.sha256("\n".join((name, *machine, *made_by)).encode()).hexdigest()


def object_path(name: str) -> Path:
    """Where the object code of a kernel is kept."""
    return cache_dir() / "objects" / f"{_key(name)[:32]}.obj"


def compile_text(text: str) -> bytes:
    """Object code for this machine."""
    parsed = binding.parse_assembly(text)
    parsed.verify()
    # the kernels are vectorised and unrolled as they are written: LLVM's own pipelines take several
    # times as long as these passes and gave no faster code
    passes = binding.create_new_module_pass_manager()
    for name in PASSES if EFFORT else PASSES[:1]:
        getattr(passes, f"add_{name}_pass")()
    tuning = binding.create_pipeline_tuning_options(speed_level=1)
    passes.run(parsed, binding.create_pass_builder(_machine(EFFORT), tuning))
    return bytes(_machine(EFFORT).emit_object(parsed))


PASSES = "sroa simplify_cfg loop_rotate instruction_combine".split()
PASSES += ["dead_code_elimination", "simplify_cfg"]
EFFORT = 3  # of 0 to 3, to choose instructions and registers; with 0 only the first pass is run


def _kept(name: str) -> bytes | None:
    """Return what is cached under a name, if its file is undamaged and was made for that name."""
    try:
        data = object_path(name).read_bytes()
    except OSError:
        return None
    digest, content = data[:32], data[32:]
    whole = digest == hashlib.sha256(_key(name).encode() + content).digest()
    return content if content and whole else None


def _keep(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(_key(name).encode() + content).digest()
    remember(object_path(name), digest + content)
    return content


class Loaded:
    """Compiled functions by name, and the ``numbers`` that every call passes to them. Their code is
    in memory as long as this object lives."""

    def __init__(self, content: bytes) -> None:
        (count,) = struct.unpack_from("<q", content)
        self.numbers: tuple[int, ...] = struct.unpack_from(f"<{count}q", content, 8)
        self._engine = _engine(content[8 + 8 * count :])

    def __getitem__(self, name: str) -> int:
        address = int(self._engine.get_function_address(name))
        if not address:
            raise KeyError(name)
        return address


@cache
def _engine(code: bytes) -> Any:
    """Load object code, once for all kernels that share it."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(EFFORT))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


_lock = threading.RLock()
_loaded: dict[str, Loaded] = {}


def load(name: str, make: Callable[[Any], Sequence[int] | None]) -> Loaded:
    """Return the kernel called ``name``, compiled once per machine. ``name`` must say everything
    that ``make`` depends on; a file that is damaged or of another kernel is made again.

    If ``make`` returns numbers, these are words of each call: kernels that differ in them alone
    have the same text and are compiled once."""
    with _lock:
        if name not in _loaded:
            _loaded[name] = Loaded(_kept(name) or _keep(name, _made(make)))
        return _loaded[name]


def _made(make: Callable[[Any], Sequence[int] | None]) -> bytes:
    """The numbers of a kernel and its object code."""
    module = ir.Module(binding.get_default_triple())
    numbers = make(module) or ()
    text = str(module)
    code = _kept(text) if numbers else None
    if code is None:
        code = compile_text(text)
        if numbers:
            _keep(text, code)
    return struct.pack(f"<{1 + len(numbers)}q", len(numbers), *numbers) + code


def load_run(name: str, body: Body) -> Loaded:
    """:func:`load` for a kernel that is one function, ``run``, with this body."""
    return load(name, lambda module: entry(module, "run", body))


def forget() -> None:
    """Let the next :func:`load` look at the disk again. Kernels in use stay usable."""
    with _lock:
        _loaded.clear()
