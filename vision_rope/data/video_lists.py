"""Lists of videos: a .csv file with the columns path, and label, split, start and end where they are wanted."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vision_rope.data.folders import Part, hold_out
from vision_rope.data.video_sources import Segment, natural_key

# The class of clips without labels.
NO_CLASS = "clip"
COLUMNS = ("path", "label", "split", "start", "end")


def read_list(file: Path, part: Part) -> tuple[list[str], list[tuple[Segment, int]]]:
    """Classes and rows of one split of a list with the columns path, and label, split, start and end where there are.

    Without a column `split` a part of every class is held out; the parts of one file stay together.

    Raises:
        ValueError: with the line where there is one, for a faulty list, a split that it lacks, and missing files.
    """
    rows = list(_read_rows(file))
    names = sorted({row["label"] for _, row in rows}, key=natural_key)
    classes = {name: label for label, name in enumerate(names)}
    segments = [_segment(file, line, row) for line, row in rows]
    if "split" in rows[0][1]:
        found = [row["split"] for _, row in rows]
        if part.val_split != "validation" and part.val_split not in found:
            raise ValueError(
                f"there is no split {part.val_split} in {file}; it has {' and '.join(dict.fromkeys(found))}"
            )
        for (line, _), value in zip(rows, found, strict=True):
            if value not in (part.train_split, *part.val_names):
                raise ValueError(
                    f"{file}, line {line}: split is {value!r}, but it must be {part.train_split} or "
                    f"{' or '.join(part.val_names)}"
                )
        validation = next((name for name in part.val_names if name in found), part.val_names[0])
        own = part.train_split if part.split == "train" else validation
        chosen = [place for place, value in enumerate(found) if value == own]
        if not chosen:
            raise ValueError(f"{file} has no row whose split is {own}; leave the column out to hold a part out")
    else:
        part.refuse_names(f"{file} has no column split")
        # ./a.mp4 and a.mp4 are one file.
        paths = [os.path.normpath(row["path"]) for _, row in rows]
        strata = {path: row["label"] for path, (_, row) in zip(reversed(paths), reversed(rows), strict=True)}
        keys = list(strata)
        held = hold_out(keys, list(strata.values()), part.split, part.val_fraction, part.split_seed, what="videos")
        picked = {keys[place] for place in held}
        chosen = [place for place, path in enumerate(paths) if path in picked]
    _check_files(file, [(line, segment.path) for (line, _), segment in zip(rows, segments, strict=True)])
    return names, [(segments[place], classes[rows[place][1]["label"]]) for place in chosen]


def _check_files(file: Path, rows: Sequence[tuple[int, str]]) -> None:
    """Refuse a list of which files are missing: a faulty path is a fault of the list and not of a video."""
    there = {path: Path(path).is_file() for path in dict.fromkeys(path for _, path in rows)}
    missing = [(line, path) for line, path in rows if not there[path]]
    if missing:
        line, path = missing[0]
        others = f"; {len(missing)} of its {len(rows)} rows name files that are missing" if len(missing) > 1 else ""
        raise ValueError(f"{file}, line {line}: there is no file {path}{others}; mend these rows or take them out")


def _read_rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a list with their numbers; every row has a path and a label."""
    if not file.is_file():
        raise ValueError(f"data source videos:{file}: there is no file {file}")
    with file.open(newline="", encoding="utf-8-sig") as text:
        reader = csv.DictReader(text, skipinitialspace=True)
        try:
            yield from _check_rows(file, reader)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no list in UTF-8: {error}; save it as CSV in UTF-8") from error
        except csv.Error as error:
            raise ValueError(f"{file}, after line {reader.line_num}: {error}") from error


def _check_rows(file: Path, reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, str]]]:
    columns = list(reader.fieldnames or [])
    _check_columns(file, columns)
    empty = True
    for row in reader:
        if None in row or any(value is None for value in row.values()):
            raise ValueError(f"{file}, line {reader.line_num}: it does not have {len(columns)} fields")
        for name in ("path", "label", "split"):
            if name in row and not row[name].strip():
                raise ValueError(f"{file}, line {reader.line_num}: its {name} is empty")
        empty = False
        yield reader.line_num, {"label": NO_CLASS, **{name: value.strip() for name, value in row.items()}}
    if empty:
        raise ValueError(f"{file} lists no videos")


def _check_columns(file: Path, columns: Sequence[str]) -> None:
    if "path" not in columns or any(name not in COLUMNS for name in columns):
        raise ValueError(
            f"{file} begins with {','.join(columns) or 'nothing'}, but its first line must name its columns: path, "
            "and where wanted label, split, start, end"
        )
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{file} names the column {twice} twice; take one of them out")


def _segment(file: Path, line: int, row: dict[str, str]) -> Segment:
    """A row's file, looked up beside the list, and its part."""
    limits: list[float | None] = []
    for name in ("start", "end"):
        text = row.get(name, "")
        try:
            limit = float(text) if text else None
        except ValueError:
            limit = math.nan
        if limit is not None and math.isnan(limit):
            raise ValueError(f"{file}, line {line}: {name} is {text!r}, but it must be seconds or empty")
        limits.append(limit)
    start, end = limits
    if end is not None and end <= (start or 0.0):
        raise ValueError(f"{file}, line {line}: end is {end:g}, but it must come after start {start or 0:g}")
    return Segment(str(file.parent / Path(row["path"]).expanduser()), start, end)
