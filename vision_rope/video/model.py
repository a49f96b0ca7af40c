"""What conversion to a video transformer adds to a timm model, beyond what it adds to one of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_rope.convert.joining import join_rotations
from vision_rope.convert.model import PositionedModel, Start
from vision_rope.convert.position import time_length
from vision_rope.relative import RelativeEncoding
from vision_rope.video.space_time import (
    AcrossSteps,
    Masked,
    SpaceTime,
    StepByStep,
    WithinSteps,
)
from vision_rope.video.stream import StreamState, start_stream, take_step
from vision_rope.video.tubelets import check_clips, inflate, place_steps, resample_times


class VideoModel(PositionedModel):
    """A timm model whose tokens carry time, row and column; made by `video_vit`.

    It takes clips (batch, channels, frames, height, width) of any number of frames that its tubelets divide, and of any
    size that its patches divide. A grid is (steps, rows, columns).

    Attributes:
        num_frames: frames of a clip that it was built for.
        space_time: joint or factorised attention.
        causal: tokens look at their own step and earlier ones alone.
        positions_per_second: how far time goes in a second; None where it is counted in steps.
        pos_embed_time: (1, steps, dim), learned, beside the embedding of space; None but for position "learned".
    """

    num_frames: int
    space_time: str
    causal: bool
    positions_per_second: float | None
    pos_embed_time: nn.Parameter | None

    def forward(self, x: Tensor, seconds: Any = None) -> Tensor:
        """Outputs of the classifier.

        Args:
            seconds: of each frame, (frames), or (batch, frames) where clips differ. Needed with positions_per_second;
                not looked at where time is counted in steps.

        Shapes: clips (batch, channels, frames, height, width) -> (batch, classes)
        Raises: ValueError where the clips or their seconds do not fit.
        """
        return self.forward_head(self.forward_features(x, seconds))  # type: ignore[operator]

    def forward_features(self, x: Tensor, seconds: Any = None) -> Tensor:  # type: ignore[override]
        """Shapes: clips (batch, channels, frames, height, width) -> (batch, prefix + steps * rows * columns, dim)

        Raises: as `forward`.
        """
        return self.forward_patches(self.embed_patches(x), seconds=seconds)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Shapes: clips (batch, channels, frames, height, width) -> tubelets (batch, steps, rows, columns, dim)

        Raises: ValueError where the clips are no such tensor, or tubelets do not divide them.
        """
        check_clips(images, self.patch_embed)
        return super().embed_patches(images)

    def forward_patches(  # type: ignore[override]
        self, patches: Tensor, *, kept: Tensor | None = None, seconds: Any = None
    ) -> Tensor:
        """Everything after the embedding of tubelets: positions, blocks and the last norm.

        Args:
            kept: places, in the flattened grid, of the tubelets that are encoded; None encodes all.
            seconds: see `forward`.

        Shapes: patches (batch, steps, rows, columns, dim), kept int64 (batch, visible) -> tokens (batch, prefix +
            steps * rows * columns or visible, dim)
        Raises: ValueError where seconds do not fit, or tubelets are left out of factorised attention.
        """
        return self._run_blocks(*self._place(patches, kept, self._times(patches, seconds)))

    def forward_intermediates(self, x: Tensor, *args: Any, seconds: Any = None, **options: Any) -> Any:
        """Outputs of chosen blocks, with the arguments and return values of timm's method of this name.

        Maps (output_fmt="NCHW") are (batch, dim, steps, rows, columns).
        """
        if options.get("attn_mask") is not None or options.get("is_causal"):
            raise ValueError("attn_mask and is_causal are for images; build the video model with causal=True")
        return super().forward_intermediates((x, seconds), *args, **options)  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay: timm's, learned frequencies and the embedding of time."""
        return super().no_weight_decay() | {"pos_embed_time"}

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """timm's method; a causal model refuses a pooling that sees the first step alone."""
        if global_pool is not None:
            check_pooling(self.causal, global_pool)
        super().reset_classifier(num_classes, global_pool)  # type: ignore[misc]

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """timm's method: resample the absolute embedding for another size of frames; other patches are refused."""
        if patch_size is not None:
            raise ValueError(
                f"patch_size is {patch_size}, and the patches of a model of videos belong to its tubelets of "
                f"{self.patch_embed.tubelet}; build the timm model with that patch_size"
            )
        super().set_input_size(img_size=img_size)  # type: ignore[misc]

    def set_extension(self, method: str, train_size: Sequence[int] | None = None, **knobs: Any) -> None:
        """See `vision_rope.set_extension`; train_size is (steps, rows, columns).

        With positions_per_second the length of time is its last position and one more, in training and now: 8 steps at
        2 positions from one to the next are 15 long.
        """
        if train_size is None and method != "none" and self.positions_per_second is not None:
            raise ValueError(
                "train_size is missing, and with positions_per_second the number of frames does not say how long "
                f"time was in training; give train_size=(t, {self.train_grid[1]}, {self.train_grid[2]}), t the last "
                "position in time and one more"
            )
        super().set_extension(method, train_size, **knobs)

    def inflate_weights(self, state_dict: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """Weights of the image model as those of this one; weights of a video model stay as they are.

        Patches become tubelets, and layers and embeddings of time, which an image model lacks, are what they are right
        after conversion.
        """
        key = f"{prefix}patch_embed.proj.weight"
        if key not in state_dict or state_dict[key].ndim != 4:
            return state_dict
        inflated = dict(state_dict)
        inflated[key] = inflate(state_dict[key], self.patch_embed.tubelet[0])
        for name, own in self.state_dict().items():
            full = prefix + name
            source = full.replace(".attn_time.", ".attn.").replace(".norm_time.", ".norm1.")
            if full in inflated:
                continue
            if ".attn_time.proj." in full or name == "pos_embed_time":
                inflated[full] = torch.zeros_like(own, device=state_dict[key].device)
            elif source in inflated:
                # A copy: loaded with assign=True both layers would be one.
                inflated[full] = inflated[source].clone()
        return inflated

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Weights of an image model are understood too."""
        state_dict.update(self.inflate_weights(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def start_stream(self, *, length: int | None = None, max_steps: int | None = None) -> StreamState:
        """The state of a stream that has seen nothing yet, for `step`; of causal models.

        Args:
            length: how long the stream will be: number of steps, with positions_per_second the last position in time
                and one more. A context extension and the resampling of a learned embedding follow from it and stay
                what they are during the stream; a clip of that length as a whole gives the same. By default that of
                training, where nothing is extended or resampled. A rotary embedding goes on beyond it.
            max_steps: how many steps a step looks at, its own among them, beside prefix tokens; None looks at all, and
                what is kept grows with each step.

        Raises: ValueError for a model that is not causal, or whose encoding adds terms to scores.
        """
        return start_stream(self, length, max_steps)

    def step(self, state: StreamState, frames: Tensor, seconds: Any = None) -> tuple[StreamState, Tensor]:
        """The next step of a stream: its new state and the step's tokens behind the last norm.

        In eval mode, and under no_grad where nothing is trained. Without `max_steps`, tokens of all steps one after the
        other are what `forward_features` gives for the whole clip.

        Args:
            state: of `start_stream` or of a step before; it stays as it is and can be used again.
            frames: those of one tubelet.
            seconds: of each of these frames, needed with positions_per_second: counted from the same moment as in the
                steps before.

        Shapes: frames (batch, channels, frames of a tubelet, height, width), seconds (frames) or (batch, frames) ->
            tokens (batch, rows * columns, dim), in the first step (batch, prefix + rows * columns, dim)
        Raises: ValueError where frames or seconds do not fit the stream, or in training mode.
        """
        return take_step(self, state, frames, seconds)

    def _start(self, x: Any, attn_mask: Tensor | None) -> Start:
        """Clips and their seconds -> what the blocks get."""
        clips, seconds = x
        patches = self.embed_patches(clips)
        tokens, positions = self._place(patches, None, self._times(patches, seconds))
        return Start(tokens, positions, tuple(patches.shape[1:-1]), attn_mask)

    def _times(self, patches: Tensor, seconds: Any) -> Tensor | None:
        """Where the steps sit in time; None where they are counted."""
        if self.positions_per_second is None:
            return None
        tubelet = self.patch_embed.tubelet[0]
        frames = patches.shape[1] * tubelet
        return place_steps(seconds, frames, len(patches), tubelet, self.positions_per_second)

    def _absolute_embedding(self, grid: Sequence[int]) -> Tensor:
        return self._absolute_in_time(grid, self._time_embedding(grid[0]))

    def _absolute_in_time(self, grid: Sequence[int], time: Tensor | None) -> Tensor:
        """The absolute embedding of space at each step, with that of time.

        Shapes: time (1, steps, dim) -> (1, prefix or 0 + steps * rows * columns, dim)
        """
        space = super()._absolute_embedding(grid)
        prefix = space.shape[1] - grid[1] * grid[2]
        patches = space[:, None, prefix:].expand(-1, grid[0], -1, -1)
        if time is not None:
            patches = patches + time[:, :, None]
        return torch.cat((space[:, :prefix], patches.flatten(1, 2)), dim=1)

    def _time_embedding(self, steps: int) -> Tensor | None:
        """The learned embedding of time, resampled to a number of steps: (1, steps, dim)."""
        return None if self.pos_embed_time is None else resample_times(self.pos_embed_time, steps)

    def _positions(
        self, grid: tuple[int, ...], kept: Tensor | None, device: torch.device, times: Tensor | None = None
    ) -> Sequence[Any]:
        if kept is not None and self.space_time == "factorised":
            raise ValueError(
                "factorised attention looks along steps and within them, so that no tubelets can be left out; encode "
                "all of them, or build the model with attention='joint'"
            )
        if times is not None and times.ndim == 2 and self.extension is not None:
            positions = self._positions_by_length(grid, kept, device, times)
        else:
            positions = list(super()._positions(grid, kept, device, times))
        if self.space_time == "joint" and not self.causal:
            return positions
        arranged: dict[int, Any] = {}
        for position in positions:
            if id(position) not in arranged:
                arranged[id(position)] = self._arrange(position, grid, kept, device)
        return [arranged[id(position)] for position in positions]

    def _positions_by_length(
        self, grid: tuple[int, ...], kept: Tensor | None, device: torch.device, times: Tensor
    ) -> list[Any]:
        """Rotations of clips that are differently long in time, and so differently extended."""
        members: dict[int, list[int]] = {}
        for index, sample in enumerate(times):
            members.setdefault(time_length(sample), []).append(index)
        parts: list[Any] = [
            super(VideoModel, self)._positions(grid, None if kept is None else kept[part], device, times[part])
            for part in members.values()
        ]
        return [*join_rotations(parts, list(members.values()))]

    def _arrange(self, position: Any, grid: tuple[int, ...], kept: Tensor | None, device: torch.device) -> Any:
        """Who looks at whom in a block."""
        prefix, places = self.num_prefix_tokens, grid[1] * grid[2]
        if self.space_time == "factorised":
            patches = None if position is None else position.take(slice(prefix, None))
            return SpaceTime(
                AcrossSteps(patches, places, self.causal), WithinSteps(position, prefix, places, self.causal), prefix
            )
        if kept is None and not isinstance(self.position, RelativeEncoding):
            return StepByStep(position, prefix, places)
        return Masked(position, causal_mask(grid, prefix, kept, device))


def causal_mask(grid: Sequence[int], prefix: int, kept: Tensor | None, device: torch.device) -> Tensor:
    """Who may look at whom where a step sees the prefix, earlier steps and itself, and the prefix step 0 alone.

    Shapes: -> bool (batch or 1, 1, prefix + patches, prefix + patches), True where a query may look at a key
    """
    places = torch.arange(grid[0] * grid[1] * grid[2], device=device) if kept is None else kept
    # The prefix stands in time where the first step does, and both see each other.
    step = F.pad(places // (grid[1] * grid[2]), (prefix, 0))
    mask = step[..., :, None] >= step[..., None, :]
    return mask[(None,) * (4 - mask.ndim)] if mask.ndim == 2 else mask[:, None]


def check_pooling(causal: bool, global_pool: str) -> None:
    """Raise ValueError where a causal model would classify by tokens that see the first step alone."""
    if causal and global_pool == "token":
        raise ValueError(
            "causal=True and global_pool='token': prefix tokens see the first step alone, so the class token would be "
            "blind to what follows; build the timm model with global_pool='avg'"
        )
