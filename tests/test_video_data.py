"""Clips: which frames, from which folders and lists, in batches that follow from seed, epoch and index alone."""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.test_data_loader import RecordingAccelerator
from vision_rope.data import (
    BrokenImageError,
    BrokenVideoError,
    Clip,
    Clips,
    ClipSampling,
    ClipSource,
    Mixing,
    create_loader,
    eval_transform,
    open_dataset,
    resize_batch,
    take_evenly,
    train_transform,
)
from vision_rope.data.loader import DeviceLoader
from vision_rope.data.video_sources import natural_key

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


class Numbered(ClipSource):
    """Clips of 4 noisy frames whose gaps in time tell index and draw; those of `broken` cannot be read."""

    def __init__(self, count: int, broken: tuple[int, ...] = (), skip_broken: bool = False) -> None:
        self.name, self.classes, self.labels = "numbered", ["even", "odd"], None
        self.count, self.broken, self.skip_broken = count, broken, skip_broken
        self.start = 100.0

    def __len__(self) -> int:
        return self.count

    def path(self, index: int) -> str:
        return f"clip {index}"

    def sampled(self, num_frames: int, fps: float | None) -> ClipSource:
        raise AssertionError("no test asks for other clips")

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
        if index in self.broken:
            raise BrokenVideoError(self.path(index), "it is number " + str(index))
        gap = index + (0.5 if generator is None else float(torch.rand((), generator=generator)) / 2)
        frames = torch.randint(256, (4, 3, 40, 50), generator=torch.Generator().manual_seed(index))
        return Clip(frames.to(torch.uint8), self.start + gap * torch.arange(4, dtype=torch.float64)), index % 2

    def damage(self, index: int) -> str | None:
        return "a scratch" if index == 3 else None


def make(source: ClipSource, **options: object) -> DeviceLoader:
    defaults = {"batch_size": 4, "transform": eval_transform((24, 32)), "device": "cpu", "training": False}
    defaults |= {"num_workers": 0, "mean": MEAN, "std": STD, "with_indices": True}
    loader = create_loader(source, **{**defaults, **options})  # type: ignore[arg-type]
    loader.told = []
    loader.report = loader.told.append
    return loader


def read(loader: DeviceLoader, epoch: int = 0) -> list[tuple[Clips, Tensor, Tensor]]:
    loader.set_epoch(epoch)
    return list(loader)  # type: ignore[arg-type]


