"""timm's Eva family: EVA-02, DINOv3, Perception Encoder, RoPE-ViT, and others; their own RoPE is replaced."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import RotaryEmbeddingMixed
from timm.models.eva import Eva

from vision_rope.convert.conversion import convert_any_size
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_rope import OWN, mixed_from_timm, own_rope, timm_rope
from vision_rope.rope import Rope


class PositionedEva(PositionedModel, Eva):
    """timm's Eva with a position encoding of this package; made by `add_position`."""


def convert(model: Any, position: str | Rope, **options: Any) -> PositionedModel:
    """Convert a model of this family in place, see `vision_rope.add_position`."""
    own = timm_rope(model)
    chosen = own_rope(model) if position == OWN else position
    positioned = convert_any_size(model, PositionedEva, chosen, **options)
    model.rope = None
    model.rope_mixed = False
    if isinstance(own, RotaryEmbeddingMixed):
        positioned.timm_axes = own.grid_indexing
        if position == "rope-vit-mixed" and not {"base", "generator"} & options.keys():
            # The weights were trained with these frequencies.
            with torch.no_grad():
                frequencies = mixed_from_timm(own.freqs, own.grid_indexing)
                positioned.position.learned_frequencies.copy_(frequencies)  # type: ignore[union-attr, operator]
    return positioned
