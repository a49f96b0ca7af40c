"""Weights of SAM 2 and SAM 2.1, as Meta and Ultralytics publish them, in a `VideoSegmenter` and back.

Both publishers use the same names. The version is told from the names, the size from the shapes: never from the name
of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_rope.memory.selection import MemoryPolicy
from vision_rope.memory.video_memory import PARTS, load_video_memory
from vision_rope.segmenter.backbone import create_backbone
from vision_rope.segmenter.mask_decoder import MaskDecoder
from vision_rope.segmenter.prompt_encoder import PromptEncoder
from vision_rope.segmenter.segmenter import VideoSegmenter

# The long side of frames that SAM 2 was trained at, in pixels.
IMAGE_SIZE = 1024
# timm's names of the trunks, by channels after the first stage and number of blocks.
TRUNKS = {
    (96, 12): "sam2_hiera_tiny",
    (96, 16): "sam2_hiera_small",
    (112, 24): "sam2_hiera_base_plus",
    (144, 48): "sam2_hiera_large",
}
# Beginnings of names: SAM 2's and this package's.
NAMES = (
    ("image_encoder.trunk.", "backbone.trunk."),
    ("image_encoder.neck.", "backbone.neck."),
    ("sam_prompt_encoder.", "prompt_encoder."),
    ("sam_mask_decoder.", "mask_decoder."),
    ("mask_downsample.", "mask_downsample."),
    *((part, f"memory.{part}") for part in PARTS),
)
# timm calls the two layers of a trunk's perceptrons otherwise.
TRUNK_NAMES = ((".mlp.layers.0.", ".mlp.fc1."), (".mlp.layers.1.", ".mlp.fc2."))


def is_sam2(state_dict: Mapping[str, Any]) -> bool:
    """Whether names are those of a whole SAM 2 model."""
    return "maskmem_tpos_enc" in state_dict and any(name.startswith("image_encoder.trunk.") for name in state_dict)


def load_sam2(
    state_dict: Mapping[str, Tensor],
    *,
    image_size: int | None = IMAGE_SIZE,
    policy: MemoryPolicy | None = None,
    memory_dtype: torch.dtype | None = None,
) -> VideoSegmenter:
    """The segmenter of a SAM 2 or 2.1 checkpoint of any size, in evaluation mode.

    Args:
        state_dict: the weights themselves, which checkpoints keep under the key "model".
        image_size, policy, memory_dtype: as of `VideoSegmenter`.

    Raises: ValueError where weights are missing, of other shapes or unknown.
    """
    prefix = "image_encoder.trunk.blocks."
    try:
        width = state_dict["image_encoder.trunk.pos_embed"].shape[1]
        depth = len({name[len(prefix) :].split(".")[0] for name in state_dict if name.startswith(prefix)})
        trunk = TRUNKS[width, depth]
    except KeyError as error:
        sizes = ", ".join(map(str, TRUNKS))
        raise ValueError(
            f"the trunk of SAM 2 cannot be told from {error.args[0]}, which must be a weight that is there, and "
            f"(channels, blocks) one of {sizes}"
        ) from None
    memory = load_video_memory(state_dict)
    dim = memory.memory_encoder.dim
    segmenter = VideoSegmenter(
        create_backbone(trunk, dim),
        memory,
        PromptEncoder(dim),
        MaskDecoder(dim),
        image_size=image_size,
        train_size=(IMAGE_SIZE, IMAGE_SIZE),
        policy=policy,
        memory_dtype=memory_dtype,
    )
    try:
        segmenter.load_state_dict(from_sam2(state_dict))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"these are not the weights of SAM {memory.version} with {trunk}: {error}") from error
    return segmenter.eval()


def from_sam2(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under this package's names.

    Raises: ValueError for a name that SAM 2 does not have.
    """
    return {_rename(name, 0, 1): value for name, value in state_dict.items()}


def to_sam2(segmenter: VideoSegmenter) -> dict[str, Tensor]:
    """Weights of a segmenter with SAM 2's trunk under SAM 2's names, for Meta's and Ultralytics' loaders.

    Save them with `torch.save({"model": to_sam2(segmenter)}, path)`. Ultralytics tells the version from the name of the
    file, which must hold "sam2.1" for weights of 2.1.

    Raises: ValueError for a segmenter with another backbone.
    """
    if type(getattr(segmenter.backbone, "trunk", None)).__name__ != "HieraDet":
        raise ValueError("the backbone is not SAM 2's Hiera; only weights with it have names in SAM 2")
    return {_rename(name, 1, 0): value for name, value in segmenter.state_dict().items()}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The tensors of a checkpoint of torch, without running code from it.

    Raises: ValueError for a file that holds more than tensors, or is damaged; FileNotFoundError.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises depends on the byte
        raise ValueError(f"{path} is no checkpoint of tensors alone; it may be damaged, or hold objects") from error
    inner = loaded.get("model", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(inner, dict) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise ValueError(f"{path} holds no state dict, neither by itself nor under the key 'model'")
    return inner


def _rename(name: str, old: int, new: int) -> str:
    for pair in NAMES:
        if name.startswith(pair[old]):
            renamed = pair[new] + name.removeprefix(pair[old])
            if ".trunk." in renamed:
                for part in TRUNK_NAMES:
                    renamed = renamed.replace(part[old], part[new])
            return renamed
    raise ValueError(f"{name} is no name of a weight of {'SAM 2' if old == 0 else 'a segmenter'}")
