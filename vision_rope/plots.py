"""Figures of results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_rope.points import point_of, training_of

if TYPE_CHECKING:
    from torch import Tensor

    from vision_rope.inspection import Inspection

# Okabe and Ito's colours, told apart by the colour-blind; in the order in which methods appear.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
PANELS = {
    "direction": "right direction (of 8)",
    "reversal": "opposite direction backwards",
    "way": "right way",
    "speed": "right speed",
    "faster": "faster at twice the speed",
    "top1": "accuracy",
    "auroc": "AUROC",
    "nll": "negative log-likelihood",
    "ece": "calibration error (ECE)",
    "r2": "R2 on hidden patches",
}


def plot_evaluation(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the rows of a sweep: a panel a metric, a line a method, the training size or point marked.

    The horizontal axis is the side of the square of the same area. Lines join square sizes; rectangles stand beside
    them as hollow marks. Clips stand side by side, by size and rate, and lines join those that differ in the number of
    frames alone and rest on as many clips; hollow marks rest on fewer than others. AUROC is drawn where
    there are two classes.

    Units: accuracy, AUROC and ECE 0..1, NLL in nats; sizes in pixels.
    """
    from matplotlib.figure import Figure

    panels = [metric for metric in PANELS if any(row.get(metric) is not None for row in rows)] or ["top1"]
    columns = 2 if len(panels) == 4 else len(panels)
    lines = len(panels) // columns
    figure = Figure(
        figsize=((4.5 if columns < 3 else 3.8) * columns * _stretch(rows), 3.1 * lines + 0.7),
        dpi=150,
        layout="constrained",
    )
    axes = figure.subplots(lines, columns, squeeze=False)
    series = _group_by_line(rows)
    place, clips = _find_place(rows), _are_clips(rows)
    most = max((row.get("clips") or 0 for row in rows), default=0)
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
            figures = [(place(row), row[metric], row) for row in members if row.get(metric) is not None]
            squares = sorted((x, value) for x, value, row in figures if clips or row["height"] == row["width"])
            oblongs = [(x, value) for x, value, row in figures if not clips and row["height"] != row["width"]]
            counts = {place(row): row.get("clips") for _, _, row in figures}
            fewer = [(x, value) for x, value, row in figures if _lacks_clips(row, most)]
            panel.plot(*_columns(_part(squares, counts) if clips else squares), label=label, **style)
            # White inside where the line's own mark lies below, which has all points of clips.
            panel.plot(*_columns(fewer), **{**style, "linewidth": 0, "markerfacecolor": "white"})
            panel.plot(*_columns(oblongs), **{**style, "linewidth": 0, "markerfacecolor": "none"})
        _mark_points(panel, rows, place)
        panel.set_title(PANELS[metric], fontsize=11)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    oblong = not clips and any(row["height"] != row["width"] for row in rows)
    note = "; hollow: rows x columns at the side of equal area" if oblong else ""
    note += "; hollow: not all clips" if any(_lacks_clips(row, most) for row in rows) else ""
    figure.supxlabel(_name_axis(rows) + note, fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=_legend_columns(figure, len(labels)),
        frameon=False,
        fontsize=10,
    )
    save_figure(figure, Path(path))


