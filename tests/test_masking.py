"""Masks against exact counts and closed forms, patches against torch's unfold, targets against layer norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vision_rope.masking import count_masked, draw_masks, paste, patchify, pixel_targets, unpatchify


def drawn(*args, seed: int = 0, **options) -> Tensor:
    return draw_masks(*args, **options, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("grid", "ratio", "count"),
    [
        ((6, 6), 0.5, 18),
        ((14, 14), 0.75, 147),
        ((3, 5), 0.3, 4),  # 4.5 goes to the even number
        ((2, 7), 1e-9, 1),
        ((2, 7), 1 - 1e-9, 13),
        ((1, 2), 0.01, 1),
        ((2, 1), 0.99, 1),
    ],
)
@pytest.mark.parametrize("batch", [1, 5])
def test_every_image_has_exactly_its_number_of_hidden_patches(grid, ratio, count, batch):
    assert count_masked(grid, ratio) == count
    masks = drawn(batch, grid, ratio=ratio)
    assert masks.shape == (batch, *grid)
    assert masks.dtype == torch.bool
    assert masks.device.type == "cpu"
    assert masks.flatten(1).sum(1).tolist() == [count] * batch


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, 1.5, math.nan, math.inf])
def test_ratios_that_hide_nothing_or_all_are_refused(ratio):
    with pytest.raises(ValueError, match=r"ratio is .*lies between 0 and 1"):
        draw_masks(2, (4, 4), ratio=ratio)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((1, 1), 1, "grid is 1 x 1, but at least one patch must be masked and one visible"),
        ((0, 5), 1, "grid is 0 x 5"),
        ((4, 4), 0, "block is 0, but the side of a masked square is at least 1 patch"),
        ((4, 4), 4, "a grid of 4 x 4 patches is one such square"),
        ((2, 3), 7, "a grid of 2 x 3 patches is one such square"),
    ],
)
def test_grids_and_blocks_that_leave_no_choice_are_refused(grid, block, message):
    with pytest.raises(ValueError, match=message):
        draw_masks(2, grid, ratio=0.5, block=block)


def test_hidden_patches_are_a_uniform_choice():
    """Shares of places and of pairs of places: k / n and k (k - 1) / (n (n - 1)), within five standard errors."""
    images, count, places = 6000, 8, 20
    hidden = drawn(images, (4, 5), ratio=0.4).flatten(1).double()
    share = count / places
    assert (hidden.mean(0) - share).abs().max() < 5 * math.sqrt(share * (1 - share) / images)
    pairs = (hidden.T @ hidden / images)[~torch.eye(places, dtype=torch.bool)]
    share = count * (count - 1) / (places * (places - 1))
    assert (pairs - share).abs().max() < 5 * math.sqrt(share * (1 - share) / images)


@pytest.mark.parametrize(
    ("grid", "block", "ratio"),
    [((6, 6), 2, 0.5), ((6, 8), 2, 0.4), ((7, 5), 2, 0.5), ((9, 4), 3, 0.7), ((5, 5), 4, 0.5), ((3, 8), 4, 0.6)],
)
def test_blocks_are_whole_squares_of_the_grid_but_for_one(grid, block, ratio):
    rows, columns = grid
    patterns = set()
    for mask in drawn(40, grid, ratio=ratio, block=block).numpy():
        assert mask.sum() == round(ratio * rows * columns)
        cut = 0
        for top in range(0, rows, block):
            for left in range(0, columns, block):
                square = mask[top : top + block, left : left + block]
                if 0 < square.sum() < square.size:
                    cut += 1
                    # Its hidden patches are the first ones, row by row.
                    assert square.ravel()[: square.sum()].all()
        assert cut <= 1
        patterns.add(mask.tobytes())
    assert len(patterns) > 1


def test_squares_are_a_uniform_choice():
    """2 of the 6 squares of a 4 x 6 grid, 15 choices."""
    masks = drawn(3000, (4, 6), ratio=1 / 3, block=2)
    squares = F.avg_pool2d(masks.float()[:, None], 2).flatten(1)
    assert set(squares.unique().tolist()) == {0.0, 1.0}
    kinds, counts = squares.unique(dim=0, return_counts=True)
    assert len(kinds) == 15
    assert (counts / 3000 - 1 / 15).abs().max() < 5 * math.sqrt(14 / 15**2 / 3000)


def test_a_generator_repeats_itself_and_leaves_torchs_own_alone():
    before = torch.get_rng_state()
    first, again, other = (drawn(4, (5, 7), ratio=0.5, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.flatten(1).unique(dim=0)) == 4, "images have different masks"
    draw_masks(1, (5, 7), ratio=0.5)
    assert not torch.equal(before, torch.get_rng_state()), "without one torch's own is taken"


@pytest.mark.parametrize("patch_size", [(4, 4), (8, 4), (2, 3), (1, 1)])
@pytest.mark.parametrize("channels", [3, 1])
def test_patches_equal_torchs_unfold(patch_size, channels):
    height, width = patch_size
    images = torch.randn(2, channels, 3 * height, 5 * width)
    patches = patchify(images, patch_size)
    assert patches.shape == (2, 15, height * width * channels)
    # unfold: (batch, channel * row * column, places)
    unfolded = F.unfold(images, patch_size, stride=patch_size).unflatten(1, (channels, height * width))
    torch.testing.assert_close(patches, unfolded.permute(0, 3, 2, 1).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(unpatchify(patches, (3, 5), patch_size), images, rtol=0, atol=0)


def test_places_run_row_by_row_and_pixels_by_row_column_channel():
    images = torch.arange(2 * 3 * 8 * 12.0).view(2, 3, 8, 12)
    patches = patchify(images, (4, 2))
    for row, column, y, x, channel in [(0, 0, 0, 0, 0), (1, 4, 3, 1, 2), (0, 5, 2, 0, 1), (1, 0, 1, 1, 0)]:
        pixel = images[1, channel, 4 * row + y, 2 * column + x]
        assert patches[1, 6 * row + column, (2 * y + x) * 3 + channel] == pixel


def test_pixels_themselves_are_the_plain_target():
    patches = torch.randn(2, 6, 12)
    assert pixel_targets(patches, "pixels") is patches
    with pytest.raises(ValueError, match="target is 'pixel'; choose one of pixels, patch-normalized"):
        pixel_targets(patches, "pixel")  # type: ignore[arg-type]


def test_normalised_targets_equal_layer_norm_with_the_sample_variance():
    patches = 3 * torch.randn(2, 6, 48) + torch.randn(2, 6, 1)
    share = 47 / 48
    expected = F.layer_norm(patches, (48,), eps=1e-6 * share) * math.sqrt(share)
    targets = pixel_targets(patches, "patch-normalized")
    torch.testing.assert_close(targets, expected)
    array = patches.double().numpy()
    by_hand = (array - array.mean(-1, keepdims=True)) / np.sqrt(array.var(-1, ddof=1, keepdims=True) + 1e-6)
    torch.testing.assert_close(targets, torch.from_numpy(by_hand).float())


def test_flat_patches_have_a_target_of_zero():
    assert pixel_targets(torch.full((1, 2, 12), 0.7), "patch-normalized").abs().max() < 1e-3


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
@pytest.mark.parametrize("patch_size", [(4, 4), (8, 4)])
def test_pasting_fills_hidden_patches_alone(target, patch_size):
    height, width = patch_size
    images = torch.randn(2, 3, 2 * height, 3 * width)
    masks = drawn(2, (2, 3), ratio=0.5)
    predictions = torch.randn(2, 6, height * width * 3)
    pasted = paste(images, predictions, masks, patch_size, target)
    for place in range(6):
        row, column = divmod(place, 3)
        area = (slice(height * row, height * (row + 1)), slice(width * column, width * (column + 1)))
        for image in range(2):
            true, mine = images[image, :, *area], pasted[image, :, *area]
            if not masks[image, row, column]:
                torch.testing.assert_close(mine, true, rtol=0, atol=0)
                continue
            expected = predictions[image, place].view(height, width, 3).permute(2, 0, 1)
            if target == "patch-normalized":
                expected = expected * (true.var() + 1e-6).sqrt() + true.mean()
            torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
def test_pasting_the_truth_gives_the_image_back(target):
    images = torch.randn(2, 3, 8, 12)
    truth = pixel_targets(patchify(images, (4, 4)), target)
    pasted = paste(images, truth, drawn(2, (2, 3), ratio=0.5), (4, 4), target)
    torch.testing.assert_close(pasted, images)
    low = paste(images, truth.bfloat16(), drawn(2, (2, 3), ratio=0.5), (4, 4), target)
    assert low.dtype == images.dtype
    torch.testing.assert_close(low, images, rtol=0.02, atol=0.02)
