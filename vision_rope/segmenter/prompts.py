"""Prompts: how a user says where an object is in a frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vision_rope.segmenter.prompt_encoder import BOTTOM_RIGHT, INSIDE, OUTSIDE, TOP_LEFT


@dataclass(frozen=True, eq=False)
class PointPrompt:
    """Points inside or outside an object.

    Attributes:
        points: (x, y) in pixels of the frame, the middle of its first pixel at 0, 0.
        labels: 1 inside, 0 outside; all are inside where not given.

    Raises: ValueError for other shapes or labels.
    """

    points: Sequence[Sequence[float]]
    labels: Sequence[int] | None = None

    def __post_init__(self) -> None:
        points = [tuple(float(number) for number in point) for point in self.points]
        labels = [INSIDE] * len(points) if self.labels is None else [int(label) for label in self.labels]
        if not points or any(len(point) != 2 for point in points):
            raise ValueError(f"points is {self.points!r}; give at least one (x, y), as in [(120, 80)]")
        if len(labels) != len(points) or any(label not in (INSIDE, OUTSIDE) for label in labels):
            raise ValueError(
                f"labels is {self.labels!r} for {len(points)} points; give one a point, 1 inside the object, 0 outside"
            )
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "labels", labels)


@dataclass(frozen=True, eq=False)
class BoxPrompt:
    """A box around an object.

    Attributes:
        box: (x0, y0, x1, y1) in pixels of the frame: its left, upper, right and lower edge.

    Raises: ValueError for a box that is none.
    """

    box: Sequence[float]

    def __post_init__(self) -> None:
        box = tuple(float(number) for number in self.box)
        if len(box) != 4 or not (box[0] < box[2] and box[1] < box[3]):
            raise ValueError(
                f"box is {self.box!r}; give (x0, y0, x1, y1) with x0 below x1 and y0 below y1, in pixels of the frame"
            )
        object.__setattr__(self, "box", box)


@dataclass(frozen=True, eq=False)
class MaskPrompt:
    """The pixels of an object; none of them says that it is not in the frame.

    Attributes:
        mask: an array or tensor (height, width) of the frame's size; what is not zero is the object.

    Raises: ValueError for another shape.
    """

    mask: Any = field(repr=False)

    def __post_init__(self) -> None:
        mask = torch.as_tensor(self.mask)
        if mask.ndim != 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be (height, width), one object a mask")
        object.__setattr__(self, "mask", mask != 0)


Prompt = PointPrompt | BoxPrompt | MaskPrompt


@dataclass(frozen=True, eq=False)
class ObjectPrompt:
    """All that is said of an object in a frame: a mask, or points, among which are the corners of a box.

    Attributes:
        points: x, y in pixels of the frame.
        labels: those of `prompt_encoder`.
        mask: bool (height, width).

    Shapes: points float32 (n, 2), labels int64 (n)
    """

    points: Tensor
    labels: Tensor
    mask: Tensor | None = None

    def and_then(self, later: ObjectPrompt) -> ObjectPrompt:
        """Both together: points join, and a mask takes the place of everything before; points after it correct it."""
        if later.mask is not None:
            return later
        return ObjectPrompt(torch.cat((self.points, later.points)), torch.cat((self.labels, later.labels)))


def gather(given: Prompt | Iterable[Prompt], object_id: int, frame: tuple[int, int]) -> ObjectPrompt:
    """What a user gave for an object.

    Raises: ValueError for nothing, for a mask beside something else, for two boxes, and for what is outside the frame.
    """
    prompts = [given] if isinstance(given, PointPrompt | BoxPrompt | MaskPrompt) else list(given)
    if not prompts or not all(isinstance(prompt, PointPrompt | BoxPrompt | MaskPrompt) for prompt in prompts):
        raise ValueError(
            f"prompts of object {object_id} are {given!r}; give a PointPrompt, a BoxPrompt or a MaskPrompt, or a list"
        )
    masks = [prompt for prompt in prompts if isinstance(prompt, MaskPrompt)]
    boxes = [prompt for prompt in prompts if isinstance(prompt, BoxPrompt)]
    if masks:
        if len(prompts) > 1:
            raise ValueError(f"object {object_id} has a mask and {len(prompts) - 1} other prompts; a mask stands alone")
        if tuple(masks[0].mask.shape) != frame:
            raise ValueError(
                f"the mask of object {object_id} has {_size(masks[0].mask.shape)} pixels and the frame {_size(frame)} "
                "(rows x columns); give a mask of the frame's size"
            )
        return ObjectPrompt(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), masks[0].mask)
    if len(boxes) > 1:
        raise ValueError(f"object {object_id} has {len(boxes)} boxes; give one, or make them objects of their own")
    points: list[Sequence[float]] = []
    labels: list[int] = []
    # The box comes first, as in SAM 2.
    for box in boxes:
        points += [box.box[:2], box.box[2:]]
        labels += [TOP_LEFT, BOTTOM_RIGHT]
    for prompt in prompts:
        if not isinstance(prompt, PointPrompt):
            continue
        points += prompt.points
        labels += prompt.labels or []
        outside = [p for p in prompt.points if not (-0.5 <= p[0] < frame[1] - 0.5 and -0.5 <= p[1] < frame[0] - 0.5)]
        if outside:
            raise ValueError(
                f"points of object {object_id} hold {tuple(outside[0])}, outside the frame of {_size(frame)} pixels "
                "(rows x columns); points are (x, y)"
            )
    return ObjectPrompt(torch.tensor(points, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64))


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