class TestSampling:
    @pytest.mark.parametrize("native", [10.0, 24.0, 25.0, 30000 / 1001])
    @pytest.mark.parametrize("fps", [2.0, 5.0, 7.5, 9.0])
    def test_frames_are_the_nearest_ones(self, native: float, fps: float) -> None:
        """Against a search over all frames, one by one."""
        seconds = torch.arange(120, dtype=torch.float64) / native + 0.7
        for count, position in itertools.product((1, 2, 7), (0.0, 0.31, 0.5, 1.0)):
            chosen = ClipSampling(count, fps).choose(seconds, position).tolist()
            for step, place in enumerate(chosen):
                wanted = seconds[chosen[0]] + step / fps
                least = (seconds - wanted).abs().min().item()
                assert abs(seconds[place] - wanted).item() == pytest.approx(least, abs=2e-6)

    def test_variable_times(self) -> None:
        seconds = torch.tensor([0.0, 0.1, 0.5, 0.6, 0.62, 1.0, 1.45, 1.5, 2.0], dtype=torch.float64)
        assert ClipSampling(4, 2.0).choose(seconds, 0.0).tolist() == [0, 2, 5, 7]
        assert ClipSampling(3, 1.0).choose(seconds, 1.0).tolist() == [0, 5, 8]

    def test_of_two_frames_as_near_the_earlier_is_taken(self) -> None:
        """Wherever a clip begins, whatever rounding makes of the times: gaps are even, or alternate."""
        for first in range(60):
            seconds = torch.arange(first, first + 30, dtype=torch.float64) / 25
            assert ClipSampling(7, 10.0).choose(seconds, first / 60).diff().tolist() == [2, 3] * 3

    def test_positions_cover_the_video(self) -> None:
        seconds = torch.arange(20, dtype=torch.float64) / 10
        for sampling, last in ((ClipSampling(4), 16), (ClipSampling(4, 5.0), 13), (ClipSampling(20), 0)):
            starts = [int(sampling.choose(seconds, step / 1000)[0]) for step in range(1001)]
            assert starts == sorted(starts)
            assert set(starts) == set(range(last + 1))
            counts = torch.bincount(torch.tensor(starts))
            assert counts.max() - counts.min() <= 2
        assert ClipSampling(4).choose(seconds, 0.3).diff().tolist() == [1, 1, 1]
        assert ClipSampling(4, 5.0).choose(seconds).tolist() == [7, 9, 11, 13]

    def test_no_frame_comes_twice(self) -> None:
        seconds = torch.arange(12, dtype=torch.float64) / 10
        # More frames a second than there are: those that follow each other.
        for position in (0.0, 0.5, 1.0):
            assert ClipSampling(5, 40.0).choose(seconds, position).diff().tolist() == [1] * 4
        # Longer than the video: all of it, evenly.
        assert ClipSampling(4, 1.0).choose(seconds, 0.9).tolist() == [0, 4, 7, 11]
        assert ClipSampling(12, 1.0).choose(seconds, 0.9).tolist() == list(range(12))
        with pytest.raises(ValueError, match=r"it has 12 frames, but a clip takes 13, none twice"):
            ClipSampling(13, 100.0).choose(seconds)
        with pytest.raises(ValueError, match=r"it has 1 frame, but a clip takes 2, none twice$"):
            ClipSampling(2).choose(seconds[:1])
        with pytest.raises(ValueError, match="it has 0 frames"):
            ClipSampling(1).choose(seconds[:0])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_frames": 0}, "num_frames is 0"),
            ({"fps": 0.0}, "fps is 0"),
            ({"fps": -1.0}, "fps"),
            ({"fps": float("nan")}, "fps"),
        ],
    )
    def test_errors(self, options: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ClipSampling(**{"num_frames": 4, **options})  # type: ignore[arg-type]


class TestFrameFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Two classes of two clips of 12 frames; frame k is grey 20 k. 10.png must not come before 2.png."""
        for label, clip in itertools.product(("a", "b"), ("one", "two")):
            (tmp_path / label / clip).mkdir(parents=True)
            for frame in range(12):
                grey = Image.fromarray(np.full((6, 9, 3), 20 * frame, np.uint8))
                grey.save(tmp_path / label / clip / f"{frame}.png")
        return tmp_path

    def open(self, path: object, split: str = "train", num_frames: int = 3, fps: float | None = 15.0) -> ClipSource:
        source = open_dataset(f"frames:{path}", split, sampling=ClipSampling(num_frames, fps), val_fraction=0.5)  # type: ignore[arg-type]
        assert isinstance(source, ClipSource)
        return source

    def test_order_and_times(self, folder: Path) -> None:
        source = self.open(folder)
        assert (source.classes, len(source)) == (["a", "b"], 2)
        clip, label = source[1]
        assert label == 1
        assert (clip.frames[:, 0, 0, 0] // 20).tolist() == [4, 6, 8]
        torch.testing.assert_close(clip.seconds * 30, torch.tensor([4.0, 6, 8], dtype=torch.float64))
        (folder / "fps.txt").write_text("60\n")
        assert (self.open(folder)[0][0].frames[:, 0, 0, 0] // 20).tolist() == [2, 6, 10]
        (folder / "fps.txt").write_text("fast")
        with pytest.raises(ValueError, match=r"fps\.txt holds 'fast'"):
            self.open(folder)

    def test_splits(self, folder: Path) -> None:
        train, validation = (self.open(folder, split) for split in ("train", "validation"))
        assert {train.path(0), validation.path(0)} == {str(folder / "a" / "one"), str(folder / "a" / "two")}
        both = folder.parent / f"{folder.name}-splits"
        both.mkdir()
        for name in ("train", "val"):
            (both / name).symlink_to(folder)
        assert len(self.open(both)) == len(self.open(both, "validation")) == 4
        alone = self.open(folder / "a")
        assert (alone.classes, len(alone)) == (["clip"], 1)

    def test_errors(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="holds frames itself"):
            self.open(folder / "a" / "one")
        with pytest.raises(BrokenVideoError, match=r"two.*it has 12 frames, but a clip takes 13|one.*takes 13"):
            self.open(folder, num_frames=13)[0]
        broken = Path(self.open(folder, fps=None, num_frames=12).path(0)) / "5.png"
        broken.write_bytes(b"no picture")
        with pytest.raises(BrokenImageError, match=r"5\.png"):
            self.open(folder, fps=None, num_frames=12)[0]
        broken.unlink()
        broken.symlink_to("gone.png")
        with pytest.raises(BrokenVideoError, match=r"5\.png cannot be read: No such file"):
            self.open(folder, fps=None, num_frames=12)[0]
        broken.unlink()
        Image.new("RGB", (9, 7)).save(broken)
        with pytest.raises(BrokenVideoError, match=r"different sizes.*6x9, 7x9"):
            self.open(folder, fps=None, num_frames=12)[0]
        Image.new("RGB", (9, 7)).save(folder / "a" / "stray.png")
        with pytest.raises(ValueError, match=r"a holds frames and .*b does not"):
            self.open(folder)
        with pytest.raises(ValueError, match="decoder is 'torchcodec'"):
            open_dataset(f"frames:{folder}", "train", sampling=ClipSampling(2), decoder="torchcodec")

    def test_davis(self, shared_data: Path, tmp_path: Path) -> None:
        """JPEGImages/480p/SEQUENCE/NNNNN.jpg, without classes."""
        with tarfile.open(shared_data / "davis_masked_small.tar") as tar:
            members = [
                m for m in tar if "JPEGImages/480p" in m.name and m.isfile() and m.name.endswith(("0.jpg", "5.jpg"))
            ]
            tar.extractall(tmp_path, members[:40], filter="data")
        (folder,) = tmp_path.rglob("JPEGImages")
        source = open_dataset(f"frames:{folder / '480p'}", "train", sampling=ClipSampling(4), val_fraction=0.4)
        assert source.classes == ["clip"]
        clip, _ = source[0]
        assert clip.frames.shape == (4, 3, 480, 854)

    def test_natural_order(self) -> None:
        names = ["10.jpg", "2.jpg", "frame-1b.jpg", "frame-01a.jpg", "frame-12.jpg"]
        assert sorted(names, key=natural_key) == ["2.jpg", "10.jpg", "frame-01a.jpg", "frame-1b.jpg", "frame-12.jpg"]


class TestVideoFolders:
    @pytest.fixture
    def folder(self, shared_data: Path, tmp_path: Path) -> Path:
        for name in ("dog/h265_video.mp4", "dog/video_0.mov", "keys/video_90.mov", "keys/test.webm"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(shared_data / "videos_nomask" / Path(name).name)
        return tmp_path

    def open(self, source: object, split: str = "train", **options: object) -> ClipSource:
        pytest.importorskip("av", reason="videos need the package av")
        found = open_dataset(f"videos:{source}", split, sampling=ClipSampling(2, 10.0), val_fraction=0.5, **options)  # type: ignore[arg-type]
        assert isinstance(found, ClipSource)
        return found

    def test_classes_and_hold_out(self, folder: Path) -> None:
        train, validation = self.open(folder), self.open(folder, "validation")
        assert train.classes == validation.classes == ["dog", "keys"]
        paths = [source.path(index) for source in (train, validation) for index in range(len(source))]
        assert len(set(paths)) == 4
        assert train.labels == [0, 1]
        assert len(self.open(folder / "dog")) == 1
        assert self.open(folder / "dog").classes == ["clip"]
        (folder / "stray.mp4").symlink_to(folder / "dog" / "h265_video.mp4")
        with pytest.raises(ValueError, match=r"holds videos \(.*stray\.mp4\) and folders of videos"):
            self.open(folder)
        with pytest.raises(ValueError, match="there is no folder"):
            self.open(folder / "nothing")
        (folder / "empty" / "class").mkdir(parents=True)
        with pytest.raises(ValueError, match="class holds no videos"):
            self.open(folder / "empty")

    def test_lists(self, folder: Path) -> None:
        rows = [
            "path, label, split",
            "dog/h265_video.mp4, 10, train",
            "dog/video_0.mov, 9, train",
            "keys/test.webm, 10, val",
        ]
        (folder / "list.csv").write_text("\n".join(rows))
        train, validation = self.open(folder / "list.csv"), self.open(folder / "list.csv", "validation")
        assert train.classes == ["9", "10"]
        assert train.labels == [1, 0]
        assert [validation.path(0)] == [str(folder / "keys/test.webm")]
        assert train[0][0].frames.shape == (2, 3, 128, 128)

    def test_parts_of_a_file(self, folder: Path) -> None:
        """Parts keep their own seconds, and those of one file stay in one split."""
        parts = [f"keys/test.webm,{start},{start + 0.4}" for start in (0, 1, 2)]
        (folder / "list.csv").write_text("\n".join(["path,start,end", *parts, "dog/h265_video.mp4,,"]))
        sources = [self.open(folder / "list.csv", split) for split in ("train", "validation")]
        assert sorted(len(source) for source in sources) == [1, 3]
        parts_source = max(sources, key=len)
        for index, start in enumerate((0, 1, 2)):
            for seed in range(6):
                clip, _ = parts_source.read(index, torch.Generator().manual_seed(seed))
                assert start <= clip.seconds[0] < clip.seconds[-1] < start + 0.4

    def test_parts_outside_of_the_file_say_so(self, folder: Path) -> None:
        (folder / "list.csv").write_text("path,split,start,end\ndog/h265_video.mp4,train,200,300\nkeys/test.webm,val,,")
        with pytest.raises(BrokenVideoError, match=r"the window 200 to 300 s holds no frames: the video has them from"):
            self.open(folder / "list.csv")[0]

    def test_a_file_stays_in_one_split_however_it_is_written(self, folder: Path) -> None:
        paths = ["dog/h265_video.mp4", "./dog/h265_video.mp4", "dog/../dog/h265_video.mp4"]
        (folder / "list.csv").write_text("\n".join(["path", *(2 * paths)]))
        with pytest.raises(ValueError, match="leaves none of 1 videos for the validation split"):
            self.open(folder / "list.csv", "validation")
        assert len(self.open(folder / "list.csv")) == 6

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "begins with nothing"),
            ("file,label\na,b", "begins with file,label"),
            ("path,label\n", "lists no videos"),
            ("path,label\na.mp4", "line 2: it does not have 2 fields"),
            ("path,label\na.mp4,", "line 2: its label is empty"),
            ("path,split\na.mp4,trian", "line 2: split is 'trian'"),
            ("path,split\na.mp4,val", "no row whose split is train"),
            ("path,start\na.mp4,soon", "start is 'soon'"),
            ("path,start,end\na.mp4,3,2", "end is 2, but it must come after start 3"),
            ("path,start\na.mp4,nan", "start is 'nan', but it must be seconds or empty"),
            ("path,end\na.mp4,nan", "end is 'nan', but it must be seconds or empty"),
            ("path,label,label\na.mp4,a,b", "names the column label twice"),
            ("path,label\na.mp4,\udce4", r"list\.csv is no list in UTF-8"),
            (f'path\n"{200_000 * "a"}"', r"list\.csv, after line 1: field larger than"),
        ],
    )
    def test_faulty_lists(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "list.csv").write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=message):
            self.open(tmp_path / "list.csv")

    @pytest.mark.parametrize("skip_broken", [False, True])
    def test_a_list_of_missing_files_is_refused(self, folder: Path, skip_broken: bool) -> None:
        rows = ["path,split", "dog/h265_video.mp4,train", "dog/gone.mp4,val", "gone.mp4,train", "keys/test.webm,val"]
        (folder / "list.csv").write_text("\n".join(rows))
        message = r"list\.csv, line 3: there is no file .*dog/gone\.mp4; 2 of its 4 rows name files that are missing"
        for split in ("train", "validation"):
            with pytest.raises(ValueError, match=message):
                self.open(folder / "list.csv", split, skip_broken=skip_broken)

    def test_files_that_go_later_are_left_out_or_named(self, folder: Path) -> None:
        rows = ["path,split", "dog/gone.mp4,train", "dog/h265_video.mp4,train", "dog/h265_video.mp4,val"]
        (folder / "list.csv").write_text("\n".join(rows))
        (folder / "dog" / "gone.mp4").touch()
        sources = [self.open(folder / "list.csv", skip_broken=skip) for skip in (False, True)]
        (folder / "dog" / "gone.mp4").unlink()
        with pytest.raises(BrokenVideoError, match=r"gone\.mp4: no clip can be made of it: there is no such file"):
            read(make(sources[0], batch_size=2))
        loader = make(sources[1], batch_size=2)
        assert [indices.tolist() for *_, indices in read(loader)] == [[1]]
        assert len(loader.told) == 1
        assert "gone.mp4: left out" in loader.told[0]

    def test_random_and_central_clips(self, folder: Path) -> None:
        sources = [self.open(folder / "keys", split) for split in ("train", "validation")]
        source = next(source for source in sources if source.path(0).endswith("webm"))
        central = source[0][0].seconds
        assert torch.equal(central, source[0][0].seconds)
        starts = {source.read(0, torch.Generator().manual_seed(seed))[0].seconds[0].item() for seed in range(8)}
        assert len(starts) > 1
        again = [source.read(0, torch.Generator().manual_seed(5))[0] for _ in range(2)]
        assert torch.equal(again[0].frames, again[1].frames)
        slower = source.sampled(2, 1.0)
        assert slower[0][0].seconds.diff().item() == pytest.approx(1.0, abs=0.02)
        assert central.diff().item() == pytest.approx(0.1, abs=0.02)

    def test_a_split_that_is_not_there_is_named(self, folder: Path) -> None:
        (folder / "list.csv").write_text("path,split\ndog/h265_video.mp4,train\nkeys/test.webm,val")
        both = folder.parent / f"{folder.name}-splits"
        both.mkdir()
        for name in ("train", "val"):
            (both / name).symlink_to(folder)
        for source in (folder / "list.csv", both):
            with pytest.raises(ValueError, match=r"there is no split test in .*; it has train and val$"):
                self.open(source, "validation", val_split="test")

    def test_sources_and_options_that_do_not_go_together(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="gives clips, which need sampling"):
            open_dataset(f"videos:{folder}", "train")
        with pytest.raises(ValueError, match=r"are for clips, but folder:.* gives images"):
            open_dataset(f"folder:{folder}", "train", sampling=ClipSampling(4))
        with pytest.raises(ValueError, match="did you mean videos"):
            open_dataset(f"video:{folder}", "train")
        with pytest.raises(ValueError, match="decoder is 'fast'"):
            self.open(folder, decoder="fast")


class TestBatches:
    def test_shapes_and_normalisation(self) -> None:
        source = Numbered(6)
        batches = read(make(source, batch_size=4))
        assert [len(labels) for _, labels, _ in batches] == [4, 2]
        clips, labels, indices = batches[0]
        assert isinstance(clips, Clips)
        assert clips.frames.shape == (4, 3, 4, 24, 32)
        assert clips.frames.is_contiguous()
        assert clips.seconds.dtype == torch.float32
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        for frames, seconds, label, index in zip(*clips, labels.tolist(), indices.tolist(), strict=True):
            clip, own = source[index]
            assert label == own
            torch.testing.assert_close(seconds, (clip.seconds - clip.seconds[0]).float())
            for place in range(4):
                image = eval_transform((24, 32))(clip.frames[place]).float() / 255
                torch.testing.assert_close(frames[:, place], (image - mean) / std)

    def test_clips_follow_from_seed_epoch_and_index_alone(self) -> None:
        options = {
            "transform": train_transform((24, 24), dihedral=True, color_jitter=0.3, three_augment=True),
            **{"training": True, "erasing": 0.5, "seed": 3},
        }
        source = Numbered(9)
        expected = read(make(source, **options), epoch=1)
        for other in (
            read(make(source, num_workers=2, **options), epoch=1),
            [
                tuple(
                    Clips(*map(torch.cat, zip(*part, strict=True))) if isinstance(part[0], Clips) else torch.cat(part)
                    for part in zip(*ranks, strict=True)
                )
                for ranks in zip(
                    *(read(make(source, rank=rank, world_size=2, **options), epoch=1) for rank in (0, 1)), strict=True
                )
            ],
        ):
            for (clips, *rest), (same, *others) in zip(expected, other, strict=True):
                assert all(map(torch.equal, (*clips, *rest), (*same, *others)))
        later = read(make(source, **options), epoch=2)
        assert not torch.equal(later[0][0].seconds.sort(0).values, expected[0][0].seconds.sort(0).values)

    def test_late_clips_keep_their_gaps(self) -> None:
        """Seconds of a clock, of which float32 keeps no fractions."""
        source = Numbered(4)
        source.start = 1.7e9
        (clips, *_) = read(make(source))[0]
        torch.testing.assert_close(clips.seconds[:, 1], torch.tensor([0.5, 1.5, 2.5, 3.5]), atol=1e-6, rtol=0)

    @pytest.mark.parametrize(
        "transform",
        [
            train_transform((20, 20), crop=crop, vflip=0.5, dihedral=True, three_augment=True, color_jitter=0.4)  # type: ignore[arg-type]
            for crop in ("random-resized", "simple", "resize")
        ],
    )
    def test_all_frames_of_a_clip_are_treated_alike(self, transform: object) -> None:
        """Four copies of a frame stay copies, through augmentation, erasing, mixing and resizing."""

        class Still(Numbered):
            def read(self, index: int, generator: torch.Generator | None = None) -> tuple[Clip, int]:
                (frames, seconds), label = super().read(index, generator)
                return Clip(frames[:1].repeat(4, 1, 1, 1), seconds), label

        for clips, *_ in read(make(Still(12), transform=transform, training=True, erasing=0.7)):
            assert torch.equal(clips.frames, clips.frames[:, :, :1].expand_as(clips.frames))
            smaller = resize_batch(clips, (12, 16), "bicubic")
            assert smaller.frames.shape == (4, 3, 4, 12, 16)
            assert torch.equal(smaller.frames, smaller.frames[:, :, :1].expand_as(smaller.frames))
            one_by_one = resize_batch(clips.frames[:, :, 1], (12, 16), "bicubic")
            torch.testing.assert_close(smaller.frames[:, :, 1], one_by_one)

    def test_erasing_takes_a_rectangle_through_time(self) -> None:
        plain, erased = (read(make(Numbered(8), erasing=erasing)) for erasing in (0.0, 1.0))
        for before, after in zip(plain, erased, strict=True):
            changed = (before[0].frames != after[0].frames).any(1)
            assert torch.equal(changed, changed[:, :1].expand_as(changed))
            assert changed.flatten(1).any(1).all()

    @pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}])
    def test_mixing_of_clips_is_that_of_their_frames(self, options: dict[str, float]) -> None:
        from vision_rope.config import AugmentConfig
        from vision_rope.tasks import Classification

        generator = torch.Generator().manual_seed(0)
        frames = torch.randn(5, 3, 4, 16, 20, generator=generator)
        clips, labels = Clips(frames, torch.rand(5, 4, generator=generator)), torch.tensor([0, 1, 1, 0, 1])
        batch = Classification(2, augment=AugmentConfig(**options)).train_batch(clips, labels, seed=7)  # type: ignore[arg-type]
        mixing = Mixing(**options, num_classes=2)  # type: ignore[arg-type]
        assert torch.equal(batch.inputs[1], clips.seconds)
        for place in range(4):
            mixed, targets = mixing(frames[:, :, place], labels, seed=7)
            torch.testing.assert_close(batch.inputs[0][:, :, place], mixed)
            assert torch.equal(batch.targets, targets)

    def test_broken_clips_in_training(self) -> None:
        """The next readable one takes the place, on every rank alike; each fault is told once."""
        options = {"training": True, "batch_size": 4}
        message = r"clip [256]: no clip can be made of it: .*; video\.broken: skip leaves such videos out$"
        with pytest.raises(BrokenVideoError, match=message):
            read(make(Numbered(8, (2, 5, 6)), **options))
        source = Numbered(8, (2, 5, 6), skip_broken=True)
        loader = make(source, **options)
        for epoch in range(2):
            batches = read(loader, epoch)
            assert [len(labels) for _, labels, _ in batches] == [4, 4]
            indices = torch.cat([indices for *_, indices in batches]).sort().values
            assert indices.tolist() == [0, 1, 3, 3, 4, 7, 7, 7]
            # A clip in the place of another one is seen at another time.
            assert len({seconds[1].item() for clips, *_ in batches for seconds in clips.seconds}) == 8
        assert sorted(message.split(":")[0] for message in loader.told) == ["clip 2", "clip 3", "clip 5", "clip 6"]
        for workers in (2,):
            other = make(source, num_workers=workers, **options)
            for (clips, *rest), (same, *others) in zip(batches, read(other, 1), strict=True):
                assert all(map(torch.equal, (*clips, *rest), (*same, *others)))

    def test_broken_clips_in_evaluation(self) -> None:
        """None counts twice, and batches may be smaller, or empty, which are passed over."""
        source = Numbered(9, (2, 4, 5, 6, 7), skip_broken=True)
        loader = make(source, batch_size=4)
        assert [indices.tolist() for *_, indices in read(loader)] == [[0, 1, 3], [8]]
        assert len(loader.told) == 6
        assert not [line for line in loader.told if "video.broken" in line]
        ranks = [read(make(source, batch_size=4, rank=rank, world_size=2)) for rank in (0, 1)]
        assert sorted(i for batches in ranks for *_, indices in batches for i in indices.tolist()) == [0, 1, 3, 8]

    @pytest.mark.parametrize("training", [True, False])
    def test_nothing_left(self, training: bool) -> None:
        source = Numbered(4, (0, 1, 2, 3), skip_broken=True)
        with pytest.raises(ValueError, match=r"no clip of numbered can be read; clip \d, the first of 4: left out"):
            read(make(source, training=training))

    def test_reports_are_warnings_where_nobody_listens(self) -> None:
        loader = create_loader(
            Numbered(4), batch_size=4, transform=eval_transform(16), device="cpu", training=False, num_workers=0
        )
        with pytest.warns(UserWarning, match="clip 3: damaged, used as far as it can be decoded: a scratch"):
            read(loader)

    def test_part_of_a_data_set(self) -> None:
        part = take_evenly(Numbered(9, (2,), skip_broken=True), 3)
        assert (len(part), part.path(1), part.skip_broken) == (3, "clip 3", True)  # type: ignore[union-attr]
        assert part.damage(1) == "a scratch"  # type: ignore[union-attr]
        assert part[2][0].seconds[1] == 106.5  # type: ignore[index]

    def test_streams_wait_for_clips_as_for_images(self) -> None:
        """Failure class 32."""
        accelerator = RecordingAccelerator()
        loader, plain = make(Numbered(8), accelerator=accelerator), read(make(Numbered(8)))
        for (clips, *_), (same, *_) in zip(loader, plain, strict=True):
            assert torch.equal(clips.frames, same.frames)
        assert accelerator.events.count("copy waits for consumer") == 2

    def test_pinned_batches_keep_their_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What torch's pinning does to a batch with tensors inside of tuples, reports and exceptions."""
        from torch.utils.data._utils.pin_memory import pin_memory

        from vision_rope.data.batches import HostBatch, collate

        monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
        loader = make(Numbered(4))
        samples = [loader._batches.dataset[0, index] for index in range(4)]
        batch = pin_memory(collate(samples))
        assert isinstance(batch, HostBatch)
        assert isinstance(batch.images, Clips)
        assert batch.reports == [("clip 3", "damaged, used as far as it can be decoded: a scratch")]
        error = BrokenVideoError("a.mp4", "gone")
        assert pin_memory(collate([error])) is error


@contextmanager
def untouched() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)


def test_the_generators_of_the_process_are_left_alone() -> None:
    with untouched():
        read(make(Numbered(8), training=True, transform=train_transform(20), erasing=1.0))
