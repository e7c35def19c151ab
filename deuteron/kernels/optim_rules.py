"""The update rules of optimisers, each written down once; γ is the rate, λ the decay, t the step.

Bytes per element of fp32, every pass reading and writing each tensor that it names once: SGD with
momentum 20, Adam 28, amsgrad 36, Lion 20, LAMB 40 and Adafactor 24 to 28 (two norms lie between two
passes), Adam in 8 bits 16; an average of the parameters adds 8, and float32 master weights of
16-bit parameters add 6.
"""

from functools import lru_cache
from math import inf

from deuteron.kernels.optim import FLAT, GROUPS, MATRICES, Extras, Rule

SQUARES = Rule(
    {}, "", lambda b, lr, step: {}, (("pass", "norm", lambda b, p, g: {"gg": g * g}),), sums=("gg",)
)


def limited(b, squares, scale, found, most, skips):
    """From the sum of the squares of all gradients: their norm, what they are multiplied with to
    undo a scale and not to pass a norm, and whether the step is left out: where an inf was found,
    and where the norm is none and ``skips`` is 1."""
    norm = b.sqrt(squares) / scale
    ratio = most / (norm + 1e-6)
    factor = b.where(ratio >= 1.0, 1.0, ratio) / scale  # nan stays nan
    return {"norm": norm, "factor": factor, "skip": found + b.where(norm < inf, 0.0, skips)}


@lru_cache
def sgd(momentum: bool, nesterov: bool, decay: bool, extras: Extras) -> Rule:
    """g ← g + λ·p;  b ← μ·b + (1 − τ)·g;  p ← p − γ·(g + μ·b or b)"""

    def update(b, p, g, lr, **x):
        d = g + x["decay"] * p if decay else g
        if not momentum:
            return {"p": p - lr * d}
        buf = x["momentum"] * x["buf"] + x["fresh"] * d
        return {"buf": buf, "p": p - lr * (d + x["momentum"] * buf if nesterov else buf)}

    state = {"buf": "momentum_buffer"} if momentum else {}
    constants = "decay " * decay + "momentum fresh" * momentum
    derive = lambda b, lr, step, **constants: {"lr": lr, **constants}  # noqa: E731
    return Rule(state, constants, derive, (("pass", "SGD", update),), extras)


# ---- Adam

ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}


def _moments(g, m, v, b1, c1, b2, c2, **_):
    """m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²"""
    return {"m": b1 * m + c1 * g, "v": b2 * v + c2 * (g * g)}


def _adam_numbers(b, step, b1, b2, eps):
    root = 1.0 / b.sqrt(1.0 - b2**step)
    return {"b1": b1, "c1": 1.0 - b1, "b2": b2, "c2": 1.0 - b2, "root": root, "eps": eps}


@lru_cache
def adam(amsgrad: bool, decoupled: bool, decay: bool, extras: Extras) -> Rule:
    """p ← (1 − γ·λ)·p − γ / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε), or λ·p added to g"""

    def update(b, p, g, root, eps, size, **x):
        made = _moments(g + x["decay"] * p if decay and not decoupled else g, **x)
        if amsgrad:
            made["vmax"] = b.maximum(x["vmax"], made["v"])
        below = b.sqrt(made["vmax" if amsgrad else "v"]) * root + eps
        return made | {"p": (x["keep"] * p if decoupled else p) - size * (made["m"] / below)}

    def derive(b, lr, step, b1, b2, eps, decay):
        made = _adam_numbers(b, step, b1, b2, eps) | {"size": lr / (1.0 - b1**step)}
        return made | ({"keep": 1.0 - lr * decay} if decoupled else {"decay": decay})

    state = ADAM | ({"vmax": "max_exp_avg_sq"} if amsgrad else {})
    formulas = (("pass", "Adam", update),)
    return Rule(state, "b1 b2 eps decay", derive, formulas, extras, counts=True)


def value(b, moment, level, top):
    """m = ±A·(q / 127)², v = V·(q / 255)⁴, with the largest of a group as A or V."""
    part = level / LARGEST[moment]
    return top * (part * b.abs(part) if moment == "m" else (part * part) * (part * part))


