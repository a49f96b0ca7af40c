"""Loader: the same pictures for any number of workers and ranks, each once, in the right order of streams."""

from __future__ import annotations

import random
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from vision_rope.data import BrokenImageError, create_loader, eval_transform, open_dataset, train_transform
from vision_rope.data.loader import DeviceLoader
from vision_rope.data.sources import FileSource, IterableSource

# Newer versions of Python warn of every fork beside threads, which is how DataLoader starts its workers.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


@pytest.fixture(scope="module")
def photos(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> FileSource:
    """14 real photographs of 7 classes."""
    folder = tmp_path_factory.mktemp("imagenette")
    counts: Counter[Path] = Counter()
    with tarfile.open(shared_data / "imagenette224_small.tar") as tar:
        for member in tar:
            parent = Path(member.name).parent
            if member.isfile() and parent.parent.name in ("train", "val") and counts[parent] < 2:
                counts[parent] += 1
                tar.extract(member, folder, filter="data")
    source = open_dataset(f"folder:{folder}", "train")
    assert isinstance(source, FileSource)
    assert (len(source), len(source.classes)) == (14, 7)
    return source


def noisy(image: Tensor) -> Tensor:
    """A transform that draws from every global generator."""
    image = eval_transform((24, 24))(image)
    image[0] = int(torch.randint(256, ()))
    image[1] = random.randrange(256)
    image[2] = int(np.random.randint(256))
    return image


def make(dataset: FileSource | IterableSource, **options: object) -> DeviceLoader:
    defaults = {"batch_size": 4, "transform": eval_transform((24, 24)), "device": "cpu", "training": False}
    return create_loader(dataset, **{**defaults, "num_workers": 0, "mean": MEAN, "std": STD, **options})


def read(loader: DeviceLoader, epoch: int = 0) -> list[tuple[Tensor, ...]]:
    loader.set_epoch(epoch)
    return list(loader)


def by_index(batches: list[tuple[Tensor, ...]]) -> dict[int, Tensor]:
    return {
        index: image for images, _, indices in batches for index, image in zip(indices.tolist(), images, strict=True)
    }


def test_batches_are_what_torchvision_computes(photos: FileSource) -> None:
    loader = make(photos, with_indices=True)
    batches = read(loader)
    assert len(loader) == len(batches) == 4
    assert loader.num_images == 14
    assert loader.dataset is photos
    normalize = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    for images, labels, indices in batches:
        assert images.dtype == torch.float32
        assert labels.dtype == indices.dtype == torch.int64
        for image, label, index in zip(images, labels.tolist(), indices.tolist(), strict=True):
            torch.testing.assert_close(image, normalize(eval_transform((24, 24))(photos[index][0])))
            assert label == photos.labels[index]


def test_bfloat16_is_normalised_in_float32(photos: FileSource) -> None:
    for precise, coarse in zip(read(make(photos)), read(make(photos, dtype=torch.bfloat16)), strict=True):
        assert torch.equal(precise[0].to(torch.bfloat16), coarse[0])


@pytest.mark.parametrize("transform", [noisy, train_transform((24, 24), dihedral=True, color_jitter=0.3)])
def test_pictures_follow_from_seed_epoch_and_index_alone(photos: FileSource, transform: object) -> None:
    options = {"transform": transform, "training": True, "erasing": 0.5, "with_indices": True, "seed": 3}
    expected = read(make(photos, **options), epoch=1)
    assert len(expected) == 3
    for num_workers in (1, 2):
        loader = make(photos, num_workers=num_workers, **options)
        read(loader, epoch=0)
        for batch, same in zip(expected, read(loader, epoch=1), strict=True):
            assert all(map(torch.equal, batch, same))
    ranks = [read(make(photos, rank=rank, world_size=2, **options), epoch=1) for rank in (0, 1)]
    for batch, *parts in zip(expected, *ranks, strict=True):
        for whole, first, second in zip(batch, *parts, strict=True):
            assert torch.equal(whole, torch.cat([first, second]))
    # Another epoch and another seed show the same photographs otherwise.
    pictures = by_index(expected)
    for other in (read(make(photos, **options), epoch=2), read(make(photos, **{**options, "seed": 4}), epoch=1)):
        shared = {index: image for index, image in by_index(other).items() if index in pictures}
        assert len(shared) > 5
        assert not any(torch.equal(image, pictures[index]) for index, image in shared.items())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_of_the_process_are_left_alone(photos: FileSource, num_workers: int) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    for _ in make(photos, transform=noisy, training=True, erasing=1.0, num_workers=num_workers):
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])


