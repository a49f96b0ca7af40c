"""Context extension: the published numbers, closed forms, and what must not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.extension import EXTENSIONS
from vision_rope.rope_presets import PRESETS

UNBOUNDED = [name for name in PRESETS if not vr.preset(name, head_dim=16).coordinates.bounded]
BOUNDED = [name for name in PRESETS if name not in UNBOUNDED]
WITH_LADDER = [name for name in UNBOUNDED if vr.preset(name, head_dim=16).ladders is not None]


def sizes(rope, trained, new):
    return {"train_size": (trained,) * rope.axes, "size": (new,) * rope.axes}


# --- numbers of the peers -------------------------------------------------------------------------------------------


def test_golden_language_interpolation_and_yarn(golden):
    vectors = golden("context_extension_1d")
    rope = vr.preset("roformer", head_dim=64, pairing="half")
    interpolated = vr.extend(rope, "interpolate", train_size=(256,), size=(1024,))
    assert_close(interpolated.frequencies[0, 0, 0], vectors["linear4"])
    for key, trained, factor, truncate in [
        ("yarn4_orig256", 256, 4, True),
        ("yarn4_orig256_notrunc", 256, 4, False),
        ("yarn16_orig4096", 4096, 16, True),
    ]:
        yarn = vr.extend(rope, "yarn", train_size=(trained,), size=(factor * trained,), truncate=truncate)
        assert_close(yarn.frequencies[0, 0, 0], vectors[key], atol=1e-7, rtol=1e-5)
        # The peers multiply cos and sin; here the factor goes to the softmax scale, so it is squared.
        rotation = yarn(yarn.positions(4))
        assert_close(rotation.attention_scale, vectors[f"{key}_attn"].item() ** 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("method", "key"), [("interpolate", "linear"), ("ntk", "ntk-aware"), ("yarn", "yarn")])
def test_golden_vision_an_axis_at_a_time(golden, method, key):
    """FiT's decoupled form: a 16 x 16 model at 20 x 32."""
    vectors = golden("fit_vision_ntk_yarn")
    trained = int(vectors["ori"])
    # FiT turns the first half of the pairs with the row, at base 10000.
    rope = vr.preset("eva02", head_dim=72, reference=(16, 16))
    rope.coordinates = vr.preset("sam2").coordinates
    size = (int(vectors["H"]), int(vectors["W"]))
    extended = vr.extend(rope, method, train_size=(trained, trained), size=size).frequencies[0, 0]
    assert_close(extended[0, :18], vectors[f"freqs_h_{key}_decouple"], atol=1e-7, rtol=1e-5)
    assert_close(extended[1, 18:], vectors[f"freqs_w_{key}_decouple"], atol=1e-7, rtol=1e-5)


