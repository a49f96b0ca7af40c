"""Sizes of images that patches divide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_divisible(subject: str, size: Sequence[int], patch: Sequence[int]) -> None:
    """Raise ValueError where patches do not divide a size in pixels, (height, width)."""
    for side, length, unit in zip(("height", "width"), size, patch, strict=True):
        if length % unit:
            below, above = length // unit * unit, (length // unit + 1) * unit
            valid = f"{above}" if below == 0 else f"{below} or {above}"
            raise ValueError(
                f"{subject} {side} {length}, which patches of {unit} pixels do not divide; resize them to {valid}"
            )


def check_input_size(embed: Any, img_size: Any, patch_size: Any) -> None:
    """Raise ValueError for a size that timm's set_input_size would round down without a word."""
    given = (img_size or embed.img_size), (patch_size or embed.patch_size)
    size, patch = ((each, each) if isinstance(each, int) else tuple(each) for each in given)
    check_divisible("img_size has", size, patch)
