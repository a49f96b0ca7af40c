"""What no run could use: rules that the values of a configuration must keep."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

from vision_rope import flags
from vision_rope.config import CLIP_SOURCES, SEGMENTED_SOURCES, TrainConfig

# A segmenter looks at one frame after the other, and is judged on whole videos.
WITHOUT_EFFECT_ON_SEGMENTATION = [
    *(f"video.{name}" for name in ("fps", "tubelet", "attention", "causal", "positions_per_second")),
    *(f"evaluation.{name}" for name in ("sizes", "frames", "fps", "extend")),
    "optimizer.layer_decay",
]

SEGMENTER_WIDTHS = ("dim", "memory_dim", "depth", "mlp_dim", "num_heads")
SEGMENTER_WEIGHTS = ("bce", "focal", "dice", "quality", "presence")
# Keys of clips of objects that any source follows, and those that davis:PATH alone does.
OBJECTS_OF_ALL = ("objects.num_objects",)
OBJECTS_OF_DAVIS = ("objects.stride", "objects.reverse", "objects.clips_per_video")
MOVEMENTS = ("speed", "turn", "growth", "elastic", "drift")
CHANCES = ("regions", "look_alikes", "occluders", "hide", "blur")


def check_config(config: TrainConfig) -> None:
    """Refuse values that no run could use.

    Raises:
        ValueError: naming the key, its value and the rule.
    """
    rules = [
        ("seed", config.seed >= 0, "must not be negative"),
        ("batch_size", config.batch_size >= 1, "must be at least 1"),
        (
            "model.attention_options",
            config.model.attention == "linear" or not config.model.attention_options,
            "would have no effect with model.attention softmax; leave it out",
        ),
        (
            "ema_decay",
            config.ema_decay is None or 0 < config.ema_decay < 1,
            "must be none or between 0 and 1",
        ),
        ("data.val_fraction", 0 < config.data.val_fraction < 1, "must lie between 0 and 1"),
        ("data.std", min(config.data.std) > 0, "must be positive"),
        ("loss.label_smoothing", 0 <= config.loss.label_smoothing < 1, "must be at least 0 and below 1"),
        ("optimizer.lr", config.optimizer.lr > 0, "must be positive"),
        ("optimizer.weight_decay", config.optimizer.weight_decay >= 0, "must not be negative"),
        ("optimizer.accumulate", config.optimizer.accumulate >= 1, "must be at least 1"),
        (
            "optimizer.clip_grad",
            config.optimizer.clip_grad is None or config.optimizer.clip_grad > 0,
            "must be positive; none switches clipping off",
        ),
        (
            "optimizer.layer_decay",
            config.optimizer.layer_decay is None or 0 < config.optimizer.layer_decay <= 1,
            "must be above 0 and at most 1; none switches it off",
        ),
        ("schedule.epochs", config.schedule.epochs >= 1, "must be at least 1"),
        (
            "schedule.warmup_epochs",
            0 <= config.schedule.warmup_epochs < config.schedule.epochs,
            f"must be at least 0 and below schedule.epochs = {config.schedule.epochs}",
        ),
        (
            "schedule.warmup_lr",
            0 <= config.schedule.warmup_lr <= config.optimizer.lr,
            f"must lie between 0 and optimizer.lr = {config.optimizer.lr}",
        ),
        (
            "schedule.min_lr",
            0 <= config.schedule.min_lr <= config.optimizer.lr,
            f"must lie between 0 and optimizer.lr = {config.optimizer.lr}",
        ),
        ("evaluation.crop_pct", 0 < config.evaluation.crop_pct <= 1, "must be above 0 and at most 1"),
        ("evaluation.every", config.evaluation.every >= 1, "must be at least 1"),
        (
            "evaluation.batch_size",
            config.evaluation.batch_size is None or config.evaluation.batch_size >= 1,
            "must be at least 1; none takes batch_size",
        ),
        (
            "evaluation.max_images",
            config.evaluation.max_images is None or config.evaluation.max_images >= 1,
            "must be at least 1; none takes all",
        ),
        ("run.num_workers", config.run.num_workers >= 0, "must not be negative"),
        (
            "run.resume",
            not (config.run.resume and config.run.output is None),
            "needs run.output, the folder of the run to go on with",
        ),
        (
            "run.resume",
            not (config.run.resume and config.run.overwrite),
            "excludes run.overwrite; give one of them",
        ),
    ]
    rules += [
        (f"augment.{name}", 0 <= getattr(config.augment, name) <= 1, "is a probability: 0 to 1")
        for name in ("hflip", "vflip", "erasing", "mixup_prob", "mixup_switch_prob")
    ]
    rules += [
        (f"augment.{name}", getattr(config.augment, name) >= 0, "must not be negative; 0 switches it off")
        for name in ("mixup", "cutmix", "color_jitter")
    ]
    rules += _video_rules(config) + _task_rules(config)
    for key, holds, rule in rules:
        if not holds:
            raise ValueError(f"{key} is {flags.get(config, key)}, but it {rule}")


def suggest_clips(source: str) -> str:
    """End of a message about a data source that gives no clips: the source that may have been meant, or nothing."""
    prefix, colon, path = source.partition(":")
    if not colon:
        return f"; did you mean videos:{source}?" if Path(source).expanduser().exists() else ""
    near = difflib.get_close_matches(prefix, CLIP_SOURCES, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}:{path}?" if near else ""


def _word(value: Any) -> str:
    """A value as configurations have it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _video_rules(config: TrainConfig) -> list[tuple[str, bool, str]]:
    """Rules of clips; without them the section video would have no effect."""
    video, fresh = config.video, TrainConfig()
    gives_clips = config.data.source.partition(":")[0] in (*CLIP_SOURCES, *SEGMENTED_SOURCES)
    clip_sources = ", ".join(f"{source}:" for source in CLIP_SOURCES)
    if video.num_frames is None:
        keys = [key for key in flags.leaves(TrainConfig) if key.startswith("video.") and key != "video.num_frames"]
        return [
            ("data.source", not gives_clips, "gives clips, which need video.num_frames: the frames of one"),
            *(
                (key, flags.get(config, key) == flags.get(fresh, key), "would have no effect without video.num_frames")
                for key in keys
            ),
        ]
    return [
        ("video.num_frames", video.num_frames >= 1, "must be at least 1; none trains on images"),
        ("video.tubelet", video.tubelet >= 1, "must be at least 1"),
        (
            "video.num_frames",
            video.tubelet < 1 or video.num_frames % video.tubelet == 0 or config.task == "segmentation",
            f"must be a multiple of video.tubelet = {video.tubelet}, the frames of a step",
        ),
        (
            "video.fps",
            video.fps is None or 0 < video.fps < math.inf,
            "must be positive: frames a second; none takes every frame",
        ),
        (
            "video.positions_per_second",
            video.positions_per_second is None or 0 < video.positions_per_second < math.inf,
            "must be positive; none counts steps",
        ),
        (
            "data.source",
            # Following objects has a rule of its own.
            gives_clips or config.task == "segmentation",
            f"gives images, and video.num_frames = {video.num_frames} needs clips; choose {clip_sources} or leave "
            f"video.num_frames out{suggest_clips(config.data.source)}",
        ),
        (
            "video.decoder",
            video.decoder == "pyav" or config.data.source.startswith("videos:"),
            f"would have no effect with data.source {config.data.source}, which has no video files; leave it out",
        ),
        (
            "video.decoder",
            video.decoder != "nvdec" or (config.run.num_workers == 0 and config.run.device in ("auto", "cuda")),
            "takes run.num_workers 0, since loader processes cannot use a GPU, and a run.device of cuda",
        ),
        (
            "model.attention",
            config.model.attention == "softmax",
            "is not there for clips; leave it out (video.attention: factorised is the faster one)",
        ),
    ]


