"""The decoder of torchcodec, on the CPU or by NVDEC on an NVIDIA GPU, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vision_rope.data.clips import Clip
from vision_rope.data.decode_video import Choose, decode_frames, list_packets, open_video, pick_frames, to_seconds

# Seconds that a frame's time may differ by from the one asked for.
SAME_TIME = 1e-4


def load_torchcodec(device: str = "cpu") -> Any:
    """The decoder's class.

    Raises:
        ModuleNotFoundError: where torchcodec is not installed, or finds no libraries of FFmpeg.
        ValueError: where there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("video.decoder is nvdec, but there is no NVIDIA GPU here; choose pyav or torchcodec")
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
            "video.decoder torchcodec needs the package torchcodec, of the version that belongs to this torch, and "
            f"shared libraries of FFmpeg ({str(error).splitlines()[0]}); video.decoder pyav brings its own",
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
