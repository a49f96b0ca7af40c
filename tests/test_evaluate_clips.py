"""Sweeps of models of clips over frames, rates and sizes: against clips run one by one, files, figures, mistakes."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import vision_rope
from vision_rope import cli, plots, preparation, sweep
from vision_rope.checkpoint import build_model
from vision_rope.config import DataConfig, EvaluationConfig, ModelConfig, TrainConfig, VideoConfig
from vision_rope.data import eval_transform
from vision_rope.data.clip_sampling import ClipSampling
from vision_rope.data.clips import Clip, ClipSource
from vision_rope.data.decode_video import BrokenVideoError
from vision_rope.evaluate import evaluate
from vision_rope.points import Point, check_frames, format_point, parse_fps, parse_frames
from vision_rope.results import format_table, write_results
from vision_rope.tasks import Classification

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 1, "num_classes": 3}
NORM = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
VIDEO_FPS = 10.0
# Frames of each video; the last one is shorter than some clips.
LENGTHS = (40, 48, 40, 12)


class Videos(ClipSource):
    """Four videos of noise, of three classes, in memory."""

    def __init__(self, num_frames: int = 4, fps: float | None = 5.0) -> None:
        self.name, self.classes = "videos", ["a", "b", "c"]
        self.sampling = ClipSampling(num_frames, fps)
        self.asked: list[tuple[int, float | None]] = []

    def __len__(self) -> int:
        return len(LENGTHS)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
        noise = torch.Generator().manual_seed(index)
        frames = torch.randint(256, (LENGTHS[index], 3, 20, 24), dtype=torch.uint8, generator=noise)
        seconds = torch.arange(LENGTHS[index], dtype=torch.float64) / VIDEO_FPS
        chosen = self.sampling.choose(seconds)
        return Clip(frames[chosen], seconds[chosen]), index % 3

    def sampled(self, num_frames: int, fps: float | None) -> Videos:
        self.asked.append((num_frames, fps))
        return Videos(num_frames, fps)

    def path(self, index: int) -> str:
        return f"video {index}"


def tiny_model(position: str = "qwen2-vl", **options: Any) -> nn.Module:
    torch.manual_seed(1)
    name = "vit_tiny_patch16_224"
    model = vision_rope.video_vit(name, num_frames=4, tubelet=(2, 8, 8), position=position, **options, **TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def swept(model: nn.Module, dataset: Any = None, **changes: Any) -> list[dict[str, Any]]:
    options: dict[str, Any] = {
        "sizes": [(16, 16)],
        "methods": ["none"],
        "train_size": (16, 16),
        "train_frames": 4,
        "train_fps": 5.0,
        "patch_size": (2, 8, 8),
        "device": torch.device("cpu"),
        "batch_size": 3,
        "num_workers": 0,
        "progress": False,
        **NORM,
        **changes,
    }
    return sweep.sweep(model, Videos() if dataset is None else dataset, **options)


def one_by_one(model: nn.Module, row: dict[str, Any]) -> float:
    """The mean likelihood of a row's clips, each decoded, resized, normalised and run by itself."""
    source, losses = Videos(row["frames"], row["fps"]), []
    resize = eval_transform((row["height"], row["width"]))
    for index in range(len(source)):
        clip, label = source[index]
        frames = torch.stack([resize(frame) for frame in clip.frames]).float() / 255
        frames = ((frames - 0.5) / 0.25).transpose(0, 1)[None]
        with torch.no_grad():
            logits = model.eval()(frames, clip.seconds)
        losses.append(F.cross_entropy(logits, torch.tensor([label])).item())
    return sum(losses) / len(losses)


# --- points ---------------------------------------------------------------------------------------------------


def test_points_have_names_and_grids() -> None:
    point = Point((16, 24), 8, 2.5)
    assert point.name == "8 frames 2.5 fps 16x24"
    assert point.grid((2, 8, 8)) == (4, 2, 3)
    assert Point((16, 16)).name == "16"
    assert Point((16, 16)).grid((8, 8)) == (2, 2)
    assert format_point("16", 1, None) == "1 frame 16"


