"""Sweeps over sizes and methods: figures against direct forward passes, files read back, mistakes named."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import vision_rope
from vision_rope import plots
from vision_rope.checkpoint import build_model, save_weights
from vision_rope.config import DataConfig, EvaluationConfig, MaskedConfig, ModelConfig, TrainConfig, to_yaml
from vision_rope.data import create_loader, eval_transform, open_dataset
from vision_rope.data.randomness import derive_seed
from vision_rope.evaluate import evaluate, sweep
from vision_rope.extension import EXTENSIONS
from vision_rope.masked_model import MaskedModel, create_decoder
from vision_rope.masking import draw_masks, patchify
from vision_rope.measure import measure
from vision_rope.metrics import ClassificationMetrics
from vision_rope.results import format_table, write_results
from vision_rope.sizes import check_sizes, parse_size, parse_sizes
from vision_rope.tasks import Classification, MaskedPrediction

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
NORM = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


class Pictures:
    """Eleven random pictures of three classes in two shapes, in memory."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        shape = (3, 40, 50) if index % 2 else (3, 60, 40)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator), index % 3


def tiny_model(position: str = "rope-vit-axial", num_classes: int = 3) -> nn.Module:
    torch.manual_seed(1)
    model = vision_rope.create_model("vit_tiny_patch16_224", position, num_classes=num_classes, **TINY)
    # Fresh position embeddings and heads are so small that every size would give the same answers.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def swept(model: nn.Module, dataset: object, **changes: object) -> list[dict]:
    options: dict = {
        "sizes": [(32, 32), (48, 32), (64, 64)],
        "methods": ["none", "interpolate", "ntk", "yarn"],
        "train_size": (32, 32),
        "patch_size": (8, 8),
        "device": torch.device("cpu"),
        "batch_size": 4,
        "num_workers": 0,
        "progress": False,
        **NORM,
        **changes,
    }
    return sweep(model, dataset, **options)


