"""Prompts as flags say them, in the order of the flags: which object, in which frame, where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vision_rope.data.davis import VOID, read_ids
from vision_rope.segmenter import BoxPrompt, MaskPrompt, PointPrompt
from vision_rope.segmenter.prompts import Prompt, gather_all

# By the number of a frame and the id of an object.
Prompts = Mapping[int, Mapping[int, Sequence[Prompt]]]


@dataclass
class _Said:
    """What is said of an object in a frame, so far."""

    points: list[tuple[float, float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    whole: list[Prompt] = field(default_factory=list)

    @property
    def prompts(self) -> list[Prompt]:
        return [*self.whole, *([PointPrompt(self.points, self.labels)] if self.points else [])]


def read_prompts(flags: Sequence[tuple[str, str]]) -> Prompts:
    """Read prompts from pairs of a flag and its value.

    `mask` FILE, `box` X0,Y0,X1,Y1 and `point` X,Y[,X,Y...] begin an object each, whose id is the next free one; those
    of a mask file are its own where they are free. `not-point` X,Y[,X,Y...] belongs to the object before it. After
    `object` N, everything belongs to object N up to the next `object`. `at` FRAME says which frame the prompts that
    follow are in, of which there must be one; the first one, 0, before any.

    Raises:
        ValueError: for a value that cannot be, naming its flag, and where there are no prompts.
        OSError: for a mask that cannot be read.
    """
    reader = _Reader()
    for flag, value in flags:
        reader.read[flag](value)
    if not reader.said:
        raise ValueError("nothing says where the objects are; give --point X,Y, --box X0,Y0,X1,Y1 or --mask FILE")
    flag, value = flags[-1]
    if flag in ("at", "object"):
        raise ValueError(f"--{flag} {value} is for the prompts that follow, but there are none; put it before its own")
    frames = sorted({frame for frame, _ in reader.said})
    return {
        frame: {key: said.prompts for (place, key), said in reader.said.items() if place == frame} for frame in frames
    }


def check_prompts(prompts: Prompts, size: tuple[int, int]) -> None:
    """Refuse prompts that do not fit into frames of a size (rows, columns).

    Raises: ValueError naming the object, and for frames before the first.
    """
    for frame, objects in prompts.items():
        if frame < 0:
            raise ValueError(f"there are prompts at frame {frame}; frames count from 0")
        gather_all(objects, size)


class _Reader:
    def __init__(self) -> None:
        self.said: dict[tuple[int, int], _Said] = {}
        self.frame = 0
        # The object that --object names, and the one that the last prompt was of.
        self.named: int | None = None
        self.last: int | None = None
        self.read: dict[str, Callable[[str], Any]] = {
            "object": self.read_object,
            "at": self.read_at,
            "mask": self.read_mask,
            "box": self.read_box,
            "point": self.read_point,
            "not-point": self.read_not_point,
        }

    def read_object(self, value: str) -> None:
        self.named = _whole_number("--object", value, 1, VOID - 1)

    def read_at(self, value: str) -> None:
        self.frame = _whole_number("--at", value, 0)

    def read_mask(self, value: str) -> None:
        if not Path(value).is_file():
            raise FileNotFoundError(f"--mask is {value!r}, but there is no such file")
        ids = read_ids(value)
        present = [key for key in ids.unique().tolist() if key]
        if not present:
            raise ValueError(f"--mask {value} holds no object: all of its pixels are background")
        if self.named is not None and len(present) > 1:
            raise ValueError(
                f"--mask {value} holds {len(present)} objects, but --object {self.named} is one; put the mask before "
                "--object, or give a mask of one object"
            )
        for key, target in zip(present, self._targets(present), strict=True):
            self._say(target).whole.append(MaskPrompt(_pixels(ids, key)))
            self.last = target if len(present) == 1 else None

    def read_box(self, value: str) -> None:
        numbers = _numbers("--box", value, "X0,Y0,X1,Y1: left, upper, right and lower edge")
        if len(numbers) != 4 or not (numbers[0] < numbers[2] and numbers[1] < numbers[3]):
            raise ValueError(
                f"--box is {value!r}, but it must be X0,Y0,X1,Y1 in pixels: left, upper, right and lower edge"
            )
        (self.last,) = self._targets([None])
        self._say(self.last).whole.append(BoxPrompt(numbers))

    def read_point(self, value: str) -> None:
        points = _points("--point", value)
        (self.last,) = self._targets([None])
        self._add_points(self.last, points, 1)

    def read_not_point(self, value: str) -> None:
        points = _points("--not-point", value)
        target = self.named or self.last
        if target is None:
            raise ValueError(
                f"--not-point {value} has no object; put it after the --point or --box of its object, or after --object"
            )
        self._add_points(target, points, 0)

    def _add_points(self, target: int, points: list[tuple[float, float]], label: int) -> None:
        said = self._say(target)
        said.points += points
        said.labels += [label] * len(points)

    def _say(self, target: int) -> _Said:
        return self.said.setdefault((self.frame, target), _Said())

    def _targets(self, wanted: Sequence[int | None]) -> list[int]:
        """Ids of as many objects: the wanted ones where all of them are free, else the next free ones."""
        if self.named is not None:
            return [self.named]
        used = {key for _, key in self.said}
        free = [key for key in wanted if key is not None and key not in used]
        targets = free if len(free) == len(wanted) else [max(used, default=0) + 1 + k for k in range(len(wanted))]
        if targets[-1] >= VOID:
            raise ValueError(f"there are too many objects: their ids must be below {VOID}")
        return targets


def _pixels(ids: Tensor, key: int) -> Tensor:
    return ids == key


def _whole_number(flag: str, value: str, low: int, high: int | None = None) -> int:
    if not value.isdecimal() or not low <= int(value) <= (high or int(value)):
        raise ValueError(
            f"{flag} is {value!r}, but it must be a whole number from {low} on"
            if high is None
            else f"{flag} is {value!r}, but it must be a whole number from {low} to {high}"
        )
    return int(value)


def _numbers(flag: str, value: str, form: str) -> list[float]:
    try:
        return [float(word) for word in value.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {value!r}, but it must be {form}, in pixels and without spaces") from None


def _points(flag: str, value: str) -> list[tuple[float, float]]:
    form = "X,Y, or several points X,Y,X,Y"
    numbers = _numbers(flag, value, form)
    if len(numbers) % 2:
        raise ValueError(f"{flag} is {value!r}, but it must be {form}, in pixels and without spaces")
    return list(zip(numbers[::2], numbers[1::2], strict=True))
