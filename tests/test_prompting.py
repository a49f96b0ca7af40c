"""Prompts drawn from masks, against loops over pixels and all pairs of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from vision_rope.prompting import (
    JITTER,
    MOST_JITTER,
    choose_kind,
    correct,
    draw_points,
    draw_prompts,
    find_boxes,
    jitter_boxes,
    square_distances,
)
from vision_rope.segmenter.prompt_encoder import BOTTOM_RIGHT, INSIDE, NO_POINT, OUTSIDE, TOP_LEFT


def ragged_masks(count: int = 4, height: int = 17, width: int = 23) -> Tensor:
    """A few blobs of noise each; the last one is empty."""
    noise = torch.nn.functional.avg_pool2d(torch.randn(count, 1, height + 4, width + 4), 5, 1)[:, 0]
    masks = noise > 0.15
    masks[-1] = False
    assert masks[:-1].flatten(1).any(1).all()
    return masks


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_labels_are_those_of_sams_weights():
    assert (NO_POINT, OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT) == (-1, 0, 1, 2, 3)


def test_kinds_come_with_their_shares_and_follow_from_the_seed():
    kinds = [choose_kind(0.5, 0.3, seed) for seed in range(2000)]
    assert kinds == [choose_kind(0.5, 0.3, seed) for seed in range(2000)]
    shares = {kind: count / 2000 for kind, count in Counter(kinds).items()}
    assert shares == pytest.approx({"mask": 0.5, "box": 0.3, "point": 0.2}, abs=0.04)
    assert {choose_kind(1.0, 0.0, seed) for seed in range(100)} == {"mask"}
    assert {choose_kind(0.0, 1.0, seed) for seed in range(100)} == {"box"}
    assert {choose_kind(0.0, 0.0, seed) for seed in range(100)} == {"point"}


def test_boxes_are_the_outermost_pixels():
    masks = ragged_masks()
    for mask, box in zip(masks[:-1], find_boxes(masks).tolist(), strict=False):
        rows, columns = mask.nonzero(as_tuple=True)
        assert box == [columns.min(), rows.min(), columns.max(), rows.max()]


def test_drawn_boxes_lie_near_the_true_ones_and_inside_the_frame():
    boxes = torch.tensor([[0.0, 10.0, 400.0, 30.0], [5.0, 5.0, 6.0, 95.0]]).repeat(200, 1)
    drawn = jitter_boxes(boxes, (100, 401), make_generator())
    extent = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    off = (drawn - boxes).abs()
    limit = (JITTER * extent).clamp(max=MOST_JITTER)
    assert (off <= limit + 1e-4).all()
    assert (off[:, [1, 3]].view(200, 2, 2).amax(0) > 0.9 * limit[:2, [1, 3]]).all(), "all of the room is used"
    assert (drawn >= 0).all()
    assert (drawn[:, [0, 2]] <= 400).all()
    assert len(drawn.unique(dim=0)) == 400, "each has its own"


def test_points_are_drawn_evenly_from_the_pixels():
    masks = ragged_masks(3)
    masks[1] = False
    masks[1, 16, 22] = True
    points, labels = draw_points(masks, 4000, make_generator())
    assert labels[:, 0].tolist() == [1, 1, -1]
    assert points[1].unique(dim=0).tolist() == [[22.0, 16.0]]
    places, counts = points[0].long().unique(dim=0, return_counts=True)
    assert masks[0][places[:, 1], places[:, 0]].all()
    expected = 4000 / int(masks[0].sum())
    assert len(places) == masks[0].sum()
    # 4.5 standard deviations of a count; one point in a hundred thousand lies beyond.
    assert (counts - expected).abs().max() < 4.5 * expected**0.5


@pytest.mark.parametrize("kind", ["mask", "box", "point"])
def test_prompts_of_a_batch_follow_from_the_seed(kind):
    masks = ragged_masks()
    one, again, other = (draw_prompts(masks, kind, seed) for seed in (3, 3, 4))
    for first, second in zip(one, again, strict=True):
        assert (first is None) == (second is None)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    if kind == "mask":
        assert one.masks is masks
        assert one.points is one.labels is None
        return
    assert one.masks is None
    assert not torch.equal(one.points, other.points)
    assert one.points.shape == (4, 2 if kind == "box" else 1, 2)
    assert one.labels[:3].unique(dim=0).tolist() == ([[2, 3]] if kind == "box" else [[1]])
    assert (one.labels[3] == -1).all(), "an object that is nowhere cannot be shown"


def test_distances_are_those_to_the_nearest_of_all_pixels_outside():
    regions = ragged_masks()
    regions[0] = True
    for region, found in zip(regions, square_distances(regions), strict=True):
        padded = torch.nn.functional.pad(region, (1, 1, 1, 1))
        outside = (~padded).nonzero()
        places = torch.cartesian_prod(torch.arange(1, 18), torch.arange(1, 24))
        nearest = (places[:, None] - outside).square().sum(-1).amin(1)
        assert torch.equal(found.flatten(), nearest)


def test_a_correction_is_in_the_middle_of_what_is_wrong():
    truth = torch.zeros(4, 20, 30, dtype=torch.bool)
    truth[:, 5:14, 4:13] = True
    predicted = truth.clone()
    predicted[0] = False  # all of a square of 9 pixels is missing
    predicted[1, 2:7, 20:25] = True  # another is too much
    predicted[2, 5:14, 4:7] = False  # three columns are missing and
    predicted[2, 15:20, 20:25] = True  # a wider square is too much
    points, labels = correct(truth, predicted)
    assert points[:3, 0].tolist() == [[8.0, 9.0], [22.0, 4.0], [22.0, 17.0]]
    assert labels[:, 0].tolist() == [1, 0, 0, -1]
