"""Metrics of a segmenter on clips, added up batch by batch and equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vision_rope.motion_metrics import Sums
from vision_rope.segmentation_losses import clip_losses, measure_overlap, resize_logits

if TYPE_CHECKING:
    from vision_rope.config_video import SegmenterConfig
    from vision_rope.segmenter import FrameOutput

# An object whose mask overlaps the true one by more is still followed.
ON_TARGET = 0.5


@dataclass(frozen=True)
class ObjectTargets:
    """The true masks of the objects of a batch of clips.

    Attributes:
        masks: bool (objects, frames, height, width).
        shares: float32 (objects,): what part of the batch an object is; those of a clip together are one clip's, and
            one that stands in where no clip has any is none of it.
        num_clips: of the batch.
    """

    masks: Tensor
    shares: Tensor
    num_clips: int


class SegmentationMetrics:
    """How well objects that were shown in the first frame are found in the others; torchmetrics underneath.

    Args:
        num_frames: frames of a clip.
        section: weights of the loss.
    """

    def __init__(self, num_frames: int, section: SegmenterConfig, device: torch.device | str = "cpu") -> None:
        names = ("j", "j_copied", "on_target", "presence", "loss")
        self._section = section
        self._num_frames = num_frames
        self._objects = Sums((*names, *map(str, range(num_frames))), device)
        self._clips = Sums(("clips",), device)

    def update(self, outputs: Sequence[FrameOutput], targets: ObjectTargets) -> None:
        """Add one batch.

        Raises: ValueError for outputs that are not finite or of another number of frames.
        """
        truth = targets.masks
        if len(outputs) != self._num_frames or truth.shape[1] != self._num_frames:
            raise ValueError(
                f"there are outputs of {len(outputs)} frames and masks of {truth.shape[1]}, but clips have "
                f"{self._num_frames}"
            )
        if not all(bool(part.isfinite().all()) for output in outputs for part in output):
            raise ValueError(
                "outputs are not finite (NaN or infinite); the weights are damaged, the training diverged or the "
                "precision is too low"
            )
        found = torch.stack([choose_masks(output, truth.shape[-2:]) for output in outputs], dim=1)
        seen = torch.stack([output.scores > 0 for output in outputs], dim=1)
        visible = truth.flatten(2).any(2)
        overlaps = measure_overlap(found, truth)
        figures = torch.stack(
            (
                overlaps[:, 1:].mean(1),
                measure_overlap(truth[:, :1], truth)[:, 1:].mean(1),
                (overlaps[:, -1] > ON_TARGET).float(),
                (seen == visible)[:, 1:].float().mean(1),
                clip_losses(outputs, truth, self._section),
            ),
            dim=1,
        )
        self._objects.update(torch.cat((figures, overlaps), dim=1)[targets.shares > 0])
        self._clips.update(torch.ones(targets.num_clips, 1, device=truth.device))

    def compute(self) -> dict[str, float | int | list[float]]:
        """The metrics of everything seen so far on all ranks.

        Units: shares, each object counting the same. j: intersection over union, 1 where both are empty, averaged over
            the frames after the first; j_copied: that of the true first mask in the place of all later ones;
            j_by_frame: j of each frame, the first too; on_target: objects of which j is above a half in the last frame;
            presence: frames after the first in which the object score is right about whether the object is there. loss:
            see `clip_losses`. images counts clips.
        Raises: ValueError where no object was counted.
        """
        _, clips = self._clips.compute_means()
        means, objects = self._objects.compute_means()
        if objects == 0:
            raise ValueError(
                f"none of {clips} clips has an object in its first frame, so that there is nothing to follow"
                if clips
                else "no clip was counted: the data set or the split is empty"
            )
        by_frame = [means.pop(str(frame)) for frame in range(self._num_frames)]
        return {**means, "j_by_frame": by_frame, "objects": objects, "images": clips}


def choose_masks(output: FrameOutput, size: Sequence[int]) -> Tensor:
    """The mask of each object: the candidate of the highest quality, empty where the object is taken as absent.

    Shapes: -> bool (objects, height, width)
    """
    best = output.qualities.argmax(1)
    logits = output.logits[torch.arange(len(best), device=best.device), best]
    return (resize_logits(logits[:, None], size)[:, 0] > 0) & (output.scores > 0)[:, None, None]
