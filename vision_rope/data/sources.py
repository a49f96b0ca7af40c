"""Labelled images: files, what torchvision and timm open, and streams."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from vision_rope.data.decode import BrokenImageError, convert_pil, decode_image


class ImageSource(ABC, Dataset[tuple[Tensor, int]]):
    """Labelled images with random access; item i is (uint8 (3, height, width) in RGB, class).

    Attributes:
        name: what the data set was opened as.
        classes: names of the classes, in the order of their numbers.
        labels: class of every image; none where that is unknown before decoding.
        licence: licence of the images where it is known.
    """

    name: str
    classes: list[str]
    labels: list[int] | None
    licence: str | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """File of an image, or a name for it such as hfds/NAME[5] where there is no file."""


class FileSource(ImageSource):
    """Images that are a file each."""

    def __init__(
        self,
        name: str,
        classes: Sequence[str],
        paths: Sequence[str],
        labels: Sequence[int],
        licence: str | None = None,
    ) -> None:
        self.name = name
        self.classes = list(classes)
        self.labels: list[int] = list(labels)
        self.licence = licence
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decode_image(self.paths[index]), self.labels[index]

    def path(self, index: int) -> str:
        return self.paths[index]


class EvenPart(ImageSource):
    """So many images of a data set, evenly spread over its order, and with it over classes that follow each other."""

    def __init__(self, whole: ImageSource, count: int) -> None:
        self.name = whole.name
        self.classes = whole.classes
        self.licence = whole.licence
        self._whole = whole
        self._places = spread_evenly(count, len(whole))
        self.labels = None if whole.labels is None else [whole.labels[place] for place in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._whole[self._places[index]]

    def path(self, index: int) -> str:
        return self._whole.path(self._places[index])


def spread_evenly(count: int, total: int) -> list[int]:
    """So many of the places 0 to total - 1, evenly spread."""
    return [place * total // count for place in range(count)]


class PillowSource(ImageSource):
    """A data set of torchvision's whose items are Pillow images."""

    def __init__(self, name: str, dataset: Any, classes: Sequence[str], labels: Sequence[int] | None) -> None:
        self.name = name
        self.classes = list(classes)
        self.labels = None if labels is None else list(labels)
        self.licence = None
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = self._dataset[index]
            return convert_pil(image), int(label)
        except (OSError, SyntaxError, ValueError) as error:
            raise BrokenImageError(self.path(index), str(error)) from error

    def path(self, index: int) -> str:
        return f"{self.name}[{index}]"


class Reader(Protocol):
    """The part of timm's readers that is used here: encoded images, not decoded ones."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[io.IOBase, int]: ...


class ReaderSource(ImageSource):
    """Images from one of timm's readers; timm's own data set would put a neighbour in the place of a broken image."""

    def __init__(self, name: str, reader: Reader, classes: Sequence[str]) -> None:
        self.name = name
        self.classes = list(classes)
        self.licence = None
        self._reader = reader

    @cached_property
    def labels(self) -> list[int] | None:  # type: ignore[override]
        """Class of every image, read when first asked for: a large table takes its time."""
        return [int(label) for label in self._reader.iter_targets()] if hasattr(self._reader, "iter_targets") else None

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self._reader[index]
        with file:
            return decode_image(file.read(), name=self.path(index)), int(label)

    def path(self, index: int) -> str:
        return f"{self.name}[{index}]"


class IterableSource(IterableDataset[tuple[Tensor, int]]):
    """Labelled images that come in a stream: no random access, no index; timm's reader shares them out.

    Attributes:
        name, classes, labels, licence: as in ImageSource; there are no labels beforehand.
    """

    def __init__(self, name: str, stream: Any, classes: Sequence[str]) -> None:
        self.name = name
        self.classes = list(classes)
        self.labels: list[int] | None = None
        self.licence: str | None = None
        self._stream = stream

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for position, (image, label) in enumerate(self._stream):
            if isinstance(image, Image.Image):
                yield convert_pil(image), int(label)
            else:
                yield decode_image(bytes(image), name=f"{self.name}[{position} of this worker]"), int(label)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which the order of training follows from."""
        self._stream.set_epoch(epoch)

    def set_num_workers(self, num_workers: int) -> None:
        """Say before the first iteration how many workers will read."""
        self._stream.set_loader_cfg(num_workers=num_workers)

    def read_everything(self) -> None:
        """Let this process read all images, not its rank's part: timm's parts repeat some images and miss others."""
        self._stream.reader.dist_rank = 0
        self._stream.reader.dist_num_replicas = 1
