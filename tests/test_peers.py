"""Live parity of presets with the libraries that are installed, on random rectangular grids."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr

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
def test_ultralytics_axial_on_random_grids(tmp_path, monkeypatch):
    pytest.importorskip("ultralytics", reason="needs the extra: pip install 'vision-rope[ultralytics]'")
    import warnings

    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    assert os.environ["YOLO_OFFLINE"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ultralytics' own import warns on some platforms
        from ultralytics.models.sam.modules.utils import apply_rotary_enc, compute_axial_cis
    rope = vr.preset("sam2", head_dim=32)
    for rows, columns in RANDOM_GRIDS:
        cis = compute_axial_cis(dim=32, end_x=columns, end_y=rows)
        q = torch.randn(2, 3, rows * columns, 32)
        expected, _ = apply_rotary_enc(q, q, freqs_cis=cis)
        assert_close(vr.rotate(q, rope(rope.positions(rows, columns))), expected, atol=2e-5, rtol=1e-5)