def plot_study(rows: Sequence[Mapping[str, Any]], metric: str, path: str | Path) -> None:
    """Draw a study: a panel a row of it, a line a method with the range of its seeds, references in grey.

    Units: the metric times 100; sizes in pixels, as the side of the square of the same area; clips as in
    `plot_evaluation`.
    """
    from matplotlib.figure import Figure

    known = [row for row in rows if row.get(metric) is not None]
    references = [row for row in known if row["seed"] is None]
    names = list(dict.fromkeys(row["row"] for row in known if row["seed"] is not None))
    methods = list(dict.fromkeys(row["method"] for row in known))
    columns = min(len(names), 4) or 1
    lines = -(-len(names) // columns) or 1
    figure = Figure(figsize=(3.1 * columns * _stretch(known), 2.5 * lines + 0.8), dpi=130, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    place, clips = _find_place(known), _are_clips(known)
    for panel, name in zip(axes.flat, names, strict=False):
        for style, reference in zip((":", "-."), dict.fromkeys(row["row"] for row in references), strict=False):
            points = sorted((place(row), 100 * row[metric]) for row in references if row["row"] == reference)
            panel.plot(
                *_columns(_part(points) if clips else points),
                color="0.5",
                linestyle=style,
                linewidth=1.3,
                label=reference,
            )
        for index, method in enumerate(methods):
            values: dict[float, list[float]] = {}
            for row in known:
                if (row["row"], row["method"]) == (name, method) and row["seed"] is not None:
                    values.setdefault(place(row), []).append(100 * row[metric])
            if not values:
                continue
            bands = [(x, sum(ys) / len(ys), min(ys), max(ys)) for x, ys in sorted(values.items())]
            sides, means, least, most = zip(*(_part(bands) if clips else bands), strict=True)
            color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
            label = "no extension" if method == "none" else method
            panel.plot(sides, means, color=color, marker=marker, markersize=4, linewidth=1.6, label=label)
            panel.fill_between(sides, least, most, color=color, alpha=0.18, linewidth=0)
        _mark_points(panel, [row for row in known if row["row"] == name and row["seed"] is not None], place)
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes.flat)[len(names) :]:
        panel.set_visible(False)
    figure.supxlabel(f"{_name_axis(known)}; bands: range of the seeds", fontsize=9)
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
    save_figure(figure, Path(path))


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
    save_figure(figure, Path(path))


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
    save_figure(figure, Path(path))


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


def save_figure(figure: Any, path: Path) -> None:
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


def _are_clips(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any("frames" in row for row in rows)


def _name_axis(rows: Sequence[Mapping[str, Any]]) -> str:
    if not _are_clips(rows):
        return "image size (pixels)"
    trained = "; ".join(dict.fromkeys(map(training_of, rows)))
    return f"frames of a clip, by frames a second and size (pixels); trained at {trained}"


def _find_place(rows: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], float]:
    """Where rows stand: images at their side, clips one after the other, with a gap between sizes and rates."""
    if not _are_clips(rows):
        return _side
    order = sorted({_clip_key(row) for row in rows})
    places, place = {order[0]: 0.0}, 0.0
    for before, key in itertools.pairwise(order):
        place += 1.0 if before[:-1] == key[:-1] else 2.0
        places[key] = place
    return lambda row: places[_clip_key(row)]


def _clip_key(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Size, rate (every frame last) and, at the end, frames."""
    return (row["height"] * row["width"], row["height"], row["fps"] or math.inf, row["frames"])


def _lacks_clips(row: Mapping[str, Any], most: int) -> bool:
    """Whether a row's figures rest on fewer clips than others."""
    return row.get("clips") is not None and row["clips"] < most


def _part(points: Sequence[tuple[float, ...]], counts: Mapping[float, Any] | None = None) -> list[tuple[float, ...]]:
    """Points of clips with an empty one in every gap, so that no line joins different sizes, rates or clips.

    Args:
        counts: by place, how many clips a point is of.
    """
    counts = counts or {}
    parted = [*points[:1]]
    for before, point in itertools.pairwise(points):
        if point[0] - before[0] > 1 or counts.get(point[0]) != counts.get(before[0]):
            parted.append((math.nan,) * len(point))
        parted.append(point)
    return parted


def _stretch(rows: Sequence[Mapping[str, Any]]) -> float:
    """How much wider than usual a panel is, so that the points of clips do not touch."""
    return max(1.0, len({_clip_key(row) for row in rows}) / 12) if _are_clips(rows) else 1.0


def _side(row: Mapping[str, Any]) -> float:
    return math.sqrt(row["height"] * row["width"])


def _columns(points: Sequence[tuple[float, ...]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _mark_points(panel: Any, rows: Sequence[Mapping[str, Any]], place: Callable[[Mapping[str, Any]], float]) -> None:
    """Label the horizontal axis and draw where the model was trained."""
    if not _are_clips(rows):
        _mark_sizes(panel, rows)
        return
    found = {_clip_key(row): row for row in rows}
    # Of as many lines as the longest, which keeps the numbers level.
    labels = {place(row): f"{row['frames']}\n\n" for row in found.values()}
    for _, group in itertools.groupby(sorted(found), key=lambda key: key[:-1]):
        members = [found[key] for key in group]
        first = members[(len(members) - 1) // 2]
        rate = "all" if first["fps"] is None else f"{first['fps']:g}"
        labels[place(first)] = f"{first['frames']}\n{rate} fps\n{first['size']} px"
    panel.set_xticks(list(labels), list(labels.values()), fontsize=8)
    panel.tick_params(axis="y", labelsize=9)
    trained = [place(row) for row in rows if point_of(row) == training_of(row)]
    for index, x in enumerate(dict.fromkeys(trained)):
        panel.axvline(x, color="0.5", linestyle="--", linewidth=1.2, zorder=0, label="_" if index else "as in training")


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
