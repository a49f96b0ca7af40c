"""Families that timm's set_input_size fits to a size: Beit, VisionTransformerRelPos, VisionTransformerSAM.

What every family promises is in tests/test_convert_families.py; here are relative biases of their own, windows, sizes.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.layers import set_fused_attn
from timm.models.vision_transformer_relpos import ResPostRelPosBlock
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.checkpoint import load_run
from vision_rope.config import load_config
from vision_rope.convert import timm_state_dict
from vision_rope.encodings import ENCODINGS
from vision_rope.evaluate import evaluate, sweep
from vision_rope.frequencies import Ladder
from vision_rope.masked_model import MaskedModel, create_decoder
from vision_rope.relative import RelativeTerms
from vision_rope.rope_presets import PRESETS
from vision_rope.trainer import Trainer, train

# timm's interpolation of tables of biases.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted"),
]

HEADS, HEAD_DIM, DEPTH, PATCH, WINDOW = 3, 16, 2, 8, 3
GRID = (4, 5)
TINY: dict[str, Any] = {
    "depth": DEPTH,
    "embed_dim": HEADS * HEAD_DIM,
    "num_heads": HEADS,
    "num_classes": 5,
    "patch_size": PATCH,
}
BEIT, RELPOS, SAM = "beit_base_patch16_224", "vit_relpos_small_patch16_224", "samvit_base_patch16"
WINDOWS: dict[str, Any] = {"window_size": WINDOW, "global_attn_indexes": (1,)}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": (BEIT, {}),
    "beit absolute": (BEIT, {"use_abs_pos_emb": True, "use_rel_pos_bias": False, "global_pool": "token"}),
    "beit shared": (BEIT, {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "init_values": None}),
    "relpos": (RELPOS, {"init_values": 0.5}),
    "relpos token": (RELPOS, {"class_token": True, "global_pool": "token", "qk_norm": True}),
    "relpos table": (RELPOS, {"rel_pos_type": "bias", "class_token": True, "block_fn": ResPostRelPosBlock}),
    "relpos shared": (RELPOS, {"rel_pos_type": "bias", "shared_rel_pos": True}),
    "sam": (SAM, {**WINDOWS, "use_rel_pos": True, "neck_chans": 8}),
    "sam absolute": (SAM, {**WINDOWS, "use_rel_pos": False, "neck_chans": 0, "qk_norm": True, "init_values": 0.5}),
    "sam global": (SAM, {"window_size": 0, "use_rel_pos": True, "neck_chans": 0}),
}
BIASED = [kind for kind in KINDS if not kind.startswith("sam")]
ABSOLUTE = ("beit absolute", "sam", "sam absolute", "sam global")
# One of each kind of position.
ROPES = [name for name in PRESETS if vr.preset(name, head_dim=24).axes == 2]
POSITIONS = ("rope-vit-axial", "rope-vit-mixed", "sinusoidal", "shaw", "alibi", "none")
KINDS_AND_POSITIONS = [
    *((kind, "rope-vit-mixed") for kind in KINDS),
    *(
        (kind, position)
        for kind in ("beit", "relpos token", "sam")
        for position in POSITIONS
        if "mixed" not in position
    ),
]
BIASES = ("rel_pos", "relative_position")


@torch.no_grad()
def randomise(model: Any, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1 and not any(word in name for word in BIASES):
            parameter.copy_(noise * (1.5 / math.sqrt(parameter[0].numel())))
        else:
            parameter.copy_(noise * 0.3 + (1.0 if "norm" in name or "gamma" in name else 0.0))
    return model.eval()


def build_timm(kind: str, grid: tuple[int, int] = GRID, **options: Any) -> Any:
    name, own = KINDS[kind]
    return randomise(
        timm.create_model(name, **{**TINY, "img_size": (grid[0] * PATCH, grid[1] * PATCH), **own, **options})
    )


def build(kind: str, position: Any = "rope-vit-axial", **options: Any) -> Any:
    keep = options.pop("keep_absolute", False)
    # Not bound to the grid that the model is built for, so that its weights fit another.
    more = {"clip": 3} if position in ("shaw", "deberta") else {}
    model = vr.add_position(build_timm(kind, **options), position, keep_absolute=keep, **more)
    with torch.no_grad():
        for parameter in model.position.parameters() if isinstance(model.position, nn.Module) else ():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model.eval()


def zero_rope() -> vr.Rope:
    slots = tuple(range(HEAD_DIM // 4)), tuple(range(HEAD_DIM // 4, HEAD_DIM // 2))
    ladders = [Ladder(base=100.0, pairs=HEAD_DIM // 4, slots=own, scale=0.0) for own in slots]
    return vr.Rope(head_dim=HEAD_DIM, axes=2, ladders=ladders, depth=DEPTH)


def images(rows: int = GRID[0], columns: int = GRID[1], batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rows + columns)
    return torch.randn(batch, 3, rows * PATCH, columns * PATCH, generator=generator)


def pixels(*grid: int) -> tuple[int, int]:
    return grid[0] * PATCH, grid[1] * PATCH


def step(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs in training, with dropout, and the gradients of all parameters."""
    model.train().zero_grad()
    torch.manual_seed(3)
    out = model(x)
    out.square().sum().backward()
    model.eval()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == dict(model.named_parameters()).keys()
    return out.detach(), grads


