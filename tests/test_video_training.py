"""Runs on clips: configuration, first weights, training, resumption, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vision_rope
from tests.test_trainer import assert_same_run, train_until_killed
from vision_rope import checkpoint, first_weights
from vision_rope.config import TrainConfig, load_config
from vision_rope.evaluate import evaluate
from vision_rope.preparation import build_start
from vision_rope.probe import probe
from vision_rope.rules import check_config
from vision_rope.targets import open_split
from vision_rope.trainer import main, train

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TINY = "{patch_size: 8, embed_dim: 48, depth: 2, num_heads: 3}"
EVERYTHING_RANDOM = [
    *("--ema_decay", "0.9", "--augment.mixup", "0.4", "--augment.cutmix", "1", "--augment.erasing", "0.5"),
    *("--optimizer.accumulate", "2", "--augment.three_augment", "--augment.color_jitter", "0.3"),
    *("--data.train_sizes", "16,16x24", "--model.options.drop_path_rate", "0.3"),
]


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise, a dark and a light one, as folders of 9 frames: 9 clips to train on, 6 to validate."""
    folder = tmp_path_factory.mktemp("clips")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 9), ("val", 6)):
        for clip in range(count):
            light = clip % 2
            inside = folder / split / ("dark", "light")[light] / f"{clip}"
            inside.mkdir(parents=True)
            for frame in range(9):
                noise = torch.randn(18, 26, 3, generator=generator) * 60 + 110 + 25 * light
                Image.fromarray(noise.clamp(0, 255).byte().numpy()).save(inside / f"{frame}.png")
    return folder


@pytest.fixture
def configure(clips: Path, tmp_path: Path):
    def build(*more: str, output: str = "run") -> TrainConfig:
        return load_config(
            [
                *("--data.source", f"frames:{clips}", "--data.size", "16", "--batch_size", "4"),
                *("--video.num_frames", "4", "--video.fps", "15", "--model.position", "qwen2-vl"),
                *("--model.options", TINY, "--schedule.epochs", "2", "--schedule.warmup_epochs", "1"),
                *("--run.output", str(tmp_path / output), "--run.num_workers", "0", "--run.device", "cpu"),
                *("--run.progress", "false", "--run.tensorboard", "false"),
                *more,
            ]
        )

    return build


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--video.num_frames", "0"], "video.num_frames is 0, but it must be at least 1"),
        (["--video.num_frames", "3"], "video.num_frames is 3, but it must be a multiple of video.tubelet = 2"),
        (["--video.tubelet", "0"], "video.tubelet is 0"),
        (["--video.fps", "0"], "video.fps is 0.0, but it must be positive"),
        (["--video.fps", "-2"], r"video.fps is -2.0"),
        (["--video.fps", ".inf"], "video.fps is inf"),
        (["--video.positions_per_second", "0"], "video.positions_per_second is 0.0"),
        (["--data.source", str(Path(__file__).parent)], r"needs clips; choose .*; did you mean videos:.*tests\?"),
        (["--data.source", "video:x/y"], r"needs clips; choose .*; did you mean videos:x/y\?"),
        (["--data.source", "frame:x"], r"needs clips; choose .*; did you mean frames:x\?"),
        (["--data.source", "folder:tests"], r"leave video\.num_frames out$"),
        (["--data.source", "elpv"], "data.source is elpv, but it gives images, and video.num_frames = 4 needs clips"),
        (["--model.attention", "linear"], "model.attention is linear, but it is not there for clips"),
        (["--video.decoder", "torchcodec"], "video.decoder is torchcodec, but it would have no effect"),
        (
            ["--data.source", "videos:x", "--video.decoder", "nvdec", "--run.num_workers", "2"],
            "video.decoder is nvdec, but it takes run.num_workers 0",
        ),
        (["--video.num_frames", "none"], r"data.source is frames:.*, but it gives clips, which need video.num_frames"),
        (
            ["--video.num_frames", "none", "--data.source", "elpv"],
            "video.fps is 15.0, but it would have no effect without video.num_frames",
        ),
        (
            ["--video.num_frames", "none", "--video.fps", "none", "--data.source", "elpv", "--video.causal"],
            "video.causal is True, but it would have no effect without video.num_frames",
        ),
    ],
)
def test_refusals(configure, words: list[str], message: str) -> None:
    check_config(configure())
    with pytest.raises(ValueError, match=message):
        check_config(configure(*words))


