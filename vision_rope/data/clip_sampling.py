"""Which frames of a video make a clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Seconds that tell no two frames apart: rounding must not say which of two frames, equally far, is taken.
SAME_TIME = 1e-6


@dataclass(frozen=True)
class ClipSampling:
    """Frames of a clip and their rate.

    Frame k of a clip is the one whose time is nearest to that of the first plus k / fps, the earlier of two. A video
    with fewer frames a second than that gives those it has, one after the other, none twice. A video that lasts less
    than a clip, but has the frames for one, is sampled over all it has, more densely than asked for. The times of a
    clip are those of its frames, whatever was asked for.

    Args:
        num_frames: frames of a clip.
        fps: frames a second; none takes frames that follow each other, whatever their times.

    Raises:
        ValueError: for fewer frames than one, and a rate that is not positive.
    """

    num_frames: int
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.num_frames < 1:
            raise ValueError(f"num_frames is {self.num_frames}, but a clip has at least 1 frame")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise ValueError(f"fps is {self.fps}, but frames a second must be positive; none takes every frame")

    def choose(self, seconds: Tensor, position: float = 0.5) -> Tensor:
        """Choose the frames of one of the clips that a video has, which begin at each of its frames but the last ones.

        Args:
            seconds: float64 (frames,), the times of all frames, rising.
            position: from 0, the earliest clip, up to 1, the latest; 0.5 is in the middle.

        Shapes: int64 (num_frames,), rising places among the frames
        Raises: ValueError for a video of fewer frames than a clip's.
        """
        count, total = self.num_frames, len(seconds)
        if total < count:
            raise ValueError(f"it has {total} frame{'s' if total != 1 else ''}, but a clip takes {count}, none twice")
        steps = torch.arange(count)
        if self.fps is None:
            return steps + _place(position, total - count + 1)
        length = min((count - 1) / self.fps, float(seconds[-1] - seconds[0]))
        starts = torch.searchsorted(seconds, seconds[-1] - length + SAME_TIME, right=True)
        wanted = seconds[_place(position, int(starts))] + length * steps.double() / max(count - 1, 1)
        after = torch.searchsorted(seconds, wanted).clamp(max=total - 1)
        before = (after - 1).clamp(min=0)
        nearest = torch.where(wanted - seconds[before] <= seconds[after] - wanted + SAME_TIME, before, after)
        # Where two are the same, the later one moves on; at the end of a video all move back.
        distinct = (nearest - steps).cummax(0).values + steps
        return torch.minimum(distinct, steps + total - count)


def _place(position: float, count: int) -> int:
    """One of so many places in a row, by a number from 0 to 1."""
    return min(int(position * count), count - 1)
