"""The segmenter with SAM 2's weights, beside Ultralytics' SAM 2 on a real video."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.video.sam2 import build_sam2, ultralytics_module

SIDE = 128
NUM_FRAMES = 6
MEAN, STD = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def random_weights(size: str, version: str = "2.1") -> dict[str, Tensor]:
    """Weights of a SAM 2 whose attention is not flat and whose object is always there."""
    pytest.importorskip("ultralytics")
    torch.manual_seed(0)
    model = build_sam2(f"sam2_{size}")
    with torch.no_grad():
        model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias.fill_(10.0)
        for layer in model.memory_attention.layers:
            for attention in (layer.self_attn, layer.cross_attn_image):
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                    projection.weight.mul_(3.0)
    state = model.state_dict()
    if version == "2.1":
        state["no_obj_embed_spatial"] = 0.1 * torch.randn(1, 64)
        state["obj_ptr_tpos_proj.weight"] = 0.1 * torch.randn(64, 256)
        state["obj_ptr_tpos_proj.bias"] = 0.1 * torch.randn(64)
    return state


class Peer(NamedTuple):
    model: nn.Module
    path: Path


@pytest.fixture(scope="module", params=["t", "b"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Ultralytics' model with random weights, as it loads them from a checkpoint of its own layout."""
    size = request.param
    path = tmp_path_factory.mktemp("weights") / f"sam2.1_{size}.pt"
    torch.save({"model": random_weights(size)}, path)
    models = ultralytics_module("models.sam.build").sam_model_map
    model = models[f"sam2_{size}.pt"](str(path)).eval()
    model.set_binarize(True)  # as its video predictor does with a model that it builds
    return Peer(model, path)


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


MASKS = torch.zeros(2, 180, 180, dtype=torch.bool)
MASKS[0, 40:120, 50:110] = True
MASKS[1, 10:60, 100:170] = True
# What Ultralytics takes, in pixels of its source, and what ours takes, in pixels of a frame of `SIDE`.
PROMPTS: dict[str, tuple[dict[str, Any], Any]] = {
    "click": ({"points": [[90, 70], [30, 120]], "labels": [1, 1]}, lambda s: {
        0: vr.PointPrompt([(90 * s, 70 * s)]), 1: vr.PointPrompt([(30 * s, 120 * s)])}),
    "clicks": ({"points": [[[90, 70], [20, 20], [100, 90]]], "labels": [[1, 0, 1]]}, lambda s: {
        0: vr.PointPrompt([(90 * s, 70 * s), (20 * s, 20 * s), (100 * s, 90 * s)], [1, 0, 1])}),
    "box": ({"bboxes": [[40, 30, 120, 110], [60, 90, 170, 175]]}, lambda s: {
        0: vr.BoxPrompt((40 * s, 30 * s, 120 * s, 110 * s)), 1: vr.BoxPrompt((60 * s, 90 * s, 170 * s, 175 * s))}),
}  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("kind", PROMPTS)
def test_same_masks_on_a_real_video(peer: Peer, square_video: Path, kind: str) -> None:
    theirs, ours = PROMPTS[kind]
    frames, expected = follow(peer.model, square_video, **theirs)
    assert len(frames) == NUM_FRAMES
    prompts = ours(SIDE / 180)
    compare(peer, frames, expected, prompts)


def compare(peer: Peer, frames: list[Tensor], expected: list[Tensor], prompts: Any) -> None:
    # Ultralytics stores memories in half precision on CPUs too.
    segmenter = vr.VideoSegmenter.load(peer.path, image_size=None, memory_dtype=torch.float16)
    state = segmenter.start(num_frames=NUM_FRAMES)
    for number, (frame, logits) in enumerate(zip(frames, expected, strict=True)):
        state, _ = segmenter.step(state, frame * STD + MEAN, None if number else prompts)
        own = torch.cat([one.mask_logits for one in state.objects.values()])[:, 0]
        assert own.shape == logits.shape
        scale = float(logits.std())
        print(number, float((own - logits).abs().max()) / scale, float((own > 0).float().mean()))
        assert_close(own / scale, logits / scale, atol=2e-3, rtol=0)
