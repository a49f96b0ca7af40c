"""Positions (t, h, w) of sequences of text, images and videos, as multimodal models lay them out.

Text has t = h = w and counts on; an image or a video is a grid that begins where the text before it ended. Schemes
differ in how fast time goes and where the next segment begins.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vision_rope.positions import grid_positions
from vision_rope.suggestion import did_you_mean


@dataclass(frozen=True)
class Text:
    """A run of text tokens; image and video markers and timestamps are text, too."""

    num_tokens: int

    def __post_init__(self) -> None:
        # A sequence may begin with an image, or have nothing between two.
        _check_count("Text", "num_tokens", self.num_tokens, smallest=0)


@dataclass(frozen=True)
class Image:
    """Numbers of tokens, not a picture: an image of h x w tokens, as the sequence has them after a merger."""

    h: int
    w: int

    def __post_init__(self) -> None:
        for name in ("h", "w"):
            _check_count("Image", name, getattr(self, name), smallest=1)


@dataclass(frozen=True)
class Video:
    """Numbers of tokens, not a film: a video of t steps of h x w tokens, as the sequence has them after a merger.

    Attributes:
        seconds_per_step: time from one step to the next; a step often holds two frames: 2 / fps.
    """

    t: int
    h: int
    w: int
    seconds_per_step: float | None = None

    def __post_init__(self) -> None:
        for name in ("t", "h", "w"):
            _check_count("Video", name, getattr(self, name), smallest=1)
        seconds = self.seconds_per_step
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds_per_step of Video is {seconds}; it must be a positive number of seconds")


Segment = Text | Image | Video


def place_qwen2_vl(segment: Image | Video, start: float, exact_time: bool) -> tuple[Tensor, float]:
    """A step of a video is one position. What follows begins after the larger of h and w, even before the last frame.

    Source: Wang et al., Qwen2-VL (arXiv 2409.12191), section 2.1; get_rope_index of transformers 5.
    """
    return _place_block(segment, start, interval=None, exact_time=exact_time)


def place_qwen2_5_vl(
    segment: Image | Video, start: float, exact_time: bool, *, tokens_per_second: float = 2.0
) -> tuple[Tensor, float]:
    """Time in absolute seconds: step k sits at k * tokens_per_second * seconds_per_step, cut to a whole number.

    At high frame rates steps therefore share a position. What follows begins after the larger of h and w.

    Args:
        tokens_per_second: positions of a second; 2 in the released models.

    Source: Bai et al., Qwen2.5-VL (arXiv 2502.13923), section 2.1; get_rope_index of transformers 5.
    """
    if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
        raise ValueError(
            f"tokens_per_second is {tokens_per_second}; it must be a positive number, 2 in released models"
        )
    if isinstance(segment, Image):
        return _place_block(segment, start, interval=None, exact_time=exact_time)
    if segment.seconds_per_step is None:
        raise ValueError(
            "seconds_per_step of a Video is missing and scheme 'qwen2.5-vl' needs it: time is in seconds there; give "
            "it (2 / fps where a step holds two frames), or use scheme 'qwen2-vl', which counts steps"
        )
    # The peer's product is one of float32 numbers, and where it is cut depends on their rounding.
    interval = torch.tensor(segment.seconds_per_step, dtype=torch.float32, device="cpu") * tokens_per_second
    return _place_block(segment, start, interval=interval, exact_time=exact_time)


def place_qwen3_vl(segment: Image | Video, start: float, exact_time: bool) -> tuple[Tensor, float]:
    """A frame is an image: time is told by the timestamps that stand between frames as text.

    Source: Qwen3-VL technical report (arXiv 2511.21631); get_rope_index of transformers 5.
    """
    if isinstance(segment, Video) and segment.t > 1:
        raise ValueError(
            f"a Video of t = {segment.t} steps stands in one piece in scheme 'qwen3-vl', which splits videos at their "
            f"timestamps; write each frame as Video(1, {segment.h}, {segment.w}) or Image({segment.h}, {segment.w}), "
            "with the tokens of its timestamp as Text before it"
        )
    return _place_block(segment, start, interval=None, exact_time=exact_time)


def place_videorope(
    segment: Image | Video, start: float, exact_time: bool, *, time_scale: float = 2.0
) -> tuple[Tensor, float]:
    """Frames centred on the diagonal of time: t = start + time_scale * step, h = t + row - (h - 1) // 2, w likewise.

    What follows begins one after the last frame's t.

    Args:
        time_scale: positions of a step; 2 in the paper.

    Source: Wei et al., VideoRoPE (arXiv 2502.05173), "diagonal layout" and "adjustable temporal spacing".
    """
    if not (math.isfinite(time_scale) and time_scale > 0):
        raise ValueError(f"time_scale is {time_scale}; it must be a positive number, 2 in the paper")
    t, h, w = _size(segment)
    steps, rows, columns = grid_positions(t, h, w, device="cpu").unbind(-1)
    time = steps * time_scale + start
    positions = torch.stack((time, rows - (h - 1) // 2 + time, columns - (w - 1) // 2 + time), dim=-1)
    return positions, start + (t - 1) * time_scale + 1


def _place_block(
    segment: Image | Video, start: float, *, interval: Tensor | None, exact_time: bool
) -> tuple[Tensor, float]:
    """A grid that begins at (start, start, start), with time stretched to the interval."""
    t, h, w = _size(segment)
    positions = grid_positions(t, h, w, device="cpu")
    if interval is not None:
        positions[:, 0] *= interval
        if not exact_time:
            positions[:, 0].trunc_()
    length: float = max(h, w)
    if exact_time:
        length = max(length, positions[-1, 0].item() + 1)
    return positions + start, start + length


@dataclass(frozen=True)
class Scheme:
    """A row of SCHEMES.

    Attributes:
        summary: one line for lists of schemes.
        place: (image or video, start, exact_time, **options) -> its positions (tokens, 3), start of the next.
        uses_seconds: time comes from seconds_per_step; elsewhere giving it is an error.
    """

    summary: str
    place: Callable[..., tuple[Tensor, float]]
    uses_seconds: bool = False

    def options(self) -> list[str]:
        """Names of the scheme's own options."""
        parameters = inspect.signature(self.place).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


