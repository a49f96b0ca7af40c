"""What a model is trained and judged by: classification, prediction of masked patches, motion in clips.

A new task is a class that does what `Task` asks for, and a line in `create_task`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vision_rope.config import AugmentConfig, LossConfig, MaskedConfig, TrainConfig
from vision_rope.losses import create_loss, masked_loss, motion_loss
from vision_rope.masking import draw_masks, paste
from vision_rope.metrics import ClassificationMetrics, MaskedMetrics
from vision_rope.motion_metrics import MotionMetrics, PlaybackMetrics, reverse_labels
from vision_rope.segmentation_task import Segmentation
from vision_rope.sizes import format_size
from vision_rope.task_protocol import Batch, Metrics, Task

if TYPE_CHECKING:
    from vision_rope.data.clips import Clips

__all__ = ["Batch", "Classification", "MaskedPrediction", "Metrics", "Motion", "Playback", "Task", "create_task"]


class Classification:
    """Images or clips into classes."""

    headline: tuple[str, ...] = ("top1", "auroc", "nll")
    clip_factor = 1
    pictures: str | None = None

    def __init__(self, num_classes: int, loss: LossConfig | None = None, augment: AugmentConfig | None = None) -> None:
        from vision_rope.data import Mixing

        if num_classes < 2:
            raise ValueError(
                f"num_classes is {num_classes}, but classification tells at least 2 classes apart; images without "
                "labels are for task: masked"
            )
        loss, augment = loss or LossConfig(), augment or AugmentConfig()
        self.num_classes = num_classes
        self.loss = create_loss(loss.name, loss.label_smoothing, num_classes)
        self._mixing = (
            Mixing(
                mixup=augment.mixup,
                cutmix=augment.cutmix,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                label_smoothing=loss.label_smoothing,
                num_classes=num_classes,
            )
            if augment.mixup or augment.cutmix
            else None
        )

    def train_batch(self, images: Tensor | Clips, labels: Tensor, seed: int) -> Batch:
        """Mixed images and soft targets where mixing is on."""
        pictures, seconds = _parts(images)
        if self._mixing is None:
            return Batch((pictures, *seconds), labels)
        # Frames as channels: all of a clip are mixed alike.
        mixed, targets = self._mixing(pictures.flatten(1, -3), labels, seed)
        return Batch((mixed.view_as(pictures), *seconds), targets)

    def eval_batch(self, images: Tensor | Clips, labels: Tensor, places: Tensor | None) -> Batch:
        """The images and their labels."""
        pictures, seconds = _parts(images)
        return Batch((pictures, *seconds), labels)

    def check_size(self, size: Sequence[int]) -> None:
        """All sizes will do."""

    def count_hits(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Answers that name the class, or the larger class of a mixed image."""
        answers = targets.argmax(1) if targets.ndim == 2 else targets
        return (outputs.argmax(1) == answers).sum()

    def create_metrics(self, device: torch.device) -> ClassificationMetrics:
        """Accuracy, likelihood and calibration."""
        return ClassificationMetrics(self.num_classes, device)

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """AUROC for two classes, else top-1; on a tie, the likelihood.

        Where the validation part lacks one of two classes there is no AUROC, and top-1 decides.
        """
        top1, auroc = row["top1"], row.get("auroc")
        return (top1 if auroc is None or not np.isfinite(auroc) else auroc, -row["nll"])

    def draw(self, batch: Batch, outputs: Mapping[str, Tensor], path: Path) -> None:
        """Nothing."""


