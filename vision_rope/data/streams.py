"""Video files, folders of pictures, cameras, addresses and iterators as streams of upright frames, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vision_rope.data.decode_video import BrokenVideoError
from vision_rope.data.frame_sources import FrameSource, Shown, exact_rate, open_source, refuse_decoder, take_frames
from vision_rope.data.read_ahead import read_ahead
from vision_rope.data.video_sources import NOMINAL_FPS
from vision_rope.segmenter.framing import FrameSizeError, resize

Decoder = Literal["pyav", "torchcodec", "nvdec"]


class BrokenStreamError(BrokenVideoError):
    """A stream that gives no frames; `path` and `reason` say which and why."""

    complaint = "cannot be read"


class StreamFrame(NamedTuple):
    """A frame of a stream.

    Attributes:
        number: from 0 on.
        pixels: uint8 (3, height, width), upright RGB; on the GPU where NVDEC decodes.
        seconds: when it is shown, as the source has it: the first frame may come later than 0.
    """

    number: int
    pixels: Tensor
    seconds: float


class FrameStream:
    """Frames in the order they are shown: an iterator, and a context manager that closes what is read.

    Attributes:
        name: of the file or folder, without ending.
        fps: frames a second on average, as the header has it; None where nothing says.
        num_frames: what the header promises, for progress bars alone; None where nothing does.
        size: rows and columns of the upright frames.
    """

    def __init__(self, source: FrameSource, resize: bool) -> None:
        self.name = source.name
        self.fps = source.fps
        self.num_frames = source.num_frames
        self._source = source
        self._resize = resize
        self._numbers = count()
        self._frames = read_ahead(source.frames, source.ahead) if source.ahead else source.frames
        # The first frame is decoded here: it alone tells the size, and whether there is anything to read.
        self._first: Shown | None = next(self._frames, None)
        if self._first is None:
            raise BrokenStreamError(source.name, self.damage or "it holds no frames")
        self.size: tuple[int, int] = _size(self._first[0])

    @property
    def damage(self) -> str | None:
        """What of the file could not be decoded; known after the last frame."""
        return self._source.file.damage if self._source.file is not None else None

    def __iter__(self) -> Iterator[StreamFrame]:
        return self

    def __next__(self) -> StreamFrame:
        shown, self._first = self._first or next(self._frames), None
        pixels, seconds = shown
        number = next(self._numbers)
        if _size(pixels) != self.size:
            if not self._resize:
                self.close()
                size, first = _size(pixels), self.size
                raise FrameSizeError(
                    f"{self.name}: frame {number} has {size[0]}x{size[1]} pixels (rows x columns), but the first one "
                    f"has {first[0]}x{first[1]}; resize=True (--resize) brings all frames to the size of the first",
                    number=number,
                    size=size,
                    first=first,
                )
            pixels = _resize(pixels, self.size)
        if seconds is None or self._source.evenly:
            seconds = float(number / exact_rate(self.fps or NOMINAL_FPS))
        return StreamFrame(number, pixels, seconds)

    def close(self) -> None:
        """Stop decoding and close the file; there are no frames after it."""
        self._first = None
        self._frames.close()

    def __enter__(self) -> FrameStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_stream(
    source: str | Path | int | Iterable[Any],
    *,
    ahead: int | None = None,
    decoder: Decoder = "pyav",
    fps: float | None = None,
    resize: bool = False,
) -> FrameStream:
    """Open a stream of frames; as many as wait are in memory, however long it is.

    Damage of a video is no error: all frames that can be decoded come, and `damage` tells of the others afterwards. A
    picture that cannot be decoded is one.

    Args:
        source: a video file in any container and codec that FFmpeg knows; a folder of pictures, taken in the order of
            the numbers in their names; the number of a camera, or a name such as /dev/video0; an address such as
            rtsp://... or http://...; or any iterable, with or without a length, of arrays (height, width, 3), tensors
            (3, height, width), uint8 or floats from 0 to 1, or paths of pictures.
        ahead: frames that a thread decodes before they are asked for; 0 decodes in step. 8 unless it is given, 1 of
            cameras, and 0 of iterables, which nothing is taken from before it is needed.
        decoder: of video files: pyav, torchcodec, or nvdec (torchcodec on an NVIDIA GPU, where the frames stay).
        fps: frames a second. A camera is asked for it; of pictures and iterables, which have no times, 30 is taken
            unless it is given; of others it replaces the times that they have.
        resize: bring frames of another size to that of the first one, instead of raising FrameSizeError.

    Raises:
        BrokenStreamError: where no frame can be decoded.
        FrameSizeError: while it is read, where a frame has another size than the first.
        ValueError: for a source, decoder or number that cannot be.
        ModuleNotFoundError: where the decoder is not installed; it says how to install it.
    """
    _check_options(ahead, decoder, fps)
    if isinstance(source, str | Path | int) and not isinstance(source, bool):
        try:
            opened = open_source(source, decoder, fps)
            opened.ahead = opened.ahead if ahead is None else ahead
            return FrameStream(opened, resize)
        except BrokenVideoError as error:
            raise BrokenStreamError(error.path, error.reason) from error
    refuse_decoder(decoder, "an iterable")
    try:
        frames = iter(source)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"source is a {type(source).__name__}, but it must be a path, an address, the number of a camera or an "
            "iterable of frames"
        ) from None
    length = len(source) if isinstance(source, Sized) else None
    return FrameStream(FrameSource("frames", take_frames(frames), fps or NOMINAL_FPS, length, ahead or 0), resize)


def _check_options(ahead: int | None, decoder: str, fps: float | None) -> None:
    if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0):
        raise ValueError(f"ahead is {ahead}, but it must be a number of frames; 0 decodes in step")
    if decoder not in ("pyav", "torchcodec", "nvdec"):
        raise ValueError(f"decoder is {decoder!r}, but it must be pyav, torchcodec or nvdec")
    if fps is not None and not 0 < fps < float("inf"):
        raise ValueError(f"fps is {fps:g}, but it must be a positive number of frames a second")


def _size(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[1], pixels.shape[2]


def _resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return resize(pixels.float(), size).round().clamp(0, 255).to(torch.uint8)
