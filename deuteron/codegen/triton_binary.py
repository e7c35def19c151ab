"""Functions of two numbers as Triton text: fmod, atan2, pow and the power of integers, which have
no portable call.

``fmod`` is exact. ``atan2`` is off by at most 2 units in the last place; ``pow`` in float32 is
rounded from float64, in float64 off by at most 2 units, because its logarithm carries twice the
digits. Nothing relies on a fused multiply-add, which the interpreter does not have; kernels are
compiled without contraction, so that the error of a rounding can be computed.
"""

from textwrap import indent

from deuteron.codegen.tables import polynomials

PI = {  # and what its rounding left out
    "32": (3.1415927410125732, -8.742278000372485e-08),
    "64": (3.141592653589793, 1.2246467991473532e-16),
}
ALL_NAN = "propagate_nan=tl.PropagateNan.ALL"
TINY = 2.0**-1022  # below this a float64 is denormal; times 2^54 it is not

# (atan t − t) / t³ in t² up to tan² π/8, highest power first: off by 6e-10 and 4e-17
ATAN = polynomials(
    """
    bits32 0.05047937432040091 -0.08624598215196126 0.11071354571201351 -0.14284150629730288
    0.1999997724823353 -0.3333333327922454
    bits64 -0.019175404711104935 0.03923044778479309 -0.050854078345894844 0.05858140904866328
    -0.06664510525508936 0.07692183125376892 -0.0909090457530649 0.11111111015187018
    -0.14285714284665682 0.19999999999995516 -0.3333333333333333
    """
)


def wide(value: float) -> str:
    """A number as a float64; a plain literal would keep only the first half of its digits."""
    return _number(value, "64")


def _number(value: float, bits: str) -> str:
    return f"tl.full((), {value!r}, tl.float{bits})"


def _horner(name: str, x: str, powers: tuple[float, ...], bits: str) -> str:
    """``name``, a polynomial of ``x``, highest power first."""
    lines = [f"{name} = {x} * {_number(powers[0], bits)} + {_number(powers[1], bits)}"]
    lines += [f"{name} = {name} * {x} + {_number(k, bits)}" for k in powers[2:]]
    return "\n".join(lines)


def _fmod(double: bool) -> str:
    """Long division of whole mantissas, as many bits of the quotient at a time as 64 bits have room
    for: at most 9 steps for float32 and 211 for float64, most often one or two. How many is decided
    for all elements together."""
    more = "" if double else ".to(tl.float64)"
    low = "" if double else "m = m >> 29\nn = n >> 29\n"  # a float32 has only 24 bits
    step = 10 if double else 39
    return f"""
x, y = tl.broadcast(x, y)
a = tl.abs(x){more}
b = tl.abs(y){more}
far = (b > 0.0) & (a >= b) & (a < float("inf"))
small = a < {wide(TINY)}
m = tl.where(small, a * 18014398509481984.0, a).to(tl.int64, bitcast=True)
e = (m >> 52) - tl.where(small, 54, 0)
small = b < {wide(TINY)}
n = tl.where(small, b * 18014398509481984.0, b).to(tl.int64, bitcast=True)
last = (n >> 52) - tl.where(small, 54, 0)
e = tl.where(far, e - last, 0)
m = (m & 4503599627370495) | 4503599627370496
n = (n & 4503599627370495) | 4503599627370496
{low}for k in range(tl.max(e + tl.zeros((1,), tl.int64), axis=None) // {step} + 1):
    s = tl.minimum(e, {step})
    m = (m << s) % n
    e = e - s
# m 2^(last - 1075) in two exact products: the first has room, the second has its last bit
half = (last - {1075 if double else 1046}) >> 1
r = m.to(tl.float64) * ((half + 1023) << 52).to(tl.float64, bitcast=True)
r = r * ((last - {1075 if double else 1046} - half + 1023) << 52).to(tl.float64, bitcast=True)
r = tl.where(x < 0, r * -1.0, r){"" if double else ".to(tl.float32)"}
return tl.where(far, r, tl.where(a < b, x, float("nan")))
"""


def _atan2(bits: str) -> str:
    """The angle below π/8 by a polynomial, all others from it. What is small keeps its digits: the
    quotient of the smaller and the larger is below 1."""
    hi, lo = PI[bits]
    divide = "tl.div_rn({}, {})" if bits == "32" else "{} / {}"

    def turn(part: float) -> tuple[str, str]:
        return _number(hi * part, bits), _number(lo * part, bits)

    (p1, q1), (p2, q2), (p4, q4) = turn(1.0), turn(0.5), turn(0.25)
    return f"""
a = tl.abs(x)
b = tl.abs(y)
most = tl.maximum(a, b, {ALL_NAN})
least = tl.minimum(a, b, {ALL_NAN})
t = {divide.format("least", "tl.where(most == 0.0, 1.0, most)")}
t = tl.where((least == most) & (most > 0.0), 1.0, t)  # of two infinities too
steep = t > {_number(0.41421356237309503, bits)}
t = tl.where(steep, {divide.format("(t - 1.0)", "(t + 1.0)")}, t)
z = t * t
{_horner("p", "z", ATAN[f"bits{bits}"], bits)}
p = t + t * z * p
p = tl.where(steep, {p4} + (p + {q4}), p)
p = tl.where(b > a, {p2} - (p - {q2}), p)
p = tl.where(x.to(tl.int{bits}, bitcast=True) < 0, {p1} - (p - {q1}), p)
return tl.where(y.to(tl.int{bits}, bitcast=True) < 0, p * -1.0, p)
"""


