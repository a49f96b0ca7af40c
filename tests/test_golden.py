"""Numbers that the original implementations wrote, reproduced by presets, positions and pairings.

V-JEPA 2 as released is left out on purpose: it is no rotation; its file's reference for the orthogonal form is checked.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import layer_norm, linear
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.coordinates import Coordinates
from vision_rope.frequencies import angles, axial_ladders
from vision_rope.positions import mesh
from vision_rope.rope import Rope


def test_golden_rope_vit_axial(golden):
    vectors = golden("axial2d_naver")
    rope = vr.preset("rope-vit-axial", head_dim=32)
    rotation = rope(rope.positions(int(vectors["end_y"]), int(vectors["end_x"])))
    assert_close(rotation.cos[0], vectors["cis_real"], atol=2e-6, rtol=0)
    assert_close(rotation.sin[0], vectors["cis_imag"], atol=2e-6, rtol=0)
    assert_close(vr.rotate(vectors["q"], rotation), vectors["q_out"], atol=2e-5, rtol=1e-5)


def test_golden_rope_vit_attention_with_class_token(golden):
    vectors = golden("axial2d_naver")
    x = vectors["attn_x"]
    rope = vr.preset("rope-vit-axial", head_dim=16)
    rotation = rope(vr.with_prefix(rope.positions(3, 3), 1))
    weights = {key.removeprefix("sd."): value for key, value in vectors.items() if key.startswith("sd.")}
    qkv = linear(x, weights["qkv.weight"], weights.get("qkv.bias")).unflatten(-1, (3, 2, 16))
    q, k, v = vr.rotate_qkv(qkv, rotation)
    out = vr.attend(q, k, v).transpose(1, 2).flatten(2)
    out = linear(out, weights["proj.weight"], weights["proj.bias"])
    assert_close(out, vectors["attn_out"], atol=2e-5, rtol=1e-5)


def test_golden_rope_vit_mixed(golden):
    vectors = golden("mixed_naver")
    rope = vr.preset("rope-vit-mixed", head_dim=16, num_heads=3, depth=2)
    columns, rows = vectors["freqs"].unflatten(-1, (3, 8))  # naver: x (columns) first
    with torch.no_grad():
        rope.learned_frequencies.copy_(torch.stack((rows, columns), dim=2))
    for layer, rotation in enumerate(rope.rotations(rope.positions(3, 5))):
        assert_close(rotation.cos, vectors["cis_real"][layer], atol=5e-6, rtol=0)
        assert_close(rotation.sin, vectors["cis_imag"][layer], atol=5e-6, rtol=0)
        turned = vr.rotate(vectors["q"], rotation)
        assert_close(turned, vectors["q_out"][layer], atol=2e-5, rtol=1e-5)
        assert_close(turned, vectors["timm_q_out"][layer], atol=2e-5, rtol=1e-5)


def test_golden_rope_vit_mixed_initial_frequencies(golden):
    torch.manual_seed(19)
    rope = vr.preset("rope-vit-mixed", head_dim=16, num_heads=3, depth=2)
    columns, rows = golden("mixed_naver")["timm_init"]
    assert_close(rope.frequencies.detach(), torch.stack((rows, columns), dim=2), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", ["separate", "min", "max", "period"])
def test_golden_dinov3(golden, mode):
    vectors = golden("dinov3")
    if mode == "period":
        periods = vectors["periods_period"]
        rope = vr.preset("dinov3", head_dim=32, min_period=periods[0].item(), max_period=periods[-1].item())
    else:
        rope = vr.preset("dinov3", head_dim=32, normalize=mode)
    rotation = rope(rope.positions(3, 5))
    # DINOv3 stores cos and sin twice, once for each half of the channels.
    assert_close(rotation.cos[0].repeat(1, 2), vectors[f"cos_{mode}"], atol=1e-5, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors[f"sin_{mode}"], atol=1e-5, rtol=0)
    if mode != "period":
        with_prefix = rope(vr.with_prefix(rope.positions(3, 5), 5))
        assert_close(vr.rotate(vectors["q"], with_prefix), vectors[f"q_out_{mode}"], atol=2e-5, rtol=1e-5)


def test_golden_dinov3_augmented_and_larger(golden):
    vectors = golden("dinov3")
    rope = vr.preset("dinov3", head_dim=32, shift=0.2, jitter=2.0, rescale=2.0)
    torch.manual_seed(7)
    rotation = rope(rope.coordinates.augment(rope.positions(3, 5)))
    assert_close(rotation.cos[0].repeat(1, 2), vectors["cos_aug_seed7"], atol=1e-5, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors["sin_aug_seed7"], atol=1e-5, rtol=0)
    rotation = rope(rope.positions(14, 14))
    assert_close(rotation.cos[0].repeat(1, 2), vectors["cos_14"], atol=1e-5, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors["sin_14"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("key", "grid"), [("eva02_14_ref16", (14, 14)), ("eva02_6x10_ref16", (6, 10))])
def test_golden_eva02(golden, key, grid):
    sin, cos = golden("timm_cat")[key].chunk(2, dim=-1)
    rope = vr.preset("eva02", head_dim=32)
    rotation = rope(rope.positions(*grid))
    assert_close(rotation.sin[0].repeat_interleave(2, dim=-1), sin, atol=5e-6, rtol=0)
    assert_close(rotation.cos[0].repeat_interleave(2, dim=-1), cos, atol=5e-6, rtol=0)


def test_golden_timm_grids_both_orders_and_pairings(golden):
    vectors = golden("timm_cat")
    columns_first = vr.preset("sam2", head_dim=32)
    rows_first = vr.preset("eva02", head_dim=32, reference=(3, 5))  # its own grid as reference: indices
    half = vr.preset("eva02", head_dim=32, reference=(3, 5), pairing="half")
    cases = [(columns_first, "q_out_plain_xy_3x5"), (rows_first, "q_out_plain_3x5"), (half, "q_out_half_3x5")]
    for rope, key in cases:
        rotation = rope(rope.positions(3, 5))
        assert_close(vr.rotate(vectors["q"], rotation), vectors[key], atol=2e-5, rtol=1e-5)


def test_golden_sam2_queries_and_repeated_keys(golden):
    vectors = golden("axial2d_sam2_ultralytics")
    rope = vr.preset("sam2", head_dim=32)
    positions = rope.positions(int(vectors["end_y"]), int(vectors["end_x"]))
    rotation = rope(positions)
    assert_close(rotation.cos[0], vectors["cis_real"], atol=2e-6, rtol=0)
    assert_close(vr.rotate(vectors["q"], rotation), vectors["q_out"], atol=2e-5, rtol=1e-5)
    assert_close(vr.rotate(vectors["k"], rope(positions.repeat(3, 1))), vectors["k_out"], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("base", [10000, 500000])
def test_golden_roformer_both_pairings(golden, base):
    vectors = golden("rope1d_interleaved")
    interleaved = vr.preset("roformer", head_dim=32, base=base)
    for start, key in ((0, "out"), (5, "out_offset5")):
        rotation = interleaved(interleaved.positions(11) + start)
        assert_close(vr.rotate(vectors["x"], rotation), vectors[f"{key}_base{base}"], atol=2e-5, rtol=1e-5)
    if base == 10000:
        far = interleaved(vectors["positions"].float()[:, None])
        for peer in ("timm", "complex"):
            assert_close(vr.rotate(vectors["x"], far), vectors[f"out_positions_{peer}"], atol=1e-3, rtol=1e-3)
        rotation = interleaved(interleaved.positions(11))
        assert_close(vr.rotate(vectors["x"], rotation), vectors["out_roformer_hf"], atol=2e-5, rtol=1e-5)
    vectors = golden("rope1d_half")
    half = vr.preset("roformer", head_dim=32, base=base, pairing="half")
    rotation = half(vectors["positions"].float()[:, None])
    assert_close(vr.rotate(vectors["x"], rotation), vectors[f"out_base{base}"], atol=1e-3, rtol=1e-3)


def weights_of(vectors, prefix="sd."):
    return {key.removeprefix(prefix): value for key, value in vectors.items() if key.startswith(prefix)}


def sam2_attention(weights, q, k, v, q_rotation, k_rotation, *, num_heads, out="out_proj"):
    """Attention as SAM 2 has it, with rotations in the place of its counts of unrotated keys."""

    def project(name, x):
        projected = linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
        return projected.unflatten(-1, (num_heads, -1)).transpose(-3, -2)

    queries = vr.rotate(project("q_proj", q), q_rotation)
    keys = vr.rotate(project("k_proj", k), k_rotation)
    mixed = vr.attend(queries, keys, project("v_proj", v)).transpose(-3, -2).flatten(-2)
    return linear(mixed, weights[f"{out}.weight"], weights[f"{out}.bias"])


def test_golden_sam2_attention_with_unrotated_keys(golden):
    """SAM 2 leaves the last keys unrotated: they sit at position zero, at the end. Failure class 10."""
    vectors = golden("sam2_rope_attention")
    rope = vr.preset("sam2", head_dim=16)
    grid = rope.positions(4, 4)
    keys = vr.with_prefix(grid.repeat(2, 1), 3, where="end")
    out = sam2_attention(
        weights_of(vectors), vectors["q"], vectors["k"], vectors["v"], rope(grid), rope(keys), num_heads=2
    )
    assert_close(out, vectors["out"], atol=2e-5, rtol=1e-5)
    assert_close(out, vectors["out_ultra"], atol=2e-5, rtol=1e-5)


def test_golden_sam2_attention_on_a_rectangle(golden):
    """transformers' SAM 2 video on 3 rows of 5, two stored frames and three pointers. Failure classes 1, 10 and 34."""
    vectors = golden("sam2video_rope_attention_nonsquare")
    rope = vr.preset("sam2", head_dim=16)
    grid = rope.positions(3, 5)
    assert torch.equal(grid.flip(-1), vectors["positions_xy"].float())
    keys = vr.with_prefix(grid.repeat(2, 1), 3, where="end")
    q, k, v = (vectors[name][:, 0] for name in "qkv")
    out = sam2_attention(weights_of(vectors), q, k, v, rope(grid), rope(keys), num_heads=2, out="o_proj")
    assert_close(out, vectors["out"], atol=2e-5, rtol=1e-5)
    assert_close(out, vectors["out_meta"], atol=2e-5, rtol=1e-5)


