"""The segmenter with SAM 2's weights, beside Ultralytics' SAM 2 on a real video."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from tests.test_memory_replace import sharpen
from vision_rope.segmenter import load_sam2
from vision_rope.video.sam2 import build_sam2, ultralytics_module

SIDE = 128
NUM_FRAMES = 4
MEAN, STD = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def random_weights(size: str, version: str = "2.1") -> dict[str, Tensor]:
    """Weights of a SAM 2 whose attention is not flat and whose object is always there."""
    pytest.importorskip("ultralytics")
    torch.manual_seed(0)
    model = build_sam2(f"sam2_{size}")
    sharpen(model)
    state = model.state_dict()
    if version == "2.1":
        state["no_obj_embed_spatial"] = 0.1 * torch.randn(1, 64)
        state["obj_ptr_tpos_proj.weight"] = 0.1 * torch.randn(64, 256)
        state["obj_ptr_tpos_proj.bias"] = 0.1 * torch.randn(64)
    return state


class Peer(NamedTuple):
    """Ultralytics' model, and ours with the same weights, which takes frames as they are."""

    model: Any
    segmenter: vr.VideoSegmenter
    weights: dict[str, Tensor]
    size: str


@pytest.fixture(scope="module", params=["t", "b"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Ultralytics' model with random weights, as it loads them from a checkpoint of its own layout."""
    size = request.param
    path = tmp_path_factory.mktemp("weights") / f"sam2.1_{size}.pt"
    weights = random_weights(size)
    torch.save({"model": weights}, path)
    models = ultralytics_module("models.sam.build").sam_model_map
    model = models[f"sam2_{size}.pt"](str(path)).eval()
    model.set_binarize(True)  # as its video predictor does with a model that it builds
    return Peer(model, vr.VideoSegmenter.load(path, image_size=None), weights, size)


@pytest.fixture(scope="module")
def square_video(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The middle of a real video's first frames."""
    av = pytest.importorskip("av")
    path = tmp_path_factory.mktemp("video") / "square.mp4"
    with av.open(str(shared_data / "videos_nomask" / "nasa_13013.mp4")) as source, av.open(str(path), "w") as target:
        stream = target.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 180
        for _, frame in zip(range(NUM_FRAMES), source.decode(video=0), strict=False):
            pixels = frame.to_ndarray(format="rgb24")[:180, 70:250]
            target.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        target.mux(stream.encode())
    return path


def follow(model: nn.Module, video: Path, **prompts: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Frames as Ultralytics' video predictor gives them to its model, and the logits of each."""
    predict = ultralytics_module("models.sam.predict")
    frames, logits = [], []

    class Predictor(predict.SAM2VideoPredictor):
        def inference(self, im: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = super().inference(im, *args, **kwargs)
            frames.append(im[0].clone())
            logits.append(out[0].clone())
            return out

    predictor = Predictor(overrides={"imgsz": SIDE, "device": "cpu", "save": False, "verbose": False, "conf": 0.0})
    predictor.setup_model(model, verbose=False)
    for _ in predictor(source=str(video), stream=True, **prompts):
        pass
    return frames, logits


# What Ultralytics takes, in pixels of its source, and what ours takes, in pixels of a frame of `SIDE`.
PROMPTS: dict[str, tuple[dict[str, Any], Any]] = {
    "click": ({"points": [[90, 70], [30, 120]], "labels": [1, 1]}, lambda s: {
        0: vr.PointPrompt([(90 * s, 70 * s)]), 1: vr.PointPrompt([(30 * s, 120 * s)])}),
    "clicks": ({"points": [[[90, 70], [20, 20], [100, 90]]], "labels": [[1, 0, 1]]}, lambda s: {
        0: vr.PointPrompt([(90 * s, 70 * s), (20 * s, 20 * s), (100 * s, 90 * s)], [1, 0, 1])}),
    "box": ({"bboxes": [[40, 30, 120, 110], [60, 90, 170, 175]]}, lambda s: {
        0: vr.BoxPrompt((40 * s, 30 * s, 120 * s, 110 * s)), 1: vr.BoxPrompt((60 * s, 90 * s, 170 * s, 175 * s))}),
}  # fmt: skip


def logits_of(state: vr.SegmenterState) -> Tensor:
    return torch.cat([one.mask_logits for one in state.objects.values()])[:, 0]


def assert_same(own: Tensor, expected: Tensor) -> None:
    scale = float(expected.std())
    assert scale > 0.01
    assert_close(own / scale, expected / scale, atol=1e-4, rtol=0)
    assert torch.equal(own > 1e-4 * scale, expected > 1e-4 * scale)


@pytest.mark.integration
@pytest.mark.parametrize("kind", PROMPTS)
def test_same_masks_on_a_real_video(peer: Peer, square_video: Path, kind: str) -> None:
    """Ultralytics' own video predictor; its memories are in half precision, on a CPU too."""
    theirs, ours = PROMPTS[kind]
    frames, expected = follow(peer.model, square_video, **theirs)
    assert len(frames) == NUM_FRAMES
    segmenter, peer.segmenter.memory_dtype = peer.segmenter, torch.float16
    state = segmenter.start(num_frames=NUM_FRAMES)
    for number, (frame, logits) in enumerate(zip(frames, expected, strict=True)):
        state, _ = segmenter.step(state, frame * STD + MEAN, None if number else ours(SIDE / 180))
        assert_same(logits_of(state), logits)


@pytest.mark.integration
def test_same_masks_after_a_mask(peer: Peer, square_video: Path) -> None:
    masks = torch.zeros(2, 180, 180)
    masks[0, 40:120, 50:110] = 1
    masks[1, 10:60, 100:170] = 1
    frames, expected = follow(peer.model, square_video, masks=masks.numpy())
    segmenter, peer.segmenter.memory_dtype = peer.segmenter, torch.float16
    state = segmenter.start(num_frames=NUM_FRAMES)
    laid = nn.functional.interpolate(masks[:, None], size=(SIDE, SIDE), mode="nearest")[:, 0]
    for number, (frame, logits) in enumerate(zip(frames, expected, strict=True)):
        given = {key: vr.MaskPrompt(mask) for key, mask in enumerate(laid)}
        state, _ = segmenter.step(state, frame * STD + MEAN, None if number else given)
        assert_same(logits_of(state), logits)


class Loop:
    """Ultralytics' model without its predictor: single precision, nothing pruned, any prompt on any frame."""

    def __init__(self, model: Any, num_frames: int) -> None:
        self.model = model
        self.num_frames = num_frames
        self.stored: dict[str, dict[int, Any]] = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}

    @torch.no_grad()
    def step(self, number: int, frame: Tensor, *, first: bool = False, reverse: bool = False, **prompts: Any) -> Tensor:
        # A frame is not a memory of itself, which the predictor sees to.
        for stored in self.stored.values():
            stored.pop(number, None)
        _, features, places, sizes = self.model._prepare_backbone_features(self.model.forward_image(frame[None]))
        out = self.model.track_step(
            frame_idx=number,
            is_init_cond_frame=first,
            current_vision_feats=features,
            current_vision_pos_embeds=places,
            feat_sizes=sizes,
            output_dict=self.stored,
            num_frames=self.num_frames,
            track_in_reverse=reverse,
            **{"point_inputs": None, "mask_inputs": None, **prompts},
        )
        self.stored["cond_frame_outputs" if prompts else "non_cond_frame_outputs"][number] = out
        return out["pred_masks"][:, 0]


def points(*given: tuple[float, float, int]) -> dict[str, Any]:
    numbers = torch.tensor([given])
    inputs = {"point_coords": numbers[..., :2], "point_labels": numbers[..., 2].int()}
    return {"point_inputs": inputs}


def video(count: int, side: int = SIDE) -> Tensor:
    """Normalised frames: noise that drifts."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(1, 3, side // 8, side // 8 + count, generator=generator)
    wide = nn.functional.interpolate(small, scale_factor=8, mode="bilinear")[0]
    return torch.stack([wide[:, :, 4 * i : 4 * i + side] for i in range(count)])


@pytest.mark.integration
def test_same_masks_with_corrections_and_all_pointers(peer: Peer) -> None:
    """A click, 18 frames on, where all 16 pointers are read, a correction, another one, and 2 more frames."""
    if peer.size == "b":
        pytest.skip("the memory of all sizes is the same")
    frames = video(20, side=64)
    peer.model.set_imgsz((64, 64))
    loop = Loop(peer.model, num_frames=100)
    segmenter, peer.segmenter.memory_dtype = peer.segmenter, None
    state, own = segmenter.start(), []
    for number, frame in enumerate(frames):
        prompt = vr.PointPrompt([(30, 25)]) if number == 0 else None
        given = points((30, 25, 1)) if number == 0 else {}
        expected = loop.step(number, frame, first=number == 0, **given)
        state, _ = segmenter.step(state, frame * STD + MEAN, {1: prompt} if prompt else None)
        own.append(logits_of(state))
        assert_same(own[-1], expected)
        clicks: tuple[tuple[float, float, int], ...] = ()
        for click in ((10, 50, 0), (32, 32, 1)) if number == 17 else ():
            clicks = (*clicks, click)
            before = expected[:, None].clamp(-32, 32)
            expected = loop.step(number, frame, prev_sam_mask_logits=before, **points(*clicks))
            state, _ = segmenter.correct(state, {1: vr.PointPrompt([click[:2]], [click[2]])})
            assert_same(logits_of(state), expected)
    assert len(state.objects[1].bank.pointers) == 16
    assert [frame.number for frame in state.objects[1].bank.frames if frame.prompted] == [0, 17]


@pytest.mark.integration
def test_weights_go_back(peer: Peer) -> None:
    assert peer.segmenter.memory.version == "2.1"
    back = vr.to_sam2(peer.segmenter)
    assert back.keys() == peer.weights.keys()
    assert all(torch.equal(back[name], peer.weights[name]) for name in peer.weights)


@pytest.mark.integration
def test_same_masks_backwards(peer: Peer) -> None:
    frames = video(4)
    peer.model.set_imgsz((SIDE, SIDE))
    loop = Loop(peer.model, num_frames=100)
    segmenter, peer.segmenter.memory_dtype = peer.segmenter, None
    expected = loop.step(3, frames[3], first=True, **points((30, 30, 2), (90, 80, 3)))
    state, _ = segmenter.step(segmenter.start(), frames[3] * STD + MEAN, {1: vr.BoxPrompt((30, 30, 90, 80))})
    state = state.reverse()
    for number in (2, 1, 0):
        expected = loop.step(number, frames[number], reverse=True)
        state, _ = segmenter.step(state, frames[number] * STD + MEAN)
        assert_same(logits_of(state), expected)


# A large model takes ten seconds.
@pytest.mark.integration
@pytest.mark.parametrize(
    ("size", "version"),
    [("t", "2.0"), ("s", "2.1"), pytest.param("l", "2.1", marks=pytest.mark.slow)],
)
def test_all_sizes_and_versions(size: str, version: str, tmp_path: Path) -> None:
    """Failure class 43: told from the names and shapes of the weights; and back, for the loaders of others."""
    weights = random_weights(size, version)
    path = tmp_path / "renamed.pt"
    torch.save({"model": weights} if version == "2.1" else weights, path)
    segmenter = vr.VideoSegmenter.load(path)
    assert segmenter.memory.version == version
    assert segmenter.image_size == 1024
    back = vr.to_sam2(segmenter)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    if (size, version) == ("t", "2.0"):
        from safetensors.torch import save_file

        save_file({name: x.contiguous() for name, x in weights.items()}, tmp_path / "weights.safetensors")
        other = vr.VideoSegmenter.load(tmp_path / "weights.safetensors", image_size=256)
        assert other.image_size == 256
        assert all(torch.equal(x, other.state_dict()[name]) for name, x in segmenter.state_dict().items())


@pytest.mark.integration
def test_rectangles_have_the_angles_of_a_direct_table(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure class 34: what memory attention reads on a rectangle is turned by rows and columns of that rectangle."""
    segmenter, peer.segmenter.memory_dtype = peer.segmenter, None
    rope = segmenter.memory.memory_attention.rope
    height, width = 96, 160
    used = []
    own = rope.grid_rotations

    def watch(*grid: int, **options: Any) -> Any:
        rotations = own(*grid, **options)
        used.append((grid, rotations[0]))
        return rotations

    monkeypatch.setattr(rope, "grid_rotations", watch)
    frames = torch.rand(2, 3, height, width)
    state, _ = segmenter.step(segmenter.start(), frames[0], {1: vr.BoxPrompt((20, 10, 100, 70))})
    segmenter.step(state, frames[1])
    assert {grid for grid, _ in used} == {(6, 10)}
    frequencies = 10000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    rows, columns = torch.arange(6).repeat_interleave(10), torch.arange(10).repeat(6)
    angles = torch.cat((columns[:, None] * frequencies, rows[:, None] * frequencies), dim=-1)
    for _, rotation in used:
        assert_close(rotation.cos[0].double(), angles.cos(), atol=1e-6, rtol=0)
        assert_close(rotation.sin[0].double(), angles.sin(), atol=1e-6, rtol=0)


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save({"model": vr.PointPrompt([(1, 2)])}, tmp_path / "code.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK" + bytes(100))
    for name, message in (
        ("other.pt", "no checkpoint of SAM 2"),
        ("code.pt", "no checkpoint of tensors alone"),
        ("damaged.pt", "no checkpoint of tensors alone"),
    ):
        with pytest.raises(ValueError, match=message):
            vr.VideoSegmenter.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="does not exist; give a SAM 2 checkpoint"):
        vr.VideoSegmenter.load(tmp_path / "missing.pt")


@pytest.mark.integration
@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit(change: str) -> None:
    weights = random_weights("t")
    if change == "missing":
        del weights["sam_mask_decoder.iou_token.weight"]
    elif change == "unknown":
        weights["head.weight"] = torch.zeros(2)
    else:
        weights["image_encoder.neck.convs.0.conv.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"these are not the weights of SAM 2\.1 with sam2_hiera_tiny"):
        load_sam2(weights)


@pytest.mark.integration
def test_only_sam2_goes_back() -> None:
    segmenter = vr.create_segmenter("resnet18", dim=32, memory_dim=16, depth=1, mlp_dim=32, decoder_heads=4)
    with pytest.raises(ValueError, match="not SAM 2's Hiera"):
        vr.to_sam2(segmenter)
