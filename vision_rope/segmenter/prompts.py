"""Prompts: how a user says where an object is in a frame."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
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
        points = [_read_numbers(point) for point in _as_list(self.points)]
        if not points or any(len(point) != 2 for point in points):
            raise ValueError(f"points is {self.points!r}; give at least one (x, y), as in [(120, 80)]")
        labels = (float(INSIDE),) * len(points) if self.labels is None else _read_numbers(self.labels)
        if len(labels) != len(points) or any(label not in (INSIDE, OUTSIDE) for label in labels):
            raise ValueError(
                f"labels is {self.labels!r} for {len(points)} points; give one a point, 1 inside the object, 0 outside"
            )
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "labels", [int(label) for label in labels])


@dataclass(frozen=True, eq=False)
class BoxPrompt:
    """A box around an object.

    Attributes:
        box: (x0, y0, x1, y1) in pixels of the frame: its left, upper, right and lower edge.

    Raises: ValueError for a box that is none.
    """

    box: Sequence[float]

    def __post_init__(self) -> None:
        box = _read_numbers(self.box)
        # Differences of what is infinite or not a number are not below infinity.
        if len(box) != 4 or not (0 < box[2] - box[0] < math.inf and 0 < box[3] - box[1] < math.inf):
            raise ValueError(
                f"box is {self.box!r}; give (x0, y0, x1, y1) with x0 below x1 and y0 below y1, in pixels of the frame"
            )
        object.__setattr__(self, "box", box)


@dataclass(frozen=True, eq=False)
class MaskPrompt:
    """The pixels of an object; none of them says that it is not in the frame.

    Attributes:
        mask: an array, tensor or picture (height, width) of the frame's size; what is not zero is the object.

    Raises: ValueError for another shape, and for numbers below zero or none at all, which logits have.
    """

    mask: Any = field(repr=False)

    def __post_init__(self) -> None:
        mask = self.mask if isinstance(self.mask, Tensor) else _read_array(self.mask)
        if mask.ndim != 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be (height, width), one object a mask")
        if mask.dtype.is_signed and not bool((mask >= 0).all()):
            raise ValueError("mask has numbers below zero, or that are none; of logits give those above 0: mask > 0")
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
        """Both together: points join, a box takes the place of the one before, and a mask that of everything.

        Points and boxes after a mask correct it.
        """
        if later.mask is not None:
            return later
        kept = self.labels < (TOP_LEFT if (later.labels == TOP_LEFT).any() else BOTTOM_RIGHT + 1)
        return ObjectPrompt(torch.cat((self.points[kept], later.points)), torch.cat((self.labels[kept], later.labels)))


def gather(given: Prompt | Iterable[Prompt], object_id: int, frame: tuple[int, int]) -> ObjectPrompt:
    """What a user gave for an object.

    Raises: ValueError for nothing, for a mask beside something else, for two boxes, and for what is outside the frame.
    """
    prompts = _as_list(given)
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
        x0, y0, x1, y1 = box.box
        if x0 > frame[1] - 0.5 or y0 > frame[0] - 0.5 or x1 < -0.5 or y1 < -0.5:
            raise ValueError(
                f"the box of object {object_id}, {tuple(box.box)}, is outside the frame of {_size(frame)} pixels (rows "
                "x columns); a box is (x0, y0, x1, y1)"
            )
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


def gather_all(prompts: Any, frame: tuple[int, int]) -> dict[int, ObjectPrompt]:
    """What a user gave for all objects, by their ids.

    Raises: ValueError as of `gather`, and for ids that are neither whole numbers nor names.
    """
    if not isinstance(prompts, Mapping):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}; give a dictionary by object ids, as in "
            "{1: PointPrompt([(120, 80)])}"
        )
    return {_read_id(key): gather(given, _read_id(key), frame) for key, given in prompts.items()}


def _read_id(key: Any) -> Any:
    if isinstance(key, str):
        return key
    try:
        # Numbers of numpy and torch become plain ones: files of states hold no others.
        return operator.index(key)
    except TypeError:
        raise ValueError(f"the object id {key!r} is a {type(key).__name__}; give whole numbers, or names") from None


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]


def _read_numbers(given: Any) -> tuple[float, ...]:
    """Numbers of a list; none where it is something else."""
    try:
        return tuple(float(number) for number in given)
    except (TypeError, ValueError):
        return ()


def _read_array(given: Any) -> Tensor:
    import numpy as np

    array = np.asarray(given)
    if array.dtype.kind not in "buif":
        raise ValueError(f"mask is a {type(given).__name__}; give an array, a tensor or a picture (height, width)")
    # A copy: torch takes no arrays that run backwards, and warns of those that cannot be written to.
    return torch.from_numpy(np.array(array, order="C"))


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