def assert_equal(got: Any, wanted: Any) -> None:
    assert_close(got, wanted, rtol=0, atol=0)


# ---- what timm did, it still does


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_rotation_changes_no_bit(kind: str, fused: bool) -> None:
    """Outputs, gradients with dropout, maps, and what set_input_size makes of them."""
    set_fused_attn(fused)
    try:
        theirs = build_timm(kind, drop_path_rate=0.2, proj_drop_rate=0.1, attn_drop_rate=0.1)
        ours = vr.add_position(copy.deepcopy(theirs), zero_rope(), keep_absolute=True)
    finally:
        set_fused_attn(True)
    assert isinstance(ours, type(theirs))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for batch in (1, 2):
        x = images(batch=batch)
        assert_equal(step(ours, x), step(theirs, x))
        with torch.no_grad():
            assert_equal(ours(x), theirs(x))
    for grid in ((3, 7), (6, 2)):
        if not kind.startswith("sam"):  # which has no such method in timm, and takes images of any size
            for model in (ours, theirs):
                model.set_input_size(img_size=pixels(*grid))
            assert ours.patch_embed.grid_size == grid
        assert_equal(step(ours, images(*grid)), step(theirs, images(*grid)))
        assert ours.train_grid == GRID


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_forward_intermediates_are_timms(kind: str) -> None:
    theirs = build_timm(kind)
    ours = vr.add_position(copy.deepcopy(theirs), zero_rope(), keep_absolute=True)
    x = images()
    flags: dict[str, Any] = {"norm": True, "stop_early": True, "intermediates_only": True, "indices": [0]}
    if not kind.startswith("sam"):
        flags["output_fmt"] = "NLC"
        if ours.num_prefix_tokens:  # timm's stumbles where there are none
            flags["return_prefix_tokens"] = True
    for chosen in ({}, flags, *({name: value} for name, value in flags.items())):
        assert_equal(ours.forward_intermediates(x, **chosen), theirs.forward_intermediates(x, **chosen))
    assert_equal(ours.forward_features(x), theirs.forward_features(x))
    with pytest.raises(ValueError, match="output_fmt is 'NHWC'"):
        ours.forward_intermediates(x, output_fmt="NHWC")
    for model in (theirs, ours):
        torch.manual_seed(1)
        model.reset_classifier(7)
    assert_equal(ours(x), theirs(x))
    for model in (theirs, ours):
        model.prune_intermediate_layers([0])
    assert_equal(ours.forward_intermediates(x, indices=[0]), theirs.forward_intermediates(x, indices=[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_what_leaves_them(kind: str) -> None:
    """The absolute embedding goes; biases go with "none" alone; keep_absolute keeps all."""
    before = build_timm(kind).state_dict()
    biases = {name for name in before if any(word in name for word in BIASES)}
    absolute = {"pos_embed"} & before.keys()
    assert bool(absolute) == (kind in ABSOLUTE)
    assert bool(biases) == (kind not in ("beit absolute", "sam absolute"))
    after = build(kind, "rope-vit-mixed").state_dict()
    assert before.keys() - after.keys() == absolute
    assert after.keys() - before.keys() == {"position.learned_frequencies"}
    assert all(torch.equal(after[name], value) for name, value in before.items() if name in after)
    assert before.keys() - build(kind, "none").state_dict().keys() == absolute | biases
    assert build(kind, "none", keep_absolute=True).state_dict().keys() == before.keys()
    if absolute:
        assert build(kind, "learned").state_dict().keys() == before.keys()


# ---- positions inside the model, written a second time


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, pairing: Any) -> Tensor:
    angles = torch.einsum("na,hap->hnp", positions.double(), frequencies.double())
    return vr.rotate(x, vr.Rotation(angles.cos().float(), angles.sin().float(), pairing))


def attend_by_hand(layer: Any, x: Tensor, position: Any, places: Tensor, depth: int, bias: Any) -> Tensor:
    """Shapes: x (batch, tokens, dim), places (tokens, 2), bias(q) -> (batch, heads, tokens, tokens)."""
    weight, shift = layer.qkv.weight, layer.qkv.bias
    if getattr(layer, "q_bias", None) is not None:
        shift = torch.cat((layer.q_bias, torch.zeros_like(layer.q_bias), layer.v_bias))
    q, k, v = nn.functional.linear(x, weight, shift).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q), layer.k_norm(k)
    own = bias(q)
    if isinstance(position, vr.Rope):
        frequencies = position.frequencies[depth if len(position.frequencies) > 1 else 0]
        q, k = (turned(part, places, frequencies, position.pairing) for part in (q, k))
    scale = HEAD_DIM**-0.5 * getattr(position, "attention_scale", 1.0)
    scores = q @ k.transpose(-2, -1) * scale + own
    if isinstance(position, RelativeTerms):
        scores = scores + position.score_bias(q, k, scale)
    weights = scores.softmax(-1)
    out = weights @ v
    if isinstance(position, RelativeTerms) and position.values is not None:
        out = out + position.value_term(weights)
    return layer.proj(out.transpose(1, 2).flatten(2))


def places_of(position: str, rows: int, columns: int) -> Tensor:
    places = vr.grid_positions(rows, columns)
    if position == "eva02":
        return places * 16 / torch.tensor([rows, columns])
    if position == "dinov3":
        return 2 * (places + 0.5) / torch.tensor([rows, columns]) - 1
    return places


INSIDE = ("rope-vit-axial", "rope-vit-mixed", "eva02", "dinov3", "shaw", "deberta")


@pytest.mark.parametrize("position", INSIDE)
@pytest.mark.parametrize("kind", ["beit", "beit shared", "relpos", "relpos token", "relpos table"])
@torch.no_grad()
def test_positions_in_a_model_with_biases(kind: str, position: str) -> None:
    """On a rectangular grid that it was not built for. Failure classes 1, 2 and 10."""
    model = build(kind, position)
    grid = (3, 6)
    model.set_input_size(img_size=pixels(*grid))
    prefix = model.num_prefix_tokens
    places = vr.with_prefix(places_of(position, *grid), prefix)
    shared = model._shared_bias()
    calls: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda layer, inputs, output: calls.append((inputs[0], output)))
    model(images(*grid))
    for depth, (x, out) in enumerate(calls):
        layer = model.blocks[depth].attn
        own = layer._own_bias() if shared is None else shared
        encoding = model.position
        if not isinstance(encoding, vr.Rope):
            encoding = encoding(vr.grid_positions(*grid), grid, prefix)[depth]
        assert_close(
            out, attend_by_hand(layer, x, encoding, places, depth, lambda q, own=own: own), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("position", INSIDE)
@pytest.mark.parametrize("kind", ["sam", "sam absolute"])
@torch.no_grad()
def test_positions_in_windows_and_in_the_whole_grid(kind: str, position: str) -> None:
    """Windows of 3 x 3 over 4 x 5 patches, cut by hand: each has its own positions, padding too."""
    model = build(kind, position)
    maps: dict[int, list[Tensor]] = {0: [], 1: []}
    for depth, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(lambda _, x, out, d=depth: maps[d].extend((x[0], out)))
        block.norm2.register_forward_hook(lambda _, x, out, d=depth: maps[d].append(x[0]))
    model(images())
    for depth, size in ((0, (WINDOW, WINDOW)), (1, GRID)):
        block, (before, x, after) = model.blocks[depth], maps[depth]
        layer = block.attn
        attended = torch.zeros_like(x)
        for top, left in itertools.product(range(0, GRID[0], size[0]), range(0, GRID[1], size[1])):
            rows, columns = min(size[0], GRID[0] - top), min(size[1], GRID[1] - left)
            window = torch.zeros(2, *size, x.shape[-1])
            window[:, :rows, :columns] = x[:, top : top + rows, left : left + columns]
            encoding = model.position
            if not isinstance(encoding, vr.Rope):
                encoding = encoding(vr.grid_positions(*size), size)[depth]

            def bias(q: Tensor, layer: Any = layer, size: Any = size) -> Any:
                if not layer.use_rel_pos:
                    return 0.0
                cells = list(itertools.product(range(size[0]), range(size[1])))
                vectors = torch.stack(
                    [
                        torch.stack(
                            [
                                layer.rel_pos_h[r - i + size[0] - 1] + layer.rel_pos_w[c - j + size[1] - 1]
                                for i, j in cells
                            ]
                        )
                        for r, c in cells
                    ]
                )
                return torch.einsum("bhqd,qkd->bhqk", q, vectors)

            out = attend_by_hand(layer, window.flatten(1, 2), encoding, places_of(position, *size), depth, bias)
            part = out.unflatten(1, size)[:, :rows, :columns]
            attended[:, top : top + rows, left : left + columns] = part
        if hasattr(block.ls1, "gamma"):
            attended = attended * block.ls1.gamma
        assert_close(after.unflatten(1, GRID) - before, attended, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["rope-vit-axial", "alibi", "none", "none, kept"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("sam", "sam absolute")])
@torch.no_grad()
def test_order_of_patches_matters(kind: str, position: str) -> None:
    """Without windows, which see who shares them, and pooled by averaging."""
    model = build(kind, position.split(",")[0], keep_absolute="kept" in position, global_pool="avg")
    x = images()
    patches = x.unflatten(3, (GRID[1], PATCH)).unflatten(2, (GRID[0], PATCH)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved = patches[:, torch.randperm(GRID[0] * GRID[1], generator=torch.Generator().manual_seed(1))]
    y = moved.unflatten(1, GRID).permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4)
    difference = (model(x) - model(y)).abs().max()
    assert difference < 1e-4 if position == "none" else difference > 1e-3


@pytest.mark.parametrize("kind", BIASED)
@torch.no_grad()
def test_masks_beside_biases(kind: str) -> None:
    """These classes of timm take no masks; ours do as the others, whatever the position."""
    tokens = GRID[0] * GRID[1] + build_timm(kind).num_prefix_tokens
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    numbers = torch.zeros(tokens, tokens).masked_fill(~causal, float("-inf"))
    for position in ("rope-vit-axial", "none", "learned" if kind in ABSOLUTE else "sinusoidal", "alibi"):
        model = build(kind, position)
        wanted = model.forward_features(images(), is_causal=True)
        assert not torch.allclose(wanted, model.forward_features(images()))
        for mask in (causal, numbers):
            assert_close(model.forward_features(images(), attn_mask=mask), wanted, rtol=1e-5, atol=1e-5)
            assert_close(model.forward_intermediates(images(), attn_mask=mask)[0], wanted, rtol=1e-5, atol=1e-5)


# ---- sizes


@pytest.mark.parametrize(("kind", "position"), KINDS_AND_POSITIONS)
@torch.no_grad()
def test_set_input_size(kind: str, position: str) -> None:
    """The same as fitting timm's model and converting it then; failure classes 2 and 18."""
    model = build(kind, position)
    for grid in ((5, 4), (2, 10), (7, 3)):
        model.set_input_size(img_size=pixels(*grid))
        out = model(images(*grid))
        assert model.train_grid == GRID
        # Another state dict, of the size the model has now.
        fresh = build(kind, position, grid=grid)
        fresh.load_state_dict(model.state_dict())
        assert_close(fresh(images(*grid)), out, rtol=0, atol=1e-6)
    if position != "none":
        model.set_input_size(img_size=pixels(3, 7))
        assert (model(images(7, 3).transpose(2, 3)) - out).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_other_sizes(kind: str) -> None:
    """Refused with the remedy; SAM takes them, as timm's does. Failure class 17."""
    model = build(kind)
    for call in (model, model.forward_features, model.forward_intermediates):
        if kind.startswith("sam"):
            call(images(7, 3))
        else:
            with pytest.raises(ValueError, match=r"images have 56 x 24 pixels and the model takes 32 x 40") as caught:
                call(images(7, 3))
            assert "model.set_input_size(img_size=(56, 24))" in str(caught.value)
        with pytest.raises(ValueError, match=r"images have (height 33, .* 32 or 40|33 x 40 pixels)"):
            call(torch.randn(1, 3, 33, 40))
    for size in (33, (33, 40), (32, 41)):
        with pytest.raises(ValueError, match=r"img_size has (height 33|width 41), which patches of 8 pixels do not"):
            model.set_input_size(img_size=size)
    with pytest.raises(ValueError, match="patches of 3 pixels"):
        model.set_input_size(patch_size=(3, 3))
    assert model.patch_embed.img_size == pixels(*GRID)
    model.set_input_size(patch_size=(16, 8))
    assert model(images()).shape == (2, 5)
    assert model.patch_embed.grid_size == (2, 5)


@pytest.mark.parametrize("kind", ["sam", "sam absolute", "sam global"])
@torch.no_grad()
def test_sam_resamples_once_what_it_would_resample_each_time(kind: str) -> None:
    model = build(kind, keep_absolute=True)
    x = images(7, 3)
    wanted = model(x)
    tables = {name: value.shape for name, value in model.state_dict().items() if "rel_pos" in name}
    model.blocks[1].attn.requires_grad_(False)
    model.set_input_size(img_size=pixels(7, 3))
    assert torch.equal(model(x), wanted)
    assert model.pos_embed.shape == (1, 7, 3, 48)
    assert model.patch_embed.img_size == pixels(7, 3)
    for name, shape in tables.items():
        windowed = kind == "sam" and ".0." in name
        length = WINDOW if windowed else 7 if name.endswith("h") else 3
        assert model.state_dict()[name].shape == (2 * length - 1, HEAD_DIM)
        assert windowed == (model.state_dict()[name].shape == shape)
        assert model.get_parameter(name).requires_grad == (".0." in name)
    embedding = torch.randn(1, 2, 5, 48)
    assert model.fit_absolute(embedding, (2, 5)).shape == (1, 7, 3, 48)
    with pytest.raises(ValueError, match="the grid is 5 x 2"):
        model.fit_absolute(embedding, (5, 2))


# ---- timm's own rotation in SAM


@pytest.mark.parametrize("reference", [None, ((7, 6), (5, 4))])
@torch.no_grad()
def test_own_rotation_of_sam(reference: Any) -> None:
    options = {"use_rel_pos": False, "use_rope": True, "ref_feat_shape": reference}
    theirs = build_timm("sam", **options)
    ours = vr.add_position(copy.deepcopy(theirs), "own")
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert not any(type(part).__module__.startswith("timm") and "rope" in name for name, part in ours.named_modules())
    x = images()
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    without = vr.add_position(copy.deepcopy(theirs), "learned")
    assert (without(x) - ours(x)).abs().max() > 1e-3
    # It is replaced by others.
    replaced = vr.add_position(copy.deepcopy(theirs), "rope-vit-axial")
    plain = build_timm("sam", use_rel_pos=False)
    plain.load_state_dict(theirs.state_dict())
    assert torch.equal(replaced(x), vr.add_position(plain, "rope-vit-axial")(x))
    # Another size, where timm's has but the one table.
    assert ours(images(7, 3)).isfinite().all()
    vr.convert_pairing(ours, "half")
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    again = copy.deepcopy(theirs)
    again.load_state_dict(timm_state_dict(ours))
    assert torch.equal(again(x), theirs(x))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_another_pairing_computes_the_same(kind: str) -> None:
    """SAM's vectors of offsets meet queries, and so follow their channels."""
    model = build(kind)
    wanted = model(images())
    weights = copy.deepcopy(model.state_dict())
    vr.convert_pairing(model, "half")
    assert_close(model(images()), wanted, rtol=1e-4, atol=1e-5)
    model.load_state_dict(weights)
    assert not torch.allclose(model(images()), wanted, atol=1e-3)


# ---- context extension


@torch.no_grad()
def test_windows_are_not_extended() -> None:
    model = build("sam")
    seen: list[vr.Rotation] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["rope"]), with_kwargs=True)
    model(images(8, 10))
    vr.set_extension(model, "yarn")
    model(images(8, 10))
    model(images())
    windows, grids = seen[::2], seen[1::2]
    assert all(torch.equal(window.cos, windows[0].cos) and window.attention_scale == 1.0 for window in windows)
    assert not torch.equal(grids[0].cos, grids[1].cos)
    assert grids[1].attention_scale > 1
    assert grids[2].attention_scale == 1
    all_windows = build("sam", global_attn_indexes=())
    with pytest.raises(ValueError, match="yarn means nothing for this model: all of its blocks attend inside windows"):
        vr.set_extension(all_windows, "yarn")
    vr.set_extension(all_windows, "none")


