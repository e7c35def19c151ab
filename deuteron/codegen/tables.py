"""Tables that renderers share: how they are written down, and the normal distribution.

1 + erf(x/√2) loses its digits as x falls: at −4 PyTorch's float32 has three left, at −5.5 none.
Here Φ(−a) = 2^q(a) for a ≥ 0 with a polynomial q, and Φ(a) = 1 − Φ(−a): what is small is computed
directly, and the other side takes a subtraction that cannot cancel.
"""


def polynomials(text: str) -> dict[str, tuple[float, ...]]:
    """Coefficients, highest power first, of polynomials that have one word for a name."""
    found: dict[str, tuple[float, ...]] = {}
    for word in text.split():
        if word.isidentifier():
            found[name := word] = ()
        else:
            found[name] += (float(word),)
    return found


def pairs(text: str) -> dict[str, str]:
    """Return a dict from a text in which keys and values take turns."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


# ``near``: log₂ Φ(−a), fitted for the smallest maximum error with the lower coefficients rounded to
# float32 before the higher ones were found. Relative to Φ(−a) the error is 9e-8 up to a = 1,
# 1.3e-7 up to 2, 1.3e-6 up to 3, 2.2e-5 up to 4; beyond that it is 1.5e-9 of 1, a tenth of what is
# lost in 1 + erf. The fit decreases everywhere.
# ``wide``, in float64: Φ(−a) = t · e^(r(2t − 1) − a²/2) with t = 1 / (1 + a/4), and these the
# coefficients of r, from its Chebyshev series. Off by 7e-16 of Φ(−a) up to a = 37.
NORMAL = polynomials(
    """
    near
    -2.0252909962437116e-06 2.9686998459510505e-05 -0.000140328862471506 -0.00024660571943968534
    0.007203957065939903 -0.052590031176805496 -0.45917925238609314 -1.1511081457138062
    -1.0
    wide
    2.0840802927716895e-09 3.2987410678657224e-09 -1.9107231556396664e-08 -4.194312067927408e-08
    8.487216839956218e-08 2.9157102780934313e-07 -2.1917034342899667e-07 -1.5031819141756665e-06
    8.036526736938994e-08 6.450327767107731e-06 3.1426036209015097e-06 -2.4020873390610106e-05
    -2.532270497365007e-05 7.700086537373276e-05 0.00014197968022468032 -0.0001935354636220296
    -0.0006695616768628416 0.0001921830346207639 0.002751855690690389 0.00206558961934258
    -0.009219441071012672 -0.0230318215314918 0.008203119400912595 0.18867367280175742
    0.8048571559157686 -1.6669543059673455
    """
)
NORMAL_END = 10.33  # from here on 2^q is below 2⁻¹²⁶: 0 where there are no denormals
NORMAL_GONE = 12.0  # from here on it is below 2⁻¹⁵⁰
NORMAL_FAR = 40.0  # from here on it is 0 in float64 too
