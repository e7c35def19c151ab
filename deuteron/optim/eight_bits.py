"""AdamW's state in 8 bits, in torch's operators: the same numbers as the kernels'."""

from __future__ import annotations

import torch

from deuteron.optim.batch import Batch

GROUP = 256


def seed(step: int) -> int:
    """Of a step's noise; tensor i of a batch adds i."""
    return (step * 0x3C6EF372) & 0xFFFFFFFF


def noise(count: int, seed: int) -> torch.Tensor:
    """Evenly in [0, 1), from an element's place and a seed: the kernel's 32-bit hash."""
    low = 0xFFFFFFFF
    x = (torch.arange(count) + seed) & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    x = x ^ (x >> 16)
    return (x >> 8).float() / 16777216.0


def level(
    x: torch.Tensor, top: torch.Tensor, by: torch.Tensor, levels: int, power: int
) -> torch.Tensor:
    """x ≥ 0 as a level between 0 and ``levels``: up or down by chance, the mean kept. A second
    moment (power 4) above 0 has level 1 or more, because it is divided by."""
    r = torch.where(top > 0, x / top, 0.0)
    root = r.sqrt().sqrt() if power == 4 else r.sqrt()
    low = (root * levels).floor().clamp(max=levels - 1).nan_to_num()
    below, above = _power(low / levels, power), _power((low + 1) / levels, power)
    made = torch.where(r - below > by * (above - below), low + 1, low)
    return made.clamp(min=1).where(x > 0, made) if power == 4 else made


def _power(x: torch.Tensor, power: int) -> torch.Tensor:
    return x.square().square() if power == 4 else x.square()


def step(batch: Batch, numbers: list[float], count: int) -> None:
    """One step of every tensor of a batch."""
    gscale, b1, c1, b2, c2, root, eps, size, keep, *ema_rate = numbers
    for i, home in enumerate(batch.homes):
        m8, v8, m_scale, v_scale = (row[i] for row in batch.tensors[:4])
        master, average = (batch.states[i].get(key) for key in ("master", "ema"))
        n = home.numel()
        pad = -n % GROUP

        def groups(x: torch.Tensor, pad: int = pad) -> torch.Tensor:
            flat = x.as_strided((x.numel(),), (1,)).float()
            return torch.nn.functional.pad(flat, (0, pad)).view(-1, GROUP)

        g, mr, vr = groups(batch.held[i]) * gscale, groups(m8) / 127.0, groups(v8) / 255.0
        m = m_scale[:, None] * (mr * mr.abs())
        v = v_scale[:, None] * _power(vr, 4)
        m, v = b1 * m + c1 * g, b2 * v + c2 * (g * g)
        old = groups(home if master is None else master)
        new = keep * old - size * (m / (v.sqrt() * root + eps))
        for x, store, scale, levels, power, salt in (
            (m, m8, m_scale, 127, 2, 0),
            (v, v8, v_scale, 255, 4, 0x51ED27),
        ):
            size_of = x.abs()
            scale.copy_(size_of.nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1))
            by = noise(n + pad, seed(count) + i + salt).view(-1, GROUP)
            levels_of = level(size_of, scale[:, None], by, levels, power)
            signed = torch.where(x < 0, -levels_of, levels_of)
            store.as_strided((n,), (1,)).copy_(signed.flatten()[:n])
        made = new.flatten()[:n]
        for store in (home, master):
            if store is not None:
                store.as_strided((n,), (1,)).copy_(made)
        for part in ema_rate:
            assert average is not None
            average.as_strided((n,), (1,)).lerp_(made, part)
