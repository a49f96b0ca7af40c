"""Streams: a causal video model that takes a clip a tubelet at a time, with the keys and values of earlier steps kept.

What a step costs is its own projections and its attention to what is kept; its tokens are those that the whole clip
would give. The state is an argument: a step returns a new one and leaves the old as it was, so that a stream can branch
and go back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vision_rope.convert.position import fit_grid
from vision_rope.extension import Extension
from vision_rope.positions import grid_positions
from vision_rope.relative import RelativeEncoding
from vision_rope.rope import Rope
from vision_rope.sinusoidal import Sinusoidal
from vision_rope.video.space_time import Attend, SpaceTime, SpaceTimeArrangement, by_place, by_step
from vision_rope.video.tubelets import place_steps

Kept = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class StreamState:
    """What a stream has seen so far.

    Attributes:
        length: how long time is taken to be, in the whole stream.
        max_steps: how many steps a step looks at, its own among them; None looks at all.
        steps: number of steps so far.
        shape: (batch, rows, columns) of the steps; None before the first one.
        extension: the context extension of the rotary embedding, chosen at the first step.
        first, last: seconds of the first and of the last frame, (1) or (batch, 1); None where time is counted in steps.
        layers: of each block the turned keys and the values of each of its attentions, (batch, heads, tokens, head_dim)
            or, over time, (batch * rows * columns, heads, steps, head_dim).
    """

    length: int
    max_steps: int | None
    steps: int = 0
    shape: tuple[int, int, int] | None = None
    extension: Extension | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    layers: tuple[tuple[Kept, ...], ...] = ()

    def __repr__(self) -> str:
        # Without the tensors, which fill pages.
        facts = ("steps", "shape", "length", "max_steps")
        return f"StreamState({', '.join(f'{name}={getattr(self, name)}' for name in facts)})"


@dataclass(eq=False)
class Appended(SpaceTimeArrangement):
    """The tokens of a step look at what is kept, to which their own keys and values are appended, and at each other.

    Attributes:
        kept: keys and values of earlier tokens, and with those of this step after attention.
    """

    kept: Kept | None

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `SpaceTimeArrangement`."""
        earlier = [(), ()] if self.kept is None else [(part,) for part in self.kept]
        # Also where nothing is kept: keys and values are views of the projection, which would stay with them.
        keys, values = (torch.cat((*old, new), dim=-2) for old, new in zip(earlier, (k, v), strict=True))
        self.kept = (keys, values)
        return attend(q, keys, values)


