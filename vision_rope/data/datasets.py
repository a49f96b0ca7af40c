"""Labelled images and clips by name: solar cells from a package, folders, videos, and everything that timm opens.

A new name is a function here and a line in DATASETS, of clips in CLIP_DATASETS.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from vision_rope.config import MotionConfig, ObjectsConfig
from vision_rope.data.clip_sampling import ClipSampling
from vision_rope.data.clips import ClipSource
from vision_rope.data.folders import Part, Split, choose_items, hold_out, list_files, list_images
from vision_rope.data.motion import MotionSource
from vision_rope.data.pseudo_videos import PseudoVideoSource
from vision_rope.data.segmented_clips import check_no_rate, open_davis
from vision_rope.data.sources import EvenPart, FileSource, ImageSource, IterableSource
from vision_rope.data.timm_datasets import TIMM_PREFIXES, open_timm
from vision_rope.data.video_datasets import CLIP_DATASETS
from vision_rope.data.video_sources import EvenClips

Source = ImageSource | IterableSource | ClipSource

# Kinds of clips that are made from the photographs of another source.
MADE_FROM_IMAGES = ("motion", "pseudo")


def open_dataset(
    source: str,
    split: Split,
    *,
    root: str | None = None,
    train_split: str = "train",
    val_split: str = "validation",
    val_fraction: float = 0.25,
    split_seed: int = 0,
    download: bool = False,
    sampling: ClipSampling | None = None,
    skip_broken: bool = False,
    decoder: str = "pyav",
    motion: MotionConfig | None = None,
    objects: ObjectsConfig | None = None,
    size: tuple[int, int] | None = None,
) -> Source:
    """Open one split of a data set.

    Args:
        source: elpv, folder:PATH, images:PATH (no labels), or a name of timm's: torch/cifar10, hfds/NAME, wds/NAME;
            clips: videos:PATH (a folder or a .csv list), frames:PATH (a folder of images a clip) or motion:SOURCE
            (made from the photographs of any of those sources of images); clips of objects: davis:PATH (a folder in
            the DAVIS layout) or pseudo:SOURCE (made from photographs).
        split: train or validation.
        root: the folder that timm's names are looked up in.
        train_split: what the source itself calls the training split.
        val_split: what the source itself calls the validation split.
        val_fraction: part held out for validation where the source has no splits; every class gives the same part.
        split_seed: seed of that choice; it hangs on file names alone, not on other files nor on library versions.
        download: let timm and torchvision download the data set.
        sampling: which frames make a clip; for clips alone, which need it.
        skip_broken: leave clips out that cannot be read, which loaders report; else they are an error.
        decoder: of video files: pyav, torchcodec or nvdec (torchcodec on an NVIDIA GPU, for loaders without workers).
        motion: what moves how in clips of motion:SOURCE; none takes the defaults.
        objects: how clips of objects are taken or made; none takes the defaults.
        size: of the frames of pseudo:SOURCE, (height, width), which need it.

    Raises:
        ValueError: for an unknown source, an option that the source cannot follow, a folder without images.
        ModuleNotFoundError: where the source needs a package that is not installed; it says how to install it.
    """
    if split not in ("train", "validation"):
        raise ValueError(
            f"split is {split!r}; choose train or validation (train_split, val_split name the source's own)"
        )
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, but it must lie between 0 and 1")
    name, _, path = source.partition(":")
    if name in MADE_FROM_IMAGES:
        if path.partition(":")[0] in (*CLIP_DATASETS, "davis", *MADE_FROM_IMAGES):
            raise ValueError(_refusal(name, path, "clips"))
        photographs = open_dataset(
            path,
            split,
            root=root,
            train_split=train_split,
            val_split=val_split,
            val_fraction=val_fraction,
            split_seed=split_seed,
            download=download,
        )
        if name == "pseudo":
            return open_pseudo(photographs, sampling, objects or ObjectsConfig(), size)
        return open_motion(photographs, sampling, motion or MotionConfig())
    gives_clips = name in CLIP_DATASETS or name == "davis"
    if not gives_clips and (sampling is not None or skip_broken):
        raise ValueError(
            f"sampling and skip_broken are for clips, but {source} gives images; choose "
            f"{', '.join(f'{entry}:PATH' for entry in (*CLIP_DATASETS, 'davis'))}, motion:SOURCE or pseudo:SOURCE, or "
            "leave them out"
        )
    if source.split("/")[0] in TIMM_PREFIXES and "/" in source:
        own_split = train_split if split == "train" else val_split
        return open_timm(source, own_split, root=root, is_training=split == "train", seed=split_seed, download=download)
    if name not in DATASETS and not gives_clips:
        known = [*DATASETS, *CLIP_DATASETS, "davis", *MADE_FROM_IMAGES, *(f"{prefix}/" for prefix in TIMM_PREFIXES)]
        close = difflib.get_close_matches(name.split("/")[0], [entry.strip("/") for entry in known], n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"data source {source!r} is unknown; choose elpv, folder:PATH, images:PATH, videos:PATH, frames:PATH, "
            "motion:SOURCE, davis:PATH, pseudo:SOURCE, or a name of timm's beginning with "
            f"{', '.join(f'{prefix}/' for prefix in TIMM_PREFIXES)}{hint}"
        )
    if root is not None:
        raise ValueError(f"root is {root!r}, but only timm's names are looked up in it; leave it out with {source}")
    if download:
        raise ValueError(f"download is on, but {source} is not downloaded; leave it off")
    part = Part(split, train_split, val_split, val_fraction, split_seed)
    if gives_clips:
        if sampling is None:
            raise ValueError(f"{source} gives clips, which need sampling: how many frames (video.num_frames)")
        if name == "davis":
            return open_davis(path, part, sampling, objects or ObjectsConfig(), skip_broken)
        return CLIP_DATASETS[name](path, part, sampling, skip_broken, decoder)
    return DATASETS[name](path, part)


def open_elpv(path: str, part: Part) -> ImageSource:
    """Open 2,624 photographs of solar cells; a cell counts as defective where its probability is at least 0.5.

    Source: Deitsch et al., arXiv 1807.02894; the experts' answers are the probabilities 0, 1/3, 2/3 and 1.
    """
    if path:
        raise ValueError(f"elpv takes no path, but got {path!r}; it is read from its package")
    part.refuse_names("elpv has no splits of its own")
    package = importlib.util.find_spec("elpv_dataset")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "elpv needs the package elpv-dataset: pip install vision-rope[elpv]", name="elpv_dataset"
        )
    folder = Path(package.origin).parent / "data"
    rows = [line.split() for line in (folder / "labels.csv").read_text().splitlines() if line.strip()]
    names = [row[0] for row in rows]
    labels = [int(float(row[1]) >= 0.5) for row in rows]
    strata = [f"{row[1]} {row[2]}" for row in rows]
    chosen = hold_out(names, strata, part.split, part.val_fraction, part.split_seed)
    return FileSource(
        "elpv",
        ["functional", "defective"],
        [str(folder / names[index]) for index in chosen],
        [labels[index] for index in chosen],
        licence="CC BY-NC-SA 4.0",
    )


def open_folder(path: str, part: Part) -> ImageSource:
    """Open PATH/train and PATH/validation (or val, valid, test) with a folder a class, or one folder of classes.

    Where there are no splits, a part of every class is held out.
    """
    name = f"folder:{path}"
    classes, files = choose_items(name, part, list_images, what="images")
    return FileSource(name, classes, [file for file, _ in files], [label for _, label in files])


def open_images(path: str, part: Part) -> ImageSource:
    """Open all images below PATH, at any depth, without labels: for masked prediction; a part is held out."""
    if not path:
        raise ValueError("images needs a path: images:PATH")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data source images:{path}: there is no folder {folder}")
    part.refuse_names("images:PATH has no splits of its own")
    files = [file for file, _ in list_files(folder.parent, [folder.name])]
    keys = [Path(file).relative_to(folder).as_posix() for file in files]
    chosen = hold_out(keys, [""] * len(keys), part.split, part.val_fraction, part.split_seed)
    return FileSource(f"images:{path}", ["image"], [files[index] for index in chosen], [0] * len(chosen))


def open_motion(photographs: Source, sampling: ClipSampling | None, motion: MotionConfig) -> MotionSource:
    """Make clips from photographs.

    Raises:
        ValueError: for photographs without random access, clips of no length and frames of no rate.
    """
    images, sampling = _check_photographs("motion", photographs, sampling)
    if sampling.fps is None:
        raise ValueError(
            f"motion:{images.name} can be made at any rate, so fps must say which; give video.fps, for instance 8"
        )
    return MotionSource(images, motion, num_frames=sampling.num_frames, fps=sampling.fps)


def open_pseudo(
    photographs: Source, sampling: ClipSampling | None, objects: ObjectsConfig, size: tuple[int, int] | None
) -> PseudoVideoSource:
    """Make clips of objects from photographs.

    Raises:
        ValueError: for photographs without random access, clips of no length and no size, and a rate.
    """
    images, sampling = _check_photographs("pseudo", photographs, sampling)
    check_no_rate(f"pseudo:{images.name}", sampling.fps)
    if size is None:
        raise ValueError(f"pseudo:{images.name} is made at any size, so size must say which; give (height, width)")
    return PseudoVideoSource(images, sampling.num_frames, objects, size)


def _check_photographs(
    kind: str, photographs: Source, sampling: ClipSampling | None
) -> tuple[ImageSource, ClipSampling]:
    """Refuse what no clips can be made from."""
    if not isinstance(photographs, ImageSource):
        is_stream = isinstance(photographs, IterableSource)
        found = "a stream, which has no photograph number 5" if is_stream else "clips"
        raise ValueError(_refusal(kind, photographs.name, found))
    if sampling is None:
        raise ValueError(
            f"{kind}:{photographs.name} gives clips, which need sampling: how many frames (video.num_frames)"
        )
    return photographs, sampling


def _refusal(kind: str, source: str, found: str) -> str:
    return (
        f"{kind}:{source} is to be made from photographs, but {source} gives {found}; choose {kind}:folder:PATH, "
        f"{kind}:images:PATH or another source of images"
    )


def take_evenly(dataset: Source, count: int | None) -> Source:
    """So many images or clips of a data set, evenly spread; all of them where count is none or larger.

    Raises:
        ValueError: for a stream, which has no order to spread them over.
    """
    if count is None:
        return dataset
    if isinstance(dataset, IterableSource):
        raise ValueError(f"max_images is {count}, but {dataset.name} is a stream; leave it out to take all images")
    if count >= len(dataset):
        return dataset
    return EvenClips(dataset, count) if isinstance(dataset, ClipSource) else EvenPart(dataset, count)


DATASETS: dict[str, Callable[[str, Part], ImageSource]] = {
    "elpv": open_elpv,
    "folder": open_folder,
    "images": open_images,
}
