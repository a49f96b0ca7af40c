"""Clips made from photographs, followed by the centre of what moves; the task of telling motion, against loops."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vision_rope
from vision_rope.config import (
    AugmentConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    MotionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    VideoConfig,
)
from vision_rope.data import ClipSampling, open_dataset
from vision_rope.data.clips import Clips
from vision_rope.data.cutouts import draw_shape
from vision_rope.data.motion import DIRECTIONS, MotionSource, list_speeds, move_over
from vision_rope.data.sources import ImageSource
from vision_rope.losses import motion_loss
from vision_rope.motion_metrics import NUM_DIRECTIONS, STANDING_STILL, MotionMetrics, PlaybackMetrics, reverse_labels
from vision_rope.rules import check_config
from vision_rope.tasks import Motion, Playback, create_task

SMALL = MotionConfig(num_speeds=2, slowest=0.1, fastest=0.3, object_size=(0.25, 0.35), size=48)


class Plain(ImageSource):
    """Photographs of one colour each: grey 10 * index."""

    name, classes, labels, licence = "plain", ["photograph"], None, "none"

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 60, 80), 10 * index, dtype=torch.uint8), 0

    def path(self, index: int) -> str:
        return f"{index}.jpg"


def make_source(motion: MotionConfig = SMALL, num_frames: int = 6, fps: float = 6.0, count: int = 20) -> MotionSource:
    return MotionSource(Plain(count), motion, num_frames=num_frames, fps=fps)


# ---- clips


def follow(frames: Tensor, background: int) -> tuple[Tensor, bool]:
    """Centres (frames, 2) of what is not background, as shares of the width; whether all of it stays in view."""
    change = (frames[:, 0].double() - background).abs()
    size = change.shape[-1]
    pixels = (torch.arange(size) + 0.5) / size
    total = change.sum((1, 2))
    centres = torch.stack((change.sum(1) @ pixels.double(), change.sum(2) @ pixels.double()), dim=1) / total[:, None]
    border = change[:, 0].any() | change[:, -1].any() | change[..., 0].any() | change[..., -1].any()
    return centres, not bool(border)


def test_objects_move_as_their_class_says():
    source = make_source(count=20)
    seen = set()
    for index in range(20):
        for seed in range(12):
            clip, label = source.read(index, torch.Generator().manual_seed(seed * 20 + index))
            assert clip.frames.shape == (6, 3, 48, 48)
            assert clip.frames.dtype == torch.uint8
            torch.testing.assert_close(clip.seconds, torch.arange(6, dtype=torch.float64) / 6, rtol=0, atol=0)
            centres, whole = follow(clip.frames, 10 * index)
            # Against a background of nearly its own grey an object's centre is rounded away.
            if not whole or (clip.frames.float() - 10 * index).abs().max() < 50:
                continue
            seen.add(label)
            name, _, speed = source.classes[label].rpartition(" ")
            angle = 45 * DIRECTIONS.index(name)
            step = float(speed.removesuffix("/s")) / 6
            expected = torch.tensor([math.cos(math.radians(angle)), math.sin(math.radians(angle))]).double() * step
            torch.testing.assert_close(centres.diff(dim=0), expected.expand(5, 2), rtol=0, atol=4e-3)
    assert len(seen) == 16, "all directions and speeds were seen"


def test_names_of_directions_go_clockwise_on_a_picture():
    """Rows grow downwards."""
    turns = {"right": (1, 0), "down": (0, 1), "left": (-1, 0), "up": (0, -1)}
    for place, name in enumerate(DIRECTIONS):
        x, y = (sum(turns[word][axis] for word in name.split()) for axis in (0, 1))
        assert math.degrees(math.atan2(y, x)) % 360 == pytest.approx(45 * place)
    assert len(DIRECTIONS) == NUM_DIRECTIONS
    assert make_source().classes[:3] == ["right 0.1/s", "right 0.3/s", "down right 0.1/s"]
    assert list_speeds(MotionConfig(num_speeds=3, slowest=0.25, fastest=1.0)) == pytest.approx([0.25, 0.5, 1.0])


def test_evaluation_sees_the_same_clips_and_training_others():
    source = make_source()
    torch.manual_seed(1)
    (first, label), (again, same) = source[3], make_source()[3]
    assert torch.equal(first.frames, again.frames)
    assert label == same
    drawn = [source.read(3, torch.Generator().manual_seed(seed))[0].frames for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], first.frames)
    assert len({source[index][1] for index in range(20)}) > 5


@pytest.mark.parametrize("index", range(4))
def test_more_frames_at_a_higher_rate_look_at_the_same_motion(index):
    source = make_source()
    clip, label = source[index]
    denser, same = source.sampled(11, 12.0)[index]
    assert label == same
    assert torch.equal(denser.frames[::2], clip.frames)
    torch.testing.assert_close(denser.seconds[::2], clip.seconds)
    assert len(source[index][0].frames) == 6, "the source itself stays as it was"


def test_objects_come_from_the_photographs_of_the_source():
    source = make_source(count=5)
    for index in range(5):
        frames = source[index][0].frames
        greys = set(frames.unique().tolist())
        assert 10 * index in greys
        # Soft edges lie between background and object; nothing lies outside of the source's greys.
        assert greys <= set(range(41))


def test_backgrounds_can_be_dimmed_and_objects_stay_as_they_are():
    plain, dim = make_source(), make_source(replace(SMALL, background=0.5))
    for index in range(5, 20):
        before, after = plain[index][0].frames.float(), dim[index][0].frames.float()
        assert after[0, 0].unique().min() >= 0
        assert 5 * index in after.unique()
        assert before.max() != 10 * index or after.max() <= before.max()
        behind = (before == 10 * index) & (after == 5 * index)
        assert behind.float().mean() > 0.5


def test_the_middle_of_the_clip_has_the_object_in_view_even_where_it_leaves():
    fast = replace(SMALL, slowest=2.0, fastest=4.0)
    source = make_source(fast, num_frames=7)
    for index in range(1, 20):
        frames = source[index][0].frames
        change = (frames[3].int() - 10 * index).abs().max()
        assert change > 0 or not (frames.int() - 10 * index).any()


def test_shapes_are_closed_smooth_and_within_their_radius():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        shape = draw_shape((64, 64), 0.3, torch.tensor([0.4, 0.6]), generator)
        pixels = (torch.arange(64) + 0.5) / 64
        distance = torch.hypot(pixels - 0.4, pixels[:, None] - 0.6)
        assert not shape[distance > 0.3 * 1.01 + 1 / 64].any()
        assert (shape[distance < 0.08] == 1).all()
        assert 0.15 < float(shape.mean()) / (math.pi * 0.3**2) < 1
        assert shape.min() == 0
        assert shape.max() == 1
        assert ((shape > 0) & (shape < 1)).any()


def test_whole_pixels_move_exactly_and_fractions_are_linear():
    photograph = torch.randint(256, (3, 16, 16), dtype=torch.uint8)
    background = torch.randint(256, (3, 16, 16), dtype=torch.uint8)
    shape = torch.zeros(16, 16)
    shape[4:8, 5:10] = 1
    frames = move_over(photograph, shape, background, torch.tensor([[0.0, 0.0], [3 / 16, -2 / 16], [0.5 / 16, 0.0]]))
    expected = background.clone()
    expected[:, 4:8, 5:10] = photograph[:, 4:8, 5:10]
    assert torch.equal(frames[0], expected)
    expected = background.clone()
    expected[:, 2:6, 8:13] = photograph[:, 4:8, 5:10]
    assert torch.equal(frames[1], expected)
    middle = (photograph[:, 4:8, 5:9].float() + photograph[:, 4:8, 6:10].float()) / 2
    torch.testing.assert_close(frames[2][:, 4:8, 6:10].float(), middle, rtol=0, atol=0.5)


# ---- the source by its name


@pytest.fixture
def photographs(tmp_path, save_image=None):
    from PIL import Image

    for split, grey in (("train", 60), ("validation", 200)):
        (tmp_path / split / "all").mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (40, 30), (grey, grey, grey + index)).save(tmp_path / split / "all" / f"{index}.png")
    return tmp_path


def test_splits_use_their_own_photographs(photographs):
    for split, grey in (("train", 60), ("validation", 200)):
        source = open_dataset(f"motion:folder:{photographs}", split, sampling=ClipSampling(4, 8.0), motion=SMALL)
        assert isinstance(source, MotionSource)
        assert len(source) == 4
        assert source.name == f"motion:folder:{photographs}"
        assert source.path(2).endswith("2.png")
        for index in range(4):
            assert set(source[index][0].frames[:, 0].unique().tolist()) == {grey}


def test_what_motion_cannot_be_made_of_is_refused(photographs):
    name = f"folder:{photographs}"
    with pytest.raises(ValueError, match=r"made at any rate, so fps must say which; give video.fps"):
        open_dataset(f"motion:{name}", "train", sampling=ClipSampling(4))
    with pytest.raises(ValueError, match=r"need sampling: how many frames \(video.num_frames\)"):
        open_dataset(f"motion:{name}", "train")
    with pytest.raises(ValueError, match=r"made at any rate; give frames a second"):
        make_source().sampled(4, None)
    with pytest.raises(ValueError, match="data source 'foldr:x' is unknown"):
        open_dataset("motion:foldr:x", "train", sampling=ClipSampling(4, 8.0))


# ---- the task


def random_clips(count: int = 6, frames: int = 4) -> Clips:
    seconds = torch.rand(count, frames).cumsum(1)
    return Clips(torch.randn(count, 3, frames, 8, 8), seconds)


def test_evaluation_plays_every_clip_both_ways():
    clips, labels = random_clips(), torch.arange(6) * 3
    source = make_source(replace(SMALL, num_speeds=3))
    batch = Motion(3).eval_batch(clips, labels, None)
    frames, seconds = batch.inputs
    assert torch.equal(frames[:6], clips.frames)
    assert torch.equal(seconds[:6], clips.seconds)
    assert torch.equal(frames[6:], torch.stack([clips.frames[:, :, place] for place in (3, 2, 1, 0)], dim=2))
    # As far apart as before, the other way round, from the same beginning.
    torch.testing.assert_close(seconds[6:].diff(dim=1), clips.seconds.diff(dim=1).flip(1))
    torch.testing.assert_close(seconds[6:, 0], clips.seconds[:, 0])
    opposites = {"right": "left", "left": "right", "down": "up", "up": "down"}
    for before, after in zip(batch.targets[:6].tolist(), batch.targets[6:].tolist(), strict=True):
        turned = re.sub(r"right|left|down|up", lambda word: opposites[word[0]], source.classes[before])
        assert source.classes[after] == turned
    train = Motion(3).train_batch(clips, labels, 5)
    assert train.inputs == tuple(clips)
    assert train.targets is labels
    assert torch.equal(reverse_labels(reverse_labels(labels, 3), 3), labels)


def test_loss_is_the_sum_of_two_cross_entropies():
    outputs, labels = torch.randn(5, 11), torch.tensor([0, 4, 8, 20, 23])
    expected = 0.0
    for row, label in zip(outputs.double().numpy(), labels.tolist(), strict=True):
        direction, speed = divmod(label, 3)
        expected += np.log(np.exp(row[:8]).sum()) - row[direction] + np.log(np.exp(row[8:]).sum()) - row[8 + speed]
    assert float(motion_loss(outputs, labels, 3)) == pytest.approx(expected / 5, rel=1e-5)
    low = outputs.bfloat16().requires_grad_()
    assert Motion(3).loss(low, labels).dtype == torch.float32
    assert Motion(3).count_hits(outputs, labels) is None


def test_metrics_equal_their_definition():
    outputs, labels = torch.randn(40, 11), torch.randint(24, (40,))
    outputs[3, labels[3] // 3] = outputs[3, (labels[3] // 3 + 4) % 8]
    metrics = MotionMetrics(3)
    metrics.update(outputs[:16], labels[:16])
    metrics.update(outputs[16:], labels[16:])
    found = metrics.compute()
    sums = dict.fromkeys(("direction", "way", "speed"), 0.0)
    for row, label in zip(outputs.tolist(), labels.tolist(), strict=True):
        direction, speed = divmod(label, 3)
        against = row[(direction + 4) % 8]
        sums["direction"] += row[:8].index(max(row[:8])) == direction
        sums["way"] += 0.5 if row[direction] == against else float(row[direction] > against)
        sums["speed"] += row[8:].index(max(row[8:])) == speed
    for name, total in sums.items():
        assert found[name] == pytest.approx(total / 40)
    assert found["nll"] == pytest.approx(float(motion_loss(outputs, labels, 3)), rel=1e-5)
    assert found["images"] == 20
    task = Motion(3)
    assert task.score({"direction": 0.5, "nll": 1.0}) > task.score({"direction": 0.5, "nll": 2.0})
    assert task.score({"direction": 0.6, "nll": 3.0}) > task.score({"direction": 0.5, "nll": 2.0})


def test_answers_that_do_not_look_at_the_order_of_frames_find_the_way_half_of_the_time():
    torch.manual_seed(0)
    task, clips, labels = Motion(2), random_clips(64), torch.randint(16, (64,))
    batch = task.eval_batch(clips, labels, None)
    weights = torch.randn(3 * 64, 10)
    unordered = batch.inputs[0].sort(dim=2).values.mean(2).flatten(1) @ weights
    metrics = task.create_metrics(torch.device("cpu"))
    metrics.update(unordered, batch.targets)
    found = metrics.compute()
    assert found["way"] == 0.5
    assert found["direction"] <= 0.5
    knowing = F.one_hot(batch.targets // 2, 8).float()
    metrics = task.create_metrics(torch.device("cpu"))
    metrics.update(torch.cat((knowing, torch.zeros(128, 2)), dim=1), batch.targets)
    assert metrics.compute()["way"] == metrics.compute()["direction"] == 1


@pytest.mark.parametrize("metrics", [MotionMetrics(3), PlaybackMetrics([0.2, 0.4, 0.8])])
def test_outputs_that_cannot_be_judged_are_refused(metrics):
    targets = torch.zeros(8, dtype=torch.long)
    with pytest.raises(ValueError, match=r"outputs have shape \(8, 10\), but 8 directions and 3 speeds need"):
        metrics.update(torch.zeros(8, 10), targets)
    with pytest.raises(ValueError, match="outputs are not finite"):
        metrics.update(torch.full((8, 11), torch.nan), targets)
    with pytest.raises(ValueError, match="no clip was counted"):
        metrics.compute()


# ---- real clips


def test_playback_plays_half_of_a_clip_at_its_rate_and_all_of_it_at_twice_the_speed():
    clips = random_clips(3, frames=8)
    task = Playback([0.2, 0.4], std=(0.5, 1.0, 2.0))
    batch = task.eval_batch(clips, torch.full((3,), -1), None)
    frames, seconds = batch.inputs
    for clip in range(3):
        played = {
            0: [0, 1, 2, 3],
            1: [3, 2, 1, 0],
            2: [0, 2, 4, 6],
            3: [6, 4, 2, 0],
        }
        for way, places in played.items():
            assert torch.equal(frames[3 * way + clip], clips.frames[clip][:, places])
        own = clips.seconds[clip, :4]
        torch.testing.assert_close(seconds[clip], own)
        torch.testing.assert_close(seconds[6 + clip], own)
        torch.testing.assert_close(seconds[3 + clip].diff(), own.diff().flip(0))
        pixels = clips.frames[clip].double().numpy() * np.array([0.5, 1.0, 2.0])[:, None, None, None]
        assert float(batch.targets[clip]) == pytest.approx(np.abs(np.diff(pixels, axis=1)).mean(), rel=1e-5)
    with pytest.raises(ValueError, match="clips have 7 frames, but playing them at two speeds takes an even number"):
        task.eval_batch(random_clips(3, frames=7), torch.zeros(3), None)


def test_metrics_of_playback_equal_their_definition():
    torch.manual_seed(2)
    outputs, change, speeds = 2 * torch.randn(4 * 30, 10), torch.rand(30) * 3 * STANDING_STILL, [0.2, 0.5]
    outputs[60:90:5, 8:] = outputs[0:30:5, 8:]
    metrics = PlaybackMetrics(speeds)
    metrics.update(outputs, change)
    found = metrics.compute()
    reversal, way, faster, count = 0.0, 0.0, 0.0, 0
    table = outputs.view(4, 30, 10).tolist()
    for clip in range(30):
        if change[clip] < STANDING_STILL:
            continue
        for forwards, backwards in ((0, 1), (2, 3)):
            first = table[forwards][clip][:8].index(max(table[forwards][clip][:8]))
            other = table[backwards][clip][:8]
            reversal += other.index(max(other)) == (first + 4) % 8
            way += other[(first + 4) % 8] > other[first]
        for slow, fast in ((0, 2), (1, 3)):
            expected = [
                np.exp(table[row][clip][8:]) @ speeds / np.exp(table[row][clip][8:]).sum() for row in (slow, fast)
            ]
            faster += 0.5 if abs(expected[0] - expected[1]) < 1e-9 else float(expected[1] > expected[0])
        count += 2
    assert 20 < count < 60
    assert found["reversal"] == pytest.approx(reversal / count)
    assert found["way"] == pytest.approx(way / count)
    assert found["faster"] == pytest.approx(faster / count)
    assert found["moving"] == pytest.approx(count / 60)
    assert found["images"] == 30


def test_clips_that_stand_still_have_no_shares():
    metrics = PlaybackMetrics([0.2, 0.5])
    metrics.update(torch.randn(8, 10), torch.zeros(2))
    found = metrics.compute()
    assert math.isnan(found["reversal"])
    assert found["moving"] == 0
    assert found["images"] == 2


# ---- configurations


def motion_config(**augment) -> TrainConfig:
    return TrainConfig(
        task="motion",
        data=DataConfig(source="motion:elpv"),
        video=VideoConfig(num_frames=4, fps=8.0, tubelet=1),
        augment=AugmentConfig(**{"crop": "resize", "hflip": 0.0, **augment}),
    )


def test_the_configuration_names_the_task():
    check_config(motion_config())
    check_config(motion_config(crop="simple", color_jitter=0.2))
    assert isinstance(create_task(motion_config(), 24, (8, 8)), Motion)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hflip", 0.5, r"augment.hflip is 0.5, but it would turn the direction .* must be 0"),
        ("vflip", 0.5, "augment.vflip is 0.5, but it would turn"),
        ("dihedral", True, "augment.dihedral is True, but it would turn"),
        ("crop", "random-resized", "augment.crop is random-resized, but it would change the speed"),
        ("mixup", 0.2, "augment.mixup is 0.2, but it would have no effect with task motion"),
        ("cutmix", 0.2, "augment.cutmix is 0.2, but it would have no effect with task motion"),
    ],
)
def test_augmentation_that_changes_the_answer_is_refused(key, value, message):
    with pytest.raises(ValueError, match=message):
        check_config(motion_config(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": DataConfig(source="frames:x")}, "data.source is frames:x, but it has no motion that is known"),
        ({"video": VideoConfig(num_frames=None)}, "video.num_frames"),
        ({"video": VideoConfig(num_frames=1, tubelet=1)}, "video.num_frames is 1, but it must be at least 2"),
        ({"motion": MotionConfig(num_speeds=1)}, "motion.num_speeds is 1, but it must be at least 2"),
        ({"motion": MotionConfig(slowest=0)}, "motion.slowest is 0, but it must be positive"),
        ({"motion": MotionConfig(slowest=1, fastest=1)}, "motion.fastest is 1, but it must be above motion.slowest"),
        ({"motion": MotionConfig(object_size=(0.6, 0.3))}, "motion.object_size is .* must rise within 0 to 1"),
        ({"motion": MotionConfig(background=1.5)}, "motion.background is 1.5, but it is a share of the brightness"),
        ({"motion": MotionConfig(size=8)}, "motion.size is 8, but it must be at least 16"),
    ],
)
def test_configurations_without_motion_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(replace(motion_config(), **changes))


def test_keys_of_motion_mean_nothing_for_other_data():
    config = replace(TrainConfig(), motion=MotionConfig(num_speeds=5))
    with pytest.raises(ValueError, match=r"motion.num_speeds is 5, but it would have no effect with data.source elpv"):
        check_config(config)


# ---- models


def make_model(position: str) -> torch.nn.Module:
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
    torch.manual_seed(3)
    model = vision_rope.video_vit(
        "vit_small_patch16_224", num_frames=4, tubelet=(1, 8, 8), position=position, reg_tokens=1, **shape
    )
    # As sharp as after training: fresh weights attend almost evenly, whatever the positions.
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    return model.eval()


@pytest.mark.parametrize("position", ["rope-vit-axial", "none", "qwen3-vl", "axial-3d"])
def test_models_without_an_axis_of_time_find_the_way_by_chance(position):
    """In exactly half of the clips, whatever their weights; those with one tell both ways apart."""
    source = make_source(replace(SMALL, size=16), num_frames=4)
    clips = [source.read(index, torch.Generator().manual_seed(index)) for index in range(20)]
    frames = torch.stack([clip.frames for clip, _ in clips]).transpose(1, 2) / 255.0
    labels = torch.tensor([label for _, label in clips])
    task = Motion(2)
    batch = task.eval_batch(Clips(frames, torch.arange(4.0).expand(20, -1)), labels, None)
    with torch.inference_mode():
        outputs = make_model(position)(*batch.inputs)
    forwards, backwards = outputs.chunk(2)
    metrics = task.create_metrics(torch.device("cpu"))
    metrics.update(outputs, batch.targets)
    found = metrics.compute()
    if position in ("rope-vit-axial", "none"):
        torch.testing.assert_close(forwards, backwards)
        assert found["way"] == 0.5
        assert found["direction"] <= 0.5
    else:
        assert not torch.allclose(forwards, backwards, atol=1e-3)


@pytest.mark.integration
def test_a_run_is_judged_on_its_own_clips_and_on_clips_without_labels(tmp_path):
    """Far too short to learn anything; real clips are stood for by frames of a moving square."""
    from PIL import Image

    from vision_rope.evaluate import evaluate
    from vision_rope.trainer import train

    for split in ("train", "validation"):
        (tmp_path / split / "all").mkdir(parents=True)
        for index in range(32):
            colour = tuple(np.random.default_rng(index).integers(120, 256, 3).tolist())
            Image.new("RGB", (16, 16), colour).save(tmp_path / split / "all" / f"{index}.png")
    for clip in range(4):
        folder = tmp_path / "films" / "square" / f"clip {clip}"
        folder.mkdir(parents=True)
        for place in range(12):
            picture = Image.new("RGB", (16, 16))
            picture.paste((250, 250, 250), (place, 5, place + 6, 11))
            picture.save(folder / f"{place}.png")
    shape = {"patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}
    config = TrainConfig(
        task="motion",
        batch_size=32,
        model=ModelConfig(position="mixed-3d", options=shape),
        data=DataConfig(source=f"motion:folder:{tmp_path}", size=16, mean=(0.2, 0.2, 0.2)),
        video=VideoConfig(num_frames=4, fps=4.0, tubelet=1),
        motion=MotionConfig(num_speeds=2, slowest=0.3, fastest=1.0, object_size=(0.5, 0.6), background=0.0, size=16),
        augment=AugmentConfig(crop="resize", hflip=0.0),
        schedule=ScheduleConfig(epochs=1, warmup_epochs=0.0),
        evaluation=EvaluationConfig(every=1),
        run=RunConfig(output=str(tmp_path / "run"), num_workers=0, progress=False, tensorboard=False),
    )
    result = train(config)
    own = {name: result.best[f"val_{name}"] for name in ("direction", "way", "speed", "nll")}
    assert own["nll"] == pytest.approx(math.log(16), abs=0.5)
    assert result.best["val_images"] == 32
    rows, _ = evaluate(tmp_path / "run", data=f"frames:{tmp_path / 'films'}", num_workers=0, progress=False)
    assert rows[0]["clips"] == 1
    assert rows[0]["moving"] == 1
    assert {rows[0][name] for name in ("reversal", "way", "faster")} <= {0.0, 0.5, 1.0}
