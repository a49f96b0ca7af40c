"""How a rotary embedding lays its positions on a grid: indices, stretched or centred ones, the diagonal of a video."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vision_rope.positions import (
    NORMALIZE,
    Normalize,
    augment_axes,
    augment_positions,
    centred_axes,
    check_augmentation,
    index_axes,
    mesh,
    rescaled_axes,
)


@dataclass(frozen=True)
class Coordinates:
    """How a rotary embedding lays its positions on a grid, and how it moves them in training.

    Attributes:
        reference: stretch indices to this grid (EVA-02); None leaves them.
        normalize: cell centres in [-1, 1] instead of indices (DINOv3); None leaves indices.
        offset: added to every index, before it is stretched (Perception Encoder begins at 1: its class token has 0).
        diagonal: positions a step of time, of a video whose frames are centred on the diagonal of time (VideoRoPE):
            with time t, t + row - (rows - 1) // 2 and t + column - (columns - 1) // 2; None leaves indices.
        shift, jitter, rescale: augmentation in training, see `augment_positions`.
    """

    reference: tuple[int, ...] | None = None
    normalize: Normalize | None = None
    offset: float = 0.0
    diagonal: float | None = None
    shift: float | None = None
    jitter: float | None = None
    rescale: float | None = None

    def __post_init__(self) -> None:
        if self.normalize is not None and self.normalize not in NORMALIZE:
            raise ValueError(f"normalize is {self.normalize!r}; choose one of {', '.join(NORMALIZE)}")
        if self.reference is not None and any(length < 1 for length in self.reference):
            raise ValueError(f"reference is {self.reference}; lengths of a reference grid must be positive")
        if self.diagonal is not None and not (math.isfinite(self.diagonal) and self.diagonal > 0):
            raise ValueError(f"diagonal is {self.diagonal}; it must be a positive number of positions a step of time")
        if self.diagonal is not None and (self.bounded or self.augmented or self.offset):
            raise ValueError("diagonal lays out indices as they are; leave the other options of coordinates out")
        check_augmentation(self.shift, self.jitter, self.rescale)

    @property
    def bounded(self) -> bool:
        """Whether a larger grid stays within the range of positions seen in training."""
        return self.reference is not None or self.normalize is not None

    @property
    def augmented(self) -> bool:
        """Whether training moves these coordinates at random."""
        return any(amount is not None for amount in (self.shift, self.jitter, self.rescale))

    def axes(self, *size: int, times: Tensor | None = None, device: torch.device | str | None = None) -> list[Tensor]:
        """Coordinates of a grid an axis at a time: one tensor of each length of size, to be joined by `join`.

        Args:
            times: where the steps of the first axis sit instead of at 0, 1, 2, ...: (steps), or (batch, steps) where
                samples differ.
        """
        if self.normalize is not None or self.reference is not None:
            if times is not None:
                raise ValueError(
                    "times are given and the coordinates are normalised to the grid, whatever they are; leave them out"
                )
            if self.normalize is not None:
                return centred_axes(size, self.normalize, device)
            assert self.reference is not None
            return rescaled_axes(size, self.reference, self.offset, device)
        axes = index_axes(size, device)
        if times is not None:
            axes[0] = times.to(device=axes[0].device, dtype=torch.float32)
        if self.diagonal is not None:
            return [axes[0] * self.diagonal, *(axis - (len(axis) - 1) // 2 for axis in axes[1:])]
        return [axis + self.offset for axis in axes] if self.offset else axes

    def join(self, axes: Sequence[Tensor]) -> Tensor:
        """Positions (tokens, axes) of a grid from the coordinates of each axis, with the batch that times have."""
        if axes[0].ndim == 1:
            positions = mesh(axes)
        else:
            places = mesh(axes[1:])
            times = axes[0][..., None, None].expand(*axes[0].shape, len(places), 1)
            positions = torch.cat((times, places.expand(*axes[0].shape, -1, -1)), dim=-1).flatten(-3, -2)
        if self.diagonal is not None:
            positions[..., 1:] += positions[..., :1]
        return positions

    def along_axes(self, frequencies: Tensor) -> Tensor:
        """How far the coordinates of each axis turn: time takes rows and columns along where they lie on its diagonal.

        Shapes: (..., axes, pairs) -> the same.
        """
        if self.diagonal is None:
            return frequencies
        return torch.cat((frequencies.sum(-2, keepdim=True), frequencies[..., 1:, :]), dim=-2)

    def positions(self, *size: int, times: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Positions (tokens, axes) of a grid in these coordinates; `times` as of `axes`."""
        return self.join(self.axes(*size, times=times, device=device))

    def augment_axes(self, axes: Sequence[Tensor], generator: torch.Generator | None = None) -> list[Tensor]:
        """Coordinates of each axis as training sees them; the same numbers as `augment` on positions."""
        return augment_axes(axes, shift=self.shift, jitter=self.jitter, rescale=self.rescale, generator=generator)

    def augment(self, positions: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Positions as training sees them: moved and stretched where the coordinates say so."""
        return augment_positions(
            positions, shift=self.shift, jitter=self.jitter, rescale=self.rescale, generator=generator
        )
