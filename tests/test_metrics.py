"""Metrics against closed forms written out in NumPy: of classification, and of masked prediction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_rope.masking import draw_masks, patchify, pixel_targets
from vision_rope.metrics import ClassificationMetrics, MaskedMetrics


def probabilities_of(logits: Tensor) -> np.ndarray:
    shifted = logits.double().numpy() - logits.double().numpy().max(axis=1, keepdims=True)
    return np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of (positive, negative) pairs in the right order; a tie is half a pair."""
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for k in range(bins):
        inside = (confidence >= k / bins) & ((confidence < (k + 1) / bins) | (k == bins - 1))
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def measured(logits: Tensor, labels: Tensor, batch: int = 8) -> dict:
    metrics = ClassificationMetrics(logits.shape[1])
    for start in range(0, len(logits), batch):
        metrics.update(logits[start : start + batch], labels[start : start + batch])
    return metrics.compute()


@pytest.mark.parametrize("num_classes", [2, 3, 5, 6, 11])
@pytest.mark.parametrize("images", [1, 37])
def test_every_metric_equals_its_formula(num_classes: int, images: int) -> None:
    logits = 3 * torch.randn(images, num_classes)
    labels = torch.randint(num_classes, (images,))
    result = measured(logits, labels)

    probabilities, truth = probabilities_of(logits), labels.numpy()
    order = np.argsort(-probabilities, axis=1)
    right = order[:, 0] == truth
    assert result["top1"] == pytest.approx(right.mean())
    assert result["nll"] == pytest.approx(-np.log(probabilities[np.arange(images), truth]).mean(), rel=1e-5)
    assert result["ece"] == pytest.approx(calibration_error(probabilities, truth), abs=1e-6)
    assert result["images"] == images
    recalls = [right[truth == k].mean() if (truth == k).any() else math.nan for k in range(num_classes)]
    assert result["per_class"] == pytest.approx(recalls, nan_ok=True)
    assert ("top5" in result) == (num_classes > 5)
    assert ("auroc" in result) == ("balanced_accuracy" in result) == (num_classes == 2)
    if num_classes > 5:
        assert result["top5"] == pytest.approx((order[:, :5] == truth[:, None]).any(axis=1).mean())
    if num_classes == 2:
        assert result["balanced_accuracy"] == pytest.approx(np.nanmean(recalls))
        expected = area_under_curve(probabilities[:, 1], truth) if len(set(truth.tolist())) == 2 else math.nan
        assert result["auroc"] == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_ties_count_half_in_auroc_and_the_lower_class_first_in_accuracy() -> None:
    log_odds = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, -2.0])
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    logits = torch.stack([torch.zeros(6), log_odds], dim=1)
    result = measured(logits, labels, batch=4)
    # Positives 0, 1, 1 against negatives 0, 1, -2: (0.5 + 0 + 1 + 2 * (1 + 0.5 + 1)) / 9.
    assert result["auroc"] == pytest.approx(6.5 / 9, abs=1e-6)
    assert result["top1"] == pytest.approx(4 / 6)

    constant = measured(torch.zeros(12, 12), torch.arange(12))
    assert constant["top1"] == pytest.approx(1 / 12)
    assert constant["top5"] == pytest.approx(5 / 12)


def test_top5_differs_from_top1_after_a_perfect_first_batch() -> None:
    logits = torch.eye(8).repeat(2, 1)
    labels = torch.arange(8).repeat(2)
    labels[8:] = (labels[8:] + 1) % 8
    result = measured(logits, labels)
    assert result["top1"] == 0.5
    assert result["top5"] > 0.5


