"""Weights and training states on disk: written so that a kill leaves the previous ones whole, read strictly.

Weights are safetensors files with plain parameter names. Training states are tensors and numbers that
`torch.load(weights_only=True)` accepts; nothing that is loaded here can run code.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_rope.config import TrainConfig, load_yaml
from vision_rope.model_building import build_model
from vision_rope.suggestion import did_you_mean
from vision_rope.weight_metadata import adopt_pairing, describe_position, warn_of_another_kind

Model = TypeVar("Model", bound=nn.Module)

# torch.compile and DDP put these before the names of the parameters.
WRAPPER_PREFIXES = ("_orig_mod.", "module.")
# By this name the weights of masked prediction are known.
MASK_TOKEN = "mask_token"


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A trained model in evaluation mode, the configuration that made it and the names of its classes."""

    model: nn.Module
    config: TrainConfig
    classes: list[str]

    def __repr__(self) -> str:
        # Without the layers of the model and all keys, which fill pages.
        name = f"{self.config.model.name} with {self.config.model.position}"
        return f"LoadedRun(model={name}, task={self.config.task}, {len(self.classes)} classes)"


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take the prefixes of torch.compile and DDP off parameter names."""
    plain = {}
    for name, value in state.items():
        while name.startswith(WRAPPER_PREFIXES):
            name = name.removeprefix("_orig_mod.").removeprefix("module.")
        plain[name.replace("._orig_mod.", ".")] = value
    return plain


def save_weights(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write weights with what is needed to use them; a kill leaves the previous file or the new one.

    Values of `metadata` that are not text are stored as JSON.
    """
    from safetensors.torch import save

    # Tied parameters share storage, which the format refuses: every name gets its own copy.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in plain_names(state).items()}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    write_whole(path, save(tensors, texts))


def save_model(path: str | Path, model: nn.Module, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a model's weights with its position encoding and pairing, which they do not tell by themselves.

    `load_model`, `model.checkpoint` of a configuration and `vision-rope evaluate --checkpoint` bring them into the
    pairing of the model that they load them into.

    Raises:
        ValueError: for a path that is no .safetensors file, or whose folder there is not.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(model, nn.Module):
        raise ValueError(
            f"path is a {type(path).__name__} and model a {type(model).__name__}; give the path first, then the model: "
            "save_model('weights.safetensors', model)"
        )
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path is {path}, but weights are written as .safetensors; give it that ending")
    if not path.parent.is_dir():
        raise ValueError(f"path is {path}, but there is no folder {path.parent}; make it first")
    save_weights(path, model.state_dict(), {**(metadata or {}), **describe_position(model)})


def load_model(model: Model, path: str | Path) -> Model:
    """Load a file of `save_model` into a model that is built as the saved one was; every name and shape must match.

    Weights stored in another pairing are brought into the model's. A file of another position encoding, or of the same
    with other options, is loaded with a warning.

    Returns the model, which is changed in place.

    Raises:
        ValueError: where the file is missing, damaged or does not fit the model.
    """
    if not isinstance(model, nn.Module) or not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"model is a {type(model).__name__} and path a {type(path).__name__}; give the model first, then the path: "
            "load_model(model, 'weights.safetensors')"
        )
    if Path(path).is_dir():
        raise ValueError(f"path is {path}, which is a folder; load_run(folder) loads run folders")
    state, metadata = load_weights(path)
    plain: Any = model
    while hasattr(plain, "_orig_mod") or isinstance(plain, nn.parallel.DistributedDataParallel):
        plain = plain._orig_mod if hasattr(plain, "_orig_mod") else plain.module
    warn_of_another_kind(plain, metadata, path)
    load_strictly(plain, state, path)
    adopt_pairing(plain, metadata, path)
    return model


def load_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read weights and metadata of a safetensors file.

    Raises:
        ValueError: where the file is missing, damaged or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is not a .safetensors file; other formats can run code when they are loaded")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error