def _task_rules(config: TrainConfig) -> list[tuple[str, bool, str]]:
    """Rules of the task: what belongs to another one would have no effect."""
    masked, motion, fresh = config.masked, config.motion, TrainConfig()
    others = {"loss": "classification", "masked": "masked", "segmenter": "segmentation", "objects": "segmentation"}
    without_effect = [
        key for key in flags.leaves(TrainConfig) if others.get(key.partition(".")[0], config.task) != config.task
    ]
    if config.task != "classification":
        without_effect += ["augment.mixup", "augment.cutmix"]
    rules = []
    if config.task == "masked":
        without_effect += ["optimizer.layer_decay"]
        if masked.encoder == "all":
            without_effect += ["masked.decoder_dim", "masked.decoder_depth", "masked.decoder_heads"]
        rules += [
            ("masked.ratio", 0 < masked.ratio < 1, "must lie between 0 and 1"),
            ("masked.block", masked.block >= 1, "must be at least 1"),
            (
                "masked.block_steps",
                config.video.num_frames is not None or masked.block_steps == 1,
                "counts steps of clips, and images have none; leave it out or give video.num_frames",
            ),
        ]
        rules += [
            (
                f"masked.{name}",
                getattr(masked, name) is None or getattr(masked, name) >= 1,
                "must be at least 1, or none",
            )
            for name in ("block_steps", "decoder_dim", "decoder_depth", "decoder_heads")
        ]
    if config.data.source.startswith("motion:"):
        rules += [
            ("motion.num_speeds", motion.num_speeds >= 2, "must be at least 2"),
            ("motion.slowest", motion.slowest > 0, "must be positive"),
            ("motion.fastest", motion.fastest > motion.slowest, f"must be above motion.slowest = {motion.slowest}"),
            ("motion.object_size", 0 < motion.object_size[0] <= motion.object_size[1] <= 1, "must rise within 0 to 1"),
            ("motion.background", 0 <= motion.background <= 1, "is a share of the brightness: 0 to 1"),
            ("motion.size", motion.size >= 16, "must be at least 16 pixels"),
        ]
    else:
        rules += [
            (
                key,
                flags.get(config, key) == flags.get(fresh, key),
                f"would have no effect with data.source {config.data.source}; leave it out or give motion:SOURCE",
            )
            for key in flags.leaves(TrainConfig)
            if key.startswith("motion.")
        ]
    if config.task == "motion":
        rules += _motion_rules(config)
    if config.task == "segmentation":
        without_effect += WITHOUT_EFFECT_ON_SEGMENTATION
    rules += _segmentation_rules(config) + _objects_rules(config)
    about = f"task {config.task}" + (f", masked.encoder {masked.encoder}" if config.task == "masked" else "")
    rules += [
        (
            key,
            flags.get(config, key) == flags.get(fresh, key),
            f"would have no effect with {about}; set {key} to {_word(flags.get(fresh, key))}",
        )
        for key in without_effect
    ]
    return rules


