"""Positions of text, images and videos in one sequence: the peers' numbers, time in both modes, bad input."""

from __future__ import annotations

import importlib
import random
import types

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.multimodal import SCHEMES

TEXT, IMAGE, VIDEO = 0, 1, 2


def lines(positions):
    """(t, h, w) as three lists of numbers, as papers print them."""
    return positions.T.tolist()


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_qwen2_vl_by_hand():
    """Two text tokens, an image of 2 x 3, a video of 3 steps of 1 x 2, one text token."""
    positions = vr.multimodal_positions([vr.Text(2), vr.Image(2, 3), vr.Video(3, 1, 2), vr.Text(1)], "qwen2-vl")
    assert positions.dtype == torch.float32
    assert lines(positions) == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 5, 6, 6, 7, 7, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5, 5, 5, 5, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 5, 6, 5, 6, 7],
    ]


def test_videorope_by_hand():
    """Frames of 2 x 3 are centred on the diagonal: rows from 0, columns from -1; text goes on after the last frame."""
    positions = vr.multimodal_positions([vr.Text(1), vr.Video(2, 2, 3), vr.Text(2)], "videorope")
    assert lines(positions) == [
        [0, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5],
        [0, 0, 1, 2, 0, 1, 2, 2, 3, 4, 2, 3, 4, 4, 5],
    ]
    slower = vr.multimodal_positions([vr.Text(1), vr.Video(2, 2, 3), vr.Text(2)], "videorope", time_scale=0.5)
    assert slower[:, 0].tolist() == [0, *[1] * 6, *[1.5] * 6, 2.5, 3.5]


def test_qwen3_vl_frames_are_images_between_timestamps():
    segments = [vr.Text(2), vr.Video(1, 2, 2), vr.Text(3), vr.Video(1, 2, 2), vr.Text(1)]
    assert lines(vr.multimodal_positions(segments, "qwen3-vl")) == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6, 7, 7, 7, 7, 9],
        [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 7, 8, 8, 9],
        [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9],
    ]


# Qwen2.5-VL: 2 positions a second, 2 frames a step; 8 steps of 1 x 1 tokens after one text token, then one text token.
TIMES = {
    0.5: ([1, 9, 17, 25, 33, 41, 49, 57], 2, [1, 9, 17, 25, 33, 41, 49, 57], 58),
    1: ([1, 5, 9, 13, 17, 21, 25, 29], 2, [1, 5, 9, 13, 17, 21, 25, 29], 30),
    30: ([1, 1, 1, 1, 1, 1, 1, 1], 2, [1 + 2 / 15 * k for k in range(8)], 1 + 14 / 15 + 1),
}


