"""Losses and metrics of a segmenter, against torchvision, closed forms and loops over objects and candidates."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from vision_rope.config import SegmenterConfig
from vision_rope.segmentation_losses import (
    clip_losses,
    dice_losses,
    focal_losses,
    frame_losses,
    measure_overlap,
    resize_logits,
)
from vision_rope.segmentation_metrics import ObjectTargets, SegmentationMetrics, choose_masks
from vision_rope.vos_metrics import region_similarity


class Output(NamedTuple):
    """What a segmenter says of the objects of a frame."""

    logits: Tensor
    qualities: Tensor
    scores: Tensor


def random_outputs(num_frames: int, objects: int, candidates: int, side: int = 6) -> list[Output]:
    return [
        Output(
            2 * torch.randn(objects, candidates, side, side), torch.rand(objects, candidates), 2 * torch.randn(objects)
        )
        for _ in range(num_frames)
    ]


def random_truth(objects: int, num_frames: int, side: int = 12) -> Tensor:
    """Rectangles; the first object is away in the last frame."""
    rows, columns = torch.arange(side)[:, None], torch.arange(side)
    truth = torch.zeros(objects, num_frames, side, side, dtype=torch.bool)
    for each in truth.flatten(0, 1):
        y, x, height, width = torch.randint(1, side // 2, (4,)).tolist()
        each |= (rows >= y) & (rows < y + height) & (columns >= x) & (columns < x + width)
    truth[0, -1] = False
    return truth


def test_focal_loss_is_torchvisions():
    logits = 8 * torch.randn(3, 2, 5, 7)
    truth = torch.rand(3, 1, 5, 7) < 0.4
    expected = sigmoid_focal_loss(logits, truth.float().expand_as(logits), alpha=0.25, gamma=2).mean((-2, -1))
    torch.testing.assert_close(focal_losses(logits, truth), expected)
    expected = sigmoid_focal_loss(logits, truth.float().expand_as(logits), alpha=0.6, gamma=1.5).mean((-2, -1))
    torch.testing.assert_close(focal_losses(logits, truth, 0.6, 1.5), expected)


def test_focal_loss_stays_finite_where_probabilities_are_rounded_to_0():
    logits = torch.tensor([[[-200.0, 200.0]]], requires_grad=True)
    truth = torch.tensor([[[True, False]]])
    loss = focal_losses(logits, truth)
    torch.testing.assert_close(loss, torch.tensor([(0.25 * 200 + 0.75 * 200) / 2]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[[-0.125, 0.375]]]))


def test_dice_loss_in_closed_form():
    truth = torch.zeros(1, 4, 4, dtype=torch.bool)
    truth[0, :2] = True
    even = torch.zeros(1, 4, 4)
    # Half of each pixel: 8 in the prediction, 8 in the truth, 4 in both.
    torch.testing.assert_close(dice_losses(even, truth), torch.tensor([1 - 9 / 17]))
    right = torch.where(truth, 40.0, -40.0)
    torch.testing.assert_close(dice_losses(right, truth), torch.tensor([0.0]))
    torch.testing.assert_close(dice_losses(-right, truth), torch.tensor([1 - 1 / 17]))
    nothing = torch.full((1, 4, 4), -40.0)
    torch.testing.assert_close(dice_losses(nothing, torch.zeros_like(truth)), torch.tensor([0.0]))


def test_overlap_is_that_of_the_scores():
    masks, truth = torch.rand(2, 3, 9, 8) < 0.5, torch.rand(3, 9, 8) < 0.5
    masks[1, 2] = truth[2] = False
    found = measure_overlap(masks, truth)
    assert found[1, 2] == 1
    for place in range(2):
        for each in range(3):
            assert found[place, each].item() == pytest.approx(region_similarity(masks[place, each], truth[each]))


def test_loss_of_a_frame_one_by_one():
    """Every object and candidate by itself, in plain numbers."""
    weights = SegmenterConfig(bce=1.5, focal=7.0, dice=2.0, quality=3.0, presence=0.5)
    (output,) = random_outputs(1, objects=3, candidates=4)
    truth = random_truth(3, 1)[:, 0]
    assert not truth[0].any()
    assert truth[1].any()
    expected = []
    for each in range(3):
        score = torch.sigmoid(output.scores[each].double()).item()
        if not truth[each].any():
            expected.append(-0.5 * math.log(1 - score))
            continue
        masks, errors = [], []
        for candidate in range(4):
            logits = torch.nn.functional.interpolate(
                output.logits[each, candidate][None, None], (12, 12), mode="bilinear", align_corners=False
            )[0, 0]
            wanted = truth[each].float()
            shares = logits.sigmoid()
            dice = 1 - (2 * (shares * wanted).sum() + 1) / (shares.sum() + wanted.sum() + 1)
            pixels = 7 * sigmoid_focal_loss(logits, wanted).mean()
            pixels += 1.5 * torch.nn.functional.binary_cross_entropy(shares, wanted)
            masks.append(pixels.item() + 2 * dice.item())
            errors.append(abs(output.qualities[each, candidate].item() - region_similarity(logits > 0, truth[each])))
        expected.append(min(masks) + 3 * sum(errors) / 4 - 0.5 * math.log(score))
    torch.testing.assert_close(frame_losses(output, truth, weights), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_loss_of_a_clip_is_the_mean_of_its_frames():
    weights, outputs, truth = SegmenterConfig(), random_outputs(3, 2, 3), random_truth(2, 3)
    frames = torch.stack([frame_losses(output, truth[:, place], weights) for place, output in enumerate(outputs)])
    torch.testing.assert_close(clip_losses(outputs, truth, weights), frames.mean(0))


def test_only_the_best_candidate_is_trained_and_only_where_the_object_is():
    output = Output(*(part.requires_grad_() for part in random_outputs(1, 2, 3)[0]))
    truth = random_truth(2, 1)[:, 0]
    weights = SegmenterConfig(bce=0.0, focal=20.0, presence=1.0)
    frame_losses(output, truth, weights).sum().backward()
    logits = resize_logits(output.logits.detach(), (12, 12))
    single = 20 * focal_losses(logits, truth[:, None]) + dice_losses(logits, truth[:, None])
    trained = output.logits.grad.flatten(2).abs().sum(2) > 0
    assert trained.tolist() == [[False] * 3, [place == int(single[1].argmin()) for place in range(3)]]
    assert (output.qualities.grad != 0).tolist() == [[False] * 3, [True] * 3]
    torch.testing.assert_close(output.scores.grad, output.scores.detach().sigmoid() - torch.tensor([0.0, 1.0]))


def test_thin_objects_are_learned():
    """A line of one pixel fills a quarter of the cells of the logits: averaged down it would be below the threshold."""
    truth = torch.zeros(1, 16, 16, dtype=torch.bool)
    truth[:, :, 6] = True
    logits = torch.zeros(1, 1, 4, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    for _ in range(300):
        optimizer.zero_grad()
        output = Output(logits, torch.ones(1, 1), torch.ones(1))
        frame_losses(output, truth, SegmenterConfig()).sum().backward()
        optimizer.step()
    found = choose_masks(Output(logits.detach(), torch.ones(1, 1), torch.ones(1)), (16, 16))
    assert found[:, :, 6].all()


def test_loss_is_float32_under_autocast():
    outputs, truth = random_outputs(2, 2, 3), random_truth(2, 2)
    low = [Output(*(part.bfloat16() for part in output)) for output in outputs]
    with torch.autocast("cpu", torch.bfloat16):
        found = clip_losses(low, truth, SegmenterConfig())
    assert found.dtype == torch.float32
    exact = [Output(*(part.float() for part in output)) for output in low]
    torch.testing.assert_close(found, clip_losses(exact, truth, SegmenterConfig()), rtol=0, atol=0)


# ---- metrics


def test_metrics_one_by_one():
    """Figures of objects in plain loops; batches and the one that stands in change nothing."""
    outputs, truth = random_outputs(3, 4, 2), random_truth(4, 3)
    # One that is found in the end, and one before.
    for each, frame in ((1, 2), (2, 1)):
        truth[each, frame] = False
        truth[each, frame, 2:8, 4:10] = True
        outputs[frame].logits[each] = torch.where(truth[each, frame, ::2, ::2], 1.0, -1.0)
        outputs[frame].scores[each] = 1.0
    weights = SegmenterConfig()
    metrics = SegmentationMetrics(3, weights)
    for part, num_clips in ((slice(0, 1), 2), (slice(1, 3), 1)):
        some = [Output(*(value[part] for value in output)) for output in outputs]
        count = len(truth[part])
        metrics.update(some, ObjectTargets(truth[part], torch.full((count,), 1 / count), num_clips))
    last = [Output(*(value[3:] for value in output)) for output in outputs]
    metrics.update(last, ObjectTargets(torch.zeros(1, 3, 12, 12, dtype=torch.bool), torch.zeros(1), 3))
    found = metrics.compute()

    j = torch.zeros(3, 3)
    copied, presence = [], []
    for each in range(3):
        for frame, output in enumerate(outputs):
            best = int(output.qualities[each].argmax())
            mask = resize_logits(output.logits[each : each + 1, best : best + 1], (12, 12))[0, 0] > 0
            seen = bool(output.scores[each] > 0)
            j[each, frame] = region_similarity(mask & seen, truth[each, frame])
            if frame:
                presence.append(seen == bool(truth[each, frame].any()))
                copied.append(region_similarity(truth[each, 0], truth[each, frame]))
    assert found["j_by_frame"] == pytest.approx(j.mean(0).tolist())
    assert found["j"] == pytest.approx(j[:, 1:].mean().item())
    assert found["j_copied"] == pytest.approx(sum(copied) / 6)
    assert ((j > 0.5).sum(0)[1:] == 1).all()
    assert found["on_target"] == pytest.approx((j[:, 2] > 0.5).float().mean().item())
    assert found["presence"] == pytest.approx(sum(presence) / 6)
    kept = [Output(*(value[:3] for value in output)) for output in outputs]
    assert found["loss"] == pytest.approx(clip_losses(kept, truth[:3], weights).mean().item(), rel=1e-5)
    assert (found["objects"], found["images"]) == (3, 6)


def test_metrics_without_anything_to_follow_say_so():
    with pytest.raises(ValueError, match="no clip was counted"):
        SegmentationMetrics(2, SegmenterConfig()).compute()
    metrics = SegmentationMetrics(2, SegmenterConfig())
    metrics.update(random_outputs(2, 1, 1), ObjectTargets(random_truth(1, 2), torch.zeros(1), 5))
    with pytest.raises(ValueError, match="none of 5 clips has an object in its first frame"):
        metrics.compute()


def test_metrics_refuse_outputs_that_are_not_finite_and_other_numbers_of_frames():
    outputs, targets = random_outputs(2, 1, 1), ObjectTargets(random_truth(1, 2), torch.ones(1), 1)
    with pytest.raises(ValueError, match=r"outputs of 2 frames and masks of 2, but clips have 3"):
        SegmentationMetrics(3, SegmenterConfig()).update(outputs, targets)
    outputs[1].scores[0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        SegmentationMetrics(2, SegmenterConfig()).update(outputs, targets)


def test_an_object_that_is_taken_as_absent_has_no_mask():
    output = Output(torch.ones(2, 1, 3, 3), torch.ones(2, 1), torch.tensor([-0.1, 0.1]))
    assert choose_masks(output, (6, 6)).flatten(1).any(1).tolist() == [False, True]
