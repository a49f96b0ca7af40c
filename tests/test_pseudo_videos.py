"""Clips of objects made from photographs: closed forms of motion, order of layers, what is promised of ids."""

from __future__ import annotations

import math
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vision_rope.config import ObjectsConfig
from vision_rope.data import (
    ClipSampling,
    SegmentedClips,
    create_loader,
    open_dataset,
    segmented_train_transform,
)
from vision_rope.data.cutouts import SmallPhotographs, draw_shape, grow_region, pixel_places
from vision_rope.data.pseudo_videos import Bending, Layer, Motion, PseudoVideoSource, compose, find_source
from vision_rope.data.sources import ImageSource

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

# Nothing but things that stand still and do not bend, and nothing that changes their colours.
STILL = ObjectsConfig(
    num_objects=2, regions=0, speed=0, turn=0, growth=0, elastic=0, look_alikes=0, occluders=0, hide=0, drift=0, blur=0,
    noise=0,
)  # fmt: skip
SIZE = (48, 72)


class Plain(ImageSource):
    """Photographs of one colour each, whose red is 10 * index."""

    name, classes, labels, licence = "plain", ["photograph"], None, "none"

    def __init__(self, count: int = 25) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([10 * index, 40, 90], dtype=torch.uint8)[:, None, None].expand(3, 60, 80), 0

    def path(self, index: int) -> str:
        return f"{index}.jpg"


def make(objects: ObjectsConfig = STILL, num_frames: int = 6, size: tuple[int, int] = SIZE) -> PseudoVideoSource:
    return PseudoVideoSource(Plain(), num_frames, objects, size)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stay(num_frames: int, *, centre: tuple[float, float] = (0.5, 0.5), **changes: Tensor) -> Motion:
    one = torch.ones(num_frames)
    fields = {"centre": torch.tensor(centre).expand(num_frames, 2), "size": one, "stretch": one, "angle": 0 * one}
    return Motion(**{**fields, **changes})


def straight(num_frames: int) -> Bending:
    return Bending(0.0, 0.0, torch.zeros(2, num_frames))


def disc(size: tuple[int, int], radius: float, centre: tuple[float, float]) -> Tensor:
    x, y = pixel_places(size)
    distance = torch.hypot(x - centre[0], y[:, None] - centre[1])
    return ((radius - distance) * min(size) + 0.5).clamp(0, 1)


def layer(picture: Tensor, cover: Tensor, origin: tuple[float, float], motion: Motion, **options: object) -> Layer:
    options = {"bending": straight(len(motion.size)), **options}
    return Layer(picture, cover, torch.tensor(origin), motion, **options)  # type: ignore[arg-type]


def colour(value: float, size: tuple[int, int]) -> Tensor:
    return torch.full((3, *size), float(value))


