"""Reading configurations: types, unknown keys, flags over files, and the files in configs/."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vision_rope.config import TrainConfig, changed_keys, help_text, load_config, load_yaml, to_yaml
from vision_rope.rules import check_config
from vision_rope.study_config import load_study

FILES = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))
STUDIES = [path for path in FILES if path.stem.startswith("study")]
CONFIGS = [path for path in FILES if path not in STUDIES]


def write(folder: Path, text: str) -> Path:
    path = folder / "given.yaml"
    path.write_text(text)
    return path


def test_without_words_the_defaults():
    assert load_config([]) == TrainConfig()


def test_flags_win_over_files_and_options_are_merged(tmp_path):
    path = write(tmp_path, "batch_size: 32\nmodel: {position: learned, options: {depth: 6, embed_dim: 64}}\n")
    words = ["--model.options.depth", "2", "--config", str(path), "--model.position=rope-vit-mixed"]
    config = load_config(words)
    assert config.batch_size == 32
    assert config.model.position == "rope-vit-mixed"
    assert config.model.options == {"depth": 2, "embed_dim": 64}


def test_later_file_wins(tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("seed: 1\nbatch_size: 8\n")
    second.write_text("seed: 2\n")
    config = load_config(["--config", str(first), "--config", str(second)])
    assert (config.seed, config.batch_size) == (2, 8)


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "1E-3"])
def test_scientific_notation_is_a_number(tmp_path, text):
    """Failure class 20: PyYAML alone reads 1e-3 as a word, in options too."""
    path = write(tmp_path, f"optimizer: {{lr: {text}, options: {{eps: {text}}}}}\n")
    for config in (
        load_yaml(path),
        load_config([f"--optimizer.lr={text}", f"--optimizer.options.eps={text}"]),
    ):
        assert config.optimizer.lr == 1e-3
        assert config.optimizer.options == {"eps": 1e-3}


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("optimizer: {lrr: 0.1}", "optimizer.lrr", "optimizer.lr"),
        ("model: {positon: none}", "model.positon", "model.position"),
        ("batchsize: 3", "batchsize", "batch_size"),
        ("optimiser: {lr: 0.1}", "optimiser", "optimizer"),
        ("lr: 0.1", "lr", "optimizer.lr"),
    ],
)
def test_unknown_key_in_a_file_is_refused(tmp_path, text, wrong, right):
    """Failure class 20."""
    with pytest.raises(ValueError, match=rf"unknown key {wrong}; the nearest valid one is {right}$"):
        load_yaml(write(tmp_path, text))


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("--model.positon", "model.position"),
        ("--resume", "run.resume"),
        ("--model.optons.depth", "model.options"),
    ],
)
def test_unknown_flag_is_refused(word, right):
    """Failure class 20."""
    with pytest.raises(ValueError, match=rf"unknown flag {word}; the nearest valid one is --{right}"):
        load_config([word, "1"])


def test_section_as_a_flag_is_explained():
    with pytest.raises(ValueError, match=r"--model is a section; its flags look like --model\.name"):
        load_config(["--model", "vit"])


@pytest.mark.parametrize(
    ("word", "value", "expected"),
    [
        ("optimizer.lr", "fast", "optimizer.lr is 'fast', but it must be a number"),
        ("schedule.epochs", "2.5", "schedule.epochs is '2.5', but it must be a whole number"),
        ("loss.name", "mse", "loss.name is 'mse', but it must be one of cross-entropy, binary-cross-entropy"),
        ("task", "mae", "task is 'mae', but it must be one of classification, masked"),
        ("masked.encoder", "some", "masked.encoder is 'some', but it must be one of all, visible"),
        ("masked.target", "hog", "masked.target is 'hog', but it must be one of pixels, patch-normalized"),
        ("video.attention", "factorized", "it must be one of joint, factorised; did you mean 'factorised'?"),
        ("masked.block", "1.5", "masked.block is '1.5', but it must be a whole number"),
        ("run.compile", "perhaps", "run.compile is 'perhaps', but it must be true or false"),
        ("optimizer.clip_grad", "big", "optimizer.clip_grad is 'big', but it must be a number or none"),
        ("data.mean", "[1, 2]", "data.mean is '[1, 2]', but it must be 3 numbers"),
        ("model.options", "3", "model.options is 3, but it must be keys with values"),
    ],
)
def test_wrong_types_name_key_value_and_type(word, value, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_config([f"--{word}", value])


@pytest.mark.parametrize("text", ["model: 3", "- a\n- b", "model: {name: }", "optimizer: {lr: [1", "seed: true"])
def test_broken_files_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"."):
        load_yaml(write(tmp_path, text))


def test_missing_file_missing_value_and_stray_word():
    with pytest.raises(ValueError, match="there is no such file"):
        load_config(["--config", "no/such.yaml"])
    with pytest.raises(ValueError, match="--seed needs a value"):
        load_config(["--seed"])
    with pytest.raises(ValueError, match="'seed' is not a flag"):
        load_config(["seed", "3"])


def test_words_people_write(tmp_path):
    config = load_config(
        ["--evaluation.sizes", "64,96x160", "--ema_decay", "none", "--data.size", "64x96", "--run.resume"]
    )
    assert config.evaluation.sizes == ["64", "96x160"]
    assert config.ema_decay is None
    assert config.data.size == (64, 96)
    assert config.run.resume is True
    assert load_yaml(write(tmp_path, "evaluation: {sizes: [64, 96x160]}")).evaluation.sizes == [
        "64",
        "96x160",
    ]


@pytest.mark.parametrize("words", ["--evaluation.frames 8,16 --evaluation.fps 2,4.5", "yaml list", "yaml text"])
def test_lists_of_numbers_take_commas_and_lists(tmp_path, words):
    text = "{frames: '8,16', fps: '2,4.5'}" if words == "yaml text" else "{frames: [8, 16], fps: [2, 4.5]}"
    argv = words.split() if words.startswith("--") else ["--config", str(write(tmp_path, f"evaluation: {text}"))]
    config = load_config(argv)
    assert (config.evaluation.frames, config.evaluation.fps) == ([8, 16], [2.0, 4.5])
    assert load_config(["--evaluation.frames", "8"]).evaluation.frames == [8]
    assert load_config(["--evaluation.frames", "[]"]).evaluation.frames == []


def test_a_word_in_a_list_of_numbers_is_refused():
    with pytest.raises(ValueError, match=r"frames is '8,b', but it must be a list, like 8,16, each .* a whole number"):
        load_config(["--evaluation.frames", "8,b"])
    with pytest.raises(ValueError, match=r"--evaluation.fps \[: not valid YAML"):
        load_config(["--evaluation.fps", "2,["])


@pytest.mark.parametrize(
    "words",
    [
        [],
        [
            "--data.size",
            "[64, 96]",
            "--optimizer.options",
            "{betas: [0.9, 0.98], eps: 1e-8}",
            "--ema_decay",
            "0.999",
        ],
        [
            "--model.options",
            "{class_token: false, img_size: null}",
            "--evaluation.sizes",
            "64,96x128",
            "--run.output",
            "1",
        ],
    ],
)
def test_written_configuration_reads_back_equal_and_complete(tmp_path, words):
    config = load_config(words)
    path = write(tmp_path, to_yaml(config))
    assert load_yaml(path) == config
    written = yaml.safe_load(path.read_text())
    assert set(written["optimizer"]) == set(vars(config.optimizer))
    assert set(written) == set(vars(config))


def test_resume_takes_the_configuration_of_the_run(tmp_path):
    (tmp_path / "config.yaml").write_text("batch_size: 7\noptimizer: {lr: 0.5}\n")
    config = load_config(["--run.resume", "true", "--run.output", str(tmp_path), "--seed", "4"])
    assert (config.batch_size, config.optimizer.lr, config.seed) == (7, 0.5, 4)
    assert config.run.resume


def test_changed_keys_leave_run_out():
    old = TrainConfig()
    new = load_config(["--schedule.epochs", "31", "--run.device", "cpu", "--model.options.depth", "3"])
    assert changed_keys(old, new) == ["model.options", "schedule.epochs"]


@pytest.mark.parametrize(
    "words",
    [
        "--batch_size 0",
        "--ema_decay 1.5",
        "--schedule.epochs 0",
        "--schedule.warmup_epochs 30",
        "--schedule.min_lr 1",
        "--augment.hflip 2",
        "--optimizer.accumulate 0",
        "--evaluation.crop_pct 0",
        "--run.resume true",
        "--seed -1",
        "--run.overwrite true --run.resume true --run.output x",
        "--evaluation.max_images 0",
        "--masked.ratio 0.75",
        "--masked.encoder visible",
        "--loss.label_smoothing 0.1 --task masked",
        "--loss.name binary-cross-entropy --task masked",
        "--augment.mixup 0.2 --task masked",
        "--augment.cutmix 0.2 --task masked --masked.encoder visible",
        "--optimizer.layer_decay 0.7 --task masked",
        "--masked.ratio 0 --task masked",
        "--masked.ratio 1 --task masked",
        "--masked.block 0 --task masked",
        "--masked.decoder_dim 64 --task masked",
        "--masked.decoder_depth 1 --task masked --masked.encoder all",
        "--masked.decoder_heads 3 --task masked",
        "--masked.decoder_dim 0 --task masked --masked.encoder visible",
        "--masked.decoder_depth 0 --task masked --masked.encoder visible",
        "--masked.decoder_heads -1 --task masked --masked.encoder visible",
    ],
)
def test_values_no_run_could_use_are_refused(words):
    key = words.split()[0][2:]
    with pytest.raises(ValueError, match=rf"^({key}|run.resume) is "):
        check_config(load_config(words.split()))


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--task masked",
        "--task masked --masked.ratio 0.75 --masked.block 2 --masked.target patch-normalized",
        "--task masked --masked.encoder visible",
        "--task masked --masked.encoder visible --masked.decoder_dim 64 --masked.decoder_depth 1",
        "--task masked --masked.decoder_dim none --loss.label_smoothing 0",
        "--task masked --data.train_sizes 32,48,48x64 --evaluation.max_images 1 --data.source images:x",
    ],
)
def test_values_of_the_own_task_are_taken(words):
    check_config(load_config(words.split()))


def test_what_belongs_to_another_task_is_refused_with_the_reason():
    """Failure class 16: an option that would be dropped in silence."""
    with pytest.raises(
        ValueError, match=r"masked\.ratio is 0\.7, but it would have no effect with task classification;"
    ):
        check_config(load_config(["--masked.ratio", "0.7"]))
    more = ["--task", "masked", "--masked.encoder", "visible"]
    with pytest.raises(ValueError, match=r"with task masked, masked\.encoder visible; set loss\.label_smoothing to 0"):
        check_config(load_config([*more, "--loss.label_smoothing", "0.1"]))
    with pytest.raises(ValueError, match=r"masked\.decoder_dim is 8, .*effect with task masked, masked\.encoder all"):
        check_config(load_config(["--task", "masked", "--masked.decoder_dim", "8"]))


def test_training_sizes_are_words_and_kept(tmp_path):
    config = load_config(["--data.train_sizes", "32,32,48x64"])
    assert config.data.train_sizes == ["32", "32", "48x64"]
    assert load_yaml(write(tmp_path, "data: {train_sizes: [32, 32, 48x64]}\n")).data == config.data
    assert load_yaml(write(tmp_path, to_yaml(config))) == config


def test_help_lists_every_key_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out.strip()
    assert text == help_text()
    for section, values in vars(TrainConfig()).items():
        names = [f"{section}.{key}" for key in vars(values)] if hasattr(values, "__dict__") else [section]
        for name in names:
            assert f"--{name}  " in text, f"the docstring does not say what {name} is"
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_load_and_say_what_they_are(path):
    check_config(load_yaml(path))
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert "python train.py --config" in text or "torchrun" in text, "no command in the header"
    for word in ("Reproduces", "Time", "Score"):
        assert f"# {word}" in text, f"the header says nothing of its {word.lower()}"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies_load_and_say_how_they_are_started(path):
    check_config(load_study(["--config", str(path)]))
    assert f"vision-rope study --config configs/{path.name}" in path.read_text()


def test_defaults_are_not_shared():
    first, second = TrainConfig(), TrainConfig()
    first.model.options["depth"] = 3
    assert second.model.options == {}
    assert replace(second, seed=1).model is second.model
