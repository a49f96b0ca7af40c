"""Rope: the laws and the contract for every preset, and bad input."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.frequencies import Ladder, ladder
from vision_rope.rope import Rope
from vision_rope.rope_presets import PRESETS
from vision_rope.rotation import PAIRINGS

SIZES = {1: (7,), 2: (3, 5), 3: (2, 3, 4)}
LEARNED = [name for name in PRESETS if vr.preset(name, head_dim=16).ladders is None]
FIXED = [name for name in PRESETS if name not in LEARNED]


def make(name, **options):
    return vr.preset(name, head_dim=16, num_heads=3, depth=2, **options)


def brute_force_angles(rope, positions, layer=0):
    """The formula of the design as plain loops in float64."""
    frequencies = rope.frequencies.detach().double()[layer % len(rope.frequencies)].clone()
    for axis, rungs in enumerate(rope.ladders or ()):
        for slot, rung in zip(rungs.slots, rungs.rungs, strict=True):
            frequencies[0, axis, slot] = rungs.scale * math.exp(-math.log(rungs.base) * rung / rungs.pairs)
    heads, axes, pairs = frequencies.shape
    out = torch.zeros(heads, len(positions), pairs, dtype=torch.float64)
    for head in range(heads):
        for token in range(len(positions)):
            for pair in range(pairs):
                out[head, token, pair] = sum(
                    positions[token, axis].item() * frequencies[head, axis, pair].item() for axis in range(axes)
                )
    return out


# --- laws, for every row of PRESETS ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", PRESETS)
def test_contract_of_every_preset(name, pairing):
    rope = make(name, pairing=pairing)
    assert isinstance(rope, vr.Rope)
    assert (rope.head_dim, rope.pairing) == (16, pairing)
    depth, heads, axes, pairs = rope.frequencies.shape
    assert (axes, pairs) == (rope.axes, 8)
    assert (depth, heads) == ((2, 3) if name in LEARNED else (1, 1))
    assert rope.frequencies.dtype == torch.float32
    assert isinstance(rope.frequencies, torch.nn.Parameter) == (name in LEARNED)
    positions = rope.positions(*SIZES[rope.axes])
    assert positions.dtype == torch.float32
    rotations = rope.rotations(positions)
    assert len(rotations) == 2
    for layer, rotation in enumerate(rotations):
        assert rotation.cos.shape == rotation.sin.shape == (heads, len(positions), 8)
        assert rotation.cos.dtype == torch.float32
        expected = brute_force_angles(rope, positions, layer)
        assert_close(rotation.cos.double(), expected.cos(), atol=5e-6, rtol=0)
        assert_close(rotation.sin.double(), expected.sin(), atol=5e-6, rtol=0)
        assert_close(rope(positions, layer=layer).cos, rotation.cos, rtol=0, atol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_one_value_a_pair(name):
    """Law 2: cos and sin are half as wide as a head."""
    rope = make(name)
    assert rope(rope.positions(*SIZES[rope.axes])).cos.shape[-1] == rope.head_dim // 2


@pytest.mark.parametrize("name", [name for name in PRESETS if make(name).axes == 2])
def test_grids_are_passed_never_guessed(name):
    """Law 3, failure classes 1 and 2: same token count, other grid; rows and columns are not swapped."""
    rope = make(name)

    def cos(*grid):
        return rope(rope.positions(*grid)).cos

    # The second call follows the first one in one process: a table reused by its token count would show.
    for first, second in [((6, 6), (4, 9)), ((4, 4), (2, 8)), ((3, 5), (5, 3))]:
        assert not torch.allclose(cos(*first), cos(*second), atol=1e-3)
    wide = cos(3, 5).unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2)
    assert not torch.allclose(wide, cos(5, 3), atol=1e-3)
    exact = brute_force_angles(rope, rope.positions(5, 3)).cos()
    assert_close(cos(5, 3).double(), exact, atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_no_table_is_state(name):
    """Law 4, failure class 3: nothing that depends on a resolution is saved; any size follows any load."""
    rope = make(name)
    rope(rope.positions(*SIZES[rope.axes]))
    assert set(rope.state_dict()) == ({"learned_frequencies"} if name in LEARNED else set())
    other = make(name)
    other.load_state_dict(rope.state_dict())
    size = tuple(2 * length + 1 for length in SIZES[rope.axes])
    assert torch.equal(other(other.positions(*size)).cos, rope(rope.positions(*size)).cos)


CASTS = {
    "bfloat16": lambda rope: rope.bfloat16(),
    "half": lambda rope: rope.half(),
    "double": lambda rope: rope.double(),
    "to bf16": lambda rope: rope.to("cpu", torch.bfloat16),
    "bf16 and back": lambda rope: rope.bfloat16().float(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda rope: pickle.loads(pickle.dumps(rope)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_casts_do_not_touch_angles(name):
    """Law 4, failure class 4."""
    tolerance = 1e-5 if name in LEARNED else 1e-6
    for label, cast in CASTS.items():
        rope = make(name)
        positions = 10 * rope.positions(*SIZES[rope.axes])
        expected = brute_force_angles(rope, positions)
        changed = cast(rope)
        rotation = changed(positions)
        assert_close(
            rotation.sin.double(),
            expected.sin(),
            atol=tolerance,
            rtol=0,
            msg=lambda text, label=label: f"{label}: {text}",
        )
        assert changed.frequencies.dtype == torch.float32, label
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_close(changed(positions).sin, rotation.sin, rtol=0, atol=0)


@pytest.mark.parametrize("name", FIXED)
def test_tables_are_right_far_out(name):
    """Failure class 4: error of sin below 1e-6 at positions up to 4096."""
    rope = vr.preset(name, head_dim=64)
    positions = torch.randint(0, 4096, (50, rope.axes)).float()
    assert_close(rope(positions).sin.double(), brute_force_angles(rope, positions).sin(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PRESETS)
def test_the_default_dtype_changes_nothing(name, dtype):
    torch.manual_seed(1)
    expected = make(name)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(1)
        rope = make(name)
        positions = rope.positions(*SIZES[rope.axes])
        rotation = rope(positions)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(rope.frequencies, expected.frequencies)
    assert positions.dtype == rotation.cos.dtype == torch.float32
    assert torch.equal(rotation.cos, expected(positions).cos)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_meta_then_load(name, assign):
    """Law 4, failure class 6: meta -> to_empty -> load_state_dict, and assign=True without to_empty."""
    rope = make(name)
    with torch.device("meta"):
        empty = make(name)
    if not assign:
        empty = empty.to_empty(device="cpu")
    state = {key: value.bfloat16().float() for key, value in rope.state_dict().items()}
    saved = {key: value.bfloat16() for key, value in state.items()} if assign else state
    empty.load_state_dict(saved, assign=assign)
    rope.load_state_dict(state)
    positions = rope.positions(*SIZES[rope.axes])
    assert torch.equal(empty(positions).cos, rope(positions).cos)
    assert empty.frequencies.dtype == torch.float32


def test_learned_frequencies_are_drawn_anew_after_meta():
    with torch.device("meta"):
        rope = make("rope-vit-mixed")
    rope.to_empty(device="cpu")
    rope.reset_parameters(torch.Generator().manual_seed(3))
    again = make("rope-vit-mixed", generator=torch.Generator().manual_seed(3))
    assert torch.equal(rope.frequencies, again.frequencies)


@pytest.mark.parametrize("name", PRESETS)
def test_inference_mode_first_then_training(name):
    """Law 4: no inference tensor is left behind."""
    rope = make(name)
    positions = rope.positions(*SIZES[rope.axes])
    rope._matrix = None  # the table is built inside inference mode
    with torch.inference_mode():
        rope(positions)
    x = torch.randn(2, 3, len(positions), 16, requires_grad=True)
    vr.rotate(x, rope(positions)).square().sum().backward()
    assert x.grad is not None


def test_state_is_an_argument():
    """Law 5: two configurations in one process do not meet, in either order of use."""
    first, second = vr.preset("sam2", head_dim=16, base=100.0), vr.preset("sam2", head_dim=16)
    positions = first.positions(3, 5)
    before = first(positions).cos.clone()
    assert not torch.allclose(second(positions).cos, before)
    assert torch.equal(first(positions).cos, before)
    drawn = [make("rope-vit-mixed", generator=torch.Generator().manual_seed(0)).frequencies for _ in range(2)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("name", PRESETS)
def test_options_without_effect_are_errors(name):
    """Law 6, failure class 16: every option changes something, an unknown one is refused with the nearest name."""
    with pytest.raises(ValueError, match=r"no option 'bsae'.*did you mean 'base'"):
        make(name, bsae=10.0)
    rope, other = make(name), make(name, base=7.0)
    if name not in LEARNED:
        assert not torch.allclose(rope.frequencies, other.frequencies)


@pytest.mark.parametrize("name", PRESETS)
def test_batched_positions(name):
    rope = make(name)
    positions = torch.stack([rope.positions(*SIZES[rope.axes]) + shift for shift in range(4)])
    rotation = rope(positions, layer=1)
    for sample in range(4):
        assert_close(rotation.cos[sample], rope(positions[sample], layer=1).cos, rtol=0, atol=0)
    x = torch.randn(4, 3, positions.shape[1], 16)
    alone = torch.stack([vr.rotate(x[i], rope(positions[i], layer=1)) for i in range(4)])
    assert_close(vr.rotate(x, rotation), alone)


# One of each kind: pairing, number of axes, fixed and learned; the others differ from these in numbers alone.
COMPILED = ["roformer", "rope-vit-axial", "rope-vit-mixed", "dinov3", "gemma4-vision", "qwen3-vl"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_compile_follows_the_grid(name):
    rope = make(name)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def turn(x, positions):
        return vr.rotate(x, rope(positions))

    for scale in (1, 2):
        positions = rope.positions(*(scale * length for length in SIZES[rope.axes]))
        x = torch.randn(2, 3, len(positions), 16)
        assert_close(turn(x, positions), vr.rotate(x, rope(positions)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", LEARNED)
def test_every_learned_frequency_gets_a_gradient(name):
    """Failure class 12, first half."""
    rope = make(name)
    positions = rope.positions(*SIZES[rope.axes])
    x = torch.randn(2, 3, len(positions), 16)
    weight = torch.randn(2, 3, len(positions), 16)
    sum((vr.rotate(x, rotation) * weight).sum() for rotation in rope.rotations(positions)).backward()
    assert (rope.frequencies.grad.abs() > 0).all()


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [6, 9, 10, 18])
@pytest.mark.parametrize("name", [name for name in PRESETS if make(name).axes == 2])
def test_heads_that_do_not_divide_into_pairs_are_refused(name, head_dim):
    """Failure class 8."""
    with pytest.raises(ValueError, match=rf"head_dim is {head_dim}; it must be a multiple of 4"):
        vr.preset(name, head_dim=head_dim)


def test_other_bad_input_is_refused():
    rope = vr.preset("rope-vit-axial")
    with pytest.raises(ValueError, match=r"2 axes and the grid \(3,\) has 1"):
        rope.positions(3)
    with pytest.raises(ValueError, match="have 1 axes and the rotary embedding has 2"):
        rope(vr.grid_positions(5))
    with pytest.raises(ValueError, match="layers 0 to 0"):
        rope(rope.positions(2, 2), layer=1)
    with pytest.raises(ValueError, match=r"did you mean 'rope-vit-mixed'"):
        vr.preset("rope-vit-mixd")
    with pytest.raises(ValueError, match="base is -1"):
        vr.preset("sam2", base=-1.0)
    with pytest.raises(ValueError, match="interleaved, half"):
        vr.preset("sam2", pairing="quarter")
    with pytest.raises(ValueError, match="num_heads is 0"):
        vr.preset("rope-vit-mixed", num_heads=0)
    with pytest.raises(ValueError, match="either base or both periods"):
        vr.preset("dinov3", min_period=1.0)
    with pytest.raises(ValueError, match="either ladders"):
        Rope(head_dim=8, axes=1)


def test_presets_lists_every_row():
    assert list(vr.presets()) == list(PRESETS)
    assert all(vr.presets().values())


def test_ladder_is_geometric():
    assert_close(ladder(3, 8.0), torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
    custom = Ladder(base=8.0, pairs=3, slots=(1, 3), rungs=(0.0, 2.0), scale=2.0)
    assert_close(custom.values(), torch.tensor([2.0, 0.5], dtype=torch.float64))


def test_saved_frequencies_can_be_read_without_running_code():
    rope = make("rope-vit-mixed")
    file = io.BytesIO()
    torch.save(rope.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["learned_frequencies"], rope.frequencies)
