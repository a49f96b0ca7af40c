"""Context extension against the numbers of its peers: golden vectors, and those that are installed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr

ONE_LADDER = ["qwen2-vl", "qwen3-vl", "videorope"]


def line(head_dim: int = 64, **options: object) -> vr.Rope:
    return vr.preset("roformer", head_dim=head_dim, pairing="half", **options)


def extended_line(rope: vr.Rope, method: str, trained: int, new: int, **knobs: object) -> tuple[torch.Tensor, float]:
    """Frequencies and the peers' factor of cos and sin; ours goes to the softmax scale, so it is squared."""
    extended = vr.extend(rope, method, train_size=(trained,), size=(new,), **knobs)
    return extended.frequencies[0, 0, 0], math.sqrt(extended(extended.positions(2)).attention_scale)


# --- golden vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "method", "base", "trained", "new", "knobs"),
    [
        ("linear4", "interpolate", 1e4, 256, 1024, {}),
        ("dynamic2_seq256", "dynamic-ntk", 1e4, 256, 256, {}),
        ("dynamic2_seq1024", "dynamic-ntk", 1e4, 256, 1024, {"factor": 2.0}),
        ("yarn4_orig256", "yarn", 1e4, 256, 1024, {}),
        ("yarn4_orig256_notrunc", "yarn", 1e4, 256, 1024, {"truncate": False}),
        ("yarn16_orig4096", "yarn", 1e4, 4096, 65536, {}),
        ("llama3_8", "llama3", 5e5, 8192, 65536, {}),
    ],
)
def test_golden_language(golden, key, method, base, trained, new, knobs):
    vectors = golden("context_extension_1d")
    frequencies, factor = extended_line(line(base=base), method, trained, new, **knobs)
    assert_close(frequencies, vectors[key], atol=1e-7, rtol=1e-5)
    assert_close(factor, vectors[f"{key}_attn"].item(), rtol=1e-6, atol=0)


def fit_rope() -> vr.Rope:
    """FiT turns the first half of the pairs with the row, at base 10000."""
    return vr.preset("qwen2-vl-vision", head_dim=72)


@pytest.mark.parametrize("factors", ["separate", "max"])
@pytest.mark.parametrize(
    ("method", "key"),
    [("interpolate", "linear"), ("ntk", "ntk-aware"), ("ntk-by-parts", "ntk-by-parts"), ("yarn", "yarn")],
)
def test_golden_vision(golden, method, key, factors):
    """FiT: a 16 x 16 model at 20 x 32, an axis at a time (decouple) or all axes by the largest factor."""
    vectors = golden("fit_vision_ntk_yarn")
    trained, size = int(vectors["ori"]), (int(vectors["H"]), int(vectors["W"]))
    rope = vr.extend(fit_rope(), method, train_size=(trained, trained), size=size, factors=factors)
    end = "_decouple" if factors == "separate" else ""
    frequencies = rope.frequencies[0, 0]
    assert_close(frequencies[0, :18], vectors[f"freqs_h_{key}{end}"], atol=1e-7, rtol=1e-5)
    assert_close(frequencies[1, 18:], vectors[f"freqs_w_{key}{end}"], atol=1e-7, rtol=1e-5)
    if method == "yarn" and factors == "max":  # FiT's temperature is always that of the largest factor
        scale = rope(rope.positions(2, 2)).attention_scale
        assert_close(math.sqrt(scale), vectors["mscale_yarn"][0].item(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("method", "key"), [("none", "normal"), ("ntk", "ntk-aware"), ("yarn", "yarn")])
def test_golden_vision_output(golden, method, key):
    """FiT multiplies cos and sin of yarn by its temperature; without that its output is ours."""
    vectors = golden("fit_vision_ntk_yarn")
    trained, size = int(vectors["ori"]), (int(vectors["H"]), int(vectors["W"]))
    rope = vr.extend(fit_rope(), method, train_size=(trained, trained), size=size)
    columns, rows = vectors["grid_wh"][0].float()
    rotation = rope(torch.stack((rows, columns), dim=-1))
    assert rotation.pairing == "half"
    rotation = vr.Rotation(rotation.cos, rotation.sin, "interleaved", rotation.attention_scale)
    wanted = vectors[f"out_{key}"] / (vectors["mscale_yarn"][0].float() if method == "yarn" else 1.0)
    assert_close(vr.rotate(vectors["x"], rotation), wanted, atol=2e-5, rtol=1e-5)


def test_golden_rotary_embedding_torch(golden):
    vectors = golden("rotary_embedding_torch")
    rope = vr.preset("roformer", head_dim=vectors["interp_x"].shape[-1])
    for key, method, factor in [("interp_out", "interpolate", 2), ("ntk_out", "ntk", 4)]:
        extended = vr.extend(rope, method, train_size=(10,), size=(10 * factor,))
        rotation = extended(extended.positions(vectors["interp_x"].shape[-2]))
        assert_close(vr.rotate(vectors["interp_x"], rotation), vectors[key], atol=2e-5, rtol=1e-5)


# --- transformers ---------------------------------------------------------------------------------------------------


def transformers_parameters(kind, *, head_dim, base, trained, factor, length=None, **options):
    """inv_freq and attention factor of transformers."""
    configuration = pytest.importorskip("transformers").LlamaConfig(
        head_dim=head_dim,
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=trained,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": trained,
            **options,
        },
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](configuration, None, seq_len=length)


