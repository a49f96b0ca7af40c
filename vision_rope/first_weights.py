"""The weights that a new training starts from: those of a file or a run, of another task, size or pairing too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision_rope.checkpoint import MASK_TOKEN, inflate_weights, load_strictly, load_weights, plain_names
from vision_rope.config import TrainConfig, from_yaml
from vision_rope.relative_encodings import T5
from vision_rope.segmenter import VideoSegmenter
from vision_rope.sizes import pixel_size
from vision_rope.video.tubelets import resample_times
from vision_rope.weight_metadata import adopt_pairing, backbone_of, warn_of_another_kind


def load_start(model: nn.Module, path: str | Path) -> list[str]:
    """Load first weights for a new training, from a file or the best ones of a run folder.

    A classifier for other classes keeps its fresh weights. Weights stored in another pairing are brought into the
    model's. The weights may be those of masked prediction, of which a classifier takes the encoder, and those of
    images, which a model of videos is made of and the backbone of a segmenter. A learned absolute embedding that a run
    of this package trained at another size is resampled, and so is one of time.

    Returns the names that were not loaded.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "best.safetensors"
    state, metadata = load_weights(path)
    state = plain_names(state)
    if isinstance(model, VideoSegmenter) and not any(name.startswith("memory.") for name in state):
        return _load_backbone(model, path)
    own = model.state_dict()
    is_masked = MASK_TOKEN in state
    if MASK_TOKEN in own and not is_masked:
        raise ValueError(
            f"{path} holds the weights of a classifier, but masked prediction starts from those of a masked run; leave "
            "model.checkpoint out, or give task: classification"
        )
    warn_of_another_kind(model, metadata, path)
    _check_buckets(model, metadata, path)
    if is_masked and MASK_TOKEN not in own:
        state = {name.removeprefix("encoder."): state[name] for name in state if name.startswith("encoder.")}
    state = _fit_times(_fit_absolute(model, inflate_weights(model, state), metadata), own)
    try:
        fresh = _load_but_head(model, state, path, is_masked=is_masked)
    except ValueError as error:
        if "config" not in metadata:
            raise
        made = from_yaml(metadata["config"]).model
        raise ValueError(
            f"{error}; they are of model.name {made.name}, model.position {made.position}, model.options {made.options}"
        ) from error
    adopt_pairing(model, metadata, path)
    return fresh


def _load_backbone(model: VideoSegmenter, path: Path) -> list[str]:
    """Load weights of images into the backbone of a segmenter; what the other parts begin with is fresh."""
    load_start(model.backbone.trunk, path)
    return sorted(name for name in model.state_dict() if not name.startswith("backbone.trunk."))


def _load_but_head(model: nn.Module, state: dict[str, Tensor], path: Path, *, is_masked: bool) -> list[str]:
    """Load weights into all of a model, but for the classifier of a masked run's or of other classes."""
    own = model.state_dict()
    if getattr(model, "num_classes", None) == 0:
        # What a segmenter looks at frames with; a classifier's last layer is not its business.
        state = {name: state[name] for name in state if name in own or not name.startswith("head")}
    if not hasattr(model, "get_classifier"):
        load_strictly(model, state, path)
        return []
    found = model.get_classifier()  # type: ignore[operator]
    # Distilled models have two.
    heads = {id(head) for head in (found if isinstance(found, tuple) else (found,))}
    names = [
        f"{name}.{leaf}" for name, part in model.named_modules() if id(part) in heads for leaf in ("weight", "bias")
    ]
    # A masked encoder comes without a classifier.
    fresh = [name for name in names if name in own and (is_masked or _differs(state, own, name))]
    load_strictly(model, {**state, **{name: own[name] for name in fresh}}, path)
    return sorted(fresh)


def _check_buckets(model: Any, metadata: Mapping[str, str], path: Path) -> None:
    """T5's table has the same shape for any grid, so that nothing else would tell that its buckets moved."""
    own = backbone_of(model)
    if "config" not in metadata or not isinstance(getattr(own, "position", None), T5):
        return
    config = from_yaml(metadata["config"])
    grid = _trained_grid(own, config)
    trained = config.model.position_options.get("max_distance") or max(grid) - 1
    limits = own.position.max_distances
    if config.model.position == "t5" and grid != own.train_grid and set(limits) != {trained}:
        raise ValueError(
            f"{path} was trained on {_by(grid)} patches with T5 buckets up to offset {trained}, and the model has "
            f"{_by(own.train_grid)} patches and buckets up to {max(limits)}; give "
            f"model.position_options: {{max_distance: {trained}}}"
        )


def _by(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


def _trained_grid(model: Any, config: TrainConfig) -> tuple[int, ...]:
    """Rows and columns of patches that a run of that configuration was trained on, of clips with the steps in front."""
    height, width = pixel_size(config.model.options.get("img_size", config.data.size))
    patch = model.patch_embed.patch_size
    video = config.video
    # A segmenter looks at one frame after the other.
    num_frames = None if config.task == "segmentation" else video.num_frames
    steps = () if num_frames is None else (num_frames // video.tubelet,)
    return *steps, height // patch[0], width // patch[1]


def _fit_times(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Resample learned embeddings of time, (1, steps, dim), of another number of steps."""
    fitted = {}
    for name in ("pos_embed_time", "encoder.pos_embed_time"):
        if name in own and _differs(state, own, name) and state[name].shape[2:] == own[name].shape[2:]:
            fitted[name] = resample_times(state[name], own[name].shape[1])
    return {**state, **fitted}


def _differs(state: Mapping[str, Tensor], own: Mapping[str, Tensor], name: str) -> bool:
    return name in state and name in own and state[name].shape != own[name].shape


def _fit_absolute(model: Any, state: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """Resample learned absolute embeddings whose training size the metadata tell."""
    own = model.state_dict()
    parts = {"pos_embed": model} | {f"{name}.pos_embed": getattr(model, name, None) for name in ("encoder", "decoder")}
    if isinstance(model, VideoSegmenter):
        parts = {"backbone.trunk.pos_embed": backbone_of(model)}
    wanted = [name for name in parts if _differs(state, own, name)]
    if "config" not in metadata or not wanted:
        return state
    rows, columns = _trained_grid(backbone_of(model), from_yaml(metadata["config"]))[-2:]
    return {**state, **{name: parts[name].fit_absolute(state[name], (rows, columns)) for name in wanted}}