def level(b, moment, x, top, noise):
    """The level of x ≥ 0, below or above by chance with the mean kept: without that, moments would
    never leave their levels. A v above 0 has level 1 or more, because it is divided by."""
    r = b.where(top > 0.0, x / top, 0.0)
    root = b.sqrt(r if moment == "m" else b.sqrt(r))
    low = b.minimum(b.floor(root * LARGEST[moment]), LARGEST[moment] - 1.0)
    low = b.where(b.eq(low, low), low, 0.0)
    below, above = (value(b, moment, q, 1.0) for q in (low, low + 1.0))
    made = b.where(r - below > noise * (above - below), low + 1.0, low)
    return made if moment == "m" else b.where(x > 0.0, b.maximum(made, 1.0), made)


LARGEST = {"m": 127.0, "v": 255.0}
SALTS = {"m": 0, "v": 0x51ED27}
SCALES = {"m_scale": "exp_avg_scale", "v_scale": "exp_avg_sq_scale"}


@lru_cache
def adam_in_8_bits(extras: Extras) -> Rule:
    """AdamW between :func:`value` and :func:`level`."""
    plain = adam(False, True, True, Extras())

    def update(b, m, v, m_scale, v_scale, step, **x):
        m, v = value(b, "m", m, m_scale), value(b, "v", v, v_scale)
        made = dict(plain.formulas[0][2](b, m=m, v=v, **x))
        for moment in "mv":
            new = made[moment]
            size = b.abs(new) if moment == "m" else new
            # inf where one is nan, so that the group reads back as nan
            top = b.reduced("row_max", b.where(b.eq(size, size), size, inf))
            found = level(b, moment, size, top, b.noise(step, SALTS[moment]))
            made[f"{moment}_scale"] = top
            made[moment] = b.where(new < 0.0, -found, found) if moment == "m" else found
        return made

    def derive(b, lr, step, **constants):
        return {**plain.derive(b, lr, step, **constants), "step": step}

    formulas = (("pass", "Adam in 8 bits", update),)
    given = dict(extras=extras, walk=GROUPS, counts=True, on_device=True)
    return Rule(ADAM | SCALES, plain.constants, derive, formulas, **given)


@lru_cache
def lamb(adapt: bool, extras: Extras) -> Rule:
    """u = Adam's quotient + λ·p;  p ← p − γ·(‖p‖ / ‖u‖)·u. Where the norms count they lie between
    two passes, the second of which makes u again from the moments; else one pass is enough."""

    def direction(b, p, m, v, root, eps, first, decay, **_):
        return first * m / (b.sqrt(v) * root + eps) + decay * p

    def moments(b, p, g, m, v, lr, **x):
        made = _moments(g, m, v, **x)
        u = direction(b, p, **made, **x)
        return made | ({"pp": p * p, "uu": u * u} if adapt else {"p": p - lr * u})

    def ratio(b, size, pp, uu, **_):
        root = b.where(uu > 0.0, b.sqrt(pp / uu), 1.0)
        return {"ratio": b.where(pp > 0.0, root, 1.0)}

    def update(b, p, g, lr, ratio, **x):
        return {"p": p - lr * (ratio * direction(b, p, **x))}

    def derive(b, lr, step, b1, b2, eps, decay):
        made = _adam_numbers(b, step, b1, b2, eps)
        return made | {"first": 1.0 / (1.0 - b1**step), "decay": decay, "lr": lr}

    given = dict(extras=extras, counts=True, on_device=True)
    if not adapt:
        return Rule(ADAM, "b1 b2 eps decay", derive, (("pass", "LAMB", moments),), **given)
    formulas = ("pass", "moments", moments), ("finish", "ratios", ratio), ("pass", "LAMB", update)
    given |= dict(sums=("pp", "uu"), finished="ratio")
    return Rule(ADAM, "b1 b2 eps decay", derive, formulas, **given)


