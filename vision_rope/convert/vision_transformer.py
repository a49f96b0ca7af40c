"""timm's VisionTransformer family: vit, deit, deit3, siglip, clip, dinov2 (registers too), flexivit."""

from __future__ import annotations

from typing import Any

from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vision_rope.convert.conversion import convert_any_size
from vision_rope.convert.model import PositionedModel
from vision_rope.rope import Rope


class PositionedVisionTransformer(PositionedModel, VisionTransformer):
    """timm's VisionTransformer with a position encoding of this package; made by `add_position`."""


class PositionedVisionTransformerDistilled(PositionedModel, VisionTransformerDistilled):
    """timm's VisionTransformerDistilled (deit) with a position encoding of this package; made by `add_position`."""


MODELS: dict[type[nn.Module], type[PositionedModel]] = {
    VisionTransformer: PositionedVisionTransformer,
    VisionTransformerDistilled: PositionedVisionTransformerDistilled,
}


def convert(
    model: Any, position: str | Rope, kind: type[PositionedModel] | None = None, **options: Any
) -> PositionedModel:
    """Convert a model of this family in place to one of `kind`, see `vision_rope.add_position`."""
    return convert_any_size(model, kind or MODELS[type(model)], position, **options)
