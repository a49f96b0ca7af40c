"""How fast each pair of channels turns: ladders of frequencies and the matrix (axes, pairs) they are placed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def ladder(pairs: int, base: float) -> Tensor:
    """Geometric ladder of frequencies, `base ** (-i / pairs)` for i = 0..pairs-1, in radians a unit of position.

    Shapes: -> (pairs,) float64.
    Source: RoFormer (arXiv 2104.09864), section 3.2.2: theta_i = 10000 ** (-2i / d) with d = 2 * pairs.
    """
    return Ladder(base=base, pairs=pairs, slots=tuple(range(pairs))).values()


@dataclass(frozen=True)
class Ladder:
    """The frequencies of one axis: which rungs of a ladder it has, and which pairs of the head they turn.

    Attributes:
        base: base of the ladder.
        pairs: number of rungs of the whole ladder; 2 * pairs is the "dimension" in the papers' formulas.
        slots: the pairs of the head that turn with this axis.
        rungs: the rung each slot has; rung r is the frequency scale * base ** (-r / pairs). Default: 0, 1, 2, ...
        scale: factor of all frequencies (2 * pi where a ladder is one of periods).
    """

    base: float
    pairs: int
    slots: tuple[int, ...]
    rungs: tuple[float, ...] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.base > 0 or not math.isfinite(self.base):
            raise ValueError(f"base is {self.base}; the base of a ladder must be a positive number, for instance 10000")
        if self.pairs < 1:
            raise ValueError(f"a ladder of {self.pairs} pairs is empty; an axis needs at least one pair of channels")
        if self.rungs is None:
            object.__setattr__(self, "rungs", tuple(float(rung) for rung in range(len(self.slots))))
        assert self.rungs is not None
        assert len(self.rungs) == len(self.slots)

    def exponents(self) -> Tensor:
        """r / pairs of each slot, float64 on the CPU: the frequency is scale * base ** -exponent."""
        return torch.tensor(self.rungs, dtype=torch.float64, device="cpu") / self.pairs

    def values(self) -> Tensor:
        """Frequencies of the slots, float64 on the CPU."""
        return self.scale * self.base ** -self.exponents()


def frequency_matrix(ladders: Sequence[Ladder], pairs: int) -> Tensor:
    """Frequencies of all axes: entry (axis, pair) says how far one step along the axis turns the pair, in radians.

    Shapes: one ladder an axis -> (axes, pairs) float64 on the CPU; pairs that no ladder names stay at zero (unrotated).
    """
    matrix = torch.zeros(len(ladders), pairs, dtype=torch.float64, device="cpu")
    for axis, rungs in enumerate(ladders):
        matrix[axis, list(rungs.slots)] = rungs.values()
    return matrix


def axial_ladders(
    head_dim: int, base: float, *, columns_first: bool, scale: float = 1.0, rungs: int | None = None
) -> tuple[Ladder, Ladder]:
    """Ladders of (h, w): one axis turns the first half of a head's pairs, the other axis the second half.

    A ladder of an axis has head_dim / 4 rungs, unless told otherwise.

    Raises: ValueError where head_dim is not a multiple of 4.
    """
    check_head_dim(head_dim, axes=2)
    quarter = head_dim // 4
    first, second = tuple(range(quarter)), tuple(range(quarter, 2 * quarter))
    rows, columns = (second, first) if columns_first else (first, second)
    return (
        Ladder(base=base, pairs=rungs or quarter, slots=rows, scale=scale),
        Ladder(base=base, pairs=rungs or quarter, slots=columns, scale=scale),
    )


def ladders_between(
    head_dim: int, min_period: float, max_period: float, *, columns_first: bool
) -> tuple[Ladder, Ladder]:
    """Ladders of (h, w) whose periods run from the shortest to the longest, as DINOv3 can be given them."""
    return axial_ladders(
        head_dim,
        max_period / min_period,
        columns_first=columns_first,
        scale=2 * math.pi / min_period,
        rungs=head_dim // 4 - 1,
    )


def shared_ladder(base: float, axis_of_pair: Sequence[int], axes: int) -> tuple[Ladder, ...]:
    """One ladder over all pairs of a head, pair p on rung p, each pair given to one axis (M-RoPE).

    Shapes: axis_of_pair has one axis a pair -> one ladder an axis.
    """
    owned = [tuple(pair for pair, owner in enumerate(axis_of_pair) if owner == axis) for axis in range(axes)]
    return tuple(
        Ladder(base=base, pairs=len(axis_of_pair), slots=slots, rungs=tuple(float(pair) for pair in slots))
        for slots in owned
    )


def mixed_frequencies(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Initial frequencies of RoPE-Mixed: every pair turns with both axes, in a direction drawn for each layer and head.

    Half of a head's pairs point along the direction and half at right angles to it, with magnitudes of an axial ladder.

    Shapes: -> (depth, num_heads, 2, head_dim / 2) float32; axes are (h, w).
    Raises: ValueError where head_dim is not a multiple of 4.
    Source: Heo et al., Rotary Position Embedding for Vision Transformer (arXiv 2403.13298), section 3.2.
    """
    check_head_dim(head_dim, axes=2)
    # On torch's default device, so that a model built on "meta" stays there until it is materialised.
    direction = 2 * math.pi * torch.rand(depth, num_heads, 1, dtype=torch.float32, generator=generator)
    magnitude = ladder(head_dim // 4, base).to(device=direction.device, dtype=torch.float32)
    directions = (direction, direction + math.pi / 2)
    rows = torch.cat([magnitude * angle.sin() for angle in directions], dim=-1)
    columns = torch.cat([magnitude * angle.cos() for angle in directions], dim=-1)
    return torch.stack((rows, columns), dim=-2)


def split_pairs(pairs: int) -> tuple[int, int, int]:
    """Pairs of (t, h, w), as equal as can be; rows and columns have equally many."""
    third, rest = divmod(pairs, 3)
    return third + (rest == 1), third + (rest == 2), third + (rest == 2)


def mixed_frequencies_3d(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Initial frequencies of RoPE-Mixed with an axis of time: every pair turns with all three axes.

    A third of a head's pairs points in each of three directions at right angles, drawn for each layer and head, with
    magnitudes of an axial ladder.

    Shapes: -> (depth, num_heads, 3, head_dim / 2) float32; axes are (t, h, w).
    Source: `mixed_frequencies`, whose two directions are three here.
    """
    drawn = torch.randn(depth, num_heads, 2, 3, dtype=torch.float32, generator=generator)
    first = F.normalize(drawn[..., 0, :], dim=-1)
    second = F.normalize(drawn[..., 1, :] - (drawn[..., 1, :] * first).sum(-1, keepdim=True) * first, dim=-1)
    directions = (first, second, torch.linalg.cross(first, second))
    parts = [
        direction[..., None] * ladder(pairs, base).to(device=drawn.device, dtype=torch.float32)
        for direction, pairs in zip(directions, split_pairs(head_dim // 2), strict=True)
    ]
    return torch.cat(parts, dim=-1)


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """The one formula: angle[..., token, pair] = sum over axes of position[token, axis] * frequency[axis, pair].

    Computed in the dtype of the frequencies (float64 for fixed ones, float32 for learned ones).

    Shapes: positions (..., tokens, axes), frequencies (..., axes, pairs) -> (..., tokens, pairs), in radians.
    Raises: ValueError where positions and frequencies disagree in their number of axes.
    """
    axes = frequencies.shape[-2]
    if positions.shape[-1] != axes:
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} have {positions.shape[-1]} axes and the rotary embedding has "
            f"{axes}; give positions of shape (tokens, {axes}), for instance rope.positions(...)"
        )
    positions = positions.to(frequencies.dtype)
    # Products and sums an axis at a time, not a matrix product: autocast and TF32 would round that one.
    total = positions[..., 0, None] * frequencies[..., 0, None, :]
    for axis in range(1, axes):
        total = total + positions[..., axis, None] * frequencies[..., axis, None, :]
    return total


def check_head_dim(head_dim: int, axes: int) -> None:
    """Raise ValueError unless a head can be divided into pairs of channels, the same number for each axis."""
    unit = 2 * axes
    if head_dim < unit or head_dim % unit:
        nearest = max(unit, round(head_dim / unit) * unit)
        raise ValueError(
            f"head_dim is {head_dim}; it must be a multiple of {unit} (two channels a pair, {axes} "
            f"{'axis' if axes == 1 else 'axes'}), for instance {nearest}: change embed_dim or num_heads"
        )
