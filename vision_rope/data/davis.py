"""Video sequences in the DAVIS layout: a folder of frames, and masks whose pixels are object ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision_rope.data.decode import BrokenFileError, decode_image
from vision_rope.data.folders import IMAGE_EXTENSIONS
from vision_rope.data.video_sources import natural_key
from vision_rope.suggestion import did_you_mean

# The id that marks pixels nobody judges; the DAVIS 2017 toolkit counts them as background, and so does `read_ids`.
VOID = 255


class BrokenMaskError(BrokenFileError):
    """A file of object ids that cannot be read as such; `path` and `reason` say which and why."""

    complaint = "no object ids can be read from it"


@dataclass(frozen=True)
class VideoSequence:
    """The frames of a video and the object ids of some or all of them.

    Attributes:
        name: of the folder, with its resolution in front where two resolutions hold a sequence of that name.
        frames: files in their order.
        ids: by the place of a frame, the file of its object ids.
    """

    name: str
    frames: tuple[Path, ...]
    ids: dict[int, Path]

    def __len__(self) -> int:
        return len(self.frames)

    def read_frame(self, index: int) -> Tensor:
        """Decode a frame.

        Shapes:
            uint8 (3, height, width)

        Raises:
            BrokenImageError: where it cannot be decoded.
        """
        return decode_image(self.frames[index])

    def read_ids(self, index: int) -> Tensor | None:
        """Read the object ids of a frame, None where there are none.

        Shapes:
            uint8 (height, width)

        Raises:
            BrokenMaskError: where they cannot be read, or have another size than the frame.
        """
        path = self.ids.get(index)
        if path is None:
            return None
        ids = read_ids(path)
        size = _frame_size(self.frames[index])
        if tuple(ids.shape) != size:
            raise BrokenMaskError(
                str(path),
                f"it has {ids.shape[0]}x{ids.shape[1]} pixels (rows x columns), but the frame {self.frames[index]} "
                f"has {size[0]}x{size[1]}; resize one of them",
            )
        return ids

    @cached_property
    def appearances(self) -> dict[int, int]:
        """The frame in which each object is first seen, by its id, rising; this reads all masks once."""
        found: dict[int, int] = {}
        for index in sorted(self.ids):
            for object_id in read_ids(self.ids[index]).unique().tolist():
                if object_id:
                    found.setdefault(object_id, index)
        return dict(sorted(found.items()))

    @property
    def object_ids(self) -> tuple[int, ...]:
        """The ids of all objects, rising; this reads all masks once."""
        return tuple(self.appearances)


def find_sequences(root: str | Path, split: str | None = None) -> list[VideoSequence]:
    """Find the sequences of a folder in the DAVIS layout, by name.

    The layout is JPEGImages/RESOLUTION/SEQUENCE/FRAME.jpg beside Annotations/RESOLUTION/SEQUENCE/FRAME.png, of all
    resolutions there are, or the same without folders of resolutions. Frames are in the order of the numbers in their
    names. Masks may be there for some frames only, as in DAVIS test-dev.

    Args:
        root: the folder that holds JPEGImages and Annotations.
        split: a text file with the name of a sequence a line: its path, or its name in ImageSets ("val", "2017/val");
            all sequences where it is None.

    Raises:
        ValueError: where the layout is another one, a sequence has no mask, a mask no frame, or a name of the split no
            sequence.
    """
    root = Path(root).expanduser()
    images, annotations = root / "JPEGImages", root / "Annotations"
    for folder in (images, annotations):
        if not folder.is_dir():
            raise ValueError(
                f"{root} is not in the DAVIS layout: there is no folder {folder}; expected "
                "JPEGImages/RESOLUTION/SEQUENCE/*.jpg and Annotations/RESOLUTION/SEQUENCE/*.png"
            )
    places = _list_places(images)
    if split is not None:
        places = _select(places, _read_split(root, split), split)
    if not places:
        raise ValueError(
            f"{images} holds no folder with frames; expected files that end in {' '.join(IMAGE_EXTENSIONS)}"
        )
    names = [place.name for place in places]
    return [
        _open_sequence(
            place.name if names.count(place.name) == 1 else place.as_posix(), images / place, annotations / place
        )
        for place in places
    ]


def read_ids(path: str | Path) -> Tensor:
    """Read object ids from an image file: 0 is the background, n is object n.

    A palette's indices are the ids. Grey pictures of 0 and 255 alone are the mask of object 1, other grey values are
    ids. An index of 255 beside other ids is DAVIS's void, which counts as background.

    Shapes:
        uint8 (height, width)

    Raises:
        BrokenMaskError: where the file cannot be decoded, or holds colours or grey values that are no ids.
        FileNotFoundError: where there is no such file.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, values = image.mode, np.array(image)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file may end in nearly any exception of a decoder
        raise BrokenMaskError(str(path), str(error).split("\n")[0] or type(error).__name__) from error
    if mode == "1":
        return torch.from_numpy(values.astype(np.uint8))
    if mode in ("LA", "RGB", "RGBA"):
        colours = values[..., : 1 if mode == "LA" else 3]
        if (colours != colours[..., :1]).any():
            raise BrokenMaskError(
                str(path), "it has colours without a palette; save it as a palette PNG whose indices are the object ids"
            )
        mode, values = "L", colours[..., 0]
    if mode not in ("L", "P"):
        raise BrokenMaskError(str(path), f"its pixels are of Pillow's mode {mode}; save it as an 8-bit palette PNG")
    ids = torch.from_numpy(np.array(values, dtype=np.uint8))
    if mode == "P":
        return ids.masked_fill_(ids == VOID, 0)
    present = ids.unique().tolist()
    if present[-1] < VOID:
        return ids
    if any(0 < value < VOID for value in present):
        raise BrokenMaskError(
            str(path),
            f"grey values must be 0 and 255 alone (one object), or ids below 255, but there are {present[:6]} and 255; "
            "smoothed edges or a lossy format do that: threshold it, or save it as a palette PNG",
        )
    return ids.clamp_(max=1)


