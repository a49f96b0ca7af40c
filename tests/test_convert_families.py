"""What every family of timm models promises once it is converted; a row for each class in FAMILIES.

Depth in one family: tests/test_convert.py (VisionTransformer and Eva), tests/test_convert_set_input_size.py and
tests/test_convert_naflex.py.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.convert import FAMILIES, SET_INPUT_SIZE
from vision_rope.frequencies import Ladder

HEADS, HEAD_DIM, DEPTH, PATCH = 2, 16, 2, 16
TINY: dict[str, Any] = {"depth": DEPTH, "embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS, "num_classes": 5}
GRID = (4, 4)


@dataclass(frozen=True)
class Row:
    """A model of a class: its name in timm, what it is built with, and what the class has no option for."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    average: dict[str, Any] = field(default_factory=lambda: {"global_pool": "avg"})
    qk_norm: bool = True
    patch_drop: bool = True
    absolute: str | None = "pos_embed"


ROWS: dict[type[nn.Module], Row] = {
    VisionTransformer: Row("vit_tiny_patch16_224"),
    VisionTransformerDistilled: Row("deit_tiny_distilled_patch16_224", average={}),
    Eva: Row("vit_small_patch16_rope_ape_224", {"use_rot_pos_emb": False}),
    NaFlexVit: Row(
        "naflexvit_base_patch16_gap", {"pos_embed_grid_size": GRID, "reg_tokens": 1}, absolute="embeds.pos_embed"
    ),
    Beit: Row("beit_base_patch16_224", {"use_abs_pos_emb": True}, qk_norm=False, patch_drop=False),
    VisionTransformerRelPos: Row(
        "vit_relpos_small_patch16_224", {"class_token": True}, patch_drop=False, absolute=None
    ),
    VisionTransformerSAM: Row(
        "samvit_base_patch16", {"neck_chans": 0, "window_size": 3, "global_attn_indexes": (1,)}, patch_drop=False
    ),
}
KINDS = [pytest.param(kind, id=kind.__name__) for kind in FAMILIES]
ANY = [pytest.param(kind, id=kind.__name__) for kind, family in FAMILIES.items() if family.sizes != SET_INPUT_SIZE]


def test_every_family_is_tested() -> None:
    assert set(ROWS) == set(FAMILIES)


def images(rows: int = GRID[0], columns: int = GRID[1], batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    return torch.randn(batch, 3, rows * PATCH, columns * PATCH, generator=generator)


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise + (1.0 if "norm" in name and parameter.ndim == 1 else 0.0))
    return model.eval()


def build_timm(kind: type[nn.Module], **options: Any) -> Any:
    row = ROWS[kind]
    size = options.pop("grid", GRID)
    model = timm.create_model(
        row.name, **{**TINY, "img_size": (size[0] * PATCH, size[1] * PATCH), **row.options, **options}
    )
    assert type(model) is kind
    return randomise(model)


def build(kind: type[nn.Module], position: Any = "rope-vit-axial", **options: Any) -> Any:
    keep = options.pop("keep_absolute", False)
    return vr.add_position(build_timm(kind, **options), position, keep_absolute=keep).eval()


def resize(model: Any, grid: tuple[int, int]) -> Tensor:
    """Pictures of another grid, and the model ready for them."""
    if FAMILIES[timm_class(model)].sizes == SET_INPUT_SIZE:
        model.set_input_size(img_size=(grid[0] * PATCH, grid[1] * PATCH))
    return images(*grid)


def timm_class(model: Any) -> type[nn.Module]:
    return next(kind for kind in FAMILIES if isinstance(model, kind) and kind.__name__ in type(model).__name__)


