"""Fixed sines and cosines of SAM 2: of the place in a frame, and of how old an object pointer is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vision_rope.sinusoidal import axis_angles

BASE = 10000.0


def sine_2d(height: int, width: int, dim: int, *, device: torch.device | str | None = None) -> Tensor:
    """Sine encoding of the cells of a frame, each axis stretched to a whole turn; rows have the first half of channels.

    Shapes: -> (height * width, dim) float32
    Raises: ValueError where dim is not a multiple of 4.
    Source: DETR (arXiv 2005.12872), normalised, as SAM 2 uses it.
    """
    rows, columns = (_axis(size, _pairs(dim), device) for size in (height, width))
    table = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), dim=-1)
    return table.flatten(0, 1)


def sine_1d(values: Tensor, dim: int) -> Tensor:
    """Sine encoding of numbers: sines of all frequencies, then cosines, each frequency twice as in SAM 2.

    Shapes: values (n) -> (n, dim) float32
    Raises: ValueError where dim is not a multiple of 4.
    """
    angles = axis_angles(values, _pairs(dim), BASE).repeat_interleave(2, dim=-1)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


def _axis(size: int, pairs: int, device: torch.device | str | None) -> Tensor:
    """Sine and cosine of a frequency as neighbours, for the cells of one axis."""
    places = torch.arange(1, size + 1, device=device) * (2 * math.pi / (size + 1e-6))
    angles = axis_angles(places, pairs, BASE)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def _pairs(dim: int) -> int:
    if dim < 4 or dim % 4:
        raise ValueError(f"dim is {dim}; a sine encoding of SAM 2 has a multiple of 4 channels")
    return dim // 4