def test_training_order(photos: FileSource) -> None:
    loader = make(photos, training=True, with_indices=True)
    epochs = [torch.cat([batch[2] for batch in read(loader, epoch)]).tolist() for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for order in epochs:
        assert len(set(order)) == len(order) == loader.num_images == 12
    assert set(epochs[0]) != set(epochs[1])  # the rest that is dropped changes


@pytest.mark.parametrize(("count", "world_size"), [(10, 4), (14, 4), (3, 4), (8, 2)])
def test_evaluation_counts_every_image_once(photos: FileSource, count: int, world_size: int) -> None:
    """Failure class 25."""
    part = FileSource("part", photos.classes, photos.paths[:count], photos.labels[:count])
    seen = []
    for rank in range(world_size):
        loader = make(part, rank=rank, world_size=world_size, batch_size=8, with_indices=True)
        indices = [index for *_, indices in read(loader) for index in indices.tolist()]
        assert indices == list(range(count))[rank::world_size]
        assert len(indices) == loader.num_images
        assert len(loader) == -(-len(indices) // (8 // world_size))
        seen += indices
    assert sorted(seen) == list(range(count))


def test_a_data_set_smaller_than_the_batch(photos: FileSource) -> None:
    """Failure class 26."""
    with pytest.raises(ValueError, match="14 images, less than one batch of 16"):
        make(photos, training=True, batch_size=16)
    assert len(read(make(photos, batch_size=16))) == 1
    with pytest.raises(ValueError, match="no images"):
        make(FileSource("none", ["a"], [], []))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5, "world_size": 2}, "batch_size is 5.*multiple of world_size 2"),
        ({"batch_size": 0}, "batch_size"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"num_workers": -1}, "num_workers"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"mean": (0.5,)}, "mean"),
        ({"seed": -1}, "seed"),
        ({"erasing": 1.5}, "erasing"),
    ],
)
def test_errors(photos: FileSource, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(photos, **options)
    with pytest.raises(ValueError, match="epoch"):
        make(photos).set_epoch(-1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_file_is_named(photos: FileSource, tmp_path: Path, num_workers: int) -> None:
    """Failure class 29."""
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(Path(photos.paths[0]).read_bytes()[:3000])
    source = FileSource("broken", photos.classes, [*photos.paths, str(broken)], [*photos.labels, 0])
    with pytest.raises(BrokenImageError, match=r"broken\.jpg") as caught:
        read(make(source, num_workers=num_workers))
    assert caught.value.path == str(broken)
    assert "truncated" in caught.value.reason


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_float_image_is_refused(photos: FileSource, num_workers: int) -> None:
    """Failure class 31."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        transform = v2.Compose([eval_transform((24, 24)), v2.ToDtype(dtype, scale=False)])
        with pytest.raises(TypeError, match=f"{dtype}.*leave scaling and normalising out"):
            read(make(photos, transform=transform, num_workers=num_workers))


def test_images_of_different_sizes_are_refused(photos: FileSource, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "small.png")
    source = FileSource("two sizes", ["a"], [photos.paths[0], str(tmp_path / "small.png")], [0, 0])
    with pytest.raises(ValueError, match=r"\(3, 224, 224\) and \(3, 20, 30\)"):
        read(make(source, transform=lambda image: image))


def test_erasing_takes_the_mean_colour(photos: FileSource) -> None:
    plain, erased = (read(make(photos, erasing=erasing)) for erasing in (0.0, 1.0))
    for before, after in zip(plain, erased, strict=True):
        changed = (before[0] != after[0]).any(1)
        assert (after[0].abs().sum(1)[changed] == 0).all()
        assert changed.flatten(1).any(1).all()
        assert (changed.float().mean((1, 2)) < 0.4).all()


class RecordingStream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    def wait_stream(self, other: RecordingStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


class RecordingAccelerator:
    """torch.cuda's part in the loader; it writes down what happens in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_streams = 0
        self.consumer = RecordingStream("consumer", self.events)

    def Stream(self, device: torch.device) -> RecordingStream:
        self.num_streams += 1
        return RecordingStream("copy", self.events)

    @contextmanager
    def stream(self, stream: RecordingStream) -> Iterator[None]:
        self.events.append(f"{stream.name} begins")
        yield
        self.events.append(f"{stream.name} ends")

    def current_stream(self, device: torch.device) -> RecordingStream:
        return self.consumer


def test_copies_and_consumer_wait_for_each_other(photos: FileSource) -> None:
    """Failure class 32."""
    plain, accelerator = make(photos), RecordingAccelerator()
    loader = make(photos, accelerator=accelerator)
    copy = ["copy waits for consumer", "copy begins", "copy ends"]
    for epoch in range(2):
        accelerator.events.clear()
        images = []
        for batch in loader:
            accelerator.events.append("use")
            images.append(batch[0])
        # Each copy waits for all that the consumer had queued, runs one batch ahead of it, and is waited for.
        ahead = [*copy, "use", "consumer waits for copy"]
        assert accelerator.events == [*copy, "consumer waits for copy", *ahead * 3, "use"]
        assert torch.equal(torch.cat(images), torch.cat([batch[0] for batch in plain])), epoch
    assert accelerator.num_streams == 1


class Pictures(IterableSource):
    """A stream of numbered pictures, shared out to workers and ranks as timm's readers do it."""

    def __init__(self, count: int, rank: int = 0, world_size: int = 1) -> None:
        self.dist_rank = rank
        self.dist_num_replicas = world_size
        self.reader = self
        self.epoch = 0
        self.count = count
        super().__init__("wds/pictures", self, ["a"])

    def __len__(self) -> int:
        return self.count // self.dist_num_replicas

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = torch.utils.data.get_worker_info()
        share, place = (worker.num_workers, worker.id) if worker else (1, 0)
        first, step = self.dist_rank * share + place, self.dist_num_replicas * share
        for number in range(first, self.count, step):
            yield torch.full((3, 30, 30), (number + self.epoch) % 256, dtype=torch.uint8), number

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_num_workers(self, num_workers: int) -> None:
        pass


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams(num_workers: int) -> None:
    """Failure class 25, for data sets without random access."""
    seen = []
    for rank in (0, 1):
        loader = make(Pictures(21, rank, 2), rank=rank, world_size=2, num_workers=num_workers)
        seen += [label for _, labels in read(loader) for label in labels.tolist()]
    assert sorted(seen) == list(range(21))
    loader = make(Pictures(21), training=True, num_workers=num_workers)
    batches = read(loader, epoch=7)
    assert len(batches) == len(loader)
    for images, labels in batches:
        torch.testing.assert_close(images[:, 0, 0, 0], ((labels + 7) / 255 - MEAN[0]) / STD[0])
    with pytest.raises(ValueError, match="no steps"):
        make(Pictures(3), training=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_image_in_a_stream_is_named(photos: FileSource, num_workers: int) -> None:
    class Broken(Pictures):
        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            yield from super().__iter__()
            raise BrokenImageError("wds/pictures[21]", "truncated")

    with pytest.raises(BrokenImageError) as caught:
        read(make(Broken(21), num_workers=num_workers))
    assert caught.value.path == "wds/pictures[21]"
