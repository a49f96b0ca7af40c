"""What a task makes of a batch: masks that follow from seeds and places alone, losses, scores and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_rope import plots
from vision_rope.config import AugmentConfig, DataConfig, LossConfig, MaskedConfig, TrainConfig
from vision_rope.losses import masked_loss
from vision_rope.masking import patchify, pixel_targets
from vision_rope.tasks import Batch, Classification, MaskedPrediction, create_task

PATCH = (8, 4)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.1)
LABELS = torch.zeros(0, dtype=torch.long)


def masked_task(seed: int = 0, **options: Any) -> MaskedPrediction:
    return MaskedPrediction(MaskedConfig(**options), PATCH, mean=MEAN, std=STD, seed=seed)


def pictures(count: int = 6, rows: int = 3, columns: int = 5) -> Tensor:
    return torch.randn(count, 3, PATCH[0] * rows, PATCH[1] * columns)


def masks_of(batch: Batch) -> Tensor:
    images, masks = batch.inputs
    assert batch.targets == batch.inputs
    assert masks.shape == (len(images), images.shape[2] // PATCH[0], images.shape[3] // PATCH[1])
    return masks


# ---- masks


def test_training_masks_follow_from_the_seed_alone():
    task, images = masked_task(ratio=0.4), pictures()
    torch.manual_seed(1)
    first = masks_of(task.train_batch(images, LABELS, 7))
    torch.manual_seed(2)
    assert torch.equal(masks_of(masked_task(seed=5, ratio=0.4).train_batch(images, LABELS, 7)), first)
    assert not torch.equal(masks_of(task.train_batch(images, LABELS, 8)), first)
    assert first.flatten(1).sum(1).tolist() == [6] * 6
    assert len(first.flatten(1).unique(dim=0)) > 1
    assert task.train_batch(images, LABELS, 7).inputs[0] is images


@pytest.mark.parametrize("block", [1, 2])
def test_evaluation_masks_belong_to_the_place_whatever_the_batch(block):
    task = masked_task(ratio=0.4, block=block)
    images, places = pictures(12), torch.arange(12)
    whole = masks_of(task.eval_batch(images, LABELS, places))
    for order in (torch.randperm(12), torch.tensor([11]), torch.arange(1, 12, 2)):
        part = masks_of(masked_task(ratio=0.4, block=block).eval_batch(images[order], LABELS, places[order]))
        assert torch.equal(part, whole[order])
    assert len(whole.flatten(1).unique(dim=0)) > 6
    assert whole.flatten(1).sum(1).tolist() == [6] * 12
    other_seed = masks_of(masked_task(seed=1, ratio=0.4, block=block).eval_batch(images, LABELS, places))
    assert not torch.equal(other_seed, whole)
    larger = task.eval_batch(pictures(12, 6, 6), LABELS, places)
    assert masks_of(larger).shape == (12, 6, 6)


def test_images_of_a_stream_get_masks_by_their_place_in_the_batch():
    task, images = masked_task(), pictures(4)
    by_place = masks_of(task.eval_batch(images, LABELS, torch.arange(4)))
    for places in (None, torch.full((4,), -1)):
        assert torch.equal(masks_of(task.eval_batch(images, LABELS, places)), by_place)


# ---- loss and score


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
def test_loss_is_the_mean_square_error_of_hidden_pixels(target):
    task, images = masked_task(target=target, ratio=0.4), pictures()
    batch = task.train_batch(images, LABELS, 3)
    predictions = torch.randn(6, 15, 96)
    errors = []
    for image, mask, predicted in zip(images.double().numpy(), masks_of(batch).numpy(), predictions, strict=True):
        for place in range(15):
            row, column = divmod(place, 5)
            if not mask[row, column]:
                continue
            patch = image[:, 8 * row : 8 * row + 8, 4 * column : 4 * column + 4]
            if target == "patch-normalized":
                patch = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6)
            true = patch.transpose(1, 2, 0).ravel()
            errors += list((predicted[place].double().numpy() - true) ** 2)
    assert len(errors) == 6 * 6 * 96
    assert float(task.loss(predictions, batch.targets)) == pytest.approx(np.mean(errors), rel=1e-5)
    metrics = task.create_metrics(torch.device("cpu"))
    metrics.update(predictions, batch.targets)
    assert metrics.compute()["mse"] == pytest.approx(np.mean(errors), rel=1e-5)


def test_loss_is_float32_under_autocast_and_sends_no_gradient_to_visible_patches():
    images = pictures()
    batch = masked_task().train_batch(images, LABELS, 3)
    low = torch.randn(6, 15, 96).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = masked_loss(low, *batch.targets, PATCH, "pixels")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, masked_loss(low.float(), *batch.targets, PATCH, "pixels"))
    loss.backward()
    hidden = masks_of(batch).flatten(1)
    assert low.grad[hidden].any(dim=-1).all()
    assert not low.grad[~hidden].any()


def test_the_best_epoch_is_that_of_the_smallest_error():
    """R2 falls as the error grows; flat images have none, and one of them must be the best all the same."""
    task = masked_task()
    nan = float("nan")
    assert task.score({"mse": 0.5, "r2": 0.4}) > task.score({"mse": 0.6, "r2": 0.3})
    assert task.score({"mse": 0.5, "r2": nan}) > task.score({"mse": 0.6, "r2": nan}) > (-np.inf,)
    assert task.count_hits(torch.zeros(1), None) is None


# ---- pictures


@pytest.fixture
def lines(monkeypatch) -> dict[str, Tensor]:
    """What would have been drawn."""
    seen: dict[str, Tensor] = {}
    monkeypatch.setattr(plots, "plot_images", lambda images, path: seen.update(images))
    return seen


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_show_what_was_visible_and_what_was_made_of_the_rest(lines, tmp_path, target, dtype):
    task = masked_task(target=target)
    colours = torch.rand(10, 3, 24, 20)
    images = (colours - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    batch = task.eval_batch(images, LABELS, torch.arange(10))
    truth = pixel_targets(patchify(images, PATCH), target).to(dtype)
    nonsense = torch.full_like(truth, 1e3)
    path = task.draw(batch, {"true": truth, "nonsense": nonsense}, tmp_path / "a.png")
    assert path == tmp_path / "a.png"
    assert list(lines) == ["image", "visible", "true", "nonsense"]
    hidden = masks_of(batch)[:8].repeat_interleave(8, 1).repeat_interleave(4, 2)[:, None].expand(8, 3, 24, 20)
    grey = torch.tensor(MEAN).view(3, 1, 1).expand(8, 3, 24, 20)
    torch.testing.assert_close(lines["image"], colours[:8])
    torch.testing.assert_close(lines["visible"], torch.where(hidden, grey, colours[:8]))
    torch.testing.assert_close(lines["true"], colours[:8], rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)
    assert (lines["nonsense"][hidden] == 1).all()
    torch.testing.assert_close(lines["nonsense"][~hidden], colours[:8][~hidden])


def test_pictures_are_files_even_of_one_image(tmp_path):
    task = masked_task()
    with torch.inference_mode():
        batch = task.eval_batch(pictures(1), LABELS, torch.arange(1))
        outputs = torch.zeros(1, 15, 96)
    path = task.draw(batch, {"none": outputs}, tmp_path / "new" / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- tasks of a configuration


def test_the_configuration_names_the_task():
    data = DataConfig(split_seed=4)
    task = create_task(TrainConfig(task="masked", data=data, masked=MaskedConfig(ratio=0.25)), 1, PATCH)
    assert isinstance(task, MaskedPrediction)
    images = pictures(3)
    masks = masks_of(task.eval_batch(images, LABELS, torch.arange(3)))
    assert torch.equal(masks, masks_of(masked_task(seed=4, ratio=0.25).eval_batch(images, LABELS, torch.arange(3))))
    assert isinstance(create_task(TrainConfig(), 3, PATCH), Classification)


@pytest.mark.parametrize("num_classes", [0, 1])
def test_images_without_labels_are_not_classified(num_classes):
    with pytest.raises(ValueError, match=r"at least 2 classes apart; .*task: masked"):
        create_task(TrainConfig(), num_classes, PATCH)


def test_classification_mixes_counts_and_scores(tmp_path):
    images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    plain = Classification(3)
    assert plain.train_batch(images, labels, 1) == Batch((images,), labels)
    assert plain.eval_batch(images, labels, None) == Batch((images,), labels)
    logits = torch.eye(3).repeat(2, 1)
    assert int(plain.count_hits(logits, labels)) == 6
    assert int(plain.count_hits(logits, torch.eye(3)[[0, 1, 2, 1, 1, 1]])) == 4
    assert plain.draw(Batch((images,), labels), {}, tmp_path / "a.png") is None
    mixing = Classification(3, LossConfig(), AugmentConfig(mixup=1.0))
    mixed = mixing.train_batch(images, labels, 1)
    assert mixed.targets.shape == (6, 3)
    assert not torch.equal(mixed.inputs[0], images)
    again = mixing.train_batch(images, labels, 1)
    torch.testing.assert_close(again.inputs[0], mixed.inputs[0], rtol=0, atol=0)
    rows: list[Mapping[str, Any]] = [
        {"top1": 0.9, "nll": 3.0, "auroc": 0.6},
        {"top1": 0.2, "nll": 3.0, "auroc": 0.7},
        {"top1": 0.2, "nll": 2.0, "auroc": 0.7},
    ]
    assert sorted(rows, key=plain.score) == rows
    assert plain.score({"top1": 0.9, "nll": 3.0, "auroc": float("nan")}) == (0.9, -3.0)