@dataclass(eq=False)
class AppendedInPlace(Appended):
    """The patches of a step look at those of the same place in earlier steps, and at themselves.

    Attributes:
        places: patches of a step.
    """

    places: int

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `SpaceTimeArrangement`."""
        q, k, v = (by_place(x, self.places) for x in (q, k, v))
        return by_step(super().attend_parts(q, k, v, attend), self.places)


def start_stream(model: Any, length: int | None, max_steps: int | None) -> StreamState:
    """See `VideoModel.start_stream`."""
    if not model.causal:
        raise ValueError(
            "causal is False: earlier steps would have to look at those that come after; build the video model with "
            "causal=True"
        )
    if isinstance(model.position, RelativeEncoding):
        raise ValueError(
            f"position {model.position_name!r} adds terms for pairs of tokens to the scores, which a stream does not "
            "keep; build the video model with a rotary encoding"
        )
    for name, value in (("length", length), ("max_steps", max_steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; it must be a positive whole number, or None")
    if length is None:
        # With seconds nothing but the extension asks for it, and grows nothing at its own trained length.
        trained = model.train_grid if model.extension is None else model.extension[1]
        length = (model.train_grid if model.positions_per_second is None else trained)[0]
    return StreamState(length, max_steps)


def take_step(model: Any, state: StreamState, frames: Tensor, seconds: Any) -> tuple[StreamState, Tensor]:
    """See `VideoModel.step`."""
    patches = _embed(model, state, frames)
    batch, _, rows, columns, _ = patches.shape
    begun = replace(state, shape=(batch, rows, columns))
    if state.steps == 0:
        begun = replace(begun, extension=_extension(model, (state.length, rows, columns)))
    times, begun = _place(model, begun, batch, seconds)
    x = _add_absolute(model, patches, begun)
    arranged = _arrange(model, begun, times, x.device)
    x = model.norm_pre(x if state.steps == 0 else x[:, model.num_prefix_tokens :])
    for block, arrangement in zip(model.blocks, arranged, strict=True):
        x = block(x, rope=arrangement)
    layers = tuple(_keep(model, begun, arrangement) for arrangement in arranged)
    return replace(begun, steps=state.steps + 1, layers=layers), model.norm(x)


def _embed(model: Any, state: StreamState, frames: Tensor) -> Tensor:
    """The tubelets of a step, (batch, 1, rows, columns, dim), once all is known to fit the stream."""
    if not isinstance(state, StreamState):
        raise ValueError(f"state is a {type(state).__name__}; start with state = video.start_stream()")
    if model.training:
        raise ValueError(
            "the model is in training mode, in which dropout and moved positions would differ from step to step; call "
            "video.eval() first"
        )
    patches = model.embed_patches(frames)
    tubelet = model.patch_embed.tubelet[0]
    if patches.shape[1] != 1:
        raise ValueError(f"frames has {frames.shape[2]} frames; a step takes those of one tubelet, {tubelet}")
    shape = (len(patches), *patches.shape[2:4])
    if state.shape not in (None, shape):
        raise ValueError(
            f"frames are {shape[0]} clips of {shape[1]} x {shape[2]} patches and the stream began with "
            f"{state.shape[0]} of {state.shape[1]} x {state.shape[2]}; resize them, or start another stream"
        )
    attentions = 1 if model.space_time == "joint" else 2
    if state.layers and [len(layer) for layer in state.layers] != [attentions] * len(model.blocks):
        raise ValueError("state is of another model; start a stream of this one")
    if model.pos_embed_time is not None and state.steps >= state.length:
        raise ValueError(
            f"the stream was started with length {state.length} and this is step {state.steps + 1}, for which the "
            "learned embedding of time has no vector; give start_stream the length of the whole stream in steps"
        )
    return patches


def _extension(model: Any, grid: tuple[int, int, int]) -> Extension | None:
    choice = model._extension_choice()
    if choice is None:
        return None
    method, train_size, knobs = choice
    return model.position.extension_for(
        method, train_size=train_size, size=fit_grid(grid, model.position.axes), **knobs
    )


def _place(model: Any, state: StreamState, batch: int, seconds: Any) -> tuple[Tensor, StreamState]:
    """Where the step sits in time, (1) or (batch, 1), and the state with its seconds."""
    if model.positions_per_second is None:
        return torch.tensor([float(state.steps)]), state
    tubelet = model.patch_embed.tubelet[0]
    times = place_steps(seconds, tubelet, batch, tubelet, model.positions_per_second, start=state.first)
    values = torch.as_tensor(seconds).detach().to("cpu", torch.float64)
    first, last = values[..., :1], values[..., -1:]
    if state.last is not None and not (first > state.last).all():
        raise ValueError(
            f"seconds begin at {first.min().item():g} and the step before ended at {state.last.max().item():g}; a "
            "stream goes forward in time"
        )
    return times, replace(state, first=first if state.first is None else state.first, last=last)


def _add_absolute(model: Any, patches: Tensor, state: StreamState) -> Tensor:
    """Patches of a step -> tokens with prefix, and what is added to them because of their place."""
    grid = patches.shape[1:4]
    if isinstance(model.position, Sinusoidal):
        positions = grid_positions(*grid, device=patches.device)
        positions[:, 0] += state.steps
        patches = patches + model.position.at(positions).to(patches.dtype).unflatten(0, grid)
    embedding = None
    if model.pos_embed is not None:
        time = model._time_embedding(state.length)
        embedding = model._absolute_in_time(grid, None if time is None else time[:, state.steps : state.steps + 1])
    return model._join_prefix(patches.flatten(1, 3), embedding)


def _arrange(model: Any, state: StreamState, times: Tensor, device: torch.device) -> list[Any]:
    """What each block gets: the positions of the step, and what is kept of earlier ones."""
    assert state.shape is not None
    prefix = model.num_prefix_tokens if state.steps == 0 else 0
    _, rows, columns = state.shape
    encoding = model._encoding_in_attention()
    positions: list[Any] = [None] * len(model.blocks)
    if isinstance(encoding, Rope):
        positions = encoding.grid_rotations(
            *fit_grid((1, rows, columns), encoding.axes),
            num_prefix_tokens=prefix,
            times=times if encoding.axes == 3 else None,
            extension=state.extension,
            device=device,
        )
    kept: list[Any] = [*state.layers] or [(None, None)] * len(model.blocks)
    if model.space_time == "joint":
        return [Appended(position, own[0]) for position, own in zip(positions, kept, strict=False)]
    arranged = []
    for position, (space, time) in zip(positions, kept, strict=False):
        patches = None if position is None else position.take(slice(prefix, None))
        arranged.append(SpaceTime(AppendedInPlace(patches, time, rows * columns), Appended(position, space), prefix))
    return arranged


def _keep(model: Any, state: StreamState, arrangement: Any) -> tuple[Kept, ...]:
    """What later steps may look at."""
    assert state.shape is not None
    prefix, places = model.num_prefix_tokens, math.prod(state.shape[1:])
    if model.space_time == "joint":
        return (_window(arrangement.kept, state.max_steps, prefix, places),)
    # Of space later steps see the prefix alone; a copy, since a view would hold all the rest.
    if state.steps == 0:
        space = tuple(part[..., :prefix, :].clone() for part in arrangement.space.kept)
    else:
        space = tuple(part[..., :prefix, :] for part in arrangement.space.kept)
    return space, _window(arrangement.time.kept, state.max_steps, 0, 1)


def _window(kept: Kept, max_steps: int | None, prefix: int, places: int) -> Kept:
    """Keys and values without those of steps that the next one does not look at.

    Shapes: (..., prefix + steps * places, head_dim)
    """
    excess = 0 if max_steps is None else kept[0].shape[-2] - prefix - (max_steps - 1) * places
    if excess <= 0:
        return kept
    keys, values = (torch.cat((part[..., :prefix, :], part[..., prefix + excess :, :]), dim=-2) for part in kept)
    return keys, values
