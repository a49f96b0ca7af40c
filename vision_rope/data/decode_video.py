"""Video files to upright 8-bit RGB frames with their exact times; nothing a container says of its length is trusted.

PyAV decodes, which brings its own FFmpeg; it is imported when the first video is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vision_rope.data.clips import Clip
from vision_rope.data.decode import BrokenFileError

# From the times of a video's frames to the places of those that are wanted.
Choose = Callable[[Tensor], Tensor]

# Between two questions to a camera that has no picture yet.
POLL_SECONDS = 0.005


class BrokenVideoError(BrokenFileError):
    """A video that the wanted clip cannot be made of; `path` and `reason` say which and why."""

    complaint = "no clip can be made of it"

    def with_remedy(self, remedy: str) -> BrokenVideoError:
        """The same error, which ends with what can be done."""
        return BrokenVideoError(self.path, f"{self.reason}; {remedy}")


class FrameTimes(NamedTuple):
    """When the frames of a video are shown.

    Attributes:
        seconds: float64 (frames,), rising, as the file has them: the first frame may come later than 0.
        damage: what could not be decoded; none where all of it could.
    """

    seconds: Tensor
    damage: str | None


def list_frames(path: str | Path) -> FrameTimes:
    """Tell the times of all frames that can be decoded, by decoding them all; one frame at a time is in memory.

    A frame that cannot be decoded takes those along that follow it up to the next key frame, since they are made
    from it; the rest is good.

    Raises:
        BrokenVideoError: where no frame can be decoded.
        ModuleNotFoundError: where PyAV is not installed; it says how to install it.
    """
    with open_video(path) as file:
        places = sorted({frame_time(frame) for frame in iterate_frames(file)})
        return FrameTimes(to_seconds(file, places), file.damage)


def decode_frames(path: str | Path, choose: Choose) -> tuple[Clip, str | None]:
    """Decode the frames that `choose` picks by their times, from the key frame before the first of them on.

    The times come from the packets, which need no decoding. Where a picked frame turns out to be damaged, `choose` is
    asked once more, with the times of `list_frames`: the result follows from the file and from `choose` alone.

    Args:
        path: of a file in any container and codec that FFmpeg knows.
        choose: from float64 seconds (frames,) to the places of the wanted frames, rising.

    Returns:
        the clip, and what of the file was found damaged on the way, or None.

    Raises:
        BrokenVideoError: where no frame can be decoded, where the frames have different sizes, and with the message
            of a ValueError of `choose`.
        ModuleNotFoundError: where PyAV is not installed; it says how to install it.
    """
    with open_video(path) as file:
        times, keys = list_packets(file)
        wanted = pick_frames(file, times, choose) if times else []
        start = max((key for key in keys if wanted and key <= wanted[0]), default=None)
    if wanted:
        for first in (start, None) if start is not None and start > times[0] else (None,):
            with open_video(path) as file:
                found = _collect(file, wanted, first)
                if found is not None:
                    return found, file.damage
    with open_video(path) as file:
        times = sorted({frame_time(frame) for frame in iterate_frames(file)})
        if not times:
            raise BrokenVideoError(file.path, file.damage or "it holds no frames")
        wanted, damage = pick_frames(file, times, choose), file.damage
    with open_video(path) as file:
        clip = _collect(file, wanted, None)
    assert clip is not None, "the same frames can be decoded twice"
    return clip, damage


class VideoFile:
    """An open video and its stream; damage is noted here while it is decoded."""

    def __init__(self, path: str, container: Any, stream: Any) -> None:
        self.path = path
        self.container = container
        self.stream = stream
        self.damage: str | None = None

    def note(self, reason: str) -> None:
        """Keep the first of several reasons: the others often follow from it."""
        self.damage = self.damage or reason


def load_pyav() -> Any:
    """The package av.

    Raises:
        ModuleNotFoundError: where it is not installed; it says how to install it.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("videos need the package av: pip install vision-rope[video]", name="av") from error
    return av


@contextmanager
def open_video(path: str | Path) -> Iterator[VideoFile]:
    """Open the first video stream of a file; errors of FFmpeg are raised as BrokenVideoError."""
    load_pyav()
    if not Path(path).is_file():
        raise BrokenVideoError(str(path), "there is no such file")
    with open_input(str(path)) as file:
        yield file


@contextmanager
def open_input(
    address: str,
    *,
    format: str | None = None,
    options: dict[str, str] | None = None,
    timeout: float | None = None,
) -> Iterator[VideoFile]:
    """Open the first video stream of whatever FFmpeg reads: a file, a device, an address of the network.

    Args:
        format: FFmpeg's name of the container or of the kind of device; found out by itself where it is None.
        options: of that format, as FFmpeg calls them.
        timeout: seconds to wait for an answer.

    Raises:
        BrokenVideoError: for errors of FFmpeg, now and while the stream is read.
    """
    av = load_pyav()
    try:
        # Without errors of metadata: titles in an odd encoding are no fault of the pictures.
        with av.open(
            address, format=format, options=options or {}, timeout=timeout, metadata_errors="ignore"
        ) as container:
            # The first one; a picture of the cover is none.
            cover = av.stream.Disposition.attached_pic
            stream = next((stream for stream in container.streams.video if not stream.disposition & cover), None)
            if stream is None:
                raise BrokenVideoError(address, "it holds no video stream")
            # One thread a decoder: loaders bring their own parallelism, and damage is met at its own frame.
            stream.codec_context.thread_count = 1
            yield VideoFile(address, container, stream)
    except (av.FFmpegError, ValueError) as error:
        raise BrokenVideoError(address, _describe(error)) from error