class TestMotion:
    @pytest.mark.parametrize("size", [(64, 64), (48, 80), (80, 48)])
    def test_pixels_come_from_where_the_matrix_says(self, size: tuple[int, int]) -> None:
        """Against the inverse of a rotation and a stretch that NumPy makes, pixel by pixel."""
        num_frames = 4
        motion = Motion(
            centre=torch.rand(num_frames, 2),
            size=0.5 + torch.rand(num_frames),
            stretch=0.7 + 0.6 * torch.rand(num_frames),
            angle=2 * torch.randn(num_frames),
        )
        origin = (0.4, 0.7)
        found = find_source(layer(colour(0, size), torch.ones(size), origin, motion)).double().numpy()
        for frame in range(num_frames):
            angle, scale, stretch = (float(part[frame]) for part in (motion.angle, motion.size, motion.stretch))
            turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            inverse = np.linalg.inv(turn @ np.diag([scale * stretch, scale / stretch]))
            for row, column in ((0, 0), (5, 30), (size[0] - 1, 7), (20, size[1] - 1)):
                point = np.array([column + 0.5, row + 0.5]) / min(size)
                expected = np.array(origin) + inverse @ (point - motion.centre[frame].double().numpy())
                np.testing.assert_allclose(found[frame, row, column], expected, atol=1e-5)

    @pytest.mark.parametrize("size", [(64, 64), (64, 112), (112, 64)])
    def test_a_disc_moves_turns_and_grows(self, size: tuple[int, int]) -> None:
        """Area, middle and axes by the moments of an ellipse."""
        short, radius = min(size), 0.2
        motion = Motion(
            centre=torch.tensor([[0.5, 0.5], [0.6, 0.45], [0.45, 0.52], [0.5, 0.55]]),
            size=torch.tensor([1.0, 1.3, 0.8, 1.0]),
            stretch=torch.tensor([1.0, 1.0, 1.25, 1.4]),
            angle=torch.tensor([0.0, 0.7, 0.0, math.pi / 6]),
        )
        thing = layer(colour(200, size), disc(size, radius, (0.35, 0.4)), (0.35, 0.4), motion, object_id=7)
        frames, ids = compose(layer(colour(0, size), torch.ones(size), (0.5, 0.5), stay(4)), [thing])
        x, y = pixel_places(size)
        for frame in range(4):
            weight = frames[frame, 0].double() / 200
            area = float(weight.sum()) / short**2
            scale, stretch = float(motion.size[frame]), float(motion.stretch[frame])
            assert area == pytest.approx(math.pi * (radius * scale) ** 2, rel=0.03)
            assert float((ids[frame] == 7).sum()) / short**2 == pytest.approx(area, rel=0.04)
            centre = torch.stack(((weight.sum(0) @ x.double()), (weight.sum(1) @ y.double()))) / weight.sum()
            torch.testing.assert_close(centre.float(), motion.centre[frame], atol=2e-3, rtol=0)
            dx, dy = x - centre[0], y[:, None] - centre[1]
            variances = [float((weight * part).sum() / weight.sum()) for part in (dx * dx, dx * dy, dy * dy)]
            across, mixed, down = variances
            wide, high = radius * scale * stretch, radius * scale / stretch
            angle = float(motion.angle[frame])
            cosine, sine = math.cos(angle), math.sin(angle)
            expected = [
                (wide * cosine) ** 2 / 4 + (high * sine) ** 2 / 4,
                (wide**2 - high**2) * cosine * sine / 4,
                (wide * sine) ** 2 / 4 + (high * cosine) ** 2 / 4,
            ]
            np.testing.assert_allclose([across, mixed, down], expected, rtol=0.06, atol=1e-4)

    def test_whole_pixels_move_exactly(self) -> None:
        size, short = SIZE, min(SIZE)
        picture = torch.randint(256, (3, *size)).float()
        cover = torch.zeros(size)
        cover[10:20, 30:42] = 1
        steps = torch.tensor([[0, 0], [5, -3], [-11, 8]]) / short
        motion = stay(3, centre=(0.5, 0.5))
        motion = replace(motion, centre=motion.centre + steps)
        behind = torch.randint(256, (3, *size)).float()
        frames, ids = compose(
            layer(behind, torch.ones(size), (0.75, 0.5), stay(3, centre=(0.75, 0.5))),
            [layer(picture, cover, (0.5, 0.5), motion, object_id=1)],
        )
        for frame, (across, down) in enumerate(((0, 0), (5, -3), (-11, 8))):
            expected, where = behind.clone(), torch.zeros(size, dtype=torch.uint8)
            rows, columns = slice(10 + down, 20 + down), slice(30 + across, 42 + across)
            expected[:, rows, columns] = picture[:, 10:20, 30:42]
            where[rows, columns] = 1
            torch.testing.assert_close(frames[frame], expected, atol=0.02, rtol=0)
            assert torch.equal(ids[frame], where)

    def test_bending_neither_folds_nor_changes_areas(self) -> None:
        """The determinant of what maps the picture to the cut-out, by differences of neighbours."""
        size, short = (128, 160), 128
        bending = Bending(0.08, 0.4, torch.tensor([[0.3, 1.0, 2.0], [0.0, 0.5, 4.0]]))
        thing = layer(colour(0, size), torch.ones(size), (0.5, 0.5), stay(3), bending=bending)
        places = find_source(thing)
        across = (places[:, 1:-1, 2:] - places[:, 1:-1, :-2]) * short / 2
        down = (places[:, 2:, 1:-1] - places[:, :-2, 1:-1]) * short / 2
        determinant = across[..., 0] * down[..., 1] - across[..., 1] * down[..., 0]
        torch.testing.assert_close(determinant, torch.ones_like(determinant), atol=0.02, rtol=0)
        moved = (places - find_source(replace(thing, bending=straight(3)))).abs()
        assert 0.07 < float(moved.max()) <= 0.08 + 1e-5
        assert not torch.equal(places[0], places[1])


