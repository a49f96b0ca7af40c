"""Memory bank: what is stored of the frames and objects of a video, as data that does not change.

Adding and removing give a new bank that shares its tensors with the old one, and leave the old one as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from vision_rope.memory.attention import Grid
from vision_rope.memory.selection import (
    MemoryPolicy,
    frames_in_reach,
    passes,
    pointers_in_reach,
    select_frames,
    select_pointers,
)

Stamp = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class PreparedKeys:
    """Rotated keys of a stored frame in each layer, the stamp of its memory, and the weights they were made with."""

    layers: tuple[Tensor, ...]
    stamp: Stamp
    weights: Tensor


@dataclass(frozen=True, eq=False)
class StoredFrame:
    """Memory of a frame.

    Attributes:
        number: of the frame, in the order of tracking.
        features: what the memory encoder made of it.
        grid: (rows, columns) of its tokens.
        prompted: whether a user said on it where the object is; such frames stay until they are removed.
        distractor: whether its caller flagged it as one that tells the object from something like it.
        object_score: logit that the object is there; a gate needs it.
        mask_quality: predicted IoU of its mask; a gate may need it.
        keys: prepared keys, where there are some.

    Shapes: features (batch, rows * columns, memory_dim), scores (batch) or (batch, 1)
    """

    number: int
    features: Tensor = field(repr=False)
    grid: Grid
    prompted: bool = False
    distractor: bool = False
    object_score: Tensor | None = field(default=None, repr=False)
    mask_quality: Tensor | None = field(default=None, repr=False)
    keys: PreparedKeys | None = field(default=None, repr=False)

    def split(self) -> list[StoredFrame]:
        """The memory of each object of a batch, without prepared keys."""
        scores, qualities = (
            [None] * len(self.features) if x is None else x.reshape(-1).split(1)
            for x in (self.object_score, self.mask_quality)
        )
        return [
            replace(self, features=features, object_score=score, mask_quality=quality, keys=None)
            for features, score, quality in zip(self.features.split(1), scores, qualities, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class StoredPointer:
    """Object pointer of a frame.

    Shapes: pointer (batch, dim)
    """

    number: int
    pointer: Tensor = field(repr=False)
    prompted: bool = False

    def split(self) -> list[StoredPointer]:
        """The pointer of each object of a batch."""
        return [replace(self, pointer=pointer) for pointer in self.pointer.split(1)]


@dataclass(frozen=True, eq=False)
class MemoryBank:
    """Stored frames and object pointers in two rings of their own: what no later frame can read is dropped.

    Prompted ones stay. Of the others there are as many as the policy reads, however long the video; they are dropped in
    the order of tracking, so that a bank that tracked far ahead has forgotten what lies before an early correction.

    Args:
        policy: what is kept and read.

    Attributes: frames, pointers: in the order of their numbers.
    """

    policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    frames: tuple[StoredFrame, ...] = ()
    pointers: tuple[StoredPointer, ...] = ()

    def add_frame(self, frame: StoredFrame) -> MemoryBank:
        """A bank with this frame, in the place of one of the same number if there is one.

        A tracked frame drops tracked ones of later numbers, which were made from another past than this one.

        Raises: ValueError where the frame does not fit its grid or the batch of those stored, or lacks a score that the
            policy's gate asks for.
        """
        rows, columns = frame.grid
        if frame.features.ndim != 3 or frame.features.shape[1] != rows * columns:
            raise ValueError(
                f"features has shape {tuple(frame.features.shape)}; a frame of the grid {frame.grid} has (batch, "
                f"{rows * columns}, channels)"
            )
        if frame.distractor and (frame.prompted or not self.policy.num_distractors):
            raise ValueError(
                f"distractor is set for frame {frame.number}, and would have no effect: prompted frames stay anyway, "
                f"and others need a policy with num_distractors of at least 1 (here {self.policy.num_distractors})"
            )
        _check_batch("features", frame.features, [stored.features for stored in self.frames])
        self._passes(frame)
        frames = _insert(self.frames, frame)
        tracked = [stored for stored in frames if not stored.prompted]
        kept = frames_in_reach(
            frame.number,
            _numbers(tracked),
            self.policy,
            failed=_numbers(stored for stored in tracked if not self._passes(stored)),
            distractors=_numbers(stored for stored in tracked if stored.distractor),
        )
        return replace(self, frames=_drop(frames, frame, kept))

    def add_pointer(self, pointer: StoredPointer) -> MemoryBank:
        """A bank with this pointer, in the place of one of the same number if there is one.

        Raises: ValueError where the pointer has another shape than (batch, dim), or another batch than those stored.
        """
        if pointer.pointer.ndim != 2:
            raise ValueError(
                f"pointer has shape {tuple(pointer.pointer.shape)}; a pointer of each object is (batch, dim)"
            )
        _check_batch("pointer", pointer.pointer, [stored.pointer for stored in self.pointers])
        pointers = _insert(self.pointers, pointer)
        tracked = _numbers(stored for stored in pointers if not stored.prompted)
        kept = pointers_in_reach(pointer.number, tracked, self.policy)
        return replace(self, pointers=_drop(pointers, pointer, kept))

    def remove(self, number: int) -> MemoryBank:
        """A bank without what is stored of the frame of this number.

        Raises: ValueError where nothing is stored of it.
        """
        frames = tuple(stored for stored in self.frames if stored.number != number)
        pointers = tuple(stored for stored in self.pointers if stored.number != number)
        if (len(frames), len(pointers)) == (len(self.frames), len(self.pointers)):
            stored = sorted({*_numbers(self.frames), *_numbers(self.pointers)})
            raise ValueError(f"frame {number} is not in the bank, which has {stored}")
        return replace(self, frames=frames, pointers=pointers)

    def reverse(self) -> MemoryBank:
        """A bank for tracking backwards: what was stored last is read as the most recent by frames before it."""
        frames = tuple(replace(stored, number=-stored.number) for stored in self.frames[::-1])
        pointers = tuple(replace(stored, number=-stored.number) for stored in self.pointers[::-1])
        return replace(self, frames=frames, pointers=pointers)

    def select_frames(self, number: int, *, num_ages: int = 7) -> list[tuple[StoredFrame, int]]:
        """Stored frames that a frame reads, each with the row of its age."""
        tracked = [stored for stored in self.frames if not stored.prompted]
        selected = select_frames(
            number,
            _numbers(stored for stored in self.frames if stored.prompted),
            _numbers(tracked),
            self.policy,
            failed=_numbers(stored for stored in tracked if not self._passes(stored)),
            distractors=_numbers(stored for stored in tracked if stored.distractor),
            num_ages=num_ages,
        )
        by_number = {stored.number: stored for stored in self.frames}
        return [(by_number[chosen], row) for chosen, row in selected]

    def select_pointers(self, number: int, *, num_frames: int | None = None) -> list[tuple[StoredPointer, float]]:
        """Object pointers that a frame reads, each with its age; num_frames as in `selection.select_pointers`."""
        selected = select_pointers(
            number,
            _numbers(stored for stored in self.pointers if stored.prompted),
            _numbers(stored for stored in self.pointers if not stored.prompted),
            self.policy,
            num_frames=num_frames,
        )
        by_number = {stored.number: stored for stored in self.pointers}
        return [(by_number[chosen], age) for chosen, age in selected]

    @property
    def layout(self) -> tuple[object, ...]:
        """What banks must have in common to be joined: the same frames and pointers, stored alike."""
        frames = tuple(
            (one.number, one.grid, one.prompted, one.distractor, one.features.dtype, one.features.shape[2:])
            for one in self.frames
        )
        scored = tuple((one.object_score is None, one.mask_quality is None) for one in self.frames)
        return self.policy, frames, scored, tuple((one.number, one.prompted) for one in self.pointers)

    def tensors(self) -> list[Tensor]:
        """Everything that is stored."""
        tensors = [pointer.pointer for pointer in self.pointers]
        for frame in self.frames:
            keys = () if frame.keys is None else frame.keys.layers
            scores = (score for score in (frame.object_score, frame.mask_quality) if score is not None)
            tensors += [frame.features, *scores, *keys]
        return tensors

    def num_bytes(self) -> int:
        """Bytes of everything that is stored."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    def _passes(self, frame: StoredFrame) -> bool:
        if self.policy.gate is None or frame.prompted:
            return True
        # Of several objects in a batch the worst one counts.
        scores = (None if x is None else float(x.detach().min()) for x in (frame.object_score, frame.mask_quality))
        return passes(self.policy.gate, *scores)


