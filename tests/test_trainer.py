"""Whole runs on a few tiny pictures: resuming, refusals, divergence, what a run folder holds."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from vision_rope import checkpoint, first_weights, progress, trainer
from vision_rope.config import TrainConfig, load_config, load_yaml
from vision_rope.losses import create_loss
from vision_rope.optimization import create_optimizer, create_schedule
from vision_rope.preparation import build_start, check_sweep
from vision_rope.sizes import pixel_size
from vision_rope.trainer import Trainer, TrainingDiverged, main, train

TRAIN_PY = Path(__file__).resolve().parent.parent / "train.py"
CONFIGS = [path for path in sorted((TRAIN_PY.parent / "configs").glob("*.yaml")) if not path.stem.startswith("study")]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Two classes of noise, a dark and a light one: 26 pictures to train on, 11 to validate."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    for split, counts in (("train", (14, 12)), ("val", (6, 5))):
        for label, (name, count) in enumerate(zip(("dark", "light"), counts, strict=True)):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                noise = torch.randn(18, 20, 3, generator=generator) * 60 + 110 + 25 * label
                picture = Image.fromarray(noise.clamp(0, 255).byte().numpy())
                picture.save(folder / split / name / f"{index:02}.png")
    return folder


def words(pictures: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--data.source", f"folder:{pictures}", "--data.size", "16", "--batch_size", "8"),
        *("--model.options", "{patch_size: 8, embed_dim: 16, depth: 2, num_heads: 2}"),
        *("--schedule.epochs", "3", "--schedule.warmup_epochs", "1"),
        *("--run.output", str(output), "--run.num_workers", "0", "--run.device", "cpu"),
        *("--run.progress", "false", "--run.tensorboard", "false"),
        *more,
    ]


@pytest.fixture
def configure(pictures, tmp_path):
    """Makes a configuration from more flags; `output` is a folder in tmp_path."""

    def build(*more: str, output: str = "run") -> TrainConfig:
        return load_config(words(pictures, tmp_path / output, *more))

    return build


EVERYTHING_RANDOM = [
    *("--ema_decay", "0.9", "--augment.mixup", "0.4", "--augment.cutmix", "1", "--augment.erasing", "0.5"),
    *("--optimizer.accumulate", "2", "--loss.label_smoothing", "0.1", "--model.position", "rope-vit-mixed"),
    *("--model.options.drop_path_rate", "0.3", "--model.options.proj_drop_rate", "0.3"),
    *("--model.options.attn_drop_rate", "0.2", "--model.options.patch_drop_rate", "0.3"),
]


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ordinary errors catches it."""


