"""Augmentation: an image, or all frames of a clip alike, as uint8 on the workers; whole batches on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from timm.data import Mixup
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from vision_rope.data.clips import Clips
from vision_rope.data.randomness import isolated_randomness
from vision_rope.data.segmented_clips import SegmentedClips

Transform = Callable[[Tensor], Tensor]
Crop = Literal["random-resized", "simple", "resize"]
Interpolation = Literal["bilinear", "bicubic"]

# Pixels of reflected border that the simple crop is drawn from (DeiT-III).
SIMPLE_CROP_PADDING = 4


def train_transform(
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
    interpolation: Interpolation = "bicubic",
) -> Transform:
    """Build the augmentation of one training image.

    Args:
        size: of the result, (height, width) in pixels.
        crop: random-resized draws an area and an aspect ratio; simple lets the short side cover the size, adds a
            reflected border of 4 pixels and draws a place; resize squeezes the whole image into the size.
        scale: range of the share of the area that random-resized keeps.
        ratio: range of the aspect ratio (width over height) that random-resized draws.
        hflip: probability of a left-right flip.
        vflip: probability of an up-down flip.
        dihedral: turn and mirror by a random symmetry of the square, or of the rectangle where size is none.
        three_augment: make every image grey, solarized or blurred, one of the three.
        color_jitter: strength of brightness, contrast and saturation jitter.
        interpolation: how images are resized, always antialiased.

    Shapes:
        the transform takes uint8 (3, any height, any width) and returns uint8 (3, height, width); frames of a clip,
        (frames, 3, any height, any width), are treated alike

    Raises:
        ValueError: for a value outside its range.

    Source: DeiT III (arXiv 2204.07118), section 4: simple crop and 3-Augment.
    """
    size = check_size(size)
    mode = interpolation_mode(interpolation)
    steps: list[Transform] = []
    if crop == "random-resized":
        check_crop_ranges(scale, ratio)
        steps.append(v2.RandomResizedCrop(size, tuple(scale), tuple(ratio), interpolation=mode, antialias=True))
    elif crop == "simple":
        if min(size) <= SIMPLE_CROP_PADDING:
            raise ValueError(f"size is {size}, but crop 'simple' needs more than {SIMPLE_CROP_PADDING} pixels a side")
        steps.append(CoverResize(size, mode))
        steps.append(v2.RandomCrop(size, padding=SIMPLE_CROP_PADDING, padding_mode="reflect"))
    elif crop == "resize":
        steps.append(v2.Resize(size, interpolation=mode, antialias=True))
    else:
        raise ValueError(f"crop is {crop!r}; choose one of {', '.join(get_args(Crop))}")
    mirrors = mirror_steps(size, hflip=hflip, vflip=vflip, dihedral=dihedral)
    return Chain(steps + mirrors + colour_steps(size, three_augment=three_augment, color_jitter=color_jitter))


def mirror_steps(size: tuple[int, int], *, hflip: float, vflip: float, dihedral: bool) -> list[Transform]:
    """The steps of `train_transform` that move whole pixels, of any number of channels."""
    for name, probability in (("hflip", hflip), ("vflip", vflip)):
        if not 0 <= probability <= 1:
            raise ValueError(f"{name} is {probability}, but a probability lies between 0 and 1")
    steps: list[Transform] = []
    if dihedral:
        steps.append(RandomSymmetry(is_square=size[0] == size[1]))
    if hflip:
        steps.append(v2.RandomHorizontalFlip(hflip))
    if vflip:
        steps.append(v2.RandomVerticalFlip(vflip))
    return steps


def colour_steps(size: tuple[int, int], *, three_augment: bool, color_jitter: float) -> list[Transform]:
    """The steps of `train_transform` that change colours, of all frames of a clip alike."""
    if color_jitter < 0:
        raise ValueError(f"color_jitter is {color_jitter}, but a strength is not negative; 0 switches it off")
    steps: list[Transform] = []
    if three_augment:
        steps.append(ThreeAugment(size))
    if color_jitter:
        steps.append(v2.ColorJitter(color_jitter, color_jitter, color_jitter))
    return steps


def check_crop_ranges(scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    """Refuse ranges that no crop can be drawn from."""
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale is {scale}, but it must be a range (least, most) of shares in (0, 1]")
    if not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"ratio is {ratio}, but it must be a range (least, most) of positive numbers")


def covered_size(size: tuple[int, int], crop_pct: float) -> tuple[int, int]:
    """The size that an image is resized to cover before its centre is cropped.

    Raises:
        ValueError: for a share outside (0, 1].
    """
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct is {crop_pct}, but it must lie in (0, 1]; 1 keeps the most of the image")
    # Rounded down as timm does; the small number keeps 0.7 * 10 / 0.7 from becoming 9.
    height, width = (int(side / crop_pct + 1e-6) for side in size)
    return height, width


def eval_transform(
    size: int | tuple[int, int], *, crop_pct: float = 1.0, interpolation: Interpolation = "bicubic"
) -> Transform:
    """Build the preparation of one image for evaluation: resize, keeping the aspect ratio, and centre crop.

    Args:
        size: of the result, (height, width) in pixels.
        crop_pct: the image is resized until it covers size / crop_pct; 1 keeps the most of it.
        interpolation: how images are resized, always antialiased.

    Shapes:
        the transform takes uint8 (3, any height, any width) and returns uint8 (3, height, width); frames of a clip,
        (frames, 3, any height, any width), are treated alike

    Raises:
        ValueError: for a value outside its range.
    """
    size = check_size(size)
    covered = covered_size(size, crop_pct)
    return Chain([CoverResize(covered, interpolation_mode(interpolation)), v2.CenterCrop(size)])


def resize_batch(
    images: Tensor | Clips | SegmentedClips, size: tuple[int, int], interpolation: Interpolation
) -> Tensor | Clips | SegmentedClips:
    """Resize a normalised batch on its own device, all frames of a clip alike; smaller ones are antialiased.

    Each pixel of the objects of clips takes the id of the nearest one.

    Shapes: images (batch, channels, any height, any width), or frames of clips -> the same of that size
    """
    frames = images if isinstance(images, Tensor) else images.frames.transpose(1, 2).flatten(0, 1)
    if frames.shape[-2:] == size:
        return images
    resized = nn.functional.interpolate(frames, size, mode=interpolation, align_corners=False, antialias=True)
    if isinstance(images, Tensor):
        return resized
    resized = resized.unflatten(0, (len(images.seconds), -1)).transpose(1, 2).contiguous()
    if isinstance(images, SegmentedClips):
        return images._replace(frames=resized, ids=nn.functional.interpolate(images.ids, size, mode="nearest-exact"))
    return images._replace(frames=resized)


class Chain:
    """One transform after another."""

    def __init__(self, steps: list[Transform]) -> None:
        self.steps = steps

    def __call__(self, image: Tensor) -> Tensor:
        for step in self.steps:
            image = step(image)
        return image

    def __repr__(self) -> str:
        return f"Chain({self.steps})"


class CoverResize:
    """Resize, keeping the aspect ratio, to the smallest image that covers a size on both axes."""

    def __init__(self, size: tuple[int, int], interpolation: v2.InterpolationMode) -> None:
        self.size = size
        self.interpolation = interpolation

    def __call__(self, image: Tensor) -> Tensor:
        (height, width), (image_height, image_width) = self.size, image.shape[-2:]
        # In whole numbers: which axis decides must not hang on a rounding error.
        if height * image_width >= width * image_height:
            new = height, max(width, image_width * height // image_height)
        else:
            new = max(height, image_height * width // image_width), width
        return functional.resize(image, list(new), interpolation=self.interpolation, antialias=True)


class RandomSymmetry:
    """Turn and mirror by a random one of the square's 8 symmetries, or of the 4 that keep a rectangle's shape."""

    def __init__(self, is_square: bool) -> None:
        self.is_square = is_square

    def __call__(self, image: Tensor) -> Tensor:
        mirror, turns = divmod(int(torch.randint(8 if self.is_square else 4, ())), 4 if self.is_square else 2)
        if mirror:
            image = image.flip(-1)
        return torch.rot90(image, turns if self.is_square else 2 * turns, (-2, -1))


class ThreeAugment:
    """Make an image grey, solarized or blurred, one of the three.

    Source: DeiT III (arXiv 2204.07118); the blur's standard deviation is drawn from 0.1 to 2 pixels.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        # An image can be mirrored beyond its border by less than its side.
        self.max_radius = min(size) - 1

    def __call__(self, image: Tensor) -> Tensor:
        choice = int(torch.randint(3, ()))
        if choice == 0:
            return functional.rgb_to_grayscale(image, num_output_channels=3)
        if choice == 1:
            return functional.solarize(image, threshold=128)
        return self._blur(image, sigma=float(torch.empty(()).uniform_(0.1, 2.0)))

    def _blur(self, image: Tensor, sigma: float) -> Tensor:
        radius = min(math.ceil(3 * sigma), self.max_radius)
        if radius == 0:
            return image
        # Columns, then rows: torchvision's square kernel gives the same in two to four times the time.
        blurred = functional.gaussian_blur(image.float(), [2 * radius + 1, 1], [sigma, sigma])
        blurred = functional.gaussian_blur(blurred, [1, 2 * radius + 1], [sigma, sigma])
        return blurred.round_().to(torch.uint8)