@pytest.mark.parametrize("fps", TIMES)
def test_time_at_low_and_high_frame_rates(fps):
    """Failure class 14: the peer cuts time, frames at 30 fps fall together, and text stands before the last frame."""
    as_peer, text_as_peer, exact, text_exact = TIMES[fps]
    segments = [vr.Text(1), vr.Video(8, 1, 1, seconds_per_step=2 / fps), vr.Text(1)]
    positions = vr.multimodal_positions(segments, "qwen2.5-vl")
    assert positions[1:9, 0].tolist() == as_peer
    assert positions[9].tolist() == [text_as_peer] * 3
    positions = vr.multimodal_positions(segments, "qwen2.5-vl", exact_time=True)
    assert_close(positions[1:9, 0], torch.tensor(exact).float(), atol=1e-6, rtol=1e-6)
    assert_close(positions[9], torch.full((3,), float(text_exact)), atol=1e-6, rtol=1e-6)
    assert positions[1:9, 0].diff().min() > 0
    assert positions[9, 0] > positions[8, 0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_time_keeps_order(scheme):
    """Failure class 14: with exact_time nothing precedes what came before it; without, two schemes do that to text."""
    video = vr.Video(9, 2, 2, seconds_per_step=0.7 if SCHEMES[scheme].uses_seconds else None)
    segments = [vr.Text(2), video, vr.Text(2), video, vr.Text(1)]
    if scheme == "qwen3-vl":
        segments = [piece for _ in range(9) for piece in (vr.Text(2), vr.Video(1, 2, 2))]
    exact = vr.multimodal_positions(segments, scheme, exact_time=True)[:, 0]
    assert (exact.diff() >= 0).all()
    as_peer = vr.multimodal_positions(segments, scheme)[:, 0]
    assert (as_peer.diff() >= 0).all() == (scheme in ("qwen3-vl", "videorope"))
    if scheme == "qwen2-vl":
        assert exact.tolist()[-1] == 2 + 9 + 2 + 9  # text after the last frame: steps are positions


def test_text_alone_counts_in_every_scheme():
    for scheme in SCHEMES:
        for segments in ([vr.Text(5)], [vr.Text(2), vr.Text(0), vr.Text(3)]):
            assert lines(vr.multimodal_positions(segments, scheme)) == [[0, 1, 2, 3, 4]] * 3


def test_the_device_is_that_asked_for():
    positions = vr.multimodal_positions([vr.Text(2), vr.Image(2, 2)], "qwen2-vl", device="meta")
    assert positions.device.type == "meta"
    assert positions.shape == (6, 3)


# --- the peers ------------------------------------------------------------------------------------------------------


def test_golden_qwen2_vl(golden):
    vectors = golden("qwen2vl_mrope")

    def place(scheme, seconds=None, **options):
        segments = [vr.Text(3), vr.Image(2, 3), vr.Text(2), vr.Video(3, 2, 2, seconds), vr.Text(4)]
        return vr.multimodal_positions(segments, scheme, **options)

    assert torch.equal(place("qwen2-vl").T.long(), vectors["position_ids"])
    assert torch.equal(place("qwen2.5-vl", 1.0).T.long(), vectors["position_ids_qwen25"])
    fast = place("qwen2.5-vl", 0.5, tokens_per_second=25)
    assert torch.equal(fast.T.long(), vectors["position_ids_qwen25_b"])


def test_golden_qwen3_vl(golden):
    frames = [vr.Video(1, 2, 2), vr.Text(2), vr.Video(1, 2, 2), vr.Text(2), vr.Video(1, 2, 2), vr.Text(3)]
    positions = vr.multimodal_positions([vr.Text(3), vr.Image(2, 3), vr.Text(2), *frames], "qwen3-vl")
    assert torch.equal(positions.T.long(), golden("qwen3vl_mrope_interleaved")["position_ids"])


def random_segments(seed, scheme):
    """Text, images and videos in random order, with text between them as in real sequences."""
    draw = random.Random(seed)
    segments = [vr.Text(draw.randint(1, 4))]
    for _ in range(draw.randint(1, 4)):
        h, w = draw.randint(1, 5), draw.randint(1, 5)
        if draw.random() < 0.4:
            segments.append(vr.Image(h, w))
        elif scheme == "qwen3-vl":
            for _ in range(draw.randint(1, 4)):
                segments += [vr.Video(1, h, w), vr.Text(draw.randint(1, 3))]
        else:
            seconds = draw.choice([2 / 30, 0.1, 0.53, 1.05, 1.0, 2 / 3, 4.0]) if scheme == "qwen2.5-vl" else None
            segments.append(vr.Video(draw.randint(1, 20), h, w, seconds))
        segments.append(vr.Text(draw.randint(1, 4)))
    return segments


def transformers_positions(scheme, segments, tokens_per_second):
    """What the installed transformers' own function gives; it reads two numbers of a config and needs no model."""
    peers = {
        "qwen2-vl": ("qwen2_vl", "Qwen2VLModel"),
        "qwen2.5-vl": ("qwen2_5_vl", "Qwen2_5_VLModel"),
        "qwen3-vl": ("qwen3_vl", "Qwen3VLModel"),
    }
    family, name = peers[scheme]
    model = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    merge = 2
    vision = types.SimpleNamespace(spatial_merge_size=merge, tokens_per_second=tokens_per_second)
    stub = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    stub.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, stub)

    def sides(h, w):
        return h * merge, w * merge

    kinds, images, videos, seconds = [], [], [], []
    for segment in segments:
        if isinstance(segment, vr.Text):
            kinds += [TEXT] * segment.num_tokens
        elif isinstance(segment, vr.Image):
            kinds += [IMAGE] * segment.h * segment.w
            images.append((1, *sides(segment.h, segment.w)))
        else:
            kinds += [VIDEO] * segment.t * segment.h * segment.w
            videos.append((segment.t, *sides(segment.h, segment.w)))
            seconds.append(segment.seconds_per_step)
    options = {"second_per_grid_ts": torch.tensor(seconds)} if scheme == "qwen2.5-vl" and seconds else {}
    position_ids, _ = model.get_rope_index(
        stub,
        input_ids=torch.zeros(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        **options,
    )
    return position_ids[:, 0].T


@pytest.mark.integration
@pytest.mark.parametrize("scheme", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_installed_transformers_on_random_sequences(scheme):
    """Failure class 14: truncations and the rule for text after a video are the peer's own."""
    pytest.importorskip("transformers", reason="needs the extra: pip install 'vision-rope[peers]'")
    for seed in range(60):
        tokens_per_second = (2, 25, 25)[seed % 3]  # 25 * 0.53 is cut elsewhere in float64 than in float32
        segments = random_segments(seed, scheme)
        options = {"tokens_per_second": tokens_per_second} if scheme == "qwen2.5-vl" else {}
        ours = vr.multimodal_positions(segments, scheme, **options)
        assert torch.equal(ours.long(), transformers_positions(scheme, segments, tokens_per_second)), segments
        assert torch.equal(ours, ours.trunc())


def test_videorope_equals_plain_loops():
    """Wiselnn570/VideoRoPE's rule, token by token: the repository cannot be installed."""
    for seed in range(20):
        segments = random_segments(seed, "videorope")
        expected, start = [], 0.0
        for segment in segments:
            if isinstance(segment, vr.Text):
                expected += [(start + i,) * 3 for i in range(segment.num_tokens)]
                start += segment.num_tokens
                continue
            for step in range(getattr(segment, "t", 1)):
                t = start + 2 * step
                for row in range(segment.h):
                    for column in range(segment.w):
                        expected.append((t, t + row - (segment.h - 1) // 2, t + column - (segment.w - 1) // 2))
            start = expected[-1][0] + 1
        assert torch.equal(vr.multimodal_positions(segments, "videorope"), torch.tensor(expected).float())


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: vr.multimodal_positions([vr.Text(1)], "qwen2.5"), r"scheme is 'qwen2.5'.*did you mean 'qwen2.5-vl'"),
        (lambda: vr.multimodal_positions([], "qwen2-vl"), "segments is empty"),
        (lambda: vr.multimodal_positions([3], "qwen2-vl"), "segments holds 3"),
        (
            lambda: vr.multimodal_positions([vr.Video(2, 1, 1)], "qwen2.5-vl"),
            "seconds_per_step of a Video is missing.*qwen2-vl",
        ),
        (
            lambda: vr.multimodal_positions([vr.Video(2, 1, 1, 0.5)], "qwen2-vl"),
            "no effect in scheme 'qwen2-vl'.*qwen2.5-vl",
        ),
        (lambda: vr.multimodal_positions([vr.Video(1, 1, 1, 0.5)], "qwen3-vl"), "no effect in scheme 'qwen3-vl'"),
        (lambda: vr.multimodal_positions([vr.Video(2, 1, 1)], "qwen3-vl"), "timestamp as Text"),
        (
            lambda: vr.multimodal_positions([vr.Text(1)], "qwen2-vl", tokens_per_second=2),
            "tokens_per_second is 2.*qwen2.5-vl",
        ),
        (lambda: vr.multimodal_positions([vr.Text(1)], "qwen3-vl", time_scale=2), "time_scale is 2.*videorope"),
        (
            lambda: vr.multimodal_positions([vr.Video(2, 1, 1, 1.0)], "qwen2.5-vl", tokens_per_second=-1),
            "tokens_per_second is -1",
        ),
        (lambda: vr.multimodal_positions([vr.Image(1, 1)], "videorope", time_scale=0), "time_scale is 0"),
        (lambda: vr.Text(-1), "num_tokens of Text is -1"),
        (lambda: vr.Image(0, 2), "h of Image is 0"),
        (lambda: vr.Image(2, 1.5), "w of Image is 1.5"),
        (lambda: vr.Video(0, 2, 2), "t of Video is 0"),
        (lambda: vr.Video(1, 2, 2, 0.0), "seconds_per_step of Video is 0.0"),
        (lambda: vr.Video(1, 2, 2, float("nan")), "seconds_per_step of Video is nan"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
