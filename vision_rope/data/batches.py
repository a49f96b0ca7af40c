"""Batches in host memory: which images in which order, transformed and stacked by the workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from vision_rope.data.augment import Transform
from vision_rope.data.decode import BrokenImageError
from vision_rope.data.randomness import derive_seed, seed_generators
from vision_rope.data.sources import ImageSource, IterableSource

# image, label, index, seed of what is random about the image on the device
Sample = tuple[Tensor, int, int, int]
HostBatch = tuple[Tensor, Tensor, Tensor, Tensor]


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


class IndexedSamples(Dataset[Sample | BrokenImageError]):
    """Transformed images by (epoch, index)."""

    def __init__(self, dataset: ImageSource, transform: Transform, seed: int) -> None:
        self._dataset = dataset
        self._transform = transform
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Sample | BrokenImageError:
        epoch, index = key
        try:
            image, label = self._dataset[index]
        except BrokenImageError as error:
            # As a value: raised in a worker it would arrive without its path.
            return error
        seed = derive_seed(self._seed, epoch, index)
        seed_generators(seed)
        return self._transform(image), label, index, derive_seed(seed)


class StreamSamples(IterableDataset[Sample | BrokenImageError]):
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

    def __iter__(self) -> Iterator[Sample | BrokenImageError]:
        worker = get_worker_info()
        worker_id = worker.id if worker is not None else 0
        try:
            for place, (image, label) in enumerate(self._dataset):
                if self._share > 1 and place % self._share != self._rank:
                    continue
                seed = derive_seed(self._seed, self._epoch, self._rank, worker_id, place)
                seed_generators(seed)
                yield self._transform(image), label, -1, derive_seed(seed)
        except BrokenImageError as error:
            yield error


def collate(samples: list[Sample | BrokenImageError]) -> HostBatch | Exception:
    """Stack uint8 images.

    Returns:
        the batch, or in its place what the main process is to raise: BrokenImageError for a broken image, TypeError for
        images that are not uint8, ValueError for images of different sizes.
    """
    whole: list[Sample] = []
    for sample in samples:
        if isinstance(sample, BrokenImageError):
            return sample
        whole.append(sample)
    images = [image for image, *_ in whole]
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
    labels, indices, seeds = torch.tensor([numbers for _, *numbers in whole], dtype=torch.int64).unbind(1)
    return torch.stack(images), labels, indices, seeds


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
