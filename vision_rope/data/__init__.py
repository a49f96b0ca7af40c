"""Data sets, augmentation and loaders that put batches on the device."""

from vision_rope.data.augment import Mixing, eval_transform, train_transform
from vision_rope.data.datasets import DATASETS, open_dataset, take_evenly
from vision_rope.data.decode import BrokenImageError, decode_image
from vision_rope.data.loader import DeviceLoader, create_loader
from vision_rope.data.sources import ImageSource, IterableSource

__all__ = [
    "DATASETS",
    "BrokenImageError",
    "DeviceLoader",
    "ImageSource",
    "IterableSource",
    "Mixing",
    "create_loader",
    "decode_image",
    "eval_transform",
    "open_dataset",
    "take_evenly",
    "train_transform",
]