@pytest.mark.parametrize("kind", BIASED)
@torch.no_grad()
def test_extension_counts_from_the_grid_of_building(kind: str) -> None:
    model = build(kind, "rope-vit-axial")
    vr.set_extension(model, "interpolate")
    other = build(kind, "rope-vit-axial")
    assert torch.equal(model(images()), other(images()))
    for each in (model, other):
        each.set_input_size(img_size=pixels(8, 10))
    assert (model(images(8, 10)) - other(images(8, 10))).abs().max() > 1e-3
    assert torch.equal(model.position.positions(8, 10), other.position.positions(8, 10))


# ---- training, copies, dtypes


@pytest.mark.parametrize(("kind", "position"), KINDS_AND_POSITIONS)
def test_checkpointing_changes_no_gradient(kind: str, position: str) -> None:
    """Every parameter gets one, too; failure class 12."""
    model = build(kind, position, drop_path_rate=0.2, proj_drop_rate=0.1)
    wanted = copy.deepcopy(step(model, images()))
    model.set_grad_checkpointing()
    assert_equal(step(model, images()), wanted)
    assert all(gradient.isfinite().all() for gradient in wanted[1].values())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_copies_and_low_precision(kind: str) -> None:
    """Failure classes 4 and 5."""
    for position in ("rope-vit-mixed", "deberta"):
        model = build(kind, position)
        wanted = model(images())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(images()), wanted)
        model.bfloat16()
        out = model(images().bfloat16())
        assert out.dtype == torch.bfloat16
        assert_close(out.float(), wanted, rtol=0.1, atol=0.1 * float(wanted.abs().max()))
        assert position == "deberta" or model.position.frequencies.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_meta_device(kind: str) -> None:
    """Failure class 6: timm's indices of offsets are in no file; loading weights makes them right."""
    wanted = build(kind)
    with torch.device("meta"):
        empty = build(kind)
    empty.to_empty(device="cpu")
    for buffer in empty.buffers():
        buffer.fill_(1)
    empty.load_state_dict(wanted.state_dict())
    assert torch.equal(empty(images()), wanted(images()))
    if hasattr(empty, "init_weights"):
        empty.init_weights()
        assert empty(images()).isfinite().all()


