"""AdamW with its state in 8 bits: the arithmetic of :mod:`deuteron.kernels.optim`, and

    m̂ = ±A·(q / 127)²,  A = max |m| of 256 elements;    v̂ = V·(q / 255)⁴,  V = max v

Rounding is to the level below or above with the odds that make the mean exact, by a hash of
element and step: without that, β₂·v + (1 − β₂)·g² would never leave its level. Bytes per element
of fp32: 16.06 against 28 with state in float32 (p read and written, g read, four of state, and
two scales per 256 elements read and written); an average of the parameters adds 8, and float32
master weights of 16-bit parameters add 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

GROUP = 256  # elements that share a scale
ROWS = 4  # such groups in a chunk


@triton.jit
def _noise(i, seed):
    """Evenly in [0, 1), from an element's place and a seed."""
    x = (i + seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _top(x):
    """The largest of each row; inf where one is nan, so that the row reads back as nan."""
    return tl.max(tl.where(x == x, x, float("inf")), 1)


@triton.jit
def _level(x, top, noise, LEVELS: tl.constexpr, FOURTH: tl.constexpr):
    """x ≥ 0 as a level between 0 and LEVELS; a second moment above 0 has level 1 or more, because
    it is divided by."""
    r = tl.where(top > 0.0, x / tl.where(top > 0.0, top, 1.0), 0.0)
    q = tl.sqrt(r)
    if FOURTH:
        q = tl.sqrt(q)
    low = tl.minimum(tl.floor(q * LEVELS), LEVELS - 1.0)
    low = tl.where(low == low, low, 0.0)
    a = low / LEVELS
    b = (low + 1.0) / LEVELS
    below = a * a
    above = b * b
    if FOURTH:
        below = below * below
        above = above * above
    level = tl.where(r - below > noise * (above - below), low + 1.0, low)
    if FOURTH:
        level = tl.where((x > 0.0) & (level < 1.0), 1.0, level)
    return level


@triton.jit
def _chunk(
    p_at,
    g_at,
    m_at,
    v_at,
    w_at,
    e_at,
    scale_at,
    square_at,
    place,
    mask,
    some,
    gscale,
    b1,
    c1,
    b2,
    c2,
    root,
    eps,
    size,
    keep,
    ema_rate,
    seed,
    P: tl.constexpr,
    MASKED: tl.constexpr,
):
    """ROWS groups of one tensor. ``mask`` is None for whole chunks: masked loads are slow. Master
    weights and averages are at ``w_at`` and ``e_at``, or these are None."""
    if w_at is not None:
        p = tl.load(w_at, mask=mask)
    elif MASKED:
        p = tl.load(p_at, mask=mask, other=0.0).to(tl.float32)
    else:
        p = tl.load(p_at).to(tl.float32)
    if MASKED:
        g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32) * gscale
        mq = tl.load(m_at, mask=mask, other=0).to(tl.float32)
        vq = tl.load(v_at, mask=mask, other=0).to(tl.float32)
    else:
        g = tl.load(g_at).to(tl.float32) * gscale
        mq = tl.load(m_at).to(tl.float32)
        vq = tl.load(v_at).to(tl.float32)
    m_top = tl.load(scale_at, mask=some, other=0.0)[:, None]
    v_top = tl.load(square_at, mask=some, other=0.0)[:, None]
    mr = mq / 127.0
    vr = vq / 255.0
    m = m_top * (mr * tl.abs(mr))
    v = v_top * ((vr * vr) * (vr * vr))
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    new = keep * p - size * (m / (tl.sqrt(v) * root + eps))
    if MASKED:
        m = tl.where(mask, m, 0.0)
        v = tl.where(mask, v, 0.0)
    m_new = _top(tl.abs(m))
    v_new = _top(v)
    ml = _level(tl.abs(m), m_new[:, None], _noise(place, seed), 127, False)
    vl = _level(v, v_new[:, None], _noise(place, seed + 0x51ED27), 255, True)
    ml = tl.where(m < 0.0, -ml, ml)
    if MASKED:
        tl.store(p_at, new.to(P), mask=mask)
        tl.store(m_at, ml.to(tl.int8), mask=mask)
        tl.store(v_at, vl.to(tl.uint8), mask=mask)
    else:
        tl.store(p_at, new.to(P))
        tl.store(m_at, ml.to(tl.int8))
        tl.store(v_at, vl.to(tl.uint8))
    if w_at is not None:
        tl.store(w_at, new, mask=mask)
    if e_at is not None:
        ema = tl.load(e_at, mask=mask)
        tl.store(e_at, ema + ema_rate * (new - ema), mask=mask)
    tl.store(scale_at, m_new, mask=some)
    tl.store(square_at, v_new, mask=some)


