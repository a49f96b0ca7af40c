"""Sections of a configuration that are about clips alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class VideoConfig:
    """Clips in the place of images, and the model that looks at them.

    Attributes:
        num_frames: frames of a clip; none trains on images.
        fps: frames a second that clips are sampled at; none takes every frame that a video has.
        tubelet: frames of a tubelet, which makes one step in time; its rows and columns are the backbone's patch.
        attention: joint over all tokens, or factorised: over time, then over space.
        causal: a step sees none that come after it, so that the model can follow a stream.
        positions_per_second: time positions follow the clip's own seconds at this rate; none counts steps.
        broken: what becomes of a clip that cannot be read: error stops with its path, skip leaves it out and tells.
        decoder: of video files: pyav; torchcodec where it is installed; nvdec, torchcodec on an NVIDIA GPU, which takes
            run.num_workers 0.
    """

    num_frames: int | None = None
    fps: float | None = None
    tubelet: int = 2
    attention: Literal["joint", "factorised"] = "joint"
    causal: bool = False
    positions_per_second: float | None = None
    broken: Literal["error", "skip"] = "error"
    decoder: Literal["pyav", "torchcodec", "nvdec"] = "pyav"


@dataclass
class MotionConfig:
    """Clips made from photographs (data.source motion:SOURCE): an object from one moves over another, steadily.

    The direction is one of 8, the speed one of a few; task motion tells both.

    Attributes:
        num_speeds: number of speeds, in equal ratios from the slowest to the fastest.
        slowest: in widths of the picture a second.
        fastest: in widths of the picture a second.
        object_size: range of the object's diameter, as a share of the picture's width.
        background: brightness of the photograph behind it; 1 leaves it as it is, 0 is black. Small models find what
            moves in a few minutes only where it is brighter.
        size: side of the square pictures that clips are made in, in pixels; other sizes are resized from them.
    """

    num_speeds: int = 3
    slowest: float = 0.25
    fastest: float = 1.0
    object_size: tuple[float, float] = (0.3, 0.6)
    background: float = 1.0
    size: int = 64


@dataclass
class SegmenterConfig:
    """What follows objects through a video behind the backbone, and how it is trained (task: segmentation).

    Of the first frame's prompts, one kind a batch, what masks and boxes leave are points.

    Attributes:
        dim: width of the tokens that masks are made from.
        memory_dim: width of a stored frame.
        depth: layers of memory attention.
        mlp_dim: width of their perceptrons.
        num_heads: heads of memory attention.
        dropout: in memory attention, while training.
        mask_prompts: share of the training batches whose objects are shown by their masks.
        box_prompts: share of those whose objects are shown by boxes.
        num_masks: candidate masks for prompts that can mean several things, of which SAM 2 has 3; 0 always has one
            mask, which small trainings learn sooner.
        previous_mask: the decoder also gets the mask of the frame before, with which small trainings learn sooner;
            SAM 2 has the memory alone.
        bce: weight of the binary cross-entropy of masks.
        focal: weight of their focal loss; SAM 2 has 20, no bce, and 1 of all others.
        dice: weight of their dice loss.
        quality: weight of the error of the predicted mask quality.
        presence: weight of the loss of the object score.
    """

    dim: int = 128
    memory_dim: int = 32
    depth: int = 2
    mlp_dim: int = 256
    num_heads: int = 1
    dropout: float = 0.1
    mask_prompts: float = 0.5
    box_prompts: float = 0.25
    num_masks: int = 0
    previous_mask: bool = True
    bce: float = 1.0
    focal: float = 0.0
    dice: float = 1.0
    quality: float = 0.2
    presence: float = 0.2


@dataclass
class ObjectsConfig:
    """Clips of objects with their masks (task: segmentation).

    Clips are parts of the videos of davis:PATH, or pseudo:SOURCE makes them from photographs: things cut out of some
    move over another. Lengths are shares of the picture's short side; what is typical is a standard deviation, from
    which each clip and thing has its own.

    Attributes:
        num_objects: most objects that are followed in a clip.
        stride: davis: most frames of the video from one of the clip to the next; each clip has its own.
        reverse: davis: play half of the training clips backwards.
        clips_per_video: davis: training clips from each video an epoch.
        object_size: pseudo: range of the diameter.
        regions: pseudo: share of the things that are cut along a region of their photograph; others are smooth blobs.
        speed: pseudo: typical movement a frame.
        turn: pseudo: typical turn a frame, in degrees.
        growth: pseudo: typical change of size a frame, as a share of it.
        elastic: pseudo: most that a point of a thing moves against the others, as a share of the thing's radius.
        look_alikes: pseudo: probability that a thing has a double, which is not to be followed.
        occluders: pseudo: probability that a bar or a blob passes in front.
        hide: pseudo: probability that an object leaves the picture and returns.
        drift: pseudo: typical change of brightness from the first frame to the last, as a share of it.
        blur: pseudo: probability that a clip is blurred.
        noise: pseudo: most noise of a pixel, as a share of full brightness.
    """

    num_objects: int = 2
    stride: int = 2
    reverse: bool = True
    clips_per_video: int = 1
    object_size: tuple[float, float] = (0.25, 0.6)
    regions: float = 0.3
    speed: float = 0.03
    turn: float = 3.0
    growth: float = 0.03
    elastic: float = 0.1
    look_alikes: float = 0.45
    occluders: float = 0.35
    hide: float = 0.15
    drift: float = 0.1
    blur: float = 0.4
    noise: float = 0.02
