"""Objects followed through a stream of frames: a video with them in colour, their masks and a table."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vision_rope.data.streams import FrameStream, open_stream
from vision_rope.parallel import choose_device
from vision_rope.progress import show_frames
from vision_rope.propagation import PatchPropagation
from vision_rope.segmenter.prompts import MaskPrompt
from vision_rope.track_prompts import Prompts, check_prompts, read_prompts
from vision_rope.tracking_output import MaskFolder, ObjectRow, ObjectTable, describe_objects, merge_masks, overlay
from vision_rope.video_writer import VideoWriter

if TYPE_CHECKING:
    from vision_rope.segmenter import VideoSegmenter

DEFAULT_OUTPUT = "runs/track"
# In the place of weights: propagation of patches, which needs none.
WITHOUT_WEIGHTS = "patches"


class TrackedFrame(NamedTuple):
    """A frame and the objects in it.

    Attributes:
        number, pixels, seconds: as of `StreamFrame`.
        ids: uint8 (height, width) on the CPU: 0 background, n object n.
        rows: figures of every object that has begun.
    """

    number: int
    pixels: Tensor
    seconds: float
    ids: Tensor
    rows: list[ObjectRow]


class Outcome(NamedTuple):
    """What became of a video.

    Attributes:
        num_frames: that were written.
        num_objects: that were followed.
        seconds: that it took.
        is_whole: whether the stream came to its end, and not to Ctrl-C.
    """

    num_frames: int
    num_objects: int
    seconds: float
    is_whole: bool


def track_frames(
    stream: FrameStream, segmenter: VideoSegmenter | PatchPropagation, prompts: Prompts
) -> Generator[TrackedFrame, None, None]:
    """Follow objects through a stream; of the past nothing is kept but the memory of the segmenter.

    Args:
        prompts: by frame and object id. The first ones of an object begin it; later ones correct it.
    """
    state: Any = segmenter.start()
    for number, pixels, seconds in stream:
        given = prompts.get(number, {})
        # What knows no corrections begins anew.
        anew = not hasattr(segmenter, "correct")
        begun = {key: said for key, said in given.items() if anew or key not in state.objects}
        state, masks = segmenter.step(state, pixels, begun)  # type: ignore[arg-type]
        if later := {key: said for key, said in given.items() if key not in begun}:
            # With its memory and its mask on this frame, which a prompt to `step` would start without.
            state, masks = segmenter.correct(state, later)  # type: ignore[union-attr]
        ids = merge_masks(masks, stream.size).cpu()
        rows = describe_objects(number, ids, _figures(state.objects))
        for row in rows:
            if row.object in given and row.area == 0:
                warnings.warn(
                    f"object {row.object} has no pixel in frame {number}, where it was prompted: what shows it may be "
                    "wrong, or the weights may be too weak",
                    stacklevel=1,
                )
        yield TrackedFrame(number, pixels, seconds, ids, rows)


def track(
    stream: FrameStream,
    segmenter: VideoSegmenter | PatchPropagation,
    prompts: Prompts,
    *,
    out: str | Path | None = None,
    masks: str | Path | None = None,
    table: str | Path | None = None,
    max_frames: int | None = None,
    progress: bool = True,
) -> Outcome:
    """Follow objects through a stream and write what is found, frame by frame.

    Ctrl-C ends it after the frame at work, and once more at once; what was written is whole in both cases.

    Args:
        prompts: by frame and object id.
        out: a video with the objects in colour, of the same times and number of frames.
        masks: a folder for the ids of each frame as palette PNGs.
        table: a CSV file, a line an object and frame.
        max_frames: where to end; at the end of the stream when not given.
        progress: whether a bar with frames a second is shown.

    Raises:
        ValueError: for prompts that do not fit or lie after the end, and for a masks folder in use.
        FrameSizeError: where the stream's frames change their size.
    """
    check_prompts(prompts, stream.size)
    if max_frames is not None and max_frames < 1:
        raise ValueError(f"max_frames is {max_frames}; give 1 or more, or None for all")
    if late := [frame for frame in prompts if max_frames is not None and frame >= max_frames]:
        raise ValueError(f"there are prompts at frame {late[0]}, but max_frames is {max_frames}; frames count from 0")
    known = [count for count in (stream.num_frames, max_frames) if count is not None]
    start, count, is_whole = time.perf_counter(), 0, True
    seen: set[int] = set()
    with ExitStack() as stack:
        # In this order, a name that cannot be leaves nothing behind.
        video = None if out is None else stack.enter_context(VideoWriter(out, stream.fps))
        folder = None if masks is None else MaskFolder(masks)
        lines = None if table is None else stack.enter_context(ObjectTable(table))
        frames = stack.enter_context(closing(track_frames(stream, segmenter, prompts)))
        shown = show_frames(islice(frames, max_frames), total=min(known, default=None), enabled=progress)
        interrupted = stack.enter_context(_first_interrupt())
        try:
            for frame in shown:
                if folder is not None:
                    folder.write(frame.number, frame.ids)
                if lines is not None:
                    lines.write(frame.rows)
                if video is not None:
                    video.write(overlay(frame.pixels, frame.ids), frame.seconds)
                count += 1
                seen.update(row.object for row in frame.rows)
                if interrupted.is_set():
                    is_whole = False
                    break
        except KeyboardInterrupt:
            is_whole = False
        except Exception:
            if count:
                warnings.warn(f"{stream.name} stopped after {count} frames, which are kept", stacklevel=1)
            raise
    if is_whole and (late := [frame for frame in prompts if frame >= count]):
        raise ValueError(
            f"there are prompts at frame {late[0]}, but {stream.name} has {count} frames, counted from 0; what the "
            "others gave is kept"
        )
    return Outcome(count, len(seen), time.perf_counter() - start, is_whole)


def run_track(parsed: Any) -> int:
    """`vision-rope track`; returns the exit status: 130 after Ctrl-C."""
    prompts = read_prompts(parsed.prompts or [])
    for flag, value in (("max-frames", parsed.max_frames), ("size", parsed.size)):
        if value is not None and value < 1:
            raise ValueError(f"--{flag} is {value}, but it must be 1 or more")
    device = choose_device(parsed.device)
    with open_stream(parsed.video, decoder=parsed.decoder, fps=parsed.fps, resize=parsed.resize) as stream:
        # Before the weights are read, which takes long.
        check_prompts(prompts, stream.size)
        outputs = _choose_outputs(parsed, stream.name)
        files = [file for flag, file in parsed.prompts if flag == "mask"]
        _refuse_inputs(outputs, [parsed.video, parsed.weights, *files])
        outcome = track(
            stream,
            _load(parsed, prompts, device),
            prompts,
            out=outputs["out"],
            masks=outputs["masks"],
            table=outputs["table"],
            max_frames=parsed.max_frames,
            progress=not parsed.no_progress,
        )
        damage = stream.damage
    if damage is not None:
        warnings.warn(f"{parsed.video} is damaged: {damage}; {outcome.num_frames} frames were read", stacklevel=1)
    if not outcome.is_whole:
        print(f"vision-rope: interrupted after {outcome.num_frames} frames, which are kept", file=sys.stderr)
    objects = f"{outcome.num_objects} object{'' if outcome.num_objects == 1 else 's'}"
    print(f"{outcome.num_frames} frames, {objects}, {outcome.num_frames / outcome.seconds:.2f} frames/s on {device}")
    print("\n".join(f"wrote {path}" for path in outputs.values() if path is not None))
    return 0 if outcome.is_whole else 130


def _load(parsed: Any, prompts: Prompts, device: torch.device) -> VideoSegmenter | PatchPropagation:
    if parsed.weights == WITHOUT_WEIGHTS:
        if parsed.size is not None:
            raise ValueError(f"--size is {parsed.size}, but {WITHOUT_WEIGHTS} has a scale of its own; leave it out")
        for said in (said for of_frame in prompts.values() for of_object in of_frame.values() for said in of_object):
            if not isinstance(said, MaskPrompt):
                raise ValueError(
                    f"--weights is {WITHOUT_WEIGHTS}, which follows masks alone; give --mask FILE, or weights of a "
                    "segmenter for points and boxes"
                )
        return PatchPropagation()
    from vision_rope.segmenter import VideoSegmenter

    options = {} if parsed.size is None else {"image_size": parsed.size}
    return VideoSegmenter.load(parsed.weights, device=device, **options)


def _choose_outputs(parsed: Any, name: str) -> dict[str, Path | None]:
    """Where to write; a folder that is not there yet for what no flag places."""
    folder, count = Path(DEFAULT_OUTPUT, name), 1
    while folder.exists():
        count += 1
        folder = Path(DEFAULT_OUTPUT, f"{name}-{count}")
    places = {"out": "overlay.mp4", "masks": "masks", "table": "objects.csv"}
    given = {"out": parsed.out, "masks": parsed.masks, "table": parsed.csv}
    return {
        key: None if given[key] == "none" else Path(given[key]) if given[key] is not None else folder / place
        for key, place in places.items()
    }


def _refuse_inputs(outputs: Mapping[str, Path | None], inputs: Iterable[str]) -> None:
    """Refuse to write over what is read, and two outputs of one name."""
    read = [Path(name).expanduser() for name in inputs]
    taken = {path.resolve(): f"{path} is read" for path in read if path.exists()}
    for key, output in outputs.items():
        if output is None:
            continue
        flag, place = f"--{'csv' if key == 'table' else key}", output.resolve()
        if place in taken:
            raise ValueError(f"{flag} is {output}, but {taken[place]}; give another name")
        taken[place] = f"{flag} is written there"


def _figures(objects: Any) -> dict[int, tuple[float | None, float | None]]:
    """Scores and qualities of all objects, in one transfer from the device; None of what tells none."""
    if not all(hasattr(one, "object_score") for one in objects.values()):
        return dict.fromkeys(objects, (None, None))
    if not objects:
        return {}
    figures = [torch.stack((one.object_score, one.mask_quality)) for one in objects.values()]
    return {key: (score, quality) for key, (score, quality) in zip(objects, torch.stack(figures).tolist(), strict=True)}


@contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets instead of raising KeyboardInterrupt wherever the program is."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler
    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
