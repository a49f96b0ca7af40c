"""The memory encoder, sine encodings and the parameters of SAM 2's memory: golden numbers, live peers, closed forms."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.memory import load_video_memory, memory_version
from vision_rope.memory.sine import sine_1d, sine_2d
from vision_rope.video.sam2 import ultralytics_module

TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


def tiny_memory(version="2.1", dim=32, memory_dim=8):
    attention = vr.MemoryAttention(dim, memory_dim, depth=2, mlp_dim=48)
    return vr.VideoMemory(attention, vr.MemoryEncoder(dim, memory_dim), version=version).eval()


def stirred(module):
    """Weights in which every parameter has an effect: layer scale begins near zero, biases at zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


# --- sine encodings -------------------------------------------------------------------------------------------------


def test_golden_sine_encodings(golden):
    vectors = golden("position_misc")
    assert_close(sine_1d(vectors["tdiff"], 256), vectors["pe256"], **TOLERANCE)
    assert_close(sine_1d(vectors["tdiff"], 64), vectors["pe64"], **TOLERANCE)
    assert_close(sine_2d(12, 16, 64), vectors["sine2d_64_h12w16"][0].flatten(1).T, **TOLERANCE)
    assert_close(sine_2d(8, 8, 256), vectors["sine2d_256_h8w8"][0].flatten(1).T, **TOLERANCE)


def test_sine_2d_in_closed_form():
    """A rectangle: rows in the first half of the channels, sine and cosine of a frequency side by side."""
    table = sine_2d(3, 5, 8).unflatten(0, (3, 5))
    for row in range(3):
        for column in range(5):
            y, x = (2 * math.pi * (k + 1) / n for k, n in ((row, 3), (column, 5)))
            expected = [f(v * s) for v in (y, x) for s in (1.0, 0.01) for f in (math.sin, math.cos)]
            assert_close(table[row, column], torch.tensor(expected), atol=1e-5, rtol=0)


def test_sine_1d_in_closed_form():
    expected = [math.sin(2.0), math.sin(2.0), math.sin(0.02), math.sin(0.02)]
    expected += [math.cos(2.0), math.cos(2.0), math.cos(0.02), math.cos(0.02)]
    assert_close(sine_1d(torch.tensor([2.0]), 8), torch.tensor([expected]))


@pytest.mark.parametrize("dim", [0, 6])
def test_sine_of_wrong_width(dim):
    with pytest.raises(ValueError, match=f"dim is {dim}"):
        sine_2d(2, 3, dim)
    with pytest.raises(ValueError, match=f"dim is {dim}"):
        sine_1d(torch.ones(1), dim)


# --- encoder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["memenc_8x8", "memenc_h12w16"])
@pytest.mark.parametrize(("kind", "scale", "bias"), [("sigmoid", 1.0, 0.0), ("scaled20m10", 20.0, -10.0)])
def test_golden_encoder(golden, name, kind, scale, bias):
    vectors = golden(name)
    encoder = vr.MemoryEncoder(16, 4, scale=scale, bias=bias)
    encoder.load_state_dict({key[2:]: value for key, value in vectors.items() if key.startswith("w.")})
    with torch.no_grad():
        memory = encoder(vectors["in.pix_feat"], vectors["in.mask_logits"])
    for peer in ("sam2", "ultra"):
        assert_close(memory, vectors[f"out.{peer}_{kind}"], **TOLERANCE)
    assert_close(sine_2d(*memory.shape[-2:], 4), vectors["out.pos"][0].flatten(1).T, **TOLERANCE)


@pytest.mark.parametrize("grid", [(5, 5), (3, 7)])
def test_encoder_equals_that_of_ultralytics(grid):
    pytest.importorskip("ultralytics")
    peer = stirred(ultralytics_module("models.sam.modules.encoders").MemoryEncoder(out_dim=64)).eval()
    encoder = vr.MemoryEncoder()
    encoder.load_state_dict(peer.state_dict())
    features, logits = torch.randn(2, 256, *grid), torch.randn(2, 1, 16 * grid[0], 16 * grid[1]) * 4
    with torch.no_grad():
        expected = peer(features, logits.sigmoid() * 20 - 10, skip_mask_sigmoid=True)["vision_features"]
        memory = encoder(features, logits)
    assert_close(memory, expected, atol=2e-5 * float(expected.std()), rtol=1e-4)


