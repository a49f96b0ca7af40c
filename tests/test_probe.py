"""Probes of frozen features: against plain loops, Newton's method and hand-made forward passes; whole runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vision_rope
from vision_rope import cli, feature_classifiers
from vision_rope import probe as probing
from vision_rope.checkpoint import build_model, load_run, save_weights
from vision_rope.config import (
    AugmentConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    load_yaml,
    to_yaml,
)
from vision_rope.data import decode_image, eval_transform
from vision_rope.feature_classifiers import L2_STRENGTHS, fit_best, fit_linear, knn_votes
from vision_rope.parallel import Distributed
from vision_rope.preparation import build_start
from vision_rope.probe import (
    extract_features,
    format_probe,
    probe,
    probe_features,
    write_probe,
)
from vision_rope.trainer import seed_everything, train

TINY = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
QUIET: dict[str, Any] = {"k": 3, "num_workers": 0, "device": "cpu", "progress": False}
COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (200, 40, 50)}


def draw_pictures(folder: Path, classes: list[str], counts: dict[str, int]) -> Path:
    """Noise around a colour a class."""
    generator = torch.Generator().manual_seed(3)
    for split, count in counts.items():
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                noise = torch.randn(20, 24, 3, generator=generator) * 40 + torch.tensor(COLOURS[name])
                picture = Image.fromarray(noise.clamp(0, 255).byte().numpy())
                picture.save(folder / split / name / f"{index:02}.png")
    return folder


@pytest.fixture(scope="session")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("coloured"), ["blue", "green", "red"], {"train": 6, "val": 3})


@pytest.fixture(scope="session")
def two_coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("two"), ["green", "red"], {"train": 5, "val": 4})


def make_config(source: str, task: str = "classification", **model: Any) -> TrainConfig:
    return TrainConfig(
        task=task,  # type: ignore[arg-type]
        seed=5,
        model=ModelConfig("vit_tiny_patch16_224", options={**TINY, **model}),
        data=DataConfig(source=source, size=16, mean=(0.4, 0.4, 0.4), interpolation="bilinear"),
        evaluation=EvaluationConfig(crop_pct=0.9),
    )


def make_run(folder: Path, config: TrainConfig, classes: list[str]) -> Path:
    """A run folder with weights of other values than the first ones."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    torch.manual_seed(11)
    model = build_model(config, len(classes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_weights(folder / "best.safetensors", model.state_dict(), {"classes": classes})
    return folder


def features_by_hand(backbone: Any, folder: Path, split: str, size: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Class tokens, picture by picture, with the normalisation and the crop of `make_config`."""
    transform = eval_transform(size, crop_pct=0.9, interpolation="bilinear")
    mean, std = torch.tensor((0.4, 0.4, 0.4)).view(3, 1, 1), torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    features, labels = [], []
    for label, name in enumerate(sorted(path.name for path in (folder / split).iterdir())):
        for path in sorted((folder / split / name).iterdir()):
            image = (transform(decode_image(str(path))) / 255 - mean) / std
            with torch.no_grad():
                features.append(backbone.forward_features(image[None])[:, 0])
            labels.append(label)
    return torch.cat(features), torch.tensor(labels)


def blobs(counts: list[int], dim: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features around a random centre a class, correlated, of very unequal scales and means; one is constant."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(99)
    centres, mixing = torch.randn(len(counts), dim, generator=fixed), torch.randn(dim, dim, generator=fixed)
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    features = centres[labels] + spread * torch.randn(len(labels), dim, generator=generator) @ mixing / dim**0.5
    features = features * torch.logspace(-2, 2, dim) + torch.linspace(-5, 5, dim)
    features[:, dim // 2] = 1.7
    return features, labels


def newton(features: Tensor, labels: Tensor, num_classes: int, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Minimise mean cross entropy + l2 / 2 * |weight|^2 over standardised features; float64 NumPy, full Hessian."""
    raw, wanted = features.double().numpy(), np.eye(num_classes)[labels.numpy()]
    deviation = raw.std(0)
    alive = deviation > 1e-5
    x = np.zeros_like(raw)
    x[:, alive] = (raw[:, alive] - raw[:, alive].mean(0)) / deviation[alive]
    x = np.hstack([x, np.ones((len(x), 1))])
    penalty = np.full((num_classes, x.shape[1]), l2)
    penalty[:, -1] = 0
    theta = np.zeros((num_classes, x.shape[1]))

    def value(theta: np.ndarray) -> tuple[float, np.ndarray]:
        logits = x @ theta.T
        logits -= logits.max(1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        loss = -np.log((probabilities * wanted).sum(1)).mean() + (penalty * theta**2).sum() / 2
        return loss, probabilities

    for _ in range(100):
        loss, p = value(theta)
        gradient = (p - wanted).T @ x / len(x) + penalty * theta
        if np.abs(gradient).max() < 1e-12:
            break
        curvature = np.einsum("na,ab->nab", p, np.eye(num_classes)) - np.einsum("na,nb->nab", p, p)
        hessian = np.einsum("nab,ni,nj->aibj", curvature, x, x).reshape(theta.size, -1) / len(x)
        hessian += np.diag(penalty.ravel())
        step = (np.linalg.pinv(hessian, rcond=1e-13) @ gradient.ravel()).reshape(theta.shape)
        share = 1.0
        while value(theta - share * step)[0] > loss and share > 1e-6:
            share /= 2
        theta = theta - share * step
    return theta[:, :-1], theta[:, -1]


@pytest.mark.parametrize("part", [1, 40, 10_000])
def test_neighbours_vote_as_in_a_plain_loop(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_classifiers, "PART", part)  # one image, one or two, all images at a time
    rng = np.random.default_rng(0)
    train, images, labels = rng.normal(size=(23, 5)), rng.normal(size=(9, 5)), rng.integers(0, 4, 23)
    expected = np.zeros((9, 4))
    for row, image in enumerate(images):
        similarities = [image @ other / np.linalg.norm(image) / np.linalg.norm(other) for other in train]
        for place in sorted(range(23), key=lambda place: -similarities[place])[:6]:
            expected[row, labels[place]] += np.exp(similarities[place] / 0.2)
    expected /= expected.sum(1, keepdims=True)
    arrays = (torch.from_numpy(array) for array in (train, labels, images))
    votes = knn_votes(*arrays, 4, k=6, temperature=0.2)
    torch.testing.assert_close(votes, torch.from_numpy(expected))


def test_defaults_are_those_of_the_source() -> None:
    train, labels = blobs([30, 30], 6, 3.0)
    images, _ = blobs([5, 5], 6, 3.0, seed=1)
    expected = knn_votes(train, labels, images, 2, k=20, temperature=0.07)
    torch.testing.assert_close(knn_votes(train, labels, images, 2), expected, rtol=0, atol=0)


def test_a_low_temperature_leaves_the_vote_to_the_nearest() -> None:
    train, labels = torch.eye(4)[:3], torch.tensor([2, 0, 1])
    votes = knn_votes(train, labels, torch.tensor([[1.0, 2.0, 1.9, 0.0]]), 3, k=3, temperature=1e-4)
    torch.testing.assert_close(votes, torch.tensor([[1.0, 0.0, 0.0]]))


def test_neighbours_see_directions_not_lengths() -> None:
    train, labels = torch.tensor([[100.0, 0.0], [0.0, 0.01]]), torch.tensor([0, 1])
    votes = knn_votes(train, labels, torch.tensor([[0.1, 0.2], [300.0, 200.0]]), 2, k=1)
    torch.testing.assert_close(votes, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


@pytest.mark.parametrize(("l2", "part"), [(1.0, 10**6), (1e-3, 50), (1e-6, 10**6)])
def test_the_linear_probe_is_the_optimum_that_newton_finds(
    l2: float, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_classifiers, "PART", part)
    features, labels = blobs([40, 25, 15], 7, 2.0)
    fit = fit_linear(features, labels, 3, l2=l2)
    weight, bias = newton(features, labels, 3, l2)
    tolerance = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(fit.weight, torch.from_numpy(weight), **tolerance)
    torch.testing.assert_close(fit.bias - fit.bias.mean(), torch.from_numpy(bias - bias.mean()), **tolerance)
    assert fit.gradient < 1e-5


@pytest.mark.parametrize("l2", [0.1, 1e-5])
def test_autograd_finds_no_way_down_from_the_linear_probe(l2: float) -> None:
    features, labels = blobs([30, 20, 25, 25], 12, 1.0)
    fit = fit_linear(features, labels, 4, l2=l2)
    weight, bias = fit.weight.clone().requires_grad_(), fit.bias.clone().requires_grad_()
    standardised = (features.double() - fit.mean) * fit.scale
    torch.testing.assert_close(standardised.mean(0), torch.zeros(12, dtype=torch.double), rtol=0, atol=1e-5)
    deviations = torch.ones(12, dtype=torch.double)
    deviations[6] = 0
    torch.testing.assert_close(standardised.std(0, correction=0), deviations, rtol=1e-5, atol=1e-5)
    loss = nn.functional.cross_entropy(standardised @ weight.T + bias, labels) + l2 / 2 * (weight**2).sum()
    loss.backward()
    assert weight.grad is not None
    assert bias.grad is not None
    largest = max(float(weight.grad.abs().max()), float(bias.grad.abs().max()))
    assert largest < 1e-5
    assert fit.gradient == pytest.approx(largest, rel=1e-2)
    torch.testing.assert_close(fit(features), standardised @ fit.weight.T + fit.bias)


def test_correlated_features_take_tens_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_classifiers, "MAX_ITERATIONS", 60)
    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(300, 4, generator=generator), torch.randn(300, 40, generator=generator)
    features = common @ torch.randn(4, 40, generator=generator) + 0.03 * own
    labels = (own[:, :3] + common[:, :3]).argmax(1)
    assert fit_linear(features, labels, 3, l2=1e-4).gradient < 1e-6


def test_the_gradient_says_how_far_an_unfinished_fit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_classifiers, "MAX_ITERATIONS", 1)
    assert fit_linear(*blobs([30, 20], 12, 1.0), 2, l2=1e-5).gradient > 1e-3


def test_every_fifth_image_of_a_class_is_held_out() -> None:
    labels = torch.tensor([0, 1, 2, 0] * 10 + [3, 4, 4])[torch.randperm(43, generator=torch.Generator().manual_seed(1))]
    held_out = feature_classifiers._hold_out(labels, 0)
    # 20, 10, 10, 1 and 2 images.
    assert labels[held_out].bincount(minlength=5).tolist() == [4, 2, 2, 0, 1]
    assert torch.equal(held_out, feature_classifiers._hold_out(labels, 0))
    assert not torch.equal(held_out, feature_classifiers._hold_out(labels, 1))


def test_the_strength_is_that_of_the_best_held_out_likelihood() -> None:
    chosen = []
    for spread, dim in ((0.2, 5), (8.0, 5), (30.0, 20)):
        features, labels = blobs([40, 40, 40], dim, spread)
        held_out = feature_classifiers._hold_out(labels, 4)
        losses = {}
        for l2 in L2_STRENGTHS:
            weight, bias = newton(features[~held_out], labels[~held_out], 3, l2)
            kept = features[~held_out].double()
            scale = kept.std(0, correction=0)
            standardised = (features.double() - kept.mean(0)) / scale.where(scale > 1e-5, torch.inf)
            logits = standardised[held_out] @ torch.from_numpy(weight).T + torch.from_numpy(bias)
            losses[l2] = float(nn.functional.cross_entropy(logits, labels[held_out]))
        fit = fit_best(features, labels, 3, seed=4)
        chosen.append(fit.l2)
        assert fit.l2 == min(losses, key=losses.__getitem__)
        weight, bias = newton(features, labels, 3, fit.l2)
        torch.testing.assert_close(fit.weight, torch.from_numpy(weight), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            fit.bias - fit.bias.mean(), torch.from_numpy(bias - bias.mean()), rtol=1e-3, atol=1e-3
        )
    # Otherwise the choice would be none.
    assert len(set(chosen)) == 3


def test_no_class_with_two_images_leaves_no_choice() -> None:
    with pytest.raises(ValueError, match="no class has two training images"):
        fit_best(torch.randn(3, 4), torch.tensor([0, 1, 2]), 3)


def test_separable_features_are_worth_everything() -> None:
    train, validation = blobs([30] * 6, 9, 1e-3), blobs([10] * 6, 9, 1e-3, seed=1)
    knn, linear = probe_features(train, validation, 6)
    assert (knn["probe"], linear["probe"]) == ("knn", "linear")
    assert knn["top1"] == linear["top1"] == linear["top5"] == 1
    assert linear["nll"] < 0.01
    assert (knn["k"], knn["temperature"], knn["l2"]) == (20, 0.07, None)
    assert (linear["k"], linear["temperature"], linear["l2"]) == (None, None, min(L2_STRENGTHS))


def test_random_features_are_worth_chance() -> None:
    generator = torch.Generator().manual_seed(7)
    train, validation = (
        (torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator))
        for count in (400, 1000)
    )
    for row in probe_features(train, validation, 4):
        # Five standard errors.
        assert row["top1"] == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 1000) ** 0.5)
    assert row["l2"] >= 0.1
    assert row["nll"] == pytest.approx(np.log(4), abs=0.03)


