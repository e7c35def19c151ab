"""The arithmetic of a scalar program as Triton text.

Only what both Triton's compiler and its interpreter know is used. ``tl.log``, ``tl.erf``,
``tl.sin`` and ``tl.cos`` compile to correctly behaved library routines; ``tl.exp`` does not: it
rounds x·log₂e once, which costs |x|·2⁻²⁴, so a float32 result gets an exponential of its own.
What has no portable call (tanh, expm1, log1p, rint, Φ, and all of two numbers) is written out in
:data:`HELPERS`.

Kernels are compiled without contraction: an operation of the program rounds once, as in torch, so
that x·y - x·y is 0. Only the helpers fuse, and the sums of windows, by ``tl.fma``.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deuteron.codegen import triton_binary
from deuteron.codegen.scalar import start
from deuteron.codegen.tables import NORMAL, NORMAL_FAR, NORMAL_GONE, pairs
from deuteron.codegen.triton_binary import ALL_NAN, wide
from deuteron.ir.dtype import dtype
from deuteron.ops import random
from deuteron.ops.formula import Compute, Const

POINTERS = pairs(
    "f64 *fp64 f32 *fp32 f16 *fp16 bf16 *bf16 i64 *i64 i32 *i32 i16 *i16 i8 *i8 u8 *u8 bool *i1 "
    "f8e4m3 *fp8e4nv f8e5m2 *fp8e5"
)
OF_8_BITS = pairs("f8e4m3 tl.float8e4nv f8e5m2 tl.float8e5")  # which Triton calls by other names
LOG2_E = 1.4426950408889634
EXPM1 = """    # Kahan: the error of u = e^x is undone by dividing by its own logarithm
    u = {exp}(x)
    d = u - 1.0
    near = d * (x / tl.log(u))
    return tl.where(d == 0.0, x, tl.where(tl.abs(x) > 1.0, d, near))"""

# words of ops/random.py: two rounds of mixing per element, the seed's part once
RANDOM = f"""    golden = tl.full((), {random.GOLDEN}, tl.uint32)
    b = _mix(_mix(seed.to(tl.uint32) + golden) ^ (seed >> 32).to(tl.uint32))
    c = _mix({{high}})
    return (_mix(_mix(place.to(tl.uint32) ^ c) + b) >> {32 - random.BITS}).to(tl.int64)"""


def fused(name: str, x: str, coefficients: Iterable[str]) -> str:
    """The rest of a polynomial of ``x`` by Horner, from the second step on."""
    return "\n".join(f"    {name} = tl.fma({name}, {x}, {k})" for k in coefficients)


# Functions that are written out, as Triton text. Those without a number in their name are for
# float32, those with 16 for results of 16 bits, those with 64 for float64.
SOURCES = f"""
def _random(seed, place):
{RANDOM.format(high="b")}

def _random_far(seed, place):
{RANDOM.format(high="b ^ (place >> 32).to(tl.uint32)")}

def _mix(h):
    h = h ^ (h >> 16)
    h = h * tl.full((), {random.FIRST}, tl.uint32)
    h = h ^ (h >> 15)
    h = h * tl.full((), {random.SECOND}, tl.uint32)
    return h ^ (h >> 16)

def _largest(a, b):
    return tl.maximum(a, b, {ALL_NAN})

def _smallest(a, b):
    return tl.minimum(a, b, {ALL_NAN})

def _times(a, b):
    return a * b

def _exp(x):
    # e^x = 2^n 2^(r log2 e), r = x - n ln 2 in two exact steps
    x = tl.maximum(tl.minimum(x, 89.0, {ALL_NAN}), -105.0, {ALL_NAN})
    n = tl.floor(tl.fma(x, {LOG2_E}, 0.5))
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    return tl.exp2(r * {LOG2_E}) * 2.0 * tl.exp2(n - 1.0)

def _exp_normal(x):
    # e^x = 2^t 2^(x log2 e - t), t the rounded product, whose error is added; 0 below 2^-126
    x = tl.maximum(tl.minimum(x, 89.0, {ALL_NAN}), -105.0, {ALL_NAN})
    t = x * {LOG2_E}
    d = tl.fma(x, 1.925963033500011e-08, tl.fma(x, 1.4426950216293335, -t))
    return tl.exp2(t) * tl.fma(d, 0.6931471805599453, 1.0)

def _tanh(x):
    # a polynomial where 1 - 2 / (e^2x + 1) would cancel
    a = tl.abs(x)
    z = x * x
    p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, z, -5.37397155531e-2)
    p = tl.fma(p, z, 1.33314422036e-1)
    p = tl.fma(p, z, -3.33332819422e-1)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(a, 20.0, {ALL_NAN})) + 1.0)
    return tl.where(a < 0.625, tl.fma(x * z, p, x), tl.where(x < 0, -far, far))

