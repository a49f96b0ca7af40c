"""Masked prediction of clips: masks in time, tubelets, references and models, against counts, slices and loops."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vision_rope
from vision_rope import plots
from vision_rope.config import MaskedConfig, TrainConfig, VideoConfig
from vision_rope.data.clips import Clips
from vision_rope.losses import masked_loss
from vision_rope.masked_model import MaskedModel, create_decoder
from vision_rope.masking import draw_masks, paste, patchify, unpatchify
from vision_rope.metrics import MaskedMetrics
from vision_rope.references import REFERENCES, MeanColour, NearestFrame, NeighbourAverage, create_references
from vision_rope.rules import check_config
from vision_rope.tasks import MaskedPrediction, create_task

TUBELET = (2, 4, 3)
GRID = (3, 2, 4)
KINDS = ["all", "visible"]


def drawn(*args, seed: int = 0, **options) -> Tensor:
    return draw_masks(*args, **options, generator=torch.Generator().manual_seed(seed))


def example(batch: int = 2, ratio: float = 0.5) -> tuple[Tensor, Tensor]:
    size = [patch * length for patch, length in zip(TUBELET, GRID, strict=True)]
    return torch.randn(batch, 3, *size), drawn(batch, GRID, ratio=ratio)


# ---- masks and tubelets


@pytest.mark.parametrize(
    ("grid", "block", "steps", "ratio"),
    [((4, 6, 6), 2, 2, 0.5), ((3, 4, 5), 2, 3, 0.4), ((5, 3, 3), 1, 2, 0.5), ((2, 8, 4), 4, 1, 0.6)],
)
def test_blocks_of_space_and_time_are_whole_but_for_one(grid, block, steps, ratio):
    patterns = set()
    for mask in drawn(30, grid, ratio=ratio, block=block, block_steps=steps).numpy():
        assert mask.sum() == round(ratio * math.prod(grid))
        cut = 0
        for first in range(0, grid[0], steps):
            for top in range(0, grid[1], block):
                for left in range(0, grid[2], block):
                    cube = mask[first : first + steps, top : top + block, left : left + block]
                    if 0 < cube.sum() < cube.size:
                        cut += 1
                        assert cube.ravel()[: cube.sum()].all()
        assert cut <= 1
        patterns.add(mask.tobytes())
    assert len(patterns) > 1


@pytest.mark.parametrize("block", [1, 2])
def test_tubes_hide_a_place_in_all_steps(block):
    masks = drawn(20, (5, 4, 6), ratio=1 / 3, block=block, block_steps=None)
    assert torch.equal(masks, masks[:, :1].expand_as(masks))
    assert masks[:, 0].flatten(1).sum(1).tolist() == [8] * 20
    assert len(masks.flatten(1).unique(dim=0)) > 5
    # A number that tubes do not divide cuts one of them.
    cut = drawn(20, (5, 4, 6), ratio=0.34, block_steps=None)
    assert cut.flatten(1).sum(1).tolist() == [41] * 20
    assert ((cut.any(1) != cut.all(1)).flatten(1).sum(1) == 1).all()


def test_one_step_has_the_masks_of_an_image():
    images = drawn(4, (5, 6), ratio=0.5, block=2)
    assert torch.equal(drawn(4, (1, 5, 6), ratio=0.5, block=2)[:, 0], images)


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ((2, 3, 3), {"block": 3, "block_steps": 2}, "a grid of 2 x 3 x 3 patches is one such square"),
        ((2, 3, 3), {"block": 3, "block_steps": None}, "a grid of 2 x 3 x 3 patches is one such square"),
        ((2, 3, 3), {"block_steps": 0}, "block_steps is 0, but a block lasts at least 1 step; none hides all steps"),
        ((1, 1, 1), {}, "grid is 1 x 1 x 1, but at least one patch must be masked"),
    ],
)
def test_blocks_that_leave_no_choice_are_refused(grid, options, message):
    with pytest.raises(ValueError, match=message):
        draw_masks(2, grid, ratio=0.5, **options)
    draw_masks(2, (2, 3, 3), ratio=0.5, block=3)  # whole frames: there are two


def test_tubelets_are_slices_in_order():
    clips, _ = example()
    tubelets = patchify(clips, TUBELET)
    assert tubelets.shape == (2, math.prod(GRID), math.prod(TUBELET) * 3)
    for place, (step, row, column) in enumerate(np.ndindex(GRID)):
        part = clips[:, :, 2 * step : 2 * step + 2, 4 * row : 4 * row + 4, 3 * column : 3 * column + 3]
        assert torch.equal(tubelets[:, place], part.permute(0, 2, 3, 4, 1).flatten(1))
    assert torch.equal(unpatchify(tubelets, GRID, TUBELET), clips)


@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
def test_losses_metrics_and_pasting_know_tubelets(target):
    clips, masks = example()
    predictions = torch.randn(2, math.prod(GRID), math.prod(TUBELET) * 3)
    errors, squares = [], []
    for b in range(2):
        for place, index in enumerate(np.ndindex(GRID)):
            if not masks[b][index]:
                continue
            true = patchify(clips[b : b + 1], TUBELET)[0, place].double()
            if target == "patch-normalized":
                true = (true - true.mean()) / (true.var() + 1e-6).sqrt()
            errors.append((predictions[b, place].double() - true).square())
            squares.append(true.square())
    mse, reference = float(torch.cat(errors).mean()), float(torch.cat(squares).mean())
    assert float(masked_loss(predictions, clips, masks, TUBELET, target)) == pytest.approx(mse, rel=1e-5)
    metrics = MaskedMetrics(TUBELET, target)
    metrics.update(predictions, (clips, masks))
    found = metrics.compute()
    assert found == {"r2": pytest.approx(1 - mse / reference), "mse": pytest.approx(mse), "images": 2}
    pasted = paste(clips, predictions, masks, TUBELET, target)
    hidden = masks
    for axis, length in enumerate(TUBELET, start=1):
        hidden = hidden.repeat_interleave(length, axis)
    hidden = hidden[:, None].expand_as(clips)
    assert torch.equal(pasted[~hidden], clips[~hidden])
    assert not (pasted[hidden] == clips[hidden]).any()


# ---- references


def by_hand(name: str, clips: Tensor, masks: Tensor, step_size: float = 0.5) -> Tensor:
    tubelets = patchify(clips, TUBELET).double().unflatten(2, (-1, 3)).numpy()
    places = list(np.ndindex(GRID))
    answers = np.zeros_like(tubelets)
    for b in range(len(clips)):
        visible = [index for index in places if not masks[b][index]]
        colours = {index: tubelets[b, places.index(index)].mean(0) for index in visible}
        for n, (t, row, column) in enumerate(places):
            if name == "nearest frame":
                same = sorted((abs(i - t), i) for i, r, c in visible if (r, c) == (row, column))
                if same:
                    answers[b, n] = tubelets[b, places.index((same[0][1], row, column))]
                    continue
            flat = name == "visible mean"
            weights = [
                1.0 if flat else math.exp(-math.hypot(step_size * (i - t), r - row, c - column) / 0.35)
                for i, r, c in visible
            ]
            answers[b, n] = sum(w * colours[index] for w, index in zip(weights, visible, strict=True)) / sum(weights)
    return torch.from_numpy(answers).flatten(2).float()


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("ratio", [0.5, 0.8])
def test_references_equal_their_definition(name, ratio):
    clips, masks = example(ratio=ratio)
    if ratio == 0.8:
        assert masks.all(1).any(), "a place is hidden in all steps"
    predictions = REFERENCES[name](TUBELET)(clips, masks, torch.zeros(2, 6))
    expected = by_hand(name, clips, masks)
    hidden = masks.flatten(1)
    torch.testing.assert_close(predictions[hidden], expected[hidden], rtol=1e-4, atol=1e-5)


def test_a_step_can_count_less_than_a_patch():
    clips, masks = example()
    predictions = NeighbourAverage(TUBELET, step=0.25)(clips, masks)
    expected = by_hand("neighbour average", clips, masks, 0.25)
    torch.testing.assert_close(predictions, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_do_not_look_at_what_is_hidden(name):
    clips, masks = example()
    flat = torch.full((2, math.prod(GRID), math.prod(TUBELET) * 3), 7.0)
    others = paste(clips, flat, masks, TUBELET, "pixels")
    reference = REFERENCES[name](TUBELET)
    hidden = masks.flatten(1)
    torch.testing.assert_close(reference(clips, masks)[hidden], reference(others, masks)[hidden])


def test_the_nearest_frame_explains_a_clip_that_stands_still():
    clips, _ = example()
    still = clips[:, :, :1].expand_as(clips)
    masks = torch.zeros(2, *GRID, dtype=torch.bool)
    masks[:, 1] = True
    torch.testing.assert_close(NearestFrame(TUBELET)(still, masks), patchify(still, TUBELET))


def test_images_have_no_nearest_frame():
    assert list(create_references((4, 4))) == ["visible mean", "neighbour average"]
    assert (
        list(create_references((2, 4, 4))) == list(REFERENCES) == ["visible mean", "neighbour average", "nearest frame"]
    )
    assert isinstance(create_references((2, 4, 4))["visible mean"], MeanColour)


# ---- the model


def make_model(kind: str, position: str = "axial-3d", **options) -> MaskedModel:
    shape = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 0}
    encoder = vision_rope.video_vit(
        "vit_small_patch16_224", num_frames=6, tubelet=(2, 4, 4), position=position, **shape, **options
    )
    decoder = create_decoder(encoder, position=position, dim=48, depth=1, num_heads=2) if kind == "visible" else None
    model = MaskedModel(encoder, decoder)
    for parameter in (model.head.weight, model.mask_token):
        nn.init.normal_(parameter)
    return model.eval()


def clips_and_masks(steps: int = 3, rows: int = 2, columns: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 2 * steps, 4 * rows, 4 * columns), drawn(2, (steps, rows, columns), ratio=0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", ["axial-3d", "mixed-3d", "qwen3-vl", "learned", "rope-vit-axial", "none"])
def test_hidden_tubelets_are_not_looked_at_and_all_parameters_learn(kind, position):
    model = make_model(kind, position)
    clips, masks = clips_and_masks(steps=4, rows=3, columns=2)
    predictions = model(clips, masks)
    assert predictions.shape == (2, 24, 2 * 4 * 4 * 3)
    others = paste(clips, torch.randn_like(predictions), masks, (2, 4, 4), "pixels")
    torch.testing.assert_close(model(others, masks), predictions, rtol=0, atol=0)
    masked_loss(predictions, clips, masks, model.patch_size, "pixels").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_visible_equals_its_steps_by_hand():
    model = make_model("visible", class_token=False, global_pool="avg")
    clips, masks = clips_and_masks()
    patches = model.encoder.embed_patches(clips)
    answers = []
    for b in range(2):
        seen = [place for place in range(18) if not masks[b].flatten()[place]]
        encoded = model.encoder.forward_patches(patches[b : b + 1], kept=torch.tensor([seen]))
        encoded = model.decoder_embed(model.encoder.fc_norm(encoded))[0]
        tokens = model.mask_token.repeat(18, 1)
        tokens[seen] = encoded
        answers.append(model.head(model.decoder.forward_patches(tokens.view(1, 3, 2, 3, 48)))[0])
    torch.testing.assert_close(model(clips, masks), torch.stack(answers))


@pytest.mark.parametrize("kind", KINDS)
def test_seconds_reach_encoder_and_decoder(kind):
    model = make_model(kind, positions_per_second=2.0)
    plain = make_model(kind)
    plain.load_state_dict(model.state_dict())
    clips, masks = clips_and_masks()
    # A step lasts two frames and half a second, one position: the same as counting steps.
    seconds = (torch.arange(6) / 4).expand(2, -1)
    torch.testing.assert_close(model(clips, masks, seconds), plain(clips, masks))
    torch.testing.assert_close(plain(clips, masks, 3 * seconds), plain(clips, masks), rtol=0, atol=0)
    assert not torch.allclose(model(clips, masks, 3 * seconds), plain(clips, masks), atol=1e-3)
    if kind == "visible":
        mixed = copy.deepcopy(model)
        mixed.decoder = plain.decoder
        assert not torch.allclose(mixed(clips, masks, 3 * seconds), model(clips, masks, 3 * seconds), atol=1e-4)


def test_masks_of_another_grid_and_factorised_attention_without_all_tubelets_are_refused():
    model = make_model("all")
    clips, masks = clips_and_masks()
    with pytest.raises(
        ValueError, match=r"masks have shape .* patches \(2, 3, 2, 3\): \(batch, steps, rows, columns\)"
    ):
        model(clips, masks[:, :2])
    make_model("all", attention="factorised")(clips, masks)
    with pytest.raises(ValueError, match=r"attention is factorised, .*masked.encoder: all"):
        make_model("visible", attention="factorised")


# ---- the task


def masked_task(**options) -> MaskedPrediction:
    return MaskedPrediction(MaskedConfig(**options), TUBELET, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.1))


def make_clips(count: int) -> Clips:
    size = [patch * length for patch, length in zip(TUBELET, GRID, strict=True)]
    return Clips(torch.randn(count, 3, *size), torch.arange(6.0).expand(count, -1))


def test_batches_hold_frames_masks_and_seconds():
    task, clips, labels = masked_task(ratio=0.4, block_steps=None), make_clips(5), torch.zeros(5)
    batch = task.train_batch(clips, labels, 3)
    frames, masks, seconds = batch.inputs
    assert frames is clips.frames
    assert seconds is clips.seconds
    assert masks.shape == (5, *GRID)
    assert batch.targets == (frames, masks)
    assert torch.equal(masks, drawn(5, GRID, ratio=0.4, block_steps=None, seed=3))
    whole = task.eval_batch(clips, labels, torch.arange(5)).inputs[1]
    order = torch.tensor([4, 1])
    part = Clips(clips.frames[order], clips.seconds[order])
    assert torch.equal(task.eval_batch(part, labels[order], order).inputs[1], whole[order])


def test_a_size_is_checked_with_its_frames():
    task = masked_task(block=4, block_steps=3)
    task.check_size((8, 8, 12))
    with pytest.raises(ValueError, match=r"size 8x12 cannot be masked: block is 4, but a grid of 3 x 2 x 4"):
        task.check_size((6, 8, 12))


def test_pictures_show_frames_of_two_clips(monkeypatch, tmp_path):
    seen: dict[str, Tensor] = {}
    monkeypatch.setattr(plots, "plot_images", lambda images, path: seen.update(images))
    task, clips = masked_task(), make_clips(5)
    batch = task.eval_batch(clips, torch.zeros(5), torch.arange(5))
    truth = patchify(clips.frames, TUBELET)
    task.draw(batch, {"true": truth}, tmp_path / "a.png")
    assert list(seen) == ["image", "visible", "true"]
    places = [0, 2, 3, 5]
    for clip in range(2):
        shown = seen["image"][4 * clip : 4 * clip + 4]
        expected = clips.frames[clip, :, places].transpose(0, 1)
        expected = expected * torch.tensor([0.2, 0.25, 0.1]).view(3, 1, 1) + torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
        torch.testing.assert_close(shown, expected.clamp(0, 1))
    torch.testing.assert_close(seen["true"], seen["image"])
    assert not torch.equal(seen["visible"], seen["image"])


def test_the_configuration_names_the_tubelet():
    config = TrainConfig(task="masked", video=VideoConfig(num_frames=6, tubelet=2))
    task = create_task(config, 1, (4, 3))
    assert task.train_batch(make_clips(2), torch.zeros(2), 0).inputs[1].shape == (2, *GRID)
    with pytest.raises(ValueError, match=r"masked.block_steps is 2, but it counts steps of clips"):
        check_config(TrainConfig(task="masked", masked=MaskedConfig(block_steps=2)))
