"""Memory encoder of SAM 2: a frame's features and the mask found on it become what the bank stores.

Names of parameters are those of SAM 2 and SAM 2.1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Four convolutions of stride 2: a mask has 16 pixels for each cell of the grid along an axis.
MASK_CHANNELS = (1, 4, 16, 64, 256)
MASK_STRIDE = 16


class MemoryEncoder(nn.Module):
    """Features of a frame together with its mask, in the narrow form that is stored.

    Args:
        dim: channels of the frame's features, as the backbone gives them and before any memory was read.
        memory_dim: channels of what is stored.
        scale, bias: applied to the probabilities of the mask (SAM 2: from -10 to 10).

    Source: SAM 2 (arXiv 2408.00714), section 4; blocks of ConvNeXt (arXiv 2201.03545).
    """

    def __init__(self, dim: int = 256, memory_dim: int = 64, *, scale: float = 20.0, bias: float = -10.0) -> None:
        super().__init__()
        self.dim = dim
        self.memory_dim = memory_dim
        self.scale = scale
        self.bias = bias
        self.mask_downsampler = MaskDownsampler(dim)
        self.pix_feat_proj = nn.Conv2d(dim, dim, 1)
        self.fuser = Fuser(dim)
        # SAM 2 has no projection, and no weights of one, where nothing gets narrower.
        self.out_proj: nn.Module = nn.Identity() if memory_dim == dim else nn.Conv2d(dim, memory_dim, 1)

    def forward(self, features: Tensor, mask_logits: Tensor, *, binarize: bool = False) -> Tensor:
        """Encode a frame and the masks of its objects.

        Inputs are cast to the dtype of the weights. Features of one frame need not be repeated for its objects.

        Args:
            binarize: take the mask as it is, inside or outside, and not its probabilities; SAM 2 does so in evaluation
                on frames that were prompted by points.

        Shapes: features (batch or 1, dim, h, w), mask_logits (batch, 1, 16 * h, 16 * w) -> (batch, memory_dim, h, w)
        Raises: ValueError where the masks do not fit the grid of the features.
        """
        expected = (1, MASK_STRIDE * features.shape[-2], MASK_STRIDE * features.shape[-1])
        if mask_logits.ndim != 4 or mask_logits.shape[1:] != expected:
            raise ValueError(
                f"mask_logits has shape {tuple(mask_logits.shape)}; features of the grid {tuple(features.shape[-2:])} "
                f"need (batch, {', '.join(map(str, expected))}): resize the masks to {MASK_STRIDE} times the grid"
            )
        dtype = self.pix_feat_proj.weight.dtype
        mask = (mask_logits > 0).to(dtype) if binarize else mask_logits.to(dtype).sigmoid()
        x = self.pix_feat_proj(features.to(dtype)) + self.mask_downsampler(mask * self.scale + self.bias)
        return self.out_proj(self.fuser(x))


class MaskDownsampler(nn.Module):
    """Convolutions that bring a mask to the grid of the features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(MASK_CHANNELS):
            layers += [nn.Conv2d(narrow, wide, 3, stride=2, padding=1), ChannelNorm(wide), nn.GELU()]
        self.encoder = nn.Sequential(*layers, nn.Conv2d(MASK_CHANNELS[-1], dim, 1))

    def forward(self, mask: Tensor) -> Tensor:
        """Shapes: (batch, 1, 16 * h, 16 * w) -> (batch, dim, h, w)"""
        return self.encoder(mask)


class Fuser(nn.Module):
    """Two ConvNeXt blocks one after another."""

    def __init__(self, dim: int, depth: int = 2) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(FuserBlock(dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, dim, h, w) -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


class FuserBlock(nn.Module):
    """ConvNeXt block: a wide depthwise convolution and a perceptron, scaled and added to what came in."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = ChannelNorm(dim)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, dim, h, w) -> the same."""
        hidden = self.norm(self.dwconv(x)).permute(0, 2, 3, 1)
        hidden = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(hidden)))
        return x + hidden.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, dim, h, w) -> the same."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