class TestLayers:
    @pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
    def test_colours_that_tell_their_ids(self, order: tuple[int, ...]) -> None:
        """Overlapping discs of the colour 60 * id: what is in front has the pixel, and the id."""
        centres = {1: (0.5, 0.5), 2: (0.65, 0.5), 3: (0.58, 0.65)}
        things = [
            layer(
                colour(60 * number, SIZE),
                disc(SIZE, 0.25, (0.4, 0.4)),
                (0.4, 0.4),
                stay(3, centre=centres[number], angle=torch.tensor([0.0, 0.4, 0.8])),
                object_id=number,
            )
            for number in order
        ]
        frames, ids = compose(layer(colour(0, SIZE), torch.ones(SIZE), (0.5, 0.5), stay(3)), things)
        assert (frames == frames[:, :1]).all()
        x, y = pixel_places(SIZE)
        distance = {number: torch.hypot(x - cx, y[:, None] - cy) for number, (cx, cy) in centres.items()}
        clear = torch.ones(SIZE, dtype=torch.bool)
        expected = torch.zeros(SIZE, dtype=torch.uint8)
        for number in order:
            expected[distance[number] < 0.25] = number
            clear &= (distance[number] - 0.25).abs() > 0.04
        assert clear.float().mean() > 0.6
        for frame in range(3):
            assert torch.equal(ids[frame][clear], expected[clear])
            torch.testing.assert_close(frames[frame, 0][clear], 60.0 * expected[clear], atol=0.1, rtol=0)
        assert set(expected[clear].tolist()) == {0, 1, 2, 3}

    def test_what_has_no_id_hides_what_has(self) -> None:
        thing, front = (
            layer(colour(value, SIZE), disc(SIZE, radius, (0.5, 0.5)), (0.5, 0.5), stay(1), object_id=number)
            for value, radius, number in ((200, 0.3, 1), (100, 0.15, 0))
        )
        background = layer(colour(0, SIZE), torch.ones(SIZE), (0.5, 0.5), stay(1))
        frames, ids = compose(background, [thing, front])
        assert (frames[0, 0, 24, 24].round(), ids[0, 24, 24]) == (100, 0)
        assert (frames[0, 0, 24, 34].round(), ids[0, 24, 34]) == (200, 1)
        frames, ids = compose(background, [front, thing])
        assert (frames[0, 0, 24, 24].round(), ids[0, 24, 24]) == (200, 1)

    def test_backgrounds_go_on_mirrored(self) -> None:
        picture = torch.rand(3, *SIZE)
        moved = stay(1, centre=(0.75 + 10 / 48, 0.5))
        frames, ids = compose(layer(picture, torch.ones(SIZE), (0.75, 0.5), moved), [])
        torch.testing.assert_close(frames[0][..., 10:], picture[..., :-10], atol=1e-4, rtol=0)
        torch.testing.assert_close(frames[0][..., :10], picture[..., :10].flip(-1), atol=1e-4, rtol=0)
        assert not ids.any()


