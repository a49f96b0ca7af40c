"""The study: rows from the tables, cells that are kept, resumption after a kill, tables and differences."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vision_rope import cli, flags, study
from vision_rope.config import to_yaml
from vision_rope.encodings import ENCODINGS
from vision_rope.rope_presets import PRESETS, preset
from vision_rope.study import run_cell, run_study
from vision_rope.study_config import StudyConfig, override
from vision_rope.study_plan import Cell, plan, study_rows
from vision_rope.study_results import compare_pairs, format_study, write_study

TOY: dict[str, Any] = {
    "task": "masked",
    "batch_size": 4,
    "model": {
        "name": "vit_small_patch16_224",
        "options": {
            "patch_size": 8,
            "embed_dim": 16,
            "depth": 1,
            "num_heads": 2,
            "class_token": False,
            "global_pool": "avg",
        },
    },
    "data": {"size": 16},
    "schedule": {"epochs": 2, "warmup_epochs": 0},
    "evaluation": {"sizes": ["16", "24x32"], "extend": ["none", "interpolate"]},
    "study": {"num_seeds": 1, "processes": 1, "encodings": ["none", "rope-vit-axial"], "baseline": "rope-vit-axial"},
    "run": {"num_workers": 0, "device": "cpu", "progress": False},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 12 smooth pictures each: gradients, which neighbours tell something about."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:40, 0:40] / 40
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(12):
            slopes = generator.normal(size=(3, 2)) * 80
            picture = 128 + slopes[:, 0, None, None] * (rows - 0.5) + slopes[:, 1, None, None] * (columns - 0.5)
            picture = picture.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
            Image.fromarray(picture).save(folder / name / f"{number}.png")
    return folder


def toy(images: Path, output: Path, **changes: Any) -> StudyConfig:
    """The toy study; keys such as study__num_seeds change it."""
    values = flags.merge({}, TOY)
    flags.merge(values, {"data": {"source": f"folder:{images}"}, "run": {"output": str(output)}})
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values[section] = {**values.get(section, {}), name: value}
        else:
            values[section] = value
    return flags.build(StudyConfig, values)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figures(path: Path) -> list[tuple[str, ...]]:
    """The rows of study.csv without what depends on the machine's speed."""
    keys = ("row", "seed", "size", "method", "r2", "mse", "images", "reason")
    return [tuple(row[key] for key in keys) for row in read_csv(path)]


# --- rows and cells -------------------------------------------------------------------------------------------


def test_every_encoding_for_images_gets_a_row(images: Path, tmp_path: Path) -> None:
    rows = study_rows(toy(images, tmp_path, study__encodings=["all"], study__leave_out=["sam2"]))
    for name in ENCODINGS:
        assert rows[name] == {"model.position": name}
    of_images = {name for name in PRESETS if preset(name).axes == 2}
    assert "roformer" not in of_images
    assert "qwen2-vl" not in of_images
    assert set(rows) == {*ENCODINGS, *of_images} - {"sam2"}


def test_a_row_changes_its_keys_and_no_others(images: Path, tmp_path: Path) -> None:
    config = toy(
        images,
        tmp_path,
        model__position_options={"base": 7.0},
        study__rows={
            "ten": {"model.position": "rope-vit-axial", "model.position_options": {"base": 10.0}},
            "half": {"model.position_options": {"pairing": "half"}},
            "deep": {"model": {"options": {"depth": 3}}},
        },
    )
    by_row = {cell.row: cell.config for cell in plan(config)}
    assert by_row["ten"].model.position_options == {"base": 10.0}
    # An option of the file belongs to the file's encoding, not to other rows' encodings.
    assert by_row["none"].model.position_options == {}
    assert by_row["half"].model.position_options == {"base": 7.0, "pairing": "half"}
    # A section may be written out; what it does not name stays.
    assert by_row["deep"].model.options == {**config.model.options, "depth": 3}
    for row, cell in by_row.items():
        assert row == "deep" or cell.model.options == config.model.options
        assert cell.data == config.data
        assert cell.schedule == config.schedule


