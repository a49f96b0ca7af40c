"""Data sets by timm's names, whose prefix says what reads them: torch/cifar10, hfds/NAME, wds/NAME."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from vision_rope.data.sources import FileSource, ImageSource, IterableSource, PillowSource, ReaderSource

# The packages that timm's prefixes need beyond what is installed with this one.
TIMM_PREFIXES: dict[str, str | None] = {
    "torch": None,
    "hfds": "datasets",
    "hfids": "datasets",
    "wds": "webdataset",
    "tfds": "tensorflow_datasets",
}


def open_timm(
    source: str, split: str, *, root: str | None, is_training: bool, seed: int, download: bool
) -> ImageSource | IterableSource:
    """Open one of timm's names, whose prefix says what reads it: torchvision, Hugging Face, webdataset, tensorflow."""
    from timm.data import create_dataset
    from timm.data.dataset import ImageDataset, IterableImageDataset
    from torchvision.datasets import DatasetFolder

    prefix = source.split("/")[0]
    package = TIMM_PREFIXES[prefix]
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{source} needs the package {package}: pip install {package.replace('_', '-')}", name=package
        )
    if root is None and prefix in ("torch", "wds"):
        raise ValueError(f"{source} needs root: the folder that its files are in")
    root = None if root is None or "://" in root else str(Path(root).expanduser())
    try:
        dataset = create_dataset(
            source,
            root=root,
            split=split,
            is_training=is_training,
            seed=seed,
            # timm hands it on only where it means something
            download=download,
        )
    except (AssertionError, RuntimeError, FileNotFoundError) as error:
        raise ValueError(f"data source {source} (root {root}, split {split}) cannot be opened: {error}") from error
    if isinstance(dataset, DatasetFolder):
        classes = [entry if isinstance(entry, str) else ", ".join(entry) for entry in dataset.classes]
        return FileSource(
            source, classes, [path for path, _ in dataset.samples], [label for _, label in dataset.samples]
        )
    if isinstance(dataset, IterableImageDataset):
        return IterableSource(source, dataset, class_names(dataset.reader) or read_class_names(source, root))
    if isinstance(dataset, ImageDataset):
        images = ReaderSource(source, dataset.reader, class_names(dataset.reader))
        if not images.classes and images.labels:
            images.classes = [str(label) for label in range(max(images.labels) + 1)]
        return images
    targets = getattr(dataset, "targets", None)
    labels = None if targets is None else [int(label) for label in targets]
    known = getattr(dataset, "classes", None)
    if known is None and labels is None:
        raise ValueError(f"{source} tells neither its classes nor its labels; unpack it and open it as folder:PATH")
    return PillowSource(source, dataset, known or [str(label) for label in range(max(labels or [0]) + 1)], labels)


def read_class_names(source: str, root: str | None) -> list[str]:
    """Read the names of a stream's classes, one a line, from classnames.txt in its folder.

    Raises:
        ValueError: where there is no such file: the classes could only be counted by reading every image.
    """
    file = Path(root or ".") / "classnames.txt"
    if not file.is_file():
        raise ValueError(f"{source} does not name its classes; write their names, one a line, into {file}")
    return [line for line in file.read_text().splitlines() if line.strip()]


def class_names(reader: Any) -> list[str]:
    """Names of a timm reader's classes by number; empty where the reader does not know them."""
    numbers: dict[str, int] = getattr(reader, "class_to_idx", None) or {}
    return [str(name) for name, _ in sorted(numbers.items(), key=lambda entry: entry[1])]
