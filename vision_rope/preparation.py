"""What a run starts from: loaders, the model with its first weights, and refusals of what cannot work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from vision_rope import first_weights
from vision_rope.config import TrainConfig
from vision_rope.model_building import build_model
from vision_rope.parallel import Distributed
from vision_rope.points import Point, check_fps, check_frames, create_points
from vision_rope.sizes import check_sizes, format_size, largest_size, parse_sizes, pixel_size, training_sizes
from vision_rope.tasks import create_task

if TYPE_CHECKING:
    from vision_rope.data import DeviceLoader


def create_loaders(config: TrainConfig, world: Distributed) -> tuple[list[str], DeviceLoader, DeviceLoader]:
    """Open the data set; returns the names of its classes and the loaders of both splits.

    Raises:
        ValueError: for a source that cannot be opened and batches that cannot be made from it.
    """
    from vision_rope import data
    from vision_rope.targets import open_split

    section, augment = config.data, config.augment
    evaluation_batch = config.evaluation.batch_size or config.batch_size
    if config.batch_size % world.world_size:
        raise ValueError(
            f"batch_size is {config.batch_size}, but {world.world_size} processes must share it evenly; "
            f"give a multiple of {world.world_size}"
        )
    train_set, val_set = open_split(section, "train", config), open_split(section, "validation", config)
    val_set = data.take_evenly(val_set, config.evaluation.max_images)
    if list(train_set.classes) != list(val_set.classes):
        raise ValueError(f"data.source {section.source}: the splits have different classes")
    has_ids = config.task == "segmentation"
    create_train: Callable[..., Any] = data.segmented_train_transform if has_ids else data.train_transform
    create_eval: Callable[..., Any] = data.segmented_eval_transform if has_ids else data.eval_transform
    train_transform = create_train(
        largest_size(section),
        crop=augment.crop,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        vflip=augment.vflip,
        dihedral=augment.dihedral,
        three_augment=augment.three_augment,
        color_jitter=augment.color_jitter,
        interpolation=section.interpolation,
    )
    eval_transform = create_eval(section.size, crop_pct=config.evaluation.crop_pct, interpolation=section.interpolation)
    train_loader, val_loader = (
        data.create_loader(
            dataset,
            batch_size=batch_size,
            transform=transform,
            device=world.device,
            training=training,
            num_workers=config.run.num_workers,
            mean=section.mean,
            std=section.std,
            seed=config.seed,
            rank=world.rank,
            world_size=world.world_size,
            erasing=augment.erasing if training else 0.0,
            with_indices=True,
        )
        for dataset, batch_size, transform, training in (
            (train_set, config.batch_size, train_transform, True),
            (val_set, evaluation_batch, eval_transform, False),
        )
    )
    return list(train_set.classes), train_loader, val_loader


def count_classes(config: TrainConfig) -> int:
    """Number of classes of the data set that a configuration names.

    Raises:
        ValueError: for a source that cannot be opened.
    """
    from vision_rope.targets import open_split

    return len(open_split(config.data, "train", config).classes)


def build_start(config: TrainConfig, num_classes: int) -> nn.Module:
    """Create the model with its first weights: fresh, timm's, or those of `model.checkpoint`."""
    if config.model.checkpoint is None:
        return build_model(config, num_classes)
    if config.model.pretrained:
        raise ValueError("model.pretrained and model.checkpoint exclude each other; give one of them")
    model = build_model(config, num_classes)
    first_weights.load_start(model, config.model.checkpoint)
    return model


def divisor_of(model: nn.Module) -> tuple[int, int]:
    """What the height and the width of pictures are multiples of: the patch, of a segmenter its stride."""
    whole: Any = model
    if (stride := getattr(model, "stride", None)) is not None:
        return stride, stride
    height, width = whole.patch_embed.patch_size
    return height, width


def check_sweep(config: TrainConfig, model: nn.Module) -> None:
    """Refuse sizes, frames and rates that the model or the task cannot take, and unknown extension methods."""
    embed: Any = getattr(model, "patch_embed", None)
    patch_size = divisor_of(model)
    own_size: Any = tuple(embed.img_size) if getattr(embed, "strict_img_size", False) else None
    settings = config.evaluation
    named = {
        "data.size": [pixel_size(config.data.size)],
        "data.train_sizes": training_sizes(config.data) if config.data.train_sizes else [],
        "evaluation.sizes": parse_sizes(settings.sizes) if settings.sizes else [],
    }
    _check_evaluation(config, patch_size)
    task = create_task(config, 2, patch_size)
    for key, sizes in named.items():
        try:
            check_sizes(sizes, patch_size)
            frames: list[Any] = [config.video.num_frames]
            if key == "evaluation.sizes" and settings.frames:
                frames = settings.frames
            for point in create_points(sizes, frames, [None]):
                task.check_size(point.lengths)
                # The sweep fits a copy of the model to each of its sizes.
                if key != "evaluation.sizes" and own_size not in (None, point.size):
                    raise ValueError(
                        f"size {format_size(point.size)} is not that of {config.model.name}, which takes images of "
                        f"{format_size(own_size)} pixels alone; train at that size"
                    )
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error


def _check_evaluation(config: TrainConfig, patch_size: tuple[int, ...]) -> None:
    from vision_rope.sweep import check_methods, refuse_frames, train_grid

    video, settings = config.video, config.evaluation
    try:
        if video.num_frames is None:
            refuse_frames(settings.frames, settings.fps)
        if (settings.frames or settings.fps) and not settings.sizes:
            raise ValueError(
                "frames and fps would have no effect without sizes, which skips the sweep; give some sizes"
            )
        check_frames(settings.frames, video.tubelet)
        check_fps(settings.fps)
        if settings.sizes and len(check_methods(settings.extend)) > 1 and video.num_frames is not None:
            trained = Point(largest_size(config.data), video.num_frames, video.fps)
            train_grid(trained, (video.tubelet, *patch_size), video.positions_per_second)
    except ValueError as error:
        raise ValueError(f"evaluation: {error}") from error
