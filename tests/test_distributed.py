"""Devices and precision; two gloo processes against one: DDP runs, divergence on one rank, FSDP2 frequencies."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

import vision_rope
from vision_rope import checkpoint, rope
from vision_rope.config import load_config
from vision_rope.evaluate import evaluate
from vision_rope.losses import masked_loss
from vision_rope.masking import draw_masks
from vision_rope.parallel import Distributed, choose_device, choose_precision, distributed, shard
from vision_rope.trainer import Trainer, TrainingDiverged, train

TRAIN_PY = Path(__file__).resolve().parent.parent / "train.py"
SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 3}


def run_two(worker, *arguments) -> None:
    """Run worker(*arguments) in two processes that find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_enter, (port, worker, arguments), nprocs=2)


def _enter(rank: int, port: int, worker, arguments) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    worker(*arguments)


@pytest.fixture(scope="session")
def cells(tmp_path_factory) -> Path:
    """Real pictures of solar cells: 24 of each class to train on; 21 to validate, which two processes cannot share."""
    from vision_rope.data import open_dataset

    folder = tmp_path_factory.mktemp("cells")
    for split, counts in (("train", (24, 24)), ("val", (11, 10))):
        source = open_dataset("elpv", "train" if split == "train" else "validation")
        for label, count in enumerate(counts):
            (folder / split / str(label)).mkdir(parents=True)
            places = [place for place, own in enumerate(source.labels or []) if own == label]
            for place in places[:count]:
                path = Path(source.path(place))
                shutil.copy(path, folder / split / str(label) / path.name)
    return folder


def words(data: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--data.source", f"folder:{data}", "--data.size", "32", "--batch_size", "12"),
        *("--model.options", "{patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}"),
        *("--model.position", "rope-vit-mixed", "--ema_decay", "0.9", "--augment.erasing", "0.3"),
        *("--schedule.epochs", "3", "--schedule.warmup_epochs", "1", "--optimizer.lr", "5e-3"),
        *("--run.output", str(output), "--run.num_workers", "0", "--run.device", "cpu"),
        *("--run.progress", "false", "--run.tensorboard", "false"),
        *more,
    ]


def read_rows(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"], row["images_per_second"], row["val_per_class"]
    return rows


@pytest.mark.integration
@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_two_processes_train_as_one(cells, tmp_path, accumulate):
    """Failure classes 12, 25 and 30: equal losses and weights, every image measured once, one writer, plain names.

    Three batches an update do not divide the four of an epoch.
    """
    more = [
        "--optimizer.accumulate",
        accumulate,
        "--evaluation.sizes",
        "32,40",
        "--evaluation.extend",
        "none,interpolate",
    ]
    train(load_config(words(cells, tmp_path / "one", *more)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TRAIN_PY)]
    done = subprocess.run(
        [*command, *words(cells, tmp_path / "two", *more)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    one, two = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    assert [row["val_images"] for row in two] == [21, 21, 21]
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=2e-4, nan_ok=True)
    for name in ("best.safetensors", "last/model.safetensors", "last/ema.safetensors"):
        first, second = (checkpoint.load_weights(tmp_path / run / name)[0] for run in ("one", "two"))
        torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-4)
    first, second = (json.loads((tmp_path / run / "evaluation/evaluation.json").read_text()) for run in ("one", "two"))
    for row, other in zip(first, second, strict=True):
        assert (other["size"], other["method"], other["images"]) == (row["size"], row["method"], 21)
        assert other["nll"] == pytest.approx(row["nll"], rel=1e-3)
    assert (tmp_path / "two" / "log.txt").read_text().count("epoch 1/3") == 1
    assert done.stdout.count("epoch 1/3") == 1


def _diverge(arguments: list[str]) -> None:
    with distributed("cpu") as world:
        run = Trainer(load_config(arguments), world)
        loss, steps = run.task.loss, 0

        def poisoned(logits: Tensor, targets: Tensor) -> Tensor:
            nonlocal steps
            steps += 1
            return loss(logits, targets) * (math.nan if world.rank == 1 and steps == 6 else 1.0)

        run.task.loss = poisoned
        with pytest.raises(TrainingDiverged, match="the loss of epoch 2, step 2, is not finite"):
            run.fit()
        assert steps == 6


@pytest.mark.integration
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(cells, tmp_path):
    """Failure class 23."""
    run_two(_diverge, words(cells, tmp_path / "run"))
    assert checkpoint.load_state(tmp_path / "run" / "last" / "state.pt")["epoch"] == 1


def _gradients_of_halves(world: Distributed, encoder: str) -> None:
    """Each rank has half of the images and masks; the mean of both gradients is that of the whole batch."""
    own = ["--task", "masked", "--masked.encoder", encoder, "--model.position", "rope-vit-mixed", "--data.size", "16"]
    options = ["--model.options", "{patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, drop_path_rate: 0.0}"]
    torch.manual_seed(0)
    whole = checkpoint.build_model(load_config([*own, *options]), 1)
    nn.init.normal_(whole.head.weight)
    half = copy.deepcopy(whole)
    parallel = world.wrap(half)
    generator = torch.Generator().manual_seed(1)
    for grid in ((4, 4), (3, 5)):  # another size in the second step
        images = torch.randn(6, 3, 4 * grid[0], 4 * grid[1], generator=generator)
        masks = draw_masks(6, grid, ratio=0.4, generator=generator)
        masked_loss(whole(images, masks), images, masks, (4, 4), "pixels").backward()
        part = slice(world.rank, None, 2)
        masked_loss(parallel(images[part], masks[part]), images[part], masks[part], (4, 4), "pixels").backward()
    for (name, parameter), mine in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-4, atol=1e-5)


