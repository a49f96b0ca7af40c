"""timm's own rotary embeddings, translated: the same logits, and the same weights in both directions."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.convert.own_rope import OWN, mixed_from_timm, mixed_to_timm, own_rope, translate

TINY: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5, "head_init_scale": 1.0}
# One of each kind that timm publishes, then what its classes can be built with beside.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "axial": ("vit_small_patch16_rope_224", {}),
    "axial and absolute": ("vit_small_patch16_rope_ape_224", {}),
    "mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "mixed and absolute": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "eva02": ("eva02_tiny_patch14_224", {}),
    "dinov3": ("vit_small_patch16_dinov3", {}),
    "dinov3 with biases": ("vit_small_patch16_dinov3_qkvb", {}),
    "perception encoder": ("vit_pe_core_base_patch16_224", {}),
    "registers": ("vit_base_patch16_rope_reg1_gap_256", {}),
    "mrope": ("vit_small_patch16_rope_224", {"rope_type": "mrope", "rope_grid_indexing": "ij"}),
    "mixed, rows first": ("vit_small_patch16_rope_mixed_224", {"rope_grid_indexing": "ij"}),
    "dinov3, columns first": ("vit_small_patch16_dinov3", {"rope_grid_indexing": "xy"}),
    "shared keys": (
        "vit_small_patch16_dinov3",
        {"attn_type": "rope", "num_kv_heads": 1, "qkv_fused": False, "qk_norm": True},
    ),
    "norm after, gated": ("vit_small_patch16_rope_224", {"use_post_norm": True}),
}
RELEASED = ("axial", "mixed", "eva02", "dinov3", "perception encoder")


def build(kind: str, seed: int = 0, **options: Any) -> Any:
    """timm's model for any size, with weights that let every layer matter."""
    name, own = MODELS[kind]
    patch = 14 if "patch14" in name else 16
    options = {**TINY, "img_size": 6 * patch, "dynamic_img_size": True, **own, **options}
    model = timm.create_model(name, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + (1.0 if "norm" in name and parameter.ndim == 1 else 0.0))
    return model.eval()


def images(model: Any, rows: int, columns: int) -> Tensor:
    height, width = model.patch_embed.patch_size
    return torch.randn(2, 3, rows * height, columns * width, generator=torch.Generator().manual_seed(rows))


def assert_same_logits(ours: Any, theirs: Any) -> None:
    """At the trained size and two others, one of them larger and none of these square."""
    for size in ((6, 6), (4, 9), (8, 5)):
        x = images(theirs, *size)
        expected = theirs(x)
        assert expected.std() > 0.1
        assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_own_rope_gives_timms_logits(kind: str) -> None:
    theirs = build(kind)
    ours = vr.add_position(build(kind, seed=1), OWN).eval()
    ours.load_state_dict(theirs.state_dict())
    assert_same_logits(ours, theirs)
    x = images(theirs, 6, 6)
    turned = vr.add_position(copy.deepcopy(theirs), "none" if theirs.pos_embed is None else "learned")
    assert not torch.allclose(turned(x), ours(x), atol=1e-3), "the rotation matters"


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_weights_go_back_to_timm(kind: str) -> None:
    ours = vr.add_position(build(kind), OWN).eval()
    theirs = build(kind, seed=1)
    theirs.load_state_dict(vr.timm_state_dict(ours))
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("kind", ["axial", "dinov3", "mixed", "eva02", "shared keys", "norm after, gated"])
@torch.no_grad()
def test_another_pairing_computes_the_same_and_goes_back(kind: str) -> None:
    theirs = build(kind)
    ours = vr.add_position(copy.deepcopy(theirs), OWN).eval()
    vr.convert_pairing(ours, "half" if ours.position.pairing == "interleaved" else "interleaved")
    assert_same_logits(ours, theirs)
    again = build(kind, seed=1)
    again.load_state_dict(vr.timm_state_dict(ours))
    assert_same_logits(ours, again)


@pytest.mark.parametrize(
    ("kind", "position", "options"),
    [
        ("axial", "rope-vit-axial", {}),
        ("mixed", "rope-vit-mixed", {}),
        ("eva02", "eva02", {"keep_absolute": True}),
        ("dinov3", "dinov3", {}),
        ("perception encoder", "perception-encoder", {"keep_absolute": True, "reference": (14, 14)}),
    ],
)
@torch.no_grad()
def test_presets_are_what_timm_publishes(kind: str, position: str, options: dict[str, Any]) -> None:
    theirs = build(kind)
    ours = vr.add_position(build(kind, seed=1), position, **options).eval()
    weights = theirs.state_dict()
    ours.load_state_dict(weights)
    assert_same_logits(ours, theirs)
    assert vr.timm_state_dict(ours).keys() == weights.keys()


@torch.no_grad()
def test_trained_mixed_frequencies_stay_unless_others_are_asked_for() -> None:
    theirs = build("mixed")
    ours = vr.add_position(copy.deepcopy(theirs), "rope-vit-mixed").eval()
    assert_same_logits(ours, theirs)
    for options in ({"base": 10.0}, {"generator": torch.Generator().manual_seed(0)}):
        drawn = vr.add_position(copy.deepcopy(theirs), "rope-vit-mixed", **options)
        assert not torch.allclose(drawn.position.frequencies, ours.position.frequencies)


