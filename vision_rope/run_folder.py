"""The folder a run writes into: configuration, a row of numbers an epoch, a log, TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from vision_rope.checkpoint import find_last, write_whole
from vision_rope.config import TrainConfig, changed_keys, load_yaml, to_yaml

Row = dict[str, Any]

# What a run writes; `run.overwrite` removes these and nothing else.
OWN_NAMES = (
    "config.yaml",
    "metrics.csv",
    "metrics.jsonl",
    "log.txt",
    "best.safetensors",
    "last",
    "last.old",
    "last.tmp",
    "evaluation",
    "masks",
    "reconstructions",
    "tensorboard",
)


def default_output() -> str:
    """A folder name from the clock, one that is not there yet."""
    name = f"runs/{datetime.now():%Y%m%d-%H%M%S}"
    count = 1
    while Path(name if count == 1 else f"{name}-{count}").exists():
        count += 1
    return name if count == 1 else f"{name}-{count}"


def check_output(config: TrainConfig) -> None:
    """Refuse an output folder that holds something else, or a resumption that has nothing to go on with.

    Raises:
        ValueError: with the ways out.
    """
    assert config.run.output is not None
    folder = Path(config.run.output)
    is_run = (folder / "config.yaml").is_file()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run.output {folder} is a file, but it must be a folder")
    if config.run.resume:
        if not is_run:
            raise ValueError(f"run.output {folder} holds no run to resume; leave run.resume out to start one there")
        if find_last(folder) is None:
            raise ValueError(
                f"run.output {folder} stopped before its first epoch ended; start anew: --run.overwrite true"
            )
        stored = load_yaml(folder / "config.yaml")
        if changed := changed_keys(stored, config):
            raise ValueError(
                f"a resumed run keeps its configuration, but {', '.join(changed)} changed against "
                f"{folder / 'config.yaml'}; only run.* may change; for other values give another run.output"
            )
    elif folder.exists() and any(folder.iterdir()):
        if config.run.overwrite and not is_run:
            raise ValueError(f"run.output {folder} holds files but no run (no config.yaml); give another folder")
        if not config.run.overwrite:
            resume = "--run.resume true to go on with it, " if find_last(folder) is not None else ""
            remedy = f"{resume}--run.overwrite true to start anew, or " if is_run else ""
            raise ValueError(f"run.output {folder} is not empty; give {remedy}another folder")


class RunFolder:
    """Writer of a run folder. Only the main process writes; in the others every method does nothing."""

    def __init__(self, config: TrainConfig, *, is_main: bool) -> None:
        assert config.run.output is not None
        self.path = Path(config.run.output)
        self.rows: list[Row] = []
        self._config = config
        self._is_main = is_main
        self._events: Any = None

    def prepare(self, first_epoch: int) -> None:
        """Make the folder for a run that starts after `first_epoch` epochs; later rows are dropped."""
        config = self._config
        if config.run.overwrite and self._is_main:
            for name in OWN_NAMES:
                path = self.path / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        if config.run.resume:
            self.rows = [row for row in read_rows(self.path) if row["epoch"] <= first_epoch]
        if not self._is_main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        if not config.run.resume:
            write_whole(self.path / "config.yaml", _stored(config).encode())
        if config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self.path / "tensorboard"), purge_step=first_epoch + 1)

    def log(self, message: str) -> None:
        """Print a line and add it to log.txt."""
        if not self._is_main:
            return
        from tqdm import tqdm

        tqdm.write(message)
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {message}\n")

    def add_row(self, row: Row) -> None:
        """Add an epoch's numbers to metrics.jsonl, metrics.csv (without lists) and the TensorBoard events."""
        self.rows.append(row)
        if not self._is_main:
            return
        write_whole(
            self.path / "metrics.jsonl",
            "".join(json.dumps(_finite(item)) + "\n" for item in self.rows).encode(),
        )
        write_whole(self.path / "metrics.csv", _csv(self.rows).encode())
        if self._events is not None:
            for key, value in _scalars(row).items():
                if key != "epoch":
                    self._events.add_scalar(
                        key.replace("val_", "val/").replace("train_", "train/"), value, row["epoch"]
                    )
            self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def read_rows(folder: Path) -> list[Row]:
    """The rows of metrics.jsonl, oldest first; none where the file is missing."""
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); take the damaged line out of it") from error


def _stored(config: TrainConfig) -> str:
    """The configuration as it is kept: without the words that only said how this start was meant."""
    return to_yaml(replace(config, run=replace(config.run, resume=False, overwrite=False)))


def _scalars(row: Row) -> Row:
    return {key: value for key, value in _finite(row).items() if isinstance(value, int | float)}


def _finite(value: Any) -> Any:
    """None for nan, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in _scalars(row)))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_scalars(row) for row in rows)
    return text.getvalue()