def test_encoder_binarizes_where_asked():
    """The mask of a prompt by points counts as it is: as if its logits were infinite."""
    encoder = stirred(vr.MemoryEncoder(8, 4))
    features, logits = torch.randn(2, 8, 3, 4), torch.randn(2, 1, 48, 64)
    certain = torch.where(logits > 0, 1000.0, -1000.0)
    assert_close(encoder(features, logits, binarize=True), encoder(features, certain))
    assert not torch.allclose(encoder(features, logits), encoder(features, certain), atol=1e-3)


def test_encoder_takes_features_once_for_all_objects():
    encoder = stirred(vr.MemoryEncoder(8, 4))
    features, logits = torch.randn(1, 8, 3, 4), torch.randn(3, 1, 48, 64)
    one_by_one = torch.cat([encoder(features, mask[None]) for mask in logits])
    assert_close(encoder(features, logits), one_by_one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 64, 48), (1, 1, 12, 16), (1, 2, 48, 64), (1, 48, 64)])
def test_encoder_refuses_masks_of_other_grids(shape):
    with pytest.raises(ValueError, match=r"mask_logits has shape .* grid \(3, 4\) need \(batch, 1, 48, 64\)"):
        vr.MemoryEncoder(8, 4)(torch.randn(1, 8, 3, 4), torch.zeros(shape))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float16, torch.bfloat16, torch.float32])
def test_encoder_casts_to_its_weights(weights, inputs):
    """Failure class 42."""
    encoder = stirred(vr.MemoryEncoder(8, 4))
    features, logits = torch.randn(1, 8, 3, 4), torch.randn(1, 1, 48, 64)
    expected = encoder(features, logits).detach()
    memory = encoder.to(weights)(features.to(inputs), logits.to(inputs))
    assert memory.dtype == weights
    assert float((memory.detach() - expected).norm() / expected.norm()) < 0.1


def test_encoder_trains():
    encoder = vr.MemoryEncoder(8, 4)
    encoder(torch.randn(2, 8, 3, 4), torch.randn(2, 1, 48, 64)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in encoder.parameters())


def test_encoder_without_narrowing_has_no_projection():
    assert not [name for name in vr.MemoryEncoder(8, 8).state_dict() if name.startswith("out_proj")]


# --- parameters of a checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "name"), [("2.1", "sam2.1_t.pt"), ("2.0", "sam2_t.pt")])
def test_names_and_shapes_are_those_of_sam2(monkeypatch, version, name):
    """Failure class 43: the version comes from the names of the weights."""
    pytest.importorskip("ultralytics")
    build = ultralytics_module("models.sam.build")
    # It tells 2.1 from the name of a file, which need not be there here.
    monkeypatch.setattr(build, "_load_checkpoint", lambda model, path: model)
    theirs = build.build_sam2_t(checkpoint=name).state_dict()
    ours = vr.VideoMemory(version=version).state_dict()
    assert memory_version(theirs) == version
    prefixes = ("memory_", "maskmem", "no_mem", "no_obj", "obj_ptr")
    shapes = {key: value.shape for key, value in theirs.items() if key.startswith(prefixes)}
    assert {key: value.shape for key, value in ours.items()} == shapes
    assert_close(load_video_memory(theirs).state_dict()["no_obj_ptr"], theirs["no_obj_ptr"])


@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_weights_of_a_checkpoint_load(version):
    """Failure class 43. Weights of the other parts of a model stay where they are."""
    memory = stirred(tiny_memory(version))
    state = memory.state_dict() | {"image_encoder.trunk.x": torch.ones(1), "mask_downsample.bias": torch.ones(1)}
    loaded = load_video_memory(state)
    assert loaded.version == version
    assert_close(dict(loaded.state_dict()), dict(memory.state_dict()), rtol=0, atol=0)
    assert len(loaded.memory_attention.layers) == 2