@pytest.fixture(scope="session")
def imagenette(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six training and four validation photographs of each of seven classes."""
    folder = tmp_path_factory.mktemp("imagenette")
    taken: Counter[str] = Counter()
    with tarfile.open(shared_data / "imagenette224_small.tar") as tar:
        for member in tar:
            group = member.name.rpartition("/")[0]
            if member.isfile() and taken[group] < (6 if group.startswith("train") else 4):
                taken[group] += 1
                tar.extract(member, folder, filter="data")
    return folder


@pytest.mark.parametrize(
    ("text", "size"), [("224", (224, 224)), ("192x256", (192, 256)), (" 64 ", (64, 64)), ("8 x 16", (8, 16))]
)
def test_sizes_are_rows_by_columns(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "64x", "-64", "64.0", "64x64x3", "0", "64x0", "large"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be one number .* or rows x columns") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_lists_of_sizes() -> None:
    assert parse_sizes("64,96,192x256,64") == [(64, 64), (96, 96), (192, 256)]
    assert parse_sizes(["64", "8x16"]) == [(64, 64), (8, 16)]
    with pytest.raises(ValueError, match="size is ''"):
        parse_sizes("64,")
    with pytest.raises(ValueError, match="sizes is empty"):
        parse_sizes([])


@pytest.mark.parametrize(
    ("size", "nearest"),
    [((79, 79), "64 and 80"), ((222, 222), "208 and 224"), ((79, 96), "64x96 and 80x96"), ((9, 9), "are 16$")],
)
def test_sizes_that_the_patch_does_not_divide_are_refused_with_the_nearest(size: tuple[int, int], nearest: str) -> None:
    """Failure class 17."""
    with pytest.raises(ValueError, match=f"not divisible by the patch size 16; .* {nearest}"):
        check_sizes([(64, 64), size], (16, 16))


def test_wrong_sizes_and_methods_are_refused_before_any_image_is_read() -> None:
    """Failure class 17."""

    class Untouchable(Pictures):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise AssertionError("an image was read")

    with pytest.raises(ValueError, match="size 79 is not divisible"):
        swept(tiny_model(), Untouchable(), sizes=[(64, 64), (79, 79)])
    with pytest.raises(ValueError, match=r"'interpolat'.*did you mean 'interpolate'"):
        swept(tiny_model(), Untouchable(), methods=["interpolat"])


def test_measure_equals_direct_forward_passes_and_keeps_the_mode() -> None:
    model = tiny_model().train()
    dataset = Pictures()
    loader = create_loader(
        dataset, batch_size=4, transform=eval_transform((32, 48)), device="cpu", training=False, num_workers=0, **NORM
    )
    row = measure(model, loader, Classification(3))
    assert model.training
    assert all(module.training for module in model.modules())

    metrics = ClassificationMetrics(3)
    with torch.no_grad():
        for images, labels in loader:
            metrics.update(model.eval()(images), labels)
    assert {key: row[key] for key in metrics.compute()} == metrics.compute()
    assert row["images"] == 11
    assert row["images_per_second"] > 0

    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        measure(model.train(), loader, Classification(3))
    assert model.training


PEAKS = """
import json, torch
from torch import nn
from vision_rope.measure import measure
from vision_rope.tasks import Classification

class Hungry(nn.Module):
    def __init__(self, megabytes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.megabytes = megabytes

    def forward(self, x):
        torch.ones(self.megabytes * 250_000).sum()
        return torch.zeros(len(x), 2)

batches = [(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))]
print(json.dumps([measure(Hungry(size), batches, Classification(2))["peak_memory_mb"] for size in (200, 0, 200)]))
"""


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux alone")
def test_peak_memory_is_that_of_the_forward_pass() -> None:
    """In a process of its own: after other tests the heap may hold 200 MB that nobody uses and that are resident."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    if peaks[0] is None:
        pytest.skip("this kernel does not let a process reset its peak")
    assert peaks[0] - peaks[1] == pytest.approx(200, abs=40)
    assert peaks[2] - peaks[1] == pytest.approx(200, abs=40)


def test_every_row_equals_a_direct_evaluation_with_that_method_at_that_size() -> None:
    model, dataset = tiny_model(), Pictures()
    rows = swept(model, dataset)
    assert [(row["size"], row["method"]) for row in rows] == [
        (size, method) for size in ("32", "48x32", "64") for method in ("none", "interpolate", "ntk", "yarn")
    ]
    figures = set()
    for row in rows:
        loader = create_loader(
            dataset,
            batch_size=11,
            transform=eval_transform((row["height"], row["width"])),
            device="cpu",
            training=False,
            num_workers=0,
            **NORM,
        )
        fresh = vision_rope.set_extension(tiny_model(), row["method"], train_size=(4, 4)).eval()
        expected = measure(fresh, loader, Classification(3))
        assert row["nll"] == pytest.approx(expected["nll"], rel=1e-5)
        assert row["top1"] == expected["top1"]
        assert row["per_class"] == dict(zip("abc", expected["per_class"], strict=True))
        figures.add((row["size"], round(row["nll"], 6)))
    # One figure at the training size, where no method changes anything; others differ by method.
    assert len([size for size, _ in figures if size == "32"]) == 1
    assert len([size for size, _ in figures if size == "64"]) == 4


def test_crop_fraction_is_in_every_row_of_every_table(tmp_path: Path) -> None:
    """Failure class 28."""
    rows = swept(tiny_model(), Pictures(), crop_pct=0.875, methods=["pitch", "ntk"])
    assert {row["crop_pct"] for row in rows} == {0.875}
    assert {row["crop"] for row in rows} == {"resized to cover size / 0.875, centre crop, bicubic"}
    table = format_table(rows).split("\n\n")[1].splitlines()
    assert table[0].split()[:3] == ["size", "method", "crop_pct"]
    assert {line.split()[2] for line in table[1:]} == {"0.875"}
    write_results(rows, tmp_path)
    with (tmp_path / "evaluation.csv").open(newline="") as file:
        assert {row["crop_pct"] for row in csv.DictReader(file)} == {"0.875"}


def test_crop_fraction_changes_what_is_seen() -> None:
    whole, part = (swept(tiny_model(), Pictures(), sizes=[(32, 32)], crop_pct=crop)[0]["nll"] for crop in (1.0, 0.5))
    assert whole != pytest.approx(part, rel=1e-3)


@pytest.mark.parametrize(
    ("position", "meaningful"),
    [
        ("learned", []),
        ("none", []),
        ("rope-vit-mixed", ["interpolate", "llama3"]),
        ("dinov3", ["pitch"]),
        ("rope-vit-axial", ["interpolate", "ntk", "dynamic-ntk", "ntk-by-parts", "yarn", "llama3", "base"]),
    ],
)
def test_a_method_without_meaning_shows_its_reason_in_its_row(position: str, meaningful: list[str]) -> None:
    methods = [method for method in EXTENSIONS if method != "none"]
    rows = swept(tiny_model(position), Pictures(), sizes=[(48, 32)], methods=methods)
    assert [row["method"] for row in rows] == ["none", *methods]
    meaningless = set(methods) - set(meaningful)
    table = format_table(rows)
    for row in rows:
        assert (row["reason"] is not None) == (row["method"] in meaningless)
        assert (row["nll"] is None) == (row["per_class"] is None) == (row["method"] in meaningless)
        if row["reason"]:
            assert f"{row['method']} means nothing" in row["reason"]
            assert row["reason"] in table


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_without_extension_and_in_its_mode(fails: bool) -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index == 9:
                raise OSError("picture 9 is broken")
            return super().__getitem__(index)

    model = tiny_model().train()
    if fails:
        with pytest.raises(OSError, match="picture 9"):
            swept(model, Broken())
    else:
        swept(model, Pictures())
    assert model.training
    assert model.extension is None


def test_learned_absolute_positions_are_resampled_as_timm_does() -> None:
    model, dataset = tiny_model("learned"), Pictures()
    twin = timm.create_model("vit_tiny_patch16_224", num_classes=3, dynamic_img_size=True, **TINY).eval()
    twin.load_state_dict(model.state_dict())
    sizes = [(32, 32), (64, 48)]
    ours, theirs = swept(model, dataset, sizes=sizes), swept(twin, dataset, sizes=sizes, methods=["none"])
    ours = [row for row in ours if row["method"] == "none"]
    assert [row["nll"] for row in ours] == pytest.approx([row["nll"] for row in theirs], rel=1e-6)
    assert ours[0]["nll"] != pytest.approx(ours[1]["nll"], rel=1e-3)


def test_a_timm_model_of_a_fixed_size_is_refitted_and_left_as_it_was() -> None:
    torch.manual_seed(1)
    fixed = timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY)
    dynamic = timm.create_model("vit_tiny_patch16_224", num_classes=3, dynamic_img_size=True, **TINY)
    dynamic.load_state_dict(fixed.state_dict())
    before = fixed.pos_embed.clone()
    rows, expected = (swept(model, Pictures(), methods=["none"]) for model in (fixed, dynamic))
    assert [row["nll"] for row in rows] == pytest.approx([row["nll"] for row in expected], rel=1e-6)
    torch.testing.assert_close(fixed.pos_embed, before, rtol=0, atol=0)