class TestClips:
    def test_all_follows_from_the_generator(self) -> None:
        source = make(ObjectsConfig(num_objects=3, hide=0.5))
        state = torch.get_rng_state()
        clips = [source.read(2, draw(seed))[0] for seed in (1, 1, 2)]
        assert all(map(torch.equal, clips[0], clips[1]))
        assert not torch.equal(clips[0].frames, clips[2].frames)
        assert all(map(torch.equal, source[3][0], make(ObjectsConfig(num_objects=3, hide=0.5))[3][0]))
        assert not torch.equal(source[3][0].ids, source[4][0].ids)
        assert torch.equal(torch.get_rng_state(), state)
        clip, label = source[0]
        assert clip.frames.shape == (6, 3, *SIZE)
        assert clip.ids.shape == (6, *SIZE)
        assert clip.frames.dtype == clip.ids.dtype == torch.uint8
        torch.testing.assert_close(clip.seconds, torch.arange(6).double() / 30)
        assert (label, len(source), source.path(4), source.name) == (0, 25, "4.jpg", "pseudo:plain")
        assert len(source.sampled(9, None)[0][0].frames) == 9
        with pytest.raises(ValueError, match="fps is 3"):
            source.sampled(9, 3.0)

    def test_objects_have_one_colour_each_and_are_seen_first(self) -> None:
        """Photographs of one colour: the id of a pixel is told by its colour, through motion, bending and occlusion."""
        moving = replace(
            STILL,
            num_objects=3,
            speed=0.04,
            turn=8.0,
            growth=0.05,
            elastic=0.1,
            occluders=0.5,
            look_alikes=0.4,
            hide=0.3,
        )
        counts, overlaps, looked_at = set(), 0, 0
        for seed in range(60):
            clip, _ = make(moving).read(seed % 25, draw(seed))
            present = clip.ids[0].unique().tolist()
            assert present[-1] >= 1
            assert present == list(range(present[0], present[-1] + 1))
            assert clip.ids.max() == present[-1]
            assert (clip.ids[0].flatten().bincount()[1:] >= 0.01 * 48**2).all(), "more than a rim"
            counts.add(present[-1])
            for number in range(1, present[-1] + 1):
                outside = F.pad((clip.ids != number).float(), (4, 4, 4, 4), value=1)
                # Without the soft edges of the object and of what is in front of it, or just out of the picture.
                inside = F.max_pool2d(outside, 9, stride=1) == 0
                colours = clip.frames[:, 0][inside].unique()
                assert len(colours) <= 1
                assert not len(colours) or colours % 10 == 0
                looked_at += len(colours)
            overlaps += present[-1] > 1
        assert counts == {1, 2, 3}
        assert overlaps > 10
        assert looked_at > 60

    def test_still_things_stand_still(self) -> None:
        clip, _ = make().read(0, draw(3))
        assert (clip.frames == clip.frames[:1]).all()
        assert (clip.ids == clip.ids[:1]).all()

    def test_speed_is_what_is_asked_for(self) -> None:
        """The middle of a lone object's mask moves by the standard deviation that the heading and the jitter have."""
        steps = []
        for seed in range(60):
            clip, _ = make(replace(STILL, num_objects=1, speed=0.03)).read(seed % 25, draw(seed))
            x, y = pixel_places(SIZE)
            mask = (clip.ids == 1).double()
            if mask[:, 0].any() or mask[:, -1].any() or mask[..., 0].any() or mask[..., -1].any():
                continue
            middle = torch.stack((mask.sum(1) @ x.double(), mask.sum(2) @ y.double()), 1) / mask.sum((1, 2))[:, None]
            steps.append(middle.diff(dim=0))
        assert len(steps) > 10
        spread = torch.stack(steps).square().mean().sqrt()
        assert float(spread) == pytest.approx(0.03 * math.hypot(1, 0.5), rel=0.25)

    @pytest.mark.parametrize("num_frames", [3, 4, 8])
    def test_objects_leave_and_return(self, num_frames: int) -> None:
        always = make(replace(STILL, num_objects=1, hide=1.0), num_frames)
        patterns = set()
        for seed in range(30):
            clip, _ = always.read(seed % 25, draw(seed))
            there = (clip.ids == 1).flatten(1).any(1).tolist()
            assert there[0]
            assert there[-1]
            assert not all(there)
            gone = [frame for frame, seen in enumerate(there) if not seen]
            assert gone == list(range(gone[0], gone[-1] + 1)), "gone once"
            assert torch.equal(clip.ids[0], clip.ids[-1])
            assert (clip.frames[gone[0], 0] == 10 * (seed % 25)).all(), "only the background is left"
            patterns.add(tuple(there))
        assert len(patterns) > {3: 0, 4: 2, 8: 8}[num_frames]
        assert all(clip_is_whole(make(replace(STILL, num_objects=1, hide=1.0), 2), seed) for seed in range(5))

    def test_doubles_look_alike_and_have_no_id(self) -> None:
        source = make(replace(STILL, num_objects=1, look_alikes=1.0))
        apart = 0
        for seed in range(30):
            clip, _ = source.read(0, draw(seed))
            red = clip.frames[0, 0][clip.ids[0] == 1].mode().values
            if red == 0:
                continue  # the background's colour
            others = ((clip.frames[0, 0] == red) & (clip.ids[0] == 0)).sum()
            apart += bool(others > 0.3 * (clip.ids[0] == 1).sum())
            alone, _ = make(replace(STILL, num_objects=1)).read(0, draw(seed))
            assert torch.equal(alone.frames[0, 0][alone.ids[0] == 1].mode().values, red)
        assert apart > 15

    def test_occluders_pass_in_front(self) -> None:
        """The same things without and with: an occluder only takes pixels away, and in some frame the middle one."""
        plain, occluded = (make(replace(STILL, num_objects=1, occluders=chance)) for chance in (0.0, 1.0))
        shares = []
        for seed in range(40):
            before, after = (source.read(0, draw(seed))[0] for source in (plain, occluded))
            taken = (before.ids == 1) & (after.ids == 0)
            assert torch.equal(after.ids[~taken], before.ids[~taken])
            shares.append(taken.flatten(1).sum(1) / (before.ids == 1).flatten(1).sum(1))
        shares = torch.stack(shares)
        assert (shares.max(1).values > 0.1).float().mean() > 0.9
        assert (shares[:, 0] == 0).float().mean() > 0.6, "it comes from outside"

    def test_colours_of_all_change_at_the_end(self) -> None:
        plain = make().read(1, draw(8))[0]
        for options in ({"drift": 0.3}, {"blur": 1.0}, {"noise": 0.2}):
            changed = make(replace(STILL, **options)).read(1, draw(8))[0]  # type: ignore[arg-type]
            assert torch.equal(changed.ids, plain.ids)
            assert not torch.equal(changed.frames, plain.frames)
            difference = (changed.frames.float() - plain.frames.float()).mean((1, 2, 3))
            if "drift" in options:
                torch.testing.assert_close(difference, -difference.flip(0), atol=0.7, rtol=0)
                assert difference.abs().argmin() in (2, 3)

    @pytest.mark.parametrize("size", [(40, 40), (32, 96), (96, 32)])
    def test_things_are_as_large_as_asked_for(self, size: tuple[int, int]) -> None:
        source = make(replace(STILL, num_objects=1, object_size=(0.5, 0.5)), size=size)
        areas = []
        for seed in range(20):
            mask = source.read(seed, draw(seed))[0].ids[0] == 1
            if not (mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any()):
                areas.append(float(mask.sum()) / min(size) ** 2)
        # Waves take some of the circle that the shape lies in.
        assert 0.4 < np.mean(areas) / (math.pi * 0.25**2) < 0.75


