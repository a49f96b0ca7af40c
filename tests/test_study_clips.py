"""Studies of clips: rows, shared keys, points as columns, several metrics, and a whole one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vision_rope import flags
from vision_rope.encodings import ENCODINGS
from vision_rope.points import Point
from vision_rope.rope_presets import PRESETS, preset
from vision_rope.study import run_study
from vision_rope.study_config import StudyConfig
from vision_rope.study_plan import plan, study_rows
from vision_rope.study_results import compare_pairs, format_study, write_study

TOY: dict[str, Any] = {
    "task": "masked",
    "batch_size": 4,
    "model": {
        "name": "vit_small_patch16_224",
        "options": {
            **{"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 1},
            **{"class_token": False, "global_pool": "avg"},
        },
    },
    "data": {"source": "frames:nowhere", "size": 16},
    "video": {"num_frames": 4, "fps": 10.0},
    "schedule": {"epochs": 1, "warmup_epochs": 0},
    "evaluation": {"sizes": ["16"], "frames": [4, 8], "extend": ["none", "interpolate"]},
    "study": {"num_seeds": 1, "processes": 1, "encodings": ["qwen2-vl", "rope-vit-axial"], "baseline": "qwen2-vl"},
    "run": {"num_workers": 0, "device": "cpu", "progress": False},
}


def toy(**changes: Any) -> StudyConfig:
    """The toy study; keys such as study__num_seeds change it."""
    values = flags.merge({}, TOY)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section] = {**values[section], name: value}
    return flags.build(StudyConfig, values)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- rows -----------------------------------------------------------------------------------------------------


def test_every_encoding_with_time_gets_a_row() -> None:
    axes = {name: preset(name, head_dim=24).axes for name in PRESETS}
    rows = study_rows(toy(study__encodings=["all"], study__leave_out=["mixed-3d"]))
    assert set(rows) == {*ENCODINGS, *(name for name in PRESETS if axes[name] == 3)} - {"mixed-3d"}
    # One of two axes is a row without an axis of time.
    assert set(study_rows(toy())) == {"qwen2-vl", "rope-vit-axial"}
    with pytest.raises(ValueError, match="holds 'roformer'; the position encodings for clips are"):
        study_rows(toy(study__encodings=["roformer"], study__baseline=""))


def test_images_have_no_encodings_with_time() -> None:
    with pytest.raises(ValueError, match="holds 'qwen2-vl'; the position encodings for images are"):
        study_rows(toy(video__num_frames=None, study__baseline=""))


@pytest.mark.parametrize("key", ["video.num_frames", "video.fps", "video.tubelet", "masked.block_steps", "motion.size"])
def test_rows_share_their_clips(key: str) -> None:
    with pytest.raises(ValueError, match=f"sets {key}, which says what is measured"):
        study_rows(toy(study__rows={"other": {key: 1}}))


def test_rows_may_differ_in_attention_and_time() -> None:
    keys = {"video.causal": True, "video.attention": "factorised", "video.positions_per_second": 5.0}
    cells = plan(toy(study__rows={"other": {"model.position": "qwen2-vl", **keys}}))
    assert [cell.config.video.causal for cell in cells] == [False, False, True]


# --- tables ---------------------------------------------------------------------------------------------------


def row(name: str, seed: int | None, frames: int, fps: float | None, figure: float, **more: Any) -> dict[str, Any]:
    return {
        **{"row": name, "seed": seed, "cpu_seconds": 3.0, "data": "d", "method": "none", "reason": None},
        **Point((16, 16), frames, fps).describe((2, 8, 8)),
        **Point((16, 16), 4, 2.0).describe_training(),
        **{"clips": 9, "clips_left_out": 0, "clips_shorter": 0, "clips_longer": 0},
        **{"direction": figure, "way": figure + 0.1, "speed": figure + 0.2},
        **more,
    }


ROWS = [
    row(name, seed, frames, fps, figure + frames / 100 + seed / 1000, method=method)
    for name, start in (("a", 0.2), ("b", 0.5))
    for seed in range(3)
    for method, figure in (("none", start), ("ntk", start + 0.05))
    for fps in (None, 2.0)
    for frames in (8, 4)
]


def test_columns_are_points_and_motion_has_three_tables() -> None:
    text = format_study(ROWS, "a")
    head = "| row | method | 4 frames 2 fps 16 | 8 frames 2 fps 16 | 4 frames 16 | 8 frames 16 | CPU s a training |"
    assert text.count(head) == 3
    assert "direction x 100 at frames, rates and sizes in pixels (trained at 4 frames 2 fps 16); mean" in text
    assert "3 seeds; 9 clips of d." in text
    assert "| a | none | 24.1 (24.0 to 24.2) | 28.1 (28.0 to 28.2) | 24.1" in text
    way = text.split("way x 100")[1].split("speed x 100")[0]
    assert "| a | none | 34.1 (34.0 to 34.2) | 38.1" in way
    methods, baseline = text.split("A method against none")[1].split("A row against the baseline")
    assert "(direction; way and speed in pairs.csv)" in methods
    assert "| row | against | point | method |" in methods
    assert "| a | none | 8 frames 16 | ntk | +5.0, +5.0, +5.0 | +5.0 | higher |" in methods
    assert "| b | a | 4 frames 2 fps 16 | none | +30.0, +30.0, +30.0 | +30.0 | higher |" in baseline


def test_pairs_are_made_within_a_point() -> None:
    pairs = compare_pairs(ROWS, "direction", "a")
    assert {pair["kind"]: pair["mean"] for pair in pairs} == pytest.approx({"method": 0.05, "row": 0.3})
    assert len(pairs) == 4 * 3
    assert all("size" not in pair for pair in pairs)


def test_tables_say_which_clips_were_not_as_asked() -> None:
    rows = [*ROWS, *(row("a", seed, 16, 2.0, 0.5, clips=7, clips_left_out=2, clips_shorter=3) for seed in range(3))]
    text = format_study(rows, "")
    assert "7 to 9 clips of d." in text
    assert "- 16 frames 2 fps 16: 2 of 7 clips" not in text
    assert "- 16 frames 2 fps 16: 3 of 7 clips are shorter, and sampled more densely." in text
    assert "- 16 frames 2 fps 16: 2 clips are left out, because they cannot be read or have too few frames." in text


def test_files_hold_all_metrics(tmp_path: Path) -> None:
    files = write_study(ROWS, "a", tmp_path)
    assert [row["fps"] for row in read_csv(files[0])[:4]] == ["", "", "2.0", "2.0"]
    pairs = read_csv(files[1])
    assert [pair["metric"] for pair in pairs] == [name for name in ("direction", "way", "speed") for _ in range(12)]
    with Image.open(files[3]) as picture:
        assert picture.width > 300


# --- a whole study --------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_study_of_clips_from_end_to_end(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for clip in range(8):
        frames = tmp_path / "clips" / "x" / str(clip)
        frames.mkdir(parents=True)
        picture = generator.integers(0, 255, (6, 6, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
        for frame in range(10):
            Image.fromarray(np.roll(picture, frame, 1)).save(frames / f"{frame}.png")
    (tmp_path / "clips" / "fps.txt").write_text("10\n")
    source = f"frames:{tmp_path / 'clips'}"
    # The same clips again: the figures must be those of the study.
    config = toy(data__source=source, run__output=str(tmp_path / "study"), study__elsewhere=[source])
    lines: list[str] = []
    rows, files = run_study(config, report=lines.append)
    references = {row["row"] for row in rows if row["seed"] is None}
    assert references == {"visible mean", "neighbour average", "nearest frame"}
    assert [row["frames"] for row in rows if row["row"] == "nearest frame"] == [4, 8]
    for name in ("qwen2-vl", "rope-vit-axial"):
        own = [row for row in rows if row["row"] == name]
        assert [row["frames"] for row in own if row["method"] == "interpolate"] == [4, 8]
        assert all(row["fps"] == 10.0 and row["clips"] == 2 for row in own)
    text = files[2].read_text()
    assert "| row | method | 4 frames 10 fps 16 | 8 frames 10 fps 16 | CPU s a training |" in text
    assert "at 4 frames 10 fps 16" in lines[1]

    elsewhere = [path for path in files if path.name == "study.csv" and "elsewhere" in path.parts]
    assert len(elsewhere) == 1
    found = {row["row"]: float(row["r2"]) for row in read_csv(elsewhere[0])}
    trained = [row for row in rows if row["seed"] is not None and (row["frames"], row["method"]) == (4, "none")]
    assert found == pytest.approx({row["row"]: row["r2"] for row in trained})

    # Finished cells are kept, and with them the references and what they came to elsewhere.
    for kept in (tmp_path / "study" / "cells").glob("*/*/elsewhere/*/evaluation.csv"):
        kept.unlink()
    again, _ = run_study(config, report=lines.append)
    assert again == rows
    assert not list((tmp_path / "study" / "cells").glob("*/*/elsewhere/*/evaluation.csv")), "not judged again"
    assert "0 of 2 trainings to do" in lines[-1]