def drawn(seed: int) -> tuple[int, float, int, int]:
    """head_dim, base, trained length and a longer one."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    trained = integer(8, 3000)
    return 2 * integer(4, 65), 10.0 ** integer(1, 7), trained, trained + integer(1, 8 * trained)


@pytest.mark.filterwarnings("ignore")  # transformers warns about lengths that its configuration did not expect
@pytest.mark.parametrize("seed", range(8))
def test_transformers_on_random_lengths(seed):
    head_dim, base, trained, new = drawn(seed)
    common = {"head_dim": head_dim, "base": base, "trained": trained, "factor": new / trained}
    rope = line(head_dim, base=base)
    generator = torch.Generator().manual_seed(seed)
    slow, fast = (torch.rand(2, generator=generator) * 4 + torch.tensor([0.2, 5.0])).tolist()
    stretch = 1.0 + 3 * torch.rand(1, generator=generator).item()
    cases = [
        ("linear", "interpolate", {}, {}),
        ("llama3", "llama3", *2 * [{"low_freq_factor": slow, "high_freq_factor": fast}]),
        ("dynamic", "dynamic-ntk", {"factor": stretch, "length": new}, {"factor": stretch}),
        ("yarn", "yarn", {}, {}),
        ("yarn", "yarn", *2 * [{"truncate": False}]),
        ("yarn", "yarn", *2 * [{"beta_fast": fast, "beta_slow": slow}]),
        ("yarn", "yarn", *2 * [{"beta_fast": fast, "beta_slow": slow, "truncate": False}]),
    ]
    for kind, method, theirs, ours in cases:
        wanted, wanted_factor = transformers_parameters(kind, **{**common, **theirs})
        frequencies, factor = extended_line(rope, method, trained, new, **ours)
        assert_close(frequencies, wanted, rtol=2e-5, atol=0, msg=lambda text, m=method, o=ours: f"{m} {o}: {text}")
        assert_close(factor, wanted_factor, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_upper_bound_of_yarns_ramp_is_that_of_transformers():
    """With a small base every rung turns more than once: the ramp ends at d - 1, in units of pairs."""
    wanted, _ = transformers_parameters("yarn", head_dim=64, base=10.0, trained=4096, factor=4.0)
    rope = line(base=10.0)
    frequencies, _ = extended_line(rope, "yarn", 4096, 16384)
    assert_close(frequencies, wanted, rtol=2e-5, atol=0)
    last = frequencies[-1] / rope.frequencies[0, 0, 0, -1]
    # The ramp goes from the rung that turns 32 times to 63; without the bound it would end at the one that turns once.
    low = math.floor(32 * math.log(4096 / (64 * math.pi)) / math.log(10))
    assert_close(last.item(), 1 - 0.75 * max(0, (31 - low) / (63 - low)), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_yarn_where_both_limits_fall_on_the_first_rung():
    wanted, _ = transformers_parameters("yarn", head_dim=16, base=1e4, trained=4, factor=3.0)
    rope = line(16, base=1e4)
    frequencies, _ = extended_line(rope, "yarn", 4, 12)
    assert_close(frequencies, wanted, rtol=2e-5, atol=0)
    assert_close((frequencies / rope.frequencies[0, 0, 0])[:2], torch.tensor([1.0, 1 / 3]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ONE_LADDER)
@pytest.mark.parametrize(
    ("kind", "method", "theirs"),
    [("linear", "interpolate", {}), ("dynamic", "dynamic-ntk", {"factor": 2.0, "length": 900}), ("yarn", "yarn", {})],
)
def test_one_ladder_split_over_axes_is_extended_as_text_is(name, kind, method, theirs):
    """M-RoPE's dimension is that of the whole ladder: equal lengths of all axes give transformers' numbers."""
    rope = vr.preset(name, head_dim=128)
    common = {"head_dim": 128, "base": rope.ladders[0].base, "trained": 300, "factor": 3.0}
    wanted, wanted_factor = transformers_parameters(kind, **{**common, **theirs})
    extended = vr.extend(rope, method, train_size=(300,) * 3, size=(900,) * 3)
    # Each pair turns with one axis alone.
    assert_close(extended.frequencies[0, 0].sum(0).sort(descending=True).values, wanted, rtol=2e-5, atol=0)
    assert_close(math.sqrt(extended(extended.positions(1, 2, 2)).attention_scale), wanted_factor, rtol=1e-6, atol=0)


# --- rotary-embedding-torch and timm --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_rotary_embedding_torch_on_random_lengths(seed):
    peer = pytest.importorskip("rotary_embedding_torch").RotaryEmbedding
    head_dim, base, trained, new = drawn(seed)
    x = torch.randn(1, 2, 9, head_dim, generator=torch.Generator().manual_seed(seed))
    rope = vr.preset("roformer", head_dim=head_dim, base=base)
    for method, name in [("interpolate", "interpolate_factor"), ("ntk", "theta_rescale_factor")]:
        wanted = peer(dim=head_dim, theta=base, **{name: new / trained}).rotate_queries_or_keys(x)
        extended = vr.extend(rope, method, train_size=(trained,), size=(new,))
        assert_close(vr.rotate(x, extended(extended.positions(9))), wanted, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sam2", {"grid_indexing": "xy"}),
        ("rope-vit-axial", {"grid_indexing": "xy", "temperature": 100.0}),
        ("perception-encoder", {"grid_indexing": "xy", "grid_offset": 1.0}),
        ("qwen2-vl-vision", {"grid_indexing": "ij"}),
    ],
)
@pytest.mark.parametrize("size", [(24, 20), (16, 33), (17, 16)])
def test_interpolation_is_timms_reference_grid(name, options, size):
    layers = pytest.importorskip("timm.layers")
    options = {"temperature": 10000.0, **options}
    peer = layers.RotaryEmbeddingCat(
        64, in_pixels=False, feat_shape=list(size), ref_feat_shape=[16, 16], **options
    ).get_embed()
    rope = vr.extend(vr.preset(name), "interpolate", train_size=(16, 16), size=size)
    rotation = rope(rope.positions(*size))
    sin, cos = peer.chunk(2, dim=-1)  # each value twice, for the two channels of a pair
    assert_close(rotation.sin[0], sin[:, ::2], atol=5e-6, rtol=0)
    assert_close(rotation.cos[0], cos[:, ::2], atol=5e-6, rtol=0)
