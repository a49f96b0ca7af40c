"""Rows of an evaluation as a table for the terminal, CSV, JSON and a figure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision_rope.checkpoint import write_whole

# One size and method: names of facts and figures -> values; None where there is no figure.
Row = dict[str, Any]

UNTRAINED = "untrained"
# Metrics of a row in the order of the tables, with their headings.
METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "balanced_accuracy": "balanced",
    "auroc": "AUROC",
    "nll": "NLL",
    "ece": "ECE",
    "r2": "R2",
    "mse": "MSE",
}


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
        {"size": row["size"], "method": row["method"], "class": name, "accuracy": accuracy}
        for row in rows
        for name, accuracy in (row["per_class"] or {}).items()
    ]
    if by_class:
        write_csv(paths[2], by_class)
    plot_evaluation(rows, paths[3])
    return [path for path in paths if by_class or path != paths[2]]


def without_classes(rows: Sequence[Row]) -> list[Row]:
    """The rows without the accuracies by class, which are no figure but many."""
    return [{key: value for key, value in row.items() if key != "per_class"} for row in rows]


def format_table(rows: Sequence[Row]) -> str:
    """The rows as an aligned table for a terminal; a row without figures shows its reason."""
    lines = []
    if any(row.get("weights") == UNTRAINED for row in rows):
        lines += ["UNTRAINED WEIGHTS: these figures are those of a random model; give --checkpoint or --pretrained"]
    facts = ("model", "position", "weights", "data", "train_size", "images", "crop", "seed", "split_seed", "masked")
    for fact in facts:
        values = dict.fromkeys(str(row[fact]) for row in rows if row.get(fact) is not None)
        if values:
            lines.append(f"{fact.replace('_', ' '):<11}{'; '.join(values)}")
    shown = {key: heading for key, heading in METRICS.items() if any(row.get(key) is not None for row in rows)}
    shown |= {"images_per_second": "images/s", "peak_memory_mb": "MB"}
    cells = [["size", "method", "crop_pct", *shown.values()]]
    for row in rows:
        figures = [row["reason"]] if row["reason"] else [_format_figure(key, row[key]) for key in shown]
        cells.append([row["size"], row["method"], f"{row['crop_pct']:g}", *figures])
    full = [line for line in cells if len(line) == len(cells[0])]
    widths = [max(len(line[column]) for line in full) for column in range(len(cells[0]))]
    widths[1] = max(len(line[1]) for line in cells)
    lines.append("")
    for line in cells:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=False)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)


def _format_figure(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "peak_memory_mb" or (key == "images_per_second" and value >= 100):
        return f"{value:.0f}"
    return f"{value:.3g}" if key == "images_per_second" else f"{value:.3f}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the keys of the first one, as a whole."""
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
