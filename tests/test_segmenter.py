"""The streaming segmenter: states, prompts, objects, sizes; on real frames with random weights."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import vision_rope as vr
import vision_rope.data
from vision_rope.memory import Gate
from vision_rope.segmenter import FrameSizeError, VideoSegmenter, load_state, save_state
from vision_rope.segmenter.framing import Framing
from vision_rope.segmenter.mask_decoder import Candidates, choose_best
from vision_rope.segmenter.prompt_encoder import RandomFourier
from vision_rope.segmenter.state_files import FORMAT

VIT: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64}
SMALL: dict[str, Any] = {"dim": 32, "memory_dim": 16, "depth": 1, "mlp_dim": 48, "decoder_heads": 4}


def make(**options: Any) -> VideoSegmenter:
    """A small segmenter whose objects are there and whose masks depend on its memory."""
    torch.manual_seed(0)
    segmenter = vr.create_segmenter("vit_tiny_patch16_224", model_options=VIT, **{**SMALL, **options}).eval()
    with torch.no_grad():
        segmenter.mask_decoder.pred_obj_score_head.layers[-1].bias.fill_(4.0)
        for layer in segmenter.memory.memory_attention.layers:
            for projection in (layer.cross_attn_image.q_proj, layer.cross_attn_image.k_proj):
                projection.weight.mul_(4.0)
    return segmenter


@pytest.fixture(scope="module")
def segmenter() -> VideoSegmenter:
    return make()


def frames(count: int, height: int = 64, width: int = 96, seed: int = 0) -> Tensor:
    """Smooth noise that drifts: uint8 (count, 3, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.rand(1, 3, height // 8, width // 8 + 4, generator=generator)
    picture = torch.nn.functional.interpolate(wide, size=(height, width + 32), mode="bicubic").clamp(0, 1)[0]
    return torch.stack([(picture[:, :, i : i + width] * 255).byte() for i in range(count)])


def disk(height: int = 64, width: int = 96, x: float = 40, y: float = 30, radius: float = 14) -> Tensor:
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    return (rows - y) ** 2 + (columns - x) ** 2 < radius**2


PROMPTS: dict[str, Any] = {
    "points": vr.PointPrompt([(40, 30), (5, 5)], [1, 0]),
    "click": vr.PointPrompt([(40, 30)]),
    "box": vr.BoxPrompt((26, 16, 54, 44)),
    "box and click": [vr.BoxPrompt((26, 16, 54, 44)), vr.PointPrompt([(40, 30)])],
    "mask": vr.MaskPrompt(disk()),
}


def follow(segmenter: VideoSegmenter, video: Any, prompts: dict[int, Any], state: Any = None) -> tuple[Any, list[Any]]:
    """All frames of a video; prompts by the number of the frame."""
    state, found = state or segmenter.start(), []
    for number, frame in enumerate(video):
        state, masks = segmenter.step(state, frame, prompts.get(number))
        found.append(masks)
    return state, found


def assert_same(one: list[dict[int, Tensor]], other: list[dict[int, Tensor]], atol: float = 0.0) -> None:
    assert [list(masks) for masks in one] == [list(masks) for masks in other]
    for first, second in zip(one, other, strict=True):
        for key in first:
            assert_close(first[key], second[key], atol=atol, rtol=0)


@pytest.mark.parametrize("kind", PROMPTS)
def test_masks_of_the_frames_size(segmenter: VideoSegmenter, kind: str) -> None:
    state, found = follow(segmenter, frames(3), {0: {7: PROMPTS[kind]}})
    assert [list(masks) for masks in found] == [[7]] * 3
    assert all(masks[7].shape == (64, 96) and masks[7].isfinite().all() for masks in found)
    assert state.number == 2
    assert state.objects[7].object_score.ndim == state.objects[7].mask_quality.ndim == 0
    # What was said in the first frame matters in the last one: the memory is read.
    _, other = follow(segmenter, frames(3), {0: {7: vr.MaskPrompt(disk(x=70))}})
    assert (found[-1][7] - other[-1][7]).abs().max() > 1e-3


def test_a_mask_prompt_is_the_first_mask(segmenter: VideoSegmenter) -> None:
    _, found = follow(segmenter, frames(1), {0: {1: PROMPTS["mask"]}})
    inside = found[0][1] > 0
    assert (inside & disk()).sum() / (inside | disk()).sum() > 0.9


def test_an_old_state_is_undo(segmenter: VideoSegmenter) -> None:
    """Failure class 38: going on from a kept state gives the same masks, whatever was done in between."""
    video = frames(5)
    before, _ = follow(segmenter, video[:2], {0: {1: PROMPTS["click"]}})
    stored = [x.clone() for x in before.objects[1].bank.tensors()]
    _, once = follow(segmenter, video[2:], {}, before)
    changed, _ = segmenter.correct(before, {1: vr.PointPrompt([(60, 40)], [0])})
    follow(segmenter, video[2:], {1: {2: PROMPTS["box"]}}, changed)
    follow(segmenter, video[2:], {}, before.remove(1))
    _, again = follow(segmenter, video[2:], {}, before)
    assert_same(once, again)
    for x, y in zip(stored, before.objects[1].bank.tensors(), strict=True):
        assert torch.equal(x, y)


def test_states_cannot_be_changed(segmenter: VideoSegmenter) -> None:
    import pickle

    state, _ = follow(segmenter, frames(2), {0: {1: PROMPTS["click"]}})
    with pytest.raises(TypeError, match="support item deletion"):
        del state.objects[1]  # type: ignore[attr-defined]
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert list(other.objects) == [1]
        _, one = segmenter.step(state, frames(3)[2])
        _, two = segmenter.step(other, frames(3)[2])
        assert_same([one], [two])


def test_objects_come_and_go_without_touching_others(segmenter: VideoSegmenter) -> None:
    """Failure class 38: added later, removed, corrected: the others' masks stay."""
    video = frames(6)
    _, alone = follow(segmenter, video, {0: {1: PROMPTS["box"]}})
    state, found = follow(segmenter, video[:2], {0: {1: PROMPTS["box"], 2: PROMPTS["click"]}})
    state, masks = segmenter.step(state, video[2], {9: PROMPTS["mask"]})
    assert list(masks) == [1, 2, 9]
    found.append(masks)
    state, corrected = segmenter.correct(state, {2: vr.PointPrompt([(10, 50)], [0])})
    assert (corrected[2] - masks[2]).abs().max() > 1e-3
    assert torch.equal(corrected[1], masks[1])
    assert torch.equal(corrected[9], masks[9])
    state = state.remove(2)
    state, rest = follow(segmenter, video[3:], {}, state)
    assert list(rest[-1]) == [1, 9]
    assert_same([{1: masks[1]} for masks in found + rest], alone, atol=1e-4)
    with pytest.raises(ValueError, match=r"object_id is 2; the objects are \[1, 9\]"):
        state.remove(2)


def test_objects_together_are_as_alone(segmenter: VideoSegmenter) -> None:
    """Objects of one age share a pass; each has the masks that it has alone."""
    video = frames(4)
    prompts = {1: PROMPTS["click"], 2: vr.PointPrompt([(80, 50)]), 3: PROMPTS["mask"], 4: PROMPTS["box"]}
    state, together = follow(segmenter, video, {0: prompts})
    for key, prompt in prompts.items():
        _, alone = follow(segmenter, video, {0: {key: prompt}})
        assert_same([{key: masks[key]} for masks in together], alone, atol=1e-4)
    assert all(len(x) == 1 for one in state.objects.values() for x in (frame.features for frame in one.bank.frames))


def test_videos_together_are_as_alone(segmenter: VideoSegmenter) -> None:
    """Several videos in one batch, of different sizes and starting at different frames."""
    videos = [frames(4, seed=1), frames(4, seed=2), frames(4, height=64, width=64, seed=3)]
    prompts = [{1: PROMPTS["click"]}, {1: PROMPTS["mask"], 2: PROMPTS["click"]}, {5: vr.BoxPrompt((5, 5, 40, 40))}]
    expected = [follow(segmenter, video, {0: prompt})[1] for video, prompt in zip(videos, prompts, strict=True)]
    states = [segmenter.start() for _ in videos]
    for number in range(4):
        given = prompts if number == 0 else None
        results = segmenter.step_videos(states, [video[number] for video in videos], given)
        states = [state for state, _ in results]
        for (_, masks), single in zip(results, expected, strict=True):
            assert_same([masks], [single[number]], atol=1e-4)
    with pytest.raises(ValueError, match="2 states, 1 frames"):
        segmenter.step_videos(states[:2], [videos[0][0]])


def test_corrections_join(segmenter: VideoSegmenter) -> None:
    """Clicks on one frame add up, and a mask takes the place of all."""
    video = frames(2)
    state, first = segmenter.step(segmenter.start(), video[0], {1: PROMPTS["click"]})
    state, second = segmenter.correct(state, {1: vr.PointPrompt([(5, 5)], [0])})
    prompt = state.objects[1].prompt
    assert prompt is not None
    assert prompt.labels.tolist() == [1, 0]
    assert (first[1] - second[1]).abs().max() > 1e-3
    state, third = segmenter.correct(state, {1: PROMPTS["mask"]})
    inside = third[1] > 0
    assert (inside & disk()).sum() / (inside | disk()).sum() > 0.9
    # The corrected frame is remembered once, as a prompted one.
    assert [(frame.number, frame.prompted) for frame in state.objects[1].bank.frames] == [(0, True)]
    state, _ = segmenter.step(state, video[1])
    state, _ = segmenter.correct(state, {1: vr.PointPrompt([(5, 5)], [0])})
    assert [(frame.number, frame.prompted) for frame in state.objects[1].bank.frames] == [(0, True), (1, True)]
    with pytest.raises(ValueError, match="no frame yet"):
        segmenter.correct(segmenter.start(), {1: PROMPTS["click"]})


def test_a_correction_reads_the_memory(segmenter: VideoSegmenter) -> None:
    """In mid-stream a click is read beside the memory; a prompt in `step` is read alone, as SAM 2 does."""
    video = frames(3)
    click = {1: vr.PointPrompt([(50, 40)])}
    state, _ = follow(segmenter, video[:2], {0: {1: PROMPTS["mask"]}})
    _, plain = segmenter.step(state, video[2])
    _, fresh = segmenter.step(state, video[2], click)
    after, _ = segmenter.step(state, video[2])
    _, corrected = segmenter.correct(after, click)
    _, alone = segmenter.step(segmenter.start(), video[2], click)
    assert_close(fresh[1], alone[1], atol=1e-5, rtol=0)
    assert (corrected[1] - fresh[1]).abs().max() > 1e-3
    assert (corrected[1] - plain[1]).abs().max() > 1e-3


def test_backwards(segmenter: VideoSegmenter) -> None:
    """A reversed state goes on as a video played backwards would, whose prompted frame comes first."""
    video = frames(6)
    start, _ = segmenter.step(segmenter.start(), video[3], {1: PROMPTS["mask"]})
    _, expected = follow(segmenter, video[[2, 1, 0]], {}, start)
    state = start.reverse()
    _, found = follow(segmenter, video[[2, 1, 0]], {}, state)
    assert_same(found, expected, atol=1e-6)
    # After tracking forwards the frames behind are remembered too, the nearest as the newest.
    later, _ = follow(segmenter, video[4:], {}, start)
    back = later.reverse()
    assert back.number == -2
    assert [frame.number for frame in back.objects[1].bank.frames] == [-2, -1, 0]
    back, masks = segmenter.step(back, video[4])
    assert back.number == -1
    assert masks[1].isfinite().all()


def test_nothing_can_be_turned_round(segmenter: VideoSegmenter) -> None:
    assert segmenter.start().reverse().number == -1


def test_an_empty_mask_and_an_object_that_is_gone() -> None:
    """Failure class 41: an empty mask and a low score, not the whole frame."""
    segmenter = make()
    state, masks = segmenter.step(segmenter.start(), frames(1)[0], {1: vr.MaskPrompt(np.zeros((64, 96), dtype=bool))})
    assert (masks[1] < 0).all()
    assert state.objects[1].object_score < 0
    with torch.no_grad():
        segmenter.mask_decoder.pred_obj_score_head.layers[-1].bias.fill_(-50.0)
    state, masks = segmenter.step(segmenter.start(), frames(1)[0], {1: PROMPTS["mask"]})
    state, masks = segmenter.step(state, frames(2)[1])
    assert (masks[1] == -1024).all()
    assert state.objects[1].object_score < 0
    pointer = state.objects[1].bank.pointers[-1].pointer
    assert_close(pointer, segmenter.memory.no_obj_ptr.detach(), atol=0, rtol=0)
    # It may return: its memory is kept.
    with torch.no_grad():
        segmenter.mask_decoder.pred_obj_score_head.layers[-1].bias.fill_(4.0)
    _, masks = segmenter.step(state, frames(3)[2])
    assert (masks[1] > -1000).any()


def test_frames_of_another_size_are_refused(segmenter: VideoSegmenter) -> None:
    """Failure class 39."""
    state, _ = segmenter.step(segmenter.start(), frames(1)[0], {1: PROMPTS["click"]})
    with pytest.raises(FrameSizeError, match=r"48x96 pixels and those before had 64x96 \(rows x columns\)") as caught:
        segmenter.step(state, frames(1, height=48)[0])
    assert (caught.value.number, caught.value.size, caught.value.first) == (1, (48, 96), (64, 96))
    assert FrameSizeError is vision_rope.data.FrameSizeError


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({1: []}, "prompts of object 1"),
        ({1: "here"}, "prompts of object 1"),
        ({1: vr.PointPrompt([(96, 3)])}, r"\(96.0, 3.0\), outside the frame of 64x96"),
        ({1: [PROMPTS["mask"], PROMPTS["click"]]}, "a mask stands alone"),
        ({1: [PROMPTS["box"], PROMPTS["box"]]}, "2 boxes"),
        ({1: vr.MaskPrompt(torch.ones(32, 32))}, "32x32 pixels and the frame 64x96"),
        ({1: vr.BoxPrompt((96, 3, 120, 9))}, r"\(96.0, 3.0, 120.0, 9.0\), is outside the frame of 64x96"),
        ({1: vr.BoxPrompt((3, -20, 9, -5))}, "is outside the frame"),
        ({1: None}, "prompts of object 1 are None"),
        ({1.5: PROMPTS["click"]}, "the object id 1.5 is a float; give whole numbers"),
        ([PROMPTS["click"]], "prompts is a list; give a dictionary"),
    ],
)
def test_prompts_that_do_not_fit(segmenter: VideoSegmenter, prompts: Any, message: str) -> None:
    state = segmenter.start()
    with pytest.raises(ValueError, match=message):
        segmenter.step(state, frames(1)[0], prompts)
    state, _ = segmenter.step(state, frames(1)[0])
    with pytest.raises(ValueError, match=message):
        segmenter.correct(state, prompts)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: vr.PointPrompt([]), "points is"),
        (lambda: vr.PointPrompt([(1, 2, 3)]), "points is"),
        (lambda: vr.PointPrompt([(1, 2)], [3]), "labels is"),
        (lambda: vr.PointPrompt([(1, 2)], [1, 1]), "labels is"),
        (lambda: vr.BoxPrompt((3, 3, 3, 9)), "box is"),
        (lambda: vr.BoxPrompt((3, 3, 9)), "box is"),
        (lambda: vr.MaskPrompt(np.zeros((3, 4, 4))), "mask has shape"),
        (lambda: vr.PointPrompt((3, 4)), r"points is \(3, 4\)"),  # type: ignore[arg-type]
        (lambda: vr.PointPrompt(None), "points is None"),  # type: ignore[arg-type]
        (lambda: vr.PointPrompt([(1, 2)], 1), "labels is 1"),  # type: ignore[arg-type]
        (lambda: vr.PointPrompt([(1, 2)], [0.7]), "labels is"),  # type: ignore[list-item]
        (lambda: vr.BoxPrompt((0, 0, float("inf"), 5)), "box is"),
        (lambda: vr.BoxPrompt((float("nan"), 0, 5, 5)), "box is"),
        (lambda: vr.BoxPrompt(None), "box is None"),  # type: ignore[arg-type]
        (lambda: vr.MaskPrompt("first.png"), "mask is a str"),
        # What a segmenter returns: all of it would be the object.
        (lambda: vr.MaskPrompt(torch.full((4, 4), -3.0)), "mask > 0"),
        (lambda: vr.MaskPrompt(np.full((4, 4), np.nan)), "mask > 0"),
    ],
)
def test_prompts_that_are_none(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((64, 96), np.uint8), "must be \\(height, width, 3\\)"),
        (torch.zeros(64, 96, 3), "must be \\(3, height, width\\)"),
        (torch.zeros(3, 64, 96, dtype=torch.int64), "must be uint8"),
        (torch.zeros(3, 0, 96), "must be \\(3, height, width\\)"),
        (torch.full((3, 64, 96), 255.0), "from 255 to 255; floats must be from 0 to 1: divide by 255"),
        (torch.full((3, 64, 96), -2.0), "undo the normalisation"),
        (torch.full((3, 64, 96), float("nan")), "from nan to nan"),
    ],
)
def test_frames_that_are_none(segmenter: VideoSegmenter, frame: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segmenter.step(segmenter.start(), frame)


def test_frames_as_arrays_tensors_and_pictures(segmenter: VideoSegmenter) -> None:
    from PIL import Image

    frame = frames(1)[0]
    prompts = {1: PROMPTS["click"]}
    array = frame.permute(1, 2, 0).numpy()
    _, expected = segmenter.step(segmenter.start(), frame, prompts)
    for other in (array, Image.fromarray(array), frame.float() / 255):
        _, masks = segmenter.step(segmenter.start(), other, prompts)
        assert_close(masks[1], expected[1], atol=1e-6, rtol=0)


def test_masks_of_all_kinds() -> None:
    from PIL import Image

    mask = disk().numpy()
    kinds = [mask, mask.astype(np.uint8) * 255, mask.astype(np.uint16), mask[::-1][::-1], Image.fromarray(mask)]
    for kind in [*kinds, mask.astype(np.float64), torch.from_numpy(mask), mask.tolist()]:
        assert torch.equal(vr.MaskPrompt(kind).mask, disk())


def test_ids_of_numpy_and_torch_are_plain_numbers(segmenter: VideoSegmenter, tmp_path: Path) -> None:
    prompts = {np.int64(3): PROMPTS["click"], torch.tensor(5): PROMPTS["box"], "dog": PROMPTS["box"]}
    state, masks = segmenter.step(segmenter.start(), frames(1)[0], prompts)  # type: ignore[arg-type]
    assert list(masks) == [3, 5, "dog"]
    save_state(state, tmp_path / "state.pt")
    assert list(load_state(tmp_path / "state.pt").objects) == [3, 5, "dog"]
    with pytest.raises(ValueError, match=r"the objects are \[3, 5, 'dog'\]"):
        state.remove(4)


def test_a_later_box_takes_the_place_of_the_one_before(segmenter: VideoSegmenter) -> None:
    video = frames(1)
    state, _ = segmenter.step(segmenter.start(), video[0], {1: [vr.BoxPrompt((1, 2, 9, 9)), PROMPTS["click"]]})
    state, _ = segmenter.correct(state, {1: PROMPTS["box"]})
    prompt = state.objects[1].prompt
    assert prompt is not None
    assert prompt.labels.tolist() == [1, 2, 3]
    assert prompt.points.tolist() == [[40, 30], [26, 16], [54, 44]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_points_are_as_sharp_in_half_precision(dtype: torch.dtype) -> None:
    encoding = RandomFourier(64).to(dtype)
    places = torch.rand(200, 2)
    angles = 2 * torch.pi * (2 * places - 1) @ encoding.positional_encoding_gaussian_matrix.float()
    expected = torch.cat((angles.sin(), angles.cos()), dim=-1)
    assert_close(encoding(places).float(), expected, atol=torch.finfo(dtype).eps, rtol=0)


def test_a_stream_without_objects_costs_nothing_but_the_backbone(segmenter: VideoSegmenter) -> None:
    state, masks = segmenter.step(segmenter.start(), frames(1)[0])
    assert masks == {}
    state, masks = segmenter.step(state, frames(2)[1], {3: PROMPTS["click"]})
    assert list(masks) == [3]


@pytest.mark.parametrize("size", [(64, 96), (50, 75), (33, 130), (16, 16), (7, 9)])
def test_any_size(segmenter: VideoSegmenter, size: tuple[int, int]) -> None:
    """The aspect ratio is kept: frames are padded to whole patches and masks cropped back."""
    height, width = size
    video = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8)
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[: height // 2, : width // 2] = True
    state, found = follow(segmenter, video, {0: {1: vr.MaskPrompt(mask)}})
    assert found[1][1].shape == (height, width)
    padded = (-(-height // 16) * 16, -(-width // 16) * 16)
    assert state.framing == Framing(size, size, padded)
    assert state.objects[1].bank.frames[0].grid == (padded[0] // 16, padded[1] // 16)


def test_image_size_keeps_the_aspect_ratio() -> None:
    segmenter = make(image_size=64)
    _, found = follow(segmenter, frames(2, 72, 128), {0: {1: vr.MaskPrompt(disk(72, 128, 60, 40, 25))}})
    assert Framing.fit((72, 128), 16, 64) == Framing((72, 128), (36, 64), (48, 64))
    assert found[1][1].shape == (72, 128)
    inside, whole = found[0][1] > 0, disk(72, 128, 60, 40, 25)
    assert (inside & whole).sum() / (inside | whole).sum() > 0.9


def test_small_objects_do_not_vanish() -> None:
    """A pixel is less than half of a cell of a frame that is made smaller; others lose nothing."""
    small = make(image_size=32)
    mask = torch.zeros(256, 384, dtype=torch.bool)
    mask[100, 200] = True
    state, _ = small.step(
        small.start(), frames(1, 256, 384)[0], {1: vr.MaskPrompt(mask), 2: vr.MaskPrompt(mask & False)}
    )
    assert state.objects[1].object_score > 0 > state.objects[2].object_score
    framing = Framing.fit((256, 384), 16, 32)
    laid = framing.lay_mask(torch.stack((mask, disk(256, 384, 200, 100, 60))), (2, 2))
    # The pixel's cell is the middle of its place.
    assert laid[0, 0].nonzero().tolist() == [[8, 16]]
    plain = torch.nn.functional.interpolate(
        disk(256, 384, 200, 100, 60)[None, None].float(), size=(21, 32), mode="bilinear", antialias=True
    )
    assert torch.equal(laid[1, 0, :21], (plain[0, 0] >= 0.5).float())


@pytest.mark.parametrize("image_size", [0, -5, 16.5, "64"])
def test_image_sizes_that_are_none(image_size: Any) -> None:
    with pytest.raises(ValueError, match=r"image_size is .*; give the long side in pixels"):
        Framing.fit((64, 96), 16, image_size)


def test_points_and_masks_go_and_come_back() -> None:
    """A point in the middle of a pixel stays there; a mask that is laid and lifted is the mask."""
    framing = Framing.fit((60, 100), 16, None)
    assert framing.padded == (64, 112)
    places = framing.lay_points(torch.tensor([[0.0, 0.0], [99.0, 59.0]]))
    assert_close(places, torch.tensor([[0.5 / 112, 0.5 / 64], [99.5 / 112, 59.5 / 64]]))
    mask = disk(60, 100, 40, 30, 20)[None]
    laid = framing.lay_mask(mask, (4, 7))
    assert laid.shape == (1, 1, 64, 112)
    assert torch.equal(laid[0, 0, :60, :100] > 0, mask[0])
    assert not laid[0, 0, 60:].any()
    assert torch.equal(framing.lift(laid * 2 - 1)[0] > 0, mask[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_memory_beside_single_precision_weights(dtype: torch.dtype) -> None:
    """Failure class 42."""
    segmenter = make()
    _, expected = follow(segmenter, frames(4), {0: {1: PROMPTS["mask"]}})
    segmenter.memory_dtype = dtype
    state, found = follow(segmenter, frames(4), {0: {1: PROMPTS["mask"]}})
    assert {frame.features.dtype for frame in state.objects[1].bank.frames} == {dtype}
    assert_same(found, expected, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_precision(dtype: torch.dtype) -> None:
    segmenter = make()
    _, expected = follow(segmenter, frames(3), {0: {1: PROMPTS["mask"], 2: PROMPTS["click"]}})
    segmenter = segmenter.to(dtype)
    _, found = follow(segmenter, frames(3), {0: {1: PROMPTS["mask"], 2: PROMPTS["click"]}})
    assert found[-1][1].dtype == torch.float32
    if dtype == torch.float64:
        assert_same(found, expected, atol=1e-3)


def test_the_same_from_a_stream_and_from_a_file(segmenter: VideoSegmenter) -> None:
    """Failure class 37: ages do not depend on how long the video is."""
    video = frames(6)
    _, short = follow(segmenter, video[:4], {0: {1: PROMPTS["mask"]}})
    _, long = follow(segmenter, video, {0: {1: PROMPTS["mask"]}})
    assert_same(short, long[:4])
    clip, _ = follow(segmenter, video[:4], {0: {1: PROMPTS["mask"]}}, segmenter.start(num_frames=4))
    # SAM 2's own ages are there for those who want its numbers.
    assert clip.num_frames == 4


def test_memory_stays_bounded(segmenter: VideoSegmenter) -> None:
    """Failure classes 35 and 36: seven frames and sixteen pointers at most."""
    state, _ = segmenter.step(segmenter.start(), frames(1)[0], {1: PROMPTS["mask"]})
    sizes = []
    video = frames(32)
    for number in range(1, 60):
        state, _ = segmenter.step(state, video[number % 32])
        sizes.append(state.num_bytes())
    assert len(state.objects[1].bank.frames) == 7
    assert len(state.objects[1].bank.pointers) == 16
    assert len(set(sizes[20:])) == 1


def test_a_gate_judges_each_object_alone() -> None:
    policy = vr.MemoryPolicy(gate=Gate(object_score=0.0, mask_quality=None))
    segmenter = make(policy=policy)
    video = frames(4)
    prompts = {1: PROMPTS["mask"], 2: vr.MaskPrompt(torch.zeros(64, 96))}
    _, together = follow(segmenter, video, {0: prompts})
    for key, prompt in prompts.items():
        _, alone = follow(segmenter, video, {0: {key: prompt}})
        assert_same([{key: masks[key]} for masks in together], alone, atol=1e-5)


def test_states_in_files(segmenter: VideoSegmenter, tmp_path: Path) -> None:
    """A state goes on from its file as if nothing had happened; damage is told."""
    video = frames(6)
    state, _ = follow(segmenter, video[:3], {0: {1: PROMPTS["mask"]}, 1: {"name": PROMPTS["click"]}})  # type: ignore[dict-item]
    save_state(state, tmp_path / "state.pt")
    loaded = load_state(tmp_path / "state.pt")
    assert loaded.framing == state.framing
    assert loaded.number == 2
    _, expected = follow(segmenter, video[3:], {}, state)
    _, found = follow(segmenter, video[3:], {}, loaded)
    assert_same(found, expected)
    _, one = segmenter.correct(state, {1: PROMPTS["click"]})
    _, two = segmenter.correct(loaded, {1: PROMPTS["click"]})
    assert_same([one], [two])
    assert not (tmp_path / "state.pt.tmp").exists()
    # No more than the state: tensors that are views of larger ones are written alone.
    assert (tmp_path / "state.pt").stat().st_size < 3 * state.num_bytes() + 2_000_000
    (tmp_path / "cut.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:1000])
    torch.save({"format": "other"}, tmp_path / "other.pt")
    (tmp_path / "words.pt").write_text("# Words")
    torch.save({"format": FORMAT, "state": ()}, tmp_path / "no state.pt")
    for name in ("cut.pt", "other.pt", "no state.pt", "words.pt"):
        with pytest.raises(ValueError, match="no state of a segmenter") as refusal:
            load_state(tmp_path / name)
        assert "weights_only" not in str(refusal.value)
    with pytest.raises(FileNotFoundError, match="is no file"):
        load_state(tmp_path / "missing.pt")


def test_segmenters_can_be_copied_and_saved(segmenter: VideoSegmenter) -> None:
    other = copy.deepcopy(segmenter)
    buffer = io.BytesIO()
    torch.save(segmenter.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    _, one = follow(segmenter, frames(2), {0: {1: PROMPTS["click"]}})
    _, two = follow(other, frames(2), {0: {1: PROMPTS["click"]}})
    assert_same(one, two)


def test_training_follows_as_the_stream_does(segmenter: VideoSegmenter) -> None:
    """`forward` on clips, beside `step` frame by frame: the same masks, but for what training does otherwise."""
    video = frames(4)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (segmenter.mean, segmenter.std))
    clip = ((video.float() / 255 - mean) / std).transpose(0, 1)[None]
    masks = torch.stack([disk(), disk(x=70, y=40, radius=9)])
    outputs = segmenter(clip, torch.tensor([0, 0]), masks=masks)
    state = segmenter.start()
    for number, frame in enumerate(video):
        given = {0: vr.MaskPrompt(masks[0]), 1: vr.MaskPrompt(masks[1])} if number == 0 else None
        state, _ = segmenter.step(state, frame, given)
        out = outputs[number]
        found = Candidates(out.logits, out.qualities, out.qualities[..., None], out.scores[:, None])
        own = torch.cat([one.mask_logits for one in state.objects.values()])
        assert_close(choose_best(found).logits, own, atol=1e-4, rtol=0)
        assert_close(out.scores, torch.stack([one.object_score for one in state.objects.values()]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_a_decoder_of_one_mask(training: bool) -> None:
    """Whatever the prompt: one candidate, which is what the others' single mask would be."""
    one, several = make(num_masks=0).train(training), make(num_masks=3).train(training)
    weights = several.state_dict()
    tokens = ("mask_decoder.mask_tokens.weight", "mask_decoder.iou_prediction_head.layers.2")
    one.load_state_dict(
        {
            name: weights[name][: len(x)] if name.startswith(tokens) else weights[name]
            for name, x in one.state_dict().items()
        }
    )
    torch.manual_seed(0)
    features, places = torch.randn(2, 32, 4, 6), torch.randn(1, 24, 32)
    middle, fine = torch.randn(2, 8, 8, 12), torch.randn(2, 4, 16, 24)
    for ambiguous in (False, True):
        found = one.mask_decoder(features, places, torch.randn(2, 3, 32), middle, fine, ambiguous=ambiguous)
        assert found.logits.shape == (2, 1, 16, 24)
        assert found.qualities.shape == (2, 1)
    assert (
        several.mask_decoder(features, places, torch.randn(2, 3, 32), middle, fine, ambiguous=True).logits.shape[1] == 3
    )
    outputs = one(
        torch.randn(1, 3, 2, 32, 32), torch.tensor([0]), points=torch.ones(1, 1, 2), labels=torch.ones(1, 1).long()
    )
    assert [x.logits.shape[1] for x in outputs] == [1, 1]


def test_the_mask_of_the_frame_before() -> None:
    """As a prompt of the next frame: in a stream and in training alike; SAM 2 has none."""
    segmenter = make(previous_mask=True)
    plain = make()
    video = frames(4)
    prompts = {0: {1: PROMPTS["mask"], 2: PROMPTS["click"]}}
    state, with_it = follow(segmenter, video, prompts)
    _, without = follow(plain, video, prompts)
    assert_same(with_it[:1], without[:1])
    assert (with_it[1][1] - without[1][1]).abs().max() > 1e-3
    # Second formulation: the network's own parts, one after another.
    before, _ = follow(segmenter, video[:3], prompts)
    after, _ = segmenter.step(before, video[3])
    assert after.features is not None
    features = after.features
    with torch.no_grad():
        seen = segmenter.remember(features, before.objects[1].bank, 3)
        found = segmenter.decode(seen, features, mask_logits=before.objects[1].mask_logits)
    assert_close(choose_best(found.candidates).logits, state.objects[1].mask_logits, atol=1e-4, rtol=0)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (segmenter.mean, segmenter.std))
    clip = ((video.float() / 255 - mean) / std).transpose(0, 1)[None]
    outputs = segmenter(clip, torch.tensor([0]), masks=disk()[None])
    best = outputs[-1].logits.take_along_dim(outputs[-1].qualities.argmax(1)[:, None, None, None], dim=1)
    assert_close(best, state.objects[1].mask_logits, atol=1e-4, rtol=0)
    # Training withholds some of them, so that memory is read too.
    segmenter.train()
    torch.manual_seed(0)
    many = segmenter._withhold(torch.ones(1000, 1, 2, 2))
    assert 0.1 < float((many == 0).float().mean()) < 0.2
    assert torch.equal(segmenter.eval()._withhold(many), many)


@pytest.mark.parametrize("kind", ["masks", "points"])
def test_gradients_reach_everything(kind: str) -> None:
    segmenter = make().train()
    clip = torch.randn(2, 3, 3, 32, 48)
    owners = torch.tensor([0, 1, 1])
    if kind == "masks":
        outputs = segmenter(clip, owners, masks=torch.rand(3, 32, 48) > 0.5)
    else:
        labels = torch.tensor([[1, -1], [2, 3], [0, 1]])
        outputs = segmenter(clip, owners, points=32 * torch.rand(3, 2, 2), labels=labels)
    assert len(outputs) == 3
    assert outputs[1].logits.shape == (3, 3, 8, 12)
    loss = sum(out.logits.clamp(min=-50).square().mean() + out.qualities.sum() + out.scores.sum() for out in outputs)
    loss.backward()
    without = {name for name, x in segmenter.named_parameters() if x.grad is None}
    unused = {"memory.no_mem_pos_enc"}
    if kind == "masks":
        unused |= {"memory.no_mem_embed"} | {f"prompt_encoder.point_embeddings.{i}.weight" for i in range(4)}
    else:
        unused |= {name for name in without if "mask_downscaling" in name or name.startswith("mask_downsample")}
    assert without - unused == {name for name in without - unused if name.endswith("no_obj_embed_spatial")}


def test_training_takes_one_kind_of_prompts(segmenter: VideoSegmenter) -> None:
    with pytest.raises(ValueError, match="either points with labels, or masks"):
        segmenter(torch.zeros(1, 3, 2, 32, 32), torch.tensor([0]))


def test_extension_changes_larger_grids_alone() -> None:
    segmenter = make(train_size=(64, 64))
    prompts = {0: {1: vr.MaskPrompt(disk(64, 64, 30, 30, 12))}}
    large = {0: {1: vr.MaskPrompt(disk(128, 128, 60, 60, 24))}}
    _, small_before = follow(segmenter, frames(2, 64, 64), prompts)
    _, large_before = follow(segmenter, frames(2, 128, 128), large)
    for method in ("interpolate", "ntk", "yarn"):
        vr.set_extension(segmenter, method)
        _, small = follow(segmenter, frames(2, 64, 64), prompts)
        _, other = follow(segmenter, frames(2, 128, 128), large)
        assert_same(small, small_before)
        assert (other[1][1] - large_before[1][1]).abs().max() > 1e-4, method
    vr.set_extension(segmenter, "none")
    _, again = follow(segmenter, frames(2, 128, 128), large)
    assert_same(again, large_before)
    with pytest.raises(ValueError, match="train_size is not known"):
        make().set_extension("ntk")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sam2_hiera_tiny", {"embed_dim": 24}),
        ("resnet18", {}),
        ("vit_tiny_patch16_dinov3_qkvb", VIT),
        ("samvit_base_patch16", {**VIT, "global_attn_indexes": (1,)}),
    ],
)
def test_other_backbones(name: str, options: dict[str, Any]) -> None:
    import timm

    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    segmenter = vr.create_segmenter(name, model_options=options, **SMALL).eval()
    height, width = 2 * segmenter.stride, 3 * segmenter.stride
    _, found = follow(
        segmenter, frames(2, height, width), {0: {1: vr.PointPrompt([(20, 20)]), 2: vr.MaskPrompt(disk(height, width))}}
    )
    assert found[1][1].shape == (height, width)
    inside, whole = found[0][2] > 0, disk(height, width)
    assert (inside & whole).sum() / (inside | whole).sum() > 0.8


def test_models_that_give_no_features() -> None:
    with pytest.raises(ValueError, match="no timm model"):
        vr.create_segmenter("vit_nothing")
    with pytest.raises(ValueError, match="needs a vision transformer, or a hierarchical"):
        vr.create_segmenter(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no effect on a model that is built already"):
        vr.create_segmenter(vr.create_model("vit_tiny_patch16_224", **VIT), model_options={"img_size": 64})
    with pytest.raises(ValueError, match="strides"):
        vr.create_segmenter("levit_128s")


def test_weights_over_memory_give_what_attention_gives(segmenter: VideoSegmenter) -> None:
    """Shares times values, beside what the layer itself computes, whose weights nobody sees."""
    video = frames(4)
    state, _ = follow(segmenter, video, {0: {1: PROMPTS["mask"]}})
    cross = segmenter.memory.memory_attention.layers[-1].cross_attn_image
    seen: list[Tensor] = []
    hook = cross.out_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    weights = segmenter.memory_weights(state, 1)
    hook.remove()
    assert list(weights) == [0, 1, 2, None]
    assert all(weights[number].shape == (4, 6, 4, 6) for number in range(3))
    assert_close(sum(x.flatten(2).sum(-1) for x in weights.values()), torch.ones(4, 6))
    bank = state.objects[1].before
    entries = segmenter.memory.read_entries(bank, state.number)
    values = torch.cat([cross.v_proj(entry.features) for entry in entries], dim=1)[0]
    shares = torch.cat([x.flatten(2) for x in weights.values()], dim=-1).flatten(0, 1)
    assert_close(shares @ values, seen[0][0], atol=1e-4, rtol=0)
    # Which memory is read depends on the query.
    assert shares.std(0).max() > 1e-3
    with pytest.raises(ValueError, match="object_id is 2, which is not there"):
        segmenter.memory_weights(state, 2)
    first, _ = segmenter.step(segmenter.start(), video[0], {1: PROMPTS["mask"]})
    with pytest.raises(ValueError, match="found without memory"):
        segmenter.memory_weights(first, 1)


def resident_memory() -> int:
    """Bytes of this process in memory now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the memory of a process is read from /proc")
@pytest.mark.parametrize("num_frames", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_memory_of_the_process_stays_flat(num_frames: int) -> None:
    """Failure class 35: an iterator without a length, two objects; resident memory is measured and printed."""
    torch.manual_seed(0)
    segmenter = vr.create_segmenter(
        "vit_tiny_patch16_224", model_options={**VIT, "depth": 1}, **SMALL, decoder_depth=1
    ).eval()
    generator = torch.Generator().manual_seed(0)
    state, _ = segmenter.step(
        segmenter.start(), torch.zeros(3, 32, 32), {1: vr.PointPrompt([(9, 9)]), 2: vr.BoxPrompt((4, 4, 20, 20))}
    )
    measured = {}
    for number in range(1, num_frames):
        frame = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=generator)
        state, _ = segmenter.step(state, frame)
        if number == num_frames // 10 or number == num_frames - 1:
            measured[number] = resident_memory()
    first, last = measured.values()
    print({number: f"{size / 2**20:.1f} MiB" for number, size in measured.items()}, f"bank {state.num_bytes()} bytes")
    # A frame's memory kept for good would be 900 bytes of pointers and memory an object, its pixels 3 kB.
    assert last - first < 400 * num_frames + 2**20