def test_lists_of_frames_and_rates() -> None:
    assert parse_frames("8,16,8") == [8, 16]
    assert parse_fps("2,7.5") == [2.0, 7.5]
    with pytest.raises(ValueError, match=r"frames is '2\.5', but it must be a whole number"):
        parse_frames("2.5")
    with pytest.raises(ValueError, match="fps is 'fast', but it must be a number"):
        parse_fps("2,fast")


@pytest.mark.parametrize(("frames", "nearest"), [(9, "8 and 12"), (3, "are 4$"), (0, "multiple of 4")])
def test_frames_that_tubelets_do_not_divide_are_refused_with_the_nearest(frames: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"frames is {frames}.*{nearest}"):
        check_frames([4, frames], 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": [4, 7]}, "frames is 7, which tubelets of 2 frames do not divide; .* 6 and 8"),
        ({"fps": [2, 0]}, "fps is 0, but it must be a positive number"),
        ({"fps": [math.inf]}, "fps is inf, but it must be a positive number"),
        ({"sizes": [(12, 16)]}, "size 12x16 is not divisible"),
        ({"train_frames": None, "patch_size": (8, 8), "frames": [4]}, "frames is 4, but the model takes images"),
        ({"train_frames": None, "patch_size": (8, 8), "fps": [2.5]}, r"fps is 2\.5, but the model takes images"),
    ],
)
def test_wrong_points_are_refused_before_any_clip_is_read(changes: dict[str, Any], message: str) -> None:
    class Untouchable(Videos):
        def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
            raise AssertionError("a clip was read")

    with pytest.raises(ValueError, match=message):
        swept(tiny_model(), Untouchable(), **changes)


# --- figures of rows ------------------------------------------------------------------------------------------


def test_every_row_equals_its_clips_one_by_one() -> None:
    methods = ["none", "interpolate", "ntk"]
    rows = swept(tiny_model(), sizes=[(16, 16), (24, 16)], frames=[4, 8], fps=[5.0, 2.0], methods=methods)
    assert [(row["size"], row["frames"], row["fps"], row["method"]) for row in rows] == list(
        itertools.product(["16", "24x16"], [4, 8], [5.0, 2.0], methods)
    )
    for row in rows:
        fresh = vision_rope.set_extension(tiny_model(), row["method"], train_size=(2, 2, 2))
        assert row["nll"] == pytest.approx(one_by_one(fresh, row), rel=1e-4)
        assert row["steps"] == row["frames"] // 2
        assert (row["train_size"], row["train_frames"], row["train_fps"]) == ("16", 4, 5.0)
        assert not [key for key in row if "images" in key]
        assert row["clips_per_second"] > 0
    # Time is counted in steps: more of them are extended, longer gaps are not.
    figures = {(row["size"], row["frames"], row["fps"], row["method"]): row["nll"] for row in rows}
    assert figures["16", 4, 2.0, "ntk"] == pytest.approx(figures["16", 4, 2.0, "none"], rel=1e-6)
    assert figures["16", 8, 5.0, "ntk"] != pytest.approx(figures["16", 8, 5.0, "none"], rel=1e-4)


def test_longer_gaps_extend_time_where_it_goes_by_seconds() -> None:
    options: dict[str, Any] = {"positions_per_second": 10.0}
    model = tiny_model(**options)
    rows = swept(model, fps=[5.0, 2.0], methods=["none", "interpolate"], **options)
    for row in rows:
        # Two steps of 2 frames at 5 fps are 0.4 s or 4 positions apart.
        fresh = vision_rope.set_extension(tiny_model(**options), row["method"], train_size=(5, 2, 2))
        assert row["nll"] == pytest.approx(one_by_one(fresh, row), rel=1e-4)
    trained, apart = ([row["nll"] for row in rows if row["fps"] == fps] for fps in (5.0, 2.0))
    assert trained[0] == pytest.approx(trained[1], rel=1e-6)
    assert apart[0] != pytest.approx(apart[1], rel=1e-4)
    with pytest.raises(ValueError, match=r"no video\.fps nobody knows how long clips were"):
        swept(model, train_fps=None, methods=["interpolate"], **options)
    assert len(swept(model, train_fps=None, **options)) == 1


