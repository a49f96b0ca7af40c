"""Trackers on marked videos: what they are told, what is judged, what is written."""

from __future__ import annotations

import csv
import itertools
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vision_rope import evaluate_videos as room
from vision_rope.cli import main
from vision_rope.data.davis import VideoSequence, find_sequences, read_ids, write_ids
from vision_rope.evaluate_videos import FrameSize, SizedSegmenter, evaluate_videos, follows_objects, list_settings
from vision_rope.propagation import CopyFirst
from vision_rope.segmenter import FrameSizeError, MaskPrompt, VideoSegmenter, create_segmenter
from vision_rope.tracking_results import TrackingResult, average_by_frame, format_tracking, plot_tracking
from vision_rope.tracking_scores import ResizedTracker, follow, score_sequence
from vision_rope.vos_metrics import ObjectScores, region_similarity

SIZE = (40, 56)
SPEED = 3


def draw_ids(step: int) -> Tensor:
    """Object 1 moves to the right; object 4 is there from frame 2 on, and stands still."""
    ids = torch.zeros(SIZE, dtype=torch.uint8)
    ids[5:17, 2 + SPEED * step : 14 + SPEED * step] = 1
    if step >= 2:
        ids[25:35, 30:45] = 4
    return ids


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sequences of 7 and 3 frames."""
    from PIL import Image

    root = tmp_path_factory.mktemp("davis")
    for name, count in (("walk", 7), ("stop", 3)):
        frames, masks = root / "JPEGImages/480p" / name, root / "Annotations/480p" / name
        frames.mkdir(parents=True)
        masks.mkdir(parents=True)
        for step in range(count):
            ids = draw_ids(step)
            pixels = torch.stack([ids * 60, 255 - ids * 50, torch.full_like(ids, 90)], -1)
            Image.fromarray(pixels.numpy()).save(frames / f"{step:05d}.png")
            write_ids(masks / f"{step:05d}.png", ids)
    return root


@pytest.fixture
def walk(root: Path) -> VideoSequence:
    (found,) = (sequence for sequence in find_sequences(root) if sequence.name == "walk")
    return found


class Script:
    """A tracker that says what a function of the frame's number says, and writes down what it is told."""

    def __init__(self, say: Callable[[int], dict[int, Tensor]]) -> None:
        self.say = say
        self.told: list[tuple[int, dict[int, Tensor]]] = []
        self.sizes: list[tuple[int, ...]] = []

    def start(self) -> int:
        return 0

    def step(
        self, state: int, frame: Tensor, prompts: Mapping[int, MaskPrompt] | None = None
    ) -> tuple[int, dict[int, Tensor]]:
        self.sizes.append(tuple(frame.shape))
        if prompts:
            self.told.append((state, {key: prompt.mask for key, prompt in prompts.items()}))
        return state + 1, self.say(state)


def say_truth(step: int) -> dict[int, Tensor]:
    ids = draw_ids(step)
    return {key: (ids == key).float() - 0.5 for key in (1, 4)}


def test_each_object_is_shown_once_where_it_appears(walk: VideoSequence) -> None:
    tracker = Script(say_truth)
    scores = score_sequence(tracker, walk)
    assert [(step, list(masks)) for step, masks in tracker.told] == [(0, [1]), (2, [4])]
    for step, masks in tracker.told:
        assert all(torch.equal(mask, draw_ids(step) == key) for key, mask in masks.items())
    # Neither the frames in which an object is shown nor the last one are judged.
    assert {key: list(one.j) for key, one in scores.objects.items()} == {1: [1, 2, 3, 4, 5], 4: [3, 4, 5]}
    assert all({*one.j.values(), *one.f.values()} == {1.0} for one in scores.objects.values())
    assert scores.frames == 5
    assert scores.seconds > 0


def test_a_copied_mask_in_closed_form(walk: VideoSequence) -> None:
    objects = score_sequence(CopyFirst(), walk).objects
    assert objects[1].j == pytest.approx({step: max(12 - 3 * step, 0) / min(12 + 3 * step, 24) for step in range(1, 6)})
    assert objects[4].j == {3: 1.0, 4: 1.0, 5: 1.0}


def test_objects_that_a_tracker_loses_have_nothing(walk: VideoSequence) -> None:
    scores = score_sequence(Script(lambda step: {1: say_truth(step)[1]}), walk)
    assert set(scores.objects[1].j.values()) == {1.0}
    assert {*scores.objects[4].j.values(), *scores.objects[4].f.values()} == {0.0}


