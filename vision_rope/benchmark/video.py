"""`vision-rope benchmark vit --frames N`: a clip through a video ViT-S: joint, factorised, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor

import vision_rope
from vision_rope.benchmark.timing import Case
from vision_rope.benchmark.vit import NAME, PATCH

OURS = "vision_rope"
FRAME_BY_FRAME = "timm plain, a frame a step"
TUBELET = 2
POSITION = "qwen3-vl"
# A clip takes seconds a pass on a CPU, and its backward pass three times as long.
DEFAULT_ROUNDS, DEFAULT_SIZES, DEFAULT_SECTIONS = 3, "224", ("clip", "step")
SECTIONS = {
    "clip": "a clip, forward; the floor is timm's ViT-S on one frame of each step, without time",
    "clip-training": "the same, forward and backward",
    "step": "the last step of a clip: from cached keys and values, and with all steps computed again",
}


def video_cases(
    sections: Sequence[str], sizes: Sequence[int], frames: Sequence[int], batch: int, device: torch.device
) -> list[Callable[[], Case]]:
    """The cases of the chosen sections, as functions, so that each is built when its turn comes."""
    builders: dict[str, Callable[..., Case]] = {
        "clip": _clip_case,
        "clip-training": partial(_clip_case, training=True),
        "step": _step_case,
    }
    return [
        partial(builders[section], size, count, batch, device)
        for section in sections
        for size in sizes
        for count in frames
    ]


def _clip_case(size: int, frames: int, batch: int, device: torch.device, *, training: bool = False) -> Case:
    clips = _draw_clips(size, frames, batch, device)
    models = {
        f"{OURS} joint": _build(frames, size, device, training),
        f"{OURS} factorised": _build(frames, size, device, training, attention="factorised"),
        f"{OURS} causal": _build(frames, size, device, training, causal=True),
        FRAME_BY_FRAME: timm.create_model(NAME, img_size=size).to(device).train(training),
    }
    images = clips[:, :, ::TUBELET].transpose(1, 2).flatten(0, 1)
    runs = {
        name: _run(lambda model=model, x=images if name == FRAME_BY_FRAME else clips: model(x), model, training)  # type: ignore[misc]
        for name, model in models.items()
    }
    if not training:
        runs[f"{OURS} streaming"] = partial(_stream, models[f"{OURS} causal"], clips)
    section = "clip-training" if training else "clip"
    return Case(section, _label(size, frames), "fp32", runs, f"{OURS} joint", FRAME_BY_FRAME, unit=clips.nbytes)


def _step_case(size: int, frames: int, batch: int, device: torch.device) -> Case:
    clips = _draw_clips(size, frames, batch, device)
    runs: dict[str, Callable[[], Any]] = {}
    for attention in ("joint", "factorised"):
        model = _build(frames, size, device, False, attention=attention, causal=True)
        *before, last = clips.split(TUBELET, dim=2)
        state = model.start_stream()
        with torch.no_grad():
            for step in before:
                state, _ = model.step(state, step)
        runs[f"{OURS} {attention}, cached"] = _run(lambda m=model, s=state, x=last: m.step(s, x), model, False)  # type: ignore[misc]
        runs[f"{OURS} {attention}, whole clip"] = _run(lambda m=model: m.forward_features(clips), model, False)  # type: ignore[misc]
    return Case("step", _label(size, frames), "fp32", runs, f"{OURS} joint, cached", unit=clips.nbytes)


def _build(frames: int, size: int, device: torch.device, training: bool, **options: Any) -> Any:
    model: Any = vision_rope.video_vit(
        NAME,
        num_frames=frames,
        tubelet=(TUBELET, PATCH, PATCH),
        position=POSITION,
        img_size=size,
        global_pool="avg",
        **options,
    )
    return model.to(device).train(training)


@torch.no_grad()
def _stream(model: Any, clips: Tensor) -> Tensor:
    state = model.start_stream()
    for step in clips.split(TUBELET, dim=2):
        state, tokens = model.step(state, step)
    return tokens


def _run(run: Callable[[], Any], model: Any, training: bool) -> Callable[[], Any]:
    if training:
        parameters = list(model.parameters())
        return lambda: torch.autograd.grad(run().sum(), parameters, allow_unused=True)
    return torch.no_grad()(run)


def _draw_clips(size: int, frames: int, batch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, frames, size, size, generator=generator).to(device)


def _label(size: int, frames: int) -> str:
    return f"{frames} frames, {size} px"
