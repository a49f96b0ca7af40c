"""One model over points: sizes, numbers of frames and rates it never saw, with and without context extension."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from vision_rope.convert.model import time_length
from vision_rope.data import create_loader, eval_transform
from vision_rope.extension_text import parse_extension
from vision_rope.measure import Meter, gather
from vision_rope.points import Point, check_points, create_points
from vision_rope.results import Row
from vision_rope.sizes import Size, format_size
from vision_rope.tasks import Classification, Task


def check_methods(methods: Sequence[str]) -> list[str]:
    """The methods once each with "none" in front; what `parse_extension` cannot read is refused."""
    for method in methods:
        parse_extension(method)
    return list(dict.fromkeys(["none", *methods]))


def sweep(
    model: nn.Module,
    dataset: Any,
    *,
    task: Task | None = None,
    sizes: Sequence[Size],
    methods: Sequence[str],
    frames: Sequence[int] = (),
    fps: Sequence[float] = (),
    train_size: Size,
    train_frames: int | None = None,
    train_fps: float | None = None,
    positions_per_second: float | None = None,
    patch_size: Sequence[int],
    device: torch.device,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 64,
    crop_pct: float = 1.0,
    interpolation: Literal["bilinear", "bicubic"] = "bicubic",
    num_workers: int = 2,
    seed: int = 0,
    precision: str = "fp32",
    rank: int = 0,
    world_size: int = 1,
    about: Mapping[str, str | int] | None = None,
    progress: bool = True,
    watch: Callable[[Point, Mapping[str, Meter]], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Row]:
    """One row a point and method: metrics, speed, memory, crop policy, seed; or the reason why there are none.

    A point is a size, and of clips a number of frames and a rate too. Inputs are decoded and resized once a point for
    all methods. Methods always include "none", and the model
    is left with it; options follow the name, as in "yarn:beta_fast=16". Under torch.distributed every rank calls this
    with its own `rank` and gets the same rows.

    Units: sizes, train_size and patch_size in pixels, (rows, columns). `per_class` of a row holds the
    accuracy by class name, None where the class has no image or the task no classes. `task` is classification
    where none is given. `about` is put in front of every row (model, weights, position). `watch` is called after
    each point with its meters by method; `report` is told once of every file that is damaged or left out, of which
    there are warnings otherwise.

    Clips: patch_size is (frames, rows, columns); frames and fps (frames a second) are those of training where none are
    given; a train_fps of None is every frame of a video; `dataset.sampled(num_frames, fps)` gives a point's clips.
    With the model's positions_per_second, longer gaps extend time as more frames do.

    Raises: ValueError for sizes and frames that the patch does not divide, frames and rates of images, and unknown
        methods and options, before any work.
    """
    if train_frames is None:
        refuse_frames(frames, fps)
    trained = Point(train_size, train_frames, train_fps)
    points = create_points(sizes, frames or [train_frames], fps or [train_fps])
    check_points([*points, trained], patch_size)
    methods = check_methods(methods)
    grid = train_grid(trained, patch_size, positions_per_second if len(methods) > 1 else None)
    classes = list(dataset.classes)
    judge: Task = task or Classification(len(classes))
    for point in points:
        judge.check_size(point.lengths)
    training = model.training
    rows = []
    reported: set[str] = set()
    try:
        model.eval()
        reasons = {method: _reason_against(model, method, grid) for method in methods}
        defined = [method for method in methods if reasons[method] is None]
        for point in points:
            sampled, counts = dataset, None
            if point.num_frames is not None:
                taken = judge.clip_factor * point.num_frames
                sampled = dataset.sampled(taken, point.fps)
                counts = ClipCounts(len(sampled), taken, point.fps)
            loader = create_loader(
                sampled,
                batch_size=batch_size,
                transform=eval_transform(point.size, crop_pct=crop_pct, interpolation=interpolation),
                device=device,
                training=False,
                num_workers=num_workers,
                mean=mean,
                std=std,
                seed=seed,
                rank=rank,
                world_size=world_size,
                with_indices=True,
            )
            loader.report, loader.reported = report or loader.report, reported
            loader.remedy = "--skip-broken leaves such videos out, and --frames takes fewer frames of each"
            sized = _fit_to_size(model, point.size)
            meters = {method: Meter(judge, device, precision) for method in defined}
            silent = None if progress and rank == 0 else True
            bar = tqdm(loader, desc=f"{point.name} px", unit="batch", disable=silent)
            for index, (images, labels, places) in enumerate(bar):
                if counts is not None:
                    counts.add(images.seconds)
                batch = judge.eval_batch(images, labels, places)
                if not meters["none"].passes:
                    # A new point is slow once, and that must not count against the method that comes first.
                    meters["none"].forward(sized, batch)
                # Each method comes first in turn: the first one on a batch finds it in no cache.
                first = index % len(defined)
                for method in defined[first:] + defined[:first]:
                    if len(defined) > 1:
                        _extend(sized, method, grid)
                    meters[method].add(sized, batch)
            if watch is not None:
                watch(point, meters)
            results = {method: meters[method].result() for method in defined}
            if counts is not None:
                results = {method: counts.complete(result) for method, result in results.items()}
            undefined = dict.fromkeys(next(iter(results.values())))
            for method in methods:
                figures = results.get(method, undefined)
                rows.append(
                    {
                        **(about or {}),
                        **point.describe(patch_size),
                        **trained.describe_training(),
                        "method": method,
                        "crop_pct": crop_pct,
                        "crop": f"resized to cover size / {crop_pct:g}, centre crop, {interpolation}",
                        "seed": seed,
                        **{key: _finite(figures[key]) for key in figures if key != "per_class"},
                        "per_class": _by_class(classes, figures.get("per_class")),
                        "reason": reasons[method],
                    }
                )
    finally:
        model.train(training)
        _extend(model, "none", grid)
    return rows


def refuse_frames(frames: Sequence[int], fps: Sequence[float]) -> None:
    """Refuse frames and rates of a model of images.

    Raises: ValueError where there are any.
    """
    for name, values in (("frames", frames), ("fps", fps)):
        if values:
            raise ValueError(
                f"{name} is {', '.join(f'{value:g}' for value in values)}, but the model takes images, which have "
                "neither frames nor a rate; leave it out, or give a run that was trained with video.num_frames"
            )


def patch_size_of(model: nn.Module) -> tuple[int, ...]:
    """(height, width) of a patch, or (frames, height, width) of a tubelet."""
    embed = getattr(model, "patch_embed", None)
    if (tubelet := getattr(embed, "tubelet", None)) is not None:
        return tuple(tubelet)
    patch = getattr(embed, "patch_size", 1)
    return (patch, patch) if isinstance(patch, int) else (int(patch[0]), int(patch[1]))


def train_grid(trained: Point, patch_size: Sequence[int], positions_per_second: float | None) -> tuple[int, ...]:
    """The grid that extension counts from; where time goes by seconds, its length is that of the last position.

    Raises: ValueError where nobody knows how long clips were in training.
    """
    grid = trained.grid(patch_size)
    if positions_per_second is None:
        return grid
    if trained.fps is None:
        raise ValueError(
            "extend asks for context extension, but with video.positions_per_second and no video.fps nobody knows how "
            "long clips were in training; leave --extend out, or train with video.fps"
        )
    seconds = torch.arange(grid[0]) * (patch_size[0] / trained.fps)
    return (time_length(seconds * positions_per_second), *grid[1:])


class ClipCounts:
    """How many clips of a data set are left out, and by over half a frame shorter or longer than asked for."""

    def __init__(self, total: int, num_frames: int, fps: float | None) -> None:
        self.total = total
        self.num_frames = num_frames
        self.fps = fps
        self.shorter = self.longer = 0

    def add(self, seconds: Tensor) -> None:
        """Count a batch of clips by the seconds of their frames, (batch, frames)."""
        if self.fps is None:
            return
        # In frames: one less than a clip has lies between its first and its last.
        excess = (seconds[:, -1] - seconds[:, 0]) * self.fps - (self.num_frames - 1)
        self.shorter += int((excess < -0.5).sum())
        self.longer += int((excess > 0.5).sum())

    def watch(self, batches: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Count batches of clips, labels and more as they pass."""
        for batch in batches:
            self.add(batch[0].seconds)
            yield batch

    def complete(self, figures: Row) -> Row:
        """Figures of clips under their own name, with the counts of all ranks."""
        named = {key.replace("images", "clips"): value for key, value in figures.items()}
        shorter, longer = map(sum, zip(*gather((self.shorter, self.longer)), strict=True))
        return {
            **named,
            "clips_left_out": self.total - named["clips"],
            "clips_shorter": shorter,
            "clips_longer": longer,
        }


