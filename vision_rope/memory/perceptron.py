"""The perceptron that SAM 2 puts behind tokens: linear layers with a relu between them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn


class Perceptron(nn.Module):
    """Linear layers with a relu between them.

    Args:
        widths: channels that go in, those between the layers, those that come out.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(narrow, wide) for narrow, wide in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., first width) -> (..., last width)"""
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)