@lru_cache
def lion(extras: Extras) -> Rule:
    """p ← (1 − γ·λ)·p − γ·sign(β₁·m + (1 − β₁)·g);  m ← β₂·m + (1 − β₂)·g"""

    def update(b, p, g, m, lr, keep, b1, c1, b2, c2):
        return {"m": b2 * m + c2 * g, "p": keep * p - lr * b.sign(b1 * m + c1 * g)}

    def derive(b, lr, step, b1, b2, decay):
        made = {"lr": lr, "keep": 1.0 - lr * decay}
        return made | {"b1": b1, "c1": 1.0 - b1, "b2": b2, "c2": 1.0 - b2}

    return Rule({"m": "exp_avg"}, "b1 b2 decay", derive, (("pass", "Lion", update),), extras)


# ---- Adafactor


def _moved(b, old, mean, weight, **_):
    """A moment, moved towards the mean of squares."""
    return {"new": old + weight * (mean - old)}


def _pace(b, size, pp, uu, rho, eps2, d, **_):
    """ρ·max(ε₂, rms p) / max(1, rms u / d). A norm that is nan counts for nothing, as in
    torch.optim.Adafactor: a nan in one element of a vector does not reach the others."""
    large, long = b.sqrt(pp / size), b.sqrt(uu / size) / d
    return {"pace": rho * b.where(large > eps2, large, eps2) / b.where(long > 1.0, long, 1.0)}


PACES = ("finish", "paces", _pace)


def _adafactor(keys: str, formulas, extras: Extras, walk: str) -> Rule:
    def derive(b, lr, step, power, eps1, eps2, d, decay):
        made = {"weight": step**power, "rho": b.minimum(lr, 1.0 / b.sqrt(step))}
        return made | {"keep": 1.0 - lr * decay, "eps1": eps1, "eps2": eps2, "d": d}

    state, constants = {key: key for key in keys.split()}, "power eps1 eps2 d decay"
    given = dict(sums=("pp", "uu"), finished="pace", walk=walk, counts=True, on_device=True)
    return Rule(state, constants, derive, formulas, extras, **given)


@lru_cache
def adafactor_of_vectors(extras: Extras) -> Rule:
    """v ← v + w·(g² − v);  u = g / √max(v, ε₁²);  p ← (1 − γ·λ)·p − pace·u"""

    def direction(b, g, v, eps1):
        return g / b.sqrt(b.maximum(v, eps1 * eps1))

    def moments(b, p, g, variance, weight, eps1, **_):
        new = _moved(b, variance, g * g, weight)["new"]
        u = direction(b, g, new, eps1)
        return {"variance": new, "pp": p * p, "uu": u * u}

    def update(b, p, g, variance, keep, pace, eps1, **_):
        return {"p": keep * p - pace * direction(b, g, variance, eps1)}

    formulas = ("pass", "moments", moments), PACES, ("pass", "Adafactor", update)
    return _adafactor("variance", formulas, extras, FLAT)


@lru_cache
def adafactor_of_matrices(extras: Extras) -> Rule:
    """row ← row + w·(mean of g² along rows − row), col likewise;  U = row·col / max(mean row, ε₁);
    u = g / √max(U, ε₁²);  p ← (1 − γ·λ)·p − pace·u

    1/√U is a product of two numbers, one of the row and one of the column, so no element costs a
    root or a division."""

    def squares(b, p, g, **_):
        sums = {f"{of}_total": b.reduced(f"{of}_sum", g * g) for of in ("row", "column")}
        return sums | {"pp": p * p}

    def direction(b, g, row, column, mean, eps1, **_):
        of_row = row * b.sqrt(b.maximum(mean, eps1))
        return g * b.minimum(of_row * column, 1.0 / eps1)

    def length(b, p, g, **x):
        u = direction(b, g, **x)
        return {"uu": u * u}

    def update(b, p, g, keep, pace, **x):
        return {"p": keep * p - pace * direction(b, g, **x)}

    first = ("pass", "sums of squares", squares), ("moments", "moments", _moved)
    last = ("pass", "length", length), PACES, ("pass", "Adafactor", update)
    return _adafactor("row_var col_var", first + last, extras, MATRICES)
