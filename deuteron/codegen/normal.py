"""The normal distribution Φ without cancellation, as both renderers compute it.

1 + erf(x/√2) loses its digits as x falls: at −4 PyTorch's float32 has three left, at −5.5 none.
Here Φ(−a) = 2^q(a) for a ≥ 0 with a polynomial q, and Φ(a) = 1 − Φ(−a): what is small is found as
such, and the other side takes a subtraction that cannot cancel.
"""

# log₂ Φ(−a), highest power first, fitted for the smallest largest error with the lower
# coefficients rounded to float32 before the higher ones were found. As a share of Φ(−a) it is off
# by 9e-8 up to a = 1, 1.3e-7 up to 2, 1.3e-6 up to 3, 2.2e-5 up to 4; beyond that by 1.5e-9 of
# 1, a tenth of what is lost in 1 + erf. It falls all the way.
TAIL = (
    -2.0252909962437116e-06, 2.9686998459510505e-05, -0.000140328862471506,
    -0.00024660571943968534, 0.007203957065939903, -0.052590031176805496, -0.45917925238609314,
    -1.1511081457138062, -1.0,
)  # fmt: skip
END = 10.33  # from here on 2^q is below 2⁻¹²⁶: 0 where denormals are none
GONE = 12.0  # from here on it is below 2⁻¹⁵⁰