_SIGNS = """
negative = x.to(tl.int{bits}, bitcast=True) < 0
whole = tl.floor(w) == w
odd = whole & (tl.floor(w * 0.5) * 2.0 != w)
p = tl.where((w == 0.0) | (a == 1.0), 1.0, p)
p = tl.where(negative & odd, p * -1.0, p)
p = tl.where((x < 0.0) & (w != 0.0) & (a != float("inf")) & (whole == 0), float("nan"), p)
"""

# 2 (2/(2k+1) …) of ln m = 2s (1 + s²/3 + s⁴ (1/5 + s²/7 + …)) with s = (m−1)/(m+1) below 0.1716:
# what is left out after s²⁴ is below 2⁻⁶⁵ of the whole
_SERIES = tuple(1.0 / k for k in range(25, 3, -2))

BODIES = {
    "_fmod(x, y)": _fmod(double=False),
    "_fmod64(x, y)": _fmod(double=True),
    "_atan2(y, x)": _atan2("32"),
    "_atan264(y, x)": _atan2("64"),
    "_pow(x, y)": f"""
# |x|^y in float64, where y ln|x| loses nothing that float32 would show
a = tl.abs(x).to(tl.float64)
w = y.to(tl.float64)
p = tl.exp(w * tl.log(a))
{_SIGNS.format(bits=32)}
return p.to(tl.float32)
""",
    "_pow64(x, y)": f"""
# y ln|x| to twice the digits, because e^ makes units of its last place 700 times as large
a = tl.abs(x)
w = tl.maximum(tl.minimum(y, 73786976294838206464.0, {ALL_NAN}),
               -73786976294838206464.0, {ALL_NAN})
plain = (a > 0.0) & (a < float("inf")) & (tl.abs(y) < float("inf"))
small = a < {wide(TINY)}
bits = tl.where(small, a * 18014398509481984.0, a).to(tl.int64, bitcast=True)
# |x| = 2^k m with m from sqrt(1/2) to sqrt(2)
bits = bits - 4604544271217802189
k = (bits >> 52) - tl.where(small, 54, 0)
m = ((bits & 4503599627370495) + 4604544271217802189).to(tl.float64, bitcast=True)
k = tl.where(plain, k, 0).to(tl.float64)
m = tl.where(plain, m, 1.0)
# s = (m - 1) / (m + 1), and what its rounding left
u = m - 1.0
d = m + 1.0
d_low = m - (d - 1.0)
s = u / d
h, l = _times2(s, d)
s_low = (((u - h) - l) - s * d_low) / d
# z = s * s and z / 3, both in two parts
h, l = _times2(s, s)
z = h
z_low = l + 2.0 * s * s_low
g, g_low = _times2(z, {wide(1.0 / 3.0)})
g_low = g_low + (z * {wide(1.850371707708594e-17)} + z_low * {wide(1.0 / 3.0)})
{_horner("q", "z", _SERIES, "64")}
g_low = g_low + z * z * q
# 2 s (1 + g), then k ln 2 to it
h, l = _times2(s, g)
l = l + (s * g_low + s_low * g)
t, e = _plus2(s, h)
e = 2.0 * (e + (l + s_low))
t = 2.0 * t
h, l = _plus2(k * {wide(0.6931471803691238)}, t)
l = l + (e + k * {wide(1.9082149292705877e-10)})
h, l = _plus2(h, l)
# y times that
p, e = _times2(h, w)
e = e + l * w
t = tl.maximum(tl.minimum(p, 800.0), -800.0)
p = tl.exp(t) * (1.0 + tl.where(t == p, e, 0.0))
p = tl.where(plain, p, tl.exp(y * tl.log(a)))
w = y
{_SIGNS.format(bits=64)}
return p
""",
    # as many squarings as the largest exponent of all elements has bits
    "_power(x, y)": """
x, y = tl.broadcast(x, y)
n = tl.maximum(y, 0)
most = tl.max(n + tl.zeros((1,), tl.int64), axis=None)
base = x
p = x * 0 + 1
while most > 0:
    p = tl.where((n & 1) != 0, p * base, p)
    base = base * base
    n = n >> 1
    most = most >> 1
alone = tl.where(x == 1, 1, tl.where(x == -1, tl.where((y & 1) != 0, -1, 1), 0))
return tl.where(y < 0, alone.to(tl.int64), p)
""",
    # Dekker: the product of two float64 and its error
    "_times2(x, y)": """
p = x * y
t = x * tl.full((), 134217729.0, tl.float64)
x1 = t - (t - x)
t = y * tl.full((), 134217729.0, tl.float64)
y1 = t - (t - y)
x2 = x - x1
y2 = y - y1
return p, ((x1 * y1 - p) + x1 * y2 + x2 * y1) + x2 * y2
""",
    # Knuth: the sum of two float64 and its error
    "_plus2(x, y)": """
s = x + y
t = s - x
return s, (x - (s - t)) + (y - t)
""",
}
SOURCES = [f"{head}:\n{indent(body.strip(), '    ')}" for head, body in BODIES.items()]
