"""Data sets by name: splits, labels, paths and errors."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import shutil
import struct
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vision_rope.data.datasets import hold_out, open_dataset, take_evenly
from vision_rope.data.decode import BrokenImageError
from vision_rope.data.sources import EvenPart, FileSource, IterableSource, ReaderSource


@pytest.fixture(scope="module")
def cifar(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train/ and val/: up to 8 real images of each of three classes."""
    folder = tmp_path_factory.mktemp("cifar")
    counts: Counter[Path] = Counter()
    with tarfile.open(shared_data / "cifar10_small.tar") as tar:
        for member in tar:
            parent = Path(member.name).parent
            if member.isfile() and parent.name in ("airplane", "cat", "truck") and counts[parent] < 8:
                counts[parent] += 1
                tar.extract(member, folder, filter="data")
    return folder


def pillow(path: str | Path) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[float, str]]:
    spec = importlib.util.find_spec("elpv_dataset")
    if spec is None or spec.origin is None:
        pytest.skip("elpv-dataset is not installed: pip install vision-rope[elpv]")
    file = Path(spec.origin).parent / "data" / "labels.csv"
    data = np.genfromtxt(file, dtype=["|S19", "<f8", "|S4"], names=["path", "probability", "type"])
    return {Path(row[0].decode()).name: (float(row[1]), row[2].decode()) for row in data}


class TestElpv:
    def test_split_labels_and_licence(self, table: dict[str, tuple[float, str]]) -> None:
        train, validation = open_dataset("elpv", "train"), open_dataset("elpv", "validation")
        assert train.classes == ["functional", "defective"]
        assert train.licence == "CC BY-NC-SA 4.0"
        names = [[Path(part.path(i)).name for i in range(len(part))] for part in (train, validation)]
        assert not set(names[0]) & set(names[1])
        assert set(names[0]) | set(names[1]) == set(table)
        assert len(table) == 2624
        for part, part_names in zip((train, validation), names, strict=True):
            assert part.labels == [int(table[name][0] > 0.49) for name in part_names]
        strata, held = Counter(table.values()), Counter(table[name] for name in names[1])
        assert len(strata) == 8
        for stratum, count in strata.items():
            assert abs(held[stratum] - 0.25 * count) <= 0.5, stratum

    def test_pictures(self, table: dict[str, tuple[float, str]]) -> None:
        train = open_dataset("elpv", "train")
        for index in (0, 1000, len(train) - 1):
            image, label = train[index]
            assert image.shape == (3, 300, 300)
            assert torch.equal(image, pillow(train.path(index)))
            assert label == train.labels[index]

    def test_seed_and_fraction(self, table: dict[str, tuple[float, str]]) -> None:
        first, again = (open_dataset("elpv", "validation", split_seed=3) for _ in range(2))
        other = open_dataset("elpv", "validation", split_seed=4)
        assert first.paths == again.paths
        assert first.paths != other.paths
        assert abs(len(open_dataset("elpv", "validation", val_fraction=0.1)) - 262) <= 4

    def test_missing_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install vision-rope\[elpv\]"):
            open_dataset("elpv", "train")

    @pytest.mark.parametrize(
        ("options", "name"),
        [({"root": "x"}, "root"), ({"download": True}, "download"), ({"val_split": "test"}, "val_split")],
    )
    def test_options_without_effect_are_errors(self, options: dict[str, object], name: str) -> None:
        """Failure class 16."""
        with pytest.raises(ValueError, match=name):
            open_dataset("elpv", "train", **options)


