"""Ultralytics' SAM 2: the only file that imports it (extra `[ultralytics]`, AGPL-3.0), and only when asked to."""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vision_rope.memory.replace import read_rope
from vision_rope.rope import Rope

# Those that Ultralytics builds; here so that they are known without importing it.
SAM2_NAMES = tuple(f"sam{version}_{size}" for version in ("2", "2.1") for size in "tsbl")

# Without these, importing it looks up hosts, installs packages at run time and writes settings into the home folder.
SWITCHES = {"YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0", "YOLO_VERBOSE": "false"}


def ultralytics_module(name: str) -> ModuleType:
    """Import a module of Ultralytics, with its offline switches set and the environment left as it was.

    Args:
        name: dotted name without the package's own, for instance "models.sam.modules.utils".

    Raises: ImportError where the extra is not installed.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="vision_rope_") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns on some platforms
        for switch, value in {**SWITCHES, "YOLO_CONFIG_DIR": folder}.items():
            os.environ.setdefault(switch, value)
        try:
            return importlib.import_module(f"ultralytics.{name}")
        finally:
            # It sets variables that silence the logs of torch's C++ code in this process and its children.
            os.environ.clear()
            os.environ.update(before)


def build_sam2(name: str) -> Any:
    """A SAM 2 model of Ultralytics with random weights, by its name: sam2_t, sam2.1_l, ...

    Ultralytics tells 2.1 from a checkpoint's name, so that without one it builds the parts of 2.0; memory attention is
    the same in both.

    Raises: ValueError where the extra is not installed.
    """
    try:
        models = ultralytics_module("models.sam.build").sam_model_map
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name} is a SAM 2 model, and {error.name} is missing: pip install 'vision-rope[ultralytics]'"
        ) from error
    return models[f"{name}.pt"]()


def load_sam2_memory(path: str | Path) -> Any:
    """A SAM 2 model of Ultralytics whose memory attention has the weights of a checkpoint; the rest stays random.

    Memory attention is the same in all sizes of SAM 2, so the size needs not be known.

    Raises: ValueError for a file that holds more than tensors, or no memory attention of SAM 2.
    """
    try:
        # Without weights_only a checkpoint could run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises depends on the byte
        raise ValueError(f"{path} is no checkpoint of tensors alone, which a SAM 2 checkpoint is") from error
    state = state if isinstance(state, dict) else {}
    state = state["model"] if isinstance(state.get("model"), dict) else state
    prefix = "memory_attention."
    own = {str(key).removeprefix(prefix): value for key, value in state.items() if str(key).startswith(prefix)}
    model = build_sam2(SAM2_NAMES[0])
    try:
        model.memory_attention.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the memory attention of SAM 2 ({prefix}layers. ...)") from error
    return model


def memory_rope(model: Any) -> Rope:
    """The rotary embedding of a SAM 2 model's memory attention, which all its attention layers share.

    Raises: ValueError where they do not share one.
    """
    return read_rope(model.memory_attention, depth=len(model.memory_attention.layers))