def _train_masked(arguments: list[str], folder: str) -> None:
    with distributed("cpu") as world:
        for encoder in ("all", "visible"):
            _gradients_of_halves(world, encoder)
        run = Trainer(load_config(arguments), world)
        seen: list[tuple[list[int], list[int]]] = []
        run.model.register_forward_pre_hook(
            lambda module, inputs: (
                seen.append((list(inputs[0].shape), inputs[1].flatten().tolist())) if module.training else None
            )
        )
        rows = run.fit().rows
        weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
        torch.save((seen, rows, weights), Path(folder, f"{world.rank}.pt"))


@pytest.mark.integration
def test_two_processes_predict_masked_patches_together(cells, tmp_path):
    """Failure classes 12 and 25: equal gradients, sizes, figures and weights on both; each image measured once."""
    more = ["--task", "masked", "--masked.encoder", "visible", "--data.train_sizes", "32,24x40,16", "--schedule.epochs"]
    run_two(_train_masked, words(cells, tmp_path / "run", *more, "2"), str(tmp_path))
    (seen, rows, weights), (others, other_rows, other_weights) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    assert len(seen) == 2 * 4
    assert [shape for shape, _ in seen] == [shape for shape, _ in others], "all ranks have the same sizes"
    assert len({tuple(shape) for shape, _ in seen}) > 1
    assert {shape[0] for shape, _ in seen} == {6}
    assert all(mine != theirs for (_, mine), (_, theirs) in zip(seen, others, strict=True)), "but their own masks"
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
    assert [row["val_images"] for row in rows] == [21, 21]
    assert [row["val_r2"] for row in rows] == [row["val_r2"] for row in other_rows]

    # The figures are those of one process with the same weights.
    rows, _ = evaluate(
        tmp_path / "run", weights="ema", sizes="32", extend="none", num_workers=0, device="cpu", progress=False
    )
    assert rows[0]["images"] == 21
    assert rows[0]["r2"] == pytest.approx(other_rows[-1]["val_r2"], rel=1e-4)


def _build() -> nn.Module:
    torch.manual_seed(0)
    return vision_rope.create_model("vit_small_patch16_224", position="rope-vit-mixed", **SIZES)


def _train_sharded(param_dtype: torch.dtype) -> None:
    """Three steps of a sharded model against a whole one in this process; all ranks see the same images."""
    from torch.distributed.tensor import DTensor

    with distributed("cpu"):
        whole, model = _build(), shard(_build(), param_dtype=param_dtype)
        exact = param_dtype == torch.float32
        seen: list[Tensor] = []
        weights: list[torch.dtype] = []
        outer_rotations = rope.outer_rotations

        def recorded(turns: Tensor, *others: object) -> list[vision_rope.Rotation]:
            seen.append(turns.detach().clone())
            return outer_rotations(turns, *others)

        rope.outer_rotations = recorded
        for block in model.blocks:
            block.attn.qkv.register_forward_pre_hook(lambda part, inputs: weights.append(part.weight.dtype))
        assert isinstance(model.blocks[0].attn.qkv.weight, DTensor)
        assert isinstance(model.position.learned_frequencies, DTensor)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (whole, model)]
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            images = torch.randn(4, 3, 24, 32, generator=generator)
            labels = torch.tensor([0, 1, 2, 0])
            losses, angles_of = [], []
            for part in (whole, model):
                seen.clear()
                weights.clear()
                loss = nn.functional.cross_entropy(part(images).float(), labels)
                loss.backward()
                losses.append(loss.detach())
                (turns,) = seen
                assert len(turns) == SIZES["depth"]
                assert turns.dtype == torch.float32
                angles_of.append(turns)
            assert set(weights) == {param_dtype}
            mine = model.position.learned_frequencies.grad.full_tensor()
            expected = whole.position.learned_frequencies.grad
            if exact:
                torch.testing.assert_close(angles_of[1], angles_of[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-6)
            else:
                # Rounded to 8 bits, frequencies of 1 would be wrong by 0.002 and angles at column 7 by 0.014.
                torch.testing.assert_close(angles_of[1], angles_of[0], rtol=0, atol=2e-3)
                torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)
                assert nn.functional.cosine_similarity(mine.flatten(), expected.flatten(), dim=0) > 0.97
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert model.position.learned_frequencies.dtype == torch.float32
        rope.outer_rotations = outer_rotations