def list_packets(file: VideoFile) -> tuple[list[int], list[int]]:
    """Times of all shown frames, rising, and of key frames, in units of the stream; none where packets lack them."""
    import av

    times: set[int] = set()
    keys = []
    try:
        for packet in file.container.demux(file.stream):
            if packet.size and packet.pts is None:
                return [], []
            if packet.size and not packet.is_discard:
                times.add(packet.pts)
                if packet.is_keyframe:
                    keys.append(packet.pts)
    except av.FFmpegError as error:
        file.note(_describe(error))
    return sorted(times), keys


def iterate_frames(file: VideoFile, start: int | None = None) -> Iterator[Any]:
    """Whole frames in the order of their times; faults are noted.

    Frames that the decoder holds back at a fault are not asked for: the damaged one may be among them.
    """
    import av

    context = file.stream.codec_context
    packets = file.container.demux(file.stream)
    waits_for_key = False
    while True:
        try:
            packet = next(packets, None)
            if packet is None:
                return
        except av.error.BlockingIOError:
            # A camera that has no picture yet.
            sleep(POLL_SECONDS)
            packets = file.container.demux(file.stream)
            continue
        except av.FFmpegError as error:
            file.note(_describe(error))
            return
        if waits_for_key and not packet.is_keyframe:
            continue
        waits_for_key = False
        try:
            frames = context.decode(packet if packet.size else None)
        except av.FFmpegError as error:
            file.note(f"{_describe(error)}, at {_at(file, packet.pts)}")
            context.flush_buffers()
            waits_for_key = True
            continue
        for frame in frames:
            if start is not None and frame_time(frame) < start:
                # Behind a seek: made from frames that were not read, and not wanted.
                continue
            if frame.is_corrupt:
                file.note(f"a damaged frame at {_at(file, frame.pts)}")
                context.flush_buffers()
                waits_for_key = True
                break
            yield frame


def _collect(file: VideoFile, wanted: list[int], start: int | None) -> Clip | None:
    """The wanted frames, read from the key frame at `start` or from the beginning; None where one does not come."""
    import av
    from av.video.reformatter import VideoReformatter

    if start is not None:
        try:
            file.container.seek(start, stream=file.stream)
        except av.FFmpegError:
            return None
    missing = set(wanted)
    pictures: dict[int, Tensor] = {}
    reformatter = VideoReformatter()
    for frame in iterate_frames(file, start):
        time = frame_time(frame)
        if time in missing:
            pictures[time] = to_rgb(frame, reformatter)
            missing.remove(time)
            if not missing:
                break
    if missing:
        return None
    return Clip(stack_frames(file.path, [pictures[time] for time in wanted]), to_seconds(file, wanted))


def pick_frames(file: VideoFile, times: list[int], choose: Choose) -> list[int]:
    """Times of the frames that are chosen."""
    try:
        return [times[place] for place in choose(to_seconds(file, times)).tolist()]
    except ValueError as error:
        raise BrokenVideoError(file.path, str(error)) from error


def stack_frames(path: str, frames: Sequence[Tensor]) -> Tensor:
    """Frames (3, height, width) as one tensor.

    Raises:
        BrokenVideoError: where they have different sizes.
    """
    if len({frame.shape for frame in frames}) > 1:
        sizes = sorted({f"{frame.shape[1]}x{frame.shape[2]}" for frame in frames})
        raise BrokenVideoError(path, f"its frames have different sizes (rows x columns): {', '.join(sizes)}")
    return torch.stack(list(frames))


def to_rgb(frame: Any, reformatter: Any) -> Tensor:
    """Upright RGB: the display matrix of phones' videos is followed, mirroring too.

    Shapes: uint8 (3, height, width)
    """
    rgb = reformatter.reformat(frame, format="rgb24", threads=1)
    pixels = torch.from_numpy(rgb.to_ndarray()).permute(2, 0, 1)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    # A point moves from (column, row) to (a column + c row, b column + d row).
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    if abs(b) > abs(a):
        a, d, pixels = c, b, pixels.transpose(1, 2)
    mirrored = [axis for axis, sign in ((2, a), (1, d)) if sign < 0]
    return pixels.flip(mirrored).contiguous() if mirrored else pixels.contiguous()


def frame_time(frame: Any) -> int:
    """In units of the stream; containers such as AVI count in the order of decoding alone."""
    time = frame.pts if frame.pts is not None else frame.dts
    if time is None:
        raise ValueError("its frames carry no times; put it into a container that has them, such as mp4 or mkv")
    return time


def to_seconds(file: VideoFile, times: list[int]) -> Tensor:
    """Times in units of the stream, exactly, as float64 seconds."""
    unit = Fraction(file.stream.time_base)
    return torch.tensor([float(time * unit) for time in times], dtype=torch.float64)


def _at(file: VideoFile, time: int | None) -> str:
    return "an unknown time" if time is None else f"{float(time * Fraction(file.stream.time_base)):.3f} s"


def _describe(error: Exception) -> str:
    """FFmpeg's words without its numbers."""
    return str(getattr(error, "strerror", None) or error).strip().split("\n")[0]
