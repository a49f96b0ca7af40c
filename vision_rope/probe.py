"""What the frozen features of a run are worth: nearest neighbours and a linear classifier, the backbone untouched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import vision_rope
from vision_rope.checkpoint import load_run, write_whole
from vision_rope.config import TrainConfig, VideoConfig, load_yaml
from vision_rope.data import IterableSource, create_loader, eval_transform
from vision_rope.data.randomness import derive_seed, isolated_randomness
from vision_rope.evaluate import choose_data
from vision_rope.extension_text import parse_extension
from vision_rope.feature_classifiers import check_neighbours, fit_best, knn_votes
from vision_rope.metrics import ClassificationMetrics
from vision_rope.model_building import build_model
from vision_rope.parallel import choose_precision, distributed
from vision_rope.points import Point
from vision_rope.results import METRICS, UNTRAINED, Row, write_csv
from vision_rope.sizes import Size, check_sizes, format_size, largest_size, parse_size, pixel_size
from vision_rope.suggestion import did_you_mean
from vision_rope.sweep import train_grid
from vision_rope.targets import open_split

WEIGHTS = ("best", "last", "ema", UNTRAINED)
# Above this largest entry of the gradient the printed table says that the fit is not finished.
FINISHED = 1e-3
FIGURES = ("top1", "top5", "balanced_accuracy", "auroc", "nll", "ece")


def probe(
    folder: str | Path,
    *,
    data: str | None = None,
    root: str | None = None,
    size: str | None = None,
    extend: str = "none",
    weights: str | Sequence[str] = "best",
    k: int = 20,
    temperature: float = 0.07,
    batch_size: int | None = None,
    num_workers: int = 2,
    device: str = "auto",
    precision: str = "auto",
    progress: bool = True,
) -> list[Row]:
    """Classify the validation images of a data set by the frozen features of a run.

    Features are what the backbone hands to its classifier, pooled (of a masked run those of its encoder), of images
    resized and normalised as in the run's evaluation, without augmentation.

    Args:
        folder: a run folder, of any task.
        data: labelled data, elpv, folder:PATH or a timm dataset name; its classes need not be those of the run. That
            of the run by default.
        root: folder that timm dataset names are looked up in.
        size: image size in pixels, "224" or "192x256"; the run's data.size by default.
        extend: context-extension method for that size, with options as in yarn:beta_fast=16.
        weights: best, last, ema, or untrained: the first weights that the run's seed gives. Several, as a list or
            divided by commas, are compared on the same images.
        k: number of neighbours.
        temperature: a neighbour votes with exp(cosine similarity / temperature).
        batch_size: images a forward pass; that of the run's evaluation by default.
        precision: of the backbone: auto, fp32 or bf16.

    Returns two rows for each of the weights, `probe` "knn" and "linear", with facts and metrics.

    Raises: ValueError for data without at least two classes, a folder without these weights, a method or a size that
        the model cannot follow, more neighbours than training images, and more than one process.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not a run folder: it holds no config.yaml")
    chosen_weights = _read_weights(weights)
    parse_extension(extend)
    check_neighbours(k, temperature)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but it must be at least 1")
    config = load_yaml(folder / "config.yaml")
    if config.task == "segmentation":
        raise ValueError(
            f"{folder} is a run of task segmentation, whose clips have no classes to be told; evaluate it on videos: "
            f"vision-rope evaluate {folder} --data davis:PATH"
        )
    own = config.data
    chosen_size = pixel_size(own.size) if size is None else parse_size(size)
    # What training has seen of an axis is what extension counts from.
    train_size = largest_size(own)
    if extend != "none" and chosen_size == train_size:
        raise ValueError(
            f"extend is {extend!r}, but at the training size {format_size(train_size)} no method changes anything; "
            "give another size or leave it out"
        )
    source = replace(choose_data(own, data, root, None), interpolation=own.interpolation, mean=own.mean, std=own.std)
    rows = []
    with distributed(device) as process:
        if process.world_size > 1:
            raise ValueError(
                f"probe was started as {process.world_size} processes, but it needs all features in one; start it "
                "without torchrun"
            )
        parts = [open_split(source, "train", config), open_split(source, "validation", config)]
        classes = _check_data(source.source, parts, k)
        loaders = [
            create_loader(
                part,
                batch_size=batch_size or config.evaluation.batch_size or config.batch_size,
                transform=eval_transform(
                    chosen_size, crop_pct=config.evaluation.crop_pct, interpolation=own.interpolation
                ),
                device=process.device,
                training=False,
                num_workers=num_workers,
                mean=own.mean,
                std=own.std,
            )
            for part in parts
        ]
        backbones = {
            name: _load_backbone(folder, config, name, len(classes), process.device) for name in chosen_weights
        }
        for backbone in backbones.values():
            _fit_to_size(backbone, chosen_size, train_size, extend, config.video)
        for name, backbone in backbones.items():
            train, validation = (
                extract_features(
                    backbone, loader, precision=precision, description=f"{name}, {split}" if progress else None
                )
                for loader, split in zip(loaders, ("train", "validation"), strict=True)
            )
            about = {
                "run": str(folder),
                "task": config.task,
                "model": config.model.name,
                "position": config.model.position,
                "weights": name,
                "data": source.source,
                "split_seed": source.split_seed,
                "classes": len(classes),
                "train_images": len(train[0]),
                "images": len(validation[0]),
                "size": format_size(chosen_size),
                "train_size": format_size(train_size),
                "method": extend,
                "crop_pct": config.evaluation.crop_pct,
                "seed": config.seed,
                "features": train[0].shape[1],
            }
            judged = probe_features(
                train, validation, len(classes), k=k, temperature=temperature, seed=source.split_seed
            )
            rows += [{**about, **row} for row in judged]
    return rows


