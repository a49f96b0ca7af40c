"""What streams of frames are read from: video files, folders of pictures, cameras, addresses and iterators."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vision_rope.data.decode import decode_image
from vision_rope.data.decode_torchcodec import frames_by_torchcodec
from vision_rope.data.decode_video import VideoFile, iterate_frames, open_input, open_video, to_rgb
from vision_rope.data.folders import IMAGE_EXTENSIONS
from vision_rope.data.video_sources import NOMINAL_FPS, natural_key

# Pixels (3, height, width), and seconds where the source has times.
Shown = tuple[Tensor, float | None]

# Frames that are decoded before they are asked for; of a camera fewer, since they grow old while they wait.
FILE_AHEAD = 8
CAMERA_AHEAD = 1
# Seconds to wait for an answer of the network.
NETWORK_TIMEOUT = 30.0
# Pictures that move: FFmpeg gives all of their frames.
MOVING = (".gif", ".apng")


@dataclass
class FrameSource:
    """What a stream is read from.

    Attributes:
        name, fps, num_frames: see `FrameStream`.
        frames: its frames; closing it closes the file.
        ahead: frames that are best decoded before they are asked for.
        evenly: whether frames are shown at the rate of `fps`, whatever times the source has.
        file: where damage is noted.
    """

    name: str
    frames: Generator[Shown, None, None]
    fps: float | None
    num_frames: int | None
    ahead: int
    evenly: bool = False
    file: VideoFile | None = None


def open_source(source: str | Path | int, decoder: str, fps: float | None) -> FrameSource:
    """Open whatever a path, an address or a number stands for; see `open_stream`."""
    text = str(source)
    path = Path(source).expanduser() if not isinstance(source, int) else None
    if path is None or re.fullmatch(r"/dev/video\d+|video=.+", text) or (text.isdigit() and not path.exists()):
        refuse_decoder(decoder, "a camera")
        return _open_camera(text, fps)
    if re.match(r"[a-z][a-z0-9+.-]+://", text, re.IGNORECASE):
        refuse_decoder(decoder, "an address")
        return _open_address(text, fps)
    if path.is_dir():
        refuse_decoder(decoder, "a folder")
        files = list_pictures(path)
        return FrameSource(path.resolve().name, take_frames(iter(files)), fps or NOMINAL_FPS, len(files), FILE_AHEAD)
    suffix = path.suffix.lower()
    if suffix in IMAGE_EXTENSIONS and suffix not in MOVING:
        refuse_decoder(decoder, "a picture")
        return FrameSource(path.stem, take_frames(iter([path])), fps or NOMINAL_FPS, 1, 0)
    if decoder != "pyav":
        return _open_by_torchcodec(path, decoder, fps)
    return _read(path.stem, fps, FILE_AHEAD, lambda: open_video(path))


def exact_rate(fps: float) -> Fraction:
    """The rate that a float stands for: 29.97002997 is 30000/1001."""
    return Fraction(fps).limit_denominator(1001) or Fraction(fps)


def list_pictures(folder: Path) -> list[Path]:
    """The pictures of a folder in the order of the numbers in their names: 2 comes before 10.

    Raises:
        ValueError: where it holds none.
    """
    entries = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() in IMAGE_EXTENSIONS and entry.is_file()]
    if not files:
        raise ValueError(f"{folder} holds no pictures; expected files that end in {' '.join(IMAGE_EXTENSIONS)}")
    return sorted(files, key=lambda entry: natural_key(entry.name))


def _open_camera(text: str, fps: float | None) -> FrameSource:
    name = f"camera{text}" if text.isdigit() else Path(text.partition("=")[2] or text).name
    options = {} if fps is None else {"framerate": str(fps)}
    if sys.platform == "win32":
        if text.isdigit():
            raise ValueError(f"camera {text}: on Windows a camera is called by its name, as in video=Integrated Camera")
        address, system = text, "dshow"
    elif sys.platform == "darwin":
        # Without a rate, a camera is asked for one that few have.
        address, system, options = f"{text}:none", "avfoundation", options or {"framerate": "30"}
    else:
        address, system = (f"/dev/video{text}" if text.isdigit() else text), "v4l2"
        if not Path(address).exists():
            found = ", ".join(sorted(map(str, Path("/dev").glob("video*")))) or "none"
            raise ValueError(f"there is no camera {address}; cameras of this machine: {found}")
    return _read(name, fps, CAMERA_AHEAD, lambda: open_input(address, format=system, options=options), keeps_times=True)


def _open_address(address: str, fps: float | None) -> FrameSource:
    name = Path(re.sub(r"^\w[^:]*://|[?#].*$", "", address)).stem or "stream"
    # Over UDP, the default, lost packets are lost frames.
    options = {"rtsp_transport": "tcp"} if address.lower().startswith("rtsp") else {}
    return _read(name, fps, FILE_AHEAD, lambda: open_input(address, options=options, timeout=NETWORK_TIMEOUT))


def _read(
    name: str,
    fps: float | None,
    ahead: int,
    open_it: Callable[[], AbstractContextManager[VideoFile]],
    keeps_times: bool = False,
) -> FrameSource:
    """Open a stream of PyAV; it is closed with the frames."""
    with ExitStack() as stack:
        file = stack.enter_context(open_it())
        rate = fps or _rate(file)
        frames = _decode(file, stack.pop_all())
        return FrameSource(name, frames, rate, _length(file), ahead, fps is not None and not keeps_times, file)


def _decode(file: VideoFile, stack: ExitStack) -> Generator[Shown, None, None]:
    from av.video.reformatter import VideoReformatter

    reformatter = VideoReformatter()
    unit = Fraction(file.stream.time_base)
    with stack:
        for frame in iterate_frames(file):
            time = frame.pts if frame.pts is not None else frame.dts
            yield to_rgb(frame, reformatter), None if time is None else float(time * unit)


def _open_by_torchcodec(path: Path, decoder: str, fps: float | None) -> FrameSource:
    with open_video(path) as header:
        file = VideoFile(header.path, None, None)
        frames = frames_by_torchcodec(file, header.stream.index, "cuda" if decoder == "nvdec" else "cpu")
        return FrameSource(path.stem, frames, fps or _rate(header), _length(header), FILE_AHEAD, fps is not None, file)


def take_frames(values: Iterator[Any]) -> Generator[Shown, None, None]:
    """Frames of arrays, tensors and paths."""
    for number, value in enumerate(values):
        yield to_frame(value, number), None


def _rate(file: VideoFile) -> float | None:
    rate = file.stream.average_rate or file.stream.guessed_rate
    return float(rate) if rate else None


def _length(file: VideoFile) -> int | None:
    """Frames as the header counts them, or as they follow from its duration."""
    stream, container = file.stream, file.container
    if stream.frames:
        return int(stream.frames)
    seconds = (stream.duration or 0) * Fraction(stream.time_base or 0) or Fraction(container.duration or 0, 1_000_000)
    return round(seconds * Fraction(stream.average_rate or 0)) or None


def refuse_decoder(decoder: str, kind: str) -> None:
    """Raise ValueError where a decoder is named that has nothing to decode."""
    if decoder != "pyav":
        raise ValueError(f"decoder is {decoder}, which reads video files alone, but the source is {kind}; leave it out")


def to_frame(value: Any, number: int = 0) -> Tensor:
    """A frame as the package holds it, in memory of its own.

    Args:
        value: an array (height, width, 3) or a tensor (3, height, width), uint8 or floats from 0 to 1; or the path of
            a picture.
        number: what errors call the frame.

    Shapes:
        uint8 (3, height, width)

    Raises:
        ValueError: for other shapes, types and ranges.
    """
    if isinstance(value, str | Path):
        return decode_image(value)
    pixels: Tensor | None
    if isinstance(value, Tensor):
        channels, pixels = 0, value.detach()
    elif isinstance(value, np.ndarray):
        # A copy: the caller may use its memory again, and torch takes no arrays that run backwards.
        channels, pixels = 2, torch.from_numpy(np.array(value, order="C")) if value.dtype.kind in "buif" else None
    else:
        raise ValueError(f"frame {number} is a {type(value).__name__}, but it must be an array or a tensor")
    expected = "(3, height, width)" if channels == 0 else "(height, width, 3)"
    if pixels is None or pixels.ndim != 3 or pixels.shape[channels] != 3 or pixels.numel() == 0:
        raise ValueError(
            f"frame {number} is a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}, but it must "
            f"be {expected}: RGB, uint8 or floats from 0 to 1"
        )
    if pixels.is_floating_point():
        low, high = pixels.min().item(), pixels.max().item()
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"frame {number} has values from {low:g} to {high:g}, but floats must be from 0 to 1; divide by 255, "
                "or undo the normalisation"
            )
        pixels = (pixels * 255).round()
    elif pixels.dtype != torch.uint8:
        raise ValueError(f"frame {number} is of {value.dtype}, but it must be uint8, or floats from 0 to 1")
    pixels = pixels.to(torch.uint8)
    return pixels.clone() if channels == 0 else pixels.permute(2, 0, 1).contiguous()
