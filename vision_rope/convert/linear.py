"""timm's attention with linear attention in the softmax's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from vision_rope.convert.attention import Arrangement, OfOneGrid, Position, PositionedAttention, PositionedEvaAttention
from vision_rope.linear_attention import check_feature_map, linear_attend, performer_projection
from vision_rope.rotation import Rotation
from vision_rope.suggestion import did_you_mean

OPTIONS = ("feature_map", "num_features")


class RandomProjection(nn.Module):
    """A fixed random matrix: not trained, but saved with the weights, which are of no use with another one.

    It is float32 whatever the model is cast to.
    """

    matrix: Tensor

    def __init__(self, head_dim: int, num_features: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("matrix", performer_projection(head_dim, num_features, device=device))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the matrix anew, for instance after a model built on "meta" got its memory."""
        num_features, head_dim = self.matrix.shape
        self.matrix.copy_(performer_projection(head_dim, num_features, generator=generator, device=self.matrix.device))

    def extra_repr(self) -> str:
        return f"head_dim={self.matrix.shape[1]}, num_features={self.matrix.shape[0]}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomProjection:
        """Move with the model, but stay float32."""
        before = self.matrix
        super()._apply(fn, recurse)
        if self.matrix.dtype != torch.float32:
            self.matrix = before.to(self.matrix.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # With assign=True the loaded tensor becomes the buffer: a checkpoint saved in bfloat16 must not make it one.
        key = prefix + "matrix"
        if key in state_dict:
            state_dict[key] = state_dict[key].float()
        super()._load_from_state_dict(state_dict, prefix, *args)


class LinearAttention(PositionedAttention):
    """An attention layer of timm with `linear_attend` in the softmax's place; its weights stay.

    Attributes:
        feature_map: a name of `vision_rope.linear_attention.FEATURE_MAPS`.
        projection: the random matrix of a feature map that needs one, or None.
    """

    feature_map: str
    projection: RandomProjection | None

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same.

        Raises: ValueError where there is a mask.
        """
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is given and the model's attention is linear, which has no scores to mask; leave it out "
                "(is_causal works), or build the model with attention='softmax'"
            )
        # What turns are the features, within the attention.
        q, k, v = self._split(x, None)
        if isinstance(rope, Arrangement):
            return self._project(rope.attend(q, k, v, self._attend), x)
        return self._project(self._attend(q, k, v, None, is_causal, rope), x)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, position: OfOneGrid | None
    ) -> Tensor:
        assert position is None or isinstance(position, Rotation), "convert refuses other encodings"
        return linear_attend(
            q,
            k,
            v,
            q_rotation=position,
            k_rotation=position,
            feature_map=self.feature_map,
            projection=None if self.projection is None else self.projection.matrix,
            is_causal=is_causal,
        )


class LinearPlainAttention(LinearAttention, Attention):
    """timm's Attention, linear."""


class LinearAttentionRope(LinearAttention, AttentionRope):
    """timm's AttentionRope, linear."""


class LinearEvaAttention(LinearAttention, PositionedEvaAttention):
    """timm's EvaAttention, linear."""


LINEAR: dict[type[nn.Module], type[LinearAttention]] = {
    Attention: LinearPlainAttention,
    AttentionRope: LinearAttentionRope,
    EvaAttention: LinearEvaAttention,
}


def count_features(layer: Any, options: Mapping[str, Any]) -> int:
    """Check options of linear attention for a layer, and count the features they give a head.

    Raises: ValueError for an unknown option or name, with the nearest one, and options without effect.
    """
    for option in options:
        if option not in OPTIONS:
            raise ValueError(
                f"attention_options has {option!r}; the options of linear attention are {', '.join(OPTIONS)}"
                f"{did_you_mean(option, OPTIONS)}"
            )
    if layer.attn_drop.p > 0:
        raise ValueError(
            f"attn_drop_rate is {layer.attn_drop.p} and would have no effect, since linear attention has no attention "
            "weights to drop; build the timm model without it"
        )
    name = options.get("feature_map", "elu")
    count = options.get("num_features")
    if not check_feature_map(name).needs_projection:
        if count is not None:
            raise ValueError(
                f"attention_options has num_features {count}, which would have no effect: feature_map {name!r} has as "
                f"many features as a head has channels ({layer.head_dim}); leave it out"
            )
        return layer.head_dim
    if count is None:
        return layer.head_dim
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"attention_options has num_features {count!r}; it must be a whole number, at least 1")
    return count


def make_linear(layer: Any, options: Mapping[str, Any]) -> None:
    """Make an attention layer of timm linear in place, with options that `count_features` has checked."""
    num_features = count_features(layer, options)
    layer.feature_map = options.get("feature_map", "elu")
    needs_projection = check_feature_map(layer.feature_map).needs_projection
    device = layer.proj.weight.device
    layer.projection = RandomProjection(layer.head_dim, num_features, device) if needs_projection else None
    layer.__class__ = LINEAR[type(layer)]
