"""Masked patches: which are hidden, what is to be predicted for them, and pictures made of predictions."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

PixelTarget = Literal["pixels", "patch-normalized"]


def count_masked(grid: tuple[int, int], ratio: float) -> int:
    """How many of a grid's patches are hidden: the ratio of them, but at least one is and one is not.

    Raises:
        ValueError: for a ratio outside (0, 1) and a grid of fewer than two patches.
    """
    if not 0 < ratio < 1:
        raise ValueError(f"ratio is {ratio}, but the share of masked patches lies between 0 and 1, both left out")
    num_patches = grid[0] * grid[1]
    if num_patches < 2:
        raise ValueError(f"grid is {grid[0]} x {grid[1]}, but at least one patch must be masked and one visible")
    return min(max(round(ratio * num_patches), 1), num_patches - 1)


def draw_masks(
    batch: int, grid: tuple[int, int], *, ratio: float, block: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Draw which patches are hidden, the same number in every image.

    Args:
        batch: number of images.
        grid: (rows, columns) of patches.
        ratio: share of hidden patches.
        block: side, in patches, of the squares that are hidden together; the last square of an image is cut where
            the number of hidden patches needs it, and squares at the border where the grid ends.
        generator: on the CPU; none takes torch's own.

    Shapes:
        -> bool (batch, rows, columns) on the CPU, True where hidden

    Raises:
        ValueError: for a ratio outside (0, 1), a block below 1 or of the whole grid, a grid of fewer than two patches.
    Source: MAE (arXiv 2111.06377) draws patches; SimMIM (arXiv 2111.09886), section 3.2, squares of patches.
    """
    count = count_masked(grid, ratio)
    if block < 1:
        raise ValueError(f"block is {block}, but the side of a masked square is at least 1 patch")
    rows, columns = grid
    if block >= max(grid):
        raise ValueError(
            f"block is {block}, but a grid of {rows} x {columns} patches is one such square, of which all images would "
            "have the same part hidden; choose a smaller block"
        )
    squares = torch.rand(batch, -(-rows // block), -(-columns // block), generator=generator)
    order = squares.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :rows, :columns].flatten(1)
    # A stable sort keeps the patches of a square together, in which the last one is cut.
    hidden = order.sort(dim=1, stable=True).indices[:, :count]
    masks = torch.zeros(batch, rows * columns, dtype=torch.bool).scatter_(1, hidden, True)
    return masks.unflatten(1, grid)


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Shapes: images (batch, channels, rows * patch, columns * patch) -> (batch, rows * columns, patch pixels).

    Pixels of a patch run by row, column, channel.
    """
    height, width = patch_size
    return rearrange(images, "b c (r h) (s w) -> b (r s) (h w c)", h=height, w=width)


def unpatchify(patches: Tensor, grid: tuple[int, int], patch_size: tuple[int, int]) -> Tensor:
    """The inverse of `patchify`.

    Shapes: (batch, rows * columns, patch pixels) -> (batch, channels, rows * patch, columns * patch)
    """
    (rows, columns), (height, width) = grid, patch_size
    return rearrange(patches, "b (r s) (h w c) -> b c (r h) (s w)", r=rows, s=columns, h=height, w=width)


def pixel_targets(patches: Tensor, target: PixelTarget) -> Tensor:
    """What is to be predicted: the pixels of normalised images, or those of each patch with mean 0 and variance 1.

    Shapes: (batch, patches, pixels) -> the same
    Raises: ValueError for an unknown target.
    Source: MAE (arXiv 2111.06377), section 3, "reconstruction target".
    """
    if target not in get_args(PixelTarget):
        raise ValueError(f"target is {target!r}; choose one of {', '.join(get_args(PixelTarget))}")
    if target == "pixels":
        return patches
    mean, deviation = _patch_statistics(patches)
    return (patches - mean) / deviation


def paste(
    images: Tensor, predictions: Tensor, masks: Tensor, patch_size: tuple[int, int], target: PixelTarget
) -> Tensor:
    """The images with their hidden patches replaced by predictions.

    Predictions of normalised patches get the mean and the variance of the true patch, as in MAE's pictures.

    Shapes: images (batch, channels, height, width), predictions (batch, patches, pixels), masks (batch, rows,
        columns) -> (batch, channels, height, width)
    """
    patches = patchify(images, patch_size)
    if target == "patch-normalized":
        mean, deviation = _patch_statistics(patches)
        predictions = predictions * deviation + mean
    mixed = torch.where(masks.flatten(1)[..., None], predictions.to(patches.dtype), patches)
    return unpatchify(mixed, (masks.shape[1], masks.shape[2]), patch_size)


def _patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()
