"""Running a study: position encodings side by side, on one budget with several seeds, evaluated at many sizes.

Every training is a run folder of its own, a cell. A finished cell is kept and not trained again; one that was stopped
goes on after its last whole epoch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vision_rope.checkpoint import find_last, write_whole
from vision_rope.config import to_yaml
from vision_rope.model_building import build_model
from vision_rope.points import point_of
from vision_rope.references import create_references
from vision_rope.results import Row, without_classes
from vision_rope.sizes import parse_sizes, pixel_size
from vision_rope.study_config import StudyConfig, load_study, override
from vision_rope.study_plan import CELLS, DEFAULT_OUTPUT, Cell, check_kept, check_models, plan

# What a study writes beside its cells.
OWN_NAMES = (
    *(CELLS, "elsewhere", "study.yaml", "study.csv", "study.md", "study.png", "pairs.csv"),
    *("references.json", "study.lock"),
)


class ProcessLostError(RuntimeError):
    """A process of the study ended in the middle of a training, killed by the system or by hand."""


def run_study(config: StudyConfig, report: Callable[[str], None] = print) -> tuple[list[Row], list[Path]]:
    """Train and evaluate all cells that are not finished, then write tables and the figure.

    Returns the rows of study.csv and the files written.

    Raises:
        ValueError: before any training, for what cannot work and for cells that were trained otherwise.
        ProcessLostError: where a process was killed.
    """
    output = Path(config.run.output or DEFAULT_OUTPUT)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("study was started by torchrun, but it starts its processes itself: study.processes")
    cells = plan(config)
    check_models(config, cells)
    if not config.run.overwrite:
        check_kept(cells)
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        return _run_locked(config, cells, output, report)


def _run_locked(
    config: StudyConfig, cells: Sequence[Cell], output: Path, report: Callable[[str], None]
) -> tuple[list[Row], list[Path]]:
    from vision_rope.study_elsewhere import judge_elsewhere
    from vision_rope.study_results import write_study

    if config.run.overwrite:
        _remove(output)
    write_whole(output / "study.yaml", to_yaml(replace(config, run=replace(config.run, overwrite=False))).encode())
    waiting = [cell for cell in cells if cell.load() is None]
    seeds = config.study.num_seeds
    report(f"{len(cells) // seeds} rows x {seeds} seeds in {output}; {len(waiting)} of {len(cells)} trainings to do")
    _run_cells(waiting, config, report)
    references = _references(config, output)
    rows: list[Row] = []
    for name, found in references.items():
        facts: Row = {"row": name, "seed": None, "cpu_seconds": None}
        rows += [{**facts, **row, **facts} for row in found]
    for cell in cells:
        result = cell.load()
        assert result is not None, "all cells are finished"
        facts = {"row": cell.row, "seed": cell.config.seed, "cpu_seconds": result["cpu_seconds"]}
        # Twice: they are the first columns, and win over the run's own seed of the same value.
        rows += [{**facts, **row, **facts} for row in result["rows"]]
        if result["failed"]:
            rows.append({**facts, "method": "none", "reason": result["failed"]})
    files = write_study(rows, config.study.baseline, output)
    return rows, files + judge_elsewhere(config.study.elsewhere, cells, config.study.baseline, output)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train and evaluate one cell, or go on with it; the result is kept in cell.json."""
    from vision_rope.trainer import TrainingDiverged, train

    started = (cell.folder / "config.yaml").is_file()
    if not started and cell.folder.exists():
        # Stopped while its first file was written.
        shutil.rmtree(cell.folder)
    resume = started and find_last(cell.folder) is not None
    run = replace(cell.config.run, resume=resume, overwrite=started and not resume)
    start, failed, rows = time.process_time(), None, []
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        try:
            train(replace(cell.config, run=run))
            rows = json.loads((cell.folder / "evaluation" / "evaluation.json").read_text())
        except TrainingDiverged as error:
            failed = str(error)
        except ValueError as error:
            if not resume:
                raise
            raise ValueError(f"{error}; it cannot go on: {cell.remedy}") from error
    result = {
        "rows": without_classes(rows),
        "failed": failed,
        # Of this process, loading and evaluation included; where a cell was resumed, of its last part.
        "cpu_seconds": time.process_time() - start,
    }
    write_whole(cell.folder / "cell.json", json.dumps(result, indent=1).encode())
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command `vision-rope study`."""
    config = load_study(argv)
    try:
        _, files = run_study(config)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the trainings that are left", file=sys.stderr)
        return 130
    except ProcessLostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    output = next(path for path in files if path.suffix == ".md")
    print("\n" + output.read_text())
    print("\n".join(f"wrote {path}" for path in files))
    return 0


def _run_cells(cells: Sequence[Cell], config: StudyConfig, report: Callable[[str], None]) -> None:
    """Run cells in this process, or several at a time in others."""
    from tqdm import tqdm

    bar = tqdm(total=len(cells), unit="training", disable=None if config.run.progress and cells else True)
    with bar:
        for cell, result in _results(cells, min(config.study.processes, len(cells))):
            bar.update()
            with bar.external_write_mode():
                report(_describe(cell, result))


def _results(cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if processes <= 1:
        for cell in cells:
            yield cell, run_cell(cell)
        return
    # Not forked: threads of torch and CUDA do not survive a fork.
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    threads = max((os.cpu_count() or 1) // processes, 1)
    with _terminating(ProcessPoolExecutor(processes, context, _start_worker, (number, threads))) as pool:
        futures = {pool.submit(run_cell, cell): cell for cell in cells}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise ProcessLostError(
                "a process of the study was killed, perhaps for want of memory; finished trainings are kept: the same "
                "command goes on, with fewer study.processes if memory was short"
            ) from None


@contextmanager
def _terminating(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with it at once when an error or Ctrl-C leaves the block."""
    before = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    pool.shutdown()


