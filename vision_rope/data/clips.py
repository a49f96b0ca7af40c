"""Clips: frames with the seconds they are shown at, and the sources that give them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from vision_rope.data.segmented_clips import SegmentedClip


class Clip(NamedTuple):
    """One clip as it is decoded.

    Shapes: frames uint8 (frames, 3, height, width) in RGB, seconds float64 (frames,), rising
    """

    frames: Tensor
    seconds: Tensor


class Clips(NamedTuple):
    """A batch of clips; what a loader gives where images are a tensor.

    Seconds count from a clip's first frame.

    Shapes: on the device, frames floating point (batch, 3, frames, height, width), normalised, seconds float32
        (batch, frames); in host memory, frames uint8 (batch, frames, 3, height, width), seconds float32
    """

    frames: Tensor
    seconds: Tensor


class ClipSource(ABC, Dataset["tuple[Clip | SegmentedClip, int]"]):
    """Labelled clips with random access; item i is (clip, class), the one that evaluation looks at.

    Attributes:
        name: what the data set was opened as.
        classes: names of the classes, in the order of their numbers.
        labels: class of every clip; none where that is unknown before reading.
        licence: licence of the videos where it is known.
        skip_broken: leave out what cannot be read, which loaders report, instead of raising its error.
    """

    name: str
    classes: list[str]
    labels: list[int] | None = None
    licence: str | None = None
    skip_broken: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip | SegmentedClip, int]:
        """A clip and its class: what is random about it is drawn from the generator; none gives evaluation's clip.

        The generator is the sample's own, so that a clip follows from seed, epoch and index alone.
        """

    @abstractmethod
    def path(self, index: int) -> str:
        """File or folder of a clip, or a name for it where there is none."""

    @abstractmethod
    def sampled(self, num_frames: int, fps: float | None) -> ClipSource:
        """The same clips of another number of frames at another rate; none takes every frame."""

    def damage(self, index: int) -> str | None:
        """What was found wrong with a clip when this process last read it, though it could be read; else None."""
        return None

    def __getitem__(self, index: int) -> tuple[Clip | SegmentedClip, int]:
        return self.read(index)