def test_golden_rotary_embedding_torch(golden):
    vectors = golden("rotary_embedding_torch")
    rope = vr.preset("roformer", head_dim=vectors["interp_x"].shape[-1])
    for key, method, factor in [("interp_out", "interpolate", 2), ("ntk_out", "ntk", 4)]:
        extended = vr.extend(rope, method, train_size=(10,), size=(10 * factor,))
        rotation = extended(extended.positions(vectors["interp_x"].shape[-2]))
        assert_close(vr.rotate(vectors["interp_x"], rotation), vectors[key], atol=2e-5, rtol=1e-5)


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNBOUNDED)
def test_interpolation_divides_positions(name):
    rope = vr.preset(name, head_dim=16, num_heads=2, depth=2)
    extended = vr.extend(rope, "interpolate", **sizes(rope, 4, 10))
    positions = rope.positions(*(10,) * rope.axes)
    for layer in range(2):
        assert_close(extended(positions, layer).cos, rope(positions / 2.5, layer).cos, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", WITH_LADDER)
def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest(name):
    rope = vr.preset(name, head_dim=32)
    factors = (vr.extend(rope, "ntk", **sizes(rope, 5, 15)).frequencies / rope.frequencies)[0, 0]
    for axis, rungs in enumerate(rope.ladders):
        assert_close(factors[axis, rungs.slots[0]].item(), 1.0)
        assert_close(factors[axis, rungs.slots[-1]].item(), 1 / 3, rtol=1e-5, atol=0)
        d = 2 * rungs.pairs
        base = rungs.base * 3 ** (d / (d - 2))
        expected = torch.tensor([base ** (-i / rungs.pairs) for i in range(rungs.pairs)])
        assert_close(factors[axis, list(rungs.slots)] * rope.frequencies[0, 0, axis, list(rungs.slots)], expected)


@pytest.mark.parametrize("name", BOUNDED)
def test_pitch_keeps_the_training_distance(name):
    rope = vr.preset(name, head_dim=16)
    extended = vr.extend(rope, "pitch", train_size=(4, 4), size=(8, 12))

    def turn_between_neighbours(rope, grid):
        positions = rope.positions(*grid).unflatten(0, grid)
        steps = torch.stack((positions[1, 0] - positions[0, 0], positions[0, 1] - positions[0, 0]))
        return (steps[:, :, None] * rope.frequencies[0, 0]).sum(1)

    assert_close(turn_between_neighbours(extended, (8, 12)), turn_between_neighbours(rope, (4, 4)))


def test_temperature_is_from_the_geometric_mean_and_cos_and_sin_stay_a_rotation():
    rope = vr.preset("rope-vit-axial")
    extended = vr.extend(rope, "yarn", train_size=(8, 8), size=(16, 32))
    rotation = extended(extended.positions(16, 32))
    assert_close(rotation.attention_scale, (0.1 * math.log(math.sqrt(2 * 4)) + 1) ** 2)
    assert_close(rotation.cos**2 + rotation.sin**2, torch.ones_like(rotation.cos))
    assert vr.extend(rope, "yarn", train_size=(8, 8), size=(8, 4))(rope.positions(8, 4)).attention_scale == 1.0


# --- what must not change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EXTENSIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_factor_one_and_smaller_sizes_are_the_identity(name, method):
    rope = vr.preset(name, head_dim=16)
    if not defined(rope, method):
        return
    for new in (7, 4):
        extended = vr.extend(rope, method, **sizes(rope, 7, new))
        positions = rope.positions(*(new,) * rope.axes)
        assert torch.equal(extended(positions).cos, rope(positions).cos)
        assert extended(positions).attention_scale == 1.0


@pytest.mark.parametrize("name", [name for name in UNBOUNDED if vr.preset(name, head_dim=16).axes == 2])
@pytest.mark.parametrize("method", ["interpolate", "ntk", "yarn"])
def test_axes_are_extended_apart(name, method):
    rope = vr.preset(name, head_dim=16)
    if not defined(rope, method):
        return
    changed = vr.extend(rope, method, train_size=(6, 6), size=(6, 12)).frequencies / rope.frequencies
    assert (changed[..., 0, :].nan_to_num(1.0) == 1.0).all()
    assert (changed[..., 1, :].nan_to_num(1.0) != 1.0).any()


def test_learned_frequencies_stay_shared_and_trainable():
    rope = vr.preset("rope-vit-mixed", head_dim=16, num_heads=2, depth=2)
    extended = vr.extend(rope, "interpolate", train_size=(4, 4), size=(8, 8))
    assert extended.learned_frequencies is rope.learned_frequencies
    extended(extended.positions(8, 8)).sin.sum().backward()
    assert rope.frequencies.grad.abs().sum() > 0
    with torch.no_grad():
        rope.learned_frequencies.mul_(2)
    assert_close(extended.frequencies, rope.frequencies / 2)
    assert rope.extension is None


def test_extended_embeddings_survive_casts():
    extended = vr.extend(vr.preset("rope-vit-axial"), "ntk", train_size=(4, 4), size=(8, 8))
    before = extended(extended.positions(8, 8)).sin
    assert torch.equal(extended.bfloat16()(extended.positions(8, 8)).sin, before)


# --- bad input ------------------------------------------------------------------------------------------------------


def defined(rope, method):
    try:
        rope.extension_for(method, **sizes(rope, 4, 4))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("method", EXTENSIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_methods_that_mean_nothing_give_their_reason(name, method):
    rope = vr.preset(name, head_dim=16)
    expected = method == "none" or (name in BOUNDED) == (method == "pitch")
    if method in ("ntk", "yarn") and rope.ladders is None:
        expected = False
    assert defined(rope, method) == expected
    if not expected:
        with pytest.raises(ValueError, match=rf"{method} means nothing for {name}: .*; use none"):
            vr.extend(rope, method, **sizes(rope, 4, 8))


def test_other_bad_input_is_refused():
    rope = vr.preset("rope-vit-axial")
    both = {"train_size": (4, 4), "size": (8, 8)}
    with pytest.raises(ValueError, match=r"did you mean 'yarn'"):
        vr.extend(rope, "yarm", **both)
    with pytest.raises(ValueError, match=r"'ntk' has no option 'beta_fast'; its options: none"):
        vr.extend(rope, "ntk", beta_fast=3.0, **both)
    with pytest.raises(ValueError, match="beta_fast must be the larger"):
        vr.extend(rope, "yarn", beta_fast=1.0, beta_slow=2.0, **both)
    with pytest.raises(ValueError, match=r"train_size \(4,\) has 1 axes"):
        vr.extend(rope, "ntk", train_size=(4,), size=(8, 8))
    with pytest.raises(ValueError, match="they must agree"):
        vr.extend(rope, "ntk", train_size=(4, 4), size=(8,))
    with pytest.raises(ValueError, match="positive lengths"):
        vr.extend(rope, "ntk", train_size=(0, 4), size=(8, 8))
    with pytest.raises(ValueError, match="extended already"):
        vr.extend(vr.extend(rope, "ntk", **both), "ntk", **both)
    with pytest.raises(ValueError, match="at least two pairs"):
        vr.extend(vr.preset("rope-vit-axial", head_dim=4), "ntk", **both)
