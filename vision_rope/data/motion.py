"""Clips made from photographs: an object cut out of one moves steadily over another."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_rope.config import MotionConfig
from vision_rope.data.clips import Clip, ClipSource
from vision_rope.data.cutouts import SmallPhotographs, draw_shape
from vision_rope.data.randomness import derive_seed
from vision_rope.data.sources import ImageSource

# Clockwise, 45 degrees apart; the opposite of one is four further on.
DIRECTIONS = ("right", "down right", "down", "down left", "left", "up left", "up", "up right")


class MotionSource(ClipSource):
    """Clips made from the photographs of an image source, one for each, over which an object from another moves.

    What moves how follows from the sample's generator, in evaluation from the index alone; the number of frames and
    their rate say only when the same motion is looked at: frame k is shown at k / fps seconds, and in the middle of
    the clip the object is in or near the middle of the picture.

    The class is direction * num_speeds + speed.
    """

    def __init__(self, photographs: ImageSource, motion: MotionConfig, *, num_frames: int, fps: float) -> None:
        self.name = f"motion:{photographs.name}"
        self.speeds = list_speeds(motion)
        self.classes = [f"{direction} {speed:.3g}/s" for direction in DIRECTIONS for speed in self.speeds]
        self.labels = None
        self.licence = photographs.licence
        self._photographs = photographs
        self._object_size = motion.object_size
        self._background = motion.background
        self._size = (motion.size, motion.size)
        self._seconds = torch.arange(num_frames, dtype=torch.float64) / fps
        self._small = SmallPhotographs(photographs, self._size)

    def sampled(self, num_frames: int, fps: float | None) -> MotionSource:
        """The same motion at other times; see `ClipSource.sampled`."""
        if fps is None:
            raise ValueError(f"fps is none, but {self.name} can be made at any rate; give frames a second")
        other = copy.copy(self)
        other._seconds = torch.arange(num_frames, dtype=torch.float64) / fps
        return other

    def __len__(self) -> int:
        return len(self._photographs)

    def path(self, index: int) -> str:
        """The background's."""
        return self._photographs.path(index)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
        """See `ClipSource.read`."""
        generator = generator or torch.Generator().manual_seed(derive_seed(index))
        label = int(torch.randint(len(self.classes), (), generator=generator))
        other = int(torch.randint(len(self), (), generator=generator))
        direction, speed = divmod(label, len(self.speeds))
        angle = direction * math.tau / len(DIRECTIONS)
        velocity = self.speeds[speed] * torch.tensor([math.cos(angle), math.sin(angle)])
        least, most = self._object_size
        radius = 0.5 * float(least + (most - least) * torch.rand((), generator=generator))
        # The object is cut out where all of it lies in its photograph.
        origin = radius + (1 - 2 * radius) * torch.rand(2, generator=generator)
        shape = draw_shape(self._size, radius, origin, generator)
        away = velocity * (self._seconds - self._seconds.mean())[:, None].float()
        # As much of the way as possible has the object's centre in the picture, by half a radius and more.
        room = (0.5 - 0.5 * radius - away[-1].abs()).clamp(min=0)
        middle = 0.5 + room * (2 * torch.rand(2, generator=generator) - 1)
        background = self._small[index] * self._background
        frames = move_over(self._small[other], shape, background, middle + away - origin)
        return Clip(frames, self._seconds.clone()), label


def list_speeds(motion: MotionConfig) -> list[float]:
    """The speeds, in widths of the picture a second, in equal ratios."""
    ratio = (motion.fastest / motion.slowest) ** (1 / (motion.num_speeds - 1))
    return [motion.slowest * ratio**place for place in range(motion.num_speeds)]


def move_over(photograph: Tensor, shape: Tensor, background: Tensor, offsets: Tensor) -> Tensor:
    """Frames of a background with a part of a photograph above it, moved by any fraction of a pixel (bilinear).

    Shapes: photograph, background (3, size, size), shape (size, size), offsets (frames, 2) as x, y -> uint8 (frames, 3,
        size, size)
    Units: pixels 0 to 255; offsets as shares of the size
    """
    layer = torch.cat((photograph * shape, shape[None])).expand(len(offsets), -1, -1, -1)
    # Where each pixel comes from, in the units of grid_sample: the picture reaches from -1 to 1.
    source = torch.eye(2).repeat(len(offsets), 1, 1)
    grid = F.affine_grid(torch.cat((source, -2 * offsets[..., None]), dim=2), list(layer.shape), align_corners=False)
    moved = F.grid_sample(layer, grid, align_corners=False)
    frames = moved[:, :3] + background * (1 - moved[:, 3:])
    return frames.round_().to(torch.uint8)
