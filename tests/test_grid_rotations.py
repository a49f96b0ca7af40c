"""Rotations of whole grids: products of the axes' turns against whole positions, and what is kept between calls."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.coordinates import Coordinates
from vision_rope.rope_presets import PRESETS


@pytest.mark.parametrize("name", list(PRESETS))
def test_grid_rotations_equal_rotations_of_positions(name):
    """Products of the axes' turns against angles of whole positions; the second formulation sums before the cosine."""
    rope = vr.preset(name, head_dim=64, num_heads=2, depth=3)
    size = (5, 4, 3)[-rope.axes :]
    direct = rope.rotations(vr.with_prefix(rope.positions(*size), 2))
    for rotation, expected in zip(rope.grid_rotations(*size, num_prefix_tokens=2), direct, strict=True):
        assert rotation.pairing == expected.pairing
        assert_close(rotation.cos, expected.cos, atol=3e-6, rtol=0)
        assert_close(rotation.sin, expected.sin, atol=3e-6, rtol=0)
        assert torch.equal(rotation.cos[:, :2], torch.ones_like(rotation.cos[:, :2]))
        assert not rotation.sin[:, :2].any()


@pytest.mark.parametrize("name", [name for name in PRESETS if vr.preset(name, head_dim=16).axes == 3])
def test_times_stand_in_the_place_of_steps(name):
    """Fractions, and samples that differ; whole numbers are what counting steps gives."""
    rope = vr.preset(name, head_dim=64, num_heads=2, depth=3)
    times = torch.tensor([[0.0, 0.25, 7.5], [0.0, 1.0, 2.0]])
    direct = rope.rotations(vr.with_prefix(rope.positions(3, 4, 5, times=times), 2))
    batch = rope.grid_rotations(3, 4, 5, times=times, num_prefix_tokens=2)
    first = rope.grid_rotations(3, 4, 5, times=times[0], num_prefix_tokens=2)
    steps = rope.grid_rotations(3, 4, 5, num_prefix_tokens=2)
    for layer in range(3):
        for part in ("cos", "sin"):
            ours = getattr(batch[layer], part)
            assert_close(ours, getattr(direct[layer], part), atol=3e-6, rtol=0)
            assert_close(ours[0], getattr(first[layer], part), atol=1e-6, rtol=0)
            assert_close(ours[1], getattr(steps[layer], part), atol=1e-6, rtol=0)
    assert rope.positions(3, 4, 5, times=times[:0]).shape == (0, 60, 3)
    assert rope.grid_rotations(3, 4, 5, times=times[:0])[0].cos.shape[0] == 0
    for wrong in (times[:, :2], times[None]):
        with pytest.raises(ValueError, match=r"times have shape .* has 3 steps"):
            rope.grid_rotations(3, 4, 5, times=wrong)


def test_times_without_an_axis_of_their_own_are_refused():
    with pytest.raises(ValueError, match="dinov3 has no axis of time"):
        vr.preset("dinov3", head_dim=16).positions(2, 3, times=torch.zeros(2))
    with pytest.raises(ValueError, match="times are given and the coordinates are normalised"):
        Coordinates(normalize="separate").positions(2, 3, 4, times=torch.zeros(2))
    for other in ({"offset": 1.0}, {"reference": (1, 2, 3)}, {"shift": 0.1}):
        with pytest.raises(ValueError, match="leave the other options of coordinates out"):
            Coordinates(diagonal=2.0, **other)


@pytest.mark.parametrize("name", ["rope-vit-mixed", "dinov3", "pixtral"])
def test_repeated_grids_turn_alike(name):
    rope = vr.preset(name, head_dim=16, num_heads=2, depth=2)
    once, thrice = (rope.grid_rotations(2, 3, repeats=repeats, num_prefix_tokens=1) for repeats in (1, 3))
    for one, many in zip(once, thrice, strict=True):
        assert_close(many.cos[:, 1:], one.cos[:, 1:].repeat(1, 3, 1))
        assert_close(many.sin[:, 1:], one.sin[:, 1:].repeat(1, 3, 1))
        assert torch.equal(many.cos[:, 0], one.cos[:, 0])
    assert torch.equal(rope.grid_rotations(2, 3, num_prefix_tokens=1)[0].cos, once[0].cos)


