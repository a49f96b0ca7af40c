"""A run folder or a timm model at sizes it never saw: the sweep, its tables and its figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vision_rope.config import DataConfig, TrainConfig, load_yaml
from vision_rope.measure import Meter, measure
from vision_rope.parallel import distributed
from vision_rope.points import Point, parse_fps, parse_frames
from vision_rope.results import Row, format_table, write_results
from vision_rope.sizes import format_size, parse_sizes
from vision_rope.sweep import check_methods, patch_size_of, refuse_frames, sweep
from vision_rope.targets import open_run, open_timm

__all__ = [
    "check_methods",
    "evaluate",
    "format_table",
    "measure",
    "sweep",
    "write_results",
]


def evaluate(
    target: str | Path,
    *,
    data: str | None = None,
    root: str | None = None,
    split: str | None = None,
    sizes: str | Sequence[str] | None = None,
    frames: str | Sequence[int] | None = None,
    fps: str | Sequence[float] | None = None,
    extend: str | Sequence[str] | None = None,
    weights: str = "best",
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    position: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    crop_pct: float | None = None,
    batch_size: int | None = None,
    max_images: int | None = None,
    skip_broken: bool = False,
    num_workers: int = 2,
    device: str = "auto",
    precision: str = "auto",
    seed: int | None = None,
    output: str | Path | None = None,
    progress: bool = True,
    report: Callable[[str], None] | None = None,
) -> tuple[list[Row], list[Path]]:
    """Sweep a run folder or a timm model over sizes and extension methods; write tables and a figure.

    A run on clips is swept over every size with every number of frames at every rate.

    A run folder brings its data, normalisation, crop, sizes, methods and seed, which arguments override. A
    timm name takes normalisation and interpolation from its pretrained_cfg and keeps the whole short side
    (crop_pct 1.0); without `position` it is timm's own model, for which no method but "none" is defined.

    Args:
        data: elpv, folder:PATH or a timm dataset name; that of a run by default.
        split: name of the split; the validation split by default.
        frames: numbers of frames of clips, as "8,16" or a list; the run's own by default.
        fps: frames a second of clips, as "2,4" or a list; the run's own by default.
        extend: methods of context extension, as "none,yarn:beta_fast=16:beta_slow=2" or a list.
        weights: best, last or ema of a run folder.
        checkpoint: .safetensors weights for a timm name, of timm's model or of the one with `position`.
        pretrained: timm's weights for a timm name.
        position: position encoding that a timm name is converted to.
        model_options: keyword arguments for timm.create_model.
        max_images: judge by that many images, evenly spread; those of a run by default, else all.
        skip_broken: leave out clips that cannot be read or have too few frames, whatever the run does with them.
        precision: auto, fp32 or bf16.
        seed: seed of a timm model's first weights where it gets no others.
        output: folder for the results; RUN/evaluation or evaluation-NAME by default.
        report: is told once of every clip that is damaged or left out; warnings by default.

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
    wanted_frames = [] if frames is None else parse_frames(frames)
    wanted_fps = [] if fps is None else parse_fps(fps)
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

    own = load_yaml(folder / "config.yaml") if is_run else TrainConfig()
    if own.task == "segmentation":
        raise ValueError(f"{folder} follows objects, which is judged on whole videos; call evaluate_videos")
    if own.video.num_frames is None:
        refuse_frames(wanted_frames, wanted_fps)
        if skip_broken:
            raise ValueError("skip_broken is on, but the model takes images, and it is for clips; leave it out")

    pictures: list[Path] = []
    with distributed(device) as process:
        if is_run:
            found = open_run(
                folder,
                data=choose_data(own.data, data, root, split),
                weights=weights,
                device=process.device,
                max_images=max_images,
                skip_broken=skip_broken,
            )
        else:
            found = open_timm(
                str(target),
                data=choose_data(own.data, data, root, split),
                checkpoint=checkpoint,
                pretrained=pretrained,
                position=position,
                options=model_options,
                device=process.device,
                seed=seed or 0,
                max_images=max_images,
            )
        folder_out = Path(output or found.output)

        def draw(point: Point, meters: Mapping[str, Meter]) -> None:
            seen = {method: meter.first for method, meter in meters.items() if meter.first is not None}
            if not process.is_main or "none" not in seen:
                return
            outputs = {method: predictions for method, (_, predictions) in seen.items()}
            path = folder_out / f"reconstruction-{point.name.replace(' ', '-')}.png"
            if picture := found.task.draw(seen["none"][0], outputs, path):
                pictures.append(picture)

        rows = sweep(
            found.model,
            found.dataset,
            task=found.task,
            sizes=wanted_sizes or parse_sizes(found.sizes or [format_size(found.train_size)]),
            frames=wanted_frames or found.frames,
            fps=wanted_fps or found.fps,
            methods=wanted_methods or found.methods,
            train_size=found.train_size,
            train_frames=own.video.num_frames,
            train_fps=own.video.fps,
            positions_per_second=own.video.positions_per_second,
            patch_size=patch_size_of(found.model),
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
            report=report,
        )
        if not process.is_main:
            return rows, []
        files = [*write_results(rows, folder_out), *pictures]
        for stale in set(folder_out.glob("reconstruction-*.png")) - set(files):
            stale.unlink()
        return rows, files


def choose_data(own: DataConfig, source: str | None, root: str | None, split: str | None) -> DataConfig:
    """The target's own data, or other data with the settings that belong to it."""
    chosen = own if source in (None, own.source) else DataConfig(source=str(source))
    return replace(chosen, root=root or chosen.root, val_split=split or chosen.val_split)
