"""Inspection: figures against closed forms, brute force, timm and Ultralytics; the command on every kind of model."""

from __future__ import annotations

import cmath
import csv
import itertools
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from vision_rope import cli, preset
from vision_rope.checkpoint import build_model, save_weights
from vision_rope.config import DataConfig, MaskedConfig, ModelConfig, TrainConfig, to_yaml
from vision_rope.convert import FAMILIES, add_position
from vision_rope.inspection import decay_bound, explain_method, find_unseen, inspect_rope, tabulate
from vision_rope.inspection_report import read_size
from vision_rope.inspection_targets import open_inspection_target
from vision_rope.rope import Rope, extend
from vision_rope.rope_presets import PRESETS
from vision_rope.video import sam2

IMAGE_PRESETS = [name for name in PRESETS if preset(name).axes == 2]
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
OPTIONS = " ".join(f"--option {name}={value}" for name, value in TINY.items())


def make_run(folder: Path, position: str = "rope-vit-mixed", **changes: Any) -> Any:
    """A run folder, and the model whose weights it holds."""
    config = TrainConfig(
        model=ModelConfig("vit_tiny_patch16_224", position, options={k: v for k, v in TINY.items() if k != "img_size"}),
        data=DataConfig(size=32),
        **changes,
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    model = build_model(config, 3)
    save_weights(folder / "best.safetensors", model.state_dict(), {"classes": ["a", "b", "c"]})
    return model


def inspect(words: str, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What the command prints, and the JSON that it writes."""
    assert cli.main(["inspect", *words.split(), "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    return printed, json.loads((out / "inspect.json").read_text())


# Figures


def test_wavelengths_and_turns_of_axial_rope_by_hand() -> None:
    """head_dim 64: each axis has 16 pairs, base ** (-i / 16) radians a token; columns come first."""
    inspection = inspect_rope(preset("rope-vit-axial", base=100.0), (14, 14), (28, 42))
    rows = tabulate(inspection)
    assert [row["pair"] for row in rows] == list(range(32))
    fastest, slowest = rows[0], rows[15]
    assert fastest["wavelength_trained_columns"] == pytest.approx(6.2832, rel=1e-4)
    assert slowest["wavelength_trained_columns"] == pytest.approx(471.18, rel=1e-4)  # 2 pi * 100 ** (15 / 16)
    assert fastest["turns_trained_columns"] == pytest.approx(2.2282, rel=1e-4)
    assert fastest["turns_new_columns"] == pytest.approx(3 * 2.2282, rel=1e-4)
    assert slowest["turns_new_columns"] == pytest.approx(42 / 471.18, rel=1e-4)
    assert (fastest["wavelength_trained_rows"], fastest["turns_trained_rows"]) == (None, 0)
    assert rows[16]["turns_new_rows"] == pytest.approx(2 * 2.2282, rel=1e-4)
    assert fastest["layer"] is fastest["head"] is None
    # A pair has seen all angles from half a turn on: 14 / wavelength >= 0.5 for the first six pairs of an axis.
    assert [row["unseen"] for row in rows] == ([False] * 6 + [True] * 10) * 2


def test_wavelengths_of_coordinates_fitted_to_the_grid_grow_with_it() -> None:
    """dinov3's fastest pair turns once a unit, and 16 tokens span two units."""
    row = tabulate(inspect_rope(preset("dinov3"), (16, 16), (32, 16)))[0]
    assert row["wavelength_trained_rows"] == pytest.approx(8)
    assert row["wavelength_new_rows"] == pytest.approx(16)
    assert row["turns_trained_rows"] == pytest.approx(2)
    assert row["turns_new_rows"] == pytest.approx(2)


def fold(angles: Tensor) -> Tensor:
    """Angles without sign and full turns, in [0, pi]."""
    return (torch.remainder(angles + math.pi, 2 * math.pi) - math.pi).abs()


@pytest.mark.parametrize(
    "name",
    [
        "eva02_tiny_patch14_336",
        "vit_small_patch16_dinov3",
        "vit_pe_core_tiny_patch16_384",
        "vit_small_patch16_rope_224",
    ],
)
def test_wavelengths_are_those_of_timms_tables(name: str) -> None:
    """The angle between neighbouring tokens, read from timm's own cos and sin, is 2 pi / wavelength."""
    # Otherwise timm has the table of one grid, whatever grid it is asked for.
    model = timm.create_model(name, dynamic_img_size=True, **TINY)
    inspection = inspect_rope(open_inspection_target(name, options=TINY).rope, (4, 4), (6, 9))
    for grid in ((4, 4), (6, 9)):
        sin, cos = model.rope.get_embed(shape=grid).double().chunk(2, -1)
        # timm has each pair twice, as neighbours or as halves.
        own = slice(None, 8) if inspection.rope.pairing == "half" else slice(None, None, 2)
        angle = torch.atan2(sin, cos).unflatten(0, grid)[..., own]
        steps = torch.stack((angle[1, 0] - angle[0, 0], angle[0, 1] - angle[0, 0]))
        wanted = 2 * math.pi / inspection.wavelengths(grid)[0, 0]
        torch.testing.assert_close(fold(wanted), fold(steps), rtol=1e-4, atol=1e-6)


def angles_of(rope: Rope, frequencies: Tensor, grid: tuple[int, int]) -> Tensor:
    """Relative angles of every two tokens of a grid, each once, (angles, pairs)."""
    places = rope.positions(*grid).double()
    return (places[:, None] - places[None]).flatten(0, 1).unique(dim=0) @ frequencies


def brute_force(rope: Rope, frequencies: Tensor, extended: Tensor, trained: tuple[int, int], new: Any) -> Tensor:
    """The definition, literally: every angle of the new grid against every one of training, around the circle."""
    places = rope.positions(*trained).double().unflatten(0, trained)
    steps = torch.stack((places[1, 0, 0] - places[0, 0, 0], places[0, 1, 1] - places[0, 0, 1]))
    step = steps @ frequencies.abs()
    seen, met = angles_of(rope, frequencies, trained), angles_of(rope, extended, new)
    return (fold(met[:, None] - seen[None]).amin(1) > step + 1e-4).any(0)


@pytest.mark.parametrize("grids", [((4, 5), (7, 5)), ((3, 3), (4, 9)), ((5, 3), (3, 5)), ((3, 4), (3, 4))])
@pytest.mark.parametrize("name", [*IMAGE_PRESETS, "dinov3 min", "dinov3 max"])
def test_unseen_pairs_are_those_that_brute_force_finds(name: str, grids: Any) -> None:
    name, _, normalize = name.partition(" ")
    rope = preset(name, head_dim=16, num_heads=2, depth=2, **({"normalize": normalize} if normalize else {}))
    inspection = inspect_rope(rope, *grids)
    layers, heads = inspection.unseen.shape[:2]
    for layer, head in itertools.product(range(layers), range(heads)):
        before, after = inspection.frequencies[layer, head], inspection.extended[layer, head]
        torch.testing.assert_close(inspection.unseen[layer, head], brute_force(rope, before, before, *grids))
        torch.testing.assert_close(inspection.unseen_extended[layer, head], brute_force(rope, before, after, *grids))


def test_angles_that_wrap_around_may_be_seen_or_fall_into_the_gap() -> None:
    """A pair of one radian a token has seen up to 3 of 3.14 radians: only 22 tokens, 7 * pi - 22 = 0.009, get there.

    The gap lies between 3 and 2 pi - 3 radians; of the multiples of one radian the first in it is 22 = 3.15 + 6 pi.
    """
    rope = preset("rope-vit-axial", head_dim=4, base=10.0)
    one = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for length, unseen in ((4, False), (22, False), (23, True)):
        assert find_unseen(one, one, rope.coordinates, (3, 3), (3, length)).tolist() == [unseen], length


@pytest.mark.parametrize("name", IMAGE_PRESETS)
@pytest.mark.parametrize("grid", [(2, 2), (14, 14), (14, 15), (28, 28), (14, 57), (3, 200), (1, 1)])
def test_no_angle_is_unseen_after_the_suggested_method(name: str, grid: tuple[int, int]) -> None:
    """Coordinates fitted to the grid need none; indices are interpolated where the grid is longer by two tokens."""
    rope = preset(name, num_heads=2, depth=2)
    inspection = inspect_rope(rope, (14, 14), grid)
    assert not inspection.unseen_extended.any()
    wanted = "interpolate" if max(grid) > 15 and not rope.coordinates.bounded else "none"
    assert inspection.method == wanted
    assert bool(inspection.unseen.any()) == (wanted == "interpolate")


def test_another_aspect_ratio_reaches_beyond_training_where_all_axes_have_one_divisor() -> None:
    inspection = inspect_rope(preset("dinov3", normalize="min"), (14, 14), (14, 28))
    assert inspection.method == "none"
    assert inspection.unseen[0, 0].tolist() == [False] * 16 + [False] * 5 + [True] * 11
    assert "divided by one side (min)" in explain_method(inspection)


def test_pairs_that_stand_still_have_no_wavelength_and_share_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In M-RoPE a third of the pairs turn with time, which an image has not."""
    options = OPTIONS + " --option rope_type=mrope --option rope_grid_indexing=ij"
    out, found = inspect(f"vit_small_patch16_rope_224 {options}", tmp_path, capsys)
    still = [row["pair"] for row in found["pairs"] if row["frequency_rows"] == row["frequency_columns"] == 0]
    assert 0 < len(still) < 8
    assert all(found["pairs"][pair]["wavelength_trained_rows"] is None for pair in still)
    assert ", ".join(map(str, still)) + "           -           -" in out


def double_loop(frequencies: list[float], distance: float) -> float:
    """The mean over i of |sum over j < i of exp(1j * distance * frequency_j)|."""
    sums = [
        abs(sum(cmath.exp(1j * distance * frequency) for frequency in frequencies[:count]))
        for count in range(1, len(frequencies) + 1)
    ]
    return sum(sums) / len(sums)


def test_the_decay_bound_is_that_of_a_double_loop() -> None:
    inspection = inspect_rope(preset("rope-vit-axial"), (14, 14), (28, 20))
    own = inspection.frequencies[0, 0, 0, 16:].tolist()
    wanted = [double_loop(own, distance) for distance in range(28)]
    torch.testing.assert_close(inspection.decay((28, 20), 0)[0, 0], torch.tensor(wanted, dtype=torch.float64))
    # Published code gives these for base 100, see section 3.4.3 of RoFormer with d = 32.
    at = inspection.decay((28, 20), 1)[0, 0]
    assert [round(float(at[distance]), 2) for distance in (0, 1, 4, 8, 16)] == [8.5, 8.17, 4.84, 3.72, 2.35]
    halved = [double_loop([frequency / 2 for frequency in own], distance) for distance in range(28)]
    torch.testing.assert_close(
        inspection.decay((28, 20), 0, extended=True)[0, 0], torch.tensor(halved, dtype=torch.float64)
    )


def test_the_decay_bound_counts_tokens_not_units_and_every_layer_and_head() -> None:
    inspection = inspect_rope(preset("dinov3", head_dim=16), (4, 4), (8, 8))
    own = inspection.frequencies[0, 0, 0, :4].tolist()
    assert float(inspection.decay((4, 4), 0)[0, 0, 3]) == pytest.approx(double_loop(own, 3 * 2 / 4))
    assert float(inspection.decay((8, 8), 0)[0, 0, 3]) == pytest.approx(double_loop(own, 3 * 2 / 8))
    mixed = inspect_rope(preset("rope-vit-mixed", head_dim=16, num_heads=3, depth=2), (4, 5))
    curve = mixed.decay((4, 5), 1)
    assert curve.shape == (2, 3, 5)
    assert float(curve[1, 2, 4]) == pytest.approx(double_loop(mixed.frequencies[1, 2, 1].tolist(), 4))


def test_decay_bound_of_any_shape() -> None:
    frequencies = torch.rand(2, 3, 5, dtype=torch.float64)
    bound = decay_bound(frequencies, torch.tensor([0.0, 2.5], dtype=torch.float64))
    assert bound.shape == (2, 3, 2)
    torch.testing.assert_close(bound[..., 0], torch.full((2, 3), 3.0, dtype=torch.float64))
    assert float(bound[1, 2, 1]) == pytest.approx(double_loop(frequencies[1, 2].tolist(), 2.5))


def test_a_line_of_tokens_has_no_turns_across_it() -> None:
    inspection = inspect_rope(preset("rope-vit-axial", head_dim=16), (1, 6), (1, 12))
    rows = tabulate(inspection)
    assert {row["turns_new_rows"] for row in rows} == {0}
    assert not any(row["unseen"] for row in rows[4:])


@pytest.mark.parametrize("name", ["roformer", "qwen2-vl"])
def test_embeddings_of_text_and_video_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has .* ax.s, and grids of image patches have rows and columns"):
        inspect_rope(preset(name, head_dim=128), (4, 4))


def test_what_is_no_grid_or_extended_is_refused() -> None:
    rope = preset("sam2")
    with pytest.raises(ValueError, match=r"train_grid \(4,\) has 1 axis"):
        inspect_rope(rope, (4,))
    with pytest.raises(ValueError, match=r"grid is \(4, 0\)"):
        inspect_rope(rope, (4, 4), (4, 0))
    with pytest.raises(ValueError, match="sam2 is extended already"):
        inspect_rope(extend(rope, "interpolate", train_size=(4, 4), size=(8, 8)), (4, 4))


@pytest.mark.parametrize(
    ("name", "grid", "words"),
    [
        ("sam2", (4, 4), "this is the grid of training"),
        ("sam2", (4, 3), "longer on no axis"),
        ("sam2", (4, 5), "within one step"),
        ("sam2", (4, 8), "at 2 times the columns of training 15 of 32 pairs meet unseen angles"),
        ("rope-vit-mixed", (8, 8), "at 2 times the rows and 2 times the columns of training"),
        ("rope-vit-mixed", (8, 8), "helped learned frequencies on some pictures"),
        ("eva02", (8, 8), "every size spans the trained range, in other steps; pitch"),
        ("eva02", (2, 2), "in other steps"),
    ],
)
def test_reasons_have_their_numbers(name: str, grid: tuple[int, int], words: str) -> None:
    reason = explain_method(inspect_rope(preset(name), (4, 4), grid))
    assert words in reason
    assert ("pitch" in reason) == (name == "eva02" and grid == (8, 8))


# The command


def test_a_timm_model_with_its_own_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, found = inspect(f"vit_small_patch16_rope_224 {OPTIONS} --size 48,64", tmp_path, capsys)
    assert found["position"] == "own"
    assert (found["train_grid"], found["grid"], found["depth"]) == ([4, 4], [6, 8], 2)
    with (tmp_path / "inspect.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["pair"]) for row in rows] == list(range(8))
    for row, stored in zip(rows, found["pairs"], strict=True):
        assert row["unseen"] == str(stored["unseen"])
        assert row["turns_new_rows"] == str(stored["turns_new_rows"])
        assert (row["layer"], row["wavelength_new_rows"]) == (
            "",
            "" if stored["pair"] < 4 else row["wavelength_new_rows"],
        )
    assert (tmp_path / "inspect.png").read_bytes().startswith(b"\x89PNG")
    assert len(found["decay_bound"]["rows"]["new"]) == 6
    assert found["suggestion"]["method"] == "interpolate"
    assert found["suggestion"]["unseen"] == sum(row["unseen"] for row in found["pairs"])
    assert f"{found['suggestion']['unseen']} of 8 pairs meet angles at 48x64 px that training never had" in out
    assert "fixed, base 100, the same in 2 layers and all heads" in out
    # A line for each pair: 4 by column, 4 by row, since the axes grow differently.
    table = [line.split() for line in out.splitlines() if line.startswith(" ") and line.split()[0].isdigit()]
    assert [(line[0], line[1]) for line in table] == [(str(i), "columns" if i < 4 else "rows") for i in range(8)]
    for line, stored in zip(table, found["pairs"], strict=True):
        axis = line[1]
        assert float(line[2]) == pytest.approx(stored[f"wavelength_trained_{axis}"], rel=6e-3)
        assert float(line[3]) == pytest.approx(stored[f"turns_trained_{axis}"], rel=6e-3)
        assert float(line[4]) == pytest.approx(stored[f"turns_new_{axis}"], rel=6e-3)
        assert line[5:] == ["yes" if stored["unseen"] else "no", "no"]


def test_pairs_with_the_same_figures_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = inspect(f"vit_small_patch16_rope_224 {OPTIONS} --size 48", tmp_path, capsys)
    for pair in range(4):
        assert (
            sum(line.startswith(f"{pair}, {pair + 4}  columns, rows") for line in map(str.strip, out.splitlines())) == 1
        )


def test_the_suggested_check_is_a_command_that_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = inspect(f"vit_small_patch16_rope_224 {OPTIONS} --size 48", tmp_path, capsys)
    command = next(line for line in out.splitlines() if line.startswith("check")).removeprefix("check").strip()
    words = shlex.split(command)
    assert words[0] == "vision-rope"
    parsed = cli._build_parser().parse_args(words[1:])
    assert (parsed.target, parsed.sizes, parsed.extend) == ("vit_small_patch16_rope_224", "32,48", "none,interpolate")
    assert cli._read_options(parsed.option) == TINY
    model = timm.create_model(parsed.target, **cli._read_options(parsed.option))
    add_position(model, parsed.position).set_extension("interpolate")


def test_a_timm_model_without_one_is_told_of_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "vit_tiny_patch16_224"]) == 2
    assert "has no rotary embedding, so nothing turns; say which" in capsys.readouterr().err
    words = f"vit_tiny_patch16_224 {OPTIONS} --position dinov3 --size 64"
    out, found = inspect(words, tmp_path, capsys)
    assert found["position"] == "dinov3"
    assert "a step is 0.5 x 0.5 in training and 0.25 x 0.25 in the new grid" in " ".join(out.split())
    assert found["suggestion"]["method"] == "none"


def test_learned_frequencies_of_timm_names_are_said_to_be_untrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"vit_small_patch16_rope_mixed_224 {OPTIONS} --size 64"
    out, found = inspect(words, tmp_path, capsys)
    assert out.startswith("UNTRAINED FREQUENCIES")
    assert len(found["pairs"]) == 2 * 3 * 8
    for layer in range(2):
        unseen = sum(row["unseen"] for row in found["pairs"] if row["layer"] == layer)
        line = next(line for line in out.splitlines() if line.startswith(f"    {layer}  "))
        assert line.endswith(f"{unseen} of 24 pairs     0 of 24 pairs")
        waves = sorted(row["wavelength_trained_rows"] for row in found["pairs"] if row["layer"] == layer)
        least, median, most = (float(word) for word in line.replace("/", " ").split()[1:4])
        assert least == pytest.approx(waves[0], rel=6e-3)
        assert median == pytest.approx((waves[11] + waves[12]) / 2, rel=6e-3)
        assert most == pytest.approx(waves[-1], rel=6e-3)
    again, _ = inspect(f"{words} --layer 1", tmp_path, capsys)
    assert sum(line.strip().startswith(("0:", "1:", "2:")) for line in again.splitlines()) == 24
    assert found["pairs"] == json.loads((tmp_path / "inspect.json").read_text())["pairs"]


def test_a_run_has_its_trained_frequencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_run(tmp_path / "run")
    wanted = model.position.learned_frequencies.detach()
    out, found = inspect(f"{tmp_path / 'run'} --size 64x32", tmp_path / "out", capsys)
    assert "UNTRAINED" not in out
    assert f"vision-rope evaluate {tmp_path / 'run'} --sizes 32,64x32 --extend none,interpolate" in out
    places = [(row["layer"], row["head"], row["pair"]) for row in found["pairs"]]
    assert places == list(itertools.product(range(2), range(3), range(8)))
    stored = torch.tensor([[row["frequency_rows"], row["frequency_columns"]] for row in found["pairs"]])
    torch.testing.assert_close(stored.view(2, 3, 8, 2), wanted.permute(0, 1, 3, 2))
    # Without --out a run keeps it.
    assert cli.main(["inspect", str(tmp_path / "run")]) == 0
    assert "--size compares this grid" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run" / "inspect").iterdir()) == [
        "inspect.csv",
        "inspect.json",
        "inspect.png",
    ]


def test_a_masked_run_has_the_pairs_of_its_encoder(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", task="masked", masked=MaskedConfig(encoder="visible"))
    target = open_inspection_target(str(tmp_path / "run"))
    torch.testing.assert_close(target.rope.frequencies, model.encoder.position.frequencies)
    assert target.notes == ("These are the pairs of the encoder.",)


def test_the_largest_training_size_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "train_sizes: []" in config
    changed = config.replace("train_sizes: []", "train_sizes: ['32', '64x40']")
    (tmp_path / "run" / "config.yaml").write_text(changed)
    assert open_inspection_target(str(tmp_path / "run")).train_size == (64, 40)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "MODEL is missing"),
        ("vit_small_patch16_rope_22", "did you mean vit_small_patch16_rope_224"),
        ("sam2_m", "did you mean sam2_t"),
        ("vit_small_patch16_rope_224 --size 450,448", "size 450x448 is not divisible by the patch size 16"),
        ("vit_small_patch16_rope_224 --size 450,", "size is '450,', but it must be rows,columns in pixels"),
        ("vit_small_patch16_rope_224 --size 1,2,3", "size is '1,2,3', but it must be rows,columns"),
        ("vit_small_patch16_rope_224 --size wide", "size is 'wide', but it must be rows,columns"),
        ("vit_small_patch16_rope_224 --layer 0", "fixed and the same in every layer"),
        ("vit_small_patch16_rope_mixed_224 --layer 12", "layer is 12; vit_small_patch16_rope_mixed_224 has layers 0"),
        ("vit_small_patch16_rope_224 --weights last", "weights is 'last', but vit_small_patch16_rope_224 is not a run"),
        ("vit_tiny_patch16_224 --position dinov33", "did you mean 'dinov3'?"),
        ("vit_tiny_patch16_224 --position roformer", "has axes 1 and the model needs 2"),
        ("vit_tiny_patch16_224 --position t5", "'t5', which is not rotary"),
        ("vit_tiny_patch16_224 --position sam2 --option dept=3", "cannot be built with options {'dept': 3}"),
        ("swin_tiny_patch4_window7_224", "SwinTransformer, which add_position does not know"),
        ("sam2_t --position sam2", "position is 'sam2', but sam2_t is no timm name"),
        ("sam2_t --option depth=3", "option is {'depth': 3}, but sam2_t is no timm name"),
        ("sam2_t --families", "so that sam2_t has no effect"),
    ],
)
def test_mistakes_are_a_sentence(words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Failure classes 17 and 20."""
    assert cli.main(["inspect", *words.split(), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_mistakes_about_folders_and_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder: it holds no config"):
        open_inspection_target(str(tmp_path))
    make_run(tmp_path / "run", position="learned")
    with pytest.raises(ValueError, match="holds no last weights"):
        open_inspection_target(str(tmp_path / "run"), weights="last")
    with pytest.raises(ValueError, match="position encoding 'learned', which is not rotary"):
        open_inspection_target(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"position is 'sam2', but .*run is no timm name"):
        open_inspection_target(str(tmp_path / "run"), position="sam2")


@pytest.mark.parametrize(("text", "size"), [("224,448", (224, 448)), ("224x448", (224, 448)), ("96", (96, 96))])
def test_sizes_are_written_with_a_comma_or_an_x(text: str, size: tuple[int, int]) -> None:
    assert read_size(text) == size


def test_windows_are_said_not_to_grow() -> None:
    target = open_inspection_target("samvit_base_patch16", position="sam2")
    assert target.notes[0].startswith("Layers 0, 1, 3, 4, 6, 7, 9, 10 attend inside windows (14 tokens a side)")


def test_families_are_those_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--families"]) == 0
    tiers = [tier.splitlines() for tier in capsys.readouterr().out.strip().split("\n\n")]
    printed = {tuple(line.split(None, 1)): tier[0] for tier in tiers[:-1] for line in tier[1:]}
    assert printed == {(kind.__name__, row.examples): row.sizes for kind, row in FAMILIES.items()}
    assert tiers[-1][0] == "refused, by name"
    assert "swin, hiera" in tiers[-1][1]


def test_the_documented_figures_are_those_of_the_code() -> None:
    """docs/results/inspect was written by `vision-rope inspect vit_small_patch16_rope_224 --size 448,448`."""
    folder = Path(__file__).parent.parent / "docs" / "results" / "inspect"
    stored = json.loads((folder / "inspect.json").read_text())
    inspection = inspect_rope(open_inspection_target("vit_small_patch16_rope_224").rope, (14, 14), (28, 28))
    assert stored["suggestion"]["reason"] == explain_method(inspection)
    for row, wanted in zip(stored["pairs"], tabulate(inspection), strict=True):
        assert row == pytest.approx(wanted)
    assert (folder / "inspect.png").read_bytes().startswith(b"\x89PNG")


# SAM 2


def test_without_ultralytics_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    for name in [name for name in sys.modules if name.startswith("ultralytics.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"sam2_t is a SAM 2 model, and ultralytics.* is missing: pip install 'vision"):
        open_inspection_target("sam2_t")


@pytest.mark.integration
def test_sam2_turns_as_ultralytics_turns_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ultralytics", reason="needs the extra: pip install 'vision-rope[ultralytics]'")
    known = sam2.ultralytics_module("models.sam.build").sam_model_map
    assert {f"{name}.pt" for name in sam2.SAM2_NAMES} == {name for name in known if name.startswith("sam2")}
    out, found = inspect("sam2_t --size 1024,2048", tmp_path, capsys)
    assert (found["train_size"], found["train_grid"], found["grid"]) == ([1024, 1024], [64, 64], [64, 128])
    assert (found["depth"], found["head_dim"], len(found["pairs"])) == (4, 256, 128)
    assert out.count("on your own videos") == 1
    table = sam2.build_sam2("sam2_t").memory_attention.layers[3].cross_attn_image.compute_cis(end_x=3, end_y=2)
    by_column, by_row = table[1].angle(), table[3].angle()
    for pair, row in enumerate(found["pairs"]):
        assert row["frequency_columns"] == pytest.approx(float(by_column[pair]), rel=1e-4, abs=1e-9)
        assert row["frequency_rows"] == pytest.approx(float(by_row[pair]), rel=1e-4, abs=1e-9)


@pytest.mark.integration
def test_sam2_checkpoints_are_read_without_running_code(tmp_path: Path) -> None:
    """Failure classes 33 and 43."""
    pytest.importorskip("ultralytics", reason="needs the extra: pip install 'vision-rope[ultralytics]'")
    memory = sam2.build_sam2("sam2.1_t").memory_attention
    state = {f"memory_attention.{name}": value for name, value in memory.state_dict().items()}
    # The name says nothing, and Meta's files have the state under a key.
    for name, content in (("plain.pt", state), ("named.pt", {"model": state})):
        torch.save(content, tmp_path / name)
        target = open_inspection_target(str(tmp_path / name))
        assert target.rope.name == "sam2"
        assert target.output == Path("runs/inspect") / Path(name).stem
    loaded = sam2.load_sam2_memory(tmp_path / "plain.pt").memory_attention.state_dict()
    for name, value in memory.state_dict().items():
        assert torch.equal(loaded[name], value)
    torch.save(memory, tmp_path / "module.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("module", "text", "empty"):
        with pytest.raises(ValueError, match=f"{name}.pt is no checkpoint of tensors alone"):
            open_inspection_target(str(tmp_path / f"{name}.pt"))
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    for name in ("other", "tensor"):
        with pytest.raises(ValueError, match=f"{name}.pt does not hold the memory attention of SAM 2"):
            open_inspection_target(str(tmp_path / f"{name}.pt"))
