"""Metrics of classification and of masked prediction, added up batch by batch and equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC

from vision_rope.masking import PixelTarget, patchify, pixel_targets

NUM_CALIBRATION_BINS = 15


class ClassificationMetrics:
    """Accuracy, ranking and calibration of a classifier over a stream of batches.

    Under torch.distributed every rank calls `compute` once; torchmetrics gathers the sums, so all ranks get
    the same numbers and each image counts once, however unevenly the images are spread. A rank may have seen
    none.

    Shapes: logits (batch, num_classes), any floating dtype; labels (batch,), integers.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}; a classifier has at least 2 classes")
        self.num_classes = num_classes
        metrics: dict[str, Metric] = {
            "counts": ClassCounts(num_classes),
            "nll": NegativeLogLikelihood(),
            "ece": CalibrationError(NUM_CALIBRATION_BINS),
        }
        if num_classes == 2:
            metrics["auroc"] = BinaryAUROC(validate_args=False)
        # Compute groups are off: they join metrics whose states happen to agree after the first batch and
        # then report one for the other.
        self._metrics = MetricCollection(metrics, compute_groups=False).to(device)
        # float64 sums make the order of addition, and so the number of ranks, invisible; MPS has no float64.
        if torch.device(device).type != "mps":
            for name in ("nll", "ece"):
                self._metrics[name].set_dtype(torch.float64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch.

        Raises: ValueError for wrong shapes, labels outside the classes and logits that are not finite.
        """
        self._check(logits, labels)
        self._add(logits, labels)

    def compute(self) -> dict[str, float | int | list[float]]:
        """The metrics of everything seen so far on all ranks.

        Units: shares in 0..1; nll in nats an image. `per_class` lists each class's accuracy, nan where a
        class has no image; `balanced_accuracy` averages the classes that have images; `auroc` is nan where
        one class has none.
        Keys: top1, top5 (more than 5 classes), balanced_accuracy and auroc (2 classes; class 1 is the
        positive one), nll, ece (15 bins of equal width of the top class's probability), per_class, images.

        Raises: ValueError where no image was counted.
        """
        device = self._metrics["counts"].device
        # A rank without images still takes part in the gathering and needs states of the right dtype for it.
        self._add(torch.zeros(0, self.num_classes, device=device), torch.zeros(0, dtype=torch.long, device=device))
        hits, top5_hits, images_per_class = self._metrics["counts"].compute().tolist()
        images = sum(images_per_class)
        if images == 0:
            raise ValueError("no image was counted: the data set or the split is empty")
        per_class = [hit / total if total else math.nan for hit, total in zip(hits, images_per_class, strict=True)]

        result: dict[str, float | int | list[float]] = {"top1": sum(hits) / images}
        if self.num_classes > 5:
            result["top5"] = sum(top5_hits) / images
        if self.num_classes == 2:
            seen = [accuracy for accuracy in per_class if not math.isnan(accuracy)]
            result["balanced_accuracy"] = sum(seen) / len(seen)
            result["auroc"] = float(self._metrics["auroc"].compute()) if len(seen) == 2 else math.nan
        result["nll"] = float(self._metrics["nll"].compute())
        result["ece"] = float(self._metrics["ece"].compute())
        result["per_class"] = per_class
        result["images"] = images
        return result

    def reset(self) -> None:
        """Forget everything seen so far."""
        self._metrics.reset()

    def _check(self, logits: Tensor, labels: Tensor) -> None:
        if logits.ndim != 2 or logits.shape[1] != self.num_classes or labels.shape != logits.shape[:1]:
            raise ValueError(
                f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must be "
                f"(batch, {self.num_classes}) and (batch,)"
            )
        wrong = int((~torch.isfinite(logits)).any(dim=1).sum())
        if wrong:
            raise ValueError(
                f"logits are not finite (NaN or infinite) for {wrong} of {len(logits)} images of a batch; "
                "the weights are damaged, the training diverged or the precision is too low"
            )
        outside = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(outside):
            raise ValueError(
                f"labels hold {int(outside[0])}, outside the {self.num_classes} classes 0..{self.num_classes - 1}"
            )

    def _add(self, logits: Tensor, labels: Tensor) -> None:
        logits = logits.detach().float()
        labels = labels.long()
        probabilities = logits.softmax(dim=1)
        self._metrics["counts"].update(logits, labels)
        self._metrics["nll"].update(logits, labels)
        self._metrics["ece"].update(probabilities, labels)
        if "auroc" in self._metrics:
            self._metrics["auroc"].update(probabilities[:, 1], labels)


class MaskedMetrics:
    """How much of the pixels of hidden patches is explained, over a stream of batches; torchmetrics underneath.

    Under torch.distributed every rank calls `compute` once and gets the same numbers.
    """

    def __init__(
        self, patch_size: Sequence[int], target: PixelTarget = "pixels", device: torch.device | str = "cpu"
    ) -> None:
        self._patch_size = patch_size
        self._target = target
        self._sums = PixelSums().to(device)
        if torch.device(device).type != "mps":
            self._sums.set_dtype(torch.float64)

    def update(self, predictions: Tensor, targets: tuple[Tensor, Tensor]) -> None:
        """Add one batch.

        Shapes: predictions (batch, patches, pixels); targets: images (batch, channels, height, width) and masks
            (batch, rows, columns), True where hidden; clips have the axes of time too
        Raises: ValueError for predictions that are not finite or of another shape.
        """
        images, masks = targets
        wanted = pixel_targets(patchify(images.float(), self._patch_size), self._target)
        if predictions.shape != wanted.shape:
            raise ValueError(f"predictions have shape {tuple(predictions.shape)}, but {tuple(wanted.shape)} is needed")
        if not bool(predictions.isfinite().all()):
            raise ValueError(
                "predictions are not finite (NaN or infinite); the weights are damaged, the training diverged or the "
                "precision is too low"
            )
        self._sums.update(predictions.detach().float(), wanted, masks.flatten(1))

    def compute(self) -> dict[str, float | int]:
        """The metrics of everything seen so far on all ranks.

        Units: r2: 1 - squared error / squared error of predicting zero, which is the mean colour that images are
            normalised with (with target patch-normalized, the mean of the patch itself); 1 is perfect, nan where
            the images are of that colour all over. mse: a pixel and channel, in units of the target.
        Raises: ValueError where no image was counted.
        """
        # A rank without images takes part too, and torchmetrics would warn of one that added nothing.
        none = torch.zeros(0, 1, 1, device=self._sums.device)
        self._sums.update(none, none, none[..., 0].bool())
        error, reference, pixels, images = self._sums.compute().tolist()
        if images == 0:
            raise ValueError("no image was counted: the data set or the split is empty")
        r2 = 1 - error / reference if reference else math.nan
        return {"r2": r2, "mse": error / pixels, "images": int(images)}


class PixelSums(Metric):
    """Squared errors, squared targets, number of pixel values and of images."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(4), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, wanted: Tensor, hidden: Tensor) -> None:
        """Add a batch: predictions and wanted (batch, patches, pixels), hidden (batch, patches)."""
        precise = self.sums.dtype
        errors = (predictions - wanted).to(precise).square().sum(-1)[hidden].sum()
        reference = wanted.to(precise).square().sum(-1)[hidden].sum()
        counts = torch.tensor([wanted.shape[-1], len(wanted)], device=wanted.device, dtype=precise)
        self.sums += torch.stack([errors, reference, counts[0] * hidden.sum(), counts[1]])

    def compute(self) -> Tensor:
        """The four sums."""
        return self.sums


class ClassCounts(Metric):
    """For every class: images whose first guess was right, with the label among the first five, and images at
    all.

    torchmetrics counts them through a confusion matrix a batch, num_classes squared, and refuses an empty
    batch.
    """

    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("counts", torch.zeros(3, num_classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (batch, classes), labels (batch,)."""
        own = logits.gather(1, labels[:, None])
        before = torch.arange(self.num_classes, device=logits.device) < labels[:, None]
        # Among equal logits the lower class comes first; topk and argmax leave that order to the device.
        rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)
        values = torch.stack([rank < 1, rank < 5, rank >= 0]).long()
        self.counts.index_add_(1, labels, values)

    def compute(self) -> Tensor:
        """The counts, (3, classes)."""
        return self.counts


class NegativeLogLikelihood(Metric):
    """Mean of -log p(label) in nats."""

    total: Tensor
    images: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (batch, classes) in float32, labels (batch,)."""
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        self.total += losses.to(self.total.dtype).sum()
        self.images += len(labels)

    def compute(self) -> Tensor:
        """The mean over all images."""
        return self.total / self.images


class CalibrationError(Metric):
    """Expected calibration error: |accuracy - confidence| of the top class, averaged over bins by their
    images.

    Source: Guo et al. 2017, arXiv 1706.04599, equation 3. torchmetrics has one too; it keeps every confidence
    and gives a confidence of exactly 1 a bin of its own, whereas here the sums are streamed and the last bin
    is closed.
    """

    bins: Tensor

    def __init__(self, num_bins: int) -> None:
        super().__init__()
        self.num_bins = num_bins
        # Rows: number of images, sum of confidences, number of right answers.
        self.add_state("bins", torch.zeros(3, num_bins), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (batch, classes), labels (batch,)."""
        confidence, prediction = probabilities.max(dim=1)
        index = (confidence * self.num_bins).long().clamp(max=self.num_bins - 1)
        right = (prediction == labels).to(confidence.dtype)
        values = torch.stack([torch.ones_like(confidence), confidence, right])
        self.bins.index_add_(1, index, values.to(self.bins.dtype))

    def compute(self) -> Tensor:
        """The error over all images."""
        images, confidence, right = self.bins
        return (right - confidence).abs().sum() / images.sum()
