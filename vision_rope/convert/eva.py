"""timm's Eva family: EVA-02, DINOv3, Perception Encoder, RoPE-ViT, and others; their own RoPE is replaced."""

from __future__ import annotations

from typing import Any

from timm.models.eva import Eva

from vision_rope.convert.conversion import convert_any_size
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_rope import OWN, adopt_frequencies, own_rope, timm_rope
from vision_rope.rope import Rope


class PositionedEva(PositionedModel, Eva):
    """timm's Eva with a position encoding of this package; made by `add_position`."""


def convert(
    model: Any, position: str | Rope, kind: type[PositionedModel] = PositionedEva, **options: Any
) -> PositionedModel:
    """Convert a model of this family in place to one of `kind`, see `vision_rope.add_position`."""
    own = timm_rope(model)
    chosen = own_rope(model) if position == OWN else position
    positioned = convert_any_size(model, kind, chosen, **options)
    model.rope = None
    model.rope_mixed = False
    adopt_frequencies(positioned, own, position, options)
    return positioned