@pytest.mark.parametrize("temperature", [0.3, 0.01])
def test_two_classes_are_ranked_by_their_votes_and_by_the_linear_probe(temperature: float) -> None:
    train, (images, labels) = blobs([40, 20], 5, 4.0), blobs([20, 12], 5, 4.0, seed=1)
    rows = probe_features(train, (images, labels), 2, k=7, temperature=temperature)
    shares = knn_votes(*train, images, 2, k=7, temperature=temperature)[:, 1]
    fit = fit_linear(*train, 2, l2=rows[1]["l2"])
    for row, scores in zip(rows, (shares, fit(images).softmax(1)[:, 1]), strict=True):
        bad, good = scores[labels == 1][:, None], scores[labels == 0][None]
        assert row["auroc"] == pytest.approx(float(((bad > good) + 0.5 * (bad == good)).double().mean()), abs=1e-6)
        right = (scores > 0.5) == (labels == 1)
        assert row["top1"] == pytest.approx(float(right.double().mean()))
        balanced = (right[labels == 1].double().mean() + right[labels == 0].double().mean()) / 2
        assert row["balanced_accuracy"] == pytest.approx(float(balanced))
        assert row["top5"] is None
    assert 0.5 < rows[0]["auroc"] < 1
    assert rows[0]["nll"] is None
    assert rows[1]["nll"] == pytest.approx(float(nn.functional.cross_entropy(fit(images), labels)), rel=1e-3)


