"""Live parity of presets with the libraries that are installed, on random rectangular grids."""

from __future__ import annotations

import importlib
import importlib.util
import random
import types

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.video.sam2 import ultralytics_module

RANDOM_GRIDS = [(random.Random(i).randint(1, 24), random.Random(100 + i).randint(1, 24)) for i in range(6)]


@pytest.mark.parametrize("grid", RANDOM_GRIDS)
def test_timm_axial_and_eva02_on_random_grids(grid):
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    q = torch.randn(2, 3, grid[0] * grid[1], 32)
    peer = RotaryEmbeddingCat(32, in_pixels=False, feat_shape=list(grid), temperature=100.0, grid_indexing="xy")
    rope = vr.preset("rope-vit-axial", head_dim=32)
    turned = vr.rotate(q, rope(rope.positions(*grid)))
    assert_close(turned, apply_rot_embed_cat(q, peer.get_embed()), atol=2e-5, rtol=1e-5)

    peer = RotaryEmbeddingCat(32, in_pixels=False, feat_shape=list(grid), ref_feat_shape=[16, 16])
    rope = vr.preset("eva02", head_dim=32)
    turned = vr.rotate(q, rope(rope.positions(*grid)))
    assert_close(turned, apply_rot_embed_cat(q, peer.get_embed()), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", RANDOM_GRIDS)
def test_timm_mixed_on_random_grids(grid):
    from timm.layers import apply_rot_embed_cat
    from timm.layers.pos_embed_sincos import RotaryEmbeddingMixed

    peer = RotaryEmbeddingMixed(dim=48, depth=2, num_heads=3, feat_shape=list(grid))
    rope = vr.preset("rope-vit-mixed", head_dim=16, num_heads=3, depth=2)
    columns, rows = peer.freqs.detach()
    with torch.no_grad():
        rope.learned_frequencies.copy_(torch.stack((rows, columns), dim=2))
    q = torch.randn(2, 3, grid[0] * grid[1], 16)
    embed = peer.get_embed(list(grid))
    for layer, rotation in enumerate(rope.rotations(rope.positions(*grid))):
        assert_close(vr.rotate(q, rotation), apply_rot_embed_cat(q, embed[layer]), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", RANDOM_GRIDS)
@pytest.mark.parametrize("normalize", ["separate", "min", "max"])
def test_timm_dinov3_on_random_grids(grid, normalize):
    from timm.layers import apply_rot_embed_cat
    from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3

    peer = RotaryEmbeddingDinoV3(32, normalize_coords=normalize)
    rope = vr.preset("dinov3", head_dim=32, normalize=normalize)
    q = torch.randn(2, 3, grid[0] * grid[1], 32)
    expected = apply_rot_embed_cat(q, peer.get_embed(list(grid)), half=True)
    assert_close(vr.rotate(q, rope(rope.positions(*grid))), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.integration
def test_ultralytics_axial_on_random_grids():
    if importlib.util.find_spec("ultralytics") is None:
        pytest.skip("needs the extra: pip install 'vision-rope[ultralytics]'")
    peer = ultralytics_module("models.sam.modules.utils")
    rope = vr.preset("sam2", head_dim=32)
    for rows, columns in RANDOM_GRIDS:
        cis = peer.compute_axial_cis(dim=32, end_x=columns, end_y=rows)
        q = torch.randn(2, 3, rows * columns, 32)
        expected, _ = peer.apply_rotary_enc(q, q, freqs_cis=cis)
        assert_close(vr.rotate(q, rope(rope.positions(rows, columns))), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", RANDOM_GRIDS)
def test_timm_perception_encoder_on_random_grids(grid):
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    q = torch.randn(2, 3, grid[0] * grid[1], 32)
    for options, reference in (({}, None), ({"ref_feat_shape": [24, 24]}, (24, 24))):
        peer = RotaryEmbeddingCat(
            32, in_pixels=False, feat_shape=list(grid), grid_indexing="xy", grid_offset=1, **options
        )
        rope = vr.preset("perception-encoder", head_dim=32, reference=reference)
        expected = apply_rot_embed_cat(q, peer.get_embed())
        assert_close(vr.rotate(q, rope(rope.positions(*grid))), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", RANDOM_GRIDS)
@pytest.mark.parametrize(("head_dim", "sections"), [(64, (8, 12, 12)), (72, (12, 12, 12)), (128, (24, 20, 20))])
def test_timm_mrope_on_random_grids(grid, head_dim, sections):
    from timm.layers import apply_rot_embed_cat
    from timm.layers.pos_embed_sincos import RotaryEmbeddingMRope

    peer = RotaryEmbeddingMRope(head_dim, mrope_section=sections)
    rope = vr.preset("qwen3-vl", head_dim=head_dim, base=10000.0, sections=sections)
    q = torch.randn(2, 3, grid[0] * grid[1], head_dim)
    expected = apply_rot_embed_cat(q, peer.get_embed(list(grid)), half=True)
    assert_close(vr.rotate(q, rope(rope.positions(1, *grid))), expected, atol=2e-5, rtol=1e-5)


# --- transformers: each function takes (x, grid) or (x, positions) and turns x (1, heads, tokens, head_dim) ---------


def load_transformers(family):
    pytest.importorskip("transformers", reason="needs the extra: pip install 'vision-rope[peers]'")
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def axial_config(head_dim, base):
    return types.SimpleNamespace(
        rope_parameters={"rope_type": "axial", "rope_theta": base},
        head_dim=head_dim,
        hidden_size=3 * head_dim,
        num_attention_heads=3,
        patch_size=1,
    )


def turn_like_qwen_vision(x, positions):
    peer = load_transformers("qwen2_vl")
    table = peer.Qwen2VLVisionRotaryEmbedding(axial_config(x.shape[-1], 10000.0))
    flat = x[0].transpose(0, 1)
    turned, _ = peer.apply_rotary_pos_emb_vision(flat, flat, *table(x, positions))
    return turned.transpose(0, 1)[None]


def turn_like_pixtral(x, positions):
    peer = load_transformers("pixtral")
    cos, sin = peer.PixtralVisionRotaryEmbedding(axial_config(x.shape[-1], 10000.0))(x, positions)
    return peer.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=0)[0]


def turn_like_gemma4(x, positions):
    peer = load_transformers("gemma4")
    columns_first = positions.flip(-1)[None]
    cos, sin = peer.Gemma4VisionRotaryEmbedding(axial_config(x.shape[-1], 100.0))(x, columns_first)
    turned = peer.apply_multidimensional_rope(x.transpose(1, 2), cos, sin, columns_first, unsqueeze_dim=2)
    return turned.transpose(1, 2)


VISION_PEERS = {
    "qwen2-vl-vision": turn_like_qwen_vision,
    "pixtral": turn_like_pixtral,
    "gemma4-vision": turn_like_gemma4,
}


@pytest.mark.integration
@pytest.mark.parametrize("name", VISION_PEERS)
def test_transformers_vision_towers_on_random_grids(name):
    for grid in RANDOM_GRIDS:
        for head_dim in (16, 64):
            x = torch.randn(1, 3, grid[0] * grid[1], head_dim)
            rope = vr.preset(name, head_dim=head_dim)
            positions = rope.positions(*grid)
            expected = VISION_PEERS[name](x, positions.long())
            assert_close(vr.rotate(x, rope(positions)), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.integration
def test_transformers_llama4_vision_with_its_last_token():
    """Failure class 10; the peer knows squares only."""
    peer = load_transformers("llama4")
    for side in (1, 4, 9):
        config = axial_config(32, 10000.0)
        config.image_size = side
        rope = vr.preset("llama4-vision", head_dim=32)
        rotation = rope(vr.with_prefix(rope.positions(side, side), 1, where="end"))
        x = torch.randn(1, side * side + 1, 3, 32)
        expected, _ = peer.vision_apply_rotary_emb(x, x, peer.Llama4VisionRotaryEmbedding(config).freqs_ci)
        assert_close(vr.rotate(x.transpose(1, 2), rotation).transpose(1, 2), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["llama", "qwen2-vl", "qwen3-vl"])
def test_transformers_language_models(name):
    """Failure class 15: positions differ on all axes, so that chunked and interleaved cannot be confused."""
    families = {
        "llama": ("llama", "LlamaRotaryEmbedding", {}, 500000.0),
        "qwen2-vl": ("qwen2_vl", "Qwen2VLRotaryEmbedding", {"mrope_section": [16, 24, 24]}, 1000000.0),
        "qwen3-vl": ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", {"mrope_section": [24, 20, 20]}, 5000000.0),
    }
    family, class_name, sections, base = families[name]
    peer = load_transformers(family)
    config = types.SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": base, **sections},
        head_dim=128,
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=4096,
        standardize_rope_params=lambda: None,
    )
    table = getattr(peer, class_name)(config)
    rope = vr.preset(name, head_dim=128)
    positions = torch.randint(0, 60, (40, rope.axes)).float()
    ids = positions.T[:, None].long() if rope.axes == 3 else positions.T.long()
    x = torch.randn(1, 2, 40, 128)
    expected, _ = peer.apply_rotary_pos_emb(x, x, *table(x, ids))
    assert_close(vr.rotate(x, rope(positions)), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.integration
def test_transformers_dinov3_on_random_grids():
    peer = load_transformers("dinov3_vit")
    config = peer.DINOv3ViTConfig(hidden_size=64, num_attention_heads=2, patch_size=16, num_register_tokens=4)
    table = peer.DINOv3ViTRopePositionEmbedding(config).eval()
    rope = vr.preset("dinov3", head_dim=32)
    for rows, columns in RANDOM_GRIDS:
        cos, sin = table(torch.zeros(1, 3, 16 * rows, 16 * columns))
        x = torch.randn(1, 2, 5 + rows * columns, 32)
        expected, _ = peer.apply_rotary_pos_emb(x, x, cos, sin)
        rotation = rope(vr.with_prefix(rope.positions(rows, columns), 5))
        assert_close(vr.rotate(x, rotation), expected, atol=5e-5, rtol=1e-5)


# --- rotary-embedding-torch -----------------------------------------------------------------------------------------


def load_rotary_embedding_torch():
    return pytest.importorskip("rotary_embedding_torch", reason="needs the extra: pip install 'vision-rope[peers]'")


@pytest.mark.parametrize("base", [10000, 500000])
def test_rotary_embedding_torch_on_a_line(base):
    peer = load_rotary_embedding_torch().RotaryEmbedding(dim=32, theta=base)
    rope = vr.preset("roformer", head_dim=32, base=base)
    x = torch.randn(2, 3, 50, 32)
    expected = peer.rotate_queries_or_keys(x).detach()
    assert_close(vr.rotate(x, rope(rope.positions(50))), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", RANDOM_GRIDS)
def test_rotary_embedding_torch_on_random_grids(grid):
    """Two axes, rows first; three axes as v-jepa2 has them, a third of the pairs each."""
    library = load_rotary_embedding_torch()
    for size, rope in ((grid, vr.preset("eva02", head_dim=32, reference=grid)), ((2, *grid), vr.preset("v-jepa2", 48))):
        peer = library.RotaryEmbedding(dim=16, freqs_for="lang")  # a new one each time: it caches by token count
        x = torch.randn(3, *size, rope.head_dim)
        expected = library.apply_rotary_emb(peer.get_axial_freqs(*size), x).detach()
        turned = vr.rotate(x.flatten(1, -2), rope(rope.positions(*size))).view_as(x)
        assert_close(turned, expected, atol=2e-5, rtol=1e-5)
