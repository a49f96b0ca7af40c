"""The task of following objects: batches of clips, shares of objects, first weights, refused configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vision_rope as vr
from vision_rope import checkpoint, first_weights
from vision_rope.config import SegmenterConfig, TrainConfig, load_config, to_yaml
from vision_rope.data.segmented_clips import SegmentedClips
from vision_rope.model_building import build_model
from vision_rope.optimization import create_optimizer
from vision_rope.prompting import choose_kind
from vision_rope.rules import check_config
from vision_rope.segmentation_losses import clip_losses
from vision_rope.segmentation_task import Segmentation, find_objects, paint
from vision_rope.tasks import create_task

BACKBONE = "{patch_size: 8, embed_dim: 48, depth: 2, num_heads: 3, class_token: false, global_pool: ''}"
WORDS = [
    *("--task", "segmentation", "--data.source", "davis:somewhere", "--data.size", "16", "--video.num_frames", "3"),
    *("--model.options", BACKBONE, "--segmenter.dim", "32", "--segmenter.memory_dim", "16", "--segmenter.depth", "1"),
    *("--segmenter.mlp_dim", "32"),
]


def make_clips(ids: Tensor) -> SegmentedClips:
    batch, num_frames, height, width = ids.shape
    return SegmentedClips(torch.randn(batch, 3, num_frames, height, width), ids, torch.zeros(batch, num_frames))


def make_ids() -> Tensor:
    """Of three clips, the first has objects 2 and 7, the second none at first, the third object 1, which leaves."""
    ids = torch.zeros(3, 3, 16, 16, dtype=torch.uint8)
    ids[0, :, 2:6, 3:9] = 7
    ids[0, :, 9:14, 1:5] = 2
    ids[0, 1:, 0:2] = 5
    ids[1, 1:, 4:8] = 3
    ids[2, :2, 5:12, 5:12] = 1
    return ids


def make_task(**options: Any) -> Segmentation:
    return Segmentation(SegmenterConfig(**options), 3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))


def make_model(*more: str) -> Any:
    return build_model(load_config([*WORDS, *more]), 1)


# ---- batches


def test_objects_are_those_of_first_frames():
    owners, numbers = find_objects(make_ids())
    assert owners.tolist() == [0, 0, 2]
    assert numbers.tolist() == [2, 7, 1]


def test_a_batch_holds_the_masks_of_each_object():
    ids = make_ids()
    clips = make_clips(ids)
    frames, owners, points, labels, masks = make_task().eval_batch(clips, torch.zeros(3), None).inputs
    targets = make_task().eval_batch(clips, torch.zeros(3), None).targets
    assert frames is clips.frames
    assert points is labels is None
    for place, (clip, number) in enumerate(((0, 2), (0, 7), (2, 1))):
        assert torch.equal(targets.masks[place], ids[clip] == number)
        assert torch.equal(masks[place], ids[clip, 0] == number)
    assert owners.tolist() == [0, 0, 2]
    torch.testing.assert_close(targets.shares, torch.tensor([1 / 6, 1 / 6, 1 / 3]))
    assert targets.num_clips == 3


def test_training_draws_one_kind_a_batch_by_its_seed():
    task, clips = make_task(mask_prompts=0.4, box_prompts=0.3), make_clips(make_ids())
    seen = set()
    for seed in range(30):
        batch, again = (task.train_batch(clips, torch.zeros(3), seed) for _ in range(2))
        torch.testing.assert_close(batch.inputs, again.inputs, rtol=0, atol=0)
        _, _, points, labels, masks = batch.inputs
        kind = "mask" if masks is not None else "box" if labels.shape[1] == 2 else "point"
        assert kind == choose_kind(0.4, 0.3, seed)
        assert (points is None) == (labels is None) == (kind == "mask")
        seen.add(kind)
    assert seen == {"mask", "box", "point"}


def test_the_loss_is_the_mean_over_clips_of_the_mean_over_objects():
    """So that the mean over processes, each with its clips, is the loss of all."""
    task, clips = make_task(), make_clips(make_ids())
    model = make_model().eval()
    with torch.no_grad():
        whole = task.eval_batch(clips, torch.zeros(3), None)
        outputs = model(*whole.inputs)
        losses = clip_losses(outputs, whole.targets.masks, SegmenterConfig())
        loss = task.loss(outputs, whole.targets)
        torch.testing.assert_close(loss, (losses[:2].mean() + 0 + losses[2]) / 3)
        parts = []
        for place in range(3):
            one = SegmentedClips(*(part[place : place + 1] for part in clips))
            batch = task.eval_batch(one, torch.zeros(1), None)
            parts.append(task.loss(model(*batch.inputs), batch.targets))
    torch.testing.assert_close(loss, torch.stack(parts).mean())


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=["mask", "box", "point"])
def test_a_batch_without_objects_has_a_loss_of_zero_with_gradients(shares):
    mask, box = shares
    task, model = make_task(mask_prompts=mask, box_prompts=box), make_model()
    clips = make_clips(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    batch = task.train_batch(clips, torch.zeros(2), 0)
    loss = task.loss(model(*batch.inputs), batch.targets)
    assert loss.item() == 0
    loss.backward()
    touched = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert any(name.startswith("backbone.") for name in touched)
    assert any(name.startswith("memory.") for name in touched)
    assert all(model.get_parameter(name).grad.abs().max() == 0 for name in touched)


def test_pictures_of_masks(tmp_path):
    task, clips = make_task(), make_clips(make_ids())
    batch = task.eval_batch(clips, torch.zeros(3), None)
    with torch.no_grad():
        outputs = make_model().eval()(*batch.inputs)
    path = task.draw(batch, {"predicted": outputs}, tmp_path / "masks" / "1.png")
    assert path.stat().st_size > 1000
    mask = torch.zeros(1, 2, 2, dtype=torch.bool)
    mask[0, 0, 0] = True
    painted = paint(torch.full((3, 2, 2), 0.5), mask, strength=1.0)
    # 0072B2, the first colour.
    torch.testing.assert_close(painted[:, 0, 0], torch.tensor([0, 0x72 / 255, 0xB2 / 255]))
    assert (painted[:, 1] == 0.5).all()


# ---- models


def test_the_model_of_a_configuration():
    config = load_config([*WORDS, "--data.train_sizes", "16x24,32x16", "--data.mean", "[0.1, 0.2, 0.3]"])
    check_config(config)
    model: Any = build_model(config, 1)
    assert isinstance(model, vr.VideoSegmenter)
    assert (model.image_size, model.train_size, model.stride) == (32, (32, 24), 8)
    assert model.mean == (0.1, 0.2, 0.3)
    assert isinstance(create_task(config, 1, (8, 8)), Segmentation)
    assert checkpoint.describe_position(model)["position"] == "rope-vit-axial"
    assert checkpoint.describe_position(model)["pairing"] == "interleaved"


def test_learned_frequencies_are_not_decayed():
    config = load_config([*WORDS, "--model.position", "rope-vit-mixed"])
    model: Any = build_model(config, 1)
    rope = model.backbone.trunk.position
    optimizer = create_optimizer(model, config.optimizer)
    (group,) = [group for group in optimizer.param_groups if any(p is rope.frequencies for p in group["params"])]
    assert group["weight_decay"] == 0
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert id(model.memory.memory_attention.layers[0].linear1.weight) in decayed


def test_first_weights_of_a_segmenter_and_of_its_backbone(tmp_path: Path):
    """A segmenter's own are taken whole; those of an image model, of its other head too, are the backbone's."""
    config = load_config(WORDS)
    trained, model = (build_model(config, 1) for _ in range(2))
    checkpoint.save_model(tmp_path / "segmenter.safetensors", trained)
    assert first_weights.load_start(model, tmp_path / "segmenter.safetensors") == []
    torch.testing.assert_close(model.state_dict(), trained.state_dict(), rtol=0, atol=0)

    images = vr.create_model(
        "vit_small_patch16_224", position="rope-vit-axial", num_classes=5, img_size=16, patch_size=8, embed_dim=48,
        depth=2, num_heads=3, class_token=False, global_pool="",
    )  # fmt: skip
    checkpoint.save_model(tmp_path / "images.safetensors", images)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fresh = first_weights.load_start(model, tmp_path / "images.safetensors")
    after = model.state_dict()
    assert all(name not in fresh for name in after if name.startswith("backbone.trunk."))
    assert "memory.maskmem_tpos_enc" in fresh
    for name, value in images.state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(after[f"backbone.trunk.{name}"], value, rtol=0, atol=0)
    for name in fresh:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)


@pytest.mark.parametrize("position", ["rope-vit-mixed", "learned", "t5"])
def test_first_weights_of_a_run_of_another_size(tmp_path: Path, position: str) -> None:
    """Files of runs tell their configuration: pseudo-videos at one size come before real ones at another."""
    words = [*WORDS, "--model.position", position]
    if position == "t5":
        words += ["--model.position_options", "{max_distance: 2}"]
    small, large = load_config(words), load_config([*words, "--data.size", "16x32"])
    trained, model = build_model(small, 1), build_model(large, 1)
    path = tmp_path / "best.safetensors"
    checkpoint.save_weights(path, trained.state_dict(), {"config": to_yaml(small)})
    assert first_weights.load_start(model, tmp_path) == []
    moved = {"backbone.trunk.pos_embed"} if position == "learned" else set()
    before, after = trained.state_dict(), model.state_dict()
    assert {name for name in after if not torch.equal(before[name], after[name])} == moved


# ---- configurations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.source", "frames:x"], r"has no masks of objects, .*; choose davis:, pseudo:"),
        (["--data.source", "folder:x"], r"has no masks of objects, .*; choose davis:, pseudo:"),
        (["--task", "classification", "--video.tubelet", "1"], "but it gives clips with the masks of objects"),
        (["--video.num_frames", "none"], "it gives clips, which need video.num_frames"),
        (["--video.num_frames", "1"], "video.num_frames is 1, but it must be at least 2 with task segmentation"),
        (["--video.fps", "4"], "video.fps is 4.0, but it would have no effect with task segmentation"),
        (["--video.tubelet", "1"], "video.tubelet is 1, but it would have no effect with task segmentation"),
        (["--evaluation.sizes", "16,32"], "evaluation.sizes is .*, but it would have no effect with task segmentation"),
        (["--optimizer.layer_decay", "0.5"], "optimizer.layer_decay is 0.5, but it would have no effect"),
        (["--augment.erasing", "0.2"], "augment.erasing is 0.2, but it would hide objects"),
        (["--augment.mixup", "0.2"], "augment.mixup is 0.2, but it would have no effect"),
        (["--segmenter.depth", "0"], "segmenter.depth is 0, but it must be at least 1"),
        (["--segmenter.dropout", "1"], "segmenter.dropout is 1.0, but it must be at least 0 and below 1"),
        (["--segmenter.mask_prompts", "1.5"], "segmenter.mask_prompts is 1.5, but it is a share"),
        (["--segmenter.box_prompts", "0.6"], "segmenter.box_prompts is 0.6, but it is a share of what .* = 0.5 leaves"),
        (["--segmenter.quality", "-1"], "segmenter.quality is -1.0, but it must not be negative"),
        (["--segmenter.bce", "0", "--segmenter.dice", "0"], "segmenter.dice is 0.0, but it must be positive where"),
    ],
)  # fmt: skip
def test_refusals(words: list[str], message: str) -> None:
    check_config(load_config(WORDS))
    with pytest.raises(ValueError, match=message):
        check_config(load_config([*WORDS, *words]))


def test_the_section_is_for_its_task_alone():
    with pytest.raises(ValueError, match=r"segmenter\.dim is 64, but it would have no effect with task classification"):
        check_config(load_config(["--segmenter.dim", "64"]))
    assert TrainConfig().segmenter == SegmenterConfig()


def test_a_segmenter_cannot_be_built_of_any_options():
    with pytest.raises(ValueError, match=r"model\.options holds num_classes"):
        make_model("--model.options.num_classes", "3")
    with pytest.raises(ValueError, match="vit_smal_patch16_224"):
        make_model("--model.name", "vit_smal_patch16_224")