def test_a_preset_without_time_is_extended_in_space_alone() -> None:
    rows = swept(tiny_model("rope-vit-axial"), sizes=[(16, 16), (32, 32)], frames=[4, 8], methods=["interpolate"])
    nll = {(row["size"], row["frames"], row["method"]): row["nll"] for row in rows}
    assert nll["16", 8, "interpolate"] == pytest.approx(nll["16", 8, "none"], rel=1e-6)
    assert nll["32", 8, "interpolate"] != pytest.approx(nll["32", 8, "none"], rel=1e-4)


def test_a_method_without_meaning_has_its_reason_at_every_point() -> None:
    rows = swept(tiny_model("learned"), frames=[4, 8], methods=["ntk"])
    assert [row["reason"] is None for row in rows] == [True, False, True, False]
    assert rows[3]["nll"] is rows[3]["clips"] is None
    assert "ntk means nothing for the position encoding 'learned'" in format_table(rows)


def test_rows_say_how_many_clips_were_shorter_longer_and_left_out() -> None:
    # 12 frames at 10 fps last 1.1 s, 4 frames at 2 fps 1.5 s; at 30 fps all videos have frames too far apart.
    rows = swept(tiny_model(), fps=[2.0, 5.0, 30.0])
    assert [(row["clips"], row["clips_shorter"], row["clips_longer"]) for row in rows] == [
        (4, 1, 0),
        (4, 0, 0),
        (4, 0, 4),
    ]
    assert {row["clips_left_out"] for row in rows} == {0}
    assert format_table(rows).split("\n\n")[2].splitlines() == [
        "4 frames 2 fps 16: 1 of 4 clips are shorter, and sampled more densely.",
        "4 frames 30 fps 16: 4 of 4 clips are longer, for want of so many frames a second.",
    ]
    table = format_table(rows).split("\n\n")[1]
    assert "shorter  longer" in table.splitlines()[0]
    assert "left out" not in table

    counts = sweep.ClipCounts(total=5, num_frames=4, fps=None)
    counts.add(torch.tensor([[0.0, 9.0]]))
    assert counts.complete({"images": 3}) == {"clips": 3, "clips_left_out": 2, "clips_shorter": 0, "clips_longer": 0}


def test_files_left_out_are_told_once_in_the_whole_sweep() -> None:
    class Skipping(Videos):
        skip_broken = True

        def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
            try:
                return super().read(index, generator)
            except ValueError as error:
                raise BrokenVideoError(self.path(index), str(error)) from error

        def sampled(self, num_frames: int, fps: float | None) -> Videos:
            return Skipping(num_frames, fps)

    told: list[str] = []
    rows = swept(tiny_model(), Skipping(), frames=[14, 16], fps=[10.0, 5.0], report=told.append)
    assert [row["clips_left_out"] for row in rows] == [1] * 4
    assert len(told) == 1
    assert told[0].endswith("no clip can be made of it: it has 12 frames, but a clip takes 14, none twice")


def test_counts_of_clips_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "gather", lambda value: [value, (2, 1)])
    counts = sweep.ClipCounts(total=9, num_frames=3, fps=2.0)
    counts.add(torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.3, 0.6], [0.0, 1.0, 2.0]]))
    figures = counts.complete({"images": 9, "images_per_second": 3.0})
    assert figures == {
        "clips": 9,
        "clips_per_second": 3.0,
        "clips_left_out": 0,
        "clips_shorter": 3,
        "clips_longer": 2,
    }


def test_a_task_may_take_clips_with_more_frames_than_the_model_sees() -> None:
    class Halves(Classification):
        clip_factor = 2

        def eval_batch(self, images: Any, labels: Tensor, places: Tensor | None) -> Any:
            assert images.frames.shape[2] == 8
            first = images._replace(frames=images.frames[:, :, :4], seconds=images.seconds[:, :4])
            return super().eval_batch(first, labels, places)

    dataset = Videos()
    (row,) = swept(tiny_model(), dataset, task=Halves(3))
    assert dataset.asked == [(8, 5.0)]
    assert (row["frames"], row["steps"], row["clips_shorter"]) == (4, 2, 1)


# --- tables, files, figures -----------------------------------------------------------------------------------


