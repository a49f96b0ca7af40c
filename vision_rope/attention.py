"""Attention over queries and keys that the caller has rotated."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import groupby, pairwise

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


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention inside each of several sequences that lie one after the other, as images of different sizes.

    A loop of scaled_dot_product_attention on views, neighbours of equal length in one call: no mask, no padding, no
    scores across sequences.

    Args:
        lengths: tokens of each sequence, in the order in which they lie.
        scale, dropout, is_causal: as of `attend`, inside each sequence.

    Shapes: q, k, v (..., heads, tokens of all sequences, head_dim) -> (..., heads, tokens, head_dim).
    Raises: ValueError where the lengths are not positive whole numbers or do not add up to the tokens.
    """
    sizes = _check_lengths(lengths, {"q": q, "k": k, "v": v})
    runs = [(len(list(run)), length) for length, run in groupby(sizes)]
    parts = zip(*(split_runs(x, runs) for x in (q, k, v)), strict=True)
    attended = [attend(*part, scale=scale, dropout=dropout, is_causal=is_causal) for part in parts]
    return join_runs(attended, runs, q.shape[:-3])


def split_runs(x: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Sequences that lie one after the other, each run of neighbours of equal length as a batch.

    Args:
        runs: of each the number of sequences and the tokens of one.

    Shapes: (..., heads, tokens of all sequences, head_dim) -> a run (number of sequences * ..., heads, tokens of one,
        head_dim)
    """
    parts = x.split([count * length for count, length in runs], dim=-2)
    return [part.unflatten(-2, run).movedim(-3, 0).flatten(0, -4) for part, run in zip(parts, runs, strict=True)]


def join_runs(parts: Sequence[Tensor], runs: Sequence[tuple[int, int]], batch: Sequence[int]) -> Tensor:
    """The inverse of `split_runs`, for the batch axes `batch` in front of the heads."""
    # Tokens before heads, as the kernels leave them in memory: only the last line copies.
    laid = [part.unflatten(0, (count, *batch)).transpose(-3, -2) for part, (count, _) in zip(parts, runs, strict=True)]
    return torch.cat([part.movedim(0, -4).flatten(-4, -3) for part in laid], dim=-3).transpose(-3, -2)


def _check_lengths(lengths: Sequence[int], tensors: dict[str, Tensor]) -> list[int]:
    try:
        sizes = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise ValueError(f"lengths is {lengths!r}; it must be a sequence of whole numbers, one a sequence") from error
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"lengths is {sizes}; there must be at least one sequence, and one token in each{_hint(sizes)}"
        )
    for name, x in tensors.items():
        if x.ndim < 3 or x.shape[-2] != sum(sizes):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and lengths {sizes} add up to {sum(sizes)}; it must be "
                f"(..., heads, {sum(sizes)}, head_dim), the sequences one after the other{_hint(sizes)}"
            )
    return sizes


def _hint(sizes: list[int]) -> str:
    """End of a message where lengths may be sums of lengths; nothing where they do not grow."""
    if len(sizes) < 2 or any(first >= second for first, second in pairwise(sizes)):
        return ""
    return "; cumulative lengths, as flash-attention takes them, are no lengths: give the differences between them"
