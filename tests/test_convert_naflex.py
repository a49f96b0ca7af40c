"""timm's NaFlexVit with position encodings: against timm, and batches of several sizes against each image alone."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import timm
import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import patchify_image
from timm.layers import PatchDropoutWithIndices, set_fused_attn, set_reentrant_ckpt
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.encodings import ENCODINGS
from vision_rope.frequencies import Ladder
from vision_rope.masked_model import MaskedModel, create_decoder
from vision_rope.rope_presets import PRESETS

HEAD_DIM, HEADS, DEPTH = 24, 2, 2
TINY: dict[str, Any] = {
    "depth": DEPTH,
    "embed_dim": HEAD_DIM * HEADS,
    "num_heads": HEADS,
    "num_classes": 5,
    "img_size": 64,
    "pos_embed_grid_size": (4, 4),
}
OWN: dict[str, dict[str, Any]] = {
    "axial": {"rope_type": "axial"},
    "axial, stretched": {"rope_type": "axial", "rope_ref_feat_shape": (5, 5), "rope_grid_offset": 1.0},
    "axial, halves": {"rope_type": "axial", "rope_rotate_half": True, "attn_type": "eva", "qk_norm": True},
    "mixed": {"rope_type": "mixed", "pos_embed": "factorized", "pos_embed_ar_preserving": True},
    "mixed, columns first": {"rope_type": "mixed", "rope_grid_indexing": "xy", "pos_embed": "none"},
    "dinov3": {"rope_type": "dinov3", "rope_rotate_half": True, "class_token": True, "init_values": 0.5},
    "mrope": {"rope_type": "mrope", "rope_mrope_section": (4, 4, 4), "global_pool": "map"},
    "shared keys": {"rope_type": "axial", "num_kv_heads": 1, "qkv_fused": False, "attn_gated": True},
}
# The blocks, attentions, embeddings and poolings that a model without its own RoPE can have.
PLAIN: dict[str, dict[str, Any]] = {
    "average pooling": {},
    "map": {"global_pool": "map", "reg_tokens": 0},
    "class token": {"global_pool": "token", "class_token": True, "qk_norm": True, "use_key_only_attn_mask": True},
    "factorized": {"pos_embed": "factorized", "pos_embed_ar_preserving": True, "pool_include_prefix": True},
    "grid sample": {"pos_embed_use_grid_sample": True, "attn_type": "eva", "swiglu_mlp": True, "pre_norm": True},
    "factorized grid sample": {"pos_embed": "factorized", "pos_embed_use_grid_sample": True, "global_pool": "avgmax"},
}
ROPES = [name for name in PRESETS if vr.preset(name, head_dim=HEAD_DIM).axes == 2]
POSITIONS = [*ROPES, *ENCODINGS]
RELATIVE = ("shaw", "transformer-xl", "t5", "deberta", "alibi")
# Indices, learned, stretched and centred coordinates, biases of scores, absolute embeddings.
KINDS = ("rope-vit-axial", "rope-vit-mixed", "dinov3", "deberta", "sinusoidal", "learned")
# The same number of tokens on two grids, one grid twice and apart.
GRIDS = [(4, 4), (2, 6), (3, 4), (4, 4), (1, 5)]


def build(position: Any = "rope-vit-axial", *, seed: int = 1, **options: Any) -> Any:
    conversion = options.pop("position_options", {})
    conversion |= {key: options.pop(key) for key in ("keep_absolute", "attention") if key in options}
    return randomise(vr.add_position(build_timm(**options), position, **conversion), seed).eval()


def build_timm(seed: int = 1, **options: Any) -> Any:
    return randomise(timm.create_model("naflexvit_base_patch16_gap", **{**TINY, **options}), seed).eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> Any:
    """Weights that let every layer matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name == "position.learned_frequencies" or name == "rope.freqs":
            continue
        if parameter.ndim > 1:
            parameter.copy_(noise * (1.5 / math.sqrt(parameter[0].numel())))
        else:
            parameter.copy_(noise * 0.1 + (1.0 if "norm" in name or "gamma" in name else 0.0))
    return model


