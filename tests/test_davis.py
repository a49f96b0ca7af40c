"""Sequences in the DAVIS layout: which files belong together, what their pixels mean."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vision_rope.data.davis import BrokenMaskError, find_sequences, palette, read_ids, write_ids


def make_sequence(root: Path, place: str, frames: list[str], masks: list[str], size: tuple[int, int] = (6, 8)) -> None:
    """Grey frames, and masks that hold object 1 in their first row."""
    for kind in ("JPEGImages", "Annotations"):
        (root / kind / place).mkdir(parents=True, exist_ok=True)
    ids = torch.zeros(size, dtype=torch.uint8)
    ids[0] = 1
    for name in frames:
        Image.new("RGB", (8, 6), (90, 90, 90)).save(root / "JPEGImages" / place / name)
    for name in masks:
        write_ids(root / "Annotations" / place / name, ids)


def save(path: Path, values: list[list[int]], mode: str) -> Path:
    Image.fromarray(np.array(values, dtype=np.uint8), mode="L").convert(mode).save(path)
    return path


def test_resolutions_and_the_flat_layout(tmp_path: Path) -> None:
    make_sequence(tmp_path, "480p/dog", ["00000.jpg", "00001.jpg"], ["00000.png"])
    make_sequence(tmp_path, "240p/dog", ["00000.jpg"], ["00000.png"])
    make_sequence(tmp_path, "240p/cat", ["00000.jpg"], ["00000.png"])
    make_sequence(tmp_path, "bird", ["00000.png"], ["00000.png"])
    found = find_sequences(tmp_path)
    assert [sequence.name for sequence in found] == ["bird", "cat", "240p/dog", "480p/dog"]
    dog = found[-1]
    assert len(dog) == 2
    assert dog.read_frame(1).shape == (3, 6, 8)
    assert dog.read_frame(1).dtype == torch.uint8
    assert dog.object_ids == (1,)
    ids = dog.read_ids(0)
    assert ids is not None
    assert ids.sum() == 8
    assert dog.read_ids(1) is None


def test_frames_go_by_number_and_masks_by_name(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in (10, 2, 1, 9)]
    make_sequence(tmp_path, "480p/dog", names, ["9.png", "2.png"])
    (dog,) = find_sequences(tmp_path)
    assert [path.stem for path in dog.frames] == ["1", "2", "9", "10"]
    assert {index: path.stem for index, path in dog.ids.items()} == {1: "2", 2: "9"}
    assert dog.appearances == {1: 1}


def test_objects_appear_when_they_do(tmp_path: Path) -> None:
    make_sequence(tmp_path, "480p/dog", [f"{number}.jpg" for number in range(4)], ["0.png", "1.png"])
    later = torch.zeros(6, 8, dtype=torch.uint8)
    later[0, 0], later[0, 1], later[5, 5] = 7, 1, 255 - 1
    write_ids(tmp_path / "Annotations/480p/dog/3.png", later)
    (dog,) = find_sequences(tmp_path)
    assert dog.appearances == {1: 0, 7: 3, 254: 3}
    assert dog.object_ids == (1, 7, 254)


@pytest.mark.parametrize("split", ["val", "2017/val", "mine.txt"])
def test_splits(tmp_path: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ant", "bee", "cow"):
        make_sequence(tmp_path, f"480p/{name}", ["0.jpg"], ["0.png"])
    (tmp_path / "ImageSets/2017").mkdir(parents=True)
    for path in (tmp_path / "ImageSets/2017/val.txt", tmp_path / "mine.txt"):
        path.write_text("cow\n\nbee \n")
    (tmp_path / "ImageSets/2017/train.txt").write_text("ant\n")
    assert [sequence.name for sequence in find_sequences(tmp_path, split)] == ["bee", "cow"]


def test_splits_that_are_none(tmp_path: Path) -> None:
    make_sequence(tmp_path, "480p/ant", ["0.jpg"], ["0.png"])
    for year, names in (("2016", "ant\n"), ("2017", "antt\n"), ("2018", "\n")):
        (tmp_path / "ImageSets" / year).mkdir(parents=True)
        (tmp_path / "ImageSets" / year / "val.txt").write_text(names)
    with pytest.raises(ValueError, match="2016/val or 2017/val or 2018/val, which differ; name one"):
        find_sequences(tmp_path, "val")
    with pytest.raises(ValueError, match="names 'antt', which is no sequence; did you mean 'ant'"):
        find_sequences(tmp_path, "2017/val")
    with pytest.raises(ValueError, match="names no sequence"):
        find_sequences(tmp_path, "2018/val")
    with pytest.raises(
        ValueError, match=r"'test' is neither a text file nor one in .*, which holds 2016/val, 2017/val"
    ):
        find_sequences(tmp_path, "test")


def test_folders_that_are_no_davis(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not in the DAVIS layout: there is no folder .*JPEGImages"):
        find_sequences(tmp_path)
    (tmp_path / "JPEGImages").mkdir()
    with pytest.raises(ValueError, match=r"there is no folder .*Annotations"):
        find_sequences(tmp_path)
    (tmp_path / "Annotations").mkdir()
    with pytest.raises(ValueError, match="holds no folder with frames"):
        find_sequences(tmp_path)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    make_sequence(tmp_path, "480p/dog", ["0.jpg", "1.jpg"], [])
    with pytest.raises(ValueError, match="sequence dog has no masks"):
        find_sequences(tmp_path)
    make_sequence(tmp_path, "480p/dog", [], ["0.png", "2.png"])
    with pytest.raises(ValueError, match=r"dog holds 2\.png, but .*dog no frame of that name"):
        find_sequences(tmp_path)
    (tmp_path / "Annotations/480p/dog/2.png").unlink()
    make_sequence(tmp_path, "480p/dog", ["0.png"], [])
    with pytest.raises(ValueError, match="two frames called 0"):
        find_sequences(tmp_path)


def test_masks_of_another_size_than_the_frame(tmp_path: Path) -> None:
    make_sequence(tmp_path, "dog", ["0.jpg"], ["0.png"], size=(8, 6))
    (dog,) = find_sequences(tmp_path)
    with pytest.raises(BrokenMaskError, match=r"8x6 pixels \(rows x columns\), but the frame .* has 6x8"):
        dog.read_ids(0)


@pytest.mark.parametrize(
    ("values", "mode", "ids"),
    [
        ([[0, 255], [255, 0]], "L", [[0, 1], [1, 0]]),
        ([[255, 255], [255, 255]], "L", [[1, 1], [1, 1]]),
        ([[0, 0], [0, 0]], "L", [[0, 0], [0, 0]]),
        ([[0, 3], [1, 254]], "L", [[0, 3], [1, 254]]),
        ([[0, 255], [255, 0]], "1", [[0, 1], [1, 0]]),
        ([[0, 255], [255, 0]], "RGB", [[0, 1], [1, 0]]),
        ([[0, 2], [1, 0]], "RGBA", [[0, 2], [1, 0]]),
        ([[0, 2], [1, 0]], "LA", [[0, 2], [1, 0]]),
    ],
)
def test_what_grey_values_mean(tmp_path: Path, values: list[list[int]], mode: str, ids: list[list[int]]) -> None:
    assert read_ids(save(tmp_path / "x.png", values, mode)).tolist() == ids


def test_indices_of_a_palette_are_ids_and_void_is_background(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 5, 255], [1, 254, 2]], dtype=np.uint8), mode="P")
    image.putpalette([0] * 768)
    image.save(tmp_path / "x.png")
    assert read_ids(tmp_path / "x.png").tolist() == [[0, 5, 0], [1, 254, 2]]


def test_files_without_ids(tmp_path: Path) -> None:
    with pytest.raises(BrokenMaskError, match="smoothed edges or a lossy format"):
        read_ids(save(tmp_path / "x.png", [[0, 255], [17, 0]], "L"))
    Image.new("RGB", (2, 2), (128, 0, 0)).save(tmp_path / "x.png")
    with pytest.raises(BrokenMaskError, match="colours without a palette"):
        read_ids(tmp_path / "x.png")
    Image.fromarray(np.full((2, 2), 300, dtype=np.uint16)).save(tmp_path / "x.png")
    with pytest.raises(BrokenMaskError, match="8-bit palette PNG"):
        read_ids(tmp_path / "x.png")
    for content in (b"", b"not a picture"):
        (tmp_path / "x.png").write_bytes(content)
        with pytest.raises(BrokenMaskError, match=r"x\.png: no object ids can be read"):
            read_ids(tmp_path / "x.png")
    with pytest.raises(FileNotFoundError):
        read_ids(tmp_path / "none.png")


def test_ids_are_written_as_they_are_read(tmp_path: Path) -> None:
    ids = torch.arange(255).view(15, 17)
    write_ids(tmp_path / "x.png", ids)
    assert torch.equal(read_ids(tmp_path / "x.png"), ids.to(torch.uint8))
    for wrong in (ids.float(), ids + 1, -ids, ids[None], ids[:0]):
        with pytest.raises(ValueError, match=r"integers \(height, width\) from 0 to 254"):
            write_ids(tmp_path / "x.png", wrong)


def test_the_palette_is_that_of_davis(shared_data: Path, tmp_path: Path) -> None:
    assert palette()[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert len(palette().unique(dim=0)) == 256
    name = "Annotations/240p/dogs-jump/00000.png"
    with tarfile.open(shared_data / "davis_masked_small.tar") as archive:
        archive.extract(name, tmp_path, filter="data")
    with Image.open(tmp_path / name) as image:
        assert image.getpalette() == palette().flatten().tolist()


def test_real_sequences(shared_data: Path, tmp_path: Path) -> None:
    with tarfile.open(shared_data / "davis_masked_small.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    found = {sequence.name: sequence for sequence in find_sequences(tmp_path)}
    counts = {"blackswan": 50, "bmx-trees": 80, "car-shadow": 40, "dog": 60, "dogs-jump": 66}
    assert {name: len(sequence) for name, sequence in found.items()} == counts
    assert all(list(sequence.ids) == list(range(len(sequence))) for sequence in found.values())
    assert found["dogs-jump"].object_ids == (1, 2, 3)
    ids = found["dog"].read_ids(0)
    assert ids is not None
    assert ids.unique().tolist() == [0, 1]
    assert ids.shape == found["dog"].read_frame(0).shape[1:] == (480, 854)
