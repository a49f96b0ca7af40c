"""A segmenter on sequences in the DAVIS layout, at sizes it never saw, beside two floors that need no training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vision_rope.config import load_yaml
from vision_rope.data.davis import VideoSequence, find_sequences
from vision_rope.extension_text import parse_extension
from vision_rope.parallel import choose_device
from vision_rope.propagation import CopyFirst, PatchPropagation
from vision_rope.segmenter import MaskPrompt, VideoSegmenter
from vision_rope.sizes import Size, parse_size
from vision_rope.sweep import check_methods
from vision_rope.targets import open_split
from vision_rope.tracking_results import TrackingResult, format_tracking, write_tracking
from vision_rope.tracking_scores import ResizedTracker, Tracker, score_sequence

FLOORS: dict[str, Callable[[], Tracker]] = {"copy": CopyFirst, "patches": PatchPropagation}
CHECKPOINTS = (".pt", ".pth", ".safetensors")
# The list of the validation sequences of DAVIS 2017.
VALIDATION = "2017/val"
# Flags of `vision-rope evaluate` that are about images or clips.
FLAGS_OF_IMAGES = (
    *("root", "frames", "fps", "skip_broken", "crop_pct", "batch_size", "max_images"),
    *("pretrained", "checkpoint", "position", "option", "seed"),
)
# A tracker and the result that it is to fill.
Setting = tuple[TrackingResult, Tracker]


@dataclass(frozen=True)
class FrameSize:
    """What frames are resized to.

    Attributes:
        side: the long side, the aspect ratio being kept.
        size: or rows and columns, whatever it was; neither leaves frames to the segmenter's own size.

    Units: pixels
    """

    side: int | None = None
    size: Size | None = None

    @staticmethod
    def parse(text: str) -> FrameSize:
        """Read "512", the long side, or "192x256", rows x columns."""
        size = parse_size(text)
        return FrameSize(size=size) if "x" in text else FrameSize(side=size[0])

    def __str__(self) -> str:
        if self.size is not None:
            return f"{self.size[0]}x{self.size[1]}"
        return "as they are" if self.side is None else str(self.side)


def follows_objects(target: str | Path, data: str | None) -> bool:
    """Whether a target is evaluated on marked videos: it is a floor or a segmenter, or the data are such."""
    path = Path(target)
    if str(target) in FLOORS or (data or "").startswith("davis:"):
        return True
    if (path / "config.yaml").is_file():
        return load_yaml(path / "config.yaml").task == "segmentation"
    return path.is_file() and path.suffix in CHECKPOINTS


def evaluate_videos(
    target: str | Path,
    *,
    data: str | None = None,
    split: str | None = None,
    sizes: str | Sequence[str] | None = None,
    extend: str | Sequence[str] | None = None,
    weights: str = "best",
    device: str = "auto",
    output: str | Path | None = None,
    write_masks: bool = False,
    progress: bool = True,
) -> tuple[list[TrackingResult], dict[str, Any], list[Path]]:
    """Follow objects from their first masks, judge the others by J and F; write tables and a figure.

    Both floors stand beside a segmenter; of `copy` it is that alone. Objects are followed as the frames come.

    Args:
        target: copy, patches, a run folder of task segmentation or a checkpoint of SAM 2.
        data: davis:PATH; a run's own by default, of which it takes the validation split.
        split: a list in ImageSets or a text file; of other data 2017/val where there is one, else all sequences.
        sizes: what frames are resized to for a segmenter: the long side ("512"), or rows x columns ("192x256"); its own
            by default.
        extend: methods of context extension, as "none,yarn"; none is always there.
        weights: best, last or ema of a run folder.
        output: folder for the results; RUN/evaluation or evaluation-NAME by default.
        write_masks: write the predicted ids as palette PNGs too, in OUTPUT/masks/TRACKER/SEQUENCE.

    Returns the results, facts about all of them, and the files written.

    Raises: ValueError for a target that follows no objects, and for arguments that mean nothing for it.
    """
    words = [sizes] if isinstance(sizes, str) else list(sizes or [])
    frame_sizes = list(dict.fromkeys(FrameSize.parse(word) for text in words for word in text.split(",")))
    methods = check_methods(extend.split(",") if isinstance(extend, str) else extend or [])
    is_floor = str(target) in FLOORS
    if is_floor and (frame_sizes or extend or weights != "best"):
        raise ValueError(f"{target} takes frames as they are and has no weights; leave sizes, extend and weights out")
    where = choose_device(device)
    sequences, about = _open_data(target, data, split)
    floors = ["copy"] if str(target) == "copy" else list(FLOORS)
    settings: list[Setting] = [(TrackingResult(name), FLOORS[name]()) for name in floors]
    if not is_floor:
        segmenter = _open_segmenter(target, weights, where)
        settings += list_settings(segmenter, Path(target).stem, frame_sizes, methods)
    folder = Path(output or _name_output(target))

    num_defined = [result.reason for result, _ in settings].count(None)
    total = num_defined * sum(map(len, sequences))
    with tqdm(total=total, unit="frame", disable=None if progress else True) as bar:
        for result, tracker in settings:
            if result.reason is not None:
                continue
            for sequence in sequences:
                bar.set_description(f"{result.label}, {sequence.name}", refresh=False)
                result.sequences[sequence.name] = score_sequence(
                    tracker,
                    sequence,
                    device=where,
                    folder=folder / "masks" / result.label.replace(" ", "-") / sequence.name if write_masks else None,
                    tick=bar.update,
                )
    results = [result for result, _ in settings]
    return results, about, write_tracking(results, about, folder)


class SizedSegmenter:
    """A segmenter at one size with one method of context extension, whatever it was used with before.

    Args:
        method: of context extension with its options; None leaves the segmenter as it is.
    """

    def __init__(self, segmenter: VideoSegmenter, frame_size: FrameSize, method: str | None) -> None:
        self.segmenter = segmenter
        self.frame_size = frame_size
        self.method = method
        self.tracker: Tracker = segmenter if frame_size.size is None else ResizedTracker(segmenter, frame_size.size)

    def start(self) -> Any:
        """See `Tracker.start`."""
        self.segmenter.image_size = self.frame_size.side
        if self.method is not None:
            _extend(self.segmenter, self.method)
        return self.tracker.start()

    def step(
        self, state: Any, frame: Tensor, prompts: Mapping[int, MaskPrompt] | None = None
    ) -> tuple[Any, dict[int, Tensor]]:
        """See `Tracker.step`."""
        return self.tracker.step(state, frame, prompts)


def list_settings(
    segmenter: VideoSegmenter, name: str, frame_sizes: Sequence[FrameSize], methods: Sequence[str]
) -> list[Setting]:
    """A segmenter at all sizes with all methods, each beside the result to fill, or the reason why there is none.

    Args:
        frame_sizes: the segmenter's own where there are none.
        methods: with "none" in front.
    """
    reasons = {method: _reason_against(segmenter, method) for method in methods} if len(methods) > 1 else {}
    # Where not even "none" can be set, nothing was changed that it would have to undo.
    settable = len(methods) > 1 and reasons["none"] is None
    return [
        (
            TrackingResult(name, str(frame_size), method, reason=None if method == "none" else reasons[method]),
            SizedSegmenter(segmenter, frame_size, method if settable else None),
        )
        for frame_size in frame_sizes or [FrameSize(side=segmenter.image_size)]
        for method in methods
    ]


def _reason_against(segmenter: VideoSegmenter, method: str) -> str | None:
    """Why a method means nothing for a segmenter, or None."""
    try:
        _extend(segmenter, method)
    except ValueError as error:
        return str(error)
    return None


def _extend(segmenter: VideoSegmenter, method: str) -> None:
    name, knobs = parse_extension(method)
    segmenter.set_extension(name, **knobs)


def _open_segmenter(target: str | Path, weights: str, device: torch.device) -> VideoSegmenter:
    path = Path(target)
    if not path.exists():
        raise ValueError(
            f"{target} is neither {' nor '.join(FLOORS)}, nor is there a run folder or checkpoint of that name; "
            "give a run of task segmentation or a file such as sam2.1_hiera_tiny.pt"
        )
    if path.is_file() and weights != "best":
        raise ValueError(f"weights is {weights!r}, but {target} is a file, which has one set of weights; leave it out")
    return VideoSegmenter.load(path, device=device, **({"weights": weights} if path.is_dir() else {}))


def _open_data(target: str | Path, data: str | None, split: str | None) -> tuple[list[VideoSequence], dict[str, Any]]:
    """The sequences, and where they come from."""
    config = Path(target) / "config.yaml"
    own = load_yaml(config) if config.is_file() else None
    if own is not None and own.task == "segmentation" and split is None and data in (None, own.data.source):
        if not own.data.source.startswith("davis:"):
            raise ValueError(f"{target} was trained on {own.data.source}, which is no videos; give data, as davis:PATH")
        sequences = open_split(own.data, "validation", own).sequences
        return sequences, {"data": own.data.source, "split": "validation, as in training"}
    if data is None:
        data = own.data.source if own is not None else ""
    kind, _, path = data.partition(":")
    if kind != "davis" or not path:
        raise ValueError(f"data is {data!r}, but following objects is judged on marked videos; give davis:PATH")
    listed = Path(path).expanduser() / "ImageSets" / f"{VALIDATION}.txt"
    chosen = split or (VALIDATION if listed.is_file() else None)
    return find_sequences(path, chosen), {"data": data, "split": chosen or "all sequences"}


def _name_output(target: str | Path) -> Path:
    path = Path(target)
    return path / "evaluation" if path.is_dir() else Path(f"evaluation-{path.stem}")


def run_evaluate(parsed: Any) -> int:
    """Answer `vision-rope evaluate` for what follows objects.

    Raises: ValueError for flags that mean nothing for it.
    """
    for flag in FLAGS_OF_IMAGES:
        value = getattr(parsed, flag)
        if value:
            raise ValueError(
                f"--{flag.replace('_', '-')} is {value!r}, but {parsed.target} follows objects through whole videos; "
                "leave it out"
            )
    if parsed.precision == "bf16":
        raise ValueError("--precision is bf16, but objects are followed in fp32; leave it out")
    results, about, paths = evaluate_videos(
        parsed.target,
        data=parsed.data,
        split=parsed.split,
        sizes=parsed.sizes,
        extend=parsed.extend,
        weights=parsed.weights,
        device=parsed.device,
        output=parsed.out,
        write_masks=parsed.write_masks,
        progress=not parsed.no_progress,
    )
    print(format_tracking(results, about))
    print("\n" + "\n".join(f"wrote {path}" for path in paths))
    return 0