def probe_features(
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    num_classes: int,
    *,
    k: int = 20,
    temperature: float = 0.07,
    seed: int = 0,
) -> list[Row]:
    """Classify validation features by training features; a row for each of the two ways.

    Args:
        seed: of the training images that are held out to choose the strength of L2.

    Shapes: train and validation: features (images, dim), labels int64 (images,)
    Raises: ValueError for labels outside of the classes, and more neighbours than training images.
    """
    for _, labels in (train, validation):
        outside = labels[(labels < 0) | (labels >= num_classes)]
        if len(outside):
            raise ValueError(
                f"labels hold {int(outside[0])}, outside the {num_classes} classes 0..{num_classes - 1}; a probe needs "
                "splits with labels"
            )
    images, labels = validation
    settings: Row = dict.fromkeys(("k", "temperature", "l2", "gradient"))
    votes = knn_votes(*train, images, num_classes, k=k, temperature=temperature)
    # Shares of votes are no calibrated probabilities: what is said of those is left out. As logarithms even the small
    # ones keep their rank.
    ranking = ("top1", "balanced_accuracy", "auroc")
    figures = _judge(votes.clamp(min=torch.finfo(votes.dtype).tiny).log(), labels, ranking)
    knn = {"probe": "knn", **settings, "k": k, "temperature": temperature, **figures}
    linear = fit_best(*train, num_classes, seed=seed)
    figures = _judge(linear(images), labels, FIGURES)
    return [knn, {"probe": "linear", **settings, "l2": linear.l2, "gradient": linear.gradient, **figures}]