# ---- refusals


def test_refusals() -> None:
    for kind in KINDS:
        model = build_timm(kind)
        before = model(images())
        with pytest.raises(ValueError, match=r"attention is 'linear'.*relative biases"):
            vr.add_position(model, "rope-vit-axial", attention="linear")
        with pytest.raises(ValueError, match="no rotary embedding of its own"):
            vr.add_position(model, "own")
        with pytest.raises(ValueError, match="did you mean 'base'"):
            vr.add_position(model, "rope-vit-axial", bas=3.0)
        if kind not in ABSOLUTE:
            with pytest.raises(ValueError, match="no absolute embedding to keep"):
                vr.add_position(model, "learned")
        assert torch.equal(model(images()), before)
        assert not isinstance(model, vr.convert.PositionedModel)
        model.blocks[0].__class__ = type("OtherBlock", (type(model.blocks[0]),), {})
        with pytest.raises(ValueError, match="the model's blocks are OtherBlock"):
            vr.add_position(model, "rope-vit-axial")
    # Failure class 19: timm's own model cannot be trained with it.
    with pytest.raises(ValueError, match=r"patch_drop_rate is 0\.25, and windows need all patches"):
        build("sam", patch_drop_rate=0.25)
    with pytest.raises(ValueError, match="no absolute embedding to keep"):
        build("sam absolute", use_abs_pos=False, keep_absolute=True)
    model = build("sam")
    with pytest.raises(ValueError, match="patches were left out"):
        model.forward_patches(model.embed_patches(images()), kept=torch.tensor([[0], [1]]))