def test_incomplete_weights_are_refused():
    state = tiny_memory().state_dict()
    with pytest.raises(ValueError, match="under the key 'model'"):
        load_video_memory({"model": state})
    for missing in ("no_mem_embed", "no_obj_ptr", "obj_ptr_tpos_proj.bias", "memory_encoder.out_proj.weight"):
        with pytest.raises(ValueError, match=missing):
            load_video_memory({key: value for key, value in state.items() if key != missing})
    # A 2.1 checkpoint that lost the weight which tells the version is no 2.0 checkpoint.
    with pytest.raises(ValueError, match="obj_ptr_tpos_proj"):
        load_video_memory({key: value for key, value in state.items() if key != "no_obj_embed_spatial"})


def test_parts_that_do_not_fit_are_refused():
    attention = vr.MemoryAttention(32, 8, depth=1, mlp_dim=16)
    with pytest.raises(ValueError, match=r"stores 4, memory_attention has 32 and reads 8"):
        vr.VideoMemory(attention, vr.MemoryEncoder(32, 4))
    with pytest.raises(ValueError, match=r"memory_dim is 12 and must divide dim, 32"):
        vr.VideoMemory(vr.MemoryAttention(32, 12, depth=1, mlp_dim=16), vr.MemoryEncoder(32, 12))
    with pytest.raises(ValueError, match=r"version is '2.2'"):
        vr.VideoMemory(attention, vr.MemoryEncoder(32, 8), version="2.2")


# --- storing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.0", "2.1"])
@pytest.mark.parametrize("binarize", [False, True])
def test_stored_memory_equals_that_of_ultralytics(version, binarize):
    """Two objects, one of which is not there: 2.1 marks its memory."""
    pytest.importorskip("ultralytics")
    memory = stirred(tiny_memory(version))
    sam2 = ultralytics_module("models.sam.modules.sam").SAM2Model
    peer = SimpleNamespace(
        training=False,
        hidden_dim=32,
        non_overlap_masks_for_mem_enc=False,
        binarize_mask_from_pts_for_mem_enc=True,
        sigmoid_scale_for_mem_enc=20.0,
        sigmoid_bias_for_mem_enc=-10.0,
        no_obj_embed_spatial=memory.no_obj_embed_spatial,
        memory_encoder=lambda features, mask, skip_mask_sigmoid: {
            "vision_features": memory.memory_encoder.out_proj(
                memory.memory_encoder.fuser(
                    memory.memory_encoder.pix_feat_proj(features) + memory.memory_encoder.mask_downsampler(mask)
                )
            ),
            "vision_pos_enc": [],
        },
    )
    features, logits = torch.randn(2, 32, 3, 4), torch.randn(2, 1, 48, 64)
    scores = torch.tensor([[2.0], [-0.5]])
    with torch.no_grad():
        tokens = features.flatten(2).permute(2, 0, 1)
        expected, _ = sam2._encode_new_memory(peer, [tokens], [(3, 4)], logits, scores, binarize)
        bank = memory.store_frame(vr.MemoryBank(), 3, features, logits, object_score=scores, binarize=binarize)
        plain = memory.memory_encoder(features, logits, binarize=binarize)
    (frame,) = bank.frames
    assert_close(frame.features, expected.flatten(2).mT, atol=1e-4, rtol=1e-4)
    assert (frame.number, frame.grid, frame.prompted) == (3, (3, 4), False)
    unmarked = plain.flatten(2).mT
    assert_close(frame.features[0], unmarked[0])
    assert torch.equal(frame.features[1], unmarked[1]) == (version == "2.0")


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_pointer_of_a_missing_object(shape):
    """lambda * pointer + (1 - lambda) * no_obj_ptr with a hard lambda: a score of zero is no object."""
    memory = stirred(tiny_memory())
    token, scores = torch.randn(3, 32), torch.tensor([3.0, 0.0, -1.0])
    bank = memory.store_pointer(vr.MemoryBank(), 7, token, scores.reshape(shape), prompted=True)
    (stored,) = bank.pointers
    w = memory.state_dict()
    x = token
    for layer in range(3):
        x = x @ w[f"obj_ptr_proj.layers.{layer}.weight"].T + w[f"obj_ptr_proj.layers.{layer}.bias"]
        x = x.clamp(min=0) if layer < 2 else x
    there = torch.tensor([[1.0], [0.0], [0.0]])
    assert_close(stored.pointer, there * x + (1 - there) * w["no_obj_ptr"])
    assert (stored.number, stored.prompted) == (7, True)
