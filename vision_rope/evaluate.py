"""A model at sizes it never saw, with and without context extension: accuracy, calibration, speed and memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from vision_rope.config import DataConfig, load_yaml
from vision_rope.data import create_loader, eval_transform
from vision_rope.extension_text import parse_extension
from vision_rope.measure import Meter, measure
from vision_rope.parallel import distributed
from vision_rope.results import Row, format_table, write_results
from vision_rope.sizes import Size, check_sizes, format_size, parse_sizes
from vision_rope.targets import open_run, open_timm
from vision_rope.tasks import Classification, Task

__all__ = [
    "evaluate",
    "format_table",
    "measure",
    "sweep",
    "write_results",
]


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
    train_size: Size,
    patch_size: Size,
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
    watch: Callable[[Size, Mapping[str, Meter]], None] | None = None,
) -> list[Row]:
    """One row a size and method: metrics, speed, memory, crop policy, seed; or the reason why there are none.

    Images are decoded and resized once a size for all methods. Methods always include "none", and the model
    is left with it; options follow the name, as in "yarn:beta_fast=16". Under torch.distributed every rank calls this
    with its own `rank` and gets the same rows.

    Units: sizes, train_size and patch_size in pixels, (rows, columns). `per_class` of a row holds the
    accuracy by class name, None where the class has no image or the task no classes. `task` is classification
    where none is given. `about` is put in front of every row (model, weights, position). `watch` is called after
    each size with its meters by method.

    Raises: ValueError for sizes that the patch does not divide, and unknown methods and options, before any work.
    """
    check_sizes([*sizes, train_size], patch_size)
    methods = check_methods(methods)
    grid = (train_size[0] // patch_size[0], train_size[1] // patch_size[1])
    classes = list(dataset.classes)
    judge: Task = task or Classification(len(classes))
    for size in sizes:
        judge.check_size(size)
    training = model.training
    rows = []
    try:
        model.eval()
        reasons = {method: _reason_against(model, method, grid) for method in methods}
        defined = [method for method in methods if reasons[method] is None]
        for size in sizes:
            loader = create_loader(
                dataset,
                batch_size=batch_size,
                transform=eval_transform(size, crop_pct=crop_pct, interpolation=interpolation),
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
            sized = _fit_to_size(model, size)
            meters = {method: Meter(judge, device, precision) for method in defined}
            silent = None if progress and rank == 0 else True
            bar = tqdm(loader, desc=f"{format_size(size)} px", unit="batch", disable=silent)
            for index, (images, labels, places) in enumerate(bar):
                batch = judge.eval_batch(images, labels, places)
                if not meters["none"].passes:
                    # A new size is slow once, and that must not count against the method that comes first.
                    meters["none"].forward(sized, batch)
                # Each method comes first in turn: the first one on a batch finds it in no cache.
                first = index % len(defined)
                for method in defined[first:] + defined[:first]:
                    if len(defined) > 1:
                        _extend(sized, method, grid)
                    meters[method].add(sized, batch)
            if watch is not None:
                watch(size, meters)
            results = {method: meters[method].result() for method in defined}
            undefined = dict.fromkeys(next(iter(results.values())))
            for method in methods:
                figures = results.get(method, undefined)
                rows.append(
                    {
                        **(about or {}),
                        "size": format_size(size),
                        "height": size[0],
                        "width": size[1],
                        "train_size": format_size(train_size),
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


def evaluate(
    target: str | Path,
    *,
    data: str | None = None,
    root: str | None = None,
    split: str | None = None,
    sizes: str | Sequence[str] | None = None,
    extend: str | Sequence[str] | None = None,
    weights: str = "best",
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    position: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    crop_pct: float | None = None,
    batch_size: int | None = None,
    max_images: int | None = None,
    num_workers: int = 2,
    device: str = "auto",
    precision: str = "auto",
    seed: int | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> tuple[list[Row], list[Path]]:
    """Sweep a run folder or a timm model over sizes and extension methods; write tables and a figure.

    A run folder brings its data, normalisation, crop, sizes, methods and seed, which arguments override. A
    timm name takes normalisation and interpolation from its pretrained_cfg and keeps the whole short side
    (crop_pct 1.0); without `position` it is timm's own model, for which no method but "none" is defined.

    Args:
        data: elpv, folder:PATH or a timm dataset name; that of a run by default.
        split: name of the split; the validation split by default.
        extend: methods of context extension, as "none,yarn:beta_fast=16:beta_slow=2" or a list.
        weights: best, last or ema of a run folder.
        checkpoint: .safetensors weights for a timm name, of timm's model or of the one with `position`.
        pretrained: timm's weights for a timm name.
        position: position encoding that a timm name is converted to.
        model_options: keyword arguments for timm.create_model.
        max_images: judge by that many images, evenly spread; those of a run by default, else all.
        precision: auto, fp32 or bf16.
        seed: seed of a timm model's first weights where it gets no others.
        output: folder for the results; RUN/evaluation or evaluation-NAME by default.

    Returns the rows of `sweep` and the files written (under torchrun only by the first process).

    Raises: ValueError for a target that is neither, arguments that mean nothing for it, data with other
    classes.
    """
    folder = Path(target)
    is_run = (folder / "config.yaml").is_file()
    if folder.is_dir() and not is_run:
        raise ValueError(f"{folder} is not a run folder: it holds no config.yaml")
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct is {crop_pct}, but it must be above 0 and at most 1")
    for name, count in (("batch_size", batch_size), ("max_images", max_images)):
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}, but it must be at least 1")
    wanted_sizes = None if sizes is None else parse_sizes(sizes)
    wanted_methods = None if extend is None else check_methods(extend.split(",") if isinstance(extend, str) else extend)
    only_timm = {
        "checkpoint": checkpoint,
        "pretrained": pretrained,
        "position": position,
        "model options": model_options,
    }
    for name, value in only_timm.items():
        if is_run and value:
            raise ValueError(
                f"{name} is {value!r}, but {folder} is a run folder, which has its own model; leave it out"
            )
    if is_run and seed is not None:
        raise ValueError(f"seed is {seed}, but {folder} is a run folder, which has its own; leave it out")
    if not is_run and weights != "best":
        raise ValueError(f"weights is {weights!r}, but {target} is not a run folder; give checkpoint instead")
    if not is_run and data is None:
        raise ValueError(f"there is no run folder {target}; a timm model needs data, for instance folder:PATH")

    pictures: list[Path] = []
    with distributed(device) as process:
        if is_run:
            found = open_run(
                folder,
                data=choose_data(load_yaml(folder / "config.yaml").data, data, root, split),
                weights=weights,
                device=process.device,
                max_images=max_images,
            )
        else:
            found = open_timm(
                str(target),
                data=choose_data(DataConfig(), data, root, split),
                checkpoint=checkpoint,
                pretrained=pretrained,
                position=position,
                options=model_options,
                device=process.device,
                seed=seed or 0,
                max_images=max_images,
            )
        folder_out = Path(output or found.output)

        def draw(size: Size, meters: Mapping[str, Meter]) -> None:
            seen = {method: meter.first for method, meter in meters.items() if meter.first is not None}
            if not process.is_main or "none" not in seen:
                return
            outputs = {method: predictions for method, (_, predictions) in seen.items()}
            path = folder_out / f"reconstruction-{format_size(size)}.png"
            if picture := found.task.draw(seen["none"][0], outputs, path):
                pictures.append(picture)

        rows = sweep(
            found.model,
            found.dataset,
            task=found.task,
            sizes=wanted_sizes or parse_sizes(found.sizes or [format_size(found.train_size)]),
            methods=wanted_methods or found.methods,
            train_size=found.train_size,
            patch_size=_patch_size(found.model),
            device=process.device,
            mean=found.data.mean,
            std=found.data.std,
            batch_size=batch_size or found.batch_size,
            crop_pct=found.crop_pct if crop_pct is None else crop_pct,
            interpolation=found.data.interpolation,
            num_workers=num_workers,
            seed=found.seed,
            precision=precision,
            rank=process.rank,
            world_size=process.world_size,
            about=found.about,
            progress=progress,
            watch=draw,
        )
        if not process.is_main:
            return rows, []
        files = [*write_results(rows, folder_out), *pictures]
        for stale in set(folder_out.glob("reconstruction-*.png")) - set(files):
            stale.unlink()
        return rows, files


def _by_class(classes: Sequence[str], accuracies: Sequence[float] | None) -> dict[str, float | None] | None:
    if accuracies is None:
        return None
    return {str(name): _finite(accuracy) for name, accuracy in zip(classes, accuracies, strict=True)}


def _finite(value: Any) -> Any:
    """None for nan, which JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _extend(model: nn.Module, method: str, grid: Size) -> None:
    """Switch the method with its options; a model that no method means anything for has "none" already."""
    import vision_rope

    name, knobs = parse_extension(method)
    try:
        vision_rope.set_extension(model, name, train_size=grid, **knobs)
    except ValueError:
        if name != "none":
            raise


def _reason_against(model: nn.Module, method: str, grid: Size) -> str | None:
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


def _patch_size(model: nn.Module) -> Size:
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", 1)
    return (patch, patch) if isinstance(patch, int) else (int(patch[0]), int(patch[1]))


def choose_data(own: DataConfig, source: str | None, root: str | None, split: str | None) -> DataConfig:
    """The target's own data, or other data with the settings that belong to it."""
    chosen = own if source in (None, own.source) else DataConfig(source=str(source))
    return replace(chosen, root=root or chosen.root, val_split=split or chosen.val_split)
