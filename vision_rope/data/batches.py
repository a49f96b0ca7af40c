"""Batches in host memory: which images or clips in which order, transformed and stacked by the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from vision_rope.data.augment import Transform
from vision_rope.data.clips import Clip, Clips, ClipSource
from vision_rope.data.decode import BrokenFileError
from vision_rope.data.randomness import derive_seed, seed_generators
from vision_rope.data.segmented_augment import SegmentedTransform
from vision_rope.data.segmented_clips import SegmentedClip, SegmentedClips
from vision_rope.data.sources import ImageSource, IterableSource

# A path, and what is to be told about it.
Report = tuple[str, str]


class Sample(NamedTuple):
    """An image or a clip on its way into a batch.

    Attributes:
        place: in the data set, or -1 where it is a stream.
        seed: of what is random about it on the device.
        reports: files that were damaged, or left out for it.
    """

    image: Tensor | Clip | SegmentedClip
    label: int
    place: int
    seed: int
    reports: tuple[Report, ...] = ()


class HostBatch(NamedTuple):
    """A batch as the workers make it; `Sample` says what is in it."""

    images: Tensor | Clips | SegmentedClips
    labels: Tensor
    indices: Tensor
    seeds: Tensor
    reports: list[Report]


class LeftOut(NamedTuple):
    """Stands for a sample that cannot be read and is left out of its batch."""

    reports: tuple[Report, ...]


class BatchOrder(Sampler[list[tuple[int, int]]]):
    """Batches of one rank as (epoch, index): the epoch travels with the index, so that no worker holds an old one."""

    def __init__(
        self, num_images: int, local_batch: int, *, training: bool, seed: int, rank: int, world_size: int
    ) -> None:
        self.epoch = 0
        self._total = num_images
        self._local_batch = local_batch
        self._training = training
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    @property
    def num_images(self) -> int:
        if self._training:
            return len(self) * self._local_batch
        return len(range(self._rank, self._total, self._world_size))

    def __len__(self) -> int:
        if self._training:
            return self._total // (self._local_batch * self._world_size)
        return -(-self.num_images // self._local_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if self._training:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, self.epoch))
            order = torch.randperm(self._total, generator=generator)
            step, first = self._local_batch * self._world_size, self._rank * self._local_batch
        else:
            order = torch.arange(self._rank, self._total, self._world_size)
            step, first = self._local_batch, 0
        for batch in range(len(self)):
            start = batch * step + first
            yield [(self.epoch, index) for index in order[start : start + self._local_batch].tolist()]


class IndexedSamples(Dataset[Sample | LeftOut | Exception]):
    """Transformed images or clips by (epoch, index).

    Clips that cannot be read raise their error, or, where the source skips them, are left out: of a batch of
    evaluation without a substitute, so that none counts twice; in training the next clip of the source that can be
    read takes the place, so that batches keep their size on every rank.
    """

    def __init__(
        self, dataset: ImageSource | ClipSource, transform: Transform | SegmentedTransform, seed: int, training: bool
    ) -> None:
        self._dataset = dataset
        # Of the source's own items, which no type says.
        self._transform: Any = transform
        self._seed = seed
        self._training = training

    def __getitem__(self, key: tuple[int, int]) -> Sample | LeftOut | Exception:
        epoch, index = key
        seed = derive_seed(self._seed, epoch, index)
        if isinstance(self._dataset, ClipSource):
            return self._read_clip(self._dataset, index, seed)
        try:
            image, label = self._dataset[index]
        except BrokenFileError as error:
            # As a value: raised in a worker it would arrive without its path.
            return error
        seed_generators(seed)
        return Sample(self._transform(image), label, index, derive_seed(seed))

    def _read_clip(self, source: ClipSource, first: int, seed: int) -> Sample | LeftOut | Exception:
        reports: list[Report] = []
        index = first
        while True:
            generator = torch.Generator().manual_seed(derive_seed(seed, 1)) if self._training else None
            try:
                clip, label = source.read(index, generator)
                break
            except BrokenFileError as error:
                if not source.skip_broken:
                    return error
                reports.append((error.path, f"left out, since {error.complaint}: {error.reason}"))
            if not self._training:
                return LeftOut(tuple(reports))
            index = (index + 1) % len(source)
            if index == first:
                return nothing_left(source, dict(reports))
        if (damage := source.damage(index)) is not None:
            reports.append((source.path(index), f"damaged, used as far as it can be decoded: {damage}"))
        seed_generators(seed)
        if isinstance(clip, SegmentedClip):
            clip = self._transform(clip)
        else:
            clip = Clip(self._transform(clip.frames), clip.seconds)
        return Sample(clip, label, index, derive_seed(seed), tuple(reports))


class StreamSamples(IterableDataset[Sample | BrokenFileError]):
    """Transformed images of a stream, seeded by epoch, rank, worker and place in the worker's part.

    In evaluation every rank reads everything and keeps its share: timm's readers would repeat some images and leave
    others out.
    """

    def __init__(self, dataset: IterableSource, transform: Transform, seed: int, rank: int, share: int) -> None:
        self._dataset = dataset
        self._transform = transform
        self._seed = seed
        self._rank = rank
        self._share = share
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample | BrokenFileError]:
        worker = get_worker_info()
        worker_id = worker.id if worker is not None else 0
        try:
            for place, (image, label) in enumerate(self._dataset):
                if self._share > 1 and place % self._share != self._rank:
                    continue
                seed = derive_seed(self._seed, self._epoch, self._rank, worker_id, place)
                seed_generators(seed)
                yield Sample(self._transform(image), label, -1, derive_seed(seed))
        except BrokenFileError as error:
            yield error


def nothing_left(source: ClipSource, reports: dict[str, str]) -> ValueError:
    """The error of a source of which every clip was left out."""
    path, reason = next(iter(reports.items()))
    return ValueError(f"no clip of {source.name} can be read; {path}, the first of {len(source)}: {reason}")


def collate(samples: list[Sample | LeftOut | Exception]) -> HostBatch | list[Report] | Exception:
    """Stack uint8 images, or the uint8 frames of clips.

    Returns:
        the batch, or in its place what the main process is to raise: BrokenFileError for a broken file, TypeError for
        images that are not uint8, ValueError for images of different sizes; reports alone where all is left out.
    """
    whole: list[Sample] = []
    reports: list[Report] = []
    for sample in samples:
        if isinstance(sample, Exception):
            return sample
        reports += sample.reports
        if isinstance(sample, Sample):
            whole.append(sample)
    if not whole:
        return reports
    images = [sample.image if isinstance(sample.image, Tensor) else sample.image.frames for sample in whole]
    for image in images:
        if image.dtype != torch.uint8:
            return TypeError(
                f"the transform returned {image.dtype}, but a batch is made of uint8 images in 0..255; "
                "leave scaling and normalising out of the transform: the loader does both on the device"
            )
        if image.shape != images[0].shape:
            return ValueError(
                f"the transform returned images of {tuple(images[0].shape)} and {tuple(image.shape)} in one batch; "
                "it must end in a resize or a crop to one size"
            )
    numbers = [(sample.label, sample.place, sample.seed) for sample in whole]
    labels, indices, seeds = torch.tensor(numbers, dtype=torch.int64).unbind(1)
    return HostBatch(_stack(whole, torch.stack(images)), labels, indices, seeds, reports)


def _stack(samples: list[Sample], images: Tensor) -> Tensor | Clips | SegmentedClips:
    """What the samples are, of their stacked images or frames."""
    clips = [sample.image for sample in samples if not isinstance(sample.image, Tensor)]
    if not clips:
        return images
    # Counted from the clip's start before they are rounded: float32 has no fractions of the seconds of a clock.
    seconds = torch.stack([clip.seconds - clip.seconds[0] for clip in clips]).float()
    ids = [clip.ids for clip in clips if isinstance(clip, SegmentedClip)]
    return SegmentedClips(images, torch.stack(ids), seconds) if ids else Clips(images, seconds)


def estimate_stream(
    num_images: int, local_batch: int, training: bool, num_workers: int, rank: int, world_size: int
) -> tuple[int, int]:
    """Images and batches that a stream gives a rank: exact in training, where every worker drops its rest.

    Raises:
        ValueError: where a training epoch would have no batch.
    """
    readers = max(num_workers, 1)
    if not training:
        share = len(range(rank, num_images, world_size))
        return share, -(-share // local_batch)
    num_batches = readers * (num_images // readers // local_batch)
    if num_batches == 0:
        raise ValueError(
            f"the data set gives {num_images} images to {readers} workers, less than one batch of {local_batch} each, "
            "so that an epoch would have no steps; give a smaller batch_size or fewer workers"
        )
    return num_batches * local_batch, num_batches
