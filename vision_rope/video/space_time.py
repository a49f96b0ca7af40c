"""Who looks at whom in space and time: causal attention over steps, and attention over time and space by turns.

Tokens lie prefix first, then the patches of one step after the other, all turned by their positions already; what is
here cuts them into the parts that attend to each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.eva import EvaBlock
from torch import Tensor, nn

from vision_rope.convert.attention import Arrangement, OfOneGrid
from vision_rope.convert.blocks import PositionedBlock
from vision_rope.rotation import Rotation

Attend = Callable[..., Tensor]


@dataclass(eq=False)
class SpaceTimeArrangement(Arrangement):
    """Attention in parts of a clip.

    Attributes:
        position: rotation of all tokens, or relative terms; None where positions have no part in attention.
    """

    position: OfOneGrid | None

    @property
    def rotation(self) -> Rotation | None:  # type: ignore[override]
        """The position, where it is a rotation."""
        return self.position if isinstance(self.position, Rotation) else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `Arrangement`."""
        position = self.position
        if position is not None and isinstance(position.attention_scale, Tensor):
            # One number a sample would not fit the parts, whose batch is another.
            q, position = q * position.attention_scale.to(q.dtype), None

        def attend_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            return attend(q, k, v, mask, is_causal, position)

        return self.attend_parts(q, k, v, attend_part)

    @abstractmethod
    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Attention of the parts: attend(q, k, v, mask=None, is_causal=False) is that of one of them."""


@dataclass(eq=False)
class Masked(SpaceTimeArrangement):
    """Joint attention of tokens that may look at whom the mask allows.

    Attributes:
        mask: boolean, True where a query may look at a key.
    """

    mask: Tensor

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `SpaceTimeArrangement`."""
        return attend(q, k, v, mask=self.mask)


@dataclass(eq=False)
class StepByStep(SpaceTimeArrangement):
    """Joint attention, causal in time: a step looks at the prefix, earlier steps and itself, the prefix at step 0.

    Attributes:
        num_prefix, places: prefix tokens, and patches of a step.
    """

    num_prefix: int
    places: int

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `SpaceTimeArrangement`."""
        attended, start = [], 0
        for stop in range(self.num_prefix + self.places, q.shape[-2] + 1, self.places):
            attended.append(attend(q[..., start:stop, :], k[..., :stop, :], v[..., :stop, :]))
            start = stop
        return torch.cat(attended, dim=-2)


@dataclass(eq=False)
class AcrossSteps(SpaceTimeArrangement):
    """Attention over time: patches of the same place look at each other; there is no prefix.

    Attributes:
        places: patches of a step.
        causal: a patch looks at itself and earlier steps alone.
    """

    places: int
    causal: bool

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `SpaceTimeArrangement`."""
        parts = (by_place(x, self.places) for x in (q, k, v))
        return by_step(attend(*parts, is_causal=self.causal), self.places)


@dataclass(eq=False)
class WithinSteps(SpaceTimeArrangement):
    """Attention over space: patches of a step look at each other and at the prefix, of which each step has a copy.

    What the copies see is averaged over the steps; where attention is causal, it is what the first one sees.

    Attributes:
        num_prefix, places: prefix tokens, and patches of a step.
        causal: the prefix sees the first step alone.
    """

    num_prefix: int
    places: int
    causal: bool

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """See `SpaceTimeArrangement`."""
        batch, count = q.shape[0], self.num_prefix
        steps = (q.shape[-2] - count) // self.places
        attended = attend(*(self._cut(x, steps) for x in (q, k, v))).unflatten(0, (batch, steps))
        prefix, patches = attended[..., :count, :], attended[..., count:, :]
        prefix = prefix[:, 0] if self.causal else prefix.mean(1)
        return torch.cat((prefix, patches.transpose(1, 2).flatten(2, 3)), dim=-2)

    def _cut(self, x: Tensor, steps: int) -> Tensor:
        """Shapes: (batch, heads, prefix + steps * places, dim) -> (batch * steps, heads, prefix + places, dim)"""
        prefix, patches = x[..., : self.num_prefix, :], x[..., self.num_prefix :, :]
        copies = prefix.unsqueeze(1).expand(-1, steps, -1, -1, -1)
        patches = patches.unflatten(2, (steps, self.places)).transpose(1, 2)
        return torch.cat((copies, patches), dim=-2).flatten(0, 1)


def by_place(x: Tensor, places: int) -> Tensor:
    """Shapes: (batch, heads, steps * places, dim) -> (batch * places, heads, steps, dim)"""
    return x.unflatten(2, (x.shape[2] // places, places)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def by_step(x: Tensor, places: int) -> Tensor:
    """The inverse of `by_place`."""
    return x.unflatten(0, (x.shape[0] // places, places)).permute(0, 2, 3, 1, 4).flatten(2, 3)


@dataclass(eq=False)
class SpaceTime:
    """What a block of factorised attention gets: the arrangements of its two attentions, and where patches begin."""

    time: Arrangement
    space: Arrangement
    num_prefix: int


class FactorisedBlock(PositionedBlock):
    """timm's Block with attention over time (norm_time, attn_time) before its own, which is over space.

    Source: Bertasius et al., TimeSformer (arXiv 2102.05095), "divided space-time attention"; what the copies of the
        class token see is averaged in front of the attention's output layer, not behind it.
    """

    attn_time: nn.Module
    norm_time: nn.Module

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Any = None) -> Tensor:
        """Shapes: x (batch, prefix + steps * places, dim) -> the same."""
        return super().forward(attend_over_time(self, x, rope), rope=rope.space)


class FactorisedEvaBlock(EvaBlock):
    """timm's EvaBlock with attention over time before its own, as `FactorisedBlock`."""

    def forward(self, x: Tensor, rope: Any = None, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Shapes: x (batch, prefix + steps * places, dim) -> the same."""
        return super().forward(attend_over_time(self, x, rope), rope=rope.space)


def attend_over_time(block: Any, x: Tensor, position: SpaceTime) -> Tensor:
    """The attention over time of a block, and what goes past it.

    Shapes: x (batch, prefix + steps * places, dim) -> the same
    """
    prefix, patches = x[:, : position.num_prefix], x[:, position.num_prefix :]
    attended = block.attn_time(block.norm_time(patches), rope=position.time)
    return torch.cat((prefix, patches + block.drop_path1(attended)), dim=1)
