"""Labelled clips: from video files, from folders of frames, and a part of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vision_rope.data.clip_sampling import ClipSampling
from vision_rope.data.clips import Clip, ClipSource
from vision_rope.data.decode import BrokenFileError, decode_image
from vision_rope.data.decode_torchcodec import decode_by_nvdec, decode_by_torchcodec, load_torchcodec
from vision_rope.data.decode_video import BrokenVideoError, Choose, decode_frames, load_pyav, stack_frames
from vision_rope.data.folders import IMAGE_EXTENSIONS
from vision_rope.data.sources import spread_evenly

if TYPE_CHECKING:
    from vision_rope.data.segmented_clips import SegmentedClip

# Frames a second of a folder of frames, which says nothing of its rate.
NOMINAL_FPS = 30.0

Decode = Callable[[str, Choose], tuple[Clip, str | None]]
DECODERS: dict[str, Decode] = {
    "pyav": decode_frames,
    "torchcodec": decode_by_torchcodec,
    "nvdec": decode_by_nvdec,
}


class Segment(NamedTuple):
    """A file and the seconds of it that count: from `start` on, before `end`."""

    path: str
    start: float | None = None
    end: float | None = None


class VideoSource(ClipSource):
    """Clips from video files.

    Args:
        name: what the data set was opened as.
        classes: names of the classes.
        segments: a file a clip, or part of one.
        labels: class of every clip.
        sampling: which frames make a clip.
        skip_broken: see `ClipSource`.
        decoder: a name of DECODERS.
    """

    def __init__(
        self,
        name: str,
        classes: Sequence[str],
        segments: Sequence[Segment],
        labels: Sequence[int],
        sampling: ClipSampling,
        skip_broken: bool = False,
        decoder: str = "pyav",
    ) -> None:
        self.name = name
        self.classes = list(classes)
        self.segments = list(segments)
        self.labels: list[int] = list(labels)
        self.sampling = sampling
        self.skip_broken = skip_broken
        self.decoder = decoder
        self._damage: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.segments)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
        """The clip in the middle of a video, or one that begins at a random time where there is a generator."""
        path, start, end = self.segments[index]
        position = draw_position(generator)

        def choose(seconds: Tensor) -> Tensor:
            inside = torch.ones(len(seconds), dtype=torch.bool)
            if start is not None:
                inside &= seconds >= start
            if end is not None:
                inside &= seconds < end
            places = inside.nonzero().flatten()
            if len(places) == 0 < len(seconds):
                window = f"from {start or 0:g} s on" if end is None else f"{start or 0:g} to {end:g} s"
                raise ValueError(
                    f"the window {window} holds no frames: the video has them from {seconds[0]:.3g} to "
                    f"{seconds[-1]:.3g} s"
                )
            return places[self.sampling.choose(seconds[places], position)]

        clip, damage = DECODERS[self.decoder](path, choose)
        if damage is not None:
            self._damage[index] = damage
        return clip, self.labels[index]

    def sampled(self, num_frames: int, fps: float | None) -> VideoSource:
        sampling = ClipSampling(num_frames, fps)
        return VideoSource(
            self.name, self.classes, self.segments, self.labels, sampling, self.skip_broken, self.decoder
        )

    def path(self, index: int) -> str:
        return self.segments[index].path

    def damage(self, index: int) -> str | None:
        return self._damage.get(index)


class FrameFolderSource(ClipSource):
    """Clips from folders of images, in the natural order of their names (2.jpg before 10.jpg), one a frame.

    Args:
        name: what the data set was opened as.
        classes: names of the classes.
        folders: a folder a clip.
        labels: class of every clip.
        sampling: which frames make a clip.
        fps: frames a second that the folders hold.
        skip_broken: see `ClipSource`.
    """

    def __init__(
        self,
        name: str,
        classes: Sequence[str],
        folders: Sequence[str],
        labels: Sequence[int],
        sampling: ClipSampling,
        fps: float = NOMINAL_FPS,
        skip_broken: bool = False,
    ) -> None:
        self.name = name
        self.classes = list(classes)
        self.folders = list(folders)
        self.labels: list[int] = list(labels)
        self.sampling = sampling
        self.fps = fps
        self.skip_broken = skip_broken

    def __len__(self) -> int:
        return len(self.folders)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
        """The clip in the middle of a folder, or one that begins at a random frame where there is a generator."""
        files = list_frame_files(Path(self.folders[index]))
        seconds = torch.arange(len(files), dtype=torch.float64) / self.fps
        try:
            chosen = self.sampling.choose(seconds, draw_position(generator))
        except ValueError as error:
            raise BrokenVideoError(self.path(index), str(error)) from error
        try:
            frames = [decode_image(files[place]) for place in chosen.tolist()]
        except BrokenFileError:
            raise
        except OSError as error:
            # A link to nothing, a folder with a picture's name, a file that may not be read.
            raise BrokenVideoError(self.path(index), f"{error.filename} cannot be read: {error.strerror}") from error
        return Clip(stack_frames(self.path(index), frames), seconds[chosen]), self.labels[index]

    def sampled(self, num_frames: int, fps: float | None) -> FrameFolderSource:
        sampling = ClipSampling(num_frames, fps)
        return FrameFolderSource(
            self.name, self.classes, self.folders, self.labels, sampling, self.fps, self.skip_broken
        )

    def path(self, index: int) -> str:
        return self.folders[index]


class EvenClips(ClipSource):
    """So many clips of a data set, evenly spread over its order."""

    def __init__(self, whole: ClipSource, count: int) -> None:
        self.name = whole.name
        self.classes = whole.classes
        self.licence = whole.licence
        self.skip_broken = whole.skip_broken
        self._whole = whole
        self._places = spread_evenly(count, len(whole))
        self.labels = None if whole.labels is None else [whole.labels[place] for place in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip | SegmentedClip, int]:
        return self._whole.read(self._places[index], generator)

    def sampled(self, num_frames: int, fps: float | None) -> EvenClips:
        return EvenClips(self._whole.sampled(num_frames, fps), len(self))

    def path(self, index: int) -> str:
        return self._whole.path(self._places[index])

    def damage(self, index: int) -> str | None:
        return self._whole.damage(self._places[index])


def check_decoder(decoder: str) -> None:
    """Refuse a decoder of video files that is unknown or not installed, before any worker starts."""
    if decoder not in DECODERS:
        raise ValueError(f"decoder is {decoder!r}; choose one of {', '.join(DECODERS)}")
    load_pyav()
    if decoder != "pyav":
        load_torchcodec("cuda" if decoder == "nvdec" else "cpu")


def list_frame_files(folder: Path) -> list[str]:
    """Images of a folder in the natural order of their names: 2.jpg before 10.jpg."""
    if not folder.is_dir():
        raise BrokenVideoError(str(folder), "there is no such folder")
    names = (entry.name for entry in folder.iterdir() if entry.suffix.lower() in IMAGE_EXTENSIONS)
    return [str(folder / name) for name in sorted(names, key=natural_key) if not name.startswith(".")]


def natural_key(name: str) -> list[tuple[int, str]]:
    """Key of an order in which numbers inside of names count as numbers."""
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def draw_position(generator: torch.Generator | None) -> float:
    """Where a clip lies in its video, from 0 to 1: at random, or in the middle."""
    return 0.5 if generator is None else float(torch.rand((), dtype=torch.float64, generator=generator))
