"""Models of another pairing: the same outputs, weights in the peers' order, refusals, and files that remember it."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope import checkpoint, first_weights, weight_metadata
from vision_rope.config import load_config, to_yaml
from vision_rope.convert.pairing import pairing_of, reorder_weights, rotary_parts
from vision_rope.linear_attention import FEATURE_MAPS
from vision_rope.masked_model import MaskedModel, create_decoder
from vision_rope.rope_presets import PRESETS
from vision_rope.rotation import PAIRINGS
from vision_rope.targets import _load_and_convert

HEAD_DIM, HEADS, DEPTH = 12, 2, 2
TINY: dict[str, Any] = {"depth": DEPTH, "embed_dim": HEAD_DIM * HEADS, "num_heads": HEADS, "num_classes": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "no bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True, "scale_attn_norm": True}),
    "norm after": ("vit_tiny_patch16_224", {"block_fn": ResPostBlock, "init_values": 0.5}),
    "parallel": ("vit_small_patch16_18x2_224", {"block_fn": functools.partial(ParallelThingsBlock, num_parallel=2)}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    **{name: {"attention": "linear", "attention_options": {"feature_map": name}} for name in FEATURE_MAPS},
    "narrow": {"attention": "linear", "attention_options": {"feature_map": "performer", "num_features": 20}},
}
ROPES = [name for name in PRESETS if vr.preset(name, head_dim=24).axes == 2]
# A ring that takes in all of them; the ways back are gone by every model.
WAYS: list[Any] = list(zip(PAIRINGS, (*PAIRINGS[1:], PAIRINGS[0]), strict=True))


def create(position: str = "rope-vit-mixed", kind: str = "vit", pairing: str = "interleaved", **options: Any) -> Any:
    """A model with large random weights, so that a wrong pair of channels shows in the output."""
    name, more = KINDS[kind]
    choice: dict[str, Any] = {"position_options": {"pairing": pairing}} if position in PRESETS else {}
    torch.manual_seed(1)
    model: Any = vr.create_model(name, position, img_size=64, **choice, **{**TINY, **more, **options})
    fill(model)
    return model.eval()


def fill(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "position" not in name:
            nn.init.normal_(parameter, std=0.3)


def images(rows: int = 3, columns: int = 4) -> Tensor:
    return torch.randn(2, 3, 16 * rows, 16 * columns, generator=torch.Generator().manual_seed(0))


def is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.detach().abs().max()))


def assert_same_outputs(a: Tensor, b: Tensor) -> None:
    assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, "softmax") for kind in KINDS),
        *((kind, name) for kind in ("vit", "qk_norm") for name in [*ATTENTIONS][1:]),
    ],
)
def test_outputs_stay_and_weights_return(kind: str, attention: str) -> None:
    """Every way there and back, on the grid whose tables are kept: stale ones would show (law 4)."""
    picture = images()
    for source, target in WAYS:
        model = create("rope-vit-mixed", kind, source, **ATTENTIONS[attention])
        before, wanted = state_of(model), model.forward_features(picture)
        parameters = dict(model.named_parameters())
        assert vr.convert_pairing(model, target) is model
        assert model.position.pairing == pairing_of(model) == target
        assert_same_outputs(model.forward_features(picture), wanted)
        assert list(model.state_dict()) == list(before)
        assert all(dict(model.named_parameters())[name] is parameters[name] for name in parameters), "for optimizers"
        # The weights of one pairing under the other compute something else, so the outputs above say something.
        model.load_state_dict(before)
        assert not is_close(model.forward_features(picture), wanted)
        vr.convert_pairing(model, source)
        model.load_state_dict(before)
        vr.convert_pairing(vr.convert_pairing(model, target), source)
        assert_close(state_of(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("position", ROPES)
def test_a_converted_model_is_the_one_built_for_that_pairing(position: str) -> None:
    model = create(position, pairing="interleaved")
    wanted = model(images())
    for pairing in ("half", "half-per-axis", "interleaved"):
        vr.convert_pairing(model, pairing)
        built = create(position, pairing=pairing)
        built.load_state_dict(model.state_dict())
        assert_same_outputs(built(images()), wanted)
        assert torch.equal(built(images()), model(images()))


def test_rows_go_where_the_peers_have_them() -> None:
    """Against the line that converts Meta's Llama weights (interleaved) to transformers' (half), and against memory
    laid out by hand; values, output projections and all other weights stay to the bit."""
    model = create(kind="qk_norm")
    before = state_of(model)
    vr.convert_pairing(model, "half")
    after = model.state_dict()
    dim = HEAD_DIM * HEADS
    for block in range(DEPTH):
        name = f"blocks.{block}.attn."
        for part in range(2):
            weight = before[name + "qkv.weight"][part * dim : (part + 1) * dim]
            halves = weight.view(HEADS, HEAD_DIM // 2, 2, dim).transpose(1, 2).reshape(dim, dim)
            assert torch.equal(after[name + "qkv.weight"][part * dim : (part + 1) * dim], halves)
            bias = before[name + "qkv.bias"][part * dim : (part + 1) * dim]
            halves = bias.view(HEADS, HEAD_DIM // 2, 2).mT.flatten()
            assert torch.equal(after[name + "qkv.bias"][part * dim : (part + 1) * dim], halves)
        for norm in ("q_norm", "k_norm"):
            for leaf in ("weight", "bias"):
                old = before[f"{name}{norm}.{leaf}"]
                assert torch.equal(after[f"{name}{norm}.{leaf}"], torch.cat((old[::2], old[1::2])))
        for leaf in ("weight", "bias"):
            assert torch.equal(after[f"{name}qkv.{leaf}"][2 * dim :], before[f"{name}qkv.{leaf}"][2 * dim :])
    moved = {name.rsplit(".", 2)[1] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"qkv", "q_norm", "k_norm"}


def test_random_features_turn_so_their_matrix_is_reordered() -> None:
    model = create(**ATTENTIONS["narrow"])
    before = state_of(model)
    vr.convert_pairing(model, "half")
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {f"blocks.{block}.attn.projection.matrix" for block in range(DEPTH)}


def test_gradients_and_later_training_are_those_of_the_other_pairing() -> None:
    one = create()
    other = vr.convert_pairing(copy.deepcopy(one), "half")
    for model in (one, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(images()).square().mean().backward()
        optimizer.step()
    vr.convert_pairing(other, "interleaved")
    assert_close(state_of(other), state_of(one), rtol=1e-4, atol=1e-6)
    assert not torch.equal(one.position.learned_frequencies, create().position.learned_frequencies)


def test_extension_modes_and_dtypes_stay() -> None:
    model = vr.set_extension(create("rope-vit-axial"), "yarn", beta_fast=16)
    wanted = model(images(6, 7))
    assert_same_outputs(vr.convert_pairing(model, "half")(images(6, 7)), wanted)
    model.bfloat16().train()
    vr.convert_pairing(model, "interleaved")
    assert model.position.training
    assert model.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    assert vr.convert_pairing(model.to("meta"), "half").blocks[0].attn.qkv.weight.is_meta
    inferred = create()
    with torch.inference_mode():
        vr.convert_pairing(inferred, "half")
    inferred(images()).sum().backward()


@pytest.mark.parametrize("tied", ["layer", "weight"])
def test_a_shared_rope_and_tied_weights(tied: str) -> None:
    """A model gets a Rope of its own, and a weight that several layers share moves once."""
    rope = vr.preset("rope-vit-mixed", head_dim=HEAD_DIM, num_heads=HEADS, depth=DEPTH)
    first, second = (create(rope) for _ in range(2))  # type: ignore[arg-type]
    if tied == "layer":
        second.blocks[1].attn = second.blocks[0].attn
    else:
        second.blocks[1].attn.qkv.weight = second.blocks[0].attn.qkv.weight
    wanted = first(images()), second(images())
    vr.convert_pairing(second, "half")
    assert (first.position.pairing, second.position.pairing) == ("interleaved", "half")
    assert first.position is rope
    assert second.position.learned_frequencies is rope.learned_frequencies
    assert_same_outputs(first(images()), wanted[0])
    assert_same_outputs(second(images()), wanted[1])
    assert not is_close(wanted[0], wanted[1])


@pytest.mark.parametrize("with_decoder", [False, True])
def test_masked_models_are_converted_whole(with_decoder: bool) -> None:
    encoder = create(num_classes=0, class_token=False, global_pool="avg", fc_norm=False)
    decoder = create_decoder(encoder, position="eva02", dim=16, depth=1, num_heads=2) if with_decoder else None
    model = MaskedModel(encoder, decoder)
    fill(model)
    masks = torch.zeros(2, 3, 4, dtype=torch.bool)
    masks[:, 1:, ::2] = True
    wanted = model(images(), masks)
    vr.convert_pairing(model, "half")
    assert_same_outputs(model(images(), masks), wanted)
    assert {part.position.pairing for part in rotary_parts(model)} == {"half"}
    if with_decoder:
        vr.convert_pairing(model.encoder, "interleaved")
        with pytest.raises(ValueError, match="have the pairings interleaved and half; convert the whole model"):
            pairing_of(model)
        assert_same_outputs(vr.convert_pairing(model, "half")(images(), masks), wanted)


class Sharded(nn.Parameter):
    """Stands for DTensor and quantised weights, which are not plain either."""


def test_what_cannot_be_converted_is_refused_untouched() -> None:
    timms = timm.create_model("vit_tiny_patch16_224", **TINY)
    for model, message in (
        (timms, "VisionTransformer without a position encoding of this package"),
        (create("learned"), "position encoding 'learned', which turns no channels.* no pairing to convert"),
    ):
        with pytest.raises(ValueError, match=message):
            vr.convert_pairing(model, "half")
    with pytest.raises(ValueError, match=r"pairing is 'halves'; choose one of .* did you mean 'half'\?"):
        vr.convert_pairing(create(), "halves")  # type: ignore[arg-type]
    odd = vr.Rope(head_dim=6, axes=2, depth=DEPTH, initial_frequencies=lambda: torch.randn(DEPTH, 1, 2, 3))
    with pytest.raises(ValueError, match=r"head_dim is 6; .* multiple of 4 for half-per-axis"):
        vr.convert_pairing(create(odd, num_heads=4), "half-per-axis")  # type: ignore[arg-type]
    # The last layer of all, so that everything before it could have been changed.
    for part, change, message in (
        ("qkv", lambda layer: nn.Sequential(layer), r"blocks\.1\.attn\.qkv is a Sequential with 0\.weight"),
        ("qkv", lambda layer: nn.utils.parametrizations.weight_norm(layer), "a ParametrizedLinear with .*quantised"),
        ("qkv", lambda layer: nn.Identity(), "an? Identity with no weights, where a Linear"),
        ("k_norm", lambda layer: nn.PReLU(5), r"k_norm\.weight is a Parameter of shape \(5,\), .* one of 12 rows"),
    ):
        model = create(kind="qk_norm")
        before = state_of(model.blocks[0])
        layer = model.blocks[1].attn
        setattr(layer, part, change(getattr(layer, part)))
        with pytest.raises(ValueError, match=message):
            vr.convert_pairing(model, "half")
        assert vr.convert_pairing(model, "interleaved") is model, "which it has already"
        assert model.position.pairing == "interleaved"
        assert_close(state_of(model.blocks[0]), before, rtol=0, atol=0)
    model = create()
    model.blocks[1].attn.qkv.weight = Sharded(model.blocks[1].attn.qkv.weight.detach())
    with pytest.raises(ValueError, match=r"a Sharded of shape .* convert before weights are sharded"):
        vr.convert_pairing(model, "half")


def test_a_model_wrapped_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)  # without a process group
    nn.Module.__init__(wrapped)
    wrapped.module = create()
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel, .* before it is wrapped"):
        vr.convert_pairing(wrapped, "half")


@pytest.mark.integration
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_follow(in_place: bool) -> None:
    model = create(depth=1)
    compiled: Any = model if in_place else torch.compile(model, backend="aot_eager")
    if in_place:
        model.compile(backend="aot_eager")
    wanted = compiled(images())
    assert vr.convert_pairing(compiled, "half") is compiled
    assert_same_outputs(compiled(images()), wanted)


CONFIG = [
    *("--data.size", "16"),
    *("--model.options", "{patch_size: 8, embed_dim: 16, depth: 2, num_heads: 2}"),
    *("--model.position", "rope-vit-mixed"),
]
PICTURES = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def build(num_classes: int = 3, *words: str) -> Any:
    model = checkpoint.build_model(load_config([*CONFIG, *words]), num_classes)
    fill(model)
    return model.eval()


def test_files_tell_their_pairing_and_are_brought_into_the_models(tmp_path: Path) -> None:
    """Weights fit a model of either pairing name by name, so that nothing else would tell."""
    path = tmp_path / "half.safetensors"
    trained = build()
    wanted = trained(PICTURES)
    vr.save_model(path, vr.convert_pairing(trained, "half"), {"note": "mine"})
    state, metadata = checkpoint.load_weights(path)
    told = {"position": "rope-vit-mixed", "encoding": "rope-vit-mixed; learned", "pairing": "half"}
    assert metadata == {"note": "mine", **told}
    for words in ([], ["--model.position_options.pairing", "half"]):
        model = build(3, *words)
        assert first_weights.load_start(model, path) == []
        assert_same_outputs(model(PICTURES), wanted)
    # A new classifier stays what it was.
    model = build(5)
    head = model.head.weight.clone()
    assert first_weights.load_start(model, path) == ["head.bias", "head.weight"]
    assert torch.equal(model.head.weight, head)
    assert_same_outputs(
        model.forward_features(PICTURES), vr.convert_pairing(trained, "half").forward_features(PICTURES)
    )
    # Files of others say nothing and are taken as they are.
    checkpoint.save_weights(path, state, {})
    first_weights.load_start(model := build(), path)
    assert not is_close(model(PICTURES), wanted)
    checkpoint.save_weights(path, state, {"pairing": "thirds"})
    with pytest.raises(ValueError, match=r"half.safetensors does not fit the model: .* pairing 'thirds'"):
        first_weights.load_start(build(), path)
    with pytest.raises(ValueError, match=r"path is .*weights.pt, but weights are written as \.safetensors"):
        vr.save_model(tmp_path / "weights.pt", trained)


def test_models_without_a_rope_have_no_pairing(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    learned = build(3, "--model.position", "learned")
    vr.save_model(path, learned)
    assert checkpoint.load_weights(path)[1] == {"position": "learned"}
    reorder_weights(learned, "half")
    assert weight_metadata.describe_position(nn.Linear(2, 2)) == {}


def test_a_masked_file_of_another_pairing_starts_models(tmp_path: Path) -> None:
    path = tmp_path / "masked.safetensors"
    options = ["--model.options", "{patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2, class_token: false}"]
    options += ["--model.options.global_pool", "avg"]
    masked = [*options, "--task", "masked", "--masked.encoder", "visible"]
    trained = build(0, *masked)
    wanted = trained.encoder.forward_features(PICTURES)
    vr.save_model(path, vr.convert_pairing(trained, "half"))
    told = {"position": "rope-vit-mixed", "encoding": "rope-vit-mixed; learned", "pairing": "half"}
    assert checkpoint.load_weights(path)[1] == told
    classifier, again = build(3, *options), build(0, *masked)
    first_weights.load_start(classifier, path)
    assert_same_outputs(classifier.forward_features(PICTURES), wanted)
    first_weights.load_start(again, path)
    assert_close(state_of(vr.convert_pairing(again, "half")), state_of(trained), rtol=0, atol=0)


def test_run_folders_load_weights_of_another_pairing(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    trained = build()
    wanted = trained(PICTURES)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    vr.save_model(tmp_path / "best.safetensors", vr.convert_pairing(trained, "half"), {"classes": ["a", "b", "c"]})
    run = vr.load_run(tmp_path)
    assert_same_outputs(run.model(PICTURES), wanted)
    assert pairing_of(run.model) == "interleaved", "as its configuration says"
    metadata = checkpoint.load_weights(tmp_path / "best.safetensors")[1]
    with pytest.raises(ValueError, match=r"pairing 'half' and the run's model has 'interleaved'.* model\.checkpoint"):
        weight_metadata.check_pairing(run.model, metadata, "last")
    weight_metadata.check_pairing(trained, metadata, "last")
    weight_metadata.check_pairing(run.model, {}, "last")


@pytest.mark.parametrize("keep_absolute", [False, True])
def test_evaluated_files_of_another_pairing(tmp_path: Path, keep_absolute: bool) -> None:
    """Loaded before the conversion where the names are timm's, after it where they are not."""
    path = tmp_path / "weights.safetensors"
    options: dict[str, Any] = {**TINY, "img_size": 64}
    trained = create("rope-vit-axial", pairing="half", keep_absolute=keep_absolute)
    vr.save_model(path, trained)
    theirs = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **options)
    assert (set(theirs.state_dict()) == set(trained.state_dict())) == keep_absolute
    model: Any = _load_and_convert(theirs.eval(), path, "rope-vit-axial")
    assert (model.pos_embed is not None) == keep_absolute, "what was trained stays"
    assert pairing_of(model) == "interleaved"
    assert_same_outputs(model(images(4, 4)), trained(images(4, 4)))


