"""Ratios of times: all candidates run in every round, in random order, so that the machine's moods hit all of them."""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# glibc gives large blocks back to the system and gets them again page by page, which takes longer than the rotation.
WARM_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
SHORTEST_SAMPLE = 0.03  # seconds: shorter runs are repeated within a sample


@dataclass
class Case:
    """What is compared with each other: every candidate does the same work.

    Attributes:
        section, label, dtype: where the rows belong: kind of work, size, precision.
        runs: candidate -> the work, called without arguments.
        ours: the candidate that ratios are to; None where only the floor is one to compare with.
        floor: the candidate that moves the same memory and does nothing else; None where there is none.
        errors: candidate -> largest absolute difference to float64.
        unit: bytes that peak memory is counted in.
    """

    section: str
    label: str
    dtype: str
    runs: Mapping[str, Callable[[], Any]]
    ours: str | None
    floor: str | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    unit: int | None = None


def measure_case(case: Case, *, rounds: int, device: torch.device, seed: int = 0) -> list[dict[str, Any]]:
    """One row a candidate: median and quartiles of its time, and of its ratio to ours and to the floor by round.

    Units: milliseconds; ratios are the candidate's time over the other's, so above 1 is slower than that one.
    """
    repeats = {name: _count_repeats(run, device) for name, run in case.runs.items()}
    peaks = {
        name: None if case.unit is None else peak_bytes(run, device) / case.unit for name, run in case.runs.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in case.runs}
    order, draw = list(case.runs), random.Random(seed)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            samples[name].append(_time(case.runs[name], repeats[name], device))

    rows = []
    for name, times in samples.items():
        row = {
            "section": case.section,
            "label": case.label,
            "dtype": case.dtype,
            "name": name,
            "rounds": rounds,
            "milliseconds": _spread([1000 * value for value in times]),
            "over_ours": _over(times, samples, case.ours),
            "over_floor": _over(times, samples, case.floor),
            "error": case.errors.get(name),
            "peak_memory": peaks[name],
        }
        rows.append(row)
    return rows


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of new tensors that were alive at once during a run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveBytes() as counter:
        run()
    return counter.peak


def restart_with_warm_allocator(module: str, words: Sequence[str]) -> None:
    """Become the same command again with an allocator that keeps memory; returns where there is nothing to change."""
    if sys.platform != "linux" or all(name in os.environ for name in WARM_ALLOCATOR):
        return
    # A notebook or a test that calls the command as a function must survive it; the command takes --debug out.
    if list(words) != [word for word in sys.argv[1:] if word != "--debug"]:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # The same process, not a child of it: signals meet the one that measures.
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **WARM_ALLOCATOR})


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    import timm

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "warm_allocator": all(name in os.environ for name in WARM_ALLOCATOR),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in known:
                storage = leaf.untyped_storage()
                self.alive.setdefault(weakref.ref(storage, self._forget), storage.nbytes())
        self.peak = max(self.peak, sum(self.alive.values()))
        return out

    def _forget(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        self.alive.pop(storage, None)


def _count_repeats(run: Callable[[], Any], device: torch.device) -> int:
    for _ in range(2):  # what compiles or fills caches does so here
        run()
    return max(1, round(SHORTEST_SAMPLE / max(_time(run, 1, device), 1e-7)))


def _time(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds a call: of this thread's own time on a CPU, which other processes cannot lengthen by waiting."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        clock: Callable[[], float] = time.thread_time
    else:
        clock = time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - start) / repeats


def _over(times: Sequence[float], samples: Mapping[str, Sequence[float]], other: str | None) -> dict[str, float] | None:
    return None if other is None else _spread([a / b for a, b in zip(times, samples[other], strict=True)])


def _spread(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith(("model name", "Model"))]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
