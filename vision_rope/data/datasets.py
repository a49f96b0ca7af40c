"""Labelled images by name: solar cells from a package, folders, and everything that timm opens.

A new name is a function here and a line in DATASETS.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from vision_rope.data.sources import EvenPart, FileSource, ImageSource, IterableSource
from vision_rope.data.timm_datasets import TIMM_PREFIXES, open_timm

Split = Literal["train", "validation"]

# HEIC is listed although Pillow cannot read it: a file left out in silence is worse than an error with its path.
IMAGE_EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga"),
)
VALIDATION_FOLDERS = ("validation", "val", "valid", "test")


def open_dataset(
    source: str,
    split: Split,
    *,
    root: str | None = None,
    train_split: str = "train",
    val_split: str = "validation",
    val_fraction: float = 0.25,
    split_seed: int = 0,
    download: bool = False,
) -> ImageSource | IterableSource:
    """Open one split of a data set.

    Args:
        source: elpv, folder:PATH, images:PATH (no labels), or a name of timm's: torch/cifar10, hfds/NAME, wds/NAME.
        split: train or validation.
        root: the folder that timm's names are looked up in.
        train_split: what the source itself calls the training split.
        val_split: what the source itself calls the validation split.
        val_fraction: part held out for validation where the source has no splits; every class gives the same part.
        split_seed: seed of that choice; it hangs on file names alone, not on other files nor on library versions.
        download: let timm and torchvision download the data set.

    Raises:
        ValueError: for an unknown source, an option that the source cannot follow, a folder without images.
        ModuleNotFoundError: where the source needs a package that is not installed; it says how to install it.
    """
    if split not in ("train", "validation"):
        raise ValueError(
            f"split is {split!r}; choose train or validation (train_split, val_split name the source's own)"
        )
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, but it must lie between 0 and 1")
    if source.split("/")[0] in TIMM_PREFIXES and "/" in source:
        own_split = train_split if split == "train" else val_split
        return open_timm(source, own_split, root=root, is_training=split == "train", seed=split_seed, download=download)
    name, _, path = source.partition(":")
    if name not in DATASETS:
        known = [*DATASETS, *(f"{prefix}/" for prefix in TIMM_PREFIXES)]
        close = difflib.get_close_matches(name.split("/")[0], [entry.strip("/") for entry in known], n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"data source {source!r} is unknown; choose elpv, folder:PATH, images:PATH, or a name of timm's beginning "
            f"with {', '.join(f'{prefix}/' for prefix in TIMM_PREFIXES)}{hint}"
        )
    if root is not None:
        raise ValueError(f"root is {root!r}, but only timm's names are looked up in it; leave it out with {source}")
    if download:
        raise ValueError(f"download is on, but {source} is not downloaded; leave it off")
    return DATASETS[name](path, split, train_split, val_split, val_fraction, split_seed)


def open_elpv(
    path: str, split: Split, train_split: str, val_split: str, val_fraction: float, split_seed: int
) -> ImageSource:
    """Open 2,624 photographs of solar cells; a cell counts as defective where its probability is at least 0.5.

    Source: Deitsch et al., arXiv 1807.02894; the experts' answers are the probabilities 0, 1/3, 2/3 and 1.
    """
    if path:
        raise ValueError(f"elpv takes no path, but got {path!r}; it is read from its package")
    if (train_split, val_split) != ("train", "validation"):
        raise ValueError(
            f"train_split is {train_split!r} and val_split {val_split!r}, but elpv has no splits of its own; "
            "leave both out, val_fraction and split_seed say what is held out"
        )
    package = importlib.util.find_spec("elpv_dataset")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "elpv needs the package elpv-dataset: pip install vision-rope[elpv]", name="elpv_dataset"
        )
    folder = Path(package.origin).parent / "data"
    rows = [line.split() for line in (folder / "labels.csv").read_text().splitlines() if line.strip()]
    names = [row[0] for row in rows]
    labels = [int(float(row[1]) >= 0.5) for row in rows]
    strata = [f"{row[1]} {row[2]}" for row in rows]
    chosen = hold_out(names, strata, split, val_fraction, split_seed)
    return FileSource(
        "elpv",
        ["functional", "defective"],
        [str(folder / names[index]) for index in chosen],
        [labels[index] for index in chosen],
        licence="CC BY-NC-SA 4.0",
    )


def open_folder(
    path: str, split: Split, train_split: str, val_split: str, val_fraction: float, split_seed: int
) -> ImageSource:
    """Open PATH/train and PATH/validation (or val, valid, test) with a folder a class, or one folder of classes.

    Where there are no splits, a part of every class is held out.
    """
    if not path:
        raise ValueError("folder needs a path: folder:PATH")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data source folder:{path}: there is no folder {folder}")
    name = f"folder:{path}"
    val_names = VALIDATION_FOLDERS if val_split == "validation" else (val_split,)
    val_folder = next((folder / entry for entry in val_names if (folder / entry).is_dir()), None)
    train_folder = folder / train_split
    if train_folder.is_dir() and val_folder is not None:
        train_classes, val_classes = list_classes(train_folder), list_classes(val_folder)
        if train_classes != val_classes:
            only = sorted(set(train_classes) ^ set(val_classes))
            raise ValueError(
                f"{train_folder} and {val_folder} must hold the same classes, "
                f"but only one of them has {', '.join(only)}"
            )
        chosen_folder = train_folder if split == "train" else val_folder
        files = list_files(chosen_folder, train_classes)
        return FileSource(name, train_classes, [file for file, _ in files], [label for _, label in files])
    if train_folder.is_dir() or val_folder is not None or (train_split, val_split) != ("train", "validation"):
        raise ValueError(
            f"{folder} must hold both splits, {train_split} and {' or '.join(val_names)}, or neither of them but a "
            f"folder a class; it holds {', '.join(sorted(entry.name for entry in folder.iterdir())[:10]) or 'nothing'}"
        )
    classes = list_classes(folder)
    files = list_files(folder, classes)
    keys = [Path(file).relative_to(folder).as_posix() for file, _ in files]
    chosen = hold_out(keys, [classes[label] for _, label in files], split, val_fraction, split_seed)
    return FileSource(name, classes, [files[index][0] for index in chosen], [files[index][1] for index in chosen])


def open_images(
    path: str, split: Split, train_split: str, val_split: str, val_fraction: float, split_seed: int
) -> ImageSource:
    """Open all images below PATH, at any depth, without labels: for masked prediction; a part is held out."""
    if not path:
        raise ValueError("images needs a path: images:PATH")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data source images:{path}: there is no folder {folder}")
    if (train_split, val_split) != ("train", "validation"):
        raise ValueError(
            f"train_split is {train_split!r} and val_split {val_split!r}, but images:PATH has no splits of its own; "
            "leave both out, val_fraction and split_seed say what is held out"
        )
    files = [file for file, _ in list_files(folder.parent, [folder.name])]
    keys = [Path(file).relative_to(folder).as_posix() for file in files]
    chosen = hold_out(keys, [""] * len(keys), split, val_fraction, split_seed)
    return FileSource(f"images:{path}", ["image"], [files[index] for index in chosen], [0] * len(chosen))


def take_evenly(dataset: ImageSource | IterableSource, count: int | None) -> ImageSource | IterableSource:
    """So many images of a data set, evenly spread; all of them where count is none or larger.

    Raises:
        ValueError: for a stream, which has no order to spread them over.
    """
    if count is None:
        return dataset
    if isinstance(dataset, IterableSource):
        raise ValueError(f"max_images is {count}, but {dataset.name} is a stream; leave it out to take all images")
    return dataset if count >= len(dataset) else EvenPart(dataset, count)


DATASETS: dict[str, Callable[[str, Split, str, str, float, int], ImageSource]] = {
    "elpv": open_elpv,
    "folder": open_folder,
    "images": open_images,
}


def hold_out(keys: Sequence[str], strata: Sequence[str], split: Split, val_fraction: float, seed: int) -> list[int]:
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
            f"val_fraction is {val_fraction}, which leaves no image of {len(keys)} for the {split} split; "
            "give more images or another fraction"
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


def list_files(folder: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """List the images of every class, at any depth, as (path, label).

    Raises:
        ValueError: where a class has none.
    """
    files: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        found = sorted(
            str(Path(parent, file))
            for parent, entries in walk(folder / name)
            for file in entries
            if Path(file).suffix.lower() in IMAGE_EXTENSIONS and not file.startswith(".")
        )
        if not found:
            raise ValueError(
                f"{folder / name} holds no images; expected files that end in {' '.join(IMAGE_EXTENSIONS)}"
            )
        files += [(path, label) for path in found]
    return files