def test_cells_have_folders_and_seeds_of_their_own(images: Path, tmp_path: Path) -> None:
    cells = plan(toy(images, tmp_path, seed=5, study__num_seeds=3))
    assert [(cell.row, cell.config.seed) for cell in cells] == [
        (row, seed) for seed in (5, 6, 7) for row in ("none", "rope-vit-axial")
    ]
    assert len({cell.folder for cell in cells}) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study__encodings": ["rope-vit-axal"]}, "did you mean 'rope-vit-axial'"),
        ({"study__leave_out": ["roformer"]}, "study.leave_out holds 'roformer'"),
        ({"study__encodings": ["none"], "study__leave_out": ["none"], "study__baseline": ""}, "the study has no row"),
        ({"study__baseline": "nine"}, "study.baseline is 'nine'; the rows are none, rope-vit-axial"),
        ({"study__rows": {"x": 3}}, "study.rows.x is 3"),
        ({"study__rows": {"x": {"model.positoin": "none"}}}, "row 'x' of the study: unknown key model.positoin"),
        ({"study__rows": {"x": {"run.device": "cpu"}}}, "sets run.device, which .* must be the same for all rows"),
        ({"study__rows": {"x": {"evaluation.sizes": ["16"]}}}, "sets evaluation.sizes"),
        ({"study__rows": {"x": {"evaluation": {"sizes": ["16"]}}}}, "sets evaluation.sizes"),
        ({"study__rows": {"x": {"task": "classification"}}}, "sets task"),
        ({"study__rows": {"x": {"masked.ratio": 0.3}}}, "sets masked.ratio"),
        ({"study__rows": {"x": {"data": {"source": "elpv"}}}}, "sets data.source"),
        ({"study__rows": {"x y": {}, "x=y": {}}}, "would share the folder"),
        ({"study__rows": {"x": {"optimizer.lr": -1.0}}}, "row 'x' of the study: optimizer.lr is -1.0"),
        ({"study__rows": {"none": {}}}, "has the name of an encoding's row or of a reference"),
        ({"study__rows": {"visible mean": {}}}, "has the name of an encoding's row or of a reference"),
        *[
            ({"study__rows": {name: {}}}, "but a name of a row is text")
            for name in ("..", "", "a/b", "a|b", "$x$", "x" * 61)
        ],
        ({"study__rows": {"x": {1: 2}}}, "study.rows.x is {1: 2}"),
        ({"study__num_seeds": 0}, "study.num_seeds is 0"),
        ({"study__processes": 0}, "study.processes 0"),
        ({"run__resume": True}, "goes on by itself"),
        ({"evaluation__sizes": []}, "evaluation.sizes is empty"),
    ],
)
def test_wrong_studies_are_refused(images: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        plan(toy(images, tmp_path, **changes))


def test_models_are_built_before_the_first_training(images: Path, tmp_path: Path) -> None:
    config = toy(
        images, tmp_path / "out", study__rows={"x": {"model.position": "dinov3", "model.position_options": {"b": 1}}}
    )
    with pytest.raises(ValueError, match=r"row 'x' of the study: .*no option 'b'"):
        run_study(config)
    config = toy(images, tmp_path / "out", study__rows={"x": {"data.train_sizes": ["20"]}})
    with pytest.raises(ValueError, match=r"row 'x' of the study: data\.train_sizes: size 20 is not divisible"):
        run_study(config)
    patch = {"model.options": {"patch_size": 4}}
    with pytest.raises(
        ValueError, match="row 'x' of the study: its patches have 4 x 4 pixels, those of other rows 8 x 8"
    ):
        run_study(toy(images, tmp_path / "out", study__rows={"x": patch}))
    assert not (tmp_path / "out" / "cells").exists()


def test_nothing_is_removed_before_all_is_checked(images: Path, tmp_path: Path) -> None:
    """Failure class: data lost by a command that is then refused."""
    output = tmp_path / "out"
    (output / "cells" / "none").mkdir(parents=True)
    (output / "study.yaml").write_text("")
    config = toy(images, output, run__overwrite=True, data__source="folder:nowhere")
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        run_study(config)
    assert (output / "cells" / "none").is_dir()


def test_two_studies_do_not_share_a_folder(images: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with study._locked(output), pytest.raises(ValueError, match="another study is at work in"):
        run_study(toy(images, output))


def test_a_damaged_cell_is_named_with_the_remedy(images: Path, tmp_path: Path) -> None:
    config = toy(images, tmp_path / "out")
    cell = plan(config)[0]
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(to_yaml(cell.config))
    for content in ("", "{}", "[]", '{"rows": []', "null"):
        (cell.folder / "cell.json").write_text(content)
        with pytest.raises(ValueError, match=r"cell\.json is damaged; delete the folder .*none/seed-0"):
            run_study(config)
    (cell.folder / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds a result but no config\.yaml; delete the folder"):
        run_study(config)


def test_override_names_the_nearest_key() -> None:
    config = StudyConfig()
    assert override(config, {"data.size": [8, 16], "seed": 3}).data.size == (8, 16)
    with pytest.raises(ValueError, match=r"unknown key data\.sizee; the nearest valid one is data\.size"):
        override(config, {"data.sizee": 8})


# --- a whole study --------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_study_from_end_to_end(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = toy(
        images, tmp_path / "out", study__num_seeds=2, study__rows={"sizes": {"data.train_sizes": ["16", "32"]}}
    )
    said: list[str] = []
    rows, files = run_study(config, said.append)
    assert [path.name for path in files] == ["study.csv", "pairs.csv", "study.md", "study.png"]
    assert all(path.stat().st_size for path in files)
    found = {(row["row"], row["seed"], row["size"], row["method"]): row for row in rows}
    # 3 rows x 2 seeds x 2 sizes x 2 methods, and two references x 2 sizes.
    assert len(found) == 24 + 4
    # One untrained line for all seeds, and the same pictures and masks for everyone: the same squared targets.
    scale = {(row["size"], round(row["mse"] / (1 - row["r2"]), 5)) for row in rows if row.get("r2") is not None}
    assert len(scale) == 2
    for seed in (0, 1):
        plain = found["rope-vit-axial", seed, "16", "none"]
        assert plain["r2"] == found["rope-vit-axial", seed, "16", "interpolate"]["r2"]
        assert found["none", seed, "24x32", "interpolate"]["reason"]
    assert found["none", 0, "16", "none"]["r2"] != found["none", 1, "16", "none"]["r2"]
    text = files[2].read_text()
    assert "| neighbour average | none |" in text
    assert len(said) == 7
    assert said[0].startswith("3 rows x 2 seeds in ")
    assert capsys.readouterr().out == ""
    # A damaged file of the references is made anew.
    (tmp_path / "out" / "references.json").write_text("{}")
    # Everything is kept: the second run trains nothing and says the same.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").rglob("*.*")}
    again, _ = run_study(config, said.append)
    # The references were measured anew, so that their speed may differ.
    speed = ("images_per_second", "peak_memory_mb")
    trained = [row for row in rows if row["seed"] is not None]
    assert [row for row in again if row["seed"] is not None] == trained
    for mine, theirs in zip(again, rows, strict=True):
        assert {key: mine[key] for key in mine if key not in speed} == {
            key: theirs[key] for key in theirs if key not in speed
        }
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").rglob("*.*")}
    assert "0 of 6 trainings to do" in said[-1]
    # A cell is a run folder like any other.
    cell = tmp_path / "out" / "cells" / "none" / "seed-0"
    assert cli.main(["evaluate", str(cell), "--sizes", "16", "--workers", "0", "--no-progress", "--device", "cpu"]) == 0
    # More rows and seeds may join; another budget may not.
    with pytest.raises(ValueError, match=r"other values of schedule\.epochs"):
        run_study(replace(config, schedule=replace(config.schedule, epochs=1)))


@pytest.mark.integration
def test_a_cell_goes_on_where_it_was_stopped(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure class: an interrupted run trained anew or evaluated half trained."""
    whole, stopped = (
        next(cell for cell in plan(toy(images, tmp_path / name)) if cell.row == "rope-vit-axial")
        for name in ("whole", "stopped")
    )
    expected = run_cell(whole)["rows"]
    from vision_rope.trainer import Trainer

    epochs: list[int] = []
    original = Trainer._train_epoch

    def stop_in_the_second(self: Trainer, epoch: int) -> Any:
        epochs.append(epoch)
        if len(epochs) == 2:
            raise KeyboardInterrupt
        return original(self, epoch)

    # As a kill leaves it while the very first file is written.
    stopped.folder.mkdir(parents=True)
    (stopped.folder / "config.yaml.tmp").write_text("x")
    monkeypatch.setattr(Trainer, "_train_epoch", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_cell(stopped)
    assert stopped.load() is None
    found = run_cell(stopped)["rows"]
    assert epochs == [0, 1, 1]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine["r2"], mine["size"], mine["method"]) == (theirs["r2"], theirs["size"], theirs["method"])


@pytest.mark.integration
def test_a_diverged_training_is_reported_and_the_study_goes_on(images: Path, tmp_path: Path) -> None:
    config = toy(
        images,
        tmp_path / "out",
        optimizer={"name": "sgd", "lr": 1.0, "clip_grad": None},
        study__encodings=["none"],
        study__rows={"mad": {"model.position": "none", "optimizer.lr": 1e12}},
        study__baseline="",
        evaluation__extend=["none"],
    )
    rows, files = run_study(config, lambda text: None)
    failed = [row for row in rows if row["row"] == "mad"]
    assert len(failed) == 1
    assert "not finite" in failed[0]["reason"]
    assert "- mad, seed 0, failed: the loss " in files[2].read_text()
    assert any(row["row"] == "none" and row.get("r2") is not None for row in rows)


@pytest.mark.integration
def test_a_killed_study_goes_on(images: Path, tmp_path: Path) -> None:
    """SIGKILL of the study's own process: no process is left behind, finished cells are kept, results are equal."""
    config = toy(images, tmp_path / "killed", study__num_seeds=2, study__processes=2, evaluation__sizes=["16"])
    file = tmp_path / "study.yaml"
    file.write_text(flags.to_yaml(config))
    words = [sys.executable, "-m", "vision_rope.cli", "study", "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cells = tmp_path / "killed" / "cells"
    deadline = time.monotonic() + 120
    while not list(cells.glob("*/*/cell.json")):
        assert process.poll() is None, "the study ended before it could be killed"
        assert time.monotonic() < deadline, "no cell was finished in two minutes"
        time.sleep(0.02)
    children = children_of(process.pid)
    assert children
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in cells.glob("*/*/cell.json")}
    assert 0 < len(finished) < 4, "killed too late to show anything"
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "processes of the killed study are left behind"
        time.sleep(0.05)
    finished = {path: path.stat().st_mtime_ns for path in cells.glob("*/*/cell.json")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert f"{4 - len(finished)} of 4 trainings to do" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    # In one go and in this process, the same numbers.
    unbroken = replace(
        config, run=replace(config.run, output=str(tmp_path / "unbroken")), study=replace(config.study, processes=1)
    )
    run_study(unbroken, lambda text: None)
    assert figures(tmp_path / "killed" / "study.csv") == figures(tmp_path / "unbroken" / "study.csv")


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`, apart from multiprocessing's resource tracker, which ends by itself."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if lines.get("PPid") == str(pid) and b"resource_tracker" not in command:
            found.append(int(status.parent.name))
    return found


@pytest.mark.integration
def test_a_lost_process_is_said_with_the_remedy(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "run_cell", _end_at_once)
    config = toy(images, tmp_path / "out", study__processes=2)
    with pytest.raises(study.ProcessLostError, match=r"a process of the study was killed.*fewer study\.processes"):
        run_study(config)


def _end_at_once(cell: Cell) -> dict[str, Any]:
    os._exit(9)


def test_overwrite_removes_a_study_and_nothing_else(images: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "cells" / "none").mkdir(parents=True)
    (output / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="holds files but no study"):
        study._remove(output)
    (output / "study.yaml").write_text("")
    study._remove(output)
    assert [path.name for path in output.iterdir()] == ["mine.txt"]


def test_the_command_says_mistakes_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "--study.num_seds", "3"]) == 2
    assert "--study.num_seeds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["study", "--help"])
    assert "--study.processes" in capsys.readouterr().out


# --- tables ---------------------------------------------------------------------------------------------------


def row(name: str, seed: int | None, method: str, r2: float | None, size: str = "48", **more: Any) -> dict[str, Any]:
    side = int(size)
    # The first seed takes 8 s, the second 10, the third 12.
    cost = None if seed is None else 8.0 + 2 * seed
    facts = {
        "cpu_seconds": cost,
        "train_size": "24",
        "images": 7,
        "data": "d",
        "height": side,
        "width": side,
        "mse": 1.0,
    }
    return {**facts, "row": name, "seed": seed, "size": size, "method": method, "r2": r2, "reason": None, **more}


ROWS = [
    row("visible mean", None, "none", 0.2),
    *(row("a", seed, "none", 0.5 + 0.01 * seed) for seed in range(3)),
    *(row("a", seed, "ntk", 0.6 + 0.02 * seed) for seed in range(3)),
    *(row("b", seed, "none", (0.45, 0.52, 0.40)[seed]) for seed in range(3)),
    *(row("b", seed, "ntk", None, reason="ntk means nothing for b: it has no ladder") for seed in range(3)),
]


def test_pairs_are_made_within_a_seed() -> None:
    method, against = compare_pairs(ROWS, "r2", "a")
    assert (method["row"], method["against"], method["method"]) == ("a", "none", "ntk")
    assert method["differences"] == pytest.approx([0.10, 0.11, 0.12])
    assert method["resolved"]
    assert (against["row"], against["against"]) == ("b", "a")
    assert against["differences"] == pytest.approx([-0.05, 0.01, -0.12])
    assert (against["least"], against["most"]) == (min(against["differences"]), max(against["differences"]))
    assert against["mean"] == pytest.approx(np.mean(against["differences"]))
    assert not against["resolved"], "the seeds disagree on the sign"


def test_two_seeds_resolve_nothing() -> None:
    pairs = compare_pairs([row for row in ROWS if row["seed"] != 2], "r2", "")
    assert [pair["resolved"] for pair in pairs] == [False]


def test_a_method_that_changes_nothing_is_no_pair() -> None:
    rows = [row("a", seed, method, 0.5) for seed in range(3) for method in ("none", "ntk")]
    assert compare_pairs(rows, "r2", "") == []
    assert "| a | ntk |" not in format_study(rows, "")


def test_a_row_called_none_can_be_the_baseline() -> None:
    rows = [
        row(name, seed, method, value)
        for name, value in (("none", 0.2), ("a", 0.5))
        for seed in range(3)
        for method in ("none", "ntk")
    ]
    rows = [{**each, "r2": each["r2"] + 0.1 * (each["method"] == "ntk")} for each in rows]
    text = format_study(rows, "none")
    methods, baseline = text.split("A method against none")[1].split("A row against the baseline")
    assert methods.count("| ntk |") == 2
    assert "| a | none | 48 | none | +30.0, +30.0, +30.0 | +30.0 | higher |" in baseline


def test_a_missing_seed_is_said() -> None:
    rows = [*ROWS[:-4], {"row": "b", "seed": 2, "method": "none", "cpu_seconds": 1.0, "reason": "the loss exploded"}]
    rows = [each for each in rows if (each["row"], each["seed"], each.get("r2")) != ("b", 2, 0.40)]
    text = format_study(rows, "")
    assert "| b | none | 48.5 (45.0 to 52.0) [2 of 3 seeds] |" in text
    assert "- b, seed 2, failed: the loss exploded." in text


def test_a_study_without_values_has_tables(tmp_path: Path) -> None:
    """Pictures of one colour have no R2."""
    rows = [row("a", seed, "none", None) for seed in range(3)]
    assert "R2" in format_study(rows, "")
    write_study(rows, "", tmp_path)


def test_the_tables_say_mean_spread_and_verdict() -> None:
    text = format_study(ROWS, "a")
    assert "R2 x 100 at image sizes in pixels (trained at 24); mean (least to most) of 3 seeds; 7 images of d." in text
    assert "| visible mean | none | 20.0 |  |" in text
    assert "| a | none | 51.0 (50.0 to 52.0) | 10 |" in text
    assert "| a | ntk | 62.0 (60.0 to 64.0) |  |" in text
    assert "- b: no figures for ntk: it has no ladder." in text
    assert "| a | none | 48 | ntk | +10.0, +11.0, +12.0 | +11.0 | higher |" in text
    assert "| b | a | 48 | none | -5.0, +1.0, -12.0 | -5.3 | not resolved |" in text


def test_files_hold_the_rows(tmp_path: Path) -> None:
    files = write_study(ROWS, "", tmp_path)
    rows = read_csv(files[0])
    assert len(rows) == len(ROWS)
    assert [float(row["r2"]) for row in rows if row["r2"]] == [row["r2"] for row in ROWS if row["r2"] is not None]
    with Image.open(files[3]) as picture:
        assert picture.size[0] > 300
    assert json.loads(json.dumps([path.name for path in files])) == ["study.csv", "pairs.csv", "study.md", "study.png"]
