"""How a frame of any size is laid on a backbone's grid, and how its masks come back: the aspect ratio is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vision_rope.memory.encoder import MASK_STRIDE

Size = tuple[int, int]


@dataclass(frozen=True)
class Framing:
    """The sizes of a frame on its way through a segmenter; the padding is below and on the right.

    Attributes: frame, resized, padded: (height, width) in pixels, as it came, as it is looked at, with the padding.
    """

    frame: Size
    resized: Size
    padded: Size

    @staticmethod
    def fit(frame: Size, stride: int, image_size: int | None) -> Framing:
        """The framing of frames of a size.

        Args:
            stride: the padded size is a multiple of it.
            image_size: the long side that frames are resized to; None leaves them as they are.
        """
        if image_size is None:
            resized = frame
        else:
            scale = image_size / max(frame)
            resized = (max(1, round(frame[0] * scale)), max(1, round(frame[1] * scale)))
        height, width = (-(-side // stride) * stride for side in resized)
        return Framing(frame, resized, (height, width))

    def lay(self, frame: Tensor) -> Tensor:
        """Resize and pad a frame. The padding is zero, which is the mean colour of normalised frames.

        Shapes: (..., channels, height, width) -> (..., channels, *padded)
        """
        height, width = self.padded
        return functional.pad(_resize(frame, self.resized), (0, width - self.resized[1], 0, height - self.resized[0]))

    def lay_points(self, points: Tensor) -> Tensor:
        """Points (x, y) in pixels of the frame as shares of the padded one, from the edge of the first pixel on."""
        scale = points.new_tensor([self.resized[1] / self.frame[1], self.resized[0] / self.frame[0]])
        return (points * scale + 0.5) / points.new_tensor([self.padded[1], self.padded[0]])

    def lay_mask(self, mask: Tensor, grid: Size) -> Tensor:
        """Masks as the memory encoder sees them: 16 cells along an axis for each cell of the grid.

        Args:
            grid: (rows, columns) of the padded frame.

        Shapes: bool (objects, height, width) -> float (objects, 1, 16 * rows, 16 * columns), 0 or 1
        """
        laid = self.lay(mask[:, None].float())
        size = (MASK_STRIDE * grid[0], MASK_STRIDE * grid[1])
        return (_resize(laid, size) >= 0.5).float()

    def lift(self, mask_logits: Tensor) -> Tensor:
        """Logits of a grid as those of the frame's pixels.

        Shapes: (objects, 1, h, w) -> (objects, height, width)
        """
        x = functional.interpolate(mask_logits, size=self.padded, mode="bilinear", align_corners=False)
        return _resize(x[..., : self.resized[0], : self.resized[1]], self.frame)[:, 0]


def read_frame(frame: Any, device: torch.device) -> Tensor:
    """A frame as numbers from 0 to 1.

    Args:
        frame: an array or PIL image (height, width, 3), or a tensor (3, height, width); uint8, or floating point in
            [0, 1].

    Shapes: -> float32 (3, height, width)
    Raises: ValueError for anything else.
    """
    if isinstance(frame, Tensor):
        x = frame
    else:
        import numpy as np

        array = np.asarray(frame)
        if array.ndim != 3 or array.shape[-1] != 3:
            raise ValueError(
                f"frame has shape {array.shape}; an array must be (height, width, 3) in RGB, a tensor (3, height, "
                "width)"
            )
        # A copy: arrays of pictures and videos are often not writable, which torch warns of.
        x = torch.from_numpy(np.array(array)).permute(2, 0, 1)
    if x.ndim != 3 or x.shape[0] != 3 or 0 in x.shape:
        raise ValueError(
            f"frame has shape {tuple(x.shape)}; a tensor must be (3, height, width) in RGB, an array (height, width, 3)"
        )
    if x.dtype == torch.uint8:
        # The small numbers travel to the device.
        return x.to(device, non_blocking=True).float() / 255
    if not x.is_floating_point():
        raise ValueError(f"frame has dtype {x.dtype}; it must be uint8, or floating point from 0 to 1")
    return x.to(device, torch.float32, non_blocking=True)


def _resize(x: Tensor, size: Size) -> Tensor:
    if x.shape[-2:] == torch.Size(size):
        return x
    batch = x if x.ndim == 4 else x[None]
    out = functional.interpolate(batch, size=size, mode="bilinear", align_corners=False, antialias=True)
    return out if x.ndim == 4 else out[0]
