"""Masked patches: which are hidden, what is to be predicted for them, and pictures made of predictions.

A patch is (height, width) pixels of an image or a tubelet, (frames, height, width), of a clip; grids have these axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

PixelTarget = Literal["pixels", "patch-normalized"]


# How pictures with these axes are cut, and how patches with their pixels are laid out.
LAYOUTS = {
    2: ("b c (r h) (s w)", "b (r s) (h w c)", "rs", "hw"),
    3: ("b c (t f) (r h) (s w)", "b (t r s) (f h w c)", "trs", "fhw"),
}


def count_masked(grid: Sequence[int], ratio: float) -> int:
    """How many of a grid's patches are hidden: the ratio of them, but at least one is and one is not.

    Raises:
        ValueError: for a ratio outside (0, 1) and a grid of fewer than two patches.
    """
    if not 0 < ratio < 1:
        raise ValueError(f"ratio is {ratio}, but the share of masked patches lies between 0 and 1, both left out")
    num_patches = math.prod(grid)
    if num_patches < 2:
        raise ValueError(f"grid is {_join(grid)}, but at least one patch must be masked and one visible")
    return min(max(round(ratio * num_patches), 1), num_patches - 1)


def draw_masks(
    batch: int,
    grid: Sequence[int],
    *,
    ratio: float,
    block: int = 1,
    block_steps: int | None = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw which patches are hidden, the same number in every image or clip.

    Args:
        batch: number of images or clips.
        grid: (rows, columns) of patches, or (steps, rows, columns).
        ratio: share of hidden patches.
        block: side, in patches, of the squares that are hidden together; the last square of an image is cut where
            the number of hidden patches needs it, and squares at the border where the grid ends.
        block_steps: of a clip: steps that such a square is hidden for, which makes it a block of space and time; none
            hides it in all steps.
        generator: on the CPU; none takes torch's own.

    Shapes:
        -> bool (batch, *grid) on the CPU, True where hidden

    Raises:
        ValueError: for a ratio outside (0, 1), blocks below 1 or of the whole grid, a grid of fewer than two patches.
    Source: MAE (arXiv 2111.06377) draws patches; SimMIM (arXiv 2111.09886), section 3.2, squares of patches; VideoMAE
        (arXiv 2203.12602), section 3.2, places in all steps.
    """
    count = count_masked(grid, ratio)
    if block < 1:
        raise ValueError(f"block is {block}, but the side of a masked square is at least 1 patch")
    if block_steps is not None and block_steps < 1:
        raise ValueError(f"block_steps is {block_steps}, but a block lasts at least 1 step; none hides all steps")
    sides = (*(block_steps or grid[0] for _ in grid[:-2]), block, block)
    if all(side >= length for side, length in zip(sides, grid, strict=True)):
        raise ValueError(
            f"block is {block}, but a grid of {_join(grid)} patches is one such square, of which all images would "
            "have the same part hidden; choose a smaller block"
        )
    blocks = [-(-length // side) for length, side in zip(grid, sides, strict=True)]
    order = torch.rand(batch, *blocks, generator=generator)
    for axis, (length, side) in enumerate(zip(grid, sides, strict=True), start=1):
        order = order.repeat_interleave(side, axis).narrow(axis, 0, length)
    # A stable sort keeps the patches of a block together, in which the last one is cut.
    hidden = order.flatten(1).sort(dim=1, stable=True).indices[:, :count]
    masks = torch.zeros(batch, math.prod(grid), dtype=torch.bool).scatter_(1, hidden, True)
    return masks.unflatten(1, tuple(grid))


def patchify(images: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Shapes: images (batch, channels, rows * patch, columns * patch) -> (batch, rows * columns, patch pixels).

    Clips have an axis more in front of rows and pixels: steps and the frames of a tubelet. Pixels of a patch run by
    frame, row, column, channel.
    """
    whole, cut, _, pixels = LAYOUTS[len(patch_size)]
    return rearrange(images, f"{whole} -> {cut}", **dict(zip(pixels, patch_size, strict=True)))


def unpatchify(patches: Tensor, grid: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """The inverse of `patchify`.

    Shapes: (batch, rows * columns, patch pixels) -> (batch, channels, rows * patch, columns * patch)
    """
    whole, cut, places, pixels = LAYOUTS[len(patch_size)]
    lengths = zip(places + pixels, (*grid, *patch_size), strict=True)
    return rearrange(patches, f"{cut} -> {whole}", **dict(lengths))


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


def paste(images: Tensor, predictions: Tensor, masks: Tensor, patch_size: Sequence[int], target: PixelTarget) -> Tensor:
    """The images with their hidden patches replaced by predictions.

    Predictions of normalised patches get the mean and the variance of the true patch, as in MAE's pictures.

    Shapes: images (batch, channels, height, width), predictions (batch, patches, pixels), masks (batch, rows,
        columns) -> (batch, channels, height, width); clips have the axes of time too
    """
    patches = patchify(images, patch_size)
    if target == "patch-normalized":
        mean, deviation = _patch_statistics(patches)
        predictions = predictions * deviation + mean
    mixed = torch.where(masks.flatten(1)[..., None], predictions.to(patches.dtype), patches)
    return unpatchify(mixed, masks.shape[1:], patch_size)


def _patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def _join(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))
