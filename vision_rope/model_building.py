"""The model that a configuration describes."""

from __future__ import annotations

from typing import Any

from torch import nn

from vision_rope.config import TrainConfig
from vision_rope.sizes import largest_size


def build_model(config: TrainConfig, num_classes: int, *, pretrained: bool | None = None) -> nn.Module:
    """Create the model that a configuration describes; `pretrained` overrides its choice of first weights.

    Raises:
        ValueError: where timm or the position encoding refuses an option.
    """
    if config.task == "masked":
        return _build_masked(config, pretrained=pretrained)
    if config.task == "motion":
        from vision_rope.data.motion import DIRECTIONS

        # Direction and speed are told apart each by itself, whatever classes the data set makes of both.
        num_classes = len(DIRECTIONS) + config.motion.num_speeds
    if config.task == "segmentation":
        num_classes = 0
    return _build_backbone(config, num_classes, pretrained=pretrained)


def _build_masked(config: TrainConfig, *, pretrained: bool | None) -> nn.Module:
    from vision_rope.convert.blocks import attention_layers
    from vision_rope.masked_model import MaskedModel, create_decoder

    encoder: Any = _build_backbone(config, 0, pretrained=pretrained)
    section, masked = config.model, config.masked
    if masked.encoder == "all":
        return MaskedModel(encoder)
    dim = masked.decoder_dim or encoder.embed_dim // 2
    head_dim: Any = attention_layers(encoder.blocks[0])[0].head_dim
    decoder = create_decoder(
        encoder,
        position=section.position,
        position_options=section.position_options,
        keep_absolute=section.keep_absolute,
        attention=section.attention,
        attention_options=section.attention_options,
        dim=dim,
        depth=masked.decoder_depth or 2,
        num_heads=masked.decoder_heads or max(dim // head_dim, 1),
    )
    return MaskedModel(encoder, decoder)


def _build_backbone(config: TrainConfig, num_classes: int, *, pretrained: bool | None) -> Any:
    import vision_rope

    section = config.model
    options: dict[str, Any] = {"img_size": config.data.size, **section.options}
    for name, key in (("num_classes", "the data set"), ("position", "model.position")):
        if name in section.options:
            raise ValueError(f"model.options holds {name}, but it comes from {key}; take it out")
    if section.options.get("in_chans", 3) != 3:
        raise ValueError(
            f"model.options holds in_chans: {section.options['in_chans']}, but images come with 3 channels; take it out"
        )
    chosen: dict[str, Any] = {
        "pretrained": section.pretrained if pretrained is None else pretrained,
        "num_classes": num_classes,
        **options,
    }
    position: dict[str, Any] = {
        "position": section.position,
        "keep_absolute": section.keep_absolute,
        "position_options": section.position_options,
    }
    try:
        if config.task == "segmentation":
            return _build_segmenter(config, position, chosen)
        if config.video.num_frames is None:
            attention: dict[str, Any] = {"attention": section.attention, "attention_options": section.attention_options}
            return vision_rope.create_model(section.name, **position, **attention, **chosen)
        return _build_video(config, position, chosen)
    except (TypeError, RuntimeError, AssertionError) as error:
        # timm names a wrong option, an unknown model or a head that does not divide through these.
        raise ValueError(
            f"model.name {section.name} cannot be built with model.options {section.options}: {error}; "
            "options of a file join those of flags: --model.options '{NAME: null}' takes one out"
        ) from error


def _build_video(config: TrainConfig, position: dict[str, Any], chosen: dict[str, Any]) -> Any:
    """A backbone for clips, whose tubelets have the rows and columns of its patches."""
    import vision_rope
    from vision_rope.convert import create_timm_model

    video = config.video
    assert video.num_frames is not None, "images have a backbone of their own"
    model: Any = create_timm_model(config.model.name, position["position"], position["position_options"], **chosen)
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", (16, 16))
    return vision_rope.video_vit(
        model,
        num_frames=video.num_frames,
        tubelet=(video.tubelet, *patch_size),
        attention=video.attention,
        causal=video.causal,
        positions_per_second=video.positions_per_second,
        **position,
    )


def _build_segmenter(config: TrainConfig, position: dict[str, Any], chosen: dict[str, Any]) -> Any:
    """A backbone for frames and what follows objects behind it, at the scale that it is trained at."""
    import vision_rope
    from vision_rope.convert import FAMILIES, create_timm_model

    size, section = largest_size(config.data), config.segmenter
    name, options = position["position"], position["position_options"]
    model = create_timm_model(config.model.name, name, options, **chosen)
    if type(model) in FAMILIES:
        model = vision_rope.add_position(model, name, keep_absolute=position["keep_absolute"], **options)
    return vision_rope.create_segmenter(
        model,
        dim=section.dim,
        memory_dim=section.memory_dim,
        depth=section.depth,
        mlp_dim=section.mlp_dim,
        num_heads=section.num_heads,
        dropout=section.dropout,
        num_masks=section.num_masks,
        previous_mask=section.previous_mask,
        image_size=max(size),
        train_size=size,
        mean=config.data.mean,
        std=config.data.std,
    )
