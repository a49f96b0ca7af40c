"""The floors of video object segmentation: against loops over cells, known colours, and a square that moves."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from vision_rope.propagation import CopyFirst, PatchPropagation, PatchState, rgb_to_lab
from vision_rope.segmenter import MaskPrompt, PointPrompt
from vision_rope.vos_metrics import region_similarity

SIZE = (96, 128)
# Half the cells of the default: a sixteenth of the work.
SMALL = PatchPropagation(resolution=48, radius=6)
COLOURS = {1: (200, 60, 40), 2: (40, 80, 210)}


def draw(places: dict[int, tuple[int, int]], side: int = 20) -> tuple[Tensor, dict[int, Tensor]]:
    """A frame with squares before a pattern, and their masks; later ones are in front."""
    rows, columns = torch.arange(SIZE[0])[:, None], torch.arange(SIZE[1])
    frame = (120 + 30 * ((rows // 7 + columns // 5) % 3)).to(torch.uint8).expand(3, *SIZE).clone()
    masks: dict[int, Tensor] = {}
    for key, (top, left) in places.items():
        mask = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
        frame[:, mask] = torch.tensor(COLOURS[key], dtype=torch.uint8)[:, None]
        masks = {other: found & ~mask for other, found in masks.items()} | {key: mask}
    return frame, masks


def show(masks: dict[int, Tensor]) -> dict[int, MaskPrompt]:
    return {key: MaskPrompt(mask) for key, mask in masks.items()}


def test_known_colours_in_lab() -> None:
    colours = {
        (1.0, 1.0, 1.0): (100.0, 0.0, 0.0),
        (0.0, 0.0, 0.0): (0.0, 0.0, 0.0),
        (1.0, 0.0, 0.0): (53.24, 80.09, 67.20),
        (0.0, 1.0, 0.0): (87.73, -86.18, 83.18),
        (0.0, 0.0, 1.0): (32.30, 79.19, -107.86),
        (0.02, 0.02, 0.02): (1.40, 0.0, 0.0),
    }
    lab = rgb_to_lab(torch.tensor(list(colours)).T[:, None])
    torch.testing.assert_close(lab[:, 0].T, torch.tensor(list(colours.values())), atol=0.02, rtol=0)


def test_the_copied_mask_stays() -> None:
    frame, masks = draw({1: (10, 20), 2: (50, 60)})
    floor = CopyFirst()
    start = floor.start()
    first, _ = floor.step(start, frame, show({1: masks[1]}))
    second, given = floor.step(first, frame, show({2: masks[2]}))
    _, later = floor.step(second, torch.zeros_like(frame))
    for found in (given, later):
        assert {key: torch.equal(mask > 0, masks[key]) for key, mask in found.items()} == {1: True, 2: True}
    assert (list(start.masks), list(first.masks)) == ([], [1])


def test_patches_follow_what_moves() -> None:
    tracker = SMALL
    frame, first = draw({1: (20, 10)})
    state, _ = tracker.step(tracker.start(), frame, show(first))
    for step in range(1, 9):
        frame, masks = draw({1: (20 + 2 * step, 10 + 5 * step)})
        state, found = tracker.step(state, frame)
        assert region_similarity(found[1] > 0, masks[1]) > 0.85
    assert region_similarity(first[1], masks[1]) == 0.0


def test_objects_that_meet_and_one_that_comes_later() -> None:
    tracker = SMALL
    frame, masks = draw({1: (30, 5)})
    state, found = tracker.step(tracker.start(), frame, show(masks))
    for step in range(1, 12):
        places = {1: (30, 5 + 3 * step)} | ({2: (40, 100 - 4 * step)} if step > 2 else {})
        frame, masks = draw(places)
        state, found = tracker.step(state, frame, show({2: masks[2]}) if step == 3 else None)
        assert list(found) == list(places)
        assert all(region_similarity(found[key] > 0, masks[key]) > 0.75 for key in places), step
        assert sum((mask > 0).int() for mask in found.values()).max() == 1
    assert masks[1].sum() < 400


def test_a_pixel_belongs_to_one_object() -> None:
    frame, masks = draw({1: (20, 30)})
    both = {1: masks[1], 2: masks[1].roll(5, 1)}
    state, given = SMALL.step(SMALL.start(), frame, show(both))
    _, later = SMALL.step(state, frame)
    for found in (given, later):
        assert not ((found[1] > 0) & (found[2] > 0)).any()
    assert torch.equal((given[1] > 0) | (given[2] > 0), both[1] | both[2])


def test_the_first_frame_and_the_latest_are_kept() -> None:
    tracker = SMALL
    state = tracker.start()
    described = []
    for step in range(5):
        frame, masks = draw({1: (20 + step, 10 + 2 * step)})
        if step:
            described.append(tracker._describe(frame, state.objects[1].window))
        state, _ = tracker.step(state, frame, show(masks) if step == 0 else None)
        known = state.objects[1]
        assert all(map(torch.equal, (seen.patches for seen in known.latest), described[-2:]))
        assert len(known.latest) == min(step, 2)


def test_an_object_far_away_changes_nothing() -> None:
    tracker = SMALL
    alone = both = tracker.start()
    for step in range(4):
        frame, masks = draw({1: (5, 5 + 2 * step), 2: (70, 100)})
        alone, one = tracker.step(alone, frame, show({1: masks[1]}) if step == 0 else None)
        both, two = tracker.step(both, frame, show(masks) if step == 0 else None)
        assert torch.equal(one[1] > 0, two[1] > 0)


def test_a_state_stays_as_it_was() -> None:
    tracker = SMALL
    frame, masks = draw({1: (20, 10)})
    state, _ = tracker.step(tracker.start(), frame, show(masks))
    moved, _ = draw({1: (22, 14)})
    _, before = tracker.step(state, moved)
    other, _ = tracker.step(state, draw({1: (60, 90)})[0], show({2: masks[1]}))
    tracker.step(other, frame)
    assert torch.equal(tracker.step(state, moved)[1][1], before[1])
    assert tracker.start() == PatchState()


def test_a_second_mask_begins_anew() -> None:
    tracker = SMALL
    frame, masks = draw({1: (20, 10), 2: (60, 90)})
    wrong, _ = tracker.step(tracker.start(), frame, show({1: masks[2]}))
    right, found = tracker.step(wrong, frame, show({1: masks[1]}))
    assert torch.equal(found[1] > 0, masks[1])
    _, found = tracker.step(right, frame)
    assert region_similarity(found[1] > 0, masks[1]) > 0.9


def test_an_empty_mask_stays_empty() -> None:
    tracker = SMALL
    frame, _ = draw({1: (20, 10)})
    state, found = tracker.step(tracker.start(), frame, {5: MaskPrompt(torch.zeros(SIZE))})
    for _ in range(3):
        state, found = tracker.step(state, frame)
        assert not (found[5] > 0).any()


def test_an_object_that_leaves_is_gone() -> None:
    tracker = SMALL
    state = tracker.start()
    for step in range(9):
        frame, masks = draw({1: (40, 80 + 8 * step)})
        state, found = tracker.step(state, frame, show(masks) if step == 0 else None)
    assert not masks[1].any()
    assert (found[1] > 0).sum() < 12


def match_by_loops(tracker: PatchPropagation, patches: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The shares of all cells, one after the other."""
    cells = tracker.resolution // tracker.stride
    found = torch.zeros(cells, cells)
    for y in range(cells):
        for x in range(cells):
            alike = []
            for keys, shares in memory:
                for b in range(cells):
                    for a in range(cells):
                        if (y - b) ** 2 + (x - a) ** 2 <= tracker.radius**2:
                            gap = (patches[y * cells + x] - keys[b * cells + a]).square().mean().item()
                            alike.append((gap, shares[b * cells + a].item()))
            nearest = sorted(alike)[: tracker.num_alike]
            weights = [math.exp((nearest[0][0] - gap) / tracker.temperature) for gap, _ in nearest]
            found[y, x] = sum(w * share for w, (_, share) in zip(weights, nearest, strict=True)) / sum(weights)
    return found