def train_until_killed(config: TrainConfig, kill_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until that many updates are made."""
    update, count = Trainer._update, 0

    def stop(self: Trainer) -> None:
        nonlocal count
        if count == kill_at:
            raise Killed
        count += 1
        update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", stop)
        with pytest.raises(Killed):
            train(config)


def results(folder: Path) -> dict[str, object]:
    """All that a run came to but how long it took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"], row["images_per_second"]
    return {
        "rows": rows,
        "best": checkpoint.load_weights(folder / "best.safetensors")[0],
        "last": checkpoint.load_weights(folder / "last" / "model.safetensors")[0],
        "ema": checkpoint.load_weights(folder / "last" / "ema.safetensors")[0],
        "optimizer": checkpoint.load_state(folder / "last" / "state.pt")["optimizer"]["state"],
    }


def assert_same_run(one: Path, other: Path) -> None:
    torch.testing.assert_close(results(one), results(other), rtol=0, atol=0)


@pytest.mark.integration
@pytest.mark.parametrize("kill_at", [1, 2, 3, 5])
def test_a_run_killed_anywhere_and_resumed_equals_the_unbroken_one(configure, tmp_path, monkeypatch, kill_at):
    """Failure class 21, bit for bit: averaged weights, dropout, stochastic depth, mixing, erasing, accumulation.

    An epoch has 3 batches and 2 updates: the kills come after an epoch's end, in its middle and before its last step.
    """
    train(configure(*EVERYTHING_RANDOM, output="unbroken"))
    train_until_killed(configure(*EVERYTHING_RANDOM), kill_at, monkeypatch)
    torch.manual_seed(1234)
    if kill_at < 2:
        with pytest.raises(
            ValueError, match=r"stopped before its first epoch ended; start anew: --run\.overwrite true"
        ):
            train(load_config(["--run.resume", "--run.output", str(tmp_path / "run")]))
        train(configure(*EVERYTHING_RANDOM, "--run.overwrite"))
    else:
        train(load_config(["--run.resume", "--run.output", str(tmp_path / "run")]))
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.integration
def test_a_kill_between_two_files_of_an_epoch(configure, tmp_path, monkeypatch):
    """Failure class 21: best weights and the row of an epoch are written, last/ is not."""
    train(configure(*EVERYTHING_RANDOM, output="unbroken"))
    save, count = checkpoint.save_last, 0

    def stop(*args: object, **options: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise Killed
        save(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_last", stop)
        with pytest.raises(Killed):
            train(configure(*EVERYTHING_RANDOM))
    train(configure(*EVERYTHING_RANDOM, "--run.resume"))
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.integration
def test_sigkill_and_resume_in_new_processes_with_workers(pictures, tmp_path):
    """Failure class 21: a real kill, at whatever moment it comes; the number of workers changes too."""
    more = [*EVERYTHING_RANDOM, "--schedule.epochs", "15", "--run.num_workers"]
    train(load_config(words(pictures, tmp_path / "unbroken", *more, "0")))
    command = [sys.executable, str(TRAIN_PY)]
    with subprocess.Popen(
        [*command, *words(pictures, tmp_path / "run", *more, "1")], stdout=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "last").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it must not have been finished by then"
    done = subprocess.run(
        [*command, "--run.resume", "true", "--run.output", str(tmp_path / "run"), "--run.num_workers", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "from epoch" in done.stdout
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.integration
def test_resuming_a_finished_run_says_so_and_changes_nothing(configure, tmp_path, capsys):
    train(configure("--ema_decay", "0.9"))
    before = results(tmp_path / "run")
    result = train(configure("--ema_decay", "0.9", "--run.resume"))
    assert "is finished: all 3 epochs are trained" in capsys.readouterr().out
    assert len(result.rows) == 3
    torch.testing.assert_close(results(tmp_path / "run"), before, rtol=0, atol=0)


@pytest.mark.integration
def test_a_resumed_run_keeps_its_configuration(configure):
    train(configure())
    with pytest.raises(ValueError, match=r"keeps its configuration, but optimizer\.lr, schedule\.epochs changed"):
        Trainer(configure("--run.resume", "--schedule.epochs", "4", "--optimizer.lr", "1"))
    Trainer(configure("--run.resume", "--run.num_workers", "1"))


@pytest.mark.integration
def test_an_output_that_is_not_empty_is_refused_with_the_ways_out(configure, tmp_path):
    train(configure())
    with pytest.raises(ValueError, match=r"--run\.resume true to go on with it, --run\.overwrite true to start anew"):
        Trainer(configure())
    (tmp_path / "run" / "mine.txt").write_text("keep")
    train(configure("--run.overwrite", "--schedule.epochs", "2"))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("keep")
    with pytest.raises(ValueError, match="holds files but no run"):
        Trainer(configure("--run.overwrite", output="other"))
    with pytest.raises(ValueError, match="is not empty; give another folder"):
        Trainer(configure(output="other"))
    with pytest.raises(ValueError, match="holds no run to resume"):
        Trainer(configure("--run.resume", output="nothing"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.size 20", r"size 20 is not divisible by the patch size 8; the nearest valid sizes are 16 and 24"),
        ("--evaluation.sizes 16,79", r"size 79 is not divisible .* 72 and 80"),
        ("--evaluation.sizes 16,big", r"size is 'big'"),
        ("--evaluation.sizes 16 --evaluation.extend none,yarm", r"'yarm'.*yarn"),
        ("--batch_size 27", r"26 images, less than one batch of 27"),
        ("--model.name vit_smal_patch16_224", r"vit_small_patch16_224"),
        ("--model.position rope-vit-axiel", r"rope-vit-axial"),
        ("--model.position_options.bas 3", r"bas\b.*base"),
        ("--model.options.embed_dimm 3", r"embed_dimm"),
        ("--optimizer.name adamv", r"adamv"),
        ("--schedule.name cosin", r"cosine"),
        ("--data.source folder:no/such", r"no/such"),
        ("--data.source elpw", r"elpw"),
        ("--run.device cuda:99", r"cuda:99.*this machine has"),
        ("--run.device gpu", r"device is 'gpu', but it must be auto, cpu, cuda"),
        ("--model.checkpoint no/such.safetensors", r"no/such\.safetensors: there is no such file"),
        ("--model.pretrained --model.checkpoint x.safetensors", r"exclude each other"),
        ("--schedule.epochs 0", r"schedule\.epochs is 0, but it must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(configure, tmp_path, flags, message):
    """Failure classes 17, 20 and 26."""
    with pytest.raises(ValueError, match=message):
        Trainer(configure(*flags.split()))
    assert not (tmp_path / "run").exists()


def test_main_answers_mistakes_in_one_sentence(pictures, tmp_path, capsys):
    assert main(words(pictures, tmp_path / "run", "--batch_size", "999")) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: the data set has 26 images")
    assert captured.err.count("\n") == 1
    assert main(["--model.positon", "none"]) == 2
    assert "the nearest valid one is --model.position" in capsys.readouterr().err


@pytest.mark.integration
def test_run_folder_is_complete_and_its_configuration_runs_again(configure, tmp_path):
    result = train(configure("--run.tensorboard", "true", "--ema_decay", "0.9"))
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "metrics.csv", "metrics.jsonl", "log.txt", "best.safetensors", "last", "tensorboard")
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0].keys() >= {"lr", "train_loss", "train_top1", "val_top1", "val_auroc", "images_per_second", "seconds"}
    assert rows[0]["val_images"] == 11
    with (folder / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["train_loss"]) for line in table] == [row["train_loss"] for row in rows]
    assert "val_per_class" not in table[0]
    assert "epoch 3/3" in (folder / "log.txt").read_text()
    assert list((folder / "tensorboard").glob("events*"))
    best = max(rows, key=lambda row: (row["val_auroc"], -row["val_nll"]))
    assert result.best["epoch"] == best["epoch"]
    _, metadata = checkpoint.load_weights(folder / "best.safetensors")
    assert json.loads(metadata["epoch"]) == best["epoch"]
    assert json.loads(metadata["classes"]) == ["dark", "light"]

    again = load_yaml(folder / "config.yaml")
    again.run.output = str(tmp_path / "again")
    train(again)
    assert_same_run(folder, tmp_path / "again")


def test_best_weights_are_the_averaged_ones_and_load(configure, tmp_path):
    config = configure("--ema_decay", "0.9", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0")
    run = Trainer(config)
    run.fit()
    loaded = checkpoint.load_run(tmp_path / "run")
    torch.testing.assert_close(loaded.model.state_dict(), run.ema.module.state_dict(), rtol=0, atol=0)
    last = checkpoint.load_run(tmp_path / "run", weights="last")
    torch.testing.assert_close(last.model.state_dict(), run.model.state_dict(), rtol=0, atol=0)
    assert not torch.equal(loaded.model.head.weight, last.model.head.weight)


def test_averaged_weights_follow_their_formula(configure):
    """timm's warm-up of the decay: 1 - (1 + step) ** (-2 / 3), at most ema_decay; the first update copies."""
    run = Trainer(configure("--ema_decay", "0.5"))
    expected = run.model.head.weight.clone()
    for step in range(1, 6):
        for parameter in run.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        run._update()
        decay = 0.0 if step == 1 else min(1 - step ** (-2 / 3), 0.5)
        expected = decay * expected + (1 - decay) * run.model.head.weight
        torch.testing.assert_close(run.ema.module.head.weight, expected)


@pytest.mark.integration
def test_training_learns_and_then_sweeps(configure, tmp_path, capsys):
    options = ["--evaluation.sizes", "16,24x32", "--evaluation.extend", "none,yarn"]
    result = train(configure("--schedule.epochs", "8", "--optimizer.lr", "5e-3", *options))
    assert result.rows[-1]["train_loss"] < result.rows[0]["train_loss"] - 0.1
    assert result.best["val_auroc"] > 0.9
    assert result.figure == tmp_path / "run" / "evaluation" / "evaluation.png"
    assert result.figure.is_file()
    printed = capsys.readouterr().out
    assert "24x32" in printed
    assert "yarn" in printed
    assert f"figure: {result.figure}" in printed
    sweep = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    trained = next(row for row in sweep if row["size"] == "16" and row["method"] == "none")
    assert trained["auroc"] == pytest.approx(result.best["val_auroc"]), "the sweep has the best weights and their data"
    assert trained["nll"] == pytest.approx(result.best["val_nll"], rel=1e-5)


@pytest.mark.integration
def test_accumulating_batches_equals_the_large_batch(configure, tmp_path):
    more = [
        "--optimizer.name",
        "sgd",
        "--optimizer.lr",
        "0.1",
        "--schedule.epochs",
        "2",
        "--schedule.warmup_epochs",
        "0",
    ]
    train(configure(*more, "--batch_size", "12", output="large"))
    train(configure(*more, "--batch_size", "6", "--optimizer.accumulate", "2", output="small"))
    large, small = (
        checkpoint.load_weights(tmp_path / name / "last" / "model.safetensors")[0] for name in ("large", "small")
    )
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-6)


def test_an_incomplete_group_of_batches_is_an_update_too(configure):
    run = Trainer(configure("--optimizer.accumulate", "2"))
    assert len(run.train_loader) == 3
    run.fit()
    assert run.updates == 3 * 2


@pytest.mark.integration
def test_non_finite_loss_stops_and_keeps_the_last_state(configure, tmp_path, monkeypatch, pictures):
    """Failure class 23."""
    config = configure("--model.position", "rope-vit-mixed")
    run = Trainer(config)
    steps = 0
    loss = run.task.loss

    def poisoned(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return loss(logits, targets) * (math.nan if steps == 5 else 1.0)

    monkeypatch.setattr(run.task, "loss", poisoned)
    with pytest.raises(
        TrainingDiverged, match=r"the loss of epoch 2, step 2, is not finite \(learning rate "
    ) as caught:
        run.fit()
    assert f"the state after epoch 1 is kept in {tmp_path / 'run' / 'last'}" in str(caught.value)
    assert str(pictures / "train") in str(caught.value), "the files of the batch are named"
    assert steps == 5, "no step follows"
    for parameter in run.model.parameters():
        assert parameter.isfinite().all(), "the weights are not updated with it"
    assert checkpoint.load_state(tmp_path / "run" / "last" / "state.pt")["epoch"] == 1
    assert "is not finite" in (tmp_path / "run" / "log.txt").read_text()
    train(configure("--model.position", "rope-vit-mixed", "--run.resume"))


def test_main_reports_divergence_without_a_traceback(pictures, tmp_path, capsys):
    """Failure class 23: a learning rate that blows up."""
    more = ["--optimizer.name", "sgd", "--optimizer.lr", "1e30", "--schedule.warmup_epochs", "0"]
    assert main(words(pictures, tmp_path / "run", *more, "--optimizer.clip_grad", "none")) == 3
    assert "is not finite" in capsys.readouterr().err


def test_single_precision_on_the_cpu(configure):
    """bf16 there is about 80 times slower: auto must be float32."""
    run = Trainer(configure())
    assert run.dtype == torch.float32
    seen = []
    run.model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run.fit()
    assert set(seen) == {torch.float32}


def test_bf16_where_it_is_asked_for(configure):
    run = Trainer(configure("--run.precision", "bf16", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"))
    seen = []
    run.model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    result = run.fit()
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())
    assert math.isfinite(result.rows[0]["train_loss"])


@pytest.mark.integration
def test_gradient_checkpointing_changes_no_result(configure, tmp_path):
    more = ["--ema_decay", "0.9", "--model.position", "rope-vit-mixed"]
    train(configure(*more, output="plain"))
    train(configure(*more, "--run.grad_checkpointing", output="saving"))
    assert_same_run(tmp_path / "plain", tmp_path / "saving")


@pytest.mark.integration
def test_compiling_keeps_the_names_of_the_parameters(configure, tmp_path, monkeypatch):
    """Failure class 30; with a backend that needs no compiler."""
    compiled = []
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: (compiled.append(self), original(self, backend="eager"))[0])
    train(configure("--run.compile", "--ema_decay", "0.9", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"))
    assert len(compiled) == 1
    for name in ("best.safetensors", "last/model.safetensors", "last/ema.safetensors"):
        state, _ = checkpoint.load_weights(tmp_path / "run" / name)
        assert set(state) == set(checkpoint.load_run(tmp_path / "run").model.state_dict())


@pytest.mark.parametrize("batch", ["5", "8"])
def test_deit_recipe_runs_with_odd_batches(configure, batch):
    """Failure class 27."""
    more = [
        "--augment.mixup",
        "0.8",
        "--augment.cutmix",
        "1",
        "--loss.name",
        "binary-cross-entropy",
        "--batch_size",
        batch,
    ]
    recipe = ["--optimizer.name", "lamb", "--augment.three_augment", "true", "--augment.crop", "simple"]
    result = train(configure(*more, *recipe, "--optimizer.clip_grad", "none", "--optimizer.layer_decay", "0.7"))
    assert all(math.isfinite(row["train_loss"]) for row in result.rows)


def test_validation_can_be_rarer_and_is_always_last(configure):
    result = train(configure("--evaluation.every", "2", "--schedule.epochs", "5"))
    assert ["val_top1" in row for row in result.rows] == [False, True, False, True, True]
    assert result.best["epoch"] in (2, 4, 5)


def test_starting_from_a_checkpoint(configure, tmp_path):
    train(configure())
    path = tmp_path / "run" / "best.safetensors"
    run = Trainer(configure("--model.checkpoint", str(path), output="second"))
    torch.testing.assert_close(run.model.state_dict(), checkpoint.load_weights(path)[0], rtol=0, atol=0)


def test_no_step_waits_for_the_device(configure, monkeypatch):
    """Reading a tensor waits for the device: on a CUDA device it may happen every 50 steps, not at every one."""
    run = Trainer(configure("--schedule.epochs", "1", "--schedule.warmup_epochs", "0", "--batch_size", "1"))
    reads = 0
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: object, original=original) -> object:
            nonlocal reads
            if "vision_rope/trainer.py" in sys._getframe(1).f_code.co_filename:
                reads += 1
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    monkeypatch.setattr(trainer, "CHECK_EVERY", {"cpu": 50})
    run.fit()
    assert run.updates == 26
    assert reads <= 4


def test_progress_bar_shows_loss_accuracy_speed_and_time_left(configure, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)
    train(configure("--run.progress", "true", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"))
    bar = capsys.readouterr().err
    for word in ("epoch 1/1", "loss ", "accuracy ", "images/s", "left "):
        assert word in bar


@pytest.mark.integration
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_builds_its_model_optimizer_and_schedule(path):
    config = load_yaml(path)
    model = build_start(config, 10)
    check_sweep(config, model)
    optimizer = create_optimizer(model, config.optimizer)
    create_schedule(optimizer, config.schedule, lr=config.optimizer.lr, updates_per_epoch=7)
    create_loss(config.loss.name, config.loss.label_smoothing, 10)
    height, width = pixel_size(config.data.size)
    if config.task == "segmentation":
        model = model.backbone.trunk
    patch = model.patch_embed.patch_size[0]
    assert getattr(model, "encoder", model).train_grid[-2:] == (height // patch, width // patch)


def test_a_class_missing_from_validation_leaves_the_best_weights_to_top1(pictures, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(pictures / "train", data)
    for file in sorted((data / "light").iterdir())[1:]:
        file.unlink()  # one picture: a quarter of it rounds to none for validation
    result = train(load_config(words(data, tmp_path / "run")))
    assert result.best["val_top1"] == max(row["val_top1"] for row in result.rows)
    assert checkpoint.load_run(tmp_path / "run").classes == ["dark", "light"]


def test_weights_that_are_not_finite_do_not_replace_the_last_state(configure, tmp_path, monkeypatch):
    """Failure class 23: the last update of an epoch without validation has no loss after it."""
    run = Trainer(configure("--evaluation.every", "3"))
    update, updates = run._update, 0

    def poisoned() -> None:
        nonlocal updates
        updates += 1
        if updates == 2 * run.updates_per_epoch:
            next(run.model.parameters()).grad.fill_(math.inf)
        update()

    monkeypatch.setattr(run, "_update", poisoned)
    with pytest.raises(TrainingDiverged, match="the weights after epoch 2 are not finite"):
        run.fit()
    assert checkpoint.load_state(tmp_path / "run" / "last" / "state.pt")["epoch"] == 1
    weights, _ = checkpoint.load_weights(tmp_path / "run" / "last" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


# ---- masked prediction


@pytest.fixture(scope="session")
def album(tmp_path_factory) -> Path:
    """27 smooth pictures without labels, of two colours each that turn into another: 20 to train on, 7 to validate."""
    folder = tmp_path_factory.mktemp("album")
    generator = torch.Generator().manual_seed(0)
    slope = torch.linspace(0, 1, 20)[:, None]
    for index in range(27):
        one, other = torch.rand(2, 3, generator=generator) * 255
        line = one * slope + other * (1 - slope)
        picture = line[None].expand(20, 20, 3) if index % 2 else line[:, None].expand(20, 20, 3)
        Image.fromarray(picture.byte().contiguous().numpy()).save(folder / f"{index:02}.png")
    return folder


@pytest.fixture
def mask(album, configure):
    """Makes a configuration of masked prediction from more flags."""

    def build(*more: str, output: str = "run", encoder: str = "all") -> TrainConfig:
        own = ["--task", "masked", "--masked.encoder", encoder, "--data.source", f"images:{album}"]
        return configure(*own, "--model.options.patch_size", "4", *more, output=output)

    return build


MASKED_RANDOM = [
    *("--ema_decay", "0.9", "--augment.erasing", "0.5", "--data.train_sizes", "16,16,12x20,20"),
    *("--optimizer.accumulate", "2", "--model.position", "rope-vit-mixed", "--masked.target", "patch-normalized"),
    *("--model.options.drop_path_rate", "0.3", "--model.options.proj_drop_rate", "0.3"),
    *("--batch_size", "6", "--schedule.epochs", "2"),
]


@pytest.mark.integration
@pytest.mark.parametrize("encoder", ["all", "visible"])
def test_a_masked_run_learns_draws_and_sweeps(mask, tmp_path, capsys, encoder):
    more = ["--schedule.epochs", "10", "--optimizer.lr", "1e-2", "--batch_size", "5", "--evaluation.every", "5"]
    sizes = ["--evaluation.sizes", "16,24x32", "--evaluation.extend", "none,yarn", "--evaluation.max_images", "6"]
    result = train(mask(*more, *sizes, encoder=encoder))
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if "val_r2" in row] == [5, 10]
    assert not [key for row in rows for key in row if "top1" in key or "per_class" in key]
    assert {row["val_images"] for row in rows[4::5]} == {6}
    assert result.best["val_r2"] > max(0.05, rows[4]["val_r2"])
    assert result.best["val_mse"] == min(row["val_mse"] for row in rows[4::5])
    drawn = {path.name for path in (folder / "reconstructions").iterdir()}
    assert drawn == {"epoch-0005.png", "epoch-0010.png"}
    printed = capsys.readouterr().out
    assert "50% of the patches hidden, 16 px" in printed
    assert "val r2 " in printed
    assert "accuracy" not in printed
    assert result.figure == folder / "evaluation" / "evaluation.png"
    assert {path.name for path in (folder / "evaluation").iterdir()} == {
        *("evaluation.csv", "evaluation.json", "evaluation.png", "reconstruction-16.png", "reconstruction-24x32.png")
    }
    sweep = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert [(row["size"], row["method"]) for row in sweep] == [
        (size, method) for size in ("16", "24x32") for method in ("none", "yarn")
    ]
    assert sweep[0]["r2"] == pytest.approx(result.best["val_r2"], rel=1e-5), "the same weights, images and masks"


@pytest.mark.integration
@pytest.mark.parametrize(("encoder", "kill_at"), [("all", 3), ("visible", 2)])
def test_a_masked_run_killed_and_resumed_equals_the_unbroken_one(mask, tmp_path, monkeypatch, encoder, kill_at):
    """Failure class 21, bit for bit: masks and random sizes too. An epoch has 3 batches and 2 updates."""
    train(mask(*MASKED_RANDOM, encoder=encoder, output="unbroken"))
    train_until_killed(mask(*MASKED_RANDOM, encoder=encoder), kill_at, monkeypatch)
    torch.manual_seed(1234)
    train(load_config(["--run.resume", "--run.output", str(tmp_path / "run")]))
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")
    again = {path.name for path in (tmp_path / "run" / "reconstructions").iterdir()}
    assert again == {"epoch-0001.png", "epoch-0002.png"}


def watch(run: Trainer) -> list[tuple[torch.Tensor, ...]]:
    """Inputs of the model in training."""
    seen: list[tuple[torch.Tensor, ...]] = []
    run.model.register_forward_pre_hook(
        lambda module, inputs: seen.append(tuple(part.clone() for part in inputs)) if module.training else None
    )
    return seen


@pytest.mark.integration
@pytest.mark.parametrize("task", ["masked", "classification"])
def test_every_batch_has_a_random_one_of_the_training_sizes(mask, configure, task):
    """Against the same images at the largest size, which are what the smaller ones are made from."""
    build = mask if task == "masked" else configure
    short = ["--schedule.epochs", "3", "--batch_size", "2", "--schedule.warmup_epochs", "0"]
    short += ["--evaluation.every", "3", "--model.options.depth", "1"]
    one = Trainer(build(*short, "--data.train_sizes", "24x32", output="one"))
    many = Trainer(build(*short, "--data.train_sizes", "16,24x32,16,8x16", output="many"))
    largest, sized = watch(one), watch(many)
    one.fit()
    many.fit()
    assert len(largest) == len(sized) == 3 * len(one.train_loader)
    sizes = Counter(tuple(inputs[0].shape[2:]) for inputs in sized)
    assert sizes.keys() == {(16, 16), (24, 32), (8, 16)}
    assert {tuple(inputs[0].shape[2:]) for inputs in largest} == {(24, 32)}
    # Half of the list is 16: 5 standard errors.
    assert abs(sizes[16, 16] / len(sized) - 0.5) < 5 * math.sqrt(0.25 / len(sized))
    for whole, small in zip(largest, sized, strict=True):
        expected = nn.functional.interpolate(
            whole[0], small[0].shape[2:], mode="bicubic", antialias=True, align_corners=False
        )
        torch.testing.assert_close(small[0], whole[0] if small[0].shape == whole[0].shape else expected)
        if task == "masked":
            patch = many.model.patch_embed.patch_size[0]
            assert small[1].shape[1:] == (small[0].shape[2] // patch, small[0].shape[3] // patch)
    assert many.model.patch_embed.img_size == (16, 16), "data.size is what the model is built for"


def test_training_masks_are_new_in_every_step_and_epoch(mask):
    run = Trainer(mask("--batch_size", "4", "--schedule.epochs", "2", "--evaluation.every", "2"))
    seen = watch(run)
    run.fit()
    masks = torch.stack([masks for _, masks in seen])
    assert masks.shape == (2 * 5, 4, 4, 4)
    assert masks.flatten(2).sum(2).unique().tolist() == [8]
    assert len(masks.flatten(1).unique(dim=0)) == 10


@pytest.mark.integration
@pytest.mark.parametrize("encoder", ["all", "visible"])
def test_a_classifier_starts_from_the_encoder_of_a_masked_run(mask, configure, tmp_path, encoder):
    train(mask("--schedule.epochs", "1", "--schedule.warmup_epochs", "0", encoder=encoder, output="masked"))
    path = tmp_path / "masked" / "best.safetensors"
    start = ["--model.checkpoint", str(path), "--model.options.patch_size", "4"]
    fresh = Trainer(configure("--model.options.patch_size", "4", output="fresh")).model.state_dict()
    run = Trainer(configure(*start))
    trained, _ = checkpoint.load_weights(path)
    for name, weight in run.model.state_dict().items():
        expected = fresh[name] if name.startswith("head.") else trained[f"encoder.{name}"]
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    assert any(not torch.equal(fresh[name], weight) for name, weight in run.model.state_dict().items())
    assert math.isfinite(run.fit().best["val_nll"])
    # A masked run goes on from another one, decoder and all, but not from a classifier.
    again = Trainer(mask("--model.checkpoint", str(path), encoder=encoder, output="again"))
    torch.testing.assert_close(again.model.state_dict(), trained, rtol=0, atol=0)
    classifier = ["--model.checkpoint", str(tmp_path / "run" / "best.safetensors")]
    with pytest.raises(
        ValueError, match="holds the weights of a classifier, but masked prediction starts from those of a masked run"
    ):
        Trainer(mask(*classifier, encoder=encoder, output="wrong"))


def test_a_distilled_model_of_two_classifiers_starts_from_a_masked_one(tmp_path):
    """The names may carry the prefixes of DDP and torch.compile."""
    options = "{patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"
    own = ["--model.name", "deit_tiny_distilled_patch16_224", "--model.options", options, "--data.size", "16"]
    masked = checkpoint.build_model(load_config([*own, "--task", "masked"]), 1)
    state = {f"module._orig_mod.{name}": weight for name, weight in masked.state_dict().items()}
    checkpoint.save_weights(tmp_path / "a.safetensors", state, {})
    model = checkpoint.build_model(load_config(own), 3)
    fresh = first_weights.load_start(model, tmp_path / "a.safetensors")
    assert fresh == ["head.bias", "head.weight", "head_dist.bias", "head_dist.weight"]
    for name, weight in masked.encoder.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0)
    other = checkpoint.build_model(load_config([*own, "--model.options.depth", "2"]), 3)
    with pytest.raises(ValueError, match=r"does not fit the model: it lacks blocks\.1"):
        first_weights.load_start(other, tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.size 4", r"grid is 1 x 1, but at least one patch must be masked"),
        ("--evaluation.sizes 4,16", r"grid is 1 x 1"),
        ("--data.train_sizes 4,16", r"grid is 1 x 1"),
        ("--masked.block 4", r"a grid of 4 x 4 patches is one such square"),
        ("--masked.block 2 --evaluation.sizes 16,8", r"a grid of 2 x 2 patches is one such square"),
        ("--data.train_sizes 16,18", r"size 18 is not divisible by the patch size 4"),
        ("--data.train_sizes 16,big", r"size is 'big'"),
        ("--model.options.patch_drop_rate 0.3", r"drops patches by itself"),
        ("--masked.encoder visible --masked.decoder_dim 18", r"the decoder of dim 18 and 2 heads cannot be built"),
        ("--loss.label_smoothing 0.1", r"would have no effect with task masked, .*; set loss\.label_smoothing to 0$"),
        ("--task classification", r"num_classes is 1, but classification tells at least 2 classes apart"),
    ],
)
def test_masked_runs_that_cannot_work_are_refused_before_anything_is_written(mask, tmp_path, flags, message):
    """Failure classes 16, 17 and 19."""
    with pytest.raises(ValueError, match=message):
        Trainer(mask(*flags.split()))
    assert not (tmp_path / "run").exists()


def test_predictions_that_are_not_finite_stop_the_run(mask, tmp_path):
    """Failure class 23: the loss looks at hidden patches, the weights at the end of an epoch; validation at all."""
    run = Trainer(mask())
    run.folder.prepare(0)
    with torch.no_grad():
        run.model.head.bias.fill_(math.nan)
    with pytest.raises(TrainingDiverged, match=r"validation after epoch 1 failed: predictions are not finite"):
        run._validate(0)


def test_flat_pictures_without_r2_leave_a_best_epoch(mask, tmp_path):
    for index in range(10):
        path = tmp_path / "flat" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), (20 * index, 100, 50)).save(path)
    own = ["--data.source", f"images:{tmp_path / 'flat'}", "--masked.target", "patch-normalized", "--batch_size", "4"]
    result = train(mask(*own, "--schedule.epochs", "2", "--schedule.warmup_epochs", "0"))
    assert result.best["val_mse"] == min(row["val_mse"] for row in result.rows)
    assert checkpoint.load_run(tmp_path / "run").classes == ["image"]


def test_the_progress_bar_of_a_masked_run_shows_no_accuracy(mask, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)
    train(mask("--run.progress", "true", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"))
    bar = capsys.readouterr().err
    assert "loss " in bar
    assert "accuracy" not in bar


@pytest.mark.integration
def test_both_parts_of_a_masked_model_save_memory_and_compile(mask, monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    short = ["--schedule.epochs", "1", "--schedule.warmup_epochs", "0", "--model.options.depth", "1"]
    more = ["--run.compile", "--run.grad_checkpointing", "--run.precision", "bf16"]
    run = Trainer(mask(*short, *more, encoder="visible"))
    assert compiled == [run.model]
    assert run.model.encoder.grad_checkpointing
    assert run.model.decoder.grad_checkpointing
    assert math.isfinite(run.fit().best["val_mse"])
