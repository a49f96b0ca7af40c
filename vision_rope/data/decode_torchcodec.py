"""The decoder of torchcodec, on the CPU or by NVDEC on an NVIDIA GPU, where it is installed."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_rope.data.clips import Clip
from vision_rope.data.decode_video import (
    Choose,
    VideoFile,
    decode_frames,
    list_packets,
    open_video,
    pick_frames,
    to_seconds,
)

# Seconds that a frame's time may differ by from the one asked for.
SAME_TIME = 1e-4


def load_torchcodec(device: str = "cpu") -> Any:
    """The decoder's class.

    Raises:
        ModuleNotFoundError: where torchcodec is not installed, or finds no libraries of FFmpeg.
        ValueError: where there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("decoder nvdec needs an NVIDIA GPU, and there is none here; choose pyav or torchcodec")
    try:
        from torchcodec.decoders import VideoDecoder

        # The libraries of FFmpeg are looked for at the first use; these bytes are no video.
        VideoDecoder(b"0" * 64)
    except ValueError:
        return VideoDecoder
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "libtorchcodec" not in str(error):
            return VideoDecoder
        raise ModuleNotFoundError(
            "decoder torchcodec needs the package torchcodec, of the version that belongs to this torch, and "
            f"shared libraries of FFmpeg ({str(error).splitlines()[0]}); decoder pyav brings its own",
            name="torchcodec",
        ) from error
    return VideoDecoder


def decode_by_torchcodec(path: str | Path, choose: Choose, device: str = "cpu") -> tuple[Clip, str | None]:
    """Decode as `decode_frames` does, by torchcodec; PyAV tells the times, and takes over where a file is damaged.

    Args:
        device: cpu, or cuda for NVDEC, in the process that uses the GPU; the frames come back to the CPU.

    Raises:
        BrokenVideoError: as `decode_frames`.
        ModuleNotFoundError: as `load_torchcodec`.
    """
    with open_video(path) as file:
        times, _ = list_packets(file)
        if not times:
            return decode_frames(path, choose)
        seconds = to_seconds(file, pick_frames(file, times, choose))
        stream = file.stream.index
    build = load_torchcodec(device)
    try:
        decoder = build(str(path), stream_index=stream, device=device, num_ffmpeg_threads=1, seek_mode="exact")
        # A frame is shown from its own time on, which rounding may place after it.
        found = decoder.get_frames_played_at((seconds + SAME_TIME / 2).tolist())
    except (RuntimeError, IndexError, ValueError):
        return decode_frames(path, choose)
    if not torch.allclose(found.pts_seconds.double().cpu(), seconds, rtol=0, atol=SAME_TIME):
        return decode_frames(path, choose)
    return Clip(found.data.cpu(), seconds), None


def decode_by_nvdec(path: str | Path, choose: Choose) -> tuple[Clip, str | None]:
    """Decode as `decode_by_torchcodec` does, by the current NVIDIA GPU."""
    return decode_by_torchcodec(path, choose, device="cuda")


def frames_by_torchcodec(
    file: VideoFile, stream: int, device: str
) -> Generator[tuple[Tensor, float | None], None, None]:
    """Decode a file from its first frame to its last, which damage makes the one before it; damage is noted.

    Args:
        file: whose path is read.
        stream: which of its streams.
        device: cpu, or cuda for NVDEC; the frames stay there.

    Shapes:
        uint8 (3, height, width), with seconds

    Raises: as `load_torchcodec`.
    """
    build = load_torchcodec(device)
    try:
        # Exact: the packets are listed first, which needs no decoding, so that every frame has its own time.
        decoder = build(file.path, stream_index=stream, device=device, num_ffmpeg_threads=1, seek_mode="exact")
        for number in range(len(decoder)):
            frame = decoder.get_frame_at(number)
            yield frame.data, float(frame.pts_seconds)
    except (RuntimeError, ValueError) as error:
        # Behind names of C++ functions and files.
        file.note(str(error).strip().split("\n")[0].split(", ")[-1])
