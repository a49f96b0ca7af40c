"""timm's own relative biases of scores: whether a model has them, how they join a mask, and how they are taken away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor, nn

# Where timm's models and their attention layers keep them, and what belongs to them.
PARTS = (
    "rel_pos_bias",
    "relative_position_bias_table",
    "relative_position_index",
    "window_size",
    "shared_rel_pos",
    "rel_pos",
    "rel_pos_h",
    "rel_pos_w",
)


def has_biases(model: nn.Module) -> bool:
    """Whether a timm model has relative biases of its own."""
    return any("rel_pos" in name or "relative_position" in name for name, _ in model.named_parameters())


def drop_biases(model: Any) -> None:
    """Take a model's own relative biases away; timm's set_input_size has none to resample then."""
    for owner in (model, *(block.attn for block in model.blocks)):
        for part in PARTS:
            if hasattr(owner, part):
                setattr(owner, part, None)
        if hasattr(owner, "use_rel_pos"):
            owner.use_rel_pos = False


def add_bias(bias: Tensor | None, mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
    """A bias and who may look at whom as one mask, and whether that is left to be causal.

    Shapes: bias (..., heads, tokens, tokens)
    """
    if bias is None:
        return mask, is_causal
    mask = resolve_self_attn_mask(bias.shape[-1], bias, mask, is_causal)
    return bias if mask is None else bias + mask, False


def refuse_left_out(model: nn.Module) -> None:
    """Raise ValueError where patches are to be left out of a model with biases, which stand for whole grids."""
    if has_biases(model):
        raise ValueError(
            f"the {type(model).__name__} has relative biases for whole grids, so that no patches can be left out; "
            "encode all of them (masked.encoder: all), or take its biases away with position='none'"
        )


def refuse_linear(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise ValueError where linear attention is asked for, which has no scores for biases."""
    if options.get("attention") == "linear":
        raise ValueError(
            f"attention is 'linear', and a {type(model).__name__} adds its relative biases to scores, of which linear "
            "attention has none; leave it out"
        )
