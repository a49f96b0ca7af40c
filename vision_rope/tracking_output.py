"""What is kept of followed objects: pictures with them in colour, their ids, a line of figures for each."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from vision_rope.data.davis import VOID, palette, write_ids

# Rows of a picture for a pixel of contour.
ROWS_PER_CONTOUR = 360


class ObjectRow(NamedTuple):
    """An object in a frame, a line of objects.csv.

    Attributes:
        frame: its number, from 0 on.
        object: its id.
        area: its pixels in the ids of the frame.
        x0, y0, x1, y1: the edges of its box in pixels: x1 - x0 is its width; None where it has no pixels.
        score: probability that the object is in the frame; None where nothing tells it.
        quality: predicted IoU of its mask; None where nothing tells it.
    """

    frame: int
    object: int
    area: int
    x0: int | None
    y0: int | None
    x1: int | None
    y1: int | None
    score: float | None
    quality: float | None


def merge_masks(masks: Mapping[int, Tensor], size: tuple[int, int]) -> Tensor:
    """Turn the masks of objects into one picture of ids; where they overlap, the largest logit wins.

    Args:
        masks: by object id, logits of its pixels, above 0 inside.
        size: rows and columns, for a frame without objects.

    Shapes:
        masks (height, width) each -> uint8 (height, width): 0 background, n object n

    Raises:
        ValueError: for ids that such a picture cannot hold.
    """
    if wrong := [key for key in masks if not isinstance(key, int) or not 0 < key < VOID]:
        raise ValueError(f"object ids must be from 1 to {VOID - 1}, got {wrong[0]!r}")
    if not masks:
        return torch.zeros(size, dtype=torch.uint8)
    logits, places = torch.stack(list(masks.values())).max(0)
    ids = torch.tensor(list(masks), dtype=torch.uint8, device=logits.device)[places]
    # What is not a number is nobody's.
    return ids.masked_fill(~(logits > 0), 0)


def overlay(pixels: Tensor, ids: Tensor, *, opacity: float = 0.5) -> Tensor:
    """Tint each object in its colour of DAVIS's palette and draw its contour, in the same colour at full brightness.

    Shapes:
        pixels uint8 (3, height, width), ids uint8 (height, width) -> uint8 (3, height, width)
    """
    if pixels.shape[1:] != ids.shape:
        raise ValueError(f"pixels are {tuple(pixels.shape)} and ids {tuple(ids.shape)}; both must have one size")
    ids = ids.to(pixels.device)
    colours = palette().to(pixels.device).float()
    bright = (colours * (255 / colours.amax(1, keepdim=True).clamp(min=1))).round().to(torch.uint8)
    painted = pixels.clone()
    inside, edge = ids > 0, _contours(ids)
    tint = colours[ids[inside].long()].T
    painted[:, inside] = ((1 - opacity) * pixels[:, inside] + opacity * tint).round().to(torch.uint8)
    painted[:, edge] = bright[ids[edge].long()].T
    return painted


def _contours(ids: Tensor) -> Tensor:
    """Pixels of objects that are next to another id, a few pixels wide in large pictures.

    Shapes:
        (height, width) -> bool (height, width)
    """
    edge = torch.zeros_like(ids, dtype=torch.bool)
    for distance in range(1, 1 + max(1, round(min(ids.shape) / ROWS_PER_CONTOUR))):
        for axis in (0, 1):
            length = ids.shape[axis] - distance
            if length > 0:
                before, after = ids.narrow(axis, 0, length), ids.narrow(axis, distance, length)
                differs = before != after
                edge.narrow(axis, 0, length).logical_or_(differs)
                edge.narrow(axis, distance, length).logical_or_(differs)
    return edge & (ids > 0)


def describe_objects(
    frame: int, ids: Tensor, figures: Mapping[int, tuple[float | None, float | None]]
) -> list[ObjectRow]:
    """A row for each object of a frame.

    Args:
        ids: uint8 (height, width) of the frame.
        figures: by object id, the logit that it is there and the quality of its mask.
    """
    rows = []
    for object_id, (score, quality) in figures.items():
        mask = ids == object_id
        probability = None if score is None else torch.tensor(score, dtype=torch.float64).sigmoid().item()
        rows.append(ObjectRow(frame, object_id, int(mask.sum()), *_find_box(mask), probability, quality))
    return rows


def _find_box(mask: Tensor) -> tuple[int | None, int | None, int | None, int | None]:
    """Edges of the smallest box around a mask: x0, y0, x1, y1."""
    if not mask.any():
        return None, None, None, None
    rows, columns = mask.any(1).nonzero()[:, 0].tolist(), mask.any(0).nonzero()[:, 0].tolist()
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1


class ObjectTable:
    """objects.csv, written line by line: what is there is whole whenever the program ends."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(ObjectRow._fields)

    def write(self, rows: Iterable[ObjectRow]) -> None:
        """Add the rows of a frame."""
        for row in rows:
            figures = ("" if x is None else f"{x:.6f}" for x in (row.score, row.quality))
            self._writer.writerow((*row[:7], *figures))

    def __enter__(self) -> ObjectTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


class MaskFolder:
    """A folder of PNGs in the DAVIS layout: 00000.png is the first frame, its palette indices are object ids.

    Raises:
        ValueError: where the folder holds PNGs of something else, which nobody could tell from these.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        if present := next(self.path.glob("*.png"), None):
            raise ValueError(f"{self.path} holds {present.name} already; give a new or an empty folder")

    def write(self, frame: int, ids: Tensor) -> None:
        """Write the ids of a frame."""
        write_ids(self.path / f"{frame:05d}.png", ids)
