"""Prompt encoder of SAM 2: points, boxes and masks become tokens and a map that the mask decoder reads.

Names of parameters are those of SAM 2 and SAM 2.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vision_rope.memory.attention import Grid
from vision_rope.memory.encoder import ChannelNorm

# Labels of points, as SAM numbers them. A box is its two corners.
OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT = range(4)
NO_POINT = -1
# Cells of a mask prompt along an axis for each cell of the grid.
MASK_CELLS = 4


class PromptEncoder(nn.Module):
    """Prompts as the mask decoder reads them.

    Args:
        dim: channels of tokens and maps.
        mask_channels: of the layer before the last that a mask goes through.

    Source: SAM (arXiv 2304.02643), appendix A; SAM 2 (arXiv 2408.00714).
    """

    def __init__(self, dim: int = 256, *, mask_channels: int = 16) -> None:
        super().__init__()
        self.pe_layer = RandomFourier(dim)
        self.point_embeddings = nn.ModuleList(nn.Embedding(1, dim) for _ in range(BOTTOM_RIGHT + 1))
        self.not_a_point_embed = nn.Embedding(1, dim)
        self.mask_downscaling = nn.Sequential(
            nn.Conv2d(1, mask_channels // 4, 2, stride=2),
            ChannelNorm(mask_channels // 4),
            nn.GELU(),
            nn.Conv2d(mask_channels // 4, mask_channels, 2, stride=2),
            ChannelNorm(mask_channels),
            nn.GELU(),
            nn.Conv2d(mask_channels, dim, 1),
        )
        self.no_mask_embed = nn.Embedding(1, dim)

    def embed_points(self, points: Tensor, labels: Tensor) -> Tensor:
        """A token a point, and one more that says that no box follows.

        Shapes: points (objects, n, 2) as x, y, labels int64 (objects, n) -> (objects, n + 1, dim)
        Units: points in shares of the frame, the middle of its first pixel at half a pixel
        """
        kinds = torch.cat([self.not_a_point_embed.weight, *(one.weight for one in self.point_embeddings)])  # type: ignore[list-item]
        end = labels.new_full((len(labels), 1), NO_POINT)
        labels = torch.cat((labels, end), dim=1)
        places = torch.cat((self.pe_layer(points), kinds.new_zeros(len(points), 1, kinds.shape[-1])), dim=1)
        return torch.where((labels == NO_POINT)[..., None], 0.0, places) + kinds[labels - NO_POINT]

    def embed_masks(self, mask_logits: Tensor | None, grid: Grid) -> Tensor:
        """A map of a mask, or the one that stands for none.

        Shapes: mask_logits (objects, 1, 4 * rows, 4 * columns) or None -> (objects or 1, dim, rows, columns)
        """
        if mask_logits is None:
            return self.no_mask_embed.weight[:, :, None, None].expand(-1, -1, *grid)
        return self.mask_downscaling(mask_logits.to(self.no_mask_embed.weight.dtype))

    def grid_embedding(self, grid: Grid) -> Tensor:
        """Where the cells of a grid are, in the same terms as points.

        Shapes: -> (1, rows * columns, dim)
        """
        rows, columns = grid
        like = self.pe_layer.positional_encoding_gaussian_matrix
        y = (torch.arange(rows, device=like.device) + 0.5) / rows
        x = (torch.arange(columns, device=like.device) + 0.5) / columns
        places = torch.stack((x.expand(rows, -1), y[:, None].expand(-1, columns)), dim=-1)
        return self.pe_layer(places.flatten(0, 1)[None])


class RandomFourier(nn.Module):
    """Sines and cosines of random directions: the encoding of places of SAM.

    Source: Tancik et al. (arXiv 2006.10739).
    """

    positional_encoding_gaussian_matrix: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim is {dim} and must be even: half of the channels are sines")
        self.register_buffer("positional_encoding_gaussian_matrix", torch.randn(2, dim // 2))

    def forward(self, places: Tensor) -> Tensor:
        """Shapes: places (..., 2) as x, y -> (..., dim)

        Units: places in shares of the frame
        """
        matrix = self.positional_encoding_gaussian_matrix
        # Not in bfloat16, which would move points by a 256th of the frame.
        wide = torch.promote_types(matrix.dtype, torch.float32)
        angles = (2 * math.pi) * ((2 * places.to(wide) - 1)[..., None] * matrix.to(wide)).sum(-2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(matrix.dtype)