class TestFolder:
    def test_links_do_not_multiply_pictures(self, cifar: Path, tmp_path: Path) -> None:
        """A link to a folder above would show each picture again, in training and in validation."""
        for name in ("cat", "truck"):
            shutil.copytree(cifar / "train" / name, tmp_path / name)
        (tmp_path / "cat" / "again").symlink_to(tmp_path / "cat")
        elsewhere = tmp_path.parent / f"{tmp_path.name} elsewhere"
        shutil.copytree(cifar / "val" / "cat", elsewhere)
        (tmp_path / "cat" / "more").symlink_to(elsewhere)
        parts = [open_dataset(f"folder:{tmp_path}", split) for split in ("train", "validation")]
        files = [Path(part.path(index)).resolve() for part in parts for index in range(len(part))]
        assert len(files) == len(set(files)) == 8 + 8 + 8

    def test_own_splits(self, cifar: Path) -> None:
        train, validation = (open_dataset(f"folder:{cifar}", split) for split in ("train", "validation"))
        assert train.classes == validation.classes == ["airplane", "cat", "truck"]
        assert len(train) == len(validation) == 24
        for part, folder in ((train, "train"), (validation, "val")):
            for index in range(0, 24, 5):
                path = Path(part.path(index))
                image, label = part[index]
                assert path.parent.parent == cifar / folder
                assert part.classes[label] == path.parent.name
                torch.testing.assert_close(image.int(), pillow(path).int(), atol=2, rtol=0)

    def test_hold_out(self, cifar: Path) -> None:
        source = f"folder:{cifar / 'train'}"
        parts = [open_dataset(source, split) for split in ("train", "validation")]
        assert [Counter(part.labels) for part in parts] == [{0: 6, 1: 6, 2: 6}, {0: 2, 1: 2, 2: 2}]
        assert not set(parts[0].paths) & set(parts[1].paths)

    def test_hold_out_does_not_hang_on_order_or_other_classes(self) -> None:
        keys, strata = [f"{k}.png" for k in range(40)], ["a"] * 20 + ["b"] * 20
        chosen = {keys[place] for place in hold_out(keys, strata, "validation", 0.25, 0)}
        places = list(reversed(range(40)))
        reversed_keys, reversed_strata = [keys[k] for k in places], [strata[k] for k in places]
        assert {reversed_keys[k] for k in hold_out(reversed_keys, reversed_strata, "validation", 0.25, 0)} == chosen
        assert {keys[place] for place in hold_out(keys[:20], strata[:20], "validation", 0.25, 0)} < chosen

    def test_home_folder_and_other_names(self, cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        shutil.copytree(cifar / "train", tmp_path / "x" / "training")
        shutil.copytree(cifar / "val", tmp_path / "x" / "held")
        train = open_dataset("folder:~/x", "train", train_split="training", val_split="held")
        assert Path(train.path(0)).is_relative_to(tmp_path / "x" / "training")

    def test_errors(self, cifar: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no folder"):
            open_dataset(f"folder:{tmp_path / 'absent'}", "train")
        with pytest.raises(ValueError, match="needs a path"):
            open_dataset("folder:", "train")
        with pytest.raises(ValueError, match="holds no folders"):
            open_dataset(f"folder:{tmp_path}", "train")
        (tmp_path / "one" / "empty").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"empty holds no images; expected files that end in \.jpg"):
            open_dataset(f"folder:{tmp_path / 'one'}", "train")
        shutil.copytree(cifar / "train", tmp_path / "two" / "train")
        with pytest.raises(ValueError, match="both splits"):
            open_dataset(f"folder:{tmp_path / 'two'}", "train")
        shutil.copytree(cifar / "val", tmp_path / "two" / "test")
        assert len(open_dataset(f"folder:{tmp_path / 'two'}", "validation")) == 24
        shutil.rmtree(tmp_path / "two" / "test" / "cat")
        with pytest.raises(ValueError, match="only one of them has cat"):
            open_dataset(f"folder:{tmp_path / 'two'}", "validation")
        with pytest.raises(ValueError, match="val_fraction"):
            open_dataset(f"folder:{cifar / 'train'}", "validation", val_fraction=0.01)

    def test_a_broken_file_is_named(self, cifar: Path, tmp_path: Path) -> None:
        shutil.copytree(cifar / "train", tmp_path / "x")
        victim = sorted((tmp_path / "x" / "cat").iterdir())[0]
        victim.write_bytes(victim.read_bytes()[:300])
        part = next(
            part
            for part in (open_dataset(f"folder:{tmp_path / 'x'}", s) for s in ("train", "validation"))
            if str(victim) in part.paths
        )
        with pytest.raises(BrokenImageError) as caught:
            part[part.paths.index(str(victim))]
        assert caught.value.path == str(victim)


class TestImages:
    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        """12 one-coloured pictures at three depths, and what is none."""
        for index in range(12):
            path = tmp_path / "album" / ("", "a", "b/c")[index % 3] / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 6), (index, 2 * index, 3 * index)).save(path)
        (tmp_path / "album" / "notes.txt").write_text("no picture")
        (tmp_path / "album" / ".hidden.png").write_text("no picture")
        return tmp_path / "album"

    def test_all_depths_without_labels_and_each_in_one_split(self, files: Path) -> None:
        train, validation = (open_dataset(f"images:{files}", split) for split in ("train", "validation"))
        assert (len(train), len(validation)) == (9, 3)
        assert train.classes == validation.classes == ["image"]
        assert train.labels == [0] * 9
        assert sorted(train.paths + validation.paths) == sorted(map(str, files.rglob("[0-9]*.png")))
        for part in (train, validation):
            image, label = part[1]
            index = int(Path(part.path(1)).stem)
            assert label == 0
            assert image.shape == (3, 6, 4)
            assert image[:, 0, 0].tolist() == [index, 2 * index, 3 * index]

    def test_the_choice_hangs_on_names_below_the_folder_alone(self, files: Path, tmp_path: Path, monkeypatch) -> None:
        def chosen(source: str, **options: object) -> set[str]:
            part = open_dataset(source, "validation", val_fraction=0.5, **options)
            return {Path(path).name for path in part.paths}

        first = chosen(f"images:{files}")
        shutil.copytree(files, tmp_path / "elsewhere" / "copy")
        assert chosen(f"images:{tmp_path / 'elsewhere' / 'copy'}/") == first
        monkeypatch.chdir(files)
        assert chosen("images:.") == first
        assert chosen(f"images:{files}", split_seed=1) != first
        assert len(first) == 6

    def test_errors(self, files: Path, tmp_path: Path) -> None:
        """Failure class 16 too: options that would have no effect."""
        for source, options, message in (
            ("images:", {}, "images needs a path: images:PATH"),
            (f"images:{tmp_path / 'absent'}", {}, "there is no folder"),
            (f"images:{files / '00.png'}", {}, "there is no folder"),
            (f"images:{files}", {"val_split": "test"}, "val_split 'test', but images:PATH has no splits of its own"),
            (f"images:{files}", {"train_split": "b"}, "train_split is 'b'"),
            (f"images:{files}", {"root": "x"}, "root is 'x'"),
            (f"images:{files}", {"download": True}, "download is on"),
            (f"images:{files}", {"val_fraction": 0.01}, "leaves none of 12 images for the validation split"),
        ):
            with pytest.raises(ValueError, match=message):
                open_dataset(source, "validation", **options)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="empty holds no images"):
            open_dataset(f"images:{tmp_path / 'empty'}", "train")


