"""Clips of objects from videos in the DAVIS layout: which frames and objects, pixels and ids in step, batches."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from tests.test_data_loader import RecordingAccelerator
from vision_rope.config import DataConfig, ObjectsConfig, TrainConfig, VideoConfig
from vision_rope.data import (
    BrokenVideoError,
    ClipSampling,
    SegmentedClip,
    SegmentedClips,
    create_loader,
    open_dataset,
    resize_batch,
    segmented_eval_transform,
    segmented_train_transform,
    take_evenly,
)
from vision_rope.data.batches import HostBatch, collate
from vision_rope.data.davis import find_sequences, write_ids
from vision_rope.data.segmented_augment import draw_box
from vision_rope.data.segmented_clips import SequenceSource, choose_objects
from vision_rope.rules import check_config

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SIZE = (20, 30)


def write_frame(root: Path, name: str, number: int, ids: Tensor | None, size: tuple[int, int] = SIZE) -> None:
    """A frame that is grey of its number, with its ids where there are some."""
    frames, masks = root / "JPEGImages" / "480p" / name, root / "Annotations" / "480p" / name
    for folder in (frames, masks):
        folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), number, np.uint8)).save(frames / f"{number:05d}.png")
    if ids is not None:
        write_ids(masks / f"{number:05d}.png", ids)


def boxes(*numbers: int) -> Tensor:
    """Ids of a picture in which each object is a column 4 pixels wide, at the place of its number."""
    ids = torch.zeros(SIZE, dtype=torch.uint8)
    for number in numbers:
        ids[5:15, 5 * number : 5 * number + 4] = number
    return ids


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Four videos of 12 frames and three objects."""
    for name in "abcd":
        for number in range(12):
            write_frame(tmp_path, name, number, boxes(1, 2, 3))
    return tmp_path


