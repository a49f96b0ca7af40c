"""Softmax attention of one head that reads narrow memory instead of wide values, on a CPU.

Values are a linear function of the memory, v_j = W m_j + b, and the weights of a softmax add up to 1, so that
sum_j a_j v_j = W (sum_j a_j m_j) + b: it is enough to average the memory, which in SAM 2 is a quarter as wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# One block of queries for a frame of SAM 2, so that keys are read once; its scores are 8 MiB of float32.
QUERIES, SCORES = 4096, 1 << 21
# exp of scores that are no larger needs no maximum taken off: neither sums nor their terms leave float32.
HARMLESS = 40.0


@dataclass(frozen=True)
class MemoryPart:
    """Keys of one stored frame and what is averaged for them.

    Attributes:
        age: what the frame's age adds to the keys of each row and of each column of its grid, or None.

    Shapes: keys (batch or 1, tokens, dim), memory (batch or 1, tokens, memory_dim), age (rows, dim) and (columns, dim)
    """

    keys: Tensor
    memory: Tensor
    age: tuple[Tensor, Tensor] | None = None

    def aged_keys(self) -> Tensor:
        """Keys with their age, (batch or 1, tokens, dim)."""
        if self.age is None:
            return self.keys
        rows, columns = self.age
        return self.keys + (rows.unsqueeze(1) + columns).flatten(0, 1)


def average_memory(q: Tensor, parts: Sequence[MemoryPart]) -> Tensor:
    """Memory averaged with softmax weights of the scores q k^T, a block of queries and keys at a time.

    Args:
        q: queries, scaled already.

    Shapes: q (batch or 1, queries, dim) -> (batch, queries, memory_dim)
    Source: online softmax (arXiv 1805.02867), as FlashAttention (arXiv 2205.14135) blocks it.
    """
    batch = max(x.shape[0] for x in (q, *(part.keys for part in parts), *(part.memory for part in parts)))
    out = q.new_empty(batch, q.shape[1], parts[0].memory.shape[-1])
    for sample in range(batch):
        own = [MemoryPart(_of(part.keys, sample), _of(part.memory, sample), part.age) for part in parts]
        for queries, target in zip(_of(q, sample).split(QUERIES), out[sample].split(QUERIES), strict=True):
            _average_block(queries, own, target)
    return out


def aged_blocks(part: MemoryPart, size: int, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys of a part with their age, about `size` of them at a time, with the memory that they stand for.

    A block with an age is written into the buffer, and the next one over it.

    Shapes: keys (tokens, dim), memory (tokens, memory_dim), buffer (at least size and a row, dim)
    """
    if part.age is None:
        yield from zip(part.keys.split(size), part.memory.split(size), strict=True)
        return
    rows, columns = part.age
    step = max(1, size // len(columns))
    for first in range(0, len(rows), step):
        own_rows = rows[first : first + step]
        tokens = slice(first * len(columns), (first + len(own_rows)) * len(columns))
        block = buffer[: tokens.stop - tokens.start].view(len(own_rows), len(columns), -1)
        torch.add(part.keys[tokens].view_as(block), columns, out=block).add_(own_rows.unsqueeze(1))
        yield block.flatten(0, 1), part.memory[tokens]


def _average_block(q: Tensor, parts: Sequence[MemoryPart], out: Tensor) -> None:
    size = max(1, min(SCORES // len(q), max(len(part.keys) for part in parts)))
    widest = max((len(part.age[1]) for part in parts if part.age is not None), default=0)
    buffer, scores = q.new_empty(size + widest, q.shape[-1]), q.new_empty(len(q) * (size + widest))
    longest = torch.linalg.vector_norm(q, dim=-1).max().item()
    sums, total = q.new_zeros(len(q), 1), torch.zeros_like(out)
    largest: Tensor | None = None  # of each query's scores, once it must be taken off
    for part in parts:
        for keys, memory in aged_blocks(part, size, buffer):
            score = torch.mm(q, keys.T, out=scores[: len(q) * len(keys)].view(len(q), -1))
            harmless = longest * torch.linalg.vector_norm(keys, dim=-1).max().item() <= HARMLESS
            if largest is not None or not harmless:
                before = largest
                if before is None:  # zero was taken off so far
                    before = torch.zeros_like(sums).masked_fill_(sums == 0, float("-inf"))
                largest = torch.maximum(before, score.amax(dim=-1, keepdim=True))
                shrink = (before - largest).exp_()
                sums.mul_(shrink)
                total.mul_(shrink)
                score.sub_(largest)
            weights = score.exp_()
            sums += weights.sum(dim=-1, keepdim=True)
            total.addmm_(weights, memory)
    torch.div(total, sums, out=out)


def _of(x: Tensor, sample: int) -> Tensor:
    return x[sample if len(x) > 1 else 0]
