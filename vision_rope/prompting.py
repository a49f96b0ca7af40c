"""Prompts made from true masks: the mask itself, its box, points inside, and the point that corrects a wrong mask.

Random numbers are drawn on the CPU, so that a seed means the same on every device; masks stay where they are, and
nothing waits for them. Points are (x, y) in pixels; the middle of the first pixel is at 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vision_rope.segmenter.prompt_encoder import BOTTOM_RIGHT, INSIDE, NO_POINT, OUTSIDE, TOP_LEFT

Kind = Literal["mask", "box", "point"]

# Corners of drawn boxes lie off the true ones by up to this share of the side, and by no more than so many pixels.
JITTER, MOST_JITTER = 0.1, 20.0


class Prompts(NamedTuple):
    """What shows the objects of a batch in the first frame: masks, or points with their labels.

    Shapes: points float32 (objects, n, 2), labels int64 (objects, n), masks bool (objects, height, width)
    """

    points: Tensor | None = None
    labels: Tensor | None = None
    masks: Tensor | None = None


def choose_kind(mask_prompts: float, box_prompts: float, seed: int) -> Kind:
    """A kind of prompt: masks and boxes with their shares, points with the rest."""
    drawn = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()
    return "mask" if drawn < mask_prompts else "box" if drawn < mask_prompts + box_prompts else "point"


def draw_prompts(masks: Tensor, kind: Kind, seed: int) -> Prompts:
    """Prompts of one kind for all objects; a point is one inside.

    Shapes: masks bool (objects, height, width)
    Source: SAM 2 (arXiv 2408.00714), appendix on training: masks as they are, boxes with noise, clicks drawn evenly.
    """
    if kind == "mask":
        return Prompts(masks=masks)
    generator = torch.Generator().manual_seed(seed)
    if kind == "point":
        return Prompts(*draw_points(masks, 1, generator))
    corners = jitter_boxes(find_boxes(masks), masks.shape[-2:], generator).unflatten(1, (2, 2))
    labels = torch.tensor([TOP_LEFT, BOTTOM_RIGHT], device=masks.device).expand(len(masks), 2)
    return Prompts(corners, torch.where(_is_there(masks), labels, NO_POINT))


def draw_points(masks: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points evenly drawn from the pixels of each mask, which may repeat, with their labels; none where it is empty.

    Shapes: masks bool (objects, height, width) -> (objects, count, 2), int64 (objects, count)
    """
    drawn = torch.rand(len(masks), count, generator=generator, dtype=torch.float64).float().to(masks.device)
    passed = masks.flatten(1).cumsum(1)
    # Of the pixels of a mask in their order the one with this number, from 1 on, is the first that has passed as many.
    numbers = (drawn * passed[:, -1:]).long().clamp(max=passed[:, -1:] - 1) + 1
    places = torch.searchsorted(passed, numbers).clamp(max=passed.shape[1] - 1)
    return _to_points(places, masks.shape[-1]), torch.where(_is_there(masks), INSIDE, NO_POINT).expand(-1, count)


def find_boxes(masks: Tensor) -> Tensor:
    """The outermost pixels of each mask: x0, y0, x1, y1; of an empty one those of the frame.

    Shapes: bool (objects, height, width) -> float32 (objects, 4)
    """
    sides = []
    for axis in (1, 2):
        taken = masks.any(axis).int()
        first, last = taken.argmax(1), taken.shape[1] - 1 - taken.flip(1).argmax(1)
        sides.append((first, last))
    (x0, x1), (y0, y1) = sides
    return torch.stack((x0, y0, x1, y1), dim=1).float()


def jitter_boxes(boxes: Tensor, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Boxes whose four sides each lie a little off, inside the frame.

    Shapes: (objects, 4) -> the same
    Source: SAM (arXiv 2304.02643), appendix A, with noise drawn evenly.
    """
    height, width = size
    extent = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    noise = (2 * torch.rand(boxes.shape, generator=generator) - 1).to(boxes.device)
    moved = boxes + noise * (JITTER * extent).clamp(max=MOST_JITTER)
    return moved.clamp(min=0).minimum(moved.new_tensor([width - 1, height - 1] * 2))


def correct(truth: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The click that would correct each mask most: in the middle of the widest region that is wrong.

    It is inside where the object was missed and outside where there is none; a mask that is right gets no point.

    Shapes: bool (objects, height, width) -> points (objects, 1, 2), labels (objects, 1)
    Source: SAM 2 (arXiv 2408.00714), appendix on training; RITM (arXiv 2102.06583), section 3.
    """
    depths, places = torch.stack(
        [_find_middle(wrong) for wrong in (predicted & ~truth, truth & ~predicted)], dim=-1
    ).unbind(0)
    is_missing = depths[:, 1] > depths[:, 0]
    place = torch.where(is_missing, places[:, 1], places[:, 0])[:, None]
    label = torch.where(is_missing, INSIDE, OUTSIDE)
    return _to_points(place, truth.shape[-1]), torch.where(depths.amax(1) > 0, label, NO_POINT)[:, None]


def square_distances(regions: Tensor) -> Tensor:
    """Of each pixel of a region the square of the distance to the nearest pixel outside; beyond the frame is outside.

    Shapes: bool (objects, height, width) -> int64 (objects, height, width)
    """
    padded = torch.nn.functional.pad(regions, (1, 1, 1, 1))
    height, width = padded.shape[-2:]
    columns = torch.arange(width, device=regions.device).expand_as(padded)
    # Along its row first: the nearest pixels outside on the left and on the right.
    left = columns - torch.where(padded, -1, columns).cummax(2).values
    right = torch.where(padded, width, columns).flip(2).cummin(2).values.flip(2) - columns
    along = left.minimum(right) ** 2
    rows = torch.arange(height, device=regions.device)[:, None]
    nearest = along
    for row in range(height):
        nearest = nearest.minimum(along[:, row : row + 1] + (rows - row) ** 2)
    return nearest[:, 1:-1, 1:-1]


def _find_middle(regions: Tensor) -> Tensor:
    """Of each region the largest square distance to its border, and the place where it is: (2, objects)."""
    return torch.stack(tuple(square_distances(regions).flatten(1).max(1)))


def _is_there(masks: Tensor) -> Tensor:
    return masks.flatten(1).any(1, keepdim=True)


def _to_points(places: Tensor, width: int) -> Tensor:
    """Places in the flattened frame as x and y."""
    return torch.stack((places % width, places // width), dim=-1).float()
