"""Points of an evaluation: a size in pixels, and of clips the number of frames and the rate they are taken at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from vision_rope.sizes import Size, check_sizes, format_size


@dataclass(frozen=True)
class Point:
    """What the inputs of a model look like.

    Attributes:
        size: (height, width) in pixels.
        num_frames: frames of a clip; none for images.
        fps: frames a second that a clip is sampled at; none takes every frame that a video has.
    """

    size: Size
    num_frames: int | None = None
    fps: float | None = None

    @property
    def name(self) -> str:
        return format_point(format_size(self.size), self.num_frames, self.fps)

    @property
    def lengths(self) -> tuple[int, ...]:
        """(height, width), of clips (frames, height, width)."""
        return self.size if self.num_frames is None else (self.num_frames, *self.size)

    def grid(self, patch_size: Sequence[int]) -> tuple[int, ...]:
        """Rows and columns of patches, of clips with the steps in front, where a patch is (frames, height, width)."""
        return tuple(length // patch for length, patch in zip(self.lengths, patch_size, strict=True))

    def describe(self, patch_size: Sequence[int]) -> dict[str, Any]:
        """Columns of a table: size, height, width; of clips frames, fps and steps too."""
        facts: dict[str, Any] = {"size": format_size(self.size), "height": self.size[0], "width": self.size[1]}
        if self.num_frames is None:
            return facts
        return {**facts, "frames": self.num_frames, "fps": self.fps, "steps": self.grid(patch_size)[0]}

    def describe_training(self) -> dict[str, Any]:
        """Columns of a table for the point that a model was trained at."""
        facts: dict[str, Any] = {"train_size": format_size(self.size)}
        if self.num_frames is None:
            return facts
        return {**facts, "train_frames": self.num_frames, "train_fps": self.fps}


def format_point(size: str, frames: int | None, fps: float | None) -> str:
    """Write a point as tables name it: "64", "8 frames 4 fps 64", "8 frames 64" where every frame is taken."""
    words = [] if frames is None else [f"{frames} frame{'s' if frames > 1 else ''}"]
    words += [] if fps is None else [f"{fps:g} fps"]
    return " ".join([*words, size])


def point_of(row: Mapping[str, Any]) -> str:
    """The name of a row's point; of images it is the size."""
    return format_point(row["size"], row.get("frames"), row.get("fps"))


def training_of(row: Mapping[str, Any]) -> str:
    """The name of the point that the model of a row was trained at."""
    return format_point(str(row["train_size"]), row.get("train_frames"), row.get("train_fps"))


def create_points(sizes: Sequence[Size], frames: Sequence[int | None], fps: Sequence[float | None]) -> list[Point]:
    """Every size with every number of frames at every rate; images have no frames and no rate: [None]."""
    return [Point(*members) for members in product(sizes, frames, fps)]


def check_points(points: Sequence[Point], patch_size: Sequence[int]) -> None:
    """Refuse sizes that the patch and numbers of frames that the tubelet does not divide, and impossible rates.

    Args:
        patch_size: (height, width), of clips (frames, height, width).

    Raises: ValueError naming the value and what would do.
    """
    check_sizes([point.size for point in points], (patch_size[-2], patch_size[-1]))
    for point in points:
        if point.num_frames is not None:
            check_frames([point.num_frames], patch_size[0])
            check_fps([] if point.fps is None else [point.fps])


def check_frames(frames: Sequence[int], tubelet: int) -> None:
    """Refuse numbers of frames that are no whole number of tubelets.

    Raises: ValueError naming the number and the nearest ones that will do.
    """
    for count in frames:
        if count < 1:
            raise ValueError(f"frames is {count}, but a clip has at least one; give a multiple of {tubelet}")
        if count % tubelet:
            nearest = [valid for valid in (count // tubelet * tubelet, -(-count // tubelet) * tubelet) if valid]
            raise ValueError(
                f"frames is {count}, which tubelets of {tubelet} frames do not divide; the nearest valid numbers are "
                f"{' and '.join(map(str, nearest))}"
            )


def check_fps(fps: Sequence[float]) -> None:
    """Refuse rates that no clip can be taken at.

    Raises: ValueError naming the rate.
    """
    for rate in fps:
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"fps is {rate:g}, but it must be a positive number of frames a second")


def parse_frames(text: str | Iterable[str | int]) -> list[int]:
    """Read numbers of frames divided by commas, "8,16,32", or a list of them; each counts once."""
    words = text.split(",") if isinstance(text, str) else list(text)
    frames = []
    for word in words:
        try:
            frames.append(int(word))
        except ValueError:
            raise ValueError(f"frames is {word!r}, but it must be a whole number of frames, as in 8,16,32") from None
    return list(dict.fromkeys(frames))


def parse_fps(text: str | Iterable[str | float]) -> list[float]:
    """Read frames a second divided by commas, "2,4,7.5", or a list of them; each counts once."""
    words = text.split(",") if isinstance(text, str) else list(text)
    rates = []
    for word in words:
        try:
            rates.append(float(word))
        except ValueError:
            raise ValueError(f"fps is {word!r}, but it must be a number of frames a second, as in 2,4,7.5") from None
    return list(dict.fromkeys(rates))
