"""Models with linear attention: every feature map with every encoding, what stays of timm, state, refusals, runs."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.config import TrainConfig, load_config, to_yaml
from vision_rope.convert.linear import LinearAttention, RandomProjection
from vision_rope.encodings import ENCODINGS
from vision_rope.linear_attention import FEATURE_MAPS
from vision_rope.relative import RelativeEncoding
from vision_rope.rope_presets import PRESETS
from vision_rope.rules import check_config

HEAD_DIM, HEADS, DEPTH = 24, 2, 2
TINY: dict[str, Any] = {"depth": DEPTH, "embed_dim": HEAD_DIM * HEADS, "num_heads": HEADS, "num_classes": 5}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True, "scale_attn_norm": True}),
    "norm after": ("vit_tiny_patch16_224", {"block_fn": ResPostBlock, "init_values": 0.5}),
    "parallel": ("vit_small_patch16_18x2_224", {"block_fn": functools.partial(ParallelThingsBlock, num_parallel=2)}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", {}),
}
RELATIVE = [
    name for name, row in ENCODINGS.items() if isinstance(row.build, type) and issubclass(row.build, RelativeEncoding)
]
ROPES = [name for name in PRESETS if vr.preset(name, head_dim=HEAD_DIM).axes == 2]
POSITIONS = [*ROPES, *(name for name in ENCODINGS if name not in RELATIVE)]


def create(
    position: str = "rope-vit-axial",
    feature_map: str = "elu",
    kind: str = "vit",
    attention_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    name, more = KINDS[kind]
    torch.manual_seed(3)
    return vr.create_model(
        name,
        position=position,
        attention="linear",
        attention_options={"feature_map": feature_map} | (attention_options or {}),
        **{**TINY, "img_size": 64, **more, **options},
    )


def images(rows: int = 4, columns: int = 4) -> Tensor:
    return torch.randn(2, 3, 16 * rows, 16 * columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_encoding_on_a_rectangular_grid(position: str, feature_map: str) -> None:
    """Shapes, a gradient for every parameter, and that only `none` is blind to the order of patches."""
    model = create(position, feature_map)
    for parameter in model.parameters():  # timm begins with some zeros, which would stop gradients
        nn.init.normal_(parameter, std=0.2)
    assert isinstance(model.blocks[0].attn, LinearAttention)
    assert model.attention_name == "linear"
    picture = images(3, 6)
    out = model(picture)
    assert out.shape == (2, 5)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    # Patches in another order: rows swapped.
    swapped = torch.cat((picture[..., 16:32, :], picture[..., :16, :], picture[..., 32:, :]), dim=-2)
    if position == "none":
        assert_close(model(swapped), out, atol=1e-4, rtol=1e-4)
    else:
        assert not torch.allclose(model(swapped), out, atol=1e-4)


def layer_by_matrix(layer: Any, x: Tensor, rotation: vr.Rotation | None, feature_map: str) -> Tensor:
    """Second formulation: timm's layer with all weights, query by key, in the softmax's place."""
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q), layer.k_norm(k)
    if feature_map == "elu":
        q, k = (nn.functional.elu(y) + 1 + 1e-6 for y in (q, k))
    else:
        matrix = layer.projection.matrix
        q, k = (y / HEAD_DIM**0.25 for y in (q, k))
        q, k = ((y @ matrix.T - y.square().sum(-1, keepdim=True) / 2).exp() for y in (q, k))
        q, k = (y + 1e-6 * y.amax(-1, keepdim=True) for y in (q, k))
    weights = q @ k.mT if rotation is None else vr.rotate(q, rotation) @ vr.rotate(k, rotation).mT
    attended = (weights / (q @ k.mT).sum(-1, keepdim=True)) @ v
    out = layer.norm(attended.transpose(1, 2).reshape(x.shape))
    return layer.proj(out if layer.gate is None else out * layer.gate(x).sigmoid())


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "gated"])
def test_a_layer_keeps_timms_norms_and_gate(kind: str, turned: bool, feature_map: str) -> None:
    model = create(kind="vit" if kind == "gated" else kind, feature_map=feature_map)
    block = model.blocks[0]
    layer = block.attns[0].attn if hasattr(block, "attns") else block.attn
    if kind == "gated":  # timm's models have no option that reaches it
        layer.gate = nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    rope = model.position
    rotation = rope(rope.positions(2, 3)) if turned else None
    x = torch.randn(2, 6, HEADS * HEAD_DIM)
    expected = layer_by_matrix(layer, x, rotation, feature_map)
    assert_close(layer(x, rope=rotation), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_is_the_softmax_models_and_the_projection(kind: str) -> None:
    name, more = KINDS[kind]
    softmax = vr.create_model(name, position="rope-vit-mixed", **{**TINY, "img_size": 64, **more})
    linear, performer = (create("rope-vit-mixed", feature_map, kind) for feature_map in ("elu", "performer"))
    assert list(linear.state_dict()) == list(softmax.state_dict())
    linear.load_state_dict(softmax.state_dict())
    assert not torch.equal(linear(images()), softmax(images()))
    added = set(performer.state_dict()) - set(softmax.state_dict())
    assert added == {
        f"{name}.projection.matrix" for name, layer in performer.named_modules() if isinstance(layer, LinearAttention)
    }
    assert not added & {name for name, _ in performer.named_parameters()}
    assert softmax.attention_name == "softmax"


@pytest.mark.parametrize("position", ["rope-vit-axial", "rope-vit-mixed", "learned"])
def test_the_number_of_features_is_an_option(position: str) -> None:
    """A rotation turns features: its embedding has as many channels as there are features."""
    model = create(position, "performer", attention_options={"num_features": 40})
    assert model.blocks[0].attn.projection.matrix.shape == (40, HEAD_DIM)
    if position in PRESETS:
        assert model.position.head_dim == 40
    assert model(images(3, 5)).isfinite().all()
    assert not torch.equal(*(block.attn.projection.matrix for block in model.blocks))
    with torch.no_grad():
        model.blocks[0].attn.projection.reset_parameters(torch.Generator().manual_seed(1))
    drawn = vr.performer_projection(HEAD_DIM, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.blocks[0].attn.projection.matrix, drawn)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_state_survives_casts_meta_and_copies(feature_map: str) -> None:
    """Law 4; failure classes 4 and 6. The projection is float32 whatever the model and the checkpoint are."""
    model = create("rope-vit-mixed", feature_map).eval()
    expected = model(images())
    with torch.device("meta"):
        empty = create("rope-vit-mixed", feature_map)
    for assign in (False, True):
        built = copy.deepcopy(empty)
        built = built if assign else built.to_empty(device="cpu")
        built.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(built.eval()(images()), expected)
    assert torch.equal(copy.deepcopy(model)(images()), expected)

    low = copy.deepcopy(model).bfloat16()
    assert low(images().bfloat16()).dtype == torch.bfloat16
    for kept, original in zip(low.modules(), model.modules(), strict=True):
        if isinstance(kept, RandomProjection):
            assert torch.equal(kept.matrix, original.matrix)
    rounded = {name: value.bfloat16() for name, value in model.state_dict().items()}
    loaded = create("rope-vit-mixed", feature_map)
    loaded.load_state_dict(rounded, assign=True)
    assert all(part.matrix.dtype == torch.float32 for part in loaded.modules() if isinstance(part, RandomProjection))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(model(images()).float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_checkpointing_changes_no_gradient(feature_map: str) -> None:
    """Failure class 13."""
    model = create("rope-vit-mixed", feature_map)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        (model(images(4, 4)).square().sum() + model(images(2, 5)).square().sum()).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.set_grad_checkpointing(True)
    assert_close(gradients(), plain, rtol=0, atol=0)


def test_causal_models_look_back_only() -> None:
    model = create("none", feature_map="performer", class_token=False, global_pool="avg").eval()
    before, picture = images(), images()
    picture[..., -16:] += 1  # the last column of patches
    changed = (model.forward_features(before, is_causal=True) - model.forward_features(picture, is_causal=True)).abs()
    assert changed[:, :3].max() == 0
    assert changed[:, 3].max() > 1e-3


def test_masks_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"attn_mask is given.*no scores to mask.*attention='softmax'"):
        create().forward_features(images(), attn_mask=torch.ones(17, 17, dtype=torch.bool))


@pytest.mark.parametrize("position", RELATIVE)
def test_encodings_of_scores_are_refused_with_the_reason(position: str) -> None:
    assert len(RELATIVE) >= 5
    with pytest.raises(ValueError, match=f"position '{position}' changes the scores.*'linear' has none"):
        create(position)


def test_extensions_without_temperature_alone() -> None:
    model = create("rope-vit-axial")
    before = model(images(6, 8))
    with pytest.raises(ValueError, match=r"yarn changes the temperature.*linear.*temperature=0"):
        vr.set_extension(model, "yarn")
    assert model.extension is None
    for method, knobs in (("ntk", {}), ("yarn", {"temperature": 0.0})):
        vr.set_extension(model, method, **knobs)
        assert not torch.allclose(model(images(6, 8)), before, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "linar"}, "softmax, linear; did you mean 'linear'"),
        ({"attention": "softmax", "attention_options": {"feature_map": "elu"}}, "feature_map, which would have no"),
        ({"attention_options": {"feature_mop": "elu"}}, "feature_map, num_features; did you mean 'feature_map'"),
        ({"attention_options": {"feature_map": "perform"}}, "did you mean 'performer'"),
        ({"attention_options": {"feature_map": 3}}, "feature_map is 3"),
        ({"attention_options": {"num_features": 8}}, "num_features 8, which would have no effect"),
        ({"attention_options": {"feature_map": "performer", "num_features": 0}}, "whole number, at least 1"),
        ({"attention_options": {"feature_map": "performer", "num_features": 8.0}}, "whole number, at least 1"),
        ({"attention_options": {"feature_map": "performer", "num_features": 9}}, "cannot turn num_features = 9"),
        ({"attn_drop_rate": 0.1}, "attn_drop_rate is 0.1 and would have no effect"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vr.create_model("vit_tiny_patch16_224", **{**TINY, "img_size": 64, "attention": "linear", **changes})


def test_a_model_is_left_as_it_was_by_a_refusal() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **TINY, img_size=64)
    before = model(images(4, 4))
    for options in ({"attention_options": {"num_features": 8}}, {"attention": "linear", "position": "alibi"}):
        with pytest.raises(ValueError, match=r"effect|scores"):
            vr.add_position(model, **{"position": "rope-vit-axial", **options})
    assert torch.equal(model(images(4, 4)), before)
    rope = vr.preset("rope-vit-axial", head_dim=HEAD_DIM, depth=DEPTH)
    with pytest.raises(ValueError, match=r"has head_dim 24 and the model needs 40.*head_dim=40"):
        vr.add_position(
            model, rope, attention="linear", attention_options={"feature_map": "performer", "num_features": 40}
        )
    converted = vr.add_position(model, rope, attention="linear")
    assert converted.attention_name == "linear"


@pytest.mark.integration
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_compiled_and_exported_models_hold_no_complex_numbers(feature_map: str) -> None:
    """Failure class 7."""
    model = create("rope-vit-mixed", feature_map).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(images(4, 4)), model(images(4, 4)), atol=1e-4, rtol=1e-4)
        rows = 16 * torch.export.Dim("rows", min=2, max=64)
        columns = 16 * torch.export.Dim("columns", min=2, max=64)
        exported = torch.export.export(model, (images(3, 5),), dynamic_shapes=({2: rows, 3: columns},))
        assert_close(exported.module()(images(6, 4)), model(images(6, 4)), atol=1e-4, rtol=1e-4)
    values = [node.meta.get("val") for node in exported.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)


def test_the_configuration_knows_the_key(tmp_path: Any) -> None:
    config = load_config(["--model.attention", "linear", "--model.attention_options", "{feature_map: performer}"])
    assert (config.model.attention, config.model.attention_options) == ("linear", {"feature_map": "performer"})
    check_config(config)
    assert "attention: linear" in to_yaml(config)
    # Another choice drops the options of the one in the file, as for positions.
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    words = ["--config", str(tmp_path / "run.yaml"), "--model.attention", "softmax"]
    assert load_config(words).model.attention_options == {}
    with pytest.raises(ValueError, match=r"attention_options.*no effect with model.attention softmax"):
        check_config(load_config(["--model.attention_options", "{feature_map: elu}"]))
    with pytest.raises(ValueError, match=r"model\.attention"):
        load_config(["--model.attention", "linea"])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dark and a light class."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 16), ("val", 6)):
        for label, name in enumerate(("dark", "light")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                noise = torch.randn(32, 32, 3, generator=generator) * 40 + 90 + 70 * label
                Image.fromarray(noise.clamp(0, 255).byte().numpy()).save(folder / split / name / f"{index}.png")
    return f"folder:{folder}"


def configure(pictures: str, output: Any, *more: str) -> TrainConfig:
    return load_config(
        [
            *("--data.source", pictures, "--data.size", "32", "--batch_size", "8", "--ema_decay", "0.5"),
            *("--model.options", "{patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}", "--optimizer.lr", "0.003"),
            *("--schedule.epochs", "3", "--schedule.warmup_epochs", "0", "--run.output", str(output)),
            *("--run.num_workers", "0", "--run.device", "cpu", "--run.progress", "false", "--run.tensorboard", "false"),
            *("--model.attention", "linear", "--run.grad_checkpointing", "true", *more),
        ]
    )


@pytest.mark.integration
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_a_run_learns_loads_and_is_evaluated(feature_map: str, pictures: str, tmp_path: Any) -> None:
    from vision_rope.evaluate import evaluate
    from vision_rope.trainer import train

    options = f"{{feature_map: {feature_map}}}"
    train(configure(pictures, tmp_path / "run", "--model.attention_options", options))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    assert losses[-1] < losses[0]

    loaded = [vr.load_run(tmp_path / "run", weights=weights).model for weights in ("best", "last", "ema")]
    assert loaded[0].blocks[0].attn.feature_map == feature_map
    x = torch.randn(2, 3, 32, 48)
    assert torch.equal(vr.load_run(tmp_path / "run").model(x), loaded[0](x))
    if FEATURE_MAPS[feature_map].needs_projection:
        # One draw for the whole run, averaged weights included.
        assert len({model.blocks[0].attn.projection.matrix.sum().item() for model in loaded}) == 1

    rows, _ = evaluate(
        tmp_path / "run", sizes="32,32x48,64", extend="none,ntk,yarn", num_workers=0, device="cpu", progress=False
    )
    assert len(rows) == 9
    refused = [row for row in rows if row["method"] == "yarn"]
    assert all("temperature" in str(row) for row in refused)
    assert all(row["top1"] is not None for row in rows if row["method"] != "yarn")


@pytest.mark.integration
def test_masked_prediction_and_starts_from_other_attention(pictures: str, tmp_path: Any) -> None:
    from vision_rope.checkpoint import build_model, save_weights
    from vision_rope.first_weights import load_start

    more = ("--task", "masked", "--masked.encoder", "visible", "--model.attention_options", "{feature_map: performer}")
    config = configure(pictures, tmp_path / "run", *more)
    model: Any = build_model(config, 0)
    assert {model.encoder.attention_name, model.decoder.attention_name} == {"linear"}
    masks = torch.arange(16).view(1, 4, 4).expand(2, 4, 4) % 2 == 0
    model(torch.randn(2, 3, 32, 32), masks).square().sum().backward()

    softmax = configure(pictures, tmp_path / "softmax", "--model.attention", "softmax")
    save_weights(tmp_path / "softmax.safetensors", build_model(softmax, 2).state_dict(), {"config": to_yaml(softmax)})
    linear = build_model(configure(pictures, tmp_path / "linear"), 2)
    with pytest.warns(UserWarning, match="was trained with softmax attention, but the model has linear attention"):
        load_start(linear, tmp_path / "softmax.safetensors")


def test_the_advice_about_temperature_is_not_circular() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2)
    model = vr.add_position(model, "sam2", attention="linear")
    with pytest.raises(ValueError, match=r"which has none; give temperature=0$"):
        vr.set_extension(model, "ntk-by-parts", temperature=0.1)
    with pytest.raises(ValueError, match=r"give temperature=0, or choose ntk-by-parts without temperature$"):
        vr.set_extension(model, "yarn")
    vr.set_extension(model, "ntk-by-parts", temperature=0)
