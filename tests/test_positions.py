"""Positions: grids, normalised coordinates, prefix tokens and augmentation, against closed forms and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.positions import Coordinates, mesh, rescaled_positions


@pytest.mark.parametrize("size", [(5,), (3, 5), (5, 3), (2, 3, 4), (1, 1), (7, 28), (14, 14)])
def test_grid_is_row_major_with_axes_in_order(size):
    positions = vr.grid_positions(*size)
    assert positions.dtype == torch.float32
    expected = [list(index) for index in torch.cartesian_prod(*map(torch.arange, size)).reshape(-1, len(size)).tolist()]
    assert positions.tolist() == expected


def test_rows_and_columns_are_not_swapped():
    """Failure class 1: the table of (3, 5) is the transpose of that of (5, 3), and not the same."""
    tall, wide = vr.grid_positions(5, 3), vr.grid_positions(3, 5)
    assert not torch.equal(tall, wide)
    assert torch.equal(wide.unflatten(0, (3, 5)).transpose(0, 1).flip(-1).flatten(0, 1), tall)


@pytest.mark.parametrize(("normalize", "lengths"), [("separate", (3, 5)), ("min", (3, 3)), ("max", (5, 5))])
def test_centred_positions_are_cell_centres(normalize, lengths):
    expected = [
        [2 * (row + 0.5) / lengths[0] - 1, 2 * (column + 0.5) / lengths[1] - 1]
        for row in range(3)
        for column in range(5)
    ]
    assert_close(vr.centred_positions(3, 5, normalize=normalize), torch.tensor(expected))


def test_rescaled_positions_span_the_reference_grid():
    positions = rescaled_positions(4, 8, reference=(16, 16))
    assert positions[-1].tolist() == [12.0, 14.0]
    assert torch.equal(rescaled_positions(16, 16, reference=(16, 16)), vr.grid_positions(16, 16))


def test_prefix_rows_are_zero_at_either_end():
    """Failure class 10."""
    grid = vr.grid_positions(2, 2) + 1
    front, end = vr.with_prefix(grid, 2), vr.with_prefix(grid, 3, where="end")
    assert not front[:2].any()
    assert torch.equal(front[2:], grid)
    assert not end[-3:].any()
    assert torch.equal(end[:4], grid)
    batched = vr.with_prefix(grid.expand(5, 4, 2), 1)
    assert batched.shape == (5, 5, 2)


def test_augmentation_is_shift_then_jitter_then_rescale():
    positions = vr.centred_positions(2, 3)

    def draw(seed):
        return torch.Generator().manual_seed(seed)

    moved = vr.augment_positions(positions, shift=0.5, jitter=2.0, rescale=3.0, generator=draw(1))
    numbers = draw(1)
    shift = torch.empty(2).uniform_(-0.5, 0.5, generator=numbers)
    jitter = torch.empty(2).uniform_(-math.log(2), math.log(2), generator=numbers).exp()
    rescale = torch.empty(1).uniform_(-math.log(3), math.log(3), generator=numbers).exp()
    assert_close(moved, (positions + shift) * jitter * rescale)
    assert torch.equal(vr.augment_positions(positions), positions)


def test_augmentation_equals_dinov3(golden):
    """The same seed draws the factors that DINOv3's own code draws."""
    vectors = golden("dinov3")
    torch.manual_seed(7)
    moved = vr.augment_positions(vr.centred_positions(3, 5), shift=0.2, jitter=2.0, rescale=2.0)
    expected = (
        (vr.centred_positions(3, 5) + vectors["aug_shift_hw"]) * vectors["aug_jitter_hw"] * vectors["aug_rescale"]
    )
    assert_close(moved, expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: vr.grid_positions(), "at least one length"),
        (lambda: vr.grid_positions(3, 0), r"\(3, 0\)"),
        (lambda: vr.grid_positions(3.0, 2), "positive integer"),
        (lambda: vr.grid_positions(True, 2), "positive integer"),
        (lambda: vr.centred_positions(3, 2, normalize="mean"), "separate, min, max"),
        (lambda: vr.with_prefix(vr.grid_positions(2, 2), -1), "zero or more"),
        (lambda: vr.with_prefix(vr.grid_positions(2, 2), 1, where="middle"), "'front' or at the 'end'"),
        (lambda: vr.augment_positions(vr.grid_positions(2), shift=-1.0), "shift is -1.0"),
        (lambda: vr.augment_positions(vr.grid_positions(2), jitter=0.5), "jitter is 0.5"),
        (lambda: vr.augment_positions(vr.grid_positions(2), rescale=0.0), "rescale is 0.0"),
        (lambda: rescaled_positions(3, 4, reference=(16,)), "one reference length for each axis"),
        (lambda: Coordinates(reference=(0, 1)), "must be positive"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


ALL_COORDINATES = {
    "index": Coordinates(shift=1.0, jitter=1.5, rescale=2.0),
    "offset": Coordinates(offset=1.0, jitter=1.5),
    "reference": Coordinates(reference=(16, 16), offset=1.0, shift=1.0),
    "centred": Coordinates(normalize="min", rescale=2.0),
}


@pytest.mark.parametrize("name", ALL_COORDINATES)
def test_an_axis_at_a_time_is_the_same_to_the_bit(name):
    coordinates = ALL_COORDINATES[name]
    axes = coordinates.axes(3, 5)
    assert [len(axis) for axis in axes] == [3, 5]
    positions = coordinates.positions(3, 5)
    assert torch.equal(mesh(axes), positions)
    moved = coordinates.augment(positions, torch.Generator().manual_seed(4))
    moved_axes = coordinates.augment_axes(axes, torch.Generator().manual_seed(4))
    assert torch.equal(mesh(moved_axes), moved)
    assert not torch.equal(moved, positions)
