"""Positions: grids, normalised coordinates, prefix tokens and augmentation, against closed forms and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.coordinates import Coordinates
from vision_rope.positions import mesh, rescaled_positions


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


# --- crops, dropped patches, batches, packing, blocks ----------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_COORDINATES)
def test_a_crop_keeps_its_place_in_the_image(name):
    positions = ALL_COORDINATES[name].positions(6, 8)
    cropped = vr.crop_positions(positions, grid=(6, 8), top=1, left=3, size=(2, 4))
    rows = [row * 8 + column for row in (1, 2) for column in (3, 4, 5, 6)]
    assert torch.equal(cropped, positions[rows])
    assert torch.equal(vr.crop_positions(positions, grid=(6, 8), top=0, left=0, size=(6, 8)), positions)
    last = vr.crop_positions(positions.expand(3, -1, -1), grid=(6, 8), top=5, left=7, size=(1, 1))
    assert torch.equal(last, positions[-1].expand(3, 1, 2))


def test_a_resized_crop_reads_between_tokens():
    """Upper left quarter of a grid of 4 x 6, resized to 4 x 6 tokens: half steps, centred on what each token covers."""
    positions = vr.grid_positions(4, 6)
    cropped = vr.crop_positions(positions, grid=(4, 6), top=0, left=0, size=(2, 3), out=(4, 6)).unflatten(0, (4, 6))
    assert_close(cropped[:, 0, 0], torch.tensor([-0.25, 0.25, 0.75, 1.25]))
    assert_close(cropped[0, :, 1], torch.tensor([-0.25, 0.25, 0.75, 1.25, 1.75, 2.25]))
    # A box of fractions that leaves the image, in normalised coordinates.
    centred = vr.centred_positions(4, 6)
    box = vr.crop_positions(centred, grid=(4, 6), top=-0.5, left=1.25, size=(5.0, 2.5), out=(2, 5)).unflatten(0, (2, 5))
    rows = [-0.5 + (k + 0.5) * 2.5 for k in range(2)]  # in tokens, from the upper edge of the image
    columns = [1.25 + (k + 0.5) * 0.5 for k in range(5)]
    assert_close(box[:, 0, 0], torch.tensor(rows) / 4 * 2 - 1)
    assert_close(box[0, :, 1], torch.tensor(columns) / 6 * 2 - 1)


def test_dropped_patches_take_their_positions_along():
    """Failure class 19: positions follow the kept tokens; the rotation of those left is a part of the whole one."""
    rope = vr.preset("dinov3", head_dim=16)
    positions = rope.positions(3, 5)
    kept = torch.tensor([0, 4, 7, 13])
    assert torch.equal(rope(positions[kept]).cos, rope(positions).cos[:, kept])
    by_sample = torch.tensor([[0, 4], [7, 13]])
    assert torch.equal(rope(positions[by_sample]).cos[1, 0], rope(positions).cos[0, [7, 13]])


def test_padded_batches_equal_samples_alone():
    grids = [(2, 3), (4, 1), (3, 3)]
    rope = vr.preset("rope-vit-axial", head_dim=16)
    samples = [vr.with_prefix(rope.positions(*grid), 1) for grid in grids]
    positions, mask = vr.pad_positions(samples)
    assert positions.shape == (3, 10, 2)
    assert mask.sum(1).tolist() == [7, 5, 10]
    x = torch.randn(3, 2, 10, 16)
    turned = vr.rotate(x, rope(positions))
    out = vr.attend(turned, turned, x, mask=mask[:, None, None, :])
    for index, sample in enumerate(samples):
        n = len(sample)
        assert mask[index].tolist() == [True] * n + [False] * (10 - n)
        alone = vr.rotate(x[index, :, :n], rope(sample))
        assert_close(turned[index, :, :n], alone)
        assert torch.equal(turned[index, :, n:], x[index, :, n:])  # padding sits at position zero
        assert_close(out[index, :, :n], vr.attend(alone, alone, x[index, :, :n]), atol=1e-5, rtol=1e-5)


def test_packed_batches_equal_samples_alone():
    rope = vr.preset("rope-vit-mixed", head_dim=16, num_heads=2)
    samples = [vr.with_prefix(rope.positions(*grid), 1) for grid in [(2, 3), (4, 1), (3, 3)]]
    positions, lengths = vr.pack_positions(samples)
    assert lengths == [7, 5, 10]
    x = torch.randn(1, 2, sum(lengths), 16)
    turned = vr.rotate(x, rope(positions)).split(lengths, dim=2)
    for part, alone, sample in zip(turned, x.split(lengths, dim=2), samples, strict=True):
        assert_close(part, vr.rotate(alone, rope(sample)))


def test_merge_blocks():
    """Blocks of 2 x 2 in a grid of 2 x 4, as Qwen-VL's towers take their patches."""
    order = vr.merge_order(2, 4)
    assert vr.grid_positions(2, 4)[order].tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3],
    ]  # fmt: skip
    assert torch.equal(vr.merge_order(4, 6, merge=1), torch.arange(24))
    x = torch.randn(24)
    assert torch.equal(x[vr.merge_order(2, 2, 6)][vr.merge_order(2, 2, 6).argsort()], x)
    assert torch.equal(vr.merge_order(2, 2, 6)[12:], vr.merge_order(2, 6) + 12)
    assert not torch.equal(vr.merge_order(3, 6, merge=3), vr.merge_order(6, 3, merge=3))


