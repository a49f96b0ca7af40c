"""J and F of masks against closed forms and a second formulation by all distances between contour pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_rope.vos_metrics import (
    ObjectScores,
    average_objects,
    check_ids,
    choose_judged,
    contour_accuracy,
    find_contour,
    region_similarity,
    summarise,
    widen,
)


def rectangle(size: tuple[int, int], top: int, left: int, height: int, width: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[top : top + height, left : left + width] = True
    return mask


def draw_blobs(height: int, width: int, seed: int) -> Tensor:
    """Smooth shapes, some of which touch the border."""
    noise = torch.randn(1, 1, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(noise, size=(height, width), mode="bicubic")[0, 0] > 0.5


def contour_by_points(mask: Tensor) -> Tensor:
    """Rows and columns of contour pixels, one pixel after the other."""
    height, width = mask.shape
    pixels = mask.tolist()
    found = []
    for y in range(height):
        for x in range(width):
            others = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            if any(pixels[y][x] != pixels[a][b] for a, b in others if a < height and b < width):
                found.append((y, x))
    return torch.tensor(found, dtype=torch.float64).view(-1, 2)


def accuracy_by_distances(prediction: Tensor, truth: Tensor) -> float:
    radius = math.ceil(0.008 * math.sqrt(prediction.shape[0] ** 2 + prediction.shape[1] ** 2))
    mine, theirs = contour_by_points(prediction), contour_by_points(truth)
    if not len(mine) or not len(theirs):
        return float(len(mine) == len(theirs))
    near = torch.cdist(mine, theirs) <= radius
    precision, recall = near.any(1).double().mean().item(), near.any(0).double().mean().item()
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize("shift", [0, 5, 20, 60, 150, 300])
def test_j_of_a_shifted_rectangle(shift: int) -> None:
    truth, prediction = rectangle((480, 854), 90, 50, 100, 150), rectangle((480, 854), 90, 50 + shift, 100, 150)
    assert region_similarity(prediction, truth) == pytest.approx(max(150 - shift, 0) / min(150 + shift, 300))


def test_f_of_a_shifted_rectangle() -> None:
    """Of a contour of 2 (a + b) pixels the long edges meet, and r pixels at the ends of one short edge."""
    height, width, radius = 100, 150, 8
    truth = rectangle((480, 854), 90, 50, height, width)
    assert find_contour(truth).sum() == 2 * (height + width)
    for shift in (0, 3, 8):
        assert contour_accuracy(rectangle((480, 854), 90, 50 + shift, height, width), truth) == 1.0
    for shift in (9, 20, 77):
        prediction = rectangle((480, 854), 90, 50 + shift, height, width)
        expected = (width + 1 + 2 * radius - shift) / (height + width)
        assert contour_accuracy(prediction, truth) == pytest.approx(expected)
        assert contour_accuracy(truth, prediction) == pytest.approx(expected)
    assert contour_accuracy(rectangle((480, 854), 300, 600, height, width), truth) == 0.0


def test_f_weighs_precision_and_recall_alike() -> None:
    """One of two equal rectangles far from each other: all that is found is right, half of it is found."""
    one, other = rectangle((200, 300), 20, 20, 40, 60), rectangle((200, 300), 120, 200, 40, 60)
    assert contour_accuracy(one, one | other) == pytest.approx(2 / 3)
    assert contour_accuracy(one | other, one) == pytest.approx(2 / 3)


@pytest.mark.parametrize("size", [(48, 96), (90, 130)])
def test_f_against_all_distances(size: tuple[int, int]) -> None:
    height, width = size
    for seed in range(3):
        truth = draw_blobs(height, width, seed)
        prediction = truth ^ (draw_blobs(height, width, seed + 10) & draw_blobs(height, width, seed + 20))
        assert accuracy_by_distances(truth, truth) == 1.0
        assert 0.05 < accuracy_by_distances(prediction, truth) < 0.99
        assert contour_accuracy(prediction, truth) == pytest.approx(accuracy_by_distances(prediction, truth))


def test_contours_reach_the_border() -> None:
    for mask in (draw_blobs(40, 56, 3), rectangle((9, 7), 0, 0, 4, 7), rectangle((9, 7), 5, 3, 4, 4)):
        rows, columns = contour_by_points(mask).long().T
        expected = torch.zeros_like(mask)
        expected[rows, columns] = True
        assert torch.equal(find_contour(mask), expected)
    assert not find_contour(torch.ones(9, 7, dtype=torch.bool)).any()


@pytest.mark.parametrize("radius", [0, 1, 2, 5, 30])
def test_widening_is_by_a_disk(radius: int) -> None:
    marks = torch.rand(23, 31) < 0.01
    marks[0, 30] = True
    places = torch.cartesian_prod(torch.arange(23.0), torch.arange(31.0))
    expected = (torch.cdist(places, marks.nonzero().float()).amin(1) <= radius).view(23, 31)
    assert torch.equal(widen(marks, radius), expected)
    assert not widen(torch.zeros(5, 6, dtype=torch.bool), radius).any()


def test_empty_masks() -> None:
    empty, some = torch.zeros(60, 80, dtype=torch.bool), rectangle((60, 80), 10, 10, 20, 20)
    whole = torch.ones_like(empty)
    assert (region_similarity(empty, empty), contour_accuracy(empty, empty)) == (1.0, 1.0)
    assert (region_similarity(empty, some), contour_accuracy(empty, some)) == (0.0, 0.0)
    assert (region_similarity(some, empty), contour_accuracy(some, empty)) == (0.0, 0.0)
    # A mask of the whole frame has no contour.
    assert (region_similarity(whole, empty), contour_accuracy(whole, empty)) == (0.0, 1.0)
    assert contour_accuracy(whole, some) == 0.0


def test_masks_that_cannot_be_compared() -> None:
    mask = torch.zeros(6, 8, dtype=torch.bool)
    for measure in (region_similarity, contour_accuracy):
        with pytest.raises(ValueError, match="must be of one size"):
            measure(mask, mask.T)
        with pytest.raises(ValueError, match=r"prediction must be bool \(height, width\), got torch.uint8"):
            measure(mask.byte(), mask)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 38, 48, 67, 255])
def test_statistics_against_numpy(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    borders = (np.round(np.linspace(1, count, 5) + 1e-10) - 1).astype(int)
    first, last = (values[borders[k] : borders[k + 1] + 1].mean() for k in (0, 3))
    expected = (values.mean(), (values > 0.5).mean(), first - last)
    assert summarise(values.tolist()) == pytest.approx(expected)


def test_recall_is_of_more_than_half() -> None:
    assert summarise([0.5, 0.51, 0.2, 0.9]).recall == 0.5
    with pytest.raises(ValueError, match="values is empty"):
        summarise([])


def test_first_and_last_frames_are_not_judged() -> None:
    assert choose_judged(range(6), 0) == [1, 2, 3, 4]
    assert choose_judged([20, 0, 5, 10, 15], 0) == [5, 10, 15]
    assert choose_judged(range(6), 3) == [4]
    assert choose_judged([0], 0) == choose_judged([0, 1], 0) == choose_judged(range(4), 3) == []


def test_objects_count_alike_however_long_they_are_seen() -> None:
    long = ObjectScores(j=dict.fromkeys(range(1, 9), 1.0), f=dict.fromkeys(range(1, 9), 0.5))
    short = ObjectScores(j={3: 0.0, 4: 0.4}, f={3: 0.1, 4: 0.1})
    figures = average_objects([long, short])
    expected = {"j_mean": 0.6, "j_recall": 0.5, "f_mean": 0.3, "f_recall": 0.0, "j_and_f": 0.45, "f_decay": 0.0}
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    with pytest.raises(ValueError, match="scores is empty"):
        average_objects([])


def test_objects_that_the_truth_does_not_have() -> None:
    ids = torch.tensor([[0, 1], [3, 1]], dtype=torch.uint8)
    check_ids(ids, [1, 2, 3])
    with pytest.raises(ValueError, match="pixels of object 3, but the sequence has the objects 1, 2 alone"):
        check_ids(ids, [1, 2])
