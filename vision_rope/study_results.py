"""A study's numbers: rows as CSV, tables in Markdown with the spread of seeds, differences within seeds, a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision_rope.checkpoint import write_whole
from vision_rope.points import point_of, training_of
from vision_rope.references import REFERENCES
from vision_rope.results import METRICS, Row, describe_clip_counts, order_of, write_csv

# A difference counts as resolved where at least so many seeds agree on its sign and none disagrees.
ENOUGH_SEEDS = 3
# Differences below this, a twentieth of a point, are those of rounding.
NOTHING = 5e-4
VERDICT = (
    f"Higher and lower: all seeds agree, and there are at least {ENOUGH_SEEDS}; chance alone makes three agree one "
    "time in four."
)


def choose_metrics(rows: Sequence[Row]) -> list[str]:
    """What a study is told by, the most important first: figures of motion; R2; AUROC; top-1."""
    for told in (["direction", "way", "speed"], ["reversal", "way", "faster"]):
        if any(told[0] in row for row in rows):
            return told
    return [next((name for name in ("r2", "auroc") if any(name in row for row in rows)), "top1")]


def write_study(rows: Sequence[Row], baseline: str, folder: Path) -> list[Path]:
    """Write study.csv, pairs.csv, study.md and study.png."""
    from vision_rope.plots import plot_study

    files = [folder / name for name in ("study.csv", "pairs.csv", "study.md", "study.png")]
    columns = dict.fromkeys(key for row in rows for key in row)
    write_csv(files[0], [{key: row.get(key) for key in columns} for row in rows])
    metrics = choose_metrics(rows)
    pairs = [
        {**({"metric": metric} if len(metrics) > 1 else {}), **pair}
        for metric in metrics
        for pair in compare_pairs(rows, metric, baseline)
    ]
    write_csv(files[1], [{key: _join(value) for key, value in pair.items()} for pair in pairs])
    write_whole(files[2], format_study(rows, baseline).encode())
    plot_study(rows, metrics[0], files[3])
    return files


def compare_pairs(rows: Sequence[Row], metric: str, baseline: str) -> list[dict[str, Any]]:
    """Differences between two results of the same seed: a method against none, and a row against the baseline.

    Keys: kind (method or row), row, against, size (of clips point), method; seeds and differences as lists; mean,
    least, most; resolved: all seeds have the same sign, and there are at least three.
    """
    found = {
        (row["row"], point_of(row), row["method"], row["seed"]): row[metric]
        for row in rows
        if row.get(metric) is not None and row["seed"] is not None
    }
    names = list(dict.fromkeys(key[0] for key in found))
    points = list(dict.fromkeys(key[1] for key in found))
    methods = list(dict.fromkeys(key[2] for key in found))
    wanted = [(name, point, method, name, "none") for name in names for point in points for method in methods[1:]]
    if baseline:
        wanted += [(name, point, "none", baseline, "none") for name in names for point in points if name != baseline]
    pairs = []
    for name, point, method, other, plain in wanted:
        seeds = [seed for a, b, c, seed in found if (a, b, c) == (name, point, method)]
        seeds = [seed for seed in seeds if (other, point, plain, seed) in found]
        differences = [found[name, point, method, seed] - found[other, point, plain, seed] for seed in seeds]
        # Below the trained size a method changes nothing but the last digits.
        if not differences or max(map(abs, differences)) < NOTHING:
            continue
        one_sign = min(differences) > 0 or max(differences) < 0
        pairs.append(
            {
                "kind": "method" if other == name else "row",
                "row": name,
                "against": other if other != name else "none",
                _place_key(rows): point,
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
    metric, *others = choose_metrics(rows)
    pairs = compare_pairs(rows, metric, baseline)
    lines = _table(rows, metric)
    for other in others:
        lines += ["", *_table(rows, other)]
    known = _known(rows, metric)
    if reasons := [*_definitions(known), *(f"- {line}" for line in describe_clip_counts(known)), *_reasons(rows)]:
        lines += ["", *reasons]
    also = f" ({METRICS[metric]}; {' and '.join(METRICS[other] for other in others)} in pairs.csv)" if others else ""
    for title, chosen in (
        ("A method against none, the same trained weights", [pair for pair in pairs if pair["kind"] == "method"]),
        ("A row against the baseline, the same seeds", [pair for pair in pairs if pair["kind"] == "row"]),
    ):
        if chosen:
            lines += ["", f"{title}{also}: differences by seed, times 100. {VERDICT}", "", *_pair_table(chosen)]
    return "\n".join(lines) + "\n"


def _known(rows: Sequence[Row], metric: str) -> list[Row]:
    return [row for row in rows if row.get(metric) is not None]


def _place_key(rows: Sequence[Row]) -> str:
    """What the place of a figure is called: a size, of clips a point."""
    return "point" if any("frames" in row for row in rows) else "size"


def _table(rows: Sequence[Row], metric: str) -> list[str]:
    """A line a row and method, a column a size or point."""
    known = _known(rows, metric)
    points = list(dict.fromkeys(map(point_of, sorted(known, key=order_of))))
    where = "frames, rates and sizes" if _place_key(rows) == "point" else "image sizes"
    facts = next(iter(known), {})
    seeds = len({row["seed"] for row in known if row["seed"] is not None}) or 1
    lines = [
        f"{METRICS[metric]} x 100 at {where} in pixels (trained at {_trained(known)}); "
        + (f"mean (least to most) of {seeds} seeds; " if seeds > 1 else "one seed; ")
        + f"{_count(known)} of {facts.get('data')}. A method that changes nothing in a row has no line.",
        "",
        "| row | method | " + " | ".join(points) + " | CPU s a training |",
        "|---|---|" + "---:|" * (len(points) + 1),
    ]
    for name, method, members in _lines(known):
        if method != "none" and all(_same(row, known, metric) for row in members):
            continue
        whole = seeds if members[0]["seed"] is not None else 1
        cells = [_spread([row[metric] for row in members if point_of(row) == point], whole) for point in points]
        spent = {row["seed"]: row["cpu_seconds"] for row in members if row.get("cpu_seconds") is not None}
        cost = f"{sum(spent.values()) / len(spent):.0f}" if method == "none" and spent else ""
        lines.append(f"| {name} | {method} | {' | '.join(cells)} | {cost} |")
    return lines


def _count(rows: Sequence[Row]) -> str:
    """How many images or clips figures are made of; of clips it may hang on the point."""
    kind = "clips" if _place_key(rows) == "point" else "images"
    counts = [row[kind] for row in rows] or [None]
    return f"{counts[0]} {kind}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)} {kind}"


def _trained(rows: Sequence[Row]) -> str:
    """The size or point of most rows, and what others were trained at: their largest size, where sizes were random."""
    sizes = {row["row"]: training_of(row) for row in rows}
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
    place = "point" if "point" in pairs[0] else "size"
    lines = [f"| row | against | {place} | method | differences | mean | |", "|---|---|---:|---|---|---:|---|"]
    for pair in pairs:
        differences = ", ".join(f"{100 * value:+.1f}" for value in pair["differences"])
        verdict = ("higher" if pair["mean"] > 0 else "lower") if pair["resolved"] else "not resolved"
        lines.append(
            f"| {pair['row']} | {pair['against']} | {pair[place]} | {pair['method']} | {differences} | "
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
    key = (row["row"], row["seed"], point_of(row), "none")
    plain = [other[metric] for other in rows if (other["row"], other["seed"], point_of(other), other["method"]) == key]
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
