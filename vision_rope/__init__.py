"""Rotary position embedding for vision transformers.

Names load their modules when they are first used, so that `import vision_rope` and `--help` stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vision_rope.attention import attend, attend_packed
    from vision_rope.checkpoint import load_model, load_run, save_model
    from vision_rope.convert import (
        add_position,
        convert_pairing,
        create_model,
        forward_packed,
        set_extension,
        timm_state_dict,
    )
    from vision_rope.linear_attention import linear_attend, performer_projection
    from vision_rope.memory import (
        MemoryAttention,
        MemoryBank,
        MemoryEncoder,
        MemoryEntry,
        MemoryPolicy,
        VideoMemory,
        replace_memory_attention,
    )
    from vision_rope.multimodal import Image, Text, Video, multimodal_positions
    from vision_rope.positions import (
        augment_positions,
        centred_positions,
        crop_positions,
        grid_positions,
        merge_order,
        pack_positions,
        pad_positions,
        with_prefix,
    )
    from vision_rope.rope import Rope, extend
    from vision_rope.rope_presets import preset, presets
    from vision_rope.rotation import Rotation, pairing_permutation, rotate, rotate_qkv
    from vision_rope.segmenter import (
        BoxPrompt,
        MaskPrompt,
        PointPrompt,
        SegmenterState,
        VideoSegmenter,
        create_segmenter,
        to_sam2,
    )
    from vision_rope.video.vit import video_vit

__version__ = "0.1.0"

_HOMES = {
    "positions": (
        "augment_positions",
        "centred_positions",
        "crop_positions",
        "grid_positions",
        "merge_order",
        "pack_positions",
        "pad_positions",
        "with_prefix",
    ),
    "multimodal": ("Image", "Text", "Video", "multimodal_positions"),
    "rotation": ("Rotation", "pairing_permutation", "rotate", "rotate_qkv"),
    "attention": ("attend", "attend_packed"),
    "linear_attention": ("linear_attend", "performer_projection"),
    "rope": ("Rope", "extend"),
    "rope_presets": ("preset", "presets"),
    "convert": (
        "add_position",
        "convert_pairing",
        "create_model",
        "forward_packed",
        "set_extension",
        "timm_state_dict",
    ),
    "memory": (
        "MemoryAttention",
        "MemoryBank",
        "MemoryEncoder",
        "MemoryEntry",
        "MemoryPolicy",
        "VideoMemory",
        "replace_memory_attention",
    ),
    "segmenter": (
        "BoxPrompt",
        "MaskPrompt",
        "PointPrompt",
        "SegmenterState",
        "VideoSegmenter",
        "create_segmenter",
        "to_sam2",
    ),
    "video.vit": ("video_vit",),
    "checkpoint": ("load_model", "load_run", "save_model"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BoxPrompt",
    "Image",
    "MaskPrompt",
    "MemoryAttention",
    "MemoryBank",
    "MemoryEncoder",
    "MemoryEntry",
    "MemoryPolicy",
    "PointPrompt",
    "Rope",
    "Rotation",
    "SegmenterState",
    "Text",
    "Video",
    "VideoMemory",
    "VideoSegmenter",
    "add_position",
    "attend",
    "attend_packed",
    "augment_positions",
    "centred_positions",
    "convert_pairing",
    "create_model",
    "create_segmenter",
    "crop_positions",
    "extend",
    "forward_packed",
    "grid_positions",
    "linear_attend",
    "load_model",
    "load_run",
    "merge_order",
    "multimodal_positions",
    "pack_positions",
    "pad_positions",
    "pairing_permutation",
    "performer_projection",
    "preset",
    "presets",
    "replace_memory_attention",
    "rotate",
    "rotate_qkv",
    "save_model",
    "set_extension",
    "timm_state_dict",
    "to_sam2",
    "video_vit",
    "with_prefix",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'vision_rope' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"vision_rope.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
