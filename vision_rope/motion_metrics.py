"""Metrics of motion in clips, added up batch by batch and equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

NUM_DIRECTIONS = 8
# Clips whose frames change by less, on average a pixel and channel between 0 and 1, count as standing still.
STANDING_STILL = 0.01


def reverse_labels(labels: Tensor, num_speeds: int) -> Tensor:
    """Classes of clips that are played backwards: the opposite direction, the same speed."""
    return (labels + NUM_DIRECTIONS // 2 * num_speeds) % (NUM_DIRECTIONS * num_speeds)


class MotionMetrics:
    """How often direction, way and speed are right; torchmetrics underneath.

    The way: of the true direction and its opposite, the true one has the larger output; as large counts half.
    """

    def __init__(self, num_speeds: int, device: torch.device | str = "cpu") -> None:
        self._num_speeds = num_speeds
        self._sums = Sums(("direction", "way", "speed", "nll"), device)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add one batch, its clips forwards and backwards.

        Shapes: outputs (2 * clips, 8 + num_speeds); labels (2 * clips,): direction * num_speeds + speed
        Raises: ValueError for outputs that are not finite or of another shape.
        """
        directions, speeds = split_outputs(outputs, self._num_speeds)
        direction, speed = labels // self._num_speeds, labels % self._num_speeds
        likelihoods = F.cross_entropy(directions, direction, reduction="none")
        self._sums.update(
            torch.stack(
                (
                    (directions.argmax(1) == direction).float(),
                    compare(_pick(directions, direction), _pick(directions, opposite(direction))),
                    (speeds.argmax(1) == speed).float(),
                    likelihoods + F.cross_entropy(speeds, speed, reduction="none"),
                ),
                dim=1,
            )
        )

    def compute(self) -> dict[str, float | int]:
        """The metrics of everything seen so far on all ranks.

        Units: direction (by chance 1/8; 1/2 at most without a look at the order of frames), way (1/2) and speed
            (1 / num_speeds) are shares; nll, of direction and speed together, in nats a clip. Each clip counts once in
            images, though it was played both ways.
        Raises: ValueError where no clip was counted.
        """
        means, count = self._sums.compute_means()
        _check_counted(count)
        return {**means, "images": count // 2}


class PlaybackMetrics:
    """How often answers about clips without labels agree with the way the clips were played.

    Clips that stand still are left out of all shares but `moving`.
    """

    def __init__(self, speeds: Sequence[float], device: torch.device | str = "cpu") -> None:
        self._speeds = torch.tensor(speeds, device=device)
        self._moving = Sums(("moving",), device)
        self._sums = Sums(("reversal", "way", "faster"), device)

    def update(self, outputs: Tensor, change: Tensor) -> None:
        """Add one batch: slow forwards, slow backwards, fast forwards, fast backwards.

        Shapes: outputs (4 * clips, 8 + speeds); change (clips,), the mean absolute difference of frames
        Raises: ValueError for outputs that are not finite or of another shape.
        """
        directions, speeds = split_outputs(outputs, len(self._speeds))
        moving = change >= STANDING_STILL
        self._moving.update(moving.float()[:, None])
        # (slow or fast, forwards or backwards, moving clips, outputs)
        directions = directions.unflatten(0, (2, 2, -1))[:, :, moving]
        forwards, backwards = directions.unbind(1)
        first = forwards.argmax(-1)
        reversal = (backwards.argmax(-1) == opposite(first)).float()
        way = compare(_pick(backwards, opposite(first)), _pick(backwards, first))
        slow, fast = (speeds.softmax(1) @ self._speeds).unflatten(0, (2, 2, -1))[:, :, moving]
        self._sums.update(torch.stack((reversal.mean(0), way.mean(0), compare(fast, slow).mean(0)), dim=1))

    def compute(self) -> dict[str, float | int]:
        """The metrics of everything seen so far on all ranks.

        Units: shares of moving clips, nan where there are none. reversal: played backwards, the likeliest direction is
            the opposite of the one forwards (by chance 1/8); way: at least it is likelier than that one (1/2); both
            are 0 without a look at the order of frames. faster: at twice the speed a higher speed is expected (1/2).
            moving: share of all clips.
        Raises: ValueError where no clip was counted.
        """
        moving, count = self._moving.compute_means()
        _check_counted(count)
        means, _ = self._sums.compute_means()
        return {**means, **moving, "images": count}


class Sums(Metric):
    """Sums of figures and the number of their rows."""

    sums: Tensor

    def __init__(self, names: Sequence[str], device: torch.device | str) -> None:
        super().__init__()
        self.names = names
        self.add_state("sums", torch.zeros(len(names) + 1), dist_reduce_fx="sum")
        self.to(device)
        # In float64 the order of addition, and so the number of ranks, is invisible; MPS has none.
        if torch.device(device).type != "mps":
            self.set_dtype(torch.float64)

    def update(self, figures: Tensor) -> None:
        """Add rows of figures, (rows, names)."""
        count = torch.tensor([len(figures)], device=figures.device, dtype=self.sums.dtype)
        self.sums += torch.cat((figures.to(self.sums.dtype).sum(0), count))

    def compute(self) -> Tensor:
        """The sums, the number of rows last."""
        return self.sums

    def compute_means(self) -> tuple[dict[str, float], int]:
        """The means by name, nan where there are no rows, and the number of rows, on all ranks."""
        # A rank without clips takes part too, and torchmetrics would warn of one that added nothing.
        self.update(torch.zeros(0, len(self.names), device=self.sums.device))
        *sums, count = self.compute().tolist()
        means = {name: total / count if count else math.nan for name, total in zip(self.names, sums, strict=True)}
        return means, int(count)


def split_outputs(outputs: Tensor, num_speeds: int) -> tuple[Tensor, Tensor]:
    """Outputs of directions and of speeds, in float32.

    Raises: ValueError for outputs that are not finite or of another shape.
    """
    if outputs.ndim != 2 or outputs.shape[1] != NUM_DIRECTIONS + num_speeds:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)}, but {NUM_DIRECTIONS} directions and {num_speeds} speeds need "
            f"(clips, {NUM_DIRECTIONS + num_speeds})"
        )
    if not bool(outputs.isfinite().all()):
        raise ValueError(
            "outputs are not finite (NaN or infinite); the weights are damaged, the training diverged or the precision "
            "is too low"
        )
    directions, speeds = outputs.detach().float().split([NUM_DIRECTIONS, num_speeds], dim=1)
    return directions, speeds


def opposite(directions: Tensor) -> Tensor:
    """The directions against the given ones."""
    return (directions + NUM_DIRECTIONS // 2) % NUM_DIRECTIONS


def compare(one: Tensor, other: Tensor) -> Tensor:
    """1 where the one is larger, 1/2 where both are equal, else 0."""
    return ((one > other).float() + (one >= other).float()) / 2


def _pick(outputs: Tensor, places: Tensor) -> Tensor:
    return outputs.gather(-1, places[..., None])[..., 0]


def _check_counted(count: int) -> None:
    if count == 0:
        raise ValueError("no clip was counted: the data set or the split is empty")
