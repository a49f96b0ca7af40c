"""Fixtures shared by all tests; threads are kept to one a worker so that two workers do not fight for two cores."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ultralytics looks up hosts and writes settings into the home folder unless told otherwise before its first import.
os.environ.setdefault("YOLO_OFFLINE", "1")
os.environ.setdefault("YOLO_AUTOINSTALL", "0")

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parent.parent


SHARED_DATA = Path(os.environ.get("VISION_ROPE_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real images and videos that is not part of the repository; tests that need it skip without it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data not found in {SHARED_DATA}; set VISION_ROPE_DATA to the folder that holds it")
    return SHARED_DATA


@pytest.fixture(scope="session")
def golden():
    """Loader of the peers' numbers: golden("dinov3") -> dict of tensors.

    Some of the files are in the repository, all of them beside the real data; a test whose file is in neither skips.
    """
    beside_data = SHARED_DATA.parent / "golden"
    folders = (REPOSITORY / "tests" / "golden", beside_data / "rope", beside_data / "memory")

    def load(name: str) -> dict[str, torch.Tensor]:
        for folder in folders:
            path = folder / f"{name}.npz"
            if path.is_file():
                with np.load(path) as arrays:
                    return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
        pytest.skip(f"the peers' numbers {name}.npz are in none of {', '.join(map(str, folders))}")

    return load


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
