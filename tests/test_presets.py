"""Every preset against its formula written by hand, and the laws of a rotation, shown to fail where one is broken.

A check asserts one law of a function turn(x, positions); tests run it on every preset, and on variants that are broken
on purpose.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.rope_presets import PRESETS
from vision_rope.rotation import PAIRINGS

AXES = {1: "n", 2: "hw", 3: "thw"}
GRIDS = {1: (7,), 2: (3, 5), 3: (2, 3, 4)}


# --- formulas by hand: the axis and the frequency of each pair, "." where a pair does not turn ----------------------


def line(d, base):
    return [("n", base ** (-2 * i / d)) for i in range(d // 2)]


def axial(d, base, order):
    return [(axis, base ** (-4 * i / d)) for axis in order for i in range(d // 4)]


def periods(d):
    return [(axis, 2 * math.pi / 100 ** (4 * i / d)) for axis in "hw" for i in range(d // 4)]


def even_and_odd(d):
    return [("h", 10000 ** (-4 * i / d)) for i in range(d // 4)] + [
        ("w", 10000 ** (-(4 * i + 2) / d)) for i in range(d // 4)
    ]


def one_ladder(d, base, owners):
    return [(owner, base ** (-2 * j / d)) for j, owner in enumerate(owners[d])]


def thirds(d):
    pairs = (d // 3) // 2
    turning = [(axis, 10000 ** (-i / pairs)) for axis in "thw" for i in range(pairs)]
    return turning + [(".", 0.0)] * (d // 2 - len(turning))


def own_ladders(d):
    pairs = {16: (2, 3, 3), 24: (4, 4, 4), 64: (10, 11, 11), 128: (22, 21, 21)}[d]
    return [(axis, 100 ** (-i / count)) for axis, count in zip("thw", pairs, strict=True) for i in range(count)]


CHUNKS = {16: "tthhhwww", 64: "t" * 8 + "h" * 12 + "w" * 12, 128: "t" * 16 + "h" * 24 + "w" * 24}
DEALT = {16: "thwthwtt", 64: "thw" * 10 + "tt", 128: "thw" * 20 + "tttt"}
TIME_LAST = {16: "hwhwhwtt", 64: "hw" * 12 + "t" * 8, 128: "hw" * 24 + "t" * 16}

FORMULAS = {
    "roformer": lambda d: line(d, 10000),
    "llama": lambda d: line(d, 500000),
    "rope-vit-axial": lambda d: axial(d, 100, "wh"),
    "sam2": lambda d: axial(d, 10000, "wh"),
    "eva02": lambda d: axial(d, 10000, "hw"),
    "dinov3": periods,
    "perception-encoder": lambda d: axial(d, 10000, "wh"),
    "pixtral": even_and_odd,
    "llama4-vision": lambda d: axial(d, 10000, "wh"),
    "gemma4-vision": lambda d: axial(d, 100, "wh"),
    "qwen2-vl-vision": lambda d: axial(d, 10000, "hw"),
    "qwen2-vl": lambda d: one_ladder(d, 1000000, CHUNKS),
    "qwen3-vl": lambda d: one_ladder(d, 5000000, DEALT),
    "v-jepa2": thirds,
    "videorope": lambda d: one_ladder(d, 1000000, TIME_LAST),
    "axial-3d": own_ladders,
}
# Those with learned frequencies are drawn at random; test_golden compares the first with the peer's own draw.
LEARNED = ["rope-vit-mixed", "mixed-3d"]


def test_no_preset_is_without_its_formula():
    assert set(PRESETS) == {*FORMULAS, *LEARNED}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("name", FORMULAS)
def test_frequencies_are_those_of_the_formula(name, head_dim):
    rope = vr.preset(name, head_dim=head_dim)
    axes = AXES[rope.axes]
    expected = torch.zeros(rope.axes, head_dim // 2, dtype=torch.float64)
    for pair, (axis, frequency) in enumerate(FORMULAS[name](head_dim)):
        if axis != ".":
            expected[axes.index(axis), pair] = frequency
    assert_close(rope.frequencies[0, 0], expected.float(), atol=0, rtol=1e-6)


HALVES = ("llama", "dinov3", "pixtral", "qwen2-vl-vision", "qwen2-vl", "qwen3-vl", "videorope")
PAIRING_OF = dict.fromkeys(HALVES, "half") | {"gemma4-vision": "half-per-axis"}


@pytest.mark.parametrize("name", PRESETS)
def test_pairings_and_coordinates_are_those_of_the_field(name):
    rope = vr.preset(name, head_dim=16)
    assert rope.pairing == PAIRING_OF.get(name, "interleaved")
    own = vr.grid_positions(*GRIDS[rope.axes])
    if name == "eva02":
        own = own * 16 / torch.tensor([3.0, 5.0])
    elif name == "dinov3":
        own = 2 * (own + 0.5) / torch.tensor([3.0, 5.0]) - 1
    elif name in ("perception-encoder", "llama4-vision"):
        own = own + 1
    elif name == "videorope":
        own = vr.multimodal_positions([vr.Video(*GRIDS[3])], "videorope")
    assert_close(rope.positions(*GRIDS[rope.axes]), own)


def test_the_numbers_of_roformer():
    """Scores by hand, as printed in the issue: equal at equal offsets, and a turned query keeps its length."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 64)
    rope = vr.preset("roformer", head_dim=64)

    def turn(x, position):
        return vr.rotate(x[None, None], rope(torch.tensor([[float(position)]])))[0, 0]

    for (m, n), score in {(5, 2): -8.2811, (105, 102): -8.2811, (5, 4): -11.4563}.items():
        assert_close(turn(q, m) @ turn(k, n), torch.tensor(score), atol=1e-4, rtol=0)
    assert_close(turn(q, 5).norm(), torch.tensor(8.3705), atol=1e-4, rtol=0)


