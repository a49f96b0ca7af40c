"""Object pointers of SAM 2: what the mask decoder knows of an object, as tokens that memory attention reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_there(object_score: Tensor) -> Tensor:
    """Whether the object is in the frame: its score, a logit, is above zero.

    Shapes: (batch) or (batch, 1) -> (batch, 1)
    """
    return object_score.reshape(-1, 1) > 0


def pointer_tokens(pointers: Sequence[Tensor], memory_dim: int) -> Tensor:
    """Pointers cut into tokens as narrow as stored frames, all tokens of a pointer one after another.

    Shapes: pointers (batch, dim) each -> (batch, pointers * dim / memory_dim, memory_dim)
    """
    return torch.stack(list(pointers), dim=1).unflatten(-1, (-1, memory_dim)).flatten(1, 2)
