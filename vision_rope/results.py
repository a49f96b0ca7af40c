"""Rows of an evaluation as a table for the terminal, CSV, JSON and a figure."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision_rope.checkpoint import write_whole
from vision_rope.points import point_of

# One size and method: names of facts and figures -> values; None where there is no figure.
Row = dict[str, Any]

UNTRAINED = "untrained"
# Metrics of a row in the order of the tables, with their headings.
METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "balanced_accuracy": "balanced",
    "auroc": "AUROC",
    "direction": "direction",
    "reversal": "reversal",
    "way": "way",
    "speed": "speed",
    "faster": "faster",
    "moving": "moving",
    "nll": "NLL",
    "ece": "ECE",
    "r2": "R2",
    "mse": "MSE",
}
# What holds for a whole table, each on a line in front of it.
FACTS = (
    *("model", "position", "weights", "data", "train_size", "train_frames", "train_fps", "images", "crop", "seed"),
    *("split_seed", "masked"),
)
# Of clips, beside the metrics; those that are 0 everywhere are not shown.
COUNTS = {"clips": "clips", "clips_left_out": "left out", "clips_shorter": "shorter", "clips_longer": "longer"}


def write_results(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write evaluation.csv, .json (null for what is missing) and .png, and per_class.csv where there are classes."""
    from vision_rope.plots import plot_evaluation

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = ["evaluation.csv", "evaluation.json", "per_class.csv", "evaluation.png"]
    paths = [folder / name for name in names]
    write_csv(paths[0], without_classes(rows))
    write_whole(paths[1], (json.dumps(list(rows), indent=2, allow_nan=False) + "\n").encode())
    by_class = [
        {**{key: row[key] for key in place_keys(row)}, "method": row["method"], "class": name, "accuracy": accuracy}
        for row in rows
        for name, accuracy in (row["per_class"] or {}).items()
    ]
    if by_class:
        write_csv(paths[2], by_class)
    plot_evaluation(rows, paths[3])
    return [path for path in paths if by_class or path != paths[2]]


def place_keys(row: Row) -> list[str]:
    """The columns that say where a row was judged: its size, of clips the frames and their rate too."""
    return ["size", "frames", "fps"] if "frames" in row else ["size"]


def without_classes(rows: Sequence[Row]) -> list[Row]:
    """The rows without the accuracies by class, which are no figure but many."""
    return [{key: value for key, value in row.items() if key != "per_class"} for row in rows]


def format_table(rows: Sequence[Row]) -> str:
    """The rows as an aligned table for a terminal; a row without figures shows its reason.

    Below it stands which clips were left out, or last less or more than asked for.
    """
    lines = []
    places = len(place_keys(rows[0])) if rows else 1
    if any(row.get("weights") == UNTRAINED for row in rows):
        lines += ["UNTRAINED WEIGHTS: these figures are those of a random model; give --checkpoint or --pretrained"]
    for fact in FACTS:
        values = dict.fromkeys(str(row[fact]) for row in rows if row.get(fact) is not None)
        if values:
            lines.append(f"{fact.replace('_', ' '):<{11 if places == 1 else 13}}{'; '.join(values)}")
    shown = {key: heading for key, heading in METRICS.items() if any(row.get(key) is not None for row in rows)}
    shown |= {key: heading for key, heading in COUNTS.items() if any(row.get(key) for row in rows)}
    kind = "images" if places == 1 else "clips"
    shown |= {f"{kind}_per_second": f"{kind}/s", "peak_memory_mb": "MB"}
    cells = [[*(["size", "frames", "fps"][:places]), "method", "crop_pct", *shown.values()]]
    for row in rows:
        figures = [row["reason"]] if row["reason"] else [_format_figure(key, row[key]) for key in shown]
        place = ["all" if row[key] is None else f"{row[key]:g}" for key in place_keys(row)[1:]]
        cells.append([row["size"], *place, row["method"], f"{row['crop_pct']:g}", *figures])
    full = [line for line in cells if len(line) == len(cells[0])]
    widths = [max(len(line[column]) for line in full) for column in range(len(cells[0]))]
    widths[places] = max(len(line[places]) for line in cells)
    lines.append("")
    for line in cells:
        left = [cell.ljust(width) for cell, width in zip(line[: places + 1], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(line[places + 1 :], widths[places + 1 :], strict=False)]
        lines.append("  ".join(left + right).rstrip())
    if notes := describe_clip_counts(rows):
        lines += ["", *notes]
    return "\n".join(lines)


def order_of(row: Row) -> tuple[float, float, float]:
    """By size, of clips by rate (every frame last) and frames too."""
    return row["height"] * row["width"], row.get("fps") or math.inf, row.get("frames") or 0


def describe_clip_counts(rows: Sequence[Row]) -> list[str]:
    """At which points clips were left out, or last less or more than asked for: a sentence a count."""
    words = {
        "clips_left_out": "left out, because they cannot be read or have too few frames",
        "clips_shorter": "shorter, and sampled more densely",
        "clips_longer": "longer, for want of so many frames a second",
    }
    found: dict[str, list[str]] = {}
    for row in sorted((row for row in rows if "frames" in row), key=order_of):
        for key, what in words.items():
            if row.get(key):
                among = "" if key == "clips_left_out" else f" of {row['clips']}"
                found.setdefault(f"{row[key]}{among} clips are {what}", []).append(point_of(row))
    return [f"{', '.join(dict.fromkeys(points))}: {what}." for what, points in found.items()]


def _format_figure(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    is_speed = key.endswith("_per_second")
    if key == "peak_memory_mb" or key in COUNTS or (is_speed and value >= 100):
        return f"{value:.0f}"
    return f"{value:.3g}" if is_speed else f"{value:.3f}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the keys of the first one, as a whole."""
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
