"""A benchmark's rows as tables for a terminal or Markdown, and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
# One hue a library, as the colour-blind tell them apart; lighter is another form of the same library.
COLORS = {
    "vision_rope": "#0072B2",
    "timm": "#D55E00",
    "ultralytics": "#009E73",
    "transformers": "#CC79A7",
    "rotary-embedding-torch": "#F0E442",
}
NOTHING = "#BBBBBB"


def format_benchmark(rows: Sequence[Row], machine: Mapping[str, Any], titles: Mapping[str, str], command: str) -> str:
    """A Markdown table a section: the medians, and the spread of what they are ratios of."""
    lines = [f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    lines += [
        "Times are medians of rounds in which all candidates ran in random order; ratios are medians of the rounds'",
        "ratios, with the middle half of the rounds in brackets. Errors are the largest difference to float64; peak",
        "memory is what new tensors held at once, in multiples of what goes in: queries and keys, memory, a clip.",
        "The floor is the least the work can cost: `clone`, `copy_`, or the same work without positions.",
    ]
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += ["", f"## {section}: {titles[section]}", "", *_section([r for r in rows if r["section"] == section])]
    return "\n".join(lines) + "\n"


def summarize(rows: Sequence[Row], section: str) -> str:
    """A Markdown table of one section: a line a candidate, a column a size and dtype, medians of time over ours."""
    members = [row for row in rows if row["section"] == section]
    columns = list(dict.fromkeys((row["label"], row["dtype"]) for row in members))
    cells = {(row["name"], (row["label"], row["dtype"])): row["over_ours"]["median"] for row in members}
    lines = [
        f"| {section}: time / ours | {' | '.join(' '.join(column) for column in columns)} |",
        f"|{'---|' * (len(columns) + 1)}",
    ]
    for name in dict.fromkeys(row["name"] for row in members):
        figures = [cells.get((name, column)) for column in columns]
        lines.append(f"| {name} | {' | '.join('' if value is None else f'{value:.2f}' for value in figures)} |")
    return "\n".join(lines)


def _section(rows: Sequence[Row]) -> list[str]:
    """One table: rows are candidates of a size and dtype; columns that no candidate fills are left out."""
    columns = {
        "size": lambda row: row["label"],
        "dtype": lambda row: row["dtype"],
        "": lambda row: row["name"],
        "ms": lambda row: f"{row['milliseconds']['median']:.3g}",
        "over ours": lambda row: _ratio(row["over_ours"]),
        "over the floor": lambda row: _ratio(row["over_floor"]),
        "error": lambda row: "" if row["error"] is None else f"{row['error']:.1e}",
        "peak memory": lambda row: "" if row["peak_memory"] is None else f"{row['peak_memory']:.2f}",
    }
    cells = {head: [text(row) for row in rows] for head, text in columns.items()}
    cells = {head: texts for head, texts in cells.items() if any(texts)}
    lines = [f"| {' | '.join(cells)} |", f"|{'---|' * len(cells)}"]
    return lines + [f"| {' | '.join(line)} |" for line in zip(*cells.values(), strict=True)]


def _ratio(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.3g} ({spread['low']:.3g}-{spread['high']:.3g})"


def plot_benchmark(rows: Sequence[Row], titles: Mapping[str, str], path: Path) -> None:
    """Draw a panel a section: bars are times over ours (over the floor where ours is none), 1 is the line."""
    from matplotlib.figure import Figure

    sections = list(dict.fromkeys(row["section"] for row in rows))
    figure = Figure(figsize=(11, 3.4 * len(sections)), dpi=120, layout="constrained")
    for panel, section in zip(figure.subplots(len(sections), 1, squeeze=False).flat, sections, strict=True):
        members = [row for row in rows if row["section"] == section]
        groups = list(dict.fromkeys((row["label"], row["dtype"]) for row in members))
        names = list(dict.fromkeys(row["name"] for row in members))
        width = 0.8 / len(names)
        ratio = "over_floor" if any(row["over_ours"] is None for row in members) else "over_ours"
        for index, name in enumerate(names):
            found = {(row["label"], row["dtype"]): row[ratio] for row in members if row["name"] == name}
            places = [groups.index(group) + (index + 0.5) * width - 0.4 for group in found]
            middle = [spread["median"] for spread in found.values()]
            error = [
                [spread["median"] - spread["low"] for spread in found.values()],
                [spread["high"] - spread["median"] for spread in found.values()],
            ]
            library = next((library for library in COLORS if name.startswith(library)), "")
            forms = [other for other in names if library and other.startswith(library)]
            style = {
                "color": COLORS.get(library, NOTHING),
                "alpha": 1.0 - 0.6 * forms.index(name) / len(forms) if forms else 1.0,
            }
            panel.bar(places, middle, width, yerr=error, label=name, error_kw={"linewidth": 0.6}, **style)
        panel.axhline(1.0, color="#D55E00", linewidth=1)
        panel.set_yscale("log")
        if ratio == "over_floor":  # a few per cent: powers of ten say nothing
            panel.yaxis.set_major_formatter("{x:.3f}")
            panel.yaxis.set_minor_formatter("{x:.3f}")
        ticks = [f"{label}\n{dtype}".replace(", ", "\n") for label, dtype in groups]
        panel.set_xticks(range(len(groups)), ticks, fontsize=8)
        panel.set_title(f"{section}: {titles[section]}", fontsize=10)
        panel.set_ylabel("time / ours" if ratio == "over_ours" else "time / without positions")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path)