def extract_features(
    backbone: nn.Module,
    loader: Iterable[tuple[Any, ...]],
    *,
    precision: str = "fp32",
    description: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What a timm backbone hands to its classifier, for all images of a loader, in float32 on the device.

    Args:
        description: of a progress bar; None shows none.

    Shapes: -> features (images, dim), labels int64 (images,)
    Raises: ValueError for features that are not finite.
    """
    model: Any = backbone
    device = next(model.parameters()).device
    dtype = choose_precision(precision, device)
    training = model.training
    features, labels = [], []
    try:
        model.eval()
        for images, its_labels, *_ in tqdm(loader, desc=description, unit="batch", disable=description is None or None):
            with torch.inference_mode(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                tokens = (
                    model.forward_features(images) if isinstance(images, Tensor) else model.forward_features(*images)
                )
                features.append(model.forward_head(tokens, pre_logits=True).float())
            labels.append(its_labels)
    finally:
        model.train(training)
    # Outside of inference mode: gradients may flow through the copy that this makes.
    whole = torch.cat(features)
    wrong = int((~whole.isfinite()).any(dim=1).sum())
    if wrong:
        raise ValueError(
            f"features are not finite (NaN or infinite) for {wrong} of {len(whole)} images; the weights are damaged, "
            "the training diverged or the precision is too low"
        )
    return whole, torch.cat(labels)


def write_probe(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write probe.csv and probe.json (null for what is missing) into a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "probe.csv", folder / "probe.json"]
    write_csv(paths[0], rows)
    write_whole(paths[1], (json.dumps(list(rows), indent=2, allow_nan=False) + "\n").encode())
    return paths


def format_probe(rows: Sequence[Row]) -> str:
    """The rows as an aligned table for a terminal, under the facts that they share."""
    facts = (
        *("run", "task", "model", "position", "data", "train_images", "images", "size", "train_size", "method"),
        *("crop_pct", "features", "k", "temperature", "seed", "split_seed"),
    )
    lines = []
    for fact in facts:
        values = dict.fromkeys(str(row[fact]) for row in rows if row[fact] is not None)
        lines.append(f"{fact.replace('_', ' '):<13}{'; '.join(values)}")
    shown = {key: METRICS[key] for key in FIGURES if any(row[key] is not None for row in rows)}
    cells = [["weights", "probe", *shown.values(), "L2"]]
    for row in rows:
        figures = ["-" if row[key] is None else f"{row[key]:.3f}" for key in shown]
        cells.append([row["weights"], row["probe"], *figures, "-" if row["l2"] is None else f"{row['l2']:g}"])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines.append("")
    for line in cells:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right))
    unfinished = [row for row in rows if (row["gradient"] or 0) > FINISHED]
    lines += [
        f"NOT AT THE OPTIMUM: the linear probe of {row['weights']} stopped with a gradient of {row['gradient']:.1g}"
        for row in unfinished
    ]
    return "\n".join(lines)


def _judge(logits: Tensor, labels: Tensor, keys: Sequence[str]) -> Row:
    """Those metrics of logits; None for the other ones, and for what has no value."""
    metrics = ClassificationMetrics(logits.shape[1], logits.device)
    metrics.update(logits, labels)
    found: Row = metrics.compute()
    values = {key: found[key] for key in keys if key in found and math.isfinite(found[key])}
    return {key: values.get(key) for key in FIGURES}


def _read_weights(weights: str | Sequence[str]) -> list[str]:
    names = weights.split(",") if isinstance(weights, str) else list(weights)
    for name in names:
        if name not in WEIGHTS:
            raise ValueError(f"weights is {name!r}, but it must be {', '.join(WEIGHTS)}{did_you_mean(name, WEIGHTS)}")
    if not names:
        raise ValueError(f"weights is empty; give {', '.join(WEIGHTS)}")
    return list(dict.fromkeys(names))


def _check_data(source: str, parts: Sequence[Any], k: int) -> list[str]:
    """The classes of the data; refused is what cannot be probed, before any image is read."""
    train, validation = parts
    classes = list(train.classes)
    if len(classes) < 2:
        raise ValueError(
            f"data {source} has {len(classes)} class ({', '.join(classes)}), but a probe needs labels of at least two; "
            "give labelled data, for instance folder:PATH"
        )
    if classes != list(validation.classes):
        raise ValueError(f"data {source}: the splits have different classes")
    if not isinstance(train, IterableSource) and k > len(train):
        raise ValueError(f"k is {k}, but {source} has only {len(train)} training images; give fewer neighbours")
    return classes


def _load_backbone(
    folder: Path, config: TrainConfig, weights: str, num_classes: int, device: torch.device
) -> nn.Module:
    """The model of a run, or the encoder of a masked one; untrained as the run's seed builds it."""
    if weights == UNTRAINED:
        with isolated_randomness(derive_seed(config.seed)):
            model = build_model(config, num_classes, pretrained=False).to(device).eval()
    else:
        model = load_run(folder, weights=weights, device=device).model
    return model.encoder if config.task == "masked" else model  # type: ignore[return-value]


def _fit_to_size(backbone: nn.Module, size: Size, train_size: Size, method: str, video: VideoConfig) -> None:
    """Refuse a size that the patch does not divide, and switch the extension."""
    height, width = backbone.patch_embed.patch_size  # type: ignore[union-attr, misc]
    check_sizes([size], (height, width))
    name, knobs = parse_extension(method)
    patch = (height, width) if video.num_frames is None else (video.tubelet, height, width)
    speed = None if name == "none" else video.positions_per_second
    grid = train_grid(Point(train_size, video.num_frames, video.fps), patch, speed)
    vision_rope.set_extension(backbone, name, train_size=grid, **knobs)