class Mixing:
    """Mixup and CutMix of a normalised batch on its own device, by timm; batches of any size, odd and single too.

    Args:
        mixup: alpha of mixup; 0 switches it off.
        cutmix: alpha of CutMix; 0 switches it off.
        prob: probability that a batch is mixed at all.
        switch_prob: probability of CutMix where both are on.
        label_smoothing: share of every target spread over all classes.
        num_classes: width of the targets.

    Raises:
        ValueError: where both are off, and for a value outside its range.
    """

    def __init__(
        self,
        *,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        label_smoothing: float = 0.0,
        num_classes: int,
    ) -> None:
        if min(mixup, cutmix) < 0 or max(mixup, cutmix) == 0:
            raise ValueError(
                f"mixup is {mixup} and cutmix {cutmix}, "
                "but neither may be negative nor both 0; leave Mixing out instead"
            )
        for name, share in (("prob", prob), ("switch_prob", switch_prob), ("label_smoothing", label_smoothing)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}, but it must lie between 0 and 1")
        self._mix = Mixup(
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            prob=prob,
            switch_prob=switch_prob,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Mix every image with its mirror place in the batch; the inputs stay as they are.

        Args:
            images: floating point (batch, channels, height, width).
            labels: int64 (batch,).
            seed: of the random draws; none draws from NumPy's global generator, as timm does.

        Returns:
            the mixed images and the targets: float32 (batch, classes).
        """
        count = len(images)
        # timm mixes in place and even batches only: an odd one borrows its first image and gives it back mixed with
        # itself, which changes nothing.
        extended = torch.cat([images, images[:1]]) if count % 2 else images.clone()
        extended_labels = torch.cat([labels, labels[:1]]) if count % 2 else labels
        if seed is None:
            mixed, targets = self._mix(extended, extended_labels)
        else:
            with isolated_randomness(seed):
                mixed, targets = self._mix(extended, extended_labels)
        return mixed[:count], targets[:count]


def check_size(size: int | tuple[int, int]) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int | float) else tuple(size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"size is {size!r}, but it must be (height, width): two positive whole numbers")
    return sides[0], sides[1]


def interpolation_mode(name: str) -> v2.InterpolationMode:
    if name not in get_args(Interpolation):
        raise ValueError(f"interpolation is {name!r}; choose one of {', '.join(get_args(Interpolation))}")
    return v2.InterpolationMode(name)