@pytest.mark.integration
def test_a_run_writes_its_pairing_and_goes_on_with_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    from vision_rope.trainer import main

    for split, count in (("train", 4), ("validation", 2)):
        for name in ("a", "b"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (16, 16), (90 * index, 30, 200)).save(
                    tmp_path / "data" / split / name / f"{index}.png"
                )
    words = [*CONFIG, "--model.position_options.pairing", "half", "--data.source", f"folder:{tmp_path / 'data'}"]
    words += ["--batch_size", "4", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0", "--ema_decay", "0.9"]
    words += ["--run.device", "cpu", "--run.num_workers", "0", "--run.tensorboard", "false", "--run.progress", "false"]
    words += ["--run.output", str(tmp_path / "run")]
    main(words)
    files = [tmp_path / "run" / name for name in ("best.safetensors", "last/model.safetensors", "last/ema.safetensors")]
    for path in files:
        state, metadata = checkpoint.load_weights(path)
        assert (metadata["position"], metadata["pairing"]) == ("rope-vit-mixed", "half")
    for path in files[1:]:
        state, metadata = checkpoint.load_weights(path)
        read = {key: json.loads(text) if key in ("classes", "metrics") else text for key, text in metadata.items()}
        checkpoint.save_weights(path, state, {**read, "pairing": "interleaved"})
        assert main([*words, "--run.resume", "true"]) == 2
        assert "a training cannot change its pairing on the way" in capsys.readouterr().err
        checkpoint.save_weights(path, state, read)
    assert main([*words, "--run.resume", "true"]) == 0


def test_weights_that_share_memory_move_once() -> None:
    """Two Parameters on one storage, as flattened or loaded weights are."""
    model = create()
    first, second = (block.attn.qkv for block in model.blocks)
    second.weight = nn.Parameter(first.weight.data)
    assert second.weight is not first.weight
    wanted = model(images())
    assert_same_outputs(vr.convert_pairing(model, "half")(images()), wanted)


def test_the_default_device_does_not_matter() -> None:
    model = create()
    wanted = model(images())
    with torch.device("meta"):
        vr.convert_pairing(model, "half")
        assert vr.pairing_permutation(8, "half", "interleaved").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert_same_outputs(model(images()), wanted)


def test_load_model_brings_a_file_into_the_models_pairing(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    trained = build()
    wanted = trained(PICTURES)
    vr.save_model(path, vr.convert_pairing(trained, "half"))
    model = build(3)
    nn.init.zeros_(model.head.weight)
    assert vr.load_model(model, path) is model
    assert_same_outputs(model(PICTURES), wanted)
    compiled = torch.compile(build(3))
    assert vr.load_model(compiled, str(path)) is compiled
    assert_same_outputs(compiled._orig_mod(PICTURES), wanted)
    with pytest.raises(ValueError, match=r"half.safetensors does not fit the model: .*head"):
        vr.load_model(build(5), path)
    with pytest.raises(ValueError, match=r"is a folder; load_run\(folder\)"):
        vr.load_model(model, tmp_path)
    with pytest.raises(ValueError, match="give the model first, then the path"):
        vr.load_model(path, model)  # type: ignore[type-var]
    with pytest.warns(UserWarning, match="trained with the position encoding 'rope-vit-mixed', but the model has 'rop"):
        weight_metadata.warn_of_another_kind(
            build(3, "--model.position", "rope-vit-axial"), {"position": "rope-vit-mixed"}, path
        )
    plain = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **{**TINY, "img_size": 64})
    kept = create("rope-vit-axial", keep_absolute=True)
    vr.save_model(path, kept)
    with pytest.warns(UserWarning, match=r"but the model has timm's own; .*add_position\(model, 'rope-vit-axial'\)"):
        vr.load_model(plain, path)


def test_save_model_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the path first, then the model"):
        vr.save_model(nn.Linear(2, 2), tmp_path / "a.safetensors")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"but there is no folder .*missing; make it first"):
        vr.save_model(tmp_path / "missing" / "a.safetensors", nn.Linear(2, 2))


