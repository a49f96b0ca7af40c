"""The position encodings that RoPE is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_rope.frequencies import angles, ladder
from vision_rope.positions import grid_positions


class Sinusoidal(nn.Module):
    """Fixed sines and cosines of row and column, added to patch embeddings; defined for any grid.

    A quarter of the channels each, in timm's order: sines of the row, of the column, cosines of the row, of the column.
    It has no state, and no cast or move changes it.

    Raises: ValueError where embed_dim is not a multiple of 4.
    Source: Vaswani et al. (arXiv 1706.03762), section 3.5; an axis at a time as in MoCo v3 (arXiv 2104.02057).
    """

    def __init__(self, embed_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if embed_dim < 4 or embed_dim % 4:
            raise ValueError(
                f"embed_dim is {embed_dim}; sinusoidal needs a multiple of 4: sine and cosine for rows and columns"
            )
        if not base > 0:
            raise ValueError(f"base is {base}; the base of a ladder must be a positive number, for instance 10000")
        self.embed_dim = embed_dim
        self.base = base

    def forward(self, h: int, w: int, device: torch.device | str | None = None) -> Tensor:
        """Shapes: (h, w) -> (h * w, embed_dim) float32."""
        positions = grid_positions(h, w, device=device)
        rungs = ladder(self.embed_dim // 4, self.base)
        rungs = rungs.to(device=positions.device, dtype=torch.float32 if positions.is_mps else torch.float64)
        angle = torch.cat([angles(positions[:, axis, None], rungs[None]) for axis in (0, 1)], dim=-1)
        return torch.cat((angle.sin(), angle.cos()), dim=-1).float()

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, base={self.base:g}"


ENCODINGS: dict[str, str] = {
    "none": "no position at all: the model sees a bag of patches",
    "learned": "a learned vector a patch (the backbone's own), resampled to new grids",
    "sinusoidal": "fixed sines and cosines of row and column",
}
