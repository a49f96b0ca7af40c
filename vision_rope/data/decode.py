"""Files to upright 8-bit RGB pictures; whatever cannot be decoded rightly is an error with its path."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

# Twice Pillow's threshold for its warning, which is where Pillow itself refuses: about 512 MiB as RGB.
MAX_PIXELS = 178_956_970


class BrokenFileError(OSError):
    """A file that no sample can be made of.

    Attributes:
        path: the file, or the name of the sample where there is no file.
        reason: why it cannot be used.
    """

    complaint = "cannot be read"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {self.complaint}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[BrokenFileError], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class BrokenImageError(BrokenFileError):
    """An image file that cannot be decoded; `path` and `reason` say which and why."""

    complaint = "cannot be decoded"


def decode_image(source: str | Path | bytes, *, name: str | None = None) -> Tensor:
    """Decode an image file, or its bytes, to upright RGB: the first frame where there are several, without alpha.

    Args:
        source: a path or the content of a file.
        name: what errors call the image; a path is its own name.

    Shapes:
        uint8 (3, height, width)

    Raises:
        BrokenImageError: for empty, truncated and damaged files, for other types than images, for pixels without a
            known range (floating point, 32-bit integers) and for more than MAX_PIXELS pixels.
        FileNotFoundError: where there is no such file.
    """
    if isinstance(source, bytes):
        data, name = source, name or "image"
    else:
        data, name = Path(source).read_bytes(), name or str(source)
    if not data:
        raise BrokenImageError(name, "the file is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            # Damaged metadata beside good pixels, and the notice that torchvision.io moves to torchcodec.
            warnings.simplefilter("ignore")
            return _decode(data)
    except Exception as error:  # a damaged file may end in nearly any exception of a decoder
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise BrokenImageError(name, reason) from error


def convert_pil(image: Image.Image) -> Tensor:
    """Convert a Pillow image to upright RGB.

    Shapes:
        uint8 (3, height, width)

    Raises:
        ValueError: where the range of the pixels is unknown.
        OSError: where the file behind a lazily opened image is damaged.
    """
    with _refusing_truncation():
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format in ("PNG", "PPM")):
            # Pillow's own conversion cuts 16-bit values off at 255, which makes nearly every such picture white.
            grey = (np.asarray(upright).astype(np.int64) >> 8).astype(np.uint8)
            array = np.repeat(grey[:, :, None], 3, axis=2)
        elif upright.mode in ("I", "F"):
            kind = "32-bit integers" if upright.mode == "I" else "floating-point numbers"
            raise ValueError(f"pixels are {kind}, whose range is unknown; convert the file to 8 or 16 bits a channel")
        elif upright.mode == "P":
            # By way of RGBA, since Pillow warns of transparency that a direct conversion drops.
            array = np.array(upright.convert("RGBA").convert("RGB"))
        else:
            array = np.array(upright.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1)


def _decode(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width}x{height} pixels are more than {MAX_PIXELS}: refused as a decompression bomb")
        # Only JPEG goes to torchvision: its PNG decoder ends the process on some damaged files, returns 16 bits as they
        # are and skips XMP orientations; its GIF decoder returns all frames; WebP is not turned upright.
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            try:
                return decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
            except RuntimeError:
                # Pillow knows a few kinds more, and says better what is wrong with the others.
                return convert_pil(image)
        return convert_pil(image)


@contextmanager
def _refusing_truncation() -> Iterator[None]:
    """Make Pillow raise on truncated files even where another library has told it to fill them with grey."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
