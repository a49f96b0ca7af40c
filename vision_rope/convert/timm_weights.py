"""Weights of a converted model as timm's own model of its name takes them."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from vision_rope.convert.blocks import attention_layers
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_rope import mixed_to_timm
from vision_rope.convert.pairing import convert_pairing
from vision_rope.rope import Rope


def timm_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A converted model's weights in timm's naming, layout and pairing, for `timm_model.load_state_dict`.

    The other way round needs nothing: a converted model's `load_state_dict` takes timm's weights as they are, where it
    has timm's pairing still (load before `convert_pairing`). What was taken away, as `pos_embed` is, timm misses. Its
    model computes the same where it is built with the same rotary embedding, as position="own" makes sure; weights
    alone tell neither base nor coordinates.

    Shapes: as timm's; learned frequencies (axes, depth, heads, head_dim / 2) under the name rope.freqs.
    Raises: ValueError for a model that is not converted, is one of videos, or has parameters that timm has no place
        for.
    """
    if not isinstance(model, PositionedModel):
        raise ValueError(
            f"model is a {type(model).__name__} without a position encoding of this package; its state_dict is timm's "
            "already where it is a timm model"
        )
    rope = model.position if isinstance(model.position, Rope) else None
    pairing = _timm_pairing(model)
    if rope is not None and pairing not in (None, rope.pairing):
        model = convert_pairing(copy.deepcopy(model), pairing)
    weights = dict(model.state_dict())
    if len(model.train_grid) == 3:
        raise ValueError(
            f"model is a {type(model).__name__}, a model of videos, for whose tubelets timm has no place; save it with "
            "vision_rope.save_model"
        )
    if rope is not None and rope.axes == 2:
        frequencies = weights.pop("position.learned_frequencies", None)
        if frequencies is not None:
            weights["rope.freqs"] = mixed_to_timm(frequencies, model.timm_axes)
    added = [name for name in weights if name.startswith("position.") or ".projection." in name]
    if added:
        raise ValueError(
            f"the model has {', '.join(added)}, for which timm has no place; save it with vision_rope.save_model"
        )
    return weights


def _timm_pairing(model: Any) -> Any:
    """The pairing of timm's own layers; None where they do not turn anything."""
    halves = {getattr(layer, "rotate_half", None) for block in model.blocks for layer in attention_layers(block)}
    return "half" if halves == {True} else "interleaved" if halves == {False} else None
