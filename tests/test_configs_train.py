"""The configurations train on real pictures, through the command that their headers name."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CIFAR = sorted(path.stem for path in (ROOT / "configs").glob("cifar10_*.yaml"))


def unpack(tar_file: Path, folder: Path, per_class: int) -> Path:
    """The first pictures of every class of a pack, as train/CLASS and val/CLASS."""
    taken: dict[Path, int] = {}
    with tarfile.open(tar_file) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            parent = Path(member.name).parent
            if member.isfile() and taken.get(parent, 0) < per_class:
                taken[parent] = taken.get(parent, 0) + 1
                tar.extract(member, folder, filter="data")
    # The packs may hold their folders inside one of their own name.
    return next(path.parent for path in folder.rglob("train") if path.is_dir())


@pytest.fixture(scope="module")
def cifar(shared_data, tmp_path_factory):
    return unpack(shared_data / "cifar10_small.tar", tmp_path_factory.mktemp("cifar"), per_class=60)


@pytest.fixture(scope="module")
def imagenette(shared_data, tmp_path_factory):
    return unpack(shared_data / "imagenette224_small.tar", tmp_path_factory.mktemp("imagenette"), per_class=30)


def train(config: str, data: Path, output: Path, epochs: int, sizes: str) -> list[dict]:
    flags = {
        "data.source": f"folder:{data}",
        "schedule.epochs": epochs,
        "schedule.warmup_epochs": 0,
        "evaluation.sizes": sizes,
        "run.output": output,
        "run.progress": "false",
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "train.py", "--config", f"configs/{config}.yaml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert str(output / "evaluation" / "evaluation.png") in done.stdout
    return json.loads((output / "evaluation" / "evaluation.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("config", CIFAR)
def test_cifar10(config, cifar, tmp_path):
    rows = train(config, cifar, tmp_path / "run", epochs=2, sizes="[32, 24x32]")
    assert {row["size"] for row in rows if row["method"] == "none" and row["nll"] is not None} == {"32", "24x32"}
    first, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["train_loss"] < json.loads(first)["train_loss"]


@pytest.mark.slow
def test_imagenette(imagenette, tmp_path):
    rows = train("imagenette", imagenette, tmp_path / "run", epochs=1, sizes="[160, 96x128]")
    assert {row["size"] for row in rows if row["method"] == "none" and row["nll"] is not None} == {"160", "96x128"}