def test_tables_and_files_name_the_points(tmp_path: Path) -> None:
    rows = swept(tiny_model(), frames=[4, 8], fps=[2.0], about={"model": "tiny"}, train_fps=None)
    rows += swept(tiny_model(), train_fps=None)
    table = format_table(rows)
    head, *lines = table.split("\n\n")[1].splitlines()
    assert head.split()[:5] == ["size", "frames", "fps", "method", "crop_pct"]
    assert [line.split()[:4] for line in lines] == [
        ["16", "4", "2", "none"],
        ["16", "8", "2", "none"],
        ["16", "4", "all", "none"],
    ]
    assert "clips/s" in head
    assert "train frames 4" in table

    paths = write_results(rows[:2], tmp_path)
    assert json.loads(paths[1].read_text()) == rows[:2]
    with paths[0].open(newline="") as file:
        found = [(row["frames"], row["fps"], row["steps"], row["train_fps"]) for row in csv.DictReader(file)]
    assert found == [("4", "2.0", "2", ""), ("8", "2.0", "4", "")]
    with paths[2].open(newline="") as file:
        classes = [tuple(row.values())[:5] for row in csv.DictReader(file)]
    assert classes == [("16", frames, "2.0", "none", name) for frames in ("4", "8") for name in "abc"]


def test_the_figure_joins_clips_of_one_size_and_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    rows = [
        {
            **Point((side, side), frames, fps).describe((2, 8, 8)),
            **Point((16, 16), 4, 5.0).describe_training(),
            "method": "none",
            "direction": side + frames / 100,
            "nll": fps,
        }
        for side, fps, frames in itertools.product([32, 16], [2.0, 5.0], [8, 4])
    ]
    plots.plot_evaluation(rows, tmp_path / "x.png")
    panels = {panel.get_title(): panel for panel in figures[0].axes}
    assert list(panels) == ["right direction (of 8)", "negative log-likelihood"]
    line, mark = (
        line
        for line in panels["right direction (of 8)"].lines
        if line.get_xdata() is not None and len(line.get_xdata())
    )
    assert np.array(line.get_ydata()).tolist() == pytest.approx(
        [16.04, 16.08, math.nan, 16.04, 16.08, math.nan, 32.04, 32.08, math.nan, 32.04, 32.08], nan_ok=True
    )
    assert figures[0].get_supxlabel().endswith("trained at 4 frames 5 fps 16")
    # The first points of the second group, 5 fps at 16 pixels.
    assert list(mark.get_xdata()) == [3.0, 3.0]
    labels = [label.get_text() for label in panels["negative log-likelihood"].get_xticklabels()]
    assert sorted(label.strip().replace("\n", ", ") for label in labels) == sorted(
        ["8"] * 4 + [f"4, {rate} fps, {side} px" for side in (16, 32) for rate in (2, 5)]
    )


def test_the_figure_joins_no_points_of_different_clips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    rows = [
        {
            **Point((16, 16), frames, 2.0).describe((2, 8, 8)),
            **Point((16, 16), 4, 2.0).describe_training(),
            "method": "none",
            "top1": frames / 100,
            "clips": clips,
        }
        for frames, clips in ((4, 7), (8, 7), (16, 4), (32, 4))
    ]
    plots.plot_evaluation(rows, tmp_path / "x.png")
    plots.plot_evaluation(rows[:2], tmp_path / "x.png")
    lines = figures[0].axes[0].lines
    (line,) = (line for line in lines if line.get_label() == "no extension")
    (hollow,) = (line for line in lines if line.get_markerfacecolor() == "white")
    assert list(line.get_ydata()) == pytest.approx([0.04, 0.08, math.nan, 0.16, 0.32], nan_ok=True)
    assert list(hollow.get_ydata()) == [0.16, 0.32]
    assert [figure.get_supxlabel().endswith("hollow: not all clips") for figure in figures] == [True, False]


