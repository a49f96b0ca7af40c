"""timm's Beit and VisionTransformerRelPos: ViTs whose scores have a learned bias for each offset between patches.

Biases stay, with their keys, and go on working beside the new encoding; they go with position="none", which leaves no
position at all, unless keep_absolute=True keeps all of the model's own. Their tables belong to one grid: a model takes
images of the size it has, and timm's `set_input_size` gives it another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from timm.models import beit
from timm.models import vision_transformer_relpos as relpos
from torch import Tensor, nn

from vision_rope.convert.attention import Arrangement, Position, PositionedAttention, packed_with_biases
from vision_rope.convert.blocks import PositionedBlock, PositionedResPostBlock
from vision_rope.convert.conversion import Layers, convert_model, use_grids
from vision_rope.convert.input_size import check_input_size
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_bias import add_bias, drop_biases, has_biases, refuse_left_out, refuse_linear
from vision_rope.rope import Rope
from vision_rope.sinusoidal import Sinusoidal


class BiasedAttention(PositionedAttention):
    """An attention layer that may have a bias of its own, which stays beside positions."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        assert not isinstance(rope, Arrangement), "forward_packed refuses models with biases"
        q, k, v = self._split(x, rope)
        mask, is_causal = add_bias(self._own_bias(), attn_mask, is_causal)
        return self._project(self._attend(q, k, v, position=rope, mask=mask, is_causal=is_causal), x)

    def _own_bias(self) -> Tensor | None:
        """Shapes: -> (1, heads, tokens, tokens)"""
        raise NotImplementedError


class PositionedBeitAttention(BiasedAttention, beit.Attention):
    """timm's Attention of Beit with positions."""

    _get_rel_pos_bias: Callable[[], Tensor]

    def _own_bias(self) -> Tensor | None:
        return None if self.relative_position_bias_table is None else self._get_rel_pos_bias()

    def _packed(self, x: Tensor) -> tuple[Tensor, bool]:
        return packed_with_biases(self, x)


class PositionedRelPosAttention(BiasedAttention, relpos.RelPosAttention):
    """timm's RelPosAttention with positions."""

    rel_pos: Any

    def _own_bias(self) -> Tensor | None:
        return None if self.rel_pos is None else self.rel_pos.get_bias()


class PositionedBeitBlock(beit.Block):
    """timm's Block of Beit that hands positions to its attention."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, rope=rope)
        x = x + self.drop_path1(attended if self.gamma_1 is None else self.gamma_1 * attended)
        out = self.mlp(self.norm2(x))
        return x + self.drop_path2(out if self.gamma_2 is None else self.gamma_2 * out)


class PositionedRelPosBlock(relpos.RelPosBlock):
    """timm's RelPosBlock that hands positions to its attention; it has the layers of a Block."""

    forward = PositionedBlock.forward


class PositionedResPostRelPosBlock(relpos.ResPostRelPosBlock):
    """timm's ResPostRelPosBlock that hands positions to its attention; it has the layers of a ResPostBlock."""

    forward = PositionedResPostBlock.forward


class BiasedModel(PositionedModel):
    """What conversion adds to the models of this file: their own biases beside the encoding, and checks of sizes."""

    reg_token = None
    no_embed_class = False

    def forward_patches(
        self,
        patches: Tensor,
        *,
        kept: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """See `PositionedModel.forward_patches`.

        Raises: ValueError where patches are left out of a model with biases.
        """
        if kept is not None:
            refuse_left_out(self)
        attn_mask, is_causal = add_bias(self._shared_bias(), attn_mask, is_causal)
        return super().forward_patches(patches, kept=kept, attn_mask=attn_mask, is_causal=is_causal)

    def forward_intermediates(
        self, x: Tensor, *args: Any, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any
    ) -> Any:
        """See `PositionedModel.forward_intermediates`."""
        options["attn_mask"], options["is_causal"] = add_bias(self._shared_bias(), attn_mask, is_causal)
        return super().forward_intermediates(x, *args, **options)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """timm's method: take images of another size, for which absolute embedding and biases are resampled.

        They become new Parameters: call it before an optimizer is made.

        Units: pixels, one number or (height, width).
        Raises: ValueError where the patch size does not divide the image.
        """
        check_input_size(self.patch_embed, img_size, patch_size)
        with warnings.catch_warnings():
            # torch's advice to timm, which resamples its tables with what torch will take back.
            warnings.filterwarnings("ignore", "Using a non-tuple sequence|torch.searchsorted")
            super().set_input_size(img_size=img_size, patch_size=patch_size)  # type: ignore[misc]

    def _shared_bias(self) -> Tensor | None:
        """The bias that all blocks share: (heads, tokens, tokens), or with an axis of 1 in front."""
        raise NotImplementedError

    def _check_image_size(self, images: Tensor) -> None:
        height, width = images.shape[-2:]
        own = self.patch_embed.img_size
        if (height, width) != tuple(own):
            raise ValueError(
                f"images have {height} x {width} pixels and the model takes {own[0]} x {own[1]}, which its relative "
                f"biases belong to; resize them, or call model.set_input_size(img_size=({height}, {width})) first"
            )


class PositionedBeit(BiasedModel, beit.Beit):
    """timm's Beit with a position encoding of this package; made by `add_position`."""

    rel_pos_bias: Any

    def _shared_bias(self) -> Tensor | None:
        return None if self.rel_pos_bias is None else self.rel_pos_bias()


class PositionedVisionTransformerRelPos(BiasedModel, relpos.VisionTransformerRelPos):
    """timm's VisionTransformerRelPos with a position encoding of this package; made by `add_position`."""

    pos_embed = None
    shared_rel_pos: Any

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.cls_token is None and not isinstance(self.position, Sinusoidal):
            # A copy in another layout would change the last bits of what follows.
            return x.flatten(1, 2)
        return super()._pos_embed(x)

    def _shared_bias(self) -> Tensor | None:
        return None if self.shared_rel_pos is None else self.shared_rel_pos.get_bias()


MODELS: dict[type[nn.Module], type[BiasedModel]] = {
    beit.Beit: PositionedBeit,
    relpos.VisionTransformerRelPos: PositionedVisionTransformerRelPos,
}
LAYERS = Layers(
    {
        beit.Block: PositionedBeitBlock,
        relpos.RelPosBlock: PositionedRelPosBlock,
        relpos.ResPostRelPosBlock: PositionedResPostRelPosBlock,
    },
    {beit.Attention: PositionedBeitAttention, relpos.RelPosAttention: PositionedRelPosAttention},
)


def convert(model: Any, position: str | Rope, *, keep_absolute: bool = False, **options: Any) -> PositionedModel:
    """Convert a model of this family in place, see `vision_rope.add_position`."""
    refuse_linear(model, options)
    absolute = getattr(model, "pos_embed", None) is not None
    positioned = convert_model(
        model,
        MODELS[type(model)],
        position,
        tuple(model.patch_embed.grid_size),
        # Where there is none to keep, biases are kept.
        has_absolute=absolute or (keep_absolute and has_biases(model)),
        known=LAYERS,
        keep_absolute=keep_absolute,
        **options,
    )
    use_grids(model)
    model.norm_pre = nn.Identity()
    if not hasattr(model, "pos_drop"):
        model.pos_drop = nn.Identity()
    if positioned.position_name == "none" and not keep_absolute:
        drop_biases(model)
    return positioned
