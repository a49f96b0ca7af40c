"""Weights and training states on disk: plain names, nothing that runs code, whole after a kill at any time."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import vision_rope
from vision_rope import checkpoint
from vision_rope.checkpoint import (
    build_model,
    find_last,
    load_run,
    load_state,
    load_strictly,
    load_weights,
    save_last,
    save_weights,
    write_whole,
)
from vision_rope.config import load_config, to_yaml
from vision_rope.first_weights import load_start

TINY = [
    *("--data.size", "16"),
    *("--model.options", "{patch_size: 8, embed_dim: 16, depth: 2, num_heads: 2}"),
    *("--model.position", "rope-vit-mixed"),
]


@pytest.fixture
def config():
    return load_config(TINY)


def test_names_are_plain_whatever_wrapped_the_model(tmp_path):
    """Failure class 30."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    wrapped = nn.ModuleDict({"module": torch.compile(model)})
    inner = nn.Sequential(torch.compile(model[0]), model[1])
    for state in (wrapped.state_dict(), inner.state_dict(), torch.compile(model).state_dict(), model.state_dict()):
        save_weights(tmp_path / "w.safetensors", state, {"classes": ["a", "b"], "position": "none"})
        loaded, metadata = load_weights(tmp_path / "w.safetensors")
        assert set(loaded) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        load_strictly(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), loaded, "w")
        assert json.loads(metadata["classes"]) == ["a", "b"]
        assert metadata["position"] == "none"


def test_files_are_safetensors_that_the_library_reads(tmp_path):
    tensors = {"a": torch.randn(3, 2).t(), "b": torch.zeros(2, dtype=torch.long)}
    tensors["tied"] = tensors["a"]
    save_weights(tmp_path / "w.safetensors", tensors, {})
    torch.testing.assert_close(load_file(tmp_path / "w.safetensors"), {k: v.contiguous() for k, v in tensors.items()})


def test_mismatches_are_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    state = model.state_dict()
    state["extra"] = torch.zeros(1)
    del state["1.bias"]
    state["0.bias"] = torch.zeros(7)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        load_strictly(model, state, "some.safetensors")
    for words in ("it lacks 1.bias", "the model has no extra", "0.bias (7,) instead of (3,)"):
        assert words in str(caught.value)


def test_a_failed_load_leaves_the_model_as_it_was():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="it lacks bias"):
        load_strictly(model, {"weight": torch.ones(2, 2)}, "w")
    assert torch.equal(model.weight, before)


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_checkpoint_never_runs_code(tmp_path, how):
    """Failure class 33: an object whose unpickling would create a file is refused and creates none."""
    path, sign = tmp_path / "state.pt", tmp_path / "sign"
    with path.open("wb") as file:
        if how == "torch":
            torch.save({"optimizer": Trap(sign)}, file)
        else:
            pickle.dump({"optimizer": Trap(sign)}, file, protocol=2)
    with pytest.raises(ValueError, match="no training state that can be loaded safely"):
        load_state(path)
    for name in ("weights.pth", "weights.safetensors"):
        path.replace(tmp_path / name)
        path = tmp_path / name
        with pytest.raises(ValueError, match=r"is not a \.safetensors file|is damaged or not a safetensors file"):
            load_weights(path)
    assert not sign.exists()


