"""What a model is trained and judged by: classification of images, prediction of masked patches.

A task turns batches of the loader into inputs and targets, and knows its loss and its metrics; training and evaluation
are the same for all of them. A new task is a class here and a line in `create_task`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vision_rope.config import AugmentConfig, LossConfig, MaskedConfig, TrainConfig
from vision_rope.losses import create_loss, masked_loss
from vision_rope.masking import draw_masks, paste
from vision_rope.metrics import ClassificationMetrics, MaskedMetrics
from vision_rope.sizes import format_size


@dataclass(frozen=True)
class Batch:
    """What the model gets, and what its outputs are compared with."""

    inputs: tuple[Tensor, ...]
    targets: Any


class Metrics(Protocol):
    """Figures of a model, added up batch by batch."""

    def update(self, outputs: Tensor, targets: Any) -> None: ...

    def compute(self) -> dict[str, Any]: ...


class Task(Protocol):
    """What training and evaluation ask a task for.

    Attributes:
        headline: keys of the metrics that a line of the log shows.
    """

    headline: tuple[str, ...]

    def train_batch(self, images: Tensor, labels: Tensor, seed: int) -> Batch:
        """A training batch; what is random about it follows from the seed."""

    def eval_batch(self, images: Tensor, labels: Tensor, places: Tensor | None) -> Batch:
        """An evaluation batch; what is drawn follows from the images' places in the data set alone."""

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuse an image size that the task cannot be done at."""

    def loss(self, outputs: Tensor, targets: Any) -> Tensor:
        """What is minimised."""

    def count_hits(self, outputs: Tensor, targets: Any) -> Tensor | None:
        """Number of right answers of a training batch; None where there is no right and wrong."""

    def create_metrics(self, device: torch.device) -> Metrics:
        """Metrics of an evaluation."""

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """What the best epoch has most of."""

    def draw(self, batch: Batch, outputs: Mapping[str, Tensor], path: Path) -> Path | None:
        """A picture of predictions by name; None where there is nothing to be seen."""


class Classification:
    """Images into classes."""

    headline: tuple[str, ...] = ("top1", "auroc", "nll")

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

    def train_batch(self, images: Tensor, labels: Tensor, seed: int) -> Batch:
        """Mixed images and soft targets where mixing is on."""
        if self._mixing is None:
            return Batch((images,), labels)
        mixed, targets = self._mixing(images, labels, seed)
        return Batch((mixed,), targets)

    def eval_batch(self, images: Tensor, labels: Tensor, places: Tensor | None) -> Batch:
        """The images and their labels."""
        return Batch((images,), labels)

    def check_size(self, size: tuple[int, int]) -> None:
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
    """Pixels of hidden patches.

    Args:
        seed: of the masks in evaluation; by its place among the images that are judged every image has its own for a
            grid, the same in every run and for every method. Images of a stream, which have no place of their own,
            get masks by their place in the batch.
    """

    headline: tuple[str, ...] = ("r2", "mse")

    def __init__(
        self,
        masked: MaskedConfig,
        patch_size: tuple[int, int],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
    ) -> None:
        self._masked = masked
        self._patch_size = patch_size
        self._mean, self._std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
        self._seed = seed

    def train_batch(self, images: Tensor, labels: Tensor, seed: int) -> Batch:
        """Images and fresh masks; labels are not looked at."""
        return self._batch(images, self._draw(_size(images), len(images), seed))

    def eval_batch(self, images: Tensor, labels: Tensor, places: Tensor | None) -> Batch:
        """Images and the masks that belong to them."""
        from vision_rope.data.randomness import derive_seed

        own = range(len(images)) if places is None or bool((places < 0).any()) else places.tolist()
        masks = [self._draw(_size(images), 1, derive_seed(self._seed, place)) for place in own]
        return self._batch(images, torch.cat(masks))

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuse a size whose patches leave nothing to hide, nothing to see or no choice."""
        try:
            # A draw for nothing: it refuses what a batch would stumble over.
            self._draw(size, 1, seed=0)
        except ValueError as error:
            raise ValueError(f"size {format_size(size)} cannot be masked: {error}") from error

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
        """The first images of a batch, what of them was visible, and what each method made of the rest."""
        from vision_rope.plots import plot_images

        images, masks = (part[:most].float().cpu() for part in batch.inputs)
        masks = masks.bool()
        flat = torch.zeros(len(images), masks[0].numel(), images.shape[1] * self._patch_size[0] * self._patch_size[1])
        grey = paste(images, flat, masks, self._patch_size, "pixels")
        lines = {"image": images, "visible": grey}
        for name, predictions in outputs.items():
            shown = predictions[:most].float().cpu()
            lines[name] = paste(images, shown, masks, self._patch_size, self._masked.target)
        colours = {name: (line * self._std + self._mean).clamp(0, 1) for name, line in lines.items()}
        plot_images(colours, path)
        return path

    def _batch(self, images: Tensor, masks: Tensor) -> Batch:
        masks = masks.to(images.device, non_blocking=True)
        return Batch((images, masks), (images, masks))

    def _draw(self, size: tuple[int, int], count: int, seed: int) -> Tensor:
        height, width = self._patch_size
        return draw_masks(
            count,
            (size[0] // height, size[1] // width),
            ratio=self._masked.ratio,
            block=self._masked.block,
            generator=torch.Generator().manual_seed(seed),
        )


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


def create_task(config: TrainConfig, num_classes: int, patch_size: tuple[int, int]) -> Task:
    """The task that a configuration names."""
    if config.task == "masked":
        data = config.data
        return MaskedPrediction(config.masked, patch_size, mean=data.mean, std=data.std, seed=data.split_seed)
    return Classification(num_classes, config.loss, config.augment)
