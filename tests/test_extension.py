"""Context extension: closed forms, what must not change, and what is refused. Peers: test_extension_peers.py."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import timm
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope import cli
from vision_rope.coordinates import Coordinates
from vision_rope.extension import EXTENSIONS, reason_against
from vision_rope.extension_formulas import GrowingAxis, ntk_by_parts, yarn
from vision_rope.extension_table import extension_table, format_extension_table
from vision_rope.frequencies import Ladder
from vision_rope.rope_presets import PRESETS

BOUNDED = [name for name in PRESETS if vr.preset(name).coordinates.bounded]
UNBOUNDED = [name for name in PRESETS if name not in BOUNDED]
WITH_LADDER = [name for name in UNBOUNDED if vr.preset(name).ladders is not None]
DEFINED = {name: [p.method for p in extension_table() if p.preset == name and p.reason is None] for name in PRESETS}
CHANGING = {name: [method for method in methods if method != "none"] for name, methods in DEFINED.items()}
TRAINED, SMALLER, LARGER = (7, 6, 5), (7, 4, 5), (9, 12, 20)


def build(name: str) -> vr.Rope:
    return vr.preset(name, head_dim=32, num_heads=2, depth=2)


def extend(rope: vr.Rope, method: str, size: tuple[int, ...] = LARGER, **knobs: Any) -> vr.Rope:
    """From TRAINED to a size, as many axes as the embedding has."""
    return vr.extend(rope, method, train_size=TRAINED[-rope.axes :], size=size[-rope.axes :], **knobs)


def cos_of(rope: vr.Rope, size: tuple[int, ...] = LARGER, layer: int = 0) -> torch.Tensor:
    return rope(rope.positions(*size[-rope.axes :]), layer).cos


def multipliers(rope: vr.Rope, extended: vr.Rope, axis: int) -> torch.Tensor:
    """What an extension does to the frequencies that turn with an axis, in the order of its ladder."""
    slots = list(rope.ladders[axis].slots)
    return (extended.frequencies / rope.frequencies)[0, 0, axis, slots]


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNBOUNDED)
def test_interpolation_divides_positions(name):
    rope = build(name)
    extended = extend(rope, "interpolate")
    positions = rope.positions(*LARGER[-rope.axes :])
    factors = torch.tensor([new / old for old, new in zip(TRAINED, LARGER, strict=True)][-rope.axes :])
    for layer in range(2):
        wanted = rope((positions / factors).double(), layer).cos
        assert_close(extended(positions, layer).cos, wanted, atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", WITH_LADDER)
def test_methods_that_change_the_base(name):
    """Frequencies are those of a ladder with another base; pairs of one axis can be a part of a whole ladder."""
    rope = build(name)
    for axis, rungs in enumerate(rope.ladders):
        s = LARGER[-rope.axes :][axis] / TRAINED[-rope.axes :][axis]
        d = 2 * rungs.pairs
        bases = {
            "ntk": rungs.base * s ** (d / (d - 2)),
            "dynamic-ntk": rungs.base * (2 * s - 1) ** (d / (d - 2)),
            "base": 50 * rungs.base,
        }
        for method, base in bases.items():
            got = extend(rope, method).frequencies[0, 0, axis, list(rungs.slots)]
            wanted = torch.tensor([rungs.scale * base ** (-2 * rung / d) for rung in rungs.rungs])
            assert_close(got, wanted, rtol=1e-5, atol=0, msg=lambda text, method=method: f"{method}: {text}")
        given = extend(rope, "base", base=1e9)
        assert_close(
            multipliers(rope, given, axis),
            torch.tensor([(1e9 / rungs.base) ** (-2 * rung / d) for rung in rungs.rungs]),
        )
        once = extend(rope, "dynamic-ntk", factor=1.0)
        assert torch.equal(once.frequencies, extend(rope, "ntk").frequencies)


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest():
    rope = build("rope-vit-axial")
    changed = multipliers(rope, extend(rope, "ntk"), axis=1)
    assert changed[0] == 1.0
    assert_close(changed[-1].item(), 1 / 4, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["yarn", "ntk-by-parts", "llama3"])
@pytest.mark.parametrize("name", WITH_LADDER)
def test_pairs_that_turn_often_stay_and_those_that_turn_seldom_are_interpolated(name, method):
    """Whatever lies between the limits: by turns counted here, not by rungs."""
    rope = vr.preset(name, head_dim=128)
    # Base 100 on few pairs: none is slow on a longer axis.
    trained, factor = 290 if name == "axial-3d" else 350, 3
    extended = vr.extend(rope, method, train_size=(trained,) * rope.axes, size=(factor * trained,) * rope.axes)
    fast, slow = {"yarn": (32, 1), "ntk-by-parts": (16, 0.75), "llama3": (4, 1)}[method]
    seen = set()
    for axis, rungs in enumerate(rope.ladders):
        turns = rope.frequencies[0, 0, axis, list(rungs.slots)] * trained / (2 * math.pi)
        changed = multipliers(rope, extended, axis)
        # Limits are rounded outwards to whole rungs: one rung of room either way.
        step = rungs.base ** (1 / rungs.pairs)
        often, seldom = turns > fast * step, turns < slow / step
        assert_close(changed[often], torch.ones_like(changed[often]))
        assert_close(changed[seldom], torch.full_like(changed[seldom], 1 / factor))
        between = changed[~often & ~seldom]
        assert ((between >= 1 / factor - 1e-6) & (between <= 1 + 1e-6)).all()
        seen |= {"often"} if often.any() else set()
        seen |= {"seldom"} if seldom.any() else set()
    assert "seldom" in seen
    assert "often" in seen


@pytest.mark.parametrize("method", ["yarn", "ntk-by-parts"])
def test_an_axis_on_which_no_pair_turns_once_is_interpolated(method):
    """Two frames in training: the peers' bounds cross there, and they leave such an axis unextended."""
    rope = vr.preset("rope-vit-axial", head_dim=64)
    extended = vr.extend(rope, method, train_size=(2, 200), size=(8, 200))
    assert_close(multipliers(rope, extended, axis=0), torch.full((16,), 0.25))
    assert_close(multipliers(rope, extended, axis=1), torch.ones(16))


