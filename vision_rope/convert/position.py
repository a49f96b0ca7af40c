"""The encoding that a timm model gets, and what is refused before the model is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vision_rope.convert.linear import count_features
from vision_rope.convert.own_rope import OWN, own_rope
from vision_rope.encodings import build_encoding
from vision_rope.extension import check_grid
from vision_rope.rope import Rope
from vision_rope.rope_presets import PRESETS, preset
from vision_rope.suggestion import did_you_mean

ATTENTIONS = ("softmax", "linear")
# Encodings that are, or belong to, the model's own: its absolute embedding stays.
KEEPING = ("learned", OWN)


def check_attention(layers: Sequence[Any], attention: str, options: Mapping[str, Any]) -> int:
    """How many channels of a head a rotation turns: those of queries and keys, or their features."""
    if attention not in ATTENTIONS:
        raise ValueError(
            f"attention is {attention!r}; choose one of {', '.join(ATTENTIONS)}{did_you_mean(attention, ATTENTIONS)}"
        )
    if attention == "linear":
        return max(count_features(layer, options) for layer in layers)
    if options:
        raise ValueError(
            f"attention_options has {', '.join(options)}, which would have no effect with attention 'softmax'; leave "
            "it out, or give attention='linear'"
        )
    return layers[0].head_dim


def build_position(
    model: Any, layer: Any, turned: int, position: str | Rope, options: dict[str, Any], grid: tuple[int, ...]
) -> Any:
    """The encoding's module; None where it needs none. A rotary one turns `turned` channels of a head."""
    if isinstance(position, Rope) or position in PRESETS:
        shape = {"head_dim": turned, "num_heads": layer.num_heads, "depth": len(model.blocks)}
        try:
            rope = position if isinstance(position, Rope) else preset(position, **shape, **options)
        except ValueError as error:
            if turned == layer.head_dim:
                raise
            raise ValueError(f"position {position!r} cannot turn num_features = {turned} features: {error}") from error
        for what, wanted in (("head_dim", (turned,)), ("axes", (2, 3))):
            if getattr(rope, what) not in wanted:
                raise ValueError(
                    f"position {rope.name!r} has {what} {getattr(rope, what)} and the model needs "
                    f"{' or '.join(map(str, wanted))}; choose a 2D or 3D preset and build it with head_dim={turned}"
                )
        if rope.frequencies.shape[1] not in (1, layer.num_heads):
            raise ValueError(
                f"position {rope.name!r} has frequencies for {rope.frequencies.shape[1]} heads and the model has "
                f"{layer.num_heads}; build it with num_heads={layer.num_heads}"
            )
        if rope.extension is not None:
            raise ValueError(
                f"position {rope.name!r} is extended for one grid; give the original one, and choose the extension for "
                "every grid with set_extension"
            )
        if rope.depth != len(model.blocks):
            raise ValueError(
                f"position {rope.name!r} was built for depth {rope.depth} and the model has {len(model.blocks)} "
                f"blocks; build it with depth={len(model.blocks)}"
            )
        return rope.to(layer.proj.weight.device)
    if position == OWN:
        own_rope(model)  # says why there is none
    encoding = build_encoding(
        position,
        options,
        axes=len(grid),
        size=grid,
        embed_dim=model.embed_dim,
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        depth=len(model.blocks),
    )
    return None if encoding is None else encoding.to(layer.proj.weight)


def fit_grid(grid: Sequence[int], axes: int) -> tuple[int, ...]:
    """A grid in as many axes as an encoding has: an image is a video of one step, and without time steps are alike."""
    return (1,) * (axes - len(grid)) + tuple(grid)[-axes:]


def check_train_size(train_size: Sequence[int], built: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The grid of training as it was given, or ValueError where it is none of patches.

    Args:
        built: the grid that the model was built for.
        name: of the position encoding.
    """
    own = f"this model was built for {built} patches"
    try:
        grid = check_grid("train_size", train_size, len(built), name)
    except ValueError as error:
        raise ValueError(f"{error}; {own}") from None
    # Pixels where patches are meant switch extension off without a word; patches are rarely smaller than 8 pixels.
    if all(length >= 8 * patches for length, patches in zip(grid[-2:], built[-2:], strict=True)):
        raise ValueError(
            f"train_size is {grid}, which looks like pixels; it counts patches, and {own}: divide by the patch size"
        )
    return grid


def take_places(positions: Tensor, kept: Tensor) -> Tensor:
    """The positions of the patches that are left.

    Shapes: positions (patches, axes) or (batch, patches, axes), kept int64 (batch, visible) -> (batch, visible, axes)
    """
    if positions.ndim == 2:
        return positions[kept]
    return positions.gather(1, kept[..., None].expand(-1, -1, positions.shape[-1]))


def time_length(times: Tensor) -> int:
    """How long an axis of time is, in positions: the last one and one more, as n steps at 0, 1, 2, ... have n."""
    # A thousandth is rounding, no growth.
    return math.ceil(times.max().item() - 1e-3) + 1


def check_absolute(has_absolute: bool, name: str, keep_absolute: bool) -> None:
    if name in KEEPING and keep_absolute:
        raise ValueError(
            f"keep_absolute=True has no effect with position {name!r}, which keeps the absolute embedding; leave it out"
        )
    if not has_absolute and (keep_absolute or name == "learned"):
        raise ValueError(
            "the model has no absolute embedding to keep (pos_embed is None); leave keep_absolute out, or build the "
            "timm model with one (pos_embed='learn', or use_abs_pos_emb=True)"
        )
