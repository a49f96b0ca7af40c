"""The trainings of a study, its cells: which there are, and refusals of what cannot work or compare."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vision_rope import flags
from vision_rope.config import TrainConfig, changed_keys, load_yaml
from vision_rope.encodings import ENCODINGS
from vision_rope.references import REFERENCES
from vision_rope.rope_presets import PRESETS, preset
from vision_rope.rules import check_config
from vision_rope.study_config import StudyConfig, override
from vision_rope.suggestion import did_you_mean

CELLS = "cells"
DEFAULT_OUTPUT = "runs/study"
ROW_NAME = re.compile(r"[^\W_][\w .,+=()-]{0,59}")
# What all rows are measured by.
SHARED_KEYS = (
    *("task", "seed", "masked.ratio", "masked.block", "masked.target", "data.source", "data.root", "data.train_split"),
    *("data.val_split", "data.val_fraction", "data.split_seed", "data.download", "data.interpolation"),
    *("data.mean", "data.std", "masked.block_steps"),
    *("video.num_frames", "video.fps", "video.tubelet", "video.broken"),
)


@dataclass(frozen=True)
class Cell:
    """One training of a study.

    Attributes:
        row: name of its row.
        config: configuration of its run, whose output is its folder and whose seed tells it from others of its row.
    """

    row: str
    config: TrainConfig

    @property
    def folder(self) -> Path:
        assert self.config.run.output is not None
        return Path(self.config.run.output)

    def load(self) -> dict[str, Any] | None:
        """What the finished cell came to; None where it is not finished.

        Raises:
            ValueError: where its file is damaged.
        """
        path = self.folder / "cell.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text())
            return {key: found[key] for key in ("rows", "failed", "cpu_seconds")}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged; {self.remedy}") from error

    @property
    def remedy(self) -> str:
        return f"delete the folder {self.folder}, and the same command trains it again"


def study_rows(config: StudyConfig) -> dict[str, dict[str, Any]]:
    """The rows of a study by name, each with the keys in which it differs: encodings of the tables, then `study.rows`.

    Raises:
        ValueError: for an encoding that is in no table, and where no row is left.
    """
    section = config.study
    in_space, in_time = ([name for name in PRESETS if preset(name, head_dim=24).axes == axes] for axes in (2, 3))
    clips = config.video.num_frames is not None
    # Presets of two axes know no time: of clips they are taken where they are named.
    everything = [*ENCODINGS, *(in_time if clips else in_space)]
    known = [*everything, *(in_space if clips else [])]
    wanted = everything if section.encodings == ["all"] else section.encodings
    for key, names in (("encodings", wanted), ("leave_out", section.leave_out)):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"study.{key} holds {name!r}; the position encodings for {'clips' if clips else 'images'} are "
                    f"{', '.join(known)}, or all of them: all{did_you_mean(name, known)}"
                )
    rows: dict[str, dict[str, Any]] = {
        name: {"model.position": name} for name in wanted if name not in section.leave_out
    }
    for name, keys in section.rows.items():
        _check_row(name, keys, taken=[*rows, *REFERENCES])
        rows[name] = dict(flags.flatten(StudyConfig, keys))
    if not rows:
        raise ValueError("the study has no row; give study.encodings or study.rows")
    if section.baseline and section.baseline not in rows:
        raise ValueError(
            f"study.baseline is {section.baseline!r}; the rows are {', '.join(rows)}"
            f"{did_you_mean(section.baseline, rows)}"
        )
    return rows


def _check_row(name: Any, keys: Any, *, taken: Sequence[str]) -> None:
    """Refuse a name that could not stand in a table, a figure and a path, and keys that rows must share."""
    if not isinstance(name, str) or not ROW_NAME.fullmatch(name):
        raise ValueError(
            f"study.rows holds {name!r}, but a name of a row is text of at most 60 letters, digits, blanks and "
            ".,+=()_- that begins with a letter or a digit"
        )
    if name in taken:
        raise ValueError(f"study.rows.{name} has the name of an encoding's row or of a reference; choose another")
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"study.rows.{name} is {keys!r}, but it must hold keys: {{model.position: rope-vit-axial}}")
    for key, _ in flags.flatten(StudyConfig, keys):
        if key in SHARED_KEYS or key.startswith(("run.", "study.", "evaluation.", "motion.")):
            raise ValueError(
                f"study.rows.{name} sets {key}, which says what is measured or where, and must be the same for all rows"
            )


def plan(config: StudyConfig) -> list[Cell]:
    """All trainings of a study, seed by seed, so that an early stop leaves all rows with the first seeds.

    Raises:
        ValueError: for anything in a row that no run could use, with the row's name.
    """
    if config.study.num_seeds < 1 or config.study.processes < 1:
        raise ValueError(
            f"study.num_seeds is {config.study.num_seeds} and study.processes {config.study.processes}, but both must "
            "be at least 1"
        )
    if config.run.resume:
        raise ValueError("run.resume is on, but a study goes on by itself where its output holds finished cells")
    if not config.evaluation.sizes:
        raise ValueError("evaluation.sizes is empty, but a study compares sizes; give some, for instance 48,96,144")
    output = Path(config.run.output or DEFAULT_OUTPUT)
    cells: list[Cell] = []
    folders: dict[str, str] = {}
    for seed in range(config.seed, config.seed + config.study.num_seeds):
        for name, keys in study_rows(config).items():
            folder = re.sub(r"[^\w.-]+", "-", name)
            if folders.setdefault(folder, name) != name:
                raise ValueError(
                    f"study.rows {folders[folder]!r} and {name!r} would share the folder {folder}; rename one"
                )
            try:
                run = replace(
                    config.run,
                    output=str(output / CELLS / folder / f"seed-{seed}"),
                    overwrite=False,
                    progress=False,
                    tensorboard=False,
                )
                cell = Cell(name, replace(override(config, keys), seed=seed, run=run))
                check_config(cell.config)
            except ValueError as error:
                raise ValueError(f"row {name!r} of the study: {error}") from error
            cells.append(cell)
    return cells


def check_models(config: StudyConfig, cells: Sequence[Cell]) -> None:
    """Build every row's model once, so that what cannot be built is said before the first training."""
    from vision_rope.preparation import build_start, check_sweep, count_classes

    num_classes = count_classes(config)
    first: tuple[int, ...] | None = None
    for cell in cells[: len(cells) // config.study.num_seeds]:
        try:
            model: Any = build_start(cell.config, num_classes)
            check_sweep(cell.config, model)
            patch_size = tuple(model.patch_embed.patch_size)
            first = first or patch_size
            if config.task == "masked" and patch_size != first:
                raise ValueError(
                    f"its patches have {patch_size[0]} x {patch_size[1]} pixels, those of other rows {first[0]} x "
                    f"{first[1]}; hidden patches of another size are another task, so that no figures compare"
                )
        except ValueError as error:
            raise ValueError(f"row {cell.row!r} of the study: {error}") from error


def check_kept(cells: Sequence[Cell]) -> None:
    """Refuse to take up cells that were trained under another configuration."""
    for cell in cells:
        stored = cell.folder / "config.yaml"
        if (cell.folder / "cell.json").is_file() and not stored.is_file():
            raise ValueError(f"{cell.folder} holds a result but no config.yaml; {cell.remedy}")
        if stored.is_file() and (changed := changed_keys(load_yaml(stored), cell.config)):
            raise ValueError(
                f"{cell.folder} was trained with other values of {', '.join(changed)}; give another run.output, or "
                "--run.overwrite true to start the study anew"
            )