def test_a_certain_and_right_model_is_calibrated_and_a_certain_and_wrong_one_is_not() -> None:
    logits = 200 * torch.eye(3)
    assert measured(logits, torch.arange(3))["ece"] == 0
    assert measured(logits, torch.tensor([1, 2, 0]))["ece"] == 1
    # Certain (exactly 1) and unsure within the last bin cancel only where the bin is closed at 1.
    logits = torch.tensor([[200.0, 0.0], [2.8, 0.0]])
    confidence = 1 / (1 + math.exp(-2.8))
    assert measured(logits, torch.tensor([1, 0]))["ece"] == pytest.approx((1 + confidence) / 2 - 0.5, abs=1e-6)
    # Neighbouring bins do not cancel: right at 0.92 and wrong at 0.95.
    logits = torch.tensor([[math.log(0.92 / 0.08), 0.0], [math.log(0.95 / 0.05), 0.0]])
    assert measured(logits, torch.tensor([0, 1]))["ece"] == pytest.approx((0.08 + 0.95) / 2, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype_are_normalised_in_float32(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(20, 4)).to(dtype)
    labels = torch.randint(4, (20,))
    assert measured(logits, labels)["nll"] == measured(logits.float(), labels)["nll"]


def test_batches_do_not_matter() -> None:
    logits, labels = torch.randn(53, 2), torch.randint(2, (53,))
    small, whole = measured(logits, labels, batch=7), measured(logits, labels, batch=53)
    assert small.pop("per_class") == whole.pop("per_class")
    assert small == pytest.approx(whole, rel=1e-12)


def test_reset_starts_anew() -> None:
    metrics = ClassificationMetrics(3)
    metrics.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 2]))
    metrics.reset()
    metrics.update(torch.eye(3), torch.arange(3))
    assert metrics.compute()["images"] == 3
    assert metrics.compute()["top1"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    logits = torch.zeros(4, 2)
    logits[2, 1] = value
    with pytest.raises(ValueError, match=r"logits are not finite .* for 1 of 4 images"):
        ClassificationMetrics(2).update(logits, torch.zeros(4, dtype=torch.long))


def test_bad_input_is_named() -> None:
    metrics = ClassificationMetrics(3)
    with pytest.raises(ValueError, match=r"logits \(4, 2\) .* must be \(batch, 3\)"):
        metrics.update(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"labels hold 3, outside the 3 classes 0\.\.2"):
        metrics.update(torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="no image was counted"):
        metrics.compute()
    with pytest.raises(ValueError, match="num_classes is 1"):
        ClassificationMetrics(1)


# ---- masked prediction

PATCH = (4, 2)


def masked_example(images: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Images, masks and predictions that explain a part of them."""
    pictures = 2 * torch.randn(images, 3, 12, 8) + 0.5
    noise = torch.randn(images, 12, 24)
    return pictures, draw_masks(images, (3, 4), ratio=0.4), patchify(pictures, PATCH) + noise


def explained(true: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
    """R2 against the prediction zero, and the mean square error."""
    error, reference = ((true - predicted) ** 2).sum(), (true**2).sum()
    return 1 - error / reference, error / true.size


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_masked_metrics_equal_their_formula_whatever_the_batches(target: str, batch: int) -> None:
    images, masks, predictions = masked_example()
    metrics = MaskedMetrics(PATCH, target)
    for start in range(0, 7, batch):
        part = slice(start, start + batch)
        metrics.update(predictions[part], (images[part], masks[part]))
    result = metrics.compute()

    true, mine = [], []
    for image, mask, predicted in zip(
        images.double().numpy(), masks.numpy(), predictions.double().numpy(), strict=True
    ):
        for row in range(3):
            for column in range(4):
                if mask[row, column]:
                    patch = image[:, 4 * row : 4 * row + 4, 2 * column : 2 * column + 2]
                    if target == "patch-normalized":
                        patch = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6)
                    true.append(patch.transpose(1, 2, 0).ravel())
                    mine.append(predicted[4 * row + column])
    r2, mse = explained(np.stack(true), np.stack(mine))
    assert len(true) == 7 * 5
    assert set(result) == {"r2", "mse", "images"}
    assert result["r2"] == pytest.approx(r2, rel=1e-5)
    assert result["mse"] == pytest.approx(mse, rel=1e-5)
    assert result["images"] == 7


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
def test_the_mean_colour_explains_exactly_nothing_and_the_truth_everything(target: str) -> None:
    images, masks, _ = masked_example()
    truth = pixel_targets(patchify(images, PATCH), target)
    for predictions, r2 in ((torch.zeros_like(truth), 0), (truth, 1), (2 * truth, 0), (-truth, -3)):
        metrics = MaskedMetrics(PATCH, target)
        metrics.update(predictions, (images, masks))
        assert metrics.compute()["r2"] == r2


def test_visible_patches_do_not_count() -> None:
    images, masks, predictions = masked_example()
    others = torch.where(masks.flatten(1)[..., None], predictions, predictions + 100)
    results = []
    for each in (predictions, others):
        metrics = MaskedMetrics(PATCH)
        metrics.update(each, (images, masks))
        results.append(metrics.compute())
    assert results[0] == results[1]


def test_images_of_the_mean_colour_alone_have_no_r2() -> None:
    images, masks, predictions = torch.zeros(2, 3, 12, 8), draw_masks(2, (3, 4), ratio=0.4), torch.ones(2, 12, 24)
    metrics = MaskedMetrics(PATCH)
    metrics.update(predictions, (images, masks))
    result = metrics.compute()
    assert math.isnan(result["r2"])
    assert result["mse"] == 1


def test_small_errors_after_a_large_one_are_not_lost() -> None:
    """float64: one large error, then small ones that float32 would swallow."""
    masks = torch.tensor([[[True, False]]])
    metrics = MaskedMetrics((1, 1))
    images = torch.zeros(1, 3, 1, 2)
    metrics.update(torch.full((1, 2, 3), 1e4), (images, masks))
    for _ in range(20):
        metrics.update(torch.full((1, 2, 3), 1.0), (images, masks))
    assert metrics.compute()["mse"] * 63 == pytest.approx(3e8 + 60, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_predictions_of_any_dtype_are_counted_in_float32(dtype: torch.dtype) -> None:
    images, masks, predictions = masked_example()
    results = []
    for each in (predictions.to(dtype), predictions.to(dtype).float()):
        metrics = MaskedMetrics(PATCH)
        metrics.update(each, (images, masks))
        results.append(metrics.compute())
    assert results[0] == results[1]


def test_bad_predictions_are_named() -> None:
    images, masks, predictions = masked_example()
    metrics = MaskedMetrics(PATCH)
    for value in (math.nan, math.inf):
        broken = predictions.clone()
        broken[1, 2, 3] = value
        with pytest.raises(ValueError, match="predictions are not finite"):
            metrics.update(broken, (images, masks))
    with pytest.raises(ValueError, match=r"predictions have shape \(7, 11, 24\), but \(7, 12, 24\) is needed"):
        metrics.update(predictions[:, 1:], (images, masks))
    with pytest.raises(ValueError, match="no image was counted"):
        metrics.compute()
    with pytest.raises(ValueError, match="target is 'colours'"):
        MaskedMetrics(PATCH, "colours").update(predictions, (images, masks))  # type: ignore[arg-type]
