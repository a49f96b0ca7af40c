"""What an inspection is about: the rotary embedding of a run folder, a timm model or a SAM 2 model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vision_rope.checkpoint import load_run
from vision_rope.rope import Rope
from vision_rope.sizes import Size, largest_size
from vision_rope.video.sam2 import SAM2_NAMES, build_sam2, load_sam2_memory, memory_rope
from vision_rope.weight_metadata import backbone_of


@dataclass(frozen=True)
class InspectionTarget:
    """A rotary embedding, the images it was made for, and how to evaluate its model.

    Attributes:
        name: the model, as it was asked for.
        rope: its rotary embedding.
        train_size: size of training images in pixels, (rows, columns).
        patch_size: pixels a token, (rows, columns).
        notes: sentences that belong beside the figures.
        command: begin of the command that evaluates the model; None where no command does.
        output: folder for the results.
    """

    name: str
    rope: Rope
    train_size: Size
    patch_size: Size
    notes: tuple[str, ...]
    command: str | None
    output: Path

    def grid(self, size: Size) -> Size:
        """(rows, columns) of tokens of an image size that the patches divide."""
        return size[0] // self.patch_size[0], size[1] // self.patch_size[1]


def open_inspection_target(
    target: str, *, weights: str = "best", position: str | None = None, options: Mapping[str, Any] | None = None
) -> InspectionTarget:
    """Find the rotary embedding of a run folder, a timm name, or a name or checkpoint file of SAM 2.

    Args:
        weights: best, last or ema of a run folder.
        position: preset that a timm model would be given; its own embedding where not given.
        options: keyword arguments for timm.create_model.

    Raises: ValueError for a target that is none of these or has no rotary embedding, and for an argument without
        effect.
    """
    path = Path(target)
    is_run = (path / "config.yaml").is_file()
    if path.is_dir() and not is_run:
        raise ValueError(f"{target} is not a run folder: it holds no config.yaml")
    is_sam2 = path.is_file() or target in SAM2_NAMES
    for name, value in (("position", position), ("option", options)):
        if value and (is_run or is_sam2):
            raise ValueError(f"{name} is {value!r}, but {target} is no timm name; leave it out")
    if weights != "best" and not is_run:
        raise ValueError(f"weights is {weights!r}, but {target} is not a run folder; leave it out")
    if is_run:
        return _open_run(path, weights)
    if is_sam2:
        return _open_sam2(target)
    return _open_timm(target, position, dict(options or {}))


def _open_run(folder: Path, weights: str) -> InspectionTarget:
    run = load_run(folder, weights=weights)
    part = {"masked": "encoder", "segmentation": "backbone"}.get(run.config.task)
    model: Any = backbone_of(run.model)
    extra = " --data davis:PATH" if run.config.task == "segmentation" else ""
    extra += "" if weights == "best" else f" --weights {weights}"
    return InspectionTarget(
        name=str(folder),
        rope=_check_rope(model.position, str(folder), run.config.model.position),
        train_size=largest_size(run.config.data),
        patch_size=tuple(model.patch_embed.patch_size),
        notes=(*([f"These are the pairs of the {part}."] if part else []), *_note_windows(model)),
        command=f"vision-rope evaluate {folder}{extra}",
        output=folder / "inspect",
    )


def _open_timm(name: str, position: str | None, options: dict[str, Any]) -> InspectionTarget:
    import timm

    from vision_rope.convert import check_position
    from vision_rope.convert.own_rope import OWN

    if not timm.is_model(name):
        nearest = difflib.get_close_matches(name, [*SAM2_NAMES, *timm.list_models()], n=3)
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
        raise ValueError(f"{name!r} is no run folder, timm model, or name or checkpoint file of SAM 2{hint}")
    if position is not None:
        check_position(position, {})
    try:
        # Frequencies need no weights, which are gigabytes in the largest models.
        model = _build_timm(name, position, options, "meta")
    except NotImplementedError:
        # timm's M-RoPE has its axes in a buffer, which is empty there.
        model = _build_timm(name, position, options, "cpu")
    rope = _check_rope(model.position, name, position or OWN)
    notes = _note_windows(model)
    if rope.learned_frequencies is not None:
        rope.to_empty(device="cpu")
        rope.reset_parameters(torch.Generator().manual_seed(0))
        notes.append(
            "UNTRAINED FREQUENCIES: this embedding learns them, and these are random ones as training begins with; "
            "give a run folder to see trained ones."
        )
    words = "".join(f" --option {key}={value}" for key, value in options.items()).replace(", ", ",")
    # timm's weights are those of its own embedding.
    chosen = f"{name} --pretrained --position {OWN} --data folder:PATH{words}" if position in (None, OWN) else "RUN"
    rows, columns = model.patch_embed.patch_size
    return InspectionTarget(
        name=name,
        rope=rope,
        train_size=(model.train_grid[0] * rows, model.train_grid[1] * columns),
        patch_size=(rows, columns),
        notes=tuple(notes),
        command=f"vision-rope evaluate {chosen}",
        output=Path("runs", "inspect", name.replace("/", "-")),
    )


def _build_timm(name: str, position: str | None, options: dict[str, Any], device: str) -> Any:
    """A timm model without weights that has its own embedding or another one as a Rope."""
    import timm

    from vision_rope.convert import FAMILIES, add_position
    from vision_rope.convert.own_rope import OWN, timm_rope

    try:
        with torch.device(device):
            model = timm.create_model(name, pretrained=False, **options)
    except (TypeError, RuntimeError, AssertionError) as error:
        if isinstance(error, NotImplementedError):
            raise
        raise ValueError(f"{name} cannot be built with options {options}: {error}") from error
    if position is None and timm_rope(model) is None and type(model) in FAMILIES:
        raise ValueError(
            f"{name} (timm's {type(model).__name__}) has no rotary embedding, so nothing turns; say which one it would "
            "be given, for instance --position rope-vit-axial"
        )
    return add_position(model, position or OWN)


def _open_sam2(target: str) -> InspectionTarget:
    model = build_sam2(target) if target in SAM2_NAMES else load_sam2_memory(target)
    return InspectionTarget(
        name=target,
        rope=memory_rope(model),
        train_size=(model.image_size, model.image_size),
        patch_size=(model.backbone_stride, model.backbone_stride),
        notes=(
            "This is the memory attention, in self-attention and in cross-attention to the memory, where object "
            "pointers stand still; the image encoder has no rotary embedding. Its code takes the root of the number of "
            "tokens for both sides, so that grids that are not square get other angles than these.",
        ),
        command=None,
        output=Path("runs", "inspect", Path(target).stem if target not in SAM2_NAMES else target),
    )


def _note_windows(model: Any) -> list[str]:
    sizes = {layer: getattr(block, "window_size", 0) for layer, block in enumerate(model.blocks)}
    layers = ", ".join(str(layer) for layer, size in sizes.items() if size)
    if not layers:
        return []
    return [
        f"Layers {layers} attend inside windows ({', '.join(str(size) for size in {*sizes.values()} if size)} tokens a "
        "side), which do not grow; the figures are for the layers that attend to the whole grid."
    ]


def _check_rope(position: Any, name: str, encoding: str) -> Rope:
    if not isinstance(position, Rope):
        raise ValueError(
            f"{name} has the position encoding {encoding!r}, which is not rotary, so nothing turns; inspect a model "
            "with one of vision_rope.presets()"
        )
    return position
