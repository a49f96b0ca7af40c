"""Labelled files in folders: a folder a class, splits as folders or held out."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation"]
# Classes of a folder, and its items (a file or a folder each) with their class.
Listing = tuple[list[str], list[tuple[str, int]]]

# HEIC is listed although Pillow cannot read it: a file left out in silence is worse than an error with its path.
IMAGE_EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga"),
)
VALIDATION_FOLDERS = ("validation", "val", "valid", "test")


@dataclass(frozen=True)
class Part:
    """Which part of a data set is wanted; the fields are arguments of `open_dataset`."""

    split: Split
    train_split: str = "train"
    val_split: str = "validation"
    val_fraction: float = 0.25
    split_seed: int = 0

    @property
    def val_names(self) -> tuple[str, ...]:
        """What the validation split may be called."""
        return VALIDATION_FOLDERS if self.val_split == "validation" else (self.val_split,)

    @property
    def is_named(self) -> bool:
        """Whether somebody says what the source's own splits are called."""
        return (self.train_split, self.val_split) != ("train", "validation")

    def refuse_names(self, complaint: str) -> None:
        """Raise ValueError where splits are named that the source does not have, as the complaint says."""
        if self.is_named:
            raise ValueError(
                f"train_split is {self.train_split!r} and val_split {self.val_split!r}, but {complaint}; "
                "leave both out, val_fraction and split_seed say what is held out"
            )


def choose_items(source: str, part: Part, list_items: Callable[[Path], Listing], *, what: str) -> Listing:
    """List the items of one split below the folder of a source KIND:PATH, by `list_items`.

    The splits are PATH/train and PATH/validation (or val, valid, test); where there are no such folders, a part of
    every class of PATH is held out.

    Raises:
        ValueError: where there is no such folder, or its splits are incomplete or have different classes.
    """
    kind, _, path = source.partition(":")
    if not path:
        raise ValueError(f"{kind} needs a path: {kind}:PATH")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data source {source}: there is no folder {folder}")
    splits = [name for name in (part.train_split, *VALIDATION_FOLDERS) if (folder / name).is_dir()]
    if splits and part.val_split != "validation" and not (folder / part.val_split).is_dir():
        raise ValueError(f"there is no split {part.val_split} in {folder}; it has {' and '.join(splits)}")
    val_folder = next((folder / entry for entry in part.val_names if (folder / entry).is_dir()), None)
    train_folder = folder / part.train_split
    if train_folder.is_dir() and val_folder is not None:
        folders = (train_folder, val_folder) if part.split == "train" else (val_folder, train_folder)
        (classes, items), (others, _) = map(list_items, folders)
        if classes != others:
            raise ValueError(
                f"{train_folder} and {val_folder} must hold the same classes, "
                f"but only one of them has {', '.join(sorted(set(classes) ^ set(others)))}"
            )
        return classes, items
    if train_folder.is_dir() or val_folder is not None or part.is_named:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
        raise ValueError(
            f"{folder} must hold both splits, {part.train_split} and {' or '.join(part.val_names)}, or neither of them "
            f"but a folder a class; it holds {found or 'nothing'}"
        )
    classes, items = list_items(folder)
    keys = [Path(item).relative_to(folder).as_posix() for item, _ in items]
    strata = [classes[label] for _, label in items]
    chosen = hold_out(keys, strata, part.split, part.val_fraction, part.split_seed, what=what)
    return classes, [items[index] for index in chosen]


def hold_out(
    keys: Sequence[str], strata: Sequence[str], split: Split, val_fraction: float, seed: int, *, what: str = "images"
) -> list[int]:
    """Choose the places of one split: the same part of every stratum, whatever the order and the other files.

    Raises:
        ValueError: where a split would be empty.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, stratum in enumerate(strata):
        places[stratum].append(place)
    chosen: list[int] = []
    for members in places.values():
        # A hash of the name and not a random generator, whose numbers may change with its library.
        shuffled = sorted(members, key=lambda place: hashlib.sha256(f"{seed}/{keys[place]}".encode()).digest())
        num_validation = round(len(members) * val_fraction)
        chosen += shuffled[:num_validation] if split == "validation" else shuffled[num_validation:]
    if not chosen:
        raise ValueError(
            f"val_fraction is {val_fraction}, which leaves none of {len(keys)} {what} for the {split} split; "
            "give more of them or another fraction"
        )
    return sorted(chosen)


def list_classes(folder: Path) -> list[str]:
    """List the folders inside a folder by name.

    Raises:
        ValueError: where there is none.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} holds no folders, but it must hold one a class")
    return classes


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders at any depth with their files, links followed; no folder twice, so that a link upwards ends."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield parent, files


def list_images(folder: Path) -> Listing:
    """List the folders inside a folder as classes, and their images."""
    classes = list_classes(folder)
    return classes, list_files(folder, classes)


def list_files(
    folder: Path, classes: Sequence[str], extensions: Sequence[str] = IMAGE_EXTENSIONS, what: str = "images"
) -> list[tuple[str, int]]:
    """List the files of every class, at any depth, as (path, label).

    Raises:
        ValueError: where a class has none.
    """
    files: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        found = sorted(
            str(Path(parent, file))
            for parent, entries in walk(folder / name)
            for file in entries
            if Path(file).suffix.lower() in extensions and not file.startswith(".")
        )
        if not found:
            raise ValueError(f"{folder / name} holds no {what}; expected files that end in {' '.join(extensions)}")
        files += [(path, label) for path in found]
    return files
