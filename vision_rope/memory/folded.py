"""Softmax attention of one head that reads narrow memory instead of wide values, on a CPU.

Values are a linear function of the memory, v_j = W m_j + b, and the weights of a softmax add up to 1, so that
sum_j a_j v_j = W (sum_j a_j m_j) + b: it is enough to average the memory, which in SAM 2 is a quarter as wide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Scores of one block stay in the cache: 1024 x 512 float32 are 2 MiB.
QUERIES, KEYS = 1024, 512


def average_memory(
    q: Tensor, keys: Sequence[Tensor], ages: Sequence[Tensor | None], memory: Sequence[Tensor]
) -> Tensor:
    """Memory averaged with softmax weights of the scores q k^T: blocks of a softmax with a running maximum.

    Args:
        q: queries, scaled already.
        keys: keys of each part of the memory.
        ages: what is added to the keys of a part, or None.
        memory: the parts themselves.

    Shapes: q (batch, queries, dim), keys (batch or 1, n_i, dim), ages (n_i, dim), memory (batch or 1, n_i,
        memory_dim) -> (batch, queries, memory_dim)
    Source: online softmax (arXiv 1805.02867), as FlashAttention (arXiv 2205.14135) blocks it.
    """
    batch = max(x.shape[0] for x in (q, *keys, *memory))
    out = q.new_empty(batch, q.shape[1], memory[0].shape[-1])
    # A column of ones averages to the sum of the weights, which costs no pass of its own.
    ones = [torch.cat((part, part.new_ones(*part.shape[:-1], 1)), dim=-1) for part in memory]
    for sample in range(batch):
        own_keys = [_of(part, sample) for part in keys]
        own_memory = [_of(part, sample) for part in ones]
        for queries, target in zip(_of(q, sample).split(QUERIES), out[sample].split(QUERIES), strict=True):
            _average_block(queries, own_keys, ages, own_memory, target)
    return out


def _average_block(
    q: Tensor, keys: Sequence[Tensor], ages: Sequence[Tensor | None], memory: Sequence[Tensor], out: Tensor
) -> None:
    total = q.new_zeros(len(q), memory[0].shape[-1])
    largest = q.new_full((len(q), 1), float("-inf"))
    scores = q.new_empty(len(q) * KEYS)
    shifted = q.new_empty(KEYS, q.shape[-1])
    for part_keys, part_ages, part in zip(keys, ages, memory, strict=True):
        for start in range(0, len(part_keys), KEYS):
            block = part_keys[start : start + KEYS]
            if part_ages is not None:
                block = torch.add(block, part_ages[start : start + KEYS], out=shifted[: len(block)])
            score = torch.mm(q, block.T, out=scores[: len(q) * len(block)].view(len(q), len(block)))
            grown = torch.maximum(largest, score.amax(dim=-1, keepdim=True))
            weights = score.sub_(grown).exp_()
            total.mul_(largest.sub_(grown).exp_()).addmm_(weights, part[start : start + KEYS])
            largest = grown
    torch.div(total[:, :-1], total[:, -1:], out=out)


def _of(x: Tensor, sample: int) -> Tensor:
    return x[sample if len(x) > 1 else 0]
