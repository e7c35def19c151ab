"""The BERT encoder.

Parameter names are those of Hugging Face's ``BertModel``.  ``convert_state_dict`` turns the
variants found in published files (a ``bert.`` prefix, pre-training heads, ``gamma``/``beta``)
into exactly those names.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT encoder; the defaults are those of bert-base-uncased."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {heads}")


class BertEmbeddings(nn.Module):
    """Word, position and segment embeddings, added and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(x))


class BertSelfAttention(nn.Module):
    """Multi-head attention up to, and without, its output projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = config.dropout

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return out.transpose(1, 2).flatten(2)


class BertResidual(nn.Module):
    """Projection, dropout, sum with the residual, layer norm: the end of either half-layer."""

    def __init__(self, c_in: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(c_in, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def branch_end(self) -> tuple[Tensor, float]:
        return self.dense.weight, 0.35

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class BertLayer(nn.Module):
    """One encoder layer: attention, then the feed-forward network with the exact (erf) GELU."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        attention = BertSelfAttention(config)
        output = BertResidual(config.hidden_size, config)
        self.attention = nn.ModuleDict({"self": attention, "output": output})
        wide = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate = nn.Sequential(OrderedDict(dense=wide, gelu=nn.GELU()))
        self.output = BertResidual(config.intermediate_size, config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        return self.output(self.intermediate(x), x)


class BertModel(nn.Module):
    """BERT encoder with pooler.

    ``input_ids`` is (batch, sequence).  ``attention_mask``, of the same shape, is 1 (or True) on
    tokens to attend to and 0 on padding; every row needs at least one token.  ``token_type_ids``
    defaults to zeros.  Returns ``(last_hidden_state, pooled)``, of shapes
    (batch, sequence, hidden) and (batch, hidden).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.pooler = nn.Sequential(OrderedDict(dense=dense, tanh=nn.Tanh()))  # of the first token

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        mask = attention_mask
        if mask is not None:
            mask = mask.to(torch.bool)[:, None, None, :]
        hidden: Tensor = self.embeddings(input_ids, token_type_ids)
        for layer in self.encoder["layer"].children():
            hidden = layer(hidden, mask)
        return hidden, self.pooler(hidden[:, 0])


def convert_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a published BERT checkpoint that belong to ``BertModel``, under its names."""
    converted = {}
    for key, value in state.items():
        key = key.removeprefix("bert.")
        key = key.replace("LayerNorm.gamma", "LayerNorm.weight")
        key = key.replace("LayerNorm.beta", "LayerNorm.bias")
        ours = key.startswith(("embeddings.", "encoder.", "pooler."))
        if ours and key != "embeddings.position_ids":
            converted[key] = value
    return converted