def test_files_hold_the_rows(tmp_path: Path) -> None:
    class TwoOfThree(Pictures):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            image, label = super().__getitem__(index)
            return image, label % 2

    rows = swept(tiny_model("rope-vit-mixed"), TwoOfThree(), about={"model": "tiny, with a comma", "weights": "best"})
    paths = write_results(rows, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["evaluation.csv", "evaluation.json", "per_class.csv", "evaluation.png"]

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(paths[1].read_text(), parse_constant=refuse) == rows
    assert rows[0]["per_class"]["c"] is None

    with paths[0].open(newline="") as file:
        read = list(csv.DictReader(file))
    flat = [{key: value for key, value in row.items() if key != "per_class"} for row in rows]
    assert read == [{key: "" if value is None else str(value) for key, value in row.items()} for row in flat]

    with paths[2].open(newline="") as file:
        read = list(csv.DictReader(file))
    expected = [
        {"size": row["size"], "method": row["method"], "class": name, "accuracy": "" if share is None else str(share)}
        for row in rows
        if row["per_class"]
        for name, share in row["per_class"].items()
    ]
    assert read == expected
    assert paths[3].read_bytes().startswith(b"\x89PNG")


def test_two_classes_have_auroc_and_one_class_alone_leaves_it_empty() -> None:
    class Two(Pictures):
        classes = ("good", "bad")

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            image, label = super().__getitem__(index)
            return image, min(label, 1)

    class One(Two):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return super().__getitem__(index)[0], 1

    row = swept(tiny_model(num_classes=2), Two(), sizes=[(32, 32)], methods=["none"])[0]
    assert 0 <= row["auroc"] <= 1
    assert "AUROC" in format_table([row])
    assert "top5" not in row
    assert swept(tiny_model(num_classes=2), One(), sizes=[(32, 32)], methods=["none"])[0]["auroc"] is None


def make_run(folder: Path, source: str, classes: list[str], position: str = "rope-vit-axial") -> TrainConfig:
    config = TrainConfig(
        seed=5,
        model=ModelConfig("vit_tiny_patch16_224", position, options={k: v for k, v in TINY.items() if k != "img_size"}),
        data=DataConfig(source=source, size=32, mean=(0.4, 0.4, 0.4)),
        evaluation=EvaluationConfig(crop_pct=0.9, sizes=["32", "32x48"], extend=["ntk"]),
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    model = build_model(config, len(classes))
    save_weights(folder / "best.safetensors", model.state_dict(), {"classes": classes})
    return config


def test_a_run_folder_brings_its_data_sizes_and_settings(imagenette: Path, tmp_path: Path) -> None:
    classes = open_dataset(f"folder:{imagenette}", "train").classes
    folder = tmp_path / "run"
    make_run(folder, f"folder:{imagenette}", classes)
    rows, paths = evaluate(folder, num_workers=0, device="cpu", progress=False)
    assert [(row["size"], row["method"]) for row in rows] == [
        ("32", "none"),
        ("32", "ntk"),
        ("32x48", "none"),
        ("32x48", "ntk"),
    ]
    assert {path.parent for path in paths} == {folder / "evaluation"}
    facts = {key: rows[0][key] for key in ("crop_pct", "seed", "train_size", "weights", "position", "images")}
    assert facts == {
        "crop_pct": 0.9,
        "seed": 5,
        "train_size": "32",
        "weights": "best",
        "position": "rope-vit-axial",
        "images": 28,
    }
    rows, paths = evaluate(
        folder,
        data=f"folder:{imagenette}",
        split="train",
        sizes="64",
        extend="yarn",
        crop_pct=1.0,
        output=tmp_path / "out",
        num_workers=0,
        device="cpu",
        progress=False,
    )
    assert [(row["size"], row["method"], row["images"], row["crop_pct"]) for row in rows] == [
        ("64", "none", 42, 1.0),
        ("64", "yarn", 42, 1.0),
    ]
    assert {path.parent for path in paths} == {tmp_path / "out"}


def test_other_data_is_normalised_as_in_the_run(imagenette: Path, tmp_path: Path) -> None:
    source = f"folder:{imagenette}"
    make_run(tmp_path / "run", source, open_dataset(source, "train").classes)
    own, other = (
        evaluate(tmp_path / "run", data=data, sizes="32", num_workers=0, device="cpu", progress=False)[0][0]
        for data in (None, f"{source}/.")
    )
    assert own["data"] != other["data"]
    assert own["nll"] == other["nll"]


def test_data_of_other_classes_is_refused(imagenette: Path, tmp_path: Path) -> None:
    source = f"folder:{imagenette}"
    classes = open_dataset(source, "train").classes
    make_run(tmp_path / "fewer", source, classes[:-1])
    with pytest.raises(ValueError, match="tells 6 classes apart, but the data has 7"):
        evaluate(tmp_path / "fewer", num_workers=0, progress=False)
    make_run(tmp_path / "other", source, classes[::-1])
    with pytest.raises(ValueError, match=f"'{classes[-1]}' there is '{classes[0]}' here"):
        evaluate(tmp_path / "other", num_workers=0, progress=False)


def test_timms_own_rope_model_is_evaluated_and_methods_give_their_reason(
    imagenette: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, paths = evaluate(
        "vit_small_patch16_rope_224",
        data=f"folder:{imagenette}",
        sizes="32,32x48",
        extend=["ntk"],
        model_options=TINY,
        num_workers=0,
        device="cpu",
        progress=False,
    )
    assert [row["reason"] is None for row in rows] == [True, False, True, False]
    assert rows[0]["position"] == "timm's own"
    assert rows[0]["train_size"] == "32"
    assert "top5" in rows[0]
    assert format_table(rows).startswith("UNTRAINED WEIGHTS")
    assert paths[0].resolve().parent == tmp_path / "evaluation-vit_small_patch16_rope_224"


def test_checkpoints_of_timms_model_and_of_the_converted_one(imagenette: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)
    save_weights(tmp_path / "timm.safetensors", model.state_dict(), {})
    converted = vision_rope.add_position(model, "rope-vit-axial")
    save_weights(tmp_path / "converted.safetensors", converted.state_dict(), {})

    def nll(position: str | None, checkpoint: str | None) -> float:
        rows, _ = evaluate(
            "vit_tiny_patch16_224",
            data=f"folder:{imagenette}",
            sizes="32",
            position=position,
            checkpoint=None if checkpoint is None else tmp_path / checkpoint,
            model_options=TINY,
            output=tmp_path / "out",
            num_workers=0,
            device="cpu",
            progress=False,
        )
        assert ("UNTRAINED" in format_table(rows)) == (checkpoint is None)
        return rows[0]["nll"]

    assert nll("rope-vit-axial", "timm.safetensors") == nll("rope-vit-axial", "converted.safetensors")
    assert nll(None, "timm.safetensors") != nll("rope-vit-axial", "timm.safetensors")
    assert nll(None, None) == nll(None, None) != nll(None, "timm.safetensors")
    with pytest.raises(ValueError, match="does not fit the model"):
        nll(None, "converted.safetensors")


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("vit_small_patch16_rope_225", {"data": "elpv"}, "nearest timm model is vit_small_patch16_rope_224"),
        ("vit_tiny_patch16_224", {}, "needs data"),
        ("vit_tiny_patch16_224", {"data": "elpv", "weights": "last"}, "weights is 'last'"),
        ("vit_tiny_patch16_224", {"data": "elpv", "crop_pct": 87.5}, "crop_pct is 87.5"),
        ("vit_tiny_patch16_224", {"data": "elpv", "batch_size": 0}, "batch_size is 0"),
        ("vit_tiny_patch16_224", {"data": "elpv", "sizes": "big"}, "size is 'big'"),
        ("vit_tiny_patch16_224", {"data": "elpv", "extend": "nkt"}, "did you mean 'ntk'"),
        ("vit_tiny_patch16_224", {"data": "elpv", "pretrained": True, "checkpoint": "a"}, "exclude each other"),
        (".", {"data": "elpv"}, "holds no config.yaml"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(target: str, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(target, device="cpu", num_workers=0, progress=False, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"position": "sam2"}, {"pretrained": True}, {"checkpoint": "a"}, {"model_options": {"depth": 1}}, {"seed": 1}],
)
def test_a_run_folder_takes_no_arguments_of_timm_models(tmp_path: Path, arguments: dict) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ValueError, match="is a run folder, which has its own"):
        evaluate(tmp_path, **arguments)


def test_options_of_timm_models_are_checked(imagenette: Path) -> None:
    for options, message in (({"depht": 2}, "cannot be built"), ({"num_classes": 3}, "comes from the data")):
        with pytest.raises(ValueError, match=message):
            evaluate("vit_tiny_patch16_224", data=f"folder:{imagenette}", model_options=options, device="cpu")


def sweep_in_two_processes(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = swept(tiny_model(), Pictures(), rank=rank, world_size=2, batch_size=2)
    masked = swept(masked_model("visible"), Pictures(), task=masked_task(), rank=rank, world_size=2, batch_size=2)
    # A rank without a single image takes part too.
    metrics = ClassificationMetrics(2)
    if rank == 0:
        metrics.update(torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]]), torch.tensor([0, 1, 1]))
    Path(folder, f"{rank}.json").write_text(json.dumps([rows, masked, metrics.compute()]))
    torch.distributed.destroy_process_group()


