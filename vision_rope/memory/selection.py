"""Which stored frames and object pointers a frame reads, and how old they are: decisions on numbers alone.

Frames are numbered in the order of tracking: a video that is tracked backwards gives its numbers negated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

PromptedPointers = Literal["past", "signed", "absolute"]


@dataclass(frozen=True)
class Gate:
    """What a tracked frame must reach so that later frames read its memory.

    Attributes:
        object_score: the logit that the object is there must be above it; None does not ask.
        mask_quality: the predicted IoU of the mask must be above it; None does not ask.
        keep_previous: read the frame before the present one even so, as SAMURAI does.

    Source: SAMURAI (arXiv 2411.11922), its memory selection without the score of motion; its default thresholds.
    """

    object_score: float | None = 0.0
    mask_quality: float | None = 0.5
    keep_previous: bool = False

    def __post_init__(self) -> None:
        if self.object_score is None and self.mask_quality is None:
            raise ValueError("a gate without object_score and mask_quality lets everything pass; give no gate instead")


@dataclass(frozen=True)
class MemoryPolicy:
    """What a bank keeps and a frame reads; the defaults are those of SAM 2.

    Attributes:
        num_recent: how many tracked frames are read beside the prompted ones.
        stride: of tracked frames; the one before the present one is always read.
        max_prompted: how many prompted frames are read, the closest ones; None reads all.
        num_pointers: how far pointers of tracked frames reach, num_pointers - 1 frames; what ages are divided by too.
        prompted_pointers: of prompted frames that lie ahead: "past" leaves them out, "signed" gives them negative ages,
            "absolute" the distance.
        gate: which tracked frames are read: the last num_recent that pass; None reads SAM 2's.
        num_distractors: how many frames that their caller flagged, because they tell the object from something like
            it, are kept and read however old they are, with the age of prompted ones.

    Raises: ValueError for numbers out of range, and for a gate together with a stride.
    Source: SAM 2 (arXiv 2408.00714), section 4; for distractors DAM4SAM (arXiv 2411.17576), where they take the place
        of recent ones: num_recent=3, num_distractors=3.
    """

    num_recent: int = 6
    stride: int = 1
    max_prompted: int | None = None
    num_pointers: int = 16
    prompted_pointers: PromptedPointers = "past"
    gate: Gate | None = None
    num_distractors: int = 0

    def __post_init__(self) -> None:
        least = {"num_recent": 0, "stride": 1, "max_prompted": 1, "num_pointers": 2, "num_distractors": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} is {value}; it must be at least {smallest}")
        if self.prompted_pointers not in get_args(PromptedPointers):
            raise ValueError(
                f"prompted_pointers is {self.prompted_pointers!r}; choose one of "
                f"{', '.join(get_args(PromptedPointers))}"
            )
        if self.gate is not None and self.stride != 1:
            raise ValueError(f"stride is {self.stride} and there is a gate, which takes every frame that passes; use 1")


def passes(gate: Gate | None, object_score: float | None, mask_quality: float | None) -> bool:
    """Whether a tracked frame with these scores is read.

    Raises: ValueError where the gate asks for a score that was not given.
    """
    if gate is None:
        return True
    for name, score, threshold in (
        ("object_score", object_score, gate.object_score),
        ("mask_quality", mask_quality, gate.mask_quality),
    ):
        if threshold is None:
            continue
        if score is None:
            raise ValueError(f"the gate has a threshold of {name}, and a frame came without: store it with its score")
        if not score > threshold:
            return False
    return True


def closest_prompted(frame: int, prompted: Iterable[int], count: int | None) -> list[int]:
    """Prompted frames that a frame reads: all, or the closest before it, the closest from it on, then the nearest ones.

    A single one is the nearest of all, the earlier one of two.
    """
    numbers = sorted(prompted)
    if count is None or len(numbers) <= count:
        return numbers
    by_distance = sorted(numbers, key=lambda number: abs(number - frame))
    if count == 1:
        return by_distance[:1]
    before = [number for number in numbers if number < frame][-1:]
    after = [number for number in numbers if number >= frame][:1]
    chosen = before + after
    return chosen + [number for number in by_distance if number not in chosen][: count - len(chosen)]


def recent_slots(frame: int, policy: MemoryPolicy) -> list[int]:
    """Numbers of the tracked frames that a frame reads where they are stored, newest first."""
    strided = (frame - 2) // policy.stride * policy.stride
    slots = [frame - 1] + [strided - step * policy.stride for step in range(policy.num_recent - 1)]
    return slots[: policy.num_recent]


def select_frames(
    frame: int,
    prompted: Collection[int],
    tracked: Collection[int],
    policy: MemoryPolicy,
    *,
    failed: Collection[int] = (),
    distractors: Collection[int] = (),
    num_ages: int = 7,
) -> list[tuple[int, int]]:
    """Stored frames that a frame reads, each with the row of its age.

    Prompted frames and distractors have the last row, tracked ones rows from 0, the newest, on. Prompted frames that
    are not among the closest count as tracked.

    Args:
        prompted, tracked: numbers of what is stored.
        failed: those of the tracked that do not pass the gate.
        distractors: those of the tracked that are flagged.
        num_ages: how many ages the weights have.

    Returns: (number, row): prompted ones, tracked ones from the oldest on, distractors.
    """
    chosen = closest_prompted(frame, prompted, policy.max_prompted)
    apart = last_distractors(frame - 1, distractors, policy)
    kept = policy.gate is not None and policy.gate.keep_previous
    candidates = {*tracked, *prompted}.difference(chosen, apart)
    candidates -= {number for number in failed if not (kept and number == frame - 1)}
    if policy.gate is None:
        slots = recent_slots(frame, policy)
    else:
        slots = sorted((number for number in candidates if number < frame), reverse=True)[: policy.num_recent]
    recent = [(number, row) for row, number in enumerate(slots) if number in candidates]
    fixed = num_ages - 1
    return [(number, fixed) for number in chosen] + recent[::-1] + [(number, fixed) for number in apart]


def last_distractors(frame: int, distractors: Iterable[int], policy: MemoryPolicy) -> list[int]:
    """The flagged frames up to this one that are kept apart."""
    past = sorted(number for number in distractors if number <= frame)
    return past[max(0, len(past) - policy.num_distractors) :]


def select_pointers(
    frame: int,
    prompted: Collection[int],
    tracked: Collection[int],
    policy: MemoryPolicy,
    *,
    num_frames: int | None = None,
) -> list[tuple[int, float]]:
    """Object pointers that a frame reads, each with its age.

    Args:
        prompted, tracked: numbers of the frames whose pointers are stored.
        num_frames: of the clip, for the numbers of SAM 2, which divides ages by min(num_frames, num_pointers) - 1: the
            same frames in a longer clip have other ages then, and a stream has none. Without it they are divided by
            num_pointers - 1.

    Returns: (number, age): prompted ones, then tracked ones from the newest on.
    Units: ages are fractions of the reach.
    """
    chosen = closest_prompted(frame, prompted, policy.max_prompted)
    reach = policy.num_pointers - 1
    ages = [(number, frame - number) for number in chosen if number <= frame or policy.prompted_pointers != "past"]
    if policy.prompted_pointers == "absolute":
        ages = [(number, abs(age)) for number, age in ages]
    others = {*tracked, *prompted}.difference(chosen)
    ages += [(frame - age, age) for age in range(1, reach + 1) if frame - age in others]
    longest = reach if num_frames is None else max(1, min(num_frames - 1, reach))
    return [(number, age / longest) for number, age in ages]


def frames_in_reach(
    frame: int,
    tracked: Collection[int],
    policy: MemoryPolicy,
    *,
    failed: Collection[int] = (),
    distractors: Collection[int] = (),
) -> set[int]:
    """Those of the tracked frames up to this one that a later frame can still read; the reach only moves forward."""
    past = {number for number in tracked if number <= frame}
    apart = last_distractors(frame, distractors, policy)
    if policy.gate is None:
        recent = set(recent_slots(frame + 1, policy))
    else:
        passed = sorted(past.difference(failed, apart), reverse=True)
        recent = {*passed[: policy.num_recent], frame}
    return past & {*recent, *apart}


def pointers_in_reach(frame: int, tracked: Collection[int], policy: MemoryPolicy) -> set[int]:
    """Those of the tracked frames up to this one whose pointers a later frame can still read."""
    oldest = frame + 2 - policy.num_pointers
    return {number for number in tracked if oldest <= number <= frame}