def images_for(grids: list[tuple[int, int]], channels: int = 3) -> list[Tensor]:
    return [torch.randn(channels, rows * 16, columns * 16) for rows, columns in grids]


def collate(images: list[Tensor], padding: int = 3) -> dict[str, Tensor]:
    """A batch as timm's loader makes it."""
    samples = []
    for image in images:
        patches, coord, valid = patchify_image(image, (16, 16))
        samples.append(({"patches": patches, "patch_coord": coord, "patch_valid": valid}, 0))
    longest = max(len(sample["patches"]) for sample, _ in samples)
    batch = NaFlexCollator(longest + padding)(samples)[0]
    return {name: batch[name] for name in ("patches", "patch_coord", "patch_valid")}


def zero_rope() -> vr.Rope:
    half = tuple(range(HEAD_DIM // 4)), tuple(range(HEAD_DIM // 4, HEAD_DIM // 2))
    ladders = [Ladder(base=100.0, pairs=HEAD_DIM // 4, slots=slots, scale=0.0) for slots in half]
    return vr.Rope(head_dim=HEAD_DIM, axes=2, ladders=ladders, depth=DEPTH)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


# ---- against timm


@pytest.mark.parametrize("kind", OWN)
@torch.no_grad()
def test_own_rope_gives_timms_logits(kind: str) -> None:
    theirs, ours = build_timm(**OWN[kind]), vr.add_position(build_timm(seed=2, **OWN[kind]), "own")
    ours.load_state_dict(theirs.state_dict())
    for grid in ((4, 4), (3, 7), (8, 6)):
        x = torch.stack(images_for([grid, grid]))
        assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    batch = collate(images_for(GRIDS))
    expected = theirs(batch)
    assert expected.std() > 0.1
    assert_close(ours(batch), expected, atol=1e-5, rtol=1e-5)
    theirs.rope = None
    assert not torch.allclose(theirs(batch), expected, atol=1e-3), "the rotation matters"


@pytest.mark.parametrize("kind", ["mixed", "mixed, columns first", "axial", "dinov3"])
@torch.no_grad()
def test_weights_go_back_to_timm(kind: str) -> None:
    ours = vr.add_position(build_timm(**OWN[kind]), "own")
    back = build_timm(seed=2, **OWN[kind])
    back.load_state_dict(vr.timm_state_dict(ours))
    batch = collate(images_for(GRIDS))
    assert_close(back(batch), ours(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", PLAIN)
def test_zero_rotation_changes_no_bit(kind: str, fused: bool) -> None:
    rates = {
        "drop_rate": 0.1,
        "pos_drop_rate": 0.1,
        "proj_drop_rate": 0.1,
        "attn_drop_rate": 0.1,
        "drop_path_rate": 0.2,
        "patch_drop_rate": 0.25,
    }
    set_fused_attn(fused)
    try:
        theirs, ours = (build_timm(**PLAIN[kind], **rates) for _ in range(2))
    finally:
        set_fused_attn(True)
    vr.add_position(ours, zero_rope(), keep_absolute=True)
    inputs: list[Any] = [torch.stack(images_for([grid, grid])) for grid in ((4, 4), (3, 5))]
    for x in (*inputs, collate(images_for(GRIDS))):
        assert torch.equal(ours(x), theirs(x))
        wanted, got = (train_step(model, x) for model in (theirs, ours))
        assert torch.equal(got[0], wanted[0])
        for name, gradient in wanted[1].items():
            assert torch.equal(got[1][name], gradient), name


def train_step(model: Any, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    torch.manual_seed(3)
    logits = model(x)
    logits.square().sum().backward()
    model.eval()
    return logits, gradients(model)


@pytest.mark.parametrize("position", POSITIONS)
def test_state_dict_keys_stay(position: str) -> None:
    for options, absolute in (
        ({}, {"embeds.pos_embed"}),
        (PLAIN["factorized"], {"embeds.pos_embed_y", "embeds.pos_embed_x"}),
    ):
        theirs, ours = build_timm(**options), build(position, **options)
        added = {f"position.{name}" for name, _ in (ours.position.named_parameters() if ours.position else ())}
        assert bool(added) == (position in ("rope-vit-mixed", *RELATIVE) and position != "alibi")
        removed = set() if position == "learned" else absolute
        assert set(ours.state_dict()) == set(theirs.state_dict()) - removed | added
        if position != "learned":
            kept = build(position, keep_absolute=True, **options)
            assert set(kept.state_dict()) == set(theirs.state_dict()) | added


@torch.no_grad()
def test_frequencies_that_timm_learned_are_begun_with() -> None:
    theirs = build_timm(**OWN["mixed"])
    theirs.rope.freqs.mul_(2.0)
    batch = collate(images_for(GRIDS))
    expected = theirs(batch)
    ours = vr.add_position(theirs, "rope-vit-mixed", keep_absolute=True)
    assert_close(ours(batch), expected, atol=1e-5, rtol=1e-5)
    assert ours.rope is None
    drawn = vr.add_position(build_timm(**OWN["mixed"]), "rope-vit-mixed", keep_absolute=True, base=20.0)
    assert not torch.allclose(drawn(batch), expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["average pooling", "class token"])
def test_features_and_intermediates_are_timms(kind: str) -> None:
    theirs = build_timm(**PLAIN[kind])
    ours = vr.add_position(build_timm(**PLAIN[kind]), zero_rope(), keep_absolute=True)
    x, batch = torch.stack(images_for([(3, 5)] * 2)), collate(images_for(GRIDS))
    parts = (batch["patches"], batch["patch_coord"], batch["patch_valid"])
    assert_same(ours.forward_features(x), theirs.forward_features(x))
    assert_same(ours.forward_features(*parts), theirs.forward_features(*parts))
    assert_same(ours(parts[0], patch_coord=parts[1], patch_valid=parts[2]), theirs(batch))
    assert_same(ours({**batch, "seq_len": parts[0].shape[1]}), theirs(batch))
    flags = ("return_prefix_tokens", "norm", "stop_early", "intermediates_only", "output_dict")
    for chosen in ((), *((flag,) for flag in flags), flags):
        for indices in (None, [0]):
            arguments: dict[str, Any] = {"indices": indices, **dict.fromkeys(chosen, True)}
            for fmt in ("NCHW", "NLC"):
                wanted = theirs.forward_intermediates(x, output_fmt=fmt, **arguments)
                assert_same(ours.forward_intermediates(x, output_fmt=fmt, **arguments), wanted)
            wanted = theirs.forward_intermediates(batch, output_fmt="NLC", **arguments)
            assert_same(ours.forward_intermediates(batch, output_fmt="NLC", **arguments), wanted)
    with pytest.raises(ValueError, match="grids differ"):
        ours.forward_intermediates(batch)


def assert_same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    else:
        assert type(got) is type(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)


# ---- batches of several sizes


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", ["average pooling", "map"])
@torch.no_grad()
def test_a_batch_of_sizes_is_each_image_alone(kind: str, position: str) -> None:
    model = build(position, **PLAIN[kind])
    images = images_for(GRIDS)
    alone = torch.cat([model(image[None]) for image in images])
    assert alone.std(dim=0).min() > 0.02
    assert_close(model(collate(images)), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_padding_does_not_matter(position: str) -> None:
    model = build(position)
    batch = collate(images_for(GRIDS), padding=5)
    expected = model(batch)
    padding = ~batch["patch_valid"]
    assert padding.any(dim=1).all()
    batch["patches"][padding] = 50.0
    batch["patch_coord"][padding] = torch.tensor([30, 2])
    assert_close(model(batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "learned"])
@torch.no_grad()
def test_coordinates_say_where_a_patch_is(position: str) -> None:
    """timm's learned embedding takes patches in the order of the grid, whatever the coordinates say."""
    model = build(position)
    batch = collate(images_for(GRIDS))
    order = torch.randperm(batch["patches"].shape[1])
    mixed = {name: part[:, order] for name, part in batch.items()}
    assert_close(model(mixed), model(batch), atol=1e-5, rtol=1e-5)
    coord = batch["patch_coord"]
    elsewhere = {**batch, "patch_coord": torch.cat((coord[:, [2, 0, 1]], coord[:, 3:]), dim=1)}
    moved = not torch.allclose(model(elsewhere), model(batch), atol=1e-3)
    assert moved == (position != "none")


@pytest.mark.parametrize(
    ("position", "method"),
    [("rope-vit-axial", "yarn"), ("rope-vit-axial", "ntk"), ("rope-vit-mixed", "interpolate"), ("dinov3", "pitch")],
)
@torch.no_grad()
def test_each_image_is_extended_for_its_own_grid(position: str, method: str) -> None:
    """YaRN changes the temperature, by another factor for another size."""
    model = build(position)
    images = images_for([(4, 4), (8, 8), (12, 4), (8, 8), (3, 2)])
    batch = collate(images)
    plain = model(batch)
    vr.set_extension(model, method)
    extended = model(batch)
    assert_close(extended, torch.cat([model(image[None]) for image in images]), atol=1e-5, rtol=1e-5)
    moved = (extended - plain).abs().amax(dim=1) > 1e-4
    assert moved.tolist() == [False, True, True, True, False]


def test_the_training_grid_is_that_of_the_images() -> None:
    """Not that of the absolute embedding, which timm makes 16 x 16 for every size."""
    assert build(pos_embed_grid_size=(16, 16)).train_grid == (4, 4)
    assert vr.create_model("naflexvit_base_patch16_gap", "none", depth=1).train_grid == (24, 24)
    vit = vr.create_model("vit_tiny_patch16_224", "shaw", use_naflex=True, depth=1, img_size=(32, 96))
    assert vit.train_grid == (2, 6)
    assert vit.position.clips == (1, 5)


class KeepGiven(PatchDropoutWithIndices):
    """Keeps patches that a test has chosen."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        kept = self.kept.expand(len(x), -1)
        return torch.cat((prefix, patches.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))), dim=1), kept


@pytest.mark.parametrize("position", POSITIONS)
def test_positions_follow_the_kept_patches(position: str) -> None:
    """Failure class 19."""
    model = build(position, patch_drop_rate=0.5).train()
    model.patch_drop.__class__ = KeepGiven
    model.patch_drop.kept = torch.tensor([[11, 0, 5, 1, 7]])  # the corners of a 3 x 4 grid, so that it stays one
    images = images_for([(3, 4), (3, 4), (2, 6)])
    batch = collate(images)
    dropped = model(batch)
    assert_close(dropped[:2], model(torch.stack(images[:2])), atol=1e-5, rtol=1e-5)
    kept = {name: part[:, model.patch_drop.kept[0]] for name, part in batch.items()}
    model.patch_drop = nn.Identity()
    if position != "learned":
        assert_close(dropped, model(kept), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(dropped, model(batch), atol=1e-2)


def test_validity_of_kept_patches_is_returned() -> None:
    model = build(patch_drop_rate=0.5).train()
    batch = collate(images_for(GRIDS))
    with pytest.raises(ValueError, match="output_dict=True"):
        model.forward_intermediates(batch, output_fmt="NLC")
    found = model.forward_intermediates(batch, output_fmt="NLC", output_dict=True)
    tokens = batch["patch_valid"].shape[1] // 2
    assert found["patch_valid"].shape == (len(GRIDS), tokens)
    assert found["image_intermediates"][0].shape[1] == tokens
    assert model.forward_features(**batch)["patch_valid"].shape == (len(GRIDS), tokens)


@torch.no_grad()
def test_augmentation_of_positions_is_for_training() -> None:
    model = build("dinov3", position_options={"rescale": 2.0})
    batch = collate(images_for(GRIDS))
    assert torch.equal(model(batch), model(batch))
    model.train()
    assert not torch.allclose(model(batch), model(batch), atol=1e-3)


@torch.no_grad()
def test_sinusoids_are_dropped_with_what_they_are_added_to() -> None:
    model = build("sinusoidal", pos_drop_rate=0.5).train()
    seen: list[Tensor] = []
    model.norm_pre.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for x in (torch.stack(images_for([(3, 5)] * 2)), collate(images_for(GRIDS))):
        model(x)
        assert 0.4 < (seen.pop() == 0).float().mean() < 0.6


# ---- training and moving


@pytest.mark.parametrize("position", KINDS)
def test_checkpointing_changes_no_gradient(position: str) -> None:
    """Failure class 13: two inputs of several resolutions in one backward pass; timm's reentrant ones are not taken."""
    model = build(position).train()
    batch, x = collate(images_for(GRIDS)), torch.stack(images_for([(3, 5)] * 2))

    def step() -> dict[str, Tensor]:
        (model(batch).square().sum() + model(x).square().sum()).backward()
        return gradients(model)

    expected = step()
    model.set_grad_checkpointing()
    set_reentrant_ckpt(True)
    passes: list[int] = []
    model.blocks[0].mlp.fc1.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        found = step()
    finally:
        set_reentrant_ckpt(False)
    assert len(passes) == 4
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_optimizers_treat_learned_frequencies_as_documented() -> None:
    """Failure class 12."""
    model = build("rope-vit-mixed")
    frequencies = model.position.learned_frequencies
    assert "position.learned_frequencies" in model.no_weight_decay()
    rules = {"weight_decay": 0.1, "no_weight_decay_list": model.no_weight_decay()}
    for groups in (param_groups_weight_decay(model, **rules), param_groups_layer_decay(model, **rules)):
        (own,) = (group for group in groups if any(one is frequencies for one in group["params"]))
        assert own["weight_decay"] == 0.0
        assert own.get("lr_scale", 1.0) == 1.0


@pytest.mark.parametrize("position", KINDS)
@torch.no_grad()
def test_copies_dtypes_and_devices(position: str) -> None:
    """Failure classes 4 and 6."""
    model = build(position, keep_absolute=position != "learned")
    batch = collate(images_for(GRIDS))
    expected = model(batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(batch), expected)
    with torch.device("meta"):
        empty = timm.create_model("naflexvit_base_patch16_gap", **TINY)
        empty = vr.add_position(empty, position, keep_absolute=position != "learned")
    empty = empty.to_empty(device="cpu").eval()
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(batch), expected)
    low = model.bfloat16()({**batch, "patches": batch["patches"].bfloat16()})
    assert low.dtype == torch.bfloat16
    assert (low.float() - expected).abs().max() < 0.05 * expected.abs().max()


@torch.no_grad()
def test_saved_weights_load(tmp_path: Any) -> None:
    model, other = build("rope-vit-mixed"), build("rope-vit-mixed", seed=2, position_options={"pairing": "half"})
    batch = collate(images_for(GRIDS))
    vr.save_model(tmp_path / "weights.safetensors", model)
    assert_close(vr.load_model(other, tmp_path / "weights.safetensors")(batch), model(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", KINDS)
def test_a_batch_of_nothing(position: str) -> None:
    model = build(position)
    batch = {name: part[:0] for name, part in collate(images_for(GRIDS)).items()}
    assert model(batch).shape == (0, 5)
    assert model(torch.zeros(0, 3, 64, 32)).shape == (0, 5)


@torch.no_grad()
def test_classifier_is_reset() -> None:
    model = build()
    batch = collate(images_for(GRIDS))
    model.reset_classifier(3)
    assert model(batch).shape == (len(GRIDS), 3)
    model.reset_classifier(0, "")
    assert model(batch).shape == (len(GRIDS), batch["patches"].shape[1] + 4, HEAD_DIM * HEADS)


# ---- images


@pytest.mark.parametrize("projection", ["linear", "conv"])
@torch.no_grad()
def test_sizes_that_patches_do_not_divide(projection: str) -> None:
    """Failure class 17."""
    model = build(embed_proj_type=projection)
    with pytest.raises(ValueError, match="width 79, which patches of 16 pixels do not divide; resize them to 64 or 80"):
        model(torch.zeros(1, 3, 64, 79))
    with pytest.raises(ValueError, match="height 79"):
        model.forward_intermediates(torch.zeros(1, 3, 79, 64))
    padded = build(embed_proj_type=projection, dynamic_img_pad=True)
    x = torch.randn(1, 3, 64, 79)
    assert_close(padded(x), model(nn.functional.pad(x, (0, 1))))


@torch.no_grad()
def test_linear_attention_takes_images() -> None:
    model = build(attention="linear")
    x = torch.stack(images_for([(3, 5)] * 2))
    assert model(x).shape == (2, 5)
    with pytest.raises(ValueError, match="the batch has padding and the model's attention is linear"):
        model(collate(images_for(GRIDS)))


@pytest.mark.parametrize(
    ("position", "options", "words"),
    [
        ("own", {}, "the NaFlexVit has no rotary embedding of its own"),
        ("learned", {"pos_embed": "none"}, "no absolute embedding to keep"),
        ("rope-vit-axial", {"attn_layer": "diff"}, "DiffAttention"),
        ("rope-vit-axial", {"num_heads": 8}, "head_dim is 6; it must be a multiple of 4"),
    ],
)
def test_refusals_leave_the_model(position: str, options: dict[str, Any], words: str) -> None:
    model = build_timm(**options)
    kind, keys = type(model), list(model.state_dict())
    with pytest.raises(ValueError, match=words):
        vr.add_position(model, position)
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert isinstance(model.embeds.pos_drop, nn.Dropout)


def test_masked_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PositionedNaFlexVit.*choose a vit"):
        MaskedModel(build())
    with pytest.raises(ValueError, match=r"PositionedNaFlexVit.*choose a vit"):
        create_decoder(build(), position="none", dim=24, depth=1, num_heads=1)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("position", ["rope-vit-axial", "deberta", "sinusoidal"])
def test_images_compile_as_one_graph(position: str) -> None:
    """Failure class 7."""
    model = build(position, depth=1)
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for grid in ((4, 4), (3, 5)):
            x = torch.stack(images_for([grid] * 2))
            assert_close(fast(x), model(x), atol=2e-5, rtol=0)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_batches_of_sizes_break_the_graph_and_stay_right() -> None:
    """Sizes of grids are numbers that stand in a tensor."""
    model = build("rope-vit-axial", depth=1)
    torch._dynamo.reset()
    with torch.no_grad():
        for grids in (GRIDS, GRIDS[1:]):
            batch = collate(images_for(grids))
            assert_close(torch.compile(model, backend="eager")(batch), model(batch), atol=2e-5, rtol=0)
    torch._dynamo.reset()


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed"])
def test_export_with_dynamic_size(position: str) -> None:
    model = build(position, depth=1)
    rows, columns = torch.export.Dim("rows", min=2, max=32), torch.export.Dim("columns", min=2, max=32)
    sizes = ({2: 16 * rows, 3: 16 * columns},)
    program = torch.export.export(model, (torch.stack(images_for([(4, 6)] * 2)),), dynamic_shapes=sizes)
    for grid in ((4, 6), (3, 11)):
        x = torch.stack(images_for([grid] * 2))
        assert_close(program.module()(x), model(x), atol=2e-5, rtol=0)