OTHER_OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("rope-vit-axial", {"base": 10000.0}, {}),
    ("rope-vit-axial", {"base": 100.5}, {"base": 100.25}),
    ("eva02", {"reference": [8, 8]}, {}),
    ("dinov3", {"normalize": "min"}, {}),
    ("dinov3", {"min_period": 1.0, "max_period": 100.0}, {"min_period": 2.0, "max_period": 200.0}),
    ("perception-encoder", {"offset": 0.0}, {}),
    ("alibi", {"distance": "manhattan"}, {"distance": "euclidean"}),
    ("sinusoidal", {"base": 100.0}, {}),
]


@pytest.mark.parametrize(("position", "theirs", "own"), OTHER_OPTIONS)
def test_weights_of_an_encoding_with_other_options_are_told(
    tmp_path: Path, position: str, theirs: dict[str, Any], own: dict[str, Any]
) -> None:
    """Fixed frequencies are in no file, so that nothing else would tell."""
    path = tmp_path / "weights.safetensors"

    def made(options: dict[str, Any]) -> Any:
        return vr.create_model(
            "vit_tiny_patch16_224", position, img_size=32, position_options=options, **{**TINY, "embed_dim": 32}
        )

    vr.save_model(path, made(theirs))
    for load in (first_weights.load_start, vr.load_model):
        load(made(theirs), path)
        with pytest.warns(UserWarning, match=f"other options of the position encoding '{position}'") as caught:
            load(made(own), path)
        assert caught[0].filename == __file__, "it points to the caller"
    state, metadata = checkpoint.load_weights(path)
    checkpoint.save_weights(path, state, {key: value for key, value in metadata.items() if key != "encoding"})
    first_weights.load_start(made(own), path)


def test_pairing_augmentation_and_extension_are_no_other_options(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    options = {"rescale": 2.0, "pairing": "interleaved"}
    trained = vr.create_model("vit_tiny_patch16_224", "dinov3", img_size=32, position_options=options, **TINY)
    vr.save_model(path, vr.set_extension(trained, "pitch"))
    vr.load_model(vr.create_model("vit_tiny_patch16_224", "dinov3", img_size=32, **TINY), path)


def test_an_evaluated_file_of_another_encoding_is_told(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    vr.save_model(path, create("rope-vit-axial", keep_absolute=True))
    for position, message in ((None, "timm's own; .*--position rope-vit-axial"), ("sam2", "but the model has 'sam2'")):
        theirs = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **{**TINY, "img_size": 64})
        with pytest.warns(UserWarning, match=message):
            _load_and_convert(theirs, path, position)
    # timm's own file loses its absolute embedding, as every conversion has it.
    checkpoint.save_weights(path, theirs.state_dict() | {"pos_embed": torch.ones(1, 17, TINY["embed_dim"])}, {})
    theirs = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **{**TINY, "img_size": 64})
    model: Any = _load_and_convert(theirs, path, "sam2")
    assert model.pos_embed is None
