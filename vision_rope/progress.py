"""Progress bars: of an epoch, with its line in the log, and of a stream of frames."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from vision_rope.results import Row

if TYPE_CHECKING:
    from vision_rope.data import DeviceLoader

Item = TypeVar("Item")

# Seconds between new figures: in a terminal, and where every one of them makes a line of a file.
TERMINAL_SECONDS = 0.5
FILE_SECONDS = 30.0


def show_progress(
    loader: DeviceLoader,
    totals: Tensor,
    *,
    epoch: int,
    epochs: int,
    num_processes: int,
    with_accuracy: bool,
    noun: str = "images",
    enabled: bool,
) -> Iterator[tuple[Any, ...]]:
    """Pass batches through under a bar with loss, accuracy, images a second and the time left to the whole run.

    Args:
        totals: sum of losses, right answers and images of this process so far; filled by whoever takes the batches.
            Read when the figures are renewed alone, since reading waits for the device.
        with_accuracy: whether right answers are counted.
        noun: what is counted: images or clips.
    """
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    interval = TERMINAL_SECONDS if is_terminal else FILE_SECONDS
    start = shown = time.perf_counter()
    with tqdm(
        total=len(loader),
        desc=f"epoch {epoch + 1}/{epochs}",
        unit="batch",
        mininterval=interval,
        delay=0 if is_terminal else interval,
        leave=False,
        dynamic_ncols=is_terminal,
        disable=not enabled,
    ) as bar:
        for index, batch in enumerate(loader):
            yield batch
            now = time.perf_counter()
            if enabled and now - shown > interval:
                shown = now
                loss, hits, images = totals.tolist()
                seconds = now - start
                left = seconds / (index + 1) * (len(loader) * (epochs - epoch) - index - 1)
                figures = (
                    f"loss {loss / images:.3f}",
                    *([f"accuracy {hits / images:.1%}"] if with_accuracy else []),
                    f"{images * num_processes / seconds:.0f} {noun}/s",
                    f"left {tqdm.format_interval(left)}",
                )
                bar.set_postfix_str(", ".join(figures), refresh=False)
            bar.update()


def show_frames(frames: Iterable[Item], *, total: int | None, enabled: bool) -> Iterable[Item]:
    """Pass frames through under a bar with frames a second, below 1 too.

    Args:
        total: as far as it is known; streams may end before it or after it.
    """
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    interval = TERMINAL_SECONDS if is_terminal else FILE_SECONDS
    bar = "{n_fmt} frames [{elapsed}, {rate_noinv_fmt}]"
    if total is not None:
        bar = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} frames [{elapsed}<{remaining}, {rate_noinv_fmt}]"
    return tqdm(
        frames,
        total=total,
        unit=" frames",
        bar_format=bar,
        mininterval=interval,
        delay=0 if is_terminal else interval,
        leave=False,
        dynamic_ncols=is_terminal,
        disable=not enabled,
    )


def summarise(row: Row, epochs: int, is_best: bool, headline: Sequence[str], noun: str) -> str:
    """The line of the log for an epoch that has ended."""
    words = [f"epoch {row['epoch']}/{epochs}", f"loss {row['train_loss']:.4f}"]
    if "train_top1" in row:
        words.append(f"accuracy {row['train_top1']:.1%}")
    for key in headline:
        value = row.get(f"val_{key}")
        if value is not None:
            words.append(f"val {key} {value:.4f}")
    words.append(f"lr {row['lr']:.2e}")
    words.append(f"{row['images_per_second']:.0f} {noun}/s")
    return "  ".join(words) + ("  (best)" if is_best else "")
