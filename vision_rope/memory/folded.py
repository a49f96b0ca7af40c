"""Softmax attention of one head that reads narrow memory instead of wide keys and values, on a CPU.

Values are a linear function of the memory, v_j = W m_j + b, and the weights of a softmax add up to 1, so that
sum_j a_j v_j = W (sum_j a_j m_j) + b: it is enough to average the memory, which in SAM 2 is a quarter as wide. Keys are
made of it a block at a time and read while they are in the processor's cache, which takes no longer than to fetch them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vision_rope.rotation import Rotation

# One block of queries for a frame of SAM 2, so that keys are made once; its scores are 8 MiB of float32.
QUERIES, SCORES = 4096, 1 << 21
# Sums of exp within these bounds need no maximum taken off: nothing that counts in them has left float32.
SMALLEST_SUM, LARGEST_SUM = 1e-20, 1e30

MakeKeys = Callable[[Tensor, Rotation | None, int, Tensor], Tensor]
KeyBlocks = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MemoryPart:
    """Tokens of a memory: frames of one grid one after another, then tokens whose keys do not turn.

    Attributes:
        memory: what is averaged.
        placed: what keys are made of, the memory with its positions and ages; not read where keys are given.
        rotation: of the keys of each frame, or None.
        turned: how many tokens are of frames.
        keys: all keys, where they are made already.

    Shapes: memory and placed (batch or 1, tokens, memory_dim), keys (batch or 1, tokens, dim)
    """

    memory: Tensor
    placed: Tensor
    rotation: Rotation | None = None
    turned: int = 0
    keys: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All of them but the rotation's."""
        return [self.memory, self.placed if self.keys is None else self.keys]

    def sample(self, index: int) -> MemoryPart:
        """The part of one sample, without a batch axis."""

        def take(x: Tensor) -> Tensor:
            return x[index if len(x) > 1 else 0]

        keys = None if self.keys is None else take(self.keys)
        return replace(self, memory=take(self.memory), placed=take(self.placed), keys=keys)

    def rotation_at(self, start: int, turned: int) -> Rotation | None:
        """The rotation of some of the tokens: whole frames of them, or a piece of one."""
        if self.rotation is None or not turned:
            return None
        frame = self.rotation.cos.shape[-2]
        if turned % frame == 0:
            return self.rotation
        return self.rotation.take(slice(start % frame, start % frame + turned))

    def cuts(self, size: int) -> Iterator[slice]:
        """Blocks of at most `size` tokens: whole frames, or pieces of one frame."""
        start, tokens = 0, self.memory.shape[-2]
        frame = tokens if self.rotation is None else self.rotation.cos.shape[-2]
        while start < tokens:
            stop = min(start + size, tokens)
            if stop < self.turned:
                stop = start + (size // frame * frame or min(size, frame - start % frame))
            yield slice(start, stop)
            start = stop


def average_memory(q: Tensor, parts: Sequence[MemoryPart], make_keys: MakeKeys, scale: float) -> Tensor:
    """Memory averaged with softmax weights of the scores scale * q k^T, a block of queries and keys at a time.

    Args:
        make_keys: makes keys of what is placed, (tokens, memory_dim) -> (tokens, dim), from the rotation of those
            that turn, their number, and the place to write them to.

    Shapes: q (batch or 1, queries, dim) -> (batch, queries, memory_dim)
    Source: blocks as in FlashAttention (arXiv 2205.14135).
    """
    batch = max(len(x) for x in (q, *(x for part in parts for x in part.tensors())))
    out = q.new_empty(batch, q.shape[1], parts[0].memory.shape[-1])
    for sample in range(batch):
        own = [part.sample(sample) for part in parts]
        queries = q[sample if len(q) > 1 else 0].split(QUERIES)
        for block, target in zip(queries, out[sample].split(QUERIES), strict=True):
            size = max(1, SCORES // len(block))
            for average in (_average_plainly, _average_below_largest):
                if average(block, key_blocks(own, make_keys, size, q.shape[-1]), scale, target):
                    break
    return out


def key_blocks(parts: Sequence[MemoryPart], make_keys: MakeKeys, size: int, dim: int) -> KeyBlocks:
    """Keys of one sample and their memory, at most `size` tokens at a time, each block written over the last one.

    Shapes: -> keys (tokens, dim), memory (tokens, memory_dim)
    """
    most = min(size, max(len(part.memory) for part in parts))
    buffer = parts[0].memory.new_empty(most, dim)
    for part in parts:
        for cut in part.cuts(size):
            if part.keys is not None:
                keys = part.keys[cut]
            else:
                count = cut.stop - cut.start
                turned = min(max(part.turned - cut.start, 0), count)
                keys = make_keys(part.placed[cut], part.rotation_at(cut.start, turned), turned, buffer[:count])
            yield keys, part.memory[cut]


def _average_plainly(q: Tensor, blocks: KeyBlocks, scale: float, out: Tensor) -> bool:
    """Write the average to out; False, and nothing of use in it, where scores are too large or small for exp."""
    scores = _Scores(q, scale)
    sums, total = q.new_zeros(len(q), 1), torch.zeros_like(out)
    for keys, memory in blocks:
        weights = scores(keys).exp_()
        sums += weights.sum(dim=-1, keepdim=True)
        if not sums.max().item() <= LARGEST_SUM:
            return False
        total.addmm_(weights, memory)
    torch.div(total, sums, out=out)
    return sums.min().item() >= SMALLEST_SUM


def _average_below_largest(q: Tensor, blocks: KeyBlocks, scale: float, out: Tensor) -> bool:
    """The same with the largest score of each query, as far as it is known, taken off before exp.

    Source: online softmax (arXiv 1805.02867).
    """
    scores = _Scores(q, scale)
    sums, total = q.new_zeros(len(q), 1), torch.zeros_like(out)
    largest = torch.full_like(sums, float("-inf"))
    for keys, memory in blocks:
        score = scores(keys)
        before, largest = largest, torch.maximum(largest, score.amax(dim=-1, keepdim=True))
        shrink = (before - largest).exp_()
        weights = score.sub_(largest).exp_()
        sums.mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
        total.mul_(shrink).addmm_(weights, memory)
    torch.div(total, sums, out=out)
    return True


class _Scores:
    """Scores of a block of queries and of keys, each time in the same memory."""

    def __init__(self, q: Tensor, scale: float) -> None:
        self.q, self.scale, self.memory = q, scale, q.new_empty(0)

    def __call__(self, keys: Tensor) -> Tensor:
        shape = len(self.q), len(keys)
        if self.memory.numel() < shape[0] * shape[1]:
            self.memory = self.q.new_empty(shape[0] * shape[1])
        out = self.memory[: shape[0] * shape[1]].view(shape)
        return out.addmm_(self.q, keys.T, beta=0, alpha=self.scale)
