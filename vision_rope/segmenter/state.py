"""What a segmenter knows of a video: data that does not change, so that an old state stays as good as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from vision_rope.memory.bank import MemoryBank
from vision_rope.segmenter.backbone import Pyramid
from vision_rope.segmenter.framing import Framing
from vision_rope.segmenter.prompts import ObjectPrompt


@dataclass(frozen=True, eq=False)
class TrackedObject:
    """An object as the last frame left it.

    Attributes:
        bank: its memory, with the last frame.
        before: its memory without the last frame, for corrections.
        mask_logits: its mask on the last frame at four times the grid, above 0 inside.
        object_score: logit that it is in the last frame.
        mask_quality: predicted IoU of that mask.
        prompt: what was said of it on the last frame.
        is_fresh: its mask on the last frame was made without its memory.

    Shapes: mask_logits (1, 1, h, w), object_score and mask_quality ()
    """

    bank: MemoryBank = field(repr=False)
    before: MemoryBank = field(repr=False)
    mask_logits: Tensor = field(repr=False)
    object_score: Tensor
    mask_quality: Tensor
    prompt: ObjectPrompt | None = None
    is_fresh: bool = False


@dataclass(frozen=True, eq=False)
class SegmenterState:
    """What is known of a video up to a frame. To undo a step is to go on from the state before it.

    Attributes:
        number: of the last frame; -1 before the first. After `reverse` it has the other sign.
        objects: what is tracked, by the ids that the user gave.
        framing: of the frames; none before the first.
        features: of the last frame.
        num_frames: of the clip, for SAM 2's own ages of pointers; see `vision_rope.memory.selection.select_pointers`.
    """

    number: int = -1
    objects: Mapping[int, TrackedObject] = field(default_factory=dict)
    framing: Framing | None = None
    features: Pyramid | None = field(default=None, repr=False)
    num_frames: int | None = None

    def __post_init__(self) -> None:
        # A copy that cannot be changed: an old state stays as good as it was.
        object.__setattr__(self, "objects", MappingProxyType(dict(self.objects)))

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, one.name) for one in fields(self))
        return SegmenterState, tuple(dict(x) if isinstance(x, MappingProxyType) else x for x in values)

    def remove(self, object_id: int) -> SegmenterState:
        """A state without an object; the others stay as they are.

        Raises: ValueError where there is no such object.
        """
        if object_id not in self.objects:
            raise ValueError(f"object_id is {object_id!r}; the objects are {list(self.objects)}")
        return replace(self, objects={key: value for key, value in self.objects.items() if key != object_id})

    def reverse(self) -> SegmenterState:
        """A state that goes on backwards: the next step takes the frame before the last one.

        Everything that is stored stays and is as far away as before. Correct the last frame before: afterwards what was
        tracked on the way to it lies ahead, and is not read.
        """
        if self.framing is None:
            return self
        objects = {
            key: replace(value, bank=value.bank.reverse(), before=value.before.reverse())
            for key, value in self.objects.items()
        }
        return replace(self, number=-self.number, objects=objects)

    def num_bytes(self) -> int:
        """Bytes of the memory of all objects; what banks share counts once."""
        stored = {x.data_ptr(): x for one in self.objects.values() for x in one.bank.tensors()}
        return sum(x.numel() * x.element_size() for x in stored.values())