class MaskedPrediction:
    """Pixels of hidden patches of images, or of hidden tubelets of clips.

    Args:
        patch_size: (height, width), of clips (frames, height, width).
        seed: of the masks in evaluation; by its place among the images that are judged every image has its own for a
            grid, the same in every run and for every method. Images of a stream, which have no place of their own,
            get masks by their place in the batch.
    """

    headline: tuple[str, ...] = ("r2", "mse")
    clip_factor = 1
    pictures: str | None = "reconstructions"

    def __init__(
        self,
        masked: MaskedConfig,
        patch_size: Sequence[int],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
    ) -> None:
        self._masked = masked
        self._patch_size = tuple(patch_size)
        self._mean, self._std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
        self._seed = seed

    def train_batch(self, images: Tensor | Clips, labels: Tensor, seed: int) -> Batch:
        """Images and fresh masks; labels are not looked at."""
        pictures, seconds = _parts(images)
        return self._batch(pictures, self._draw(pictures.shape[2:], len(pictures), seed), seconds)

    def eval_batch(self, images: Tensor | Clips, labels: Tensor, places: Tensor | None) -> Batch:
        """Images and the masks that belong to them."""
        from vision_rope.data.randomness import derive_seed

        pictures, seconds = _parts(images)
        own = range(len(pictures)) if places is None or bool((places < 0).any()) else places.tolist()
        masks = [self._draw(pictures.shape[2:], 1, derive_seed(self._seed, place)) for place in own]
        return self._batch(pictures, torch.cat(masks), seconds)

    def check_size(self, size: Sequence[int]) -> None:
        """Refuse a size whose patches leave nothing to hide, nothing to see or no choice."""
        try:
            # A draw for nothing: it refuses what a batch would stumble over.
            self._draw(size, 1, seed=0)
        except ValueError as error:
            raise ValueError(f"size {format_size((size[-2], size[-1]))} cannot be masked: {error}") from error

    def loss(self, outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """See `masked_loss`."""
        return masked_loss(outputs, *targets, self._patch_size, self._masked.target)

    def count_hits(self, outputs: Tensor, targets: Any) -> None:
        """There is no right and wrong."""

    def create_metrics(self, device: torch.device) -> MaskedMetrics:
        """R2 and mean square error."""
        return MaskedMetrics(self._patch_size, self._masked.target, device)

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """A low error; on the same images and masks it is a high R2, which flat images have none of."""
        return (-row["mse"],)

    def draw(self, batch: Batch, outputs: Mapping[str, Tensor], path: Path, most: int = 8) -> Path:
        """The first images of a batch, what of them was visible, and what each method made of the rest.

        Of clips, frames of the first two, side by side.
        """
        from vision_rope.plots import plot_images

        count = most if len(self._patch_size) == 2 else 2
        images, masks = (part[:count].float().cpu() for part in batch.inputs[:2])
        masks = masks.bool()
        pixels = images.shape[1] * math.prod(self._patch_size)
        flat = torch.zeros(len(images), masks[0].numel(), pixels)
        lines = {"image": images, "visible": paste(images, flat, masks, self._patch_size, "pixels")}
        for name, predictions in outputs.items():
            shown = predictions[:count].float().cpu()
            lines[name] = paste(images, shown, masks, self._patch_size, self._masked.target)
        colours = {
            name: (_show_frames(line, most // count) * self._std + self._mean).clamp(0, 1)
            for name, line in lines.items()
        }
        plot_images(colours, path)
        return path

    def _batch(self, pictures: Tensor, masks: Tensor, seconds: Sequence[Tensor]) -> Batch:
        masks = masks.to(pictures.device, non_blocking=True)
        return Batch((pictures, masks, *seconds), (pictures, masks))

    def _draw(self, size: Sequence[int], count: int, seed: int) -> Tensor:
        return draw_masks(
            count,
            [length // patch for length, patch in zip(size, self._patch_size, strict=True)],
            ratio=self._masked.ratio,
            block=self._masked.block,
            block_steps=self._masked.block_steps,
            generator=torch.Generator().manual_seed(seed),
        )


class Motion:
    """The direction and the speed of what moves in a clip of `MotionSource`.

    A model has 8 outputs for directions and one for each speed. In evaluation every clip is judged forwards and played
    backwards, where its direction is the opposite one: a model that does not look at the order of frames answers both
    alike and finds the right way in exactly half of them.
    """

    headline: tuple[str, ...] = ("direction", "way", "speed", "nll")
    clip_factor = 1
    pictures: str | None = None

    def __init__(self, num_speeds: int) -> None:
        self._num_speeds = num_speeds

    def train_batch(self, images: Tensor | Clips, labels: Tensor, seed: int) -> Batch:
        """Clips and their classes."""
        frames, seconds = _clip_parts(images)
        return Batch((frames, seconds), labels)

    def eval_batch(self, images: Tensor | Clips, labels: Tensor, places: Tensor | None) -> Batch:
        """All clips forwards, then all backwards."""
        frames, seconds = _clip_parts(images)
        inputs = torch.cat((frames, frames.flip(2))), torch.cat((seconds, _mirror(seconds)))
        return Batch(inputs, torch.cat((labels, reverse_labels(labels, self._num_speeds))))

    def check_size(self, size: Sequence[int]) -> None:
        """All sizes will do."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `motion_loss`."""
        return motion_loss(outputs, targets, self._num_speeds)

    def count_hits(self, outputs: Tensor, targets: Any) -> None:
        """There are two questions, and no single right answer to count."""

    def create_metrics(self, device: torch.device) -> MotionMetrics:
        """Accuracies of direction, way and speed."""
        return MotionMetrics(self._num_speeds, device)

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """Right directions; on a tie, the likelihood."""
        return (row["direction"], -row["nll"])

    def draw(self, batch: Batch, outputs: Mapping[str, Tensor], path: Path) -> None:
        """Nothing."""


class Playback(Motion):
    """A model of task motion on clips whose motion nobody wrote down: are answers right relative to each other?

    Of every clip its first half is played at its own rate, and every second frame of the whole at twice the speed; both
    forwards and backwards. Labels are not looked at.

    Args:
        speeds: those the model tells apart.
        std: of each channel, which images were normalised by.
    """

    headline: tuple[str, ...] = ("reversal", "way", "faster")
    clip_factor = 2

    def __init__(self, speeds: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(len(speeds))
        self._speeds = speeds
        self._std = std

    def eval_batch(self, images: Tensor | Clips, labels: Tensor, places: Tensor | None) -> Batch:
        """Slow forwards, slow backwards, fast forwards, fast backwards; how much each clip moves.

        Raises: ValueError for clips that are not halved into two frames and more.
        """
        frames, seconds = _clip_parts(images)
        half = frames.shape[2] // 2
        if half < 2 or frames.shape[2] % 2:
            raise ValueError(
                f"clips have {frames.shape[2]} frames, but playing them at two speeds takes an even number from 4 on"
            )
        slow, fast = frames[:, :, :half], frames[:, :, ::2]
        once = seconds[:, :half]
        inputs = torch.cat((slow, slow.flip(2), fast, fast.flip(2)))
        change = (frames.diff(dim=2) * frames.new_tensor(self._std).view(3, 1, 1, 1)).abs().mean((1, 2, 3, 4))
        return Batch((inputs, torch.cat((once, _mirror(once)) * 2)), change)

    def create_metrics(self, device: torch.device) -> PlaybackMetrics:  # type: ignore[override]
        """Shares of clips whose answers agree with how they were played."""
        return PlaybackMetrics(self._speeds, device)


def _parts(images: Tensor | Clips) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Images and nothing, or the frames of clips and their seconds."""
    return (images, ()) if isinstance(images, Tensor) else (images.frames, (images.seconds,))


def _clip_parts(images: Tensor | Clips) -> tuple[Tensor, Tensor]:
    assert not isinstance(images, Tensor), "the configuration was checked: motion is told in clips"
    return images.frames, images.seconds


def _mirror(seconds: Tensor) -> Tensor:
    """Seconds (batch, frames) of clips that are played backwards, beginning when they did."""
    return seconds[:, :1] + seconds[:, -1:] - seconds.flip(1)


def _show_frames(pictures: Tensor, count: int) -> Tensor:
    """Images as they are; of each clip so many frames, evenly spread, one after the other."""
    if pictures.ndim == 4:
        return pictures
    places = torch.linspace(0, pictures.shape[2] - 1, min(count, pictures.shape[2])).round().long()
    return pictures[:, :, places].transpose(1, 2).flatten(0, 1)


def create_task(config: TrainConfig, num_classes: int, patch_size: Sequence[int]) -> Task:
    """The task that a configuration names.

    Args:
        patch_size: (height, width) of a patch, with or without the frames of a tubelet in front.
    """
    if config.task == "masked":
        data, video = config.data, config.video
        tubelet = () if video.num_frames is None else (video.tubelet,)
        whole = (*tubelet, *patch_size[-2:])
        return MaskedPrediction(config.masked, whole, mean=data.mean, std=data.std, seed=data.split_seed)
    if config.task == "motion":
        return Motion(config.motion.num_speeds)
    if config.task == "segmentation":
        assert config.video.num_frames is not None, "the configuration was checked: objects are followed in clips"
        return Segmentation(config.segmenter, config.video.num_frames, mean=config.data.mean, std=config.data.std)
    return Classification(num_classes, config.loss, config.augment)