def clip_is_whole(source: PseudoVideoSource, seed: int) -> bool:
    """With two frames there is none between them to be gone in."""
    return bool((source.read(0, draw(seed))[0].ids == 1).flatten(1).any(1).all())


class TestCutouts:
    def test_regions_follow_colours(self) -> None:
        photograph = torch.zeros(3, 60, 60, dtype=torch.uint8)
        photograph[0, :, 25:] = 200
        photograph[2, :, :25] = 200
        centre = torch.tensor([0.55, 0.5])
        shape = draw_shape((60, 60), 0.4, centre, draw(0))
        region = grow_region(photograph, shape, centre)
        assert region is not None
        assert region[30, 33] == 1
        assert not region[:, :22].any(), "the other colour"
        assert (shape[region > 0.7] > 0.4).all()
        assert float(region.sum()) > 0.4 * float(shape.sum())

    def test_regions_that_cannot_be_reached_are_none(self) -> None:
        """A small island whose colour comes back behind a moat."""
        x, y = pixel_places((80, 80))
        distance = torch.hypot(x - 0.5, y[:, None] - 0.5)
        photograph = torch.where((distance > 0.08) & (distance < 0.28), 250, 10).byte().expand(3, -1, -1)
        shape = (distance < 0.4).float()
        assert grow_region(photograph, shape, torch.tensor([0.5, 0.5])) is None
        whole = grow_region(torch.zeros_like(photograph), shape, torch.tensor([0.5, 0.5]))
        assert whole is not None
        assert float(whole.sum()) == pytest.approx(float(shape.sum()), rel=0.02)

    def test_small_photographs(self) -> None:
        small = SmallPhotographs(Plain(), (16, 24))
        assert small[7].shape == (3, 16, 24)
        assert small[7] is small[7]
        assert (small[7][0] == 70).all()
        assert len(small) == 25