@pytest.mark.integration
def test_two_processes_count_each_of_eleven_images_once(tmp_path: Path) -> None:
    """Failure class 25."""
    torch.multiprocessing.spawn(sweep_in_two_processes, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    (first, masked, metrics), second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert [first, masked, metrics] == second
    assert metrics["images"] == 3
    assert metrics["auroc"] == 1.0
    # The same images a forward pass as in two processes, since other batches round differently.
    single = swept(tiny_model(), Pictures(), batch_size=1)
    assert len(single) == len(first)
    for one, two in zip(single, first, strict=True):
        for key in one:
            if key not in ("images_per_second", "peak_memory_mb"):
                assert two[key] == (pytest.approx(one[key], rel=1e-12) if key in ("nll", "ece") else one[key]), key
    single = swept(masked_model("visible"), Pictures(), task=masked_task(), batch_size=1)
    assert [row["images"] for row in masked] == [11] * len(single)
    assert [row["r2"] for row in masked] == pytest.approx([row["r2"] for row in single], rel=1e-5)
    assert [row["mse"] for row in masked] == pytest.approx([row["mse"] for row in single], rel=1e-5)


# ---- masked prediction


def masked_model(kind: str = "all", position: str = "rope-vit-axial") -> MaskedModel:
    encoder = tiny_model(position, num_classes=0)
    decoder = None
    if kind == "visible":
        decoder = create_decoder(encoder, position=position, dim=16, depth=1, num_heads=1)
    model = MaskedModel(encoder, decoder)
    # Answers of about the size of pixels, and other ones at every size and with every method.
    nn.init.normal_(model.head.weight, std=0.1)
    return model


def masked_task(seed: int = 0, **options: object) -> MaskedPrediction:
    return MaskedPrediction(MaskedConfig(**options), (8, 8), seed=seed, **NORM)  # type: ignore[arg-type]


class Watched(MaskedModel):
    """Keeps what it is asked."""

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        self.__dict__.setdefault("seen", []).append((masks.clone(), self.encoder.extension, images.shape))
        return super().forward(images, masks)


@pytest.mark.parametrize("kind", ["all", "visible"])
def test_every_masked_row_equals_r2_by_hand(kind: str) -> None:
    model, dataset = masked_model(kind), Pictures()
    rows = swept(model, dataset, task=masked_task(), sizes=[(32, 32), (48, 64)], methods=["interpolate", "yarn"])
    assert model.encoder.extension is None
    assert [(row["size"], row["method"]) for row in rows] == [
        (size, method) for size in ("32", "48x64") for method in ("none", "interpolate", "yarn")
    ]
    figures = set()
    for row in rows:
        size = (row["height"], row["width"])
        error = reference = count = 0.0
        vision_rope.set_extension(model, row["method"], train_size=(4, 4)).eval()
        resize = eval_transform(size)
        for index in range(11):
            image = (resize(dataset[index][0]).float() / 255 - 0.5) / 0.25
            masks = masked_task().eval_batch(image[None], torch.zeros(1), torch.tensor([index])).inputs[1]
            with torch.no_grad():
                predicted = model(image[None], masks)[0]
            wanted = patchify(image[None], (8, 8))[0]
            hidden = masks.flatten()
            error += float((predicted - wanted)[hidden].double().square().sum())
            reference += float(wanted[hidden].double().square().sum())
            count += int(hidden.sum()) * 192
        assert row["r2"] == pytest.approx(1 - error / reference, rel=1e-4)
        assert row["mse"] == pytest.approx(error / count, rel=1e-5)
        assert row["images"] == 11
        assert row["per_class"] is None
        assert "top1" not in row
        figures.add((row["size"], row["mse"]))
    assert len([size for size, _ in figures if size == "32"]) == 1
    assert len([size for size, _ in figures if size == "48x64"]) == 3


def test_all_methods_and_all_runs_are_judged_by_the_same_masks() -> None:
    """Other encodings, batches, weights and training seeds change nothing about which patches are hidden."""
    seen: dict[tuple, set[bytes]] = {}
    for position, batch_size, seed in (("rope-vit-axial", 4, 0), ("none", 11, 5), ("dinov3", 1, 7)):
        model = Watched(tiny_model(position, num_classes=0))
        torch.manual_seed(seed)
        swept(model, Pictures(), task=masked_task(), batch_size=batch_size, seed=seed, sizes=[(32, 32), (48, 32)])
        for size in ((32, 32), (48, 32)):
            asked = [(masks, extension) for masks, extension, shape in model.seen if shape[2:] == size]
            # The first batch is seen once more, before time is taken.
            del asked[0]
            for method in {None if extension is None else extension[0] for _, extension in asked}:
                masks = torch.cat([m for m, extension in asked if (extension and extension[0]) == method])
                assert len(masks) == 11
                assert len(masks.flatten(1).unique(dim=0)) == 11
                seen.setdefault((size, method), set()).add(masks.numpy().tobytes())
    assert {method for _, method in seen} == {None, "interpolate", "ntk", "yarn"}
    for size in ((32, 32), (48, 32)):
        everything = set().union(*(masks for (own, _), masks in seen.items() if own == size))
        assert len(everything) == 1


def test_masked_rows_with_a_reason_have_no_figures_and_files_no_classes(tmp_path: Path) -> None:
    rows = swept(masked_model("visible", "none"), Pictures(), task=masked_task(), methods=["ntk"])
    assert [row["reason"] is None for row in rows] == [True, False] * 3
    assert [row["r2"] is None for row in rows] == [False, True] * 3
    table = format_table(rows)
    assert table.splitlines()[-7].split() == ["size", "method", "crop_pct", "R2", "MSE", "images/s", "MB"]
    paths = write_results(rows, tmp_path)
    assert [path.name for path in paths] == ["evaluation.csv", "evaluation.json", "evaluation.png"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}
    with paths[0].open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["r2"] for line in read] == ["" if row["r2"] is None else str(row["r2"]) for row in rows]
    assert json.loads(paths[1].read_text()) == rows