# --- configurations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("video", "evaluation", "message"),
    [
        ({}, {"sizes": ["16"], "frames": [4]}, "evaluation: frames is 4, but the model takes images"),
        ({"num_frames": 4}, {"frames": [4]}, "evaluation: frames and fps would have no effect without sizes"),
        ({"num_frames": 4}, {"sizes": ["16"], "frames": [5]}, "evaluation: frames is 5, which tubelets of 2"),
        (
            {"num_frames": 4},
            {"sizes": ["16"], "fps": [-1.0]},
            "evaluation: fps is -1, but it must be a positive number",
        ),
        (
            {"num_frames": 4, "positions_per_second": 2.0},
            {"sizes": ["16"], "extend": ["ntk"]},
            r"evaluation: extend asks .* no video\.fps",
        ),
    ],
)
def test_frames_and_rates_are_checked_before_training(
    video: dict[str, Any], evaluation: dict[str, Any], message: str
) -> None:
    options = {key: value for key, value in TINY.items() if key not in ("img_size", "num_classes")}
    config = TrainConfig(
        model=ModelConfig(name="vit_tiny_patch16_224", position="qwen2-vl" if video else "none", options=options),
        data=DataConfig(size=16),
        video=VideoConfig(**video),
        evaluation=EvaluationConfig(**evaluation),
    )
    with pytest.raises(ValueError, match=message):
        preparation.check_sweep(config, build_model(config, 3))


@pytest.mark.parametrize("arguments", [{"frames": "8"}, {"fps": [2.0]}, {"skip_broken": True}])
def test_timm_models_take_no_frames(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is .* the model takes images"):
        evaluate("vit_tiny_patch16_224", data="folder:x", **arguments)


# --- a run ----------------------------------------------------------------------------------------------------


def write_clips(folder: Path) -> None:
    """Two classes of four clips, whose noise moves to the right or to the left: 24 frames at 10 a second."""
    generator = np.random.default_rng(0)
    for name, way in (("right", 1), ("left", -1)):
        for clip in range(4):
            frames = folder / name / str(clip)
            frames.mkdir(parents=True)
            picture = generator.integers(0, 255, (24, 24, 3), dtype=np.uint8)
            for frame in range(24):
                Image.fromarray(np.roll(picture, way * frame, 1)).save(frames / f"{frame}.png")
    (folder / "fps.txt").write_text("10\n")


@pytest.mark.integration
def test_a_run_on_clips_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clips(tmp_path / "clips")
    options = "{patch_size: 8, embed_dim: 32, depth: 1, num_heads: 1, class_token: false, global_pool: avg}"
    words = f"""train --task classification --batch_size 2 --model.position qwen2-vl --model.options
        --data.source frames:{tmp_path}/clips --data.size 16 --video.num_frames 4 --video.fps 4
        --schedule.epochs 1 --schedule.warmup_epochs 0 --run.num_workers 0 --run.device cpu --run.tensorboard false
        --run.progress false --run.output {tmp_path}/run""".split()
    words.insert(words.index("--model.options") + 1, options)
    assert cli.main(words) == 0
    words = f"""evaluate {tmp_path}/run --frames 4,8 --fps 2,4 --sizes 16,32 --extend none,interpolate --workers 0
        --no-progress --device cpu""".split()
    assert cli.main(words) == 0
    assert "size  frames  fps" in capsys.readouterr().out
    with (tmp_path / "run" / "evaluation" / "evaluation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["size"], row["frames"], row["fps"], row["method"]) for row in rows] == list(
        itertools.product(["16", "32"], ["4", "8"], ["2.0", "4.0"], ["none", "interpolate"])
    )
    assert {row["clips"] for row in rows} == {"2"}
    # 24 frames last 2.3 s: less than 8 frames at 2 a second alone.
    shorter = {(row["frames"], row["fps"]) for row in rows if row["clips_shorter"] == "2"}
    assert shorter == {("8", "2.0")}
    assert all(0 < float(row["nll"]) < 5 for row in rows)
    assert (tmp_path / "run" / "evaluation" / "evaluation.png").stat().st_size > 0

    for more, message in (
        (["--data", "folder:x"], "the run looks at clips, but folder:x gives images; choose videos:, frames:, motion:"),
        (["--data", f"{tmp_path}/clips"], f"; did you mean videos:{tmp_path}/clips?"),
        (["--frames", "32"], "none twice; --skip-broken leaves such videos out, and --frames takes fewer frames of"),
    ):
        assert cli.main([*words, *more]) == 2
        assert message in capsys.readouterr().err
