"""Augmentation of clips of objects: pixels and ids in step, all frames of a clip alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor
from torchvision.transforms import v2

from vision_rope.data.augment import (
    SIMPLE_CROP_PADDING,
    CoverResize,
    Crop,
    Interpolation,
    Transform,
    check_crop_ranges,
    check_size,
    colour_steps,
    covered_size,
    interpolation_mode,
    mirror_steps,
)
from vision_rope.data.segmented_clips import SegmentedClip, choose_objects

SegmentedTransform = Callable[[SegmentedClip], SegmentedClip]

# Share of its pixels in the first frame that a crop must leave of each object.
KEPT = 0.5
# Crops that are drawn before the whole picture is taken.
TRIES = 10
# The nearest pixel by the middles of both: plain NEAREST rounds down, which moves ids by up to half a pixel.
NEAREST = v2.InterpolationMode.NEAREST_EXACT


def segmented_train_transform(
    size: int | tuple[int, int],
    *,
    crop: Crop = "random-resized",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (0.75, 4.0 / 3.0),
    hflip: float = 0.5,
    vflip: float = 0.0,
    dihedral: bool = False,
    three_augment: bool = False,
    color_jitter: float = 0.0,
    interpolation: Interpolation = "bilinear",
) -> SegmentedTransform:
    """Build the augmentation of one training clip of objects; arguments are those of `train_transform`.

    A random-resized crop keeps at least half of what is to be seen of each object in the first frame; where ten draws
    do not, the whole picture is taken. Objects that are lost all the same make room in the numbering.

    Raises:
        ValueError: for a value outside its range.
    """
    size = check_size(size)
    mode = interpolation_mode(interpolation)
    mirrors = mirror_steps(size, hflip=hflip, vflip=vflip, dihedral=dihedral)
    colours = colour_steps(size, three_augment=three_augment, color_jitter=color_jitter)
    if crop == "simple":
        if min(size) <= SIMPLE_CROP_PADDING:
            raise ValueError(f"size is {size}, but crop 'simple' needs more than {SIMPLE_CROP_PADDING} pixels a side")
        moves = [v2.RandomCrop(size, padding=SIMPLE_CROP_PADDING, padding_mode="reflect"), *mirrors]
        return _InStep(CoverResize(size, mode), CoverResize(size, NEAREST), moves, colours)
    if crop not in get_args(Crop):
        raise ValueError(f"crop is {crop!r}; choose one of {', '.join(get_args(Crop))}")
    resize = v2.Resize(size, interpolation=mode, antialias=True)
    resize_ids = v2.Resize(size, interpolation=NEAREST)
    if crop == "resize":
        return _InStep(resize, resize_ids, mirrors, colours)
    check_crop_ranges(scale, ratio)

    def crop_objects(clip: SegmentedClip) -> SegmentedClip:
        top, left, height, width = draw_box(clip, scale, ratio)
        rows, columns = slice(top, top + height), slice(left, left + width)
        return clip._replace(frames=clip.frames[..., rows, columns], ids=clip.ids[..., rows, columns])

    return _InStep(resize, resize_ids, mirrors, colours, crop_objects)


def segmented_eval_transform(
    size: int | tuple[int, int], *, crop_pct: float = 1.0, interpolation: Interpolation = "bilinear"
) -> SegmentedTransform:
    """Build the preparation of one clip of objects for evaluation; arguments are those of `eval_transform`.

    Raises:
        ValueError: for a value outside its range.
    """
    size = check_size(size)
    covered = covered_size(size, crop_pct)
    mode = interpolation_mode(interpolation)
    return _InStep(CoverResize(covered, mode), CoverResize(covered, NEAREST), [v2.CenterCrop(size)], [])


class _InStep:
    """A crop of a clip, frames and ids resized each in their own way and moved together, then colours."""

    def __init__(
        self,
        resize: Transform,
        resize_ids: Transform,
        moves: list[Transform],
        colours: list[Transform],
        crop: SegmentedTransform | None = None,
    ) -> None:
        self._resize = resize
        self._resize_ids = resize_ids
        self._moves = moves
        self._colours = colours
        self._crop = crop

    def __call__(self, clip: SegmentedClip) -> SegmentedClip:
        if self._crop is not None:
            clip = self._crop(clip)
        # Ids as a fourth channel: what moves pixels moves all four alike.
        both = torch.cat((self._resize(clip.frames), self._resize_ids(clip.ids[:, None])), dim=1)
        for move in self._moves:
            both = move(both)
        frames, ids = both[:, :3], both[:, 3]
        for change in self._colours:
            frames = change(frames)
        return SegmentedClip(frames, choose_objects(ids), clip.seconds)


def draw_box(clip: SegmentedClip, scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """A random crop (top, left, height, width) that leaves enough of every object, or all of the picture."""
    before = count_pixels(clip.ids[0])
    for _ in range(TRIES):
        top, left, height, width = v2.RandomResizedCrop.get_params(clip.frames, list(scale), list(ratio))
        inside = count_pixels(clip.ids[0, top : top + height, left : left + width])
        if bool((inside >= KEPT * before)[1:].all()):
            return top, left, height, width
    return 0, 0, clip.ids.shape[-2], clip.ids.shape[-1]


def count_pixels(ids: Tensor) -> Tensor:
    """Shapes: uint8 (height, width) -> int64 (256,)"""
    return torch.bincount(ids.flatten(), minlength=256)
