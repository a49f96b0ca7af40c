"""Frames into a video file, each at its own time."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vision_rope.data.decode_video import load_pyav
from vision_rope.data.frame_sources import exact_rate
from vision_rope.data.video_sources import NOMINAL_FPS

# H.264 where this FFmpeg has it, else MPEG-4 part 2, which all have; WebM takes neither.
H264_OR_OLDER = ("libx264", "libopenh264", "mpeg4")
ENCODERS = {".mp4": H264_OR_OLDER, ".mov": H264_OR_OLDER, ".mkv": H264_OR_OLDER, ".webm": ("libvpx-vp9",)}
QUALITY = {
    "libx264": {"crf": "20", "preset": "veryfast"},
    "libopenh264": {"b": "8000000"},
    "mpeg4": {"b": "8000000", "qmax": "6"},
    "libvpx-vp9": {"crf": "30", "b": "0", "deadline": "realtime", "cpu-used": "8"},
}
# Units of time in a second, at most: MPEG-4 has 16 bits for it.
MAX_UNITS = 60_000


class VideoWriter:
    """A video file that grows frame by frame; audio is not copied.

    It has its name when it is whole: until `close` the frames are in NAME.partial.SUFFIX beside it, of which a kill
    leaves what players can show in .mkv and .webm alone. Leaving the context closes it, after an error or Ctrl-C too,
    so that what was written can be watched.

    Args:
        path: ends in .mp4, .mov, .mkv or .webm; its folder is made where there is none.
        fps: frames a second, of frames that come without times, and as the header has it; 30 when not given.

    Attributes:
        num_frames: written so far.

    Raises:
        ValueError: for another ending.
        ModuleNotFoundError: where PyAV is not installed; it says how to install it.
    """

    def __init__(self, path: str | Path, fps: float | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix.lower() not in ENCODERS:
            raise ValueError(f"path is {path}, but a video must end in {', '.join(ENCODERS)}")
        load_pyav()
        self.num_frames = 0
        self._rate = exact_rate(fps or NOMINAL_FPS)
        # A whole number of units a frame.
        numerator = self._rate.numerator
        self._unit = Fraction(1, numerator * (MAX_UNITS // numerator) if numerator <= MAX_UNITS else MAX_UNITS)
        self._beside = self.path.with_name(f"{self.path.stem}.partial{self.path.suffix}")
        self._container: Any = None
        self._stream: Any = None
        self._reformatter: Any = None
        self._size: tuple[int, int] = (0, 0)
        self._last = 0
        # Seconds of the source that are taken as the beginning.
        self._start = 0.0

    def write(self, pixels: Tensor, seconds: float | None = None) -> None:
        """Add a frame.

        Args:
            seconds: when it is shown, counted from the first one; evenly after the one before where there is none, and
                where time runs backwards, as it does where live streams were cut.

        Shapes:
            pixels: uint8 (3, height, width), all of one size; the last row or column is doubled where it is odd.
        """
        import av

        if pixels.ndim != 3 or pixels.shape[0] != 3 or pixels.dtype != torch.uint8:
            raise ValueError(f"pixels must be uint8 (3, height, width), got {pixels.dtype} of {tuple(pixels.shape)}")
        size = (pixels.shape[1], pixels.shape[2])
        if self._container is None:
            self._open(size)
        if size != self._size:
            raise ValueError(
                f"{self.path}: frame {self.num_frames} has {size[0]}x{size[1]} pixels (rows x columns), but the first "
                f"one had {self._size[0]}x{self._size[1]}; a video has one size"
            )
        array = _pad_to_even(pixels).permute(1, 2, 0).contiguous().cpu().numpy()
        picture = av.VideoFrame.from_ndarray(array, format="rgb24")
        frame = self._reformatter.reformat(
            picture, format="yuv420p", dst_colorspace=self._colours, dst_color_range="MPEG", threads=1
        )
        frame.pts, frame.time_base = self._place(seconds), self._unit
        self._container.mux(self._stream.encode(frame))
        self.num_frames += 1

    def close(self) -> None:
        """Write what the encoder holds back and give the file its name; without frames there is none."""
        if self._container is None:
            return
        container, self._container = self._container, None
        try:
            container.mux(self._stream.encode(None))
            container.close()
            self._beside.replace(self.path)
        except BaseException:
            container.close()
            self._beside.unlink(missing_ok=True)
            raise

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _colours(self) -> int:
        """How players take colours of that size, where they do not read what the file says: BT.709 or BT.601."""
        return 1 if self._size[0] >= 720 else 5

    def _open(self, size: tuple[int, int]) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self._size = size
        self._reformatter = VideoReformatter()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        names = ENCODERS[self.path.suffix.lower()]
        name = next((name for name in names if name in av.codecs_available), None)
        if name is None:
            raise ValueError(f"path is {self.path}, but this FFmpeg has no {' or '.join(names)}; write an .mp4")
        self._container = av.open(str(self._beside), "w")
        stream = self._container.add_stream(name, rate=self._rate, options=QUALITY[name])
        stream.height, stream.width = (side + side % 2 for side in size)
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = self._unit
        context = stream.codec_context
        context.colorspace, context.color_range = self._colours, 1
        context.color_primaries = context.color_trc = 1 if self._colours == 1 else 6
        self._stream = stream

    def _place(self, seconds: float | None) -> int:
        """When a frame is shown, in units; always later than the one before."""
        step = 1 / self._rate / self._unit
        if self.num_frames == 0:
            self._start = seconds or 0.0
            self._last = 0
        elif seconds is None:
            self._last = max(self._last + 1, round(self.num_frames * step))
        else:
            place = round((Fraction(seconds) - Fraction(self._start)) / self._unit)
            if place <= self._last:
                # Time goes on from here.
                place = self._last + max(1, round(step))
                self._start = seconds - float(place * self._unit)
            self._last = place
        return self._last


def _pad_to_even(pixels: Tensor) -> Tensor:
    """Colours are kept for two by two pixels, so encoders want even sides."""
    if pixels.shape[1] % 2:
        pixels = torch.cat((pixels, pixels[:, -1:]), 1)
    return torch.cat((pixels, pixels[:, :, -1:]), 2) if pixels.shape[2] % 2 else pixels
