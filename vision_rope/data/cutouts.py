"""What clips from photographs are made of: small photographs, and things to cut out of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_rope.data.augment import eval_transform
from vision_rope.data.sources import ImageSource

# Width of a thing's soft edge in pixels.
SOFT_EDGE = 2.0
# Small photographs that a process keeps, in bytes.
CACHE_BYTES = 256 * 2**20


class SmallPhotographs:
    """The photographs of an image source at one size: resized to cover it, the middle cropped; kept in memory."""

    def __init__(self, photographs: ImageSource, size: tuple[int, int]) -> None:
        self.size = size
        self._photographs = photographs
        self._shrink = eval_transform(size, interpolation="bilinear")
        self._cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._photographs)

    def __getitem__(self, index: int) -> Tensor:
        """Shapes: uint8 (3, height, width)"""
        if (kept := self._cache.get(index)) is not None:
            return kept
        photograph = self._shrink(self._photographs[index][0])
        if (len(self._cache) + 1) * photograph.numel() <= CACHE_BYTES:
            self._cache[index] = photograph
        return photograph


def pixel_places(size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Where the middles of pixels lie, in short sides of the picture from its left and its upper border.

    Shapes: x (width,), y (height,)
    """
    short = min(size)
    return (torch.arange(size[1]) + 0.5) / short, (torch.arange(size[0]) + 0.5) / short


def draw_shape(size: tuple[int, int], radius: float, centre: Tensor, generator: torch.Generator) -> Tensor:
    """How much of each pixel a smooth closed shape covers, between 0 and 1.

    Its border's distance from the centre is the radius and a few waves of random strength.

    Shapes: centre (2,) as x, y -> (height, width)
    Units: radius and centre in short sides of the picture
    """
    strength, phase = torch.rand(2, 4, generator=generator)
    x, y = pixel_places(size)
    x, y = x - centre[0], y[:, None] - centre[1]
    waves = torch.arange(2, 6)[:, None, None]
    turn = torch.atan2(y, x) * waves + math.tau * phase[:, None, None]
    # At most as far out as the radius says.
    border = radius * (0.75 + (strength[:, None, None] * torch.cos(turn) / (4 * waves)).sum(0))
    return soften(border - torch.hypot(x, y), size)


def soften(depth: Tensor, size: tuple[int, int]) -> Tensor:
    """How much of each pixel is covered by what reaches so deep inside of it; outside of it depths are negative.

    Units: depth in short sides of the picture
    """
    return (depth * min(size) / SOFT_EDGE + 0.5).clamp(0, 1)


def grow_region(photograph: Tensor, shape: Tensor, centre: Tensor) -> Tensor | None:
    """The part of a shape that has the colours of its centre and hangs together with it, with a soft edge.

    It is the half of the shape that is nearest in colour, in a blurred photograph, as far as it can be reached from
    the centre in steps of two pixels.

    Shapes: photograph uint8 (3, height, width), shape (height, width), centre (2,) as x, y in short sides of the
        picture -> (height, width), or None where that is less than a quarter of the shape
    """
    inside = shape > 0.5
    column, row = (centre * min(shape.shape)).long().tolist()
    blurred = F.avg_pool2d(photograph.float(), 5, stride=1, padding=2, count_include_pad=False)
    distance = (blurred - blurred[:, row, column, None, None]).abs().sum(0)
    near = (inside & (distance <= distance[inside].median())).float()[None]
    region = torch.zeros_like(near)
    region[0, row, column] = 1
    reached, area = 1.0, 0.0
    while reached > area:
        # Growth is followed for a few steps at a time: asking for its end costs as much as a step.
        for _ in range(4):
            region = F.max_pool2d(region, 5, stride=1, padding=2) * near
        reached, area = float(region.sum()), reached
    if reached < 0.25 * float(inside.sum()):
        return None
    return F.avg_pool2d(region, 3, stride=1, padding=1)[0]
