"""Following objects through clips: what a segmenter is trained and judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vision_rope.config_video import SegmenterConfig
from vision_rope.prompting import Kind, choose_kind, draw_prompts
from vision_rope.segmentation_losses import clip_losses
from vision_rope.segmentation_metrics import ObjectTargets, SegmentationMetrics, choose_masks
from vision_rope.task_protocol import Batch

if TYPE_CHECKING:
    from vision_rope.data.segmented_clips import SegmentedClips
    from vision_rope.segmenter import FrameOutput

# Ids are one byte.
NUM_IDS = 256


class Segmentation:
    """Masks of objects in all frames of a clip, of what shows them in the first one.

    Objects that the first frame does not show are left out. A batch has one kind of prompts in training; in evaluation
    objects are shown by their masks.

    Args:
        num_frames: frames of a clip.
        mean: of each channel, which frames were normalised by.
        std: likewise.
    """

    headline: tuple[str, ...] = ("j", "j_copied", "on_target", "presence", "loss")
    clip_factor = 1
    pictures: str | None = "masks"

    def __init__(
        self, section: SegmenterConfig, num_frames: int, *, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self._section = section
        self._num_frames = num_frames
        self._mean, self._std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    def train_batch(self, images: SegmentedClips, labels: Tensor, seed: int) -> Batch:
        """Clips, their objects, and prompts of a kind that the seed chooses."""
        kind = choose_kind(self._section.mask_prompts, self._section.box_prompts, seed)
        return _make_batch(images, kind, seed)

    def eval_batch(self, images: SegmentedClips, labels: Tensor, places: Tensor | None) -> Batch:
        """Clips, their objects, and the masks of these in the first frame."""
        return _make_batch(images, "mask", seed=0)

    def check_size(self, size: Sequence[int]) -> None:
        """All sizes will do."""

    def loss(self, outputs: Sequence[FrameOutput], targets: ObjectTargets) -> Tensor:
        """The mean over clips of the mean over their objects; clips without objects have none.

        Each clip counts the same, so that processes that share a batch need not know of each other's objects.
        """
        return (clip_losses(outputs, targets.masks, self._section) * targets.shares).sum()

    def count_hits(self, outputs: Any, targets: Any) -> None:
        """Masks are more and less right."""

    def create_metrics(self, device: torch.device) -> SegmentationMetrics:
        """Overlap with the true masks, and whether objects are known to be there."""
        return SegmentationMetrics(self._num_frames, self._section, device)

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """The mean overlap; on a tie, the loss."""
        return (row["j"], -row["loss"])

    def draw(self, batch: Batch, outputs: Mapping[str, Any], path: Path, most: int = 8) -> Path:
        """Frames of the first clips of a batch, with the true masks and those that were found."""
        from vision_rope.plots import plot_images

        frames, owners = batch.inputs[:2]
        count = min(most, frames.shape[2])
        places = torch.linspace(0, frames.shape[2] - 1, count).round().long().tolist()
        clips = range(min(len(frames), max(most // count, 1)))
        pictures = [frames[clip, :, place].float().cpu() * self._std + self._mean for clip in clips for place in places]
        found = {
            name: torch.stack([choose_masks(output, frames.shape[-2:]) for output in parts], dim=1)
            for name, parts in outputs.items()
        }
        lines = {}
        for name, masks in {"true": batch.targets.masks, **found}.items():
            of_frames = [masks[owners == clip, place].cpu() for clip in clips for place in places]
            painted = [paint(picture, own) for picture, own in zip(pictures, of_frames, strict=True)]
            lines[name] = torch.stack(painted).clamp(0, 1)
        plot_images(lines, path)
        return path


def find_objects(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The objects that the first frames of clips show: whose they are, and their ids; of a clip in rising order.

    Waits for the device once, since how many there are decides about the shapes of everything else.

    Shapes: ids uint8 (batch, frames, height, width) -> int64 (objects,), uint8 (objects,)
    """
    shown = torch.zeros(len(ids), NUM_IDS, dtype=torch.bool, device=ids.device)
    shown.scatter_(1, ids[:, 0].flatten(1).long(), True)
    shown[:, 0] = False
    owners, numbers = shown.nonzero(as_tuple=True)
    return owners, numbers.to(torch.uint8)


def paint(picture: Tensor, masks: Tensor, strength: float = 0.6) -> Tensor:
    """A picture (3, height, width) with each mask of bool (objects, height, width) in its colour."""
    from matplotlib.colors import to_rgb

    from vision_rope.plots import COLORS

    for place, mask in enumerate(masks):
        # The first colour, black, is for lines alone.
        colour = torch.tensor(to_rgb(COLORS[1 + place % (len(COLORS) - 1)])).view(3, 1, 1)
        picture = torch.where(mask, (1 - strength) * picture + strength * colour, picture)
    return picture


def _make_batch(clips: SegmentedClips, kind: Kind, seed: int) -> Batch:
    owners, numbers = find_objects(clips.ids)
    num_clips = len(clips.ids)
    if len(owners):
        masks = clips.ids[owners] == numbers[:, None, None, None]
        shares = 1 / (torch.bincount(owners, minlength=num_clips)[owners] * num_clips)
    else:
        # Something that is nowhere goes through the model, for gradients that are zero but there, and counts nothing.
        owners = torch.zeros(1, dtype=torch.int64, device=clips.ids.device)
        masks = torch.zeros(1, *clips.ids.shape[1:], dtype=torch.bool, device=clips.ids.device)
        shares = torch.zeros(1, device=clips.ids.device)
    prompts = draw_prompts(masks[:, 0], kind, seed)
    return Batch((clips.frames, owners, *prompts), ObjectTargets(masks, shares, num_clips))
