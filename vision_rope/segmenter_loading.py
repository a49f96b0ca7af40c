"""Segmenters from files: SAM 2 checkpoints, run folders, and their weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vision_rope.checkpoint import load_run, load_strictly, load_weights
from vision_rope.config import from_yaml
from vision_rope.memory.selection import MemoryPolicy
from vision_rope.model_building import build_model
from vision_rope.segmenter import VideoSegmenter
from vision_rope.segmenter.sam2_weights import is_sam2, load_sam2, read_checkpoint

UNSET: Any = object()


def load_segmenter(
    path: str | Path,
    *,
    weights: str = "best",
    image_size: int | None = UNSET,
    policy: MemoryPolicy | None = None,
    memory_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> VideoSegmenter:
    """A segmenter in evaluation mode.

    Args:
        path: a checkpoint of SAM 2 or 2.1 of any size (.pt of Meta or Ultralytics, or .safetensors), a folder of a run
            of task segmentation, or the best.safetensors of one.
        weights: of a run folder: best, last or ema.
        image_size: the long side in pixels that frames are resized to, None for as they are; 1024 of SAM 2 and that of
            training of a run when not given.
        policy, memory_dtype: as of `VideoSegmenter`.

    Raises: ValueError for a file that holds something else, FileNotFoundError where there is none.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give a SAM 2 checkpoint such as sam2.1_hiera_tiny.pt, a run folder or its "
            "best.safetensors"
        )
    if path.is_dir():
        model: Any = load_run(path, weights=weights, device=device).model
        segmenter = _only_segmenters(model, path)
    elif path.suffix == ".safetensors":
        state, metadata = load_weights(path)
        if is_sam2(state):
            segmenter = load_sam2(state)
        elif "config" in metadata:
            segmenter = _only_segmenters(build_model(from_yaml(metadata["config"]), 0, pretrained=False), path)
            load_strictly(segmenter, state, path)
        else:
            raise ValueError(f"{path} holds neither weights of SAM 2 nor those of a run")
    else:
        state = read_checkpoint(path)
        if not is_sam2(state):
            raise ValueError(f"{path} is no checkpoint of SAM 2: maskmem_tpos_enc or image_encoder.trunk is missing")
        segmenter = load_sam2(state)
    if image_size is not UNSET:
        segmenter.image_size = image_size
    if policy is not None:
        segmenter.policy = policy
    segmenter.memory_dtype = memory_dtype
    return segmenter.to(device).eval()


def _only_segmenters(model: Any, path: Path) -> VideoSegmenter:
    if not isinstance(model, VideoSegmenter):
        raise ValueError(f"{path} holds a {type(model).__name__}; only runs of task segmentation follow objects")
    return model