class TestEvenPart:
    @staticmethod
    def source(count: int, labels: bool = True) -> FileSource:
        source = FileSource(
            "x", ["a", "b"], [f"{k}.png" for k in range(count)], [k // (count // 2) for k in range(count)]
        )
        source.licence = "CC0"
        if not labels:
            source.labels = None  # type: ignore[assignment]
        return source

    @pytest.mark.parametrize(("count", "places"), [(1, [0]), (4, [0, 5, 10, 15]), (3, [0, 6, 13]), (19, None)])
    def test_places_are_different_and_evenly_spread(self, count: int, places: list[int] | None) -> None:
        part = take_evenly(self.source(20), count)
        assert isinstance(part, EvenPart)
        found = [int(Path(part.path(index)).stem) for index in range(len(part))]
        assert len(set(found)) == len(part) == count
        assert places is None or found == places
        assert all(abs(place - index * 20 / count) < 1 for index, place in enumerate(found))
        assert part.labels == [place // 10 for place in found]
        assert (part.name, part.classes, part.licence) == ("x", ["a", "b"], "CC0")

    def test_none_and_more_than_there_are_take_all(self) -> None:
        source = self.source(20)
        assert take_evenly(source, None) is take_evenly(source, 20) is take_evenly(source, 21) is source
        assert take_evenly(self.source(20, labels=False), 5).labels is None

    def test_items_are_those_of_the_places(self, cifar: Path) -> None:
        whole = open_dataset(f"folder:{cifar}", "train")
        part = take_evenly(whole, 6)
        assert Counter(part.labels) == {0: 2, 1: 2, 2: 2}
        for index, place in enumerate((0, 4, 8, 12, 16, 20)):
            assert part.path(index) == whole.path(place)
            assert part[index][1] == whole[place][1]
            assert torch.equal(part[index][0], whole[place][0])

    def test_a_stream_has_no_order_to_spread_over(self) -> None:
        stream = IterableSource("wds/x", [], ["a"])
        assert take_evenly(stream, None) is stream
        with pytest.raises(ValueError, match="max_images is 3, but wds/x is a stream; leave it out"):
            take_evenly(stream, 3)


@pytest.mark.parametrize(
    ("source", "nearest"),
    [("elvp", "elpv"), ("image:/x", "images"), ("folders:/x", "folder"), ("trch/cifar10", "torch"), ("nonsense", "")],
)
def test_unknown_source_lists_the_names(source: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="choose elpv, folder:PATH") as caught:
        open_dataset(source, "train")
    assert nearest in str(caught.value).rpartition("did you mean")[2]
    assert ("did you mean" in str(caught.value)) == bool(nearest)


def write_idx(path: Path, array: np.ndarray) -> None:
    path.write_bytes(
        struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


class TestTimm:
    def test_torchvision_pillow_items(self, cifar: Path, tmp_path: Path) -> None:
        """MNIST's own format, with real pictures made grey and 28 pixels wide."""
        raw = tmp_path / "MNIST" / "raw"
        raw.mkdir(parents=True)
        files = sorted((cifar / "train").glob("*/*.jpg"))
        grey = np.stack([np.asarray(Image.open(file).convert("L").resize((28, 28))) for file in files])
        labels = np.arange(len(files), dtype=np.uint8) % 10
        for prefix, part in (("train", slice(None)), ("t10k", slice(0, 5))):
            write_idx(raw / f"{prefix}-images-idx3-ubyte", grey[part])
            write_idx(raw / f"{prefix}-labels-idx1-ubyte", labels[part])
        train, validation = (open_dataset("torch/mnist", s, root=str(tmp_path)) for s in ("train", "validation"))
        assert (len(train), len(validation)) == (24, 5)
        assert train.labels == labels.tolist()
        assert len(train.classes) == 10
        image, label = train[7]
        assert (label, train.path(7)) == (7, "torch/mnist[7]")
        assert torch.equal(image, torch.from_numpy(grey[7]).expand(3, -1, -1))

    def test_torchvision_files_are_decoded_here(self, cifar: Path, tmp_path: Path) -> None:
        shutil.copytree(cifar / "train", tmp_path / "train")
        train = open_dataset("torch/image_folder", "train", root=str(tmp_path))
        assert isinstance(train, FileSource)
        assert (len(train), train.classes) == (24, ["airplane", "cat", "truck"])
        Path(train.path(3)).write_bytes(b"")
        with pytest.raises(BrokenImageError, match=r"0 bytes"):
            train[3]

    def test_cifar10_absent(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"torch/cifar10.*download"):
            open_dataset("torch/cifar10", "train", root=str(tmp_path))
        with pytest.raises(ValueError, match="root"):
            open_dataset("torch/cifar10", "train")
        with pytest.raises(ValueError, match="Unknown torchvision"):
            open_dataset("torch/cifar11", "train", root=str(tmp_path))

    def test_a_broken_image_is_not_replaced_by_its_neighbour(self, cifar: Path, tmp_path: Path) -> None:
        """timm's own data set returns another image and logs a line."""
        from timm.data.readers import create_reader

        shutil.copytree(cifar / "train", tmp_path / "x")
        source = ReaderSource("hfds/x", create_reader("", root=str(tmp_path / "x")), [])
        file = Path(source._reader.samples[4][0])
        torch.testing.assert_close(source[4][0].int(), pillow(file).int(), atol=2, rtol=0)
        file.write_bytes(file.read_bytes()[:300])
        with pytest.raises(BrokenImageError) as caught:
            source[4]
        assert caught.value.path == "hfds/x[4]"

    @pytest.mark.parametrize(("source", "package"), [("hfds/beans", "datasets"), ("wds/x", "webdataset")])
    def test_missing_packages(self, source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
            open_dataset(source, "train", root=str(tmp_path))

    def test_stream_items(self, cifar: Path) -> None:
        files = sorted((cifar / "train").glob("*/*.jpg"))[:2]
        stream = [(Image.open(files[0]), 1), (files[1].read_bytes(), 2)]
        items = list(IterableSource("wds/x", stream, ["a", "b", "c"]))
        for (image, _), file in zip(items, files, strict=True):
            torch.testing.assert_close(image.int(), pillow(file).int(), atol=2, rtol=0)
        assert [label for _, label in items] == [1, 2]
        with pytest.raises(BrokenImageError, match="wds/x"):
            list(IterableSource("wds/x", [(files[0].read_bytes()[:300], 0)], []))

    def test_hugging_face_datasets(self, cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        pytest.importorskip("datasets")
        source = open_dataset(f"hfds/{cifar}", "train", root=str(tmp_path))
        files = sorted((cifar / "train").glob("*/*.jpg"))
        assert isinstance(source, ReaderSource)
        assert source.classes == sorted({file.parent.name for file in files})
        assert len(source) == len(files)
        own = sorted((source.labels[place], source[place][0].sum().item()) for place in range(len(source)))
        wanted = sorted((source.classes.index(file.parent.name), pillow(file).sum().item()) for file in files)
        torch.testing.assert_close(torch.tensor(own), torch.tensor(wanted), rtol=1e-3, atol=0)

    # webdataset leaves its shards open
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_webdataset(self, cifar: Path, tmp_path: Path) -> None:
        pytest.importorskip("webdataset")
        files = sorted((cifar / "train").glob("*/*.jpg"))
        classes = sorted({file.parent.name for file in files})
        shards = []
        for shard in range(2):
            shards.append(f"x-{shard}.tar")
            with tarfile.open(tmp_path / shards[-1], "w") as tar:
                for place, file in list(enumerate(files))[shard::2]:
                    label = str(classes.index(file.parent.name)).encode()
                    for name, content in ((f"{place:04d}.jpg", file.read_bytes()), (f"{place:04d}.cls", label)):
                        entry = tarfile.TarInfo(name)
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))
        split = {"name": "validation", "num_samples": 24, "filenames": shards, "shard_lengths": [12, 12]}
        (tmp_path / "_info.json").write_text(json.dumps({"splits": {"validation": split}}))
        with pytest.raises(ValueError, match=r"classnames\.txt"):
            open_dataset("wds/x", "validation", root=str(tmp_path))
        (tmp_path / "classnames.txt").write_text("\n".join(classes))
        source = open_dataset("wds/x", "validation", root=str(tmp_path))
        assert isinstance(source, IterableSource)
        assert source.classes == classes
        items = list(source)
        del source
        gc.collect()
        assert Counter(label for _, label in items) == {0: 8, 1: 8, 2: 8}
        torch.testing.assert_close(items[0][0].int(), pillow(files[0]).int(), atol=2, rtol=0)
