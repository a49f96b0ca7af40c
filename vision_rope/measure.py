"""Metrics, speed and memory of a model over batches of images."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from vision_rope.parallel import choose_precision
from vision_rope.results import Row
from vision_rope.tasks import Batch, Task


def measure(
    model: nn.Module,
    loader: Iterable[tuple[Any, ...]],
    task: Task,
    *,
    precision: str = "fp32",
    progress: bool = False,
) -> Row:
    """Metrics, speed and memory of a model over a loader; its training mode is restored afterwards.

    The loader yields images and labels, and the images' places in the data set where the task needs them.

    Returns the task's metrics (`vision_rope.metrics`), and

    - images_per_second: forward passes alone, all ranks together; the first batch is left out where there are more;
    - peak_memory_mb, in 10^6 bytes, of the fullest rank: on CUDA the most that torch had allocated during a pass; on
      a Linux CPU the most resident memory of the process, libraries and data included; elsewhere None.

    Raises: ValueError for outputs that are not finite or of another shape.
    """
    meter = Meter(task, next(model.parameters()).device, precision)
    meter.run(model, loader, progress=progress)
    return meter.result()


class Meter:
    """What `measure` reports, gathered batch by batch: several models or methods can share the loading.

    Attributes:
        first: the first batch and the model's outputs for it.
    """

    def __init__(self, task: Task, device: torch.device, precision: str) -> None:
        self.task = task
        self.metrics = task.create_metrics(device)
        self.first: tuple[Batch, Tensor] | None = None
        self.device = device
        self.dtype = choose_precision(precision, device)
        self.passes: list[tuple[int, float]] = []
        self.peak: float | None = None

    def run(self, model: nn.Module, loader: Iterable[tuple[Any, ...]], *, progress: bool = False) -> None:
        """Add all batches of a loader; the model's training mode is restored afterwards."""
        training = model.training
        try:
            model.eval()
            for images, labels, *places in tqdm(loader, unit="batch", leave=False, disable=None if progress else True):
                self.add(model, self.task.eval_batch(images, labels, places[0] if places else None))
        finally:
            model.train(training)

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Time the model on a batch and count its answers."""
        measured = _reset_peak_memory(self.device)
        _synchronize(self.device)
        start = time.perf_counter()
        outputs = self.forward(model, batch)
        _synchronize(self.device)
        self.passes.append((len(batch.inputs[0]), time.perf_counter() - start))
        if measured and (peak := _read_peak_memory(self.device)) is not None:
            self.peak = max(self.peak or 0.0, peak)
        self.metrics.update(outputs, batch.targets)
        if self.first is None:
            self.first = batch, outputs

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's answers, neither timed nor counted."""
        low = self.dtype != torch.float32
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=self.dtype, enabled=low):
            return model(*batch.inputs)

    def result(self) -> Row:
        """Metrics, speed and memory of all batches on all ranks."""
        # The first batch pays for what is made lazily (kernels, memory); it counts where there is no other.
        timed = self.passes[1:] or self.passes
        ranks = gather((sum(count for count, _ in timed), sum(seconds for _, seconds in timed), self.peak))
        seconds = max(rank[1] for rank in ranks)
        peaks = [rank[2] for rank in ranks if rank[2] is not None]
        return {
            **self.metrics.compute(),
            "images_per_second": sum(rank[0] for rank in ranks) / seconds if seconds else None,
            "peak_memory_mb": max(peaks) if peaks else None,
        }


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _synchronize(device: torch.device) -> None:
    """Wait for an asynchronous device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _reset_peak_memory(device: torch.device) -> bool:
    """Start measuring the peak anew; False where it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu":
        return False
    try:
        # Linux: 5 resets the peak of the resident memory and nothing else.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _read_peak_memory(device: torch.device) -> float | None:
    """Peak since the reset in 10^6 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found else None
