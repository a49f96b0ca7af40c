"""Decoding of videos: every frame at its own time, upright, whatever the container says; damage is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_rope.data import BrokenVideoError, ClipSampling, decode_frames, list_frames
from vision_rope.data.decode_torchcodec import decode_by_torchcodec, load_torchcodec

av = pytest.importorskip("av", reason="videos need the package av")

# Frames that can be decoded, their height and width, and the time of the last one where the rate is constant.
REAL = {
    "01_dog.mp4": (289, (720, 1280), 288 * 1001 / 30000),
    "bikes.mp4": (250, (272, 640), 249 / 25),
    "nasa_13013.mp4": (325, (180, 320), 324 / 25),
    "h265_video.mp4": (10, (128, 128), 0.9),
    "video_0.mov": (3, (320, 568), 2 / 30),
    "video_90.mov": (3, (568, 320), 2 / 30),
    "corrupted.mp4": (28, (720, 1280), 2.7),
    "test.webm": (94, (480, 640), None),
}


@pytest.fixture(scope="session")
def videos(shared_data: Path) -> Path:
    return shared_data / "videos_nomask"


def every(count: int) -> object:
    return lambda seconds: torch.arange(count)


def write_video(
    path: Path,
    frames: Sequence[np.ndarray],
    *,
    codec: str = "mpeg4",
    times: Sequence[int] | None = None,
    unit: Fraction = Fraction(1, 10),
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
) -> Path:
    """A video of RGB frames (height, width, 3) shown at `times` * `unit` seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10, options=options or {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.time_base = pixels, unit
        stream.codec_context.time_base = unit
        for time, frame in zip(times or range(len(frames)), frames, strict=True):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = time, unit
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return path


def greys(count: int, size: tuple[int, int] = (32, 48)) -> list[np.ndarray]:
    """Frame k is grey 20 + 8 k all over, so that its colour tells its number."""
    return [np.full((*size, 3), 20 + 8 * place, np.uint8) for place in range(count)]


def numbers(frames: Tensor) -> list[int]:
    return ((frames.float().mean((1, 2, 3)) - 20) / 8).round().int().tolist()


class TestRealVideos:
    @pytest.mark.parametrize("name", REAL)
    def test_every_frame_has_its_time(self, videos: Path, name: str) -> None:
        """Failure class 40: no count in the header (webm), a wrong one (corrupted), variable rate (webm)."""
        count, _, last = REAL[name]
        found = list_frames(videos / name)
        assert len(found.seconds) == count
        assert found.seconds.dtype == torch.float64
        with av.open(str(videos / name)) as container:
            stream = container.streams.video[0]
            stamps = sorted(packet.pts * stream.time_base for packet in container.demux(stream) if packet.size)
        # The packets of the damaged tail are there, their frames are not.
        expected = torch.tensor([float(stamp) for stamp in stamps[:count]], dtype=torch.float64)
        assert torch.equal(found.seconds, expected)
        if last is not None:
            assert found.seconds[-1].item() == pytest.approx(last, abs=1e-9)
        assert (found.damage is None) == (name != "corrupted.mp4")

    @pytest.mark.parametrize("name", [name for name in REAL if name != "01_dog.mp4"])
    def test_chosen_frames_are_those_of_a_decoder_that_reads_all(self, videos: Path, name: str) -> None:
        """Seeking to a key frame first changes no pixel."""
        count, size, _ = REAL[name]
        places = sorted({place for place in (0, 1, count // 3, count - 3, count - 1) if 0 <= place < count})
        expected = []
        with av.open(str(videos / name)) as container:
            for place, frame in enumerate(container.decode(video=0)):
                if place in places:
                    expected.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
                if place == count - 1:
                    break
        for chosen in (places[:2], places[-2:], places):
            clip, _ = decode_frames(videos / name, lambda seconds, chosen=chosen: torch.tensor(chosen))
            assert clip.frames.shape == (len(chosen), 3, *size)
            assert clip.frames.dtype == torch.uint8
            assert torch.equal(clip.seconds, list_frames(videos / name).seconds[chosen])
            for frame, place in zip(clip.frames, chosen, strict=True):
                other = expected[places.index(place)].permute(2, 0, 1)
                if name == "video_90.mov":
                    other = torch.rot90(other, -1, (1, 2))
                assert torch.equal(frame, other)

    def test_the_damaged_tail_is_told_and_avoided(self, videos: Path) -> None:
        """Failure class 40."""
        path = videos / "corrupted.mp4"
        sampling = ClipSampling(4, 5.0)
        whole, damage = decode_frames(path, lambda seconds: sampling.choose(seconds, 0.1))
        assert damage is None
        assert whole.seconds[-1] < 2.7
        # The latest clip of 50 frames is past the damage; of the 28 that are there it is not.
        clip, damage = decode_frames(path, lambda seconds: sampling.choose(seconds, 1.0))
        assert "Invalid data" in str(damage)
        torch.testing.assert_close(clip.seconds, torch.tensor([2.1, 2.3, 2.5, 2.7], dtype=torch.float64))

    def test_torchcodec_gives_the_same(self, videos: Path) -> None:
        try:
            load_torchcodec()
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
        for name, (count, *_) in REAL.items():
            for position in (0.0, 0.97):
                sampling = ClipSampling(min(count, 4), 6.0)
                choose = lambda seconds, s=sampling, p=position: s.choose(seconds, p)  # noqa: E731
                for one, other in zip(
                    decode_frames(videos / name, choose)[0],
                    decode_by_torchcodec(videos / name, choose)[0],
                    strict=True,
                ):
                    torch.testing.assert_close(one, other, atol=2, rtol=0)


class TestMadeVideos:
    def test_variable_rate_and_a_late_start(self, tmp_path: Path) -> None:
        """Failure class 40: fps kept, whatever the header's average."""
        times = [3, 4, 8, 9, 30, 31]
        path = write_video(tmp_path / "variable.mkv", greys(6), times=times)
        found = list_frames(path)
        torch.testing.assert_close(found.seconds, torch.tensor(times, dtype=torch.float64) / 10)
        clip, damage = decode_frames(path, lambda seconds: torch.tensor([1, 4]))
        assert damage is None
        assert numbers(clip.frames) == [1, 4]
        torch.testing.assert_close(clip.seconds, torch.tensor([0.4, 3.0], dtype=torch.float64))

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("b_frames.mp4", {"codec": "mpeg4", "options": {"bf": "2", "g": "8"}}),
            ("intra.avi", {"codec": "mjpeg", "pixels": "yuvj420p"}),
            ("mpeg4.avi", {"codec": "mpeg4"}),
            ("ten_bits.mkv", {"codec": "ffv1", "pixels": "yuv420p10le"}),
            ("vp9.webm", {"codec": "libvpx-vp9"}),
            ("stream.ts", {"codec": "mpeg2video"}),
        ],
    )
    def test_containers_and_codecs(self, tmp_path: Path, name: str, options: dict[str, object]) -> None:
        if options["codec"] not in av.codecs_available:
            pytest.skip(f"this FFmpeg has no {options['codec']}")
        # Where the codec knows the rate alone, frames follow each other evenly.
        path = write_video(tmp_path / name, greys(20), **options)  # type: ignore[arg-type]
        seconds = list_frames(path).seconds
        assert len(seconds) == 20
        torch.testing.assert_close(seconds.diff(), torch.full((19,), 0.1, dtype=torch.float64), atol=2e-3, rtol=0)
        whole, _ = decode_frames(path, every(20))
        # As near as the codec comes to it.
        assert all(abs(number - place) <= 1 for place, number in enumerate(numbers(whole.frames)))
        for chosen in ([0, 7, 8], [17, 19], [13]):
            clip, damage = decode_frames(path, lambda seconds, chosen=chosen: torch.tensor(chosen))
            assert torch.equal(clip.frames, whole.frames[chosen])
            assert torch.equal(clip.seconds, seconds[chosen])
            assert damage is None

    @pytest.mark.parametrize("whole_range", [False, True])
    def test_black_and_white(self, tmp_path: Path, whole_range: bool) -> None:
        """Values from 16 to 235, as televisions have them, and from 0 to 255, as phones do."""
        from av.video.reformatter import ColorRange

        if "libx264" not in av.codecs_available:
            pytest.skip("this FFmpeg has no libx264")
        own = ColorRange.JPEG if whole_range else ColorRange.MPEG
        path = tmp_path / "range.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=10, options={"qp": "0"})
            stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
            stream.codec_context.color_range = own
            for value in (0, 128, 255):
                picture = av.VideoFrame.from_ndarray(np.full((32, 48, 3), value, np.uint8), format="rgb24")
                container.mux(stream.encode(picture.reformat(format="yuv420p", dst_color_range=own)))
            container.mux(stream.encode(None))
        frames = decode_frames(path, every(3))[0].frames
        expected = torch.tensor([0, 128, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand_as(frames)
        # FFmpeg rounds by up to 2; a range mistaken for the other would be off by 16 and more.
        torch.testing.assert_close(frames, expected, atol=2, rtol=0)

    @pytest.mark.integration
    def test_one_frame_at_a_time_is_in_memory(self, tmp_path: Path) -> None:
        """Failure class 35: 60 frames of 4 MB each leave no trace."""
        path = write_video(tmp_path / "long.mkv", [np.full((960, 1440, 3), 90, np.uint8)] * 60)
        script = (
            "import resource, sys, torch\n"
            "from vision_rope.data import decode_frames, list_frames\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "assert len(list_frames(sys.argv[1]).seconds) == 60\n"
            "decode_frames(sys.argv[1], lambda seconds: torch.tensor([0, 30, 59]))\n"
            "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 80

    def test_a_cut_file(self, tmp_path: Path) -> None:
        """What is left of a cut stream is used; of a file whose index was at the end nothing is."""
        whole = write_video(tmp_path / "whole.mkv", greys(25), options={"g": "5"})
        data = whole.read_bytes()
        (tmp_path / "cut.mkv").write_bytes(data[: len(data) // 2])
        found = list_frames(tmp_path / "cut.mkv")
        assert 5 < len(found.seconds) < 24
        clip, _ = decode_frames(tmp_path / "cut.mkv", lambda seconds: torch.arange(4))
        assert numbers(clip.frames) == [0, 1, 2, 3]
        mp4 = write_video(tmp_path / "whole.mp4", greys(25))
        (tmp_path / "cut.mp4").write_bytes(mp4.read_bytes()[:-400])
        with pytest.raises(BrokenVideoError, match=r"cut\.mp4: no clip can be made of it"):
            decode_frames(tmp_path / "cut.mp4", every(1))

    @pytest.mark.parametrize(("codec", "spoilt"), [("mpeg4", 1.0), ("mpeg4", 0.5), ("mpeg2video", 0.5)])
    def test_damage_costs_frames_up_to_the_next_key_frame(self, tmp_path: Path, codec: str, spoilt: float) -> None:
        texture = np.random.default_rng(0).integers(0, 150, (32, 48, 3))
        frames = [(texture + 4 * place).astype(np.uint8) for place in range(25)]
        options = {"g": "5", "sc_threshold": "1000000000"}
        path = write_video(tmp_path / "damaged.mp4", frames, codec=codec, options=options)
        with av.open(str(path)) as container:
            packets = [packet for packet in container.demux(video=0) if packet.size]
            end, length = packets[11].pos + packets[11].size, int(spoilt * packets[11].size)
            assert [index for index, packet in enumerate(packets) if packet.is_keyframe] == [0, 5, 10, 15, 20]
        data = bytearray(path.read_bytes())
        data[end - length : end] = bytes(length)
        path.write_bytes(bytes(data))
        found = list_frames(path)
        assert "1.100 s" in str(found.damage)
        assert (found.seconds * 10).round().int().tolist() == [*range(11), *range(15, 25)]
        clip, damage = decode_frames(path, lambda seconds: torch.arange(11, 14))
        assert (clip.seconds * 10).round().int().tolist() == [15, 16, 17]
        assert damage == found.damage
        # Frames in front of the damage do not meet it.
        assert decode_frames(path, every(3))[1] is None

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(b"", "Invalid data|End of file"), (b"no video at all" * 100, "Invalid data"), (None, "no such file")],
    )
    def test_what_is_no_video_is_named(self, tmp_path: Path, content: bytes | None, reason: str) -> None:
        path = tmp_path / "broken.mp4"
        if content is not None:
            path.write_bytes(content)
        for read in (list_frames, lambda path: decode_frames(path, every(1))):
            with pytest.raises(BrokenVideoError, match=reason) as caught:
                read(path)
            assert caught.value.path == str(path)

    def test_a_file_with_sound_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "sound.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=8000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        with pytest.raises(BrokenVideoError, match="no video stream"):
            decode_frames(path, every(1))

    def test_the_words_of_the_choice_are_passed_on(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "short.mkv", greys(3))
        with pytest.raises(BrokenVideoError, match=r"short\.mkv: .*it has 3 frames, but a clip takes 4"):
            decode_frames(path, ClipSampling(4, 2.0).choose)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        # (column, row) -> (a column + c row, b column + d row)
        ([1, 0, 0, 1], lambda picture: picture),
        ([0, 1, -1, 0], lambda picture: torch.rot90(picture, -1, (1, 2))),
        ([-1, 0, 0, -1], lambda picture: torch.rot90(picture, 2, (1, 2))),
        ([0, -1, 1, 0], lambda picture: torch.rot90(picture, 1, (1, 2))),
        ([-1, 0, 0, 1], lambda picture: picture.flip(2)),
        ([1, 0, 0, -1], lambda picture: picture.flip(1)),
        ([0, 1, 1, 0], lambda picture: picture.transpose(1, 2)),
    ],
)
def test_display_matrices(matrix: list[int], expected: object) -> None:
    """All eight but one, by turning and mirroring the picture as a whole."""
    from vision_rope.data import decode_video

    picture = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)

    class Turned:
        a, b, c, d = (65536 * value for value in matrix)
        side_data = {"DISPLAYMATRIX": np.array([a, b, 0, c, d, 0, 0, 0, 1 << 30], np.int32).tobytes()}  # noqa: RUF012

    class Reformatter:
        def reformat(self, frame: object, **options: object) -> Reformatter:
            return self

        def to_ndarray(self) -> np.ndarray:
            return picture

    upright = decode_video.to_rgb(Turned(), Reformatter())
    assert torch.equal(upright, expected(torch.from_numpy(picture).permute(2, 0, 1)))  # type: ignore[operator]
