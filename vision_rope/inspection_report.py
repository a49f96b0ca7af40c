"""An inspection as text for the terminal and as JSON, CSV and a figure; the families of timm models as text."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vision_rope.checkpoint import write_whole
from vision_rope.convert import FAMILIES
from vision_rope.inspection import (
    AXES,
    Grid,
    Inspection,
    axis_steps,
    count,
    explain_method,
    inspect_rope,
    tabulate,
)
from vision_rope.inspection_targets import InspectionTarget, open_inspection_target
from vision_rope.results import write_csv
from vision_rope.sizes import Size, check_sizes, format_size, parse_size

# Of lines with a name in the margin, in characters.
INDENT = 13
WIDTH = 110


def run_inspect(parsed: Any, options: dict[str, Any]) -> int:
    """Print what the command line asks for and write its files; returns the exit status."""
    if parsed.families:
        if parsed.model is not None:
            raise ValueError(f"--families lists timm families, so that {parsed.model} has no effect; leave it out")
        print(format_families())
        return 0
    if parsed.model is None:
        raise ValueError("MODEL is missing; give a run folder, a timm name or a SAM 2 name, or --families")
    size = None if parsed.size is None else read_size(parsed.size)
    target = open_inspection_target(parsed.model, weights=parsed.weights, position=parsed.position, options=options)
    check_sizes([target.train_size, *([] if size is None else [size])], target.patch_size)
    size = size or target.train_size
    inspection = inspect_rope(target.rope, target.grid(target.train_size), target.grid(size))
    text = format_inspection(target, inspection, size, layer=parsed.layer)
    paths = write_inspection(target, inspection, size, parsed.out or target.output)
    print(text)
    print("\n" + "\n".join(f"wrote {path}" for path in paths))
    return 0


def read_size(text: str) -> Size:
    """Read "224,448" or "224x448" (rows, columns), or "224", in pixels.

    Raises: ValueError where the text is none of these.
    """
    try:
        return parse_size(text.replace(",", "x"))
    except ValueError:
        raise ValueError(
            f"size is {text!r}, but it must be rows,columns in pixels (224,448 or 224x448), or one number for a square"
        ) from None


def format_inspection(target: InspectionTarget, inspection: Inspection, size: Size, *, layer: int | None = None) -> str:
    """Facts about a model, the table of its pairs (its layers where frequencies are learned), the suggestion.

    Args:
        size: the new image size in pixels.
        layer: show the pairs of this layer of learned frequencies.

    Raises: ValueError for a layer that there is not, or that is like all others.
    """
    depth = inspection.rope.depth
    if layer is not None and not inspection.learned:
        raise ValueError(f"layer is {layer}, but the frequencies are fixed and the same in every layer; leave it out")
    if layer is not None and not 0 <= layer < depth:
        raise ValueError(f"layer is {layer}; {target.name} has layers 0 to {depth - 1}")
    by_layer = inspection.learned and layer is None
    cells = _layer_cells(inspection) if by_layer else _pair_cells(inspection, layer)
    lines = [*_describe(target, inspection, size), "", *_align(cells), ""]
    if inspection.grid == inspection.train_grid:
        return "\n".join([*lines, "--size compares this grid with that of another image size"])
    unseen = f"{count(inspection.unseen)} meet angles at {format_size(size)} px that training never had"
    lines += _fact("unseen", unseen) + _fact("suggested", f"{inspection.method}: {explain_method(inspection)}")
    if inspection.method != "none":
        # On one line, to be copied.
        lines.append(f"{'check':<{INDENT}}{_check(target, inspection, size)}")
    return "\n".join(lines)


def write_inspection(target: InspectionTarget, inspection: Inspection, size: Size, folder: str | Path) -> list[Path]:
    """Write inspect.json (all figures), inspect.csv (a line a layer, head and pair) and inspect.png."""
    from vision_rope.plots import plot_inspection

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"inspect.{ending}" for ending in ("json", "csv", "png")]
    rows = tabulate(inspection)
    rope = inspection.rope
    content = {
        "model": target.name,
        "position": rope.name,
        "learned": inspection.learned,
        "depth": rope.depth,
        "head_dim": rope.head_dim,
        "pairing": rope.pairing,
        "train_size": list(target.train_size),
        "size": list(size),
        "train_grid": list(inspection.train_grid),
        "grid": list(inspection.grid),
        "notes": _notes(target, inspection),
        "suggestion": {
            "method": inspection.method,
            "reason": explain_method(inspection),
            "unseen": int(inspection.unseen.sum()),
            "unseen_extended": int(inspection.unseen_extended.sum()),
            "of": inspection.unseen.numel(),
        },
        "decay_bound": {name: _decay_curves(inspection, axis) for axis, name in enumerate(AXES)},
        "pairs": rows,
    }
    write_whole(paths[0], (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    write_csv(paths[1], rows)
    sizes = " to ".join(dict.fromkeys(map(format_size, (target.train_size, size))))
    plot_inspection(inspection, f"{target.name}, {sizes} px", paths[2])
    return paths


def format_families() -> str:
    """The timm classes that `vision_rope.add_position` knows, by the sizes they take, and what it refuses."""
    width = max(len(kind.__name__) for kind in FAMILIES)
    lines = []
    for sizes in dict.fromkeys(family.sizes for family in FAMILIES.values()):
        lines.append(sizes)
        lines += [f"  {kind.__name__:<{width}}  {row.examples}" for kind, row in FAMILIES.items() if row.sizes == sizes]
        lines.append("")
    lines.append("refused, by name")
    lines.append("  hierarchies that window or pool their tokens (swin, hiera, ...), and every other class")
    return "\n".join(lines)


def _describe(target: InspectionTarget, inspection: Inspection, size: Size) -> list[str]:
    rope = inspection.rope
    if rope.ladders is None:
        frequencies = f"learned, for each of {rope.depth} layers and {inspection.frequencies.shape[1]} heads"
    else:
        bases = ", ".join(dict.fromkeys(f"{ladder.base:g}" for ladder in rope.ladders))
        frequencies = f"fixed, base {bases}, the same in {rope.depth} layers and all heads"
    facts = {
        "model": target.name,
        "position": f"{rope.name}, {rope.head_dim // 2} pairs of a head ({rope.pairing})",
        "frequencies": frequencies,
        "trained at": f"{format_size(target.train_size)} px, {_by(inspection.train_grid)} tokens",
    }
    if inspection.grid != inspection.train_grid:
        facts["new"] = f"{format_size(size)} px, {_by(inspection.grid)} tokens"
    texts = [_decay_text(inspection, axis) for axis in range(len(AXES))]
    names = [" and ".join(AXES)] if texts[0] == texts[1] else AXES
    facts["decay bound"] = "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=False))
    notes = [line for note in _notes(target, inspection) for line in textwrap.wrap(note, WIDTH)]
    return [*notes, *(line for name, text in facts.items() for line in _fact(name, text))]


def _fact(name: str, text: str) -> list[str]:
    """A fact in lines with its name in the margin."""
    indent = " " * INDENT
    return textwrap.wrap(text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=indent)


def _notes(target: InspectionTarget, inspection: Inspection) -> list[str]:
    """Sentences without which the figures would be misread."""
    notes = list(target.notes)
    coordinates = inspection.rope.coordinates
    if coordinates.bounded and inspection.grid != inspection.train_grid:
        steps = [
            " x ".join(f"{float(step):.3g}" for step in axis_steps(coordinates, grid))
            for grid in (inspection.train_grid, inspection.grid)
        ]
        notes.append(
            f"Coordinates are fitted to the grid: a step is {steps[0]} in training and {steps[1]} in the new grid, so "
            "that wavelengths in tokens change with the size."
        )
    if coordinates.augmented:
        notes.append("Training also moves the coordinates at random, which these figures leave out.")
    return notes


def _check(target: InspectionTarget, inspection: Inspection, size: Size) -> str:
    """How to find out whether the suggested method is right."""
    if target.command is None:
        return "on your own videos"
    sizes = f"{format_size(target.train_size)},{format_size(size)}"
    return f"{target.command} --sizes {sizes} --extend none,{inspection.method}"


def _pair_cells(inspection: Inspection, layer: int | None) -> list[list[str]]:
    """A line a pair, of each head where frequencies are learned; pairs with the same figures share a line."""
    grids, bounded = _grids(inspection), inspection.rope.coordinates.bounded
    spans = grids if bounded else {"trained": inspection.train_grid}
    heading = ["head:pair" if inspection.learned else "pair", "turns with"]
    heading += [f"wavelength {_by(grid)}" if bounded else "wavelength" for grid in spans.values()]
    heading += [f"turns {_by(grid)}" for grid in grids.values()] + _flag_headings(inspection)
    lines: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for row in tabulate(inspection):
        if layer not in (None, row["layer"]):
            continue
        axes = [axis for axis in AXES if row[f"frequency_{axis}"]]
        figures = [" / ".join(_number(row[f"wavelength_{when}_{axis}"]) for axis in axes) or "-" for when in spans]
        figures += [_number(sum(row[f"turns_{when}_{axis}"] for axis in AXES)) for when in grids]
        flags = ["yes" if row[flag] else "no" for flag in ("unseen", "unseen_extended")]
        pair = f"{row['head']}:{row['pair']}" if inspection.learned else str(row["pair"])
        key = (*figures, *flags[: len(_flag_headings(inspection))])
        lines.setdefault(key, []).append((pair, " / ".join(axes) or "-"))
    cells = [heading]
    for key, members in lines.items():
        cells.append([*(", ".join(dict.fromkeys(words)) for words in zip(*members, strict=True)), *key])
    return cells


def _layer_cells(inspection: Inspection) -> list[list[str]]:
    """A line a layer of learned frequencies: least / median / most of all pairs of its heads."""
    grids = _grids(inspection)
    flags = _flag_headings(inspection)
    heading = ["layer", *(f"wavelength {axis}" for axis in AXES), *(f"turns {_by(grid)}" for grid in grids.values())]
    cells = [heading + flags]
    wavelengths = inspection.wavelengths(inspection.train_grid)
    turns = [inspection.turns(grid).sum(-2) for grid in grids.values()]
    for layer in range(len(inspection.frequencies)):
        spreads = [*wavelengths[layer].unbind(-2), *(figure[layer] for figure in turns)]
        counts = [count(unseen[layer]) for unseen in (inspection.unseen, inspection.unseen_extended)]
        cells.append([str(layer), *map(_spread, spreads), *counts[: len(flags)]])
    return cells


def _flag_headings(inspection: Inspection) -> list[str]:
    """Headings of what is unseen: nothing in the grid of training, with the suggested method beside it where one is."""
    if inspection.grid == inspection.train_grid:
        return []
    return ["unseen"] if inspection.method == "none" else ["unseen", f"with {inspection.method}"]


def _grids(inspection: Inspection) -> dict[str, Grid]:
    """The grid of training and, where it is another one, the new grid."""
    grids = {"trained": inspection.train_grid, "new": inspection.grid}
    return grids if inspection.grid != inspection.train_grid else {"trained": inspection.train_grid}


def _spread(values: Tensor) -> str:
    numbers = sorted(values.flatten().tolist())
    return " / ".join(_number(number) for number in (numbers[0], statistics.median(numbers), numbers[-1]))


def _number(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _by(grid: Grid) -> str:
    return "x".join(map(str, grid))


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _decay_curves(inspection: Inspection, axis: int) -> dict[str, list[float]] | None:
    """The bound at distances of 0, 1, 2, ... tokens, the mean over layers and heads."""
    curves = {
        "trained": inspection.decay(inspection.train_grid, axis),
        "new": inspection.decay(inspection.grid, axis),
        "new_extended": inspection.decay(inspection.grid, axis, extended=True),
    }
    means = {name: curve.mean((0, 1)).tolist() for name, curve in curves.items() if curve is not None}
    return means or None


def _decay_text(inspection: Inspection, axis: int) -> str:
    """The bound at one token, across the training grid and across the new one."""
    curves = _decay_curves(inspection, axis)
    trained, new = inspection.train_grid[axis], inspection.grid[axis]
    if curves is None:
        return "none, since no pair turns with them"
    if trained == 1:
        return "none, since there is one token"
    text = f"{curves['trained'][1]:.3g} at 1 token, {curves['trained'][-1]:.3g} at {trained - 1} (training)"
    if new != trained:
        text += f", {curves['new'][-1]:.3g} at {new - 1} (new)"
        if inspection.method != "none":
            text += f", there {curves['new_extended'][-1]:.3g} with {inspection.method}"
    return text
