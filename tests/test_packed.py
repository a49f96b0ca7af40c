"""Images of different sizes as one sequence: the same as one image after the other."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers import PatchDropoutWithIndices
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope import attention
from vision_rope.encodings import ENCODINGS
from vision_rope.rope_presets import PRESETS

DEPTH = 2
TINY: dict[str, Any] = {"depth": DEPTH, "embed_dim": 48, "num_heads": 2, "num_classes": 5}
# Prefix tokens of all kinds, pooling of all kinds, and the attention layers of both families.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "average pooling": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False, "qk_norm": True}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", {}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"init_values": 0.5}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "eva02": ("eva02_tiny_patch14_224", {}),
    "dinov3": ("vit_small_patch16_dinov3", {"init_values": 0.5}),
    "shared keys": ("vit_small_patch16_dinov3", {"attn_type": "rope", "num_kv_heads": 1, "qkv_fused": False}),
}
POSITIONS = [name for name in PRESETS if vr.preset(name, head_dim=24).axes == 2] + list(ENCODINGS)
# Tables for all layers, tables a layer and head, biases of scores with values, an absolute embedding, nothing.
KINDS = ("dinov3", "rope-vit-mixed", "shaw", "learned", "none")
# Of the same number of tokens, equal ones apart from each other and side by side, and a row.
GRIDS = [(2, 6), (4, 3), (4, 3), (1, 5), (4, 3), (6, 6)]


def build(kind: str = "vit", position: str = "rope-vit-axial", **options: Any) -> Any:
    """A model whose layers all matter: timm begins with zero biases and small tokens."""
    name, own = MODELS[kind]
    conversion = {
        key: options.pop(key)
        for key in ("position_options", "attention", "attention_options", "keep_absolute")
        if key in options
    }
    size = 4 * patch_of(name)
    model = vr.create_model(name, position, **conversion, **{**TINY, "img_size": size, **own, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("learned_frequencies"):
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def patch_of(name: str) -> int:
    return 14 if "patch14" in name else 16


def images_for(model: Any, grids: list[tuple[int, int]] = GRIDS) -> list[Tensor]:
    height, width = model.patch_embed.patch_size
    return [torch.randn(3, rows * height, columns * width) for rows, columns in grids]


def one_by_one(model: Any, images: list[Tensor]) -> Tensor:
    return torch.cat([model(image[None]) for image in images])


@pytest.mark.parametrize(
    ("kind", "position"),
    [("vit", position) for position in POSITIONS]
    + [(kind, position) for kind in list(MODELS)[1:-1] for position in KINDS[:3]]
    # Frequencies a head need keys a head.
    + [("shared keys", position) for position in ("dinov3", "alibi")],
)
@torch.no_grad()
def test_packed_images_are_each_image_alone(kind: str, position: str) -> None:
    model = build(kind, position)
    images = images_for(model)
    expected = one_by_one(model, images)
    assert expected.std(dim=0).min() > 0.05
    assert_close(vr.forward_packed(model, images), expected, atol=1e-5, rtol=1e-5)
    backwards = vr.forward_packed(model, images[::-1])
    assert_close(backwards, expected.flip(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "dinov3"])
@pytest.mark.parametrize("options", [{"feature_map": "elu"}, {"feature_map": "performer", "num_features": 32}])
@torch.no_grad()
def test_linear_attention_packs(kind: str, options: dict[str, Any]) -> None:
    model = build(kind, attention="linear", attention_options=options)
    images = images_for(model)
    assert_close(vr.forward_packed(model, images), one_by_one(model, images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["rope-vit-axial", "deberta"])
@torch.no_grad()
def test_explicit_attention_packs(position: str) -> None:
    model = build("vit", position, keep_absolute=True)
    for block in model.blocks:
        block.attn.fused_attn = False
    images = images_for(model)
    assert_close(vr.forward_packed(model, images), one_by_one(model, images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("position", KINDS)
def test_gradients_of_training(position: str, checkpointing: bool) -> None:
    """Failure class 13: several resolutions in one backward pass."""
    model = build("registers", position, keep_absolute=position not in ("learned",)).train()
    images = [image.requires_grad_() for image in images_for(model)]
    named = [*model.named_parameters(), *((f"images[{index}]", image) for index, image in enumerate(images))]

    def gradients(outputs: Tensor) -> list[Tensor]:
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3))
        return list(torch.autograd.grad((outputs * weights).sum(), [value for _, value in named]))

    expected = gradients(one_by_one(model, images))
    model.set_grad_checkpointing(checkpointing)
    passes: list[int] = []
    model.blocks[0].mlp.fc1.register_forward_pre_hook(lambda *_: passes.append(1))
    packed = gradients(vr.forward_packed(model, images))
    assert len(passes) == 1 + checkpointing
    for (name, _), gradient, wanted in zip(named, packed, expected, strict=True):
        scale = max(wanted.abs().max().item(), 1e-3)
        assert_close(gradient / scale, wanted / scale, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_nothing_of_an_image_reaches_another() -> None:
    model = build("registers")
    images = [image.requires_grad_() for image in images_for(model)]
    outputs = vr.forward_packed(model, images)
    for index in range(len(images)):
        found = torch.autograd.grad(outputs[index].sum(), images, retain_graph=True)
        assert [bool(gradient.any()) for gradient in found] == [other == index for other in range(len(images))]
    changed = list(images)
    changed[2] = torch.randn_like(images[2])
    moved = (vr.forward_packed(model, changed) != outputs).any(dim=1)
    assert moved.tolist() == [index == 2 for index in range(len(images))]


@pytest.mark.parametrize("position", ["rope-vit-axial", "none"])
def test_neighbours_of_equal_size_share_a_call(monkeypatch: pytest.MonkeyPatch, position: str) -> None:
    model = build(position=position)
    calls: list[tuple[int, ...]] = []
    linears: list[str] = []
    real = attention.F.scaled_dot_product_attention

    def count(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(tuple(q.shape))
        return real(q, *args, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", count)
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs, name=name: linears.append(name))
    vr.forward_packed(model, images_for(model))
    by_run = [(1, 12), (2, 12), (1, 5), (1, 12), (1, 36)]
    assert calls == [(count, 2, tokens + 1, 24) for count, tokens in by_run] * DEPTH
    assert len(linears) == len(set(linears)) == 4 * DEPTH


def test_neighbours_of_equal_length_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    real = attention.F.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda q, *args, **options: (shapes.append(tuple(q.shape)), real(q, *args, **options))[1],
    )
    q, k, v = torch.randn(3, 2, 3, 20, 8)
    packed = vr.attend_packed(q, k, v, [4, 4, 4, 2, 2, 4])
    assert shapes == [(6, 3, 4, 8), (4, 3, 2, 8), (2, 3, 4, 8)]
    sequence = torch.tensor([0] * 4 + [1] * 4 + [2] * 4 + [3] * 2 + [4] * 2 + [5] * 4)
    masked = vr.attend(q, k, v, mask=sequence[:, None] == sequence)
    assert_close(packed, masked, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("position", "method"), [("rope-vit-axial", "yarn"), ("dinov3", "pitch")])
@torch.no_grad()
def test_each_image_is_extended_for_its_own_grid(position: str, method: str) -> None:
    """YaRN changes the temperature, by another factor for another size."""
    model = build(position=position)
    images = images_for(model, [(4, 4), (8, 8), (8, 8), (6, 4), (16, 2)])
    plain = vr.forward_packed(model, images)
    vr.set_extension(model, method)
    extended = vr.forward_packed(model, images)
    assert_close(extended, one_by_one(model, images), atol=1e-5, rtol=1e-5)
    moved = (extended - plain).abs().amax(dim=1) > 1e-4
    assert moved.tolist() == [False, True, True, True, True]


class KeepLargest(PatchDropoutWithIndices):
    """Drops patches by what is in them, so that it keeps the same of an image alone and in a batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        kept = patches.norm(dim=-1).argsort(dim=1)[:, -5:]
        return torch.cat((prefix, patches.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))), dim=1), kept


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed", "shaw", "dinov3"])
def test_positions_follow_the_kept_patches(position: str) -> None:
    """Failure class 19. The images of a run keep different patches."""
    model = build("registers", position, patch_drop_rate=0.5).train()
    model.patch_drop.__class__ = KeepLargest
    images = images_for(model)
    expected = one_by_one(model, images)
    assert_close(vr.forward_packed(model, images), expected, atol=1e-5, rtol=1e-5)
    model.patch_drop = nn.Identity()
    assert not torch.allclose(vr.forward_packed(model, images), expected, atol=1e-2)


