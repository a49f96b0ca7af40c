"""Attention with a rotation of queries and keys, to tokens of one's own or to parts of a memory.

Names of parameters are those of SAM 2 and SAM 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_rope.attention import attend
from vision_rope.memory.folded import MemoryPart, average_memory
from vision_rope.rotation import Rotation, rotate
from vision_rope.turning import is_eager, is_unobserved


class RopeAttention(nn.Module):
    """Attention with a rotation of queries and keys, between tokens of dim and of kv_dim channels.

    Args:
        internal_dim: channels of queries and keys of all heads together; dim when not given.
        dropout: of attention weights, in training.
    Source: SAM 2 (arXiv 2408.00714), appendix D.1.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        kv_dim: int | None = None,
        internal_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        internal_dim = internal_dim or dim
        if num_heads < 1 or internal_dim % num_heads:
            raise ValueError(f"num_heads is {num_heads} and must divide the {internal_dim} channels of the attention")
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(dim, internal_dim)
        self.k_proj = nn.Linear(kv_dim or dim, internal_dim)
        self.v_proj = nn.Linear(kv_dim or dim, internal_dim)
        self.out_proj = nn.Linear(internal_dim, dim)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Self-attention of the tokens of one grid.

        Shapes: x (batch, tokens, dim) -> the same.
        """
        return self.read(x, rotation, [MemoryPart(x, x, rotation, x.shape[1])])

    def make_keys(
        self, x: Tensor, rotation: Rotation | None, turned: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Keys of tokens, turned where a rotation is given.

        Args:
            turned: how many tokens turn, frames of the rotation's tokens one after another; all when not given.
            out: where to write them, if that is faster.

        Shapes: x (..., tokens, kv_dim) -> (..., tokens, internal_dim)
        """
        own = is_unobserved(self.k_proj)
        if out is not None and own and self.k_proj.bias is not None:
            keys = torch.addmm(self.k_proj.bias, x, self.k_proj.weight.T, out=out)
        else:
            keys = self.k_proj(x)
        if rotation is None:
            return keys
        turned = keys.shape[-2] if turned is None else turned
        frames = keys.narrow(-2, 0, turned).unflatten(-2, (-1, rotation.cos.shape[-2]))  # all of them turn alike
        if self.num_heads == 1:
            rotated = rotate(frames, rotation, overwrite=own)
            if rotated is frames:  # in the place of the keys
                return keys
        else:
            heads = frames.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
            rotated = rotate(heads, rotation, overwrite=own).transpose(-3, -2).flatten(-2)
        rotated = rotated.flatten(-3, -2)
        return (
            rotated
            if turned == keys.shape[-2]
            else torch.cat((rotated, keys.narrow(-2, turned, keys.shape[-2] - turned)), -2)
        )

    def make_age(self, age: Tensor, rotation: Rotation, num_columns: int) -> Tensor:
        """What an age adds to the keys of a frame.

        Projections and rotations are linear: an age t adds R(y, x) w with w = W t to the key at row y, column x. Each
        pair turns with one axis, so that R(y, x) w = (R(y, 0) w - w) + R(0, x) w.

        Shapes: age (kv_dim) -> (rows * columns, internal_dim)
        """
        if type(self.k_proj) is nn.Linear:
            term = self.k_proj.weight @ age
        else:  # an adapter may stand in the projection's place
            term = self.k_proj(age) - self.k_proj(torch.zeros_like(age))
        term = term.view(self.num_heads, 1, -1)

        def turn(tokens: slice) -> Tensor:
            part = rotation.take(tokens)
            return rotate(term.repeat(1, part.cos.shape[-2], 1), part, overwrite=True)

        by_row, by_column = turn(slice(0, None, num_columns)) - term, turn(slice(0, num_columns))
        return (by_row.unsqueeze(2) + by_column.unsqueeze(1)).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)

    def read(self, x: Tensor, rotation: Rotation, parts: Sequence[MemoryPart]) -> Tensor:
        """Attend to parts of a memory.

        Shapes: x (batch or 1, tokens, dim) -> (batch, tokens, dim)
        """
        q = rotate(self._split_heads(self.q_proj(x)), rotation, overwrite=is_unobserved(self.q_proj))
        if self._can_fold(q, parts):
            scale = q.shape[-1] ** -0.5
            return self.out_proj(self.v_proj(average_memory(q.squeeze(1), parts, self.make_keys, scale)))
        batch = max(len(x) for x in (q, *(x for part in parts for x in part.tensors())))
        keys = (
            self.make_keys(part.placed, part.rotation, part.turned) if part.keys is None else part.keys
            for part in parts
        )
        k = join([x.expand(batch, -1, -1) for x in keys])
        v = self.v_proj(join([part.memory.expand(batch, -1, -1) for part in parts]))
        dropout = self.dropout if self.training else 0.0
        q = q.expand(batch, -1, -1, -1)
        out = attend(q, self._split_heads(k), self._split_heads(v), dropout=dropout)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _can_fold(self, q: Tensor, parts: Sequence[MemoryPart]) -> bool:
        """Whether averaging the memory instead of values is both right and faster."""
        narrow = type(self.v_proj) is nn.Linear and self.v_proj.in_features < self.v_proj.out_features
        if not narrow or self.num_heads > 1:
            return False
        tensors = [q, *(x for part in parts for x in part.tensors())]
        weights = (*self.k_proj.parameters(), *self.v_proj.parameters())
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *weights)):
            return False
        wide = q.dtype in (torch.float32, torch.float64) and all(x.dtype == q.dtype for x in tensors)
        return q.device.type == "cpu" and wide and is_eager(q) and not (self.training and self.dropout > 0)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Tokens one after another, each (batch or 1, tokens, channels)."""
    if len(parts) == 1:
        return parts[0]
    batch = max(len(part) for part in parts)
    return torch.cat([part.expand(batch, -1, -1) for part in parts], dim=1)
