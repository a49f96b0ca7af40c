"""Video object segmentation: region similarity J and contour accuracy F, as the DAVIS 2017 toolkit defines them.

Source: Perazzi et al., A Benchmark Dataset and Evaluation Methodology for Video Object Segmentation (CVPR 2016), and
Pont-Tuset et al., The 2017 DAVIS Challenge (arXiv:1704.00675), semi-supervised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# Contours may lie this part of the frame's diagonal apart, rounded up to pixels.
TOLERANCE = 0.008


class Statistics(NamedTuple):
    """What the figures of a sequence's frames come to.

    Attributes:
        mean: over the frames.
        recall: the share of frames above 0.5.
        decay: how much the mean of the first quarter is above that of the last.
    """

    mean: float
    recall: float
    decay: float


@dataclass
class ObjectScores:
    """J and F of one object by frame index; filled by `add`.

    Attributes:
        j: region similarity by frame index.
        f: contour accuracy by frame index.
    """

    j: dict[int, float] = field(default_factory=dict)
    f: dict[int, float] = field(default_factory=dict)

    def add(self, index: int, prediction: Tensor, truth: Tensor) -> None:
        """Judge the mask of a frame.

        Shapes:
            prediction, truth: bool (height, width)
        """
        self.j[index] = region_similarity(prediction, truth)
        self.f[index] = contour_accuracy(prediction, truth)


def region_similarity(prediction: Tensor, truth: Tensor) -> float:
    """J: the intersection of two masks over their union; 1 where both are empty.

    Shapes:
        prediction, truth: bool (height, width)
    """
    _check(prediction, truth)
    union = int((prediction | truth).sum())
    return int((prediction & truth).sum()) / union if union else 1.0


def contour_accuracy(prediction: Tensor, truth: Tensor) -> float:
    """F: the harmonic mean of how much of each contour lies near the other; 1 where both are empty, 0 where one is.

    Near is a distance of at most 0.008 times the frame's diagonal, rounded up to pixels.

    Shapes:
        prediction, truth: bool (height, width)
    """
    _check(prediction, truth)
    contours = torch.stack([find_contour(prediction), find_contour(truth)])
    lengths = contours.flatten(1).sum(1).tolist()
    if 0 in lengths:
        return 1.0 if lengths == [0, 0] else 0.0
    # Nothing outside the box of both contours is near or far from anything.
    contours = contours[:, _span(contours.any(0).any(1))][:, :, _span(contours.any(0).any(0))]
    near = widen(contours, math.ceil(TOLERANCE * math.hypot(*prediction.shape)))
    matches = (contours & near.flip(0)).flatten(1).sum(1).tolist()
    precision, recall = (count / length for count, length in zip(matches, lengths, strict=True))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def find_contour(mask: Tensor) -> Tensor:
    """Pixels that differ from the one to the right, below, or right below; those beyond the frame do not count.

    Shapes:
        mask: bool (height, width), and so the result
    """
    contour = torch.zeros_like(mask)
    contour[:, :-1] |= mask[:, :-1] ^ mask[:, 1:]
    contour[:-1] |= mask[:-1] ^ mask[1:]
    contour[:-1, :-1] |= mask[:-1, :-1] ^ mask[1:, 1:]
    return contour


def widen(marks: Tensor, radius: int) -> Tensor:
    """Pixels within a distance of `radius` from a marked one: dilation by a disk.

    Shapes:
        marks: bool (..., height, width), and so the result

    Units: pixels
    """
    height, width = marks.shape[-2:]
    columns = torch.arange(width, dtype=torch.int32, device=marks.device)
    far = width + radius + 1
    left = torch.where(marks, columns, -far).cummax(-1).values
    right = -torch.where(marks, -columns, -2 * far).flip(-1).cummax(-1).values.flip(-1)
    along_row = torch.minimum(columns - left, right - columns)
    near = torch.zeros_like(marks)
    for rows in range(-min(radius, height - 1), min(radius, height - 1) + 1):
        reach = math.isqrt(radius**2 - rows**2)
        here, there = slice(max(rows, 0), height + min(rows, 0)), slice(max(-rows, 0), height - max(rows, 0))
        near[..., here, :] |= along_row[..., there, :] <= reach
    return near


def summarise(values: Sequence[float]) -> Statistics:
    """Mean, recall and decay of the figures of a sequence's frames.

    The toolkit's quarters share their border frames. Of frames beyond 256 it takes others, since it counts with 8 bits.

    Raises:
        ValueError: where there are no figures.
    """
    if not values:
        raise ValueError(
            "values is empty, but at least one frame must be judged; give sequences of three frames or more"
        )
    figures = torch.tensor(values, dtype=torch.float64)
    # A tiny bit is added so that halves are rounded up, as in the toolkit.
    borders = [round((len(values) - 1) * quarter / 4 + 1 + 1e-10) - 1 for quarter in range(5)]
    first, last = (figures[start : stop + 1].mean() for start, stop in (borders[:2], borders[3:]))
    return Statistics(float(figures.mean()), float((figures > 0.5).double().mean()), float(first - last))


def choose_judged(annotated: Iterable[int], appearance: int) -> list[int]:
    """The frames in which an object is judged: those with ids between its first mask and the last frame with ids.

    Of an object that is there from the beginning this is the toolkit's choice; it knows no others.

    Args:
        annotated: the frames that have ids.
        appearance: the frame in which the object's first mask is given.
    """
    return [index for index in sorted(annotated)[:-1] if index > appearance]


def check_ids(ids: Tensor, object_ids: Iterable[int]) -> None:
    """Refuse predicted ids that are no object of the sequence.

    Raises:
        ValueError: where there are any.
    """
    strange = sorted(set(ids.unique().tolist()) - {0, *object_ids})
    if strange:
        raise ValueError(
            f"the prediction has pixels of object {strange[0]}, but the sequence has the objects "
            f"{', '.join(map(str, object_ids)) or 'none'} alone; give an object the id of its prompt"
        )


def average_objects(scores: Collection[ObjectScores]) -> dict[str, float]:
    """Mean, recall and decay of J and F over objects, each of which counts the same, and the mean J&F.

    Raises:
        ValueError: where there are no objects, or one of no judged frame.
    """
    if not scores:
        raise ValueError("scores is empty, but at least one object must be judged")
    figures = {}
    for measure in ("j", "f"):
        statistics = [summarise(list(getattr(score, measure).values())) for score in scores]
        for name, values in zip(Statistics._fields, zip(*statistics, strict=True), strict=True):
            figures[f"{measure}_{name}"] = sum(values) / len(values)
    return {"j_and_f": (figures["j_mean"] + figures["f_mean"]) / 2, **figures}


def _span(marks: Tensor) -> slice:
    """From the first to the last that is marked."""
    places = marks.nonzero()
    return slice(int(places[0]), int(places[-1]) + 1)


def _check(prediction: Tensor, truth: Tensor) -> None:
    for name, mask in (("prediction", prediction), ("truth", truth)):
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ValueError(f"{name} must be bool (height, width), got {mask.dtype} of shape {tuple(mask.shape)}")
    if prediction.shape != truth.shape:
        raise ValueError(
            f"prediction has {tuple(prediction.shape)} pixels and truth {tuple(truth.shape)}, but they must be "
            "of one size; resize the prediction"
        )
