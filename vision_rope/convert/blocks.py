"""timm's layers as conversion needs them: attention and blocks that take positions, patches of images of any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, PatchEmbed
from timm.layers.attention import resolve_self_attn_mask
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn

from vision_rope.attention import attend
from vision_rope.relative import RelativeTerms
from vision_rope.rotation import Rotation, rotate, rotate_qkv

Position = Rotation | RelativeTerms


class AnySizePatchEmbed(PatchEmbed):
    """timm's PatchEmbed that leaves patches as a grid, for images of any size.

    The model checks sizes itself: timm's own messages would tie compiled and exported graphs to one size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: images (batch, channels, height, width) -> (batch, rows, columns, dim)."""
        if self.dynamic_img_pad:
            height, width = x.shape[-2:]
            x = F.pad(x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class PositionedAttention(Attention):
    """timm's Attention with a rotation of queries and keys, or with what relative positions add to it."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        position: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> (batch, tokens, dim)."""
        if position is None:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        return self._project(self._attend(*self._split(qkv, position), attn_mask, is_causal, position), x)

    def _project(self, attended: Tensor, x: Tensor) -> Tensor:
        """The layers behind the attention, which the layer's input x may gate.

        Shapes: attended (batch, heads, tokens, head_dim), x (batch, tokens, dim) -> (batch, tokens, dim)
        """
        out = self.norm(attended.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _split(self, qkv: Tensor, position: Position | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, tokens, head_dim), turned where there is a rotation."""
        if (
            isinstance(position, Rotation)
            and isinstance(self.q_norm, nn.Identity)
            and isinstance(self.k_norm, nn.Identity)
        ):
            return rotate_qkv(qkv, position, overwrite=_is_unobserved(self.qkv))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(position, Rotation):
            q, k = rotate(q, position), rotate(k, position)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, position: Position
    ) -> Tensor:
        scale = self.scale * position.attention_scale
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
            scale=None if position.attention_scale == 1.0 else scale,
            dropout=self.attn_drop.p if self.training else 0.0,
            is_causal=is_causal,
        )


def _is_unobserved(layer: nn.Module) -> bool:
    """Whether a layer's output is its caller's alone: no hook sees it, and no layer inside hands it on."""
    hooks = layer._forward_hooks or torch.nn.modules.module._global_forward_hooks
    return type(layer) is nn.Linear and not hooks


class PositionedBlock(Block):
    """timm's Block that hands positions to its attention."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        position: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PositionedResPostBlock(ResPostBlock):
    """timm's ResPostBlock (norms after the layers) that hands positions to its attention."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        position: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        attended = self.attn(x, attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(self.norm1(attended))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class PositionedParallelThingsBlock(ParallelThingsBlock):
    """timm's ParallelThingsBlock (attentions side by side) that hands positions to each of them."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        position: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        branches = []
        for branch in self.attns:
            attended = branch.attn(branch.norm(x), attn_mask=attn_mask, is_causal=is_causal, position=position)
            branches.append(branch.drop_path(branch.ls(attended)))
        x = x + torch.stack(branches).sum(dim=0)
        return x + torch.stack([ffn(x) for ffn in self.ffns]).sum(dim=0)


BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    Block: PositionedBlock,
    ResPostBlock: PositionedResPostBlock,
    ParallelThingsBlock: PositionedParallelThingsBlock,
}


def attention_layers(block: Any) -> list[nn.Module]:
    """The attention layers of a block of one of the kinds in BLOCKS."""
    if isinstance(block, ParallelThingsBlock):
        return [branch.attn for branch in block.attns]
    return [block.attn]
