"""Clips of objects: frames with the id of an object at every pixel; those that are parts of DAVIS-layout videos."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vision_rope.config import ObjectsConfig
from vision_rope.data.clip_sampling import ClipSampling
from vision_rope.data.clips import ClipSource
from vision_rope.data.davis import VideoSequence, find_sequences
from vision_rope.data.decode import BrokenFileError
from vision_rope.data.decode_video import BrokenVideoError, stack_frames
from vision_rope.data.folders import Part, hold_out
from vision_rope.data.video_sources import NOMINAL_FPS

# The lists of sequences that DAVIS 2017 comes with, in ImageSets.
DAVIS_SPLITS = {"train": "2017/train", "validation": "2017/val"}


class SegmentedClip(NamedTuple):
    """One clip and its objects, which are numbered 1, 2, ... and are all seen in its first frame; 0 is everything else.

    It may hold no object at all: small ones are lost where a clip is made smaller.

    Shapes: frames uint8 (frames, 3, height, width) in RGB, ids uint8 (frames, height, width), seconds float64 (frames,)
    """

    frames: Tensor
    ids: Tensor
    seconds: Tensor


class SegmentedClips(NamedTuple):
    """A batch of clips and their objects; what a loader gives where images are a tensor.

    Seconds count from a clip's first frame.

    Shapes: on the device, frames floating point (batch, 3, frames, height, width), normalised, ids uint8
        (batch, frames, height, width), seconds float32 (batch, frames); in host memory, frames uint8
        (batch, frames, 3, height, width)
    """

    frames: Tensor
    ids: Tensor
    seconds: Tensor


class SegmentedSource(ClipSource):
    """Clips of objects with random access; item i is (clip, 0), the one that evaluation looks at."""

    def __init__(self, name: str, num_frames: int, num_objects: int) -> None:
        self.name = name
        self.classes = ["object"]
        self.num_frames = num_frames
        self.num_objects = num_objects

    @abstractmethod
    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[SegmentedClip, int]:
        """See `ClipSource.read`."""

    def sampled(self, num_frames: int, fps: float | None) -> SegmentedSource:
        """The same clips of another number of frames; a rate they do not have."""
        check_no_rate(self.name, fps)
        other = copy.copy(self)
        other.num_frames = num_frames
        return other


class SequenceSource(SegmentedSource):
    """Parts of videos of which objects are marked in all frames or in some, which alone are looked at.

    In training a part begins anywhere, and has a stride and a direction of its own; evaluation takes it from the first
    frame on that shows an object, at the largest stride. Where there are too many objects, training draws some of
    them, and evaluation takes those of the lowest ids.

    Args:
        name: what the data set was opened as.
        sequences: the videos.
        num_frames: frames of a clip.
        objects: how clips are taken.
        clips_per_video: items that each video counts as.
        skip_broken: see `ClipSource`.
    """

    def __init__(
        self,
        name: str,
        sequences: Sequence[VideoSequence],
        num_frames: int,
        objects: ObjectsConfig,
        *,
        clips_per_video: int = 1,
        skip_broken: bool = False,
    ) -> None:
        super().__init__(name, num_frames, objects.num_objects)
        self.sequences = list(sequences)
        self.skip_broken = skip_broken
        self._stride = objects.stride
        self._reverse = objects.reverse
        self._clips_per_video = clips_per_video

    def __len__(self) -> int:
        return len(self.sequences) * self._clips_per_video

    def path(self, index: int) -> str:
        """The folder of the frames."""
        return str(self._sequence(index).frames[0].parent)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[SegmentedClip, int]:
        """See `ClipSource.read`."""
        sequence = self._sequence(index)
        try:
            places = self._choose_frames(index, generator)
            frames = stack_frames(self.path(index), [sequence.read_frame(place) for place in places])
            ids = torch.stack([_read_ids(sequence, place) for place in places])
        except BrokenFileError:
            raise
        except OSError as error:
            # A link to nothing, a folder with a picture's name, a file that may not be read.
            raise BrokenVideoError(self.path(index), f"{error.filename} cannot be read: {error.strerror}") from error
        seconds = (torch.tensor(places, dtype=torch.float64) - places[0]).abs() / NOMINAL_FPS
        return SegmentedClip(frames, choose_objects(ids, self.num_objects, generator), seconds), 0

    def _sequence(self, index: int) -> VideoSequence:
        return self.sequences[index % len(self.sequences)]

    def _choose_frames(self, index: int, generator: torch.Generator | None) -> list[int]:
        """Places in the video of a clip's frames, the first of which shows an object."""
        sequence = self._sequence(index)
        places = sorted(sequence.ids)
        steps = self.num_frames - 1
        if len(places) <= steps:
            raise BrokenVideoError(
                self.path(index),
                f"it has {len(places)} frames with ids, but a clip takes {self.num_frames}, none twice",
            )
        stride, backwards = min(self._stride, (len(places) - 1) // max(steps, 1)), False
        if generator is not None:
            stride = 1 + int(torch.randint(stride, (), generator=generator))
            backwards = self._reverse and bool(torch.randint(2, (), generator=generator))
        num_starts = len(places) - steps * stride
        starts = range(num_starts) if generator is None else torch.randperm(num_starts, generator=generator).tolist()
        for start in starts:
            chosen = places[start : start + steps * stride + 1 : stride]
            if backwards:
                chosen.reverse()
            if _read_ids(sequence, chosen[0]).any():
                return chosen
        raise BrokenVideoError(self.path(index), "no frame that a clip may begin with shows an object")


def choose_objects(
    ids: Tensor, num_objects: int = 255, generator: torch.Generator | None = None, *, least: int = 1
) -> Tensor:
    """Number the objects of a clip's first frame 1, 2, ... in the order of their ids; what else there is becomes 0.

    Args:
        num_objects: most objects that are kept: a random choice, without a generator those of the lowest ids.
        least: pixels of the first frame that an object must have.

    Shapes: uint8 (frames, height, width) -> the same
    """
    # Counted: sorting every pixel, as unique does, takes ten times as long.
    seen = (torch.bincount(ids[0].flatten()) >= least).nonzero().flatten().tolist()
    seen = [number for number in seen if number > 0]
    if len(seen) > num_objects and generator is not None:
        seen = sorted(seen[place] for place in torch.randperm(len(seen), generator=generator)[:num_objects].tolist())
    chosen = torch.zeros_like(ids)
    for number, old in enumerate(seen[:num_objects], start=1):
        chosen[ids == old] = number
    return chosen


def open_davis(
    path: str, part: Part, sampling: ClipSampling, objects: ObjectsConfig, skip_broken: bool = False
) -> SequenceSource:
    """Open a folder in the DAVIS layout: JPEGImages/RESOLUTION/SEQUENCE/*.jpg and Annotations likewise.

    The splits are ImageSets/2017/train.txt and val.txt where both are there, or the lists that train_split and
    val_split name; otherwise a part of the sequences is held out.
    """
    name = f"davis:{path}"
    if not path:
        raise ValueError("davis needs a path: davis:PATH")
    check_no_rate(name, sampling.fps)
    root = Path(path).expanduser()
    lists = DAVIS_SPLITS
    if part.is_named:
        lists = {"train": part.train_split, "validation": part.val_split}
    if part.is_named or all((root / "ImageSets" / f"{entry}.txt").is_file() for entry in lists.values()):
        sequences = find_sequences(root, lists[part.split])
    else:
        found = find_sequences(root)
        names = [sequence.name for sequence in found]
        chosen = hold_out(names, [""] * len(names), part.split, part.val_fraction, part.split_seed, what="sequences")
        sequences = [found[place] for place in chosen]
    repeats = objects.clips_per_video if part.split == "train" else 1
    return SequenceSource(
        name, sequences, sampling.num_frames, objects, clips_per_video=repeats, skip_broken=skip_broken
    )


def check_no_rate(name: str, fps: float | None) -> None:
    """Refuse frames a second, which neither folders of frames nor clips made from photographs have."""
    if fps is not None:
        raise ValueError(
            f"fps is {fps:g}, but {name} has no frames a second; leave it out (objects.stride skips frames)"
        )


def _read_ids(sequence: VideoSequence, place: int) -> Tensor:
    ids = sequence.read_ids(place)
    assert ids is not None, "places were chosen among those of ids"
    return ids