def open_clips(root: Path, split: str = "train", num_frames: int = 4, skip_broken: bool = False, **options: object):
    objects = ObjectsConfig(**options)  # type: ignore[arg-type]
    sampling = ClipSampling(num_frames)
    return open_dataset(f"davis:{root}", split, sampling=sampling, objects=objects, skip_broken=skip_broken)  # type: ignore[arg-type]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestFrames:
    def test_strides_and_directions_are_drawn(self, videos: Path) -> None:
        source = open_clips(videos, stride=3)
        seen = set()
        for seed in range(80):
            clip, label = source.read(seed % len(source), draw(seed))
            numbers = clip.frames[:, 0, 0, 0].int()
            assert (clip.frames == numbers[:, None, None, None]).all()
            (step,) = set(numbers.diff().tolist())
            seen.add(step)
            torch.testing.assert_close(clip.seconds, torch.arange(4).double() * abs(step) / 30)
            assert label == 0
        assert seen == {-3, -2, -1, 1, 2, 3}
        starts = {int(source.read(0, draw(seed))[0].frames[0, 0, 0, 0]) for seed in range(80)}
        assert starts == set(range(12))

    def test_forwards_alone(self, videos: Path) -> None:
        source = open_clips(videos, stride=1, reverse=False)
        for seed in range(20):
            assert source.read(0, draw(seed))[0].frames[:, 0, 0, 0].int().diff().tolist() == [1, 1, 1]

    def test_a_clip_follows_from_its_generator_and_evaluation_from_nothing(self, videos: Path) -> None:
        source = open_clips(videos)
        state = torch.get_rng_state()
        clips = [source.read(1, draw(seed))[0] for seed in (5, 5, 6)]
        assert all(map(torch.equal, clips[0], clips[1]))
        assert not all(map(torch.equal, clips[0], clips[2]))
        (first, _), (again, _) = source[1], source[1]
        assert all(map(torch.equal, first, again))
        assert torch.equal(torch.get_rng_state(), state)
        # From the first frame on, with the largest stride.
        assert first.frames[:, 0, 0, 0].tolist() == [0, 2, 4, 6]

    def test_short_videos_have_smaller_strides(self, videos: Path) -> None:
        source = open_clips(videos, stride=9, num_frames=6)
        assert source[0][0].frames[:, 0, 0, 0].tolist() == [0, 2, 4, 6, 8, 10]
        assert open_clips(videos, num_frames=12)[0][0].frames[:, 0, 0, 0].tolist() == list(range(12))
        with pytest.raises(BrokenVideoError, match=r"480p/\w: .*12 frames with ids, but a clip takes 13"):
            open_clips(videos, num_frames=13)[0]

    def test_frames_without_ids_are_not_looked_at(self, tmp_path: Path) -> None:
        for number in range(20):
            write_frame(tmp_path, "a", number, boxes(1) if number % 5 == 0 else None)
            write_frame(tmp_path, "b", number, boxes(1))
        source = open_clips(tmp_path, num_frames=3)
        source.sequences = [sequence for sequence in source.sequences if sequence.name == "a"] or pytest.fail("no a")
        for seed in range(8):
            assert (source.read(0, draw(seed))[0].frames % 5 == 0).all()

    def test_clips_begin_where_an_object_is_seen(self, tmp_path: Path) -> None:
        for name, numbers in (("late", range(6, 9)), ("never", range(0)), ("early", range(1))):
            for number in range(10):
                write_frame(tmp_path, name, number, boxes(2) if number in numbers else boxes())
        early, late, never = (open_one(tmp_path, name) for name in ("early", "late", "never"))
        assert late[0][0].frames[:, 0, 0, 0].tolist() == [6, 7, 8]
        for seed in range(10):
            clip, _ = late.read(0, draw(seed))
            assert clip.frames[0, 0, 0, 0] in (6, 7, 8)
            assert clip.ids[0].any()
            assert early.read(0, draw(seed))[0].frames[0, 0, 0, 0] == 0
        for generator in (None, draw(0)):
            with pytest.raises(BrokenVideoError, match=r"never: .*no frame that a clip may begin with shows an object"):
                never.read(0, generator)

    def test_other_numbers_of_frames(self, videos: Path) -> None:
        source = open_clips(videos)
        more = source.sampled(6, None)
        assert (len(more[0][0].frames), len(source[0][0].frames)) == (6, 4)
        with pytest.raises(ValueError, match=r"fps is 5, but davis:.* has no frames a second; leave it out"):
            source.sampled(6, 5.0)
        part = take_evenly(source, 2)
        assert len(part) == 2
        assert all(map(torch.equal, part[1][0], source[len(source) // 2][0]))


def open_one(root: Path, name: str) -> SequenceSource:
    source = open_clips(root, num_frames=3, stride=1, reverse=False)
    other = open_clips(root, "validation", num_frames=3, stride=1, reverse=False)
    sequences = [sequence for sequence in source.sequences + other.sequences if sequence.name == name]
    return SequenceSource(name, sequences, 3, ObjectsConfig(stride=1, reverse=False))


class TestObjects:
    def test_objects_of_the_first_frame_are_numbered(self) -> None:
        ids = torch.tensor([[[0, 7, 3, 3]], [[9, 7, 0, 3]], [[3, 9, 9, 7]]], dtype=torch.uint8)
        expected = torch.tensor([[[0, 2, 1, 1]], [[0, 2, 0, 1]], [[1, 0, 0, 2]]], dtype=torch.uint8)
        assert torch.equal(choose_objects(ids), expected)
        assert torch.equal(choose_objects(ids, 1), expected * (expected == 1))
        assert torch.equal(choose_objects(ids, least=2), expected * (expected == 1))
        assert not choose_objects(ids.flip(0)[:, :, :1] * 0).any()

    def test_no_more_than_asked_for(self, videos: Path) -> None:
        two, one, all_of_them = (open_clips(videos, num_objects=number) for number in (2, 1, 5))
        assert torch.equal(two[0][0].ids[0], boxes(1, 2)), "evaluation takes those of the lowest ids"
        assert torch.equal(all_of_them[0][0].ids[0], boxes(1, 2, 3))
        chosen = set()
        for seed in range(40):
            ids = one.read(0, draw(seed))[0].ids
            assert set(ids.unique().tolist()) == {0, 1}
            chosen.add(int(ids[0, 10].nonzero()[0]))
            ids = two.read(0, draw(seed))[0].ids
            assert set(ids.unique().tolist()) == {0, 1, 2}
        assert chosen == {5, 10, 15}


class TestSplits:
    def test_sequences_are_held_out(self, videos: Path) -> None:
        train, val = open_clips(videos), open_clips(videos, "validation")
        names = [{Path(source.path(index)).name for index in range(len(source))} for source in (train, val)]
        assert (len(train), len(val)) == (3, 1)
        assert names[0] | names[1] == set("abcd")
        more = [open_clips(videos, split, clips_per_video=5) for split in ("train", "validation")]
        assert [len(source) for source in more] == [15, 1]
        assert more[0].path(0) == more[0].path(3)

    def test_lists_of_davis_say_who_is_who(self, videos: Path) -> None:
        lists = videos / "ImageSets" / "2017"
        lists.mkdir(parents=True)
        (lists / "train.txt").write_text("b\n")
        assert len(open_clips(videos)) == 3, "one list alone is none"
        (lists / "val.txt").write_text("a\nd\n")
        assert [sequence.name for sequence in open_clips(videos).sequences] == ["b"]
        assert [sequence.name for sequence in open_clips(videos, "validation").sequences] == ["a", "d"]
        (lists / "mine.txt").write_text("c\n")
        named = open_dataset(f"davis:{videos}", "validation", sampling=ClipSampling(2), val_split="mine")
        assert [sequence.name for sequence in named.sequences] == ["c"]

    def test_refusals(self, videos: Path, tmp_path: Path) -> None:
        for source, options, message in (
            (f"davis:{videos}", {}, "gives clips, which need sampling"),
            (f"davis:{videos}", {"sampling": ClipSampling(2, 8.0)}, "fps is 8, but davis.* has no frames a second"),
            ("davis:", {"sampling": ClipSampling(2)}, "davis needs a path"),
            (f"davis:{tmp_path / 'gone'}", {"sampling": ClipSampling(2)}, "not in the DAVIS layout"),
            (f"davos:{videos}", {"sampling": ClipSampling(2)}, "images; choose .*davis:PATH"),
            (f"davos:{videos}", {}, "davis:PATH, pseudo:SOURCE, .*did you mean davis"),
        ):
            with pytest.raises(ValueError, match=message):
                open_dataset(source, "train", **options)  # type: ignore[arg-type]

    def test_files_that_are_gone(self, videos: Path) -> None:
        source = open_clips(videos, skip_broken=True)
        Path(source.path(0), "00002.png").unlink()
        with pytest.raises(BrokenVideoError, match=r"00002.png cannot be read: No such file"):
            source[0]
        loader = create_loader(
            source, batch_size=2, transform=segmented_eval_transform(16), device="cpu", training=False, num_workers=0
        )
        with pytest.warns(UserWarning, match=r"480p/\w: left out, since no clip can be made of it: .*00002.png"):
            assert sum(len(clips.ids) for clips, _ in loader) == 2


def coloured(size: tuple[int, int] = (60, 90)) -> SegmentedClip:
    """Three objects in odd places on black: red, green and blue."""
    ids = torch.zeros(3, *size, dtype=torch.uint8)
    for frame in range(3):
        ids[frame, 7 + frame : 33 + frame, 11:40] = 1
        ids[frame, 20:51, 50 - frame : 77 - frame] = 2
        ids[frame, 44:56, 5:30] = 3
    return SegmentedClip(torch.stack([240 * (ids == number) for number in (1, 2, 3)], 1).byte(), ids, torch.arange(3.0))


def name_colours(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the colours of frames (frames, 3, height, width), and where they are one and no mixture."""
    brightest, channel = frames.float().max(1)
    return torch.where(brightest > 120, channel + 1, 0), (brightest < 3) | (brightest > 237)


TRANSFORMS = {
    "crop": {},
    "mild crop": {"scale": (0.5, 1.0), "interpolation": "bicubic"},
    "simple": {"crop": "simple"},
    "whole": {"crop": "resize", "vflip": 0.5},
    "turned": {"crop": "resize", "dihedral": True},
}


class TestAugmentation:
    @pytest.mark.parametrize("size", [(24, 36), (37, 53), (90, 120), (32, 32)])
    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_ids_are_in_step_with_pixels(self, name: str, size: tuple[int, int]) -> None:
        """Where a pixel has the colour of an object, and not one between two, it has its id."""
        transform = segmented_train_transform(size, **TRANSFORMS[name])  # type: ignore[arg-type]
        for _ in range(12):
            clip = transform(coloured())
            assert clip.frames.shape == (3, 3, *size)
            assert clip.ids.shape == (3, *size)
            assert clip.frames.dtype == clip.ids.dtype == torch.uint8
            colours, sure = name_colours(clip.frames)
            assert sure.float().mean() > 0.6
            present = clip.ids[0].unique().tolist()
            assert present == list(range(len(present)))
            for number in present[1:]:
                (colour,) = colours[(clip.ids == number) & sure].unique().tolist()
                assert colour > 0
                assert (clip.ids[sure & (colours == colour)] == number).all()
            lost = sure & (clip.ids == 0) & (colours > 0)
            assert len(present) < 4 or not lost.any()

    @pytest.mark.parametrize("size", [(20, 30), (15, 22), (40, 60)])
    def test_ids_are_those_of_the_middle_of_a_pixel(self, size: tuple[int, int]) -> None:
        """Borders at which an antialiased edge is half covered: rounding places down would move them."""
        transform = segmented_train_transform(size, crop="resize", hflip=0)
        clip = transform(coloured()._replace(ids=(coloured().ids == 1).byte(), frames=coloured().frames * 0))
        single = (coloured().ids == 1).float()[:, None]
        cover = torch.nn.functional.interpolate(single, size, mode="bilinear", antialias=True)[:, 0]
        sure = (cover - 0.5).abs() > 0.2
        assert torch.equal(clip.ids[sure], (cover[sure] > 0.5).byte())
        batch = SegmentedClips(torch.zeros(1, 3, 3, 60, 90), single[None, :, 0].byte(), torch.zeros(1, 3))
        assert torch.equal(resize_batch(batch, size, "bilinear").ids[0], clip.ids)

    def test_mirrors_are_exact(self) -> None:
        plain = segmented_train_transform((60, 90), crop="resize", hflip=0)(coloured())
        mirrored = segmented_train_transform((60, 90), crop="resize", hflip=1)(coloured())
        assert torch.equal(plain.frames, coloured().frames)
        assert torch.equal(mirrored.frames, plain.frames.flip(-1))
        assert torch.equal(mirrored.ids, plain.ids.flip(-1))

    def test_crops_keep_the_objects(self) -> None:
        clip = coloured()
        before = clip.ids[0].flatten().bincount()
        areas = []
        for _ in range(60):
            top, left, height, width = draw_box(clip, (0.2, 1.0), (0.7, 1.4))
            inside = clip.ids[0, top : top + height, left : left + width].flatten().bincount(minlength=4)
            assert (inside[1:] >= 0.5 * before[1:]).all()
            areas.append(height * width)
        assert len(set(areas)) > 20
        assert draw_box(clip, (0.05, 0.1), (1.0, 1.0)) == (0, 0, 60, 90), "none is large enough: the whole picture"

    def test_objects_that_are_lost_make_room(self) -> None:
        clip = coloured()
        ids = clip.ids.clone()
        ids[ids == 1] = 0
        ids[:, 3, 3] = 1
        small = segmented_eval_transform((20, 30))(clip._replace(ids=ids))
        assert small.ids.unique().tolist() == [0, 1, 2]
        alone = segmented_eval_transform((20, 30))(clip._replace(ids=(ids == 1).byte()))
        assert not alone.ids.any()

    def test_colours_change_alike_in_all_frames_and_leave_ids(self) -> None:
        clip = coloured()
        still = clip._replace(frames=clip.frames[:1].expand(3, -1, -1, -1), ids=clip.ids[:1].expand(3, -1, -1))
        for options in ({"color_jitter": 0.5}, {"three_augment": True}):
            transform = segmented_train_transform((60, 90), crop="resize", hflip=0, **options)  # type: ignore[arg-type]
            changed = transform(still)
            assert (changed.frames == changed.frames[:1]).all()
            assert not torch.equal(changed.frames, still.frames)
            assert torch.equal(changed.ids, still.ids)

    def test_evaluation_crops_the_middle(self) -> None:
        clip = coloured()
        assert torch.equal(segmented_eval_transform((60, 60))(clip).ids, clip.ids[..., 15:75])
        part = segmented_eval_transform((30, 30), crop_pct=0.5)(clip)
        assert torch.equal(part.ids, choose_objects(clip.ids[:, 15:45, 30:60]))
        assert torch.equal(part.frames, clip.frames[..., 15:45, 30:60])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"crop": "centre"}, "crop is 'centre'; choose one of"),
            ({"crop": "simple", "size": (4, 30)}, "needs more than 4"),
            ({"hflip": 2.0}, "hflip is 2.0"),
            ({"color_jitter": -1.0}, "color_jitter is -1.0"),
            ({"scale": (0.5, 0.2)}, "scale is"),
            ({"interpolation": "cubic"}, "interpolation is 'cubic'"),
            ({"size": (0, 3)}, "size is"),
        ],
    )
    def test_refusals(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            segmented_train_transform(**{"size": (20, 30), **options})
        with pytest.raises(ValueError, match="crop_pct is 0"):
            segmented_eval_transform((20, 30), crop_pct=0)

    def test_batches_are_resized_in_step(self) -> None:
        frames = coloured().frames.float().transpose(0, 1)[None].repeat(2, 1, 1, 1, 1)
        batch = SegmentedClips(frames, coloured().ids[None].repeat(2, 1, 1, 1), torch.zeros(2, 3))
        small = resize_batch(batch, (20, 30), "bilinear")
        assert isinstance(small, SegmentedClips)
        assert small.frames.shape == (2, 3, 3, 20, 30)
        assert small.ids.dtype == torch.uint8
        for frames, ids in zip(small.frames, small.ids, strict=True):
            colours, sure = name_colours(frames.transpose(0, 1))
            assert sure.float().mean() > 0.6
            assert torch.equal(ids[sure], colours[sure].byte())
        assert resize_batch(batch, (60, 90), "bilinear") is batch


class TestLoader:
    def make(self, source: SequenceSource, **options: object):
        defaults = {"batch_size": 3, "device": "cpu", "training": True, "num_workers": 0, "seed": 4}
        transform = segmented_train_transform((16, 24), scale=(0.5, 1.0), color_jitter=0.2)
        return create_loader(source, **{**defaults, "transform": transform, **options})  # type: ignore[arg-type]

    def test_batches_on_the_device(self, videos: Path) -> None:
        source = open_clips(videos, clips_per_video=2)
        transform = segmented_eval_transform((20, 30))
        options = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
        loader = self.make(source, training=False, transform=transform, with_indices=True, **options)
        (clips, labels, indices), _ = loader
        assert isinstance(clips, SegmentedClips)
        assert clips.frames.shape == (3, 3, 4, 20, 30)
        assert clips.frames.dtype == clips.seconds.dtype == torch.float32
        assert (clips.ids.shape, clips.ids.dtype) == ((3, 4, 20, 30), torch.uint8)
        assert (labels.tolist(), indices.tolist()) == ([0, 0, 0], [0, 1, 2])
        for place in range(3):
            clip, _ = source[place]
            mean, std = (torch.tensor(options[name])[:, None, None, None] for name in ("mean", "std"))
            torch.testing.assert_close(clips.frames[place], (clip.frames.transpose(0, 1) / 255 - mean) / std)
            assert torch.equal(clips.ids[place], clip.ids)
            torch.testing.assert_close(clips.seconds[place], clip.seconds.float())

    def test_clips_follow_from_seed_and_epoch(self, videos: Path) -> None:
        source = open_clips(videos, clips_per_video=2)
        runs = []
        for seed, epoch in ((4, 0), (4, 0), (4, 1), (5, 0)):
            torch.manual_seed(epoch + 7)
            loader = self.make(source, seed=seed)
            loader.set_epoch(epoch)
            runs.append([clips for clips, _ in loader])
        for batch, same, *others in zip(*runs, strict=True):
            assert all(map(torch.equal, batch, same))
            assert all(not torch.equal(batch.frames, other.frames) for other in others)

    @pytest.mark.integration
    def test_workers_give_the_same(self, videos: Path) -> None:
        source = open_clips(videos, clips_per_video=2)
        runs = [list(self.make(source, num_workers=workers)) for workers in (0, 2)]
        for (clips, _), (same, _) in zip(*runs, strict=True):
            assert isinstance(same, SegmentedClips)
            assert all(map(torch.equal, clips, same))

    def test_copies_wait_and_pinned_batches_keep_their_kind(
        self, videos: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Failure class 32; and what torch's pinning does to a batch."""
        source = open_clips(videos, clips_per_video=2)
        accelerator = RecordingAccelerator()
        for (clips, _), (same, _) in zip(self.make(source, accelerator=accelerator), self.make(source), strict=True):
            assert all(map(torch.equal, clips, same))
        assert accelerator.events.count("copy waits for consumer") == 2
        pinned: list[Tensor] = []
        monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
        loader = self.make(source)
        batch = pin_memory(collate([loader._batches.dataset[0, index] for index in range(3)]))
        assert isinstance(batch, HostBatch)
        assert isinstance(batch.images, SegmentedClips)
        assert any(part is batch.images.ids for part in pinned)


@pytest.fixture(scope="module")
def davis(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first frames of two real videos."""
    folder = tmp_path_factory.mktemp("davis")
    with tarfile.open(shared_data / "davis_masked_small.tar") as tar:
        wanted = [
            member
            for member in tar.getmembers()
            if Path(member.name).parent.name in ("dogs-jump", "blackswan") and int(Path(member.name).stem) < 8
        ]
        tar.extractall(folder, members=wanted, filter="data")
    return folder


class TestRealVideos:
    def test_clips_are_the_files(self, davis: Path) -> None:
        for split in ("train", "validation"):
            source = open_dataset(
                f"davis:{davis}",
                split,  # type: ignore[arg-type]
                val_fraction=0.5,
                sampling=ClipSampling(3),
                objects=ObjectsConfig(num_objects=9),
            )
            clip, _ = source[0]
            folder = Path(source.path(0))
            for place in range(3):
                mask = np.array(
                    Image.open(davis / "Annotations" / folder.parent.name / folder.name / f"{2 * place:05d}.png")
                )
                present = np.unique(mask)
                number = {value: rank for rank, value in enumerate(present.tolist())}
                assert torch.equal(clip.ids[place], torch.from_numpy(np.vectorize(number.get)(mask)).byte())
                frame = np.array(Image.open(folder / f"{2 * place:05d}.jpg").convert("RGB"))
                difference = clip.frames[place].permute(1, 2, 0).int() - torch.from_numpy(frame).int()
                assert difference.abs().float().mean() < 1

    def test_objects_keep_their_colours(self, davis: Path) -> None:
        both = find_sequences(davis)
        source = SequenceSource("both", both, 2, ObjectsConfig(num_objects=9))
        transform = segmented_train_transform((120, 200), scale=(0.5, 1.0))
        for seed in range(6):
            clip, _ = source.read(seed, draw(seed))
            made = transform(clip)
            assert made.ids[0].unique().tolist() == clip.ids[0].unique().tolist()
            for number in range(1, int(clip.ids.max()) + 1):
                before, after = (part.frames[0][:, part.ids[0] == number].float().mean(1) for part in (clip, made))
                torch.testing.assert_close(before, after, atol=16, rtol=0)


class TestRules:
    GOOD = TrainConfig(
        task="segmentation",
        data=DataConfig(source="davis:x"),
        video=VideoConfig(num_frames=3),
        objects=ObjectsConfig(stride=4),
    )

    def test_both_sources(self) -> None:
        check_config(self.GOOD)
        made = replace(self.GOOD, data=DataConfig(source="pseudo:images:x"), objects=ObjectsConfig(speed=0.1, hide=0.5))
        check_config(made)
        check_config(replace(made, video=VideoConfig(num_frames=2), objects=ObjectsConfig()))

    @pytest.mark.parametrize(
        ("source", "options", "message"),
        [
            ("davis:x", {"speed": 0.2}, "objects.speed is 0.2, but it would have no effect with data.source davis:x"),
            ("davis:x", {"object_size": (0.1, 0.2)}, "objects.object_size"),
            ("pseudo:elpv", {"stride": 3}, "objects.stride is 3, but it would have no effect"),
            ("pseudo:elpv", {"reverse": False}, "objects.reverse"),
            ("pseudo:elpv", {"num_objects": 0}, "objects.num_objects is 0, but it must lie between 1 and 254"),
            ("pseudo:elpv", {"look_alikes": 1.5}, "objects.look_alikes is 1.5, but it is a probability"),
            ("pseudo:elpv", {"speed": -0.5}, "objects.speed is -0.5, but it must not be negative"),
            ("pseudo:elpv", {"object_size": (0.5, 0.3)}, "objects.object_size"),
            ("davis:x", {"stride": 0}, "objects.stride is 0"),
            ("davis:x", {"clips_per_video": 0}, "objects.clips_per_video is 0"),
            ("images:x", {}, "data.source is images:x"),
        ],
    )
    def test_refusals(self, source: str, options: dict, message: str) -> None:
        config = replace(self.GOOD, data=DataConfig(source=source), objects=ObjectsConfig(**options))
        with pytest.raises(ValueError, match=message):
            check_config(config)

    def test_other_tasks(self) -> None:
        with pytest.raises(ValueError, match=r"objects.num_objects .* task classification"):
            check_config(TrainConfig(objects=ObjectsConfig(num_objects=3)))
        with pytest.raises(ValueError, match="task segmentation"):
            check_config(TrainConfig(data=DataConfig(source="pseudo:elpv"), video=VideoConfig(num_frames=2)))
        with pytest.raises(ValueError, match=r"objects.hide is 0.9, but it would have no effect with video.num_frames"):
            check_config(
                replace(
                    self.GOOD,
                    data=DataConfig(source="pseudo:elpv"),
                    video=VideoConfig(num_frames=2),
                    objects=ObjectsConfig(hide=0.9),
                )
            )
