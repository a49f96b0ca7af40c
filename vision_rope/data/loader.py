"""Batches on the device: uint8 from the workers, copied beside the computation, normalised on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import DataLoader

from vision_rope.data.augment import Transform
from vision_rope.data.batches import (
    BatchOrder,
    HostBatch,
    IndexedSamples,
    Report,
    StreamSamples,
    collate,
    estimate_stream,
    nothing_left,
)
from vision_rope.data.clips import Clips, ClipSource
from vision_rope.data.decode_video import BrokenVideoError
from vision_rope.data.randomness import derive_seed, preserved_randomness, seed_generators
from vision_rope.data.segmented_augment import SegmentedTransform
from vision_rope.data.segmented_clips import SegmentedClips
from vision_rope.data.sources import ImageSource, IterableSource

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Accelerator(Protocol):
    """The part of torch.cuda that orders copies and computation."""

    def Stream(self, device: torch.device) -> Any: ...

    def stream(self, stream: Any) -> Any: ...

    def current_stream(self, device: torch.device) -> Any: ...


class DeviceLoader:
    """Iterate over (images, labels) on the device, or (images, labels, indices) where asked for.

    Of a source of clips, `Clips` or `SegmentedClips` stand in the place of images. A loader is iterated on the stream
    that is current when a batch is asked for, one iteration at a time.

    Shapes:
        images floating point (batch, 3, height, width), normalised; labels int64 (batch,); indices int64 (batch,) in
        host memory: places in the data set, or -1 where it is a stream

    Raises:
        BrokenFileError: while iterating, with the file's path, from workers too.
        TypeError: while iterating, where the transform does not return uint8.
        ValueError: while iterating, where it returns images of different sizes, or all clips are left out.

    Attributes:
        dataset: the data set.
        report: is told once of every file that was damaged or left out; at first it warns.
        reported: paths of which it was told; loaders of the same files may share them.
        remedy: what the error of a clip that cannot be read ends with.
        num_images: images that an epoch gives this rank; like the length an estimate where a stream is evaluated.
    """

    def __init__(
        self,
        batches: DataLoader[HostBatch | list[Report] | Exception],
        dataset: ImageSource | IterableSource | ClipSource,
        num_images: int,
        num_batches: int,
        *,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        erasing: float,
        dtype: torch.dtype,
        with_indices: bool,
        accelerator: Accelerator | None,
        is_alone: bool,
    ) -> None:
        self.dataset = dataset
        self.report: Callable[[str], None] = _warn
        self.reported: set[str] = set()
        self.remedy = "video.broken: skip leaves such videos out"
        self._reports: dict[str, str] = {}
        self._is_alone = is_alone
        self.num_images = num_images
        self._num_batches = num_batches
        self._batches = batches
        self._device = device
        self._mean = 255 * torch.tensor(mean, dtype=torch.float32, device=device)
        self._std = 255 * torch.tensor(std, dtype=torch.float32, device=device)
        self._seed = seed
        self._epoch = 0
        # Erased pixels take the mean colour: no random numbers are drawn on the device.
        self._erase = RandomErasing(erasing, mode="const", device=device) if erasing else None
        self._dtype = dtype
        self._with_indices = with_indices
        self._accelerator = accelerator
        # One stream for the loader's life: the allocator keeps a pool of memory a stream.
        self._copy_stream = accelerator.Stream(device=device) if accelerator else None

    def __len__(self) -> int:
        return self._num_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from which the order and the augmentation of the next iteration follow."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, but epochs count from 0")
        self._epoch = epoch
        if isinstance(self._batches.batch_sampler, BatchOrder):
            self._batches.batch_sampler.epoch = epoch
        else:
            assert isinstance(self._batches.dataset, StreamSamples)
            self._batches.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        ready: tuple[Any, ...] | None = None
        for batch in self._whole_batches():
            # The copy of a batch is queued before the one ahead of it is used, so that both go on together.
            copied = self._copy(batch)
            if ready is not None:
                yield ready
            if self._accelerator is not None:
                self._accelerator.current_stream(device=self._device).wait_stream(self._copy_stream)
            ready = copied
        if ready is not None:
            yield ready

    def _whole_batches(self) -> Iterator[HostBatch]:
        """Batches of which something is left; what is wrong with files is reported on the way."""
        is_empty = True
        for batch in self._host_batches():
            for path, reason in batch.reports if isinstance(batch, HostBatch) else batch:
                if path not in self._reports:
                    self._reports[path] = reason
                    if path not in self.reported:
                        self.reported.add(path)
                        self.report(f"{path}: {reason}")
            if isinstance(batch, HostBatch):
                is_empty = False
                yield batch
        # A rank's share may be empty; that of all of them may not.
        if is_empty and self._is_alone and isinstance(self.dataset, ClipSource) and self._reports:
            raise nothing_left(self.dataset, self._reports)

    def _host_batches(self) -> Iterator[HostBatch | list[Report]]:
        # Without workers the samples are made, and the generators seeded, in this process.
        preserve = preserved_randomness if self._batches.num_workers == 0 else nullcontext
        # The seeds of the workers, which only streams draw from.
        self._batches.generator.manual_seed(derive_seed(self._seed, self._epoch))
        batches = iter(self._batches)
        while True:
            with preserve():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, Exception):
                # Raised beside the iterator, an error would keep it alive in a cycle, whose collection waits five
                # seconds for every worker.
                del batches
                raise batch.with_remedy(self.remedy) if isinstance(batch, BrokenVideoError) else batch
            yield batch

    def _copy(self, batch: HostBatch) -> tuple[Any, ...]:
        if self._accelerator is None or self._copy_stream is None:
            return self._prepare(batch)
        # Memory that the consumer has let go is filled anew here: not before its queued work is done.
        self._copy_stream.wait_stream(self._accelerator.current_stream(device=self._device))
        with self._accelerator.stream(self._copy_stream):
            return self._prepare(batch)

    def _prepare(self, batch: HostBatch) -> tuple[Any, ...]:
        labels = batch.labels.to(self._device, non_blocking=True)
        images: Tensor | Clips | SegmentedClips
        if isinstance(batch.images, Tensor):
            images = self._normalize(batch.images.to(self._device, non_blocking=True), batch.seeds)
        else:
            # All parts of clips: frames, seconds and, where there are objects, their ids.
            parts = (part.to(self._device, non_blocking=True) for part in batch.images)
            images = type(batch.images)(*parts)
            images = images._replace(frames=self._normalize(images.frames.transpose(1, 2), batch.seeds))
        return (images, labels, batch.indices) if self._with_indices else (images, labels)

    def _normalize(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Shapes: uint8 (batch, 3, [frames], height, width) -> the same, floating point"""
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        # In float32 and cast at the end: in bfloat16 the mean itself would be rounded.
        scale = (3,) + (1,) * (images.ndim - 2)
        images.sub_(self._mean.view(scale)).div_(self._std.view(scale))
        if self._erase is not None:
            with preserved_randomness():
                for image, seed in zip(images, seeds.tolist(), strict=True):
                    seed_generators(seed)
                    # Frames as channels: all of a clip lose the same rectangle.
                    self._erase(image.flatten(0, -3))
        return images.to(self._dtype)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def create_loader(
    dataset: ImageSource | IterableSource | ClipSource,
    *,
    batch_size: int,
    transform: Transform | SegmentedTransform,
    device: torch.device | str,
    training: bool,
    num_workers: int = 2,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    erasing: float = 0.0,
    dtype: torch.dtype = torch.float32,
    with_indices: bool = False,
    accelerator: Accelerator | None = None,
) -> DeviceLoader:
    """Create the loader of one rank.

    In training every epoch is a random order, in batches that the ranks share, so that together they see what one
    process would; what is left at the end is dropped. In evaluation every image comes once, on one rank. What an image
    looks like follows from seed, epoch and its index alone.

    Where a source of clips skips those that cannot be read, the next one in the source takes their place in training,
    so that batches keep their size on every rank; in evaluation they are left out.

    Args:
        dataset: what `open_dataset` gives, or anything with its items.
        batch_size: images a step over all ranks together.
        transform: from uint8 (3, any height, any width), of clips (frames, 3, any height, any width), to uint8 of one
            height and width, all frames alike; from `SegmentedClip` to another where the data set has those. It draws
            from torch's, Python's or NumPy's global generator, which is seeded before each image or clip.
        device: where batches go.
        training: shuffle and drop the rest, or every image once in order.
        num_workers: processes that decode; 0 decodes in this one.
        mean: per-channel mean of pixels in [0, 1].
        std: per-channel standard deviation of pixels in [0, 1].
        seed: of order and augmentation.
        rank: number of this process.
        world_size: number of processes.
        erasing: probability that a rectangle of an image takes the mean colour.
        dtype: of the images; they are normalised in float32 all the same.
        with_indices: give the images' places in the data set too.
        accelerator: what orders copies and computation; none takes torch.cuda for CUDA devices and nothing for others.

    Raises:
        ValueError: for a batch that the ranks cannot share, a data set smaller than a training batch, and values
            outside their range.
    """
    device = torch.device(device)
    _check(dataset, batch_size, training, num_workers, mean, std, seed, rank, world_size, erasing)
    local_batch = batch_size // world_size
    generator = torch.Generator()  # its own: DataLoader would draw a seed from the process's
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "collate_fn": collate,
        "pin_memory": device.type == "cuda",
        "generator": generator,
    }
    batches: DataLoader[Any]
    if isinstance(dataset, IterableSource):
        if not training:
            dataset.read_everything()
        dataset.set_num_workers(num_workers)
        samples = StreamSamples(dataset, cast(Transform, transform), seed, rank, share=1 if training else world_size)
        batches = DataLoader(samples, batch_size=local_batch, drop_last=training, **options)
        num_images, num_batches = estimate_stream(len(dataset), local_batch, training, num_workers, rank, world_size)
    else:
        order = BatchOrder(len(dataset), local_batch, training=training, seed=seed, rank=rank, world_size=world_size)
        batches = DataLoader(IndexedSamples(dataset, transform, seed, training), batch_sampler=order, **options)
        num_images, num_batches = order.num_images, len(order)
    return DeviceLoader(
        batches,
        dataset,
        num_images,
        num_batches,
        device=device,
        mean=mean,
        std=std,
        seed=seed,
        erasing=erasing,
        dtype=dtype,
        with_indices=with_indices,
        accelerator=accelerator or (torch.cuda if device.type == "cuda" else None),
        is_alone=world_size == 1,
    )


def _check(
    dataset: ImageSource | IterableSource | ClipSource,
    batch_size: int,
    training: bool,
    num_workers: int,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
    rank: int,
    world_size: int,
    erasing: float,
) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}, but ranks count from 0 to world_size - 1")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size is {batch_size}, but it must be a positive multiple of world_size {world_size}, "
            "since it counts the images of all ranks together"
        )
    if not isinstance(dataset, IterableSource):
        if len(dataset) == 0:
            raise ValueError("the data set has no images")
        if training and len(dataset) < batch_size:
            raise ValueError(
                f"the data set has {len(dataset)} images, less than one batch of {batch_size}, "
                "so that an epoch would have no steps; give a smaller batch_size"
            )
    if num_workers < 0:
        raise ValueError(f"num_workers is {num_workers}, but it must be 0 (decode in this process) or more")
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(
            f"mean is {mean} and std {std}, but both need three numbers, and those of std must be positive"
        )
    if seed < 0:
        raise ValueError(f"seed is {seed}, but it must not be negative")
    if not 0 <= erasing <= 1:
        raise ValueError(f"erasing is {erasing}, but a probability lies between 0 and 1")