def zero_rope() -> vr.Rope:
    slots = tuple(range(HEAD_DIM // 4)), tuple(range(HEAD_DIM // 4, HEAD_DIM // 2))
    ladders = [Ladder(base=100.0, pairs=HEAD_DIM // 4, slots=own, scale=0.0) for own in slots]
    return vr.Rope(head_dim=HEAD_DIM, axes=2, ladders=ladders, depth=DEPTH)


def step(model: Any, *pictures: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    sum(model(x).square().sum() for x in pictures).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * (1 + gradient.abs().max().item()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_zero_rotation_beside_the_absolute_embedding_changes_no_bit(kind: type[nn.Module], fused: bool) -> None:
    set_fused_attn(fused)
    try:
        theirs = build_timm(kind)
        ours = vr.add_position(copy.deepcopy(theirs), zero_rope(), keep_absolute=ROWS[kind].absolute is not None)
    finally:
        set_fused_attn(True)
    assert isinstance(ours, kind)
    x = images()
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.forward_features(x), theirs.forward_features(x))
    features, maps = ours.forward_intermediates(x)
    wanted, their_maps = theirs.forward_intermediates(x)
    assert torch.equal(features, wanted)
    assert len(maps) == len(their_maps) == DEPTH
    assert all(torch.equal(a, b) for a, b in zip(maps, their_maps, strict=True))
    # Weights of one load into the other.
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_stay_but_the_absolute_embedding(kind: type[nn.Module]) -> None:
    theirs = build_timm(kind)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    after = vr.add_position(theirs, "rope-vit-mixed").state_dict()
    assert set(before) - set(after) == {ROWS[kind].absolute} - {None}
    assert set(after) - set(before) == {"position.learned_frequencies"}
    assert all(torch.equal(after[name], value) for name, value in before.items() if name in after)


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed", "none"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_order_of_patches_matters_where_there_are_positions(kind: type[nn.Module], position: str) -> None:
    """Patches of a rectangular picture change places; what windows see must stay, so there are none here."""
    options = {"window_size": 0} if kind is VisionTransformerSAM else {}
    model = build(kind, position, grid=(3, 5), **ROWS[kind].average, **options)
    x = images(3, 5)
    patches = x.unflatten(3, (5, PATCH)).unflatten(2, (3, PATCH)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved = patches[:, torch.randperm(15, generator=torch.Generator().manual_seed(1))]
    y = moved.unflatten(1, (3, 5)).permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4)
    assert x.shape == y.shape
    same = torch.allclose(model(x), model(y), atol=1e-4)
    assert same == (position == "none")


# timm's resizing of tables warns.
@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_other_sizes(kind: type[nn.Module]) -> None:
    """Failure classes 2 and 18: the same number of tokens on another grid is another picture."""
    model = build(kind, grid=(2, 6))
    outputs = []
    for grid in ((2, 6), (3, 4), (6, 2), (5, 7)):
        x = resize(model, grid)
        outputs.append(model(x))
        assert outputs[-1].shape == (2, 5)
        assert outputs[-1].isfinite().all()
        fresh = build(kind, grid=grid, keep_absolute=False)
        if ROWS[kind].absolute is not None and kind is not Beit and kind is not VisionTransformerSAM:
            fresh.load_state_dict(model.state_dict())
            assert_close(fresh(x), outputs[-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_the_patch_does_not_divide(kind: type[nn.Module]) -> None:
    """Failure class 17."""
    with pytest.raises(ValueError, match=r"79|80"):
        build(kind)(torch.randn(1, 3, 79, 64))


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_no_gradient(kind: type[nn.Module], position: str) -> None:
    model = build(kind, position)
    wanted = step(model, images())
    model.set_grad_checkpointing()
    assert_same_gradients(step(model, images()), wanted)
    assert wanted["blocks.0.attn.proj.weight"].abs().sum() > 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ANY)
def test_two_resolutions_in_one_backward(kind: type[nn.Module], checkpointing: bool) -> None:
    """Failure class 13."""
    model = build(kind, "rope-vit-mixed")
    pictures = images(4, 4), images(3, 6)
    apart = [step(model, x) for x in pictures]
    model.set_grad_checkpointing(checkpointing)
    assert_same_gradients(step(model, *pictures), {name: apart[0][name] + apart[1][name] for name in apart[0]})


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_reset_of_the_classifier(kind: type[nn.Module]) -> None:
    model = build(kind)
    model.reset_classifier(3)
    assert model(images()).shape == (2, 3)
    model.reset_classifier(0)
    assert model(images()).shape == (2, model.num_features)


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_copies(kind: type[nn.Module], position: str) -> None:
    model = build(kind, position)
    x = images()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bfloat16(kind: type[nn.Module], position: str) -> None:
    """Failure classes 4 and 5: angles stay what they were, and the output has the model's dtype."""
    model = build(kind, position)
    wanted, frequencies = model(images()), model.position.frequencies.clone()
    model.bfloat16()
    out = model(images().bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(model.position.frequencies, frequencies)
    assert_close(out.float(), wanted, rtol=0.1, atol=0.1 * wanted.abs().max().item())


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_meta_device(kind: type[nn.Module], position: str) -> None:
    """Failure class 6."""
    wanted = build(kind, position)
    with torch.device("meta"):
        row = ROWS[kind]
        size = (GRID[0] * PATCH, GRID[1] * PATCH)
        empty = timm.create_model(row.name, **{**TINY, "img_size": size, **row.options})
        model = vr.add_position(empty, position).eval()
    model.to_empty(device="cpu")
    for module in model.modules():
        # timm's own way to fill what is no weight: indices of relative positions, zero biases of keys.
        getattr(module, "init_non_persistent_buffers", lambda: None)()
    model.load_state_dict(wanted.state_dict())
    assert torch.equal(model(images()), wanted(images()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ROWS[kind.values[0]].patch_drop])
def test_positions_follow_the_kept_patches(kind: type[nn.Module]) -> None:
    """Failure class 19: dropping patches is the same as never having had them, at their own places."""
    model = build(kind, patch_drop_rate=0.5).train()
    kept: list[Tensor] = []
    model.patch_drop.register_forward_hook(lambda module, inputs, output: kept.append(output[1]))
    x = images()
    dropped = model.forward_features(x)
    assert kept[0].shape == (2, 8)
    # Attention to a patch that was dropped is masked away instead.
    model.eval()
    prefix = model.num_prefix_tokens
    seen = torch.zeros(2, GRID[0] * GRID[1], dtype=torch.bool).scatter(1, kept[0], True)
    keys = torch.cat((seen.new_ones(2, prefix), seen), dim=1)
    masked = model.forward_features(x, attn_mask=keys[:, None, None, :])
    masked = masked["patches"] if isinstance(masked, dict) else masked
    places = torch.cat((torch.arange(prefix).expand(2, -1), kept[0] + prefix), dim=1)
    assert_close(dropped, masked.gather(1, places[..., None].expand(-1, -1, masked.shape[-1])), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ROWS[kind.values[0]].qk_norm])
@torch.no_grad()
def test_norms_of_queries_and_keys_come_before_the_rotation(kind: type[nn.Module]) -> None:
    more = {"attn_type": "rope"} if kind is Eva else {}
    theirs = build_timm(kind, qk_norm=True, **more)
    keep = ROWS[kind].absolute is not None
    x = images()
    assert torch.equal(vr.add_position(copy.deepcopy(theirs), zero_rope(), keep_absolute=keep)(x), theirs(x))
    # Norms of each channel do not commute with a rotation.
    turned = vr.add_position(copy.deepcopy(theirs), "rope-vit-axial", keep_absolute=keep)
    norms = turned.blocks[0].attn.q_norm
    seen: list[Tensor] = []
    norms.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    turned(x)
    plain: list[Tensor] = []
    theirs.blocks[0].attn.q_norm.register_forward_hook(lambda module, inputs, output: plain.append(inputs[0]))
    theirs(x)
    assert_close(seen[0].flatten(), plain[0].flatten(), rtol=0, atol=1e-6)


# The others take half a minute, or are in tests/test_convert.py.
COMPILED = (Eva, NaFlexVit, VisionTransformerRelPos)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.__name__, marks=() if kind in COMPILED else pytest.mark.slow) for kind in FAMILIES],
)
@torch.no_grad()
def test_compile(kind: type[nn.Module]) -> None:
    """Failure class 7."""
    model = build(kind, "rope-vit-mixed")
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="eager")
    for grid in (GRID,) if FAMILIES[kind].sizes == SET_INPUT_SIZE else (GRID, (3, 5)):
        x = resize(model, grid)
        assert_close(fast(x), model(x), rtol=0, atol=2e-5)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_export(kind: type[nn.Module]) -> None:
    """Failure class 7: dynamic height and width where images may have any size."""
    model = build(kind, "rope-vit-mixed")
    rows, columns = torch.export.Dim("rows", min=2, max=32), torch.export.Dim("columns", min=2, max=32)
    dynamic = FAMILIES[kind].sizes != SET_INPUT_SIZE
    shapes = ({2: PATCH * rows, 3: PATCH * columns},) if dynamic else None
    grid = (4, 6) if dynamic else GRID
    program = torch.export.export(model, (images(*grid),), dynamic_shapes=shapes)
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    for size in ((4, 6), (3, 11), (9, 2)) if dynamic else (GRID,):
        assert_close(program.module()(images(*size)), model(images(*size)), rtol=0, atol=2e-5)


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_ddp(kind: type[nn.Module], tmp_path: Any) -> None:
    """Failure class 12: every parameter gets its gradient, learned frequencies too."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build(kind, "rope-vit-mixed")  # in evaluation: timm's relative biases have dropout
        wanted = step(model, images())
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):  # a parameter without a gradient is noticed in the second step
            parallel.zero_grad()
            parallel(images()).square().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same_gradients(found, wanted)
        assert found["position.learned_frequencies"].abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()
