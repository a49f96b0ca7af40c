"""The command: quick help, nearest names, one sentence for a mistake, the table and the files of an evaluation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import vision_rope
from vision_rope import cli, trainer
from vision_rope import evaluate as evaluation
from vision_rope import probe as probing

HEAVY = ("torch", "timm", "matplotlib", "torchmetrics", "tensorboard", "ultralytics", "torchvision")


@pytest.mark.parametrize("words", [[], ["evaluate"], ["track"], ["probe"], ["inspect"], ["train"], ["presets"]])
def test_help_is_quick_and_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys, vision_rope.cli as cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5  # 0.1 s on an idle machine
    assert done.stdout.splitlines()[-1] == "[]"
    assert f"usage: vision-rope {' '.join(words)}".strip() in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "run", "--size", "64"], "unknown flag --size; did you mean --sizes?"),
        (["evaluate", "run", "--extent=ntk"], "unknown flag --extent; did you mean --extend?"),
        (["evaluate", "run", "--sizes", "64", "96"], "'96' is one argument too many"),
        (["evaluate", "run", "--crop-pct", "all"], "argument --crop-pct: invalid float value: 'all'"),
        (["evaluate", "run", "--weights", "first"], "invalid choice: 'first'"),
        (["evaluate", "run", "--option", "depth"], "--option depth must be NAME=VALUE"),
        (["evaluate"], "required: RUN_OR_MODEL"),
        (
            ["evalute", "run"],
            "train, study, evaluate, track, probe, inspect, benchmark, presets; did you mean evaluate?",
        ),
        (["evaluate", "vit_tiny_patch16_224", "--data", "folder:/no/such/folder"], "/no/such/folder"),
        (["evaluate", "vit_tiny_patch16_224", "--data", "elpv", "--sizes", "64,big"], "size is 'big'"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Failure class 20."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vision-rope: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_debug_shows_where_a_mistake_comes_from() -> None:
    with pytest.raises(ValueError, match="size is 'big'"):
        cli.main(["evaluate", "vit_tiny_patch16_224", "--data", "elpv", "--sizes", "big", "--debug"])


def test_programming_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(evaluation, "evaluate", fail)
    with pytest.raises(KeyError):
        cli.main(["evaluate", "run"])


def test_interrupts_end_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "evaluate", interrupt)
    assert cli.main(["evaluate", "run"]) == 130
    assert capsys.readouterr().err == "vision-rope: interrupted\n"


def test_every_flag_of_evaluate_arrives(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {}

    def note(target: str, **options: Any) -> tuple[list[Any], list[Path]]:
        seen.update(target=target, **options)
        return [], []

    monkeypatch.setattr(evaluation, "evaluate", note)
    words = """evaluate vit_tiny_patch16_224 --data folder:x --root r --split test --sizes 64,8x16 --extend ntk
        --frames 8,16 --fps 2,4 --skip-broken
        --out o --crop-pct 0.9 --batch-size 3 --workers 1 --device cpu --precision bf16 --no-progress --weights last
        --pretrained --checkpoint c --position sam2 --option img_size=64 --option patch_size=[8,16] --seed 4
        --max-images 9"""
    assert cli.main(words.split()) == 0
    assert seen == {
        "target": "vit_tiny_patch16_224",
        "data": "folder:x",
        "root": "r",
        "split": "test",
        "sizes": "64,8x16",
        "frames": "8,16",
        "fps": "2,4",
        "skip_broken": True,
        "extend": "ntk",
        "output": "o",
        "crop_pct": 0.9,
        "batch_size": 3,
        "max_images": 9,
        "num_workers": 1,
        "device": "cpu",
        "precision": "bf16",
        "progress": False,
        "weights": "last",
        "pretrained": True,
        "checkpoint": "c",
        "position": "sam2",
        "model_options": {"img_size": 64, "patch_size": [8, 16]},
        "seed": 4,
    }
    # Only the first process of several writes and prints.
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("default")
def test_notes_are_a_clean_line_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vision_rope import evaluate as evaluation

    def note(target: str, **options: Any) -> tuple[list[Any], list[Path]]:
        for _ in range(2):
            warnings.warn_explicit("a.mp4: left out", UserWarning, cli.__file__, 1, registry=seen)
        return [], []

    seen: dict[Any, Any] = {}
    monkeypatch.setattr(evaluation, "evaluate", note)
    assert cli.main(["evaluate", "x"]) == 0
    assert capsys.readouterr().err == "note: a.mp4: left out\n"


def test_every_flag_of_probe_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def note(folder: str, **options: Any) -> list[Any]:
        seen.update(folder=folder, **options)
        return []

    monkeypatch.setattr(probing, "probe", note)
    words = f"""probe run --data folder:x --root r --size 8x16 --extend ntk --weights last,untrained --k 5
        --temperature 0.1 --out {tmp_path} --batch-size 3 --workers 1 --device cpu --precision bf16 --no-progress"""
    assert cli.main(words.split()) == 0
    assert seen == {
        "folder": "run",
        "data": "folder:x",
        "root": "r",
        "size": "8x16",
        "extend": "ntk",
        "weights": "last,untrained",
        "k": 5,
        "temperature": 0.1,
        "batch_size": 3,
        "num_workers": 1,
        "device": "cpu",
        "precision": "bf16",
        "progress": False,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe.csv", "probe.json"]


def test_train_hands_its_words_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "main", lambda words: 7 if words == ["--config", "a.yaml", "--seed", "3"] else 0)
    assert cli.main(["train", "--config", "a.yaml", "--seed", "3"]) == 7


def test_presets_lists_each_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(vision_rope.presets())


def test_evaluate_prints_the_table_and_the_files(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Photographs of many sizes and shapes, sorted into two classes.
    import tarfile

    from PIL import Image

    with tarfile.open(shared_data / "imagenet_native_100.tar") as tar:
        for index, member in enumerate(member for member in tar if member.isfile()):
            if index >= 24:
                break
            with Image.open(tar.extractfile(member)) as picture:  # type: ignore[arg-type]
                picture.thumbnail((120, 120))
                path = tmp_path / "data" / ("even", "odd")[index % 2] / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.convert("RGB").save(path)
    words = f"""evaluate vit_tiny_patch16_224 --position rope-vit-mixed --data folder:{tmp_path / "data"}
        --sizes 32,32x48 --extend ntk,interpolate --out {tmp_path / "out"} --device cpu --workers 0
        --option img_size=32 --option depth=1"""
    assert cli.main(words.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("UNTRAINED WEIGHTS")
    start = next(index for index, line in enumerate(lines) if line.startswith("size "))
    assert lines[start].split() == [
        "size",
        "method",
        "crop_pct",
        "top-1",
        "balanced",
        "AUROC",
        "NLL",
        "ECE",
        "images/s",
        "MB",
    ]
    table = [line.split() for line in lines[start + 1 : start + 7]]
    assert [cells[:3] for cells in table] == [
        [size, method, "1"] for size in ("32", "32x48") for method in ("none", "ntk", "interpolate")
    ]
    assert " ".join(table[1][3:]).startswith("ntk means nothing for")
    assert all(0 <= float(cell) <= 1 for cell in table[0][3:6])
    written = [Path(line.removeprefix("wrote ")) for line in lines if line.startswith("wrote ")]
    assert [path.name for path in written] == ["evaluation.csv", "evaluation.json", "per_class.csv", "evaluation.png"]
    assert all(path.stat().st_size > 0 for path in written)


@pytest.mark.integration
def test_a_closed_pipe_is_no_error() -> None:
    """As in `vision-rope presets | true`: the reader leaves before there is anything to read."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    script = "import sys; from vision_rope import cli; sys.exit(cli.main(['presets']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() != 0
    process.stderr.close()
