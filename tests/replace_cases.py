"""Modules of a small language model as authors of models write them, each in its own way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RootNorm(nn.Module):
    """RMS in float32, the weight times the rounded result."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.small = eps

    def forward(self, hidden):
        kind = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.small)
        return self.weight * hidden.to(kind)


class ShiftedNorm(RootNorm):
    """The weight is kept as its distance from 1, and applied before rounding."""

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.small)
        return (y * (1.0 + self.weight.float())).type_as(x)


class WideNorm(RootNorm):
    """The result has the weight's type if that is short."""

    def forward(self, hidden):
        variance = hidden.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.small)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden = hidden.to(self.weight.dtype)
        return self.weight * hidden


class BareNorm(nn.Module):
    """A layer norm without weights, and with an eps that is kept nowhere."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shape = (size,)

    def forward(self, hidden):
        return F.layer_norm(hidden.to(torch.float32), self.shape, None, None, 1e-5).to(hidden.dtype)


class CentredNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = 1e-5

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * self.scale + self.shift


class NewGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


class ThreeLayers(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.down = nn.Linear(inner, size, bias=False)
        self.a = nn.Linear(size, inner, bias=False)
        self.b = nn.Linear(size, inner, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.b(x) * self.act(self.a(x)))


class JoinedLayers(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.both = nn.Linear(size, 2 * inner)
        self.out = nn.Linear(inner, size)
        self.act = NewGelu()

    def forward(self, hidden):
        up, gate = self.both(hidden).chunk(2, dim=-1)
        return self.out(up * self.act(gate))


class CastingLayers(nn.Module):
    """With a dropout, and a last layer that may be kept in float32."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(size, inner, bias=False)
        self.wi_1 = nn.Linear(size, inner, bias=False)
        self.wo = nn.Linear(inner, size, bias=False)
        self.dropout = nn.Dropout(0.0)
        self.act = nn.GELU()

    def forward(self, hidden):
        hidden = self.dropout(self.act(self.wi_0(hidden)) * self.wi_1(hidden))
        if hidden.dtype != self.wo.weight.dtype:
            hidden = hidden.to(self.wo.weight.dtype)
        return self.wo(hidden)


class AddAndNorm(nn.Module):
    """dropout, a residual that is a second argument, and a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(size, size), nn.LayerNorm(size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden, stream):
        hidden = self.dropout(self.dense(hidden))
        return self.norm(hidden + stream)


def rotate_half(x):
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(size, size), nn.Linear(size, size // 2)
        self.v, self.o = nn.Linear(size, size // 2), nn.Linear(size, size)

    def forward(self, hidden, angles=None):
        shape = (*hidden.shape[:-1], -1, hidden.shape[-1] // self.heads)
        q, k, v = (f(hidden).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = apply_rotary(q, k, *angles)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int, norm: type[nn.Module], mlp: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.attention = norm(size), Attention(size, 4)
        self.between, self.mlp = norm(size), mlp(size, 3 * size)

    def forward(self, hidden, angles):
        hidden = hidden + self.attention(self.before(hidden), angles=angles)
        return hidden + self.mlp(self.between(hidden))


class Language(nn.Module):
    """A causal language model that computes its own loss, in float32, if it is given labels."""

    def __init__(
        self,
        norm: type[nn.Module] = RootNorm,
        mlp: type[nn.Module] = ThreeLayers,
        size: int = 32,
        words: int = 3000,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, size), norm(size)
        self.blocks = nn.ModuleList(Block(size, norm, mlp) for _ in range(2))
        self.head = nn.Linear(size, words, bias=False)
        self.again = False
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids, labels=None):
        hidden = self.words(ids)
        rate = 100.0 ** -(torch.arange(4) / 4.0)
        angle = torch.arange(ids.shape[1])[None, :, None] * torch.cat((rate, rate))
        angles = angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype)
        for block in self.blocks:
            if self.again:
                call = torch.utils.checkpoint.checkpoint
                hidden = call(block, hidden, angles, use_reentrant=False)
            else:
                hidden = block(hidden, angles)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return logits
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        flat = logits.float().view(-1, logits.shape[-1])
        return F.cross_entropy(flat, labels.view(-1), ignore_index=-100), logits
