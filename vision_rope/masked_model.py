"""Masked-patch prediction: a positioned backbone that predicts the pixels of patches it does not see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from vision_rope.convert import create_model
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_bias import refuse_left_out
from vision_rope.video.model import VideoModel
from vision_rope.video.vit import video_vit


class MaskedModel(nn.Module):
    """A backbone with a head that predicts pixels, in one of two ways.

    Without a decoder the encoder sees all tokens, hidden ones as a learned mask token (SimMIM). With one it sees the
    visible patches alone, at their own positions; the decoder gets them back in their places, mask tokens in the
    others (MAE). The last layer begins at zero: the first prediction is the mean colour.

    Args:
        encoder: a positioned model without a classifier (num_classes=0).
        decoder: what `create_decoder` makes, or None.

    Raises:
        ValueError: for an encoder with layers that masked prediction has no use for.
    Source: SimMIM (arXiv 2111.09886); MAE (arXiv 2111.06377).
    """

    def __init__(self, encoder: PositionedModel, decoder: PositionedModel | None = None) -> None:
        super().__init__()
        timm_encoder: Any = encoder
        _check_encoder(timm_encoder)
        if decoder is not None:
            refuse_left_out(encoder)
            if getattr(encoder, "space_time", "joint") == "factorised":
                raise ValueError(
                    "the encoder's attention is factorised, which needs all tubelets of a place and of a step; encode "
                    "all of them (masked.encoder: all), or choose joint attention"
                )
        self.encoder = encoder
        self.decoder = decoder
        timm_decoder: Any = decoder
        dim = timm_encoder.embed_dim
        token_dim = dim if decoder is None else timm_decoder.embed_dim
        self.decoder_embed = None if decoder is None else nn.Linear(dim, token_dim)
        self.mask_token = nn.Parameter(0.02 * torch.randn(token_dim))
        # Of a video encoder those of a tubelet, (frames, height, width).
        self.patch_size = tuple(getattr(self.patch_embed, "tubelet", self.patch_embed.patch_size))
        self.head = nn.Linear(token_dim, math.prod(self.patch_size) * timm_encoder.in_chans)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def patch_embed(self) -> Any:
        """The encoder's; its patch size is what images are divided by."""
        return self.encoder.patch_embed

    def forward(self, images: Tensor, masks: Tensor, seconds: Tensor | None = None) -> Tensor:
        """Predict all patches; those of visible ones are no use, since nothing trains them.

        Shapes: images (batch, channels, height, width), masks bool (batch, rows, columns), True where hidden ->
            (batch, rows * columns, pixels of a patch); of a video encoder clips (batch, channels, frames, height,
            width), masks (batch, steps, rows, columns), seconds (batch, frames)
        Raises: ValueError where masks do not fit the grid of patches or are not bool, or hide different numbers of
            them in a batch that is encoded from its visible patches.
        """
        if masks.dtype != torch.bool:
            raise ValueError(f"masks have dtype {masks.dtype}, but must be bool: True where a patch is hidden")
        frames = [length // unit for length, unit in zip(images.shape[2:-2], self.patch_size[:-2], strict=True)]
        grid = (*frames, *self.patch_embed.dynamic_feat_size(images.shape[-2:]))
        if masks.shape != (len(images), *grid):
            raise ValueError(
                f"masks have shape {tuple(masks.shape)}, but the images have patches {(len(images), *grid)}: "
                f"(batch, {'steps, ' if frames else ''}rows, columns)"
            )
        # First, since counting reads the masks, which breaks a compiled graph: there is nothing to break yet.
        kept = None if self.decoder is None else _visible_places(masks)
        patches = self.encoder.embed_patches(images)
        timing: dict[str, Any] = {} if seconds is None else {"seconds": seconds}
        if self.decoder is None or kept is None:
            seen = torch.where(masks[..., None], self.mask_token.to(patches.dtype), patches)
            return self.head(self._encode(seen, timing))
        visible = self.decoder_embed(self._encode(patches, timing, kept))  # type: ignore[misc]
        tokens = self.mask_token.to(visible.dtype).expand(*masks.flatten(1).shape, -1)
        tokens = tokens.scatter(1, kept[..., None].expand_as(visible), visible)
        return self.head(self.decoder.forward_patches(tokens.unflatten(1, masks.shape[1:]), **timing))

    def _encode(self, patches: Tensor, timing: Mapping[str, Tensor], kept: Tensor | None = None) -> Tensor:
        """Patches -> normalised tokens without the prefix."""
        encoder: Any = self.encoder
        tokens = encoder.forward_patches(patches, kept=kept, **timing)[:, encoder.num_prefix_tokens :]
        # timm's average-pooled models have their last norm behind the pooling.
        return encoder.fc_norm(tokens)

    def set_extension(self, method: str, train_size: Sequence[int] | None = None, **knobs: Any) -> None:
        """See `vision_rope.set_extension`; the decoder follows the encoder, and what one refuses changes neither."""
        parts = [part for part in (self.encoder, self.decoder) if part is not None]
        before = [part.extension for part in parts]
        try:
            for part in parts:
                part.set_extension(method, train_size, **knobs)
        except ValueError:
            for part, extension in zip(parts, before, strict=True):
                part.extension = extension
            raise

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Fit an encoder that takes images of one size to another; the decoder takes any."""
        self.encoder.set_input_size(img_size=img_size)  # type: ignore[operator]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass."""
        for part in (self.encoder, self.decoder):
            if part is not None:
                part.set_grad_checkpointing(enable)  # type: ignore[operator]

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay: those of encoder and decoder, and the mask token."""
        names = {"mask_token"}
        for prefix, part in (("encoder", self.encoder), ("decoder", self.decoder)):
            if part is not None:
                names |= {f"{prefix}.{name}" for name in part.no_weight_decay()}
        return names


def create_decoder(
    encoder: PositionedModel,
    *,
    position: str,
    position_options: dict[str, Any] | None = None,
    keep_absolute: bool = False,
    attention: str = "softmax",
    attention_options: Mapping[str, Any] | None = None,
    dim: int,
    depth: int,
    num_heads: int,
) -> PositionedModel:
    """A small positioned transformer over the encoder's grid of patches, for `MaskedModel`.

    It is a timm ViT whose patches are the encoder's tokens, so that every position encoding works in it too; of an
    encoder of clips a video transformer that looks at time as the encoder does.

    Raises:
        ValueError: for an encoder that `MaskedModel` refuses, a width that the heads do not divide, or that the
            encoding does not fit.
    """
    _check_encoder(encoder)
    if depth < 1 or num_heads < 1 or dim % num_heads:
        raise ValueError(
            f"the decoder has dim {dim}, depth {depth} and {num_heads} heads, but all must be positive and the heads "
            "must divide dim"
        )
    embed: Any = encoder.patch_embed
    layers: dict[str, Any] = {
        "img_size": tuple(embed.img_size),
        "patch_size": tuple(embed.patch_size),
        "embed_dim": dim,
        "depth": depth,
        "num_heads": num_heads,
        "num_classes": 0,
        "class_token": False,
        "global_pool": "avg",
        "fc_norm": False,
    }
    encoding: dict[str, Any] = {
        "position": position,
        "position_options": position_options,
        "keep_absolute": keep_absolute,
    }
    try:
        decoder: PositionedModel
        if isinstance(encoder, VideoModel):
            decoder = video_vit(
                "vit_small_patch16_224",
                num_frames=encoder.num_frames,
                tubelet=embed.tubelet,
                attention=encoder.space_time,
                causal=encoder.causal,
                positions_per_second=encoder.positions_per_second,
                **encoding,
                **layers,
            )
        else:
            decoder = create_model(
                "vit_small_patch16_224", attention=attention, attention_options=attention_options, **encoding, **layers
            )
    except ValueError as error:
        raise ValueError(f"the decoder of dim {dim} and {num_heads} heads cannot be built: {error}") from error
    decoder.patch_embed.proj = nn.Identity()
    return decoder


def _check_encoder(encoder: Any) -> None:
    """Refuse layers that masked prediction has no use for, or that would undo the masks."""
    if getattr(encoder, "attn_pool", None) is not None:
        raise ValueError(
            "the encoder pools by attention (global_pool='map'), which masked prediction does not train; "
            "build it with global_pool='avg' or 'token'"
        )
    if hasattr(encoder, "neck"):
        raise ValueError(
            f"the encoder is a {type(encoder).__name__}, whose neck mixes patches into maps of another width; masked "
            "prediction needs tokens: choose a model without a neck"
        )
    if not isinstance(encoder.patch_drop, nn.Identity):
        raise ValueError(
            "the encoder drops patches by itself (patch_drop_rate), which would leave hidden ones without a "
            "prediction; build it with patch_drop_rate=0"
        )
    if isinstance(encoder, NaFlexVit):
        raise ValueError(
            f"the encoder is a {type(encoder).__name__}, whose patches get their positions and class tokens together "
            "with their embedding, where masks would come between; choose a vit_* or eva model"
        )
    if not isinstance(encoder.patch_embed, PatchEmbed):
        raise ValueError(
            f"the encoder's patches come from a {type(encoder.patch_embed).__name__}, which looks beyond a patch, so "
            "that visible ones would show the hidden; choose a model that embeds each patch by itself"
        )


def _visible_places(masks: Tensor) -> Tensor:
    """Shapes: masks (batch, rows, columns) -> places of the visible patches (batch, visible), ascending."""
    hidden = masks.flatten(1)
    counts = hidden.sum(1).tolist()
    if len(set(counts)) != 1:
        raise ValueError(
            f"masks hide between {min(counts)} and {max(counts)} patches of an image, but all images of a batch that "
            "is encoded from its visible patches must have equally many"
        )
    order = hidden.to(torch.uint8).sort(dim=1, stable=True).indices
    return order[:, : hidden.shape[1] - counts[0]]
