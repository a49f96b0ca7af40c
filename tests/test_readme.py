"""What the README shows is what there is."""

from __future__ import annotations

import contextlib
import csv
import re
from pathlib import Path

import pytest

from vision_rope.encodings import ENCODINGS
from vision_rope.extension import EXTENSIONS
from vision_rope.rope_presets import PRESETS
from vision_rope.study_config import load_study
from vision_rope.study_results import format_study

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_snippets():
    assert len(SNIPPETS) == README.count("```python")
    assert SNIPPETS


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippets_run(index):
    exec(compile(SNIPPETS[index], f"README snippet {index}", "exec"), {})


@pytest.mark.parametrize("name", [*PRESETS, *EXTENSIONS, *ENCODINGS])
def test_every_row_of_the_tables_is_named(name):
    assert f"`{name}`" in README


def test_the_table_of_families_is_the_codes():
    from vision_rope.convert import FAMILIES

    rows = [f"| `{kind.__name__}` | {family.examples} | {family.sizes} |" for kind, family in FAMILIES.items()]
    assert "\n".join(rows) in README


def test_files_that_are_named_exist():
    for name in re.findall(r"\b(?:configs|notebooks|docs|tests)/[\w./-]+\w", README):
        assert (ROOT / name).exists(), name


def test_every_module_has_its_line():
    for path in (ROOT / "vision_rope").glob("*"):
        name = f"{path.name}/" if path.is_dir() else path.name
        if path.suffix == ".py" and not name.startswith("__"):
            assert f"`{name}`" in README, name


def test_results_are_those_that_were_written():
    with (ROOT / "docs" / "results" / "default" / "evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 28
    for row in rows:
        figures = [f"{float(row[key]):.3f}" for key in ("top1", "balanced_accuracy", "auroc", "nll", "ece")]
        assert f"| {row['size']} | {row['method']} | {' | '.join(figures)} |" in README


def test_figures_of_trackers_are_those_that_were_written():
    with (ROOT / "docs" / "results" / "track" / "sequences.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] in ("", "none")]
    for tracker in {(row["tracker"], row["size"]) for row in rows}:
        own = [row for row in rows if (row["tracker"], row["size"]) == tracker]
        assert len(own) == 5
        figures = [f"{sum(float(row[key]) for row in own) / 5:.3f}" for key in ("j_mean", "f_mean")]
        assert f"| {' | '.join(figures)} |" in README


RESULTS = ROOT / "docs" / "results"
# With those on other data than the study's, in a folder below it.
STUDIES = sorted(path.parent for path in RESULTS.rglob("study.csv"))


def read_value(text: str) -> float | int | str | None:
    """A cell of a CSV as Python wrote it."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text or None


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.relative_to(RESULTS).as_posix())
def test_tables_of_studies_follow_from_their_csv(folder):
    with (folder / "study.csv").open(newline="") as file:
        rows = [{key: read_value(text) for key, text in row.items()} for row in csv.DictReader(file)]
    for row in rows:
        row |= {"size": str(row["size"]), "train_size": str(row["train_size"])}
    place = folder.relative_to(RESULTS)
    baseline = load_study(["--config", str(ROOT / "configs" / f"{place.parts[0]}.yaml")]).study.baseline
    text = (folder / "study.md").read_text()
    assert format_study(rows, baseline) == text
    # The page shows the first table and what stands around it.
    page = (RESULTS / "studies.md").read_text()
    assert text.partition("\n- ")[0].partition("\nA method")[0].strip() in page
    for name in ("study.png", "study.csv", "pairs.csv", "study.md"):
        assert f"({place.as_posix()}/{name})" in page


def test_there_are_studies():
    assert len(STUDIES) == 9
