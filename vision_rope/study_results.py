"""A study's numbers: rows as CSV, tables in Markdown with the spread of seeds, differences within seeds, a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision_rope.checkpoint import write_whole
from vision_rope.references import REFERENCES
from vision_rope.results import METRICS, Row, write_csv

# A difference counts as resolved where at least so many seeds agree on its sign and none disagrees.
ENOUGH_SEEDS = 3
# Differences below this, a twentieth of a point, are those of rounding.
NOTHING = 5e-4
VERDICT = (
    f"Higher and lower: all seeds agree, and there are at least {ENOUGH_SEEDS}; chance alone makes three agree one "
    "time in four."
)


def choose_metric(rows: Sequence[Row]) -> str:
    """The metric that a study is told by: R2, AUROC for two classes, else top-1."""
    return next((name for name in ("r2", "auroc") if any(name in row for row in rows)), "top1")


def write_study(rows: Sequence[Row], baseline: str, folder: Path) -> list[Path]:
    """Write study.csv, pairs.csv, study.md and study.png."""
    from vision_rope.plots import plot_study

    files = [folder / name for name in ("study.csv", "pairs.csv", "study.md", "study.png")]
    columns = dict.fromkeys(key for row in rows for key in row)
    write_csv(files[0], [{key: row.get(key) for key in columns} for row in rows])
    metric = choose_metric(rows)
    write_csv(
        files[1],
        [{key: _join(value) for key, value in pair.items()} for pair in compare_pairs(rows, metric, baseline)],
    )
    write_whole(files[2], format_study(rows, baseline).encode())
    plot_study(rows, metric, files[3])
    return files


def compare_pairs(rows: Sequence[Row], metric: str, baseline: str) -> list[dict[str, Any]]:
    """Differences between two results of the same seed: a method against none, and a row against the baseline.

    Keys: kind (method or row), row, against, size, method; seeds and differences as lists; mean, least, most; resolved:
    all seeds have the same sign, and there are at least three.
    """
    found = {
        (row["row"], row["size"], row["method"], row["seed"]): row[metric]
        for row in rows
        if row.get(metric) is not None and row["seed"] is not None
    }
    names = list(dict.fromkeys(key[0] for key in found))
    sizes = list(dict.fromkeys(key[1] for key in found))
    methods = list(dict.fromkeys(key[2] for key in found))
    wanted = [(name, size, method, name, "none") for name in names for size in sizes for method in methods[1:]]
    if baseline:
        wanted += [(name, size, "none", baseline, "none") for name in names for size in sizes if name != baseline]
    pairs = []
    for name, size, method, other, plain in wanted:
        seeds = [seed for a, b, c, seed in found if (a, b, c) == (name, size, method)]
        seeds = [seed for seed in seeds if (other, size, plain, seed) in found]
        differences = [found[name, size, method, seed] - found[other, size, plain, seed] for seed in seeds]
        # Below the trained size a method changes nothing but the last digits.
        if not differences or max(map(abs, differences)) < NOTHING:
            continue
        one_sign = min(differences) > 0 or max(differences) < 0
        pairs.append(
            {
                "kind": "method" if other == name else "row",
                "row": name,
                "against": other if other != name else "none",
                "size": size,
                "method": method,
                "seeds": seeds,
                "differences": differences,
                "mean": sum(differences) / len(differences),
                "least": min(differences),
                "most": max(differences),
                "resolved": one_sign and len(differences) >= ENOUGH_SEEDS,
            }
        )
    return pairs


def format_study(rows: Sequence[Row], baseline: str) -> str:
    """The tables in Markdown: figures times 100 as mean (least to most of the seeds)."""
    metric = choose_metric(rows)
    pairs = compare_pairs(rows, metric, baseline)
    known = [row for row in rows if row.get(metric) is not None]
    sizes = list(dict.fromkeys(row["size"] for row in sorted(known, key=lambda row: row["height"] * row["width"])))
    facts = next(iter(known), {})
    seeds = len({row["seed"] for row in known if row["seed"] is not None}) or 1
    lines = [
        f"{METRICS[metric]} x 100 at image sizes in pixels (trained at {_trained(known)}); "
        + (f"mean (least to most) of {seeds} seeds; " if seeds > 1 else "one seed; ")
        + f"{facts.get('images')} images of {facts.get('data')}. A method that changes nothing in a row has no line.",
        "",
        "| row | method | " + " | ".join(sizes) + " | CPU s a training |",
        "|---|---|" + "---:|" * (len(sizes) + 1),
    ]
    for name, method, members in _lines(known):
        if method != "none" and all(_same(row, known, metric) for row in members):
            continue
        whole = seeds if members[0]["seed"] is not None else 1
        cells = [_spread([row[metric] for row in members if row["size"] == size], whole) for size in sizes]
        spent = {row["seed"]: row["cpu_seconds"] for row in members if row.get("cpu_seconds") is not None}
        cost = f"{sum(spent.values()) / len(spent):.0f}" if method == "none" and spent else ""
        lines.append(f"| {name} | {method} | {' | '.join(cells)} | {cost} |")
    if reasons := [*_definitions(known), *_reasons(rows)]:
        lines += ["", *reasons]
    for title, chosen in (
        ("A method against none, the same trained weights", [pair for pair in pairs if pair["kind"] == "method"]),
        ("A row against the baseline, the same seeds", [pair for pair in pairs if pair["kind"] == "row"]),
    ):
        if chosen:
            lines += ["", f"{title}: differences by seed, times 100. {VERDICT}", "", *_pair_table(chosen)]
    return "\n".join(lines) + "\n"


def _trained(rows: Sequence[Row]) -> str:
    """The size of most rows, and what others were trained at: their largest size, where sizes were random."""
    sizes = {row["row"]: str(row["train_size"]) for row in rows}
    usual = max(sizes.values(), key=list(sizes.values()).count, default="-")
    others = [f"{name} up to {size}" for name, size in sizes.items() if size != usual]
    return "; ".join([usual, *others])


def _definitions(rows: Sequence[Row]) -> list[str]:
    """What the untrained lines of a table are."""
    names = dict.fromkeys(row["row"] for row in rows if row["seed"] is None)
    return [f"- {name}, untrained: {_sentence(REFERENCES[name])}" for name in names if name in REFERENCES]


def _sentence(kind: type) -> str:
    text = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return text[:1].lower() + text[1:]


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why rows have no figures, a line a reason."""
    lines: list[str] = []
    methods: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("reason") and row.get("size") is None:
            lines.append(f"- {row['row']}, seed {row['seed']}, failed: {row['reason']}.")
        elif row.get("reason"):
            # "ntk means nothing for sinusoidal: why" is said once for all methods.
            about, _, why = row["reason"].partition(": ")
            method = row["method"].partition(":")[0]
            reason = why if about.startswith(f"{method} means nothing") else row["reason"]
            methods.setdefault((row["row"], reason), []).append(row["method"])
    names: dict[tuple[str, str], list[str]] = {}
    for (name, reason), found in methods.items():
        names.setdefault((", ".join(dict.fromkeys(found)), reason), []).append(name)
    return lines + [
        f"- {', '.join(rows)}: no figures for {found}: {reason}." for (found, reason), rows in names.items()
    ]


