"""What training minimises: losses for class indices, for the soft targets of mixing, and for hidden pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_rope.masking import PixelTarget, patchify, pixel_targets

Loss = Callable[[Tensor, Tensor], Tensor]


def create_loss(name: str, label_smoothing: float, num_classes: int) -> Loss:
    """Build a loss of logits (batch, classes) and targets: indices (batch) or class shares (batch, classes).

    Indices are smoothed here; soft targets are taken as they are, since mixing has smoothed them. The loss is
    computed in float32 whatever the dtype of the logits.

    Raises:
        ValueError: for an unknown name or a smoothing outside [0, 1).
    Source: DeiT III, arXiv 2204.07118, section 3: under binary cross-entropy every mixed class is a target of its
        own, and the mean over classes is taken.
    """
    from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be at least 0 and below 1")
    if name == "cross-entropy":
        hard: Loss = LabelSmoothingCrossEntropy(label_smoothing) if label_smoothing else F.cross_entropy
        soft: Loss = SoftTargetCrossEntropy()
    elif name == "binary-cross-entropy":
        hard = soft = BinaryCrossEntropy(smoothing=label_smoothing)
    else:
        raise ValueError(f"loss name is {name!r}, but it must be cross-entropy or binary-cross-entropy")

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if logits.ndim != 2 or logits.shape[1] != num_classes:
            raise ValueError(f"logits have shape {tuple(logits.shape)}, but (batch, {num_classes} classes) is needed")
        with torch.autocast(logits.device.type, enabled=False):
            if targets.ndim == 2:
                return soft(logits.float(), targets.float())
            return hard(logits.float(), targets)

    return loss


def masked_loss(
    predictions: Tensor, images: Tensor, masks: Tensor, patch_size: Sequence[int], target: PixelTarget
) -> Tensor:
    """Mean square error of the pixels of hidden patches, in float32 whatever the dtype of the predictions.

    Shapes: predictions (batch, patches, pixels), images (batch, channels, height, width), masks (batch, rows, columns);
        clips have the axes of time too
    Source: MAE (arXiv 2111.06377), section 3.
    """
    with torch.autocast(predictions.device.type, enabled=False):
        wanted = pixel_targets(patchify(images.float(), patch_size), target)
        errors = (predictions.float() - wanted).square().mean(-1)
        hidden = masks.flatten(1).to(errors.dtype)
        return (errors * hidden).sum() / hidden.sum()


def motion_loss(outputs: Tensor, labels: Tensor, num_speeds: int) -> Tensor:
    """Cross-entropy of the direction plus that of the speed, in float32 whatever the dtype of the outputs.

    Shapes: outputs (batch, 8 directions + num_speeds), labels (batch,): direction * num_speeds + speed
    """
    directions, speeds = outputs.float().split([outputs.shape[1] - num_speeds, num_speeds], dim=1)
    return F.cross_entropy(directions, labels // num_speeds) + F.cross_entropy(speeds, labels % num_speeds)
