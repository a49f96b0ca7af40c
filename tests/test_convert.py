"""timm's VisionTransformer family with position encodings: every model of MODELS with every row of the tables."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn, set_reentrant_ckpt
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.convert import FAMILIES
from vision_rope.encodings import ENCODINGS
from vision_rope.extension import EXTENSIONS
from vision_rope.frequencies import Ladder
from vision_rope.relative import RelativeEncoding
from vision_rope.rope_presets import PRESETS

HEAD_DIM, HEADS, DEPTH = 24, 2, 2
TINY: dict[str, Any] = {"depth": DEPTH, "embed_dim": HEAD_DIM * HEADS, "num_heads": HEADS, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "average pooling": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "clip": ("vit_base_patch16_clip_224", {}),
    "dinov2 registers": ("vit_small_patch14_reg4_dinov2", {}),
    "flexivit": ("flexivit_small", {}),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True, "scale_attn_norm": True}),
    "norm after": ("vit_tiny_patch16_224", {"block_fn": ResPostBlock, "init_values": 0.5}),
    "rpn": ("vit_base_patch16_rpn_224", {}),
    "parallel": ("vit_small_patch16_18x2_224", {"block_fn": functools.partial(ParallelThingsBlock, num_parallel=2)}),
    # Timm's own rotation is off: these tests compare what is left. tests/test_convert_own.py has it on.
    "eva": ("eva_giant_patch14_224", {}),
    "eva02": ("eva02_tiny_patch14_224", {"use_rot_pos_emb": False}),
    "dinov3": ("vit_small_patch16_dinov3_qkvb", {"use_rot_pos_emb": False, "use_abs_pos_emb": True}),
    "perception encoder": ("vit_pe_core_base_patch16_224", {"use_rot_pos_emb": False}),
    "narrow heads": ("vit_tiny_patch16_224", {"num_heads": 4, "embed_dim": 48, "init_values": 0.1}),
}
ROPES = [name for name in PRESETS if vr.preset(name, head_dim=HEAD_DIM).axes == 2]
LEARNED = [name for name in ROPES if isinstance(vr.preset(name, head_dim=HEAD_DIM).frequencies, nn.Parameter)]
FIXED = [name for name in ROPES if name not in LEARNED]
RELATIVE = [
    name for name, row in ENCODINGS.items() if isinstance(row.build, type) and issubclass(row.build, RelativeEncoding)
]
POSITIONS = [*ROPES, *ENCODINGS]
# One of each kind of position: fixed tables, learned ones, biases of scores, an absolute embedding.
REPRESENTATIVES = ("rope-vit-axial", "rope-vit-mixed", "deberta", "learned")
# Indices, stretched, centred, shifted ones; halves of each axis.
KINDS_OF_TABLES = ("rope-vit-axial", "eva02", "dinov3", "perception-encoder", "gemma4-vision")
# Every model with the representatives and every position in one model; the rest of the product is for `make test-all`.
EVERY_MODEL_AND_POSITION = [
    pytest.param(kind, position, marks=() if kind == "vit" or position in REPRESENTATIVES else pytest.mark.slow)
    for kind, position in itertools.product(MODELS, POSITIONS)
]


def vit_with_all_and(kinds: tuple[str, ...], positions: list[str]) -> list[tuple[str, str]]:
    """Every position in the plain model, the representatives in the others."""
    return [("vit", position) for position in positions] + [
        (kind, position) for kind in kinds for position in positions if position in REPRESENTATIVES
    ]


def patch_of(kind: str) -> int:
    return 14 if "patch14" in MODELS[kind][0] else 16


def options_of(kind: str, rows: int = 4, columns: int = 4, **options: Any) -> dict[str, Any]:
    patch = patch_of(kind)
    return {**TINY, "img_size": (rows * patch, columns * patch), **MODELS[kind][1], **options}


def images(rows: int, columns: int, batch: int = 2, patch: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, rows * patch, columns * patch).to(dtype)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 1) -> Any:
    """Weights that let every layer matter: timm begins with zero biases and with layer scales of 1e-5."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name == "position.learned_frequencies":
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if name.startswith("position."):
            parameter.copy_(noise * 0.3)
        elif parameter.ndim > 1:
            parameter.copy_(noise * (1.5 / math.sqrt(parameter[0].numel())))
        else:
            parameter.copy_(noise * 0.1 + (1.0 if "norm" in name or "gamma" in name else 0.0))
    return model


def build(kind: str = "vit", position: Any = "rope-vit-axial", **options: Any) -> Any:
    keep = options.pop("keep_absolute", False)
    position_options = options.pop("position_options", None)
    model = vr.create_model(
        MODELS[kind][0],
        position,
        keep_absolute=keep,
        position_options=position_options,
        **options_of(kind, **options),
    )
    return randomise(model).eval()


