"""The finished trainings of a study, judged on other data than they were trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vision_rope.results import Row, without_classes
from vision_rope.sizes import format_size, largest_size
from vision_rope.study_plan import Cell
from vision_rope.study_results import write_study

ELSEWHERE = "elsewhere"


def judge_elsewhere(sources: Sequence[str], cells: Sequence[Cell], baseline: str, output: Path) -> list[Path]:
    """Judge all cells that did not fail on each source, at the size, frames and rate of training; the files written.

    What a cell came to is kept in its folder. Tables and figure are those of a study, in output/elsewhere/SOURCE.
    """
    files: list[Path] = []
    for source in sources:
        name = re.sub(r"[^\w.-]+", "-", source)
        rows: list[Row] = []
        for cell in cells:
            result = cell.load()
            if result is None or result["failed"]:
                continue
            facts = {"row": cell.row, "seed": cell.config.seed, "cpu_seconds": None}
            rows += [{**facts, **row, **facts} for row in _judge(cell, source, cell.folder / ELSEWHERE / name)]
        if rows:
            folder = output / ELSEWHERE / name
            folder.mkdir(parents=True, exist_ok=True)
            files += write_study(rows, baseline, folder)
    return files


def _judge(cell: Cell, source: str, folder: Path) -> list[Row]:
    from vision_rope.evaluate import evaluate

    with suppress(OSError, ValueError):
        return without_classes(json.loads((folder / "evaluation.json").read_text()))
    config = cell.config
    video = config.video
    rows, _ = evaluate(
        cell.folder,
        data=source,
        sizes=[format_size(largest_size(config.data))],
        frames=None if video.num_frames is None else [video.num_frames],
        fps=None if video.fps is None else [video.fps],
        extend=["none"],
        num_workers=config.run.num_workers,
        device=config.run.device,
        precision=config.run.precision,
        output=folder,
        progress=False,
    )
    return without_classes(rows)