def test_damaged_and_missing_files_are_reported(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        load_weights(tmp_path / "no.safetensors")
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="damaged"):
        load_weights(path)
    with pytest.raises(ValueError, match="safely"):
        load_state(tmp_path / "no.pt")


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ordinary errors catches it."""


def steps_of(monkeypatch, action) -> int:
    """Number of changes to the file system that an action makes through os and pathlib."""
    return count_until(monkeypatch, action, stop=10**9)


def count_until(monkeypatch, action, stop: int) -> int:
    """Run an action and kill it before its `stop`-th change to the file system."""
    count = 0

    def counted(original):
        def call(*args, **kwargs):
            nonlocal count
            if count == stop:
                raise Killed
            count += 1
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(checkpoint.shutil, "rmtree", counted(checkpoint.shutil.rmtree))
        action()
    return count


def test_a_kill_while_writing_weights_leaves_the_previous_file(tmp_path, monkeypatch):
    """Failure class 22: before every change to the file system."""
    path = tmp_path / "w.safetensors"
    save_weights(path, {"a": torch.zeros(2)}, {})
    total = steps_of(monkeypatch, lambda: save_weights(path, {"a": torch.zeros(2)}, {}))
    assert total >= 3, "flush, rename, flush of the folder"
    for stop in range(total):
        save_weights(path, {"a": torch.zeros(2)}, {})
        with pytest.raises(Killed):
            count_until(monkeypatch, lambda: save_weights(path, {"a": torch.ones(2)}, {}), stop)
        value = load_weights(path)[0]["a"]
        assert torch.equal(value, torch.zeros(2)) or torch.equal(value, torch.ones(2))


def test_a_kill_while_writing_last_leaves_one_whole_folder(tmp_path, monkeypatch):
    """Failure class 22: weights, averaged weights and state always belong to one epoch."""

    def save(epoch: int) -> None:
        value = torch.full((3,), float(epoch))
        save_last(tmp_path, {"epoch": epoch}, weights={"a": value}, ema={"a": value + 1}, metadata={"epoch": epoch})

    def read() -> int:
        last = find_last(tmp_path)
        assert last is not None
        epoch = load_state(last / "state.pt")["epoch"]
        for name, extra in (("model", 0), ("ema", 1)):
            weights, metadata = load_weights(last / f"{name}.safetensors")
            assert metadata["epoch"] == str(epoch)
            assert torch.equal(weights["a"], torch.full((3,), float(epoch + extra)))
        return epoch

    save(0)
    total = steps_of(monkeypatch, lambda: save(1))
    assert total >= 10
    seen = set()
    for stop in range(total):
        save(2)
        with pytest.raises(Killed):
            count_until(monkeypatch, lambda: save(3), stop)
        seen.add(read())
        # A half-written file of the next attempt must not be taken for the last one.
        (tmp_path / "last.tmp").mkdir(exist_ok=True)
        (tmp_path / "last.tmp" / "state.pt").write_bytes(b"half")
        seen.add(read())
        save(4)
        assert read() == 4
        assert {path.name for path in tmp_path.iterdir()} == {"last"}
    assert seen == {2, 3}


def test_nothing_to_go_on_with_is_none(tmp_path):
    (tmp_path / "last.tmp").mkdir()
    assert find_last(tmp_path) is None


def test_write_whole_leaves_no_other_file(tmp_path):
    write_whole(tmp_path / "a.txt", b"1")
    write_whole(tmp_path / "a.txt", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == b"2"


def test_build_model_takes_the_training_size_and_refuses_wrong_options(config):
    model = build_model(config, 5)
    assert model.train_grid == (2, 2)
    assert model(torch.zeros(1, 3, 16, 24)).shape == (1, 5)
    with pytest.raises(ValueError, match=r"cannot be built with model\.options .*embed_dimm"):
        build_model(load_config(["--model.options.embed_dimm", "3"]), 5)
    with pytest.raises(ValueError, match=r"model\.options holds num_classes"):
        build_model(load_config(["--model.options.num_classes", "3"]), 5)


def test_run_folder_round_trip(tmp_path, config):
    model = build_model(config, 3)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    metadata = {"classes": ["a", "b", "c"]}
    with pytest.raises(ValueError, match="holds no best weights: no epoch was finished"):
        load_run(folder)
    save_weights(folder / "best.safetensors", model.state_dict(), metadata)
    save_last(folder, {}, weights=model.state_dict(), ema=None, metadata=metadata)
    images = torch.randn(2, 3, 16, 16)
    for weights in ("best", "last"):
        run = load_run(folder, weights=weights)
        assert run.classes == ["a", "b", "c"]
        assert run.config == config
        assert not run.model.training
        torch.testing.assert_close(run.model(images), model.eval()(images), rtol=0, atol=0)
    assert (
        repr(run)
        == f"LoadedRun(model={config.model.name} with {config.model.position}, task=classification, 3 classes)"
    )
    with pytest.raises(ValueError, match=r"holds no ema weights: averaging was off"):
        load_run(folder, weights="ema")
    with pytest.raises(ValueError, match="must be best, last or ema"):
        load_run(folder, weights="newest")
    with pytest.raises(ValueError, match=r"ema; did you mean 'best'\?$"):
        load_run(folder, weights="bets")
    with pytest.raises(ValueError, match="is not a run folder"):
        load_run(tmp_path)


def test_first_weights_from_a_file_renew_another_classifier_only(tmp_path, config):
    path = tmp_path / "w.safetensors"
    old = build_model(config, 3)
    save_weights(path, old.state_dict(), {})
    model = build_model(config, 5)
    head = model.head.weight.clone()
    assert load_start(model, path) == ["head.bias", "head.weight"]
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.blocks[0].attn.qkv.weight, old.blocks[0].attn.qkv.weight)
    assert load_start(build_model(config, 3), path) == []
    other = vision_rope.create_model(
        "vit_small_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2
    )
    with pytest.raises(ValueError, match="does not fit the model"):
        load_start(other, path)


@pytest.mark.parametrize("class_token", [False, True])
def test_a_learned_embedding_of_another_size_is_resampled(tmp_path: Path, class_token: bool) -> None:
    """Against timm, which resamples the same embedding when it makes a model of the other size."""
    pool = "token" if class_token else "avg"
    options = (
        f"{{patch_size: 8, embed_dim: 12, depth: 1, num_heads: 3, class_token: {class_token}, global_pool: {pool}}}"
    )
    words = ["--model.options", options, "--model.position", "learned"]
    small = load_config([*words, "--data.size", "16x32"])
    large = load_config([*words, "--data.size", "32x24"])
    trained, model = build_model(small, 3), build_model(large, 3)
    path = tmp_path / "start.safetensors"
    save_weights(path, trained.state_dict(), {"config": to_yaml(small)})
    assert load_start(model, path) == []
    peer = timm.create_model(
        "vit_small_patch16_224", **small.model.options, img_size=(16, 32), num_classes=3, dynamic_img_size=True
    )
    peer.load_state_dict(trained.state_dict())
    peer.set_input_size(img_size=(32, 24))
    assert_close(model.pos_embed, peer.pos_embed)
    # Without the metadata nobody knows the grid that it was trained for.
    save_weights(path, trained.state_dict(), {})
    with pytest.raises(ValueError, match="shapes differ: pos_embed"):
        load_start(build_model(large, 3), path)
    # One of other positions has no place for the embedding.
    turned = load_config(["--model.options", options, "--data.size", "16x32", "--model.position", "none"])
    with pytest.raises(ValueError, match="does not fit the model: the model has no pos_embed"):
        load_start(build_model(turned, 3), path)


def test_a_masked_encoder_starts_a_classifier(tmp_path: Path) -> None:
    options = "{patch_size: 8, embed_dim: 24, depth: 1, num_heads: 3, class_token: false, global_pool: avg}"
    words = ["--model.options", options, "--data.size", "16"]
    masked_words = [*words, "--task", "masked", "--masked.encoder", "visible"]
    trained = build_model(load_config(masked_words), 0)
    path = tmp_path / "start.safetensors"
    save_weights(path, trained.state_dict(), {})
    model = build_model(load_config(words), 5)
    fresh = {name: model.state_dict()[name].clone() for name in ("head.weight", "head.bias")}
    assert load_start(model, path) == ["head.bias", "head.weight"]
    for name, value in model.state_dict().items():
        assert_close(value, fresh[name] if name in fresh else trained.state_dict()[f"encoder.{name}"], atol=0, rtol=0)
    # The other way round there is nothing to take.
    save_weights(path, model.state_dict(), {})
    with pytest.raises(
        ValueError, match="holds the weights of a classifier, but masked prediction starts from those of a masked run"
    ):
        load_start(build_model(load_config(masked_words), 0), path)


def test_t5_buckets_that_moved_with_the_grid_are_refused(tmp_path):
    """Its table has the same shape for every grid, so that the weights would fit and mean something else."""
    words = [
        "--model.position", "t5", "--model.position_options", "{num_buckets: 8}", "--data.size", "64",
        "--model.options", "{depth: 1, embed_dim: 16, num_heads: 2}",
    ]  # fmt: skip
    small = load_config(words)
    path = tmp_path / "t5.safetensors"
    model = build_model(small, 3)
    save_weights(path, model.state_dict(), {"config": to_yaml(small), "position": "t5"})
    assert load_start(build_model(small, 3), path) == []
    large = load_config([*words, "--data.size", "96"])
    with pytest.raises(ValueError, match=r"max_distance: 3"):
        load_start(build_model(large, 3), path)
    given = load_config([*words, "--data.size", "96", "--model.position_options", "{num_buckets: 8, max_distance: 3}"])
    assert load_start(build_model(given, 3), path) == []
