"""A streaming video segmenter in the style of SAM 2: points, boxes or masks in a frame, masks in all that follow."""

from vision_rope.segmenter.building import create_segmenter
from vision_rope.segmenter.framing import FrameSizeError
from vision_rope.segmenter.network import FrameOutput
from vision_rope.segmenter.prompts import BoxPrompt, MaskPrompt, PointPrompt
from vision_rope.segmenter.sam2_weights import load_sam2, to_sam2
from vision_rope.segmenter.segmenter import VideoSegmenter
from vision_rope.segmenter.state import SegmenterState, TrackedObject
from vision_rope.segmenter.state_files import load_state, save_state

__all__ = [
    "BoxPrompt",
    "FrameOutput",
    "FrameSizeError",
    "MaskPrompt",
    "PointPrompt",
    "SegmenterState",
    "TrackedObject",
    "VideoSegmenter",
    "create_segmenter",
    "load_sam2",
    "load_state",
    "save_state",
    "to_sam2",
]
