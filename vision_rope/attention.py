"""Attention over queries and keys that the caller has rotated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention, torch's scaled_dot_product_attention underneath.

    Args:
        bias: added to the scores before the softmax.
        mask: boolean, True where a query may look at a key.
        scale: factor of the scores; None means head_dim ** -0.5.
        dropout: probability of dropping an attention weight; pass 0 in evaluation.
        is_causal: a token sees itself and earlier tokens only.

    Shapes: q (..., heads, queries, head_dim), k and v (..., heads, keys, head_dim), bias and mask broadcast to
        (..., heads, queries, keys) -> (..., heads, queries, head_dim).
    Raises: ValueError where a mask or bias comes with is_causal, or the mask is not boolean.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"mask has dtype {mask.dtype}; a mask is boolean (True: may look), numbers to add go to `bias`"
        )
    if is_causal and (mask is not None or bias is not None):
        raise ValueError("is_causal cannot be combined with mask or bias; put the causal part into the mask")
    if bias is not None:
        bias = bias.to(q.dtype)
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask if bias is None else bias, dropout_p=dropout, is_causal=is_causal, scale=scale
    )
