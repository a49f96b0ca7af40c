"""The figure of a sweep: what it draws is read back from matplotlib, and the file is a picture."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from vision_rope.plots import plot_evaluation


def make_rows(two_classes: bool = True, **changes: Any) -> list[dict[str, Any]]:
    rows = []
    for height, width in [(256, 256), (64, 64), (192, 256), (128, 128)]:
        for index, method in enumerate(["none", "ntk", "pitch"]):
            figures = {"top1": 0.8 - height / 1000 + 0.01 * index, "nll": 0.5 + height / 1000, "ece": height / 2000}
            if two_classes:
                figures["auroc"] = 0.7
            reason = "pitch means nothing here" if method == "pitch" else None
            rows.append(
                {
                    "model": "tiny",
                    "position": "rope-vit-axial",
                    "size": str(height) if height == width else f"{height}x{width}",
                    "height": height,
                    "width": width,
                    "train_size": "128",
                    "method": method,
                    "reason": reason,
                    **(dict.fromkeys(figures) if reason else figures),
                    **changes,
                }
            )
    return rows


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (figures.append(self), save(self, *args, **options))[1]
    )
    return figures


def lines_of(panel: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in panel.lines
        if not line.get_label().startswith("_") and line.get_label() != "training size"
    }


@pytest.mark.parametrize("two_classes", [True, False])
def test_panels_lines_and_training_size(two_classes: bool, drawn: list[Figure], tmp_path: Path) -> None:
    plot_evaluation(make_rows(two_classes), tmp_path / "new" / "figure.png")
    panels = {panel.get_title(): panel for panel in drawn[0].axes}
    expected = ["accuracy", *(["AUROC"] if two_classes else []), "negative log-likelihood", "calibration error (ECE)"]
    assert list(panels) == expected

    lines = lines_of(panels["accuracy"])
    assert list(lines) == ["no extension", "ntk"]
    assert lines["ntk"][0] == [64, 128, 256]
    assert lines["ntk"][1] == pytest.approx([0.746, 0.682, 0.554])
    hollow = [line for line in panels["accuracy"].lines if line.get_markerfacecolor() == "none"]
    assert [list(line.get_xdata()) for line in hollow] == [[math.sqrt(192 * 256)]] * 2
    marks = [line.get_xdata() for line in panels["accuracy"].lines if line.get_label() == "training size"]
    assert [list(mark) for mark in marks] == [[128, 128]]
    assert [label.get_text() for label in panels["accuracy"].get_xticklabels()] == ["64", "128", "192x256", "256"]

    with Image.open(tmp_path / "new" / "figure.png") as picture:
        assert picture.format == "PNG"
        assert 900 <= picture.width <= 2000
        assert picture.height >= 400


def test_encodings_side_by_side_are_told_apart(drawn: list[Figure], tmp_path: Path) -> None:
    rows = make_rows() + make_rows(position="learned")
    plot_evaluation(rows, tmp_path / "figure.png")
    assert list(lines_of(drawn[0].axes[0])) == [
        "rope-vit-axial, no extension",
        "rope-vit-axial, ntk",
        "learned, no extension",
        "learned, ntk",
    ]


def test_one_size_is_a_figure_too(tmp_path: Path) -> None:
    plot_evaluation(make_rows()[:1], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_labels_of_near_sizes_do_not_overlap(drawn: list[Figure], tmp_path: Path) -> None:
    row = make_rows()[0]
    rows = [{**row, "size": str(side), "height": side, "width": side} for side in range(96, 320, 4)]
    plot_evaluation(rows, tmp_path / "figure.png")
    panel = drawn[0].axes[0]
    boxes = [label.get_window_extent() for label in panel.get_xticklabels()]
    assert len(boxes) >= 5
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
