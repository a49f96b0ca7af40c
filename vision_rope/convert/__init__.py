"""timm model -> the same model with a position encoding. The only room that opens timm's layers; one file a family.

Adding a family: a file with one `convert` function, and one row in FAMILIES.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import timm
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from vision_rope.convert import biased, eva, naflex, sam, vision_transformer
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_rope import OWN
from vision_rope.convert.packed import forward_packed
from vision_rope.convert.pairing import convert_pairing
from vision_rope.convert.timm_weights import timm_state_dict
from vision_rope.encodings import ENCODINGS
from vision_rope.rope import Rope
from vision_rope.rope_presets import PRESETS
from vision_rope.suggestion import did_you_mean

__all__ = [
    "FAMILIES",
    "add_position",
    "check_position",
    "convert_pairing",
    "create_model",
    "create_timm_model",
    "forward_packed",
    "set_extension",
    "timm_state_dict",
]

Model = TypeVar("Model", bound=nn.Module)

ANY_SIZE = "takes images of any size that its patches divide"
SET_INPUT_SIZE = "takes images of the size it has, which timm's set_input_size changes"


@dataclass(frozen=True)
class Family:
    """A row of FAMILIES: how a timm class is converted, what sizes it then takes, and which models are of it."""

    convert: Callable[..., PositionedModel]
    sizes: str
    examples: str


FAMILIES: dict[type[nn.Module], Family] = {
    VisionTransformer: Family(
        vision_transformer.convert, ANY_SIZE, "vit, deit3, siglip, clip, dinov2 (registers too), flexivit"
    ),
    VisionTransformerDistilled: Family(vision_transformer.convert, ANY_SIZE, "deit, distilled"),
    Eva: Family(
        eva.convert, ANY_SIZE, "eva, eva02, vit_*_dinov3, vit_pe, vit_*_rope, vit_*_rope_mixed; own RoPE replaced"
    ),
    NaFlexVit: Family(
        naflex.convert,
        ANY_SIZE,
        "naflexvit, other names with use_naflex=True; several sizes in one batch; own RoPE replaced",
    ),
    Beit: Family(biased.convert, SET_INPUT_SIZE, "beit, beitv2; own relative biases stay"),
    VisionTransformerRelPos: Family(
        biased.convert, SET_INPUT_SIZE, "vit_relpos, vit_srelpos; own relative biases stay"
    ),
    VisionTransformerSAM: Family(
        sam.convert,
        SET_INPUT_SIZE,
        "samvit; own relative biases stay, own RoPE (use_rope=True) replaced",
    ),
}


def create_model(
    name: str,
    position: str | Rope = "rope-vit-axial",
    *,
    pretrained: bool = False,
    keep_absolute: bool = False,
    position_options: dict[str, Any] | None = None,
    attention: str = "softmax",
    attention_options: Mapping[str, Any] | None = None,
    **timm_options: Any,
) -> PositionedModel:
    """Create a timm model by its name and give it a position encoding.

    Args:
        name: a timm model name of a supported family, for instance vit_small_patch16_224.
        position, keep_absolute, attention, attention_options: see `add_position`.
        pretrained: load timm's weights of that name.
        position_options: options of the encoding, for instance {"base": 100.0}.
        timm_options: passed to timm.create_model: num_classes, img_size, embed_dim, depth, ...

    Raises: ValueError for an unknown model name, a family that is not supported, or a wrong encoding or option.
    """
    if of_videos := [option for option in ("num_frames", "tubelet") if option in timm_options]:
        raise ValueError(
            f"{of_videos[0]} is {timm_options[of_videos[0]]}, but create_model makes models of images; for videos: "
            "video_vit"
        )
    model = create_timm_model(name, position, position_options or {}, pretrained=pretrained, **timm_options)
    return add_position(
        model,
        position,
        keep_absolute=keep_absolute,
        attention=attention,
        attention_options=attention_options,
        **(position_options or {}),
    )


def create_timm_model(
    name: str, position: str | Rope, position_options: dict[str, Any], *, pretrained: bool = False, **timm_options: Any
) -> nn.Module:
    """timm's model of a name, once the position encoding that it is to get is known to exist.

    Raises: ValueError for an unknown model name, encoding or option.
    """
    if not timm.is_model(name):
        nearest = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else "; timm.list_models() lists them"
        raise ValueError(f"name is {name!r}, which is no timm model{hint}")
    check_position(position, position_options)
    if timm_options.get("features_only"):
        raise ValueError(
            "features_only wraps the model before it gets its positions; leave it out and call "
            "model.forward_intermediates(images)"
        )
    return timm.create_model(name, pretrained=pretrained, **timm_options)


def add_position(
    model: nn.Module,
    position: str | Rope,
    *,
    keep_absolute: bool = False,
    attention: str = "softmax",
    attention_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> PositionedModel:
    """Give a timm model a position encoding; most families then take images of any size that their patches divide.

    The model is changed in place and returned; it stays an instance of its timm class. Keys of its state dict stay;
    only the absolute embedding `pos_embed` (of NaFlexVit `embeds.pos_embed*`) leaves it, and learned frequencies join
    it (`position.learned_frequencies`).
    A rotary embedding that the model was built with is replaced; where both it and the new one are "mixed", its
    frequencies stay. Relative biases of its own (beit, vit_relpos, samvit) stay beside the encoding, but for "none".

    Args:
        model: a timm model of a supported family (`FAMILIES`).
        position: a preset (`vision_rope.presets()`), another encoding (`vision_rope.encodings.ENCODINGS`), a Rope, or
            "own": the rotary embedding that the timm model was built with, beside its absolute one where it has both.
        keep_absolute: keep the model's own absolute embedding, resampled to new grids, beside the encoding; with "none"
            its relative biases too.
        attention: "softmax", or "linear" (`vision_rope.linear_attend`) in its place; not beside relative biases.
        attention_options: of linear attention: feature_map, a name of `vision_rope.linear_attention.FEATURE_MAPS`
            ("elu" where not given), and num_features of "performer" (as many as a head has channels where not given).
            The random projection of "performer" joins the state dict (`blocks.*.attn.projection.matrix`).
        options: options of the encoding, for instance base=100.0.

    Raises: ValueError for a model that is not supported, an unknown encoding or option, or an option without effect.
    """
    if isinstance(model, PositionedModel):
        raise ValueError(
            f"the model has the position encoding {model.position_name!r} already; create the timm model anew to "
            "give it another"
        )
    family = FAMILIES.get(type(model))
    if family is None:
        raise ValueError(
            f"model is a {type(model).__name__}, which add_position does not know; it supports timm's "
            f"{', '.join(kind.__name__ for kind in FAMILIES)}, each class exactly and not its subclasses: "
            "`vision-rope inspect --families` says which models these are"
        )
    check_position(position, options)
    return family.convert(
        model,
        position,
        keep_absolute=keep_absolute,
        attention=attention,
        attention_options=attention_options,
        **options,
    )


def set_extension(model: Model, method: str, train_size: Sequence[int] | None = None, **knobs: Any) -> Model:
    """Choose the context extension of a model's rotary embedding, for grids larger than the trained one.

    The model is changed in place and returned. "none" switches extension off. The state dict is not touched.

    Args:
        model: a model with a position encoding of this package; one that holds such models, as a MaskedModel does.
        method: a name of `vision_rope.extension.EXTENSIONS`: none, interpolate, ntk, dynamic-ntk, ntk-by-parts, yarn,
            llama3, base, pitch.
        train_size: grid (rows, columns) of patches, not pixels, in training, of video models (steps, rows, columns);
            the grid the model was built with when not given.
        knobs: options of the method, for instance beta_fast of yarn.

    Raises: ValueError where the method means nothing for the model's encoding, with the reason.
    """
    own: Any = getattr(model, "set_extension", None)
    if own is None:
        raise ValueError(
            f"model is a {type(model).__name__} without a position encoding of this package; call add_position first"
        )
    own(method, train_size, **knobs)
    return model


def check_position(position: str | Rope, options: dict[str, Any]) -> None:
    """Raise ValueError for an encoding that does not exist, naming the nearest one, before any model is built."""
    if isinstance(position, Rope):
        if options:
            raise ValueError(f"position is a Rope already; the options {', '.join(options)} would have no effect")
        return
    if position == OWN and options:
        raise ValueError(
            f"position {OWN!r} is the rotary embedding that the timm model was built with; the options "
            f"{', '.join(options)} would have no effect: give them to timm (rope_temperature, ...), or name a preset"
        )
    known = [*PRESETS, *ENCODINGS, OWN]
    if position not in known:
        hint = did_you_mean(position, known)
        raise ValueError(f"position is {position!r}; the position encodings are {', '.join(known)}{hint}")
