"""Streams: every decodable frame, upright and in time, from whatever it comes; nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_video_decode import REAL, greys, numbers, write_video
from vision_rope.data.decode_torchcodec import load_torchcodec
from vision_rope.data.read_ahead import read_ahead
from vision_rope.data.streams import BrokenStreamError, FrameSizeError, open_stream

av = pytest.importorskip("av", reason="videos need the package av")


@pytest.fixture(scope="session")
def videos(shared_data: Path) -> Path:
    return shared_data / "videos_nomask"


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read_ahead"]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert reading_threads() == []


def grey_numbers(stream: Any) -> list[int]:
    return numbers(torch.stack([frame.pixels for frame in stream]))


class TestRealVideos:
    @pytest.mark.parametrize("name", REAL)
    def test_every_decodable_frame(self, videos: Path, name: str) -> None:
        """Failure class 40: rotation, variable rate, a damaged tail, no count in the header, webm and mov."""
        count, size, last = REAL[name]
        with open_stream(videos / name) as stream:
            assert stream.name == Path(name).stem
            assert stream.size == size
            assert stream.damage is None
            frames = [(frame.number, frame.seconds, frame.pixels.shape) for frame in stream]
        assert [number for number, *_ in frames] == list(range(count))
        assert {shape for *_, shape in frames} == {(3, *size)}
        if last is not None:
            assert frames[-1][1] == pytest.approx(last, abs=1e-9)
            assert stream.fps == pytest.approx((count - 1) / last, rel=1e-12)
        if name == "corrupted.mp4":
            assert "Invalid data" in str(stream.damage)
            assert stream.num_frames == 50
        else:
            assert stream.damage is None
        if name == "test.webm":
            assert stream.num_frames is None
            steps = np.diff([seconds for _, seconds, _ in frames])
            assert (steps > 0).all()
            assert len({round(1000 * step) for step in steps}) > 2
            assert stream.fps == pytest.approx(30, rel=0.02)

    def test_turned_upright(self, videos: Path) -> None:
        """The video that a phone turned shows what the other one shows, up to their compression."""
        with open_stream(videos / "video_90.mov") as turned, av.open(str(videos / "video_90.mov")) as container:
            for frame, raw in zip(turned, container.decode(video=0), strict=True):
                picture = torch.from_numpy(raw.to_ndarray(format="rgb24")).permute(2, 0, 1)
                assert torch.equal(frame.pixels, torch.rot90(picture, -1, (1, 2)))

    @pytest.mark.parametrize("name", REAL)
    def test_torchcodec_gives_the_same(self, videos: Path, name: str) -> None:
        try:
            load_torchcodec()
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
        with open_stream(videos / name) as one, open_stream(videos / name, decoder="torchcodec") as other:
            for first, second in zip(one, other, strict=True):
                torch.testing.assert_close(first.pixels, second.pixels, atol=2, rtol=0)
                assert second.seconds == pytest.approx(first.seconds, abs=1e-4)
        assert (one.damage is None) == (other.damage is None)
        assert (one.fps, one.num_frames, one.size) == (other.fps, other.num_frames, other.size)


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "codec", "pixels"),
        [
            ("a.mp4", "mpeg4", "yuv420p"),
            ("a.mov", "libx264", "yuv420p"),
            ("a.mkv", "ffv1", "yuv420p10le"),
            ("a.webm", "libvpx-vp9", "yuv420p"),
            ("a.gif", "gif", "rgb8"),
        ],
    )
    @pytest.mark.parametrize("ahead", [0, 3])
    def test_containers_and_codecs(self, tmp_path: Path, name: str, codec: str, pixels: str, ahead: int) -> None:
        if codec not in av.codecs_available:
            pytest.skip(f"this FFmpeg has no {codec}")
        path = write_video(tmp_path / name, greys(20), codec=codec, pixels=pixels)
        with open_stream(str(path), ahead=ahead) as stream:
            assert stream.fps == pytest.approx(10, rel=1e-6)
            frames = list(stream)
        found = numbers(torch.stack([frame.pixels for frame in frames]))
        # The palette of a GIF has few greys.
        assert all(abs(number - place) <= (5 if codec == "gif" else 1) for place, number in enumerate(found))
        assert [round(frame.seconds, 3) for frame in frames] == [place / 10 for place in range(20)]

    @pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
    @pytest.mark.parametrize("degrees", [90, 180, 270])
    def test_turned_by_the_container(self, tmp_path: Path, suffix: str, degrees: int) -> None:
        """Failure class 40: degrees against the clock, as FFmpeg counts them."""
        picture = np.full((32, 48, 3), 40, np.uint8)
        picture[:16, :24] = 200
        path = tmp_path / f"turned{suffix}"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
            stream.set_display_rotation(degrees)
            for _ in range(3):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
        upright = torch.rot90(torch.from_numpy(picture).permute(2, 0, 1), degrees // 90, (1, 2))
        with open_stream(path) as frames:
            assert frames.size == tuple(upright.shape[1:])
            for frame in frames:
                torch.testing.assert_close(frame.pixels.int(), upright.int(), atol=25, rtol=0)

    def test_variable_rate_and_a_late_start(self, tmp_path: Path) -> None:
        """Failure class 40."""
        times = [3, 4, 8, 9, 30, 31]
        path = write_video(tmp_path / "variable.mkv", greys(6), times=times)
        with open_stream(path) as stream:
            assert [frame.seconds for frame in stream] == [time / 10 for time in times]
        with open_stream(path, fps=30000 / 1001) as stream:
            assert stream.fps == 30000 / 1001
            assert [frame.seconds for frame in stream] == [number * 1001 / 30000 for number in range(6)]

    def test_frames_without_times_follow_each_other_evenly(self, tmp_path: Path) -> None:
        if "libx264" not in av.codecs_available:
            pytest.skip("this FFmpeg has no libx264")
        path = write_video(tmp_path / "bare.h264", greys(9), codec="libx264", unit=Fraction(1, 10))
        with open_stream(path) as stream:
            frames = list(stream)
        assert len(frames) == 9
        assert (np.diff([frame.seconds for frame in frames]) > 0).all()

    def test_damage_in_the_middle(self, tmp_path: Path) -> None:
        """Failure class 40: what follows the next key frame is good again."""
        texture = np.random.default_rng(0).integers(0, 150, (32, 48, 3))
        frames = [(texture + 4 * place).astype(np.uint8) for place in range(25)]
        path = write_video(tmp_path / "damaged.mp4", frames, options={"g": "5", "sc_threshold": "1000000000"})
        with av.open(str(path)) as container:
            packet = [packet for packet in container.demux(video=0) if packet.size][11]
            end, length = packet.pos + packet.size, packet.size
        data = bytearray(path.read_bytes())
        data[end - length : end] = bytes(length)
        path.write_bytes(bytes(data))
        with open_stream(path) as stream:
            places = [round(frame.seconds * 10) for frame in stream]
        assert places == [*range(11), *range(15, 25)]
        assert "1.100 s" in str(stream.damage)

    def test_a_change_of_size_is_told_or_undone(self, tmp_path: Path) -> None:
        """Failure class 39: MJPEG frames may have a size each."""
        parts = [write_video(tmp_path / f"{side}.avi", greys(3, (side, 48)), codec="mjpeg", pixels="yuvj420p")
                 for side in (32, 64)]  # fmt: skip
        path = tmp_path / "both.mjpeg"
        with path.open("wb") as file:
            for part in parts:
                with av.open(str(part)) as container:
                    for packet in container.demux(video=0):
                        file.write(bytes(packet))
        with open_stream(path) as stream:
            assert [next(stream).number for _ in range(3)] == [0, 1, 2]
            message = r"both: frame 3 has 64x48 pixels \(rows x columns\), but the first one has 32x48; resize=True"
            with pytest.raises(FrameSizeError, match=message) as caught:
                next(stream)
            assert (caught.value.number, caught.value.size, caught.value.first) == (3, (64, 48), (32, 48))
            assert reading_threads() == []
        with open_stream(path, resize=True) as stream:
            frames = [frame.pixels for frame in stream]
        assert [tuple(frame.shape) for frame in frames] == [(3, 32, 48)] * 6
        assert all(abs(number - place % 3) <= 1 for place, number in enumerate(numbers(torch.stack(frames))))

    @pytest.mark.parametrize(
        ("content", "reason"), [(b"no video at all" * 100, "Invalid data"), (None, "there is no such file")]
    )
    def test_what_is_no_video_is_named(self, tmp_path: Path, content: bytes | None, reason: str) -> None:
        path = tmp_path / "broken.mp4"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(BrokenStreamError, match=rf"broken\.mp4: cannot be read: {reason}"):
            open_stream(path)

    def test_an_address(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "clip.mp4", greys(12))
        handler = partial(type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *words: None}))
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                with open_stream(f"http://127.0.0.1:{server.server_port}/clip.mp4?x=1") as stream:
                    assert stream.name == "clip"
                    assert len(list(stream)) == 12
                with pytest.raises(BrokenStreamError, match="404"):
                    open_stream(f"http://127.0.0.1:{server.server_port}/other.mp4")
            finally:
                server.shutdown()
                thread.join()
        assert path.is_file()


class TestFolders:
    def test_natural_order_and_upright(self, tmp_path: Path) -> None:
        from PIL import Image

        for number in (10, 9, 1, 100, 2):
            Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(tmp_path / f"frame{number}.png")
        (tmp_path / "notes.txt").write_text("no picture")
        with open_stream(tmp_path, fps=24) as stream:
            frames = list(stream)
            assert (stream.name, stream.num_frames, stream.fps, stream.size) == (tmp_path.name, 5, 24, (4, 6))
        assert [int(frame.pixels[0, 0, 0]) for frame in frames] == [1, 2, 9, 10, 100]
        assert [frame.seconds for frame in frames] == [number / 24 for number in range(5)]

        half = np.zeros((4, 6, 3), np.uint8)
        half[:, 3:] = 255
        exif = Image.Exif()
        exif[0x0112] = 6
        turned = tmp_path / "turned"
        turned.mkdir()
        Image.fromarray(half).save(turned / "1.jpg", exif=exif, quality=95)
        for source in (turned, turned / "1.jpg"):
            with open_stream(source) as stream:
                (frame,) = stream
            assert frame.pixels.shape == (3, 6, 4)
            assert frame.pixels[:, 4:].min() > 200
            assert frame.pixels[:, :2].max() < 50

    def test_what_is_no_picture_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="holds no pictures"):
            open_stream(tmp_path)
        (tmp_path / "1.png").write_bytes(b"no picture")
        with pytest.raises(OSError, match=r"1\.png: cannot be decoded"):
            open_stream(tmp_path)


class TestIterables:
    def test_arrays_and_tensors_of_bytes_and_floats(self) -> None:
        picture = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8)
        array = picture.permute(1, 2, 0).numpy()
        frozen = array.copy()
        frozen.flags.writeable = False
        backwards = np.ascontiguousarray(array[..., ::-1])[..., ::-1]
        values = [picture, picture / 255, (picture / 255).double(), array, array / 255, frozen, backwards]
        with open_stream(iter(values)) as stream:
            assert (stream.num_frames, stream.size, stream.fps) == (None, (5, 7), 30)
            frames = list(stream)
        assert [frame.number for frame in frames] == list(range(len(values)))
        for frame in frames:
            assert torch.equal(frame.pixels, picture)
            assert frame.pixels.dtype == torch.uint8
        with open_stream(np.stack([array] * 3), fps=10) as stream:
            assert stream.num_frames == 3
            assert [frame.seconds for frame in stream] == [0.0, 0.1, 0.2]

    @pytest.mark.parametrize("ahead", [None, 4])
    @pytest.mark.parametrize("shared", [np.zeros((4, 6, 3), np.uint8), torch.zeros(3, 4, 6, dtype=torch.uint8)])
    def test_memory_that_is_used_again(self, ahead: int | None, shared: Any) -> None:
        def reuse() -> Iterator[Any]:
            for number in range(9):
                shared[:] = number
                yield shared

        with open_stream(reuse(), ahead=ahead) as stream:
            assert [int(frame.pixels[0, 0, 0]) for frame in list(stream)] == list(range(9))

    def test_nothing_is_taken_before_it_is_needed(self) -> None:
        taken = []

        def endless() -> Iterator[torch.Tensor]:
            while True:
                taken.append(1)
                yield torch.zeros(3, 4, 4)

        with open_stream(endless()) as stream:
            for frame in stream:
                if frame.number == 4:
                    break
        assert len(taken) == 5
        with open_stream(endless(), ahead=3) as stream:
            next(stream)
        assert 6 <= len(taken) <= 10
        assert list(stream) == []

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (
                np.zeros((3, 4, 6), np.uint8),
                r"frame 1 is a ndarray of shape \(3, 4, 6\) .* must be \(height, width, 3\)",
            ),
            (torch.zeros(4, 6, 3), r"must be \(3, height, width\)"),
            (np.zeros((4, 6, 3)) + 2, "values from 2 to 2, but floats must be from 0 to 1; divide by 255"),
            (torch.full((3, 4, 6), float("nan")), "floats must be from 0 to 1"),
            (torch.zeros(3, 4, 6, dtype=torch.int64), r"frame 1 is of torch\.int64"),
            (np.array([[["a"] * 3]]), "must be"),
            (None, "frame 1 is a NoneType"),
            (torch.zeros(3, 4, 5), r"frames: frame 1 has 4x5 pixels"),
        ],
    )
    def test_other_frames_are_refused(self, value: Any, message: str) -> None:
        with open_stream([torch.zeros(3, 4, 6), value]) as stream:
            next(stream)
            with pytest.raises(ValueError, match=message):
                next(stream)

    def test_no_frames(self) -> None:
        with pytest.raises(BrokenStreamError, match="it holds no frames"):
            open_stream([])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (97, {}, "there is no camera /dev/video97; cameras of this machine: "),
        ("97", {}, "there is no camera"),
        ("/dev/video97", {}, "there is no camera"),
        (3.5, {}, "source is a float"),
        ("x.mp4", {"decoder": "opencv"}, "decoder is 'opencv', but it must be pyav, torchcodec or nvdec"),
        ("x.mp4", {"ahead": -1}, "ahead is -1"),
        ("x.mp4", {"fps": 0}, "fps is 0"),
        (97, {"decoder": "nvdec"}, "decoder is nvdec, which reads video files alone, but the source is a camera"),
        ([], {"decoder": "torchcodec"}, "the source is an iterable"),
    ],
)
def test_impossible_arguments(source: Any, options: dict[str, Any], message: str) -> None:
    if source in (97, "97", "/dev/video97") and not Path("/dev").is_dir():
        pytest.skip("cameras have other names here")
    with pytest.raises(ValueError, match=message):
        open_stream(source, **options)


def test_a_camera_is_opened_by_its_system_and_keeps_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of the device: what it is opened with, and that `fps` is asked for and not assumed."""
    from vision_rope.data import frame_sources

    path = write_video(tmp_path / "recorded.mkv", greys(3), times=[70, 72, 75])
    asked = []

    def open_recorded(address: str, **options: Any) -> Any:
        asked.append((address, options))
        return frame_sources.open_video(path)

    monkeypatch.setattr(frame_sources, "open_input", open_recorded)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    for system in ("linux", "darwin", "win32"):
        monkeypatch.setattr(frame_sources.sys, "platform", system)
        with open_stream("video=Built in" if system == "win32" else 0, fps=15) as stream:
            assert [frame.seconds for frame in stream] == [7.0, 7.2, 7.5]
    assert asked == [
        ("/dev/video0", {"format": "v4l2", "options": {"framerate": "15"}}),
        ("0:none", {"format": "avfoundation", "options": {"framerate": "15"}}),
        ("video=Built in", {"format": "dshow", "options": {"framerate": "15"}}),
    ]


