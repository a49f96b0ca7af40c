"""What masked-patch prediction reaches without any training: the lines that a trained model is to be compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_rope.masking import patchify
from vision_rope.positions import grid_positions


class MeanColour(nn.Module):
    """Predicts, for every hidden patch, the mean colour of the visible patches of its image."""

    def __init__(self, patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.patch_size = patch_size

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """Shapes: as `MaskedModel.forward`."""
        visible = ~masks.flatten(1)
        weights = visible.to(images.dtype) / visible.sum(1, keepdim=True)
        colour = torch.einsum("bn,bnc->bc", weights, _patch_colours(images, self.patch_size))
        return _spread(colour[:, None].expand(-1, visible.shape[1], -1), self.patch_size)


class NeighbourAverage(nn.Module):
    """Predicts, for every hidden patch, the mean colours of visible patches, weighted by exp(-distance / 0.35 patches).

    Units: reach, 0.35 where nothing else is given, in patches; the distance is that of the patches' centres.
    """

    def __init__(self, patch_size: tuple[int, int], reach: float = 0.35) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.reach = reach

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """Shapes: as `MaskedModel.forward`."""
        positions = grid_positions(*masks.shape[1:], device=images.device)
        nearness = -torch.cdist(positions, positions) / self.reach
        # A softmax over the visible patches: far ones would underflow where none is near.
        weights = nearness.masked_fill(masks.flatten(1)[:, None], -torch.inf).softmax(-1)
        return _spread(weights.to(images.dtype) @ _patch_colours(images, self.patch_size), self.patch_size)


def _patch_colours(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Shapes: images (batch, channels, height, width) -> mean colours (batch, patches, channels)."""
    pixels = patch_size[0] * patch_size[1]
    return patchify(images, patch_size).unflatten(-1, (pixels, images.shape[1])).mean(-2)


def _spread(colours: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Shapes: (batch, patches, channels) -> patches of one colour (batch, patches, pixels of a patch)."""
    return colours.repeat(1, 1, patch_size[0] * patch_size[1])


REFERENCES: dict[str, type[MeanColour] | type[NeighbourAverage]] = {
    "visible mean": MeanColour,
    "neighbour average": NeighbourAverage,
}
