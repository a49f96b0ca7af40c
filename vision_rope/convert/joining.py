"""Rotations of parts of a batch that were made apart, as those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision_rope.rotation import Rotation


def join_rotations(parts: Sequence[list[Rotation]], members: Sequence[list[int]]) -> list[Rotation]:
    """Rotations of parts of a batch, one a layer, as those of the whole batch, of which `members` are the places."""
    order = torch.tensor([index for part in members for index in part]).argsort().to(parts[0][0].cos.device)
    shared = all(part[0] is part[-1] for part in parts)
    joined = [
        _join_layer(layer, members, order) for layer in zip(*(p[:1] if shared else p for p in parts), strict=True)
    ]
    return joined * len(parts[0]) if shared else joined


def _join_layer(layer: Sequence[Rotation], members: Sequence[list[int]], order: Tensor) -> Rotation:
    cos, sin = (torch.cat([getattr(part, name) for part in layer])[order] for name in ("cos", "sin"))
    scale: Any = layer[0].attention_scale
    if any(part.attention_scale != scale for part in layer):
        counts = torch.tensor([len(part) for part in members], device=cos.device)
        scales = cos.new_tensor([part.attention_scale for part in layer])
        scale = scales.repeat_interleave(counts)[order].view(-1, 1, 1, 1)
    return Rotation(cos, sin, layer[0].pairing, scale)