@triton.jit
def _adamw8(
    table,
    grads,
    where,
    tensors,
    chunks,
    rows,
    steps,
    control,
    P: tl.constexpr,
    G: tl.constexpr,
    MASTER: tl.constexpr,
    EMA: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Chunk i of the list; numbers as in the rows of the rule, the seed from the step count."""
    i = tl.program_id(0)
    t = tl.load(where + i)
    start = tl.load(where + chunks + i).to(tl.int64) * (ROWS * GROUP)
    length = tl.load(table + t)
    a_p = tl.load(table + tensors + t)
    a_m = tl.load(table + 2 * tensors + t)
    a_v = tl.load(table + 3 * tensors + t)
    a_s = tl.load(table + 4 * tensors + t)
    a_q = tl.load(table + 5 * tensors + t)
    a_w = tl.load(table + 6 * tensors + t) if MASTER else a_p
    a_e = tl.load(table + (7 if MASTER else 6) * tensors + t) if EMA else a_p
    a_g = tl.load(grads + t)
    own = rows + t * (10 if EMA else 9)
    gscale = tl.load(own).to(tl.float32)
    skip = 0.0
    if control is not None:
        gscale = (gscale * tl.load(control)).to(tl.float32)
        skip = tl.load(control + 1)
    if skip == 0.0:
        b1 = tl.load(own + 1).to(tl.float32)
        c1 = tl.load(own + 2).to(tl.float32)
        b2 = tl.load(own + 3).to(tl.float32)
        c2 = tl.load(own + 4).to(tl.float32)
        root = tl.load(own + 5).to(tl.float32)
        eps = tl.load(own + 6).to(tl.float32)
        size = tl.load(own + 7).to(tl.float32)
        keep = tl.load(own + 8).to(tl.float32)
        ema_rate = tl.load(own + 9).to(tl.float32) if EMA else 0.0
        seed = tl.load(steps + t).to(tl.int64) * 0x3C6EF372 + t
        lane = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        groups = start // GROUP + tl.arange(0, ROWS)
        some = groups * GROUP < length
        s_at = a_s.to(tl.pointer_type(tl.float32)) + groups
        q_at = a_q.to(tl.pointer_type(tl.float32)) + groups
        place = start + lane
        aligned = ((a_p | a_g | a_m | a_v | a_w | a_e) & 15) == 0
        if (start + ROWS * GROUP <= length) & aligned:
            w_at = tl.multiple_of(a_w.to(tl.pointer_type(tl.float32)), 16) + start + lane
            e_at = tl.multiple_of(a_e.to(tl.pointer_type(tl.float32)), 16) + start + lane
            _chunk(
                tl.multiple_of(a_p.to(tl.pointer_type(P)), 16) + start + lane,
                tl.multiple_of(a_g.to(tl.pointer_type(G)), 16) + start + lane,
                tl.multiple_of(a_m.to(tl.pointer_type(tl.int8)), 16) + start + lane,
                tl.multiple_of(a_v.to(tl.pointer_type(tl.uint8)), 16) + start + lane,
                w_at if MASTER else None,
                e_at if EMA else None,
                s_at,
                q_at,
                place,
                None,
                some,
                gscale,
                b1,
                c1,
                b2,
                c2,
                root,
                eps,
                size,
                keep,
                ema_rate,
                seed,
                P,
                False,
            )
        else:
            w_at = a_w.to(tl.pointer_type(tl.float32)) + start + lane
            e_at = a_e.to(tl.pointer_type(tl.float32)) + start + lane
            _chunk(
                a_p.to(tl.pointer_type(P)) + start + lane,
                a_g.to(tl.pointer_type(G)) + start + lane,
                a_m.to(tl.pointer_type(tl.int8)) + start + lane,
                a_v.to(tl.pointer_type(tl.uint8)) + start + lane,
                w_at if MASTER else None,
                e_at if EMA else None,
                s_at,
                q_at,
                place,
                lane < length - start,
                some,
                gscale,
                b1,
                c1,
                b2,
                c2,
                root,
                eps,
                size,
                keep,
                ema_rate,
                seed,
                P,
                True,
            )


adamw8 = Launchable(_adamw8)
