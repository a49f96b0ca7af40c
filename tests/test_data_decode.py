"""Decoding against Pillow, with real and damaged files."""

from __future__ import annotations

import io
import pickle
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from vision_rope.data.decode import BrokenImageError, decode_image

BROKEN = {
    "bmp__b__reallybig.bmp",
    "broken_data_stream.png",
    "decompression_bomb.gif",
    "heic__samplefilehub.heif",
    "truncated_image.png",
    "truncated_jpeg.jpg",
    "zero_byte.jpg",
    "zero_width.gif",
}


@pytest.fixture(scope="module")
def odd_images(shared_data: Path) -> list[Path]:
    return sorted(path for path in (shared_data / "odd_images").iterdir() if path.name != "SHA256SUMS")


@pytest.fixture(scope="module")
def photo(shared_data: Path) -> Image.Image:
    with Image.open(shared_data / "odd_images" / "app13-multiple.jpg") as image:
        return image.convert("RGB").copy()


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pillow_rgb(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "I;16":
            # Pillow would cut off at 255: this file's values are 291 to 694, so that all of it would be white.
            return np.stack([np.asarray(upright) // 256] * 3, axis=-1).astype(np.uint8)
        if upright.mode == "P":
            upright = upright.convert("RGBA")
        return np.asarray(upright.convert("RGB"))


def test_odd_images_decode_as_pillow_or_say_why_not(odd_images: list[Path]) -> None:
    """Failure class 29."""
    assert len(odd_images) == 45
    for path in odd_images:
        if path.name in BROKEN:
            with pytest.raises(BrokenImageError, match=path.name) as caught:
                decode_image(path)
            assert caught.value.path == str(path)
            assert caught.value.reason
            continue
        image = decode_image(path)
        expected = pillow_rgb(path)
        assert image.dtype == torch.uint8
        assert image.shape == (3, *expected.shape[:2]), path.name
        difference = (image.permute(1, 2, 0).int() - torch.from_numpy(expected.astype(np.int32))).abs().max()
        assert difference <= 2, f"{path.name}: {difference}"  # JPEG decoders may round differently


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("GIF", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("BMP", {}),
        ("PPM", {}),
    ],
)
def test_a_file_cut_anywhere_is_refused(photo: Image.Image, format: str, options: dict[str, object]) -> None:
    """Failure class 29: never half a picture."""
    whole = encode(photo, format, **options)
    decode_image(whole)
    for share in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        with pytest.raises(BrokenImageError, match=r"cut\.jpg"):
            decode_image(whole[: int(len(whole) * share)], name="cut.jpg")


def test_truncation_is_refused_where_another_library_allowed_it(
    photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for format in ("JPEG", "PNG"):
        data = encode(photo, format)
        with pytest.raises(BrokenImageError):
            decode_image(data[: len(data) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None])
def test_a_bomb_is_refused_from_its_header(
    photo: Image.Image, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure class 29: 4 billion pixels announced in a small file, also where Pillow's own limit was taken away."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    jpeg = bytearray(encode(photo, "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    png = bytearray(encode(photo, "PNG"))
    png[16:24] = struct.pack(">II", 65500, 65500)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    for data in (jpeg, png):
        start = time.perf_counter()
        with pytest.raises(BrokenImageError, match=r"decompression bomb"):
            decode_image(bytes(data))
        assert time.perf_counter() - start < 1


def test_a_large_picture_below_the_limit_decodes_without_a_warning(
    photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow warns of pictures between one and two times its limit."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", photo.width * photo.height * 2 // 3)
    for format in ("JPEG", "PNG"):
        assert decode_image(encode(photo, format)).shape == (3, photo.height, photo.width)


def test_16_bits_keep_their_high_byte(photo: Image.Image) -> None:
    grey = np.asarray(photo.convert("L"))
    for format in ("PNG", "TIFF"):
        data = encode(Image.fromarray(grey.astype(np.uint16) * 257), format)
        image = decode_image(data)
        assert torch.equal(image, torch.from_numpy(grey.copy()).expand(3, -1, -1))


def test_pixels_without_a_known_range_are_refused(photo: Image.Image) -> None:
    data = encode(photo.convert("F"), "TIFF")
    with pytest.raises(BrokenImageError, match="floating-point"):
        decode_image(data)
    with pytest.raises(BrokenImageError, match="32-bit"):
        decode_image(encode(photo.convert("I"), "TIFF"))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_in_every_format(photo: Image.Image, format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    options = {} if format in ("PNG", "TIFF") else {"quality": 95}
    with Image.open(io.BytesIO(encode(photo, format, **options))) as image:
        stored = np.asarray(image.convert("RGB"))
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: np.rot90(stored, 2).transpose(1, 0, 2),
        8: np.rot90(stored, 1),
    }[orientation]
    decoded = decode_image(encode(photo, format, exif=exif, **options)).permute(1, 2, 0)
    torch.testing.assert_close(decoded.int(), torch.from_numpy(turned.astype(np.int32)), atol=2, rtol=0)


def test_text_and_missing_files(tmp_path: Path) -> None:
    text = tmp_path / "notes.jpg"
    text.write_text("no picture")
    with pytest.raises(BrokenImageError, match=r"notes\.jpg"):
        decode_image(text)
    with pytest.raises(FileNotFoundError, match=r"absent\.jpg"):
        decode_image(tmp_path / "absent.jpg")


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(BrokenImageError("a/b.jpg", "truncated")))
    assert (type(error), error.path, error.reason) == (BrokenImageError, "a/b.jpg", "truncated")
    assert "a/b.jpg" in str(error)
    assert isinstance(error, OSError)


def test_result_may_be_written_to(odd_images: list[Path]) -> None:
    for path in odd_images:
        if path.name in ("hopper_gray.jpg", "tiny.png"):
            decode_image(path).fill_(0)
