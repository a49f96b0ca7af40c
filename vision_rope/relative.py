"""What relative position encodings are made of: the offsets between tokens, and what attention adds because of them.

An encoding says what an offset means; how attention uses that is written here once. Offsets are few, 2 * length - 1 an
axis, so an encoding has a table with a row an offset, and attention picks the row of each pair of tokens out of
products with the table. Nothing has the shape (tokens, tokens, channels).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(eq=False)
class Offsets:
    """How far each token lies from each other one, an axis at a time: position of the key minus that of the query.

    Attributes:
        values: the offsets an axis can have, -(length - 1) to length - 1 in this order, (2 * length - 1,) each.
        rows: the row of each pair's offset in a table of all axes' offsets, one axis after the other, int64
            (axes, batch or 1, queries, keys). Row 0 belongs to pairs with a prefix token, which have no offset.
    """

    values: tuple[Tensor, ...]
    rows: Tensor


def offsets_between(positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> Offsets:
    """Offsets between the tokens at these positions of a grid, behind prefix tokens.

    Shapes: positions (patches, axes) or (batch, patches, axes), whole numbers from 0 to size - 1; size one length an
        axis -> rows (axes, batch or 1, prefix + patches, prefix + patches).
    Raises: ValueError where positions and size have different numbers of axes.
    """
    check_positions(positions, size)
    whole = positions.round().long()
    if whole.ndim == 2:
        whole = whole[None]
    values, rows, start = [], [], 1
    for axis, length in enumerate(size):
        places = whole[..., axis]
        rows.append(places[:, None, :] - places[:, :, None] + (start + length - 1))
        values.append(torch.arange(2 * length - 1, device=positions.device) - (length - 1))
        start = start + 2 * length - 1
    return Offsets(tuple(values), F.pad(torch.stack(rows), (num_prefix, 0, num_prefix, 0)))


def look_up(table: Tensor, rows: Tensor) -> Tensor:
    """The entries of each pair's offsets, summed over the axes.

    Shapes: table (heads, rows), rows as in `Offsets` -> (batch or 1, heads, queries, keys)
    """
    picked = [table.index_select(1, axis.flatten()).unflatten(1, axis.shape).transpose(0, 1) for axis in rows]
    return torch.stack(picked).sum(0) if len(picked) > 1 else picked[0]


def with_prefix_row(table: Tensor) -> Tensor:
    """A table of offsets with the row of prefix tokens in front: zero, since they have no offset.

    Shapes: (..., offsets, channels) -> (..., 1 + offsets, channels)
    """
    return F.pad(table, (0, 0, 1, 0))


@dataclass(eq=False)
class RelativeTerms:
    """What relative positions add to the attention of one layer; every part is optional.

        score of query i and key j = scale * (q_i k_j + q_i keys[o] + k_j queries[o] + scores[o]) + bias[i, j]
        answer of query i          = sum over j of weight_ij * (v_j + values[o])

    with o the offset between i and j, and a sum over the axes wherever it stands.

    Attributes:
        rows: row of each pair's offset, see `Offsets`; needed for all parts but bias.
        keys, queries, values: tables of offsets, (heads or 1, rows, head_dim).
        scores: a table of offsets, (heads, rows, 1).
        bias: (batch or 1, heads, tokens, tokens).
        attention_scale: factor of the softmax scale.
    """

    rows: Tensor | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    bias: Tensor | None = None
    attention_scale: float = 1.0

    def score_bias(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """What is added to scale * q k before the softmax.

        Shapes: q and k (batch, heads, tokens, head_dim) -> (batch or 1, heads, tokens, tokens)
        """
        parts = [] if self.bias is None else [self.bias]
        if self.keys is not None:
            met = q @ self.keys.transpose(-2, -1)
            if self.scores is not None:
                met = met + self.scores.transpose(-2, -1)
            parts.append(scale * self._pick(met))
        if self.queries is not None:
            met = k @ self.queries.transpose(-2, -1)
            parts.append(scale * self._pick(met, by_key=True))
        return sum(parts[1:], start=parts[0])

    def value_term(self, weights: Tensor) -> Tensor:
        """What is added to the answers of attention with these weights.

        Shapes: weights (batch, heads, tokens, tokens) -> (batch, heads, tokens, head_dim)
        """
        assert self.values is not None
        assert self.rows is not None
        # How much of a query's attention goes to each offset; the table is met once an offset, not once a pair.
        spent = weights.new_zeros(*weights.shape[:3], self.values.shape[-2])
        for axis in self.rows:
            spent = spent.scatter_add(-1, axis[:, None].expand_as(weights), weights)
        return spent @ self.values

    def _pick(self, met: Tensor, by_key: bool = False) -> Tensor:
        """Products of tokens with a table, (batch, heads, tokens, rows) -> of each pair, summed over the axes.

        The tokens are queries, or keys with `by_key`; either way the answer is (batch, heads, queries, keys).
        """
        assert self.rows is not None
        total: Tensor | None = None
        for axis in self.rows:
            index = axis.transpose(-2, -1) if by_key else axis
            picked = met.gather(-1, index[:, None].expand(*met.shape[:3], -1))
            total = picked if total is None else total + picked
        assert total is not None
        return total.transpose(-2, -1) if by_key else total


class RelativeEncoding(nn.Module, ABC):
    """A position encoding that acts in attention, by the offsets between tokens.

    Prefix tokens (class token, registers) have no offset: their pairs get nothing added.

    Attributes:
        depth: number of layers.
    """

    depth: int

    @abstractmethod
    def forward(self, positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> list[RelativeTerms]:
        """The terms of each layer, computed together; once in a forward pass of a model.

        Args:
            positions: of the patches, indices in their grid (`grid_positions`), (patches, axes) or
                (batch, patches, axes).
            size: the grid, one length an axis.
            num_prefix: prefix tokens in front of the patches.
        """

    def reset_parameters(self) -> None:
        """Draw the parameters anew, for instance after a model built on "meta" got its memory."""
        # As timm begins tables of positions: small, so that a trained model first says nearly what it said before.
        for table in self.parameters():
            nn.init.trunc_normal_(table, std=0.02)


def check_positions(positions: Tensor, size: Sequence[int]) -> None:
    """Raise ValueError where positions are not those of a grid with these axes."""
    if positions.ndim not in (2, 3) or positions.shape[-1] != len(size):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)} and the grid {tuple(size)} has {len(size)} axes; give "
            f"(patches, {len(size)}) or (batch, patches, {len(size)}), for instance grid_positions{tuple(size)}"
        )