def join_banks(banks: Sequence[MemoryBank]) -> MemoryBank:
    """The banks of several objects as the bank of a batch of them, without prepared keys.

    Raises: ValueError where their layouts differ.
    """
    first = banks[0]
    if len(banks) == 1:
        return first
    if any(bank.layout != first.layout for bank in banks):
        raise ValueError("banks have stored different frames or pointers; only those of one layout can be joined")
    frames = tuple(
        replace(
            same[0],
            features=torch.cat([one.features for one in same]),
            object_score=_join_scores([one.object_score for one in same]),
            mask_quality=_join_scores([one.mask_quality for one in same]),
            keys=None,
        )
        for same in zip(*(bank.frames for bank in banks), strict=True)
    )
    pointers = tuple(
        replace(same[0], pointer=torch.cat([one.pointer for one in same]))
        for same in zip(*(bank.pointers for bank in banks), strict=True)
    )
    return replace(first, frames=frames, pointers=pointers)


def _join_scores(scores: Sequence[Tensor | None]) -> Tensor | None:
    present = [score.reshape(-1) for score in scores if score is not None]
    return torch.cat(present) if present else None


Stored = TypeVar("Stored", bound=StoredFrame | StoredPointer)


def _numbers(stored: Iterable[StoredFrame] | Iterable[StoredPointer]) -> list[int]:
    return [item.number for item in stored]


def _insert(stored: tuple[Stored, ...], new: Stored) -> tuple[Stored, ...]:
    others = (item for item in stored if item.number != new.number)
    return tuple(sorted((*others, new), key=lambda item: item.number))


def _drop(stored: tuple[Stored, ...], new: Stored, kept: set[int]) -> tuple[Stored, ...]:
    """Without what is out of reach, and what a newly tracked frame makes stale."""
    return tuple(
        item for item in stored if item.prompted or item.number in kept or (new.prompted and item.number > new.number)
    )


def _check_batch(name: str, new: Tensor, stored: list[Tensor]) -> None:
    if stored and len(new) != len(stored[0]):
        raise ValueError(
            f"{name} has a batch of {len(new)} and the bank holds {len(stored[0])}; objects of one bank come and go "
            "together: give each object a bank of its own otherwise"
        )