# ---- evaluation and training runs


class Pictures:
    """Seven random pictures of two classes, in memory."""

    classes = ("a", "b", "c", "d", "e")

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(256, (3, 50, 60), dtype=torch.uint8, generator=generator), index % 5


@pytest.mark.parametrize("kind", ["beit", "relpos token", "sam"])
def test_evaluation_fits_a_copy_to_each_size(kind: str) -> None:
    model = build(kind)
    before, weights = model(images()).detach(), copy.deepcopy(model.state_dict())
    sizes = [(32, 40), (40, 32), (64, 64)]
    options: dict[str, Any] = {
        "task": None,
        "methods": ["interpolate"],
        "train_size": (32, 40),
        "patch_size": (PATCH, PATCH),
        "device": torch.device("cpu"),
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
        "batch_size": 4,
        "num_workers": 0,
        "progress": False,
    }
    rows = sweep(model, Pictures(), sizes=sizes, **options)
    assert torch.equal(model(images()), before)
    assert_equal(model.state_dict(), weights)
    assert model.extension is None
    assert [row["size"] for row in rows] == ["32x40", "32x40", "40x32", "40x32", "64", "64"]
    losses = {(row["size"], row["method"]): row["nll"] for row in rows}
    assert losses["32x40", "none"] == losses["32x40", "interpolate"]
    assert losses["64", "none"] != losses["64", "interpolate"]
    for size in sizes:
        fitted = copy.deepcopy(model)
        fitted.set_input_size(img_size=size)
        (row,) = sweep(fitted, Pictures(), sizes=[size], **{**options, "methods": ["none"]})
        assert row["nll"] == pytest.approx(losses[row["size"], "none"], rel=1e-6)


