"""What a segmenter is trained by: masks, their predicted quality, and whether an object is in the frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from vision_rope.config import SegmenterConfig
    from vision_rope.segmenter import FrameOutput

ALPHA, GAMMA = 0.25, 2.0


def clip_losses(outputs: Sequence[FrameOutput], truth: Tensor, weights: SegmenterConfig) -> Tensor:
    """The loss of each object, averaged over the frames of its clip, in float32 whatever the dtype of the outputs.

    Logits are resized to the pixels of the truth, bilinearly, as they are where masks are made of them: what is trained
    is what is scored, and an object thinner than a cell of the logits keeps its pixels, which averaging the truth down
    to the cells would take below the threshold of one half.

    Shapes: outputs a frame each, truth bool (objects, frames, height, width) -> (objects,)
    """
    with torch.autocast(truth.device.type, enabled=False):
        losses = [frame_losses(output, truth[:, frame], weights) for frame, output in enumerate(outputs)]
        return torch.stack(losses).mean(0)


def frame_losses(output: FrameOutput, truth: Tensor, weights: SegmenterConfig) -> Tensor:
    """The loss of each object in a frame.

    Of several candidates the mask with the smallest loss alone is trained; the qualities of all are.
    Where the object is absent, there is no mask to be learned, and its score alone counts.

    Shapes: truth bool (objects, height, width) -> (objects,)
    Source: SAM 2 (arXiv 2408.00714), appendix on training.
    """
    logits = resize_logits(output.logits, truth.shape[-2:])
    wanted = truth[:, None]
    masks = weights.dice * dice_losses(logits, wanted)
    if weights.bce:
        masks = masks + weights.bce * pixel_losses(logits, wanted)
    if weights.focal:
        masks = masks + weights.focal * focal_losses(logits, wanted)
    quality = (output.qualities.float() - measure_overlap(logits > 0, wanted)).abs().mean(1)
    visible = truth.flatten(1).any(1).float()
    presence = F.binary_cross_entropy_with_logits(output.scores.float(), visible, reduction="none")
    return visible * (masks.amin(1) + weights.quality * quality) + weights.presence * presence


def resize_logits(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Logits (objects, candidates, h, w) at the pixels of a frame, in float32."""
    return F.interpolate(logits.float(), tuple(size), mode="bilinear", align_corners=False)


def pixel_losses(logits: Tensor, truth: Tensor) -> Tensor:
    """Binary cross-entropy of a mask, averaged over its pixels.

    Shapes: as in `focal_losses`
    """
    return F.softplus(torch.where(truth, -logits, logits)).mean((-2, -1))


def focal_losses(logits: Tensor, truth: Tensor, alpha: float = ALPHA, gamma: float = GAMMA) -> Tensor:
    """Focal loss of a mask, averaged over its pixels: what is told apart already counts little.

    Shapes: logits (..., height, width), truth bool that broadcasts to them -> (...)
    Source: Lin et al. (arXiv 1708.02002), equation 5.
    """
    # The logit that a pixel is what it is: a probability p of the truth has the loss -(1 - p)^gamma log p.
    right = torch.where(truth, logits, -logits)
    balance = torch.where(truth, alpha, 1 - alpha)
    return (balance * (-right).sigmoid() ** gamma * F.softplus(-right)).mean((-2, -1))


def dice_losses(logits: Tensor, truth: Tensor) -> Tensor:
    """One less the overlap of a soft mask with the truth, twice their product to their sum; both are one pixel larger.

    Shapes: as in `focal_losses`
    Source: V-Net (arXiv 1606.04797), equation 3, with plain sums below.
    """
    probabilities, wanted = logits.sigmoid(), truth.to(logits.dtype)
    shared = (probabilities * wanted).sum((-2, -1))
    return 1 - (2 * shared + 1) / (probabilities.sum((-2, -1)) + wanted.sum((-2, -1)) + 1)


def measure_overlap(masks: Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of masks, 1 where both are empty.

    Shapes: bool (..., height, width) that broadcast -> float32 (...)
    """
    union = (masks | truth).sum((-2, -1))
    return torch.where(union == 0, 1.0, (masks & truth).sum((-2, -1)) / union.clamp(min=1))
