"""A timm model becomes a positioned one in place; everything that can be refused is refused before it is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from timm.layers import Format, PatchDropout, PatchDropoutWithIndices, PatchEmbed
from torch import nn

from vision_rope.convert.attention import ATTENTIONS, PositionedAttention
from vision_rope.convert.blocks import BLOCKS, AnySizePatchEmbed, attention_layers
from vision_rope.convert.linear import make_linear
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.position import KEEPING, build_position, check_absolute, check_attention
from vision_rope.relative import RelativeEncoding
from vision_rope.rope import Rope


@dataclass(frozen=True)
class Layers:
    """What timm's blocks and attention layers become, by their classes."""

    blocks: Mapping[type[nn.Module], type[nn.Module]]
    attentions: Mapping[type[nn.Module], type[PositionedAttention]]


PLAIN = Layers(BLOCKS, ATTENTIONS)


def convert_any_size(
    model: Any, kind: type[PositionedModel], position: str | Rope, steps: tuple[int, ...] = (), **options: Any
) -> PositionedModel:
    """Make a timm model one of `kind` in place, see `vision_rope.add_position`; then it takes images of any size.

    Args:
        steps: of a video model, the number of steps that it is built for.
    """
    grid = (*steps, *model.patch_embed.grid_size)
    positioned = convert_model(model, kind, position, grid, has_absolute=model.pos_embed is not None, **options)
    accept_any_size(model)
    return positioned


def convert_model(
    model: Any,
    kind: type[PositionedModel],
    position: str | Rope,
    grid: tuple[int, ...],
    *,
    has_absolute: bool,
    known: Layers = PLAIN,
    keep_absolute: bool = False,
    attention: str = "softmax",
    attention_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> PositionedModel:
    """Make a timm model one of `kind` in place, see `vision_rope.add_position`.

    Args:
        grid: rows and columns of patches it was built for.
        has_absolute: whether it has an absolute embedding.
        known: the blocks and attention layers of its family.
    """
    # Everything that can be refused is refused before the model computes anything else than before.
    layers = check_layers(model, known)
    for layer in layers:
        complete(layer)
    attention_options = attention_options or {}
    turned = check_attention(layers, attention, attention_options)
    encoding = build_position(model, layers[0], turned, position, options, grid)
    if attention == "linear" and isinstance(encoding, RelativeEncoding):
        raise ValueError(
            f"position {position!r} changes the scores of softmax attention, and attention 'linear' has none; choose a "
            "rotary encoding, an absolute one (learned, sinusoidal) or none"
        )
    name = position.name if isinstance(position, Rope) else position
    check_absolute(has_absolute, name, keep_absolute)
    drop = getattr(model, "patch_drop", None)

    for block in model.blocks:
        block.__class__ = known.blocks[type(block)]
    for layer in layers:
        if attention == "linear":
            make_linear(layer, attention_options)
        else:
            layer.__class__ = known.attentions[type(layer)]
    model.__class__ = kind
    if drop is None:
        model.patch_drop = nn.Identity()
    elif isinstance(drop, PatchDropout):
        # timm built the layer of a distilled deit before it counted the distillation token.
        kept = max(drop.num_prefix_tokens, model.num_prefix_tokens)
        model.patch_drop = PatchDropoutWithIndices(drop.prob, kept, drop.ordered).train(drop.training)
    if not keep_absolute and name not in KEEPING:
        model._drop_absolute()
    model.position = encoding if encoding is None else encoding.train(model.training)
    model.position_name = name
    model.attention_name = attention
    model.train_grid = grid
    model.extension = None
    return model


def check_layers(model: Any, known: Layers) -> list[Any]:
    """All attention layers of a timm model, or ValueError for layers that are not known here."""
    layers = []
    for block in model.blocks:
        if type(block) not in known.blocks:
            names = ", ".join(kind.__name__ for kind in known.blocks)
            raise ValueError(f"the model's blocks are {type(block).__name__}; add_position supports {names}")
        layers += attention_layers(block)
    for layer in layers:
        if type(layer) not in known.attentions:
            names = ", ".join(kind.__name__ for kind in known.attentions)
            raise ValueError(f"the model's attention is {type(layer).__name__}; add_position supports timm's {names}")
    return layers


def complete(layer: Any) -> None:
    """Give an attention layer what timm's plain one has and this one leaves out; it computes what it did."""
    for part in ("q_norm", "k_norm", "norm"):
        if not hasattr(layer, part):
            setattr(layer, part, nn.Identity())
    if not hasattr(layer, "gate"):
        layer.gate = None
    if not hasattr(layer, "head_dim"):
        layer.head_dim = layer.qkv.out_features // (3 * layer.num_heads)


def accept_any_size(model: Any) -> None:
    """timm's dynamic_img_size, after the fact."""
    use_grids(model)
    model.dynamic_img_size = True
    model.patch_embed.strict_img_size = False


def use_grids(model: Any) -> None:
    """Leave patches a grid until positions are added."""
    model.patch_embed.flatten = False
    model.patch_embed.output_fmt = Format.NHWC
    if type(model.patch_embed) is PatchEmbed:
        model.patch_embed.__class__ = AnySizePatchEmbed
