"""timm's attention layers with a rotation of queries and keys, or with what relative positions add to the scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.layers.attention import resolve_self_attn_mask
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F

from vision_rope.attention import attend, join_runs, split_runs
from vision_rope.relative import RelativeTerms
from vision_rope.rotation import Rotation, rotate, rotate_qkv
from vision_rope.turning import is_unobserved

OfOneGrid = Rotation | RelativeTerms


class Arrangement(ABC):
    """Attention in parts, where not every token looks at every other one.

    Attributes:
        rotation: of all tokens at once; None where their positions turn nothing.
    """

    rotation: Rotation | None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Attention of the parts: attend(q, k, v, mask, is_causal, position) is that of one of them.

        Shapes: q, k, v (batch, heads, tokens, head_dim), turned already -> the same
        """


@dataclass(eq=False)
class Packed(Arrangement):
    """Positions of images whose tokens lie in one sequence, one image after the other; each attends to itself alone.

    Attributes:
        runs: of neighbours of equal size, how many they are, and the tokens of one.
        positions: those of each run, which are the same for all of its images, or have a batch axis.
        rotation: of the whole sequence at once, where the positions are rotations.
    """

    runs: list[tuple[int, int]]
    positions: list[OfOneGrid | None]
    rotation: Rotation | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Attention of each run by itself, its images a batch.

        Shapes: q, k, v (1, heads, tokens of all images, head_dim) -> the same
        """
        parts = zip(*(split_runs(x, self.runs) for x in (q, k, v)), self.positions, strict=True)
        attended = [attend(*run, None, False, position) for *run, position in parts]
        return join_runs(attended, self.runs, (1,))


Position = OfOneGrid | Arrangement


class PositionedAttention(nn.Module):
    """What conversion adds to an attention layer of timm, whose weights stay.

    Its argument for positions has the name that it has in timm's layers with RoPE, whose blocks stay as they are.
    """

    # From timm's classes; projections to queries, keys and values are one layer or three.
    qkv: nn.Linear | None
    num_heads: int
    head_dim: int
    scale: float
    fused_attn: bool
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> (batch, tokens, dim)."""
        if rope is None:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        if isinstance(rope, Arrangement):
            return self._project(rope.attend(*self._split(x, rope.rotation), self._attend), x)
        return self._project(self._attend(*self._split(x, rope), attn_mask, is_causal, rope), x)

    def _project(self, attended: Tensor, x: Tensor) -> Tensor:
        """The layers behind the attention, which the layer's input x may gate.

        Shapes: attended (batch, heads, tokens, head_dim), x (batch, tokens, dim) -> (batch, tokens, dim)
        """
        out = self.norm(attended.transpose(1, 2).flatten(2))  # type: ignore[operator]
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()  # type: ignore[operator]
        return self.proj_drop(self.proj(out))

    def _packed(self, x: Tensor) -> tuple[Tensor, bool]:
        """Queries, keys and values (batch, tokens, 3 * heads * head_dim), and whether nobody else holds them."""
        assert self.qkv is not None
        return self.qkv(x), is_unobserved(self.qkv)

    def _split(self, x: Tensor, position: OfOneGrid | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, tokens, head_dim), turned where there is a rotation."""
        if self.qkv is None:
            layers: Any = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        else:
            packed, own = self._packed(x)
            qkv = packed.unflatten(-1, (3, self.num_heads, self.head_dim))
            if isinstance(position, Rotation) and not self._normalizes():
                return rotate_qkv(qkv, position, overwrite=own)
            q, k, v = qkv.transpose(1, 3).unbind(2)
        if self._normalizes():
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[operator]
        if isinstance(position, Rotation):
            q, k = rotate(q, position), rotate(k, position)
        if k.shape[1] != self.num_heads:  # several heads of queries share one of keys and values
            k, v = (part.repeat_interleave(self.num_heads // part.shape[1], dim=1) for part in (k, v))
        return q, k, v

    def _normalizes(self) -> bool:
        """Whether queries and keys have norms."""
        return not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, position: OfOneGrid | None
    ) -> Tensor:
        factor = 1.0 if position is None else position.attention_scale
        if isinstance(factor, Tensor):  # samples differ in it, and no kernel takes more than one number
            q, factor = q * factor.to(q.dtype), 1.0
        scale = self.scale * factor
        terms = position if isinstance(position, RelativeTerms) else None
        if terms is not None:
            if is_causal and mask is not None:
                raise ValueError("is_causal cannot be combined with attn_mask; put the causal part into attn_mask")
            bias = terms.score_bias(q, k, scale)
            mask = resolve_self_attn_mask(q.shape[-2], bias, mask, is_causal)
            mask, is_causal = bias if mask is None else bias + mask, False
        values = None if terms is None else terms.values
        if values is not None or not self.fused_attn:
            scores = (q * scale) @ k.transpose(-2, -1)
            bias = resolve_self_attn_mask(q.shape[-2], scores, mask, is_causal)
            scores = scores if bias is None else scores + bias.to(scores.dtype)
            weights = self.attn_drop(scores.softmax(dim=-1))
            attended = weights @ v
            return attended if terms is None or values is None else attended + terms.value_term(weights)
        boolean = mask is not None and mask.dtype == torch.bool
        return attend(
            q,
            k,
            v,
            mask=mask if boolean else None,
            bias=None if boolean else mask,
            # torch's own default scale where nothing changes it, so that results stay equal to timm's to the last bit.
            scale=None if factor == 1.0 else scale,
            dropout=self.attn_drop.p if self.training else 0.0,
            is_causal=is_causal,
        )


class PositionedPlainAttention(PositionedAttention, Attention):
    """timm's Attention with positions."""


class PositionedAttentionRope(PositionedAttention, AttentionRope):
    """timm's AttentionRope with positions; its own rotation is not used."""


class PositionedEvaAttention(PositionedAttention, EvaAttention):
    """timm's EvaAttention with positions; its own rotation is not used."""

    def _packed(self, x: Tensor) -> tuple[Tensor, bool]:
        return packed_with_biases(self, x)


def packed_with_biases(layer: Any, x: Tensor) -> tuple[Tensor, bool]:
    """The projection of BEiT and EVA, whose biases stand apart: queries and values have one, keys have zeros."""
    if layer.q_bias is None:
        return layer.qkv(x), is_unobserved(layer.qkv)
    bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
    # Apart, or by the layer's weight alone: as timm does, whose hooks and last bits then stay.
    out = layer.qkv(x) + bias if layer.qkv_bias_separate else F.linear(x, layer.qkv.weight, bias)
    return out, True


ATTENTIONS: dict[type[nn.Module], type[PositionedAttention]] = {
    Attention: PositionedPlainAttention,
    AttentionRope: PositionedAttentionRope,
    EvaAttention: PositionedEvaAttention,
}
