"""The memory bank: what is selected, kept and dropped, against slow loops over everything that ever was."""

from __future__ import annotations

import json
import random
import weakref
from pathlib import Path

import pytest
import torch

import vision_rope as vr
from vision_rope.memory import Gate, StoredFrame, StoredPointer
from vision_rope.memory.selection import (
    closest_prompted,
    passes,
    recent_slots,
    select_frames,
    select_pointers,
)

GOLDEN = Path(__file__).parent / "golden" / "select_cond_frames.json"
DIM, MEMORY_DIM = 32, 8


def make_frame(number, grid=(2, 3), batch=1, **options):
    return StoredFrame(number, torch.randn(batch, grid[0] * grid[1], MEMORY_DIM), grid, **options)


def make_pointer(number, batch=1, **options):
    return StoredPointer(number, torch.randn(batch, DIM), **options)


def numbers(stored):
    return [item.number for item in stored]


# --- a second formulation: loops over the whole history, nothing ever dropped ----------------------------------------


def slow_closest(frame, prompted, count):
    if count is None or len(prompted) <= count:
        return sorted(prompted)
    chosen = []
    if count > 1:
        chosen += [max((t for t in prompted if t < frame), default=None)]
        chosen += [min((t for t in prompted if t >= frame), default=None)]
    chosen = [t for t in chosen if t is not None]
    while len(chosen) < count:
        nearest = None
        for t in sorted(prompted):
            if t not in chosen and (nearest is None or abs(t - frame) < abs(nearest - frame)):
                nearest = t
        chosen.append(nearest)
    return chosen