def test_where_masks_overlap_the_higher_logit_wins(walk: VideoSequence) -> None:
    def say(step: int) -> dict[int, Tensor]:
        return {1: torch.full(SIZE, 1.0), 4: 3 * say_truth(step)[4] + 0.5}

    ids = {followed.index: followed.ids for followed in follow(Script(say), walk)}
    assert torch.equal(ids[4] == 4, draw_ids(4) == 4)
    assert torch.equal(ids[4] == 1, draw_ids(4) != 4)


def test_objects_that_nobody_showed_are_refused(walk: VideoSequence) -> None:
    with pytest.raises(ValueError, match="pixels of object 3, but the sequence has the objects 1, 4 alone"):
        score_sequence(Script(lambda step: {3: torch.ones(SIZE)}), walk)


def test_frames_that_change_their_size_are_told(walk: VideoSequence, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (9, 7)).save(tmp_path / "small.png")
    sequence = VideoSequence("walk", (*walk.frames[:2], tmp_path / "small.png"), {0: walk.ids[0]})
    with pytest.raises(FrameSizeError, match=r"sequence walk: small\.png has 7x9 pixels") as caught:
        score_sequence(CopyFirst(), sequence)
    assert (caught.value.number, caught.value.size, caught.value.first) == (2, (7, 9), SIZE)


def test_frames_before_the_first_mask_and_frames_without(walk: VideoSequence) -> None:
    """Of five frames the second and the last two have ids: the second shows, and the last is left out."""
    sequence = VideoSequence("walk", walk.frames[:5], {1: walk.ids[1], 3: walk.ids[3], 4: walk.ids[4]})
    tracker = Script(lambda step: say_truth(step + 1))
    followed = list(follow(tracker, sequence))
    assert [one.index for one in followed] == [0, 1, 2, 3, 4]
    assert len(tracker.sizes) == 4
    assert not followed[0].ids.any()
    scores = score_sequence(tracker, sequence)
    assert {key: list(one.j) for key, one in scores.objects.items()} == {1: [3]}


def test_a_resized_tracker(walk: VideoSequence) -> None:
    inner = Script(lambda step: {1: torch.nn.functional.interpolate(say_truth(step)[1][None, None], (20, 42))[0, 0]})
    frame = walk.read_frame(0)
    _, masks = ResizedTracker(inner, (20, 42)).step(0, frame, {1: MaskPrompt(draw_ids(0) == 1)})
    assert inner.sizes == [(3, 20, 42)]
    assert inner.told[0][1][1].shape == (20, 42)
    assert region_similarity(masks[1] > 0, draw_ids(0) == 1) > 0.7
    assert inner.told[0][1][1].sum() == pytest.approx(144 * 20 / 40 * 42 / 56, rel=0.25)


def test_a_resized_tracker_sees_small_objects() -> None:
    tracker = Script(lambda step: {1: torch.zeros(10, 14)})
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[21, 30] = True
    ResizedTracker(tracker, (10, 14)).step(0, torch.zeros(3, *SIZE, dtype=torch.uint8), {1: MaskPrompt(mask)})
    assert tracker.told[0][1][1].nonzero().tolist() == [[5, 7]]


def test_sizes_as_text() -> None:
    assert FrameSize.parse("512") == FrameSize(side=512)
    assert FrameSize.parse("512x512") == FrameSize(size=(512, 512))
    assert [str(FrameSize.parse(text)) for text in ("96", "96x128")] == ["96", "96x128"]
    with pytest.raises(ValueError, match="size is 'big'"):
        FrameSize.parse("big")


