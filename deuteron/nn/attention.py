"""Multi-head attention, as ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.nn.stand_in import as_leaf


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` without a matrix of attention weights in memory, forward and
    backward, with any masks, and on a GPU with dropout.

    >>> y, _ = dt.nn.MultiheadAttention(768, 12, batch_first=True)(x, x, x, need_weights=False)

    Arguments and state dict are torch's. ``need_weights``, torch's default, asks for that matrix,
    so the call is then torch's own. A query that may look at no key gives the bias of the last
    projection, where torch gives nan.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        given: Any = (query, key, value, *masks)
        leaf: Any = as_leaf(self, *given)
        if leaf is not None:
            return leaf  # type: ignore[no-any-return]
        if need_weights or query.is_nested or key.is_nested or value.is_nested:
            return super().forward(*given)
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            wrong = f"query, key and value are of {query.ndim}, {key.ndim}, {value.ndim} dimensions"
            remedy = "give all of them 3, or 2 without a batch"
            raise BindError(wrong, asked="MultiheadAttention(…)(query, key, value)", remedy=remedy)
        if is_causal and attn_mask is None:
            wrong = "is_causal says of attn_mask that it is causal, and there is none"
            remedy = "give both, or neither"
            raise BindError(wrong, asked="MultiheadAttention(…)(…, is_causal=True)", remedy=remedy)
        q, k, v = self._heads(query, key, value)
        more = self.bias_k is not None or self.add_zero_attn
        causal = is_causal and key_padding_mask is None and not more  # then no mask is needed
        mask = self._masks(key_padding_mask, None if causal else attn_mask, k.shape[0])
        k, v, mask = self._further_keys(k, v, mask)
        p = self.dropout if self.training else 0.0
        found = F.attention(q, k, v, mask, causal=causal, dropout=p)
        y = self.out_proj(found.transpose(1, 2).flatten(2))
        if query.ndim == 2:
            return y[0], None
        return y if self.batch_first else y.transpose(0, 1), None

    def _heads(self, *given: Tensor) -> list[Tensor]:
        """Return q, k and v [batch, heads, length, features], by a single product if query, key and
        value are the same tensor."""
        alike = [given[0] is t for t in given]
        parts = list(given)
        if given[0].ndim == 2:
            parts = [t[None] for t in parts]
        elif not self.batch_first:
            parts = [t.transpose(0, 1) for t in parts]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and all(alike):
            made = list(linear(parts[0], weight, bias).chunk(3, -1))
        else:
            own: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            own = own if weight is None else weight.chunk(3)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            made = [linear(x, w, b) for x, w, b in zip(parts, own, biases, strict=True)]
        return [t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in made]

    def _masks(self, padding: Tensor | None, mask: Tensor | None, batch: int) -> Tensor | None:
        """Return both masks as one that broadcasts to the scores: bool, True where a query may
        look, or numbers to add to the scores."""
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (batch, self.num_heads))
        if padding is not None:
            padding = padding.reshape(batch, 1, 1, -1)
        there = [t for t in (padding, mask) if t is not None]
        if all(t.dtype == torch.bool for t in there):
            allowed = [~t for t in there]
            return None if not there else allowed[0] if len(there) == 1 else allowed[0] & allowed[1]
        added = [_added(t, like=there) for t in there]
        return added[0] if len(added) == 1 else added[0] + added[1]

    def _further_keys(
        self, k: Tensor, v: Tensor, masks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys and values that every query sees: the learned ones (``bias_k``,
        ``bias_v``), and one of zeros (``add_zero_attn``). The masks are extended to them."""
        batch, heads, _, features = k.shape
        before = k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            more = [
                b.view(1, 1, heads, features).transpose(1, 2) for b in (self.bias_k, self.bias_v)
            ]
            k, v = (
                torch.cat([t, m.to(t.dtype).expand(batch, -1, -1, -1)], 2)
                for t, m in zip((k, v), more, strict=True)
            )
        if self.add_zero_attn:
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        extra = k.shape[2] - before
        if masks is not None and extra and masks.dtype == torch.bool:
            masks = pad(masks, (0, extra), value=True)
        elif masks is not None and extra:
            masks = pad(masks, (0, extra))
        return k, v, masks


def _added(mask: Tensor, like: list[Tensor]) -> Tensor:
    """Return a mask as numbers to add to the scores: −∞ where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask
    dtype = next(t.dtype for t in like if t.dtype != torch.bool)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
