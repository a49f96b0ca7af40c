"""Whole trainings of a small segmenter on discs that move over noise: learning, resuming, two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import vision_rope as vr
from tests.test_distributed import run_two
from tests.test_segmentation_task import BACKBONE
from tests.test_trainer import assert_same_run, train_until_killed
from vision_rope import checkpoint
from vision_rope.config import TrainConfig, load_config
from vision_rope.data.davis import write_ids
from vision_rope.trainer import train

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

SIDE = 32


def write_sequences(root: Path, count: int, num_frames: int) -> None:
    """Videos in the DAVIS layout, of a bright disc that moves by more than its radius, and comes back at the border."""
    rows, columns = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    for place in range(count):
        folders = [root / name / "480p" / f"{place:02d}" for name in ("JPEGImages", "Annotations")]
        for folder in folders:
            folder.mkdir(parents=True)
        colour = 0.6 + 0.4 * torch.rand(3, 1, 1)
        centre, step = SIDE * torch.rand(2), 5 + 4 * torch.rand(2)
        for frame in range(num_frames):
            y, x = ((centre + frame * step) % SIDE).tolist()
            mask = (rows - y) ** 2 + (columns - x) ** 2 < 5**2
            picture = torch.where(mask, colour, 0.3 * torch.rand(3, SIDE, SIDE))
            pixels = (255 * picture).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(folders[0] / f"{frame:05d}.jpg", quality=95)
            write_ids(folders[1] / f"{frame:05d}.png", mask.byte())


@pytest.fixture(scope="session")
def discs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("discs")
    torch.manual_seed(0)
    write_sequences(root, count=24, num_frames=6)
    return root


def words(data: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--task", "segmentation", "--data.source", f"davis:{data}", "--data.size", str(SIDE), "--batch_size", "4"),
        *("--video.num_frames", "3", "--objects.stride", "1", "--model.options", BACKBONE, "--segmenter.dim", "32"),
        *("--segmenter.memory_dim", "16", "--segmenter.depth", "1", "--segmenter.mlp_dim", "64", "--augment.crop"),
        *("resize", "--schedule.epochs", "2", "--schedule.warmup_epochs", "0", "--optimizer.lr", "2e-3"),
        *("--run.output", str(output), "--run.num_workers", "0", "--run.device", "cpu"),
        *("--run.progress", "false", "--run.tensorboard", "false"),
        *more,
    ]


@pytest.fixture
def configure(discs: Path, tmp_path: Path):
    def build(*more: str, output: str = "run") -> TrainConfig:
        return load_config(words(discs, tmp_path / output, *more))

    return build


def test_training_learns_to_follow_and_the_run_is_a_segmenter(configure, tmp_path: Path) -> None:
    """Far better than the first mask kept where it was; loaded again, it streams what validation saw."""
    more = ["--objects.clips_per_video", "4", "--schedule.epochs", "3", "--schedule.warmup_epochs", "0.5"]
    config = configure(*more, "--segmenter.dropout", "0", "--evaluation.every", "3", "--ema_decay", "0.9")
    result = train(config)
    assert result.rows[-1]["train_loss"] < 0.5 * result.rows[0]["train_loss"]
    best = result.best
    assert best["val_j"] > best["val_j_copied"] + 0.3
    assert best["val_images"] == best["val_objects"] == 6
    assert len(best["val_j_by_frame"]) == 3
    assert (tmp_path / "run" / "masks" / "epoch-0003.png").is_file()

    from vision_rope.parallel import Distributed
    from vision_rope.preparation import create_loaders

    segmenter = vr.VideoSegmenter.load(tmp_path / "run")
    _, _, loader = create_loaders(config, Distributed(torch.device("cpu")))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (config.data.mean, config.data.std))
    overlaps = []
    for clips, *_ in loader:
        for frames, ids in zip(clips.frames, clips.ids, strict=True):
            state = segmenter.start()
            state, _ = segmenter.step(state, frames[:, 0] * std + mean, {1: vr.MaskPrompt(ids[0] == 1)})
            for place in (1, 2):
                state, masks = segmenter.step(state, frames[:, place] * std + mean)
                found, truth = masks[1] > 0, ids[place] == 1
                overlaps.append(((found & truth).sum() / (found | truth).sum()).item())
    assert sum(overlaps) / len(overlaps) == pytest.approx(best["val_j"], abs=0.02)


def test_a_killed_and_resumed_run_equals_the_unbroken_one(configure, tmp_path, monkeypatch) -> None:
    """Bit for bit, with all kinds of prompts, dropout, averaged weights and accumulated gradients."""
    random = [
        *("--ema_decay", "0.9", "--optimizer.accumulate", "2", "--segmenter.mask_prompts", "0.4"),
        *("--segmenter.box_prompts", "0.3", "--segmenter.dropout", "0.3", "--augment.crop", "random-resized"),
        *("--augment.scale", "[0.5, 1]", "--model.options.drop_path_rate", "0.3", "--model.position", "rope-vit-mixed"),
    ]
    train(configure(*random, output="unbroken"))
    train_until_killed(configure(*random), 3, monkeypatch)
    torch.manual_seed(1234)
    train(load_config(["--run.resume", "--run.output", str(tmp_path / "run")]))
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


def _train_twice(data: str, folder: str) -> None:
    train(load_config(words(Path(data), Path(folder, "two"), *SURE)))
    train(load_config(words(Path(data), Path(folder, "mixed"), *MIXED)))


# Nothing that each process draws for itself; and prompts that each of them does.
SURE = [
    *("--segmenter.mask_prompts", "1", "--segmenter.box_prompts", "0", "--segmenter.dropout", "0"),
    *("--segmenter.previous_mask", "false"),
]
MIXED = ["--segmenter.mask_prompts", "0.3", "--segmenter.box_prompts", "0.4", "--schedule.epochs", "1"]


def read_rows(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: row[key] for key in row if key not in ("seconds", "images_per_second", "clips_per_second")}
        for row in rows
    ]


def test_two_processes_train_as_one(discs: Path, tmp_path: Path) -> None:
    """Equal losses and figures, each clip measured once; kinds of prompts may differ between processes."""
    run_two(_train_twice, str(discs), str(tmp_path))
    train(load_config(words(discs, tmp_path / "one", *SURE)))
    one, two = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    for first, second in zip(one, two, strict=True):
        by_frame = first.pop("val_j_by_frame"), second.pop("val_j_by_frame")
        assert second == pytest.approx(first, rel=2e-3)
        assert by_frame[1] == pytest.approx(by_frame[0], rel=2e-3)
    weights: list[dict[str, Tensor]] = [
        checkpoint.load_weights(tmp_path / name / "last" / "model.safetensors")[0] for name in ("one", "two")
    ]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    assert len(read_rows(tmp_path / "mixed")) == 1


def test_other_commands_on_a_run(configure, tmp_path: Path) -> None:
    """The backbone's frequencies can be looked at; there are no classes to probe for."""
    from vision_rope.inspection_targets import open_inspection_target
    from vision_rope.probe import probe

    train(configure("--schedule.epochs", "1"))
    with pytest.raises(ValueError, match="run of task segmentation, whose clips have no classes"):
        probe(tmp_path / "run", k=3, progress=False)
    found = open_inspection_target(str(tmp_path / "run"))
    assert found.patch_size == (8, 8)
    assert found.notes[0] == "These are the pairs of the backbone."
    assert found.command == f"vision-rope evaluate {tmp_path / 'run'} --data davis:PATH"