def test_golden_sam2_memory_attention(golden):
    """Two whole layers on 4 x 4 tokens, with two stored frames and four object pointers."""
    vectors = golden("sam2_memory_attention")
    weights = weights_of(vectors)
    rope = vr.preset("sam2", head_dim=32)
    grid = rope.positions(4, 4)
    queries, keys = rope(grid), rope(vr.with_prefix(grid.repeat(2, 1), 4, where="end"))
    curr, curr_pos, memory, memory_pos = (
        vectors[name].transpose(0, 1) for name in ("curr", "curr_pos", "memory", "memory_pos")
    )
    x = curr + 0.1 * curr_pos
    for layer in (0, 1):
        own = weights_of(weights, f"layers.{layer}.")

        def norm(name, x, own=own):
            return layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"])

        y = norm("norm1", x)
        x = x + sam2_attention(weights_of(own, "self_attn."), y, y, y, queries, queries, num_heads=1)
        y, cross = norm("norm2", x), weights_of(own, "cross_attn_image.")
        x = x + sam2_attention(cross, y, memory + memory_pos, memory, queries, keys, num_heads=1)
        hidden = linear(norm("norm3", x), own["linear1.weight"], own["linear1.bias"]).relu()
        x = x + linear(hidden, own["linear2.weight"], own["linear2.bias"])
    out = layer_norm(x, x.shape[-1:], weights["norm.weight"], weights["norm.bias"])
    assert_close(out.transpose(0, 1), vectors["out"], atol=2e-5, rtol=1e-5)