def zero_rope(head_dim: int, depth: int = DEPTH, pairing: Any = "interleaved") -> vr.Rope:
    half = tuple(range(head_dim // 4)), tuple(range(head_dim // 4, head_dim // 2))
    ladders = [Ladder(base=100.0, pairs=head_dim // 4, slots=slots, scale=0.0) for slots in half]
    return vr.Rope(head_dim=head_dim, axes=2, ladders=ladders, depth=depth, pairing=pairing)


def head_dim_of(model: Any) -> int:
    return next(module.head_dim for module in model.blocks[0].modules() if hasattr(module, "head_dim"))


def pair_with_timm(kind: str, **options: Any) -> tuple[Any, Any]:
    """The same weights in timm's model of any size and in ours, with its absolute embedding and zero rotation."""
    theirs = randomise(timm.create_model(MODELS[kind][0], dynamic_img_size=True, **options_of(kind, **options)))
    ours = timm.create_model(MODELS[kind][0], **options_of(kind, **options))
    ours.load_state_dict(theirs.state_dict())
    ours = vr.add_position(ours, zero_rope(head_dim_of(ours)), keep_absolute=True)
    return theirs.eval(), ours.eval()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LEARNED, ("learned_frequencies",)),
    "shaw": ("keys", "values"),
    "transformer-xl": ("projection", "content_query", "position_query"),
    "t5": ("biases",),
    "deberta": ("embeddings", "key_projection", "query_projection"),
}


# ---- what timm did, it still does


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_zero_rotation_changes_no_bit(kind: str, fused: bool) -> None:
    set_fused_attn(fused)
    try:
        rates = {"drop_rate": 0.1, "pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1}
        # timm counts deit's distillation token as a patch, which its patch dropout may drop.
        patch_drop = 0.0 if kind == "deit distilled" else 0.25
        theirs, ours = pair_with_timm(kind, **rates, drop_path_rate=0.2, patch_drop_rate=patch_drop)
    finally:
        set_fused_attn(True)
    assert all(m.fused_attn is fused for m in ours.modules() if hasattr(m, "fused_attn"))
    for rows, columns in ((4, 4), (3, 5)):
        x = images(rows, columns, patch=patch_of(kind))
        assert torch.equal(ours(x), theirs(x))
        wanted, got = (_train_step(model, x) for model in (theirs, ours))
        assert torch.equal(got[0], wanted[0])
        for name, gradient in wanted[1].items():
            assert torch.equal(got[1][name], gradient), name


def _train_step(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    torch.manual_seed(3)
    logits = model(x)
    logits.square().sum().backward()
    model.eval()
    return logits, gradients(model)


@pytest.mark.parametrize(("kind", "position"), EVERY_MODEL_AND_POSITION)
def test_state_dict_keys_stay(kind: str, position: str) -> None:
    theirs = randomise(timm.create_model(MODELS[kind][0], **options_of(kind)))
    ours = build(kind, position)
    added = {f"position.{name}" for name in PARAMETERS.get(position, ())}
    removed = set() if position == "learned" else {"pos_embed"}
    weights = theirs.state_dict()
    assert set(ours.state_dict()) == set(weights) - removed | added
    with_absolute = vr.create_model(
        MODELS[kind][0], position, keep_absolute=position != "learned", **options_of(kind)
    ).state_dict()
    assert set(with_absolute) == set(weights) | added

    weights = {name: value for name, value in weights.items() if name not in removed}
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert set(missing) == added
    assert unexpected == []
    for name, value in weights.items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize("kind", MODELS)
def test_learned_is_timms_resampled_embedding(kind: str) -> None:
    theirs = randomise(timm.create_model(MODELS[kind][0], dynamic_img_size=True, **options_of(kind, rows=4, columns=6)))
    ours = timm.create_model(MODELS[kind][0], **options_of(kind, rows=4, columns=6))
    ours.load_state_dict(theirs.state_dict())
    ours = vr.add_position(ours.eval(), "learned")
    theirs.eval()
    for rows, columns in ((4, 6), (6, 6), (3, 5), (6, 4)):
        x = images(rows, columns, patch=patch_of(kind))
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("kind", ["vit", "deit distilled", "dinov2 registers", "average pooling"])
def test_forward_intermediates_are_timms(kind: str) -> None:
    theirs, ours = pair_with_timm(kind)
    x = images(3, 5, batch=1, patch=patch_of(kind))
    names = ("return_prefix_tokens", "norm", "stop_early", "intermediates_only", "output_dict")
    every = list(itertools.product((False, True), repeat=len(names)))
    # All combinations where there are prefix tokens of two kinds; elsewhere none, each by itself, and all.
    chosen = every if kind == "dinov2 registers" else [flags for flags in every if sum(flags) in (0, 1, len(names))]
    for indices, output_fmt in itertools.product((None, 1, [0], [1, 0]), ("NCHW", "NLC")):
        for flags in chosen:
            arguments = dict(zip(names, flags, strict=True), indices=indices, output_fmt=output_fmt)
            _assert_same(ours.forward_intermediates(x, **arguments), theirs.forward_intermediates(x, **arguments))
    mask = torch.ones(15 + ours.num_prefix_tokens, 15 + ours.num_prefix_tokens, dtype=torch.bool).tril()
    _assert_same(ours.forward_intermediates(x, attn_mask=mask), theirs.forward_intermediates(x, attn_mask=mask))
    _assert_same(ours.forward_intermediates(x, is_causal=True), theirs.forward_intermediates(x, is_causal=True))
    with pytest.raises(ValueError, match="output_fmt is 'NHWC'"):
        ours.forward_intermediates(x, output_fmt="NHWC")


def _assert_same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            _assert_same(got[key], wanted[key])
    else:
        assert type(got) is type(wanted)
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            _assert_same(one, other)


@pytest.mark.parametrize("kind", ["vit", "dinov2 registers", "parallel", "norm after"])
def test_other_calls_of_timm_work(kind: str) -> None:
    theirs, ours = pair_with_timm(kind)
    x = images(3, 5, patch=patch_of(kind))
    tokens = 15 + ours.num_prefix_tokens
    boolean = torch.rand(tokens, tokens) > 0.3
    boolean.fill_diagonal_(True)
    for arguments in (
        {},
        {"is_causal": True},
        {"attn_mask": boolean},
        {"attn_mask": torch.randn(2, 1, tokens, tokens)},
        {"attn_mask": torch.randn(tokens, tokens)},
    ):
        assert torch.equal(ours.forward_features(x, **arguments), theirs.forward_features(x, **arguments))
        assert torch.equal(ours(x, **arguments), theirs(x, **arguments))
    for reshape, prefix in itertools.product((False, True), repeat=2):
        arguments = {"n": 2, "reshape": reshape, "return_prefix_tokens": prefix, "norm": True}
        _assert_same(ours.get_intermediate_layers(x, **arguments), theirs.get_intermediate_layers(x, **arguments))
    features = theirs.forward_features(x)
    assert torch.equal(ours.forward_head(features, pre_logits=True), theirs.forward_head(features, pre_logits=True))
    for model in (theirs, ours):
        torch.manual_seed(1)
        model.reset_classifier(7)
    assert torch.equal(ours(x), theirs(x))
    for model in (theirs, ours):
        model.prune_intermediate_layers([0])
    assert len(ours.blocks) == 1
    _assert_same(ours.forward_intermediates(x, indices=[0]), theirs.forward_intermediates(x, indices=[0]))


@pytest.mark.parametrize("position", LEARNED)
def test_pruned_model_with_learned_frequencies(position: str) -> None:
    model = build(position=position)
    x = images(3, 5)
    wanted = model.forward_intermediates(x, indices=[0], intermediates_only=True)[0]
    model.prune_intermediate_layers([0])
    assert torch.equal(model.forward_intermediates(x, indices=[0], intermediates_only=True)[0], wanted)


@pytest.mark.parametrize("position", POSITIONS)
def test_hooks_on_blocks_fire(position: str) -> None:
    model = build(position=position)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    x = images(3, 5)
    maps = model.forward_intermediates(x, intermediates_only=True, output_fmt="NLC")
    assert all(torch.equal(one[:, 1:], other) for one, other in zip(seen, maps, strict=True))
    model(x)
    assert len(seen) == 2 * DEPTH


def test_forward_runs_every_block() -> None:
    """More blocks than the encoding has layers for is an error, not a shallower model."""
    model = build()
    model.blocks = nn.Sequential(*model.blocks, copy.deepcopy(model.blocks[0]))
    calls: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    try:
        model(images(2, 3))
    except ValueError as error:
        assert "blocks" in str(error)  # noqa: PT017 - either answer is right, silence is not
    else:
        assert len(calls) == 3


# ---- the rotation inside a model, written a second time


def pair_channels(pair: int, head_dim: int, pairing: str) -> tuple[int, int]:
    if pairing == "half-per-axis":
        quarter = head_dim // 4
        first = pair // quarter * 2 * quarter + pair % quarter
        return first, first + quarter
    return (2 * pair, 2 * pair + 1) if pairing == "interleaved" else (pair, pair + head_dim // 2)


def angle_of(preset: str, row: int, column: int, grid: tuple[int, int], pair: int, head_dim: int) -> float:
    """The design page's table of peers, a number at a time."""
    quarter = head_dim // 4
    step = pair % quarter
    first_half = pair < quarter
    if preset in ("rope-vit-axial", "sam2"):
        base = 100.0 if preset == "rope-vit-axial" else 10000.0
        return (column if first_half else row) * base ** (-4 * step / head_dim)
    if preset == "eva02":
        position = row * 16 / grid[0] if first_half else column * 16 / grid[1]
        return position * 10000.0 ** (-4 * step / head_dim)
    assert preset == "dinov3"
    position = 2 * (row + 0.5) / grid[0] - 1 if first_half else 2 * (column + 0.5) / grid[1] - 1
    return position * 2 * math.pi / 100.0 ** (4 * step / head_dim)


def attention_by_loops(
    layer: Any, x: Tensor, prefix: int, angles: Callable[[int, int, int], float], pairing: str, scale: float = 1.0
) -> Tensor:
    """One attention layer in float64; angles(head, patch, pair); prefix tokens are not rotated."""
    layer, x = copy.deepcopy(layer).double(), x.double()
    batch, tokens, dim = x.shape
    heads, head_dim = layer.num_heads, layer.head_dim
    q, k, v = (layer.qkv(x)).reshape(batch, tokens, 3, heads, head_dim).unbind(2)
    q, k = layer.q_norm(q), layer.k_norm(k)
    out = torch.zeros(batch, tokens, heads, head_dim, dtype=torch.float64)
    for head in range(heads):
        turned = [q[:, :, head].clone(), k[:, :, head].clone()]
        for tensor in turned:
            for patch in range(tokens - prefix):
                for pair in range(head_dim // 2):
                    angle = angles(head, patch, pair)
                    a, b = pair_channels(pair, head_dim, pairing)
                    first, second = tensor[:, prefix + patch, a].clone(), tensor[:, prefix + patch, b].clone()
                    tensor[:, prefix + patch, a] = first * math.cos(angle) - second * math.sin(angle)
                    tensor[:, prefix + patch, b] = first * math.sin(angle) + second * math.cos(angle)
        scores = turned[0] @ turned[1].transpose(1, 2) * head_dim**-0.5 * scale
        out[:, :, head] = scores.softmax(-1) @ v[:, :, head]
    return layer.proj(layer.norm(out.reshape(batch, tokens, dim)))


def attention_calls(model: Any, x: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
    """(layer, input, output) of every attention layer in one forward pass."""
    calls: list[tuple[Any, Tensor, Tensor]] = []
    layers = [module for module in model.blocks.modules() if hasattr(module, "qkv")]
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output: calls.append((layer, inputs[0], output)))
        for layer in layers
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(layers)
    return calls


CLOSED_FORM = ("rope-vit-axial", "sam2", "eva02", "dinov3")


@pytest.mark.parametrize("kind", ["vit", "dinov2 registers", "qk_norm"])
@pytest.mark.parametrize("position", CLOSED_FORM)
def test_rotation_in_a_model_is_the_design_pages(kind: str, position: str) -> None:
    """Failure classes 1 and 10."""
    grid = (2, 3)
    model = build(kind, position)
    pairing = "half" if position == "dinov3" else "interleaved"

    def angles(head: int, patch: int, pair: int) -> float:
        return angle_of(position, patch // grid[1], patch % grid[1], grid, pair, HEAD_DIM)

    for layer, x, out in attention_calls(model, images(*grid, batch=1, patch=patch_of(kind))):
        with torch.no_grad():
            wanted = attention_by_loops(layer, x, model.num_prefix_tokens, angles, pairing)
        assert_close(out.double(), wanted, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(
    ("kind", "position"), vit_with_all_and(("average pooling", "deit distilled", "parallel", "norm after"), ROPES)
)
def test_rotation_in_a_model_is_the_one_formula(kind: str, position: str) -> None:
    grid = (2, 3)
    model = build(kind, position)
    rope = model.position
    places = rope.positions(*grid).double()
    frequencies = rope.frequencies.detach().double()
    calls = attention_calls(model, images(*grid, batch=1))
    for index, (layer, x, out) in enumerate(calls):
        per_layer = frequencies[index * DEPTH // len(calls) if len(frequencies) > 1 else 0]
        turns = torch.einsum("na,hap->hnp", places, per_layer)

        def angles(head: int, patch: int, pair: int, turns: Tensor = turns) -> float:
            return float(turns[head if len(turns) > 1 else 0, patch, pair])

        with torch.no_grad():
            wanted = attention_by_loops(layer, x, model.num_prefix_tokens, angles, rope.pairing)
        assert_close(out.double(), wanted, rtol=1e-5, atol=3e-5)


def eva_with_weights_of(name: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A RoPE model of timm's Eva class and its weights under the names that VisionTransformer has."""
    theirs = timm.create_model(
        name, **TINY, img_size=64, dynamic_img_size=True, qkv_bias=True, global_pool="token", **options
    )
    frequencies = None if not hasattr(theirs.rope, "freqs") else getattr(theirs.rope, "freqs", None)
    kept = None if frequencies is None else frequencies.detach().clone()
    randomise(theirs).eval()
    if isinstance(frequencies, nn.Parameter):
        with torch.no_grad():
            frequencies.copy_(kept)
    weights = {}
    for key, value in theirs.state_dict().items():
        if key.startswith("rope.") or key.endswith(".v_bias"):
            continue
        if key.endswith(".q_bias"):  # Eva keeps no bias of keys
            whole = key.replace("q_bias", "qkv.bias")
            weights[whole] = torch.cat((value, torch.zeros_like(value), theirs.state_dict()[key.replace("q_", "v_")]))
            continue
        weights[key.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")] = value
    return theirs, weights


EVAS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rope-vit-axial": ("vit_small_patch16_rope_224", {}, {}),
    "rope-vit-mixed": ("vit_small_patch16_rope_mixed_224", {}, {}),
    "sam2": ("vit_small_patch16_rope_224", {"rope_temperature": 10000.0}, {}),
    "eva02": (
        "vit_small_patch16_rope_224",
        {"rope_temperature": 10000.0, "rope_grid_indexing": "ij", "ref_feat_shape": 16},
        {},
    ),
    "dinov3": (
        "vit_small_patch16_dinov3",
        {"num_reg_tokens": 3, "norm_layer": functools.partial(nn.LayerNorm, eps=1e-6)},
        {"reg_tokens": 3, "no_embed_class": True},
    ),
}


@pytest.mark.parametrize("position", EVAS)
def test_whole_model_equals_timms_rope_model(position: str) -> None:
    """Live parity on random rectangular grids, with the same weights. Failure classes 1 and 2."""
    name, eva_options, vit_options = EVAS[position]
    theirs, weights = eva_with_weights_of(name, **eva_options)
    ours = timm.create_model("vit_tiny_patch16_224", **TINY, img_size=64, init_values=1.0, **vit_options)
    ours = vr.add_position(ours, position).eval()
    if position in LEARNED:
        # timm: (x and y, depth, heads, pairs); ours: (depth, heads, rows and columns, pairs).
        freqs = theirs.rope.freqs.detach()
        weights["position.learned_frequencies"] = freqs.reshape(2, DEPTH, HEADS, -1).permute(1, 2, 0, 3).flip(2)
    ours.load_state_dict(weights)
    for rows, columns in ((4, 4), (2, 8), (3, 7), (7, 3), (1, 5)):
        x = images(rows, columns)
        with torch.no_grad():
            assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
            assert_close(ours.forward_features(x), theirs.forward_features(x), rtol=0, atol=2e-5)


# ---- grids


@pytest.mark.parametrize(("kind", "position"), vit_with_all_and(("siglip", "dinov2 registers"), POSITIONS))
def test_every_size_the_patch_divides(kind: str, position: str) -> None:
    model = build(kind, position)
    for rows, columns in ((4, 4), (1, 1), (2, 7), (7, 2)):
        tokens = model.forward_features(images(rows, columns, patch=patch_of(kind)))
        assert tokens.shape == (2, model.num_prefix_tokens + rows * columns, model.embed_dim)
        assert tokens.isfinite().all()


@pytest.mark.parametrize("position", POSITIONS)
def test_rectangular_training_size(position: str) -> None:
    """Failure class 18."""
    model = build(position=position, rows=3, columns=7)
    assert model.train_grid == (3, 7)
    assert model(images(3, 7)).shape == (2, 5)
    assert model(images(7, 3)).shape == (2, 5)


@pytest.mark.parametrize("position", POSITIONS)
def test_order_of_patches_matters(position: str) -> None:
    model = build("average pooling", position)
    x = images(2, 3)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    patches = x.reshape(2, 3, 2, 16, 3, 16).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    shuffled = patches.unflatten(1, (2, 3)).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 32, 48)
    difference = (model(shuffled) - model(x)).abs().max()
    if position == "none":
        assert difference < 1e-5
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("position", POSITIONS)
def test_same_token_count_on_another_grid(position: str) -> None:
    """Failure class 2: 4x9 after 6x6, 2x8 after 4x4; and 1 in part: rows are not columns."""
    model = build("average pooling", position)
    untouched = pickle.dumps(model)
    for first, second in (((6, 6), (4, 9)), ((4, 4), (2, 8)), ((3, 5), (5, 3))):
        patches = torch.randn(1, first[0] * first[1], 3, 16, 16)

        def lay(grid: tuple[int, int], patches: Tensor = patches) -> Tensor:
            tiles = patches.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)
            return tiles.reshape(1, 3, grid[0] * 16, grid[1] * 16)

        before = model(lay(first))
        after = model(lay(second))
        fresh = pickle.loads(untouched)
        assert torch.equal(fresh(lay(second)), after)
        assert torch.equal(model(lay(first)), before)
        if position == "none":
            assert_close(after, before, rtol=0, atol=1e-5)
        else:
            assert (after - before).abs().max() > 1e-3


# Pixtral gives rows and columns different frequencies.
@pytest.mark.parametrize("position", [name for name in FIXED if name != "pixtral"])
def test_transposed_picture_is_seen_differently(position: str) -> None:
    """Failure class 1: with rows and columns swapped in the head's channels too, the answer is the same."""
    model = build("average pooling", position)
    turned = copy.deepcopy(model)
    with torch.no_grad():
        turned.patch_embed.proj.weight.copy_(model.patch_embed.proj.weight.transpose(2, 3))
    x = images(2, 5)
    assert (turned(x.transpose(2, 3)) - model(x)).abs().max() > 1e-3

    rope = model.position
    quarter = HEAD_DIM // 4
    pairs = torch.cat((torch.arange(quarter, 2 * quarter), torch.arange(quarter)))
    channels = [pair_channels(int(pair), HEAD_DIM, rope.pairing) for pair in pairs]
    where = [pair_channels(pair, HEAD_DIM, rope.pairing) for pair in range(2 * quarter)]
    swap = torch.empty(HEAD_DIM, dtype=torch.long)
    for target, source in zip(where, channels, strict=True):
        swap[list(target)] = torch.tensor(source)
    with torch.no_grad():
        for block in turned.blocks:
            for tensor in (block.attn.qkv.weight, block.attn.qkv.bias):
                parts = tensor.unflatten(0, (3, HEADS, HEAD_DIM))
                parts[:2] = parts[:2][:, :, swap]
    assert_close(turned(x.transpose(2, 3)), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_sizes_the_patch_does_not_divide(position: str) -> None:
    """Failure class 17."""
    model = build(position=position)
    sizes = {
        (79, 64): ("height 79", "64 or 80"),
        (64, 222): ("width 222", "208 or 224"),
        (8, 64): ("height 8", "16"),
    }
    for (height, width), words in sizes.items():
        for call in (model, model.forward_features, model.forward_intermediates):
            with pytest.raises(ValueError, match="images have") as caught:
                call(torch.randn(1, 3, height, width))
            assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_when_timm_was_asked_for_it(position: str) -> None:
    model = build(position=position, dynamic_img_pad=True, dynamic_img_size=True)
    x = torch.randn(1, 3, 79, 70)
    padded = nn.functional.pad(x, (0, 10, 0, 1))
    assert torch.equal(model(x), model(padded))
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert maps[0].shape[-2:] == (5, 5)


@pytest.mark.parametrize("position", POSITIONS)
def test_channels_last_and_hybrid_patches(position: str) -> None:
    model = build(position=position)
    x = images(3, 4)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert_close(last(x.to(memory_format=torch.channels_last)), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", ["rope-vit-axial", "learned", "none"])
def test_hybrid_patch_embedding(position: str) -> None:
    model = vr.create_model("vit_tiny_r_s16_p8_224", position, **TINY, img_size=64).eval()
    assert model.forward_features(torch.randn(1, 3, 96, 64)).shape[1] == 1 + 3 * 2
    with pytest.raises(ValueError, match="width 80"):
        model(torch.randn(1, 3, 96, 80))


# ---- dropped patches


@pytest.mark.parametrize(
    ("kind", "position"), vit_with_all_and(("deit distilled", "dinov2 registers", "average pooling"), ROPES)
)
def test_positions_follow_the_kept_patches(kind: str, position: str) -> None:
    """Failure class 19: the same as running the attention on the kept tokens with their own positions."""
    grid = (3, 4)
    model = build(kind, position, patch_drop_rate=0.5).train()
    kept: list[Tensor] = []
    model.patch_drop.register_forward_hook(lambda module, inputs, output: kept.append(output[1]))
    calls = attention_calls(model, images(*grid, patch=patch_of(kind)))
    assert kept[0].shape == (2, 6)
    assert not torch.equal(kept[0][0], kept[0][1])
    rope = model.position
    places, frequencies = rope.positions(*grid).double(), rope.frequencies.detach().double()
    for index, (layer, x, out) in enumerate(calls):
        per_layer = frequencies[index if len(frequencies) > 1 else 0]
        for sample in range(2):
            turns = torch.einsum("na,hap->hnp", places[kept[0][sample]], per_layer)

            def angles(head: int, patch: int, pair: int, turns: Tensor = turns) -> float:
                return float(turns[head if len(turns) > 1 else 0, patch, pair])

            with torch.no_grad():
                wanted = attention_by_loops(layer, x[sample, None], model.num_prefix_tokens, angles, rope.pairing)
            assert_close(out[sample, None].double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_no_patch_is_dropped_in_evaluation(position: str) -> None:
    """Whatever the mode the model was in when it was converted."""
    model = timm.create_model("vit_tiny_patch16_224", **TINY, img_size=64, patch_drop_rate=0.5)
    model = vr.add_position(randomise(model).eval(), position)
    assert not any(module.training for module in model.modules())
    x = images(4, 4)
    assert model.forward_features(x).shape == (2, 17, 48)
    assert torch.equal(model(x), model(x))
    model.train()
    assert model.forward_features(x).shape == (2, 9, 48)
    with pytest.raises(ValueError, match="patches were dropped"):
        model.forward_intermediates(x)


@pytest.mark.parametrize("position", [name for name in ROPES if "rescale" in PRESETS[name].options()])
def test_augmentation_of_positions_is_for_training(position: str) -> None:
    model = build(position=position, position_options={"rescale": 2.0, "shift": 0.1, "jitter": 1.5})
    x = images(3, 4)
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), build(position=position)(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(5)
    first = model(x)
    torch.manual_seed(5)
    assert torch.equal(model(x), first)


# ---- training


@pytest.mark.parametrize(("kind", "position"), EVERY_MODEL_AND_POSITION)
def test_every_parameter_gets_a_gradient(kind: str, position: str) -> None:
    """Failure class 12: no unused parameter for DistributedDataParallel, a gradient in every layer."""
    model = build(kind, position).train()
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
    out = model(images(3, 4, patch=patch_of(kind)))
    sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,))).backward()
    found = gradients(model)
    if position in LEARNED:
        assert found["position.learned_frequencies"].flatten(1).abs().amax(1).min() > 0
        assert found["position.learned_frequencies"].flatten(2).abs().amax(2).min() > 0


def test_frequencies_get_the_gradient_of_finite_differences() -> None:
    model = build(position="rope-vit-mixed")
    x = images(3, 4)

    def loss() -> Tensor:
        return model(x).square().sum()

    loss().backward()
    parameter = model.position.learned_frequencies
    direction = torch.randn_like(parameter)
    wanted = (parameter.grad * direction).sum()
    step = 1e-3
    with torch.no_grad():
        parameter += step * direction
        above = loss().double()
        parameter -= 2 * step * direction
        below = loss().double()
    assert_close((above - below) / (2 * step), wanted.double(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("position", POSITIONS)
def test_checkpointing_changes_no_gradient(position: str) -> None:
    model = build(position=position, drop_path_rate=0.2, proj_drop_rate=0.1, patch_drop_rate=0.25)
    x = images(3, 4)
    wanted = _train_step(model, x)
    model.set_grad_checkpointing()
    got = _train_step(model, x)
    assert torch.equal(got[0], wanted[0])
    for name, gradient in wanted[1].items():
        assert torch.equal(got[1][name], gradient), name


@pytest.mark.parametrize("position", POSITIONS)
def test_two_resolutions_in_one_backward(position: str) -> None:
    """Failure class 13: exact gradients, and nothing of the model's state is read again in the backward pass."""
    model = build(position=position)
    first, second = images(3, 4), images(6, 2)
    model(first).square().sum().backward()
    alone = gradients(model)
    model(second).square().sum().backward()
    wanted = {name: alone[name] + gradient for name, gradient in gradients(model).items()}
    model.set_grad_checkpointing()
    loss = model(first).square().sum()
    loss = loss + model(second).square().sum()
    loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("position", ROPES)
def test_changes_between_forward_and_backward(position: str) -> None:
    """Failure class 13: another extension, mode, or forward pass before the backward pass."""
    model = build(position=position)
    method = _a_method_for(position)
    vr.set_extension(model, method)
    x = images(6, 7)
    model(x).square().sum().backward()
    wanted = gradients(model)
    model.set_grad_checkpointing()
    loss = model(x).square().sum()
    vr.set_extension(model, "none")
    model.train()
    with torch.no_grad():
        model(images(2, 9))
    loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("position", LEARNED)
def test_optimizers_treat_learned_frequencies_as_documented(position: str) -> None:
    """Failure class 12: no weight decay, learning-rate scale 1 under layer decay."""
    model = build(position=position)
    name = "position.learned_frequencies"
    assert name in model.no_weight_decay()
    assert {"cls_token", "pos_embed"} <= model.no_weight_decay()
    parameter = model.position.learned_frequencies

    def group_of(groups: list[dict[str, Any]]) -> dict[str, Any]:
        found = [group for group in groups if any(p is parameter for p in group["params"])]
        assert len(found) == 1
        return found[0]

    decay = group_of(param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5))
    assert decay["weight_decay"] == 0
    assert decay["lr_scale"] == 1
    plain = group_of(param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()))
    assert plain["weight_decay"] == 0
    for layer_decay in (0.5, None):
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=layer_decay)
        group = group_of(optimizer.param_groups)
        assert group["weight_decay"] == 0
        assert group["lr"] * group.get("lr_scale", 1) == 1e-3
        before = parameter.detach().clone()
        model(images(2, 3)).square().sum().backward()
        optimizer.step()
        assert (parameter - before).abs().min(dim=-1).values.min() > 0
        model.zero_grad()


# ---- dtypes, devices, copies


@pytest.mark.parametrize("position", POSITIONS)
def test_low_precision_models(position: str) -> None:
    """Failure classes 4 and 5: angles stay exact, the output has the input's dtype."""
    exact = build(position=position)
    for dtype in (torch.bfloat16, torch.float16):
        _check_low_precision(position, exact, dtype)


def _check_low_precision(position: str, exact: Any, dtype: torch.dtype) -> None:
    model = copy.deepcopy(exact).to(dtype)
    assert {name: p.dtype for name, p in model.named_parameters() if p.dtype != dtype} == (
        {"position.learned_frequencies": torch.float32} if position in LEARNED else {}
    )
    x = images(5, 9, dtype=dtype)
    out = model(x)
    assert out.dtype == dtype
    assert_close(out.float(), exact(x.float()), rtol=0.1, atol=0.1)
    if position in ROPES:
        places, frequencies = exact.position.positions(70, 33).double(), exact.position.frequencies.detach().double()
        turns = torch.einsum("na,lhap->lhnp", places, _exact_frequencies(position, frequencies))
        for layer, rotation in enumerate(model.position.rotations(model.position.positions(70, 33))):
            wanted = turns[layer if len(turns) > 1 else 0]
            assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
            tolerance = 1e-5 if position in LEARNED else 1e-6
            assert_close(rotation.sin.double(), wanted.sin(), rtol=0, atol=tolerance)
            assert_close(rotation.cos.double(), wanted.cos(), rtol=0, atol=tolerance)


def _exact_frequencies(position: str, frequencies: Tensor) -> Tensor:
    """In float64 where they follow from a closed form; a ladder rounded to float32 is 4e-6 off after 70 steps."""
    if position not in CLOSED_FORM:
        return frequencies
    base = {"rope-vit-axial": 100.0, "dinov3": 100.0}.get(position, 10000.0)
    quarter = HEAD_DIM // 4
    ladder = base ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    if position == "dinov3":
        ladder = ladder * 2 * math.pi
    rest = torch.zeros_like(ladder)
    rows, columns = torch.cat((ladder, rest)), torch.cat((rest, ladder))
    if position in ("rope-vit-axial", "sam2"):
        rows, columns = columns, rows
    assert_close(frequencies[0, 0], torch.stack((rows, columns)), rtol=1e-6, atol=0)
    return torch.stack((rows, columns))[None, None]


@pytest.mark.parametrize("position", POSITIONS)
def test_moving_the_dtype_back_and_forth(position: str) -> None:
    model = build(position=position)
    frequencies = None if position not in LEARNED else model.position.learned_frequencies.detach().clone()
    model.bfloat16().half().float().double().float()
    fresh = build(position=position)
    fresh.load_state_dict(model.state_dict())
    x = images(3, 4)
    assert torch.equal(model(x), fresh(x))
    if frequencies is not None:
        assert torch.equal(model.position.learned_frequencies, frequencies)
        assert isinstance(model.position.learned_frequencies, nn.Parameter)
    assert model.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("position", POSITIONS)
def test_autocast_on_cpu(position: str) -> None:
    """Failure class 4."""
    model = build(position=position)
    x = images(5, 9)
    if position in ROPES:
        places = model.position.positions(5, 9)
        wanted = model.position.rotations(places)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model.position.rotations(places)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one.cos, other.cos)
            assert torch.equal(one.sin, other.sin)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        out.float().square().sum().backward()
    assert_close(out.float(), model(x), rtol=0.1, atol=0.15)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("position", POSITIONS)
def test_meta_device(position: str) -> None:
    """Failure class 6."""
    wanted = build(position=position)
    with torch.device("meta"):
        empty = vr.create_model(MODELS["vit"][0], position, **options_of("vit")).eval()
    assert all(parameter.is_meta for parameter in empty.parameters())
    pictures = [images(*size, batch=1) for size in ((4, 4), (3, 7))]
    outputs = [wanted(x) for x in pictures]
    for assign in (True, False):
        model = copy.deepcopy(empty)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(wanted.state_dict(), assign=assign)
        assert all(torch.equal(model(x), output) for x, output in zip(pictures, outputs, strict=True))
    model.to("meta").to_empty(device="cpu").load_state_dict(wanted.state_dict())
    assert torch.equal(model(pictures[1]), outputs[1])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("position", LEARNED)
def test_a_bfloat16_checkpoint_keeps_frequencies_in_float32(position: str, assign: bool) -> None:
    weights = {name: value.bfloat16() for name, value in build(position=position).state_dict().items()}
    given = {name: value.clone() for name, value in weights.items()}
    model = build(position=position)
    model.load_state_dict(weights, assign=assign)
    learned = model.position.learned_frequencies
    assert learned.dtype == torch.float32
    assert isinstance(learned, nn.Parameter)
    assert learned.requires_grad
    assert torch.equal(learned, given["position.learned_frequencies"].float())
    assert weights["position.learned_frequencies"].dtype == torch.bfloat16
    dtype = torch.bfloat16 if assign else torch.float32
    assert model(images(3, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("kind", "position"), vit_with_all_and(("parallel", "norm after", "deit distilled"), POSITIONS)
)
def test_copies(kind: str, position: str) -> None:
    model = build(kind, position)
    if position in ROPES:
        vr.set_extension(model, _a_method_for(position))
    x = images(5, 6)
    wanted = model(x)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    for other in copies:
        assert torch.equal(other(x), wanted)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("position", POSITIONS)
def test_inference_mode_first_then_training(position: str) -> None:
    model = build(position=position)
    x = images(5, 6)
    with torch.inference_mode():
        model(x)
        copy.deepcopy(model)
        model.bfloat16().float()
        inferred = model(x)
    fresh = build(position=position)
    if not any(parameter.is_inference() for parameter in model.parameters()):
        fresh.load_state_dict(model.state_dict())
        # Where a bias needs a gradient, torch computes attention by another kernel.
        assert_close(model(x), inferred, rtol=0, atol=1e-5 if position in RELATIVE else 0)
        model(x).square().sum().backward()
        gradients(model)
    model = fresh
    with torch.inference_mode():
        wanted = model(x)
    model.train()
    out = model(x)
    out.square().sum().backward()
    gradients(model)
    assert_close(model.eval()(x), wanted, rtol=0, atol=1e-5 if position in RELATIVE else 0)


def test_no_rotation_stays_but_the_fixed_table_of_the_last_grid() -> None:
    """Law 4: what stays belongs to the Rope, which keys it by everything it depends on, and holds no graph."""
    models = {position: build(position=position) for position in ROPES}
    gc.collect()
    for position, model in models.items():
        vr.set_extension(model, _a_method_for(position))
        model(images(4, 4))
        loss = model(images(5, 6)).sum()
        del loss
    gc.collect()
    mine = set()
    for position, model in models.items():
        kept = model.position._kept
        kept = [] if kept is None else kept[1]
        assert bool(kept) == (model.position.ladders is not None), position
        assert not any(rotation.cos.requires_grad or rotation.cos.is_inference() for rotation in kept), position
        mine |= {id(rotation) for rotation in kept}
    assert {id(thing) for thing in gc.get_objects() if type(thing) is vr.Rotation} == mine


@pytest.mark.parametrize("where", ["layer", "inside", "everywhere"])
def test_a_hook_on_the_projection_keeps_what_it_saw(where: str) -> None:
    """Queries and keys are turned in the projection's own memory, but not where somebody may still look at it."""
    model = build(position="rope-vit-axial").eval()
    seen = []
    x = images(3, 4)
    with torch.no_grad():
        wanted = model(x)
        layer = model.blocks[0].attn.qkv

        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if module is layer:
                seen.append((inputs[0].clone(), output))

        if where == "inside":
            model.blocks[0].attn.qkv = nn.Sequential(layer, nn.Identity())
        anywhere = torch.nn.modules.module.register_module_forward_hook
        handle = anywhere(look) if where == "everywhere" else layer.register_forward_hook(look)
        try:
            assert torch.equal(model(x), wanted)
        finally:
            handle.remove()
    (inputs, output), *_ = seen
    assert_close(output, torch.nn.functional.linear(inputs, layer.weight, layer.bias))


def test_two_configurations_in_one_process() -> None:
    x = images(3, 4)
    one, other = build(position_options={"base": 100.0}), build(position_options={"base": 10.0})
    before = one(x)
    assert not torch.equal(other(x), before)
    assert torch.equal(one(x), before)
    assert torch.equal(build(position_options={"base": 100.0})(x), before)


# ---- extension


def _a_method_for(position: str) -> str:
    """A method that means something for this preset."""
    rope = vr.preset(position, head_dim=HEAD_DIM)
    for method in EXTENSIONS:
        if method != "none" and _meaningful(rope, method):
            return method
    raise AssertionError(position)


def _meaningful(rope: vr.Rope, method: str) -> bool:
    try:
        vr.extend(rope, method, train_size=(4, 4), size=(8, 8))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("position", POSITIONS)
def test_extension_of_a_model(position: str) -> None:
    """Nothing changes up to the training size; a method without meaning is refused and leaves the model alone."""
    model = build(position=position)
    up_to_training = [images(*size, batch=1) for size in ((4, 4), (3, 4), (2, 2))]
    beyond = [images(*size, batch=1) for size in ((6, 3), (8, 8))]
    small, large = [model(x) for x in up_to_training], [model(x) for x in beyond]
    keys = list(model.state_dict())
    for method in EXTENSIONS:
        if method != "none" and not (position in ROPES and _meaningful(model.position, method)):
            with pytest.raises(ValueError, match=f"{method} means nothing for .*{position}.*(none|learned|normalised)"):
                vr.set_extension(model, method)
            assert model.extension is None, method
            assert torch.equal(model(beyond[1]), large[1]), method
            continue
        assert vr.set_extension(model, method) is model
        assert all(torch.equal(model(x), wanted) for x, wanted in zip(up_to_training, small, strict=True)), method
        for x, wanted in zip(beyond, large, strict=True):
            assert torch.equal(model(x), wanted) == (method == "none"), method
        assert list(model.state_dict()) == keys
        vr.set_extension(model, "none")
        for x, wanted in zip((*up_to_training, *beyond), (*small, *large), strict=True):
            assert torch.equal(model(x), wanted), method


@pytest.mark.parametrize("position", [name for name in ROPES if name in ("rope-vit-axial", "sam2", "rope-vit-mixed")])
def test_interpolation_divides_positions(position: str) -> None:
    """An axis at a time: rows are twice as many as in training, columns 1.5 times."""
    model = vr.set_extension(build(position=position), "interpolate")
    grid = (8, 6)
    places = vr.grid_positions(*grid).double() / torch.tensor([2.0, 1.5])
    frequencies = model.position.frequencies.detach().double()
    for index, (layer, x, out) in enumerate(attention_calls(model, images(*grid, batch=1))):
        turns = torch.einsum("na,hap->hnp", places, frequencies[index if len(frequencies) > 1 else 0])

        def angles(head: int, patch: int, pair: int, turns: Tensor = turns) -> float:
            return float(turns[head if len(turns) > 1 else 0, patch, pair])

        with torch.no_grad():
            wanted = attention_by_loops(layer, x, 1, angles, model.position.pairing)
        assert_close(out.double(), wanted, rtol=1e-5, atol=3e-5)


def test_temperature_of_yarn_reaches_the_softmax() -> None:
    model = vr.set_extension(build(), "yarn")
    grid = (8, 6)
    extended = vr.extend(model.position, "yarn", train_size=(4, 4), size=grid)
    turns = torch.einsum("na,ap->np", vr.grid_positions(*grid).double(), extended.frequencies[0, 0].double())
    temperature = 0.1 * math.log(math.sqrt(2 * 1.5)) + 1
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        for layer, x, out in attention_calls(model, images(*grid, batch=1)):
            with torch.no_grad():
                wanted = attention_by_loops(
                    layer,
                    x,
                    1,
                    lambda head, patch, pair: float(turns[patch, pair]),
                    model.position.pairing,
                    scale=temperature**2,
                )
            assert_close(out.double(), wanted, rtol=1e-5, atol=3e-5)


def test_training_grid_of_an_extension() -> None:
    x = images(8, 8)
    default = vr.set_extension(build(), "interpolate")(x)
    assert torch.equal(vr.set_extension(build(), "interpolate", train_size=(4, 4))(x), default)
    assert not torch.equal(vr.set_extension(build(), "interpolate", train_size=(4, 2))(x), default)
    larger = vr.set_extension(build(), "interpolate", train_size=(8, 8))
    assert torch.equal(larger(x), build()(x))
    rectangle = build(rows=3, columns=6)
    assert torch.equal(
        vr.set_extension(rectangle, "interpolate")(x),
        vr.set_extension(build(rows=3, columns=6), "interpolate", train_size=(3, 6))(x),
    )


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("interpolat", {}, ("interpolat", "did you mean 'interpolate'")),
        ("yarn", {"beta_fats": 2.0}, ("beta_fats", "beta_fast")),
        ("interpolate", {"beta_fast": 2.0}, ("beta_fast", "factors")),
        ("none", {"beta_fast": 2.0}, ("beta_fast",)),
        ("interpolate", {"train_size": (4,)}, ("train_size", "axes")),
        ("interpolate", {"train_size": (0, 4)}, ("train_size", "positive")),
        # Refused when they are set, not in the first forward pass at a larger size.
        ("yarn", {"beta_fast": 1.0, "beta_slow": 32.0}, ("beta_fast", "larger")),
    ],
)
def test_wrong_extensions_are_refused(method: str, options: dict[str, Any], words: tuple[str, ...]) -> None:
    """Failure class 16."""
    model = vr.set_extension(build(), "interpolate")
    x = images(8, 8)
    before = model(x)
    with pytest.raises(ValueError, match=r".") as caught:
        vr.set_extension(model, method, **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert torch.equal(model(x), before)


def test_extensions_of_models_without_rotation() -> None:
    for position in ENCODINGS:
        model = build(position=position)
        with pytest.raises(ValueError, match="did you mean 'yarn'"):
            vr.set_extension(model, "yarnn")
        with pytest.raises(ValueError, match="beta_fast"):
            vr.set_extension(model, "none", beta_fast=3.0)


def test_ntk_without_a_slowest_pair_is_refused_when_it_is_set() -> None:
    model = build(num_heads=4, embed_dim=16)
    with pytest.raises(ValueError, match="two pairs"):
        vr.set_extension(model, "ntk")


def test_an_extended_rope_in_a_model_is_refused() -> None:
    """It would be extended at every size, smaller ones too, and set_extension("none") could not switch it off."""
    rope = vr.preset("rope-vit-axial", head_dim=HEAD_DIM, num_heads=HEADS, depth=DEPTH)
    rope = vr.extend(rope, "interpolate", train_size=(4, 4), size=(8, 8))
    with pytest.raises(ValueError, match="set_extension"):
        vr.create_model(MODELS["vit"][0], rope, **options_of("vit"))


def test_extension_needs_a_positioned_model() -> None:
    with pytest.raises(ValueError, match=r"VisionTransformer.*add_position first"):
        vr.set_extension(timm.create_model("vit_tiny_patch16_224", **TINY), "interpolate")


# ---- refusals


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("swin_tiny_patch4_window7_224", "SwinTransformer", {"depths": (1, 1)}),
        ("hiera_tiny_224", "Hiera", {"stages": (1, 1, 1, 1)}),
        ("maxvit_tiny_tf_224", "MaxxVit", {}),
        ("resnet18", "ResNet", {}),
    ],
)
def test_other_families_are_refused_by_name(name: str, kind: str, options: dict[str, Any]) -> None:
    model = timm.create_model(name, **options)
    for call in (vr.add_position, lambda model, position: vr.create_model(name, position, **options)):
        with pytest.raises(ValueError, match=kind) as caught:
            call(model, "rope-vit-axial")
        assert all(family.__name__ in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    "options",
    [
        {"block_fn": timm.models.vision_transformer.ParallelScalingBlock},
        {"attn_layer": "diff"},
    ],
)
def test_other_layers_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"ParallelScalingBlock|DiffAttention"):
        vr.create_model("vit_tiny_patch16_224", **TINY, img_size=64, **options)


def test_an_attention_of_another_name_is_refused() -> None:
    class Mixer(timm.layers.Attention):
        pass

    with pytest.raises(ValueError, match="Mixer"):
        vr.create_model("vit_tiny_patch16_224", **TINY, img_size=64, attn_layer=Mixer)


def test_converting_twice_is_refused() -> None:
    for position in POSITIONS:
        model = build(position=position)
        with pytest.raises(ValueError, match=f"{position}.* already"):
            vr.add_position(model, "rope-vit-axial")


@pytest.mark.parametrize(
    ("position", "options", "words"),
    [
        ("rope-vit-axail", {}, ("rope-vit-axail", "did you mean 'rope-vit-axial'")),
        ("sinusodial", {}, ("did you mean 'sinusoidal'",)),
        (None, {}, ("position is None",)),
        ("rope-vit-axial", {"bas": 10.0}, ("bas", "did you mean 'base'")),
        ("rope-vit-axial", {"base": -1.0}, ("base is -1",)),
        ("rope-vit-axial", {"pairing": "halves"}, ("halves", "interleaved")),
        ("sinusoidal", {"bases": 10.0}, ("bases", "did you mean 'base'")),
        ("sinusoidal", {"axes": 1}, ("axes", "base, order")),
        ("sinusoidal", {"order": "tim"}, ("order is 'tim'", "simple-vit")),
        ("shaw", {"clips": 3}, ("clips", "did you mean 'clip'")),
        ("shaw", {"clip": 0}, ("clip is 0", "positive")),
        ("shaw", {"size": (2, 2)}, ("size", "clip, value_term")),
        ("deberta", {"clip": 2.5}, ("clip is 2.5", "positive integer")),
        ("t5", {"num_buckets": 6}, ("num_buckets is 6", "multiple of 4")),
        ("t5", {"max_distance": 0}, ("max_distance is 0",)),
        ("transformer-xl", {"base": 0.0}, ("base is 0",)),
        ("alibi", {"distance": "euclid"}, ("distance is 'euclid'", "manhattan")),
        ("alibi", {"slope": 1.0}, ("slope", "distance")),
        ("learned", {"base": 10.0}, ("learned", "base", "none")),
        ("none", {"base": 10.0}, ("base",)),
        ("learned", {"keep_absolute": True}, ("keep_absolute", "no effect")),
        ("roformer", {}, ("axes",)),
    ],
)
def test_wrong_encodings_and_options_are_refused(
    position: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Failure class 16. The model stays what it was."""
    model = timm.create_model("vit_tiny_patch16_224", **TINY, img_size=64).eval()
    x = images(4, 4)
    before, keys, kind = model(x), list(model.state_dict()), type(model)
    with pytest.raises(ValueError, match=r".") as caught:
        vr.add_position(model, position, **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    assert torch.equal(model(x), before)
    vr.add_position(model, "rope-vit-axial")


@pytest.mark.parametrize("position", ROPES)
def test_heads_that_do_not_divide_are_refused(position: str) -> None:
    """Failure class 8."""
    for head_dim in (6, 9, 10, 18):
        model = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=2, embed_dim=2 * head_dim, img_size=32)
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}; it must be a multiple of 4"):
            vr.add_position(model, position)
        assert type(model) is timm.models.VisionTransformer
        assert model.pos_embed is not None


@pytest.mark.parametrize(
    ("what", "rope"),
    [
        ("head_dim", lambda: vr.preset("rope-vit-axial", head_dim=16, depth=DEPTH)),
        ("depth", lambda: vr.preset("rope-vit-axial", head_dim=HEAD_DIM, depth=3)),
        ("axes", lambda: vr.preset("roformer", head_dim=HEAD_DIM, depth=DEPTH)),
        ("heads", lambda: vr.preset("rope-vit-mixed", head_dim=HEAD_DIM, num_heads=3, depth=DEPTH)),
    ],
)
def test_a_rope_that_does_not_fit_is_refused(what: str, rope: Callable[[], vr.Rope]) -> None:
    with pytest.raises(ValueError, match=what):
        vr.create_model(MODELS["vit"][0], rope(), **options_of("vit"))


def test_a_rope_with_options_is_refused() -> None:
    with pytest.raises(ValueError, match="base would have no effect"):
        vr.create_model(MODELS["vit"][0], zero_rope(HEAD_DIM), position_options={"base": 3.0}, **options_of("vit"))


def test_wrong_model_names() -> None:
    with pytest.raises(ValueError, match=r"vit_tiny_patch16_22.*did you mean.*vit_tiny_patch16_224"):
        vr.create_model("vit_tiny_patch16_22", "none")
    with pytest.raises(ValueError, match="forward_intermediates"):
        vr.create_model("vit_tiny_patch16_224", "none", features_only=True)
    with pytest.raises(ValueError, match="no absolute embedding"):
        vr.create_model("vit_tiny_patch16_224", "learned", pos_embed="none", **TINY)
    with pytest.raises(ValueError, match="no absolute embedding"):
        vr.create_model("vit_tiny_patch16_224", keep_absolute=True, pos_embed="none", **TINY)
    assert build("vit", "rope-vit-axial", pos_embed="none")(images(2, 3)).shape == (2, 5)


# ---- compile and export

SIZES = ((4, 4), (3, 7), (6, 5), (5, 9), (2, 8), (7, 3), (8, 8), (9, 4), (3, 11), (10, 6))


def blocks_to_compile(position: str) -> int:
    """One block holds all there is to compile; the representatives show that layers do not get in each other's way."""
    return DEPTH if position in REPRESENTATIVES else 1


def compiled(model: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
# Fixed tables that have their coordinates and pairing in common with another one differ in their numbers alone.
@pytest.mark.parametrize(
    "position",
    [
        pytest.param(position, marks=pytest.mark.slow if position in FIXED and position not in KINDS_OF_TABLES else ())
        for position in POSITIONS
    ],
)
def test_compile_without_breaks_or_storms(position: str) -> None:
    """Failure class 7: one graph, no complex numbers, and ten sizes do not mean ten compilations."""
    model = build(position=position, rows=3, columns=3, depth=blocks_to_compile(position))
    if position in ROPES:
        vr.set_extension(model, _a_method_for(position))
    # Graphs are what is counted here; test_compiled_training takes them through autograd.
    fast, counter = compiled(model, backend="eager")
    with torch.no_grad():
        for rows, columns in SIZES:
            x = images(rows, columns)
            assert_close(fast(x), model(x), rtol=0, atol=2e-5)
    assert counter.frame_count <= 4
    for graph in counter.graphs:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
# Fixed tables differ in their numbers alone: one of them here, each in test_compile_without_breaks_or_storms.
@pytest.mark.parametrize(
    ("position", "checkpointing"),
    [
        *(
            pytest.param(position, False, marks=pytest.mark.slow if position in FIXED[1:] else ())
            for position in POSITIONS
        ),
        *((position, True) for position in REPRESENTATIVES),
    ],
)
def test_compiled_training(position: str, checkpointing: bool) -> None:
    model = build(position=position, depth=blocks_to_compile(position)).train()
    model.set_grad_checkpointing(checkpointing)
    fast, _ = compiled(model)
    # torch cannot trace the gradient of an antialiased bicubic resize whose size is dynamic: one size for "learned".
    one_size = position == "learned" or checkpointing or position not in REPRESENTATIVES
    for rows, columns in ((3, 5),) if one_size else ((4, 4), (3, 5)):
        x = images(rows, columns)
        model(x).square().sum().backward()
        wanted = gradients(model)
        fast(x).square().sum().backward()
        for name, gradient in gradients(model).items():
            assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3, msg=lambda t, name=name: f"{name}: {t}")


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
def test_compiled_augmentation_and_dropped_patches() -> None:
    model = build(position="dinov3", position_options={"rescale": 2.0}, patch_drop_rate=0.25).train()
    fast, _ = compiled(model)
    outs = [fast(images(4, 4)) for _ in range(2)]
    assert not torch.equal(outs[0], outs[1])
    outs[0].sum().backward()


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("position", ["rope-vit-mixed", "dinov3"])
def test_inductor(position: str) -> None:
    model = build(position=position)
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows, columns in ((4, 4), (3, 5)):
            x = images(rows, columns)
            assert_close(fast(x), model(x), rtol=0, atol=2e-5)
    torch._dynamo.reset()


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("position", "strict"),
    [*((position, False) for position in POSITIONS), *((position, True) for position in REPRESENTATIVES)],
)
def test_export_with_dynamic_size(position: str, strict: bool) -> None:
    """Failure class 7."""
    model = build(position=position, depth=blocks_to_compile(position))
    rows, columns = torch.export.Dim("rows", min=2, max=32), torch.export.Dim("columns", min=2, max=32)
    program = torch.export.export(
        model, (images(4, 6),), dynamic_shapes=({2: 16 * rows, 3: 16 * columns},), strict=strict
    )
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    assert set(program.state_dict) == set(model.state_dict())
    for size in ((4, 6), (3, 11), (9, 2)):
        x = images(*size)
        assert_close(program.module()(x), model(x), rtol=0, atol=2e-5)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("position", REPRESENTATIVES)
def test_export_with_dynamic_batch(position: str) -> None:
    model = build(position=position)
    program = torch.export.export(model, (images(3, 5),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    x = torch.cat([images(3, 5), images(3, 5)[:1]])
    assert_close(program.module()(x), model(x), rtol=0, atol=2e-5)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # tracing is deprecated and warns of every size it meets
@pytest.mark.parametrize("position", POSITIONS)
def test_traced_models_follow_the_size(position: str) -> None:
    model = build(position=position, depth=blocks_to_compile(position))
    # Not at the trained grid, where timm leaves the resampling of a learned embedding out of the trace.
    traced = torch.jit.trace(model, (images(3, 4),), check_trace=False)
    assert not any("omplex" in str(node) for node in traced.inlined_graph.nodes())
    for rows, columns in ((4, 4), (3, 5), (5, 3)):
        x = images(rows, columns)
        assert_close(traced(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_timms_reentrant_checkpoints_are_not_taken(position: str) -> None:
    """They would walk the graph of learned positions, which all blocks share, once a block."""
    model = build(position=position)
    x = images(3, 4)
    wanted = _train_step(model, x)
    model.set_grad_checkpointing()
    set_reentrant_ckpt(True)
    try:
        got = _train_step(model, x)
    finally:
        set_reentrant_ckpt(False)
    for name, gradient in wanted[1].items():
        assert torch.equal(got[1][name], gradient), name


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("train", [False, True])
def test_a_batch_of_no_images(position: str, train: bool) -> None:
    """Failure class 31: timm's own model takes one."""
    model = build(position=position).train(train)
    x = images(3, 4)[:0]
    out = model(x)
    assert out.shape == (0, TINY["num_classes"])
    out.sum().backward()


@pytest.mark.parametrize(
    ("name", "no_embed_class"),
    [("vit_tiny_patch16_224", False), ("vit_tiny_patch16_224", True), ("deit_tiny_distilled_patch16_224", False)],
)
def test_learned_embeddings_are_added_as_timm_adds_them(name: str, no_embed_class: bool) -> None:
    registers = {} if "distilled" in name else {"reg_tokens": 2}
    torch.manual_seed(0)
    theirs = timm.create_model(
        name, img_size=64, dynamic_img_size=True, no_embed_class=no_embed_class, **registers, **TINY
    ).eval()
    nn.init.normal_(theirs.pos_embed)
    model = vr.add_position(copy.deepcopy(theirs), "learned")
    for size in ((4, 4), (3, 5)):
        x = images(*size)
        assert torch.equal(model(x), theirs(x))
