"""Trackers on videos whose objects are marked: the first mask of each object is given, the others are judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vision_rope.data.davis import VideoSequence, write_ids
from vision_rope.segmenter.framing import FrameSizeError, choose_cells, resize
from vision_rope.segmenter.prompts import MaskPrompt
from vision_rope.tracking_output import merge_masks
from vision_rope.vos_metrics import ObjectScores, check_ids, choose_judged


class Tracker(Protocol):
    """What follows objects frame by frame: a segmenter, or a floor."""

    def start(self) -> Any:
        """The state before the first frame."""
        ...

    def step(
        self, state: Any, frame: Tensor, prompts: Mapping[int, MaskPrompt] | None = None
    ) -> tuple[Any, dict[int, Tensor]]:
        """The state after a frame, and logits (height, width) of each object's pixels, above 0 inside."""
        ...


@dataclass(frozen=True)
class Followed:
    """What a tracker says of a frame.

    Attributes:
        index: of the frame.
        ids: uint8 (height, width), on the CPU.
        seconds: that the step took; None where there was nothing to follow, or objects were shown.
    """

    index: int
    ids: Tensor
    seconds: float | None


@dataclass
class SequenceScores:
    """How well the objects of a sequence were followed.

    Attributes:
        objects: by id; those of which no frame can be judged are left out.
        frames: number of frames that were timed, which are those after the first mask.
        seconds: that they took.
    """

    objects: dict[int, ObjectScores] = field(default_factory=dict)
    frames: int = 0
    seconds: float = 0.0


class ResizedTracker:
    """A tracker that looks at frames of one size, whatever their own is: the aspect ratio is not kept.

    Args:
        size: (rows, columns) in pixels.
    """

    def __init__(self, tracker: Tracker, size: tuple[int, int]) -> None:
        self.tracker = tracker
        self.size = size

    def start(self) -> Any:
        """See `Tracker.start`."""
        return self.tracker.start()

    def step(
        self, state: Any, frame: Tensor, prompts: Mapping[int, MaskPrompt] | None = None
    ) -> tuple[Any, dict[int, Tensor]]:
        """See `Tracker.step`; the masks have the size of the frame that came."""
        shown = {
            key: MaskPrompt(choose_cells(self._resize(given.mask.float()))) for key, given in (prompts or {}).items()
        }
        state, masks = self.tracker.step(state, self._resize(frame.float() / 255).clamp(0, 1), shown or None)
        return state, {key: resize(mask, (frame.shape[-2], frame.shape[-1])) for key, mask in masks.items()}

    def _resize(self, image: Tensor) -> Tensor:
        return resize(image, self.size)


def follow(tracker: Tracker, sequence: VideoSequence, device: torch.device | str = "cpu") -> Iterator[Followed]:
    """Follow all objects of a sequence, one frame in memory at a time.

    Each object is shown by its mask in the frame where it is first marked; frames before that have nothing of it.

    Raises: FrameSizeError where a frame has another size than the first.
    """
    appearances = sequence.appearances
    begin = min(appearances.values(), default=len(sequence))
    state = tracker.start()
    first: tuple[int, int] | None = None
    for index in range(len(sequence)):
        frame = sequence.read_frame(index).to(device)
        size = (frame.shape[-2], frame.shape[-1])
        first = first or size
        if size != first:
            raise FrameSizeError(
                f"sequence {sequence.name}: {sequence.frames[index].name} has {size[0]}x{size[1]} pixels (rows x "
                f"columns), but the first frame has {first[0]}x{first[1]}; resize it and its ids",
                number=index,
                size=size,
                first=first,
            )
        if index < begin:
            yield Followed(index, torch.zeros(size, dtype=torch.uint8), None)
            continue
        prompts = _show_objects(sequence, index, [key for key, first in appearances.items() if first == index])
        start = time.perf_counter()
        state, masks = tracker.step(state, frame, prompts)
        # Copied to the CPU, which waits for a device that computes beside it.
        ids = merge_masks(masks, size).cpu()
        yield Followed(index, ids, None if prompts else time.perf_counter() - start)


def score_sequence(
    tracker: Tracker,
    sequence: VideoSequence,
    *,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    tick: Callable[[], object] | None = None,
) -> SequenceScores:
    """Follow the objects of a sequence and judge their masks, as the DAVIS 2017 toolkit does (semi-supervised).

    Args:
        folder: for the predicted ids as palette PNGs, named as the frames.
        tick: is called after every frame.

    Raises:
        BrokenFileError: for frames and masks that cannot be read or differ in size.
    """
    judged = {key: set(choose_judged(sequence.ids, first)) for key, first in sequence.appearances.items()}
    scores = SequenceScores({key: ObjectScores() for key, frames in judged.items() if frames})
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for followed in follow(tracker, sequence, device):
        index, ids = followed.index, followed.ids
        if followed.seconds is not None:
            scores.frames += 1
            scores.seconds += followed.seconds
        check_ids(ids, judged)
        if folder is not None:
            write_ids(folder / f"{sequence.frames[index].stem}.png", ids)
        objects = [key for key in scores.objects if index in judged[key]]
        truth = sequence.read_ids(index) if objects else None
        for key in objects:
            assert truth is not None, "frames without ids are not judged"
            scores.objects[key].add(index, ids == key, truth == key)
        if tick is not None:
            tick()
    return scores


def _show_objects(sequence: VideoSequence, index: int, object_ids: list[int]) -> dict[int, MaskPrompt] | None:
    if not object_ids:
        return None
    ids = sequence.read_ids(index)
    assert ids is not None, "an object appears where there are ids"
    return {key: MaskPrompt(ids == key) for key in object_ids}