def test_golden_eva02_attention_with_class_token(golden):
    vectors = golden("timm_cat")
    weights = weights_of(vectors, "eva_sd.")
    bias = torch.cat((weights["q_bias"], torch.zeros(64), weights["v_bias"]))
    qkv = linear(vectors["eva_x"], weights["qkv.weight"], bias).unflatten(-1, (3, 2, 32))
    rope = vr.preset("eva02", head_dim=32, reference=(3, 5))
    q, k, v = vr.rotate_qkv(qkv, rope(vr.with_prefix(rope.positions(3, 5), 1)))
    out = linear(vr.attend(q, k, v).transpose(1, 2).flatten(2), weights["proj.weight"], weights["proj.bias"])
    assert_close(out, vectors["eva_out"], atol=2e-5, rtol=1e-5)


def timm_table(rotation, pairing="interleaved"):
    """timm's table (tokens, 2 * head_dim): sines, then cosines, each value at both channels of its pair."""
    parts = [rotation.sin[0], rotation.cos[0]]
    wide = [part.repeat(1, 2) if pairing == "half" else part.repeat_interleave(2, dim=-1) for part in parts]
    return torch.cat(wide, dim=-1)


def test_golden_timm_tables(golden):
    """Every grid of timm's class: offsets, references, centres, and the pixel bands, which are ladders, too."""
    vectors = golden("timm_cat")

    def table(rope, pairing="interleaved"):
        return timm_table(rope(rope.positions(3, 5)), pairing)

    rows_first = axial_ladders(32, 10000.0, columns_first=False)
    cases = {
        "plain_3x5": table(vr.preset("eva02", head_dim=32, reference=(3, 5))),
        "plain_xy_3x5": table(vr.preset("sam2", head_dim=32)),
        "xy_off1_3x5_ref24": table(vr.preset("perception-encoder", head_dim=32, reference=(24, 24))),
        "half_3x5": table(vr.preset("qwen2-vl-vision", head_dim=32), "half"),
        "centered_3x5": table(
            Rope(head_dim=32, axes=2, ladders=rows_first, coordinates=Coordinates(normalize="separate"))
        ),
    }
    for key, ours in cases.items():
        assert_close(ours, vectors[key], atol=2e-5, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    # Frequencies pi * 2 ** linspace(0, log2(224) - 1, 8), coordinates -1 .. 1 from edge to edge.
    octaves = math.log2(224) - 1
    bands = axial_ladders(32, 2**-octaves, columns_first=False, scale=math.pi, rungs=7)
    pixels = Rope(head_dim=32, axes=2, ladders=bands)(mesh([torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 5)]))
    assert_close(timm_table(pixels), vectors["pixels_3x5"], atol=1e-4, rtol=0)