def slow_frames(frame, prompted, tracked, policy, failed=(), flagged=()):
    chosen = slow_closest(frame, prompted, policy.max_prompted)
    unselected = [t for t in prompted if t not in chosen]
    apart = []
    for t in sorted(flagged, reverse=True):
        if t < frame and len(apart) < policy.num_distractors:
            apart.insert(0, t)
    stored = [t for t in (*tracked, *unselected) if t not in apart]
    recent = []
    if policy.gate is None:
        for t_rel in range(policy.num_recent, 0, -1):
            strided = ((frame - 2) // policy.stride) * policy.stride - (t_rel - 2) * policy.stride
            t = frame - 1 if t_rel == 1 else strided
            if t in stored:
                t_pos = 7 - t_rel
                recent.append((t, 7 - t_pos - 1))
    else:
        row = 0
        for t in range(frame - 1, -1, -1):
            fine = t not in failed or (policy.gate.keep_previous and t == frame - 1)
            if t in stored and fine and row < policy.num_recent:
                recent.insert(0, (t, row))
                row += 1
    return [(t, 6) for t in chosen] + recent + [(t, 6) for t in apart]


def slow_pointers(frame, prompted, tracked, policy, num_frames=None):
    chosen = slow_closest(frame, prompted, policy.max_prompted)
    found = []
    for t in chosen:
        if policy.prompted_pointers == "past" and t > frame:
            continue
        found.append((t, abs(frame - t) if policy.prompted_pointers == "absolute" else frame - t))
    most = policy.num_pointers if num_frames is None else min(num_frames, policy.num_pointers)
    for t_diff in range(1, most):
        t = frame - t_diff
        if t in tracked or (t in prompted and t not in chosen):
            found.append((t, t_diff))
    return [(t, age / (most - 1)) for t, age in found]


POLICIES = {
    "sam2": vr.MemoryPolicy(),
    "stride": vr.MemoryPolicy(stride=3),
    "few": vr.MemoryPolicy(num_recent=2, stride=2, max_prompted=1, num_pointers=4),
    "one": vr.MemoryPolicy(num_recent=1, stride=4, max_prompted=2),
    "no tracked": vr.MemoryPolicy(num_recent=0),
    "gate": vr.MemoryPolicy(gate=Gate(), max_prompted=2),
    "samurai": vr.MemoryPolicy(gate=Gate(keep_previous=True)),
    "dam4sam": vr.MemoryPolicy(num_recent=3, num_distractors=3),
    "both": vr.MemoryPolicy(gate=Gate(mask_quality=None), num_distractors=2, num_recent=4),
    "stride and distractors": vr.MemoryPolicy(stride=2, num_distractors=2, max_prompted=3),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", POLICIES)
def test_a_bank_that_drops_selects_as_if_it_kept_everything(name, seed):
    """Failure class 36: neither ring loses what the other keeps. Frames are skipped, prompted, flagged at random."""
    policy, rng = POLICIES[name], random.Random(seed)
    bank = vr.MemoryBank(policy)
    prompted, tracked, failed, flagged = set(), set(), set(), set()
    frame = 0
    for _ in range(60):
        assert [(s.number, row) for s, row in bank.select_frames(frame)] == slow_frames(
            frame, prompted, tracked, policy, failed, flagged
        )
        assert [(s.number, age) for s, age in bank.select_pointers(frame)] == slow_pointers(
            frame, prompted, tracked, policy
        )
        if frame == 0 or rng.random() < 0.9:
            by_user = frame == 0 or rng.random() < 0.12
            flag = not by_user and policy.num_distractors > 0 and rng.random() < 0.2
            score, quality = rng.choice([-1.0, 0.0, 2.0, 2.0]), rng.choice([0.4, 0.9, 0.9])
            options = {"object_score": torch.tensor([score]), "mask_quality": torch.tensor([[quality]])}
            bank = bank.add_frame(make_frame(frame, prompted=by_user, distractor=flag, **options))
            bank = bank.add_pointer(make_pointer(frame, prompted=by_user))
            (prompted if by_user else tracked).add(frame)
            if flag:
                flagged.add(frame)
            if policy.gate and not by_user and not passes(policy.gate, score, quality):
                failed.add(frame)
        frame += rng.choice([1, 1, 1, 1, 2, 5])


@pytest.mark.parametrize("mode", ["past", "signed", "absolute"])
@pytest.mark.parametrize("max_prompted", [None, 1, 2, 3])
def test_selection_among_prompts_before_and_after(mode, max_prompted):
    """A file whose later frames were prompted before tracking; tracked frames stand between the prompts."""
    policy = vr.MemoryPolicy(max_prompted=max_prompted, prompted_pointers=mode)
    prompted, tracked = {0, 9, 12, 30}, set(range(40)) - {0, 9, 12, 30, 11}
    for frame in range(40):
        assert select_frames(frame, prompted, tracked, policy) == slow_frames(frame, prompted, tracked, policy)
        for num_frames in (None, 5, 40):
            if num_frames is None or frame < num_frames:
                assert select_pointers(frame, prompted, tracked, policy, num_frames=num_frames) == slow_pointers(
                    frame, prompted, tracked, policy, num_frames
                )


def test_distractors_ahead_are_not_read():
    policy, tracked, flagged = POLICIES["dam4sam"], range(1, 20), [4, 8, 10, 15]
    selected = select_frames(10, [0], tracked, policy, distractors=flagged)
    assert selected == slow_frames(10, [0], tracked, policy, flagged=flagged)
    assert selected == [(0, 6), (7, 2), (9, 0), (4, 6), (8, 6)]


# --- prompted frames, slots and rows ---------------------------------------------------------------------------------


def test_golden_closest_prompted():
    for case in json.loads(GOLDEN.read_text()):
        count = None if case["max"] == -1 else case["max"]
        assert closest_prompted(case["frame"], case["cond"], count) == case["selected"]


def test_a_single_prompted_frame_is_the_nearest():
    """SAM 2 asserts at least two."""
    assert [closest_prompted(frame, [3, 9], 1) for frame in (0, 5, 6, 7, 9, 20)] == [[3], [3], [3], [9], [9], [9]]


def test_rows_of_ages():
    """Prompted frames have row 6, the newest tracked one row 0, the oldest row 5."""
    selected = select_frames(20, [0], range(1, 20), vr.MemoryPolicy())
    assert selected == [(0, 6), (14, 5), (15, 4), (16, 3), (17, 2), (18, 1), (19, 0)]


def test_slots_with_a_stride():
    assert recent_slots(10, vr.MemoryPolicy(stride=3)) == [9, 6, 3, 0, -3, -6]
    assert recent_slots(11, vr.MemoryPolicy(stride=3)) == [10, 9, 6, 3, 0, -3]


def test_pointers_of_sam2():
    """Failure class 36: all 16 of them, 15 of tracked frames, where 9 are left if memory and pointers share a ring."""
    bank = vr.MemoryBank().add_frame(make_frame(0, prompted=True)).add_pointer(make_pointer(0, prompted=True))
    for number in range(1, 40):
        bank = bank.add_frame(make_frame(number)).add_pointer(make_pointer(number))
    selected = [(stored.number, age * 15) for stored, age in bank.select_pointers(40)]
    assert [number for number, _ in selected] == [0, *range(39, 24, -1)]
    assert [age for _, age in selected] == pytest.approx([40, *range(1, 16)])
    assert numbers(bank.frames) == [0, 34, 35, 36, 37, 38, 39]


def test_ages_of_a_stream_are_those_of_the_file():
    """Failure class 37: no number depends on how long the clip is, unless SAM 2's normaliser is asked for."""
    policy, tracked = vr.MemoryPolicy(), range(1, 6)
    stream = select_pointers(6, [0], tracked, policy)
    assert stream == select_pointers(6, [0], tracked, policy, num_frames=16)
    assert stream == select_pointers(6, [0], tracked, policy, num_frames=1000)
    clip = select_pointers(6, [0], tracked, policy, num_frames=8)
    assert [age for _, age in clip] == pytest.approx([6 / 7, *(age / 7 for age in range(1, 6))])
    assert [age for _, age in stream] == pytest.approx([6 / 15, *(age / 15 for age in range(1, 6))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_recent": -1}, "num_recent is -1; it must be at least 0"),
        ({"stride": 0}, "stride is 0; it must be at least 1"),
        ({"max_prompted": 0}, "max_prompted is 0; it must be at least 1"),
        ({"num_pointers": 1}, "num_pointers is 1; it must be at least 2"),
        ({"num_distractors": -1}, "num_distractors is -1; it must be at least 0"),
        ({"prompted_pointers": "future"}, "'future'; choose one of past, signed, absolute"),
        ({"gate": Gate(), "stride": 2}, "stride is 2 and there is a gate"),
    ],
)
def test_wrong_policies_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vr.MemoryPolicy(**options)


def test_a_gate_needs_scores_and_thresholds():
    with pytest.raises(ValueError, match="give no gate instead"):
        Gate(object_score=None, mask_quality=None)
    bank = vr.MemoryBank(vr.MemoryPolicy(gate=Gate()))
    with pytest.raises(ValueError, match="threshold of mask_quality"):
        bank.add_frame(make_frame(3, object_score=torch.ones(1)))
    assert numbers(bank.add_frame(make_frame(3, prompted=True)).frames) == [3]


def test_of_several_objects_the_worst_one_counts():
    bank = vr.MemoryBank(vr.MemoryPolicy(gate=Gate(mask_quality=None)))
    for number, scores in enumerate(([1.0, 2.0], [1.0, -2.0], [1.0, float("nan")], [0.1, 0.1])):
        bank = bank.add_frame(make_frame(number, batch=2, object_score=torch.tensor(scores)))
    assert [stored.number for stored, _ in bank.select_frames(4)] == [0, 3]


# --- the bank as data ------------------------------------------------------------------------------------------------


def test_adding_and_removing_leave_the_old_bank_as_it_was():
    empty = vr.MemoryBank()
    one = empty.add_frame(make_frame(0, prompted=True)).add_pointer(make_pointer(0, prompted=True))
    two = one.add_frame(make_frame(1)).add_pointer(make_pointer(1))
    less = two.remove(0)
    assert [numbers(bank.frames) for bank in (empty, one, two, less)] == [[], [0], [0, 1], [1]]
    assert [numbers(bank.pointers) for bank in (empty, one, two, less)] == [[], [0], [0, 1], [1]]
    assert two.frames[0] is one.frames[0]
    with pytest.raises(AttributeError):
        two.frames = ()
    with pytest.raises(ValueError, match=r"frame 5 is not in the bank, which has \[0, 1\]"):
        two.remove(5)


def test_tracking_again_from_a_correction_forgets_the_old_track():
    bank = vr.MemoryBank()
    for number in range(30):
        bank = bank.add_frame(make_frame(number, prompted=number == 0)).add_pointer(make_pointer(number))
    bank = bank.add_frame(make_frame(26, prompted=True)).add_pointer(make_pointer(26, prompted=True))
    assert numbers(bank.frames) == [0, 24, 25, 26, 27, 28, 29]
    bank = bank.add_frame(make_frame(27)).add_pointer(make_pointer(27))
    assert numbers(bank.frames) == [0, 24, 25, 26, 27]
    assert numbers(bank.pointers) == list(range(15, 28))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("sam2", "forwards"),
        ("stride", "forwards"),
        ("samurai", "forwards"),
        ("dam4sam", "forwards"),
        ("sam2", "backwards"),
    ],
)
def test_memory_is_flat_over_5000_frames(name, order):
    """Failure class 35: what is stored, and what of it is alive, stays the same however long the video is."""
    bank = vr.MemoryBank(POLICIES[name])
    bank = bank.add_frame(make_frame(0, prompted=True)).add_pointer(make_pointer(0, prompted=True))
    flags = POLICIES[name].num_distractors > 0
    alive: list[weakref.ref] = []
    sizes = set()
    score = {"object_score": torch.ones(1), "mask_quality": torch.ones(1)} if name == "samurai" else {}
    for step in range(1, 5001):
        number = step if order == "forwards" else 6000 - step
        features, pointer = torch.zeros(1, 6, MEMORY_DIM), torch.zeros(1, DIM)
        alive = [x for x in alive if x() is not None] + [weakref.ref(features), weakref.ref(pointer)]
        bank = bank.add_frame(StoredFrame(number, features, (2, 3), distractor=flags and step % 10 == 0, **score))
        bank = bank.add_pointer(StoredPointer(number, pointer))
        if step > 100:
            sizes.add(bank.num_bytes())
        assert len(alive) <= 6 + 1 + 15 + 4
    most = 1 + 6 + POLICIES[name].num_distractors + (name == "samurai")
    frame_bytes = 4 * 6 * MEMORY_DIM + 4 * len(score)
    assert max(sizes) <= most * frame_bytes + 16 * 4 * DIM
    # With a stride there are one or two frames fewer, in turn.
    assert max(sizes) - min(sizes) <= 2 * frame_bytes


def test_what_does_not_fit_is_refused():
    bank = vr.MemoryBank().add_frame(make_frame(0, batch=2)).add_pointer(make_pointer(0, batch=2))
    with pytest.raises(ValueError, match=r"features has shape \(1, 6, 8\); a frame of the grid \(2, 4\)"):
        bank.add_frame(StoredFrame(1, torch.zeros(1, 6, 8), (2, 4)))
    with pytest.raises(ValueError, match=r"features has a batch of 3 and the bank holds 2"):
        bank.add_frame(make_frame(1, batch=3))
    with pytest.raises(ValueError, match=r"pointer has a batch of 1 and the bank holds 2"):
        bank.add_pointer(make_pointer(1))
    with pytest.raises(ValueError, match=r"pointer has shape \(2, 1, 32\)"):
        bank.add_pointer(StoredPointer(1, torch.zeros(2, 1, 32)))
    with pytest.raises(ValueError, match=r"distractor is set for frame 1.*here 0"):
        bank.add_frame(make_frame(1, batch=2, distractor=True))