@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_layout_of_mixed_frequencies(indexing: str) -> None:
    freqs = torch.randn(2, 3, 4, 6)
    ours = mixed_from_timm(freqs, indexing)
    rows, columns = (0, 1) if indexing == "ij" else (1, 0)
    assert_close(ours[:, :, 0], freqs[rows])
    assert_close(ours[:, :, 1], freqs[columns])
    assert_close(mixed_to_timm(ours, indexing), freqs)


@pytest.mark.parametrize("kind", ["axial", "mixed", "mixed, rows first", "shared keys"])
@torch.no_grad()
def test_copies(kind: str) -> None:
    ours = vr.add_position(build(kind), OWN).eval()
    x = images(ours, 5, 7)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_close(other(x), ours(x), rtol=0, atol=0)
        assert other.timm_axes == ours.timm_axes


def test_a_model_on_meta_gets_its_weights_later() -> None:
    theirs = build("mixed")
    with torch.device("meta"):
        ours = vr.add_position(timm.create_model(MODELS["mixed"][0], img_size=96, **TINY), OWN)
    ours.to_empty(device="cpu")
    ours.load_state_dict(theirs.state_dict())
    assert_same_logits(ours.eval(), theirs)


def test_augmentation_of_training_stays() -> None:
    amounts = {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.2, "rope_rescale_coords": 2.0}
    model = vr.add_position(build("dinov3", **amounts), OWN)
    coordinates = model.position.coordinates
    assert (coordinates.shift, coordinates.jitter, coordinates.rescale) == (0.3, 1.2, 2.0)
    x = images(model, 6, 6)
    assert_close(model(x), model(x))
    model.train()
    assert not torch.allclose(model(x), model(x))


@pytest.mark.parametrize("kind", RELEASED)
def test_gradients_are_timms(kind: str) -> None:
    theirs = build(kind)
    ours = vr.add_position(copy.deepcopy(theirs), OWN).eval()
    for model in (theirs, ours):
        model(images(model, 5, 7)).square().sum().backward()
    frequencies = getattr(theirs, "rope", None) and getattr(theirs.rope, "freqs", None)
    if frequencies is not None:
        expected = mixed_from_timm(frequencies.grad, "xy")
        assert_close(ours.position.learned_frequencies.grad, expected, atol=1e-4, rtol=1e-4)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if name != "rope.freqs"}
    for name, gradient in wanted.items():
        atol = 2e-5 * gradient.abs().max().item()
        assert_close(dict(ours.named_parameters())[name].grad, gradient, atol=atol, rtol=1e-4)


def test_what_has_no_counterpart_is_refused_untouched() -> None:
    plain = timm.create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(ValueError, match="'own', and the VisionTransformer has no rotary embedding of its own"):
        vr.add_position(plain, OWN)
    with pytest.raises(ValueError, match="no rotary embedding of its own"):
        vr.add_position(timm.create_model("eva_giant_patch14_224", img_size=28, **TINY), OWN)
    with pytest.raises(ValueError, match="keep_absolute=True has no effect with position 'own'"):
        vr.add_position(build("eva02"), OWN, keep_absolute=True)
    with pytest.raises(ValueError, match="the options base would have no effect"):
        vr.add_position(build("eva02"), OWN, base=100.0)
    with pytest.raises(ValueError, match="grid of type 'pixel'"):
        translate(RotaryEmbeddingCat(16, in_pixels=True), depth=1)
    model = build("dinov3", rope_grid_offset=0.5)
    before = type(model)
    with pytest.raises(ValueError, match=r"grid_offset 0\.5 beside normalised coordinates"):
        vr.add_position(model, OWN)
    assert type(model) is before
    assert model.rope is not None
    model.rope = nn.Identity()
    with pytest.raises(ValueError, match="rotary embedding is Identity; known are timm's RotaryEmbeddingCat"):
        own_rope(model)


def test_weights_that_timm_has_no_place_for_are_refused() -> None:
    with pytest.raises(ValueError, match="a VisionTransformer without a position encoding"):
        vr.timm_state_dict(timm.create_model("vit_tiny_patch16_224", depth=1))
    model = vr.add_position(build("axial"), "t5")
    with pytest.raises(ValueError, match=r"position\.biases, for which timm has no place"):
        vr.timm_state_dict(model)


@torch.no_grad()
def test_the_size_a_model_is_built_for_need_not_divide() -> None:
    """timm's siglip has 384 px and patches of 14: the rest is cut off."""
    options = {name: value for name, value in TINY.items() if name != "head_init_scale"}
    theirs = timm.create_model("vit_so400m_patch14_siglip_384", img_size=60, **options)
    x = torch.randn(2, 3, 60, 60)
    theirs.eval()
    ours = vr.add_position(copy.deepcopy(theirs), "learned")
    assert torch.equal(ours(x), theirs(x))
    with pytest.raises(ValueError, match=r"height 61.*resize them to 56 or 70"):
        ours(torch.randn(2, 3, 61, 60))


def test_periods_between_two_limits() -> None:
    """DINOv3's other way to give frequencies, which timm's models do not use."""
    theirs = RotaryEmbeddingDinoV3(32, temperature=None, min_period=0.5, max_period=90.0)
    rope = translate(theirs, depth=1)
    (rotation,) = rope.grid_rotations(3, 5)
    sin, cos = theirs.get_embed([3, 5]).chunk(2, dim=-1)
    assert_close(rotation.cos[0], cos[:, :16], atol=1e-5, rtol=0)
    assert_close(rotation.sin[0], sin[:, :16], atol=1e-5, rtol=0)