def test_golden_ultralytics_scaled_positions(golden):
    vectors = golden("axial2d_sam2_ultralytics")
    rope = vr.preset("sam2", head_dim=32)
    positions = rope.positions(int(vectors["end_y"]), int(vectors["end_x"]))
    assert_close(rope(positions * 0.5).cos[0], vectors["cis_scale05_real"], atol=2e-6, rtol=0)
    assert_close(rope(positions * 0.5).sin[0], vectors["cis_scale05_imag"], atol=2e-6, rtol=0)
    assert_close(vr.rotate(vectors["q"], rope(positions)), vectors["q_out_ultra"], atol=2e-5, rtol=1e-5)
    assert_close(vr.rotate(vectors["k"], rope(positions.repeat(3, 1))), vectors["k_out_ultra"], atol=2e-5, rtol=1e-5)


def test_golden_llama_tables(golden):
    vectors = golden("rope1d_half")
    positions = vectors["positions"].float()[:, None]
    for base in (10000, 500000):
        rotation = vr.preset("llama", head_dim=32, base=base)(positions)
        assert_close(rotation.cos[0].repeat(1, 2), vectors[f"cos_base{base}"], atol=1e-3, rtol=0)
        assert_close(rotation.sin[0].repeat(1, 2), vectors[f"sin_base{base}"], atol=1e-3, rtol=0)
    default = vr.preset("llama", head_dim=32)(positions)
    assert_close(vr.rotate(vectors["x"], default), vectors["out_base500000"], atol=1e-3, rtol=1e-3)


def test_golden_qwen_vision_tower(golden):
    """An image of 4 x 6 and two frames of 2 x 4, their tokens in blocks of 2 x 2, packed one after the other."""
    vectors = golden("vision_towers")
    rope = vr.preset("qwen2-vl-vision", head_dim=80)
    image = rope.positions(4, 6)[vr.merge_order(4, 6)]
    video = rope.positions(2, 4).repeat(2, 1)[vr.merge_order(2, 2, 4)]
    positions, lengths = vr.pack_positions([image, video])
    assert lengths == [24, 16]
    assert torch.equal(positions, vectors["qwenvit_pos"].float())
    rotation = rope(positions)
    assert_close(rotation.cos[0].repeat(1, 2), vectors["qwenvit_cos"], atol=2e-6, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors["qwenvit_sin"], atol=2e-6, rtol=0)
    turned = vr.rotate(vectors["qwenvit_x"].transpose(0, 1), rotation).transpose(0, 1)
    assert_close(turned, vectors["qwenvit_out"], atol=2e-5, rtol=1e-5)