# --- the laws -------------------------------------------------------------------------------------------------------


def channels_of(pair, head_dim, pairing):
    """The two channels of a pair, by the words of `Rotation`."""
    if pairing == "interleaved":
        return 2 * pair, 2 * pair + 1
    if pairing == "half":
        return pair, pair + head_dim // 2
    quarter = head_dim // 4
    start = 0 if pair < quarter else head_dim // 2
    return start + pair % quarter, start + pair % quarter + quarter


def check_norms(turn, rope):
    x = torch.randn(3, 20, rope.head_dim)
    positions = 30 * torch.rand(20, rope.axes)
    assert_close(turn(x, positions).norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5)


def check_offsets(turn, rope):
    """Scores depend on offsets only: all positions moved along all axes give the same scores."""
    q, k = torch.randn(2, 3, 20, rope.head_dim)
    positions = torch.randint(0, 20, (20, rope.axes)).float()
    moved = positions + torch.randint(50, 100, (rope.axes,)).float()
    scores = turn(q, positions) @ turn(k, positions).transpose(-1, -2)
    assert_close(turn(q, moved) @ turn(k, moved).transpose(-1, -2), scores, atol=2e-4, rtol=1e-4)


def check_zero(turn, rope):
    """Position zero is the identity to the bit, in each dtype, between tokens that do turn."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, 7, rope.head_dim).to(dtype)
        positions = vr.with_prefix(rope.positions(*[1] * rope.axes) + 3, 5)
        positions = vr.with_prefix(positions, 1, where="end")
        turned = turn(x, positions)
        still = [0, 1, 2, 3, 4, 6]
        assert torch.equal(turned[:, still], x[:, still])
        assert not torch.equal(turned[:, 5], x[:, 5])


def check_sums(turn, rope):
    """R(a) R(b) = R(a + b)."""
    x = torch.randn(3, 20, rope.head_dim)
    a, b = torch.randint(0, 60, (2, 20, rope.axes)).float()
    assert_close(turn(turn(x, a), b), turn(x, a + b), atol=1e-4, rtol=1e-4)


def check_transpose(turn, rope):
    """Failure classes 1 and 2: a grid and its transpose have as many tokens, and other angles."""
    *lead, h, w = GRIDS[rope.axes]
    wide, tall = rope.positions(*lead, h, w), rope.positions(*lead, w, h)
    x = torch.randn(3, 1, rope.head_dim).expand(-1, len(wide), -1)
    by_wide = turn(x, wide)
    swapped = by_wide.unflatten(1, (-1, h, w)).transpose(2, 3).flatten(1, 3)
    assert not torch.allclose(turn(x, tall), by_wide, atol=1e-3)
    assert not torch.allclose(turn(x, tall), swapped, atol=1e-3)


def check_axes_and_channels(turn, rope):
    """A step along one axis of a grid turns the channels of that axis's pairs, within each pair, and no others."""
    size = GRIDS[rope.axes]
    positions = rope.positions(*size)
    every = "*" * (rope.head_dim // 2)  # learned frequencies: every pair turns with every axis
    owners = [axis for axis, _ in FORMULAS[rope.name](rope.head_dim)] if rope.name in FORMULAS else every
    strides = [math.prod(size[axis + 1 :]) for axis in range(rope.axes)]
    for axis, stride in zip(AXES[rope.axes], strides, strict=True):
        for pair, owner in enumerate(owners):
            first, second = channels_of(pair, rope.head_dim, rope.pairing)
            x = torch.zeros(1, len(positions), rope.head_dim)
            x[..., first] = 1.0
            turned = turn(x, positions)[0]
            others = [channel for channel in range(rope.head_dim) if channel not in (first, second)]
            assert not turned[:, others].any()
            # On VideoRoPE's diagonal rows and columns go with time.
            takes_part = owner in (axis, "*") or (rope.name == "videorope" and axis == "t")
            assert torch.equal(turned[0], turned[stride]) == (not takes_part)


def check_formula(turn, rope):
    """Failure classes 4 and 11: each pair turned once, by the angle of the formula, in float64 and far out."""
    x = torch.randn(1, 30, rope.head_dim)
    positions = torch.randint(0, 4096, (30, rope.axes)).float()
    frequencies = rope.frequencies[0, 0].detach().double()
    if rope.name in FORMULAS:  # frequencies in float32 would be too coarse at 4096
        for pair, (axis, frequency) in enumerate(FORMULAS[rope.name](rope.head_dim)):
            if axis != ".":
                frequencies[AXES[rope.axes].index(axis), pair] = frequency
    else:
        positions = positions % 32
    expected = x[0].double().clone()
    for pair in range(rope.head_dim // 2):
        first, second = channels_of(pair, rope.head_dim, rope.pairing)
        angle = positions.double() @ frequencies[:, pair]
        a, b = x[0, :, first].double(), x[0, :, second].double()
        expected[:, first] = a * angle.cos() - b * angle.sin()
        expected[:, second] = a * angle.sin() + b * angle.cos()
    assert_close(turn(x, positions)[0].double(), expected, atol=1e-5, rtol=0)


CHECKS = {
    "norms": check_norms,
    "offsets": check_offsets,
    "zero": check_zero,
    "sums": check_sums,
    "transpose": check_transpose,
    "axes": check_axes_and_channels,
    "formula": check_formula,
}


def make(name, pairing, head_dim=16):
    return vr.preset(name, head_dim=head_dim, num_heads=1, pairing=pairing)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", PRESETS)
def test_laws_of_every_preset(name, pairing):
    rope = make(name, pairing)
    for law, check in CHECKS.items():
        if law != "transpose" or rope.axes > 1:  # a line has no transpose
            check(lambda x, positions: vr.rotate(x, rope(positions)), rope)


# --- the checks fail where something is broken ----------------------------------------------------------------------


def turn_with_mixed_pairing(rope):
    """cos and sin laid out for halves, applied to neighbouring channels, as V-JEPA 2's released code does."""

    def turn(x, positions):
        rotation = rope(positions)
        cos, sin = rotation.cos.repeat(1, 1, 2), rotation.sin.repeat(1, 1, 2)
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return (x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin).to(x.dtype)

    return turn


def turn_with_bf16_angles(rope):
    def turn(x, positions):
        frequencies = rope.frequencies[0].detach().bfloat16()
        angle = sum(positions.bfloat16()[:, axis, None] * frequencies[:, axis, None] for axis in range(rope.axes))
        return vr.rotate(x, vr.Rotation(angle.float().cos(), angle.float().sin(), rope.pairing))

    return turn


def turn_with_bf16_positions(rope):
    return lambda x, positions: vr.rotate(x, rope(positions.bfloat16().float()))


def turn_with_swapped_axes(rope):
    return lambda x, positions: vr.rotate(x, rope(torch.cat((positions[:, :-2], positions[:, -2:].flip(-1)), dim=-1)))


def turn_with_other_pairing(rope):
    other = "half" if rope.pairing == "interleaved" else "interleaved"
    return lambda x, positions: vr.rotate(x, vr.Rotation(rope(positions).cos, rope(positions).sin, other))


def turn_from_one(rope):
    """Positions that begin at one, prefix tokens included."""
    return lambda x, positions: vr.rotate(x, rope(positions + 1))


def turn_twice(rope):
    return lambda x, positions: vr.rotate(vr.rotate(x, rope(positions)), rope(positions))


def turn_by_token_count(rope):
    """A table that is used again because the number of tokens is the same."""
    tables = {}

    def turn(x, positions):
        return vr.rotate(x, tables.setdefault(len(positions), rope(positions)))

    return turn


def turn_with_absolute_scale(rope):
    """xPos without its inverse for keys: lengths depend on the place."""
    return lambda x, positions: vr.rotate(x, rope(positions)) * (1 + positions[:, :1] / 100)


BROKEN = [
    (turn_with_mixed_pairing, ["norms", "offsets", "sums", "formula", "axes"]),
    (turn_with_bf16_angles, ["offsets", "sums", "formula"]),
    (turn_with_bf16_positions, ["formula"]),
    (turn_with_swapped_axes, ["formula", "axes"]),
    (turn_with_other_pairing, ["formula", "axes"]),
    (turn_from_one, ["zero", "sums", "formula"]),
    (turn_twice, ["formula"]),
    (turn_by_token_count, ["transpose", "sums"]),
    (turn_with_absolute_scale, ["norms", "offsets", "formula"]),
]


@pytest.mark.parametrize("name", ["rope-vit-axial", "dinov3", "qwen3-vl", "v-jepa2"])
@pytest.mark.parametrize(("broken", "caught_by"), BROKEN)
def test_broken_variants_are_caught(broken, caught_by, name):
    """Failure classes 1, 2, 4, 10, 11, 15: swapped axes, mixed pairings, bf16 angles and their kin fail the checks."""
    rope = vr.preset(name, head_dim=64)
    for check in caught_by:
        with pytest.raises(AssertionError):
            CHECKS[check](broken(rope), rope)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(("broken", "caught_by"), BROKEN)
def test_broken_variants_of_the_learned_presets_are_caught(broken, caught_by, name):
    rope = vr.preset(name, head_dim=64)
    for check in caught_by:
        # Every pair turns with both axes here, and the formula is checked near zero alone, where bf16 counts exactly.
        if check != "axes" and broken is not turn_with_bf16_positions:
            with pytest.raises(AssertionError):
                CHECKS[check](broken(rope), rope)


# --- options --------------------------------------------------------------------------------------------------------


def test_sections_of_m_rope_scale_and_can_be_given():
    def counts(name, head_dim, **options):
        rope = vr.preset(name, head_dim=head_dim, **options)
        return [int((rope.frequencies[0, 0, axis] > 0).sum()) for axis in range(3)]

    assert counts("qwen2-vl", 128) == counts("videorope", 128) == [16, 24, 24]
    assert counts("qwen3-vl", 128) == [24, 20, 20]
    assert counts("qwen2-vl", 64) == [8, 12, 12]
    assert counts("qwen3-vl", 64) == [12, 10, 10]
    assert counts("qwen2-vl", 64, sections=(12, 10, 10)) == [12, 10, 10]
    assert counts("qwen3-vl", 64, sections=(8, 12, 12)) == [11, 11, 10]  # dealt out beyond the last pair
    assert counts("qwen3-vl", 128, sections=(16, 24, 24)) == [22, 21, 21]
    assert counts("videorope", 64, sections=(13, 10, 9)) == [13, 10, 9]
    for name in ("qwen2-vl", "qwen3-vl", "videorope"):
        assert counts(name, 6) == [1, 1, 1]
        for head_dim in range(6, 140, 2):
            time, rows, columns = counts(name, head_dim)
            assert time + rows + columns == head_dim // 2
            assert min(time, rows, columns) >= 1


@pytest.mark.parametrize("sections", [(16, 24), (0, 32, 32), (16, 24, 25), (-16, 40, 40)])
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl", "videorope"])
def test_sections_that_do_not_fit_are_refused(name, sections):
    with pytest.raises(ValueError, match=rf"sections is .* for {name} .* sum 64"):
        vr.preset(name, head_dim=128, sections=sections)


def test_videorope_alternates_rows_and_columns():
    with pytest.raises(ValueError, match="h must equal w or be one more"):
        vr.preset("videorope", head_dim=128, sections=(16, 20, 28))


def test_options_of_image_towers():
    assert vr.preset("perception-encoder", offset=0).positions(2, 2)[0].tolist() == [0, 0]
    assert vr.preset("perception-encoder", reference=(4, 4)).positions(2, 2)[0].tolist() == [2, 2]
    assert vr.preset("llama4-vision", offset=0.5).positions(2, 2)[0].tolist() == [0.5, 0.5]
    llama = vr.preset("llama", head_dim=16, base=10000.0, pairing="interleaved")
    assert torch.equal(llama.frequencies, vr.preset("roformer", head_dim=16).frequencies)


def test_chunked_and_interleaved_m_rope_agree_on_text_alone():
    """Failure class 15: text cannot tell them apart, an image and a video can."""
    chunked, dealt = (vr.preset(name, head_dim=128, base=1e6) for name in ("qwen2-vl", "qwen3-vl"))
    text = vr.multimodal_positions([vr.Text(9)], "qwen2-vl")
    assert torch.equal(chunked(text).cos, dealt(text).cos)
    assert torch.equal(chunked(text).cos, vr.preset("llama", head_dim=128, base=1e6)(text[:, :1]).cos)
    for segment in (vr.Image(3, 4), vr.Video(2, 3, 4)):
        positions = vr.multimodal_positions([vr.Text(2), segment], "qwen2-vl")
        assert not torch.allclose(chunked(positions).cos, dealt(positions).cos, atol=1e-2)


def test_text_turns_as_in_one_dimension():
    for name in ("qwen2-vl", "qwen3-vl", "videorope"):
        rope = vr.preset(name, head_dim=64, base=1e6)
        line = vr.preset("roformer", head_dim=64, base=1e6)
        index = line.positions(20)
        assert torch.equal(rope(index.expand(-1, 3)).sin, line(index).sin)


def test_a_constant_offset_shows_against_the_class_token_alone():
    """Perception Encoder counts from 1 beside a class token at 0: scores between patches stay."""
    one, zero = (vr.preset("perception-encoder", head_dim=32, offset=offset) for offset in (1, 0))
    q, k = torch.randn(2, 1, 2, 16, 32)

    def scores(rope):
        rotation = rope(vr.with_prefix(rope.positions(3, 5), 1))
        return vr.rotate(q, rotation) @ vr.rotate(k, rotation).transpose(-1, -2)

    assert_close(scores(one)[..., 1:, 1:], scores(zero)[..., 1:, 1:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores(one)[..., 0, 1:], scores(zero)[..., 0, 1:], atol=1e-2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_on_meta(name):
    rope = vr.preset(name, head_dim=16, num_heads=2, depth=2).to("meta")
    positions = rope.positions(*GRIDS[rope.axes], device="meta")
    rotation = rope(positions)
    assert rotation.cos.device.type == "meta"
    assert rotation.cos.shape[-2:] == (len(positions), 8)


def test_mixed_3d_begins_with_three_directions_at_right_angles():
    """In each layer and head its own, with the magnitudes and the split of axial-3d, base 10."""
    rope = vr.preset("mixed-3d", head_dim=64, num_heads=3, depth=2)
    parts = rope.frequencies.detach().split((10, 11, 11), dim=-1)
    for part in parts:
        count = part.shape[-1]
        magnitudes = torch.tensor([10 ** (-i / count) for i in range(count)])
        assert_close(part.norm(dim=-2), magnitudes.expand(2, 3, -1), atol=1e-6, rtol=1e-5)
    first = torch.stack([part[..., 0] for part in parts], dim=-1)
    assert_close(first.mT @ first, torch.eye(3).expand(2, 3, 3, 3), atol=1e-5, rtol=0)
    assert len({tuple(row) for row in first.reshape(6, 9).tolist()}) == 6
    again, other = (
        vr.preset("mixed-3d", head_dim=64, generator=torch.Generator().manual_seed(seed)).frequencies for seed in (1, 2)
    )
    same = vr.preset("mixed-3d", head_dim=64, generator=torch.Generator().manual_seed(1)).frequencies
    assert torch.equal(again, same)
    assert not torch.equal(again, other)
    assert_close(vr.preset("mixed-3d", head_dim=64, base=100.0).frequencies[0, 0, :, 1].norm().item(), 100 ** (-1 / 10))


def test_videorope_takes_another_scale_of_time():
    rope = vr.preset("videorope", head_dim=64, time_scale=0.5)
    expected = vr.multimodal_positions([vr.Video(3, 2, 5)], "videorope", time_scale=0.5)
    assert torch.equal(rope.positions(3, 2, 5), expected)
    with pytest.raises(ValueError, match="diagonal is 0; it must be a positive number"):
        vr.preset("videorope", head_dim=64, time_scale=0)


# --- heads that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "head_dim", "nearest"), [
    ("roformer", 9, 8), ("llama", 1, 2), ("pixtral", 10, 8), ("gemma4-vision", 18, 16), ("qwen2-vl-vision", 6, 8),
    ("qwen2-vl", 4, 6), ("qwen3-vl", 9, 8), ("v-jepa2", 2, 6), ("v-jepa2", 65, 64), ("videorope", 0, 6),
    ("axial-3d", 4, 6), ("mixed-3d", 7, 6),
])  # fmt: skip
def test_heads_that_do_not_fit_are_refused(name, head_dim, nearest):
    """Failure class 8: the rule and the nearest head that fits."""
    with pytest.raises(ValueError, match=rf"head_dim is {head_dim}; it must be .* for instance {nearest}:"):
        vr.preset(name, head_dim=head_dim)
    vr.preset(name, head_dim=nearest)


@pytest.mark.parametrize(("head_dim", "rest"), [(6, 0), (8, 1), (10, 2), (18, 0), (64, 2), (80, 1), (128, 1)])
def test_v_jepa2_leaves_the_documented_rest_unrotated(head_dim, rest):
    """Failure class 8: any even head of at least six channels; pairs that no axis owns stay as they are."""
    rope = vr.preset("v-jepa2", head_dim=head_dim)
    still = rope.frequencies[0, 0].sum(0) == 0
    assert int(still.sum()) == rest
    x = torch.randn(2, 24, head_dim)
    turned = vr.rotate(x, rope(rope.positions(2, 3, 4) + 1))
    assert torch.equal(turned[..., head_dim - 2 * rest :], x[..., head_dim - 2 * rest :])
    assert (turned[..., : head_dim - 2 * rest] != x[..., : head_dim - 2 * rest]).all()


@pytest.mark.parametrize("name", [name for name in PRESETS if vr.preset(name, head_dim=24).axes == 1])
def test_presets_without_a_grid_of_images_are_refused_by_timm_models(name):
    with pytest.raises(ValueError, match=rf"{name}.* has axes 1 and the model needs 2 or 3; choose a 2D or 3D preset"):
        vr.create_model("vit_tiny_patch16_224", position=name, depth=1, num_classes=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rope-vit-axial", {"head_dim": "64"}, "head_dim is '64'; it must be a positive integer"),
        ("rope-vit-axial", {"head_dim": 64.0}, "head_dim is 64.0; it must be a positive integer"),
        ("rope-vit-mixed", {"num_heads": True}, "num_heads is True; it must be a positive integer"),
        ("rope-vit-mixed", {"depth": None}, "depth is None; it must be a positive integer"),
        (
            "perception-encoder",
            {"reference": True},
            r"reference is True; it must be a grid of tokens \(rows, columns\)",
        ),
        ("eva02", {"reference": 16}, r"reference is 16; .* for instance \(16, 16\)"),
        ("eva02", {"reference": "ab"}, "reference is 'ab'"),
        (
            "rope-vit-mixed",
            {"heads": 6},
            "head_dim, num_heads, depth, base, pairing, generator; did you mean 'num_heads'",
        ),
        ("llama", {"pairing": "halves"}, "pairing is 'halves'; choose one of interleaved, .*; did you mean 'half'"),
    ],
)
def test_wrong_values_are_named_with_the_rule(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vr.preset(name, **options)