def test_masked_prediction_with_biases() -> None:
    """A hidden patch is a mask token at its place; evaluation fits the encoder. Nothing is left out of whole grids."""
    encoder = build("beit", num_classes=0)
    model = MaskedModel(encoder)
    masks = torch.zeros(2, *GRID, dtype=torch.bool)
    masks[:, 1:, ::2] = True
    assert model(images(), masks).shape == (2, GRID[0] * GRID[1], 3 * PATCH**2)
    model.set_input_size((24, 48))
    assert model(images(3, 6), masks[:, :3].repeat(1, 1, 2)[..., :6]).shape[1] == 18
    shape = {"dim": 16, "depth": 1, "num_heads": 1}
    with pytest.raises(ValueError, match="no patches can be left out; encode all of them"):
        MaskedModel(encoder, create_decoder(encoder, position="rope-vit-axial", **shape))
    with pytest.raises(ValueError, match="no patches can be left out"):
        encoder.forward_patches(encoder.embed_patches(images(3, 6)), kept=torch.tensor([[0], [1]]))
    without = build("beit", "none", num_classes=0)
    both = MaskedModel(without, create_decoder(without, position="none", **shape))
    assert both(images(), masks).shape == (2, GRID[0] * GRID[1], 3 * PATCH**2)
    with pytest.raises(ValueError, match="whose neck mixes patches"):
        MaskedModel(build("sam", num_classes=0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for label, colour in (("dark", 40), ("light", 200)):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            for index in range(count):
                noise = torch.randint(-20, 20, (40, 48, 3), generator=torch.Generator().manual_seed(index))
                picture = Image.fromarray((noise + colour).to(torch.uint8).numpy())
                picture.save(tmp_path / "data" / split / label / f"{index}.png")
    return tmp_path


def words(folder: Path, kind: str, **more: Any) -> list[str]:
    name, options = KINDS[kind]
    options = {**TINY, **{k: v for k, v in options.items() if k not in ("block_fn", "global_attn_indexes")}}
    del options["num_classes"]
    flags = {
        "model.name": name,
        "model.position": "rope-vit-mixed",
        **{f"model.options.{key}": value for key, value in options.items()},
        "data.source": f"folder:{folder / 'data'}",
        "data.val_split": "val",
        "data.size": "[24, 32]",
        "batch_size": 4,
        "schedule.epochs": 1,
        "schedule.warmup_epochs": 0,
        "evaluation.sizes": "[24x32, 32, 40x24]",
        "evaluation.extend": "[none, interpolate]",
        "run.output": folder / "run",
        "run.device": "cpu",
        "run.num_workers": 0,
        "run.progress": "false",
        "run.tensorboard": "false",
        **more,
    }
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["beit", "relpos", "sam"])
def test_a_training_run(kind: str, folder: Path) -> None:
    """It trains at its rectangular size and is swept over others; failure class 18."""
    result = train(load_config(words(folder, kind)))
    assert math.isfinite(result.rows[-1]["train_loss"])
    assert (folder / "run" / "evaluation" / "evaluation.png").is_file()
    model: Any = load_run(folder / "run", device=torch.device("cpu")).model
    assert model.patch_embed.img_size == (24, 32)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["beit absolute", "relpos", "sam"])
