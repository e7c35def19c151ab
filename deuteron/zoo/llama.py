"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names are those of Hugging Face's ``LlamaForCausalLM``.  ``convert_state_dict`` adapts
published files that leave out a tied output matrix or carry rotary tables.  The whole prompt is
run at once; there is no key/value cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies to contexts longer than trained."""

    factor: float = 32.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama decoder; the defaults make a small one for tests and demonstrations."""

    vocab_size: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        heads = f"num_attention_heads {self.num_attention_heads}"
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(f"hidden_size {self.hidden_size} gives {heads} no even head size")
        if self.num_attention_heads % self.num_key_value_heads:
            shared = f"num_key_value_heads {self.num_key_value_heads}"
            raise ValueError(f"{heads} is not a multiple of {shared}")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """Divide by the root mean square, computed in float32, and scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Radians per position of each rotated pair, fastest first: (head_dim / 2,) in float32."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    freqs = config.rope_theta ** (-exponent / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    # Blend from fully slowed down (few turns within the trained context) to untouched (many).
    turns = scaling.original_max_position_embeddings * freqs / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables for positions 0 to n - 1, each (n, head_dim).

    The frequencies stay in float32 whatever the model is cast to: in half precision the angles
    of far positions would be wrong.
    """

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = rotary_frequencies(self.config, self.inv_freq.device)
        return self

    def forward(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.inv_freq.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (..., n, head_dim), pairing element i with element i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = apply_rotary(self._heads(self.q_proj(x)), cos, sin)
        key = apply_rotary(self._heads(self.k_proj(x)), cos, sin)
        value = self._heads(self.v_proj(x))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    """The SwiGLU feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward network, each normalised before and added after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the final norm: token ids to hidden states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(input_ids.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Token ids (batch, sequence) to next-token logits (batch, sequence, vocab_size)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))


def convert_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published Llama checkpoint made complete: tied output matrix in, rotary tables out."""
    converted = {key: value for key, value in state.items() if "rotary_emb" not in key}
    converted.setdefault("lm_head.weight", converted["model.embed_tokens.weight"])
    return converted
