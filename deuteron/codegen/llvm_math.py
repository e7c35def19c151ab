"""Elementary functions on vectors of float32, written out in LLVM IR.

No C library has vector versions of these on every machine, and a call per element costs ten
times the arithmetic. Nan goes through; infinities and denormals give what libm gives.
Largest error against float64 over all of float32, in units of the last place, checked by
tests/test_cpu_kernels.py:

======== ===== =============================================================================
exp      1.1   Cephes' polynomial on |r| ≤ ½ ln 2, scaled in two steps for denormal results
exp2     1.5   the same polynomial on what is left of x after its whole part
expm1    2.0   the same polynomial without its 1
log      1.0   Cephes' polynomial on √½ … √2
erf      1.6   polynomials, fitted for the least error: of erf below 0.85, of log₂ erfc beyond
tanh     2.5   a quotient of expm1 of 2|x|
ndtr     5.0   2^q(|x|) with the polynomial of codegen/tables.py; below 2⁻⁴ as at 2⁻⁴, which is
               4e-8; below −3 it is 3e-9
sin, cos 2.0   three-part reduction by π/2; beyond 10⁵ the C library is called
======== ===== =============================================================================
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

from deuteron.codegen import llvm
from deuteron.codegen import llvm_text as ir
from deuteron.codegen.llvm import F32, F64, I32, I64, Code, Value, constant, lanes_of, vec
from deuteron.codegen.tables import NORMAL, NORMAL_END, polynomials
from deuteron.ops import random as words

_MAGIC = 12582912.0  # 1.5 · 2²³: adding it leaves a rounded integer in the low bits
_MAGIC_BITS = 0x4B400000
POLY = polynomials(
    """
    exp 1.9875691500e-4 1.3981999507e-3 8.3334519073e-3 4.1665795894e-2 1.6666665459e-1
    5.0000001201e-1
    exp2 0.0013269406044855714 0.009671294130384922 0.0555071122944355 0.24022246897220612
    0.6931470036506653 1.0
    exp2m1 0.00015403512248107963 0.0013390758341615648 0.00961823758201932 0.055503573909560434
    0.24022649793876044 0.6931471879355039
    log 7.0376836292e-2 -1.1514610310e-1 1.1676998740e-1 -1.2420140846e-1 1.4249322787e-1
    -1.6668057665e-1 2.0000714765e-1 -2.4999993993e-1 3.3333331174e-1
    erf -6.3151291e-4 5.0510948e-3 -2.6802548e-2 0.11282717 -0.37612572 0.12837916
    erfc 2.9384367e-4 -4.4981151e-3 3.2488137e-2 -0.15079906 -0.9183027 -1.627448 -1.507953e-4
    sin -1.9515295891e-4 8.3321608736e-3 -1.6666654611e-1
    cos 2.443315711809948e-5 -1.388731625493765e-3 4.166664568298827e-2
    """
)
_NEAR = 0.85  # where erf changes from one of its polynomials to the other
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ints = partial(constant, I32)  # a whole number in every lane


def _bits(c: Code, x: Value) -> Value:
    return c.b.bitcast(x, vec(lanes_of(x), I32))


def _floats(c: Code, x: Value) -> Value:
    return c.b.bitcast(x, vec(lanes_of(x), F32))


def _held(c: Code, x: Value, least: float, most: float) -> Value:
    return c.fmin(c.fmax(x, c.f(least, x)), c.f(most, x))


def poly(c: Code, x: Value, coefficients: Sequence[float]) -> Value:
    """A polynomial, highest power first: neighbours in pairs, then Horner in x². The operations
    that wait for each other are half as many as Horner's, and half of the addends are no
    constants."""
    square = c.b.fmul(x, x)
    low = [*reversed(coefficients)]
    pairs = [low[i : i + 2] for i in range(0, len(low), 2)]

    def pair(of: Sequence[float]) -> Value:
        if len(of) == 1:
            return c.f(of[0], x)
        return c.fma(c.f(of[1], x), x, c.addend(of[0], x))

    out = pair(pairs[-1])
    for of in pairs[-2::-1]:
        out = c.fma(out, square, pair(of))
    return out


def _power(c: Code, k: Value) -> Value:
    """2ᵏ for −126 ≤ k ≤ 127, where only the lowest nine bits of k count."""
    return _floats(c, c.b.add(c.b.shl(k, _ints(23, k)), _ints(127 << 23, k)))


def _reduced(c: Code, x: Value, magic: float = _MAGIC) -> tuple[Value, Value]:
    """eʳ − 1 with x = k ln 2 + r, and bits whose lowest nine are those of k + magic − 1.5 · 2²³."""
    shifted = c.fma(x, c.f(math.log2(math.e), x), c.addend(magic, x))
    k = c.b.fsub(shifted, c.f(magic, x))
    r = c.fma(k, c.f(-_LN2_HIGH, x), x)
    r = c.fma(k, c.f(-_LN2_LOW, x), r)
    return c.fma(poly(c, r, POLY["exp"]), c.b.fmul(r, r), r), _bits(c, shifted)


def exp(c: Code, x: Value) -> Value:
    less, k = _reduced(c, _held(c, x, -104.0, 89.0))
    return _scaled(c, c.b.fadd(less, c.f(1.0, x)), k)


def exp2(c: Code, x: Value) -> Value:
    """2ˣ: the whole part is exact, the rest goes through the polynomial of eˣ."""
    x = _held(c, x, -151.0, 129.0)
    shifted = c.b.fadd(x, c.f(_MAGIC, x))
    r = c.b.fmul(c.b.fsub(x, c.b.fsub(shifted, c.f(_MAGIC, x))), c.f(math.log(2.0), x))
    less = c.fma(poly(c, r, POLY["exp"]), c.b.fmul(r, r), r)
    return _scaled(c, c.b.fadd(less, c.f(1.0, x)), _bits(c, shifted))


def exp2_parts(c: Code, x: Value, most: float) -> tuple[Value, Value]:
    """2ᵏ and 2ʳ − 1 with x = k + r, where x is held within ± ``most``, 126 at the largest: 2ˣ is
    the first and its product with the second. Off by 1e-8 of 2ʳ − 1 before rounding."""
    x = _held(c, x, -most, most)
    shifted = c.b.fadd(x, c.f(_MAGIC, x))
    r = c.b.fsub(x, c.b.fsub(shifted, c.f(_MAGIC, x)))
    return _power(c, _bits(c, shifted)), c.b.fmul(poly(c, r, POLY["exp2m1"]), r)


def _scaled(c: Code, p: Value, k: Value) -> Value:
    """p · 2ᵏ, where k is in the lowest bits of a float to which ``_MAGIC`` was added. Denormal
    results are rounded once: by the one instruction that AVX-512 has for it, elsewhere in two
    steps."""
    if lanes_of(p) >= 4 and llvm.has_masks():
        return _by_registers(c, _scale, p, c.b.fsub(_floats(c, k), c.f(_MAGIC, p)))
    half = c.b.ashr(k, _ints(1, p))
    return c.b.fmul(c.b.fmul(p, _power(c, half)), _power(c, c.b.sub(k, half)))


def _scale(c: Code, p: Value, k: Value) -> Value:
    n = lanes_of(p)
    mask = ir.Constant(ir.integer(max(n, 8)), -1)
    rounding = (ir.Constant(I32, 4),) if n == 16 else ()  # 4: in the current mode
    name = f"llvm.x86.avx512.mask.scalef.ps.{32 * n}"
    return c.outside(name, p.type, p, k, p, mask, *rounding)


def _by_registers(c: Code, one: Callable[..., Value], *xs: Value) -> Value:
    """Apply an instruction that takes single registers to vectors that fill several."""
    lanes, most = lanes_of(xs[0]), llvm.width()
    if lanes <= most:
        return one(c, *xs)
    half = lanes // 2
    low, high = (
        _by_registers(c, one, *(c.shuffle(x, x, range(first, first + half)) for x in xs))
        for first in (0, half)
    )
    return c.shuffle(low, high, range(lanes))


def exp_nonpositive(c: Code, x: Value) -> Value:
    """eˣ for x ≤ 0, where results below 2⁻¹²⁶ become 0: what a softmax needs."""
    less, k = _reduced(c, c.fmax(x, c.f(-88.0, x)), _MAGIC + 127.0)
    return c.b.fmul(c.b.fadd(less, c.f(1.0, x)), _exponent(c, k))


def _exponent(c: Code, k: Value) -> Value:
    """2ᵏ⁻¹²⁷ for 0 ≤ k ≤ 254, where 0 gives 0."""
    return _floats(c, c.b.shl(k, _ints(23, k)))


def expm1(c: Code, x: Value) -> Value:
    """eˣ − 1, for x up to 88."""
    y = _less_one(c, _held(c, x, -87.0, 88.0))
    return c.b.select(c.b.fcmp_ordered("==", x, c.f(0.0, x)), x, y)  # keeps −0


def _less_one(c: Code, x: Value) -> Value:
    less, k = _reduced(c, x)
    scale = _power(c, k)
    return c.fma(scale, less, c.b.fsub(scale, c.f(1.0, x)))


def _short_exp2(c: Code, x: Value) -> Value:
    """2ˣ for −127 ≤ x ≤ 0, if the result is added to larger numbers or subtracted from them."""
    magic = _MAGIC + 127.0
    shifted = c.b.fadd(x, c.f(magic, x))
    r = c.b.fsub(x, c.b.fsub(shifted, c.f(magic, x)))
    return c.b.fmul(poly(c, r, POLY["exp2"]), _exponent(c, _bits(c, shifted)))


def ndtr(c: Code, x: Value) -> Value:
    """Φ(x), the normal distribution: 2^q(|x|), or what is left of 1."""
    q = poly(c, c.fmin(c.intrinsic("fabs", x), c.f(NORMAL_END, x)), NORMAL["near"])
    below = _short_exp2(c, q)
    negative = c.b.fcmp_ordered("<", x, c.f(0.0, x))
    return c.b.select(negative, below, c.b.fsub(c.f(1.0, x), below))


def erf(c: Code, x: Value) -> Value:
    """Near 0 x and a little more, x · p(x²); beyond, what 2^q(|x|) leaves of 1."""
    a = c.intrinsic("fabs", x)
    near = c.fma(poly(c, c.b.fmul(x, x), POLY["erf"]), x, x)
    rest = _short_exp2(c, poly(c, c.fmin(a, c.f(4.0, x)), POLY["erfc"]))
    far = c.intrinsic("copysign", c.b.fsub(c.f(1.0, x), rest), x)
    return c.b.select(c.b.fcmp_ordered("<", a, c.f(_NEAR, x)), near, far)


def log(c: Code, x: Value) -> Value:
    n = lanes_of(x)
    tiny = c.b.fcmp_ordered("<", x, c.f(2.0**-126, n))
    scaled = c.b.select(tiny, c.b.fmul(x, c.f(2.0**25, n)), x)
    bits = _bits(c, scaled)
    # the exponent that leaves a mantissa in √½ … √2
    e = c.b.ashr(c.b.sub(bits, _ints(0x3F3504F3, n)), _ints(23, n))
    m = _floats(c, c.b.sub(bits, c.b.shl(e, _ints(23, n))))
    e = c.b.select(tiny, c.b.sub(e, _ints(25, n)), e)
    k = c.b.sitofp(e, vec(n))
    r = c.b.fsub(m, c.f(1.0, n))
    z = c.b.fmul(r, r)
    y = c.b.fmul(c.b.fmul(poly(c, r, POLY["log"]), r), z)
    y = c.fma(k, c.f(_LN2_LOW, n), y)
    y = c.fma(z, c.f(-0.5, n), y)
    y = c.fma(k, c.f(_LN2_HIGH, n), c.b.fadd(r, y))
    y = c.b.select(c.b.fcmp_unordered("<", x, c.f(0.0, n)), c.f(math.nan, n), y)
    y = c.b.select(c.b.fcmp_ordered("==", x, c.f(0.0, n)), c.f(-math.inf, n), y)
    return c.b.select(c.b.fcmp_ordered("==", x, c.f(math.inf, n)), x, y)


def log1p(c: Code, x: Value) -> Value:
    """ln(1 + x), with what is lost in 1 + x put back."""
    u = c.b.fadd(x, c.f(1.0, x))
    lost = c.b.fsub(x, c.b.fsub(u, c.f(1.0, x)))
    back = c.b.select(c.b.fcmp_ordered("==", u, c.f(0.0, x)), c.f(0.0, x), c.b.fdiv(lost, u))
    y = c.b.fadd(log(c, u), back)
    same = (c.b.fcmp_ordered("==", x, c.f(k, x)) for k in (math.inf, 0.0))  # keeps −0
    return c.b.select(c.b.or_(*same), x, y)


def tanh(c: Code, x: Value) -> Value:
    """(e²ˣ − 1) / (e²ˣ + 1) of |x|, which from 10 on is 1."""
    a = c.intrinsic("fabs", x)
    e = _less_one(c, c.fmin(c.b.fadd(a, a), c.f(20.0, x)))
    y = c.intrinsic("copysign", c.b.fdiv(e, c.b.fadd(e, c.f(2.0, x))), x)
    return c.b.select(c.b.fcmp_ordered("<", a, c.f(4e-4, x)), x, y)


_PI_2 = (1.57079637050628662109375, -4.37113900018624283e-8, -1.71512451206e-15)
_FAR = 1e5  # beyond this the reduction loses bits


def _circular(name: str, quarter: int) -> Callable[[Code, Value], Value]:
    def emit(c: Code, x: Value) -> Value:
        n = lanes_of(x)
        # k = round(2x / π) as float and as int32, without a conversion that nan would spoil
        shifted = c.fma(x, c.f(2.0 / math.pi, n), c.addend(_MAGIC, n))
        k = c.b.fsub(shifted, c.f(_MAGIC, n))
        ki = c.b.sub(_bits(c, shifted), _ints(_MAGIC_BITS, n))
        r = x
        for part in _PI_2:
            r = c.fma(k, c.f(-part, n), r)
        z = c.b.fmul(r, r)
        s = c.fma(c.b.fmul(poly(c, z, POLY["sin"]), z), r, r)
        half = c.fma(z, c.f(-0.5, n), c.f(1.0, n))
        co = c.fma(c.b.fmul(poly(c, z, POLY["cos"]), z), z, half)
        q = c.b.add(ki, _ints(quarter, n))
        odd = c.b.icmp_signed("!=", c.b.and_(q, _ints(1, n)), _ints(0, n))
        sign = c.b.shl(c.b.and_(q, _ints(2, n)), _ints(30, n))
        near = _floats(c, c.b.xor(_bits(c, c.b.select(odd, co, s)), sign))
        if quarter == 0:  # keeps −0 and denormals as they are
            small = c.b.fcmp_ordered("<", c.intrinsic("fabs", x), c.f(1e-4, n))
            near = c.b.select(small, x, near)
        out = c.variable(vec(n), near)
        far = c.b.fcmp_ordered(">", c.intrinsic("fabs", x), c.f(_FAR, n))
        seldom = c.b.zext(far, vec(n, I32))
        with c.when(c.b.icmp_signed("!=", c.reduce(seldom, c.b.or_), ir.Constant(I32, 0))):
            exact = c.get(out, vec(n))
            for lane in range(n):
                one = c.intrinsic(name, c.item(x, lane))
                if n == 1:
                    exact = one
                    break
                index = ir.Constant(I32, lane)
                old = c.b.extract_element(exact, index)
                one = c.b.select(c.b.extract_element(far, index), one, old)
                exact = c.b.insert_element(exact, one, index)
            c.b.store(exact, out)
        return c.get(out, vec(n))

    return emit


sin, cos = _circular("sin", 0), _circular("cos", 1)

FUNCTIONS: dict[str, Callable[[Code, Value], Value]] = {"sin": sin, "cos": cos}
FUNCTIONS |= {f.__name__: f for f in (exp, exp2, expm1, log, erf, tanh, ndtr)}


# ---- random words ------------------------------------------------------------------------------


def mix(c: Code, h: Value) -> Value:
    """The bijection of ops/random.py on 32-bit words."""
    n, b = lanes_of(h), c.b
    for shift, factor in ((16, words.FIRST), (15, words.SECOND)):
        h = b.mul(b.xor(h, b.lshr(h, _ints(shift, n))), _ints(factor, n))
    return b.xor(h, b.lshr(h, _ints(16, n)))


def random(c: Code, seed: Value, place: Value, far: bool) -> Value:
    """The upper bits of the random word of a place. Seed, place and result have 64 bits; ``far``:
    places may pass 2³²."""
    n, b = lanes_of(place), c.b

    def halves(x: Value) -> tuple[Value, Value]:
        return b.trunc(x, vec(n, I32)), b.trunc(b.lshr(x, constant(I64, 32, n)), vec(n, I32))

    (seed_low, seed_high), (low, high) = halves(seed), halves(place)
    key = mix(c, b.add(seed_low, _ints(words.GOLDEN, n)))
    key = mix(c, b.xor(key, seed_high))
    inner = mix(c, b.xor(key, high) if far else key)
    word = mix(c, b.add(mix(c, b.xor(low, inner)), key))
    return b.zext(b.lshr(word, _ints(32 - words.BITS, n)), vec(n, I64))


# ---- by the C library, and by squares -----------------------------------------------------------


def library(c: Code, name: str, *args: Value) -> Value:
    """A function of the C library, lane by lane: for float64, and for pow, for which no short
    polynomial is exact enough. 10 to 30 ns per element."""
    n, kind = lanes_of(args[0]), llvm.element_of(args[0])
    name = name if kind == F64 else name + "f"
    if n == 1:
        return c.outside(name, kind, *args)
    return c.joined(n, kind, lambda lane: c.outside(name, kind, *(c.item(x, lane) for x in args)))


def power(c: Code, x: Value, y: Value) -> Value:
    """Raise an integer to an integer power by squarings, as many as the exponents in all lanes have
    bits; 0 for a negative exponent, unless x is 1 or −1."""
    lanes, b = lanes_of(x), c.b

    def k(n: int) -> Value:
        return c.splat(c.i(n), lanes)

    def odd(n: Value) -> Value:
        return b.icmp_signed("!=", b.and_(n, k(1)), k(0))

    kind = vec(lanes, I64)
    negative = b.icmp_signed("<", y, k(0))
    base, left, out = (c.variable(kind) for _ in range(3))
    for room, value in ((base, x), (left, b.select(negative, k(0), y)), (out, k(1))):
        b.store(value, room)
    bits = c.reduce(c.get(left, kind), b.or_)
    with c.loop(0, c.sub(64, c.outside("llvm.ctlz.i64", I64, bits, ir.Constant(ir.I1, 0)))):
        now, n, p = (c.get(room, kind) for room in (base, left, out))
        b.store(b.select(odd(n), b.mul(p, now), p), out)
        b.store(b.mul(now, now), base)
        b.store(b.lshr(n, k(1)), left)
    sign = b.select(odd(y), k(-1), k(1))
    alone = b.select(b.icmp_signed("==", x, k(-1)), sign, k(0))
    alone = b.select(b.icmp_signed("==", x, k(1)), k(1), alone)
    return b.select(negative, alone, c.get(out, kind))
