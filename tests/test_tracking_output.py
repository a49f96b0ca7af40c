"""What tracking writes: videos with the times of their source, pictures of objects, ids and figures."""

from __future__ import annotations

import csv
import itertools
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_video_decode import REAL
from vision_rope import video_writer
from vision_rope.data.davis import palette, read_ids
from vision_rope.data.streams import open_stream
from vision_rope.tracking_output import (
    MaskFolder,
    ObjectRow,
    ObjectTable,
    describe_objects,
    merge_masks,
    overlay,
)
from vision_rope.video_writer import VideoWriter

av = pytest.importorskip("av", reason="videos need the package av")


def grey(value: int, size: tuple[int, int] = (32, 48)) -> Tensor:
    return torch.full((3, *size), value, dtype=torch.uint8)


def read_greys(path: Path) -> list[int]:
    with open_stream(path) as stream:
        return [int(frame.pixels.float().mean().round()) for frame in stream]


def write_and_fail(path: Path, count: int, error: type[BaseException]) -> None:
    with VideoWriter(path) as writer:
        for number in range(count):
            writer.write(grey(20 * number))
        raise error


def average_rate(path: Path) -> Fraction:
    with av.open(str(path)) as container:
        return container.streams.video[0].average_rate


class TestVideoWriter:
    @pytest.mark.parametrize("name", [name for name in REAL if name != "01_dog.mp4"])
    def test_as_many_frames_at_the_same_times(self, shared_data: Path, tmp_path: Path, name: str) -> None:
        """Failure class 40: rate kept exactly, variable ones too; a damaged tail is not made up for."""
        source, path = shared_data / "videos_nomask" / name, tmp_path / "copy.mp4"
        seconds = []
        with open_stream(source) as stream, VideoWriter(path, stream.fps) as writer:
            for frame in stream:
                seconds.append(frame.seconds)
                # A corner is enough for the times.
                writer.write(frame.pixels[:, :32, :48], frame.seconds)
        assert writer.num_frames == REAL[name][0]
        with open_stream(path) as copy:
            assert [frame.seconds for frame in copy] == pytest.approx(seconds, abs=1e-9)
            assert copy.num_frames == len(seconds)
        if name != "test.webm":
            assert average_rate(path) == average_rate(source)

    @pytest.mark.parametrize("fps", [30000 / 1001, 24000 / 1001, 25, 0.5, 240, 12.5, 119.88])
    @pytest.mark.parametrize("with_times", [False, True])
    def test_the_rate_is_exact(self, tmp_path: Path, fps: float, with_times: bool) -> None:
        with VideoWriter(tmp_path / "a.mp4", fps) as writer:
            for number in range(7):
                writer.write(grey(30 * number), 5 + number / fps if with_times else None)
        assert float(average_rate(tmp_path / "a.mp4")) == pytest.approx(fps, rel=1e-12)
        assert read_greys(tmp_path / "a.mp4") == pytest.approx([30 * number for number in range(7)], abs=2)

    @pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm"])
    def test_containers_variable_rates_and_odd_sizes(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / "new" / f"a{suffix}"
        times = [0.25, 0.3, 0.9, 2.0]
        with VideoWriter(path, 10) as writer:
            for number, seconds in enumerate(times):
                writer.write(grey(60 * number, (31, 47)), seconds)
            assert not path.exists()
        with open_stream(path) as stream:
            assert stream.size == (32, 48)
            frames = list(stream)
        assert [frame.seconds for frame in frames] == pytest.approx([0, 0.05, 0.65, 1.75], abs=1e-3)
        assert [int(frame.pixels[0, 31, 47]) for frame in frames] == pytest.approx([0, 60, 120, 180], abs=3)
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    def test_time_that_runs_backwards(self, tmp_path: Path) -> None:
        """As in live streams that were cut: every frame comes, and time goes on after the cut."""
        with VideoWriter(tmp_path / "a.mp4", 10) as writer:
            for seconds in (7.0, 7.1, 7.1, 0.0, 0.3):
                writer.write(grey(90), seconds)
        with open_stream(tmp_path / "a.mp4") as stream:
            assert [frame.seconds for frame in stream] == pytest.approx([0, 0.1, 0.2, 0.3, 0.6], abs=1e-6)

    def test_colours(self, tmp_path: Path) -> None:
        """Of small and of large pictures, whose colours are coded otherwise."""
        for size in ((64, 64), (720, 64)):
            picture = torch.tensor([[200, 30, 60], [20, 180, 90], [40, 70, 220]], dtype=torch.uint8)
            pixels = picture.T[:, None].repeat_interleave(size[1] // 3 + 1, 2)[..., : size[1]].expand(3, *size)
            with VideoWriter(tmp_path / "a.mp4") as writer:
                writer.write(pixels)
            with open_stream(tmp_path / "a.mp4") as stream:
                (frame,) = stream
            middle = frame.pixels[:, size[0] // 2, [10, 32, 54]].T.int()
            torch.testing.assert_close(middle, picture.int(), atol=6, rtol=0)
            with av.open(str(tmp_path / "a.mp4")) as container:
                # BT.709, BT.601: what players assume of such sizes.
                assert container.streams.video[0].codec_context.colorspace == (1 if size[0] == 720 else 5)

    def test_without_h264(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_writer, "ENCODERS", {".mp4": ("no such codec", "mpeg4"), ".mov": ("none",)})
        with VideoWriter(tmp_path / "a.mp4", 30000 / 1001) as writer:
            for number in range(5):
                writer.write(grey(40 * number))
        assert average_rate(tmp_path / "a.mp4") == Fraction(30000, 1001)
        assert read_greys(tmp_path / "a.mp4") == pytest.approx([0, 40, 80, 120, 160], abs=3)
        with pytest.raises(ValueError, match="this FFmpeg has no none"), VideoWriter(tmp_path / "a.mov") as writer:
            writer.write(grey(0))

    def test_an_error_keeps_what_was_written(self, tmp_path: Path) -> None:
        for error in (KeyboardInterrupt, ValueError):
            with pytest.raises(error):
                write_and_fail(tmp_path / "a.mp4", 5, error)
            assert len(read_greys(tmp_path / "a.mp4")) == 5
        assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]

    @pytest.mark.integration
    @pytest.mark.skipif(os.name != "posix", reason="kills as POSIX has them")
    def test_a_kill_leaves_no_half_file_under_the_name(self, tmp_path: Path) -> None:
        script = (
            "import sys, torch\n"
            "from vision_rope.video_writer import VideoWriter\n"
            "with VideoWriter(sys.argv[1]) as writer:\n"
            "    for number in range(10 ** 9):\n"
            "        writer.write(torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8))\n"
            "        if number == 100:\n"
            "            print('going on', flush=True)\n"
        )
        path = tmp_path / "a.mp4"
        with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert not path.exists()
        assert [file.name for file in tmp_path.iterdir()] == ["a.partial.mp4"]

    def test_impossible_arguments(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"must end in \.mp4, \.mov, \.mkv, \.webm"):
            VideoWriter(tmp_path / "a.txt")
        with VideoWriter(tmp_path / "a.mp4") as writer:
            with pytest.raises(ValueError, match=r"must be uint8 \(3, height, width\)"):
                writer.write(torch.zeros(3, 4, 4))
            writer.write(grey(3))
            with pytest.raises(ValueError, match="frame 1 has 16x48 pixels"):
                writer.write(grey(3, (16, 48)))

    def test_without_frames_there_is_no_file(self, tmp_path: Path) -> None:
        with VideoWriter(tmp_path / "a.mp4"):
            pass
        assert list(tmp_path.iterdir()) == []


class TestPictures:
    def test_the_largest_logit_wins(self) -> None:
        """Against pixel by pixel."""
        masks = {key: torch.randn(5, 7) for key in (3, 1, 200)}
        ids = merge_masks(masks, (5, 7))
        assert ids.dtype == torch.uint8
        for row in range(5):
            for column in range(7):
                best = max(masks, key=lambda key: masks[key][row, column].item())
                assert ids[row, column] == (best if masks[best][row, column] > 0 else 0)
        assert (ids == 0).any()
        assert torch.equal(merge_masks({}, (5, 7)), torch.zeros(5, 7, dtype=torch.uint8))
        for wrong in (0, 255, -1, "dog"):
            with pytest.raises(ValueError, match=f"must be from 1 to 254, got {wrong!r}"):
                merge_masks({wrong: torch.zeros(2, 2)}, (2, 2))  # type: ignore[dict-item]

    def test_what_is_not_a_number_is_background(self) -> None:
        """Failure class 41: not the whole frame."""
        assert not merge_masks({1: torch.full((2, 2), torch.nan)}, (2, 2)).any()

    def test_objects_are_tinted_and_outlined_and_nothing_else(self) -> None:
        pixels = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
        ids = torch.zeros(20, 30, dtype=torch.uint8)
        ids[2:10, 3:12], ids[10:20, 3:12] = 1, 2
        before = pixels.clone()
        picture = overlay(pixels, ids)
        assert torch.equal(pixels, before)
        assert torch.equal(picture[:, ids == 0], pixels[:, ids == 0])
        for key, rows in ((1, range(2, 10)), (2, range(10, 20))):
            colour = palette()[key].float()
            for row in rows:
                for column in range(3, 12):
                    # The picture's lower edge is no contour.
                    at_edge = row in (2, 9, 10) or column in (3, 11)
                    mixed = (0.5 * pixels[:, row, column] + 0.5 * colour).round()
                    expected = colour * (255 / colour.max()) if at_edge else mixed
                    torch.testing.assert_close(picture[:, row, column].float(), expected, atol=1, rtol=0)
        with pytest.raises(ValueError, match="both must have one size"):
            overlay(pixels, ids.T)

    def test_wide_contours_of_large_pictures(self) -> None:
        ids = torch.zeros(1080, 1080, dtype=torch.uint8)
        ids[100:200, 100:200] = 5
        picture = overlay(torch.zeros(3, 1080, 1080, dtype=torch.uint8), ids)
        assert (picture[:, 150, 100:200] == 255).any(0).sum() == 6


class TestFigures:
    def test_areas_boxes_and_scores(self) -> None:
        ids = torch.zeros(9, 12, dtype=torch.uint8)
        ids[2:5, 3:10] = 4
        ids[8, 11] = 7
        rows = describe_objects(3, ids, {4: (0.0, 0.9), 7: (2.0, 0.5), 8: (-9.0, 0.1)})
        assert rows[0] == ObjectRow(3, 4, 21, 3, 2, 10, 5, 0.5, 0.9)
        assert rows[1][:7] == (3, 7, 1, 11, 8, 12, 9)
        assert rows[1].score == pytest.approx(1 / (1 + np.exp(-2)), abs=1e-12)
        assert rows[2][:7] == (3, 8, 0, None, None, None, None)

    def test_lines_are_there_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "objects.csv"
        with ObjectTable(path) as table:
            for frame in range(3):
                table.write([ObjectRow(frame, 1, 0, None, None, None, None, 0.25, 0.5)])
                assert len(path.read_text().splitlines()) == frame + 2
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert list(lines[0]) == ["frame", "object", "area", "x0", "y0", "x1", "y1", "score", "quality"]
        assert list(lines[2].values()) == ["2", "1", "0", "", "", "", "", "0.250000", "0.500000"]

    def test_masks_come_back(self, tmp_path: Path) -> None:
        folder = MaskFolder(tmp_path / "masks")
        ids = torch.randint(0, 255, (6, 8), dtype=torch.uint8)
        folder.write(12, ids)
        assert torch.equal(read_ids(tmp_path / "masks" / "00012.png"), ids)
        with pytest.raises(ValueError, match=r"holds 00012\.png already; give a new or an empty folder"):
            MaskFolder(tmp_path / "masks")


def resident_memory() -> float:
    """In MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="resident memory is read from /proc")
def test_memory_is_flat_over_5000_frames(tmp_path: Path) -> None:
    """Failure class 35: from an iterator without a length through overlay, figures and writer, and back."""
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    path = tmp_path / "long.mp4"
    sizes: dict[int | str, float] = {}
    endless = (torch.full((3, 64, 64), number % 256, dtype=torch.uint8) for number in itertools.count())
    with (
        open_stream(endless, ahead=8) as stream,
        VideoWriter(path, stream.fps) as writer,
        ObjectTable(tmp_path / "objects.csv") as table,
    ):
        for frame in itertools.islice(stream, 5000):
            ids = merge_masks({1: 10 - torch.hypot(rows - 32.0, columns - frame.number % 64.0)}, stream.size)
            writer.write(overlay(frame.pixels, ids), frame.seconds)
            table.write(describe_objects(frame.number, ids, {1: (3.0, 0.9)}))
            if frame.number + 1 in (500, 2500, 5000):
                sizes[frame.number + 1] = resident_memory()
    with open_stream(path) as stream:
        assert sum(1 for _ in stream) == 5000
    sizes["read back"] = resident_memory()
    print("resident memory in MiB after frames:", {key: round(size, 1) for key, size in sizes.items()})
    # All frames together are 59 MiB.
    assert sizes[5000] - sizes[500] < 8
    assert sizes["read back"] - sizes[5000] < 16
