"""Clips as tubelets: their embedding, made from that of a timm model's patches, and where their steps sit in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn


class TubeletEmbed(PatchEmbed):
    """timm's PatchEmbed for clips: a tubelet, a patch in several frames, becomes a token.

    Attributes:
        tubelet: (frames, height, width) of a tubelet; `patch_size` and `grid_size` are those of a frame, as in images.
    """

    tubelet: tuple[int, int, int]
    proj: nn.Conv3d

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: clips (batch, channels, frames, height, width) -> (batch, steps, rows, columns, dim)."""
        if self.dynamic_img_pad:
            height, width = x.shape[-2:]
            x = F.pad(x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))
        return self.norm(self.proj(x).movedim(1, -1))


def embed_tubelets(embed: Any, frames: int) -> None:
    """Make timm's embedding of patches one of tubelets, in place.

    Each frame of a tubelet gets an equal part of the weight, so that a still image gives what the patches gave.
    """
    flat = embed.proj
    size = (frames, *embed.patch_size)
    proj = nn.Conv3d(
        flat.in_channels,
        flat.out_channels,
        size,
        stride=size,
        bias=flat.bias is not None,
        device=flat.weight.device,
        dtype=flat.weight.dtype,
    )
    proj.weight = nn.Parameter(inflate(flat.weight.detach(), frames), requires_grad=flat.weight.requires_grad)
    proj.bias = flat.bias
    embed.proj = proj.train(flat.training)
    embed.tubelet = size
    embed.__class__ = TubeletEmbed


def inflate(weight: Tensor, frames: int) -> Tensor:
    """Shapes: weight of patches (dim, channels, height, width) -> of tubelets (dim, channels, frames, height, width)"""
    return (weight / frames).unsqueeze(2).repeat(1, 1, frames, 1, 1)


def resample_times(embedding: Tensor, steps: int) -> Tensor:
    """A learned embedding of time, resampled to another number of steps.

    Shapes: (1, trained steps, dim) -> (1, steps, dim)
    """
    if embedding.shape[1] == steps:
        return embedding
    resampled = F.interpolate(embedding.float().transpose(1, 2), size=steps, mode="linear")
    return resampled.transpose(1, 2).to(embedding.dtype)


def check_tubelet(tubelet: Any, num_frames: Any, embed: Any) -> tuple[int, int]:
    """Frames of a tubelet and number of steps, or ValueError for numbers that the model's patches do not fit."""
    if not isinstance(tubelet, Sequence) or len(tubelet) != 3 or not all(_is_count(length) for length in tubelet):
        raise ValueError(
            f"tubelet is {tubelet!r}; it is (frames, height, width) in positive whole numbers, for instance "
            f"{(2, *embed.patch_size)}"
        )
    if tuple(tubelet[1:]) != tuple(embed.patch_size):
        raise ValueError(
            f"tubelet is {tuple(tubelet)} and the model's patches are {embed.patch_size[0]} x {embed.patch_size[1]} "
            f"pixels; give tubelet={(tubelet[0], *embed.patch_size)}, or build the timm model with another patch_size"
        )
    frames = tubelet[0]
    if not _is_count(num_frames) or num_frames % frames:
        raise ValueError(
            f"num_frames is {num_frames!r}; it must be a positive multiple of the tubelet's {frames} frames"
        )
    return frames, num_frames // frames


def check_clips(clips: Tensor, embed: Any) -> None:
    """Raise ValueError where clips are not (batch, channels, frames, height, width), or tubelets do not divide them."""
    frames, channels = embed.tubelet[0], embed.proj.weight.shape[1]
    if clips.ndim != 5 or clips.shape[1] != channels:
        hint = (
            f"; an image is a still clip: images[:, :, None].repeat(1, 1, {frames}, 1, 1)"
            if clips.ndim == 4 and clips.shape[1] == channels
            else "; one clip needs a batch: clip[None]"
            if clips.ndim == 4 and clips.shape[0] == channels
            else "; channels come before frames: give clips.transpose(1, 2)"
            if clips.ndim == 5 and clips.shape[2] == channels
            else ""
        )
        raise ValueError(
            f"clips have shape {tuple(clips.shape)}; they must be (batch, channels, frames, height, width) with "
            f"{channels} channels{hint}"
        )
    count = clips.shape[2]
    if count < frames:
        what = "no frames" if count == 0 else f"{count} frame{'s' if count > 1 else ''}, fewer than one tubelet"
        raise ValueError(f"clips have {what}; give at least {frames} frames, those of a tubelet")
    if count % frames:
        below = count // frames * frames
        raise ValueError(
            f"clips have {count} frames, which tubelets of {frames} frames do not divide; give {below} or "
            f"{below + frames}"
        )


def place_steps(
    seconds: Any, frames: int, batch: int, tubelet: int, positions_per_second: float, start: Any = None
) -> Tensor:
    """Where the steps of clips sit in time: the seconds of their first frame, counted from the clip's first one.

    Args:
        seconds: of each frame, (frames), or (batch, frames) where clips differ.
        start: seconds of the clip's first frame where that is not the first one here.

    Shapes: -> (steps), or (batch, steps) where clips differ; float32, in positions.
    Raises: ValueError where seconds are missing, of another number, not finite or not increasing.
    """
    if seconds is None:
        raise ValueError(
            f"seconds are missing, and positions_per_second is {positions_per_second}: give the seconds of each frame, "
            f"({frames}) or (batch, {frames})"
        )
    compiling = torch.compiler.is_compiling()
    values = torch.as_tensor(seconds)
    if not compiling:
        # Values are looked at, which waits for a device once.
        values = values.detach().to("cpu", torch.float64)
    if tuple(values.shape) not in ((frames,), (batch, frames)):
        raise ValueError(
            f"seconds have shape {tuple(values.shape)} and the clips {batch} x {frames} frames; give the seconds of "
            f"each frame: ({frames}), or ({batch}, {frames}) where clips differ"
        )
    if not compiling:
        _check_seconds(values)
    first = values[..., :1] if start is None else start
    times = (values[..., ::tubelet] - first) * positions_per_second
    if not compiling and times.ndim == 2 and (times == times[:1]).all():
        # Of no clips any times will do.
        times = times[0] if len(times) else times.new_zeros(times.shape[1])
    return times.float()


def _check_seconds(values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"seconds hold {values[~values.isfinite()][0].item()}; they must be finite numbers")
    late = (values.diff(dim=-1) <= 0).nonzero()
    if len(late):
        *sample, frame = late[0].tolist()
        before, after = values[(*sample, frame)].item(), values[(*sample, frame + 1)].item()
        raise ValueError(
            f"seconds do not increase: frame {frame + 1} has {after:g} after {before:g}; give frames in their order, "
            "each with its own time"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