SCHEMES: dict[str, Scheme] = {
    "qwen2-vl": Scheme("a step of a video is one position", place_qwen2_vl),
    "qwen2.5-vl": Scheme("time in absolute seconds, cut to whole positions", place_qwen2_5_vl, uses_seconds=True),
    "qwen3-vl": Scheme("each frame an image, timestamps as text between frames", place_qwen3_vl),
    "videorope": Scheme("frames centred on the diagonal, time scaled by 2", place_videorope),
}


def multimodal_positions(
    segments: Sequence[Segment],
    scheme: str,
    *,
    exact_time: bool = False,
    tokens_per_second: float | None = None,
    time_scale: float | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions (t, h, w) of a sequence of text, images and videos.

    As they are, the schemes give their peer's numbers exactly: qwen2-vl and qwen2.5-vl count text after a video from
    the video's height or width, so that it can stand before the last frame, and qwen2.5-vl cuts time to whole
    positions, so that frames can fall together. exact_time=True asks for times as they are, with text after the last
    frame; qwen3-vl and videorope keep both promises anyway.

    Args:
        segments: `Text`, `Image` and `Video` in the order of the sequence.
        scheme: a name of `SCHEMES`.
        exact_time: keep fractions of time, and begin what follows a video one after its last frame.
        tokens_per_second: positions of a second, for qwen2.5-vl (2 by default).
        time_scale: positions of a step, for videorope (2 by default).

    Shapes: -> (tokens, 3) float32.
    Raises: ValueError for an unknown scheme, an option that the scheme does not have, seconds where the scheme has no
        use for them, or none where it needs them.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; the schemes are {', '.join(SCHEMES)}{did_you_mean(scheme, SCHEMES)}")
    row = SCHEMES[scheme]
    given = {"tokens_per_second": tokens_per_second, "time_scale": time_scale}
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name not in row.options():
            owners = [other for other in SCHEMES if name in SCHEMES[other].options()]
            raise ValueError(
                f"{name} is {value}, which would have no effect in scheme {scheme!r}; leave it out, or use "
                f"{', '.join(owners)}"
            )
    if not segments:
        raise ValueError("segments is empty; give at least one Text, Image or Video")
    placed = []
    start = 0.0
    for segment in segments:
        if isinstance(segment, Text):
            line = torch.arange(segment.num_tokens, dtype=torch.float32, device="cpu") + start
            positions, start = line[:, None].expand(-1, 3), start + segment.num_tokens
        elif isinstance(segment, Image | Video):
            if isinstance(segment, Video) and segment.seconds_per_step is not None and not row.uses_seconds:
                users = [name for name in SCHEMES if SCHEMES[name].uses_seconds]
                raise ValueError(
                    f"seconds_per_step of {segment} would have no effect in scheme {scheme!r}, which has no clock; "
                    f"leave it out, or use {', '.join(users)}"
                )
            positions, start = row.place(segment, start, exact_time, **options)
        else:
            raise ValueError(f"segments holds {segment!r}; its members are Text, Image and Video")
        placed.append(positions)
    return torch.cat(placed).to(device)


def _size(segment: Image | Video) -> tuple[int, int, int]:
    return (1 if isinstance(segment, Image) else segment.t), segment.h, segment.w


def _check_count(owner: str, name: str, value: int, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} of {owner} is {value!r}; it counts tokens: a whole number of at least {smallest}")
