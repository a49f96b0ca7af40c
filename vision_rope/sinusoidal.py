"""Fixed sines and cosines of positions: the absolute encoding `Sinusoidal`, and what relative ones make of offsets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vision_rope.frequencies import angles, ladder
from vision_rope.positions import grid_positions

Order = Literal["timm", "vaswani", "simple-vit"]
ORDERS = ("timm", "vaswani", "simple-vit")


class Sinusoidal(nn.Module):
    """Fixed sines and cosines of each axis, added to patch embeddings; defined for any grid.

    Each axis has an equal part of the channels. It has no state, and no cast or move changes it.

    Args:
        embed_dim: number of channels.
        base: of the ladder of frequencies.
        axes: 1 for text, 2 for images, 3 for videos.
        order: of the channels. "timm": the sines of all axes, then their cosines (RoFormer's order for text, MoCo v3's
            for images). "vaswani": an axis after the other, sine and cosine of a frequency as neighbours.
            "simple-vit": columns before rows, the sines of an axis, then its cosines; its ladder ends at exactly
            1 / base.

    Raises: ValueError where the axes do not divide embed_dim into pairs, for a wrong base, or an unknown order.
    Source: Vaswani et al. (arXiv 1706.03762), section 3.5; an axis at a time as in MoCo v3 (arXiv 2104.02057);
        "simple-vit" as in Beyer et al. (arXiv 2205.01580) and vit-pytorch.
    """

    def __init__(self, embed_dim: int, base: float = 10000.0, axes: int = 2, order: Order = "timm") -> None:
        super().__init__()
        check_sinusoids(embed_dim, base, axes)
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; choose one of {', '.join(ORDERS)}")
        if order == "simple-vit" and embed_dim < 4 * axes:
            raise ValueError(
                f"embed_dim is {embed_dim}; the ladder of order 'simple-vit' has two ends, so that it needs at least "
                f"{4 * axes} channels"
            )
        self.embed_dim = embed_dim
        self.base = base
        self.axes = axes
        self.order = order

    def forward(self, *size: int, device: torch.device | str | None = None) -> Tensor:
        """Shapes: size (n), (h, w) or (t, h, w) -> (tokens, embed_dim) float32.

        Raises: ValueError where the size has another number of axes.
        """
        if len(size) != self.axes:
            raise ValueError(
                f"the grid {size} has {len(size)} axes and this encoding {self.axes}; give one length each"
            )
        return self.at(grid_positions(*size, device=device))

    def at(self, positions: Tensor) -> Tensor:
        """The encoding of tokens at these positions.

        Shapes: (tokens, axes) -> (tokens, embed_dim) float32
        """
        pairs = self.embed_dim // (2 * self.axes)
        # The ladder of Simple ViT reaches 1 / base on its last rung, the others' would on the one after it.
        base = self.base ** (pairs / (pairs - 1)) if self.order == "simple-vit" else self.base
        by_axis = [axis_angles(positions[:, axis], pairs, base) for axis in range(self.axes)]
        if self.order == "timm":
            joined = torch.cat(by_axis, dim=-1)
            table = torch.cat((joined.sin(), joined.cos()), dim=-1)
        elif self.order == "vaswani":
            table = torch.cat([torch.stack((a.sin(), a.cos()), dim=-1).flatten(-2) for a in by_axis], dim=-1)
        else:
            table = torch.cat([torch.cat((a.sin(), a.cos()), dim=-1) for a in reversed(by_axis)], dim=-1)
        return table.float()

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, base={self.base:g}, axes={self.axes}, order={self.order!r}"


def axis_angles(values: Tensor, pairs: int, base: float) -> Tensor:
    """Each value times each frequency of a ladder, exact for whatever dtype the model has.

    Shapes: (n) -> (n, pairs) float64, float32 on MPS.
    """
    dtype = torch.float32 if values.is_mps else torch.float64
    return angles(values[:, None], ladder(pairs, base).to(device=values.device, dtype=dtype)[None])


def check_sinusoids(embed_dim: int, base: float, axes: int) -> None:
    """Raise ValueError unless each axis gets whole pairs of sine and cosine."""
    if axes < 1:
        raise ValueError(f"axes is {axes}; positions have at least one axis")
    unit = 2 * axes
    if embed_dim < unit or embed_dim % unit:
        raise ValueError(
            f"embed_dim is {embed_dim}; sinusoids need a multiple of {unit}: sine and cosine for each of {axes} axes"
        )
    if not base > 0:
        raise ValueError(f"base is {base}; the base of a ladder must be a positive number, for instance 10000")