def write_ids(path: str | Path, ids: Tensor) -> None:
    """Write object ids as a palette PNG with the colours of DAVIS.

    Args:
        path: of the file; folders above it must exist.
        ids: integers of 0 to 254.

    Shapes:
        ids: (height, width)
    """
    from PIL import Image

    if ids.ndim != 2 or ids.is_floating_point() or ids.numel() == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < VOID:
        raise ValueError(
            f"ids must be integers (height, width) from 0 to {VOID - 1}, got {ids.dtype} of shape {tuple(ids.shape)}"
            + (f" from {ids.min()} to {ids.max()}" if ids.numel() else "")
        )
    image = Image.fromarray(ids.to("cpu", torch.uint8).contiguous().numpy(), mode="P")
    image.putpalette(palette().flatten().tolist())
    image.save(path, format="PNG")


def palette() -> Tensor:
    """Colours of object ids, as in the files of DAVIS and PASCAL VOC: the bits of an id, dealt to red, green and blue.

    Shapes:
        uint8 (256, 3)
    """
    ids = torch.arange(256)
    colours = torch.zeros(256, 3, dtype=torch.int64)
    for channel in range(3):
        for place, bit in enumerate(range(channel, 8, 3)):
            colours[:, channel] |= (ids >> bit & 1) << (7 - place)
    return colours.to(torch.uint8)


def _list_places(images: Path) -> list[Path]:
    """Folders with frames, one or two below, relative to `images`."""
    children = sorted(entry for entry in images.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = []
    for child in children:
        inner = [
            child,
            *sorted(entry for entry in child.iterdir() if entry.is_dir() and not entry.name.startswith(".")),
        ]
        found += [folder.relative_to(images) for folder in inner if _list_files(folder, IMAGE_EXTENSIONS)]
    return sorted(found, key=lambda place: (place.name, place.as_posix()))


def _list_files(folder: Path, extensions: Sequence[str]) -> list[Path]:
    """Files by the numbers in their names: 2 comes before 10."""

    entries = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    chosen = (entry for entry in entries if entry.suffix.lower() in extensions)
    return sorted(chosen, key=lambda entry: natural_key(entry.name))


def _open_sequence(name: str, images: Path, annotations: Path) -> VideoSequence:
    frames = _list_files(images, IMAGE_EXTENSIONS)
    places = {frame.stem: index for index, frame in enumerate(frames)}
    if len(places) < len(frames):
        twice = next(frame for index, frame in enumerate(frames) if places[frame.stem] != index)
        raise ValueError(f"{images} holds two frames called {twice.stem}; keep one of them")
    masks = _list_files(annotations, (".png",)) if annotations.is_dir() else []
    if not masks:
        raise ValueError(
            f"sequence {name} has no masks: there is no PNG in {annotations}; at least its first frame needs one, "
            "or leave the sequence out with a split"
        )
    strange = [mask.name for mask in masks if mask.stem not in places]
    if strange:
        raise ValueError(
            f"{annotations} holds {strange[0]}, but {images} no frame of that name; masks are called as their frames"
        )
    return VideoSequence(name, tuple(frames), {places[mask.stem]: mask for mask in masks})


def _read_split(root: Path, split: str) -> list[str]:
    folder = root / "ImageSets"
    known = sorted(folder.rglob("*.txt")) if folder.is_dir() else []
    matches = [path for path in known if split in (path.stem, path.relative_to(folder).with_suffix("").as_posix())]
    if not matches and Path(split).expanduser().is_file():
        matches = [Path(split).expanduser()]
    lists = [[line.strip() for line in path.read_text().splitlines() if line.strip()] for path in matches]
    if not lists:
        names = ", ".join(path.relative_to(folder).with_suffix("").as_posix() for path in known) or "no text files"
        raise ValueError(f"split {split!r} is neither a text file nor one in {folder}, which holds {names}")
    if any(names != lists[0] for names in lists):
        options = " or ".join(path.relative_to(folder).with_suffix("").as_posix() for path in matches)
        raise ValueError(f"split {split!r} may be {options}, which differ; name one of them")
    if not lists[0]:
        raise ValueError(f"split {split!r}, {matches[0]}, names no sequence; write the name of one a line")
    return lists[0]


def _select(places: list[Path], names: list[str], split: str) -> list[Path]:
    known = {name for place in places for name in (place.name, place.as_posix())}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"split {split!r} names {missing[0]!r}, which is no sequence{did_you_mean(missing[0], known)}")
    return [place for place in places if place.name in names or place.as_posix() in names]


def _frame_size(path: Path) -> tuple[int, int]:
    """Rows and columns as `decode_image` gives them, from the header alone."""
    from PIL import Image

    with Image.open(path) as image:
        width, height = image.size
        sideways = image.getexif().get(0x0112, 1) >= 5
    return (width, height) if sideways else (height, width)
