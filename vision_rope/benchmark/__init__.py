"""Speed beside the installed libraries: ratios from one run, in the terminal and as JSON, Markdown and a figure."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision_rope.suggestion import did_you_mean

DEFAULT_ROUNDS = 15


@dataclass(frozen=True)
class Benchmark:
    """A row of BENCHMARKS.

    Attributes:
        summary: one line for --help.
        add_flags: its own flags.
        prepare: parsed flags and device -> titles of its sections, and functions that build its cases.
    """

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    prepare: Callable[[argparse.Namespace, Any], tuple[dict[str, str], list[Callable[[], Any]]]]


def _rotate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", help="what to compare, with commas [all but compiled-backward]")
    parser.add_argument("--shapes", default="S1,S2,S3,S4", help="sizes of queries: S1,S2,S3,S4 [all]")
    parser.add_argument("--dtypes", default="fp32,bf16", help="fp32,bf16 [both]")


def _prepare_rotate(parsed: argparse.Namespace, device: Any) -> tuple[dict[str, str], list[Callable[[], Any]]]:
    from vision_rope.benchmark import rotate

    sections = choose("sections", parsed.sections, rotate.SECTIONS, rotate.DEFAULT_SECTIONS)
    shapes = choose("shapes", parsed.shapes, rotate.SHAPES)
    return rotate.SECTIONS, rotate.rotate_cases(
        sections, shapes, choose("dtypes", parsed.dtypes, rotate.DTYPES), device
    )


def _vit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", help="what to compare, with commas [all; of clips all but clip-training]")
    parser.add_argument("--sizes", help="square sizes in pixels [224,448; of clips 224]")
    parser.add_argument("--frames", help="frames of a clip, for instance 16,64: a video ViT-S instead of an image one")
    parser.add_argument("--batch-size", type=int, help="images a batch [4], or clips [1]")


def _prepare_vit(parsed: argparse.Namespace, device: Any) -> tuple[dict[str, str], list[Callable[[], Any]]]:
    from vision_rope.benchmark import video, vit

    room: Any = vit if parsed.frames is None else video
    sections = choose("sections", parsed.sections, room.SECTIONS, room.DEFAULT_SECTIONS)
    if parsed.rounds is None and room is video:
        parsed.rounds = video.DEFAULT_ROUNDS
    sizes = []
    for text in (parsed.sizes or room.DEFAULT_SIZES).split(","):
        if not text.isdecimal() or int(text) < vit.PATCH or int(text) % vit.PATCH:
            raise ValueError(f"sizes has {text!r}; give multiples of {vit.PATCH} pixels, for instance 224,448")
        sizes.append(int(text))
    sizes = list(dict.fromkeys(sizes))
    if parsed.batch_size is not None and parsed.batch_size < 1:
        raise ValueError(f"batch-size is {parsed.batch_size}; it must be a positive number of images or clips")
    if parsed.frames is None:
        return vit.SECTIONS, vit.vit_cases(sections, sizes, parsed.batch_size or 4, device)
    frames = _counts("frames", parsed.frames)
    for count in frames:
        if count % video.TUBELET:
            raise ValueError(f"frames has {count}; give multiples of {video.TUBELET}, the frames of a tubelet")
    return video.SECTIONS, video.video_cases(sections, sizes, frames, parsed.batch_size or 1, device)


def _memory_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", help="what to compare, with commas [all]")
    parser.add_argument("--grids", default="16,32,64", help="sides of square grids of tokens [16,32,64]")
    parser.add_argument("--frames", default="1,3,7", help="stored frames [1,3,7]")
    parser.add_argument("--objects", default="1", help="objects that are followed at once [1]")


def _prepare_memory(parsed: argparse.Namespace, device: Any) -> tuple[dict[str, str], list[Callable[[], Any]]]:
    from vision_rope.benchmark import memory

    sections = choose("sections", parsed.sections, memory.SECTIONS, tuple(memory.SECTIONS))
    grids, frames, objects = (_counts(name, getattr(parsed, name)) for name in ("grids", "frames", "objects"))
    return memory.SECTIONS, memory.memory_cases(sections, grids, frames, objects, device)


def _counts(name: str, text: str) -> list[int]:
    words = text.split(",")
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"{name} has {word!r}; give positive whole numbers with commas between them")
    return list(dict.fromkeys(map(int, words)))


BENCHMARKS = {
    "rotate": Benchmark("turning queries and keys, packed qkv, tables", _rotate_flags, _prepare_rotate),
    "vit": Benchmark("what positions cost in a ViT-S", _vit_flags, _prepare_vit),
    "memory": Benchmark("a frame through SAM 2's memory attention", _memory_flags, _prepare_memory),
}


def choose(name: str, text: str | None, known: Any, default: Sequence[str] = ()) -> list[str]:
    """Names with commas between them, each of which must be known; what is named twice is taken once.

    Raises: ValueError that names the nearest.
    """
    if text is None:
        return list(default)
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ValueError(f"{name} has {word!r}; choose from {', '.join(known)}{did_you_mean(word, known)}")
    return list(dict.fromkeys(words))


def run_benchmark(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a benchmark of the command line, print its tables and write its files; returns the exit status."""
    import torch
    from tqdm import tqdm

    from vision_rope.benchmark.report import format_benchmark, plot_benchmark
    from vision_rope.benchmark.timing import describe_machine, measure_case, restart_with_warm_allocator
    from vision_rope.checkpoint import write_whole
    from vision_rope.parallel import choose_device

    if parsed.rounds is not None and parsed.rounds < 1:
        raise ValueError(f"rounds is {parsed.rounds}; it must be a positive number")
    if parsed.threads < 1:
        raise ValueError(f"threads is {parsed.threads}; it must be a positive number")
    device = choose_device(parsed.device)
    titles, cases = BENCHMARKS[parsed.benchmark].prepare(parsed, device)
    if not cases:
        raise ValueError("these sections and sizes leave nothing to measure; choose more of them")
    paths = prepare_files(Path(parsed.out or Path("runs", "benchmark")), parsed.benchmark)
    restart_with_warm_allocator("vision_rope.cli", words)
    torch.set_num_threads(parsed.threads)
    command, machine = f"vision-rope {' '.join(words)}", describe_machine(device)
    rows: list[dict[str, Any]] = []
    report = ""
    with tqdm(total=len(cases), disable=parsed.no_progress, unit="case") as bar:
        for build in cases:
            case = build()
            bar.set_postfix_str(f"{case.section} {case.label} {case.dtype}")
            rows += measure_case(case, rounds=parsed.rounds or DEFAULT_ROUNDS, device=device, seed=parsed.seed)
            # After every case, so that a kill loses none of those before.
            content = {"command": command, "machine": machine, "rows": rows}
            write_whole(paths["json"], (json.dumps(content, indent=1) + "\n").encode())
            report = format_benchmark(rows, machine, titles, command)
            write_whole(paths["md"], report.encode())
            bar.update()
    print(report)
    plot_benchmark(rows, titles, paths["png"])
    print("\n".join(f"wrote {path}" for path in paths.values()))
    return 0


def prepare_files(folder: Path, name: str) -> dict[str, Path]:
    """Ending -> file of the results, in a folder that is made and can be written to.

    Raises: ValueError where the folder or a file of it cannot be written.
    """
    paths = {ending: folder / f"{name}.{ending}" for ending in ("json", "md", "png")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out is {folder}, where nothing can be written ({error}); give another folder") from error
    for path in paths.values():
        if path.is_dir():
            raise ValueError(f"{path} is a folder and the results go there; move it, or give another folder as out")
    return paths