def test_golden_pixtral(golden):
    vectors = golden("vision_towers")
    rope = vr.preset("pixtral", head_dim=32)
    rotation = rope(rope.positions(3, 5))
    assert_close(rotation.cos[0].repeat(1, 2), vectors["pixtral_cos"], atol=2e-6, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors["pixtral_sin"], atol=2e-6, rtol=0)
    assert_close(vr.rotate(vectors["pixtral_x"], rotation), vectors["pixtral_out"], atol=2e-5, rtol=1e-5)


def test_golden_llama4_vision_with_the_class_token_last(golden):
    """Failure class 10: the prefix is a suffix here."""
    vectors = golden("vision_towers")
    rope = vr.preset("llama4-vision", head_dim=32)
    rotation = rope(vr.with_prefix(rope.positions(4, 4), 1, where="end"))
    assert_close(rotation.cos[0], vectors["llama4_cis_real"][:, 0], atol=2e-6, rtol=0)
    assert_close(rotation.sin[0], vectors["llama4_cis_imag"][:, 0], atol=2e-6, rtol=0)
    turned = vr.rotate(vectors["llama4_x"].transpose(1, 2), rotation).transpose(1, 2)
    assert_close(turned, vectors["llama4_out"], atol=2e-5, rtol=1e-5)


def test_golden_gemma4_vision(golden):
    vectors = golden("vision_towers")
    rope = vr.preset("gemma4-vision", head_dim=32)
    assert torch.equal(rope.positions(3, 5).flip(-1), vectors["gemma4_pos_xy"][0].float())
    rotation = rope(rope.positions(3, 5))
    turned = vr.rotate(vectors["gemma4_x"].transpose(1, 2), rotation).transpose(1, 2)
    assert_close(turned, vectors["gemma4_out"], atol=2e-5, rtol=1e-5)
    # Each axis has a half of the channels, and its values twice within that half.
    wide = rotation.cos[0].unflatten(-1, (2, 8)).repeat(1, 1, 2).flatten(1)
    assert_close(wide, vectors["gemma4_cos"][0], atol=2e-6, rtol=0)
    wide = rotation.sin[0].unflatten(-1, (2, 8)).repeat(1, 1, 2).flatten(1)
    assert_close(wide, vectors["gemma4_sin"][0], atol=2e-6, rtol=0)


def test_golden_perception_encoder(golden):
    vectors = golden("vision_towers")
    rope = vr.preset("perception-encoder", head_dim=32)
    positions = vr.with_prefix(rope.positions(3, 5), 1)
    rotation = rope(positions)
    angles = vectors["pe_cls_angles"][0, :, ::2]
    assert_close(rotation.cos[0], angles.cos(), atol=2e-6, rtol=0)
    assert_close(rotation.sin[0], angles.sin(), atol=2e-6, rtol=0)
    assert_close(vr.rotate(vectors["pe_cls_x"], rotation), vectors["pe_cls_out"], atol=2e-5, rtol=1e-5)
    without = vr.preset("perception-encoder", head_dim=32, offset=0)
    turned = vr.rotate(vectors["pe_cls_x"][:, :, 1:], without(without.positions(3, 5)))
    assert_close(turned, vectors["pe_nocls_out"], atol=2e-5, rtol=1e-5)


def test_golden_timm_mrope(golden):
    vectors = golden("vision_towers")
    rope = vr.preset("qwen3-vl", head_dim=64, base=10000.0, sections=(8, 12, 12))
    owner = (rope.frequencies[0, 0] > 0).long().argmax(0)
    assert torch.equal(owner, vectors["timm_mrope_axis"])
    rotation = rope(rope.positions(1, 3, 5))
    assert_close(timm_table(rotation, "half"), vectors["timm_mrope_64_8_12_12_3x5"], atol=2e-6, rtol=0)


