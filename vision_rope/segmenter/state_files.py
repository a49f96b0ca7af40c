"""States of a segmenter as files: what is known of a video, to go on later or elsewhere."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_rope.memory.bank import MemoryBank, StoredFrame, StoredPointer
from vision_rope.memory.selection import Gate, MemoryPolicy
from vision_rope.segmenter.backbone import Pyramid
from vision_rope.segmenter.framing import Framing
from vision_rope.segmenter.prompts import ObjectPrompt
from vision_rope.segmenter.state import SegmenterState, TrackedObject

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Framing,
        Gate,
        MemoryBank,
        MemoryPolicy,
        ObjectPrompt,
        SegmenterState,
        StoredFrame,
        StoredPointer,
        TrackedObject,
    )
}
FORMAT = "vision_rope segmenter state 1"


def save_state(state: SegmenterState, path: str | Path) -> None:
    """Write a state to a file, whole or not at all. Prepared keys, which follow from the weights, are left out."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        torch.save({"format": FORMAT, "state": _plain(state)}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_state(path: str | Path, device: str | torch.device = "cpu") -> SegmenterState:
    """Read a state that `save_state` wrote; go on with the weights it was made with.

    Raises: ValueError for a file that holds something else, or is damaged; FileNotFoundError.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    try:
        # Without weights_only a file could run code.
        stored = torch.load(path, map_location=device, weights_only=True)
        if stored["format"] != FORMAT:
            raise ValueError(f"its format is {stored['format']!r}")
        state = _rebuild(stored["state"])
        if not isinstance(state, SegmenterState):
            raise ValueError(f"it holds a {type(state).__name__}")
        return state
    except pickle.UnpicklingError as error:
        # torch's own words advise to load it all the same.
        raise ValueError(
            f"{path} is no state of a segmenter, which save_state writes: it is damaged, or holds objects"
        ) from error
    except Exception as error:  # what a damaged file raises depends on the byte
        raise ValueError(f"{path} is no state of a segmenter, which save_state writes: {error}") from error


def _plain(value: Any) -> Any:
    """Data of classes as dictionaries, tensors as they are, each only as large as what it shows."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Pyramid):
        return {"kind": "Pyramid", "levels": [_plain(level) for level in value]}
    if is_dataclass(value):
        kept = {field.name: getattr(value, field.name) for field in fields(value) if field.name != "keys"}
        return {"kind": type(value).__name__, **{name: _plain(part) for name, part in kept.items()}}
    if isinstance(value, Mapping):
        return {"kind": "dict", "items": [(key, _plain(part)) for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return tuple(_plain(part) for part in value)
    return value


def _rebuild(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_rebuild(part) for part in value)
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind == "dict":
        return {key: _rebuild(part) for key, part in value["items"]}
    if kind == "Pyramid":
        return Pyramid(*(_rebuild(level) for level in value["levels"]))
    return KINDS[kind](**{name: _rebuild(part) for name, part in value.items() if name != "kind"})
