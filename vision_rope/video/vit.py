"""timm ViT -> video transformer: a live time axis for a model of images, whose weights stay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vision_rope.convert import check_position, create_timm_model, eva, vision_transformer
from vision_rope.convert.attention import ATTENTIONS
from vision_rope.convert.conversion import PLAIN, Layers
from vision_rope.convert.model import PositionedModel
from vision_rope.encodings import ENCODINGS
from vision_rope.relative import RelativeEncoding
from vision_rope.rope import Rope
from vision_rope.rope_presets import PRESETS, preset
from vision_rope.suggestion import did_you_mean
from vision_rope.video.model import VideoModel, check_pooling
from vision_rope.video.space_time import FactorisedBlock, FactorisedEvaBlock
from vision_rope.video.tubelets import check_tubelet, embed_tubelets

SPACE_TIME = ("joint", "factorised")


class VideoVisionTransformer(VideoModel, VisionTransformer):
    """timm's VisionTransformer for videos; made by `video_vit`."""


class VideoVisionTransformerDistilled(VideoModel, VisionTransformerDistilled):
    """timm's VisionTransformerDistilled (deit) for videos; made by `video_vit`."""


class VideoEva(VideoModel, Eva):
    """timm's Eva for videos; made by `video_vit`."""


KINDS: dict[type[nn.Module], tuple[type[VideoModel], Callable[..., PositionedModel]]] = {
    VisionTransformer: (VideoVisionTransformer, vision_transformer.convert),
    VisionTransformerDistilled: (VideoVisionTransformerDistilled, vision_transformer.convert),
    Eva: (VideoEva, eva.convert),
}
FACTORISED = Layers({Block: FactorisedBlock, EvaBlock: FactorisedEvaBlock}, ATTENTIONS)


def video_vit(
    model_or_name: str | nn.Module,
    num_frames: int = 16,
    tubelet: tuple[int, int, int] = (2, 16, 16),
    position: str | Rope = "qwen2-vl",
    *,
    attention: str = "joint",
    causal: bool = False,
    positions_per_second: float | None = None,
    pretrained: bool = False,
    keep_absolute: bool = False,
    position_options: dict[str, Any] | None = None,
    **timm_options: Any,
) -> VideoModel:
    """Turn a timm ViT into a video transformer whose tokens carry time, row and column.

    A timm model is changed in place and returned; its weights and state-dict keys stay, those of its patches inflated:
    a still image, repeated to fill the tubelet, gives what the image model with the same encoding gives (not with
    "sinusoidal", which shares its channels out over three axes). Weights of an image model load by `load_state_dict` as
    they are. Those of timm's models hold an absolute embedding `pos_embed` too, which position "learned" and
    keep_absolute alone take: with another encoding leave that key out, or let `pretrained` load timm's weights.

    Args:
        model_or_name: a timm model of its VisionTransformer, VisionTransformerDistilled or Eva class, or the name of
            one.
        num_frames: frames of a clip in training; others are taken too.
        tubelet: (frames, height, width) of what becomes a token; height and width are those of the model's patches.
        position: a preset of three axes; one of two, whose tokens know no time; another encoding, of three axes;
            "learned", the model's own embedding of space and one of time, which begins at zero, both resampled to other
            grids; or a Rope.
        attention: "joint": all tokens look at each other. "factorised": in each block tubelets of the same place look
            at each other, then those of the same step and the prefix tokens. The layers for it (`attn_time`,
            `norm_time`) begin as copies of the block's own whose output is zero, so that steps know nothing of each
            other at first.
        causal: a step looks at itself, at earlier ones and at prefix tokens, which look at the first step alone; needed
            for `start_stream`.
        positions_per_second: time in seconds: a step's position is (seconds of its first frame - seconds of the clip's
            first frame) * positions_per_second, fractions kept, and the model wants the seconds of each frame. None
            counts steps. Either is multiplied by the time_scale of videorope.
        pretrained, timm_options: of a name, as of `vision_rope.create_model`.
        keep_absolute: keep the model's own embedding of space, at each step, beside the encoding.
        position_options: options of the encoding, for instance {"base": 100.0}.

    Raises: ValueError for a model that is not supported, a tubelet that is not of its patches, frames that the tubelet
        does not divide, an unknown encoding or option, and options that contradict each other or have no effect.
    """
    position_options = position_options or {}
    if isinstance(model_or_name, str):
        model = create_timm_model(model_or_name, position, position_options, pretrained=pretrained, **timm_options)
    else:
        model = model_or_name
        given = [*timm_options, *(["pretrained"] if pretrained else [])]
        if given:
            raise ValueError(
                f"{', '.join(given)} would have no effect on a model that is built already; give them to timm"
            )
        check_position(position, position_options)
    steps = _check_model(model, num_frames, tubelet)
    _check_attention(model, attention, causal)
    _check_encoding(position, attention, positions_per_second)
    _, convert = KINDS[type(model)]
    video: Any = convert(
        model,
        position,
        kind=KINDS[type(model)][0],
        steps=(steps,),
        known=FACTORISED if attention == "factorised" else PLAIN,
        keep_absolute=keep_absolute,
        **position_options,
    )
    embed_tubelets(video.patch_embed, tubelet[0])
    video.num_frames, video.causal = num_frames, causal
    video.space_time, video.positions_per_second = attention, positions_per_second
    video.pos_embed_time = None
    if video.position_name == "learned":
        video.pos_embed_time = nn.Parameter(video.pos_embed.new_zeros(1, steps, video.embed_dim))
    if attention == "factorised":
        for block in video.blocks:
            add_time_attention(block)
    return video