def _by_class(classes: Sequence[str], accuracies: Sequence[float] | None) -> dict[str, float | None] | None:
    if accuracies is None:
        return None
    return {str(name): _finite(accuracy) for name, accuracy in zip(classes, accuracies, strict=True)}


def _finite(value: Any) -> Any:
    """None for nan, which JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _extend(model: nn.Module, method: str, grid: Sequence[int]) -> None:
    """Switch the method with its options; a model that no method means anything for has "none" already."""
    import vision_rope

    name, knobs = parse_extension(method)
    try:
        vision_rope.set_extension(model, name, train_size=grid, **knobs)
    except ValueError:
        if name != "none":
            raise


def _reason_against(model: nn.Module, method: str, grid: Sequence[int]) -> str | None:
    """Why a method means nothing for a model, or None."""
    try:
        _extend(model, method, grid)
    except ValueError as error:
        return str(error)
    return None


def _fit_to_size(model: nn.Module, size: Size) -> nn.Module:
    """The model itself where it takes any size, else a copy that timm's set_input_size has fitted."""
    embed: Any = getattr(model, "patch_embed", None)
    if not getattr(embed, "strict_img_size", False) or tuple(embed.img_size) == size:
        return model
    if not hasattr(model, "set_input_size"):
        built = format_size(tuple(embed.img_size))
        raise ValueError(
            f"size is {format_size(size)}, but {type(model).__name__} takes images of {built} pixels alone"
        )
    # Resampling an absolute embedding back does not restore it, so the original stays untouched.
    fitted: Any = copy.deepcopy(model)
    fitted.set_input_size(img_size=size)
    return fitted
