"""What masked-patch prediction reaches without any training: the lines that a trained model is to be compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_rope.masking import patchify
from vision_rope.positions import grid_positions

Seconds = Tensor | None


class MeanColour(nn.Module):
    """Predicts, for every hidden patch, the mean colour of the visible patches of its image.

    Of a clip those of all frames.
    """

    def __init__(self, patch_size: Sequence[int]) -> None:
        super().__init__()
        self.patch_size = tuple(patch_size)

    def forward(self, images: Tensor, masks: Tensor, seconds: Seconds = None) -> Tensor:
        """Shapes: as `MaskedModel.forward`."""
        visible = ~masks.flatten(1)
        weights = visible.to(images.dtype) / visible.sum(1, keepdim=True)
        colour = torch.einsum("bn,bnc->bc", weights, _patch_colours(images, self.patch_size))
        return _spread(colour[:, None].expand(-1, visible.shape[1], -1), self.patch_size)


class NeighbourAverage(nn.Module):
    """Predicts, for every hidden patch, the mean colours of visible patches, weighted by exp(-distance / 0.35 patches).

    Args:
        reach: in patches; the distance is that of the patches' centres.
        step: of a clip: what one step in time counts in that distance, in patches; on films at 10 frames a second, in
            tubelets of 2, less than 1 explains more.
    """

    def __init__(self, patch_size: Sequence[int], reach: float = 0.35, step: float = 0.5) -> None:
        super().__init__()
        self.patch_size = tuple(patch_size)
        self.reach = reach
        self.step = step

    def forward(self, images: Tensor, masks: Tensor, seconds: Seconds = None) -> Tensor:
        """Shapes: as `MaskedModel.forward`."""
        positions = grid_positions(*masks.shape[1:], device=images.device)
        if positions.shape[1] == 3:
            positions[:, 0] *= self.step
        nearness = -torch.cdist(positions, positions) / self.reach
        # A softmax over the visible patches: far ones would underflow where none is near.
        weights = nearness.masked_fill(masks.flatten(1)[:, None], -torch.inf).softmax(-1)
        return _spread(weights.to(images.dtype) @ _patch_colours(images, self.patch_size), self.patch_size)


class NearestFrame(nn.Module):
    """Copies, for every hidden tubelet, the nearest in time that is visible at its place; of two as near the earlier.

    Places that are hidden in all steps get the neighbour average.
    """

    def __init__(self, patch_size: Sequence[int]) -> None:
        super().__init__()
        self.patch_size = tuple(patch_size)
        self.elsewhere = NeighbourAverage(patch_size)

    def forward(self, images: Tensor, masks: Tensor, seconds: Seconds = None) -> Tensor:
        """Shapes: as `MaskedModel.forward`, clips alone."""
        steps = torch.arange(masks.shape[1], device=masks.device)
        # From every step (rows) to every other (columns); argmin takes the first of equals.
        distance = (steps[:, None] - steps).abs().to(torch.float32)
        hidden = masks.flatten(2)
        nearest = distance[:, :, None].expand(len(masks), -1, -1, hidden.shape[2])
        nearest = nearest.masked_fill(hidden[:, None], torch.inf).argmin(2)
        tubelets = patchify(images, self.patch_size).unflatten(1, hidden.shape[1:])
        copied = tubelets.gather(1, nearest[..., None].expand_as(tubelets)).flatten(1, 2)
        never = hidden.all(1, keepdim=True).expand_as(hidden).flatten(1)
        return torch.where(never[..., None], self.elsewhere(images, masks), copied)


def _patch_colours(images: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Shapes: images (batch, channels, height, width) -> mean colours (batch, patches, channels)."""
    return patchify(images, patch_size).unflatten(-1, (math.prod(patch_size), images.shape[1])).mean(-2)


def _spread(colours: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Shapes: (batch, patches, channels) -> patches of one colour (batch, patches, pixels of a patch)."""
    return colours.repeat(1, 1, math.prod(patch_size))


REFERENCES: dict[str, type[MeanColour] | type[NeighbourAverage] | type[NearestFrame]] = {
    "visible mean": MeanColour,
    "neighbour average": NeighbourAverage,
    "nearest frame": NearestFrame,
}


def create_references(patch_size: Sequence[int]) -> dict[str, nn.Module]:
    """All of the table; for images those that need no frames."""
    return {
        name: reference(patch_size)
        for name, reference in REFERENCES.items()
        if len(patch_size) == 3 or reference is not NearestFrame
    }
