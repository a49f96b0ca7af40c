"""timm's blocks as conversion needs them: they take positions, and patches of images of any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn

from vision_rope.convert.attention import Position


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


class PositionedBlock(Block):
    """timm's Block that hands positions to its attention."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, rope=rope)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PositionedResPostBlock(ResPostBlock):
    """timm's ResPostBlock (norms after the layers) that hands positions to its attention."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        attended = self.attn(x, attn_mask=attn_mask, is_causal=is_causal, rope=rope)
        x = x + self.drop_path1(self.norm1(attended))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class PositionedParallelThingsBlock(ParallelThingsBlock):
    """timm's ParallelThingsBlock (attentions side by side) that hands positions to each of them."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Position | None = None,
    ) -> Tensor:
        """Shapes: x (batch, tokens, dim) -> the same."""
        branches = []
        for branch in self.attns:
            attended = branch.attn(branch.norm(x), attn_mask=attn_mask, is_causal=is_causal, rope=rope)
            branches.append(branch.drop_path(branch.ls(attended)))
        x = x + torch.stack(branches).sum(dim=0)
        return x + torch.stack([ffn(x) for ffn in self.ffns]).sum(dim=0)


BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    Block: PositionedBlock,
    ResPostBlock: PositionedResPostBlock,
    ParallelThingsBlock: PositionedParallelThingsBlock,
    # These take positions already, and hand them to their attention.
    EvaBlock: EvaBlock,
    EvaBlockPostNorm: EvaBlockPostNorm,
}


def attention_layers(block: Any) -> list[nn.Module]:
    """The attention layers of a block of one of the kinds in BLOCKS."""
    if isinstance(block, ParallelThingsBlock):
        return [branch.attn for branch in block.attns]
    return [block.attn]
