"""What memory attention looks at: the share of a query's attention that each stored token gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_rope.memory.attention import Grid, MemoryAttention, MemoryEntry
from vision_rope.rotation import rotate


@torch.no_grad()
def read_weights(
    attention: MemoryAttention,
    tokens: Tensor,
    entries: Sequence[MemoryEntry],
    *,
    grid: Grid,
    tokens_pos: Tensor | None = None,
    layer: int = -1,
) -> list[Tensor]:
    """Attention weights of a frame's tokens over the entries of a bank, in one layer.

    They are computed as a whole, rows of queries by all keys, for looking at them: `MemoryAttention.read` never holds
    them.

    Args:
        tokens, entries, grid, tokens_pos: as of `MemoryAttention.read`.

    Shapes: -> of each entry (batch, heads, rows * columns, its tokens); the sum over all entries and tokens is 1
    """
    chosen = attention.layers[layer]
    cross = chosen.cross_attn_image
    queries: list[Tensor] = []
    hook = chosen.norm2.register_forward_hook(lambda module, inputs, output: queries.append(output))
    try:
        attention.read(tokens, entries, grid=grid, tokens_pos=tokens_pos)
    finally:
        hook.remove()

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (cross.num_heads, -1)).transpose(1, 2)

    q = rotate(split(cross.q_proj(queries[0])), attention.rotation(grid, tokens.device))
    scores = []
    for entry in entries:
        rotation = None if entry.grid is None else attention.rotation(entry.grid, tokens.device)
        keys = cross.make_keys(attention.place(entry), rotation)
        scores.append(q @ split(keys).mT * q.shape[-1] ** -0.5)
    lengths = [entry.features.shape[1] for entry in entries]
    return list(torch.cat(scores, dim=-1).softmax(-1).split(lengths, dim=-1))