@pytest.fixture(scope="module")
def photographs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty real photographs."""
    folder = tmp_path_factory.mktemp("photographs")
    with tarfile.open(shared_data / "imagenette224_small.tar") as tar:
        members = [member for member in tar.getmembers() if member.isfile() and "val" in member.name][::20]
        tar.extractall(folder, members=members, filter="data")
    return folder


class TestByName:
    def open(self, folder: Path, **options: object) -> PseudoVideoSource:
        options = {"sampling": ClipSampling(4), "size": (40, 56), **options}
        return open_dataset(f"pseudo:images:{folder}", "train", **options)  # type: ignore[arg-type, return-value]

    def test_real_photographs_through_the_loader(self, photographs: Path) -> None:
        source = self.open(photographs, objects=ObjectsConfig(num_objects=2, regions=1.0))
        assert source.name == f"pseudo:images:{photographs}"
        transform = segmented_train_transform((32, 32), scale=(0.6, 1.0))
        options = {"batch_size": 6, "transform": transform, "device": "cpu", "training": True, "num_workers": 0}
        runs = [list(create_loader(source, seed=seed, **options)) for seed in (1, 1, 2)]  # type: ignore[arg-type]
        for (clips, labels), (same, _), (other, _) in zip(*runs, strict=True):
            assert isinstance(clips, SegmentedClips)
            assert clips.frames.shape == (6, 3, 4, 32, 32)
            assert clips.ids.shape == (6, 4, 32, 32)
            assert (clips.ids[:, 0].flatten(1).max(1).values >= 1).all()
            assert not labels.any()
            assert all(map(torch.equal, clips, same))
            assert not torch.equal(clips.frames, other.frames)

    @pytest.mark.integration
    def test_workers_give_the_same(self, photographs: Path) -> None:
        source = self.open(photographs)
        options = {"batch_size": 6, "transform": segmented_train_transform(32), "device": "cpu", "training": True}
        runs = [list(create_loader(source, num_workers=workers, **options)) for workers in (0, 2)]  # type: ignore[arg-type]
        for (clips, _), (same, _) in zip(*runs, strict=True):
            assert all(map(torch.equal, clips, same))

    def test_splits_share_no_photograph(self, photographs: Path) -> None:
        parts = [
            {source.path(index) for index in range(len(source))}
            for source in (
                open_dataset(f"pseudo:images:{photographs}", split, sampling=ClipSampling(2), size=(32, 32))  # type: ignore[arg-type]
                for split in ("train", "validation")
            )
        ]
        assert not parts[0] & parts[1]
        assert len(parts[0] | parts[1]) == len(list(photographs.rglob("*.JPEG")) + list(photographs.rglob("*.jpg")))

    def test_refusals(self, photographs: Path) -> None:
        for options, message in (
            ({"size": None}, "is made at any size, so size must say which"),
            ({"sampling": None}, "gives clips, which need sampling"),
            ({"sampling": ClipSampling(3, 8.0)}, "fps is 8, but pseudo:.* has no frames a second"),
        ):
            with pytest.raises(ValueError, match=message):
                self.open(photographs, **options)
        with pytest.raises(ValueError, match=r"pseudo:pseudo:.* is to be made from photographs, but .* gives clips"):
            open_dataset(f"pseudo:pseudo:images:{photographs}", "train", sampling=ClipSampling(2), size=(32, 32))