def _start_worker(number: Any, threads: int) -> None:
    """Settle in a new process: its threads, its GPU, and an end when the study's own process ends."""
    # Ctrl-C reaches all processes; the study's own one answers it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    with number.get_lock():
        place = number.value
        number.value += 1
    if (count := torch.cuda.device_count()) > 1:
        # Before CUDA starts here, so that each process sees a GPU of its own as the first one.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[place % count]
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep other studies out of a folder, where the system can; the lock ends with the process."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (output / "study.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another study is at work in {output}; wait for it, or give another run.output") from None
        yield


def _remove(output: Path) -> None:
    others = [path for path in output.iterdir() if path.name != "study.lock"] if output.exists() else []
    if others and not (output / "study.yaml").is_file():
        raise ValueError(f"run.output {output} holds files but no study (no study.yaml); give another folder")
    for name in OWN_NAMES:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _references(config: StudyConfig, output: Path) -> dict[str, list[Row]]:
    """What is reached without training, at all sizes; kept like the cells."""
    # They predict pixels, which patches of mean 0 and variance 1 are not.
    if config.task != "masked" or config.masked.target != "pixels":
        return {}
    from vision_rope.data import take_evenly
    from vision_rope.parallel import choose_device
    from vision_rope.sweep import patch_size_of, sweep
    from vision_rope.targets import open_split
    from vision_rope.tasks import create_task

    path, data = output / "references.json", config.data
    plain = override(config, {"model.position": "none"})
    patch_size = patch_size_of(build_model(plain, 0, pretrained=False))
    basis = [str(part) for part in (data, config.video, config.motion, config.masked, config.evaluation, patch_size)]
    with suppress(OSError, ValueError, TypeError, KeyError):
        # Made in seconds: a file that is missing or damaged is made anew.
        kept = json.loads(path.read_text())
        if kept["basis"] == basis:
            return kept["rows"]
    dataset = take_evenly(open_split(data, "validation", config), config.evaluation.max_images)
    rows = {
        name: without_classes(
            sweep(
                reference,
                dataset,
                task=create_task(plain, 0, patch_size),
                sizes=parse_sizes(config.evaluation.sizes),
                frames=config.evaluation.frames,
                fps=config.evaluation.fps,
                methods=["none"],
                train_size=pixel_size(data.size),
                train_frames=config.video.num_frames,
                train_fps=config.video.fps,
                patch_size=patch_size,
                device=choose_device(config.run.device),
                mean=data.mean,
                std=data.std,
                batch_size=config.evaluation.batch_size or config.batch_size,
                crop_pct=config.evaluation.crop_pct,
                interpolation=data.interpolation,
                num_workers=config.run.num_workers,
                about={"data": data.source, "split_seed": data.split_seed},
                progress=False,
            )
        )
        for name, reference in create_references(patch_size).items()
    }
    write_whole(path, json.dumps({"basis": basis, "rows": rows}, indent=1).encode())
    return rows


def _describe(cell: Cell, result: dict[str, Any]) -> str:
    from vision_rope.study_results import choose_metrics

    name = f"{cell.row}, seed {cell.config.seed}"
    if result["failed"]:
        return f"{name}: failed: {result['failed']}"
    rows = [row for row in result["rows"] if row["method"] == "none"]
    metric = choose_metrics(rows)[0]
    known = [row for row in rows if row[metric] is not None]
    figures = ", ".join(f"{100 * row[metric]:.1f} at {point_of(row)}" for row in known) or "has no value"
    return f"{name}: {metric} {figures} ({result['cpu_seconds']:.0f} CPU s)"
