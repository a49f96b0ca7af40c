"""What an evaluation is about: a run folder or a timm model, with its data and its own settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vision_rope.checkpoint import load_run, load_strictly, load_weights
from vision_rope.config import CLIP_SOURCES, SEGMENTED_SOURCES, DataConfig, TrainConfig
from vision_rope.data import ClipSampling, open_dataset, take_evenly
from vision_rope.data.motion import list_speeds
from vision_rope.results import UNTRAINED
from vision_rope.rules import suggest_clips
from vision_rope.sizes import largest_size
from vision_rope.tasks import Classification, Playback, Task, create_task
from vision_rope.weight_metadata import adopt_pairing, warn_of_another_kind


@dataclass(frozen=True)
class Target:
    """A model with the data it is evaluated on and the settings it brings along.

    Attributes:
        model: the model, on its device.
        task: what it is judged by.
        dataset: pairs of a uint8 image (3, h, w), or a clip, and a label, with `classes`.
        data: where the images come from, interpolation, mean and std.
        about: facts for the tables: model, position, weights, data, split_seed.
        train_size: training size in pixels (rows, columns).
        output: folder for the results.
        sizes: sizes to evaluate where none are asked for; empty means the training size.
        frames: numbers of frames to evaluate clips at where none are asked for; empty means those of training.
        fps: rates likewise.
        methods: extension methods where none are asked for.
        crop_pct: the short side is resized to size / crop_pct before the centre crop.
        batch_size: images a forward pass.
        seed: seed of the training, or of the first weights where there was none.
    """

    model: nn.Module
    task: Task
    dataset: Any
    data: DataConfig
    about: dict[str, str | int]
    train_size: tuple[int, int]
    output: Path
    sizes: list[str] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    fps: list[float] = field(default_factory=list)
    methods: list[str] = field(default_factory=lambda: ["none"])
    crop_pct: float = 1.0
    batch_size: int = 64
    seed: int = 0


def open_run(
    folder: Path,
    *,
    data: DataConfig,
    weights: str,
    device: torch.device,
    max_images: int | None = None,
    skip_broken: bool = False,
) -> Target:
    """Open the model of a run folder on `data`, normalised and resized as in training.

    Args:
        skip_broken: leave out clips that cannot be read, whatever the run does with them.

    Raises: ValueError where the data has other classes than the run.
    """
    run = load_run(folder, weights=weights, device=device)
    own, settings = run.config.data, run.config.evaluation
    _check_kind(run.config, data.source)
    data = replace(data, interpolation=own.interpolation, mean=own.mean, std=own.std)
    made = replace(run.config, video=replace(run.config.video, broken="skip")) if skip_broken else run.config
    dataset = take_evenly(open_split(data, "validation", made), max_images or settings.max_images)
    if run.config.task == "classification":
        _check_classes(run.classes, list(dataset.classes), str(folder))
    patch_size = tuple(run.model.patch_embed.patch_size)  # type: ignore[union-attr, arg-type]
    task = create_task(run.config, len(run.classes), patch_size)
    if run.config.task == "motion" and not data.source.startswith("motion:"):
        task = Playback(list_speeds(run.config.motion), data.std)
    return Target(
        model=run.model,
        task=task,
        dataset=dataset,
        data=data,
        about={
            "model": run.config.model.name,
            "position": run.config.model.position,
            "weights": weights,
            "data": data.source,
            "split_seed": data.split_seed,
            **_describe_task(run.config),
        },
        # What training has seen of an axis is what extension counts from.
        train_size=largest_size(own),
        output=folder / "evaluation",
        sizes=settings.sizes,
        frames=settings.frames,
        fps=settings.fps,
        methods=settings.extend,
        crop_pct=settings.crop_pct,
        batch_size=settings.batch_size or run.config.batch_size,
        seed=run.config.seed,
    )


def open_timm(
    name: str,
    *,
    data: DataConfig,
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    position: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: torch.device,
    seed: int = 0,
    max_images: int | None = None,
) -> Target:
    """Build a timm model, converted to `position` where one is given, with the normalisation of its
    pretrained_cfg.

    Weights come from timm (`pretrained`), from a .safetensors file of timm's model or of the converted one
    (`checkpoint`), or from chance.

    Raises: ValueError for an unknown name or option, weights that do not fit, data with another number of
    classes.
    """
    import timm

    if not timm.is_model(name):
        nearest = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; the nearest timm model is {nearest[0]}" if nearest else ""
        raise ValueError(f"{name!r} is neither a run folder nor a timm model{hint}")
    if pretrained and checkpoint:
        raise ValueError("pretrained and checkpoint exclude each other; give one of them")
    known = timm.get_pretrained_cfg(name)
    settings = dataclasses.asdict(known) if known else {}
    data = replace(data, mean=tuple(settings.get("mean", data.mean)), std=tuple(settings.get("std", data.std)))
    if settings.get("interpolation") in ("bilinear", "bicubic"):
        data = replace(data, interpolation=settings["interpolation"])
    dataset = take_evenly(open_split(data, "validation"), max_images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build_timm(name, len(dataset.classes), pretrained, dict(options or {}))
        model = _load_and_convert(model, checkpoint, position)
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = built_for or settings.get("input_size", (3, 224, 224))[1:]
    return Target(
        model=model.to(device).eval(),
        task=Classification(len(dataset.classes)),
        dataset=dataset,
        data=data,
        about={
            "model": name,
            "position": position or "timm's own",
            "weights": Path(checkpoint).name if checkpoint else "pretrained" if pretrained else UNTRAINED,
            "data": data.source,
            "split_seed": data.split_seed,
        },
        train_size=(height, width),
        output=Path(f"evaluation-{name.replace('/', '-')}"),
        seed=seed,
    )


def _describe_task(config: TrainConfig) -> dict[str, str]:
    if config.task != "masked":
        return {}
    masked = config.masked
    return {"masked": f"{masked.ratio:g} of the patches, block {masked.block}, target {masked.target}"}


def _build_timm(name: str, num_classes: int, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    import timm

    if "num_classes" in options:
        raise ValueError("model options hold num_classes, but it comes from the data; take it out")
    # timm would give a pretrained model of other classes a random head without a word.
    fixed = options if pretrained else {**options, "num_classes": num_classes}
    try:
        try:
            model = timm.create_model(name, pretrained=pretrained, **fixed, dynamic_img_size=True)
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
            model = timm.create_model(name, pretrained=pretrained, **fixed)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be built with options {options}: {error}") from error
    if model.num_classes != num_classes:
        raise ValueError(
            f"{name} with its pretrained weights tells {model.num_classes} classes apart, but the data has "
            f"{num_classes}; evaluate it on the data it was trained for, or train it on this data"
        )
    return model


def _load_and_convert(model: nn.Module, checkpoint: str | Path | None, position: str | None) -> nn.Module:
    """Weights whose names are those of timm's model are loaded before the conversion, others after it.

    Those stored in another pairing than the model's are brought into it. An absolute embedding that was trained beside
    another encoding stays in the model; that of timm's model goes, as in every conversion.
    """
    import vision_rope

    state, metadata = load_weights(checkpoint) if checkpoint else (None, {})
    held = set(state or ())
    if state is not None and set(state) == set(model.state_dict()):
        load_strictly(model, state, str(checkpoint))
        state = None
    if position is not None:
        beside = metadata.get("position", "learned") != "learned" and "pos_embed" in held
        keeps = beside and position != "learned" and getattr(model, "pos_embed", None) is not None
        model = vision_rope.add_position(model, position, keep_absolute=keeps)
    warn_of_another_kind(model, metadata, str(checkpoint))
    if state is not None:
        load_strictly(model, state, str(checkpoint))
    adopt_pairing(model, metadata, str(checkpoint))
    return model


def open_split(data: DataConfig, split: Literal["train", "validation"], made: TrainConfig | None = None) -> Any:
    """Open one split of the data set that `data` names, as images or, where `made` is a run on clips, as its clips."""
    made = made or TrainConfig()
    video = made.video
    return open_dataset(
        data.source,
        split,
        root=data.root,
        train_split=data.train_split,
        val_split=data.val_split,
        val_fraction=data.val_fraction,
        split_seed=data.split_seed,
        download=data.download,
        sampling=None if video.num_frames is None else ClipSampling(video.num_frames, video.fps),
        skip_broken=video.broken == "skip",
        decoder=video.decoder,
        motion=made.motion,
        objects=made.objects,
        size=largest_size(data),
    )


def _check_kind(config: TrainConfig, source: str) -> None:
    """Refuse images for a run on clips, clips for a run on images, and objects for a run that follows none."""
    gives_objects = source.partition(":")[0] in SEGMENTED_SOURCES
    if config.task == "segmentation" and not gives_objects:
        names = ", ".join(f"{name}:" for name in SEGMENTED_SOURCES)
        raise ValueError(f"the run follows objects, but {source} has no masks of objects; choose {names}")
    if config.task != "segmentation" and gives_objects:
        raise ValueError(f"{source} gives clips with the masks of objects, for runs of task segmentation alone")
    if config.task == "segmentation":
        return
    gives_clips = source.partition(":")[0] in CLIP_SOURCES
    if config.video.num_frames is not None and not gives_clips:
        names = ", ".join(f"{name}:" for name in CLIP_SOURCES)
        raise ValueError(f"the run looks at clips, but {source} gives images; choose {names}{suggest_clips(source)}")
    if config.video.num_frames is None and gives_clips:
        raise ValueError(f"the run looks at images, but {source} gives clips; give a source of images")


def _check_classes(own: Sequence[str], found: Sequence[str], name: str) -> None:
    if len(own) != len(found):
        raise ValueError(f"{name} tells {len(own)} classes apart, but the data has {len(found)}; give other data")
    for mine, theirs in zip(own, found, strict=True):
        if mine != theirs:
            raise ValueError(
                f"{name} was trained on other classes than the data has: {mine!r} there is {theirs!r} here; rename "
                "the classes of the data or give other data"
            )