class TestReadAhead:
    def test_at_most_that_many_wait(self) -> None:
        made: list[int] = []

        def make() -> Iterator[int]:
            for number in range(50):
                made.append(number)
                yield number

        items = read_ahead(make(), 4)  # type: ignore[arg-type]
        assert next(items) == 0
        time.sleep(0.2)
        # One given, four in the queue, one in the hand of the thread.
        assert len(made) == 6
        assert [*items] == list(range(1, 50))

    def test_an_error_comes_in_its_place_and_closes(self) -> None:
        closed = []

        def fail() -> Iterator[int]:
            try:
                yield 1
                raise KeyError("in the thread")
            finally:
                closed.append(threading.current_thread().name)

        items = read_ahead(fail(), 4)  # type: ignore[arg-type]
        assert next(items) == 1
        with pytest.raises(KeyError, match="in the thread"):
            next(items)
        assert closed == ["read_ahead"]
        assert list(items) == []

    @pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
    def test_leaving_early_closes_the_file(self, tmp_path: Path, error: type[BaseException] | None) -> None:
        path = write_video(tmp_path / "long.mkv", greys(29))
        try:
            with open_stream(path, ahead=2) as stream:
                for _ in stream:
                    if error is not None:
                        raise error
                    break
                assert len(reading_threads()) == 1
        except (KeyboardInterrupt, ValueError):
            pass
        assert reading_threads() == []
        with pytest.raises(AssertionError, match="not open"):
            next(stream._source.file.container.demux())  # type: ignore[union-attr]
        assert list(stream) == []

    def test_a_stream_that_is_forgotten_stops(self, tmp_path: Path) -> None:
        stream = open_stream(write_video(tmp_path / "long.mkv", greys(29)), ahead=2)
        assert len(reading_threads()) == 1
        del stream
        gc.collect()
        assert reading_threads() == []
