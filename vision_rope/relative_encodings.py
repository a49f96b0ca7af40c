"""Relative position encodings that RoPE is compared with: Shaw, Transformer-XL, T5, DeBERTa, ALiBi.

All were made for text, with one axis. With more, an offset has a part an axis, and what the parts mean is summed; ALiBi
alone measures a distance. Each is defined for grids of any size, by clipping, buckets, sinusoids or distances.

Limits that are not given (clip, max_distance) are those of the grid a model is built for. One that is built for another
grid and gets trained weights must be given the limit they were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_rope.relative import (
    RelativeEncoding,
    RelativeTerms,
    check_positions,
    look_up,
    offsets_between,
    with_prefix_row,
)
from vision_rope.sinusoidal import axis_angles, check_sinusoids

Distance = Literal["euclidean", "manhattan"]
DISTANCES = ("euclidean", "manhattan")


class Shaw(RelativeEncoding):
    """A learned vector an offset, added to keys and to values; shared by the heads, with tables of its own a layer.

    Args:
        size: grid the model is trained on.
        head_dim, depth: of the model.
        clip: longest offset with a vector of its own, longer ones share it; None takes the longest of the training
            grid, an axis at a time, so that every vector is trained.
        value_term: add vectors to values too, which needs explicit attention weights (no fused kernel).

    Source: Shaw et al. (arXiv 1803.02155), equations 3 and 4.
    """

    def __init__(
        self, size: Sequence[int], head_dim: int, depth: int, *, clip: int | None = None, value_term: bool = True
    ) -> None:
        super().__init__()
        self.depth = depth
        self.clips = _clips(size, clip)
        num_rows = sum(2 * longest + 1 for longest in self.clips)
        self.keys = nn.Parameter(torch.empty(depth, num_rows, head_dim))
        self.values = nn.Parameter(torch.empty(depth, num_rows, head_dim)) if value_term else None
        self.reset_parameters()

    def forward(self, positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> list[RelativeTerms]:
        """See `RelativeEncoding`."""
        offsets = offsets_between(positions, size, num_prefix)
        rows = [at.clamp(-k, k) + k for at, k in zip(offsets.values, self.clips, strict=True)]
        chosen = _join(rows, [2 * k + 1 for k in self.clips])
        keys = with_prefix_row(self.keys.index_select(1, chosen))[:, None]
        values = None if self.values is None else with_prefix_row(self.values.index_select(1, chosen))[:, None]
        return [
            RelativeTerms(offsets.rows, keys=keys[layer], values=None if values is None else values[layer])
            for layer in range(self.depth)
        ]

    def extra_repr(self) -> str:
        return f"clips={self.clips}, value_term={self.values is not None}"


class TransformerXL(RelativeEncoding):
    """Projected sinusoids of the offset as further keys, and two learned queries for content and for position.

    Each axis has its own part of the sinusoids' channels. Projections and both queries (the paper's u and v) belong to
    a layer; the paper's code shares u and v between layers unless told otherwise.

    Args:
        axes: number of axes of a position.
        embed_dim, num_heads, head_dim, depth: of the model.
        base: of the sinusoids' ladder.

    Source: Dai et al., Transformer-XL (arXiv 1901.02860), section 3.3: the terms (b), (c) and (d).
    """

    def __init__(
        self, axes: int, embed_dim: int, num_heads: int, head_dim: int, depth: int, *, base: float = 10000.0
    ) -> None:
        super().__init__()
        check_sinusoids(embed_dim, base, axes)
        self.depth = depth
        self.base = base
        self.projection = nn.Parameter(torch.empty(depth, axes, embed_dim // axes, num_heads * head_dim))
        self.content_query = nn.Parameter(torch.empty(depth, num_heads, head_dim))
        self.position_query = nn.Parameter(torch.empty(depth, num_heads, head_dim))
        self.reset_parameters()

    def forward(self, positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> list[RelativeTerms]:
        """See `RelativeEncoding`."""
        offsets = offsets_between(positions, size, num_prefix)
        pairs = self.projection.shape[2] // 2
        by_axis = []
        for axis, at in enumerate(offsets.values):
            # The paper's offset is that of the query from the key.
            angle = axis_angles(-at, pairs, self.base)
            sinusoids = torch.cat((angle.sin(), angle.cos()), dim=-1).to(self.projection.dtype)
            by_axis.append(sinusoids @ self.projection[:, axis])
        heads = self.content_query.shape[1:]
        keys = with_prefix_row(torch.cat(by_axis, dim=1).unflatten(-1, heads).transpose(1, 2))
        scores = (keys * self.position_query[:, :, None].to(keys.dtype)).sum(-1, keepdim=True)
        # The content query meets every key once, whatever the offset: it stands in the rows of the first axis alone.
        first, *others = offsets.values
        once = torch.cat([torch.ones_like(first), *map(torch.zeros_like, others)])
        queries = with_prefix_row(self.content_query[:, :, None] * once[:, None])
        return [
            RelativeTerms(offsets.rows, keys=keys[layer], queries=queries[layer], scores=scores[layer])
            for layer in range(self.depth)
        ]

    def extra_repr(self) -> str:
        return f"axes={self.projection.shape[1]}, base={self.base:g}"


class T5(RelativeEncoding):
    """A learned bias a head for each bucket of offsets, the same in all layers; buckets widen with distance.

    Scores keep the model's scale, which T5 itself leaves out.

    Args:
        size: grid the model is trained on.
        num_heads, depth: of the model.
        num_buckets: of an axis, half of them for each direction; T5 has 32.
        max_distance: offsets from here on share the last bucket; T5 has 128. None takes the longest of the training
            grid, an axis at a time, so that no larger grid meets a bucket that was never trained.

    Source: Raffel et al., T5 (arXiv 1910.10683), section 2.1.
    """

    def __init__(
        self,
        size: Sequence[int],
        num_heads: int,
        depth: int,
        *,
        num_buckets: int = 32,
        max_distance: int | None = None,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.num_buckets = num_buckets
        self.max_distances = _longest(size) if max_distance is None else (max_distance,) * len(size)
        _check_buckets(num_buckets, min(self.max_distances), bidirectional=True)
        self.biases = nn.Parameter(torch.empty(num_heads, len(size) * num_buckets))
        self.reset_parameters()

    def forward(self, positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> list[RelativeTerms]:
        """See `RelativeEncoding`."""
        offsets = offsets_between(positions, size, num_prefix)
        buckets = [
            t5_bucket(at, self.num_buckets, furthest)
            for at, furthest in zip(offsets.values, self.max_distances, strict=True)
        ]
        rows = _join(buckets, [self.num_buckets] * len(buckets))
        table = F.pad(self.biases.index_select(1, rows), (1, 0))
        return [RelativeTerms(bias=look_up(table, offsets.rows))] * self.depth

    def extra_repr(self) -> str:
        return f"num_buckets={self.num_buckets}, max_distances={self.max_distances}"


class DeBERTa(RelativeEncoding):
    """Disentangled attention: queries meet projected embeddings of the offset, and so do keys.

    The embeddings are shared by the layers, the two projections belong to a layer. All scores are divided by
    sqrt(3 * head_dim), since three terms are summed.

    The second term reads the embedding that the paper names, of the key as seen from the query; the released code reads
    that of the opposite offset, so that its weights give other scores here.

    Args:
        size: grid the model is trained on.
        embed_dim, num_heads, head_dim, depth: of the model.
        clip: offsets from -clip to clip - 1 have an embedding of their own (the paper's k), longer ones share the
            last; None takes the longest of the training grid, an axis at a time, so that every one is trained.

    Source: He et al., DeBERTa (arXiv 2006.03654), equations 3 and 4.
    """

    def __init__(
        self,
        size: Sequence[int],
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        depth: int,
        *,
        clip: int | None = None,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.num_heads = num_heads
        self.clips = _clips(size, clip)
        self.embeddings = nn.Parameter(torch.empty(sum(2 * k for k in self.clips), embed_dim))
        self.key_projection = nn.Parameter(torch.empty(depth, embed_dim, num_heads * head_dim))
        self.query_projection = nn.Parameter(torch.empty(depth, embed_dim, num_heads * head_dim))
        self.reset_parameters()

    def forward(self, positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> list[RelativeTerms]:
        """See `RelativeEncoding`."""
        offsets = offsets_between(positions, size, num_prefix)
        # The paper's delta(i, j) is the offset of query i from key j; keys are met by the opposite one.
        keys = self._table(self.key_projection, [-at for at in offsets.values])
        queries = self._table(self.query_projection, list(offsets.values))
        return [
            RelativeTerms(offsets.rows, keys=keys[layer], queries=queries[layer], attention_scale=3**-0.5)
            for layer in range(self.depth)
        ]

    def reset_parameters(self) -> None:
        """See `RelativeEncoding`; projections keep the size of the embeddings, which would else all but vanish."""
        super().reset_parameters()
        for projection in (self.key_projection, self.query_projection):
            nn.init.trunc_normal_(projection, std=self.embeddings.shape[1] ** -0.5)

    def _table(self, projection: Tensor, deltas: list[Tensor]) -> Tensor:
        """Shapes: one (offsets,) an axis -> (depth, heads, 1 + all offsets, head_dim)"""
        rows = [(at + k).clamp(0, 2 * k - 1) for at, k in zip(deltas, self.clips, strict=True)]
        projected = self.embeddings @ projection
        picked = projected.index_select(1, _join(rows, [2 * k for k in self.clips]))
        return with_prefix_row(picked.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))

    def extra_repr(self) -> str:
        return f"clips={self.clips}"


class ALiBi(RelativeEncoding):
    """Scores fall with distance, at a fixed slope a head; nothing is learned.

    Text looks back only; between patches distance counts in all directions alike.

    Args:
        num_heads, depth: of the model.
        distance: "euclidean", or "manhattan", the sum of the axes' distances.

    Source: Press et al., ALiBi (arXiv 2108.12409), section 3; Euclidean distance between patches as in CROMA
        (arXiv 2311.00566).
    """

    def __init__(self, num_heads: int, depth: int, *, distance: Distance = "euclidean") -> None:
        super().__init__()
        if distance not in DISTANCES:
            raise ValueError(f"distance is {distance!r}; choose one of {', '.join(DISTANCES)}")
        self.num_heads = num_heads
        self.depth = depth
        self.distance = distance

    def forward(self, positions: Tensor, size: Sequence[int], num_prefix: int = 0) -> list[RelativeTerms]:
        """See `RelativeEncoding`."""
        check_positions(positions, size)
        places = positions.float() if positions.ndim == 3 else positions.float()[None]
        between = places[:, :, None] - places[:, None]
        distance = (between * between).sum(-1).sqrt() if self.distance == "euclidean" else between.abs().sum(-1)
        distance = F.pad(distance, (num_prefix, 0, num_prefix, 0))
        slopes = alibi_slopes(self.num_heads, device=positions.device)
        return [RelativeTerms(bias=-slopes[:, None, None] * distance[:, None])] * self.depth

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, distance={self.distance!r}"


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head: a geometric sequence that begins at its own ratio and ends at 2 ** -8.

    For a number of heads n that is no power of 2, the slopes of the power below n, and then every second one of those
    of the power above.

    Shapes: -> (num_heads,) float32
    Source: Press et al., ALiBi (arXiv 2108.12409), section 3, and the authors' code.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    index = torch.arange(num_heads, dtype=torch.float32, device=device)
    exponents = torch.where(index < power, (index + 1) * (8 / power), (2 * (index - power) + 1) * (4 / power))
    return torch.exp2(-exponents)


def t5_bucket(offsets: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """The bucket of an offset, of the key as seen from the query.

    Half of the buckets hold one distance each, the others ever more, up to max_distance. Both directions have their
    own half of all buckets; with bidirectional=False (causal) keys behind the query share bucket 0.

    Shapes: integers of any shape -> the same, int64 from 0 to num_buckets - 1
    Raises: ValueError for numbers of buckets or a distance that make no sense.
    Source: Raffel et al., T5 (arXiv 1910.10683), section 2.1, and the authors' code.
    """
    _check_buckets(num_buckets, max_distance, bidirectional)
    if bidirectional:
        num_buckets //= 2
        first = (offsets > 0).long() * num_buckets
        distance = offsets.abs()
    else:
        first = torch.zeros_like(offsets, dtype=torch.int64)
        distance = (-offsets).clamp(min=0)
    distance = distance.clamp(max=max_distance).long()
    exact = num_buckets // 2
    if max_distance <= exact:
        return first + distance
    widening = (distance.clamp(min=exact) / exact).log() / math.log(max_distance / exact) * (num_buckets - exact)
    # Nudged, since what should be a whole number is a hair below it on some devices, which would be another bucket.
    bucket = exact + (widening + 1e-5).long()
    return first + torch.where(distance < exact, distance, bucket.clamp(max=num_buckets - 1))


def _join(rows: list[Tensor], widths: list[int]) -> Tensor:
    """Rows within each axis's table -> rows within the tables of all axes, one after the other."""
    return torch.cat([row + sum(widths[:axis]) for axis, row in enumerate(rows)])


def _clips(size: Sequence[int], clip: int | None) -> tuple[int, ...]:
    """The longest offset of each axis that is told from longer ones."""
    if clip is None:
        return _longest(size)
    if isinstance(clip, bool) or not isinstance(clip, int) or clip < 1:
        raise ValueError(f"clip is {clip!r}; the longest offset with a vector of its own must be a positive integer")
    return (clip,) * len(size)


def _longest(size: Sequence[int]) -> tuple[int, ...]:
    """The longest offset on each axis of a grid, at least 1."""
    return tuple(max(length - 1, 1) for length in size)


def _check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    least = 4 if bidirectional else 2
    if num_buckets < least or num_buckets % least:
        raise ValueError(
            f"num_buckets is {num_buckets}; it must be a multiple of {least}: a half of exact distances and a half of "
            f"widening ones{' for each direction' if bidirectional else ''}"
        )
    if max_distance < 1:
        raise ValueError(f"max_distance is {max_distance}; it must be at least 1")