def test_grid_rotations_are_kept_for_the_same_grid_alone():
    """Law 4: what is kept is keyed by everything it depends on."""
    rope = vr.preset("rope-vit-axial", head_dim=16)
    first = rope.grid_rotations(4, 6)
    assert rope.grid_rotations(4, 6) is first
    others = {
        "transposed, as many tokens": rope.grid_rotations(6, 4),
        "prefix": rope.grid_rotations(4, 6, num_prefix_tokens=1),
        "extension": rope.grid_rotations(4, 6, extension=("interpolate", (2, 3), {})),
        "another extension": rope.grid_rotations(4, 6, extension=("ntk", (2, 3), {})),
    }
    for name, other in others.items():
        fresh = vr.preset("rope-vit-axial", head_dim=16)
        assert other is not first
        assert other[0].cos.shape != first[0].cos.shape or not torch.equal(other[0].cos, first[0].cos), name
        rope.grid_rotations(4, 6)
        assert torch.equal(rope.grid_rotations(4, 6)[0].cos, fresh.grid_rotations(4, 6)[0].cos), name
    rope.coordinates = Coordinates(offset=1.0)
    assert_close(rope.grid_rotations(4, 6)[0].cos, rope(rope.positions(4, 6)).cos)
    extended = vr.extend(rope, "interpolate", train_size=(2, 3), size=(4, 6))
    assert_close(extended.grid_rotations(4, 6)[0].cos, extended(extended.positions(4, 6)).cos)
    assert rope.grid_rotations(4, 6, device="meta")[0].cos.device.type == "meta"


def test_grid_rotations_leak_nothing():
    """Law 4: no inference tensor reaches training, no fake tensor outlives its tool, no table is copied or saved."""
    rope = vr.preset("rope-vit-axial", head_dim=16)
    with torch.inference_mode():
        rope.grid_rotations(3, 2)
    x = torch.randn(1, 1, 6, 16, requires_grad=True)
    vr.rotate(x, rope.grid_rotations(3, 2)[0]).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(rope.grid_rotations(2, 2)[0].cos) is FakeTensor
    assert type(rope.grid_rotations(2, 2)[0].cos) is torch.Tensor
    assert len(pickle.dumps(rope)) < 10_000
    assert len(pickle.dumps(vr.preset("rope-vit-axial", head_dim=16))) == len(pickle.dumps(rope))
    assert not rope.state_dict()
    learned = vr.preset("rope-vit-mixed", head_dim=16)
    before = learned.grid_rotations(3, 2)[0].cos
    with torch.no_grad():
        learned.frequencies.data.mul_(2.0)  # invisible to a version counter
    assert not torch.equal(learned.grid_rotations(3, 2)[0].cos, before)


def test_grid_rotations_carry_gradients_to_learned_frequencies():
    rope = vr.preset("rope-vit-mixed", head_dim=16, num_heads=2, depth=2)
    x = torch.randn(3, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def gradient(rotations):
        loss = sum((vr.rotate(x, rotation) * weight).sum() for rotation in rotations)
        return torch.autograd.grad(loss, rope.frequencies)[0]

    positions = vr.with_prefix(rope.positions(2, 3), 1)
    assert_close(
        gradient(rope.grid_rotations(2, 3, num_prefix_tokens=1)),
        gradient(rope.rotations(positions)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_grid_rotations_augment_as_positions_do():
    rope = vr.preset("dinov3", head_dim=16, shift=0.2, jitter=1.5, rescale=2.0)
    drawn = rope.grid_rotations(3, 4, augment=True, generator=torch.Generator().manual_seed(3))
    positions = rope.coordinates.augment(rope.positions(3, 4), torch.Generator().manual_seed(3))
    assert_close(drawn[0].cos, rope(positions).cos, atol=2e-6, rtol=0)
    assert not torch.equal(drawn[0].cos, rope.grid_rotations(3, 4)[0].cos)


# torch itself scripts functions for forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["rope-vit-axial", "rope-vit-mixed", "dinov3"])
def test_function_transforms_go_through_models_and_leave_nothing(name):
    model = vr.create_model(
        "vit_tiny_patch16_224", name, img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3
    ).eval()
    for layer in model.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = False
    x = torch.randn(2, 3, 32, 32)
    model.position.forget()
    tangent = torch.func.jvp(model, (x,), (x,))[1]
    assert tangent.shape == (2, 3)
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    stacked = {key: torch.stack((value, 1.1 * value)) for key, value in parameters.items()}
    both = torch.func.vmap(lambda weights: torch.func.functional_call(model, weights, (x,)))(stacked)
    assert_close(both[0], model(x), atol=1e-5, rtol=1e-4)
    model.position.forget()
    torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (x,)).sum())(parameters)
    model(x)
    pickle.dumps([rotation.cos for rotation in model.position.grid_rotations(4, 4, num_prefix_tokens=1)])


# torch itself scripts functions for forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_tangents_of_learned_frequencies():
    """Forward mode without a function transform, where no gradient is asked for, against a difference quotient."""
    rope = vr.preset("rope-vit-mixed", head_dim=8)
    frequencies = rope.frequencies.detach().clone()
    step = 1e-3 * torch.ones_like(frequencies)

    def cosines(values):
        with torch.no_grad():
            rope.frequencies.copy_(values)
        return rope.grid_rotations(3, 2, num_prefix_tokens=1)[0].cos

    difference = cosines(frequencies + step) - cosines(frequencies - step)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(frequencies, step)
        del rope.learned_frequencies
        rope.learned_frequencies = dual
        tangent = forward_ad.unpack_dual(rope.grid_rotations(3, 2, num_prefix_tokens=1)[0].cos).tangent
    assert_close(2 * tangent, difference, atol=1e-5, rtol=1e-3)