def test_the_model_is_the_one_of_video_vit(configure) -> None:
    words = ["--video.attention", "factorised", "--video.causal", "--video.positions_per_second", "3"]
    config = configure(*words, "--video.tubelet", "1", "--model.options.global_pool", "avg")
    torch.manual_seed(3)
    model = checkpoint.build_model(config, 5)
    torch.manual_seed(3)
    expected = vision_rope.video_vit(
        "vit_small_patch16_224",
        num_frames=4,
        tubelet=(1, 8, 8),
        position="qwen2-vl",
        attention="factorised",
        causal=True,
        positions_per_second=3.0,
        num_classes=5,
        img_size=16,
        global_pool="avg",
        **{"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3},
    )
    frames, seconds = torch.randn(2, 3, 4, 16, 16), torch.rand(2, 4).cumsum(1)
    torch.testing.assert_close(model(frames, seconds), expected(frames, seconds))


def test_options_of_the_backbone_are_answered_as_for_images(configure) -> None:
    with pytest.raises(ValueError, match=r"model\.name vit_small_patch16_224 cannot be built with model\.options"):
        checkpoint.build_model(configure("--model.options.depht", "3"), 2)
    config = configure("--model.position", "rope-vit-axial", "--video.positions_per_second", "3")
    with pytest.raises(ValueError, match="would have no effect with position 'rope-vit-axial'"):
        checkpoint.build_model(config, 2)


@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_first_weights_of_an_image_model(configure, tmp_path: Path, attention: str) -> None:
    """A still image, repeated to fill the tubelet, then gives what the image model gives."""
    config = configure("--model.position", "rope-vit-mixed", "--video.attention", attention)
    image_model = vision_rope.create_model(
        "vit_small_patch16_224", position="rope-vit-mixed", num_classes=2, img_size=16, patch_size=8, embed_dim=48,
        depth=2, num_heads=3,
    ).eval()  # fmt: skip
    path = tmp_path / "image.safetensors"
    checkpoint.save_model(path, image_model)
    still = torch.randn(2, 3, 16, 16)
    expected = image_model(still)
    started = checkpoint.build_model(config, 2).eval()
    assert first_weights.load_start(started, path) == []
    loaded = checkpoint.load_model(checkpoint.build_model(config, 2).eval(), path)
    for model in (started, loaded):
        torch.testing.assert_close(model(still[:, :, None].expand(-1, -1, 2, -1, -1)), expected, atol=1e-5, rtol=1e-5)
    # And back from a file of a video model.
    checkpoint.save_model(path, loaded)
    again = checkpoint.load_model(checkpoint.build_model(config, 2).eval(), path)
    clip = torch.randn(1, 3, 4, 16, 16)
    assert torch.equal(again(clip), loaded(clip))
    # A classifier of other classes is fresh.
    assert first_weights.load_start(checkpoint.build_model(config, 3), path) == ["head.bias", "head.weight"]


def test_learned_times_of_another_number_of_frames(configure, tmp_path: Path) -> None:
    short, long = (configure("--model.position", "learned", "--video.num_frames", str(count)) for count in (4, 8))
    model = checkpoint.build_model(short, 2)
    torch.nn.init.normal_(model.pos_embed_time)
    checkpoint.save_model(tmp_path / "short.safetensors", model)
    longer = checkpoint.build_model(long, 2)
    first_weights.load_start(longer, tmp_path / "short.safetensors")
    old, new = model.pos_embed_time[0], longer.pos_embed_time[0]
    # Steps 0..3 of the new one lie at -1/4, 1/4, 3/4 and 5/4 of the old ones.
    torch.testing.assert_close(
        new, torch.stack([old[0], 0.75 * old[0] + 0.25 * old[1], 0.25 * old[0] + 0.75 * old[1], old[1]])
    )


@pytest.mark.integration
@pytest.mark.parametrize("kill_at", [1, 2])
def test_a_killed_run_on_clips_resumed_equals_the_unbroken_one(configure, tmp_path, monkeypatch, kill_at) -> None:
    """Failure class 21: times of clips, augmentation, mixing and erasing are drawn anew as they were."""
    more = [*EVERYTHING_RANDOM, "--schedule.epochs", "3", "--batch_size", "3"]
    train(configure(*more, output="unbroken"))
    train_until_killed(configure(*more), kill_at + 1, monkeypatch)
    torch.manual_seed(1234)
    train(load_config(["--run.resume", "--run.output", str(tmp_path / "run"), "--run.num_workers", "1"]))
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.integration
def test_a_run_is_evaluated_and_probed_at_its_own_frames(configure, tmp_path: Path) -> None:
    result = train(configure("--evaluation.max_images", "5"))
    (row,), _ = evaluate(tmp_path / "run", progress=False, device="cpu", num_workers=0)
    assert (row["frames"], row["fps"], row["size"], row["clips"]) == (4, 15.0, "16", 5)
    assert row["nll"] == pytest.approx(result.best["val_nll"], rel=1e-4)
    run = checkpoint.load_run(tmp_path / "run")
    source = open_split(run.config.data, "validation", run.config)
    clip, _ = source[0]
    assert clip.frames.shape == (4, 3, 18, 26)
    torch.testing.assert_close(clip.seconds.diff(), torch.full((3,), 1 / 15, dtype=torch.float64))
    rows = probe(tmp_path / "run", k=3, progress=False, device="cpu", num_workers=0)
    assert {row["probe"] for row in rows} == {"knn", "linear"}
    assert "clips/s" in (tmp_path / "run" / "log.txt").read_text()
    assert "4 frames 15 fps 16 px" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.integration
def test_the_log_says_once_that_clips_are_shorter_than_asked_for(configure, tmp_path: Path) -> None:
    """9 frames at 30 a second last less than 4 at 5."""
    train(configure("--video.fps", "5"))
    told = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "clips are" in line]
    assert len(told) == 1
    assert told[0].endswith("validation: 4 frames 5 fps 16: 6 of 6 clips are shorter, and sampled more densely.")
    train(configure("--schedule.epochs", "1", "--schedule.warmup_epochs", "0", output="other"))
    assert "clips are" not in (tmp_path / "other" / "log.txt").read_text()


