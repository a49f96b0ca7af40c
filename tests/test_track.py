"""`vision-rope track`: prompts from flags, objects through streams, whole files however it ends."""

from __future__ import annotations

import csv
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vision_rope as vr
from tests.test_video_decode import REAL, greys, write_video
from vision_rope import cli
from vision_rope.data.davis import read_ids, write_ids
from vision_rope.data.streams import FrameSizeError, open_stream
from vision_rope.segmenter import VideoSegmenter
from vision_rope.track import track, track_frames
from vision_rope.track_prompts import check_prompts, read_prompts

av = pytest.importorskip("av", reason="videos need the package av")


@dataclass(frozen=True)
class DiskState:
    number: int = -1
    objects: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Disk:
    x: float
    y: float
    began: int
    object_score: Tensor
    mask_quality: Tensor


class DiskSegmenter:
    """A disk of radius 6 around the first point, or the middle of the box or mask, which goes right by 2 a frame."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.interrupt_at = interrupt_at
        self.corrected: list[tuple[int, int]] = []

    def start(self) -> DiskState:
        return DiskState()

    def step(self, state: DiskState, frame: Tensor, prompts: Any = None) -> tuple[DiskState, dict[int, Tensor]]:
        assert frame.dtype == torch.uint8
        number = state.number + 1
        if number == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        state = replace(state, number=number)
        return self._say(state, prompts or {}, frame.shape[1:])

    def correct(self, state: DiskState, prompts: Any) -> tuple[DiskState, dict[int, Tensor]]:
        self.corrected += [(state.number, key) for key in prompts]
        return self._say(state, prompts, self.size)

    def _say(self, state: DiskState, prompts: Any, size: Any) -> tuple[DiskState, dict[int, Tensor]]:
        self.size = size
        begun = {key: self._disk(given[0], state.number, key) for key, given in prompts.items()}
        state = replace(state, objects={**state.objects, **begun})
        rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
        masks = {}
        for key, disk in state.objects.items():
            x = disk.x + 2 * (state.number - disk.began)
            masks[key] = 6.5 - torch.hypot(rows - disk.y, columns - x)
        return state, masks

    def _disk(self, prompt: Any, number: int, key: int) -> Disk:
        if isinstance(prompt, vr.PointPrompt):
            x, y = prompt.points[0]
        elif isinstance(prompt, vr.BoxPrompt):
            x, y = (prompt.box[0] + prompt.box[2]) / 2, (prompt.box[1] + prompt.box[3]) / 2
        else:
            y, x = prompt.mask.nonzero().float().mean(0).tolist()
        return Disk(x, y, number, torch.tensor(float(key)), torch.tensor(0.5))


@pytest.fixture
def segmenter(monkeypatch: pytest.MonkeyPatch) -> DiskSegmenter:
    """What `--weights W` loads."""
    disks = DiskSegmenter()
    monkeypatch.setattr(VideoSegmenter, "load", staticmethod(lambda path, **options: disks))
    return disks


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "grey.mp4", greys(12, (40, 64)))


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(*words: str | Path) -> int:
    return cli.main(["track", *map(str, words), "--weights", "W", "--device", "cpu", "--no-progress"])


class TestPrompts:
    def test_repetition_makes_objects(self) -> None:
        prompts = read_prompts([("point", "1,2"), ("point", "3,4,5.5,6"), ("box", "1,2,3,4"), ("not-point", "7,8")])
        assert list(prompts) == [0]
        assert {key: [type(one).__name__ for one in given] for key, given in prompts[0].items()} == {
            1: ["PointPrompt"],
            2: ["PointPrompt"],
            3: ["BoxPrompt", "PointPrompt"],
        }
        assert prompts[0][1][0].points == [(1, 2)]
        assert prompts[0][2][0].points == [(3, 4), (5.5, 6)]
        assert prompts[0][3][0].box == (1, 2, 3, 4)
        assert (prompts[0][3][1].points, prompts[0][3][1].labels) == ([(7, 8)], [0])

    def test_named_objects_and_frames(self) -> None:
        flags = "point 1,1 at 9 point 2,2 object 5 box 1,2,3,4 point 3,3 not-point 4,4 object 1 at 4 point 5,5"
        words = flags.split()
        prompts = read_prompts(list(zip(words[::2], words[1::2], strict=True)))
        assert {frame: list(objects) for frame, objects in prompts.items()} == {0: [1], 4: [1], 9: [2, 5]}
        points = prompts[9][5][1]
        assert (points.points, points.labels) == ([(3, 3), (4, 4)], [1, 0])
        assert prompts[4][1][0].points == [(5, 5)]

    def test_masks(self, tmp_path: Path) -> None:
        ids = torch.zeros(6, 8, dtype=torch.uint8)
        ids[:2], ids[4:] = 2, 7
        write_ids(tmp_path / "two.png", ids)
        write_ids(tmp_path / "one.png", (ids == 7).to(torch.uint8) * 9)
        write_ids(tmp_path / "none.png", ids * 0)
        two, one = str(tmp_path / "two.png"), str(tmp_path / "one.png")
        prompts = read_prompts([("mask", two), ("mask", two), ("point", "1,1"), ("mask", one)])[0]
        assert list(prompts) == [2, 7, 8, 9, 10, 11]
        for key, source in ((2, 2), (7, 7), (8, 2), (9, 7), (11, 7)):
            assert torch.equal(prompts[key][0].mask, ids == source)
        assert list(read_prompts([("object", "4"), ("mask", one)])[0]) == [4]
        with pytest.raises(ValueError, match="holds 2 objects, but --object 4 is one"):
            read_prompts([("object", "4"), ("mask", two)])
        with pytest.raises(ValueError, match="holds no object"):
            read_prompts([("mask", str(tmp_path / "none.png"))])
        with pytest.raises(FileNotFoundError, match=r"--mask is 'first\.png', but there is no such file"):
            read_prompts([("mask", "first.png")])
        with pytest.raises(ValueError, match=r"mask of object 2 has 6x8 pixels and the frame 5x8"):
            check_prompts({0: prompts}, (5, 8))
        check_prompts({0: prompts}, (6, 8))
        with pytest.raises(ValueError, match="there are prompts at frame -1; frames count from 0"):
            check_prompts({-1: prompts}, (6, 8))

    @pytest.mark.parametrize(
        ("flag", "value", "message"),
        [
            ("point", "1", "--point is '1', but it must be X,Y, or several points X,Y,X,Y, in pixels"),
            ("point", "1,2,3", "--point is '1,2,3'"),
            ("point", "a,b", "--point is 'a,b'"),
            ("box", "1,2,3", "--box is '1,2,3', but it must be X0,Y0,X1,Y1 in pixels: left, upper, right and lower"),
            ("box", "5,2,3,4", "--box is '5,2,3,4'"),
            ("at", "-1", "--at is '-1', but it must be a whole number from 0 on"),
            ("object", "0", "--object is '0', but it must be a whole number from 1 to 254"),
            ("object", "255", "from 1 to 254"),
            ("not-point", "1,2", "--not-point 1,2 has no object; put it after the --point"),
            ("at", "3", "nothing says where the objects are"),
        ],
    )
    def test_impossible_values(self, flag: str, value: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_prompts([(flag, value)])

    def test_what_does_not_fit_together(self) -> None:
        with pytest.raises(ValueError, match="has 2 boxes"):
            check_prompts(read_prompts([("object", "1"), ("box", "1,1,2,2"), ("box", "1,1,3,3")]), (9, 9))
        with pytest.raises(ValueError, match="outside the frame of 9x20 pixels"):
            check_prompts(read_prompts([("point", "3,9")]), (9, 20))
        # The order that is easily mistaken.
        with pytest.raises(ValueError, match="--at 48 is for the prompts that follow, but there are none; put it befo"):
            read_prompts([("point", "3,9"), ("at", "48")])
        with pytest.raises(ValueError, match="--object 2 is for the prompts that follow"):
            read_prompts([("point", "3,9"), ("object", "2")])


class TestOutputs:
    def test_everything_is_written(
        self,
        segmenter: DiskSegmenter,
        video: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Objects that begin at different frames, a correction, overlaps by the larger logit."""
        monkeypatch.chdir(tmp_path)
        first = ("--point", "10,12", "--box", "4,20,16,32", "--at", "4", "--point", "40,12")
        assert run(video, *first, "--at", "6", "--object", "1", "--point", "20,12") == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.startswith("12 frames, 3 objects, ")
        folder = Path("runs/track/grey")
        for name in ("overlay.mp4", "masks", "objects.csv"):
            assert f"wrote {folder / name}" in out
        assert segmenter.corrected == [(6, 1)]
        assert [path.name for path in sorted((folder / "masks").iterdir())] == [f"{k:05d}.png" for k in range(12)]

        rows = read_rows(folder / "objects.csv")
        assert [(int(row["frame"]), int(row["object"])) for row in rows] == [
            (frame, key) for frame in range(12) for key in (1, 2, *([3] if frame >= 4 else []))
        ]
        size = (40, 64)
        lines, columns = np.mgrid[: size[0], : size[1]]
        for frame in range(12):
            ids = read_ids(folder / "masks" / f"{frame:05d}.png").numpy()
            centres = {1: (10 + 2 * frame if frame < 6 else 20 + 2 * (frame - 6), 12), 2: (10 + 2 * frame, 26)}
            if frame >= 4:
                centres[3] = (40 + 2 * (frame - 4), 12)
            distance = np.stack([np.hypot(lines - y, columns - x) for x, y in centres.values()])
            expected = np.where(distance.min(0) < 6.5, np.array(list(centres))[distance.argmin(0)], 0)
            assert (ids == expected).all()
            for row in rows:
                if int(row["frame"]) == frame:
                    mask = expected == int(row["object"])
                    places = np.argwhere(mask)
                    assert int(row["area"]) == mask.sum()
                    box = [*places.min(0)[::-1], *(places.max(0)[::-1] + 1)]
                    assert [int(row[key]) for key in ("x0", "y0", "x1", "y1")] == box
                    assert float(row["score"]) == pytest.approx(1 / (1 + np.exp(-int(row["object"]))), abs=1e-6)
                    assert float(row["quality"]) == 0.5

        with open_stream(folder / "overlay.mp4") as made, open_stream(video) as source:
            assert made.fps == source.fps
            for one, other in zip(made, source, strict=True):
                assert one.seconds == other.seconds
                ids = read_ids(folder / "masks" / f"{one.number:05d}.png")
                colours = (one.pixels.float() - other.pixels.float()).abs().amax(0)
                # Colour is coded for two by two pixels and bleeds a little.
                assert colours[ids > 0].mean() > 10
                assert colours[20:, 50:].mean() < 4

    def test_a_second_run_goes_beside_the_first(
        self, segmenter: DiskSegmenter, video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for _ in range(2):
            assert run(video, "--point", "10,12", "--max-frames", "2") == 0
        assert sorted(path.name for path in Path("runs/track").iterdir()) == ["grey", "grey-2"]
        assert len(list(Path("runs/track/grey-2/masks").iterdir())) == 2

    def test_chosen_outputs(
        self, segmenter: DiskSegmenter, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--point", "10,12", "--out", "none", "--masks", "none", "--csv", tmp_path / "new" / "a.csv"]
        assert run(video, *words, "--max-frames", "3") == 0
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.csv"]
        assert len(read_rows(tmp_path / "new" / "a.csv")) == 3
        masks = tmp_path / "masks"
        words = ["--point", "10,12", "--out", tmp_path / "a.mkv", "--masks", masks, "--csv", "none"]
        assert run(video, *words) == 0
        assert run(video, *words) == 2
        assert re.search(r"masks holds 000\d\d.png already; give a new or an empty folder", capsys.readouterr().err)

    @pytest.mark.filterwarnings("always:.*is damaged")
    @pytest.mark.parametrize("name", ["corrupted.mp4", "video_90.mov", "h265_video.mp4"])
    def test_real_videos(
        self,
        segmenter: DiskSegmenter,
        shared_data: Path,
        tmp_path: Path,
        name: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Failure class 40: as many frames as can be read, upright, and the damage is told."""
        count, size, _ = REAL[name]
        expected = min(count, 29)
        words = ["--point", "50,60", "--out", tmp_path / "a.mp4", "--masks", "none", "--csv", tmp_path / "a.csv"]
        assert run(shared_data / "videos_nomask" / name, *words, "--max-frames", "29") == 0
        err = capsys.readouterr().err
        assert ("is damaged: Invalid data" in err and "28 frames were read" in err) == (name == "corrupted.mp4")
        with open_stream(tmp_path / "a.mp4") as stream:
            assert stream.size == size
            assert sum(1 for _ in stream) == expected
        assert len(read_rows(tmp_path / "a.csv")) == expected

    def test_a_folder_and_an_iterator(self, tmp_path: Path) -> None:
        from PIL import Image

        (tmp_path / "frames").mkdir()
        for number, array in enumerate(greys(11)):
            Image.fromarray(array).save(tmp_path / "frames" / f"{number}.png")
        prompts = read_prompts([("point", "10,12")])
        with open_stream(tmp_path / "frames", fps=12) as stream:
            assert track(stream, DiskSegmenter(), prompts, out=tmp_path / "a.mp4", progress=False).num_frames == 11
        with open_stream(iter(greys(11)), fps=12) as stream:
            found = [frame.ids for frame in track_frames(stream, DiskSegmenter(), prompts)]
        assert all((ids == 1).sum() > 100 for ids in found)
        with open_stream(tmp_path / "a.mp4") as stream:
            assert (stream.fps, stream.num_frames) == (12, 11)


class TestEnds:
    def test_interrupts_keep_whole_files(
        self, segmenter: DiskSegmenter, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        segmenter.interrupt_at = 4
        before = signal.getsignal(signal.SIGINT)
        out, masks, table = tmp_path / "a.mp4", tmp_path / "masks", tmp_path / "a.csv"
        assert run(video, "--point", "10,12", "--out", out, "--masks", masks, "--csv", table) == 130
        assert signal.getsignal(signal.SIGINT) is before
        printed = capsys.readouterr()
        assert "interrupted after 5 frames, which are kept" in printed.err
        assert f"wrote {out}" in printed.out
        with open_stream(out) as stream:
            assert sum(1 for _ in stream) == 5
        assert len(list(masks.iterdir())) == len(read_rows(table)) == 5
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.mp4", "grey.mp4", "masks"]

    def test_a_second_interrupt_ends_at_once(self, video: Path, tmp_path: Path) -> None:
        class Slow(DiskSegmenter):
            def step(self, *words: Any) -> Any:
                if words[0].number == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                    os.kill(os.getpid(), signal.SIGINT)
                    # Signals are looked at between two instructions.
                    raise AssertionError("still there")
                return super().step(*words)

        with open_stream(video) as stream:
            prompts = read_prompts([("point", "10,12")])
            outcome = track(stream, Slow(), prompts, out=tmp_path / "a.mp4", progress=False)
        assert (outcome.num_frames, outcome.is_whole) == (4, False)
        with open_stream(tmp_path / "a.mp4") as stream:
            assert sum(1 for _ in stream) == 4

    def test_errors_keep_what_was_written(self, tmp_path: Path) -> None:
        """Failure class 39."""
        frames = [*greys(5), *greys(2, (16, 48))]
        with (
            open_stream(iter(frames)) as stream,
            pytest.raises(FrameSizeError, match="frame 5 has 16x48"),
            pytest.warns(UserWarning, match="frames stopped after 5 frames, which are kept"),
        ):
            track(stream, DiskSegmenter(), read_prompts([("point", "9,9")]), out=tmp_path / "a.mp4", progress=False)
        with open_stream(tmp_path / "a.mp4") as stream:
            assert sum(1 for _ in stream) == 5
        with open_stream(iter(frames), resize=True) as stream:
            assert track(stream, DiskSegmenter(), read_prompts([("point", "9,9")]), progress=False).num_frames == 7

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--point", "10,12", "--at", "12", "--point", "3,3"], "there are prompts at frame 12, but grey has 12"),
            (
                ["--at", "5", "--point", "3,3", "--max-frames", "5"],
                "there are prompts at frame 5, but max_frames is 5; frames count from 0",
            ),
            (["--point", "64,3"], "outside the frame of 40x64 pixels"),
            (["--max-frames", "0", "--point", "3,3"], "--max-frames is 0"),
            ([], "nothing says where the objects are"),
            (["--point", "3,3", "--out", "a.txt"], "a video must end in .mp4"),
            (["--point", "3,3", "--size", "0"], "--size is 0, but it must be 1 or more"),
            (["--point", "3,3", "--out", "grey.mp4"], "--out is grey.mp4, but"),
            (["--point", "3,3", "--csv", "./grey.mp4"], "grey.mp4 is read; give another name"),
            (["--point", "3,3", "--csv", "x", "--masks", "x"], "--csv is x, but --masks is written there"),
            (["--poin", "3,3"], "unknown flag --poin; did you mean --point?"),
            (["--point", "3,3", "--decoder", "nvdec"], "decoder nvdec needs an NVIDIA GPU"),
        ],
    )
    def test_a_mistake_is_one_sentence(
        self,
        segmenter: DiskSegmenter,
        video: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        words: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Failure class 20."""
        if "nvdec" in words and torch.cuda.is_available():
            pytest.skip("there is a GPU")
        monkeypatch.chdir(tmp_path)
        assert run(video, *words) == 2
        err = capsys.readouterr().err
        assert err.startswith("vision-rope: error: ")
        assert err.count("\n") == 1
        assert message in err
        if "12" not in words:
            assert list(tmp_path.iterdir()) == [video]

    def test_the_frames_a_second_are_shown(
        self, segmenter: DiskSegmenter, video: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vision_rope import progress

        monkeypatch.setattr(progress, "FILE_SECONDS", 0.0)
        words = f"track {video} --weights W --point 3,3 --out none --masks none --csv none --device cpu"
        assert cli.main(words.split()) == 0
        err = capsys.readouterr().err
        assert "frames/s" in err
        assert "/12 frames" in err


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:object . has no pixel")  # random weights
def test_a_real_segmenter_gives_the_masks_of_its_steps(tmp_path: Path) -> None:
    """Random weights; what is written equals stepping by hand, and the objects do not feel each other."""
    torch.manual_seed(1)
    backbone = vr.create_model(
        "vit_tiny_patch16_224", position="rope-vit-axial", img_size=64, embed_dim=48, depth=2, num_heads=3
    )
    segmenter = vr.create_segmenter(backbone, dim=32, memory_dim=16, depth=1).eval()
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (48, 80, 3), np.uint8) for _ in range(4)]
    prompts = read_prompts([("point", "30,20"), ("at", "2"), ("box", "5,5,40,30"), ("object", "1"), ("point", "9,9")])
    with open_stream(frames) as stream:
        outcome = track(stream, segmenter, prompts, masks=tmp_path / "masks", table=tmp_path / "a.csv", progress=False)
    assert outcome[:2] == (4, 2)
    state = segmenter.start()
    for number, frame in enumerate(frames):
        begun = {1: vr.PointPrompt([(30, 20)])} if number == 0 else {2: vr.BoxPrompt((5, 5, 40, 30))}
        state, masks = segmenter.step(state, frame, begun if number in (0, 2) else None)
        if number == 2:
            state, masks = segmenter.correct(state, {1: vr.PointPrompt([(9, 9)])})
        ids = read_ids(tmp_path / "masks" / f"{number:05d}.png")
        logits = torch.stack(list(masks.values()))
        expected = torch.where(logits.amax(0) > 0, logits.argmax(0) + 1, 0)
        assert torch.equal(ids.long(), expected)
        rows = [row for row in read_rows(tmp_path / "a.csv") if int(row["frame"]) == number]
        for row, (key, one) in zip(rows, state.objects.items(), strict=True):
            assert int(row["object"]) == key
            assert float(row["score"]) == pytest.approx(one.object_score.sigmoid().item(), abs=1e-5)
            assert float(row["quality"]) == pytest.approx(one.mask_quality.item(), abs=1e-5)


def test_patches_follow_masks_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A square that moves over noise; points and boxes are refused, and the table leaves out what nothing tells."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 60, (48, 80, 3), np.uint8)
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(4):
        frame = noise.copy()
        frame[10:30, 10 + 4 * number : 30 + 4 * number] = (250, 200, 40)
        Image.fromarray(frame).save(folder / f"{number}.png")
    mask = np.zeros((48, 80), np.uint8)
    mask[10:30, 10:30] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    words = f"track {folder} --weights patches --out none --masks {tmp_path}/masks --csv {tmp_path}/a.csv --no-progress"
    assert cli.main([*words.split(), "--mask", str(tmp_path / "mask.png")]) == 0
    ids = read_ids(tmp_path / "masks" / "00003.png") == 1
    truth = torch.zeros(48, 80, dtype=torch.bool)
    truth[10:30, 22:42] = True
    assert (ids & truth).sum() / (ids | truth).sum() > 0.8
    assert [(row["score"], row["quality"]) for row in read_rows(tmp_path / "a.csv")] == [("", "")] * 4
    for more, message in (
        ("--box 1,1,9,9", "follows masks alone"),
        (f"--mask {tmp_path}/mask.png --size 64", "--size"),
    ):
        assert cli.main([*words.replace("/masks", "/other").split(), *more.split()]) == 2
        assert message in capsys.readouterr().err


def test_an_object_without_a_pixel_where_it_was_prompted_is_told() -> None:
    torch.manual_seed(0)
    segmenter = vr.create_segmenter("resnet18", dim=32, memory_dim=16, depth=1, mlp_dim=32, decoder_heads=4).eval()
    with torch.no_grad():
        segmenter.mask_decoder.pred_obj_score_head.layers[-1].bias.fill_(-50.0)
    with open_stream([np.zeros((32, 32, 3), np.uint8)]) as stream:
        found = track_frames(stream, segmenter, read_prompts([("point", "9,9")]))
        with pytest.warns(UserWarning, match="object 1 has no pixel in frame 0, where it was prompted"):
            next(found)
