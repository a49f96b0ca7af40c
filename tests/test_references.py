"""The untrained reference lines against loops in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_rope.masking import draw_masks, patchify
from vision_rope.metrics import MaskedMetrics
from vision_rope.references import REFERENCES, MeanColour, NeighbourAverage

PATCH = (4, 2)
GRID = (3, 5)


def example(batch: int = 2) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, PATCH[0] * GRID[0], PATCH[1] * GRID[1])
    return images, draw_masks(batch, GRID, ratio=0.5)


def colour_of(image: np.ndarray, row: int, column: int) -> np.ndarray:
    height, width = PATCH
    return image[:, row * height : (row + 1) * height, column * width : (column + 1) * width].mean((1, 2))


def by_hand(images: Tensor, masks: Tensor, reach: float | None) -> Tensor:
    """Weighted means of visible patches' colours; without a reach all weigh the same."""
    places = [(row, column) for row in range(GRID[0]) for column in range(GRID[1])]
    answers = np.zeros((len(images), len(places), PATCH[0] * PATCH[1] * 3))
    for b, (image, mask) in enumerate(zip(images.double().numpy(), masks.numpy(), strict=True)):
        for n, (row, column) in enumerate(places):
            total, weights = np.zeros(3), 0.0
            for other in places:
                if mask[other]:
                    continue
                distance = math.hypot(row - other[0], column - other[1])
                weight = 1.0 if reach is None else math.exp(-distance / reach)
                total, weights = total + weight * colour_of(image, *other), weights + weight
            answers[b, n] = np.tile(total / weights, PATCH[0] * PATCH[1])
    return torch.from_numpy(answers).float()


@pytest.mark.parametrize(
    ("reference", "reach"),
    [(MeanColour(PATCH), None), (NeighbourAverage(PATCH), 0.35), (NeighbourAverage(PATCH, reach=2.0), 2.0)],
)
def test_predictions_equal_their_definition(reference, reach):
    images, masks = example()
    predictions = reference(images, masks)
    torch.testing.assert_close(predictions, by_hand(images, masks, reach), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFERENCES)
def test_what_is_hidden_is_not_looked_at(name):
    reference = REFERENCES[name](PATCH)
    images, masks = example()
    hidden = masks.repeat_interleave(PATCH[0], 1).repeat_interleave(PATCH[1], 2)[:, None]
    others = torch.where(hidden, 7.0, images)
    torch.testing.assert_close(reference(images, masks), reference(others, masks))
    assert not list(reference.parameters())


def test_one_far_patch_alone_is_the_answer_where_weights_would_underflow():
    grid = (1, 60)
    images, masks = torch.randn(1, 3, 4, 120), torch.ones(1, *grid, dtype=torch.bool)
    masks[0, 0, 0] = False
    assert math.exp(-59 / 0.35) < torch.finfo(torch.float32).tiny
    expected = images[..., :2].mean((2, 3)).repeat(1, 8)
    predictions = NeighbourAverage(PATCH)(images, masks)
    torch.testing.assert_close(predictions[:, -1], expected)
    torch.testing.assert_close(MeanColour(PATCH)(images, masks)[:, 30], expected)


@pytest.mark.parametrize("name", REFERENCES)
def test_flat_images_are_explained_exactly_and_dtypes_are_kept(name):
    images, masks = torch.full((2, 3, 12, 10), 0.5), example()[1]
    images[:, 1] = -1.25
    predictions = REFERENCES[name](PATCH)(images, masks)
    torch.testing.assert_close(predictions, patchify(images, PATCH))
    metrics = MaskedMetrics(PATCH)
    metrics.update(predictions, (images, masks))
    assert metrics.compute()["r2"] == pytest.approx(1, abs=1e-9)
    assert REFERENCES[name](PATCH)(images.bfloat16(), masks).dtype == torch.bfloat16


def test_neighbours_explain_a_smooth_image_better_than_the_mean_does():
    images = torch.linspace(-2, 2, 64).expand(1, 3, 48, 64)
    masks = draw_masks(1, (12, 16), ratio=0.5)
    explained = []
    for kind in (MeanColour, NeighbourAverage):
        metrics = MaskedMetrics((4, 4))
        metrics.update(kind((4, 4))(images, masks), (images, masks))
        explained.append(metrics.compute()["r2"])
    assert explained[0] < 0.2
    assert explained[1] > 0.9