@pytest.mark.parametrize("radius", [2, 3, 20])
def test_cells_against_loops(radius: int) -> None:
    tracker = PatchPropagation(resolution=14, stride=2, radius=radius, num_alike=4, temperature=30.0)
    frame, masks = draw({1: (20, 10)})
    noise = torch.randint(0, 60, frame.shape, dtype=torch.uint8)
    state, _ = tracker.step(tracker.start(), frame // 2 + noise, show(masks))
    for step in range(2):
        state, _ = tracker.step(state, draw({1: (20, 13 + 3 * step)})[0] // 2 + noise.flip(step))
    known = state.objects[1]
    assert len(known.latest) == 2
    patches = 40 * torch.randn(49, 75)
    memory = [(seen.patches, seen.shares) for seen in (known.first, *known.latest)]
    expected = match_by_loops(tracker, patches, memory)
    assert expected.std() > 0.05
    torch.testing.assert_close(tracker._match(patches, known), expected, atol=1e-4, rtol=1e-4)


def test_patches_are_around_their_cells() -> None:
    """The middle of a patch is the first pixel of its cell, and a window of its own resolution is not resampled."""
    tracker = PatchPropagation(resolution=40, zoom=1.9)
    frame, masks = draw({1: (30, 40)})
    state, _ = tracker.step(tracker.start(), frame, show(masks))
    seen = state.objects[1].first
    assert seen.patches.shape == (400, 75)
    corner = (40 - 20, 50 - 20)
    cut = rgb_to_lab(frame[:, corner[0] : corner[0] + 40, corner[1] : corner[1] + 40] / 255)
    torch.testing.assert_close(seen.patches.view(20, 20, 3, 25)[..., 12].permute(2, 0, 1), cut[:, ::2, ::2])
    inside = masks[1][corner[0] : corner[0] + 40, corner[1] : corner[1] + 40].float()
    share = torch.nn.functional.avg_pool2d(inside[None], 2).flatten()
    torch.testing.assert_close(seen.shares, share, atol=1e-4, rtol=0)


def test_what_floors_cannot_take() -> None:
    frame, masks = draw({1: (20, 10)})
    for floor in (CopyFirst(), PatchPropagation()):
        with pytest.raises(ValueError, match=r"prompts\[1\] is a PointPrompt, but a floor needs a MaskPrompt"):
            floor.step(floor.start(), frame, {1: PointPrompt([(3, 4)])})
        with pytest.raises(
            ValueError, match=r"the mask of object 1 has .* pixels, but the frame has .*; resize the mask"
        ):
            floor.step(floor.start(), frame, {1: MaskPrompt(masks[1].T)})
    tracker = SMALL
    state, _ = tracker.step(tracker.start(), frame, show(masks))
    with pytest.raises(ValueError, match="those before had"):
        tracker.step(state, frame.mT)


def test_windows_may_be_larger_than_frames() -> None:
    tracker = dataclasses.replace(PatchPropagation(), zoom=6.0)
    frame, masks = draw({1: (0, 108)})
    state, _ = tracker.step(tracker.start(), frame, show(masks))
    _, found = tracker.step(state, frame)
    assert found[1].shape == SIZE
    assert region_similarity(found[1] > 0, masks[1]) > 0.8
