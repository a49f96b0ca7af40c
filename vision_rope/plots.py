"""Figures of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vision_rope.inspection import Inspection

# Okabe and Ito's colours, told apart by the colour-blind; in the order in which methods appear.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
PANELS = {
    "top1": "accuracy",
    "auroc": "AUROC",
    "nll": "negative log-likelihood",
    "ece": "calibration error (ECE)",
    "r2": "R2 on hidden patches",
}


def plot_evaluation(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the rows of a sweep over sizes: a panel a metric, a line a method, the training size marked.

    The horizontal axis is the side of the square of the same area. Lines join square sizes; rectangles stand beside
    them as hollow marks. AUROC is drawn where there are two classes.

    Units: accuracy, AUROC and ECE 0..1, NLL in nats; sizes in pixels.
    """
    from matplotlib.figure import Figure

    panels = [metric for metric in PANELS if any(row.get(metric) is not None for row in rows)] or ["top1"]
    columns = 2 if len(panels) == 4 else len(panels)
    lines = len(panels) // columns
    figure = Figure(figsize=((4.5 if columns < 3 else 3.8) * columns, 3.1 * lines + 0.7), dpi=150, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    series = _group_by_line(rows)
    for panel, metric in zip(axes.flat, panels, strict=True):
        for index, (label, members) in enumerate(series.items()):
            # Later lines are thinner, so that equal values (below the training size) stay visible as nested marks.
            scale = 1.0 - 0.5 * index / max(len(series) - 1, 1)
            style = {
                "color": COLORS[index % len(COLORS)],
                "marker": MARKERS[index % len(MARKERS)],
                "markersize": 8 * scale,
                "linewidth": 2.6 * scale,
            }
            figures = [(_side(row), row[metric], row) for row in members if row.get(metric) is not None]
            squares = sorted((side, value) for side, value, row in figures if row["height"] == row["width"])
            oblongs = [(side, value) for side, value, row in figures if row["height"] != row["width"]]
            panel.plot(*_columns(squares), label=label, **style)
            panel.plot(*_columns(oblongs), **{**style, "linewidth": 0, "markerfacecolor": "none"})
        _mark_sizes(panel, rows)
        panel.set_title(PANELS[metric], fontsize=11)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    oblong = any(row["height"] != row["width"] for row in rows)
    note = "; hollow: rows x columns at the side of equal area" if oblong else ""
    figure.supxlabel(f"image size (pixels){note}", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=_legend_columns(figure, len(labels)),
        frameon=False,
        fontsize=10,
    )
    _save(figure, Path(path))


def plot_study(rows: Sequence[Mapping[str, Any]], metric: str, path: str | Path) -> None:
    """Draw a study: a panel a row of it, a line a method with the range of its seeds, references in grey.

    Units: the metric times 100; sizes in pixels, as the side of the square of the same area.
    """
    from matplotlib.figure import Figure

    known = [row for row in rows if row.get(metric) is not None]
    references = [row for row in known if row["seed"] is None]
    names = list(dict.fromkeys(row["row"] for row in known if row["seed"] is not None))
    methods = list(dict.fromkeys(row["method"] for row in known))
    columns = min(len(names), 4) or 1
    lines = -(-len(names) // columns) or 1
    figure = Figure(figsize=(3.1 * columns, 2.5 * lines + 0.8), dpi=130, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for panel, name in zip(axes.flat, names, strict=False):
        for style, reference in zip((":", "-."), dict.fromkeys(row["row"] for row in references), strict=False):
            points = sorted((_side(row), 100 * row[metric]) for row in references if row["row"] == reference)
            panel.plot(*_columns(points), color="0.5", linestyle=style, linewidth=1.3, label=reference)
        for index, method in enumerate(methods):
            values: dict[float, list[float]] = {}
            for row in known:
                if (row["row"], row["method"]) == (name, method) and row["seed"] is not None:
                    values.setdefault(_side(row), []).append(100 * row[metric])
            if not values:
                continue
            sides = sorted(values)
            means = [sum(values[side]) / len(values[side]) for side in sides]
            color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
            label = "no extension" if method == "none" else method
            panel.plot(sides, means, color=color, marker=marker, markersize=4, linewidth=1.6, label=label)
            bounds = [min(values[side]) for side in sides], [max(values[side]) for side in sides]
            panel.fill_between(sides, *bounds, color=color, alpha=0.18, linewidth=0)
        _mark_sizes(panel, [row for row in known if row["row"] == name and row["seed"] is not None])
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes.flat)[len(names) :]:
        panel.set_visible(False)
    figure.supxlabel("image size (pixels); bands: range of the seeds", fontsize=9)
    figure.supylabel(f"{PANELS.get(metric, metric)} x 100", fontsize=9)
    entries = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper center",
        ncols=_legend_columns(figure, len(entries)),
        frameon=False,
    )
    _save(figure, Path(path))


def plot_images(lines: Mapping[str, Tensor], path: str | Path) -> None:
    """Draw images in lines with names: the same images, seen in different ways.

    Shapes: each line (images, 3, height, width), values in [0, 1]
    """
    from matplotlib.figure import Figure

    count, _, height, width = next(iter(lines.values())).shape
    cell = 1.3
    figure = Figure(
        figsize=(cell * count + 0.3, (cell * height / width + 0.05) * len(lines)), dpi=120, layout="constrained"
    )
    axes = figure.subplots(len(lines), count, squeeze=False)
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for panel, image in zip(line, images, strict=True):
            panel.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
        line[0].set_ylabel(name, fontsize=8)
    _save(figure, Path(path))


def plot_inspection(inspection: Inspection, title: str, path: str | Path) -> None:
    """Draw how often pairs turn across the training grid and the new one, and the decay bound along both axes.

    Learned frequencies have a line of points a layer; their bound is the mean over layers and heads, with its range.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.9), dpi=110, layout="constrained")
    turning, decaying = figure.subplots(1, 2)
    _draw_turns(turning, inspection)
    _draw_decay(decaying, inspection)
    for panel in (turning, decaying):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(title, fontsize=11)
    _save(figure, Path(path))


def _draw_turns(panel: Any, inspection: Inspection) -> None:
    learned = inspection.learned
    trained, new = (
        inspection.turns(grid).sum(-2).flatten(1).tolist() for grid in (inspection.train_grid, inspection.grid)
    )
    places, points = [], []
    for layer, members in enumerate(zip(trained, new, inspection.unseen.flatten(1).tolist(), strict=True)):
        pairs = list(zip(*members, strict=True))
        # Learned ones have no order of their own: the fastest first.
        points += sorted(pairs, reverse=True) if learned else pairs
        places += [layer + 0.1 + 0.8 * index / len(pairs) if learned else index for index in range(len(pairs))]
    first, second = (" x ".join(map(str, grid)) for grid in (inspection.train_grid, inspection.grid))
    series = [("0.6", 34, f"{first} tokens (training)", [(x, y) for x, (y, _, _) in zip(places, points, strict=True)])]
    if inspection.grid != inspection.train_grid:
        for color, wanted, label in ((COLORS[1], False, "angles of training"), (COLORS[2], True, "unseen angles too")):
            chosen = [(x, y) for x, (_, y, flag) in zip(places, points, strict=True) if flag is wanted]
            series.append((color, 12, f"{second}: {label}", chosen))
    for color, area, label, marks in series:
        # A pair that stands still has no place on a logarithmic axis.
        x, y = _columns([mark for mark in marks if mark[1] > 0])
        panel.scatter(x, y, s=area / 6 if learned else area, color=color, label=label if x else None)
    panel.axhline(0.5, color="0.5", linestyle="--", linewidth=1, label="half a turn: all angles seen")
    panel.set_yscale("log")
    panel.set_xlabel("layer; its pairs in all heads, fastest first" if learned else "pair", fontsize=9)
    panel.set_ylabel("turns across the grid", fontsize=9)


def _draw_decay(panel: Any, inspection: Inspection) -> None:
    trained, new = inspection.train_grid, inspection.grid
    # Where both axes have the same curve, the thin one lies in the thick one.
    for axis, (name, color, width) in enumerate((("rows", COLORS[1], 4.0), ("columns", COLORS[2], 1.5))):
        curves = [(name, "-", inspection.decay(new, axis))]
        if inspection.method != "none" and new[axis] > trained[axis]:
            curves.append((f"{name}, {inspection.method}", ":", inspection.decay(new, axis, extended=True)))
        elif inspection.rope.coordinates.bounded and new != trained:
            curves.append((f"{name}, training grid", ":", inspection.decay(trained, axis)))
        for label, style, curve in curves:
            if curve is None:
                continue
            distances = list(range(curve.shape[-1]))
            panel.plot(distances, curve.mean((0, 1)).tolist(), style, color=color, linewidth=width, label=label)
            if inspection.learned:
                least, most = curve.amin((0, 1)).tolist(), curve.amax((0, 1)).tolist()
                panel.fill_between(distances, least, most, color=color, alpha=0.12, linewidth=0)
    lengths = dict.fromkeys(trained, ("training", "0.6"))
    lengths |= {length: ("new", "black") for length in new if length not in lengths}
    for length, (label, color) in lengths.items():
        panel.axvline(length - 1, color=color, linestyle="--", linewidth=1, label=f"{label} grid: {length} tokens")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("distance along an axis (tokens)", fontsize=9)
    panel.set_ylabel("long-term decay bound (RoFormer)", fontsize=9)


def _legend_columns(figure: Any, entries: int) -> int:
    """As many columns as fit beside each other: an entry takes an inch and a half."""
    return max(min(entries, int(figure.get_figwidth() // 1.5)), 1)


def _save(figure: Any, path: Path) -> None:
    """Write a figure as a whole: a kill leaves the previous one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.stem}.tmp{path.suffix}")
    figure.savefig(beside)
    beside.replace(path)