@pytest.mark.integration
def test_starting_from_an_image_run(clips: Path, configure, tmp_path: Path) -> None:
    images = load_config(
        [
            *("--data.source", f"folder:{clips}", "--data.size", "16", "--batch_size", "16", "--run.device", "cpu"),
            *("--model.options", TINY, "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"),
            *("--run.output", str(tmp_path / "images"), "--run.num_workers", "0", "--run.progress", "false"),
            *("--run.tensorboard", "false"),
        ]
    )
    train(images)
    config = configure("--model.checkpoint", str(tmp_path / "images"), "--model.position", "rope-vit-axial")
    model = build_start(config, 2).eval()
    still = torch.randn(1, 3, 16, 16)
    image_model = checkpoint.load_run(tmp_path / "images").model
    torch.testing.assert_close(model(still[:, :, None].expand(-1, -1, 2, -1, -1)), image_model(still))
    assert train(config).best["val_top1"] >= 0


@pytest.mark.integration
def test_real_videos_from_a_list(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of two films told apart, from the command line; what cannot be read is left out and told in the log."""
    pytest.importorskip("av", reason="videos need the package av")
    videos = shared_data / "videos_nomask"
    (tmp_path / "empty.mp4").touch()
    rows = ["path,label,split,start,end", f"{tmp_path}/empty.mp4,bikes,train,,", f"{videos}/video_0.mov,bikes,train,,"]
    for place in range(5):
        split = "validation" if place == 4 else "train"
        rows += [f"{videos}/{name},{name},{split},{place / 2},{place / 2 + 1}" for name in ("bikes.mp4", "test.webm")]
    rows = [row.replace(",bikes.mp4,", ",bikes,") for row in rows]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    words = [
        *("--data.source", f"videos:{tmp_path / 'list.csv'}", "--data.size", "16", "--batch_size", "5"),
        *("--video.num_frames", "4", "--video.fps", "8", "--video.broken", "skip", "--model.position", "qwen2-vl"),
        *("--model.options", TINY, "--schedule.epochs", "2", "--schedule.warmup_epochs", "1"),
        *("--run.output", str(tmp_path / "run"), "--run.num_workers", "1", "--run.progress", "false"),
        *("--run.device", "cpu", "--run.tensorboard", "false"),
    ]
    assert main(words) == 0, capsys.readouterr().err
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("empty.mp4: left out") == 1
    assert log.count("video_0.mov: left out, since no clip can be made of it: it has 3 frames") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [np.isfinite(row["train_loss"]) for row in rows] == [True, True]
    capsys.readouterr()
    assert main([*words, "--video.broken", "error", "--run.overwrite"]) == 2
    assert "no clip can be made of it" in capsys.readouterr().err