@torch.no_grad()
def add_time_attention(block: Any) -> None:
    """Give a block of factorised attention its layers over time: copies of its own, whose output is zero."""
    block.norm_time = copy.deepcopy(block.norm1)
    block.attn_time = copy.deepcopy(block.attn)
    for parameter in block.attn_time.proj.parameters():
        parameter.zero_()


def _check_model(model: Any, num_frames: int, tubelet: Any) -> int:
    """Number of steps, or ValueError for a model that does not become one of videos."""
    if isinstance(model, PositionedModel):
        raise ValueError(
            f"the model has the position encoding {model.position_name!r} already; create the timm model anew to make "
            "it one of videos"
        )
    if type(model) not in KINDS:
        raise ValueError(
            f"model is a {type(model).__name__}; video_vit supports timm's "
            f"{', '.join(kind.__name__ for kind in KINDS)}, each class exactly and not its subclasses"
        )
    if type(model.patch_embed) is not PatchEmbed:
        raise ValueError(
            f"the model's patches come from a {type(model.patch_embed).__name__}; video_vit inflates timm's PatchEmbed"
        )
    return check_tubelet(tubelet, num_frames, model.patch_embed)[1]


def _check_attention(model: Any, attention: str, causal: bool) -> None:
    if attention not in SPACE_TIME:
        raise ValueError(
            f"attention is {attention!r}; choose one of {', '.join(SPACE_TIME)}{did_you_mean(attention, SPACE_TIME)}"
        )
    if not isinstance(causal, bool):
        raise ValueError(f"causal is {causal!r}; it must be True or False")
    if attention == "factorised" and not isinstance(getattr(model, "patch_drop", None), nn.Identity | None):
        raise ValueError(
            "the model drops patches (patch_drop_rate), which factorised attention cannot leave out; build it with "
            "patch_drop_rate=0, or choose attention='joint'"
        )
    if causal and isinstance(model, VisionTransformerDistilled):
        raise ValueError(
            "causal=True and the model classifies by its class and distillation tokens, which see the first step "
            "alone; choose a vit with global_pool='avg'"
        )
    check_pooling(causal, model.global_pool)


def _check_encoding(position: str | Rope, attention: str, positions_per_second: Any) -> None:
    """Refuse encodings that do not go with factorised attention, or have no use for seconds."""
    name = position.name if isinstance(position, Rope) else position
    build = ENCODINGS[name].build if name in ENCODINGS else None
    if attention == "factorised" and isinstance(build, type) and issubclass(build, RelativeEncoding):
        raise ValueError(
            f"position {name!r} has terms for all pairs of tokens of a clip, and factorised attention looks at parts "
            "of it; choose attention='joint', or a rotary encoding"
        )
    if positions_per_second is None:
        return
    number = isinstance(positions_per_second, int | float) and not isinstance(positions_per_second, bool)
    if not (number and math.isfinite(positions_per_second) and positions_per_second > 0):
        raise ValueError(
            f"positions_per_second is {positions_per_second!r}; it must be a positive number, or None to count time in "
            "steps"
        )
    rope = preset(position, head_dim=24) if isinstance(position, str) and position in PRESETS else position
    if not isinstance(rope, Rope) or rope.axes != 3:
        raise ValueError(
            f"positions_per_second is {positions_per_second} and would have no effect with position {name!r}, which "
            "has no axis of time or counts steps; leave it out, or choose a preset of three axes"
        )
