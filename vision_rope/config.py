"""What a run is made of: dataclasses, read from YAML files and command-line flags.

Sections up to `evaluation` change results; `run` changes only where and how fast they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vision_rope import flags
from vision_rope.config_video import MotionConfig, ObjectsConfig, SegmenterConfig, VideoConfig

Size = int | tuple[int, int]

# Keys that choose something by its name, and the key of its options.
OPTIONS_OF = {
    "model.position": "model.position_options",
    "model.attention": "model.attention_options",
    "optimizer.name": "optimizer.options",
    "schedule.name": "schedule.options",
}

# Sources whose items are clips, which go with video.num_frames and with nothing else.
CLIP_SOURCES = ("videos", "frames", "motion")
# Sources of clips with the masks of objects, which go with task: segmentation and with nothing else.
SEGMENTED_SOURCES = ("davis", "pseudo")


@dataclass
class ModelConfig:
    """A timm backbone and the position encoding it gets.

    Attributes:
        name: a timm model name, for instance vit_small_patch16_224.
        position: a preset of `vision_rope.presets()` or an encoding such as learned, sinusoidal, none.
        position_options: keyword arguments of that preset, for instance {base: 100.0}.
        keep_absolute: keep the backbone's own absolute embedding beside the position encoding.
        attention: softmax, or linear in its place: time that grows linearly with the tokens.
        attention_options: options of linear attention, for instance {feature_map: performer, num_features: 128}.
        options: keyword arguments for timm.create_model, for instance {embed_dim: 128, depth: 6}.
        pretrained: start from timm's weights of that name.
        checkpoint: start from the weights in this .safetensors file or run folder (best ones); of a masked run, from
            those of its encoder.
    """

    name: str = "vit_small_patch16_224"
    position: str = "rope-vit-axial"
    position_options: dict[str, Any] = field(default_factory=dict)
    keep_absolute: bool = False
    attention: Literal["softmax", "linear"] = "softmax"
    attention_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    pretrained: bool = False
    checkpoint: str | None = None


@dataclass
class DataConfig:
    """Where the images come from.

    Attributes:
        source: images: elpv, folder:PATH, images:PATH, timm's torch/NAME, hfds/NAME, wds/NAME; clips: videos:PATH,
            frames:PATH, motion:SOURCE; with masks: davis:PATH, pseudo:SOURCE.
        root: the folder that timm dataset names are looked up in.
        train_split: name of the training split.
        val_split: name of the validation split.
        val_fraction: part of each class held out for validation where the source has no split of its own.
        split_seed: seed of that hold-out; not the run's seed, so that runs compare on the same images.
        download: let timm and torchvision download the data set.
        size: training image size in pixels: one number or height and width.
        train_sizes: every batch has a random one of these sizes (twice in the list: twice as often); empty trains at
            `size`, which stays that of validation; extension then counts from the largest.
        interpolation: how images are resized.
        mean: per-channel mean of pixels in [0, 1].
        std: per-channel standard deviation of pixels in [0, 1].
    """

    source: str = "elpv"
    root: str | None = None
    train_split: str = "train"
    val_split: str = "validation"
    val_fraction: float = 0.25
    split_seed: int = 0
    download: bool = False
    size: Size = 128
    train_sizes: list[str] = field(default_factory=list)
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


@dataclass
class AugmentConfig:
    """Augmentation of training images.

    Attributes:
        crop: random-resized (area and aspect drawn), simple (resize the short side, pad 4 pixels, random crop;
            DeiT-III) or resize (the whole image, no crop).
        scale: range of the area kept by random-resized.
        ratio: range of the aspect ratio drawn by random-resized.
        hflip: probability of a left-right flip.
        vflip: probability of an up-down flip.
        dihedral: turn and mirror by a random element of the square's symmetry group (square images only).
        three_augment: one of grayscale, solarization, Gaussian blur for every image (DeiT-III's 3-Augment).
        color_jitter: strength of brightness, contrast and saturation jitter.
        erasing: probability of random erasing.
        mixup: alpha of mixup; 0 switches it off.
        cutmix: alpha of cutmix; 0 switches it off.
        mixup_prob: probability that a batch is mixed at all.
        mixup_switch_prob: probability of cutmix where both are on.
    """

    crop: Literal["random-resized", "simple", "resize"] = "random-resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4.0 / 3.0)
    hflip: float = 0.5
    vflip: float = 0.0
    dihedral: bool = False
    three_augment: bool = False
    color_jitter: float = 0.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5


@dataclass
class MaskedConfig:
    """Masked-patch prediction (task: masked).

    Attributes:
        ratio: share of the patches that are hidden.
        block: side, in patches, of the squares that are hidden together.
        block_steps: of clips, steps in time that such a square is hidden for; none hides it in all of them (tubes).
        encoder: all encodes hidden patches too, as a mask token (SimMIM); visible encodes the visible patches alone
            and predicts with a decoder (MAE).
        target: pixels of the normalised image, or patch-normalized: those of each patch with mean 0 and variance 1.
        decoder_dim: width of the decoder; encoder visible alone; none takes half of the encoder's.
        decoder_depth: blocks of the decoder; encoder visible alone; none takes 2.
        decoder_heads: heads of the decoder; encoder visible alone; none makes them as wide as the encoder's.
    """

    ratio: float = 0.5
    block: int = 1
    block_steps: int | None = 1
    encoder: Literal["all", "visible"] = "all"
    target: Literal["pixels", "patch-normalized"] = "pixels"
    decoder_dim: int | None = None
    decoder_depth: int | None = None
    decoder_heads: int | None = None


@dataclass
class LossConfig:
    """What is minimised in classification.

    Attributes:
        name: cross-entropy, or binary cross-entropy a class (DeiT-III).
        label_smoothing: share of the target spread over all classes.
    """

    name: Literal["cross-entropy", "binary-cross-entropy"] = "cross-entropy"
    label_smoothing: float = 0.0


@dataclass
class OptimizerConfig:
    """Optimizer, by its name in timm.

    Attributes:
        name: a name of timm.optim.list_optimizers(): adamw, lamb, lion, muon, sgd, ...
        lr: learning rate at the end of the warm-up, for the whole batch.
        weight_decay: weight decay of matrices; biases, norms and learned frequencies have none.
        options: further arguments of the optimizer, for instance {betas: [0.9, 0.98]}.
        layer_decay: factor of the learning rate from a layer to the one below; none switches it off.
        clip_grad: largest norm of the gradient; none switches it off.
        accumulate: number of batches whose gradients make one update.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    layer_decay: float | None = None
    clip_grad: float | None = 1.0
    accumulate: int = 1


@dataclass
class ScheduleConfig:
    """Length of the training and the course of the learning rate, by its name in timm; set at every update.

    Attributes:
        name: cosine, poly, tanh, wsd, constant, ...
        epochs: number of epochs, warm-up included.
        warmup_epochs: epochs of linear warm-up.
        warmup_lr: learning rate of the first update.
        min_lr: learning rate that the decay ends at.
        options: further arguments of timm's create_scheduler_v2.
    """

    name: str = "cosine"
    epochs: int = 30
    warmup_epochs: float = 3.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluationConfig:
    """Validation during training and the sweep over sizes after it.

    Attributes:
        crop_pct: the short side is resized to size / crop_pct before the centre crop; 1.0 keeps all of it.
        batch_size: images a forward pass; none takes the training batch.
        every: epochs between validations.
        max_images: judge by that many images, evenly spread over the validation part; none takes all. Masks are
            drawn by the place among them.
        sizes: sizes of the sweep after training: 64, 96x160, ...; empty skips the sweep.
        frames: of clips: numbers of frames of the sweep, as in 8,16; empty takes video.num_frames.
        fps: of clips: frames a second of the sweep, as in 2,4; empty takes video.fps.
        extend: context-extension methods of the sweep, with options as in yarn:beta_fast=16:beta_slow=2.
    """

    crop_pct: float = 1.0
    batch_size: int | None = None
    every: int = 1
    max_images: int | None = None
    sizes: list[str] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    fps: list[float] = field(default_factory=list)
    extend: list[str] = field(default_factory=lambda: ["none"])


@dataclass
class RunConfig:
    """Where a run computes and writes; nothing here is meant to change results beyond rounding.

    Attributes:
        output: the run folder; none makes runs/DATE-TIME.
        resume: go on with the run in `output` from its last/ folder.
        overwrite: start anew in an `output` that holds a run already.
        device: auto, cpu, cuda, cuda:1, mps.
        precision: auto (bf16 where the device computes it natively and fast, else fp32), fp32 or bf16.
        compile: compile the model with torch.compile.
        grad_checkpointing: recompute activations in the backward pass to save memory.
        num_workers: loader processes a rank.
        progress: show a progress bar.
        tensorboard: write TensorBoard events.
    """

    output: str | None = None
    resume: bool = False
    overwrite: bool = False
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    grad_checkpointing: bool = False
    num_workers: int = 2
    progress: bool = True
    tensorboard: bool = True


@dataclass
class TrainConfig:
    """A whole run: everything train.py needs.

    Attributes:
        task: classification, masked (predict hidden patches), motion (tell direction and speed) or segmentation
            (follow objects through clips).
        seed: seed of the initial weights, the order of images and their augmentation.
        batch_size: images a step, over all processes together.
        ema_decay: decay of the averaged weights that are evaluated and kept; none switches averaging off.
    """

    task: Literal["classification", "masked", "motion", "segmentation"] = "classification"
    seed: int = 0
    batch_size: int = 64
    ema_decay: float | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    masked: MaskedConfig = field(default_factory=MaskedConfig)
    motion: MotionConfig = field(default_factory=MotionConfig)
    segmenter: SegmenterConfig = field(default_factory=SegmenterConfig)
    objects: ObjectsConfig = field(default_factory=ObjectsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)


def load_config(argv: Sequence[str]) -> TrainConfig:
    """Read a configuration from command-line words: `--config FILE.yaml` and `--section.key VALUE`, any number.

    Later files win over earlier ones and flags win over files; dictionaries are merged key by key, but another name
    (`OPTIONS_OF`) drops the options that earlier words gave to the one before. With
    `run.resume`, what neither says is taken from the config.yaml of the run in `run.output`.

    Raises:
        ValueError: for an unknown key or flag (with the nearest valid name) and a value of the wrong type.
        SystemExit: after `--help` was printed.
    """
    if "-h" in argv or "--help" in argv:
        print(help_text())
        raise SystemExit(0)
    values = flags.read_words(TrainConfig, argv, OPTIONS_OF)
    config = flags.build(TrainConfig, values)
    if config.run.resume and config.run.output is not None:
        stored = Path(config.run.output) / "config.yaml"
        if stored.is_file():
            config = flags.build(TrainConfig, flags.merge(flags.read_yaml(stored), values))
    return config


def load_yaml(path: str | Path) -> TrainConfig:
    """Read a configuration from a YAML file; keys that it leaves out have their default."""
    return flags.build(TrainConfig, flags.read_yaml(Path(path)))


def from_yaml(text: str) -> TrainConfig:
    """Read what `to_yaml` wrote."""
    return flags.build(TrainConfig, flags.parse_yaml(text))


def to_yaml(config: TrainConfig) -> str:
    """Write every key of a configuration as YAML that `load_yaml` reads back to an equal one."""
    return flags.to_yaml(config)


def help_text(command: str = "train.py") -> str:
    """List every key with its meaning and default, a section at a time."""
    return flags.help_text(TrainConfig, command)


def changed_keys(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Dotted names of the keys whose values differ, `run` left out: they are what changes results."""
    keys = [key for key in flags.leaves(TrainConfig) if not key.startswith("run.")]
    return [key for key in keys if flags.get(old, key) != flags.get(new, key)]