def test_evaluation_of_a_timm_model(kind: str, folder: Path) -> None:
    name, options = KINDS[kind]
    options = {key: value for key, value in {**TINY, **options, "img_size": 32}.items() if key != "num_classes"}
    for position in ("rope-vit-axial", None):
        rows, files = evaluate(
            name,
            data=f"folder:{folder / 'data'}",
            split="val",
            position=position,
            model_options=options,
            sizes="32,24x40",
            extend="ntk",
            device="cpu",
            num_workers=0,
            progress=False,
            output=folder / "out",
        )
        methods = [(row["size"], row["method"]) for row in rows if row["nll"] is not None]
        both = ("none", "ntk") if position else ("none",)
        assert methods == [(size, method) for size in ("32", "24x40") for method in both]
        assert all(path.is_file() for path in files)


def test_training_at_other_sizes_is_refused(folder: Path) -> None:
    """Before the first step."""
    for key, more in {
        "data.train_sizes": {"data.train_sizes": "[24x32, 32]"},
        "data.size": {"model.options.img_size": 32},
    }.items():
        with pytest.raises(ValueError, match=rf"{key}: size .* takes images of .* pixels alone; train at that size"):
            Trainer(load_config(words(folder, "beit", **more)))
    Trainer(load_config(words(folder, "sam", **{"data.train_sizes": "[24x32, 32]", "run.output": folder / "other"})))


# ---- compile and export


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "position"), [("beit shared", "dinov3"), ("relpos", "sinusoidal"), ("sam", "deberta")]
)
@torch.no_grad()
def test_compile_and_export(kind: str, position: str) -> None:
    """Failure class 7; with the rows of tests/test_convert_families.py one of each kind of position."""
    model = build(kind, position)
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="eager")
    for grid in (GRID, (3, 6)):
        model.set_input_size(img_size=pixels(*grid))
        assert_close(fast(images(*grid)), model(images(*grid)), rtol=0, atol=2e-5)
    program = torch.export.export(model, (images(3, 6),))
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    assert_close(program.module()(images(3, 6)), model(images(3, 6)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("position", [*ROPES, *ENCODINGS])
@torch.no_grad()
def test_every_position_works(position: str) -> None:
    for kind in ("beit absolute", "sam"):
        model = build(kind, position)
        assert model(images()).isfinite().all()
