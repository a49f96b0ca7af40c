"""The table of position encodings that RoPE is compared with, and how a model gets one by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vision_rope.relative_encodings import T5, ALiBi, DeBERTa, Shaw, TransformerXL
from vision_rope.sinusoidal import Sinusoidal
from vision_rope.suggestion import did_you_mean

# What an encoding asks the model for, and no user gives.
FROM_THE_MODEL = ("axes", "size", "embed_dim", "num_heads", "head_dim", "depth")


@dataclass(frozen=True)
class Encoding:
    """A row of the table.

    Attributes:
        summary: what it is, in a line.
        unseen_sizes: what it does on grids it was not trained on, and why.
        build: makes its module; it takes what it needs of FROM_THE_MODEL, all else are options. None where no module
            is needed.
    """

    summary: str
    unseen_sizes: str
    build: Callable[..., nn.Module] | None = None

    def options(self) -> list[str]:
        """Names of its options."""
        parameters = [] if self.build is None else list(inspect.signature(self.build).parameters)
        return [name for name in parameters if name not in FROM_THE_MODEL]


ENCODINGS: dict[str, Encoding] = {
    "none": Encoding(
        "no position at all: the model sees a bag of patches",
        "nothing to adapt",
    ),
    "learned": Encoding(
        "a learned vector a patch (the backbone's own)",
        "not defined there, so it is resampled: bicubic interpolation between the trained vectors",
    ),
    "sinusoidal": Encoding(
        "fixed sines and cosines of row and column, added to patch embeddings",
        "defined for any position; positions beyond the trained grid are new to the model",
        Sinusoidal,
    ),
    "shaw": Encoding(
        "a learned vector an offset, added to keys and values",
        "longer offsets share the vector of the longest one (clipping)",
        Shaw,
    ),
    "transformer-xl": Encoding(
        "projected sinusoids of the offset as further keys, with learned queries for content and position",
        "sinusoids are defined for any offset; those beyond the trained ones are new to the model",
        TransformerXL,
    ),
    "t5": Encoding(
        "a learned bias a head and bucket of offsets, shared by the layers",
        "longer offsets share the last bucket",
        T5,
    ),
    "deberta": Encoding(
        "learned embeddings of the offset that queries and keys meet in two terms of their own",
        "longer offsets share the embedding of the longest one (clipping)",
        DeBERTa,
    ),
    "alibi": Encoding(
        "scores fall with distance at a fixed slope a head",
        "distance is defined between any two patches, and its slope stays",
        ALiBi,
    ),
}


def build_encoding(name: str, options: dict[str, Any], **model: Any) -> nn.Module | None:
    """The module of a row of ENCODINGS; None for a row that needs none.

    Args:
        options: of the encoding, see its class.
        model: all of FROM_THE_MODEL.

    Raises: ValueError for an unknown option, with the nearest one, and for wrong values.
    """
    row = ENCODINGS[name]
    known = row.options()
    for option in options:
        if option not in known:
            raise ValueError(
                f"position {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}"
                f"{did_you_mean(option, known)}"
            )
    if row.build is None:
        return None
    wanted = inspect.signature(row.build).parameters
    return row.build(**{key: value for key, value in model.items() if key in wanted}, **options)
