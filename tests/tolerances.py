"""How much error is allowed, said once. No test types a tolerance of its own.

An engine is compared with the reference in float64. It may be off by twice what PyTorch is
off in the same element type, plus a few roundings of that type for results where PyTorch
happens to be exact. A reduction over n elements is allowed √n roundings.
"""

from __future__ import annotations

import math

import torch

EPS = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}

# Two formulas for one function, both in float64: sums in another order, a product fused or not.
SAME_CODE = 1e-14  # the same kernels, called by another way
DOUBLE = 1e-12
DOUBLE_GRADIENT = 1e-11  # a gradient goes through more of them
HARDSIGMOID_SLOPE = 1e-7  # which torch keeps in float32, 1/6, whatever the input is
SINGLE = 1e-6  # the same in float32: a few roundings
SINGLE_LAYERS = 1e-5  # and through some layers, or an angle of many turns
NETWORK = 1e-4  # two ways through a small float32 network: the same sums in another order
GRADIENT = 1e-5  # finite differences in float64: truncation and cancellation together

# Roundings after some steps of an optimiser, two ways to the same numbers.
FEW_STEPS, STEPS, MANY_STEPS = 16, 32, 64
TRAINED = 256  # and through a network that is trained by them
DOUBLE_TRAINED = 1e-9  # some steps of a small network in float64, sums in another order
SIGNS_TURNED = 0.02  # the part of Lion's signs that rounding may turn
EIGHT_BIT_UPDATE = 0.08  # what a state of 8 bits may do to some updates, by length
EIGHT_BIT_MEAN = 2e-3  # and to the mean of many roundings
EVEN = 5e-3  # the mean of 2¹⁶ numbers that lie evenly in [0, 1), from a half

# Images: a place on a step of "nearest", or at a corner of clamp or hue, may go either way.
AT_A_STEP = 1e-3  # the part of pixels
AT_A_CORNER, CORNER = 2e-3, 1e-2  # the part of gradients, and by how much of the largest

# Where the exact answer is nothing but zeros, such as a norm of equal numbers: roundings of the
# numbers that cancel, of which a norm makes 1 / √eps times as many.
CANCELLED = 1e4


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest |out − exact| relative to the scale of exact; inf if nan or inf differ."""
    exact = exact.detach().double()  # compared where it is: large results stay on the GPU
    out = out.detach().to(exact.device).double()
    if out.shape != exact.shape:
        return math.inf
    finite = exact.isfinite()
    if not finite.all():
        odd_out, odd_exact = out[~finite], exact[~finite]
        if not torch.equal(odd_out.isnan(), odd_exact.isnan()) or not torch.equal(
            odd_out[~odd_out.isnan()], odd_exact[~odd_exact.isnan()]
        ):
            return math.inf
        out, exact = out[finite], exact[finite]
    if exact.numel() == 0:
        return 0.0
    scale = exact.abs().max().clamp_min(1e-30)
    worst = float((out - exact).abs().max() / scale)
    return math.inf if math.isnan(worst) else worst


def allowed(torch_error: float, dtype: torch.dtype, reduced: int = 1) -> float:
    """The bound for an engine, given what PyTorch's own error was."""
    eps = EPS.get(dtype, 0.0)
    return 2.0 * torch_error + 4.0 * eps * math.sqrt(max(reduced, 1))


def rounded_mean(deviations: float, dtype: torch.dtype) -> float:
    """What a mean so many deviations from 0 costs a norm, once it is rounded to the type."""
    return deviations * EPS[dtype] / 2