def _pair_table(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| row | against | size | method | differences | mean | |", "|---|---|---:|---|---|---:|---|"]
    for pair in pairs:
        differences = ", ".join(f"{100 * value:+.1f}" for value in pair["differences"])
        verdict = ("higher" if pair["mean"] > 0 else "lower") if pair["resolved"] else "not resolved"
        lines.append(
            f"| {pair['row']} | {pair['against']} | {pair['size']} | {pair['method']} | {differences} | "
            f"{100 * pair['mean']:+.1f} | {verdict} |"
        )
    return lines


def _lines(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """Rows by name and method, in their own order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["row"], row["method"]), []).append(row)
    names = list(dict.fromkeys(name for name, _ in groups))
    return [(name, method, groups[name, method]) for name in names for own, method in groups if own == name]


def _same(row: Row, rows: Sequence[Row], metric: str) -> bool:
    """Whether a method changed nothing against none."""
    key = (row["row"], row["seed"], row["size"], "none")
    plain = [other[metric] for other in rows if (other["row"], other["seed"], other["size"], other["method"]) == key]
    return plain == [row[metric]]


def _spread(values: Sequence[float], whole: int) -> str:
    """Mean and range of the seeds; where some are missing, how many there are."""
    if not values:
        return "-"
    mean = f"{100 * sum(values) / len(values):.1f}"
    spread = mean if len(values) == 1 else f"{mean} ({100 * min(values):.1f} to {100 * max(values):.1f})"
    return spread if len(values) == whole else f"{spread} [{len(values)} of {whole} seeds]"


def _join(value: Any) -> Any:
    return " ".join(f"{part:.6g}" for part in value) if isinstance(value, list) else value
