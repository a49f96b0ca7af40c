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


def aged_blocks(parts: Sequence[MemoryPart], size: int) -> Iterator[tuple[Tensor, slice]]:
    """Keys of one sample with their ages, about `size` of them at a time, and the places they have among all keys.

    A block with ages or of several parts is written into a buffer, and the next one over it.

    Shapes: keys of a part (tokens, dim) -> keys (about size, dim)
    """
    widest = max((len(part.age[1]) for part in parts if part.age is not None), default=1)
    most = min(size + widest, sum(len(part.keys) for part in parts))
    buffer = parts[0].keys.new_empty(most, parts[0].keys.shape[-1])
    start = filled = 0
    for part in parts:
        width = 1 if part.age is None else len(part.age[1])
        done, tokens = 0, len(part.keys)
        while done < tokens:
            count = min(tokens - done, max(size - filled, width) // width * width)
            if filled and filled + count > size:
                yield buffer[:filled], slice(start, start + filled)
                start, filled = start + filled, 0
                continue
            keys = part.keys[done : done + count]
            if not filled and part.age is None and count == size:
                yield keys, slice(start, start + count)
                start += count
            else:
                _add_age(keys, part.age, done // width, buffer[filled : filled + count])
                filled += count
            done += count
    if filled:
        yield buffer[:filled], slice(start, start + filled)


def _add_age(keys: Tensor, age: tuple[Tensor, Tensor] | None, first_row: int, out: Tensor) -> None:
    """Write keys of whole rows of a grid, from first_row on, with their age."""
    if age is None:
        out.copy_(keys)
        return
    rows, columns = age
    shape = (-1, *columns.shape)
    grid = torch.add(keys.view(shape), columns, out=out.view(shape))
    grid.add_(rows.narrow(0, first_row, len(grid)).unsqueeze(1))


def _average_block(q: Tensor, parts: Sequence[MemoryPart], out: Tensor) -> None:
    memory = parts[0].memory if len(parts) == 1 else torch.cat([part.memory for part in parts])
    scores = q.new_empty(0)
    longest = torch.linalg.vector_norm(q, dim=-1).max().item()
    sums, total = q.new_zeros(len(q), 1), torch.zeros_like(out)
    largest: Tensor | None = None  # of each query's scores, once it must be taken off
    for keys, places in aged_blocks(parts, max(1, SCORES // len(q))):
        if scores.numel() < len(q) * len(keys):
            scores = q.new_empty(len(q) * len(keys))
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
        total.addmm_(weights, memory[places])
    torch.div(total, sums, out=out)


def _of(x: Tensor, sample: int) -> Tensor:
    return x[sample if len(x) > 1 else 0]
