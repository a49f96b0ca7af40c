"""Labelled clips by name: folders and lists of video files, and folders of frames.

A new name is a function here and a line in CLIP_DATASETS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vision_rope.data.clip_sampling import ClipSampling
from vision_rope.data.clips import ClipSource
from vision_rope.data.folders import Part, choose_items, list_classes, list_files, walk
from vision_rope.data.video_lists import NO_CLASS, read_list
from vision_rope.data.video_sources import (
    NOMINAL_FPS,
    FrameFolderSource,
    Segment,
    VideoSource,
    check_decoder,
    list_frame_files,
)

VIDEO_EXTENSIONS = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".mts"),
    *(".wmv", ".flv", ".ogv", ".3gp", ".asf", ".vob"),
)
RATE_FILE = "fps.txt"


def open_videos(path: str, part: Part, sampling: ClipSampling, skip_broken: bool, decoder: str) -> ClipSource:
    """Open video files: PATH/train and PATH/validation with a folder a class, one folder of classes, or a .csv list.

    Videos directly in a folder have no labels: all are of one class. Where there are no splits, a part of every class
    is held out.
    """
    name = f"videos:{path}"
    check_decoder(decoder)
    if path.lower().endswith(".csv"):
        classes, rows = read_list(Path(path).expanduser(), part)
        return VideoSource(
            name, classes, [row for row, _ in rows], [label for _, label in rows], sampling, skip_broken, decoder
        )
    classes, files = choose_items(name, part, list_videos, what="videos")
    segments = [Segment(file) for file, _ in files]
    return VideoSource(name, classes, segments, [label for _, label in files], sampling, skip_broken, decoder)


def open_frames(path: str, part: Part, sampling: ClipSampling, skip_broken: bool, decoder: str) -> ClipSource:
    """Open folders of frames: PATH/train/class/clip/0001.jpg and PATH/validation, or PATH/class/clip/0001.jpg.

    Folders of frames directly in PATH have no labels (DAVIS: frames:JPEGImages/480p). Frames follow each other at 30
    a second, or at the number that a file PATH/fps.txt holds.
    """
    name = f"frames:{path}"
    if decoder != "pyav":
        raise ValueError(f"decoder is {decoder!r}, but {name} has no video files; leave it out")
    classes, folders = choose_items(name, part, list_frame_folders, what="folders of frames")
    return FrameFolderSource(
        name,
        classes,
        [folder for folder, _ in folders],
        [label for _, label in folders],
        sampling,
        _read_rate(Path(path).expanduser()),
        skip_broken,
    )


CLIP_DATASETS: dict[str, Callable[[str, Part, ClipSampling, bool, str], ClipSource]] = {
    "videos": open_videos,
    "frames": open_frames,
}


def list_videos(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Classes of a folder, and its videos with their class; one class where they lie in the folder itself.

    Raises:
        ValueError: where there are none, or videos beside folders of videos.
    """
    if not any(_is_video(entry) for entry in folder.iterdir()):
        classes = list_classes(folder)
        return classes, list_files(folder, classes, VIDEO_EXTENSIONS, "videos")
    files = sorted(str(entry) for entry in folder.iterdir() if _is_video(entry))
    deeper = [
        str(Path(parent, file)) for parent, names in walk(folder) for file in names if _is_video(Path(parent, file))
    ]
    if len(deeper) > len(files):
        stray, inside = files[0], min(set(deeper) - set(files))
        raise ValueError(
            f"{folder} holds videos ({stray}) and folders of videos ({inside}); give a folder a class, or videos alone"
        )
    return [NO_CLASS], [(file, 0) for file in files]


def list_frame_folders(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Classes of a folder, and its folders of frames with their class; one class where they lie in the folder itself.

    Raises:
        ValueError: where there are none, or frames at different depths.
    """
    if list_frame_files(folder):
        raise ValueError(
            f"{folder} holds frames itself, but it must hold a folder a clip, or a folder of those a class"
        )
    names = list_classes(folder)
    direct = [name for name in names if list_frame_files(folder / name)]
    if len(direct) == len(names):
        return [NO_CLASS], [(str(folder / name), 0) for name in names]
    if direct:
        other = next(name for name in names if name not in direct)
        raise ValueError(
            f"{folder / direct[0]} holds frames and {folder / other} does not; give a folder a clip throughout, or a "
            "folder of those a class"
        )
    found = []
    for label, name in enumerate(names):
        clips = sorted(parent for parent, _ in walk(folder / name) if list_frame_files(Path(parent)))
        if not clips:
            raise ValueError(f"{folder / name} holds no folders of frames; expected images inside of folders there")
        found += [(clip, label) for clip in clips]
    return names, found


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_EXTENSIONS and not path.name.startswith(".") and path.is_file()


def _read_rate(folder: Path) -> float:
    file = folder / RATE_FILE
    if not file.is_file():
        return NOMINAL_FPS
    text = file.read_text().strip()
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"{file} holds {text!r}, but it must hold one positive number: the frames a second")
    return rate