def _motion_rules(config: TrainConfig) -> list[tuple[str, bool, str]]:
    """Rules of task motion: it needs frames, and pictures that no augmentation turns or stretches."""
    augment = config.augment
    turns = "would turn the direction that is to be told; with task motion it must be"
    return [
        (
            "data.source",
            config.data.source.startswith("motion:"),
            "has no motion that is known; task motion trains on motion:SOURCE, for instance motion:folder:PATH",
        ),
        (
            "video.num_frames",
            config.video.num_frames is not None and config.video.num_frames >= 2,
            "must be at least 2 with task motion",
        ),
        ("augment.hflip", augment.hflip == 0, f"{turns} 0"),
        ("augment.vflip", augment.vflip == 0, f"{turns} 0"),
        ("augment.dihedral", not augment.dihedral, f"{turns} false"),
        (
            "augment.crop",
            augment.crop != "random-resized",
            "would change the speed that is to be told; with task motion it must be resize or simple",
        ),
    ]


def _segmentation_rules(config: TrainConfig) -> list[tuple[str, bool, str]]:
    """Rules of task segmentation, and of the clips that it takes alone."""
    section, source = config.segmenter, config.data.source
    sources = ", ".join(f"{name}:" for name in SEGMENTED_SOURCES)
    gives_objects = source.partition(":")[0] in SEGMENTED_SOURCES
    if config.task != "segmentation":
        return [
            ("data.source", not gives_objects, "gives clips with the masks of objects, for task segmentation alone")
        ]
    return [
        ("data.source", gives_objects, f"has no masks of objects, which task segmentation needs; choose {sources}"),
        (
            "video.num_frames",
            config.video.num_frames is not None and config.video.num_frames >= 2,
            "must be at least 2 with task segmentation: one that shows the objects and one to find them in",
        ),
        ("augment.erasing", config.augment.erasing == 0, "would hide objects that are to be found; set it to 0"),
        *((f"segmenter.{name}", getattr(section, name) >= 1, "must be at least 1") for name in SEGMENTER_WIDTHS),
        ("segmenter.num_masks", section.num_masks >= 0, "must not be negative"),
        ("segmenter.dropout", 0 <= section.dropout < 1, "must be at least 0 and below 1"),
        ("segmenter.mask_prompts", 0 <= section.mask_prompts <= 1, "is a share: 0 to 1"),
        (
            "segmenter.box_prompts",
            0 <= section.box_prompts <= 1 - section.mask_prompts,
            f"is a share of what segmenter.mask_prompts = {section.mask_prompts:g} leaves",
        ),
        *((f"segmenter.{name}", getattr(section, name) >= 0, "must not be negative") for name in SEGMENTER_WEIGHTS),
        (
            "segmenter.dice",
            section.bce + section.focal + section.dice > 0,
            "must be positive where segmenter.bce and segmenter.focal are 0",
        ),
    ]


def _objects_rules(config: TrainConfig) -> list[tuple[str, bool, str]]:
    """Rules of clips of objects: what belongs to the other kind of source would have no effect."""
    objects, fresh = config.objects, TrainConfig()
    if config.task != "segmentation":
        return []
    kind = config.data.source.partition(":")[0]
    least, most = objects.object_size
    rules = [
        ("objects.num_objects", 1 <= objects.num_objects <= 254, "must lie between 1 and 254"),
        ("objects.stride", objects.stride >= 1, "must be at least 1; 1 leaves no frame out"),
        ("objects.clips_per_video", objects.clips_per_video >= 1, "must be at least 1"),
        ("objects.object_size", 0 < least <= most < 1, "must rise within 0 to 1, both left out"),
        ("objects.noise", 0 <= objects.noise <= 1, "must lie between 0 and 1"),
        *((f"objects.{name}", getattr(objects, name) >= 0, "must not be negative") for name in MOVEMENTS),
        *((f"objects.{name}", 0 <= getattr(objects, name) <= 1, "is a probability: 0 to 1") for name in CHANCES),
        (
            "objects.hide",
            objects.hide in (0, fresh.objects.hide) or config.video.num_frames != 2,
            "would have no effect with video.num_frames = 2, between which there is none; leave it out",
        ),
    ]
    rules += [
        (
            key,
            flags.get(config, key) == flags.get(fresh, key),
            f"would have no effect with data.source {config.data.source}; leave it out",
        )
        for key in flags.leaves(TrainConfig)
        if key.startswith("objects.") and key not in OBJECTS_OF_ALL and (key in OBJECTS_OF_DAVIS) != (kind == "davis")
    ]
    return rules