def _place_sharded() -> None:
    """A sharded video model places its steps by the seconds that it is given, in their own precision."""
    with distributed("cpu"):
        torch.manual_seed(0)
        model = vision_rope.video_vit(
            "vit_small_patch16_224", 4, (2, 4, 4), position="mixed-3d", positions_per_second=30.0, **SIZES
        )
        model, seen = shard(model), []
        outer_rotations = rope.outer_rotations

        def recorded(turns: Tensor, *others: object) -> list[vision_rope.Rotation]:
            seen.append(turns.detach().clone())
            return outer_rotations(turns, *others)

        rope.outer_rotations = recorded
        seconds = 3600 + torch.arange(4, dtype=torch.float64) / 30
        model(torch.randn(2, 3, 4, 24, 32), seconds.float()).sum().backward()
        model(torch.randn(2, 3, 4, 24, 32), seconds=seconds)
        rope.outer_rotations = outer_rotations
        frequencies = model.position.learned_frequencies.full_tensor()[:, :, 0]
        for turns, tolerance in zip(seen, (0.02, 1e-4), strict=True):  # float32 has 2e-4 seconds left after an hour
            assert not turns[:, :, 0].any()
            torch.testing.assert_close(turns[:, :, 1], 2 * frequencies.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_sharded_video_models_keep_seconds():
    run_two(_place_sharded)


@pytest.mark.integration
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_sharded_models_turn_by_exact_angles(param_dtype):
    """Failure class 12: learned frequencies stay float32 under FSDP2 with bf16 parameters, and are trained."""
    run_two(_train_sharded, param_dtype)


def _share_and_sum() -> None:
    with distributed("auto") as world:
        assert (world.world_size, world.is_main) == (2, world.rank == 0)
        assert world.share(f"from {world.rank}") == "from 0"
        values = torch.tensor([1.0, world.rank])
        assert world.sum(values).tolist() == [2.0, 1.0]
        assert values.tolist() == [1.0, world.rank], "the argument stays"
        assert isinstance(world.wrap(nn.Linear(1, 1)), nn.parallel.DistributedDataParallel)
        with distributed("cpu") as inner:
            assert (inner.rank, inner.world_size) == (world.rank, 2)
        world.barrier()
    assert not torch.distributed.is_initialized()


@pytest.mark.integration
def test_two_processes_join_share_and_leave():
    run_two(_share_and_sum)


def test_alone_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with distributed("cpu") as world:
        assert world == Distributed(torch.device("cpu"))
        assert world.is_main
        model = nn.Linear(1, 1)
        assert world.wrap(model) is model
        assert world.share("a") == "a"
        assert world.sum(torch.ones(1)).item() == 1
        world.barrier()


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="device is 'gpu', but it must be auto, cpu, cuda"):
        choose_device("gpu")
    with pytest.raises(ValueError, match=r"device is 'cuda:99', but this machine has \d+ CUDA devices"):
        choose_device("cuda:99")
    with pytest.raises(ValueError, match="under torchrun every process takes its own"):
        choose_device("cuda:1", local_rank=0)
    assert choose_device("cpu", local_rank=3) == torch.device("cpu")


def test_automatic_device_and_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("auto", local_rank=3) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert choose_precision("auto", torch.device("cuda")) == torch.float32, "emulated bf16 is slow"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert choose_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_precision("auto", torch.device("cpu")) == torch.float32
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16
    assert choose_precision("fp32", torch.device("cuda")) == torch.float32
    with pytest.raises(ValueError, match="precision is 'fp16', but it must be auto, fp32 or bf16"):
        choose_precision("fp16", torch.device("cpu"))


def test_a_batch_that_the_processes_cannot_share_is_refused(tmp_path):
    config = load_config(["--batch_size", "7", "--run.output", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="batch_size is 7, but 2 processes must share it evenly"):
        Trainer(config, Distributed(torch.device("cpu"), rank=0, world_size=2))