def test_images_of_the_mean_colour_have_no_r2_but_an_error() -> None:
    class Grey(Pictures):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.full((3, 40, 40), 51, dtype=torch.uint8), 0

    model = MaskedModel(tiny_model(num_classes=0))
    row = swept(model, Grey(), task=masked_task(), methods=[], sizes=[(32, 32)], mean=(0.2, 0.2, 0.2))[0]
    assert (row["r2"], row["mse"]) == (None, 0)


def make_masked_run(folder: Path, **changes: object) -> TrainConfig:
    """A run of masked prediction on 12 pictures without labels, of which 6 are validated by."""
    for index in range(12):
        path = folder / "pictures" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        noise = torch.randint(256, (40, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        Image.fromarray(noise.numpy()).save(path)
    config = TrainConfig(
        task="masked",
        model=ModelConfig(
            "vit_tiny_patch16_224", "rope-vit-axial", options={k: v for k, v in TINY.items() if k != "img_size"}
        ),
        data=DataConfig(source=f"images:{folder / 'pictures'}", size=32, val_fraction=0.5, split_seed=2),
        masked=MaskedConfig(**{"encoder": "visible", "block": 2, **changes}),  # type: ignore[arg-type]
        evaluation=EvaluationConfig(sizes=["32", "32x48"], extend=["ntk"], max_images=4),
    )
    torch.manual_seed(0)
    model = build_model(config, 1)
    nn.init.normal_(model.head.weight, std=0.1)  # type: ignore[union-attr, arg-type]
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(to_yaml(config))
    save_weights(folder / "run" / "best.safetensors", model.state_dict(), {"classes": ["image"]})
    return config


def test_a_masked_run_is_evaluated_with_pictures_and_so_many_images(tmp_path: Path) -> None:
    make_masked_run(tmp_path)
    options: dict = {"num_workers": 0, "device": "cpu", "progress": False}
    rows, paths = evaluate(tmp_path / "run", **options)
    names = ["evaluation.csv", "evaluation.json", "evaluation.png", "reconstruction-32.png", "reconstruction-32x48.png"]
    assert [path.name for path in paths] == names
    assert {path.parent for path in paths} == {tmp_path / "run" / "evaluation"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[2:])
    assert [(row["size"], row["method"], row["images"]) for row in rows] == [
        (size, method, 4) for size in ("32", "32x48") for method in ("none", "ntk")
    ]
    assert {row["masked"] for row in rows} == {"0.5 of the patches, block 2, target pixels"}
    assert "0.5 of the patches, block 2, target pixels" in format_table(rows)

    again, _ = evaluate(tmp_path / "run", **options, batch_size=1, sizes="32", output=tmp_path / "again")
    assert [row["r2"] for row in again] == pytest.approx([row["r2"] for row in rows[:2]], rel=1e-5)
    all_of_them, _ = evaluate(tmp_path / "run", **options, max_images=100, sizes="32", output=tmp_path / "more")
    assert [row["images"] for row in all_of_them] == [6, 6]
    assert all_of_them[0]["r2"] != pytest.approx(rows[0]["r2"], rel=1e-5)
    with pytest.raises(ValueError, match="max_images is 0, but it must be at least 1"):
        evaluate(tmp_path / "run", **options, max_images=0)


def test_extension_counts_from_the_largest_trained_size(tmp_path: Path) -> None:
    config = make_masked_run(tmp_path)
    config.data.train_sizes = ["32", "48x40", "16"]
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    rows, _ = evaluate(tmp_path / "run", sizes="48x40,64", num_workers=0, device="cpu", progress=False)
    figures = {(row["size"], row["method"]): row["r2"] for row in rows}
    assert {row["train_size"] for row in rows} == {"48x40"}
    assert figures["48x40", "ntk"] == figures["48x40", "none"]
    assert figures["64", "ntk"] != figures["64", "none"]


def test_a_masked_run_takes_data_of_any_classes(tmp_path: Path) -> None:
    make_masked_run(tmp_path)
    for label in ("a", "b"):
        (tmp_path / "other" / label).mkdir(parents=True)
        for index in range(4):
            shutil.copy(tmp_path / "pictures" / f"{index}.png", tmp_path / "other" / label)
    rows, _ = evaluate(
        tmp_path / "run", data=f"folder:{tmp_path / 'other'}", sizes="32", num_workers=0, device="cpu", progress=False
    )
    assert rows[0]["images"] == 2
    assert rows[0]["r2"] is not None


def test_a_picture_shows_each_method_on_the_first_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_masked_run(tmp_path, block=1)
    drawn: dict[str, dict[str, Tensor]] = {}
    monkeypatch.setattr(plots, "plot_images", lambda lines, path: drawn.update({Path(path).stem: dict(lines)}))
    evaluate(tmp_path / "run", num_workers=0, device="cpu", progress=False, batch_size=3)
    assert list(drawn) == ["reconstruction-32", "reconstruction-32x48"]
    lines = drawn["reconstruction-32x48"]
    assert list(lines) == ["image", "visible", "none", "ntk"]
    assert {line.shape for line in lines.values()} == {(3, 3, 32, 48)}
    for index, place in enumerate(range(3)):
        generator = torch.Generator().manual_seed(derive_seed(config.data.split_seed, place))
        hidden = draw_masks(1, (4, 6), ratio=0.5, generator=generator)[0]
        hidden = hidden.repeat_interleave(8, 0).repeat_interleave(8, 1).expand(3, -1, -1)
        for name in ("visible", "none", "ntk"):
            assert torch.equal(lines[name][index][~hidden], lines["image"][index][~hidden])
            assert not torch.allclose(lines[name][index][hidden], lines["image"][index][hidden], atol=0.05)
    assert not torch.equal(lines["none"], lines["ntk"])
    # At the training size no method changes anything.
    assert torch.equal(drawn["reconstruction-32"]["none"], drawn["reconstruction-32"]["ntk"])


def test_max_images_of_a_timm_model(imagenette: Path, tmp_path: Path) -> None:
    rows, _ = evaluate(
        "vit_tiny_patch16_224",
        data=f"folder:{imagenette}",
        sizes="32",
        max_images=14,
        model_options=TINY,
        output=tmp_path,
        num_workers=0,
        device="cpu",
        progress=False,
    )
    assert rows[0]["images"] == 14
    # Evenly spread: two of each of the seven classes, so that each has a share of 0, 1/2 or 1.
    assert set(rows[0]["per_class"].values()) <= {0.0, 0.5, 1.0}
