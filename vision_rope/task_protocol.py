"""What training and evaluation ask a task for.

A task turns batches of the loader into inputs and targets, and knows its loss and its metrics; training and evaluation
are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What the model gets, and what its outputs are compared with."""

    inputs: tuple[Any, ...]
    targets: Any


class Metrics(Protocol):
    """Figures of a model, added up batch by batch."""

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> dict[str, Any]: ...


class Task(Protocol):
    """What training and evaluation ask a task for.

    Attributes:
        headline: keys of the metrics that a line of the log shows.
        clip_factor: how many times the frames that a model is to see a clip of the evaluation is taken with.
        pictures: folder of a run that pictures of predictions go to; none where there are none.
    """

    headline: tuple[str, ...]
    clip_factor: int
    pictures: str | None

    def train_batch(self, images: Any, labels: Tensor, seed: int) -> Batch:
        """A training batch; what is random about it follows from the seed."""

    def eval_batch(self, images: Any, labels: Tensor, places: Tensor | None) -> Batch:
        """An evaluation batch; what is drawn follows from the images' places in the data set alone."""

    def check_size(self, size: Sequence[int]) -> None:
        """Refuse a size, (height, width) or (frames, height, width), that the task cannot be done at."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """What is minimised."""

    def count_hits(self, outputs: Any, targets: Any) -> Tensor | None:
        """Number of right answers of a training batch; None where there is no right and wrong."""

    def create_metrics(self, device: torch.device) -> Metrics:
        """Metrics of an evaluation."""

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """What the best epoch has most of."""

    def draw(self, batch: Batch, outputs: Mapping[str, Any], path: Path) -> Path | None:
        """A picture of predictions by name; None where there is nothing to be seen."""