def load_strictly(model: nn.Module, state: Mapping[str, Tensor], source: str | Path) -> None:
    """Load weights that must match the model name by name and shape by shape.

    Those of an image model fit the model of videos that is made of it.

    Raises:
        ValueError: listing the missing, the unknown and the differently shaped names.
    """
    own = model.state_dict()
    state = inflate_weights(model, plain_names(state))
    faults = []
    if missing := [name for name in own if name not in state]:
        faults.append(f"it lacks {_some(missing)}")
    if unknown := [name for name in state if name not in own]:
        faults.append(f"the model has no {_some(unknown)}")
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if shapes:
        faults.append(f"shapes differ: {_some(shapes)}")
    if faults:
        raise ValueError(f"{source} does not fit the model: {'; '.join(faults)}")
    model.load_state_dict(dict(state), strict=True)


def inflate_weights(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an image model as those of the video model made of it; all others stay as they are."""
    parts: dict[str, Any] = {"": model, "encoder.": getattr(model, "encoder", None)}
    for prefix, part in parts.items():
        if hasattr(part, "inflate_weights"):
            state = part.inflate_weights(state, prefix)
    return state


def load_run(folder: str | Path, *, weights: str = "best", device: str | torch.device = "cpu") -> LoadedRun:
    """Load the model of a run folder: weights best (averaged ones where averaging is on), last or ema.

    Returns `model` in evaluation mode, the `config` that made it, and `classes`, their names in order.

    Raises:
        ValueError: where the folder holds no run, those weights are missing or do not fit.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not a run folder: it holds no config.yaml")
    files = {"best": "best.safetensors", "last": "model.safetensors", "ema": "ema.safetensors"}
    if weights not in files:
        raise ValueError(f"weights is {weights!r}, but it must be best, last or ema{did_you_mean(weights, files)}")
    parent = folder if weights == "best" else find_last(folder)
    if parent is None or not (parent / files[weights]).is_file():
        reason = "averaging was off (ema_decay: none)" if weights == "ema" and parent else "no epoch was finished"
        if weights == "best" and find_last(folder) is not None:
            reason = f"{files[weights]} is missing"
        raise ValueError(f"{folder} holds no {weights} weights: {reason}")
    config = load_yaml(folder / "config.yaml")
    state, metadata = load_weights(parent / files[weights])
    classes = json.loads(metadata["classes"])
    model = build_model(config, len(classes), pretrained=False)
    load_strictly(model, state, parent / files[weights])
    adopt_pairing(model, metadata, parent / files[weights])
    return LoadedRun(model.to(device).eval(), config, classes)


def save_last(
    folder: Path,
    state: Mapping[str, Any],
    *,
    weights: Mapping[str, Tensor],
    ema: Mapping[str, Tensor] | None,
    metadata: Mapping[str, Any],
) -> None:
    """Replace folder/last by a new one as a whole; a kill at any time leaves one that `find_last` finds."""
    new, last, old = folder / "last.tmp", folder / "last", folder / "last.old"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_weights(new / "model.safetensors", weights, metadata)
    if ema is not None:
        save_weights(new / "ema.safetensors", ema, metadata)
    with (new / "state.pt").open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(new)
    if last.exists():
        shutil.rmtree(old, ignore_errors=True)
        last.rename(old)
    new.rename(last)
    _sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def find_last(folder: Path) -> Path | None:
    """The newest whole last/ of a run folder, or None; last.old is it after a kill between two renames."""
    return next((path for path in (folder / "last", folder / "last.old") if path.is_dir()), None)


def load_state(path: Path) -> dict[str, Any]:
    """Read a training state without running code.

    Raises:
        ValueError: where the file is missing, damaged or holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        # Without torch's own words, which advise to load it unsafely.
        raise ValueError(
            f"{path} is no training state that can be loaded safely: it is missing, damaged or holds more than tensors "
            "and plain values"
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, flush to disk, rename: readers and kills meet the previous file or the new one."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _some(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