@pytest.mark.parametrize("size", [(5,), (3, 5), (2, 3, 4)])
def test_centred_and_stretched_positions_in_any_number_of_axes(size):
    """Closed forms in 1D, 2D and 3D."""
    index = vr.grid_positions(*size)
    lengths = torch.tensor(size).float()
    assert_close(vr.centred_positions(*size), 2 * (index + 0.5) / lengths - 1)
    assert_close(vr.centred_positions(*size, normalize="max"), 2 * (index + 0.5) / max(size) - 1)
    reference = tuple(2 * length for length in size)
    assert_close(rescaled_positions(*size, reference=reference, offset=1.0), (index + 1) * 2)
    assert vr.with_prefix(index, 2, where="end")[-2:].tolist() == [[0.0] * len(size)] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: vr.crop_positions(p, grid=(5, 3), top=0, left=0, size=(0, 1)), "positive height and width"),
        (lambda p: vr.crop_positions(p, grid=(4, 4), top=0, left=0, size=(1, 1)), r"\(15, 2\).*4 x 4 tokens"),
        (lambda p: vr.crop_positions(p, grid=(5, 3), top=0, left=0, size=(1.5, 1)), "needs out"),
        (lambda p: vr.crop_positions(p[:3], grid=(1, 3), top=0.5, left=0, size=(1, 1)), "an axis of one token"),
        (lambda p: vr.pad_positions([]), "at least one sample"),
        (lambda p: vr.pad_positions([p, p[:, :1]]), r"\(15, 2\), \(15, 1\)"),
        (lambda p: vr.pack_positions([p[None]]), "must be"),
        (lambda p: vr.merge_order(3, 4), "cannot be cut into blocks of 2 x 2"),
        (lambda p: vr.merge_order(4), "cannot be cut"),
        (lambda p: mesh([]), "axes is empty"),
    ],
)
def test_more_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(vr.grid_positions(5, 3))


def test_what_is_no_tensor_of_positions_is_refused() -> None:
    for call, words in (
        (lambda: vr.pack_positions([(4, 6)]), r"positions\[0\] is \(4, 6\); it must be a tensor \(tokens, axes\)"),
        (lambda: vr.pad_positions([vr.grid_positions(2), (4, 6)]), r"positions\[1\] is \(4, 6\)"),
        (lambda: vr.with_prefix((2, 2), 1), r"positions is \(2, 2\); .* grid_positions\(4, 6\)"),
        (lambda: vr.with_prefix(torch.zeros(3), 1), r"positions has shape \(3,\); it must be a tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