def test_an_axis_on_which_every_pair_turns_often_is_left_alone():
    ladder = Ladder(base=2.0, pairs=4, slots=(0, 1, 2, 3))
    axis = GrowingAxis(ladder.values(), ladder, trained=1_000_000, factor=4.0)
    assert torch.equal(yarn(axis), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("formula", [yarn, ntk_by_parts])
def test_limits_follow_the_scale_of_a_ladder(formula):
    """The same frequencies written in two ways: rungs 4 to 31, or a scaled ladder that begins at rung 0."""
    plain = Ladder(base=1e4, pairs=32, slots=tuple(range(28)), rungs=tuple(range(4, 32)))
    scaled = Ladder(base=1e4, pairs=32, slots=tuple(range(28)), scale=1e4 ** (-4 / 32))
    assert_close(plain.values(), scaled.values())
    # Limits between which formulas look at turns alone: ntk counts rungs from the fastest of a whole ladder.
    limits = {"beta_fast": 30.0, "beta_slow": 2.0, "truncate": False}
    limits |= {"linear_fast": 1e6, "linear_slow": 1e5} if formula is ntk_by_parts else {}
    got = [formula(GrowingAxis(each.values(), each, 2000, 4.0), **limits) for each in (plain, scaled)]
    assert_close(*got)
    assert len(got[0].unique()) > 5


def test_ntk_by_parts_has_three_parts():
    """Limits set so far apart that each part is pure."""
    rope = vr.preset("roformer", head_dim=64)
    sizes = {"train_size": (1000,), "size": (4000,)}
    never, always = 1e-6, 1e6  # turns that no pair falls below, or above
    ntk = vr.extend(rope, "ntk", **sizes).frequencies
    follow_ntk = {"linear_fast": 2 * never, "linear_slow": never}
    follow_linear = {"linear_fast": 2 * always, "linear_slow": always}
    change_all = {"beta_fast": 2 * always, "beta_slow": always}
    got = vr.extend(rope, "ntk-by-parts", **sizes, **follow_ntk, **change_all).frequencies
    assert_close(got, ntk)
    got = vr.extend(rope, "ntk-by-parts", **sizes, **follow_linear, **change_all).frequencies
    # The fastest rung bounds the ramp.
    assert_close(got[..., 1:], rope.frequencies[..., 1:] / 4)
    kept = {"beta_fast": 2 * never, "beta_slow": never}
    assert_close(vr.extend(rope, "ntk-by-parts", **sizes, **kept).frequencies[..., :31], rope.frequencies[..., :31])


def test_llama3_is_linear_in_the_turns_of_each_frequency():
    """Equations 17 and 18 of YaRN's paper, for learned frequencies of either sign, by loops."""
    rope = build("rope-vit-mixed")
    with torch.no_grad():
        rope.learned_frequencies.mul_(3)
    extended = extend(rope, "llama3", low_freq_factor=0.5, high_freq_factor=3.0)
    learned = rope.frequencies.detach().double()
    kinds = set()
    for layer, head, axis, pair in torch.cartesian_prod(*map(torch.arange, learned.shape)).tolist():
        trained, factor = TRAINED[-2:][axis], LARGER[-2:][axis] / TRAINED[-2:][axis]
        frequency = learned[layer, head, axis, pair].item()
        turns = abs(frequency) * trained / (2 * math.pi)
        kept = 0.0 if turns < 0.5 else 1.0 if turns > 3 else (turns - 0.5) / 2.5
        kinds.add("slow" if turns < 0.5 else "fast" if turns > 3 else "between")
        wanted = frequency * kept + frequency / factor * (1 - kept)
        assert_close(extended.frequencies[layer, head, axis, pair].item(), wanted, rtol=1e-5, atol=1e-7)
    assert kinds == {"slow", "fast", "between"} or kinds == {"slow", "between"}


def turn_between_neighbours(rope: vr.Rope, grid: tuple[int, int]) -> torch.Tensor:
    positions = rope.positions(*grid).unflatten(0, grid)
    steps = torch.stack((positions[1, 0] - positions[0, 0], positions[0, 1] - positions[0, 0]))
    return (steps[:, :, None] * rope.frequencies[0, 0]).sum(1)


@pytest.mark.parametrize("normalize", ["separate", "min", "max", "reference"])
@pytest.mark.parametrize("size", [(8, 12), (4, 8), (8, 4), (3, 8), (12, 12)])
def test_pitch_keeps_the_training_distance(normalize, size):
    """Also where all axes are divided by one length, so that an axis that did not grow has changed its distances."""
    rope = vr.preset("dinov3", head_dim=16)
    rope.coordinates = Coordinates(reference=(16, 16)) if normalize == "reference" else Coordinates(normalize=normalize)
    extended = vr.extend(rope, "pitch", train_size=(4, 4), size=size)
    wanted, got = turn_between_neighbours(rope, (4, 4)), turn_between_neighbours(extended, size)
    if normalize in ("separate", "reference"):
        grown = [new >= 4 for new in size]  # a smaller axis changes nothing, its distances are larger
    else:
        grown = [(min if normalize == "min" else max)(size) >= 4] * 2
    for axis, kept in enumerate(grown):
        assert torch.allclose(got[axis], wanted[axis], atol=1e-5) == kept


def test_temperature_is_from_the_geometric_mean():
    rope = vr.preset("rope-vit-axial")
    sizes = {"train_size": (8, 8), "size": (16, 32)}

    def scale(method, **knobs):
        return vr.extend(rope, method, **sizes, **knobs)(rope.positions(16, 32)).attention_scale

    assert_close(scale("yarn"), (0.1 * math.log(math.sqrt(2 * 4)) + 1) ** 2)
    assert_close(scale("yarn", temperature=0.3), (0.3 * math.log(math.sqrt(2 * 4)) + 1) ** 2)
    assert_close(scale("yarn", factors="max"), (0.1 * math.log(4) + 1) ** 2)
    assert scale("yarn", temperature=0) == 1.0
    assert_close(scale("ntk-by-parts", temperature=0.1), scale("yarn"))
    for method in EXTENSIONS:
        if method not in ("yarn", "pitch"):
            assert scale(method) == 1.0
    assert vr.extend(rope, "yarn", train_size=(8, 8), size=(8, 4))(rope.positions(8, 4)).attention_scale == 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_one_factor_for_all_axes_is_the_largest(name):
    rope = build(name)
    axes = rope.axes
    for method in CHANGING[name]:
        if method == "pitch":  # the distance of an axis is its own
            with pytest.raises(ValueError, match="no option 'factors'"):
                extend(rope, method, factors="max")
            continue
        # One axis grows four times, the others not at all.
        shared = vr.extend(rope, method, train_size=(6,) * axes, size=(6,) * (axes - 1) + (24,), factors="max")
        apart = vr.extend(rope, method, train_size=(6,) * axes, size=(24,) * axes)
        assert torch.equal(shared.frequencies, apart.frequencies), method


# --- contract: every method that is defined for a preset ------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_factor_one_and_smaller_sizes_are_the_identity(name):
    """To the bit."""
    rope = build(name)
    for method in DEFINED[name]:
        for size in (TRAINED, SMALLER, (2, 2, 2)):
            extended = extend(rope, method, size)
            for layer in range(2):
                assert torch.equal(cos_of(extended, size, layer), cos_of(rope, size, layer)), method
            rotation = extended(rope.positions(*size[-rope.axes :]))
            assert rotation.attention_scale == 1.0
            assert torch.equal(extended.frequencies, rope.frequencies)


@pytest.mark.parametrize("name", PRESETS)
def test_extended_rotations(name):
    """Shape, finite, of length one, and no pair turns further than without the method; the state dict is untouched."""
    rope = build(name)
    before = {key: value.clone() for key, value in rope.state_dict().items()}
    for method in DEFINED[name]:
        extended = extend(rope, method)
        positions = extended.positions(*LARGER[-rope.axes :])
        for layer, rotation in enumerate(extended.rotations(positions)):
            plain = rope(positions, layer)
            assert rotation.cos.shape == plain.cos.shape
            assert rotation.cos.dtype == torch.float32
            assert rotation.cos.isfinite().all()
            assert_close(rotation.cos**2 + rotation.sin**2, torch.ones_like(rotation.cos))
            assert torch.equal(rotation.cos, plain.cos) == (method == "none"), method
            assert torch.equal(rotation.cos, extended(positions, layer).cos)
        if method != "pitch":  # which leaves the range of normalised coordinates, that is its purpose
            assert (extended.frequencies.abs() <= rope.frequencies.abs() * (1 + 1e-6)).all(), method
        assert list(extended.state_dict()) == list(before)
        assert all(torch.equal(extended.state_dict()[key], value) for key, value in before.items())
        assert rope.extension is None


@pytest.mark.parametrize("name", PRESETS)
def test_axes_are_extended_apart(name):
    rope = build(name)
    for method in CHANGING[name]:
        for grown in range(rope.axes):
            size = tuple(24 if axis == grown else 6 for axis in range(rope.axes))
            extended = vr.extend(rope, method, train_size=(6,) * rope.axes, size=size)
            for axis in range(rope.axes):
                same = torch.equal(extended.frequencies[..., axis, :], rope.frequencies[..., axis, :])
                assert same == (axis != grown), method


@pytest.mark.parametrize("name", PRESETS)
def test_copies_casts_and_pickles(name):
    """Failure class 4."""
    for method in CHANGING[name]:
        extended = extend(build(name), method)
        before = cos_of(extended)
        for other in (copy.deepcopy(extended), pickle.loads(pickle.dumps(extended)), copy.copy(extended)):
            assert torch.equal(cos_of(other), before), method
            assert torch.equal(cos_of(other.bfloat16()), before), method


@pytest.mark.parametrize("method", [method for method in EXTENSIONS if method != "none"])
def test_two_configurations_in_one_process(method):
    """And the embedding that was trained is the same before, between and after."""
    name = "eva02" if method == "pitch" else "sam2"
    rope, other = build(name), vr.preset(name, head_dim=32, base=20.0)
    plain, other_plain = cos_of(rope), cos_of(other)
    first, second = extend(rope, method), extend(rope, method, (9, 30, 12))
    third = extend(other, method)
    before = [cos_of(each) for each in (first, second, third)]
    assert torch.equal(cos_of(rope), plain)
    assert torch.equal(cos_of(other), other_plain)
    alone = extend(build(name), method)
    assert torch.equal(cos_of(alone), before[0])
    assert [torch.equal(cos_of(each), kept) for each, kept in zip((first, second, third), before, strict=True)]
    if method != "base":
        assert not torch.equal(before[0], before[1])
    assert not torch.equal(before[0], before[2])


@pytest.mark.parametrize("method", CHANGING["rope-vit-mixed"])
def test_learned_frequencies_stay_shared_and_trainable(method):
    rope = build("rope-vit-mixed")
    extended = extend(rope, method)
    assert extended.learned_frequencies is rope.learned_frequencies
    extended(extended.positions(8, 8)).sin.sum().backward()
    assert rope.frequencies.grad.isfinite().all()
    assert rope.frequencies.grad.abs().sum() > 0
    with torch.no_grad():
        rope.learned_frequencies.mul_(20)
    # The extension follows the values, it does not keep those of the day it was made.
    assert_close(extended.frequencies, extend(rope, method).frequencies, rtol=0, atol=0)


def test_gradient_of_learned_frequencies_is_exact():
    rope = build("rope-vit-mixed")
    row = extend(rope, "llama3").extension
    frequencies = (rope.frequencies.detach().double() * 5).requires_grad_()
    assert torch.autograd.gradcheck(row.apply, (frequencies,))


@pytest.mark.parametrize("method", EXTENSIONS)
def test_repr_shows_the_extension(method):
    rope = build("eva02" if method == "pitch" else "qwen3-vl")
    knobs = {knob: value for knob, value in EXTENSIONS[method].knobs.items() if value is not None}
    text = repr(extend(rope, method, **knobs))
    if method == "none":
        assert text == repr(rope)
        return
    grids = ["x".join(map(str, size[-rope.axes :])) for size in (TRAINED, LARGER)]
    for words in (method, f"{grids[0]} -> {grids[1]}", *(f"{knob}={value!r}" for knob, value in knobs.items())):
        assert words in text


def test_none_switches_nothing_and_can_be_followed_by_a_method():
    rope = build("sam2")
    same = extend(rope, "none")
    assert same is not rope
    assert same.extension is None
    assert torch.equal(cos_of(extend(same, "yarn")), cos_of(extend(rope, "yarn")))


# --- the table of what is defined -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_is_what_extend_does(name):
    rope = build(name)
    assert [pair.method for pair in extension_table() if pair.preset == name] == list(EXTENSIONS)
    for pair in extension_table():
        if pair.preset != name:
            continue
        if pair.reason is None:
            extend(rope, pair.method)
            continue
        with pytest.raises(ValueError, match=rf"^{pair.method} means nothing for {name}: .*; use none") as caught:
            extend(rope, pair.method)
        reason, remedy = str(caught.value).split("; use ")
        assert reason.endswith(pair.reason)
        assert remedy.replace(" or ", ", ").split(", ") == DEFINED[name]


def test_what_means_something_for_which_kind():
    def defined(**kind):
        return [method for method in EXTENSIONS if reason_against(method, **kind) is None]

    assert defined(has_ladder=True, bounded=False) == [method for method in EXTENSIONS if method != "pitch"]
    assert defined(has_ladder=False, bounded=False) == ["none", "interpolate", "llama3"]
    assert defined(has_ladder=True, bounded=True) == defined(has_ladder=False, bounded=True) == ["none", "pitch"]


def test_the_committed_table_is_that_of_the_command(capsys, request):
    assert cli.main(["presets", "--extend"]) == 0
    printed = capsys.readouterr().out
    assert printed == format_extension_table()
    page = request.config.rootpath / "docs" / "extension_methods.md"
    assert page.read_text() == printed, "run: vision-rope presets --extend > docs/extension_methods.md"
    for name in (*PRESETS, *EXTENSIONS):
        assert f"| {name} |" in printed


def test_help_names_every_method():
    assert cli.METHODS.split(", ") == list(EXTENSIONS)


# --- bad input ------------------------------------------------------------------------------------------------------

BOTH = {"train_size": (4, 4), "size": (8, 8)}


@pytest.mark.parametrize("size", [(8, 8), (4, 4)])
@pytest.mark.parametrize(
    ("method", "knobs", "words"),
    [
        ("yarm", {}, r"method is 'yarm'.*did you mean 'yarn'"),
        ("dynamic_ntk", {}, r"did you mean 'dynamic-ntk'"),
        ("yarn", {"beta_fats": 3.0}, r"no option 'beta_fats'; its options: beta_fast, .*did you mean 'beta_fast'"),
        ("ntk", {"beta_fast": 3.0}, r"'ntk' has no option 'beta_fast'; its options: factors"),
        ("none", {"factors": "max"}, r"'none' has no option 'factors'; its options: none"),
        ("yarn", {"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast is 1.0 and beta_slow 2.0.*must be the larger"),
        ("yarn", {"beta_fast": 1.0}, "beta_fast must be the larger"),
        ("yarn", {"beta_slow": 0}, "beta_slow is 0; it must be a positive number"),
        ("yarn", {"beta_fast": math.nan}, "beta_fast is nan; it must be a positive number"),
        ("yarn", {"beta_fast": "32"}, "beta_fast is '32'; it must be a positive number"),
        ("yarn", {"truncate": "no"}, "truncate is 'no'; it must be True or False"),
        ("yarn", {"truncate": 0}, "truncate is 0; it must be True or False"),
        ("yarn", {"temperature": -0.1}, "temperature is -0.1; it must be zero or a positive number"),
        ("yarn", {"temperature": None}, "temperature is None; it must be"),
        ("ntk-by-parts", {"linear_fast": 0.5}, "linear_fast must be the larger"),
        ("ntk-by-parts", {"beta_slow": 99.0}, "beta_fast must be the larger"),
        ("ntk-by-parts", {"truncate": None}, "truncate is None"),
        ("llama3", {"low_freq_factor": 4.0}, "high_freq_factor must be the larger"),
        ("llama3", {"high_freq_factor": True}, "high_freq_factor is True; it must be a positive number"),
        ("dynamic-ntk", {"factor": -1}, "factor is -1; it must be a positive number"),
        ("dynamic-ntk", {"factor": math.inf}, "factor is inf; it must be a positive number"),
        ("base", {"base": 0}, "base is 0; it must be a positive number"),
        ("base", {"base": 100.0}, "base is 100 and the embedding's own base 100; the new one must be larger"),
        ("base", {"base": 10}, "base is 10 and the embedding's own base 100"),
        ("interpolate", {"factors": "min"}, "factors is 'min'; choose 'separate'.*'max'"),
        ("interpolate", {"factors": None}, "factors is None; choose"),
    ],
)
def test_wrong_options_are_refused_at_any_size(method, knobs, words, size):
    """Failure class 16."""
    rope = vr.preset("rope-vit-axial")
    with pytest.raises(ValueError, match=words):
        vr.extend(rope, method, train_size=(4, 4), size=size, **knobs)


def test_wrong_options_are_refused_for_learned_frequencies():
    with pytest.raises(ValueError, match="low_freq_factor is -1"):
        vr.extend(vr.preset("rope-vit-mixed"), "llama3", **BOTH, low_freq_factor=-1)


@pytest.mark.parametrize("name", ["roformer", "rope-vit-axial", "qwen3-vl"])
@pytest.mark.parametrize("which", ["train_size", "size"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (224, r"{which} is 224; it must be a grid of tokens with one length for each axis of {name}"),
        ("14x14", r"{which} is '14x14'; it must be a grid"),
        (None, r"{which} is None; it must be a grid"),
        ((4,) * 4, r"{which} \(4, 4, 4, 4\) has 4 axes and {name} has "),
        ((), r"{which} \(\) has 0 axes and {name} has "),
        (0, r"positive lengths"),
        (-3, r"positive lengths"),
        (14.0, r"in whole tokens"),
        (True, r"in whole tokens"),
        ("4", r"in whole tokens"),
    ],
)
def test_wrong_grids_are_refused(name, which, wrong, words):
    rope = vr.preset(name)
    # A single wrong length stands at the last axis of a grid that is right otherwise.
    single = isinstance(wrong, int | float | str) and wrong not in (224, "14x14")
    grids = dict.fromkeys(("train_size", "size"), (4,) * rope.axes)
    grids[which] = (4,) * (rope.axes - 1) + (wrong,) if single else wrong
    with pytest.raises(ValueError, match=words.format(which=which, name=name)):
        vr.extend(rope, "none" if rope.axes == 1 else "yarn", **grids)


def test_extending_twice_is_refused():
    rope = vr.preset("rope-vit-axial")
    with pytest.raises(ValueError, match="extended already"):
        vr.extend(vr.extend(rope, "ntk", **BOTH), "ntk", **BOTH)


@pytest.mark.parametrize("method", ["ntk", "dynamic-ntk", "ntk-by-parts"])
def test_a_ladder_of_one_pair_is_refused(method):
    with pytest.raises(ValueError, match=r"a ladder of 1 pair .*at least two pairs"):
        vr.extend(vr.preset("rope-vit-axial", head_dim=4), method, **BOTH)


@pytest.mark.parametrize("method", ["yarn", "ntk-by-parts"])
def test_a_ladder_that_does_not_descend_is_refused(method):
    with pytest.raises(ValueError, match="base is 1, so its pairs do not turn slower"):
        vr.extend(vr.preset("rope-vit-axial", base=1.0), method, **BOTH)


# --- models ---------------------------------------------------------------------------------------------------------


def model_of(image: tuple[int, int], patch: int = 16):
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=image, patch_size=patch, embed_dim=32, num_heads=2, depth=1, num_classes=2
    )
    return vr.add_position(plain, "rope-vit-axial").eval()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (224, r"train_size is 224; it must be a grid of tokens.*built for \(14, 10\) patches"),
        ((224, 160), r"train_size is \(224, 160\), which looks like pixels; it counts patches.*\(14, 10\) patches"),
        ((256, 256), r"looks like pixels"),
        ((14,), r"has 1 axis and rope-vit-axial has 2 axes.*\(14, 10\) patches"),
        ((14.0, 14), r"in whole tokens; this model was built for \(14, 10\) patches"),
    ],
)
def test_training_size_of_a_model_counts_patches(wrong, words):
    """Pixels would switch the extension off without a word."""
    model = model_of((224, 160))
    vr.set_extension(model, "ntk", factors="max")
    before = model.extension
    with pytest.raises(ValueError, match=words):
        vr.set_extension(model, "interpolate", train_size=wrong)
    assert model.extension == before == ("ntk", (14, 10), {"factors": "max"})
    # Larger than the model was built for, and possible.
    vr.set_extension(model, "interpolate", train_size=[28, 40])
    assert model.extension == ("interpolate", (28, 40), {})


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("interpolate", {"factors": "max"}),
        ("dynamic-ntk", {"factor": 3.0}),
        ("ntk-by-parts", {"beta_fast": 4.0, "temperature": 0.2}),
        ("yarn", {"temperature": 0.0}),
        ("llama3", {"low_freq_factor": 0.1}),
        ("base", {"base": 3000.0}),
    ],
)
def test_options_reach_a_model(method, knobs):
    """Each changes the output at a larger size, and nothing at the size of training."""
    model = model_of((16, 16), patch=4)
    small, large = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 24, 40)
    outputs = []
    with torch.no_grad():
        plain = model(small)
        for given in ({}, knobs):
            vr.set_extension(model, method, **given)
            assert torch.equal(model(small), plain)
            outputs.append(model(large))
    assert not torch.equal(outputs[0], outputs[1])


def test_options_behind_colons_are_keyword_arguments_in_python() -> None:
    rope = vr.preset("rope-vit-axial")
    with pytest.raises(ValueError, match=r"in Python they are keyword arguments: 'yarn', beta_fast=16, beta_slow=2$"):
        vr.extend(rope, "yarn:beta_fast=16:beta_slow=2", train_size=(4, 4), size=(8, 8))
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2)
    with pytest.raises(ValueError, match=r"keyword arguments: 'yarn', beta_fast=16$"):
        vr.set_extension(vr.add_position(model, "sam2"), "yarn:beta_fast=16")