def _tanh16(x):
    # for a result of 16 bits: the quotient cancels only where x - x^3 / 3 has 20 bits
    root = tl.rsqrt(tl.exp2(x * {2 * LOG2_E}) + 1.0)
    far = tl.fma(root * root, -2.0, 1.0)
    return tl.where(tl.abs(x) < 0.05, tl.fma(x * x * x, -0.33333333, x), far)

def _tanh64(x):
    e = _expm164(2.0 * tl.minimum(tl.abs(x), 30.0, {ALL_NAN}))
    y = e / (e + 2.0)
    return tl.where(x < 0, -y, y)

def _ndtr(x):
    # the normal distribution: 2^q(|x|), or what is left of 1; nothing cancels
    a = tl.minimum(tl.abs(x), {NORMAL_GONE}, {ALL_NAN})
    q = tl.fma(a, {NORMAL["near"][0]!r}, {NORMAL["near"][1]!r})
{fused("q", "a", map(repr, NORMAL["near"][2:]))}
    p = tl.exp2(q)
    return tl.where(x < 0, p, 1.0 - p)

def _ndtr64(x):
    # as _ndtr, with what a * a loses by rounding added in the exponent
    a = tl.minimum(tl.abs(x), {NORMAL_FAR}, {ALL_NAN})
    h = a * a
    t = 1.0 / tl.fma(a, 0.25, 1.0)
    s = tl.fma(t, 2.0, -1.0)
    r = {wide(NORMAL["wide"][0])}
{fused("r", "s", map(wide, NORMAL["wide"][1:]))}
    p = t * tl.exp(h * -0.5) * tl.exp(tl.fma(tl.fma(a, a, -h), -0.5, r))
    return tl.where(x < 0, p, 1.0 - p)

def _expm1(x):
{EXPM1.format(exp="_exp")}

def _expm164(x):
{EXPM1.format(exp="tl.exp")}

def _log1p(x):
    u = 1.0 + x
    d = u - 1.0
    near = tl.log(u) * (x / d)
    return tl.where(d == 0.0, x, tl.where(tl.abs(x) > 4.0, tl.log(u), near))

def _round(x):
    # adding 1.5 * 2^23 leaves no room for a fraction: rounds half to even; 0 keeps the sign of x
    r = (x + 12582912.0) - 12582912.0
    return tl.where(tl.abs(x) < 4194304.0, tl.where(r == 0.0, x * 0.0, r), x)

def _round64(x):
    m = tl.full((), 6755399441055744.0, tl.float64)
    r = (x + m) - m
    return tl.where(tl.abs(x) < 2251799813685248.0, tl.where(r == 0.0, x * 0.0, r), x)