def test_small_shares_of_votes_keep_their_rank() -> None:
    train = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0, 1, 1])
    images = torch.tensor([[1.0, 0.0], [1.0, 0.1]])  # class 1 has shares of about e^-20 and e^-18
    row = probe_features(train, (images, torch.tensor([0, 1])), 2, k=4, temperature=0.05)[0]
    assert row["auroc"] == 1


def test_unlabelled_images_of_a_split_are_refused() -> None:
    features, labels = blobs([5, 5], 5, 1.0)
    for one, other in ((labels, labels - 1), (labels - 1, labels)):
        with pytest.raises(ValueError, match=r"labels hold -1, .* a probe needs splits with labels"):
            probe_features((features, one), (features, other), 2, k=3)


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}])
def test_features_are_those_of_a_forward_pass_without_dropout(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    noisy = {"proj_drop_rate": 0.5, "drop_path_rate": 0.5, "drop_rate": 0.5, "num_classes": 0}
    model: Any = vision_rope.create_model("vit_tiny_patch16_224", img_size=16, **TINY, **noisy, **options).train()
    images, labels = torch.randn(5, 3, 16, 24), torch.tensor([0, 1, 2, 1, 0])
    features, its_labels = extract_features(model, [(images[:3], labels[:3]), (images[3:], labels[3:])])
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(its_labels, labels, rtol=0, atol=0)
    model.eval()
    with torch.no_grad():
        tokens = model.forward_features(images)
        expected = model.fc_norm(tokens.mean(1)) if options else tokens[:, 0]
    torch.testing.assert_close(features, expected)
    # A classifier may be trained on them.
    (features * torch.ones(16, requires_grad=True)).sum().backward()


def test_features_that_are_not_finite_are_refused() -> None:
    model: Any = vision_rope.create_model("vit_tiny_patch16_224", img_size=16, num_classes=0, **TINY)
    with torch.no_grad():
        model.norm.bias[3] = torch.nan
    with pytest.raises(ValueError, match=r"not finite .* for 2 of 2 images"):
        extract_features(model, [(torch.randn(2, 3, 16, 16), torch.tensor([0, 1]))])


@pytest.mark.parametrize("task", ["classification", "masked"])
def test_rows_are_those_of_hand_made_features(
    task: str, coloured: Path, two_coloured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure class 28: the crop is in every row."""
    config = make_config(f"folder:{coloured}", task)
    folder = make_run(tmp_path / "run", config, ["blue", "green", "red"])
    model: Any = load_run(folder).model
    backbone = model.encoder if task == "masked" else model
    seen: list[tuple[Tensor, Tensor]] = []
    extract = extract_features

    def note(*words: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(extract(*words, **options))
        return seen[-1]

    monkeypatch.setattr(probing, "extract_features", note)
    for data, size, classes, method in (
        (None, None, 3, "none"),
        (two_coloured, "24x32", 2, "none"),
        (two_coloured, "24x32", 2, "ntk"),
    ):
        rows = probe(folder, data=data and f"folder:{data}", size=size, extend=method, **QUIET)
        vision_rope.set_extension(backbone, method, train_size=(2, 2))
        parts = [
            features_by_hand(backbone, data or coloured, split, (24, 32) if size else 16) for split in ("train", "val")
        ]
        for found, part in zip(seen[-2:], parts, strict=True):
            torch.testing.assert_close(found, part, rtol=1e-4, atol=1e-4)
        expected = probe_features(*parts, classes, k=3)
        for row, wanted in zip(rows, expected, strict=True):
            about = {key: value for key, value in row.items() if key not in wanted}
            assert about == {
                "run": str(folder),
                "task": task,
                "model": "vit_tiny_patch16_224",
                "position": "rope-vit-axial",
                "weights": "best",
                "data": f"folder:{data or coloured}",
                "split_seed": 0,
                "classes": classes,
                "train_images": 10 if data else 18,
                "images": 8 if data else 9,
                "size": size or "16",
                "train_size": "16",
                "method": method,
                "crop_pct": 0.9,
                "seed": 5,
                "features": 16,
            }
            for key, value in wanted.items():
                assert row[key] == (value if key != "gradient" and value is None else pytest.approx(value, abs=1e-4))
    # Extension changes the features, or the last comparison would say nothing.
    vision_rope.set_extension(backbone, "none")
    assert not torch.allclose(parts[0][0], features_by_hand(backbone, two_coloured, "train", (24, 32))[0], atol=1e-4)


@pytest.mark.parametrize("task", ["classification", "masked"])
def test_untrained_weights_are_those_that_training_begins_with(
    task: str, coloured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(f"folder:{coloured}", task)
    folder = make_run(tmp_path / "run", config, ["blue", "green", "red"])
    seen = []
    extract = extract_features

    def note(model: nn.Module, *words: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(model)
        return extract(model, *words, **options)

    monkeypatch.setattr(probing, "extract_features", note)
    rows = probe(folder, weights="best,untrained", **QUIET)
    assert [row["weights"] for row in rows] == ["best", "best", "untrained", "untrained"]
    seed_everything(config.seed)
    start: Any = build_start(config, 3)
    trained: Any = load_run(folder).model
    for found, wanted in ((seen[0], trained), (seen[2], start)):
        backbone = wanted.encoder if task == "masked" else wanted
        torch.testing.assert_close(dict(found.state_dict()), dict(backbone.state_dict()), rtol=0, atol=0)
    before = torch.get_rng_state()
    assert probe(folder, weights=["untrained"], **QUIET) == rows[2:]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.integration
@pytest.mark.parametrize("task", ["classification", "masked"])
def test_trained_runs_end_to_end(task: str, coloured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(f"images:{coloured}" if task == "masked" else f"folder:{coloured}", task)
    config.batch_size = 6
    config.ema_decay = 0.5
    config.schedule = ScheduleConfig(epochs=2, warmup_epochs=0)
    config.augment = AugmentConfig(crop="resize")
    config.run = RunConfig(output=str(tmp_path / "run"), device="cpu", num_workers=0, progress=False, tensorboard=False)
    train(config)
    capsys.readouterr()
    words = f"""probe {tmp_path / "run"} --data folder:{coloured} --k 4 --workers 0 --device cpu --no-progress
        --weights last,ema,untrained"""
    assert cli.main(words.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("weights "))
    assert lines[start].split() == ["weights", "probe", "top-1", "NLL", "ECE", "L2"]
    table = [line.split() for line in lines[start + 1 : start + 7]]
    assert [cells[:2] for cells in table] == [
        [weights, name] for weights in ("last", "ema", "untrained") for name in ("knn", "linear")
    ]
    # Colours are told apart by the patch embedding alone.
    assert all(float(cells[2]) > 0.6 for cells in table)
    rows = json.loads((tmp_path / "run" / "probe" / "probe.json").read_text())
    assert len({row["nll"] for row in rows if row["probe"] == "linear"}) == 3
    assert f"wrote {tmp_path / 'run' / 'probe' / 'probe.csv'}" in lines
    # Timing and figures of the run itself are not touched.
    assert load_yaml(tmp_path / "run" / "config.yaml") == config


def test_files_and_table_hold_the_rows(coloured: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_config(f"folder:{coloured}"), ["blue", "green", "red"])
    rows = probe(folder, **QUIET)
    paths = write_probe(rows, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["probe.csv", "probe.json"]
    assert json.loads(paths[1].read_text()) == rows
    with paths[0].open(newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    table = format_probe(rows)
    for fact in ("crop pct", "train images", "split seed", "temperature", "method"):
        assert f"\n{fact:<13}" in table
    assert "NOT AT THE OPTIMUM" not in table
    rows[1]["gradient"] = 0.02
    assert format_probe(rows).endswith("NOT AT THE OPTIMUM: the linear probe of best stopped with a gradient of 0.02")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "untrain"}, r"weights is 'untrain', .*did you mean 'untrained'"),
        ({"weights": []}, "weights is empty"),
        ({"weights": "last"}, "holds no last weights"),
        ({"weights": "best,ema"}, "holds no ema weights"),
        ({"k": 0}, "k is 0"),
        ({"k": 19}, "k is 19, but folder:.* has only 18 training images"),
        ({"temperature": 0.0}, r"temperature is 0\.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"size": "20"}, "size 20 is not divisible by the patch size 8; .* 16 and 24"),
        ({"size": "big"}, "size is 'big'"),
        ({"size": "32", "extend": "interpolat"}, "did you mean 'interpolate'"),
        ({"size": "32", "extend": "pitch"}, "pitch means nothing for"),
        ({"size": "16", "extend": "ntk"}, "at the training size 16 no method changes anything"),
        ({"data": "images:PICTURES"}, r"has 1 class \(image\), but a probe needs labels of at least two"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    arguments: dict[str, Any], message: str, coloured: Path, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", make_config(f"folder:{coloured}"), ["blue", "green", "red"])
    if "data" in arguments:
        arguments = {"data": arguments["data"].replace("PICTURES", str(coloured))}
    with pytest.raises(ValueError, match=message):
        probe(folder, **{**QUIET, **arguments})


def test_folders_without_a_run_and_more_neighbours_than_features_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run folder"):
        probe(tmp_path, **QUIET)
    with pytest.raises(ValueError, match="k is 5, but there are only 4 training images"):
        knn_votes(torch.randn(4, 2), torch.zeros(4, dtype=torch.long), torch.randn(1, 2), 2, k=5)
    with pytest.raises(ValueError, match="l2 is 0, but it must be positive"):
        fit_linear(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), 2, l2=0)


def test_several_processes_are_refused(coloured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def two(device: str) -> Iterator[Distributed]:
        yield Distributed(torch.device("cpu"), rank=1, world_size=2)

    monkeypatch.setattr(probing, "distributed", two)
    folder = make_run(tmp_path / "run", make_config(f"folder:{coloured}"), ["blue", "green", "red"])
    with pytest.raises(ValueError, match=r"started as 2 processes.*without torchrun"):
        probe(folder, **QUIET)


def test_extension_counts_from_the_largest_trained_size(
    two_coloured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(f"folder:{two_coloured}")
    config.data.train_sizes = ["16", "24x16"]
    folder = make_run(tmp_path / "run", config, ["green", "red"])
    seen = []
    set_extension = vision_rope.set_extension
    monkeypatch.setattr(
        vision_rope,
        "set_extension",
        lambda model, method, train_size: seen.append(set_extension(model, method, train_size).extension),
    )
    rows = probe(folder, size="32", extend="ntk", **QUIET)
    assert seen == [("ntk", (3, 2), {})]
    assert {(row["size"], row["train_size"]) for row in rows} == {("32", "24x16")}
    assert {row["size"] for row in probe(folder, **QUIET)} == {"16"}
