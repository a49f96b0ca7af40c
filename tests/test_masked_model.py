"""Masked models against timm's own layers, hand-made subsets of patches and attention that is masked instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vision_rope
from vision_rope.checkpoint import build_model
from vision_rope.config import DataConfig, MaskedConfig, ModelConfig, OptimizerConfig, TrainConfig
from vision_rope.coordinates import Coordinates
from vision_rope.encodings import ENCODINGS
from vision_rope.losses import masked_loss
from vision_rope.masked_model import MaskedModel, create_decoder
from vision_rope.masking import draw_masks
from vision_rope.metrics import MaskedMetrics
from vision_rope.optimization import create_optimizer
from vision_rope.rope_presets import PRESETS

TINY = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
GRID = (4, 6)
TWO_AXES = [name for name in PRESETS if vision_rope.preset(name).axes == 2]
POSITIONS = [*TWO_AXES, *ENCODINGS]
KINDS = ["all", "visible"]
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_small_patch16_224", {}),
    "average pool": ("vit_small_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "registers": ("vit_small_patch16_224", {"reg_tokens": 3, "no_embed_class": True}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "norm before the blocks": ("vit_base_patch16_clip_224", {}),
    "parallel blocks": ("vit_small_patch16_18x2_224", {}),
    "no last norm": ("vit_small_patch16_224", {"final_norm": False}),
}


def make_encoder(position: str = "rope-vit-axial", name: str = "vit_small_patch16_224", **options: Any) -> Any:
    return vision_rope.create_model(name, position, **{**TINY, **options})


def make_model(kind: str, position: str = "rope-vit-axial", **options: Any) -> MaskedModel:
    """With a head that does not begin at zero, where asked for nothing else."""
    encoder = make_encoder(position, **options)
    decoder = None
    if kind == "visible":
        decoder = create_decoder(encoder, position=position, dim=16, depth=1, num_heads=2)
    model = MaskedModel(encoder, decoder)
    with torch.no_grad():
        for parameter in (model.head.weight, model.head.bias, model.mask_token):
            parameter.normal_()
        if encoder.cls_token is not None:
            encoder.cls_token.normal_()
        for part in (encoder, decoder):
            if part is not None and part.pos_embed is not None:
                part.pos_embed.normal_()
    return model.eval()


def example(grid: tuple[int, int] = GRID, batch: int = 2, patch: tuple[int, int] = (4, 4)) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, patch[0] * grid[0], patch[1] * grid[1]), draw_masks(batch, grid, ratio=0.4)


def visible_places(masks: Tensor) -> Tensor:
    return torch.tensor([[place for place, is_hidden in enumerate(m.flatten()) if not is_hidden] for m in masks])


# ---- the encoder on all tokens


@pytest.mark.parametrize("backbone", BACKBONES)
def test_all_equals_a_forward_pass_through_timms_own_layers(backbone):
    name, options = BACKBONES[backbone]
    twin = timm.create_model(name, **TINY, **options).eval()
    model = MaskedModel(vision_rope.add_position(copy.deepcopy(twin), "learned")).eval()
    nn.init.normal_(model.head.weight)
    nn.init.normal_(model.mask_token)
    images, masks = example()

    x = twin.patch_embed(images)
    for image in range(2):
        for place in range(24):
            if masks[image, place // 6, place % 6]:
                x[image, place] = model.mask_token
    x = twin.norm_pre(twin._pos_embed(x))
    for block in twin.blocks:
        x = block(x)
    x = twin.fc_norm(twin.norm(x)[:, twin.num_prefix_tokens :])
    torch.testing.assert_close(model(images, masks), x @ model.head.weight.T + model.head.bias)


# ---- the encoder on visible tokens


@pytest.mark.parametrize("position", POSITIONS)
def test_the_kept_patches_alone_equal_attention_that_sees_them_alone(position):
    """A second formulation: all tokens, each of which may look at prefix and visible ones; any encoding."""
    encoder = make_encoder(position, reg_tokens=1).eval()
    images, masks = example()
    kept = visible_places(masks)
    patches = encoder.embed_patches(images)
    mine = encoder.forward_patches(patches, kept=kept)

    seen = torch.cat((torch.ones(2, 2, dtype=torch.bool), ~masks.flatten(1)), dim=1)
    whole = encoder.forward_patches(patches, attn_mask=seen[:, None, None].expand(-1, -1, 26, -1))
    expected = torch.stack([tokens[visible] for tokens, visible in zip(whole, seen, strict=True)])
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("position", POSITIONS)
def test_all_patches_kept_equal_the_plain_forward_pass_and_order_does_not_matter(position):
    encoder = make_encoder(position).eval()
    images, _ = example()
    patches = encoder.embed_patches(images)
    plain = encoder.forward_features(images)
    everything = torch.arange(24).expand(2, -1)
    torch.testing.assert_close(encoder.forward_patches(patches, kept=everything), plain)
    order = torch.stack([torch.randperm(24), torch.randperm(24)])
    permuted = encoder.forward_patches(patches, kept=order)
    torch.testing.assert_close(permuted[:, 0], plain[:, 0])
    for image in range(2):
        torch.testing.assert_close(permuted[image, 1:], plain[image, 1:][order[image]])


@pytest.mark.parametrize("position", POSITIONS)
def test_visible_patches_at_other_places_mean_something_else_but_without_positions(position):
    encoder = make_encoder(position).eval()
    patches = torch.zeros(2, *GRID, 32)
    contents = torch.randn(3, 32)
    places = torch.tensor([[0, 5, 14], [3, 8, 23]])
    patches.flatten(1, 2).scatter_(1, places[..., None].expand(-1, -1, 32), contents.expand(2, -1, -1))
    here, there = encoder.forward_patches(patches, kept=places)
    assert torch.allclose(here, there, atol=1e-5) == (position == "none")


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed", "sam2"])
def test_visible_patches_that_are_shifted_together_keep_their_answers(position):
    """Rotary embeddings see differences of positions alone; a token without a place would be a landmark."""
    encoder = make_encoder(position, class_token=False, global_pool="avg").eval()
    patches = torch.zeros(2, *GRID, 32)
    contents = torch.randn(3, 32)
    places = torch.tensor([[0, 2, 7], [15, 17, 22]])  # two rows down, three columns to the right
    patches.flatten(1, 2).scatter_(1, places[..., None].expand(-1, -1, 32), contents.expand(2, -1, -1))
    here, there = encoder.forward_patches(patches, kept=places)
    torch.testing.assert_close(here, there)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_visible_equals_its_steps_by_hand(backbone):
    name, options = BACKBONES[backbone]
    model = make_model("visible", name=name, **options)
    encoder, decoder = model.encoder, model.decoder
    images, masks = example()
    patches = encoder.embed_patches(images)
    answers = []
    for image in range(2):
        seen = [place for place in range(24) if not masks[image].flatten()[place]]
        encoded = encoder.forward_patches(patches[image : image + 1], kept=torch.tensor([seen]))
        encoded = encoder.fc_norm(encoded[0, encoder.num_prefix_tokens :])
        assert len(encoded) == len(seen) == 14
        grid = model.mask_token.repeat(24, 1)
        for place, token in zip(seen, encoded, strict=True):
            grid[place] = F.linear(token, model.decoder_embed.weight, model.decoder_embed.bias)
        answers.append(model.head(decoder.forward_patches(grid.view(1, *GRID, 16)))[0])
    torch.testing.assert_close(model(images, masks), torch.stack(answers))


def test_nothing_hidden_and_all_hidden_are_possible():
    model = make_model("visible")
    images, masks = example()
    everything, nothing = torch.ones_like(masks), torch.zeros_like(masks)
    assert model(images, nothing).shape == model(images, everything).shape == (2, 24, 48)
    blind = model(images, everything)
    torch.testing.assert_close(blind[0], blind[1])


# ---- both


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", ["rope-vit-axial", "learned"])
def test_what_is_hidden_is_not_looked_at(kind, position):
    model = make_model(kind, position)
    images, masks = example()
    hidden = masks.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    others = torch.where(hidden, torch.randn_like(images), images)
    assert not torch.equal(images, others)
    torch.testing.assert_close(model(images, masks), model(others, masks), rtol=0, atol=0)
    others = torch.where(hidden, images, torch.randn_like(images))
    assert not torch.allclose(model(images, masks), model(others, masks), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["pixels", "patch-normalized"])
def test_a_new_model_predicts_the_mean_colour_and_explains_exactly_nothing(kind, target):
    encoder = make_encoder()
    decoder = create_decoder(encoder, position="sam2", dim=16, depth=1, num_heads=2) if kind == "visible" else None
    model = MaskedModel(encoder, decoder).eval()
    images, masks = example(batch=3)
    predictions = model(images, masks)
    assert not predictions.any()
    metrics = MaskedMetrics((4, 4), target)
    metrics.update(predictions, (images, masks))
    assert metrics.compute()["r2"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_encoding_at_an_unseen_oblong_grid_with_gradients_for_all(kind, position):
    model = make_model(kind, position).train()
    images, masks = example((7, 3))
    predictions = model(images, masks)
    assert predictions.shape == (2, 21, 48)
    masked_loss(predictions, images, masks, (4, 4), "pixels").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", ["rope-vit-mixed", "learned"])
def test_weights_go_round_trip_and_copies_are_their_own(kind, position):
    model, other = make_model(kind, position), make_model(kind, position)
    images, masks = example()
    expected = model(images, masks)
    assert not torch.allclose(other(images, masks), expected)
    other.load_state_dict(model.state_dict(), strict=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for same in (other, twin):
        torch.testing.assert_close(same(images, masks), expected, rtol=0, atol=0)


def test_no_table_of_positions_is_in_the_state():
    names = set(make_model("visible").state_dict())
    assert not [name for name in names if "position" in name or "pos_embed" in name]
    assert {"mask_token", "encoder.cls_token", "decoder_embed.weight", "head.bias"} <= names
    assert "decoder.patch_embed.proj.weight" not in names


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_decayed_exists_and_reaches_the_optimizer(kind):
    model = make_model(kind, "rope-vit-mixed", reg_tokens=2)
    parameters = dict(model.named_parameters())
    exempt = model.no_weight_decay() & set(parameters)
    expected = {"mask_token", "encoder.cls_token", "encoder.reg_token", "encoder.position.learned_frequencies"}
    if kind == "visible":
        expected |= {"decoder.position.learned_frequencies"}
    assert exempt >= expected - {"encoder.reg_token"}
    optimizer = create_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not [name for name in exempt if id(parameters[name]) in decayed]
    assert id(parameters["encoder.blocks.0.attn.qkv.weight"]) in decayed
    assert id(parameters["head.weight"]) in decayed
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(parameters)
    learned = make_model(kind, "learned").no_weight_decay()
    assert "encoder.pos_embed" in learned
    assert ("decoder.pos_embed" in learned) == (kind == "visible")


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_gives_equal_gradients(kind):
    plain = make_model(kind, "rope-vit-mixed", proj_drop_rate=0.2).train()
    saving = copy.deepcopy(plain)
    starts = []
    saving.set_grad_checkpointing()
    for part in (saving.encoder, saving.decoder):
        if part is not None:
            part.blocks[0].register_forward_pre_hook(lambda *args: starts.append(1))
    images, masks = example()
    gradients = []
    for model in (plain, saving):
        torch.manual_seed(5)
        masked_loss(model(images, masks), images, masks, (4, 4), "pixels").backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert len(starts) == (2 if kind == "all" else 4), "blocks are computed again"
    saving.set_grad_checkpointing(False)
    assert not saving.encoder.grad_checkpointing


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_autocast_computes_low_and_trains_in_float32(kind):
    model = make_model(kind, "rope-vit-mixed").train()
    images, masks = example()
    exact = model(images, masks)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(images, masks)
    assert low.dtype == torch.bfloat16
    assert (low - exact).norm() / exact.norm() < 0.03
    masked_loss(low, images, masks, (4, 4), "pixels").backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_cast_to_bf16_keeps_its_dtype(kind):
    model = make_model(kind, "sinusoidal")
    images, masks = example()
    exact = model(images, masks)
    low = model.bfloat16()(images.bfloat16(), masks)
    assert low.dtype == torch.bfloat16
    assert (low - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_oblong_patches(kind):
    model = make_model(kind, patch_size=(8, 4))
    images, masks = example((2, 6), patch=(8, 4))
    assert model.patch_embed.patch_size == (8, 4)
    assert model.head.out_features == 8 * 4 * 3
    assert model(images, masks).shape == (2, 12, 96)
    images, masks = example((3, 5), patch=(8, 4))
    assert model(images, masks).shape == (2, 15, 96)


def test_absolute_embeddings_can_be_kept_in_both_parts():
    encoder = make_encoder("rope-vit-axial", keep_absolute=True)
    decoder = create_decoder(encoder, position="rope-vit-axial", keep_absolute=True, dim=16, depth=1, num_heads=2)
    model = MaskedModel(encoder, decoder).eval()
    nn.init.normal_(model.head.weight)
    images, masks = example((5, 8))
    before = model(images, masks)
    for part in (encoder, decoder):
        part.pos_embed.data.normal_()
        after = model(images, masks)
        assert not torch.allclose(before, after)
        before = after


# ---- extension


@pytest.mark.parametrize("kind", KINDS)
def test_extension_reaches_every_part_and_larger_grids_alone(kind):
    model = make_model(kind)
    parts = [part for part in (model.encoder, model.decoder) if part is not None]
    same, larger = example(), example((8, 12))
    before = [model(*same), model(*larger)]
    assert vision_rope.set_extension(model, "yarn", train_size=(4, 6), beta_fast=3.0) is model
    assert [part.extension for part in parts] == [("yarn", (4, 6), {"beta_fast": 3.0})] * len(parts)
    torch.testing.assert_close(model(*same), before[0], rtol=0, atol=0)
    extended = model(*larger)
    assert not torch.allclose(extended, before[1])
    for part in parts:  # each has its share in it
        part.set_extension("none")
        assert not torch.allclose(model(*larger), extended)
        extended = model(*larger)
    torch.testing.assert_close(extended, before[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_interpolated_positions_equal_a_smaller_base_grid_by_hand(kind):
    """At twice the grid, interpolation gives every part the positions of half the pitch.

    Second formulation: coordinates stretched to the trained grid by EVA-02's formula, without any extension.
    """
    model = make_model(kind)
    images, masks = example((8, 12))
    vision_rope.set_extension(model, "interpolate")
    extended = model(images, masks)
    vision_rope.set_extension(model, "none")
    for part in (model.encoder, model.decoder):
        if part is not None:
            part.position.coordinates = Coordinates(reference=GRID)
    torch.testing.assert_close(model(images, masks), extended)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extension_that_means_nothing_changes_nothing(kind):
    for position, method in (("none", "ntk"), ("learned", "interpolate"), ("dinov3", "yarn"), ("sam2", "pitch")):
        model = make_model(kind, position)
        with pytest.raises(ValueError, match=f"{method} means nothing for"):
            vision_rope.set_extension(model, method)
        assert model.encoder.extension is None
        vision_rope.set_extension(model, "none")


def test_an_extension_that_the_decoder_refuses_leaves_the_encoder_as_it_was():
    """A decoder with heads of four channels has one pair an axis, which ntk can do nothing with."""
    encoder = make_encoder()
    decoder = create_decoder(encoder, position="rope-vit-axial", dim=8, depth=1, num_heads=2)
    model = MaskedModel(encoder, decoder)
    vision_rope.set_extension(model, "interpolate")
    before = encoder.extension
    with pytest.raises(ValueError, match="at least two pairs"):
        vision_rope.set_extension(model, "ntk")
    assert encoder.extension == decoder.extension == before


# ---- refusals


def test_masks_that_do_not_fit_are_refused():
    model = make_model("visible")
    images, masks = example()
    for wrong in (masks.flatten(1), masks.transpose(1, 2), masks[:1], masks[:, :3]):
        with pytest.raises(ValueError, match=r"masks have shape .*but the images have patches \(2, 4, 6\)"):
            model(images, wrong)
    for dtype in (torch.uint8, torch.float32, torch.int64):
        with pytest.raises(ValueError, match=f"masks have dtype {dtype}, but must be bool"):
            model(images, masks.to(dtype))
    with pytest.raises(ValueError, match="images have width 25, which patches of 4 pixels do not divide"):
        model(torch.randn(2, 3, 16, 25), masks)
    uneven = masks.clone()
    uneven[1].fill_(True)
    with pytest.raises(ValueError, match="masks hide between 10 and 24 patches of an image"):
        model(images, uneven)
    # All tokens are encoded in any case, so that any masks will do.
    assert make_model("all")(images, uneven).shape == (2, 24, 48)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_base_patch16_siglip_224", {}, r"pools by attention .*global_pool='avg'"),
        ("vit_small_patch16_224", {"patch_drop_rate": 0.3}, r"drops patches by itself .*patch_drop_rate=0"),
        ("vit_small_r26_s32_224", {"img_size": 64, "patch_size": 1}, r"come from a HybridEmbed, which looks beyond"),
    ],
)
def test_encoders_that_do_not_suit_are_refused(name, options, message):
    encoder = make_encoder("none", name=name, **options)
    with pytest.raises(ValueError, match=message):
        MaskedModel(encoder)


def test_patches_that_are_left_out_and_dropped_by_the_model_itself_exclude_each_other():
    """Failure class 19."""
    encoder = make_encoder(patch_drop_rate=0.3)
    with pytest.raises(ValueError, match=r"patch_drop_rate.*which of them are kept was given"):
        encoder.forward_patches(torch.randn(1, *GRID, 32), kept=torch.arange(3)[None])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dim": 16, "depth": 0, "num_heads": 2}, "dim 16, depth 0 and 2 heads"),
        ({"dim": 16, "depth": 1, "num_heads": 3}, "must divide dim"),
        ({"dim": 16, "depth": 1, "num_heads": 0}, "all must be positive"),
        ({"dim": 10, "depth": 1, "num_heads": 1}, "the decoder of dim 10 and 1 heads cannot be built: head_dim is 10"),
    ],
)
def test_decoders_that_cannot_be_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        create_decoder(make_encoder(), position="rope-vit-axial", **shape)


# ---- as a configuration describes it


def configuration(**changes: Any) -> TrainConfig:
    options = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, **changes.pop("options", {})}
    model = {key: changes.pop(key) for key in ("position_options", "keep_absolute") if key in changes}
    return TrainConfig(
        task="masked",
        model=ModelConfig(changes.pop("name", "vit_small_patch16_224"), "rope-vit-axial", options=options, **model),
        data=DataConfig(size=(16, 24)),
        masked=MaskedConfig(**changes),
    )


def shape_of(decoder: Any) -> tuple[int, int, int]:
    return decoder.embed_dim, len(decoder.blocks), decoder.blocks[0].attn.num_heads


def test_a_decoder_is_half_as_wide_with_heads_of_the_encoders_width_unless_told_otherwise():
    assert build_model(configuration(), 7).decoder is None
    model = build_model(configuration(encoder="visible"), 7)
    assert shape_of(model.decoder) == (16, 2, 1)
    assert model.decoder.train_grid == model.encoder.train_grid == GRID
    chosen = configuration(encoder="visible", decoder_dim=24, decoder_depth=1, decoder_heads=3)
    assert shape_of(build_model(chosen, 7).decoder) == (24, 1, 3)
    small = configuration(encoder="visible", decoder_dim=8)
    assert shape_of(build_model(small, 7).decoder) == (8, 2, 1), "one head at least"
    parallel = configuration(encoder="visible", name="vit_small_patch16_18x2_224")
    assert shape_of(build_model(parallel, 7).decoder) == (16, 2, 1)


def test_a_decoder_has_the_encoders_kind_of_positions():
    chosen = configuration(encoder="visible", position_options={"base": 7.0}, keep_absolute=True)
    for part in (build_model(chosen, 7).encoder, build_model(chosen, 7).decoder):
        assert part.position_name == "rope-vit-axial"
        assert {ladder.base for ladder in part.position.ladders} == {7.0}
        assert part.pos_embed is not None
    assert build_model(configuration(encoder="visible"), 7).decoder.pos_embed is None


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models_give_the_same_at_every_size(kind):
    model = make_model(kind, depth=1).train()
    fast = copy.deepcopy(model)
    fast.compile(backend="eager")
    for grid in (GRID, (5, 3)):
        images, masks = example(grid)
        gradients = []
        for each in (model, fast):
            each.zero_grad()
            masked_loss(each(images, masks), images, masks, (4, 4), "pixels").backward()
            gradients.append([parameter.grad for parameter in each.parameters()])
        torch.testing.assert_close(fast(images, masks), model(images, masks), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
