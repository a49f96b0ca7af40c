"""What the frozen features of a run are worth: nearest neighbours and a linear classifier, the backbone untouched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import vision_rope
from vision_rope.checkpoint import build_model, load_run
from vision_rope.config import TrainConfig, load_yaml
from vision_rope.data import ImageSource, create_loader, eval_transform
from vision_rope.data.randomness import derive_seed, isolated_randomness
from vision_rope.evaluate import choose_data
from vision_rope.extension import check_name
from vision_rope.metrics import ClassificationMetrics
from vision_rope.parallel import choose_precision, distributed
from vision_rope.results import METRICS, UNTRAINED, Row, write_csv
from vision_rope.sizes import Size, check_sizes, format_size, largest_size, parse_size
from vision_rope.suggestion import did_you_mean
from vision_rope.targets import open_split

WEIGHTS = ("best", "last", "ema", UNTRAINED)
# Strengths of L2 that the linear probe chooses from, strongest first: each fit begins with the one before.
L2_STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Every fifth image of a class is held out for that choice.
HELD_OUT = 5
MAX_ITERATIONS = 1000
# Above this largest entry of the gradient the printed table says that the fit is not finished.
FINISHED = 1e-3
FIGURES = ("top1", "top5", "balanced_accuracy", "auroc", "nll", "ece")
# Numbers in an intermediate matrix (256 MiB in float64); a larger one is made in parts.
PART = 2**25


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of standardised features.

    Attributes:
        mean: (dim,), taken off the features.
        scale: (dim,), what they are then multiplied by; 0 for a feature that never changes.
        weight: (classes, dim).
        bias: (classes,).
        l2: the strength of L2 that it was fitted with.
        gradient: largest entry of the objective's gradient at this answer; 0 is the optimum.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    l2: float
    gradient: float

    def __call__(self, features: Tensor) -> Tensor:
        """Shapes: features (images, dim) -> logits (images, classes)."""
        return F.linear((features.to(self.mean.dtype) - self.mean) * self.scale, self.weight, self.bias)


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
        extend: context-extension method for that size.
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
    check_name(extend)
    _check_neighbours(k, temperature)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but it must be at least 1")
    config = load_yaml(folder / "config.yaml")
    own = config.data
    own_size = (own.size, own.size) if isinstance(own.size, int) else (own.size[0], own.size[1])
    chosen_size = own_size if size is None else parse_size(size)
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
        parts = [open_split(source, "train"), open_split(source, "validation")]
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
            _fit_to_size(backbone, chosen_size, train_size, extend)
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
    loader: Iterable[tuple[Tensor, ...]],
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
                features.append(model.forward_head(model.forward_features(images), pre_logits=True).float())
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


def knn_votes(
    train: Tensor, train_labels: Tensor, images: Tensor, num_classes: int, *, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Each class's share of the votes of an image's k nearest neighbours, weighted by exp(similarity / temperature).

    Shapes: train (n, dim), train_labels (n,), images (m, dim) -> (m, num_classes); rows add up to 1.
    Raises: ValueError where k is larger than n.
    Source: Wu et al. 2018, arXiv 1805.01978; as in DINO, arXiv 2104.14294.
    """
    _check_neighbours(k, temperature)
    if k > len(train):
        raise ValueError(f"k is {k}, but there are only {len(train)} training images; give fewer neighbours")
    train = F.normalize(train, dim=1)
    shares = []
    for part in F.normalize(images, dim=1).split(max(PART // len(train), 1)):
        similarities, places = (part @ train.T).topk(k, dim=1)
        # softmax is these weights divided by their sum, without the overflow of exp at low temperatures.
        votes = (similarities / temperature).softmax(dim=1)
        shares.append(votes.new_zeros(len(part), num_classes).scatter_add_(1, train_labels[places], votes))
    return torch.cat(shares)


def fit_linear(
    features: Tensor, labels: Tensor, num_classes: int, *, l2: float, start: LinearProbe | None = None
) -> LinearProbe:
    """Minimise mean cross entropy + l2 / 2 * |weight|^2 over standardised features with L-BFGS on all images at once.

    It computes in float64 (on MPS, which has none, in float32), a part of the images at a time.

    Args:
        l2: strength of L2; the bias has none.
        start: an answer that is near, to begin with. The objective is convex, so that it changes the time alone; a
            weak l2 without one may need more steps than MAX_ITERATIONS on separable classes, which `gradient` shows.

    Shapes: features (images, dim), labels (images,)
    Raises: ValueError where l2 is not positive.
    """
    if not l2 > 0:
        raise ValueError(f"l2 is {l2}, but it must be positive: without it separable classes have no optimum")
    device, dtype = features.device, torch.float32 if features.device.type == "mps" else torch.float64
    variance, mean = (part.to(dtype) for part in torch.var_mean(features, dim=0, correction=0))
    deviation = variance.sqrt()
    # What only rounding changes is a constant, and dividing by its deviation would make noise of it.
    scale = torch.where(deviation <= 1e-6 * mean.abs(), 0.0, 1 / deviation)
    rows = max(PART // max(num_classes, features.shape[1]), 1)

    def standardised() -> Iterator[tuple[Tensor, Tensor]]:
        for part, its_labels in zip(features.split(rows), labels.split(rows), strict=True):
            yield (part.to(dtype) - mean) * scale, its_labels

    def objective(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The value and its gradients for weight and bias."""
        value, weight_gradient, bias_gradient = l2 / 2 * weight.square().sum(), l2 * weight, torch.zeros_like(bias)
        for part, its_labels in standardised():
            log_probabilities = F.linear(part, weight, bias).log_softmax(dim=1)
            value = value + F.nll_loss(log_probabilities, its_labels, reduction="sum") / len(features)
            excess = log_probabilities.exp() / len(features)
            excess[torch.arange(len(part), device=device), its_labels] -= 1 / len(features)
            weight_gradient = weight_gradient + excess.T @ part
            bias_gradient = bias_gradient + excess.sum(dim=0)
        return value, weight_gradient, bias_gradient

    weight = torch.zeros(num_classes, features.shape[1], dtype=dtype, device=device) if start is None else start.weight
    bias = torch.zeros(num_classes, dtype=dtype, device=device) if start is None else start.bias
    # Features are correlated, which costs L-BFGS hundreds of steps. In coordinates in which the curvature, about
    # mean of p (1 - p) * covariance + l2, is the unit matrix, it needs tens.
    covariance = torch.zeros(2 * features.shape[1:], dtype=dtype, device=device)
    doubt = torch.zeros((), dtype=dtype, device=device)
    for part, _ in standardised():
        covariance += part.T @ part / len(features)
        probabilities = F.linear(part, weight, bias).softmax(dim=1)
        doubt += (probabilities * (1 - probabilities)).mean(dim=1).sum() / len(features)
    variances, directions = (found.to(device) for found in torch.linalg.eigh(covariance.cpu()))
    root = (doubt * variances.clamp(min=0) + l2).sqrt()
    bias_root = doubt.clamp(min=l2).sqrt()
    turn = (directions / root).T
    turned, scaled = weight @ directions * root, bias * bias_root

    def turned_objective() -> Tensor:
        value, weight_gradient, bias_gradient = objective(turned @ turn, scaled / bias_root)
        turned.grad, scaled.grad = weight_gradient @ turn.T, bias_gradient / bias_root
        return value

    optimizer = torch.optim.LBFGS(
        [turned, scaled],
        max_iter=MAX_ITERATIONS,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(turned_objective)
    weight, bias = turned @ turn, scaled / bias_root
    gradient = max(float(part.abs().max()) for part in objective(weight, bias)[1:])
    return LinearProbe(mean, scale, weight, bias, l2, gradient)


def fit_best(features: Tensor, labels: Tensor, num_classes: int, *, seed: int = 0) -> LinearProbe:
    """Fit with the strength of L2_STRENGTHS that gives held-out images, every fifth of a class, the best likelihood.

    Args:
        seed: of what is held out for the choice; the answer is fitted to all images.

    Raises: ValueError where no class has two images, of which one could be held out.
    """
    held_out = _hold_out(labels, seed)
    if not bool(held_out.any()):
        raise ValueError(
            "no class has two training images, so that none can be held out to choose the strength of L2; give more "
            "images"
        )
    kept, judge = (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])
    fits: list[LinearProbe] = []
    for l2 in L2_STRENGTHS:
        fits.append(fit_linear(*kept, num_classes, l2=l2, start=fits[-1] if fits else None))
    best = min(fits, key=lambda fit: float(F.cross_entropy(fit(judge[0]), judge[1])))
    return fit_linear(features, labels, num_classes, l2=best.l2, start=best)


def write_probe(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write probe.csv and probe.json (null for what is missing) into a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "probe.csv", folder / "probe.json"]
    write_csv(paths[0], rows)
    paths[1].write_text(json.dumps(list(rows), indent=2, allow_nan=False) + "\n", encoding="utf-8")
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


def _check_neighbours(k: int, temperature: float) -> None:
    if k < 1:
        raise ValueError(f"k is {k}, but at least 1 neighbour must vote")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but it must be positive")


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
    if isinstance(train, ImageSource) and k > len(train):
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


def _fit_to_size(backbone: nn.Module, size: Size, train_size: Size, method: str) -> None:
    """Refuse a size that the patch does not divide, and switch the extension."""
    height, width = backbone.patch_embed.patch_size  # type: ignore[union-attr, misc]
    check_sizes([size], (height, width))
    vision_rope.set_extension(backbone, method, train_size=(train_size[0] // height, train_size[1] // width))


def _hold_out(labels: Tensor, seed: int) -> Tensor:
    """True for every fifth image of a class in a random order, beginning with the second."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels.cpu()[order].argsort(stable=True)]
    counts = labels.cpu().bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[by_class] = rank % HELD_OUT == 1
    return chosen.to(labels.device)
