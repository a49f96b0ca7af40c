"""Scores of trackers on videos: tables for the terminal, CSV, JSON and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vision_rope.checkpoint import write_whole
from vision_rope.plots import COLORS, save_figure
from vision_rope.results import Row, write_csv
from vision_rope.tracking_scores import SequenceScores
from vision_rope.vos_metrics import ObjectScores, average_objects

# Figures of an object, a sequence or all objects, with their headings.
FIGURES = {
    "j_and_f": "J&F",
    "j_mean": "J",
    "j_recall": "J recall",
    "j_decay": "J decay",
    "f_mean": "F",
    "f_recall": "F recall",
    "f_decay": "F decay",
}
# A figure has a panel for all objects and one for each of so many sequences.
MOST_PANELS = 31


@dataclass
class TrackingResult:
    """What a tracker came to at one size with one method of context extension.

    Attributes:
        tracker: copy, patches, or the name of a run or checkpoint.
        size: that frames are resized to, as text; None of trackers that take them as they are.
        method: of context extension; None of trackers that have none.
        sequences: scores by name.
        reason: why there are none.
    """

    tracker: str
    size: str | None = None
    method: str | None = None
    sequences: dict[str, SequenceScores] = field(default_factory=dict)
    reason: str | None = None

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        method = None if self.method == "none" else self.method
        return " ".join(word for word in (self.tracker, self.size, method) if word)

    @property
    def objects(self) -> dict[tuple[str, int], ObjectScores]:
        """Scores of all objects that can be judged, by sequence and id."""
        return {(name, key): one for name, found in self.sequences.items() for key, one in found.objects.items()}

    def describe(self) -> Row:
        """Facts and figures over all objects, as the DAVIS 2017 toolkit takes the mean, and over sequences."""
        place = {"tracker": self.tracker, "size": self.size, "method": self.method}
        means = [average_objects(found.objects.values()) for found in self.sequences.values() if found.objects]
        frames = sum(found.frames for found in self.sequences.values())
        seconds = sum(found.seconds for found in self.sequences.values())
        figures: Row = average_objects(self.objects.values()) if means else dict.fromkeys(FIGURES)
        over_sequences = {
            f"{key}_of_sequences": sum(row[key] for row in means) / len(means) if means else None
            for key in ("j_mean", "f_mean")
        }
        return {
            **place,
            "sequences": len(means),
            "objects": len(self.objects),
            **figures,
            **over_sequences,
            "frames_per_second": frames / seconds if seconds else None,
            "reason": self.reason,
        }


def write_tracking(results: Sequence[TrackingResult], about: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write evaluation.csv (a line a tracker), sequences.csv, objects.csv, frames.csv, evaluation.json and .png."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole, by_sequence, by_object, by_frame = [], [], [], []
    for result in results:
        place = {"tracker": result.tracker, "size": result.size, "method": result.method}
        sequences = []
        for name, found in result.sequences.items():
            own = {"sequence": name}
            objects = []
            for key, scores in found.objects.items():
                row = {"object": key, "frames": len(scores.j), **average_objects([scores])}
                objects.append({**row, "j": scores.j, "f": scores.f})
                by_object.append({**place, **own, **row})
                by_frame += [
                    {**place, **own, "object": key, "frame": index, "j": j, "f": scores.f[index]}
                    for index, j in scores.j.items()
                ]
            if objects:
                row = {"objects": len(objects), **average_objects(found.objects.values())}
                by_sequence.append({**place, **own, **row})
                sequences.append({**own, **row, "objects": objects})
        whole.append({**about, **result.describe(), "per_sequence": sequences})
    paths = [folder / f"{name}.csv" for name in ("evaluation", "sequences", "objects", "frames")]
    lines = [{key: value for key, value in row.items() if key != "per_sequence"} for row in whole]
    for path, rows in zip(paths, (lines, by_sequence, by_object, by_frame), strict=True):
        write_csv(path, rows)
    paths.append(folder / "evaluation.json")
    write_whole(paths[-1], (json.dumps(whole, indent=2, allow_nan=False) + "\n").encode())
    paths.append(folder / "evaluation.png")
    plot_tracking(results, paths[-1])
    return paths


def format_tracking(results: Sequence[TrackingResult], about: Mapping[str, Any]) -> str:
    """Write the facts, a line a tracker with its figures, and J and F of every sequence."""
    lines = [f"{name.replace('_', ' '):<11}{value}" for name, value in about.items() if value is not None]
    rows = [result.describe() for result in results]
    head = ["over objects", *FIGURES.values(), "frames/s"]
    cells = [head]
    for result, row in zip(results, rows, strict=True):
        if result.reason is not None:
            cells.append([result.label, result.reason])
            continue
        speed = row["frames_per_second"]
        cells.append([result.label, *(_format(row[key]) for key in FIGURES), "-" if speed is None else f"{speed:.3g}"])
    lines += ["", *_align(cells)]
    known = [(result, row) for result, row in zip(results, rows, strict=True) if result.objects]
    if not known:
        return "\n".join([*lines, "", "No frame can be judged: only those between two that have ids are."])
    cells = [["J and F of", "objects", *(result.label for result, _ in known)]]
    for name in known[0][0].sequences:
        found = [result.sequences[name].objects for result, _ in known]
        if found[0]:
            cells.append(
                [name, str(len(found[0])), *(_format_pair(average_objects(objects.values())) for objects in found)]
            )
    means = [{key: row[f"{key}_of_sequences"] for key in ("j_mean", "f_mean")} for _, row in known]
    cells.append(["mean of sequences", "", *map(_format_pair, means)])
    cells.append(["mean of objects", str(known[0][1]["objects"]), *(_format_pair(row) for _, row in known)])
    return "\n".join([*lines, "", *_align(cells)])


def plot_tracking(results: Sequence[TrackingResult], path: str | Path) -> None:
    """Draw J by frame index: a panel for the mean over all objects, and one for each of the first sequences."""
    from matplotlib.figure import Figure

    known = [result for result in results if result.objects]
    names = [name for name, found in known[0].sequences.items() if found.objects] if known else []
    panels = ["all objects", *names[:MOST_PANELS]]
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(3.0 * columns, 5), 2.2 * rows + 0.8), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for panel, name in zip(axes.flat, panels, strict=False):
        for index, result in enumerate(known):
            members = [one for (own, _), one in result.objects.items() if name in (own, panels[0])]
            curve = average_by_frame(members)
            panel.plot(list(curve), list(curve.values()), color=COLORS[index % len(COLORS)], label=result.label)
        panel.set_title(name, fontsize=9)
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes.flat)[len(panels) :]:
        panel.set_visible(False)
    left_out = f"; {len(names) - MOST_PANELS} more sequences are in frames.csv" if len(names) > MOST_PANELS else ""
    figure.supxlabel(f"frame{left_out}", fontsize=9)
    figure.supylabel("J, mean over objects", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 2 * columns), frameon=False)
    save_figure(figure, Path(path))


def average_by_frame(objects: Sequence[ObjectScores]) -> dict[int, float]:
    """J by frame index, the mean over those objects that are judged there."""
    indices = sorted({index for one in objects for index in one.j})
    values = {index: [one.j[index] for one in objects if index in one.j] for index in indices}
    return {index: sum(found) / len(found) for index, found in values.items()}


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _format_pair(row: Mapping[str, float | None]) -> str:
    return f"{_format(row['j_mean'])} {_format(row['f_mean'])}"


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right; short lines end in a sentence."""
    full = [line for line in cells if len(line) == len(cells[0])]
    widths = [max(len(line[column]) for line in full) for column in range(len(cells[0]))]
    widths[0] = max(len(line[0]) for line in cells)
    lines = []
    for line in cells:
        rest = line[1:]
        if len(line) == len(cells[0]):
            rest = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *rest]).rstrip())
    return lines
