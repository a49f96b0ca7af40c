"""Sizes of images in pixels, (height, width), as text, as numbers, and as a configuration has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vision_rope.config import DataConfig

Size = tuple[int, int]


def parse_size(text: str) -> Size:
    """Read "192x256" (rows x columns) or "224" as (h, w) in pixels.

    Raises: ValueError where the text is neither.
    """
    match = re.fullmatch(r"\s*(\d+)(?:\s*x\s*(\d+))?\s*", text)
    if match is None or not int(match[1]) or not int(match[2] or 1):
        raise ValueError(f"size is {text!r}, but it must be one number (224) or rows x columns (192x256), in pixels")
    return int(match[1]), int(match[2] or match[1])


def parse_sizes(text: str | Iterable[str]) -> list[Size]:
    """Read sizes divided by commas, "64,96,192x256", or a list of them; each counts once."""
    words = text.split(",") if isinstance(text, str) else list(text)
    if not words:
        raise ValueError("sizes is empty; give at least one, for instance 224 or 192x256")
    return list(dict.fromkeys(parse_size(word) for word in words))


def check_sizes(sizes: Sequence[Size], patch_size: Size) -> None:
    """Refuse sizes that the patch does not divide.

    Raises: ValueError naming the size and the nearest ones that it divides.
    """
    for size in sizes:
        if all(length % patch == 0 for length, patch in zip(size, patch_size, strict=True)):
            continue
        below = [length // patch * patch for length, patch in zip(size, patch_size, strict=True)]
        above = [-(-length // patch) * patch for length, patch in zip(size, patch_size, strict=True)]
        nearest = [format_size((h, w)) for h, w in (below, above) if h and w]
        raise ValueError(
            f"size {format_size(size)} is not divisible by the patch size {format_size(patch_size)}; "
            f"the nearest valid sizes are {' and '.join(nearest)}"
        )


def format_size(size: tuple[int, int]) -> str:
    """Write (224, 224) as "224" and (192, 256) as "192x256"."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def pixel_size(size: int | Sequence[int]) -> Size:
    """Both sides of a size of which a configuration may name one: 224 -> (224, 224)."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def training_sizes(section: DataConfig) -> list[tuple[int, int]]:
    """Sizes that training batches have, (height, width) in pixels; a size may come more than once."""
    if section.train_sizes:
        try:
            return [parse_size(size) for size in section.train_sizes]
        except ValueError as error:
            raise ValueError(f"data.train_sizes: {error}") from error
    return [pixel_size(section.size)]


def largest_size(section: DataConfig) -> tuple[int, int]:
    """The size that training images are loaded at, from which the batches' own sizes are made."""
    sizes = training_sizes(section)
    return max(height for height, _ in sizes), max(width for _, width in sizes)