@pytest.fixture(scope="module")
def segmenter() -> VideoSegmenter:
    torch.manual_seed(0)
    return create_segmenter(
        "vit_tiny_patch16_224",
        model_options={"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32},
        dim=32,
        memory_dim=16,
        depth=1,
        mlp_dim=32,
        decoder_heads=2,
        train_size=(32, 32),
    ).eval()


def test_settings_of_a_segmenter(segmenter: VideoSegmenter, walk: VideoSequence) -> None:
    """A setting is what the segmenter is set to when a video starts, whatever was run before."""
    sizes = [FrameSize(side=80), FrameSize(size=(32, 48))]
    settings = list_settings(segmenter, "mine", sizes, ["none", "yarn", "pitch"])
    labels = ["mine 80", "mine 80 yarn", "mine 80 pitch", "mine 32x48", "mine 32x48 yarn", "mine 32x48 pitch"]
    assert [result.label for result, _ in settings] == labels
    reasons = [result.reason for result, _ in settings]
    assert [reason is None for reason in reasons] == [True, True, False] * 2
    assert "pitch" in str(reasons[2])
    found: dict[str, Tensor] = {}
    for _ in range(2):
        for result, tracker in settings:
            if result.reason is None:
                state, _ = tracker.step(tracker.start(), walk.read_frame(0), {1: MaskPrompt(draw_ids(0))})
                _, masks = tracker.step(state, walk.read_frame(3))
                assert masks[1].shape == SIZE
                assert torch.equal(found.setdefault(result.label, masks[1]), masks[1])
    different = list(found.values())
    assert len(different) == 4
    assert all((one - other).abs().max() > 1e-6 for one, other in itertools.combinations(different, 2))
    for image_size, label in ((80, "mine 80"), (None, "mine 32x48")):
        segmenter.set_extension("none")
        segmenter.image_size = image_size
        tracker = segmenter if image_size else ResizedTracker(segmenter, (32, 48))
        state, _ = tracker.step(tracker.start(), walk.read_frame(0), {1: MaskPrompt(draw_ids(0))})
        assert torch.equal(tracker.step(state, walk.read_frame(3))[1][1], found[label])
    (plain,) = list_settings(segmenter, "mine", [], ["none"])
    assert isinstance(plain[1], SizedSegmenter)
    assert plain[1].method is None


def test_a_segmenter_that_cannot_be_extended(segmenter: VideoSegmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenter, "train_size", None)
    settings = list_settings(segmenter, "mine", [], ["none", "yarn"])
    assert [result.reason is None for result, _ in settings] == [True, False]
    assert "train_size is not known" in str(settings[1][0].reason)
    settings[0][1].start()


@pytest.mark.integration
def test_what_is_written(
    root: Path,
    tmp_path: Path,
    segmenter: VideoSegmenter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(room, "_open_segmenter", lambda target, weights, device: segmenter)
    words = ["evaluate", "mine.pt", "--data", f"davis:{root}", "--sizes", "64,32x48", "--extend", "yarn,pitch"]
    assert main([*words, "--out", str(tmp_path), "--write-masks", "--no-progress", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "all sequences" in printed
    assert all(f"wrote {tmp_path / name}" in printed for name in ("evaluation.csv", "evaluation.png"))

    def read(name: str) -> list[dict[str, str]]:
        with (tmp_path / name).open() as file:
            return list(csv.DictReader(file))

    rows = read("evaluation.csv")
    assert [(row["tracker"], row["size"], row["method"]) for row in rows] == [
        ("copy", "", ""),
        ("patches", "", ""),
        *(("mine", size, method) for size in ("64", "32x48") for method in ("none", "yarn", "pitch")),
    ]
    # walk: objects 1 and 4; stop: object 1, whose one judged frame is 1.
    assert [(row["sequences"], row["objects"]) for row in rows if not row["reason"]] == [("2", "3")] * 6
    copied = {1: (9 / 15 + 6 / 18 + 3 / 21) / 5, 4: 1.0, "stop": 9 / 15}
    assert float(rows[0]["j_mean"]) == pytest.approx(sum(copied.values()) / 3)
    assert float(rows[0]["j_mean_of_sequences"]) == pytest.approx(((copied[1] + copied[4]) / 2 + copied["stop"]) / 2)
    assert f"{float(rows[0]['j_mean']):.3f}" in printed
    sequences = [row for row in read("sequences.csv") if row["tracker"] == "copy"]
    assert {row["sequence"]: float(row["j_mean"]) for row in sequences} == pytest.approx(
        {"walk": (copied[1] + 1) / 2, "stop": 0.6}
    )
    objects = [row for row in read("objects.csv") if row["tracker"] == "copy"]
    assert [(row["sequence"], row["object"], row["frames"]) for row in objects] == [
        ("stop", "1", "1"),
        ("walk", "1", "5"),
        ("walk", "4", "3"),
    ]
    frames = [
        row for row in read("frames.csv") if (row["tracker"], row["sequence"], row["object"]) == ("copy", "walk", "1")
    ]
    assert [float(row["j"]) for row in frames] == pytest.approx([9 / 15, 6 / 18, 3 / 21, 0, 0])
    whole = json.loads((tmp_path / "evaluation.json").read_text())
    assert whole[0]["per_sequence"][1]["objects"][0]["j"]["2"] == pytest.approx(1 / 3)
    assert whole[4]["reason"].startswith("pitch means nothing")
    assert torch.equal(read_ids(tmp_path / "masks/copy/walk/00004.png") == 1, draw_ids(0) == 1)
    assert len(list((tmp_path / "masks/mine-64-yarn/walk").iterdir())) == 7
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_floors_alone(root: Path, tmp_path: Path) -> None:
    results, about, files = evaluate_videos("copy", data=f"davis:{root}", output=tmp_path, progress=False)
    assert [result.tracker for result in results] == ["copy"]
    assert about == {"data": f"davis:{root}", "split": "all sequences"}
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_validation_sequences_where_they_are_listed(root: Path, tmp_path: Path) -> None:
    for name in ("JPEGImages", "Annotations"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "ImageSets/2017").mkdir(parents=True)
    (tmp_path / "ImageSets/2017/val.txt").write_text("stop\n")
    results, about, _ = evaluate_videos("copy", data=f"davis:{tmp_path}", output=tmp_path / "out", progress=False)
    assert (list(results[0].sequences), about["split"]) == (["stop"], "2017/val")
    (tmp_path / "all.txt").write_text("walk\nstop\n")
    options: dict[str, Any] = {"output": tmp_path / "out", "progress": False, "split": str(tmp_path / "all.txt")}
    results, _, _ = evaluate_videos("copy", data=f"davis:{tmp_path}", **options)
    assert list(results[0].sequences) == ["stop", "walk"]


def test_a_first_mask_alone_gives_no_scores(root: Path, tmp_path: Path) -> None:
    (tmp_path / "Annotations/480p/stop").mkdir(parents=True)
    (tmp_path / "JPEGImages").symlink_to(root / "JPEGImages")
    write_ids(tmp_path / "Annotations/480p/stop/00000.png", draw_ids(0))
    (tmp_path / "one.txt").write_text("stop\n")
    options: dict[str, Any] = {"split": str(tmp_path / "one.txt"), "write_masks": True, "progress": False}
    results, about, _ = evaluate_videos("copy", data=f"davis:{tmp_path}", output=tmp_path / "out", **options)
    assert results[0].describe()["j_mean"] is None
    assert "No frame can be judged" in format_tracking(results, about)
    assert len(list((tmp_path / "out/masks/copy/stop").iterdir())) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["copy"], "data is '', but following objects is judged on marked videos; give davis:PATH"),
        (["copy", "--data", "elpv"], "data is 'elpv'"),
        (["copy", "--data", "davis:"], "data is 'davis:'"),
        (["copy", "--data", "davis:nowhere"], "not in the DAVIS layout"),
        (["patches", "--data", "davis:x", "--sizes", "64"], "leave sizes, extend and weights out"),
        (["patches", "--data", "davis:x", "--frames", "8"], "--frames is '8', but patches follows objects"),
        (["copy", "--data", "davis:x", "--crop-pct", "0.9"], "--crop-pct is 0.9"),
        (["copy", "--data", "davis:x", "--precision", "bf16"], "followed in fp32"),
        (["nothing", "--data", "davis:ROOT"], "nothing is neither copy nor patches, nor is there a run folder"),
        (["vit_tiny_patch16_224", "--data", "folder:x", "--write-masks"], "--write-masks is for what follows objects"),
    ],
)
def test_what_means_nothing_is_refused(
    words: list[str], message: str, root: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["evaluate", *(word.replace("ROOT", str(root)) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_what_follows_objects(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("task: classification\n")
    cases = [("copy", None), ("patches", "elpv"), ("any", "davis:x"), (tmp_path / "weights.safetensors", None)]
    assert all(follows_objects(target, data) for target, data in cases)
    others = [("vit_tiny_patch16_224", "folder:x"), (tmp_path / "run", None), (tmp_path / "none.pt", None)]
    assert not any(follows_objects(target, data) for target, data in others)


def test_the_figure_of_many_sequences(tmp_path: Path) -> None:
    scores = ObjectScores(j={3: 0.5, 4: 0.25}, f={3: 0.5, 4: 0.25})
    assert average_by_frame([scores, ObjectScores(j={4: 0.75})]) == {3: 0.5, 4: 0.5}
    plot_tracking([TrackingResult("copy")], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


@pytest.mark.slow
def test_the_floors_on_real_sequences(shared_data: Path, tmp_path: Path) -> None:
    """J of 0.33 and about 0.51, the mean of the sequences; of the copy, those of another implementation."""
    with tarfile.open(shared_data / "davis_masked_small.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    results, _, _ = evaluate_videos("patches", data=f"davis:{tmp_path}", output=tmp_path / "out", progress=False)
    copied, patches = (result.describe() for result in results)
    known = {"blackswan": 0.545, "bmx-trees": 0.094, "car-shadow": 0.408, "dog": 0.327, "dogs-jump": 0.271}
    for name, scores in results[0].sequences.items():
        means = [sum(one.j.values()) / len(one.j) for one in scores.objects.values()]
        assert sum(means) / len(means) == pytest.approx(known[name], abs=6e-4)
    assert copied["j_mean_of_sequences"] == pytest.approx(0.329, abs=6e-4)
    assert patches["j_mean_of_sequences"] == pytest.approx(0.51, abs=0.02)
    assert patches["f_mean"] > copied["f_mean"] + 0.1