def _group_by_line(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by method, and by position encoding or model too where they differ; rows without figures left out."""
    known = [row for row in rows if not row.get("reason")]
    differing = [key for key in ("model", "position") if len({row.get(key) for row in known}) > 1]
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in known:
        method = "no extension" if row["method"] == "none" else row["method"]
        label = ", ".join([*(str(row.get(key)) for key in differing), method])
        series.setdefault(label, []).append(row)
    return series


def _side(row: Mapping[str, Any]) -> float:
    return math.sqrt(row["height"] * row["width"])


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _mark_sizes(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Label the sizes, leaving out those that would overlap their neighbour, and draw the training size."""
    sizes = {
        _side(row): row["size"] for row in sorted(rows, key=lambda row: row["height"] != row["width"], reverse=True)
    }
    span = max(sizes) - min(sizes) or 1.0
    ticks: list[float] = []
    for side in sorted(sizes):
        # A character is about 2 % of a panel wide.
        room = 0.02 * (2 + (len(sizes[side]) + len(sizes[ticks[-1]]) if ticks else 0) / 2)
        if not ticks or (side - ticks[-1]) / span > room:
            ticks.append(side)
    panel.set_xticks(ticks, [sizes[side] for side in ticks], fontsize=9)
    panel.tick_params(axis="y", labelsize=9)
    for index, train_size in enumerate(dict.fromkeys(row["train_size"] for row in rows)):
        height, _, width = str(train_size).partition("x")
        side = math.sqrt(int(height) * int(width or height))
        label = "_" if index else "training size"
        panel.axvline(side, color="0.5", linestyle="--", linewidth=1.2, zorder=0, label=label)