def test_random_numbers_of_training_are_those_of_single_images() -> None:
    model = build("registers", "dinov3", patch_drop_rate=0.5, position_options={"rescale": 2.0}).train()
    images = images_for(model, [(4, 4), (2, 6), (5, 3)])

    def seeded(forward: Any) -> Tensor:
        torch.manual_seed(5)
        return forward(model, images)

    expected = seeded(one_by_one)
    assert_close(seeded(vr.forward_packed), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(vr.forward_packed(model, images), expected, atol=1e-2)


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed", "dinov3"])
@torch.no_grad()
def test_low_precision(position: str) -> None:
    """Failure class 4: the error is that of the weights, not of the angles."""
    model = build(position=position)
    images = images_for(model)
    expected = vr.forward_packed(model, images)
    low = vr.forward_packed(model.bfloat16(), [image.bfloat16() for image in images])
    assert low.dtype == torch.bfloat16
    assert (low.float() - expected).abs().max() < 0.03 * expected.abs().max()


@torch.no_grad()
def test_one_image_and_a_batch() -> None:
    model = build()
    batch = torch.randn(3, 3, 64, 32)
    assert_close(vr.forward_packed(model, batch), model(batch), atol=1e-6, rtol=1e-5)
    assert_close(vr.forward_packed(model, (batch[0],)), model(batch[:1]), atol=1e-6, rtol=1e-5)
    model.reset_classifier(0)
    assert vr.forward_packed(model, list(batch)).shape == (3, 48)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "images is empty"),
        ([torch.zeros(3, 32, 32), torch.zeros(1, 3, 32, 32)], r"images\[1\] has shape \(1, 3, 32, 32\)"),
        ([torch.zeros(3, 32, 32), "cat.png"], r"images\[1\] is a str"),
        ([torch.zeros(3, 32, 32)] * 2 + [torch.zeros(3, 32, 79)], r"images\[2\] .*width 79.* 64 or 80"),
        ([torch.zeros(3, 10, 16)], r"images\[0\] .*height 10.* 16"),
    ],
)
def test_images_that_do_not_fit_are_refused(images: list[Any], words: str) -> None:
    """Failure class 17."""
    with pytest.raises(ValueError, match=words):
        vr.forward_packed(build(), images)