@pytest.mark.parametrize("scheme", ["qwen2-vl", "qwen2.5-vl"])
def test_golden_qwen2_vl(golden, scheme):
    """Failure class 15: on text, an image and a video, where chunked and interleaved differ."""
    vectors = golden("qwen2vl_mrope")
    seconds = 1.0 if scheme == "qwen2.5-vl" else None
    segments = [vr.Text(3), vr.Image(2, 3), vr.Text(2), vr.Video(3, 2, 2, seconds), vr.Text(4)]
    positions = vr.multimodal_positions(segments, scheme)
    rope = vr.preset("qwen2-vl", head_dim=128)
    turned = vr.rotate(vectors["x"], rope(positions))
    assert_close(turned, vectors["x_out" if seconds is None else "x_out_qwen25"], atol=2e-5, rtol=1e-5)
    if seconds is None:
        # The peer's cos holds the angles of the whole ladder at t, h and w; the rotated x says which it picked.
        assert_close(rope.frequencies[0, 0].sum(0), vectors["inv_freq"], atol=1e-6, rtol=1e-5)
    wrong = vr.rotate(vectors["x"], vr.preset("qwen3-vl", head_dim=128, base=1e6)(positions))
    text = slice(0, 3)
    assert_close(wrong[:, :, text], turned[:, :, text], atol=2e-5, rtol=1e-5)
    assert not torch.allclose(wrong, turned, atol=1e-2)


def test_golden_qwen3_vl(golden):
    vectors = golden("qwen3vl_mrope_interleaved")
    rope = vr.preset("qwen3-vl", head_dim=128, base=5e5)
    rotation = rope(vectors["position_ids"].T.float())
    assert_close(rotation.cos[0].repeat(1, 2), vectors["cos"], atol=2e-5, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors["sin"], atol=2e-5, rtol=0)
    assert_close(vr.rotate(vectors["x"], rotation), vectors["x_out"], atol=2e-5, rtol=1e-5)
    rotation = vr.preset("qwen3-vl", head_dim=128)(vectors["rand_positions"].T.float())
    assert_close(rotation.cos[0].repeat(1, 2), vectors["cos_rand"], atol=2e-5, rtol=0)
    assert_close(rotation.sin[0].repeat(1, 2), vectors["sin_rand"], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "key"), [("videorope", "out_videorope"), ("qwen2-vl", "out_mrope")])
def test_golden_videorope(golden, name, key):
    vectors = golden("videorope")
    rotation = vr.preset(name, head_dim=128)(vectors["positions"].T)
    assert_close(vr.rotate(vectors["x"], rotation), vectors[key], atol=2e-5, rtol=1e-5)


def test_golden_v_jepa2_orthogonal(golden):
    """The file's own reference of the orthogonal form; `out`, what the released code gives, is no rotation."""
    vectors = golden("vjepa2_3d")
    rope = vr.preset("v-jepa2", head_dim=64)
    positions = rope.positions(2, 3, 4)
    assert torch.equal(positions, torch.stack([vectors[f"pos_{axis}"] for axis in "thw"], dim=-1).float())
    turned = vr.rotate(vectors["x"], rope(positions))
    assert_close(turned, vectors["out_fixed_ref"], atol=2e-5, rtol=1e-5)
    assert torch.equal(turned[..., 60:], vectors["x"][..., 60:])
    ratio = vectors["out"].norm(dim=-1) / vectors["x"].norm(dim=-1)
    assert (ratio - 1).abs().max() > 0.05


def test_golden_rotary_embedding_torch(golden):
    vectors = golden("rotary_embedding_torch")
    rope = vr.preset("v-jepa2", head_dim=48)  # three axes, a third of the pairs each: the same convention
    turned = vr.rotate(vectors["x"].flatten(1, 3)[:, None], rope(rope.positions(2, 3, 4)))
    assert_close(turned[:, 0], vectors["out"].flatten(1, 3), atol=2e-5, rtol=1e-5)
    line = vr.preset("roformer", head_dim=32)
    squeezed = vr.rotate(vectors["interp_x"], line(line.positions(11) / 2))
    assert_close(squeezed, vectors["interp_out"], atol=2e-5, rtol=1e-5)
    # Frequencies that are no ladder go through the one formula as well.
    bands = torch.block_diag(vectors["pixel_freqs"], vectors["pixel_freqs"])
    assert_close(vectors["pixel_freqs"], math.pi * torch.linspace(1, 128, 8))
    angle = angles(mesh([torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 5)]), bands)
    assert_close(angle.repeat_interleave(2, -1).unflatten(0, (3, 5)), vectors["pixel_axial_3x5"], atol=1e-4, rtol=1e-5)
