"""Data sets, augmentation and loaders that put batches on the device."""

from vision_rope.data.augment import Mixing, eval_transform, resize_batch, train_transform
from vision_rope.data.clip_sampling import ClipSampling
from vision_rope.data.clips import Clip, Clips, ClipSource
from vision_rope.data.datasets import DATASETS, open_dataset, take_evenly
from vision_rope.data.decode import BrokenFileError, BrokenImageError, decode_image
from vision_rope.data.decode_video import BrokenVideoError, decode_frames, list_frames
from vision_rope.data.loader import DeviceLoader, create_loader
from vision_rope.data.segmented_augment import segmented_eval_transform, segmented_train_transform
from vision_rope.data.segmented_clips import SegmentedClip, SegmentedClips, SegmentedSource
from vision_rope.data.sources import ImageSource, IterableSource
from vision_rope.data.streams import BrokenStreamError, FrameStream, StreamFrame, open_stream
from vision_rope.data.video_datasets import CLIP_DATASETS
from vision_rope.segmenter.framing import FrameSizeError

__all__ = [
    "CLIP_DATASETS",
    "DATASETS",
    "BrokenFileError",
    "BrokenImageError",
    "BrokenStreamError",
    "BrokenVideoError",
    "Clip",
    "ClipSampling",
    "ClipSource",
    "Clips",
    "DeviceLoader",
    "FrameSizeError",
    "FrameStream",
    "ImageSource",
    "IterableSource",
    "Mixing",
    "SegmentedClip",
    "SegmentedClips",
    "SegmentedSource",
    "StreamFrame",
    "create_loader",
    "decode_frames",
    "decode_image",
    "eval_transform",
    "list_frames",
    "open_dataset",
    "open_stream",
    "resize_batch",
    "segmented_eval_transform",
    "segmented_train_transform",
    "take_evenly",
    "train_transform",
]