"""
TEXTS = [*SOURCES.split("\ndef ")[1:], *triton_binary.SOURCES]
HELPERS = {text.partition("(")[0]: f"@triton.jit\ndef {text.strip()}\n" for text in TEXTS}
CALLED = re.compile(r"(?<![\w.])_\w+(?=\()")
NEEDS = {name: set(CALLED.findall(text)) - {name} for name, text in HELPERS.items()}


@dataclass
class Arithmetic:
    """Expressions for one program: its float type, how exact they must be, what they need.

    ``exact`` is set where a float wider than 16 bits is stored. ``shifted`` holds the names of
    exponentials e^(x − max x), whose argument is never positive so that the plain one will do;
    ``totals`` the sums of them: at least 1, so that a division by one may be a product with its
    reciprocal; ``beside_one`` exponentials that are only read in 1 + e^x: the smallest vanish.
    """

    wide: bool
    exact: bool
    shifted: frozenset[str] = frozenset()
    totals: frozenset[str] = frozenset()
    beside_one: frozenset[str] = frozenset()
    used: dict[str, None] = field(default_factory=dict)

    @property
    def float(self) -> str:
        return "tl.float64" if self.wide else "tl.float32"

    def type(self, kind: str) -> str:
        return {"float": self.float, "int": "tl.int64", "bool": "tl.int1"}[kind]

    def need(self, name: str) -> str:
        for other in sorted(NEEDS[name]):
            self.need(other)
        self.used[name] = None
        return name

    def helpers(self) -> list[str]:
        return [HELPERS[name] for name in self.used]

    def literal(self, c: Const, bare: bool = True) -> str:
        """A number as text; ``bare`` if the operation may give it the other operand's type."""
        if c.kind == "float":
            text = plain(float(c.value))
            if bare and not self.wide:
                return f"({text})" if text.startswith("-") else text
            return f"tl.full((), {text}, {self.float})"
        return f"tl.full((), {int(c.value)}, {self.type(c.kind)})"

    def compute(self, s: Compute, name: Callable[[str], str]) -> str:
        """The right-hand side of ``s``."""
        known = [isinstance(a, Const) for a in s.args]
        args = [
            self.literal(a, bare=not all(known) or i > 0) if isinstance(a, Const) else name(a)
            for i, a in enumerate(s.args)
        ]
        if s.op in BINARY:
            return f"{args[0]} {BINARY[s.op]} {args[1]}"
        if s.op in CALLS:
            short = dict(s.attrs).get("dtype", "f32")
            narrow = OF_8_BITS.get(short, f"tl.{dtype(short).name}")
            return CALLS[s.op].format(*args, float=self.float, narrow=narrow)
        return str(getattr(self, "_" + s.op)(s, args))

    def _maximum(self, s: Compute, args: Sequence[str]) -> str:
        nan = f", {ALL_NAN}" if s.kind == "float" else ""
        return f"tl.{s.op}({args[0]}, {args[1]}{nan})"

    _minimum = _maximum

    def _neg(self, s: Compute, args: Sequence[str]) -> str:
        return f"{args[0]} * -1.0" if s.kind == "float" else f"-{args[0]}"

    def _div(self, s: Compute, args: Sequence[str]) -> str:
        a, b = s.args
        if isinstance(b, str) and b in self.totals:
            return f"{args[0]} * (1.0 / {args[1]})"
        if self.wide or (not self.exact and isinstance(a, Const)):
            return f"{args[0]} / {args[1]}"
        if isinstance(b, Const) and 1e-6 < abs(float(b.value)) < 1e6:
            return f"{args[0]} / {args[1]}"
        return f"tl.div_rn({args[0]}, {args[1]})"  # the fast division gives 0 beyond 2^126

    def _sqrt(self, s: Compute, args: Sequence[str]) -> str:
        return f"tl.sqrt({args[0]})" if self.wide else f"tl.sqrt_rn({args[0]})"

    def _exp(self, s: Compute, args: Sequence[str]) -> str:
        plain = self.wide or not self.exact or s.name in self.shifted
        if plain:
            return self.exponential(args[0])
        return f"{self.need('_exp_normal' if s.name in self.beside_one else '_exp')}({args[0]})"

    def exponential(self, x: str) -> str:
        """The plain e^x. ``tl.exp`` of a float32 keeps results below 2⁻¹²⁶, which takes five
        instructions; ``tl.exp2`` makes them 0 and takes one."""
        return f"tl.exp({x})" if self.wide else f"tl.exp2(({x}) * {LOG2_E})"

    def _tanh(self, s: Compute, args: Sequence[str]) -> str:
        return self._helped(s, args, "_tanh" if self.wide or self.exact else "_tanh16")

    def _helped(self, s: Compute, args: Sequence[str], name: str = "") -> str:
        """Call a helper, the one of this width where there is one for each; a number takes the type
        of the program."""
        name, given = name or f"_{s.op}", zip(s.args, args, strict=True)
        texts = (self.literal(a, bare=False) if isinstance(a, Const) else t for a, t in given)
        wide = f"{name}64" if self.wide and f"{name}64" in HELPERS else name
        return f"{self.need(wide)}({', '.join(texts)})"

    _round = _expm1 = _log1p = _ndtr = _pow = _power = _fmod = _atan2 = _helped

    def _random(self, s: Compute, args: Sequence[str]) -> str:
        return self._helped(s, args, "_random_far" if dict(s.attrs)["far"] else "_random")


BINARY = pairs("add + sub - mul * eq == ne != lt < le <= gt > ge >= and & or | quotient //")
CALLS = {
    **{name: f"tl.{name}({{0}})" for name in "abs exp2 log erf sin cos floor ceil".split()},
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "fma": "tl.fma({0}, {1}, {2})",
    "not": "{0} == 0",
    "to_bool": "{0} != 0",
    "to_int": "{0}.to(tl.int64)",
    "to_float": "{0}.to({float})",
    "rounded": "{0}.to({narrow}).to({float})",
    "wrapped": "{0}.to({narrow}).to(tl.int64)",
    "select": "tl.where({0}, {1}, {2})",
}


# ---- reductions

AS_MAX = {"any": "max", "all": "min"}  # a bool is reduced as a number


def identity(op: str, kind: str) -> str:
    """Return what a reduction starts with, as text: it leaves any other number as it is."""
    return plain(start(op, kind))


def plain(value: float) -> str:
    """A number as Python writes it, infinities and nan by their names."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def combine(op: str, kind: str, a: str, b: str) -> str:
    """Two partial results as one."""
    if op in ("sum", "prod"):
        return f"{a} {'+' if op == 'sum' else '*'} {b}"
    nan = f", {ALL_NAN}" if kind == "float" else ""
    return f"tl.{AS_MAX.get(op, op)}imum({a}, {b}{nan})"


def across(op: str, kind: str, x: str, flat: bool, arithmetic: Arithmetic) -> str:
    """All of ``x`` along its columns as one number; nan wins in max and min as it does in torch."""
    axis, keep = (0, "") if flat else (1, ", keep_dims=True")
    if op == "sum":
        return f"tl.sum({x}, {axis}{keep})"
    if kind == "float" or op == "prod":
        name = {"max": "_largest", "min": "_smallest", "prod": "_times"}[op]
        return f"tl.reduce({x}, {axis}, {arithmetic.need(name)}{keep})"
    return f"tl.{AS_MAX.get(op, op)}({x}, {axis}{keep})"