def test_models_that_cannot_are_refused() -> None:
    images = [torch.zeros(3, 64, 64)]
    with pytest.raises(ValueError, match=r"a VisionTransformer without a position encoding.*add_position first"):
        vr.forward_packed(timm.create_model("vit_tiny_patch16_224", **TINY, img_size=64), images)
    naflex = vr.create_model("naflexvit_base_patch16_gap", "rope-vit-axial", **TINY)
    with pytest.raises(ValueError, match=r"PositionedNaFlexVit; packing works for timm's VisionTransformer and Eva"):
        vr.forward_packed(naflex, images)
    with pytest.raises(ValueError, match="global_pool=''"):
        vr.forward_packed(build(global_pool=""), images)


def test_training_that_would_mix_images_is_refused() -> None:
    images = [torch.zeros(3, 64, 64)]
    model = build(drop_path_rate=0.1)
    assert vr.forward_packed(model, images).shape == (1, 5)
    with pytest.raises(ValueError, match="drop_path_rate=0"):
        vr.forward_packed(model.train(), images)
    distilled = build("deit distilled")
    distilled.set_distilled_training(True)
    assert vr.forward_packed(distilled, images).shape == (1, 5)
    with pytest.raises(ValueError, match="set_distilled_training"):
        vr.forward_packed(distilled.train(), images)


def test_tokens_are_counted_and_not_guessed() -> None:
    """Failure class 2: 2 x 6 and 4 x 3 patches are as many and sit elsewhere."""
    model = build("average pooling", "rope-vit-axial")
    patches = torch.randn(12, 3, 16, 16)
    laid = [
        patches.unflatten(0, grid).permute(2, 0, 3, 1, 4).reshape(3, grid[0] * 16, grid[1] * 16)
        for grid in ((2, 6), (4, 3))
    ]
    one, other = vr.forward_packed(model, laid)
    assert not torch.allclose(one, other, atol=1e-3)
    one, other = vr.forward_packed(build("average pooling", "none"), laid)
    assert_close(one, other, atol=1e-5, rtol=1e-5)
